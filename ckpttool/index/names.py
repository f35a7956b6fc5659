"""Dialects: from the tree a trainer wrote to canonical names, and back. Names only; no bytes, no files.

A layout that keeps trees (dcp, full) hands over its leaves as {path: leaf}, a leaf being anything. `canonical` finds
the model, the optimizer and the rest among the usual shapes and returns the leaves under

    model.<fqn>   optim.state.<fqn>.<slot>   optim.param_groups.<i>.<key>   scheduler...   scaler...   rng...
    dataloader...   trainer.<key>   extra...

with `origin`, the paths that were changed, by which `own_tree` gives the tree back that the trainer wrote:

    ("model",) -> ("state_dict",)                        a component, and the key it had
    ("model", "net.w") -> ("_orig_mod.net.w",)           an entry that had another place than its component's
    ("optim", "params", "net.w") -> (0,)                 what the optimizer calls a parameter
    ("optim", "state") -> ("optimizer", "state.")        an optimizer flattened to "state.<fqn>.<slot>"
    ("trainer", "step") -> ("step",)                     everything else, by its first elements

The names are those of torch.distributed.checkpoint.state_dict.get_state_dict, flattened, so a live FSDP2 job's own
checkpoint needs no mapping. Shapes known: {"model", "optim"}; {"model_state_dict", "optimizer_state_dict"};
{"state_dict", "optimizer_states": [..]} (Lightning); {"app": {"model", "optim"}}; a bare state dict; model keys at
the root beside the optimizer (torchtitan); an optimizer flattened to "state.<fqn>.<slot>" and
"param_groups.<fqn>.<key>" (StateDictOptions(flatten_optimizer_state_dict=True)); integer optimizer ids
(`optimizer.state_dict()`), whose names are found by `name_order`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ..errors import CkpttoolError, Corrupt, Unsupported, UsageError
from .checkpoint import Checkpoint, Number, Path, Value, joined, same_bytes, shape_of

__all__ = [
    "COMPONENTS", "COUNTERS", "NOT_THEIRS", "ROLES", "WRAPPERS", "Named", "canonical", "counted", "leads_back", "misplaced",
    "name_order", "nest", "of_the_rest", "original", "own_tree", "refuse_surrogates", "strip_wrappers", "without_prefix",
]  # fmt: skip

COMPONENTS = ("model", "optim", "scheduler", "scaler", "rng", "dataloader", "trainer", "extra")

#: What trainers call a component of the state.
ROLES: dict[str, str] = {
    **dict.fromkeys(("model", "state_dict", "model_state_dict"), "model"),
    **dict.fromkeys(("optim", "optimizer", "optimizer_state_dict", "optimizer_states", "optimizer_0"), "optim"),
    **dict.fromkeys(
        ("scheduler", "lr_scheduler", "lr_schedulers", "scheduler_state_dict", "lr_scheduler_state_dict"), "scheduler"
    ),
    **dict.fromkeys(("scaler", "grad_scaler", "scaler_state_dict"), "scaler"),
    **dict.fromkeys(("rng", "rng_state", "rng_states", "random_states"), "rng"),
    **dict.fromkeys(("dataloader", "train_dataloader", "sampler"), "dataloader"),
    **dict.fromkeys(("trainer", "train_state"), "trainer"),
}
#: Entries at the root of a tree that belong to the trainer.
COUNTERS = frozenset((
    "step", "steps", "epoch", "global_step", "iteration", "num_steps", "tokens_seen", "ntokens_seen", "epochs_run",
    "best_loss", "max_steps", "total_epochs", "global_steps", "global_samples", "skipped_steps",
))  # fmt: skip

#: The counters among them that count optimizer steps, the usual first.
_STEPS = ("step", "global_step", "steps", "global_steps", "num_steps", "iteration")

#: The first part of a key of an optimizer that was flattened.
_FLAT_STATE, _FLAT_GROUPS = "state.", "param_groups."

#: Wrapper modules that put themselves into the FQN: FSDP1, torch.compile, activation checkpointing, Lightning.
WRAPPERS = frozenset(("_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module", "_forward_module"))


def counted(values: Callable[[str], Any]) -> int | None:
    """How many steps the trainer counts, where it does; `values` gives the data of a canonical name, or None."""
    for name in _STEPS:
        found = values(f"trainer.{name}")
        if isinstance(found, int) and not isinstance(found, bool):
            return found
    return None


class Named(NamedTuple):
    """What `canonical` returns."""

    leaves: dict[Path, Any]
    origin: dict[Path, Path]
    trainer: str | None
    notes: list[str]


def strip_wrappers(fqns: Iterable[str]) -> dict[str, str]:
    """{name as found: FQN} without wrappers' prefixes; DDP's "module." only when every name has it.

    Raises:
        Corrupt: two names are the same afterwards.
    """
    out: dict[str, str] = {}
    for n in fqns:
        *path, last = n.split(".")
        out[n] = ".".join([*(p for p in path if p not in WRAPPERS), last])
    if out and all(v.startswith("module.") for v in out.values()):
        out = {k: v.removeprefix("module.") for k, v in out.items()}
    seen: dict[str, str] = {}
    for n, clean in out.items():
        if seen.setdefault(clean, n) != n:
            raise Corrupt(
                f'"{seen[clean]}" and "{n}" are both "{clean}" once wrapper prefixes are removed; the checkpoint holds '
                "the same parameter twice. Keep one of them."
            )
    return out


def without_prefix(ckpt: Checkpoint, prefix: str) -> Checkpoint:
    """The same checkpoint without the modules `prefix` ("net.") in front of the names of parameters that begin with them, in
    the model and in the optimizer.

    Raises:
        UsageError: no weight has the prefix. Corrupt: two names are the same afterwards.
    """
    prefix = prefix.rstrip(".") + "."
    names = [str(t.path[1]) for t in ckpt.tensors.values() if t.path[0] == "model"]
    if not any(n.startswith(prefix) and n != prefix for n in names):
        first = f', first of all is "{names[0]}"' if names else ""
        raise UsageError(f"--strip-prefix {prefix}: no weight has a name that begins so{first}.")

    def short(path: Path) -> Path:
        at = 1 if path[0] == "model" else 2 if path[:2] == ("optim", "state") else None
        if at is None or len(path) <= at:
            return path
        return (*path[:at], str(path[at]).removeprefix(prefix) or path[at], *path[at + 1 :])

    out = replace(ckpt, tensors={}, values={}, recorded={}, origin={})
    renamed: dict[str, str] = {}
    for name, t in ckpt.tensors.items():
        path = short(t.path)
        renamed[name] = joined(path)
        if renamed[name] in out.tensors:
            raise Corrupt(f'two tensors are "{renamed[name]}" without the prefix "{prefix}".')
        out.tensors[renamed[name]] = t if path == t.path else replace(t, path=path)
    for value in ckpt.values.values():
        path, data = short(value.path), value.data
        if path[:2] == ("optim", "param_groups") and path[3:] == ("params",) and isinstance(data, list):
            data = [n.removeprefix(prefix) if isinstance(n, str) else n for n in data]
        out.values[joined(path)] = Value(path, data)
    out.recorded = {renamed.get(n, n): d for n, d in ckpt.recorded.items()}
    out.origin = {q: p for q, p in ckpt.origin.items() if q[0] not in ("model", "optim")}
    return out


def canonical(
    leaves: Mapping[Path, Any],
    shape_of: Any,
    like: Sequence[str] | None = None,
    same: Any = None,
    only: frozenset[str] | None = None,
) -> Named:
    """Rename the leaves of a tree.

    `shape_of(leaf)` gives the shape of a tensor leaf, None for a value. `like` lists FQNs in optimizer order, where
    the user named a checkpoint that knows it. An optimizer that cannot be named
    is left out where `only` does not ask for it. `same(a, b)` tells whether two tensor leaves are the same bytes of the
    same file (tied weights).

    Raises:
        Corrupt: two leaves get one name. Unsupported: integer optimizer ids that cannot be named with certainty.
    """
    found = dict(leaves)
    origin: dict[Path, Path] = {}
    outer: Path = ()  # a key around everything
    notes: list[str] = []
    tops = {p[0] for p in found}
    if len(tops) == 1 and len({p[:2] for p in found}) > 1:
        inner = {str(p[1]) for p in found if len(p) > 2}
        if any(ROLES.get(n) == "model" for n in inner):  # {"app": {"model": ..., "optim": ...}}
            outer = (next(iter(tops)),)
            notes.append(f'everything is under the key "{outer[0]}"; dcp and full keep it, other layouts do not')
            found = {p[1:]: v for p, v in found.items()}
    model_key, optim_key = _containers(found)
    out: dict[Path, Any] = {}
    raw_model: dict[str, Any] = {}
    places: dict[str, Path] = {}
    raw_optim: dict[Path, Any] = {}
    rest: dict[Path, Any] = {}
    for p, leaf in found.items():
        top = p[0]
        if model_key is not None and top == model_key and len(p) > 1:
            name = joined(p[1:])
            if places.setdefault(name, p) != p:
                raise Corrupt(f"the model has two entries {name!r}, one of them in a dict or list of its own.")
            raw_model[name] = leaf
        elif optim_key is not None and top == optim_key and len(p) > 1:
            raw_optim[p[1:]] = leaf
        elif model_key is None and len(p) == 1 and shape_of(leaf) is not None and not _is_known(str(top)):
            places[str(top)] = p
            raw_model[str(top)] = leaf
        else:
            rest[p] = leaf
    if model_key is not None and (*outer, model_key) != ("model",):
        origin["model",] = (*outer, model_key)
    clean = strip_wrappers(raw_model)
    q: Path
    for name, leaf in raw_model.items():
        q = ("model", clean[name])
        out[q] = leaf
        if original(q, origin) != (*outer, *places[name]):
            origin[q] = (*outer, *places[name])
    taken: dict[Any, Any] = {}
    for p, leaf in rest.items():
        q = _rest(p)
        if taken.setdefault(q[: _own(q)], p[0]) != p[0]:
            q = ("extra", *p)  # a second key of that kind ("rng" and "rng_state") keeps its name
        if q in out:
            raise Corrupt(f"the keys {joined(p)!r} and {joined(origin.get(q, q))!r} both mean {joined(q)!r}.")
        out[q] = leaf
        cut = _own(q)
        origin[q[:cut]] = p[: len(p) - (len(q) - cut)]
    origin = {q: p for q, p in origin.items() if q != p}
    if raw_optim:
        own: Path = (*outer, optim_key)
        if all(p[0] == 0 for p in raw_optim):  # Lightning's list of optimizers, of one
            raw_optim, own = {p[1:]: v for p, v in raw_optim.items()}, (*own, 0)
        if own != ("optim",):
            origin["optim",] = own
        try:
            out.update(_optimizer(raw_optim, raw_model, clean, shape_of, like, same, notes, origin))
        except Unsupported:
            if only is None or "optim" in only:
                raise
    trainer = "torchtitan" if model_key is None and "train_state" in tops and optim_key else None
    trainer = "Lightning" if {"loops", "callbacks"} <= {str(t) for t in tops} else trainer
    return Named(out, origin, trainer, notes)


def _containers(found: Mapping[Path, Any]) -> tuple[Any, Any]:
    model, optim = None, None
    for p in found:
        role = ROLES.get(str(p[0])) if len(p) > 1 else None
        if role == "model" and model is None:
            model = p[0]
        if role == "optim" and optim is None:
            optim = p[0]
    return model, optim


def _own(path: Path) -> int:
    """How many elements of a canonical path stand for the user's own top-level key."""
    return 2 if path[0] in ("trainer", "extra") else 1


