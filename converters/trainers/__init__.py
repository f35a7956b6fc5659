"""Directories of trainers, one dialect each: what every file of a checkpoint is, and how such a directory is known.

accelerate   accelerator.save_state(DIR)

    pytorch_model_fsdp_{i}/, optimizer_{i}/             SHARDED_STATE_DICT: folders of dcp, a model and an optimizer
                                                        each
    pytorch_model_fsdp_rank{rank}.bin, optimizer_{i}/   LOCAL_STATE_DICT: flat parameters, read by fsdp1
    pytorch_model_fsdp.bin, optimizer.bin               FULL_STATE_DICT (pytorch_model_fsdp_{i}.bin and
                                                        optimizer_{i}.bin, i > 0)
    model.safetensors, pytorch_model.bin                without FSDP (model_{i}.safetensors, i > 0), or shards of either
                                                        with an index
    scheduler.bin, sampler.bin, dl_state_dict.bin       and scheduler_{i}.bin, ...
    scaler.pt                                           GradScaler.state_dict()
    random_states_{rank}.pkl                            {"step", "random_state", "numpy_random_seed",
                                                        "torch_manual_seed", ...}
    custom_checkpoint_{i}.pkl                           objects that were registered
    latest, pytorch_model/, pytorch_model_{i}/          with DeepSpeed: a save of each engine, model and optimizer in
                                                        one

trainer      transformers' Trainer and TRL: checkpoint-{step}/

    the files of accelerate for the model, or model.safetensors, adapter_model.safetensors with adapter_config.json
    (PEFT) optimizer.pt (DDP, numbers instead of names), optimizer.bin (FSDP FULL), optimizer_0/ (FSDP SHARDED) latest,
    global_step{step}/ (DeepSpeed: model and optimizer in one; its scheduler too, if the engine has one) scheduler.pt,
    scaler.pt, rng_state.pth or rng_state_{rank}.pth, trainer_state.json, training_args.bin (arguments, no state)

lightning    FSDPStrategy and ModelParallelStrategy with sharded checkpoints: a folder of dcp

    .metadata, __{rank}_{n}.distcp    {"state_dict", "optimizer_{i}"}, or {"model", ...} of Fabric
    meta.pt                           the rest of a Lightning checkpoint: epoch, global_step, loops, callbacks,
                                      lr_schedulers, ...

verl         global_step_{step}/actor/ and critic/, or the folder above where it has no critic

    model_world_size_{n}_rank_{rank}.pt, optim_..., extra_state_...    files of ranks, read by fsdp1; extra: scheduler,
                                                                       RNG
    huggingface/                                                       config and tokenizer
    ../data.pt                                                         the state of the data loader

torchtune    epoch_{n}/ or step_{n}/, and recipe_state/ next to it: trainers/torchtune.py

automodel    NeMo AutoModel: trainers/automodel.py
transformers_sharded    save_pretrained(distributed_checkpoint=True) and save_optimizer_distributed:
                        trainers/automodel.py
olmo         OLMo-core's step folders: trainers/olmo.py
veomni       VeOmni's global_step_{n}/: trainers/veomni.py
script       model.pt and optimizer.pt of a training script: trainers/scripts.py

Sources: accelerate/checkpointing.py, accelerate/utils/constants.py, accelerate/utils/fsdp_utils.py of 1.15;
transformers/trainer.py (_save_checkpoint, _save_optimizer_and_scheduler, _save_rng_state) of 5.23;
lightning/fabric/strategies/fsdp.py and model_parallel.py of 2.6; the directories in fixtures/, which they wrote.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from ckpttool import layouts
from ckpttool.engine.recorded import RECORD
from ckpttool.storage import remote
from ckpttool.storage.overlay import parent_of
from ckpttool.storage.source import Source

from ..deepspeed.files import SAVES
from ..options import DirectoryOptions
from .automodel import AUTOMODEL, TRANSFORMERS
from .dialect import DATA, LEFT_OVER, TREE, Dialect, Part, of_one_model
from .filenames import (
    RANDOM_STATES,
    RNG_STATE,
    models_in,
    numbered,
    optimizers_in,
    refuse_missing_shards,
    rest_in,
    state_in,
)
from .olmo import OLMO
from .scripts import SCRIPT
from .torchtune import TORCHTUNE
from .veomni import VEOMNI

__all__ = ["LAYOUTS"]


def _saves(source: Source) -> list[Part]:
    """The saves of DeepSpeed's engines that make up a directory: the one that `latest` names, or one a model
    (Accelerate)."""
    zero = layouts.find("zero3")
    models = [
        Part(name, zero.name, "model", (str(i),))
        for name, i in numbered(source.list(), r"pytorch_model(?:_(\d+))?")
        if _is_deepspeed(source.below(name))
    ]
    return models if len(models) > 1 else [Part("", zero.name, "model")]


def _is_deepspeed(source: Source) -> bool:
    return any(layouts.find(name).detect(layouts.Place(source, None))[0] for name in ("zero3", "zero2"))


def _is_accelerate(source: Source) -> tuple[bool, str]:
    names = source.list()
    if "trainer_state.json" in names:
        return False, "trainer_state.json: of Hugging Face Trainer"
    ranks = next(numbered(names, RANDOM_STATES), None)
    if "latest" in names:
        if ranks and _is_deepspeed(source):
            return True, f"has {ranks[0]} and a save of DeepSpeed"
        return False, "latest, but no random_states_0.pkl beside it"
    parts = any(n.startswith("pytorch_model_fsdp") for n in names)
    others = optimizers_in(names) or LEFT_OVER in names or RECORD in names
    if models_in(names) and (ranks or (parts and others)):
        return True, f"has {ranks[0] if ranks else models_in(names)[0].name} and {models_in(names)[0].name}"
    return False, "no random_states_0.pkl beside a model"


def _is_trainer(source: Source) -> tuple[bool, str]:
    names = source.list()
    if "latest" in names:
        found = next((n for n in names if n == "trainer_state.json" or re.fullmatch(RNG_STATE, n)), None)
        if found and _is_deepspeed(source):
            return True, f"has {found} and a save of DeepSpeed"
        return False, "latest, but no trainer_state.json beside it"
    if "trainer_state.json" not in names:
        return False, "no trainer_state.json"
    if not models_in(names):
        return False, "trainer_state.json, but no weights"
    return True, "has trainer_state.json"


def _ranks(pattern: str, source: Source) -> int | None:
    """The ranks that saved their RNG state; None where the engine's own files tell."""
    names = source.list()
    if "latest" in names:
        return None
    several = any(n.startswith("rng_state_") for n in names)  # Trainer numbers the file of a rank that is not alone
    return max((max(i + 1, 1 + several) for _, i in numbered(names, pattern)), default=None)


