"""Megatron-Core's dist_checkpointing in the format torch_dist; megatron/__init__.py describes the files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ckpttool import bounded_json
from ckpttool.by_fields import ByFields
from ckpttool.errors import CkpttoolError, Corrupt, Unsupported, argument
from ckpttool.formats import stored_tensors, torch_zip
from ckpttool.formats.pickles import short
from ckpttool.index.checkpoint import Checkpoint, Leaves, Path, Replica, Salvage, TensorEntry, joined, same_value
from ckpttool.index.names import CanonicalState, original_path
from ckpttool.index.records import Records
from ckpttool.index.trees import nest
from ckpttool.layouts import Place, ReadOptions, checkpoint_of
from ckpttool.storage.overlay import LostBytes
from ckpttool.storage.source import Source

from .. import dcp
from ..dcp.dcp_metadata import read_index
from .keys import (
    BUCKETS,
    CHAINED,
    TRAINER,
    Key,
    name_param_groups,
    parse_common_state,
    parse_key,
    parse_object_key,
    replace_unnamed_optimizer,
)
from .stacked import take_layer, unflatten_ranges

__all__ = ["DistCheckpointing"]

_VERL = ("model", "optimizer", "extra")
_MOST_JSON = 1 << 20
_COMMON = "common_state/"  # the item that newer versions have instead of common.pt


def _read_backend(source: Source, folder: str) -> str | None:
    """Return sharded_backend of metadata.json, the name of the format, in a folder below the source ("" is the source
    itself).

    It is None if metadata.json does not state it, is missing, or is larger than 1 MiB.

    Raises:
        CkpttoolError: metadata.json is not JSON.
    """
    name = f"{folder}/metadata.json" if folder else "metadata.json"
    if "metadata.json" not in source.list(folder) or source.size(name) > _MOST_JSON:
        return None
    found = bounded_json.parse(source.read_all(name, _MOST_JSON), name)
    backend = found.get("sharded_backend") if isinstance(found, dict) else None
    return backend if isinstance(backend, str) else None


def _is_section(source: Source, folder: str) -> bool:
    """Return whether a folder below the source ("" is the source itself) was written by dist_checkpointing, even if its
    metadata.json is missing or damaged."""
    names = set(source.list(folder))
    if {".metadata", "common.pt"} <= names:
        return True
    try:
        return _read_backend(source, folder) is not None
    except CkpttoolError:
        return ".metadata" in names


class DistCheckpointing:
    """The dialect of folders of dist_checkpointing: `folders` below the source are one state."""

    def __init__(self, folders: list[str], evidence: str) -> None:
        """Keep which folders to read, and what shows their format.

        Args:
            folders: the paths, below the source, of the folders that together are one state; "" is the source itself.
            evidence: what shows the format, as text.
        """
        self.folders, self.evidence = folders, evidence
        # what `read` returned of buckets, before the caller left out what was not asked for
        self._with_buckets: Checkpoint | None = None

    @classmethod
    def find(cls, source: Source) -> DistCheckpointing | None:
        """Find the folders of dist_checkpointing: the source itself, or those that NeMo 2 or verl has inside; None
        where there are none."""
        names = set(source.list())
        if _is_section(source, ""):
            return cls([""], "has metadata.json or common.pt of Megatron-Core")
        if {"weights", "context"} <= names and _is_section(source, "weights"):
            return cls(["weights"], "has weights/ and context/ of NeMo 2")
        inside = [f"{n}/dist_ckpt" for n in _VERL if n in names and "dist_ckpt" in source.list(n)]
        if inside := [n for n in inside if _is_section(source, n)]:
            return cls(inside, f"has {inside[0]}/ of verl")
        if "dist_ckpt" in names and _is_section(source, "dist_ckpt"):
            return cls(["dist_ckpt"], "has dist_ckpt/ of verl")
        return None

    def read(self, source: Source, options: ReadOptions) -> Checkpoint:
        """Return the index of all folders together.

        Stacked layers and flat ranges get their byte ranges in the files here already; so do all tensors if the
        optimizer is in buckets.

        Raises:
            Corrupt: metadata.json or common.pt is missing or damaged, or folders contradict one another.
            Unsupported: a folder has another format than torch_dist, or the optimizer is stored in a form that only the
                job that wrote it can cut.
        """
        sections = [_open_section(source, folder, options) for folder in self.folders]
        # segments of buckets are compared with weights, so all of these have to be located
        buckets = any(parse_key(k).bucket for section in sections for k in section.tensors)
        state = _State(source)
        for section in sections:
            state.add_section(section, buckets)
            state.add_common(section, options)
        replicas = _add_rank_objects(state.leaves, state.objects, state.ranks)
        name_param_groups(state.leaves, state.notes)
        named = CanonicalState(state.leaves, {}, TRAINER, state.notes)
        out = checkpoint_of(named, "megatron", source.root, state.world, state.files, source)
        out.records, out.ranks, out.spreads_tensors, out.tails = state.records, state.ranks, True, state.tails
        out.salvage, out.replicas = Salvage(missing=state.lost) if state.lost else None, replicas
        if buckets and not options.salvage:
            self._with_buckets = replace(out, tensors=dict(out.tensors), values=dict(out.values))
        return out

    def locate(self, ckpt: Checkpoint, source: Source) -> Checkpoint:
        """Return the index with the byte ranges of every tensor in the .distcp files, and with names for the
        optimizer's buckets.

        Raises:
            Unsupported: nothing proves to which parameter a part of the optimizer belongs.
        """
        out = locate_distcp_tensors(ckpt, source)
        asked = {str(t.path[0]) for t in ckpt.tensors.values() if BUCKETS in t.path}
        if asked:
            # weights and fp32 copies tell whose a segment is, also where they were not asked for
            whole = self._with_buckets or self.read(source, ReadOptions())
            from .buckets import resolve_bucket_names

            named, notes = resolve_bucket_names(replace(whole, records=out.records), source)
            replace_unnamed_optimizer(out, named, notes, asked)
        from ckpttool.engine.transform.masters import find_numeric_remainders

        if source.patched is None:
            out.numeric_remainders = find_numeric_remainders(out, source)
        return out


def locate_distcp_tensors(ckpt: Checkpoint, source: Source) -> Checkpoint:
    """Return the index with the byte ranges of every tensor in the .distcp files, which are opened for it.

    Steps stay unchanged, since the one that all parameters share is not in those files.
    """
    items = {n: t for n, t in ckpt.tensors.items() if t.path[3:] != ("step",)}
    found = dcp.locate(replace(ckpt, tensors=items), source)
    return replace(found, tensors={n: found.tensors.get(n, t) for n, t in ckpt.tensors.items()})


# -------------------------------------------------------------------------------------------------------- sections


@dataclass(eq=False, repr=False)
class _Section(ByFields):
    """One folder of dist_checkpointing, as dcp reads it, under Megatron's own keys."""

    folder: str
    source: Source
    ckpt: Checkpoint
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    objects: dict[str, Leaves] = field(default_factory=dict)  # {key: {path inside: leaf}}
    lost: dict[str, str] = field(default_factory=dict)  # {key: why}, of a damaged checkpoint

    def add_leaf(self, path: Path, leaf: object) -> None:
        """Sort a leaf into `tensors` or `objects` by its path under Megatron's key: a tensor whose path is the key
        alone is one of the tensors, anything else belongs to an object."""
        if len(path) == 1 and isinstance(leaf, TensorEntry):
            self.tensors[str(path[0])] = leaf
        else:
            self.objects.setdefault(str(path[0]), {})[path[1:]] = leaf

    def locate(self, keys: set[str]) -> dict[str, TensorEntry]:
        """Return {key: tensor} of the tensors with these keys, with byte ranges in files; their CRC32s are added to the
        checkpoint.

        A key whose bytes are missing is left out of the result, and added to `self.lost` with the reason.
        """
        try:
            return self._locate_all(keys)
        except LostBytes:
            out: dict[str, TensorEntry] = {}
            for k in sorted(keys):
                try:
                    out |= self._locate_all({k})
                except LostBytes as e:
                    self.lost[k] = str(e)
            return out

    def _locate_all(self, keys: set[str]) -> dict[str, TensorEntry]:
        """Return {key: tensor} of the tensors with these keys, with byte ranges in files; their CRC32s are added to the
        checkpoint.

        Raises:
            LostBytes: the bytes of one of them are missing.
        """
        wanted = {f"model.{k}": self.tensors[k] for k in keys}
        found = dcp.locate(replace(self.ckpt, tensors=wanted, values={}, records=Records()), self.source)
        self.ckpt.records.extend(found.records)
        return {k: found.tensors[f"model.{k}"] for k in keys}

    def paths_of(self, key: str) -> list[Path]:
        """Return the canonical paths of the tensor stored under a key: one, or one for each of its stacked layers."""
        of, t = parse_key(key), self.tensors[key]
        return [of.of_layer(i) for i in range(t.shape[0])] if of.stacked else [of.path]

    def path_in_source(self, name: str) -> str:
        """Return the path below the whole source of a file of this folder."""
        return f"{self.folder}/{name}" if self.folder else name


