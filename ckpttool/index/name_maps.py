"""Name maps: how one program names and lays out the weights that another one has under other names, as a small text.

    sides    torchtitan | transformers
    trainer  torchtitan
    models   llama
    size     h = head_dim | hidden_size / num_attention_heads

    norm.weight                       = model.norm.weight
    layers.{i}.feed_forward.w1.weight = model.layers.{i}.mlp.gate_proj.weight
    layers.{i}.wqkv.weight [(g (n+1+1) h) x]
        = q.{i}.weight [(g n h) x] + k.{i}.weight [(g h) x] + v.{i}.weight [(g h) x]
    layers.{i}.experts.w1 [e f x]     = model.layers.{i}.experts.{e}.up_proj.weight [f x]

A line is an equation of tensors, so it is read in both directions. `{i}` is a number, `{*}` any text. Axes in square
brackets (axes.py) are needed where a tensor is cut, joined, permuted or transposed; without them it is renamed.
docs/reference/name-maps.md has the whole format.

`parse_name_map` reads it; what a checkpoint becomes is in engine/transform/mapping.py.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from ..errors import UsageError
from .axes import Axes
from .checkpoint import ITEMSIZE
from .expressions import check_expression, evaluate, list_expression_keys

__all__ = ["AddedOne", "Copied", "Ignored", "MapLine", "NameMap", "NamePattern", "Premise", "parse_name_map"]

_VARIABLE = re.compile(r"\{(\.?)([A-Za-z]\w*(?=[+}])|\*(?=\}))(?:\+(\w+))?\}", re.ASCII)
_REST = "*"  # the variable that is any text
_TENSOR = re.compile(r"\s*((?:\{[^\s\[\]={}]*\}|[^\s\[\]=+{}])+)\s*(?:\[([^\]]*)\])?\s*")
_COMPONENTS = ("model", "optim")


@dataclass(frozen=True)
class NamePattern:
    """A name with variables on one side of a line, and the axes of its tensor; None where it is only renamed.

    {i+12} in a name is a number of at least 12, and the variable i is 12 less; {i+layers} is that for the size `layers`
    (`with_sizes`), and counts from 0 as long as the size is not known.
    """

    name: str
    axes: Axes | None

    @cached_property
    def variables(self) -> tuple[str, ...]:
        """List the variables in its name."""
        return tuple(m[2] for m in _VARIABLE.finditer(self.name))

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Return the regular expression that matches all names of the pattern, with a group for each variable."""
        out, at = "", 0
        for m in _VARIABLE.finditer(self.name):
            out += re.escape(self.name[at : m.start()]) + ("(.+)" if m[2] == _REST else r"(0|[1-9]\d{0,8})")
            at = m.end()
        return re.compile(out + re.escape(self.name[at:]), re.DOTALL)

    def match(self, name: str) -> dict[str, Any] | None:
        """Return {variable: its number, or the text that {*} stands for} of a name; None if the pattern does not match
        it."""
        m = self.pattern.fullmatch(name)
        if m is None:
            return None
        found: dict[str, Any] = {}
        for v, text in zip(_VARIABLE.finditer(self.name), m.groups(), strict=True):
            found[v[2]] = text if v[2] == _REST else int(text) - _read_offset(v)
            if v[3] and found[v[2]] < 0:
                return None
        return found

    def named(self, values: Mapping[str, Any]) -> str:
        """Return the name with its variables replaced by `values`, a dict as `match` returns it."""
        return _VARIABLE.sub(lambda m: str(values[m[2]] + _read_offset(m) if m[3] else values[m[2]]), self.name)

    @property
    def sizes(self) -> list[str]:
        """List the names of the sizes that the pattern adds to variables, such as "layers" in {i+layers}, without those
        that were replaced by numbers."""
        return [m[3] for m in _VARIABLE.finditer(self.name) if m[3] and not m[3].isdecimal()]

    def with_sizes(self, sizes: Mapping[str, int]) -> NamePattern:
        """Return the pattern with the sizes that are added to its variables replaced by their numbers.

        Args:
            sizes: {size: number}; sizes that are not among them are kept.
        """
        if not self.sizes:
            return self

        def put_number(m: re.Match[str]) -> str:
            """Return the text of a variable with the number of its size."""
            return f"{{{m[1]}{m[2]}+{sizes.get(m[3], m[3])}}}" if m[3] else m[0]

        return replace(self, name=_VARIABLE.sub(put_number, self.name))

    @property
    def literal(self) -> int:
        """Count the characters of the name that are no variables."""
        return len(_VARIABLE.sub("", self.name))

    def __str__(self) -> str:
        """Return the pattern as a name map writes it: the name, and the axes in brackets, if there are any."""
        return self.name + ("" if self.axes is None else f" [{self.axes}]")