def _is_known(top: str) -> bool:
    return top in ROLES or top in COUNTERS


def _rest(p: Path) -> Path:
    role = ROLES.get(str(p[0]))
    if role in ("scheduler", "scaler", "rng", "dataloader"):
        return (role, *p[1:])
    if role == "trainer" and len(p) > 1:
        return ("trainer", *p[1:])
    if str(p[0]) in COUNTERS:
        return ("trainer", *p)
    return p if p[0] == "extra" and len(p) > 1 else ("extra", *p)


def refuse_surrogates(names: Iterable[str]) -> None:
    """Refuse names that are not Unicode text, which is all that safetensors, JSON and folders can hold.

    Raises:
        Unsupported: with the first such name.
    """
    for name in names:
        if not name.isascii() and name.encode("utf-8", "replace").decode() != name:
            raise Unsupported(
                f"The name {name!a} has half of a surrogate pair in it, which UTF-8 cannot encode, so that no file of the "
                "destination could list it. Rename it in the source."
            )


def misplaced(paths: Sequence[Path]) -> Path | None:
    """The first path of a state that is of no component, or that lies inside another one; None where all are sound."""
    leaves = set(paths)
    for path in paths:
        if path[0] not in COMPONENTS or any(path[:n] in leaves for n in range(1, len(path))):
            return path
    return None


