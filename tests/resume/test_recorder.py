"""What a Recorder records beside the steps, that it changes nothing, and that what fails in it ends no training."""

from __future__ import annotations

import json
import math
import random
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from live.recorded_job import PROBE
from ranks import torchrun

import ckpttool
from ckpttool.errors import UsageError
from ckpttool.resume.compare import run_checks, state_checks
from ckpttool.resume.compare.bounds import Bound
from ckpttool.resume.compare.judge import judge_single_run
from ckpttool.resume.compare.not_verified import list_not_verified
from ckpttool.resume.compare.side_state_differences import compare_side_state
from ckpttool.resume.trace import live_facts, probing, recorded_state
from ckpttool.resume.trace.model import Step, Trace, format_record_line, read_reference
from ckpttool.resume.trace.side_state import collect_side_state, flatten_side_state


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("jobs")
    said = torchrun(2, "recorded_job.py", "--out", str(out))
    assert (out / "report.json").exists(), said[-4000:]
    return out, json.loads((out / "report.json").read_text())


@pytest.mark.live
@pytest.mark.parametrize("kind", ["fsdp", "ddp", "broken"])
def test_a_job_with_a_recorder_has_the_losses_and_buffers_of_one_without(jobs: Any, kind: str) -> None:
    for rank in jobs[1][kind]:
        assert rank["recorded"] == rank["without"]


@pytest.mark.live
@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_a_recording_has_the_state_of_every_rank_and_nothing_is_lost(jobs: Any, kind: str) -> None:
    trace = read_reference(jobs[0] / f"{kind}.jsonl")
    assert not any(rank["warned"] for rank in jobs[1][kind])
    assert trace.unrecorded == {} and trace.start == 3 and trace.scheduler == "StepLR"
    assert trace.values["scheduler.last_epoch"] == 3 and trace.values["scaler.scale"] == 2.0
    assert trace.values["dataloader.rank_0.at"] == 10 and trace.values["dataloader.rank_1.at"] == 11
    assert trace.variants["dataloader.position"] == [0, 1] and "dataloader.epoch" not in trace.variants
    assert len(trace.variants["dataloader.order"]) == 2
    of_each = trace.variants["model.norm.running_mean"]
    assert len({v[2] for v in of_each}) == 2 and trace.state["model.norm.running_mean"][2] == of_each[0][2]
    assert trace.values["trainer.epoch"] == 2 and trace.others["extra.ema.w"][:2] == ("float32", (31, 8))
    one, two = trace.generators
    assert one.keys() >= {"torch", "numpy", "python", "numpy_position"} and all(
        one[k] != two[k] for k in ("torch", "numpy", "python")
    )
    assert trace.probe["rows"] == {"input_ids": PROBE} and trace.probe["shape"] == [12, 31]
    for step in trace.steps:
        assert [len(rows) for rows in step.rows] == [16, 16] and step.rows[0] != step.rows[1]


@pytest.mark.live
def test_ddp_and_fsdp_have_one_probe_and_an_average_that_is_sharded_one_fingerprint(jobs: Any) -> None:
    a, b = (read_reference(jobs[0] / f"{kind}.jsonl") for kind in ("fsdp", "ddp"))
    assert (
        np.allclose(a.probe["sketch"], b.probe["sketch"], rtol=1e-5)
        and a.others["extra.ema.w"] == b.others["extra.ema.w"]
    )


@pytest.mark.live
def test_what_fails_on_one_rank_is_left_out_on_all_and_the_recording_says_why(jobs: Any) -> None:
    trace = read_reference(jobs[0] / "broken.jsonl")
    assert trace.unrecorded["dataloader"] == "its state could not be read on rank 1 (RuntimeError: the loader has gone)"
    assert not any(n.startswith("dataloader") for n in (*trace.values, *trace.others, *trace.variants))
    assert "is not a number" in trace.unrecorded["loss"] and [s.step for s in trace.steps] == [1, 3]
    assert trace.values["scheduler.last_epoch"] == 3