@dataclass(frozen=True)
class MapLine:
    """An equation: `whole` is made of `parts`, one for each term of its sum, and for each number of `stacked`
    variables, which are axes of the whole. `flipped` where the whole is on the right. `component` is the only one it is
    about ("model", "optim"), or None. `condition` is an expression over the job's arguments: the line counts where it
    is true; None where it always does."""

    whole: NamePattern
    parts: tuple[NamePattern, ...]
    stacked: frozenset[str]
    flipped: bool
    component: str | None = None
    condition: str | None = None

    def tensors(self, right: bool) -> tuple[NamePattern, ...]:
        """Return the patterns on the right side of the line, or, where `right` is false, on the left."""
        return (self.whole,) if self.flipped == right else self.parts

    def with_sizes(self, sizes: Mapping[str, int]) -> MapLine:
        """Return the line with sizes that its names add to variables, such as "layers" in {i+layers}, replaced by
        numbers.

        Args:
            sizes: {name of a size: its number}; sizes that are not among them are kept.
        """
        return replace(self, whole=self.whole.with_sizes(sizes), parts=tuple(t.with_sizes(sizes) for t in self.parts))

    @property
    def sizes(self) -> list[str]:
        """List the names of the sizes that names of the line add to variables, such as "layers" in {i+layers}, without
        those that were replaced by numbers."""
        return [s for t in (self.whole, *self.parts) for s in t.sizes]

    def __str__(self) -> str:
        """Return the equation as a name map writes it, left side first, without its component and condition."""
        whole, parts = str(self.whole), " + ".join(map(str, self.parts))
        return f"{parts} = {whole}" if self.flipped else f"{whole} = {parts}"


class Ignored(NamedTuple):
    """Tensors of the left that the right side has not; with `zero`, only if all of their bytes are 0.

    With `dtype` the way to the left makes them again, of zeros: one for each tensor `along`, which tells the sizes of
    their axes.
    """

    tensor: NamePattern
    why: str
    zero: bool
    dtype: str | None = None
    along: NamePattern | None = None


class Copied(NamedTuple):
    """A tensor `copy` of one side, the right one if `right`, that has the bytes of `of` of the same side: a program
    saves it twice. The other side has it once. There is one for each tensor `along`."""

    copy: NamePattern
    of: NamePattern
    along: NamePattern
    right: bool


class Premise(NamedTuple):
    """What must be true where a map is used: an expression over the job's arguments equals one over config.json, if
    `condition`, which is about the job's arguments, is None or true."""

    job: str
    config: str
    condition: str | None


class AddedOne(NamedTuple):
    """Left names, as a glob, of tensors that are stored less one (a zero-centred gamma) where `condition` is true of
    the job's arguments."""

    pattern: str
    condition: str


