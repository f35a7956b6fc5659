"""FQNs as modules form them: what wrapper modules, or the user's own outer modules, put in front, and how to take it
off.

The modules about names differ so: this one knows a single FQN; `names` maps whole trees of a trainer to canonical
names; `optimizer_names` finds FQNs for the numbers of an optimizer; `name_maps` and `map_groups` translate one
program's FQNs to another's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from ..errors import Corrupt, Unsupported, UsageError, argument
from .checkpoint import Checkpoint, Path, TensorEntry, Value, joined
from .paths import EXTRA_STATE, is_optimizer_state, keep_extra_state_trees, split_extra_state

__all__ = [
    "EXTRA_STATE",
    "WRAPPERS",
    "mask_name_numbers",
    "remove_prefix",
    "remove_wrappers",
    "remove_wrappers_from_origin",
    "rename_parameters",
    "split_extra_state",
    "strip_wrapper_modules",
    "strip_wrappers",
]

#: Wrapper modules that put themselves into the FQN: FSDP1, torch.compile, activation checkpointing, Lightning.
WRAPPERS = frozenset(("_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module", "_forward_module"))


def mask_name_numbers(name: str) -> str:
    """Return a name with "#" in place of each part that is a number, so that the same parameter of every layer has
    one name: "layers.#.mlp.weight"."""
    return re.sub(r"(?<![^.\[])\d+(?![^.\]])", "#", name)


def strip_wrapper_modules(name: str) -> str:
    """Return the dotted name of a parameter without the modules that wrappers insert (`_fsdp_wrapped_module`,
    `_orig_mod`, ...). The last part of the name is always kept."""
    *modules, last = name.split(".")
    return ".".join([*(m for m in modules if m not in WRAPPERS), last])


def strip_wrappers(fqns: Iterable[str]) -> dict[str, str]:
    """Return {name: FQN without wrapper modules}; DDP's "module." is removed only if every name begins with it.

    Raises:
        Corrupt: two names have the same FQN.
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


def rename_parameters(ckpt: Checkpoint, new_name: Callable[[str], str]) -> tuple[Checkpoint, dict[str, str]]:
    """Rename parameters wherever a state names them: in the model, the optimizer's state and its param groups, in fp32
    masters (extra.master), and in DeepSpeed's list of buffers.

    Args:
        ckpt: the checkpoint, which is not changed.
        new_name: returns the new FQN of an FQN, often the same one; it is called many times, so it should be fast.

    Returns:
        (a checkpoint with the new names, {old canonical name: new one} of the entries that changed).

    Raises:
        Unsupported: two entries would have one name.
    """
    renamed: dict[str, str] = {}
    by_new: dict[str, str] = {}

    def move(name: str, path: Path) -> Path:
        """Return the new path of the entry `name`, and note it."""
        at = 1 if path[0] == "model" else 2 if is_optimizer_state(path) or path[:2] == ("extra", "master") else None
        if at is not None and len(path) > at:
            new = new_name(str(path[at]))
            path = path if new == path[at] else (*path[:at], new, *path[at + 1 :])
        new = joined(path)
        if by_new.setdefault(new, name) != name:
            raise Unsupported(f'"{by_new[new]}" and "{name}" would both be named "{new}".', code="CKPT0310")
        if new != name:
            renamed[name] = new
        return path

    def names_in(v: Value) -> object:
        """Return the data of a value, with new names where it lists those of parameters."""
        lists = v.option in ("params", "param_names") or v.path == ("extra", "buffer_names")
        if not lists or not isinstance(v.data, list):
            return v.data
        return [new_name(n) if isinstance(n, str) else n for n in v.data]

    tensors, values = dict[str, TensorEntry](), dict[str, Value]()
    for name, t in ckpt.tensors.items():
        path = move(name, t.path)
        tensors[joined(path)] = t if path is t.path else replace(t, path=path)
    for name, v in ckpt.values.items():
        path = move(name, v.path)
        values[joined(path)] = Value(path, names_in(v))
    return replace(
        ckpt,
        tensors=tensors,
        values=values,
        recorded={renamed.get(n, n): d for n, d in ckpt.recorded.items()},
        recorded_values={renamed.get(n, n): d for n, d in ckpt.recorded_values.items()},
        dequantized={renamed.get(n, n): renamed.get(codes, codes) for n, codes in ckpt.dequantized.items()},
        numeric_remainders=frozenset(renamed.get(n, n) for n in ckpt.numeric_remainders),
        numbered=tuple(map(new_name, ckpt.numbered)),
        rounded={renamed.get(n, n): t for n, t in ckpt.rounded.items()},
        others=[o._replace(name=renamed.get(o.name, o.name)) for o in ckpt.others],
        replicas=[r._replace(name=renamed.get(r.name, r.name)) for r in ckpt.replicas],
        origin=_rename_in_origin(ckpt.origin, new_name),
    ), renamed


