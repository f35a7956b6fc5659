"""safetensors: `load_file` of each file, `safe_open` for the names. It knows no boxes and no config."""

from pathlib import Path

import safetensors
from safetensors import safe_open
from safetensors.torch import load_file

NAME = "safetensors"
VERSIONS = {"safetensors": safetensors.__version__}
CLAIMS = {"hf": ("weights",)}


def files(path):
    found = sorted(Path(path).glob("*.safetensors"))
    if not found:
        raise FileNotFoundError(f"no safetensors file in {path}")
    return found


def load(path, about):
    return {f"model.{name}": t for file in files(path) for name, t in load_file(file).items()}


def list(path, about):
    names = []
    for file in files(path):
        with safe_open(file, "pt") as opened:
            names += [f"model.{name}" for name in opened.keys()]  # noqa: SIM118 (it is no dict)
    return names
