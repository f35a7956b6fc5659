"""What a person, a CI system, Prometheus and a browser get to see of a Report."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as Xml

import markupsafe
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pages import Browser, browser, program
from peers import REPOSITORY
from rich.cells import cell_len
from rich.console import Console

from ckpttool.errors import NoSpace, UsageError
from ckpttool.resume.compare.misfit import describe_misfit
from ckpttool.resume.compare.verdict import Cause, Check, Report
from ckpttool.resume.report.facts import (
    compute_relative_difference,
    describe_verdict,
    list_facts,
    pair_steps_with_reference,
)
from ckpttool.resume.report.files import write_reports
from ckpttool.resume.report.html_page import render_html
from ckpttool.resume.report.junit import render_junit
from ckpttool.resume.report.prometheus import METRICS as ALL_METRICS
from ckpttool.resume.report.prometheus import render_metrics
from ckpttool.resume.report.terminal import render_terminal
from ckpttool.resume.trace.model import OF_BUILD, Step, Trace

ALERTS = REPOSITORY / "ckpttool" / "resume" / "report" / "alerts.yml"
SCRIPT = '<script>window.hacked=1;alert(1)</script><img src=x onerror="window.hacked=1">'
HOSTILE = [
    SCRIPT,
    'a"b\n',
    "\x1b[2J\x1b]0;title\x07",
    "x" * 500,
    "</script></title></style>",
    "\ud800",
    "\u202egnp",
    "{{}}[bold]&amp;",
]


def name(i: int) -> str:
    part = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    return f"model.layers.{i // 6}.{part[i % 6]}.weight"


def trace(
    steps: int = 5, *, world: int = 2, apart: float = 0.0, tensors: int = 12, ranks: int | None = None, **more: Any
) -> Trace:
    """A run of steps 301 and so on; `apart` is how far each number is from what it would be otherwise."""
    made = []
    for i in range(steps):
        off = 1 + apart * (i + 1)
        made.append(Step(
            step=301 + i, loss=(2.5 - 0.04 * i + 0.05 * math.sin(i * 1.7)) * off,
            grad_norm=(0.81 + 0.2 * math.cos(i * 2.3)) * off, update_norm=(0.0123 + 0.0004 * math.sin(i)) * off,
            learning_rates=[3e-4, 3e-4], batch=f"{i:064x}", tokens=64 * 128, seconds=0.52 + 0.01 * (i % 3),
            losses=[(2.5 - 0.04 * i) * off] * world,
            grads={name(t): (0.01 + t / 1000) * (1 + apart * (t % 7)) for t in range(tensors)} if not i else {},
            updates={name(t): (0.001 + t / 9000) * (1 + apart * (t % 5)) for t in range(tensors)} if not i else {},
        ))  # fmt: skip
    gib = 2**30
    memory = [
        {"rank": r, "allocated_bytes": int((41 + 3 * math.sin(r)) * gib), "reserved_bytes": int((52 + 4 * math.cos(r)) * gib),
         "total_bytes": 80 * gib}
        for r in range(world if ranks is None else ranks)
    ]  # fmt: skip
    given: dict[str, Any] = {
        "source": "/ckpt/llama/step-300", "layout": "dcp", "start": 300, "world_size": world, "mesh": {"dp": world},
        "device": "NVIDIA H200", "dtype": "bfloat16", "seed": 7, "data": "tokens.bin", "global_batch": 64, "micro_batch": 8,
        "sequence": 128, "clip": 1.0, "parameters": 8_030_261_248, "load_seconds": 12.5, "load_bytes": 96_000_000_000,
        "memory": memory, "environment": {"torch": "2.13.0", "nccl": "2.27", "deterministic": True},
    }  # fmt: skip
    return Trace(**{**given, **more, "steps": made})


PASSING = [
    Check("state", "state.tensors", "pass", "All 291 tensors have the fingerprints of the files.", 0, 0, "exact"),
    Check("state", "state.names", "pass", "The job holds the tensors of the checkpoint and no others.", 0, 0, "exact"),
    Check("configuration", "configuration.groups", "pass", "The param groups are those of the reference."),
    Check("probe", "probe.logits", "pass", "The logits of the probe are equal.", 0.0, 1e-6, "measured"),
    Check(
        "step 1", "step1.loss", "pass", "The loss of the first step is that of the reference.", 1.2e-7, 1e-5, "measured"
    ),
    Check(
        "step 1",
        "step1.update_norm",
        "pass",
        "The optimizer moved the parameters as far as it did.",
        3e-6,
        2e-3,
        "measured",
    ),
    Check("steps", "steps.loss", "pass", "Every loss lies in the envelope.", 4e-7, 5e-3, "measured", "step 305"),
    Check("run", "run.finite", "pass", "Every loss and every norm is finite."),
    Check(
        "round trip",
        "roundtrip.tensors",
        "pass",
        "What was saved after the first step reads back equal.",
        0,
        0,
        "exact",
    ),
    Check("gate", "gate.min_mfu", "pass", "MFU is at least 0.4.", 0.43, 0.4, "given"),
]
METRICS = {
    "mfu": 0.43, "tokens_per_second": 15_753.846, "step_seconds": 0.52, "load_seconds": 12.5, "load_gb_per_second": 7.68,
    "save_seconds": 9.1, "reserved_gib": 56.0, "allocated_gib": 44.0,
}  # fmt: skip
VERSIONS = {"ckpttool": "0.5.0", "torch": "2.13.0", "python": "3.12.4"}


def envelope(n: int) -> dict[str, list[float]]:
    return {q: [1e-5 if not i else 5e-4 * (1 + i / 2) for i in range(n)] for q in ("loss", "grad_norm", "update_norm")}


def passing(steps: int = 5, **more: Any) -> Report:
    reference = trace(steps, world=4, source="/ckpt/llama/reference.jsonl", memory=[])
    given: dict[str, Any] = {
        "candidate": trace(steps, apart=1e-7), "reference": reference, "profile": "standard", "checks": list(PASSING),
        "envelope": envelope(steps), "metrics": METRICS, "versions": VERSIONS,
    }  # fmt: skip
    return Report(**{**given, **more})


def failing(steps: int = 5) -> Report:
    """The optimizer's state did not come along: first update 3.3 times too large, losses run away."""
    report = passing(steps)
    report.candidate = trace(steps, apart=0.003)
    for s in report.candidate.steps:
        s.update_norm = (s.update_norm or 0) * 3.3
        s.updates = {k: v * 3.3 for k, v in s.updates.items()}
    report.checks[5] = Check(
        "step 1", "step1.update_norm", "fail", "The first update is 3.3 times as large as that of the reference.", 2.31, 2e-3,
        "measured", "model.layers.0.mlp.down_proj.weight",
    )  # fmt: skip
    report.checks[6] = Check("steps", "steps.loss", "fail", "The loss of step 305 lies outside of the envelope.", 0.015, 5e-3, "measured", "step 305")  # fmt: skip
    report.checks[8] = Check(
        "round trip", "roundtrip.tensors", "not comparable", "There was no room on the disk to save."
    )
    report.causes = [
        Cause("optimizer-missing", "The optimizer started anew: its moments were not loaded.",
              ["update norm is 3.3 times that of the reference in step 1, on all tensors", "gradients of step 1 are equal",
               "exp_avg is zero on every rank"], [name(i) for i in range(40)], "__0_0.distcp, bytes 4096 to 1052672, rank 0"),
        Cause("step-reset", "The optimizer counts its steps from 1 again, so its bias correction is that of a fresh start.",
              ["optim.state.step is 0, and the checkpoint has 300"]),
    ]  # fmt: skip
    report.not_verified = [
        "faults of job, data, loss or model configuration: both runs were built from /models/llama-3-8b",
        "dropout (probability up to 0.1): it was switched off",
        "the scheduler at work: the job has none, so the later learning rates are the reference's",
        "compared as stored, but not used by this job: random states, dataloader, grad scaler, other values",
        "only in this checkpoint, so compared with nothing: trainer.global_step, extra.callbacks and 12 more",
        "roundtrip.tensors: There was no room on the disk to save.",
        "probe.logits, probe.ranks: the reference has no probe",
    ]
    report.candidate.notes = [
        "The checkpoint has no state of the random generators; dropout is off, so none is needed."
    ]
    return report


