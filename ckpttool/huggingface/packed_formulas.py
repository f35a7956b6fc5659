"""The numbers of GPTQ's, AWQ's and bitsandbytes' weights: formulas of decoding.py.

Rounded to the dtype in which the library computes on a CPU (that of the scales for GPTQ and AWQ, of `quant_state` for
NF4 and FP4), these are its numbers bit for bit, with two exceptions. FP4's second zero has the sign that it has in
`quant_map`; bitsandbytes gives it one or none, by the machine and the shape. And where rows are no whole blocks, the
kernel of bitsandbytes 0.50 for CPUs with AVX-512 takes scales of other blocks; here they are those of its kernels for
GPUs.

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

from fractions import Fraction
from math import ceil, prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from .. import bounded_json
from ..errors import Corrupt, Unsupported
from ..index import boxes
from .encodings import Encoded

if TYPE_CHECKING:
    import numpy as np

    from .decoding import Read, Rows

Array: TypeAlias = "np.ndarray[Any, Any]"

__all__ = [
    "SMALL",
    "compute_awq",
    "compute_bnb_4bit",
    "compute_bnb_int8",
    "compute_gptq",
    "is_group_index",
    "read_bnb_shape",
    "round_numbers",
    "unpack_bits",
]

#: Bytes of codes of one matrix that are read whole, in one long read instead of many short ones.
SMALL = 16 << 20
#: The column, of eight, that each group of four bits of AWQ's words holds, from the lowest on.
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


def round_numbers(numbers: Array, dtype: str) -> Array:
    """Return float32 numbers rounded to another dtype, again as float32."""
    import ml_dtypes
    import numpy as np

    to = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    return numbers.astype(to).astype("f4")


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


def is_group_index(order: Array, columns: int, groups: int) -> bool:
    """Whether `order` holds the number of a group, below `groups`, for each of the columns."""
    fits = order.shape == (columns,) and order.dtype.kind in "iu"
    return bool(fits and (not columns or 0 <= order.min() <= order.max() < groups))


def _read_transposed(weight: Encoded, rows: Rows, per_word: Fraction, read: Read) -> tuple[Array, Array, Array, Array]:
    """Read the tensors that some rows of a GPTQ or AWQ weight need; rows of the parameter are columns of its tensors.

    Args:
        weight: the weight.
        rows: rows of the parameter.
        per_word: how many columns of zero points a word holds.
        read: reads a tensor by its key in `Encoded.parts`.

    Returns:
        (codes, zero points, scales, number of the group of each column of the parameter); codes and zero points are
            packed.

    Raises:
        Corrupt: g_idx names a group that has no scale, or zero points are more or fewer than the scales.
    """
    import numpy as np

    assert weight.shape is not None and weight.block is not None
    here = slice(rows.first, rows.end)
    packed = slice(int(rows.first / per_word), ceil(rows.end / per_word))
    of_codes = packed if read.shape("codes")[1] < weight.shape[0] else here
    small = prod(read.shape("codes")) * 4 <= SMALL
    codes = read("codes")[:, of_codes] if small else read("codes", slice(None), of_codes)
    groups = read("g_idx") if "g_idx" in weight.parts else np.arange(weight.shape[1]) // weight.block[1]
    scales = read("scale")[:, here]
    if not is_group_index(groups, weight.shape[1], len(scales)):
        raise Corrupt(
            f'"{weight.parts.get("g_idx", weight.parts["codes"])}" names groups of {weight.shape[1]:,} columns that '
            f"have no scale: there are {len(scales)}.",
            code="CKPT0419",
        )
    wanted = (len(scales), ceil(weight.shape[0] / per_word))
    if read.shape("qzeros") != wanted:
        raise Corrupt(
            f'"{weight.parts["qzeros"]}" is {list(read.shape("qzeros"))}, and not {list(wanted)}.', code="CKPT0419"
        )
    return codes, read("qzeros")[:, packed], scales, groups


def compute_gptq(weight: Encoded, rows: Rows, read: Read) -> Array:
    """Return the numbers of some rows of a GPTQ weight, [rows, columns], in float32. Zero points are stored minus one,
    except where checkpoint_format is "gptq_v2".

    Args:
        weight: the weight.
        rows: rows of the parameter.
        read: reads a tensor by its key in `Encoded.parts`.
    """
    assert weight.bits is not None
    codes, qzeros, scales, groups = _read_transposed(weight, rows, Fraction(32, weight.bits), read)
    zeros = unpack_bits(qzeros, weight.bits, codes.shape[1])
    if weight.kind == "gptq":
        zeros = (zeros + 1) & ((1 << weight.bits) - 1)
    return _scale_transposed(unpack_bits(codes.T, weight.bits, len(groups)), zeros, scales, groups)


def compute_awq(weight: Encoded, rows: Rows, read: Read) -> Array:
    """Return the numbers of some rows of an AWQ weight (version "gemm", 4 bits), [rows, columns], in float32.

    Args:
        weight: the weight.
        rows: rows of the parameter.
        read: reads a tensor by its key in `Encoded.parts`.
    """
    codes, qzeros, scales, groups = _read_transposed(weight, rows, Fraction(8), read)
    return _scale_transposed(_unpack_awq(codes).T, _unpack_awq(qzeros), scales, groups)


def _unpack_awq(words: Array) -> Array:
    """Return the codes of AWQ's words, [n, words], as [n, 8 * words]."""
    import numpy as np

    codes = unpack_bits(words, 4, 8 * words.shape[1]).reshape(len(words), -1, 8)
    out = np.empty_like(codes)
    out[..., _AWQ_COLUMNS] = codes
    return out.reshape(len(words), -1)


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
    """Read and check the JSON text about a 4-bit weight that bitsandbytes keeps in a tensor (quant_state).

    Raises:
        Corrupt: it is not what bitsandbytes writes, or codes, scales or tables do not have the sizes that it states.
    """
    part = next((p for p in weight.parts if p.startswith("quant_state.")), None)
    where = weight.parts.get(part or "", f"{weight.weight}.quant_state")
    if part is None:
        raise Corrupt(
            f'"{where}" is missing, which says the shape of the parameter and the numbers of a block.', code="CKPT0419"
        )
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
    except (LookupError, TypeError, ValueError) as e:
        raise Corrupt(
            f'"{where}" is not what bitsandbytes writes ({type(e).__name__}: {e}).', code="CKPT0419"
        ) from None
    sound = all(type(n) is int and n >= 0 for n in shape) and out.block > 0 and out.nested_block >= nested
    if out.dtype not in ("float32", "float16", "bfloat16") or not sound:
        raise Corrupt(f'"{where}" is not what bitsandbytes writes: {str(found)[:300]}.', code="CKPT0419")
    # as many codes and scales as that says
    size, codes, blocks = prod(shape), read.shape("codes"), read.shape("scale")[0]
    if prod(codes) != -(-size // (2 * out.item)) or max(codes) != prod(codes) or blocks != -(-size // out.block):
        raise Corrupt(
            f'"{weight.parts["codes"]}" is {list(codes)} of {out.item} bytes with {blocks} scales, and a parameter of '
            f"{list(shape)} in blocks of {out.block} has others.",
            code="CKPT0419",
        )
    nests = -(-blocks // out.nested_block) if nested else 0
    wanted = {"quant_map": 16, **({"nested_absmax": nests, "nested_quant_map": 256} if nested else {})}
    for name, count in wanted.items():
        if name not in weight.parts or read.shape(name) != (count,):
            raise Corrupt(
                f'"{weight.parts.get(name, f"{weight.weight}.{name}")}" does not have {count:,} numbers.',
                code="CKPT0419",
            )
    return out


def read_bnb_shape(weight: Encoded, read: Read) -> tuple[int, ...]:
    """Read the shape of a parameter from the quant_state of its NF4 or FP4 codes.

    Raises:
        Corrupt: the quant_state is missing, or contradicts the codes.
    """
    return _read_quant_state(weight, read).shape


def compute_bnb_4bit(weight: Encoded, rows: Rows, read: Read) -> Array:
    """Compute the numbers of some rows of bitsandbytes' NF4 or FP4, whose codes are one flat tensor, rounded to the
    dtype of the quant_state."""
    import numpy as np

    state, codes = _read_quant_state(weight, read), read.shape("codes")
    matrices = (*[1] * (2 - len(state.shape)), *state.shape)
    first = boxes.flat_start(matrices, (*rows.lead, rows.first, 0))
    end = first + (rows.end - rows.first) * matrices[-1]
    # the elements of the codes that hold them: two codes in a byte, the upper half first
    start = first // (2 * state.item)
    packed = slice(start, -(-end // (2 * state.item)))
    flat = read("codes", 0, packed) if codes[0] == 1 and len(codes) > 1 else read("codes", packed)
    data, skip = np.ascontiguousarray(flat).reshape(-1).view("u1"), first - start * 2 * state.item
    halves = np.stack([data >> 4, data & 15], axis=-1).reshape(-1)[skip : skip + end - first]
    # absmax of each block, which may be codes itself ("double quantisation")
    low, high = first // state.block, -(-end // state.block)
    absmax = read("scale", slice(low, high))
    if state.nested_block:
        outer = read("nested_absmax")[np.arange(low, high) // state.nested_block]
        absmax = read("nested_quant_map")[absmax] * outer + np.float32(state.offset)
    numbers: Array = read("quant_map")[halves]
    numbers *= absmax.astype("f4")[np.arange(first, end) // state.block - low]
    return round_numbers(numbers, state.dtype).reshape(-1, matrices[-1])


def compute_bnb_int8(weight: Encoded, rows: Rows, read: Read) -> Array:
    """Compute rows of bitsandbytes' int8, whose scale (`SCB`) is the largest magnitude of each row.

    Raises:
        Unsupported: the codes are in the order of a kernel of old GPUs.
    """
    import numpy as np

    if "weight_format" in weight.parts and read("weight_format").any():
        raise Unsupported(
            f'"{weight.parts["weight_format"]}" is not 0: the codes are in the order of a kernel of old GPUs, which '
            "bitsandbytes does not read any more. Save the model in row-major order with the version that wrote it.",
            code="CKPT0318",
        )
    here = slice(rows.first, rows.end)
    numbers: Array = read("codes", here) * read("scale")[here].astype("f4")[:, None] * np.float32(1 / 127)
    return numbers
