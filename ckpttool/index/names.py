"""Dialects: from the tree a trainer wrote to canonical names, and back. Names only; no bytes, no files.

A layout that keeps trees (dcp, full) hands over its leaves as {path: leaf}, a leaf being anything. `canonical` finds
the model, the optimizer and the rest among the usual shapes and returns the leaves under

    model.<fqn>   optim.state.<fqn>.<slot>   optim.param_groups.<i>.<key>   scheduler...   scaler...   rng...
    dataloader...   trainer.<key>   extra...

with `origin`, the paths that were changed, by which `restore_trainer_tree` gives the tree back that the trainer wrote:

    ("model",) -> ("state_dict",)                        a component, and the key it had
    ("model", "net.w") -> ("_orig_mod.net.w",)           an entry that had another place than its component's
    ("optim", "params", "net.w") -> (0,)                 what the optimizer calls a parameter
    ("optim", "state") -> ("optimizer", "state.")        an optimizer flattened to "state.<fqn>.<slot>"
    ("scheduler",) -> ("lr_schedulers", 0)               a list of one
    ("trainer", "step") -> ("step",)                     everything else, by its first elements

The names are those of torch.distributed.checkpoint.state_dict.get_state_dict, flattened, so a live FSDP2 job's own
checkpoint needs no mapping. Shapes known: {"model", "optim"}; {"model_state_dict", "optimizer_state_dict"};
{"state_dict", "optimizer_states": [..]} (Lightning); {"app": {"model", "optim"}}; a bare state dict; an optimizer's own
{"state", "param_groups"}; Composer's {"state": {"model", "optimizers", ...}, "rng"}; model keys at the root beside the
optimizer (torchtitan); an optimizer flattened to "state.<fqn>.<slot>" and "param_groups.<fqn>.<key>"
(StateDictOptions(flatten_optimizer_state_dict=True)); integer optimizer ids (`optimizer.state_dict()`), whose names are
found by `name_order`. Model and optimizer under other keys are recognised by their contents, if only one key fits:
{"net": {"conv.weight": ...}, "opt": {"state", "param_groups"}}.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ..errors import CkpttoolError, Corrupt, Unsupported, UsageError, argument
from .checkpoint import Checkpoint, Leaves, Number, Path, joined, same_bytes
from .composites import shape_of
from .fqns import split_extra_state, strip_wrappers
from .optimizer_names import (
    FLAT_GROUPS,
    FLAT_STATE,
    KnownModel,
    Orders,
    SameTensor,
    ShapeOf,
    UnnamedOptimizer,
    name_optimizer_leaves,
)
from .paths import keep_extra_state_trees
from .trainer_trees import convert_composer_tree, identify_trainer
from .trees import nest

__all__ = [
    "CANONICAL_KEYS_NOTE",
    "COMPONENTS",
    "COUNTERS",
    "KEEPS_NUMBERS",
    "ROLES",
    "CanonicalState",
    "are_own_keys_readable",
    "canonical",
    "describe_weights_elsewhere",
    "find_misplaced_path",
    "is_trainer_tree_readable",
    "original_path",
    "refuse_surrogates",
    "restore_trainer_tree",
    "step_count",
    "with_canonical_keys",
]

COMPONENTS = ("model", "optim", "scheduler", "scaler", "rng", "dataloader", "trainer", "extra")

#: What trainers call a component of the state.
ROLES: dict[str, str] = {
    **dict.fromkeys(("model", "state_dict", "model_state_dict"), "model"),
    **dict.fromkeys(("optim", "optimizer", "optimizer_state_dict", "optimizer_states", "optimizer_0"), "optim"),
    **dict.fromkeys(
        ("scheduler", "lr_scheduler", "lr_schedulers", "scheduler_state_dict", "lr_scheduler_state_dict", "sched"),
        "scheduler",
    ),
    **dict.fromkeys(("scaler", "grad_scaler", "scaler_state_dict"), "scaler"),
    **dict.fromkeys(("rng", "rng_state", "rng_states", "random_states"), "rng"),
    **dict.fromkeys(("dataloader", "train_dataloader", "sampler"), "dataloader"),
    **dict.fromkeys(("trainer", "train_state"), "trainer"),
}
#: Entries at the root of a tree that belong to the trainer.
COUNTERS = frozenset(
    (
        "step",
        "steps",
        "epoch",
        "global_step",
        "iteration",
        "num_steps",
        "tokens_seen",
        "ntokens_seen",
        "epochs_run",
        "best_loss",
        "max_steps",
        "total_epochs",
        "global_steps",
        "global_samples",
        "skipped_steps",
    )
)

#: The counters among them that count optimizer steps, the usual first.
_STEPS = ("step", "global_step", "steps", "global_steps", "num_steps", "iteration")


_MAX_STEPS = 1 << 56  # an archive's record has no larger numbers


def step_count(values: Callable[[str], object]) -> int | None:
    """Return the number of optimizer steps that the trainer has counted; None where it keeps no such count, or one that
    no training can reach.

    Args:
        values: returns the data of a value by its canonical name ("trainer.step"), None where there is none.
    """
    for name in _STEPS:
        found = values(f"trainer.{name}")
        if type(found) is int and 0 <= found <= _MAX_STEPS:
            return found
    return None


#: How the note begins on an optimizer that `canonical` could not name.
KEEPS_NUMBERS = "the optimizer keeps its numbers, under extra"


class CanonicalState(NamedTuple):
    """The leaves of a state under canonical names; `origin` maps changed prefixes of paths back to those of the
    source."""

    leaves: Leaves
    origin: dict[Path, Path]
    trainer: str | None
    notes: list[str]


def canonical(
    leaves: Mapping[Path, object],
    shape_of: ShapeOf,
    like: Sequence[str] | None = None,
    same: SameTensor | None = None,
    only: frozenset[str] | None = None,
    orders: Orders | None = None,
) -> CanonicalState:
    """Rename the leaves of a trainer's tree to canonical names: model.<FQN>, optim.state.<FQN>.<slot>, trainer.<key>,
    ...

    An optimizer that cannot be named is kept as it is, under extra, with a note; it is left out where `only` does not
    ask for it.

    Args:
        leaves: {path in the tree: leaf}; a leaf may be anything.
        shape_of: returns the shape of a tensor leaf, None for a value.
        like: FQNs in the order of the optimizer, where the user named a checkpoint that knows it.
        same: whether two tensor leaves are the same bytes of the same file (tied weights); None if that is not known.
        only: the components that are asked for; None for all.
        orders: returns, for {FQN: leaf} of the model, the same in every order that the module may have, where more is
            known of that than the order in this tree, or where the model is in another file.

    Raises:
        Corrupt: two leaves get one name.
        UnnamedOptimizer: `only` asks for an optimizer that cannot be named with certainty.
        Unsupported: the optimizer cannot be read, or has another number of parameters than `like`.
    """
    if (usual := convert_composer_tree(leaves)) is not None:
        named = canonical(usual, shape_of, like, same, only, orders)
        note = (
            "Composer's tree is read under the usual keys, and written with those: Composer itself does not find its "
            "own again"
        )
        return CanonicalState(named.leaves, {}, "Composer", [*named.notes, note])
    naming = _Naming(leaves, shape_of)
    naming.sort_leaves()
    clean = strip_wrappers(naming.raw_model)
    naming.name_model(clean)
    naming.name_rest()
    if naming.raw_optimizer:
        naming.name_optimizer(KnownModel(naming.raw_model, clean, shape_of, like, same, orders), only)
    at_root = naming.model_key is None and naming.optimizer_key is not None
    return CanonicalState(naming.out, naming.origin, identify_trainer(naming.tops, model_at_root=at_root), naming.notes)


class _Naming:
    """The stages of `canonical` on one tree: find the components, sort the leaves among them, name each.

    `out` collects the leaves under canonical paths, `origin` the paths that changed. `outer` is the key around
    everything, `model_key` and `optimizer_key` are those inside it, None where there is no such key.
    """

    def __init__(self, leaves: Mapping[Path, object], shape_of: ShapeOf) -> None:
        """Find the keys of the model and of the optimizer in a tree; no leaf is named yet.

        Args:
            leaves: {path in the tree: leaf}.
            shape_of: returns the shape of a tensor leaf, None for a value.
        """
        self.found, self.shape_of = dict(leaves), shape_of
        self.outer: Path = ()
        self.out: Leaves = {}
        self.origin: dict[Path, Path] = {}
        self.notes: list[str] = []
        self.tops = {p[0] for p in self.found}
        self._remove_outer_key()
        model, optimizer = _find_keys_by_name(self.found)
        self.model_key, self.optimizer_key = _find_keys_by_contents(self.found, shape_of, model, optimizer)
        if self.model_key != model:
            self.notes.append(f'"{self.model_key}" is taken for the model: it holds weights, and no other key does')
        self.optimizer_guessed = self.optimizer_key != optimizer
        # the whole tree is what `optimizer.state_dict()` returns
        self.is_bare_optimizer = {"state"} | self.tops == {
            "state",
            "param_groups",
        }  # without state before its first step
        self.raw_model: dict[str, object] = {}  # {name as found: leaf}
        self.places: dict[str, Path] = {}  # {name as found: path}
        self.raw_optimizer: dict[Path, object] = {}
        self.rest: Leaves = {}

    def _remove_outer_key(self) -> None:
        """Remove the only key at the root of the tree, with a note, if a model and more is below it, as in {"app":
        {"model": ..., "optim": ...}}, or an optimizer and more, as in {"optim": {"optim": ..., "sched": ...}}."""
        if len(self.tops) == 1 and len({p[:2] for p in self.found}) > 1:
            inner = {str(p[1]) for p in self.found if len(p) > 2}
            roles = {ROLES.get(n) for n in inner}
            if "model" in roles or ("optim" in roles and not inner & {"state", "param_groups"}):
                self.outer = (next(iter(self.tops)),)
                self.notes.append(
                    f'everything is under the key "{self.outer[0]}"; dcp and full keep it, other layouts do not'
                )
                self.found = {p[1:]: v for p, v in self.found.items()}

    def sort_leaves(self) -> None:
        """Divide the leaves into those of the model, of the optimizer and the rest.

        Raises:
            Corrupt: two paths of the model are one name.
        """
        for p, leaf in self.found.items():
            if self.is_bare_optimizer:
                self.raw_optimizer[p] = leaf
            elif self.model_key is not None and p[0] == self.model_key and len(p) > 1:
                name = joined(p[1:])
                if self.places.setdefault(name, p) != p:
                    raise Corrupt(
                        f"the model has two entries {name!r}, one of them in a dict or list of its own.",
                        code="CKPT0416",
                    )
                self.raw_model[name] = leaf
            elif self.optimizer_key is not None and p[0] == self.optimizer_key and len(p) > 1:
                self.raw_optimizer[p[1:]] = leaf
            elif self._is_weight_at_root(p, leaf):
                self.places[joined(p)] = p
                self.raw_model[joined(p)] = leaf
            else:
                self.rest[p] = leaf

    def _is_weight_at_root(self, path: Path, leaf: object) -> bool:
        """Whether a leaf belongs to a model without a key of its own, whose weights and extra states are at the root
        of the tree."""
        if self.model_key is not None:
            return False
        is_tensor = len(path) == 1 and self.shape_of(leaf) is not None
        return (is_tensor and not _is_known_key(str(path[0]))) or split_extra_state(str(path[0])) is not None

    def name_model(self, clean: Mapping[str, str]) -> None:
        """Put the leaves of the model under model.<FQN>; `clean` is {name as found: FQN}."""
        if self.model_key is not None and (*self.outer, self.model_key) != ("model",):
            self.origin["model",] = (*self.outer, self.model_key)
        for name, leaf in self.raw_model.items():
            path = ("model", clean[name])
            self.out[path] = leaf
            if original_path(path, self.origin) != (*self.outer, *self.places[name]):
                self.origin[path] = (*self.outer, *self.places[name])

    def name_rest(self) -> None:
        """Put the leaves that belong to neither model nor optimizer under their components.

        Raises:
            Corrupt: two keys have one meaning.
        """
        # {canonical path that stands for a key of the user's: that key}; of two keys with one meaning, the first in
        # ROLES, since a folder with a file for each has no order
        tops = {p[0] for p in self.rest}
        owners: dict[Path, str | int] = {}
        for key in filter(tops.__contains__, ROLES):
            owners.setdefault((ROLES[key],), key)
        several = {p[0] for p in self.rest if len(p) < 3 or p[1] != 0}
        for p, leaf in self.rest.items():
            path = _make_canonical_path(p)
            if path[0] == "scheduler" and p[0] not in several:  # Lightning's list of schedulers, of one
                path = (path[0], *p[2:])
            if owners.setdefault(path[: _count_key_elements(path)], p[0]) != p[0]:
                path = ("extra", *p)  # a second key of that kind ("rng" and "rng_state") keeps its name
            if path in self.out:
                earlier = self.origin.get(path, path)
                raise Corrupt(
                    f"the keys {joined(p)!r} and {joined(earlier)!r} both mean {joined(path)!r}.", code="CKPT0416"
                )
            self.out[path] = leaf
            cut = _count_key_elements(path)
            self.origin[path[:cut]] = p[: len(p) - (len(path) - cut)]
            if path[cut:] != p[len(p) - (len(path) - cut) :]:
                self.origin[path] = p
        self.origin = {q: p for q, p in self.origin.items() if q != p}

    def name_optimizer(self, model: KnownModel, only: frozenset[str] | None) -> None:
        """Put the leaves of the optimizer under optim; if its parameters cannot be matched to FQNs, under extra, with a
        note.

        Args:
            model: what is known of the parameters' names.
            only: the components that are asked for; None for all.

        Raises:
            Unsupported: the optimizer cannot be read or its parameters cannot be matched, and it was asked for.
            Corrupt: its entries contradict each other.
        """
        raw = self.raw_optimizer
        own: Path = () if self.optimizer_key is None or self.is_bare_optimizer else (*self.outer, self.optimizer_key)
        if all(p[0] == 0 and len(p) > 1 for p in raw):  # Lightning's list of optimizers, of one
            raw, own = {p[1:]: v for p, v in raw.items()}, (*own, 0)
        if own != ("optim",):
            self.origin["optim",] = own
        try:
            self.out.update(name_optimizer_leaves(raw, model, self.notes, self.origin))
        except Unsupported as e:
            asked = only is not None and "optim" in only
            if self.is_bare_optimizer and not asked:
                self.out.update((("extra", *p), leaf) for p, leaf in raw.items())
                self.origin = {("extra",): ()}
                self.notes.append(f"{KEEPS_NUMBERS}: {e}")
            elif self.optimizer_guessed or (only is None and isinstance(e, UnnamedOptimizer)):
                key = self.optimizer_key
                self.out.update((("extra", *p), leaf) for p, leaf in self.found.items() if p[0] == key)
                self.origin = {q: p for q, p in self.origin.items() if q[0] != "optim"}
                if key is not None:
                    self.origin["extra", key] = (*self.outer, key)
                self.notes.append(
                    f'"{key}" holds an optimizer that cannot be read as one, and is kept as it is, under extra: {e}'
                    if self.optimizer_guessed
                    else f"{KEEPS_NUMBERS}: {e}"
                )
            elif only is None or asked:
                raise


def _find_keys_by_name(found: Mapping[Path, object]) -> tuple[str | int | None, str | int | None]:
    """Return (key of the model, key of the optimizer) at the root of a tree, by what trainers usually call them; None
    for one that is not there. `found` is {path: leaf}."""
    keys: dict[str, str | int] = {}
    for p in found:
        if len(p) > 1 and (role := ROLES.get(str(p[0]))) is not None:
            keys.setdefault(role, p[0])
    return keys.get("model"), keys.get("optim")


def _find_keys_by_contents(
    found: Mapping[Path, object], shape_of: ShapeOf, model: str | int | None, optim: str | int | None
) -> tuple[str | int | None, str | int | None]:
    """Return (key of the model, key of the optimizer) at the root of a tree; a key that is not known by name is
    recognised by the leaves below it. None for one that no key or that several keys fit.

    Args:
        found: {path: leaf}.
        shape_of: returns the shape of a tensor leaf, None for a value.
        model, optim: the keys that are known by name; None for one that is to be found.
    """
    if model is not None and optim is not None:
        return model, optim
    inside: dict[str | int, list[Path]] = {}
    at_root = False
    for p, leaf in found.items():
        if not _is_known_key(str(p[0])) and p[0] not in COMPONENTS:
            inside.setdefault(p[0], []).append(p[1:] if shape_of(leaf) is not None else (*p[1:], ""))
            at_root = at_root or (len(p) == 1 and shape_of(leaf) is not None)
    if model is None and not at_root:
        models = [k for k, of in inside.items() if _are_weight_paths(of)]
        model = models[0] if len(models) == 1 else None
    if optim is None and (model is not None or at_root):
        optims = [k for k, of in inside.items() if _are_optimizer_paths(of)]
        optim = optims[0] if len(optims) == 1 else None
    return model, optim


def _are_weight_paths(paths: Sequence[Path]) -> bool:
    """Whether paths below a key are those of a state dict of weights."""
    return all(len(p) == 1 for p in paths) and any(str(p[0]).endswith(".weight") for p in paths)


def _are_optimizer_paths(paths: Sequence[Path]) -> bool:
    """Whether the paths below a key are those of an optimizer's state dict, or of a list with one such state dict."""
    if all(p and p[0] == 0 for p in paths):
        paths = [p[1:] for p in paths]
    return {p[0] for p in paths if p} | {"state"} == {"state", "param_groups"} and all(len(p) > 1 for p in paths)