def alone() -> Report:
    """A run without a reference."""
    report = passing()
    report.reference, report.envelope = None, {}
    report.checks = [c for c in report.checks if c.stage in ("state", "run", "round trip")]
    return report


def unlike() -> Report:
    """The reference took other batches."""
    report = passing()
    for i, c in enumerate(report.checks):
        if c.stage in ("step 1", "steps", "probe"):
            report.checks[i] = Check(c.stage, c.name, "not comparable", "The batches are others.")
    for s in report.candidate.steps:
        s.batch = "other"
    return report


def unfit() -> Report:
    """Every name begins with a module that the job does not have."""
    misfit = {"missing": [name(0)], "surplus": [f"net.{name(0)}"], "shapes": {}, "prefix": "net.", "job_prefix": ""}
    ours = trace(
        0,
        failed='/ckpt/llama/step-300 does not fit the job: the model has "w", which the checkpoint lacks.',
        misfit=misfit,
    )
    checks = [Check("state", "state.loaded", "fail", "the checkpoint could not be loaded into the job", source="exact")]
    report = Report(ours, trace(5), "standard", checks)
    report.causes = [Cause("does-not-fit", describe_misfit(ours), [str(ours.failed)])]
    report.not_verified = ["everything after loading: the checkpoint could not be loaded"]
    return report


def gated() -> Report:
    report = passing()
    report.checks[-1] = Check(
        "gate", "gate.min_mfu", "fail", "MFU is 0.31, and at least 0.4 was asked for.", 0.31, 0.4, "given"
    )
    return report


