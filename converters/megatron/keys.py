"""What the keys of a Megatron-Core checkpoint mean: names of tensors, and the state in common.pt; megatron/__init__.py
describes the files."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckpttool.by_fields import ByFields
from ckpttool.errors import Corrupt
from ckpttool.formats.pickles import MEGATRON_ENUMS, Global, Opaque, short
from ckpttool.formats.stored_tensors import Inline, StoredTensor
from ckpttool.index.checkpoint import Checkpoint, Leaves, Path, TensorEntry, Value, joined
from ckpttool.index.names import COMPONENTS
from ckpttool.index.paths import is_number_text
from ckpttool.storage.source import Source

__all__ = [
    "BUCKETS",
    "CHAINED",
    "MODEL_OF_2023",
    "RANK",
    "TRAINER",
    "Key",
    "assign_group_members",
    "decays_qk_norms",
    "find_model_file",
    "from_plain_args",
    "has_no_weight_decay",
    "name_param_groups",
    "parse_common_state",
    "parse_key",
    "parse_object_key",
    "replace_unnamed_optimizer",
    "to_plain_args",
    "unstack_name",
]

#: `Checkpoint.trainer` of all dialects.
TRAINER = "Megatron-Core"
#: The element of a canonical path behind which a bucket of the optimizer has its name.
BUCKETS = "buckets"
#: The key below which the scalers of a chain's optimizers are, by number, all but the first's.
CHAINED = "chained"
#: In the place of model_optim_rng.pt in jobs whose optimizer is in files of data-parallel ranks.
MODEL_OF_2023 = "model_rng.pt"
RANK = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?(?:_(\d{3}))?")
#: The slots in which Megatron's optimizers keep the fp32 copies of the weights (distrib_optimizer.py, optimizer.py).
MASTERS = frozenset(("param", "fp32_param", "master_param"))
_SLOT = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(?P<slot>[^.]+)\.(?P<name>.+)", re.DOTALL)
_BUCKET = re.compile(
    r"(?P<bucket>(?P<group>(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+)\.gbuf_idx_\d+\.dtype_.+"
    r"\.bucket_idx_\d+)\.(?P<slot>[^.]+)",
    re.DOTALL,
)
_STACKED = re.compile(r"(?P<head>(?:.*\.)?layers)\.(?!\d+(?:\.|$))(?P<rest>.+)", re.DOTALL)
_OBJECT = re.compile(r"(?P<key>.+)/shard_(?P<place>[\d.]*_[\d.]*)", re.DOTALL)
_OF_GROUP = re.compile(
    r"(?:chained_(?P<chain>\d+)\.)?optimizer\.distributed\.dp_group_idx_(?P<group>\d+)\.(?P<what>.+)"
)


@dataclass(frozen=True, eq=False, repr=False)
class Key(ByFields):
    """What the key of a tensor says.

    `path` is the canonical path of the tensor, or of the first layer's where `stacked`: then the first axis counts the
    layers. `bucket` is that of a tensor of `dp_reshardable`, which belongs to no parameter alone.
    """

    path: Path
    stacked: bool = False
    bucket: str | None = None
    group: str | None = None

    def of_layer(self, i: int) -> Path:
        """Return the canonical path of the tensor of layer `i`, where the first axis of this key's tensor counts the
        layers."""
        return tuple(unstack_name(p, i) if isinstance(p, str) else p for p in self.path)


def find_model_file(source: Source, folder: str) -> str | None:
    """Return the name of the file with the model in the folder of a model-parallel rank, in the format before
    torch_dist.

    It is None if the folder is not that of a rank, or has no such file.
    """
    if not RANK.fullmatch(folder) or not source.glance(folder)[0]:
        return None
    inside = source.list(folder)
    return next((n for n in ("model_optim_rng.pt", MODEL_OF_2023) if n in inside), None)


def unstack_name(name: str, i: int) -> str:
    """Return the name of the parameter in layer `i`, from the name under which all layers are stacked.

    "decoder.layers.mlp.x" becomes "decoder.layers.3.mlp.x"; a name without layers, or with a number, stays unchanged.
    """
    m = _STACKED.fullmatch(name)
    return f"{m['head']}.{i}.{m['rest']}" if m else name


def parse_key(key: str) -> Key:
    """Parse the key of a tensor in a folder of dist_checkpointing: a weight, a slot of the optimizer, or a part of one
    of the optimizer's buckets. A key of no known form is taken for the name of a weight."""
    if m := _BUCKET.fullmatch(key):
        part = ("extra", "master") if m["slot"] in MASTERS else ("optim",)
        return Key((*part, BUCKETS, m["bucket"], m["slot"]), False, m["bucket"], m["group"])
    if m := _SLOT.fullmatch(key):
        name, slot = m["name"], m["slot"]
        path: Path = ("extra", "master", name) if slot in MASTERS else ("optim", "state", name, slot)
        return Key(path, _STACKED.fullmatch(name) is not None)
    return Key(("model", key), _STACKED.fullmatch(key) is not None)


