"""Knowledge about transformers and PEFT: names on the Hub, files next to a model, adapters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["Config"]

#: What config.json, adapter_config.json or another file of JSON says.
Config = Mapping[str, Any]
