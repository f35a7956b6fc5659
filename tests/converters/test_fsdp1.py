"""fsdp1: what real FSDP1 writes is read, and what is written real FSDP1 loads; each rank in its turn, in this process.

The process groups are fake ones (torch.testing._internal.distributed.fake_pg): FSDP1 flattens, cuts, saves and loads as
ever, only nothing is sent. One thing of torch is replaced: `init_from_local_shards` asks all ranks for their shards, so
here it is told. Whole jobs that go on training are in tests/live.
"""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ckpttool.converters import fsdp1
from engine.test_flat_layout import Tiny, rank_of, wrapped
from peers import difference, tensors_of
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor

import ckpttool
from ckpttool import layouts
from ckpttool.engine import conversion, opening, verification
from ckpttool.engine.flat.flat_layout import find_rank_slice
from ckpttool.errors import CkpttoolError, Corrupt, Unsafe, Unsupported, UsageError
from ckpttool.formats import pickles, sharded
from ckpttool.live.fsdp1 import describe_fsdp1

Tensors = dict[str, Tensor]


def load_full(path: Path) -> dict[str, Any]:
    """A file's tree, not mapped, so that the file can be written again."""
    tree: dict[str, Any] = torch.load(path, weights_only=True)
    return tree


@contextmanager
def told_shards() -> Iterator[None]:
    """torch's `init_from_local_shards` without asking the other ranks."""
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor import ShardedTensor
    from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
    from torch.distributed.fsdp import _state_dict_utils as where

    def make(local: Any, *size: Any, process_group: Any = None) -> Any:
        shape, world = torch.Size(size), dist.get_world_size()
        step = -(-shape[0] // world)
        cuts = [(min(r * step, shape[0]), min((r + 1) * step, shape[0])) for r in range(world)]
        rest = list(shape[1:])
        table = [
            ShardMetadata([a] + [0] * len(rest), [b - a, *rest], f"rank:{r}/cpu")
            for r, (a, b) in enumerate(cuts)
            if a < b
        ]
        dtype = local[0].tensor.dtype if local else torch.float32
        meta = ShardedTensorMetadata(table, shape, TensorProperties(dtype=dtype, requires_grad=True))
        return ShardedTensor._init_from_local_shards_and_global_metadata(local, meta, process_group=process_group)

    old = where.init_from_local_shards
    where.init_from_local_shards = make
    try:
        yield
    finally:
        where.init_from_local_shards = old


def filled(model: nn.Module, seed: int = 0) -> nn.Module:
    """Every element another number, the same in every process."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    return model


def gradients(model: nn.Module) -> Tensors:
    generator = torch.Generator().manual_seed(7)
    return {n: torch.randn(p.shape, generator=generator).to(p.dtype) for n, p in model.named_parameters()}


def two_groups(named: Any) -> list[dict[str, Any]]:
    """Matrices, and the rest, as trainers split weight decay."""
    wide = [n.endswith((".weight",)) and "norm" not in n for n, _ in named]
    return [
        {"params": [p for (_, p), w in zip(named, wide, strict=True) if w], "weight_decay": 0.1},
        {"params": [p for (_, p), w in zip(named, wide, strict=True) if not w], "lr": 2e-3},
    ]


def clean(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "")


def truth(make: Callable[[], nn.Module] = Tiny, groups: bool = False) -> Tensors:
    """The state of one process after a step of AdamW, which is elementwise, so it is that of any number of ranks."""
    model = filled(make())
    grads = gradients(model)
    named = list(model.named_parameters())
    optimizer = torch.optim.AdamW(two_groups(named) if groups else [p for _, p in named], lr=1e-2)
    for n, p in named:
        p.grad = grads[n]
    optimizer.step()
    out = {f"model.{n}": t.detach().clone() for n, t in model.state_dict().items()}
    for n, p in named:
        out.update({f"optim.{n}.{slot}": t.clone() for slot, t in optimizer.state[p].items()})
    return out


def live_job(
    uop: bool, groups: bool = False, step: bool = True, make: Callable[[], nn.Module] = Tiny, **how: Any
) -> tuple[Any, Any]:
    """(model, optimizer) of this rank, a step done."""
    model = filled(make())
    grads = gradients(model)
    live = wrapped(model, use_orig_params=uop, **how)
    named = [(clean(n), p) for n, p in live.named_parameters()]
    optimizer = torch.optim.AdamW(two_groups(named) if groups else [p for _, p in named], lr=1e-2)
    if not step:
        return live, optimizer
    world, rank = dist.get_world_size(), dist.get_rank()
    for flat in describe_fsdp1(live)["flat_params"]:
        whole = torch.zeros(flat["numel"], dtype=getattr(torch, flat["dtype"]))
        for p in flat["params"]:
            g = grads[p["name"]]
            there = whole[p["first"] : p["first"] + g.numel()]
            there.as_strided(g.shape, p["strides"]).copy_(g) if "strides" in p else there.copy_(g.reshape(-1))
        a, b = find_rank_slice(flat["numel"], world, rank)
        for name, p in named:
            if name == (f"{flat['module']}._flat_param" if flat["module"] else "_flat_param"):
                p.grad = torch.zeros_like(p)
                p.grad[: b - a] = whole[a:b]
            for part in flat["params"] if uop else ():
                if part["name"] == name:
                    x, y = max(a, part["first"]), min(b, part["first"] + grads[name].numel())
                    p.grad = whole[x : max(x, y)].reshape(p.shape).clone()
    optimizer.step()
    return live, optimizer


def job(folder: Path, world: int, uop: bool, **how: Any) -> Path:
    """A folder as a job of FSDP1 leaves it with LOCAL_STATE_DICT and optimizer.state_dict()."""
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    folder.mkdir()
    for r in range(world):
        with rank_of(r, world), told_shards():
            live, optimizer = live_job(uop, **how)
            with FullyShardedDataParallel.state_dict_type(live, StateDictType.LOCAL_STATE_DICT):
                torch.save(live.state_dict(), folder / f"local_rank{r}.pt")
            torch.save(optimizer.state_dict(), folder / f"local_optim_rank{r}.pt")
    return folder


def like(folder: Path, state: Tensors) -> str:
    """A file with the model alone, as another checkpoint of it would be."""
    path = folder / "like.pt"
    torch.save({k.removeprefix("model."): t for k, t in state.items() if k.startswith("model.")}, path)
    return str(path)


def read(path: Path, **how: Any) -> Tensors:
    """What a folder holds, by way of one file that torch reads."""
    out = path.parent / f"{path.name}.read.pt"
    conversion.convert(path, out, to="full", force=True, **how)
    return tensors_of(load_full(out))


# --------------------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize(("uop", "groups"), [(False, False), (True, False), (True, True)])
def test_every_bit_of_a_job_is_read(tmp_path: Path, world: int, uop: bool, groups: bool) -> None:
    path, wanted = job(tmp_path / "ckpt", world, uop, groups=groups), truth(groups=groups)
    assert not difference(read(path, like=like(tmp_path, wanted)), wanted)


def test_mixed_precision_moves_parameters_in_a_flat_one(tmp_path: Path) -> None:
    from torch.distributed.fsdp import MixedPrecision

    policy = MixedPrecision(param_dtype=torch.bfloat16)
    path, wanted = job(tmp_path / "ckpt", 3, True, mixed_precision=policy), truth()
    assert not difference(read(path, like=like(tmp_path, wanted)), wanted)


def test_bfloat16_parameters_are_read(tmp_path: Path) -> None:
    for uop in (False, True):
        path = job(tmp_path / f"ckpt{uop}", 2, uop, make=lambda: Tiny().bfloat16())
        assert not difference(
            read(path, like=like(tmp_path, truth(lambda: Tiny().bfloat16()))), truth(lambda: Tiny().bfloat16())
        )


def test_the_description_of_the_live_model_is_enough(tmp_path: Path) -> None:
    wanted = truth(groups=True)
    path = job(tmp_path / "ckpt", 3, True, groups=True)
    with rank_of(0, 3):
        described = describe_fsdp1(*live_job(True, groups=True, step=False))
    (tmp_path / "flat.json").write_text(json.dumps(described))
    assert not difference(read(path, flat_layout=tmp_path / "flat.json"), wanted)
    shutil.copy(tmp_path / "flat.json", path / "flat_layout.json")  # beside the files it needs no option
    assert not difference(read(path), wanted)


def test_a_transposed_parameter_is_read_in_its_own_order(tmp_path: Path) -> None:
    class Odd(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.turned = nn.Parameter(torch.empty(3, 5).t())

    path, wanted = job(tmp_path / "ckpt", 4, False, make=Odd), truth(Odd)
    with rank_of(0, 4):
        (path / "flat_layout.json").write_text(json.dumps(describe_fsdp1(live_job(False, make=Odd)[0])))
    assert not difference(read(path), wanted)


def test_names_in_the_model_s_order_and_parameters_in_the_optimizer_s(tmp_path: Path) -> None:
    path, wanted = job(tmp_path / "ckpt", 2, False), truth()
    with opening.open(path, like=like(tmp_path, wanted)) as opened:
        ckpt = opened.checkpoint
    model = [k for k in wanted if k.startswith("model.")]
    assert [n for n in ckpt.tensors if n.startswith("model.")] == model
    listed = ckpt.values["optim.param_groups.0.params"].data
    assert listed == [n.removeprefix("model.") for n in model if n not in ("model.count", "model.head.weight")]
    assert ckpt.world_size == 2
    assert ckpt.tensors["model.head.weight"].chunks[:] == ckpt.tensors["model.emb.weight"].chunks[:]


def test_without_a_word_on_what_lies_in_flat_parameters_three_ways_are_named(tmp_path: Path) -> None:
    path = job(tmp_path / "ckpt", 2, False)
    with pytest.raises(Unsupported) as e:
        opening.open(path)
    for way in ("--like", "--config", "--flat-layout", "describe_fsdp1", "layers.0"):
        assert way in str(e.value)


def test_another_model_is_refused_with_the_numbers(tmp_path: Path) -> None:
    path, other = job(tmp_path / "ckpt", 2, False), truth()
    other["model.norm.bias"] = torch.zeros(6)
    with pytest.raises(Unsupported, match=r'module "" has 66 elements.* have 122'):
        opening.open(path, like=like(tmp_path, other))
    del other["model.norm.bias"]
    with pytest.raises(Unsupported, match="66 elements"):
        opening.open(path, like=like(tmp_path, other))
    both = job(tmp_path / "uop", 2, True)
    with pytest.raises(Unsupported, match=r'"norm\.bias" is not among'):
        opening.open(both, like=like(tmp_path, other))


def test_a_layout_of_another_job_is_refused(tmp_path: Path) -> None:
    path = job(tmp_path / "ckpt", 2, True)
    with rank_of(0, 3):
        (tmp_path / "three.json").write_text(json.dumps(describe_fsdp1(live_job(True)[0])))
    with pytest.raises(Unsupported, match="another world size"):
        opening.open(path, flat_layout=tmp_path / "three.json")
    with pytest.raises(Unsupported, match="no such file"):
        opening.open(path, flat_layout=tmp_path / "none.json")


def test_a_like_whose_order_is_lost_is_refused(tmp_path: Path) -> None:
    path, wanted = job(tmp_path / "ckpt", 2, False), truth()
    with pytest.raises(Unsupported, match="alphabet"):
        opening.open(path, like=like(tmp_path, dict(sorted(wanted.items()))))


def broken(path: Path, name: str, change: Any, world: int = 3) -> None:
    """A file changed by torch itself."""
    rank = int(name[-4])
    with rank_of(rank, world):
        tree = torch.load(path / name, weights_only=False)
        torch.save(change(tree) or tree, path / name)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("good")
    return job(folder / "ckpt", 3, False), like(folder, truth())


def copied(good: tuple[Path, str], tmp_path: Path) -> tuple[Path, str]:
    return Path(shutil.copytree(good[0], tmp_path / "ckpt")), good[1]


def test_a_missing_rank_is_named(good: tuple[Path, str], tmp_path: Path) -> None:
    for name in ("local_rank2.pt", "local_optim_rank1.pt"):
        path, other = copied(good, tmp_path / name)
        (path / name).unlink()
        with pytest.raises(Corrupt, match=name):
            opening.open(path, like=other)


def test_exchanged_ranks_are_found_out(good: tuple[Path, str], tmp_path: Path) -> None:
    path, other = copied(good, tmp_path)
    (path / "local_rank1.pt").rename(path / "x")
    (path / "local_rank2.pt").rename(path / "local_rank1.pt")
    (path / "x").rename(path / "local_rank2.pt")
    with pytest.raises(Corrupt, match=r"local_rank1\.pt.* written by rank 2"):
        opening.open(path, like=other)


def test_a_rank_there_twice_is_named(good: tuple[Path, str], tmp_path: Path) -> None:
    path, other = copied(good, tmp_path)
    shutil.copy(path / "local_rank1.pt", path / "local_rank_1.pt")
    with pytest.raises(Corrupt, match="both belong to rank 1"):
        opening.open(path, like=other)


@pytest.mark.slow
def test_ranks_are_numbers_not_words(tmp_path: Path) -> None:
    path, wanted = job(tmp_path / "ckpt", 11, False), truth()
    assert not difference(read(path, like=like(tmp_path, wanted)), wanted)


def test_files_of_two_steps_are_found_out(good: tuple[Path, str], tmp_path: Path) -> None:
    path, other = copied(good, tmp_path)

    def later(tree: Any) -> None:
        tree["state"][1]["step"] += 1

    broken(path, "local_optim_rank2.pt", later)
    with pytest.raises(Corrupt, match=r"local_optim_rank2\.pt.* is 2, in local_optim_rank0\.pt it is 1"):
        opening.open(path, like=other)


def test_param_groups_that_differ_are_found_out(good: tuple[Path, str], tmp_path: Path) -> None:
    path, other = copied(good, tmp_path)
    broken(path, "local_optim_rank1.pt", lambda t: t["param_groups"][0].update(lr=0.5))
    with pytest.raises(Corrupt, match=r'local_optim_rank1\.pt.* first in "lr"'):
        opening.open(path, like=other)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s.update(exp_avg=s["exp_avg"][:-1]), "elements"),
        (lambda s: s.update(exp_avg=s["exp_avg"].half()), "float16"),
        (lambda s: s.update(exp_avg=s["exp_avg"][:-1], exp_avg_sq=s["exp_avg_sq"][:-1]), "fits no order"),
        (
            lambda s: s.update(exp_max=s.pop("exp_avg")),
            'slot "exp_avg" in the file of rank 0 and not in that of rank 1',
        ),
        (lambda s: s.__delitem__("exp_avg_sq"), 'slot "exp_avg_sq" in the file of rank 0 and not in that of rank 1'),
    ],
)
def test_slots_that_do_not_fit_are_found_out(good: tuple[Path, str], tmp_path: Path, change: Any, said: str) -> None:
    path, other = copied(good, tmp_path)
    broken(path, "local_optim_rank1.pt", lambda t: change(t["state"][1]))
    with pytest.raises(CkpttoolError, match=said):
        opening.open(path, like=other)
    assert read(path, like=other, only=["model"])


def test_a_file_cut_short_is_named(good: tuple[Path, str], tmp_path: Path) -> None:
    path, other = copied(good, tmp_path)
    data = (path / "local_rank1.pt").read_bytes()
    (path / "local_rank1.pt").write_bytes(data[: len(data) // 2])
    with pytest.raises(Corrupt, match=r"local_rank1\.pt"):
        opening.open(path, like=other)


def test_a_flipped_bit_is_found_out(good: tuple[Path, str], tmp_path: Path) -> None:
    path, other = copied(good, tmp_path)
    data = bytearray((path / "local_rank1.pt").read_bytes())
    with opening.open(path, like=other) as opened:
        chunk = opened.checkpoint.tensors["model.layers.1.a.weight"].chunks[0]
    assert opened.checkpoint.files[chunk.extent.file] == "local_rank0.pt"
    where = next(
        c for c in opened.checkpoint.tensors["model.layers.1.b.weight"].chunks if c.extent.file != chunk.extent.file
    )
    name = opened.checkpoint.files[where.extent.file]
    data = bytearray((path / name).read_bytes())
    data[where.extent.offset] ^= 1
    (path / name).write_bytes(data)
    with pytest.raises(Corrupt, match=name):
        read(path, like=other)


class Calls:
    """Pickled as a call of getattr."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __reduce__(self) -> Any:
        return getattr, self.args


@pytest.mark.parametrize("args", [(Tiny, "__init__"), (dict, "fromkeys"), (subprocess.Popen, "wait"), (print, "x")])
def test_getattr_is_called_for_nothing_else(tmp_path: Path, args: Any) -> None:
    import zipfile

    (tmp_path / "ckpt").mkdir()
    with zipfile.ZipFile(tmp_path / "ckpt" / "local_rank0.pt", "w") as z:
        z.writestr("archive/data.pkl", pickle.dumps({"w": Calls(*args)}, protocol=2))
        z.writestr("archive/version", "3\n")
    with pytest.raises(Unsafe, match="getattr"):
        opening.open(tmp_path / "ckpt")


@pytest.mark.parametrize("args", [(nn.Linear, "ProcessGroupState"), (nn.Module, "to"), (Tiny, "forward")])
def test_an_attribute_of_a_class_is_a_name(args: Any) -> None:
    """As a member of an enum is in some versions of Python; nobody looks it up."""
    data = pickle.dumps({"w": Calls(*args)}, protocol=2)
    found = pickles.load(data, sharded.make_stand_ins("x"))[0]["w"]
    assert found == pickles.Global(args[0].__module__, f"{args[0].__name__}.{args[1]}")


# --------------------------------------------------------------------------------------- sharded tensors, meshes


def meshed(folder: Path, shape: tuple[int, ...], placements: Any, tensors: Tensors, change: Any = None) -> Path:
    """DTensors of every rank of a mesh, as SHARDED_STATE_DICT leaves them, in verl's file names."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    folder.mkdir()
    world = 1
    for n in shape:
        world *= n
    names = ("a", "b")[: len(shape)]
    for r in range(world):
        with rank_of(r, world):
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
            tree = {n: distribute_tensor(t, mesh, placements, src_data_rank=None) for n, t in tensors.items()}
            tree["count"] = torch.tensor(5)
            torch.save(change(r, tree) if change else tree, folder / f"model_world_size_{world}_rank_{r}.pt")
    return folder


SOME = {"w": torch.arange(35.0).reshape(7, 5), "v": torch.arange(3.0)}


def whole(path: Path, **how: Any) -> Tensors:
    return {k.removeprefix("model."): t for k, t in read(path, **how).items()}


def test_dtensors_of_any_mesh_are_put_together(tmp_path: Path) -> None:
    from torch.distributed.tensor import Replicate, Shard

    wanted = {**SOME, "count": torch.tensor(5)}
    for i, (shape, placements) in enumerate(
        [((4,), [Shard(0)]), ((2, 2), [Replicate(), Shard(0)]), ((2, 2), [Shard(0), Replicate()]), ((8,), [Shard(0)])]
    ):
        assert not difference(whole(meshed(tmp_path / str(i), shape, placements, SOME)), wanted)


def test_tensor_parallelism_cuts_first(tmp_path: Path) -> None:
    """[_StridedShard(0), Shard(0)]: rank (i, j) of a 2 x 2 mesh has part i of part j, 13 + 12 of 25."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    full = torch.arange(100.0).reshape(50, 2)
    (tmp_path / "ckpt").mkdir()
    for r in range(4):
        with rank_of(r, 4):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            local = full.chunk(2)[r % 2].chunk(2)[r // 2].clone()
            t = DTensor.from_local(
                local,
                mesh,
                [_StridedShard(0, split_factor=2), Shard(0)],
                run_check=False,
                shape=full.shape,
                stride=(2, 1),
            )
            torch.save({"w": t}, tmp_path / "ckpt" / f"model_world_size_4_rank_{r}.pt")
    assert not difference(whole(tmp_path / "ckpt"), {"w": full})


def test_replicas_that_differ_are_refused_and_listed_where_that_is_allowed(tmp_path: Path) -> None:
    from torch.distributed.tensor import Replicate, Shard

    def change(rank: int, tree: Any) -> Any:
        if rank == 3:
            tree["w"].to_local().add_(1)
        return tree

    path = meshed(tmp_path / "ckpt", (2, 2), [Replicate(), Shard(0)], SOME, change)
    with opening.open(path) as opened:
        assert any('first "model.w"' in n for n in opened.checkpoint.notes)
    with pytest.raises(Corrupt, match=r'copies of 1 of \d tensors differ.*"model.w", of which rank 3 has other'):
        ckpttool.convert(path, tmp_path / "out.pt")
    done = ckpttool.convert(path, tmp_path / "out.pt", allow_mixed_steps=True)
    assert [name for name, *_ in done.dropped] == ["extra.per_rank.3.model.w"]
    assert torch.equal(torch.load(tmp_path / "out.pt")["model"]["w"], SOME["w"])


def test_a_buffer_beside_sharded_weights_may_be_each_rank_s_own(tmp_path: Path) -> None:
    from torch.distributed.tensor import Shard

    def change(rank: int, tree: Any) -> Any:
        return {**tree, "table": torch.arange(7.0) + rank}

    path = meshed(tmp_path / "ckpt", (3,), [Shard(0)], SOME, change)
    done = ckpttool.convert(path, tmp_path / "out.pt")
    assert [name for name, *_ in done.dropped] == [f"extra.per_rank.{r}.model.table" for r in (1, 2)]
    assert torch.equal(torch.load(tmp_path / "out.pt")["model"]["table"], torch.arange(7.0))


def test_meshes_of_exchanged_or_missing_ranks_are_found_out(tmp_path: Path) -> None:
    from torch.distributed.tensor import Shard

    path = meshed(tmp_path / "ckpt", (3,), [Shard(0)], SOME)
    one, two = (path / f"model_world_size_3_rank_{r}.pt" for r in (1, 2))
    two.rename(path.parent / "x")
    with pytest.raises(Corrupt, match="rank_2"):
        opening.open(path)
    one.rename(two)
    (path.parent / "x").rename(one)
    with pytest.raises(Corrupt, match=r"(written by|saved as the file of) rank 2"):
        opening.open(path)


def test_partial_sums_are_no_state_of_rest(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    (tmp_path / "ckpt").mkdir()
    for r in range(2):
        with rank_of(r, 2):
            t = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (2,)), [Partial()], run_check=False)
            torch.save({"w": t}, tmp_path / "ckpt" / f"model_rank{r}.pt")
    with pytest.raises(Unsupported, match="Partial"):
        opening.open(tmp_path / "ckpt")


@pytest.mark.parametrize("uop", [False, True])
def test_a_sharded_model_tells_what_lies_in_a_flat_optimizer(tmp_path: Path, uop: bool) -> None:
    """As verl saves: DTensors beside the raw optimizer.state_dict()."""
    from torch.distributed.tensor import Shard

    wanted = truth()
    state = {k.removeprefix("model."): t for k, t in wanted.items() if k.startswith("model.")}
    count = state.pop("count")
    path = meshed(tmp_path / "ckpt", (3,), [Shard(0)], state, lambda r, tree: {**tree, "count": count})
    local = job(tmp_path / "local", 3, uop)
    for r in range(3):
        shutil.copy(local / f"local_optim_rank{r}.pt", path / f"optim_world_size_3_rank_{r}.pt")
    assert not difference(read(path, wrap=["layers.*"]), wanted)
    assert not difference(read(path), wanted)  # the repeated blocks, which fit
    with pytest.raises(Unsupported, match="wrap="):
        opening.open(path, wrap=["layers.0"])
    assert read(path, wrap=["layers.0"], only=["model"])


# ------------------------------------------------------------------------------------------- other trees and files


def test_one_file_a_rank_with_everything_in_it(good: tuple[Path, str], tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    path.mkdir()
    for r in range(3):
        with rank_of(r, 3):
            tree = {
                "model": torch.load(good[0] / f"local_rank{r}.pt", weights_only=False),
                "optimizer": torch.load(good[0] / f"local_optim_rank{r}.pt", weights_only=False),
                "step": 3, "scheduler": {"last_epoch": 3}, "rng": {"cpu": torch.full((4,), r)}, "cursor": 10 + r,
            }  # fmt: skip
            torch.save(tree, path / f"step3-rank_{r}.pt")
    assert not difference(read(path, like=good[1]), truth())
    with opening.open(path, like=good[1]) as opened:
        values = {n: v.data for n, v in opened.checkpoint.values.items()}
        assert values["trainer.step"] == 3
        assert values["scheduler.last_epoch"] == 3
        assert [values[f"extra.cursor.{r}"] for r in range(3)] == [10, 11, 12]
        assert [f"rng.{r}.cpu" in opened.checkpoint.tensors for r in range(3)] == [True] * 3
    with rank_of(1, 3):
        tree = torch.load(path / "step3-rank_1.pt", weights_only=False)
        torch.save({**tree, "step": 4}, path / "step3-rank_1.pt")
    with pytest.raises(Corrupt, match=r'step3-rank_1\.pt.*"step" is 4'):
        opening.open(path, like=good[1])


def test_random_states_in_files_of_their_own_are_kept_by_rank(good: tuple[Path, str], tmp_path: Path) -> None:
    path, other = copied(good, tmp_path)
    for r in range(3):
        torch.save(torch.full((4,), r), path / f"rng_rank{r}.pt")
        torch.save({"position": r}, path / f"dataloader_rank{r}.pt")
        torch.save({"last_epoch": 3}, path / f"scheduler_rank{r}.pt")
    with opening.open(path, like=other) as opened:
        ckpt = opened.checkpoint
        assert [ckpt.values[f"dataloader.{r}.position"].data for r in range(3)] == [0, 1, 2]
        assert ckpt.values["scheduler.last_epoch"].data == 3
        assert all(f"rng.{r}" in ckpt.tensors for r in range(3))


def test_a_file_that_is_not_read_is_said(good: tuple[Path, str], tmp_path: Path) -> None:
    path, other = copied(good, tmp_path)
    (path / "scheduler.bin").write_bytes(b"x")
    with opening.open(path, like=other) as opened:
        assert any("not read" in n and "scheduler.bin" in n for n in opened.checkpoint.notes)


def test_two_models_in_one_folder_are_not_chosen_between(good: tuple[Path, str], tmp_path: Path) -> None:
    path, other = copied(good, tmp_path)
    for r in range(3):
        shutil.copy(path / f"local_rank{r}.pt", path / f"step9_rank{r}.pt")
    with pytest.raises(Unsupported, match="more than one model"):
        opening.open(path, like=other)


def test_files_that_belong_to_others_are_left_to_them(tmp_path: Path) -> None:
    for name in ("zero_pp_rank_0_mp_rank_00_optim_states.pt", "rng_rank0.pt", "scheduler.pt"):
        (tmp_path / name).write_bytes(b"")
    assert not fsdp1.detect(layouts.place(tmp_path))[0]
    (tmp_path / "local_rank0.pt").write_bytes(b"")
    assert fsdp1.detect(layouts.place(tmp_path)) == (True, "has local_rank*.pt of 1 ranks")
    (tmp_path / ".metadata").write_bytes(b"")
    assert not fsdp1.detect(layouts.place(tmp_path))[0]


def test_shards_of_fairscale_say_what_lies_in_them(tmp_path: Path) -> None:
    """Built by hand as FullyShardedDataParallel.local_metadata_dict describes it; FairScale itself is not run here."""
    (tmp_path / "ckpt").mkdir()
    embed, weight, bias = torch.randn(5, 3), torch.randn(4, 3), torch.randn(4)
    moment = {"embed": torch.randn(5, 3), "weight": torch.randn(4, 3), "bias": torch.randn(4)}

    def shards(flat: Tensor) -> list[tuple[Tensor, int]]:
        step = -(-flat.numel() // 2)
        parts = [flat[:step], flat[step:]]
        return [(torch.nn.functional.pad(p, (0, step - p.numel())), step - p.numel()) for p in parts]

    one, two = shards(embed.reshape(-1)), shards(torch.cat([weight.reshape(-1), bias]))
    slots = [shards(moment["embed"].reshape(-1)), shards(torch.cat([moment["weight"].reshape(-1), moment["bias"]]))]
    for r in range(2):
        meta = {
            "param_metadata": [
                {
                    "fsdp_path": "", "no_broadcast_optim_state": False,
                    "params": {"flat_param_0": {"names": ["embed.weight"], "shapes": [torch.Size([5, 3])], "numels": [15], "padding": one[r][1]}},
                    "shared_param_info": [("embed.weight", "out.weight")],
                },
                {
                    "fsdp_path": "layers.0", "no_broadcast_optim_state": False,
                    "params": {"flat_param_0": {"names": ["fc.weight", "fc.bias"], "shapes": [(4, 3), (4,)], "numels": [12, 4], "padding": two[r][1]}},
                    "shared_param_info": [],
                },
            ],
            "buffer_names": ["version"],
        }  # fmt: skip
        optimizer = {
            "state": {i: {"exp_avg": slots[i][r][0], "step": 7} for i in range(2)},
            "param_groups": [{"lr": 0.1, "params": [0, 1]}],
        }
        model = {"flat_param_0": one[r][0], "layers.0.flat_param_0": two[r][0], "version": torch.tensor([3.0])}
        tree = {"model": model, "shard_metadata": meta, "last_optimizer_state": optimizer, "cfg": {"lr": 0.1}}
        torch.save(tree, tmp_path / "ckpt" / f"checkpoint_last-shard{r}.pt")
    found = read(tmp_path / "ckpt")
    wanted = {
        "model.embed.weight": embed, "model.out.weight": embed, "model.layers.0.fc.weight": weight,
        "model.layers.0.fc.bias": bias, "model.version": torch.tensor([3.0]), "optim.embed.weight.exp_avg": moment["embed"],
        "optim.layers.0.fc.weight.exp_avg": moment["weight"], "optim.layers.0.fc.bias.exp_avg": moment["bias"],
    }  # fmt: skip
    assert found.pop("optim.embed.weight.step") == 7
    assert not difference({k: t for k, t in found.items() if isinstance(t, Tensor)}, wanted)


# --------------------------------------------------------------------------------------------------------- writing


def single(folder: Path, groups: bool = False, **more: Any) -> Path:
    """One file of a job of one process, with the optimizer by name."""
    state = truth(groups=groups)
    made = filled(Tiny())
    named = list(made.named_parameters())
    optimizer = torch.optim.AdamW(two_groups(named) if groups else [p for _, p in named], lr=1e-2)
    names = {id(p): n for n, p in named}
    param_groups = [
        {**{k: v for k, v in g.items() if k != "params"}, "params": [names[id(p)] for p in g["params"]]}
        for g in optimizer.param_groups
    ]
    slots: dict[str, dict[str, Tensor]] = {}
    for k, t in state.items():
        if k.startswith("optim."):
            fqn, _, slot = k.removeprefix("optim.").rpartition(".")
            slots.setdefault(fqn, {})[slot] = t
    tree = {
        "model": {k.removeprefix("model."): t for k, t in state.items() if k.startswith("model.")},
        "optim": {"state": slots, "param_groups": param_groups}, **more,
    }  # fmt: skip
    path = folder / "single.pt"
    torch.save(tree, path)
    return path


def loads(path: Path, world: int, uop: bool, groups: bool = False, **how: Any) -> None:
    """Real FSDP1 of every rank loads its files; its flat parameters and optimizer are those of the job that trained."""
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    for r in range(world):
        with rank_of(r, world), told_shards():
            trained, old = live_job(uop, groups=groups, **how)
            live, optimizer = live_job(uop, groups=groups, step=False, **how)
            with torch.no_grad():
                for p in live.parameters():
                    p.fill_(0.5)
            state = torch.load(path / f"local_rank{r}.pt", weights_only=False)
            with FullyShardedDataParallel.state_dict_type(live, StateDictType.LOCAL_STATE_DICT):
                live.load_state_dict(state, strict=not (uop and world > 1))
            optimizer.load_state_dict(torch.load(path / f"local_optim_rank{r}.pt", weights_only=True))
            found = {clean(n): p.detach() for n, p in live.named_parameters()}
            assert not difference(found, {clean(n): p.detach() for n, p in trained.named_parameters()})
            one, two = optimizer.state_dict(), old.state_dict()
            assert one["param_groups"] == two["param_groups"]
            assert one["state"].keys() == {k for k, v in two["state"].items() if v["exp_avg"].numel()}
            for number, slots in one["state"].items():
                assert not difference(slots, two["state"][number])


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("uop", [False, True])
def test_fsdp1_loads_what_is_written(tmp_path: Path, world: int, uop: bool) -> None:
    result = conversion.convert(
        single(tmp_path),
        tmp_path / "out",
        to="fsdp1",
        world_size=world,
        options=ckpttool.Fsdp1Options(use_orig_params=uop),
    )
    assert any("layers.*" in n for n in result.notes)
    loads(tmp_path / "out", world, uop)
    assert not difference(read(tmp_path / "out"), truth())
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(
        ["ckpttool.json", "flat_layout.json", *(f"local_{k}rank{r}.pt" for r in range(world) for k in ("", "optim_"))]
    )
    with rank_of(0, world):
        described = describe_fsdp1(*live_job(uop, step=False))
    assert json.loads((tmp_path / "out" / "flat_layout.json").read_text()) == described


@pytest.mark.slow
def test_the_work_grows_as_the_ranks_do(tmp_path: Path) -> None:
    """Each of W files lists the shards of W ranks: they are the same bytes, so that they are made and read once.
    Function calls are counted, which are the same on every machine."""

    def count(work: Callable[[], Any]) -> int:
        calls = 0

        def one_more(*_: object) -> None:
            nonlocal calls
            calls += 1

        sys.setprofile(one_more)
        try:
            work()
        finally:
            sys.setprofile(None)
        return calls

    source = single(tmp_path)
    written, read = {}, {}
    for world in (4, 32, 128):  # the first one imports
        out, how = tmp_path / str(world), {"to": "fsdp1", "world_size": world, "only": ["model"]}
        written[world] = count(lambda out=out, how=how: conversion.convert(source, out, verify=False, **how))
        read[world] = count(lambda out=out: opening.open(out).close())
    assert written[128] < 5 * written[32]
    assert read[128] < 5 * read[32]


@pytest.mark.slow
def test_a_list_of_shards_that_one_rank_has_otherwise_is_found_out(tmp_path: Path) -> None:
    """Not the rank's own shard, which its own file has to list, but that of another rank."""
    conversion.convert(
        single(tmp_path),
        tmp_path / "out",
        to="fsdp1",
        world_size=12,
        options=ckpttool.Fsdp1Options(use_orig_params=True),
    )
    assert not difference(read(tmp_path / "out"), truth())

    def shift(tree: Any) -> None:
        for t in tree.values():
            if isinstance(t, ShardedTensor) and len(t.metadata().shards_metadata) > 6:
                t.metadata().shards_metadata[5].shard_offsets[0] += 1

    with rank_of(3, 12):
        tree = torch.load(tmp_path / "out" / "local_rank3.pt", weights_only=False)
        shift(tree)
        torch.save(tree, tmp_path / "out" / "local_rank3.pt")
    with pytest.raises(Corrupt, match=r"local_rank3\.pt: the shards of .* are listed otherwise in local_rank0\.pt"):
        opening.open(tmp_path / "out")


@pytest.mark.slow
def test_a_round_trip_has_equal_digests(tmp_path: Path) -> None:
    source = single(tmp_path, scheduler={"last_epoch": 3}, step=3, rng={"cpu": torch.arange(9, dtype=torch.uint8)})
    for i, (world, uop) in enumerate([(3, False), (2, True), (4, False)]):
        conversion.convert(
            source, tmp_path / str(i), to="fsdp1", world_size=world, options=ckpttool.Fsdp1Options(use_orig_params=uop)
        )
        source = tmp_path / str(i)
    conversion.convert(source, tmp_path / "back.pt", to="full")
    a, b = (verification.digest(p).digest for p in (tmp_path / "single.pt", tmp_path / "back.pt"))
    assert a == b
    assert ckpttool.diff(tmp_path / "single.pt", tmp_path / "back.pt").equal


def test_several_groups_need_orig_params_and_that_is_said(tmp_path: Path) -> None:
    result = conversion.convert(single(tmp_path, groups=True), tmp_path / "out", to="fsdp1", world_size=3)
    said = next(n for n in result.notes if "FSDP1(use_orig_params=True)" in n)
    assert '"scale" is in param group 1, "emb.weight" in param group 0' in said
    loads(tmp_path / "out", 3, True, groups=True)


def test_groups_of_whole_modules_do_without(tmp_path: Path) -> None:
    path = single(tmp_path)
    tree = load_full(path)
    (group,) = tree["optim"]["param_groups"]
    inner = [n for n in group["params"] if n.startswith("layers.")]
    outer = [n for n in group["params"] if not n.startswith("layers.")]
    tree["optim"]["param_groups"] = [{**group, "params": outer}, {**group, "lr": 0.5, "params": inner}]
    torch.save(tree, path)
    result = conversion.convert(path, tmp_path / "out", to="fsdp1", world_size=2)
    assert not any("FSDP1(use_orig_params=True)" in n for n in result.notes)
    saved = torch.load(tmp_path / "out" / "local_optim_rank0.pt", weights_only=True)
    assert [g["params"] for g in saved["param_groups"]] == [[0], [1, 2]]
    assert [g["lr"] for g in saved["param_groups"]] == [group["lr"], 0.5]


@pytest.mark.parametrize("uop", [False, True])
def test_tensors_in_param_groups_come_back_as_such(tmp_path: Path, uop: bool) -> None:
    """A learning rate, Prodigy's `d_numerator`, and one in a list."""
    path = single(tmp_path)
    tree = load_full(path)
    (group,) = tree["optim"]["param_groups"]
    group |= {"lr": torch.tensor(0.5, dtype=torch.float64), "d_numerator": torch.tensor(0.25), "k": [torch.ones(1), 2]}
    torch.save(tree, path)
    done = conversion.convert(
        path, tmp_path / "out", to="fsdp1", world_size=3, options=ckpttool.Fsdp1Options(use_orig_params=uop)
    )
    assert done.verified and not done.dropped
    (saved,) = torch.load(tmp_path / "out" / "local_optim_rank2.pt", weights_only=False)["param_groups"]
    assert all(torch.equal(saved[k], group[k]) and saved[k].dtype == group[k].dtype for k in ("lr", "d_numerator"))
    conversion.convert(tmp_path / "out", tmp_path / "back.pt", to="full", like=path)
    (back,) = load_full(tmp_path / "back.pt")["optim"]["param_groups"]
    assert torch.equal(back["d_numerator"], group["d_numerator"]) and torch.equal(back["k"][0], group["k"][0])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tree: tree["optim"]["state"]["norm.bias"]["step"].add_(1), "at different steps"),
        (lambda tree: tree["optim"]["state"]["norm.bias"].update(extra=torch.ones(5)), "not the same optimizer state"),
        (lambda tree: tree["optim"]["state"].pop("norm.bias"), "not the same optimizer state"),
    ],
)
def test_a_flat_parameter_has_one_state_or_there_is_none(tmp_path: Path, change: Any, said: str) -> None:
    path = single(tmp_path)
    tree = load_full(path)
    change(tree)
    torch.save(tree, path)
    result = conversion.convert(path, tmp_path / "out", to="fsdp1", world_size=2)
    assert any(said in n and "FSDP1(use_orig_params=True)" in n for n in result.notes)
    wanted = {k: t for k, t in tensors_of(tree).items()}
    assert not difference(read(tmp_path / "out"), wanted)
    with rank_of(0, 2):
        (tmp_path / "flat.json").write_text(json.dumps(describe_fsdp1(live_job(False)[0])))
    with pytest.raises(Unsupported, match=said):
        conversion.convert(path, tmp_path / "no", to="fsdp1", world_size=2, flat_layout=tmp_path / "flat.json")


