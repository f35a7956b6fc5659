"""Saves of DeepSpeed's AutoTP: tests/live/autotp_job.py made fixtures/autotp, and resumes what is written."""

from __future__ import annotations

import json
import shutil
import tarfile
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import peers
import pytest
import torch
import zero_files
from ranks import torchrun
from safetensors.torch import load_file

import ckpttool
from ckpttool.errors import CkpttoolError, Corrupt, Unsupported

ARCHIVES = peers.FIXTURES / "autotp"
CASES = sorted(p.name.removesuffix(".tar.xz") for p in ARCHIVES.glob("*.tar.xz"))
TP3, TP2 = "tp3_z2_fp32", "tp2_dp2_z1_bf16"
MODEL = "global_step3/mp_rank_{:02}_model_states.pt"
INFO = "universal_checkpoint_info"
Unpack = Callable[[str], Path]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Unpack:
    """A case on disk."""
    root = tmp_path_factory.mktemp("autotp")

    @cache
    def unpack(case: str) -> Path:
        with tarfile.open(ARCHIVES / f"{case}.tar.xz") as archive:
            archive.extractall(root, filter="data")
        return root / case

    return unpack


def held(path: Path) -> dict[str, torch.Tensor]:
    """All masters and moments of a checkpoint."""
    with ckpttool.open(path) as opened:
        return {n: opened[n].torch() for n in opened if n.startswith(("model.", "optim.")) and not n.endswith(".step")}


@pytest.mark.parametrize("case", CASES)
def test_masters_and_moments_are_those_of_the_ranks(case: str, unpacked: Unpack) -> None:
    folder = unpacked(case)
    truth, found = load_file(folder / "truth.safetensors"), held(folder / "ckpt")
    assert found.keys() - truth.keys() == {"model.layers.0.seen"} and not truth.keys() - found.keys()
    for name, x in truth.items():
        assert found[name].dtype == x.dtype and torch.equal(found[name], x), name
    about = json.loads((folder / "case.json").read_text())
    with ckpttool.open(folder / "ckpt") as opened:
        assert opened.checkpoint.world_size == about["world"]
        assert sorted(set(opened.checkpoint.ranks.values())) == list(range(about["world"]))
        steps = {n: opened[n].torch() for n in opened if n.endswith(".step")}
        assert len(steps) == 8
        # DeepSpeed has one for each flat tensor, and its safe_get_full_optimizer_state, which made the truth, gives none
        for path in (folder / "ckpt" / "global_step3").glob("*_optim_states.pt"):
            flat = torch.load(path, weights_only=False)["optimizer_state_dict"]
            base = flat["base_optimizer_state" if "base_optimizer_state" in flat else "optimizer_state_dict"]
            own = base["state"][0]["step"]
            assert all(x.dtype == own.dtype and torch.equal(x, own) for x in steps.values()) and float(own) == 3
        assert opened.checkpoint.value("trainer.global_steps") == 3
        assert opened.checkpoint.value("optim.param_groups.0.lr") == 0.01
        assert not [n for n in opened.checkpoint.values if INFO in n], "it would say of whole weights how they are cut"
        assert ckpttool.verify(folder / "ckpt", read_data=True).numbers == "ok"


@pytest.mark.parametrize("to", ["dcp", "full", "zero3", "zero1", "universal", "hf"])
@pytest.mark.parametrize("case", CASES)
def test_it_is_written_in_other_layouts(case: str, to: str, unpacked: Unpack, tmp_path: Path) -> None:
    folder = unpacked(case)
    target = tmp_path / ("out.pt" if to == "full" else "out")
    world: dict[str, Any] = {} if to in ("full", "hf", "universal") else {"world_size": 3}
    ckpttool.convert(folder / "ckpt", target, to=to, **world)
    truth, found = load_file(folder / "truth.safetensors"), held(target)
    kept = [n for n in truth if to != "hf" or n.startswith("model.")]
    assert all(torch.equal(found[n], truth[n]) for n in kept) and len(kept) == (8 if to == "hf" else 24)