def leads_back(ckpt: Checkpoint) -> bool:
    """Whether the tree with the user's own keys, by `ckpt.origin`, would be read as this very state."""
    leaves: dict[Path, Any] = {t.path: t for t in ckpt.tensors.values()}
    leaves |= {v.path: v.data for v in ckpt.values.values()}
    return not ckpt.origin or own_tree(leaves, ckpt.origin, same_bytes)[0] is not leaves


#: The note of a tree that could not be given back.
NOT_THEIRS = (
    "the keys are ckpttool's canonical ones, not those of the source: with those, this state could not be read again"
)


def own_tree(leaves: dict[Path, Any], origin: Mapping[Path, Path], same: Any) -> tuple[dict[Path, Any], list[str]]:
    """(the tree that `origin` tells of, {path: leaf}, notes) for the leaves of a state, {canonical path: TensorEntry or data}.

    The leaves themselves are the tree where nothing else is known, and where a reader would not find the same state in
    the other tree: numbers of parameters whose names do not follow any more, keys of which one holds another. `same` is
    what the reader of the tree will pass to `canonical`.
    """
    if not origin:
        return leaves, []
    try:
        tree = _restored(leaves, origin)
        nest(tree)
        again = canonical(tree, shape_of, None, same).leaves
    except CkpttoolError:
        again = {}
    if again.keys() == leaves.keys() and all(again[p] is leaf or again[p] == leaf for p, leaf in leaves.items()):
        return tree, []
    return leaves, [NOT_THEIRS]


