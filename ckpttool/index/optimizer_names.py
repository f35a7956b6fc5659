"""The state of an optimizer under the names of the parameters, however the optimizer itself calls them: by FQN,
flattened to "state.<fqn>.<slot>", or by number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import permutations, product
from math import factorial, prod
from typing import Any

from ..errors import Corrupt, Unsupported, argument
from .checkpoint import Path
from .fqns import strip_wrappers

__all__ = [
    "FLAT_GROUPS",
    "FLAT_STATE",
    "Orders",
    "UnnamedOptimizer",
    "canonical_optimizer",
    "name_order",
    "possible_orders",
]

#: The first part of a key of an optimizer that was flattened.
FLAT_STATE, FLAT_GROUPS = "state.", "param_groups."

#: {FQN: leaf} of a model in this tree, empty where it has none -> {FQN: leaf} in every order that its module may have.
Orders = Callable[[Mapping[str, Any]], Iterable[Mapping[str, Any]]]


class UnnamedOptimizer(Unsupported):
    """An optimizer numbers its parameters, and nothing tells with certainty which is which."""


def _are_groups(x: Any) -> bool:
    """A list of param groups whose keys are all strings; another one stays a value, since a name would be made up."""
    return isinstance(x, list) and all(isinstance(k, str) for g in x if isinstance(g, dict) for k in g)


def canonical_optimizer(
    raw: dict[Path, Any],
    raw_model: Mapping[str, Any],
    clean: Mapping[str, str],
    shape_of: Any,
    like: Sequence[str] | None,
    same: Any,
    notes: list[str],
    origin: dict[Path, Path],
    orders: Orders | None = None,
) -> dict[Path, Any]:
    """The leaves of the optimizer under their canonical paths; how they were called is added to `origin`.

    Raises:
        UnnamedOptimizer: its parameters are numbered and cannot be named. Unsupported: `like` has another number of
        them. Corrupt: it
            contradicts itself.
    """
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
            fqn, _, kind = head[len(FLAT_STATE) :].rpartition(".")
            state[fqn, (kind,)] = leaf
            flat = True
        elif head.startswith("param_groups.") and len(p) == 1 and head.count(".") >= 2:
            fqn, _, key = head[len(FLAT_GROUPS) :].rpartition(".")
            flat_groups.setdefault(fqn, {})[key,] = leaf
        elif head in ("state", "param_groups") and len(p) == 1 and leaf in ({}, []):
            if head == "state":
                origin["optim", "state"] = (*own, "state")  # no state yet
        else:
            out["optim", *p] = leaf
    if flat or flat_groups:
        origin["optim", "state"], origin["optim", "param_groups"] = (*own, FLAT_STATE), (*own, FLAT_GROUPS)
    if flat_groups:
        groups = _regroup(flat_groups)
    ids = bool(state or groups) and _integer_ids(state, groups)
    if ids:
        fqns = _resolve_ids(state, groups, raw_model, clean, shape_of, like, same, notes, orders)
    else:
        listed = {n for g in groups.values() for n in _params(g)}
        if numbers := [n for n in listed if not isinstance(n, str)]:
            raise Corrupt(
                f"optim.param_groups lists parameters by number in one group, first {numbers[0]}, and by name in "
                "another. The file is damaged, or was put together from two optimizers."
            )
        names = {str(k) for k, _ in state} | listed
        fqns = dict(strip_wrappers(names)) if not names <= clean.keys() else {n: clean[n] for n in names}
    origin.update((("optim", "params", fqn), (name,)) for name, fqn in fqns.items() if fqn != name)
    for (key, slot), leaf in state.items():
        owner = fqns.get(_id(key) if ids else str(key))
        if owner is None:
            raise Corrupt(
                f"optim.state has an entry for parameter {key}, which no param group lists; the optimizer would not "
                "know what to do with it. The file is damaged, or was put together from two optimizers."
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
    orders: Orders | None,
) -> dict[Any, str]:
    shapes: dict[int, tuple[int, ...] | None] = {x: None for g in groups.values() for x in _params(g)}
    slots: dict[int, dict[Path, tuple[int, ...]]] = {}
    for (key, slot), leaf in state.items():
        if shape := shape_of(leaf):  # the step is 0-dim and says nothing
            slots.setdefault(_id(key), {})[slot] = shape
        shapes.setdefault(_id(key), None)
    shapes |= {x: _shape_of_parameter(found) for x, found in slots.items()}
    flat_state = _flat_state(slots)
    members = [_params(g) for _, g in sorted(groups.items())] or [sorted(shapes)]
    named = [g.get(("param_names",)) for _, g in sorted(groups.items())]
    listed = [str(n) for group in named if isinstance(group, list) for n in group]
    flat = [x for m in members for x in m]
    if len(listed) == len(flat):  # torch >= 2.6, when the optimizer was given named_parameters()
        names = strip_wrappers(listed)
        return {x: names[n] for x, n in zip(flat, listed, strict=True)}
    if like is not None:
        if len(like) != len(flat):
            raise Unsupported(
                f"{argument('like')} names {len(like)} parameters in its optimizer, this one has {len(flat)}."
            )
        return dict(zip(flat, like, strict=True))
    wanted = [[shapes[x] for x in m] for m in members]
    model = {clean[name]: leaf for name, leaf in raw_model.items()}
    answers: dict[str, tuple[list[list[str]], list[str]]] = {}
    ways = tensors = 0
    for order in orders(model) if orders is not None else (model,):
        candidates = _distinct(order, shape_of, same)
        tensors = len(candidates)
        if (
            flat_state is not None
            and flat_state == sum(prod(shape) for _, shape in candidates)
            and len(flat) == tensors
        ):
            wanted = [[None] * len(m) for m in members]
        resolved, left, found = name_order(candidates, wanted)
        ways += found
        if resolved is not None:
            answers[repr(resolved)] = resolved, left
    if len(answers) != 1:
        raise UnnamedOptimizer(
            f"the optimizer numbers its {len(flat)} parameters instead of naming them, and "
            + (
                f"more than one order of the {tensors} tensors of the model fits"
                if ways
                else f"no order of the {tensors} tensors of the model fits their shapes"
                if tensors
                else "nothing here shows the order of the parameters"
            )
            + f". Give {argument('config')} the folder or id of the model, {argument('like')} a checkpoint of the same "
            f"model whose optimizer has names, or use {argument('only', ['model'])}."
        )
    ((resolved, left),) = answers.values()
    notes.append(
        "the optimizer numbers its parameters; their names follow from the order and shapes of the model's "
        f"{len(flat)} parameters"
        + (f" (taken for buffers or frozen: {', '.join(left[:4])}{', ...' if len(left) > 4 else ''})" if left else "")
    )
    return {x: n for m, ns in zip(members, resolved, strict=True) for x, n in zip(m, ns, strict=True)}


def _shape_of_parameter(slots: Mapping[Path, tuple[int, ...]]) -> tuple[int, ...] | None:
    """The shape of a parameter from those of its slots: that of the slots with most dimensions, or what factors of a
    second moment multiply to: (n, 1) and (1, m) of torch's Adafactor, (n,) and (m,) under *_row and *_col of
    transformers'."""
    row, col = (next((s for p, s in slots.items() if str(p[-1]).endswith(end)), None) for end in ("_row", "_col"))
    if row is not None and col is not None and len(row) == len(col):
        return (*row, col[-1])
    most = max(map(len, slots.values()))
    largest = [s for s in slots.values() if len(s) == most]
    merged = tuple(map(max, zip(*largest, strict=True)))
    fits = all(n in (1, m) for s in largest for n, m in zip(s, merged, strict=True))
    return merged if fits else largest[0]