def little() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("given", "said"),
    [({"scheduler": 3}, "scheduler is a int, which has no state_dict"), ({"dataloader": [1]}, "dataloader is a int"), ({"extra": 3}, "extra is a int"),
     ({"extra": {"model": {}}}, "the key 'model'"), ({"extra": {3: 1}}, "the key 3"), ({"extra": {"scaler": 1}, "scaler": dict}, "the key 'scaler'"),
     ({"probe": [1, 2]}, "rows of token ids"), ({"probe": {"ids": [[1]]}}, "needs input_ids"), ({"probe": [[0.5]]}, "rows of token ids")],
)  # fmt: skip
def test_what_a_recorder_cannot_use_is_refused_before_the_training_starts(
    tmp_path: Path, given: Any, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        ckpttool.Recorder(tmp_path / "r.jsonl", *little(), **given)
    with pytest.raises(UsageError, match="optimizer is a list"):
        ckpttool.Recorder(tmp_path / "r.jsonl", little()[0], [little()[1], 3])
    assert not (tmp_path / "r.jsonl").exists()


def test_what_fails_later_is_a_warning_and_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = little()

    def gone() -> Any:
        raise OSError("the store has gone")

    recorder = ckpttool.Recorder(tmp_path / "r.jsonl", model, optimizer, extra=gone, scheduler=gone, probe=[[1, 2]])
    recorder.state(0)
    monkeypatch.setattr(live_facts, "get_local_shard", gone)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    with pytest.warns(RuntimeWarning) as seen:
        recorder.step(1, loss=1.0, batch=3)
    assert [str(w.message).split(":")[1] for w in seen] == [" batch not recorded", " norms not recorded"]
    trace = read_reference(tmp_path / "r.jsonl")
    assert trace.steps[0].grads == {} and "gone() takes 0 positional" in trace.unrecorded["norms"]
    assert trace.unrecorded["scheduler"].endswith("(OSError: the store has gone)")
    assert trace.unrecorded["extra"].endswith("(OSError: the store has gone)")
    assert "forward(input_ids=...), but Sequential has forward(input)" in trace.unrecorded["probe"]
    assert trace.state.keys() == {f"model.{n}" for n in model.state_dict()}


def test_a_model_whose_state_cannot_be_read_leaves_the_rest_recorded(tmp_path: Path) -> None:
    model, optimizer = little()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    odd = torch.ones(4).to_sparse()
    optimizer.state[model[0].weight]["exp_avg"] = odd
    recorder = ckpttool.Recorder(tmp_path / "r.jsonl", model, optimizer, scaler=lambda: {"scale": 2.0})
    recorder.state(1)
    trace = read_reference_of_state(tmp_path / "r.jsonl")
    assert trace.unrecorded["tensors"] == "no fingerprint of 1 tensor of another class: optim.state.0.weight.exp_avg"
    assert "optim.state.0.weight.exp_avg_sq" in trace.state
    model.state_dict = lambda: 1 / 0  # type: ignore[method-assign,assignment]
    recorder.state(2)
    trace = read_reference_of_state(tmp_path / "r.jsonl")
    assert trace.unrecorded["model"] == "its state could not be read on rank 0 (ZeroDivisionError: division by zero)"
    assert not trace.state and trace.values["scaler.scale"] == 2.0 and trace.groups


def read_reference_of_state(path: Path) -> Trace:
    """A recording that has no step yet."""
    with open(path, "a", encoding="utf-8") as f:
        f.write(format_record_line("step", step=9, loss=1.0))
    return read_reference(path)


def test_a_disk_that_is_full_ends_no_training_even_where_warnings_are_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = ckpttool.Recorder(tmp_path / "r.jsonl", *little())
    (tmp_path / "r.jsonl").unlink()
    (tmp_path / "r.jsonl").mkdir()
    with pytest.warns(RuntimeWarning, match=r"r\.jsonl could not be written"):
        recorder.step(1, loss=1.0)
    assert not capsys.readouterr().err
    recorder.step(2, loss=1.0)  # here, they are
    assert "r.jsonl could not be written" in capsys.readouterr().err


def test_an_earlier_recording_is_read_and_what_it_lacks_is_named(tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    state = format_record_line("state", step=1, state={"model.w": ["float32", [2], "ab"]}, scalars={}, groups=[])
    file.write_text(state + format_record_line("step", step=2, loss=1.0, batch="00"))
    trace = read_reference(file)
    assert (
        set(trace.unrecorded) == {"scheduler", "scaler", "dataloader", "extra", "probe"} and trace.steps[0].rows == []
    )
    file.write_text(format_record_line("step", step=2, loss=1.0))
    assert "Recorder.state was not called" in read_reference(file).unrecorded["model"]


def test_text_of_an_earlier_recording_that_begins_like_an_object_is_not_compared(tmp_path: Path) -> None:
    """It may have been one; those of today have marks for objects."""
    values = {"extra.hook": "<user.Hook>", "extra.pad": "<pad>", "extra.tags": ["<a>"], "trainer.step": 1}
    record = {"step": 1, "state": {}, "scalars": {}, "groups": [], "values": values}
    step = format_record_line("step", step=2, loss=1.0)
    for version, unknown in (({}, ["extra.hook", "extra.pad"]), ({"version": 2}, [])):
        (tmp_path / "r.jsonl").write_text(format_record_line("state", **record, **version) + step)
        reference = read_reference(tmp_path / "r.jsonl")
        others = {"extra.hook": ("object", (), "user.Hook")}
        got = Trace(start=1, layout="dcp", values={"extra.pad": "<eos>", "extra.tags": ["<b>"]}, others=others)
        found = compare_side_state(reference, got, "extra")
        assert sorted(found.unknown) == (unknown or ["extra.hook"])
        assert list(found.found) == (["extra.tags"] if unknown else ["extra.pad", "extra.tags"])


class Scaled(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)
        self.state: Any = {"amax": torch.tensor([1.0, 2.0]), "recipe": "delayed", 0: [1, 2]}

    def get_extra_state(self) -> Any:
        return self.state


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_extra_states_and_two_keys_of_one_kind_have_the_names_that_they_have_in_the_checkpoint(tmp_path: Path) -> None:
    model = torch.nn.Sequential(Scaled(), torch.nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    beside = {"sampler": {"seed": 17, "epoch": 1}, "dataloader": {"at": 3, "epoch": 2}}
    for given in (
        {"extra": beside},
        {"dataloader": lambda: beside["dataloader"], "extra": {"sampler": beside["sampler"]}},
    ):
        recorder = ckpttool.Recorder(tmp_path / "r.jsonl", model, optimizer, **given)
        recorder.state(1)
        recorded = read_reference_of_state(tmp_path / "r.jsonl")
        assert recorded.values["model.0._extra_state.recipe"] == "delayed"
        assert recorded.values["dataloader.epoch"] == 2 and recorded.values["extra.sampler.epoch"] == 1
        for order in (["sampler", "dataloader"], ["dataloader", "sampler"]):
            place = tmp_path / f"{len(given)}{order[0]}"
            tree = {"model": model.state_dict(), **{k: beside[k] for k in order}}
            dcp.save(tree, checkpoint_id=place, no_dist=True)
            with ckpttool.open(place) as opened:
                ckpt = opened.checkpoint
                held = collect_side_state({v.path: v.data for v in ckpt.values.values()})
                marks = {
                    n: (t.dtype, t.shape, collect_side_state({("x",): opened[n].torch()}).others["x"][2])
                    for n, t in ckpt.tensors.items() if "_extra_state" in n
                }  # fmt: skip
            got = Trace(start=1, layout="dcp", values=held.values, others=held.others | marks)
            for component in ("model", "dataloader", "extra"):
                found = compare_side_state(recorded, got, component)
                assert found.compared and not found.problems and not found.extra, component
            got.values["model.0._extra_state.recipe"] = "other"
            assert len(compare_side_state(recorded, got, "model").problems) == 1


def test_an_extra_state_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    model = Scaled()
    model.get_extra_state = lambda: 1 / 0  # type: ignore[method-assign]
    recorder = ckpttool.Recorder(tmp_path / "r.jsonl", model, None, scaler=lambda: {"scale": 2.0})
    recorder.state(1)
    trace = read_reference_of_state(tmp_path / "r.jsonl")
    assert (
        trace.unrecorded["extra states"]
        == "its state could not be read on rank 0 (ZeroDivisionError: division by zero)"
    )
    assert trace.values["scaler.scale"] == 2.0


# ------------------------------------------------------------------------------------------ batches, several optimizers


def test_a_batch_may_be_what_the_model_gets(tmp_path: Path) -> None:
    ids, mask = torch.arange(12).reshape(4, 3), torch.ones(4, 3, dtype=torch.bool)
    positions = torch.arange(3).expand(4, 3)
    whole = {"input_ids": ids, "more": {"mask": mask, "at": positions.bfloat16()}, "count": 12, "names": ["a"] * 4}
    parts = [
        {"input_ids": ids[k : k + 2], "more": {"mask": mask[k : k + 2], "at": positions[k : k + 2].bfloat16()}}
        for k in (2, 0)
    ]
    mixed = [parts[0], {"input_ids": ids[:2]}]
    with ckpttool.Recorder(tmp_path / "r.jsonl") as recorder:
        for step, batch in enumerate((whole, parts, ids, mixed, [ids[0], ids[1], ids[2:]]), 1):
            recorder.step(step, loss=1.0, batch=batch)
        with pytest.warns(RuntimeWarning, match="batch not recorded"):
            recorder.step(6, loss=1.0, batch={"input_ids": ids, "mask": mask[:3]})
        with pytest.warns(RuntimeWarning, match="token ids of dtype float32"):
            recorder.step(7, loss=1.0, batch=ids.float())
    one, two, bare, some, rows, *none = read_reference(tmp_path / "r.jsonl").steps
    assert one.inputs.keys() == {"more.mask", "more.at"} and one.samples is not None
    assert (one.batch, one.inputs, one.samples) == (two.batch, two.inputs, two.samples)
    assert (
        bare.batch == one.batch == some.batch == rows.batch
        and bare.inputs == some.inputs == {}
        and some.samples is None
    )
    assert [len(s.rows[0]) for s in (one, two, bare, rows)] == [32] * 4
    assert all(s.batch is None and not s.inputs for s in none)


def test_several_optimizers_are_one_step_with_all_rates_groups_and_updates(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizers = [torch.optim.SGD(model[0].parameters(), lr=0.5), torch.optim.AdamW(model[1].parameters(), lr=0.1)]
    with ckpttool.Recorder(tmp_path / "r.jsonl", model, optimizers) as recorder:
        for step in (1, 2):
            model(torch.ones(1, 3)).sum().backward()
            for optimizer in optimizers[: 3 - step]:  # the second one has no second step
                optimizer.step()
            model.zero_grad()
            recorder.step(step, loss=1.0)
        recorder.state(2)
    trace = read_reference(tmp_path / "r.jsonl")
    assert [g["lr"] for g in trace.groups] == [0.5, 0.1] == trace.steps[0].learning_rates
    assert "optim.state.1.weight.exp_avg" in trace.state
    assert all(trace.steps[0].updates[n] > 0 for n in ("0.weight", "1.weight"))
    assert trace.steps[1].updates["0.weight"] > 0 == trace.steps[1].updates["1.weight"]


# ----------------------------------------------------------------------------------------------------------- sketches


def sketched(reference: Any, got: Any) -> Any:
    recorded = Trace(probe={"rows": {}, **probing.sketch_logits(reference)})
    return run_checks.compare_logits(recorded, Trace(probe={"recorded": probing.sketch_logits(got)}))


@pytest.mark.parametrize("size", [1e-6, 1e-3, 0.5])
def test_the_distance_of_two_sketches_is_that_of_the_logits(size: float) -> None:
    draw = np.random.default_rng(2)
    x = draw.standard_normal((64, 5003)).astype("f4")
    y = (x + size * draw.standard_normal(x.shape)).astype("f4")
    exact = float(np.linalg.norm(y.astype("f8") - x) / np.linalg.norm(x.astype("f8")))
    assert sketched(x, y)[0] == pytest.approx(exact, rel=0.15)
    one = x.copy()
    one[40, 7] += 30 * size  # one logit of 320,000
    assert sketched(x, one)[0] == pytest.approx(30 * size / np.linalg.norm(x.astype("f8")), rel=0.05)
    assert sketched(x, x) == (0.0, None, None)


def test_infinite_logits_of_a_padded_vocabulary_are_no_difference_and_new_ones_are() -> None:
    x = np.ones((4, 8), "f4")
    x[:, 6:] = -np.inf
    assert sketched(x, x)[0] == 0.0
    y = x.copy()
    y[1, 1] = np.nan
    check = run_checks.check_probe(
        Trace(probe=probing.sketch_logits(x)), Trace(probe={"recorded": probing.sketch_logits(y)}), Bound(1e-6)
    )
    assert check.verdict == "fail" and math.isinf(sketched(x, y)[0])


def test_a_probe_that_one_side_could_not_make_is_not_comparable() -> None:
    reference = Trace(probe={"rows": {}, **probing.sketch_logits(np.ones((2, 3)))})
    assert "did not compute" in str(run_checks.compare_logits(reference, Trace()))
    assert "why not" in str(run_checks.compare_logits(reference, Trace(probe={"recorded": {"skipped": "why not"}})))
    assert "shape [2, 4]" in str(sketched(np.ones((2, 3)), np.ones((2, 4))))
    other = replace(Trace(probe={"recorded": probing.sketch_logits(np.ones((2, 3)))}), dtype="bf16")
    assert "computes in bf16" in str(run_checks.compare_logits(replace(reference, dtype="fp32"), other))


# --------------------------------------------------------------------------------- recordings compared with checkpoints


def recorded_rng(ranks: int = 3) -> tuple[Trace, dict[int, dict[str, Any]]]:
    """A recording's generators, and the states by rank."""
    states: dict[int, dict[str, Any]] = {}
    generators = []
    with probing.preserving_generators():
        for rank in range(ranks):
            torch.manual_seed(rank), np.random.seed(rank), random.seed(rank)
            np.random.rand(rank + 1)
            states[rank] = {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}
            generators.append(recorded_state.gather_side_state({}, "cpu")["generators"][0])
    return Trace(start=3, generators=generators), states


def rng_of(tree: dict[str, Any], reference: Trace) -> Any:
    """The differences of random states in a checkpoint with this tree."""
    found = collect_side_state(flatten_side_state(tree))
    got = Trace(start=3, layout="dcp", values=found.values, others=found.others)
    return compare_side_state(reference, got, "rng")


def test_random_states_are_found_under_any_name_and_must_be_those_of_their_rank() -> None:
    reference, states = recorded_rng()
    same = rng_of({"rng": {str(r): s for r, s in states.items()}}, reference)
    assert not same.problems and same.compared == 9
    assert not rng_of({"random_states": {f"rank_{r}": s for r, s in states.items()}}, reference).problems
    assert not rng_of({"rng_state": states[0]}, reference).problems, "of one rank, without its number"
    legacy = {k: np.random.RandomState(0).get_state(legacy=False) for k in ("numpy",)}
    legacy["numpy"]["state"] |= {"key": states[1]["numpy"][1], "pos": states[1]["numpy"][2]}
    assert not rng_of({"rng": {"1": {"numpy": legacy["numpy"]}}}, reference).problems
    bare = {"rng": {str(r): s["torch"] for r, s in states.items()}}
    assert not rng_of(bare, reference).problems
    bare["rng"]["1"] = bare["rng"]["0"]
    assert list(rng_of(bare, reference).found) == ["rng.1"], "a number at the end is a rank, too"
    exchanged = {"rng": {"0": states[0], "1": states[2], "2": states[1]}}
    assert {p.partition(" ")[0] for p in rng_of(exchanged, reference).problems} >= {"rng.1.torch", "rng.2.python.1"}
    two = {"rng": {"0": states[0], "1": states[1]}}
    assert rng_of(two, reference).missing == ["torch's of rank 2", "numpy's of rank 2", "python's of rank 2"]
    one = collect_side_state(flatten_side_state({"rng": {"0": states[0]}}))
    for layout, lost in (("dcp", 0), ("trainer", 6), ("accelerate", 6)):
        got = Trace(start=3, layout=layout, values=one.values, others=one.others)
        assert len(compare_side_state(reference, got, "rng").missing) == lost, "a script may save those of rank 0 alone"
    other = torch.Generator().manual_seed(9).get_state()
    assert not rng_of({"rng": {str(r): {**s, "loader": other} for r, s in states.items()}}, reference).problems


def test_random_states_of_another_step_fail_and_a_checkpoint_without_any_is_not_comparable() -> None:
    reference, states = recorded_rng()
    for rank, state in states.items():
        torch.set_rng_state(state["torch"])
        torch.rand(1)
        later = {**state, "torch": torch.get_rng_state()}
        assert list(rng_of({"rng": {str(rank): later}}, reference).found) == [f"rng.{rank}.torch"]
        numbers = list(state["numpy"])
        numbers[2] += 2
        assert list(rng_of({"rng": {str(rank): {"numpy": tuple(numbers)}}}, reference).found) == [f"rng.{rank}.numpy.2"]
    alone = collect_side_state(flatten_side_state({"rng_state": torch.get_rng_state()}))
    checks = {
        c.name: c
        for c in state_checks.check_configuration(reference, Trace(start=3, layout="dcp", others=alone.others))
    }
    assert checks["config.rng"].verdict == "fail" and "has other contents" in checks["config.rng"].text
    checks = {c.name: c for c in state_checks.check_configuration(reference, Trace(start=3, layout="dcp"))}
    assert checks["config.rng"].verdict == "not comparable" and "no random states" in checks["config.rng"].text


def test_a_value_that_ranks_held_differently_may_be_that_of_any_of_them() -> None:
    reference = Trace(
        start=3, values={"dataloader.at": 5}, others={"dataloader.order": ("int64", (3,), "aa")},
        variants={"dataloader.at": [5, 6], "dataloader.order": [["int64", [3], "aa"], ["int64", [3], "bb"]]},
    )  # fmt: skip

    def problems(at: int, digest: str, start: int = 3) -> list[str]:
        others = {"dataloader.order": ("int64", (3,), digest)}
        got = Trace(start=start, layout="dcp", values={"dataloader.at": at}, others=others)
        return compare_side_state(reference, got, "dataloader").problems

    assert not problems(5, "aa") and not problems(6, "bb")
    assert problems(7, "bb") == ["dataloader.at is 7 and was 5"] and len(problems(6, "cc")) == 1
    assert not problems(7, "cc", start=4), "the recording is of another step"


def test_what_was_not_passed_to_a_recorder_is_listed_each_by_its_name(tmp_path: Path) -> None:
    model, optimizer = little()
    recorder = ckpttool.Recorder(tmp_path / "r.jsonl", model, optimizer, clip=1.0, scaler=lambda: {"scale": 2.0})
    recorder.state(0)
    recorder.step(1, loss=1.0)
    reference = read_reference(tmp_path / "r.jsonl", 0)
    got = Trace(layout="dcp", clip=1.0, state=reference.state, values={"scaler.scale": 2.0}, steps=[Step(1, 1.0)])
    checks = judge_single_run(reference, got).checks
    lines = "\n".join(list_not_verified(reference, got, checks))
    for what in ("scheduler", "dataloader", "extra", "probe"):
        assert f"{what} was not passed to Recorder" in lines
    assert "scaler" not in lines.replace("grad scaler", "") and "no random states" in lines


def test_a_recorder_that_is_not_given_the_bound_of_clipping_notices_it(tmp_path: Path) -> None:
    model, optimizer = little()
    for name, about in (("unknown", {}), ("known", {"clip": 1e-3}), ("off", {"clip": 0.0})):
        with ckpttool.Recorder(tmp_path / name, model, optimizer, **about) as recorder, warnings.catch_warnings():
            warnings.simplefilter("error" if name == "known" else "ignore")
            for step in (1, 2):
                model(torch.ones(1, 3)).sum().backward()
                bound = 1e9 if name == "off" and step == 1 else 1e-3
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), bound)
                optimizer.step(), optimizer.zero_grad()
                recorder.step(step, loss=1.0, grad_norm=norm)
    unknown, known, off = (read_reference(tmp_path / name) for name in ("unknown", "known", "off"))
    assert (
        "the grad norm of step 1 is" in unknown.unrecorded["clip"]
        and "the optimizer got gradients of norm 0.00" in unknown.unrecorded["clip"]
    )
    assert "clip" not in known.unrecorded and known.clip == 1e-3
    assert off.clip is None and "step 2" in off.unrecorded["clip"]


def test_the_global_batch_follows_from_the_rows_if_it_was_not_passed(tmp_path: Path) -> None:
    recorder = ckpttool.Recorder(tmp_path / "r.jsonl")
    recorder.step(1, loss=1.0, batch=[torch.ones(2, 4, dtype=torch.int64), torch.ones(4, 4, dtype=torch.int64)])
    assert read_reference(tmp_path / "r.jsonl").global_batch == 6
    ckpttool.Recorder(tmp_path / "r.jsonl", global_batch=12)
    assert read_reference(tmp_path / "r.jsonl").global_batch == 12
