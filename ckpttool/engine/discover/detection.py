"""Which checkpoint a path is, and what to type where it is one level too high or too low.

    detect(where)      the layout of a place; the error names the folder of a file, or lists the checkpoints below a
                       folder
    below(source)      the checkpoints in a folder and in its folders, by step, with what the incomplete ones lack
    newest(path)       the path of the newest complete one: `--latest`

Folders are judged by the names in them, as `Layout.detect` does, so that a bucket is only listed; of local files the
first bytes are read too. `Checkpoints` prints itself as the list that `inspect` shows.

One module, since the answer for one path and the list below it judge by the same evidence.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from typing import Any

from ... import layouts
from ...errors import CkpttoolError, NotPermitted, NotRecognised, UsageError, argument
from ...formats import other_files
from ...layouts import Layout, Place
from ...printable import printable
from ...storage import remote, urls
from ...storage.source import Source
from .unread_files import human, kind_of

__all__ = ["Checkpoints", "Found", "below", "detect", "latest", "newest"]

_DEPTH = 2
_MOST_FOREIGN = 16  # folders that are looked into for another program's files
_MOST = 1000  # folders that are listed on a disk
_MOST_EXPORTS = 2  # weights alone at the end of a run, as torchtitan saves them at its last step
_MOST_REMOTE = 200  # and on a store, where each takes a request


@dataclass(frozen=True)
class Found:
    """A checkpoint below a folder.

    `name` is relative to that folder; `step` is None where no name has it; `trainer` is None where names alone do not
    tell; `complete` is whether the file is there that the trainer writes last, and every rank and shard has its own;
    `lacks` is what is not there; `files` and `bytes` are those of the folder and the folders in it; `newest` is whether
    it is the newest complete one of its run; `weights_only` is whether it is newer than that, but a job cannot resume
    from it: an export at the end of a run, say.
    """

    path: str
    name: str
    step: int | None
    epoch: int | None
    layout: str
    trainer: str | None
    complete: bool
    lacks: str
    files: int
    bytes: int
    newest: bool = False
    weights_only: bool = False


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints below a folder, oldest first. `left_out` is the number of folders that were not looked into."""

    path: str
    checkpoints: list[Found]
    left_out: int = 0

    @property
    def newest(self) -> list[Found]:
        """The newest complete checkpoint of each run: one, unless several runs or models lie below."""
        return [c for c in self.checkpoints if c.newest]

    def to_json(self) -> dict[str, Any]:
        """Plain data; "newest" is a path where there is one answer."""
        answer = self.newest
        return {
            "path": self.path,
            "checkpoints": [asdict(c) for c in self.checkpoints],
            "newest": answer[0].path if len(answer) == 1 else None,
            "left_out": self.left_out,
        }

    def __str__(self) -> str:
        rows = [
            (
                f"step {c.step:,}" if c.step is not None else f"epoch {c.epoch}" if c.epoch is not None else "",
                printable(c.name),
                c.layout + (f" ({c.trainer})" if c.trainer else ""),
                human(c.bytes),
                "newest complete"
                if c.newest
                else "weights only"
                if c.weights_only
                else ""
                if c.complete
                else f"incomplete: {printable(c.lacks)}",
            )
            for c in self.checkpoints
        ]
        wide = [max((len(r[i]) for r in rows), default=0) for i in range(4)]
        lines = [
            "  " + "  ".join([*(cell.ljust(w) for cell, w in zip(r, wide, strict=False)), r[4]]).rstrip() for r in rows
        ]
        if self.left_out:
            lines.append(f"  {self.left_out} more folders were not looked into")
        return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------- one place


