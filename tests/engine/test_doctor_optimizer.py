"""`doctor` on the optimizer. What it says about param groups is what torch's `load_state_dict` does, before and after the command that
it prints."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peers
import pytest
import torch
from commands import ckpttool_here
from test_mixups import set_steps
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import ckpttool
from ckpttool.engine.doctor.examine import Diagnosis, doctor


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3))


Groups = list[dict[str, Any]]


def groups(model: torch.nn.Module, kind: str) -> Groups:
    """Param groups with names, as torch >= 2.6 keeps them."""
    p = list(model.named_parameters())
    decay, rest = [x for x in p if x[1].dim() > 1], [x for x in p if x[1].dim() < 2]
    return {
        "one": [{"params": p, "weight_decay": 0.1}],
        "two": [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
        "turned": [{"params": rest, "weight_decay": 0.0}, {"params": decay, "weight_decay": 0.1}],
        "reversed": [{"params": p[::-1], "weight_decay": 0.1}],
        "head": [{"params": p[-2:], "weight_decay": 0.3}],
    }[kind]


def saved(path: Path, kind: str, steps: int = 3) -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    """A job with these groups, and its checkpoint."""
    model = net()
    optimizer = torch.optim.AdamW(groups(model, kind), lr=1e-3)
    for i, g in enumerate(optimizer.param_groups):
        g["lr"] = 1e-3 * (i + 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda s: 1.0] * len(optimizer.param_groups))
    for _ in range(steps):
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": schedule.state_dict()}, path
    )
    return model, optimizer, schedule


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {n: optimizer.state[p]["exp_avg"].clone() for n, p in model.named_parameters() if p in optimizer.state}


def mismatches(found: Diagnosis) -> list[str]:
    return [f.text for f in found.findings if f.severity == "mismatch"]


@pytest.mark.parametrize(
    ("here", "there"),
    [("one", "two"), ("two", "one"), ("two", "turned"), ("one", "reversed"), ("head", "two"), ("two", "head")],
)
def test_groups_of_another_job_are_compared_and_the_printed_command_fits_them(
    tmp_path: Path, here: str, there: str
) -> None:
    model, optimizer, _ = saved(tmp_path / "a.pt", here)
    truth = state_of(model, optimizer)
    saved(tmp_path / "job.pt", there, 1)
    done = ckpttool_here("doctor", tmp_path / "a.pt", "--like", tmp_path / "job.pt")
    assert done.returncode == 5 and "param-groups" in done.stdout
    assert done.stdout.splitlines()[0].endswith("sound, but it does not fit --like")
    found = doctor(tmp_path / "a.pt", like=tmp_path / "job.pt")
    assert found.sound and found.fits is False and mismatches(found)
    (line,) = found.next
    done = ckpttool_here(*shlex.split(line)[1:])
    assert done.returncode == 0, done.stderr
    assert "--drop" in line if (here, there) == ("two", "head") else "--drop" not in line
    if there == "head":  # what was dropped is named
        assert "optim.state.0.weight.exp_avg" in done.stderr or "9" in done.stderr
    other = net()
    new = torch.optim.AdamW(groups(other, there))
    copy = torch.load(tmp_path / "a-regrouped.pt", weights_only=False)
    new.load_state_dict(copy["optimizer"] if "optimizer" in copy else copy["optim"])
    got = state_of(other, new)
    wanted = {n for g in new.param_groups for n in g["param_names"]} & truth.keys()
    assert got.keys() == wanted and all(torch.equal(got[n], truth[n]) for n in wanted)
    for g in new.param_groups:  # hyperparameters come from the group that most of its parameters were in
        old = [o for o in optimizer.param_groups for n in g["param_names"] if n in o["param_names"]]
        if old:
            assert g["weight_decay"] == max(old, key=old.count)["weight_decay"]
    schedule = torch.optim.lr_scheduler.LambdaLR(new, [lambda s: 1.0] * len(new.param_groups))
    schedule.load_state_dict(copy["scheduler"])
    assert len(schedule.base_lrs) == len(new.param_groups)
    assert [g["lr"] for g in new.param_groups] == schedule.base_lrs
    assert doctor(tmp_path / "a-regrouped.pt", like=tmp_path / "job.pt").fits or here == "head"


def test_equal_groups_fit(tmp_path: Path) -> None:
    saved(tmp_path / "a.pt", "two")
    saved(tmp_path / "job.pt", "two", 1)
    done = ckpttool_here("doctor", tmp_path / "a.pt", "--like", tmp_path / "job.pt", "--json")
    assert done.returncode == 0
    told = json.loads(done.stdout)
    assert told["fits"] is True and told["findings"] == []


def test_regroup_asks_for_a_checkpoint_with_names(tmp_path: Path) -> None:
    saved(tmp_path / "a.pt", "two")
    done = ckpttool_here("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--regroup")
    assert done.returncode == 2 and "--like" in done.stderr
    torch.save({"w": torch.zeros(2)}, tmp_path / "w.pt")
    done = ckpttool_here("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--regroup", "--like", tmp_path / "w.pt")
    assert done.returncode == 2 and "do not list names" in done.stderr


def test_weights_and_optimizer_of_two_runs(tmp_path: Path) -> None:
    _, optimizer, _ = saved(tmp_path / "a.pt", "two")
    torch.save({"model": {"x": torch.zeros(3)}, "optimizer": optimizer.state_dict()}, tmp_path / "mixed.pt")
    found = doctor(tmp_path / "mixed.pt")
    assert [f.kind for f in found.findings] == ["orphaned-state"]


def drop_slot(tree: Any) -> None:
    del tree["optim"]["state"]["0.bias"]["exp_avg_sq"]


def transpose_moment(tree: Any) -> None:
    tree["optim"]["state"]["0.weight"]["exp_avg"] = torch.zeros(6, 8)


def list_twice(tree: Any) -> None:
    tree["optim"]["param_groups"][0]["params"].append("0.bias")


def drop_groups(tree: Any) -> None:
    tree["optim"]["param_groups"] = []


def drop_state(tree: Any) -> None:
    tree["optim"]["state"] = {}


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (drop_slot, "exp_avg_sq is missing for 1 of 6 parameters, first 0.bias"),
        (transpose_moment, '"optim.state.0.weight.exp_avg" is [6, 8], and its weight [8, 6]'),
        (list_twice, 'the param groups list 1 parameter more than once, first "0.bias"'),
        (drop_groups, "the optimizer has state of 6 parameters, and no param groups"),
        (drop_state, "no parameter has moments, after 3 steps with param groups that have betas"),
    ],
)
def test_state_that_no_job_can_go_on_with_is_named_here_and_by_inspect(
    tmp_path: Path, spoil: Callable[[Any], None], words: str
) -> None:
    model, optimizer, schedule = saved(tmp_path / "a.pt", "one")
    optim = get_optimizer_state_dict(model, optimizer)
    tree = {"model": model.state_dict(), "optim": optim, "scheduler": schedule.state_dict()}
    torch.save(tree, tmp_path / "b.pt")
    assert not doctor(tmp_path / "b.pt").findings and not ckpttool.inspect(tmp_path / "b.pt").missing
    spoil(tree)
    torch.save(tree, tmp_path / "b.pt")
    (finding,) = doctor(tmp_path / "b.pt").findings
    assert (finding.kind, finding.severity) == ("incomplete-state", "note") and words in finding.text
    assert finding.text in ckpttool.inspect(tmp_path / "b.pt").missing


def test_state_that_no_group_lists(tmp_path: Path) -> None:
    """What DCP keeps of two pipeline stages: the state of both, and the groups of one, with which no job trains."""
    model, optimizer, _ = saved(tmp_path / "a.pt", "two")
    whole = get_optimizer_state_dict(model, optimizer)
    cut = {**whole, "param_groups": whole["param_groups"][:1]}
    gone = sorted(set(cut["state"]) - set(cut["param_groups"][0]["params"]))
    fresh = net()
    job = torch.optim.AdamW(groups(fresh, "two"))
    with pytest.raises(KeyError, match="betas"):
        set_optimizer_state_dict(fresh, job, cut)
        job.step()
    torch.save({"model": model.state_dict(), "optim": cut}, tmp_path / "stage.pt")
    torch.save({"model": model.state_dict(), "optim": whole}, tmp_path / "whole.pt")
    (found,) = doctor(tmp_path / "stage.pt").findings
    assert found.kind == "ungrouped-state" and sorted(found.tensors) == gone
    assert not doctor(tmp_path / "whole.pt").findings
    said = f'state of {len(gone)} parameters that no param group lists, first "{gone[0]}"'
    assert any(said in line for line in ckpttool.inspect(tmp_path / "stage.pt").missing)
    assert any(
        said in note for note in ckpttool.convert(tmp_path / "stage.pt", tmp_path / "dcp", to="dcp", world_size=1).notes
    )

    how = {"to": "full", "like": tmp_path / "whole.pt", "regroup": True}
    done = ckpttool.convert(tmp_path / "stage.pt", tmp_path / "again.pt", **how)
    assert not any("no param group" in note for note in done.notes)
    job = torch.optim.AdamW(groups(fresh, "two"))
    set_optimizer_state_dict(fresh, job, torch.load(tmp_path / "again.pt", weights_only=True)["optim"])
    assert state_of(fresh, job).keys() == whole["state"].keys()
    assert all(torch.equal(t, whole["state"][n]["exp_avg"]) for n, t in state_of(fresh, job).items())


# ------------------------------------------------------------------------------------------------------------ steps


def test_a_trainer_state_of_another_step(tmp_path: Path) -> None:
    """checkpoint-3 of Trainer with files of other steps: the counter, then the name of the folder."""
    fixture = next((peers.FIXTURES / "trainers" / "trainer_ddp" / "ckpt").glob("checkpoint-*"))
    step = int(fixture.name.partition("-")[2])
    for case, name, counter in (
        ("sound", step, step), ("counter", step, step + 100), ("name", step + 50, step), ("ahead", step - 1, step - 1),
    ):  # fmt: skip
        folder = tmp_path / case / f"checkpoint-{name}"
        shutil.copytree(fixture, folder)
        state = json.loads((folder / "trainer_state.json").read_text())
        (folder / "trainer_state.json").write_text(json.dumps({**state, "global_step": counter}))
        found = [f for f in doctor(folder).findings if f.kind == "mixed-steps"]
        assert bool(found) is (case != "sound"), case
        if case == "sound":
            continue
        assert (
            found[0].severity == ("note" if case == "name" else "damage") and f"has step {counter:,}" in found[0].text
        )
        two = {
            "counter": "folder and the optimizer",
            "name": "trainer_state.json and the optimizer",
            "ahead": "folder and trainer_state.json",
        }
        assert f"{two[case]} are of step" in found[0].text, found[0].text


def test_a_folder_of_torchtitan_that_is_named_after_another_step(tmp_path: Path) -> None:
    with ckpttool.open(peers.FIXTURES / "trainers" / "titan_w2") as opened:
        assert opened.checkpoint.trainer == "torchtitan"
        step = opened.checkpoint.value("trainer.step")
    for name in (step, step + 1):
        folder = tmp_path / f"step-{name}"
        shutil.copytree(peers.FIXTURES / "trainers" / "titan_w2", folder)
        assert [f.kind for f in doctor(folder).findings] == (["mixed-steps"] if name != step else [])


def test_a_deepspeed_tag_of_another_step(tmp_path: Path) -> None:
    shutil.copytree(peers.FIXTURES / "zero1_w2" / "ckpt", tmp_path / "z")
    assert not doctor(tmp_path / "z").findings
    (tmp_path / "z" / "global_step3").rename(tmp_path / "z" / "global_step900")
    (tmp_path / "z" / "latest").write_text("global_step900")
    (one,) = doctor(tmp_path / "z").findings
    assert (one.kind, one.severity) == ("mixed-steps", "note") and "900" in one.text and "renamed" in one.text


def test_a_rank_file_of_another_step_is_named_with_the_set_that_belongs_together(tmp_path: Path) -> None:
    """The steps in one rank's file of a real save are one less, with right CRC32s, as in the file of the save before."""
    folder = tmp_path / "d"
    shutil.copytree(peers.FIXTURES / "fsdp2_w3" / "ckpt", folder)
    set_steps(folder, lambda file, _: 2.0 if file == "__2_0.distcp" else None)
    found = doctor(folder)
    assert not found.sound and found.exact and [f.kind for f in found.findings] == ["mixed-steps"]
    text = found.findings[0].text
    assert "__2_0.distcp holds step 2" in text and "Of step 3: __1_0.distcp." in text


def test_files_of_an_earlier_save_by_more_ranks(tmp_path: Path) -> None:
    shutil.copytree(peers.FIXTURES / "fsdp2_w1" / "ckpt", tmp_path / "d")
    shutil.copy(peers.FIXTURES / "fsdp2_w3" / "ckpt" / "__2_0.distcp", tmp_path / "d")
    found = doctor(tmp_path / "d")
    assert found.sound and [(f.kind, f.severity) for f in found.findings] == [("leftover", "note")]
