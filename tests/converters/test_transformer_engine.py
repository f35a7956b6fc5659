"""What TransformerEngine's FusedAdam leaves in a checkpoint, and its quantised tensors.

TransformerEngine cannot be installed without CUDA, so its rules are written here once more from its source, 2.20 (common/multi_tensor/adam.cu,
pytorch/optimizers/fused_adam.py, pytorch/tensor): `split` is what its kernel stores of an fp32 master, `join` how it gets the master back.
"""

from __future__ import annotations

import enum
import io
import math
import pickle
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from ckpttool.converters.megatron.buckets import Bucket, LocalBoxes
from ckpttool.converters.megatron.buckets import _fit_segments_to_model as fit_whole_model
from safetensors.torch import load_file
from torch import Tensor

import ckpttool
from ckpttool.engine.transform.remainders import join_masters
from ckpttool.errors import CkpttoolError, Corrupt, Unsupported
from ckpttool.index.checkpoint import Chunks, TensorEntry

SHAPES = {
    "embed.weight": (131, 9),
    "layers.0.up.weight": (7, 9),
    "layers.0.norm.weight": (9,),
    "scale": (),
    "empty": (0, 4),
}


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """(bf16 weight, int16 remainder), number by number as the kernel does it in registers of 16 bits."""
    bits = master.contiguous().view(torch.int32).to(torch.int64)
    low = ((bits & 0xFFFF) ^ 0x8000) - 0x8000
    high = (((bits >> 16) & 0xFFFF) + (low < 0)) & 0xFFFF
    signed = ((high ^ 0x8000) - 0x8000).to(torch.int16)
    return signed.view(torch.bfloat16), low.to(torch.int16)


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 master, as the kernel puts it together before it updates it."""
    high = weight.contiguous().view(torch.int16).to(torch.int64)
    high = torch.where(remainder < 0, high - 1, high) & 0xFFFF
    return ((high << 16) | (remainder.to(torch.int64) & 0xFFFF)).to(torch.int32).view(torch.float32)


def masters() -> dict[str, Tensor]:
    """fp32 masters of odd shapes, among them numbers halfway between two bf16, infinities, NaN and zeros."""
    torch.manual_seed(0)
    out = {n: torch.randn(shape) for n, shape in SHAPES.items()}
    odd = [1 + 2.0**-8, -(1 + 2.0**-8), 1 + 3 * 2.0**-8, 3.4e38, -0.0, 2.0**-140, torch.inf, torch.nan]
    out["layers.0.norm.weight"][: len(odd)] = torch.tensor(odd)
    return out


def state(**how: Any) -> dict[str, Any]:
    """The state of a job with FusedAdam(master_weights=True, store_param_remainders=True), by names."""
    halves = {n: split(m) for n, m in masters().items()}
    slots = {
        n: {"exp_avg": torch.randn(SHAPES[n]), "exp_avg_sq": torch.rand(SHAPES[n]), "master_param": low}
        for n, (_, low) in halves.items()
    }
    group = {"lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "step": 3}
    return {
        "model": {n: weight for n, (weight, _) in halves.items()},
        "optim": {"state": slots, "param_groups": [{**group, "params": list(SHAPES)}]},
        **how,
    }


def same(a: Tensor, b: Tensor) -> bool:
    flat = (x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b))
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*flat)


# ------------------------------------------------------------------------------------------------------ store_param_remainders


def test_every_weight_and_the_edges_of_remainders_are_joined_as_the_kernel_does_it() -> None:
    weight = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for low in (0, 1, 0x7FFF, -0x8000, -0x7FFF, -1, 0x1234, -0x1234):
        remainder = torch.full_like(weight, low, dtype=torch.int16)
        found = join_masters(weight.view(torch.int16).numpy(), remainder.numpy())
        assert same(torch.from_numpy(found), join(weight, remainder))
    bits = torch.arange(-(1 << 31), 1 << 31, 4093).to(torch.int32)
    edges = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int64) << 16
    bits = torch.cat([bits, *[(edges + k).to(torch.int32) for k in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]])
    halves = [x.view(torch.int16).numpy() for x in split(bits.view(torch.float32))]
    assert np.array_equal(join_masters(*halves).view("i4"), bits.numpy())


@pytest.fixture(params=["full", "dcp"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "full":
        torch.save(state(), tmp_path / "a.pt")
        return tmp_path / "a.pt"
    dcp.save(state(), checkpoint_id=tmp_path / "a", no_dist=True)
    return tmp_path / "a"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("to", ["full", "dcp"])
def test_remainders_stay_as_they_are_and_that_is_said(saved: Path, to: str, tmp_path: Path) -> None:
    done = ckpttool.convert(saved, tmp_path / "out", to=to, world_size=3 if to == "dcp" else None)
    assert any("5 fp32 masters" in n and "stay as they are stored" in n for n in done.notes)
    with ckpttool.open(tmp_path / "out") as opened:
        for n, master in masters().items():
            weight, low = (opened[f"{k}"].torch() for k in (f"model.{n}", f"optim.state.{n}.master_param"))
            assert low.dtype == torch.int16 and same(join(weight, low), master)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("to", ["full", "dcp"])
def test_dequantize_joins_them_exactly(saved: Path, to: str, tmp_path: Path) -> None:
    done = ckpttool.convert(
        saved,
        tmp_path / "out",
        to=to,
        world_size=3 if to == "dcp" else None,
        dequantize=["*.master_param"],
        dtype="fp16",
    )
    assert any("5 fp32 masters" in n and "joined from bf16 weights and int16 remainders" in n for n in done.notes)
    with ckpttool.open(tmp_path / "out") as opened:
        for n, master in masters().items():
            assert same(opened[f"optim.state.{n}.master_param"].torch(), master), n
            assert opened[f"model.{n}"].dtype == "float16"
            assert opened[f"optim.state.{n}.exp_avg"].dtype == "float32"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("to", ["zero1", "zero2", "zero3", "universal", "fsdp1"])
def test_engines_whose_weights_are_masters_get_the_joined_ones(saved: Path, to: str, tmp_path: Path) -> None:
    how = {"universal": {}, "fsdp1": {"world_size": 3, "wrap": ["*"]}}.get(to, {"world_size": 3})
    ckpttool.convert(saved, tmp_path / "out", to=to, drop=True, **how)
    with ckpttool.open(tmp_path / "out") as opened:
        for n, master in masters().items():
            assert same(opened[f"model.{n}"].torch(), master), n
        assert not any("master" in n for n in opened)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_cast_of_the_weights_would_lose_them_and_is_refused(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r'"model.embed.weight" in float32: its fp32 master is stored as the int16'):
        ckpttool.convert(saved, tmp_path / "out.pt", to="full", dtype="fp32")
    ckpttool.convert(saved, tmp_path / "out.pt", to="full", dtype="fp32", only=["model"])
    ckpttool.convert(saved, tmp_path / "keep.pt", to="full", dtype="bf16")


def test_masters_in_fp32_are_the_weights_of_engines_and_the_copies_of_megatron(tmp_path: Path) -> None:
    """FusedAdam(master_weights=True); and its remainders, for Megatron-Core, which loads fp32 alone."""
    tree = state()
    torch.save(tree, tmp_path / "halves.pt")
    for n, slots in tree["optim"]["state"].items():
        slots["master_param"] = masters()[n]
    torch.save(tree, tmp_path / "wide.pt")
    ckpttool.convert(tmp_path / "wide.pt", tmp_path / "zero", to="zero3", world_size=3, drop=True)
    with ckpttool.open(tmp_path / "zero") as opened:
        assert all(same(opened[f"model.{n}"].torch(), master) for n, master in masters().items())
    for source in ("wide", "halves"):
        ckpttool.convert(tmp_path / f"{source}.pt", tmp_path / source, to="megatron", world_size=3)
        with ckpttool.open(tmp_path / source) as opened:
            assert all(same(opened[f"extra.master.{n}"].torch(), master) for n, master in masters().items())
            assert not any("master_param" in n for n in opened)
    tree["optim"]["state"]["embed.weight"]["master_param"] += 1  # of another step
    torch.save(tree, tmp_path / "odd.pt")
    with pytest.raises(Unsupported, match="1 of 4 fp32 masters do not round to the weights"):
        ckpttool.convert(tmp_path / "odd.pt", tmp_path / "no", to="zero3", world_size=3, drop=True)


def bucket(name: str, sizes: list[int]) -> Bucket:
    """A bucket of remainders: parameters of these sizes, each at a multiple of 64, with the gaps between them."""
    chunks, at = Chunks(1), 0
    for n in sizes:
        for k in (n, -n % 64):
            if k:
                chunks.add((at,), (k,), 0, 0, 2 * k)
            at += k
    return Bucket(f"{name}.gbuf_idx_0.dtype_x.bucket_idx_0", name, {"param": TensorEntry("int16", (at,), (), chunks)})


def test_buckets_of_remainders_are_named_only_where_all_of_the_model_fits_in_one_way() -> None:
    def weight(name: str, *parts: tuple[int, ...]) -> TensorEntry:
        chunks, rows = Chunks(len(parts[0])), 0
        for shape in parts:
            chunks.add((rows, *(0 for _ in shape[1:])), shape, 0, 0, 0)
            rows += shape[0]
        return TensorEntry("bfloat16", (rows, *parts[0][1:]), ("model", name), chunks)

    model = {t.path[1]: t for t in (weight("a", (70, 2), (70, 2)), weight("norm", (9,)), weight("b", (5, 3), (5, 3)))}
    groups = [bucket(f"group_{k}", [15, 9, 140]) for k in range(2)]
    fit_whole_model(groups, model)
    for rank, b in enumerate(groups):
        assert [(s.first, s.last, s.chosen.weight) for s in b.segments if s.chosen] == [
            (0, 15, "b"), (64, 73, "norm"), (128, 268, "a"),
        ]  # fmt: skip
        assert b.segments[0].chosen == LocalBoxes("b", (((5 * rank, 0), (5, 3)),))
    stages = [bucket("group_0", [9, 280]), bucket("group_1", [30])]
    fit_whole_model(stages, model)
    assert [s.chosen.weight for b in stages for s in b.segments if s.chosen] == ["norm", "a", "b"]
    for sizes in ([15, 9, 139], [9, 15, 140], [15, 9], [15, 9, 140, 9]):
        with pytest.raises(Unsupported, match="the order of the model fits nowhere"):
            fit_whole_model([bucket(f"group_{k}", sizes) for k in range(2)], model)
    with pytest.raises(Unsupported, match="fits nowhere"):
        fit_whole_model([bucket("group_0", [8])], {"experts.w": weight("experts.w", (2, 4))})


def test_states_by_number_as_fused_adam_saves_them(tmp_path: Path) -> None:
    """`FusedAdam.state_dict()` numbers the parameters, and gives moments of any dtype in float32, without their scales."""
    tree = state()
    optim = tree.pop("optim")
    group = {**optim["param_groups"][0], "params": list(range(len(SHAPES)))}
    torch.save(
        {**tree, "optimizer": {"state": dict(enumerate(optim["state"].values())), "param_groups": [group]}},
        tmp_path / "a.pt",
    )
    ckpttool.convert(tmp_path / "a.pt", tmp_path / "out", to="dcp", world_size=3, dequantize=["*master*"])
    with ckpttool.open(tmp_path / "out") as opened:
        for n, master in masters().items():
            assert same(opened[f"optim.state.{n}.master_param"].torch(), master)
            assert same(opened[f"optim.state.{n}.exp_avg"].torch(), optim["state"][n]["exp_avg"])


def test_an_int16_tensor_that_fits_no_weight_is_no_remainder(tmp_path: Path) -> None:
    tree = state()
    tree["model"]["embed.weight"] = tree["model"]["embed.weight"].float()
    torch.save(tree, tmp_path / "a.pt")
    done = ckpttool.convert(tmp_path / "a.pt", tmp_path / "b.pt")
    assert any("4 fp32 masters" in n for n in done.notes)


# ------------------------------------------------------------------------------------------------------------ quantised tensors

PACKAGE = "transformer_engine.pytorch"
FUNCTIONS = {
    "Float8Tensor": ("float8_tensor", "_make_float8_tensor_in_reduce_ex"),
    "MXFP8Tensor": ("mxfp8_tensor", "_make_mxfp8_tensor_in_reduce_ex"),
    "Float8BlockwiseQTensor": ("float8_blockwise_tensor", "_make_float8_blockwise_tensor_in_reduce_ex"),
    "NVFP4Tensor": ("nvfp4_tensor", "_make_nvfp4_tensor_in_reduce_ex"),
}


class Pickled:
    """A stand-in for a tensor of TransformerEngine: it is pickled as a call of its function, and equal to one of equal arguments."""

    def __init__(self, kind: str, *args: Any) -> None:
        self.kind, self.args = kind, args

    def __reduce_ex__(self, protocol: Any) -> Any:
        module, function = FUNCTIONS[self.kind]
        return getattr(sys.modules[f"{PACKAGE}.tensor.{module}"], function), self.args

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Pickled)
        pairs = zip(self.args, other.args, strict=True)
        return self.kind == other.kind and all(
            same(a, b) if isinstance(a, Tensor) else (type(a), a) == (type(b), b) for a, b in pairs
        )

    __hash__ = None  # type: ignore[assignment]


class DType(enum.IntEnum):
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


class Quantizer:
    """A stand-in for what TransformerEngine quantises with, which is pickled along."""

    def __init__(self, dtype: DType) -> None:
        self.dtype, self.rowwise_usage = dtype, True

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]


@pytest.fixture
def _engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of TransformerEngine's names, with functions that make stand-ins."""
    for name in (PACKAGE.partition(".")[0], PACKAGE, f"{PACKAGE}.tensor", f"{PACKAGE}.constants"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for kind, (module, function) in FUNCTIONS.items():
        name = f"{PACKAGE}.tensor.{module}"
        made = ModuleType(name)

        def make(*args: Any, kind: str = kind) -> Pickled:
            return Pickled(kind, *args)

        make.__module__, make.__name__, make.__qualname__ = name, function, function
        setattr(made, function, make)
        monkeypatch.setitem(sys.modules, name, made)
    for cls, module in ((DType, f"{PACKAGE}.constants"), (Quantizer, f"{PACKAGE}.tensor.mxfp8_tensor")):
        monkeypatch.setattr(cls, "__module__", module)
        setattr(sys.modules[module], cls.__name__, cls)


def padded(rows: int, columns: int, tall: int, wide: int) -> tuple[int, int]:
    return -(-rows // tall) * tall, -(-columns // wide) * wide


def quantised(kind: str, shape: tuple[int, ...], seed: int = 0) -> tuple[Pickled, Tensor]:
    """A tensor of a class, of random codes and scales with everything that pads them, and its numbers in float32."""
    torch.manual_seed(seed)
    rows, columns, size = math.prod(shape[:-1]), shape[-1], torch.Size(shape)
    codes = torch.randint(0, 256, shape, dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0  # no NaN
    numbers = codes.view(torch.float8_e4m3fn).float().reshape(rows, columns)
    if kind == "Float8Tensor":
        scale = torch.rand(1) + 0.01
        return Pickled(kind, codes, DType.kFloat8E4M3, scale, torch.bfloat16, size, None), (numbers * scale).reshape(
            shape
        )
    if kind == "MXFP8Tensor":
        scale = torch.randint(96, 140, padded(rows, -(-columns // 32), 128, 4), dtype=torch.uint8)
        scale[:1, 0] = 0
        wide = torch.exp2(scale.double() - 127).float().repeat_interleave(32, 1)[:rows, :columns]
        args = (codes, scale, None, None, DType.kFloat8E4M3, torch.bfloat16, size, Quantizer(DType.kFloat8E4M3), False)
        return Pickled(kind, *args), (numbers * wide).reshape(shape)
    if kind.startswith("Float8Blockwise"):
        flat = kind.endswith("1D")
        tall = rows if flat else -(-rows // 128)
        scale = torch.rand(padded(tall, -(-columns // 128), 4 if flat else 1, 1 if flat else 4)) + 0.01
        wide = scale.repeat_interleave(128, 1)[:, :columns]
        wide = (wide if flat else wide.repeat_interleave(128, 0))[:rows]
        stored = scale.T.contiguous() if flat else scale
        args = (size, codes, stored, None, None, DType.kFloat8E4M3, torch.bfloat16, None, not flat, None)
        return Pickled("Float8BlockwiseQTensor", *args), (numbers * wide).reshape(shape)
    row_scaled, most = kind.endswith("rows"), 256 if kind.endswith("256") else 448
    pairs = torch.randint(0, 256, (*shape[:-1], columns // 2), dtype=torch.uint8)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    both = torch.stack([pairs & 15, pairs >> 4], -1).reshape(rows, columns)
    scale = (torch.rand(padded(rows, columns // 16, 128, 4)) + 0.1).to(torch.float8_e4m3fn)
    amax = torch.rand(rows if row_scaled else 1) * 9
    factor = torch.tensor(1.0) / torch.tensor(6.0 * most)
    wide = (scale[:rows].float() * amax.reshape(-1, 1) * factor).repeat_interleave(16, 1)[:, :columns]
    args = (
        size,
        pairs,
        scale.view(torch.uint8),
        None,
        None,
        amax,
        None,
        DType.kFloat4E2M1,
        torch.bfloat16,
        None,
        False,
        row_scaled,
        False,
        most,
    )
    return Pickled("NVFP4Tensor", *args), (table[both.long()] * wide).reshape(shape)


KINDS = ["Float8Tensor", "MXFP8Tensor", "Float8Blockwise2D", "Float8Blockwise1D", "NVFP4", "NVFP4 rows", "NVFP4 256"]


def load(path: Path) -> Any:
    return torch.load(path, weights_only=False)


@pytest.mark.usefixtures("_engine")
@pytest.mark.parametrize("kind", KINDS)
def test_a_quantised_tensor_is_the_same_call_again_and_has_the_numbers_of_dequantize(kind: str, tmp_path: Path) -> None:
    shapes = {"w": (131, 160), "three": (3, 50, 64), "one": (1, 32), "tall": (300, 32), "none": (0, 64)}
    both = {n: quantised(kind, shape, i) for i, (n, shape) in enumerate(shapes.items())}
    torch.save({"model": {n: q for n, (q, _) in both.items()}}, tmp_path / "a.pt")
    ckpttool.convert(tmp_path / "a.pt", tmp_path / "b.pt")
    ckpttool.convert(tmp_path / "a.pt", tmp_path / "dcp", to="dcp", world_size=1)
    ckpttool.convert(tmp_path / "dcp", tmp_path / "a.tar.zst", to="audit")
    ckpttool.convert(tmp_path / "a.tar.zst", tmp_path / "c.pt", to="full")
    for path in ("b.pt", "c.pt"):
        assert load(tmp_path / path)["model"] == {n: q for n, (q, _) in both.items()}
    for source in ("a.pt", "dcp", "a.tar.zst"):
        for dtype in (None, "fp32"):
            to = tmp_path / f"{source}-{dtype}.safetensors"
            ckpttool.convert(tmp_path / source, to, to="hf", dequantize=["*"], dtype=dtype)
            found = load_file(to)
            assert all(same(found[n], t if dtype else t.bfloat16()) for n, (_, t) in both.items())


def write_dcp(folder: Path, parts: dict[str, list[Pickled]], shapes: dict[str, tuple[int, ...]]) -> None:
    """A dcp folder, with the metadata of torch, of items that hold one part for each rank; .metadata lists the dense tensor."""
    folder.mkdir()
    listed: dict[str, Any] = {}
    stored: dict[Any, Any] = {}
    files: dict[int, bytes] = {}
    for key, some in parts.items():
        properties = dcp.metadata.TensorProperties(dtype=torch.bfloat16)
        rows, chunks = 0, []
        for rank, part in enumerate(some):
            size = next(a for a in part.args if isinstance(a, torch.Size))
            offsets = torch.Size((rows, *(0 for _ in size[1:])))
            chunks.append(dcp.metadata.ChunkStorageMetadata(offsets, size))
            buffer = io.BytesIO()
            torch.save(part, buffer)
            at = len(files.get(rank, b""))
            files[rank] = files.get(rank, b"") + buffer.getvalue()
            place = dcp.filesystem._StorageInfo(f"__{rank}_0.distcp", at, len(buffer.getvalue()))
            stored[dcp.metadata.MetadataIndex(key, offsets, rank)] = place
            rows += size[0]
        listed[key] = dcp.metadata.TensorStorageMetadata(properties, torch.Size(shapes[key]), chunks)
    for rank, raw in files.items():
        (folder / f"__{rank}_0.distcp").write_bytes(raw)
    planner = {key: tuple(key.split(".", 1)) for key in parts}
    (folder / ".metadata").write_bytes(pickle.dumps(dcp.metadata.Metadata(listed, planner, stored)))


@pytest.mark.usefixtures("_engine")
@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_ranks_in_dcp(kind: str, tmp_path: Path) -> None:
    """Three ranks, whose scales are padded each for itself."""
    parts = [quantised(kind, (43, 64), i) for i in range(3)]
    if kind == "Float8Tensor":  # the ranks of FSDP2 share a scale
        parts = [
            (Pickled(p.kind, *p.args[:2], parts[0][0].args[2], *p.args[3:]), t / p.args[2] * parts[0][0].args[2])
            for p, t in parts
        ]
    whole = (
        torch.cat([p.args[0].view(torch.float8_e4m3fn).float() * p.args[2] for p, _ in parts])
        if kind == "Float8Tensor"
        else torch.cat([t for _, t in parts])
    )
    write_dcp(tmp_path / "in", {"model.w": [p for p, _ in parts]}, {"model.w": (129, 64)})
    ckpttool.convert(tmp_path / "in", tmp_path / "same", to="dcp", world_size=3)
    for rank, (part, _) in enumerate(parts):
        (item,) = (tmp_path / "same").glob(f"__{rank}_*.distcp")
        assert load(item) == part
    ckpttool.convert(tmp_path / "in", tmp_path / "plain", to="dcp", world_size=2, dequantize=["model.*"])
    with ckpttool.open(tmp_path / "plain") as found:
        assert same(found["model.w"].torch(), whole.bfloat16())
    if kind == "Float8Tensor":
        ckpttool.convert(tmp_path / "in", tmp_path / "one.pt", to="full")
        args = load(tmp_path / "one.pt")["model"]["w"].args
        assert same(args[0], torch.cat([p.args[0] for p, _ in parts])) and args[4] == torch.Size((129, 64))
        return
    with pytest.raises(Unsupported, match=r"2 ranks cannot divide: its scales are padded for parts of 43, 43, 43 rows"):
        ckpttool.convert(tmp_path / "in", tmp_path / "no", to="dcp", world_size=2)
    with pytest.raises(Unsupported, match="whose scales are padded for the parts of ranks"):
        ckpttool.convert(tmp_path / "in", tmp_path / "no.pt", to="full")
    ckpttool.convert(tmp_path / "in", tmp_path / "in.tar.zst", to="audit")
    ckpttool.convert(tmp_path / "in.tar.zst", tmp_path / "again", to="dcp", world_size=3)
    (item,) = (tmp_path / "again").glob("__2_*.distcp")
    assert load(item) == parts[2][0]


@pytest.mark.usefixtures("_engine")
def test_moments_in_fp8_are_objects_with_their_scale(tmp_path: Path) -> None:
    """FusedAdam(exp_avg_dtype=torch.uint8), whose `optimizer.state` was saved as it is."""
    moments = {n: quantised("Float8Tensor", (8, 16), k) for k, n in enumerate(("exp_avg", "exp_avg_sq"))}
    for q, _ in moments.values():
        q.args = (*q.args[:3], torch.float32, *q.args[4:])
    second, numbers = moments["exp_avg_sq"]  # which are squares
    second.args = (second.args[0] & 0x7F, *second.args[1:])
    moments["exp_avg_sq"] = second, numbers.abs()
    slots = {n: q for n, (q, _) in moments.items()}
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "step": 3, "params": ["w"]}
    torch.save(
        {"model": {"w": torch.randn(8, 16)}, "optim": {"state": {"w": slots}, "param_groups": [group]}},
        tmp_path / "a.pt",
    )
    with pytest.raises(
        Unsupported, match=r'"optim.state.w.exp_avg" is a transformer_engine Float8Tensor .*dequantize='
    ):
        ckpttool.convert(tmp_path / "a.pt", tmp_path / "no", to="zero3", world_size=2)
    ckpttool.convert(tmp_path / "a.pt", tmp_path / "zero", to="zero3", world_size=2, dequantize=["optim.*"])
    with ckpttool.open(tmp_path / "zero") as found:
        assert all(same(found[f"optim.state.w.{n}"].torch(), t) for n, (_, t) in moments.items())


@pytest.mark.usefixtures("_engine")
def test_what_has_no_numbers_that_are_known_is_refused_by_name(tmp_path: Path) -> None:
    swizzled, _ = quantised("MXFP8Tensor", (64, 64))
    swizzled.args = (*swizzled.args[:-1], True)
    short, _ = quantised("Float8Blockwise2D", (300, 64))
    short.args = (*short.args[:2], short.args[2][:1].clone(), *short.args[3:])
    columns, _ = quantised("NVFP4", (64, 64))
    columns.args = (columns.args[0], None, None, *columns.args[1:3], *columns.args[5:])
    odd, _ = quantised("Float8Tensor", (8, 8))
    odd.args = (odd.args[0], DType.kFloat4E2M1, *odd.args[2:])
    cases = {
        "swizzled for a product": swizzled,
        r"its scales are \[1, 4\]": short,
        "columns alone": columns,
        r"dtype is (10|.*kFloat4E2M1)": odd,
    }
    for text, tensor in cases.items():
        torch.save({"model": {"w": tensor}}, tmp_path / "a.pt")
        with pytest.raises(CkpttoolError, match=text):
            ckpttool.convert(tmp_path / "a.pt", tmp_path / "b.pt", dequantize=["*"], force=True)
        ckpttool.convert(tmp_path / "a.pt", tmp_path / "b.pt", force=True)
        assert load(tmp_path / "b.pt")["model"]["w"] == tensor
    torch.save({"model": {"w": Pickled("MXFP8Tensor", torch.zeros(3), *range(11))}}, tmp_path / "a.pt")
    with pytest.raises(Corrupt, match="which no TransformerEngine does"):
        ckpttool.convert(tmp_path / "a.pt", tmp_path / "no.pt")
