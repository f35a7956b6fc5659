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
llamafactory LLaMA-Factory v1's checkpoint-{step}/: trainers/llamafactory.py
olmo         OLMo-core's step folders: trainers/olmo.py
veomni       VeOmni's global_step_{n}/: trainers/veomni.py
skyrl, nemo_rl, prime_rl, xtuner    a model in one folder and files beside it: trainers/reinforcement.py
diffusers, lerobot, fairseq2         trainers/accelerated.py
script       model.pt and optimizer.pt of a training script: trainers/scripts.py

Sources: accelerate/checkpointing.py, accelerate/utils/constants.py, accelerate/utils/fsdp_utils.py of 1.15;
transformers/trainer.py (_save_checkpoint, _save_optimizer_and_scheduler, _save_rng_state) of 5.23;
lightning/fabric/strategies/fsdp.py and model_parallel.py of 2.6; the directories in fixtures/, which they wrote.
"""

from __future__ import annotations

import re
from functools import partial

from ckpttool import layouts
from ckpttool.engine.discover.unread_files import classify_state_file
from ckpttool.engine.recorded import RECORD
from ckpttool.formats.stored_tensors import split_components
from ckpttool.index.trainer_trees import TrainerTree
from ckpttool.program import Advice, ForTrainer, Half, Program, SeenFolder, StateFile, Unfinished
from ckpttool.storage.overlay import find_parent_folder
from ckpttool.storage.source import Source
from ckpttool.storage.sources import open_source

from .. import dcp
from ..deepspeed import zero
from ..deepspeed.files import SAVES
from ..options import DirectoryOptions, MeshOptions, VerlOptions
from .accelerated import DIFFUSERS, FAIRSEQ2, LEROBOT
from .automodel import AUTOMODEL, TRANSFORMERS
from .dialect import DATA, DEEPSPEED, LEFT_OVER, TREE, Dialect, DirectoryPart, require_single_model
from .filenames import (
    RANDOM_STATES,
    RNG_STATE,
    list_model_parts,
    list_optimizer_parts,
    list_other_parts,
    list_state_parts,
    match_numbered_names,
    refuse_missing_shards,
)
from .llamafactory import LLAMA_FACTORY
from .olmo import OLMO
from .reinforcement import NEMO_RL, PRIME_RL, SKYRL, XTUNER, is_skyrl_model
from .scripts import SCRIPT, SCRIPT_DCP
from .torchtune import TORCHTUNE
from .veomni import VEOMNI

__all__ = ["LAYOUTS"]


def _list_engine_saves(source: Source) -> list[DirectoryPart]:
    """List the parts that hold the saves of DeepSpeed's engines: one folder per model, by number, where Accelerate
    saved several models; otherwise the directory itself, whose file `latest` names the save."""
    models = [
        DirectoryPart(name, DEEPSPEED, "model", (str(i),))
        for name, i in match_numbered_names(source.list(), r"pytorch_model(?:_(\d+))?")
        if _is_deepspeed(source.below(name))
    ]
    return models if len(models) > 1 else [DirectoryPart("", DEEPSPEED, "model")]


def _is_deepspeed(source: Source) -> bool:
    """Return whether a folder is a save of DeepSpeed's engine."""
    return any(layout.detect(layouts.Place(source, None))[0] for layout in zero.LAYOUTS)


def _is_accelerate(source: Source) -> tuple[bool, str]:
    """Return whether Accelerate's `save_state` wrote a folder, and the reason as text. It did if the folder holds a
    model and files that only Accelerate writes."""
    names = source.list()
    if "trainer_state.json" in names:
        return False, "trainer_state.json: of Hugging Face Trainer"
    ranks = next(match_numbered_names(names, RANDOM_STATES), None)
    if "latest" in names:
        if ranks and _is_deepspeed(source):
            return True, f"has {ranks[0]} and a save of DeepSpeed"
        return False, "latest, but no random_states_0.pkl beside it"
    parts = any(n.startswith("pytorch_model_fsdp") for n in names)
    ours = LEFT_OVER in names or RECORD in names  # written of a state without RNG, also for one process without FSDP
    others = (parts and list_optimizer_parts(names)) or (ours and (parts or "pytorch_model.bin" in names))
    if list_model_parts(names) and (ranks or others):
        return (
            True,
            f"has {ranks[0] if ranks else list_model_parts(names)[0].name} and {list_model_parts(names)[0].name}",
        )
    return False, "no random_states_0.pkl beside a model"