def test_the_layout_of_the_job_decides_alone(tmp_path: Path) -> None:
    with rank_of(0, 2):
        (tmp_path / "flat.json").write_text(json.dumps(describe_fsdp1(*live_job(True, step=False))))
    conversion.convert(single(tmp_path), tmp_path / "out", to="fsdp1", world_size=5, flat_layout=tmp_path / "flat.json")
    loads(tmp_path / "out", 5, True)


def test_mixed_precision_of_the_job_moves_parameters(tmp_path: Path) -> None:
    from torch.distributed.fsdp import MixedPrecision

    conversion.convert(
        single(tmp_path),
        tmp_path / "out",
        to="fsdp1",
        world_size=3,
        options=ckpttool.Fsdp1Options(use_orig_params=True, precision="bf16"),
    )
    loads(tmp_path / "out", 3, True, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))


def test_dtypes_that_fsdp1_does_not_flatten_together(tmp_path: Path) -> None:
    path = single(tmp_path)
    with pytest.raises(Unsupported, match="one dtype only"):
        conversion.convert(path, tmp_path / "no", to="fsdp1", world_size=2, cast={"model.norm.*": "bfloat16"})
    tree = load_full(path)
    for n in ("norm.weight", "norm.bias"):  # frozen ones can be left alone
        tree["model"][n] = tree["model"][n].bfloat16()
        del tree["optim"]["state"][n]
        tree["optim"]["param_groups"][0]["params"].remove(n)
    torch.save(tree, path)
    result = conversion.convert(path, tmp_path / "out", to="fsdp1", world_size=2)
    assert any("ignored_states" in n for n in result.notes)
    assert not difference(read(tmp_path / "out"), tensors_of(tree))
    with rank_of(1, 2):
        saved = torch.load(tmp_path / "out" / "local_rank1.pt", weights_only=False)
    assert torch.equal(saved["norm.weight"], tree["model"]["norm.weight"])


