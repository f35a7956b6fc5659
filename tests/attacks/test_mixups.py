"""Files of ranks that do not belong together: one rank's file copied over another's, exchanged, or of another step."""

from __future__ import annotations

import copy
import shutil
import struct
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from attacks.test_numbers import with_right_crcs
from commands import ckpttool_here
from torch.distributed.checkpoint._extension import ZStandard

import ckpttool
from ckpttool.engine import mixups, opening
from ckpttool.engine.copy.stream import read_small_tensors
from ckpttool.engine.doctor.examine import doctor
from ckpttool.engine.inspect import inspect
from ckpttool.errors import CkpttoolError, Corrupt, Differs, Unsupported

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

FIXTURES = Path(__file__).parents[2] / "fixtures"


def copied(name: str, tmp_path: Path) -> Path:
    """A fixture that may be changed."""
    folder = tmp_path / "in"
    shutil.copytree(FIXTURES / name / "ckpt", folder)
    return folder


def anonymous(path: Path) -> None:
    """Write a file anew as if the job had saved it to an open file: without its name in it."""
    path.write_bytes(with_right_crcs(path.read_bytes()))


def refusal(folder: Path, out: Path, **how: Any) -> str:
    """What convert and all else that reads tensors say of a folder; `how` are arguments of `open` without which it is another
    refusal."""
    with pytest.raises(Corrupt) as e:
        ckpttool.convert(folder, out, to="full", drop=True, **how)
    assert not out.exists()
    for act in (
        lambda: ckpttool.verify(folder, **how), lambda: read_one(folder, **how), lambda: ckpttool.storage_reader(folder, **how),
        lambda: ckpttool.storage_reader(folder, shared=True, **how),
        lambda: ckpttool.load(torch.nn.Linear(1, 1), None, folder, **how),
    ):  # fmt: skip
        with pytest.raises(Corrupt) as same:
            act()
        assert str(same.value) == str(e.value)
    return str(e.value)


def read_one(folder: Path, **how: Any) -> Any:
    """A tensor of it."""
    with ckpttool.open(folder, **how) as opened:
        return opened[next(iter(opened))].numpy()


def optim(layout: str, rank: int, folder: Path) -> Path:
    """The optimizer file of a rank."""
    pattern = {"zero": f"*/*zero_pp_rank_{rank}_*optim_states.pt", "fsdp1": f"*optim*rank*{rank}.pt"}[layout]
    return next(folder.glob(pattern))


# ------------------------------------------------------------------------------------------------------ equal ranks

OTHERS = [
    ("nanotron/zero1/3", "optimizer/*_dp-1-*tp-0-*.pt", "optimizer/*_dp-1-*tp-1-*.pt"),
    ("nanotron/zero0/3", "optimizer/*pp-0-*tp-1-*.pt", "optimizer/*pp-0-*tp-0-*.pt"),
    ("checkpointing/boxes/ckpt", "model_0.safetensors", "model_1.safetensors"),
    ("tp2_plain", "mp_rank_00/*.pt", "mp_rank_01/*.pt"),  # some tensors are two chunks of each rank
    ("tp2_plain", "mp_rank_01/*.pt", "mp_rank_00/*.pt"),
    ("pp2_fp32", "mp_rank_00_001/*.pt", "mp_rank_00_000/*.pt"),  # no tensor is of both stages
]  # fmt: skip


@pytest.mark.parametrize(("name", "one", "other"), OTHERS)
def test_a_file_of_another_layout_that_is_a_copy_of_another_rank_s(
    name: str, one: str, other: str, tmp_path: Path
) -> None:
    archive = FIXTURES / "megatron" / "legacy" / f"{name}.tar.xz"
    if archive.exists():
        with tarfile.open(archive) as packed:
            packed.extractall(tmp_path, filter="data")
        folder = next(tmp_path.glob("legacy/iter_*"))
    else:
        shutil.copytree(FIXTURES / name, folder := tmp_path / "in")
    ckpttool.verify(folder)
    for path in (next(folder.glob(one)), next(folder.glob(other))):
        if path.suffix == ".pt":
            anonymous(path)
    shutil.copy(next(folder.glob(one)), next(folder.glob(other)))
    assert "hold the same numbers" in refusal(folder, tmp_path / "out.pt")
    assert ckpttool.verify(folder, allow_equal_ranks=True, allow_mixed_steps=True)


