"""Tensor subclasses as composite entries: the tensors inside are entries of their own, the class and the rest is a
value.

    optim.state.w.exp_avg.codes      TensorEntry("uint8", (64, 64))
    optim.state.w.exp_avg.scale      TensorEntry("float32", (16,))
    optim.state.w.exp_avg.qmap       TensorEntry("float32", (256,))
    optim.state.w.exp_avg.__class__  Value: {"class": ("torchao.optim.subclass_8bit", "OptimState8bit"), "dtype":
                                     "float32", "shape": [64, 64], "tensors": ["codes", "scale", "qmap"], "state":
                                     {...}}

`dtype` and `shape` are those that the object shows to the outside; "stride" is there if it is not row-major,
"requires_grad" if it is true. "state" is the object's __dict__ as it was pickled, with a placeholder for each tensor. A
tensor of a subclass inside the subclass has a dotted name ("tensor_impl.data").

`Composite` is the whole as one leaf of a tree: readers make it of a pickled object, `checkpoint_of` takes it apart;
writers of pickles get it from `collapse_composites` and put the object together again (formats/subclasses.py).

torchao decides by the size of each rank's part whether to quantise it, so that some parts of one tensor may be objects
and others plain. Then "parts" is [[first row, rows, whether it is an object], ...] and the tensor `plain` holds the
rows of the plain ones; the other tensors and "state" are those of the objects' rows, one after the other
(`without_plain_rows`). Such a tensor is written as it was cut.

Cutting: ranks of a job cut rows (dim 0). What each tensor inside keeps for so many rows is in proportion, so a cut is
exact where that is a whole number of its rows: blocks are runs of the row-major elements, and none may be divided.
`_KINDS` lists the classes of which that is known.

TransformerEngine's tensors of blocks (MXFP8, Float8Blockwise, NVFP4) have scales that are padded for each rank's part,
so they are written as they were cut, too: "parts" are all objects, of equal numbers of rows, and each tensor inside is
those of the parts, one after the other.

Sources: torchao 0.18, optim/subclass_*.py, quantization/quantize_/workflows, prototype/mx_formats; TransformerEngine
2.20, pytorch/tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

from ..by_fields import ByFields
from .checkpoint import Checkpoint, Leaves, Path, TensorEntry, Value, joined

__all__ = [
    "MARK",
    "PLAIN",
    "CannotCut",
    "Composite",
    "SubclassFacts",
    "add_composite",
    "check_cut",
    "class_label",
    "collapse_composites",
    "describe_composites",
    "describe_unwrapped",
    "find_composites",
    "find_inner_rows",
    "has_padded_scales",
    "is_replicated",
    "resize_rows",
    "shape_of",
    "without_plain_rows",
]

#: Last element of the path of the value that says what the tensors beside it are.
MARK = "__class__"
#: The tensor with the rows that are no objects.
PLAIN = "plain"
#: What describes a tensor subclass: {"class", "dtype", "shape", "state", "tensors", ...}.
SubclassFacts = Mapping[str, Any]


class CannotCut(Exception):
    """Why a tensor subclass cannot be cut there."""


@dataclass(frozen=True, eq=False, repr=False)
class Composite(ByFields):
    """A tensor subclass: `about` is the value at `path` + MARK, `tensors` what is inside, by name."""

    path: Path
    about: SubclassFacts
    tensors: Mapping[str, TensorEntry]

    @property
    def dtype(self) -> str:
        """Return the outer dtype, which the tensor subclass reports as its own."""
        return str(self.about["dtype"])

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the outer shape, which the tensor subclass reports as its own."""
        return tuple(self.about["shape"])

    @property
    def numel(self) -> int:
        """Count the elements of the outer shape."""
        return prod(self.shape)

    def leaves(self) -> Leaves:
        """Return {path: leaf} of the tensors inside, and of the value that describes the object."""
        out: Leaves = {(*self.path, *name.split(".")): t for name, t in self.tensors.items()}
        out[*self.path, MARK] = dict(self.about)
        return out


