"""`prune`: what policies keep and what a run needs stays, whatever trainers, links and kills do meanwhile."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import ckpttool_here as run
from peers import FIXTURES

import ckpttool
from ckpttool.engine import run_pruning
from ckpttool.engine.run_pruning import prune_run
from ckpttool.engine.runs import list_run
from ckpttool.engine.step_metrics import find_best_steps, read_metrics
from ckpttool.errors import Corrupt, Locked, NotPermitted, NotRecognised, SourceChanged, Unsafe, UsageError
from ckpttool.storage.lock import take_lock, unlock
from ckpttool.storage.partial import LeftoverFiles, clean
from ckpttool.storage.removal import Remover
from ckpttool.storage.source import Source
from tests.torture import prunes

TRAINERS = FIXTURES / "trainers"
DDP = TRAINERS / "trainer_ddp" / "ckpt" / "checkpoint-3"
DCP = FIXTURES / "fsdp2_w3" / "ckpt"


def make(at: Path, *steps: int, source: Path = DCP, name: str = "step-{}") -> Path:
    """A run with these steps."""
    for step in steps:
        shutil.copytree(source, at / name.format(step))
    return at


def names(at: Path) -> set[str]:
    """What lies in a folder."""
    return {p.name for p in at.iterdir()}


def age(at: Path, days: float) -> None:
    """Let a folder be that old."""
    when = time.time() - days * 86_400
    for p in (*at.rglob("*"), at):
        os.utime(p, (when, when))


# -------------------------------------------------------------------------------------------------------------- policies


@pytest.mark.slow
def test_policies_keep_and_the_rest_goes_only_with_yes(tmp_path: Path) -> None:
    make(tmp_path, *range(100, 1100, 100), 950)
    (tmp_path / "log.txt").write_text("x")
    before = names(tmp_path)
    stays = {"step-500", "step-900", "step-950", "step-1000"}
    words = ("prune", tmp_path, "--keep-last", 3, "--keep-every", 500)
    first = run(*words)
    assert first.returncode == 0 and names(tmp_path) == before
    assert first.stdout.count("would delete ") == 7 and "nothing was touched; --yes deletes them" in first.stderr
    assert run(*words, "--dry-run").stdout == first.stdout
    done = json.loads(run(*words, "--yes", "--json").stdout)
    assert {n for n in names(tmp_path) if n != "log.txt"} == stays == set(done["kept"])
    assert done["deleted"] == [f"step-{n}" for n in (100, 200, 300, 400, 600, 700, 800)]
    assert done["freed"] == 7 * sum(p.stat().st_size for p in DCP.iterdir()) and not done["refused"]
    assert done["kept"]["step-1000"] == [
        "the newest complete one",
        "one of the last 3",
        "step 1000 is a multiple of 500",
    ]
    again = run(*words, "-y", "-q")
    assert again.returncode == 0 and "deleted" not in again.stdout and again.stderr == ""


def test_runs_below_a_folder_are_pruned_one_by_one_and_epochs_count_where_there_are_no_steps(tmp_path: Path) -> None:
    make(tmp_path / "a", 1, 2, 3)
    make(tmp_path / "b", 7, 8)
    make(tmp_path / "c", 0, 1, 2, name="epoch_{}")
    done = prune_run(tmp_path, keep_last=1, keep_every=2, dry_run=False)
    assert done.deleted == ("c/epoch_1", "a/step-1", "b/step-7"), done
    assert names(tmp_path / "a") | names(tmp_path / "b") == {"step-2", "step-3", "step-8"}
    assert done.kept["c/epoch_0"] == ("epoch 0 is a multiple of 2",)


@pytest.mark.slow
def test_a_folder_with_several_models_of_one_step_goes_as_one(tmp_path: Path) -> None:
    verl = TRAINERS / "verl_fsdp2_w3" / "ckpt"
    for step in (1, 2, 3):
        for model in ("actor", "critic"):
            shutil.copytree(verl, tmp_path / f"global_step_{step}" / model)
        (tmp_path / f"global_step_{step}" / "data.pt").write_text("x")
    (tmp_path / "global_step_2" / "logs").mkdir()
    done = prune_run(tmp_path, keep_last=1, dry_run=False)
    assert done.deleted == ("global_step_1",) and names(tmp_path) == {"global_step_2", "global_step_3"}
    assert done.refused == {"global_step_2": "it holds logs, which is no checkpoint"}


@pytest.mark.parametrize(
    "words",
    [
        [], ["--keep-last", "0"], ["--keep-best", "x"], ["--keep-best", "nope.json:loss"], ["--keep-last", "1", "--keep-best-mode", "min"],
        ["--keep-best", "metrics.json:loss", "--keep-best-mode", "least"], ["--keep-last", "1", "--drop-incomplete", "soon"],
    ],
)  # fmt: skip
def test_policies_that_make_no_sense_are_refused(words: list[str], tmp_path: Path) -> None:
    make(tmp_path, 1, 2, 3)
    done = run("prune", tmp_path, "--yes", *words)
    assert done.returncode == 2 and names(tmp_path) == {"step-1", "step-2", "step-3"}, done


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    make(tmp_path, 1, 2)
    assert run("prune", "s3://bucket/run", "--keep-last", 1).returncode == 2
    with pytest.raises(UsageError, match="is a checkpoint itself"):
        prune_run(tmp_path / "step-1", keep_last=1, dry_run=False)
    with pytest.raises(UsageError, match="is a file"):
        prune_run(tmp_path / "step-1" / ".metadata", keep_last=1)
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotRecognised):
        prune_run(tmp_path / "empty", keep_last=1)
    for name in ("step-1", "step-2"):
        (tmp_path / name / ".metadata").unlink()
    with pytest.raises(Corrupt, match=r"No step in .* is complete"):
        prune_run(tmp_path, keep_last=1, dry_run=False)
    assert names(tmp_path) == {"step-1", "step-2", "empty"}


# -------------------------------------------------------------------------------------------------------- the best step


def metrics(at: Path, values: dict[int, Any], text: Callable[[int, Any], Any], file: str = "metrics.json") -> None:
    """A file of each step."""
    for step, value in values.items():
        (at / f"step-{step}" / file).write_text(json.dumps(text(step, value)))


@pytest.mark.parametrize(
    ("key", "text", "mode", "best"),
    [
        ("eval.loss", lambda n, v: {"eval": {"loss": v}}, None, {2}),
        ("eval.loss", lambda n, v: {"eval.loss": v}, "max", {1}),
        ("score", lambda n, v: {"score": v}, "max", {1}),
        ("score", lambda n, v: {"score": v}, None, {1, 2}),  # the name does not tell, so both ends stay
        ("log_history.eval_loss", lambda n, v: {"log_history": [{"step": n - 1, "eval_loss": -9}, {"step": n, "loss": 4}, {"step": n, "eval_loss": v}]},
         None, {2}),
    ],
)  # fmt: skip
def test_the_best_step_stays(
    key: str, text: Callable[[int, Any], Any], mode: str | None, best: set[int], tmp_path: Path
) -> None:
    make(tmp_path, 1, 2, 3, 4)
    metrics(tmp_path, {1: 0.9, 2: 0.1, 3: 0.1, 4: 0.5}, text)
    done = prune_run(tmp_path, keep_best=f"metrics.json:{key}", keep_best_mode=mode, dry_run=False)
    assert names(tmp_path) == {f"step-{n}" for n in best | {4}}, done
    assert any("the smallest" in why or "the largest" in why for reasons in done.kept.values() for why in reasons)


@pytest.mark.slow
def test_the_best_step_of_a_log_of_the_run(tmp_path: Path) -> None:
    make(tmp_path, 100, 200, 300, 400)
    log = [{"step": n, "train/loss": n / 100} for n in range(50, 450, 50)] + [
        {"note": "x"},
        {"step": 999, "train/loss": float("nan")},
    ]
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, log)) + "\n")
    assert set(prune_run(tmp_path, keep_best="log.jsonl:train/loss").kept) == {"step-100", "step-400"}
    (tmp_path / "all.json").write_text(json.dumps({"log_history": log}, indent=1))
    assert set(prune_run(tmp_path, keep_best="all.json:log_history.train/loss", keep_best_mode="max").kept) == {
        "step-400"
    }
    (tmp_path / "one.json").write_text(json.dumps({"global_step": 400, "log_history": log}))  # on one line
    assert set(prune_run(tmp_path, keep_best="one.json:log_history.train/loss").kept) == {"step-100", "step-400"}
    absolute = prune_run(tmp_path, keep_best=f"{tmp_path / 'log.jsonl'}:train/loss")
    assert set(absolute.kept) == {"step-100", "step-400"}
    metrics(tmp_path, {200: 0.0}, lambda n, v: {"train/loss": v}, "log.jsonl")  # a file of the steps counts first
    assert set(prune_run(tmp_path, keep_best="log.jsonl:train/loss").kept) == {"step-200", "step-400"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ({"loss": float("nan")}, "cannot be compared"), ({"loss": float("inf")}, "cannot be compared"), ({"loss": "0.3"}, "cannot be compared"),
        ({"loss": True}, "cannot be compared"), ({"a": {"loss": 1}}, "none has a number"), ({"loss": None}, "none has a number"),
        ([{"step": 1, "loss": 1}, {"step": 1, "loss": 2}], "has several numbers"),
    ],
)  # fmt: skip
def test_a_number_that_says_nothing_or_two_things_is_refused(text: Any, says: str, tmp_path: Path) -> None:
    make(tmp_path, 1, 2)
    metrics(tmp_path, {1: text}, lambda n, v: v)
    with pytest.raises(UsageError, match=says):
        prune_run(tmp_path, keep_best="metrics.json:loss", dry_run=False)
    (tmp_path / "step-1" / "metrics.json").unlink()
    lines = text if isinstance(text, list) else [{"step": 1, **text}]
    (tmp_path / "log").write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(UsageError, match=says):
        prune_run(tmp_path, keep_best="log:loss", dry_run=False)
    assert {"step-1", "step-2"} <= names(tmp_path)


def test_the_first_of_equal_numbers_is_the_best() -> None:
    steps = {"a": 3, "b": 1, "c": 2}
    assert find_best_steps({"a": 1.0, "b": 1.0, "c": 2.0}, steps, "loss", None) == {"b": "loss is 1, the smallest"}
    assert list(find_best_steps({"a": 2.0, "b": 1.0, "c": 2.0}, steps, "acc", "max")) == ["c"]


# ------------------------------------------------------------------------------------------------------- what must stay


def test_the_newest_that_opens_stays_and_so_do_unfinished_later_ones(tmp_path: Path) -> None:
    make(tmp_path, 1, 2, 3, 4, 5)
    (tmp_path / "step-5" / ".metadata").unlink()  # being written
    os.truncate(tmp_path / "step-4" / "__1_0.distcp", 100)  # complete by its names
    (tmp_path / "step-1" / ".metadata").unlink()  # of a job that was killed
    age(tmp_path / "step-1", 3)
    done = prune_run(tmp_path, keep_last=1, dry_run=False)
    assert done.deleted == ("step-2",) and set(done.kept) == {"step-3"}
    assert "being written" in done.refused["step-5"] and "does not open" in done.refused["step-4"]
    assert done.refused["step-1"].startswith("incomplete: no .metadata")
    done = prune_run(tmp_path, keep_last=1, drop_incomplete=timedelta(days=4), dry_run=False)
    assert "changed too lately" in done.refused["step-1"]
    done = json.loads(run("prune", tmp_path, "--keep-last", 1, "--drop-incomplete", "2d", "--yes", "--json").stdout)
    assert done["deleted"] == ["step-1"] and names(tmp_path) == {"step-3", "step-4", "step-5"}


def test_what_a_trainer_s_pointer_a_link_or_another_step_names_stays(tmp_path: Path) -> None:
    at = make(tmp_path / "run", *range(1, 11))
    (at / "latest").write_text("step-9")
    (at / "best").symlink_to("step-1")
    (tmp_path / "newest").symlink_to("run/step-2")  # beside the run
    (at / "logs").mkdir()
    (at / "logs" / "now").symlink_to("../step-3/.metadata")
    (at / "step-4" / "shared").symlink_to("../step-5/__0_0.distcp")  # of a step that goes itself
    (at / "step-10" / "shared").symlink_to("../step-6/__0_0.distcp")
    (at / "step-6" / "snapshot.yaml").write_text("location: ../step-7/0/weight\n")  # which step-6 needs in turn
    (at / "step-10" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "out/run/step-8"}))
    done = prune_run(at, keep_last=1, dry_run=False)
    assert done.deleted == ("step-4", "step-5")
    why = {name: reasons[-1] for name, reasons in done.kept.items()}
    assert why == {
        "step-10": "one of the last 1", "step-9": "latest names it", "step-1": "best names it",
        "step-2": "the run needs it: ../newest is a link into it", "step-3": "the run needs it: logs/now is a link into it",
        "step-6": "step-10 needs it: step-10/shared is a link into it", "step-7": "step-6 needs it: step-6/snapshot.yaml names files in it",
        "step-8": "step-10 needs it: step-10/adapter_config.json names files in it",
    }  # fmt: skip


def test_the_best_checkpoint_of_the_trainer_s_newest_state_stays(tmp_path: Path) -> None:
    make(tmp_path, 10, 20, 30, 40, source=DDP, name="checkpoint-{}")
    for step, best in ((20, 10), (30, 20), (40, 20)):
        file = tmp_path / f"checkpoint-{step}" / "trainer_state.json"
        state = json.loads(file.read_text()) | {"best_model_checkpoint": str(tmp_path / f"checkpoint-{best}")}
        file.write_text(json.dumps(state))
    done = prune_run(tmp_path, keep_last=1, dry_run=False)
    assert names(tmp_path) == {"checkpoint-20", "checkpoint-40"}
    assert done.kept["checkpoint-20"] == ("checkpoint-40: trainer.best_model_checkpoint names it",)


def test_steps_that_were_written_after_later_ones_stay(tmp_path: Path) -> None:
    """The job was taken back from step 500 to step 100, and saves step 200 again."""
    make(tmp_path, 100, 200, 300, 400, 500)
    for step in (100, 200, 300, 400, 500):  # copies have the times of the fixtures, which may be older
        age(tmp_path / f"step-{step}", 0 if step == 200 else 1)
    done = prune_run(tmp_path, keep_last=2, dry_run=False)
    assert done.deleted == ("step-100", "step-300")
    assert done.kept["step-200"] == ("written after step-500, as if the job had gone back",)


def test_an_export_beside_the_steps_is_not_what_a_job_resumes_from(tmp_path: Path) -> None:
    make(tmp_path, 1, 2, 3)
    for name in ("a-step-3", "step-2-hf", "step-4-hf"):
        shutil.copytree(FIXTURES / "hf_llama" / "ckpt", tmp_path / name)
    done = prune_run(tmp_path, keep_every=5, dry_run=False)
    assert done.deleted == ("step-1", "step-2", "step-2-hf")
    assert {n: r[0] for n, r in done.kept.items()} == {
        "step-3": "the newest complete one", "a-step-3": "of the same step as step-3", "step-4-hf": "later than step-3",
    }  # fmt: skip


def test_the_paths_that_callbacks_of_the_newest_file_hold_are_pointers(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        state = {"best_model_path": "/old/step=2.ckpt", "best_k_models": {"/old/step=1.ckpt": torch.tensor(0.5)}}
        whole = {"state_dict": {"w": torch.ones(3)}, "global_step": step, "callbacks": {"ModelCheckpoint": state}}
        torch.save(whole | {"pytorch-lightning_version": "2.6.0", "epoch": 0}, tmp_path / f"step={step}.ckpt")
    assert prune_run(tmp_path, keep_last=1, dry_run=False).deleted == ("step=3.ckpt",)


def test_the_steps_of_deepspeed_inside_a_trainer_s_may_be_others(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        shutil.copytree(TRAINERS / "accelerate_deepspeed_z3" / "ckpt", tmp_path / f"checkpoint_{step}")
        shutil.copytree(
            FIXTURES / "zero3_w2_tied" / "ckpt" / "global_step3", tmp_path / f"checkpoint_{step}" / "global_step3"
        )
    assert prune_run(tmp_path, keep_last=1, dry_run=False).deleted == ("checkpoint_10", "checkpoint_20")


def test_archives_and_what_has_no_step_stay(tmp_path: Path) -> None:
    make(tmp_path, 1, 2, 3)
    shutil.copytree(DCP, tmp_path / "final")
    shutil.copy(FIXTURES / "audit_store" / "plain.tar.zst", tmp_path / "step-0.tar.zst")
    shutil.copy(FIXTURES / "audit_store" / "plain.tar.zst", tmp_path / "step-1" / "a.tar.zst")
    shutil.copytree(DCP, tmp_path / "step-2" / "old" / "step-1")
    done = prune_run(tmp_path, keep_last=1, dry_run=False)
    assert done.deleted == () and done.refused["final"] == "no name has its step"
    assert "audit prune" in done.refused["step-0.tar.zst"] and "audit prune" in done.refused["step-1"]
    assert done.refused["step-2"] == "it holds step-2/old/step-1, of another step"


def test_nothing_outside_of_the_run_is_deleted(tmp_path: Path) -> None:
    other = make(tmp_path / "other", 1, 2)
    at = make(tmp_path / "run", 3, 4, 5)
    (at / "step-1").symlink_to(other / "step-1")
    (at / "more").symlink_to(other)
    (at / "step-4" / "data").symlink_to(other)
    done = prune_run(at, keep_last=1, dry_run=False)
    assert done.deleted == ("step-3", "step-4") and "nothing is deleted through a link" in done.refused["step-1"]
    assert names(other) == {"step-1", "step-2"} and len(list((other / "step-1").iterdir())) == 4
    assert names(at) == {"step-1", "more", "step-5"}
    (tmp_path / "link").symlink_to("run")  # the run itself may be a link
    make(at, 2)
    assert prune_run(tmp_path / "link", keep_last=1, dry_run=False).deleted == ("step-2",)


# ---------------------------------------------------------------------------------------------------------- meanwhile


def interfere(monkeypatch: pytest.MonkeyPatch, act: Callable[[str], None]) -> None:
    """Call `act` with the name of each step right before its last check."""
    real = run_pruning._Plan._delete

    def delete(self: Any, save: Any, remover: Any) -> str:
        act(save.name)
        return real(self, save, remover)

    monkeypatch.setattr(run_pruning._Plan, "_delete", delete)


def test_a_step_that_changes_or_is_named_meanwhile_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, 1, 2, 3, 4, 5, 6, 7)
    (tmp_path / "latest").write_text("step-7")

    def act(name: str) -> None:
        if name == "step-1":
            (tmp_path / name / "__0_0.distcp").write_bytes(b"new")
        elif name == "step-2":
            (tmp_path / "latest").write_text("step-2")
        elif name == "step-3":
            shutil.rmtree(tmp_path / name)
        elif name == "step-4":
            make(tmp_path, 8)  # the trainer goes on

    interfere(monkeypatch, act)
    done = prune_run(tmp_path, keep_last=1, dry_run=False)
    assert done.deleted == ("step-4", "step-5", "step-6")
    assert done.refused == {
        "step-3": "somebody else deleted it meanwhile", "step-2": "latest names it by now", "step-1": "it changed meanwhile",
    }  # fmt: skip
    assert {"step-7", "step-8"} < names(tmp_path)


def test_nothing_more_is_deleted_once_the_newest_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, 1, 2, 3, 4)
    interfere(monkeypatch, lambda name: name == "step-2" and (tmp_path / "step-4" / ".metadata").unlink())
    with pytest.raises(SourceChanged, match=r"step-4 is not complete any more: no \.metadata"):
        prune_run(tmp_path, keep_last=1, dry_run=False)
    assert names(tmp_path) == {"step-2", "step-3", "step-4"}


def test_a_step_that_is_swapped_for_a_link_in_the_last_moment_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at, other = make(tmp_path / "run", 1, 2), make(tmp_path / "other", 1)
    real = os.rename

    def swap(a: Any, b: Any, **more: Any) -> None:
        monkeypatch.setattr(os, "rename", real)
        real(at / "step-1", tmp_path / "away")
        (at / "step-1").symlink_to(other / "step-1")
        real(a, b, **more)

    monkeypatch.setattr(os, "rename", swap)
    done = prune_run(at, keep_last=1, dry_run=False)
    assert "was replaced meanwhile" in done.refused["step-1"] and not done.deleted
    assert (at / "step-1").is_symlink() and len(names(other / "step-1")) == 4
    with pytest.raises(Unsafe, match="is a link"), Remover(str(at), "step-1", lambda *_: None).hold():
        raise AssertionError


def test_two_runs_of_it_and_a_conversion_to_a_step_exclude_each_other(tmp_path: Path) -> None:
    make(tmp_path, 1, 2, 3)
    lock = LeftoverFiles(str(tmp_path / "ckpttool-prune"))
    fd = take_lock(lock)
    with pytest.raises(Locked):
        prune_run(tmp_path, keep_last=1, dry_run=False)
    assert prune_run(tmp_path, keep_last=1).deleted == ("step-1", "step-2"), "a dry run takes no lock"
    unlock(lock, fd)
    lock = LeftoverFiles(str(tmp_path / "step-1"))
    fd = take_lock(lock)
    done = prune_run(tmp_path, keep_last=1, dry_run=False)
    assert done.deleted == ("step-2",) and "is being written by process" in done.refused["step-1"]
    unlock(lock, fd)


def test_somebody_else_s_files_and_permissions_stop_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at = make(tmp_path / "run", 1, 2)
    aside = at / ".ckpttool-prune.partial-7072756e6500"
    (aside / "mine").mkdir(parents=True)
    assert prune_run(at, keep_last=1, dry_run=False).deleted == ("step-1",)
    assert names(at) == {aside.name, "step-2"} and (aside / "mine").exists(), "what is not ours is not deleted"
    make(at, 1)
    monkeypatch.setattr(
        os, "rename", lambda *a, **k: (_ for _ in ()).throw(PermissionError(13, "Permission denied", "x"))
    )
    with pytest.raises(NotPermitted):
        prune_run(at, keep_last=1, dry_run=False)
    assert {"step-1", "step-2"} <= names(at)


def test_what_a_killed_run_left_is_deleted_first_and_is_no_checkpoint_for_anybody(tmp_path: Path) -> None:
    make(tmp_path, 1, 2)
    aside = tmp_path / ".ckpttool-prune.partial-7072756e6500"
    aside.mkdir(mode=0o700)
    (tmp_path / "step-1").rename(aside / "tree")
    assert [s.name for s in list_run(tmp_path).steps] == ["step-2"] and ckpttool.newest(tmp_path) == str(
        tmp_path / "step-2"
    )
    assert prune_run(tmp_path, keep_last=1).leftovers == 1 and aside.exists()
    done = run("prune", tmp_path, "--keep-last", 1, "--yes")
    assert "1 step that an interrupted run had begun to delete" in done.stderr and names(tmp_path) == {"step-2"}
    aside.mkdir(mode=0o700)
    (aside / "tree").mkdir()
    assert clean(tmp_path).removed and not aside.exists()


@pytest.mark.slow
def test_a_file_of_two_steps_is_freed_with_the_last(tmp_path: Path) -> None:
    make(tmp_path, 1, 2, 3)
    size = (tmp_path / "step-1" / "__0_0.distcp").stat().st_size
    for step in (2, 3):
        (tmp_path / f"step-{step}" / "__0_0.distcp").unlink()
        os.link(tmp_path / "step-1" / "__0_0.distcp", tmp_path / f"step-{step}" / "__0_0.distcp")
    whole = sum(p.stat().st_size for p in DCP.iterdir())
    planned = prune_run(tmp_path, keep_last=1)
    done = prune_run(tmp_path, keep_last=1, dry_run=False)
    assert planned.freed == done.freed == 2 * (whole - size) and len(done.deleted) == 2
    ckpttool.verify(tmp_path / "step-3", read_data=True)
    make(tmp_path / "b", 1, 2, 3)
    (tmp_path / "b" / "step-2" / "__0_0.distcp").unlink()
    os.link(tmp_path / "b" / "step-1" / "__0_0.distcp", tmp_path / "b" / "step-2" / "__0_0.distcp")
    planned, done = prune_run(tmp_path / "b", keep_last=1), prune_run(tmp_path / "b", keep_last=1, dry_run=False)
    assert planned.freed == done.freed == 2 * whole - size


@pytest.mark.slow
def test_killed_at_any_call_it_leaves_each_step_whole_or_gone() -> None:
    assert prunes.torture(9, first=1000, finders=False) == []


@pytest.mark.slow
def test_lines_of_a_log_are_read_in_bounded_memory(tmp_path: Path) -> None:
    with open(tmp_path / "log.jsonl", "w") as f:
        for n in range(20_000):
            f.write(json.dumps({"step": n, "loss": n % 1000 + 1}) + "\n")
        f.write('{"step": 3, "lo')  # being written
    found = read_metrics(Source(tmp_path), "log.jsonl:loss", {"a": 3, "b": 19_999})
    assert found == {"a": 4.0, "b": 1000.0}
    with open(tmp_path / "log.jsonl", "a") as f:
        f.write('ss": 5}\n' + " " * (17 << 20))
    with pytest.raises(UsageError, match="a line of log"):
        read_metrics(Source(tmp_path), "log.jsonl:loss", {"a": 3, "b": 19_999})
    (tmp_path / "log.jsonl").write_text('{"step": 3, "loss": 1}\nINFO: step 4\n')
    with pytest.raises(Corrupt, match="line 2"):
        read_metrics(Source(tmp_path), "log.jsonl:loss", {"a": 3})