def hostile() -> Report:
    """Every text that can come from a checkpoint or from a file of somebody else tries to get out of its place."""
    report = passing(8)
    ours, theirs = report.candidate, report.reference
    assert theirs is not None
    ours.source, ours.layout, ours.dtype, ours.device, ours.data = (
        HOSTILE[0],
        HOSTILE[1],
        HOSTILE[2],
        HOSTILE[3],
        HOSTILE[4],
    )
    ours.mesh, ours.notes = {HOSTILE[0]: 2}, list(HOSTILE)
    ours.environment = dict(zip(HOSTILE, reversed(HOSTILE), strict=True)) | {"list": list(HOSTILE)}
    for i, n in enumerate(HOSTILE):
        ours.steps[0].grads[n] = ours.steps[0].updates[n] = 2.0 + i
        theirs.steps[0].grads[n] = theirs.steps[0].updates[n] = 1.0
    ours.steps[2].loss, ours.steps[3].loss, ours.steps[4].grad_norm = math.nan, math.inf, -math.inf
    report.checks = [
        Check("state", f"state.{n}", "fail", f"{n} differs from {n}.", math.nan, math.inf, "exact", n) for n in HOSTILE
    ]
    report.causes = [Cause("shard", f"The shard of {n} is wrong.", list(HOSTILE), list(HOSTILE), n) for n in HOSTILE]
    report.versions = dict(zip(HOSTILE, HOSTILE, strict=True)) | {"torch": HOSTILE[1]}
    report.not_verified = [f"{n}: {n}" for n in HOSTILE]
    report.profile = HOSTILE[0]
    return report


def test_no_output_has_a_character_that_does_not_print(tmp_path: Path) -> None:
    write_reports(hostile(), folder=tmp_path, junit_file=tmp_path / "x.xml", metrics_file=tmp_path / "x.prom")
    for file in tmp_path.iterdir():
        assert all(line.isprintable() for line in file.read_text().split("\n")), file.name


def large() -> Report:
    report = passing(100)
    report.candidate = trace(100, apart=2e-6, tensors=3000, world=64)
    report.reference = trace(100, tensors=3000, world=64)
    report.checks += [
        Check("gate", f"gate.{i}", "pass", f"Number {i} of {'x' * 500} is fine.", 0.1 * i, i) for i in range(990)
    ]
    return report


def upgraded(reference: Any = None, **more: Any) -> Report:
    """A run that differs from its reference in torch and in two packages, of which one is not comparable."""
    ours = {"python": "3.12.4", "torch": "2.13.0", "executable": "/venvs/new/bin/python", "packages": {"transformers": "5.23.0", "accelerate": "1.15", "tqdm": "4.7", "peft": "1"}}  # fmt: skip
    theirs = {"python": "3.12.4", "torch": "2.10.0", "executable": "/venvs/old/bin/python", "packages": {"transformers": "5.6.2", "accelerate": "1.10", "tqdm": "4.7"}}  # fmt: skip
    return passing(candidate=trace(environment=ours), reference=trace(environment=reference or theirs, **more))


REPORTS = {
    "pass": passing, "upgraded": upgraded, "fail": failing, "no reference": alone, "not comparable": unlike, "gate failed": gated,
    "does not fit": unfit,
    "hostile": hostile, "large": large, "one step": lambda: passing(1), "no step": lambda: passing(0),
    "empty": lambda: Report(Trace(), None, "standard", []),
}  # fmt: skip
every_report = pytest.mark.parametrize("make", REPORTS.values(), ids=REPORTS)


def shown(report: Report, width: int = 160) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, highlight=False).print(render_terminal(report))
    return out.getvalue().splitlines()


# ------------------------------------------------------------------------------------------------------------ terminal


@every_report
@pytest.mark.parametrize("width", [40, 80, 120, 160])
def test_the_verdict_is_the_first_and_the_last_word_at_every_width(make: Callable[[], Report], width: int) -> None:
    report = make()
    lines = shown(report, width)
    assert lines[0].startswith(f" {report.word.upper()} ")
    assert lines[-1] == report.word
    assert all(cell_len(line) <= width for line in lines)
    assert all(line.isprintable() for line in lines)


def test_the_screen_names_what_failed_with_numbers_and_causes() -> None:
    for width in (80, 120, 160):
        lines = shown(failing(), width)
        (row,) = [line for line in lines if "step1.update_norm" in line]
        assert re.search(r"FAIL\s+step1\.update_norm\s+2\.31\s+≤ 0\.002 measured", row)
        text = " ".join(" ".join(lines).split())
        assert "likely cause The optimizer started anew: its moments were not loaded." in text
        assert "model.layers.0.self_attn.v_proj.weight and 37 more" in text
        assert "bytes 4096 to 1052672, rank 0" in text
        (step,) = [line for line in lines if line.split()[:1] == ["301"]]
        assert step.split()[1:4] == ["2.5", "2.5075", "0.003!"]
    assert not any("likely cause" in line for line in shown(passing()))


