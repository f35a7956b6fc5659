"""Writes directories of trainers, one function each: what a job of that trainer resumes from. trainers/__init__.py
describes the files."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from ckpttool import bounded_json
from ckpttool.engine.conservation import list_changed_values
from ckpttool.engine.copy.stream import read_small_tensors
from ckpttool.engine.copy.value_digests import are_equal_data
from ckpttool.engine.flat.split_state import list_plain_model_values
from ckpttool.errors import CkpttoolError, Unsupported, UsageError, argument
from ckpttool.formats.stored_tensors import decode_number, flatten_tree
from ckpttool.index.checkpoint import (
    Checkpoint,
    Leaves,
    Path,
    TensorEntry,
    Value,
    find_orphaned_optimizer_state,
    joined,
)
from ckpttool.index.composites import shape_of
from ckpttool.index.draft import Draft, Dropped, turn_positions_into_keys
from ckpttool.index.names import canonical, describe_weights_elsewhere, original_path, step_count
from ckpttool.index.paths import is_number_text, keep_extra_state_trees, list_own_keys
from ckpttool.index.schedulers import (
    describe_deepspeed_scheduler,
    describe_missing_scheduler,
    explain_missing_scheduler,
    find_only_scheduler,
)
from ckpttool.index.trees import nest
from ckpttool.layouts import WriteOptions
from ckpttool.printable import count_noun, list_first
from ckpttool.storage.source import Source

from .. import full
from ..dcp.write_dcp import write as write_dcp
from ..options import DirectoryOptions, MeshOptions
from .dialect import FSDP_SCALER, LIGHTNING_SCALERS, name_tree_beside_model
from .filenames import RNG_KEYS
from .join import (
    SmallFile,
    add_missing_options,
    collect_left_over_state,
    draft_model_and_optimizer,
    draft_small_files,
    join_drafts,
    state_dict_type,
)

__all__ = [
    "BEGINS_ANEW",
    "count_steps",
    "describe_other_schedulers",
    "make_scheduler_file",
    "refuse_missing_weights",
    "refuse_several_optimizers",
    "refuse_unfit_optimizer",
    "select_leaves_below",
    "strip_paths",
    "write_accelerate",
    "write_lightning",
    "write_llamafactory",
    "write_titan",
    "write_torchtune",
    "write_trainer",
]

_NAMES = {
    "sharded": ("pytorch_model_fsdp_0", "optimizer_0"),
    "full": ("pytorch_model_fsdp.bin", "optimizer.bin"),
    "ddp": ("pytorch_model.bin", "optimizer.bin"),
}
#: What a scheduler does whose state a trainer does not find and does not ask for.
BEGINS_ANEW = "the job's own begins at step 0, without an error"
#: The keys of a state of torch.amp.GradScaler.
_GRAD_SCALER = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
#: {layout: {state dict type: names of the model and of the optimizer}}
_NAMES_OF = {
    "accelerate": _NAMES,
    "trainer": {**_NAMES, "ddp": ("pytorch_model.bin", "optimizer.pt")},
    "llamafactory": {
        "sharded": ("model", "optimizer"),
        "ddp": ("model/pytorch_model.bin", "optimizer/state_dict.pt"),
    },
}


def refuse_several_optimizers(ckpt: Checkpoint, trainer: str) -> None:
    """Raise if the checkpoint has several optimizers, since a trainer's directory is written with one. `trainer` is its
    name in the message.

    Raises:
        Unsupported: there are several optimizers.
    """
    others = dict.fromkeys(
        f'"{joined(p[:2])}"' for p in ckpt.leaves() if p[0] == "optim" and p[1] not in ("state", "param_groups")
    )
    if others:
        raise Unsupported(
            f"the checkpoint has several optimizers, {', '.join(others)}, and {trainer} is written with the one that "
            f"trains the whole model. Leave them out with {argument('only', ['model'])}, or write dcp or full, which "
            "keep them as they are.",
            code="CKPT0328",
        )


def refuse_unfit_optimizer(ckpt: Checkpoint, trainer: str, by_parameter: bool = False) -> None:
    """Raise if a trainer's directory cannot hold the optimizer.

    There must be one optimizer, whose param groups have numbers, not names, and list the parameters, by which a job
    finds their state. What is left of a damaged checkpoint may lack those lists.

    Args:
        ckpt: what is written.
        trainer: the trainer's name in the message.
        by_parameter: whether the trainer also keeps the options of a group by parameter, so that they need a list of
            parameters as well.

    Raises:
        Unsupported: there are several, or groups with names; or there is state of one, or there are such options, and
            no such group.
    """
    refuse_several_optimizers(ckpt, trainer)
    held = [p for p in ckpt.leaves() if p[0] == "optim"]
    groups = (p for p in held if p[1:2] == ("param_groups",) and len(p) > 3)
    if named := next((p for p in groups if not is_number_text(str(p[2]))), None):
        raise Unsupported(
            f'"{joined(named[:3])}" is a param group with a name, and those of {trainer} have numbers. Leave the '
            f"optimizer out with {argument('only', ['model'])}, or write dcp or full, which keep it as it is.",
            code="CKPT0316",
        )
    listed = any(p[1:2] == ("param_groups",) and p[3:] == ("params",) for p in held)
    if ckpt.salvage is None and not listed and any(by_parameter or p[1:2] == ("state",) for p in held):
        raise Unsupported(
            f"No param group lists parameters of the optimizer, and {trainer} loads none without. Leave it out with "
            f"{argument('only', ['model'])}, or write dcp or full, which keep it as it is.",
            code="CKPT0316",
        )


def refuse_missing_weights(ckpt: Checkpoint, why: str) -> None:
    """Raise if there are no weights, but for what is left of a damaged checkpoint; `why` is a main clause of the
    message.

    Raises:
        Unsupported: there are none.
    """
    if ckpt.salvage is None and not any(t.path[0] == "model" for t in ckpt.tensors.values()):
        raise Unsupported(
            f"the checkpoint holds no model weights, and {why}.{describe_weights_elsewhere(ckpt)}", code="CKPT0317"
        )


def _select_leaves(ckpt: Checkpoint, *head: str | int) -> dict[Path, object]:
    """Return {path: leaf} of the entries whose canonical path begins with `head`, including one at `head` itself."""
    return {p: leaf for p, leaf in ckpt.leaves().items() if p[: len(head)] == head}


def select_leaves_below(ckpt: Checkpoint, *head: str | int) -> dict[Path, object]:
    """Return {canonical path, which begins with `head`: leaf} of the entries below the path `head`, without one at the
    path itself, which would be no state dict."""
    return {p: leaf for p, leaf in _select_leaves(ckpt, *head).items() if len(p) > len(head)}


def _list_schedulers(ckpt: Checkpoint) -> list[tuple[set[Path], dict[Path, object]]]:
    """Return [(canonical paths, {path in the state dict: leaf})] of each scheduler, by number.

    The list is empty if there is no scheduler. Several schedulers have their numbers below "scheduler" in the canonical
    paths; without such numbers it is empty, too.
    """
    if only := find_only_scheduler(ckpt):
        return [(set(only), strip_paths(only, 1))]
    found = select_leaves_below(ckpt, "scheduler")
    if not all(len(p) > 2 and str(p[1]).isdecimal() for p in found):
        return []
    numbers = sorted({str(p[1]) for p in found}, key=int)
    rows = [{p: leaf for p, leaf in found.items() if str(p[1]) == n} for n in numbers]
    return [(set(row), strip_paths(row, 2)) for row in rows]


def describe_other_schedulers(ckpt: Checkpoint, own: bool = False, several: bool = False) -> list[str]:
    """Return one note if the new job's scheduler would fail on the source's scheduler state, or begin at step 0.

    The result is an empty list if the scheduler goes on where it was, if there is none, or if
    `describe_deepspeed_scheduler` already has a note on this.

    LRScheduler.load_state_dict (torch/optim/lr_scheduler.py) loads any state, and the scheduler counts in last_epoch:
    without that it begins at step 0 and says nothing. Megatron-Core's counts in num_steps, DeepSpeed's own in
    last_batch_iteration. LambdaLR's raises without lr_lambdas, and most of transformers' schedulers are LambdaLR.

    Args:
        ckpt: what is written.
        own: whether the script makes the scheduler, of any class; else it is most likely a LambdaLR of transformers.
        several: whether the trainer loads several schedulers; else several are not written as one, and get no note.
    """
    loaded = _list_schedulers(ckpt) if several or find_only_scheduler(ckpt) else []
    keys = [{str(p[0]) for p in state} for _, state in loaded]
    # a ChainedScheduler counts in those that it is made of
    uncounted = next((found for found in keys if not {"last_epoch", "_schedulers"} & found), None)
    other = uncounted or (None if own else next((found for found in keys if "lr_lambdas" not in found), None))
    if other is None or (own and describe_deepspeed_scheduler(ckpt)):
        return []
    what = f"the scheduler's state ({list_first(sorted(other))}) has no"
    stops = "a LambdaLR, as transformers makes most of them, stops with KeyError 'lr_lambdas'"
    if uncounted is None:
        return [f"{what} lr_lambdas: {stops}, and a scheduler of the source's class loads it"]
    if describe_deepspeed_scheduler(ckpt):
        return [f"{what} lr_lambdas: {stops}"]
    others = "schedulers" if "lr_lambdas" in other else f"{stops}, and others"
    return [
        f"{what} last_epoch, in which schedulers of torch count: {others} "
        "load it without an error and begin at step 0. Set last_epoch after the load, or use the scheduler that "
        "the source had"
    ]


def strip_paths(leaves: Mapping[Path, object], cut: int, names: Mapping[str, str] | None = None) -> dict[Path, object]:
    """Return {path: leaf} without the first `cut` elements of each path; leaves with shorter paths are left out.
    `names` are {first remaining element: its new name}; None for no new names."""
    names = names or {}
    return {(names.get(str(p[cut]), p[cut]), *p[cut + 1 :]): leaf for p, leaf in leaves.items() if len(p) > cut}


def make_scheduler_file(ckpt: Checkpoint, placed: set[Path], name: str = "scheduler.pt") -> list[SmallFile]:
    """Return [the file of this name with the scheduler]; [] if the source has no scheduler, or several. `placed` gets
    the canonical paths in the file."""
    scheduler = find_only_scheduler(ckpt)
    placed |= set(scheduler)
    return [SmallFile(name, strip_paths(scheduler, 1))] if scheduler else []


def _is_plain_grad_scaler(state: Mapping[Path, object]) -> bool:
    """Return whether leaves are a state of torch's GradScaler, of numbers alone."""
    plain = not any(isinstance(leaf, TensorEntry) for leaf in state.values())
    return plain and {(key,) for key in _GRAD_SCALER} <= state.keys()


