"""The ways in which a tensor differs from its reference: one table.

Causes of `resume-verify` about values of tensors are of these kinds, and so is what `compare` says of the weights of a
layer.
"""

from __future__ import annotations

from enum import Enum

__all__ = ["TensorKind"]


class TensorKind(Enum):
    """How a tensor differs from its reference.

    `label` is the name, followed by "-" and a dtype for ROUNDED. `phrase` completes "the tensor ..."; where
    `is_general`, it is what is said of several tensors whose own texts differ. Causes of a lower `rank` come first:
    what only one thing explains, then rounding, single elements, and last values of which nothing is known but a
    distance.
    """

    DTYPE = "dtype", "holds the reference's values in another dtype"
    TRANSPOSED = "transposed", "holds the reference transposed"
    SHIFTED = "shifted", "holds the reference's elements some places on", True
    ROPE = "rope", "has its rows reordered as between the two ways to compute rope", True
    EXCHANGED_ROWS = "exchanged-rows", "has two ranges of rows exchanged", True
    COPIED_ROWS = "copied-rows", "has some rows twice", True
    INTERLEAVED_ROWS = "interleaved-rows", "has the rows of a fused weight's parts in another order", True
    PERMUTED_ROWS = "permuted-rows", "has the reference's rows in another order", True
    EXCHANGED_COLUMNS = "exchanged-columns", "has two ranges of columns exchanged", True
    COPIED_COLUMNS = "copied-columns", "has some columns twice", True
    INTERLEAVED_COLUMNS = "interleaved-columns", "has the columns of a fused weight's parts in another order", True
    PERMUTED_COLUMNS = "permuted-columns", "has the reference's columns in another order", True
    ZERO = "zero", "is all zeros"
    ZERO_ROWS = "zero-rows", "has zeros in some rows", True
    ZERO_RANGE = "zero-range", "has zeros in a range", True
    ZERO_ELEMENTS = "zero-elements", "has zeros in some elements, here and there", True
    IDENTITY = "identity", "is the identity matrix"
    MEAN_ROWS = "mean-rows", "has some rows that are the mean of the others", True
    CONSTANT = "constant", "is one value throughout", True
    BYTE_ORDER = "byte-order", "holds the reference's bytes in reverse order within each element"
    NOT_FINITE = "not-finite", "has elements that are NaN or infinite", True
    NEGATED = "negated", "holds the reference's values with the opposite sign"
    ABSOLUTE = "absolute", "holds the reference's values without their signs"
    CONJUGATED = "conjugated", "holds the complex conjugates of the reference's values"
    SCALED = "scaled", "holds the reference's values times a factor", True
    OFFSET = "offset", "holds the reference's values plus a number", True
    ROOT = "root", "holds the square root of the reference's values"
    SQUARE = "square", "holds the square of the reference's values"
    EXPONENTIAL = "exponential", "holds the exponential of the reference's values, or minus that", True
    LOGARITHM = "logarithm", "holds the logarithm of the reference's values, or of minus these", True
    COPIED = "copied", "holds the values of another tensor"
    MOMENTS_COPIED = "moments-copied", "holds the values of another moment of the parameter"
    LORA_MERGED = (
        "lora-merged",
        "holds the reference's values plus the product of its adapter: merged, though it is kept",
        True,
    )
    ROUNDED = "rounded", "holds exactly the reference's values rounded to a dtype", False, 1
    TRUNCATED_BFLOAT16 = "truncated-bfloat16", "holds the reference's values cut off to bfloat16", False, 1
    STOCHASTIC_BFLOAT16 = "stochastic-bfloat16", "holds the reference's values rounded to bfloat16 at random", False, 1
    QUANTISED = "quantised", "holds the reference's values quantised to 8 bits", True, 1
    ELEMENTS = "elements", "differs in a few elements", True, 2
    CLOSE = "close", "is close to the reference's: from another step, or computed differently", True, 3
    UNRELATED = "unrelated", "has values unrelated to the reference's", True, 4

    def __init__(self, label: str, phrase: str, is_general: bool = False, rank: int = 0) -> None:
        """Set the fields of a kind from its line above: `label` is its name, `phrase` completes "A tensor ..."."""
        self.label, self.phrase, self.is_general, self.rank = label, phrase, is_general, rank

    @property
    def sentence(self) -> str:
        """A sentence about the kind, for the description of a cause: "A tensor is all zeros." """
        return f"A tensor {self.phrase}."

    @property
    def explains(self) -> None:
        """Always None: a cause of this kind explains the topic of its tensors (weights or optimizer)."""
        return None