def detect(where: Place) -> Layout:
    """The one layout of a place.

    Raises:
        NotRecognised: a file of a folder, with the folder to give; a folder of checkpoints, with their list, and
        `below`; or
            anything else, with what each layout looked for.
        Unsupported: more than one layout matches.
    """
    if where.file is not None:
        _refuse_piece(where.source, where.file)
    elif re.fullmatch(_OF_MEGATRON, _name(where.source)) and (whole := _folder_of(where.source)) is not None:
        raise _piece(where, *whole)
    try:
        layout = layouts.detect(where)
    except NotRecognised as e:
        if where.file is not None:
            if (folder := _folder_of(where.source)) is not None:
                raise _piece(where, *folder) from None
            _refuse_foreign(where.source, where.file)
            raise
        found = below(where.source)
        if not found.checkpoints:
            if (closed := _closed(where.source)) is not None:
                raise NotPermitted(
                    f"{closed} cannot be listed: Permission denied. What it holds is not known."
                ) from None
            _refuse_foreign(where.source, None)
            raise
        if all(
            c.step is None and c.epoch is None for c in found.checkpoints
        ):  # no run: what was looked for matters too
            error = NotRecognised(
                *e.args, listing=f"{e.listing}\n{_count(found)} below it; give the path of one:\n{found}"
            )
        else:
            answer = found.newest
            hint = f" The newest complete one is {answer[0].path}." if len(answer) == 1 else ""
            error = NotRecognised(
                f"{found.path} is not a checkpoint itself; {_count(found)} below it. Give the path of one.{hint}",
                listing=str(found),
            )
        error.below = found
        raise error from None
    if where.file is None and layout.name == "hf" and _is_stray(where.source.list()):
        found = below(where.source)
        if any(c.layout != "hf" for c in found.checkpoints):
            raise _stray(where.source, found)
    return layout


def _is_stray(names: Iterable[str]) -> bool:
    """Whether the safetensors files among the names of a folder are no model as transformers, PEFT or torch saves
    one."""
    own = r"(config|adapter_config)\.json|model\.safetensors(\.index\.json)?|adapter_model\.safetensors"
    return not any(re.fullmatch(own, n) or re.fullmatch(_SHARD, n) or re.fullmatch(_SHARD_OF_RANK, n) for n in names)


def _stray(source: Source, found: Checkpoints) -> NotRecognised:
    """The error for a folder with checkpoints below it and safetensors files that are no model beside them."""
    files = [n for n in source.list() if n.endswith(".safetensors")]
    error = NotRecognised(
        f"{_shown(source, '')} holds safetensors files without a config.json, first {files[0]}, and {_count(found)} "
        f"below it. Give the path of one:\n{found}"
    )
    error.below = found
    return error


def _refuse_foreign(source: Source, file: str | None) -> None:
    """Refuse a file, or a folder and those in it (a run), of a program whose checkpoints ckpttool does not read, by its
    name.

    Raises:
        NotRecognised: it is one.
    """
    if file is not None:
        beside = () if source.root.startswith("http") else source.list()  # a server may have no listing of the folder
        other_files.refuse_foreign_checkpoint([file], beside, _shown(source, file))
        return
    names = source.list()
    folders = [n for n in names if source.glance(n)[0]]
    for folder in ["", *folders[:_MOST_FOREIGN]]:
        here = source.list(folder) if folder else names
        files = [n for n in here if not source.glance(f"{folder}/{n}" if folder else n)[0]]
        other_files.refuse_foreign_checkpoint(files, here, _shown(source, folder))


def _closed(source: Source) -> str | None:
    """A folder here, or this one, that this user may not look into; None where there is none."""
    if not source.local:
        return None
    folders = [source.root, *(os.path.join(source.root, n) for n in source.list() if source.glance(n)[0])]
    return next((f for f in folders if not os.access(f, os.R_OK | os.X_OK)), None)


def _count(found: Checkpoints) -> str:
    n = len(found.checkpoints)
    return "1 checkpoint is" if n == 1 else f"{n} checkpoints are"


