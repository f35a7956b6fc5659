"""FQNs as modules form them: what wrapper modules, or the user's own outer modules, put in front, and how to take it
off.

The modules about names differ so: this one knows a single FQN; `names` maps whole trees of a trainer to canonical
names; `optimizer_names` finds FQNs for the numbers of an optimizer; `name_maps` and `map_groups` translate one
program's FQNs to another's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from ..errors import Corrupt, UsageError, argument
from .checkpoint import Checkpoint, Path, TensorEntry, Value, joined
from .paths import is_optimizer_state

__all__ = [
    "EXTRA_STATE",
    "WRAPPERS",
    "fold_name",
    "remove_prefix",
    "remove_wrappers",
    "remove_wrappers_from_origin",
    "split_extra_state",
    "strip_wrapper_modules",
    "strip_wrappers",
]

#: Wrapper modules that put themselves into the FQN: FSDP1, torch.compile, activation checkpointing, Lightning.
WRAPPERS = frozenset(("_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module", "_forward_module"))


#: The last part of the key under which `Module.state_dict()` has what `get_extra_state()` returns
#: (torch/nn/modules/module.py).
EXTRA_STATE = "_extra_state"


def fold_name(name: str) -> str:
    """Return a name with "#" for each number that is a part of it, so that alike layers have one name:
    "layers.#.mlp.weight"."""
    return re.sub(r"(?<![^.\[])\d+(?![^.\]])", "#", name)


def split_extra_state(name: str) -> tuple[str, str] | None:
    """Split the name of an entry of the model into the FQN of a module's extra state and what follows it; None for any
    other entry.

    >>> split_extra_state("layers.0._extra_state.amax.0")
    ('layers.0._extra_state', 'amax.0')
    """
    parts = name.split(".")
    if EXTRA_STATE not in parts:
        return None
    cut = parts.index(EXTRA_STATE) + 1
    return ".".join(parts[:cut]), ".".join(parts[cut:])


def strip_wrapper_modules(name: str) -> str:
    """Remove the modules that wrappers put into the dotted name of a parameter (`_fsdp_wrapped_module`, `_orig_mod`,
    ...); its last part is kept, whatever it is."""
    *modules, last = name.split(".")
    return ".".join([*(m for m in modules if m not in WRAPPERS), last])


def strip_wrappers(fqns: Iterable[str]) -> dict[str, str]:
    """Return {name as found: FQN without wrappers' modules}; DDP's "module." is removed only when every name begins
    with it.

    Raises:
        Corrupt: two names are the same afterwards.
    """
    out = {n: strip_wrapper_modules(n) for n in fqns}
    if out and all(v.startswith("module.") for v in out.values()):
        out = {k: v.removeprefix("module.") for k, v in out.items()}
    seen: dict[str, str] = {}
    for n, clean in out.items():
        if seen.setdefault(clean, n) != n:
            raise Corrupt(
                f'"{seen[clean]}" and "{n}" are both "{clean}" once wrapper prefixes are removed; the checkpoint holds '
                "the same parameter twice. Keep one of them.",
                code="CKPT0416",
            )
    return out


def remove_prefix(ckpt: Checkpoint, prefix: str) -> Checkpoint:
    """Remove the modules `prefix` ("net.") in front of the names of parameters that begin with them, in the model and
    in the optimizer.

    Raises:
        UsageError: no weight has the prefix. Corrupt: two names are the same afterwards.
    """
    prefix = prefix.rstrip(".") + "."
    names = [t.parameter for t in ckpt.tensors.values() if t.component == "model"]
    if not any(n.startswith(prefix) and n != prefix for n in names):
        first = f', first of all is "{names[0]}"' if names else ""
        raise UsageError(
            f"{argument('strip_prefix', prefix, 'HfOptions')}: no weight has a name that begins so{first}.",
            code="CKPT0207",
        )

    def short(path: Path) -> Path:
        """Return a path with the prefix removed from the name of a parameter in it; other paths as they are."""
        at = 1 if path[0] == "model" else 2 if is_optimizer_state(path) else None
        if at is None or len(path) <= at:
            return path
        return (*path[:at], str(path[at]).removeprefix(prefix) or path[at], *path[at + 1 :])

    tensors: dict[str, TensorEntry] = {}
    values: dict[str, Value] = {}
    renamed: dict[str, str] = {}
    for name, t in ckpt.tensors.items():
        path = short(t.path)
        renamed[name] = joined(path)
        if renamed[name] in tensors:
            raise Corrupt(f'two tensors are "{renamed[name]}" without the prefix "{prefix}".', code="CKPT0416")
        tensors[renamed[name]] = t if path == t.path else replace(t, path=path)
    for value in ckpt.values.values():
        path, data = short(value.path), value.data
        if value.option == "params" and isinstance(data, list):
            data = [n.removeprefix(prefix) if isinstance(n, str) else n for n in data]
        values[joined(path)] = Value(path, data)
    recorded = {renamed.get(n, n): d for n, d in ckpt.recorded.items()}
    origin = {q: p for q, p in ckpt.origin.items() if q[0] not in ("model", "optim")}
    return replace(ckpt, tensors=tensors, values=values, recorded=recorded, origin=origin)


def remove_wrappers_from_origin(origin: Mapping[Path, Path]) -> dict[Path, Path]:
    """Return `Checkpoint.origin` without the prefixes of wrappers in the names of parameters: the trainer's own keys
    remain.

    >>> remove_wrappers_from_origin({("model",): ("net",), ("model", "w"): ("net", "_orig_mod.w")})
    {('model',): ('net',)}
    """
    out: dict[Path, Path] = {}
    for q, p in origin.items():
        clean = q[1] if q[0] == "model" and len(q) == 2 else q[2] if q[:2] == ("optim", "params") else None
        last = p[-1] if p else None
        if isinstance(clean, str) and isinstance(last, str) and last != clean:
            parts = [x for x in last.split(".") if x not in WRAPPERS]
            if clean in (".".join(parts), ".".join(parts[1:] if parts[0] == "module" else parts)):
                if p[:-1] != origin.get(q[:1], q[:1]) and q[0] == "model":
                    out[q] = (*p[:-1], clean)
                continue
        out[q] = p
    return out


def remove_wrappers(ckpt: Checkpoint) -> Checkpoint:
    """Return the checkpoint without the prefixes of wrappers in what it keeps of the source's own names:
    `Checkpoint.origin`, and the lists `param_names` of torch's optimizers."""
    values = dict(ckpt.values)
    for name, v in ckpt.values.items():
        listed = v.option == "param_names"
        if listed and isinstance(v.data, list) and all(isinstance(n, str) for n in v.data):
            values[name] = Value(v.path, list(strip_wrappers(v.data).values()))
    return replace(ckpt, origin=remove_wrappers_from_origin(ckpt.origin), values=values)