def _notes_of_trainer(source: Source) -> list[str]:
    names = source.list()
    if "latest" in names or "scheduler.pt" in names or not optimizers_in(names):
        return []
    return [
        "no scheduler.pt, which Trainer writes with the optimizer: without it, it resumes neither of the two and says "
        "nothing"
    ]


def _parts_of(rng: str, source: Source) -> list[Part]:
    refuse_missing_shards(source)
    names = source.list()
    state = _saves(source) if "latest" in names else state_in(names)
    counters = [Part("trainer_state.json", DATA, "trainer")] if "trainer_state.json" in names else []
    return [*state, *rest_in(names, rng), *counters]


ACCELERATE = Dialect(
    name="accelerate",
    title="Accelerate",
    detect=_is_accelerate,
    write=layouts.late("ckpttool.converters.trainers.write:write_accelerate"),
    options=DirectoryOptions,
    parts=partial(_parts_of, RANDOM_STATES),
    world_size=partial(_ranks, RANDOM_STATES),
    saves=SAVES,
)
TRAINER = Dialect(
    name="trainer",
    title="Hugging Face Trainer",
    detect=_is_trainer,
    write=layouts.late("ckpttool.converters.trainers.write:write_trainer"),
    options=DirectoryOptions,
    parts=partial(_parts_of, RNG_STATE),
    world_size=partial(_ranks, RNG_STATE),
    notes=_notes_of_trainer,
    aliases=("hf-trainer", "trl"),
    saves=SAVES,
)


def _is_lightning(source: Source) -> tuple[bool, str]:
    names = source.list()
    if "meta.pt" not in names:
        return False, "no meta.pt"
    return ".metadata" in names, "has meta.pt and .metadata" if ".metadata" in names else "meta.pt, but no .metadata"


LIGHTNING = Dialect(
    name="lightning",
    title="Lightning",
    suffixes=(".ckpt",),
    detect=_is_lightning,
    own_keys=True,
    write=layouts.late("ckpttool.converters.trainers.write:write_lightning"),
    parts=lambda source: [Part("", "dcp", "model"), Part("meta.pt", TREE, "trainer")],
)


def _of_verl(source: Source, folder: str = "") -> str | None:
    """The first rank's file of a model."""
    return next((n for n in source.list(folder) if re.fullmatch(r"model_world_size_\d+_rank_0\.pt", n)), None)


def _is_verl(source: Source) -> tuple[bool, str]:
    if found := _of_verl(source):
        return True, f"has {found}"
    if _of_verl(source, "actor"):
        return ("critic" not in source.list()), "has actor/" + (
            " and critic/: two models" if source.list("critic") else ""
        )
    return False, "no model_world_size_<n>_rank_0.pt"


def _loader_of_verl(source: Source) -> list[str]:
    parent, name = parent_of(source)
    if name not in ("actor", "critic") or not re.fullmatch(r".*/global_step_\d+", parent):
        return []
    with remote.open_source(parent) as above:
        return ["data.pt"] if above.exists("data.pt") else []


def _parts_of_verl(source: Source) -> list[Part]:
    folder = "" if _of_verl(source) else "actor"
    out = [Part(folder, "fsdp1", "model", whole=True)]
    if source.sibling_names:
        out.append(Part("../data.pt", DATA, "dataloader"))
    elif folder and source.exists("data.pt"):
        out.append(Part("data.pt", DATA, "dataloader"))
    return out


VERL = Dialect(
    name="verl",
    title="verl",
    detect=_is_verl,
    siblings=_loader_of_verl,
    parts=_parts_of_verl,
    own_keys=True,
)


def _of_dcp(what: str) -> Any:
    return lambda *args: getattr(layouts.find("dcp"), what)(*args)


TORCHTITAN = layouts.Layout(
    name="torchtitan",
    title="step folder of torchtitan, for its CheckpointManager",
    read=_of_dcp("read"),
    locate=_of_dcp("locate"),
    detect=lambda where: (False, "is read as dcp"),
    write=layouts.late("ckpttool.converters.trainers.write:write_titan"),
    prepare=lambda ckpt, source, options: of_one_model(ckpt),
    aliases=("titan",),
    reader_uses=("config", "like"),
    writer_uses=("world_size",),
    needs_named_optimizer=True,
    of_trainer=True,
    keeps_subclasses=True,
)
LAYOUTS = (
    *(
        dialect.layout()
        for dialect in (ACCELERATE, TRAINER, LIGHTNING, VERL, TORCHTUNE, AUTOMODEL, TRANSFORMERS, OLMO, VEOMNI, SCRIPT)
    ),
    TORCHTITAN,
)
