"""Files of ranks: one torch.save file a rank, told apart by what is in them and put together into whole tensors.

    group_rank_files(names)         files that differ in the number behind "rank" or "shard" alone
    read_rank_files(files, groups)  which of them are the model, the optimizer, the rest; none missing, none exchanged
    assemble_tensor(files, ...)     a ShardedTensor or DTensor of which every rank has a part, or a tensor that all have
    assemble_slot(...), merge_other_state(...)  the same for a slot of the optimizer, and for what is neither

Where ranks have the same part (replicas of HYBRID_SHARD, buffers) that of the first is kept, and those that differ from
it are listed (`record_other_copies`); engine/mixups.py judges them. Numbers that all ranks must share (the step) are
compared.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from ckpttool.by_fields import ByFields
from ckpttool.errors import CkpttoolError, Corrupt, Unsupported
from ckpttool.formats import stored_tensors, torch_zip
from ckpttool.formats.common_lists import CommonLists
from ckpttool.formats.crc import crc32
from ckpttool.formats.pickles import Opaque, short
from ckpttool.formats.sharded import Boxes, Shards, is_sharded, make_stand_ins, read_shards
from ckpttool.formats.stored_tensors import StoredTensor
from ckpttool.index import boxes
from ckpttool.index.checkpoint import (
    Checkpoint,
    Chunks,
    Leaves,
    OtherCopy,
    Path,
    TensorEntry,
    joined,
    make_per_rank_path,
    same_value,
)
from ckpttool.index.fqns import EXTRA_STATE
from ckpttool.index.names import COMPONENTS, ROLES
from ckpttool.index.records import Extent, Record
from ckpttool.printable import list_first
from ckpttool.storage.source import ReadAt, Source

__all__ = [
    "SIDE",
    "Column",
    "DifferentCopy",
    "Files",
    "Rank",
    "RankFileGroup",
    "RankParts",
    "are_leaves_equal",
    "assemble_slot",
    "assemble_tensor",
    "collect_rank_values",
    "compare_replicas",
    "compute_crc",
    "describe_lacking_entries",
    "find_differing_file",
    "format_step",
    "group_rank_files",
    "has_model_or_optimizer",
    "load_rank_file",
    "merge_other_state",
    "read_inline",
    "read_rank_files",
    "record_other_copies",
    "refuse_incomplete_tensor",
    "select_first_replica",
]

_RANKED = re.compile(
    r"(?P<head>.*?)(?P<word>(rank|shard))(?P<mark>[_-]?)(?P<rank>\d{1,6})(?P<tail>([._-].*)?\.(pt|pth|bin|ckpt|tar))"
)
_WORLD = re.compile(r"world_size_(\d{1,6})")
#: Groups that are neither model nor optimizer, by their names.
SIDE = re.compile(r"(rng|random|scheduler|dataloader|extra|sampler|scaler)", re.IGNORECASE)
_MODEL_KEYS = ("model", "state_dict", "model_state_dict")
_OPTIM_KEYS = ("optim", "optimizer", "optimizer_state_dict", "last_optimizer_state")
_KNOWN = frozenset(("lr_scheduler", "rng_state", "rng_states", *_MODEL_KEYS, *_OPTIM_KEYS, *COMPONENTS))
_MOST_COMPARED = 64 << 20  # bytes of a file
_COMPARED = 64 << 10  # first bytes of two copies without CRC32s
_COUNTERS = ("step", "global_step", "iteration", "epoch")
_STEPS = ("last_epoch", "_step_count", "num_steps")  # of schedulers


#: What each rank has under one key, in the order of the ranks.
Column = list[Any]


class RankFileGroup(NamedTuple):
    """Files that differ in the number of the rank: `ranks` {rank: file name}."""

    pattern: str
    ranks: dict[int, str]


class DifferentCopy(NamedTuple):
    """A copy in `file` that differs from the kept one, which is a value of this name, or at (file, offset, bytes)
    `kept`."""

    name: str
    file: int
    kept: Extent | None


@dataclass(eq=False, repr=False)
class Files(ByFields):
    """The files read, and what they told on the way."""

    source: Source
    names: list[str] = field(default_factory=list)
    records: dict[tuple[int, int], Record] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    unlike: list[DifferentCopy] = field(default_factory=list)  # copies that differ from the one that is kept
    known: dict[int, tuple[Opaque, Shards]] = field(default_factory=dict)  # by identity
    lists: CommonLists = field(default_factory=CommonLists)
    tables: dict[int, Boxes] = field(default_factory=dict)  # the shards that `known` tensors list, by identity

    def number(self, name: str) -> int:
        """Add a file, given by its path below the source, and return its number in the checkpoint's list of files."""
        self.names.append(name)
        return len(self.names) - 1

    def path(self, file: int) -> str:
        """Return the path of the file with number `file`, for errors."""
        return f"{self.source.root}/{self.names[file]}"

    def reader(self, file: int) -> ReadAt:
        """Return the function that reads bytes of the file with number `file`."""
        return self.source.reader_of(self.names[file])

    def shards(self, file: int, key: object, x: Opaque) -> Shards:
        """Return the shards of a sharded tensor that a file holds; each tensor is parsed only once.

        Args:
            file: the number of the file.
            key: the tensor's key in the file, for errors.
            x: the unpickled ShardedTensor or DTensor.
        """
        if id(x) not in self.known:
            self.known[id(x)] = x, read_shards(x, str(key), self.reader(file), self.path(file), self.tables)
        return self.known[id(x)][1]

    def keep(self, file: int, t: StoredTensor) -> None:
        """Record the CRC32s that a file of torch.save has for the storage of a tensor, to verify later reads of it.

        Args:
            file: the number of the file.
            t: the tensor; nothing is recorded if its storage has no CRC32.
        """
        self.records.update(((file, r.extent.offset), r) for r in t.storage.records(file))

    def entry(self, file: int, t: StoredTensor, path: Path = ()) -> TensorEntry:
        """Return the entry, at `path`, of a tensor that file number `file` holds completely, and record its CRC32."""
        self.keep(file, t)
        strides = None if t.contiguous else t.strides
        return TensorEntry(t.dtype, t.shape, path, Chunks.whole(t.shape, file, *t.extent, strides))

    def leaves(self, file: int, tree: object, path: Path = ()) -> Leaves:
        """Return {path: tensor or data} of a nested value in file number `file`, and record the CRC32s of its tensors.
        `path` is put in front of every path."""
        found, records = stored_tensors.read_leaves(tree, path, file, self.reader(file), self.path(file))
        self.records.update(((file, r.extent.offset), r) for r in records)
        return found