def shape_of(leaf: object) -> tuple[int, ...] | None:
    """Return the shape of a leaf: of a tensor, or the outer shape of a tensor subclass; None for a plain value."""
    return leaf.shape if isinstance(leaf, (TensorEntry, Composite)) else None


def class_label(about: SubclassFacts) -> str:
    """Return the name of a class of tensor subclasses for people, such as "torchao OptimState8bit".

    Args:
        about: {"class": (module, name of the class), ...}, the value that describes an object of the class.
    """
    module, name = about["class"]
    return f"{module.partition('.')[0]} {name}"


def _is_composite_value(path: Path, data: object) -> bool:
    """Whether `data`, at `path`, is the value that describes a tensor subclass."""
    return (
        path[-1:] == (MARK,)
        and isinstance(data, dict)
        and {"class", "dtype", "shape", "tensors", "state"} <= data.keys()
        and isinstance(data["tensors"], list)
        and isinstance(data["class"], tuple)
        and len(data["class"]) == 2
    )


def collapse_composites(leaves: Mapping[Path, Any]) -> dict[Path, object]:
    """Return {path: leaf} in which one `Composite` replaces the tensors inside a tensor subclass and the value that
    describes it, at the position of the first of them."""
    whole: dict[Path, Composite] = {}
    for path, data in leaves.items():
        if _is_composite_value(path, data):
            inside = {n: leaves.get((*path[:-1], *n.split("."))) for n in data["tensors"]}
            if all(isinstance(t, TensorEntry) for t in inside.values()):
                found = Composite(path[:-1], data, inside)  # type: ignore[arg-type]
                whole |= dict.fromkeys(found.leaves(), found)
    if not whole:
        return dict(leaves)
    out: Leaves = {}
    for path, leaf in leaves.items():
        of = whole.get(path)
        out[path if of is None else of.path] = leaf if of is None else of
    return out


def add_composite(ckpt: Checkpoint, found: Composite) -> None:
    """Add a tensor subclass to a checkpoint: the tensors inside it, and the value that describes it."""
    for path, leaf in found.leaves().items():
        if isinstance(leaf, TensorEntry):
            ckpt.tensors[joined(path)] = replace(leaf, path=path)
        else:
            ckpt.values[joined(path)] = Value(path, leaf)


def find_composites(ckpt: Checkpoint) -> dict[str, Composite]:
    """Find the tensor subclasses of a checkpoint, and return {canonical name: Composite}."""
    marks = {v.path: v.data for v in ckpt.values.values() if _is_composite_value(v.path, v.data)}
    if not marks:
        return {}
    found = collapse_composites({**{t.path: t for t in ckpt.tensors.values()}, **marks})
    return {joined(p): leaf for p, leaf in found.items() if isinstance(leaf, Composite)}


def describe_composites(objects: Mapping[str, Composite]) -> list[str]:
    """Return one sentence for each class of tensor subclasses: how many tensors are of it, and what they are made of.
    `objects` is {name: Composite}."""
    of: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for name, found in objects.items():
        of.setdefault((class_label(found.about), tuple(found.tensors)), []).append(name)
    return [
        f"{len(names):,} tensor{' is a' if len(names) == 1 else 's are'} {kind}, made of {', '.join(inside)}, each of "
        f'which is listed as a tensor; first "{names[0]}"'
        for (kind, inside), names in of.items()
    ]


def describe_unwrapped(tensors: Iterable[TensorEntry]) -> list[str]:
    """Return a sentence for each torchao class of which only the inner dense tensors are in the checkpoint
    (`TensorEntry.wrapper`); other tensors are ignored."""
    of: dict[str, list[str]] = {}
    for t in tensors:
        if t.wrapper:
            of.setdefault(t.wrapper, []).append(joined(t.path))
    return [
        f"{len(names):,} tensor{' is' if len(names) == 1 else 's are'} the dense one inside a torchao {kind}, first "
        f'"{names[0]}": the numbers are those of the training job, and torchao wraps them again when it converts the '
        "model"
        for kind, names in of.items()
    ]


