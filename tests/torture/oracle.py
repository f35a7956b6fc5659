"""What the real readers read, what ckpttool reads, and whether that is the same.

A reading is {name or path: what}, with a tensor as (dtype, shape, BLAKE3 of its row-major bytes) and a value as text that
two equal values share. The readers are torch.load(weights_only=True), torch.distributed.checkpoint, safetensors and
DeepSpeed's zero_to_fp32, and for what that leaves out a few lines that put the ranks' parts together as its engine does.

Nothing of a mutant is executed here either: TORCH_FORCE_WEIGHTS_ONLY_LOAD makes every torch.load the restricted one, and
`.metadata`, which torch unpickles without any restriction, is unpickled with exactly torch's own classes.
"""

from __future__ import annotations

import io
import json
import logging
import os
import pickle
import re
import struct
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint.filesystem as dcp_filesystem
from blake3 import blake3
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import ckpttool
from ckpttool.engine.copy.tensor_digests import tensor_digests
from ckpttool.formats.pickles import Global
from ckpttool.formats.stored_tensors import Inline
from ckpttool.index import names
from ckpttool.index.checkpoint import joined
from ckpttool.index.fqns import WRAPPERS

Reading = dict[Any, Any]
Tree = dict[tuple[Any, ...], Any]
UNKNOWN = "?"  # a value that one side builds and the other carries as data: not compared


class Stopped(BaseException):
    """The alarm clock rang."""


class Refused(Exception):
    """The real reader does not read it."""


# --------------------------------------------------------------------------------------------------- what one thing is


def of_tensor(t: Tensor) -> tuple[Any, ...]:
    """dtype, shape, digest; of a sparse tensor, or one without bytes, only what it is."""
    if t.layout != torch.strided or t.is_meta:
        return str(t.layout) if t.layout != torch.strided else "meta", tuple(t.shape)
    try:
        t = t.detach().resolve_conj().resolve_neg().contiguous()
    except NotImplementedError:  # a negated bool, which torch loads and cannot compute with
        return "negated", tuple(t.shape)
    if t.dtype == torch.bool:  # a byte of neither 0 nor 1, which ckpttool keeps, is 1 after any copy_ of torch's
        t = t.view(torch.uint8) != 0
    row = t.reshape(-1)
    row = row.view(torch.uint8) if t.element_size() == 1 else row  # torch cannot copy all of these
    row = row.clone(memory_format=torch.contiguous_format)  # one element may have any stride
    raw = row.view(torch.uint8).numpy().tobytes() if t.numel() else b""
    return str(t.dtype).removeprefix("torch."), tuple(t.shape), blake3(raw).hexdigest()


def text_of(x: Any) -> str:
    """The same text for equal values, whoever read them; UNKNOWN inside it matches anything."""
    if isinstance(x, Tensor):
        return repr(of_tensor(x))
    if isinstance(x, Inline):
        return repr((x.dtype, tuple(x.shape), blake3(x.data).hexdigest()))
    if isinstance(x, float):
        return "float " + struct.pack(">d", x).hex() if x == x else "float nan"
    if x is None or isinstance(x, (bool, int, str, bytes, bytearray, complex)):
        return f"{type(x).__name__} {x!r}"
    if isinstance(x, (list, tuple)) and not isinstance(x, Global):
        kind = "list" if isinstance(x, list) else "tuple"
        return f"{kind}({', '.join(map(text_of, x))})"
    if isinstance(x, dict):
        return "dict(" + ", ".join(f"{text_of(k)}: {text_of(v)}" for k, v in x.items()) + ")"
    if isinstance(x, (set, frozenset)):
        return "set(" + ", ".join(sorted(map(text_of, x))) + ")"
    return UNKNOWN


def same(a: Any, b: Any) -> bool:
    """Whether two entries of readings are equal."""
    if isinstance(a, str) and isinstance(b, str) and UNKNOWN in (a + b):
        return True
    return bool(a == b)


# --------------------------------------------------------------------------------------------------------- our reading


