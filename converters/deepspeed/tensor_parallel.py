"""Saves of tensor-parallel ranks: each has files of its own, which are read as a save by itself; here the parts are put
together into whole weights, masters and moments.

DeepSpeed's AutoTP writes into every model file how each parameter is cut (tensor_cuts.py). Copies that several ranks
hold have to be equal. Moments are cut like their parameter. What is no parameter (buffers, steps) is whole on every
rank. Ranks are numbered with the tensor-parallel rank first: rank 3 of TP 2 x DP 2 is mp_rank_01 of zero_pp_rank_1.

Sources: deepspeed 0.19.8, module_inject/layers.py (collect_autotp_universal_checkpoint_info), runtime/engine.py
(_save_checkpoint), utils/groups.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ckpttool.errors import Corrupt, Unsupported
from ckpttool.formats.pickles import short
from ckpttool.index.checkpoint import Checkpoint, Chunks, OtherCopy, Replica, TensorEntry, same_value
from ckpttool.index.fqns import EXTRA_STATE, strip_wrappers
from ckpttool.layouts import Place, ReadOptions

from ..rank_files import find_differing_file
from .files import File, read_tied_names
from .module_state import SaveReader
from .tensor_cuts import (
    INFO,
    ParameterCut,
    advise_joining,
    make_parameter_pattern,
    make_whole_piece,
    parse_parameter_map,
)

__all__ = ["read_tensor_ranks"]

#: Keys on which all tensor-parallel ranks of one save agree.
_SAME = ("global_steps", "skipped_steps", "dp_world_size", "mp_world_size", "buffer_names", INFO)


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
    maps = _read_affine_map(first.where, models[0][0])
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


def _read_affine_map(where: str, model: File) -> dict[str, object]:
    """Return affine_map of a model file: {pattern of a parameter: its entry, as unpickled}.

    `where` is the path of the save, for errors.

    Raises:
        Unsupported: the file has none, or one of another version than 1.
    """
    info = model.tree.get(INFO)
    stated = info.get("affine_map") if isinstance(info, dict) else None
    if stated is None:
        raise Unsupported(
            f"{where}: some files are written by model parallel rank 1, and {model.what} has no affine_map, by which "
            f"DeepSpeed's AutoTP says since 0.19 how the ranks' parts are joined. {advise_joining(model.tree)}",
            code="CKPT0325",
        )
    if not isinstance(stated, dict) or stated.get("version") != 1 or not isinstance(stated.get("params"), dict):
        version = short(stated.get("version") if isinstance(stated, dict) else stated)
        raise Unsupported(f"{model.what}: an affine_map of version {version}; 1 is read.", code="CKPT0325")
    found: dict[str, object] = stated["params"]
    return found


def _refuse_mixed_ranks(where: str, models: list[list[File]]) -> None:
    """Refuse tensor-parallel ranks whose model files are from different saves; `models` is [model files of each rank].

    Raises:
        Corrupt: the ranks have different numbers of files, or a rank's counters, world sizes, buffers or
            universal_checkpoint_info differ from rank 0's.
    """
    if any(len(m) != len(models[0]) for m in models):
        raise Corrupt(f"{where}: the model parallel ranks have different numbers of files.", code="CKPT0402")
    odd = find_differing_file({key: m[0].tree.get(key) for key in _SAME} for m in models)
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
        info = model.tree[INFO]
        refused = info.get("autotp_unsupported_parameter_patterns")
        self.info: dict[str, object] = info
        self.refused = refused if isinstance(refused, dict) else {}
        listed = model.tree.get("buffer_names")
        names = [n for n in model.tree["module"] if isinstance(n, str)]
        clean = strip_wrappers(dict.fromkeys(names))
        self.buffers = {clean.get(n, n) for n in listed or ()}
        aliases = read_tied_names([model])
        #: {name in the index: the pattern that the map of the parameter is stored under}
        self.patterns = {clean.get(n, n): make_parameter_pattern(aliases.get(n, n)) for n in names}
        self.stored = maps
        self.maps: dict[str, ParameterCut] = {}
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
            lost = [n for n in own if n not in p.tensors and not self._has_empty_part(rank, own[n].parameter)]
            if odd := [*lost, *(p.tensors.keys() - own.keys())]:
                has = 0 if odd[0] in own else rank
                raise Corrupt(
                    f'{self.where}: model parallel rank {has} has "{odd[0]}", and rank {rank - has} has not. The files '
                    "are from different saves; fetch all of one save again.",
                    code="CKPT0409",
                )
        others = [o for p in self.parts for o in p.others] + self._check_shared_values()
        tensors = {
            n: self._join_tensor(n, [p.tensors.get(n) for p in self.parts]) if n in own else t
            for n, t in first.tensors.items()
        }
        replicas, self.replicas = self.replicas, []  # the rounded weights go nowhere: their copies are not compared
        rounded = {
            n: self._join_tensor(n, [p.rounded.get(n) for p in self.parts])
            for n, t in first.rounded.items()
            if all(n in p.rounded or self._has_empty_part(r, t.parameter) for r, p in enumerate(self.parts))
        }
        values = {n: v for n, v in first.values.items() if v.path[:2] != ("extra", INFO)}
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
            tensor_parallel=self.info,
        )
        out.notes = [
            *dict.fromkeys(n for p in self.parts for n in p.notes),
            f"the parts of {len(self.parts)} tensor parallel ranks are joined by the affine_map of the save; what is "
            "written for jobs without such ranks has whole weights",
        ]
        return out

    def _join_tensor(self, name: str, column: list[TensorEntry | None]) -> TensorEntry:
        """Join the ranks' parts of a weight, or of a slot of the optimizer; return the whole tensor.

        Args:
            name: the name of the tensor.
            column: the part of each rank; None where a rank has none.

        Raises:
            Corrupt: the parts differ in dtype, or have other shapes than affine_map states.
            Unsupported: it is a parameter without an entry in affine_map, or the entry's pieces do not cover it exactly
                once.
        """
        there = [t for t in column if t is not None and t.numel] or [t for t in column if t is not None]
        first = there[0]
        if odd := next((t for t in there if t.dtype != first.dtype), None):
            raise Corrupt(
                f'{self.where}: "{name}" is {first.dtype} on one model parallel rank and {odd.dtype} on another. The '
                "files are from different saves.",
                code="CKPT0409",
            )
        how = self._find_cut(first)
        if how is None or (first.slot is not None and first.shape in ((), (1,)) and first.shape not in how.parts):
            holders = [r for r, t in enumerate(column) if t is not None]
            how = ParameterCut(first.shape, [first.shape] * len(column), [make_whole_piece(holders, first.shape)])
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

    def _has_empty_part(self, rank: int, parameter: str) -> bool:
        """Return whether a rank's part of a parameter has no elements, so that the rank's optimizer does not list
        it."""
        pattern = self.patterns.get(parameter, "")
        return pattern in self.stored and 0 in self._parse_entry(pattern, parameter).parts[rank]

    def _parse_entry(self, pattern: str, parameter: str) -> ParameterCut:
        """Return the cut of the parameter `parameter`, whose entry in affine_map has the key `pattern`; it is parsed
        only once."""
        if pattern not in self.maps:
            self.maps[pattern] = parse_parameter_map(
                self.stored[pattern], len(self.parts), f'{self.where}: "{parameter}"'
            )
        return self.maps[pattern]

    def _find_cut(self, t: TensorEntry) -> ParameterCut | None:
        """Return how the tensor-parallel ranks share the parameter to which a tensor belongs, which is a weight or an
        optimizer slot; None for a tensor of no parameter, such as a buffer.

        Raises:
            Unsupported: it is a parameter's, and affine_map has no entry for that.
        """
        parameter = t.parameter
        pattern = self.patterns.get(parameter, make_parameter_pattern(parameter))
        if pattern in self.stored:
            return self._parse_entry(pattern, parameter)
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

    def _check_shared_values(self) -> list[OtherCopy]:
        """Check that all ranks have rank 0's param groups, steps and loss scaler; return the copies of extra states
        that differ.

        Raises:
            Corrupt: a rank has another value than rank 0.
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
                    a = [p for p in a if not self._has_empty_part(rank, p)]
                if same_value(a, b) or (v.is_optimizer_state and b is None and self._has_empty_part(rank, v.parameter)):
                    continue
                if v.component != "model":
                    raise Corrupt(
                        f'{self.where}: "{n}" is {short(b)} on model parallel rank {rank} and {short(a)} on rank 0. '
                        "The files are from different saves; fetch all of one save again.",
                        code="CKPT0409",
                    )
                out.append(OtherCopy(n, rank, 0))
        return out
