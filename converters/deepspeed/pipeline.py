"""Saves of DeepSpeed's PipelineModule: weights by layer, the optimizer by stage.

    DIR/<tag>/layer_<i>-[model_00-]model_states.pt         the state dict of layer i of the whole model
    DIR/<tag>/mp_rank_<s>_model_states.pt                  of stage s; `module` is None
    DIR/<tag>/[bf16_]zero_pp_rank_<d>_mp_rank_<s>_optim_states.pt    ZeRO-1: of data parallel rank d of stage s

A stage is a job of ZeRO-1 by itself: param_shapes of its model file has its parameters, by names that are the same for
any number of stages: `<i>.<parameter>`, and `tied_modules.<key>.<parameter>` for a TiedLayerSpec. The file of a tied
layer has its own number, and nothing says which key it has: it is the one whose parameters have the same names and
shapes. A tied layer that has a forward_fn has no file. Every stage with a tied layer has masters and moments of it,
which are equal, since gradients are summed over the stages; those of the first stage are read, and compared with the
others before anything is converted.

Sources: deepspeed 0.19.8, runtime/pipe/module.py (_build, ckpt_layer_path, save_state_dict), runtime/pipe/engine.py
(module_state_dict), runtime/pipe/topology.py.
"""

from __future__ import annotations

from typing import NamedTuple

from ckpttool.errors import Corrupt, Unsupported
from ckpttool.formats.pickles import short
from ckpttool.formats.stored_tensors import StoredTensor

from .files import LAYER, MODEL, OPTIM, File, Save, find_save, param_shapes, refuse_mixed_saves
from .geometry import Groups
from .module_state import SaveReader

__all__ = ["Pipeline", "Stage", "is_pipeline", "load_stages"]


class Stage(NamedTuple):
    """A stage of a pipeline: its model file, and the save as if the stage were all of it."""

    model: File
    save: Save


class Pipeline(NamedTuple):
    """The layers and stages of a pipeline.

    `layers` {name of the file of a layer: {key in it: name in the whole model}}; `stages` the parameters of each stage,
    [{name: shape}] by param group; `buffers` the names of each stage's buffers.
    """

    layers: dict[str, dict[str, str]]
    stages: list[Groups]
    buffers: list[list[str]]


def is_pipeline(save: Save) -> bool:
    """Return whether a save is that of a PipelineModule, which has one file of weights for each layer."""
    return any(map(LAYER.fullmatch, save.names))


def load_stages(reading: SaveReader) -> tuple[list[Stage], Pipeline]:
    """Load the model files of all stages and the files of all layers; return (the stages in their order, the layers and
    stages of the pipeline).

    `module` of each model file becomes the state dict of the whole model.

    Raises:
        Corrupt: a file is missing, or files are from different saves.
        Unsupported: the save is without ZeRO or also tensor parallel, or a layer may be any of several tied ones.
    """
    save = reading.save = find_save(reading.source, reading.options.tag)
    reading.tensor_ranks = 1
    names = reading.files_of_ranks(MODEL, 1, max(save.files(MODEL, 1), default=0) + 1, "model")
    models = [reading.load(n) for n in names]
    refuse_mixed_saves(models, ("global_steps", "skipped_steps"))
    for f in models:
        if (
            f.get("mp_world_size", int) != len(models)
            or f.get("dp_world_size", int) < 1
            or f.tree.get("dp_world_size") != models[0].tree.get("dp_world_size")
        ):
            raise Corrupt(
                f"{f.what}: mp_world_size is {short(f.tree.get('mp_world_size'))}, dp_world_size "
                f"{short(f.tree.get('dp_world_size'))}; there are {len(models)} stages. The files are from different "
                "saves, or some are missing.",
                code="CKPT0409",
            )
        if f.tree.get("param_shapes") is None:
            raise Unsupported(
                f"{f.what}: a pipeline without ZeRO, whose files name neither the parameters of a stage nor tied "
                "layers. Save once with ZeRO stage 1.",
                code="CKPT0325",
            )
        dimensions = f.tree.get("checkpoint_parallel_dimensions")
        if isinstance(dimensions, dict) and dimensions.get("tp_degree") not in (None, 1):
            raise Unsupported(
                f"{f.what}: {short(dimensions)}: layers that tensor parallel ranks have parts of.", code="CKPT0325"
            )
    pipeline = Pipeline({}, [param_shapes(f) for f in models], [f.buffer_names() for f in models])
    trained = {n: s for groups in pipeline.stages for group in groups for n, s in group.items()}
    buffers = list(dict.fromkeys(n for own in pipeline.buffers for n in own))
    module = _load_layers(reading, trained, set(buffers), pipeline.layers)
    for f in models:
        f.tree |= {"module": module, "buffer_names": buffers}
        # the stages are put together here, and what is left is a job of one model parallel rank
        f.tree |= {"mp_world_size": 1, "checkpoint_parallel_dimensions": None}
    stages = [
        Stage(f, Save(save.folder, [n for n in save.names if (m := OPTIM.fullmatch(n)) and int(m[3]) == s]))
        for s, f in enumerate(models)
    ]
    return stages, pipeline


def _load_layers(
    reading: SaveReader,
    trained: dict[str, tuple[int, ...]],
    buffers: set[str],
    layers: dict[str, dict[str, str]],
) -> dict[str, StoredTensor | object]:
    """Load the files of all layers, and return {name: tensor, or extra state} of the whole model.

    Args:
        reading: the reader of the save, which records the file of each entry.
        trained: {name: shape} of the parameters of all stages.
        buffers: the names of all buffers.
        layers: gets {name of each file: {key in it: name in the whole model}}.

    Raises:
        Corrupt: a layer has two files, or a parameter of param_shapes is in no file and not tied.
        Unsupported: a file fits several tied layers.
    """
    tied: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in trained.items():
        if name.startswith("tied_modules."):
            key, parameter = name.removeprefix("tied_modules.").split(".", 1)
            tied.setdefault(key, {})[parameter] = shape
    out: dict[str, StoredTensor | object] = {}
    for number, names in reading.save.files(LAYER, 1).items():
        if len(names) > 1:
            raise Corrupt(f"{reading.where}: {' and '.join(names)} are both of layer {number}.", code="CKPT0411")
        f = reading.load(names[0])
        own = {str(k): t.shape for k, t in f.tree.items() if isinstance(t, StoredTensor)}
        prefix = str(number)
        if not any(f"{number}.{k}" in trained or f"{number}.{k}" in buffers for k in own):
            like = [key for key, shapes in tied.items() if shapes.items() <= own.items()]
            if len(like) > 1:
                raise Unsupported(
                    f"{f.what}: the tied layers {', '.join(like)} are all like this one, and no file says which it is.",
                    code="CKPT0325",
                )
            prefix = f"tied_modules.{like[0]}" if like else prefix
        layers[names[0]] = {str(key): f"{prefix}.{key}" for key in f.tree}
        for key, t in f.tree.items():
            if f"{prefix}.{key}" in out:
                continue  # a tied layer that another stage saved too
            out[f"{prefix}.{key}"] = t
            reading.homes[f"{prefix}.{key}"] = f
    if lost := [n for n in trained if n not in out and not n.startswith("tied_modules.")]:
        layer = lost[0].split(".", 1)[0]
        raise Corrupt(
            f'{reading.where}: param_shapes lists "{lost[0]}", and no file layer_{layer.zfill(2)}-*model_states.pt has '
            "it. Fetch it.",
            code="CKPT0402",
        )
    return out
