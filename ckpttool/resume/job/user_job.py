"""The user's recipe, module.py:build: what can be said about it before ranks are started, its call, and whether its
data fits its model.

check_job_source("recipe.py:build")              before a launch: reads the file, runs nothing of it
call_build(settings, mesh)                       on every rank: imports it and calls the function
check_batches_fit_model(model, loss, rows)       before anything is loaded: a sample of the data and the model's call
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import ModuleSpec, PathFinder
from typing import TYPE_CHECKING, Any

from ...errors import UsageError, argument, kind_of_failure
from ...storage.urls import make_path_absolute
from ..request import RunSettings
from ..trace.batches import Rows
from ..trace.probing import explain_unsupported_forward

if TYPE_CHECKING:
    import torch

__all__ = ["call_build", "check_batches_fit_model", "check_config_exists", "check_job_source"]

#: What build() may ask for.
_OFFERED = ("mesh", "device")


def _split_job_argument(job: str) -> tuple[str, str]:
    """Split "where:function" of --job into (file or module, function); the function is "build" if none is given."""
    where, _, name = job.rpartition(":")
    return (where, name) if where else (name, "build")


def check_config_exists(config: str) -> None:
    """Refuse a path without a config.json, before processes are started; what looks like an id of the Hub passes.

    Raises:
        UsageError: there is no such folder, or it has no config.json.
    """
    if os.path.isdir(config):
        if not os.path.isfile(os.path.join(config, "config.json")):
            raise UsageError(
                f"{argument('config', config)}: this folder has no config.json, which describes the model.",
                code="CKPT0216",
            )
    elif (
        not os.path.exists(config)
        and "://" not in config
        and (config.startswith((".", "/", "~")) or config.count("/") > 1)
    ):
        raise UsageError(f"{argument('config', config)}: no such folder.", code="CKPT0216")


def check_job_source(job: str) -> None:
    """Refuse a `--job` ("module.py:build") that cannot work, from the text of its file. No code of it runs, nor of the
    packages that a module is in.

    Raises:
        UsageError: there is no such file, module or function; it is no Python; the function requires other arguments.
            Where a disk or a network fails, the error says that.
    """
    where, name = _split_job_argument(job)
    said = argument("job", job)
    if where.endswith(".py"):
        file = where
        if not os.path.isfile(file):
            raise UsageError(f"{said}: the file {file} does not exist.", code="CKPT0212")
    else:
        spec = _find_module(where)
        if spec is None:
            hint = f" Did you mean {where}.py:{name}?" if os.path.isfile(f"{where}.py") else ""
            raise UsageError(f"{said}: there is no module {where}.{hint}", code="CKPT0212")
        file = spec.origin or ""
        if not file.endswith(".py"):
            return  # compiled, or of a loader of its own: it is known once it is imported
    try:
        with open(file, "rb") as f:
            tree = ast.parse(f.read(), file)
    except OSError as e:
        raise kind_of_failure(e, UsageError)(f"{said}: {file} cannot be read: {e.strerror or e}.") from None
    except (SyntaxError, ValueError) as e:
        at = f", line {e.lineno}" if isinstance(e, SyntaxError) and e.lineno else ""
        raise UsageError(
            f"{said}: {file}{at} is not Python: {e.msg if isinstance(e, SyntaxError) else e}.", code="CKPT0215"
        ) from None
    defined = dict(_yield_defined_names(tree))
    if name not in defined and "*" not in defined and "__getattr__" not in defined:
        functions = [n for n, node in defined.items() if isinstance(node, ast.FunctionDef) and not n.startswith("_")]
        there = f" It defines {', '.join(functions[:8])}." if functions else ""
        raise UsageError(f"{said}: {file} has no function {name}.{there}", code="CKPT0215")
    node = defined.get(name)
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not node.decorator_list:
        a = node.args
        plain = [*a.posonlyargs, *a.args]
        required = [x.arg for x in plain[: len(plain) - len(a.defaults)]]
        required += [x.arg for x, default in zip(a.kwonlyargs, a.kw_defaults, strict=True) if default is None]
        _refuse_other_arguments(job, name, [n for n in required if n not in _OFFERED])


def _refuse_other_arguments(job: str, name: str, others: list[str]) -> None:
    """Refuse a function that requires arguments which ckpttool does not pass.

    Args:
        job: the value of --job, for the error.
        name: the function.
        others: names of those arguments; [] is accepted.

    Raises:
        UsageError: there are such arguments.
    """
    if others:
        raise UsageError(
            f"{argument('job', job)}: {name}() requires {', '.join(others)}, but ckpttool passes only mesh and device.",
            code="CKPT0215",
        )


def _yield_defined_names(tree: ast.AST) -> Iterator[tuple[str, ast.AST | None]]:
    """Yield (name, definition) for the names at the top level of a module, also inside an if, a try or a with.

    The definition is None for an import or a variable. The name "*" stands for `from x import *` and for code that may
    define any name.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name, node
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from ((a.asname or a.name.partition(".")[0], None) for a in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, None
        elif isinstance(node, ast.Name) and node.id in ("globals", "exec", "setattr"):
            yield "*", None
        elif not isinstance(node, ast.Lambda):
            yield from _yield_defined_names(node)


def _find_module(module: str) -> ModuleSpec | None:
    """Find where a module is: installed or on PYTHONPATH, or else in the current folder; None if nowhere. Nothing is
    imported.

    `module` is its dotted name.
    """
    top, *inner = module.split(".")
    spec = _find_installed_module(top) or PathFinder.find_spec(top, [os.getcwd()]) if top.isidentifier() else None
    for part in inner:
        if spec is None or spec.submodule_search_locations is None:
            return None
        # without the names before it, which would have to be imported for a folder without __init__.py
        spec = PathFinder.find_spec(part, list(spec.submodule_search_locations))
    return spec


def _find_installed_module(top: str) -> ModuleSpec | None:
    """Find the installed module of a name without dots; None if there is none."""
    try:
        return importlib.util.find_spec(top)
    except ValueError:  # __main__
        return None


def _add_to_sys_path(folder: str) -> None:
    """Put a folder first on sys.path, so that the user's job can import the modules in it, as a script can.

    A rank's path otherwise has only folders of its Python and of PYTHONPATH.
    """
    if folder not in sys.path:
        sys.path.insert(0, folder)


def call_build(
    settings: RunSettings, mesh: object
) -> tuple[Any, object, object, object, Callable[..., object] | None, Callable[[str, int], object] | None]:
    """Import the user's file or module, and call the function that builds the job.

    Args:
        settings: of the run; `settings.job` is the value of --job, such as "module.py:build".
        mesh: the DeviceMesh of the job, passed if the function has a parameter of that name.

    Returns:
        (model, optimizer, scheduler, data, loss, save), with None for what the function does not return. A returned
        tuple has no save.

    Raises:
        UsageError: there is no such function, it requires other arguments, or it returns something else. Its own errors
            pass through.
    """
    where, name = _split_job_argument(str(settings.job))
    said = argument("job", settings.job)
    if where.endswith(".py"):
        if not os.path.isfile(where):
            raise UsageError(f"{said}: the file {where} does not exist.", code="CKPT0212")
        _add_to_sys_path(os.path.dirname(make_path_absolute(where)))
        spec = importlib.util.spec_from_file_location(os.path.basename(where)[:-3], where)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        if _find_installed_module(where.partition(".")[0]) is None:
            _add_to_sys_path(os.getcwd())
        try:
            module = importlib.import_module(where)
        except ImportError as e:
            raise UsageError(f"{said}: {e}.", code="CKPT0215") from None
    build = getattr(module, name, None)
    if not callable(build):
        raise UsageError(f"{said}: {where} has no function {name}.", code="CKPT0215")
    offers = dict(zip(_OFFERED, (mesh, settings.device), strict=True))
    asked = inspect.signature(build).parameters
    needed = [
        p.name for p in asked.values() if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    _refuse_other_arguments(str(settings.job), name, [n for n in needed if n not in offers])
    given = build(**{k: v for k, v in offers.items() if k in asked})
    parts = ("model", "optimizer", "scheduler", "data", "loss", "save")
    if isinstance(given, Mapping):
        odd = set(given) - set(parts)
        if odd or "model" not in given:
            raise UsageError(
                f"{said}: returned {sorted(given)}; expected a dict with {', '.join(parts)}.", code="CKPT0215"
            )
        out = [given.get(k) for k in parts]
    else:
        out = [*(given if isinstance(given, tuple) else (given,))]
        if not 1 <= len(out) <= 5:
            raise UsageError(f"{said}: returned {len(out)} values; expected {', '.join(parts[:5])}.", code="CKPT0215")
        out += [None] * (6 - len(out))
    if not hasattr(out[0], "named_parameters"):
        raise UsageError(f"{said}: the model is a {type(out[0]).__name__}, not a torch.nn.Module.", code="CKPT0215")
    if out[5] is not None and not callable(out[5]):
        raise UsageError(
            f"{said}: the save is a {type(out[5]).__name__}, not a function save(folder, step).", code="CKPT0215"
        )
    return out[0], out[1], out[2], out[3], out[4], out[5]


def check_batches_fit_model(
    model: torch.nn.Module, loss: Callable[..., object] | None, rows: Rows, vocabulary: int | None
) -> None:
    """Refuse data of build() that its model cannot be called with, before anything is loaded.

    Args:
        model: the model of build().
        loss: the job's own loss(model, batch); None: the model computes it from input_ids and labels.
        rows: gives the sample of an index; the first two are looked at.
        vocabulary: number of token ids; None if not known, then ids are not checked.

    Raises:
        UsageError: a sample is no row of tokens; samples differ in keys or shape; a token id is out of the vocabulary;
            the model or the loss takes other arguments.
    """
    import numpy as np

    two = [rows(0), rows(1)]
    sample = {k: np.asarray(v) for k, v in two[0].items()}
    how = (
        'A sample is a row of token ids, of shape (sequence,), or a dict of rows such as {"input_ids": row, "labels": '
        "row}."
    )
    if loss is None and "input_ids" not in sample:
        raise UsageError(
            f"a sample of the data of build() has {', '.join(sample) or 'no keys'}, but not input_ids. {how} Other "
            "samples need a loss(model, batch) of your own.",
            code="CKPT0217",
        )
    for key, x in sample.items():
        if loss is None and key in ("input_ids", "labels") and (x.ndim != 1 or x.dtype.kind not in "iu"):
            raise UsageError(
                f"{key} of a sample of build()'s data is {x.dtype} of shape {list(x.shape)}. {how}", code="CKPT0217"
            )
        if key not in two[1] or np.shape(two[1][key]) != x.shape:
            other = list(np.shape(two[1][key])) if key in two[1] else "missing"
            raise UsageError(
                f"{key} has shape {list(x.shape)} in sample 0 of build()'s data and {other} in sample 1. Rows of a "
                "batch are stacked, so every sample must have the same keys and shapes; pad them.",
                code="CKPT0217",
            )
    ids = sample.get("input_ids")
    if loss is None and vocabulary is not None and ids is not None and ids.size and int(ids.max()) >= vocabulary:
        raise UsageError(
            f"sample 0 of build()'s data has token {int(ids.max())}, but the vocabulary of the model has {vocabulary}: "
            "another tokenizer?",
            code="CKPT0217",
        )
    if loss is not None:
        try:
            inspect.signature(loss).bind(None, None)
        except TypeError as e:
            raise UsageError(
                f"loss of build() is called as loss(model, batch), but has {inspect.signature(loss)}: {e}.",
                code="CKPT0215",
            ) from None
        except ValueError:
            pass  # of C, without a signature
        return
    inner = getattr(model, "module", model)
    takes_labels = "labels" in inspect.signature(getattr(inner, "forward", inner)).parameters
    names = [k for k in sample if k != "labels"] + (["labels"] if takes_labels else [])
    if why := explain_unsupported_forward(model, dict.fromkeys(names)):
        raise UsageError(
            f"{why}. Rename its parameters, return samples with the keys that it takes, or return a loss(model, batch) "
            "from build() that calls the model as it wants.",
            code="CKPT0215",
        )