def _make_scaler_file(
    ckpt: Checkpoint, placed: set[Path], copies: set[Path], otherwise: str
) -> tuple[list[SmallFile], list[str]]:
    """Return ([scaler.pt], []) if the source's gradient scaler is torch's GradScaler; otherwise no file, and a note if
    it is another one.

    Lightning keeps a GradScaler under the name of its precision plugin, where it stays, so that scaler.pt is a copy.

    GradScaler.load_state_dict (torch/amp/grad_scaler.py) asks for all of its keys. DeepSpeed's scaler has cur_scale,
    Megatron-Core's growth_tracker.

    Args:
        ckpt: what is written.
        placed: gets the canonical paths in the file.
        copies: gets the canonical paths that a reader gives to a copy in the file.
        otherwise: what the trainer does without the file, as a main clause.
    """
    found = select_leaves_below(ckpt, "scaler")
    if not found:
        for plugin in LIGHTNING_SCALERS:
            if _is_plain_grad_scaler(state := strip_paths(_select_leaves(ckpt, *plugin), 2)):
                copies |= {("scaler", *p) for p in state}
                return [SmallFile("scaler.pt", state)], []
        return [], []
    if not {("scaler", key) for key in _GRAD_SCALER} <= found.keys():
        keys = ", ".join(dict.fromkeys(str(p[1]) for p in found))
        return [], [
            f"the source's gradient scaler ({keys}) is not torch's GradScaler, so there is no scaler.pt: {otherwise}"
        ]
    placed |= set(found)
    return [SmallFile("scaler.pt", strip_paths(found, 1))], []


def _name_rng_part(path: Path) -> Path:
    """Return the canonical path of an RNG state whose path has the names that a trainer or script uses.

    Scripts call the state of the CPU "torch", after torch.get_rng_state(), and OLMo-core keeps each state beside the
    version of the library, {"torch": {"version", "state"}, ...}.

    Args:
        path: ("rng", rank, the file's name for the part, further keys ...).
    """
    part, rest = "cpu" if path[2] == "torch" else path[2], path[3:]
    return ("rng", str(path[1]), part, *(rest[1:] if rest[:1] == ("state",) else rest))


