"""megatron: folders of Megatron-Core's dist_checkpointing in the format torch_dist, and of frameworks that have them
inside.

    DIR/.metadata, DIR/__{rank}_{n}.distcp    a folder of dcp; layers may be stacked, and the plans of all ranks follow
                                              .metadata's fields
    DIR/metadata.json                         {"sharded_backend": "torch_dist", "sharded_backend_version": 1, ...}
    DIR/common.pt                             torch.save of {"args": Namespace, "iteration", "opt_param_scheduler",
                                              "optimizer": {"optimizer": {"param_groups"}, "param_state_sharding_type"},
                                              "content_metadata", ...}; in newer versions the item
                                              common_state/shard_0_1 instead
    DIR/../latest_checkpointed_iteration.txt  names the newest iter_{iteration:07d}

    iter_N/ without metadata.json             Megatron-FSDP's fsdp_dtensor: megatron/fsdp_dtensor.py
    mp_rank_XX[_YYY]/model_optim_rng.pt       the format before dist_checkpointing: megatron/legacy/ranks.py

    {weights/, context/}                      NeMo 2: DIR is weights/
    {model, optimizer, extra}/dist_ckpt/      verl since 0.9: three such folders are one state; before, dist_ckpt/ alone

Keys: a parameter has the name that Megatron's modules give it, with global numbers of layers, whatever the tensor and
pipeline parallel sizes were; with `non_homogeneous_layers` false, "decoder.layers.mlp.linear_fc1.weight" is all layers
of a pipeline, first axis. Objects are items {key}/shard_{place}_{shape}, a list of one. The optimizer's tensors, by
`distrib_optim_sharding_type`:

    fully_reshardable           optimizer.state.{param, exp_avg, exp_avg_sq}.{key}, in the shape of the parameter
    fully_sharded_model_space   the same with fp32_param; before 0.14 as flat ranges of boxes
                                (_megatron_boxes.flat_ranges)
    dp_reshardable              optimizer.distributed.dp_group_idx_{i}.gbuf_idx_{j}.dtype_{..}.bucket_idx_{k}.{param,
                                exp_avg, exp_avg_sq}: the buckets of DistributedOptimizer, without names
                                (megatron/buckets.py)

Canonical names: model.{key}, optim.state.{key}.{slot}, extra.master.{key} for the fp32 copy of a weight, scheduler.*,
rng.shard_{place}.*, trainer.iteration, extra.args.*, and extra.{key} for any other object. Stacked layers are taken
apart: each has its number.

Sources: megatron/core/dist_checkpointing/{serialization,mapping}.py and strategies/torch.py,
megatron/core/optimizer/{optimizer, distrib_optimizer,__init__}.py of megatron-core 0.16.1; strategies/torch.py of 0.12;
the folders in fixtures/, which 0.16.1 wrote.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ckpttool import bounded_json, layouts
from ckpttool.errors import CkpttoolError, Corrupt, Unsupported, argument
from ckpttool.formats import stored_tensors, torch_zip
from ckpttool.formats.pickles import short
from ckpttool.index.checkpoint import Checkpoint, Path, Record, Salvage, TensorEntry, Value, joined
from ckpttool.index.names import COMPONENTS, CanonicalState, original_path
from ckpttool.index.trees import nest
from ckpttool.layouts import Layout, Place, ReadOptions, checkpoint_of, late
from ckpttool.storage import remote
from ckpttool.storage.overlay import LostBytes, parent_of
from ckpttool.storage.source import Source

from ..dcp.metadata import read_index
from .keys import BUCKETS, Key, common_tree, key_of, model_file, name_groups, path_of_object
from .stacked import flat_ranges, layer

__all__ = ["LAYOUTS"]

TRAINER = "Megatron-Core"
_VERL = ("model", "optimizer", "extra")
_MOST_JSON = 1 << 20
_COMMON = "common_state/"  # the item that newer versions have instead of common.pt
_TRACKER = "latest_checkpointed_iteration.txt"
_ITERATION = re.compile(r"iter_\d{7}|release")


def _backend(source: Source, folder: str) -> str | None:
    """The format that metadata.json of a folder names; None where it names none, or is missing.

    Raises:
        CkpttoolError: it is not JSON.
    """
    name = f"{folder}/metadata.json" if folder else "metadata.json"
    if "metadata.json" not in source.list(folder) or source.size(name) > _MOST_JSON:
        return None
    found = bounded_json.parse(source.read_all(name, _MOST_JSON), name)
    backend = found.get("sharded_backend") if isinstance(found, dict) else None
    return backend if isinstance(backend, str) else None


def _is_sharded(source: Source, folder: str) -> bool:
    """Whether a folder is one of dist_checkpointing, also where its metadata.json is missing or damaged."""
    names = set(source.list(folder))
    if {".metadata", "common.pt"} <= names:
        return True
    try:
        return _backend(source, folder) is not None
    except CkpttoolError:
        return ".metadata" in names


def _is_fsdp(source: Source) -> bool:
    """Whether a folder is one that Megatron-LM saved with torch's own DCP: by its name, and by the tracker file
    above."""
    parent, name = parent_of(source)
    if not _ITERATION.fullmatch(name) or not parent:
        return False
    names = source.list()
    if ".metadata" not in names or "metadata.json" in names:
        return False
    with remote.open_source(parent) as above:
        return above.exists(_TRACKER)


def _of_ranks(source: Source) -> str | None:
    """A file of a model-parallel rank in the format that Megatron-LM had before dist_checkpointing."""
    return next((f"{n}/{name}" for n in source.list() if (name := model_file(source, n))), None)


def _folders(source: Source) -> tuple[list[str], str]:
    """(the folders of dist_checkpointing that are one state, what they are), no folder where there are none."""
    names = set(source.list())
    if _is_sharded(source, ""):
        return [""], "has metadata.json or common.pt of Megatron-Core"
    if {"weights", "context"} <= names and _is_sharded(source, "weights"):
        return ["weights"], "has weights/ and context/ of NeMo 2"
    inside = [f"{n}/dist_ckpt" for n in _VERL if n in names and "dist_ckpt" in source.list(n)]
    if inside := [n for n in inside if _is_sharded(source, n)]:
        return inside, f"has {inside[0]}/ of verl"
    if "dist_ckpt" in names and _is_sharded(source, "dist_ckpt"):
        return ["dist_ckpt"], "has dist_ckpt/ of verl"
    return [], "no metadata.json with sharded_backend"


def detect(where: Place) -> tuple[bool, str]:
    """A folder of dist_checkpointing, or one that has such folders as its parts."""
    if where.file is not None:
        return False, "a folder with metadata.json of Megatron-Core; this is a file"
    folders, why = _folders(where.source)
    if folders:
        return True, why
    if _is_fsdp(where.source):
        return True, "is an iter_N folder of DCP: fsdp_dtensor"
    if found := _of_ranks(where.source):
        return True, f"has {found} of Megatron-LM"
    return False, why


# --------------------------------------------------------------------------------------------------------- reading


@dataclass
class _Section:
    """One folder of dist_checkpointing, as dcp reads it, under Megatron's own keys."""

    folder: str
    source: Source
    ckpt: Checkpoint
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    objects: dict[str, dict[Path, Any]] = field(default_factory=dict)  # {key: {path inside: leaf}}
    lost: dict[str, str] = field(default_factory=dict)  # {key: why}, of a damaged checkpoint

    def located(self, keys: set[str]) -> dict[str, TensorEntry]:
        """Some tensors as raw byte ranges; records of their CRC32s are added to those of the checkpoint.

        Of a damaged checkpoint that is salvaged, those that are there; `lost` has the others.
        """
        try:
            return self._located(keys)
        except LostBytes:
            out: dict[str, TensorEntry] = {}
            for k in sorted(keys):
                try:
                    out |= self._located({k})
                except LostBytes as e:
                    self.lost[k] = str(e)
            return out

    def _located(self, keys: set[str]) -> dict[str, TensorEntry]:
        wanted = {f"model.{k}": self.tensors[k] for k in keys}
        dcp = layouts.find("dcp")
        assert dcp.locate is not None
        found = dcp.locate(replace(self.ckpt, tensors=wanted, values={}, records=[]), self.source)
        self.ckpt.records += found.records
        return {k: found.tensors[f"model.{k}"] for k in keys}


