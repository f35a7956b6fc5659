"""Which parameters are in which flat parameter of FSDP1, where, and which part each rank has. Arithmetic only.

FSDP1 puts all parameters of a wrapped module that no wrapped module inside it claims, one after the other, into one
1-D flat parameter, and gives every rank a slice of that (torch/distributed/fsdp/_flat_param.py, FlatParamHandle):

    order       that of `named_parameters()`, which is the order of the state dict; each flattened row-major, or in the
                order of its storage where it is dense but not contiguous (a transposed weight)
    tied        a parameter that two names share inside one wrapped module is stored once
    pads        use_orig_params=False: none. True: before each parameter so that it begins at a multiple of
                A = 16 bytes / itemsize of the dtype of the forward pass, and one behind the last so that the world
                size divides the whole. N elements in all.
    slices      s = ceil(N / world size); rank r holds [r*s, (r+1)*s). With use_orig_params=False the last slices are
                padded with zeros, in memory and in the optimizer's state.

Nothing of that is in a checkpoint, so it is kept in a JSON file: `describe_fsdp1(model)` makes it in a live job, and
ckpttool writes it next to the per-rank files:

    {"format": "fsdp1 flat layout", "version": 1, "use_orig_params": false, "shards": 4,
     "flat_params": [{"module": "model.layers.0", "dtype": "float32", "numel": 9792,
                      "params": [{"name": "model.layers.0.mlp.up_proj.weight", "shape": [50, 36], "first": 0}, ...],
                      "shared": {"lm_head.weight": "model.embed_tokens.weight"}}, ...],
     "names": ["model.embed_tokens.weight", ...],
     "optimizer": [["_flat_param", "model.layers.0._flat_param"]]}

`first` is the element of the flat parameter where a parameter begins, `strides` is there where it is not row-major,
`names` are all keys of the model's state dict in its order, buffers and second names of tied weights among them,
`optimizer` lists what its param groups hold, by the keys that LOCAL_STATE_DICT uses, or by FQN.

Without such a file the same follows from the names and shapes of the model in order, and from the wrapped modules:
`assign_params_to_modules`, `lay_out_flat_parameter`, `find_fitting_layout`. Wrapped modules are named by patterns,
`match_modules`, or found as `find_block_patterns`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import combinations
from math import prod
from typing import Any, NamedTuple

from ...bounded_json import parse
from ...errors import Corrupt, Unsupported, argument
from ...index import boxes
from ...index.checkpoint import ITEMSIZE, MAX_NUMEL
from ...storage.source import Source
from ...storage.urls import make_path_absolute

__all__ = [
    "FLAT",
    "OTHER",
    "RECORD",
    "Flat",
    "FlatLayout",
    "FlatPart",
    "assign_params_to_modules",
    "cut_part_into_boxes",
    "describe_modules",
    "find_block_patterns",
    "find_fitting_layout",
    "find_rank_slice",
    "flat_key",
    "lay_out_flat_parameter",
    "list_module_paths",
    "list_possible_alignments",
    "match_modules",
    "parse_layout_json",
    "read_layout_file",
    "refuse_sorted_names",
    "to_json",
]

#: The name FSDP1 gives a flat parameter; its key is the path of the wrapped module and this.
FLAT = "_flat_param"

#: The file in a folder that lists the contents of its flat parameters.
RECORD = "flat_layout.json"

_FORMAT = "fsdp1 flat layout"
FLAT_LAYOUT_VERSION = 1
OTHER = "It is of another model, or another release of it."
Shape = tuple[int, ...]


class FlatPart(NamedTuple):
    """A parameter inside a flat one; `strides` is None for row-major."""

    name: str
    shape: Shape
    first: int
    strides: Shape | None = None

    @property
    def numel(self) -> int:
        """Get the number of elements of the parameter."""
        return prod(self.shape)


class Flat(NamedTuple):
    """A flat parameter: `numel` counts the pads between its parts, not those at the ends of slices."""

    module: str
    parts: tuple[FlatPart, ...]
    numel: int
    dtype: str | None = None
    shared: tuple[tuple[str, str], ...] = ()  # (second name of a parameter, its first)

    @property
    def key(self) -> str:
        """Get the flat parameter's name in a LOCAL_STATE_DICT, such as "layers.0._flat_param"."""
        return flat_key(self.module)


