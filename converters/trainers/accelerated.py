"""Programs with folders of their own for parts of one state: diffusers' scripts, lerobot, fairseq2.

diffusers  checkpoint-{step}/unet/, transformer/, ...           what save_pretrained of the model writes
           unet_ema/                                            the average, extra.unet_ema
           optimizer.bin, scheduler.bin, random_states_{r}.pkl  as Accelerate writes them
lerobot    {step}/pretrained_model/                             model.safetensors, or pytorch_model_fsdp_0/ (dcp)
           {step}/training_state/optimizer_0/                   dcp, of a sharded job
           optimizer_state.safetensors, optimizer_param_groups.json    otherwise: "state/{number}/{slot}", not read
           scheduler_state.json, rng_state.safetensors, training_step.json
fairseq2   step_{n}/model/pp_{p}/tp_{t}/sdp_{s}.pt              a state dict, the shard of a rank
           optimizer/pp_{p}/tp_{t}/sdp_{s}.pt, trainer/rank_{r}.pt, data_reader/dp_{d}.pt

diffusers and lerobot without FSDP number the parameters of the optimizer; where nothing tells their order, it is listed
as not read. Of fairseq2 a model in one file is read, and shards are refused: they do not say how they are cut.

Sources: diffusers' examples/ of 0.36; src/lerobot/common/train_utils.py of github.com/huggingface/lerobot and
src/fairseq2/checkpoint/manager.py of facebookresearch/fairseq2, August 2026. None of them was run.
"""

from __future__ import annotations

import re

from ckpttool.errors import Unsupported
from ckpttool.program import Program, StateFile
from ckpttool.storage.source import Source

from .dialect import DATA, Dialect, DirectoryPart, make_resume_advice, make_unrun_program_rows
from .filenames import RANDOM_STATES, list_optimizer_parts, list_other_parts, match_numbered_names

__all__ = ["DIFFUSERS", "FAIRSEQ2", "LEROBOT"]

_IMAGE_MODEL = r"diffusion_pytorch_model.*\.safetensors"
_MODEL, _STATE = "pretrained_model", "training_state"


def _list_image_models(source: Source) -> list[str]:
    """List the folders with models of diffusers, the trained model before its EMA copies (`*_ema`)."""
    found = [
        n for n in source.list() if source.glance(n)[0] and any(re.fullmatch(_IMAGE_MODEL, x) for x in source.list(n))
    ]
    return sorted(found, key=lambda n: (n.endswith("_ema"), n))


def _is_diffusers(source: Source) -> tuple[bool, str]:
    """Return whether a folder has one model of diffusers, not counting EMA copies, and RNG states of Accelerate; and
    the reason as text."""
    names = source.list()
    if not any(match_numbered_names(names, RANDOM_STATES)):
        return False, "no random_states_0.pkl"
    models = [n for n in _list_image_models(source) if not n.endswith("_ema")]
    if len(models) != 1:
        return False, f"{len(models)} folders with diffusion_pytorch_model.safetensors"
    return True, f"has {models[0]}/ and random_states_0.pkl"


def _list_diffusers_parts(source: Source) -> list[DirectoryPart]:
    """List the parts: the model, its EMA copies, optimizers, and the small files that Accelerate writes."""
    names = source.list()
    model, *averages = _list_image_models(source)
    out = [DirectoryPart(model, "hf", "model")]
    out += [DirectoryPart(n, "hf", "extra", (n,)) for n in averages]
    out += [DirectoryPart(p.name, p.layout, "optim", optional=True) for p in list_optimizer_parts(names)]
    return [*out, *list_other_parts(names, RANDOM_STATES)]


DIFFUSERS = Dialect(
    name="diffusers",
    title="diffusers",
    detect=_is_diffusers,
    parts=_list_diffusers_parts,
    world_size=lambda source: max((i + 1 for _, i in match_numbered_names(source.list(), RANDOM_STATES)), default=None),
    program=Program(
        rows=make_unrun_program_rows(
            "diffusers",
            "diffusers",
            "`checkpoint-N` of its scripts: the model and its average in folders, states of Accelerate",
            "weights, and what is beside them",
            optimizer="where its order is known",
            loader="none saved",
        ),
        next_step=make_resume_advice("diffusers", "as it was saved"),
        step_word="checkpoint",
        saves_every_rng=True,
    ),
)


def _is_lerobot(source: Source) -> tuple[bool, str]:
    """Return whether a folder has pretrained_model/ with weights and training_state/; and, as text, why or why not."""
    names = source.list()
    if _MODEL not in names or _STATE not in names:
        return False, f"no {_MODEL}/ and {_STATE}/"
    found = "training_step.json" in source.list(_STATE) and _find_lerobot_weights(source) is not None
    return found, f"has {_MODEL}/ and {_STATE}/" + ("" if found else ", but no weights or no training_step.json")