def test_a_pair_tied_over_two_wrapped_modules_becomes_two(tmp_path: Path) -> None:
    """FSDP1 flattens the embedding with its module and once more with the root, where the head still has it."""
    result = conversion.convert(single(tmp_path), tmp_path / "out", to="fsdp1", world_size=2, wrap=["emb", "layers.*"])
    assert any("two parameters" in n for n in result.notes)
    flats = {
        f["module"]: [p["name"] for p in f["params"]]
        for f in json.loads((tmp_path / "out" / "flat_layout.json").read_text())["flat_params"]
    }
    assert flats["emb"] == ["emb.weight"]
    assert flats[""] == ["scale", "norm.weight", "norm.bias", "head.weight"]
    assert not difference(read(tmp_path / "out"), truth())
    from torch.distributed.fsdp import FullyShardedDataParallel

    with rank_of(0, 2):
        model = Tiny()
        for parent, name in ((model, "emb"), (model.layers, "0"), (model.layers, "1")):
            inner = FullyShardedDataParallel(getattr(parent, name), device_id=torch.device("cpu"))
            setattr(parent, name, inner)
        live = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
        real = {f["module"]: [p["name"] for p in f["params"]] for f in describe_fsdp1(live)["flat_params"]}
    assert real == flats


def test_the_rest_is_kept_in_a_file_of_its_own(tmp_path: Path) -> None:
    path = single(
        tmp_path, step=3, scheduler={"last_epoch": 3}, rng=[{"cpu": torch.arange(5)}, {"cpu": torch.arange(4)}]
    )
    conversion.convert(path, tmp_path / "out", to="fsdp1", world_size=2)
    saved = torch.load(tmp_path / "out" / "extra_rank0.pt", weights_only=True)
    assert saved["trainer"]["step"] == 3
    assert torch.equal(saved["rng"][1]["cpu"], torch.arange(4))
    assert ckpttool.diff(path, tmp_path / "out").equal


