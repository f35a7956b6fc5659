"""Checks of numbers, block by block while the tensors are read: NaN and infinity, negative second moments, weights of one number."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..index.checkpoint import Checkpoint, TensorEntry
from .dtypes import bits_dtype
from .findings import DAMAGE, NOTE, Finding
from .stream import Block

__all__ = ["Numbers", "where"]

#: {dtype: (bits of the exponent, all set in NaN and infinity; bit of the sign)}.
_EXPONENT = {
    "float64": (0x7FF << 52, 1 << 63), "float32": (0xFF << 23, 1 << 31), "float16": (0x1F << 10, 1 << 15),
    "bfloat16": (0xFF << 7, 1 << 15), "float8_e5m2": (0x1F << 2, 1 << 7),
}  # fmt: skip
#: {dtype: the patterns that are NaN}, of dtypes without infinity.
_NAN = {
    "float8_e4m3fn": (0x7F, 0xFF), "float8_e4m3fnuz": (0x80,), "float8_e5m2fnuz": (0x80,), "float8_e8m0fnu": (0xFF,),
}  # fmt: skip
#: Slots of optimizers that are sums or averages of squares or of absolute values.
_NOT_NEGATIVE = frozenset((
    "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg", "sum", "acc_delta", "exp_avg_sq_row", "exp_avg_sq_col",
    "row_var", "col_var", "variance",
))  # fmt: skip
_LEAST = 64  # elements of a weight that should not be one number
_RANK_FILE = re.compile(r"(?:.*/)?__(\d+)_\d+\.distcp")


@dataclass
class _Seen:
    """What was seen of one tensor."""

    bad: int = 0
    first_bad: int | None = None
    negative: int = 0
    first_negative: int | None = None
    bits: int | None = None  # of the first element
    constant: bool = True


class Numbers:
    """Looks at every block of every tensor; `findings` afterwards. Memory does not grow with the size of tensors."""

    def __init__(self, ckpt: Checkpoint) -> None:
        self.ckpt = ckpt
        self.seen: dict[str, _Seen] = {}

    def add(self, block: Block) -> None:
        """Look at a block."""
        t = self.ckpt.tensors[block.name]
        if t.dtype not in _EXPONENT and t.dtype not in _NAN:
            return
        import numpy as np

        of = self.seen.setdefault(block.name, _Seen())
        item = len(block.data) // block.count if block.count else 1
        bits = np.frombuffer(block.data, dtype=bits_dtype(item))
        if not bits.size:
            return
        if t.dtype in _NAN:
            wrong = np.isin(bits, np.array(_NAN[t.dtype], bits.dtype))
        else:
            exponent, sign = (bits.dtype.type(x) for x in _EXPONENT[t.dtype])
            wrong = (bits & exponent) == exponent
            if str(t.path[-1]) in _NOT_NEGATIVE and t.path[0] == "optim":
                below = (bits > sign) & ~wrong  # -0 is the sign alone
                if n := int(np.count_nonzero(below)):
                    of.first_negative = (
                        block.first + int(below.argmax()) if of.first_negative is None else of.first_negative
                    )
                    of.negative += n
        if n := int(np.count_nonzero(wrong)):
            of.first_bad = block.first + int(wrong.argmax()) if of.first_bad is None else of.first_bad
            of.bad += n
        if of.constant:
            of.bits = int(bits[0]) if of.bits is None else of.bits
            of.constant = bool((bits == bits.dtype.type(of.bits)).all())

    def findings(self) -> list[Finding]:
        """What is wrong with the numbers."""
        tensors = self.ckpt.tensors
        bad = {n: (s.bad, s.first_bad) for n, s in self.seen.items() if s.first_bad is not None}
        negative = {n: (s.negative, s.first_negative) for n, s in self.seen.items() if s.first_negative is not None}
        out = []
        if bad:
            out.append(self._finding("nan", bad, "hold NaN or infinity", "Training diverged, or the file is damaged"))
        if negative:
            out.append(
                self._finding("negative-moment", negative, "hold numbers below 0 and are averages of squares", "The next step divides by their roots")
            )  # fmt: skip
        for kind, names in (("all-zero", True), ("constant", False)):
            same = [
                n
                for n, s in self.seen.items()
                if s.constant
                and s.bits is not None
                and (s.bits == 0) is names
                and n not in bad
                and _is_matrix(n, tensors[n])
            ]
            if same:
                what = "are zero in every element" if names else "hold one number in every element"
                text = f"{len(same):,} weights {what}, first {same[0]}: they were never trained, or never written"
                out.append(Finding(kind, NOTE, None, tuple(same), text))
        return out

    def _finding(self, kind: str, found: dict[str, tuple[int, int]], what: str, why: str) -> Finding:
        name, (n, first) = next(iter(found.items()))
        t = self.ckpt.tensors[name]
        text = (
            f'{len(found):,} tensors {what}. "{name}": {n:,} of {t.numel:,} elements, the first {where(self.ckpt, t, first)}. {why}; '
            "nothing in the checkpoint says what the numbers were. Take an earlier step"
        )
        return Finding(kind, DAMAGE, None, tuple(found), text)


def where(ckpt: Checkpoint, t: TensorEntry, flat: int) -> str:
    """The index of an element, and the file and rank that it is from."""
    index = []
    for k in reversed(t.shape):
        index.append(flat % k)
        flat //= k
    index.reverse()
    for (start, shape), file in zip(t.chunks.boxes(), t.chunks.file, strict=True):
        if all(a <= i < a + k for i, a, k in zip(index, start, shape, strict=True)):
            name = ckpt.files[file]
            m = _RANK_FILE.fullmatch(name)
            rank = ckpt.ranks.get(file, int(m[1]) if m else None)
            return f"at {index}, in {name}" + (f" of rank {rank}" if rank is not None else "")
    return f"at {index}"


def _is_matrix(name: str, t: TensorEntry) -> bool:
    """Whether a tensor is a weight that training makes different everywhere: no bias, no norm, no buffer of one number, no lora_B,
    which begins with zeros."""
    return (
        t.path[0] == "model"
        and len(t.shape) > 1
        and t.numel >= _LEAST
        and name.endswith("weight")
        and "lora_B" not in name
    )
