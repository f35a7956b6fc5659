"""nanotron: a step folder in which every tensor of the model is a file of its own that says which boxes it holds.

    10/model/<path of the module>/model_<name>_pp-rank-{p}-of-{P}_tp-rank-{t}-of-{T}.safetensors    a rank's part, one
        tensor "data"
    10/model/<path of the module>/model_<name>.safetensors       a tensor that is not cut
    10/optimizer/optimizer_config.json                           type, sizes; with ZeRO-1 each rank's flat ranges and
                                                                 local shapes
    10/optimizer/optimizer_pp-{p}-of-{P}[_dp-{d}-of-{D}]_tp-{t}-of-{T}_exp-0-of-1.pt   {"state", "param_groups",
        "names", "gradient_accumulator"}
    10/lr_scheduler/lr_scheduler.pt, 10/random/tp-{t}-of-{T}_dp-{d}-of-{D}_pp-{p}-of-{P}.pt
    10/checkpoint_metadata.json                                  {"version", "tp", "dp", "metas": {"last_train_step",
                                                                 ...}}

The header of a part has "unsharded_shape" and "local_global_slices_pairs": "local#global;local#global", each a slice a
dimension, "start,stop,step|...". With numpy 2, nanotron writes "(np.int64(16), 6)" for a shape, which it cannot read
itself. The optimizer has the parts of the model; with ZeRO-1 a data-parallel rank has a flat range of its part. The
fp32 copies of bf16 weights are in "gradient_accumulator" and become extra.master.<name>. Experts on ranks of their own
are refused.

Sources: nanotron/serialize/{weights,optimizer,metadata,utils,random}.py, optim/zero.py, parallel/parameters.py of 0.4;
fixtures/nanotron, which those wrote (fixtures/nanotron_jobs.py).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any, NamedTuple

from ckpttool import bounded_json
from ckpttool.by_fields import ByFields
from ckpttool.errors import Corrupt, Unsupported
from ckpttool.formats import safetensors_header, stored_tensors, torch_zip
from ckpttool.formats.pickles import Opaque
from ckpttool.formats.stored_tensors import StoredTensor
from ckpttool.index import boxes
from ckpttool.index.checkpoint import (
    ITEMSIZE,
    Checkpoint,
    Chunks,
    Path,
    Replica,
    TensorEntry,
    Value,
    joined,
    make_per_rank_path,
)
from ckpttool.index.records import Records
from ckpttool.layouts import Layout, Place, ReadOptions
from ckpttool.program import Advice, Program, SeenFolder, Unfinished
from ckpttool.storage.source import Source

from .rank_files import refuse_incomplete_tensor

__all__ = ["LAYOUTS"]

_META = "checkpoint_metadata.json"
_WEIGHT = re.compile(r"model_(?P<name>.+?)(?:_pp-rank-(?P<pp>\d+)-of-\d+_tp-rank-(?P<tp>\d+)-of-\d+)?\.safetensors")
_OPTIMIZER = re.compile(
    r"optimizer_pp-(?P<pp>\d+)-of-\d+(?:_dp-(?P<dp>\d+)-of-\d+)?_tp-(?P<tp>\d+)-of-\d+(?:_exp-\d+-of-(?P<experts>\d+))?\.pt"
)
_RANDOM = re.compile(r"tp-(?P<tp>\d+)-of-(?P<T>\d+)_dp-(?P<dp>\d+)-of-(?P<D>\d+)_pp-(?P<pp>\d+)-of-(?P<P>\d+)\.pt")
#: What a file of the optimizer holds that is read.
_OF_OPTIMIZER = frozenset(("state", "param_groups", "names", "gradient_accumulator"))
_MOST_JSON, _MOST_DEPTH = 256 << 20, 64


class _Box(NamedTuple):
    """Elements at `local` of a rank's tensor that are at `start` of the whole."""

    local: tuple[int, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]


