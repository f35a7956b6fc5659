"""What a run did not verify is listed; a checkpoint that does not fit the job is no failure, and one that lost something is."""

from __future__ import annotations

import functools
import io
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peers import FIXTURES
from rich.console import Console

import ckpttool
from ckpttool.resume.compare.judge import judge_single_run
from ckpttool.resume.compare.misfit import compare_names_and_shapes, describe_misfit, does_not_fit_job
from ckpttool.resume.compare.not_verified import list_not_verified
from ckpttool.resume.compare.verdict import Report
from ckpttool.resume.report.html_page import render_html
from ckpttool.resume.report.terminal import render_terminal
from ckpttool.resume.trace.live_facts import list_own_load_functions
from ckpttool.resume.trace.model import Step, Trace
from ckpttool.resume.trace.side_state import collect_side_state

MARK = ("float32", (2,), "ab")


def run(**more: Any) -> Trace:
    """A run of ours on a checkpoint."""
    known: dict[str, Any] = {
        "layout": "dcp", "recipe": "job.py:build", "scheduler": "LambdaLR", "state": {"model.w": MARK}, "stored": {"model.w": "ab"},
        "environment": {"torch": "2.13.0"}, "values": {"trainer.step": 3},
    }  # fmt: skip
    return Trace(**{**known, **more})


def lines(reference: Trace | None, got: Trace) -> list[str]:
    """What was not verified, but for checks that could not be made."""
    return [x for x in list_not_verified(reference, got, []) if x]


def test_two_runs_of_one_recipe_see_no_fault_of_it() -> None:
    assert lines(run(), run()) == [
        "faults of job, data, loss or model configuration: both runs were built from job.py:build"
    ]
    assert lines(run(recipe="a/config"), run(recipe="b/config")) == ["faults of data or loss: both runs have the same"]
    assert lines(Trace(), run()) == [], "a recorded job is another job"
    assert lines(None, run()) == ["whether training goes on as before: there is no reference"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"dropout_off": 0.1}, "dropout (probability up to 0.1): it was switched off"),
        (
            {"scheduler": None, "values": {"scheduler.last_epoch": 3, "trainer.step": 3}},
            "the scheduler at work: the job has none, so the later learning rates are the reference's",
        ),
        (
            {"scheduler": "ReduceLROnPlateau", "environment": {"torch": "2.13.0", "scheduler_waits": True}},
            "the scheduler at work: ReduceLROnPlateau needs a metric for a step, so the later learning rates are the reference's",
        ),
        (
            {"environment": {"torch": "2.13.0", "random": "seeded"}},
            "the random numbers that the forward pass draws: they were seeded, and not continued from the checkpoint's",
        ),
        (
            {"others": {"optim.state.frozen.exp_avg": MARK}},
            "not used by this job, and compared with nothing: optimizer state of parameters that this job does not train",
        ),
        ({"others": {"rng.0.torch": MARK}}, "not used by this job, and compared with nothing: random states"),
        ({"unread": [("optimizer_0/", "optim")]}, "files beside the checkpoint that were not read: optimizer_0/ (optim)"),
        (
            {"state": {"model.w": MARK, "model.b": MARK}},
            "1 tensor of another dtype in the files, so not compared with them: model.b",
        ),
    ],
)  # fmt: skip
def test_what_no_check_can_see_is_listed(more: dict[str, Any], said: str) -> None:
    assert lines(Trace(), run(**more)) == [said]


def test_what_is_stored_and_not_used_is_listed_and_random_states_that_were_restored_are_not() -> None:
    held: dict[str, Any] = {
        "others": {"rng.0.torch": MARK}, "values": {"dataloader.at": 3, "scaler.scale": 2.0, "extra.best": None, "trainer.step": 1}
    }  # fmt: skip
    found = lines(run(**held), run(**held))[1:]
    assert found == [
        "compared as stored, but not used by this job: random states, dataloader, grad scaler, other values"
    ]
    found = lines(run(**held), run(**held, environment={"rng_restored": True}))[1:]
    assert found == ["compared as stored, but not used by this job: dataloader, grad scaler, other values"]


