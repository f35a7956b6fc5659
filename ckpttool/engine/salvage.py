"""What is left of a damaged checkpoint: files that were cut off, or that are something else, as far as they can be
read.

    find_problems(where)             [Problem]: every file of tensors that is not what it should be, by its ends
    patch_place(where)               the same place, every such file patched or hidden, so that layouts can read it
    drop_lost_tensors(ckpt, source)  the index without the tensors that lie in holes, which `ckpt.salvage` lists

Nothing here guesses: a tensor counts as exact if all its bytes are in the file, at the place that the file itself
gives.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from ..bounded_json import parse
from ..errors import CkpttoolError, Corrupt, NotPermitted, Unreadable, Unsupported
from ..formats import other_files, safetensors_header, truncated_files, zip_bytes
from ..huggingface import model_files
from ..index.checkpoint import Checkpoint, Chunks, Salvage, TensorEntry
from ..index.records import Records
from ..index.vocabulary import find_embedding_and_head
from ..layouts import Place
from ..storage.overlay import ENDLESS, Patch, PatchedSource
from ..storage.source import Source

__all__ = ["Problem", "ProblemKind", "drop_lost_tensors", "find_problems", "patch_place"]

ProblemKind = Literal["empty", "lfs-pointer", "web-page", "text", "zeros", "cut", "missing", "no-metadata", "damaged"]

_TORCH = (".pt", ".pth", ".bin", ".ckpt", ".tar", ".pkl")
_INDEX = "model.safetensors.index.json"
_RANK_FILE = re.compile(r"(.*/)?__\d+_\d+\.distcp")
_NUMBERED = re.compile(r"(?!shard-\d+-model-)(.*-)(\d{5})-of-(\d{5})\.safetensors")
_OF_MODEL = re.compile(r"(zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt|zero")  # a universal one has the folder zero/
_MOST_METADATA = 1 << 29
_MOST_FILES = 200_000


@dataclass(frozen=True)
class Problem:
    """A file that is not what it should be.

    `text`    what was found
    `repair`  the command that may help; None where there is none
    `patch`   how the file should be, where that is known
    `rebuilt` where the patch is another checkpoint's: how that makes this one whole
    """

    file: str
    kind: ProblemKind
    text: str
    repair: str | None = None
    patch: Patch | None = None
    rebuilt: str | None = None


def find_problems(where: Place) -> list[Problem]:
    """Find the damaged and missing files of a checkpoint.

    The first and last bytes of files with tensors are read, and headers and pickles of those that were cut off.

    Raises:
        NotPermitted: a file may not be read.
        Unsupported: the folder holds too many files.
    """
    source, file = where
    out = []
    for name in [file] if file is not None else _walk_files(source):
        try:
            found = _examine_file(source, name)
        except NotPermitted:  # no damage
            raise
        except Unreadable as e:
            found = Problem(name, "damaged", f"cannot be read: {e}")
        except CkpttoolError as e:
            found = Problem(name, "damaged", str(e))
        if found is not None:
            out.append(found)
    if file is None:
        out += [*_find_missing_shards(source), *_find_missing_metadata(source), *_find_lost_save(source)]
    return out


def _find_missing_shards(source: Source) -> list[Problem]:
    """Find safetensors shards that the index, or the numbers in the names of others, require and that are missing.

    An index that cannot be read is the only problem then.
    """
    names = source.list()
    try:
        wanted = {*_read_weight_map(source).values()} if _INDEX in names else set()
    except CkpttoolError as e:
        return [Problem(_INDEX, "damaged", str(e))]
    for name in names if not wanted else ():
        if (m := _NUMBERED.fullmatch(name)) is not None and int(m[3]) < 10**5:
            wanted |= {f"{m[1]}{i:05d}-of-{m[3]}.safetensors" for i in range(1, int(m[3]) + 1)}
    return [
        Problem(n, "missing", "is missing: the copy is incomplete", shlex.join(["hf", "download", "REPOSITORY", n]))
        for n in sorted(wanted - set(names))
    ]


def _find_lost_save(source: Source) -> list[Problem]:
    """Check whether `latest` of a DeepSpeed folder names a save that is missing or has no file of the model.

    Returns:
        A list with that problem, or [].
    """
    names = source.list()
    if "latest" not in names or source.size("latest") > 4096:
        return []
    tag = source.read("latest", 0, source.size("latest")).decode("utf-8", "replace").strip()
    saves = {n: [f for f in source.list(n) if _OF_MODEL.fullmatch(f)] for n in names if source.glance(n)[0]}
    if not tag or "/" in tag or saves.get(tag):
        return []
    others = sorted((n for n, files in saves.items() if files), key=lambda n: [int(k) for k in re.findall(r"\d+", n)])
    what = "has no file of the model" if tag in saves else "is not there"
    text = f'names the save "{tag}", which {what}' + (f"; the newest one that has is {others[-1]}" if others else "")
    repair = shlex.join(["ckpttool", "doctor", source.root, "--tag", others[-1]]) if others else None
    return [Problem("latest", "missing", text, repair)]


def _find_missing_metadata(source: Source) -> list[Problem]:
    """Check whether the `.metadata` of a DCP folder, the last file of a save, is missing.

    The items of such a folder have no names of their own. The `.metadata` of another step of the run is used as a patch
    if that step has the same files of the same sizes; `locate` then checks that every item has the dtype and shape it
    says.

    Returns:
        A list with that problem, or [].
    """
    names = source.list()
    files = {n: source.glance(n)[1] for n in names if _RANK_FILE.fullmatch(n)}
    if not files or any(n.endswith(".metadata") for n in names):
        return []
    text = "is missing: the save was interrupted before its end, and nothing in the folder names its items"
    if ".metadata.tmp" in names and 0 < (size := source.size(".metadata.tmp")) <= _MOST_METADATA:
        data = source.read(".metadata.tmp", 0, size)
        if data[-1:] == b".":  # the end of a pickle: it was written, and not renamed
            return [
                Problem(
                    ".metadata", "no-metadata", "is missing, but .metadata.tmp is whole", None, _make_whole_patch(data)
                )
            ]
    why = ""
    for folder in _list_other_steps(source) if source.local else ():
        with Source(folder) as other:
            theirs = {n: other.glance(n)[1] for n in other.list() if _RANK_FILE.fullmatch(n)}
            size = other.size(".metadata")
            if theirs == files and size <= _MOST_METADATA:
                how = f"names and places are those of {os.path.relpath(folder, os.path.dirname(source.root))}/.metadata"
                data = other.read(".metadata", 0, size)
                return [Problem(".metadata", "no-metadata", f"{text}; {how}", None, _make_whole_patch(data), how)]
        why = why or f". {folder} has other files, or files of other sizes, so its .metadata does not name them either"
    return [
        Problem(
            ".metadata", "no-metadata", text + why, shlex.join(["ckpttool", "inspect", os.path.dirname(source.root)])
        )
    ]


def _make_whole_patch(data: bytes) -> Patch:
    """Return the patch that replaces a whole file by `data`."""
    return Patch(0, len(data), ((0, data),))


def _list_other_steps(source: Source) -> list[str]:
    """List the folders with a .metadata whose names differ from this one's only in the number; at most 20, nearest
    first.

    The checkpoint may also be in a folder of the same name inside of each step.
    """
    out: list[tuple[int, str]] = []
    root = source.root
    for step, inside in ((root, ""), (os.path.dirname(root), os.path.basename(root))):
        parent, name = os.path.split(step)
        number = re.findall(r"\d+", name)
        if not number:
            continue
        for other in os.listdir(parent)[:10_000]:
            folder = os.path.join(parent, other, inside).rstrip("/")
            alike = other != name and re.sub(r"\d+", "#", other) == re.sub(r"\d+", "#", name)
            if alike and os.path.isfile(os.path.join(folder, ".metadata")):
                out.append((abs(int(re.findall(r"\d+", other)[-1]) - int(number[-1])), folder))
    return [folder for _, folder in sorted(out)[:20]]


def _walk_files(source: Source) -> Iterator[str]:
    """Yield the paths of all files of a folder and of the folders below, three deep; links are not followed out of it
    (`Source`).

    Raises:
        Unsupported: there are more than `_MOST_FILES` entries.
    """
    todo, seen = [("", 0)], 0
    while todo:
        folder, depth = todo.pop()
        for entry in source.list(folder):
            name = f"{folder}/{entry}" if folder else entry
            seen += 1
            if seen > _MOST_FILES:
                raise Unsupported(
                    f"{source.root} holds more than {_MOST_FILES:,} files; give the folder of one checkpoint.",
                    code="CKPT0303",
                )
            if source.glance(name)[0]:
                if depth < 3:
                    todo.append((name, depth + 1))
            else:
                yield name


def _examine_file(source: Source, name: str) -> Problem | None:
    """Return what is wrong with a file; None where nothing is, or where it is of no kind that holds tensors.

    Raises:
        CkpttoolError: it cannot be read, or its header or pickle makes no sense.
    """
    torch, safetensors = name.endswith(_TORCH), name.endswith(".safetensors")
    distcp = name.endswith(".distcp")
    size = source.glance(name)[1]
    if not (torch or safetensors or distcp) and (size is None or not 0 < size < 1024):
        return None
    size = source.size(name)
    head = source.read(name, 0, min(size, other_files.HEAD_BYTES))
    base = os.path.basename(name)
    if head.startswith(other_files.LFS_POINTER):
        true = re.search(rb"\nsize (\d{1,19})\n", head + b"\n")
        of = f" of {int(true[1]):,} bytes" if true else ""
        return Problem(
            name,
            "lfs-pointer",
            f"is a git-lfs pointer: the file itself{of} was never downloaded",
            shlex.join(["git", "-C", source.root, "lfs", "pull", f"--include={name}"]),
        )
    if not (torch or safetensors or distcp):
        return None
    if size == 0:
        if distcp and not _is_in_metadata(source, name):
            return None  # of a rank that had nothing to save
        return Problem(name, "empty", "is empty: the save or the copy was interrupted before its first byte")
    if other_files.is_web_page(head) and size < 64 << 20:
        return Problem(
            name,
            "web-page",
            f"is a web page, not {base}: the download failed, or it needs a login",
            shlex.join(["hf", "download", "REPOSITORY", name]),
        )
    if 1 < size < 1 << 16 and other_files.is_text(head):
        return Problem(
            name,
            "text",
            f"is text ({head[:60].decode()!r}), not {base}: the download failed",
            shlex.join(["hf", "download", "REPOSITORY", name]),
        )
    if not any(head) and (size >= 512 or not torch):
        return Problem(name, "zeros", "begins with zeros: its first blocks were never written to the disk")
    read_at, what = source.reader_of(name), f"{source.root}/{name}"
    if distcp and head[8:9] != b"{":
        if zip_bytes.is_zip(head) and not truncated_files.ends_like_zip(read_at, size):
            return Problem(name, "cut", f"was cut off at byte {size:,}", patch=Patch(size, ENDLESS))
        return None
    if safetensors or distcp:
        found = truncated_files.repair_safetensors_file(read_at, size, what)
    elif zip_bytes.is_zip(head) or truncated_files.LEGACY in head:
        found = truncated_files.repair_torch_file(read_at, size, what)
    else:
        return None  # .bin and .pkl of others
    if found is None:
        return None
    where = f"was cut off at byte {size:,}" if found.present == size else f"is damaged from byte {found.present:,} on"
    about = "" if found.present != size else f" of {'' if safetensors or distcp else 'about '}{found.size:,}"
    return Problem(name, "cut", where + about, patch=found)


def _is_in_metadata(source: Source, name: str) -> bool:
    """Tell whether the `.metadata` beside a DCP file names it; also True if there is none, or it is too large."""
    index = os.path.join(os.path.dirname(name), ".metadata")
    if not source.exists(index) or source.size(index) > _MOST_METADATA:
        return True
    return os.path.basename(name).encode() in source.read(index, 0, source.size(index))


def patch_place(where: Place) -> tuple[Place, list[Problem]]:
    """Return the place with its damaged files patched, so that a layout can read it; nothing on the disk changes.

    Returns:
        (the patched place, the problems that were found).

    Raises:
        NotPermitted, Unsupported: as `find_problems`.
    """
    source, file = where
    found = find_problems(where)
    patches = {p.file: p.patch for p in found if p.patch is not None}
    if file is None:
        for name in source.list():  # zstd frames do not tell whether more should follow; .metadata does
            size = source.glance(name)[1] or 0
            if _RANK_FILE.fullmatch(name) and size > 4 and source.read(name, 0, 4) == b"\x28\xb5\x2f\xfd":
                patches.setdefault(name, Patch(size, ENDLESS))
        patches |= _make_index_patch(
            source, [p for p in found if p.patch is None and p.file.endswith(".safetensors")], patches
        )

    def rank_file(name: str) -> Patch | None:
        """Return the patch for a file that is not there, if it is a rank's; else None."""
        return Patch(0, ENDLESS) if _RANK_FILE.fullmatch(name) else None

    return Place(PatchedSource(source, patches, rank_file), file), found


