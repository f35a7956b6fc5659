"""Paths that are one level too high or too low: a file of a folder, a folder of checkpoints."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import ckpttool_here as run
from peers import FIXTURES
from safetensors.torch import save_file
from stores import Flaky, moto

import ckpttool
from ckpttool.engine.discover.detection import FoundCheckpoint, find_checkpoints, find_later_folders, newest
from ckpttool.errors import NotRecognised, UsageError
from ckpttool.layouts import place

TRAINERS = FIXTURES / "trainers"
CHECKPOINT = TRAINERS / "trainer_fsdp2_sharded" / "ckpt" / "checkpoint-3"
DDP = TRAINERS / "trainer_ddp" / "ckpt" / "checkpoint-3"
DCP = FIXTURES / "fsdp2_w3" / "ckpt"


def listed(path: Path | str) -> dict[str, dict[str, Any]]:
    """{name: row} of what `inspect --json` prints for a folder of checkpoints."""
    done = run("inspect", path, "--json")
    assert done.returncode == 0, done.stderr
    return {row["name"]: row for row in json.loads(done.stdout)["checkpoints"]}


# ------------------------------------------------------------------------------------------------ a file of a folder


@pytest.mark.parametrize(
    ("folder", "file", "layout"),
    [
        (DCP, "__0_0.distcp", "dcp"),
        (DCP, ".metadata", "dcp"),
        (CHECKPOINT, "trainer_state.json", "trainer"),
        (CHECKPOINT, "optimizer_0/.metadata", "trainer"),
        (CHECKPOINT, "pytorch_model_fsdp_0/__1_0.distcp", "trainer"),
        (DDP, "rng_state_0.pth", "trainer"),
        (DDP, "scheduler.pt", "trainer"),
        (TRAINERS / "accelerate_fsdp2_full" / "ckpt", "random_states_1.pkl", "accelerate"),
        (TRAINERS / "accelerate_fsdp1_local" / "ckpt", "pytorch_model_fsdp_rank1.bin", "accelerate"),
        (FIXTURES / "zero3_w4" / "ckpt" / "global_step3", "zero_pp_rank_1_mp_rank_00_optim_states.pt", "zero3"),
    ],
)
@pytest.mark.parametrize("command", [["inspect"], ["digest"], ["convert"]])
def test_a_file_of_a_folder_is_answered_with_the_folder(
    folder: Path, file: str, layout: str, command: list[str], tmp_path: Path
) -> None:
    done = run(*command, folder / file, *([tmp_path / "out.pt"] if command == ["convert"] else []))
    assert (done.returncode, done.stderr) == (
        3, f"error: {folder / file} is one file of the {layout} checkpoint {folder}; give that folder.\nmore: ckpttool explain CKPT0303\n",
    )  # fmt: skip


def test_a_shard_is_answered_with_its_folder_where_an_index_or_another_shard_is_there(tmp_path: Path) -> None:
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        shutil.copy(FIXTURES / "hf_llama" / "ckpt" / "model.safetensors", tmp_path / name)
    one = tmp_path / "model-00001-of-00002.safetensors"
    with pytest.raises(NotRecognised, match=r"is one file of the hf checkpoint .*; give that folder"):
        ckpttool.inspect(one)
    assert ckpttool.inspect(one, source_layout="hf").tensors, "asked for by its layout, the file alone is read"
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    assert ckpttool.inspect(one).tensors, "alone it is all there is"


def test_a_piece_of_an_interrupted_save_is_not_called_damaged(tmp_path: Path) -> None:
    shutil.copytree(DCP, tmp_path / "step-3")
    (tmp_path / "step-3" / ".metadata").unlink()
    done = run("inspect", tmp_path / "step-3" / "__0_0.distcp")
    assert done.returncode == 3 and "the save was interrupted before its end" in done.stderr
    done = run("inspect", tmp_path / "step-3")
    assert done.returncode == 3 and "give" not in done.stderr.replace("give an earlier", ""), "no hint at its pieces"


def test_files_that_are_checkpoints_are_read_as_before() -> None:
    for file in (DDP / "model.safetensors", DDP / "optimizer.pt", FIXTURES / "full_w1" / "ckpt" / "fqn.pt"):
        assert ckpttool.inspect(file).tensors


# ------------------------------------------------------------------------------------------- a folder of checkpoints


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """run/checkpoint-3, -6, and -9, which was interrupted, with what else lies in the folder of a job."""
    for step in (3, 6, 9, 12):
        shutil.copytree(CHECKPOINT, tmp_path / "run" / f"checkpoint-{step}")
    (tmp_path / "run" / "checkpoint-9" / "trainer_state.json").unlink()
    (tmp_path / "run" / "checkpoint-12" / "optimizer_0" / ".metadata").unlink()
    (tmp_path / "run" / "runs").mkdir()
    (tmp_path / "run" / "log.txt").write_text("x")
    shutil.copy(DDP / "rng_state_0.pth", tmp_path / "run")
    shutil.copy(DDP / "scheduler.pt", tmp_path / "run")
    return tmp_path / "run"


def test_inspect_lists_the_checkpoints_of_a_run_by_step(job: Path) -> None:
    found = listed(job)
    assert list(found) == ["checkpoint-3", "checkpoint-6", "checkpoint-9", "checkpoint-12"]
    assert [c["step"] for c in found.values()] == [3, 6, 9, 12]
    assert [c["complete"] for c in found.values()] == [True, True, False, False]
    assert {c["layout"] for c in found.values()} == {"trainer"}
    assert found["checkpoint-6"]["newest"] and found["checkpoint-6"]["trainer"] == "Hugging Face Trainer"
    assert "trainer_state.json" in found["checkpoint-9"]["lacks"]
    assert "optimizer_0/.metadata" in found["checkpoint-12"]["lacks"]
    sizes = [p.stat().st_size for p in (job / "checkpoint-3").rglob("*") if p.is_file()]
    assert (found["checkpoint-3"]["files"], found["checkpoint-3"]["bytes"]) == (len(sizes), sum(sizes))
    text = run("inspect", job).stdout
    assert "checkpoint-6   trainer (Hugging Face Trainer)" in text and "newest complete" in text
    assert f"--latest for {job / 'checkpoint-6'}" in text


@pytest.mark.slow
def test_latest_takes_the_newest_complete_one(job: Path, tmp_path: Path) -> None:
    assert newest(job) == newest(job.parent) == str(job / "checkpoint-6")
    assert json.loads(run("inspect", job, "--latest", "--json").stdout)["path"] == str(job / "checkpoint-6")
    for command in (["verify", job], ["digest", job], ["convert", job, tmp_path / "out.pt", "--only", "model"]):
        done = run(*command, "--latest")
        assert done.returncode == 0, done.stderr
        assert f"latest: {job / 'checkpoint-6'}" in done.stderr
    assert run("digest", job / "checkpoint-6", "--latest").returncode == 0, "a checkpoint is its own newest"
    with pytest.raises(UsageError, match="is a file"):
        newest(job / "log.txt")


@pytest.mark.slow
def test_an_export_at_the_end_of_a_run_is_not_what_a_job_resumes_from(tmp_path: Path) -> None:
    """As torchtitan saves: a state at step 3, at the last step weights alone, in its own form or as safetensors."""
    run_folder = tmp_path / "run"
    shutil.copytree(TRAINERS / "titan_w2", run_folder / "step-3")
    ckpttool.convert(run_folder / "step-3", run_folder / "step-4", to="dcp", world_size=2, only=["model"])
    ckpttool.convert(run_folder / "step-3", run_folder / "step-5", to="hf", map="none")
    found = listed(run_folder)
    assert [found[f"step-{i}"]["epoch"] for i in (3, 4, 5)] == [None] * 3, "step holds ep, but is no epoch"
    assert [found[f"step-{i}"]["newest"] for i in (3, 4, 5)] == [True, False, False]
    assert [found[f"step-{i}"]["weights_only"] for i in (3, 4, 5)] == [False, True, True]
    assert ckpttool.newest(run_folder) == str(run_folder / "step-3")
    done = run("digest", run_folder, "--latest")
    assert f"newer, but weights only: {run_folder / 'step-4'}, {run_folder / 'step-5'}" in done.stderr
    shutil.rmtree(run_folder / "step-3")
    assert newest(run_folder) == str(run_folder / "step-5"), "nothing in the run holds an optimizer"
    shutil.rmtree(run_folder / "step-5")
    assert newest(run_folder) == str(run_folder / "step-4")


@pytest.mark.parametrize(
    "command", [["diff", "RUN", "RUN"], ["audit", "export", "RUN", "out.tar.zst", "--no-ledger"], ["doctor", "RUN"]]
)
def test_every_command_that_reads_a_checkpoint_has_latest(command: list[str], job: Path, tmp_path: Path) -> None:
    words = [str(job) if w == "RUN" else str(tmp_path / w) if w == "out.tar.zst" else w for w in command]
    done = run(*words, "--latest")
    assert done.returncode == 0 and f"latest: {job / 'checkpoint-6'}" in done.stderr, done.stderr


def test_other_commands_answer_a_parent_with_the_same_list(job: Path, tmp_path: Path) -> None:
    for command in (["verify", job], ["diff", job, CHECKPOINT], ["convert", job, tmp_path / "out.pt"]):
        done = run(*command)
        assert done.returncode == 3
        assert f"The newest complete one is {job / 'checkpoint-6'}" in done.stderr
        for line in str(find_checkpoints(place(job).source)).splitlines():
            assert line in done.stderr
        assert "rng_state_0.pth" not in done.stderr and "scheduler.pt" not in done.stderr


def test_two_levels_down_and_no_further(tmp_path: Path) -> None:
    shutil.copytree(DCP, tmp_path / "run" / "ckpt" / "step-20")
    shutil.copytree(DCP, tmp_path / "run" / "ckpt" / "step-3")
    assert list(listed(tmp_path / "run")) == ["ckpt/step-3", "ckpt/step-20"]
    assert newest(tmp_path / "run") == str(tmp_path / "run" / "ckpt" / "step-20")
    assert run("inspect", tmp_path).returncode == 3


@pytest.mark.parametrize(
    ("closed", "than", "may_be_later"),
    [
        ("step-3", "step-2", True), ("step-1", "step-2", False), ("step-2/optimizer_0", "step-2", True),
        ("step-1/optimizer_0", "step-2", False), ("b/step-3", "a/step-2", False), ("exports", "step-2", False),
        ("global_step_3", "global_step_2/actor", True), ("global_step_3/critic", "global_step_2/actor", False),
        ("step-3-hf", "step-2", False), ("30", "20", True), ("10", "20", False), ("epoch=3", "epoch=2", True),
    ],
)  # fmt: skip
def test_which_closed_folders_may_be_later_steps_of_a_run(closed: str, than: str, may_be_later: bool) -> None:
    step, epoch = (None, int(than[-1])) if "epoch" in than else (int(re.findall(r"\d+", than)[0]), None)
    row = FoundCheckpoint(than, than, step, epoch, "dcp", None, True, "", 1, 1)
    assert find_later_folders({closed: "Permission denied"}, row) == [closed] * may_be_later


def test_of_two_runs_neither_has_the_newest(tmp_path: Path) -> None:
    for name in ("a/checkpoint-3", "a/checkpoint-6", "b/checkpoint-9"):
        shutil.copytree(DDP, tmp_path / name)
    found = listed(tmp_path)
    assert [name for name, c in found.items() if c["newest"]] == ["a/checkpoint-6", "b/checkpoint-9"]
    with pytest.raises(NotRecognised, match="Several runs"):
        newest(tmp_path)


def test_a_model_in_the_folder_of_a_run_does_not_hide_its_checkpoints(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "hf_llama" / "ckpt", tmp_path / "run")
    assert newest(tmp_path / "run") == str(tmp_path / "run")
    shutil.copytree(DDP, tmp_path / "run" / "checkpoint-3")
    assert newest(tmp_path / "run") == str(tmp_path / "run" / "checkpoint-3")


def test_safetensors_files_of_no_model_do_not_hide_the_checkpoints_below_them(tmp_path: Path) -> None:
    shutil.copytree(DCP, tmp_path / "demo" / "run" / "ckpt")
    for name in ("truth", "next"):
        save_file({"w": torch.ones(3)}, tmp_path / "demo" / "run" / f"{name}.safetensors")
    for path, name in ((tmp_path / "demo" / "run", "ckpt"), (tmp_path / "demo", "run/ckpt")):
        assert list(listed(path)) == [name]
        assert newest(path) == str(tmp_path / "demo" / "run" / "ckpt")
    said = run("verify", tmp_path / "demo" / "run").stderr
    assert "safetensors files without a config.json, first next.safetensors, and 1 checkpoint is below it" in said
    (tmp_path / "demo" / "run" / "truth.safetensors").unlink()
    assert list(listed(tmp_path / "demo" / "run")) == ["ckpt"]
    with ckpttool.open(tmp_path / "demo" / "run" / "next.safetensors") as opened:
        assert opened.layout.name == "hf"
    shutil.rmtree(tmp_path / "demo" / "run" / "ckpt")  # other models below it, as of diffusers, are none that hides
    shutil.copytree(FIXTURES / "hf_llama" / "ckpt", tmp_path / "demo" / "run" / "text_encoder")
    with ckpttool.open(tmp_path / "demo" / "run") as opened:
        assert opened.layout.name == "hf"


def test_a_checkpoint_without_its_trainer_state_is_incomplete_beside_those_that_have_it(tmp_path: Path) -> None:
    for step in (3, 6):
        shutil.copytree(DDP, tmp_path / f"checkpoint-{step}")
    for name in ("trainer_state.json", "optimizer.pt", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth"):
        (tmp_path / "checkpoint-6" / name).unlink(missing_ok=True)
    assert [c["complete"] for c in listed(tmp_path).values()] == [True, False]


@pytest.mark.parametrize(
    ("case", "lost", "lacks"),
    [
        ("zero3_w4", "latest", "no latest"),
        ("zero3_w4", "global_step3/zero_pp_rank_3_mp_rank_00_optim_states.pt", "no zero_pp_rank_3_mp_rank_00_optim"),
        ("fsdp2_w3", ".metadata", "no .metadata"),
    ],
)
def test_what_an_incomplete_checkpoint_lacks(case: str, lost: str, lacks: str, tmp_path: Path) -> None:
    for step in (3, 6):
        shutil.copytree(FIXTURES / case / "ckpt", tmp_path / f"step-{step}")
    assert all(c["complete"] for c in listed(tmp_path).values())
    (tmp_path / "step-6" / lost).unlink()
    found = listed(tmp_path)
    assert (found["step-3"]["newest"], found["step-6"]["complete"]) == (True, False)
    assert found["step-6"]["lacks"].startswith(lacks)


def test_a_lost_shard_and_an_empty_file(tmp_path: Path) -> None:
    for step in (3, 6):
        folder = tmp_path / f"step-{step}"
        folder.mkdir()
        for i in (1, 2):
            shutil.copy(
                FIXTURES / "hf_llama" / "ckpt" / "model.safetensors", folder / f"model-{i:05d}-of-00002.safetensors"
            )
    (tmp_path / "step-6" / "model-00002-of-00002.safetensors").unlink()
    (tmp_path / "step-3" / "model-00001-of-00002.safetensors").write_bytes(b"")
    assert [c["lacks"] for c in listed(tmp_path).values()] == [
        "model-00001-of-00002.safetensors is empty", "no model-00002-of-00002.safetensors",
    ]  # fmt: skip


@pytest.mark.slow
def test_a_store_is_listed_and_nothing_in_it_is_read(monkeypatch: pytest.MonkeyPatch, job: Path) -> None:
    s3 = moto()
    url = s3.bucket(monkeypatch)
    for file in job.rglob("*"):
        if file.is_file():
            key = f"run/{file.relative_to(job).as_posix()}"
            s3.client().put_object(Bucket=url.removeprefix("s3://"), Key=key, Body=file.read_bytes())
    with Flaky(s3.endpoint, lambda *_: None) as proxy:
        s3.environment(monkeypatch, proxy.endpoint)
        found = listed(f"{url}/run")
        assert newest(f"{url}/run") == f"{url}/run/checkpoint-6"
        with place(f"{url}/run").source as source:
            proxy.seen.clear()
            assert [c.name for c in find_checkpoints(source).checkpoints] == list(found)
        assert proxy.seen and all(m == "GET" and "list-type=2" in path for m, path, _ in proxy.seen), proxy.seen
    here = listed(job)
    assert {n: {**c, "path": ""} for n, c in found.items()} == {n: {**c, "path": ""} for n, c in here.items()}
