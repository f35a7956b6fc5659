"""numpy dtypes of torch's, and casts between them that round as torch does."""

from __future__ import annotations

from typing import Any

__all__ = ["bits_dtype", "cast", "numpy_dtype"]


def cast(data: memoryview, dtype: str, out: memoryview, to: str) -> None:
    """Convert elements, rounding to nearest even as torch does; NaN stays NaN.

    In pieces of 64 Ki elements, which stay in the processor's cache.
    """
    import numpy as np

    src, dst = np.frombuffer(data, dtype=numpy_dtype(dtype)), np.frombuffer(out, dtype=numpy_dtype(to))
    for a in range(0, len(src), 64 << 10):
        piece = src[a : a + (64 << 10)]
        with np.errstate(over="ignore", invalid="ignore"):
            if to == "float8_e4m3fn":  # has no infinity: torch gives its largest number for all that is beyond
                piece = np.clip(piece, -448, 448)
            dst[a : a + (64 << 10)] = piece
            if to == "bfloat16" and np.isnan(piece.max()):  # torch has one NaN, ml_dtypes keeps the sign
                dst.view("u2")[a : a + (64 << 10)][np.isnan(piece)] = 0x7FC0


def bits_dtype(item: int) -> str:
    """The numpy dtype that moves elements of `item` bytes as they are, by machine words where there are such."""
    return {1: "u1", 2: "u2", 4: "u4", 8: "u8"}.get(item, f"V{item}")


def numpy_dtype(dtype: str) -> Any:
    """The numpy dtype of a torch one; ml_dtypes gives those that numpy does not have (complex32 since its 0.6)."""
    import numpy as np

    if dtype in ("bfloat16", "complex32") or dtype.startswith("float8"):
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, dtype))
    return np.dtype({"bool": "?"}.get(dtype, dtype))