def test_what_ran_the_two_sides_is_in_every_form_of_the_report() -> None:
    ours = "Python 3.12.4, torch 2.13.0, transformers 5.23.0, accelerate 1.15 (/venvs/new/bin/python)"
    theirs = "Python 3.12.4, torch 2.10.0, transformers 5.6.2, accelerate 1.10 (/venvs/old/bin/python)"
    assert describe_verdict(upgraded()).endswith(f" checks passed. This run: {ours}. Reference: {theirs}.")
    out = io.StringIO()
    Console(file=out, width=80).print(render_terminal(upgraded()), soft_wrap=True)
    assert ours in out.getvalue().splitlines()[0] and theirs in out.getvalue().splitlines()[0], "whole in a log"
    assert any("environment" in line and "torch 2.10.0" in line for line in shown(upgraded(), 200))
    junit = {p.get("name"): p.get("value") for p in Xml.fromstring(render_junit(upgraded())).iter("property")}
    assert (junit["environment"], junit["reference environment"]) == (ours, theirs)
    assert ours in render_html(upgraded()) and theirs in render_html(upgraded())
    assert 'torch="2.13.0"' in render_metrics(upgraded()) and 'reference_torch="2.10.0"' in render_metrics(upgraded())


def test_the_versions_of_a_recording_are_told_where_they_differ_and_make_no_sentence() -> None:
    recorded = upgraded(layout=None)
    assert "torch 2.10.0" in dict((what, theirs) for what, _, theirs in list_facts(recorded))["environment"]
    assert "torch" not in describe_verdict(recorded)
    for known in ({"torch": "2.13.0", "python": "3.12.4"}, {"torch": "2.13.0", "executable": "/elsewhere/python"}, {"packages": 3}):  # fmt: skip
        same = upgraded(known, layout=None)
        assert "environment" not in [what for what, _, _ in list_facts(same)], "an earlier recording has fewer"


def test_thresholds_that_begin_with_min_are_bounds_from_below() -> None:
    assert any("0.31" in line and "≥ 0.4 given" in line for line in shown(gated()))


def test_a_reference_that_is_not_there_is_said() -> None:
    lines = shown(alone(), 80)
    assert "Without a reference" in lines[0]
    assert not any("diff" in line.split() for line in lines)


def test_what_was_not_verified_is_in_every_form_of_the_report() -> None:
    report = failing()
    text = " ".join(" ".join(shown(report, 80)).split())
    words = " ".join(" ".join(Outline(render_html(report)).words).split())
    (suite,) = Xml.fromstring(render_junit(report))
    properties = [p.get("value") for p in suite.findall("properties/property") if "not verified" in str(p.get("name"))]
    assert text.index("not verified by this run:") > text.index("likely cause")
    for line in report.not_verified:
        assert f"- {line}" in text and line in words
    assert properties == report.not_verified == report.to_json()["not_verified"]
    assert (suite.findtext("system-out") or "").splitlines() == [
        "not verified by this run:",
        *(f"- {x}" for x in report.not_verified),
    ]
    assert samples(render_metrics(report))["not_verified"] == {"": "7"}
    assert not any("not verified" in line for line in shown(passing()))


def test_a_checkpoint_that_does_not_fit_is_no_failure_and_says_what_would_make_it_fit() -> None:
    report = unfit()
    assert (report.word, report.exit_code) == ("does not fit", 12)
    assert "module_prefix='net.'" in describe_verdict(report)
    assert samples(render_metrics(report))["verdict"]['verdict="fail"'] == "0"


def test_data_of_build_has_no_seed_and_the_step_is_not_overwritten_by_the_time_of_a_step() -> None:
    report = passing()
    report.candidate.data = OF_BUILD
    (suite,) = Xml.fromstring(render_junit(report))
    properties = {p.get("name"): p.get("value") for p in suite.findall("properties/property")}
    assert properties["data"] == "given by build()" and properties["reference data"] == "tokens.bin, seed 7"
    assert (properties["step"], properties["reference step"], properties["step time"]) == ("300", "300", "0.52 s")


def test_the_keys_of_report_json_are_those_in_the_documentation() -> None:
    (keys,) = re.findall(
        r"^\| `resume-verify` \| (.+) \| `", (REPOSITORY / "docs/reference/json.md").read_text(), re.MULTILINE
    )
    assert re.findall(r"`(\w+)`", keys) == list(passing().to_json())


def test_many_checks_and_steps_are_counted() -> None:
    lines = shown(large())
    assert len(lines) < 90
    assert any("991 more" in line for line in lines)
    assert any("84 more" in line for line in lines)


def test_differences_that_are_no_numbers_lie_outside() -> None:
    report = passing(2)
    report.candidate.steps[0].loss = math.nan
    (first, second) = pair_steps_with_reference(report)
    assert math.isnan(first.differences["loss"]) and first.outside and not second.outside
    assert compute_relative_difference(math.nan, math.nan) is not None and math.isnan(
        compute_relative_difference(math.nan, math.nan) or 0
    )
    assert (
        compute_relative_difference(1.0, 0.0),
        compute_relative_difference(0.0, 0.0),
        compute_relative_difference(None, 1.0),
    ) == (
        math.inf,
        0.0,
        None,
    )


def test_the_envelope_belongs_to_steps_that_both_have() -> None:
    report = passing(4)
    assert report.reference is not None
    del report.reference.steps[0]
    report.envelope = {"loss": [1e-5, 2e-5, 3e-5]}
    assert [r.bounds.get("loss") for r in pair_steps_with_reference(report)] == [None, 1e-5, 2e-5, 3e-5]