def test_what_a_recording_does_not_tell_to_be_lost_is_in_every_form_of_the_report(tmp_path: Path) -> None:
    """HF Trainer goes on without these files: from step 0, and with other random numbers."""
    saved = FIXTURES / "trainers" / "trainer_fsdp2_sharded" / "ckpt" / "checkpoint-3"
    folder = tmp_path / "checkpoint-3"
    shutil.copytree(saved, folder, ignore=shutil.ignore_patterns("rng_state_*.pth", "trainer_state.json"))
    recorded = Trace(generators=[{"torch": ("uint8", (5056,), "ab")} for rank in range(2)])
    random, counters = (
        "config.rng: the checkpoint holds no random states",
        "counters of the trainer, such as step and epoch",
    )
    found = {}
    for path in (saved, folder):
        with ckpttool.open(path) as opened:
            beside = collect_side_state(
                {v.path: v.data for v in opened.checkpoint.values.values() if v.path[0] != "optim"}
            )
            others = {n: (t.dtype, t.shape, "ab") for n, t in opened.checkpoint.tensors.items() if t.path[0] == "rng"}
            got = run(values=beside.values, others=beside.others | others, layout=opened.layout.name)
        checks = judge_single_run(recorded, got).checks
        found[path] = Report(got, recorded, "strict", checks, not_verified=list_not_verified(recorded, got, checks))
    assert [line for line in found[saved].not_verified if line.startswith((random, counters))] == []
    report = found[folder]
    lines = [line for line in report.not_verified[:5] if line.startswith((random, counters))]
    assert len(lines) == 2, report.not_verified
    out = io.StringIO()
    Console(file=out, width=200).print(render_terminal(report))
    assert all(f"- {line}" in out.getvalue() and line in render_html(report) for line in lines)
    assert lines == [line for line in report.to_json()["not_verified"] if line in lines]


def test_what_one_side_alone_has_and_objects_of_unknown_classes_are_listed() -> None:
    hook = {"extra.hook": ("object", (), "user.Hook")}
    a = run(values={"extra.a": 1}, others=hook)
    b = run(values={"extra.a": 1, "extra.new": 2}, others=hook)
    found = lines(a, b)
    assert "only in this checkpoint, so compared with nothing: extra.new" in found
    assert "objects of classes that ckpttool does not build: extra.hook" in found


def test_keys_that_only_one_version_writes_are_listed() -> None:
    a = run(config={"transformers_version": "4.57", "new": 1}, groups=[{"params": ["w"], "maximize": False}])
    b = run(config={"transformers_version": "5.0"}, groups=[{"params": ["w"]}], environment={"torch": "2.10.0"})
    found = lines(a, b)
    assert "keys of the model's configuration that only one version of transformers writes: new" in found
    assert "options of param groups that only one version of torch writes: maximize" in found


def test_checks_that_could_not_be_made_are_listed_by_their_reason() -> None:
    a, b = Trace(unrecorded={"scaler": "it was not given", "extra": "nothing was given"}), run()
    checks = judge_single_run(a, b)[0]
    found = list_not_verified(a, b, checks)
    aside = [c for c in checks if c.verdict == "not comparable"]
    assert len(aside) > 10
    assert sum(any(c.name in x or "more:" in x for x in found) for c in aside) == len(aside)
    assert "config.scaler: the reference did not record the grad scaler's state (it was not given)" in found
    assert "extra: nothing was given" in found and not any(x.startswith("scaler:") for x in found)
    assert "roundtrip.state: no save and load: it was not requested" in found


def test_of_a_load_that_failed_nothing_else_is_listed() -> None:
    b = run(failed="no", dropout_off=0.1)
    assert list_not_verified(run(), b, judge_single_run(run(), b)[0]) == [
        "everything after loading: the checkpoint could not be loaded"
    ]


