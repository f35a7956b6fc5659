"""`LiveJob`: a model, an optimizer and a scheduler of a running job, compared with a checkpoint by name and shape.

It makes a state dict of the job's own tensors, which torch's planner then fills in place. All that can be compared is
compared before a byte is written. Options of a param group come from the group of the checkpoint that lists its
parameters; what is not state (`foreach`, `fused`) is not touched.

It does not go through set_optimizer_state_dict (torch/distributed/checkpoint/state_dict.py, 2.13), which cannot load a
group without gradients, wants a state for parameters that never had one, and where the parameters of one group lie in
several of the checkpoint lets the last of them win.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..errors import DoesNotFit, Unsupported, UsageError, argument
from ..formats.pickles import short
from ..index.checkpoint import TensorEntry, Value, joined, same_bytes
from ..index.fqns import strip_wrappers
from ..index.trees import nest
from .collectives import broadcast, rank_and_world, together
from .reader import LiveReader, Wanted
from .values import torch_dtype

__all__ = ["OWN_FLAGS", "LiveJob"]

_SMALL_TENSOR = 1 << 20  # `Loaded.values` holds tensors up to this size
#: Options that choose an implementation of the optimizer and not its result: never loaded, never compared.
OWN_FLAGS = frozenset(("foreach", "fused", "capturable", "differentiable"))


class LiveJob:
    """A live job and what a checkpoint has for it.

    `live` has the tensors of its model by FQN; `wanted` is the state dict of the job's own tensors that torch's planner fills.
    """

    def __init__(self, model: Any, optimizer: Any, scheduler: Any, opened: LiveReader) -> None:
        import torch
        from torch.distributed.checkpoint.state_dict import get_model_state_dict
        from torch.distributed.fsdp import FullyShardedDataParallel

        if any(isinstance(m, FullyShardedDataParallel) for m in model.modules()):
            raise Unsupported(
                "the model is wrapped by FSDP1, whose flat parameters can be loaded only from its own checkpoints. Convert "
                f"the checkpoint with {argument('to', 'fsdp1')}, or use fully_shard for the model."
            )
        self.model, self.optimizer, self.scheduler, self.opened = model, optimizer, scheduler, opened
        ckpt = self.ckpt = opened.ckpt
        self.entries: dict[str, TensorEntry | Value] = {**ckpt.tensors, **ckpt.values}
        self.notes = list(ckpt.notes)
        state = get_model_state_dict(model)
        self.live: dict[str, Any] = {n: t for n, t in state.items() if isinstance(t, torch.Tensor)}
        if any(t.is_meta for t in self.live.values()):
            raise Unsupported(
                "the model is on the meta device, where tensors have no memory. Call model.to_empty(device=...) first."
            )
        self.other = {n for n in state if n not in self.live}  # get_extra_state() of modules
        self.stored = {joined(t.path[1:]): n for n, t in ckpt.tensors.items() if t.path[0] == "model"}
        self.wanted: dict[str, Any] = {}
        self.rest: dict[str, Any] = {}
        self.step: int | None = None
        self._scheduler_state: Any = None
        self._trained: list[tuple[Any, str]] = []  # (parameter, FQN that has its state)
        self._undo: list[Callable[[], None]] = []

    def share_small(self) -> None:
        """Read the small tensors that every rank needs whole (options, counters, random states) on rank 0. A collective.

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
        if e.path[:2] == ("optim", "state"):
            return "trainer.step" not in self.entries and e.path[-1] == "step" and self.opened.is_scalar_state(e)
        if e.path[0] in ("model", "optim"):
            return self.optimizer is not None and e.path[:2] == ("optim", "param_groups")
        return e.nbytes <= _SMALL_TENSOR

    # ------------------------------------------------------------------------------------------------------- matching

    def match(self, anywhere: set[str]) -> None:
        """Compare everything and make `wanted`; raises before anything has changed for good.

        `anywhere` are the FQNs that some rank has.
        """
        problems = self._model(anywhere)
        contents = [] if problems else self._ties(self._tied())
        if self.optimizer is not None:
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
                f"{_listed(sorted(self.other))} of the model is not a tensor (get_extra_state) and was left as it is"
                + (f", though the checkpoint has {_listed(held)}" if held else "")
            )
        self.wanted["model"] = model
        return problems

    def _ties(self, tied: Mapping[str, Sequence[str]]) -> list[str]:
        """Tied parameters of the job that the checkpoint has more than once must be equal there, in the part of this rank.

        Only one of the names is then loaded. If the index shows that they are the same bytes, nothing is read to compare
        them.
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
        if not any(e.path[0] == "optim" for e in self.entries.values()):
            raise Unsupported(
                f"{self.opened.path} has no optimizer state. Pass optimizer=None to load only the weights."
            )
        names = self._fqns()
        state: dict[str, dict[str, str]] = {}  # FQN -> slot -> canonical name
        for n, e in self.entries.items():
            if e.path[:2] == ("optim", "state") and len(e.path) > 3:
                state.setdefault(str(e.path[2]), {})[joined(e.path[3:])] = n
        groups = self._groups()
        member = {fqn: i for i, g in groups.items() for fqn in g.get("params") or ()}
        problems: list[str] = []
        without: list[str] = []
        used: set[str] = set()
        plans: list[tuple[Any, int | None]] = []
        for k, group in enumerate(self.optimizer.param_groups):
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
            distinct = {i: _options(groups[i]) for i in found}
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
        for group, i in plans:
            if i is not None:
                self._set_options(group, groups[i])
            elif group["params"]:
                self.notes.append(
                    f'the checkpoint has no param group with "{names[id(group["params"][0])][0]}"; the options of that '
                    "group are those of the job"
                )
        return self._slots(state)

    def _groups(self) -> dict[int, dict[str, Any]]:
        """The checkpoint's param groups."""
        options = {n: e for n, e in self.entries.items() if e.path[:2] == ("optim", "param_groups") and len(e.path) > 3}
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

    def _set_options(self, group: dict[str, Any], stored: dict[str, Any]) -> None:
        import torch

        before = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in group.items() if k != "params"}

        def back() -> None:
            for k in [k for k in group if k != "params" and k not in before]:
                del group[k]
            for k, v in before.items():
                if isinstance(group.get(k), torch.Tensor) and isinstance(v, torch.Tensor):
                    group[k].copy_(v)
                else:
                    group[k] = v

        self._undo.append(back)
        for key, value in _options(stored).items():
            held = group.get(key)
            if isinstance(held, torch.Tensor):  # a learning rate that a compiled step reads
                held.copy_(torch.as_tensor(value).reshape(held.shape))
            elif isinstance(held, tuple) and isinstance(value, list):
                group[key] = tuple(value)
            elif isinstance(value, torch.Tensor) and isinstance(held, (int, float)):
                group[key] = value.item()
            else:
                group[key] = value

    def _slots(self, state: dict[str, dict[str, str]]) -> list[str]:
        """Make the optimizer's state for every parameter that has one in the checkpoint, and add its slots to `wanted`."""
        import torch

        optimizer = self.optimizer
        before = dict(optimizer.state)

        def back() -> None:
            optimizer.state.clear()
            optimizer.state.update(before)

        self._undo.append(back)
        if any(p not in optimizer.state or not optimizer.state[p] for p, _ in self._trained):
            self._invent(self._trained)
        keep = {id(p) for p, _ in self._trained}
        for p in list(optimizer.state):
            if id(p) not in keep:
                del optimizer.state[p]
        problems = []
        slots: dict[str, dict[str, Any]] = {}
        for p, fqn in self._trained:
            live = {k: v for k, v in optimizer.state[p].items() if v is not None}
            stored = {
                k for k, n in state[fqn].items() if n in self.ckpt.tensors or self.ckpt.values[n].data is not None
            }
            if live.keys() != stored:
                problems.append(
                    f'the optimizer\'s state of "{fqn}" is {_listed(sorted(stored))} in the checkpoint and '
                    f"{_listed(sorted(live))} in the job: these are different optimizers."
                )
                if len(problems) == 4:
                    break
                continue
            for slot, value in live.items():
                entry = self.ckpt.tensors.get(state[fqn][slot])
                if entry is not None and isinstance(value, torch.Tensor) and entry.shape != tuple(value.shape):
                    problems.append(
                        f'"{slot}" of "{fqn}" has shape {list(entry.shape)} in the checkpoint and '
                        f"{list(value.shape)} in the job."
                    )
            slots[fqn] = live
        self.wanted["optim"] = {"state": slots}
        return problems

    def _invent(self, trained: list[tuple[Any, str]]) -> None:
        """Let the optimizer create the state of these parameters by a step that changes nothing.

        Gradients are zero and so is the learning rate, as in torch's own _init_optim_state; weights stay what they are.
        """
        import torch

        optimizer = self.optimizer
        wanted = {id(p) for p, _ in trained}
        gradients = [(p, p.grad) for g in optimizer.param_groups for p in g["params"]]
        rates = [(g, g["lr"]) for g in optimizer.param_groups if "lr" in g]
        try:
            for p, _ in gradients:
                p.grad = torch.zeros_like(p) if id(p) in wanted else None
            for g, rate in rates:
                g["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
            optimizer.state.clear()
            try:
                type(optimizer).step(optimizer)
            except Exception as e:
                raise Unsupported(
                    f"{type(optimizer).__name__} creates no state in a step with zero gradients ({e}). Use dcp.load "
                    "with storage_reader and your own state dict."
                ) from e
        finally:
            for p, gradient in gradients:
                p.grad = gradient
            for g, rate in rates:
                g["lr"] = rate

    # ------------------------------------------------------------------------------------------------------- the rest

    def _schedule(self) -> list[str]:
        entries = {n: e for n, e in self.entries.items() if e.path[0] == "scheduler" and e.path[1:]}
        if not entries:
            raise DoesNotFit(
                f"{self.opened.path} has no scheduler state, and the job has a scheduler. Leave the scheduler out, and set it up "
                "from the step that is loaded."
            )
        tree = nest({entries[n].path[1:]: x for n, x in self._read(entries).items()})
        if isinstance(tree, list) and len(tree) == 1:  # Lightning's list of schedulers, of one
            tree = tree[0]
        lacks = sorted(set(self.scheduler.state_dict()) - set(tree)) if isinstance(tree, dict) else ["its keys"]
        if lacks:
            return [
                f"the state of the job's {type(self.scheduler).__name__} has {_listed(lacks)}, that of the scheduler "
                f"in the checkpoint has {_listed(sorted(map(str, tree)))}: they are of different kinds. Leave the scheduler out, and set it up from the step that is loaded."
            ]
        self._scheduler_state = tree
        return []

    def _values(self) -> None:
        entries: dict[str, TensorEntry | Value] = {}
        for n, e in self.entries.items():
            component = e.path[0]
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
                if e.path[:2] == ("optim", "state") and e.path[-1] == "step" and self.opened.is_scalar_state(e)
            }
            step = max(self._read(steps).values(), default=None)
        self.step = int(step) if step is not None and math.isfinite(step) else None

    # -------------------------------------------------------------------------------------------------------- the end

    def undo(self) -> None:
        """Restore the optimizer's state and options."""
        while self._undo:
            self._undo.pop()()

    def finish(self) -> None:
        """Copy into the job what torch's planner put into the state dict and not into a tensor of the job."""
        import torch

        for p, fqn in self._trained:
            for slot, value in self.wanted["optim"]["state"].get(fqn, {}).items():
                if not isinstance(self.optimizer.state[p][slot], torch.Tensor):
                    self.optimizer.state[p][slot] = value
        self._strays()
        if self._scheduler_state is not None:
            self.scheduler.load_state_dict(self._scheduler_state)

    def _strays(self) -> None:
        """Call load_state_dict for modules whose state dict has copies, made by a hook, of their tensors."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        homes = {_address(t) for t in (*self.model.parameters(), *self.model.buffers())}
        if any(_address(t) not in homes for t in self.wanted["model"].values() if t.numel()):
            set_model_state_dict(self.model, dict(self.wanted["model"]), options=StateDictOptions(strict=False))


def _uint8() -> Any:
    import torch

    return torch.uint8


def _address(t: Any) -> int:
    local = t.to_local() if hasattr(t, "to_local") else t
    return int(local.data_ptr())


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in group.items() if k not in OWN_FLAGS and k not in ("params", "param_names")}


def _differing(options: Mapping[str, Any], every: Mapping[int, Mapping[str, Any]]) -> str:
    keys = [k for k, v in options.items() if any(o.get(k) != v for o in every.values())]
    return ", ".join(f"{k} {short(options[k])}" for k in keys) or "the same"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f'"{n}"' for n in names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