@dataclass(frozen=True)
class NameMap:
    """A name map. `sides` are what its left and right are called; `trainers` those whose checkpoints have the left
    names; `models` the model types of config.json it is for; `sizes` {axis: expression over config.json}; `ignored`
    what is left out of the left side; `copied` tensors that a side has twice; `needed` globs of left names without
    which the weights are of another model; `premises` what must be true of the job and of config.json; `added_one`
    tensors that are one less on the left."""

    name: str
    about: str
    sides: tuple[str, str]
    trainers: tuple[str, ...]
    models: tuple[str, ...]
    sizes: Mapping[str, str]
    lines: tuple[MapLine, ...]
    ignored: tuple[Ignored, ...] = ()
    copied: tuple[Copied, ...] = ()
    needed: tuple[str, ...] = ()
    premises: tuple[Premise, ...] = ()
    added_one: tuple[AddedOne, ...] = ()

    @property
    def has_rest(self) -> bool:
        """Whether a line has the variable {*} for any text, so that both sides may match the same names."""
        return any(_REST in t.variables for line in self.lines for t in (line.whole, *line.parts))

    @property
    def arguments(self) -> list[str]:
        """List the keys of the job's arguments that its conditions and premises ask for, each once."""
        asked = [p.job for p in self.premises] + [line.condition for line in self.lines if line.condition is not None]
        return list(
            dict.fromkeys(
                k for text in (*asked, *(a.condition for a in self.added_one)) for k in list_expression_keys(text)
            )
        )

    def of_job(self, arguments: Mapping[str, object]) -> NameMap:
        """Return the map for a job with these arguments, {key: value}: without the lines and `add-one` statements whose
        condition is not true.

        Raises:
            UsageError: a condition has no value for these arguments, such as a division with a remainder.
        """
        return replace(
            self,
            lines=tuple(n for n in self.lines if n.condition is None or evaluate(n.condition, arguments) is True),
            added_one=tuple(a for a in self.added_one if evaluate(a.condition, arguments) is True),
        )

    def with_sizes(self, sizes: Mapping[str, int]) -> tuple[NameMap, list[MapLine]]:
        """Replace the sizes that names of the map add to variables, such as "layers" in {i+layers}, by numbers.

        Args:
            sizes: {name of a size: its number}.

        Returns:
            (the map without the lines that need another size, these lines).
        """
        lines = [line.with_sizes(sizes) for line in self.lines]
        copied = [
            Copied(row.copy.with_sizes(sizes), row.of.with_sizes(sizes), row.along.with_sizes(sizes), row.right)
            for row in self.copied
        ]
        placed = replace(
            self,
            lines=tuple(line for line in lines if not line.sizes),
            copied=tuple(row for row in copied if not row.copy.sizes),
        )
        return placed, [line for line in lines if line.sizes]

    def fits(self, names: Iterable[str]) -> bool:
        """Whether a checkpoint may be one for this map: each glob of left names that the map needs (`needed`) matches
        at least one of `names`, the names of the checkpoint's tensors."""
        rows = list(names)
        return all(fnmatch.filter(rows, pattern) for pattern in self.needed)


def parse_name_map(text: str, name: str, included: Callable[[str], str]) -> NameMap:
    """Parse the text of a name map.

    Args:
        name: the name of the map, also for messages.
        included: returns the text of another map by its name, for lines that include it.

    Raises:
        UsageError: a line is wrong, with its number, or one that each map needs is missing.
    """
    sides: tuple[str, str] | None = None
    about = ""
    trainers: list[str] = []
    models: list[str] = []
    sizes: dict[str, str] = {}
    lines: list[MapLine] = []
    ignored: list[Ignored] = []
    copied: list[Copied] = []
    needed: list[str] = []
    premises: list[Premise] = []
    added_one: list[AddedOne] = []
    others: set[str] = set()
    for number, row in _split_statements(text):
        where = f"name map {name}:{number}"
        word, _, rest = row.partition(" ")
        rest = rest.strip()
        if word == "sides":
            left, bar, right = (s.strip() for s in rest.partition("|"))
            if not (left and bar and right):
                raise UsageError(
                    f"{where}: write sides LEFT | RIGHT, such as sides torchtitan | transformers.", code="CKPT0213"
                )
            sides = left, right
        elif word == "about":
            about = rest
        elif word == "trainer":
            trainers += rest.split()
        elif word == "models":
            models += rest.split()
        elif word == "size":
            axis, _, expression = (s.strip() for s in rest.partition("="))
            if not axis.isidentifier():
                raise UsageError(f"{where}: write size NAME = EXPRESSION, where NAME is an axis.", code="CKPT0213")
            sizes[axis] = expression
            check_expression(expression, where, size=True)
        elif word == "include":
            if rest in others:
                raise UsageError(
                    f"{where}: {rest} is included a second time. Remove one of the two lines.", code="CKPT0213"
                )
            others.add(rest)
            other = parse_name_map(included(rest), rest, included)
            sides = sides or other.sides
            sizes = {**other.sizes, **sizes}
            lines += other.lines
            ignored += other.ignored
            copied += other.copied
            needed += other.needed
            premises += other.premises
            added_one += other.added_one
        elif word in ("ignore", "ignore-zero"):
            ignored.append(_parse_ignored(rest, word == "ignore-zero", where))
        elif word in ("copy-left", "copy-right"):
            copied.append(_parse_copied(rest, word == "copy-right", where))
        elif word == "needs":
            needed.append(rest)
        elif word == "premise":
            premises.append(_parse_premise(rest, where))
        elif word == "add-one":
            added_one.append(_parse_add_one(rest, where))
        elif word == "when":
            condition, _, line = (s.strip() for s in rest.partition(":"))
            check_expression(condition, where)
            lines += [replace(found, condition=condition) for found in _parse_lines(line, where)]
        else:
            lines += _parse_lines(row, where)
    if sides is None:
        raise UsageError(
            f"name map {name}:1: the line sides LEFT | RIGHT is missing, which names the two programs.",
            code="CKPT0213",
        )
    if not lines:
        raise UsageError(f"name map {name}: it has no line NAME = NAME.", code="CKPT0213")
    return NameMap(
        name,
        about,
        sides,
        tuple(trainers),
        tuple(models),
        sizes,
        tuple(lines),
        tuple(ignored),
        tuple(copied),
        tuple(needed),
        tuple(premises),
        tuple(added_one),
    )