def _is_hf_trainer(source: Source) -> tuple[bool, str]:
    """Return whether Hugging Face Trainer wrote a folder, and the reason as text. It did if the folder holds
    trainer_state.json and weights, or files of Trainer and a save of DeepSpeed."""
    names = source.list()
    if "latest" in names:
        found = next((n for n in names if n == "trainer_state.json" or re.fullmatch(RNG_STATE, n)), None)
        if found and _is_deepspeed(source):
            return True, f"has {found} and a save of DeepSpeed"
        return False, "latest, but no trainer_state.json beside it"
    if "trainer_state.json" not in names:
        return False, "no trainer_state.json"
    if not list_model_parts(names):
        return False, "trainer_state.json, but no weights"
    return True, "has trainer_state.json"


def _count_rng_ranks(pattern: str, source: Source) -> int | None:
    """Return the number of ranks that saved RNG state in files whose names match `pattern`. None if no name matches, or
    if the folder has a file `latest`: then DeepSpeed's files tell the world size."""
    names = source.list()
    if "latest" in names:
        return None
    several = any(n.startswith("rng_state_") for n in names)  # Trainer numbers the file of a rank that is not alone
    return max((max(i + 1, 1 + several) for _, i in match_numbered_names(names, pattern)), default=None)


def _note_missing_scheduler(source: Source) -> list[str]:
    """Return one note if the directory has an optimizer and no scheduler.pt, without which Trainer resumes neither; an
    empty list otherwise, and for a save of DeepSpeed."""
    names = source.list()
    if "latest" in names or "scheduler.pt" in names or not list_optimizer_parts(names):
        return []
    return [
        "no scheduler.pt, which Trainer writes with the optimizer: without it, it resumes neither of the two and says "
        "nothing"
    ]


def _list_state_parts(rng: str, source: Source) -> list[DirectoryPart]:
    """List the parts of a directory of Accelerate or Trainer.

    Args:
        rng: pattern of the names of the files with RNG states; its group is the rank.
        source: the directory.

    Raises:
        Corrupt: a shard of the weights is missing.
    """
    refuse_missing_shards(source)
    names = source.list()
    state = _list_engine_saves(source) if "latest" in names else list_state_parts(names)
    counters = [DirectoryPart("trainer_state.json", DATA, "trainer")] if "trainer_state.json" in names else []
    return [*state, *list_other_parts(names, rng), *counters]


#: Folders of dcp that hold one model or one optimizer of a directory.
_HALF = r"pytorch_model_fsdp_\d+|optimizer_\d+"
_OF_DEEPSPEED = r"(.*/)?(bf16_)?(zero_pp_rank_\d+_)?mp_rank_\d+.*_states\.pt"


