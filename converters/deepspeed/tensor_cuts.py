"""How the tensor-parallel ranks of DeepSpeed's AutoTP cut a parameter: what a save says of it, and the same for another
number of ranks.

    universal_checkpoint_info.affine_map    {"version": 1, "params": {"^<FQN, escaped for re>$": map}}
    map     {"logical_shape": [..], "ranks": {rank: {"shard_shape": [..], "pieces": [piece]}}}
    piece   {"shape": [..], "source": [offset, strides], "dest": [offset, strides], "locations": [rank], "scale": 1.0}

`source` and `dest` say where the piece is in the whole parameter and in the rank's, in elements, as torch.as_strided
counts them. `locations` are all ranks that hold it. A rank may hold nothing of a parameter (shard_shape [0, ..]: more
ranks than key-value heads). What is several matrices side by side is listed in parameter_with_sub_params, with the
sizes of these along the dimension that is cut, and each is cut by itself.

An engine cuts a layer of attention by key-value heads, where their number is known: ranks get as many heads as others,
or one more. All else is cut into equal parts, with one more for the first ranks. So equal parts at T ranks are equal
parts at every divisor of T, and at any T that divides the key-value heads and the parameter; other sizes follow from
nothing that a save has.

Sources: deepspeed 0.19.8, checkpoint/affine.py (AffinePiece, ParamAffineMap, replicated_map), module_inject/layers.py
(collect_autotp_universal_checkpoint_info), module_inject/tp_shard.py (get_shard_size).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ckpttool.errors import Corrupt, Unsupported
from ckpttool.formats.pickles import short
from ckpttool.index import boxes

__all__ = [
    "INFO",
    "ParameterCut",
    "ParameterPiece",
    "advise_joining",
    "build_universal_info",
    "count_map_ranks",
    "cut_equally",
    "cut_for_ranks",
    "encode_cut",
    "make_parameter_pattern",
    "make_whole_piece",
    "parse_parameter_map",
    "read_sub_param_sizes",
]

#: The key of a model file under which it says that.
INFO = "universal_checkpoint_info"

Box = tuple[tuple[int, ...], tuple[int, ...]]


class ParameterPiece(NamedTuple):
    """A box of a parameter, (start, shape), and where it starts in the part of each rank that holds it."""

    box: Box
    held: dict[int, tuple[int, ...]]


class ParameterCut(NamedTuple):
    """How the ranks share a parameter: its shape, the shape of each rank's part, the pieces."""

    shape: tuple[int, ...]
    parts: list[tuple[int, ...]]
    pieces: list[ParameterPiece]

    @property
    def is_whole(self) -> bool:
        """Tell whether every rank has all of the parameter."""
        return all(p == self.shape for p in self.parts)


def make_parameter_pattern(name: str) -> str:
    """Return the key of the parameter `name` in affine_map: a regular expression that matches this name alone."""
    return f"^{re.escape(name)}$"


def advise_joining(tree: Mapping[str, object]) -> str:
    """Return advice for the user, in sentences, on a model file without affine_map: what wrote it, and how to get one
    with it.

    `tree` is the dict that the file holds.
    """
    if "checkpoint_version" in tree or "args" in tree:  # what Megatron's own save_checkpoint adds
        return (
            "It is of Megatron-DeepSpeed, which says by patterns of names alone how ranks cut a weight. Make a "
            "universal checkpoint of it (ds_to_universal.py), start Megatron with --universal-checkpoint and "
            "--tensor-model-parallel-size 1 from that, and save: that save is read."
        )
    return (
        "An AutoTP job of DeepSpeed before 0.19 wrote it, or another program that cuts weights by itself. Load it once "
        "with DeepSpeed 0.19 or newer in the same job, and save: that save is read, if the job is one of AutoTP."
    )


def count_map_ranks(stored: object) -> int:
    """Return the number of tensor-parallel ranks in `stored`, a parameter's entry of affine_map; 0 if it has another
    form."""
    ranks = stored.get("ranks") if isinstance(stored, dict) else None
    return len(ranks) if isinstance(ranks, dict) else 0


