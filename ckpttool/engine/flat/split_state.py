"""A training state taken apart for engines that keep flat tensors (DeepSpeed, FSDP1): they want to know what a state
dict does not say outright.

    groups    the optimizer's param groups: FQNs of trainable parameters in its order, and hyperparameters
    frozen    parameters that are not trained        buffers   tensors that are no parameters
    tied      {alias: owner}                         slots     {FQN: {"exp_avg": tensor of the parameter's shape}}
    scalars   {FQN: {"step": number or 0-dim tensor}}
    extra_states   {FQN: what the module's get_extra_state() gave}
    rest      everything else as one tree under its own keys, the scheduler and the loss scaler apart

What is a parameter: what the param groups list. A listed parameter without state, where others have some, was frozen
(AdamW(model.parameters()) lists frozen ones too), unless the next job is known to train it. Others: integers and bool
are buffers, so is what `buffer_names` (DeepSpeed's own list, carried along) lists; floating-point ones are frozen
parameters when their name ends in weight or bias, when they have three dimensions or more (fused experts) or, where
there is no optimizer, when nothing speaks against it; else buffers. Tied weights: names with the same bytes in the
file, or, beside an optimizer that has one of the two, matrices with equal digests.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from ...errors import Corrupt, Unsupported, argument
from ...formats.stored_tensors import Inline, flatten_tree
from ...index.checkpoint import ITEMSIZE, Checkpoint, Path, TensorEntry, Value, joined, tied_weights
from ...index.draft import Dropped
from ...index.fqns import EXTRA_STATE, split_extra_state
from ...index.names import (
    CANONICAL_KEYS_NOTE,
    are_own_keys_readable,
    describe_weights_elsewhere,
    original_path,
)
from ...index.trees import nest
from ...storage.buffers import IOBudget
from ...storage.source import Source
from ..copy.stream import Reader, StreamJob, read_small_tensors
from ..copy.tensor_digests import tensor_digests

__all__ = [
    "DEEPSPEED_COUNTERS",
    "TRAINED_ALONE",
    "ParamGroup",
    "Training",
    "find_shared_scalars",
    "list_group_values",
    "list_plain_model_values",
    "split_training_state",
    "tensors_of",
]


#: Plain data, in dicts and lists; in what is not written into a pickle as it is, leaves may be a TensorEntry.
Tree = Any


class ParamGroup(NamedTuple):
    """One param group: its trainable parameters in order, its hyperparameters."""

    params: tuple[str, ...]
    options: dict[str, Tree]


@dataclass
class Training:
    """See the module; all names are FQNs, without "model."."""

    tensors: dict[str, TensorEntry]  # the model, in its order
    groups: list[ParamGroup]
    frozen: list[str]
    buffers: list[str]
    tied: dict[str, str]
    slots: dict[str, dict[str, TensorEntry]]
    scalars: dict[str, dict[str, Tree]]
    fresh: list[str] = field(default_factory=list)  # trained, without state although others have some
    extra_states: dict[str, Tree] = field(default_factory=dict)  # leaves: plain data or TensorEntry
    #: tensors of one element that pickles hold as they are, by canonical name
    inlined: dict[str, Value] = field(default_factory=dict)
    scheduler: Tree = None  # a dict or a list, None where there is none
    scaler: dict[str, Tree] = field(default_factory=dict)
    rest: dict[str, Tree] = field(default_factory=dict)  # leaves: plain data or TensorEntry
    dropped: list[Dropped] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def counter(self, *keys: str) -> int | None:
        """Return the value of the first of these top-level keys of `rest` that is an integer; None where none is."""
        for key in keys:
            found = self.rest.get(key)
            if type(found) is int:
                return found
        return None


#: How param groups change that are written for an engine.
TRAINED_ALONE = "param groups list the parameters that an engine trains, and no names besides"


def list_group_values(groups: Iterable[ParamGroup]) -> dict[str, Value]:
    """Return {canonical name: value} of all options and parameter lists of param groups, under the names that a reader
    gives them, such as "optim.param_groups.0.lr"; {} if there are no groups."""
    trees = [{**g.options, "params": list(g.params)} for g in groups]
    found = flatten_tree(trees, ("optim", "param_groups")) if trees else {}
    return {joined(p): Value(p, x) for p, x in found.items()}


def split_training_state(ckpt: Checkpoint, source: Source, trained: Iterable[str] | None = None) -> Training:
    """Split a state into what engines keep separately: weights, param groups, optimizer slots, counters, and the rest.

    Args:
        ckpt, source: the index of the checkpoint, and its files.
        trained: FQNs that the next job trains, so that one of them without state is not taken for frozen; None if
            unknown.

    Raises:
        Unsupported: there are no weights, or the optimizer has parameters that the model lacks or groups without any.
        Corrupt: the param groups list a parameter twice, or bytes are damaged.
    """
    model = {t.local_name: t for t in ckpt.tensors.values() if t.component == "model"}
    extra_states = _collect_extra_states(ckpt)
    model = {n: t for n, t in model.items() if (split_extra_state(n) or (n, ""))[1] == ""}
    if not model:
        raise Unsupported(
            "the checkpoint holds no model weights; an engine cannot start from the rest "
            f"alone.{describe_weights_elsewhere(ckpt)}",
            code="CKPT0317",
        )
    out = Training(model, [], [], [], {}, {}, {}, extra_states=extra_states)
    out.dropped += [
        Dropped(n, 0, "neither a tensor nor the extra state of a module") for n in list_plain_model_values(ckpt)
    ]
    _fill_in_optimizer(ckpt, source, out)
    _fill_in_rest(ckpt, out)
    _classify_tensors(ckpt, source, out, frozenset(trained or ()))
    return out


def list_plain_model_values(ckpt: Checkpoint) -> list[str]:
    """List the names of values in the model's state dict that are no extra state of a module."""
    return [
        n for n, v in ckpt.values.items() if v.component == "model" and split_extra_state(joined(v.path[1:])) is None
    ]