def _section(source: Source, folder: str, options: ReadOptions) -> _Section:
    inner = source.below(folder) if folder else source
    try:
        backend = _backend(source, folder)
        gone = (
            ""
            if backend is not None
            else "is missing"
            if "metadata.json" not in inner.list()
            else "names no sharded_backend"
        )
    except CkpttoolError as e:
        gone = f"is empty or damaged ({e})"
    if gone:
        raise Corrupt(
            f"{inner.root} is a folder of Megatron-Core, and its metadata.json {gone}. The copy is incomplete: fetch "
            'that file. Where no copy of it is left, it is this line: {"sharded_backend": "torch_dist", '
            '"sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}'
        )
    if backend != "torch_dist":
        raise Unsupported(
            f"{inner.root}: metadata.json names the format {backend!r}; ckpttool reads torch_dist. Load the checkpoint "
            "in the Megatron-Core that wrote it, and save it with torch_dist."
        )
    ckpt = layouts.find("dcp").read(Place(inner, None), ReadOptions(salvage=options.salvage))
    out = _Section(folder, inner, ckpt)
    for t in ckpt.tensors.values():
        _put(out, original_path(t.path, ckpt.origin), t)
    for v in ckpt.values.values():
        _put(out, original_path(v.path, ckpt.origin), v.data)
    return out


