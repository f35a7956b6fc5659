"""`--vocab-size`: more or fewer rows of the embedding, of the output layer, and of their optimizer state.

New rows are zeros. Rows are only taken away if nothing was learned in them: they are all equal (padding that was made
once and got the same gradient ever since), or their moments are all zero. That is read from the data; otherwise it is
refused, with numbers.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from ...errors import Unsupported, UsageError, argument
from ...index import boxes
from ...index.checkpoint import ITEMSIZE, Checkpoint, Chunks, TensorEntry
from ...index.vocabulary import vocabulary_of
from ...storage.buffers import IOBudget
from ...storage.overlay import ENDLESS, ZEROS, JoinedSource
from ...storage.source import Source
from ..copy.fill import silent
from ..copy.stream import Reader, StreamJob
from ..copy.tensor_digests import tensor_digests

__all__ = ["odd_rows", "resized"]


def resized(opened: tuple[Checkpoint, Source], size: int) -> tuple[Checkpoint, Source]:
    """The same state, (index, files), with `size` rows in everything that has a row for each token.

    Raises:
        Unsupported: there is no embedding, something was learned in the rows to take away, or a slot of the optimizer
        has a shape
            that does not tell its rows.
        UsageError: it has that size.
    """
    ckpt, source = opened
    weights = vocabulary_of(ckpt)
    if not weights:
        raise Unsupported(
            f"{argument('vocab_size', size)}: no weight is named like an embedding (embed_tokens, wte, "
            "word_embeddings, tok_embeddings, embed_in)."
        )
    if all(t.shape[0] == size for t in weights.values()):
        raise UsageError(f"{argument('vocab_size', size)}: it has that many rows already. Leave it out.")
    changed: dict[str, TensorEntry] = {}
    zeros = len(ckpt.files)
    cut: list[str] = []
    tails: set[str] = set()
    with_rows = {n: [f"model.{n}", *_slots_with_rows(ckpt, n, t)] for n, t in weights.items() if t.shape[0] != size}
    for fqn in sorted(
        with_rows, key=lambda n: -len(with_rows[n])
    ):  # tied weights have one state, under one of their names
        t, rows = weights[fqn], with_rows[fqn]
        if size < t.shape[0]:
            tail = tensor_digests({fqn: _tail(t, size)}, source, ckpt.files, (), silent)[fqn]
            if tail not in tails:
                _refuse_learned(ckpt, source, fqn, rows, size)
            tails.add(tail)
            cut.append(fqn)
        copy = f"extra.master.{fqn}"  # Megatron-Core's, in fp32
        for name in (*rows, *([copy] if copy in ckpt.tensors else [])):
            changed[name] = _with_rows(ckpt.tensors[name], size, zeros)
    verb = "cut" if cut else "padded with zeros"
    old = ", ".join(dict.fromkeys(f"{t.shape[0]:,}" for t in weights.values() if t.shape[0] != size))
    note = (
        f"{verb} from {old} to {size:,} rows: {', '.join(n for n, t in weights.items() if t.shape[0] != size)}, and "
        f"{len(changed) - sum(t.shape[0] != size for t in weights.values())} tensors of the optimizer"
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


def _slots_with_rows(ckpt: Checkpoint, fqn: str, weight: TensorEntry) -> list[str]:
    """The slots of a parameter that have a row for each of its rows: those of its shape, and factors of them.

    Raises:
        Unsupported: one has another shape that depends on the number of rows.
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
                f"not known. Leave the optimizer out with {argument('only', ['model'])}."
            )
    return out


def _with_rows(t: TensorEntry, size: int, zeros: int) -> TensorEntry:
    """The same tensor with so many rows; new ones are in the file of zeros."""
    item = ITEMSIZE[t.dtype]
    shape = (size, *t.shape[1:])
    out = Chunks(len(shape))
    for c in t.chunks:
        n = min(c.start[0] + c.shape[0], size) - c.start[0]
        if n <= 0 and c.shape[0]:
            continue
        part = (n, *c.shape[1:])
        whole = n == c.shape[0]
        if not whole and c.zstd is not None:
            raise Unsupported(
                "The rows lie in compressed files, which cannot be cut. Convert to dcp first, then change the rows."
            )
        length = c.extent.length
        if not whole:
            length = item * (boxes.span(part, c.strides) if c.strides else prod(part))
        out.add(c.start, part, c.extent.file, c.extent.offset, length, c.strides, c.zstd)
    if size > t.shape[0]:
        more = (size - t.shape[0], *t.shape[1:])
        out.add((t.shape[0], *(0 for _ in more[1:])), more, zeros, 0, prod(more) * item)
    return replace(t, shape=shape, chunks=out)


def _tail(t: TensorEntry, first: int) -> TensorEntry:
    """The rows of a tensor from `first` on."""
    out = Chunks(len(t.shape))
    item = ITEMSIZE[t.dtype]
    for c in t.chunks:
        skip = max(0, first - c.start[0])
        n = c.shape[0] - skip
        if n <= 0:
            continue
        part = (n, *c.shape[1:])
        if c.zstd is not None:
            raise Unsupported(
                "The rows lie in compressed files, which cannot be cut. Convert to dcp first, then change the rows."
            )
        step = c.strides[0] if c.strides else prod(c.shape[1:])
        length = item * (boxes.span(part, c.strides) if c.strides else prod(part))
        offset = c.extent.offset + item * step * skip
        out.add((c.start[0] + skip - first, *c.start[1:]), part, c.extent.file, offset, length, c.strides)
    return replace(t, shape=(t.shape[0] - first, *t.shape[1:]), chunks=out)


def _refuse_learned(ckpt: Checkpoint, source: Source, fqn: str, names: list[str], size: int) -> None:
    """Refuse to take away rows in which something was learned.

    Raises:
        Unsupported: with the number of such rows, and the first.
    """
    weight = ckpt.tensors[names[0]]
    unlike, _ = odd_rows(ckpt, source, _tail(weight, size))
    if not unlike:
        return
    moments = [n for n in names[1:] if ckpt.tensors[n].shape == weight.shape]
    moved = [row for n in moments for row in odd_rows(ckpt, source, _tail(ckpt.tensors[n], size))[1]]
    if moments and not moved:
        return
    total = weight.shape[0] - size
    also = (
        f"; {len(set(moved)):,} of them have moments that are not 0, first row {size + min(moved):,}" if moved else ""
    )
    raise Unsupported(
        f'{argument("vocab_size", size)}: of the last {total:,} rows of "{fqn}", {len(unlike):,} are not equal to the '
        f"first of them, first row {size + unlike[0]:,}{also}. They were trained, so they are not padding, and cutting "
        "them would lose what was learned. Give the number of rows that the tokenizer needs."
    )


def odd_rows(ckpt: Checkpoint, source: Source, t: TensorEntry) -> tuple[list[int], list[int]]:
    """(rows that are not equal to the first, rows that are not zero)."""
    row = max(1, prod(t.shape[1:])) * ITEMSIZE[t.dtype]
    first: bytes | None = None
    unlike: list[int] = []
    other: list[int] = []
    left = b""
    k = 0
    for block in Reader(source, ckpt.files, (), IOBudget(1, 1 << 20)).blocks([StreamJob("rows", t)]):
        data = left + bytes(block.data)
        for at in range(0, len(data) - row + 1, row):
            piece = data[at : at + row]
            first = first or piece
            if piece != first:
                unlike.append(k)
            if piece.strip(b"\0"):
                other.append(k)
            k += 1
        left = data[len(data) - len(data) % row :]
    return unlike, other
