"""LoRA by its adapter_config.json and the names that PEFT saves: ranks, the factor alpha / r, and which weight an
adapter changes.

Names, shapes and numbers only; engine/merging.py computes. What an adapter_config.json asks for and this module does
not know is refused by its name, since a merge without it would give other weights.

Sources: peft/tuners/lora/{config,model,layer}.py, peft/utils/other.py (get_pattern_key), of peft 0.21.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import Corrupt, Unsupported, argument
from ..index.checkpoint import Checkpoint, joined
from ..printable import count_noun
from . import Config

__all__ = [
    "KNOWN",
    "REFUSED",
    "ROOT",
    "AdapterShape",
    "Change",
    "Update",
    "encode_config",
    "find_lora",
    "find_lora_in_shapes",
    "make_config",
    "plan_changes",
    "refuse_unmergeable",
    "scaling",
]

ROOT = "base_model.model."
Shapes = Mapping[str, tuple[int, ...]]

#: What the tensors of one adapted module are called, behind the module's name.
_KINDS = {
    "lora_A.weight": "a",
    "lora_B.weight": "b",
    "lora_B.bias": "bias",
    "lora_embedding_A": "a",
    "lora_embedding_B": "b",
    "lora_magnitude_vector": "magnitude",
}
#: Fields of adapter_config.json that change what a merge is, and why each is refused.
REFUSED = {
    "trainable_token_indices": "some rows of the embedding are trained besides",
    "target_parameters": "it adapts parameters that are not the weight of a linear layer or an embedding",
    "layer_replication": "it copies layers of the base model",
    "alora_invocation_tokens": "it acts only behind an invocation sequence (aLoRA), which no merged weight can",
    "arrow_config": "a router chooses among adapters for each token (Arrow), which no merged weight can",
    "use_qalora": "its inputs are pooled in groups (QALoRA)",
    "use_bdlora": "its matrices are block-diagonal (BD-LoRA)",
    "velora_config": "it is a VeLoRA adapter",
    "monteclora_config": "it is a MonteCLoRA adapter",
    "kasa_config": "it truncates the weights of the base model (KaSA)",
}
#: Fields that a merge uses, or that say how the adapter was made or trained.
KNOWN = frozenset(
    {
        "peft_type",
        "task_type",
        "auto_mapping",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "r",
        "target_modules",
        "exclude_modules",
        "lora_alpha",
        "lora_dropout",
        "fan_in_fan_out",
        "bias",
        "use_rslora",
        "modules_to_save",
        "init_lora_weights",
        "layers_to_transform",
        "layers_pattern",
        "rank_pattern",
        "alpha_pattern",
        "megatron_config",
        "megatron_core",
        "loftq_config",
        "eva_config",
        "corda_config",
        "lora_ga_config",
        "use_dora",
        "qalora_group_size",
        "runtime_config",
        "lora_bias",
        "ensure_weight_tying",
        *REFUSED,
    }
)
#: Values of init_lora_weights that take a part of the base weights into the adapter before training begins.
_CHANGES_BASE = re.compile(r"pissa(_niter_\d+)?|corda|olora|loftq|lora_ga|mica", re.IGNORECASE)


class AdapterShape(NamedTuple):
    """What the names and shapes of a state say of the LoRA in it.

    `ranks` {rank: modules}, `modules` how many are adapted, `names` of the adapters ("" where names are left out, as in
    files of PEFT), `alone` whether no weight of a base model is there.
    """

    ranks: dict[int, int]
    modules: int
    names: tuple[str, ...]
    alone: bool

    def __str__(self) -> str:
        ranks = ", ".join(str(r) for r in sorted(self.ranks))
        called = [n for n in self.names if n]
        of = f", adapters {', '.join(called)}" if len(called) > 1 else ""
        return f"r={ranks}, {count_noun(self.modules, 'module')}{of}"


def find_lora(ckpt: Checkpoint) -> AdapterShape | None:
    """Find the LoRA among the weights of a checkpoint; None where there is none."""
    return find_lora_in_shapes({joined(t.path[1:]): t.shape for t in ckpt.tensors.values() if t.path[0] == "model"})


def find_lora_in_shapes(shapes: Shapes) -> AdapterShape | None:
    """Find the LoRA among the weights of a model, {name: shape}, by their names; None where there is none."""
    ranks: Counter[int] = Counter()
    modules: set[str] = set()
    names: set[str] = set()
    others: list[str] = []
    for name, shape in shapes.items():
        parts = name.split(".")
        at = next((i for i, p in enumerate(parts) if p.startswith("lora_")), None)
        if at is None:
            others.append(name)
            continue
        rest = parts[at + 1 :]
        modules.add(".".join(parts[:at]))
        names.add("" if not rest or rest in (["weight"], ["bias"]) else rest[0])
        if parts[at] in ("lora_A", "lora_embedding_A") and shape:
            ranks[shape[0]] += 1
    if not modules or not ranks:
        return None
    base = [n for n in others if ".modules_to_save." not in n and (".base_layer." in n or f".{ROOT}" not in f".{n}")]
    saved = {"": True}.keys() == names  # what stands beside the matrices of a saved adapter was trained with it
    alone = not base and (saved or all(".modules_to_save." in n for n in others))
    return AdapterShape(dict(ranks), len(modules), tuple(sorted(names)), alone)


# ----------------------------------------------------------------------------------------------------
# adapter_config.json


def make_config(saved: Shapes, *, lora_alpha: float, rslora: bool, base_model: str | None) -> dict[str, Any]:
    """Make the adapter_config.json of an adapter for which there is none.

    What the arguments do not say is as PEFT's defaults: no dropout, no bias of the base model trained.

    Args:
        saved: {name: shape} of its tensors, as PEFT saves them.
        lora_alpha: its alpha, by which it is scaled.
        rslora: whether the scale is alpha / sqrt(r).
        base_model: name of the base model; None: not known.

    Raises:
        Unsupported: it has no lora_A, or a tensor of a kind that is not known.
    """
    modules = _group_by_module(saved)
    rank_of = {m: saved[kinds["a"]][0] for m, kinds in modules.items() if "a" in kinds}
    if not rank_of:
        raise Unsupported("the adapter has no lora_A, so its rank is not known. Save it with PEFT's save_pretrained.")
    usual = Counter(rank_of.values()).most_common(1)[0][0]
    of_adapter = {n for kinds in modules.values() for n in kinds.values()}
    whole = sorted({_base_name(n).rpartition(".")[0] for n in saved if n not in of_adapter})
    return {
        "base_model_name_or_path": base_model,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": int(lora_alpha) if float(lora_alpha).is_integer() else lora_alpha,
        "lora_bias": any("bias" in kinds for kinds in modules.values()),
        "lora_dropout": 0.0,
        "modules_to_save": whole or None,
        "peft_type": "LORA",
        "r": usual,
        "rank_pattern": {m: r for m, r in rank_of.items() if r != usual},
        "target_modules": sorted(modules),
        "task_type": None,
        "use_dora": any("magnitude" in kinds for kinds in modules.values()),
        "use_rslora": rslora,
    }


def encode_config(config: Config) -> bytes:
    """Encode adapter_config.json, laid out as PEFT does."""
    return json.dumps(config, indent=2, sort_keys=True).encode()


def refuse_unmergeable(config: Config, *, base_is_given: bool) -> None:
    """Refuse an adapter that cannot be merged exactly, by the name of what stands in the way.

    Args:
        config: its adapter_config.json.
        base_is_given: the base model is another checkpoint, and not what the job held beside the adapter.

    Raises:
        Unsupported: it cannot be merged.
    """
    kind = config.get("peft_type")
    if kind != "LORA":
        raise Unsupported(
            f"adapter_config.json describes a {str(kind)[:40]!r} adapter; ckpttool merges only LORA. {_PEFT}"
        )
    for name, why in REFUSED.items():
        if config.get(name):
            raise Unsupported(f"the adapter has {name} in adapter_config.json: {why}. {_PEFT}")
    if unknown := sorted(str(k) for k, v in config.items() if k not in KNOWN and v):
        raise Unsupported(
            f"adapter_config.json sets {unknown[0][:60]!r}, which ckpttool does not know; it may change what the "
            f"merged weights are. {_PEFT}"
        )
    start = config.get("init_lora_weights")
    if base_is_given and isinstance(start, str) and _CHANGES_BASE.fullmatch(start):
        raise Unsupported(
            f"the adapter began with init_lora_weights={start[:40]!r}, which takes a part of the base weights away, so "
            "it does not fit the base model as published. Merge the state of the job, which holds the weights that are "
            "left, or save the adapter with path_initial_model_for_weight_conversion."
        )


_PEFT = "Merge it with PEFT's merge_and_unload."


def scaling(config: Config, module: str, rank: int) -> float:
    """Return the factor of a module's product B @ A: alpha / r, or alpha / sqrt(r) with use_rslora.

    Args:
        config: adapter_config.json.
        module: name of the module.
        rank: that of its matrices.

    Raises:
        Corrupt: the file has another rank than its matrices, or no alpha, or a damaged pattern.
        Unsupported: a pattern could take forever.
    """
    r = _pattern_value(config, "rank_pattern", module, config.get("r"))
    alpha = _pattern_value(config, "alpha_pattern", module, config.get("lora_alpha"))
    if type(alpha) not in (int, float) or not math.isfinite(alpha):
        raise Corrupt(
            f"adapter_config.json has no number as lora_alpha, but {str(alpha)[:40]!r}. It does not belong to this "
            "adapter, or is damaged."
        )
    if r != rank:
        raise Corrupt(
            f'adapter_config.json gives "{module}" the rank {str(r)[:40]}, but its lora_A has {rank} rows. It does not '
            "belong to this adapter."
        )
    return float(alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank)


def _pattern_value(config: Config, field: str, module: str, usual: Any) -> Any:
    """Return the value of the first pattern that matches the module to its end.

    Args:
        config: adapter_config.json.
        field: its field with {pattern: value}.
        module: name of the module.
        usual: the value where no pattern matches.

    Raises:
        Corrupt: the field is no object, or a pattern is none. Unsupported: a pattern could take forever.
    """
    patterns = config.get(field) or {}
    if not isinstance(patterns, dict):
        raise Corrupt(f"{field} in adapter_config.json is not an object.")
    for pattern, value in patterns.items():
        if _pattern_matches(field, pattern, module):
            return value
    return patterns.get(module, usual)


#: A quantified group may take time exponential in the length of a name, each other quantifier multiplies it by that
#: length.
_QUANTIFIED_GROUP = re.compile(r"\)\s*[*+?{]")


def _pattern_matches(field: str, pattern: str, module: str) -> bool:
    """Return whether a pattern in a field of adapter_config.json matches a module, as PEFT does.

    Raises:
        Corrupt: it is no pattern. Unsupported: it could take forever.
    """
    if re.fullmatch(r"[\w.-]*", pattern):  # a name, whose dots match any character
        return re.search(rf"(?:^|\.)(?:{pattern})$", module) is not None
    steps = len(module) ** (len(re.findall(r"[*+{]", pattern)) + 1)
    if len(pattern) > 1000 or steps > 10**8 or _QUANTIFIED_GROUP.search(pattern):
        raise Unsupported(
            f"the pattern {pattern[:60]!r} in {field} could take forever to compare with a name, and it comes from a "
            f"file. {_PEFT}"
        )
    try:
        return re.match(rf"(.*\.)?({pattern})$", module) is not None
    except re.error as e:
        raise Corrupt(f"{field} in adapter_config.json has {pattern[:60]!r}, which is not a pattern: {e}.") from None


# ------------------------------------------------------------------------------------------------------------- changes


@dataclass(frozen=True)
class Update:
    """One LoRA of one weight: names of its tensors as PEFT saves them.

    `transposed`  B @ A is transposed before it is added: Conv1D, and every embedding
    """

    adapter: str
    module: str
    a: str
    b: str
    magnitude: str | None
    scaling: float
    rank: int
    embedding: bool
    transposed: bool


@dataclass(frozen=True)
class Change:
    """What becomes of one tensor of the base model: `start` is a tensor of an adapter (adapter, name) that replaces it,
    or None; then the updates are added in order, and to a bias (adapter, name of B's bias, scaling)."""

    start: tuple[str, str] | None = None
    updates: tuple[Update, ...] = ()
    biases: tuple[tuple[str, str, float], ...] = ()

    @property
    def is_copy(self) -> bool:
        """Return whether the adapter has a copy of the whole module (modules_to_save), which is tied to nothing."""
        return self.start is not None and "base_layer" not in self.start[1].split(".")


def plan_changes(adapters: Mapping[str, Shapes], configs: Mapping[str, Config], base: Shapes) -> dict[str, Change]:
    """Plan a merge of adapters, in this order: {tensor of the base model: what becomes of it}, of those that change.

    Args:
        adapters: {name of an adapter: {name as PEFT saves it: shape}}.
        configs: {name of an adapter: its adapter_config.json}.
        base: {name: shape} of the base model.

    Raises:
        Unsupported: an adapter changes what is not a weight of a linear layer or an embedding, or what the base model
            lacks; or adapters cannot be merged together.
        Corrupt: shapes do not fit, or an adapter_config.json is of another adapter.
    """
    starts: dict[str, tuple[str, str]] = {}
    updates: dict[str, list[Update]] = {}
    biases: dict[str, list[tuple[str, str, float]]] = {}
    for adapter, saved in adapters.items():
        config, modules = configs[adapter], _group_by_module(saved)
        for module, kinds in modules.items():
            update = _make_update(adapter, module, kinds, saved, config, base)
            updates.setdefault(f"{module}.weight", []).append(update)
            if "bias" in kinds:
                biases.setdefault(_require_target(f"{module}.bias", kinds["bias"], base), []).append(
                    (adapter, kinds["bias"], update.scaling)
                )
        of_adapter = {n for kinds in modules.values() for n in kinds.values()}
        for name, shape in saved.items():
            if name in of_adapter:
                continue
            target = _require_target(_base_name(name), name, base)
            if base[target] != shape:
                raise Corrupt(
                    f'"{name}" of the adapter is {list(shape)}, but "{target}" of the base model is '
                    f"{list(base[target])}. If the vocabulary was resized for the adapter, resize the base model "
                    "first, as for PeftModel.from_pretrained."
                )
            if target in starts:
                raise Unsupported(f'two of the adapters replace "{target}" as a whole. Merge one of them.')
            starts[target] = (adapter, name)
    for weight, rows in updates.items():
        if len(rows) > 1 and any(u.magnitude for u in rows):
            raise Unsupported(f'"{weight}" has several adapters, one of them with DoRA. Merge one of them.')
    return {
        n: Change(starts.get(n), tuple(updates.get(n, ())), tuple(biases.get(n, ())))
        for n in base
        if n in starts or n in updates or n in biases
    }


def _group_by_module(saved: Iterable[str]) -> dict[str, dict[str, str]]:
    """Group the LoRA in an adapter: {module: {"a", "b", "bias" or "magnitude": name of the tensor}}. `saved` are the
    names of its tensors.

    Raises:
        Unsupported: a tensor is of a kind that is not known.
    """
    out: dict[str, dict[str, str]] = {}
    for name in saved:
        parts = name.split(".")
        at = next((i for i, p in enumerate(parts) if p.startswith("lora_")), None)
        if at is None:
            if "token_adapter" in parts:
                raise Unsupported(f'"{name}": trained rows of an embedding (trainable tokens) are not merged. {_PEFT}')
            continue
        kind = _KINDS.get(".".join(parts[at:]))
        if kind is None:
            raise Unsupported(f'"{name}" is not a tensor of LoRA that ckpttool knows. {_PEFT}')
        out.setdefault(_base_name(".".join(parts[:at])), {})[kind] = name
    return out


def _base_name(name: str) -> str:
    """Return the name in the base model of a parameter or module that PEFT has wrapped."""
    return ".".join(p for p in name.removeprefix(ROOT).split(".") if p != "base_layer")


def _require_target(target: str, name: str, base: Shapes) -> str:
    """Return `target`, the tensor of the base model (`base`, {name: shape}) that `name` of the adapter belongs to.

    Raises:
        Unsupported: the base model does not have it.
    """
    if target in base:
        return target
    raise Unsupported(
        f'"{name}" of the adapter belongs to "{target}", which the base model does not have; its first tensor is '
        f'"{next(iter(base), None)}". Give the model that the adapter was trained on ({argument("config")} tells the '
        "names of its weights in memory)."
    )


def _make_update(
    adapter: str, module: str, kinds: Mapping[str, str], saved: Shapes, config: Config, base: Shapes
) -> Update:
    """Make the update of one module, after comparing all shapes.

    Args:
        adapter: its name.
        module: name of the module in the base model.
        kinds: {"a", "b", "bias" or "magnitude": name of the tensor}.
        saved: {name: shape} of the adapter's tensors.
        config: its adapter_config.json.
        base: {name: shape} of the base model.

    Raises:
        Corrupt: tensors are missing, or shapes or adapter_config.json do not fit.
        Unsupported: it is not a linear layer or an embedding, or the base model lacks it.
    """
    if not {"a", "b"} <= kinds.keys():
        raise Corrupt(f'"{module}": the adapter has only {", ".join(sorted(kinds.values()))}. The file is incomplete.')
    a, b = saved[kinds["a"]], saved[kinds["b"]]
    target = base[_require_target(f"{module}.weight", kinds["a"], base)]
    if len(a) != 2 or len(b) != 2 or len(target) != 2:
        raise Unsupported(
            f'"{kinds["a"]}" is {list(a)}: ckpttool merges adapters of linear layers and embeddings, whose matrices '
            f"have two dimensions. {_PEFT}"
        )
    # B @ A must have the shape of the weight, or its transposed one
    product, embedding = (b[0], a[1]), kinds["a"].endswith("lora_embedding_A")
    if a[0] != b[1]:
        raise Corrupt(
            f'"{module}": lora_A {list(a)} and lora_B {list(b)} cannot be multiplied. They do not belong to one '
            "adapter."
        )
    if embedding:
        transposed = True
    elif product[0] == product[1]:
        transposed = _is_conv1d(module, config, saved, base)
    else:
        transposed = target == product[::-1]
    if target != (product[::-1] if transposed else product):
        raise Corrupt(
            f'"{module}": lora_B @ lora_A is {list(product)}, but the weight of the base model is {list(target)}. They '
            "do not belong to one model."
        )
    if bool(config.get("use_dora")) != ("magnitude" in kinds):
        raise Corrupt(
            f'adapter_config.json has use_dora={bool(config.get("use_dora"))}, but "{module}" has '
            f"{'a' if 'magnitude' in kinds else 'no'} lora_magnitude_vector. It does not belong to this adapter."
        )
    return Update(
        adapter,
        module,
        kinds["a"],
        kinds["b"],
        kinds.get("magnitude"),
        scaling(config, module, a[0]),
        a[0],
        embedding,
        transposed,
    )


def _is_conv1d(module: str, config: Config, saved: Shapes, base: Shapes) -> bool:
    """Return whether a square weight is that of a Conv1D (GPT-2), which stores it transposed: by the other weights that
    are adapted, as PEFT's fan_in_fan_out is only what the last one wanted.

    Args:
        module: name of the module.
        config: adapter_config.json.
        saved: {name: shape} of the adapter's tensors.
        base: {name: shape} of the base model.

    Raises:
        Unsupported: some are and some are not, and nothing tells of this one.
    """
    found: dict[str, bool] = {}
    for other, kinds in _group_by_module(saved).items():
        if kinds.get("a", "").endswith("lora_A.weight") and "b" in kinds and f"{other}.weight" in base:
            product = (saved[kinds["b"]][0], saved[kinds["a"]][-1])
            if product[0] != product[1]:
                found[other] = base[f"{other}.weight"] == product[::-1]
    same = {yes for other, yes in found.items() if other.rpartition(".")[2] == module.rpartition(".")[2]}
    inner = {yes for other, yes in found.items() if "." in other.rpartition(".")[0]} or set(found.values())
    answers = same or inner or {bool(config.get("fan_in_fan_out"))}
    if len(answers) == 1:
        return answers.pop()
    raise Unsupported(
        f'"{module}.weight" is square, and its shape does not show whether it is of a Linear or of a Conv1D, which '
        f"keeps it transposed; other weights of this adapter are of both. {_PEFT}"
    )
