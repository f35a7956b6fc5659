"""What the pages of the API show of a function's keywords. mkdocstrings loads this as an extension of griffe."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import griffe


class Keywords(griffe.Extension):
    """Give the documented keywords of `**keywords: Unpack[K]` their types and defaults.

    griffe sees only the source, where such a function has no parameter of that name. ckpttool.options.list_keywords knows all, so
    they are added while the docstring is parsed. The signature stays as short as the source has it.
    """

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Parse the docstring of a function that `list_keywords` decorates. griffe calls this for every function."""
        if func.docstring is None or not any("list_keywords" in str(d.value) for d in func.decorators):
            return
        module = importlib.import_module(func.module.path)
        added = [
            p
            for p in inspect.signature(getattr(module, func.name)).parameters.values()
            if p.name not in func.parameters
        ]
        for p in added:
            annotation = str(p.annotation).removeprefix("<class '").removesuffix("'>")
            parameter = griffe.Parameter(
                p.name, annotation=annotation, default=repr(p.default), kind=griffe.ParameterKind.keyword_only
            )
            func.parameters.add(parameter)
        _ = func.docstring.parsed  # is kept, as it is now
        for p in added:
            del func.parameters[p.name]