def _restored(leaves: Mapping[Path, Any], origin: Mapping[Path, Path]) -> dict[Path, Any]:
    """The tree without a proof.

    Raises:
        Corrupt: two leaves would have one place, or one tensor several.
    """
    outer = origin.get(("model",), ())[:-1]
    states, groups = original(("optim", "state"), origin), original(("optim", "param_groups"), origin)
    flat = groups[-1] == _FLAT_GROUPS
    out: dict[Path, Any] = {}

    def called(fqn: Any) -> Any:
        return origin.get(("optim", "params", fqn), (fqn,))[0]

    def put(path: Path, leaf: Any) -> None:
        if path in out:
            raise Corrupt(f"two entries have the place {joined(path)!r}.")
        out[path] = leaf

    for path, leaf in leaves.items():
        kind = path[:2]
        if path[0] not in ("model", "optim"):
            put((*outer, *original(path, origin)), leaf)
        elif kind == ("optim", "state") and len(path) > 3:
            name = called(path[2])
            if states[-1] == _FLAT_STATE:
                put((*states[:-1], f"{_FLAT_STATE}{name}.{joined(path[3:])}"), leaf)
            else:
                put((*states, Number(name) if isinstance(name, int) else name, *path[3:]), leaf)
        elif kind == ("optim", "param_groups") and len(path) > 3 and flat:
            members = leaves.get((*path[:3], "params"), ())
            if shape_of(leaf) is not None and len(members) != 1:
                raise Corrupt(f"{joined(path)!r} is one tensor of several parameters.")
            for fqn in members if path[3:] != ("params",) else ():
                put((*groups[:-1], f"{_FLAT_GROUPS}{called(fqn)}.{joined(path[3:])}"), leaf)
        elif kind == ("optim", "param_groups") and path[3:] == ("params",) and isinstance(leaf, list):
            put((*groups, *path[2:]), [called(fqn) for fqn in leaf])
        else:
            put(original(path, origin), leaf)
    if ("optim", "state") in origin and states[-1] == "state" and any(p[0] == "optim" for p in leaves):
        put(states, {})  # an optimizer that has made no step; `load_state_dict` asks for the key
    return out


def of_the_rest(named: Named) -> Named:
    """The same, of a layout that is no tree: its model and optimizer get canonical keys in dcp and full."""
    return named._replace(origin={q: p for q, p in named.origin.items() if q[0] not in ("model", "optim")})