def of_ranks(folder: Path, pattern: str, trees: list[Any]) -> Path:
    """One file a rank."""
    folder.mkdir()
    for rank, tree in enumerate(trees):
        torch.save(tree, folder / pattern.format(rank))
    return folder


def stages(n: int = 3) -> list[dict[str, torch.Tensor]]:
    """The state dicts of stages that number their layers from 0."""
    return [{f"layers.{i}.weight": torch.randn(5, 3) for i in range(2)} for _ in range(n)]


@pytest.mark.parametrize("pattern", ["model_world_size_3_rank_{}.pt", "local_rank{}.pt", "checkpoint_rank{}.pt"])
def test_stages_of_a_pipeline_with_the_same_names_are_no_model(pattern: str, tmp_path: Path) -> None:
    trees: list[Any] = stages()
    if pattern.startswith("checkpoint"):
        trees = [{"model": tree, "step": 3} for tree in trees]
    folder = of_ranks(tmp_path / "in", pattern, trees)
    said = refusal(folder, tmp_path / "out.pt")
    for part in ("2 of 2 tensors", '"model.layers.0.weight"', "ranks 1, 2", "pipeline", "allow_mixed_steps=True"):
        assert part in said
    with pytest.raises(Corrupt):
        ckpttool.verify(folder, read_data=True)
    sick = doctor(folder, read_data=True)
    assert not sick.sound and [f.kind for f in sick.findings] == ["other-weights"]
    shown = inspect(folder)
    assert any("2 entries" in n and n.endswith("a conversion refuses them") for n in shown.notes)
    assert "no conversion takes it" in shown.next and f"ckpttool doctor {folder}" in shown.next
    done = ckpttool.convert(folder, tmp_path / "out.pt", allow_mixed_steps=True)
    names = [(f"extra.per_rank.{r}.model.layers.{i}.weight", 60) for i in range(2) for r in (1, 2)]
    assert sorted((name, nbytes) for name, nbytes, _ in done.dropped) == sorted(names)
    assert all("should have the same" in why for *_, why in done.dropped)