def _make_index_patch(source: Source, bad: list[Problem], patches: dict[str, Patch]) -> dict[str, Patch]:
    """Make the index of an hf folder without the shards that are lost.

    Args:
        bad: problems of shards that have no patch.
        patches: {file: its patch} of the others.

    Returns:
        {name of the index: its patch}; {} if none is needed, or nothing would be left.
    """
    names = source.list()
    shards = [n for n in names if n.endswith(".safetensors")]
    if any(n.startswith("shard-") for n in shards):  # parts of tensors, which say themselves where they belong
        return {}
    unusable = {p.file for p in bad}
    listed = _read_weight_map(source) if _INDEX in names else {}
    gone = {f for f in listed.values() if f in unusable or f not in names}
    numbered = [n for n in shards if _NUMBERED.fullmatch(n)]
    if not gone and not (unusable & set(shards)) and (listed or not numbered):
        return {}
    kept = {n: f for n, f in listed.items() if f not in gone}
    if not listed:
        with_patches = PatchedSource(source, patches)
        for shard in shards:
            if shard not in unusable:
                kept |= dict.fromkeys(safetensors_header.read_slots(with_patches, shard), shard)
    if not kept:
        return {}
    return {_INDEX: _make_whole_patch(json.dumps({"weight_map": kept}).encode())}