def original(path: Path, origin: Mapping[Path, Path]) -> Path:
    """The path that a leaf of the rest had in the tree it came from (its canonical one where nothing is known)."""
    for n in range(len(path), 0, -1):
        if path[:n] in origin:
            return (*origin[path[:n]], *path[n:])
    return path


# ------------------------------------------------------------------------------------------------------- optimizer


def _are_groups(x: Any) -> bool:
    """A list of param groups whose keys are all strings; another one stays a value, since a name would be made up."""
    return isinstance(x, list) and all(isinstance(k, str) for g in x if isinstance(g, dict) for k in g)


def _optimizer(
    raw: dict[Path, Any],
    raw_model: Mapping[str, Any],
    clean: Mapping[str, str],
    shape_of: Any,
    like: Sequence[str] | None,
    same: Any,
    notes: list[str],
    origin: dict[Path, Path],
) -> dict[Path, Any]:
    """The leaves of the optimizer under their canonical paths; how they were called is added to `origin`."""
    own = origin.get(("optim",), ("optim",))
    flat = False
    state: dict[tuple[Any, Path], Any] = {}  # (fqn or id, slot path) -> leaf
    groups: dict[int, dict[Path, Any]] = {}
    flat_groups: dict[str, dict[Path, Any]] = {}
    out: dict[Path, Any] = {}
    for p, leaf in raw.items():
        head = str(p[0])
        if head == "state" and len(p) > 2:
            state[p[1], p[2:]] = leaf
        elif head == "param_groups" and len(p) > 2 and isinstance(p[1], int):
            groups.setdefault(p[1], {})[p[2:]] = leaf
        elif head == "param_groups" and len(p) == 1 and _are_groups(leaf):  # one item, as torch < 2.4 wrote it
            for i, g in enumerate(leaf):
                groups[i] = {(k,): v for k, v in g.items()} if isinstance(g, dict) else {("value",): g}
        elif head.startswith("state.") and len(p) == 1 and head.count(".") >= 2:
            fqn, _, kind = head[len(_FLAT_STATE) :].rpartition(".")
            state[fqn, (kind,)] = leaf
            flat = True
        elif head.startswith("param_groups.") and len(p) == 1 and head.count(".") >= 2:
            fqn, _, key = head[len(_FLAT_GROUPS) :].rpartition(".")
            flat_groups.setdefault(fqn, {})[key,] = leaf
        elif head in ("state", "param_groups") and len(p) == 1 and leaf in ({}, []):
            if head == "state":
                origin["optim", "state"] = (*own, "state")  # no state yet
        else:
            out["optim", *p] = leaf
    if flat or flat_groups:
        origin["optim", "state"], origin["optim", "param_groups"] = (*own, _FLAT_STATE), (*own, _FLAT_GROUPS)
    if flat_groups:
        groups = _regroup(flat_groups)
    ids = bool(state or groups) and _integer_ids(state, groups)
    if ids:
        fqns = _resolve_ids(state, groups, raw_model, clean, shape_of, like, same, notes)
    else:
        listed = {n for g in groups.values() for n in _params(g)}
        if numbers := [n for n in listed if not isinstance(n, str)]:
            raise Corrupt(
                f"optim.param_groups lists parameters by number in one group, first {numbers[0]}, and by name in another. The "
                "file is damaged, or was put together from two optimizers."
            )
        names = {str(k) for k, _ in state} | listed
        fqns = dict(strip_wrappers(names)) if not names <= clean.keys() else {n: clean[n] for n in names}
    origin.update((("optim", "params", fqn), (name,)) for name, fqn in fqns.items() if fqn != name)
    for (key, slot), leaf in state.items():
        owner = fqns.get(_id(key) if ids else str(key))
        if owner is None:
            raise Corrupt(
                f"optim.state has an entry for parameter {key}, which no param group lists; the optimizer would not know "
                "what to do with it. The file is damaged, or was put together from two optimizers."
            )
        out["optim", "state", owner, *slot] = leaf
    for i, g in groups.items():
        for k, leaf in g.items():
            if k == ("params",):
                leaf = [fqns.get(_id(x) if ids else x, x) for x in _params(g)]
            out["optim", "param_groups", i, *k] = leaf
    return out


