"""The content of the flat parameters in FSDP1's files.

The files do not describe it. `find_flat_layout` takes it from flat_layout.json, --flat-layout, --like or --config, or
from the names in the optimizer, and proves it against the lengths and places of the slices in the files.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import NamedTuple

from ckpttool.engine.flat import flat_layout
from ckpttool.engine.flat.flat_layout import Flat, FlatLayout, FlatPart
from ckpttool.errors import Unsupported, argument
from ckpttool.formats.sharded import is_sharded
from ckpttool.formats.stored_tensors import StoredTensor
from ckpttool.huggingface import model_names
from ckpttool.huggingface.model_names import ModelNames
from ckpttool.index.checkpoint import ITEMSIZE, Chunks, TensorEntry
from ckpttool.index.fqns import strip_wrappers
from ckpttool.layouts import ModelHints
from ckpttool.printable import printable, quote_path

from ..rank_files import Column, Files, Rank

__all__ = ["ModelInfo", "RankSlices", "Spans", "find_flat_layout", "find_model_names", "read_given_layout"]


class ModelInfo(NamedTuple):
    """What reading the optimizer needs to know about the model.

    `layout` is None if there is no flat parameter; `params` are names that may be parameters, in order, with their
    shapes; `own` tells which ranks hold copies of the same slice.
    """

    layout: FlatLayout | None
    params: dict[str, tuple[int, ...]]
    tied: dict[str, str]
    own: RankSlices


class Spans(NamedTuple):
    """The places of the slices of a flat tensor: columns (first element, end, file, byte of the first), ascending."""

    first: list[int]
    end: list[int]
    file: list[int]
    offset: list[int]
    dtype: str

    @classmethod
    def of(cls, t: TensorEntry) -> Spans:
        """Return the spans of the chunks of a 1-D tensor; empty chunks have none."""
        c = t.chunks
        rows = sorted(r for r in zip(c.start, c.shape, c.file, c.offset, strict=True) if r[1])
        return cls(
            [r[0] for r in rows], [r[0] + r[1] for r in rows], [r[2] for r in rows], [r[3] for r in rows], t.dtype
        )

    @classmethod
    def joined(cls, files: Files, first: int, slices: Iterable[tuple[Rank, StoredTensor]]) -> Spans:
        """Return the spans of slices that follow one another in a flat tensor, and record the CRC32s of their storages.

        Args:
            files: the files read, to which the CRC32s are added.
            first: the element of the flat tensor at which the first slice begins.
            slices: (rank, its slice) of each rank that has one, in the order of the flat tensor.

        Raises:
            Unsupported: a slice is not contiguous.
        """
        out = cls([], [], [], [], "")
        for r, t in slices:
            out = out._replace(dtype=t.dtype)
            if not t.contiguous:
                raise Unsupported(
                    f"{files.path(r.file)}: a slice of a flat parameter is not contiguous.", code="CKPT0319"
                )
            if t.shape[0]:
                files.keep(r.file, t)
                for column, x in zip(out[:4], (first, first + t.shape[0], r.file, t.extent[0]), strict=True):
                    column.append(x)
                first += t.shape[0]
        return out

    def chunks(self, part: FlatPart) -> Chunks:
        """Return the chunks, with their places in files, of the parameter `part` of the flat tensor."""
        out, item = Chunks(len(part.shape)), ITEMSIZE[self.dtype]
        k = bisect_right(self.end, part.first)
        while k < len(self.first) and self.first[k] < part.first + part.numel:
            a = self.first[k]
            for start, size, steps, at in flat_layout.cut_part_into_boxes(part, a, self.end[k]):
                out.add(start, size, self.file[k], self.offset[k] + (at - a) * item, prod(size) * item, steps)
            k += 1
        if not part.numel:
            out.add((0,) * len(part.shape), part.shape, 0, 0, 0)
        return out


def find_flat_layout(
    files: Files,
    plain: dict[str, Column],
    flats: dict[str, TensorEntry],
    own: RankSlices,
    names: Callable[[], tuple[ModelNames, str] | None],
    options: ModelHints,
) -> tuple[FlatLayout, set[str]]:
    """Find out which parameters the flat parameters consist of.

    Args:
        files: the files read.
        plain: {name: what each rank has} of everything in the model that is not a flat parameter.
        flats: {wrapped module: its flat parameter}.
        own: which slice of the flat parameters each rank has.
        names: called if neither files nor options give a layout; returns (names and shapes in the model's order, their
            origin as text), or None if they are not known.
        options: what the user states about the model.

    Returns:
        (the layout, names under which the files have 1-D slices of parameters).

    Raises:
        Unsupported: the layout is unknown, or does not fit the files.
    """
    given = read_given_layout(files, options)
    if given is not None:
        layout, where = given
        shapes = {p.name: p.shape for f in layout.flats for p in f.parts}
        slices = _find_slice_names(plain, own, shapes)
        _check_given_layout(files, layout, where, flats, plain, own, slices)
        return layout, slices
    asked = names()
    if asked is None:
        raise _make_undescribed_error(files, flats)
    known, where = asked
    slices = _find_slice_names(plain, own, known.shapes)
    uop = bool(slices)
    tied = _find_tied_slices(plain, slices) if uop else dict(known.tied)
    if where == _OPTIMIZER:  # it knows neither the order of modules nor what is frozen or tied, the slices do
        known = known._replace(
            shapes={**known.shapes, **{a: known.shapes[b] for a, b in tied.items() if b in known.shapes}}
        )
        if not uop or not slices <= known.shapes.keys():
            raise _make_undescribed_error(files, flats)
    order = list(plain) if uop else [n for n in known.shapes if n not in plain]
    unknown = [n for n in slices if n not in known.shapes]
    if unknown:
        raise Unsupported(
            f'{files.source.root}: "{unknown[0]}" is not among the {len(known.shapes)} names of {where}. '
            f"{flat_layout.OTHER}",
            code="CKPT0309",
        )
    if not uop:
        flat_layout.refuse_sorted_names(order, where)
    params = [n for n in order if n not in known.buffers and (n in slices or not uop)]
    inside = flat_layout.assign_params_to_modules(params, flats)
    homeless = [m for m in inside if m not in flats]
    if homeless:
        raise Unsupported(
            f'{files.source.root}: "{inside[homeless[0]][0]}" of {where} lies in no wrapped module; the files have '
            f"flat parameters of {flat_layout.describe_modules(flats)}. {flat_layout.OTHER}",
            code="CKPT0309",
        )
    made = []
    for module in (*inside, *(m for m in flats if m not in inside)):
        whole, members = flats[module], [(n, known.shapes[n]) for n in inside.get(module, ())]
        aligns = flat_layout.list_possible_alignments(whole.dtype) if uop else (0,)

        def fits(flat: Flat, size: int = whole.shape[0]) -> bool:
            """Return whether a flat parameter has `size` elements, and its parts the slices that the files have."""
            return flat.numel == size and all(
                own.slices_fit(flat, p, plain[p.name]) for p in flat.parts if p.name in slices
            )

        flat = flat_layout.find_fitting_layout(module, members, fits, aligns, own.shards, whole.dtype, tied)
        if flat is None:
            raise Unsupported(
                _explain_no_fit(files, module, whole.shape[0], members, aligns, where, own.shards, uop), code="CKPT0309"
            )
        made.append(flat)
    return FlatLayout(uop, own.shards, tuple(made), tuple(plain if uop else known.shapes)), slices


class RankSlices(NamedTuple):
    """Which slice of every flat parameter each rank has: `places` (slice, slices) by rank, `pieces` {module: (first
    element, tensor) by rank}."""

    places: list[tuple[int, int]]
    pieces: dict[str, list[tuple[int, StoredTensor] | None]]

    @property
    def shards(self) -> int:
        """Return the number of slices that flat parameters are cut into; 1 without ranks."""
        return max((n for _, n in self.places), default=1)

    def first_ranks(self) -> list[int]:
        """Return, for each slice in order, the position of the first rank that has it."""
        seen: dict[int, int] = {}
        for i, (k, _) in enumerate(self.places):
            seen.setdefault(k, i)
        return [i for _, i in sorted(seen.items())]

    def slices_fit(self, flat: Flat, part: FlatPart, column: Column) -> bool:
        """Return whether the ranks' slices of a parameter have the places and lengths that its flat parameter implies.

        Args:
            flat: the flat parameter.
            part: where the parameter lies in the flat parameter.
            column: for each rank, its stored slice of the parameter.
        """
        for i, t in enumerate(column):
            a, b = flat_layout.find_rank_slice(flat.numel, self.shards, self.places[i][0])
            a, b = max(a, part.first), min(b, part.first + part.numel)
            if prod(t.shape) != max(0, b - a):
                return False
            piece = self.pieces[flat.module][i]
            same = a < b and piece is not None and piece[1].storage == t.storage
            if same and piece is not None and piece[0] + (t.at - piece[1].at) // ITEMSIZE[t.dtype] != a:
                return False
        return True


def _find_slice_names(plain: dict[str, Column], own: RankSlices, shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
    """Return the names under which the files have 1-D slices of a parameter, as with use_orig_params.

    These are views of the flat parameter, or have together as many elements as the parameter. Buffers, which every rank
    has completely, are not among them.

    Args:
        plain: {name: what each rank has} of everything in the model that is not a flat parameter.
        own: which slice of the flat parameters each rank has.
        shapes: {name: shape} of the parameters whose shapes are known.
    """
    out = set()
    firsts = own.first_ranks()
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


def _find_tied_slices(plain: dict[str, Column], slices: set[str]) -> dict[str, str]:
    """Return {name of a tied weight: the earlier name whose slices are the same bytes on every rank}.

    Args:
        plain: {name: what each rank has} of everything in the model that is no flat parameter.
        slices: the names in `plain` that are slices of parameters.
    """
    first: dict[object, str] = {}
    out = {}
    for name in plain:
        if name in slices:
            place = tuple((t.storage.offset, t.at, t.shape) if prod(t.shape) else None for t in plain[name])
            if any(place) and first.setdefault(place, name) != name:
                out[name] = first[place]
    return out


def read_given_layout(files: Files, options: ModelHints) -> tuple[FlatLayout, str] | None:
    """Read the flat layout next to the files, else that of --flat-layout.

    Returns:
        (layout, its origin as text); None if there is neither.

    Raises:
        CkpttoolError: the file is not a flat layout.
    """
    if files.source.exists(flat_layout.RECORD):
        what = f"{files.source.root}/{flat_layout.RECORD}"
        return flat_layout.parse_layout_json(
            files.source.read_all(flat_layout.RECORD, 256 << 20), what
        ), flat_layout.RECORD
    if options.flat_layout is None:
        return None
    return flat_layout.read_layout_file(options.flat_layout), argument("flat_layout", options.flat_layout)


def _check_given_layout(
    files: Files,
    layout: FlatLayout,
    where: str,
    flats: dict[str, TensorEntry],
    plain: dict[str, Column],
    own: RankSlices,
    slices: set[str],
) -> None:
    """Check that a layout from a file fits the files of the ranks.

    Args:
        files: the files read.
        layout: the layout.
        where: its origin, for errors.
        flats: {wrapped module: its flat parameter}.
        plain: {name: what each rank has} of everything in the model that is not a flat parameter.
        own: which slice of the flat parameters each rank has.
        slices: the names in `plain` that are slices of parameters.

    Raises:
        Unsupported: it does not fit; the error names the module and the numbers.
    """
    known = {f.module: f for f in layout.flats}
    if known.keys() != flats.keys():
        raise Unsupported(
            f"{files.source.root}: {where} knows flat parameters of {flat_layout.describe_modules(known)}, the files "
            f"have those of {flat_layout.describe_modules(flats)}. They are of jobs that wrapped different modules.",
            code="CKPT0309",
        )
    for module, t in flats.items():
        flat = known[module]
        if flat.numel != t.shape[0]:
            raise Unsupported(
                f'{files.source.root}: the flat parameter of module "{module}" has {t.shape[0]} elements, by {where} '
                f"it has {flat.numel}: another model, another world size, or other mixed precision with "
                "use_orig_params.",
                code="CKPT0309",
            )
        for p in flat.parts:
            if p.name in slices and not own.slices_fit(flat, p, plain[p.name]):
                raise Unsupported(
                    f'{files.source.root}: the slices of "{p.name}" are not where {where} says.', code="CKPT0309"
                )


_OPTIMIZER = "the optimizer's state"


def find_model_names(
    files: Files, options: ModelHints, config: dict[str, object] | None, optim: list[list[Rank]]
) -> tuple[ModelNames, str] | None:
    """Return the names and shapes of the model in its order, from --like, the config, or sharded tensors in the
    optimizer.

    Args:
        files: the files read.
        options: what the user states about the model.
        config: the model's config.json; None if there is none.
        optim: for each saved optimizer, what each rank has of it.

    Returns:
        (the names, their origin as text); None if none of the three is there.
    """
    if options.like is not None and options.like.shapes:
        like = options.like
        buffers = frozenset(n for n, (_, dtype) in like.shapes.items() if "float" not in dtype)
        return ModelNames({n: s for n, (s, _) in like.shapes.items()}, like.tied, buffers, ()), argument("like")
    if config is not None:
        return model_names.read_model_names(config), "the config"
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


def _make_undescribed_error(files: Files, flats: Iterable[str]) -> Unsupported:
    """Return the error that the content of flat parameters is not known, with the ways in which the user can describe
    it.

    `flats` are the names of their modules.
    """
    path = quote_path(printable(files.source.root))
    return Unsupported(
        f"{files.source.root} holds flat parameters of {flat_layout.describe_modules(flats)}, but does not say which "
        "parameters they contain. Describe them in one of three ways:",
        listing=f"  ckpttool convert {path} OUT --to dcp --like model.pt           any other checkpoint of the same "
        f"model\n  ckpttool convert {path} OUT --to dcp --config DIR_OR_HF_ID     its config.json\n  ckpttool "
        f"convert {path} OUT --to dcp --flat-layout flat.json   what ckpttool.describe_fsdp1(model) gives in "
        "the job",
        code="CKPT0309",
    )


def _explain_no_fit(
    files: Files,
    module: str,
    numel: int,
    members: list[tuple[str, tuple[int, ...]]],
    aligns: Sequence[int],
    where: str,
    shards: int,
    uop: bool,
) -> str:
    """Return the text of the error that a module's parameters and its flat parameter differ in length.

    Args:
        files: the files read.
        module: the wrapped module.
        numel: the number of elements of its flat parameter in the files.
        members: (name, shape) of the parameters that it should consist of.
        aligns: the alignments that were tried, in elements.
        where: the origin of names and shapes.
        shards: the number of slices of a flat parameter.
        uop: whether the job used use_orig_params=True.
    """
    sizes = [flat_layout.lay_out_flat_parameter(module, members, a, shards).numel for a in aligns]
    text = f"{sizes[0]}" if not uop else ", ".join(f"{n} aligned to {a}" for a, n in zip(aligns, sizes, strict=True))
    return (
        f'{files.source.root}: the flat parameter of module "{module}" has {numel} elements, but the {len(members)} '
        f"parameters of {where} that lie in it have {text}. {where[:1].upper()}{where[1:]} is of another model, or the "
        "job wrapped modules that are not in the files."
    )