def read_sub_param_sizes(info: Mapping[str, object]) -> dict[str, list[int]]:
    """Return {pattern of a parameter: sizes of the matrices that are concatenated in it, along the dimension that is
    cut}.

    `info` is universal_checkpoint_info of a save, which lists them under parameter_with_sub_params. Entries of another
    form are left out.
    """
    out: dict[str, list[int]] = {}
    listed = info.get("parameter_with_sub_params")
    for entry in listed if isinstance(listed, list) else ():
        shape, axis, patterns = (
            entry.get(k) if isinstance(entry, dict) else None for k in ("shape", "partition_dim", "patterns")
        )
        if not isinstance(shape, (list, tuple)) or type(axis) is not int or not isinstance(patterns, list):
            continue
        sizes = shape[axis] if 0 <= axis < len(shape) else None
        if isinstance(sizes, (list, tuple)) and all(type(n) is int for n in sizes):
            out |= {p: list(sizes) for p in patterns if isinstance(p, str)}
    return out


def _is_plain_data(x: object) -> bool:
    """Return whether a value consists of numbers, texts, None, lists, tuples and dicts alone."""
    if isinstance(x, (list, tuple, dict)):
        return all(map(_is_plain_data, x)) and (not isinstance(x, dict) or all(map(_is_plain_data, x.values())))
    return x is None or type(x) in (bool, int, float, str)


def make_whole_piece(ranks: Sequence[int], shape: tuple[int, ...]) -> ParameterPiece:
    """Return the one piece of a tensor that is not cut: all of it, on each of these ranks."""
    start = (0,) * len(shape)
    return ParameterPiece((start, shape), dict.fromkeys(ranks, start))


def parse_parameter_map(stored: object, ranks: int, what: str) -> ParameterCut:
    """Parse a parameter's entry of affine_map into the boxes that the ranks hold.

    Args:
        stored: the entry, as unpickled.
        ranks: the number of tensor-parallel ranks.
        what: how errors name the parameter.

    Raises:
        Corrupt: the entry has another form, or is for another number of ranks.
        Unsupported: a piece is scaled or is not a box, or the pieces do not cover the parameter, or a rank's part of
            it, exactly once.
    """
    try:
        shape = _parse_sizes(_get_entry(stored, "logical_shape"))
        by_rank = _get_entry(stored, "ranks")
        if not isinstance(by_rank, Mapping) or sorted(map(int, by_rank)) != list(range(ranks)):
            raise Corrupt(
                f"{what}: affine_map is of ranks {short(by_rank)}, and files are of {ranks}.", code="CKPT0409"
            )
        of_ranks = {int(r): x for r, x in by_rank.items()}
        parts = [_parse_sizes(_get_entry(of_ranks[r], "shard_shape")) for r in range(ranks)]
        listed = [(r, p) for r in range(ranks) for p in _get_entry(of_ranks[r], "pieces")]
        found: dict[Box, dict[int, tuple[int, ...]]] = {}
        stated: dict[Box, set[tuple[int, ...]]] = {}
        own: list[list[Box]] = [[] for _ in range(ranks)]
        for rank, piece in listed:
            size = _parse_sizes(_get_entry(piece, "shape"))
            if 0 in size:
                continue
            if piece.get("scale", 1.0) != 1.0:
                raise Unsupported(
                    f"{what}: rank {rank} holds it times {short(piece['scale'])}, and no division undoes that exactly.",
                    code="CKPT0325",
                )
            here, there = (
                _find_start(_get_entry(piece, k), s, size) for k, s in (("source", shape), ("dest", parts[rank]))
            )
            if here is None or there is None or rank in found.get((here, size), ()):
                raise Unsupported(f"{what}: a piece of rank {rank} is no box of it: {short(piece)}.", code="CKPT0325")
            found.setdefault((here, size), {})[rank] = there
            stated.setdefault((here, size), set()).add(_parse_sizes(_get_entry(piece, "locations")))
            own[rank].append((there, size))
    except (TypeError, ValueError, LookupError, AttributeError) as e:
        raise Corrupt(f"{what}: its affine_map has another form than DeepSpeed's ({e}).", code="CKPT0406") from None
    for box, held in found.items():
        if stated[box] != {tuple(sorted(held))}:
            raise Corrupt(
                f"{what}: ranks {sorted(held)} hold a piece that affine_map says is on {sorted(stated[box])}.",
                code="CKPT0406",
            )
    problems = [(f"the part of rank {r}", boxes.find_cover_problem(parts[r], own[r])) for r in range(ranks)]
    for whose, why in [("the whole", boxes.find_cover_problem(shape, list(found))), *problems]:
        if why is not None:
            raise Unsupported(
                f"{what}: the pieces of affine_map do not cover {whose} exactly once: {why}.", code="CKPT0325"
            )
    return ParameterCut(shape, parts, [ParameterPiece(box, held) for box, held in found.items()])


