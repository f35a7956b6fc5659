"""Objects of tensor subclasses: torchao's optimizer states and quantised weights (fixtures/torchao_jobs.py wrote the fixtures).

torch itself reads what we write; torchao's classes are stand-ins without behaviour here. live/test_torchao.py has the real ones.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from commands import ckpttool_here
from peers import FIXTURES, load_dcp, load_hf, same_value
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

import ckpttool
from ckpttool.errors import Corrupt, Unsafe, Unsupported, UsageError

TORCHAO = FIXTURES / "torchao"
W8, W4, FP8 = TORCHAO / "adamw8bit_w2" / "ckpt", TORCHAO / "adamw4bit_w1" / "ckpt.pt", TORCHAO / "adamwfp8_w2" / "ckpt"
MIXED = TORCHAO / "adamw8bit_mixed_w2" / "ckpt"
WEIGHTS = TORCHAO / "weights" / "weights.pt"
WRITABLE = TORCHAO / "weights" / "writable.pt"
CLASSES = {
    "torchao.optim.subclass_8bit": ["OptimState8bit"],
    "torchao.optim.subclass_4bit": ["OptimState4bit"],
    "torchao.optim.subclass_fp8": ["OptimStateFp8"],
    "torchao.quantization.quantize_.workflows.float8.float8_tensor": ["Float8Tensor"],
    "torchao.quantization.quantize_.workflows.int8.int8_tensor": ["Int8Tensor", "QuantizeTensorToInt8Kwargs"],
    "torchao.quantization.quantize_.workflows.nf4.nf4_tensor": ["NF4Tensor"],
    "torchao.prototype.mx_formats.mx_tensor": ["MXTensor"],
    "torchao.prototype.mx_formats.nvfp4_tensor": ["NVFP4Tensor"],
    "torchao.float8.fsdp_utils": ["WeightWithDynamicFloat8CastTensor"],
    "torchao.prototype.moe_training.tensor": ["MXFP8TrainingWeightWrapperTensor", "Float8TrainingWeightWrapperTensor"],
}


class Inert(torch.Tensor):
    """What torch makes of an object of a class that does nothing."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{func} of a {cls.__name__}")


class Anything:
    """An object of another class of torchao."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As a member of an enum is pickled where it was made by a call."""
        return (type(self), self.args) if "args" in self.__dict__ else super().__reduce_ex__(2)


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        base = Inert if name.endswith("Tensor") or name.startswith("OptimState") else Anything
        made = type(name, (base,), {"__module__": self.__name__})
        setattr(self, name, made)
        return made