def _put(out: _Section, path: Path, leaf: Any) -> None:
    """A leaf at its key, which is one element of its path where torch's planner has left no other."""
    if len(path) == 1 and isinstance(leaf, TensorEntry):
        out.tensors[str(path[0])] = leaf
    else:
        out.objects.setdefault(str(path[0]), {})[path[1:]] = leaf


def read(where: Place, options: ReadOptions) -> Checkpoint:
    """The index of a folder; items of stacked layers, flat ranges and buckets are located here, since their shapes are
    others.

    Raises:
        Unsupported: its format is not torch_dist, or a part of it has no place in the shapes of the model.
    """
    source = where.source
    folders, why = _folders(source)
    if not folders and _is_fsdp(source):
        return _read_fsdp(where, options)
    if not folders and _of_ranks(source):
        return _read_ranks(where, options)
    if not folders:
        raise Unsupported(f"{source.root}: {why}.")
    leaves: dict[Path, Any] = {}
    notes: list[str] = []
    files: list[str] = []
    records: list[Record] = []
    ranks: dict[int, int] = {}
    tails: dict[int, int] = {}
    lost: dict[str, str] = {}
    objects: dict[str, dict[Path, Any]] = {}
    world = 0
    sections = [_section(source, folder, options) for folder in folders]
    buckets = any(
        key_of(k).bucket for section in sections for k in section.tensors
    )  # their segments are compared with weights
    for folder, section in zip(folders, sections, strict=True):
        by = len(files)
        for path, t in _entries(section, buckets).items():
            _free(leaves, path, section)
            leaves[path] = replace(t, path=path, chunks=t.chunks.moved(by))
        for key, inside in section.objects.items():
            if key in objects:
                raise Corrupt(
                    f'{section.source.root} holds "{key}", and another folder of the same checkpoint does too.'
                )
            objects[key] = {
                p: replace(x, chunks=x.chunks.moved(by)) if isinstance(x, TensorEntry) else x for p, x in inside.items()
            }
        files += [f"{folder}/{f}" if folder else f for f in section.ckpt.files]
        records += [r.moved(by) for r in section.ckpt.records]
        ranks |= {f + by: r for f, r in section.ckpt.ranks.items()}
        tails |= {f + by: n for f, n in section.ckpt.tails.items()}
        notes += [n for n in section.ckpt.notes if n not in notes]
        lost |= section.ckpt.salvage.missing if section.ckpt.salvage else {}
        lost |= {joined(p): why for k, why in section.lost.items() for p in _paths_of(section, k)}
        world = max(world, section.ckpt.world_size or 0)
        if "common.pt" in section.source.list():
            name = f"{folder}/common.pt" if folder else "common.pt"
            _take_common(leaves, source, name, len(files), records)
            files.append(name)
        elif not any(k.startswith(_COMMON) for k in section.objects) and (
            options.only is None or options.only - {"model"}
        ):
            gone = (
                f"{section.source.root} has no common.pt, in which Megatron-Core keeps param groups, scheduler, "
                "iteration and arguments"
            )
            if not options.salvage:
                raise Corrupt(
                    f"{gone}. The copy is incomplete: fetch that file; {argument('only', ['model'])} reads the weights "
                    "alone."
                )
            notes.append(f"{gone}: these are lost")
    _take_objects(leaves, objects)
    name_groups(leaves, notes)
    out = checkpoint_of(CanonicalState(leaves, {}, TRAINER, notes), "megatron", source.root, world, files, source)
    out.records, out.ranks, out.spreads_tensors, out.tails = records, ranks, True, tails
    out.salvage = Salvage(missing=lost) if lost else None
    return out