def describe_weights_elsewhere(ckpt: Checkpoint) -> str:
    """Return a sentence that names the unknown keys under which a checkpoint without a model has weights, and says
    how to save them as a model; "" if there are no such weights."""
    keys = dict.fromkeys(
        t.path[1:-1]
        for t in ckpt.tensors.values()
        if _are_weight_paths([t.path[-1:]]) and len(t.path) > 2 and t.component == "extra"
    )
    if not keys:
        return ""
    if len(keys) == 1 and ckpt.layout == "full":
        (path,) = keys
        at = "".join(f"[{key!r}]" for key in path)
        return (
            f' Weights are under "{joined(path)}"; as a model: torch.save({{"model": torch.load(FILE){at}}}, '
            '"model.pt").'
        )
    shown = ", ".join(f'"{joined(k)}"' for k in list(keys)[:4]) + (", ..." if len(keys) > 4 else "")
    return f' Weights are under {shown}; save those of the one model under "model", and its optimizer under "optim".'


def _count_key_elements(path: Path) -> int:
    """Count the elements at the beginning of a canonical path that stand for one key at the root of the trainer's
    tree."""
    return 2 if path[0] in ("trainer", "extra") else 1


def _is_known_key(top: str) -> bool:
    """Whether a key at the root of a tree is known by its name, as a component or as a counter of the trainer."""
    return top in ROLES or top in COUNTERS


