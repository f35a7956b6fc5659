"""Which tensor of a base model an adapter of PEFT changes, and how: by names, shapes and adapter_config.json.

    q_proj.lora_A, lora_B                       q_proj.weight                   linear layers, embeddings, convolutions
    experts.base_layer.lora_A, lora_B           experts.gate_up_proj            target_parameters: the module is wrapped
    experts.lora_A, lora_B                      experts.down_proj               once for each of its parameters
    embed_tokens.token_adapter.trainable_tokens_delta     rows of embed_tokens.weight
    lm_head.weight                              the whole of lm_head.weight     modules_to_save, biases

Names, shapes and numbers only; engine/merging.py computes.

The LoRA of a stack of n matrices has the rank n x r: rows e * r to (e + 1) * r of lora_A are those of matrix e, and so
is every n-th column of lora_B from e on. A names the inputs and B the outputs; since PEFT 0.19 a stack counts as
(n, out, in) unless its module has is_transposed, before that always as (n, in, out). Shapes tell which, except where
they are square.

Sources: peft/tuners/lora/layer.py (ParamWrapper, _ConvNd), peft/tuners/tuners_utils.py (_inject_parameters),
peft/tuners/trainable_tokens/layer.py, of peft 0.17 to 0.21.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import NamedTuple

from ..errors import Corrupt, Unsupported, argument
from . import Config, lora
from .hub_names import Piece
from .lora import USE_PEFT, Shapes, to_base_name

__all__ = ["Change", "NewRows", "StackPart", "Update", "match_target_parameters", "plan_changes"]

_MOST_WRAPPERS = 6  # of one module; each more multiplies the ways in which its parameters may lie in them


class StackPart(NamedTuple):
    """The LoRA of `rows` rows, from `first` on, of matrix number `matrix` of a stack: names of its tensors."""

    matrix: int
    first: int
    rows: int
    a: str
    b: str


@dataclass(frozen=True)
class Update:
    """One LoRA of one tensor: names of its tensors as PEFT saves them.

    `target`      the tensor of the base model
    `kind`        "linear", "embedding", "convolution", or "parameter" where target_parameters names it
    `transposed`  B @ A is transposed before it is added: Conv1D, every embedding, and stacks of (in, out)
    `stacked`     how many matrices it is a stack of; 1 of all but parameters of three dimensions
    `parts`       where each matrix of a stack has a LoRA of its own; then `a` and `b` are ""
    """

    adapter: str
    target: str
    a: str
    b: str
    magnitude: str | None
    scaling: float
    rank: int
    kind: str
    transposed: bool
    stacked: int = 1
    parts: tuple[StackPart, ...] = ()

    @property
    def module(self) -> str:
        """Return the name by which adapter_config.json refers to the target: that of the module, or of the parameter
        if target_parameters names it."""
        return self.target if self.kind == "parameter" else self.target.rpartition(".")[0]


class NewRows(NamedTuple):
    """Rows of an embedding that the tensor `name` of an adapter replaces."""

    adapter: str
    name: str
    indices: tuple[int, ...]


@dataclass(frozen=True)
class Change:
    """What becomes of one tensor of the base model: `start` is a tensor of an adapter (adapter, name) that replaces it,
    or None; then rows are replaced, the updates are added in order, and to a bias (adapter, name of B's bias,
    scaling)."""

    start: tuple[str, str] | None = None
    updates: tuple[Update, ...] = ()
    biases: tuple[tuple[str, str, float], ...] = ()
    rows: tuple[NewRows, ...] = ()

    @property
    def is_copy(self) -> bool:
        """Whether a complete copy of the module in the adapter (modules_to_save), which is tied to nothing, replaces
        the tensor."""
        return self.start is not None and "base_layer" not in self.start[1].split(".")

    @property
    def stacked(self) -> int:
        """Return how many matrices the tensor consists of that can each be computed separately; 1 if it is not such
        a stack."""
        return min((u.stacked for u in self.updates), default=1)


class _Adapter(NamedTuple):
    """One adapter: {name as PEFT saves it: shape}, its adapter_config.json, and its LoRA by wrapped module."""

    name: str
    saved: Shapes
    config: Config
    wrappers: dict[str, dict[str, str]]


def plan_changes(
    adapters: Mapping[str, Shapes],
    configs: Mapping[str, Config],
    base: Shapes,
    pieces: Mapping[str, Sequence[Piece]],
) -> dict[str, Change]:
    """Plan a merge of adapters into a base model, in the order of `adapters`, and return {tensor of the base model: its
    change} for the tensors that change.

    Args:
        adapters: {name of an adapter: {name as PEFT saves it: shape}}.
        configs: {name of an adapter: its adapter_config.json}.
        base: {name: shape} of the base model.
        pieces: {tensor of the base model: the modules into which it is split on the Hub}; an adapter may use their
            names.

    Raises:
        Unsupported: an adapter changes something that cannot be merged or that the base model lacks, or adapters cannot
            be merged together.
        Corrupt: shapes do not fit, or an adapter_config.json belongs to another adapter.
    """
    starts: dict[str, tuple[str, str]] = {}
    updates: dict[str, list[Update]] = {}
    biases: dict[str, list[tuple[str, str, float]]] = {}
    rows: dict[str, list[NewRows]] = {}
    on_hub = {piece.module: (parameter, piece) for parameter, several in pieces.items() for piece in several}
    for name, saved in adapters.items():
        one = _Adapter(name, saved, configs[name], lora.group_by_wrapper(saved))
        for wrapper, kinds in one.wrappers.items():  # all of them first: how one is stored, others may tell
            if not {"a", "b"} <= kinds.keys():
                raise Corrupt(
                    f'"{wrapper}": the adapter has only {", ".join(sorted(kinds.values()))}. The file is incomplete.',
                    code="CKPT0418",
                )
        parameters = match_target_parameters(one.wrappers, saved, one.config, base)
        stacks: dict[str, list[tuple[Piece, str]]] = {}
        for wrapper, kinds in one.wrappers.items():
            if wrapper in on_hub:
                stacks.setdefault(on_hub[wrapper][0], []).append((on_hub[wrapper][1], wrapper))
                continue
            update = (
                _make_parameter_update(one, wrapper, *parameters[wrapper], base)
                if wrapper in parameters
                else _make_module_update(one, wrapper, base)
            )
            updates.setdefault(update.target, []).append(update)
            if "bias" in kinds:
                bias = _require_target(f"{update.module}.bias", kinds["bias"], base)
                if saved[kinds["bias"]] != base[bias]:
                    raise Corrupt(
                        f'"{kinds["bias"]}" of the adapter is {list(saved[kinds["bias"]])}, but "{bias}" of the base '
                        f"model is {list(base[bias])}. They do not belong to one model.",
                        code="CKPT0418",
                    )
                biases.setdefault(bias, []).append((name, kinds["bias"], update.scaling))
        for parameter, parts in stacks.items():
            updates.setdefault(parameter, []).append(_make_stack_update(one, parameter, parts, base))
        lora.check_trained_tokens(one.config, saved)
        of_lora = {n for kinds in one.wrappers.values() for n in kinds.values()}
        for tensor in saved:
            if tensor in of_lora:
                continue
            if tensor.endswith(f".{lora.TOKENS}"):
                target, found = _find_trained_rows(one, tensor, base)
                rows.setdefault(target, []).append(found)
                continue
            target = _find_replaced_tensor(one, tensor, base)
            if target in starts:
                raise Unsupported(
                    f'two of the adapters replace "{target}" as a whole. Merge one of them.', code="CKPT0322"
                )
            starts[target] = (name, tensor)
    _refuse_conflicts(updates, rows)
    return {
        n: Change(starts.get(n), tuple(updates.get(n, ())), tuple(biases.get(n, ())), tuple(rows.get(n, ())))
        for n in base
        if n in starts or n in updates or n in biases or n in rows
    }


def _refuse_conflicts(updates: Mapping[str, Sequence[Update]], rows: Mapping[str, Sequence[NewRows]]) -> None:
    """Refuse adapters that change one tensor in ways that PEFT does not combine: with DoRA, or in the same rows.

    Raises:
        Unsupported: with the tensor.
    """
    for weight, several in updates.items():
        if len(several) > 1 and any(u.magnitude for u in several):
            raise Unsupported(
                f'"{weight}" has several adapters, one of them with DoRA. Merge one of them.', code="CKPT0322"
            )
    for weight, parts in rows.items():
        indices = [i for part in parts for i in set(part.indices)]
        if weight in updates or len(set(indices)) < len(indices):
            raise Unsupported(
                f'two of the adapters change the same rows of "{weight}". Merge one of them.', code="CKPT0322"
            )


def _require_target(target: str, name: str, base: Shapes) -> str:
    """Return `target`, the name of a base tensor, after checking that the base model has it.

    Args:
        target: the name.
        name: the adapter's tensor that belongs to it, for the message.
        base: {name: shape} of the base model.

    Raises:
        Unsupported: the base model does not have it.
    """
    if target in base:
        return target
    raise Unsupported(
        f'"{name}" of the adapter belongs to "{target}", which the base model does not have; its first tensor is '
        f'"{next(iter(base), None)}". Give the model that the adapter was trained on ({argument("config")} tells the '
        "names of its weights in memory).",
        code="CKPT0323",
    )


# ------------------------------------------------------------------------------------------------- tensors as a whole


def _find_replaced_tensor(one: _Adapter, name: str, base: Shapes) -> str:
    """Return the tensor of the base model that a tensor of an adapter replaces.

    Raises:
        Unsupported: the base model lacks it. Corrupt: it has another shape there.
    """
    target, shape = _require_target(to_base_name(name), name, base), one.saved[name]
    if base[target] != shape:
        raise Corrupt(
            f'"{name}" of the adapter is {list(shape)}, but "{target}" of the base model is {list(base[target])}. If '
            "the vocabulary was resized for the adapter, resize the base model first, as for "
            "PeftModel.from_pretrained.",
            code="CKPT0418",
        )
    return target


def _find_trained_rows(one: _Adapter, name: str, base: Shapes) -> tuple[str, NewRows]:
    """Return (embedding, its rows that an adapter has trained) of a tensor `name` of trained tokens.

    Raises:
        Corrupt: adapter_config.json does not say which rows, or they do not fit. Unsupported: the base model lacks it.
    """
    module = to_base_name(name.removesuffix(f".{lora.TOKENS}"))
    target = _require_target(f"{module}.weight", name, base)
    said = one.config.get("trainable_token_indices", one.config.get("token_indices"))
    if isinstance(said, dict):
        said = next((v for k, v in said.items() if module.endswith(k)), None)
    if not isinstance(said, list) or not all(type(i) is int and 0 <= i < base[target][0] for i in said):
        raise Corrupt(
            f'adapter_config.json does not say which of the {base[target][0]} rows of "{target}" are trained, but '
            f"{str(said)[:60]}. It does not belong to this adapter, or the adapter not to this base model.",
            code="CKPT0418",
        )
    if len(set(said)) < len(said):
        raise Corrupt(
            f'adapter_config.json names row {next(i for i in said if said.count(i) > 1)} of "{target}" twice among '
            "the trained ones, and the adapter cannot have two values for it. The file is damaged.",
            code="CKPT0418",
        )
    if one.saved[name] != (len(said), *base[target][1:]):
        raise Corrupt(
            f'"{name}" of the adapter is {list(one.saved[name])}, but adapter_config.json names {len(said)} rows of '
            f'"{target}", {list(base[target])}. They do not belong together.',
            code="CKPT0418",
        )
    return target, NewRows(one.name, name, tuple(said))


# --------------------------------------------------------------------------------------------------- target_parameters


def match_target_parameters(
    wrappers: Mapping[str, Mapping[str, str]], saved: Shapes, config: Config, base: Shapes
) -> dict[str, tuple[str, bool]]:
    """Match the wrapped modules of an adapter to the parameters that its target_parameters names: {wrapped module:
    (parameter, whether its matrices are stored (in, out))}.

    Files do not say which of a module's wrappers belongs to which of its parameters, so their shapes decide.

    Args:
        wrappers: what `lora.group_by_wrapper` returns.
        saved: {name: shape} of the adapter's tensors.
        config: its adapter_config.json.
        base: {name: shape} of the base model.

    Raises:
        Corrupt: the shapes or adapter_config.json do not fit. Unsupported: the shapes are ambiguous.
    """
    wanted = config.get("target_parameters") or ()
    if not isinstance(wanted, list | tuple) or not all(isinstance(n, str) for n in wanted):
        raise Corrupt("target_parameters in adapter_config.json is not a list of names.", code="CKPT0418")
    nested: dict[str, list[str]] = {}
    for wrapper in wrappers if wanted else ():
        nested.setdefault(to_base_name(wrapper), []).append(wrapper)
    named: dict[str, list[str]] = {}
    ends = frozenset(wanted)
    for n in base if wanted else ():
        parts = n.split(".")
        if any(".".join(parts[i:]) in ends for i in range(len(parts))):
            named.setdefault(n.rpartition(".")[0], []).append(n)
    out: dict[str, tuple[str, bool]] = {}
    for module, names in named.items():
        here = nested.get(module, [])
        if len(names) != len(here) or len(names) > _MOST_WRAPPERS:
            raise Corrupt(
                f'the adapter has LoRA for {len(here)} parameters of "{module}", and target_parameters names '
                f"{len(names)} there ({', '.join(n.rpartition('.')[2] for n in names)}). They do not belong together.",
                code="CKPT0418",
            )
        pairs = {w: (saved.get(wrappers[w].get("a", "")), saved.get(wrappers[w].get("b", ""))) for w in here}
        out |= _assign_parameters(
            module, {w: (a, b) for w, (a, b) in pairs.items() if a and b}, names, base, _is_before_peft_0_19(config)
        )
    return out


def _is_before_peft_0_19(config: Config) -> bool:
    """Whether a version of PEFT before 0.19 wrote an adapter_config.json; true if it names no version."""
    said = re.match(r"0\.(\d+)\.", str(config.get("peft_version") or "0.17."))
    return said is not None and int(said[1]) < 19


def _assign_parameters(
    module: str,
    pairs: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]],
    names: Sequence[str],
    base: Shapes,
    old: bool,
) -> dict[str, tuple[str, bool]]:
    """Assign the parameters of one module to its wrappers: {wrapper: (parameter, whether its stack is (in, out))}.

    Args:
        module: its name.
        pairs: {wrapper: (shape of lora_A, of lora_B)}.
        names: of the parameters.
        base: {name: shape} of the base model.
        old: whether PEFT took every stack for (in, out).

    Raises:
        Corrupt: they do not fit. Unsupported: they fit in several ways.
    """
    orders = [
        order
        for order in permutations(names, len(pairs))
        if all(_find_orientations(*pair, base[n]) for pair, n in zip(pairs.values(), order, strict=True))
    ]
    shown = "; ".join([f"{n.rpartition('.')[2]} {list(base[n])}" for n in names])
    if not orders:
        raise Corrupt(
            f'"{module}": lora_A and lora_B {", ".join(f"{list(a)} {list(b)}" for a, b in pairs.values())} do not fit '
            f"the parameters of the base model, {shown}. They do not belong to one model.",
            code="CKPT0418",
        )
    if len(orders) > 1:
        raise Unsupported(
            f'"{module}": the parameters {shown} have the same shape, and the file does not say which LoRA is whose. '
            f"{USE_PEFT}",
            code="CKPT0322",
        )
    ways = {w: _find_orientations(*pair, base[n]) for (w, pair), n in zip(pairs.items(), orders[0], strict=True)}
    sure = {way for found in ways.values() if len(found) == 1 for way in found}
    out = {}
    for (wrapper, found), name in zip(ways.items(), orders[0], strict=True):
        left = found if len(found) == 1 else {True} if old else sure
        if len(left) != 1:
            raise Unsupported(
                f'"{name}" is a stack of square matrices {list(base[name])}, and neither their shape nor another '
                f"parameter of the adapter shows whether they are stored transposed. {USE_PEFT}",
                code="CKPT0322",
            )
        out[wrapper] = name, left.copy().pop()
    return out


def _find_orientations(a: tuple[int, ...], b: tuple[int, ...], shape: tuple[int, ...]) -> set[bool]:
    """Return the orientations of a parameter that shapes of lora_A and lora_B fit: False for (out, in), or a stack of
    such matrices, True for a stack of (in, out).

    Both are returned for a stack of square matrices, and an empty set if neither fits.

    Args:
        a, b: shapes of lora_A and lora_B.
        shape: shape of the parameter.
    """
    if len(shape) not in (2, 3) or len(a) != 2 or len(b) != 2 or a[0] != b[1]:
        return set()
    stacked, product = shape[0] if len(shape) == 3 else 1, (b[0], a[1])
    if not stacked or a[0] % stacked:
        return set()
    return {
        transposed
        for transposed in (False, True)
        if shape[-2:] == (product[::-1] if transposed else product) and not (transposed and len(shape) == 2)
    }


def _make_parameter_update(one: _Adapter, wrapper: str, name: str, transposed: bool, base: Shapes) -> Update:
    """Make the update of a parameter that target_parameters names.

    Args:
        one: the adapter.
        wrapper: the wrapped module.
        name: name of the parameter.
        transposed: whether its matrices are stored (in, out).
        base: {name: shape} of the base model.

    Raises:
        Corrupt: adapter_config.json has another rank, or contradicts the tensors about DoRA.
        Unsupported: it has a DoRA magnitude.
    """
    kinds, stacked = one.wrappers[wrapper], base[name][0] if len(base[name]) == 3 else 1
    _check_dora(one, name, kinds)
    if "magnitude" in kinds:
        raise Unsupported(
            f'"{kinds["magnitude"]}" is DoRA of a parameter that target_parameters names, and PEFT has none there.',
            code="CKPT0322",
        )
    rank = one.saved[kinds["a"]][0] // stacked
    factor = lora.compute_scaling(one.config, name, rank)
    return Update(one.name, name, kinds["a"], kinds["b"], None, factor, rank, "parameter", transposed, stacked)


def _make_stack_update(one: _Adapter, parameter: str, parts: Sequence[tuple[Piece, str]], base: Shapes) -> Update:
    """Make the update of a stack of matrices that each have a LoRA of their own, or several for parts of them.

    Args:
        one: the adapter.
        parameter: name of the stack.
        parts: (place in the stack, wrapped module) of each LoRA.
        base: {name: shape} of the base model.

    Raises:
        Unsupported: ranks or factors differ, or a LoRA has a bias or a magnitude. Corrupt: shapes do not fit.
    """
    out, factors = [], set()
    stacked = base[parameter][0] if len(base[parameter]) == 3 else 1
    for piece, wrapper in parts:
        kinds = one.wrappers[wrapper]
        a, b = one.saved[kinds["a"]], one.saved[kinds["b"]]
        if a[1:] != base[parameter][-1:] or b != (piece.rows, a[0]):
            raise Corrupt(
                f'"{wrapper}": lora_A {list(a)} and lora_B {list(b)} do not fit {piece.rows} rows of "{parameter}", '
                f"{list(base[parameter])}. They do not belong to one model.",
                code="CKPT0418",
            )
        if kinds.keys() != {"a", "b"}:
            raise Unsupported(
                f'"{wrapper}" has a bias or a magnitude, and is a part of "{parameter}". {USE_PEFT}', code="CKPT0322"
            )
        factors.add((lora.compute_scaling(one.config, wrapper, a[0]), a[0]))
        out.append(StackPart(piece.matrix, piece.first, piece.rows, kinds["a"], kinds["b"]))
    if len(factors) > 1:
        raise Unsupported(
            f'parts of "{parameter}" have adapters of different ranks or factors. {USE_PEFT}', code="CKPT0322"
        )
    [(factor, rank)] = factors
    return Update(one.name, parameter, "", "", None, factor, rank, "parameter", False, stacked, tuple(out))


# ------------------------------------------------------------------------------------------------------------- modules


def _make_module_update(one: _Adapter, wrapper: str, base: Shapes) -> Update:
    """Make the update of a module's weight, after comparing all shapes.

    Args:
        one: the adapter.
        wrapper: the wrapped module.
        base: {name: shape} of the base model.

    Raises:
        Corrupt: shapes or adapter_config.json do not fit.
        Unsupported: it is not a linear layer, an embedding or a convolution without groups, or the base model lacks it.
    """
    kinds, module = one.wrappers[wrapper], to_base_name(wrapper)
    if f"{module}.in_proj_weight" in base:
        raise Unsupported(
            f'"{kinds["a"]}" is of a MultiheadAttention, which ckpttool does not merge. {USE_PEFT}', code="CKPT0322"
        )
    if f"{module}.weight" not in base and (wanted := one.config.get("target_parameters")):
        held = [n for n in base if n.startswith(f"{module}.")] or [*base]
        raise Unsupported(
            f'"{kinds["a"]}" is of a parameter of "{module}" (target_parameters: {", ".join(map(str, wanted))[:80]}), '
            f"and the base model has none of them there, but {', '.join(held[:2])}. Give the model that the adapter is "
            f"of: codes are first dequantised ({argument('dequantize')} of convert); experts that the Hub has "
            f"one by one are stacked where {argument('config')} tells the model, and transformers is installed.",
            code="CKPT0323",
        )
    a, b = one.saved[kinds["a"]], one.saved[kinds["b"]]
    name = _require_target(f"{module}.weight", kinds["a"], base)
    target, embedding = base[name], kinds["a"].endswith("lora_embedding_A")
    if not 2 <= len(target) <= 5 or (embedding and len(target) > 2) or not len(a) == len(b) == len(target):
        raise Unsupported(
            f'"{kinds["a"]}" is {list(a)}, and "{name}" {list(target)}: ckpttool merges adapters of linear layers and '
            f"embeddings, whose matrices have two dimensions, and of convolutions, whose kernels have as many as the "
            f"weight. {USE_PEFT}",
            code="CKPT0322",
        )
    kind = "embedding" if embedding else "linear" if len(target) == 2 else "convolution"
    if kind == "convolution" and b[1] < a[0] and a[0] * target[1] == b[1] * a[1]:
        raise Unsupported(
            f'"{name}" {list(target)} is a convolution of groups, and its lora_A {list(a)} mixes the channels of all: '
            "no weight of that shape is the sum, and PEFT merges none either.",
            code="CKPT0322",
        )
    if a[0] != b[1]:
        raise Corrupt(
            f'"{module}": lora_A {list(a)} and lora_B {list(b)} cannot be multiplied. They do not belong to one '
            "adapter.",
            code="CKPT0418",
        )
    # B @ A must have the shape of the weight, or its transposed one
    product, transposed = (b[0], *a[1:]), embedding
    if kind == "linear":
        transposed = _is_conv1d_weight(one, module, base) if product[0] == product[1] else target == product[::-1]
    if target != (product[::-1] if transposed else product) or set(b[2:]) > {1}:
        raise Corrupt(
            f'"{module}": lora_B @ lora_A is {list(product)}, but the weight of the base model is {list(target)}. They '
            "do not belong to one model.",
            code="CKPT0418",
        )
    _check_dora(one, module, kinds)
    factor = lora.compute_scaling(one.config, module, a[0])
    return Update(one.name, name, kinds["a"], kinds["b"], kinds.get("magnitude"), factor, a[0], kind, transposed)


def _check_dora(one: _Adapter, module: str, kinds: Mapping[str, str]) -> None:
    """Check that a module has a DoRA magnitude exactly if adapter_config.json says so, and that the magnitude has one
    number for each output. `kinds` is {"a", "b", ...: name of the tensor} of the module.

    Raises:
        Corrupt: the two contradict each other, or the magnitude has another shape.
    """
    if bool(one.config.get("use_dora")) != ("magnitude" in kinds):
        raise Corrupt(
            f'adapter_config.json has use_dora={bool(one.config.get("use_dora"))}, but "{module}" has '
            f"{'a' if 'magnitude' in kinds else 'no'} lora_magnitude_vector. It does not belong to this adapter.",
            code="CKPT0418",
        )
    if "magnitude" not in kinds:
        return
    found, (outputs, _, *kernel) = one.saved[kinds["magnitude"]], one.saved[kinds["b"]]
    wanted = (1, outputs, *kernel) if kernel else (outputs,)  # the kernel of a lora_B has the size 1
    if found != wanted:
        raise Corrupt(
            f'"{kinds["magnitude"]}" of the adapter is {list(found)}, but lora_B has {outputs} rows, so it should be '
            f"{list(wanted)}. They do not belong to one adapter.",
            code="CKPT0418",
        )


def _is_conv1d_weight(one: _Adapter, module: str, base: Shapes) -> bool:
    """Whether a square weight belongs to a Conv1D (GPT-2), which stores it transposed. The adapter's weights that are
    not square decide; if there are none, fan_in_fan_out does, which PEFT sets for the last module that it wraps.

    Raises:
        Unsupported: some of these weights are transposed and some are not.
    """
    found: dict[str, bool] = {}
    for other, kinds in one.wrappers.items():
        a, b = one.saved[kinds["a"]], one.saved[kinds["b"]]
        if kinds["a"].endswith("lora_A.weight") and len(base.get(f"{other}.weight", ())) == len(a) == len(b) == 2:
            product = (b[0], a[1])
            if product[0] != product[1]:
                found[other] = base[f"{other}.weight"] == product[::-1]
    same = {yes for other, yes in found.items() if other.rpartition(".")[2] == module.rpartition(".")[2]}
    inner = {yes for other, yes in found.items() if "." in other.rpartition(".")[0]} or set(found.values())
    answers = same or inner or {bool(one.config.get("fan_in_fan_out"))}
    if len(answers) == 1:
        return answers.pop()
    raise Unsupported(
        f'"{module}.weight" is square, and its shape does not show whether it is of a Linear or of a Conv1D, which '
        f"keeps it transposed; other weights of this adapter are of both. {USE_PEFT}",
        code="CKPT0322",
    )