def ours(path: Path, **how: Any) -> Reading:
    """{canonical name: entry} of what ckpttool accepts, after it has read and checked every byte.

    With deltas (`apply`) it is what a conversion wrote beside `path`.
    """
    if "apply" in how:
        made = path.with_suffix(f".applied-{os.getpid()}.pt")  # workers share the seeds
        ckpttool.convert(path, made, drop=True, **how)
        try:
            return ours(made)
        finally:
            made.unlink()
    with ckpttool.open(path, **how) as opened:
        ckpt = opened.locate()
        digests = tensor_digests(ckpt.tensors, opened.source, ckpt.files, ckpt.records, lambda *_: None)
        opened.source.assert_unchanged()
        for n in [n for n, t in ckpt.tensors.items() if t.dtype == "bool"]:
            digests[n] = blake3(bytes(map(bool, opened.read(n)))).hexdigest()  # as in `of_tensor`
        out: Reading = {n: (t.dtype, tuple(t.shape), digests[n]) for n, t in ckpt.tensors.items()}
        out.update((n, text_of(v.data)) for n, v in ckpt.values.items())
        return out


# ----------------------------------------------------------------------------------------------------- restricted torch

_METADATA_CLASSES = {
    ("torch.distributed.checkpoint.metadata", n)
    for n in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "MetadataIndex",
              "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING")
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"), ("torch", "Size"), ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"), ("pathlib", "PosixPath"), ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name == "_StorageInfo":  # OLMo-core has a copy of the class
            module = dcp_filesystem.__name__
        known = (module, name) in _METADATA_CLASSES or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        )
        if not known:
            raise pickle.UnpicklingError(f"{module}.{name} is not of torch's metadata")
        return super().find_class(module, name)


def _unpickled(data: bytes) -> Any:
    """Unpickle `.metadata`, except a tuple of 2**40 elements, which torch hashes for hours where no alarm clock interrupts it."""
    if b"2\x86" * 20 in data:
        raise pickle.UnpicklingError("a tuple that unfolds without bound")
    return _Unpickler(io.BytesIO(data)).load()


def restrict() -> None:
    """From here on torch unpickles nothing but data, in this process."""
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    torch.use_deterministic_algorithms(True)  # memory that no file fills is NaN, and not yesterday's right numbers
    torch.utils.deterministic.fill_uninitialized_memory = True
    restricted = types.ModuleType("restricted_pickle")
    restricted.load = lambda f: _unpickled(f.read())  # type: ignore[attr-defined]
    restricted.loads = _unpickled  # type: ignore[attr-defined]
    dcp_filesystem.pickle = restricted  # type: ignore[attr-defined]
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    torch.serialization.add_safe_globals([DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address])


@contextmanager
def _silent() -> Iterator[None]:
    """Without what readers print."""
    real = sys.stdout, sys.stderr
    sys.stdout = sys.stderr = io.StringIO()
    try:
        yield
    finally:
        sys.stdout, sys.stderr = real


def load(path: Path) -> Any:
    """torch.load, restricted."""
    return torch.load(path, map_location="cpu", weights_only=True, mmap=False)


# -------------------------------------------------------------------------------------------------------- their readings


def flat(tree: Any) -> Tree:
    """{path: leaf} by the rule of torch.distributed.checkpoint: dicts with string keys, and lists that hold such or tensors."""
    out: Tree = {}

    def splits(path: tuple[Any, ...], x: Any) -> bool:
        if isinstance(x, list):
            return any(isinstance(v, Tensor) or splits((*path, i), v) for i, v in enumerate(x))
        numbered = path[-1:] == ("state",) and isinstance(x, dict) and all(type(k) is int for k in x)
        return (
            isinstance(x, dict)
            and bool(x)
            and (all(isinstance(k, str) for k in x) or (numbered and all(isinstance(v, dict) for v in x.values())))
        )

    def walk(path: tuple[Any, ...], x: Any) -> None:
        if not splits(path, x):
            out[path] = x
            return
        for k, v in x.items() if isinstance(x, dict) else enumerate(x):
            walk((*path, str(k) if isinstance(x, dict) else k), v)

    walk((), tree)
    return out


def torch_file(path: Path) -> Tree:
    """A .pt file."""
    return flat(load(path))


def dcp(path: Path) -> Tree:
    """A DCP folder, by torch's own reader and planner."""
    tree: dict[str, Any] = {}
    planner = _EmptyStateDictLoadPlanner()
    _load_state_dict(tree, storage_reader=dcp_filesystem.FileSystemReader(path), planner=planner, no_dist=True)
    out: Tree = {}
    for key in planner.metadata.state_dict_metadata:  # type: ignore[union-attr]
        at = (planner.metadata.planner_data or {}).get(key, (key,))  # type: ignore[union-attr]
        found: Any = tree
        for part in at:
            found = found[part]
        out[tuple(at)] = found
    return out