def cut_for_ranks(cut: ParameterCut, ranks: int, subs: Sequence[int] | None, heads: int | None) -> ParameterCut | str:
    """Cut a parameter for another number of ranks, as an engine of that size would.

    Args:
        cut: how the ranks of a save share it.
        ranks: the number of tensor-parallel ranks to cut it for.
        subs: the sizes of the matrices that are concatenated in it, along the dimension that is cut; None: it is one.
        heads: the number of key-value heads of the model; None: not known.

    Returns:
        The cut, or, as text for an error, the reason why it does not follow from `cut`.
    """
    if len(cut.parts) == ranks:
        return cut
    if cut.is_whole:
        return ParameterCut(cut.shape, [cut.shape] * ranks, [make_whole_piece(range(ranks), cut.shape)])
    axis = next(d for d, n in enumerate(cut.shape) if any(p[d] != n for p in cut.parts))
    sizes = list(subs or [cut.shape[axis]])
    before, after = (cut_equally(cut.shape, axis, sizes, n) for n in (len(cut.parts), ranks))
    if before is None or sorted(before.pieces) != sorted(cut.pieces):
        return f"{len(cut.parts)} ranks have other than equal parts of it"
    if after is None:
        return f"{' + '.join(map(str, sizes))} is not divided by {ranks}"
    if len(cut.parts) % ranks and heads is None:
        return f"an engine of {ranks} ranks cuts it by the key-value heads of the model"
    if len(cut.parts) % ranks and heads is not None and heads % ranks:
        return f"{ranks} ranks cannot have as many of {heads} key-value heads each"
    return after