def _read_fsdp(where: Place, options: ReadOptions) -> Checkpoint:
    """The index of a folder of Megatron-FSDP."""
    found = layouts.find("dcp").read(where, ReadOptions(salvage=options.salvage))
    leaves = found.leaves()
    prefixed = {str(original_path(p, found.origin)[-1]): str(p[1]) for p in leaves if p[0] == "model" and len(p) == 2}
    from .fsdp_dtensor import canonical_fsdp

    named = CanonicalState(canonical_fsdp(leaves, prefixed), {}, TRAINER, found.notes)
    if len(named.leaves) != len(leaves):
        found.notes.append(
            "linear_fc1 is stored as two tensors, _w and _v, and is one tensor here, as in Megatron-Core's other "
            "formats"
        )
    out = checkpoint_of(named, "megatron", found.root, found.world_size, found.files, where.source)
    out.records, out.ranks, out.salvage, out.spreads_tensors = found.records, found.ranks, found.salvage, True
    out.tails = found.tails
    return out


def _read_ranks(where: Place, options: ReadOptions) -> Checkpoint:
    """The index of files of model-parallel ranks; what the optimizer holds has no names yet (`locate`)."""
    from .legacy.optimizer import unnamed
    from .legacy.ranks import ranks_of

    optimizer = options.only is None or bool(options.only & {"optim", "extra"})
    found = ranks_of(where.source, optimizer)
    leaves: dict[Path, Any] = {("model", n): t for n, t in found.weights().items()}
    if optimizer:
        leaves |= unnamed(found)
    leaves |= found.leaves()
    notes = []
    if found.older_names:
        notes.append(
            "the names are those of Megatron-LM before Megatron-Core; parameters have their names in Megatron-Core here"
        )
    world = found.geometry.args.get("world_size")
    out = checkpoint_of(
        CanonicalState(leaves, {}, TRAINER, notes),
        "megatron",
        where.source.root,
        world if isinstance(world, int) else len(found.ranks),
        found.files.names,
        where.source,
    )
    out.records, out.ranks = found.records, {r.number: k for k, r in enumerate(found.ranks)}
    return out


def _free(leaves: dict[Path, Any], path: Path, section: _Section) -> None:
    if path in leaves:
        raise Corrupt(f'{section.source.root}: two keys mean "{joined(path)}".')


