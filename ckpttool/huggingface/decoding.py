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

Scales that are uint8 are exponents, 2 ** (byte - 127), infinite at 255 as transformers and compressed-tensors compute
it; float8_e8m0fnu is NaN there.

Sources: transformers 5.23, integrations/{finegrained_fp8,mxfp4}.py; DeepSeek-V3, inference/fp8_cast_bf16.py;
compressed_tensors 0.20, compressors and quantization/lifecycle/forward_helpers.py, and 0.8 for g_idx; modelopt 0.47,
torch/quantization/qtensor.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from ..errors import Corrupt
from .encodings import Encoded

if TYPE_CHECKING:
    import numpy as np

Array: TypeAlias = "np.ndarray[Any, Any]"

__all__ = ["FORMULAS", "Formula", "Read", "Rows", "scale_numbers", "unpack_bits"]

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


def unpack_bits(words: Array, bits: int, count: int) -> Array:
    """Return the first `count` numbers of `bits` bits each in every row of int32 words, the lowest bits first, as
    uint8.

    Args:
        words: [rows, words], densely packed: a number may lie in two words.
        bits: 1 to 8.
        count: numbers in a row.
    """
    import numpy as np

    data = np.ascontiguousarray(words).view("u1").reshape(len(words), -1)
    if bits == 8:
        return data[:, :count]
    if bits == 4:
        return np.stack([data & 15, data >> 4], axis=-1).reshape(len(data), -1)[:, :count]
    # so many bytes as a number has bits hold eight numbers: as one integer, which each is shifted out of
    groups = -(-count // 8)
    padded = np.zeros((len(data), groups * bits), "u1")
    size = min(data.shape[1], groups * bits)
    padded[:, :size] = data[:, :size]
    wide = np.zeros((len(data), groups, 8), "u1")
    wide[..., :bits] = padded.reshape(len(data), groups, bits)
    shifts = np.arange(8, dtype="u8") * np.uint64(bits)
    out = (wide.view("<u8") >> shifts) & np.uint64((1 << bits) - 1)
    return out.astype("u1").reshape(len(data), -1)[:, :count]


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
        zeros = _read_grid("zero_point", rows, weight.block[0], read).astype("f4")
        _combine(np.subtract, numbers, zeros, weight.block, rows.first)
    scale = scale_numbers(_read_grid("scale", rows, weight.block[0], read))
    if weight.rounds_scale:
        scale = _rounded(scale, weight.rounded)
    with np.errstate(all="ignore"):
        _combine(np.multiply, numbers, scale, weight.block, rows.first)
    return numbers


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
    return shape


def _fitting_bits(count: int, words: int) -> list[int]:
    """List the numbers of bits, the largest first, at which so many integers fill so many words of 32 bits."""
    return [bits for bits in range(8, 0, -1) if count > 0 and -(-count * bits // 32) == words]


def _compute_packed(weight: Encoded, rows: Rows, read: Read) -> Array:
    """Compute rows of densely packed integers."""
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
    if "g_idx" in weight.parts and scale.shape[1] > 1 and (order := read("g_idx")).min() >= 0:
        scale, block = scale[:, order], (1, 1)
        zeros = zeros[:, order] if zeros.shape[1] > 1 else zeros
    _combine(np.subtract, numbers, zeros, block, 0)
    _combine(np.multiply, numbers, scale, block, 0)
    return numbers


#: {kind of code, as `Encoded.kind` has it: its formula}.
FORMULAS: dict[str, Formula] = {
    "blocks": Formula(_compute_blocks),
    "fp4": Formula(_compute_fp4),
    "transposed fp4": Formula(_compute_transposed_fp4, 32),
    "packed integers": Formula(_compute_packed, 1, _shape_of_packed),
}