# Patterns are text here: re compiles each at its first use and keeps it, and most commands need few of them.
_OF_DCP = r"(?s)(__\d+)?\.metadata(\.tmp)?|.*\.distcp"
_OF_DEEPSPEED = r"(bf16_)?zero_pp_rank_\d+.*\.pt|mp_rank_\d+_model_states\.pt|layer_\d+-model_.*\.pt"
_RANK = r"(?P<head>.*?(?:rank|shard)[_-]?)(?P<number>\d{1,6})(?P<tail>(?:[._-].*)?\.(?:pt|pth|bin|ckpt|tar))"
_SHARD = r"(?P<head>.+)-(?P<number>\d{5})-of-(?P<of>\d{5})(?P<tail>\.(?:safetensors|bin))"
_SHARD_OF_RANK = r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors"
#: The folder of a model-parallel rank of Megatron-LM.
_OF_MEGATRON = r"mp_rank_(\d{2})(?:_(\d{3}))?(?:_(\d{3}))?"
_MEGATRON_FILES = frozenset(("model_optim_rng.pt", "model_rng.pt", "distrib_optim.pt", "optim.pt"))
#: The file of an item and a rank of torch_checkpointing.
_ITEM_OF_RANK = r"[A-Za-z0-9_-]+_\d{1,7}\.(pt|safetensors|json)|metadata\.pkl"
#: Folders of dcp that are one half of a trainer's directory, and names that those and others have.
_HALF = r"pytorch_model_fsdp_\d+|optimizer_\d+"
_MAYBE_HALF = r"model|weights|optim(izer)?|model_and_optim|train"


def _is_piece(source: Source, name: str) -> bool:
    """Whether a file holds a part of a checkpoint, and by itself is none, although a layout may take it for one."""
    if re.fullmatch(_OF_DCP, name) or re.fullmatch(_OF_DEEPSPEED, name):
        return True
    if name in _MEGATRON_FILES and re.fullmatch(_OF_MEGATRON, _name(source)):
        return True
    if source.root.startswith("http"):  # a server may have no listing of the folder
        return False
    if re.fullmatch(_ITEM_OF_RANK, name) and "metadata.pkl" in source.list():
        return True
    if re.fullmatch(_SHARD_OF_RANK, name):
        return sum(1 for n in source.list() if re.fullmatch(_SHARD_OF_RANK, n)) > 1
    if m := re.fullmatch(_SHARD, name):
        names = source.list()
        shards = sum(_same(_SHARD, n, m, "of") for n in names)  # of an incomplete copy each may be read alone
        return m["of"] != "00001" and (shards == int(m["of"]) or any(n.endswith(".index.json") for n in names))
    kind = kind_of(name)
    if kind is not None and kind[1] in ("scheduler", "rng", "scaler", "dataloader", "trainer"):
        return True
    m = re.fullmatch(_RANK, name)
    return m is not None and any(n != name and _same(_RANK, n, m) for n in source.list())


def _name(source: Source) -> str:
    return source.root.rstrip("/").rpartition("/")[2]


def _same(pattern: str, name: str, m: re.Match[str], *more: str) -> bool:
    other = re.fullmatch(pattern, name)
    return other is not None and all(other[k] == m[k] for k in ("head", "tail", *more))


def _refuse_piece(source: Source, name: str) -> None:
    """Answer a file of a folder with that folder."""
    if not _is_piece(source, name):
        return
    if (folder := _folder_of(source)) is not None:
        raise _piece(Place(source, name), *folder)
    if re.fullmatch(_OF_DCP, name):
        why = layouts.find("dcp").detect(Place(source, None))[1]
        raise NotRecognised(
            f"{_shown(source, name)} is one file of a dcp checkpoint, and its folder cannot be read either: {why}."
        )


def _folder_of(source: Source) -> tuple[str, Layout] | None:
    """(path, layout) of the checkpoint whose folder this is: the folder, or that of the trainer that it is a half
    of."""
    parent, _, name = source.root.rpartition("/")
    if re.fullmatch(_HALF, name) or re.fullmatch(_MAYBE_HALF, name) or re.fullmatch(_OF_MEGATRON, name):
        try:
            with remote.open_source(parent) as above:
                layout = layouts.detect(Place(above, None))
            if layout.of_trainer:
                return urls.display_path(parent), layout
        except CkpttoolError:
            pass
    try:
        return urls.display_path(source.root), layouts.detect(Place(source, None))
    except CkpttoolError:
        return None


