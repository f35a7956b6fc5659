"""A model of `--config` with the LoRA layers that a checkpoint holds: PEFT makes them, as adapter_config.json describes them.

Only fields of LoraConfig that say which layers there are are taken from that file: others name modules to import, or ways to compute
initial values, which the checkpoint has.
"""

from __future__ import annotations

import os
import re
from typing import Any

from ..errors import Unsupported, argument
from ..extras import need
from ..huggingface import model_files
from ..index.checkpoint import Checkpoint, joined
from ..storage.source import Source
from .settings import Settings

__all__ = ["adapted"]

_LAYER = re.compile(r"\.lora_(?:A|embedding_A)(?:\.([^.]+))?(?:\.weight)?$")
_FIELDS = (
    "r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "target_parameters", "rank_pattern", "alpha_pattern",
    "use_rslora", "use_dora", "bias", "lora_bias", "modules_to_save", "layers_to_transform", "layers_pattern", "fan_in_fan_out",
)  # fmt: skip


def adapted(model: Any, settings: Settings, ckpt: Checkpoint) -> Any:
    """The model with the LoRA layers of the checkpoint; as it is where that holds none.

    adapter_config.json is looked for in the folder of `settings.config`, beside the checkpoint, and one folder above.

    Raises:
        Unsupported: there are several adapters, no adapter_config.json, or it is not of LoRA. MissingPackage: peft.
    """
    fqns = [joined(t.path[1:]) for t in ckpt.tensors.values() if t.path[0] == "model"]
    names = {m[1] for n in fqns if (m := _LAYER.search(n))}
    if not names:
        return model
    need("a model with LoRA layers", "peft")
    if len(names) > 1:
        raise Unsupported(
            f"the checkpoint holds several adapters ({', '.join(sorted(map(str, names)))}). Give the job with {argument('job')}."
        )
    found = _config(settings)
    if found is None:
        raise Unsupported(
            f"the checkpoint holds LoRA layers, and adapter_config.json, which describes them, is neither in {settings.config} nor beside "
            f"the checkpoint. Copy it to one of them, or give the job with {argument('job')}."
        )
    if found.get("peft_type") != "LORA":
        raise Unsupported(
            f"adapter_config.json is of {str(found.get('peft_type'))[:40]}, not of LORA. Give the job with {argument('job')}."
        )
    from peft import LoraConfig, get_peft_model, inject_adapter_in_model

    config = LoraConfig(**{k: found[k] for k in _FIELDS if k in found})
    name = names.pop() or "default"
    if any(n.startswith("base_model.model.") for n in fqns):
        return get_peft_model(model, config, adapter_name=name)
    return inject_adapter_in_model(config, model, name)


def _config(settings: Settings) -> dict[str, Any] | None:
    """adapter_config.json, parsed."""
    for folder in (settings.config, settings.source):
        if folder is not None and os.path.isdir(folder):
            with Source(folder) as source:
                if (found := model_files.adapter(source, None, [])) is not None:
                    return found[0]
    return None
