"""`TrainerGuard`: a callback that proves the saves of transformers' Trainer.

Imports transformers when it is loaded. Source: transformers/trainer.py (5.23): `_save_checkpoint` writes
OUTPUT_DIR/checkpoint-STEP, of a trial OUTPUT_DIR/RUN/checkpoint-STEP, and removes older ones; then `on_save` is called.
"""

from __future__ import annotations

import glob
import os
from typing import Any

from transformers import TrainerCallback

from .background import Guard

__all__ = ["TrainerGuard"]


class TrainerGuard(Guard, TrainerCallback):  # type: ignore[misc]
    """A `Guard` as a callback of transformers' Trainer: `Trainer(..., callbacks=[TrainerGuard()])`.

    Its arguments are those of `Guard`. Faults are told between steps, and the end of training waits for the last
    proofs.
    """

    def on_save(self, args: Any, state: Any, control: object, **_: object) -> None:
        """Verify the checkpoint that the Trainer has just saved, in the background.

        Args:
            args: the TrainingArguments; their `output_dir` has the checkpoint.
            state: the TrainerState; its `global_step` names the checkpoint.
            control: not used.
        """
        name = f"checkpoint-{state.global_step}"
        path = os.path.join(args.output_dir, name)
        if state.is_hyper_param_search:
            trials = glob.glob(os.path.join(glob.escape(args.output_dir), "*", name))
            path = max(trials, key=os.path.getmtime, default=path)
        self.check(path)

    def on_step_begin(self, args: object, state: object, control: object, **_: object) -> None:
        """Report the faults that were found in saves since the last step: raise them, or pass them to `on_fault`, as
        `Guard.poll` does. The Trainer's arguments are not used."""
        self.poll()

    def on_train_end(self, args: object, state: object, control: object, **_: object) -> None:
        """Wait until the last saves are verified. The Trainer's arguments are not used."""
        self.finish()