def _piece(where: Place, folder: str, layout: Layout) -> NotRecognised:
    path = _shown(where.source, where.file or "")
    kind = "file" if where.file else "folder"
    return NotRecognised(f"{path} is one {kind} of the {layout.name} checkpoint {folder}; give that folder.")


def _shown(source: Source, name: str) -> str:
    return urls.display_path(f"{source.root.rstrip('/')}/{name}" if name else source.root)


# ----------------------------------------------------------------------------------------------------- many places

#: Folders that are part of a checkpoint, or none at all, whatever lies in them.
_NO_CHECKPOINT = (
    r"(?s)\..*|optimizer_\d+|recipe_state|sharded|zero|runs|logs|wandb|tensorboard|lightning_logs|__pycache__"
)
_FILE = r"(?s).*\.(pt|pth|ckpt|bin|tar\.zst(\.age)?)"
_TEMPORARY = r"(?s)tmp[-_.].*|.*[-_.](tmp|incomplete|partial)"
_STEP = r"(?i)(?:step|checkpoint|ckpt|iter|iteration|batch)s?[-_=]?(\d{1,15})(?!\d)"
_NAMED_STEP = r"(?i)steps?[-_=]?(\d{1,15})(?!\d)"
_EPOCH = r"(?i)(?:epoch|(?<![a-z])ep)[-_=]?(\d{1,9})(?!\d)"


def below(source: Source) -> Checkpoints:
    """The checkpoints in a folder and in its folders."""
    walk = _Walk(source)
    rows = sorted(walk.rows(""), key=_age)
    runs: dict[tuple[str, str], list[Found]] = {}
    for c in rows:
        if c.complete:
            runs.setdefault(_run(c), []).append(c)
    chosen: set[int] = set()
    exports: set[int] = set()
    for saves in runs.values():
        last = saves[::-1][: _MOST_EXPORTS + 1]
        newer = list(takewhile(lambda c: _weights_only(source, c, saves), last))  # noqa: B023
        if newer == last:  # the run saves its weights apart from the rest
            newer = []
        exports |= {id(c) for c in newer}
        best = saves[-1 - len(newer)]
        if not any(c is not best and _age(c)[:2] == _age(best)[:2] for c in saves):  # else neither is the newest
            chosen.add(id(best))
    rows = [replace(c, newest=id(c) in chosen, weights_only=id(c) in exports) for c in rows]
    return Checkpoints(_shown(source, ""), rows, walk.left_out)


def _weights_only(source: Source, c: Found, run: Iterable[Found]) -> bool:
    """Whether a job cannot resume from a save of a run: its index has a model and nothing else, or it is an export for
    transformers."""
    if c.layout == "hf":
        return any(other.layout != "hf" for other in run)
    if c.layout != "dcp":
        return False
    try:
        index = layouts.find("dcp").read(Place(source.below(c.name), None), layouts.ReadOptions())
    except CkpttoolError:
        return False
    return {index.component(n) for n in (*index.tensors, *index.values)} == {"model"}


def _age(c: Found) -> tuple[int, int, str]:
    return (-1 if c.step is None else c.step, -1 if c.epoch is None else c.epoch, c.name)


def _run(c: Found) -> tuple[str, str]:
    """What the saves of one run have in common: the folder they are in; of global_step_3/actor also the name."""
    folder, _, name = c.name.rpartition("/")
    if _numbers(name) == (None, None):
        return re.sub(r"\d+", "#", folder), name if folder else ""
    return folder, ""


def _numbers(name: str) -> tuple[int | None, int | None]:
    """(step, epoch) in a name."""
    steps, epochs = re.findall(_NAMED_STEP, name) or re.findall(_STEP, name), re.findall(_EPOCH, name)
    return (int(steps[-1]) if steps else None), (int(epochs[-1]) if epochs else None)