def _open_section(source: Source, folder: str, options: ReadOptions) -> _Section:
    """Read the index of one folder below the source ("" is the source itself), and sort it by Megatron's keys.

    Raises:
        Corrupt: its metadata.json is missing or damaged.
        Unsupported: it names another format than torch_dist.
    """
    inner = source.below(folder) if folder else source
    backend, fault = None, "is missing" if "metadata.json" not in inner.list() else "names no sharded_backend"
    try:
        backend = _read_backend(source, folder)
    except CkpttoolError as e:
        fault = f"is empty or damaged ({e})"
    if backend is None:
        raise Corrupt(
            f"{inner.root} is a folder of Megatron-Core, and its metadata.json {fault}. The copy is incomplete: fetch "
            'that file. Where no copy of it is left, it is this line: {"sharded_backend": "torch_dist", '
            '"sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}',
            code="CKPT0401",
        )
    if backend != "torch_dist":
        raise Unsupported(
            f"{inner.root}: metadata.json names the format {backend!r}; ckpttool reads torch_dist. Load the checkpoint "
            "in the Megatron-Core that wrote it, and save it with torch_dist.",
            code="CKPT0329",
        )
    ckpt = dcp.read(Place(inner, None), ReadOptions(salvage=options.salvage))
    out = _Section(folder, inner, ckpt)
    for t in ckpt.tensors.values():
        out.add_leaf(original_path(t.path, ckpt.origin), t)
    for v in ckpt.values.values():
        out.add_leaf(original_path(v.path, ckpt.origin), v.data)
    return out