# ------------------------------------------------------------------------------------------------------- does not fit

JOB = {"block.w": (8, 4), "block.b": (8,), "head.w": (16, 4)}
PREFIXED = {f"a.net.{n}": shape for n, shape in JOB.items()}


def test_a_module_that_all_names_begin_with_is_found_on_either_side() -> None:
    assert compare_names_and_shapes(PREFIXED, JOB, [])["prefix"] == "a.net."
    assert compare_names_and_shapes(PREFIXED, {f"net.{n}": s for n, s in JOB.items()}, [])["prefix"] == "a."
    assert compare_names_and_shapes(JOB, PREFIXED, [])["job_prefix"] == "a.net."
    other = {**PREFIXED, "a.net.head.w": (17, 4)}
    assert compare_names_and_shapes(other, JOB, [])["prefix"] == "", "a shape differs besides"
    assert compare_names_and_shapes({**PREFIXED, "a.more": (1,)}, JOB, [])["prefix"] == ""


def test_one_name_of_a_tied_parameter_is_enough() -> None:
    tied = [["block.w", "head.w"]]
    job = {**JOB, "head.w": (8, 4)}
    stored = {f"net.{n}": s for n, s in job.items() if n != "head.w"}
    assert (
        compare_names_and_shapes(stored, job, tied)["prefix"] == "net."
        and compare_names_and_shapes(stored, job, [])["prefix"] == ""
    )


def test_the_advice_names_what_makes_it_fit() -> None:
    assert "module_prefix='a.net.'" in describe_misfit(Trace(misfit=compare_names_and_shapes(PREFIXED, JOB, [])))
    assert 'Let the job be the module below "a.net"' in describe_misfit(
        Trace(misfit=compare_names_and_shapes(JOB, PREFIXED, []))
    )
    rows = compare_names_and_shapes({**JOB, "head.w": (17, 4)}, JOB, [])
    assert rows["rows"] == [17, 16] and "convert it with vocab_size=16" in describe_misfit(Trace(misfit=rows))
    assert "rows" not in compare_names_and_shapes({**JOB, "head.w": (17, 5)}, JOB, [])
    text = describe_misfit(Trace(misfit=compare_names_and_shapes({"x": (1,), "head.w": (3,)}, JOB, [])))
    assert text.startswith(
        "the checkpoint lacks 2 tensors of the job, first block.w; it has 1 tensor that the job lacks, first x; 1 tensor"
    )
    base = {"q.base_layer.weight": (8, 8)}
    adapter = {"q.lora_A.default.weight": (2, 8), "q.lora_B.default.weight": (8, 2)}
    text = describe_misfit(Trace(misfit=compare_names_and_shapes(adapter, {**base, **adapter}, [])))
    assert "an adapter (r=2, 1 module) and none of the 1 tensor of the base model" in text and "adapter merge" in text
    assert "an adapter" not in describe_misfit(
        Trace(misfit=compare_names_and_shapes({**base, **adapter}, {**base, **adapter, "k.weight": (8, 8)}, []))
    )
    assert "the optimizer or the scheduler does not" in describe_misfit(
        Trace(misfit=compare_names_and_shapes(JOB, JOB, []))
    )
    why = "c does not fit the job: the state of the job's LambdaLR has base_lrs. Leave the scheduler out."
    assert describe_misfit(Trace(failed=why, misfit=compare_names_and_shapes(JOB, JOB, []))).endswith(
        "LambdaLR has base_lrs. Leave the scheduler out"
    )


def state(names: dict[str, Any]) -> dict[str, Any]:
    return {f"model.{n}": ("float32", shape, "") for n, shape in names.items()}