class Rank(NamedTuple):
    """What the file of one rank holds."""

    file: int
    rank: int
    tree: Any


def group_rank_files(names: Iterable[str]) -> list[RankFileGroup]:
    """Group the names of files that differ only in the number of the rank; the ranks of a group ascend.

    Names without such a number are left out, and so are those of DeepSpeed's files.

    Raises:
        Corrupt: one rank has two files.
    """
    found: dict[tuple[str, str], RankFileGroup] = {}
    for name in names:
        m = _RANKED.fullmatch(name)
        if m is None or "mp_rank" in name or "pp_rank" in name:  # DeepSpeed's
            continue
        head, tail = f"{m['head']}{m['word']}", m["tail"]
        group = found.setdefault((head, tail), RankFileGroup(f"{head}{m['mark']}*{tail}", {}))
        rank = int(m["rank"])
        if rank in group.ranks:
            raise Corrupt(
                f'"{group.ranks[rank]}" and "{name}" both belong to rank {rank}. Remove the one that is not of this '
                "save.",
                code="CKPT0411",
            )
        group.ranks[rank] = name
    return [RankFileGroup(g.pattern, dict(sorted(g.ranks.items()))) for g in found.values()]


def load_rank_file(files: Files, name: str) -> object:
    """Unpickle one file, given by its path below the source; sharded tensors stay plain data instead of being built.

    Raises:
        CkpttoolError: the file is damaged, or is not a file of torch.save that can be read safely.
    """
    what = f"{files.source.root}/{name}"
    read_at, size = files.source.reader_of(name), files.source.size(name)
    return torch_zip.read(read_at, 0, size, what, make_stand_ins(what), lists=files.lists)


