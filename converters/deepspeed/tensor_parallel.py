"""Saves of tensor-parallel ranks: each has files of its own, which are read as a save by itself; here the parts are put
together into whole weights, masters and moments.

DeepSpeed's AutoTP writes into every model file how each parameter is cut:

    universal_checkpoint_info.affine_map    {"version": 1, "params": {"^<FQN, escaped for re>$": map}}
    map     {"logical_shape": [..], "ranks": {rank: {"shard_shape": [..], "pieces": [piece]}}}
    piece   {"shape": [..], "source": [offset, strides], "dest": [offset, strides], "locations": [rank], "scale": 1.0}

`source` and `dest` say where the piece is in the whole parameter and in the rank's, in elements, as torch.as_strided
counts them. `locations` are all ranks that hold it; their copies have to be equal. A rank may hold nothing of a
parameter (shard_shape [0, ..]: more ranks than key-value heads). Moments are cut like their parameter. What is no
parameter (buffers, steps) is whole on every rank. Ranks are numbered with the tensor-parallel rank first: rank 3 of
TP 2 x DP 2 is mp_rank_01 of zero_pp_rank_1.

Sources: deepspeed 0.19.8, checkpoint/affine.py (AffinePiece, ParamAffineMap, replicated_map), module_inject/layers.py
(collect_autotp_universal_checkpoint_info), runtime/engine.py (_save_checkpoint), utils/groups.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ckpttool.errors import Corrupt, Unsupported
from ckpttool.formats.pickles import short
from ckpttool.index import boxes
from ckpttool.index.checkpoint import Checkpoint, Chunks, OtherCopy, Replica, TensorEntry, same_value
from ckpttool.index.fqns import EXTRA_STATE, strip_wrappers
from ckpttool.layouts import Place, ReadOptions

from ..rank_files import first_difference
from .files import File, tied_names
from .module_state import SaveReader

__all__ = ["read_tensor_ranks"]

_INFO = "universal_checkpoint_info"
#: Keys on which all tensor-parallel ranks of one save agree.
_SAME = ("global_steps", "skipped_steps", "dp_world_size", "mp_world_size", "buffer_names", _INFO)

Box = tuple[tuple[int, ...], tuple[int, ...]]


class _Piece(NamedTuple):
    """A box of a parameter, (start, shape), and where it starts in the part of each rank that holds it."""

    box: Box
    held: dict[int, tuple[int, ...]]


class _Map(NamedTuple):
    """How the ranks share a parameter: its shape, the shape of each rank's part, the pieces."""

    shape: tuple[int, ...]
    parts: list[tuple[int, ...]]
    pieces: list[_Piece]


def read_tensor_ranks(
    where: Place, options: ReadOptions, read_rank: Callable[[SaveReader, list[File]], Checkpoint]
) -> Checkpoint:
    """Read a save, the files of each tensor-parallel rank by themselves with `read_rank`, and join the parts.

    Args:
        where: the folder.
        options: what to read, and from which save.
        read_rank: returns the index of one tensor-parallel rank, from its reader and its model files.

    Raises:
        Corrupt: files are missing, or contradict one another.
        Unsupported: nothing says how the parts of a parameter are joined, or they cannot be joined exactly.
    """
    first = SaveReader(where, options)
    models = [first.load_models()]
    if first.tensor_ranks == 1:
        return read_rank(first, models[0])
    maps = _read_maps(first.where, models[0][0])
    readings = [first, *(SaveReader(where, options, beside=first, rank=t) for t in range(1, first.tensor_ranks))]
    models += [r.load_models() for r in readings[1:]]
    _refuse_mixed_ranks(first.where, models)
    for r in readings:
        r.everyone = [f for of_rank in zip(*models, strict=True) for f in of_rank]
    parts = [read_rank(r, m) for r, m in zip(readings, models, strict=True)]
    if any(p.salvage is not None for p in parts):
        raise Unsupported(
            f"{first.where}: files of a tensor parallel save are lost, and what is left cannot be joined. Fetch them.",
            code="CKPT0325",
        )
    return _Joining(first, parts, maps, models[0][0]).join()