# --------------------------------------------------------------------------------------------------------------- JUnit


@every_report
def test_junit_has_a_case_for_every_check(make: Callable[[], Report]) -> None:
    report = make()
    root = Xml.fromstring(render_junit(report))
    (suite,) = root
    cases = suite.findall("testcase")
    unjudged = report.word == "not comparable"
    assert len(cases) == len(report.checks) + unjudged == int(suite.get("tests", ""))
    for case, check in zip(cases, report.checks, strict=False):
        assert case.get("classname") == f"resume.{check.stage}"
        assert [e.tag for e in case] == {"pass": [], "fail": ["failure"], "not comparable": ["skipped"]}[check.verdict]
    red = len(suite.findall("testcase/failure")) + len(suite.findall("testcase/error"))
    assert red == int(suite.get("failures", "")) + int(suite.get("errors", ""))
    assert (red > 0) == (report.exit_code != 0)  # a CI system sees what the exit code says


def test_junit_explains_a_failure() -> None:
    (suite,) = Xml.fromstring(render_junit(failing()))
    failure = suite.find("testcase[@name='step1.update_norm']/failure")
    assert (
        failure is not None
        and failure.get("message") == "The first update is 3.3 times as large as that of the reference."
    )
    text = failure.text or ""
    assert "found 2.31, bound ≤ 0.002 measured" in text
    assert "likely cause: The optimizer started anew" in text and "  - gradients of step 1 are equal" in text
    properties = {p.get("name"): p.get("value") for p in suite.findall("properties/property")}
    assert properties["verdict"] == "fail" and properties["reference ranks"] == "4 (dp 4)"
    assert properties["nccl"] == "2.27" and properties["deterministic"] == "true"


def test_junit_spells_out_what_xml_has_no_place_for() -> None:
    (suite,) = Xml.fromstring(render_junit(hostile()))
    names = [case.get("name") for case in suite.findall("testcase")]
    assert names[:3] == [f"state.{SCRIPT}", 'state.a"b\\n', "state.\\x1b[2J\\x1b]0;title\\x07"]
    assert "state.\\ud800" in names and len(names[3] or "") == 506


# ---------------------------------------------------------------------------------------------------------- Prometheus

LINE = re.compile(r'(ckpttool_resume_(\w+?))(?:\{((?:\w+="(?:[^"\\\n]|\\["\\n])*",?)*)\})? (NaN|[+-]Inf|[-+0-9.e]+)')


def samples(text: str) -> dict[str, dict[str, str]]:
    """{metric: {labels: value}}; every line is a comment or a sample."""
    out: dict[str, dict[str, str]] = {}
    for line in text.splitlines():
        if not line.startswith("# "):
            m = LINE.fullmatch(line)
            assert m, line
            of = out.setdefault(m[2], {})
            assert m[3] not in of, f"twice: {line}"
            of[m[3] or ""] = m[4]
    return out


@every_report
def test_promtool_accepts_the_metrics(make: Callable[[], Report]) -> None:
    text = render_metrics(make(), training='odd "name"\\', now=1.5e9, previous=render_metrics(passing()))
    samples(text)
    done = subprocess.run([program("promtool"), "check", "metrics"], input=text.encode(), capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b""), (done.stdout, done.stderr)


def test_metrics_say_what_the_report_says() -> None:
    found = samples(render_metrics(failing(), now=1_500_000_000.25))
    assert found["verdict"] == {
        'verdict="pass"': "0", 'verdict="fail"': "1", 'verdict="gate failed"': "0", 'verdict="not comparable"': "0",
        'verdict="no reference"': "0", 'verdict="does not fit"': "0",
    }  # fmt: skip
    assert found["check"]['stage="step 1",name="step1.update_norm"'] == "0"
    assert found["check"]['stage="step 1",name="step1.loss"'] == "1"
    assert not any("roundtrip" in labels for labels in found["check"])  # could not be judged
    assert (found["checks_failed"], found["checks_not_comparable"]) == ({"": "2"}, {"": "1"})
    assert found["timestamp_seconds"] == {"": "1500000000.25"}
    assert float(found["loss_difference_ratio"][""]) == pytest.approx(0.015)
    assert float(found["load_bytes_per_second"][""]) == pytest.approx(7.68e9)
    assert found["device_memory_bytes"] == {f'rank="{r}"': str(80 * 2**30) for r in range(2)}
    assert found["checkpoint_step"] == {"": "300"} and found["steps"] == {"": "5"}
    (info,) = found["info"]
    assert 'version="0.5.0",torch="2.13.0",source="/ckpt/llama/step-300"' in info and 'reference_world_size="4"' in info


def test_metrics_leave_out_what_is_not_known() -> None:
    found = samples(render_metrics(REPORTS["empty"]()))
    assert set(found) == {
        "verdict", "checks_failed", "checks_not_comparable", "not_verified", "timestamp_seconds", "checkpoint_step", "steps", "info",
    }  # fmt: skip
    found = samples(render_metrics(hostile()))
    assert found["loss_difference_ratio"] == {"": "NaN"} and found["steps_not_finite"] == {"": "3"}
    assert not any("\n" in labels or "\x1b" in labels for of in found.values() for labels in of)