def _make_rng_files(
    ckpt: Checkpoint,
    world: int,
    pattern: str,
    keys: Mapping[str, str],
    placed: set[Path],
    copies: set[Path],
    one_gpu: bool = False,
    most_gpus: int | None = None,
) -> tuple[list[SmallFile], list[str]]:
    """Return (files with RNG state, one for each rank of the new job whose state the source has; notes for the user).

    Trainers load the states of Python, numpy and the CPU one after another, and stop, or load no more, where one is
    missing: a rank without one of them gets no file. States of GPUs are in it only in the form that is loaded; in a job
    of one rank a list with one state is the same as that state. What has another path in a file is a copy there.

    Args:
        ckpt: what is written.
        world: ranks of the new job.
        pattern: name of a file, with {} for the rank.
        keys: {canonical name of a part of the state: its name in the file}.
        placed: gets the canonical paths that are in these files.
        copies: gets the canonical paths that a reader gives to the copies in these files.
        one_gpu: whether the trainer loads the state of one GPU; if not, it loads a list of those of all GPUs.
        most_gpus: the longest such list that a job is sure to have the GPUs for; None for any.
    """
    of_rank: dict[str, dict[Path, Path]] = {}
    leaves = _select_leaves(ckpt, "rng")
    for path in leaves:
        if len(path) > 2 and (path[2] != "torch" or (*path[:2], "cpu") not in leaves) and path[3:] != ("version",):
            of_rank.setdefault(str(path[1]), {})[_name_rng_part(path)] = path
    files: list[SmallFile] = []
    unfit: list[str] = []
    for rank in range(world):
        found = of_rank.get(str(rank), {})  # {path in the files: path in the source}
        if not {"python", "numpy", "cpu"} <= {p[2] for p in found if len(p) == 3 or isinstance(p[3], int)}:
            continue
        gpus = [p for p, of in found.items() if p[2] == "cuda" and isinstance(leaves[of], TensorEntry)]
        if len(gpus) == world == 1:
            whole = gpus[0][:3]
            found = {(whole if one_gpu else (*whole, 0)) if p == gpus[0] else p: of for p, of in found.items()}
            gpus = [whole if one_gpu else (*whole, 0)]
        fits = all((len(p) == 3) == one_gpu for p in gpus)
        if not fits or (most_gpus is not None and len(gpus) > most_gpus):
            why = "a job of one process loads that of one" if one_gpu else "this trainer loads a list of them"
            why = f"a job of {world} ranks may have fewer" if fits else why
            unfit.append(
                f"{joined(gpus[0][:3])} is the RNG state of {count_noun(len(gpus), 'GPU')}, and {why}: GPUs "
                "keep the seeds that the script sets"
            )
            found = {p: of for p, of in found.items() if p[2] != "cuda"}
        here: dict[Path, object] = {}
        for path, of in found.items():
            leaf = leaves[of]
            kept = path[2:] == of[2:]
            (placed if kept else copies).add(of if kept else path)
            here[path] = replace(leaf, path=("replica", *of)) if isinstance(leaf, TensorEntry) and not kept else leaf
        files.append(SmallFile(pattern.format(rank), strip_paths(here, 2, keys)))
    return files, [*note_missing_rng(ckpt, files, world), *unfit[:1]]


def note_missing_rng(ckpt: Checkpoint, files: Sequence[SmallFile], world: int) -> list[str]:
    """Return one note if ranks of the new job get no RNG state; otherwise an empty list.

    Args:
        ckpt: what is written; other programs name their states differently, as Megatron's rng.shard_0.0_0.
        files: the files with RNG states that are written, one per rank that has one.
        world: ranks of the new job.
    """
    if len(files) == world:
        return []
    if files:
        return [
            f"the source has the RNG states of {len(files)} of {world} ranks; the others keep the seeds that the "
            "script sets"
        ]
    if other := next((joined(p) for p in _select_leaves(ckpt, "rng")), None):
        return [
            f"the source's RNG states are not those that this trainer loads ({other}): ranks keep the seeds that the "
            "script sets"
        ]
    return ["the source has no RNG state: ranks keep the seeds that the script sets"]


def _draft_directory(
    name: str,
    ckpt: Checkpoint,
    source: Source,
    options: WriteOptions,
    small: list[SmallFile],
    placed: set[Path],
    world: int,
    notes: list[str],
    made: Mapping[Path, object] = MappingProxyType({}),
    copies: Collection[Path] = (),
) -> Draft:
    """Draft a directory of Accelerate, Trainer or LLaMA-Factory: model and optimizer, the small files, and
    ckpttool_state.pt with the rest.

    Args:
        name: "accelerate", "trainer" or "llamafactory".
        ckpt: what is written.
        source: where its bytes are.
        options: those of the conversion.
        small: the small files.
        placed: canonical paths of the entries in the small files.
        world: ranks of the new job.
        notes: notes for the user on the small files.
        made: {canonical path: value} of values that are written and that the source does not have.
        copies: canonical paths that a reader gives to what the small files have in another form than the source.

    Raises:
        Unsupported: there are no weights, or the optimizer's parameters cannot be numbered.
    """
    refuse_missing_weights(ckpt, "a job resumes from no directory without them")
    kind = state_dict_type(ckpt, options)
    ckpt, groups, of_groups = add_missing_options(ckpt, by_dcp=kind == "sharded")
    parts = draft_model_and_optimizer(ckpt, source, options, _NAMES_OF[name], at_root=name == "llamafactory")
    rest, kept = collect_left_over_state(ckpt, placed, copies)
    parts.append(("", draft_small_files(ckpt, [*rest, *small], options)))
    out = join_drafts(name, ckpt, parts, options, world)
    out.notes += describe_other_schedulers(ckpt, several=name == "accelerate")
    other = argument("state_dict_type", "sharded" if kind == "ddp" else "ddp", "DirectoryOptions")
    if kind != "ddp":
        notes = [f"for a job with FSDP; {other} writes it for one without", *notes]
    elif options.of(DirectoryOptions).state_dict_type is None:
        notes = [f"for a job of one process without FSDP; {other} writes it for one with", *notes]
    turn_positions_into_keys(out, (p for p in placed if p[0] in ("scheduler", "rng")))
    out.notes += [*notes, *of_groups, *kept]
    out.synthesized_values |= groups | {joined(p): data for p, data in made.items()}
    return out


