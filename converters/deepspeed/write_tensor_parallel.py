"""zero1, zero2 and zero3 for tensor-parallel ranks of AutoTP: each has the files of a save by itself, of its parts.

Which part of a parameter a rank has is in no weight: the source says it, if it is a save of AutoTP, or another save of
such a job does (--like). tensor_cuts.py describes what they say, and what follows for another number of ranks. What all
ranks have whole is written for each; a reader compares the copies.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from ckpttool.engine.flat.split_state import Training
from ckpttool.errors import Unsupported, UsageError, argument
from ckpttool.formats.torch_zip_writer import TorchFiles
from ckpttool.huggingface import model_names
from ckpttool.index import boxes
from ckpttool.index.checkpoint import ITEMSIZE, Checkpoint, Chunks, Path, TensorEntry, joined
from ckpttool.index.draft import Draft, Dropped
from ckpttool.layouts import WriteOptions

from . import write_common as dw
from .experts import Experts
from .geometry import split_groups
from .tensor_cuts import (
    ParameterCut,
    build_universal_info,
    count_map_ranks,
    cut_for_ranks,
    make_parameter_pattern,
    parse_parameter_map,
    read_sub_param_sizes,
)
from .write_experts import refuse_experts
from .write_optimizers import OptimizerFiles

__all__ = ["write_tensor_ranks"]


def write_tensor_ranks(plan: dw.SavePlan, options: WriteOptions, world: int, ranks: int) -> Draft:
    """Return the draft of a save for an engine of AutoTP, with files for each tensor-parallel rank.

    Args:
        plan: what all files of the save have in common.
        options: where it goes, and what states how parameters are cut.
        world: the number of all ranks.
        ranks: the number of tensor-parallel ranks among them.

    Raises:
        Unsupported: it is not known how a parameter is cut for so many ranks, or AutoTP cannot hold the state.
        UsageError: `ranks` does not divide `world`.
    """
    if world % ranks:
        raise UsageError(
            f"{argument('tensor_parallel', ranks)} does not divide {world} ranks, of which each has a part of the "
            f"model: give {argument('world_size')} of the whole job.",
            code="CKPT0209",
        )
    refuse_experts(plan.state, None, "a save of AutoTP")
    info, cuts = _find_cuts(plan.ckpt, plan.state, options, ranks)
    plan.set_tensor_ranks(ranks, build_universal_info(info, cuts))

    # the files of each rank, as if the model consisted of its parts
    files, replicas = TorchFiles(), world // ranks
    models, optimizers = list[dw.ModelStateFiles](), list[OptimizerFiles]()
    for rank in range(ranks):
        local = _copy_plan_for_rank(plan, rank, cuts)
        named = [{n: local.tensors[n].shape for n in g.params if local.tensors[n].numel} for g in plan.state.groups]
        groups, ids = split_groups(named, plan.stage, replicas, plan.sub_group_size)
        models.append(dw.ModelStateFiles(local, groups, replicas))
        models[-1].add(files, each_rank=plan.stage == 3)
        of_groups = [] if plan.stage == 3 else [replicas] * len(groups)
        optimizers.append(OptimizerFiles(local, groups, replicas, Experts.none(replicas), groups, of_groups))
        optimizers[-1].add(files, ids)
    files.literal("latest", plan.tag.encode())

    # the whole weights, masters and moments in them
    tensors, sources = _join_ranks([o.tensors for o in optimizers], [o.sources for o in optimizers], cuts)
    whole = models[0]
    whole.tensors, whole.sources = _join_ranks([m.tensors for m in models], [m.sources for m in models], cuts)
    out = Checkpoint(f"zero{plan.stage}", options.target, world, [], [], tensors, {})
    dropped: list[Dropped] = [*plan.state.dropped, *optimizers[0].dropped]
    return whole.draft(files, out, sources, dropped)


def _find_cuts(
    ckpt: Checkpoint, state: Training, options: WriteOptions, ranks: int
) -> tuple[Mapping[str, object], dict[str, ParameterCut]]:
    """Find how `ranks` tensor-parallel ranks cut each parameter, from the save of --like or else the source.

    Returns:
        (universal_checkpoint_info of that save; {parameter: how the ranks share it}).

    Raises:
        Unsupported: neither is a save of tensor-parallel ranks, or the cut of a parameter does not follow from it.
    """
    like = options.like.tensor_parallel if options.like is not None else None
    info, where = (like, argument("like")) if like is not None else (ckpt.tensor_parallel, ckpt.root)
    if info is None:
        raise Unsupported(
            f"nothing says which part of a weight each of {ranks} tensor parallel ranks has: {ckpt.root} is no save of "
            f"such ranks. Start the job once with {ranks} of them, save it at step 0, and give that save with "
            f"{argument('like')}; or write universal, which an engine of any size cuts by itself.",
            code="CKPT0316",
        )
    heads = None if options.config is None else _count_heads(model_names.load_config(options.config))
    stored, out = info["affine_map"]["params"], dict[str, ParameterCut]()
    matrices = read_sub_param_sizes(info)
    for name in (n for n in state.tensors if n not in state.buffers and n not in state.tied):
        pattern, what = make_parameter_pattern(name), f'{where}: "{name}"'
        if pattern not in stored:
            why: str | None = "it is not in that save"
        else:
            cut = parse_parameter_map(stored[pattern], count_map_ranks(stored[pattern]), what)
            found = cut_for_ranks(cut, ranks, matrices.get(pattern), heads)
            why = found if isinstance(found, str) else _explain_unwritable_cut(found, state.tensors[name].shape)
            if not isinstance(found, str):
                out[name] = found
        if why is not None:
            raise Unsupported(
                f"{what}: which part of it each of {ranks} tensor parallel ranks has is not known: {why}. Give a save "
                f"of such a job with {argument('like')}, of any step"
                + (f", or the model with {argument('config')}" if "key-value heads of the model" in why else "")
                + "; or write universal, which an engine of any size cuts by itself.",
                code="CKPT0316",
            )
    return info, out


def _count_heads(config: Mapping[str, Any]) -> int | None:
    """Return the number of key-value heads that a Hugging Face config states; None if it states none.

    Like DeepSpeed, take the first of several keys that is there, the last of which is `num_attention_heads`.

    Args:
        config: the content of config.json; the part `text_config` is used if there is one.
    """
    text = config.get("text_config")
    config = text if isinstance(text, dict) else config
    keys = ("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "n_head_kv", "num_attention_heads")
    return next((config[k] for k in keys if type(config.get(k)) is int), None)


def _explain_unwritable_cut(cut: ParameterCut, shape: tuple[int, ...]) -> str | None:
    """Return why a parameter of this shape cannot be written with this cut, as text for an error; None if it can."""
    if cut.shape != shape:
        return f"it has the shape {list(shape)} here, and {list(cut.shape)} in that save"
    if 0 in cut.parts[0] and 0 not in shape:
        return "rank 0 has nothing of it"
    for box, held in cut.pieces:
        if len(held) > 1 and (box[1] != shape or len(held) < len(cut.parts)):
            return "some ranks share a piece of it and others do not"
    for r in range(len(cut.parts)):
        mine = sorted((held[r], boxes.flat_start(shape, box[0])) for box, held in cut.pieces if r in held)
        rows = all(h[1:] == (0,) * (len(shape) - 1) for h, _ in mine)
        if [at for _, at in mine] != sorted(at for _, at in mine) or (len(mine) > 1 and not rows):
            return f"the pieces of rank {r} do not lie one after the other"
    return None


def _copy_plan_for_rank(plan: dw.SavePlan, rank: int, cuts: Mapping[str, ParameterCut]) -> dw.SavePlan:
    """Return a copy of the plan for one tensor-parallel rank's files, with weights in the shapes of that rank's parts.

    Args:
        plan: what all files of the save have in common; it is not changed.
        rank: the tensor-parallel rank.
        cuts: {parameter: how the ranks share it}; tensors without an entry keep their shape.
    """
    out = copy.copy(plan)
    out.tensor_rank = rank
    out.tensors = {n: replace(t, shape=cuts[n].parts[rank]) if n in cuts else t for n, t in plan.tensors.items()}
    return out


def _join_ranks(
    tensors: Sequence[dict[str, TensorEntry]],
    sources: Sequence[dict[str, TensorEntry]],
    cuts: Mapping[str, ParameterCut],
) -> tuple[dict[str, TensorEntry], dict[str, TensorEntry]]:
    """Join the tensors of all tensor-parallel ranks' files into whole ones, in the order of the files.

    Args:
        tensors: for each rank, {name: its part of a tensor, with the place in the rank's files}.
        sources: for each rank, {name: the whole tensor of the source that fills it}.
        cuts: {parameter: how the ranks share it}.

    Returns:
        ({name: whole tensor, or a further rank's copy of one}, {name: the tensor of the source that fills it}).

    Raises:
        Unsupported: ranks would store a tensor in different dtypes.
    """
    out: dict[str, TensorEntry] = {}
    filled: dict[str, TensorEntry] = {}
    for name, first in tensors[0].items():
        path = first.path[2:] if first.path[0] == "replica" else first.path
        parameter = str(path[2]) if path[0] == "optim" else joined(path[1:])
        cut = cuts.get(parameter) if path[0] in ("model", "module", "optim") else None
        if cut is not None and not cut.is_whole:
            out[name] = _join_parts(first, [own.get(name) for own in tensors], cut)
            filled[name] = sources[0][name]
            continue
        for rank, own in enumerate(tensors):
            number = (int(first.path[1]) if first.path[0] == "replica" else 0) * len(tensors) + rank
            at: Path = ("replica", number, *path) if number else path
            out[joined(at)] = replace(own[name], path=at)
            filled[joined(at)] = sources[rank][name]
    return out, filled


def _join_parts(first: TensorEntry, column: Sequence[TensorEntry | None], cut: ParameterCut) -> TensorEntry:
    """Return the entry of a whole tensor from the parts in the ranks' files.

    Args:
        first: the part of rank 0.
        column: the part of each rank, with its place in the rank's files; None for a rank that has no part.
        cut: how the ranks share the parameter.

    Raises:
        Unsupported: the parts have different dtypes.
    """
    if odd := next((t for t in column if t is not None and t.dtype != first.dtype), None):
        raise Unsupported(
            f'"{joined(first.path)}" lies beside tensors of other dtypes, so that one tensor parallel rank would have '
            f"it as {first.dtype} and another as {odd.dtype}. {argument('dtype', 'float32')} writes all of them alike.",
            code="CKPT0316",
        )
    chunks, item = Chunks(len(cut.shape)), ITEMSIZE[first.dtype]
    for rank, part in enumerate(column):
        mine = sorted((held[rank], box) for box, held in cut.pieces if rank in held)
        for c in part.chunks if part is not None else ():
            for held, (start, size) in mine:
                both = boxes.intersect((c.start, c.shape), (held, size))
                if both is None:
                    continue
                inside = tuple(a - b for a, b in zip(both[0], c.start, strict=True))
                home = tuple(a - b + s for a, b, s in zip(both[0], held, start, strict=True))
                offset = c.extent.offset + boxes.flat_start(c.shape, inside) * item
                chunks.add(home, both[1], c.extent.file, offset, prod(both[1]) * item)
    return replace(first, shape=cut.shape, chunks=chunks)