def _params(group: Mapping[Path, Any]) -> list[Any]:
    got = group.get(("params",), [])
    if not isinstance(got, list):
        raise Corrupt(f"optim.param_groups: params is {type(got).__name__}, not a list.")
    if not (all(type(x) is int for x in got) or all(type(x) is str for x in got)):
        raise Corrupt("optim.param_groups: params holds neither names nor numbers alone.")
    return got


def _id(x: Any) -> Any:
    return int(x) if isinstance(x, str) and x.isdigit() else x


def _integer_ids(state: Mapping[tuple[Any, Path], Any], groups: Mapping[int, Mapping[Path, Any]]) -> bool:
    ids = [x for g in groups.values() for x in _params(g)]
    if ids:
        return all(isinstance(x, int) for x in ids)
    return all(isinstance(_id(k), int) for k, _ in state)


def _regroup(flat: Mapping[str, Mapping[Path, Any]]) -> dict[int, dict[Path, Any]]:
    """Param groups from per-parameter options: parameters with equal options were, or could be, one group."""
    out: list[tuple[Mapping[Path, Any], list[str]]] = []
    for fqn, options in flat.items():
        for known, members in out:
            if known == options:
                members.append(fqn)
                break
        else:
            out.append((options, [fqn]))
    return {i: {**options, ("params",): members} for i, (options, members) in enumerate(out)}


def _resolve_ids(
    state: Mapping[tuple[Any, Path], Any],
    groups: Mapping[int, Mapping[Path, Any]],
    raw_model: Mapping[str, Any],
    clean: Mapping[str, str],
    shape_of: Any,
    like: Sequence[str] | None,
    same: Any,
    notes: list[str],
) -> dict[Any, str]:
    shapes: dict[int, tuple[int, ...] | None] = {}
    for g in groups.values():
        for x in _params(g):
            shapes[x] = None
    for (key, _), leaf in state.items():
        shape = shape_of(leaf)
        if shape:  # the step is 0-dim and says nothing; a factored second moment (Adafactor) has another shape
            old = shapes.get(_id(key))
            shapes[_id(key)] = shape if old is None or len(shape) > len(old) else old
        else:
            shapes.setdefault(_id(key), None)
    members = [_params(g) for _, g in sorted(groups.items())] or [sorted(shapes)]
    named = [g.get(("param_names",)) for _, g in sorted(groups.items())]
    listed = [str(n) for group in named if isinstance(group, list) for n in group]
    flat = [x for m in members for x in m]
    if len(listed) == len(flat):  # torch >= 2.6, when the optimizer was given named_parameters()
        names = strip_wrappers(listed)
        return {x: names[n] for x, n in zip(flat, listed, strict=True)}
    if like is not None:
        if len(like) != len(flat):
            raise Unsupported(f"--like names {len(like)} parameters in its optimizer, this one has {len(flat)}.")
        return dict(zip(flat, like, strict=True))
    candidates: list[tuple[str, tuple[int, ...]]] = []
    kept: list[Any] = []
    for name, leaf in raw_model.items():
        shape = shape_of(leaf)
        if shape is None or (same is not None and any(same(leaf, k) for k in kept)):
            continue  # a second name of a tied weight; the optimizer has the first
        kept.append(leaf)
        candidates.append((clean[name], shape))
    resolved, left, ways = name_order(candidates, [[shapes[x] for x in m] for m in members])
    if resolved is None:
        raise Unsupported(
            f"the optimizer numbers its {len(flat)} parameters instead of naming them, and "
            + (
                f"more than one order of the {len(candidates)} tensors of the model fits"
                if ways
                else f"no order of the {len(candidates)} tensors of the model fits their shapes"
            )
            + ". Give --like a checkpoint of the same model whose optimizer has names, or --only model."
        )
    notes.append(
        f"the optimizer numbers its parameters; their names follow from the order and shapes of the model's {len(flat)} parameters"
        + (f" (taken for buffers or frozen: {', '.join(left[:4])}{', ...' if len(left) > 4 else ''})" if left else "")
    )
    return {x: n for m, ns in zip(members, resolved, strict=True) for x, n in zip(m, ns, strict=True)}