def _describe_next_step(trainer: str, whole: str, of_fsdp1: str, advice: Advice) -> str:
    """Return advice on how Trainer or Accelerate resumes from a directory, chosen by the files in it.

    Args:
        trainer: the trainer's name, as messages have it.
        whole: pattern of a file that the trainer writes for FULL_STATE_DICT only.
        of_fsdp1: what to do with a SHARDED directory that FSDP1 wrote; its files do not differ from those of FSDP2.
        advice: the directory, and the commands that convert it.
    """

    def has(pattern: str) -> bool:
        """Return whether a file's name begins with what the pattern matches."""
        return any(re.match(pattern, n) for n in advice.ckpt.files)

    again = advice.convert(f"--for {advice.ckpt.layout} -n RANKS")
    if any(re.fullmatch(_OF_DEEPSPEED, n) for n in advice.ckpt.files):
        return (
            f"resumes in {trainer} with DeepSpeed at {advice.ranks}; at another world size: "
            f"{advice.convert('--for deepspeed -n RANKS')}"
        )
    if not advice.has_optimizer and trainer == "Trainer":  # Accelerate stops without the state of one
        return f"{trainer} starts with a new optimizer from these weights; {advice.export_advice()}"
    if trainer == "Trainer" and not has("scheduler.pt"):
        return f"without scheduler.pt Trainer starts with a new optimizer from these weights; {advice.export_advice()}"
    if has(r"pytorch_model_fsdp_rank\d+\.bin"):
        return f"resumes in {trainer} at {advice.ranks}; at another world size: {again}"
    if has(r"pytorch_model_fsdp_\d+/"):
        full = advice.convert(f"--for {advice.ckpt.layout} --state-dict-type full -n RANKS")
        return (
            f"saved with FSDP2, it resumes at any world size in {trainer}, nothing to convert; saved with FSDP1, "
            f"{of_fsdp1}: {full}"
        )
    if has(whole):
        return f"resumes at any world size in {trainer} with FSDP; nothing to convert"
    return f"resumes in {trainer} without FSDP; for a job with FSDP: {again}"


def _find_unfinished_half(folder: SeenFolder) -> Unfinished | None:
    """Return the evidence that a save did not finish, a folder of a model or an optimizer without .metadata; None if
    every such folder has one."""
    for half in (n for n in folder.names if re.fullmatch(_HALF, n)):
        if not any(re.fullmatch(r"(__\d+)?\.metadata", n) for n in folder.source.list(half)):
            return Unfinished(f"no {half}/.metadata, which is written last")
    return None


#: Its rows in the tables of the documents (docs/_hooks.py).
_ROWS_OF_ACCELERATE = {
    "readme-trainers": (
        (
            "[Accelerate](docs/how-to/trainers/accelerate.md) (**accelerate**)",
            "the same, LOCAL, several models",
            "yes",
            "yes",
            "yes",
            "yes",
        ),
    ),
    "layouts": (
        (
            "**accelerate**, **trainer**, **lightning**, **torchtitan**",
            (
                "whole directories of Accelerate, HF Trainer and TRL, Lightning; torchtitan's is read as `dcp`: see "
                "[Convert a trainer's checkpoint](../how-to/trainers.md)"
            ),
            "what these trainers resume from, for FSDP SHARDED or, with `--state-dict-type full`, FULL",
        ),
    ),
    "directories": (
        (
            ("what Accelerate's `save_state` writes: FSDP SHARDED, FULL and LOCAL, DDP; several models and optimizers"),
            "`accelerate`",
            "weights, optimizers, schedulers, scaler, data loaders, RNG of every rank, registered objects",
        ),
        (
            "the same two with DeepSpeed inside: `latest` and a save of the engine",
            "`trainer`, `accelerate`",
            "the save (ZeRO stage 0 to 3), and the trainer's own files as above",
        ),
    ),
    "for": (
        (
            "`pytorch_model_fsdp_0/` and `optimizer_0/`, schedulers, scaler, `random_states_<rank>.pkl`",
            "`accelerator.load_state(DIR)`",
        ),
    ),
    "resumed": (
        (
            "Accelerate: FSDP SHARDED, FULL, DDP",
            "yes",
            "yes, any world size",
            "yes",
            "yes",
            "of the ranks that the source has",
            "`sampler.bin`, `dl_state_dict.bin` are kept",
        ),
        (
            "Accelerate: FSDP1 LOCAL, several models",
            "yes",
            "not written",
            "yes",
            "yes",
            "read",
            "read",
        ),
    ),
}
ACCELERATE = Dialect(
    name="accelerate",
    title="Accelerate",
    detect=_is_accelerate,
    write=layouts.late("ckpttool.converters.trainers.write_directories:write_accelerate"),
    saves_peft_names=True,
    options=DirectoryOptions,
    parts=partial(_list_state_parts, RANDOM_STATES),
    world_size=partial(_count_rng_ranks, RANDOM_STATES),
    saves=SAVES,
    program=Program(
        rows=_ROWS_OF_ACCELERATE,
        next_step=partial(
            _describe_next_step, "Accelerate", r"pytorch_model_fsdp(_\d+)?\.bin", "convert it to whole files"
        ),
        state_files=(
            StateFile(r"dl_state_dict(_\d+)?\.(bin|pt|pth|ckpt)", "data loader", "dataloader"),
            StateFile(r"custom_checkpoint_\d+\.pkl", "registered objects", "extra"),
        ),
        halves=(Half(_HALF),),
        part_folders=_HALF,
        is_part=lambda name, beside: re.fullmatch(r"optimizer_\d+", name) is not None,
        unfinished=_find_unfinished_half,
        resumed_by=(ForTrainer("accelerate"),),
        saves_every_rng=True,
    ),
)
_CHECKPOINT = r"checkpoint-\d+"
_NO_STATE = "no trainer_state.json, which Trainer writes last"


