"""`AnyLayoutReader`: torch's StorageReader for a checkpoint in any layout.

Imports torch when it is loaded, so it is imported only inside functions. The whole protocol of a load is here: metadata
with one chunk per tensor, plans checked before a byte is written, digests shared out among ranks.
"""

from __future__ import annotations

import heapq
import io
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ..engine.copy.fill import Progress
from ..engine.opening import OpenCheckpoint
from ..errors import Unsupported
from ..index.checkpoint import TensorEntry, Value
from .name_lookup import NameLookup
from .plain_values import to_torch_dtype
from .reader import LiveReader, ReadRequest

__all__ = ["AnyLayoutReader"]


class _Share(NamedTuple):
    """The tensors whose recorded digests one rank compares."""

    names: Sequence[str]


class EntriesByAnyName(dict[str, TensorStorageMetadata | BytesStorageMetadata]):
    """Entries by canonical name; other names are looked up as `NameLookup` understands them."""

    def __init__(self, names: NameLookup) -> None:
        """Make an empty dict.

        Args:
            names: finds the canonical name for a name that a job uses.
        """
        super().__init__()
        self.names = names

    def __contains__(self, asked: object) -> bool:
        """Tell whether the checkpoint has an entry for a name, which may be any that a job uses for it.

        Raises:
            Unsupported: the name fits several entries.
        """
        return super().__contains__(asked) or (isinstance(asked, str) and self.names.find(asked) is not None)

    def __missing__(self, asked: str) -> object:
        """Return the entry for a name that is no key of the dict but that a job may use for one.

        Raises:
            KeyError: the checkpoint has no such entry.
            Unsupported: the name fits several entries.
        """
        found = self.names.find(asked)
        if found is None:
            raise KeyError(asked)
        return self[found]

    def get(self, asked: str, default: object = None) -> Any:
        """Return the entry for any name that a job may use for it; `default` if there is none.

        Raises:
            Unsupported: the name fits several entries.
        """
        try:
            return self[asked]
        except KeyError:
            return default


