"""Where a job has got to in its data, for another number of ranks that read data.

torchdata's StatefulDataLoader keeps what it has read as a number of samples, and its StatefulDistributedSampler deals
the samples of an epoch, in an order that does not depend on the ranks, to rank after rank like cards
(torchdata/stateful_dataloader/sampler.py, 0.11):

    _sampler_iter_state.samples_yielded, .sampler_state.yielded     without workers
    _snapshot._main_snapshot._sampler_iter_state...                 with workers

So if each of W ranks has read n samples, the first n W samples of the order are read, and each of R ranks goes on from
n W / R. That is exact where R divides n W, and it is the one state that is moved. An iterable dataset, a buffer of
tokens, or an order that each rank draws for itself has no such rule: the states stay as they are, and a note says where
the job has to begin.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace

from ...errors import CkpttoolError
from ...formats import pickles
from ...index.checkpoint import Checkpoint, Path, Value, joined
from ...printable import count_noun

__all__ = ["move_data_position"]

_RANK = re.compile(r"((?:dp_)?(?:rank)?_?)(\d{1,6})")
_COUNTS = (("_sampler_iter_state", "samples_yielded"), ("_sampler_iter_state", "sampler_state", "yielded"))
#: Seeds of random numbers, which every rank draws for itself.
_SEEDS = ("_base_seed", "_shared_seed")
#: Where a dataset, a collate function or a sampler keeps state of its own; None where it has none.
_OF_DATASET = frozenset(("dataset_state", "fetcher_state", "_index_sampler_state"))


def move_data_position(ckpt: Checkpoint, ranks: int, world_size: int) -> tuple[Checkpoint, list[str]]:
    """Redistribute the position of the checkpoint's data loaders over `ranks` ranks.

    Args:
        ranks: how many ranks of the new job read data.
        world_size: the number of ranks of the new job.

    Returns:
        (the state, notes). The state is unchanged if it has no data loaders by rank, if their number is `ranks`, or if
            the position cannot be moved exactly.
    """
    loaders, prefix = _collect_rank_loaders(ckpt)
    world = len(loaders)
    if world in (0, ranks):
        return ckpt, [] if loaders else _describe_other_positions(ckpt, ranks)
    counts, why = _count_samples(ckpt, loaders)
    seen = sum(counts)
    if not why and ranks != world_size and not (prefix or "").startswith("dp"):
        why = f"they are not named by data-parallel ranks, of which the job has {ranks:,}"
    if not why and seen % ranks:
        why = f"{seen:,} samples are not a multiple of {ranks}"
    if why:
        read = f"; {seen:,} samples are read" if counts else ""
        begin = f": begin at sample {seen:,} of the epoch's order" if counts and len(set(counts)) == 1 else ""
        return ckpt, [
            f"the data loaders' states of {count_noun(world, 'rank')} stay as they are, since {why}{read}. A job with "
            f"{ranks:,} ranks that read data cannot load them, and has to set its position itself{begin}"
        ]
    each = seen // ranks
    values = {n: v for n, v in ckpt.values.items() if not _is_in_rank_loader(v.path)}
    origin = dict(ckpt.origin)
    for rank in range(ranks):
        key: int | str = f"{prefix}{rank}" if prefix is not None else rank
        old: int | str = f"{prefix}{rank % world}" if prefix is not None else rank % world
        for rest, v in loaders[rank % world].items():
            path: Path = ("dataloader", key, *rest)
            values[joined(path)] = Value(path, each if rest[-2:] == _COUNTS[0] or rest[-3:] == _COUNTS[1] else v.data)
            if (own := ckpt.origin.get(v.path)) is not None:
                origin[path] = tuple(key if part == old else part for part in own)
    note = (
        f"the data loaders' states of {count_noun(world, 'rank')} are moved to {ranks:,}: {seen:,} samples of the "
        f"epoch are read, {counts[0]:,} by each rank then and {each:,} by each now; a StatefulDistributedSampler with "
        "the same seed and epoch has to deal to all of these ranks"
    )
    if ranks > world and any(rest[-1] in _SEEDS and v.data is not None for rest, v in loaders[0].items()):
        note += f"; ranks from {world:,} on have the workers' seeds of the first ones"
    return replace(ckpt, values=values, origin=origin), [note]


def _is_in_rank_loader(path: Path) -> bool:
    """Tell whether a path is inside the state of one rank's data loader."""
    return path[0] == "dataloader" and len(path) > 2 and _RANK.fullmatch(str(path[1])) is not None


def _collect_rank_loaders(ckpt: Checkpoint) -> tuple[list[dict[Path, Value]], str | None]:
    """Collect the states of data loaders that a checkpoint stores by rank.

    Returns:
        ([{path inside the loader's state: value} of rank 0, of rank 1, ...], the text before the rank in their keys,
            such as "dp_rank_"). The text is None where the keys are integers. ([], None) where no loader states are
            stored by rank, or not those of all ranks.
    """
    found: dict[int, dict[Path, Value]] = defaultdict(dict)
    prefixes: set[str | None] = set()
    for v in ckpt.values.values():
        if _is_in_rank_loader(v.path) and (m := _RANK.fullmatch(str(v.path[1]))):
            found[int(m[2])][v.path[2:]] = v
            prefixes.add(m[1] if isinstance(v.path[1], str) else None)
    if sorted(found) != list(range(len(found))) or len(prefixes) != 1:
        return [], None
    return [found[rank] for rank in range(len(found))], prefixes.pop()