class _Walk:
    """A look into a folder, its folders and theirs."""

    def __init__(self, source: Source) -> None:
        self.source, self.left_out = source, 0
        self.known = tuple(layouts.layouts().values())  # asking for them looks for other packages
        self.listings = _MOST_REMOTE if source.is_remote else _MOST

    def rows(self, folder: str) -> Iterator[Found]:
        names = self.source.list(folder)
        trainers = False  # whether a folder here has trainer_state.json, so that its siblings should
        out: list[Found] = []
        for name in sorted(names, key=lambda n: [-1 if x is None else x for x in _numbers(n)], reverse=True):
            path = f"{folder}/{name}" if folder else name
            if self._leads_to_another(path, names):
                continue
            if not self.source.glance(path)[0]:
                if name == "data.pt" and "actor" in names:  # the data loader of verl
                    continue
                out += self._file(folder, path, name, names)
            elif not re.fullmatch(_NO_CHECKPOINT, name) and not (name == "train" and "model_and_optim" in names):
                if self.listings <= 0:
                    self.left_out += 1
                    continue
                self.listings -= 1
                found = self._folder(path, name)
                inner: list[Found] = []
                if (
                    found is not None
                    and found.layout == "hf"
                    and _is_stray(self.source.list(path))
                    and path.count("/") + 1 < _DEPTH
                ):
                    inner = list(self.rows(path))
                if any(c.layout != "hf" for c in inner):
                    yield from inner
                elif found is not None:
                    trainers |= found.layout == "trainer" and found.complete
                    out.append(found)
                elif path.count("/") + 1 < _DEPTH:
                    yield from self.rows(path)
        for c in out:
            if trainers and c.layout == "hf" and re.fullmatch(r"checkpoint-\d+", os.path.basename(c.name)):
                c = replace(c, complete=False, lacks=_NO_TRAINER_STATE)
            yield c

    def _leads_to_another(self, path: str, names: Iterable[str]) -> bool:
        """Whether an entry is a link to another one of its folder: LATEST of NeMo AutoModel, last.ckpt of Lightning."""
        here = os.path.join(self.source.root, path)
        if not self.source.local or not os.path.islink(here):
            return False
        folder, _, name = os.path.realpath(here).rpartition("/")
        return name in names and folder == os.path.realpath(os.path.dirname(here))

    def _folder(self, path: str, name: str) -> Found | None:
        inside = self.source.below(path)
        names = self.source.list(path)
        layout = _matching(Place(inside, None), self.known)
        lacks = next(_lacks(inside, names, name, layout), "")
        if layout is None and not lacks:
            return None
        if lacks == _NO_TRAINER_STATE:
            layout = layouts.find("trainer")
        known = layout.name if layout else "torch_checkpointing" if lacks == _STILL_WRITTEN else "dcp"
        sizes = [size for _, size in _files(inside, names)]
        return self._found(path, known, layout, lacks, len(sizes), sum(sizes))

    def _file(self, folder: str, path: str, name: str, names: Iterable[str]) -> Iterator[Found]:
        """A checkpoint in one file, unless names say that it is a part of one or no state of a model."""
        kind = kind_of(name)
        if (
            not re.fullmatch(_FILE, name)
            or name.startswith(".")
            or re.fullmatch(_SHARD, name)
            or re.fullmatch(_RANK, name)
        ):
            return
        if re.fullmatch(_OF_DEEPSPEED, name) or (kind is not None and not kind[0].startswith("weights")):
            return
        layout: str | None = "audit" if ".tar.zst" in name else "full"
        if not self.source.is_remote:
            inside = self.source.below(folder) if folder else self.source
            found = _matching(Place(inside, name), self.known)
            layout = found.name if found else None
        if layout is not None:
            size = self.source.glance(path)[1] or 0
            lacks = "" if size else "the file is empty"
            yield self._found(
                path, layout, None, lacks or (_STILL_WRITTEN if re.fullmatch(_TEMPORARY, name) else ""), 1, size
            )

    def _found(self, path: str, layout: str, of: Layout | None, lacks: str, files: int, size: int) -> Found:
        step = epoch = None
        for part in reversed(path.split("/")):
            step, epoch = _numbers(part)
            if step is not None or epoch is not None:
                break
        if step is None and layout == "nanotron" and (name := path.rpartition("/")[2]).isdigit():
            step = int(name)
        trainer = None
        if of is not None:
            trainer = of.title.removeprefix("directory of ") if of.of_trainer else "DeepSpeed" if of.saves else None
        return Found(
            _shown(self.source, path),
            path,
            step,
            epoch,
            layout,
            trainer,
            not lacks,
            lacks,
            files,
            size,
        )