def test_the_step_time_before_is_that_of_the_same_job(tmp_path: Path) -> None:
    path = tmp_path / "llama.prom"
    report = passing()
    write_reports(report, metrics_file=path)
    assert 'training="llama"' in path.read_text() and "previous_step" not in path.read_text()
    report.metrics = report.metrics | {"step_seconds": 0.61}
    write_reports(report, metrics_file=path)
    assert samples(path.read_text())["previous_step_seconds"] == {'training="llama"': "0.52"}
    report.candidate.world_size = 8
    write_reports(report, metrics_file=path)
    assert "previous_step" not in path.read_text()
    path.write_bytes(b"\xff\x00 nothing that one of us wrote")
    write_reports(report, metrics_file=path)
    assert "previous_step" not in path.read_text()


def test_every_metric_is_in_the_documentation_and_the_other_way_round() -> None:
    text = (REPOSITORY / "docs" / "how-to" / "metrics.md").read_text()
    listed = re.findall(r"^\| `ckpttool_resume_(\w+)` \|", text, re.MULTILINE)
    assert listed == list(ALL_METRICS)
    assert set(re.findall(r"ckpttool_resume_(\w+)", text)) == set(ALL_METRICS)
    printed = {
        name
        for make in REPORTS.values()
        for name in samples(render_metrics(make(), previous=render_metrics(passing())))
    }
    assert printed == set(ALL_METRICS)
    (info,) = samples(render_metrics(passing()))["info"]
    (labels,) = re.findall(r"Labels of `ckpttool_resume_info`.*?: (.*?)\.\n", text, re.DOTALL)
    assert re.findall(r"(\w+)=", info) == re.findall(r"`(\w+)`", labels)


# -------------------------------------------------------------------------------------------------------------- alerts


@pytest.mark.slow
def test_promtool_accepts_the_alerts() -> None:
    for what in (
        ["check", "rules", "--lint-fatal", ALERTS],
        ["test", "rules", REPOSITORY / "tests" / "resume" / "alerts_test.yml"],
    ):
        done = subprocess.run([program("promtool"), *what], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_documented_tested_and_about_metrics_that_are_there() -> None:
    rules, docs = ALERTS.read_text(), (REPOSITORY / "docs" / "how-to" / "metrics.md").read_text()
    severities = dict(re.findall(r"- alert: (\w+)\n.*?severity: (\w+)", rules, re.DOTALL))
    assert len(severities) == 10
    assert dict(re.findall(r"^\| `(Resume\w+)` \| (\w+) \|", docs, re.MULTILINE)) == severities
    assert set(re.findall(r"ckpttool_resume_(\w+)", rules)) <= set(ALL_METRICS)
    tests = (REPOSITORY / "tests" / "resume" / "alerts_test.yml").read_text()
    (named,) = re.findall(r"^  - (.*alerts\.yml)$", tests, re.MULTILINE)
    assert (REPOSITORY / "tests" / "resume" / named).samefile(ALERTS)
    for alert in severities:
        asked = re.findall(rf'alertname="{alert}",alertstate="firing"}}\n.*\n\s+exp_samples:(.*)', tests)
        assert "" in asked and " []" in asked, alert  # it fires, and it does not


# --------------------------------------------------------------------------------------------------------------- files


def test_files_are_written_whole(tmp_path: Path) -> None:
    report = hostile()
    folder, xml, metrics = tmp_path / "new" / "report", tmp_path / "ci" / "junit.xml", tmp_path / "llama.prom"
    assert write_reports(report, folder=folder, junit_file=xml, metrics_file=metrics) == [
        folder / "report.json", folder / "report.html", xml, metrics,
    ]  # fmt: skip
    data = json.loads((folder / "report.json").read_text(), parse_constant=lambda c: pytest.fail(f"{c} is not JSON"))
    assert data["verdict"] == "fail" and data["checks"][0]["number"] == "nan"
    assert data["candidate"]["notes"] == HOSTILE  # as they were: JSON has a place for everything
    assert sorted(p.name for p in tmp_path.rglob("*") if p.is_file()) == [
        "junit.xml",
        "llama.prom",
        "report.html",
        "report.json",
    ]
    assert metrics.stat().st_mode & 0o777 == 0o666 & ~umask()


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "junit.xml"
    path.write_text("old")
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(NoSpace, match=r"junit\.xml cannot be written: No space left on device"):
        write_reports(passing(), junit_file=path)
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["junit.xml"]
    monkeypatch.undo()
    with pytest.raises(UsageError, match=r"No such file or directory"):
        write_reports(passing(), metrics_file=tmp_path / "typo" / "x.prom")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match=r"not a regular file"):
        write_reports(passing(), junit_file=tmp_path / "pipe")


# ---------------------------------------------------------------------------------------------------------------- page