def write_accelerate(ckpt: Checkpoint, source: Source, options: WriteOptions) -> Draft:
    """Draft what `accelerator.load_state` reads, of a job with FSDP or, by the state dict type, one without.

    Raises:
        UsageError: no world size was given and the source has none.
        Unsupported: there are no weights, several optimizers, or parameters that cannot be numbered where they must be.
    """
    refuse_unfit_optimizer(ckpt, "Accelerate")
    world = options.ranks(ckpt)
    placed: set[Path] = set()
    copies: set[Path] = set()
    small = []
    for i, (paths, state) in enumerate(_list_schedulers(ckpt)):
        placed |= paths
        small.append(SmallFile(f"scheduler{f'_{i}' if i else ''}.bin", state))
    stops = "accelerator.load_state stops without scheduler.bin where the script has prepared a scheduler"
    of_scheduler = [] if small else describe_missing_scheduler(ckpt, stops)
    scaler, of_scaler = _make_scaler_file(ckpt, placed, copies, "Accelerate with fp16 stops without scaler.pt")
    small += scaler
    for component, pattern, suffix in (
        ("dataloader", r"(sampler|dl_state_dict)(_\d+)?", "bin"),
        ("extra", r"custom_checkpoint_\d+", "pkl"),
    ):
        below = select_leaves_below(ckpt, component)
        for key in dict.fromkeys(p[1] for p in below if re.fullmatch(pattern, str(p[1]))):
            found = {p: leaf for p, leaf in below.items() if p[1] == key}
            placed |= set(found)
            small.append(SmallFile(f"{key}.{suffix}", {p[2:]: leaf for p, leaf in found.items()}))
    keys = {ours: theirs for theirs, ours in RNG_KEYS.items()}
    rng, notes = _make_rng_files(ckpt, world, "random_states_{}.pkl", keys, placed, copies)
    return _draft_directory(
        "accelerate",
        ckpt,
        source,
        options,
        [*small, *rng],
        placed,
        world,
        [*of_scheduler, *of_scaler, *notes],
        copies=copies,
    )


def write_trainer(ckpt: Checkpoint, source: Source, options: WriteOptions) -> Draft:
    """Draft what `Trainer.train(resume_from_checkpoint=...)` reads, of a job with FSDP or, by the state dict type, one
    without.

    Raises:
        UsageError: no world size was given and the source has none.
        Unsupported: there are no weights, several optimizers, or parameters that cannot be numbered where they must be.
    """
    refuse_unfit_optimizer(ckpt, "Trainer")
    ckpt, lost = _without_tensor_counters(ckpt, (*_TRAINER_STATE, "stateful_callbacks"), "trainer_state.json")
    world = options.ranks(ckpt)
    alone = world == 1 and state_dict_type(ckpt, options) == "ddp"  # not launched as a distributed job
    placed: set[Path] = set()
    copies: set[Path] = set()
    small, notes = make_scheduler_file(ckpt, placed), []
    if not small:
        notes.append(
            f"{explain_missing_scheduler(ckpt)}: Trainer resumes an optimizer only where scheduler.pt is there too"
        )
    scaler, of_scaler = _make_scaler_file(ckpt, placed, copies, "a job with fp16 begins with a scaler of its own")
    small += scaler
    notes += of_scaler
    if scaler:
        notes.append(
            "scaler.pt is for a job with fp16: Trainer with bf16 or fp32 stops there; delete the file for such a job"
        )
    name = "rng_state_{}.pth" if world > 1 else "rng_state.pth"
    rng, missing = _make_rng_files(ckpt, world, name, {}, placed, copies, one_gpu=alone)
    counters: dict[Path, object] = {}
    of_trainer = _select_leaves(ckpt, "trainer")
    for key in sorted(_TRAINER_STATE):
        found = {p: x for p, x in of_trainer.items() if p[1:2] == (key,)}  # the reader may have split lists of dicts
        data = nest(strip_paths(found, 1)).get(key) if found else None
        if found and _is_json_value(data) and (key != "train_batch_size" or isinstance(data, int)):
            counters[key,] = data
            placed |= set(found)
    held = set(counters)
    if ("global_step",) not in counters:
        step = counters["global_step",] = count_steps(ckpt, source)
        counted = "which the source counts or its optimizer has made" if step else "since the source counts no steps"
        notes.append(f"trainer_state.json has global_step {step}, {counted}")
    if ("stateful_callbacks",) not in counters:  # Trainer asks for that of its control when it saves
        flags = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")
        counters["stateful_callbacks",] = {"TrainerControl": {"args": dict.fromkeys(flags, False), "attributes": {}}}
    if ("train_batch_size",) not in counters:
        counters["train_batch_size",] = 1  # transformers 4 and 5.0 take it in place of the script's (trainer.py)
        notes.append(
            "the source does not tell the batch size of a device, and 1 was written: transformers 4 and 5.0 train on "
            "with that, later ones with the script's unless auto_find_batch_size is set. For the first set "
            "train_batch_size in trainer_state.json"
        )
    _, made = _compare_counters(ckpt, {("trainer", *p): x for p, x in counters.items() if p not in held})
    out = _draft_directory(
        "trainer",
        ckpt,
        source,
        options,
        [*small, *rng, SmallFile("trainer_state.json", counters)],
        placed,
        world,
        [*notes, *missing],
        made,
        copies,
    )
    out.dropped += lost
    return out