def _collect_extra_states(ckpt: Checkpoint) -> dict[str, Tree]:
    """Return {FQN of a module's extra state: its data}; the data are nested dicts and lists with TensorEntry for
    tensors.

    An extra state that is a single tensor is left out: it stays in the model, like a buffer.
    """
    found: dict[str, dict[Path, Tree]] = {}
    for path, leaf in _iterate_leaves(ckpt):
        split = split_extra_state(joined(path[1:])) if path[0] == "model" else None
        if split is None or (not split[1] and isinstance(leaf, TensorEntry)):
            continue
        fqn, rest = split
        # with the keys that are dicts and lists in the state dict, where the source told
        at = original_path(path, ckpt.origin)
        place = next((k for k, key in enumerate(at) if str(key).endswith(EXTRA_STATE)), None)
        inside = at[place + 1 :] if place is not None else tuple(rest.split(".") if rest else ())
        found.setdefault(fqn, {})[inside] = leaf
    return {fqn: nest(leaves) for fqn, leaves in found.items()}


def _iterate_leaves(ckpt: Checkpoint) -> Iterator[tuple[Path, Tree]]:
    """Yield (path, leaf) of everything in a state; the leaf is the TensorEntry of a tensor or the plain data of a
    value."""
    yield from ((t.path, t) for t in ckpt.tensors.values())
    yield from ((v.path, v.data) for v in ckpt.values.values())


def tensors_of(tree: object) -> Iterator[TensorEntry]:
    """Yield the tensors in nested dicts and lists, or `tree` itself if it is a tensor; other leaves are skipped."""
    if isinstance(tree, TensorEntry):
        yield tree
    elif isinstance(tree, (dict, list)):
        for x in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors_of(x)