# --------------------------------------------------------------------------------------------------------- cutting


class _Kind(NamedTuple):
    """What is in a class: `rows` are cut with the rows of the whole, `whole` every part has; `shape` is the attribute
    with the shape, `counts` are attributes in proportion to the rows, and a true `never` means that nothing is in the
    order of rows."""

    rows: tuple[str, ...]
    whole: tuple[str, ...] = ()
    shape: str = ""
    counts: tuple[str, ...] = ()
    never: str = ""


_KINDS = {
    "OptimState8bit": _Kind(("codes", "scale"), ("qmap",)),
    "OptimState4bit": _Kind(("codes", "scale"), ("qmap",), shape="_shape"),
    "OptimStateFp8": _Kind(("codes", "scale")),
    "Float8Tensor": _Kind(("qdata", "scale")),
    "Int8Tensor": _Kind(("qdata", "scale", "zero_point"), ("act_quant_scale", "act_quant_zero_point", "act_pre_scale")),
    "MXTensor": _Kind(("qdata", "scale"), never="is_swizzled_scales"),
    "NVFP4Tensor": _Kind(("qdata", "scale"), ("per_tensor_scale", "act_per_tensor_scale"), never="is_swizzled_scales"),
    "NF4Tensor": _Kind(
        ("quantized_data", "quantized_scalers", "quantization_factor"), ("scaler_mean", "nf4"), counts=("n_blocks",)
    ),
}


#: Classes of TransformerEngine. Of those with padded scales, nothing is cut but between the parts of ranks.
_OF_TRANSFORMER_ENGINE = {
    "Float8Tensor": _Kind(("data",), ("fp8_scale_inv",)),
    **dict.fromkeys(
        ("MXFP8Tensor", "Float8BlockwiseQTensor", "NVFP4Tensor"),
        _Kind(
            (
                *("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv"),
                *("amax_rowwise", "amax_columnwise"),
            )
        ),
    ),
}


def has_padded_scales(about: SubclassFacts) -> bool:
    """Whether the scales of a tensor subclass are padded for the part of each rank; `about` is the value that describes
    it."""
    module, name = about["class"]
    return str(module).startswith("transformer_engine.") and name != "Float8Tensor"


def _find_cutting_rule(about: SubclassFacts) -> _Kind:
    """Look up how objects of a tensor subclass are cut into rows. `about` is the value that describes the object.

    Raises:
        CannotCut: the class or a tensor in the object is unknown, or its scales are swizzled, which mixes the rows.
    """
    module, name = about["class"]
    kind = {"torchao": _KINDS, "transformer_engine": _OF_TRANSFORMER_ENGINE}.get(module.partition(".")[0], {}).get(name)
    own = tuple(n for n in about["tensors"] if n.startswith("quantizer."))  # what TransformerEngine quantises with
    kind = kind and kind._replace(whole=(*kind.whole, *own))
    if kind is None or not {*about["tensors"]} <= {*kind.rows, *kind.whole}:
        raise CannotCut(f"ckpttool does not know how a {module}.{name} is divided among ranks")
    if kind.never and about["state"].get(kind.never):
        raise CannotCut(f"the scales of this {name} are swizzled, which mixes its rows")
    return kind


def is_replicated(about: Mapping[str, object], name: str) -> bool:
    """Whether each rank's part of a tensor subclass holds the complete inner tensor `name`, and not only rows of it.
    `about` is the value that describes the object.

    Raises:
        CannotCut: it is not known how to cut objects of this class.
    """
    return name in _find_cutting_rule(about).whole