def write_llamafactory(ckpt: Checkpoint, source: Source, options: WriteOptions) -> Draft:
    """Draft the checkpoint-N from which LLaMA-Factory v1 resumes, with FSDP2 or, by the state dict type, without.

    Data loaders are written for a job of as many ranks as the source's; LLaMA-Factory begins the epoch again where a
    rank has none.

    Raises:
        UsageError: no world size was given and the source has none, or the state dict type is full.
        Unsupported: there are no weights, several optimizers, parameters that no group lists, or that cannot be
            numbered where they must be.
    """
    refuse_unfit_optimizer(ckpt, "LLaMA-Factory")
    if options.of(DirectoryOptions).state_dict_type == "full":
        raise UsageError(
            f"{argument('state_dict_type', 'full')}: LLaMA-Factory saves no such state; choose sharded or ddp.",
            code="CKPT0203",
        )
    ckpt, lost = _without_tensor_counters(ckpt, ("global_step", "epoch", "num_training_steps"), "metadata.json")
    ckpt, plain = _without_plain_model_values(ckpt)
    world = options.ranks(ckpt)
    placed: set[Path] = set()
    copies: set[Path] = set()
    small = make_scheduler_file(ckpt, placed)
    of_scheduler = describe_missing_scheduler(ckpt, BEGINS_ANEW)
    keys = {"cpu": "torch", "cuda": "accelerator"}
    most = None if world == ckpt.world_size else world  # it stops where the list is longer than the GPUs of a node
    rng, notes = _make_rng_files(ckpt, world, "rng_state/rank_{}.pt", keys, placed, copies, most_gpus=most)
    loaders = _make_loader_files(ckpt, world, placed)
    if not loaders:
        notes.append(f"no data loader of {count_noun(world, 'rank')} is in the source: the job begins the epoch again")
    epoch = ckpt.value("trainer.epoch")
    counters: dict[Path, object] = {
        ("global_step",): count_steps(ckpt, source, "global_step"),
        ("epoch",): int(epoch) if isinstance(epoch, (int, float)) else 0,
    }
    if isinstance(total := ckpt.value("trainer.num_training_steps"), int):
        counters["num_training_steps",] = total
    held, made = _compare_counters(ckpt, {("trainer", *p): x for p, x in counters.items()})
    out = _draft_directory(
        "llamafactory",
        ckpt,
        source,
        options,
        [SmallFile("metadata.json", counters), *small, *rng, *loaders, SmallFile("CHECKPOINT_COMPLETE", {})],
        placed | held,
        world,
        [*of_scheduler, *notes],
        made,
        copies,
    )
    out.dropped += [*lost, *plain]
    return out


def _make_loader_files(ckpt: Checkpoint, world: int, placed: set[Path]) -> list[SmallFile]:
    """Return the files with LLaMA-Factory's data loader state, one per rank; empty unless the source has such states of
    exactly `world` ranks. `placed` gets the canonical paths in the files."""
    found = select_leaves_below(ckpt, "dataloader")
    if {p[1] for p in found} != {str(r) for r in range(world)} or any(
        len(p) < 3 or p[2] not in ("buffer", "data_provider") for p in found
    ):
        return []
    placed |= set(found)
    return [
        SmallFile(f"dataloader/rank_{r}.pt", strip_paths({p: x for p, x in found.items() if p[1] == str(r)}, 2))
        for r in range(world)
    ]


#: The fields of transformers' TrainerState (trainer_callback.py); other keys would be refused by its constructor.
_TRAINER_STATE = frozenset(
    (
        "epoch",
        "global_step",
        "max_steps",
        "logging_steps",
        "eval_steps",
        "save_steps",
        "train_batch_size",
        "num_train_epochs",
        "num_input_tokens_seen",
        "total_flos",
        "log_history",
        "best_metric",
        "best_global_step",
        "best_model_checkpoint",
        "is_local_process_zero",
        "is_world_process_zero",
        "is_hyper_param_search",
        "trial_name",
        "trial_params",
        "stateful_callbacks",
    )
)


def count_steps(ckpt: Checkpoint, source: Source, key: str = "step") -> int:
    """Return the number of optimizer steps that a checkpoint counts; 0 if it has no count.

    It is a trainer's counter, else the `step` of the first parameter in the optimizer.

    Args:
        ckpt: the checkpoint.
        source: where its bytes are.
        key: the name of the counter in the trainer that is written; a counter of this name precedes all others.
    """
    if type(own := ckpt.value(f"trainer.{key}")) is int and own >= 0:
        return own
    if (counts := step_count(ckpt.value)) is not None:
        return counts
    for name, t in ckpt.tensors.items():
        if t.path[:2] == ("optim", "state") and t.path[3:] == ("step",) and t.numel == 1:
            number = decode_number(t.dtype, read_small_tensors(ckpt, source, [name])[name])
            return int(number) if isinstance(number, (int, float)) and 0 <= number < 1 << 53 else 0
    return 0


def _compare_counters(ckpt: Checkpoint, written: Mapping[Path, object]) -> tuple[set[Path], dict[Path, object]]:
    """Compare counters that a trainer's file gets with those of the source.

    Args:
        ckpt: the source.
        written: {canonical path: number} in the file.

    Returns:
        (paths of the counters that are equal in the source, {path: number} of the counters that the source lacks).
    """
    equal = {p for p, x in written.items() if are_equal_data(ckpt.value(joined(p)), x)}
    return equal, {p: x for p, x in written.items() if joined(p) not in ckpt.values}


def _without_tensor_counters(ckpt: Checkpoint, counters: Sequence[str], file: str) -> tuple[Checkpoint, list[Dropped]]:
    """Return (the index without those of the trainer's `counters` that are tensors, the entries dropped). `file` is the
    JSON file that needs them as numbers."""
    bare = [n for n in (f"trainer.{key}" for key in counters) if n in ckpt.tensors]
    return _without_entries(ckpt, bare, f"{file} has a number there, and a tensor is none")


def _is_json_value(x: object) -> bool:
    """Return whether JSON can hold a value and gives back an equal one, within the bounds of ckpttool's parser."""
    try:
        return are_equal_data(bounded_json.parse(bounded_json.encode(x), "a counter"), x)
    except (TypeError, ValueError, CkpttoolError):
        return False


#: Entries of meta.pt besides epoch, global_step and lr_schedulers, which stand under `extra`.
_LIGHTNING_EXTRA = (
    "pytorch-lightning_version",
    "loops",
    "callbacks",
    "hyper_parameters",
    "hparams_name",
    "hparams_type",
    "datamodule_hparams_name",
    "datamodule_hyper_parameters",
    "datamodule_hparams_type",
)
#: Whose meta.pt is written where the source is of another trainer.
_LIGHTNING_VERSION = "2.6.0"


