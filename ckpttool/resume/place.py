"""place: where an element lies."""

from __future__ import annotations



def place_of(ckpt: Checkpoint, name: str, flat: int) -> str | None:
    """Where an element of a tensor lies: file, bytes of its chunk, and whose shard that is, as far as names tell.

    `flat` is its row-major index; None where no chunk has it.
    """
    entry = ckpt.tensors.get(name)
    if entry is None or not entry.numel:
        return None
    at = []
    for step in boxes.strides(entry.shape):
        at.append(flat // step)
        flat -= at[-1] * step
    for chunk in entry.chunks:
        if all(s <= i < s + n for i, s, n in zip(at, chunk.start, chunk.shape, strict=True)):
            file, offset, length = ckpt.files[chunk.extent.file], chunk.extent.offset, chunk.extent.length
            text = f"{file}, bytes {offset}..{offset + length}"
            if chunk.zstd is None:
                steps = chunk.strides or boxes.strides(chunk.shape)
                inside = sum((i - s) * k for i, s, k in zip(at, chunk.start, steps, strict=True))
                byte = offset + inside * ITEMSIZE[entry.dtype]
                text += f", first difference at byte {byte}"
            box = ", ".join(f"{s}:{s + n}" for s, n in zip(chunk.start, chunk.shape, strict=True))
            rank = _rank(file)
            whose = "" if rank is None else f"rank {rank}'s shard, "
            return f"{text} ({whose}[{box}] of {list(entry.shape)})" if box else text
    return None


def _rank(file: str) -> int | None:
    """The rank that wrote a file, where its name tells: of DCP, of ZeRO's shards, of FSDP1's."""
    name = file.rpartition("/")[2]
    for pattern in (
        r"^__(\d+)_\d+\.distcp$",
        r"zero_pp_rank_(\d+)_",
        r"(?<!mp_)(?<!pp_)rank_?(\d+)\.(?:pt|pth|bin)$",
    ):
        if m := re.search(pattern, name):
            return int(m[1])
    return None