def test_weights_alone_make_no_optimizer_files(tmp_path: Path) -> None:
    conversion.convert(single(tmp_path), tmp_path / "out", to="fsdp1", world_size=2, only=["model"])
    assert not list((tmp_path / "out").glob("*optim*"))
    wanted = {k: t for k, t in truth().items() if k.startswith("model.")}
    assert not difference(read(tmp_path / "out"), wanted)


def test_an_optimizer_before_its_first_step(tmp_path: Path) -> None:
    path = single(tmp_path)
    tree = load_full(path)
    tree["optim"]["state"] = {}
    torch.save(tree, path)
    conversion.convert(path, tmp_path / "out", to="fsdp1", world_size=2)
    assert torch.load(tmp_path / "out" / "local_optim_rank1.pt", weights_only=True)["state"] == {}
    assert not difference(read(tmp_path / "out"), tensors_of(tree))


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    path = single(tmp_path)
    with pytest.raises(UsageError, match="world_size is needed"):
        conversion.convert(path, tmp_path / "no", to="fsdp1")
    tree = load_full(path)
    tree["model"] = dict(sorted(tree["model"].items()))
    torch.save(tree, path)
    with pytest.raises(Unsupported, match="alphabet"):
        conversion.convert(path, tmp_path / "no", to="fsdp1", world_size=2)
    conversion.convert(path, tmp_path / "out", to="fsdp1", world_size=2, like=like(tmp_path, truth()))
    assert not difference(read(tmp_path / "out"), truth())