def _read_weight_map(source: Source) -> dict[str, str]:
    """Read the index of an hf folder, {tensor: file that holds it}; {} where it has no such table.

    Raises:
        CkpttoolError: it is missing, or cannot be parsed.
    """
    index = parse(source.read_all(_INDEX, 128 << 20), f"{source.root}/{_INDEX}")
    found = index.get("weight_map") if isinstance(index, dict) else None
    return {n: f for n, f in found.items() if isinstance(f, str)} if isinstance(found, dict) else {}


def drop_lost_tensors(ckpt: Checkpoint, source: PatchedSource, found: Iterable[Problem] = ()) -> Checkpoint:
    """Return the index without the tensors of which bytes are lost; its `salvage` lists them.

    Args:
        source: the patched files.
        found: problems of files, to be added to `salvage.problems`.

    Raises:
        Corrupt: no tensor is left.
    """
    salvage = ckpt.salvage or Salvage()
    salvage.problems += [f"{p.file} {p.text}" for p in found]
    patches = [source.patch(f) for f in ckpt.files]
    tensors: dict[str, TensorEntry] = {}
    for how in [x.rebuilt for x in found if x.rebuilt is not None]:
        salvage.rebuilt |= dict.fromkeys(ckpt.tensors, how)
    for name, t in ckpt.tensors.items():
        c = t.chunks
        if not t.numel and t.coding == "raw" and len(c) == 1:
            tensors[name] = replace(t, chunks=Chunks.whole(t.shape, c.file[0], 0, 0))
            continue
        lost = [
            (f, at, n)
            for f, at, n in zip(c.file, c.offset, c.length, strict=True)
            if (patch := patches[f]) is not None and not patch.has(at, n)
        ]
        if not lost:
            tensors[name] = t
            continue
        where = ", ".join(dict.fromkeys(ckpt.files[f] for f, _, _ in lost[:4]))
        parts = f"{len(lost)} of its {len(c)} parts are" if len(c) > 1 else "it is"
        salvage.rebuilt.pop(name, None)
        salvage.missing[name] = f"{parts} in the lost bytes of {where}"
    for name, file in _map_lost_tensors_to_files(source).items():
        salvage.missing.setdefault(f"model.{name}", f"it was in {file}")
    for i, file in enumerate(ckpt.files):
        if (patch := patches[i]) is not None and patch.present == 0 and not patch.made:
            salvage.problems += [f"{file} is missing"] if f"{file} is missing" not in salvage.problems else []
    _restore_tied_weight(tensors, salvage, ckpt, source)
    if not tensors:
        raise Corrupt(
            f"{ckpt.root}: no tensor of it is whole, so nothing can be salvaged. Take another copy.", code="CKPT0427"
        )
    records = Records(
        r for r in ckpt.records if (p := patches[r.extent.file]) is None or p.has(r.extent.offset, r.extent.length)
    )
    if salvage.rebuilt:
        ckpt.notes[:] = [n for n in ckpt.notes if not n.startswith("rebuilt: ")]
        how = next(iter(salvage.rebuilt.values()))
        ckpt.notes.append(f"rebuilt: {len(salvage.rebuilt):,} tensors: {how}; no digests of them are recorded")
    if salvage.missing:
        first, exact = next(iter(salvage.missing)), len(tensors.keys() - salvage.rebuilt.keys())
        ckpt.notes[:] = [n for n in ckpt.notes if not n.startswith("salvaged: ")]
        ckpt.notes.append(
            f"salvaged: {exact:,} tensors are exact, {len(salvage.missing):,} entries are missing, first "
            f'"{first}"; the "salvage" of ckpttool.json lists them'
        )
    sizes = [
        n if p is None else min(n, max(p.present, 0)) if not p.made else n
        for n, p in zip(ckpt.sizes, patches, strict=True)
    ]
    return replace(ckpt, tensors=tensors, records=records, sizes=sizes, salvage=salvage)


