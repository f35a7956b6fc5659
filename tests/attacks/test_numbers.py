"""Numbers that would be others than those the engine reads: every way in which a file can hold them is refused."""

from __future__ import annotations

import collections
import io
import os
import struct
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from evil import Case, item, metadata, pt, saved
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

import ckpttool
from ckpttool.errors import Corrupt, Unsafe, Unsupported
from ckpttool.formats.sharded import _flatten_ints
from ckpttool.formats.zip_bytes import read_zip_records
from ckpttool.index.check import check
from ckpttool.index.checkpoint import Checkpoint, Chunks, TensorEntry, Value


class Twice:
    """An OrderedDict whose pickle sets every pair, also a key that is there already."""

    def __init__(self, pairs: Iterable[tuple[Any, Any]], kind: Any = collections.OrderedDict) -> None:
        self.pairs, self.kind = list(pairs), kind

    def __reduce__(self) -> Any:
        return self.kind, (), None, None, iter(self.pairs)


A, B = torch.arange(4.0), torch.arange(4.0) + 10
OPTIM: dict[str, Any] = {
    "state": {"w": {"step": torch.tensor(3.0), "exp_avg": A}},
    "param_groups": [{"lr": 0.1, "params": ["w"]}],
}


class Rebuilt:
    """A tensor that is pickled by a call with more or other arguments than torch's own."""

    def __init__(self, tensor: torch.Tensor, call: Callable[[Any, tuple[Any, ...]], Any]) -> None:
        self.tensor, self.call = tensor, call

    def __reduce__(self) -> Any:
        return self.call(*self.tensor.__reduce_ex__(2))


def bits(tensor: torch.Tensor, **more: bool) -> Rebuilt:
    """A tensor with metadata."""
    return Rebuilt(tensor, lambda f, args: (f, (*args, more)))


def attributes(**state: Any) -> Rebuilt:
    """A parameter with attributes, as torch pickles it."""
    rebuild: Any = torch._utils._rebuild_parameter_with_state
    return Rebuilt(A, lambda f, args: (rebuild, (A, True, collections.OrderedDict(), state)))


def subclass(**state: Any) -> Rebuilt:
    """A tensor of a class of its own with attributes."""
    rebuild: Any = torch._tensor._rebuild_from_type_v2
    return Rebuilt(A, lambda f, args: (rebuild, (f, torch.nn.Parameter, args, state)))


def model(value: Any, **how: Any) -> Callable[[Path, Path], Path]:
    return pt(lambda _: saved({"model": {"w": B, "x": value}}, **how))


LEGACY = {"_use_new_zipfile_serialization": False}
NEW = torch.zeros(2, dtype=torch.float8_e5m2)  # pickled with _rebuild_tensor_v3
HOOKED = Rebuilt(A, lambda f, args: (f, (*args[:5], {1: print})))

BITS: dict[str, Case] = {
    "conj": Case(model(torch.ones(2, dtype=torch.complex64).conj()), Unsupported, '"model.x" is a conjugated view'),
    "neg": Case(model(torch._neg_view(A)), Unsupported, "resolve_neg()"),
    "neg, legacy": Case(model(torch._neg_view(A), **LEGACY), Unsupported, '"model.x" is a negated view'),
    "neg of a new dtype": Case(model(bits(NEW, neg=True)), Unsupported, '"model.x" is a negated view'),
    "neg that is False": Case(model(bits(A, neg=False)), Unsupported, "neg bit"),  # torch sets it all the same
    "metadata of another name": Case(model(bits(A, scaled=True)), Unsupported, "has metadata 'scaled'"),
    "metadata that is a list": Case(model(Rebuilt(A, lambda f, args: (f, (*args, ["neg"])))), Unsupported, "not a dict"),
    "neg in a tuple": Case(model((1, torch._neg_view(A))), Unsupported, '"model.x.1" is a negated view'),
    "more arguments": Case(model(Rebuilt(A, lambda f, args: (f, (*args, {}, {})))), Corrupt, ""),
    "hooks": Case(model(HOOKED), Unsupported, "backward hooks"),
    "a parameter with other data": Case(model(attributes(data=B)), Unsupported, "'data'"),
    "a subclass with other data": Case(model(subclass(data=B)), Unsupported, "'data'"),
    "a parameter with attributes": Case(model(attributes(partition_dim=0, note="x")), None),
    "a subclass with attributes": Case(model(subclass(ds_id=3)), None),
}  # fmt: skip


