"""Converted checkpoints are loaded by the real engines at other world sizes, and training goes on as if never interrupted.

Starting an engine takes most of the time, so one launch of torchrun resumes many checkpoints.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import extra_states
import pytest
import torch
from peers import FIXTURES, REPOSITORY, difference, load_dcp, tensors_of
from ranks import ENVIRONMENT, NURSERIES, one_at_a_time, torchrun
from safetensors.torch import load_file

import ckpttool

pytestmark = [pytest.mark.live, pytest.mark.slow]


class Target(NamedTuple):
    """What an engine is to load: a case, the conversions that lead there, and what tests/live/*_resume.py is told."""

    case: str
    steps: list[tuple[str, dict[str, Any]]]
    told: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The way of it."""
        return " -> ".join([self.case, *(to for to, _ in self.steps), *self.told])

    def made(self, world: int, folder: Path) -> Path:
        """The last of its checkpoints, for a job of ``world`` ranks."""
        place: Path = FIXTURES / self.case / "ckpt"
        folder.mkdir()
        for i, (to, options) in enumerate(self.steps):
            last = i == len(self.steps) - 1
            ranks = {} if to in ("full", "universal") else {"world_size": world if last else 5}
            described = place.parent / "flat_layout.json"
            if i == 0 and described.exists():
                options = {"flat_layout": described, **options}
            ckpttool.convert(place, folder / str(i), to=to, **{**ranks, **options})
            place = folder / str(i)
        return place


def resume(script: str, world: int, targets: list[Target], folder: Path) -> dict[str, dict[str, Any]]:
    """{label: verdict} of a script in tests/live."""
    words: list[str] = []
    for i, target in enumerate(targets):
        made = target.made(world, folder / f"target-{i}")
        words += [str(FIXTURES / target.case), str(made), *target.told]
    out = folder / "verdicts.json"
    said = torchrun(world, script, *words, "--out", str(out))
    assert out.exists(), said[-4000:]
    labels = [target.label for target in targets]
    assert len(set(labels)) == len(labels)
    return dict(zip(labels, json.loads(out.read_text()), strict=True))


def dcp(case: str, *through: str) -> Target:
    return Target(case, [*((to, {}) for to in through), ("dcp", {})])


def zero(case: str, to: str, *through: str, told: str = "", **options: Any) -> Target:
    return Target(case, [*((t, {}) for t in through), (to, options)], (told or to,))


def fsdp1(case: str, wrap: str, *through: str, use_orig_params: bool = False) -> Target:
    options = {"wrap": [wrap], "options": ckpttool.Fsdp1Options(use_orig_params=use_orig_params)}
    told = json.dumps({"use_orig_params": use_orig_params})
    return Target(case, [*((t, {}) for t in through), ("fsdp1", options)], (told,))


LAYERS, BLOCKS = "**.layers.*", "blocks.*"

# (script, world size) -> what is loaded there; DeepSpeed's stage 3 and its other stages are never in one process
LAUNCHES: dict[str, tuple[str, int, list[Target]]] = {
    "fsdp2 on 2 ranks": (
        "fsdp2_resume.py",
        2,
        [
            dcp("fsdp2_w3"),
            dcp("fsdp2_w4_tp"),
            dcp("fsdp2_w3_tied_bf16"),
            dcp("fsdp2_w3_moe"),
            dcp("awkward_w3", "full"),
            dcp("zero3_w4", "zero3"),
            dcp("zero3_w3_groups"),
            dcp("zero2_w3_bf16"),
            dcp("universal_z1_w2"),
            dcp("fsdp1_w3_uop0"),
            dcp("fsdp1_w4_uop1"),
        ],
    ),
    "fsdp2 on 3 ranks": (
        "fsdp2_resume.py",
        3,
        [
            dcp("fsdp2_w1"),
            dcp("fsdp2_w2_groups", "full"),
            dcp("fsdp2_w4_hsdp"),
            dcp("fsdp2_w2_frozen"),
            dcp("fsdp2_w2_flatopt"),
            dcp("fsdp2_w2_raw"),
            dcp("fsdp2_w2_zstd"),
            dcp("fsdp2_w2_threads", "full"),
            dcp("fsdp2_w2_filepertensor", "dcp"),
            dcp("hf_llama", "full"),
            dcp("zero3_w4"),
            dcp("zero3_w2_bf16_frozen"),
            dcp("zero3_w2_tied", "full"),
            dcp("zero2_w2_roundrobin"),
            dcp("zero0_w2"),
            dcp("fsdp1_w2_tied"),
            dcp("fsdp1_w2_uop1_mp"),
            dcp("fsdp1_w2_sharded"),
            dcp("fsdp1_w4_hsdp_mesh"),
        ],
    ),
    "zero3 on 2 ranks": (
        "zero_resume.py",
        2,
        [
            zero("zero3_w4", "zero3"),
            zero("zero3_w3_groups", "zero3", "dcp"),
            zero("zero3_w3_subgroup", "zero3"),
            zero("zero2_w3_bf16", "zero3", "zero2"),
            zero("zero3_w3_fresh", "zero3"),
            zero("fsdp1_w1", "zero3"),
            zero("fsdp2_w3", "zero3", told="zero3:300", options=ckpttool.ZeroOptions(sub_group_size=300)),
            # a parameter that never had a gradient, so that only another save of the engine tells that it is trained
            zero("awkward_w3", "zero3", like=FIXTURES / "zero3_w4" / "ckpt"),
        ],
    ),
    "zero3 on 3 ranks": (
        "zero_resume.py",
        3,
        [
            zero("zero3_w4", "zero3"),
            zero("zero3_w2_bf16_frozen", "zero3"),
            zero("zero3_w2_tied", "zero3"),
            zero("zero3_w2_fp16", "zero3"),
            zero("zero3_w2_tied", "universal", told="universal3"),
            zero("zero0_w2", "zero3"),
            zero("universal_z3_w2", "zero3"),
            zero("fsdp2_w2_groups", "zero3"),
            zero("fsdp2_w2_frozen", "zero3"),
            zero("fsdp1_w2_tied", "zero3"),
        ],
    ),
    "zero1 and zero2 on 2 ranks": (
        "zero_resume.py",
        2,
        [
            zero("zero3_w3_groups", "zero2"),
            zero("zero2_w3_bf16", "zero2"),
            zero("zero3_w4", "zero1"),
        ],
    ),
    "zero1 and zero2 on 3 ranks": (
        "zero_resume.py",
        3,
        [
            zero("zero3_w2_bf16_frozen", "zero1"),
            zero("zero1_w2", "zero1"),
            zero("zero1_w2", "universal", told="universal1"),
            zero("universal_z3_w2", "zero2"),
            zero("universal_z1_w2", "universal", told="universal1"),
            zero("fsdp2_w2_groups", "zero2"),
        ],
    ),
    "fsdp1 on 2 ranks": (
        "fsdp1_resume.py",
        2,
        [
            fsdp1("zero3_w3_subgroup", BLOCKS, use_orig_params=True),
            fsdp1("fsdp1_w3_uop0", BLOCKS),
            fsdp1("awkward_w3", BLOCKS, use_orig_params=True),
            fsdp1("fsdp2_w3", LAYERS),
        ],
    ),
    "fsdp1 on 4 ranks": (
        "fsdp1_resume.py",
        4,
        [
            fsdp1("fsdp1_w2_tied", LAYERS, "dcp"),
            fsdp1("fsdp1_w2_uop1_mp", BLOCKS, use_orig_params=True),
        ],
    ),
}


@pytest.mark.parametrize("launch", LAUNCHES)
def test_the_engine_at_another_world_size_goes_on_as_if_never_interrupted(launch: str, tmp_path: Path) -> None:
    script, world, targets = LAUNCHES[launch]
    verdicts = resume(script, world, targets, tmp_path)
    assert {label: v for label, v in verdicts.items() if not v["ok"]} == {}
    for target in targets:
        if target.case != "hf_llama":  # weights only
            assert len(verdicts[target.label]["losses"]) == 3


def test_the_ranks_of_a_launch_are_as_torchrun_makes_them_and_end_together(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, time\n"
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "every = [None] * dist.get_world_size()\n"
        "mine = {'rank': dist.get_rank(), 'local': os.environ['LOCAL_RANK'], 'hash': hash('a'), 'told': sys.argv[1:],\n"
        "        'own': sorted(m for m in sys.modules if m.partition('.')[0] in ('ckpttool', 'fixtures', 'deepspeed'))}\n"
        "dist.all_gather_object(every, mine)\n"
        "print(every if dist.get_rank() else '', file=sys.stderr, flush=True)\n"
        "os._exit(int(sys.argv[1]) if dist.get_rank() else time.sleep(int(sys.argv[2])) or 0)\n"
    )
    with one_at_a_time():
        statuses = NURSERIES.launch(2, [str(script), "3", "0"], tmp_path / "log")
        assert statuses == [0, 3]
        said = ast.literal_eval((tmp_path / "log").read_text().strip())
        assert [(s["rank"], s["local"], s["told"]) for s in said] == [(0, "0", ["3", "0"]), (1, "1", ["3", "0"])]
        assert len({s["hash"] for s in said}) == 2 or "PYTHONHASHSEED" in os.environ, (
            "sets have other orders on other ranks"
        )
        assert all(s["own"] == [] for s in said), "what is tested is imported by each rank"
        began = time.monotonic()
        assert NURSERIES.launch(2, [str(script), "3", "100"], tmp_path / "log", patience=1) == [-signal.SIGKILL, 3]
        assert time.monotonic() - began < 50


def patched(path: Path, before: bytes, after: bytes) -> int:
    """How many tensors of a torch.save file had exactly these bytes and now have others. torch compares no CRC32."""
    with zipfile.ZipFile(path) as archive:
        found = [info for info in archive.infolist() if "/data/" in info.filename and archive.read(info) == before]
    content = bytearray(path.read_bytes())
    for info in found:
        name, extra = struct.unpack_from("<HH", content, info.header_offset + 26)
        start = info.header_offset + 30 + name + extra
        content[start : start + len(before)] = after
    path.write_bytes(content)
    return len(found)


def test_the_judges_of_this_file_see_a_wrong_step_exchanged_shards_and_lost_moments(tmp_path: Path) -> None:
    case = FIXTURES / "zero3_w2_tied"
    step, shards = tmp_path / "step", tmp_path / "shards"
    for copy in (step, shards):
        shutil.copytree(case / "ckpt", copy)
    for path in step.glob("*/*optim_states.pt"):
        assert patched(path, struct.pack("<f", 3.0), struct.pack("<f", 6.0)) == 1
    first, second = sorted(shards.glob("*/*optim_states.pt"))
    first.rename(tmp_path / "aside")
    second.rename(first)
    (tmp_path / "aside").rename(second)
    out = tmp_path / "zero.json"
    words = [w for place in (case / "ckpt", step, shards) for w in (str(case), str(place), "zero3")]
    said = torchrun(2, "zero_resume.py", *words, "--out", str(out))
    assert out.exists(), said[-4000:]
    good, late, exchanged = json.loads(out.read_text())
    assert good["ok"], good
    assert not late["ok"] and "step" in late["first_difference"]
    off = [abs(a - b) for a, b in zip(late["losses"], late["losses_reference"], strict=True)]
    assert off[0] < 5e-6 < 1e-3 < off[1], "the first loss does not know the step"
    assert not exchanged["ok"] and not exchanged["loaded_equal"] and not exchanged["zero_to_fp32_equal"]

    case = FIXTURES / "fsdp1_w2_tied"
    lost = tmp_path / "lost"
    shutil.copytree(case / "ckpt", lost)
    state = torch.load(lost / "local_optim_rank1.pt", weights_only=True)
    for slots in state["state"].values():
        slots["exp_avg"].zero_()
    torch.save(state, lost / "local_optim_rank1.pt")
    out = tmp_path / "fsdp1.json"
    words = [w for place in (case / "ckpt", lost) for w in (str(case), str(place), "-")]
    said = torchrun(2, "fsdp1_resume.py", *words, "--out", str(out))
    assert out.exists(), said[-4000:]
    good, forgetful = json.loads(out.read_text())
    assert good["ok"], good
    assert not forgetful["ok"] and "exp_avg" in forgetful["first_difference"]
    off = [abs(a - b) for a, b in zip(forgetful["losses"], forgetful["losses_reference"], strict=True)]
    assert off[0] < 5e-6 < 1e-3 < max(off[1:]), "the first loss does not know the moments"