def _entries(section: _Section, located: bool) -> dict[Path, TensorEntry]:
    """{canonical path: tensor} of one folder, in the order of its keys; with `located`, all as raw byte ranges."""
    keys = {k: key_of(k) for k in section.tensors}
    whole: dict[str, tuple[int, ...]] = {}
    if any(_is_cut(section.tensors, k, key) for k, key in keys.items()):
        whole = {k: tuple(v) for k, v in read_index(section.source).whole.items()}
    raw = section.located({k for k, key in keys.items() if located or key.stacked or k in whole})
    out: dict[Path, TensorEntry] = {}
    if any(keys[k].bucket for k in section.lost):  # segments are found in whole buckets only
        section.lost |= {k: "the optimizer's buckets are not whole" for k, key in keys.items() if key.bucket}
    for k, key in keys.items():
        if k in section.lost:
            continue
        t = raw.get(k, section.tensors[k])
        if k in whole:
            t = flat_ranges(t, whole[k], f'{section.source.root}: "{k}"')
        if not key.stacked:
            _free(out, key.path, section)
            out[key.path] = t
            continue
        if not t.shape:
            raise Corrupt(f'{section.source.root}: "{k}" is of all layers by its name, and has no axis for them.')
        for i in range(t.shape[0]):
            path = key.of_layer(i)
            _free(out, path, section)
            out[path] = layer(t, i)
    return out


def _paths_of(section: _Section, key: str) -> list[Path]:
    """The canonical paths of what is stored under a key."""
    of, t = key_of(key), section.tensors[key]
    return [of.of_layer(i) for i in range(t.shape[0])] if of.stacked else [of.path]


def _is_cut(tensors: dict[str, TensorEntry], name: str, key: Key) -> bool:
    """Whether a tensor of the optimizer may be flat ranges: it has not the shape of its weight."""
    if key.bucket is not None or key.path[0] == "model":
        return False
    of = tensors.get(str(key.path[2]))
    return of is None or of.shape != tensors[name].shape


def _take_common(leaves: dict[Path, Any], source: Source, name: str, file: int, records: list[Record]) -> None:
    read_at, what = source.reader_of(name), f"{source.root}/{name}"
    tree = torch_zip.read(read_at, 0, source.size(name), what)
    found, sums = stored_tensors.leaves(common_tree(tree, what), (), file, read_at, what)
    found.pop((), None)  # there is nothing in it
    for path, leaf in found.items():
        if path in leaves and leaves[path] != leaf:
            raise Corrupt(
                f'{what}: "{joined(path)}" is {short(leaf)}, and another folder of the same checkpoint says '
                f"{short(leaves[path])}."
            )
        leaves[path] = leaf
    records += sums


def _take_objects(leaves: dict[Path, Any], objects: Mapping[str, Mapping[Path, Any]]) -> None:
    """Objects of ranks: the random states, the common state of newer versions, the param groups of `dp_reshardable`."""
    groups: dict[str, tuple[Any, int]] = {}
    for key, inside in objects.items():
        path, chained = path_of_object(key)
        if key.startswith(_COMMON):
            leaves |= stored_tensors.leaves(common_tree(_one(inside, key, True), key), (), 0, _no_bytes, key)[0]
        elif chained is None:
            for p, x in inside.items():
                at = (*path, *p)
                leaves[at] = replace(x, path=at) if isinstance(x, TensorEntry) else x
        elif (what := str(path[3]).partition(".")[0]) == "optimizer":
            groups[key] = _one(inside, key), chained
        elif what == "grad_scaler":
            leaves["scaler", "grad_scaler"] = _one(inside, key)
        elif what not in ("per_bucket_numel", "per_bucket_numel_unpadded"):  # lengths of what lies there
            raise Unsupported(
                f'The optimizer is stored as "{key}", one object for each data-parallel group '
                "(dp_zero_gather_scatter), which only the job that wrote it can cut. Save with fully_reshardable, or "
                "convert the weights alone."
            )
    if groups:
        _take_groups(leaves, groups)


def _take_groups(leaves: dict[Path, Any], groups: Mapping[str, tuple[Any, int]]) -> None:
    """Param groups that each data-parallel group has saved: those of its chained optimizers, equal but for the experts'
    own."""
    of: dict[int, tuple[str, Any]] = {}
    for key, (data, chained) in groups.items():
        first = of.setdefault(chained, (key, data))
        if first[1] != data:
            raise Unsupported(
                f'"{first[0]}" and "{key}" hold different param groups, so the ranks did not train with one optimizer.'
            )
    tree = common_tree({"optimizer": {i: {"optimizer": data} for i, (_, data) in of.items()}}, "the param groups")
    leaves |= stored_tensors.leaves(tree, (), 0, _no_bytes, "the param groups")[0]


