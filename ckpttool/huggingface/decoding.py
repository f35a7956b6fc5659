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
from math import prod
from operator import imul, isub
from typing import NamedTuple, Protocol

from ..errors import Corrupt
from .encodings import Encoded
from .packed_formulas import (
    SMALL,
    Array,
    compute_awq,
    compute_bnb_4bit,
    compute_bnb_int8,
    compute_gptq,
    is_group_index,
    read_bnb_shape,
    round_numbers,
    unpack_bits,
)

__all__ = ["FORMULAS", "Formula", "Read", "Rows"]


class Rows(NamedTuple):
    """Rows [first, end) of one matrix of a parameter; `lead` are its indices in the dimensions before the last two, ()
    where there are none."""

    lead: tuple[int, ...]
    first: int
    end: int


class Read(Protocol):
    """Reads the tensors that an encoded weight is made of, by what they are in `Encoded.parts`."""

    def shape(self, part: str) -> tuple[int, ...]:
        """Return the shape of the tensor that `Encoded.parts` lists as `part`."""

    def __call__(self, part: str, *index: int | slice) -> Array:
        """Return a box of a tensor as an array, in the dtype that numpy or ml_dtypes has for it.

        Args:
            part: key of the tensor in `Encoded.parts`, such as "scale".
            index: integers and slices, as in numpy, from the first dimension on; dimensions without one are read whole.
        """


class Formula(NamedTuple):
    """How the numbers of one kind of code are computed.

    `compute`  returns the float32 numbers of some rows, [rows, columns], as an array of its own memory; the caller
               silences numpy's warnings about numbers that overflow
    `step`     rows are asked for in multiples of this, but for the last ones of a matrix
    `shape`    returns the shape of the parameter, where it takes more than shapes of tensors to know; `Encoded.shape`
               is what they tell, or None
    """

    compute: Callable[[Encoded, Rows, Read], Array]
    step: int = 1
    shape: Callable[[Encoded, Read], tuple[int, ...]] | None = None


# ------------------------------------------------------------------------------------------------- codes and scales


def _widen_scales(scale: Array) -> Array:
    """Return scales as float32; uint8 scales are exponents of two with a bias of 127."""
    import numpy as np

    if scale.dtype != np.uint8:
        return scale.astype("f4")
    found: Array = np.ldexp(np.float32(1), scale.astype("i4") - 127)
    return found


def _decode_float_codes(codes: Array) -> Array:
    """Return codes as float32; they are numbers of a float8 dtype, or integers."""
    import numpy as np

    if codes.dtype.itemsize > 1:
        return codes.astype("f4")
    table = np.arange(256, dtype="u1").view(codes.dtype).astype("f4")
    found: Array = table[codes.view("u1")]
    return found


def _decode_fp4_codes(codes: Array) -> Array:
    """Return the two numbers in each byte as float32, the one in the lower four bits first; the last dimension is twice
    as long."""
    import ml_dtypes
    import numpy as np

    numbers = np.arange(16, dtype="u1").view(ml_dtypes.float4_e2m1fn).astype("f4")
    table = np.stack([np.tile(numbers, 16), np.repeat(numbers, 16)], axis=1)
    found: Array = table[codes.view("u1")].reshape(*codes.shape[:-1], 2 * codes.shape[-1])
    return found


