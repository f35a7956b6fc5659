"""What zero1, zero2 and zero3 write; write_common.py has the model files, write_optimizers.py those of the optimizer,
and write_tensor_parallel.py the files of tensor-parallel ranks."""

from __future__ import annotations

from dataclasses import replace

from ckpttool.engine.flat.placed_masters import with_masters_as_weights
from ckpttool.engine.flat.split_state import split_training_state
from ckpttool.formats.stored_tensors import split_components
from ckpttool.formats.torch_zip_writer import TorchFiles
from ckpttool.index.checkpoint import Checkpoint
from ckpttool.index.draft import Draft
from ckpttool.index.schedulers import complete_scheduler_state
from ckpttool.layouts import WriteOptions
from ckpttool.storage.source import Source

from ..options import ZeroOptions
from . import write_common as dw
from .experts import Experts
from .geometry import split_groups
from .write_experts import plan_experts, refuse_experts, refuse_pipeline, to_local_groups
from .write_optimizers import OptimizerFiles
from .write_pipeline import find_pipeline, write_stages
from .write_tensor_parallel import write_tensor_ranks

__all__ = ["prepare", "write_stage"]


def prepare(ckpt: Checkpoint, source: Source, options: WriteOptions) -> Checkpoint:
    """Return the state with fp32 masters as the weights where the source has both, and with a complete scheduler state.

    Masters are the copies of the weights that the optimizer updates. The scheduler is completed where the source saves
    only the last epoch of torch's LambdaLR.

    Raises:
        Unsupported: a master does not round to its weight.
    """
    return with_masters_as_weights(complete_scheduler_state(split_components(ckpt)), source)


def write_stage(ckpt: Checkpoint, source: Source, options: WriteOptions, stage: int) -> Draft:
    """Plan a save of a ZeRO stage, 1 to 3, for an engine of `options.world_size` ranks, by default as many as the
    source had.

    Raises:
        UsageError: no world size was given and the source has none.
        Unsupported: DeepSpeed cannot hold the state.
    """
    pipeline = find_pipeline(ckpt, options, stage)
    if pipeline is None:
        refuse_pipeline(ckpt)
    world = options.ranks(ckpt)
    state = split_training_state(ckpt, source, options.like and options.like.optimizer)
    tensors = {n: replace(t, dtype=options.cast(f"model.{n}", t.dtype)) for n, t in state.tensors.items()}
    own = options.of(ZeroOptions)
    plan = dw.SavePlan(state, tensors, stage, options, own, ckpt)
    if pipeline is not None:
        return write_stages(plan, options, world, pipeline)
    if own.tensor_parallel not in (None, 1):
        return write_tensor_ranks(plan, options, world, own.tensor_parallel)
    if stage == 3:
        refuse_experts(state, own.expert_parallel, "ZeRO-3")
        experts, replicas = Experts.none(world), list[int]()
    else:
        experts, replicas = plan_experts(plan, world, own.expert_parallel)
    named = [{n: tensors[n].shape for n in g.params} for g in state.groups]
    groups, ids = split_groups(named, stage, world, plan.sub_group_size)
    files = TorchFiles()
    local = groups if stage == 3 else to_local_groups(experts, groups, replicas)
    out = OptimizerFiles(plan, groups, world, experts, local, replicas)
    models = dw.ModelStateFiles(plan, groups, world, local)
    models.add(files, each_rank=stage == 3)
    out.add(files, ids)
    files.literal("latest", plan.tag.encode())
    checkpoint = Checkpoint(f"zero{stage}", options.target, world, [], [], out.tensors, {})
    return models.draft(files, checkpoint, out.sources, [*state.dropped, *out.dropped])
