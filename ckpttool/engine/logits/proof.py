"""convert --prove-logits: that the result of a conversion computes what its source computes.

The source is opened once more, as the conversion read it, and rounded where the conversion rounds; the result as any
reader would. Equal weights give equal bits, so a conversion that moves bytes is proven with a difference of 0.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import Any

from ...errors import Differs, UsageError, argument
from ...extras import require_packages
from ...layouts import Layout
from ...options import HUB_LAYOUT, CompareRequest, OpenOptions, Progress, WriteRequest
from ...printable import count_noun, list_first
from ...storage import urls
from ..opening import CheckpointPath
from .compare_logits import LogitComparison, compare_sides
from .sides import ModelSide, has_own_config, open_side
from .streaming import StreamedModel

__all__ = ["LogitProof"]


@dataclass(frozen=True)
class LogitProof:
    """How the source of a conversion is read again, and what is asked of the result."""

    src: CheckpointPath
    reading: OpenOptions
    writing: WriteRequest

    def check(self) -> None:
        """Check, before anything is copied, that the comparison at the end will be possible.

        Raises:
            MissingPackage: torch or transformers is not installed.
            UsageError: there is no config.json, or weights are to be quantised.
            Unsupported: the weights are not those of the model in config.json.
        """
        require_packages("proving that the result computes the same", "torch", "transformers")
        import torch

        if self.writing.quantize is not None:
            raise UsageError(
                f"{argument('prove_logits', True)}: with {argument('quantize', self.writing.quantize)} the result "
                "never computes the same. Leave one of the two out, and ask ckpttool compare what rounding to codes "
                "costs.",
                code="CKPT0204",
            )
        side = self._open_source()
        with closing(side.opened):
            model = StreamedModel.of_config(side.config, torch.float32, torch.device("cpu"))
            model.refuse_misfit(side, model.find_misfit(side))

    def prove(self, path: str, target: Layout, progress: Progress) -> dict[str, Any]:
        """Compare the logits of the source with those of the result at `path`, and return the summary for ckpttool.json
        and --json.

        Args:
            target: the layout of the result.
            progress: called with ("compare", bytes read, bytes in all).

        Raises:
            Differs: the logits differ (the message names the first layer that differs, and the causes), or weights
                differ that no prompt reached.
            CkpttoolError: one of the two cannot be read.
        """
        a = self._open_source()
        with closing(a.opened):
            options = OpenOptions(
                source_layout=target.name,
                config=None if has_own_config(path) else self.reading.config,
                allow_equal_ranks=True,
                allow_mixed_steps=True,
            )
            b = open_side("B", path, options, WriteRequest(to=HUB_LAYOUT), a.config)
            with closing(b.opened):
                a.config, a.rounded_to = b.config, b
                found = compare_sides(a, b, CompareRequest(), progress)
        if not found.equal or (found.largest == 0 and found.weights_differ):  # an expert that no prompt was sent to
            raise Differs(_explain_failed_proof(found, path), code="CKPT0505")
        return found.summarise()

    def _open_source(self) -> ModelSide:
        """Open the source with the options of the conversion; if the conversion resizes the vocabulary, its config has
        the new size."""
        side = open_side("A", self.src, self.reading, self.writing)
        if self.writing.vocab_size is not None:
            rows = {"vocab_size": self.writing.vocab_size}
            text = side.config.get("text_config")
            side.config = {**side.config, **(rows if text is None else {"text_config": {**text, **rows}})}
        return side


def _explain_failed_proof(found: LogitComparison, path: str) -> str:
    """Return the error message for a conversion whose result does not compute what the source computes."""
    numbers, left = "", f"Remove {urls.redact_url(path)}." if urls.is_url(path) else "Nothing was left there."
    if found.largest is not None and found.bound is not None:
        numbers = f"logits differ by {found.largest:.3g}, by rounding at most {found.bound:.3g}; "
    causes = "; ".join(f"{c.name} {c.how}" for c in found.causes[:4]) or "no weight of it differs"
    if found.equal:
        many = count_noun(len(found.weights_differ), "weight")
        return f"the result has other values in {many} that no prompt shows: {list_first(found.weights_differ)}. {left}"
    return (
        f"the result does not compute what the source computes: {numbers}the first layer that differs is "
        f"{found.first_layer}: {causes}. In this comparison, A is the source and B the result. {left}"
    )