def test_a_legacy_file_of_a_stage_has_no_crc32_and_is_compared(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for rank, tree in enumerate(stages()):
        torch.save(tree, folder / f"local_rank{rank}.pt", _use_new_zipfile_serialization=False)
    assert "2 of 2 tensors" in refusal(folder, tmp_path / "out.pt")


def replicas(change: Callable[[dict[str, Any]], None]) -> list[Any]:
    """What two ranks of a DDP job save, of which the second has been changed."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.named_parameters())
    model(torch.randn(4, 5)).square().sum().backward()
    optimizer.step()
    trees: list[Any] = [copy.deepcopy({"model": model.state_dict(), "optim": optimizer.state_dict()}) for _ in range(2)]
    change(trees[1])
    return trees


def test_statistics_that_each_rank_has_for_itself_are_listed(tmp_path: Path) -> None:
    def change(tree: dict[str, Any]) -> None:
        tree["model"]["1.running_mean"] += 1
        tree["model"]["1.num_batches_tracked"] += 1

    folder = of_ranks(tmp_path / "in", "checkpoint_rank{}.pt", replicas(change))
    done = ckpttool.convert(folder, tmp_path / "out.pt")
    names = ("1.running_mean", "1.num_batches_tracked")
    assert {(name, nbytes) for name, nbytes, _ in done.dropped} == {
        (f"extra.per_rank.1.model.{n}", b) for n, b in zip(names, (12, 8), strict=True)
    }
    assert all("its own" in why for *_, why in done.dropped)
    assert any("2 entries" in n for n in ckpttool.verify(folder).notes)
    found = doctor(folder)
    assert found.sound and [f.tensors for f in found.findings if f.kind == "own-copies"] == [
        tuple(f"model.{n}" for n in names)
    ]
    kept = torch.load(tmp_path / "out.pt")["model"]
    assert torch.equal(kept["1.running_mean"], torch.load(folder / "checkpoint_rank0.pt")["model"]["1.running_mean"])
    assert not [n for n in ckpttool.verify(folder).notes if "refuses" in n]
    said = "1 rank has other numbers in 2 entries of which the lowest rank's are read"
    assert [n for n in ckpttool.verify(tmp_path / "out.pt", against=folder).notes if n.startswith(f"{folder}: {said}")]
    assert [n for n in ckpttool.diff(tmp_path / "out.pt", folder).notes if n.startswith(f"{folder}: {said}")]
    assert [n for n in ckpttool.digest(folder).notes if n.startswith(said)]


@pytest.mark.parametrize("slot", ["exp_avg", "exp_avg_sq"])
def test_replicas_of_an_optimizer_that_diverged_are_refused(slot: str, tmp_path: Path) -> None:
    def change(tree: dict[str, Any]) -> None:
        tree["optim"]["state"][0][slot] += 1

    folder = of_ranks(tmp_path / "in", "checkpoint_rank{}.pt", replicas(change))
    assert f'"optim.state.0.weight.{slot}", of which rank 1 has other' in refusal(folder, tmp_path / "out.pt")
    done = ckpttool.convert(folder, tmp_path / "out.pt", only=["model"])
    assert done.dropped == []


OF_ONE_RANK = [
    ("trainers/olmo_core_w3/step3", "model_and_optim/__2_0.distcp", "model_and_optim/__2_5.distcp"),  # of another size
    ("fsdp2_w2_threads/ckpt", "__1_1.distcp", "__1_0.distcp"),
    ("megatron/stacked_pp2_bf16/ckpt/iter_0000003", "__0_1.distcp", "__0_0.distcp"),
]


@pytest.mark.parametrize(("case", "one", "other"), OF_ONE_RANK)
def test_a_file_that_is_a_copy_of_another_one_of_its_rank(case: str, one: str, other: str, tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / case, folder := tmp_path / "in")
    ckpttool.verify(folder)
    (folder / other).unlink()
    shutil.copy(folder / one, folder / other)
    with pytest.raises(Corrupt):
        ckpttool.convert(folder, tmp_path / "out.pt", drop=True)
    if "olmo" in case:
        assert f"{other} holds the same numbers as {one}" in refusal(folder, tmp_path / "out.pt")


def dcp_of_files(folder: Path, state: dict[str, Any], files: int) -> Path:
    """A save of one rank into several files."""
    writer = torch_dcp.FileSystemWriter(folder, thread_count=files)
    torch_dcp.save(state, storage_writer=writer, no_dist=True)
    return folder


def test_equal_files_of_one_rank_need_more_than_the_same_numbers(tmp_path: Path) -> None:
    """A weight and its master or its average are equal, tied weights are, and moments of AMSGrad after one step; layers are not."""
    torch.manual_seed(0)
    layers = {f"layers.{i}.w": torch.randn(40, 10 + i) for i in range(4)}
    state = {"model": layers, "extra": {"master": {n: t.clone() for n, t in layers.items()}}}
    folder = dcp_of_files(tmp_path / "masters", state, 2)
    names = [
        {
            k.fqn.partition(".")[0]
            for k, v in torch_dcp.FileSystemReader(folder).read_metadata().storage_data.items()
            if v.relative_path == f"__0_{i}.distcp"
        }
        for i in range(2)
    ]
    assert names == [{"model"}, {"extra"}] or names == [{"extra"}, {"model"}], "the premise: one file has the masters"
    ckpttool.verify(folder)
    same = [torch.randn(40, 10), torch.randn(40, 11)]
    folder = dcp_of_files(tmp_path / "copied", {"model": {f"layers.{i}.w": same[i // 2].clone() for i in range(4)}}, 2)
    assert "holds the same numbers as" in refusal(folder, tmp_path / "out.pt")
    assert ckpttool.verify(folder, allow_equal_ranks=True)
    ones = [torch.ones(40, 10), torch.ones(40, 11)]
    ckpttool.verify(
        dcp_of_files(tmp_path / "ones", {"model": {f"layers.{i}.w": ones[i // 2].clone() for i in range(4)}}, 2)
    )


def test_bytes_behind_the_last_item_of_a_file(tmp_path: Path) -> None:
    state = {"model": {"a": torch.randn(30), "b": torch.randn(7, 5)}, "step": 3}
    torch_dcp.save(state, checkpoint_id=tmp_path / "in", no_dist=True)
    file = tmp_path / "in" / "__0_0.distcp"
    whole = file.read_bytes()
    file.write_bytes(whole + bytes(4096))  # padding
    ckpttool.verify(tmp_path / "in")
    file.write_bytes(whole + bytes(40) + b"PK")
    said = refusal(tmp_path / "in", tmp_path / "out.pt")
    assert (
        f"__0_0.distcp has {len(whole) + 42:,} bytes, and the last item that .metadata names ends at {len(whole):,}"
        in said
    )
    assert not doctor(tmp_path / "in").sound
    assert ckpttool.convert(tmp_path / "in", tmp_path / "out.pt", allow_equal_ranks=True).verified


@pytest.mark.parametrize(
    "how",
    [{"single_file_per_rank": False}, {"thread_count": 3}, {"_extensions": [ZStandard()]}, {"sync_files": False}],
    ids=["file a tensor", "threads", "zstd", "unsynced"],
)
def test_no_writer_of_torch_leaves_bytes_that_no_item_names(how: dict[str, Any], tmp_path: Path) -> None:
    state = {"model": {f"w{i}": torch.randn(30, i) for i in range(5)}, "step": 3, "text": "x" * 5000}
    torch_dcp.save(state, storage_writer=torch_dcp.FileSystemWriter(tmp_path / "in", **how), no_dist=True)
    with ckpttool.open(tmp_path / "in") as opened:
        assert opened.checkpoint.tails == {} and not [n for n in opened.checkpoint.notes if "between" in n]
        opened.locate()


SAVES = ["zero3_w4", "zero3_w3_groups", "zero3_w3_subgroup", "zero2_w3_bf16", "zero1_w2"]


@pytest.mark.parametrize("name", SAVES)
@pytest.mark.parametrize("named", [True, False], ids=["named", "anonymous"])
def test_an_optimizer_file_of_zero_that_is_a_copy_of_another_rank_s(name: str, named: bool, tmp_path: Path) -> None:
    folder = copied(name, tmp_path)
    for a, b in ((0, 1), (1, 0)):
        shutil.copytree(FIXTURES / name / "ckpt", folder, dirs_exist_ok=True)
        shutil.copy(optim("zero", a, folder), optim("zero", b, folder))
        if not named:
            for path in (optim("zero", a, folder), optim("zero", b, folder)):
                anonymous(path)
        said = refusal(folder, tmp_path / "out.pt")
        assert f"rank_{b}_" in said and "allow_equal_ranks=True" in said
        assert ("was saved under the name" if named else "hold the same numbers") in said
    assert ckpttool.convert(
        folder, tmp_path / "out.pt", drop=True, allow_equal_ranks=True, allow_mixed_steps=True
    ).verified


def test_a_model_file_of_zero_that_is_a_copy_or_exchanged_is_named(tmp_path: Path) -> None:
    folder = copied("zero3_w4", tmp_path)
    one, two = (next(folder.glob(f"*/zero_pp_rank_{r}_*model_states.pt")) for r in (1, 2))
    shutil.copy(one, two)
    assert "zero_pp_rank_1" in refusal(folder, tmp_path / "out.pt")
    folder = copied("zero3_w4", tmp_path / "two")
    one, two = optim("zero", 1, folder), optim("zero", 2, folder)
    first = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(first)
    assert "exchanged" in refusal(folder, tmp_path / "out.pt")


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_a_raw_optimizer_file_of_fsdp1_that_is_a_copy(legacy: bool, tmp_path: Path) -> None:
    """Nothing in it tells its rank, but for the numbers."""
    folder = copied("fsdp1_w3_uop0", tmp_path)
    shutil.copy(FIXTURES / "fsdp1_w3_uop0" / "flat_layout.json", folder)
    if legacy:
        for path in folder.glob("*optim*rank*"):
            state = torch.load(path, weights_only=True)
            torch.save(state, path, _use_new_zipfile_serialization=False)
    assert ckpttool.verify(folder).structure == "ok"
    files = sorted(folder.glob("*optim*rank*"))
    shutil.copy(files[0], files[1])
    said = refusal(folder, tmp_path / "out.pt")
    assert files[0].name in said and files[1].name in said
    assert ("hold the same numbers" if legacy else "was saved as the file of rank 0") in said


def test_raw_optimizer_files_of_fsdp1_that_were_exchanged(tmp_path: Path) -> None:
    folder = copied("fsdp1_w3_uop0", tmp_path)
    shutil.copy(FIXTURES / "fsdp1_w3_uop0" / "flat_layout.json", folder)
    one, two = sorted(folder.glob("*optim*rank*"))[:2]
    first = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(first)
    assert "exchanged" in refusal(folder, tmp_path / "out.pt")


def dcp(tmp_path: Path, make: Callable[[tuple[int, ...]], torch.Tensor]) -> Path:
    """A DCP folder of three ranks whose second and third files have the same places."""
    model = {"a.weight": make((6, 4)), "a.bias": make((6,)), "b.weight": make((9, 5)), "norm.weight": torch.ones(12)}
    state = {
        n: {"step": torch.tensor(3.0), "exp_avg": torch.zeros_like(t), "exp_avg_sq": t.abs() * 2}
        for n, t in model.items()
    }
    tree = {"model": model, "optim": {"state": state, "param_groups": [{"lr": 0.1, "params": list(model)}]}}
    torch.save(tree, tmp_path / "in.pt")
    ckpttool.convert(tmp_path / "in.pt", tmp_path / "in", to="dcp", world_size=3)
    return tmp_path / "in"


def test_a_data_file_of_dcp_that_is_a_copy(tmp_path: Path) -> None:
    folder = dcp(tmp_path, torch.randn)
    shutil.copy(folder / "__1_0.distcp", folder / "__2_0.distcp")
    said = refusal(folder, tmp_path / "out.pt")
    assert "__1_0.distcp of rank 1" in said and "__2_0.distcp of rank 2" in said
    (folder / "ckpttool.json").unlink()  # its digests tell as well
    assert ckpttool.convert(folder, tmp_path / "out.pt", allow_equal_ranks=True).verified
    assert read_one(folder, allow_equal_ranks=True).size and ckpttool.storage_reader(folder, allow_equal_ranks=True)


def exchange(one: Path, other: Path) -> None:
    first = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(first)


def test_data_files_of_dcp_that_were_exchanged_are_found_by_digests_alone(tmp_path: Path) -> None:
    """Their items have the same names, dtypes, shapes and CRC32s of their own: docs/explanation/security.md."""
    folder = dcp(tmp_path, torch.randn)
    exchange(folder / "__1_0.distcp", folder / "__2_0.distcp")
    state = {"model": {"a.weight": torch.zeros(6, 4)}}
    for act in (
        lambda: ckpttool.convert(folder, tmp_path / "out.pt"),
        lambda: ckpttool.verify(folder, read_data=True),
        lambda: torch_dcp.load(state, storage_reader=ckpttool.storage_reader(folder), no_dist=True),
    ):
        with pytest.raises((CkpttoolError, torch_dcp.api.CheckpointException), match=r"recorded|ckpttool\.json"):
            act()
    (folder / "ckpttool.json").unlink()
    assert not refused(folder, tmp_path)
    for found in (
        ckpttool.diff(folder, tmp_path / "in.pt").equal,
        ckpttool_here("verify", folder, "--against", tmp_path / "in.pt").returncode != Differs.exit_code,
    ):
        assert not found


@pytest.mark.parametrize(
    ("one", "other"),
    [("block/0/norm/model_weight", "block/1/norm/model_weight"),
     ("block/0/down/model_weight_*tp-rank-0-*", "block/0/down/model_weight_*tp-rank-1-*"),
     ("block/0/qkv/model_weight_*tp-rank-0-*", "block/1/qkv/model_weight_*tp-rank-0-*")],
)  # fmt: skip
def test_model_files_of_nanotron_that_were_exchanged(one: str, other: str, tmp_path: Path) -> None:
    """fp32 masters tell (zero1); without them (zero0) nothing in the files does: docs/explanation/security.md."""
    for name in ("zero1", "zero0"):
        genuine, folder = FIXTURES / "nanotron" / name / "3", tmp_path / name
        shutil.copytree(genuine, folder)
        exchange(*(next((folder / "model" / "model").glob(f"{n}.safetensors")) for n in (one, other)))
        assert refused(folder, tmp_path) == (name == "zero1")
        assert ckpttool_here("verify", folder, "--against", genuine).returncode != 0
    assert ckpttool_here("verify", folder, "--against", genuine).returncode == Differs.exit_code
    assert not ckpttool.diff(folder, genuine).equal


def refused(folder: Path, tmp_path: Path) -> bool:
    """Whether convert and verify refuse a folder; both do, or neither."""
    out = []
    for act in (
        lambda: ckpttool.convert(folder, tmp_path / "out.pt", force=True),
        lambda: ckpttool.verify(folder, read_data=True),
    ):
        try:
            act()
            out.append(False)
        except Corrupt:
            out.append(True)
    assert out[0] == out[1]
    return out[0]


@pytest.mark.parametrize("value", [0.0, 1.0, 0.5])
def test_ranks_of_a_constant_state_are_equal_and_that_is_right(value: float, tmp_path: Path) -> None:
    """A fresh optimizer, norms, an untrained model of constants: equal without being copies, in every layout."""
    folder = dcp(tmp_path, lambda shape: torch.full(shape, value))
    assert (folder / "__1_0.distcp").read_bytes() == (folder / "__2_0.distcp").read_bytes()
    for to in ("zero3", "zero2", "fsdp1"):
        assert ckpttool.convert(folder, tmp_path / to, to=to, world_size=3, drop=True).verified
        ckpttool.verify(tmp_path / to)


def test_masks_and_indices_that_repeat_themselves_on_every_rank_are_right(tmp_path: Path) -> None:
    """The second and the third file hold parts of masks alone, and the same ones."""
    mask = (torch.arange(9 * 6) % 3 == 0).reshape(9, 6)
    tree = {"model": {"mask": mask, "index": torch.arange(6).repeat(9).reshape(9, 6), "w": torch.randn(1, 8)}}
    torch.save(tree, tmp_path / "in.pt")
    ckpttool.convert(tmp_path / "in.pt", tmp_path / "in", to="dcp", world_size=3)
    assert (tmp_path / "in" / "__1_0.distcp").read_bytes() == (tmp_path / "in" / "__2_0.distcp").read_bytes()
    ckpttool.verify(tmp_path / "in", read_data=True, against=tmp_path / "in.pt")


def test_two_copies_of_a_model_in_files_of_different_ranks_are_no_mixup(tmp_path: Path) -> None:
    """Replicated tensors are spread over the ranks: a reference model that is still equal may lie in a file of its own."""
    w = torch.randn(6, 4)
    torch.save({"model": {"w": w}}, tmp_path / "in.pt")
    ckpttool.convert(tmp_path / "in.pt", tmp_path / "in", to="dcp", world_size=1)
    with ckpttool.open(tmp_path / "in") as opened:
        ckpt = opened.locate()
        t = ckpt.tensors["model.w"]
        ckpt.tensors["optim.reference"] = t
        ckpt.files.append(ckpt.files[0])
        ckpt.sizes.append(ckpt.sizes[0])
        again = type(t.chunks).whole(t.shape, len(ckpt.files) - 1, *t.chunks[0].extent[1:])
        ckpt.tensors["optim.reference"] = type(t)(t.dtype, t.shape, ("optim", "reference"), again)
        ckpt.ranks = {0: 0, len(ckpt.files) - 1: 1}
        mixups.refuse_equal_ranks(ckpt, opened.source)


def test_crc32s_of_zeros() -> None:
    assert [mixups._compute_zeros_crc32(n) for n in (0, 1, 2, 3, 7, 4096, 1000003)] == [
        zlib.crc32(bytes(n)) for n in (0, 1, 2, 3, 7, 4096, 1000003)
    ]


STATES = [
    ("trainers/accelerate_fsdp1_sharded/ckpt", "random_states_{}.pkl", None), ("trainers/trainer_ddp/ckpt/checkpoint-3", "rng_state_{}.pth", None),
    ("trainers/automodel_w2/epoch_0_step_3", "dataloader/dataloader_dp_rank_{}.pt", None), ("trainers/olmo_core_w3/step3", "train/rank{}.pt", None),
    ("nanotron/zero1/3", "random/tp-0-of-2_dp-{}-of-2_pp-0-of-1.pt", Corrupt), ("trainers/verl_fsdp2_w3/ckpt", "extra_state_world_size_3_rank_{}.pt", Corrupt),
]  # fmt: skip


@pytest.mark.parametrize(("folder", "file", "error"), STATES)
def test_random_states_and_the_like_under_another_ranks_name_are_not_taken_for_its_own(
    folder: str, file: str, error: type[Corrupt] | None, tmp_path: Path
) -> None:
    shutil.copytree(FIXTURES / folder, source := tmp_path / Path(folder).name)
    shutil.copy(source / file.format(0), source / file.format(1))
    with pytest.raises(error or Unsupported, match=r"was saved (under the name|as the file of rank)"):
        ckpttool.convert(source, tmp_path / "x.pt", to="full")
    done = ckpttool.convert(source, tmp_path / "x.pt", to="full", allow_equal_ranks=True)
    assert done.verified and not done.dropped
    if error is None:
        assert any("by another rank" in note for note in ckpttool.inspect(source).notes)


# ------------------------------------------------------------------------------------------------------ mixed steps


def set_steps(folder: Path, steps: Callable[[str, str], float | None]) -> None:
    """Give optimizer steps other values, with right CRC32s; `steps(file, parameter)`, None for one that stays."""
    with ckpttool.open(folder) as opened:
        items = {n: t.chunks[0].extent for n, t in opened.checkpoint.tensors.items() if t.path[-1] == "step"}
        names = {n: str(opened.checkpoint.tensors[n].path[2]) for n in items}
        old = read_small_tensors(opened.locate(), opened.source, items)
        files = opened.checkpoint.files
    for n, (file, offset, length) in items.items():
        value = steps(files[file], names[n])
        if value is None:
            continue
        path, new = folder / files[file], struct.pack("<f", value)
        data = path.read_bytes()
        item = data[offset : offset + length]
        assert item.count(old[n]) == 1
        was, now = (struct.pack("<I", zlib.crc32(b)) for b in (old[n], new))
        item = item.replace(old[n], new).replace(was, now)
        path.write_bytes(data[:offset] + item + data[offset + length :])


def test_a_data_file_of_another_step(tmp_path: Path) -> None:
    folder = copied("fsdp2_w3", tmp_path)
    set_steps(folder, lambda file, _: 2.0 if file == "__2_0.distcp" else None)
    said = refusal(folder, tmp_path / "out.pt")
    for part in ("__2_0.distcp holds step 2", "__1_0.distcp holds step 3", "allow_mixed_steps=True"):
        assert part in said
    assert ckpttool.convert(folder, tmp_path / "out.pt", allow_mixed_steps=True).verified
    assert read_one(folder, allow_mixed_steps=True).size and ckpttool.storage_reader(folder, allow_mixed_steps=True)
    assert ckpttool.inspect(folder).step is not None
    assert len(ckpttool.diff(folder, FIXTURES / "fsdp2_w3" / "ckpt").data) == 10  # looking at it is not refused


def test_steps_that_differ_within_a_file_are_the_job_s_own(tmp_path: Path) -> None:
    folder = copied("fsdp2_w3", tmp_path)
    late = {"lm_head.weight"}
    set_steps(folder, lambda _, name: 1.0 if name in late else None)
    assert ckpttool.convert(folder, tmp_path / "out.pt").verified
    shutil.rmtree(folder)
    folder = copied("fsdp2_w3", tmp_path)
    set_steps(folder, lambda _, name: 1.0 if "layers.1" in name else None)
    assert ckpttool.verify(folder).structure == "ok"


def along(steps: str, places: str, groups: str = "") -> Any:
    """`_along` of parameters 0, 1, ...: a digit each for step, place and param group."""
    names = [str(i) for i in range(len(steps))]

    def column(text: str) -> dict[str, int]:
        return dict(zip(names, map(int, text), strict=True))

    return mixups._find_step_split(names, column(groups or "0" * len(steps)), column(places), column(steps))


@pytest.mark.parametrize(
    ("steps", "places", "groups", "found"),
    [
        ("3333", "0011", "", None),
        ("3322", "0011", "", ("2", "0", True)),
        ("2233", "0011", "", ("2", "0", True)),
        ("332233", "001122", "", ("2", "0", True)),
        ("3332", "0011", "", None),  # within a file
        ("3332", "0001", "", ("3", "0", False)),  # one alone
        ("332", "012", "", ("2", "0", False)),
        ("33332222", "00110011", "00001111", None),  # a group of its own, in both files
        ("33222233", "00110011", "00001111", ("2", "0", True)),
        ("33223333", "00110011", "00001111", None),  # the other group has equal steps in both
        ("33223323", "00110011", "00001111", None),  # the other group has different ones in one file
        ("3322", "0011", "0011", None),  # a group in each file: nothing can be said
    ],
)
def test_what_lies_along_the_lines_of_files(steps: str, places: str, groups: str, found: Any) -> None:
    assert along(steps, places, groups) == found


def test_a_single_step_in_a_file_is_a_note(tmp_path: Path) -> None:
    folder = copied("fsdp2_w3", tmp_path)
    with ckpttool.open(folder) as opened:
        ckpt = opened.locate()
        steps = {n: t for n, t in ckpt.tensors.items() if t.path[-1] == "step"}
        first = next(n for n, t in steps.items() if ckpt.files[t.chunks.file[0]] == "__2_0.distcp")
        others = [n for n, t in steps.items() if ckpt.files[t.chunks.file[0]] == "__1_0.distcp"]
        name = str(steps[first].path[2])
    set_steps(folder, lambda _, n: 2.0 if n == name else None)
    with opening.open(folder) as opened:
        ckpt = opened.locate()
        ckpt.tensors = {n: ckpt.tensors[n] for n in [first, *others]}
        mixups.refuse_mixed_steps(ckpt, opened.source)
        assert "__2_0.distcp holds step 2" in ckpt.notes[-1]


GENUINE = [
    p for pattern in ("awkward_*", "zero*", "fsdp1_*", "fsdp2_*") for p in sorted(FIXTURES.glob(pattern)) if (p / "ckpt").is_dir()
]  # fmt: skip


@pytest.mark.parametrize("folder", GENUINE, ids=lambda p: p.name)
def test_no_genuine_checkpoint_is_refused(folder: Path) -> None:
    """Replicas of HSDP, NO_SHARD, fresh optimizers, files per tensor, safetensors and zstd among them."""
    told = folder / "flat_layout.json"
    with ckpttool.open(folder / "ckpt", flat_layout=told if told.exists() else None) as opened:
        ckpt = opened.locate()
        assert not [n for n in ckpt.notes if "another save" in n]
        if folder.name in ("zero3_w4", "zero2_w3_bf16", "fsdp2_w3", "fsdp1_w3_uop0", "fsdp1_w4_uop1"):
            assert len(set(ckpt.ranks.values())) == int(folder.name.partition("_w")[2][0])
