"""Loads the reference of a comparison by the reader of the program that wrote it, and not by ckpttool's own loader:
what that does wrong to both sides would pass.

    found = plan_origin_load(job, opened, trained, scratch)  # a collective: what it loads, and why not the rest
    found.load()                                             # a collective

    a DCP folder        torch's dcp.load into the state dicts of the job
    torch.save          torch.load
    safetensors         safetensors, one tensor at a time
    a DeepSpeed save    DeepSpeed's ds_to_universal (deepspeed_reader.py): trained weights, slots of the optimizer

torch's set_model_state_dict and set_optimizer_state_dict put the state into the job, and the scheduler loads its own.
Nothing of the checkpoint runs: pickles are read with weights_only, and .metadata by an unpickler that knows only the
classes that torch's own has.
"""

from __future__ import annotations

import io
import os
import pickle
import re
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, field
from enum import Enum, EnumMeta
from itertools import zip_longest
from typing import Any

from ...engine.opening import OpenCheckpoint
from ...live.collectives import gather_objects
from ...live.job_optimizers import list_optimizers
from ...storage.urls import make_path_absolute
from ..trace.live_facts import list_tied_names, named_parameters
from . import deepspeed_reader
from .build import Job
from .round_trip import overwrite_tensors

__all__ = ["OriginLoad", "plan_origin_load"]

#: Keys of the model where a file has several state dicts with the names of the job, such as an average of the weights.
_MODEL_KEYS = frozenset(("model", "module", "state_dict", "model_state_dict"))
_DEPTH = 4  # of dicts in a file in which the state is looked for
_FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # torch/serialization.py: as if every torch.load had weights_only=True


@dataclass
class OriginLoad:
    """What the readers of the origin load: `readers` {component: name of the reader}, `lacking` {component: why
    ckpttool's loader has to}. With `partial`, ckpttool's loader has to run before `load`."""

    readers: dict[str, str] = field(default_factory=dict)
    lacking: dict[str, str] = field(default_factory=dict)
    partial: bool = False
    steps: list[Callable[[], None]] = field(default_factory=list)

    def load(self) -> None:
        """Load the components that `readers` names. A collective.

        Errors of readers pass through; the job's state is then partly overwritten.
        """
        with _weights_only():
            for step in self.steps:
                step()


class _Target:
    """The state dicts of a job, by the names that torch gives them, and where a checkpoint has them."""

    def __init__(self, job: Job) -> None:
        """Collect the state dicts and the names of a job; nothing is loaded."""
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        self.job = job
        self.optimizers = list_optimizers(job.optimizer)
        self.model: dict[str, Any] = get_model_state_dict(job.model)
        self.aliases = {n: group for group in list_tied_names(job.model) for n in group}
        self.trained = [n for n, p in named_parameters(job.model).items() if p.requires_grad]
        state = {} if job.scheduler is None else job.scheduler.state_dict()
        self.scheduler = [k for k, x in state.items() if isinstance(k, str) and x not in ({}, [], ())]

    def names_of_model(self, known: Collection[str], prefix: str = "") -> list[str] | None:
        """List the FQNs of the model's state dict for which prefix + FQN is in `known`.

        None if there are none, or if the model has a tensor whose FQNs (several for a tied parameter) are all missing
        there.

        Args:
            known: names in a checkpoint.
            prefix: what these names have before the FQN, such as "model.".
        """
        found = [n for n in self.model if prefix + n in known]
        held = set(found)
        lacks = (n for n, x in self.model.items() if n not in held and hasattr(x, "element_size"))
        return None if not found or any(held.isdisjoint(self.aliases.get(n, ())) for n in lacks) else found

    def spoil_model(self, names: Collection[str]) -> None:
        """Overwrite tensors of the model with a number that no training gives them, so that later comparisons show
        which of them a reader has left out.

        Args:
            names: FQNs in the model's state dict; entries that are no tensors stay.
        """
        overwrite_tensors(self.model[n] for n in names if hasattr(self.model[n], "element_size"))

    def set_optimizer(self, state: dict[str, Any], options: Any) -> None:
        """Let torch load a state dict into the optimizers.

        Args:
            state: the state dict, by FQN.
            options: torch's StateDictOptions.
        """
        from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

        set_optimizer_state_dict(self.job.model, self.optimizers, state, options=options)


