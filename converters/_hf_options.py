"""`HfOptions`: what an hf folder shall hold, as the user asks for it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ckpttool.errors import UsageError, argument
from ckpttool.layouts import option

__all__ = ["HfOptions"]


@dataclass(frozen=True)
class HfOptions:
    """The content of an hf folder."""

    max_shard_bytes: int = option(
        5_000_000_000, "Largest file of tensors, in bytes.", flag="--max-shard-size", size=True
    )
    adapter: bool = option(False, "Write only the adapter, as PEFT saves it.")
    adapter_name: str | None = option(
        None, "Which adapter, where there are several; default where not given.", metavar="NAME"
    )
    adapter_config: str | None = option(
        None, "Folder with the adapter's adapter_config.json, if it is not that of --config.", metavar="DIR"
    )
    lora_alpha: float | None = option(
        None, "lora_alpha of an adapter without adapter_config.json, which is then made.", metavar="NUMBER"
    )
    rslora: bool = option(False, "With --lora-alpha: the adapter is scaled by alpha / sqrt(r).")
    base_model: str | None = option(
        None, "With --lora-alpha: path or id of the base model, for adapter_config.json.", metavar="MODEL"
    )
    include_optimizer: bool = option(False, "Write the optimizer and all other state, too.")
    strip_prefix: str | None = option(
        None, "Modules that names of weights begin with, to leave out; other names stay.", metavar="PREFIX"
    )
    allow_name_mismatch: bool = option(
        False, "Write weights that the model of the config does not have, or has in other shapes."
    )

    untie: bool = option(
        False, "Write both of the weights that config.json ties, and set tie_word_embeddings to false."
    )

    def __post_init__(self) -> None:
        if self.adapter and self.include_optimizer:
            raise UsageError(
                f"{argument('adapter', True)} writes the adapter alone; it cannot be combined with {argument('include_optimizer', True)}."
            )
        of_adapter = {
            "adapter_name": self.adapter_name,
            "adapter_config": self.adapter_config,
            "lora_alpha": self.lora_alpha,
        }
        for name, value in of_adapter.items():
            if value is not None and not self.adapter:
                raise UsageError(f"{argument(name, value)} is about an adapter; give {argument('adapter', True)} too.")
        for name, value in (("rslora", self.rslora or None), ("base_model", self.base_model)):
            if value is not None and self.lora_alpha is None:
                raise UsageError(
                    f"{argument(name, value)} is for the adapter_config.json that {argument('lora_alpha')} makes; give both."
                )
        if self.lora_alpha is not None and not (math.isfinite(self.lora_alpha) and self.lora_alpha > 0):
            raise UsageError(f"{argument('lora_alpha', self.lora_alpha)}: it must be a number above 0.")
        if self.max_shard_bytes < 1:
            raise UsageError(f"{argument('max_shard_bytes', self.max_shard_bytes)}: it must be at least 1.")