def write_lightning(ckpt: Checkpoint, source: Source, options: WriteOptions) -> Draft:
    """Draft what `trainer.fit(ckpt_path=...)` of a job with ModelParallelStrategy reads; of one with FSDPStrategy where
    the source is the folder of such a job, since that asks for "model" in the place of "state_dict"
    (lightning/pytorch/strategies/fsdp.py and model_parallel.py).

    Raises:
        UsageError: no world size was given and the source has none. Unsupported: there are several optimizers.
    """
    refuse_unfit_optimizer(ckpt, "Lightning")
    plain = ("scheduler", "trainer.epoch", "trainer.global_step", *(f"extra.{key}" for key in _LIGHTNING_EXTRA))
    bare = [n for n in plain if n in ckpt.tensors]
    ckpt, lost = _without_entries(
        ckpt, bare, "Lightning has a number, a list or a dict there, and a tensor is none of them"
    )
    world = options.ranks(ckpt)
    placed: set[Path] = set()
    notes: list[str] = []
    schedulers = _list_schedulers(ckpt)
    meta, made = _build_meta_file(ckpt, count_steps(ckpt, source, "global_step"), schedulers, placed, notes)
    copies = _copy_scaler_for_fsdp(ckpt, meta, notes)
    if "extra.pytorch-lightning_version" in ckpt.values:
        scaler = select_leaves_below(ckpt, "scaler") if copies else ()
        own = _find_other_lightning_entries(ckpt, meta, placed.union(scaler))
        placed |= set(own.values())
        leaves = ckpt.leaves()
        meta |= {at: leaves[p] for at, p in own.items()}
    ckpt, groups, of_groups = add_missing_options(ckpt)
    state = replace(ckpt.only(["model", "optim"]), origin={}, ranks={}, notes=[])
    of_fsdp = ckpt.layout == "lightning" and original_path(("model",), ckpt.origin) == ("model",)
    keys = {"model": "model" if of_fsdp else "state_dict", "optim": "optimizer_0"}
    if not of_fsdp:
        notes.append(
            "for a job with ModelParallelStrategy; FSDPStrategy asks for the weights under model, not state_dict"
        )

    def tree(leaves: dict[Path, object]) -> Leaves:
        """Return the leaves under Lightning's keys for model and optimizer."""
        return {(keys[str(p[0])], *p[1:]): leaf for p, leaf in leaves.items()}

    rest, kept = collect_left_over_state(ckpt, placed, copies)
    small = [*rest, SmallFile("meta.pt", meta)]
    parts = [
        ("", draft_small_files(ckpt, small, options)),
        ("", write_dcp(state, source, replace(options, own=None, tree=tree))),
    ]
    out = join_drafts("lightning", ckpt, parts, options, world)
    turn_positions_into_keys(out, (p for paths, _ in schedulers for p in paths if str(p[1]).isdecimal()), back=True)
    out.dropped += lost
    out.notes += [*describe_other_schedulers(ckpt, own=True, several=True), *notes, *of_groups, *kept]
    out.synthesized_values |= groups | {joined(p): data for p, data in made.items()}
    return out


def _build_meta_file(
    ckpt: Checkpoint,
    step: int,
    schedulers: Sequence[tuple[set[Path], dict[Path, object]]],
    placed: set[Path],
    notes: list[str],
) -> tuple[dict[Path, object], dict[Path, object]]:
    """Return ({path in meta.pt: leaf} of what Lightning asks for; {canonical path: value} of what the source lacks of
    it).

    Args:
        ckpt: what is written.
        step: the optimizer steps that it counts.
        schedulers: its schedulers, as `_list_schedulers` has them.
        placed: gets the canonical paths in the file.
        notes: gets notes if the source has no loops, or no scheduler.
    """
    epoch = ckpt.value("trainer.epoch")
    meta: dict[Path, object] = {("epoch",): epoch if isinstance(epoch, int) else 0, ("global_step",): step}
    equal, made = _compare_counters(ckpt, {("trainer", *path): data for path, data in meta.items()})
    placed |= equal
    for key in _LIGHTNING_EXTRA:
        found = _select_leaves(ckpt, "extra", key)
        placed |= set(found)
        meta |= strip_paths(found, 1)
    asked = {"pytorch-lightning_version": _LIGHTNING_VERSION, "callbacks": {}, "loops": _make_loop_state(step)}
    lacking = {key: data for key, data in asked.items() if not any(p[0] == key for p in meta)}
    meta |= {(key,): data for key, data in lacking.items()}
    made |= {p: x for key, data in lacking.items() for p, x in flatten_tree(data, ("extra", key)).items()}
    if "loops" in lacking:
        notes.append(
            f"the loops of Lightning go on at batch {step} of epoch 0, since the source counts {step} steps; the data "
            "loader of the script decides which rows those are"
        )
    for i, (paths, scheduler) in enumerate(schedulers):
        placed |= paths
        meta |= {("lr_schedulers", i, *p): leaf for p, leaf in scheduler.items()}
    if not schedulers:
        meta["lr_schedulers",] = []
        notes += describe_missing_scheduler(ckpt, BEGINS_ANEW)
        if ckpt.value("scheduler") == []:  # what reading gives for it
            placed.add(("scheduler",))
        elif "scheduler" not in ckpt.values:
            made["scheduler",] = []
    return meta, made


def _copy_scaler_for_fsdp(ckpt: Checkpoint, meta: dict[Path, object], notes: list[str]) -> set[Path]:
    """Add the gradient scaler to the leaves of meta.pt under the name of the precision plugin of FSDPStrategy, which
    alone has fp16 with a scaler here and loads it from there (plugins/precision/fsdp.py); `notes` gets that.

    Return the canonical paths that a reader gives to this copy; an empty set if there is none, since the source has no
    scaler of torch's, or has that entry.
    """
    scaler = strip_paths(select_leaves_below(ckpt, "scaler"), 1)
    if not _is_plain_grad_scaler(scaler) or _select_leaves(ckpt, *FSDP_SCALER):
        return set()
    meta |= {(*FSDP_SCALER[1:], *p): leaf for p, leaf in scaler.items()}
    notes.append("meta.pt has the gradient scaler as FSDPPrecision, too, the name of the plugin of FSDPStrategy")
    return {(*FSDP_SCALER, *p) for p in scaler}


def _find_other_lightning_entries(ckpt: Checkpoint, meta: Mapping[Path, object], placed: set[Path]) -> dict[Path, Path]:
    """Return {path in meta.pt: canonical path} of the state that Lightning saved under keys of the job's own: the
    classes of its precision plugin and data module, and what `on_save_checkpoint` of its module added.

    Args:
        ckpt: what is written.
        meta: the leaves that meta.pt has already, by path.
        placed: the canonical paths of those.
    """
    found: dict[Path, Path] = {}
    tops, own = {at[:1] for at in meta}, list_own_keys(ckpt.origin)
    for p in ckpt.leaves():
        if p[0] in ("model", "optim", "scheduler") or p in placed:
            continue
        bare = not own and p[0] in ("extra", "trainer") and len(p) > 1  # it came by way of another layout
        at = p[1:] if bare else original_path(p, ckpt.origin)
        if at[:1] not in tops:
            found[at] = p
    read = name_tree_beside_model({**meta, **found}).leaves
    astray = {at[0] for at, p in found.items() if read.get(p) != p}
    return {at: p for at, p in found.items() if at[0] not in astray}


