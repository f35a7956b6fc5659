"""Checks of numbers, block by block while the tensors are read: NaN and infinity, negative second moments, weights of
one number, masters of other numbers than the weights."""

from __future__ import annotations

from dataclasses import dataclass

from ...index.checkpoint import Checkpoint, TensorEntry
from ...printable import count_noun
from ..copy.averages import EXPONENT, Averages, describe_negative_averages, find_nonnegative_state
from ..copy.dtypes import bits_dtype
from ..copy.stream import Block
from ..transform import masters
from .checks import Examined, block_check, check
from .findings import DAMAGE, NOTE, Finding, define_kind

NAN = define_kind("nan", 230, "NaN or infinity", "what-is-recognised")
NEGATIVE_MOMENT = define_kind("negative-moment", 231, "averages of squares below 0", "what-is-recognised")
ALL_ZERO = define_kind("all-zero", 232, "matrices of zeros", "what-is-whole-and-yet-does-not-load")
CONSTANT = define_kind("constant", 233, "matrices of one number", "what-is-whole-and-yet-does-not-load")
MASTERS = define_kind("masters", 240, "fp32 masters that do not round to their weights", "what-is-recognised")

#: {dtype: the patterns that are NaN}, of dtypes without infinity.
_NAN = {
    "float8_e4m3fn": (0x7F, 0xFF),
    "float8_e4m3fnuz": (0x80,),
    "float8_e5m2fnuz": (0x80,),
    "float8_e8m0fnu": (0xFF,),
}
_LEAST = 64  # elements of a weight that should not be one number


@dataclass
class _SeenNumbers:
    """What was seen of one tensor."""

    bad: int = 0  # elements that are NaN or infinite
    first_bad: int | None = None  # flat index
    bits: int | None = None  # of the first element
    constant: bool = True


@block_check(NAN, NEGATIVE_MOMENT, ALL_ZERO, CONSTANT)
class NumbersCheck:
    """Looks for odd numbers in every block of every tensor. Memory does not grow with the size of tensors."""

    def __init__(self, ckpt: Checkpoint) -> None:
        self.ckpt = ckpt
        self.seen: dict[str, _SeenNumbers] = {}
        self.averages = Averages(find_nonnegative_state(ckpt.tensors))

    def add(self, block: Block) -> None:
        """Add a block: count NaN and infinite elements, count negative elements in averages of squares, and record
        whether all elements of the tensor so far are equal.

        Infinity is no fault in a single number outside the training state: Lightning's ModelCheckpoint saves one as its
        `kth_value` until it has compared its first metric (lightning/pytorch/callbacks/model_checkpoint.py, 2.6).
        """
        t = self.ckpt.tensors[block.name]
        if t.dtype not in EXPONENT and t.dtype not in _NAN:
            return
        import numpy as np

        of = self.seen.setdefault(block.name, _SeenNumbers())
        item = len(block.data) // block.count if block.count else 1
        bits = np.frombuffer(block.data, dtype=bits_dtype(item))
        if not bits.size:
            return
        if t.dtype in _NAN:
            wrong = np.isin(bits, np.array(_NAN[t.dtype], bits.dtype))
        else:
            exponent, sign = (bits.dtype.type(x) for x in EXPONENT[t.dtype])
            wrong = (bits & exponent) == exponent
            if t.component == "extra" and t.numel == 1:  # a best metric before there is one, of a trainer's callback
                wrong &= (bits & ~sign) != exponent
            self.averages.add(block.name, t.dtype, block.first, block.data)
        if n := int(np.count_nonzero(wrong)):
            of.first_bad = block.first + int(wrong.argmax()) if of.first_bad is None else of.first_bad
            of.bad += n
        if of.constant:
            of.bits = int(bits[0]) if of.bits is None else of.bits
            of.constant = bool((bits == bits.dtype.type(of.bits)).all())

    def findings(self) -> list[Finding]:
        """Return the findings about the numbers of all blocks: NaN or infinity, negative averages of squares, and
        weights whose elements are all equal."""
        tensors = self.ckpt.tensors
        out = []
        bad = {n: (s.bad, s.first_bad) for n, s in self.seen.items() if s.first_bad is not None}
        if bad:
            name, (n, first) = next(iter(bad.items()))
            t = tensors[name]
            text = (
                f'{len(bad):,} {"tensor holds" if len(bad) == 1 else "tensors hold"} NaN or infinity. "{name}": {n:,} '
                f"of {t.numel:,} elements, the first {masters.describe_element_place(self.ckpt, t, first)}. Training "
                "diverged, "
                "or the file is damaged; nothing in the checkpoint says what the numbers were. Take an earlier step"
            )
            out.append(Finding(NAN, DAMAGE, None, tuple(bad), text))
        if below := self.averages.found:
            name, (_, first) = next(iter(below.items()))
            text = describe_negative_averages(
                below, tensors, masters.describe_element_place(self.ckpt, tensors[name], first)
            )
            out.append(Finding(NEGATIVE_MOMENT, DAMAGE, None, tuple(below), text))
        constant = {
            n: s.bits for n, s in self.seen.items() if s.constant and n not in bad and _is_trained_matrix(n, tensors[n])
        }
        zeros = [n for n, bits in constant.items() if bits == 0]
        others = [n for n, bits in constant.items() if bits]
        for kind, names, what in (
            (ALL_ZERO, zeros, "are zero in every element"),
            (CONSTANT, others, "hold one number in every element"),
        ):
            if names:
                text = f"{len(names):,} weights {what}, first {names[0]}: they were never trained, or never written"
                out.append(Finding(kind, NOTE, None, tuple(names), text))
        return out