class _Held(NamedTuple):
    """A box of a tensor that begins at a byte of a file, with its strides in elements; the box's `local` counts from
    there."""

    file: int
    offset: int
    strides: tuple[int, ...]
    box: _Box


class _Part(NamedTuple):
    """What one rank has of a parameter."""

    shape: tuple[int, ...]  # of the whole
    local: tuple[int, ...]
    held: tuple[_Box, ...]


@dataclass(eq=False, repr=False)
class _OptimizerState(ByFields):
    """What the optimizer's files hold together, while they are read.

    `ranges` is param_name_to_dp_rank_offsets of optimizer_config.json: {parameter: {data parallel rank: flat range}}.
    `held` and `dtypes` are of each (parameter, slot), "" for its fp32 copy; `steps` (value, leaf) of numbers that all
    ranks have. `slots` are the names of each parameter's slots, `groups` (hyperparameters, names of the parameters),
    `unnamed` the numbers of groups with a parameter without a name.
    """

    ranges: dict[str, Any]
    held: dict[tuple[str, str], list[_Held]] = field(default_factory=dict)
    dtypes: dict[tuple[str, str], str] = field(default_factory=dict)
    steps: dict[tuple[str, str], tuple[object, object]] = field(default_factory=dict)
    slots: dict[str, set[str]] = field(default_factory=dict)
    groups: list[tuple[dict[str, Any], dict[str, None]]] = field(default_factory=list)
    unnamed: dict[int, None] = field(default_factory=dict)


def detect(where: Place) -> tuple[bool, str]:
    """Return whether a place is a folder with checkpoint_metadata.json and model/, and the reason as text."""
    if where.file is not None:
        return False, "a folder; this is a file"
    names = where.source.list()
    if _META not in names:
        return False, f"no {_META}"
    return "model" in names, f"has {_META} and model/" if "model" in names else f"{_META}, but no model/"


def read(where: Place, options: ReadOptions) -> Checkpoint:
    """Return the index of a step folder.

    Raises:
        Corrupt: a part is missing, or parts overlap. Unsafe: a pickle would run code. Unsupported: the job had expert
            parallelism.
    """
    reading = _Reading(where.source, options.allow_equal_ranks)
    reading.read_model()
    if options.only is None or options.only - {"model"}:
        reading.read_rest()
    if options.only is None or options.only & {"optim", "extra"}:  # which has the fp32 masters
        reading.read_optimizer()
    return reading.checkpoint()


def _iterate_files_below(source: Source, folder: str, depth: int = 0) -> Iterator[str]:
    """Yield the paths of all files below a folder. `depth` is the number of folders between model/ and it.

    Raises:
        Corrupt: folders are nested too deep.
    """
    if depth > _MOST_DEPTH:
        raise Corrupt(f"{source.root}/{folder}: folders in folders, more than {_MOST_DEPTH}.", code="CKPT0406")
    for name in source.list(folder):
        path = f"{folder}/{name}"
        if source.glance(path)[0]:
            yield from _iterate_files_below(source, path, depth + 1)
        else:
            yield path


