"""Options as fields of dataclasses, from which the command line is made: those of layouts, and how a checkpoint is
read."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from functools import wraps
from typing import Any, TypedDict, TypeVar

from .errors import UsageError, argument

__all__ = ["Hints", "MergeRequest", "OpenOptions", "Reading", "Search", "list_reading_keywords", "option"]

F = TypeVar("F", bound=Callable[..., Any])


def option(default: Any, help: str, *, flag: str | None = None, size: bool = False, metavar: str | None = None) -> Any:
    """A field of options: its default, and what the command line and the documentation say about it.

    Args:
        help: one sentence, with the unit of a number.
        flag: the option of the command line, with other names behind slashes; by default the name of the field with
        dashes.
        size: the number is in bytes, and the command line takes 5GB and 500MiB for it.
        metavar: what stands for the value in help texts.

    >>> @dataclass(frozen=True)
    ... class MyOptions:
    ...     rows: int = option(64, "Rows of a file.")
    """
    return field(default=default, metadata={"help": help, "flag": flag, "size": size, "metavar": metavar})


@dataclass(frozen=True, kw_only=True)
class MergeRequest:
    """An adapter to merge into the checkpoint that is opened (engine/merging.py).

    `adapter` is the checkpoint that holds it, None where it is in the same state; `names` of those to merge, in order,
    where there are several; `config` the folder with adapter_config.json, where it is not beside the adapter;
    `lora_alpha` and `rslora` stand for an adapter without that file.
    """

    adapter: str | os.PathLike[str] | None = None
    names: tuple[str, ...] = ()
    config: str | None = None
    lora_alpha: float | None = None
    rslora: bool = False


@dataclass(frozen=True, kw_only=True)
class OpenOptions:
    """How a checkpoint is read; the arguments of `open`, which explains them.

    Fields that are made with `option` are options of every command that reads one (cli/reading.py).
    """

    source_layout: str | None = option(
        None, "Layout of the source, if it cannot be detected.", flag="--source-layout/--from", metavar="LAYOUT"
    )
    only: Iterable[str] | None = option(
        None,
        "Components to use: model, optim, scheduler, scaler, rng, dataloader, trainer, extra.",
        metavar="model,optim,...",
    )
    config: str | None = option(
        None,
        "Hugging Face model of the same architecture: a folder with config.json, or a model id.",
        metavar="DIR|HF_ID",
    )
    like: str | os.PathLike[str] | None = option(
        None,
        "Another checkpoint of the same model, for what the source does not say about its parameters.",
        metavar="PATH",
    )
    flat_layout: str | os.PathLike[str] | None = option(
        None, "JSON file with the result of ckpttool.describe_fsdp1(model) in the job.", metavar="FILE"
    )
    wrap: Iterable[str] | None = option(
        None, "Modules that FSDP1 wrapped; * matches one name, ** any number.", metavar="PATTERN,..."
    )
    tag: str | None = option(None, "DeepSpeed save to read, if a folder holds several.", metavar="TAG")
    allow_equal_ranks: bool = option(False, "Read it even if one rank's file looks like a copy of another's.")
    allow_mixed_steps: bool = option(False, "Read it even if its files seem to come from different steps.")
    salvage: bool = False  # what is left of a damaged checkpoint: engine/salvage.py
    merge: MergeRequest | None = None  # with an adapter merged into it: engine/merging.py
    fill_from: str | None = None  # another checkpoint of the run, which has what is lost: engine/fill_from.py

    def __post_init__(self) -> None:
        for name in ("only", "wrap"):
            value = getattr(self, name)
            if isinstance(value, str):
                raise UsageError(f"{name}={value!r} is a string; give a list of strings, such as [{value!r}].")
            if value is not None:
                object.__setattr__(self, name, tuple(value))
        if self.fill_from is not None and not self.salvage:
            raise UsageError(
                f"{argument('fill_from')} fills in what a damaged checkpoint has lost; it goes with "
                f"{argument('salvage', True)}."
            )
        for name in ("like", "flat_layout"):  # plan_id compares them as text
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, os.fspath(value))


# The same options as keywords of functions: `def f(path, **reading: Unpack[Reading])`.


class Hints(TypedDict, total=False):
    """What the files do not say of the model."""

    config: str | None
    like: str | os.PathLike[str] | None
    flat_layout: str | os.PathLike[str] | None
    wrap: Iterable[str] | None


class Search(Hints, total=False):
    """`Hints`, and which checkpoint of a path is meant."""

    source_layout: str | None
    tag: str | None


class Reading(Search, total=False):
    """`Search`, and what is read although it looks wrong."""

    allow_equal_ranks: bool
    allow_mixed_steps: bool


def list_reading_keywords(function: F) -> F:
    """A decorator for a function with `**reading: Unpack[...]` of one of the classes above.

    Its signature lists these keywords one by one, for help() and TAB, and another keyword is a TypeError that names the
    function.
    """
    kind = function.__globals__[str(function.__annotations__["reading"]).removeprefix("Unpack[").removesuffix("]")]
    own = inspect.signature(function)
    known = {f.name: f for f in fields(OpenOptions) if f.name in kind.__annotations__}
    taken = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
    keywords = [
        inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type)
        for n, f in known.items()
    ]
    names = {p.name for p in taken} | known.keys()

    @wraps(function)
    def call(*arguments: Any, **given: Any) -> Any:
        for name in given:
            if name not in names:
                raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}")
        return function(*arguments, **given)

    call.__dict__["__signature__"] = own.replace(parameters=[*taken, *keywords])
    call.__annotations__ = {
        **{k: v for k, v in function.__annotations__.items() if k != "reading"},
        **{n: f.type for n, f in known.items()},
    }
    return call  # type: ignore[return-value]