def plan_origin_load(job: Job, opened: OpenCheckpoint, parts: list[str], scratch: str | None) -> OriginLoad:
    """Find which components of a checkpoint the readers of the program that wrote it can load into a job. A collective.

    Nothing is loaded yet.

    Args:
        job: the job as it was built.
        opened: the checkpoint.
        parts: the components to load: "model", "optim", "scheduler".
        scratch: a folder that all ranks share, for DeepSpeed's conversion; None if there is none.
    """
    folder = opened.source.local_folder
    out = OriginLoad()
    why = "no other reader of this layout finds it under the names of the job"
    if folder is None or opened.inputs:
        why = "it is read from a store or an archive" if folder is None else "it is computed from several checkpoints"
    else:
        files = [make_path_absolute(os.path.join(folder, f)) for f in opened.checkpoint.files]
        try:
            with _weights_only():
                _add_readers(_Target(job), files, parts, scratch, out, folder if opened.folder else None)
        except Exception as e:  # a reader that fails is none; ckpttool's loader says what is wrong with the files
            out, why = OriginLoad(), f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"
    common = [set(found) for found in gather_objects(list(out.readers))]
    if any(found != common[0] for found in common):
        out, why = OriginLoad(), "the readers of its origin find it on some ranks only"
    out.lacking = {p: out.lacking.get(p, why) for p in parts if p not in out.readers}
    return out


def _add_readers(
    target: _Target, files: list[str], parts: list[str], scratch: str | None, out: OriginLoad, root: str | None
) -> None:
    """Add to `out` the readers that can load the components `parts` from the files, and the functions that load them.

    `root` is the folder of the checkpoint, where other files are also tried; None if the checkpoint is a single file.
    """
    folders = list(dict.fromkeys(map(os.path.dirname, files)))
    if save := deepspeed_reader.find_save_folder(files):
        out.partial = True
        try:
            found = deepspeed_reader.prepare_deepspeed_load(target.job, save, scratch, "optim" in parts)
        except deepspeed_reader.NoReader as e:
            out.lacking = dict.fromkeys(parts, str(e))
            return
        out.readers |= found.readers
        out.steps.append(found.load)
        return
    with_metadata = [folder for folder in folders if os.path.isfile(os.path.join(folder, ".metadata"))]
    for folder in with_metadata:
        _plan_dcp_load(target, folder, [p for p in parts if p not in out.readers], out)
    if not with_metadata:
        _plan_file_loads(target, files, parts, out)
    # what lies beside folders of DCP may be another copy of the weights, but their scheduler
    left = [p for p in parts if p not in out.readers and (p == "scheduler" or not with_metadata)]
    if root is not None and left:
        beside = [os.path.join(d, n) for d in dict.fromkeys((root, *folders)) for n in sorted(os.listdir(d))]
        _plan_file_loads(target, [f for f in beside if f.endswith((".pt", ".bin", ".pth"))], left, out)


@contextmanager
def _weights_only() -> Iterator[None]:
    """While the block runs, make every torch.load, also within torch itself, load with weights_only=True, which refuses
    a pickle with anything but tensors and plain data."""
    before = os.environ.get(_FORCE)
    os.environ[_FORCE] = "1"
    try:
        yield
    finally:
        os.environ.pop(_FORCE) if before is None else os.environ.update({_FORCE: before})


# ------------------------------------------------------------------------------------------------------- DCP folders


def _make_dcp_reader(folder: str) -> Any:
    """Return torch's FileSystemReader of a folder, which reads .metadata with `_MetadataUnpickler`."""
    from torch.distributed.checkpoint import filesystem

    class PlainReader(filesystem.FileSystemReader):
        """torch's reader; its pickle.load is replaced, since that would run what a hostile .metadata says."""

        def read_metadata(self, *args: object, **kwargs: object) -> Any:
            with open(os.path.join(folder, ".metadata"), "rb") as f:
                found = _MetadataUnpickler(io.BytesIO(f.read())).load()
            if getattr(found, "storage_meta", None) is None:
                from torch.distributed.checkpoint.metadata import StorageMeta

                found.storage_meta = StorageMeta()
            found.storage_meta.load_id = self.load_id
            return found

    return PlainReader(folder)


#: What a .metadata calls beside the classes of torch: they make plain data of their arguments.
_METADATA_HELPERS = frozenset(
    (
        ("collections", "OrderedDict"),
        ("pathlib", "PosixPath"),
        ("pathlib", "PurePosixPath"),
        ("torch.serialization", "_get_layout"),
    )
)