def _find_unfinished_hf_save(folder: SeenFolder) -> Unfinished | None:
    """Return the evidence that a save of Trainer did not finish: a folder checkpoint-N holds an optimizer, scheduler or
    RNG state, and no trainer_state.json. None if it did finish, or if another program wrote the folder."""
    if not re.fullmatch(_CHECKPOINT, folder.name) or "trainer_state.json" in folder.names:
        return None
    if any(match_numbered_names(folder.names, RANDOM_STATES)):  # Accelerate's, of diffusers
        return None
    if folder.layout == LLAMA_FACTORY.name or LLAMA_FACTORY.program.unfinished(folder):  # its folders are named so, too
        return None
    kinds = {kind[1] for n in folder.names if (kind := classify_state_file(n)) is not None}
    if kinds & {"optim", "scheduler", "rng"} or any(re.fullmatch(_HALF, n) for n in folder.names):
        return Unfinished(_NO_STATE, "trainer")
    return None


#: Its rows in the tables of the documents (docs/_hooks.py).
_ROWS_OF_TRAINER = {
    "readme-trainers": (
        (
            "[HF Trainer, TRL](docs/how-to/trainers/hf-trainer.md) (**trainer**)",
            "FSDP SHARDED, FULL; DDP; LoRA; DeepSpeed",
            "yes",
            "yes",
            "yes",
            "none saved",
        ),
    ),
    "directories": (
        (
            "`checkpoint-N` of HF Trainer and TRL: FSDP SHARDED and FULL, DDP, one GPU, LoRA",
            "`trainer`",
            (
                "weights (`safetensors` or `.bin`, one file or shards) or adapter, optimizer, scheduler, scaler, "
                "RNG of every rank, `trainer_state.json`"
            ),
        ),
    ),
    "for": (
        (
            "the same with `rng_state_<rank>.pth` and `trainer_state.json`",
            "`Trainer.train(resume_from_checkpoint=DIR)`",
        ),
    ),
    "resumed": (
        (
            "HF Trainer, TRL: FSDP SHARDED, FULL",
            "yes",
            "yes, any world size",
            "yes",
            "yes",
            "of the ranks that the source has",
            "Trainer skips the batches that `trainer_state.json` counts",
        ),
        (
            "HF Trainer: DDP, one GPU",
            "yes",
            "yes, any world size",
            "yes",
            "yes",
            "as above",
            "as above",
        ),
        (
            "HF Trainer: LoRA",
            "yes",
            "with FSDP; `adapter_model.safetensors` of other jobs is not written",
            "yes",
            "yes",
            "as above",
            "as above",
        ),
    ),
}
TRAINER = Dialect(
    name="trainer",
    title="Hugging Face Trainer",
    detect=_is_hf_trainer,
    write=layouts.late("ckpttool.converters.trainers.write_directories:write_trainer"),
    saves_peft_names=True,
    options=DirectoryOptions,
    parts=partial(_list_state_parts, RNG_STATE),
    world_size=partial(_count_rng_ranks, RNG_STATE),
    notes=_note_missing_scheduler,
    aliases=("hf-trainer", "trl"),
    saves=SAVES,
    program=Program(
        rows=_ROWS_OF_TRAINER,
        next_step=partial(
            _describe_next_step,
            "Trainer",
            r"optimizer(_\d+)?\.bin",
            "Trainer resumes from it with other losses, but not from this",
        ),
        state_files=(StateFile(r"trainer_state\.json", "counters of the trainer", "trainer"),),
        unfinished=_find_unfinished_hf_save,
        gap_beside=lambda name: _NO_STATE if re.fullmatch(_CHECKPOINT, name) else None,
        step_word="checkpoint",
        resumed_by=(ForTrainer("trainer", "Hugging Face Trainer, TRL"),),
        saves_every_rng=True,
    ),
)


