"""ckpttool's reader fills memory of a GPU: whole tensors, strided parts, other dtypes, many at once, DTensors."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import ckpttool
from ckpttool.live.reader import ReadRequest
from ckpttool.live.scatter import Tuning

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)"),
]

SHAPES: dict[str, tuple[int, ...]] = {
    "large": (5000, 4096), "odd": (131, 36), "vector": (7,), "number": (), "conv": (7, 22, 3),
    **{f"small.{i}": (64, 8 + i % 3) for i in range(300)},
}  # fmt: skip


def tensors() -> dict[str, Tensor]:
    """What is saved: several dtypes, on the CPU."""
    torch.manual_seed(0)
    out = {n: torch.randn(s) for n, s in SHAPES.items()}
    out |= {f"half.{n}": out[n].bfloat16() for n in ("large", "odd", "conv")}
    out |= {
        "mask": torch.rand(33, 5) > 0.5,
        "count": torch.tensor(5),
        "f8": torch.randn(33, 16).to(torch.float8_e4m3fn),
    }
    out["turned"] = torch.randn(40, 60).t()
    return out


@pytest.fixture(scope="module", params=["dcp", "full", "zstd"])
def saved(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Tensor], Path]:
    """The same tensors in three layouts."""
    folder = tmp_path_factory.mktemp(request.param)
    known = tensors()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if request.param == "full":
            torch.save({"model": known}, folder / "a.pt")
            return known, folder / "a.pt"
        if request.param == "zstd":
            from torch.distributed.checkpoint._extension import ZStandard

            writer = dcp.FileSystemWriter(folder / "a", _extensions=[ZStandard()])
            known = {n: t for n, t in known.items() if t.is_contiguous()}
            dcp.save({"model": known}, storage_writer=writer, no_dist=True)
        else:
            dcp.save({"model": known}, checkpoint_id=folder / "a", no_dist=True)
    return known, folder / "a"


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A process group of one rank, and its mesh."""
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29507", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda:0"))
    yield init_device_mesh("cuda", (1,))
    dist.destroy_process_group()


def same(a: Tensor, b: Tensor) -> bool:
    a, b = (torch.empty(t.shape, dtype=t.dtype).copy_(t).reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(a, b)


def test_tensors_on_a_gpu_get_the_bytes_of_the_file(saved: Any) -> None:
    known, path = saved
    tree = {"model": {n: torch.empty(t.shape, dtype=t.dtype, device="cuda") for n, t in known.items()}}
    for _ in range(3):  # pinned buffers are used again
        for t in tree["model"].values():
            t.view(torch.uint8).fill_(1) if t.ndim else t.fill_(1)
        dcp.load(tree, storage_reader=ckpttool.storage_reader(path))
        assert [n for n, t in known.items() if not same(tree["model"][n], t)] == []


def test_places_with_gaps_and_of_other_dtypes(saved: Any) -> None:
    known, path = saved
    tree: dict[str, Any] = {"model": {}}
    for n in ("large", "odd", "conv", "half.large", "half.conv"):
        t = known[n]
        wide = torch.float64 if n == "odd" else torch.float32
        tree["model"][n] = torch.zeros([2 * k for k in t.shape], dtype=wide, device="cuda")[
            tuple(slice(1, None, 2) for _ in t.shape)
        ]
    dcp.load(tree, storage_reader=ckpttool.storage_reader(path))
    for n, t in tree["model"].items():
        assert same(t, known[n].to(t.dtype)), n
    narrow = {"model": {"large": torch.zeros(5000, 4096, dtype=torch.bfloat16, device="cuda")}}
    with pytest.warns(UserWarning, match="rounded"):
        dcp.load(narrow, storage_reader=ckpttool.storage_reader(path))
    assert same(narrow["model"]["large"], known["large"].bfloat16())


@pytest.mark.parametrize("stage", [1 << 12, 1 << 16, 8 << 20])
@pytest.mark.parametrize("threads", [1, 4])
def test_boxes_with_small_buffers_and_many_threads(stage: int, threads: int, saved: Any) -> None:
    known, path = saved
    ours = ckpttool.storage_reader(path).opened
    ours.tuning = Tuning(stage_bytes=stage, threads=threads)
    wanted, expected = [], []
    for n, t in known.items():
        if t.ndim and "large" not in n:
            start = tuple(k // 3 for k in t.shape)
            size = tuple(k - a - (k > 5) for k, a in zip(t.shape, start, strict=True))
            expected.append(t[tuple(slice(a, a + k) for a, k in zip(start, size, strict=True))])
            target = torch.empty(size, dtype=t.dtype, device="cuda")
            wanted.append(ReadRequest(f"model.{n}", start, size, target))
    ours.fill(wanted)
    assert [w.name for w, t in zip(wanted, expected, strict=True) if not same(w.target, t)] == []


def test_copies_come_after_what_the_job_has_queued_on_its_own_stream(saved: Any) -> None:
    known, path = saved
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        target = torch.zeros(5000, 4096, device="cuda")
        for _ in range(200):
            target.add_(1.0)  # still running when the copies are queued
        dcp.load({"model": {"large": target}}, storage_reader=ckpttool.storage_reader(path))
        assert same(target, known["large"])


def test_dtensors_and_torchs_own_reader_agree(saved: Any, world: Any) -> None:
    known, path = saved
    trees = []
    for ours in (True, False) if (path / ".metadata").exists() else (True, True):
        tree: dict[str, Any] = {"model": {}}
        for n, t in known.items():
            empty = torch.zeros(t.shape, dtype=t.dtype, device="cuda") if "f8" not in n else torch.empty_like(t).cuda()
            tree["model"][n] = distribute_tensor(empty, world, [Shard(0)]) if t.ndim and "f8" not in n else empty
        dcp.load(tree, storage_reader=ckpttool.storage_reader(path) if ours else dcp.FileSystemReader(path))
        trees.append({n: t.to_local() if isinstance(t, DTensor) else t for n, t in tree["model"].items()})
    assert [n for n, t in known.items() if not same(trees[0][n], t) or not same(trees[1][n], t)] == []


def test_load_fills_a_sharded_job_on_a_gpu_and_keeps_its_fused_optimizer(tmp_path: Path, world: Any) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(36, 50), nn.Linear(50, 7)).cuda()
        for layer in model:
            fully_shard(layer, mesh=world)
        fully_shard(model, mesh=world)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)

    model, optimizer = make()
    for _ in range(2):
        model(torch.ones(4, 36, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": state, "step": 2}, checkpoint_id=tmp_path / "a")
    other, theirs = make()
    done = ckpttool.load(other, theirs, tmp_path / "a")
    assert done.step == 2 and theirs.param_groups[0]["fused"] is True
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert same(p.to_local(), q.to_local())
        a, b = optimizer.state[p], theirs.state[q]
        assert all(same(a[k].to_local(), b[k].to_local()) for k in ("exp_avg", "exp_avg_sq"))
        assert a["step"].item() == b["step"].item() == 2 and a["step"].device == b["step"].device