@dataclass(eq=False, repr=False)
class RankParts(ByFields):
    """What the files of the ranks hold: the model, optimizers (one may be saved twice), and the rest by the pattern of
    the files' names; `world` is the number of ranks that wrote them."""

    world: int
    model: list[Rank] = field(default_factory=list)
    optimizers: list[list[Rank]] = field(default_factory=list)
    rest: dict[str, list[Rank]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class _LoadedGroup(NamedTuple):
    """The files of a group, unpickled: what each rank has in all, of the model, of an optimizer, and of the rest."""

    group: RankFileGroup
    trees: list[Rank]
    model: list[Rank]
    optim: list[Rank]
    rest: list[Rank]


def read_rank_files(
    files: Files, groups: list[RankFileGroup], lost: list[str] | None = None, allow_equal_ranks: bool = False
) -> RankParts:
    """Unpickle files of ranks, and sort their content into model, optimizers and the rest.

    Args:
        files: collects the files that are read.
        groups: the files to read, grouped by name.
        lost: gets the names of missing files, while the files of the other ranks are read; `assemble_tensor` then
            raises for tensors that these do not cover. None: a missing file is an error.
        allow_equal_ranks: accept, with a note, a file that is a copy of another rank's.

    Raises:
        Corrupt: files are exchanged, or ranks are missing and `lost` is None.
        Unsupported: there are two models, or neither a model nor an optimizer.
    """
    files.source.prefetch_ends(name for group in groups for name in group.ranks.values())
    found = [_load_group(files, group) for group in groups]
    model = _find_model_group(files, found)
    with_state = [g.group for g in found if g.model or g.optim]
    out = RankParts(_determine_world_size(files, model.model if model else [], with_state))
    for loaded in found:
        group = loaded.group
        out.notes += _refuse_exchanged_files(files, group, allow_equal_ranks)
        for ranks in (loaded.model, loaded.optim):
            missing = [r for r in range(out.world) if r not in {x.rank for x in ranks}] if ranks else []
            if missing and lost is not None:
                lost.extend(group.pattern.replace("*", str(r)) for r in missing)
            elif missing:
                text = ", ".join(group.pattern.replace("*", str(r)) for r in missing[:4])
                raise Corrupt(
                    f"{files.source.root}: of {out.world} ranks {len(missing)} have no file {group.pattern}, first "
                    f"{text}. The copy is incomplete; fetch the files of all ranks.",
                    code="CKPT0402",
                )
        rest = loaded.rest
        if loaded is model:
            out.model = loaded.model
        elif loaded.model:  # another group of whole tensors is no second model
            optim = {r.rank: r.tree for r in loaded.optim}
            rest = [
                r._replace(tree={k: v for k, v in r.tree.items() if v is not optim.get(r.rank, r)})
                for r in loaded.trees
            ]
        if loaded.optim:
            out.optimizers.append(loaded.optim)
        if rest:
            out.rest[group.pattern] = rest
    return out


def _load_group(files: Files, group: RankFileGroup) -> _LoadedGroup:
    """Unpickle the files of a group, and split each into model, optimizer and the rest.

    A file whose name is that of other state, such as random states or a scheduler, is all rest. Content without keys
    that name it is put below a key from the file's name, such as {"rng": ...}.

    Args:
        files: collects the files that are read.
        group: the files, one for each rank.
    """
    trees: list[Rank] = []
    by: dict[str, list[Rank]] = {"model": [], "optim": [], "rest": []}
    side = SIDE.match(group.pattern)
    for rank, name in group.ranks.items():
        tree, number = load_rank_file(files, name), files.number(name)
        if not isinstance(tree, dict) or not all(isinstance(k, str) for k in tree):
            tree = {side[1].lower() if side else group.pattern.partition("rank")[0].strip("_-.") or "rank": tree}
        elif side and side[1].lower() != "extra" and not tree.keys() & _KNOWN:
            tree = {side[1].lower(): tree}  # rng_rank0.pt is {"cpu": ..., "cuda": ...}
        trees.append(Rank(number, rank, tree))
        for role, part in _split_roles(tree).items() if not side else [("rest", tree)]:
            by[role].append(Rank(number, rank, part))
    return _LoadedGroup(group, trees, by["model"], by["optim"], by["rest"])


def _find_model_group(files: Files, found: list[_LoadedGroup]) -> _LoadedGroup | None:
    """Return the group that holds the model: the only one with flat or sharded tensors, else the only one with weights.

    It is None if no group has weights.

    Raises:
        Unsupported: there are two such groups.
    """
    models = [g for g in found if g.model]
    models = [g for g in models if any(_is_flat_or_sharded(r.tree) for r in g.model)] or models
    if len(models) > 1:
        stated = " and ".join(g.group.pattern for g in models)
        raise Unsupported(
            f"{files.source.root} holds more than one model: {stated}. Move one of them to a folder of its own.",
            code="CKPT0328",
        )
    return models[0] if models else None


def find_differing_file(facts: Iterable[Mapping[str, object]]) -> tuple[int, str] | None:
    """Find the first file whose facts differ from those of the first file.

    Args:
        facts: {fact: value} of each file; at least one file.

    Returns:
        (position of that file, counted from 0; the fact that differs); None if all files agree.
    """
    every = iter(facts)
    first = next(every)
    for position, here in enumerate(every, 1):
        for what, fact in first.items():
            if not same_value(here.get(what), fact):
                return position, what
    return None


def _refuse_exchanged_files(files: Files, group: RankFileGroup, allow_equal_ranks: bool) -> list[str]:
    """Raise if files of a group have the names of other ranks' files.

    torch.save writes a file's name into it. If the ranks in those names are the ranks of the group in another order,
    files were exchanged. If only some are, or two files are equal byte by byte, one was copied over another. Otherwise
    the job saved under other names, and nothing follows.

    Returns:
        Notes for the user on a copied file that `allow_equal_ranks` accepts; empty if there is none.

    Raises:
        Corrupt: with the first file that has another rank's name.
    """
    stated: dict[int, int] = {}
    for rank, name in group.ranks.items():
        first = torch_zip.read_name_at_save(files.source.reader_of(name), files.source.size(name))
        found = group_rank_files([f"{first}.pt"]) if first is not None else []
        if not found:
            return []
        stated[rank] = next(iter(found[0].ranks))
    wrong = next((r for r, s in stated.items() if r != s), None)
    if wrong is not None and sorted(stated.values()) == sorted(stated):
        raise Corrupt(
            f"{files.source.root}/{group.ranks[wrong]} was saved as the file of rank {stated[wrong]}, and that of rank "
            f"{wrong} lies under another name. Files of ranks were exchanged or renamed; put them back.",
            code="CKPT0410",
        )
    if wrong is None or stated[wrong] not in group.ranks:
        return []
    one, two = group.ranks[stated[wrong]], group.ranks[wrong]
    size = files.source.size(one)
    small = size == files.source.size(two) and size <= _MOST_COMPARED  # larger ones by their CRC32s, engine/mixups.py
    if len(set(stated.values())) == 1 and not (
        small and files.source.read(one, 0, size) == files.source.read(two, 0, size)
    ):
        return []
    return torch_zip.refuse_copied_file(
        f"{files.source.root}/{two} was saved as the file of rank {stated[wrong]}: {one} was copied over it",
        allow_equal_ranks,
    )


def _split_roles(tree: dict[Any, Any]) -> dict[str, object]:
    """Return {role: part} of what a rank's file holds, with the roles "model", "optim" and "rest".

    A role of which the file holds nothing is left out.

    Args:
        tree: the unpickled dict: a state dict of a model or an optimizer, or a dict with these under usual keys.
    """
    if "state" in tree and "param_groups" in tree:
        return {"optim": tree}
    whole = {k: v for k, v in tree.items() if k in (*_MODEL_KEYS, *_OPTIM_KEYS) and isinstance(v, dict)}
    models, optims = [k for k in _MODEL_KEYS if k in whole], [k for k in _OPTIM_KEYS if k in whole]
    if models or optims:
        out = {"model": tree[models[0]]} if models else {}
        if models and "shard_metadata" in tree:
            out["model"] = {**out["model"], "shard_metadata": tree["shard_metadata"]}
        if optims:
            out["optim"] = tree[optims[0]]
        rest = {k: v for k, v in tree.items() if k not in (*models[:1], *optims[:1], "shard_metadata")}
        return {**out, "rest": rest} if rest else out
    if any(is_sharded(v) or (isinstance(v, StoredTensor) and "float" in v.dtype) for v in tree.values()):
        return {"model": tree}  # random states are bytes
    return {"rest": tree}


def has_model_or_optimizer(source: Source, groups: list[RankFileGroup]) -> bool:
    """Return whether the ranks' files hold a model or an optimizer, since any program may write a rank_0.pt.

    Only the file of the lowest rank of each group is read. A file that cannot be read counts as holding one, so that
    reading the checkpoint reports the error.
    """
    for group in groups:
        files, name = Files(source), next(iter(group.ranks.values()))
        try:
            tree = load_rank_file(files, name)
        except CkpttoolError:
            return True  # what is wrong with it is not for detection to say
        if isinstance(tree, dict) and {"model", "optim"} & _split_roles(tree).keys():
            return True
    return False


def _is_flat_or_sharded(tree: dict[object, object]) -> bool:
    """Return whether the model in a rank's file consists of flat parameters (FairScale's) or sharded tensors."""
    return any(is_sharded(v) for v in tree.values()) or "shard_metadata" in tree


def _determine_world_size(files: Files, model: list[Rank], groups: list[RankFileGroup]) -> int:
    """Return the number of ranks that wrote the checkpoint, from file names and sharded tensors; without such facts,
    the highest rank plus one.

    Args:
        files: the files read.
        model: each rank's part of the model; empty if there is no model.
        groups: the groups of files that hold a model or an optimizer.

    Raises:
        Corrupt: files are exchanged, or of jobs of different size.
        Unsupported: `groups` is empty.
    """
    stated: dict[int, str] = {}
    for group in groups:
        m = _WORLD.search(group.pattern)
        if m:
            stated.setdefault(int(m[1]), f"the name {group.pattern}")
    for r in model:
        for key, x in r.tree.items():
            if not is_sharded(x):
                continue
            s = _get_rank_shards(files, r, key, x)
            if s.world is not None:
                stated.setdefault(s.world, f'"{key}" in {files.names[r.file]}')
            break
    if not groups:
        raise Unsupported(
            f"{files.source.root}: the files of ranks hold neither a model nor an optimizer.", code="CKPT0317"
        )
    if len(stated) > 1:
        text = ", ".join(f"{n} ({why})" for n, why in stated.items())
        raise Corrupt(
            f"{files.source.root}: the files are of jobs of different numbers of ranks: {text}.", code="CKPT0409"
        )
    world = next(iter(stated), max(max(g.ranks) for g in groups) + 1)
    over = [g.ranks[max(g.ranks)] for g in groups if max(g.ranks) >= world]
    if over:
        raise Corrupt(
            f"{files.source.root}: {over[0]} is of no rank of a job of {world}. It is from another save.",
            code="CKPT0409",
        )
    return world


def _get_rank_shards(files: Files, r: Rank, key: object, x: Opaque) -> Shards:
    """Return the shards of the sharded tensor `x` in the file of rank `r`; `key` is the tensor's key there.

    Raises:
        Corrupt: another rank wrote the tensor.
    """
    out = files.shards(r.file, key, x)
    if out.rank not in (None, r.rank):
        raise Corrupt(
            f'{files.path(r.file)}: "{key}" was written by rank {out.rank}, the file is named after rank '
            f"{r.rank}. Files of ranks were exchanged or renamed; put them back.",
            code="CKPT0410",
        )
    return out


def collect_rank_values(files: Files, ranks: list[Rank], key: object) -> Column:
    """Return each rank's value under a key, in the order of `ranks`.

    Raises:
        Corrupt: a rank does not have the key.
    """
    missing = [r for r in ranks if key not in r.tree]
    if missing:
        raise Corrupt(
            f'{files.path(missing[0].file)} has no "{key}", which {files.names[ranks[0].file]} and others have. The '
            "files are from different saves; fetch the files of one save.",
            code="CKPT0409",
        )
    return [r.tree[key] for r in ranks]


def assemble_tensor(files: Files, ranks: list[Rank], name: str, column: Column) -> TensorEntry | Any:
    """Assemble one tensor from the ranks' shards. If no rank has it sharded, the first rank's value is returned, which
    may be a plain value.

    Args:
        files: the files read; copies that differ are added to it.
        ranks: the ranks' files.
        name: the name of the tensor, also its path.
        column: each rank's value, in the order of `ranks`.

    Raises:
        Corrupt: the ranks contradict one another, or their shards do not cover the tensor.
    """
    if not any(is_sharded(x) for x in column):
        return select_first_replica(files, ranks, name, column)
    first: Rank | None = None
    shape: tuple[int, ...] = ()
    listed: Boxes | None = None
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, StoredTensor]] = {}
    dtype = ""
    for r, x in zip(ranks, column, strict=True):
        if not is_sharded(x):
            raise Corrupt(
                f'{files.path(r.file)}: "{name}" is whole here and sharded in {files.names[ranks[0].file]}.',
                code="CKPT0409",
            )
        s = _get_rank_shards(files, r, name, x)
        if first is None:
            first, shape, dtype, listed = r, s.shape, s.dtype, s.listed
        elif (s.shape, s.dtype) != (shape, dtype):
            raise Corrupt(
                f'{files.path(r.file)}: "{name}" is {s.dtype} {s.shape}, in {files.names[first.file]} it is {dtype} '
                f"{shape}. The files are from different saves; fetch the files of one save.",
                code="CKPT0409",
            )
        if s.listed is not listed and s.listed != listed:
            raise Corrupt(
                f'{files.path(r.file)}: the shards of "{name}" are listed otherwise in '
                f"{files.names[first.file]}. The files are from different saves, or one was changed; fetch the files "
                "of one save.",
                code="CKPT0409",
            )
        for start, tensor in s.pieces:
            old = found.setdefault((start, tensor.shape), (r.file, tensor))
            if old[0] != r.file:
                compare_replicas(files, name, old, (r.file, tensor))
    chunks = Chunks(len(shape))
    for (start, size), (file, tensor) in sorted(found.items()):
        files.keep(file, tensor)
        chunks.add(start, size, file, *tensor.extent, None if tensor.contiguous else tensor.strides)
    refuse_incomplete_tensor(files.source, name, shape, chunks)
    return TensorEntry(dtype, shape, (name,), chunks)


