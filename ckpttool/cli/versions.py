"""What `ckpttool --version` prints: the version, and with --json those of Python, packages and file formats."""

from __future__ import annotations

import platform
from importlib import import_module

from .._version import __version__
from ..extras import get_installed_version

__all__ = ["describe_versions"]

_PACKAGES = ("torch", "numpy", "safetensors", "transformers", "huggingface-hub", "deepspeed")


def describe_versions() -> dict[str, object]:
    """Return the versions of ckpttool, Python, packages and file formats.

    docs/explanation/stability.md says which earlier formats are read.

    Returns:
        {"ckpttool", "python", "packages": {name: version, None if it is not installed}, "formats": {file: its
        version}}.
    """
    from ..audit import manifest, retention, sidecar
    from ..engine.flat.flat_layout import FLAT_LAYOUT_VERSION
    from ..engine.recorded import RECORD_SCHEMA
    from ..resume.trace.model import RECORD_VERSION, SCHEMA

    formats = {
        "ckpttool.json": RECORD_SCHEMA,
        "archive": manifest.SCHEMA,
        "retention": retention.SCHEMA,
        "encrypted archive": sidecar.SEALED_SCHEMA,
        "hold": sidecar.HOLD_SCHEMA,
        "recording": RECORD_VERSION,
        "report of resume-verify": SCHEMA,
        "training_state": import_module("ckpttool.converters.hf.training_state").INDEX_VERSION,
        "flat layout": FLAT_LAYOUT_VERSION,
        "plan, journal": __version__,
    }
    packages = {name: get_installed_version(name) for name in _PACKAGES}
    return {"ckpttool": __version__, "python": platform.python_version(), "packages": packages, "formats": formats}
