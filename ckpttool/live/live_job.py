"""`LiveJob`: a model, an optimizer and a scheduler of a running job, compared with a checkpoint by name and shape.

It makes a state dict of the job's own tensors, which torch's planner then fills in place. Names, shapes and kinds are
compared before a byte is written; at the end, what the job would save is compared with what is in the files. Options of
a param group come from the group of the checkpoint that lists its parameters; what is not state (`foreach`, `fused`) is
not touched.

It does not go through set_optimizer_state_dict (torch/distributed/checkpoint/state_dict.py, 2.13), which cannot load a
group without gradients, wants a state for parameters that never had one, and where the parameters of one group lie in
several of the checkpoint lets the last of them win.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch

from ..errors import Differs, DoesNotFit, Unsupported, UsageError, argument
from ..formats.pickles import short
from ..index.checkpoint import Path, TensorEntry, Value, joined, same_bytes
from ..index.composites import MARK
from ..index.trees import nest
from ..printable import list_first
from . import job_optimizers
from .collectives import get_rank_and_world_size, run_on_first_rank
from .job_optimizers import ParamGroup
from .live_values import Keys, find_first_difference, fit_to_live, has_no_leaves, iterate_leaves, set_value_at
from .plain_values import to_torch_dtype
from .reader import LiveReader, ReadRequest

if TYPE_CHECKING:
    import torch

__all__ = ["LiveJob"]

_SMALL_TENSOR = 1 << 20  # `Loaded.values` holds tensors up to this size
#: What a module's get_extra_state() returns has this name (torch/nn/modules/module.py), and its leaves begin with it.
_EXTRA_STATE = re.compile(r"(?:.*?\.)?_extra_state(?=\.|$)", re.DOTALL)


class LiveJob:
    """A live job and what a checkpoint has for it.

    `live` has the tensors of its model by FQN; `wanted` is the state dict of the job's own tensors that torch's planner
    fills.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: job_optimizers.Optimizers, scheduler: Any, opened: LiveReader
    ) -> None:
        """Collect the names that the job and the checkpoint have; nothing is loaded yet.

        Args:
            model: the module, sharded or not.
            optimizer: None, its optimizer, or several in an iterable.
            scheduler: the scheduler to load, with state_dict() and load_state_dict(); None for none.
            opened: the reader of the open checkpoint.

        Raises:
            Unsupported: the model is wrapped by FSDP1, or on the meta device.
            UsageError: `optimizer` is something else, or a parameter is in two of the optimizers.
        """
        from torch.distributed.checkpoint.state_dict import get_model_state_dict
        from torch.distributed.fsdp import FullyShardedDataParallel

        if any(isinstance(m, FullyShardedDataParallel) for m in model.modules()):
            raise Unsupported(
                "the model is wrapped by FSDP1, whose flat parameters can be loaded only from its own checkpoints. "
                f"Convert the checkpoint with {argument('to', 'fsdp1')}, or use fully_shard for the model.",
                code="CKPT0337",
            )
        self.model, self.scheduler, self.opened = model, scheduler, opened
        self.optimizers = job_optimizers.list_optimizers(optimizer)
        self._owner = job_optimizers.map_parameters_to_optimizers(self.optimizers)
        ckpt = self.ckpt = opened.ckpt
        self.entries: dict[str, TensorEntry | Value] = {**ckpt.tensors, **ckpt.values}
        self.notes = list(ckpt.notes)
        state = get_model_state_dict(model)
        self.extra = {n: x for n, x in state.items() if _is_extra_state(n)}  # what get_extra_state() of modules returns
        self.live: dict[str, Any] = {
            n: t for n, t in state.items() if isinstance(t, torch.Tensor) and n not in self.extra
        }
        if any(t.is_meta for t in self.live.values()):
            raise Unsupported(
                "the model is on the meta device, where tensors have no memory. Call model.to_empty(device=...) first.",
                code="CKPT0337",
            )
        self.other = state.keys() - self.live.keys() - self.extra.keys()
        self.stored: dict[str, str] = {}
        self._stored_extra: dict[
            str, dict[str, str]
        ] = {}  # FQN of an extra state -> name of a leaf of it -> canonical name
        for n, e in self.entries.items():
            text = e.local_name
            owner = None if e.component != "model" else _EXTRA_STATE.match(text)
            if owner and (isinstance(e, Value) or owner[0] in self.extra):
                self._stored_extra.setdefault(owner[0], {})[text] = n
            elif e.component == "model" and isinstance(e, TensorEntry):
                self.stored[text] = n
        self.wanted: dict[str, Any] = {}
        self.rest: dict[str, object] = {}
        self.step: int | None = None
        self._scheduler_state: Any = None
        self._extra_state: dict[str, object] = {}  # FQN -> what set_extra_state() gets
        self._trained: list[tuple[torch.nn.Parameter, str]] = []  # (parameter, FQN that has its state)
        self._leaves: dict[
            str, dict[str, tuple[Keys, object]]
        ] = {}  # FQN -> leaf of the live state -> (path, what is there)
        self._data: dict[tuple[str, str], object] = {}  # (FQN, leaf): what was stored, of leaves that are no tensors
        self._options: list[tuple[ParamGroup, ParamGroup]] = []  # (live param group, options that it must have)
        self._undo: list[Callable[[], None]] = []

    def share_small(self) -> None:
        """Let rank 0 read the small tensors that every rank needs completely (options, counters, RNG states), and send
        them to the other ranks. A collective, which every rank has to call.

        A small file of each of 512 ranks would otherwise be read 512 times.

        Raises:
            CkpttoolError: rank 0 cannot read a tensor; raised on every rank.
        """
        if get_rank_and_world_size()[1] == 1:
            return

        def read() -> dict[str, bytes]:
            """Read the bytes of the small tensors."""
            named = {n: e for n, e in self.entries.items() if isinstance(e, TensorEntry) and self._is_small(e)}
            found = self._read_entries(named)
            return {n: t.reshape(-1).view(torch.uint8).numpy().tobytes() for n, t in found.items()}

        self.opened.small = run_on_first_rank(read, "cannot load the checkpoint, so no rank does")

    def _is_small(self, e: TensorEntry) -> bool:
        """Tell whether an entry of the checkpoint is one that `share_small` reads on rank 0 for all ranks: an option of
        a param group, an extra state, a step counter that is needed as the job's step, or an entry of at most 1 MiB
        outside model and optimizer."""
        if e.is_optimizer_state:
            return "trainer.step" not in self.entries and e.path[-1] == "step" and self.opened.is_scalar_state(e)
        if e.component in ("model", "optim"):
            in_groups = bool(self.optimizers) and e.is_param_group
            return in_groups or (e.component == "model" and _EXTRA_STATE.match(e.local_name) is not None)
        return e.nbytes <= _SMALL_TENSOR

    # ------------------------------------------------------------------------------------------------------- matching

    def match(self, anywhere: set[str]) -> None:
        """Compare the names, shapes and kinds of everything that is loaded, and make `wanted`. If it raises, `undo`
        restores what it has changed in the optimizers.

        Args:
            anywhere: the FQNs that some rank of the job has.

        Raises:
            DoesNotFit: the job has other names, shapes or kinds, with all differences; or an optimizer creates none.
            Unsupported: the checkpoint has other values for two names of one tied parameter, or no optimizer state.
            UsageError: the optimizer has a parameter that the model does not have.
        """
        problems = self._match_model(anywhere)
        contents = [] if problems else self._compare_tied(self._find_tied_names())
        if self.optimizers:
            problems += self._match_optimizer()
        if self.scheduler is not None:
            problems += self._match_scheduler()
        if problems or contents:
            kind = Unsupported if contents else DoesNotFit
            listing = "\n".join(f"  {text}" for text in [*contents, *problems])
            raise kind(f"{self.opened.path} does not fit the job:", listing=listing)
        self._read_rest()
        for name in self._iterate_leaf_names(self.wanted, ()):
            if self.opened.names.find(name) != name:
                raise Unsupported(f'"{name}" is not in {self.opened.path}.', code="CKPT0338")

    def _iterate_leaf_names(self, tree: Mapping[str, object], path: tuple[str, ...]) -> Iterator[str]:
        """Yield the dotted name of each leaf of a nested dict, such as "model.norm.weight".

        Args:
            tree: the nested dict.
            path: keys that lead to `tree` in a larger dict, with which every name begins; () for the outermost.
        """
        for key, x in tree.items():
            if isinstance(x, dict):
                yield from self._iterate_leaf_names(x, (*path, str(key)))
            else:
                yield ".".join((*path, str(key)))

    def _match_model(self, anywhere: set[str]) -> list[str]:
        """Compare the model with the checkpoint, add its tensors to `wanted` and read its extra states. Return a
        sentence for each difference.

        Args:
            anywhere: the FQNs that at least one rank of the job has.
        """
        problems = []
        tied = self._find_tied_names()
        missing = [n for n in self.live if n not in self.stored and not any(m in self.stored for m in tied.get(n, ()))]
        surplus = [n for n in self.stored if n not in anywhere]
        if missing:
            problems.append(f"the model has {_list_names(missing)}, which the checkpoint lacks.")
        if surplus:
            problems.append(f"the checkpoint has {_list_names(surplus)}, which the model lacks.")
        model: dict[str, torch.Tensor] = {}
        for fqn, t in self.live.items():
            if fqn not in self.stored:
                continue
            entry = self.ckpt.tensors[self.stored[fqn]]
            if entry.shape != tuple(t.shape):
                problems.append(
                    f'"{fqn}" has shape {list(entry.shape)} in the checkpoint and {list(t.shape)} in the model.'
                )
            model[fqn] = t
        if self.other:
            held = [n for n in self.other if f"model.{n}" in self.ckpt.values]
            self.notes.append(
                f"{_list_names(sorted(self.other))} of the model is not a tensor and was left as it is"
                + (f", though the checkpoint has {_list_names(held)}" if held else "")
            )
        self._read_extra_states(anywhere)
        self.wanted["model"] = model
        return problems

    def _read_extra_states(self, anywhere: set[str]) -> None:
        """Read the extra states that modules load through set_extra_state(), in the form that their get_extra_state()
        returns. A note is added on each that cannot be loaded.

        Args:
            anywhere: the FQNs that at least one rank of the job has.
        """
        own: list[str] = []
        surplus = [n for fqn, names in self._stored_extra.items() if fqn not in anywhere for n in names]
        for fqn, live in self.extra.items():
            names = self._stored_extra.get(fqn, {})
            found = self._read_entries({n: self.entries[n] for n in names.values()})
            tree = {fqn: deepcopy(live)}
            if names and _is_empty_state(live):  # nothing says which keys are no text
                tree = nest(
                    {tuple(name.removeprefix(fqn).split(".")): found[n] for name, n in names.items() if n in found}
                )
                self._extra_state[fqn] = tree.get("", tree) if isinstance(tree, dict) else tree
                continue
            known = set()
            for name, path, x in list(iterate_leaves(tree, names)):
                if names.get(name) in found:
                    known.add(name)
                    set_value_at(tree, path, fit_to_live(found[names[name]], x))
                elif not has_no_leaves(x):
                    own.append(name)
            surplus += names.keys() - known
            if known:
                self._extra_state[fqn] = tree[fqn]
        if own:
            self.notes.append(
                f"{_list_names(own)} of the model is as it was; the checkpoint has none that can be loaded"
            )
        if surplus:
            self.notes.append(
                f"{_list_names(sorted(surplus))} of the checkpoint was not loaded; the model has no such extra state"
            )

    def _compare_tied(self, tied: Mapping[str, Sequence[str]]) -> list[str]:
        """Compare the tensors that the checkpoint has under the different names of one tied parameter (only this rank's
        part of them), and leave only one of the names in `wanted`. Return a sentence for each pair that differs.

        Nothing is read if the index shows that the tensors are the same bytes.

        Args:
            tied: {FQN: the other FQNs of the same parameter}.
        """
        problems = []
        model = self.wanted["model"]
        for fqn in list(model):
            others = [n for n in tied.get(fqn, ()) if n in model] if fqn in model else []
            for other in others:
                pair = [self.ckpt.tensors[self.stored[n]] for n in (fqn, other)]
                if pair[0].coding != "raw" or not same_bytes(*pair):
                    both = [self._read_local_part(n) for n in (fqn, other)]
                    if not torch.equal(*(t.reshape(-1).view(torch.uint8) for t in both)):
                        problems.append(
                            f'"{fqn}" and "{other}" are one tied parameter in the job, but differ in the checkpoint.'
                        )
                del model[other]
        return problems

    def _read_local_part(self, fqn: str) -> torch.Tensor:
        """Return this rank's part of a tensor of the checkpoint, by its FQN in the model, in new memory and the
        checkpoint's dtype."""
        live = self.live[fqn]
        local = getattr(live, "_local_tensor", live)
        start = (0,) * live.dim()
        if local is not live and local.numel():
            (chunk,) = live.__create_chunk_list__()
            start = tuple(chunk.offsets)
        name = self.stored[fqn]
        out = torch.empty(tuple(local.shape), dtype=to_torch_dtype(self.ckpt.tensors[name].dtype))
        if out.numel():
            self.opened.fill([ReadRequest(name, start, tuple(local.shape), out)])
        return out

    def _find_tied_names(self) -> dict[str, list[str]]:
        """Return {FQN of a parameter: the other FQNs of the same parameter, [] if it is not tied}."""
        groups = job_optimizers.list_fqns_by_parameter(self.model).values()
        return {n: [m for m in group if m != n] for group in groups for n in group}

    # ------------------------------------------------------------------------------------------------------ optimizer

    def _match_optimizer(self) -> list[str]:
        """Compare the optimizers and their param groups with the checkpoint, let them create their state, and set their
        options. Return a sentence for each difference. `undo` reverts what this changes.

        Raises:
            Unsupported: the checkpoint has no optimizer state.
            DoesNotFit: an optimizer does not create its state.
            UsageError: an optimizer has a parameter that the model does not have.
        """
        if not any(e.component == "optim" for e in self.entries.values()):
            raise Unsupported(
                f"{self.opened.path} has no optimizer state. Pass optimizer=None to load only the weights.",
                code="CKPT0338",
            )
        names = job_optimizers.list_fqns_by_parameter(self.model)
        state: dict[str, dict[str, str]] = {}  # FQN -> name of a leaf of its state -> canonical name
        for n, e in self.entries.items():
            if e.slot is not None:
                state.setdefault(e.parameter, {})[joined(e.path[3:])] = n
        groups = self._read_groups()

        # nothing of the job is changed before all its groups fit
        plans, problems = self._choose_groups(names, state, groups)
        if problems:
            return problems

        # state is created with the checkpoint's options, which say which slots there are, as amsgrad does
        self._undo.append(job_optimizers.make_options_restorer([g for g, _ in plans]))
        chosen = [(g, groups[i]) for g, i in plans if i is not None]
        problems = self._prepare_slots(state, chosen)
        # after the step that creates state, which counts in the param groups of some optimizers
        self._options = [] if problems else [(g, job_optimizers.set_options(g, stored)) for g, stored in chosen]
        self._note_own_options(names, groups, plans)
        return problems

    def _choose_groups(
        self,
        names: Mapping[int, list[str]],
        state: Mapping[str, object],
        groups: Mapping[int, ParamGroup],
    ) -> tuple[list[tuple[ParamGroup, int | None]], list[str]]:
        """Find the checkpoint's param group for each of the job's, by their parameters, and list the parameters that
        have state in `_trained`.

        Args:
            names: {id of a live parameter: its FQNs}.
            state: {FQN: its state in the checkpoint}.
            groups: {number of a param group in the checkpoint: its options and "params"}.

        Returns:
            [(live param group, number of the checkpoint's; None if it has none of these parameters)], and a sentence
            for each difference.

        Raises:
            UsageError: an optimizer has a parameter that the model does not have.
        """
        member = {fqn: i for i, g in groups.items() for fqn in g.get("params") or ()}
        problems: list[str] = []
        without: list[str] = []
        used: set[str] = set()
        plans: list[tuple[ParamGroup, int | None]] = []
        for k, group in enumerate(g for o in self.optimizers for g in o.param_groups):
            found: dict[int, str] = {}
            for p in group["params"]:
                if id(p) not in names:
                    raise UsageError(
                        "the optimizer has a parameter that the model does not have. Create it from "
                        "model.parameters().",
                        code="CKPT0223",
                    )
                fqns = names[id(p)]
                fqn = next((f for f in fqns if f in state), next((f for f in fqns if f in member), fqns[0]))
                if fqn in member:
                    found.setdefault(member[fqn], fqn)
                elif member and p.requires_grad:
                    without.append(fqn)
                if fqn in state:
                    used.add(fqn)
                    self._trained.append((p, fqn))
            plans.append((group, next(iter(found), None)))
            distinct = {i: job_optimizers.select_loaded_options(groups[i]) for i in found}
            if len(found) > 1 and any(o != distinct[next(iter(found))] for o in distinct.values()):
                problems.append(
                    f"param group {k} of the job has parameters that lie in different groups of the checkpoint: "
                    + "; ".join(
                        f'"{found[i]}" in {i} ({_describe_differing_options(o, distinct)})'
                        for i, o in sorted(distinct.items())
                    )
                    + ". One of them would get the wrong options; build the optimizer with the same groups."
                )
        if without:
            problems.append(
                f"the job's optimizer trains {_list_names(without)}, which no param group of the checkpoint lists."
            )
        if surplus := [f for f in state if f not in used]:
            self.notes.append(
                f"the checkpoint has an optimizer's state of {_list_names(surplus)}, which the job's optimizer does "
                "not train; it was not loaded"
            )
        return plans, problems

    def _note_own_options(
        self,
        names: Mapping[int, list[str]],
        groups: Mapping[int, ParamGroup],
        plans: Sequence[tuple[ParamGroup, int | None]],
    ) -> None:
        """Add a note for each param group of the job that keeps all of its options, since the checkpoint has no group
        with its parameters, or some of them, since the checkpoint's group lacks these.

        Args:
            names: {id() of a live parameter: its FQNs}.
            groups: {number of a param group in the checkpoint: its options and "params"}.
            plans: [(live param group, number of the checkpoint's group for it; None if there is none)].
        """
        for k, (group, i) in enumerate(plans):
            if i is None and group["params"]:
                self.notes.append(
                    f'the checkpoint has no param group with "{names[id(group["params"][0])][0]}"; the options of that '
                    "group are those of the job"
                )
            elif i is not None and (
                own := sorted(job_optimizers.select_loaded_options(group).keys() - groups[i].keys())
            ):
                self.notes.append(
                    f"param group {i} of the checkpoint has no {_list_names(own)}; those of param group {k} are the "
                    "job's own"
                )

    def _read_groups(self) -> dict[int, ParamGroup]:
        """Read the checkpoint's param groups: {number of a group: {option: value}}."""
        options = {n: e for n, e in self.entries.items() if e.option is not None}
        leaves: dict[int, dict[Path, object]] = {}
        for name, x in self._read_entries(options).items():
            path = options[name].path
            leaves.setdefault(int(path[2]), {})[path[3:]] = x
        return {i: nest(found) for i, found in sorted(leaves.items())}

    def _read_entries(self, entries: Mapping[str, TensorEntry | Value]) -> dict[str, Any]:
        """Read entries and return {canonical name: plain data of a value, or the complete tensor on the CPU}. Values of
        unknown classes are left out, with a note.

        Args:
            entries: {canonical name: entry of the index}.
        """
        out: dict[str, Any] = {}
        wanted: list[ReadRequest] = []
        for name, e in entries.items():
            if isinstance(e, TensorEntry):
                data = bytearray(self.opened.small.get(name, b""))
                out[name] = torch.empty(e.shape, dtype=to_torch_dtype(e.dtype))
                if data:
                    out[name] = torch.frombuffer(data, dtype=out[name].dtype).reshape(e.shape)
                elif e.numel:
                    wanted.append(ReadRequest(name, (0,) * len(e.shape), e.shape, out[name]))
                continue
            try:
                out[name] = self.opened.value(name)
            except Unsupported as error:
                self.notes.append(f"left out: {error}")
        if wanted:
            self.opened.fill(wanted)
        return out

    def _prepare_slots(self, state: dict[str, dict[str, str]], plans: job_optimizers.Plans) -> list[str]:
        """Let the optimizers create their state for every parameter that has one in the checkpoint, and add its leaves
        to `wanted`. Return a sentence for each difference.

        torch's planner gets the leaves without nesting, under the names that flattened checkpoints have ("GG.0" in a
        list of tensors).

        Args:
            state: {FQN: {name of a leaf of its state: canonical name}}.
            plans: [(live param group, the checkpoint's group with its options)].

        Raises:
            DoesNotFit: an optimizer does not create its state.
        """
        before = [(o, dict(o.state)) for o in self.optimizers]

        def back() -> None:
            """Restore the state that the optimizers had."""
            for optimizer, old in before:
                optimizer.state.clear()
                optimizer.state.update(old)

        self._undo.append(back)
        wanted = {id(p) for p, _ in self._trained}
        for optimizer in self.optimizers:
            mine = [p for p, _ in self._trained if self._owner[id(p)] is optimizer]
            if not all(optimizer.state.get(p) for p in mine):
                theirs = [(g, stored) for g, stored in plans if any(g is x for x in optimizer.param_groups)]
                job_optimizers.create_optimizer_state(optimizer, mine, theirs)
            for p in [p for p in optimizer.state if id(p) not in wanted]:
                del optimizer.state[p]
        problems: list[str] = []
        slots: dict[str, dict[str, object]] = {}
        for p, fqn in self._trained:
            found = iterate_leaves(self._owner[id(p)].state[p], state[fqn])
            self._leaves[fqn] = {name: (path, x) for name, path, x in found}
            slots[fqn] = {}
            for name, (_, x) in self._leaves[fqn].items():
                entry = self.entries.get(state[fqn].get(name, ""))
                if isinstance(entry, TensorEntry) or (entry is not None and self.opened.is_scalar_state(entry)):
                    slots[fqn][name] = x
                elif entry is not None:
                    self._data[fqn, name] = self.opened.value(state[fqn][name])
            problems += self._find_slot_problems(fqn, state[fqn])
            if len(problems) > 3:
                break
        self.wanted["optim"] = {"state": slots}
        return problems

    def _find_slot_problems(self, fqn: str, names: Mapping[str, str]) -> list[str]:
        """Compare the optimizer state of one parameter between job and checkpoint, by names and shapes. Return a
        sentence for each difference, [] if it fits.

        Args:
            fqn: FQN of the parameter.
            names: {name of a leaf of its state: canonical name} in the checkpoint.
        """
        live = {name: x for name, (_, x) in self._leaves[fqn].items()}
        full = {k for k, n in names.items() if n in self.ckpt.tensors or not _is_empty_state(self.ckpt.values[n].data)}
        if full - live.keys() or any(not has_no_leaves(x) for k, x in live.items() if k not in names):
            return [
                f'the optimizer\'s state of "{fqn}" is {_list_names(sorted(full))} in the checkpoint and '
                f"{_list_names(sorted(live))} in the job: these are different optimizers."
            ]
        problems = []
        for name, x in live.items():
            entry = self.ckpt.tensors.get(names.get(name, ""))
            if (fqn, name) in self._data and _list_tensor_shapes(x) != _list_tensor_shapes(
                fit_to_live(self._data[fqn, name], x)
            ):
                problems.append(f'"{name}" of "{fqn}" has tensors of other shapes in the checkpoint than in the job.')
            if entry is None or entry.shape == tuple(getattr(x, "shape", ())):
                continue
            here = list(x.shape) if isinstance(x, torch.Tensor) else f"none, as a {type(x).__name__},"
            problems.append(
                f'"{name}" of "{fqn}" has shape {list(entry.shape)} in the checkpoint and {here} in the job.'
            )
        return problems

    # ------------------------------------------------------------------------------------------------------- the rest

    def _match_scheduler(self) -> list[str]:
        """Compare the scheduler with the checkpoint, and keep the state that it is to load. Return a sentence for each
        difference.

        Raises:
            DoesNotFit: the checkpoint has no scheduler state.
        """
        entries = {n: e for n, e in self.entries.items() if e.component == "scheduler" and e.path[1:]}
        if not entries:
            raise DoesNotFit(
                f"{self.opened.path} has no scheduler state, and the job has a scheduler. Leave the scheduler out, and "
                "set it up from the step that is loaded."
            )
        tree = nest({entries[n].path[1:]: x for n, x in self._read_entries(entries).items()})
        if isinstance(tree, list) and len(tree) == 1:  # Lightning's list of schedulers, of one
            tree = tree[0]
        live = self.scheduler.state_dict()
        filled = {k for k, x in live.items() if not has_no_leaves(x)}
        lacks = sorted(filled - set(tree)) if isinstance(tree, dict) else ["its keys"]
        if lacks:
            return [
                f"the state of the job's {type(self.scheduler).__name__} has {_list_names(lacks)}, that of the "
                "scheduler "
                f"in the checkpoint has {_list_names(sorted(map(str, tree)))}: they are of different kinds. Leave the "
                "scheduler out, and set it up from the step that is loaded."
            ]
        for key, x in live.items():
            if _holds_scheduler_states(x) and isinstance(tree.get(key), (list, tuple)) and len(x) != len(tree[key]):
                return [
                    f'"{key}" of the job\'s {type(self.scheduler).__name__} has {len(x)} schedulers, and that in the '
                    f"checkpoint has {len(tree[key])}. Build the scheduler as the job did that saved the checkpoint."
                ]
        self._scheduler_state = fit_to_live(tree, live)
        return []

    def _read_rest(self) -> None:
        """Read into `rest` the entries outside model and optimizer (without the scheduler's if a scheduler is loaded),
        as a nested dict, and set `step` to the number of steps trained, None if the checkpoint does not tell. Tensors
        of more than 1 MiB are left out, with a note."""
        entries: dict[str, TensorEntry | Value] = {}
        for n, e in self.entries.items():
            component = e.component
            if component in ("model", "optim") or (component == "scheduler" and self._scheduler_state is not None):
                continue
            if isinstance(e, TensorEntry) and e.nbytes > _SMALL_TENSOR:
                self.notes.append(f'"{n}" has {e.nbytes} bytes and is not among the values; read it by storage_reader')
            else:
                entries[n] = e
        if left := [n for n, e in self.entries.items() if self._has_no_place(e)]:
            self.notes.append(f"{_list_names(left)} of the checkpoint was not loaded; nothing in the job takes it")
        leaves = {entries[n].path: x for n, x in self._read_entries(entries).items()}
        self.rest = nest(leaves) if leaves else {}
        step: Any = leaves.get(("trainer", "step"))
        if step is None:
            steps = {
                n: e
                for n, e in self.entries.items()
                if e.is_optimizer_state and e.path[-1] == "step" and self.opened.is_scalar_state(e)
            }
            step = max(self._read_entries(steps).values(), default=None)
        self.step = int(step) if step is not None and math.isfinite(step) else None

    def _has_no_place(self, e: TensorEntry | Value) -> bool:
        """Tell whether an entry of the checkpoint's model or optimizer can be loaded into nothing of the job: a value
        of the model that is no extra state, or an entry of the optimizer that is neither its state nor a param
        group."""
        if e.component == "optim":
            return bool(self.optimizers) and not e.is_optimizer_state and not e.is_param_group
        of_model = e.component == "model" and isinstance(e, Value) and e.path[-1] != MARK
        return of_model and _EXTRA_STATE.match(e.local_name) is None and e.local_name not in self.other

    # -------------------------------------------------------------------------------------------------------- the end

    def undo(self) -> None:
        """Restore the state and the options that the optimizers had before `match`; weights are not restored."""
        while self._undo:
            self._undo.pop()()

    def finish(self) -> None:
        """Load what torch's planner has not filled in place, and compare what the job would now save with the
        checkpoint's files. To be called after `match` and torch's load.

        Raises:
            Differs: with the first difference. The job is then partly loaded.
        """
        for p, fqn in self._trained:
            state, filled = self._owner[id(p)].state[p], self.wanted["optim"]["state"][fqn]
            for name, (path, live) in self._leaves[fqn].items():
                want = filled.get(name, self._data.get((fqn, name)))
                if want is live or (name not in filled and (fqn, name) not in self._data):
                    continue
                want = fit_to_live(want, live)
                if isinstance(live, torch.Tensor):
                    live.copy_(want)
                else:
                    set_value_at(state, path, want)
        self._load_unfilled_state()
        if self._scheduler_state is not None:
            self._load_scheduler(self._scheduler_state)
        if (text := next(filter(None, self._iterate_differences()), None)) is not None:
            raise Differs(
                f"{self.opened.path} was loaded, but the job does not hold what is in the files: {text}. The job is "
                "loaded in part now; do not train it. Look at the load_state_dict, the hooks and the set_extra_state "
                "of its classes.",
                code="CKPT0504",
            )

    def _load_scheduler(self, state: dict[str, object]) -> None:
        """Let the scheduler load its state.

        Raises:
            Differs: its load_state_dict fails, as for the state of another class.
        """
        try:
            self.scheduler.load_state_dict(state)
        except Exception as e:
            kind, own = type(self.scheduler).__name__, self.scheduler.state_dict()
            raise Differs(
                f"{self.opened.path} has the state of a scheduler that the job's {kind} does not load: "
                f"{type(e).__name__}: {e}. The files have {', '.join(map(str, state))}; the job's has "
                f"{', '.join(map(str, own))}. The job is loaded in part now; do not train it. Build the schedulers as "
                "the trainer did, in its order.",
                code="CKPT0504",
            ) from e

    def _load_unfilled_state(self) -> None:
        """Let modules load what torch's planner has not filled in place: extra states, and tensors of which a hook put
        copies into the state dict."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        homes = {_get_memory_address(t) for t in (*self.model.parameters(), *self.model.buffers())}
        stray = any(_get_memory_address(t) not in homes for t in self.wanted["model"].values() if t.numel())
        state = {**(self.wanted["model"] if stray else {}), **self._extra_state}
        if state:
            set_model_state_dict(self.model, state, options=StateDictOptions(strict=False))

    def _iterate_differences(self) -> Iterator[str | None]:
        """Compare what the job would save now with the checkpoint, and yield for each part of the job a clause about
        its first difference, None if there is none.

        Bytes that the planner read straight into a tensor of the job are not read again: `LiveReader` compares their
        digests if there are recorded ones, and a tensor that still has the memory that was filled holds what was read,
        in the job's dtype. Everything else is compared completely, by value: tensors that the state dict holds as
        copies, numbers, options, the scheduler, extra states.
        """
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        saved = get_model_state_dict(self.model)
        for fqn, want in {**self.wanted["model"], **self._extra_state}.items():
            if not (_is_extra_state(fqn) and _is_encoded_state(want)):
                yield find_first_difference(saved.get(fqn), want, f"model.{fqn}")
        for optimizer in self.optimizers:
            groups, states = job_optimizers.get_saved_groups_and_state(optimizer)
            for p, fqn in self._trained:
                if self._owner[id(p)] is optimizer:
                    yield from self._iterate_state_differences(fqn, states.get(id(p), {}))
            for group, now in zip(optimizer.param_groups, groups, strict=True):
                options = next((x for g, x in self._options if g is group), {})
                yield find_first_difference({k: now[k] for k in options if k in now}, options, "optim.param_groups")
        if self._scheduler_state is not None:
            yield find_first_difference(self.scheduler.state_dict(), self._scheduler_state, "scheduler")

    def _iterate_state_differences(self, fqn: str, saved: object) -> Iterator[str | None]:
        """Compare the optimizer state of one parameter with the checkpoint, and yield for each leaf a clause about its
        first difference, None if there is none.

        Args:
            fqn: FQN of the parameter.
            saved: the state that the optimizer would save for it now.
        """
        filled = self.wanted["optim"]["state"][fqn]
        now = {name: x for name, _, x in iterate_leaves(saved, self._leaves[fqn])}
        for name, (_, live) in self._leaves[fqn].items():
            want = filled.get(name, self._data.get((fqn, name)))
            entry = self.ckpt.values.get(f"optim.state.{fqn}.{name}")
            if (
                name in filled and entry is not None and isinstance(live, torch.Tensor)
            ):  # a number that the planner put there
                want = entry.data
            if want is not None:
                yield find_first_difference(now.get(name), fit_to_live(want, live), f"optim.state.{fqn}.{name}")


def _is_extra_state(name: str) -> bool:
    """Tell whether a key of a model's state dict is that of an extra state, which a module's get_extra_state() returns,
    such as "layer._extra_state"."""
    return _EXTRA_STATE.fullmatch(name) is not None


def _is_encoded_state(x: object) -> bool:
    """Whether an extra state is bytes that the module has encoded itself (such as a pickle), so that equal states
    may differ in bytes."""
    return isinstance(x, bytes) or (isinstance(x, torch.Tensor) and x.dtype == torch.uint8 and x.dim() == 1)


def _is_empty_state(x: object) -> bool:
    """Tell whether a state is None or a container without leaves."""
    return x is None or has_no_leaves(x)


def _list_tensor_shapes(x: object) -> dict[str, tuple[int, ...]]:
    """Return {dotted name: shape} of the tensors inside a value; a tensor itself has the name ""."""
    return {name: tuple(t.shape) for name, _, t in iterate_leaves({"": x}, ()) if isinstance(t, torch.Tensor)}


def _holds_scheduler_states(x: object) -> bool:
    """Whether a value is a list or tuple of state dicts of schedulers, as in SequentialLR's state."""
    return isinstance(x, (list, tuple)) and any(isinstance(y, Mapping) and y for y in x)


def _get_memory_address(t: torch.Tensor) -> int:
    """Return the memory address of this rank's part of a tensor."""
    local = t.to_local() if hasattr(t, "to_local") else t
    return int(local.data_ptr())


def _describe_differing_options(options: Mapping[str, object], every: Mapping[int, Mapping[str, object]]) -> str:
    """Return a text with those options of a param group that have another value in any of the other groups, such as "lr
    0.1, betas (0.9, 0.95)"; "the same" if there are none.

    Args:
        options: {option: value} of the group.
        every: {number of a group: its {option: value}} of the groups to compare with.
    """
    keys = [k for k, v in options.items() if any(o.get(k) != v for o in every.values())]
    return ", ".join(f"{k} {short(options[k])}" for k in keys) or "the same"


def _list_names(names: Sequence[str]) -> str:
    """Return a text with the first six names, in quotes, and how many more there are."""
    return list_first((f'"{n}"' for n in names), 6)