def _make_canonical_path(p: Path) -> Path:
    """Return the canonical path of a leaf that is neither of the model nor of the optimizer, from its path in the
    tree."""
    role = ROLES.get(str(p[0]))
    if role == "rng" and p[2:] == ("random",):  # what verl and SkyRL call the state of Python's random
        return (role, p[1], "python")
    if role in ("scheduler", "scaler", "rng", "dataloader"):
        return (role, *p[1:])
    is_named = len(p) > 1 and not isinstance(p[1], int)  # no list, whose elements would be beside names
    if role == "trainer" and is_named:
        return ("trainer", *p[1:])
    if str(p[0]) in COUNTERS:
        return ("trainer", *p)
    return p if p[0] == "extra" and is_named else ("extra", *p)


def refuse_surrogates(names: Iterable[str]) -> None:
    """Check that names can be encoded as UTF-8, which safetensors, JSON and folders need.

    Raises:
        Unsupported: a name contains half of a surrogate pair; with the first such name.
    """
    for name in names:
        if not name.isascii() and name.encode("utf-8", "replace").decode() != name:
            raise Unsupported(
                f"The name {name!a} contains half of a surrogate pair, which UTF-8 cannot encode, so the destination "
                "cannot store it. Rename it in the source.",
                code="CKPT0316",
            )


