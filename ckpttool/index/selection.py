"""Which entries of a checkpoint are asked for: components, names, and globs of names.

A pattern selects the entries whose names it matches, and everything below them: "model" is a component,
"model.layers.0" a layer, and "optim.state.*.exp_avg" one moment of every parameter.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, islice

from ..by_fields import ByFields

__all__ = ["NOT_RESUMED", "EntrySelection", "explain_no_match", "find_unmatched_patterns"]

_GLOB = re.compile(r"[*?\[]")
#: What the user of a part of a checkpoint should know.
NOT_RESUMED = "A job resumes from a part only if it asks for nothing else"

_MOST_COMPARED = 20_000  # names, for a suggestion


@dataclass(frozen=True, eq=False, repr=False)
class EntrySelection(ByFields):
    """The part of a checkpoint that was asked for: `only` what these patterns select, None for all of it, but for what
    those of `left_out` select."""

    only: tuple[str, ...] | None = None
    left_out: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the selection as a text for people, such as "model, optim, all but optim.param_groups"; "" if it is
        everything."""
        left_out = f"all but {', '.join(self.left_out)}" if self.left_out else ""
        return ", ".join(filter(None, [*(self.only or ()), left_out]))

    @property
    def by_component(self) -> bool:
        """Whether everything is selected, or a set of components: no pattern is a glob or names a single entry, and
        nothing is left out."""
        return not self.left_out and all(_GLOB.search(p) is None and "." not in p for p in self.only or ())

    @property
    def components(self) -> frozenset[str] | None:
        """Return the components in which entries are selected; None if that may be any component."""
        heads = None if self.only is None else frozenset(p.partition(".")[0] for p in self.only)
        return None if heads is None or any(map(_GLOB.search, heads)) else heads

    def holds(self, name: str) -> bool:
        """Whether the entry with this canonical name is selected."""
        return (self.only is None or _compile_patterns(self.only)(name)) and not _compile_patterns(self.left_out)(name)


@lru_cache(64)
def _compile_patterns(patterns: tuple[str, ...]) -> Callable[[str], bool]:
    """Return a function that says whether at least one of the patterns selects the entry of a name."""
    plain = frozenset(patterns)
    globs = "|".join(fnmatch.translate(q) for p in patterns if _GLOB.search(p) for q in (p, p + ".*"))
    match = re.compile(globs).match if globs else lambda _: None

    def selects(name: str) -> bool:
        return any(n in plain for n in _iterate_prefixes(name)) or match(name) is not None

    return selects


def _iterate_prefixes(name: str) -> Iterable[str]:
    """Yield the beginnings of a dotted name, up to the name itself: "a", "a.b", "a.b.c"."""
    return accumulate(name.split("."), lambda a, b: f"{a}.{b}")


def find_unmatched_patterns(patterns: Iterable[str], names: Collection[str]) -> list[str]:
    """List the patterns that select none of these names."""
    known = {n for name in names for n in _iterate_prefixes(name)}
    return [p for p in patterns if p not in known and not any(map(_compile_patterns((p,)), names))]


def explain_no_match(pattern: str, names: Collection[str], what: str = "name") -> str:
    """Return the end of an error message for a pattern that matches no name, such as "no name matches; did you mean
    ...?".

    Args:
        pattern: the pattern.
        names: all names.
        what: what the names are, such as "tensor"; with "name", a pattern without dots is treated as a component.
    """
    if not names:
        return f"no {what} matches: the checkpoint, or what is selected of it, has none of that kind."
    from difflib import get_close_matches  # which takes a while to load

    part, holds = pattern.strip("*"), ""
    if what == "name" and "." not in pattern and _GLOB.search(pattern) is None:  # meant as a component
        holds = f"the checkpoint holds {', '.join(sorted({n.partition('.')[0] for n in names}))}"
    near = [n for n in names if part and part.lower() in n.lower()]
    if near:
        contain = "1 name contains" if len(near) == 1 else f"{len(near)} names contain"
        hint = f"{contain} it, first {near[0]}: use '*{part}*'."
        return f"{holds}; {hint}" if holds else f"no {what} matches; {hint}"
    if holds:
        return f"{holds}."
    if close := get_close_matches(pattern, islice(names, _MOST_COMPARED), 1, 0.5):
        return f"no {what} matches; did you mean {close[0]!r}?"
    return f"no {what} matches; the first is {next(iter(names), None)!r}."
