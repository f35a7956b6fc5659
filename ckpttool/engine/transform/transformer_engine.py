"""The numbers of TransformerEngine's quantised tensors, as its own `dequantize()` has them: in float32, with one
rounding to the dtype that is asked for at the end.

    Float8Tensor             data x fp8_scale_inv, one number for a tensor
    MXFP8Tensor              rowwise_data x 2^(rowwise_scale_inv - 127), 32 numbers of a row each
    Float8BlockwiseQTensor   rowwise_data x rowwise_scale_inv, blocks of 128 x 128, or 128 numbers of a row each; then
                             the scales are transposed
    NVFP4Tensor              two codes a byte, the lower half first, x (rowwise_scale_inv x amax_rowwise / (6 x 448)),
                             16 numbers of a row each; amax is of the tensor or of a row

Scales are padded; what is behind those of the last row and column counts for nothing. A page is some rows, with the
scales of these.

Source: TransformerEngine 2.20, pytorch/tensor/storage, common/cast/{fp8,mxfp8,nvfp4}/dequantize_*.cuh.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any

from ...errors import Corrupt, Unsupported
from ...formats.pickles import Global, Opaque
from ...index.checkpoint import TensorEntry
from ...index.composites import SubclassFacts
from ...index.records import Extent
from ..computed_files import BoxReader, ComputedFiles, cast_array
from ..copy.dtypes import numpy_dtype

if TYPE_CHECKING:
    from ..copy.dtypes import Array

__all__ = ["add_decoded_part", "is_of_transformer_engine"]

#: {number of a dtype in TransformerEngine's DType: torch's name of it}.
_DTYPES = {7: "float8_e4m3fn", 8: "float8_e5m2"}
_MEMBERS = {"kFloat8E4M3": 7, "kFloat8E5M2": 8}
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMBERS = 1 << 20  # of a page, or as many as 128 rows have
_TALLEST = 128  # rows of a block


def is_of_transformer_engine(about: SubclassFacts) -> bool:
    """Tell whether a tensor subclass is one of TransformerEngine's.

    Args:
        about: the value that describes the subclass, as `subclasses.split_subclass` returns it.
    """
    return str(about["class"][0]).startswith("transformer_engine.")


def add_decoded_part(
    name: str,
    about: SubclassFacts,
    place: tuple[int, tuple[int, ...]],
    parts: Mapping[str, TensorEntry],
    reader: BoxReader,
    files: ComputedFiles,
    dtype: str,
) -> Extent:
    """Add a computed file with the numbers of a quantised tensor, or of one rank's part of it, and return its place.

    Args:
        name: the tensor, for messages.
        about: the value that describes the tensor subclass.
        place: (first row, shape) of the part.
        parts: {attribute of the tensor subclass: its tensor}.
        reader: reads them.
        files: gets the file.
        dtype: dtype of the numbers.

    Raises:
        Unsupported: its scales are swizzled, or it has columnwise data only.
        Corrupt: its dtype is unknown, or its tensors have wrong shapes.
    """
    kind, state = str(about["class"][1]), about["state"]
    codes = parts.get("data" if kind == "Float8Tensor" else "rowwise_data")
    if codes is None or state.get("with_gemm_swizzled_scales"):
        why = "it has columns alone" if codes is None else "its scales are swizzled for a product of matrices"
        raise Unsupported(
            f'"{name}" is a TransformerEngine {kind}, and {why}. Leave it out, or dequantise it in the job.',
            code="CKPT0318",
        )
    shape = place[1]
    columns = shape[-1] if shape else 1
    width = columns // 2 if kind == "NVFP4Tensor" else columns  # bytes of a row
    fp8 = state.get("fp8_dtype")
    if isinstance(fp8, Opaque):
        fp8 = fp8.args[0] if fp8.args else fp8.state
    elif isinstance(fp8, Global):  # as Python 3.11.0 to 3.11.3 pickles a member of an enumeration
        fp8 = _MEMBERS.get(fp8.name.rpartition(".")[2], fp8)
    problem = _describe_misfit(kind, state, shape, parts, codes)
    if problem or (kind != "NVFP4Tensor" and fp8 not in _DTYPES):
        raise Corrupt(
            f'"{name}" is a TransformerEngine {kind} of {list(shape)}, and {problem or f"its dtype is {fp8}"}.',
            code="CKPT0419",
        )

    def compute(first: int, end: int) -> Array:
        """Compute the numbers of some rows."""
        import numpy as np

        row, rows = first // columns, (end - first) // columns
        raw = _read_flat(reader, codes, (row * width, rows * width)).reshape(rows, width)
        numbers = _decode_fp4(raw) if kind == "NVFP4Tensor" else raw.view(numpy_dtype(_DTYPES[fp8])).astype("f4")
        with np.errstate(all="ignore"):
            numbers *= _read_scales(kind, state, parts, reader, (row, rows, columns))
        return cast_array(numbers.reshape(-1), "float32", dtype)[0]

    every = max(1, prod(shape[:-1]))
    rows = every if any(t.chunks.zstd for t in parts.values()) else max(1, _NUMBERS // max(1, columns))
    rows = min(every, -(-rows // _TALLEST) * _TALLEST)
    return files.add(f"{name} (dequantized, from row {place[0]})", dtype, shape, compute, rows * columns, 16)


def _describe_misfit(
    kind: str, state: Mapping[str, Any], shape: tuple[int, ...], parts: Mapping[str, TensorEntry], codes: TensorEntry
) -> str:
    """Return a clause on the first component that does not fit a quantised tensor, such as "its scales are [2, 1]"; ""
    if everything fits.

    Args:
        kind: the name of the tensor's class, such as "MXFP8Tensor".
        state: the attributes of the tensor that are no tensors.
        shape: of the numbers that are decoded.
        parts: {attribute of the tensor subclass: its tensor}.
        codes: the one of `parts` that holds the codes.
    """
    columns, rows = (shape[-1] if shape else 1), prod(shape[:-1])
    packed = kind == "NVFP4Tensor"
    if codes.dtype != "uint8" or codes.numel * (2 if packed else 1) != prod(shape) or (packed and columns % 2):
        return f"its codes are {codes.dtype} {list(codes.shape)}"
    if kind == "Float8Tensor":
        scale = parts.get("fp8_scale_inv")
        return "" if scale and (scale.dtype, scale.numel) == ("float32", 1) else "it has no scale"
    scale, amax = parts.get("rowwise_scale_inv"), parts.get("amax_rowwise")
    if scale is None or len(scale.shape) != 2 or scale.dtype != ("float32" if "Blockwise" in kind else "uint8"):
        return "it has no scales"
    flat = "Blockwise" in kind and not state.get("is_2D_scaled")
    tall, wide = {"MXFP8Tensor": (1, 32), "NVFP4Tensor": (1, 16)}.get(kind, (1 if flat else 128, 128))
    needed = (-(-rows // tall), -(-columns // wide))
    if any(a < b for a, b in zip(scale.shape[::-1] if flat else scale.shape, needed, strict=True)):
        return f"its scales are {list(scale.shape)}"
    if packed and (
        amax is None or amax.dtype != "float32" or amax.numel != (rows if state.get("row_scaled_nvfp4") else 1)
    ):
        return "it has not one amax for the tensor, or for each row"
    return ""


def _read_flat(reader: BoxReader, t: TensorEntry, flat: tuple[int, int]) -> Array:
    """Read elements of a tensor as a flat array; a compressed tensor is read completely first.

    Args:
        flat: (flat index of the first element, number of elements).
    """
    first, count = flat
    if t.chunks.zstd:
        return reader.read(t, [((0,) * len(t.shape), t.shape)])[first : first + count]
    return reader.read_range(t, first, first + count)


def _read_scales(
    kind: str,
    state: Mapping[str, Any],
    parts: Mapping[str, TensorEntry],
    reader: BoxReader,
    where: tuple[int, int, int],
) -> Array:
    """Return the scales of some rows, in a shape that broadcasts over [rows, columns].

    Args:
        kind: the class of the tensor.
        state: its attributes.
        parts: {attribute of the tensor subclass: its tensor}.
        reader: reads them.
        where: (first row, number of rows, number of columns).
    """
    import numpy as np

    row, rows, columns = where
    if kind == "Float8Tensor":
        return _read_flat(reader, parts["fp8_scale_inv"], (0, 1))
    t = parts["rowwise_scale_inv"]
    if kind == "Float8BlockwiseQTensor" and not state.get("is_2D_scaled"):
        # [blocks of a row, rows]: few numbers of many rows, so all of it
        scale = _read_flat(reader, t, (0, t.numel)).reshape(t.shape)[:, row : row + rows].T
        return scale.repeat(128, 1)[:, :columns]
    tall = 128 if kind == "Float8BlockwiseQTensor" else 1
    lines = -(-rows // tall)
    scale = _read_flat(reader, t, (row // tall * t.shape[1], lines * t.shape[1])).reshape(lines, t.shape[1])
    if kind == "Float8BlockwiseQTensor":
        return scale.repeat(128, 1)[:, :columns].repeat(128, 0)[:rows]
    if kind == "MXFP8Tensor":
        exponents = scale.astype("u4")
        bits = np.where(exponents == 0, 1 << 22, exponents << 23)  # 2^-127 is subnormal, and 255 is NaN
        scale = np.where(exponents == 255, 0x7FFFFFFF, bits).astype("u4").view("f4")
        return scale.repeat(32, 1)[:, :columns]
    amax = parts["amax_rowwise"]
    of = _read_flat(reader, amax, (row, rows) if state.get("row_scaled_nvfp4") else (0, 1)).reshape(-1, 1)
    factor = np.float32(1) / np.float32(6 * state.get("nvfp4_e4m3_max", 448))
    scale = scale.view(numpy_dtype("float8_e4m3fn")).astype("f4") * of * factor
    return scale.repeat(16, 1)[:, :columns]


def _decode_fp4(codes: Array) -> Array:
    """Return the float32 numbers that fp4 codes stand for, [rows, 2 * bytes of a row].

    Args:
        codes: uint8, [rows, bytes of a row]; each byte holds two codes, the lower half first.
    """
    import numpy as np

    table = np.array([*_FP4, *(-x for x in _FP4)], "f4")
    return table[np.stack([codes & 15, codes >> 4], -1).reshape(codes.shape[0], -1)]