def find_misplaced_path(paths: Sequence[Path]) -> Path | None:
    """Find the first path that belongs to no component, or that is inside another path; None if there is none."""
    leaves = set(paths)
    for path in paths:
        if path[0] not in COMPONENTS or any(path[:n] in leaves for n in range(1, len(path))):
            return path
    return None


def is_trainer_tree_readable(ckpt: Checkpoint) -> bool:
    """Whether the tree with the trainer's own keys (`ckpt.origin`) would be read back as exactly this state; True if
    the checkpoint keeps no such keys."""
    leaves = ckpt.leaves()
    return not ckpt.origin or restore_trainer_tree(leaves, ckpt.origin, same_bytes)[0] is not leaves


def are_own_keys_readable(places: Mapping[Path, Path]) -> bool:
    """Return whether a reader of the trainer's tree would give each of these entries the canonical path that it has
    now.

    Args:
        places: {canonical path: the path in the trainer's tree} of entries that belong to neither model nor optimizer.
    """
    naming = _Naming({}, shape_of)
    naming.rest = {place: path for path, place in places.items()}
    try:
        naming.name_rest()
    except Corrupt:
        return False
    return len(naming.out) == len(places) and all(path == found for path, found in naming.out.items())


#: The note if the trainer's own tree cannot be written.
CANONICAL_KEYS_NOTE = (
    "the keys are ckpttool's canonical ones, not those of the source: with those, this state could not be read again"
)


