"""The names of the files in a folder of torch_checkpointing."""

from __future__ import annotations

import re

__all__ = ["FILE", "METADATA"]

METADATA = "metadata.pkl"
#: The file of an item and a rank.
FILE = re.compile(r"(?P<item>[A-Za-z0-9_-]+)_(?P<rank>\d{1,7})\.(?P<ext>[A-Za-z0-9]+)")