def parse_object_key(key: str) -> tuple[Path, int | None]:
    """Parse the key of an object that ranks saved.

    Returns:
        (canonical path of the object, number of the chained optimizer whose state it is: 0 for a single optimizer, None
        for an object that is not optimizer state).
    """
    m = _OBJECT.fullmatch(key)
    if m is None:
        return ("extra", key), None
    if stacked := _STACKED.fullmatch(m["key"]):  # the first number of the place is the layer's
        at, _, of = m["place"].partition("_")
        layer, *at = at.split(".")
        of = of.split(".")[1:]
        key = f"{stacked['head']}.{layer}.{stacked['rest']}/shard_{'.'.join(at) or 0}_{'.'.join(of) or 1}"
        return ("extra", key), None
    if m["key"] == "rng_state":
        return ("rng", f"shard_{m['place']}"), None
    if of := _OF_GROUP.fullmatch(m["key"]):
        return ("optim", "groups", of["group"], of["what"]), int(of["chain"] or 0)
    return ("extra", key), None


#: {enumeration: {name of a member: its value}} of those in arguments (transformer/enums.py and enums.py of 0.16), since
#: Python 3.11.0 to 3.11.3 pickles members by their names.
_VALUES_OF_MEMBERS: Mapping[str, Mapping[str, object]] = {
    "AttnBackend": {"flash": 1, "fused": 2, "unfused": 3, "local": 4, "auto": 5},
    "CudaGraphScope": {
        "full_iteration": 1,
        "attn": 2,
        "mlp": 3,
        "moe": 4,
        "moe_router": 5,
        "moe_preprocess": 6,
        "mamba": 7,
    },
    "Fp4Recipe": {name: name for name in ("nvfp4", "custom")},
    "Fp8Recipe": {name: name for name in ("delayed", "tensorwise", "mxfp8", "blockwise", "custom")},
    "ModelType": {"encoder_or_decoder": 1},
}


def to_plain_args(x: object) -> object:
    """Return the arguments of a job, as unpickled, as plain data.

    A Namespace becomes a dict, and a member of one of Megatron's enumerations {"class": name, "value": value}. Anything
    else stays unchanged.
    """
    if isinstance(x, Opaque) and x.cls == Global("argparse", "Namespace") and isinstance(x.state, dict):
        return to_plain_args(x.state)
    if isinstance(x, Opaque) and x.cls in MEGATRON_ENUMS and len(x.args) == 1:
        return {"class": str(x.cls), "value": x.args[0]}
    if isinstance(x, Global) and (of := x._replace(name=x.name.rpartition(".")[0])) in MEGATRON_ENUMS:
        value = _VALUES_OF_MEMBERS.get(of.name, {}).get(x.name.rpartition(".")[2])
        return x if value is None else {"class": str(of), "value": value}
    if isinstance(x, dict):
        return type(x)((k, to_plain_args(v)) for k, v in x.items())
    if isinstance(x, (list, tuple)) and not isinstance(x, (Global, StoredTensor)):
        return type(x)(to_plain_args(v) for v in x)
    return x


def from_plain_args(x: object) -> object:
    """Return arguments in the form of `to_plain_args` as an argparse.Namespace to be pickled."""
    out = Opaque(Global("argparse", "Namespace"), ())
    out.state = _restore_enums(x)
    return out


def _restore_enums(x: object) -> object:
    """Return plain data in which each {"class": name, "value": value} is an object that pickles as that member of an
    enumeration.

    Only Megatron's own enumerations are restored.
    """
    if isinstance(x, dict) and x.keys() == {"class", "value"}:
        of = Global(*str(x["class"]).rpartition(".")[::2])
        if of in MEGATRON_ENUMS:
            return Opaque(of, (x["value"],), call=True)
    if isinstance(x, dict):
        return type(x)((k, _restore_enums(v)) for k, v in x.items())
    if isinstance(x, (list, tuple)) and not isinstance(x, (Global, Inline, StoredTensor)):
        return type(x)(_restore_enums(v) for v in x)
    return x