def _make_loop_state(step: int) -> dict[str, object]:
    """Return the state of Lightning's loops, {"fit_loop": ...}, after `step` optimizer steps of one batch each
    (lightning/pytorch/loops)."""

    def progress(n: int, *keys: str) -> dict[str, object]:
        """Return counters in total and of the current run, each {key: n}."""
        return {part: dict.fromkeys(keys, n) for part in ("total", "current")}

    whole, short = ("ready", "completed", "started", "processed"), ("ready", "completed")
    one = {"ready": 1, "completed": 0, "started": 1, "processed": 0}
    fit = {
        "state_dict": {},
        "epoch_loop.state_dict": {"_batches_that_stepped": step},
        "epoch_loop.batch_progress": {**progress(step, *whole), "is_last_batch": False},
        "epoch_loop.scheduler_progress": progress(step, *short),
        "epoch_loop.automatic_optimization.state_dict": {},
        "epoch_loop.automatic_optimization.optim_progress": {
            "optimizer": {"step": progress(step, *short), "zero_grad": progress(step, "ready", "completed", "started")}
        },
        "epoch_loop.manual_optimization.state_dict": {},
        "epoch_loop.manual_optimization.optim_step_progress": progress(0, *short),
        "epoch_loop.val_loop.state_dict": {},
        "epoch_loop.val_loop.batch_progress": {**progress(0, *whole), "is_last_batch": False},
        "epoch_progress": {"total": dict(one), "current": dict(one)},
    }
    return {"fit_loop": fit}


def _to_titan_tree(leaves: Leaves) -> dict[Path, object]:
    """Return {path in torchtitan's state dict: leaf}: the model at the root, and the optimizer flattened by parameter
    (StateDictOptions(flatten_optimizer_state_dict=True))."""
    out: dict[Path, object] = {}
    for path, leaf in leaves.items():
        kind = path[:2]
        if path[0] == "model":
            out[path[1:]] = leaf
        elif kind == ("optim", "state"):
            out["optimizer", f"state.{joined(path[2:])}"] = leaf
        elif kind == ("optim", "param_groups") and not isinstance(leaf, TensorEntry):
            for fqn in leaves.get((*path[:3], "params"), ()) if path[3:] != ("params",) else ():
                out["optimizer", f"param_groups.{fqn}.{joined(path[3:])}"] = leaf
        else:
            out[
                {"optim": "optimizer", "scheduler": "lr_scheduler", "trainer": "train_state"}.get(
                    str(path[0]), path[0]
                ),
                *path[1:],
            ] = leaf
    return out


def _paths_conflict(path: Path, named: Path) -> bool:
    """Return whether one nested dict cannot hold a leaf at `path` and one at `named`: one path is inside the other, or
    `path` is in a list where `named` has a name."""
    k = min(len(path), len(named))
    return path[:k] == named[:k] or (path[0] == named[0] and isinstance(path[1], int))


def _without_entries(ckpt: Checkpoint, names: Sequence[str], why: str) -> tuple[Checkpoint, list[Dropped]]:
    """Return (the index without the tensors and values of these names, the entries dropped, each with the reason
    `why`)."""
    gone = set(names)
    left = replace(
        ckpt,
        tensors={n: t for n, t in ckpt.tensors.items() if n not in gone},
        values={n: v for n, v in ckpt.values.items() if n not in gone},
    )
    return left, [Dropped(n, ckpt.tensors[n].nbytes if n in ckpt.tensors else 0, why) for n in names]


def _without_plain_model_values(ckpt: Checkpoint) -> tuple[Checkpoint, list[Dropped]]:
    """Return (the index without values in the model's state dict that are no extra states, the entries dropped), for a
    file with weights at its root, where a reader would take them for state of the trainer."""
    why = "neither a tensor nor the extra state of a module, which is all that a file with weights at its root has"
    return _without_entries(ckpt, list_plain_model_values(ckpt), why)