def _refuse_fifos(path: Path) -> None:
    if odd := [p.name for p in path.iterdir() if p.is_fifo()]:
        raise OSError(f"{odd[0]} is a FIFO, which safetensors would wait for")


def dcp_safetensors(path: Path) -> Tree:
    """A DCP folder of safetensors files: parts by their names, put where .metadata says; torch's reader has no such thing."""
    _refuse_fifos(path)
    meta = dcp_filesystem.FileSystemReader(path).read_metadata()
    out: Tree = {}
    for key, entry in meta.state_dict_metadata.items():
        whole = torch.empty(entry.size, dtype=entry.properties.dtype)
        for chunk in entry.chunks:
            index = next(i for i in meta.storage_data if i.fqn == key and tuple(i.offset or ()) == tuple(chunk.offsets))
            part = load_file(path / meta.storage_data[index].relative_path)[key]
            box = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
            assert part.shape == whole[box].shape and part.dtype == whole.dtype
            whole[box] = part
        out[tuple((meta.planner_data or {}).get(key, (key,)))] = whole
    return out


def hf(path: Path) -> Tree:
    """safetensors files, one or those that an index names."""
    _refuse_fifos(path)
    index = path / "model.safetensors.index.json"
    if index.exists():
        of_file: dict[str, list[str]] = {}
        for n, f in json.loads(index.read_text())["weight_map"].items():
            of_file.setdefault(f, []).append(n)
        found: dict[str, Tensor] = {}
        for f, wanted in of_file.items():
            tensors = load_file(path / f)
            found.update((n, tensors[n]) for n in wanted)
            for n in set(tensors) - set(wanted):  # transformers loads whole files
                found.setdefault(n, tensors[n])
    else:
        found = load_file(path / "model.safetensors")
    return {("model", _OF_TORCHAO.sub(".weight.", n)): t for n, t in found.items()}


#: How torchao names the tensors of an object in a safetensors file.
_OF_TORCHAO = re.compile(r"\._weight_(?=\w+$)")


def _latest(path: Path, name: str = "latest") -> Path:
    return path / (path / name).read_text().strip()


def _ranks(folder: Path, ending: str) -> list[Any]:
    found = [p for p in folder.iterdir() if p.name.endswith(ending)]
    return [load(p) for p in sorted(found, key=lambda p: int(re.findall(r"rank_(\d+)_mp", p.name)[0]))]