class _MetadataUnpickler(pickle.Unpickler):
    """An unpickler that knows the classes of torch's metadata, and no others."""

    def find_class(self, module: str, name: str) -> object:
        """Return a class of torch's metadata, a dtype, or a function that returns members of such a class.

        Raises:
            UnpicklingError: the name is of anything else.
        """
        import torch

        if (module, name) in (("builtins", "getattr"), ("__builtin__", "getattr")):
            return _get_enum_member
        found: Any = None
        if module in ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"):
            found = super().find_class(module, name)
        elif module == "torch":
            found = getattr(torch, name, None)
        elif (module, name) in _METADATA_HELPERS:
            return super().find_class(module, name)
        own = isinstance(found, type) and (found.__module__ == module or found in (torch.Size, torch.device))
        if own or isinstance(found, (torch.dtype, torch.memory_format, torch.layout)):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} is no class of torch's metadata")


def _get_enum_member(cls: object, name: str) -> Enum:
    """Return a member of an enumeration, which Python 3.11.0 to 3.11.3 pickles as a call of getattr.

    Raises:
        pickle.UnpicklingError: `cls` is no enumeration, or has no such member.
    """
    if not isinstance(cls, EnumMeta) or name not in cls.__members__:
        raise pickle.UnpicklingError(f"getattr({cls!r}, {name!r}) is no member of an enumeration")
    member: Enum = cls.__members__[name]
    return member


def _plan_dcp_load(target: _Target, folder: str, parts: list[str], out: OriginLoad) -> None:
    """Add to `out` a function that loads those components `parts` of a job that are in a DCP folder, and their
    reader."""
    from torch.distributed.checkpoint import state_dict_loader
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_model_state_dict,
    )

    keys = set(_make_dcp_reader(folder).read_metadata().state_dict_metadata)
    known = {key[:i] for key in keys for i in (*(i for i, c in enumerate(key) if c == "."), len(key))}
    where: dict[str, str] = {}
    if "model" in parts and (prefix := _find_model_prefix(target, keys, known)) is not None:
        where["model"] = prefix
    if "optim" in parts and (prefix := _find_optimizer_prefix(target, keys)) is not None:
        where["optim"] = prefix
    if "scheduler" in parts and (prefix := _find_scheduler_prefix(target, keys, known, where)) is not None:
        where["scheduler"] = prefix
    names = target.names_of_model(known, where["model"]) if "model" in where else None

    def load() -> None:
        """Let torch load the state dicts, and put them into the job."""
        tree: dict[str, Any] = {}
        options = StateDictOptions(strict=False)
        if names is not None:
            target.spoil_model(names)
            _put_under_prefix(tree, where["model"], _with_text_keys({n: target.model[n] for n in names}))
        if "optim" in where:
            before = where["optim"]
            flat = any(f"{before}param_groups.{n}" in known for n in target.trained)
            options.flatten_optimizer_state_dict = flat
            for optimizer in target.optimizers:
                optimizer.state.clear()
            made: Any = get_optimizer_state_dict(target.job.model, target.optimizers, options=options)
            if flat:
                made = {k: x for k, x in made.items() if not k.startswith("state.") or before + k in known}
            else:
                made["state"] = {n: x for n, x in made["state"].items() if f"{before}state.{n}" in known}
            _put_under_prefix(tree, before, made)
        if "scheduler" in where:
            schedule = target.job.scheduler.state_dict()
            _put_under_prefix(tree, where["scheduler"], _with_text_keys(schedule))
        state_dict_loader.load(tree, storage_reader=_make_dcp_reader(folder))
        if names is not None:
            found = _restore_keys(_get_under_prefix(tree, where["model"]), target.model)
            set_model_state_dict(target.job.model, {n: found[n] for n in names}, options=options)
        if "optim" in where:
            target.set_optimizer(_get_under_prefix(tree, where["optim"]), options)
        if "scheduler" in where:
            target.job.scheduler.load_state_dict(_restore_keys(_get_under_prefix(tree, where["scheduler"]), schedule))

    if where:
        out.readers |= dict.fromkeys(where, "torch's dcp.load")
        out.steps.append(load)