def _read_scale_grid(part: str, rows: Rows, down: int, read: Read) -> Array:
    """Read the scales or zero points for some rows of a matrix as an array [blocks of rows, blocks of columns]. A
    dimension has length 1 if one number is for all rows or for all columns.

    Args:
        part: "scale", "zero_point" or another key of `Encoded.parts`.
        rows: the rows.
        down: how many rows share one number.
        read: reads a tensor by its key in `Encoded.parts`.
    """
    shape, lead = read.shape(part), rows.lead
    if prod(shape) == 1:
        return read(part).reshape(1, 1)
    if len(shape) == len(lead):
        return read(part, *lead).reshape(1, 1)
    found = read(part, *lead, slice(rows.first // down, -(-rows.end // down)))
    return found.reshape(len(found), -1)


def _apply_grid(operate: Callable[..., Array], numbers: Array, grid: Array, block: tuple[int, int], first: int) -> None:
    """Multiply by, or subtract from, numbers in place the number of a grid that their block of rows and columns shares.

    Args:
        operate: imul or isub.
        numbers: [rows, columns], float32.
        grid: [blocks of rows, blocks of columns], float32.
        block: (rows, columns) of a block.
        first: which row of the matrix the first row of `numbers` is.
    """
    if block[0] > 1 and len(grid) > 1:
        at = 0
        for k in range(len(grid)):
            end = at + block[0] - (first + at) % block[0]
            _apply_grid(operate, numbers[at:end], grid[k : k + 1], block, 0)
            at = end
        return
    columns, shared = numbers.shape[1], grid.shape[1]
    if shared == 1:
        operate(numbers, grid)
    elif shared * block[1] == columns:
        operate(numbers.reshape(len(numbers), shared, block[1]), grid[..., None])
    else:
        operate(numbers, grid.repeat(block[1], axis=1)[:, :columns])


# ---------------------------------------------------------------------------------------------------------- formulas


def _read_codes(rows: Rows, read: Read) -> Array:
    """Read the codes of some rows, [rows, codes]; those of a vector are one row."""
    if len(read.shape("codes")) < 2:
        return read("codes")[None]
    return read("codes", *rows.lead, slice(rows.first, rows.end))


def _compute_blocks(weight: Encoded, rows: Rows, read: Read) -> Array:
    """Compute the numbers of rows of float8, int8 or fp4 codes: subtract the zero points, if there are any, and
    multiply by the scales.

    Raises:
        Corrupt: the zero points do not fit the scales, or the scale of the complete weight is missing or ambiguous.
    """
    assert weight.block is not None
    codes = _read_codes(rows, read)
    numbers = _decode_fp4_codes(codes) if weight.kind == "fp4" else _decode_float_codes(codes)
    if "zero_point" in weight.parts and weight.kind == "blocks":
        of_zeros, of_scales = read.shape("zero_point"), read.shape("scale")
        if of_zeros != of_scales:
            raise Corrupt(
                f'"{weight.parts["zero_point"]}" has zero points in {list(of_zeros)}, and "{weight.scale}" scales in '
                f"{list(of_scales)}.",
                code="CKPT0419",
            )
        zeros = _read_scale_grid("zero_point", rows, weight.block[0], read).astype("f4")
        _apply_grid(isub, numbers, zeros, weight.block, rows.first)
    scale = _widen_scales(_read_scale_grid("scale", rows, weight.block[0], read))
    if weight.kind == "fp4":
        scale = _apply_global_scale(weight, scale, rows, read)
    elif weight.rounds_scale:
        scale = round_numbers(scale, weight.rounded)
    _apply_grid(imul, numbers, scale, weight.block, rows.first)
    return numbers


def _apply_global_scale(weight: Encoded, scale: Array, rows: Rows, read: Read) -> Array:
    """Return the scales of fp4 codes with the scale of the complete weight (scale_2, global_scale) applied, if the
    scheme has one.

    Raises:
        Corrupt: that scale is missing, or there are several.
    """
    of_whole = next((part for part in ("scale_2", "global_scale") if part in weight.parts), None)
    if of_whole is None:
        if weight.scheme.startswith("nvfp4") and not weight.parts["codes"].endswith("qdata"):
            raise Corrupt(
                f'"{weight.parts["codes"]}" is nvfp4 without the scale of the whole weight (weight_global_scale or '
                "weight_scale_2), so that its numbers are not known.",
                code="CKPT0419",
            )
        return scale
    shape = read.shape(of_whole)
    if prod(shape) not in (1, prod(read.shape("codes")[:-2])):
        raise Corrupt(
            f'"{weight.parts[of_whole]}" has {list(shape)} numbers, and one scales a weight.', code="CKPT0419"
        )
    whole = _read_scale_grid(of_whole, rows, rows.end, read)
    if of_whole == "scale_2":
        scale *= whole
        return scale
    scale /= whole
    return scale if shape else round_numbers(scale, "bfloat16")  # torch keeps that where a number has no dimension


def _compute_transposed_fp4(weight: Encoded, rows: Rows, read: Read) -> Array:
    """Compute rows of a parameter that is stored transposed, in groups of 32 of its rows: codes [columns, groups, 16],
    scales [columns, groups]."""
    import numpy as np

    groups = slice(rows.first // 32, -(-rows.end // 32))
    if prod(read.shape("codes")[len(rows.lead) :]) <= SMALL:
        codes, scale = read("codes", *rows.lead)[:, groups], read("scale", *rows.lead)[:, groups]
    else:
        codes, scale = (read(part, *rows.lead, slice(None), groups) for part in ("codes", "scale"))
    numbers = _decode_fp4_codes(codes)
    numbers *= _widen_scales(scale)[..., None]
    return np.ascontiguousarray(numbers.reshape(len(numbers), -1).T)


def _read_packed_shape(weight: Encoded, read: Read) -> tuple[int, ...]:
    """Read the shape of a parameter whose codes are integers packed in words of 32 bits.

    Raises:
        Corrupt: the shape is missing, or does not fit the codes.
    """
    shape = weight.shape if "shape" not in weight.parts else tuple(int(n) for n in read("shape").reshape(-1))
    words = read.shape("codes")
    if (
        shape is None
        or len(shape) != len(words)
        or shape[:-1] != words[:-1]
        or not _list_fitting_bits(shape[-1], words[-1])
    ):
        stated = "nothing says the shape of the parameter" if shape is None else f"the parameter is {list(shape)}"
        raise Corrupt(
            f'"{weight.parts["codes"]}" holds integers packed in {list(words)} words of 32 bits, and {stated}.',
            code="CKPT0419",
        )
    if weight.shape is not None and shape != weight.shape:
        raise Corrupt(
            f'"{weight.weight}" is {list(shape)}, and the groups of config.json make {list(weight.shape)} with '
            f'the scales in "{weight.parts["scale"]}".',
            code="CKPT0419",
        )
    return shape


def _list_fitting_bits(count: int, words: int) -> list[int]:
    """List the widths in bits, the largest first, at which `count` integers fill exactly `words` words of 32 bits."""
    return [bits for bits in range(8, 0, -1) if count > 0 and -(-count * bits // 32) == words]


def _compute_packed(weight: Encoded, rows: Rows, read: Read) -> Array:
    """Compute the numbers of rows of integers that are packed without gaps in words of 32 bits.

    Raises:
        Corrupt: the zero points, or the groups of the columns (g_idx), do not fit the codes.
    """
    import numpy as np

    assert weight.shape is not None
    columns = weight.shape[-1]
    codes = _read_codes(rows, read)
    fitting = _list_fitting_bits(columns, codes.shape[1])
    bits = weight.bits if weight.bits in fitting else fitting[0]
    numbers = unpack_bits(codes, bits, columns).astype("f4")
    scale = _read_scale_grid("scale", rows, 1, read).astype("f4")
    middle = 1 << (bits - 1)
    zeros: Array = np.full((1, 1), middle, "f4")
    if "zero_point" in weight.parts:
        packed = read("zero_point", *rows.lead)
        if packed.dtype == np.int32:
            zeros = unpack_bits(packed.T, bits, weight.shape[-2]).T[rows.first : rows.end].astype("f4")
        else:
            zeros = _read_scale_grid("zero_point", rows, 1, read).astype("f4") + middle
    block = (1, -(-columns // scale.shape[1]))
    order = read("g_idx") if "g_idx" in weight.parts and scale.shape[1] > 1 else None
    odd = "" if zeros.shape in ((1, 1), (len(codes), 1), (len(codes), scale.shape[1])) else "zero_point"
    if order is not None and not (order == -1).any() and not is_group_index(order, columns, scale.shape[1]):
        odd = "g_idx"
    if odd:
        raise Corrupt(
            f'"{weight.parts[odd]}" does not fit {list(weight.shape)} codes in {scale.shape[1]:,} groups.',
            code="CKPT0419",
        )
    if order is not None and not (order == -1).any():
        scale, block = scale[:, order], (1, 1)
        zeros = zeros[:, order] if zeros.shape[1] > 1 else zeros
    _apply_grid(isub, numbers, zeros, block, 0)
    _apply_grid(imul, numbers, scale, block, 0)
    return numbers


#: {kind of code, as `Encoded.kind` has it: its formula}.
FORMULAS: dict[str, Formula] = {
    "blocks": Formula(_compute_blocks),
    "fp4": Formula(_compute_blocks),
    "transposed fp4": Formula(_compute_transposed_fp4, 32),
    "packed integers": Formula(_compute_packed, 1, _read_packed_shape),
    "gptq": Formula(compute_gptq, 32),
    "gptq v2": Formula(compute_gptq, 32),
    "awq": Formula(compute_awq, 8),
    "bitsandbytes 4": Formula(compute_bnb_4bit, 1, read_bnb_shape),
    "bitsandbytes 8": Formula(compute_bnb_int8),
}