REMADE = {
    "fsdp2_w2_groups": {"lr_scheduler": 3},
    "zero1_w2": {"lr_scheduler": 3},
    "fsdp1_w3_uop0": {},
}


@pytest.mark.parametrize("case", REMADE)
def test_a_fixture_that_is_made_anew_by_a_real_job_converts_like_the_one_in_the_repository(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    world = json.loads((FIXTURES / case / "case.json").read_text())["world_size"]
    with one_at_a_time():
        words = [str(FIXTURES / "make.py"), "--worker", case]
        statuses = NURSERIES.launch(world, words, tmp_path / "log", **ENVIRONMENT, PYTHONWARNINGS="ignore")
    assert not any(statuses), (tmp_path / "log").read_text()[-4000:]
    made = tmp_path / case
    described = made / "flat_layout.json"
    ckpttool.convert(
        made / "ckpt", tmp_path / "out", to="dcp", world_size=3, flat_layout=described if described.exists() else None
    )
    tree = load_dcp(tmp_path / "out")
    assert difference(tensors_of(tree), load_file(made / "truth.safetensors")) == []
    # another machine may round otherwise, but names, dtypes and shapes are those of the repository
    assert {k: (t.dtype, t.shape) for k, t in tensors_of(tree).items()} == {
        k: (t.dtype, t.shape) for k, t in load_file(FIXTURES / case / "truth.safetensors").items()
    }
    assert {k: tree[k]["last_epoch"] for k in REMADE[case]} == REMADE[case]


def test_a_save_with_one_metadata_a_rank_is_the_same_state_and_what_differs_between_ranks_is_said(
    tmp_path: Path,
) -> None:
    said = torchrun(2, "per_rank_metadata.py", str(tmp_path))
    each, one = tmp_path / "each", tmp_path / "one"
    assert not (each / ".metadata").exists() and (each / "__1.metadata").exists(), said[-4000:]
    tensors = {k: d for k, d in ckpttool.digest(one).digest.items() if k != "values"}  # torch keeps one rank's values
    assert tensors.items() <= ckpttool.digest(each).digest.items()
    found = ckpttool.diff(each, one)
    assert not (found.only_in_b or found.data)
    assert found.values.keys() <= {"extra.rank"}, "of what ranks disagree on, torch keeps that of any rank"
    result = ckpttool.convert(each, tmp_path / "three", to="dcp", world_size=3)
    assert result.digest == ckpttool.digest(each).digest
    assert not result.dropped
    with ckpttool.open(tmp_path / "three") as opened:
        assert {n: opened.checkpoint.value(n) for n in ("extra.rank", "extra.per_rank.1.rank")} == {
            "extra.rank": 0, "extra.per_rank.1.rank": 1,
        }  # fmt: skip
    own = ckpttool.convert(tmp_path / "own", tmp_path / "own.pt")
    assert [(name, nbytes) for name, nbytes, _ in own.dropped] == [("extra.per_rank.1.model.norm.running_mean", 12)]
    assert torch.equal(torch.load(tmp_path / "own.pt")["model"]["norm.running_mean"], torch.zeros(3))


def test_extra_states_of_modules_come_back_in_every_engine_and_its_losses_go_on(tmp_path: Path) -> None:
    losses = extra_states.save(tmp_path)
    for to in ("zero3", "zero1", "universal", "fsdp1"):
        done = ckpttool.convert(
            tmp_path / "source.pt", tmp_path / to, to=to, world_size=None if to == "universal" else 2
        )
        assert not done.dropped and "model.1._extra_state.recipe" in done.kept
        assert any("extra states of modules" in n for n in done.notes) == (to == "universal")
        assert ckpttool.diff(tmp_path / "source.pt", tmp_path / to, only=["model"]).equal
    said = torchrun(2, "extra_states.py", str(tmp_path))
    assert (tmp_path / "found.json").exists(), said[-4000:]
    found = json.loads((tmp_path / "found.json").read_text())
    wanted = {"recipe": "delayed", "scale": 0.25, "amax": {"history": ["1.0", "-0.0", "2.5"]}}
    for to in ("zero3", "zero1", "fsdp1"):
        assert found[to] == {"extra": wanted, "losses": losses}, to
    assert found["universal"]["extra"]["recipe"] == "none"  # DeepSpeed does not look at the model's file


def test_the_demo_of_the_readme_comes_to_its_end(tmp_path: Path) -> None:
    with one_at_a_time():
        done = subprocess.run(
            [sys.executable, str(REPOSITORY / "fixtures" / "demo.py"), "--out", str(tmp_path / "demo")],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 0, (done.stdout[-2000:], done.stderr[-2000:])
    assert "the same in all but hf" in done.stdout