def _find_model_prefix(target: _Target, keys: Collection[str], known: Collection[str]) -> str | None:
    """Return the prefix of the model's names in a DCP folder, such as "model." or ""; None if there is none, or
    several.

    Args:
        target: the job.
        keys: the keys of the folder.
        known: those, and their prefixes up to each dot.
    """
    first = next(n for n, x in target.model.items() if hasattr(x, "element_size"))
    ends = [first, *target.aliases.get(first, ())]
    starts = {k[: -len(n)] for n in ends for k in keys if k == n or k.endswith(f".{n}")}
    found = [p for p in starts if target.names_of_model(known, p) is not None and "state." not in p]
    if len(found) > 1:
        found = [p for p in found if p[:-1].rpartition(".")[2] in _MODEL_KEYS]
    return found[0] if len(found) == 1 else None


def _find_optimizer_prefix(target: _Target, keys: Collection[str]) -> str | None:
    """Return the prefix of the optimizer's state in a DCP folder, such as "optim."; None if there is none, or
    several."""
    trained, found = set(target.trained), set()
    for k in keys:
        for at in (m.start() for m in re.finditer(r"(?<![^.])state\.", k)):
            name = k[at + len("state.") :]
            if any(name[:i] in trained for i, c in enumerate(name) if c == "."):
                found.add(k[:at])
    return found.pop() if len(found) == 1 else None


def _find_scheduler_prefix(
    target: _Target, keys: Collection[str], known: Collection[str], where: Mapping[str, str]
) -> str | None:
    """Return the prefix of the scheduler's state in a DCP folder; None if there is none, or several.

    Args:
        target: the job.
        keys, known: as in `_find_model_prefix`.
        where: {component: prefix} of the other components, where the scheduler's state cannot be.
    """
    if not target.scheduler:
        return None
    first = target.scheduler[0]
    starts = {n[: -len(first)] for n in known if n == first or n.endswith(f".{first}")}
    others = [p for p in where.values() if p]
    found = [
        p
        for p in starts
        if all(p + k in known for k in target.scheduler) and not any(p.startswith(other) for other in others)
    ]
    return found[0] if len(found) == 1 else None


def _with_text_keys(x: object) -> Any:
    """Return a tree with all keys converted to text, since dcp.load would leave other keys and add text ones next to
    them."""
    if isinstance(x, Mapping):
        return {str(k): _with_text_keys(y) for k, y in x.items()}
    return [_with_text_keys(y) for y in x] if type(x) is list else x


def _restore_keys(x: object, live: object) -> Any:
    """Return a tree that `_with_text_keys` made, with the original keys and mapping types again.

    Args:
        x: the tree with text keys, into which values may have been loaded.
        live: the tree that `_with_text_keys` converted; it is not changed.
    """
    if isinstance(x, dict) and isinstance(live, Mapping):
        own = {str(k): k for k in live}
        found = {own.get(k, k): _restore_keys(y, live.get(own.get(k, k))) for k, y in x.items()}
        if type(live) is dict or not isinstance(live, MutableMapping):
            return found
        out = copy(live)
        out.clear()
        out.update(found)
        return out
    if type(x) is list and isinstance(live, (list, tuple)):
        return [_restore_keys(y, z) for y, z in zip_longest(x, live[: len(x)])]
    return x


def _put_under_prefix(tree: dict[str, Any], prefix: str, state: Mapping[str, object]) -> None:
    """Put a state dict into a nested dict under a dotted prefix such as "app.model."; for "" into the dict itself."""
    for part in prefix.split(".")[:-1]:
        tree = tree.setdefault(part, {})
    tree.update(state)