def _flat_state(slots: Mapping[int, Mapping[Path, tuple[int, ...]]]) -> int | None:
    """The elements of all parameters together, of an optimizer that keeps its whole state with the first (LBFGS); else
    None."""
    if len(slots) != 1:
        return None
    (found,) = slots.values()
    lengths = {s for p, s in found.items() if p[:1] in (("d",), ("prev_flat_grad",), ("old_dirs",), ("old_stps",))}
    return next(iter(lengths))[0] if len(lengths) == 1 and len(next(iter(lengths))) == 1 else None


def _distinct(model: Mapping[str, Any], shape_of: Any, same: Any) -> list[tuple[str, tuple[int, ...]]]:
    """(FQN, shape) of the tensors of a model, without second names of tied weights: the optimizer has the first."""
    out: list[tuple[str, tuple[int, ...]]] = []
    kept: list[Any] = []
    for name, leaf in model.items():
        shape = shape_of(leaf)
        if shape is None or (same is not None and any(same(leaf, k) for k in kept)):
            continue
        kept.append(leaf)
        out.append((name, shape))
    return out


def _usual_place(child: str) -> int:
    """Where a child stands among its siblings whose order is known: its number, or its place in `_KNOWN_CHILDREN`."""
    return int(child) if child.isdigit() else _KNOWN_CHILDREN.index(child) if child in _KNOWN_CHILDREN else 0


