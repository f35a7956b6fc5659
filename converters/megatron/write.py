"""Writes megatron: a folder of torch_dist that `dist_checkpointing.load` reads at any tensor, pipeline and data
parallel size.

The tensors are those of dcp, under Megatron's keys: layers by number (`non_homogeneous_layers`), the optimizer in the
shapes of the model (`fully_reshardable`), every tensor cut along its first axis among the files. `content_metadata` in
common.pt says so, and a job builds the keys that it asks for from that. A parameter with moments, but without an fp32
copy in the source, gets one: DistributedOptimizer loads its weights from there.
"""

from __future__ import annotations

import fnmatch
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ckpttool.engine.conservation import list_changed_values
from ckpttool.engine.copy.stream import read_small_tensors
from ckpttool.engine.transform.remainders import move_masters_to_extra
from ckpttool.errors import Unsupported, argument
from ckpttool.formats import torch_pickles
from ckpttool.formats.pickles import short
from ckpttool.formats.stored_tensors import Inline, decode_number, flatten_tree, split_components
from ckpttool.huggingface import maps, model_files
from ckpttool.index.checkpoint import Checkpoint, Leaves, Path, TensorEntry, Value, joined
from ckpttool.index.draft import Draft, DraftFile, Dropped
from ckpttool.index.expressions import evaluate
from ckpttool.index.names import step_count
from ckpttool.index.optimizers import find_optimizers
from ckpttool.index.trees import nest
from ckpttool.layouts import WriteOptions
from ckpttool.printable import count_noun
from ckpttool.storage.source import Source

from ..dcp import write_dcp as _dcp_write
from ..dcp.object_items import Whole
from .keys import (
    CHAINED,
    decays_qk_norms,
    from_plain_args,
    has_no_weight_decay,
    name_param_groups,
    parse_common_state,
)

__all__ = ["prepare", "write"]