def _weights(path: Path) -> dict[str, Tensor]:
    """DeepSpeed's zero_to_fp32."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with _silent():
        found = get_fp32_state_dict_from_zero_checkpoint(str(path), lazy_mode=True)
        empty = [n for n, t in found.items() if 0 in t.shape]  # the script cannot gather these
        return {n: torch.empty(t.shape, dtype=t.dtype) if n in empty else t.contiguous() for n, t in found.items()}


def _module(models: list[Any], out: Tree) -> None:
    """Buffers, frozen parameters and tied names, as the engine loads them: from the file of rank 0."""
    for name, t in models[0]["module"].items():
        if name in models[0]["buffer_names"] or (("model", name) not in out and t.numel()):
            out["model", name] = t
    for name, shape in (models[0].get("frozen_param_shapes") or {}).items():
        whole = torch.cat([m["frozen_param_fragments"][name].reshape(-1) for m in models])
        out["model", name] = whole[: torch.Size(shape).numel()].reshape(shape)
    for name, owner in models[0]["shared_params"].items():
        out["model", name] = out["model", owner]


def _slots(out: Tree, shapes: Mapping[str, Any], rows: list[Mapping[str, Any]], cut: Callable[..., Tensor]) -> None:
    for slot, first in rows[0].items():
        at = 0
        for name, shape in shapes.items():
            if not isinstance(first, Tensor):
                out["optim", "state", name, slot] = first
            elif first.ndim == 0:
                assert all(torch.equal(row[slot], first) for row in rows)
                out["optim", "state", name, slot] = first
            else:
                numel = torch.Size(shape).numel()
                out["optim", "state", name, slot] = cut([row[slot] for row in rows], at, numel).reshape(shape)
                at += -(-numel // len(rows)) if cut is _of_each else numel


def _of_each(parts: list[Tensor], at: int, numel: int) -> Tensor:
    """Stage 3: every rank has a part of every parameter."""
    part = -(-numel // len(parts))
    assert all(at + part <= len(p) for p in parts)
    return torch.cat([p[at : at + part] for p in parts])[:numel]


def _of_all(parts: list[Tensor], at: int, numel: int) -> Tensor:
    """Stages 1 and 2: the flat tensor is cut into ranks."""
    whole = torch.cat(parts)
    assert at + numel <= len(whole)
    return whole[at : at + numel]


def zero3(path: Path) -> Tree:
    """A ZeRO-3 save: weights by DeepSpeed, the rest as its engine finds it."""
    where = _latest(path)
    models, optims = (
        _ranks(where, "_model_states.pt"),
        [o["optimizer_state_dict"] for o in _ranks(where, "_optim_states.pt")],
    )
    out: Tree = {("model", n): t for n, t in _weights(path).items()}
    _module(models, out)
    for g, shapes in enumerate(models[0]["param_shapes"]):
        _slots(out, shapes, [o["optimizer_state_dict"]["state"].get(g, {}) for o in optims], _of_each)
    return out


def zero12(path: Path) -> Tree:
    """A save of stage 1 or 2."""
    where = _latest(path)
    models = [load(where / "mp_rank_00_model_states.pt")]
    optims = [o["optimizer_state_dict"] for o in _ranks(where, "_optim_states.pt")]
    out: Tree = {("model", n): t for n, t in _weights(path).items()}
    _module(models, out)
    for g, shapes in enumerate(models[0]["param_shapes"]):
        _slots(out, shapes, [o["base_optimizer_state"]["state"].get(g, {}) for o in optims], _of_all)
    return out


def zero0(path: Path) -> Tree:
    """A save of stage 0 with masters: one file."""
    tree = load(_latest(path) / "mp_rank_00_model_states.pt")
    named = list(tree["module"])
    out: Tree = {("model", n): t for n, t in tree["module"].items()}
    optimizer = tree["optimizer"]
    groups = optimizer["optimizer_state_dict"]["param_groups"]
    # torch's optimizers match numbers by their place in the groups, whatever they are
    name_of = {i: named[place] for place, i in enumerate(i for group in groups for i in group["params"])}
    for g, group in enumerate(groups):
        for k, i in enumerate(group["params"]):
            out["model", name_of[i]] = optimizer["fp32_groups"][g][k]
    for i, slots in optimizer["optimizer_state_dict"]["state"].items():
        out.update({("optim", "state", name_of.get(i, i), *path): x for path, x in flat(slots).items()})
    return out


def universal(path: Path) -> Tree:
    """A Universal Checkpoint: a folder a parameter."""
    where = _latest(path, "latest_universal")
    models = (
        _ranks(where, "model_states.pt")
        if any(where.glob("zero_pp*"))
        else [load(next(where.glob("*model_states.pt")))]
    )
    tree = models[0]
    shapes = {n: s for group in tree["param_shapes"] for n, s in group.items()}
    out: Tree = {}
    for name in shapes:  # its optimizer asks for the folders of what it trains, and for no others
        for file in (where / "zero" / name).glob("*.pt"):
            found = load(file)
            found = found["param"] if isinstance(found, dict) else found
            slot = file.name.removesuffix(".pt")
            if isinstance(found, Tensor) and found.ndim:
                found = found.reshape(shapes[name])
            out[("model", name) if slot == "fp32" else ("optim", "state", name, slot)] = found
    _module(models, out)
    return out


#: {oracle: (reader, {components that it reads})}; "seed" is no reader: what is accepted must be what the seed holds.
READERS: dict[str, tuple[Callable[[Path], Tree], frozenset[str] | None]] = {
    "torch": (torch_file, None), "dcp": (dcp, None), "dcp_safetensors": (dcp_safetensors, None), "hf": (hf, None),
    "hf_model": (hf, frozenset({"model"})), "zero3": (zero3, frozenset({"model", "optim.state"})), "zero12": (zero12, frozenset({"model", "optim.state"})),
    "zero0": (zero0, frozenset({"model", "optim.state"})), "universal": (universal, frozenset({"model", "optim.state"})),
}  # fmt: skip


def theirs(oracle: str, path: Path) -> Tree:
    """What the real reader reads.

    Raises:
        Refused: it does not.
    """
    try:
        return READERS[oracle][0](path)
    except Stopped:
        raise
    except BaseException as e:  # torch's CheckpointException is one
        said = str(e).strip().splitlines() or [""]
        if isinstance(e, CheckpointException):  # its text ends with the error of a rank
            said = [next((x for x in said if "Weights only load failed" in x), said[-1])]
        classes = re.findall(r"Unsupported (?:global|class).*?([\w.]+) was not an allowed", str(e))
        raise Refused(f"{type(e).__name__}: {said[0][:200]}{''.join(f' ({c})' for c in classes[:1])}") from None


def entry(x: Any) -> Any:
    """What `ours` has for the same thing."""
    return of_tensor(x) if isinstance(x, Tensor) else text_of(x)


def _once(mine: Reading, theirs: Reading) -> Reading:
    """Without our names of what they have under another one: tied names are stored once, and which they are is said elsewhere."""
    tied = set(theirs.values())
    return {n: x for n, x in mine.items() if n in theirs or x not in tied}


def differences(mine: Reading, tree: Tree, oracle: str) -> list[str]:
    """In what our reading is not theirs; [] where they are equal, by the names as they are or by canonical ones."""
    scope = READERS[oracle][1]
    if scope is not None:
        whole = tuple(
            f"{n}." for n, x in mine.items() if not isinstance(x, tuple)
        )  # values, with tensors inside or not
        if any(
            n.startswith("optim.state.") for n in whole
        ):  # state that is no dict of slots is kept as a value, by number
            whole = (*whole, "optim.state.")
        tree = {p: t for p, t in tree.items() if joined(p) in mine or not joined(p).startswith(whole)}
        mine = {n: x for n, x in mine.items() if n.startswith(tuple(f"{s}." for s in scope)) and isinstance(x, tuple)}
        tree = {p: t for p, t in tree.items() if isinstance(t, Tensor)}
        if oracle == "universal":  # stage 3 has the steps elsewhere
            mine = {n: x for n, x in mine.items() if x[1] or not n.startswith("optim.")}
            tree = {p: t for p, t in tree.items() if t.ndim or p[0] != "optim"}
    tree = {q: y for p, x in tree.items() for q, y in _elements(p, x, mine)}
    plain = {joined(p): entry(x) for p, x in tree.items()}
    if scope is not None:  # a script keeps the names of a compiled or wrapped module
        bare = {".".join(part for part in n.split(".") if part not in WRAPPERS): x for n, x in plain.items()}
        return _compared(_once(mine, plain), plain) and _compared(_once(mine, bare), bare)
    first = _compared(mine, plain)
    if not first:
        return first
    try:
        named = names.canonical(
            dict(tree), lambda x: tuple(x.shape) if isinstance(x, Tensor) else None, same=are_tied
        ).leaves
    except ckpttool.CkpttoolError as e:
        return [*first, f"their tree has no canonical names: {e}"]
    return _compared(mine, {joined(p): entry(x) for p, x in named.items()})


def _elements(path: tuple[Any, ...], x: Any, mine: Reading) -> list[tuple[tuple[Any, ...], Any]]:
    """A leaf; the param groups of an optimizer one by one, where nothing in them makes torch take their list apart."""
    if isinstance(x, list) and path[-1:] == ("param_groups",) and f"{joined(path)}.0" in mine:
        return [((*path, i), y) for i, y in enumerate(x)]
    return [(path, x)]


def are_tied(a: Any, b: Any) -> bool:
    return isinstance(a, Tensor) and isinstance(b, Tensor) and a.data_ptr() == b.data_ptr() and a.shape == b.shape


def _compared(a: Reading, b: Reading) -> list[str]:
    out = [f"{n}: only ckpttool has it" for n in a if n not in b]
    out += [f"{n}: only the oracle has it" for n in b if n not in a]
    out += [
        f"{n}: {str(a[n])[:150]} is not the oracle's {str(b[n])[:150]}" for n in a if n in b and not same(a[n], b[n])
    ]
    return out
