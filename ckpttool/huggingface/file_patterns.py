"""Which regular expressions from a file of a model or an adapter are safe to compare with names of modules."""

from __future__ import annotations

import re

__all__ = ["NOT_A_PATTERN", "may_take_forever"]

#: What `re` raises for a text that is not a regular expression, or is one with too large a number or too many groups.
NOT_A_PATTERN = (re.error, OverflowError, RecursionError)

_LONGEST = 1000  # characters of a pattern
_MOST_CHOICES = 10**4
_MOST_STEPS = 10**8
#: A quantified group may take time exponential in the length of a name.
_QUANTIFIED_GROUP = re.compile(r"\)\s*[*+?{]")
#: Flags, comments and conditions, behind which quantifiers and groups could hide; also where a caller's group begins.
_UNUSUAL_GROUP = re.compile(r"(^|\()\?(?!:|<?[=!])")
_GROUP = re.compile(r"\(\?(:|<?[=!])")
_ESCAPE_OR_CLASS = re.compile(r"\\.|\[\^?\]?(\\.|[^\]\\])*\]", re.DOTALL)


def may_take_forever(pattern: str, name: str) -> bool:
    """Whether comparing a regular expression with a name could take forever, since `re` tries one way after another.

    Each quantifier multiplies the ways by the length of the name, each optional item by 2, each group by its
    alternatives. A name of a module is never refused as a pattern, however long it is.
    """
    if re.fullmatch(r"[\w.-]*", pattern):
        return False
    if len(pattern) > _LONGEST or _QUANTIFIED_GROUP.search(pattern) or _UNUSUAL_GROUP.search(pattern):
        return True
    choices, alternatives = 1, [1]  # of the groups that are open
    bare = _GROUP.sub("(", _ESCAPE_OR_CLASS.sub("x", pattern))
    for c in bare:
        if c == "(":
            alternatives.append(1)
        elif c == "|":
            alternatives[-1] += 1
        elif c == ")":
            choices *= alternatives.pop()
            alternatives = alternatives or [1]
    for n in alternatives:
        choices *= n
    choices <<= bare.count("?")
    quantifiers = sum(bare.count(c) for c in "*+{")
    steps: int = choices * (len(name) + 1) ** (quantifiers + 1)
    return choices > _MOST_CHOICES or steps > _MOST_STEPS
