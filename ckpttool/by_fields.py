"""One `__eq__`, `__hash__` and `__repr__` for all dataclasses that every command imports."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = ["ByFields"]


class ByFields:
    """Base of dataclasses with `eq=False, repr=False`, which are compared, hashed and shown by their fields, as those
    that dataclass makes the methods for; instances that are not frozen cannot be hashed.

    dataclass compiles these methods for each class when it is defined; a command starts sooner with one of each.
    """

    def __eq__(self, other: object) -> bool:
        """Return whether `other` is of the same class and all compared fields are equal; NotImplemented for another
        class."""
        if type(other) is not type(self):
            return NotImplemented
        return _list_compared_values(self) == _list_compared_values(other)

    def __hash__(self) -> int:
        """Return a hash of the compared fields.

        Raises:
            TypeError: the dataclass is not frozen.
        """
        if not cast(Any, self).__dataclass_params__.frozen:
            raise TypeError(f"unhashable type: '{type(self).__name__}'")
        return hash(tuple(_list_compared_values(self)))

    def __repr__(self) -> str:
        """Return "Class(field=value, ...)" with all fields but those that are declared with `repr=False`."""
        shown = (f"{f.name}={getattr(self, f.name)!r}" for f in fields(cast("DataclassInstance", self)) if f.repr)
        return f"{type(self).__qualname__}({', '.join(shown)})"


def _list_compared_values(x: object) -> list[object]:
    """Return the values of those fields of a dataclass that are compared, in their order."""
    return [getattr(x, f.name) for f in fields(cast("DataclassInstance", x)) if f.compare]
