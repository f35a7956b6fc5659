"""The report as JUnit XML, for CI systems.

junit(report) -> str
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from ..compare.verdict import Check, Report
from ..text import clean, number
from .facts import count, facts, limit, sentence, speed

__all__ = ["junit"]


def junit(report: Report) -> str:
    """JUnit XML: a test case a check; what could not be compared is skipped.

    Where the verdict as a whole is "not comparable" there is one more test case with an error, since a file in which
    everything is skipped would look like success.
    """
    from xml.etree import ElementTree as Xml

    failed, aside = count(report, "fail"), count(report, "not comparable")
    unjudged = report.word == "not comparable"
    tests = {
        "name": "ckpttool resume-verify",
        "tests": str(len(report.checks) + unjudged),
        "failures": str(failed),
        "errors": str(int(unjudged)),
        "skipped": str(aside),
    }
    root = Xml.Element("testsuites", tests)
    suite = Xml.SubElement(root, "testsuite", tests)
    properties = Xml.SubElement(suite, "properties")
    given: dict[str, object] = {"verdict": report.word, "profile": report.profile, "calibrated": report.calibrated}
    for what, ours, theirs in facts(report):
        given[what] = ours
        if theirs:
            given[f"reference {what}"] = theirs
    given |= {"step time" if what == "step" else what: value for what, value in speed(report)}
    given |= report.versions | report.candidate.environment
    given |= {f"not verified {i}": line for i, line in enumerate(report.not_verified, 1)}
    for key, value in given.items():
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        Xml.SubElement(properties, "property", {"name": clean(key, 200), "value": clean(text, 1000)})
    for c in report.checks:
        case = Xml.SubElement(suite, "testcase", {"classname": f"resume.{clean(c.stage)}", "name": clean(c.name)})
        if c.verdict == "not comparable":
            Xml.SubElement(case, "skipped", {"message": clean(c.text)})
        elif c.verdict == "fail":
            failure = Xml.SubElement(case, "failure", {"message": clean(c.text), "type": clean(c.stage)})
            failure.text = "\n".join(_explained(report, c))
    if unjudged:
        case = Xml.SubElement(suite, "testcase", {"classname": "resume", "name": "verdict"})
        Xml.SubElement(case, "error", {"message": sentence(report), "type": "not comparable"})
    if report.not_verified:
        lines = ["not verified by this run:", *(f"- {clean(line)}" for line in report.not_verified)]
        Xml.SubElement(suite, "system-out").text = "\n".join(lines)
    Xml.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + Xml.tostring(root, encoding="unicode") + "\n"


def _explained(report: Report, check: Check) -> Iterator[str]:
    yield clean(check.text)
    if check.number is not None:
        yield f"found {number(check.number, 6)}" + (f", bound {limit(check)}" if check.bound is not None else "")
    if check.where:
        yield f"where: {clean(check.where)}"
    for cause in report.causes:
        yield f"likely cause: {clean(cause.text)}"
        yield from (f"  - {clean(line)}" for line in cause.evidence)
        if cause.tensors:
            more = f" and {len(cause.tensors) - 10} more" if len(cause.tensors) > 10 else ""
            yield "  tensors: " + ", ".join(clean(n) for n in cause.tensors[:10]) + more
        if cause.place:
            yield f"  place: {clean(cause.place)}"