def refuse_incomplete_tensor(source: Source, name: str, shape: tuple[int, ...], chunks: Chunks) -> None:
    """Raise Corrupt if the parts that ranks have of a tensor leave gaps or overlap."""
    if (why := boxes.find_cover_problem(shape, chunks.boxes())) is not None:
        raise Corrupt(
            f'{source.root}: "{name}" {shape}: {why}. Files of ranks are missing or from other saves.', code="CKPT0408"
        )


def compare_replicas(files: Files, name: str, a: tuple[int, StoredTensor], b: tuple[int, StoredTensor]) -> None:
    """Compare two copies of a tensor, and add `b` to `files.unlike` if it differs from `a`. CRC32s are compared, or the
    first 64 KiB if there is no CRC32 of exactly these bytes.

    Args:
        files: the files read.
        name: name of the tensor.
        a: (number of the file, tensor) of the kept copy.
        b: the same of the other copy.

    Raises:
        Corrupt: they are different steps of a parameter.
    """
    one, two = a[1].storage.crc32, b[1].storage.crc32
    if one is not None and two is not None and all(t.storage.length == t.span for t in (a[1], b[1])):
        equal = one == two
    else:
        first, second = (files.reader(file)(t.extent[0], min(t.span, _COMPARED)) for file, t in (a, b))
        equal = first == second
    if equal:
        return
    if name.endswith(".step") and a[1].numel == b[1].numel == 1:
        raise Corrupt(
            f'{files.path(b[0])}: "{name}" is {format_step(read_inline(files, *b))}, in {files.names[a[0]]} it is '
            f"{format_step(read_inline(files, *a))}. The files are of different steps; fetch the files of one save.",
            code="CKPT0409",
        )
    files.unlike.append(DifferentCopy(name, b[0], Extent(a[0], *a[1].extent)))


