"""A value of another kind than the trainer writes, anywhere in a JSON file or a pickle, is read or refused with an error of ours."""

from __future__ import annotations

import io
import json
import pickle
import pickletools
import shutil
import zipfile
from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from evil import rezipped

import ckpttool
from ckpttool.errors import CkpttoolError, Corrupt

FIXTURES = Path(__file__).parents[2] / "fixtures"
VALUES: list[Any] = [None, True, -1, 2**70, 1.5, "x", [3], {"a": 1}]
IN_PICKLES: list[Any] = [*VALUES, (2, "y"), {1: 2}, b"z"]
#: One folder of each reader that parses JSON or pickles of its own, and how many leaves of a pickle are changed.
FOLDERS = {
    "nanotron/zero1/3": 1, "trainers/torchsnapshot_w1/ckpt/snap": 2, "trainers/lightning_w2": 4,
    "checkpointing/fsdp/ckpt": 1, "zero0_w2/ckpt": 8, "zero3_w3_groups/ckpt": 4, "fsdp1_w2_sharded/ckpt": 2,
    "hf_llama/ckpt": 2,
}  # fmt: skip


def opcodes(value: Any) -> bytes:
    """What pushes a value in a pickle that has a memo already."""
    data = pickle.dumps(value, 2)
    ops = list(pickletools.genops(data))
    return b"".join(
        data[a:b] for (op, _, a), (_, _, b) in pairwise(ops) if op.name not in ("PROTO", "BINPUT", "LONG_BINPUT")
    )


def spots(data: bytes) -> list[tuple[int, int]]:
    """The bytes of every text, number and empty container that a pickle pushes."""
    pushes = {"BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "NONE", "NEWTRUE"}
    ops = list(pickletools.genops(data))
    kinds = {*pushes, "NEWFALSE", "EMPTY_LIST", "EMPTY_DICT", "EMPTY_TUPLE"}
    return [(a, b) for (op, _, a), (_, _, b) in pairwise(ops) if op.name in kinds]


def places(tree: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every node of JSON; of a list the first and the last."""
    yield at
    for key in tree if isinstance(tree, dict) else {0, len(tree) - 1} if isinstance(tree, list) and tree else ():
        yield from places(tree[key], (*at, key))


def put(tree: Any, at: tuple[Any, ...], value: Any) -> Any:
    """A copy of JSON with another value at one place."""
    if not at:
        return value
    out = tree.copy()
    out[at[0]] = put(tree[at[0]], at[1:], value)
    return out


def mutants(file: Path, many: int) -> Iterator[tuple[str, bytes]]:
    """The bytes of a file with one leaf of another kind."""
    raw = file.read_bytes()
    if raw[:1] == b"{":
        tree = json.loads(raw)
        nodes = list(places(tree))
        for at, value in product(nodes[:: 1 + len(nodes) // 16], VALUES):
            yield f"{at} = {value!r}", json.dumps(put(tree, at, value)).encode()
    elif raw[:2] == b"PK":
        with zipfile.ZipFile(io.BytesIO(raw)) as z:
            name = next((n for n in z.namelist() if n.endswith("/data.pkl")), None)
            data = b"" if name is None else z.read(name)
        found = spots(data) if data else []
        for (a, b), value in product(found[:: 1 + len(found) // many], IN_PICKLES):
            new = data[:a] + opcodes(value) + data[b:]
            yield f"{a} = {value!r}", rezipped(raw, lambda r, new=new: r.update({name: new}))


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_value_of_another_kind_is_read_or_refused(folder: str, tmp_path: Path) -> None:
    copy = tmp_path / "x"
    shutil.copytree(FIXTURES / folder, copy)
    tried, refused = 0, 0
    for file in sorted(p for p in copy.rglob("*") if p.is_file()):
        genuine = file.read_bytes()
        for what, data in mutants(file, FOLDERS[folder]):
            file.write_bytes(data)
            tried += 1
            try:
                with ckpttool.open(copy) as ckpt:
                    ckpt.locate()
            except CkpttoolError:
                refused += 1
            except Exception as e:
                raise AssertionError(f"{file.relative_to(copy)} with {what}: {type(e).__name__}: {e}") from e
        file.write_bytes(genuine)
    assert tried > 50 and 0 < refused < tried, (tried, refused)


@pytest.mark.parametrize(
    ("old", "new"), [(b"K\x83K\x24\x86", b"K\x83K\x05\x86"), (b"ctorch\nfloat32\n", b"ctorch\nfloat16\n")]
)
def test_a_dtensor_that_shows_another_shape_or_dtype_than_it_has_is_refused(
    old: bytes, new: bytes, tmp_path: Path
) -> None:
    """torch shows the arguments of the wrapper, and joins what the spec inside says: two answers to one question."""
    copy = tmp_path / "x"
    shutil.copytree(FIXTURES / "trainers" / "verl_fsdp2_w3" / "ckpt", copy)
    file = copy / "optim_world_size_3_rank_0.pt"

    def spoil(records: dict[str, bytes]) -> None:
        (name,) = (n for n in records if n.endswith("/data.pkl"))
        wrapper = records[name].index(b"_rebuild_wrapper_subclass")
        at = records[name].index(old, wrapper)  # its own arguments come first
        records[name] = records[name][:at] + new + records[name][at + len(old) :]

    file.write_bytes(rezipped(file.read_bytes(), spoil))
    with (
        pytest.raises(
            Corrupt,
            match=r"exp_avg.*it shows float(32 of shape \(131, 5\)|16 of shape .*), and is float32 of shape \(131, 36\)",
        ),
        ckpttool.open(copy) as ckpt,
    ):
        ckpt.locate()
