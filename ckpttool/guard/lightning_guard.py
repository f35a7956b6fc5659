"""`LightningGuard`: a callback that proves the saves of Lightning.

Imports Lightning when it is loaded. Source: lightning/pytorch/trainer/trainer.py (2.6): all saves, of ModelCheckpoint
and of the user, go through `Trainer.save_checkpoint`, which ends with a barrier; no hook of a callback comes after the
files are written. `teardown` comes after the last save of a fit, `on_exception` instead of it.
"""

from __future__ import annotations

import os
from functools import wraps
from typing import Any

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback

from .background import Guard

__all__ = ["LightningGuard"]


class LightningGuard(Guard, Callback):  # type: ignore[misc]
    """A `Guard` as a callback of Lightning: `Trainer(..., callbacks=[LightningGuard()])`.

    Its arguments are those of `Guard`. Faults are told between batches, and the end of `fit` waits for the last proofs.
    With AsyncCheckpointIO, a save is proved when its file is there and rests; one that is to be overwritten in place
    (`last.ckpt`) may be read before it is.
    """

    def setup(self, trainer: Any, pl_module: object, stage: str) -> None:
        """Wrap `trainer.save_checkpoint`, through which all saves go, so that each save of a fit is verified.

        Args:
            trainer: Lightning's Trainer.
            pl_module: not used.
            stage: what the Trainer runs; nothing happens unless it is "fit".
        """
        if stage != "fit":
            return
        save = trainer.save_checkpoint

        @wraps(save)
        def save_and_check(filepath: str | os.PathLike[str], *given: object, **more: object) -> None:
            """Save, and have the result proved."""
            save(filepath, *given, **more)
            self.check(filepath)

        trainer.save_checkpoint = save_and_check

    def on_train_batch_start(self, trainer: object, pl_module: object, batch: object, batch_idx: int) -> None:
        """Report the faults that were found in saves since the last batch: raise them, or pass them to `on_fault`, as
        `Guard.poll` does. Lightning's arguments are not used."""
        self.poll()

    def on_exception(self, trainer: object, pl_module: object, exception: BaseException) -> None:
        """Stop verifying without waiting, since the fit failed, and unwrap `trainer.save_checkpoint`. The other
        arguments are not used."""
        vars(trainer).pop("save_checkpoint", None)
        self.stop()

    def teardown(self, trainer: object, pl_module: object, stage: str) -> None:
        """Wait until the last saves of a fit are verified, and unwrap `trainer.save_checkpoint`; do nothing unless
        `stage` is "fit"."""
        if stage == "fit":
            vars(trainer).pop("save_checkpoint", None)
            self.finish()