def select_first_replica(files: Files, ranks: list[Rank], name: str, column: Column) -> TensorEntry | Any:
    """Return the first rank's copy of a tensor or plain value that every rank has completely. The other copies are
    compared, and those that differ are added to `files.unlike`.

    Args:
        files: the files read.
        ranks: the ranks' files.
        name: the name of the tensor or value.
        column: each rank's copy, in the order of `ranks`.

    Raises:
        Corrupt: a rank has another kind, dtype or shape.
    """
    first = column[0]
    if not isinstance(first, StoredTensor):
        kept, *others = (
            stored_tensors.inline_tensors(x, files.reader(r.file), name) for r, x in zip(ranks, column, strict=True)
        )
        unlike = (r for r, x in zip(ranks[1:], others, strict=True) if not same_value(x, kept))
        files.unlike += [DifferentCopy(name, r.file, None) for r in unlike]
        return kept
    for r, x in zip(ranks[1:], column[1:], strict=True):
        if not isinstance(x, StoredTensor) or (x.dtype, x.shape) != (first.dtype, first.shape):
            kind = f"{x.dtype} {x.shape}" if isinstance(x, StoredTensor) else short(x)
            raise Corrupt(
                f'{files.path(r.file)}: "{name}" is {kind}, in {files.names[ranks[0].file]} it is {first.dtype} '
                f"{first.shape}. The files are from different saves; fetch the files of one save.",
                code="CKPT0409",
            )
        compare_replicas(files, name, (ranks[0].file, first), (r.file, x))
    return files.entry(ranks[0].file, first)