def other(path: str, pairs: list[tuple[Any, Any]], **how: Any) -> Callable[[Path, Path], Path]:
    """A torch file with a dict that sets a key twice at one place."""
    tree: dict[str, Any] = {
        "model": {"w": A}, "optim": {"state": {"w": dict(OPTIM["state"]["w"])}, "param_groups": [{"lr": 0.1}]}, "x": {}
    }  # fmt: skip
    *way, last = path.split("/")
    at: Any = tree
    for key in way:
        at = at[int(key) if isinstance(at, list) else key]
    at[int(last) if isinstance(at, list) else last] = Twice(pairs)
    return pt(lambda _: saved(tree, **how))


def plain_twice(_: Path) -> bytes:
    """A dict of the pickle itself, by EMPTY_DICT and SETITEMS, with a key twice."""
    data = saved({"model": {"w1": A, "w2": B}})
    body = data.replace(b"w2", b"w1")
    assert body != data
    return with_right_crcs(body)


def with_right_crcs(data: bytes) -> bytes:
    """A zip written anew, whatever its checksums said."""
    records = read_zip_records(lambda at, n: data[at : at + n], 0, len(data), "x")
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as z:
        for name, r in records.items():
            z.writestr(f"archive/{name}", data[r.offset : r.offset + r.length])
    return out.getvalue()


TWICE: dict[str, Case] = {
    "in the model": Case(other("model", [("w", A), ("w", B)]), Unsafe, "key 'w' is set twice"),
    "in the model, plain": Case(pt(plain_twice), Unsafe, "key 'w1' is set twice"),
    "in the model, with equal values": Case(other("model", [("w", A), ("w", A)]), Unsafe, "key 'w' is set twice"),
    "in the model, legacy": Case(other("model", [("w", A), ("w", B)], **LEGACY), Unsafe, "key 'w' is set twice"),
    "in the state of the optimizer": Case(other("optim/state", [("w", {}), ("w", {})]), Unsafe, "key 'w' is set twice"),
    "in one state": Case(other("optim/state/w", [("step", 1), ("exp_avg", A), ("step", 2)]), Unsafe, "key 'step'"),
    "by number": Case(other("optim/state", [(0, {}), (False, {})]), Unsafe, "key False is set twice"),
    "as an integer and a float": Case(other("x", [(1, "a"), (1.0, "b")]), Unsafe, "key 1.0 is set twice"),
    "in a param group": Case(other("optim/param_groups/0", [("lr", 0.1), ("lr", 0.2)]), Unsafe, "key 'lr' is set twice"),
    "in an instance": Case(
        pt(lambda _: saved({"model": {"w": A}, "x": Twice([("a", 1), ("a", 2)], collections.Counter)})), Unsafe, "key 'a'"
    ),
    "at the top": Case(pt(lambda _: saved(Twice([("model", {"w": A}), ("model", {"w": B})]))), Unsafe, "key 'model'"),
}  # fmt: skip


def big(m: Metadata, large: bool) -> None:
    """Make .metadata so large that the C unpickler reads it."""
    if large:
        m.__dict__["filler"] = "x" * (3 << 20)


def listed_twice(key: str, large: bool) -> Callable[[Path, Path], Path]:
    """state_dict_metadata has an entry of a key twice; the first one is another."""

    def change(m: Metadata, _: Path) -> None:
        big(m, large)
        entry = m.state_dict_metadata[key]
        first: Any = BytesStorageMetadata()
        if not isinstance(entry, BytesStorageMetadata):
            first = type(entry)(entry.properties, torch.Size([0]), [])
        m.state_dict_metadata = Twice([(key, first), *m.state_dict_metadata.items()])

    return metadata(change)


def stored_twice(key: str, large: bool) -> Callable[[Path, Path], Path]:
    """storage_data has two places for one key."""

    def change(m: Metadata, _: Path) -> None:
        big(m, large)
        index, info = next((i, s) for i, s in m.storage_data.items() if i.fqn == key)
        again = type(index)(index.fqn, index.offset, index.index), type(info)(info.relative_path, 0, info.length)
        m.storage_data = Twice([again, *m.storage_data.items()])

    return metadata(change)