def _read_maps(where: str, model: File) -> dict[str, Any]:
    """Return {"^<FQN, escaped>$": map as it is stored} that a model file of a save with several tensor-parallel ranks
    states.

    Raises:
        Unsupported: it states none, or one of a later version.
    """
    info = model.tree.get(_INFO)
    stated = info.get("affine_map") if isinstance(info, dict) else None
    if stated is None:
        raise Unsupported(
            f"{where}: some files are written by model parallel rank 1, and {model.what} has no affine_map, by which "
            "DeepSpeed's AutoTP says since 0.19 how the ranks' parts are joined. Merge the model parallel ranks with "
            "the trainer's own tools first.",
            code="CKPT0325",
        )
    if not isinstance(stated, dict) or stated.get("version") != 1 or not isinstance(stated.get("params"), dict):
        version = short(stated.get("version") if isinstance(stated, dict) else stated)
        raise Unsupported(f"{model.what}: an affine_map of version {version}; 1 is read.", code="CKPT0325")
    found: dict[str, Any] = stated["params"]
    return found


def _refuse_mixed_ranks(where: str, models: list[list[File]]) -> None:
    """Refuse model files of tensor-parallel ranks that are from different saves; `models` has those of each rank.

    Raises:
        Corrupt: with a file of the rank that differs from rank 0.
    """
    if any(len(m) != len(models[0]) for m in models):
        raise Corrupt(f"{where}: the model parallel ranks have different numbers of files.", code="CKPT0402")
    odd = first_difference({key: m[0].tree.get(key) for key in _SAME} for m in models)
    if odd is not None:
        raise Corrupt(
            f"{models[odd[0]][0].what}: {odd[1]} is other than in {models[0][0].what}. The files are from different "
            "saves; fetch all of one save again.",
            code="CKPT0409",
        )


