"""Steps of programs for reinforcement learning and fine-tuning: a model in one folder, and small files beside it.

skyrl      global_step_{n}/policy/, critic/             files of ranks with verl's names, read by fsdp1
           global_step_{n}/data.pt, trainer_state.pt    the data loader; {"global_step", "config"}
           fully_async_state.pt                         the state of a fully asynchronous trainer
nemo_rl    step_{n}/policy/weights/, policy/optimizer/  folders of dcp, {"model"} and {"optim": {"optim", "sched"}};
                                                        those of Megatron and Automodel are refused by name
           train_dataloader.pt, training_info.json      the data loader; counters, written first, in tmp_step_{n}/
prime_rl   step_{n}/trainer/                            a folder of dcp, {"app": {"model", "optimizers", "scheduler",
                                                        "progress"}}
           trainer/dataloader/rank_{rank}.pt            the data loader of each rank (fine-tuning)
           orchestrator/progress.pt                     {"progress", "train_source"}
xtuner     weights/                                     a folder of dcp, {"model", "optimizer"}
           dataloader, lr_scheduler                     files of torch.save
           train_state.json                             {"cur_step", "cur_epoch", "total_consumed_tokens",
                                                        "train_time_offset"}; written last. A Trainer stops where one of
                                                        these files is missing, or train_time_offset, unless it is told
                                                        not to load them (LoadCheckpointConfig)

Where a step has a policy and a critic (SkyRL), or a value model (NeMo-RL), they are two checkpoints.

slime and miles save what Megatron-Core does, and beside iter_{n}/ the data source, in
rollout/global_dataset_state_dict_{n}.pt, which is listed as not read.

Sources, at the heads of August 2026: skyrl/train/trainer.py and
skyrl/backends/skyrl_train/distributed/fsdp_strategy.py of github.com/NovaSky-AI/SkyRL; nemo_rl/utils/checkpoint.py and
native_checkpoint.py of NVIDIA-NeMo/RL; src/prime_rl/trainer/ckpt.py and orchestrator/ckpt.py of
PrimeIntellect-ai/prime-rl; xtuner/v1/train/trainer.py of InternLM/xtuner. fixtures/foreign_jobs.py runs the code of
each that saves and loads.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ckpttool.errors import Unsupported
from ckpttool.layouts import late
from ckpttool.program import ForTrainer, Half, Program, SeenFolder, StateFile, Unfinished
from ckpttool.storage.overlay import find_parent_folder
from ckpttool.storage.source import Source
from ckpttool.storage.sources import open_source

from .dialect import DATA, Dialect, DirectoryPart, make_resume_advice, make_unrun_program_rows
from .filenames import has_rank_loaders, match_numbered_names

__all__ = ["NEMO_RL", "PRIME_RL", "SKYRL", "XTUNER", "is_skyrl_model"]

_MODEL_OF_RANK = r"model_world_size_\d+_rank_0\.pt"


def is_skyrl_model(source: Source) -> bool:
    """Return whether a folder is policy/ or critic/ of a step of SkyRL, whose policy/ has model files of ranks."""
    parent, name = find_parent_folder(source)
    if name not in ("policy", "critic") or not parent:
        return False
    with open_source(parent) as above:
        return any(re.fullmatch(_MODEL_OF_RANK, n) for n in above.list("policy"))


def _is_skyrl(source: Source) -> tuple[bool, str]:
    """Return whether a folder is a step of SkyRL that has policy/ and no critic/, or one of these folders of a step;
    and the reason as text."""
    names = source.list()
    if any(re.fullmatch(_MODEL_OF_RANK, n) for n in names):
        return is_skyrl_model(source), "has files of ranks, in a folder beside or called policy"
    if "policy" not in names or not any(re.fullmatch(_MODEL_OF_RANK, n) for n in source.list("policy")):
        return False, "no policy/model_world_size_<n>_rank_0.pt"
    return "critic" not in names, "has policy/" + (" and critic/: two models" if "critic" in names else "")


_BESIDE = {"data.pt": "dataloader", "trainer_state.pt": "trainer", "fully_async_state.pt": "extra"}


def _list_skyrl_siblings(source: Source) -> list[str]:
    """List the files in the folder above that belong to the checkpoint, as data.pt; empty if the source is no model of
    SkyRL."""
    if not is_skyrl_model(source):
        return []
    with open_source(find_parent_folder(source)[0]) as above:
        return [n for n in _BESIDE if above.exists(n)]


def _list_skyrl_parts(source: Source) -> list[DirectoryPart]:
    """List the parts: the folder with the model files of all ranks, and the files of the step."""
    folder = "policy" if "policy" in source.list() else ""
    beside = [n for n in _BESIDE if source.exists(n)] if folder else [f"../{n}" for n in _list_skyrl_siblings(source)]
    out = [DirectoryPart(folder, "fsdp1", "model", whole=True)]
    for name in beside:
        component = _BESIDE[name.removeprefix("../")]
        under = ("fully_async_state",) if component == "extra" else ()
        out.append(DirectoryPart(name, DATA, component, under))
    return out


SKYRL = Dialect(
    name="skyrl",
    title="SkyRL",
    detect=_is_skyrl,
    siblings=_list_skyrl_siblings,
    parts=_list_skyrl_parts,
    own_keys=True,
    program=Program(
        rows=make_unrun_program_rows(
            "skyrl",
            "SkyRL",
            "`global_step_N` without a critic, or `policy`, `critic`: a file a rank, `data.pt`, `trainer_state.pt`",
            "weights, optimizer, scheduler, RNG of every rank, the data loader, counters",
            rng="yes",
            loader="yes",
            saved=True,
        ),
        next_step=make_resume_advice("SkyRL", None),
        halves=(
            Half(
                "policy|critic",
                StateFile(r"data\.pt", "data loader", "dataloader"),
                lambda above, names, name: re.fullmatch(r".*/global_step_\d+", above) is not None,
            ),
            Half(r"iter_\d+", StateFile(r"rollout/", "data source of slime or miles", "dataloader")),
        ),
        is_part=lambda name, beside: (
            (name in _BESIDE and "policy" in beside)
            or (name == "rollout" and any(n.startswith("iter_") for n in beside))  # slime's and miles' data source
        ),
    ),
)


def _is_nemo_rl(source: Source) -> tuple[bool, str]:
    """Return whether a folder is a step of NeMo-RL with one model; and, as text, why or why not."""
    names = source.list()
    if "training_info.json" not in names or "policy" not in names or "weights" not in source.list("policy"):
        return False, "no training_info.json beside policy/weights/"
    several = "value" in names
    return not several, "has training_info.json and policy/weights/" + (" and value/: two models" if several else "")


def _list_nemo_rl_parts(source: Source) -> list[DirectoryPart]:
    """List the parts: the model, its optimizer, the data loader and the counters.

    Raises:
        Unsupported: the weights are in no dcp folder but in that of another backend.
    """
    inside = source.list("policy/weights")
    if ".metadata" in inside:
        out = [DirectoryPart("policy/weights", "dcp", "model")]
        if source.list("policy/optimizer"):  # damaged where it has no .metadata
            out.append(DirectoryPart("policy/optimizer", "dcp", "optim"))
    else:
        raise Unsupported(
            f"{source.root}/policy/weights holds {', '.join(inside[:5]) or 'nothing'}, and no .metadata: NeMo-RL saves "
            "so with Megatron (iter_N) or with its Automodel worker (model). Give that folder as the path; the data "
            "loader and the counters of the step are not part of it.",
            code="CKPT0317",
        )
    if source.exists("train_dataloader.pt"):
        out.append(DirectoryPart("train_dataloader.pt", DATA, "dataloader"))
    return [*out, DirectoryPart("training_info.json", DATA, "trainer")]


NEMO_RL = Dialect(
    name="nemo_rl",
    title="NeMo-RL",
    detect=_is_nemo_rl,
    parts=_list_nemo_rl_parts,
    own_keys=True,
    aliases=("nemo-rl",),
    program=Program(
        rows=make_unrun_program_rows(
            "nemo_rl",
            "NeMo-RL",
            "`step_N`: `policy/weights` and `policy/optimizer` (DCP), `train_dataloader.pt`",
            "weights, optimizer, scheduler, data loader, counters",
            rng="none saved",
            loader="yes",
            saved=True,
        ),
        next_step=make_resume_advice("NeMo-RL"),
        part_folders="policy|weights|optimizer",
        step_word="step",
    ),
)


def _find_prime_rl_trainer(source: Source) -> str | None:
    """Return the dcp folder of a step of prime-rl: "trainer" if the source is the step, "" if it is trainer/ of a step;
    None if it is neither. Another dcp folder with a data loader of each rank may be of any program (scripts.py)."""
    names, (parent, name) = source.list(), find_parent_folder(source)
    if ".metadata" in names:
        return "" if name == "trainer" and re.fullmatch(r".*/step_\d+", parent) and has_rank_loaders(source) else None
    beside = {"orchestrator", "weight", "weights"} & {*names}
    if "trainer" in names and ".metadata" in (inside := source.list("trainer")) and (beside or "dataloader" in inside):
        return "trainer"
    return None


def _is_prime_rl(source: Source) -> tuple[bool, str]:
    """Return whether a folder is a step of prime-rl, or its trainer/; and, as text, why or why not."""
    folder = _find_prime_rl_trainer(source)
    if folder is None:
        return False, "no step_N/trainer with .metadata beside dataloader/rank_0.pt or orchestrator/"
    return True, "has .metadata beside dataloader/" if not folder else "has trainer/.metadata"


def _list_prime_rl_parts(source: Source) -> list[DirectoryPart]:
    """List the parts: the folder of dcp, the data loader of each rank, and the orchestrator's progress."""
    folder = _find_prime_rl_trainer(source) or ""
    loaders = f"{folder}/dataloader".lstrip("/")
    out = [DirectoryPart(folder, "dcp", "model", whole=True)]
    out += [
        DirectoryPart(f"{loaders}/{n}", DATA, "dataloader", (str(rank),))
        for n, rank in match_numbered_names(
            source.list(loaders) if source.glance(loaders)[0] else (), r"rank_(\d{1,6})\.pt"
        )
    ]
    if source.exists("orchestrator/progress.pt"):
        out.append(DirectoryPart("orchestrator/progress.pt", DATA, "extra", ("orchestrator",)))
    return out