def _fill_in_optimizer(ckpt: Checkpoint, source: Source, out: Training) -> None:
    """Fill in the groups, slots (tensors with the shape of their parameter) and scalars of the optimizer in `out`;
    everything else of the optimizer goes into `out.dropped`.

    Raises:
        Unsupported: there are param groups, and none lists parameters.
    """
    groups: dict[int, dict[Path, Tree]] = {}  # {number: {path in the group: hyperparameter}}
    params: dict[int, list[str]] = {}
    scalars: list[str] = []  # tensors of one element, which are read
    for name, v in ckpt.values.items():
        if v.option is not None:
            i = v.group
            groups.setdefault(i, {})
            if v.option == "params":
                params[i] = list(v.data)
            elif v.option != "param_names":  # the names themselves, which `params` holds
                groups[i][v.path[3:]] = v.data
        elif v.is_optimizer_state and len(v.path) == 4:
            out.scalars.setdefault(v.parameter, {})[str(v.path[3])] = v.data
        elif v.component == "optim":
            out.dropped.append(Dropped(name, 0, "neither state of a parameter nor a param group"))
    # tensors: those of the shape of their parameter are slots
    for name, t in ckpt.tensors.items():
        if t.component != "optim":
            continue
        if t.option is not None and t.numel == 1:  # a learning rate may be a tensor
            option = Inline(t.dtype, t.shape, read_small_tensors(ckpt, source, [name])[name])
            groups.setdefault(t.group, {})[t.path[3:]] = option
            out.inlined[name] = Value(t.path, option)
            continue
        if t.path[1] != "state" or len(t.path) != 4:
            out.dropped.append(Dropped(name, t.nbytes, "neither state of a parameter nor a param group"))
            continue
        fqn, slot = t.parameter, str(t.path[3])
        if not t.shape and (slot == "step" or fqn not in out.tensors or out.tensors[fqn].shape):
            scalars.append(name)
        elif fqn in out.tensors and t.shape == out.tensors[fqn].shape:
            out.slots.setdefault(fqn, {})[slot] = t
        else:
            out.dropped.append(
                Dropped(name, t.nbytes, "not of the shape of its parameter, so no part of a flat tensor")
            )
    # tensors of one element are read, since engines keep them as numbers beside the flat tensors
    for name, data in read_small_tensors(ckpt, source, scalars).items():
        t = ckpt.tensors[name]
        scalar = Inline(t.dtype, (), data)
        out.scalars.setdefault(t.parameter, {})[str(t.path[3])] = scalar
        out.inlined[name] = Value(t.path, scalar)
    if groups and not params and (out.slots or out.scalars):
        raise Unsupported(
            "The param groups list no parameters, so no job can tell which hyperparameters are whose. Leave the "
            f"optimizer out with {argument('only', ['model'])}, or write dcp or full, which keep it as it is.",
            code="CKPT0316",
        )
    if groups or params:
        count = max([*groups, *params]) + 1
        out.groups = [ParamGroup(tuple(params.get(i, ())), nest(groups.get(i, {}))) for i in range(count)]
        out.groups = [g._replace(options=g.options if isinstance(g.options, dict) else {}) for g in out.groups]
    elif out.slots or out.scalars:
        out.groups = [ParamGroup(tuple(n for n in out.tensors if n in out.slots or n in out.scalars), {})]
        out.notes.append("the optimizer has no param groups; all its parameters make one, without hyperparameters")


#: Counters of a DeepSpeed engine.
DEEPSPEED_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
#: What DeepSpeed has at the top of its files, and other layouts have under extra or under a key of their trainer.
_OF_DEEPSPEED = {("extra", "ds_config"), ("extra", "buffer_names"), *(("trainer", k) for k in DEEPSPEED_COUNTERS)}