_MOST_STATES = 100_000


class _TooMany(Exception):
    """More states than are worth looking at."""


def name_order(
    names: Sequence[tuple[str, tuple[int, ...]]], groups: Sequence[Sequence[tuple[int, ...] | None]]
) -> tuple[list[list[str]] | None, list[str], int]:
    """Which name each numbered parameter has: (names by group, names that no group has, ways found).

    Optimizers number parameters group by group, in each in the order of `model.named_parameters()`, which is the order
    of the state dict. So the groups are disjoint subsequences of the names, matched by shape (None fits any). When
    more than one way fits, names that end in weight or bias are parameters before others are; when more than one is
    left then, the answer is None and `ways` is at least 2.
    """
    total = sum(map(len, groups))
    skips = len(names) - total
    if skips < 0:
        return None, [], 0
    memo: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}

    def best(i: int, at: tuple[int, ...]) -> tuple[int, int]:
        """(fewest parameter-like names skipped, number of ways with so few); (inf, 0) where nothing fits."""
        if i == len(names):
            return (0, 1) if all(a == len(g) for a, g in zip(at, groups, strict=True)) else (1 << 30, 0)
        if (i, at) in memo:
            return memo[i, at]
        if len(memo) > _MOST_STATES:
            raise _TooMany
        cost, ways = 1 << 30, 0
        for _, (extra, nxt) in moves(i, at):
            c, w = best(i + 1, nxt)
            if w and c + extra < cost:
                cost, ways = c + extra, w
            elif w and c + extra == cost:
                ways += w
        memo[i, at] = cost, ways
        return cost, ways

    def moves(i: int, at: tuple[int, ...]) -> list[tuple[int, tuple[int, tuple[int, ...]]]]:
        name, shape = names[i]
        out = []
        for g, group in enumerate(groups):
            if at[g] < len(group) and group[at[g]] in (shape, None):
                out.append((g, (0, (*at[:g], at[g] + 1, *at[g + 1 :]))))
        if i - sum(at) < skips:
            out.append((-1, (int(name.endswith((".weight", ".bias"))), at)))
        return out

    start = (0,) * len(groups)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, 4 * len(names) + 1000))  # `best` goes one name deeper with every call
    try:
        cost, ways = best(0, start)
    except _TooMany:  # many groups of like shapes: layer-wise learning rates, say
        return None, [], 2
    finally:
        sys.setrecursionlimit(limit)
    if ways != 1:
        return None, [], ways
    resolved: list[list[str]] = [[] for _ in groups]
    left: list[str] = []
    at = start
    for i in range(len(names)):
        for g, (extra, nxt) in moves(i, at):
            c, w = best(i + 1, nxt)
            if w and c + extra == cost:
                cost, at = c, nxt
                (resolved[g] if g >= 0 else left).append(names[i][0])
                break
    return resolved, left, 1


# ------------------------------------------------------------------------------------------------------------ trees


def nest(leaves: Mapping[Path, Any]) -> Any:
    """The tree of some leaves: str elements become keys of dicts, a Number one that is an integer, int elements positions
    in lists.

    nest({("a", 0): 1, ("a", 1): 2}) == {"a": [1, 2]}
    """
    tree = _Node()
    for path, leaf in leaves.items():
        at = tree
        for key in path[:-1]:
            inner = at.setdefault(key, _Node())
            if type(inner) is not _Node:
                raise Corrupt(f"{joined(path)!r} lies inside a value, not inside a dict or list.")
            at = inner
        if path[-1] in at:
            raise Corrupt(f"{joined(path)!r} is a value and a dict or list at once.")
        at[path[-1]] = leaf
    return _plain(tree)


class _Node(dict[Any, Any]):
    """An inner node while a tree is built, told apart from a leaf that is a dict."""


def _plain(x: Any) -> Any:
    if type(x) is not _Node:
        return x
    if x and all(type(k) is int for k in x):
        last = max(x)
        if min(x) < 0 or last > 2 * len(x) + 64:
            raise Corrupt(f"a list with {len(x)} elements has one at position {last}.")
        return [_plain(x.get(k)) for k in range(last + 1)]  # DCP forgets an empty dict, which leaves a hole
    return {int(k) if type(k) is Number else k: _plain(v) for k, v in x.items()}
