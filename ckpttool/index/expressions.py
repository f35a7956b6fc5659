"""Expressions over the keys of a configuration, as lines of name maps have them.

    head_dim | hidden_size / num_attention_heads        the second where there is no head_dim
    rope_parameters.rope_type | 'default'               a key inside a key
    hidden_act is 'silu' or hidden_act is 'swish'

Operators, those that bind least first: `or`; `is`; `|`, whose value is its right side where the left one is missing; `+
-`; `* /`. Everything else is a number, 'text', true, false, a key, or such an expression in parentheses. A key without
a value, or with null, is missing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from ..errors import UsageError

__all__ = ["Scalar", "check_expression", "evaluate", "evaluate_size", "list_expression_keys"]

Scalar = bool | int | float | str


class _Key(NamedTuple):
    name: str


class _Operation(NamedTuple):
    operator: str
    left: _Tree
    right: _Tree


_Tree = _Key | _Operation | Scalar
_LEVELS = (("or",), ("is",), ("|",), ("+", "-"), ("*", "/"))
_TOKEN = re.compile(r"'[^']*'|\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|[^\W\d]\w*(?:\.\w+)*|\S")
_MOST = 300


def check_expression(expression: str, where: str, *, size: bool = False) -> None:
    """Check that a text is an expression over keys of a configuration.

    Args:
        expression: the text.
        where: the place of the text, with which the message begins.
        size: whether it must be a size, made of whole numbers, keys and arithmetic only.

    Raises:
        UsageError: the text is no such expression.
    """
    try:
        _parse_expression(expression)
        if not (size and re.search(r"'|(?<![\w.])\d+\.|\b(?:is|or|true|false)\b", expression)):
            return
    except (IndexError, RecursionError):
        pass
    if size:
        raise UsageError(
            f"{where}: a size is made of numbers, keys of config.json, + - * / and |, not of {expression[:80]!r}.",
            code="CKPT0213",
        )
    raise UsageError(
        f"{where}: {expression[:80]!r} is not an expression of numbers, keys, 'text', true, false, + - * / | is or.",
        code="CKPT0213",
    )


@lru_cache(1024)
def _parse_expression(expression: str) -> _Tree:
    """Parse an expression to a tree of operations, keys and constants.

    Raises:
        IndexError, RecursionError: it does not parse, is too long, or is nested too deep.
    """
    tokens = [*_TOKEN.findall(expression), ""]
    if len(expression) > _MOST:
        raise IndexError

    def level(k: int) -> _Tree:
        """Parse operators that bind at least as tightly as those of level k."""
        if k == len(_LEVELS):
            return atom(tokens.pop(0))
        tree = level(k + 1)
        while tokens[0] in _LEVELS[k]:
            tree = _Operation(tokens.pop(0), tree, level(k + 1))
        return tree

    def atom(token: str) -> _Tree:
        """Parse a number, text, true, false, key or parenthesis that begins with `token`.

        Raises:
            IndexError: it is none of them.
        """
        if token == "(":
            inside = level(0)
            if tokens.pop(0) == ")":
                return inside
        elif token in ("true", "false"):
            return token == "true"
        elif token[:1].isdecimal():
            return int(token) if token.isdecimal() else float(token)
        elif len(token) > 1 and token[0] == "'":
            return token[1:-1]
        elif re.match(r"[^\W\d]", token) and token not in ("or", "is"):
            return _Key(token)
        raise IndexError

    tree = level(0)
    if tokens != [""]:
        raise IndexError
    return tree


def list_expression_keys(expression: str) -> list[str]:
    """List the keys that an expression names, each once, in the order of the text. `check_expression` must have
    accepted the expression."""

    def walk(tree: _Tree) -> list[str]:
        if isinstance(tree, _Operation):
            return walk(tree.left) + walk(tree.right)
        return [tree.name] if isinstance(tree, _Key) else []

    return list(dict.fromkeys(walk(_parse_expression(expression))))


def evaluate(expression: str, config: Mapping[str, object]) -> Scalar | None:
    """Compute the value of an expression over a configuration, {key: value}; None where a key is missing, or an operand
    of arithmetic is not a whole number.

    Raises:
        UsageError: a division by 0 or with a remainder, or a difference less than 0.
    """

    def value(tree: _Tree) -> Scalar | None:
        """Compute the value of a node of the tree; None where a key in it is missing, or a number is no whole one."""
        if isinstance(tree, _Key):
            return _look_up_key(tree.name, config)
        if not isinstance(tree, _Operation):
            return tree
        operator = tree.operator
        a = value(tree.left)
        if operator == "|":
            return value(tree.right) if a is None else a
        b = value(tree.right)
        if operator == "or":
            return None if a is None and b is None else bool(a) or bool(b)
        if operator == "is":
            return None if a is None or b is None else a == b
        if type(a) is not int or type(b) is not int:
            return None
        if operator == "/":
            if b == 0 or a % b:
                raise UsageError(
                    f"the configuration makes {expression} {a} / {b}, which is not a whole number.", code="CKPT0213"
                )
            return a // b
        if operator == "-" and a < b:
            raise UsageError(f"the configuration makes {expression} {a} - {b}, which is less than 0.", code="CKPT0213")
        return a + b if operator == "+" else a - b if operator == "-" else a * b

    return value(_parse_expression(expression))


def evaluate_size(expression: str, config: Mapping[str, object]) -> int | None:
    """Compute the size that an expression gives over a configuration, {key: value}; None where a key is missing or its
    value is not a whole number of at least 0.

    Raises:
        UsageError: it is not an expression of sizes, a division is by 0 or has a remainder, or a difference is less
            than 0.
    """
    check_expression(expression, "size", size=True)
    found = evaluate(
        expression,
        {k: v for k in list_expression_keys(expression) if type(v := _look_up_key(k, config)) is int and v >= 0},
    )
    return found if type(found) is int else None


def _look_up_key(name: str, config: Mapping[str, object]) -> Scalar | None:
    """Return the value of a key in a configuration, where "a.b" is key b inside a, and "a.0" the first element of the
    list a; None where there is no such key, or its value is null, a list or a dict."""
    if name in config:
        found: Any = config[name]
    else:
        head, dot, rest = name.partition(".")
        inside = config.get(head) if dot else None
        if isinstance(inside, (list, tuple)):
            inside = {str(i): x for i, x in enumerate(inside)}
        found = _look_up_key(rest, inside) if isinstance(inside, Mapping) else None
    return found if isinstance(found, (bool, int, float, str)) else None
