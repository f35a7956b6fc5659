"""fsdp1: a folder with one torch.save file a rank, as jobs of FSDP1 write with LOCAL_STATE_DICT or SHARDED_STATE_DICT.

    local_rank{r}.pt          model.state_dict()       any names do that end in rank{r} or rank_{r} before the suffix:
    local_optim_rank{r}.pt    optimizer.state_dict()   model_world_size_4_rank_0.pt (verl), pytorch_model_fsdp_rank0.bin
    flat_layout.json          see flat_layout.py       (accelerate), checkpoint-shard0.pt (FairScale)

or one file a rank with everything in it: {"model": ..., "optim": ..., "step": ...}. What a file is, its content tells:

    model       "<wrapped module>._flat_param" -> ShardedTensor, 1-D, padding of the last slices removed; buffers under
                their FQN; with use_orig_params=True also each FQN as the 1-D slice this rank has, a view of the former
                (torch/distributed/fsdp/_state_dict_utils.py, _local_post_state_dict_hook)
                "<fqn>" -> ShardedTensor or DTensor, dim-0 shards (SHARDED_STATE_DICT), any mesh
                "<fqn>" -> whole tensor (NO_SHARD, and every job of one rank)
    optimizer   raw `optimizer.state_dict()`: numbers, slots as 1-D slices, those of use_orig_params=False with the
                zeros that pad the last ones; parameters of which a rank has nothing are not there
                `FSDP.optim_state_dict`: FQNs, ShardedTensor or DTensor, whatever the type (also LOCAL_STATE_DICT)

A ShardedTensor is pickled as (local shards, metadata, process group state, ...), a DTensor as its local tensor and a
spec with mesh and placements; both carry the rank that wrote them, by which exchanged files are found out. Neither is
ever built. Flat parameters do not say which parameters lie in them: `flat_layout` says where that comes from.

FairScale's shards (`flat_param_0`, `shard_metadata`) have the padding in the model too and say what lies where.

Sources: torch/distributed/fsdp, torch/distributed/_shard/sharded_tensor/api.py, torch/distributed/tensor; fairscale
nn/data_parallel/fully_sharded_data_parallel.py; files of torch 2.10 to 2.13.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from ckpttool.bounded_json import parse
from ckpttool.engine import flat_layout
from ckpttool.engine.flat_layout import FLAT, Flat, FlatLayout, Part
from ckpttool.errors import Corrupt, Unsupported
from ckpttool.formats import stored_tensors
from ckpttool.formats.sharded import is_sharded
from ckpttool.formats.stored_tensors import StoredTensor
from ckpttool.huggingface import model_names
from ckpttool.huggingface.model_names import ModelNames
from ckpttool.index.checkpoint import (
    ITEMSIZE,
    Checkpoint,
    Chunks,
    Path,
    TensorEntry,
    same_bytes,
    shape_of,
    tied_weights,
)
from ckpttool.index.fqns import strip_wrappers
from ckpttool.index.names import canonical, of_the_rest
from ckpttool.index.optimizer_names import name_order
from ckpttool.layouts import Layout, Model, Place, ReadOptions, checkpoint_of
from ckpttool.storage.source import Source

from ._fsdp1_write import Fsdp1Options, write
from ._ranks import (
    SIDE,
    Files,
    Rank,
    assembled,
    column_of,
    groups_of,
    parts_of,
    replicated,
    rest_of,
    scalar,
    shown,
    slot_of,
)

__all__ = ["LAYOUTS"]


def detect(where: Place) -> tuple[bool, str]:
    """Files of ranks, beside no `.metadata`."""
    source, name = where
    if name is not None:
        return False, "a folder with one torch.save file a rank; this is a file"
    names = source.list()
    if ".metadata" in names:
        return False, "has .metadata, so that files of ranks are not all of it"
    try:
        groups = [g for g in groups_of(names) if not SIDE.match(g.pattern)]
    except Corrupt:
        return True, "has files of ranks"
    if not groups:
        return False, "no torch.save files of ranks (local_rank0.pt, model_world_size_2_rank_0.pt, ...)"
    return True, f"has {groups[0].pattern} of {len(groups[0].ranks)} ranks"


# --------------------------------------------------------------------------------------------------------- reading


def read(where: Place, options: ReadOptions) -> Checkpoint:
    """The index of a folder of per-rank files.

    Raises:
        Corrupt: a rank is missing, exchanged, or of another step. Unsupported: the files do not tell, and neither do
        the options, what lies in a flat parameter.
    """
    try:
        return _read(where.source, options)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as e:
        raise Corrupt(
            f"{where.source.root}: the files of ranks do not hold together ({type(e).__name__}: {e}); no release of FSDP1 "
            "writes such."
        ) from e


def _read(source: Source, options: ReadOptions) -> Checkpoint:
    files = Files(source)
    parts, world = parts_of(files, source, groups_of(source.list()))
    config = model_names.config_of(options.config) if options.config is not None else _own_config(source)
    model: dict[str, Any] = {}
    known = _Known(None, {}, {}, _Own([], {}))
    if parts["model"] and "shard_metadata" in parts["model"][0].tree:
        model, known = _fairscale(files, parts["model"])
    elif parts["model"]:
        model, known = _model(files, parts["model"], lambda: _names(files, options, config, parts["optim"]), options)
    leaves: dict[Path, Any] = {("model", name): leaf for name, leaf in model.items()}
    if parts["optim"] and (options.only is None or "optim" in options.only):
        leaves.update(_optimizer(files, parts["optim"], known, options, config))
    leaves.update(rest_of(files, parts["rest"], leaves))
    like = options.like.optimizer if options.like else None
    named = of_the_rest(canonical(leaves, shape_of, like, same_bytes, options.only))
    out = checkpoint_of(named, "fsdp1", source.root, world, files.names, source)
    out.records, out.config = list(files.records.values()), config
    out.ranks = {r.file: r.rank for ranks in (parts["model"], *parts["optim"]) for r in ranks}
    out.notes = [*out.notes, *dict.fromkeys(files.notes)]
    if files.unlike:
        out.notes.append(
            f'ranks that should have the same have not, in {len(files.unlike)} tensors, first "{files.unlike[0]}"; that of the '
            "lowest rank is taken"
        )
    return out


def _own_config(source: Source) -> dict[str, Any] | None:
    """The config.json of the model that lies in the folder."""
    for name in ("config.json", "huggingface/config.json"):
        if source.exists(name):
            found = parse(source.read_all(name, 16 << 20), f"{source.root}/{name}")
            if isinstance(found, dict) and "model_type" in found:
                return found
    return None


# ----------------------------------------------------------------------------------------------------------- model


class _Known(NamedTuple):
    """What reading the model told that the optimizer needs.

    `layout` is None where there is no flat parameter; `params` are names that may be parameters, in order, with their
    shapes; `own` tells ranks of different replicas that have the same slice.
    """

    layout: FlatLayout | None
    params: dict[str, tuple[int, ...]]
    tied: dict[str, str]
    own: _Own


def _model(
    files: Files,
    ranks: list[Rank],
    names: Callable[[], tuple[ModelNames, str] | None],
    options: Model,
) -> tuple[dict[str, TensorEntry], _Known]:
    keys = list(dict.fromkeys(k for r in ranks for k in r.tree))
    clean = strip_wrappers(str(k) for k in keys)
    columns = {clean[str(k)]: column_of(files, ranks, k) for k in keys}
    places = _places(files, ranks)
    if any(n.rpartition(".")[2] == FLAT for n in columns):
        return _local(files, ranks, columns, places, names, options)
    out = {n: assembled(files, ranks, n, column) for n, column in columns.items()}
    tensors = {n: t for n, t in out.items() if isinstance(t, TensorEntry)}
    sharded = {n for n, column in columns.items() if is_sharded(column[0])}
    params = {n: t.shape for n, t in tensors.items() if n in sharded or (not sharded and "float" in t.dtype)}
    own = [places[r.rank] if sharded else (0, 1) for r in ranks]
    return out, _Known(None, params, tied_weights(tensors), _Own(own, {}))


def _places(files: Files, ranks: list[Rank]) -> dict[int, tuple[int, int]]:
    """Which slice of a flat parameter each rank holds: its place in the group that shards, where tensors tell it."""
    out = {}
    for r in ranks:
        place = next((files.shards(r.file, str(k), x).place for k, x in r.tree.items() if is_sharded(x)), None)
        out[r.rank] = place or (r.rank, len(ranks))
    return out


def _local(
    files: Files,
    ranks: list[Rank],
    columns: dict[str, list[Any]],
    places: dict[int, tuple[int, int]],
    names: Callable[[], tuple[ModelNames, str] | None],
    options: Model,
) -> tuple[dict[str, TensorEntry], _Known]:
    """The parameters of a LOCAL_STATE_DICT, cut out of its flat parameters."""
    plain = {n: c for n, c in columns.items() if n.rpartition(".")[2] != FLAT}
    flats: dict[str, TensorEntry] = {}
    pieces: dict[str, list[tuple[int, StoredTensor] | None]] = {}
    for name, column in columns.items():
        if name in plain:
            continue
        module, t = name.rpartition(".")[0], assembled(files, ranks, name, column)
        if not isinstance(t, TensorEntry) or len(t.shape) != 1 or "float" not in t.dtype:
            raise Corrupt(
                f'{files.source.root}: the flat parameter of module "{module}" is not a 1-D tensor of floats.'
            )
        flats[module] = t
        had = [files.shards(r.file, name, x).pieces for r, x in zip(ranks, column, strict=True) if is_sharded(x)]
        pieces[module] = [(p[0][0][0], p[0][1]) if p else None for p in had]
    own = _Own([places[r.rank] for r in ranks], pieces)
    layout, slices = _layout(files, plain, flats, own, names, options)
    out: dict[str, TensorEntry] = {}
    for flat in layout.flats:
        whole = _Spans.of(flats[flat.module])
        for part in flat.parts:
            # a parameter's own slices are surer than the flat parameter: they need no alignment to be known
            spans = whole
            if part.name in slices:
                spans = _Spans.joined(files, part.first, [(ranks[i], plain[part.name][i]) for i in own.firsts()])
            out[part.name] = TensorEntry(whole.dtype, part.shape, (), spans.chunks(part))
        for alias, owner in flat.shared:
            out[alias] = out[owner]
    lost = [n for n in slices if n not in out]
    if lost:
        raise Corrupt(
            f'{files.source.root}: "{lost[0]}" is in the files, but not in a flat parameter of the layout given.'
        )
    for name, column in plain.items():
        if name not in out:
            out[name] = replicated(files, ranks, name, column)
    listed = [n for n in layout.names or () if n in out]
    out = {n: out[n] for n in dict.fromkeys((*listed, *out))}
    params = {p.name: p.shape for f in layout.flats for p in f.parts}
    tied = {a: b for f in layout.flats for a, b in f.shared}
    return out, _Known(layout, {n: params[n] for n in out if n in params}, tied, own)


class _Spans(NamedTuple):
    """Where the slices of a flat tensor lie: columns (first element, end, file, byte of the first), ascending."""

    first: list[int]
    end: list[int]
    file: list[int]
    offset: list[int]
    dtype: str

    @classmethod
    def of(cls, t: TensorEntry) -> _Spans:
        """Those of a 1-D tensor."""
        c = t.chunks
        rows = sorted(r for r in zip(c.start, c.shape, c.file, c.offset, strict=True) if r[1])
        return cls(
            [r[0] for r in rows], [r[0] + r[1] for r in rows], [r[2] for r in rows], [r[3] for r in rows], t.dtype
        )

    @classmethod
    def joined(cls, files: Files, first: int, slices: Iterable[tuple[Rank, StoredTensor]]) -> _Spans:
        """Those of slices that follow one another from element `first` on."""
        out = cls([], [], [], [], "")
        for r, t in slices:
            out = out._replace(dtype=t.dtype)
            if not t.contiguous:
                raise Unsupported(f"{files.path(r.file)}: a slice of a flat parameter is not contiguous.")
            if t.shape[0]:
                files.keep(r.file, t)
                for column, x in zip(out[:4], (first, first + t.shape[0], r.file, t.extent[0]), strict=True):
                    column.append(x)
                first += t.shape[0]
        return out

    def chunks(self, part: Part) -> Chunks:
        """The boxes of a parameter."""
        out, item = Chunks(len(part.shape)), ITEMSIZE[self.dtype]
        k = bisect_right(self.end, part.first)
        while k < len(self.first) and self.first[k] < part.first + part.numel:
            a = self.first[k]
            for start, size, steps, at in flat_layout.pieces(part, a, self.end[k]):
                out.add(start, size, self.file[k], self.offset[k] + (at - a) * item, prod(size) * item, steps)
            k += 1
        if not part.numel:
            out.add((0,) * len(part.shape), part.shape, 0, 0, 0)
        return out


def _layout(
    files: Files,
    plain: dict[str, list[Any]],
    flats: dict[str, TensorEntry],
    own: _Own,
    names: Callable[[], tuple[ModelNames, str] | None],
    options: Model,
) -> tuple[FlatLayout, set[str]]:
    """(what lies in the flat parameters, names whose slices the files have).

    Raises:
        Unsupported: nothing tells, or what is told does not fit the files.
    """
    given = _given(files, options)
    if given is not None:
        layout, where = given
        shapes = {p.name: p.shape for f in layout.flats for p in f.parts}
        slices = _slices(plain, own, shapes)
        _prove(files, layout, where, flats, plain, own, slices)
        return layout, slices
    asked = names()
    if asked is None:
        raise Unsupported(_three_ways(files, flats))
    told, where = asked
    slices = _slices(plain, own, told.shapes)
    uop = bool(slices)
    tied = _tied_slices(plain, slices) if uop else dict(told.tied)
    if where == _OPTIMIZER:  # it knows neither the order of modules nor what is frozen or tied, the slices do
        told = told._replace(shapes={**told.shapes, **{a: told.shapes[b] for a, b in tied.items() if b in told.shapes}})
        if not uop or not slices <= told.shapes.keys():
            raise Unsupported(_three_ways(files, flats))
    order = list(plain) if uop else [n for n in told.shapes if n not in plain]
    unknown = [n for n in slices if n not in told.shapes]
    if unknown:
        raise Unsupported(
            f'{files.source.root}: "{unknown[0]}" is not among the {len(told.shapes)} names of {where}. {flat_layout.OTHER}'
        )
    if not uop:
        flat_layout.refuse_alphabet(order, where)
    params = [n for n in order if n not in told.buffers and (n in slices or not uop)]
    inside = flat_layout.assigned(params, flats)
    homeless = [m for m in inside if m not in flats]
    if homeless:
        raise Unsupported(
            f'{files.source.root}: "{inside[homeless[0]][0]}" of {where} lies in no wrapped module; the files have flat '
            f"parameters of {flat_layout.listed(flats)}. {flat_layout.OTHER}"
        )
    made = []
    for module in (*inside, *(m for m in flats if m not in inside)):
        whole, members = flats[module], [(n, told.shapes[n]) for n in inside.get(module, ())]
        aligns = flat_layout.aligned(whole.dtype) if uop else (0,)

        def fits(flat: Flat, size: int = whole.shape[0]) -> bool:
            return flat.numel == size and all(
                own.agrees(flat, p, plain[p.name]) for p in flat.parts if p.name in slices
            )

        flat = flat_layout.fitting(module, members, fits, aligns, own.shards, whole.dtype, tied)
        if flat is None:
            raise Unsupported(_no_fit(files, module, whole.shape[0], members, aligns, where, own.shards, uop))
        made.append(flat)
    return FlatLayout(uop, own.shards, tuple(made), tuple(plain if uop else told.shapes)), slices


class _Own(NamedTuple):
    """Which slice of every flat parameter each rank has: `places` (slice, slices) by rank, `pieces` {module: (first
    element, tensor) by rank}."""

    places: list[tuple[int, int]]
    pieces: dict[str, list[tuple[int, StoredTensor] | None]]

    @property
    def shards(self) -> int:
        """Into how many slices flat parameters are cut."""
        return max((n for _, n in self.places), default=1)

    def firsts(self) -> list[int]:
        """The first rank, by its position, of each slice."""
        seen: dict[int, int] = {}
        for i, (k, _) in enumerate(self.places):
            seen.setdefault(k, i)
        return [i for _, i in sorted(seen.items())]

    def agrees(self, flat: Flat, part: Part, column: list[Any]) -> bool:
        """Whether the slices of a parameter in the files are as long, and where, as the flat parameter says."""
        for i, t in enumerate(column):
            a, b = flat_layout.slice_of(flat.numel, self.shards, self.places[i][0])
            a, b = max(a, part.first), min(b, part.first + part.numel)
            if prod(t.shape) != max(0, b - a):
                return False
            piece = self.pieces[flat.module][i]
            same = a < b and piece is not None and piece[1].storage == t.storage
            if same and piece is not None and piece[0] + (t.at - piece[1].at) // ITEMSIZE[t.dtype] != a:
                return False
        return True


def _slices(plain: dict[str, list[Any]], own: _Own, shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
    """Names that stand for the 1-D slices of a parameter (use_orig_params), not for buffers, which every rank has whole:
    views of the flat parameter, or as long together as the parameter."""
    out = set()
    firsts = own.firsts()
    storages = [{x[1].storage for p in own.pieces.values() if (x := p[i])} for i in range(len(own.places))]
    for name, column in plain.items():
        if not all(isinstance(t, StoredTensor) and len(t.shape) == 1 and "float" in t.dtype for t in column):
            continue
        views = any(t.shape[0] and t.storage in storages[i] for i, t in enumerate(column))
        size = prod(shapes[name]) if name in shapes else -1
        total = sum(column[i].shape[0] for i in firsts)
        if views or (total == size and any(column[i].shape[0] != size for i in firsts)):
            out.add(name)
    return out


def _tied_slices(plain: dict[str, list[Any]], slices: set[str]) -> dict[str, str]:
    """{name: the one before whose slices are the same bytes on every rank}."""
    first: dict[Any, str] = {}
    out = {}
    for name in plain:
        if name in slices:
            place = tuple((t.storage.offset, t.at, t.shape) if prod(t.shape) else None for t in plain[name])
            if any(place) and first.setdefault(place, name) != name:
                out[name] = first[place]
    return out


def _given(files: Files, options: Model) -> tuple[FlatLayout, str] | None:
    """The flat layout beside the files, or that of --flat-layout."""
    if files.source.exists(flat_layout.RECORD):
        what = f"{files.source.root}/{flat_layout.RECORD}"
        return flat_layout.from_json(files.source.read_all(flat_layout.RECORD, 256 << 20), what), flat_layout.RECORD
    if options.flat_layout is None:
        return None
    return flat_layout.read_file(options.flat_layout), f"--flat-layout {options.flat_layout}"


def _prove(
    files: Files,
    layout: FlatLayout,
    where: str,
    flats: dict[str, TensorEntry],
    plain: dict[str, list[Any]],
    own: _Own,
    slices: set[str],
) -> None:
    """Compare a layout that was given with the files.

    Raises:
        Unsupported: with the module and the numbers.
    """
    told = {f.module: f for f in layout.flats}
    if told.keys() != flats.keys():
        raise Unsupported(
            f"{files.source.root}: {where} knows flat parameters of {flat_layout.listed(told)}, the files have those of "
            f"{flat_layout.listed(flats)}. They are of jobs that wrapped different modules."
        )
    for module, t in flats.items():
        flat = told[module]
        if flat.numel != t.shape[0]:
            raise Unsupported(
                f'{files.source.root}: the flat parameter of module "{module}" has {t.shape[0]} elements, by {where} it '
                f"has {flat.numel}: another model, another world size, or other mixed precision with use_orig_params."
            )
        for p in flat.parts:
            if p.name in slices and not own.agrees(flat, p, plain[p.name]):
                raise Unsupported(f'{files.source.root}: the slices of "{p.name}" are not where {where} says.')


_OPTIMIZER = "the optimizer's state"


def _names(
    files: Files, options: Model, config: dict[str, Any] | None, optim: list[list[Rank]]
) -> tuple[ModelNames, str] | None:
    """Names and shapes of the model in its order, and who tells them."""
    if options.like is not None and options.like.shapes:
        like = options.like
        buffers = frozenset(n for n, (_, dtype) in like.shapes.items() if "float" not in dtype)
        return ModelNames({n: s for n, (s, _) in like.shapes.items()}, like.tied, buffers, ()), "--like"
    if config is not None:
        return model_names.names_of(config), "the config"
    for ranks in optim:
        shapes = {}
        for name, slots in ranks[0].tree.get("state", {}).items():
            found = [files.shards(ranks[0].file, name, x).shape for x in slots.values() if is_sharded(x)]
            if isinstance(name, str) and found:
                shapes[name] = found[0]
        if shapes:
            clean = strip_wrappers(shapes)
            return ModelNames({clean[n]: s for n, s in shapes.items()}, {}, frozenset(), ()), _OPTIMIZER
    return None


def _three_ways(files: Files, flats: Iterable[str]) -> str:
    name = os.path.basename(files.source.root)
    return (
        f"{files.source.root} holds flat parameters of {flat_layout.listed(flats)}, and no word on which parameters lie in them. "
        "Say it in one of three ways:\n"
        f"  ckpttool convert {name} OUT --to dcp --like model.pt           any other checkpoint of the same model\n"
        f"  ckpttool convert {name} OUT --to dcp --config DIR_OR_HF_ID     its config.json\n"
        f"  ckpttool convert {name} OUT --to dcp --flat-layout flat.json   what ckpttool.describe_fsdp1(model) gives in the job"
    )


def _no_fit(
    files: Files,
    module: str,
    numel: int,
    members: list[tuple[str, tuple[int, ...]]],
    aligns: Sequence[int],
    where: str,
    shards: int,
    uop: bool,
) -> str:
    sizes = [flat_layout.lay_out(module, members, a, shards).numel for a in aligns]
    text = f"{sizes[0]}" if not uop else ", ".join(f"{n} aligned to {a}" for a, n in zip(aligns, sizes, strict=True))
    return (
        f'{files.source.root}: the flat parameter of module "{module}" has {numel} elements, but the {len(members)} '
        f"parameters of {where} that lie in it have {text}. {where[:1].upper()}{where[1:]} is of another model, or the job "
        "wrapped modules that are not in the files."
    )


# ------------------------------------------------------------------------------------------------------- optimizer


def _optimizer(
    files: Files, saved: list[list[Rank]], known: _Known, options: ReadOptions, config: dict[str, Any] | None
) -> dict[Path, Any]:
    """{("optim", ...): leaf} of the optimizer, which may be there twice: with FQNs and as numbered slices."""
    named = [r for r in saved if not _numbered(r[0].tree)]
    raw = [r for r in saved if _numbered(r[0].tree)]
    for kind in (named, raw):
        if len(kind) > 1:
            a, b = (files.names[k[0].file] for k in kind[:2])
            raise Unsupported(
                f"{files.source.root} holds more than one optimizer: {a} and {b}. Move one to a folder of its own."
            )
    chosen = (named or raw)[0]
    groups = _param_groups(files, chosen)
    if named and raw:
        _same_save(files, named[0], raw[0])
        files.notes.append(
            f"the optimizer is there twice; {files.names[chosen[0].file]} and its like are read, which name parameters, "
            f"{files.names[raw[0][0].file]} and its like say the same step and hyperparameters"
        )
    out: dict[Path, Any] = {}
    for i, group in enumerate(groups):
        out.update({("optim", "param_groups", i, str(k)): v for k, v in group.items()})
    columns = _slots(chosen)
    if named:
        return {**out, **_whole_slots(files, chosen, columns)}
    if _flat_numbers(columns) or (not columns and known.layout is not None):
        return {**out, **_unflattened(files, chosen, columns, groups, known, options, config)}
    out.update(_whole_slots(files, chosen, columns))
    given = _given(files, options)
    if given is not None and given[0].use_orig_params and given[0].optimizer is not None:
        numbers = [list(g.get("params") or ()) for g in groups]
        if [len(g) for g in numbers] == [len(g) for g in given[0].optimizer]:
            names = {
                str(x): n for g, h in zip(numbers, given[0].optimizer, strict=True) for x, n in zip(g, h, strict=True)
            }
            out = {(*p[:2], names[str(p[2])], *p[3:]) if p[1] == "state" else p: x for p, x in out.items()}
            out.update({("optim", "param_groups", i, "params"): list(g) for i, g in enumerate(given[0].optimizer)})
    return out


def _numbered(tree: dict[Any, Any]) -> bool:
    ids = [x for g in tree.get("param_groups") or () if isinstance(g, dict) for x in g.get("params") or ()]
    return any(type(x) is int for x in ids or tree.get("state") or ())


def _param_groups(files: Files, ranks: list[Rank]) -> list[dict[Any, Any]]:
    """The param groups, which all ranks must have alike.

    Raises:
        Corrupt: they differ.
    """
    out: list[dict[Any, Any]] = []
    for r in ranks:
        groups = r.tree.get("param_groups")
        if (
            not isinstance(groups, list)
            or not all(isinstance(g, dict) for g in groups)
            or not isinstance(r.tree["state"], dict)
        ):
            raise Corrupt(f"{files.path(r.file)}: an optimizer without param_groups.")
        groups = stored_tensors.inlined(groups, files.reader(r.file), files.path(r.file))
        if r is ranks[0]:
            out = groups
        elif groups != out:
            key = next(
                (k for a, b in zip(out, groups, strict=False) for k in {**a, **b} if a.get(k) != b.get(k)), "params"
            )
            raise Corrupt(
                f'{files.path(r.file)}: its param groups differ from those in {files.names[ranks[0].file]}, first in "{key}". '
                "The files are of different saves; fetch those of one."
            )
    return out


def _slots(ranks: list[Rank]) -> dict[tuple[Any, Any], list[Any]]:
    """{(parameter, slot): what each rank has, None where nothing}. A rank without elements of a parameter has no slot of it.

    Raises:
        Corrupt: a rank has some of the slots of a parameter and not all.
    """
    out: dict[tuple[Any, Any], list[Any]] = {}
    first: dict[Any, tuple[Rank, dict[Any, Any]]] = {}
    for i, r in enumerate(ranks):
        for name, slots in r.tree["state"].items():
            if isinstance(slots, dict) and slots:
                other, has = first.setdefault(name, (r, slots))
                if odd := sorted(map(str, slots.keys() ^ has.keys())):
                    raise Corrupt(
                        f'The optimizer state of parameter {name} has a slot "{odd[0]}" in the file of rank '
                        f"{(r if odd[0] in map(str, slots) else other).rank} and not in that of rank "
                        f"{(other if odd[0] in map(str, slots) else r).rank}. The files are of different jobs, or one was changed."
                    )
                for slot, x in slots.items():
                    out.setdefault((name, slot), [None] * len(ranks))[i] = x
    return out


def _same_save(files: Files, a: list[Rank], b: list[Rank]) -> None:
    """Compare the two forms of one optimizer: hyperparameters, and the steps that occur.

    Raises:
        Corrupt: they are of different saves.
    """

    def summary(ranks: list[Rank]) -> tuple[Any, Any]:
        groups = [
            {k: v for k, v in g.items() if k not in ("params", "param_names")} for g in _param_groups(files, ranks)
        ]
        steps = [
            scalar(files, ranks[0].file, x) for (_, slot), c in _slots(ranks[:1]).items() if slot == "step" for x in c
        ]
        return groups, {shown(x) for x in steps}

    one, two = summary(a), summary(b)
    if one[1] and two[1] and one[1].isdisjoint(two[1]):
        raise Corrupt(
            f"{files.path(a[0].file)} is of step {', '.join(sorted(one[1]))}, {files.names[b[0].file]} of step "
            f"{', '.join(sorted(two[1]))}. They are of different saves; fetch those of one."
        )
    if one[0] != two[0]:
        raise Corrupt(
            f"{files.path(a[0].file)} and {files.names[b[0].file]} have other hyperparameters. Fetch those of one save."
        )


def _flat_numbers(columns: dict[tuple[Any, Any], list[Any]]) -> bool:
    """Whether numbered slots are slices of flat parameters: 1-D, all of them."""
    wide = [x for c in columns.values() for x in c if is_sharded(x) or (isinstance(x, StoredTensor) and x.shape)]
    return bool(wide) and all(isinstance(x, StoredTensor) and len(x.shape) == 1 for x in wide)


def _unflattened(
    files: Files,
    ranks: list[Rank],
    columns: dict[tuple[Any, Any], list[Any]],
    groups: list[dict[Any, Any]],
    known: _Known,
    options: ReadOptions,
    config: dict[str, Any] | None,
) -> dict[Path, Any]:
    """State and groups by FQN of an optimizer whose slots are 1-D slices.

    Raises:
        Unsupported: the numbers cannot be named with certainty. Corrupt: slots of one parameter are not equally long.
    """
    ids = [list(g.get("params") or ()) for g in groups]
    lengths = _lengths(files, ranks, columns)
    expected = [[lengths.get(x) for x in group] for group in ids]
    own = known.own if known.own.places else _Own([(i, len(ranks)) for i in range(len(ranks))], {})
    layout = known.layout
    resolved: list[list[str]] | None = None
    if layout is not None:
        resolved = _resolved(layout, own, expected)
    else:
        for guess in _guesses(files, known, own, expected, options, config):
            resolved = _resolved(guess, own, expected)
            if resolved is not None:
                layout = guess
                break
        if resolved is None and own.shards == 1:  # use_orig_params, and all parameters have one dimension
            return _whole_slots(files, ranks, columns)
    if layout is None or resolved is None:
        raise Unsupported(_unresolved(files, ranks, ids, lengths, layout, known))
    by_key = {f.key: f for f in layout.flats}
    by_name = {p.name: (f, p) for f in layout.flats for p in f.parts}
    copies = dict(layout.copies)
    by_number: dict[Any, list[tuple[str, list[Any]]]] = {}
    for (x, slot), column in columns.items():
        by_number.setdefault(x, []).append((str(slot), column))
    out: dict[Path, Any] = {}
    for i, (numbers, names) in enumerate(zip(ids, resolved, strict=True)):
        fqns: list[str] = []
        for x, name in zip(numbers, names, strict=True):
            parts = [by_name[name]] if layout.use_orig_params else [(by_key[name], p) for p in by_key[name].parts]
            fqns.extend(p.name for _, p in parts)
            for slot, column in by_number.get(x, ()):
                whole = _elements(column) != lengths.get(x)
                out.update(_parted(files, ranks, own, layout, parts, slot, f"{name}.{slot}", column, whole))
        place = {n: k for k, n in enumerate(layout.names or ())}
        fqns = [n for n in fqns if n not in copies]
        out["optim", "param_groups", i, "params"] = sorted(fqns, key=lambda n: place.get(n, len(place)))
    return {path: leaf for path, leaf in out.items() if path[1] != "state" or path[2] not in copies}


def _whole_slots(files: Files, ranks: list[Rank], columns: dict[tuple[Any, Any], list[Any]]) -> dict[Path, Any]:
    """Slots of parameters by name or number, whole or as ShardedTensor or DTensor."""
    out: dict[Path, Any] = {}
    for (x, slot), column in columns.items():
        out["optim", "state", str(x), str(slot)] = slot_of(files, ranks, f"{x}.{slot}", column)
    return out


def _lengths(files: Files, ranks: list[Rank], columns: dict[tuple[Any, Any], list[Any]]) -> dict[Any, tuple[int, ...]]:
    """{number of a parameter: elements that each rank has of it}. One element on every rank, where other slots have
    more, is a number for all of it.

    Raises:
        Corrupt: two slots of one parameter differ, or the ranks differ in dtype.
    """
    out: dict[Any, tuple[int, ...]] = {}
    told: dict[Any, str] = {}
    for (x, slot), column in columns.items():
        n = _elements(column)
        if sum(n) > sum(out.get(x, ())):
            out[x], told[x] = n, str(slot)
    for (x, slot), column in columns.items():
        n = _elements(column)
        if n == out.get(x) or _is_number(column):
            continue
        k = next(i for i in range(len(n)) if n[i] != out[x][i])
        raise Corrupt(
            f'{files.path(ranks[k].file)}: "{slot}" of parameter {x} has {n[k]} elements, its "{told[x]}" has '
            f"{out[x][k]}. The file is damaged or was changed."
        )
    for (x, slot), column in columns.items():
        kinds: dict[str, list[Rank]] = {}
        for r, t in zip(ranks, column, strict=True):
            if isinstance(t, StoredTensor):
                kinds.setdefault(t.dtype, []).append(r)
        if len(kinds) > 1:
            (a, most), (b, odd) = sorted(kinds.items(), key=lambda kv: -len(kv[1]))[:2]
            raise Corrupt(
                f'{files.path(odd[0].file)}: "{slot}" of parameter {x} is {b}, in {files.names[most[0].file]} it is {a}. '
                "The files are of different runs, or one was changed."
            )
    return out


def _elements(column: list[Any]) -> tuple[int, ...]:
    """How many each rank has; none of what is not there, or is a number."""
    return tuple(prod(t.shape) if isinstance(t, StoredTensor) and t.shape else 0 for t in column)


def _is_number(column: list[Any]) -> bool:
    """Whether a slot is one number for all of a parameter."""
    return all(not isinstance(t, StoredTensor) or prod(t.shape) == 1 for t in column)


def _expected(layout: FlatLayout, own: _Own) -> list[tuple[str, tuple[int, ...]]]:
    """(name, elements that each rank has) of what the optimizer numbers."""
    out = []
    for flat in layout.flats:
        if not layout.use_orig_params:
            step = -(-flat.numel // own.shards)
            out.append((flat.key, (step,) * len(own.places)))
            continue
        for p in flat.parts:
            cut = [flat_layout.slice_of(flat.numel, own.shards, k) for k, _ in own.places]
            out.append((p.name, tuple(max(0, min(b, p.first + p.numel) - max(a, p.first)) for a, b in cut)))
    if layout.use_orig_params and layout.names is not None:
        place = {n: i for i, n in enumerate(layout.names)}
        out.sort(key=lambda x: place.get(x[0], len(place)))
    return out


def _resolved(layout: FlatLayout, own: _Own, expected: list[list[Any]]) -> list[list[str]] | None:
    """The name of every number, group by group, when the lengths leave exactly one way."""
    names = _expected(layout, own)
    if layout.optimizer is not None and [len(g) for g in layout.optimizer] == [len(g) for g in expected]:
        lengths = dict(names)
        if all(
            n in lengths and e in (lengths[n], None)
            for g, h in zip(layout.optimizer, expected, strict=True)
            for n, e in zip(g, h, strict=True)
        ):
            return [list(g) for g in layout.optimizer]
    return name_order(names, expected)[0]


def _guesses(
    files: Files,
    known: _Known,
    own: _Own,
    expected: list[list[Any]],
    options: ReadOptions,
    config: dict[str, Any] | None,
) -> Iterable[FlatLayout]:
    """Flat layouts that the lengths of the slots may agree with, where the model's own files tell names and shapes."""
    given = _given(files, options)
    if given is not None:
        yield given[0]
        return
    names, shapes = list(known.params), known.params
    paths = flat_layout.module_paths(names)
    wraps: list[list[str]] = []
    if options.wrap is not None:
        wraps.append(flat_layout.matching(paths, options.wrap))
    else:
        if config is not None:
            wraps.append([b for b in model_names.names_of(config).blocks if b in paths])
        wraps.append(flat_layout.matching(paths, flat_layout.blocks(names)))
        wraps.append([])
    wanted = {n for group in expected for n in group}
    tied = dict(options.like.tied) if options.like else {}
    tied = {**known.tied, **tied}
    if config is not None:
        tied = {**model_names.names_of(config).tied, **tied}
    for modules in wraps:
        inside = flat_layout.assigned(names, modules)
        for aligns in ((0,), *((a,) for a in (4, 8, 2, 16))):
            uop = aligns != (0,)
            made = []
            for module, members in inside.items():

                def fits(flat: Flat, uop: bool = uop) -> bool:
                    found = _expected(FlatLayout(uop, own.shards, (flat,)), own)
                    return all(n in wanted or None in wanted for _, n in found)

                flat = flat_layout.fitting(
                    module, [(n, shapes[n]) for n in members], fits, aligns, own.shards, None, tied
                )
                if flat is None:
                    break
                made.append(flat)
            else:
                yield FlatLayout(uop, own.shards, tuple(made), tuple(names))


