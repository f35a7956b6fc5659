"""FQNs for the parameters of an optimizer, however it calls them itself: by FQN, flattened to "state.<fqn>.<slot>", or
by number. names.py calls it with the optimizer's part of a tree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import permutations, product
from math import factorial, prod
from typing import Any, NamedTuple

from ..errors import Corrupt, Unsupported, argument
from .checkpoint import Leaves, Path
from .fqns import strip_wrappers
from .paths import is_number_text

__all__ = [
    "FLAT_GROUPS",
    "FLAT_STATE",
    "KnownModel",
    "Orders",
    "SameTensor",
    "ShapeOf",
    "UnnamedOptimizer",
    "assign_names",
    "iterate_possible_orders",
    "name_optimizer_leaves",
]

#: The first part of a key of an optimizer that was flattened.
FLAT_STATE, FLAT_GROUPS = "state.", "param_groups."

#: {FQN: leaf} of a model in this tree, empty where it has none -> {FQN: leaf} in every order that its module may have.
Orders = Callable[[Mapping[str, Any]], Iterable[Mapping[str, Any]]]


#: The shape of a tensor leaf; None of a value.
ShapeOf = Callable[[Any], tuple[int, ...] | None]
#: Whether two tensor leaves are the same bytes of the same file (tied weights).
SameTensor = Callable[[Any, Any], bool]
_Slots = dict[int, dict[Path, tuple[int, ...]]]


class KnownModel(NamedTuple):
    """What names the parameters of an optimizer: the model of the same tree, and what the user or a config adds.

    `leaves` is {name as found: leaf}, `clean` {name as found: FQN}, `like` the FQNs in the order of an optimizer that
    has names. The arguments of `names.canonical` say more.
    """

    leaves: Mapping[str, object]
    clean: Mapping[str, str]
    shape_of: ShapeOf
    like: Sequence[str] | None = None
    same: SameTensor | None = None
    orders: Orders | None = None

    def possible_orders(self) -> Iterable[Mapping[str, object]]:
        """Return the model as {FQN: leaf} in every order that its module may have."""
        model = {self.clean[name]: leaf for name, leaf in self.leaves.items()}
        return self.orders(model) if self.orders is not None else (model,)

    def distinct_tensors(self, model: Mapping[str, object]) -> list[tuple[str, tuple[int, ...]]]:
        """List (FQN, shape) of the tensors of a model, {FQN: leaf}. Tied weights are listed once, under their first
        name, which the optimizer uses."""
        out: list[tuple[str, tuple[int, ...]]] = []
        kept: list[object] = []
        for name, leaf in model.items():
            shape = self.shape_of(leaf)
            if shape is None or (self.same is not None and any(self.same(leaf, k) for k in kept)):
                continue
            kept.append(leaf)
            out.append((name, shape))
        return out


class UnnamedOptimizer(Unsupported):
    """An optimizer numbers its parameters, and nothing tells with certainty which is which."""

    code = "CKPT0308"


def _are_param_groups(x: object) -> bool:
    """Whether `x` is a list of param groups whose keys are all strings. Any other list is kept as a value, since its
    entries would need invented names."""
    return isinstance(x, list) and all(isinstance(k, str) for g in x if isinstance(g, dict) for k in g)


class _RawOptimizer:
    """The leaves of an optimizer sorted by what they are, under the names or numbers that it uses itself.

    `state` is {(parameter, path of the slot): leaf}, `groups` {i: {path of the option: leaf}}, `others` the leaves that
    are neither, under canonical paths. `is_flattened` where keys are "state.<fqn>.<slot>".
    """

    def __init__(self, raw: Mapping[Path, Any]) -> None:
        """Sort the leaves of an optimizer, {path inside it: leaf}, by what they are."""
        self.state: dict[tuple[object, Path], object] = {}
        self.groups: dict[int, Leaves] = {}
        self.others: Leaves = {}
        self.is_flattened = self.has_empty_state = False
        options: dict[str, Leaves] = {}  # {parameter: its options}, of a flattened one
        for p, leaf in raw.items():
            head = str(p[0])
            if head == "state" and len(p) > 2:
                self.state[p[1], p[2:]] = leaf
            elif head == "param_groups" and len(p) > 2 and isinstance(p[1], int):
                self.groups.setdefault(p[1], {})[p[2:]] = leaf
            elif (
                head == "param_groups" and len(p) == 1 and _are_param_groups(leaf)
            ):  # one item, as torch < 2.4 wrote it
                for i, g in enumerate(leaf):
                    self.groups[i] = {(k,): v for k, v in g.items()} if isinstance(g, dict) else {("value",): g}
            elif head.startswith(FLAT_STATE) and len(p) == 1 and head.count(".") >= 2:
                fqn, _, kind = head.removeprefix(FLAT_STATE).rpartition(".")
                self.state[fqn, (kind,)] = leaf
                self.is_flattened = True
            elif head.startswith(FLAT_GROUPS) and len(p) == 1 and head.count(".") >= 2:
                fqn, _, key = head.removeprefix(FLAT_GROUPS).rpartition(".")
                options.setdefault(fqn, {})[key,] = leaf
                self.is_flattened = True
            elif head in ("state", "param_groups") and len(p) == 1 and leaf in ({}, []):
                self.has_empty_state = self.has_empty_state or head == "state"  # no step was made yet
            else:
                self.others["optim", *p] = leaf
        if options:
            self.groups = _group_by_options(options)

    def is_numbered(self) -> bool:
        """Whether the optimizer has parameters, and identifies them by numbers instead of names."""
        ids = [x for g in self.groups.values() for x in _list_group_params(g)]
        ids = ids or [_as_parameter_number(k) for k, _ in self.state]
        return bool(self.state or self.groups) and all(isinstance(x, int) for x in ids)

    def find_fqns(self, clean: Mapping[str, str]) -> dict[str, str]:
        """Return {name that the optimizer uses: FQN}; `clean` is {name of a weight as found: FQN}.

        Raises:
            Corrupt: some groups list names and some numbers, or two names are one FQN.
        """
        listed = {n for g in self.groups.values() for n in _list_group_params(g)}
        if numbers := [n for n in listed if not isinstance(n, str)]:
            raise Corrupt(
                f"optim.param_groups lists parameters by number in one group, first {numbers[0]}, and by name in "
                "another. The file is damaged, or was put together from two optimizers.",
                code="CKPT0417",
            )
        names = {str(k) for k, _ in self.state} | listed
        return dict(strip_wrappers(names)) if not names <= clean.keys() else {n: clean[n] for n in names}


def name_optimizer_leaves(
    raw: Mapping[Path, object], model: KnownModel, notes: list[str], origin: dict[Path, Path]
) -> Leaves:
    """Give the leaves of an optimizer their canonical paths: {("optim", "state", FQN, slot): leaf, ...}.

    Args:
        raw: {path inside the optimizer: leaf}.
        model: what is known of the parameters' names.
        notes: gets a sentence if names were inferred.
        origin: gets the optimizer's own name or number of each parameter, if that is not the FQN, and the key of its
            state.

    Raises:
        UnnamedOptimizer: its parameters are numbered and cannot be matched to FQNs.
        Unsupported: `model.like` has another number of parameters.
        Corrupt: its entries contradict each other.
    """
    own = origin.get(("optim",), ("optim",))
    found = _RawOptimizer(raw)
    if found.is_flattened:
        origin["optim", "state"], origin["optim", "param_groups"] = (*own, FLAT_STATE), (*own, FLAT_GROUPS)
    elif found.has_empty_state:
        origin["optim", "state"] = (*own, "state")
    numbered = found.is_numbered()
    fqns: Mapping[Any, str] = (
        _name_numbered_parameters(found.state, found.groups, model, notes) if numbered else found.find_fqns(model.clean)
    )
    origin.update((("optim", "params", fqn), (name,)) for name, fqn in fqns.items() if fqn != name)
    out: Leaves = {}
    for p, leaf in found.others.items():
        # a parameter without slots has a value: {}, or a dict whose keys are no names
        owner = _find_owner(p[2], fqns, numbered) if p[:2] == ("optim", "state") and len(p) == 3 else None
        out[p if owner is None else (*p[:2], owner)] = leaf
    for (key, slot), leaf in found.state.items():
        owner = _find_owner(key, fqns, numbered)
        if owner is None:
            raise Corrupt(
                f"optim.state has an entry for parameter {key}, which no param group lists; the optimizer would not "
                "know what to do with it. The file is damaged, or was put together from two optimizers.",
                code="CKPT0417",
            )
        out["optim", "state", owner, *slot] = leaf
    for i, g in found.groups.items():
        for k, leaf in g.items():
            if k == ("params",):
                leaf = [fqns.get(_as_parameter_number(x) if numbered else x, x) for x in _list_group_params(g)]
            out["optim", "param_groups", i, *k] = leaf
    return out


def _find_owner(key: object, fqns: Mapping[Any, str], numbered: bool) -> str | None:
    """Return the FQN of the parameter that a key of the optimizer's state belongs to; None if it is that of no
    parameter.

    Args:
        key: a name, a number, or text of digits.
        fqns: {name, or number if the optimizer is `numbered`: FQN}.
        numbered: whether the optimizer identifies parameters by numbers.
    """
    return fqns.get(_as_parameter_number(key) if numbered else str(key))


def _list_group_params(group: Mapping[Path, object]) -> list[Any]:
    """Return the names or the numbers that a param group, {path of an option: leaf}, lists as its parameters; [] if it
    has no list.

    Raises:
        Corrupt: the list has other things, or both names and numbers.
    """
    got = group.get(("params",), [])
    if not isinstance(got, list):
        raise Corrupt(f"optim.param_groups: params is {type(got).__name__}, not a list.", code="CKPT0417")
    inside = [leaf for path, leaf in group.items() if path[0] == "params" and len(path) > 1]
    if not (all(type(x) is int for x in (*got, *inside)) or all(type(x) is str for x in (*got, *inside))):
        raise Corrupt("optim.param_groups: params holds neither names nor numbers alone.", code="CKPT0417")
    return got


def _as_parameter_number(x: object) -> Any:
    """Return the number of a parameter as an int, also where it is text of digits; anything else as it is."""
    return int(x) if isinstance(x, str) and is_number_text(x) else x


def _are_options_equal(a: Mapping[Path, object], b: Mapping[Path, object]) -> bool:
    """Return whether two parameters have equal options. NaN equals NaN here: a file holds one for each parameter."""
    return a.keys() == b.keys() and all(x == b[k] or (x != x and b[k] != b[k]) for k, x in a.items())


def _group_by_options(flat: Mapping[str, Mapping[Path, object]]) -> dict[int, dict[Path, object]]:
    """Make param groups, {number: {path of an option: leaf}}, of {parameter: its options}: parameters with equal
    options were, or could have been, in one group. They are listed under ("params",)."""
    out: list[tuple[Mapping[Path, object], list[str]]] = []
    for fqn, options in flat.items():
        for known, members in out:
            if _are_options_equal(known, options):
                members.append(fqn)
                break
        else:
            out.append((options, [fqn]))
    return {i: {**options, ("params",): members} for i, (options, members) in enumerate(out)}


def _name_numbered_parameters(
    state: Mapping[tuple[object, Path], object],
    groups: Mapping[int, Mapping[Path, object]],
    model: KnownModel,
    notes: list[str],
) -> dict[int, str]:
    """Return {number of a parameter: FQN} for an optimizer that numbers its parameters.

    The surest source comes first: names that the groups list, those of `model.like`, then the order and shapes of the
    model.

    Args:
        state: {(parameter, path of the slot): leaf}; a slot is what the optimizer keeps for a parameter, such as
            exp_avg.
        groups: {number of a param group: {path of an option: leaf}}.
        model: what is known of the parameters' names.
        notes: gets a sentence where names follow from the order of the model.

    Raises:
        UnnamedOptimizer: nothing tells with certainty.
        Unsupported: `model.like` has another number of parameters.
        Corrupt: a group lists something other than parameters.
    """
    slots, shapes = _infer_shapes_by_number(state, groups, model.shape_of)
    members = [_list_group_params(g) for _, g in sorted(groups.items())] or [sorted(shapes)]
    numbers = [x for m in members for x in m]
    # torch >= 2.6 lists names where the optimizer was given named_parameters()
    lists = [g.get(("param_names",)) for _, g in sorted(groups.items())]
    listed = [str(n) for group in lists if isinstance(group, list) for n in group]
    if len(listed) == len(numbers):
        names = strip_wrappers(listed)
        return {x: names[n] for x, n in zip(numbers, listed, strict=True)}
    if model.like is not None:
        if len(model.like) != len(numbers):
            raise Unsupported(
                f"{argument('like')} names {len(model.like)} parameters in its optimizer, this one has {len(numbers)}.",
                code="CKPT0308",
            )
        return dict(zip(numbers, model.like, strict=True))
    resolved, left = _find_names_by_order(
        model, [[shapes[x] for x in m] for m in members], _count_flat_state_elements(slots)
    )
    notes.append(
        "the optimizer numbers its parameters; their names follow from the order and shapes of the model's "
        f"{len(numbers)} parameters"
        + (f" (taken for buffers or frozen: {', '.join(left[:4])}{', ...' if len(left) > 4 else ''})" if left else "")
    )
    return {x: n for m, ns in zip(members, resolved, strict=True) for x, n in zip(m, ns, strict=True)}


def _infer_shapes_by_number(
    state: Mapping[tuple[object, Path], object], groups: Mapping[int, Mapping[Path, object]], shape_of: ShapeOf
) -> tuple[_Slots, dict[int, tuple[int, ...] | None]]:
    """Return ({number of a parameter: {path of a slot: shape}}, {number: shape of the parameter, None where no slot
    tells}).

    Args:
        state: {(parameter, path of the slot): leaf}; a slot is what the optimizer keeps for a parameter, such as
            exp_avg.
        groups: {number of a param group: {path of an option: leaf}}.
        shape_of: returns the shape of a tensor leaf, None for a value.

    Raises:
        Corrupt: a group lists something other than parameters.
    """
    shapes: dict[int, tuple[int, ...] | None] = {x: None for g in groups.values() for x in _list_group_params(g)}
    slots: _Slots = {}
    for (key, slot), leaf in state.items():
        if shape := shape_of(leaf):  # the step is 0-dim and says nothing
            slots.setdefault(_as_parameter_number(key), {})[slot] = shape
        shapes.setdefault(_as_parameter_number(key), None)
    return slots, shapes | {x: _infer_parameter_shape(found) for x, found in slots.items()}


def _find_names_by_order(
    model: KnownModel, wanted: list[list[tuple[int, ...] | None]], flat_elements: int | None
) -> tuple[list[list[str]], list[str]]:
    """Find the FQNs of numbered parameters by the one order of the model that fits their shapes: (FQNs by param group,
    FQNs that are in no group).

    Args:
        model: what is known of the model.
        wanted: the shapes of the parameters by group; None for one that nothing tells.
        flat_elements: elements of all parameters together, if the optimizer keeps its state in one flat tensor; else
            None.

    Raises:
        UnnamedOptimizer: no order fits, or several do.
    """
    count = sum(map(len, wanted))
    answers: dict[str, tuple[list[list[str]], list[str]]] = {}
    ways = tensors = 0
    for order in model.possible_orders():
        candidates = model.distinct_tensors(order)
        tensors = len(candidates)
        if flat_elements == sum(prod(shape) for _, shape in candidates) and count == tensors:
            wanted = [[None] * len(m) for m in wanted]
        resolved, left, found = assign_names(candidates, wanted)
        ways += found
        if resolved is not None:
            answers[repr(resolved)] = resolved, left
    if len(answers) == 1:
        return next(iter(answers.values()))
    if ways:
        why = f"more than one order of the {tensors} tensors of the model fits"
    elif tensors:
        why = f"no order of the {tensors} tensors of the model fits their shapes"
    else:
        why = "nothing here shows the order of the parameters"
    raise UnnamedOptimizer(
        f"the optimizer numbers its {count} parameters instead of naming them, and {why}. Give {argument('config')} "
        f"the folder or id of the model, {argument('like')} a checkpoint of the same model whose optimizer has "
        f"names, or use {argument('only', ['model'])}."
    )


def _infer_parameter_shape(slots: Mapping[Path, tuple[int, ...]]) -> tuple[int, ...] | None:
    """Infer the shape of a parameter from its optimizer state, {path of a slot: shape}.

    It is the shape of the slots with most dimensions, or the product of the factors of a second moment: (n, 1) and (1,
    m) of torch's Adafactor, (n,) and (m,) under *_row and *_col of transformers'. If the largest slots contradict each
    other, it is the shape of the first of them.
    """
    row, col = (next((s for p, s in slots.items() if str(p[-1]).endswith(end)), None) for end in ("_row", "_col"))
    if row is not None and col is not None and len(row) == len(col):
        return (*row, col[-1])
    most = max(map(len, slots.values()))
    largest = [s for s in slots.values() if len(s) == most]
    merged = tuple(map(max, zip(*largest, strict=True)))
    fits = all(n in (1, m) for s in largest for n, m in zip(s, merged, strict=True))
    return merged if fits else largest[0]


def _count_flat_state_elements(slots: _Slots) -> int | None:
    """Count the elements of all parameters together, for an optimizer that keeps its whole state under one
    parameter, as LBFGS does; None for any other. `slots` is {number of a parameter: {path of a slot: shape}}."""
    if len(slots) != 1:
        return None
    (found,) = slots.values()
    lengths = {s for p, s in found.items() if p[:1] in (("d",), ("prev_flat_grad",), ("old_dirs",), ("old_stps",))}
    return next(iter(lengths))[0] if len(lengths) == 1 and len(next(iter(lengths))) == 1 else None


def _make_sibling_sort_key(child: str) -> int:
    """Return a number that sorts a child of a module among its siblings: the number that it is named by, or its
    position in `_KNOWN_CHILDREN`; 0 for any other name."""
    return int(child) if is_number_text(child) else _KNOWN_CHILDREN.index(child) if child in _KNOWN_CHILDREN else 0


_MOST_ORDERS = 720
_MOST_CHILDREN = 100  # parts of a name; no module is as deep
#: Children whose order every module of their kind has.
_KNOWN_CHILDREN = ("lora_A", "lora_B", "weight", "bias")


def iterate_possible_orders(names: Iterable[str]) -> Iterator[list[str]]:
    """Yield every order that `named_parameters()` may have, for names from a file that has sorted them.

    Children of a module list are ordered by number. The order of other children does not follow from their names; all
    modules of one kind (whose paths differ only in numbers) have the same. Nothing is yielded if there are too many
    orders to try.
    """
    parts = {name: name.split(".") for name in names}
    # of each child of a module: the kind of the module, a path without numbers
    kinds_of = {
        name: [(*("#" if c.isdecimal() else c for c in found[:i]),) for i in range(len(found))]
        for name, found in parts.items()
        if len(found) <= _MOST_CHILDREN
    }
    if len(kinds_of) < len(parts):
        return
    unknown: dict[tuple[str, ...], set[str]] = {}
    for name, kinds in kinds_of.items():
        for kind, child in zip(kinds, parts[name], strict=True):
            if not child.isdecimal() and child not in _KNOWN_CHILDREN:
                unknown.setdefault(kind, set()).add(child)
    several = {kind: sorted(children) for kind, children in unknown.items() if len(children) > 1}
    if prod(factorial(len(c)) for c in several.values()) > _MOST_ORDERS:
        return
    for chosen in product(*(permutations(c) for c in several.values())):
        place = {(kind, c): i for kind, order in zip(several, chosen, strict=True) for i, c in enumerate(order)}

        def place_name(
            name: str, place: Mapping[tuple[tuple[str, ...], str], int] = place
        ) -> list[tuple[int, int, str]]:
            """Return a key that sorts names in the chosen order."""
            children = zip(kinds_of[name], parts[name], strict=True)
            return [(place.get((kind, c), 0), _make_sibling_sort_key(c), c) for kind, c in children]

        yield sorted(parts, key=place_name)


_MOST_STATES = 100_000  # more are not worth looking at
_NEVER = 1 << 30  # the cost where nothing fits


def assign_names(
    names: Sequence[tuple[str, tuple[int, ...]]], groups: Sequence[Sequence[tuple[int, ...] | None]]
) -> tuple[list[list[str]] | None, list[str], int]:
    """Find the name of each numbered parameter of an optimizer.

    Optimizers number parameters group by group, and in each group in the order of `model.named_parameters()`, which is
    the order of the state dict. So the groups are disjoint subsequences of the names, matched by shape. Of several
    assignments that fit, only those count that leave the fewest names ending in weight or bias without a group.

    Args:
        names: (name, shape) of the tensors of the model, in order.
        groups: the shapes of the parameters of each group, in order; None fits any shape.

    Returns:
        (names by group, names that are in no group, number of assignments that fit). Names by group is None unless
            exactly one assignment fits; the number is 2 or more if it is ambiguous.
    """
    total = sum(map(len, groups))
    skips = len(names) - total
    if skips < 0:
        return None, [], 0

    def moves(i: int, at: tuple[int, ...]) -> list[tuple[int, tuple[int, tuple[int, ...]]]]:
        """List the ways to use name i after `at[g]` parameters of each group have names: (group or -1, (cost, next
        state))."""
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