@dataclass(eq=False, repr=False)
class _Reading(ByFields):
    """The index of a step folder while it is read."""

    source: Source
    allow_equal_ranks: bool
    files: list[str] = field(default_factory=list)
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    values: dict[str, Value] = field(default_factory=dict)
    records: Records = field(default_factory=Records)
    notes: list[str] = field(default_factory=list)
    replicas: list[Replica] = field(default_factory=list)
    parts: dict[tuple[str, int, int], _Part] = field(default_factory=dict)  # (name, pp, tp) of parameters that are cut
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    world: int | None = None
    ranks: dict[int, int] = field(default_factory=dict)  # {number of a file: its rank}

    def number(self, name: str) -> int:
        """Add a file to the index, and return its number."""
        self.files.append(name)
        return len(self.files) - 1

    def checkpoint(self) -> Checkpoint:
        """Return the index of what was read."""
        out = Checkpoint(
            "nanotron",
            self.source.root,
            self.world,
            self.files,
            [self.source.size(f) for f in self.files],
            self.tensors,
            self.values,
            trainer="nanotron",
        )
        out.records, out.ranks, out.notes = self.records, self.ranks, self.notes
        out.replicas = self.replicas
        return out

    def read_model(self) -> None:
        """Read the weights, each of one or several files.

        Raises:
            Corrupt: there are none, or the parts of one do not make it up.
        """
        found: dict[str, list[tuple[int, safetensors_header.Slot, _Part]]] = {}
        for path in sorted(_iterate_files_below(self.source, "model")):
            folder, _, file = path.partition("/")[2].rpartition("/")
            m = _WEIGHT.fullmatch(file)
            if m is None:
                continue
            name = ".".join([*(folder.split("/") if folder else []), m["name"]])
            slots, about = safetensors_header.read_header(self.source, path)
            if "data" not in slots:
                raise Corrupt(
                    f'{self.source.root}/{path} has no tensor "data", which nanotron writes.', code="CKPT0412"
                )
            number, slot = self.number(path), slots["data"]
            part = self._parse_file_part(path, slot.shape, about)
            if m["pp"] is not None:
                self.parts[name, int(m["pp"]), int(m["tp"])] = part
            found.setdefault(name, []).append((number, slot, part))
            for other, extra in slots.items():  # "_no_weight_decay" of Mamba
                if other != "data":
                    at: Path = ("extra", "parameters", name, other)
                    self.tensors.setdefault(
                        joined(at),
                        TensorEntry(
                            extra.dtype, extra.shape, at, Chunks.whole(extra.shape, number, extra.offset, extra.length)
                        ),
                    )
        if not found:
            raise Corrupt(
                f"{self.source.root}/model has no model_*.safetensors. The copy is incomplete; fetch the folder again.",
                code="CKPT0401",
            )
        for name, rows in found.items():
            shape, dtype = rows[0][2].shape, rows[0][1].dtype
            if any((part.shape, slot.dtype) != (shape, dtype) for _, slot, part in rows):
                raise Corrupt(
                    f'{self.source.root}: the parts of "{name}" are of different shapes or dtypes. They are from '
                    "different saves.",
                    code="CKPT0409",
                )
            self.shapes[name] = shape
            self._assemble_tensor(
                ("model", name),
                dtype,
                shape,
                [_Held(n, slot.offset, boxes.strides(part.local), b) for n, slot, part in rows for b in part.held],
            )

    def _parse_file_part(self, path: str, local: tuple[int, ...], about: Mapping[str, str]) -> _Part:
        """Return which part of a weight a file holds, from the metadata of its header.

        Args:
            path: the file.
            local: shape of the tensor in it.
            about: metadata of its header.

        Raises:
            Corrupt: the header does not say it.
        """
        if "local_global_slices_pairs" not in about:
            return _Part(local, local, (_Box((0,) * len(local), (0,) * len(local), local),))
        try:
            shape = tuple(int(n) for n in re.findall(r"\d+", about["unsharded_shape"].replace("np.int64", "")))
            held = []
            for pair in about["local_global_slices_pairs"].split(";"):
                ours, theirs = (
                    [_parse_slice(s, n) for s, n in zip(side.split("|"), sizes, strict=True)]
                    for side, sizes in zip(pair.split("#"), (local, shape), strict=True)
                )
                if any(b - a != d - c for (a, b), (c, d) in zip(ours, theirs, strict=True)):
                    raise ValueError(f"slices of different sizes in {pair}")
                held.append(_Box(tuple(a for a, _ in ours), tuple(c for c, _ in theirs), tuple(b - a for a, b in ours)))
        except (LookupError, ValueError) as e:
            raise Corrupt(
                f"{self.source.root}/{path}: its header does not say which part of a tensor it is ({e}).",
                code="CKPT0406",
            ) from None
        return _Part(shape, local, tuple(held))

    def _assemble_tensor(self, path: Path, dtype: str, shape: tuple[int, ...], held: list[_Held]) -> None:
        """Assemble a tensor from the boxes that ranks hold, and add it to the index. Of equal boxes the first one is
        used, and the others are replicas of it.

        Args:
            path: its canonical path.
            dtype: its dtype.
            shape: its shape.
            held: the boxes, with their places in files.

        Raises:
            Corrupt: the parts leave gaps or overlap.
        """
        chunks = Chunks(len(shape))
        seen: dict[tuple[tuple[int, ...], tuple[int, ...]], TensorEntry] = {}
        for file, offset, strides, box in held:
            if not prod(box.shape):
                continue
            at = offset + ITEMSIZE[dtype] * sum(a * s for a, s in zip(box.local, strides, strict=True))
            length = boxes.span(box.shape, strides) * ITEMSIZE[dtype]
            stored = None if boxes.is_row_major(box.shape, strides) else strides
            piece = TensorEntry(dtype, box.shape, path, Chunks.whole(box.shape, file, at, length, stored))
            if (first := seen.setdefault((box.start, box.shape), piece)) is piece:
                chunks.add(box.start, box.shape, file, at, length, stored)
            else:  # of another tensor-parallel rank
                self.replicas.append(Replica(joined(path), self.ranks.get(file, 0), first, piece))
        refuse_incomplete_tensor(self.source, joined(path), shape, chunks)
        self.tensors[joined(path)] = TensorEntry(dtype, shape, path, chunks)

    # ------------------------------------------------------------------------------------------------- the optimizer

    def read_optimizer(self) -> None:
        """Read the optimizer state of all ranks, if there are files with it.

        Raises:
            Corrupt: a file is missing or damaged, or parts do not fit. Unsupported: the job had expert parallelism.
        """
        names = sorted(n for n in self.source.list("optimizer") if _OPTIMIZER.fullmatch(n))
        if not names:
            return
        file = "optimizer/optimizer_config.json"
        config = self._read_json_file(file)
        sizes = self._get_object(file, config, "parallelism")
        if sizes.get("expert_parallel_size", "1") != "1":
            raise Unsupported(
                f"{self.source.root}: experts on {sizes['expert_parallel_size']} ranks of their own, of whose weights "
                "nanotron's files do not tell the expert. Save with expert_parallel_size=1.",
                code="CKPT0325",
            )
        ranges = self._get_object(file, self._get_object(file, config, "configs"), "param_name_to_dp_rank_offsets")
        _, dps, tps = self._check_ranks(names, sizes, bool(ranges))
        state = _OptimizerState(ranges)
        self.source.prefetch_ends(f"optimizer/{n}" for n in names)
        for file in names:
            m = _OPTIMIZER.fullmatch(file)
            assert m is not None
            number, tree = self._read_torch_file(f"optimizer/{file}")
            self.ranks[number] = (int(m["pp"]) * dps + int(m["dp"] or 0)) * tps + int(m["tp"])
            try:
                self._add_optimizer_file(state, m, number, tree)
            except (KeyError, TypeError, AttributeError, ValueError, IndexError) as e:
                raise Corrupt(
                    f"{self.source.root}/optimizer/{file}: not what nanotron saves ({type(e).__name__}: {e}).",
                    code="CKPT0406",
                ) from None
        for (name, slot), held in state.held.items():
            path: Path = ("optim", "state", name, slot) if slot else ("extra", "master", name)
            self._assemble_tensor(path, state.dtypes[name, slot], self.shapes[name], held)
        for (name, slot), (_, leaf) in state.steps.items():
            self._add_leaf(("optim", "state", name, slot), leaf)
        self._add_param_groups(state.groups, state.unnamed)

    def _add_optimizer_file(self, state: _OptimizerState, m: re.Match[str], number: int, tree: dict[str, Any]) -> None:
        """Add what a rank's file of the optimizer holds to `state`, and what is neither a slot nor a param group to the
        index.

        Args:
            state: what the files read before hold.
            m: the match of `_OPTIMIZER` with the name of the file.
            number: number of the file.
            tree: its content.

        Raises:
            Corrupt: the rank has another step. KeyError, TypeError, AttributeError, ValueError, IndexError: the file is
                not as nanotron saves it, or contradicts others.
        """
        called = {k: self._to_model_name(str(n)) for k, n in tree["names"].items()}
        for k, name in called.items():
            if (own := set(tree["state"].get(k, {}))) != state.slots.setdefault(name, own):
                raise ValueError(f"{name} has {sorted(own)}, elsewhere {sorted(state.slots[name])}")
        for key in (k for k in tree if k not in _OF_OPTIMIZER):
            self._add_leaves(("extra", *make_per_rank_path(self.ranks[number], ("optim", str(key)))), number, tree[key])
        rows = [(called[k], slot, x) for k, slots in tree["state"].items() for slot, x in slots.items()]
        rows += [(self._to_model_name(str(n)), "", x) for n, x in (tree.get("gradient_accumulator") or {}).items()]
        for name, slot, x in rows:
            if not isinstance(x, StoredTensor) or not x.shape:
                self._add_replicated_number(state.steps, name, slot, number, x)
                continue
            flat = state.ranges.get(name, state.ranges.get(f"module.{name}"))
            bounds = (int(flat[m["dp"]][0]), int(flat[m["dp"]][1])) if flat is not None else None
            if state.dtypes.setdefault((name, slot), x.dtype) != x.dtype:
                raise ValueError(f"{name} {slot} is {x.dtype}, elsewhere {state.dtypes[name, slot]}")
            state.held.setdefault((name, slot), []).extend(
                self._find_slot_boxes(name, int(m["pp"]), int(m["tp"]), number, x, bounds)
            )
            self.records += x.storage.records(number)
        for i, group in enumerate(tree["param_groups"]):
            hyper = {k: v for k, v in group.items() if k != "params"}
            if i == len(state.groups):
                state.groups.append((hyper, {}))
            elif state.groups[i][0] != hyper:
                self.notes.append(
                    f"ranks differ in param group {i}; that of the first file is kept, not that of {m[0]}"
                )
            state.groups[i][1].update(dict.fromkeys(called[k] for k in group["params"] if k in called))
            if any(k not in called for k in group["params"]):
                state.unnamed[i] = None

    def _add_param_groups(self, groups: list[tuple[dict[str, Any], dict[str, None]]], unnamed: Iterable[int]) -> None:
        """Add the param groups to the index.

        Args:
            groups: for each param group, {hyperparameter: value}, and the names of its parameters as keys of a dict.
            unnamed: the numbers of the param groups in which some parameters have no name, for a note.

        Raises:
            Corrupt: a parameter is in two groups.
        """
        listed = Counter(name for _, members in groups for name in members)
        if twice := [name for name, count in listed.items() if count > 1]:
            raise Corrupt(
                f'{self.source.root}/optimizer: "{twice[0]}" is in one param group in the file of one rank and in '
                "another in that of another. They are from different saves; fetch the files of one save.",
                code="CKPT0409",
            )
        if numbers := ", ".join(map(str, unnamed)):
            self.notes.append(
                f"param group {numbers} has parameters without optimizer state; nanotron does not save their names, so "
                "the group does not list them"
            )
        for i, (hyper, members) in enumerate(groups):
            for key, data in {**hyper, "params": list(members)}.items():
                self._add_leaf(("optim", "param_groups", i, key), data)

    def _find_slot_boxes(
        self, name: str, pp: int, tp: int, number: int, x: StoredTensor, bounds: tuple[int, int] | None
    ) -> Iterator[_Held]:
        """Yield the boxes of a slot (a state of one parameter, such as exp_avg) that one file holds: the rank's part of
        the parameter, or a flat range of that part.

        Args:
            name: name of the parameter.
            pp: pipeline parallel rank.
            tp: tensor parallel rank.
            number: number of the file.
            x: the tensor in it.
            bounds: (first element, end) of the range in the flattened part; None: the file has all of the part.

        Raises:
            ValueError: the tensor has another shape than the part or the range.
        """
        shape = self.shapes[name]
        whole = _Part(shape, shape, (_Box((0,) * len(shape), (0,) * len(shape), shape),))
        part = self.parts.get((name, pp, tp), whole)
        if bounds is None:
            if x.shape != part.local:
                raise ValueError(f"{name} is {x.shape} here, and {part.local} in the model")
            for box in part.held:
                yield _Held(number, x.extent[0], x.strides, box)
            return
        if x.shape != (bounds[1] - bounds[0],) or not x.contiguous or bounds[1] > prod(part.local):
            raise ValueError(
                f"{name} has {x.shape} elements here, and optimizer_config.json says {bounds} of {part.local}"
            )
        for start, size in boxes.flat_to_boxes(part.local, *bounds):
            at = x.extent[0] + ITEMSIZE[x.dtype] * (boxes.flat_start(part.local, start) - bounds[0])
            for box in part.held:
                if (met := boxes.intersect((start, size), (box.local, box.shape))) is not None:
                    inside = tuple(a - b for a, b in zip(met[0], start, strict=True))
                    there = tuple(g + a - b for g, a, b in zip(box.start, met[0], box.local, strict=True))
                    yield _Held(number, at, boxes.strides(size), _Box(inside, there, met[1]))

    def _to_model_name(self, name: str) -> str:
        """Return the model's name of a parameter that the optimizer names, with or without "module.".

        Raises:
            ValueError: the model does not have it.
        """
        for found in (name, name.removeprefix("module.")):
            if found in self.shapes:
                return found
        raise ValueError(f"the optimizer has {name}, which the model does not have")

    def _check_ranks(self, names: list[str], sizes: Mapping[str, object], zero: bool) -> list[int]:
        """Return [pipeline, data, tensor parallel size] of the job, after a check that each rank has an optimizer file.

        Their product, the world size, is stored in `self.world`.

        Args:
            names: names of the optimizer's files.
            sizes: the numbers by optimizer_config.json, under "pp_size", "dp_size" and "tp_size"; a missing one is 1.
            zero: whether data parallel ranks have files of their own.

        Raises:
            Corrupt: a file is missing, or the config has no numbers.
        """
        there = {(m["pp"], m["dp"], m["tp"]) for n in names if (m := _OPTIMIZER.fullmatch(n))}
        said = [str(sizes.get(f"{k}_size", "1")) for k in ("pp", "dp", "tp")]
        if not all(re.fullmatch(r"[1-9][0-9]{0,5}", n) for n in said):
            raise Corrupt(
                f"{self.source.root}/optimizer/optimizer_config.json: {', '.join(said)[:80]} are no numbers of ranks.",
                code="CKPT0406",
            )
        many = [int(n) for n in said]
        self.world = prod(many)
        for pp, dp, tp in product(*map(range, many)):
            if (str(pp), str(dp) if zero else None, str(tp)) not in there and (zero or not dp):
                raise Corrupt(
                    f"{self.source.root}/optimizer has no file of pp {pp}, dp {dp}, tp {tp}, and optimizer_config.json "
                    f"says that the job had {many[0]}, {many[1]} and {many[2]} of them. The copy is incomplete; fetch "
                    "the folder again.",
                    code="CKPT0402",
                )
        return many

    def _add_replicated_number(
        self, steps: dict[tuple[str, str], tuple[object, object]], name: str, slot: str, number: int, x: object
    ) -> None:
        """Add a number that all ranks have (the step) to `steps`, or compare it with the one that is there.

        Args:
            steps: {(parameter, slot): (value of the number, leaf of the index)} so far.
            name: name of the parameter.
            slot: name of its state, such as "step".
            number: number of the file.
            x: the number in the file, as a tensor or a value.

        Raises:
            Corrupt: ranks have different numbers.
        """
        what = f"{self.source.root}/{self.files[number]}"
        found = stored_tensors.inline_tensors(x, self.source.reader_of(self.files[number]), what)
        leaf = found
        if isinstance(x, StoredTensor):
            leaf = TensorEntry(x.dtype, (), ("optim", "state", name, slot), Chunks.whole((), number, *x.extent))
            self.records += x.storage.records(number)
        first, _ = steps.setdefault((name, slot), (found, leaf))
        if first != found:
            raise Corrupt(
                f'{what}: "{name}" has another {slot} than in the files of other ranks. They are from different steps; '
                "fetch the files of one save.",
                code="CKPT0409",
            )

    # -------------------------------------------------------------------------------------------------------- the rest

    def read_rest(self) -> None:
        """Read counters, scheduler and random states.

        Raises:
            Corrupt: a file is damaged. Unsafe: its pickle would run code.
        """
        found = self._read_json_file(_META)
        for key, data in self._get_object(_META, found, "metas").items():
            self._add_leaf(("trainer", "step" if key == "last_train_step" else key), data)
        for key in (k for k in found if k != "metas"):
            self._add_leaf(("extra", "nanotron", key), found[key])
        if self.source.exists("lr_scheduler/lr_scheduler.pt"):
            number, tree = self._read_torch_file("lr_scheduler/lr_scheduler.pt")
            self._add_leaves(("scheduler",), number, tree)
        files = [m for n in sorted(self.source.list("random")) if (m := _RANDOM.fullmatch(n))]
        self.source.prefetch_ends(f"random/{m[0]}" for m in files)
        for m in files:
            number, tree = self._read_torch_file(f"random/{m[0]}")
            rank = (int(m["pp"]) * int(m["D"]) + int(m["dp"])) * int(m["T"]) + int(m["tp"])
            self._add_leaves(("rng", str(rank)), number, _to_plain_dicts(tree))

    def _read_torch_file(self, file: str) -> tuple[int, Any]:
        """Add a file of torch.save to the index, and return (its number, its unpickled content)."""
        what, read_at, size = f"{self.source.root}/{file}", self.source.reader_of(file), self.source.size(file)
        self.notes += torch_zip.refuse_file_of_other_rank(read_at, size, what, self.allow_equal_ranks)
        return self.number(file), torch_zip.read(read_at, 0, size, what)

    def _read_json_file(self, file: str) -> dict[str, Any]:
        """Add a JSON file to the index, and return the object in it.

        Raises:
            Corrupt: it holds something else.
        """
        found = bounded_json.parse(self.source.read_all(file, _MOST_JSON), f"{self.source.root}/{file}")
        self.number(file)
        if not isinstance(found, dict):
            raise Corrupt(f"{self.source.root}/{file} is not what nanotron writes.", code="CKPT0406")
        return found

    def _get_object(self, file: str, found: dict[str, object], key: str) -> dict[str, Any]:
        """Return the object under a key in a JSON file; {} if the key is missing or null.

        Args:
            file: name of the file, for the message.
            found: content of the file.
            key: the key.

        Raises:
            Corrupt: something else is under the key.
        """
        inner = found.get(key)
        if not isinstance(inner, dict | None):
            raise Corrupt(f'{self.source.root}/{file}: "{key}" is no object, which nanotron writes.', code="CKPT0406")
        return inner or {}

    def _add_leaves(self, path: Path, number: int, tree: object) -> None:
        """Add the leaves of a nested value in file number `number` to the index, below a path."""
        what = f"{self.source.root}/{self.files[number]}"
        found, records = stored_tensors.read_leaves(tree, path, number, self.source.reader_of(self.files[number]), what)
        self.records += records
        for at, leaf in found.items():
            self._add_leaf(at, leaf)

    def _add_leaf(self, path: Path, leaf: object) -> None:
        """Add a tensor or a value to the index at a path.

        Raises:
            Corrupt: there is one already.
        """
        if (name := joined(path)) in self.tensors or name in self.values:
            raise Corrupt(f'{self.source.root}: two entries of its files are named "{name}".', code="CKPT0416")
        if isinstance(leaf, TensorEntry):
            self.tensors[name] = leaf
        else:
            self.values[name] = Value(path, leaf)