def _parse_lines(row: str, where: str) -> list[MapLine]:
    """Parse an equation, which may begin with the component that it is about ("model:"); two lines where a variable is
    optional.

    Args:
        row: the text of the equation.
        where: names the line in messages.

    Raises:
        UsageError: it is no equation.
    """
    word, _, rest = row.partition(" ")
    component = word.removesuffix(":") if word.removesuffix(":") in _COMPONENTS and word.endswith(":") else None
    return _parse_equation(rest.strip() if component else row, component, where)


def _parse_premise(rest: str, where: str) -> Premise:
    """Parse what follows `premise`: JOB = CONFIG, or JOB = CONFIG if CONDITION, all three expressions.

    Args:
        rest: the text.
        where: names the line in messages.

    Raises:
        UsageError: it is written otherwise.
    """
    both, word, condition = rest.partition(" if ")
    job, equals, config = (s.strip() for s in both.partition("="))
    if not equals:
        raise UsageError(
            f"{where}: write premise JOB = CONFIG: an argument of the job, and what config.json says of the same.",
            code="CKPT0213",
        )
    for text in (job, config, *([condition] if word else [])):
        check_expression(text, where)
    return Premise(job, config, condition.strip() if word else None)


def _parse_add_one(rest: str, where: str) -> AddedOne:
    """Parse what follows `add-one`: GLOB if CONDITION, the left names of tensors that are stored less one (a
    zero-centred gamma).

    Args:
        rest: the text.
        where: names the line in messages.

    Raises:
        UsageError: it is written otherwise.
    """
    pattern, word, condition = (s.strip() for s in rest.partition(" if "))
    if not word or len(pattern.split()) != 1:
        raise UsageError(
            f"{where}: write add-one GLOB if CONDITION, where GLOB is for names on the left.", code="CKPT0213"
        )
    check_expression(condition, where)
    return AddedOne(pattern, condition)


def _parse_copied(rest: str, right: bool, where: str) -> Copied:
    """Parse what follows `copy-left` and `copy-right`: NAME of OTHER, or NAME of OTHER with ANCHOR.

    Args:
        rest: the text.
        right: whether the names are of the right side.
        where: names the line in messages.

    Raises:
        UsageError: it is written otherwise.
    """
    both, _, anchor = rest.partition(" with ")
    names = [s.strip() for s in both.split(" of ")]
    names.append(anchor.strip() or names[-1])
    if len(names) != 3 or any(len(n.split()) != 1 for n in names):
        raise UsageError(
            f"{where}: write copy-left NAME of OTHER, or NAME of OTHER with ANCHOR; copy-right for names of the right "
            "side.",
            code="CKPT0213",
        )
    copy, of, along = (_make_pattern(n, None, where) for n in names)
    if set(copy.variables) != set(along.variables) or not set(of.variables) <= set(copy.variables):
        raise UsageError(
            f"{where}: {copy} has other variables than {along}, or {of} has more.",
            code="CKPT0213",
        )
    return Copied(copy, of, along, right)


def _read_offset(m: re.Match[str]) -> int:
    """Return the number that a variable's match adds to the variable, 12 for {i+12}; 0 if it is a size whose number is
    not known."""
    return int(m[3]) if m[3] and m[3].isdecimal() else 0


def _quote(text: str) -> str:
    """Return a text in quotation marks for a message, cut at 200 characters."""
    return repr(text if len(text) < 200 else text[:200] + "...")


def _split_statements(text: str) -> list[tuple[int, str]]:
    """Split the text of a name map into (number of its first line, statement); comments are left out, and indented
    lines belong to the statement before them."""
    out: list[tuple[int, str]] = []
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.split("#", 1)[0].rstrip()
        if not line.strip():
            continue
        if line[0].isspace() and out:
            out[-1] = out[-1][0], f"{out[-1][1]} {line.strip()}"
        else:
            out.append((number, line.strip()))
    return out