def write_titan(ckpt: Checkpoint, source: Source, options: WriteOptions) -> Draft:
    """Draft what torchtitan's CheckpointManager asks for.

    Raises:
        UsageError: no world size was given and the source has none.
        Unsupported: there are several optimizers, an option of a param group is a tensor, or a weight has the name of
            another key at the root.
    """
    refuse_unfit_optimizer(ckpt, "torchtitan", by_parameter=True)
    if shared := next((n for n, t in ckpt.tensors.items() if t.path[:2] == ("optim", "param_groups")), None):
        raise Unsupported(
            f'"{shared}" is a tensor, one for all parameters of a group, and torchtitan keeps options by parameter. '
            "Write dcp or full, or save the option as a number.",
            code="CKPT0316",
        )
    world = options.ranks(ckpt)
    step = count_steps(ckpt, source)
    needed: dict[Path, object] = {
        ("trainer", "step"): step,
        ("trainer", "ntokens_seen"): 0,
        ("scheduler", "last_epoch"): step,
    }
    made = {p: data for p, data in needed.items() if joined(p) not in ckpt.tensors and ckpt.value(joined(p)) is None}
    dropped = [joined(p) for p in ckpt.leaves() if p not in made and any(_paths_conflict(p, q) for q in made)]
    ckpt, lost = _without_entries(ckpt, dropped, "torchtitan has entries with names there, which it asks for")
    ckpt, plain = _without_plain_model_values(ckpt)
    ckpt, added, of_groups = add_missing_options(ckpt)
    # what a reader will make of the weights at the root and of the optimizer
    tree = {p: leaf for p, leaf in _to_titan_tree(ckpt.leaves()).items() if p[0] == "optimizer" or len(p) == 1}
    read = canonical(tree, shape_of, None, None).leaves
    misread = (n for n, t in ckpt.tensors.items() if len(t.path) == 2 and t.component == "model" and t.path not in read)
    if name := next(misread, None):
        raise Unsupported(
            f'"{name}" cannot be written: torchtitan keeps weights at the root of its state dict, where a reader '
            f'takes the key "{ckpt.tensors[name].path[1]}" for something else. Write dcp or full.',
            code="CKPT0316",
        )
    values = {**ckpt.values, **{joined(p): Value(p, data) for p, data in made.items()}}
    draft = write_dcp(replace(ckpt, values=values, origin={}, notes=[]), source, replace(options, tree=_to_titan_tree))
    draft.taken_apart = {n: v for n, v in draft.taken_apart.items() if v.path[0] != "optim"}
    draft.checkpoint.layout = "torchtitan"
    draft.dropped += [*lost, *plain]
    draft.changed |= {joined(p): f"None became {data}" for p, data in made.items() if joined(p) in ckpt.values}
    draft.synthesized_values |= {joined(p): data for p, data in made.items() if joined(p) not in ckpt.values}
    # each parameter has the options of its group, and a reader makes groups of those with equal ones
    groups = {n: v for n, v in ckpt.values.items() if v.path[:2] == ("optim", "param_groups")}
    found = {joined(p): Value(p, x) for p, x in read.items()}
    states = {n: v for n, v in ckpt.values.items() if v.is_optimizer_state and n in found}
    rejoined = {n: found[n] for n, v in states.items() if found[n].path != v.path}
    draft.checkpoint.values |= rejoined
    draft.changed |= dict.fromkeys(rejoined, "torchtitan joins the keys inside a slot to one name")
    after = {n: v for n, v in found.items() if v.is_param_group} if groups else {}
    draft.changed |= list_changed_values(groups, after, "torchtitan keeps options by parameter")
    draft.checkpoint.values = {n: v for n, v in draft.checkpoint.values.items() if n not in groups} | after
    draft.changed = {n: how for n, how in draft.changed.items() if n not in added}
    draft.synthesized_values |= {
        n: after[n].data if n in after else x for n, x in added.items() if n in after or n.startswith("optim.state.")
    }
    draft.notes += of_groups
    if made:
        draft.notes.append(
            f"not in the source, and written as {', '.join(map(str, made.values()))}: {', '.join(map(joined, made))}"
        )
    ranks = {p[1] for p in _select_leaves(ckpt, "dataloader") if len(p) > 1} - {"world_size"}
    mesh = options.of(MeshOptions).sizes
    loaders = world if mesh is None else mesh.loaders
    if ranks != {f"dp_rank_{r}" for r in range(loaders)}:
        moved = f"torchtitan cannot move the state of its data loader to {count_noun(loaders, 'rank')}"
        draft.notes.append(
            f"{moved if ranks else 'the source has no data loader of torchtitan'}: load with "
            'CheckpointManager.Config(exclude_from_loading=["dataloader"])'
        )
    return draft


def write_torchtune(ckpt: Checkpoint, source: Source, options: WriteOptions) -> Draft:
    """Draft an epoch of torchtune with the recipe's state in it, for FullModelTorchTuneCheckpointer and the distributed
    recipes, whose optimizer has names.

    Raises:
        Unsupported: there are no weights, several optimizers, or state of one for no weight, or the names are those of
            transformers.
    """
    refuse_unfit_optimizer(ckpt, "torchtune")
    names = [str(t.path[1]) for t in ckpt.tensors.values() if t.path[0] == "model"]
    own = any(".sa_norm." in n for n in names)
    if not names or (not own and any(".self_attn." in n or "embed_tokens" in n for n in names)):
        raise Unsupported(
            f'The weights do not have torchtune\'s names (first "{names[0] if names else "none"}"), which a recipe '
            f"asks for. {argument('map', 'torchtune-llama3')} gives them to a Llama, and a map of your own to others.",
            code="CKPT0316",
        )
    if orphans := find_orphaned_optimizer_state(ckpt):
        raise Unsupported(
            f"the optimizer has state of {count_noun(len(orphans), 'parameter')} that the model does not have, first "
            f'"{orphans[0]}"; a recipe would take it for that of another model. Are the two of one training run?',
            code="CKPT0330",
        )
    ckpt, plain = _without_plain_model_values(ckpt)
    run = ckpt.value("trainer.epochs_run")
    epoch = ckpt.value("trainer.epoch")
    if not isinstance(run, int):
        counted = isinstance(epoch, int) or (isinstance(epoch, float) and math.isfinite(epoch))
        run = int(epoch) if counted else 0
    # what a recipe asks for; None is no limit, and no seed
    needed: dict[Path, object] = {
        ("trainer", "epochs_run"): run,
        ("trainer", "total_epochs"): run + 1,
        ("extra", "seed"): None,
        ("extra", "max_steps_per_epoch"): None,
    }
    made = {p: x for p, x in needed.items() if joined(p) not in ckpt.values}
    state = replace(
        ckpt.part(lambda n: n.startswith("optim.") or n in {joined(p) for p in needed}), origin={}, notes=[]
    )
    state.values = {**state.values, **{joined(p): Value(p, x) for p, x in made.items()}}

    def tree(leaves: dict[Path, object]) -> Leaves:
        """Return the leaves as a recipe keeps them: weights at the root, the optimizer and counters under their
        names."""
        return {(("optimizer", *p[1:]) if p[0] == "optim" else p[1:]): leaf for p, leaf in leaves.items()}

    parts = [
        (part, replace(options, target=name, own=None, tree=tree))
        for part, name in (
            (
                replace(ckpt.only(["model"]), origin=keep_extra_state_trees(ckpt.origin), notes=[]),
                "model-00001-of-00001.bin",
            ),
            (state, "recipe_state.pt"),
        )
    ]
    rest, kept = collect_left_over_state(ckpt, set(needed))
    drafts = [
        ("", draft_small_files(ckpt, rest, options)),
        *(("", full.write(part, source, own)) for part, own in parts),
    ]
    out = join_drafts("torchtune", ckpt, drafts, options, options.world_size or ckpt.world_size)
    out.dropped += plain
    out.checkpoint.values = {n: v for n, v in out.checkpoint.values.items() if n not in map(joined, made)}
    out.synthesized_values |= {joined(p): data for p, data in made.items()}
    if not own:
        out.notes.append(
            f'no weight has a name of torchtune\'s models (first "{names[0]}"): the recipe has to build this one'
        )
    out.notes += [f"a distributed recipe begins epoch {run} at its first row: torchtune saves no place in it", *kept]
    return out