_MOST_ORDERS = 720
#: Children whose order every module of their kind has.
_KNOWN_CHILDREN = ("lora_A", "lora_B", "weight", "bias")


def possible_orders(names: Iterable[str]) -> Iterator[list[str]]:
    """Every order that `named_parameters()` may have of names that a file has sorted.

    Modules of a list come by number. The other children of a module come in an order that the names do not tell;
    modules of one kind (those whose paths differ in numbers alone) share it. None where there are more orders than are
    worth trying.
    """
    tree: dict[str, Any] = {}
    for name in names:
        node = tree
        for part in name.split("."):
            node = node.setdefault(part, {})
    kinds: dict[tuple[str, ...], set[str]] = {}

    def look(node: Mapping[str, Any], path: tuple[str, ...]) -> None:
        unknown = {c for c in node if not c.isdigit() and c not in _KNOWN_CHILDREN}
        kinds.setdefault(path, set()).update(unknown)
        for c, below in node.items():
            look(below, (*path, "#" if c.isdigit() else c))

    look(tree, ())
    open_kinds = {path: sorted(children) for path, children in kinds.items() if len(children) > 1}
    if prod(factorial(len(c)) for c in open_kinds.values()) > _MOST_ORDERS:
        return

    for chosen in product(*(permutations(c) for c in open_kinds.values())):
        place = {path: {c: i for i, c in enumerate(order)} for path, order in zip(open_kinds, chosen, strict=True)}

        def walk(node: Mapping[str, Any], path: tuple[str, ...], at: str, place: Any = place) -> Iterator[str]:
            if not node:
                yield at
            for c in sorted(node, key=lambda c: (place.get(path, {}).get(c, 0), _usual_place(c))):
                yield from walk(node[c], (*path, "#" if c.isdigit() else c), f"{at}.{c}" if at else c)

        yield list(walk(tree, (), ""))


_MOST_STATES = 100_000  # more are not worth looking at
_NEVER = 1 << 30  # the cost where nothing fits


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
    reached: list[dict[tuple[int, ...], None]] = [{start: None}]  # states after the first i names
    states = 1
    for i in range(len(names)):
        reached.append({nxt: None for at in reached[i] for _, (_, nxt) in moves(i, at)})
        states += len(reached[-1])
        if states > _MOST_STATES:  # many groups of like shapes: layer-wise learning rates, say
            return None, [], 2
    # from the last name to the first: (fewest parameter-like names skipped from here on, number of ways with so few)
    done = tuple(map(len, groups))
    best: list[dict[tuple[int, ...], tuple[int, int]]] = [{} for _ in reached]
    best[-1] = {at: (0, 1) if at == done else (_NEVER, 0) for at in reached[-1]}
    for i in range(len(names) - 1, -1, -1):
        for at in reached[i]:
            cost, ways = _NEVER, 0
            for _, (extra, nxt) in moves(i, at):
                c, w = best[i + 1][nxt]
                if w and c + extra < cost:
                    cost, ways = c + extra, w
                elif w and c + extra == cost:
                    ways += w
            best[i][at] = cost, ways
    cost, ways = best[0][start]
    if ways != 1:
        return None, [], ways
    resolved: list[list[str]] = [[] for _ in groups]
    left: list[str] = []
    at = start
    for i in range(len(names)):
        for g, (extra, nxt) in moves(i, at):
            c, w = best[i + 1][nxt]
            if w and c + extra == cost:
                cost, at = c, nxt
                (resolved[g] if g >= 0 else left).append(names[i][0])
                break
    return resolved, left, 1