def _matching(where: Place, known: Iterable[Layout]) -> Layout | None:
    """The layout of a place; the first where several match."""
    yes = []
    for layout in known:
        try:
            if layout.detect(where)[0]:
                yes.append(layout)
        except (CkpttoolError, OSError):
            continue
    return next((x for x in yes if x.of_trainer), yes[0] if yes else None)


def _files(inside: Source, names: Iterable[str]) -> Iterator[tuple[str, int]]:
    """(name, bytes) of the files of a folder and of the folders in it."""
    for name in names:
        is_folder, size = inside.glance(name)
        if not is_folder:
            yield name, size or 0
            continue
        for inner in inside.list(name):
            below_it, size = inside.glance(f"{name}/{inner}")
            if not below_it:
                yield f"{name}/{inner}", size or 0


_NO_TRAINER_STATE = "no trainer_state.json, which Trainer writes last"
_STILL_WRITTEN = "its name is that of an unfinished save"


def _lacks(inside: Source, names: list[str], name: str, layout: Layout | None) -> Iterator[str]:
    """What a folder lacks of a complete checkpoint, the most telling first; nothing for a folder that is none."""
    halves = [n for n in names if re.fullmatch(_HALF, n)]
    for folder in ["", *halves]:
        here = inside.list(folder) if folder else names
        head = f"{folder}/" if folder else ""
        has_index = any(re.fullmatch(r"(__\d+)?\.metadata", n) for n in here)
        if ((any(n.endswith(".distcp") for n in here) or ".metadata.tmp" in here) and not has_index) or (
            folder and not has_index
        ):
            yield f"no {head}.metadata, which is written last"
    is_script = layout is not None and layout.name == "script"  # LLaMA-Factory names its folders so, too
    is_trainer = re.fullmatch(r"checkpoint-\d+", name) and "trainer_state.json" not in names and not is_script
    if is_trainer and (halves or any((kind_of(n) or ("", ""))[1] in ("optim", "scheduler", "rng") for n in names)):
        yield _NO_TRAINER_STATE
    if layout is None and "optimizer" in names and "optimizer_config.json" in inside.list("optimizer"):
        yield "no checkpoint_metadata.json, which nanotron writes last"
    if "model_and_optim" in names and ".metadata.json" not in names:
        yield "no .metadata.json, which OLMo-core writes last"
    if layout is None:
        if re.fullmatch(_TEMPORARY, name) and any(re.fullmatch(_ITEM_OF_RANK, n) for n in names):
            yield _STILL_WRITTEN
        return
    if re.fullmatch(_TEMPORARY, name) or ".incomplete" in names:  # the latter of NeMo AutoModel
        yield _STILL_WRITTEN if re.fullmatch(_TEMPORARY, name) else "has .incomplete: the save did not finish"
    if layout.name == "veomni" and "model" in names and "checkpoint_manifest.json" not in names:
        yield "no checkpoint_manifest.json, which VeOmni writes last"
    if layout.name == "megatron":
        yield from _megatron_gaps(inside, names)
    pointers = layout.saves.pointers if layout.saves else frozenset[str]()
    tags = [""]
    if pointers and not any(re.fullmatch(_OF_DEEPSPEED, n) for n in names):
        saves = [
            n for n in names if inside.glance(n)[0] and any(re.fullmatch(_OF_DEEPSPEED, x) for x in inside.list(n))
        ]
        tags = saves or tags
        if saves and not pointers & set(names):
            yield "no latest, which DeepSpeed writes last"
    for tag in tags:
        here = inside.list(tag) if tag else names
        yield from _gaps(here)
        for n in here:
            is_folder, size = inside.glance(f"{tag}/{n}" if tag else n)
            if not is_folder and size == 0 and (n.endswith((".safetensors", ".pt", ".bin", ".metadata"))):
                yield f"{n} is empty"


