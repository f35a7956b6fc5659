"""`--dequantize`: quantised tensors as plain numbers.

    optim.state.w.exp_avg.codes, .scale, .qmap, .__class__     ->     optim.state.w.exp_avg, float32
    model.w.data, .fp8_scale_inv, .__class__                   ->     model.w, bfloat16 (transformer_engine.py)
    model.w, model.w_scale_inv                                 ->     model.w, bfloat16 (decoding_weights.py)
    model.w bfloat16, optim.state.w.master_param int16         ->     the latter float32 (remainders.py)

The numbers of torchao's optimizers are those of its own `dequantize()`, bit for bit: one multiplication in
float32 for each element. They are computed when they are read, a part of the source at a time: one rank's part of a
tensor is in memory, as it was in the job that saved it.

Sources: torchao 0.18, optim/quant_utils.py (dequant_with_qmap), optim/subclass_{8bit,4bit,fp8}.py.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from ...errors import Corrupt, Unsupported, UsageError, argument
from ...huggingface.encodings import Encoded, Encodings
from ...index.checkpoint import Checkpoint, Chunk, Chunks, TensorEntry, joined
from ...index.composites import (
    MARK,
    PLAIN,
    CannotCut,
    Composite,
    class_label,
    find_composites,
    find_inner_rows,
    without_plain_rows,
)
from ...index.draft import Dropped
from ...index.records import Extent
from ...storage.overlay import ComputedSource
from ...storage.source import Source
from ..computed_files import BoxReader, ComputedFiles
from ..copy.dtypes import numpy_dtype
from ..copy.stream import read_small_tensors
from .decoding_weights import decode_weights, list_weight_names
from .remainders import add_joined_masters, find_remainders
from .transformer_engine import add_decoded_part, is_of_transformer_engine

if TYPE_CHECKING:
    from ..copy.dtypes import Array
    from ..opening import OpenCheckpoint

__all__ = ["dequantize"]

#: Classes of torchao whose objects are weights in blocks with a scale each, and the tensors in them as `Encoded` has
#: them.
_BLOCKS = frozenset(("Float8Tensor", "Int8Tensor", "MXTensor", "NVFP4Tensor"))
_PARTS = {"qdata": "codes", "scale": "scale", "zero_point": "zero_point", "per_tensor_scale": "scale_2"}


def dequantize(
    opened: OpenCheckpoint,
    patterns: Iterable[str],
    found: Encodings,
    choose: Callable[[str, str], str],
    dtype: str | None,
) -> tuple[Checkpoint, Source, list[Dropped]]:
    """Replace quantised tensors by plain numbers that are computed when they are read: float32 for torchao's objects;
    for encoded weights the dtype that is asked for, or that of the model.

    Args:
        opened: the state, located.
        patterns: globs of the tensors' names.
        found: its encoded weights.
        choose: returns the dtype that a tensor is asked to have, from its name and its present dtype.
        dtype: the dtype of the model in its config; None where the config does not say.

    Returns:
        (the new index, its files, the tensors that the result does not have).

    Raises:
        UsageError: a pattern matches no quantised tensor.
        Unsupported: the numbers of a class or a scheme cannot be computed, or the stored parts do not match those of
            the ranks.
        Corrupt: codes belong to an incomplete encoding.
    """
    ckpt, source = opened.checkpoint, opened.source
    # which tensors: every pattern must name one
    wanted, objects, halves = list(patterns), find_composites(ckpt), find_remainders(ckpt)
    weights = {codes: list_weight_names(codes, w) for codes, w in found.weights.items()}
    _check_patterns(wanted, [*objects, *halves], weights, found)
    chosen = {n: c for n, c in objects.items() if any(fnmatch.fnmatchcase(n, pattern) for pattern in wanted)}
    codes = [n for n, names in weights.items() if any(fnmatch.filter(names, pattern) for pattern in wanted)]
    of_torchao = {n: weight for n, c in chosen.items() if (weight := _describe_torchao_object(n, c)) is not None}
    more = {w.parts["codes"]: w for w in of_torchao.values()}
    # each becomes numbers that are computed when they are read
    lost: list[Dropped] = []
    files = ComputedFiles(ckpt)
    if codes or more:
        every = replace(found, weights={**found.weights, **more})
        ckpt, lost = decode_weights(opened, every, [*codes, *more], choose, dtype, files)
    if of_state := {n: c for n, c in chosen.items() if n not in of_torchao}:
        ckpt = _dequantize_objects(ckpt, source, of_state, files, choose)
    if masters := {n: w for n, w in halves.items() if any(fnmatch.fnmatchcase(n, pattern) for pattern in wanted)}:
        ckpt = add_joined_masters(ckpt, source, masters, files)
    before, marks = opened.checkpoint, {joined((*c.path, MARK)) for c in chosen.values()}
    recorded = {n: d for n, d in before.recorded.items() if ckpt.tensors.get(n) is before.tensors[n]}
    values = {n: v for n, v in ckpt.values.items() if n not in marks}
    ckpt = replace(ckpt, files=files.names, sizes=files.sizes, values=values, recorded=recorded)
    return ckpt, ComputedSource(source, files.made, (), files.working_bytes), lost


def _describe_torchao_object(name: str, found: Composite) -> Encoded | None:
    """Return the encoding of a torchao object that is a weight in blocks with one scale each; None for other objects,
    and where the scales are in another order.

    Sources: torchao 0.18, quantization/quantize_/workflows/{float8,int8}, prototype/mx_formats/{mx,nvfp4}_tensor.py.
    """
    module, kind = map(str, found.about["class"])
    parts = {_PARTS[n]: joined(t.path) for n, t in found.tensors.items() if n in _PARTS}
    state, stored = found.about["state"], found.tensors.get("qdata")
    if not module.startswith("torchao.") or kind not in _BLOCKS or stored is None or len(parts) < len(found.tensors):
        return None
    if state.get("is_swizzled_scales") or "parts" in found.about:
        return None
    size = state["block_size"]
    block = (1, size) if type(size) is int else (1, 1, *size)[-2:]
    packed = stored.dtype in ("uint8", "float4_e2m1fn_x2")
    label = f"{class_label(found.about)}, blocks of {block[0]}x{block[1]}"
    bits = 4 if packed else 8
    return Encoded(label, "fp4" if packed else "blocks", name, found.shape, parts, block, bits, "float32", found.dtype)


def _check_patterns(
    wanted: Iterable[str], objects: Iterable[str], weights: Mapping[str, list[str]], found: Encodings
) -> None:
    """Check that every pattern selects a quantised tensor, and none that is incomplete.

    Args:
        wanted: the patterns.
        objects: names of tensor subclasses, and of masters that are stored as remainders.
        weights: {codes: names by which a pattern can select them}.
        found: the encoded weights.

    Raises:
        UsageError: a pattern selects no quantised tensor.
        Corrupt: a pattern selects a tensor of an incomplete encoding.
    """
    every = [*objects, *(n for names in weights.values() for n in names)]
    for pattern in wanted:
        for fault in found.faults:
            if fnmatch.filter(fault.tensors, pattern):
                raise Corrupt(
                    f"{argument('dequantize')} {pattern!r}: {fault.text}. Numbers of those cannot be computed.",
                    code="CKPT0419",
                )
        if not fnmatch.filter(every, pattern):
            first = f" The first is {every[0]}." if every else " The checkpoint holds none."
            raise UsageError(
                f"{argument('dequantize')} {pattern!r}: no quantised tensor has such a name.{first}", code="CKPT0207"
            )


def _dequantize_objects(
    ckpt: Checkpoint,
    source: Source,
    chosen: Mapping[str, Composite],
    files: ComputedFiles,
    choose: Callable[[str, str], str],
) -> Checkpoint:
    """Replace tensor subclasses by plain tensors, and return the index. torchao's become float32; TransformerEngine's
    get the dtype that is asked for, or the one that they show.

    Args:
        chosen: {name: tensor subclass}.
        files: gets the computed files.
        choose: returns the dtype that a tensor is asked to have, from its name and its present dtype.

    Raises:
        Unsupported: the numbers of a class cannot be computed, or the stored parts do not match those of the ranks.
    """
    # each is a file that is computed when it is read, one for each part in which it is stored
    names = {path: n for n, c in chosen.items() for path in c.leaves()}
    tensors: dict[str, TensorEntry] = {}
    reader = BoxReader(ckpt, source)
    for name, t in ckpt.tensors.items():
        of = names.get(t.path)
        if of is None:
            tensors[name] = t
        elif of not in tensors:
            found = chosen[of]
            other = is_of_transformer_engine(found.about)
            dtype = choose(of, found.dtype) if other else "float32"
            compute = None if other else _FORMULAS.get(str(found.about["class"][1]))
            if not other and (compute is None or not str(found.about["class"][0]).startswith("torchao.")):
                raise Unsupported(
                    f'"{of}" is a {class_label(found.about)}, whose numbers ckpttool does not compute. It knows '
                    f"{', '.join([*_FORMULAS, *sorted(_BLOCKS)])}, whose scales lie row by row. Leave it out of "
                    f"{argument('dequantize')}.",
                    code="CKPT0318",
                )
            chunks = Chunks(len(found.shape))
            for row, shape, parts in _list_stored_parts(found):
                start: tuple[int, ...] = (row, *(0 for _ in shape[1:]))
                if compute is None:
                    place = add_decoded_part(of, found.about, (row, shape), parts, reader, files, dtype)
                else:
                    file, part = f"{of} (dequantized, from row {row})", _make_dequantizer(ckpt, source, parts, compute)
                    place = files.add(file, dtype, shape, part, prod(shape), 16)
                chunks.add(start[: len(shape)], shape, *place)
            tensors[of] = TensorEntry(dtype, found.shape, found.path, chunks)
    kinds = ", ".join(dict.fromkeys(class_label(c.about) for c in chosen.values()))
    dtypes = ", ".join(dict.fromkeys(tensors[n].dtype for n in chosen))
    files.working_bytes += reader.working_bytes
    note = f"{len(chosen):,} tensors ({kinds}) are {dtypes} now, the exact value of each code in float32"
    note += ", rounded once" if dtypes != "float32" else ""
    return replace(ckpt, tensors=tensors, notes=[*ckpt.notes, note])


class _StoredPart(NamedTuple):
    """Rows of an object that were saved by one rank: {name: tensor inside}."""

    first_row: int
    shape: tuple[int, ...]
    tensors: dict[str, TensorEntry]


def _list_stored_parts(found: Composite) -> list[_StoredPart]:
    """List the parts (row ranges) in which a quantised tensor is stored; one part with everything, where the chunks of
    its components do not cover the same rows.

    Raises:
        Unsupported: a tensor that only some ranks have quantised is not stored in the parts of the ranks.
    """
    if "parts" in found.about:
        return _list_mixed_parts(found)
    main = next(iter(found.tensors.values()))
    whole = [_StoredPart(0, found.shape, dict(found.tensors))]
    if len(main.chunks) < 2 or not found.shape:
        return whole
    out = []
    total = found.shape[0]
    for c in sorted(main.chunks, key=lambda c: c.start):
        first, over = divmod(c.start[0] * total, main.shape[0])
        rows, left = divmod(c.shape[0] * total, main.shape[0])
        inside: dict[str, TensorEntry] = {}
        for name, t in found.tensors.items():
            try:
                at = find_inner_rows(found.about, name, t.shape, first, rows)
            except CannotCut:
                return whole
            part = t if at is None else _find_chunk_of_rows(t, *at)
            if part is None or over or left:
                return whole
            inside[name] = part
        out.append(_StoredPart(first, (rows, *found.shape[1:]), inside))
    return out


def _list_mixed_parts(found: Composite) -> list[_StoredPart]:
    """List the parts of a tensor that some ranks have quantised and others have not.

    Raises:
        Unsupported: the parts are not those of the ranks any more.
    """
    whole, out = without_plain_rows(found), []
    of_objects = of_plain = 0
    for first, rows, quantised in found.about["parts"]:
        inside: dict[str, TensorEntry | None] = {}
        if not quantised:
            inside[PLAIN] = _find_chunk_of_rows(found.tensors[PLAIN], of_plain, rows)
        else:
            cuts = {n: find_inner_rows(whole.about, n, t.shape, of_objects, rows) for n, t in whole.tensors.items()}
            inside = {n: t if (c := cuts[n]) is None else _find_chunk_of_rows(t, *c) for n, t in whole.tensors.items()}
        of_objects, of_plain = (of_objects + rows, of_plain) if quantised else (of_objects, of_plain + rows)
        parts = {n: t for n, t in inside.items() if t is not None}
        if len(parts) < len(inside):
            raise Unsupported(
                f'"{joined(found.path)}" is not stored in the parts in which it was saved. Convert the original '
                "checkpoint.",
                code="CKPT0319",
            )
        out.append(_StoredPart(first, (rows, *found.shape[1:]), parts))
    return out


def _find_chunk_of_rows(t: TensorEntry, first: int, rows: int) -> TensorEntry | None:
    """Return the chunk of a tensor that holds just the rows [first, first + rows), as a tensor; None where there is
    none."""
    for c in t.chunks:
        if (c.start[0], c.shape[0]) == (first, rows) and c.shape[1:] == t.shape[1:] and c.zstd is None:
            alone = Chunk((0,) * len(c.shape), c.shape, Extent(*c.extent), c.strides)
            return replace(t, shape=c.shape, chunks=Chunks.of(len(c.shape), [alone]))
    return None


def _make_dequantizer(
    ckpt: Checkpoint, source: Source, parts: Mapping[str, TensorEntry], compute: Callable[..., Array]
) -> Callable[[int, int], Array]:
    """Return a function (first, end) that reads the tensors of one part of a quantised tensor and returns the part's
    float32 numbers; it ignores the range and always returns all of them.

    Args:
        parts: {name inside the quantised tensor: the tensor}; `PLAIN` for a part that is stored without quantisation.
        compute: a formula that takes the tensors as keyword arguments, arrays of these names.
    """

    def dequantize_part(first: int, end: int) -> Array:
        """Read the tensors of the part, and return its numbers."""
        import numpy as np

        data = read_small_tensors(replace(ckpt, tensors=dict(parts)), source, parts)
        arrays = {n: np.frombuffer(data[n], numpy_dtype(t.dtype)) for n, t in parts.items()}
        return arrays[PLAIN].astype("f4") if PLAIN in arrays else compute(**arrays)

    return dequantize_part


def _scale_blocks(values: Array, scale: Array) -> Array:
    """Multiply each block of values by its scale, in place, and return the values as a flat array. The number of scales
    is the number of blocks."""
    out = values.reshape(len(scale), -1)
    out *= scale.reshape(-1, 1)
    return out.reshape(-1)


def _dequantize_8bit(codes: Array, scale: Array, qmap: Array) -> Array:
    """Return float numbers, flat: look up each 8-bit code in a table, and multiply each block by its scale.

    Args:
        codes: flat, one byte for each number.
        scale: one for each block.
        qmap: the table, {code: number} as an array.
    """
    return _scale_blocks(qmap[codes], scale)


def _dequantize_4bit(codes: Array, scale: Array, qmap: Array) -> Array:
    """Return float numbers, flat: look up each 4-bit code in a table, and multiply each block by its scale.

    Args:
        codes: flat, bytes of two codes each, the upper half first.
        scale: one for each block.
        qmap: the table, {code: number} as an array.
    """
    import numpy as np

    return _scale_blocks(qmap[np.stack([codes >> 4, codes & 15], axis=1).reshape(-1)], scale)


def _dequantize_fp8(codes: Array, scale: Array) -> Array:
    """Return float32 numbers, flat: multiply each block of the float8 numbers `codes` by its scale."""
    return _scale_blocks(codes.astype("f4"), scale)


_FORMULAS: dict[str, Callable[..., Array]] = {
    "OptimState8bit": _dequantize_8bit,
    "OptimState4bit": _dequantize_4bit,
    "OptimStateFp8": _dequantize_fp8,
}