class _Modules:
    """Imports every module of torchao as one whose classes do nothing."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        from importlib.machinery import ModuleSpec

        return ModuleSpec(name, _Modules(), is_package=True) if name.partition(".")[0] == "torchao" else None  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: Any) -> ModuleType:
        return _Module(spec.name)

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        pass


@pytest.fixture(autouse=True)
def _torchao() -> Iterator[None]:
    finder: Any = _Modules()
    sys.meta_path.insert(0, finder)
    yield
    sys.meta_path.remove(finder)
    for name in [n for n in sys.modules if n.partition(".")[0] == "torchao"]:
        del sys.modules[name]


def load(path: Path) -> Any:
    return torch.load(path, weights_only=False)


def items(folder: Path) -> dict[str, list[tuple[tuple[int, ...], Any]]]:
    """{key: [(offsets, what torch loads of the item)]} of a dcp folder, by offset."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    out: dict[str, list[tuple[tuple[int, ...], Any]]] = {}
    for index, info in metadata.storage_data.items():
        raw = (folder / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
        found = torch.load(io.BytesIO(raw), weights_only=False)
        out.setdefault(index.fqn, []).append((tuple(index.offset or ()), found))
    return {k: sorted(v, key=lambda x: x[0]) for k, v in out.items()}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Inert):
        alike = type(a) is type(b) and (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        return (
            alike
            and list(a.__dict__) == list(b.__dict__)
            and all(same(v, b.__dict__[k]) for k, v in a.__dict__.items())
        )
    if isinstance(a, Tensor):
        flat = (x.detach().contiguous().reshape(-1).view(torch.uint8) for x in (a, b))
        return isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(*flat)
    return bool(type(a) is type(b) and a == b)


def whole(parts: list[tuple[tuple[int, ...], Any]]) -> dict[str, Any]:
    """The attributes of an object, of its parts in order of their rows."""
    first = parts[0][1].__dict__
    out = dict(first)
    for k in ("codes", "scale"):
        out[k] = torch.cat([x.__dict__[k] for _, x in parts])
    return out


# ------------------------------------------------------------------------------------------------------------ there and back


@pytest.mark.parametrize(
    "name", [k for k in load_file(TORCHAO / "weights" / "truth.safetensors") if "training" not in k]
)
def test_weights_of_every_class_are_the_same_objects_again(name: str, tmp_path: Path) -> None:
    ckpttool.convert(WEIGHTS, tmp_path / "full.pt", to="full")
    ckpttool.convert(WEIGHTS, tmp_path / "dcp", to="dcp", world_size=1)
    key = name.removeprefix("model.")
    original = load(WEIGHTS)[key]
    assert isinstance(original, Inert) and original.__dict__
    assert same(load(tmp_path / "full.pt")[key], original)
    ckpttool.convert(tmp_path / "dcp", tmp_path / "back.pt", to="full")
    assert same(load(tmp_path / "back.pt")[key], original)
    found = items(tmp_path / "dcp")[key][0][1]
    assert same(found, original)


@pytest.mark.parametrize("name", ["training_float8", "training_moe_mxfp8", "training_moe_float8"])
@pytest.mark.parametrize("to", ["full", "dcp"])
def test_objects_around_a_dense_weight_are_unwrapped_and_said(name: str, to: str, tmp_path: Path) -> None:
    out = tmp_path / ("out.pt" if to == "full" else "out")
    done = ckpttool.convert(WEIGHTS, out, to=to, world_size=1 if to == "dcp" else None)
    key = f"layer.{name}.weight"
    found = load(out)[key] if to == "full" else items(out)[key][0][1]
    assert type(found) is Tensor and same(found, load_file(TORCHAO / "weights" / "truth.safetensors")[f"model.{key}"])
    kind = {
        "training_float8": "WeightWithDynamicFloat8CastTensor",
        "training_moe_mxfp8": "MXFP8TrainingWeightWrapperTensor",
    }
    assert any(kind.get(name, "Float8TrainingWeightWrapperTensor") in note and key in note for note in done.notes)


@pytest.mark.parametrize("world", [1, 3])
def test_unwrapped_weights_are_cut_and_published_as_any_other(world: int, tmp_path: Path) -> None:
    truth = load_file(TORCHAO / "weights" / "truth.safetensors")
    names = [f"layer.training_{kind}.weight" for kind in ("float8", "moe_mxfp8", "moe_float8")]
    ckpttool.convert(WEIGHTS, tmp_path / "alone.pt", to="full")
    torch.save({n: t for n, t in load(tmp_path / "alone.pt").items() if n in names}, tmp_path / "dense.pt")
    ckpttool.convert(tmp_path / "dense.pt", tmp_path / "dcp", to="dcp", world_size=world)
    ckpttool.convert(tmp_path / "dcp", tmp_path / "hf", to="hf")
    found = load_hf(tmp_path / "hf")
    assert sorted(found) == sorted(names) and all(same(found[n], truth[f"model.{n}"]) for n in names)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_wrapped_weights_in_dcp_are_unwrapped_too(tmp_path: Path) -> None:
    """torch's own save of a state with such objects, which needs only their shape and dtype of them."""
    wrapped = load(WEIGHTS)["layer.training_moe_mxfp8.weight"]
    folder = tmp_path / "dcp"
    dcp.save(
        {"model": {"a": torch.ones(2, 16, 32).bfloat16(), "b": torch.zeros(3)}}, checkpoint_id=folder, no_dist=True
    )
    metadata = dcp.FileSystemReader(folder).read_metadata()
    index = next(i for i in metadata.storage_data if i.fqn == "model.a")
    buffer = io.BytesIO()
    torch.save(wrapped, buffer)
    info = metadata.storage_data[index]
    file = folder / info.relative_path
    info.offset, info.length = file.stat().st_size, len(buffer.getvalue())
    file.write_bytes(file.read_bytes() + buffer.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    done = ckpttool.convert(folder, tmp_path / "out.pt", to="full")
    assert same(load(tmp_path / "out.pt")["model"]["a"], wrapped.__dict__["_data"])
    assert any("MXFP8TrainingWeightWrapperTensor" in note for note in done.notes)


@pytest.mark.parametrize("source", [W8, FP8], ids=["8bit", "fp8"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_optimizer_states_are_cut_among_other_ranks_block_by_block(source: Path, world: int, tmp_path: Path) -> None:
    ckpttool.convert(source, tmp_path / "out", to="dcp", world_size=world)
    before, after = items(source), items(tmp_path / "out")
    objects = [k for k, v in before.items() if isinstance(v[0][1], Inert)]
    assert len(objects) == 6 and before.keys() == after.keys()
    for key in objects:
        assert len(after[key]) == world
        assert all(same(a, b) for a, b in zip(whole(before[key]).values(), whole(after[key]).values(), strict=True))
        assert sum(x.shape[0] for _, x in after[key]) == sum(x.shape[0] for _, x in before[key])
        if world == 2:
            assert all(p == q and same(a, b) for (p, a), (q, b) in zip(before[key], after[key], strict=True))


def test_one_file_of_two_ranks_and_two_ranks_of_one_file(tmp_path: Path) -> None:
    ckpttool.convert(W8, tmp_path / "one.pt", to="full")
    found = load(tmp_path / "one.pt")["optim"]["state"]["embed.weight"]["exp_avg"]
    assert found.shape == (132, 64) and same(found.__dict__, found.__dict__)
    expected = whole(items(W8)["optim.state.embed.weight.exp_avg"])
    assert all(same(v, found.__dict__[k]) for k, v in expected.items())
    ckpttool.convert(tmp_path / "one.pt", tmp_path / "two", to="dcp", world_size=2)
    for key, parts in items(W8).items():
        again = items(tmp_path / "two")[key]
        if isinstance(parts[0][1], Inert):
            assert all(same(a, b) for (_, a), (_, b) in zip(parts, again, strict=True))
    ckpttool.convert(W4, tmp_path / "four", to="dcp", world_size=2)
    part = items(tmp_path / "four")["optim.state.embed.weight.exp_avg"][1][1]
    original = load(W4)["optim"]["state"]["embed.weight"]["exp_avg"]
    assert part.shape == (66, 64) and part.__dict__["_shape"] == (66, 64)
    assert same(part.__dict__["codes"], original.__dict__["codes"][66 * 32 :])
    assert same(part.__dict__["scale"], original.__dict__["scale"][66:])


def test_a_tensor_that_one_rank_quantised_and_another_did_not_stays_as_it_was_cut(tmp_path: Path) -> None:
    before = items(MIXED)
    first, second = before["optim.state.up.weight.exp_avg"]
    assert isinstance(first[1], Inert) and type(second[1]) is Tensor
    ckpttool.convert(MIXED, tmp_path / "out", to="dcp", world_size=2)
    ckpttool.convert(tmp_path / "out", tmp_path / "a.tar.zst", to="audit")
    ckpttool.convert(tmp_path / "a.tar.zst", tmp_path / "again", to="dcp", world_size=2)
    for folder in ("out", "again"):
        after = items(tmp_path / folder)
        assert before.keys() == after.keys()
        for key, parts in before.items():
            assert all(p == q and same(a, b) for (p, a), (q, b) in zip(parts, after[key], strict=True)), key
    with pytest.raises(
        Unsupported,
        match=r"which 3 ranks cannot divide: it was saved in parts of 64, 63 rows, 1 of them plain.* world_size 2\.",
    ):
        ckpttool.convert(MIXED, tmp_path / "no", to="dcp", world_size=3)
    with pytest.raises(Unsupported, match=r"is a torchao OptimState8bit on some ranks and a plain tensor on others"):
        ckpttool.convert(MIXED, tmp_path / "no.pt", to="full")
    shown = json.loads(ckpttool_here("inspect", MIXED, "--json").stdout)
    assert not any("lost when it was saved" in note for note in shown["notes"])


def test_what_is_inside_are_entries_of_their_own(tmp_path: Path) -> None:
    with ckpttool.open(W8) as opened:
        ckpt = opened.checkpoint
        inside = {n: t for n, t in ckpt.tensors.items() if n.startswith("optim.state.up.weight.exp_avg.")}
        assert {n.rpartition(".")[2]: (t.dtype, t.shape) for n, t in inside.items()} == {
            "codes": ("uint8", (128, 64)), "scale": ("float32", (256,)), "qmap": ("float32", (256,)),
        }  # fmt: skip
        about = ckpt.value("optim.state.up.weight.exp_avg.__class__")
        assert (about["class"], about["dtype"], about["shape"]) == (
            ("torchao.optim.subclass_8bit", "OptimState8bit"), "float32", [128, 64],
        )  # fmt: skip
        assert torch.equal(
            opened["optim.state.up.weight.exp_avg.codes"].torch(),
            whole(items(W8)["optim.state.up.weight.exp_avg"])["codes"],
        )


def test_through_an_archive_and_a_folder_without_pickles(tmp_path: Path) -> None:
    ckpttool.convert(W8, tmp_path / "a.tar.zst", to="audit")
    ckpttool.convert(tmp_path / "a.tar.zst", tmp_path / "back", to="dcp", world_size=2)
    before, after = items(W8), items(tmp_path / "back")
    for key, parts in before.items():
        assert all(p == q and same(a, b) for (p, a), (q, b) in zip(parts, after[key], strict=True)), key


# ------------------------------------------------------------------------------------------------------------------ refusals


def test_a_cut_inside_a_block_is_refused_with_numbers(tmp_path: Path) -> None:
    swizzled = {"w": load(WEIGHTS)["layer.nvfp4_swizzled.weight"]}
    torch.save(swizzled, tmp_path / "s.pt")
    with pytest.raises(
        Unsupported, match=r'"model.w" is a torchao NVFP4Tensor, which 2 ranks cannot divide: .*swizzled.*1'
    ):
        ckpttool.convert(tmp_path / "s.pt", tmp_path / "no", to="dcp", world_size=2)
    torch.save({"w": load(WEIGHTS)["layer.nf4.weight"]}, tmp_path / "n.pt")
    with pytest.raises(
        Unsupported, match=r"rows 0 to 86 of \[256, 128\] are elements 0 to 11,008.*cuts a block.*world_size 1, 2"
    ):
        ckpttool.convert(tmp_path / "n.pt", tmp_path / "no", to="dcp", world_size=3)


def test_an_object_of_no_rows_whose_parts_have_some_is_refused(tmp_path: Path) -> None:
    shutil.copytree(W8, tmp_path / "ckpt")
    metadata = dcp.FileSystemReader(W8).read_metadata()
    entry = metadata.state_dict_metadata["optim.state.up.weight.exp_avg"]
    entry.size = torch.Size((0, *entry.size[1:]))
    (tmp_path / "ckpt" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(Unsupported, match="a part has rows 0 to 64, and the whole has none"):
        ckpttool.open(tmp_path / "ckpt")


@pytest.mark.parametrize("to", ["zero3", "fsdp1", "universal"])
def test_layouts_of_plain_tensors_refuse_them_by_name(to: str, tmp_path: Path) -> None:
    with pytest.raises(
        Unsupported,
        match=r'"optim.state.embed.weight.exp_avg" is a torchao OptimState8bit .* has 6 such tensors.*dequantize=.*only=',
    ):
        world = None if to == "universal" else 2
        ckpttool.convert(W8, tmp_path / "no", to=to, world_size=world, wrap=["*"] if to == "fsdp1" else None)
    ckpttool.convert(W8, tmp_path / "weights", to="dcp", world_size=2, only=["model"])


def test_casts_leave_them_alone(tmp_path: Path) -> None:
    ckpttool.convert(WEIGHTS, tmp_path / "out.pt", to="full", dtype="fp32")
    assert same(load(tmp_path / "out.pt")["layer.float8.weight"], load(WEIGHTS)["layer.float8.weight"])
    assert load(tmp_path / "out.pt")["layer.training_moe_mxfp8.weight"].dtype == torch.float32
    with pytest.raises(Unsupported, match=r'"model.layer.float8.weight.qdata" is a part of the quantised tensor'):
        ckpttool.convert(WEIGHTS, tmp_path / "no.pt", to="full", cast={"*float8*": "fp32"})


def test_only_the_model_is_read_whatever_the_optimizer_holds(tmp_path: Path) -> None:
    for source in (W8, W4):
        out = tmp_path / f"{source.parent.name}.pt"
        done = ckpttool.convert(source, out, to="full", only=["model"])
        weights = load_file(source.parent / "truth.safetensors")
        assert done.verified
        assert all(same(t, weights[f"model.{n}"]) for n, t in load(out)["model"].items())


class Runs:
    """Pickled as a call of the function that puts objects of subclasses together."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return torch._tensor._rebuild_from_type_v2, self.call


@pytest.mark.parametrize("cls", [os.system, subprocess.Popen, eval])
def test_classes_that_act_are_refused(cls: Any, tmp_path: Path) -> None:
    size = (cls, torch.float32, (2,), (1,), 0, torch.strided, torch.device("cpu"), False)
    odd = Runs(torch._utils._rebuild_wrapper_subclass, cls, size, {"codes": torch.ones(2)})
    torch.save({"model": {"w": torch.ones(2)}, "optimizer": {"odd": odd}}, tmp_path / "a.pt")
    with pytest.raises(Unsafe, match="makes a tensor of class"):
        ckpttool.inspect(tmp_path / "a.pt")
    with pytest.raises(Unsafe, match="makes a tensor of class"):
        ckpttool.convert(tmp_path / "a.pt", tmp_path / "no.pt", to="full", only=["model"])


def test_an_item_that_is_short_and_no_object_is_damage(tmp_path: Path) -> None:
    shutil.copytree(W8, tmp_path / "c")
    file = tmp_path / "c" / "__0_0.distcp"
    file.write_bytes(file.read_bytes().replace(b"_rebuild_wrapper_subclass", b"_rebuild_wrapper_subclasz"))
    with pytest.raises((Corrupt, Unsupported, ckpttool.errors.Unsafe)):
        ckpttool.inspect(tmp_path / "c")


def test_inspect_names_the_classes() -> None:
    shown = ckpttool_here("inspect", W8)
    assert shown.returncode == 0
    assert "OptimState8bit" in shown.stdout and "AdamW" in shown.stdout


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("zipped", [True, False])
def test_what_lies_in_the_optimizer_does_not_stop_the_weights(zipped: bool, tmp_path: Path) -> None:
    weights = {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2)}
    odd = {
        "sparse": torch.eye(3).to_sparse(),
        "conjugated": torch.tensor([1 + 2j]).conj(),
        "meta": torch.zeros(3, device="meta"),
    }
    for kind, tensor in odd.items():
        path = tmp_path / f"{kind}.pt"
        state = {0: {"exp_avg": torch.zeros(2, 3), "odd": tensor}, 1: {"exp_avg": torch.zeros(2), "odd": [(tensor,)]}}
        optimizer = {"state": state, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
        torch.save({"model": weights, "optimizer": optimizer}, path, _use_new_zipfile_serialization=zipped)
        with pytest.raises(Unsupported, match=rf'"optim.state.w.odd" cannot be read: .*{kind}.* leaves it out'):
            ckpttool.convert(path, tmp_path / "no.pt", to="full")
        done = ckpttool.convert(path, tmp_path / f"{kind}-{zipped}-out.pt", to="full", only=["model"])
        assert done.verified
        assert same_value(load(tmp_path / f"{kind}-{zipped}-out.pt")["model"], weights)


def test_what_is_left_without_one_ranks_file_is_salvaged(tmp_path: Path) -> None:
    shutil.copytree(W8, tmp_path / "c")
    (tmp_path / "c" / "__0_0.distcp").unlink()
    done = ckpttool.convert(tmp_path / "c", tmp_path / "out.pt", to="full", salvage=True)
    assert done.verified
    with ckpttool.open(tmp_path / "out.pt") as opened:
        ckpt = opened.checkpoint
        assert ckpt.salvage is not None and "optim.state.embed.weight.exp_avg" in ckpt.salvage.missing
        assert not any("exp_avg." in n for n in ckpt.tensors) and not any("__class__" in n for n in ckpt.values)


def test_a_folder_that_lacks_a_file_says_what_was_in_it(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "fsdp2_w3" / "ckpt", tmp_path / "c")
    (tmp_path / "c" / "__1_0.distcp").unlink()
    shown = ckpttool_here("inspect", tmp_path / "c")
    assert shown.returncode == 4
    stored = dcp.FileSystemReader(FIXTURES / "fsdp2_w3" / "ckpt").read_metadata().storage_data
    lost = {i.fqn for i, x in stored.items() if x.relative_path == "__1_0.distcp" and i.offset is not None}
    values = {i.fqn for i, x in stored.items() if x.relative_path == "__1_0.distcp" and i.offset is None}
    assert f"In what is missing are parts of {len(lost)} of" in shown.stderr and f"and {len(values)} of" in shown.stderr
    assert "__1_0.distcp is missing. The copy is incomplete; fetch it again." in shown.stderr
    assert "model.model.embed_tokens.weight, " in shown.stderr and "optim.param_groups.0.amsgrad" in shown.stderr
    assert "`ckpttool doctor`" in shown.stderr


# ------------------------------------------------------------------------------------------------------------- as safetensors


@pytest.mark.parametrize("shards", [10**9, 9000], ids=["one file", "shards"])
def test_hf_has_torchaos_own_names_and_gives_the_same_objects_back(shards: int, tmp_path: Path) -> None:
    original = load(WRITABLE)
    done = ckpttool.convert(WRITABLE, tmp_path / "hf", to="hf", options=ckpttool.HfOptions(max_shard_bytes=shards))
    assert done.verified and not done.dropped
    files = sorted((tmp_path / "hf").glob("*.safetensors"))
    assert (len(files) > 1) == (shards < 10**9)
    tensors = {n: t for f in files for n, t in load_file(f).items()}
    assert same(tensors["layer.float8._weight_qdata"], original["layer.float8.weight"].__dict__["qdata"])
    assert same(
        tensors["layer.nvfp4._weight_per_tensor_scale"], original["layer.nvfp4.weight"].__dict__["per_tensor_scale"]
    )
    for file in files:
        with safe_open(file, "pt") as f:
            meta = f.metadata()
        assert json.loads(meta["tensor_names"]) == list(original) and json.loads(meta["layer.norm.bias"]) == {
            "_type": "Tensor"
        }
        assert json.loads(meta["layer.int8.weight"]) == {
            "_type": "Int8Tensor",
            "_data": {
                "act_quant_kwargs": {
                    "_type": "QuantizeTensorToInt8Kwargs",
                    "_data": {
                        "granularity": {"_type": "PerRow", "_data": {"dim": -1}},
                        "mapping_type": {"_type": "MappingType", "_data": "SYMMETRIC"},
                        "reduce_range": False,
                    },
                },
                "reduce_range": False,
                "block_size": [1, 64],
                "dtype": {"_type": "torch.dtype", "_data": "bfloat16"},
            },
            "_tensor_data_names": ["zero_point", "qdata", "scale"],
        }
    ckpttool.convert(tmp_path / "hf", tmp_path / "back.pt", to="full")
    back = load(tmp_path / "back.pt")["model"]
    assert all(same(back[n], t) for n, t in original.items())


def test_hf_of_a_quantised_model_says_what_it_is(tmp_path: Path) -> None:
    llama = TORCHAO / "llama_int8"
    done = ckpttool.convert(llama / "model.pt", tmp_path / "hf", to="hf", config=str(llama / "config"))
    assert done.verified and any("are written as torchao names them" in note for note in done.notes)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and config["quantization_config"]["quant_method"] == "torchao"
    with pytest.raises(Unsupported, match="is a torchao NF4Tensor, which torchao does not write to safetensors"):
        ckpttool.convert(WEIGHTS, tmp_path / "no", to="hf")


@pytest.mark.parametrize("source", [W8, MIXED], ids=["8bit", "mixed"])
def test_the_state_of_a_quantised_optimizer_in_an_hf_folder(source: Path, tmp_path: Path) -> None:
    ckpttool.convert(source, tmp_path / "hf", to="hf", options=ckpttool.HfOptions(include_optimizer=True))
    ckpttool.convert(tmp_path / "hf", tmp_path / "back", to="dcp", world_size=2)
    before, after = items(source), items(tmp_path / "back")
    assert all(p == q and same(a, b) for k, v in before.items() for (p, a), (q, b) in zip(v, after[k], strict=True))


def test_metadata_that_does_not_fit_is_damage(tmp_path: Path) -> None:
    ckpttool.convert(WRITABLE, tmp_path / "a.safetensors", to="hf")
    raw = (tmp_path / "a.safetensors").read_bytes()
    for old, new in ((b'\\"KernelPreference\\"', b'\\"KernelPreferencf\\"'), (b'\\"scale\\"]', b'\\"scalf\\"]')):
        assert old in raw
        (tmp_path / "b.safetensors").write_bytes(raw.replace(old, new))
        with pytest.raises(Corrupt, match=r"described differently from how torchao does it|is missing, a part of the"):
            ckpttool.inspect(tmp_path / "b.safetensors")


# --------------------------------------------------------------------------------------------------------------- as plain numbers


@pytest.mark.parametrize("source", [W8, W4, FP8, MIXED], ids=["8bit", "4bit", "fp8", "mixed"])
@pytest.mark.parametrize("to", ["full", "dcp", "zero3", "hf"])
def test_dequantized_state_has_the_numbers_of_torchao_bit_for_bit(source: Path, to: str, tmp_path: Path) -> None:
    out = tmp_path / ("out.pt" if to == "full" else "out")
    how = (
        {"options": ckpttool.HfOptions(include_optimizer=True)}
        if to == "hf"
        else {}
        if to == "full"
        else {"world_size": 3}
    )
    done = ckpttool.convert(source, out, to=to, dequantize=["optim.*"], **how)
    assert done.verified and any("are float32 now, the exact value of each code" in note for note in done.notes)
    if to in ("zero3", "hf"):  # read back
        ckpttool.convert(out, tmp_path / "out.pt", to="full")
        out = tmp_path / "out.pt"
    truth = load_file(source.parent / "truth.safetensors")
    tree = load_dcp(out) if to == "dcp" else torch.load(out, weights_only=True)
    state = tree["optim"]["state"]
    expected = {n: t for n, t in truth.items() if n.startswith("optim.") and not n.endswith(".step")}
    assert expected
    for name, t in expected.items():
        fqn, _, slot = name.removeprefix("optim.").rpartition(".")
        assert same(state[fqn][slot], t), name


def test_plain_adamw_goes_on_from_it(tmp_path: Path) -> None:
    ckpttool.convert(W8, tmp_path / "out.pt", to="full", dequantize=["optim.*"])
    tree = torch.load(tmp_path / "out.pt", weights_only=True)
    model = torch.nn.ParameterList(torch.nn.Parameter(t) for t in tree["model"].values())
    optimizer = torch.optim.AdamW(model.parameters())
    (group,) = tree["optim"]["param_groups"]
    numbers = {n: i for i, n in enumerate(tree["model"])}
    ids = {numbers[n]: slots for n, slots in tree["optim"]["state"].items()}
    optimizer.load_state_dict({"state": ids, "param_groups": [{**group, "params": sorted(ids)}]})
    for p in model:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert all(torch.isfinite(p).all() for p in model)


def test_what_is_not_quantised_or_not_known_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"'model\.\*': no quantised tensor has such a name\. The first is optim\.state"
    ):
        ckpttool.convert(W8, tmp_path / "no.pt", to="full", dequantize=["model.*"])
    with pytest.raises(
        Unsupported, match=r"is a torchao \w+, whose numbers ckpttool does not compute. It knows OptimState8bit"
    ):
        ckpttool.convert(WEIGHTS, tmp_path / "no.pt", to="full", dequantize=["model.*"])
    with pytest.raises(UsageError, match="give a list"):
        ckpttool.convert(W8, tmp_path / "no.pt", to="full", dequantize="optim.*")
    shown = ckpttool_here("convert", W8, tmp_path / "some.pt", "--dequantize", "*.exp_avg", "--dry-run")
    assert shown.returncode == 0
    ckpttool.convert(W8, tmp_path / "some.pt", to="full", dequantize=["*.exp_avg"])
    slots = load(tmp_path / "some.pt")["optim"]["state"]["embed.weight"]
    assert type(slots["exp_avg"]) is Tensor and isinstance(slots["exp_avg_sq"], Inert)


def test_digests_that_were_recorded_of_the_codes_are_compared(tmp_path: Path) -> None:
    ckpttool.convert(W8, tmp_path / "c", to="dcp", world_size=2)
    file = tmp_path / "c" / "ckpttool.json"
    record = json.loads(file.read_text())
    text = file.read_text()
    digest = next(row[2] for n, row in record["tensors"].items() if n.endswith("exp_avg.codes"))
    file.write_text(text.replace(digest, digest[:-2] + ("00" if digest[-2:] != "00" else "11")))
    with pytest.raises(Corrupt, match=r"exp_avg\.codes"):
        ckpttool.convert(tmp_path / "c", tmp_path / "no.pt", to="full", dequantize=["optim.*"])