class AnyLayoutReader(StorageReader):
    """Reads a checkpoint that is not DCP, or is, for torch.distributed.checkpoint.load."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        opened: OpenCheckpoint,
        progress: Progress | None,
        open_other: Callable[[str | os.PathLike[str]], OpenCheckpoint] | None = None,
    ) -> None:
        """Make a reader of an open checkpoint.

        Args:
            path: path or URL of the checkpoint.
            opened: the open checkpoint.
            progress: called with ("load", bytes read, bytes in all) of this rank; None for nobody.
            open_other: opens another checkpoint if torch passes another path to `reset`; None to ignore that path.
        """
        super().__init__()
        self._open_other, self._progress = open_other, progress
        self._open = LiveReader(path, opened, progress)

    @property
    def checkpoint_id(self) -> str:
        """Return the path or URL of the checkpoint."""
        return self._open.path

    @property
    def bytes_read(self) -> int:
        """Return how many bytes of tensors this rank has read so far."""
        return self._open.bytes_read

    @property
    def bytes_checked(self) -> int:
        """Return how many bytes this rank has read once more to compare digests."""
        return self._open.bytes_checked

    @property
    def opened(self) -> LiveReader:
        """Return the reader of the open checkpoint."""
        return self._open

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None, *args: object, **kwargs: object) -> None:
        """Open another checkpoint if torch passes another path; torch calls this at the beginning of a load.

        Args:
            checkpoint_id: the path that torch passes; None, or the path that is open, changes nothing.
            args, kwargs: whatever else a version of torch passes; not used.
        """
        if self._open_other is not None and checkpoint_id is not None and os.fspath(checkpoint_id) != self._open.path:
            self._open.source.close()
            self._open = LiveReader(checkpoint_id, self._open_other(checkpoint_id), self._progress)

    # No parameter is called kwargs: torch would take an error here for a missing .metadata and ask again.
    def read_metadata(self, *_: object, **__: object) -> Metadata:
        """Return torch's Metadata, in which every tensor is one chunk and every value is bytes. Its entries are
        found by any name that a job may use."""
        ckpt = self._open.ckpt
        entries = EntriesByAnyName(self._open.names)
        paths: dict[str, object] = {}
        for name, value in {**self._open.pieces, **ckpt.values}.items():
            dict.__setitem__(entries, name, BytesStorageMetadata())
            paths[name] = value.path
        described: dict[
            object, TensorStorageMetadata
        ] = {}  # one for all of a kind: a hundred thousand objects are a second for the collector
        for name, t in ckpt.tensors.items():
            kind = (t.dtype, t.shape)
            if self._open.is_scalar_state(t):  # a job that has a plain number there is right too
                found: Any = BytesStorageMetadata()
            elif (found := described.get(kind)) is None:
                size = torch.Size(t.shape)
                found = described[kind] = TensorStorageMetadata(
                    TensorProperties(dtype=to_torch_dtype(t.dtype)),
                    size,
                    [ChunkStorageMetadata(torch.Size([0] * len(size)), size)],
                )
            dict.__setitem__(entries, name, found)
            paths[name] = t.path
        return Metadata(state_dict_metadata=entries, planner_data=paths)

    def set_up_storage_reader(self, metadata: object, is_coordinator: bool, *args: object, **kwargs: object) -> None:
        """Check all items, and that files of ranks belong together, on the coordinator, unless that was done before. If
        this fails, dcp.load fails on all ranks.

        Args:
            metadata: torch's metadata, which is not used.
            is_coordinator: whether this rank plans for all ranks.

        Raises:
            Corrupt: an item is damaged, or files of ranks do not belong together.
        """
        if is_coordinator:
            self._open.locate()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Check all that this rank's plan asks for, and return the plan itself.

        Raises:
            Unsupported: a name or a value cannot be given to the job.
            SourceChanged, Corrupt: a file is another one, or damaged.
        """
        self._check_items(plan.items)
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans of all ranks, each with the names of the tensors whose digests the rank compares; called on
        the coordinator."""
        shares = self._share_digests([plan.items for plan in plans])
        return [replace(plan, storage_data=_Share(names)) for plan, names in zip(plans, shares, strict=True)]

    def _share_digests(self, items: Sequence[Sequence[ReadItem]]) -> list[list[str]]:
        """Divide the tensors with a recorded digest among the ranks, and return a list of canonical names for each
        rank. A tensor goes to a rank that reads it completely; all other ones are divided so that ranks read about
        equally many bytes.

        Args:
            items: what each rank reads, in the order of ranks.
        """
        shares: list[list[str]] = [[] for _ in items]
        if not self._open.ckpt.recorded:
            return shares
        whole: dict[str, list[int]] = {}  # ranks that read all of it
        for rank, mine in enumerate(items):
            for item in mine:
                name, entry = self._open.entry(item.storage_index.fqn)
                if name in self._open.ckpt.recorded and isinstance(entry, TensorEntry):
                    ranks = whole.setdefault(name, [])
                    if item.type == LoadItemType.BYTE_IO or tuple(item.lengths) == entry.shape:
                        ranks.append(rank)
        tensors = self._open.ckpt.tensors
        load = [(0, rank) for rank in range(len(items))]
        for k, name in enumerate(sorted(whole, key=lambda n: -tensors[n].nbytes)):
            if whole[name]:
                shares[whole[name][k % len(whole[name])]].append(name)
            else:
                nbytes, rank = heapq.heappop(load)
                shares[rank].append(name)
                heapq.heappush(load, (nbytes + tensors[name].nbytes, rank))
        return shares

    def _check_items(self, items: Sequence[ReadItem]) -> None:
        """Check as much of a plan's items as is possible before a byte is written.

        Raises:
            Unsupported: a name or a value cannot be given to the job.
            SourceChanged, Corrupt: a file has changed, is missing or damaged.
        """
        self._open.names.check_consistent({item.storage_index.fqn for item in items})
        boxed: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
        for item in items:
            name, entry = self._open.entry(item.storage_index.fqn)
            if isinstance(entry, Value):
                self._open.value(name)
            elif item.type == LoadItemType.BYTE_IO:
                boxed.append((name, (), ()))
            else:
                boxed.append((name, tuple(item.storage_offsets), tuple(item.lengths)))
        self._open.prepare(boxed)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan asks for into the planner's tensors, compare this rank's share of the digests, and return
        a finished future.

        Raises:
            Unsupported: a name or a value cannot be given to the job.
            Corrupt, SourceChanged: bytes are damaged, missing or have another digest, or a file was written to during
                the read.
        """
        try:
            self._check_items(plan.items)
            share = plan.storage_data
            if not isinstance(share, _Share):  # a custom planner made a new plan: this rank compares all that it reads
                share = _Share(self._share_digests([plan.items])[0])
            self._read_items(plan.items, planner, share)
            self._open.check_recorded(share.names)
        finally:
            self._open.source.close_files()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_items(self, items: Sequence[ReadItem], planner: LoadPlanner, share: _Share) -> None:
        """Read the items of a plan into the planner's tensors, and give the planner the values.

        Args:
            items: items of the plan.
            planner: torch's planner, which has the target of each item.
            share: the tensors whose digests this rank compares.

        Raises:
            Unsupported: a target has another shape than what is read.
            Corrupt, SourceChanged: bytes are damaged, missing or changed during the read.
        """
        live = getattr(planner, "state_dict", None)
        live = live if isinstance(live, dict) else {}
        wanted: list[ReadRequest] = []
        commit: list[tuple[ReadItem, Tensor]] = []
        later: list[tuple[ReadItem, Tensor, object]] = []
        for item in items:
            name, entry = self._open.entry(item.storage_index.fqn)
            if item.type != LoadItemType.BYTE_IO:
                target = planner.resolve_tensor(item).detach()
                wanted.append(ReadRequest(name, tuple(item.storage_offsets), tuple(item.lengths), target))
                if tuple(target.shape) != tuple(item.lengths):
                    raise Unsupported(
                        f'"{item.dest_index.fqn}" has a place of shape {tuple(target.shape)} for a part of shape '
                        f"{tuple(item.lengths)}."
                    )
                commit.append((item, target))
                continue
            held = live.get(item.dest_index.fqn)
            if not self._open.is_scalar_state(entry):
                planner.load_bytes(item, _pickle_for_planner(self._open.value(name)))
            elif isinstance(held, torch.Tensor):
                if held.ndim:
                    raise Unsupported(
                        f'"{name}" is a number, but the job has a tensor of shape {tuple(held.shape)} there.',
                        code="CKPT0338",
                    )
                none = torch.Size([])
                whole = ReadItem(
                    LoadItemType.TENSOR,
                    MetadataIndex(item.dest_index.fqn, none),
                    none,
                    MetadataIndex(item.storage_index.fqn, none),
                    none,
                    none,
                )
                target = planner.resolve_tensor(whole).detach()
                commit.append((whole, target))
                if isinstance(entry, Value):
                    _fill_with_number(target, entry.data, name)
                else:
                    wanted.append(ReadRequest(name, (), (), target))
            elif isinstance(entry, Value) and type(held) in (bool, int, float):
                later.append((item, entry.data, held))  # float32 would round it
            else:
                number = torch.empty((), dtype=to_torch_dtype(getattr(entry, "dtype", "float32")))
                if isinstance(entry, TensorEntry):
                    wanted.append(ReadRequest(name, (), (), number))
                else:
                    _fill_with_number(number, entry.data, name)
                later.append((item, number, held))
        self._open.fill(wanted, share.names)
        for item, target in commit:
            planner.commit_tensor(item, target)
        for item, number, held in later:
            planner.load_bytes(item, _pickle_for_planner(_as_held_type(number, held)))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Tell whether torch may give this path to a reader of this class: whether something is there."""
        return os.path.exists(checkpoint_id)

    def __del__(self) -> None:
        """Close the open files of the checkpoint, since torch does not tell a reader when it is no longer needed."""
        opened = self.__dict__.get("_open")
        if opened is not None:
            opened.source.close_files()


def _pickle_for_planner(x: object) -> io.BytesIO:
    """Return plain data as a file of torch.save, which torch's planner unpickles."""
    import torch

    out = io.BytesIO()
    torch.save(x, out)
    out.seek(0)
    return out