class FlatLayout(NamedTuple):
    """All flat parameters of a model, in the order of `model.parameters()`; `shards` ranks hold a slice of each.

    `names` is the whole state dict of the model in its order, `optimizer` the param groups: keys of flat parameters,
    or FQNs with use_orig_params. Both are None where not known. `copies` {name: other} are tied weights that lie in two
    flat parameters, of which FSDP1 trains two copies.
    """

    use_orig_params: bool
    shards: int
    flats: tuple[Flat, ...]
    names: tuple[str, ...] | None = None
    optimizer: tuple[tuple[str, ...], ...] | None = None
    copies: tuple[tuple[str, str], ...] = ()


def list_trained_parameters(layout: FlatLayout, listed: Iterable[str]) -> list[str]:
    """List the FQNs of the parameters that a param group trains, in the order of the model; parameters in
    `layout.copies` are left out.

    Args:
        listed: what the param group lists: keys of flat parameters, or FQNs with use_orig_params.
    """
    parts = {f.key: [p.name for p in f.parts] for f in layout.flats}
    copies = dict(layout.copies)
    place = {n: k for k, n in enumerate(layout.names or ())}
    fqns = [n for name in listed for n in parts.get(name, [name]) if n not in copies]
    return sorted(fqns, key=lambda n: place.get(n, len(place)))


def flat_key(module: str) -> str:
    """Return the name of a module's flat parameter: flat_key("model.layers.0") == "model.layers.0._flat_param"; the
    root module's is "_flat_param"."""
    return f"{module}.{FLAT}" if module else FLAT