def parse_common_state(tree: object, what: str) -> dict[str, object]:
    """Return the content of common.pt as a nested dict under canonical keys: {"scheduler": ..., "optim": ..., "extra":
    ...}.

    Entries about the files rather than the training (`content_metadata`, `param_state_sharding_type`) are left out.

    Args:
        tree: the content of the file.
        what: how errors name the file.

    Raises:
        Corrupt: it is not a dict, or its optimizer has another form than Megatron-Core's.
    """
    if not isinstance(tree, dict) or not all(isinstance(k, str) for k in tree):
        raise Corrupt(
            f"{what}: holds {short(tree)}, not the common state of a Megatron-Core checkpoint.", code="CKPT0406"
        )
    out: dict[str, Any] = {}
    extra: dict[str, object] = {}
    ours: dict[str, object] = {}
    for key, x in tree.items():
        if key in ("opt_param_scheduler", "lr_scheduler"):  # verl's
            out["scheduler"] = x
        elif key == "optimizer":
            _add_common_optimizer(x, out, extra, what)
        elif key == "iteration":
            out["trainer"] = {"iteration": x}
        elif key == "args":
            extra["args"] = to_plain_args(x)
        elif key == "rng_state":
            out["rng"] = x
        elif key == "ckpttool" and isinstance(x, dict):  # what Megatron-Core has no place for (megatron/write.py)
            for component, more in x.items():
                if component not in COMPONENTS:
                    raise Corrupt(f"{what}: its entry ckpttool is not what ckpttool writes.", code="CKPT0406")
                ours[component] = more
        elif key != "content_metadata":
            extra[key] = x
    if extra:
        out["extra"] = extra
    for component, more in ours.items():
        there = out.get(component)
        if component == "optim":
            _restore_param_groups(there, more, what)
        elif not there:
            out[component] = more
        elif isinstance(there, dict) and isinstance(more, dict):
            out[component] = {**there, **more}
        else:
            raise Corrupt(f"{what}: its entry ckpttool is not what ckpttool writes.", code="CKPT0406")
    return out


def _restore_param_groups(optim: Any, before: Any, what: str) -> None:
    """Give the param groups the options that they had before ckpttool wrote them for a fused Adam (megatron/write.py).

    Args:
        optim: {"param_groups": [...]}, as read; changed in place.
        before: {"param_groups": {number of a group: {option: what it was, None if there was none}}}.
        what: how errors name the file.

    Raises:
        Corrupt: `before` is none of these groups.
    """
    groups = optim["param_groups"] if isinstance(optim, dict) else []
    rows = before.get("param_groups") if isinstance(before, dict) else None
    if not isinstance(rows, dict) or not all(
        isinstance(was, dict) and type(i) is int and 0 <= i < len(groups) for i, was in rows.items()
    ):
        raise Corrupt(f"{what}: its entry ckpttool is not what ckpttool writes.", code="CKPT0406")
    for i, was in rows.items():
        groups[i] = {k: was.get(k, x) for k, x in groups[i].items() if k not in was or was[k] is not None}


def _add_common_optimizer(x: object, out: dict[str, object], extra: dict[str, Any], what: str) -> None:
    """Add the optimizer in common.pt, or several chained ones in their order, to the nested dict under canonical keys.

    Args:
        x: the entry "optimizer" of common.pt.
        out: the nested dict; it gets the param groups, with the step that all parameters share, and the gradient
            scaler.
        extra: the dict that goes under its key "extra"; it gets everything else in the optimizer.
        what: how errors name the file.

    Raises:
        Corrupt: the optimizer has another form than Megatron-Core's.
    """
    chain = [x]
    if isinstance(x, dict) and x and all(isinstance(k, int) or is_number_text(str(k)) for k in x):
        chain = [x[k] for k in sorted(x, key=int)]
    elif isinstance(x, list):
        chain = x
    groups: list[Any] = []
    for number, one in enumerate(chain):
        if not isinstance(one, dict):
            raise Corrupt(f"{what}: its optimizer is {short(one)}.", code="CKPT0417")
        inner = one.get("optimizer", one)
        if not isinstance(inner, dict):
            raise Corrupt(f"{what}: its optimizer holds {short(inner)}.", code="CKPT0417")
        state = inner.get("state") or {}
        if not isinstance(state, dict):
            raise Corrupt(f"{what}: the state of its optimizer is {short(state)}.", code="CKPT0417")
        step = state.get("common_step")
        if not isinstance(listed := inner.get("param_groups", ()), (list, tuple)):
            raise Corrupt(f"{what}: the param groups of its optimizer are {short(listed)}.", code="CKPT0417")
        for group in listed:
            if not isinstance(group, dict):
                raise Corrupt(f"{what}: a param group of its optimizer is {short(group)}.", code="CKPT0417")
            groups.append(
                {
                    **{k: v for k, v in group.items() if k != "params"},
                    **({} if step is None else {"step": step}),
                    **({"chained": number} if len(chain) > 1 else {}),
                }
            )
        rest = {
            k: v
            for k, v in [
                *((k, v) for k, v in one.items() if k != "optimizer"),
                *(inner.items() if inner is not one else ()),
            ]
            if k not in ("param_groups", "param_state_sharding_type", "grad_scaler", "state", "fp32_from_fp16_params")
        }
        if rest:
            extra.setdefault("optimizer", {})[str(number)] = rest
        if "grad_scaler" in one:
            _add_scaler(out, one["grad_scaler"], number, what)
    if groups:
        out["optim"] = {"param_groups": groups}