def find_inner_rows(
    about: SubclassFacts, name: str, shape: tuple[int, ...], first: int, rows: int
) -> tuple[int, int] | None:
    """Return (first row, number of rows) of an inner tensor that belong to some rows of its tensor subclass; None where
    every rank's part holds the complete inner tensor.

    Args:
        about: the value that describes the tensor subclass.
        name: name of the inner tensor.
        shape: shape of the inner tensor in the uncut object.
        first, rows: first row of the tensor subclass, and number of rows.

    Raises:
        CannotCut: the cut is inside a block, the object has no such rows, or it is not known how to cut it.
    """
    total = about["shape"][0] if about["shape"] else 1
    if (first, rows) == (0, total):
        return (0, shape[0]) if shape else None
    kind = _find_cutting_rule(about)
    if name in kind.whole:
        return None
    if not shape:
        raise CannotCut(f'"{name}" is one number for all of its {total} rows')
    if not total:
        raise CannotCut(f"a part has rows {first:,} to {first + rows:,}, and the whole has none")
    a, left = divmod(first * shape[0], total)
    n, over = divmod(rows * shape[0], total)
    if left or over:
        width = prod(about["shape"][1:])
        size, rest = divmod(total * width, shape[0])
        block = f"one row of it is for {size:,} elements" if not rest else f"it has {shape[0]:,} rows for {total:,}"
        raise CannotCut(
            f"rows {first:,} to {first + rows:,} of {list(about['shape'])} are elements {first * width:,} to "
            f'{(first + rows) * width:,}, which cuts a block of "{name}" ({block})'
        )
    return a, n


def resize_rows(about: SubclassFacts, rows: int) -> dict[str, Any]:
    """Return the value that describes a tensor subclass, `about`, changed to `rows` rows.

    Raises:
        CannotCut: it is not known how objects of this class are cut.
    """
    old = list(about["shape"])
    if not old or old[0] == rows:
        return dict(about)
    kind = _find_cutting_rule(about)
    shape = [rows, *old[1:]]
    state = dict(about["state"])
    if kind.shape:
        state[kind.shape] = type(state[kind.shape])(shape)
    for name in kind.counts:
        state[name] = state[name] * rows // old[0] if old[0] else 0
    return {**about, "shape": shape, "state": state}


def without_plain_rows(found: Composite) -> Composite:
    """Return a tensor subclass without the rows that some ranks hold as plain numbers; the same object if it has no
    such rows."""
    if "parts" not in found.about:
        return found
    rows = sum(n for _, n, quantised in found.about["parts"] if quantised)
    inside = {n: t for n, t in found.tensors.items() if n != PLAIN}
    about = {k: v for k, v in found.about.items() if k != "parts"}
    about |= {"shape": [rows, *found.shape[1:]], "tensors": list(inside)}
    return Composite(found.path, about, inside)


def check_cut(found: Composite, sizes: Iterable[int]) -> None:
    """Check that a tensor subclass can be cut into parts of these numbers of rows.

    Args:
        found: the tensor subclass.
        sizes: rows of each part, in order.

    Raises:
        CannotCut: a part would cut a block of quantised numbers, it is not known how to cut the object, or it was saved
            in other parts and fits only those.
    """
    if "parts" in found.about:
        cuts = [n for _, n, _ in found.about["parts"]]
        if [n for n in sizes if n] != cuts:
            if has_padded_scales(found.about):
                raise CannotCut(f"its scales are padded for parts of {', '.join(map(str, cuts))} rows")
            plain = sum(not quantised for *_, quantised in found.about["parts"])
            raise CannotCut(
                f"it was saved in parts of {', '.join(map(str, cuts))} rows, {plain} of them plain, and fits only those"
            )
        return
    if has_padded_scales(found.about) and sum(n > 0 for n in sizes) > 1:
        raise CannotCut("its scales are padded for the whole tensor")
    first = 0
    for rows in sizes:
        for name, t in found.tensors.items():
            if rows:
                find_inner_rows(found.about, name, t.shape, first, rows)
        first += rows