def paths_twice(m: Metadata, _: Path) -> None:
    m.planner_data = Twice([*m.planner_data.items(), ("model.w", ("model", "other"))])


LR = "optim.param_groups.0.lr"
INDEX: dict[str, Case] = {
    **{
        f"{what} twice{', large' if large else ''}": Case(make(key, large), Unsafe, "twice" if make is listed_twice else "two places")
        for large in (False, True)
        for what, make, key in (
            ("a tensor", listed_twice, "model.b"), ("a value", listed_twice, LR),
            ("a place", stored_twice, "model.b"), ("a place of a value", stored_twice, LR),
        )
    },
    "a path twice": Case(metadata(paths_twice), Unsafe, "key 'model.w' is set twice"),
}  # fmt: skip
CASES = {
    f"{kind}: {name}": case for kind, cases in (("bits", BITS), ("twice", TWICE), ("index", INDEX)) for name, case in cases.items()
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_changes_numbers_in_silence(name: str, tmp_path: Path, canary: Path) -> None:
    case = CASES[name]
    source = case.make(tmp_path / "in", canary)
    out = tmp_path / "out" / "x.pt"
    out.parent.mkdir()
    if case.kind is None:
        assert ckpttool.convert(source, out, to="full").verified
        assert torch.equal(torch.load(out, weights_only=True)["model"]["x"], A)
        return
    with pytest.raises(case.kind) as e:
        ckpttool.convert(source, out, to="full", drop=True)
    assert case.said in str(e.value)
    assert not os.listdir(out.parent)


def test_a_dcp_item_with_a_bit_is_named(tmp_path: Path) -> None:
    source = item("model.b", lambda _: saved(torch._neg_view(torch.ones(6))))(tmp_path / "in", tmp_path)
    with pytest.raises(Unsupported, match=r"model\.b.*negated"):
        ckpttool.convert(source, tmp_path / "out.pt")


def test_a_storage_of_two_dtypes_is_refused(tmp_path: Path) -> None:
    """torch gives both tensors the dtype that comes first."""
    data = saved({"a": A, "b": torch.arange(4, dtype=torch.int32)})
    one, two = b"X\x01\x00\x00\x000", b"X\x01\x00\x00\x001"
    assert data.count(two) == 1
    (tmp_path / "x.pt").write_bytes(with_right_crcs(data.replace(two, one)))
    assert torch.load(tmp_path / "x.pt", weights_only=True)["b"].dtype == torch.float32
    with pytest.raises(Corrupt, match="declared as float32 and as int32"):
        ckpttool.open(tmp_path / "x.pt")


# ------------------------------------------------------------------------- numbers that are read before anything is copied


def flipped(data: bytes, number: float, which: int = 0) -> bytes:
    """A zip with a bit flipped in one of its storages of this one number."""
    body = bytearray(data)
    wanted = struct.pack("<f", number)
    found = [
        r
        for r in read_zip_records(lambda at, n: data[at : at + n], 0, len(data), "x").values()
        if r.name[:5] == "data/"
    ]
    at = [r.offset + k for r in found for k in range(0, r.length, 4) if data[r.offset + k :][:4] == wanted][which]
    body[at + 2] ^= 0x40
    return bytes(body)


@pytest.mark.parametrize("to", ["zero3", "zero2", "universal", "fsdp1"])
def test_a_damaged_step_is_not_used(to: str, tmp_path: Path) -> None:
    """The step of a flat tensor is read while the conversion is planned; verify found its damage, convert did not."""
    for name, steps in {
        "own": {"w": torch.tensor(3.0), "v": torch.tensor(3.0)},
        "view": dict(zip("wv", torch.tensor([7.0, 3.0, 3.0])[1:], strict=True)),  # a part of a storage that nobody reads whole
    }.items():  # fmt: skip
        model = {"w": torch.randn(3, 4), "v": torch.randn(5)}
        state = {n: {"step": steps[n], "exp_avg": t * 2, "exp_avg_sq": t * t} for n, t in model.items()}
        groups = [{"lr": 0.1, "params": list(model)}]
        data = saved({"model": model, "optim": {"state": state, "param_groups": groups}})
        (tmp_path / f"{name}.pt").write_bytes(data)
        world = {} if to == "universal" else {"world_size": 1}
        assert ckpttool.convert(tmp_path / f"{name}.pt", tmp_path / f"{name}_good", to=to, **world).verified
        (tmp_path / f"{name}.pt").write_bytes(flipped(data, 3.0))
        for drop in (False, True):
            with pytest.raises(Corrupt, match="have CRC32"):
                ckpttool.convert(tmp_path / f"{name}.pt", tmp_path / "out", to=to, drop=drop, **world)


@pytest.mark.parametrize("layout", ["zero3", "zero2", "fsdp1"])
def test_a_damaged_step_of_a_rank_is_damage_and_not_another_step(layout: str, tmp_path: Path) -> None:
    model = {"w": torch.randn(3, 4), "v": torch.randn(5)}
    state = {n: {"step": torch.tensor(3.0), "exp_avg": t * 2, "exp_avg_sq": t * t} for n, t in model.items()}
    groups = [{"lr": 0.1, "params": list(model)}]
    torch.save({"model": model, "optim": {"state": state, "param_groups": groups}}, tmp_path / "in.pt")
    ckpttool.convert(tmp_path / "in.pt", tmp_path / "in", to=layout, world_size=2)
    file = sorted(p for p in (tmp_path / "in").rglob("*optim*") if p.is_file())[1]
    file.write_bytes(flipped(file.read_bytes(), 3.0))
    with pytest.raises(Corrupt, match="CRC32"):
        ckpttool.open(tmp_path / "in").locate()


def test_a_scheduler_that_is_a_number_is_not_written_beside_its_epoch(tmp_path: Path) -> None:
    """torchtitan wants `last_epoch` inside it; torch cannot load a folder that has both."""
    state = {"model": {"w": A}, "optim": OPTIM, "scheduler": 3, "trainer": {"step": 3}}
    torch.save(state, tmp_path / "x.pt")
    with pytest.raises(Unsupported, match=r"scheduler.*torchtitan has entries with names there"):
        ckpttool.convert(tmp_path / "x.pt", tmp_path / "out", to="torchtitan", world_size=2)
    assert not (tmp_path / "out").exists()
    done = ckpttool.convert(tmp_path / "x.pt", tmp_path / "out", to="torchtitan", world_size=2, drop=True)
    assert [n for n, _, _ in done.dropped] == ["scheduler"]
    assert ckpttool.inspect(tmp_path / "out").step == 3


def test_a_tensor_that_is_a_value_in_another_file_is_refused() -> None:
    """Files of ranks of two saves: one has a moment, the other a plain value under the same name."""
    tensor = TensorEntry("float32", (0,), ("optim", "state", "w", "exp_avg"), Chunks(1))
    value = Value(("optim", "state", "w", "exp_avg"), "cpu")
    ckpt = Checkpoint("nanotron", "", None, [], [], {"optim.state.w.exp_avg": tensor}, {"optim.state.w.exp_avg": value})
    with pytest.raises(Corrupt, match=r'"optim\.state\.w\.exp_avg" is a tensor and a plain value at once'):
        check(ckpt)


def test_a_scheduler_whose_epoch_is_a_tensor_keeps_it(tmp_path: Path) -> None:
    state = {"model": {"w": A}, "optim": OPTIM, "scheduler": {"last_epoch": torch.tensor(3)}, "trainer": {"step": 3}}
    torch.save(state, tmp_path / "x.pt")
    ckpttool.convert(tmp_path / "x.pt", tmp_path / "out", to="torchtitan", world_size=2)
    with ckpttool.open(tmp_path / "out") as opened:
        assert (
            opened["scheduler.last_epoch"][...].item() == 3 and "scheduler.last_epoch" not in opened.checkpoint.values
        )


def test_the_shape_of_a_mesh_that_contains_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    wide: list[Any] = [[]]
    for _ in range(40):
        wide = [wide] * 60
    for shape in endless, wide, (2, "x"), [1] * 9000:
        with pytest.raises(ValueError, match="not the shape of a mesh"):
            _flatten_ints(shape)
    assert sorted(_flatten_ints((2, [3, (4,)], ()))) == [2, 3, 4]