def _is_lightning(source: Source) -> tuple[bool, str]:
    """Return whether a folder has meta.pt and the index of a dcp folder; and, as text, why or why not."""
    names = source.list()
    if "meta.pt" not in names:
        return False, "no meta.pt"
    return ".metadata" in names, "has meta.pt and .metadata" if ".metadata" in names else "meta.pt, but no .metadata"


def _describe_lightning_next_step(advice: Advice) -> str:
    """Return advice on how Lightning resumes from its folder, or on how to convert a dcp folder with Lightning's keys
    to one."""
    if advice.ckpt.layout != LIGHTNING.name:
        again = advice.convert("--for lightning -n RANKS")
        return f"Lightning resumes from a folder with meta.pt, which is not here: {again}"
    model = advice.export_advice(" --config MODEL")
    return f"resumes at any world size in Lightning; nothing to convert ({model})"


#: Its rows in the tables of the documents (docs/_hooks.py).
_ROWS_OF_LIGHTNING = {
    "readme-trainers": (
        (
            "[Lightning](docs/how-to/trainers/lightning.md) (**lightning**)",
            "FSDP, ModelParallel, full, DeepSpeed",
            "yes",
            "yes",
            "none saved",
            "none saved",
        ),
    ),
    "directories": (
        (
            "Lightning's sharded `.ckpt` (FSDPStrategy, ModelParallelStrategy)",
            "`lightning`",
            "the DCP data, and `meta.pt`: epoch, loops, callbacks, schedulers",
        ),
    ),
    "for": (
        (
            "a sharded `.ckpt` folder with `meta.pt`",
            "`trainer.fit(ckpt_path=DIR)` with ModelParallelStrategy, or with FSDPStrategy if the source is of it",
        ),
    ),
    "resumed": (
        (
            "Lightning: FSDP, ModelParallel, sharded",
            "yes",
            "yes, any world size",
            "yes",
            "yes",
            "Lightning saves none",
            "Lightning's loops count batches",
        ),
    ),
}
LIGHTNING = Dialect(
    name="lightning",
    title="Lightning",
    suffixes=(".ckpt",),
    detect=_is_lightning,
    own_keys=True,
    write=layouts.late("ckpttool.converters.trainers.write_directories:write_lightning"),
    parts=lambda source: [DirectoryPart("", "dcp", "model"), DirectoryPart("meta.pt", TREE, "trainer")],
    program=Program(
        rows=_ROWS_OF_LIGHTNING,
        next_step=_describe_lightning_next_step,
        state_files=(StateFile(r"meta\.pt", "loops, schedulers, hyperparameters", "trainer"),),
        resumed_by=(ForTrainer("lightning"),),
        tree=TrainerTree("Lightning", frozenset(("loops", "callbacks"))),
    ),
)