class Outline(HTMLParser):
    """Tags with their attributes, the text, and whether every tag is closed in order."""

    VOID = frozenset({"meta", "link", "input", "br", "img", "wbr"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("script", "style"):
            self.words.append(data)


@every_report
def test_a_page_is_well_formed_and_loads_nothing(make: Callable[[], Report]) -> None:
    report = make()
    text = render_html(report)
    assert len(text.encode()) < 1.5e6
    outline = Outline(text)
    tags = [t for t, _ in outline.tags]
    assert tags.count("script") == tags.count("style") == tags.count("h1") == tags.count("main") == 1
    assert not {"img", "iframe", "object", "embed", "base", "form", "a"} & set(tags)
    for tag, attributes in outline.tags:
        assert not any(k.startswith("on") or k in ("src", "srcdoc", "action") for k in attributes), (tag, attributes)
        assert attributes.get("href") in (None, "data:,")
        if tag == "th":
            assert attributes.get("scope") in ("row", "col")
    (policy,) = [a["content"] for t, a in outline.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
    assert ("html", {"lang": "en"}) in outline.tags
    assert describe_verdict(report)[:60] in " ".join(outline.words)


def test_a_page_has_everything_that_a_person_asks_for() -> None:
    words = " ".join(" ".join(Outline(render_html(failing())).words).split())
    for text in (
        "fail", "4 → 2", "The optimizer started anew: its moments were not loaded.", "exp_avg is zero on every rank",
        "__0_0.distcp, bytes 4096 to 1052672, rank 0", "4 (dp 4) differs", "≤ 0.002 measured", "seed 7", "56.00 GiB",
        "0 of 12 equal", "step 301 this run 2.5075 reference 2.5 difference 0.003 allowed 1e-05", "2.27",
    ):  # fmt: skip
        assert text in words, text


NUMBERS = st.none() | st.floats() | st.sampled_from([0.0, -0.0, 5e-324, 1.7e308, -1.7e308, 1e-300, 2.5])


@pytest.mark.slow
@settings(max_examples=150)
@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS, NUMBERS), max_size=6), st.lists(st.floats(), max_size=6))
def test_no_number_is_too_odd_to_be_shown(numbers: list[tuple[float | None, ...]], bounds: list[float]) -> None:
    def of(which: int) -> Trace:
        made = [
            Step(i, math.nan if n[which] is None else n[which] or 0.0, n[which + 1], n[which + 2], learning_rates=[n[0] or 0.0],
                 seconds=n[which], grads={"a": n[which + 1] or 0.0}, updates={"a": n[which + 2] or 0.0})
            for i, n in enumerate(numbers)
        ]  # fmt: skip
        return Trace(steps=made)

    given = [x for n in numbers for x in n if x is not None]
    checks = [Check("steps", f"steps.{i}", "fail", "So it is.", x, x, "measured") for i, x in enumerate(given)]
    report = Report(of(0), of(1), "standard", checks, envelope={"loss": bounds, "grad_norm": bounds})
    drawn = render_html(report)
    Outline(drawn)
    assert not re.search(r'="[^"<>]*(nan|inf)[^"<>]*"', re.sub(r'aria-label="[^"]*"', "", drawn))  # no place in a chart
    samples(render_metrics(report))
    Xml.fromstring(render_junit(report))
    for width in (80, 160):
        assert shown(report, width)[-1] == report.word


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as b:
        yield b


@pytest.mark.slow
@every_report
def test_a_browser_shows_the_page(make: Callable[[], Report], chromium: Browser, tmp_path: Path) -> None:
    """Nothing on the console, nothing refused, nothing executed, no overflow, charts to be seen: wide, narrow, dark."""
    report = make()
    path = tmp_path / "report.html"
    path.write_text(render_html(report))
    colours = set()
    for width, dark in ((1280, False), (400, False), (1280, True), (400, True)):
        chromium.open(path, width=width, dark=dark)
        assert chromium.ask("document.getElementById('verdict').innerText").lower() == report.word
        assert chromium.ask("document.documentElement.scrollWidth") == width
        charts = chromium.ask("[...document.querySelectorAll('.chart')].map(c => c.getBoundingClientRect().toJSON())")
        assert len(charts) == (3 if report.candidate.steps else 0)
        assert all(c["width"] > 250 and c["height"] > 150 for c in charts)
        colours.add(chromium.ask("getComputedStyle(document.body).backgroundColor"))
        png = chromium.shot(tmp_path / "page.png")
        assert png.startswith(b"\x89PNG") and len(png) > 8_000  # one of a blank page has some hundred bytes
    assert colours == {"rgb(245, 246, 248)", "rgb(16, 19, 23)"}
    assert chromium.ask("[window.hacked, document.title.length > 0]") == [None, True]
    assert chromium.console() == []