class _Joining:
    """The index of the whole save while it is put together from those of its tensor-parallel ranks."""

    def __init__(self, reading: SaveReader, parts: list[Checkpoint], maps: dict[str, Any], model: File) -> None:
        """Find the map of every parameter.

        Args:
            reading: the reader of rank 0.
            parts: the index of each rank.
            maps: {"^<FQN, escaped>$": map as it is stored}.
            model: a model file of rank 0.
        """
        self.where, self.parts = reading.where, parts
        info = model.tree[_INFO]
        refused = info.get("autotp_unsupported_parameter_patterns")
        self.refused = refused if isinstance(refused, dict) else {}
        listed = model.tree.get("buffer_names")
        names = [n for n in model.tree["module"] if isinstance(n, str)]
        clean = strip_wrappers(dict.fromkeys(names))
        self.buffers = {clean.get(n, n) for n in listed or ()}
        aliases = tied_names([model])
        #: {name in the index: the pattern that the map of the parameter is stored under}
        self.patterns = {clean.get(n, n): f"^{re.escape(aliases.get(n, n))}$" for n in names}
        self.stored = maps
        self.maps: dict[str, _Map] = {}
        self.replicas: list[Replica] = []

    def join(self) -> Checkpoint:
        """Return the index of the whole save.

        Raises:
            Corrupt: a rank lacks what others have, or contradicts them.
            Unsupported: the parts of a parameter cannot be joined.
        """
        first, last = self.parts[0], self.parts[-1]
        own = {n: t for n, t in first.tensors.items() if t.component in ("model", "optim")}
        for rank, p in enumerate(self.parts[1:], 1):
            lost = [n for n in own if n not in p.tensors and not self._has_nothing(rank, own[n].parameter)]
            if odd := [*lost, *(p.tensors.keys() - own.keys())]:
                has = 0 if odd[0] in own else rank
                raise Corrupt(
                    f'{self.where}: model parallel rank {has} has "{odd[0]}", and rank {rank - has} has not. The files '
                    "are from different saves; fetch all of one save again.",
                    code="CKPT0409",
                )
        others = [o for p in self.parts for o in p.others] + self._compare_values()
        tensors = {
            n: self._join_tensor(n, [p.tensors.get(n) for p in self.parts]) if n in own else t
            for n, t in first.tensors.items()
        }
        replicas, self.replicas = self.replicas, []  # the rounded weights go nowhere: their copies are not compared
        rounded = {
            n: self._join_tensor(n, [p.rounded.get(n) for p in self.parts])
            for n, t in first.rounded.items()
            if all(n in p.rounded or self._has_nothing(r, t.parameter) for r, p in enumerate(self.parts))
        }
        values = {n: v for n, v in first.values.items() if v.path[:2] != ("extra", _INFO)}
        world = first.world_size or 1
        out = replace(
            first,
            world_size=world * len(self.parts),
            files=last.files,
            sizes=last.sizes,
            records=last.records,
            ranks=last.ranks,
            tensors=tensors,
            values=values,
            others=others,
            rounded=rounded,
            replicas=replicas,
        )
        out.notes = [
            *first.notes,
            f"the parts of {len(self.parts)} tensor parallel ranks are joined by the affine_map of the save; what is "
            "written from here has whole weights",
        ]
        return out

    def _join_tensor(self, name: str, column: list[TensorEntry | None]) -> TensorEntry:
        """Join what each rank has of a weight, or of a slot of the optimizer; None is nothing.

        Raises:
            Corrupt: a rank's part has another dtype or shape than the map says.
            Unsupported: it is a parameter without a map, or with one that does not cover it exactly once.
        """
        there = [t for t in column if t is not None and t.numel] or [t for t in column if t is not None]
        first = there[0]
        if odd := next((t for t in there if t.dtype != first.dtype), None):
            raise Corrupt(
                f'{self.where}: "{name}" is {first.dtype} on one model parallel rank and {odd.dtype} on another. The '
                "files are from different saves.",
                code="CKPT0409",
            )
        how = self._map_of(first)
        if how is None or (first.slot is not None and first.shape in ((), (1,)) and first.shape not in how.parts):
            holders = [r for r, t in enumerate(column) if t is not None]
            how = _Map(first.shape, [first.shape] * len(column), [_whole_on(holders, first.shape)])
        shapes = [t.shape if t is not None else part for t, part in zip(column, how.parts, strict=True)]
        if shapes != how.parts:
            raise Corrupt(
                f'{self.where}: the parts of "{name}" have the shapes {shapes}, and affine_map says {how.parts}. The '
                "files are from different saves.",
                code="CKPT0412",
            )
        chunks = Chunks(len(how.shape))
        for (start, size), held in how.pieces:
            lowest, *more = sorted(held)
            from ckpttool.engine.handle import cut_chunks  # what it needs is loaded for a save of AutoTP only

            cuts = {r: cut_chunks(t, (held[r], size)) for r, t in enumerate(column) if r in held and t is not None}
            for c in cuts[lowest]:
                home = tuple(a + b for a, b in zip(start, c.start, strict=True))
                chunks.add(home, c.shape, *c.extent, c.strides)
            kept = replace(first, shape=size, chunks=cuts[lowest])
            self.replicas += [Replica(name, r, kept, replace(kept, chunks=cuts[r])) for r in more]
        return replace(first, shape=how.shape, chunks=chunks)

    def _has_nothing(self, rank: int, parameter: str) -> bool:
        """Return whether the part of a parameter that a rank holds is empty, so that its optimizer does not know it."""
        pattern = self.patterns.get(parameter, "")
        return pattern in self.stored and 0 in self._parse(pattern, parameter).parts[rank]

    def _parse(self, pattern: str, parameter: str) -> _Map:
        """Return the map that is stored under a pattern, that of a parameter."""
        if pattern not in self.maps:
            self.maps[pattern] = _parse_map(self.stored[pattern], len(self.parts), f'{self.where}: "{parameter}"')
        return self.maps[pattern]

    def _map_of(self, t: TensorEntry) -> _Map | None:
        """Return how a weight, or the weight that a slot belongs to, is cut; None for what is no parameter.

        Raises:
            Unsupported: it is a parameter without a map.
        """
        parameter = t.parameter
        pattern = self.patterns.get(parameter, f"^{re.escape(parameter)}$")
        if pattern in self.stored:
            return self._parse(pattern, parameter)
        if parameter in self.buffers or parameter not in self.patterns or parameter.rpartition(".")[2] == EXTRA_STATE:
            return None
        why = self.refused.get(pattern)
        raise Unsupported(
            f'{self.where}: affine_map has no map of "{parameter}", so nothing says how the parts of '
            f"{len(self.parts)} model parallel ranks are joined"
            + (f". DeepSpeed says why: {short(why)}" if why else "")
            + ". Merge the ranks with the trainer's own tools first.",
            code="CKPT0325",
        )

    def _compare_values(self) -> list[OtherCopy]:
        """Compare the param groups, the steps and the loss scaler of all ranks with those of rank 0; return the
        differing extra states of modules.

        Raises:
            Corrupt: with the value, and the rank that has another.
        """
        out = []
        first, *others = (
            {n: v for n, v in p.values.items() if v.component in ("model", "optim", "scaler")} for p in self.parts
        )
        for rank, own in enumerate(others, 1):
            for n in dict.fromkeys([*first, *own]):
                a, b = (found[n].data if n in found else None for found in (first, own))
                v = first.get(n) or own[n]
                if v.option == "params" and isinstance(a, list):
                    a = [p for p in a if not self._has_nothing(rank, p)]
                if same_value(a, b) or (v.is_optimizer_state and b is None and self._has_nothing(rank, v.parameter)):
                    continue
                if v.component != "model":
                    raise Corrupt(
                        f'{self.where}: "{n}" is {short(b)} on model parallel rank {rank} and {short(a)} on rank 0. '
                        "The files are from different saves; fetch all of one save again.",
                        code="CKPT0409",
                    )
                out.append(OtherCopy(n, rank, 0))
        return out