def _find_first_verl_file(source: Source, folder: str = "") -> str | None:
    """Return the name of the model file of rank 0 in `folder`, which is relative to the source ("" for the source
    itself); None if there is none."""
    return next((n for n in source.list(folder) if re.fullmatch(r"model_world_size_\d+_rank_0\.pt", n)), None)


def _is_verl(source: Source) -> tuple[bool, str]:
    """Return whether a folder holds the model files of verl's ranks, or is a step whose actor/ holds them and that has
    no critic/; and the reason as text. A model of SkyRL, with the same names of files, is none."""
    if found := _find_first_verl_file(source):
        return not is_skyrl_model(source), f"has {found}"
    if _find_first_verl_file(source, "actor"):
        return ("critic" not in source.list()), "has actor/" + (
            " and critic/: two models" if source.list("critic") else ""
        )
    return False, "no model_world_size_<n>_rank_0.pt"


def _list_verl_siblings(source: Source) -> list[str]:
    """Return ["data.pt"], the state of the data loader in the folder above, if the source is actor/ or critic/ of a
    global_step_N that has the file; otherwise an empty list."""
    parent, name = find_parent_folder(source)
    if name not in ("actor", "critic") or not re.fullmatch(r".*/global_step_\d+", parent):
        return []
    with open_source(parent) as above:
        return ["data.pt"] if above.exists("data.pt") else []


def _list_verl_parts(source: Source) -> list[DirectoryPart]:
    """List the parts of a directory of verl: the folder with the files of all ranks, and data.pt if there is one."""
    folder = "" if _find_first_verl_file(source) else "actor"
    out = [DirectoryPart(folder, "fsdp1", "model", whole=True)]
    if source.sibling_names:
        out.append(DirectoryPart("../data.pt", DATA, "dataloader"))
    elif folder and source.exists("data.pt"):
        out.append(DirectoryPart("data.pt", DATA, "dataloader"))
    return out


def _describe_verl_next_step(advice: Advice) -> str:
    """Return advice: at which world size verl resumes from the directory, and the command that converts it for another
    one."""
    from .join import knows_parameter_order  # with all that writes

    config = " --config MODEL" * ("optim" in advice.components and not knows_parameter_order(advice.ckpt))
    again = advice.convert(f"--for verl -n RANKS{config}")
    return f"resumes in verl at {advice.ranks}; at another world size: {again}; {advice.export_advice()}"


#: Its rows in the tables of the documents (docs/_hooks.py).
_ROWS_OF_VERL = {
    "readme-trainers": (
        (
            "[verl](docs/how-to/trainers/verl.md) (**verl**)",
            "FSDP1, FSDP2, `data.pt`",
            "yes",
            "yes",
            "yes",
            "yes",
        ),
    ),
    "layouts": (
        (
            "**verl**",
            (
                "`actor` and `critic`: files of ranks as **fsdp1** reads them, and the data loader in `../data.pt`; "
                "`global_step_N` where it has no critic"
            ),
            "`global_step_N` with `actor`, for `strategy: fsdp2`",
        ),
    ),
    "directories": (
        (
            "verl's `actor` or `critic`: one file a rank; `global_step_N` without a critic",
            "`verl`",
            "weights, optimizer, scheduler, RNG of every rank, the data loader in `../data.pt`",
        ),
    ),
    "for": (
        (
            "`actor/` with a file a rank of model, optimizer and extra state, and `data.pt`",
            "`trainer.resume_from_path: DIR/global_step_N` of verl with `strategy: fsdp2`",
        ),
    ),
    "resumed": (
        (
            "verl: FSDP1, FSDP2",
            "yes",
            "yes, FSDP2, any world size",
            "yes",
            "yes",
            "of the ranks that the source has",
            "yes, of verl's own",
        ),
    ),
}
VERL = Dialect(
    name="verl",
    title="verl",
    detect=_is_verl,
    siblings=_list_verl_siblings,
    write=layouts.late("ckpttool.converters.trainers.write_verl:write_verl"),
    options=VerlOptions,
    parts=_list_verl_parts,
    own_keys=True,
    program=Program(
        rows=_ROWS_OF_VERL,
        next_step=_describe_verl_next_step,
        state_files=(
            StateFile(r"optim_world_size_\d+_rank_\d+\.pt", "optimizer", "optim"),
            StateFile(r"extra_state_world_size_\d+_rank_\d+\.pt", "scheduler and RNG", "rng"),
        ),
        halves=(
            Half(
                "actor|critic",
                StateFile(r"data\.pt", "data loader", "dataloader"),
                lambda above, names, name: re.fullmatch(r".*/global_step_\d+", above) is not None,
            ),
        ),
        is_part=lambda name, beside: name == "data.pt" and "actor" in beside,
        resumed_by=(ForTrainer("verl"),),
    ),
)