PRIME_RL = Dialect(
    name="prime_rl",
    title="prime-rl",
    detect=_is_prime_rl,
    parts=_list_prime_rl_parts,
    own_keys=True,
    aliases=("prime-rl",),
    program=Program(
        rows=make_unrun_program_rows(
            "prime_rl",
            "prime-rl",
            "`step_N`, or `trainer` in it: DCP with `dataloader/rank_R.pt`, and `orchestrator/progress.pt`",
            "weights, optimizer, scheduler, progress, data loader of every rank",
            rng="none saved",
            loader="of every rank",
            saved=True,
        ),
        next_step=make_resume_advice("prime-rl"),
        part_folders="trainer|dataloader|orchestrator",
        step_word="step",
    ),
)


def _is_xtuner(source: Source) -> tuple[bool, str]:
    """Return whether a folder is a checkpoint of xtuner v1; and, as text, why or why not."""
    names = source.list()
    if "weights" not in names or ".metadata" not in source.list("weights"):
        return False, "no weights/.metadata"
    found = next((n for n in ("train_state.json", "lr_scheduler") if n in names), None)
    return found is not None, f"has weights/.metadata, and {found or 'neither train_state.json nor lr_scheduler'}"


def _list_xtuner_parts(source: Source) -> list[DirectoryPart]:
    """List the parts: the dcp folder weights/, and the files of scheduler, data loader and counters."""
    files = {"lr_scheduler": "scheduler", "dataloader": "dataloader", "train_state.json": "trainer"}
    return [
        DirectoryPart("weights", "dcp", "model", whole=True),
        *(DirectoryPart(n, DATA, component) for n, component in files.items() if source.exists(n)),
    ]


