"""A value of another kind than the trainer writes, anywhere in a JSON file or a pickle, is read or refused with an error of ours."""

from __future__ import annotations

import io
import json
import pickle
import pickletools
import shutil
import tarfile
import zipfile
from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from evil import rezipped

import ckpttool
from ckpttool.errors import CkpttoolError, Corrupt, Unsupported

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


def test_numbers_that_torch_reads_from_small_records_are_numbers(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(3)}}, tmp_path / "x.pt")
    raw = (tmp_path / "x.pt").read_bytes()
    (tmp_path / "x.pt").write_bytes(rezipped(raw, lambda r: r.update({"x/.storage_alignment": "ο".encode()})))
    with pytest.raises(ValueError):
        torch.load(tmp_path / "x.pt")
    with pytest.raises(Corrupt, match=r"\.storage_alignment is no number"):
        ckpttool.open(tmp_path / "x.pt")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_dtype_of_no_torch_in_metadata_is_refused_by_name(tmp_path: Path) -> None:
    dcp.save({"model": {"w": torch.arange(3)}}, checkpoint_id=tmp_path / "d", no_dist=True)
    file = tmp_path / "d" / ".metadata"
    assert file.read_bytes().count(b"int64") == 1
    file.write_bytes(file.read_bytes().replace(b"int64", b"int46"))
    with pytest.raises(Unsupported, match=r'tensor "model\.w" is of dtype torch\.int46'):
        ckpttool.open(tmp_path / "d")


