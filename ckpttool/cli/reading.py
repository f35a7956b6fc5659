"""Options that say how a checkpoint is read: made of the fields of `OpenOptions`, so that every command that reads one
has them all.

@reads()
def digest(path: Src, reading: OpenOptions = NOTHING_ASKED, tensors: ... = False) -> None:
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import Field, fields
from functools import wraps
from typing import Annotated, Any, TypeVar

import typer

from ..options import OpenOptions
from .terminal import comma, layout_names

__all__ = ["NOTHING_ASKED", "reading_keywords", "reads"]

F = TypeVar("F", bound=Callable[..., None])

#: The default of the parameter `reading`: nothing was asked for.
NOTHING_ASKED = OpenOptions()
#: Fields that hold several texts, which the command line takes with commas between them.
_LISTS = ("only", "wrap")


def reads(*without: str) -> Callable[[F], F]:
    """A decorator for a command with a parameter `reading`, in whose place it gets the options that say how a
    checkpoint is read.

    Args:
        without: fields of `OpenOptions` that this command has no use for.
    """
    made = _options(without)

    def decorate(function: F) -> F:
        own = inspect.signature(function, eval_str=True)
        parameters = [
            q for p in own.parameters.values() for q in (map(_parameter, made) if p.name == "reading" else (p,))
        ]

        @wraps(function)
        def command(**given: Any) -> None:
            asked = {f.name: given.pop(f.name) for f in made}
            asked |= {name: comma(asked[name]) for name in _LISTS if name in asked}
            function(**given, reading=OpenOptions(**asked))

        command.__dict__["__signature__"] = own.replace(parameters=parameters)
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command  # type: ignore[return-value]

    return decorate


def reading_keywords(reading: OpenOptions, *without: str) -> dict[str, Any]:
    """{name: value} of the options that `reads(*without)` adds, for a function of the Python interface that takes them
    one by one."""
    return {f.name: getattr(reading, f.name) for f in _options(without)}


def _options(without: tuple[str, ...]) -> list[Field[Any]]:
    return [f for f in fields(OpenOptions) if "help" in f.metadata and f.name not in without]


def _parameter(f: Field[Any]) -> inspect.Parameter:
    flag = f.metadata["flag"] or "--" + f.name.replace("_", "-")
    kind: Any = bool if f.default is False else str | None
    names = layout_names if f.name == "source_layout" else None
    said = typer.Option(*flag.split("/"), help=f.metadata["help"], metavar=f.metadata["metavar"], autocompletion=names)
    return inspect.Parameter(
        f.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=f.default, annotation=Annotated[kind, said]
    )