def _restore_tied_weight(
    tensors: dict[str, TensorEntry], salvage: Salvage, ckpt: Checkpoint, source: PatchedSource
) -> None:
    """Restore a lost embedding or output layer in `tensors` from the other one, if config.json ties the two.

    It is listed in `salvage.rebuilt` then.
    """
    config = ckpt.config
    if config is None and source.inner.exists("config.json"):
        try:
            config = model_files.read_config_json(source.inner)
        except CkpttoolError:
            return
    if config is None or config.get("tie_word_embeddings") is not True:
        return
    names = [n.removeprefix("model.") for n in (*tensors, *salvage.missing) if n.startswith("model.")]
    pair = find_embedding_and_head(dict.fromkeys(names))
    for kept, lost in (pair, pair[::-1]):
        there = tensors.get(f"model.{kept}")
        if there is not None and there.coding == "raw" and f"model.{lost}" in salvage.missing:
            tensors[f"model.{lost}"] = replace(there, path=("model", str(lost)))
            salvage.missing.pop(f"model.{lost}")
            salvage.rebuilt[f"model.{lost}"] = f"tied to {kept} by config.json"


def _map_lost_tensors_to_files(source: PatchedSource) -> dict[str, str]:
    """Return {tensor: file} for tensors of an hf folder whose files are lost completely."""
    if _INDEX not in source.patches or not source.inner.exists(_INDEX):
        return {}
    kept = _read_weight_map(source)
    return {n: f for n, f in _read_weight_map(source.inner).items() if n not in kept}