def test_buffer_names_of_a_pipeline_are_names(tmp_path: Path) -> None:
    with tarfile.open(FIXTURES / "deepspeed" / "parallel.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    source = tmp_path / "pipeline_z1_pp2_w4" / "ck"
    file = source / "global_step3" / "mp_rank_00_model_states.pt"
    tree = torch.load(file, weights_only=False)
    torch.save({**tree, "buffer_names": [*tree["buffer_names"], torch.device("cpu")]}, file)
    with pytest.raises(Corrupt, match="buffer_names is"):
        ckpttool.open(source)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("more", [{}, {b"x": False}], ids=["keys", "odd-keys"])
@pytest.mark.parametrize("rates", [[0.01, {}], [{}, 0.01], [[{}], 3]], ids=str)
def test_torch_loads_a_list_with_an_empty_dict(rates: list[Any], more: dict[Any, Any], tmp_path: Path) -> None:
    """As the state of a LambdaLR is that has a function and a callable object. Torch takes such a list apart when it saves, and writes nothing of the
    dict; it leaves the dict out when it loads, and asks for the whole list, which its own save does not have."""
    torch.save({"model": {"w": torch.ones(2)}, "scheduler": {"lr_lambdas": rates, **more}}, tmp_path / "source.pt")
    ckpttool.convert(tmp_path / "source.pt", tmp_path / "dcp", to="dcp", world_size=1)
    loaded = {"scheduler": {"lr_lambdas": [{} if x == {} else None for x in rates]}}
    dcp.load(loaded, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert loaded["scheduler"]["lr_lambdas"] == rates
    assert ckpttool.diff(tmp_path / "source.pt", tmp_path / "dcp").equal


NAMED_GROUPS: dict[str, Any] = {
    "options": {"decay": {"lr": 0.1, "params": ["w"]}},
    "tensors": {"w": {"exp_avg": torch.ones(1)}},
    "a number and a name": {"0": {"lr": 0.1, "params": ["w"]}, "decay": {"lr": torch.tensor(0.1)}},
}


@pytest.mark.parametrize("groups", NAMED_GROUPS.values(), ids=NAMED_GROUPS)
def test_param_groups_with_names_are_kept_or_refused(groups: dict[str, Any], tmp_path: Path) -> None:
    """Found by tests/torture: fuzz:full-ours:1795917141513."""
    w = torch.arange(6.0).view(2, 3)
    state = {"w": {"step": torch.tensor(3.0), "exp_avg": w + 1, "exp_avg_sq": w + 2}}
    torch.save({"model": {"w": w}, "optim": {"state": state, "param_groups": groups}}, tmp_path / "x.pt")
    ckpttool.inspect(tmp_path / "x.pt"), ckpttool.doctor(tmp_path / "x.pt")
    ckpttool.convert(tmp_path / "x.pt", tmp_path / "dcp", to="dcp", world_size=2)
    assert ckpttool.digest(tmp_path / "dcp").digest == ckpttool.digest(tmp_path / "x.pt").digest
    for to in ("zero1", "zero3", "fsdp1", "universal", "megatron", "trainer", "torchtune", "lightning"):
        world = None if to in ("universal", "torchtune") else 2
        with pytest.raises(Unsupported, match=r"param.group"):
            ckpttool.convert(tmp_path / "x.pt", tmp_path / "out", to=to, world_size=world)
    for to in ("zero1", "fsdp1"):
        done = ckpttool.convert(tmp_path / "x.pt", tmp_path / to, to=to, world_size=2, drop=True)
        assert done.verified and all(d[0].startswith("optim.param_groups.") for d in done.dropped)


@pytest.mark.parametrize("value", [3, None, "x", {"k": 1}], ids=str)
def test_a_value_in_the_state_dict_of_a_model_is_kept_or_refused(value: object, tmp_path: Path) -> None:
    """Found by all targets of a mutant of tests/torture: full-legacy:2026112910171."""
    w = torch.arange(6.0).view(2, 3)
    state = {"w": {"step": torch.tensor(3.0), "exp_avg": w + 1, "exp_avg_sq": w + 2}}
    optim = {"state": state, "param_groups": [{"lr": 0.1, "params": ["w"]}]}
    torch.save({"model": {"w": w, "seen": value}, "optim": optim}, tmp_path / "x.pt")
    for to in ("zero1", "zero3", "fsdp1", "universal", "torchtitan", "torchtune", "llamafactory"):
        world = None if to in ("universal", "torchtune") else 2
        with pytest.raises(Unsupported, match=r"first \"model\.seen.*extra state of a module"):
            ckpttool.convert(tmp_path / "x.pt", tmp_path / to, to=to, world_size=world)
        done = ckpttool.convert(tmp_path / "x.pt", tmp_path / to, to=to, world_size=world, drop=True)
        assert done.verified and [d[0].startswith("model.seen") for d in done.dropped] == [True]
    for to in ("dcp", "trainer", "lightning"):
        assert ckpttool.convert(tmp_path / "x.pt", tmp_path / to, to=to, world_size=2).dropped == []


def test_a_number_that_one_parameter_of_a_flat_tensor_has_is_dropped_or_refused(tmp_path: Path) -> None:
    """Found by all targets of a mutant of tests/torture: full:2026112910074."""
    w = {"a": torch.ones(2, 3), "b": torch.ones(3)}
    state: dict[str, Any] = {n: {"step": torch.tensor(3.0), "exp_avg": t, "exp_avg_sq": t} for n, t in w.items()}
    optim = {"state": state | {"b": {**state["b"], "seen": 1}}, "param_groups": [{"lr": 0.1, "params": ["a", "b"]}]}
    torch.save({"model": w, "optim": optim}, tmp_path / "x.pt")
    for to in ("zero1", "zero3"):
        with pytest.raises(Unsupported, match=r"optim\.state\.b\.seen.*; a has none"):
            ckpttool.convert(tmp_path / "x.pt", tmp_path / to, to=to, world_size=2)
        done = ckpttool.convert(tmp_path / "x.pt", tmp_path / to, to=to, world_size=2, drop=True)
        assert [d[0] for d in done.dropped] == ["optim.state.b.seen"]


def test_torchtune_has_no_state_of_a_parameter_without_a_weight(tmp_path: Path) -> None:
    """Found by all targets of a mutant of tests/torture: full-legacy:2026112940086."""
    state = {n: {"step": torch.tensor(3.0), "exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)} for n in ("a", "b")}
    optim = {"state": state, "param_groups": [{"lr": 0.1, "params": ["a", "b"]}]}
    torch.save({"model": {"a": torch.ones(2)}, "optim": optim}, tmp_path / "x.pt")
    with pytest.raises(Unsupported, match=r'1 parameter that the model does not have, first "b"'):
        ckpttool.convert(tmp_path / "x.pt", tmp_path / "out", to="torchtune")


@pytest.mark.parametrize(
    "slot", [{"k": 1}, [torch.ones(2), []], None], ids=["a dict", "a list with an empty list", "None"]
)
def test_what_optimizers_keep_in_a_slot_is_kept_by_every_layout_that_has_slots(slot: object, tmp_path: Path) -> None:
    """SOAP has [tensor, []] for a dimension that it does not precondition, and None before its first step."""
    w = {"a": torch.ones(2, 3), "b": torch.ones(3)}
    state = {n: {"step": torch.tensor(3.0), "exp_avg": t, "Q": slot} for n, t in w.items()}
    optim = {"state": state, "param_groups": [{"lr": 0.1, "params": ["a", "b"]}]}
    torch.save({"model": w, "optim": optim}, tmp_path / "x.pt")
    for to in ("torchtitan", "trainer", "lightning", "accelerate", "dcp", *(["fsdp1"] if slot is None else [])):
        done = ckpttool.convert(tmp_path / "x.pt", tmp_path / to, to=to, world_size=2)
        assert done.verified and done.dropped == [], to
