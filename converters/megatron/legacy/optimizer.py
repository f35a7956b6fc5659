"""The optimizer in Megatron-LM's files of ranks: whose state everything is, which is stored without names.

    DistributedOptimizer   distrib_optim.pt: {buffer: {(dtype of the weights, of the gradients): {"param", "exp_avg",
                           "exp_avg_sq": 1-D fp32 tensors, "numel_unpadded"}}, "buckets_coalesced": True}, a list of
                           such of chained optimizers (experts have their own), None of one whose ranks write elsewhere.
                           A buffer is the rank's parameters of one chunk of the model and one dtype, the last one
                           first, each at a multiple of 64 elements of its bucket; buckets follow one another without
                           the padding behind each.
    Float16Optimizer...    {"optimizer": {"state": {number: {slot: tensor}}, "param_groups"}, "fp32_from_fp16_params":
                           [[fp32 copies] of each group]}
    FP32Optimizer          {"state": {number: {slot: tensor}}, "param_groups"}

The order is that of Megatron-LM; the proof is in the values: a segment or a copy is the state of the parameter whose
place it has only if, rounded, it is the rank's weight, bit for bit. FP32Optimizer has no copies: there, numbers of
parameters and shapes have to fit Megatron's own rule for its param groups. What candidates not is refused by name.

Sources: megatron/core/optimizer/{distrib_optimizer,optimizer}.py (get_parameter_state_dp_zero, state_dict) and
distributed/param_and_grad_buffer.py of megatron-core 0.16.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

from ckpttool.engine.copy.tensor_digests import announce_proof_bytes, proof_digests
from ckpttool.errors import Corrupt, Unsupported, argument
from ckpttool.formats.pickles import Global, short
from ckpttool.formats.stored_tensors import StoredTensor
from ckpttool.index import boxes
from ckpttool.index.checkpoint import Checkpoint, Chunks, Leaves, Path, TensorEntry, joined

from ...rank_files import compute_crc
from ..buckets import ALIGNED, Bucket, Segment, build_parameter_entries, slice_flat
from ..keys import BUCKETS, MASTERS, MODEL_OF_2023, assign_group_members, decays_qk_norms, to_plain_args
from .ranks import OPTIMIZER_FILE, Parameter, RankedSave, RankFile, list_chained_optimizers

__all__ = ["read_raw_optimizer", "resolve_optimizer_names"]

_SLOTS = ("param", "exp_avg", "exp_avg_sq")
_HALF = ("bfloat16", "float16")
_TRIED = 8  # parameters that are compared at once where a bucket begins


class _Buffer(NamedTuple):
    """1-D tensors of DistributedOptimizer, and the dtype of the weights in it."""

    bucket: Bucket
    dtype: str


class _State(NamedTuple):
    """The state of one numbered parameter: its slots, its place in the param groups; `step` is a tensor, a number or
    None."""

    bucket: Bucket
    shape: tuple[int, ...]
    group: int
    step: object


def read_raw_optimizer(ranks: RankedSave) -> dict[Path, TensorEntry]:
    """Return {path: tensor} of the whole optimizer state, before its parameters are determined.

    Instead of a parameter's name, a path has the folder of the rank and a number.

    Raises:
        Corrupt: a part of the state is missing.
        Unsupported: it has a form that no known version of Megatron-Core wrote.
    """
    _refuse_missing_optimizer(ranks)
    out: dict[Path, TensorEntry] = {}
    for r in ranks.ranks:
        for bucket in [b.bucket for b in _buffers(ranks, r)] + [s.bucket for s in _read_numbered_states(ranks, r)]:
            for slot, t in bucket.slots.items():
                path = (*(("extra", "master") if slot in MASTERS else ("optim",)), BUCKETS, bucket.name, slot)
                out[path] = replace(t, path=path)
    return out


def resolve_optimizer_names(ranks: RankedSave, ckpt: Checkpoint) -> tuple[Leaves, list[str]]:
    """Prove to which parameter each part of the optimizer state belongs.

    Args:
        ranks: the files of all ranks.
        ckpt: the checkpoint to which the tensors belong.

    Returns:
        ({canonical path: tensor, or number for a step} of the whole optimizer, notes for the user).

    Raises:
        Corrupt: ranks are at different steps, or one lacks its part of a parameter.
        Unsupported: nothing proves to which parameter a part belongs; the error names the part.
    """
    source, notes = ranks.files.source, list[str]()
    parts = [(r, list(_buffers(ranks, r)), list(_read_numbered_states(ranks, r))) for r in ranks.ranks]
    weights = _digest_weights(ranks, parts, ckpt)

    # choose the parameter of every segment, rank by rank
    found: list[Bucket] = []
    steps: dict[str, object] = {}
    for r, buffers, states in parts:
        taken: set[str] = set()
        for buffer in buffers:
            _find_buffer_parameters(buffer, r, weights, ranks, ckpt, taken)
            found.append(buffer.bucket)
        if not states:
            continue
        by_value = "param" in states[0].bucket.slots
        members = (
            _match_states_by_value(states, r, weights, ranks, ckpt)
            if by_value
            else _match_states_by_rule(states, r, ranks)
        )
        for state, p in zip(states, members, strict=True):
            state.bucket.segments = [Segment(0, prod(state.shape), [p.local], p.local)]
            found.append(state.bucket)
            _add_step(steps, p.local.weight, state, r, ranks)
    _refuse_parameters_without_state(ranks, found)

    # put the segments of all ranks together
    whole = {name: TensorEntry("float32", shape, (), Chunks(len(shape))) for name, shape in ranks.shapes.items()}
    out: Leaves = dict(build_parameter_entries(found, whole, source, ckpt, notes))
    for path, t in out.items():
        if (why := boxes.find_cover_problem(t.shape, t.chunks.boxes())) is not None:
            raise Corrupt(
                f'{source.root}: "{joined(path)}" {list(t.shape)}: {why}. A rank lacks its part; fetch the files of '
                "one save.",
                code="CKPT0408",
            )
    if any("param" in b.slots for b in found):
        notes.append(
            "the optimizer's state has no names in files of ranks; each part was found by the order of the model, and "
            "its fp32 copy rounds to the weight bit for bit"
        )
    elif found:
        notes.append(
            "the optimizer's state has no names in files of ranks and no fp32 copies; it was named by the order of the "
            "model and Megatron-Core's rule for param groups, and numbers and shapes fit"
        )
    for name, t in steps.items():
        at: Path = ("optim", "state", name, "step")
        out[at] = replace(t, path=at) if isinstance(t, TensorEntry) else t
    return out, notes


def _digest_weights(
    ranks: RankedSave, parts: list[tuple[RankFile, list[_Buffer], list[_State]]], ckpt: Checkpoint
) -> dict[str, str]:
    """Return {key of a rank's parameter (`_make_parameter_key`): digest of its weight} for all ranks, and announce how
    many bytes the whole proof reads.

    Args:
        ranks: the files of all ranks.
        parts: (rank, its buffers, its states of single parameters) for each rank.
        ckpt: the checkpoint that the tensors are of.
    """
    jobs = {_make_parameter_key(r, p): p.entry for r in ranks.ranks for p in r.parameters}
    copies = sum(b.bucket.param.nbytes for _, buffers, _ in parts for b in buffers)
    copies += sum(
        len(_HALF) * s.bucket.param.nbytes for _, _, states in parts for s in states if "param" in s.bucket.slots
    )
    announce_proof_bytes(sum(t.nbytes for t in jobs.values()) + copies)
    return proof_digests(jobs, ckpt, ranks.files.source)


def _add_step(steps: dict[str, object], name: str, state: _State, r: RankFile, ranks: RankedSave) -> None:
    """Add the step of the parameter `name` to `steps`, unless another rank's step is there already or `state` has none.

    Args:
        steps: {parameter: step}.
        name: the name of the parameter.
        state: its state on this rank.
        r: the rank.
        ranks: the files of all ranks.

    Raises:
        Corrupt: another rank has another step.
    """
    if state.step is None:
        return
    first = steps.setdefault(name, state.step)
    if _identify_step(first, ranks) != _identify_step(state.step, ranks):
        raise Corrupt(
            f'{ranks.files.path(r.number)}: "{name}" is at another step than on other ranks. The files are '
            "from different saves.",
            code="CKPT0409",
        )


def _refuse_parameters_without_state(ranks: RankedSave, found: list[Bucket]) -> None:
    """Refuse a save in which a rank has distrib_optim.pt, and no optimizer state was found for one of its parameters.

    `found` is the buckets of all ranks, with the parameter of each segment chosen.

    Raises:
        Unsupported: the error names the parameter.
    """
    there = {segment.chosen for b in found for segment in b.segments}
    without = next((p for r in ranks.ranks if r.distributed for p in r.parameters if p.local not in there), None)
    if without is not None:
        raise Unsupported(
            f'{ranks.files.source.root}: no {OPTIMIZER_FILE} holds the state of "{without.local.weight}", and others '
            f"hold that of their ranks. {_advise_alternatives()}",
            code="CKPT0327",
        )


def _identify_step(step: object, ranks: RankedSave) -> object:
    """Return what tells two steps apart: a number; of a tensor its dtype, its shape, and its CRC32."""
    if not isinstance(step, TensorEntry):
        return step
    return step.dtype, step.shape, compute_crc(ranks.files, step) if step.numel else 0


def _make_parameter_key(r: RankFile, p: Parameter) -> str:
    """Return a key that no other parameter of any rank has: "<folder>:<chunk>:<name>"."""
    return f"{r.folder}:{p.chunk}:{p.name}"


def _advise_alternatives() -> str:
    """Return the last sentence of an error, which advises the user on alternatives."""
    return (
        "Load it in Megatron-LM and save it as torch_dist, or convert the weights alone "
        f"({argument('only', ['model'])})."
    )


def _refuse_missing_optimizer(ranks: RankedSave) -> None:
    """Refuse ranks whose optimizer is in files that are missing, or of a kind that is not read.

    Raises:
        Corrupt: a rank with a DistributedOptimizer has no distrib_optim.pt.
        Unsupported: the optimizer is in files of data-parallel ranks.
    """
    source = ranks.files.source
    for r in ranks.ranks:
        of_2023 = ranks.files.names[r.number].endswith(MODEL_OF_2023)
        layer_wise = next((n for n in source.list(r.folder) if n.startswith("layer_wise_optimizer")), None)
        if of_2023 or layer_wise:
            name = f"{r.folder}/{layer_wise}" if layer_wise else f"{r.folder}_000/optim.pt"
            raise Unsupported(
                f"{source.root}: the optimizer is in files of data-parallel ranks ({name}), each with a part that only "
                f"the job that wrote it can place. {_advise_alternatives()}",
                code="CKPT0327",
            )
    for r in ranks.ranks:
        chain = list_chained_optimizers(r.tree, ranks.files.path(r.number))
        if chain and r.distributed is None and not any("state" in inner for _, inner in chain):
            raise Corrupt(
                f"{source.root}/{r.folder}: {OPTIMIZER_FILE}, which has the state of its optimizer, is missing. Fetch "
                f"it, or convert the weights alone ({argument('only', ['model'])}).",
                code="CKPT0401",
            )


# --------------------------------------------------------------------------------------------- DistributedOptimizer


def _buffers(ranks: RankedSave, r: RankFile) -> Iterator[_Buffer]:
    """Yield the buffers in distrib_optim.pt of a rank; none if the rank has no such file.

    Raises:
        Corrupt: a buffer is not three flat tensors of equal lengths.
        Unsupported: the file is of a version that stored each bucket by itself, or a buffer has further slots.
    """
    if r.distributed is None:
        return
    number, tree = r.distributed
    what = ranks.files.path(number)
    for k, one in enumerate(tree if isinstance(tree, list) else [tree]):
        if one is None:
            continue
        if not isinstance(one, dict) or one.get("buckets_coalesced") is not True:
            raise Unsupported(
                f"{what}: is not of the form that Megatron-Core has for DistributedOptimizer since its buckets are one "
                f"buffer (buckets_coalesced). {_advise_alternatives()}",
                code="CKPT0327",
            )
        for i, of in one.items():
            if i == "buckets_coalesced":
                continue
            for dtypes, slots in of.items() if isinstance(of, dict) else ():
                kind = dtypes[0] if isinstance(dtypes, tuple) and dtypes else dtypes
                found = [slots.get(s) for s in _SLOTS] if isinstance(slots, dict) else []
                tensors = [t for t in found if isinstance(t, StoredTensor) and len(t.shape) == 1 and t.contiguous]
                others = (
                    [s for s, x in slots.items() if s not in _SLOTS and isinstance(x, StoredTensor)] if tensors else []
                )
                if others:
                    raise Unsupported(
                        f"{what}: its buffer {i} has {short(others)} besides {', '.join(_SLOTS)}, which only the job "
                        f"that wrote it can place. {_advise_alternatives()}",
                        code="CKPT0327",
                    )
                if not isinstance(kind, Global) or len(tensors) != len(_SLOTS) or len({t.shape for t in tensors}) > 1:
                    raise Corrupt(
                        f"{what}: its buffer {i} is {short(slots)}, not three flat tensors of equal lengths.",
                        code="CKPT0417",
                    )
                entry = {s: ranks.files.entry(number, t) for s, t in zip(_SLOTS, tensors, strict=True)}
                yield _Buffer(Bucket(f"{r.folder}.chained_{k}.gbuf_idx_{i}.{kind.name}", r.folder, entry), kind.name)


def _find_buffer_parameters(
    buffer: _Buffer, r: RankFile, weights: Mapping[str, str], ranks: RankedSave, ckpt: Checkpoint, taken: set[str]
) -> None:
    """Find the parameters in a buffer of a rank, and set the segments of the buffer's bucket.

    A buffer holds, from the last to the first, all parameters of one chunk of the model, or its experts alone, or all
    but the experts.

    Args:
        buffer: the buffer.
        r: the rank.
        weights: {key of a rank's parameter (`_make_parameter_key`): digest of its weight}.
        ranks: the files of all ranks.
        ckpt: the checkpoint to which the tensors belong.
        taken: keys of the parameters that other buffers of the rank hold; those found here are added.

    Raises:
        Unsupported: the values are not those of any such list of parameters.
    """
    lists: dict[tuple[str, ...], list[Parameter]] = {}
    for chunk in sorted({p.chunk for p in r.parameters}):
        of = [p for p in r.parameters if p.chunk == chunk and p.entry.dtype == buffer.dtype][::-1]
        for some in (of, [p for p in of if not p.expert], [p for p in of if p.expert]):
            key = tuple(_make_parameter_key(r, p) for p in some)
            if some and not taken.intersection(key):
                lists[key] = some
    size = buffer.bucket.param.shape[0]
    best: tuple[int, Parameter | None] = 0, None
    for key, some in lists.items():
        if not 0 <= size - sum(p.entry.numel for p in some) < ALIGNED * len(some):
            continue
        starts, reached = _prove_parameter_starts(buffer, some, [weights[n] for n in key], ranks, ckpt)
        if starts is not None:
            buffer.bucket.segments = [
                Segment(at, at + p.entry.numel, [p.local], p.local) for at, p in zip(starts, some, strict=True)
            ]
            taken |= set(key)
            return
        if reached >= best[0]:
            best = reached, some[min(reached, len(some) - 1)]
    whose = (
        f'after {best[0]} parameters, "{best[1].local.weight}" should follow'
        if best[1]
        else "no parameters fit its length"
    )
    raise Unsupported(
        f'{ranks.files.source.root}: the optimizer\'s buffer "{buffer.bucket.name}" ({size} elements) is not the fp32 '
        f"copies of the rank's weights in the order of the model: {whose}, and the values do not round to it. So "
        f"nothing tells whose moments these are. {_advise_alternatives()}",
        code="CKPT0327",
    )


def _prove_parameter_starts(
    buffer: _Buffer, some: list[Parameter], weights: list[str], ranks: RankedSave, ckpt: Checkpoint
) -> tuple[list[int] | None, int]:
    """Prove by value that a buffer holds some parameters in this order.

    If a parameter is not at the next multiple of 64 elements, a bucket ends before it. The values after the end of a
    bucket are read again, so at most twice as many parameters as before are compared at once.

    Args:
        buffer: the buffer.
        some: the parameters.
        weights: the digests of their weights.
        ranks: the files of all ranks.
        ckpt: the checkpoint to which the tensors belong.

    Returns:
        (the element at which each parameter begins, the number of parameters that are proved). The former is None
        unless all are proved and fill the buffer.
    """
    t, size = buffer.bucket.param, buffer.bucket.param.shape[0]
    starts: list[int] = []
    bucket = end = 0  # where the bucket begins, and where the parameters so far end
    window = _TRIED
    while len(starts) < len(some):
        rest, trial, before = some[len(starts) : len(starts) + window], list[int](), end
        for p in rest:
            trial.append(bucket + -(-(end - bucket) // ALIGNED) * ALIGNED)
            end = trial[-1] + p.entry.numel
        jobs = {
            str(k): slice_flat(t, a, a + p.entry.numel)
            for k, (a, p) in enumerate(zip(trial, rest, strict=True))
            if a + p.entry.numel <= size
        }
        digests = proof_digests(jobs, ckpt, ranks.files.source, dict.fromkeys(jobs, buffer.dtype))
        proved = next((k for k in range(len(rest)) if digests.get(str(k)) != weights[len(starts) + k]), len(rest))
        if not proved and bucket == before:
            return None, len(starts)
        starts += trial[:proved]
        end = starts[-1] + some[len(starts) - 1].entry.numel
        if proved < len(rest):
            bucket, window = end, _TRIED
        else:
            window *= 2
    return (starts, len(starts)) if end == size else (None, len(starts))


# ------------------------------------------------------------------------------------------- numbered parameters


def _read_numbered_states(ranks: RankedSave, r: RankFile) -> Iterator[_State]:
    """Yield the state of each parameter that the optimizers in a rank's file number, in the order of the param groups.

    The slot "param" of a state is the fp32 copy of the weight.

    Raises:
        Corrupt: state, fp32 copies and param groups contradict one another.
        Unsupported: it cannot be determined to which parameters fp32 copies belong, or a parameter's slots differ in
            shape.
    """
    what = ranks.files.path(r.number)
    first_group = 0  # of all chained optimizers together
    for k, (one, inner) in enumerate(list_chained_optimizers(r.tree, what)):
        groups: list[dict[str, Any]] = inner.get("param_groups", [])
        state, copies = inner.get("state") or {}, one.get("fp32_from_fp16_params", one.get("fp32_from_fp16"))
        if isinstance(state, dict) and (state or copies is not None):
            _check_param_groups(state, copies, groups, what)
            for i, group in enumerate(groups):
                numbers, of = group.get("params", ()), None if copies is None else copies[i]
                if of is not None and len(of) != len(numbers):
                    raise Unsupported(
                        f"{what}: param group {i} has {len(numbers)} parameters, of which {len(of)} "
                        f"have fp32 copies; nothing tells which. {_advise_alternatives()}",
                        code="CKPT0327",
                    )
                for j, n in enumerate(numbers):
                    copy = {} if of is None else {"param": of[j]}
                    name = f"{r.folder}.chained_{k}.{n}"
                    yield _parse_numbered_state(ranks, r, name, first_group + i, n, state.get(n, {}), copy)
        first_group += len(groups)


def _check_param_groups(state: dict[object, object], copies: object, groups: list[dict[str, Any]], what: str) -> None:
    """Check that all state belongs to a param group, and that each group has its list of fp32 copies, if there are any.

    Args:
        state: {number of a parameter: its slots}.
        copies: the fp32 copies of each group; None if the optimizer has none.
        groups: the param groups.
        what: how errors name the file.

    Raises:
        Corrupt: they contradict one another.
    """
    grouped = {n for group in groups for n in group.get("params", ())} | {"common_step"}
    if state.keys() - grouped:
        raise Corrupt(
            f"{what}: its optimizer has the state of "
            f"{short(sorted(map(str, state.keys() - grouped)))}, which are in none of its param groups.",
            code="CKPT0417",
        )
    if copies is not None and (
        not isinstance(copies, list)
        or len(copies) != len(groups)
        or not all(isinstance(of, list) and all(isinstance(x, StoredTensor) for x in of) for of in copies)
    ):
        raise Corrupt(
            f"{what}: the fp32 copies in its optimizer are {short(copies)}, not a list of tensors for each "
            "param group.",
            code="CKPT0417",
        )


def _parse_numbered_state(
    ranks: RankedSave, r: RankFile, name: str, group: int, n: int, slots: object, copy: dict[str, StoredTensor]
) -> _State:
    """Return the state of one numbered parameter of a rank, with its slots as flat tensors.

    Args:
        ranks: the files of all ranks.
        r: the rank.
        name: the name that the state has until its parameter is determined.
        group: the number of its param group.
        n: the number of the parameter.
        slots: {slot: tensor} as the file has them, and the step.
        copy: {"param": fp32 copy}, which becomes one of the slots; {} if there is none.

    Raises:
        Corrupt: `slots` is not a dict.
        Unsupported: the slots are not contiguous tensors of one shape.
    """
    what = ranks.files.path(r.number)
    if not isinstance(slots, dict):
        raise Corrupt(f"{what}: the optimizer's state of parameter {n} is {short(slots)}.", code="CKPT0417")
    tensors = copy | {s: x for s, x in slots.items() if isinstance(x, StoredTensor) and s != "step"}
    shapes = {x.shape for x in tensors.values()}
    odd = any(s not in tensors and s != "step" and x is not None for s, x in slots.items())
    if odd or len(shapes) != 1 or not all(x.contiguous for x in tensors.values()):
        raise Unsupported(
            f"{what}: the optimizer's state of parameter {n} is {short(slots)}, not "
            f"contiguous tensors of one shape. {_advise_alternatives()}",
            code="CKPT0327",
        )
    flat: dict[str, TensorEntry] = {}
    for slot, x in tensors.items():
        t = ranks.files.entry(r.number, x)
        flat[slot] = TensorEntry(t.dtype, (t.numel,), (), Chunks.whole((t.numel,), *t.chunks[0].extent))
    step = slots.get("step")
    if isinstance(step, StoredTensor):
        step = ranks.files.entry(r.number, step)
    return _State(Bucket(name, r.folder, flat), shapes.pop(), group, step)


def _match_states_by_value(
    states: list[_State], r: RankFile, weights: Mapping[str, str], ranks: RankedSave, ckpt: Checkpoint
) -> list[Parameter]:
    """Return the parameter of each state: the one whose weight the state's fp32 copy rounds to.

    Equal weights whose states are in one param group are matched in the order of the model.

    Args:
        states: the states of single parameters that a rank has.
        r: the rank.
        weights: {key of a rank's parameter (`_make_parameter_key`): digest of its weight}.
        ranks: the files of all ranks.
        ckpt: the checkpoint to which the tensors belong.

    Raises:
        Unsupported: a copy rounds to no weight, or it cannot be determined to which of several equal ones it belongs.
    """
    jobs = {f"{k}:{d}": s.bucket.slots["param"] for k, s in enumerate(states) for d in _HALF}
    rounded = proof_digests(jobs, ckpt, ranks.files.source, {n: n.partition(":")[2] for n in jobs})
    candidates: dict[tuple[str, tuple[int, ...]], list[Parameter]] = {}
    for p in r.parameters:
        if p.entry.dtype in _HALF:
            candidates.setdefault((weights[_make_parameter_key(r, p)], p.entry.shape), []).append(p)
    alike: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for k, s in enumerate(states):
        key = next((key for d in _HALF if (key := (rounded[f"{k}:{d}"], s.shape)) in candidates), None)
        if key is None:
            raise Unsupported(
                f'{ranks.files.path(r.number)}: the fp32 copy "{s.bucket.name}" {list(s.shape)} rounds to no weight of '
                f"the rank, so nothing tells whose moments these are. {_advise_alternatives()}",
                code="CKPT0327",
            )
        alike.setdefault(key, []).append(k)
    out: dict[int, Parameter] = {}
    for key, some in alike.items():
        if len(some) != len(candidates[key]) or len({states[k].group for k in some}) > 1:
            names = ", ".join(f'"{p.local.weight}"' for p in candidates[key][:4])
            raise Unsupported(
                f"{ranks.files.path(r.number)}: {len(some)} fp32 copies of the optimizer round to each of "
                f"{len(candidates[key])} weights that are equal ({names}), and nothing proves which is whose. "
                f"{_advise_alternatives()}",
                code="CKPT0327",
            )
        out |= dict(zip(some, candidates[key], strict=True))
    order = {id(p): i for i, p in enumerate(r.parameters)}
    for a, b in pairwise(range(len(states))):
        if states[a].group == states[b].group and order[id(out[a])] > order[id(out[b])]:
            raise Unsupported(
                f'{ranks.files.path(r.number)}: "{out[b].local.weight}" lies behind "{out[a].local.weight}" in a param '
                "group, and before it in the model. Megatron-LM keeps the order, so the file is not as it wrote it. "
                f"{_advise_alternatives()}",
                code="CKPT0327",
            )
    return [out[k] for k in range(len(states))]


def _match_states_by_rule(states: list[_State], r: RankFile, ranks: RankedSave) -> list[Parameter]:
    """Return the parameter of each state of a rank without fp32 copies, by Megatron-Core's rule and the order of the
    model.

    The rule is that by which Megatron-Core makes param groups.

    Raises:
        Unsupported: the number or shapes of the states of a param group do not fit.
    """
    groups = dict(
        enumerate(
            g
            for _, inner in list_chained_optimizers(r.tree, ranks.files.path(r.number))
            for g in inner.get("param_groups", ())
        )
    )
    parameters = {f"{p.chunk}.{p.name}": p for p in r.parameters}
    dims = {n: len(p.entry.shape) for n, p in parameters.items()}
    plain = to_plain_args(r.tree.get("args"))
    decay = isinstance(plain, dict) and decays_qk_norms(plain.get)
    members = assign_group_members(groups, dims, qk_norms_decay=decay)
    out: list[Parameter] = []
    for i in groups:
        mine = [s for s in states if s.group == i]
        names = members[i] if members else []
        if [s.shape for s in mine] != [parameters[n].entry.shape for n in names]:
            raise Unsupported(
                f"{ranks.files.path(r.number)}: param group {i} has the state of {len(mine)} parameters, and by "
                f"Megatron-Core's rule for its groups {len(names)} parameters of "
                f"{'the same' if len(mine) == len(names) else 'other'} number and other shapes belong there. There are "
                f"no fp32 copies that would tell whose it is. {_advise_alternatives()}",
                code="CKPT0327",
            )
        out += [parameters[n] for n in names]
    return out
