"""zero1 for an engine of PipelineModule: the files of layers, and for each stage those of a job of ZeRO-1 by itself.

Which layers a stage has, and in which order their parameters lie, is not in the weights: the source says it, if it is a
pipeline, or another save of the job does (--like), with any number of stages. Every stage with a tied layer gets its
masters and moments. deepspeed/pipeline.py describes the files.
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from typing import NoReturn

from ckpttool.errors import Unsupported, UsageError, argument
from ckpttool.formats.torch_zip_writer import TorchFiles
from ckpttool.index.checkpoint import Checkpoint, TensorEntry, joined
from ckpttool.index.draft import Draft, Dropped
from ckpttool.layouts import WriteOptions

from ..options import ZeroOptions
from . import write_common as dw
from .experts import Experts
from .pipeline import Pipeline
from .write_experts import refuse_experts
from .write_optimizers import OptimizerFiles

__all__ = ["find_pipeline", "write_stages"]


def find_pipeline(ckpt: Checkpoint, options: WriteOptions, stage: int) -> Pipeline | None:
    """Return the layers and stages of the pipeline to write; None if the save is to be that of no pipeline.

    They are those of the --like save if one is given, else those of the source.

    Args:
        ckpt: the source.
        options: says which save --like names, if any.
        stage: the ZeRO stage to write.

    Raises:
        Unsupported: the source is a pipeline and --like is not, or DeepSpeed has no pipelines at the ZeRO stage.
    """
    found = ckpt.pipeline if options.like is None else options.like.pipeline
    if not isinstance(found, Pipeline):
        if isinstance(ckpt.pipeline, Pipeline):
            raise Unsupported(
                f"the source is a pipeline of DeepSpeed, and {argument('like')} is a save of no pipeline, whose engine "
                "has other names for the weights. Give a save of the pipeline that will load it, or none for the "
                "stages of the source.",
                code="CKPT0316",
            )
        return None
    if stage != 1:
        raise Unsupported(
            f"pipelines of DeepSpeed train with ZeRO stage 1, or none, and no engine would load one at stage {stage}. "
            "Write zero1.",
            code="CKPT0316",
        )
    return found


def write_stages(plan: dw.SavePlan, options: WriteOptions, world: int, pipeline: Pipeline) -> Draft:
    """Return the draft of a save for an engine of a pipeline.

    Args:
        plan: what all files of the save have in common; the order of its parameters and buffers is changed.
        options: where it goes, and what states the stages.
        world: the number of all ranks.
        pipeline: the layers and stages of the job that will load it.

    Raises:
        Unsupported: the state is not that of the pipeline's layers.
        UsageError: the number of stages does not divide `world`.
    """
    # refuse what no engine of a pipeline would load
    stages = len(pipeline.stages)
    if world % stages:
        raise UsageError(
            f"{world} ranks cannot share {stages} stages of a pipeline evenly: give {argument('world_size')} of the "
            f"whole job, or with {argument('like')} a save of the job that will load it.",
            code="CKPT0209",
        )
    own = options.of(ZeroOptions)
    refuse_experts(plan.state, own.expert_parallel, "a pipeline")
    if own.tensor_parallel not in (None, 1):
        raise UsageError(
            f"{argument('tensor_parallel', own.tensor_parallel)}: pipelines are written without tensor parallel ranks.",
            code="CKPT0203",
        )
    _match_state(plan, options, pipeline)
    replicas, files = world // stages, TorchFiles()
    state, named = plan.state, [{n: plan.tensors[n].shape for n in g.params} for g in plan.state.groups]
    models = dw.ModelStateFiles(plan, named, replicas)

    # the weights, in a file for each layer, as every stage reads those of its own
    placed, seen = list[tuple[int, dw.FileTree]](), Counter[str]()
    order = {n: i for i, n in enumerate(plan.tensors)}  # of the draft, which files of a tied layer may not agree on
    for file, keys in pipeline.layers.items():
        names = tuple(keys.values())
        weights = iter(sorted((key for key, n in keys.items() if n in order), key=lambda key: order[keys[key]]))
        tree = dw.FileTree(seen[names[0]] if names else 0)  # a tied layer may have several files
        seen.update(names)
        content = {
            key: models.add_module_tensor(tree, keys[key]) if n in order else tree.add_tree(state.extra_states[n])
            for key, n in ((next(weights) if n in order else key, n) for key, n in keys.items())
        }
        placed.append((files.add(f"{plan.tag}/{file}", content, tree.sizes), tree))

    # masters and moments: each stage is a job of ZeRO-1 by itself, with a model file that has no weights
    tensors, sources = dict[str, TensorEntry](), dict[str, TensorEntry]()
    dropped = {d.name: d for d in state.dropped}
    same = isinstance(plan.ckpt.pipeline, Pipeline) and len(plan.ckpt.pipeline.stages) == stages
    for s, groups in enumerate(pipeline.stages):
        local, tree = copy.copy(plan), dw.FileTree(s)
        local.tensor_rank, local.tensor_ranks = s, stages
        content = {
            "module": None,
            "buffer_names": pipeline.buffers[s],
            "optimizer": None,
            "param_shapes": [{n: dw.pickled_size(shape) for n, shape in g.items()} for g in groups],
            "frozen_param_shapes": None,
            "shared_params": {},
            "frozen_param_fragments": None,
            **local.other_state(tree, 0, 1, same),
            "dp_world_size": replicas,
            "checkpoint_parallel_dimensions": {"pp_degree": stages, "tp_degree": 1},
        }
        placed.append((files.add(f"{plan.tag}/{local.model_rank}_model_states.pt", content, tree.sizes), tree))
        of_groups = [replicas] * len(groups)
        out = OptimizerFiles(local, groups, replicas, Experts.none(replicas), groups, of_groups)
        out.add(files, [[g] for g in range(len(groups))])
        dropped |= {d.name: d for d in out.dropped}
        for name, t in out.tensors.items():
            at = ("replica", s, *t.path) if name in tensors else t.path  # a tied layer of an earlier stage, too
            tensors[joined(at)], sources[joined(at)] = replace(t, path=at), out.sources[name]
    files.literal("latest", plan.tag.encode())
    models.record(files, placed)
    checkpoint = Checkpoint("zero1", options.target, world, [], [], tensors, {})
    return models.draft(files, checkpoint, sources, list[Dropped](dropped.values()))


def _match_state(plan: dw.SavePlan, options: WriteOptions, pipeline: Pipeline) -> None:
    """Check that the pipeline's layers and stages hold exactly the state to write, and order that state by stage.

    Args:
        plan: the state to write; the order of its parameters and buffers is changed in place.
        options: whether --like names the save that the pipeline is from, for errors.
        pipeline: the layers and stages of the job that will load the save.

    Raises:
        Unsupported: they do not.
    """
    state = plan.state

    def refuse(why: str) -> NoReturn:
        """Raise Unsupported."""
        whose = argument("like") if options.like is not None else plan.ckpt.root
        raise Unsupported(
            f"the state does not fit the pipeline that {whose} is a save of: {why}. Give with {argument('like')} a "
            "save of the pipeline that will load it, of any step: engine.save_checkpoint before the first step makes "
            "one.",
            code="CKPT0316",
        )

    if state.tied:
        alias, owner = next(iter(state.tied.items()))
        refuse(f'"{alias}" is tied to "{owner}", and files of layers have no tied weights but those of TiedLayerSpec')
    here = dict.fromkeys([*state.tensors, *state.extra_states])
    there = dict.fromkeys(n for keys in pipeline.layers.values() for n in keys.values())
    if odd := next((n for n in here if n not in there), None):
        refuse(f'no file of a layer has "{odd}"')
    if odd := next((n for n in there if n not in here), None):
        refuse(f'the file of a layer has "{odd}", and the state has not')
    members = [set(g.params) for g in state.groups]
    for s, groups in enumerate(pipeline.stages):
        if len(groups) != len(state.groups):
            refuse(f"stage {s} has {len(groups)} param groups, and the state {len(state.groups)}")
        for g, shapes in enumerate(groups):
            if odd := next((n for n in shapes if n not in members[g]), None):
                refuse(f'"{odd}" is in param group {g} of stage {s}, and not in that of the state')
            if odd := next((n for n, shape in shapes.items() if state.tensors[n].shape != shape), None):
                refuse(f'"{odd}" is {list(shapes[odd])}, and {list(state.tensors[odd].shape)} in the state')
    for g, group in enumerate(state.groups):
        trained = dict.fromkeys(n for groups in pipeline.stages for n in groups[g])
        if odd := next((n for n in group.params if n not in trained), None):
            refuse(f'no stage trains "{odd}"')
        if tuple(trained) != group.params:
            plan.about_groups = "in the order of the stages that train them"
        state.groups[g] = group._replace(params=tuple(trained))
    buffers = list(dict.fromkeys(n for own in pipeline.buffers for n in own))
    if odd := next(iter(set(buffers) ^ set(state.buffers)), None):
        refuse(f'"{odd}" is a buffer in one of them only')
    state.buffers = buffers