def _whole_on(ranks: Sequence[int], shape: tuple[int, ...]) -> _Piece:
    """Return the piece that is all of a tensor, which these ranks have whole."""
    start = (0,) * len(shape)
    return _Piece((start, shape), dict.fromkeys(ranks, start))


def _parse_map(stored: object, ranks: int, what: str) -> _Map:
    """Return the map of a parameter as boxes.

    Args:
        stored: the map as data of the pickle.
        ranks: the number of tensor-parallel ranks.
        what: how errors name the parameter.

    Raises:
        Corrupt: it has another form, or is of another number of ranks.
        Unsupported: a piece is scaled or no box, or the pieces do not cover the parameter, and each part of it, exactly
            once.
    """
    try:
        shape = _ints(_item(stored, "logical_shape"))
        by_rank = _item(stored, "ranks")
        if not isinstance(by_rank, Mapping) or sorted(map(int, by_rank)) != list(range(ranks)):
            raise Corrupt(
                f"{what}: affine_map is of ranks {short(by_rank)}, and files are of {ranks}.", code="CKPT0409"
            )
        of_ranks = {int(r): x for r, x in by_rank.items()}
        parts = [_ints(_item(of_ranks[r], "shard_shape")) for r in range(ranks)]
        listed = [(r, p) for r in range(ranks) for p in _item(of_ranks[r], "pieces")]
        found: dict[Box, dict[int, tuple[int, ...]]] = {}
        stated: dict[Box, set[tuple[int, ...]]] = {}
        own: list[list[Box]] = [[] for _ in range(ranks)]
        for rank, piece in listed:
            size = _ints(_item(piece, "shape"))
            if 0 in size:
                continue
            if piece.get("scale", 1.0) != 1.0:
                raise Unsupported(
                    f"{what}: rank {rank} holds it times {short(piece['scale'])}, and no division undoes that exactly.",
                    code="CKPT0325",
                )
            here, there = (_corner(_item(piece, k), s, size) for k, s in (("source", shape), ("dest", parts[rank])))
            if here is None or there is None or rank in found.get((here, size), ()):
                raise Unsupported(f"{what}: a piece of rank {rank} is no box of it: {short(piece)}.", code="CKPT0325")
            found.setdefault((here, size), {})[rank] = there
            stated.setdefault((here, size), set()).add(_ints(_item(piece, "locations")))
            own[rank].append((there, size))
    except (TypeError, ValueError, KeyError, AttributeError) as e:
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
    return _Map(shape, parts, [_Piece(box, held) for box, held in found.items()])


def _item(tree: Any, key: str) -> Any:
    """Return what a dict of a pickle has under a key; raise KeyError or TypeError if there is none."""
    return tree[key]


def _ints(x: Sequence[object]) -> tuple[int, ...]:
    """Return a list of integers, which are not negative, as a tuple; raise ValueError for anything else."""
    if not isinstance(x, (list, tuple)) or len(x) > 64 or not all(type(n) is int and n >= 0 for n in x):
        raise ValueError(f"{short(x)} is no list of sizes")
    return tuple(n for n in x if type(n) is int)


def _corner(place: Any, shape: tuple[int, ...], size: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return where a piece of `size` begins in a row-major tensor of `shape`, in which it lies at `place`, [offset,
    strides] in elements; None if it is no box of that tensor."""
    at, steps = place
    steps, rows = _ints(steps), boxes.strides(shape)
    if not len(steps) == len(size) == len(shape) or 0 in shape:
        return None
    start = []
    for k, n, step, row in zip(size, shape, steps, rows, strict=True):
        first, at = divmod(at, row)
        if first + k > n or (k > 1 and step != row):
            return None
        start.append(first)
    return None if at else tuple(start)