def _make_pattern(name: str, axes: str | None, where: str) -> NamePattern:
    """Make a pattern of a name and the text of its axes.

    Args:
        name: the name, with variables.
        axes: the text of the axes without brackets; None if the statement has none.
        where: names the line in messages.

    Raises:
        UsageError: the axes do not parse, a variable appears twice or is optional, or is next to digits or another
            variable.
    """
    try:
        t = NamePattern(name, None if axes is None else Axes.parse(axes))
    except UsageError as e:
        raise UsageError(f"{where}: {e}", code="CKPT0213") from None
    if len(set(t.variables)) < len(t.variables):
        raise UsageError(f"{where}: {name} has a variable twice.", code="CKPT0213")
    between = _VARIABLE.split(name)[4:-1:4]
    if any(m[1] for m in _VARIABLE.finditer(name)) or any(not text or text.isdecimal() for text in between):
        raise UsageError(
            f"{where}: {name}: numbers in a name need other text than digits between them, and {{.i}} is for "
            "equations.",
            code="CKPT0213",
        )
    return t


def _parse_ignored(rest: str, zero: bool, where: str) -> Ignored:
    """Parse what follows `ignore` and `ignore-zero`: NAME : WHY, or NAME [axes] DTYPE with OTHER [axes] : WHY.

    Args:
        rest: the text.
        zero: whether it is `ignore-zero`, for tensors whose bytes are all 0.
        where: names the line in messages.

    Raises:
        UsageError: it is written otherwise.
    """
    what, _, why = (s.strip() for s in rest.partition(":"))
    why = why or "the other side has none"
    name, wanted, other = what.partition(" with ")
    if not wanted:
        if len(what.split()) != 1:
            raise UsageError(
                f"{where}: {_quote(what)} is not the name of a tensor, or NAME [axes] DTYPE with OTHER [axes].",
                code="CKPT0213",
            )
        return Ignored(_make_pattern(what, None, where), why, zero)
    name, _, dtype = name.strip().rpartition(" ")
    problem = UsageError(
        f"{where}: {_quote(what)} is not NAME [axes] DTYPE with OTHER [axes], of ignore-zero, with the same variables "
        "and no axis that OTHER lacks.",
        code="CKPT0213",
    )
    if not zero or dtype not in ITEMSIZE:
        raise problem
    tensors = [t for text in (name, other) for t in _parse_side(text, where)]
    if len(tensors) != 2 or any(axes is None for _, axes in tensors):
        raise problem
    made, along = (_make_pattern(n, axes or "", where) for n, axes in tensors)
    assert made.axes is not None and along.axes is not None
    if made.axes.sums or along.axes.sums or not made.axes.atoms <= along.axes.atoms:
        raise problem
    if sorted(made.variables) != sorted(along.variables):
        raise problem
    return Ignored(made, why, zero, dtype, along)


def _parse_equation(row: str, component: str | None, where: str) -> list[MapLine]:
    """Parse an equation to its line, or to two where a variable is optional, {.i}: one with it in the name, one with it
    as the first axis.

    Args:
        row: the text of the equation.
        component: the one that it is about, None for all.
        where: names the line in messages.

    Raises:
        UsageError: it is no equation, or its sides do not fit each other.
    """
    left, equals, right = row.partition("=")
    if not equals or "=" in right:
        raise UsageError(f"{where}: {_quote(row)} is not NAME = NAME.", code="CKPT0213")
    sides = [_parse_side(left, where), _parse_side(right, where)]
    optional = {m[2] for side in sides for t, _ in side for m in _VARIABLE.finditer(t) if m[1]}
    if _REST in optional:
        raise UsageError(
            f"{where}: {{.*}} is no variable; {{*}} is any text, and {{.i}} an optional number.", code="CKPT0213"
        )
    if not optional:
        return [_make_line(sides, component, where)]
    if len(optional) > 1 or any(axes is None for side in sides for _, axes in side):
        raise UsageError(
            f"{where}: one variable may be optional, {{.i}}, and then all tensors of the line need their axes.",
            code="CKPT0213",
        )
    numbered = [
        [(_VARIABLE.sub(lambda m: f"{m[1]}{{{m[0][1:].lstrip('.')}", t), axes) for t, axes in side] for side in sides
    ]

    def as_axis(t: str, axes: str | None) -> tuple[str, str | None]:
        """Move the optional variable from a name to the axes, and return both."""
        short = _VARIABLE.sub(lambda m: "" if m[1] else m[0], t)
        return short, axes if short == t else f"{next(iter(optional))} {axes}"

    stacked = [[as_axis(t, axes) for t, axes in side] for side in sides]
    return [_make_line(numbered, component, where), _make_line(stacked, component, where)]


