"""nanotron's step folders, which its own functions wrote (fixtures/nanotron_jobs.py)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import ckpttool_here
from peers import FIXTURES, difference, load_dcp, load_full, load_hf, tensors_of
from safetensors.torch import load_file, save_file

import ckpttool
from ckpttool.errors import Corrupt, Unsupported

RUNS = FIXTURES / "nanotron"


def truth_of(run: str, kind: tuple[str, ...] = ("model.", "optim.")) -> dict[str, torch.Tensor]:
    return {n: t for n, t in load_file(RUNS / run / "truth.safetensors").items() if n.startswith(kind)}


def copied(run: str, to: Path) -> Path:
    shutil.copytree(RUNS / run / "3", to / "3")
    return to / "3"


@pytest.mark.parametrize("run", ["zero1", "zero0"])
@pytest.mark.parametrize("to", ["dcp", "full"])
def test_parts_and_flat_ranges_are_whole_tensors_bit_for_bit(run: str, to: str, tmp_path: Path) -> None:
    out = tmp_path / ("out" if to == "dcp" else "out.pt")
    done = ckpttool.convert(RUNS / run / "3", out, to=to, world_size=3 if to == "dcp" else None)
    assert done.verified and not done.dropped
    tree = load_dcp(out) if to == "dcp" else load_full(out)
    found = {n: t for n, t in tensors_of(tree).items() if n.startswith(("model.", "optim."))}
    steps = {n: found.pop(n) for n in list(found) if n.endswith(".step")}
    assert difference(found, truth_of(run)) == []
    assert len(steps) == 6 and {float(t) for t in steps.values()} == {1.0}
    masters = {f"master.{n}": t for n, t in tree["extra"].get("master", {}).items()}
    assert difference(masters, truth_of(run, ("master.",))) == []


@pytest.mark.parametrize("run", ["zero1", "zero0"])
def test_to_hf_has_the_weights(run: str, tmp_path: Path) -> None:
    ckpttool.convert(RUNS / run / "3", tmp_path / "out", to="hf")
    found = {f"model.{n}": t for n, t in load_hf(tmp_path / "out").items()}
    assert difference(found, truth_of(run, ("model.",))) == []


@pytest.mark.parametrize("run", ["zero1", "zero0"])
def test_groups_counters_scheduler_and_random_states(run: str, tmp_path: Path) -> None:
    ckpttool.convert(RUNS / run / "3", tmp_path / "out.pt", to="full")
    tree = load_full(tmp_path / "out.pt")
    groups = tree["optim"]["param_groups"]
    assert [g["weight_decay"] for g in groups] == [0.1, 0.0]
    names = [
        [f"model.{x}" for x in g]
        for g in (
            ("embed.weight", "block.0.qkv.weight", "block.0.down.weight", "block.1.qkv.weight"),
            ("block.0.norm.weight", "block.1.norm.weight"),
        )
    ]
    assert [sorted(g["params"]) for g in groups] == [sorted(x) for x in names]
    assert tree["trainer"]["step"] == 3 and tree["trainer"]["consumed_train_samples"] == 36
    assert tree["scheduler"]["step_size"] == 2
    assert [tree["rng"][str(r)]["tp_synced"]["random"][1][2] for r in range(4)] == [0, 1, 2, 3]  # each rank's own


def test_zero3_gets_the_whole_state(tmp_path: Path) -> None:
    ckpttool.convert(RUNS / "zero0" / "3", tmp_path / "zero", to="zero3", world_size=2)
    ckpttool.convert(tmp_path / "zero", tmp_path / "back.pt", to="full")
    found = {
        n: t
        for n, t in tensors_of(load_full(tmp_path / "back.pt")).items()
        if n.startswith(("model.", "optim.")) and not n.endswith(".step")
    }
    assert difference(found, truth_of("zero0")) == []


def test_the_run_lists_its_steps_by_number(tmp_path: Path) -> None:
    for step in (9, 10):
        shutil.copytree(RUNS / "zero1" / "3", tmp_path / str(step))
    shutil.copytree(RUNS / "zero1" / "3", tmp_path / "11")
    (tmp_path / "11" / "checkpoint_metadata.json").unlink()
    found = json.loads(ckpttool_here("inspect", tmp_path, "--json").stdout)
    assert {(c["name"], c["step"], c["complete"]) for c in found["checkpoints"] if c["layout"] == "nanotron"} == {
        ("9", 9, True),
        ("10", 10, True),
    }
    assert not any(c["complete"] for c in found["checkpoints"] if c["name"].startswith("11"))
    assert found["newest"] == str(tmp_path / "10")
    found = json.loads(ckpttool_here("inspect", RUNS / "zero1" / "3", "--json").stdout)
    assert (found["layout"], found["trainer"], found["ranks"], found["step"]) == ("nanotron", "nanotron", 4, 3)


def header(file: Path, **changes: str) -> None:
    from safetensors import safe_open

    with safe_open(file, "pt") as f:
        about = f.metadata()
    save_file(load_file(file), file, about | changes)


QKV = "model/model/block/0/qkv/model_weight_pp-rank-0-of-1_tp-rank-1-of-2.safetensors"


def config(folder: Path, change: Callable[[Any], None]) -> None:
    file = folder / "optimizer" / "optimizer_config.json"
    found = json.loads(file.read_text())
    change(found)
    file.write_text(json.dumps(found))


@pytest.mark.parametrize(
    ("harm", "error", "says"),
    [
        (lambda d: (d / QKV).unlink(), Corrupt, r"qkv.weight\" \(16, 6\): chunks hold 48 of 96 elements"),
        (lambda d: header(d / QKV, unsharded_shape="(18, 6)"), Corrupt, "different shapes or dtypes"),
        (lambda d: header(d / QKV, local_global_slices_pairs="0,9,None|None,None,None#0,9,None|None,None,None"), Corrupt, "does not say which part"),
        (lambda d: header(d / QKV, local_global_slices_pairs="0,8,2|None,None,None#0,8,2|None,None,None"), Corrupt, "the slice 0,8,2 of 8"),
        (lambda d: next((d / "optimizer").glob("*dp-1*tp-0*")).unlink(), Corrupt, "no file of pp 0, dp 1, tp 0"),
        (lambda d: config(d, lambda c: c["parallelism"].update(expert_parallel_size="2")), Unsupported, "experts on 2 ranks of their own"),
        (lambda d: config(d, lambda c: c["configs"]["param_name_to_dp_rank_offsets"]["model.embed.weight"].update({"1": ["38", "78"]})), Corrupt, "says \\(38, 78\\)"),
        (lambda d: shutil.rmtree(d / "model" / "model"), Corrupt, "has no model_"),
        (lambda d: (d / "checkpoint_metadata.json").write_text("[]"), Corrupt, "is not what nanotron writes"),
    ],
    ids=["part", "shape", "bounds", "step", "rank", "experts", "ranges", "empty", "metadata"],
)  # fmt: skip
def test_what_does_not_fit_together_is_refused(harm: Any, error: Any, says: str, tmp_path: Path) -> None:
    folder = copied("zero1", tmp_path)
    harm(folder)
    with pytest.raises(error, match=says):
        ckpttool.open(folder)


def test_a_file_deep_in_the_folders_of_the_model_that_is_not_read_is_listed(tmp_path: Path) -> None:
    source = copied("zero1", tmp_path)
    (source / "model" / "model" / "embed" / "extra_state.pt").write_bytes(b"x")
    assert [row["name"] for row in ckpttool.inspect(source).not_read] == ["model/model/embed/extra_state.pt"]


def optimizer(folder: Path, change: Callable[[Any], None], ranks: str = "") -> None:
    for file in sorted((folder / "optimizer").glob(f"*{ranks}_exp*.pt" if ranks else "*.pt")):
        tree = torch.load(file, weights_only=True)
        change(tree)
        torch.save(tree, file)


def test_what_users_add_to_counters_and_optimizer_is_carried(tmp_path: Path) -> None:
    source = copied("zero0", tmp_path)
    about = json.loads((source / "checkpoint_metadata.json").read_text())
    (source / "checkpoint_metadata.json").write_text(json.dumps({**about, "cp": 2, "custom_metas": {"seen": [1]}}))
    optimizer(source, lambda tree: tree.update(inner={"k": 3}), "tp-1-of-2")
    ckpttool.convert(source, tmp_path / "out.pt", to="full")
    extra = load_full(tmp_path / "out.pt")["extra"]
    assert extra["nanotron"] == {
        **{k: about[k] for k in ("version", "tp", "dp")},
        "cp": 2,
        "custom_metas": {"seen": [1]},
    }
    assert extra["per_rank"] == {str(rank): {"optim": {"inner": {"k": 3}}} for rank in (1, 3)}


def test_parameters_without_state_which_groups_cannot_list_are_noted(tmp_path: Path) -> None:
    source = copied("zero0", tmp_path)
    assert not any("without optimizer state" in n for n in ckpttool.inspect(source).notes)
    optimizer(source, lambda tree: tree["param_groups"][1]["params"].append(9))
    assert any(
        n.startswith("param group 1 has parameters without optimizer state") for n in ckpttool.inspect(source).notes
    )


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda d: optimizer(d, lambda t: t["state"][4]["exp_avg"].add_(1), "dp-0-of-2_tp-1-of-2"), "copies of 1 of .*norm.weight.exp_avg"),
        (lambda d: optimizer(d, lambda t: t["state"][4].pop("step"), "dp-0-of-2_tp-1-of-2"), "norm.weight has .*'exp_avg_sq'.*, elsewhere"),
        (lambda d: optimizer(d, lambda t: t["param_groups"][0]["params"].__setitem__(0, 4), "dp-0-of-2_tp-1-of-2"), "in one param group in the file of one rank"),
        (lambda d: torch.save({"tp_synced": {"random": (3, (1,), None)}}, d / "random/tp-0-of-1_dp-0-of-2_pp-0-of-1.pt"), "two entries"),
    ],
    ids=["replica", "slot", "group", "random"],
)  # fmt: skip
def test_ranks_that_disagree_beside_their_own_parts_are_refused(harm: Any, says: str, tmp_path: Path) -> None:
    folder = copied("zero1", tmp_path)
    harm(folder)
    with pytest.raises(Corrupt, match=says):
        ckpttool.convert(folder, tmp_path / "out.pt", to="full")