def _count_samples(ckpt: Checkpoint, loaders: list[dict[Path, Value]]) -> tuple[list[int], str]:
    """Count the samples that each rank's data loader has read, and check whether another number of ranks can continue
    from there.

    Args:
        ckpt: the checkpoint.
        loaders: {path inside the loader's state: value} of each rank, as `_collect_rank_loaders` returns them.

    Returns:
        ([samples read by rank 0, by rank 1, ...], why other ranks cannot continue). The list is empty where the states
            do not give the numbers; the reason is "" if they can continue.
    """
    states = [{rest: v.data for rest, v in loader.items()} for loader in loaders]
    counts = [[x for rest, x in s.items() if rest[-2:] == _COUNTS[0] and type(x) is int] for s in states]
    read = [c[0] for c in counts if len(c) == 1]
    if len(read) != len(loaders):
        return [], "they are not of torchdata's StatefulDataLoader with a map-style dataset"
    dealt = [[x for rest, x in s.items() if rest[-3:] == _COUNTS[1]] for s in states]
    if dealt != [[n] for n in read]:
        return read, "no StatefulDistributedSampler deals the samples to the ranks"
    if any(t.path[0] == "dataloader" for t in ckpt.tensors.values()) or any(
        x is not None and not _OF_DATASET.isdisjoint(rest) for s in states for rest, x in s.items()
    ):
        return read, "datasets or samplers have state of their own"
    if any(s.get(("_steps_since_snapshot",)) or s.get(("_iterator_finished",)) for s in states):
        return read, "an epoch has just ended, or batches were read since the last snapshot of the workers"
    alike = [{rest: x for rest, x in s.items() if rest[-1] not in _SEEDS} for s in states]
    if any(s != alike[0] for s in alike):
        return read, "the ranks are not at one step"
    return read, ""


def _describe_other_positions(ckpt: Checkpoint, ranks: int) -> list[str]:
    """Return notes about data positions that torchdata's states do not hold: those that trainers compute from counters,
    and those of loaders that only work with their number of ranks."""
    step, batch = ckpt.value("trainer.global_step"), ckpt.value("trainer.train_batch_size")
    consumed = ckpt.value("extra.args.consumed_train_samples")
    notes = []
    if type(step) is int and type(batch) is int and ckpt.world_size not in (None, ranks):
        notes.append(
            f"Trainer skips the batches of {count_noun(step, 'step')} on each rank, so the data goes on exactly if "
            f"per_device_train_batch_size x gradient_accumulation_steps x ranks stays {batch:,} x "
            f"gradient_accumulation_steps x {ckpt.world_size:,}, with {ranks:,} ranks"
        )
    if type(consumed) is int and ckpt.world_size not in (None, ranks):
        notes.append(
            f"Megatron-LM goes on at sample {consumed:,} (consumed_train_samples) at any number of ranks, with "
            "dataloader_type single"
        )
    pickled = [v.data for v in ckpt.values.values() if v.path[:1] == ("dataloader",) and _is_pickled_rank(v)]
    if pickled and len(pickled) != ranks:
        read = [n for data in pickled if (n := _count_pickled_samples(data)) is not None]
        said = f"; {sum(read):,} samples are read" if len(read) == len(pickled) else ""
        tokens = ckpt.value("trainer.ntokens_seen")
        said += f"; {tokens:,} tokens are seen" if type(tokens) is int and tokens else ""
        notes.append(
            f"the data loaders' states of {count_noun(len(pickled), 'rank')} stay as they are, since torchtitan packs "
            f"tokens of each rank's own part of the dataset{said}. A job with {ranks:,} ranks that read data has to "
            "set its position itself"
        )
    return notes


def _is_pickled_rank(v: Value) -> bool:
    """Return whether a value is the pickled state of one rank's data loader, as torchtitan stores it."""
    return len(v.path) == 2 and isinstance(v.data, bytes) and _RANK.fullmatch(str(v.path[1])) is not None


def _count_pickled_samples(pickled: bytes) -> int | None:
    """Return how many samples one rank's data loader of torchtitan has read of the rank's part of a dataset
    (`sample_idx` of hf_datasets/text_datasets.py, 0.3); None where the state does not give one such number.

    Args:
        pickled: the pickle of the loader's state; nothing in it is called.
    """
    try:
        state, _ = pickles.load(pickled, what="the state of a data loader")
    except CkpttoolError:
        return None
    found: list[object] = []
    left = [state]
    while left:
        x = left.pop()
        if isinstance(x, dict):
            found += [x["sample_idx"]] if "sample_idx" in x else []
            left += x.values()
    return found[0] if len(found) == 1 and isinstance(found[0], int) else None