@check(NAN, reads_data=True)
def find_nan_in_values(at: Examined) -> list[Finding]:
    """Find NaN among the numbers that are no tensors: options of param groups, scheduler, grad scaler.

    Infinity is no fault there: ReduceLROnPlateau begins with it as its best metric (torch/optim/lr_scheduler.py).
    """
    bad = tuple(
        n for n, v in at.ckpt.values.items() if v.component in ("optim", "scheduler", "scaler") and _holds_nan(v.data)
    )
    if not bad:
        return []
    text = f'{count_noun(len(bad), "value holds", "values hold")} NaN, first "{bad[0]}". Take an earlier step'
    return [Finding(NAN, DAMAGE, None, bad, text)]


def _holds_nan(x: object) -> bool:
    """Tell whether a value, or a list, tuple or dict at any depth, holds a NaN."""
    parts = x.values() if isinstance(x, dict) else x if isinstance(x, (list, tuple)) else ()
    return (isinstance(x, float) and x != x) or any(map(_holds_nan, parts))


@check(MASTERS)
def find_wrong_masters(at: Examined) -> list[Finding]:
    """Find fp32 master weights that do not round to their weights. All data is compared if it is to be read, else a few
    elements of each weight.

    `at.request.progress` is called with ("compare", bytes done, bytes in all) while all data is read.

    Raises:
        Corrupt, SourceChanged: bytes are missing or were changed.
    """
    if at.request.read_data:
        found = masters.find_differing_masters(at.ckpt, at.source, at.request.progress)
    else:
        found = masters.sample_masters(at.ckpt, at.source) if at.source.patched is None else {}
    return (
        [Finding(MASTERS, DAMAGE, None, tuple(found), masters.describe_differing_masters(at.ckpt, found))]
        if found
        else []
    )


def _is_trained_matrix(name: str, t: TensorEntry) -> bool:
    """Tell whether a tensor is a weight matrix whose elements differ after training: no bias, norm, small buffer or
    lora_B (which starts as zeros)."""
    return (
        t.component == "model"
        and len(t.shape) > 1
        and t.numel >= _LEAST
        and name.endswith("weight")
        and "lora_B" not in name
    )
