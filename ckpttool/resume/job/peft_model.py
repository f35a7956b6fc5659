"""A model of `--config` with the LoRA layers that a checkpoint holds: PEFT makes them, as adapter_config.json describes
them.

Only fields of LoraConfig that say which layers there are, and what they compute, are taken from that file: others name
modules to import, or ways to compute initial values, which the checkpoint has.
"""

from __future__ import annotations

import os
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from ...engine.opening import OpenCheckpoint
from ...errors import Unsupported, argument
from ...extras import require_packages
from ...huggingface import lora, model_files
from ...storage.source import Source
from ..request import RunSettings

if TYPE_CHECKING:
    import torch

__all__ = ["add_lora_layers"]

_FIELDS = (
    "r",
    "lora_alpha",
    "lora_dropout",
    "target_modules",
    "exclude_modules",
    "target_parameters",
    "trainable_token_indices",
    "rank_pattern",
    "alpha_pattern",
    "use_rslora",
    "use_dora",
    "bias",
    "lora_bias",
    "modules_to_save",
    "layers_to_transform",
    "layers_pattern",
    "fan_in_fan_out",
    "ensure_weight_tying",
)


def add_lora_layers(model: torch.nn.Module, settings: RunSettings, opened: OpenCheckpoint) -> torch.nn.Module:
    """Return a model with the LoRA layers of the checkpoint; the model itself where the checkpoint holds none.

    adapter_config.json is looked for in the folder of `settings.config`, and where ckpttool looks for that of any
    checkpoint (`model_files.find_adapter_files`).

    Raises:
        Unsupported: there are several adapters, no adapter_config.json, or it asks for other layers than those of LoRA.
        MissingPackage: peft.
    """
    held = lora.find_lora(opened.checkpoint)
    if held is None:
        return model
    require_packages("a model with LoRA layers", "peft")
    instead = f"Give the job with {argument('job')}."
    if len(held.names) > 1:
        raise Unsupported(
            f"the checkpoint holds several adapters ({', '.join(held.names)}). {instead}", code="CKPT0339"
        )
    found = _find_adapter_config(settings, opened, held.names[0])
    if found is None:
        raise Unsupported(
            f"the checkpoint holds LoRA layers, and {model_files.ADAPTER_CONFIG}, which describes them, is neither in "
            f"{settings.config} nor beside the checkpoint. Copy it to one of them, or give the job with "
            f"{argument('job')}.",
            code="CKPT0339",
        )
    if found.get("peft_type") != "LORA":
        raise Unsupported(
            f"adapter_config.json is of {str(found.get('peft_type'))[:40]}, not of LORA. {instead}", code="CKPT0339"
        )
    from peft import LoraConfig, __version__, get_peft_model, inject_adapter_in_model

    here = {f.name for f in fields(LoraConfig)}
    for name in (str(k) for k, value in found.items() if value and k not in _FIELDS):
        if name in lora.REFUSED or name not in lora.KNOWN:
            why = lora.REFUSED.get(name, "ckpttool does not know what that changes")
            raise Unsupported(f"adapter_config.json sets {name[:60]!r}: {why}. {instead}", code="CKPT0339")
    if missing := [k for k in _FIELDS if found.get(k) and k not in here]:
        raise Unsupported(
            f"adapter_config.json sets {missing[0]!r}, which PEFT {__version__} here does not have. Install a newer "
            "one.",
            code="CKPT0339",
        )
    name = held.names[0] or "default"
    try:
        config = LoraConfig(**{k: found[k] for k in _FIELDS if k in found and k in here})
        if any(n.startswith(f"model.{lora.ROOT}") for n in opened.checkpoint.tensors):
            return get_peft_model(model, config, adapter_name=name)
        return inject_adapter_in_model(config, model, name)
    except (TypeError, ValueError) as e:
        raise Unsupported(
            f"PEFT does not make the layers that adapter_config.json describes in the model of {settings.config} "
            f"({str(e).splitlines()[0].rstrip('.')}). See whether the two are of one model, or give the job with "
            f"{argument('job')}.",
            code="CKPT0339",
        ) from None


def _find_adapter_config(settings: RunSettings, opened: OpenCheckpoint, name: str) -> dict[str, Any] | None:
    """Find and parse adapter_config.json, in the folder of `settings.config`, else near the checkpoint; None if there
    is none.

    `name` is that of the adapter, "" if it is not known.
    """
    found = None
    if settings.config is not None and os.path.isdir(settings.config):
        with Source(settings.config) as folder:
            found = model_files.find_adapter_files(folder, None, [], name or None)
    found = found or model_files.find_adapter_files(opened.source, None, [], name or None)
    return None if found is None else found[0]
