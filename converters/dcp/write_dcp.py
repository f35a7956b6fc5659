"""Writes dcp: one data file per rank, and `.metadata`; dcp.py describes both."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import NamedTuple

from ckpttool.errors import Unsupported, argument
from ckpttool.formats import torch_pickles, zip_bytes
from ckpttool.formats.stored_tensors import flatten_like_dcp
from ckpttool.index import boxes
from ckpttool.index.checkpoint import (
    ITEMSIZE,
    Checkpoint,
    Chunks,
    Path,
    TensorEntry,
    Value,
    joined,
)
from ckpttool.index.composites import Composite, class_label, collapse_composites
from ckpttool.index.draft import Draft, DraftFile, Written
from ckpttool.index.names import ROLES
from ckpttool.index.optimizers import find_optimizers
from ckpttool.index.trees import check_no_leaf_inside_leaf
from ckpttool.layouts import WriteOptions, tree_of
from ckpttool.printable import list_first
from ckpttool.storage.source import Source

from ..mesh_plans import MeshPlan
from ..meshes import RankBox
from ..options import MeshOptions
from .dcp_metadata import META, STORAGE
from .object_items import Parts, Whole, divide_object_rows

__all__ = ["list_missing_options", "list_missing_steps", "write"]

#: The options of torch.optim.AdamW's param groups beyond those of any Adam, with their defaults (torch 2.13).
_ADAMW_OPTIONS: dict[str, object] = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}


def list_missing_options(ckpt: Checkpoint) -> dict[Path, object]:
    """Return {canonical path: value} of the options that jobs with torch's optimizers and schedulers have in their
    param groups and that those of the checkpoint lack; {} if there are none.

    torch.distributed.checkpoint raises for every entry that a job has and a checkpoint lacks.

    AdamW's own options, with its defaults: FusedAdam (DeepSpeed, TransformerEngine, Apex), which has bias_correction,
    OLMo-core's SkipStepAdamW and the AdamW of older releases of torch, which has amsgrad, lack them. Groups that have
    some of them otherwise are of another optimizer of torch's, and are left as they are; so are those of optimizers
    whose state is not Adam's, and of DeepSpeed's Lamb, which has max_coeff.

    initial_lr, which any scheduler of torch puts there: its base_lrs, else max_lr of the group
    (Megatron-Core), else its lr.
    """
    groups: dict[Path, dict[str, object]] = {}
    for path, leaf in ckpt.leaves().items():
        if path[:2] == ("optim", "param_groups") and len(path) > 3:
            groups.setdefault(path[:3], {})[str(path[3])] = leaf
    others = {n for found in find_optimizers(ckpt) if found.name != "AdamW or Adam" for n in found.slots}
    made: dict[Path, object] = {
        (*at, key): default
        for at, group in groups.items()
        if {"betas", "eps"} <= group.keys() and group.get("bias_correction", True) is not False
        if "max_coeff" not in group and not (isinstance(of := group.get("params"), list) and others.intersection(of))
        if {"bias_correction", "amsgrad"} & group.keys() or not _ADAMW_OPTIONS.keys() & group.keys()
        for key, default in _ADAMW_OPTIONS.items()
        if key not in group
    }
    rates = ckpt.value("scheduler.base_lrs")
    if not isinstance(rates, list) or len(rates) != len(groups):
        rates = [group.get("max_lr", group.get("lr")) for group in groups.values()]
    for (at, group), rate in zip(groups.items(), rates, strict=True):
        if {"params", "lr"} <= group.keys() and "initial_lr" not in group and type(rate) in (int, float):
            made[*at, "initial_lr"] = rate
    return made


def list_missing_steps(ckpt: Checkpoint) -> dict[Path, object]:
    """Return {canonical path: steps} of the counts that torch's Adam and AdamW keep for each parameter, where an
    optimizer has one for a group instead, as FusedAdam of Apex and TransformerEngine; {} if there are none.

    A group's count of 0 is none: DeepSpeed's FusedAdam leaves it there.
    """
    counts: list[tuple[list[str], float]] = []  # of each group: its parameters, its step
    for v in ckpt.values.values():
        step = ckpt.value(joined((*v.path[:3], "step"))) if v.option == "params" else None
        if isinstance(step, (int, float)) and type(step) is not bool and step > 0 and isinstance(v.data, list):
            counts.append((v.data, step))
    if not counts:
        return {}
    leaves = ckpt.leaves()
    of_adam = {n for found in find_optimizers(ckpt) if found.name == "AdamW or Adam" for n in found.slots}
    steps = {("optim", "state", n, "step"): step for listed, step in counts for n in listed if n in of_adam}
    return {p: step for p, step in steps.items() if p not in leaves}


def _describe_missing_entries(ckpt: Checkpoint) -> list[str]:
    """Return notes on entries that dcp.load asks for in a job with torch's AdamW or a scheduler of torch, and that the
    optimizer lacks, with what loads it all the same."""
    lacking = dict.fromkeys(str(p[3]) for p in list_missing_options(ckpt))
    asked, notes = [], []
    if of_adamw := [key for key in lacking if key in _ADAMW_OPTIONS]:
        asked.append(f"{', '.join(of_adamw)}, for which dcp.load asks in a job with torch's AdamW")
    if "initial_lr" in lacking and any(p[0] == "scheduler" for p in ckpt.leaves()):
        asked.append("initial_lr, for which dcp.load asks in a job with a scheduler of torch")
    if asked:
        notes.append(
            f"the param groups lack {'; and '.join(asked)}: `ckpttool.load(model, optimizer, DIR)` keeps the job's own "
            "there, and so does `dcp.load(..., planner=DefaultLoadPlanner(allow_partial_load=True))`"
        )
    if steps := list_missing_steps(ckpt):
        notes.append(
            f"the steps of the optimizer ({list_first(dict.fromkeys(steps.values()))}) are in its param groups alone, "
            "and a job with torch's AdamW keeps them by parameter: after `dcp.load(..., planner=DefaultLoadPlanner("
            "allow_partial_load=True))` give each `optimizer.state[p]` that step, as a tensor; the folders of "
            f"trainers, as {argument('to', 'accelerate')}, have them by parameter"
        )
    return notes


def write(ckpt: Checkpoint, source: Source, options: WriteOptions) -> Draft:
    """Draft a folder for an FSDP2 job of `options.world_size` ranks, or of as many as saved the source, or for a job
    with a mesh.

    Raises:
        UsageError: no world size was given and the source has none, or a mesh does not fit the model.
        Unsupported: ranks would cut an object of a tensor subclass inside one of its quantisation blocks.
        Corrupt: an entry is inside another one, so that no job could load both.
    """
    world = options.ranks(ckpt)
    mesh = options.of(MeshOptions).sizes
    plan = None if mesh is None else MeshPlan(ckpt, mesh, options)
    files = [f"__{r}_0.distcp" for r in range(world if mesh is None else mesh.replica)]
    tree, notes = tree_of(collapse_composites(ckpt.leaves()), _select_origin(ckpt), None, options)
    check_no_leaf_inside_leaf(tree)
    parts = Parts(_measure_item_frame)
    leaves = _sort_leaves(tree)
    objects, values = leaves.objects, leaves.values
    at = [len(leaves.values_bytes)] + [0] * (len(files) - 1)
    tensors = _place_tensors(ckpt, leaves, parts, at, plan, options)
    if plan is not None:
        notes.append(plan.note)
    if options.tree is None:  # a trainer's tree is written with what its job asks for
        notes += _describe_missing_entries(ckpt)
    out = Checkpoint("dcp", options.target, world, [*files, ".metadata"], [*at, 0], tensors, ckpt.values)
    draft_files = [
        DraftFile(f, n, leaves.values_bytes if i == 0 else b"", frames_alone=not objects and not leaves.wholes)
        for i, (f, n) in enumerate(zip(files, at, strict=True))
    ]
    # at most: what a chunk or a value takes, and names, which are there three times
    most = 240 * (sum(len(t.chunks) for t in tensors.values()) + len(values)) + 3 * sum(map(len, tensors)) + 1000
    draft_files.append(DraftFile(".metadata", most, lambda: _pickle_metadata(out, leaves.paths, values, parts)))
    sources = {
        name: ckpt.tensors[name if t.path[0] != "replica" else joined(t.path[2:])] for name, t in tensors.items()
    }
    if objects:
        kinds = ", ".join(dict.fromkeys(class_label(found.about) for found in objects.values()))
        notes.append(
            f"{len(set(map(id, objects.values()))):,} tensors are objects again ({kinds}): a job imports torchao "
            "before it loads them"
        )

    def before(name: str, t: TensorEntry, row: int, written: Sequence[Written]) -> bytes:
        return (
            parts.before(name, t.chunks.file[row])
            if name in parts.inside
            else _make_item_frame(t.dtype, t.chunks.shape_of(row))[0]
        )

    def after(name: str, t: TensorEntry, row: int, written: Sequence[Written]) -> bytes:
        return (
            parts.after(name, t.chunks.file[row], written)
            if name in parts.inside
            else _fill_trailer(t.dtype, t.chunks.shape_of(row), written[-1][2])
        )

    apart = {n: v for n, v in ckpt.values.items() if _is_flattened(v)}
    return Draft(out, sources, draft_files, before=before, after=after, notes=notes, taken_apart=apart)


class _Leaves(NamedTuple):
    """The leaves of the state dict to write, by what they are. Objects have an entry for each tensor inside, under its
    canonical name."""

    paths: dict[str, Path]  # of tensors, by canonical name; of an object of a tensor subclass, by that of its first
    objects: dict[str, Composite]
    wholes: dict[str, tuple[Path, Whole]]
    values: list[tuple[Path, int, int]]  # path, offset in rank 0's file, length
    values_bytes: bytes  # the items of `values`, with which that file begins


def _sort_leaves(tree: Mapping[Path, object]) -> _Leaves:
    """Sort the leaves of a state dict, {path: leaf}, by what they are, and pickle the values among them."""
    out, head = _Leaves({}, {}, {}, [], b""), bytearray()
    for path, leaf in tree.items():
        if isinstance(leaf, TensorEntry):
            out.paths[joined(leaf.path)] = path
        elif isinstance(leaf, Composite):
            out.objects.update(dict.fromkeys((joined(t.path) for t in leaf.tensors.values()), leaf))
            out.paths[joined(next(iter(leaf.tensors.values())).path)] = path
        elif isinstance(leaf, Whole):
            out.wholes.update(dict.fromkeys((joined(t.path) for t in leaf.tensors()), (path, leaf)))
        else:
            for at_path, data in flatten_like_dcp(leaf, path).items():
                item = torch_pickles.save_small_file(data)
                out.values.append((at_path, len(head), len(item)))
                head += item
    return out._replace(values_bytes=bytes(head))


def _place_tensors(
    ckpt: Checkpoint, leaves: _Leaves, parts: Parts, at: list[int], plan: MeshPlan | None, options: WriteOptions
) -> dict[str, TensorEntry]:
    """Place all tensors in the ranks' files, in the order of the checkpoint, and return {name: entry to write}.

    Args:
        ckpt: what is written.
        leaves: the leaves of its state dict; `values` gets the objects that are one item although tensors are inside.
        parts: gets the items of objects.
        at: size of each rank's file so far, in bytes; updated in place.
        plan: how a mesh divides tensors; None: each rank gets some rows.
        options: which dtype each tensor is written in.

    Raises:
        Unsupported: ranks would cut an object of a tensor subclass inside one of its quantisation blocks.
    """
    out: dict[str, TensorEntry] = {}
    for name, stored in ckpt.tensors.items():
        if (found := leaves.objects.get(name)) is not None:
            if name not in parts.placed:
                sizes = _divide_object_rows(found, len(at), plan) if _is_sharded(found) else []
                out |= parts.place(found, sizes, at)
        elif name in leaves.wholes:
            if name not in parts.inside:
                path, whole = leaves.wholes[name]
                inside, begins, length = parts.place_whole(whole, at)
                out |= inside
                leaves.values.append((path, begins, length))
        else:
            t = replace(stored, dtype=options.cast(name, stored.dtype))
            if plan is not None and _is_sharded(t):
                chunks = _place_boxes(t, plan.mesh.boxes(name, t.shape, plan.cut(t)), at)
            else:
                chunks = _place_chunks(t, boxes.chunk_sizes(t.shape[0], len(at)) if _is_sharded(t) else [], at)
            out[name] = replace(t, chunks=chunks, coding="raw")
    return out


def _is_flattened(value: Value) -> bool:
    """Return whether DCP stores a value, a dict or an instance of a dict subclass, as one entry per key."""
    return list(flatten_like_dcp(value.data, value.path)) != [value.path]


def _select_origin(ckpt: Checkpoint) -> dict[Path, Path]:
    """Return `ckpt.origin`, {canonical path: path in the user's own tree}, without paths that do not hold in DCP:

    - numbers of the optimizer's parameters, which a file of one process has where a job of several ranks asks for names
      (kept if several ranks saved them);
    - a dict under `trainer` or `extra` that DCP flattens: a reader would take its entries for those of the component.
    """
    extra = (v for v in ckpt.values.values() if v.path[0] == "extra")
    apart = {v.path for v in extra if isinstance(v.data, dict) or _is_flattened(v)}
    origin = {
        q: p
        for q, p in ckpt.origin.items()
        if not (q in apart and len(p) == 1 and ROLES.get(str(p[0]), p[0]) in ("trainer", "extra"))
    }
    if ckpt.world_size is not None:
        return origin
    return {q: p for q, p in origin.items() if not (q[:2] == ("optim", "params") and len(q) == 3 and type(p[0]) is int)}


def _place_chunks(t: TensorEntry, sizes: list[int], at: list[int]) -> Chunks:
    """Place the rows of a tensor in the ranks' files and return the chunks.

    Args:
        t: the tensor, with the dtype to write.
        sizes: number of rows that ranks 0, 1, ... get; empty: rank 0 gets all of it.
        at: size of each rank's file so far, in bytes; updated in place.
    """
    chunks = Chunks(len(t.shape))
    if not sizes:
        before, after = _measure_item_frame(t.dtype, t.shape)
        chunks.add((0,) * len(t.shape), t.shape, 0, at[0] + before, t.nbytes)
        at[0] += before + t.nbytes + after
        return chunks
    ndim, rest = len(t.shape), t.shape[1:]
    row_bytes = prod(rest) * ITEMSIZE[t.dtype]
    frames = {n: _measure_item_frame(t.dtype, (n, *rest)) for n in set(sizes) if n}
    sizes = [n for n in sizes if n]  # ranks beyond the data have none, and come last
    for rank, n in enumerate(sizes):
        before, after = frames[n]
        chunks.offset.append(at[rank] + before)
        at[rank] += before + n * row_bytes + after
    count = len(sizes)
    chunks.file.extend(range(count))
    chunks.length.extend(n * row_bytes for n in sizes)
    chunks.start, chunks.shape = array("q", [0]) * (count * ndim), array("q", t.shape) * count
    chunks.start[0::ndim] = array("q", [0, *accumulate(sizes[:-1])])
    chunks.shape[0::ndim] = array("q", sizes)
    return chunks


def _place_boxes(t: TensorEntry, given: list[RankBox], at: list[int]) -> Chunks:
    """Place the boxes into which a mesh divides a tensor in the ranks' files and return the chunks. `at`, the size of
    each file so far, is updated in place."""
    chunks = Chunks(len(t.shape))
    for box in given:
        before, after = _measure_item_frame(t.dtype, box.shape)
        length = prod(box.shape) * ITEMSIZE[t.dtype]
        chunks.add(box.start, box.shape, box.rank, at[box.rank] + before, length)
        at[box.rank] += before + length + after
    return chunks


def _divide_object_rows(found: Composite, ranks: int, plan: MeshPlan | None) -> list[int]:
    """Return how many rows of an object of a tensor subclass each of `ranks` ranks gets, by rank.

    Raises:
        Unsupported: a cut is inside a quantisation block, or tensor or expert parallelism divides it.
    """
    if plan is None:
        return divide_object_rows(found, ranks)
    if plan.divides(found.path):
        raise Unsupported(
            f'"{joined(found.path)}" is a {class_label(found.about)}, and ckpttool divides such objects by FSDP alone. '
            f"{argument('dequantize')} writes plain numbers.",
            code="CKPT0319",
        )
    out = [0] * ranks
    out[:: plan.mesh.tp] = divide_object_rows(found, ranks // plan.mesh.tp)
    return out


def _is_sharded(t: TensorEntry | Composite) -> bool:
    """Return whether FSDP2 shards a tensor: parameters and optimizer slots (exp_avg, ...) are; scalars, counters and
    other components are not."""
    of_parameter = t.path[0] in ("model", "optim", "replica") or t.path[:2] == ("extra", "master")
    if not of_parameter or not t.shape or t.numel == 0:
        return False
    return len(t.shape) > 1 or "float" in t.dtype or "complex" in t.dtype


@lru_cache(4096)
def _make_item_frame(dtype: str, shape: tuple[int, ...]) -> tuple[bytes, list[tuple[str, int, int, int, bool]]]:
    """Return (the bytes before an item's payload, the records of its zip).

    A record is (name, byte in the item where its header begins, bytes of content, CRC32, whether a data descriptor
    follows it); the last one is the payload's, whose CRC32 is 0 here.
    """
    ref = torch_pickles.TensorRef(dtype, shape, "0", prod(shape))
    head, records = torch_pickles.make_head("archive", torch_pickles.pickle_tree(ref))
    header = zip_bytes.make_local_header("archive/data/0", prod(shape) * ITEMSIZE[dtype], None, len(head), 64)
    return head + header, [*records, ("archive/data/0", len(head), prod(shape) * ITEMSIZE[dtype], 0, True)]


@lru_cache(4096)
def _measure_item_frame(dtype: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return (bytes before, bytes after) the payload of an item, which is one torch.save zip."""
    return len(_make_item_frame(dtype, shape)[0]), len(_fill_trailer(dtype, shape, 0))


def _fill_trailer(dtype: str, shape: tuple[int, ...], crc: int) -> bytes:
    """Return the bytes after an item's payload, with its CRC32 `crc` put in at both places."""
    before, between, after = _split_trailer(dtype, shape)
    word = struct.pack("<I", crc)
    return b"".join((before, word, between, word, after))


@lru_cache(4096)
def _split_trailer(dtype: str, shape: tuple[int, ...]) -> tuple[bytes, bytes, bytes]:
    """Return the bytes after an item's payload without the two CRC32s: (before, between, after them)."""
    zero, ones = _make_trailer(dtype, shape, 0), _make_trailer(dtype, shape, 0xFFFFFFFF)
    differ = [i for i, (a, b) in enumerate(zip(zero, ones, strict=True)) if a != b]
    first, second = differ[0], differ[4]
    parts = zero[:first], zero[first + 4 : second], zero[second + 4 :]
    if (b"\xff" * 4).join(parts) != ones:
        raise AssertionError(f"the CRC32 of an item of {dtype} {shape} is not where it is written")
    return parts


def _make_trailer(dtype: str, shape: tuple[int, ...], crc: int) -> bytes:
    """Build the bytes after an item's payload, whose CRC32 is `crc`, from its zip records. `_fill_trailer` is
    faster."""
    head, records = _make_item_frame(dtype, shape)
    size = prod(shape) * ITEMSIZE[dtype]
    name, at, _, _, _ = records[-1]
    directory = zip_bytes.make_central_directory(
        [*records[:-1], (name, at, size, crc, True)], len(head) + size + zip_bytes.DATA_DESCRIPTOR_BYTES
    )
    return zip_bytes.make_data_descriptor(size, crc) + directory


class _Emitter:
    """The pickle of Metadata, protocol 2: globals and keys are memoized once, each chunk costs 40 bytes."""

    GLOBALS = (
        (META, "Metadata"),
        (META, "TensorStorageMetadata"),
        (META, "TensorProperties"),
        (META, "ChunkStorageMetadata"),
        (META, "BytesStorageMetadata"),
        (META, "MetadataIndex"),
        (META, "_MEM_FORMAT_ENCODING"),
        (STORAGE, "_StorageInfo"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
    )
    KEYS = (
        "properties",
        "size",
        "chunks",
        "offsets",
        "sizes",
        "fqn",
        "offset",
        "index",
        "relative_path",
        "length",
        "state_dict_metadata",
        "planner_data",
        "storage_data",
        "storage_meta",
        "version",
    )

    def __init__(self) -> None:
        self.out = bytearray(b"\x80\x02")
        self.memo: dict[object, bytes] = {}
        self.sizes: dict[tuple[int, ...], bytes] = {}
        codes = {name: f"c{module}\n{name}\n".encode() for module, name in self.GLOBALS}
        for key, code in (codes | {key: _pickle_text(key) for key in self.KEYS}).items():
            self._emit_memoized(key, code)
            self.out += b"0"

    def _emit_memoized(self, key: object, code: bytes) -> None:
        """Emit pickle code that pushes an object, and memoize the object; `memo[key]` is the code that gets it
        again."""
        n = len(self.memo)
        self.memo[key] = b"h" + bytes([n]) if n < 256 else b"j" + struct.pack("<I", n)
        self.out += code + (b"q" + bytes([n]) if n < 256 else b"r" + struct.pack("<I", n))

    def text(self, value: str) -> None:
        """Emit the pickle code of a string; if it was emitted before, of a reference to it."""
        if ("text", value) in self.memo:
            self.out += self.memo["text", value]
        else:
            self._emit_memoized(("text", value), _pickle_text(value))

    def size(self, shape: tuple[int, ...]) -> bytes:
        """Return the pickle code of torch.Size(shape); emits nothing."""
        if shape not in self.sizes:
            ints = b"".join(map(_pickle_int, shape))
            wrap = {0: b")", 1: ints + b"\x85", 2: ints + b"\x86", 3: ints + b"\x87"}.get(len(shape))
            self.sizes[shape] = self.memo["Size"] + (wrap or b"(" + ints + b"t") + b"\x85R"
        return self.sizes[shape]


def _pickle_int(n: int) -> bytes:
    """Return the pickle code of an integer, 0 or greater."""
    if n < 256:
        return b"K" + bytes([n])
    if n < 65536:
        return b"M" + struct.pack("<H", n)
    if n < 1 << 31:
        return b"J" + struct.pack("<i", n)
    raw = n.to_bytes(n.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def _pickle_text(value: str) -> bytes:
    """Return the pickle code of a string."""
    raw = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(raw)) + raw


def _pickle_metadata(
    ckpt: Checkpoint, paths: dict[str, Path], values: list[tuple[Path, int, int]], parts: Parts
) -> bytes:
    """Return the bytes of .metadata.

    Args:
        ckpt: what is written, with the places of its tensors.
        paths: {canonical name of a tensor: its path}; an object's is under the name of its first tensor.
        values: (path, byte in rank 0's file, bytes) of each value.
        parts: the objects of tensor subclasses, which .metadata lists as one tensor each.
    """
    e = _Emitter()
    m, out = e.memo, e.out
    keys = {name: joined(paths[name]) for name in paths}
    out += m["Metadata"] + b")\x81}(" + m["state_dict_metadata"] + b"}("
    properties: dict[str, bytes] = {}
    for name, t, _ in parts.tensors(ckpt.tensors):
        e.text(keys[name])
        if t.dtype not in properties:
            layout = m["_get_layout"] + _pickle_text("torch.strided") + b"\x85R"
            memory = m["_MEM_FORMAT_ENCODING"] + b"K\x00\x85R"
            properties[t.dtype] = (
                m["TensorProperties"]
                + b")\x81(ctorch\n"
                + t.dtype.encode()
                + b"\n"
                + layout
                + b"\x89"
                + memory
                + b"\x89tb"
            )
        box = m["ChunkStorageMetadata"] + b")\x81}(" + m["offsets"]
        rows = b"".join(box + e.size(start) + m["sizes"] + e.size(shape) + b"ub" for start, shape in t.chunks.boxes())
        out += m["TensorStorageMetadata"] + b")\x81}(" + m["properties"] + properties[t.dtype]
        out += m["size"] + e.size(t.shape) + m["chunks"] + b"](" + rows + b"eub"
    for path, _, _ in values:
        e.text(joined(path))
        out += m["BytesStorageMetadata"] + b")\x81"
    out += b"u" + m["planner_data"] + b"}("
    for path in [*(paths[name] for name, _, _ in parts.tensors(ckpt.tensors)), *(path for path, _, _ in values)]:
        e.text(joined(path))
        out += b"("
        for p in path:
            if isinstance(p, int):
                out += _pickle_int(p)
            else:
                e.text(p)
        out += b"t"
    out += b"u" + m["storage_data"] + b"}("
    for name, t, items in parts.tensors(ckpt.tensors):
        c = t.chunks
        for k, (start, shape) in enumerate(c.boxes()):
            if items is not None:
                number, offset, length = items[k]
                _emit_storage_entry(e, keys[name], e.size(start), k, ckpt.files[number], offset, length)
                continue
            before, after = _measure_item_frame(t.dtype, shape)
            file, offset = ckpt.files[c.file[k]], c.offset[k] - before
            _emit_storage_entry(e, keys[name], e.size(start), k, file, offset, c.length[k] + before + after)
    for path, offset, length in values:
        _emit_storage_entry(e, joined(path), b"N", None, ckpt.files[0], offset, length)
    out += b"u" + m["storage_meta"] + b"N" + m["version"] + _pickle_text("1.0.0") + b"ub."
    return bytes(out)


def _emit_storage_entry(
    e: _Emitter, key: str, at: bytes, index: int | None, file: str, offset: int, length: int
) -> None:
    """Emit one entry of storage_data, the place of one item.

    Args:
        e: where the code goes.
        key: flat key of the tensor or value.
        at: pickle code of the start of its chunk in the tensor; of None for a value.
        index: number of the chunk; None for a value.
        file: name of the file that holds the item.
        offset: where the item begins in the file, in bytes.
        length: its bytes.
    """
    m, out = e.memo, e.out
    out += m["MetadataIndex"] + b")\x81}(" + m["fqn"]
    e.text(key)
    out += m["offset"] + at + m["index"] + (b"N" if index is None else _pickle_int(index)) + b"ub"
    out += m["_StorageInfo"] + b")\x81}(" + m["relative_path"]
    e.text(file)
    out += m["offset"] + _pickle_int(offset) + m["length"] + _pickle_int(length) + b"ub"