def _get_under_prefix(tree: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Return the dict that `_put_under_prefix` filled under a prefix."""
    for part in prefix.split(".")[:-1]:
        tree = tree[part]
    return tree


# --------------------------------------------------------------------------------------- files of torch, safetensors


def _plan_file_loads(target: _Target, files: list[str], parts: list[str], out: OriginLoad) -> None:
    """Add to `out` the functions that load the components `parts` from files of torch.save or safetensors, and the
    readers."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    dicts: list[tuple[tuple[str, ...], dict[Any, Any]]] = []
    for f in files if parts else ():
        if not f.endswith((".safetensors", ".json")):
            dicts += _walk_dicts(_load_plain_file(f), (os.path.splitext(os.path.basename(f))[0],))
    stored = _map_tensors_to_files([f for f in files if f.endswith(".safetensors")])
    if "model" in parts and target.names_of_model(stored) is not None:
        out.readers["model"] = "safetensors"
        out.steps.append(lambda: _fill_model_from_safetensors(target, stored))
    elif "model" in parts:
        # the state of an optimizer has the names of the model for its keys, too
        tensors = [(p, {n for n, x in d.items() if hasattr(x, "element_size")}, d) for p, d in dicts]
        models = [(p, d) for p, names, d in tensors if target.names_of_model(names) is not None]
        if len(models) > 1:
            models = [(p, d) for p, d in models if p[-1] in _MODEL_KEYS]
        if len(models) == 1:
            out.readers["model"] = "torch.load"
            out.steps.append(lambda: _set_model_state(target, models[0][1]))
    optimizers = [d for _, d in dicts if {"state", "param_groups"} <= d.keys() and isinstance(d["state"], dict)]
    if (
        "optim" in parts
        and len(optimizers) == 1
        and (state := _name_optimizer_state(target, optimizers[0])) is not None
    ):
        out.readers["optim"] = "torch.load"
        out.steps.append(lambda: target.set_optimizer(state, StateDictOptions(full_state_dict=True)))
    schedulers = [d for _, d in dicts if set(target.scheduler) <= d.keys()]
    if "scheduler" in parts and target.scheduler and len(schedulers) == 1:
        out.readers["scheduler"] = "torch.load"
        out.steps.append(lambda: target.job.scheduler.load_state_dict(schedulers[0]))


def _load_plain_file(path: str) -> object:
    """Return what torch.load reads from a file with weights_only, memory-mapped if possible; None if it cannot read
    it."""
    import torch

    for mmap in (True, False):
        with suppress(RuntimeError, ValueError, pickle.UnpicklingError, EOFError, KeyError):
            return torch.load(path, map_location="cpu", mmap=mmap, weights_only=True)
    return None


def _walk_dicts(tree: object, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], dict[object, object]]]:
    """Yield (keys that lead to it, dict) for every dict in a tree of dicts and lists, to a limited depth."""
    if isinstance(tree, dict):
        yield path, tree
    if len(path) > _DEPTH or not isinstance(tree, (dict, list)):
        return
    for key, x in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield from _walk_dicts(x, (*path, str(key)))


def _set_model_state(target: _Target, found: Mapping[str, Any]) -> None:
    """Let torch load an unsharded state dict into the model."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    names = target.names_of_model(found.keys()) or []
    target.spoil_model(names)
    options = StateDictOptions(full_state_dict=True, strict=False)
    set_model_state_dict(target.job.model, {n: found[n] for n in names}, options=options)


def _name_optimizer_state(target: _Target, saved: Mapping[str, Any]) -> dict[str, object] | None:
    """Return an optimizer's state dict with FQNs in place of numbers, by the parameter order of the job's optimizer.

    One that has FQNs already is returned as it is. None if the job has several optimizers, or if their param groups
    have other numbers of parameters.
    """
    if all(isinstance(k, str) for k in saved["state"]):
        return dict(saved)
    if len(target.optimizers) != 1:
        return None
    fqns = {id(p): n for n, p in named_parameters(target.job.model).items()}
    groups = target.optimizers[0].param_groups
    if [len(g["params"]) for g in groups] != [len(g["params"]) for g in saved["param_groups"]]:
        return None
    names = {
        i: fqns[id(p)]
        for live, group in zip(groups, saved["param_groups"], strict=True)
        for p, i in zip(live["params"], group["params"], strict=True)
    }
    state = {names[i]: x for i, x in saved["state"].items()}
    return {
        "state": state,
        "param_groups": [{**g, "params": [names[i] for i in g["params"]]} for g in saved["param_groups"]],
    }


def _map_tensors_to_files(files: list[str]) -> dict[str, str]:
    """Return {name of a tensor: path of its file} for safetensors files."""
    from safetensors import safe_open

    out: dict[str, str] = {}
    for path in files:
        with safe_open(path, "pt") as f:
            out |= dict.fromkeys(f.keys(), path)
    return out


def _fill_model_from_safetensors(target: _Target, stored: Mapping[str, str]) -> None:
    """Copy tensors from safetensors files into the model, one after the other.

    `stored` is {name of a tensor: path of its file}.
    """
    from safetensors import safe_open

    names = target.names_of_model(stored) or []
    target.spoil_model(names)
    for path in dict.fromkeys(stored[n] for n in names):
        with safe_open(path, "pt") as f:
            for n in (n for n in names if stored[n] == path):
                deepspeed_reader.fill_tensor(target.model[n], f.get_tensor(n))