def restore_trainer_tree(
    leaves: Leaves, origin: Mapping[Path, Path], same: SameTensor | None
) -> tuple[dict[Path, object], list[str]]:
    """Restore the tree that the trainer wrote from canonical leaves, and return ({path: leaf}, notes).

    The canonical leaves themselves are returned if `origin` is empty. They are also returned, with a note, if a reader
    would not find the same state in the trainer's tree: because its parameters are numbered and their names can no
    longer be inferred, or because one key is inside another.

    Args:
        leaves: {canonical path: leaf}.
        origin: {canonical path, or its beginning: the path in the trainer's tree}.
        same: whether two tensor leaves are the same bytes of the same file, as the reader of the tree will judge it.
    """
    if not origin:
        return leaves, []
    try:
        tree = _build_trainer_tree(leaves, origin)
        nest(tree)
        again = canonical(tree, shape_of, None, same).leaves
    except CkpttoolError:
        again = {}
    if again.keys() == leaves.keys() and all(again[p] is leaf or again[p] == leaf for p, leaf in leaves.items()):
        return tree, []
    return leaves, [CANONICAL_KEYS_NOTE]


def _build_trainer_tree(leaves: Mapping[Path, Any], origin: Mapping[Path, Path]) -> Leaves:
    """Build the tree that the trainer wrote, {path: leaf}, from canonical leaves, without checking that it reads back.

    Args:
        leaves: {canonical path: leaf}.
        origin: {canonical path, or its beginning: the path in the trainer's tree}.

    Raises:
        Corrupt: two leaves would have one path, or one tensor several paths.
    """
    outer = origin.get(("model",), ())[:-1]
    states, groups = original_path(("optim", "state"), origin), original_path(("optim", "param_groups"), origin)
    flat = groups[-1] == FLAT_GROUPS
    out: Leaves = {}

    def called(fqn: Any) -> Any:
        """Return what the optimizer calls a parameter: its name there, or its number."""
        return origin.get(("optim", "params", fqn), (fqn,))[0]

    def put(path: Path, leaf: object) -> None:
        """Put a leaf at a path.

        Raises:
            Corrupt: another leaf is there.
        """
        if path in out:
            raise Corrupt(f"two entries have the place {joined(path)!r}.", code="CKPT0416")
        out[path] = leaf

    for path, leaf in leaves.items():
        kind = path[:2]
        if path[0] not in ("model", "optim"):
            put((*outer, *original_path(path, origin)), leaf)
        elif kind == ("optim", "state") and len(path) > 3 and states[-1] == FLAT_STATE:
            put((*states[:-1], f"{FLAT_STATE}{called(path[2])}.{joined(path[3:])}"), leaf)
        elif kind == ("optim", "state") and len(path) > 2:
            name = called(path[2])
            put((*states, Number(name) if isinstance(name, int) else name, *path[3:]), leaf)
        elif kind == ("optim", "param_groups") and len(path) > 3 and flat:
            members = leaves.get((*path[:3], "params"), ())
            if shape_of(leaf) is not None and len(members) != 1:
                raise Corrupt(f"{joined(path)!r} is one tensor of several parameters.", code="CKPT0416")
            for fqn in members if path[3:] != ("params",) else ():
                put((*groups[:-1], f"{FLAT_GROUPS}{called(fqn)}.{joined(path[3:])}"), leaf)
        elif kind == ("optim", "param_groups") and path[3:] == ("params",) and isinstance(leaf, list):
            put((*groups, *path[2:]), [called(fqn) for fqn in leaf])
        else:
            put(original_path(path, origin), leaf)
    if ("optim", "state") in origin and states[-1] == "state" and any(p[0] == "optim" for p in leaves):
        put(states, {})  # an optimizer that has made no step; `load_state_dict` asks for the key
    return out