def _parse_side(text: str, where: str) -> list[tuple[str, str | None]]:
    """Parse one side of an equation, NAME [axes] + NAME [axes] + ..., to (name, text of its axes or None); `where`
    names the line in messages.

    Raises:
        UsageError: it is written otherwise.
    """
    out = []
    at = 0
    while at < len(text):
        m = _TENSOR.match(text, at)
        if m is None or (m.end() < len(text) and text[m.end()] != "+"):
            raise UsageError(
                f"{where}: {_quote(text[at:].strip())} is not NAME or NAME [axes], joined by +.", code="CKPT0213"
            )
        out.append((m[1], m[2]))
        at = m.end() + 1
    if not out:
        raise UsageError(f"{where}: a side has no name.", code="CKPT0213")
    return out


def _make_line(sides: list[list[tuple[str, str | None]]], component: str | None, where: str) -> MapLine:
    """Make a line of a name map from its two sides, after proving that they fit each other.

    Args:
        sides: the left and the right one, each a list of (name, text of its axes or None).
        component: the one that the line is about, None for all.
        where: names the line in messages.

    Raises:
        UsageError: the sides do not fit each other.
    """
    left, right = ([_make_pattern(n, a, where) for n, a in side] for side in sides)
    every = [*left, *right]
    if len({t.axes is None for t in every}) > 1:
        raise UsageError(f"{where}: either all tensors of a line have axes, or none.", code="CKPT0213")

    def is_whole(side: list[NamePattern], others: list[NamePattern]) -> bool:
        """Whether `side` is the whole tensor and `others`, the other side, has the parts of it."""
        extra = set(others[0].variables) - set(side[0].variables)
        return bool(len(others) > 1 or extra or (side[0].axes is not None and side[0].axes.sums))

    flipped = len(left) > 1 or (is_whole(right, left) and not is_whole(left, right))
    wholes, parts = (right, left) if flipped else (left, right)
    if len(wholes) > 1:
        raise UsageError(f"{where}: only one side can be several tensors.", code="CKPT0213")
    whole = wholes[0]
    stacked = frozenset(parts[0].variables) - frozenset(whole.variables)
    for t in parts:
        if frozenset(t.variables) - stacked != frozenset(whole.variables) or not stacked <= frozenset(t.variables):
            raise UsageError(f"{where}: {t.name} and {whole.name} do not have the same variables.", code="CKPT0213")
    line = MapLine(whole, tuple(parts), stacked, flipped, component)
    if _REST in stacked:
        raise UsageError(f"{where}: {{*}} is on both sides of a line, or on none.", code="CKPT0213")
    if whole.axes is None:
        if len(parts) > 1 or stacked:
            raise UsageError(f"{where}: a tensor that is made of several needs axes.", code="CKPT0213")
        return line
    if not stacked <= whole.axes.atoms:
        raise UsageError(
            f"{where}: {', '.join(sorted(stacked - whole.axes.atoms))} is not an axis of {whole.name}.", code="CKPT0213"
        )
    sums = whole.axes.sums
    terms = [t for t in sums[0] if t != ("_",)] if sums else [()]
    if len(terms) != len(parts) or (sums and sums[0][: len(terms)] != tuple(terms)):
        raise UsageError(
            f"{where}: {whole} has {len(terms)} terms (_ comes last), and there are {len(parts)} parts.",
            code="CKPT0213",
        )
    if sums and ("_",) in sums[0] and whole.axes.dims[0] != (sums[0],):
        raise UsageError(
            f"{where}: only rows can be padding: (a+_) is the first axis, alone, or there is no _.", code="CKPT0213"
        )
    for k, t in enumerate(parts):
        assert t.axes is not None
        mine = whole.axes.term(k) if sums else whole.axes
        if t.axes.sums or t.axes.atoms != mine.atoms - stacked:
            raise UsageError(f"{where}: {t} does not have the axes of its part of {whole}.", code="CKPT0213")
    return line
