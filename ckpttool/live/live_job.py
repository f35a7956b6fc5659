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
import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

from ..errors import Differs, DoesNotFit, Unsupported, UsageError, argument
from ..formats.pickles import short
from ..index.checkpoint import TensorEntry, Value, joined, same_bytes
from ..index.fqns import strip_wrappers
from ..index.trees import nest
from . import optimizers
from .collectives import broadcast, rank_and_world, together
from .live_values import Keys, first_difference, fitted, is_hollow, leaves, put
from .reader import LiveReader, Wanted
from .values import torch_dtype

__all__ = ["LiveJob"]

_SMALL_TENSOR = 1 << 20  # `Loaded.values` holds tensors up to this size
#: What a module's get_extra_state() returns has this name (torch/nn/modules/module.py), and its leaves begin with it.
_EXTRA_STATE = re.compile(r"(?:.*?\.)?_extra_state(?=\.|$)", re.DOTALL)


class LiveJob:
    """A live job and what a checkpoint has for it.

    `live` has the tensors of its model by FQN; `wanted` is the state dict of the job's own tensors that torch's planner
    fills.
    """

    def __init__(self, model: Any, optimizer: Any, scheduler: Any, opened: LiveReader) -> None:
        from torch.distributed.checkpoint.state_dict import get_model_state_dict
        from torch.distributed.fsdp import FullyShardedDataParallel

        if any(isinstance(m, FullyShardedDataParallel) for m in model.modules()):
            raise Unsupported(
                "the model is wrapped by FSDP1, whose flat parameters can be loaded only from its own checkpoints. "
                f"Convert the checkpoint with {argument('to', 'fsdp1')}, or use fully_shard for the model."
            )
        self.model, self.scheduler, self.opened = model, scheduler, opened
        self.optimizers = optimizers.each(optimizer)
        self._owner = optimizers.owners(self.optimizers)
        ckpt = self.ckpt = opened.ckpt
        self.entries: dict[str, TensorEntry | Value] = {**ckpt.tensors, **ckpt.values}
        self.notes = list(ckpt.notes)
        state = get_model_state_dict(model)
        self.extra = {n: x for n, x in state.items() if _is_extra(n)}  # what get_extra_state() of modules returns
        self.live: dict[str, Any] = {n: t for n, t in state.items() if _is_tensor(t) and n not in self.extra}
        if any(t.is_meta for t in self.live.values()):
            raise Unsupported(
                "the model is on the meta device, where tensors have no memory. Call model.to_empty(device=...) first."
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
        self.rest: dict[str, Any] = {}
        self.step: int | None = None
        self._scheduler_state: Any = None
        self._extra_state: dict[str, Any] = {}  # FQN -> what set_extra_state() gets
        self._trained: list[tuple[Any, str]] = []  # (parameter, FQN that has its state)
        self._leaves: dict[
            str, dict[str, tuple[Keys, Any]]
        ] = {}  # FQN -> leaf of the live state -> (path, what is there)
        self._data: dict[tuple[str, str], Any] = {}  # (FQN, leaf): what was stored, of leaves that are no tensors
        self._options: list[tuple[dict[str, Any], dict[str, Any]]] = []  # (live param group, options that it must have)
        self._undo: list[Callable[[], None]] = []

    def share_small(self) -> None:
        """Read the small tensors that every rank needs whole (options, counters, random states) on rank 0. A
        collective.

        What is in one small file of each of 512 ranks would otherwise be read 512 times.
        """
        rank, world = rank_and_world()
        if world == 1:
            return
        packed = b""

        def read() -> None:
            nonlocal packed
            if rank == 0:
                named = {n: e for n, e in self.entries.items() if isinstance(e, TensorEntry) and self._is_small(e)}
                found = self._read(named)
                packed = pickle.dumps({n: t.reshape(-1).view(_uint8()).numpy().tobytes() for n, t in found.items()})

        together(read)
        self.opened.small = pickle.loads(broadcast(packed if rank == 0 else None, 0))

    def _is_small(self, e: TensorEntry) -> bool:
        if e.is_optimizer_state:
            return "trainer.step" not in self.entries and e.path[-1] == "step" and self.opened.is_scalar_state(e)
        if e.component in ("model", "optim"):
            in_groups = bool(self.optimizers) and e.is_param_group
            return in_groups or (e.component == "model" and _EXTRA_STATE.match(e.local_name) is not None)
        return e.nbytes <= _SMALL_TENSOR

    # ------------------------------------------------------------------------------------------------------- matching

    def match(self, anywhere: set[str]) -> None:
        """Compare everything and make `wanted`; raises before anything has changed for good.

        `anywhere` are the FQNs that some rank has.
        """
        problems = self._model(anywhere)
        contents = [] if problems else self._ties(self._tied())
        if self.optimizers:
            problems += self._optimizer()
        if self.scheduler is not None:
            problems += self._schedule()
        if problems or contents:
            kind = Unsupported if contents else DoesNotFit
            raise kind(f"{self.opened.path} does not fit the job:\n  " + "\n  ".join([*contents, *problems]))
        self._values()
        for name in self._asked(self.wanted, ()):
            if self.opened.names.find(name) != name:
                raise Unsupported(f'"{name}" is not in {self.opened.path}.')

    def _asked(self, tree: Any, path: tuple[str, ...]) -> Iterator[str]:
        for key, x in tree.items():
            if isinstance(x, dict):
                yield from self._asked(x, (*path, str(key)))
            else:
                yield ".".join((*path, str(key)))

    def _model(self, anywhere: set[str]) -> list[str]:
        problems = []
        tied = self._tied()
        missing = [n for n in self.live if n not in self.stored and not any(m in self.stored for m in tied.get(n, ()))]
        surplus = [n for n in self.stored if n not in anywhere]
        if missing:
            problems.append(f"the model has {_listed(missing)}, which the checkpoint lacks.")
        if surplus:
            problems.append(f"the checkpoint has {_listed(surplus)}, which the model lacks.")
        model: dict[str, Any] = {}
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
                f"{_listed(sorted(self.other))} of the model is not a tensor and was left as it is"
                + (f", though the checkpoint has {_listed(held)}" if held else "")
            )
        self._extra(anywhere)
        self.wanted["model"] = model
        return problems

    def _extra(self, anywhere: set[str]) -> None:
        """Read what modules get through set_extra_state(), in the form in which they return it."""
        own: list[str] = []
        surplus = [n for fqn, names in self._stored_extra.items() if fqn not in anywhere for n in names]
        for fqn, live in self.extra.items():
            names = self._stored_extra.get(fqn, {})
            found = self._read({n: self.entries[n] for n in names.values()})
            tree = {fqn: deepcopy(live)}
            if names and _is_nothing(live):  # nothing says which keys are no text
                tree = nest(
                    {tuple(name.removeprefix(fqn).split(".")): found[n] for name, n in names.items() if n in found}
                )
                self._extra_state[fqn] = tree.get("", tree) if isinstance(tree, dict) else tree
                continue
            known = set()
            for name, path, x in list(leaves(tree, names)):
                if names.get(name) in found:
                    known.add(name)
                    put(tree, path, fitted(found[names[name]], x))
                elif not is_hollow(x):
                    own.append(name)
            surplus += names.keys() - known
            if known:
                self._extra_state[fqn] = tree[fqn]
        if own:
            self.notes.append(f"{_listed(own)} of the model is as it was; the checkpoint has none that can be loaded")
        if surplus:
            self.notes.append(
                f"{_listed(sorted(surplus))} of the checkpoint was not loaded; the model has no such extra state"
            )

    def _ties(self, tied: Mapping[str, Sequence[str]]) -> list[str]:
        """Tied parameters of the job that the checkpoint has more than once must be equal there, in the part of this
        rank.

        Only one of the names is then loaded. If the index shows that they are the same bytes, nothing is read to
        compare them.
        """
        import torch

        problems = []
        model = self.wanted["model"]
        for fqn in list(model):
            others = [n for n in tied.get(fqn, ()) if n in model] if fqn in model else []
            for other in others:
                pair = [self.ckpt.tensors[self.stored[n]] for n in (fqn, other)]
                if pair[0].coding != "raw" or not same_bytes(*pair):
                    both = [self._part(n) for n in (fqn, other)]
                    if not torch.equal(*(t.reshape(-1).view(torch.uint8) for t in both)):
                        problems.append(
                            f'"{fqn}" and "{other}" are one tied parameter in the job, but differ in the checkpoint.'
                        )
                del model[other]
        return problems

    def _part(self, fqn: str) -> Any:
        """This rank's part of a tensor, read into new memory."""
        import torch

        live = self.live[fqn]
        local = getattr(live, "_local_tensor", live)
        start = (0,) * live.dim()
        if local is not live and local.numel():
            (chunk,) = live.__create_chunk_list__()
            start = tuple(chunk.offsets)
        name = self.stored[fqn]
        out = torch.empty(tuple(local.shape), dtype=torch_dtype(self.ckpt.tensors[name].dtype))
        if out.numel():
            self.opened.fill([Wanted(name, start, tuple(local.shape), out)])
        return out

    def _tied(self) -> dict[str, list[str]]:
        """{FQN: the other names of the same tensor}."""
        return {n: [m for m in group if m != n] for group in self._fqns().values() for n in group}

    def _fqns(self) -> dict[int, list[str]]:
        """{id of a parameter: its FQNs}."""
        raw = list(self.model.named_parameters(remove_duplicate=False))
        clean = strip_wrappers(n for n, _ in raw)
        out: dict[int, list[str]] = {}
        for n, p in raw:
            out.setdefault(id(p), []).append(clean[n])
        return out

    # ------------------------------------------------------------------------------------------------------ optimizer

    def _optimizer(self) -> list[str]:
        if not any(e.component == "optim" for e in self.entries.values()):
            raise Unsupported(
                f"{self.opened.path} has no optimizer state. Pass optimizer=None to load only the weights."
            )
        names = self._fqns()
        state: dict[str, dict[str, str]] = {}  # FQN -> name of a leaf of its state -> canonical name
        for n, e in self.entries.items():
            if e.slot is not None:
                state.setdefault(e.parameter, {})[joined(e.path[3:])] = n
        groups = self._groups()
        member = {fqn: i for i, g in groups.items() for fqn in g.get("params") or ()}
        problems: list[str] = []
        without: list[str] = []
        used: set[str] = set()
        plans: list[tuple[Any, int | None]] = []
        for k, group in enumerate(g for o in self.optimizers for g in o.param_groups):
            found: dict[int, str] = {}
            for p in group["params"]:
                if id(p) not in names:
                    raise UsageError(
                        "the optimizer has a parameter that the model does not have. Create it from model.parameters()."
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
            distinct = {i: optimizers.options(groups[i]) for i in found}
            if len(found) > 1 and any(o != distinct[next(iter(found))] for o in distinct.values()):
                problems.append(
                    f"param group {k} of the job has parameters that lie in different groups of the checkpoint: "
                    + "; ".join(f'"{found[i]}" in {i} ({_differing(o, distinct)})' for i, o in sorted(distinct.items()))
                    + ". One of them would get the wrong options; build the optimizer with the same groups."
                )
        if without:
            problems.append(
                f"the job's optimizer trains {_listed(without)}, which no param group of the checkpoint lists."
            )
        surplus = [f for f in state if f not in used]
        if surplus:
            self.notes.append(
                f"the checkpoint has an optimizer's state of {_listed(surplus)}, which the job's optimizer does not "
                "train; it was not loaded"
            )
        if problems:
            return problems
        every = [g for g, _ in plans]
        self._undo.append(optimizers.kept(every))
        chosen = [(g, groups[i]) for g, i in plans if i is not None]
        problems = self._slots(state, chosen)
        # after the step that creates state, which counts in the param groups of some optimizers
        self._options = [] if problems else [(g, optimizers.set_options(g, stored)) for g, stored in chosen]
        for k, (group, i) in enumerate(plans):
            if i is None and group["params"]:
                self.notes.append(
                    f'the checkpoint has no param group with "{names[id(group["params"][0])][0]}"; the options of that '
                    "group are those of the job"
                )
            elif i is not None and (own := sorted(optimizers.options(group).keys() - groups[i].keys())):
                self.notes.append(
                    f"param group {i} of the checkpoint has no {_listed(own)}; those of param group {k} are the job's "
                    "own"
                )
        return problems

    def _groups(self) -> dict[int, dict[str, Any]]:
        """The checkpoint's param groups."""
        options = {n: e for n, e in self.entries.items() if e.option is not None}
        leaves: dict[int, dict[Any, Any]] = {}
        for name, x in self._read(options).items():
            path = options[name].path
            leaves.setdefault(int(path[2]), {})[path[3:]] = x
        return {i: nest(found) for i, found in sorted(leaves.items())}

    def _read(self, entries: Mapping[str, TensorEntry | Value]) -> dict[str, Any]:
        """Values as plain data, and small tensors on the CPU; values of unknown classes become notes."""
        import torch

        out: dict[str, Any] = {}
        wanted: list[Wanted] = []
        for name, e in entries.items():
            if isinstance(e, TensorEntry):
                data = bytearray(self.opened.small.get(name, b""))
                out[name] = torch.empty(e.shape, dtype=torch_dtype(e.dtype))
                if data:
                    out[name] = torch.frombuffer(data, dtype=out[name].dtype).reshape(e.shape)
                elif e.numel:
                    wanted.append(Wanted(name, (0,) * len(e.shape), e.shape, out[name]))
                continue
            try:
                out[name] = self.opened.value(name)
            except Unsupported as error:
                self.notes.append(f"left out: {error}")
        if wanted:
            self.opened.fill(wanted)
        return out

    def _slots(self, state: dict[str, dict[str, str]], plans: optimizers.Plans) -> list[str]:
        """Make the optimizers' state for every parameter that has one in the checkpoint, and add its leaves to
        `wanted`.

        The planner gets them flat, by the names that flattened checkpoints have ("GG.0" of a list of tensors).
        """
        before = [(o, dict(o.state)) for o in self.optimizers]

        def back() -> None:
            for optimizer, old in before:
                optimizer.state.clear()
                optimizer.state.update(old)

        self._undo.append(back)
        wanted = {id(p) for p, _ in self._trained}
        for optimizer in self.optimizers:
            mine = [p for p, _ in self._trained if self._owner[id(p)] is optimizer]
            if not all(optimizer.state.get(p) for p in mine):
                theirs = [(g, stored) for g, stored in plans if any(g is x for x in optimizer.param_groups)]
                optimizers.create_state(optimizer, mine, theirs)
            for p in [p for p in optimizer.state if id(p) not in wanted]:
                del optimizer.state[p]
        problems: list[str] = []
        slots: dict[str, dict[str, Any]] = {}
        for p, fqn in self._trained:
            found = leaves(self._owner[id(p)].state[p], state[fqn])
            self._leaves[fqn] = {name: (path, x) for name, path, x in found}
            slots[fqn] = {}
            for name, (_, x) in self._leaves[fqn].items():
                entry = self.entries.get(state[fqn].get(name, ""))
                if isinstance(entry, TensorEntry) or (entry is not None and self.opened.is_scalar_state(entry)):
                    slots[fqn][name] = x
                elif entry is not None:
                    self._data[fqn, name] = self.opened.value(state[fqn][name])
            problems += self._misfits(fqn, state[fqn])
            if len(problems) > 3:
                break
        self.wanted["optim"] = {"state": slots}
        return problems

    def _misfits(self, fqn: str, names: Mapping[str, str]) -> list[str]:
        """How the state of a parameter in the job and in the checkpoint do not fit."""
        import torch

        live = {name: x for name, (_, x) in self._leaves[fqn].items()}
        full = {k for k, n in names.items() if n in self.ckpt.tensors or not _is_nothing(self.ckpt.values[n].data)}
        if full - live.keys() or any(not is_hollow(x) for k, x in live.items() if k not in names):
            return [
                f'the optimizer\'s state of "{fqn}" is {_listed(sorted(full))} in the checkpoint and '
                f"{_listed(sorted(live))} in the job: these are different optimizers."
            ]
        problems = []
        for name, x in live.items():
            entry = self.ckpt.tensors.get(names.get(name, ""))
            if (fqn, name) in self._data and _shapes(x) != _shapes(fitted(self._data[fqn, name], x)):
                problems.append(f'"{name}" of "{fqn}" has tensors of other shapes in the checkpoint than in the job.')
            if entry is None or entry.shape == tuple(getattr(x, "shape", ())):
                continue
            here = list(x.shape) if isinstance(x, torch.Tensor) else f"none, as a {type(x).__name__},"
            problems.append(
                f'"{name}" of "{fqn}" has shape {list(entry.shape)} in the checkpoint and {here} in the job.'
            )
        return problems

    # ------------------------------------------------------------------------------------------------------- the rest

    def _schedule(self) -> list[str]:
        entries = {n: e for n, e in self.entries.items() if e.component == "scheduler" and e.path[1:]}
        if not entries:
            raise DoesNotFit(
                f"{self.opened.path} has no scheduler state, and the job has a scheduler. Leave the scheduler out, and "
                "set it up from the step that is loaded."
            )
        tree = nest({entries[n].path[1:]: x for n, x in self._read(entries).items()})
        if isinstance(tree, list) and len(tree) == 1:  # Lightning's list of schedulers, of one
            tree = tree[0]
        live = self.scheduler.state_dict()
        filled = {k for k, x in live.items() if not is_hollow(x)}
        lacks = sorted(filled - set(tree)) if isinstance(tree, dict) else ["its keys"]
        if lacks:
            return [
                f"the state of the job's {type(self.scheduler).__name__} has {_listed(lacks)}, that of the scheduler "
                f"in the checkpoint has {_listed(sorted(map(str, tree)))}: they are of different kinds. Leave the "
                "scheduler out, and set it up from the step that is loaded."
            ]
        for key, x in live.items():
            if _holds_states(x) and isinstance(tree.get(key), (list, tuple)) and len(x) != len(tree[key]):
                return [
                    f'"{key}" of the job\'s {type(self.scheduler).__name__} has {len(x)} schedulers, and that in the '
                    f"checkpoint has {len(tree[key])}. Build the scheduler as the job did that saved the checkpoint."
                ]
        self._scheduler_state = fitted(tree, live)
        return []

    def _values(self) -> None:
        entries: dict[str, TensorEntry | Value] = {}
        for n, e in self.entries.items():
            component = e.component
            if component in ("model", "optim") or (component == "scheduler" and self._scheduler_state is not None):
                continue
            if isinstance(e, TensorEntry) and e.nbytes > _SMALL_TENSOR:
                self.notes.append(f'"{n}" has {e.nbytes} bytes and is not among the values; read it by storage_reader')
            else:
                entries[n] = e
        leaves = {entries[n].path: x for n, x in self._read(entries).items()}
        self.rest = nest(leaves) if leaves else {}
        step: Any = leaves.get(("trainer", "step"))
        if step is None:
            steps = {
                n: e
                for n, e in self.entries.items()
                if e.is_optimizer_state and e.path[-1] == "step" and self.opened.is_scalar_state(e)
            }
            step = max(self._read(steps).values(), default=None)
        self.step = int(step) if step is not None and math.isfinite(step) else None

    # -------------------------------------------------------------------------------------------------------- the end

    def undo(self) -> None:
        """Restore the optimizer's state and options."""
        while self._undo:
            self._undo.pop()()

    def finish(self) -> None:
        """Put into the job what torch's planner did not put there, and compare what the job then holds with the files.

        Raises:
            Differs: with the first difference. The job is loaded in part, then.
        """
        import torch

        for p, fqn in self._trained:
            state, filled = self._owner[id(p)].state[p], self.wanted["optim"]["state"][fqn]
            for name, (path, live) in self._leaves[fqn].items():
                want = filled.get(name, self._data.get((fqn, name)))
                if want is live or (name not in filled and (fqn, name) not in self._data):
                    continue
                want = fitted(want, live)
                if isinstance(live, torch.Tensor):
                    live.copy_(want)
                else:
                    put(state, path, want)
        self._strays()
        if self._scheduler_state is not None:
            self.scheduler.load_state_dict(self._scheduler_state)
        if (text := next(filter(None, self._differences()), None)) is not None:
            raise Differs(
                f"{self.opened.path} was loaded, but the job does not hold what is in the files: {text}. The job is "
                "loaded in part now; do not train it. Look at the load_state_dict, the hooks and the set_extra_state "
                "of its classes."
            )

    def _strays(self) -> None:
        """Let modules load what is not filled in place: extra states, and tensors of which a hook put copies into the
        state dict."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        homes = {_address(t) for t in (*self.model.parameters(), *self.model.buffers())}
        stray = any(_address(t) not in homes for t in self.wanted["model"].values() if t.numel())
        state = {**(self.wanted["model"] if stray else {}), **self._extra_state}
        if state:
            set_model_state_dict(self.model, state, options=StateDictOptions(strict=False))

    def _differences(self) -> Iterator[str | None]:
        """The first difference of each part of the job: what it would save now against what is in the files.

        Bytes that the planner read straight into a tensor of the job are not read again: `LiveReader` compares their
        digests where there are recorded ones, and a tensor whose memory is still the one that was filled holds what was
        read, in the job's dtype. All else is compared whole, by value: tensors whose state dict has a copy, numbers,
        options, the scheduler, extra states.
        """
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        saved = get_model_state_dict(self.model)
        for fqn, want in {**self.wanted["model"], **self._extra_state}.items():
            if not (_is_extra(fqn) and _is_encoded(want)):
                yield first_difference(saved.get(fqn), want, f"model.{fqn}")
        for optimizer in self.optimizers:
            groups, states = optimizers.would_save(optimizer)
            for p, fqn in self._trained:
                if self._owner[id(p)] is optimizer:
                    yield from self._state_differences(fqn, states.get(id(p), {}))
            for group, now in zip(optimizer.param_groups, groups, strict=True):
                options = next((x for g, x in self._options if g is group), {})
                yield first_difference({k: now[k] for k in options if k in now}, options, "optim.param_groups")
        if self._scheduler_state is not None:
            yield first_difference(self.scheduler.state_dict(), self._scheduler_state, "scheduler")

    def _state_differences(self, fqn: str, saved: Any) -> Iterator[str | None]:
        """The same for the optimizer's state of one parameter."""
        import torch

        filled = self.wanted["optim"]["state"][fqn]
        now = {name: x for name, _, x in leaves(saved, self._leaves[fqn])}
        for name, (_, live) in self._leaves[fqn].items():
            want = filled.get(name, self._data.get((fqn, name)))
            entry = self.ckpt.values.get(f"optim.state.{fqn}.{name}")
            if (
                name in filled and entry is not None and isinstance(live, torch.Tensor)
            ):  # a number that the planner put there
                want = entry.data
            if want is not None:
                yield first_difference(now.get(name), fitted(want, live), f"optim.state.{fqn}.{name}")


def _is_extra(name: str) -> bool:
    """Whether it is the FQN of what a module's get_extra_state() returns."""
    return _EXTRA_STATE.fullmatch(name) is not None


def _is_tensor(x: Any) -> bool:
    import torch

    return isinstance(x, torch.Tensor)


def _is_encoded(x: Any) -> bool:
    """Whether an extra state is bytes of the module's own making, which may write the same state otherwise (a
    pickle)."""
    import torch

    return isinstance(x, bytes) or (isinstance(x, torch.Tensor) and x.dtype == torch.uint8 and x.dim() == 1)


def _is_nothing(x: Any) -> bool:
    return x is None or is_hollow(x)


def _shapes(x: Any) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors inside a value."""
    return {name: tuple(t.shape) for name, _, t in leaves({"": x}, ()) if _is_tensor(t)}


def _holds_states(x: Any) -> bool:
    """Whether it is a list of the states of schedulers, as SequentialLR has it."""
    return isinstance(x, (list, tuple)) and any(isinstance(y, Mapping) and y for y in x)


def _uint8() -> Any:
    import torch

    return torch.uint8


def _address(t: Any) -> int:
    local = t.to_local() if hasattr(t, "to_local") else t
    return int(local.data_ptr())


def _differing(options: Mapping[str, Any], every: Mapping[int, Mapping[str, Any]]) -> str:
    keys = [k for k, v in options.items() if any(o.get(k) != v for o in every.values())]
    return ", ".join(f"{k} {short(options[k])}" for k in keys) or "the same"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f'"{n}"' for n in names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
