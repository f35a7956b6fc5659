"""The kit of the acid test: its cases, and the state that each one holds.

A kit is a .tar.xz or a folder: kit.json, layouts.json, and cases/NAME with case.json, the checkpoint, and, where its
state may be expected, expected.safetensors and expected.json. docs/explanation/acid-test.md describes them.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from hashlib import sha256
from importlib.resources import files
from lzma import LZMAError
from pathlib import Path
from shutil import copyfileobj
from tempfile import TemporaryDirectory
from typing import Any

from ..bounded_json import parse
from ..engine.copy.dtypes import numpy_dtype
from ..errors import Corrupt, NotRecognised, Unsupported, UsageError, argument
from ..formats.safetensors_header import read_slots
from ..storage.sources import open_source

__all__ = ["KIT_VERSION", "Case", "Expected", "choose_cases", "open_kit", "read_expected_state"]

KIT_VERSION = 1


@dataclass(frozen=True)
class Case:
    """A checkpoint of the kit, and what has to become of it.

    Attributes:
        name: such as "zero3_cut".
        folder: holds all of it.
        golden: whether it is whole.
        fault: what kind of fault a broken one has, such as "cut"; "" if it is golden.
        what: the trick, or the fault, in words.
        expect: "state": its state is to be loaded; "refused"; or "either".
        path: the checkpoint, from `folder`.
        layout: a key of the kit's layouts.json.
        parts: what it holds: "weights", "optimizer".
        touches: which of these a fault is in.
        made_of: the name of the golden case that a broken one was made of; "" if it is golden.
        tied: names of one tensor; one of them is enough.
        about: what a program is told: "layout", "world_size", "flat_layout".
    """

    name: str
    folder: Path
    golden: bool
    fault: str
    what: str
    expect: str
    path: str
    layout: str
    parts: tuple[str, ...]
    touches: tuple[str, ...]
    made_of: str
    tied: tuple[tuple[str, ...], ...]
    about: Mapping[str, Any]


@dataclass(frozen=True)
class Expected:
    """The state of a case.

    Attributes:
        tensors: {name: [dtype, shape, SHA-256 of the elements]}.
        widened: the same of each tensor in float32.
        values: {name: number}.
        stored: tensors under the names that the files have, where these are others than those in memory; {} where not.
    """

    tensors: Mapping[str, list[Any]]
    widened: Mapping[str, list[object]]
    values: Mapping[str, Any]
    stored: Mapping[str, list[Any]]


@contextmanager
def open_kit(path: str | None) -> Iterator[list[Case]]:
    """Yield the cases of a kit; a packed kit is unpacked to a temporary folder while the block runs.

    Args:
        path: a .tar.xz, or a folder with the unpacked kit; None: the one that comes with ckpttool.

    Raises:
        NotRecognised: it is not a kit.
        Corrupt: it is damaged.
        Unsupported: it is of another version.
    """
    kit = Path(path) if path is not None else Path(str(files("ckpttool.acid").joinpath("kit.tar.xz")))
    with TemporaryDirectory(prefix="ckpttool-acid-") as work:
        if not kit.is_dir():
            _unpack_kit(kit, work)
        yield _read_cases(kit if kit.is_dir() else Path(work), str(kit))


def choose_cases(cases: Sequence[Case], patterns: Sequence[str]) -> list[Case]:
    """Return the cases whose names match at least one glob, in the kit's order; all cases if there are no globs.

    Args:
        cases: all cases of the kit.
        patterns: the globs.

    Raises:
        UsageError: a glob matches no name.
    """
    if unknown := [p for p in patterns if not any(fnmatchcase(c.name, p) for c in cases)]:
        raise UsageError(
            f"{argument('cases', unknown[0])} matches no case; the kit has {', '.join(c.name for c in cases)}.",
            code="CKPT0203",
        )
    return [c for c in cases if not patterns or any(fnmatchcase(c.name, p) for p in patterns)]


def _unpack_kit(kit: Path, folder: str) -> None:
    """Unpack the .tar.xz of a kit to a folder.

    Raises:
        NotRecognised: the file does not exist, is not a .tar.xz, or has a link, a path that leads out of the folder, or
            two members with one path.
        Corrupt: it is cut off or damaged.
    """
    try:
        with tarfile.open(kit, "r:xz") as packed:
            for member in packed:  # Python before 3.11.4 has no filter for `extractall`
                path = Path(member.name)
                if member.isdir():
                    continue
                data = packed.extractfile(member) if member.isfile() else None
                if data is None or not path.parts or path.is_absolute() or ".." in path.parts or "\0" in member.name:
                    raise tarfile.TarError(f"{member.name!r} is no file below the folder")
                Path(folder, path.parent).mkdir(parents=True, exist_ok=True)
                with Path(folder, path).open("xb") as out:
                    copyfileobj(data, out)
    except (EOFError, LZMAError) as e:
        raise Corrupt(f"{kit}: the kit is damaged ({e}). Fetch it again.", code="CKPT0403") from None
    except (FileNotFoundError, FileExistsError, NotADirectoryError, tarfile.TarError) as e:
        raise NotRecognised(
            f"{kit}: not a kit of the acid test ({e}). Give a .tar.xz or a folder.", code="CKPT0301"
        ) from None


def _read_cases(folder: Path, what: str) -> list[Case]:
    """List the cases of an unpacked kit, in its order.

    Args:
        what: the kit's path, for messages.

    Raises:
        NotRecognised: it is no kit, or lacks a case. Unsupported: it is of another version. Corrupt: a case is
            incomplete.
    """
    try:
        said = parse((folder / "kit.json").read_bytes(), f"{what}: kit.json")
        if (version := said["version"]) != KIT_VERSION:
            raise Unsupported(
                f"{what} is version {version} of the kit; this ckpttool runs version {KIT_VERSION}. Update ckpttool.",
                code="CKPT0329",
            )
        return [_read_case(folder / "cases" / name) for name in said["cases"]]
    except FileNotFoundError as e:
        raise NotRecognised(
            f"{what}: not a kit of the acid test; it has no {os.path.relpath(e.filename, folder)}. Give a .tar.xz or a "
            "folder.",
            code="CKPT0301",
        ) from None
    except (LookupError, TypeError) as e:
        raise Corrupt(
            f"{what}: kit.json or a case.json of the kit is incomplete ({e}). Fetch the kit, or pack it, again.",
            code="CKPT0406",
        ) from None


def _read_case(folder: Path) -> Case:
    """Read the case.json in the folder of a case.

    Raises:
        FileNotFoundError, KeyError: the file, or a field of it, is missing.
    """
    said = parse((folder / "case.json").read_bytes(), f"{folder.name}/case.json")
    return Case(
        name=folder.name,
        folder=folder,
        golden=said["kind"] == "golden",
        fault=said["fault"] or "",
        what=said["what"],
        expect=said["expect"],
        path=said["path"],
        layout=said["about"]["layout"],
        parts=tuple(said["parts"]),
        touches=tuple(said["touches"]),
        made_of=said["made_of"] or "",
        tied=tuple(map(tuple, said["tied"])),
        about=said["about"],
    )


def read_expected_state(case: Case) -> Expected | None:
    """Return the state that a case holds; None if the case has to be refused."""
    if case.expect == "refused":
        return None
    tensors, widened = _read_tensor_digests(case.folder, "expected.safetensors")
    other = "expected_as_stored.safetensors"
    stored = _read_tensor_digests(case.folder, other)[0] if (case.folder / other).exists() else {}
    values = parse((case.folder / "expected.json").read_bytes(), f"{case.name}/expected.json")["values"]
    return Expected(tensors, widened, values, stored)


def _read_tensor_digests(folder: Path, name: str) -> tuple[dict[str, list[object]], dict[str, list[object]]]:
    """Hash the tensors of a safetensors file.

    Args:
        folder, name: the folder and the name of the file.

    Returns:
        {tensor: [dtype, shape, SHA-256 of the elements]}, and the same for the tensors converted to float32.
    """
    import numpy as np

    data = (folder / name).read_bytes()
    with open_source(str(folder)) as source:
        found = read_slots(source, name)
    tensors: dict[str, list[Any]] = {}
    widened: dict[str, list[object]] = {}
    for key, slot in found.items():
        body = data[slot.offset : slot.offset + slot.length]
        wide = np.frombuffer(body, numpy_dtype(slot.dtype)).astype(np.float32).tobytes()
        tensors[key] = [slot.dtype, list(slot.shape), sha256(body).hexdigest()]
        widened[key] = ["float32", list(slot.shape), sha256(wide).hexdigest()]
    return tensors, widened