def _describe_torchtitan_next_step(advice: Advice) -> str:
    """Return advice for the user: torchtitan resumes at any world size, if need be without the data loader's state.

    torchtitan asks for that state, which fits one number of ranks only, so the advice says how to exclude it.
    """
    exclude = 'CheckpointManager.Config(exclude_from_loading=["dataloader"])'
    if not any(advice.ckpt.component(n) == "dataloader" for n in (*advice.ckpt.tensors, *advice.ckpt.values)):
        return f"resumes at any world size in torchtitan with {exclude}: there is no state of a data loader"
    return f"resumes at any world size in torchtitan, nothing to convert; at another one, load with {exclude}"


#: Its rows in the tables of the documents (docs/_hooks.py).
_ROWS_OF_TORCHTITAN = {
    "readme-trainers": (
        (
            "[torchtitan](docs/how-to/trainers/torchtitan.md) (**torchtitan**)",
            "`step-N`",
            "yes",
            "yes",
            "none saved",
            "of the same ranks",
        ),
    ),
    "for": (
        (
            "a `step-N` folder with the keys of its CheckpointManager",
            "`CheckpointManager.load`",
        ),
    ),
    "resumed": (
        (
            "torchtitan",
            "yes, as `dcp`",
            "yes, any world size",
            "yes",
            "yes",
            "torchtitan saves none",
            "no: exclude it",
        ),
    ),
}
TORCHTITAN = layouts.Layout(
    name="torchtitan",
    title="step folder of torchtitan, for its CheckpointManager",
    read=dcp.read,
    locate=dcp.locate,
    detect=lambda where: (False, "is read as dcp"),
    write=layouts.late("ckpttool.converters.trainers.write_directories:write_titan"),
    prepare=lambda ckpt, source, options: split_components(require_single_model(ckpt)),
    options=MeshOptions,
    aliases=("titan",),
    reader_uses=("config", "like"),
    writer_uses=("world_size",),
    needs_named_optimizer=True,
    sharding="fsdp2",
    of_trainer=True,
    keeps_subclasses=True,
    program=Program(
        rows=_ROWS_OF_TORCHTITAN,
        next_step=_describe_torchtitan_next_step,
        step_word="step",
        resumed_by=(ForTrainer("torchtitan"),),
        tree=TrainerTree(
            "torchtitan",
            frozenset(("train_state",)),
            model_at_root=True,
            fuses_parameters=True,
            schedules_by_epoch=True,
        ),
    ),
)
LAYOUTS = (
    *(
        dialect.layout()
        for dialect in (
            ACCELERATE,
            TRAINER,
            LIGHTNING,
            VERL,
            TORCHTUNE,
            LLAMA_FACTORY,
            AUTOMODEL,
            TRANSFORMERS,
            OLMO,
            VEOMNI,
            SKYRL,
            NEMO_RL,
            PRIME_RL,
            XTUNER,
            DIFFUSERS,
            LEROBOT,
            FAIRSEQ2,
            SCRIPT,
            SCRIPT_DCP,
        )
    ),
    TORCHTITAN,
)