def cut_equally(shape: tuple[int, ...], axis: int, sizes: Sequence[int], ranks: int) -> ParameterCut | None:
    """Cut a parameter into equal parts, one for each rank.

    Args:
        shape: its shape.
        axis: the dimension that is cut.
        sizes: the sizes along it of the matrices that are concatenated in the parameter; each matrix is cut by itself.
        ranks: the number of ranks.

    Returns:
        The cut; None if the sizes do not add up to the parameter's, or `ranks` does not divide them.
    """
    if sum(sizes) != shape[axis] or any(n % ranks for n in sizes):
        return None

    def at(n: int, rest: tuple[int, ...]) -> tuple[int, ...]:
        """Return `rest` with `n` along the dimension that is cut."""
        return (*rest[:axis], n, *rest[axis + 1 :])

    zero, pieces = (0,) * len(shape), list[ParameterPiece]()
    first = held = 0
    for n in (size // ranks for size in sizes):
        pieces += [ParameterPiece((at(first + r * n, zero), at(n, shape)), {r: at(held, zero)}) for r in range(ranks)]
        first, held = first + n * ranks, held + n
    return ParameterCut(shape, [at(shape[axis] // ranks, shape)] * ranks, pieces)


def build_universal_info(info: Mapping[str, object], cuts: Mapping[str, ParameterCut]) -> dict[str, object]:
    """Return universal_checkpoint_info of a save for other tensor-parallel ranks.

    Args:
        info: that of the save from which the cuts are derived; its lists of patterns hold for any number of ranks.
        cuts: {parameter: how the ranks share it}.

    Raises:
        Corrupt: `info` has an entry that is not plain data.
    """
    if odd := next((k for k, x in info.items() if not _is_plain_data((k, x))), None):
        raise Corrupt(
            f"{INFO} has an entry {short(odd)} that is no plain data, and DeepSpeed writes no such thing.",
            code="CKPT0406",
        )
    params = {make_parameter_pattern(name): encode_cut(cut) for name, cut in cuts.items()}
    out = {**info, "affine_map": {"version": 1, "params": params}}
    if isinstance(widths := info.get("sub_param_shard_widths"), dict):
        of_pattern = {make_parameter_pattern(n): c for n, c in cuts.items()}
        out["sub_param_shard_widths"] = {p: _list_sub_param_widths(of_pattern[p]) for p in widths if p in of_pattern}
    return out


def encode_cut(cut: ParameterCut) -> dict[str, Any]:
    """Return the entry of one parameter in DeepSpeed's affine_map (see the top of this module): {"logical_shape",
    "ranks": {rank: {"shard_shape", "pieces"}}}."""
    by_rank = {}
    for r, part in enumerate(cut.parts):
        mine = sorted((held[r], box, sorted(held)) for box, held in cut.pieces if r in held)
        pieces = [_encode_piece(cut.shape, part, box, at, ranks) for at, box, ranks in mine]
        by_rank[r] = {"shard_shape": list(part), "pieces": pieces}
    return {"logical_shape": list(cut.shape), "ranks": by_rank}


def _encode_piece(
    shape: tuple[int, ...], part: tuple[int, ...], box: Box, held: tuple[int, ...], ranks: list[int]
) -> dict[str, object]:
    """Return a piece of a rank as affine_map stores it.

    Args:
        shape: the shape of the parameter.
        part: the shape of the rank's part of it.
        box: (start, shape) of the piece in the parameter.
        held: the start of the piece in the rank's part.
        ranks: all ranks that hold the piece.
    """
    return {
        "shape": list(box[1]),
        "source": [boxes.flat_start(shape, box[0]), list(boxes.strides(shape))],
        "dest": [boxes.flat_start(part, held), list(boxes.strides(part))],
        "locations": ranks,
    }


def _list_sub_param_widths(cut: ParameterCut) -> list[list[int]]:
    """Return how much of each concatenated matrix of a parameter each rank holds: [[width on each rank] for each
    matrix]."""
    axis = next((d for d, n in enumerate(cut.shape) if any(p[d] != n for p in cut.parts)), 0)
    by_rank = [[box[1][axis] for box, held in sorted(cut.pieces) if r in held] for r in range(len(cut.parts))]
    return [list(of_one) for of_one in zip(*by_rank, strict=True)]


def _get_entry(tree: Any, key: str) -> Any:
    """Return the value under `key` in `tree`, a dict from a pickle; raise KeyError or TypeError if there is none."""
    return tree[key]


def _parse_sizes(x: Sequence[object]) -> tuple[int, ...]:
    """Return a list of integers from 0 on as a tuple; raise ValueError for anything else."""
    if not isinstance(x, (list, tuple)) or len(x) > 64 or not all(type(n) is int and n >= 0 for n in x):
        raise ValueError(f"{short(x)} is no list of sizes")
    return tuple(n for n in x if type(n) is int)


def _find_start(place: Any, shape: tuple[int, ...], size: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the start of a piece in a row-major tensor; None if the piece is not a box of that tensor.

    Args:
        place: [offset, strides] of the piece in the tensor's storage, in elements.
        shape: the shape of the tensor.
        size: the shape of the piece.
    """
    at, steps = place
    steps, rows = _parse_sizes(steps), boxes.strides(shape)
    if not len(steps) == len(size) == len(shape) or 0 in shape:
        return None
    start = []
    for k, n, step, row in zip(size, shape, steps, rows, strict=True):
        first, at = divmod(at, row)
        if first + k > n or (k > 1 and step != row):
            return None
        start.append(first)
    return None if at else tuple(start)
