"""The adapter in a model that PEFT wrapped, under the names it has in adapter_model.safetensors.

    base_model.model.layers.0.q_proj.lora_A.default.weight      -> base_model.model.layers.0.q_proj.lora_A.weight
    base_model.model.layers.0.q_proj.lora_embedding_A.default   -> base_model.model.layers.0.q_proj.lora_embedding_A
    base_model.model.lm_head.modules_to_save.default.weight     -> base_model.model.lm_head.weight

Names only; no bytes. "default" is the adapter's name, which PEFT removes when saving and adds when loading. A
checkpoint of `get_peft_model_state_dict` has the names on the right already, and they stay. What belongs to the adapter
besides its own tensors, adapter_config.json says: modules_to_save, bias, targeted embeddings.

Sources: peft/utils/save_and_load.py (get_peft_model_state_dict), peft/tuners/tuners_utils.py
(_get_adapter_state_dict, _remove_adapter_name_from_state_dict_key), peft/tuners/lora/model.py, of peft 0.21.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ..errors import Unsupported, UsageError, argument
from ..index.checkpoint import Checkpoint, joined
from . import Config, lora

__all__ = [
    "adapter_as_model",
    "find_base_names",
    "find_outer_prefix",
    "keep_adapter_only",
    "refuse_without_adapter",
    "rename_adapter_tensor",
]

#: What the tensors of a method are called, by peft_type: what all begin with, and the ends that are known.
_METHODS = {
    "LORA": ("lora_", r"A|B|embedding_[AB]|magnitude_vector"),
    "LOHA": ("hada_", r"w[12]_[ab]|t[12]"),
    "LOKR": ("lokr_", r"w[12](_[ab])?|t2"),
    "IA3": ("ia3_", r"l"),
    "HRA": ("hra_", r"u"),
    "TRAINABLE_TOKENS": ("trainable_tokens_", r"delta"),
}
_MODULES = ("lora_A", "lora_B")  # a module for each adapter; the others have a parameter for each
_EMBEDDINGS = ("embed_tokens", "lm_head")
#: Ends of the names of output layers, which models tie to their embedding.
_HEADS = ("lm_head", "embed_out", "output", "output_projection", "decoder", "proj_out")
_TOKENS = f".token_adapter.{lora.TOKENS}"
#: A parameter or buffer of the base model inside a layer of PEFT.
_WRAPPED = re.compile(r"\.base_layer\.(?!lora_|bias$)[^.]+$")


def keep_adapter_only(ckpt: Checkpoint, config: Config, wanted: str | None = None) -> Checkpoint:
    """Return a copy of the checkpoint that holds one adapter only, under the names with which PEFT saves it.

    Args:
        ckpt: the checkpoint.
        config: adapter_config.json, which says what belongs to the adapter.
        wanted: the name of the adapter; None for "default", or for the only adapter.

    Raises:
        Unsupported: there is no adapter, several of which none is called default, or one with names that are not known.
        UsageError: there is no adapter of the wanted name.
    """
    kind = config.get("peft_type")
    if not isinstance(kind, str) or kind not in _METHODS:
        raise Unsupported(
            f"adapter_config.json describes a {str(kind)[:40]!r} adapter; ckpttool knows only {', '.join(_METHODS)}. "
            "Save it with PEFT's save_pretrained.",
            code="CKPT0322",
        )
    prefix, ends = _METHODS[kind]
    known = re.compile(f"{prefix}({ends})")
    # which adapter, and which tensors are saved with it
    ckpt = adapter_as_model(ckpt)
    names = [joined(t.path[1:]) for t in ckpt.tensors.values() if t.path[0] == "model"]
    adapter = _choose_adapter(names, prefix, known, wanted)
    wrapped = any(_WRAPPED.search(n) and not _is_adapted_embedding(n) for n in names)
    if adapter is None and not wrapped:  # what get_peft_model_state_dict gave: nothing but the adapter, as it is saved
        saved = {n: n for n in names}
    else:
        saved = {n: s for n in names if (s := _make_saved_name(n, prefix, adapter)) is not None}
        saved |= {n: n for n in _list_saved_base_tensors(names, saved, config, prefix)}
        saved = _without_tied_tokens(saved, config, ckpt)
    for name in saved:
        own = _split_adapter_name(name, prefix)
        if own is not None and not known.fullmatch(own[0][-1]):
            raise Unsupported(
                f'"{name}" fits no {kind} adapter that ckpttool knows. Save it with PEFT.', code="CKPT0322"
            )
    lora.check_trained_tokens(config, saved.values())
    lora.check_target_modules(config, saved.values())
    # the names of the file
    if not any(s.startswith(lora.ROOT) for s in saved.values()):  # injected, not wrapped; the file is the same
        saved = {n: lora.ROOT + s for n, s in saved.items()}
    if len(set(saved.values())) != len(saved):
        raise Unsupported(
            "two tensors of the adapter would get the same name in adapter_model.safetensors. Save it with PEFT's "
            "save_pretrained.",
            code="CKPT0322",
        )
    renamed = {f"model.{n}": f"model.{s}" for n, s in saved.items()}
    called = f' "{adapter}"' if adapter else ""
    left = len(ckpt.tensors) + len(ckpt.values) - len(renamed)
    note = f"the adapter{called} alone: {len(renamed)} tensors" + (f"; {left:,} others are left behind" if left else "")
    others = {p[2] for n in names if (p := _split_adapter_name(n, prefix)) is not None and p[2] not in (None, adapter)}
    if others:
        note += f", the adapters {', '.join(sorted(map(str, others)))} among them"
    return replace(
        ckpt,
        tensors={s: replace(ckpt.tensors[n], path=("model", s.removeprefix("model."))) for n, s in renamed.items()},
        values={},
        recorded={renamed[n]: d for n, d in ckpt.recorded.items() if n in renamed},
        notes=[*ckpt.notes, note],
    )


def refuse_without_adapter(ckpt: Checkpoint) -> None:
    """Raise if no tensor has the name of one of an adapter, of any method.

    Raises:
        Unsupported: there is none.
    """
    model = [t for t in adapter_as_model(ckpt).tensors.values() if t.path[0] == "model"]
    parts = {part for t in model for part in joined(t.path[1:]).split(".")}
    if not any(part.startswith(prefix) for part in parts for prefix, _ in _METHODS.values()):
        raise _make_no_adapter_error("lora_")


def _make_no_adapter_error(prefix: str) -> Unsupported:
    """Make the error for a checkpoint without an adapter, whose tensors would have names that begin with `prefix`."""
    return Unsupported(
        f"the checkpoint has no adapter: no tensor has {prefix}* in its name. If it was merged into the weights, those "
        "are what to publish: ckpttool convert SRC DST --to hf.",
        code="CKPT0321",
    )


def find_outer_prefix(names: Iterable[str]) -> str:
    """Return the part of the names in front of PEFT's own prefix, such as "net." for a Lightning module that keeps
    the wrapped model in self.net; "" if there is none, or not the same everywhere."""
    found = {
        n[: n.index(lora.ROOT)] for n in names if ".lora_" in n and (n.startswith(lora.ROOT) or f".{lora.ROOT}" in n)
    }
    return found.pop() if len(found) == 1 else ""


def adapter_as_model(ckpt: Checkpoint) -> Checkpoint:
    """Return the checkpoint with the adapter as its model; unchanged if the adapter is not stored apart from the model.

    torchtune stores the adapter in addition to the weights into which it has merged it; the adapter then replaces these
    weights. A prefix of the trainer's module in front of PEFT's names is removed, with a note.

    Raises:
        Unsupported: two tensors would have the same name without that prefix.
    """
    if prefix := find_outer_prefix(joined(t.path[1:]) for t in ckpt.tensors.values() if t.path[0] == "model"):
        head = f"model.{prefix}"
        there = {n: f"model.{n.removeprefix(head)}" if n.startswith(head) else n for n in ckpt.tensors}
        tensors = {
            m: ckpt.tensors[n] if m == n else replace(ckpt.tensors[n], path=("model", m[6:])) for n, m in there.items()
        }
        if len(tensors) < len(there):
            raise Unsupported(
                f'Without "{prefix}" before them, two tensors would have the same name. Save the adapter with PEFT.',
                code="CKPT0322",
            )
        recorded = {there[n]: d for n, d in ckpt.recorded.items() if n in there}
        return replace(
            ckpt,
            tensors=tensors,
            recorded=recorded,
            notes=[*ckpt.notes, f'left out "{prefix}", which stands before PEFT\'s names'],
        )
    beside = {n: t for n, t in ckpt.tensors.items() if t.path[:2] == ("extra", "adapter")}
    if not beside or any("lora_" in n for n, t in ckpt.tensors.items() if t.path[0] == "model"):
        return ckpt
    rest = {n: t for n, t in ckpt.tensors.items() if n not in beside and t.path[0] != "model"}
    moved = {joined(("model", *t.path[2:])): replace(t, path=("model", joined(t.path[2:]))) for t in beside.values()}
    recorded = {joined(("model", *t.path[2:])): ckpt.recorded[n] for n, t in beside.items() if n in ckpt.recorded}
    return replace(ckpt, tensors={**moved, **rest}, recorded=recorded)


def find_base_names(names: Mapping[str, str]) -> dict[str, str]:
    """Return {name in the base model: name in the checkpoint} of the weights that belong to the base model and not to
    an adapter.

    Args:
        names: {FQN: name in the checkpoint} of a model that PEFT wrapped.

    Raises:
        Unsupported: a module has an adapter, and a weight that is not stored as its base_layer, so the adapter may be
            merged into it already.
    """
    out: dict[str, str] = {}
    prefix = find_outer_prefix(names)
    names = {n.removeprefix(prefix): stored for n, stored in names.items()}
    adapted = {n.removeprefix(lora.ROOT).partition(".lora_")[0] for n in names if ".lora_" in n}
    for module in adapted:
        if f"{module}.weight" in names or f"{lora.ROOT}{module}.weight" in names:
            raise Unsupported(
                f'"{module}.weight" is stored next to the adapter of that module, not as its base_layer: the adapter '
                "may be merged into it already. Give base model and adapter: ckpttool adapter merge BASE ADAPTER DST.",
                code="CKPT0321",
            )
    for name, stored in names.items():
        parts = name.removeprefix(lora.ROOT).split(".")
        if "modules_to_save" not in parts and not any(p.startswith(("lora_", "trainable_tokens_")) for p in parts):
            out[".".join(p for p in parts if p not in ("base_layer", "original_module", "token_adapter"))] = stored
    return out


def rename_adapter_tensor(name: str, moved: Mapping[str, str]) -> str:
    """Return the name of an adapter's tensor, as PEFT saves it, for a base model whose modules have other names.
    `moved` is {module: its new name}; other modules keep their names."""
    front = name.removesuffix(f".{lora.TOKENS}").partition(".lora_")[0]
    module = lora.to_base_name(front if front != name else name.rpartition(".")[0])
    return name.replace(module, moved.get(module, module), 1)


def _choose_adapter(names: Iterable[str], prefix: str, known: re.Pattern[str], wanted: str | None) -> str | None:
    """Choose one of the adapters and return its name; None if the names of its tensors do not contain it.

    Args:
        names: the names of all weights.
        prefix: the beginning of the names of the method's tensors, such as "lora_".
        known: matches such a name completely, such as "lora_A".
        wanted: the adapter's name that the user gave; None for the only adapter, or "default".

    Raises:
        Unsupported: there is no adapter, or it is not clear which one. UsageError: none has the wanted name.
    """
    parts = [_split_adapter_name(n, prefix) for n in names]
    found = {p[2] for p in parts if p is not None and known.fullmatch(p[0][-1])}
    if not found:
        raise _make_no_adapter_error(prefix)
    named = sorted(n for n in found if n is not None)
    if wanted is not None and wanted not in named:
        there = (
            f"its adapters are {', '.join(named[:8])}"
            if named
            else "the tensors of its only adapter do not have its name"
        )
        raise UsageError(
            f"{argument('adapter_name', wanted)}: the checkpoint has no such adapter; {there}.", code="CKPT0207"
        )
    if wanted is not None:
        return wanted
    if len(named) < 2 or "default" in named:
        return "default" if "default" in named else next(iter(named), None)
    raise Unsupported(
        f'the checkpoint holds {len(named)} adapters ({", ".join(named[:8])}), and none of them is called "default". '
        f"Name the one you mean: {argument('adapter_name', named[0])}.",
        code="CKPT0321",
    )


def _split_adapter_name(name: str, prefix: str) -> tuple[list[str], list[str], str | None] | None:
    """Split the name of an adapter's tensor at its dots; return None for the name of another tensor.

    With the prefix "lora_", "layers.0.q.lora_A.default.weight" becomes (["layers", "0", "q", "lora_A"], ["weight"],
    "default").

    Args:
        name: name of the tensor.
        prefix: what the names of the method's tensors begin with, such as "lora_".

    Returns:
        (elements up to the one that begins with `prefix`, elements after the adapter's name, the adapter's name or None
            if the tensor's name does not contain it).
    """
    path = name.split(".")
    at = next((i for i in range(len(path) - 1, -1, -1) if path[i].startswith(prefix)), None)
    if at is None or len(path) - at > 3:
        return None
    front, rest = path[: at + 1], path[at + 1 :]
    if not rest or (rest in (["weight"], ["bias"]) and front[-1] in (*_MODULES, "lora_magnitude_vector")):
        return front, rest, None
    return front, rest[1:], rest[0]


def _make_saved_name(name: str, prefix: str, adapter: str | None) -> str | None:
    """Return the name with which PEFT saves a tensor of the adapter; None for other tensors.

    Args:
        name: name of the tensor in the checkpoint.
        prefix: the beginning of the names of the method's tensors, such as "lora_".
        adapter: the adapter's name; None for the only adapter, in a folder of a trainer that leaves the name out.
    """
    found = _split_adapter_name(name, prefix)
    if found is not None:
        front, rest, owner = found
        if owner != adapter:
            return None
        if front[-1] == "lora_magnitude_vector":
            rest = []  # a module by now, a parameter in files
        return ".".join([*front, *rest])
    own = r"[^.]+" if adapter is None else re.escape(adapter)
    if (m := re.fullmatch(rf"(.*{re.escape(_TOKENS)})(\.{own}){'?' * (adapter is None)}", name)) is not None:
        return m[1]
    m = re.fullmatch(rf"(.*?)\.modules_to_save\.{own}\.(.*)", name)
    return f"{m[1]}.{m[2]}" if m else None


def _without_tied_tokens(saved: dict[str, str], config: Config, ckpt: Checkpoint) -> dict[str, str]:
    """Return `saved` without the trained tokens of modules that are tied to the embedding: a model has the same rows
    under the names of both, and PEFT saves those of the embedding.

    A module that trainable_token_indices names is kept, unless it has the same rows of the same weight as another.

    Args:
        saved: {name in the checkpoint: name in PEFT's file} of the adapter's tensors.
        config: adapter_config.json.
        ckpt: the checkpoint.
    """
    rows = {n: s.removesuffix(_TOKENS) for n, s in saved.items() if s.endswith(_TOKENS)}
    said: Any = config.get("trainable_token_indices")
    first = sorted(rows, key=lambda n: (rows[n].endswith(_HEADS), rows[n].count(".")))  # the embedding
    kept: dict[object, str] = dict.fromkeys([None], first[0]) if rows and not isinstance(said, dict) else {}
    for n in first if isinstance(said, dict) else ():
        weight = ckpt.tensors.get(f"model.{rows[n]}.token_adapter.base_layer.weight", ckpt.tensors[f"model.{n}"])
        for indices in [v for k, v in said.items() if rows[n].endswith(k)][:1]:
            kept.setdefault((str(indices), tuple(weight.chunks)), n)
    return {n: s for n, s in saved.items() if n not in rows or n in kept.values()}


def _list_saved_base_tensors(names: list[str], saved: dict[str, str], config: Config, prefix: str) -> list[str]:
    """List the tensors of the base model that are saved with the adapter, under their own names.

    Args:
        names: of all weights.
        saved: {name: name in the file} of the adapter's tensors.
        config: adapter_config.json, which says whether biases or embeddings belong to it.
        prefix: what the names of the method's tensors begin with, such as "lora_".
    """
    there = set(names)
    out: list[str] = []
    if config.get("bias") == "all":
        aside = ("original_module", "modules_to_save")  # what was trained of those is in `saved`
        out += [n for n in names if n.endswith(".bias") and n not in saved and not {*aside} & {*n.split(".")}]
    elif str(config.get("bias", "none")) != "none":  # "lora_only": of the layers that have an adapter
        layers = {n.rpartition(f".{prefix}")[0] for n in saved if f".{prefix}" in n}
        out += [n for n in (f"{k}.base_layer.bias" for k in sorted(layers)) if n in there]
    if config.get("trainable_token_indices") is not None or config.get("peft_type") == "TRAINABLE_TOKENS":
        return out
    targets = config.get("target_modules") or ()
    if targets != "all-linear" if isinstance(targets, str) else {*_EMBEDDINGS} & {*map(str, targets)}:
        out += [n for n in names if _is_adapted_embedding(n)]
    return out


def _is_adapted_embedding(name: str) -> bool:
    """Whether a tensor is the weight of an embedding or output layer that an adapter wraps (its base_layer)."""
    return name.split(".")[-3:] in ([e, "base_layer", "weight"] for e in _EMBEDDINGS)
