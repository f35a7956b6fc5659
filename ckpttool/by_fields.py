"""One `__eq__`, `__hash__` and `__repr__` for frozen dataclasses that every command imports."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = ["ByFields"]


class ByFields:
    """Base of frozen dataclasses that are compared, hashed and shown by their fields, as `eq=True` and `repr=True` do.

    dataclass compiles both methods for each class when it is defined; a command starts sooner with one for all.
    """

    def __eq__(self, other: object) -> bool:
        return (
            _list_compared_values(self) == _list_compared_values(other) if type(other) is type(self) else NotImplemented
        )

    def __hash__(self) -> int:
        return hash(tuple(_list_compared_values(self)))

    def __repr__(self) -> str:
        shown = (f"{f.name}={getattr(self, f.name)!r}" for f in fields(cast("DataclassInstance", self)) if f.repr)
        return f"{type(self).__qualname__}({', '.join(shown)})"


def _list_compared_values(x: object) -> list[object]:
    """Return the values of those fields of a dataclass that are compared, in their order."""
    return [getattr(x, f.name) for f in fields(cast("DataclassInstance", x)) if f.compare]