def _find_lerobot_weights(source: Source) -> DirectoryPart | None:
    """Return the part with the weights in pretrained_model/; None if there are no weights."""
    names = source.list(_MODEL)
    if "pytorch_model_fsdp_0" in names:
        return DirectoryPart(f"{_MODEL}/pytorch_model_fsdp_0", "dcp", "model")
    name = next((n for n in ("model.safetensors", "adapter_model.safetensors") if n in names), None)
    return DirectoryPart(f"{_MODEL}/{name}", "hf", "model") if name else None


def _list_lerobot_parts(source: Source) -> list[DirectoryPart]:
    """List the parts: weights, optimizer (of a sharded job), scheduler and step counter."""
    weights, names = _find_lerobot_weights(source), source.list(_STATE)
    out = [weights] if weights is not None else []
    if "optimizer_0" in names:
        out.append(DirectoryPart(f"{_STATE}/optimizer_0", "dcp", "optim"))
    files = {"scheduler_state.json": "scheduler", "training_step.json": "trainer"}
    return [*out, *(DirectoryPart(f"{_STATE}/{n}", DATA, component) for n, component in files.items() if n in names)]


LEROBOT = Dialect(
    name="lerobot",
    title="lerobot",
    detect=_is_lerobot,
    parts=_list_lerobot_parts,
    program=Program(
        rows=make_unrun_program_rows(
            "lerobot",
            "lerobot",
            "a step's `pretrained_model` and `training_state`",
            "weights, and what is beside them",
            optimizer="of sharded jobs",
            loader="none saved",
        ),
        next_step=make_resume_advice("lerobot", "as it was saved"),
        state_files=(
            StateFile(r"optimizer_state\.safetensors", "optimizer with numbers", "optim"),
            StateFile(r"rng_state\.safetensors", "RNG", "rng"),
        ),
        part_folders=f"{_MODEL}|{_STATE}",
        is_part=lambda name, beside: name == _STATE and _MODEL in beside,
        step_word="",
    ),
)

_SHARD = "pp_00/tp_00/sdp_00.pt"


def _is_fairseq2(source: Source) -> tuple[bool, str]:
    """Return whether a folder is a step of fairseq2; and, as text, why or why not."""
    if "model" not in source.list() or not source.exists(f"model/{_SHARD}"):
        return False, f"no model/{_SHARD}"
    return True, f"has model/{_SHARD}"


def _list_fairseq2_parts(source: Source) -> list[DirectoryPart]:
    """List the parts: weights, optimizer, and the trainer and data reader files of each rank.

    Raises:
        Unsupported: the model is in several shards.
    """
    names = source.list()
    for at, pattern in (("model", r"pp_(\d+)"), ("model/pp_00", r"tp_(\d+)"), ("model/pp_00/tp_00", r"sdp_(\d+)\.pt")):
        if len(found := list(match_numbered_names(source.list(at), pattern))) > 1:
            raise Unsupported(
                f"{source.root}/{at} holds {len(found)} shards, {found[0][0]} to {found[-1][0]}. They do not say how "
                "fairseq2 cut the weights, so ckpttool does not join them; save_as_hugging_face of the recipe writes "
                "them whole.",
                code="CKPT0319",
            )
    out = [DirectoryPart(f"model/{_SHARD}", "full", "model")]
    if source.exists(f"optimizer/{_SHARD}"):
        out.append(DirectoryPart(f"optimizer/{_SHARD}", "full", "optim", optional=True))
    for folder, component, pattern in (
        ("trainer", "trainer", r"rank_(\d+)\.pt"),
        ("data_reader", "dataloader", r"dp_(\d+)\.pt"),
    ):
        for i, (name, rank) in enumerate(match_numbered_names(source.list(folder), pattern) if folder in names else ()):
            own = (str(rank),) if component == "dataloader" else ()
            out.append(DirectoryPart(f"{folder}/{name}", DATA, component, own, rank="" if own or not i else str(rank)))
    return out


FAIRSEQ2 = Dialect(
    name="fairseq2",
    title="fairseq2",
    detect=_is_fairseq2,
    parts=_list_fairseq2_parts,
    program=Program(
        rows=make_unrun_program_rows(
            "fairseq2",
            "fairseq2",
            "`step_N` of a model in one file; shards are refused",
            "weights, and what is beside them",
            optimizer="where its order is known",
            loader="yes",
        ),
        next_step=make_resume_advice("fairseq2", "as it was saved"),
        part_folders="model|optimizer|trainer|data_reader",
        is_part=lambda name, beside: name in ("data_reader", "trainer", "optimizer") and "model" in beside,
        step_word="step",
    ),
)
