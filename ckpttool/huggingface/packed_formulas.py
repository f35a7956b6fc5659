"""The numbers of GPTQ's, AWQ's and bitsandbytes' weights: numpy arrays of codes and scales in, numbers out.

Each function returns float32. Rounded to the dtype in which the library computes on a CPU (that of the scales for GPTQ
and AWQ, of `quant_state` for NF4 and FP4), these are its numbers bit for bit, with two exceptions. FP4's second zero
has the sign that it has in `quant_map`; bitsandbytes gives it one or none, by the machine and the shape. And where rows
are no whole blocks, the kernel of bitsandbytes 0.50 for CPUs with AVX-512 takes scales of other blocks; here they are
those of its kernels for GPUs. Arrays are parts of a weight: as many rows of the parameter as the caller wants in
memory.

    gptq   qweight [in * bits / 32, out], qzeros [groups, out * bits / 32], scales [groups, out], g_idx [in]
    awq    qweight [in, out / 8], qzeros [groups, out / 8], scales [groups, out]
    nf4    two codes in a byte, the upper half first; absmax of every `blocksize` numbers of the flat parameter
    int8   one scale a row

The parameter is [out, in], so GPTQ and AWQ store it transposed.

Sources: gptqmodel 7.3 (nn_modules/qlinear: dequantize_weight; utils/model_dequant: zero points); autoawq 0.2
(utils/packing_utils: dequantize_gemm); bitsandbytes 0.50 (functional: dequantize_4bit, dequantize_blockwise,
int8_vectorwise_dequant).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

__all__ = [
    "dequantize_absmax",
    "dequantize_awq",
    "dequantize_bnb_4bit",
    "dequantize_bnb_int8",
    "dequantize_gptq",
    "unpack_bits",
]

#: The column, of eight, that each group of four bits of AWQ's words holds, from the lowest on.
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


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


def dequantize_gptq(
    qweight: Array, qzeros: Array, scales: Array, groups: Array, bits: int, *, minus_one: bool
) -> Array:
    """Return rows of a GPTQ weight, [rows, in].

    Args:
        qweight: [in * bits / 32, rows], int32: the columns of the codes that belong to the rows.
        qzeros: [groups, rows * bits / 32], int32.
        scales: [groups, rows].
        groups: [in]: the group of each column of the parameter; in act-order they are in no order.
        bits: 2, 3, 4 or 8.
        minus_one: whether zero points are stored minus one, as in all files but those of checkpoint_format "gptq_v2".
    """
    rows = qweight.shape[1]
    zeros = unpack_bits(qzeros, bits, rows)
    if minus_one:
        zeros = (zeros + 1) & ((1 << bits) - 1)
    return _scale_transposed(unpack_bits(qweight.T, bits, len(groups)), zeros, scales, groups)


def dequantize_awq(qweight: Array, qzeros: Array, scales: Array, groups: Array) -> Array:
    """Return rows of an AWQ weight (version "gemm", 4 bits), [rows, in].

    Args:
        qweight: [in, rows / 8], int32.
        qzeros: [groups, rows / 8], int32.
        scales: [groups, rows].
        groups: [in]: the group of each column of the parameter.
    """

    def unpack(words: Array) -> Array:
        """Return the codes of [n, rows / 8] words as [n, rows]."""
        import numpy as np

        codes = unpack_bits(words, 4, 8 * words.shape[1]).reshape(len(words), -1, 8)
        out = np.empty_like(codes)
        out[..., _AWQ_COLUMNS] = codes
        return out.reshape(len(words), -1)

    return _scale_transposed(unpack(qweight).T, unpack(qzeros), scales, groups)


def _scale_transposed(codes: Array, zeros: Array, scales: Array, groups: Array) -> Array:
    """Return (codes - zero points) * scales, [rows, in], which float32 holds exactly for scales in float16.

    Args:
        codes: [rows, in], uint8.
        zeros, scales: [groups, rows].
        groups: [in]: the group of each column of the parameter.
    """
    import numpy as np

    numbers: Array = np.subtract(codes, zeros.T[:, groups], dtype="f4")
    numbers *= scales.T.astype("f4")[:, groups]
    return numbers


def dequantize_bnb_4bit(packed: Array, skip: int, count: int, absmax: Array, table: Array) -> Array:
    """Return numbers of a flat NF4 or FP4 weight.

    Args:
        packed: bytes, uint8; two codes in each, the upper half first.
        skip: codes in them before the first that is wanted.
        count: numbers that are wanted.
        absmax: float32, [count]: of the block of each number; or of all.
        table: `quant_map`, the 16 numbers that codes stand for, float32.
    """
    import numpy as np

    codes = np.stack([packed >> 4, packed & 15], axis=-1).reshape(-1)[skip : skip + count]
    numbers: Array = table[codes]
    numbers *= absmax
    return numbers


def dequantize_absmax(codes: Array, scales: Array, table: Array, offset: float) -> Array:
    """Return absmax of NF4 or FP4 whose absmax is quantised itself ("double quantisation"), float32.

    Args:
        codes: uint8.
        scales: float32: `nested_absmax` of the block of each code.
        table: `nested_quant_map`, the 256 numbers that codes stand for, float32.
        offset: `nested_offset`, which is added to all.
    """
    import numpy as np

    numbers: Array = table[codes] * scales + np.float32(offset)
    return numbers


def dequantize_bnb_int8(codes: Array, scales: Array) -> Array:
    """Return rows of bitsandbytes' int8 weights, float32.

    Args:
        codes: [rows, columns], int8.
        scales: [rows], float32: `SCB`, the largest magnitude of each row.
    """
    import numpy as np

    numbers: Array = codes * scales.astype("f4")[:, None] * np.float32(1 / 127)
    return numbers