def _fill_in_rest(ckpt: Checkpoint, out: Training) -> None:
    """Fill in `out` with the scheduler, the loss scaler, and everything else that is neither model nor optimizer."""
    leaves: dict[Path, Tree] = {}
    places: dict[Path, Path] = {}  # {canonical path: the path in the trainer's tree}
    scheduler: dict[Path, Tree] = {}
    others: dict[str, None] = {}  # further optimizers
    for path, data in _iterate_leaves(ckpt):
        if path[0] in ("model", "optim"):
            continue
        if path[0] == "scheduler" and len(path) > 1 and not isinstance(path[1], int):
            scheduler[path[1:]] = data
        elif path[0] == "scaler" and len(path) == 2 and "scaler.cur_scale" in ckpt.values:
            out.scaler[str(path[1])] = data
        else:
            leaves[path] = data
            places[path] = path[1:] if path[:2] in _OF_DEEPSPEED else original_path(path, ckpt.origin)
            if path[0] == "extra" and "param_groups" in path:
                others[joined(path[1 : path.index("param_groups")])] = None
    out.scheduler = nest(scheduler) if scheduler else None
    # data that was beside a component of its kind ("rng_state" beside "rng") would be that component without it
    of_trainer = {path: place for path, place in places.items() if path[:2] not in _OF_DEEPSPEED}
    if not are_own_keys_readable(of_trainer):
        places |= {path: path for path in of_trainer}
        out.notes.append(CANONICAL_KEYS_NOTE)
    if leaves:
        out.rest = nest({places[path]: data for path, data in leaves.items()})
    if others:
        out.notes.append(
            f"optimizers that are not that of the model are kept, and no engine loads them: {_list_some(list(others))}"
        )


def _classify_tensors(ckpt: Checkpoint, source: Source, out: Training, told: frozenset[str]) -> None:
    """Fill in `out` with frozen parameters, buffers and tied weights, and remove frozen parameters from the groups.

    Args:
        told: FQNs that the next job trains; empty if unknown.

    Raises:
        Corrupt: the groups list a parameter twice.
        Unsupported: the groups list a parameter that the model lacks.
    """
    _check_groups(out)
    listed_buffers = out.rest.get("buffer_names")
    if isinstance(listed_buffers, list) and all(isinstance(n, str) for n in listed_buffers):
        del out.rest["buffer_names"]
    else:
        listed_buffers = None
    idle = _remove_idle_parameters(out, told)
    trained = {n for g in out.groups for n in g.params}
    _drop_state_of_untrained(out, trained)
    out.tied = _find_tied(ckpt, source, out, trained)

    # what is left are buffers and frozen parameters; without an optimizer, a parameter is what may be one
    buffers = set(listed_buffers or ())
    guessed: list[str] = []
    for n, t in out.tensors.items():
        if n in trained or n in out.tied:
            continue
        like_parameter = len(t.shape) > 2 or re.search(r"(^|[._])(weight|bias)$", n) or (not out.groups and t.shape)
        if n in buffers or not _is_floating(t.dtype):
            out.buffers.append(n)
        elif listed_buffers is not None or n in idle or (like_parameter and not _STATISTIC.search(n)):
            out.frozen.append(n)
        else:
            out.buffers.append(n)
            guessed.append(n)
    if guessed:
        out.notes.append(f"taken for buffers, since no optimizer trains them: {_list_some(guessed)}")
    if not out.groups:
        out.groups, out.frozen = [ParamGroup(tuple(out.frozen), {})], []
        out.notes.append(
            "without optimizer state: its param group has no hyperparameters, load it without optimizer states"
        )


def _check_groups(out: Training) -> None:
    """Check that the param groups list each parameter once, and only parameters that the model has.

    Raises:
        Corrupt: they list one twice.
        Unsupported: they list one that the model lacks.
    """
    counts = Counter(n for g in out.groups for n in g.params)
    if twice := [n for n, k in counts.items() if k > 1]:
        raise Corrupt(
            f'the param groups list "{twice[0]}" {counts[twice[0]]} times; a parameter is in one group only.',
            code="CKPT0417",
        )
    if missing := sorted(counts.keys() - out.tensors.keys()):
        raise Unsupported(
            f'the optimizer has {len(missing)} parameters that the model does not have, first "{missing[0]}"; an '
            "engine would not find their weights. Are the two of one training run?",
            code="CKPT0330",
        )


