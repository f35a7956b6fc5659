"""`--dequantize` of encoded weights: codes, scales and what else belongs to them become the parameter that they are.

    model.w          float8_e4m3fn      ]
    model.w_scale_inv    float32        ]     ->     model.w, bfloat16

A parameter is one file that is computed when it is read, a page of some rows at a time (computed_files.py): of any
model, one page and the codes and scales of its rows are in memory. huggingface/encodings.py says which tensors belong
together, huggingface/decoding.py has the formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from ...errors import CkpttoolError, Corrupt, Unsupported, argument
from ...huggingface.decoding import FORMULAS, Rows
from ...huggingface.encodings import OF_ACTIVATIONS, Encoded, Encodings
from ...index.checkpoint import PACKED, Checkpoint, Chunks, TensorEntry, joined, tied_weights
from ...index.draft import Dropped
from ...index.records import Extent
from ..computed_files import BoxReader, ComputedFiles, cast_array
from ..copy.dtypes import numpy_dtype
from ..handle import TensorHandle, parse_index

if TYPE_CHECKING:
    from ..copy.dtypes import Array
    from ..opening import OpenCheckpoint

__all__ = ["IndexedReader", "count_parameters", "decode_weights", "list_weight_names"]

_COUNTS = ("parameters", "encoded_parameters", "bits_per_parameter", "encoded_bits_per_parameter")

_NUMBERS = 1 << 21  # of a page
#: Memory that computing a page takes: its numbers in float32 two or three times, codes, and buffers of the reader.
_WORKING_BYTES = 48 << 20
_KEPT = 16 << 20  # bytes of a box that is kept for the next page
_FEW_BUFFERS = 8  # readers whose buffers have the memory of one


def list_weight_names(codes: str, weight: Encoded) -> list[str]:
    """List the names by which a pattern can select an encoded (quantised) weight: the name of the parameter and that of
    its codes, each with and without "model.".

    Args:
        codes: the canonical name of the tensor of codes.
    """
    return [m for n in (weight.weight, codes) for m in (n, n.removeprefix("model."))]


def decode_weights(
    opened: OpenCheckpoint,
    found: Encodings,
    chosen: Iterable[str],
    choose: Callable[[str, str], str],
    dtype: str | None,
    files: ComputedFiles,
) -> tuple[Checkpoint, list[Dropped]]:
    """Replace the codes of quantised weights by parameters that are computed when they are read.

    Args:
        opened: the checkpoint, located.
        found: its encoded weights.
        chosen: the names of the codes to decode.
        choose: returns the dtype that a tensor is asked to have, from its name and its present dtype.
        dtype: the dtype of the model in its config; None where the config does not say.
        files: the files of the checkpoint; those of the parameters are added.

    Returns:
        (the new index, the scales of activations and of the KV cache, which the result does not have).

    Raises:
        Unsupported: a scheme cannot be decoded, or the weight is more than its codes.
        Corrupt: codes and their shape contradict each other, or a parameter of the same name exists beside the codes.
    """
    ckpt, reader = opened.checkpoint, IndexedReader(opened)
    wanted = {codes: found.weights[codes] for codes in chosen}
    for codes, weight in wanted.items():
        _check_decodable(codes, weight, ckpt)
    # what leaves: parts that no other weight has, and, with the last codes, scales of the cache of keys and values
    stays = {n for codes, w in found.weights.items() if codes not in wanted for n in w.parts.values()}
    gone = {n: part for w in wanted.values() for part, n in w.parts.items() if n not in stays}
    of_cache = [] if stays else [n for n, of in found.belongs.items() if of == n and n not in found.weights]
    lost = [n for n, part in gone.items() if part in OF_ACTIVATIONS] + of_cache
    why = "it scales activations, which the dequantised model does not quantise"
    files.working_bytes = max(files.working_bytes, _WORKING_BYTES)
    tensors: dict[str, TensorEntry] = {}
    names: dict[str, str] = {}  # {parameter: the codes that it was}
    for name, t in ckpt.tensors.items():
        if name not in wanted:
            if name not in gone and name not in of_cache:
                tensors[name] = t
            continue
        weight = _choose_dtypes(wanted[name], choose, dtype)
        read = _PartReader(reader, weight.parts)
        weight = replace(weight, shape=_find_weight_shape(weight, read))
        assert weight.shape is not None
        chunks = Chunks.whole(weight.shape, *_add_computed_parameter(weight, read, files))
        above = joined(t.path[:-1])
        inside = weight.weight == above  # of an object of torchao
        path = t.path[:-1] if inside else (*t.path[:-1], weight.weight.removeprefix(f"{above}."))
        tensors[weight.weight] = TensorEntry(weight.dtype, weight.shape, path, chunks)
        names[weight.weight] = name
    kinds = ", ".join(dict.fromkeys(w.scheme for w in wanted.values()))
    dtypes = ", ".join(dict.fromkeys(tensors[n].dtype for n in names))
    note = f"{len(names):,} weights that were codes ({kinds}) are computed numbers now ({dtypes})"
    out = replace(ckpt, tensors=tensors, notes=[*ckpt.notes, note], dequantized={**ckpt.dequantized, **names})
    return out, [Dropped(n, ckpt.tensors[n].nbytes, why) for n in lost]


def count_parameters(opened: OpenCheckpoint, found: Encodings) -> dict[str, int | float | None]:
    """Count the parameters of a model with quantised weights and the bits that each takes, including scales and all
    else that belongs to it. Small tensors that hold shapes are read if the files are local.

    Returns:
        {"parameters": all, "encoded_parameters": those that are quantised, "bits_per_parameter": average of all,
            "encoded_bits_per_parameter": average of the quantised ones}; all values are None where the shape of a
            weight is unknown.
    """
    model = {n: t for n, t in opened.checkpoint.tensors.items() if t.path[0] == "model"}
    reader, encoded, belongs = IndexedReader(opened), 0, set[str]()
    known = not any(t.coding != "raw" for t in model.values()) and not opened.source.is_remote
    for weight in found.weights.values():
        try:
            shape = _find_weight_shape(weight, _PartReader(reader, weight.parts)) if known else weight.shape
        except CkpttoolError:  # damaged: what can be said without it is
            shape = None
        if shape is None:
            return dict.fromkeys(_COUNTS)
        encoded += prod(shape)
        belongs.update(n for part, n in weight.parts.items() if part not in OF_ACTIVATIONS)
    tied = tied_weights(model)
    once = {n: t for n, t in model.items() if n not in tied}
    plain = sum(t.numel * PACKED.get(t.dtype, 1) for n, t in once.items() if n not in found.belongs)
    bits = {n: 8 * t.nbytes for n, t in once.items()}
    every = plain + encoded
    counts = (every, encoded, sum(bits.values()) / max(1, every), sum(bits[n] for n in belongs) / max(1, encoded))
    return dict(zip(_COUNTS, counts, strict=True))


def _find_weight_shape(weight: Encoded, read: _PartReader) -> tuple[int, ...] | None:
    """Return the shape of the parameter that is decoded from some codes; None where it is unknown.

    Raises:
        Corrupt: the tensor that holds it is missing or contradicts the codes.
    """
    formula = FORMULAS.get(weight.kind)
    return formula.shape(weight, read) if formula is not None and formula.shape is not None else weight.shape


def _choose_dtypes(weight: Encoded, choose: Callable[[str, str], str], dtype: str | None) -> Encoded:
    """Return a weight with its `dtype` set to the one in which it is written, and `rounded` to the one to which its
    numbers are rounded first.

    If no dtype is asked for, both are those of the model. Otherwise the numbers are rounded to the dtype in which the
    reference multiplies, so that the later cast to the asked dtype counts what that cannot hold.

    Args:
        choose, dtype: as in `decode_weights`.
    """
    asked = choose(weight.weight, "float64")
    own = dtype or weight.dtype
    to = own if asked == "float64" else weight.rounded or asked
    return replace(weight, rounded=weight.rounded or to, dtype=to)


def _check_decodable(codes: str, weight: Encoded, ckpt: Checkpoint) -> None:
    """Check that a weight can be decoded.

    Args:
        codes: the name of its codes.

    Raises:
        Unsupported: there is no formula, or its inputs are scaled.
        Corrupt: a parameter of the same name exists beside the codes.
    """
    if weight.kind not in FORMULAS:
        raise Unsupported(
            f'"{codes}" is codes in {weight.scheme}, whose numbers ckpttool does not compute. Leave it out of '
            f"{argument('dequantize')}, or dequantise it with the program that quantised it.",
            code="CKPT0318",
        )
    if "pre_quant_scale" in weight.parts:
        raise Unsupported(
            f'"{codes}" goes with "{weight.parts["pre_quant_scale"]}", by which the inputs of the layer are '
            "multiplied, so that a plain weight would be another layer. Leave it out of "
            f"{argument('dequantize')}, or export the model with the program that quantised it.",
            code="CKPT0318",
        )
    if weight.weight != codes and weight.weight in ckpt.tensors:
        raise Corrupt(
            f'"{codes}" holds the codes of "{weight.weight}", and there is a tensor of that name beside it.',
            code="CKPT0419",
        )


class IndexedReader:
    """Reads boxes of tensors of a checkpoint by the index that numpy has for them. The last box of each part is kept
    where it is small, since the next page often needs the same."""

    def __init__(self, opened: OpenCheckpoint) -> None:
        self._opened = opened
        self._boxes = BoxReader(opened.checkpoint, opened.source, _FEW_BUFFERS)
        self._kept: dict[str, tuple[object, Array]] = {}

    def entry(self, name: str) -> TensorEntry:
        """Return the index entry of a tensor."""
        return self._opened.checkpoint.tensors[name]

    def read(self, part: str, name: str, index: tuple[int | slice, ...]) -> Array:
        """Read a box of a tensor.

        Args:
            part: what the tensor is in its weight ("codes", "scale", ...); the last small box of each part is kept.
            name: the tensor.
            index: as numpy takes it; an integer removes the dimension.
        """
        kept = self._kept.get(part)
        if kept is not None and kept[0] == (name, index):
            return kept[1]
        self._kept.pop(part, None)
        t = self.entry(name)
        start, shape, rest = parse_index(index, t.shape, name)
        found: Array = (
            TensorHandle(self._opened, name)[index]
            if t.chunks.zstd
            else self._boxes.read(t, [(start, shape)]).reshape(shape)[(*rest, ...)]
        )
        if found.nbytes <= _KEPT:
            self._kept[part] = ((name, index), found)
        return found


class _PartReader(NamedTuple):
    """Reads the tensors of one weight, by what they are in it: `decoding.Read`."""

    boxes: IndexedReader
    parts: Mapping[str, str]

    def shape(self, part: str) -> tuple[int, ...]:
        """Return the shape of the tensor that is this part of the weight."""
        return self.boxes.entry(self.parts[part]).shape

    def __call__(self, part: str, *index: int | slice) -> Array:
        """Read a box of the tensor that is this part of the weight, by a numpy index."""
        return self.boxes.read(part, self.parts[part], index)


def _add_computed_parameter(weight: Encoded, read: _PartReader, files: ComputedFiles) -> Extent:
    """Add a computed file with a decoded parameter, in the dtype `weight.dtype`, and return its place. Each page is
    some complete rows."""
    assert weight.shape is not None
    formula = FORMULAS[weight.kind]
    rows_each, columns = (1, 1, *weight.shape)[-2:]
    leading = weight.shape[:-2]
    count = max(1, _NUMBERS // max(1, columns))
    count += -count % formula.step

    def compute(first: int, end: int) -> Array:
        """Compute the elements [first, end), which are whole rows."""
        import numpy as np

        out = np.empty(end - first, numpy_dtype(weight.dtype))
        at = first
        while at < end:
            matrix, row = divmod(at // columns, rows_each)
            stop = min(rows_each, row + (end - at) // columns)
            lead, here = tuple(int(i) for i in np.unravel_index(matrix, leading)), at
            at += (stop - row) * columns
            try:
                with np.errstate(all="ignore"):
                    numbers = formula.compute(weight, Rows(lead, row, stop), read)
                rounded = cast_array(np.ascontiguousarray(numbers).reshape(-1), "float32", weight.rounded)[0]
                out[here - first : at - first] = cast_array(rounded, weight.rounded, weight.dtype)[0]
            except (ValueError, IndexError) as e:  # of numpy: what a formula does not check by itself
                raise Corrupt(
                    f'"{weight.weight}": the tensors that it is encoded in contradict each other ({e}): '
                    + ", ".join(f"{n} {list(read.shape(part))}" for part, n in weight.parts.items()),
                    code="CKPT0419",
                ) from None
        return out

    return files.add(f"{weight.weight} (dequantized)", weight.dtype, weight.shape, compute, count * columns, 0)