def _parse_slice(text: str, n: int) -> tuple[int, int]:
    """Return (start, stop) of "4,8,None" or "None,None,None" along a dimension of length `n`.

    Raises:
        ValueError: it is no slice of that dimension, or has steps.
    """
    start, stop, step = (None if x == "None" else int(x) for x in text.split(","))
    a, b = start or 0, n if stop is None else stop
    if step not in (None, 1) or not 0 <= a <= b <= n:
        raise ValueError(f"the slice {text} of {n}")
    return a, b


def _to_plain_dicts(x: object) -> object:
    """Return the content of a file of random states, with nanotron's RandomStates and RandomState replaced by their
    dicts."""
    if isinstance(x, Opaque) and x.cls.module == "nanotron.random" and isinstance(x.state, dict):
        return _to_plain_dicts(x.state.get("_dict", x.state))
    return {k: _to_plain_dicts(v) for k, v in x.items()} if isinstance(x, dict) else x


def _describe_next_step(advice: Advice) -> str:
    """Return advice: nanotron resumes; and the command that converts the checkpoint to dcp."""
    return f"resumes in nanotron; for a job of torch's own: {advice.convert('--to dcp -n RANKS')}"


def _find_unfinished_save(folder: SeenFolder) -> Unfinished | None:
    """Return the evidence that a save did not finish: a folder has the optimizer's config and no
    checkpoint_metadata.json. None otherwise."""
    begun = folder.layout is None and "optimizer" in folder.names
    if begun and "optimizer_config.json" in folder.source.list("optimizer"):
        return Unfinished(f"no {_META}, which nanotron writes last")
    return None


