"""`--vocab-size`: more or fewer rows of the embedding, of the output layer, and of their optimizer state.

New rows are zeros. Rows are only taken away if nothing was learned in them: they are all equal (padding that was made
once and got the same gradient ever since), or their moments are all zero. That is read from the data; otherwise it is
refused, with numbers.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from ...errors import Unsupported, UsageError, argument
from ...index.checkpoint import ITEMSIZE, Checkpoint, Chunks, TensorEntry
from ...index.records import Records
from ...index.vocabulary import find_vocabulary_weights
from ...storage.buffers import IOBudget
from ...storage.overlay import ENDLESS, ZEROS, JoinedSource
from ...storage.source import Source
from ..copy.fill import silent
from ..copy.stream import Reader, StreamJob
from ..copy.tensor_digests import tensor_digests
from ..handle import cut_chunks

__all__ = ["find_unequal_rows", "resize_vocabulary"]


def resize_vocabulary(opened: tuple[Checkpoint, Source], size: int) -> tuple[Checkpoint, Source]:
    """Return the same state, (index, files), with `size` rows in every weight, master and optimizer slot that has one
    row per token.

    Args:
        opened: the state, (index, files).

    Raises:
        Unsupported: there is no embedding, something was learned in the rows to remove, or an optimizer slot has a
            shape that does not show its rows.
        UsageError: it has that size already.
    """
    ckpt, source = opened
    weights = find_vocabulary_weights(ckpt)
    if not weights:
        raise Unsupported(
            f"{argument('vocab_size', size)}: no weight is named like an embedding (embed_tokens, wte, "
            "word_embeddings, tok_embeddings, embed_in).",
            code="CKPT0331",
        )
    if all(t.shape[0] == size for t in weights.values()):
        raise UsageError(
            f"{argument('vocab_size', size)}: it has that many rows already. Leave it out.", code="CKPT0205"
        )
    zeros = len(ckpt.files)
    changed: dict[str, TensorEntry] = {}
    cut = False
    tails: set[str] = set()  # digests of rows that were found to hold nothing learned
    with_rows = {
        n: [f"model.{n}", *_list_slots_with_rows(ckpt, n, t)] for n, t in weights.items() if t.shape[0] != size
    }
    # tied weights have one state, under one of their names: that name first, since it tells whether rows were trained
    for fqn in sorted(with_rows, key=lambda n: -len(with_rows[n])):
        t, rows = weights[fqn], with_rows[fqn]
        if size < t.shape[0]:
            tail = tensor_digests({fqn: _cut_rows(t, size, t.shape[0])}, source, ckpt.files, Records(), silent)[fqn]
            if tail not in tails:
                _check_nothing_learned(ckpt, source, fqn, rows, size)
            tails.add(tail)
            cut = True
        master = f"extra.master.{fqn}"  # Megatron-Core's, in fp32
        for name in (*rows, *([master] if master in ckpt.tensors else [])):
            changed[name] = _with_row_count(ckpt.tensors[name], size, zeros)
    verb = "cut" if cut else "padded with zeros"
    old = ", ".join(dict.fromkeys(f"{weights[n].shape[0]:,}" for n in with_rows))
    note = (
        f"{verb} from {old} to {size:,} rows: {', '.join(with_rows)}, and {len(changed) - len(with_rows)} tensors of "
        "the optimizer"
    )
    new = replace(
        ckpt,
        tensors={n: changed.get(n, t) for n, t in ckpt.tensors.items()},
        files=[*ckpt.files, ZEROS],
        sizes=[*ckpt.sizes, ENDLESS],
        recorded={n: d for n, d in ckpt.recorded.items() if n not in changed},
        notes=[*ckpt.notes, note],
    )
    return new, JoinedSource(source)


def _list_slots_with_rows(ckpt: Checkpoint, fqn: str, weight: TensorEntry) -> list[str]:
    """List the names of a parameter's optimizer slots that have one entry or row for each of its rows.

    Raises:
        Unsupported: a slot has another shape that depends on the number of rows.
    """
    out = []
    n, rest = weight.shape[0], weight.shape[1:]
    for name, t in ckpt.tensors.items():
        if t.slot is None or t.parameter != fqn or t.numel == 1:
            continue
        if t.shape in (weight.shape, (n, *(1 for _ in rest))) or (t.shape == (n,) and (n,) != rest):
            out.append(name)
        elif t.shape not in (rest, (1, *rest)):
            raise Unsupported(
                f'"{name}" is {list(t.shape)}, and its parameter {list(weight.shape)}: what belongs to a row of it is '
                f"not known. Leave the optimizer out with {argument('only', ['model'])}.",
                code="CKPT0331",
            )
    return out


def _with_row_count(t: TensorEntry, size: int, zeros: int) -> TensorEntry:
    """Return a tensor with `size` rows: the first ones, or all with rows of zeros appended.

    Args:
        zeros: the number of the file of zeros in the index.

    Raises:
        Unsupported: rows to be cut are in compressed chunks.
    """
    if size <= t.shape[0]:
        return _cut_rows(t, 0, size)
    out = Chunks.of(len(t.shape), t.chunks)
    new = (size - t.shape[0], *t.shape[1:])
    out.add((t.shape[0], *(0 for _ in new[1:])), new, zeros, 0, prod(new) * ITEMSIZE[t.dtype])
    return replace(t, shape=(size, *t.shape[1:]), chunks=out)


def _cut_rows(t: TensorEntry, first: int, stop: int) -> TensorEntry:
    """Return rows [first, stop) of a tensor, as a tensor.

    Raises:
        Unsupported: they are in compressed chunks.
    """
    if any(c.zstd is not None for c in t.chunks):
        raise Unsupported(
            "The rows lie in compressed files, which cannot be cut. Convert to dcp first, then change the rows.",
            code="CKPT0324",
        )
    shape = (stop - first, *t.shape[1:])
    return replace(t, shape=shape, chunks=cut_chunks(t, ((first, *(0 for _ in shape[1:])), shape)))


def _check_nothing_learned(ckpt: Checkpoint, source: Source, fqn: str, names: list[str], size: int) -> None:
    """Check that nothing was learned in the rows that are to be removed: they are all equal, or have moments of 0.

    Args:
        fqn: the weight, for the message.
        names: canonical names of the weight and of its optimizer slots that have rows, the weight first.
        size: how many rows stay.

    Raises:
        Unsupported: something was learned; the message has the number of such rows, and the first.
    """
    weight = ckpt.tensors[names[0]]
    unlike, _ = find_unequal_rows(ckpt, source, _cut_rows(weight, size, weight.shape[0]))
    if not unlike:
        return
    moments = [n for n in names[1:] if ckpt.tensors[n].shape == weight.shape]
    moved = [
        row
        for n in moments
        for row in find_unequal_rows(ckpt, source, _cut_rows(ckpt.tensors[n], size, weight.shape[0]))[1]
    ]
    if moments and not moved:
        return
    total = weight.shape[0] - size
    also = (
        f"; {len(set(moved)):,} of them have moments that are not 0, first row {size + min(moved):,}" if moved else ""
    )
    raise Unsupported(
        f'{argument("vocab_size", size)}: of the last {total:,} rows of "{fqn}", {len(unlike):,} are not equal to the '
        f"first of them, first row {size + unlike[0]:,}{also}. They were trained, so they are not padding, and cutting "
        "them would lose what was learned. Give the number of rows that the tokenizer needs.",
        code="CKPT0331",
    )


def find_unequal_rows(ckpt: Checkpoint, source: Source, t: TensorEntry) -> tuple[list[int], list[int]]:
    """Read a tensor and return ([numbers of the rows that are not equal to the first row], [numbers of the rows that
    are not all zero])."""
    row_bytes = max(1, prod(t.shape[1:])) * ITEMSIZE[t.dtype]
    first: bytes | None = None
    unlike: list[int] = []
    other: list[int] = []
    left = b""  # a row that a block has begun
    k = 0
    for block in Reader(source, ckpt.files, None, IOBudget(1, 1 << 20)).blocks([StreamJob("rows", t)]):
        data = left + bytes(block.data)
        for at in range(0, len(data) - row_bytes + 1, row_bytes):
            row = data[at : at + row_bytes]
            first = first or row
            if row != first:
                unlike.append(k)
            if row.strip(b"\0"):
                other.append(k)
            k += 1
        left = data[len(data) - len(data) % row_bytes :]
    return unlike, other