def _remove_idle_parameters(out: Training, told: frozenset[str]) -> set[str]:
    """Remove from the groups the parameters that have no elements, or no state where others have some, and return their
    FQNs.

    Args:
        told: FQNs that the next job trains; those without state stay in their groups and go into `out.fresh`.
    """
    listed = [n for g in out.groups for n in g.params]
    stateful = out.slots.keys() | out.scalars.keys()
    without = [n for n in listed if n not in stateful] if stateful else []
    out.fresh = [n for n in without if n in told]
    idle = [n for n in without if n not in told]
    empty = [n for n in listed if not out.tensors[n].numel and n not in idle]
    have = " or ".join([*(["no state"] if idle else []), *(["no elements"] if empty else [])])
    idle += empty
    if idle:
        out.groups = [g._replace(params=tuple(n for n in g.params if n not in set(idle))) for g in out.groups]
        out.notes.append(
            f"{len(idle)} parameters of the optimizer have {have} and are taken for frozen: {_list_some(idle)}"
        )
    return set(idle)


def _drop_state_of_untrained(out: Training, trained: set[str]) -> None:
    """Move the state of parameters that are not in `trained`, the parameters that a group lists, to `out.dropped`, with
    the reason."""
    for n in sorted((out.slots.keys() | out.scalars.keys()) - trained):
        slots = [*out.slots.pop(n, {}), *out.scalars.pop(n, {})]
        empty = n in out.tensors and not out.tensors[n].numel
        why = "its parameter has no elements" if empty else "no param group lists its parameter"
        out.dropped += [Dropped(f"optim.state.{n}.{slot}", 0, why) for slot in slots]


_STATISTIC = re.compile(r"(^|\.)(running_mean|running_var|num_batches_tracked|inv_freq|[^.]*_table|[^.]*_mask)$")


def _is_floating(dtype: str) -> bool:
    """Tell whether a dtype, by its torch name, is one of floating-point numbers."""
    return "float" in dtype


def _list_some(names: list[str]) -> str:
    """List the first four names, for a note."""
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


def _find_tied(ckpt: Checkpoint, source: Source, out: Training, trained: set[str]) -> dict[str, str]:
    """Return {alias: owner} of tied weights, both names without "model.".

    Weights are tied if they have one place in the files. If some parameters are trained, an untrained matrix with the
    same bytes as a trained one counts as tied, too; the bytes are read for that.

    Args:
        trained: FQNs of the parameters that a param group lists; empty without an optimizer. Of tied weights, the first
            of these is the owner, or else the first in the order of the model.
    """
    pairs = tied_weights(out.tensors)
    if trained:  # a state dict that stores both of a tied pair has them as two tensors with the same bytes
        pairs.update(_find_equal_matrices(ckpt, source, out, trained, pairs))
    sets: dict[str, list[str]] = {}  # first name of each -> all names
    for n in out.tensors:
        root = n
        while root in pairs:
            root = pairs[root]
        sets.setdefault(root, []).append(n)
    tied: dict[str, str] = {}
    for names in sets.values():
        owner = next((n for n in names if n in trained), names[0])
        tied.update({n: owner for n in names if n != owner and n not in trained})
    return tied


def _find_equal_matrices(
    ckpt: Checkpoint, source: Source, out: Training, trained: set[str], known: dict[str, str]
) -> dict[str, str]:
    """Return {name: trained name} of matrices that are not trained and have the same bytes as one that is.

    Args:
        trained: FQNs of the parameters that a group lists.
        known: {name: another name of the same bytes}; these are passed over.
    """
    sharing = known.keys() | set(known.values())
    kinds: dict[tuple[tuple[int, ...], str], list[str]] = {}  # {(shape, dtype): trained matrices}

    @cache
    def head(n: str) -> bytes | None:
        return _read_first_bytes(ckpt, source, n)

    matrices = {n: t for n, t in out.tensors.items() if len(t.shape) > 1 and _is_floating(t.dtype)}
    for n, t in matrices.items():
        if n in trained:
            kinds.setdefault((t.shape, t.dtype), []).append(n)
    # equal shapes and first bytes make candidates; then all of their bytes are compared
    candidates: dict[str, list[str]] = {}
    for n, t in matrices.items():
        if n not in trained and n not in sharing:
            candidates[n] = [o for o in kinds.get((t.shape, t.dtype), ()) if head(n) == head(o)]
    wanted = {n for n, others in candidates.items() if others for n in (n, *others)}
    digests = tensor_digests(
        {n: out.tensors[n] for n in wanted}, source, ckpt.files, ckpt.records, lambda *_: None, "compare"
    )
    found = {}
    for n, others in candidates.items():
        same = next((o for o in others if digests[n] == digests[o]), None)
        if same is not None and _has_several_values(ckpt, source, n):
            found[n] = same
    return found


