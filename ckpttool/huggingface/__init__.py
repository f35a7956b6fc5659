from collections.abc import Mapping
from typing import Any

__all__ = ["Config"]

#: What config.json, adapter_config.json or another file of JSON says.
Config = Mapping[str, Any]
