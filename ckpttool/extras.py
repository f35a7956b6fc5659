"""Packages that only some installs have, and what to type where one is missing.

`pip install ckpttool` brings what conversions need. What needs more says so before it starts.
"""

from __future__ import annotations

from importlib.util import find_spec

from .errors import MissingPackage

__all__ = ["explain_missing_package", "get_installed_version", "is_installed", "require_packages"]

#: The extra of ckpttool that brings a package, by the name that it is imported by.
_EXTRA = {
    "torch": "torch",
    "transformers": "torch",
    "model_signing": "audit",
    "pyrage": "audit",
    "s3fs": "s3",
    "gcsfs": "gcs",
    "adlfs": "azure",
    "distributed": "dask",
    "ray": "ray",
    "mpi4py": "mpi",
    "peft": "peft",
    "xxhash": "deltas",
}


def is_installed(package: str) -> bool:
    """Tell whether a package can be imported, by the name that `import` takes; it is not imported."""
    return find_spec(package) is not None


def get_installed_version(distribution: str) -> str | None:
    """Return the version of an installed package, by the name that pip knows; None if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def explain_missing_package(what: str, *packages: str, why: str = "") -> MissingPackage:
    """Make the error for packages that are missing; it is returned and not raised.

    Args:
        what: what needs them, the subject of the sentence ("loading into a live job").
        packages: at least one name that `import` takes; all come with one extra of ckpttool.
        why: why they cannot be imported; "" if they are just not installed. Ignored unless all of them are installed.
    """
    *first, last = (p.replace("_", "-") for p in packages)
    names = f"{', '.join(first)} and {last}" if first else last
    state = f"cannot be imported ({why})" if why and all(map(is_installed, packages)) else "not installed"
    verb = "" if state.startswith("cannot") else "are " if len(packages) > 1 else "is "
    return MissingPackage(f"{what} needs {names}, which {verb}{state}: pip install 'ckpttool[{_EXTRA[packages[0]]}]'")


def require_packages(what: str, *packages: str) -> None:
    """Refuse to start something where packages that it needs are not installed.

    Args:
        what: what needs them, the subject of the sentence ("loading into a live job").
        packages: names that `import` takes, which all come with one extra of ckpttool.

    Raises:
        MissingPackage: with the command that installs them.
    """
    if absent := [p for p in packages if not is_installed(p)]:
        raise explain_missing_package(what, *absent)
