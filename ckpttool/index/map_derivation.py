"""A name map that is proposed from two models: which weight of one is which of the other, by evidence that each line
states.

    the same bytes        only these two have them: exact
    the same name         and shape
    the only shape        no other weight of that layer has it, in either model
    order and name        weights of a layer with equal shapes, where the order of both models and their names agree

Equal shapes that only the order, or only the names, tell apart are proposals, which stay comments of the map: so a
conversion refuses their names until somebody decides. Layers are told by the first number of a name.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

__all__ = ["NamedWeight", "ProposedMap", "propose_map"]

SAME_BYTES, SAME_NAME, ONLY_SHAPE, ORDER_AND_NAME, EQUAL_LOGITS = _EVIDENCE = (
    "the same bytes in both",
    "the same name and shape in both",
    "the only ones of their shape in their layer",
    "equal shapes: their order in both models and their names agree",
    "proposals by order or names alone, with which the logits of both models are equal",
)
_NUMBER = re.compile(r"(?<![^.])(?:0|[1-9]\d{0,8})(?![^.])")
_VARIABLES = "ijklmnop"
#: Numbers of a name that become variables: all, that of the layer, none.
_LEVELS = (len(_VARIABLES), 1, 0)
_NAME = re.compile(r"[^\s\[\]=+#{}]*[^\s\[\]=+#{}:]")
#: Words that begin other lines of a map.
_WORDS = frozenset(("sides", "about", "trainer", "models", "size", "include", "ignore", "ignore-zero", "needs"))
_WORDS |= {"premise", "add-one", "when"}


class NamedWeight(NamedTuple):
    """A weight of a model: its name, its shape, and the digest of its bytes and dtype; None where there are none."""

    name: str
    shape: tuple[int, ...]
    digest: str | None = None


@dataclass
class ProposedMap:
    """What is known of the weights of two models: `decided` and `proposed` {name in A: (name in B, why)}; `left_a` and
    `left_b` {name: why it is undecided}."""

    decided: dict[str, tuple[str, str]] = field(default_factory=dict)
    proposed: dict[str, tuple[str, str]] = field(default_factory=dict)
    left_a: dict[str, str] = field(default_factory=dict)
    left_b: dict[str, str] = field(default_factory=dict)
    names_a: Sequence[str] = ()
    names_b: Sequence[str] = ()

    def write(self, sides: tuple[str, str], models: str | None, about: str, notes: Iterable[str] = ()) -> str:
        """Return the text of the name map: a line for each decided pair, and comments for proposals and for weights
        without a partner.

        Args:
            sides: the names of A and B for messages.
            models: the model type of B's config.json; None if it is not known.
            about: the text of the map's `about` line.
            notes: comments for the head of the map.
        """
        head = [f"about    {about}", f"sides    {sides[0]} | {sides[1]}", *([f"models   {models}"] if models else [])]
        out = [*head, "", *(f"# {note}" for note in notes)]
        lines = self._make_lines(self.decided)
        for why in _EVIDENCE:
            if found := [line for line, reasons in lines.items() if max(reasons, key=_EVIDENCE.index) == why]:
                out += ["", f"# {why}", *found]
        for line, reasons in self._make_lines(self.proposed).items():
            out += [
                "",
                f"# UNDECIDED, a proposal by {', '.join(sorted(reasons))}: remove the # if it is right",
                f"#{line}",
            ]
        for side, left in (("A", self.left_a), ("B", self.left_b)):
            by_why: dict[str, dict[str, None]] = {}
            for name, why in left.items():
                by_why.setdefault(why, {})[
                    _replace_numbers(name, _LEVELS[0])[0] if _fits_map_syntax(name) else repr(name)
                ] = None
            for why, folded in by_why.items():
                out += ["", f"# UNDECIDED, in {side} ({sides[side == 'B']}): {why}", *(f"#   {n}" for n in folded)]
        return "\n".join(out) + "\n"

    def accept_proposals(self) -> ProposedMap:
        """Return a copy in which all proposed pairs are decided, because the logits of both models are equal with
        them; the caller has compared these."""
        proven = {x: (y, EQUAL_LOGITS) for x, (y, _) in self.proposed.items()}
        return replace(self, decided=self.decided | proven, proposed={})

    def _make_lines(self, pairs: Mapping[str, tuple[str, str]]) -> dict[str, set[str]]:
        """Return {line of a name map: the reasons for it} for pairs {name in A: (name in B, reason)}; a line has
        variables where it holds for all weights of both models that it matches."""
        out: dict[str, set[str]] = {}
        rest = dict(pairs)
        for level in _LEVELS:
            size_a, size_b = (
                Counter(_replace_numbers(n, level)[0] for n in names) for names in (self.names_a, self.names_b)
            )
            groups: dict[tuple[str, str], list[str]] = defaultdict(list)
            for x, (y, _) in rest.items():
                (p, n), (q, m) = _replace_numbers(x, level), _replace_numbers(y, level)
                if n == m:
                    groups[p, q].append(x)
            for (p, q), members in groups.items():
                if size_a[p] == size_b[q] == len(members):
                    out[f"{p} = {q}"] = {rest.pop(x)[1] for x in members}
        return out


class _Family(NamedTuple):
    """Weights whose names differ only in numbers: the name with variables, and {numbers: name}."""

    pattern: str
    names: dict[tuple[int, ...], str]


def propose_map(a: Sequence[NamedWeight], b: Sequence[NamedWeight], ordered: bool) -> ProposedMap:
    """Propose a name map from model A to model B, with the evidence for each pair of weights.

    Digests are used if at least half of the elements of A, counted over weights whose shape B has too, have equal
    digests in B. Otherwise B is assumed to hold other values of the model.

    Args:
        a, b: the weights of the two models.
        ordered: whether both lists are in the order of the modules, so that the order is evidence.
    """
    return _Derivation(a, b, ordered).run()


class _Derivation:
    """Two models on the way to a map.

    `weights`  {name: weight} of A and of B that have no partner yet, in order
    `out`      the map so far
    """

    def __init__(self, a: Sequence[NamedWeight], b: Sequence[NamedWeight], ordered: bool) -> None:
        """Prepare to pair the weights of two models; those whose names a map cannot contain are left without a partner.

        Args:
            a, b: the weights of the two models.
            ordered: whether both lists are in the order of the modules, so that the order is evidence.
        """
        self.out = ProposedMap(names_a=[w.name for w in a], names_b=[w.name for w in b])
        self.weights = tuple({w.name: w for w in side if _fits_map_syntax(w.name)} for side in (a, b))
        self.ordered = ordered
        for side, left in ((a, self.out.left_a), (b, self.out.left_b)):
            left |= {w.name: "a map cannot hold such a name" for w in side if not _fits_map_syntax(w.name)}

    def run(self) -> ProposedMap:
        """Pair weights from the strongest evidence to the weakest, and return the map, with a reason for each weight
        that has no partner."""
        same = self._find_same_bytes()
        if same is None:
            self.weights = tuple({n: w._replace(digest=None) for n, w in side.items()} for side in self.weights)
        else:
            self._add_decided_pairs(same, SAME_BYTES)
        left, right = self.weights
        key = self._make_match_key
        self._add_decided_pairs({n: n for n, w in left.items() if n in right and key(w) == key(right[n])}, SAME_NAME)
        for level in _LEVELS:
            self._pair_families(level)
        self._explain_unpaired()
        return self.out

    @staticmethod
    def _make_match_key(w: NamedWeight) -> tuple[object, ...]:
        """Return (number of the layer, shape, digest), which two weights must have in common to be paired; the
        digest is None if digests are not used."""
        numbers = _NUMBER.findall(w.name)
        return (numbers[0] if numbers else None, w.shape, w.digest)

    def _find_same_bytes(self) -> dict[str, str] | None:
        """Return {name in A: name in B} of weights that have equal shapes and digests, which no other weight of either
        model has.

        None if there are none, or if they show that the models hold other values: of the elements of A with a weight of
        their shape in B, fewer than half have equal digests there.
        """
        left, right = ({w.name: (w.shape, w.digest) for w in side.values() if w.digest} for side in self.weights)
        count_a, count_b = Counter(left.values()), Counter(right.values())
        by_bytes = {what: n for n, what in right.items()}
        found = {n: by_bytes[what] for n, what in left.items() if count_a[what] == count_b[what] == 1}
        shapes = {shape for shape, _ in right.values()}

        def measure(names: Iterable[str]) -> int:
            """Return how many elements these weights of A have."""
            return sum(_count_elements(left[n][0]) for n in names)

        comparable = measure(n for n, (shape, _) in left.items() if shape in shapes)
        return found if found and 2 * measure(n for n, w in left.items() if w in count_b) >= comparable else None

    def _add_decided_pairs(self, pairs: Mapping[str, str], why: str) -> None:
        """Add pairs {name in A: name in B} to the decided ones, with the reason `why`, and remove them from the
        unpaired weights."""
        self.out.decided |= {x: (y, why) for x, y in pairs.items()}
        self._remove_pairs(pairs)

    def _remove_pairs(self, pairs: Mapping[str, str]) -> None:
        """Remove pairs {name in A: name in B} from the unpaired weights."""
        for x, y in pairs.items():
            del self.weights[0][x], self.weights[1][y]

    def _pair_families(self, level: int) -> None:
        """Pair families of weights that have the same numbers in their names and, for each number, the same shape, if
        no other weight of these layers has such a shape.

        Args:
            level: how many numbers of a name, from the first on, become variables.
        """
        found: tuple[dict[frozenset[tuple[tuple[int, ...], tuple[object, ...]]], list[_Family]], ...] = ({}, {})
        for side, classes in zip(self.weights, found, strict=True):
            families: dict[str, dict[tuple[int, ...], str]] = {}
            for n in side:
                pattern, numbers = _replace_numbers(n, level)
                families.setdefault(pattern, {})[numbers] = n
            for pattern, names in families.items():
                signature = frozenset((numbers, self._make_match_key(side[n])) for numbers, n in names.items())
                classes.setdefault(signature, []).append(_Family(pattern, names))
        counts = [Counter(map(self._make_match_key, side.values())) for side in self.weights]
        for signature, ours in found[0].items():
            theirs = found[1].get(signature, [])
            keys = Counter(key for _, key in signature)
            if len(ours) != len(theirs) or any(c[k] != n * len(ours) for c in counts for k, n in keys.items()):
                continue  # others in these layers have these shapes
            if len(ours) == 1:
                self._add_decided_pairs(_pair_names(ours, theirs), ONLY_SHAPE)
                continue
            self._pair_ambiguous_families(ours, theirs)

    def _pair_ambiguous_families(self, ours: list[_Family], theirs: list[_Family]) -> None:
        """Pair families that have the same shapes, by the order and the names: decided where both agree, proposed
        where only one of them gives an answer, unpaired where they disagree."""
        by_name = _match_by_names([f.pattern for f in ours], [f.pattern for f in theirs])
        by_order = theirs if self.ordered else None
        wanted = None if by_name is None else [theirs[k] for k in by_name]
        if wanted is not None and wanted == by_order:
            self._add_decided_pairs(_pair_names(ours, wanted), ORDER_AND_NAME)
        elif (one := wanted or by_order) is not None and None in (wanted, by_order):
            pairs = _pair_names(ours, one)
            self.out.proposed |= {x: (y, "names alone" if wanted else "order alone") for x, y in pairs.items()}
            self._remove_pairs(pairs)

    def _explain_unpaired(self) -> None:
        """Write into `left_a` and `left_b` why each unpaired weight has no partner."""
        ours, theirs = self.weights
        for side, others, left, other in (
            (ours, theirs, self.out.left_a, "B"),
            (theirs, ours, self.out.left_b, "A"),
        ):
            shapes, of_bytes = {w.shape for w in others.values()}, {w.digest for w in others.values()}
            for n, w in side.items():
                size = "x".join(map(str, w.shape)) or "no dimensions"
                if w.shape not in shapes:
                    left[n] = f"{size}, and none in {other} is left of this shape: cut, joined or transposed there?"
                elif w.digest not in of_bytes:
                    left[n] = f"{size}, and none in {other} has these bytes: rows in another order there?"
                else:
                    left[n] = f"{size}, and several in {other} may be it: nothing tells them apart"


def _fits_map_syntax(name: str) -> bool:
    """Whether a line of a name map can contain this name."""
    return _NAME.fullmatch(name) is not None and name.isprintable() and name not in _WORDS


def _count_elements(shape: tuple[int, ...]) -> int:
    """Return the number of elements of a shape; a tensor without dimensions has one."""
    n = 1
    for size in shape:
        n *= size
    return n


def _replace_numbers(name: str, most: int) -> tuple[str, tuple[int, ...]]:
    """Return (a name with variables in place of its first `most` numbers, such as "layers.{i}.w"; these numbers)."""
    letters: Iterator[str] = iter(_VARIABLES)
    numbers = tuple(map(int, _NUMBER.findall(name)[:most]))
    return (_NUMBER.sub(lambda _: f"{{{next(letters)}}}", name, count=most) if most else name), numbers


def _pair_names(ours: Sequence[_Family], theirs: Sequence[_Family]) -> dict[str, str]:
    """Return {name in A: name in B} for families of A and of B in the same order, whose weights are matched by
    number."""
    return {n: y.names[numbers] for x, y in zip(ours, theirs, strict=True) for numbers, n in x.names.items()}


def _match_by_names(ours: Sequence[str], theirs: Sequence[str]) -> list[int] | None:
    """Return, for each name of A, the position of the name of B that is similar to it, judged by the words that not
    all names of its side have. The one name of A that is similar to none gets the one name of B that remains. None
    if that is ambiguous."""
    x, y = _find_distinct_words(ours), _find_distinct_words(theirs)
    scores = [[sum(_are_similar_words(v, w) for v in p for w in q) for q in y] for p in x]
    best = [max(row) for row in scores]
    if not any(best) or best.count(0) > 1 or any(s and row.count(s) > 1 for s, row in zip(best, scores, strict=True)):
        return None
    clear = {row.index(s) for s, row in zip(best, scores, strict=True) if s}
    spare = [k for k in range(len(y)) if k not in clear]
    if len(spare) != best.count(0):
        return None
    return [row.index(s) if s else spare[0] for s, row in zip(best, scores, strict=True)]


def _are_similar_words(x: str, y: str) -> bool:
    """Whether two words are alike: "embed" and "embeddings", "q" and "wq"; not "o" and "post"."""
    short, long = sorted((x, y), key=len)
    return short in long and (len(short) > 2 or (len(long) - len(short) < 2 and len(long) < 3) or x == y)


def _find_distinct_words(names: Collection[str]) -> list[set[str]]:
    """Return, for each name, the set of its words (parts between dots or underscores) that not all of the names
    have."""
    split = [set(re.split(r"[._]", n)) for n in names]
    return [words - set.intersection(*split) for words in split]