def _unresolved(
    files: Files,
    ranks: list[Rank],
    ids: list[list[Any]],
    lengths: dict[Any, tuple[int, ...]],
    layout: FlatLayout | None,
    known: _Known,
) -> str:
    count = sum(map(len, ids))
    first = next(iter(lengths.items()), (0, ()))
    text = (
        f"{files.path(ranks[0].file)}: the optimizer numbers its {count} parameters, and their state is flat: number "
        f"{first[0]} has {', '.join(map(str, first[1][:8]))} elements on the ranks. "
    )
    if layout is not None:
        has = len(_expected(layout, known.own))
        return text + (
            f"That fits no order of the {has} flat parameters of the model, or more than one. Give --flat-layout with the "
            "optimizer's order, ckpttool.describe_fsdp1(model, optimizer) in the job, or --only model."
        )
    return text + (
        "No wrapping that was tried gives such lengths. Name the modules that FSDP1 wrapped, --wrap '**.layers.*', or give "
        "--flat-layout (ckpttool.describe_fsdp1(model, optimizer) in the job), or --only model."
    )


def _parted(
    files: Files,
    ranks: list[Rank],
    own: _Own,
    layout: FlatLayout,
    parts: list[tuple[Flat, Part]],
    slot: str,
    name: str,
    column: list[Any],
    whole: bool,
) -> dict[Path, Any]:
    """One slot of one numbered parameter, cut into what it is for each FQN in it, or `whole` the same for all."""
    if whole:
        leaf = slot_of(files, ranks, name, column)
        return {("optim", "state", p.name, slot): leaf for _, p in parts}
    flat, first = parts[0]
    at = first.first if layout.use_orig_params else 0
    found = [(ranks[i], column[i], own.places[i][0]) for i in own.firsts() if isinstance(column[i], StoredTensor)]
    if layout.use_orig_params:
        spans = _Spans.joined(files, at, [(r, t) for r, t, _ in found])
    else:
        cut = [(r, t, flat_layout.slice_of(flat.numel, own.shards, k)) for r, t, k in found]
        spans = _Spans.joined(files, at, [(r, t._replace(shape=(b - a,))) for r, t, (a, b) in cut])
    return {("optim", "state", p.name, slot): TensorEntry(spans.dtype, p.shape, (), spans.chunks(p)) for _, p in parts}


