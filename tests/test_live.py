"""Converted checkpoints resume in real FSDP2 jobs at another world size, one more step included."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from peers import FIXTURES, REPOSITORY, difference, load_dcp, tensors_of
from safetensors.torch import load_file

import ckpttool

pytestmark = [pytest.mark.live, pytest.mark.slow]

# case -> the layouts it goes through before it becomes dcp for W ranks
TO_TWO = {"fsdp2_w3": [], "fsdp2_w4_tp": [], "fsdp2_w3_tied_bf16": [], "fsdp2_w3_moe": [], "awkward_w3": ["full"]}
TO_THREE: dict[str, list[str]] = {
    "fsdp2_w1": [],
    "fsdp2_w2_groups": ["full"],
    "fsdp2_w4_hsdp": [],
    "fsdp2_w2_frozen": [],
    "fsdp2_w2_flatopt": [],
    "fsdp2_w2_raw": [],
    "fsdp2_w2_zstd": [],
    "fsdp2_w2_threads": ["full"],
    "fsdp2_w2_filepertensor": ["dcp"],
    "hf_llama": ["full"],
}


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Only one torchrun on this machine, whatever pytest's workers do."""
    with open(Path(tempfile.gettempdir()) / f"ckpttool-torchrun-{os.getuid()}.lock", "w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        yield


def torchrun(world: int, script: str, *arguments: str) -> str:
    """What tests/live/<script> prints to stderr when that many ranks run it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with one_at_a_time():
        done = subprocess.run(
            [*command, str(REPOSITORY / "tests" / "live" / script), *arguments],
            capture_output=True, text=True, env=environment, check=False,
        )  # fmt: skip
    return done.stderr


def resume(pairs: list[tuple[str, Path]], world: int, out: Path) -> dict[str, dict[str, Any]]:
    """{case: verdict} of tests/live/fsdp2_resume.py."""
    paths = [str(p) for case, path in pairs for p in (FIXTURES / case, path)]
    said = torchrun(world, "fsdp2_resume.py", *paths, "--out", str(out))
    assert out.exists(), said[-4000:]
    return {case: verdict for (case, _), verdict in zip(pairs, json.loads(out.read_text()), strict=True)}


def converted(case: str, through: list[str], world: int, folder: Path) -> Path:
    path: Path = FIXTURES / case / "ckpt"
    for i, to in enumerate(through):
        step = folder / f"{case}-{i}"
        ckpttool.convert(path, step, to=to, world_size=5 if to == "dcp" else None)
        path = step
    ckpttool.convert(path, folder / case, to="dcp", world_size=world)
    return folder / case


@pytest.mark.parametrize(("world", "cases"), [(2, TO_TWO), (3, TO_THREE)])
def test_a_live_fsdp2_job_at_another_world_size_goes_on_as_if_never_interrupted(
    world: int, cases: dict[str, list[str]], tmp_path: Path
) -> None:
    pairs = [(case, converted(case, through, world, tmp_path)) for case, through in cases.items()]
    verdicts = resume(pairs, world, tmp_path / "verdicts.json")
    assert {case: v for case, v in verdicts.items() if not v["ok"]} == {}
    assert verdicts.keys() == cases.keys()


def test_a_fixture_that_is_made_anew_by_a_real_job_converts_like_the_one_in_the_repository(tmp_path: Path) -> None:
    case = "fsdp2_w2_groups"
    with one_at_a_time():
        done = subprocess.run(
            [sys.executable, str(FIXTURES / "make.py"), case, "--out", str(tmp_path)], capture_output=True, text=True
        )
    assert done.returncode == 0, done.stderr[-4000:]
    made = tmp_path / case
    ckpttool.convert(made / "ckpt", tmp_path / "out", to="dcp", world_size=3)
    tree = load_dcp(tmp_path / "out")
    assert difference(tensors_of(tree), load_file(made / "truth.safetensors")) == []
    # another machine may round otherwise, but names, dtypes and shapes are those of the repository
    assert {k: (t.dtype, t.shape) for k, t in tensors_of(tree).items()} == {
        k: (t.dtype, t.shape) for k, t in load_file(FIXTURES / case / "truth.safetensors").items()
    }
    assert tree["lr_scheduler"]["last_epoch"] == 3


def test_a_save_with_one_metadata_a_rank_is_the_same_state_and_what_differs_between_ranks_is_said(
    tmp_path: Path,
) -> None:
    said = torchrun(2, "per_rank_metadata.py", str(tmp_path))
    each, one = tmp_path / "each", tmp_path / "one"
    assert not (each / ".metadata").exists() and (each / "__1.metadata").exists(), said[-4000:]
    assert ckpttool.digest(each)["digest"] == ckpttool.digest(one)["digest"]
    found = ckpttool.diff(each, one)
    assert not (found.only_in_a or found.only_in_b or found.data)
    assert found.values.keys() <= {"extra.rank"}, "of what ranks disagree on, torch keeps that of any rank"
    result = ckpttool.convert(each, tmp_path / "three", to="dcp", world_size=3)
    assert result.digest == ckpttool.digest(one)["digest"]
    assert [n for n in result.notes if '"rank" differs between ranks' in n]


def test_the_demo_of_the_readme_comes_to_its_end(tmp_path: Path) -> None:
    with one_at_a_time():
        done = subprocess.run(
            [sys.executable, str(REPOSITORY / "fixtures" / "demo.py"), "--out", str(tmp_path / "demo")],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 0, (done.stdout[-2000:], done.stderr[-2000:])
    assert "equal in run/ckpt, dcp3, full.pt" in done.stdout