def _find_unfinished_xtuner_save(folder: SeenFolder) -> Unfinished | None:
    """Return the evidence that a save did not finish: train_state.json is missing, or there is a folder
    weights.incomplete. None otherwise."""
    if "weights.incomplete" in folder.names and "train_state.json" in folder.names:
        return Unfinished("weights.incomplete/, whose save had not ended")
    if folder.layout == XTUNER.name and "train_state.json" not in folder.names:
        return Unfinished("no train_state.json, which xtuner writes last")
    return None


def _note_unfinished_xtuner_save(source: Source) -> Sequence[str]:
    """Return one note if train_state.json is missing, which xtuner writes last; otherwise an empty sequence."""
    if source.exists("train_state.json"):
        return ()
    return ("no train_state.json, which xtuner writes last: the save had not ended, and no job resumes from it",)


_FILES_OF_XTUNER = "`weights/` (DCP), `dataloader`, `lr_scheduler`, `train_state.json`"
#: Its rows in the tables of the documents (docs/_hooks.py).
_ROWS_OF_XTUNER = {
    **make_unrun_program_rows(
        "xtuner",
        "xtuner v1",
        _FILES_OF_XTUNER,
        "weights, optimizer, scheduler, data loader, counters",
        rng="none saved",
        loader="yes",
        saved=True,
    ),
    "layouts": (("**xtuner**", f"xtuner v1: {_FILES_OF_XTUNER}", "what its Trainer loads, at any world size"),),
    "for": ((_FILES_OF_XTUNER, "`LoadCheckpointConfig(checkpoint_path=DIR)` of xtuner v1"),),
    "resumed": (
        (
            "xtuner v1",
            "yes; its code that saves was run",
            "yes, any world size; its code that loads was run",
            "yes",
            "yes",
            "none saved",
            "of xtuner's own loader",
        ),
    ),
}
XTUNER = Dialect(
    name="xtuner",
    title="xtuner v1",
    detect=_is_xtuner,
    parts=_list_xtuner_parts,
    notes=_note_unfinished_xtuner_save,
    write=late("ckpttool.converters.trainers.write_xtuner:write"),
    program=Program(
        rows=_ROWS_OF_XTUNER,
        next_step=make_resume_advice("xtuner"),
        halves=(Half("weights", belongs=lambda above, names, name: "train_state.json" in names),),
        part_folders="weights",
        unfinished=_find_unfinished_xtuner_save,
        resumed_by=(ForTrainer("xtuner", "xtuner v1"),),
    ),
)
