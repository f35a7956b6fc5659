"""Options made from the fields of requests: the three in `ckpttool.options`, which several commands have (how to read,
what to write, how to carry it out), and `resume.request.VerifyRequest`.

    @add_shared_options("only")
    def push(src: Src, writing: WriteRequest, reading: OpenOptions, quiet: Quiet = False) -> None:

A field that is added there is an option of every command that takes such a request.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import Field, fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, TypeVar

import typer

from ..options import RunOptions, WriteRequest, parse_size
from .completion import COMPLETIONS
from .terminal import parse_rules, split_commas

__all__ = ["EDITS", "NameMap", "Workers", "add_shared_options", "list_shared_options", "pick_keywords"]

F = TypeVar("F", bound=Callable[..., None])

#: Fields that change single entries; commands that take or make whole states lack them, and convert has them.
EDITS = ("drop_matching", "rename", "set_values", "reset")


def add_shared_options(*without: str, **defaults: object) -> Callable[[F], F]:
    """Return a decorator that replaces each parameter of a command whose type is a request by command-line options.

    A request is a dataclass of options. There is one option for each of its fields, and the command gets the request
    that is made of their values.

    Args:
        without: names of fields that do not become options of this command.
        defaults: {field: default} where this command has another default than the field.
    """

    def decorate(function: F) -> F:
        """Return a function whose signature has the options; it calls `function` with the requests."""
        own = inspect.signature(function, eval_str=True)
        requests = {
            p.name: list_shared_options(p.annotation, *without)
            for p in own.parameters.values()
            if is_dataclass(p.annotation)
        }
        parameters: list[inspect.Parameter] = []
        for p in own.parameters.values():
            made = [_make_parameter(f, defaults.get(f.name, f.default)) for f in requests.get(p.name, ())]
            parameters += made if p.name in requests else [p]

        @wraps(function)
        def command(**given: Any) -> None:
            """Make the requests from the values of the options, and call the decorated function."""
            for name, listed in requests.items():
                values = {f.name: _parse_option_value(f, given.pop(f.name)) for f in listed}
                given[name] = own.parameters[name].annotation(**values)
            function(**given)

        command.__dict__["__signature__"] = own.replace(parameters=parameters)
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command  # type: ignore[return-value]

    return decorate


def list_shared_options(request: Any, *without: str) -> list[Field[object]]:
    """Return the fields of a request that become command-line options.

    Args:
        request: a dataclass of options, or an instance.
        without: names of fields to leave out.
    """
    return [f for f in fields(request) if "help" in f.metadata and f.name not in without]


def pick_keywords(function: Callable[..., object], *requests: Any) -> dict[str, Any]:
    """Return {name: value} of those fields of the requests that are also parameters of a function."""
    names = inspect.signature(function).parameters
    return {f.name: getattr(r, f.name) for r in requests for f in fields(r) if f.name in names}


def _make_parameter(f: Field[object], default: object) -> inspect.Parameter:
    """Return the parameter of a command that sets a field of a request.

    Args:
        default: default of the field for this command.
    """
    if default is True and not _has_two_flags(f):
        default = False  # it is turned off by its flag
    return inspect.Parameter(
        f.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=_make_option_annotation(f)
    )


def _make_option_annotation(f: Field[object]) -> object:
    """Return the annotation from which typer makes the option for a field: its type, flags and help."""
    said, named = f.metadata, str(f.type)
    kind: Any = str
    if named.startswith("bool"):
        kind = bool
    elif said["repeated"]:
        kind = list[str]
    elif named.startswith(("int", "float")) and not said["size"]:
        kind = int if named.startswith("int") else float
    flag = said["flag"] or "--" + f.name.replace("_", "-")
    made = typer.Option(
        *([flag] if _has_two_flags(f) else flag.split("/")),
        help=said["help"],
        metavar=said["metavar"],
        min=said["least"],
        max=said["most"],
        rich_help_panel=said["panel"],
        autocompletion=COMPLETIONS.get(said["metavar"]),
        callback=_serve_if_worker if f.name == "workers" else None,
    )
    return Annotated[kind | None if f.default is None else kind, made]


def _has_two_flags(f: Field[object]) -> bool:
    """Return whether a field is a switch with one flag that turns it on and one that turns it off ("--a/--b").

    In other fields, a slash separates alternative names of one option.
    """
    return str(f.type).startswith("bool") and "/" in (f.metadata["flag"] or "")


def _parse_option_value(f: Field[Any], given: Any) -> object:
    """Convert the value of a command-line option to that of its field; None stays None.

    Args:
        f: the field.
        given: what typer passes.

    Raises:
        UsageError: it is not a valid size, list or rule.
    """
    if f.default is True and not _has_two_flags(f):
        return not given
    if given is None:
        return None
    if f.metadata["size"]:
        return parse_size(given)
    if str(f.type).startswith("Mapping"):
        return parse_rules(given, f.metadata["flag"] or f"--{f.name}", f.metadata["metavar"])
    if f.metadata["commas"]:
        return [part for text in given for part in split_commas(text)]
    return split_commas(given) if str(f.type).startswith("Iterable") and not f.metadata["repeated"] else given


def _serve_if_worker(spec: str | None) -> str | None:
    """Return the value of --workers unchanged. Under mpiexec, ranks other than 0 become workers here, and do not
    return."""
    if spec is not None:
        from ..engine.workers.executors import serve_if_worker

        serve_if_worker(spec)
    return spec


def _make_annotation_of_field(request: Any, name: str) -> object:
    """Return the annotation from which typer makes the option for the field `name` of a request."""
    return next(_make_option_annotation(f) for f in fields(request) if f.name == name)


# For commands that have one of these alone.
Workers = Annotated[str | None, *_make_annotation_of_field(RunOptions, "workers").__metadata__]
NameMap = Annotated[str | None, *_make_annotation_of_field(WriteRequest, "map").__metadata__]