def _read_first_bytes(ckpt: Checkpoint, source: Source, fqn: str) -> bytes | None:
    """Read the first elements of a weight, four at most, and return their bytes; None where one read cannot give them.

    Args:
        fqn: the weight, without "model.".
    """
    c = ckpt.tensors[f"model.{fqn}"].chunks
    for k in range(len(c)):
        row = c[k]
        if not any(row.start) and row.strides is None and row.zstd is None and row.extent.length:
            head: bytes = source.read(ckpt.files[row.extent.file], row.extent.offset, min(64, row.extent.length))
            return head[: ITEMSIZE[ckpt.tensors[f"model.{fqn}"].dtype] * min(4, row.shape[-1])]
    return None


def _has_several_values(ckpt: Checkpoint, source: Source, fqn: str) -> bool:
    """Tell whether the elements of a weight are not all equal: two weights of zeros are equal without being tied.

    Args:
        fqn: the weight, without "model.".
    """
    t = ckpt.tensors[f"model.{fqn}"]
    item = ITEMSIZE[t.dtype]
    seen: set[bytes] = set()
    for block in Reader(source, ckpt.files, None, IOBudget(1, 256 << 10)).blocks([StreamJob(fqn, t)]):
        if len(seen) < 2:
            data = bytes(block.data[: 64 << 10])
            seen.update(data[i : i + item] for i in range(0, len(data), item))
    return len(seen) > 1


def find_shared_scalars(training: Training, params: Iterable[str], what: str) -> tuple[dict[str, Tree], list[Dropped]]:
    """Find one value of each optimizer scalar (such as "step") for all parameters in a flat tensor.

    Args:
        params: the FQNs of the parameters in the flat tensor.
        what: why there can be only one value, for the reasons: "a sub-group of ZeRO-3 has one step".

    Returns:
        ({slot: the value that most of the parameters have}, the entries that are dropped). Dropped are the values of
        parameters that have another one; all values of a slot that some parameters lack, since a reader would find it
        for these, too; and what is neither a tensor nor a number.
    """
    fresh = set(training.fresh)
    names = [n for n in params if n not in fresh]
    out: dict[str, Tree] = {}
    dropped: list[Dropped] = []
    for slot in dict.fromkeys(s for n in names for s in training.scalars.get(n, {})):
        counts: dict[str, list[str]] = {}
        none = [n for n in names if slot not in training.scalars.get(n, {})]
        for n in names:
            if n not in none:
                if not isinstance(training.scalars[n][slot], (int, float, Inline)):
                    why = "neither a tensor nor a number, which is what an engine keeps for a flat tensor"
                    dropped.append(Dropped(f"optim.state.{n}.{slot}", 0, why))
                    continue
                counts.setdefault(repr(training.scalars[n][slot]), []).append(n)
        if not counts:
            continue
        most = max(counts.values(), key=len)
        why = f"{what}; {none[0]} has none" if none else f"{what}; {most[0]} has another"
        if not none:
            out[slot] = training.scalars[most[0]][slot]
        for same in counts.values():
            if none or same is not most:
                dropped += [Dropped(f"optim.state.{n}.{slot}", 0, why) for n in same]
    return out, dropped