def _megatron_gaps(inside: Source, names: Iterable[str]) -> Iterator[str]:
    """metadata.json, folders of model-parallel ranks that should be there by the numbers of the others, and files that
    the others have."""
    if {".metadata", "common.pt"} <= set(names) and "metadata.json" not in names:
        yield "no metadata.json"
    folders = {n: set(inside.list(n)) - {"optim.pt"} for n in names if re.fullmatch(_OF_MEGATRON, n)}
    files: set[str] = set().union(*folders.values())
    of: dict[int, set[tuple[int, ...]]] = {}  # {tensor-parallel rank: the other numbers}
    for name, has in folders.items():
        if has:
            m = re.fullmatch(_OF_MEGATRON, name)
            assert m is not None
            of.setdefault(int(m[1]), set()).add(tuple(int(n) for n in m.groups()[1:] if n is not None))
            yield from (f"no {name}/{file}" for file in sorted(files - has))
    most = max(map(len, of.values()), default=0)  # experts may be on some tensor-parallel ranks alone, on each as many
    for first in range(max(of, default=-1) + 1):
        here = of.get(first, set())
        for rest in sorted(set().union(*of.values()) - here) if len(here) < most else ():
            yield "no " + "_".join((f"mp_rank_{first:02d}", *(f"{n:03d}" for n in rest)))


def _gaps(names: Iterable[str]) -> Iterator[str]:
    """The ranks and shards that should be among some names, by the numbers of the others."""
    ranks: dict[str, dict[str, set[int]]] = {}
    shards: dict[tuple[str, str, str], set[int]] = {}
    for name in names:
        if m := re.fullmatch(_SHARD, name):
            shards.setdefault((m["head"], m["of"], m["tail"]), set()).add(int(m["number"]))
        elif m := re.fullmatch(_RANK, name):
            ranks.setdefault(m["head"], {}).setdefault(m["tail"], set()).add(int(m["number"]))
    for (head, of, tail), have in shards.items():
        for i in range(1, int(of) + 1):
            if i not in have:
                yield f"no {head}-{i:05d}-of-{of}{tail}"
    for head, groups in ranks.items():
        world = re.search(r"world_size_(\d{1,6})", head)
        n = int(world[1]) if world else max(max(have) for have in groups.values()) + 1
        for tail, have in groups.items():
            for rank in range(n):
                if rank not in have:
                    yield f"no {head}{rank}{tail}"


def newest(path: str | os.PathLike[str]) -> str:
    """The path of the newest complete checkpoint below a folder, from which a job can resume; the folder itself where
    it is a checkpoint.

    Folders are looked into two levels down.

    Raises:
        NotRecognised: there is none, or several runs lie below. UsageError: the path is a file.
    """
    return latest(path)[0]


def latest(path: str | os.PathLike[str]) -> tuple[str, str]:
    """(`newest`, a note on newer ones that hold weights alone, "" where there are none)."""
    where = layouts.place(path)
    if where.file is not None:
        raise UsageError(
            f"{argument('latest', True)} asks for a folder of checkpoints; {os.fspath(path)} is a file. Leave it out."
        )
    with where.source as source:
        itself = _matching(Place(source, None), layouts.layouts().values())
        if itself is not None and itself.name != "hf":
            return os.fspath(path), ""
        found = below(source)
    answer = found.newest
    if len(answer) == 1:
        newer = [c.path for c in found.checkpoints if c.weights_only]
        return answer[0].path, f"newer, but weights only: {', '.join(newer)}" if newer else ""
    if itself is not None:
        return os.fspath(path), ""
    if len(answer) > 1:
        raise NotRecognised(
            f"Several runs lie below {found.path}, so that none of their checkpoints is the newest. Give the folder of "
            "one:",
            listing=str(found),
        )
    if found.checkpoints:
        raise NotRecognised(
            f"No checkpoint below {found.path} is complete and newer than the others. Give the path of one:",
            listing=str(found),
        )
    raise NotRecognised(f"No checkpoint is in {found.path} or in its folders, two levels down.")