def _fairscale(files: Files, ranks: list[Rank]) -> tuple[dict[str, Any], _Known]:
    """The model of FairScale's shards, which say themselves what lies in them (`local_metadata_dict`).

    Raises:
        Unsupported: experts that ranks do not share. Corrupt: the metadata contradicts the tensors.
    """
    try:
        return _from_metadata(files, ranks)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as e:
        raise Corrupt(
            f"{files.source.root}: shard_metadata does not fit the model ({type(e).__name__}: {e}); files of different "
            "saves, or a release of FairScale that ckpttool does not know."
        ) from None


def _from_metadata(files: Files, ranks: list[Rank]) -> tuple[dict[str, Any], _Known]:
    trees = [
        {k.replace("_fsdp_wrapped_module.", "").replace("_fpw_module.", ""): x for k, x in r.tree.items()}
        for r in ranks
    ]
    metas = [r.tree["shard_metadata"] for r in ranks]
    out: dict[str, Any] = {}
    flats: list[Flat] = []
    for i, wrapped in enumerate(metas[0]["param_metadata"]):
        path = wrapped["fsdp_path"].replace("_fsdp_wrapped_module.", "").replace("_fpw_module.", "")
        if wrapped.get("no_broadcast_optim_state") and len(ranks) > 1:
            raise Unsupported(
                f'{files.path(ranks[0].file)}: "{path}" has experts that each rank has for itself; ckpttool reads shards of '
                "what ranks have together."
            )
        for backing, told in wrapped["params"].items():
            key = f"{path}.{backing}" if path else backing
            spans, at, dtype = [], 0, ""
            for r, tree, meta in zip(ranks, trees, metas, strict=True):
                t, pad = tree[key], meta["param_metadata"][i]["params"][backing]["padding"]
                n = prod(t.shape) - pad
                if not t.contiguous or n < 0 or (dtype and t.dtype != dtype):
                    raise ValueError(f"{key} of rank {r.rank}: {t.dtype} {t.shape}, of which {pad} are padding")
                files.keep(r.file, t)
                spans.append((at, at + n, r.file, t.extent[0]))
                at, dtype = at + n, t.dtype
            columns = [list(c) for c in zip(*[s for s in spans if s[0] < s[1]], strict=True)] or [[], [], [], []]
            params = [
                (f"{path}.{n}" if path else n, tuple(s)) for n, s in zip(told["names"], told["shapes"], strict=True)
            ]
            params = [(n.replace("_fpw_module.", ""), s) for n, s in params]
            flat = flat_layout.lay_out(key, params, dtype=dtype)
            if flat.numel != at or [prod(s) for _, s in params] != list(told["numels"]):
                raise ValueError(f"{key} has {at} elements, its parameters {flat.numel}")
            whole = _Spans(columns[0], columns[1], columns[2], columns[3], dtype)
            out.update((p.name, TensorEntry(dtype, p.shape, (), whole.chunks(p))) for p in flat.parts)
            flats.append(flat)
        for one, other in wrapped.get("shared_param_info") or ():
            for a, b in ((one, other), (f"{path}.{one}", f"{path}.{other}")):
                if a in out:
                    out.setdefault(b, out[a])
    for name in metas[0].get("buffer_names") or ():
        if name not in out and all(name in t for t in trees):
            out[name] = replicated(files, ranks, name, [t[name] for t in trees])
    shapes = {p.name: p.shape for f in flats for p in f.parts}
    own = _Own([(i, len(ranks)) for i in range(len(ranks))], {})
    return out, _Known(FlatLayout(False, len(ranks), tuple(flats), tuple(out)), shapes, {}, own)


LAYOUTS = (
    Layout(
        name="fsdp1",
        title="FSDP1: one torch.save file a rank",
        detect=detect,
        read=read,
        write=write,
        options=Fsdp1Options,
        aliases=("local", "local_state_dict"),
    ),
)