def test_it_does_not_fit_where_nothing_says_that_something_was_lost() -> None:
    part = {n: s for n, s in JOB.items() if n != "head.w"}
    got = run(failed="no", misfit=compare_names_and_shapes(part, JOB, []), state=state(part))
    fits, fails = run(state=state(JOB)), run(failed="no", misfit=compare_names_and_shapes(part, JOB, []))
    recorded, other = Trace(state=state(JOB)), Trace(state=state(part))
    cases = {
        "none": None,
        "original fits": fits,
        "original does not fit": fails,
        "recorded had it": recorded,
        "nor had it": other,
    }
    found = {n: Report(got, r, "strict", judge_single_run(r, got)[0]).word for n, r in cases.items()}
    assert found == {
        "none": "does not fit", "original fits": "fail", "original does not fit": "does not fit", "recorded had it": "fail",
        "nor had it": "does not fit",
    }  # fmt: skip


def test_names_that_only_begin_otherwise_are_no_loss_and_other_errors_are_no_misfit() -> None:
    got = run(failed="no", misfit=compare_names_and_shapes(PREFIXED, JOB, []), state=state(PREFIXED))
    assert does_not_fit_job(run(state=state(JOB)), got)
    damaged = run(failed="a file is damaged", state=state(JOB))
    assert (
        not does_not_fit_job(None, damaged)
        and Report(damaged, None, "strict", judge_single_run(None, damaged)[0]).exit_code == 10
    )
    lost = run(failed="no scheduler", misfit=compare_names_and_shapes(JOB, JOB, []), state=state(JOB))
    assert not does_not_fit_job(Trace(state=state(JOB), values={"scheduler.last_epoch": 3}), lost)


# ------------------------------------------------------------------------------------------------- the job's own loading


class Dequantised(torch.nn.Linear):
    """A layer that changes what it is loaded with."""

    def _load_from_state_dict(self, *args: Any, **more: Any) -> None:
        super()._load_from_state_dict(*args, **more)


class Corrupting(torch.optim.SGD):
    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)


def a_hook(*args: Any) -> None: ...


def test_loading_code_of_the_job_itself_is_listed_since_it_does_not_run() -> None:
    model = torch.nn.Sequential(
        Dequantised(2, 2), Dequantised(2, 2), torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 2)),
        torch.nn.BatchNorm1d(2), torch.nn.MultiheadAttention(2, 1),
    )  # fmt: skip
    optimizers = [torch.optim.AdamW(model[:2].parameters()), Corrupting(model[2:].parameters(), lr=0.1)]
    model[3].register_load_state_dict_post_hook(a_hook)
    model[1]._register_load_state_dict_pre_hook(functools.partial(a_hook))
    optimizers[0].register_load_state_dict_pre_hook(print)
    here = __name__
    found = list_own_load_functions(model, optimizers)
    assert found == [
        f"{here}.Dequantised._load_from_state_dict", f"{here}.a_hook (a hook of 1)", "builtins.print (a hook of AdamW)",
        f"{here}.Corrupting.load_state_dict",
    ]  # fmt: skip
    (said,) = [x for x in lines(Trace(), run(environment={"own_loading": found})) if "loading code" in x]
    assert said.startswith("loading code of the job's own classes, which did not run") and "Corrupting" in said
    plain = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    assert list_own_load_functions(plain, [torch.optim.AdamW(plain.parameters())]) == []


def test_options_that_a_layout_does_not_hold_and_inputs_of_one_side_are_listed() -> None:
    groups = [{"options": ["lr", "lr_mult"], "params": ["w"]}]
    reference = run(stored_groups=groups, steps=[Step(4, 1.0, batch="aa", inputs={"mask": "bb"})])
    got = run(layout="megatron", stored_groups=[{"options": ["lr"], "params": ["w"]}], steps=[Step(4, 1.0, batch="aa")])
    found = lines(reference, got)
    assert "what only one side has of the samples, so compared with nothing: mask" in found
    assert any(
        "options of param groups that checkpoints of layout megatron do not hold" in x and x.endswith("lr_mult")
        for x in found
    )
    assert not any("options of param groups" in x for x in lines(reference, run(stored_groups=groups)))