def find_rank_slice(numel: int, shards: int, rank: int) -> tuple[int, int]:
    """Return (first, stop) of the elements of a flat parameter that a rank holds, without the padding at the end.

    [find_rank_slice(10, 4, r) for r in range(4)] == [(0, 3), (3, 6), (6, 9), (9, 10)]

    Args:
        numel: number of elements of the flat parameter.
        shards: number of ranks that hold a slice of it.
    """
    step = -(-numel // shards)
    return min(rank * step, numel), min((rank + 1) * step, numel)


def list_possible_alignments(dtype: str) -> tuple[int, ...]:
    """List the parameter alignments, in elements, that FSDP1 may have used with use_orig_params, the likeliest first.

    A forward pass in lower precision than the parameters' doubles the usual alignment.
    """
    own = 16 // ITEMSIZE[dtype]
    return tuple(dict.fromkeys((own, 8, 16, 4, 2)))


def lay_out_flat_parameter(
    module: str,
    params: Iterable[tuple[str, Shape]],
    align: int = 0,
    shards: int = 1,
    dtype: str | None = None,
    shared: Iterable[tuple[str, str]] = (),
) -> Flat:
    """Compute where each parameter of a wrapped module lies in the module's flat parameter.

    lay_out_flat_parameter("", [("a", (3,)), ("b", (4,))], align=4, shards=3) places a at element 0 and b at element 4,
    and has 9 elements.

    Args:
        module: path of the wrapped module, "" for the root.
        params: (FQN, shape) of its parameters, in order.
        align: each parameter begins at a multiple of this many elements; 0 for use_orig_params=False.
        shards: number of ranks that hold a slice of it.
        dtype: torch's name of its dtype; None if unknown.
        shared: (second name of a tied parameter, its first name).
    """
    at, parts = 0, []
    for name, shape in params:
        if align:
            at += -at % align
        parts.append(FlatPart(name, tuple(shape), at))
        at += prod(shape)
    if align:
        at += -at % shards
    return Flat(module, tuple(parts), at, dtype, tuple(shared))


def cut_part_into_boxes(part: FlatPart, a: int, b: int) -> Iterator[tuple[Shape, Shape, Shape | None, int]]:
    """Yield the pieces of one parameter that lie in elements [a, b) of its flat parameter: (start, shape, strides,
    first element in the flat parameter).

    Start and shape are a box of the parameter. Every piece is contiguous in the flat parameter; strides are those of
    the box, None where it is row-major.
    """
    a, b = max(a, part.first) - part.first, min(b, part.first + part.numel) - part.first
    if a >= b:
        return
    if part.strides is None:
        for start, size in boxes.flat_to_boxes(part.shape, a, b):
            yield start, size, None, part.first + boxes.flat_start(part.shape, start)
        return
    order = order_dimensions(part.shape, part.strides)
    stored = [part.shape[d] for d in order]
    for start, size in boxes.flat_to_boxes(stored, a, b):
        back = [order.index(d) for d in range(len(order))]
        steps = boxes.strides(size)
        yield (
            tuple(start[k] for k in back),
            tuple(size[k] for k in back),
            tuple(steps[k] for k in back),
            part.first + boxes.flat_start(stored, start),
        )


def order_dimensions(shape: Sequence[int], steps: Sequence[int]) -> list[int]:
    """Return the dimensions of a tensor, ordered from the outermost in memory to the innermost; `steps` are its
    strides, in elements.

    Raises:
        ValueError: the elements have gaps or overlaps in their storage, so that a flat parameter cannot hold them.
    """
    order = sorted(range(len(shape)), key=lambda d: (-steps[d], -shape[d], d))
    if not boxes.is_row_major([shape[d] for d in order], [steps[d] for d in order]):
        raise ValueError(f"a parameter of shape {tuple(shape)} and strides {tuple(steps)} has gaps or overlaps.")
    return order


# ------------------------------------------------------------------------------------------------- wrapped modules


def list_module_paths(names: Iterable[str]) -> list[str]:
    """List the paths of all modules that contain a parameter, the root "" first, in the order of the model.

    Args:
        names: FQNs of the parameters.
    """
    out: dict[str, None] = {"": None}
    for name in names:
        path = name.split(".")
        for k in range(1, len(path)):
            out[".".join(path[:k])] = None
    return list(out)


def match_modules(paths: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """List the paths that match at least one pattern. `*` matches one component of a path, `**` any number of
    components, including none.

    match_modules(["layers.0", "model.layers.0", "model.layers.0.mlp"], ["**.layers.*"]) gives the first two.
    """
    rules = [p.split(".") for p in patterns]

    def fits(path: Sequence[str], rule: Sequence[str]) -> bool:
        """Tell whether the components of a path match those of a pattern."""
        if not rule:
            return not path
        if rule[0] == "**":
            return any(fits(path[k:], rule[1:]) for k in range(len(path) + 1))
        return bool(path) and fnmatchcase(path[0], rule[0]) and fits(path[1:], rule[1:])

    return [p for p in paths if p and any(fits(p.split("."), rule) for rule in rules)]


def find_block_patterns(names: Iterable[str]) -> list[str]:
    """Return patterns of the repeated blocks of a model, such as "model.layers.*", from the names of its parameters.

    Blocks are the items of the outermost numbered module lists that have at least two items and items with submodules.
    """
    lists: dict[str, dict[str, bool]] = {}
    for name in names:
        path = name.split(".")
        k = next((i for i, p in enumerate(path[:-1]) if p.isdecimal() and i), None)
        if k is not None:
            inner = lists.setdefault(".".join(path[:k]), {})
            inner[path[k]] = inner.get(path[k], False) or len(path) > k + 2
    return [f"{prefix}.*" for prefix, inner in lists.items() if len(inner) > 1 and any(inner.values())]


def assign_params_to_modules(names: Iterable[str], modules: Iterable[str]) -> dict[str, list[str]]:
    """Assign parameters to wrapped modules and return {module: names of the parameters in its flat parameter}, in the
    order of `model.parameters()`.

    The root is always wrapped. Modules without parameters of their own have no flat parameter and are left out.

    Args:
        names: FQNs of the parameters, in the order of the model.
        modules: paths of the wrapped modules.
    """
    wrapped = {"", *modules}
    names = list(names)
    place: dict[str, None] = {}  # modules in the order in which a walk from the root meets them
    out: dict[str, list[str]] = {}
    for name in names:
        path = name.split(".")
        inside = [m for k in range(len(path)) if (m := ".".join(path[:k])) in wrapped]
        for m in inside:
            place[m] = None
        out.setdefault(inside[-1], []).append(name)
    return {m: out[m] for m in place if m in out}


def find_fitting_layout(
    module: str,
    params: Sequence[tuple[str, Shape]],
    fits: Callable[[Flat], bool],
    aligns: Sequence[int] = (0,),
    shards: int = 1,
    dtype: str | None = None,
    tied: Mapping[str, str] | None = None,
) -> Flat | None:
    """Find the layout of a module's flat parameter that agrees with what is known about it; None where none does.

    Tried in this order: parameters that are known to be tied stored once; nothing tied; then as few parameters as
    possible left out as tied, among the later ones of equal shape (outside of lists of layers).

    Args:
        module: path of the wrapped module, "" for the root.
        params: (FQN, shape) of its parameters, in the order of the model.
        fits: tells whether a layout agrees.
        aligns: alignments to try, in elements; 0 is use_orig_params=False.
        shards: number of ranks that hold a slice of it.
        dtype: torch's name of its dtype; None if unknown.
        tied: {name: the name it is known to be tied to}.

    Raises:
        Unsupported: two different layouts agree.
    """
    shapes = dict(params)
    known = {n: o for n, o in (tied or {}).items() if n in shapes and o in shapes}
    first: dict[Shape, str] = {}
    lookalikes = {}
    for name, shape in params:
        if (
            len(shape) > 1
            and not any(p.isdecimal() for p in name.removeprefix(f"{module}.").split("."))
            and first.setdefault(shape, name) != name
        ):
            lookalikes[name] = first[shape]
    maybe = [n for n in lookalikes if n not in known][:16]
    owners = {**lookalikes, **known}

    def iterate_fits(left_out: Collection[str]) -> Iterator[Flat]:
        """Yield the layouts that agree and that have the parameters in `left_out` as tied names alone."""
        kept = [(n, s) for n, s in params if n not in left_out]
        shared = [(n, owners[n]) for n, _ in params if n in left_out]
        for align in aligns:
            flat = lay_out_flat_parameter(module, kept, align, shards, dtype, shared)
            if fits(flat):
                yield flat

    # what is known to be tied, then nothing
    for left_out in [known, {}] if known else [{}]:
        if (flat := next(iterate_fits(left_out), None)) is not None:
            return flat
    # as few as possible of those that may be tied
    for k in range(1, min(len(maybe), 4) + 1):
        found: dict[tuple[FlatPart, ...], Flat] = {}
        for more in combinations(maybe, k):
            for flat in iterate_fits({*known, *more}):
                found.setdefault(flat.parts, flat)
        if len(found) > 1:
            ways = " or ".join(
                ", ".join(f'"{n}"' for n, _ in params if n not in {p.name for p in f.parts}) for f in found.values()
            )
            raise Unsupported(
                f'the flat parameter of module "{module}" fits when {ways} is left out as tied to another; which one, '
                f"the files do not tell. Give {argument('flat_layout')} (ckpttool.describe_fsdp1 in the job).",
                code="CKPT0309",
            )
        if found:
            return next(iter(found.values()))
    return None


# ----------------------------------------------------------------------------------------------------------- JSON


def to_json(layout: FlatLayout) -> dict[str, object]:
    """Convert a layout to the JSON object that `parse_layout_json` reads, as plain data."""
    flats = []
    for f in layout.flats:
        parts = []
        for p in f.parts:
            one: dict[str, object] = {"name": p.name, "shape": list(p.shape), "first": p.first}
            if p.strides is not None:
                one["strides"] = list(p.strides)
            parts.append(one)
        flats.append(
            {"module": f.module, "dtype": f.dtype, "numel": f.numel, "params": parts, "shared": dict(f.shared)}
        )
    out: dict[str, object] = {
        "format": _FORMAT,
        "version": FLAT_LAYOUT_VERSION,
        "use_orig_params": layout.use_orig_params,
        "shards": layout.shards,
        "flat_params": flats,
    }
    if layout.names is not None:
        out["names"] = list(layout.names)
    if layout.optimizer is not None:
        out["optimizer"] = [list(g) for g in layout.optimizer]
    if layout.copies:
        out["copies"] = dict(layout.copies)
    return out


def parse_layout_json(data: bytes, what: str) -> FlatLayout:
    """Parse the JSON of a flat layout, and check that parameters lie inside their flat parameter, in order, without
    overlap.

    Args:
        data: the content of the file.
        what: names the file in errors.

    Raises:
        Corrupt: it is no flat layout, or its numbers contradict each other.
    """
    try:
        return _convert_layout(parse(data, what), what)
    except (LookupError, TypeError, ValueError, AttributeError) as e:
        raise Corrupt(
            f"{what} is not a flat layout of FSDP1 ({type(e).__name__}: {e}). It is written inside the job: "
            'json.dump(ckpttool.describe_fsdp1(model), open("flat_layout.json", "w")).',
            code="CKPT0406",
        ) from None


def _convert_layout(tree: Any, what: str) -> FlatLayout:
    """Convert the parsed JSON object of a flat layout; `what` names the file in errors.

    Raises:
        Corrupt: its numbers contradict each other, or it has another format.
        KeyError, TypeError, ValueError, AttributeError: a key is missing or has another type.
    """
    if tree["format"] != _FORMAT or tree["version"] != FLAT_LAYOUT_VERSION:
        raise Corrupt(
            f'{what}: format {tree["format"]!r}, version {tree["version"]!r}; this is "{_FORMAT}", '
            f"{FLAT_LAYOUT_VERSION}.",
            code="CKPT0406",
        )
    uop, shards = tree["use_orig_params"], _parse_size(tree["shards"])
    if type(uop) is not bool or shards < 1:
        raise ValueError("use_orig_params or shards")
    seen: set[str] = set()
    flats = [_convert_flat(f, seen, what) for f in tree["flat_params"]]
    if len({f.module for f in flats}) != len(flats):
        raise Corrupt(f"{what}: two flat parameters of one module.", code="CKPT0406")
    names, groups = tree.get("names"), tree.get("optimizer")
    return FlatLayout(
        uop,
        shards,
        tuple(flats),
        None if names is None else tuple(map(_parse_name, names)),
        None if groups is None else tuple(tuple(map(_parse_name, g)) for g in groups),
        tuple((_parse_name(a), _parse_name(b)) for a, b in tree.get("copies", {}).items()),
    )


def _convert_flat(f: Any, seen: set[str], what: str) -> Flat:
    """Convert the JSON object of one flat parameter.

    Args:
        f: the JSON object.
        seen: names of the parameters in the flat parameters before it; its own names are added.
        what: names the file in errors.

    Raises:
        Corrupt: its parameters overlap, do not fit, or are among `seen`.
        KeyError, TypeError, ValueError, AttributeError: a key is missing or has another type.
    """
    parts, end = [], 0
    for p in f["params"]:
        steps = tuple(map(_parse_size, p["strides"])) if "strides" in p else None
        part = FlatPart(_parse_name(p["name"]), tuple(map(_parse_size, p["shape"])), _parse_size(p["first"]), steps)
        if part.strides is not None:
            order_dimensions(part.shape, part.strides)
        if part.first < end or part.name in seen:
            raise Corrupt(
                f'{what}: "{part.name}" overlaps the parameter before it, or is there twice.', code="CKPT0406"
            )
        seen.add(part.name)
        end = part.first + part.numel
        parts.append(part)
    dtype = None if f["dtype"] is None else _parse_name(f["dtype"])
    shared = tuple((_parse_name(a), _parse_name(b)) for a, b in f["shared"].items())
    flat = Flat(_parse_name(f["module"]), tuple(parts), _parse_size(f["numel"]), dtype, shared)
    if flat.numel < end or (flat.dtype is not None and flat.dtype not in ITEMSIZE):
        raise Corrupt(
            f'{what}: the flat parameter of module "{flat.module}" has {flat.numel} elements, its parameters end at '
            f"{end}.",
            code="CKPT0406",
        )
    if any(b not in {p.name for p in parts} for _, b in flat.shared):
        raise Corrupt(f'{what}: module "{flat.module}" shares parameters that it does not hold.', code="CKPT0406")
    return flat


def _parse_size(x: object) -> int:
    """Return a value of the JSON as it is, if it is an integer from 0 to `MAX_NUMEL`.

    Raises:
        ValueError: it is something else.
    """
    if type(x) is not int or not 0 <= x <= MAX_NUMEL:
        raise ValueError(f"{x!r} is not a size")
    return x


def _parse_name(x: object) -> str:
    """Return a value of the JSON as it is, if it is a text.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(x, str):
        raise ValueError(f"{x!r} is not a name")
    return x


def read_layout_file(path: str) -> FlatLayout:
    """Read the flat layout in the JSON file at `path`.

    Raises:
        Unsupported: there is no such file.
        Corrupt: the file is no flat layout.
    """
    if not os.path.isfile(path):
        raise Unsupported(f"{argument('flat_layout', path)}: no such file.", code="CKPT0302")
    with Source(os.path.dirname(make_path_absolute(path))) as there:
        return parse_layout_json(there.read_all(os.path.basename(path), 256 << 20), path)


def refuse_sorted_names(names: list[str], where: str) -> None:
    """Raise an error if names are sorted, as safetensors sorts them: the order in which FSDP1 flattens parameters is
    lost.

    Args:
        names: FQNs of parameters.
        where: what the names belong to, for the message.

    Raises:
        Unsupported: there are more than 7 names, in alphabetical order.
    """
    if len(names) > 7 and names == sorted(names):
        raise Unsupported(
            f"the {len(names)} names of {where} stand in the order of the alphabet, so the order of the model is lost, "
            "in which FSDP1 flattens parameters. Take a checkpoint that torch saved (.pt, or DCP) for "
            f"{argument('like')}, or give {argument('config')}.",
            code="CKPT0309",
        )


def describe_modules(modules: Iterable[str]) -> str:
    """Return a count and the first paths of modules, for a message: "3 modules (the root, layers.0, layers.1)"."""
    shown = [m or "the root" for m in modules]
    return f"{len(shown)} modules ({', '.join(shown[:3])}{', ...' if len(shown) > 3 else ''})"