_METADATA = (
    b'{"sharded_backend": "torch_dist", "sharded_backend_version": 1, '
    b'"common_backend": "torch", "common_backend_version": 1}'
)
_CONTENT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "non_homogeneous_layers": True,
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
}
#: What common.pt has that is not of `extra`, and where that is made of `extra`, too.
_OWN = (
    *("optimizer", "opt_param_scheduler", "lr_scheduler", "iteration", "content_metadata", "model", "rng_state"),
    *("master", "ckpttool"),
)
#: Keys by which DistributedOptimizer finds its param groups in a checkpoint (optimizer.py,
#: param_group_identifier_keys).
_IDENTIFIERS: dict[str, object] = {"lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
#: Maps whose premises say what an argument of Megatron-LM is by config.json, and the left side that names one.
_MAPS = ("megatron", "megatron-mla")
_BARE = re.compile(r"(\w+)(?: \| .*)?\Z")
#: Some of these are in every state of OptimizerParamScheduler, of any version.
_SCHEDULE = frozenset(("num_steps", "num_iters"))
#: Options of Lamb, which keeps what Adam keeps: DeepSpeed's (ops/lamb/fused_lamb.py) and Apex'.
_OF_LAMB = frozenset(("max_coeff", "grad_averaging"))
_NO_PLACE = "Megatron-Core has no place for such a tensor"


def prepare(ckpt: Checkpoint, source: Source, options: WriteOptions) -> Checkpoint:
    """Return the state in the form that Megatron-Core keeps: each parameter's step as a number, masters at
    extra.master, and the gradient scaler's tensors as values for common.pt.

    Megatron-Core keeps the step with the hyperparameters. If the dtype of a step is not numeric, steps stay tensors.
    """
    ckpt = move_masters_to_extra(split_components(ckpt))
    scales = read_small_tensors(ckpt, source, [n for n, t in ckpt.tensors.items() if _is_small_scale(t)])
    if scales:
        inline = {n: Inline(ckpt.tensors[n].dtype, ckpt.tensors[n].shape, raw) for n, raw in scales.items()}
        ckpt = replace(
            ckpt,
            tensors={n: t for n, t in ckpt.tensors.items() if n not in scales},
            values=ckpt.values | {n: Value(ckpt.tensors[n].path, x) for n, x in inline.items()},
        )
    steps = [
        n
        for n, t in ckpt.tensors.items()
        if t.path[:2] == ("optim", "state") and t.path[3:] == ("step",) and not t.shape
    ]
    found = read_small_tensors(ckpt, source, steps)
    numbers = {n: Value(ckpt.tensors[n].path, decode_number(ckpt.tensors[n].dtype, raw)) for n, raw in found.items()}
    if not numbers or any(v.data is None for v in numbers.values()):
        return ckpt
    return replace(
        ckpt, tensors={n: t for n, t in ckpt.tensors.items() if n not in numbers}, values={**ckpt.values, **numbers}
    )


def write(ckpt: Checkpoint, source: Source, options: WriteOptions) -> Draft:
    """Plan a folder of dist_checkpointing, with `options.world_size` data files, by default as many as the source had
    ranks.

    Raises:
        Unsupported: the steps of the parameters differ, the param groups are not those that Megatron-Core has, or the
            optimizer is none of which it loads a state.
    """
    _refuse_other_optimizers(ckpt)
    # tensors under Megatron's keys; those inside objects of ranks are written with these
    tree: Leaves = {}
    tensors: dict[str, TensorEntry] = {}
    dropped: list[Dropped] = []
    objects: dict[str, Leaves] = {}
    trained = dict.fromkeys(str(t.path[2]) for t in ckpt.tensors.values() if t.path[:2] == ("optim", "state"))
    copies = []
    muon = _has_muon(ckpt)
    master = "optimizer.state.fp32_param" if muon else "optimizer.state.param"
    for name, t in ckpt.tensors.items():
        key = _make_tensor_key(t, ckpt, master)
        if key is not None:
            tree[(key,)] = tensors[name] = t
        elif (of := _find_object_key(t.path)) is not None:
            objects.setdefault(of, {})[t.path[2:]] = tensors[name] = t
        else:
            dropped.append(Dropped(name, t.nbytes, _NO_PLACE))
        if (
            t.path[0] == "model"
            and name.removeprefix("model.") in trained
            and f"extra.master.{t.path[1]}" not in ckpt.tensors
            and not (muon and options.cast(name, t.dtype) == "float32")
        ):
            copy = replace(t, dtype="float32", path=("replica", "param", *t.path))
            tree[(f"{master}.{t.path[1]}",)] = tensors[joined(copy.path)] = copy
            copies.append(f"extra.master.{t.path[1]}")

    # values, in common.pt or in those objects
    notes: list[str] = []
    arguments = _derive_arguments(ckpt, source, options)
    common, made = _build_common_state(ckpt, trained, objects, dropped, notes, arguments, options)
    for key, leaves in objects.items():
        x = nest(leaves)
        tree[(key,)] = Whole(x) if any(isinstance(leaf, TensorEntry) for leaf in leaves.values()) else x

    # a folder of dcp, with two files more before .metadata, which comes last
    out = _dcp_write.write(
        replace(ckpt, tensors=tensors),
        source,
        replace(
            options,
            world_size=options.world_size or ckpt.world_size or 1,
            tree=lambda leaves: tree,
            cast=lambda n, dtype: dtype if n.startswith("replica.") else options.cast(n, dtype),
        ),
    )
    data = torch_pickles.save_small_file(common)
    out.checkpoint.layout = "megatron"
    out.checkpoint.files[-1:-1] = ["common.pt", "metadata.json"]
    out.checkpoint.sizes[-1:-1] = [len(data), len(_METADATA)]
    out.files[-1:-1] = [DraftFile("common.pt", len(data), data), DraftFile("metadata.json", len(_METADATA), _METADATA)]

    # what is declared of it
    out.dropped += dropped
    out.notes += notes
    out.synthesized_tensors += copies
    out.synthesized_values |= made
    out.checkpoint.values, out.changed = _predict_values(ckpt, common, out.dropped)
    _declare_added_steps(out, ckpt)
    if not any(n.startswith(("model.decoder.", "model.embedding.", "model.encoder.")) for n in ckpt.tensors):
        out.notes.append(
            "the weights keep their names, and none is one of Megatron-Core's (decoder.layers.0...): its modules will "
            "not find them"
        )
    if copies:
        out.notes.append(
            f"{len(copies)} weights are written twice, since Megatron-Core's optimizer loads fp32 copies of its own"
        )
    return out


def _predict_values(
    ckpt: Checkpoint, common: dict[str, Any], dropped: list[Dropped]
) -> tuple[dict[str, Value], dict[str, str]]:
    """Return ({name: value} that a reader of the folder will find, {name of each that differs from the source's: why}).

    The param groups are those that Megatron-Core makes, and each of them has the step of its parameters.

    Args:
        ckpt: the source.
        common: the content of common.pt.
        dropped: the state that the folder does not hold.
    """
    gone = {d.name for d in dropped}
    leaves: Leaves = {}
    if "optimizer" in common:
        ours = {k: x for k, x in common.get("ckpttool", {}).items() if k == "optim"}
        leaves |= flatten_tree(parse_common_state({"optimizer": common["optimizer"], "ckpttool": ours}, "common.pt"))
    leaves |= {t.path: t for t in ckpt.tensors.values() if joined(t.path) not in gone}
    leaves |= {v.path: v.data for v in ckpt.values.values() if v.path[:2] == ("extra", "args")}
    name_param_groups(leaves, [])
    read = {joined(p): Value(p, x) for p, x in leaves.items() if p[0] == "optim" and not isinstance(x, TensorEntry)}
    before = {n: v for n, v in ckpt.values.items() if v.path[0] == "optim" and n not in gone}
    rest = {n: v for n, v in ckpt.values.items() if v.path[0] != "optim"}
    return {**rest, **read}, list_changed_values(before, read, "in the param groups that Megatron-Core makes")


def _declare_added_steps(out: Draft, ckpt: Checkpoint) -> None:
    """List the steps that the source `ckpt` does not have in the draft `out`, with a note: Megatron-Core keeps one step
    for each param group, which a reader gives to all parameters of the group."""
    added = {n: v.data for n, v in out.checkpoint.values.items() if v.slot == "step" and n not in ckpt.values}
    out.synthesized_values |= added
    if added:
        out.notes.append(
            f"{count_noun(len(added), 'parameter')} without a step got that of the param group, first "
            f"{next(iter(added))}: Megatron-Core keeps one step for each group"
        )


def _has_muon(ckpt: Checkpoint) -> bool:
    """Return whether the optimizer is Megatron-Core's Muon with an Adam beside it. It has no distributed optimizer, so
    the state is in the form of those without (optimizer/muon.py and optimizer/optimizer.py of 0.16)."""
    return any(v.option == "momentum_beta" for v in ckpt.values.values())


def _refuse_other_optimizers(ckpt: Checkpoint) -> None:
    """Refuse state of an optimizer that Megatron-Core does not load: its distributed one is Adam's alone, its Muon has
    that for matrices, and its SGD asks `init_state_fn`, which is None for it, before a load (distrib_optimizer.py and
    optimizer.py of 0.16). It would ask for no slot beside those, and train on as Adam.

    Raises:
        Unsupported: a parameter has a state that is not Adam's moments alone, nor that of Megatron-Core's Muon, or the
            param groups are Lamb's.
    """
    muon = _has_muon(ckpt)
    what_to_do = f"{argument('only', ['model'])} leaves the optimizer out."
    for name, found in (row for state in find_optimizers(ckpt) for row in state.slots.items()):
        if found - {"step"} != {"exp_avg", "exp_avg_sq"} and not (muon and "momentum_buffer" in found):
            raise Unsupported(
                f'The optimizer keeps {", ".join(sorted(found))} for "{name}", and Megatron-Core loads exp_avg and '
                f"exp_avg_sq of Adam, and momentum_buffer of its own Muon, alone. {what_to_do}",
                code="CKPT0316",
            )
    if lamb := next((v.option for v in ckpt.values.values() if v.option in _OF_LAMB), None):
        raise Unsupported(
            f'The param groups have the option "{lamb}", which Lamb has and Adam has not, and Megatron-Core would take '
            f"its moments for those of Adam. {what_to_do}",
            code="CKPT0316",
        )
    options: dict[int, set[str]] = {}
    for v in ckpt.values.values():
        if v.option is not None:
            options.setdefault(v.group, set()).add(v.option)
    # torch's RAdam keeps what Adam keeps, and has no amsgrad beside the options that all of torch's optimizers have
    if any("foreach" in found and "amsgrad" not in found for found in options.values() if "betas" in found):
        raise Unsupported(
            "The param groups are those of torch's RAdam, which have no amsgrad, and Megatron-Core would take its "
            f"moments for those of Adam. {what_to_do}",
            code="CKPT0316",
        )


def _is_small_scale(t: TensorEntry) -> bool:
    """Return whether a tensor is one number of a gradient scaler: DynamicGradScaler of grad_scaler.py has `scale`."""
    return t.path[0] == "scaler" and t.numel == 1


def _is_megatron_scaler(x: object) -> bool:
    """Return whether `x` is what a gradient scaler of Megatron-Core loads: what the dynamic one reads, whose scale is a
    tensor, or the empty dict of the constant one (grad_scaler.py); `scaler.chained` may be beside it."""
    if not isinstance(x, dict) or not (own := x.keys() - {CHAINED}):
        return isinstance(x, dict)
    return own >= {"scale", "growth_tracker", "hysteresis_tracker"} and isinstance(x["scale"], Inline)


def _make_tensor_key(t: TensorEntry, ckpt: Checkpoint, master: str) -> str | None:
    """Return Megatron's key for a tensor; None if it is neither a weight nor optimizer state in its weight's shape.

    `master` is the head of the keys of fp32 masters.
    """
    if t.path[0] == "model" and len(t.path) == 2:
        return str(t.path[1])
    if t.path[:2] == ("extra", "master") and len(t.path) == 3:
        return f"{master}.{t.path[2]}"
    if t.path[:2] == ("optim", "state") and len(t.path) == 4:
        of = ckpt.tensors.get(f"model.{t.path[2]}")
        return f"optimizer.state.{t.path[3]}.{t.path[2]}" if of is None or of.shape == t.shape else None
    return None


def _find_object_key(path: Path) -> str | None:
    """Return Megatron's key of the rank's object that an entry is part of, such as "rng_state/shard_0.0_0".

    The result is None if the entry is part of no such object. `path` is the entry's canonical path.
    """
    if path[0] == "rng" and len(path) > 1 and str(path[1]).startswith("shard_"):
        return f"rng_state/{path[1]}"
    return str(path[1]) if path[0] == "extra" and len(path) > 1 and "/shard_" in str(path[1]) else None


_BESIDE_NAMES = "Megatron-Core has entries with names there, beside which neither a list nor a single value has a place"


@dataclass
class _Values:
    """The values of a checkpoint by their place in common.pt; `ours` have none in Megatron-Core."""

    scheduler: Leaves = field(default_factory=dict)
    scaler: Leaves = field(default_factory=dict)
    extra: Leaves = field(default_factory=dict)
    ours: Leaves = field(default_factory=dict)
    groups: dict[int, Leaves] = field(default_factory=dict)  # by number of the param group
    steps: dict[str, object] = field(default_factory=dict)  # by name of the value
    iteration: int | None = None

    def set_aside(self, component: str, leaves: Leaves) -> None:
        """Add leaves, {path in the component: leaf}, to `ours`."""
        self.ours |= {(component, *p): x for p, x in leaves.items()}


def _sort_values(ckpt: Checkpoint, objects: dict[str, Leaves], dropped: list[Dropped]) -> _Values:
    """Sort the values of a checkpoint by their place in common.pt.

    Args:
        ckpt: the checkpoint.
        objects: {key: leaves} of the objects of ranks, to which the values that belong to one are added.
        dropped: the list to which values without a place are added.
    """
    out = _Values()
    for v in ckpt.values.values():
        path, data = v.path, v.data
        if (of := _find_object_key(path)) is not None:
            objects.setdefault(of, {})[path[2:]] = data
        elif v.option is not None:
            out.groups.setdefault(v.group, {})[path[3:]] = data
        elif path[:2] == ("optim", "state") and path[3:] == ("step",):
            out.steps[joined(path)] = decode_number(data.dtype, data.data) if isinstance(data, Inline) else data
        elif path[0] == "optim":
            dropped.append(
                Dropped(
                    joined(path),
                    0,
                    "neither a step nor a param group, which is all that Megatron-Core saves besides tensors",
                )
            )
        elif path[0] == "scheduler":
            out.scheduler[path[1:]] = data
        elif path[0] == "scaler":
            out.scaler[path[1:]] = data
        elif path == ("trainer", "iteration") and type(data) is int:
            out.iteration = data
        elif path[0] == "extra" and len(path) > 1 and path[1] not in _OWN:
            out.extra[path[1:]] = data
        else:
            out.ours[path] = data
    return out


def _build_common_state(
    ckpt: Checkpoint,
    trained: Mapping[str, None],
    objects: dict[str, Leaves],
    dropped: list[Dropped],
    notes: list[str],
    arguments: Mapping[str, object],
    options: WriteOptions,
) -> tuple[dict[str, object], dict[str, object]]:
    """Return (the content of common.pt, {name: data} of the values in it that the source does not have).

    Args:
        ckpt: the source.
        trained: the names of parameters with optimizer state.
        objects: {key: leaves} of the objects of ranks, to which the values that belong to one are added.
        dropped: the list to which values without a place are added.
        notes: the list to which notes for the user are added.
        arguments: the arguments of a job to write if the source has none.
        options: what the caller asked for.

    Raises:
        Unsupported: steps or param groups are not those that Megatron-Core can have.
    """
    found = _sort_values(ckpt, objects, dropped)
    made: dict[str, object] = {}
    out: dict[str, Any] = nest(found.extra) if found.extra else {}
    _set_arguments(out, found, arguments, made)
    if "checkpoint_version" not in out:  # Megatron-LM takes weights without it for some whose qkv is ordered otherwise
        out["checkpoint_version"] = made["extra.checkpoint_version"] = 3.0
    out["iteration"] = found.iteration
    if found.iteration is None:
        out["iteration"] = step_count(ckpt.value) or 0
        if not any(p[:2] == ("trainer", "iteration") for p in found.ours):  # what another program calls so
            made["trainer.iteration"] = out["iteration"]
        if trained and step_count(ckpt.value) is None:
            notes.append("common.pt has iteration 0, since the source counts no steps besides those of its optimizer")
    if any(n.startswith("extra.args.") for n in made):
        notes.append(
            "the arguments of a job in common.pt are those that config.json says, without consumed_train_samples: the "
            f"data {_describe_data_start(out['iteration'])}"
        )
    _set_foreign_scaler_aside(found, notes)
    if found.groups or trained:
        out["optimizer"] = _build_optimizer_state(ckpt, found, notes, options)
    elif found.scaler:
        found.set_aside("scaler", found.scaler)
    _set_schedule(out, found, made, dropped, notes)
    if found.ours:
        out["ckpttool"] = nest(found.ours)
    out["content_metadata"] = _CONTENT
    return out, made


def _set_arguments(
    out: dict[str, Any], found: _Values, arguments: Mapping[str, object], made: dict[str, object]
) -> None:
    """Set the arguments of a job in common.pt: those of the source, else those that config.json says.

    Args:
        out: the content of common.pt so far, with the source's arguments as plain data.
        found: the values of the checkpoint; `ours` gets what another program calls arguments.
        arguments: those to write if the source has none.
        made: gets the values that the source does not have.
    """
    if "args" not in out and arguments:
        out["args"] = dict(arguments)
        made |= {f"extra.args.{k}": x for k, x in arguments.items()}
    if isinstance(out.get("args"), dict) and all(isinstance(k, str) for k in out["args"]):
        out["args"] = from_plain_args(out["args"])
    elif "args" in out:  # what another program calls so
        found.set_aside("extra", {p: x for p, x in found.extra.items() if p[0] == "args"})
        del out["args"]


def _describe_data_start(iteration: int) -> str:
    """Return where the data of a job without consumed_train_samples starts, as a predicate:
    build_train_valid_test_data_loaders (megatron/training/training.py) computes it from the iteration."""
    if not iteration:
        return "begins at its start"
    return (
        f"goes on at sample {iteration:,} x the job's global batch size, which has to be the source's; a job with "
        "train_samples stops there"
    )


def _set_foreign_scaler_aside(found: _Values, notes: list[str]) -> None:
    """Move the gradient scaler to `ours` if it is none that Megatron-Core loads; `notes` gets that."""
    scaler = nest(found.scaler) if found.scaler else None
    if not found.scaler or _is_megatron_scaler(scaler):
        return
    found.set_aside("scaler", found.scaler)
    found.scaler = {}
    if scaler is not None:
        notes.append(
            "the state of the gradient scaler is not of Megatron-Core's kind (scale, growth_tracker and "
            "hysteresis_tracker), so it is kept where only ckpttool looks, and a job in fp16 starts with its "
            "initial loss scale"
        )


def _set_schedule(
    out: dict[str, Any], found: _Values, made: dict[str, object], dropped: list[Dropped], notes: list[str]
) -> None:
    """Set the learning rate schedule in common.pt: the source's if it is Megatron-Core's, else, beside an optimizer, a
    constant one.

    Args:
        out: the content of common.pt so far, with the optimizer; its param groups may be changed.
        found: the values of the checkpoint; `ours` gets a scheduler of another program.
        made: gets the values that the source does not have.
        dropped: gets values of a scheduler that have no place beside the schedule.
        notes: gets a note on a constant schedule.
    """
    if {p[0] for p in found.scheduler if p} & _SCHEDULE:
        out["opt_param_scheduler"] = nest(found.scheduler)
        return
    found.set_aside("scheduler", found.scheduler)
    if "optimizer" not in out:
        return
    for path in [p for p in found.ours if p[0] == "scheduler" and (len(p) == 1 or isinstance(p[1], int))]:
        del found.ours[path]
        dropped.append(Dropped(joined(path), 0, _BESIDE_NAMES))
    out["opt_param_scheduler"] = schedule = _make_constant_schedule(out["optimizer"])
    made |= {f"scheduler.{k}": x for k, x in schedule.items()}
    bounds = any("max_lr" in g for g in _list_param_groups(out["optimizer"]))
    notes.append(
        "Megatron-Core loads none of its optimizer without a schedule of its own, and the state has none: "
        "common.pt has a constant learning rate. For a schedule of the job's own, start Megatron with "
        "--override-opt-param-scheduler (older releases: --override-opt_param-scheduler)"
        + (", and set max_lr and min_lr of its param groups after the load, which go before it" if bounds else "")
    )


def _derive_arguments(ckpt: Checkpoint, source: Source, options: WriteOptions) -> dict[str, object]:
    """Return {argument: value} of those that Megatron-LM reads when it loads a checkpoint, derived from config.json.

    They follow from the premises of the map of the model; {} if the source has arguments of its own, or there is no map
    for its model. Megatron-LM's `load_checkpoint` compares layers, width and heads, and reads random states unless
    `no_save_rng` is set (training/checkpointing.py of 2026); `--use-checkpoint-args` takes the others.
    """
    if ckpt.arguments or any(v.path[:2] == ("extra", "args") for v in ckpt.values.values()):
        return {}
    config = model_files.find_model_files(source, options.config, [])[0] or {}
    names = [str(t.path[1]) for t in ckpt.tensors.values() if t.path[0] == "model"]
    known = [m for m in map(maps.load_map, _MAPS) if config.get("model_type") in m.models]
    found = next((m for m in known if all(fnmatch.filter(names, glob) for glob in m.needed)), None)
    if found is None:
        return {}
    out: dict[str, object] = {}
    for p in found.premises:
        key = _BARE.match(p.job)
        value = evaluate(p.config, config) if p.condition is None or evaluate(p.condition, out) else None
        if key is not None and value is not None and value != evaluate(p.job, {}):
            out[key[1]] = value
    embedding = ckpt.tensors.get("model.embedding.word_embeddings.weight")
    further = {n.split(".")[2] for n in names if n.startswith("mtp.layers.")}
    return out | {
        "group_query_attention": out.get("num_query_groups", out["num_attention_heads"]) != out["num_attention_heads"],
        "untie_embeddings_and_output_weights": "output_layer.weight" in names,
        "add_bias_linear": any(n.endswith("linear_fc1.bias") for n in names),
        **({} if embedding is None else {"padded_vocab_size": embedding.shape[0]}),
        **({"mtp_num_layers": len(further)} if further else {}),
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "no_save_rng": not any(
            (_find_object_key(x.path) or "").startswith("rng_state/")
            for x in (*ckpt.values.values(), *ckpt.tensors.values())
        ),
    }


def _list_param_groups(optimizer: Any) -> list[dict[str, Any]]:
    """Return the param groups in the optimizer's part of common.pt, of all optimizers of a chain."""
    chain = optimizer.values() if all(isinstance(k, int) for k in optimizer) else [optimizer]
    return [g for one in chain for g in one.get("optimizer", one)["param_groups"]]


def _make_constant_schedule(optimizer: Any) -> dict[str, object]:
    """Return the state of an OptimizerParamScheduler that keeps learning rate and weight decay as the param groups have
    them, and set the bounds of these groups to that rate.

    A group's own `max_lr` and `min_lr` take the place of the scheduler's (get_lr in optimizer_param_scheduler.py). Of
    the source they are those of the schedule that is gone, Megatron-Core's or torch's OneCycleLR.

    Args:
        optimizer: the optimizer's part of common.pt; its param groups are changed in place.
    """
    groups = _list_param_groups(optimizer)
    lr, decay = groups[0].get("lr", 0.0), max(g.get("weight_decay", 0.0) for g in groups)
    for g in groups:
        if "lr" in g and (g["lr"] != lr or "max_lr" in g or "min_lr" in g):
            g["max_lr"] = g["min_lr"] = g["lr"]
    return {
        "max_lr": lr,
        "min_lr": lr,
        "lr_warmup_steps": 0,
        "lr_decay_steps": 1,
        "lr_decay_style": "constant",
        "num_steps": 0,
        "start_wd": decay,
        "end_wd": decay,
        "wd_incr_steps": 0,
        "wd_incr_style": "constant",
    }


def _build_optimizer_state(ckpt: Checkpoint, values: _Values, notes: list[str], options: WriteOptions) -> object:
    """Return the optimizer's part of common.pt: one optimizer, or {number: optimizer} where several are chained. Notes
    for the user are added to `notes`.

    Raises:
        Unsupported: parameters are at different steps, or in other param groups than Megatron-Core would make.
    """
    muon = _has_muon(ckpt)
    steps = dict.fromkeys(float(x) for x in values.steps.values() if isinstance(x, (int, float)))
    trained = {t.parameter for t in ckpt.tensors.values() if t.slot is not None}
    stepped = {n for n in trained if joined(("optim", "state", n, "step")) in values.steps}
    if len(steps) > 1:
        several = ", ".join(f"{s:g}" for s in list(steps)[:4])
        raise Unsupported(
            f"Parameters are at different steps ({several}); Megatron-Core has one step for all of them.",
            code="CKPT0316",
        )

    # the groups, which Megatron-Core finds in a checkpoint by their identifiers, and fills by its own rule
    groups = [g for _, g in sorted(values.groups.items())]
    found = [{k: x for k, x in nest(g).items() if k != "params"} for g in groups]
    members = [list(g.get(("params",), ())) for g in groups]
    qk_norms_decay = decays_qk_norms(lambda name: ckpt.value(f"extra.args.{name}"))
    if not found or not all("wd_mult" in g or "pre_wd_mult" in g for g in found):
        found, members = _to_megatron_groups(ckpt, found, members, qk_norms_decay, notes)
    for g, names in zip(found, members, strict=True):
        odd = [
            n
            for n in names
            if f"model.{n}" in ckpt.tensors
            and has_no_weight_decay(n, ckpt.tensors[f"model.{n}"].shape, qk_norms_decay)
            != (g.get("wd_mult", g.get("pre_wd_mult")) == 0.0)
        ]
        if odd:
            what_to_do = "Leave the optimizer out, or change the groups in the job that saves."
            if not (qk_norms_decay or has_no_weight_decay(odd[0], ckpt.tensors[f"model.{odd[0]}"].shape, True)):
                what_to_do = (
                    "A job with apply_wd_to_qk_layernorm does not, and extra.args, which says so, is not in what is "
                    f"converted: {argument('only', ['model', 'optim', 'extra'])} keeps it, here and in conversions "
                    "before this one."
                )
            raise Unsupported(
                f'"{odd[0]}" is in a param group with{"out" if g.get("wd_mult") == 0.0 else ""} weight decay, and '
                f"Megatron-Core would put it into the other one when it loads. {what_to_do}",
                code="CKPT0316",
            )
        if g.get("step") == 0 != next(iter(steps), 0) and trained.intersection(names) <= stepped:
            del g["step"]  # DeepSpeed's FusedAdam counts in the state alone, and its groups stay at 0
        if steps and not muon and g.setdefault("step", step := next(iter(steps))) != step:
            raise Unsupported(
                f'A param group has the option "step" {short(g["step"])}, and its parameters are at step {step:g}; '
                f"Megatron-Core keeps the step in the group alone. {argument('only', ['model'])} leaves the optimizer "
                "out.",
                code="CKPT0316",
            )

    # one optimizer, or a chain of several
    scaler: Any = nest(values.scaler) if values.scaler else None
    others: dict[str, Any] = {}  # the scalers of the optimizers behind the first
    if scaler is not None and isinstance(scaler.get(CHAINED), dict):
        others = scaler.pop(CHAINED)
    half = muon and any(
        options.cast(n, t.dtype) in ("bfloat16", "float16") for n, t in ckpt.tensors.items() if t.path[0] == "model"
    )
    chain = {}
    numbers = [n if type(n := g.get("chained")) is int else 0 for g in found]
    _complete_for_fused_adam([g for _, g in sorted(zip(numbers, found, strict=True), key=lambda row: row[0])], values)
    for number in sorted(set(numbers)):
        own = [
            {k: x for k, x in g.items() if k != "chained"} for g, n in zip(found, numbers, strict=True) if n == number
        ]
        one: dict[str, Any] = {"optimizer": {"param_groups": own}, "param_state_sharding_type": "fully_reshardable"}
        if muon:
            one = _make_plain_optimizer(own, steps, half)
        chain[number] = one if scaler is None else one | {"grad_scaler": others.pop(str(number), scaler)}
    values.ours |= flatten_tree(others, ("scaler", CHAINED)) if others else {}
    return next(iter(chain.values())) if len(chain) == 1 else chain


def _complete_for_fused_adam(groups: list[dict[str, Any]], values: _Values) -> None:
    """Give the param groups the options that the FusedAdam of Transformer Engine or Apex needs.

    A job takes the saved groups in place of its own. FusedAdam reads `bias_correction`, which torch's Adam always
    applies and has no option for, and needs an integer `step`. The options as they were before are kept in `values`, so
    that a reader restores them.

    Args:
        groups: the hyperparameters of each param group, in the order of the file; changed in place.
        values: the values of the checkpoint; its `ours` gets the options before the change.
    """
    before: dict[int, dict[str, object]] = {}
    for i, g in enumerate(groups):
        made: dict[str, object] = {}
        if {"betas", "eps"} <= g.keys() and "bias_correction" not in g:
            made["bias_correction"] = True
        if isinstance(step := g.get("step"), float) and step.is_integer():
            made["step"] = int(step)
        if made:
            before[i] = {k: g.get(k) for k in made}
            g.update(made)
    if before:
        values.ours["optim", "param_groups"] = before


def _make_plain_optimizer(groups: list[dict[str, Any]], steps: Iterable[float], half: bool) -> dict[str, Any]:
    """Return one optimizer's part of common.pt, in the form of those that are not distributed.

    Args:
        groups: its param groups; those of Muon have `momentum_beta`, and no step.
        steps: the one step of Adam's parameters; empty if they have none.
        half: whether weights are written in a 16-bit dtype. The form of a job in fp32, which has no masters, is flat.
    """
    out: dict[str, Any] = {"param_groups": [{k: x for k, x in g.items() if k != "step"} for g in groups]}
    if steps and not any("momentum_beta" in g for g in groups):
        out["state"] = {"common_step": Inline("float32", (), struct.pack("<f", *steps))}
    return {"optimizer": out} if half else out


def _to_megatron_groups(
    ckpt: Checkpoint, groups: list[dict[str, Any]], members: list[list[str]], qk_norms_decay: bool, notes: list[str]
) -> tuple[list[dict[str, object]], list[list[str]]]:
    """Turn the param groups of another trainer into Megatron-Core's two: with weight decay and without.

    Args:
        ckpt: the source, for the shapes of its weights.
        groups: the hyperparameters of each of its param groups.
        members: the names of the parameters of each.
        qk_norms_decay: whether norms of queries and keys have weight decay (`decays_qk_norms`).
        notes: the list to which a note is added if a parameter loses its weight decay.

    Returns:
        ([hyperparameters of each group], [names of the parameters of each group]).

    Raises:
        Unsupported: the groups differ in more than weight decay, a weight decay is not a number, a parameter without
            weight decay would get one, or there are no groups.
    """
    alike = [{k: x for k, x in g.items() if k not in ("weight_decay", "param_names")} for g in groups]
    if not alike:
        raise Unsupported(
            "The optimizer has no param groups, and Megatron-Core loads its hyperparameters from there. Leave the "
            "optimizer out.",
            code="CKPT0316",
        )
    for g in groups:
        if not isinstance(g.get("weight_decay", 0.0), (int, float, Inline)):
            raise Unsupported(
                f"A param group has the weight decay {short(g['weight_decay'])}, which is no number, and Megatron-Core "
                f"makes its groups by that. {argument('only', ['model'])} leaves the optimizer out.",
                code="CKPT0316",
            )
    decays = {g.get("weight_decay", 0.0) for g in groups} - {0.0}
    odd = next((k for g in alike[1:] for k in {**alike[0], **g} if g.get(k) != alike[0].get(k)), None)
    if odd or len(decays) > 1:
        raise Unsupported(
            f"The param groups differ in {odd or 'weight_decay'!r}; Megatron-Core has one group with weight decay and "
            "one without, which are alike otherwise. Leave the optimizer out, or give all groups the same.",
            code="CKPT0316",
        )
    bare = [
        n
        for names in members
        for n in names
        if (t := ckpt.tensors.get(f"model.{n}")) is not None and has_no_weight_decay(n, t.shape, qk_norms_decay)
    ]
    lighter = [
        n
        for g, names in zip(groups, members, strict=True)
        if decays and not g.get("weight_decay")
        for n in names
        if n not in bare
    ]
    if lighter:
        raise Unsupported(
            f'"{lighter[0]}" has no weight decay, and Megatron-Core would give it some: it spares biases and '
            "parameters of one dimension alone. Leave the optimizer out.",
            code="CKPT0316",
        )
    if bare and any(
        n in bare for g, names in zip(groups, members, strict=True) if g.get("weight_decay") for n in names
    ):
        notes.append(
            "biases and parameters of one dimension have weight decay in the source; they are in Megatron-Core's group "
            "without, since it puts them there"
        )
    base = {**alike[0], **_IDENTIFIERS}
    both = [
        {**base, "wd_mult": 1.0, "weight_decay": max(decays, default=0.0)},
        {**base, "wd_mult": 0.0, "weight_decay": 0.0},
    ]
    return both, [[n for names in members for n in names if n not in bare], bare]