def record_other_copies(unlike: Sequence[DifferentCopy], ckpt: Checkpoint) -> None:
    """Set `ckpt.others` to the copies that differ from the kept ones.

    Args:
        unlike: the copies; a copy of an entry that is not in the index is left out.
        ckpt: the index, from which the copies get their names.
    """
    places: dict[int, list[tuple[int, str]]] = {}
    for name, t in ckpt.tensors.items() if unlike else ():
        for file, offset in zip(t.chunks.file, t.chunks.offset, strict=True):
            places.setdefault(file, []).append((offset, name))
    for rows in places.values():
        rows.sort()
    found: dict[OtherCopy, None] = {}
    for name, file, kept in unlike:
        rank = ckpt.ranks[file]
        if kept is None:
            values = [n for head in ("model", "optim.state") if (n := f"{head}.{name}") in ckpt.values]
            if not values and name.rpartition(".")[2] == EXTRA_STATE:  # a dict, whose leaves have names of their own
                values = [f"model.{name}"]
            found.update((OtherCopy(n, rank, 0), None) for n in values)
            continue
        rows = places.get(kept.file, [])
        first, last = (bisect_left(rows, (at, "")) for at in (kept.offset, kept.offset + max(1, kept.length)))
        for _, n in rows[first:last]:
            found[OtherCopy(n, rank, ckpt.tensors[n].nbytes if len(ckpt.tensors[n].chunks) == 1 else 0)] = None
    ckpt.others = list(found)