def _add_scaler(out: dict[str, Any], scaler: object, number: int, what: str) -> None:
    """Add the gradient scaler of one optimizer of a chain to the nested dict under canonical keys.

    Each optimizer of a chain has one, which counts the overflows of its own gradients (prepare_grads in optimizer.py):
    that of the first is the job's `scaler`, and those of the others are below scaler.chained, by number.

    Raises:
        Corrupt: one of several is not a dict.
    """
    if number == 0:
        out["scaler"] = scaler
        return
    if not isinstance(scaler, dict) or not isinstance(of := out.setdefault("scaler", {}), dict):
        raise Corrupt(f"{what}: a gradient scaler of its optimizer is no dict.", code="CKPT0417")
    of.setdefault(CHAINED, {})[str(number)] = scaler


def name_param_groups(leaves: Leaves, notes: list[str]) -> None:
    """Add to `leaves` what Megatron does not save: the parameters of each param group, and the step of each parameter.

    Megatron's param groups (megatron/core/optimizer/__init__.py, _get_param_groups) are the combinations of `wd_mult`
    (0 for biases and parameters of one dimension) and `is_expert_parallel`. Groups of other kinds keep their
    hyperparameters and no list of parameters. Notes for the user are added to `notes`.
    """
    found: dict[int, dict[object, object]] = {}
    trained: dict[str, TensorEntry] = {}
    adam: set[str] = set()
    for path, leaf in leaves.items():
        if path[:2] == ("optim", "param_groups") and len(path) == 4 and is_number_text(str(path[2])):
            found.setdefault(int(path[2]), {})[path[3]] = leaf
        elif path[:2] == ("optim", "state") and len(path) == 4:
            if isinstance(leaf, TensorEntry):
                trained.setdefault(str(path[2]), leaf)
            if path[3] == "exp_avg":
                adam.add(str(path[2]))
    order = {str(p[1]): None for p in leaves if p[0] == "model" and len(p) == 2}
    names = [n for n in order if n in trained] or list(trained)
    if not found or not names:
        return
    qk_norms_decay = decays_qk_norms(lambda name: leaves.get(("extra", "args", name)))
    dims = {n: len(trained[n].shape) for n in names}
    members = assign_group_members(found, dims, adam, qk_norms_decay=qk_norms_decay)
    if members is None:
        notes.append(
            "Megatron-Core saves no parameters of its param groups, and these are not told apart by weight decay and "
            "experts alone, so they are carried without; layouts that need them refuse this optimizer"
        )
    else:
        notes.append(
            "Megatron-Core saves no parameters of its param groups: biases and parameters of one dimension "
            f"{'except norms of queries and keys ' if qk_norms_decay else ''}were put into the group without weight "
            "decay, as its own rule does; a job with another rule has other groups"
        )
        for i, params in members.items():
            leaves["optim", "param_groups", i, "params"] = params
    # the step of a group is that of its parameters; of unknown members, only if all groups have the same
    if members is None:
        steps = [g.get("step") for g in found.values()]
        alike = all(s is not None and _are_steps_equal(s, steps[0]) for s in steps)
        members = {next(iter(found)): names} if alike else {}
    for i, params in members.items():
        for name in params if (step := found[i].get("step")) is not None else ():
            path = ("optim", "state", name, "step")
            leaves[path] = replace(step, path=path) if isinstance(step, TensorEntry) else step
    for i, group in found.items():
        if isinstance(group.get("step"), (TensorEntry, Inline)):  # it is that of the parameters
            del leaves["optim", "param_groups", i, "step"]


