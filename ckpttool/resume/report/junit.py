"""The report as JUnit XML, for CI systems.

render_junit(report) -> str
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from ...printable import escape_unprintable, list_first
from ..compare.verdict import Check, Report
from ..text import format_number
from .facts import count_checks, describe_verdict, format_bound, list_facts, list_speed

__all__ = ["render_junit"]


def render_junit(report: Report) -> str:
    """Return the report as JUnit XML, with a test case for each check; what could not be compared is skipped.

    Where the verdict as a whole is "not comparable" there is one more test case with an error, since a file in which
    everything is skipped would look like success.
    """
    from xml.etree import ElementTree as Xml

    failed, aside = count_checks(report, "fail"), count_checks(report, "not comparable")
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
    for what, ours, theirs in list_facts(report):
        given[what] = ours
        if theirs:
            given[f"reference {what}"] = theirs
    given |= {"step time" if what == "step" else what: value for what, value in list_speed(report)}
    given |= report.versions | report.candidate.environment
    given |= {f"not verified {i}": line for i, line in enumerate(report.not_verified, 1)}
    for key, value in given.items():
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        Xml.SubElement(
            properties, "property", {"name": escape_unprintable(key, 200), "value": escape_unprintable(text, 1000)}
        )
    for c in report.checks:
        case = Xml.SubElement(
            suite,
            "testcase",
            {"classname": f"resume.{escape_unprintable(c.stage)}", "name": escape_unprintable(c.name)},
        )
        if c.verdict == "not comparable":
            Xml.SubElement(case, "skipped", {"message": escape_unprintable(c.text)})
        elif c.verdict == "fail":
            failure = Xml.SubElement(
                case, "failure", {"message": escape_unprintable(c.text), "type": escape_unprintable(c.stage)}
            )
            failure.text = "\n".join(_explain_failure(report, c))
    if unjudged:
        case = Xml.SubElement(suite, "testcase", {"classname": "resume", "name": "verdict"})
        Xml.SubElement(case, "error", {"message": describe_verdict(report), "type": "not comparable"})
    if report.not_verified:
        lines = ["not verified by this run:", *(f"- {escape_unprintable(line)}" for line in report.not_verified)]
        Xml.SubElement(suite, "system-out").text = "\n".join(lines)
    Xml.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + Xml.tostring(root, encoding="unicode") + "\n"


def _explain_failure(report: Report, check: Check) -> Iterator[str]:
    """Yield the lines about a failed check: what was found, where, and the likely causes."""
    yield escape_unprintable(check.text)
    if check.number is not None:
        yield f"found {format_number(check.number, 6)}" + (
            f", bound {format_bound(check)}" if check.bound is not None else ""
        )
    if check.where:
        yield f"where: {escape_unprintable(check.where)}"
    for cause in report.causes:
        yield f"likely cause: {escape_unprintable(cause.text)}"
        yield from (f"  - {escape_unprintable(line)}" for line in cause.evidence)
        if cause.tensors:
            yield f"  tensors: {list_first(map(escape_unprintable, cause.tensors), 10)}"
        if cause.place:
            yield f"  place: {escape_unprintable(cause.place)}"