@dataclass(eq=False, repr=False)
class _State(ByFields):
    """What the sections read so far hold together; files have their numbers in the list of all sections' files."""

    source: Source
    leaves: Leaves = field(default_factory=dict)
    objects: dict[str, Leaves] = field(default_factory=dict)  # {key: {path inside: leaf}}
    files: list[str] = field(default_factory=list)
    records: Records = field(default_factory=Records)
    ranks: dict[int, int] = field(default_factory=dict)
    tails: dict[int, int] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)  # {canonical name: why}
    notes: list[str] = field(default_factory=list)
    world: int = 0

    def add_section(self, section: _Section, located: bool) -> None:
        """Add the tensors, objects and files of a section, which is one folder; if `located`, all its tensors are
        located in files first.

        Raises:
            Corrupt: another section has the same tensor or object.
        """
        first = len(self.files)
        for path, t in _build_section_entries(section, located).items():
            _refuse_duplicate_path(self.leaves, path, section)
            self.leaves[path] = replace(t, path=path, chunks=t.chunks.moved(first))
        for key, inside in section.objects.items():
            if key in self.objects:
                raise Corrupt(
                    f'{section.source.root} holds "{key}", and another folder of the same checkpoint does too.',
                    code="CKPT0411",
                )
            self.objects[key] = {
                p: replace(x, chunks=x.chunks.moved(first)) if isinstance(x, TensorEntry) else x
                for p, x in inside.items()
            }
        ckpt = section.ckpt
        self.files += [section.path_in_source(f) for f in ckpt.files]
        self.records += [r.moved(first) for r in ckpt.records]
        self.ranks |= {f + first: r for f, r in ckpt.ranks.items()}
        self.tails |= {f + first: n for f, n in ckpt.tails.items()}
        self.notes += [n for n in ckpt.notes if n not in self.notes]
        self.lost |= ckpt.salvage.missing if ckpt.salvage else {}
        self.lost |= {joined(p): why for k, why in section.lost.items() for p in section.paths_of(k)}
        self.world = max(self.world, ckpt.world_size or 0)

    def add_common(self, section: _Section, options: ReadOptions) -> None:
        """Add the content of common.pt in a section's folder, if the folder has one.

        Newer versions have the item common_state in its place. It may also be missing if only weights are read; if a
        damaged checkpoint is salvaged, a note lists what is lost.

        Raises:
            Corrupt: it is missing, or contradicts that of another folder.
        """
        if "common.pt" in section.source.list():
            name = section.path_in_source("common.pt")
            self._add_common_file(name, len(self.files))
            self.files.append(name)
            return
        weights_alone = options.only is not None and not options.only - {"model"}
        if weights_alone or any(k.startswith(_COMMON) for k in section.objects):
            return
        fault = (
            f"{section.source.root} has no common.pt, in which Megatron-Core keeps param groups, scheduler, "
            "iteration and arguments"
        )
        if not options.salvage:
            raise Corrupt(
                f"{fault}. The copy is incomplete: fetch that file; {argument('only', ['model'])} reads the weights "
                "alone.",
                code="CKPT0401",
            )
        self.notes.append(f"{fault}: these are lost")
        in_common = ("optim.param_groups", "scheduler", "trainer", "extra.args")
        self.lost |= dict.fromkeys(in_common, f"Megatron-Core keeps it in {section.path_in_source('common.pt')}")

    def _add_common_file(self, name: str, file: int) -> None:
        """Add the content of a common.pt.

        Args:
            name: its path below the source.
            file: its number among the files.

        Raises:
            Corrupt: it is damaged, or contradicts that of another folder.
        """
        read_at, what = self.source.reader_of(name), f"{self.source.root}/{name}"
        tree = torch_zip.read(read_at, 0, self.source.size(name), what)
        found, records = stored_tensors.read_leaves(parse_common_state(tree, what), (), file, read_at, what)
        found.pop((), None)  # there is nothing in it
        for path, leaf in found.items():
            if path in self.leaves and not same_value(self.leaves[path], leaf):
                raise Corrupt(
                    f'{what}: "{joined(path)}" is {short(leaf)}, and another folder of the same checkpoint says '
                    f"{short(self.leaves[path])}.",
                    code="CKPT0409",
                )
            self.leaves[path] = leaf
        self.records += records