def _rename_in_origin(origin: Mapping[Path, Path], new_name: Callable[[str], str]) -> dict[Path, Path]:
    """Return `Checkpoint.origin` for renamed parameters: without the names that the source had for single
    parameters, with the numbers of its optimizer under the new FQNs, and with extra states as one tree, unless a part
    of that is renamed."""
    out: dict[Path, Path] = {}
    head = origin.get(("model",), ("model",))
    trees = {("model", joined(q[1:])): (str(p[1]), p[2:]) for q, p in keep_extra_state_trees(origin).items()}
    torn = {
        fqn
        for (_, name), (fqn, _) in trees.items()
        if not (new := new_name(fqn)).endswith(EXTRA_STATE) or new_name(name) != new + name.removeprefix(fqn)
    }
    out |= {("model", new_name(q[1])): (*head, new_name(fqn), *p) for q, (fqn, p) in trees.items() if fqn not in torn}
    for q, p in origin.items():
        if q[:2] == ("optim", "params"):
            if isinstance(p[0], int):
                out[*q[:2], new_name(str(q[2]))] = p
        elif q[0] != "model" or len(q) == 1:
            out[q] = p
    return out


def remove_prefix(ckpt: Checkpoint, prefix: str) -> Checkpoint:
    """Remove the modules `prefix` ("net.") in front of the names of parameters that begin with them, in the model and
    in the optimizer.

    Raises:
        UsageError: no weight has the prefix. Unsupported: two names are the same afterwards.
    """
    prefix = prefix.rstrip(".") + "."
    names = [t.parameter for t in ckpt.tensors.values() if t.component == "model"]
    if not any(n.startswith(prefix) and n != prefix for n in names):
        first = f', first of all is "{names[0]}"' if names else ""
        raise UsageError(
            f"{argument('strip_prefix', prefix, 'HfOptions')}: no weight has a name that begins so{first}.",
            code="CKPT0207",
        )
    return rename_parameters(ckpt, lambda name: name.removeprefix(prefix) or name)[0]


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
        extra = split_extra_state(joined(q[1:])) if q[0] == "model" else None
        if extra is not None:
            bare = [strip_wrapper_modules(str(key)) for key in p]
            p = tuple(
                extra[0] if extra[0] in (b, b.removeprefix("module.")) else k for b, k in zip(bare, p, strict=True)
            )
        out[q] = p
    return out


def remove_wrappers(ckpt: Checkpoint) -> Checkpoint:
    """Return the checkpoint without wrapper modules (`_orig_mod`, ...) in the source's own names that it keeps: in
    `Checkpoint.origin`, and in the lists `param_names` of torch's optimizers."""
    values = dict(ckpt.values)
    for name, v in ckpt.values.items():
        listed = v.option == "param_names"
        if listed and isinstance(v.data, list) and all(isinstance(n, str) for n in v.data):
            values[name] = Value(v.path, list(strip_wrappers(v.data).values()))
    return replace(ckpt, origin=remove_wrappers_from_origin(ckpt.origin), values=values)