def assemble_slot(files: Files, ranks: list[Rank], name: str, column: Column) -> object:
    """Assemble one slot of an optimizer: a tensor in the shape of its parameter, or one value for the parameter
    (`step`).

    Args:
        files: the files read; copies that differ are added to it.
        ranks: the ranks' files.
        name: the name of the slot.
        column: each rank's value, in the order of `ranks`; None for a rank without one.

    Returns:
        The tensor's entry, or the value; None if no rank has one.

    Raises:
        Corrupt: a rank has another step, or lacks its part.
    """
    if any(is_sharded(x) for x in column):
        for r, x in zip(ranks, column, strict=True):
            if x is None:
                raise Corrupt(
                    f'{files.path(r.file)} has no "{name}", which other ranks have. Fetch the files of one save.',
                    code="CKPT0409",
                )
        return assemble_tensor(files, ranks, name, column)
    there = [(r, x) for r, x in zip(ranks, column, strict=True) if x is not None]
    if not there:  # an optimizer may keep None, as SOAP does before it has preconditioners
        return None
    first = there[0][1]
    if isinstance(first, StoredTensor) and prod(first.shape) > 1:
        return select_first_replica(files, [r for r, _ in there], name, [x for _, x in there])
    stated = [read_inline(files, r.file, x) for r, x in there]
    for (r, _), value in zip(there, stated, strict=True):
        if not same_value(value, stated[0]):
            raise Corrupt(
                f'{files.path(r.file)}: "{name}" is {format_step(value)}, in {files.names[there[0][0].file]} it is '
                f"{format_step(stated[0])}. The files are from different steps; fetch the files of one save.",
                code="CKPT0409",
            )
    return files.entry(there[0][0].file, first) if isinstance(first, StoredTensor) else first


def read_inline(files: Files, file: int, x: object) -> object:
    """Return `x` with its bytes in memory if it is a tensor in file number `file`; any other value is returned
    unchanged."""
    return stored_tensors.inline_tensors(x, files.reader(file), files.path(file)) if isinstance(x, StoredTensor) else x


def format_step(x: object) -> str:
    """Return a step, a number or a tensor that was read, as text for an error; in hexadecimal if its dtype is not
    numeric."""
    if isinstance(x, stored_tensors.Inline):
        n = stored_tensors.decode_number(x.dtype, x.data)
        return x.data.hex() if n is None else f"{n:g}"
    return short(x)