def replace_unnamed_optimizer(
    out: Checkpoint, named: Mapping[Path, object], notes: Iterable[str], components: Collection[str]
) -> None:
    """Replace the optimizer's tensors of unknown parameters by those in `named`; the checkpoint is changed in place.

    Args:
        out: the checkpoint.
        named: {canonical path: tensor or value} of the optimizer.
        notes: notes to add to the checkpoint.
        components: the components to take from `named`, such as "optim" and "extra".
    """
    out.tensors = {n: t for n, t in out.tensors.items() if BUCKETS not in t.path}
    out.values = dict(out.values)
    out.notes = [*out.notes, *notes]
    # the arguments, which say of groups who is in them, also where they were not asked for
    arguments = {("extra", "args", *p): x for p, x in out.arguments.items()}
    leaves = {**arguments, **out.leaves(), **{p: leaf for p, leaf in named.items() if p[0] in components}}
    if "optim" in components:
        name_param_groups(leaves, out.notes)
    for path, leaf in leaves.items():
        if path in arguments:
            continue
        if isinstance(leaf, TensorEntry):
            out.tensors[joined(path)] = leaf
        else:
            out.values.setdefault(joined(path), Value(path, leaf))
    out.tensors = dict(sorted(out.tensors.items(), key=lambda row: COMPONENTS.index(str(row[1].path[0]))))


def _are_steps_equal(a: object, b: object) -> bool:
    """Return whether two steps are equal: tensors at the same place of a file, or equal numbers."""
    if isinstance(a, TensorEntry) and isinstance(b, TensorEntry):
        return bool(a.chunks[:] == b.chunks[:])
    return isinstance(a, (int, float)) and isinstance(b, (int, float)) and float(a) == float(b)


def has_no_weight_decay(name: str, shape: tuple[int, ...], qk_norms_decay: bool = False) -> bool:
    """Return whether Megatron-Core's own rule gives a parameter no weight decay: it is a bias or has one dimension.

    `qk_norms_decay` is whether the norms of queries and keys have weight decay in this job (`decays_qk_norms`).
    """
    if qk_norms_decay and re.search(r"[qk]_layernorm\.", name):
        return False
    return len(shape) == 1 or name.endswith(".bias")


def decays_qk_norms(get_argument: Callable[[str], object]) -> bool:
    """Return whether a job gives weight decay to the norms of queries and keys, as the recipes of Qwen3-Next do
    (get_standard_config_overrides in optimizer/__init__.py; before 0.16, no_weight_decay_cond_type).

    `get_argument` returns an argument of the job by its name, None where it has none of that name.
    """
    old = get_argument("no_weight_decay_cond_type")
    return get_argument("apply_wd_to_qk_layernorm") is True or old == "apply_wd_to_qk_layernorm"


def assign_group_members(
    groups: Mapping[int, Mapping[object, object]],
    dims: Mapping[str, int],
    adam: Collection[str] = (),
    *,
    qk_norms_decay: bool,
) -> dict[int, list[str]] | None:
    """Return {number of a param group: its parameters} by Megatron-Core's rule; None if the groups do not fit it.

    Args:
        groups: {number of a param group: its hyperparameters}.
        dims: {parameter: number of its dimensions}, in the order of the model.
        adam: the parameters with Adam's moments. They matter only if some groups have `betas` and others do not, as
            where Muon, for matrices, is chained with Adam: they are then in the groups with `betas`.
        qk_norms_decay: whether the norms of queries and keys have weight decay in this job.
    """
    chained = len({"betas" in g for g in groups.values()}) > 1
    of: dict[tuple[bool, bool, bool], int] = {}
    for i, g in groups.items():
        mult = g.get("wd_mult", g.get("pre_wd_mult"))
        kind = (chained and "betas" in g, mult == 0.0, bool(g.get("is_expert_parallel")))
        if (
            mult not in (0.0, 1.0)
            or g.get("lr_mult", g.get("pre_lr_mult", 1.0)) != 1.0
            or g.get("is_decoupled_lr")
            or kind in of
        ):
            return None
        of[kind] = i
    out: dict[int, list[str]] = {i: [] for i in groups}
    experts = any(expert for *_, expert in of)
    for name, n in dims.items():
        bare = has_no_weight_decay(name, (0,) * n, qk_norms_decay)
        expert = experts and re.search(r"\bexperts\b", name) is not None and "shared_experts" not in name
        group = of.get((chained and name in adam, bare, expert))
        if group is None:
            return None
        out[group].append(name)
    return out