def _fill_with_number(target: Tensor, number: int | float, name: str) -> None:
    """Set a 0-dim tensor to a number of an optimizer's state. A fraction is rounded as torch rounds it.

    Args:
        target: the tensor, of any dtype.
        number: the number.
        name: its name in the checkpoint, for the error.

    Raises:
        Unsupported: the dtype has no such whole number, or the tensor is of integers and the number is none.
    """
    try:
        target.fill_(float(number) if target.is_floating_point() else number)
        held = target.item()
    except (RuntimeError, OverflowError):  # torch does not convert NaN to an integer, nor numbers above its range
        fits = False
    else:
        may_round = type(number) is float and target.is_floating_point()
        fits = held == number or (may_round and math.isfinite(held) == math.isfinite(number))
    if not fits:
        raise Unsupported(
            f'"{name}" is {number}, and the job has a tensor of {target.dtype} there, which cannot hold it.',
            code="CKPT0338",
        )


def _as_held_type(number: Any, held: Any) -> object:
    """Convert a number of an optimizer's state to the Python type that the job has it in (bool, int or float).

    A number that this type does not have is returned as a plain number of its own type instead. If the job has an
    object of any other type, such as a tensor, `number` itself is returned.

    Args:
        number: the checkpoint's number, plain or a 0-dim tensor.
        held: the job's object in that place, of which only the type matters.
    """
    if type(held) not in (bool, int, float):
        return number
    x = number.item() if isinstance(number, torch.Tensor) else number
    return type(held)(x) if math.isfinite(x) and x == type(held)(x) else x