def _refuse_duplicate_path(found: Mapping[Path, object], path: Path, section: _Section) -> None:
    """Raise Corrupt if `found` already has the canonical path, so that two keys of the section mean the same tensor."""
    if path in found:
        raise Corrupt(f'{section.source.root}: two keys mean "{joined(path)}".', code="CKPT0416")


def _build_section_entries(section: _Section, located: bool) -> dict[Path, TensorEntry]:
    """Return {canonical path: tensor in its shape in the model} of one folder, in the order of its keys.

    Stacked layers become one tensor for each layer. `located` is whether all tensors get their byte ranges in files;
    otherwise only those get them that are split or reshaped.

    Raises:
        Corrupt: two keys mean the same tensor, a stacked one has no axis for the layers, or shapes contradict one
            another.
    """
    keys = {k: parse_key(k) for k in section.tensors}
    # shapes of the model are needed for what may be flat ranges, and .metadata has them
    whole: dict[str, tuple[int, ...]] = {}
    if any(_may_be_flat_ranges(section.tensors, k, key) for k, key in keys.items()):
        whole = {k: tuple(v) for k, v in read_index(section.source).whole.items()}
    raw = section.locate({k for k, key in keys.items() if located or key.stacked or k in whole})
    out: dict[Path, TensorEntry] = {}
    if any(keys[k].bucket for k in section.lost):  # segments are found in whole buckets only
        section.lost |= {k: "the optimizer's buckets are not whole" for k, key in keys.items() if key.bucket}
    for k, key in keys.items():
        if k in section.lost:
            continue
        t = raw.get(k, section.tensors[k])
        if k in whole:
            t = unflatten_ranges(t, whole[k], f'{section.source.root}: "{k}"')
        if not key.stacked:
            _refuse_duplicate_path(out, key.path, section)
            out[key.path] = t
            continue
        if not t.shape:
            raise Corrupt(
                f'{section.source.root}: "{k}" is of all layers by its name, and has no axis for them.', code="CKPT0412"
            )
        for i in range(t.shape[0]):
            path = key.of_layer(i)
            _refuse_duplicate_path(out, path, section)
            out[path] = take_layer(t, i)
    return out