@pytest.mark.slow
@pytest.mark.parametrize("make", [failing, unfit], ids=["fail", "does not fit"])
def test_verdict_cause_and_what_was_not_verified_are_on_the_first_screen(
    make: Callable[[], Report], chromium: Browser, tmp_path: Path
) -> None:
    """Whole and in this order, in a window of 1280x800."""
    report = make()
    path = tmp_path / "report.html"
    path.write_text(render_html(report))
    chromium.open(path, width=1280, height=800)
    boxes = [
        chromium.ask(f"document.querySelector('{at}').getBoundingClientRect().toJSON()")
        for at in ("#verdict", ".sentence", "#not-verified", ".cause.first h3")
    ]
    assert all(b["height"] >= 15 and b["width"] > 100 and b["left"] >= 0 and b["right"] <= 1280 for b in boxes)
    assert all(a["bottom"] <= b["top"] for a, b in pairwise(boxes)) and boxes[-1]["bottom"] <= 800
    lines = "[...document.querySelectorAll('#not-verified li')].map(x => x.innerText).filter(x => x)"
    assert chromium.ask(lines) == report.not_verified[:5]
    chromium.ask("document.querySelectorAll('#not-verified details').forEach(x => x.open = true)")
    assert chromium.ask(lines) == report.not_verified
    report.causes[0].text = "the checkpoint could not be loaded: " + "a long name, " * 120
    report.not_verified = [f"{i}: " + "one more reason, " * 18 for i in range(9)]
    path.write_text(render_html(report))
    chromium.open(path, width=1280, height=800)
    tops = "['#not-verified', '.cause.first h3'].map(x => document.querySelector(x).getBoundingClientRect().top)"
    assert max(chromium.ask(tops)) < 760
    path.write_text(render_html(passing()))
    chromium.open(path, width=1280, height=800)
    assert chromium.ask("document.querySelector('#not-verified')") is None


@pytest.mark.slow
def test_a_hole_in_a_page_would_be_seen(chromium: Browser, tmp_path: Path) -> None:
    """That the test above can fail: pages that do not escape, and that load something."""
    path = tmp_path / "report.html"
    path.write_text(
        render_html(hostile()).replace(str(markupsafe.escape(SCRIPT)), "<script>window.hacked = 1</script>")
    )
    chromium.open(path)
    assert chromium.ask("window.hacked") == 1
    path.write_text(render_html(passing()).replace("<main>", '<main><img src="https://example.org/x.png">'))
    chromium.open(path)
    assert "Content Security Policy" in " ".join(chromium.console())


@pytest.mark.slow
def test_what_moves_in_a_page(chromium: Browser, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(render_html(failing()))
    chromium.open(path)
    rows_shown = "[...document.querySelectorAll('.check')].filter(r => r.offsetHeight > 0).map(r => r.querySelector('th').innerText)"
    assert len(chromium.ask(rows_shown)) == 10
    chromium.ask("document.querySelector('[data-show=fail]').click()")
    assert chromium.ask(rows_shown) == ["step1.update_norm", "steps.loss"]
    find = "(t => {let f = document.getElementById('find'); f.value = t; f.dispatchEvent(new Event('input'))})"
    chromium.ask(f"{find}('OUTSIDE of')")
    assert chromium.ask(rows_shown) == ["steps.loss"]
    chromium.ask(f"{find}('nobody wrote this')")
    assert chromium.ask("document.getElementById('nothing').offsetHeight > 0") and chromium.ask(rows_shown) == []
    chromium.ask(f"{find}('')")
    chromium.ask("document.querySelector('[data-show=all]').click()")
    assert len(chromium.ask(rows_shown)) == 10
    chromium.ask("document.querySelector('.chart').scrollIntoView()")
    at = chromium.ask("document.querySelector('.hit').getBoundingClientRect().toJSON()")
    chromium.hover(at["x"] + at["width"] / 2, at["y"] + 20)
    assert chromium.ask("document.getElementById('tip').innerText").splitlines() == [
        "step 301", "this run 2.5075", "reference 2.5", "difference 0.003", "allowed 1e-05",
    ]  # fmt: skip
    assert chromium.console() == []


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
def test_every_text_stands_out_from_what_is_behind_it(chromium: Browser, tmp_path: Path, dark: bool) -> None:
    """Contrast of 4.5 and more (WCAG AA), for every text that is shown."""
    path = tmp_path / "report.html"
    path.write_text(render_html(failing()))
    chromium.open(path, dark=dark)
    chromium.ask("document.querySelectorAll('details').forEach(d => d.open = true)")
    faint = chromium.ask(CONTRAST)
    assert faint == []


CONTRAST = """(() => {
  const parse = c => (c.match(/[0-9.]+/g) || []).map(Number);
  const light = c => {const f = c.slice(0, 3).map(v => {v /= 255; return v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4});
    return .2126 * f[0] + .7152 * f[1] + .0722 * f[2]};
  const behind = e => {for (; e; e = e.parentElement) {const c = parse(getComputedStyle(e).backgroundColor);
    if (c.length === 3 || c[3] > 0) return c} return [255, 255, 255]};
  const walk = document.createTreeWalker(document.querySelector('main'), NodeFilter.SHOW_TEXT), out = [];
  let seen = 0;
  while (walk.nextNode()) {const e = walk.currentNode.parentElement;
    if (!walk.currentNode.data.trim() || !e.getClientRects().length) continue;
    seen++;
    const style = getComputedStyle(e), c = parse(e instanceof SVGElement ? style.fill : style.color);
    const [a, b] = [light(c), light(behind(e))].sort((x, y) => y - x);
    if ((a + .05) / (b + .05) < 4.5) out.push([walk.currentNode.data, (a + .05) / (b + .05)])}
  return seen > 100 ? out : ['too little text: ' + seen]})()"""
