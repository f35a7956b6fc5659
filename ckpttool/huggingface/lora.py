"""LoRA by its adapter_config.json and the names that PEFT saves: ranks, and the factor alpha / r.

Names, shapes and numbers only. What an adapter_config.json asks for and this module does not know is refused by its
name, since a merge without it would give other weights. Which weight an adapter changes, lora_changes.py says.

Sources: peft/tuners/lora/{config,model,layer}.py, peft/utils/other.py (get_pattern_key), of peft 0.21.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ..errors import Corrupt, Unsupported, argument
from ..index.checkpoint import Checkpoint, joined
from ..printable import count_noun
from . import Config
from .file_patterns import NOT_A_PATTERN, may_take_forever

__all__ = [
    "KNOWN",
    "REFUSED",
    "ROOT",
    "TOKENS",
    "USE_PEFT",
    "AdapterShape",
    "Shapes",
    "check_target_modules",
    "check_trained_tokens",
    "compute_scaling",
    "encode_adapter_config",
    "find_lora",
    "find_lora_in_shapes",
    "group_by_wrapper",
    "look_up_pattern",
    "make_adapter_config",
    "refuse_unmergeable",
    "to_base_name",
]

ROOT = "base_model.model."
#: The parameter with the trained rows of an embedding, behind the module's name.
TOKENS = "trainable_tokens_delta"
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
        "target_parameters",
        "trainable_token_indices",
        *REFUSED,
    }
)
#: Names of the LoRA of a stack, or of parameters of one module; nothing shows that of another parameter.
_OF_STACK = re.compile(r"\.(base_layer|experts)\.lora_")
#: Fields of a TRAINABLE_TOKENS adapter, which has no LoRA.
_OF_TOKENS = frozenset(("token_indices", "init_weights"))
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
        """Return a text for people: the ranks, the number of modules, and the adapters' names if there are several:
        "r=8, 224 modules"."""
        ranks = ", ".join(str(r) for r in sorted(self.ranks))
        called = [n for n in self.names if n]
        of = f", adapters {', '.join(called)}" if len(called) > 1 else ""
        return f"r={ranks}, {count_noun(self.modules, 'module')}{of}"


def find_lora(ckpt: Checkpoint) -> AdapterShape | None:
    """Describe the LoRA adapters among the weights of a checkpoint (ranks, modules, names); None if there are none."""
    return find_lora_in_shapes({joined(t.path[1:]): t.shape for t in ckpt.tensors.values() if t.path[0] == "model"})


def find_lora_in_shapes(shapes: Shapes) -> AdapterShape | None:
    """Find the LoRA among the weights of a model, {name: shape}, by their names; None where there is none."""
    ranks: Counter[int] = Counter()
    modules: set[str] = set()
    names: set[str] = set()
    others: list[str] = []
    stacked = {to_base_name(n).rpartition(".")[0]: s[0] for n, s in shapes.items() if len(s) == 3}  # of experts
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
            ranks[shape[0] // (stacked.get(to_base_name(".".join(parts[:at]))) or 1)] += 1
    if not modules or not ranks:
        return None
    trained = (".modules_to_save.", f".{TOKENS}")
    others = [n for n in others if not any(t in n for t in trained)]
    base = [n for n in others if ".base_layer." in n or f".{ROOT}" not in f".{n}"]
    saved = {"": True}.keys() == names  # what stands beside the matrices of a saved adapter was trained with it
    alone = not base and (saved or not others)
    return AdapterShape(dict(ranks), len(modules), tuple(sorted(names)), alone)


# ----------------------------------------------------------------------------------------------------
# adapter_config.json


def make_adapter_config(saved: Shapes, *, lora_alpha: float, rslora: bool, base_model: str | None) -> dict[str, Any]:
    """Make the adapter_config.json of a LoRA adapter that has none.

    What the arguments do not say has PEFT's default: no dropout, no bias of the base model trained.

    Args:
        saved: {name: shape} of the adapter's tensors, as PEFT saves them.
        lora_alpha: the adapter's alpha, by which it is scaled.
        rslora: whether the scale is alpha / sqrt(r) instead of alpha / r.
        base_model: name of the base model; None if it is not known.

    Raises:
        Unsupported: the adapter has no lora_A, a tensor of an unknown kind, or one that only adapter_config.json
            explains.
        Corrupt: a lora_A has no rows.
    """
    modules = group_by_wrapper(saved)
    if shown := next((n for n in saved if TOKENS in n.split(".") or _OF_STACK.search(n)), None):
        raise Unsupported(
            f'"{shown}": which tokens were trained (trainable_token_indices), or which parameters (target_parameters) '
            f"and with which rank, is in adapter_config.json alone. Give it with {argument('adapter_config')}.",
            code="CKPT0312",
        )
    rank_of = {m: next(iter(saved[kinds["a"]]), 0) for m, kinds in modules.items() if "a" in kinds}
    if not rank_of:
        raise Unsupported(
            "the adapter has no lora_A, so its rank is not known. Save it with PEFT's save_pretrained.", code="CKPT0322"
        )
    for module, rank in rank_of.items():
        _check_rank(module, rank)
    usual = Counter(rank_of.values()).most_common(1)[0][0]
    of_adapter = {n for kinds in modules.values() for n in kinds.values()}
    whole = sorted({to_base_name(n).rpartition(".")[0] for n in saved if n not in of_adapter})
    return {
        "base_model_name_or_path": base_model,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": int(lora_alpha) if float(lora_alpha).is_integer() else lora_alpha,
        # peft before 0.14 has no such field, and stops at one that it does not know
        **({"lora_bias": True} if any("bias" in kinds for kinds in modules.values()) else {}),
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


def encode_adapter_config(config: Config) -> bytes:
    """Encode adapter_config.json as JSON, formatted as PEFT writes it."""
    return json.dumps(config, indent=2, sort_keys=True).encode()


def refuse_unmergeable(config: Config, *, base_is_given: bool) -> None:
    """Refuse an adapter that cannot be merged exactly; the message names the reason.

    Args:
        config: its adapter_config.json.
        base_is_given: the base model is another checkpoint, and not the weights that the job saved with the adapter.

    Raises:
        Unsupported: the adapter cannot be merged.
    """
    kind = config.get("peft_type")
    if kind not in ("LORA", "TRAINABLE_TOKENS"):
        raise Unsupported(
            f"adapter_config.json describes a {str(kind)[:40]!r} adapter; ckpttool merges only LORA and "
            f"TRAINABLE_TOKENS. {USE_PEFT}",
            code="CKPT0322",
        )
    known = KNOWN | _OF_TOKENS if kind == "TRAINABLE_TOKENS" else KNOWN
    for name, why in REFUSED.items():
        if config.get(name):
            raise Unsupported(f"the adapter has {name} in adapter_config.json: {why}. {USE_PEFT}", code="CKPT0322")
    if unknown := sorted(str(k) for k, v in config.items() if k not in known and v):
        raise Unsupported(
            f"adapter_config.json sets {unknown[0][:60]!r}, which ckpttool does not know; it may change what the "
            f"merged weights are. {USE_PEFT}",
            code="CKPT0322",
        )
    start = config.get("init_lora_weights")
    if base_is_given and isinstance(start, str) and _CHANGES_BASE.fullmatch(start):
        raise Unsupported(
            f"the adapter began with init_lora_weights={start[:40]!r}, which takes a part of the base weights away, so "
            "it does not fit the base model as published. Merge the state of the job, which holds the weights that are "
            "left, or save the adapter with path_initial_model_for_weight_conversion.",
            code="CKPT0322",
        )


USE_PEFT = "Merge it with PEFT's merge_and_unload."


def check_trained_tokens(config: Config, saved: Iterable[str]) -> None:
    """Check that an adapter whose config lists trained tokens has a tensor for them. `saved` are the names of its
    tensors, as PEFT saves them.

    Raises:
        Corrupt: there is no such tensor.
    """
    if config.get("trainable_token_indices") and not any(n.endswith(f".{TOKENS}") for n in saved):
        raise Corrupt(
            "adapter_config.json has trainable_token_indices, and no tensor of the adapter is of trained tokens. The "
            "file is incomplete, or the config is another adapter's.",
            code="CKPT0418",
        )


def check_target_modules(config: Config, saved: Iterable[str]) -> None:
    """Check that the config of an adapter lists at least one of its modules, which is not so after a name map has
    renamed them. `saved` are the names of its tensors, as PEFT saves them. A config with a pattern, or with
    target_parameters, is not checked.

    Raises:
        Unsupported: the config lists none of the modules.
    """
    targets = config.get("target_modules")
    modules = sorted({to_base_name(n.partition(".lora_")[0]) for n in saved if ".lora_" in n})
    if not isinstance(targets, list) or config.get("target_parameters") or not modules:
        return
    if not any(f".{m}".endswith(tuple(f".{t}" for t in targets)) for m in modules):
        raise Unsupported(
            f"adapter_config.json has the target_modules {str(sorted(map(str, targets)))[:200]}, and no module of the "
            f'adapter is among them, such as "{modules[0]}": PEFT would load nothing. If a map renamed them, '
            f"leave that file out and give {argument('lora_alpha', None, 'HfOptions')}.",
            code="CKPT0322",
        )


def compute_scaling(config: Config, module: str, rank: int) -> float:
    """Return the factor of a module's product B @ A: alpha / r, or alpha / sqrt(r) with use_rslora.

    Args:
        config: adapter_config.json.
        module: name of the module.
        rank: that of its matrices.

    Raises:
        Corrupt: the matrices are empty, the file has another rank than they, or no alpha, or a damaged pattern.
        Unsupported: a pattern could take forever.
    """
    _check_rank(module, rank)
    r = look_up_pattern(config, "rank_pattern", module, config.get("r"))
    alpha = look_up_pattern(config, "alpha_pattern", module, config.get("lora_alpha"))
    if type(alpha) not in (int, float) or not abs(alpha) <= sys.float_info.max:
        raise Corrupt(
            f"adapter_config.json has no number as lora_alpha, but {str(alpha)[:40]!r}. It does not belong to this "
            "adapter, or is damaged.",
            code="CKPT0418",
        )
    if r != rank:
        raise Corrupt(
            f'adapter_config.json gives "{module}" the rank {str(r)[:40]}, but its lora_A has {rank} rows. It does not '
            "belong to this adapter.",
            code="CKPT0418",
        )
    return float(alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank)


def _check_rank(module: str, rank: int) -> None:
    """Check that the lora_A of a module has rows.

    Raises:
        Corrupt: it has none.
    """
    if rank < 1:
        raise Corrupt(
            f'the lora_A of "{module}" has no rows, and no adapter has rank 0. The file is damaged.', code="CKPT0418"
        )


def look_up_pattern(config: Config, field: str, module: str, usual: object) -> Any:
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
        raise Corrupt(f"{field} in adapter_config.json is not an object.", code="CKPT0418")
    for pattern, value in patterns.items():
        if _pattern_matches(field, pattern, module):
            return value
    return patterns.get(module, usual)


def _pattern_matches(field: str, pattern: str, module: str) -> bool:
    """Whether a pattern in a field of adapter_config.json matches a module name, by PEFT's rules.

    Raises:
        Corrupt: it is not a regular expression. Unsupported: it could take forever.
    """
    if re.fullmatch(r"[\w.-]*", pattern):  # a name, whose dots match any character
        return re.search(rf"(?:^|\.)(?:{pattern})$", module) is not None
    if may_take_forever(pattern, module):
        raise Unsupported(
            f"the pattern {pattern[:60]!r} in {field} could take forever to compare with a name, and it comes from a "
            f"file. {USE_PEFT}",
            code="CKPT0322",
        )
    try:
        return re.match(rf"(.*\.)?({pattern})$", module) is not None
    except NOT_A_PATTERN as e:
        raise Corrupt(
            f"{field} in adapter_config.json has {pattern[:60]!r}, which is not a pattern: {e}.", code="CKPT0418"
        ) from None


# --------------------------------------------------------------------------------------------------------------- names


def group_by_wrapper(saved: Iterable[str]) -> dict[str, dict[str, str]]:
    """Group the LoRA tensors of an adapter by wrapped module: {module: {"a", "b", "bias" or "magnitude": name of the
    tensor}}.

    A module of which two parameters are adapted is wrapped twice: "experts" and "experts.base_layer". `saved` are the
    names of the adapter's tensors; names without LoRA are ignored.

    Raises:
        Unsupported: a LoRA tensor is of a kind that is not known.
    """
    out: dict[str, dict[str, str]] = {}
    for name in saved:
        parts = name.split(".")
        at = next((i for i, p in enumerate(parts) if p.startswith("lora_")), None)
        if at is None:
            continue
        kind = _KINDS.get(".".join(parts[at:]))
        if kind is None:
            raise Unsupported(f'"{name}" is not a tensor of LoRA that ckpttool knows. {USE_PEFT}', code="CKPT0322")
        out.setdefault(".".join(parts[:at]).removeprefix(ROOT), {})[kind] = name
    return out


def to_base_name(name: str) -> str:
    """Return the name of a parameter or module in the base model, from its name in the model that PEFT has wrapped."""
    return ".".join(p for p in name.removeprefix(ROOT).split(".") if p not in ("base_layer", "token_adapter"))