def merge_other_state(files: Files, groups: dict[str, list[Rank]], taken: Mapping[Path, object]) -> Leaves:
    """Merge what ranks saved besides model and optimizer, such as scheduler, counters and random states.

    What is equal on all ranks is kept once. Anything else is kept for each rank, with the rank in its path; but of a
    scheduler or a gradient scaler the first rank's is the one that counts (`_merge_shared_state`). Random states in the
    files extra_state_world_size_{n}_rank_{r}.pt of verl and SkyRL are kept for each rank even if they are equal.

    Args:
        files: the files read.
        groups: {pattern of the file names: what each rank has besides model and optimizer}.
        taken: the leaves read before, by path; an entry with the same first key as one of them goes below
            extra.<pattern>.

    Returns:
        {path: leaf}.

    Raises:
        Corrupt: the ranks are at different steps.
    """
    out: Leaves = {}
    there = {p[0] for p in taken}
    for pattern, ranks in groups.items():
        # an empty file has () alone
        found = [{p: x for p, x in files.leaves(r.file, r.tree).items() if p} for r in ranks]
        tops = dict.fromkeys(p[0] for leaves in found for p in leaves)
        for top in tops:
            parts = [{p: x for p, x in leaves.items() if p[0] == top} for leaves in found]
            head: Path = ("extra", pattern, top) if top in there or any(p[0] == top for p in out) else (top,)
            of_rank = pattern.startswith("extra_state_world_size_") and top == "rng"
            if not of_rank and all(are_leaves_equal(files, parts[0], p) for p in parts[1:]):
                out.update({(*head, *p[1:]): x for p, x in parts[0].items()})
                continue
            if ROLES.get(str(top)) in ("scheduler", "scaler"):
                having = [x for x in zip(ranks, parts, strict=True) if x[1]]
                if len(having) < len(ranks):
                    files.notes.append(describe_lacking_entries([joined(head)]))
                out.update(_merge_shared_state(files, having, head))
                continue
            if top in _COUNTERS:
                k = next(i for i, p in enumerate(parts) if not are_leaves_equal(files, parts[0], p))
                raise Corrupt(
                    f'{files.path(ranks[k].file)}: "{top}" is {_describe_first_leaf(parts[k])}, in '
                    f"{files.names[ranks[0].file]} it is "
                    f"{_describe_first_leaf(parts[0])}. The files are from different steps; fetch the files of one "
                    "save.",
                    code="CKPT0409",
                )
            for r, part in zip(ranks, parts, strict=True):
                out.update({(*head, str(r.rank), *p[1:]): x for p, x in part.items()})
    return out


def _merge_shared_state(files: Files, found: Sequence[tuple[Rank, Leaves]], head: Path) -> Leaves:
    """Merge a scheduler or gradient scaler that all ranks of a job share, but of which they saved different states.

    The first rank's state is kept at `head`, and those that differ from it below extra.per_rank.<rank>, since a number
    in the path of a scheduler would make it one of several.

    Args:
        files: the files read; gets a note for the user.
        found: (rank, {path: leaf}) of the ranks that have one, at least one.
        head: the path of the result, in place of the first key of each leaf's path.

    Returns:
        {path: leaf}.

    Raises:
        Corrupt: the schedulers are at different steps.
    """
    (first, kept), *others = found
    out: Leaves = {(*head, *p[1:]): x for p, x in kept.items()}
    differing = [(r, leaves) for r, leaves in others if not are_leaves_equal(files, kept, leaves)]
    for r, leaves in differing:
        for path, x in leaves.items():
            if path[-1] in _STEPS and path in kept and not are_leaves_equal(files, {path: kept[path]}, {path: x}):
                raise Corrupt(
                    f'{files.path(r.file)}: "{joined(path)}" is {short(x)}, in {files.names[first.file]} it is '
                    f"{short(kept[path])}. The files are from different steps; fetch the files of one save.",
                    code="CKPT0409",
                )
        out.update({make_per_rank_path(r.rank, p): x for p, x in leaves.items()})
    if differing:
        files.notes.append(
            f"ranks differ in {joined(head)}: rank {first.rank}'s is kept under its name, the others' as "
            "extra.per_rank.<rank>"
        )
    return out


def describe_lacking_entries(names: Iterable[str]) -> str:
    """Return the note on entries that some ranks saved and others did not."""
    return f"not every rank saved {list_first(sorted(names), 8)}; what is written for several ranks has it for all"


def _describe_first_leaf(leaves: Leaves) -> str:
    """Return the first leaf as short text for an error; "None" if there is no leaf."""
    return short(next(iter(leaves.values()), None))


def are_leaves_equal(files: Files, a: Leaves, b: Leaves) -> bool:
    """Return whether two ranks have equal {path: leaf}. Tensors are compared by their CRC32, or by their first 64 MiB
    without one."""
    if a.keys() != b.keys():
        return False
    for path, x in a.items():
        y = b[path]
        if isinstance(x, TensorEntry) and isinstance(y, TensorEntry):
            if (x.dtype, x.shape) != (y.dtype, y.shape) or compute_crc(files, x) != compute_crc(files, y):
                return False
        elif isinstance(x, TensorEntry) or isinstance(y, TensorEntry) or not same_value(x, y):
            return False
    return True


def compute_crc(files: Files, t: TensorEntry) -> int:
    """Return the CRC32 of a tensor that one file has whole: the stored one, else that of its first 64 MiB."""
    e = t.chunks[0].extent
    record = files.records.get((e.file, e.offset))
    if record is not None and record.extent.length == e.length:
        return record.crc32
    return crc32(files.reader(e.file)(e.offset, min(e.length, 64 << 20)))