def _one(inside: Mapping[Path, Any], key: str, tensors: bool = False) -> Any:
    """The object in an item of dist_checkpointing, which is a list of one; without tensors, unless it may have some."""
    if not tensors and any(isinstance(x, TensorEntry) for x in inside.values()):
        raise Unsupported(f'"{key}" holds tensors, where Megatron-Core keeps numbers and text.')
    tree = inside[()] if () in inside else nest(inside)
    if not isinstance(tree, list) or len(tree) != 1:
        raise Corrupt(f'"{key}" is not a list of one object.')
    return tree[0]


def _no_bytes(at: int, n: int) -> bytes:
    raise Corrupt("an object of a rank refers to bytes outside of it.")


# -------------------------------------------------------------------------------------------------------- locating


def locate(ckpt: Checkpoint, source: Source) -> Checkpoint:
    """The same index with raw byte ranges: items have been looked into, and segments of buckets have their names.

    Raises:
        Unsupported: nothing proves of which parameter a segment is.
    """
    asked = {t.path[0] for t in ckpt.tensors.values() if BUCKETS in t.path}
    if _backend(source, "") is None and not _folders(source)[0] and not _is_fsdp(source):
        return _located_ranks(ckpt, source, asked)
    dcp = layouts.find("dcp")
    assert dcp.locate is not None
    items = {n: t for n, t in ckpt.tensors.items() if t.path[3:] != ("step",)}  # which all parameters share
    found = dcp.locate(replace(ckpt, tensors=items), source)
    out = replace(found, tensors={n: found.tensors.get(n, t) for n, t in ckpt.tensors.items()})
    if asked:
        whole = read(Place(source, None), ReadOptions())  # the weights, too, where they were not asked for
        from .buckets import resolve

        named, notes = resolve(replace(whole, records=out.records), source)
        _put_named(out, named, notes, asked)
    return out


def _located_ranks(ckpt: Checkpoint, source: Source, asked: set[Any]) -> Checkpoint:
    """The same for files of model-parallel ranks, where copies that several have are compared."""
    from .legacy.ranks import proved, ranks_of

    found = ranks_of(source, bool(asked))
    proved(found, (str(t.path[1]) for t in ckpt.tensors.values() if t.path[0] == "model"), ckpt)
    out = replace(ckpt, tensors=dict(ckpt.tensors))
    if asked:
        from .legacy.optimizer import named

        leaves, notes = named(found, ckpt)
        _put_named(out, leaves, notes, asked)
    return out


def _put_named(out: Checkpoint, named: Mapping[Path, Any], notes: list[str], asked: set[Any]) -> None:
    """Put the optimizer's state under its names in the place of what had none."""
    out.tensors = {n: t for n, t in out.tensors.items() if BUCKETS not in t.path}
    out.values = dict(out.values)
    out.notes = [*out.notes, *notes]
    leaves = {**out.leaves(), **{p: leaf for p, leaf in named.items() if p[0] in asked}}
    if "optim" in asked:
        name_groups(leaves, out.notes)
    for path, leaf in leaves.items():
        if isinstance(leaf, TensorEntry):
            out.tensors[joined(path)] = leaf
        else:
            out.values.setdefault(joined(path), Value(path, leaf))
    out.tensors = dict(sorted(out.tensors.items(), key=lambda row: COMPONENTS.index(str(row[1].path[0]))))


LAYOUTS = (
    Layout(
        name="megatron",
        title="directory of Megatron-Core",
        detect=detect,
        read=read,
        locate=locate,
        aliases=("torch_dist", "mcore", "megatron-core", "nemo"),
        of_trainer=True,
        reader_uses=(),
        write=late("ckpttool.converters.megatron.write:write"),
        prepare=late("ckpttool.converters.megatron.write:prepare"),
        writer_uses=("world_size",),
        needs_named_optimizer=True,
    ),
)