def _may_be_flat_ranges(tensors: Mapping[str, TensorEntry], name: str, key: Key) -> bool:
    """Return whether a tensor of the optimizer may be stored as flat ranges: its weight is missing or has another
    shape.

    Args:
        tensors: {key: tensor} of the folder.
        name: the key of the tensor.
        key: the same, parsed.
    """
    if key.bucket is not None or key.path[0] == "model":
        return False
    of = tensors.get(str(key.path[2]))
    return of is None or of.shape != tensors[name].shape


# --------------------------------------------------------------------------------------------------------- objects


def _add_rank_objects(
    leaves: Leaves, objects: Mapping[str, Mapping[Path, object]], ranks: Mapping[int, int]
) -> list[Replica]:
    """Add the objects that ranks saved to `leaves`: random states, the common state of newer versions, param groups.

    Param groups are objects in the format `dp_reshardable`.

    Args:
        leaves: {canonical path: leaf}.
        objects: {key: {path inside the object: leaf}}.
        ranks: {number of a file: the rank that wrote it}.

    Returns:
        The tensors of gradient scalers of which `leaves` has that of another data-parallel group.

    Raises:
        Unsupported: the optimizer is one object for each data-parallel group, or an object holds tensors where it must
            not.
        Corrupt: an object is not stored as Megatron-Core does it.
    """
    groups: dict[str, tuple[Any, int]] = {}
    replicas: list[Replica] = []
    for key, inside in objects.items():
        path, chained = parse_object_key(key)
        if key.startswith(_COMMON):
            tree = parse_common_state(_unwrap_object(inside, key, may_have_tensors=True), key)
            leaves |= stored_tensors.read_leaves(tree, (), 0, _refuse_reading, key)[0]
            leaves.pop((), None)  # there is nothing in it
        elif chained is None:
            for p, x in inside.items():
                at = (*path, *p)
                leaves[at] = replace(x, path=at) if isinstance(x, TensorEntry) else x
        elif (what := str(path[3]).partition(".")[0]) == "optimizer":
            groups[key] = _unwrap_object(inside, key), chained
        elif what == "grad_scaler":
            copies = _add_stored_scaler(leaves, inside, key, chained)
            replicas += [Replica(joined(a.path), ranks.get(b.chunks.file[0], 0), a, b) for a, b in copies]
        elif what not in ("per_bucket_numel", "per_bucket_numel_unpadded"):  # lengths of what lies there
            raise Unsupported(
                f'The optimizer is stored as "{key}", one object for each data-parallel group '
                "(dp_zero_gather_scatter), which only the job that wrote it can cut. Save with fully_reshardable, or "
                "convert the weights alone.",
                code="CKPT0327",
            )
    if groups:
        _add_param_groups(leaves, groups)
    return replicas