def bitsandbytes_state(folder: Path) -> Path:
    """A file with the state of an 8-bit optimizer of bitsandbytes: dicts of tensors, and a number."""
    weights = {"b.weight": torch.ones(6, 4), "a.weight": torch.ones(4)}
    state = {
        n: {
            "step": 3,
            "__bnb_optimizer_quant_state__": {
                "state1": torch.ones(w.shape, dtype=torch.uint8),
                "absmax1": torch.ones(1),
            },
        }
        for n, w in weights.items()
    }
    groups = [{"lr": 0.1, "params": list(weights)}]
    torch.save({"model": weights, "optim": {"state": state, "param_groups": groups}}, folder / "in.pt")
    return folder / "in.pt"


def test_steps_without_a_slot_are_read_with_the_layout_of_the_flat_parameters(tmp_path: Path) -> None:
    done = ckpttool.convert(bitsandbytes_state(tmp_path), tmp_path / "out", to="fsdp1", world_size=2, drop=True)
    assert done.verified and len(done.dropped) == 4
    with ckpttool.open(tmp_path / "out") as opened:
        assert [opened.checkpoint.value(f"optim.state.{n}.step") for n in ("a.weight", "b.weight")] == [3, 3]


def test_slots_that_are_dicts_of_tensors_are_those_of_all_ranks_or_refused(tmp_path: Path) -> None:
    source = bitsandbytes_state(tmp_path)
    done = ckpttool.convert(source, tmp_path / "verl", to="verl", world_size=2)
    assert done.verified and not done.dropped
    assert not (found := ckpttool.diff(source, tmp_path / "verl")).data and not found.only_in_a
    (file,) = (tmp_path / "verl").rglob("optim_world_size_2_rank_1.pt")
    held = torch.load(file, weights_only=False)
    held["state"][0]["__bnb_optimizer_quant_state__"]["absmax1"] *= 2
    torch.save(held, file)
    with pytest.raises(Unsupported, match=r"8-bit optimizer .* differs from that of rank 0"):
        ckpttool.open(tmp_path / "verl")
