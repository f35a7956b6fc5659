"""Files of ranks that do not belong together: one rank's file copied over another's, one rank's file from another step,
or of another part of the model.

Every such file is sound by itself, and the trainer would load the wrong numbers silently. Two things show it:

    equal ranks   every rank holds a part of its own of the weights and of the optimizer. If all the records that a file
                  holds have the CRC32s of records in another rank's, the file is a copy. Parts that are one number over
                  and over (zeros, the ones of a norm) prove nothing. Where files may hold whole tensors
                  (`Checkpoint.spreads_tensors`), only tensors of which both ranks hold a part count, since whole ones
                  may be equal: tied weights, a second copy of the model.
    equal files   of one rank, as far as a rank writes several: a file is a copy of another if it has bytes behind the
                  last item that the index names, and all its items there have the CRC32s of the other's; or if two or
                  more of them are of other layers.
    other copies  what several ranks have whole (all of it without sharding; the replicas of HYBRID_SHARD) is kept once.
                  Weights and the optimizer's state have to be equal there. Statistics and counters of modules may be
                  each rank's own.
    mixed steps   such a layout also spreads the `step` of each parameter over the files. Parameters may have different
                  steps (unfrozen later, experts that were not used), but not exactly along the lines of files.

Files without CRC32s (the legacy format of torch.save, safetensors) of one size are compared at a few places, and whole
where those are equal.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod

from ..errors import Corrupt, argument
from ..formats.crc import crc32, crc32_combine
from ..formats.stored_tensors import decode_number
from ..index.checkpoint import ITEMSIZE, Checkpoint, Chunks, DivergedNote, OtherCopy, TensorEntry
from ..index.draft import Dropped
from ..index.param_groups import list_names_by_group
from ..index.records import Record
from ..printable import count_noun, list_first
from ..storage.buffers import IOBudget
from ..storage.source import Source
from .copy.stream import Reader, StreamJob, read_small_tensors
from .copy.tensor_digests import proof_digests

__all__ = [
    "compare_saved_replicas",
    "describe_dropped_replicas",
    "explain_diverged_replicas",
    "find_diverged_replicas",
    "list_dropped_replicas",
    "read_steps",
    "refuse_diverged_replicas",
    "refuse_equal_ranks",
    "refuse_misplaced_files",
    "refuse_mixed_steps",
]

#: (tensor, row of its chunks), and of the record that it lies in: length, CRC32, the piece's first byte.
Piece = tuple[str, int]
Sum = tuple[int, int, int]
_REPETITIVE = frozenset(("bool", "int16", "int32", "int64", "uint16", "uint32", "uint64"))
_PROBES, _PROBE_BYTES, _STEP_BYTES = 8, 256, 4 << 20


# ------------------------------------------------------------------------------------------------------ equal ranks


def refuse_equal_ranks(ckpt: Checkpoint, source: Source) -> None:
    """Refuse a checkpoint in which one rank's file is a copy of another's.

    Raises:
        Corrupt: with both files, and a tensor that shows it.
    """
    if len(set(ckpt.ranks.values())) < 2:
        return
    if not ckpt.records.are_known():  # of a store, of which one item of each file was looked into
        if not _may_be_copies(ckpt):
            return
        source.prove_all()
    pieces: dict[int, dict[Piece, Sum | None]] = {}
    find = _make_record_finder(ckpt)
    for name, t in ckpt.tensors.items():
        if t.component not in ("model", "optim") or t.numel < 2:
            continue
        if ckpt.spreads_tensors and len({ckpt.ranks.get(f) for f in set(t.chunks.file)}) < 2:
            continue
        for k, file in enumerate(t.chunks.file):
            if file in ckpt.ranks and prod(t.chunks.shape_of(k)) > 1:
                pieces.setdefault(file, {})[name, k] = find(t, k)
    summed = {f: found for f, found in pieces.items() if None not in found.values()}
    for a, b in [
        *_find_copies_by_crc32(ckpt, summed),
        *_find_equal_files(ckpt, source, [f for f in pieces if f not in summed]),
    ]:
        proof = _find_proof_of_copy(ckpt, source, pieces[a], pieces[b], in_both=ckpt.spreads_tensors)
        if proof is not None:
            raise Corrupt(
                f"{ckpt.root}: {ckpt.files[a]} of rank {ckpt.ranks[a]} and {ckpt.files[b]} of rank {ckpt.ranks[b]} "
                f'hold the same numbers, those of "{proof}" among them, although every rank has a part of its own. One '
                "file was copied over the other; fetch both again. If the two ranks really are equal, use "
                f"{argument('allow_equal_ranks', True)}.",
                code="CKPT0410",
            )


def _may_be_copies(ckpt: Checkpoint) -> bool:
    """Tell whether files of two ranks may be copies of each other, going by the records that are known so far.

    Of each file, the first known record that is not zeros is compared; a file without any may be a copy.
    """
    first: dict[int, Record] = {}
    for r in ckpt.records:
        if (
            r.extent.file in ckpt.ranks
            and r.known
            and r.extent.length > 8
            and r.crc32 != _compute_zeros_crc32(r.extent.length)
        ):
            other = first.setdefault(r.extent.file, r)
            first[r.extent.file] = min(other, r, key=lambda r: r.extent.offset)
    holding = {f for t in ckpt.tensors.values() for f in set(t.chunks.file)} & ckpt.ranks.keys()
    sums = {(r.extent.length, r.crc32) for r in first.values()}
    return len(first) < len(holding) or len(sums) < len(first)


def refuse_misplaced_files(ckpt: Checkpoint, source: Source) -> None:
    """Raise if a file is a copy of another file of its rank, or has bytes behind the last item that the index names.

    Zeros behind the last item are padding.

    Raises:
        Corrupt: with the file, and the file that it is a copy of, if there is one.
    """
    longer = {
        f for f, n in ckpt.tails.items() if any(source.read(ckpt.files[f], ckpt.sizes[f] - n, min(n, _STEP_BYTES)))
    }
    if longer:
        source.prove_all()
    of_rank = Counter(ckpt.ranks.values())
    several = {f for f, rank in ckpt.ranks.items() if of_rank[rank] > 1} if ckpt.spreads_tensors else set[int]()
    if not ckpt.records.are_known():
        several = set()  # in a store, compared when they were read
    named: dict[int, dict[tuple[int, int], list[Piece]]] = {}
    find = _make_record_finder(ckpt) if longer or several else None
    for name, t in ckpt.tensors.items() if find is not None else ():
        for k, file in enumerate(t.chunks.file):
            if file in several and "float" in t.dtype and prod(t.chunks.shape_of(k)) > 1 and find is not None:
                found = find(t, k)
                if found is not None and found[1] != _compute_zeros_crc32(found[0]):
                    named.setdefault(file, {}).setdefault(found[:2], []).append((name, k))
    for one, other in _find_copies_in_rank(ckpt, named):
        unlike = (rows for key, rows in named[one].items() if _differ_in_layer_numbers(rows, named[other][key]))
        if one in longer or sum(_has_several_values(ckpt, source, *rows[0]) for rows in unlike) > 1:
            raise Corrupt(
                f"{ckpt.root}: {ckpt.files[one]} holds the same numbers as {ckpt.files[other]}, under other names: "
                f'those of "{next(iter(named[one].values()))[0][0]}" are among them. One file was copied over the '
                f"other; fetch both again. If they really are equal, use {argument('allow_equal_ranks', True)}.",
                code="CKPT0410",
            )
    for file in sorted(longer):
        n, size = ckpt.tails[file], ckpt.sizes[file]
        raise Corrupt(
            f"{ckpt.root}: {ckpt.files[file]} has {size:,} bytes, and the last item that .metadata names ends at "
            f"{size - n:,}. No writer leaves bytes behind it, so the file is another one's, or of another save; fetch "
            f"it again. If your writer does, use {argument('allow_equal_ranks', True)}.",
            code="CKPT0409",
        )


def _find_copies_in_rank(
    ckpt: Checkpoint, named: Mapping[int, Mapping[tuple[int, int], object]]
) -> Iterator[tuple[int, int]]:
    """Find files whose records are all in another file of the same rank.

    Args:
        named: {file: {(length, CRC32) of a record: pieces of tensors in it}}.

    Yields:
        (number of the file, number of the other file).
    """
    owners: dict[tuple[int, tuple[int, int]], set[int]] = {}
    for file, sums in named.items():
        for key in sums:
            owners.setdefault((ckpt.ranks[file], key), set()).add(file)
    for file, sums in named.items():
        others = set.intersection(*(owners[ckpt.ranks[file], key] for key in sums)) - {file}
        if others:
            yield file, min(others)


def _differ_in_layer_numbers(rows: Sequence[Piece], others: Sequence[Piece]) -> bool:
    """Tell whether no name in `rows` has the same numbers in it as a name in `others`: those of layers 0 and 5, say.

    Weights and their masters, averages or tied copies have the same numbers in their names, and may hold equal data.

    Args:
        rows, others: pieces of tensors, (name, number of the chunk).
    """

    one, two = ({tuple(re.findall(r"\d+", name)) for name, _ in of} for of in (rows, others))
    return not one & two


@lru_cache(4096)
def _compute_zeros_crc32(n: int) -> int:
    """Compute the CRC32 of `n` zero bytes."""
    if n < 2:
        return crc32(bytes(n))
    half = _compute_zeros_crc32(n // 2)
    both = crc32_combine(half, half, n // 2)
    return crc32_combine(both, crc32(b"\0"), 1) if n % 2 else both


def _make_record_finder(ckpt: Checkpoint) -> Callable[[TensorEntry, int], Sum | None]:
    """Return a function that finds the record that contains a chunk; called with (tensor, number of the chunk).

    It returns (length of the record, its CRC32, offset of the chunk in it), or None if there is no known record.
    """
    by_file = ckpt.records.by_file()

    def find(t: TensorEntry, row: int) -> Sum | None:
        """Find the record that a chunk lies in, as (length, CRC32, offset of the chunk in it); None if there is
        none."""
        c = t.chunks
        if (zstd := c.zstd.get(row)) is not None:
            return None if zstd[1] is None else (prod(c.shape_of(row)) * ITEMSIZE[t.dtype], zstd[1], 0)
        file, offset = c.file[row], c.offset[row]
        if (r := by_file.get(file)) is None or (k := bisect_right(r.offset, offset) - 1) < 0:
            return None
        inside = offset - r.offset[k]
        if k in r.later and not r.later[k].known:
            return None
        return (r.length[k], r[k].crc32, inside) if inside + c.length[row] <= r.length[k] else None

    return find


def _find_copies_by_crc32(
    ckpt: Checkpoint, summed: Mapping[int, Mapping[Piece, Sum | None]]
) -> Iterator[tuple[int, int]]:
    """Find files whose records, zeros aside, are all in a file of another rank, by length and CRC32.

    Args:
        summed: {number of a file: {(tensor, number of a chunk in the file): (length, CRC32, offset of the chunk in it)
            of the record that the chunk lies in, None if unknown}}.

    Yields:
        (number of the file, number of the other rank's file), as indices of `ckpt.files`.
    """
    sets: dict[frozenset[tuple[int, int]], list[int]] = {}
    for file, found in summed.items():
        if keys := frozenset(s[:2] for s in found.values() if s is not None and s[1] != _compute_zeros_crc32(s[0])):
            sets.setdefault(keys, []).append(file)
    owners: dict[tuple[int, int], set[frozenset[tuple[int, int]]]] = {}
    for keys in sets:
        for key in keys:
            owners.setdefault(key, set()).add(keys)
    for keys, files in sets.items():
        for other in set.intersection(*(owners[k] for k in keys)):
            for b in sets[other]:
                if ckpt.ranks[b] != ckpt.ranks[files[0]]:
                    yield files[0], b


def _find_equal_files(ckpt: Checkpoint, source: Source, files: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Find files of different ranks that are equal byte by byte.

    Files are compared at a few places first, and completely if these are equal.

    Yields:
        (number of a file, number of the other rank's file).
    """
    seen: dict[object, int] = {}
    for file in files:
        name, size = ckpt.files[file], ckpt.sizes[file]
        places = (size * (i + 1) // (_PROBES + 1) for i in range(_PROBES))
        probes = tuple(source.read(name, at, min(_PROBE_BYTES, size - at)) for at in places)
        first = seen.setdefault((size, probes), file)
        steps = ((at, min(_STEP_BYTES, size - at)) for at in range(0, size, _STEP_BYTES))
        if ckpt.ranks[first] != ckpt.ranks[file] and all(
            source.read(name, *step) == source.read(ckpt.files[first], *step) for step in steps
        ):
            yield first, file


def _find_proof_of_copy(
    ckpt: Checkpoint,
    source: Source,
    a: Mapping[Piece, Sum | None],
    b: Mapping[Piece, Sum | None],
    *,
    in_both: bool,
) -> str | None:
    """Find the largest tensor that shows one file to be a copy of another: a tensor with more than one distinct number.

    Args:
        a, b: {(tensor, number of a chunk): (length, CRC32, offset of the chunk in it) of the record that the chunk lies
            in, None if unknown} of the two files.
        in_both: whether each file must have a part of the tensor.

    Returns:
        The tensor's name; None if there is none, or if `in_both` is set and the records of a common tensor differ.
    """
    pieces = list(a)
    if in_both:
        there: dict[str, set[Sum | None]] = {}
        for (name, _), found in b.items():
            there.setdefault(name, set()).add(found)
        pieces = [p for p in a if p[0] in there]
        if any(a[p] not in there[p[0]] for p in pieces):
            return None
    pieces = [p for p in pieces if ckpt.tensors[p[0]].dtype not in _REPETITIVE]
    pieces.sort(key=lambda p: -ckpt.tensors[p[0]].nbytes)
    return next((name for name, k in pieces if _has_several_values(ckpt, source, name, k)), None)


def _has_several_values(ckpt: Checkpoint, source: Source, name: str, row: int) -> bool:
    """Tell whether a chunk of a tensor holds more than one distinct number.

    Args:
        name, row: the tensor, and the number of the chunk in it.
    """
    t = ckpt.tensors[name]
    c, item = t.chunks[row], ITEMSIZE[t.dtype]
    chunks = Chunks(len(c.shape))
    chunks.add((0,) * len(c.shape), c.shape, c.extent.file, c.extent.offset, c.extent.length, c.strides, c.zstd)
    entry = TensorEntry(t.dtype, c.shape, t.path, chunks)
    first, found = b"", False
    for block in Reader(source, ckpt.files, None, IOBudget(1, 256 << 10)).blocks([StreamJob(name, entry)]):
        data = block.data
        first = first or bytes(data[:item])
        found = found or data[:item] != first or data[item:] != data[: len(data) - item]
    return found


# ----------------------------------------------------------------------------------------------------- other copies

#: Buffers that torch's norms update from the rows of their own rank.
_STATISTICS = frozenset(("running_mean", "running_var", "num_batches_tracked"))


def compare_saved_replicas(ckpt: Checkpoint, source: Source) -> Checkpoint:
    """Read and compare the replicas of tensors that several ranks saved.

    Returns:
        The index with those that differ added to `others`, and without `replicas`.
    """
    if not ckpt.replicas:
        return ckpt
    both = {f"{which} {k}": t for k, r in enumerate(ckpt.replicas) for which, t in (("kept", r.kept), ("copy", r.copy))}
    digests = proof_digests(both, ckpt, source)
    unlike = [
        OtherCopy(r.name, r.rank, r.copy.nbytes)
        for k, r in enumerate(ckpt.replicas)
        if digests[f"kept {k}"] != digests[f"copy {k}"]
    ]
    return replace(ckpt, replicas=[], others=[*ckpt.others, *unlike])


def refuse_diverged_replicas(ckpt: Checkpoint) -> None:
    """Raise if replicas of weights or of optimizer state differ between ranks; those of the lowest rank are kept.

    Raises:
        Corrupt: with the first tensor, its ranks, and how many tensors differ.
    """
    if rows := find_diverged_replicas(ckpt):
        raise Corrupt(
            f"{ckpt.root}: {explain_diverged_replicas(ckpt, rows)}. To keep those of one rank, use "
            f"{argument('allow_mixed_steps', True)}.",
            code="CKPT0409",
        )


def explain_diverged_replicas(ckpt: Checkpoint, rows: Sequence[OtherCopy]) -> str:
    """Return a sentence on which ranks have other weights than the kept replicas, and what that means.

    Args:
        rows: the replicas that differ, at least one.
    """
    names = list(dict.fromkeys(o.name for o in rows))
    ranks = sorted({o.rank for o in rows if o.name == names[0]})
    return (
        f"the ranks' copies of {len(names):,} of {len(ckpt.tensors):,} tensors differ, and only the lowest rank's "
        f'would be kept. The first is "{names[0]}", of which rank{"s" * (len(ranks) > 1)} '
        f"{list_first(ranks, 8)} {'have' if len(ranks) > 1 else 'has'} other numbers. Either the ranks "
        "are stages of a pipeline that number their layers from 0, so that each file is another part of the model: "
        "save them under the names of the whole model. Or replicas diverged, or a file is of another step: fetch the "
        "files of one save"
    )


def find_diverged_replicas(ckpt: Checkpoint) -> list[OtherCopy]:
    """Find the replicas that differ from the kept ones and should not: of floating-point weights, optimizer state and
    gradient scalers, but not of module statistics.

    A tensor of the model that every rank saved completely counts as a buffer, which each rank may have its own of, if
    the weights are sharded and the optimizer does not know it.
    """
    kept = {o.name: t for o in ckpt.others if (t := ckpt.tensors.get(o.name)) is not None}
    if not kept:
        return []
    trained = {n for group in list_names_by_group(ckpt) or () for n in group}
    trained |= {t.parameter for t in ckpt.tensors.values() if t.slot is not None}
    sharded = any(len(set(t.chunks.file)) > 1 for t in ckpt.tensors.values() if t.component == "model")

    def is_own(t: TensorEntry) -> bool:
        """Tell whether each rank may have numbers of its own in a tensor."""
        fqn = t.local_name
        if t.component != "model" or "float" not in t.dtype or fqn.rpartition(".")[2] in _STATISTICS:
            return t.component not in ("optim", "scaler")
        return sharded and len(t.chunks) == 1 and fqn not in trained

    return [o for o in ckpt.others if o.name in kept and not is_own(kept[o.name])]


def list_dropped_replicas(ckpt: Checkpoint) -> list[Dropped]:
    """List the replicas of other ranks that differ from the kept ones and are dropped, named
    extra.per_rank.RANK.NAME."""
    weights = set(find_diverged_replicas(ckpt))
    why = (
        "each rank has its own, and the lowest rank's is kept",
        "ranks should have the same, and the lowest rank's is kept",
    )
    return [Dropped(f"extra.per_rank.{o.rank}.{o.name}", o.nbytes, why[o in weights]) for o in ckpt.others]


def describe_dropped_replicas(ckpt: Checkpoint) -> list[str]:
    """Return a note on the entries in which ranks differ, of which only the lowest rank's are read; [] where none
    differs."""
    if not ckpt.others:
        return []
    names = dict.fromkeys(o.name for o in ckpt.others)
    ranks = count_noun(len({o.rank for o in ckpt.others}), "rank has", "ranks have")
    text = (
        f"{ranks} other numbers in {count_noun(len(names), 'entry', 'entries')} of which the lowest rank's are read, "
        f'first "{next(iter(names))}"; a conversion '
    )
    if find_diverged_replicas(ckpt):
        return [DivergedNote(f"{text}refuses them")]
    return [f"{text}lists the others as left behind"]


# ------------------------------------------------------------------------------------------------------ mixed steps


def refuse_mixed_steps(ckpt: Checkpoint, source: Source) -> None:
    """Raise if the optimizer steps of parameters differ exactly between files, or between ranks, but not within them.

    Only layouts that spread tensors over files are checked. Param groups are compared one by one, since they may have
    been trained for different numbers of steps. A file counts only with two or more steps of a group: a single
    different step is as likely a parameter that was unfrozen later, and becomes a note.

    Raises:
        Corrupt: with the files and their steps.
    """
    names = [
        n
        for n, t in ckpt.tensors.items()
        if t.is_optimizer_state and t.path[-1] == "step" and t.numel == 1 and t.chunks.file[0] in ckpt.ranks
    ]
    file = {n: ckpt.tensors[n].chunks.file[0] for n in names}
    if not ckpt.spreads_tensors or len(set(file.values())) < 2:
        return
    find = _make_record_finder(ckpt)
    sums = {(ckpt.tensors[n].dtype, find(ckpt.tensors[n], 0)) for n in names}
    if len(sums) == 1 and None not in {s for _, s in sums}:
        return  # equal CRC32s of one number each: equal numbers, and nothing was read
    if source.count_unproved()[0]:  # in a store: two of each file, and all of them if these differ
        few = [n for of in _group_names_by(names, file).values() for n in of[:2]]
        if len(set(read_steps(ckpt, source, few).values())) == 1:
            return
    steps = read_steps(ckpt, source, names)
    groups = _map_steps_to_groups(ckpt, names)
    text = ""
    for place in (file, {n: ckpt.ranks[f] for n, f in file.items()}):
        found = _find_step_split(names, groups, place, steps)
        if found is None:
            text = ""
            continue
        one, two, sure = found
        text = (
            f"{ckpt.files[file[one]]} holds {_format_step(steps[one])} of the optimizer (first {one}), "
            f"{ckpt.files[file[two]]} holds {_format_step(steps[two])} (first {two})"
        )
        if sure:
            raise Corrupt(
                f"{ckpt.root}: {text}, and no file holds two different steps. The files are from different saves; "
                "fetch those of one. If the parameters in one file were really trained for fewer steps, use "
                f"{argument('allow_mixed_steps', True)}.",
                code="CKPT0409",
            )
    if text:
        ckpt.notes.append(f"{text}: it was trained for fewer steps, or the file is from another save")


def _group_names_by(names: Iterable[str], key: Mapping[str, int]) -> dict[int, list[str]]:
    """Return {number: list of the names that `key` maps to that number}, in the order of `names`."""
    out: dict[int, list[str]] = {}
    for n in names:
        out.setdefault(key[n], []).append(n)
    return out


def read_steps(ckpt: Checkpoint, source: Source, names: Sequence[str]) -> dict[str, float | int | None]:
    """Read optimizer steps, which are tensors of one number.

    Returns:
        {name: step}; None for a step of an unknown dtype.
    """
    extents = (ckpt.tensors[n].chunks[0].extent for n in names)
    source.prefetch((ckpt.files[e.file], e.offset, e.length) for e in extents)
    return {n: decode_number(ckpt.tensors[n].dtype, d) for n, d in read_small_tensors(ckpt, source, names).items()}


def _format_step(step: float | int | None) -> str:
    """Write the step of an optimizer for a message; None is one that could not be decoded."""
    return "a step of an unknown dtype" if step is None else f"step {step:g}"


def _map_steps_to_groups(ckpt: Checkpoint, names: Iterable[str]) -> dict[str, int]:
    """Return {name of a step: number of the param group of its parameter}; -1 if no group lists it."""
    of: dict[object, int] = {}
    for v in ckpt.values.values():
        if v.option == "params" and isinstance(v.data, list):
            of.update((n, v.group) for n in v.data if isinstance(n, str))
    return {n: of.get(ckpt.tensors[n].path[2], -1) for n in names}


def _find_step_split(
    names: list[str], groups: Mapping[str, int], place: Mapping[str, int], steps: Mapping[str, object]
) -> tuple[str, str, bool] | None:
    """Find two places (files or ranks) whose optimizer steps differ, if no place has different steps in one param
    group.

    Args:
        names: the steps, by name.
        groups: {name: param group}; steps are compared within a group.
        place: {name: file or rank}.
        steps: {name: step}.

    Returns:
        (name of a step that differs from the most frequent one, name of one that does not, whether both places have two
        or more steps). None if no steps differ, if they differ within a place, or if another group has equal steps in
        the same two places.
    """
    cells: dict[int, dict[int, list[str]]] = {}
    for n in names:
        cells.setdefault(groups[n], {}).setdefault(place[n], []).append(n)
    if any(len({steps[n] for n in cell}) > 1 for row in cells.values() for cell in row.values()):
        return None
    best: tuple[str, str, bool] | None = None
    for row in cells.values():
        usual = Counter(steps[n] for cell in row.values() for n in cell).most_common(1)[0][0]
        q = max((q for q, cell in row.items() if steps[cell[0]] == usual), key=lambda q: len(row[q]))
        for p, cell in row.items():
            both = (other for other in cells.values() if p in other and q in other)
            if steps[cell[0]] == usual or any(steps[r[p][0]] == steps[r[q][0]] for r in both):
                continue
            sure = min(len(cell), len(row[q])) > 1
            if best is None or (sure and not best[2]):
                best = cell[0], row[q][0], sure
    return best
