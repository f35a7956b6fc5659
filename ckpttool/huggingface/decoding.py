"""The numbers of encoded weights: one formula for each kind of code, in numpy.

    FORMULAS["blocks"].compute(weight, rows, read)     ->     rows of the parameter, float32

A formula gets the weight (`encodings.Encoded`), some rows of its parameter, and a reader of boxes of the tensors in
`weight.parts`. It reads no more than it needs. Its float32 is then rounded to `weight.rounded`, in which the reference
computes, so that the result has the reference's bits.

    blocks            code * scale, or (code - zero point) * scale, where a block of rows and columns shares them
    fp4               the same with two codes in a byte, the lower four bits first; NVFP4 has one more scale for the
                      whole weight: ModelOpt multiplies by it (weight_scale_2), compressed-tensors divides by it
                      (weight_global_scale)
    packed integers   (code - zero point) * scale; codes of 1 to 8 bits lie densely in the int32 words of a row, the
                      lowest bits first, and zero points in those of a column
    transposed fp4    gpt-oss: 16 bytes for 32 rows of a column
    gptq, awq, bitsandbytes   packed_formulas.py

Scales that are uint8 are exponents, 2 ** (byte - 127), infinite at 255 as transformers and compressed-tensors compute
it; float8_e8m0fnu is NaN there.

Sources: transformers 5.23, integrations/{finegrained_fp8,mxfp4}.py; DeepSeek-V3, inference/fp8_cast_bf16.py;
compressed_tensors 0.20, compressors and quantization/lifecycle/forward_helpers.py, and 0.8 for g_idx; modelopt 0.47,
torch/quantization/qtensor.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from math import ceil, prod
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from .. import bounded_json
from ..errors import Corrupt, Unsupported
from .encodings import Encoded
from .packed_formulas import (
    dequantize_absmax,
    dequantize_awq,
    dequantize_bnb_4bit,
    dequantize_bnb_int8,
    dequantize_gptq,
    unpack_bits,
)

if TYPE_CHECKING:
    import numpy as np

Array: TypeAlias = "np.ndarray[Any, Any]"

__all__ = ["FORMULAS", "Formula", "Read", "Rows", "scale_numbers"]

_SMALL = 16 << 20  # codes of one matrix that are read whole


class Rows(NamedTuple):
    """Rows [first, end) of one matrix of a parameter; `lead` are its indices in the dimensions before the last two, ()
    where there are none."""

    lead: tuple[int, ...]
    first: int
    end: int


class Read(Protocol):
    """Reads the tensors that an encoded weight is made of, by what they are in `Encoded.parts`."""

    def shape(self, part: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""

    def __call__(self, part: str, *index: int | slice) -> Array:
        """Return a box of a tensor as an array, in the dtype that numpy or ml_dtypes has for it. Indices are integers
        and slices, as in numpy; dimensions without one are read whole."""


class Formula(NamedTuple):
    """How the numbers of one kind of code are computed.

    `compute`  returns the float32 numbers of some rows, [rows, columns], as an array of its own memory
    `step`     rows are asked for in multiples of this, but for the last ones of a matrix
    `shape`    returns the shape of the parameter, where it takes more than shapes of tensors to know; `Encoded.shape`
               is what they tell, or None
    """

    compute: Callable[[Encoded, Rows, Read], Array]
    step: int = 1
    shape: Callable[[Encoded, Read], tuple[int, ...]] | None = None


# ------------------------------------------------------------------------------------------------- codes and scales


def scale_numbers(scale: Array) -> Array:
    """Return scales as float32; bytes are exponents of two."""
    import numpy as np

    if scale.dtype != np.uint8:
        return scale.astype("f4")
    with np.errstate(over="ignore"):
        found: Array = np.ldexp(np.float32(1), scale.astype("i4") - 127)
    return found


def _float_numbers(codes: Array) -> Array:
    """Return codes as float32: float8 numbers, or integers."""
    import numpy as np

    if codes.dtype.itemsize > 1:
        return codes.astype("f4")
    table = np.arange(256, dtype="u1").view(codes.dtype).astype("f4")
    found: Array = table[codes.view("u1")]
    return found


def _fp4_numbers(codes: Array) -> Array:
    """Return the two numbers in each byte as float32, the one in the lower four bits first; the last dimension is twice
    as long."""
    import ml_dtypes
    import numpy as np

    numbers = np.arange(16, dtype="u1").view(ml_dtypes.float4_e2m1fn).astype("f4")
    table = np.stack([np.tile(numbers, 16), np.repeat(numbers, 16)], axis=1)
    found: Array = table[codes.view("u1")].reshape(*codes.shape[:-1], 2 * codes.shape[-1])
    return found


def _read_grid(part: str, rows: Rows, down: int, read: Read) -> Array:
    """Read the scales or zero points of some rows of a matrix, [blocks of rows, blocks of columns]; of one for all, or
    for all columns, that dimension is 1.

    Args:
        part: what they are in `Encoded.parts`.
        down: rows that share one.
    """
    shape, lead = read.shape(part), rows.lead
    if prod(shape) == 1:
        return read(part).reshape(1, 1)
    if len(shape) == len(lead):
        return read(part, *lead).reshape(1, 1)
    found = read(part, *lead, slice(rows.first // down, -(-rows.end // down)))
    return found.reshape(len(found), -1)


def _combine(operate: Callable[..., Array], numbers: Array, grid: Array, block: tuple[int, int], first: int) -> None:
    """Combine numbers in place with those of a grid, of which a block of rows and columns shares each.

    Args:
        operate: numpy's multiply or subtract.
        numbers: [rows, columns], float32.
        grid: [blocks of rows, blocks of columns], float32.
        block: rows and columns of a block.
        first: row of the matrix that the first row of `numbers` is.
    """
    import numpy as np

    if block[0] > 1 and len(grid) > 1:
        at = 0
        for k in range(len(grid)):
            end = at + block[0] - (first + at) % block[0]
            _combine(operate, numbers[at:end], grid[k : k + 1], block, 0)
            at = end
        return
    columns, shared = numbers.shape[1], grid.shape[1]
    if shared == 1:
        operate(numbers, grid, out=numbers)
    elif shared * block[1] == columns:
        blocks = numbers.reshape(len(numbers), shared, block[1])
        operate(blocks, grid[..., None], out=blocks)
    else:
        operate(numbers, np.repeat(grid, block[1], axis=1)[:, :columns], out=numbers)


# ---------------------------------------------------------------------------------------------------------- formulas


def _scale_blocks(weight: Encoded, numbers: Array, rows: Rows, read: Read) -> Array:
    """Subtract the zero points of some rows, if there are any, and multiply by their scales, in place."""
    import numpy as np

    assert weight.block is not None
    if "zero_point" in weight.parts:
        _check_alike(weight, read)
        zeros = _read_grid("zero_point", rows, weight.block[0], read).astype("f4")
        _combine(np.subtract, numbers, zeros, weight.block, rows.first)
    scale = scale_numbers(_read_grid("scale", rows, weight.block[0], read))
    if weight.rounds_scale:
        scale = _rounded(scale, weight.rounded)
    with np.errstate(all="ignore"):
        _combine(np.multiply, numbers, scale, weight.block, rows.first)
    return numbers


def _check_alike(weight: Encoded, read: Read) -> None:
    """Check that there are as many zero points as scales, in one shape, so that none stands for others.

    Raises:
        Corrupt: there are not.
    """
    zeros, scales = read.shape("zero_point"), read.shape("scale")
    if zeros != scales:
        raise Corrupt(
            f'"{weight.parts["zero_point"]}" has zero points in {list(zeros)}, and "{weight.parts["scale"]}" scales in '
            f"{list(scales)}."
        )


def _rounded(numbers: Array, dtype: str) -> Array:
    """Round float32 numbers to another dtype, and return them as float32."""
    import ml_dtypes
    import numpy as np

    to = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    with np.errstate(all="ignore"):
        return numbers.astype(to).astype("f4")


def _read_codes(rows: Rows, read: Read) -> Array:
    """Read the codes of some rows, [rows, codes]; those of a vector are one row."""
    return (
        read("codes", *rows.lead, slice(rows.first, rows.end)) if len(read.shape("codes")) > 1 else read("codes")[None]
    )


def _compute_blocks(weight: Encoded, rows: Rows, read: Read) -> Array:
    """Compute rows of float8 or int8 codes."""
    return _scale_blocks(weight, _float_numbers(_read_codes(rows, read)), rows, read)


def _compute_fp4(weight: Encoded, rows: Rows, read: Read) -> Array:
    """Compute rows of four-bit codes, with the scale of the whole weight where there is one."""
    import numpy as np

    assert weight.block is not None
    numbers = _fp4_numbers(_read_codes(rows, read))
    scale = scale_numbers(_read_grid("scale", rows, weight.block[0], read))
    of_whole = next((part for part in ("scale_2", "global_scale") if part in weight.parts), None)
    lead = read.shape("codes")[:-2]
    if of_whole is None and weight.scheme.startswith("nvfp4") and not weight.parts["codes"].endswith("qdata"):
        raise Corrupt(
            f'"{weight.parts["codes"]}" is nvfp4 without the scale of the whole weight (weight_global_scale or '
            "weight_scale_2), so that its numbers are not known."
        )
    if of_whole is not None and prod(read.shape(of_whole)) not in (1, prod(lead)):
        raise Corrupt(f'"{weight.parts[of_whole]}" has {list(read.shape(of_whole))} numbers, and one scales a weight.')
    with np.errstate(all="ignore"):
        if of_whole == "scale_2":
            scale *= _read_grid(of_whole, rows, rows.end, read)
        elif of_whole is not None:
            scale /= _read_grid(of_whole, rows, rows.end, read)
            if not read.shape(of_whole):  # torch keeps bfloat16 where the other number has no dimension
                scale = _rounded(scale, "bfloat16")
        _combine(np.multiply, numbers, scale, weight.block, rows.first)
    return numbers


def _compute_transposed_fp4(weight: Encoded, rows: Rows, read: Read) -> Array:
    """Compute rows of a parameter that is stored transposed, in groups of 32 of its rows: codes [columns, groups, 16],
    scales [columns, groups]."""
    import numpy as np

    groups = slice(rows.first // 32, -(-rows.end // 32))
    if prod(read.shape("codes")[len(rows.lead) :]) <= _SMALL:  # one long read instead of one for each column
        codes, scale = read("codes", *rows.lead)[:, groups], read("scale", *rows.lead)[:, groups]
    else:
        codes, scale = (read(part, *rows.lead, slice(None), groups) for part in ("codes", "scale"))
    numbers = _fp4_numbers(codes)
    with np.errstate(all="ignore"):
        numbers *= scale_numbers(scale)[..., None]
    return np.ascontiguousarray(numbers.reshape(len(numbers), -1).T)


def _shape_of_packed(weight: Encoded, read: Read) -> tuple[int, ...]:
    """Read the shape of a parameter whose codes are packed integers.

    Raises:
        Corrupt: it is missing, or not that of the codes.
    """
    shape = weight.shape if "shape" not in weight.parts else tuple(int(n) for n in read("shape").reshape(-1))
    words = read.shape("codes")
    if shape is None or len(shape) != len(words) or shape[:-1] != words[:-1] or not _fitting_bits(shape[-1], words[-1]):
        stated = "nothing says the shape of the parameter" if shape is None else f"the parameter is {list(shape)}"
        raise Corrupt(
            f'"{weight.parts["codes"]}" holds integers packed in {list(words)} words of 32 bits, and {stated}.'
        )
    if weight.shape is not None and shape != weight.shape:
        raise Corrupt(
            f'"{weight.weight}" is {list(shape)}, and the groups of config.json make {list(weight.shape)} with '
            f'the scales in "{weight.parts["scale"]}".'
        )
    return shape


def _fitting_bits(count: int, words: int) -> list[int]:
    """List the numbers of bits, the largest first, at which so many integers fill so many words of 32 bits."""
    return [bits for bits in range(8, 0, -1) if count > 0 and -(-count * bits // 32) == words]


def _compute_packed(weight: Encoded, rows: Rows, read: Read) -> Array:
    """Compute rows of densely packed integers.

    Raises:
        Corrupt: zero points or the groups of columns do not fit the codes.
    """
    import numpy as np

    assert weight.shape is not None
    columns = weight.shape[-1]
    codes = _read_codes(rows, read)
    fitting = _fitting_bits(columns, codes.shape[1])
    bits = weight.bits if weight.bits in fitting else fitting[0]
    numbers = unpack_bits(codes, bits, columns).astype("f4")
    scale = _read_grid("scale", rows, 1, read).astype("f4")
    middle = 1 << (bits - 1)
    zeros: Array = np.full((1, 1), middle, "f4")
    if "zero_point" in weight.parts:
        packed = read("zero_point", *rows.lead)
        if packed.dtype == np.int32:
            zeros = unpack_bits(packed.T, bits, weight.shape[-2]).T[rows.first : rows.end].astype("f4")
        else:
            zeros = _read_grid("zero_point", rows, 1, read).astype("f4") + middle
    block = (1, -(-columns // scale.shape[1]))
    order = read("g_idx") if "g_idx" in weight.parts and scale.shape[1] > 1 else None
    odd = "" if zeros.shape in ((1, 1), (len(codes), 1), (len(codes), scale.shape[1])) else "zero_point"
    if order is not None and not (order == -1).any() and not _names_groups(order, columns, scale.shape[1]):
        odd = "g_idx"
    if odd:
        raise Corrupt(f'"{weight.parts[odd]}" does not fit {list(weight.shape)} codes in {scale.shape[1]:,} groups.')
    if order is not None and not (order == -1).any():
        scale, block = scale[:, order], (1, 1)
        zeros = zeros[:, order] if zeros.shape[1] > 1 else zeros
    _combine(np.subtract, numbers, zeros, block, 0)
    _combine(np.multiply, numbers, scale, block, 0)
    return numbers


def _names_groups(order: Array, columns: int, groups: int) -> bool:
    """Tell whether `order` names one of so many groups for each column."""
    fits = order.shape == (columns,) and order.dtype.kind in "iu"
    return bool(fits and (not columns or 0 <= order.min() <= order.max() < groups))


def _read_transposed(weight: Encoded, rows: Rows, per_word: Fraction, read: Read) -> tuple[Array, Array, Array, Array]:
    """Read what the rows of a GPTQ or AWQ weight need, which are columns of its tensors: codes, zero points, scales,
    and the group of each column of the parameter.

    Args:
        per_word: columns of the zero points in a word.

    Raises:
        Corrupt: g_idx names a group that has no scale, or zero points are more or fewer than the scales.
    """
    import numpy as np

    assert weight.shape is not None and weight.block is not None
    here = slice(rows.first, rows.end)
    packed = slice(int(rows.first / per_word), ceil(rows.end / per_word))
    of_codes = packed if read.shape("codes")[1] < weight.shape[0] else here
    # one long read instead of one for each group or word
    small = prod(read.shape("codes")) * 4 <= _SMALL
    codes = read("codes")[:, of_codes] if small else read("codes", slice(None), of_codes)
    groups = read("g_idx") if "g_idx" in weight.parts else np.arange(weight.shape[1]) // weight.block[1]
    scales = read("scale")[:, here]
    if not _names_groups(groups, weight.shape[1], len(scales)):
        raise Corrupt(
            f'"{weight.parts.get("g_idx", weight.parts["codes"])}" names groups of {weight.shape[1]:,} columns that '
            f"have no scale: there are {len(scales)}."
        )
    wanted = (len(scales), ceil(weight.shape[0] / per_word))
    if read.shape("qzeros") != wanted:
        raise Corrupt(f'"{weight.parts["qzeros"]}" is {list(read.shape("qzeros"))}, and not {list(wanted)}.')
    return codes, read("qzeros")[:, packed], scales, groups


def _compute_gptq(weight: Encoded, rows: Rows, read: Read) -> Array:
    """Compute rows of a GPTQ weight."""
    assert weight.bits is not None
    arrays = _read_transposed(weight, rows, Fraction(32, weight.bits), read)
    return dequantize_gptq(*arrays, weight.bits, minus_one=weight.kind == "gptq")


def _compute_awq(weight: Encoded, rows: Rows, read: Read) -> Array:
    """Compute rows of an AWQ weight."""
    return dequantize_awq(*_read_transposed(weight, rows, Fraction(8), read))


class _QuantState(NamedTuple):
    """What bitsandbytes says of a weight of four bits: the shape and dtype of the parameter, numbers of a block, and,
    where absmax is quantised itself, those of its blocks and what is added to all (0: it is not); `item` is the bytes
    of an element of the codes."""

    shape: tuple[int, ...]
    dtype: str
    block: int
    nested_block: int
    offset: float
    item: int


def _read_quant_state(weight: Encoded, read: Read) -> _QuantState:
    """Read the JSON text that bitsandbytes keeps in a tensor.

    Raises:
        Corrupt: it says something else, or there are more or fewer codes, scales or numbers in a table.
    """
    part = next((p for p in weight.parts if p.startswith("quant_state.")), None)
    where = weight.parts.get(part or "", f"{weight.weight}.quant_state")
    if part is None:
        raise Corrupt(f'"{where}" is missing, which says the shape of the parameter and the numbers of a block.')
    found = bounded_json.parse(read(part).tobytes(), where)
    try:
        shape = tuple(found["shape"])
        nested = "nested_absmax" in weight.parts
        out = _QuantState(
            shape,
            found["dtype"],
            int(found["blocksize"]),
            int(found["nested_blocksize"]) if nested else 0,
            float(found["nested_offset"]) if nested else 0.0,
            read("codes", *(slice(0, 1) for _ in read.shape("codes"))).itemsize,
        )
    except (KeyError, TypeError, ValueError) as e:
        raise Corrupt(f'"{where}" is not what bitsandbytes writes ({type(e).__name__}: {e}).') from None
    sound = all(type(n) is int and n >= 0 for n in shape) and out.block > 0 and out.nested_block >= nested
    if out.dtype not in ("float32", "float16", "bfloat16") or not sound:
        raise Corrupt(f'"{where}" is not what bitsandbytes writes: {str(found)[:300]}.')
    # as many codes and scales as that says
    size, codes, blocks = prod(shape), read.shape("codes"), read.shape("scale")[0]
    if prod(codes) != -(-size // (2 * out.item)) or max(codes) != prod(codes) or blocks != -(-size // out.block):
        raise Corrupt(
            f'"{weight.parts["codes"]}" is {list(codes)} of {out.item} bytes with {blocks} scales, and a parameter of '
            f"{list(shape)} in blocks of {out.block} has others."
        )
    nests = -(-blocks // out.nested_block) if nested else 0
    wanted = {"quant_map": 16, **({"nested_absmax": nests, "nested_quant_map": 256} if nested else {})}
    for name, count in wanted.items():
        if name not in weight.parts or read.shape(name) != (count,):
            raise Corrupt(f'"{weight.parts.get(name, f"{weight.weight}.{name}")}" does not have {count:,} numbers.')
    return out


def _compute_bnb_4bit(weight: Encoded, rows: Rows, read: Read) -> Array:
    """Compute rows of NF4 or FP4, rounded to the dtype of its quant_state: parts of a flat tensor."""
    import numpy as np

    state, columns = _read_quant_state(weight, read), (1, *(weight.shape or ()))[-1]
    codes, item = read.shape("codes"), state.item
    matrix = int(np.ravel_multi_index(rows.lead, weight.shape[:-2])) if rows.lead and weight.shape else 0
    above = matrix * (weight.shape or (1, 1))[-2] if rows.lead else 0
    first, end = (above + rows.first) * columns, (above + rows.end) * columns
    start = first // (2 * item)
    packed = slice(start, -(-end // (2 * item)))
    flat = read("codes", 0, packed) if codes[0] == 1 and len(codes) > 1 else read("codes", packed)
    low, high = first // state.block, -(-end // state.block)
    absmax = read("scale", slice(low, high))
    if state.nested_block:
        outer = np.arange(low, high) // state.nested_block
        of_absmax = read("nested_absmax")[outer]
        absmax = dequantize_absmax(absmax, of_absmax, read("nested_quant_map"), state.offset)
    repeated = absmax.astype("f4")[np.arange(first, end) // state.block - low]
    data = np.ascontiguousarray(flat).reshape(-1).view("u1")
    numbers = dequantize_bnb_4bit(data, first - start * 2 * item, end - first, repeated, read("quant_map"))
    return _rounded(numbers, state.dtype).reshape(-1, columns)


def _compute_bnb_int8(weight: Encoded, rows: Rows, read: Read) -> Array:
    """Compute rows of bitsandbytes' int8.

    Raises:
        Unsupported: the codes are in the order of a kernel of old GPUs.
    """
    if "weight_format" in weight.parts and read("weight_format").any():
        raise Unsupported(
            f'"{weight.parts["weight_format"]}" is not 0: the codes are in the order of a kernel of old GPUs, which '
            "bitsandbytes does not read any more. Save the model in row-major order with the version that wrote it."
        )
    here = slice(rows.first, rows.end)
    return dequantize_bnb_int8(read("codes", here), read("scale")[here])


#: {kind of code, as `Encoded.kind` has it: its formula}.
FORMULAS: dict[str, Formula] = {
    "blocks": Formula(_compute_blocks),
    "fp4": Formula(_compute_fp4),
    "transposed fp4": Formula(_compute_transposed_fp4, 32),
    "packed integers": Formula(_compute_packed, 1, _shape_of_packed),
    "gptq": Formula(_compute_gptq, 32),
    "gptq v2": Formula(_compute_gptq, 32),
    "awq": Formula(_compute_awq, 8),
    "bitsandbytes 4": Formula(_compute_bnb_4bit, 1, lambda weight, read: _read_quant_state(weight, read).shape),
    "bitsandbytes 8": Formula(_compute_bnb_int8),
}