def changed(unpacked: Unpack, case: str, to: Path) -> Path:
    """A copy of the save."""
    return Path(shutil.copytree(unpacked(case) / "ckpt", to / "in"))


def rewrite(path: Path, change: Callable[[Any], Any]) -> None:
    """Change a file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        zero_files.edit(path, change)


def every_map(change: Callable[[dict[str, Any]], Any], name: str) -> Callable[[Path], None]:
    """Change the map of a parameter in the model files of all ranks."""

    def edit(folder: Path) -> None:
        for path in sorted(folder.glob("global_step3/*_model_states.pt")):
            rewrite(path, lambda tree: change(tree[INFO]["affine_map"]["params"][f"^{name}$"]) and None)

    return edit


def flat_master(rank: int, element: int) -> Callable[[Path], None]:
    """Change an element of the flat masters of a rank, at stage 2 of three ranks with one group."""

    def change(tree: Any) -> None:
        tree["optimizer_state_dict"]["single_partition_of_fp32_groups"][0].detach()[element] += 1

    return lambda folder: rewrite(folder / f"global_step3/zero_pp_rank_0_mp_rank_{rank:02}_optim_states.pt", change)


def in_model(rank: int, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """Change the model file of a rank."""
    return lambda folder: rewrite(folder / MODEL.format(rank), lambda tree: change(tree) and None)


HEAD = r"lm_head\.weight"
ATTACKS: dict[str, tuple[Callable[[Path], Any], type[CkpttoolError], str]] = {
    "no map at all": (in_model(0, lambda t: t[INFO].pop("affine_map")), Unsupported, "has no affine_map"),
    "no info on rank 1": (in_model(1, lambda t: t.pop(INFO)), Corrupt, "universal_checkpoint_info is other than"),
    "a later version": (in_model(0, lambda t: t[INFO]["affine_map"].update(version=2)), Unsupported, "version 2"),
    "a parameter without a map": (
        lambda folder: [in_model(r, lambda t: t[INFO]["affine_map"]["params"].pop(f"^{HEAD}$"))(folder) for r in range(3)],
        Unsupported, 'no map of "lm_head.weight"',
    ),
    "a scaled piece": (every_map(lambda m: m["ranks"][1]["pieces"][0].update(scale=0.5), HEAD), Unsupported, "times 0.5"),
    "a piece moved by a row": (
        every_map(lambda m: m["ranks"][1]["pieces"][0].update(source=[43 * 4, [4, 1]]), HEAD),
        Unsupported, "do not cover the whole exactly once",
    ),
    "a piece left out": (every_map(lambda m: m["ranks"][2]["pieces"].clear(), HEAD), Unsupported, "do not cover"),
    "a piece behind the end": (
        every_map(lambda m: m["ranks"][2]["pieces"][0].update(source=[130 * 4, [4, 1]]), HEAD), Unsupported, "is no box",
    ),
    "a transposed piece": (
        every_map(lambda m: m["ranks"][0]["pieces"][0].update(source=[0, [1, 131]]), HEAD), Unsupported, "is no box",
    ),
    "a piece of text": (every_map(lambda m: m["ranks"][0].update(pieces="x"), HEAD), Corrupt, "another form"),
    "negative sizes": (every_map(lambda m: m.update(logical_shape=[-1, 4]), HEAD), Corrupt, "another form"),
    "maps of other ranks": (every_map(lambda m: m["ranks"].pop(2), HEAD), Corrupt, "affine_map is of ranks"),
    "a piece on ranks that do not hold it": (
        every_map(lambda m: m["ranks"][0]["pieces"][0].update(locations=[0, 1]), HEAD), Corrupt, "hold a piece",
    ),
    "parts of another shape": (
        every_map(lambda m: m.update(logical_shape=[131, 5]), HEAD), Unsupported, "is no box",
    ),
    "another tensor parallel size": (in_model(0, lambda t: t.update(mp_world_size=4)), Corrupt, "mp_world_size"),
    "pipeline stages": (
        lambda folder: [in_model(r, lambda t: t["checkpoint_parallel_dimensions"].update(pp_degree=2))(folder) for r in range(3)],
        Unsupported, "pp_degree",
    ),
    "rank 1's model file is lost": (lambda folder: (folder / MODEL.format(1)).unlink(), Corrupt, "model files are missing"),
    "all files of rank 1 are lost": (
        lambda folder: [p.unlink() for p in folder.glob("*/*mp_rank_01*")], Corrupt, "none of rank 1",
    ),
    "all files of rank 2 are lost": (lambda folder: [p.unlink() for p in folder.glob("*/*mp_rank_02*")], Corrupt, "mp_world_size"),
    "a file of a later step": (in_model(2, lambda t: t.update(global_steps=4)), Corrupt, "global_steps is other than"),
    # the first parameter of the group is embed_tokens, which all ranks have whole
    "replicas that differ": (flat_master(2, 0), Corrupt, '1 of .* tensors differ.*"model.embed_tokens.weight", of which rank 2'),
}  # fmt: skip


@pytest.mark.parametrize("what", ATTACKS)
def test_it_is_refused_by_name(what: str, unpacked: Unpack, tmp_path: Path) -> None:
    change, kind, said = ATTACKS[what]
    folder = changed(unpacked, TP3, tmp_path)
    change(folder)
    with pytest.raises(kind, match=said) as error:
        ckpttool.convert(folder, tmp_path / "out", to="dcp", world_size=1)
    assert error.value.code != "CKPT0300" and not (tmp_path / "out").exists()


def test_what_one_rank_holds_alone_needs_no_other(unpacked: Unpack, tmp_path: Path) -> None:
    folder = changed(unpacked, TP3, tmp_path)
    flat_master(2, 0)(folder)
    ckpttool.convert(folder, tmp_path / "out", to="dcp", world_size=1, only=["model.lm_head.weight"])


def test_a_file_copied_over_another_ranks_is_refused(unpacked: Unpack, tmp_path: Path) -> None:
    folder = changed(unpacked, TP2, tmp_path)
    name = "global_step3/bf16_zero_pp_rank_1_mp_rank_{:02}_optim_states.pt"
    shutil.copy(folder / name.format(0), folder / name.format(1))
    with pytest.raises(Corrupt):
        ckpttool.convert(folder, tmp_path / "out", to="dcp", world_size=1)


def test_learning_rates_that_differ_are_refused(unpacked: Unpack, tmp_path: Path) -> None:
    folder = changed(unpacked, TP3, tmp_path)

    def change(tree: Any) -> None:
        tree["optimizer_state_dict"]["base_optimizer_state"]["param_groups"][0]["lr"] = 0.5

    rewrite(folder / "global_step3/zero_pp_rank_0_mp_rank_01_optim_states.pt", change)
    with pytest.raises(Corrupt, match=r"param_groups.0.lr.* is 0.5 on model parallel rank 1"):
        ckpttool.convert(folder, tmp_path / "out", to="dcp", world_size=1)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.slow
def test_deepspeed_resumes_at_another_tensor_parallel_size(stage: int, unpacked: Unpack, tmp_path: Path) -> None:
    folder = unpacked(TP3)
    options = ckpttool.UniversalOptions(stage=stage)
    ckpttool.convert(folder / "ckpt", tmp_path / "universal", to="universal", options=options)
    said = torchrun(2, "autotp_job.py", "resume", str(tmp_path), "2", str(stage), "fp32", str(tmp_path / "universal"))
    assert (tmp_path / "resumed.json").exists(), said[-4000:]
    found, whole = (json.loads(p.read_text()) for p in (tmp_path / "resumed.json", folder / "case.json"))
    assert found["step"] == 6 and found["losses"] == pytest.approx(whole["losses"], rel=1e-6)
