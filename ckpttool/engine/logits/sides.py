"""One of the two checkpoints that are compared: its config, and its weights under the names that the model has in
memory, read one at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ... import layouts
from ...errors import Unsupported, UsageError, argument
from ...huggingface import encodings, model_files
from ...index.checkpoint import TensorEntry
from ...index.composites import find_composites
from ...options import OpenOptions, WriteRequest
from ..handle import TensorHandle
from ..opening import CheckpointPath, OpenCheckpoint, drop_unused_hints, show_path
from ..planning import open_model

if TYPE_CHECKING:
    import torch

__all__ = ["ModelSide", "has_own_config", "open_side"]

_MODEL = "model."


@dataclass
class ModelSide:
    """A checkpoint whose weights are asked for by the names of the model's parameters.

    `digests` {name: BLAKE3 of the numbers} of every weight that was read, whatever its dtype; `rounded_to` is another
    side, to whose dtypes weights are rounded first, as a cast has done there.
    """

    label: str
    opened: OpenCheckpoint
    config: dict[str, Any]
    digests: dict[str, str] = field(default_factory=dict)
    rounded_to: ModelSide | None = None
    progress: Callable[[int], None] = lambda nbytes: None

    @property
    def tensors(self) -> Mapping[str, TensorEntry]:
        """The weights, {name without "model.": index entry}."""
        return {n.removeprefix(_MODEL): t for n, t in self.opened.checkpoint.tensors.items() if n.startswith(_MODEL)}

    def read(self, name: str) -> torch.Tensor:
        """Read one weight, keep the digest of its numbers in `digests`, and return it as a CPU tensor.

        With `rounded_to` set, a floating-point weight is first rounded to the dtype that it has on that side.

        Args:
            name: the weight's name without "model.".

        Raises:
            Corrupt, SourceChanged: its bytes are damaged.
        """
        import torch
        from blake3 import blake3

        found = TensorHandle(self.opened, _MODEL + name).torch()
        if self.rounded_to is not None and found.is_floating_point():
            found = found.to(getattr(torch, self.rounded_to.tensors[name].dtype))
        wide = found.to(torch.promote_types(found.dtype, torch.float32)) if found.is_floating_point() else found
        self.digests[name] = blake3(wide.contiguous().view(-1).view(torch.uint8).numpy().data).hexdigest()
        self.progress(found.nbytes)
        return found


def has_own_config(path: CheckpointPath) -> bool:
    """Tell whether a checkpoint is a folder with a config.json in it that names a model_type."""
    where = path if isinstance(path, layouts.Place) else layouts.place(path)
    with where.source:
        own = where.file is None and "config.json" in where.source.list()
        return own and "model_type" in model_files.read_config_json(where.source)


def open_side(
    label: str,
    path: CheckpointPath,
    reading: OpenOptions,
    writing: WriteRequest,
    config: dict[str, object] | None = None,
) -> ModelSide:
    """Open a checkpoint in any layout for a comparison of logits; quantised weights are dequantised.

    Args:
        label: what messages call the checkpoint, "A" or "B".
        path: the checkpoint.
        reading: how the checkpoint is read; hints that its layout does not use are left out.
        writing: the name map that applies to it, and the patterns of the weights to dequantise.
        config: content of the config.json to use if the checkpoint has none; None if it must have one.

    Raises:
        Unsupported: it has no weights, or quantised ones that ckpttool cannot dequantise.
        UsageError: there is no config.json of its model.
        CkpttoolError: it cannot be opened.
    """
    options = OpenOptions(**{**vars(drop_unused_hints(path, reading)), "config": reading.config})
    opened = open_model(path, options, writing)
    try:
        if _find_quantised_weight(opened) is not None:
            opened.close()
            opened = open_model(path, options, replace(writing, dequantize=("*",)))
        _refuse_quantised_weights(label, opened)
        return ModelSide(label, opened, _find_config(opened, reading.config, path, config))
    except BaseException:
        opened.close()
        raise


def _find_config(
    opened: OpenCheckpoint, given: str | None, path: CheckpointPath, otherwise: dict[str, object] | None
) -> dict[str, object]:
    """Return the config.json of a checkpoint's model: the one that was `given`, else its own or one in its folder, else
    `otherwise`.

    Raises:
        UsageError: there is none.
    """
    found = opened.checkpoint.config or model_files.find_model_files(opened.source, given, [])[0] or otherwise
    if found is None or not isinstance(found.get("model_type"), str):
        lack = "no config.json" if found is None else "no model_type that is a text in its config.json"
        raise UsageError(
            f"{show_path(path)} has {lack}, which says what its model computes. Give {argument('config')} "
            "the folder of one.",
            code="CKPT0216",
        )
    return found


def _find_quantised_weight(opened: OpenCheckpoint) -> str | None:
    """Return the name of the first weight that is stored as codes (quantised); None where there is none."""
    ckpt = opened.checkpoint
    codes = encodings.find_codes(ckpt, opened.source if opened.folder else None)
    coded = [n for n, c in find_composites(ckpt).items() if c.path[0] == "model"]
    return next(iter([*codes.weights, *coded]), None)


def _refuse_quantised_weights(label: str, opened: OpenCheckpoint) -> None:
    """Raise an error if weights are still stored as codes: their numbers are not the model's.

    Raises:
        Unsupported: there is such a weight; the message names the first.
    """
    if (first := _find_quantised_weight(opened)) is not None:
        raise Unsupported(
            f'{label}: "{first}" holds codes, and ckpttool does not know which numbers they stand for. Dequantise it '
            "with the program that quantised it.",
            code="CKPT0318",
        )