#: Its rows in the tables of the documents (docs/_hooks.py).
_ROWS = {
    "readme-trainers": (
        (
            "[nanotron](docs/how-to/trainers/nanotron.md) (**nanotron**)",
            "tensor and pipeline parallel, ZeRO-0 and 1",
            "yes",
            "yes",
            "yes",
            "none saved",
        ),
    ),
    "layouts": (
        (
            "**nanotron**",
            (
                "nanotron's step folders: a file for every part of a tensor, tensor and pipeline parallel; "
                "optimizer of ZeRO-0 and ZeRO-1, fp32 copies, scheduler, RNG of every rank; not experts on ranks of "
                "their own"
            ),
            "not written",
        ),
    ),
    "directories": (
        (
            "nanotron's step folders",
            "`nanotron`",
            (
                "weights of tensor and pipeline parallel ranks, optimizer (ZeRO-0 and 1), fp32 copies, scheduler, "
                "RNG of every rank"
            ),
        ),
    ),
    "resumed": (
        (
            "nanotron",
            "yes",
            "not written",
            "yes",
            "yes",
            "of every rank",
            "nanotron saves none",
        ),
    ),
}
LAYOUTS = (
    Layout(
        name="nanotron",
        title="directory of nanotron",
        detect=detect,
        read=read,
        reader_uses=(),
        writer_uses=(),
        of_trainer=True,
        program=Program(rows=_ROWS, next_step=_describe_next_step, unfinished=_find_unfinished_save, step_word=""),
    ),
)