def with_canonical_keys(named: CanonicalState) -> CanonicalState:
    """Return the state without the trainer's own keys for model and optimizer, for a layout that has no tree of its
    own.

    What `get_extra_state()` of a module gave stays one tree under its FQN, which is how `load_state_dict` wants it.
    """
    origin = {q: p for q, p in named.origin.items() if q[0] not in ("model", "optim")}
    return named._replace(origin=origin | keep_extra_state_trees(named.origin))


def with_component_keys(ckpt: Checkpoint, keys: Mapping[str, str]) -> Checkpoint:
    """Return the checkpoint with the user's keys for components, {component: key}, and plain FQNs below them. A dot in
    a key makes nested dicts: {"model": "app.model"}.

    Raises:
        UsageError: the checkpoint has no such component, or two components have one key.
    """
    have = {p[0] for p in ckpt.leaves()}
    if odd := [name for name in keys if name not in have]:
        raise UsageError(
            f"{argument('keys', odd)}: the checkpoint holds {', '.join(sorted(map(str, have)))}.", code="CKPT0207"
        )
    own = {(name,): tuple(key.split(".")) for name, key in keys.items()}
    if len({*own.values()}) < len(own) or not all(all(path) for path in own.values()):
        raise UsageError(
            f"{argument('keys')} {', '.join(keys.values())}: each component needs a key of its own.", code="CKPT0203"
        )
    kept = {q: p for q, p in ckpt.origin.items() if q[0] not in keys}
    return replace(ckpt, origin={q: p for q, p in (kept | own).items() if q != p})


def original_path(path: Path, origin: Mapping[Path, Path]) -> Path:
    """Return the path that a leaf had in the trainer's tree; its canonical path if `origin` has no other.

    Args:
        path: its canonical path.
        origin: {canonical path, or its beginning: the path in the trainer's tree}.
    """
    for n in range(len(path), 0, -1):
        if path[:n] in origin:
            return (*origin[path[:n]], *path[n:])
    return path