def _add_stored_scaler(
    leaves: Leaves, inside: Mapping[Path, object], key: str, chained: int
) -> list[tuple[TensorEntry, TensorEntry]]:
    """Add a gradient scaler that a data-parallel group saved to `leaves`, under the paths of `parse_common_state`.

    Every data-parallel group saves the scaler of an optimizer, which all of them update alike. The first group's is
    added, and the values of the others are compared with it.

    Args:
        leaves: {canonical path: leaf}.
        inside: {path inside the object: leaf}.
        key: the key of the object.
        chained: number of its optimizer in the chain, 0 if there is only one.

    Returns:
        [(tensor in `leaves`, this group's copy of it)].

    Raises:
        Unsupported: another group counted other overflows.
        Corrupt: the object is not stored as Megatron-Core does it.
    """
    of: Path = ("scaler", CHAINED, str(chained)) if chained else ("scaler",)
    whole = _unwrap_object(inside, key, may_have_tensors=True)
    copies = []
    for p, x in inside.items():
        at = (*of, *p[1:])
        new = whole if not p else replace(x, path=at) if isinstance(x, TensorEntry) else x
        first = leaves.setdefault(at, new)
        if isinstance(first, TensorEntry) and isinstance(new, TensorEntry):
            copies += [(first, new)] if first is not new else []
        elif not same_value(first, new):
            raise Unsupported(
                f'"{key}" holds another gradient scaler than an object before it, so the ranks did not train with one '
                "optimizer.",
                code="CKPT0328",
            )
    return copies


def _add_param_groups(leaves: Leaves, groups: Mapping[str, tuple[object, int]]) -> None:
    """Add the param groups of the optimizer, which every data-parallel group has saved, to `leaves`.

    `groups` is {key: (param groups as plain data, number of their optimizer in the chain, 0 if there is only one)}.

    Raises:
        Unsupported: two data-parallel groups saved different ones for the same optimizer.
    """
    of: dict[int, tuple[str, Any]] = {}
    for key, (data, chained) in groups.items():
        first = of.setdefault(chained, (key, data))
        if not same_value(first[1], data):
            raise Unsupported(
                f'"{first[0]}" and "{key}" hold different param groups, so the ranks did not train with one optimizer.',
                code="CKPT0328",
            )
    tree = parse_common_state(
        {"optimizer": {i: {"optimizer": data} for i, (_, data) in of.items()}}, "the param groups"
    )
    leaves |= stored_tensors.read_leaves(tree, (), 0, _refuse_reading, "the param groups")[0]


def _unwrap_object(inside: Mapping[Path, object], key: str, may_have_tensors: bool = False) -> object:
    """Return the object in an item of dist_checkpointing, which stores it as the only element of a list.

    Args:
        inside: {path inside the item: leaf}.
        key: the key of the item, for errors.
        may_have_tensors: whether the object may hold tensors besides plain data.

    Raises:
        Unsupported: it holds tensors and must not.
        Corrupt: the item is not a list of one element.
    """
    if not may_have_tensors and any(isinstance(x, TensorEntry) for x in inside.values()):
        raise Unsupported(f'"{key}" holds tensors, where Megatron-Core keeps numbers and text.', code="CKPT0307")
    tree = nest(inside)
    if not isinstance(tree, list) or len(tree) != 1:
        raise Corrupt(f'"{key}" is not a list of one object.', code="CKPT0406")
    out: object = tree[0]
    return out


def _refuse_reading(at: int, n: int) -> bytes:
    """Raise Corrupt, whatever the offset `at` and the number of bytes `n` are.

    It takes the place of the function that reads bytes of a file, for objects that must not refer to any.
    """
    raise Corrupt("an object of a rank refers to bytes outside of it.", code="CKPT0406")
