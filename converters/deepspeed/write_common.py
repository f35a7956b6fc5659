"""Writes what all DeepSpeed saves have in common: the plan of all files, the model files, pickled classes.

    state = split_training_state(ckpt, source)
    plan = SavePlan(state, tensors, stage, options, ckpt)  tag, precision, counters, configuration, notes
    models = ModelStateFiles(plan, groups, world)               *_model_states.pt, into a TorchFiles

Classes of DeepSpeed and torch are pickled by name (`pickled_stage`, `pickled_size`, `pickled_fragment`) and never
imported. The formats are described in deepspeed/module_state.py, zero.py and universal.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any

from ckpttool.engine.conservation import list_changed_values
from ckpttool.engine.flat.split_state import DEEPSPEED_COUNTERS, TRAINED_ALONE, Training, list_group_values, tensors_of
from ckpttool.errors import Unsupported, UsageError, argument
from ckpttool.formats.pickles import Global, Opaque
from ckpttool.formats.stored_tensors import Inline, decode_number, flatten_tree
from ckpttool.formats.torch_pickles import TensorRef
from ckpttool.formats.torch_zip_writer import TorchFiles
from ckpttool.huggingface import encodings
from ckpttool.index.checkpoint import ITEMSIZE, Checkpoint, Chunks, TensorEntry, Value, joined, parse_floating_dtype
from ckpttool.index.draft import Draft, Dropped
from ckpttool.index.paths import is_number_text
from ckpttool.index.schedulers import describe_missing_scheduler, find_only_scheduler
from ckpttool.layouts import WriteOptions

from ..options import ZeroOptions
from .experts import AUTOEP, DATA_FIRST, EXPERT_NAME
from .files import MAYBE, OWN, SCALERS, STAGE, FlatRange, build_entry_from_ranges, get_zero_setting, list_client_keys
from .tensor_cuts import INFO

__all__ = [
    "DS_VERSION",
    "FileTree",
    "ModelStateFiles",
    "SavePlan",
    "pickled_fragment",
    "pickled_size",
    "pickled_stage",
]

#: The release whose files these are; the engine refuses files without one.
DS_VERSION = "0.19.8"
#: What a dynamic loss scaler starts with (deepspeed/runtime/config.py, fp16 defaults).
_FRESH_SCALER = {
    "cur_scale": 65536.0,
    "dynamic": True,
    "cur_iter": 0,
    "last_overflow_iter": -1,
    "scale_factor": 2.0,
    "scale_window": 1000,
    "min_scale": 1,
    "delayed_shift": 2,
    "cur_hysteresis": 2,
    "consecutive_hysteresis": False,
    "raise_error_at_min_scale": True,
    "dtype": Global("torch", "float16"),
}


class FileTree:
    """Tensors of one file while its tree is built: their storages, and which of the draft's tensors fill them."""

    def __init__(self, rank: int) -> None:
        """Begin the file of a rank, without tensors yet."""
        self.rank = rank
        self.sizes: dict[str, int] = {}
        self.holes: dict[str, str] = {}  # what is to be filled from parts: its key
        self.whole: dict[str, tuple[str, TensorEntry, TensorEntry]] = {}  # name: key, entry to be, source

    def add_tensor(self, name: str, entry: TensorEntry, source: TensorEntry) -> TensorRef:
        """Add a whole tensor to this file, and return the reference to pickle. On ranks other than 0 it is an extra
        copy, named replica.<rank>.<name>.

        Args:
            name: its name in the draft.
            entry: the tensor as it is to be written.
            source: the tensor of the source that fills it.
        """
        if self.rank:
            name, entry = f"replica.{self.rank}.{name}", replace(entry, path=("replica", self.rank, *entry.path))
        key = str(len(self.sizes))
        self.sizes[key] = entry.nbytes
        self.whole[name] = key, entry, source
        return TensorRef(entry.dtype, entry.shape, key, entry.numel)

    def add_flat_tensor(self, name: str, dtype: str, n: int) -> TensorRef:
        """Add a flat tensor of `n` elements whose bytes come from several parts later; return the reference to pickle.

        A second call with the same name returns a reference to the same tensor.
        """
        key = self.holes.setdefault(name, str(len(self.sizes)))
        self.sizes[key] = n * ITEMSIZE[dtype]
        return TensorRef(dtype, (n,), key, n)

    def add_placeholder(self, dtype: str) -> TensorRef:
        """Add a tensor without elements, and return the reference to pickle; those of one dtype share a storage."""
        return self.add_flat_tensor(f"empty {dtype}", dtype, 0)

    def add_tree(self, x: object) -> Any:
        """Add all tensors of a nested value to this file; return the value with a reference to pickle in place of
        each of them."""
        if isinstance(x, TensorEntry):
            return self.add_tensor(joined(x.path), x, x)
        if isinstance(x, dict):
            return type(x)((k, self.add_tree(v)) for k, v in x.items())
        if isinstance(x, list):
            return [self.add_tree(v) for v in x]
        return x


def _make_reserved_key_error(key: str) -> Unsupported:
    """Return the error that an entry of the user's has a key that DeepSpeed's files use themselves."""
    return Unsupported(
        f'the checkpoint has an entry "{key}" of its own, and so does every DeepSpeed save. Leave it out: '
        f"{argument('only', ['model', 'optim', 'scheduler', 'trainer'])}.",
        code="CKPT0316",
    )


class SavePlan:
    """What all files of the planned save have in common."""

    def __init__(
        self,
        state: Training,
        tensors: dict[str, TensorEntry],
        stage: int,
        options: WriteOptions,
        own: ZeroOptions,
        ckpt: Checkpoint,
    ) -> None:
        """Decide on precision, tag, counters and configuration of the save.

        Args:
            state: the state to write.
            tensors: {name: weight}, each with the dtype to be written.
            stage: the ZeRO stage, 1 to 3.
            options: which dtype each tensor is written in.
            own: what the user says of the engine.
            ckpt: the source.

        Raises:
            UsageError: the precision is none of DeepSpeed's, or the tag is not the name of a folder.
            Unsupported: DeepSpeed cannot hold the state.
        """
        self.state, self.tensors, self.stage, self.source_world = state, tensors, stage, ckpt.world_size
        self.ckpt, self.rounded = ckpt, ckpt.rounded
        self.notes = list(state.notes)
        self.about_groups = TRAINED_ALONE  # why the param groups are others than the source's
        self._check_param_groups()
        self.rest = dict(state.rest)
        self._move_client_entries()
        self.ds_config = self._pop_ds_config()

        # what the engine computes in, and a configuration that says so
        asked = None if own.precision is None else parse_floating_dtype(own.precision)
        if asked not in (None, "float32", "bfloat16", "float16"):
            raise UsageError(
                f"{argument('precision', own.precision)}: DeepSpeed computes in bf16, fp16 or fp32.", code="CKPT0203"
            )
        self.precision = asked or self._precision()
        self.cast = options.cast
        self.prefix = "bf16_" if self.precision == "bfloat16" else ""
        self.sub_group_size = own.sub_group_size or self._read_sub_group_size()
        self._adjust_config(own.sub_group_size, asked)
        self._note_foreign_scheduler(from_deepspeed=ckpt.layout.startswith(("zero", "universal")))

        # counters, which name the save
        self.steps = self._find_global_steps()
        self.tag = own.write_tag or (
            "checkpoint" if "pytorch-lightning_version" in self.rest else f"global_step{self.steps}"
        )
        if "/" in self.tag or self.tag in ("", ".", ".."):
            raise UsageError(f"{argument('write_tag', self.tag)} is not the name of a folder.", code="CKPT0203")
        self.counters = {
            "skipped_steps": self.rest.pop("skipped_steps", 0),
            "global_steps": self.steps,
            **({"global_samples": self.rest.pop("global_samples")} if "global_samples" in self.rest else {}),
        }
        self.rest.pop("global_steps", None)

        self.stacks: dict[int, list[str]] = {}  # of each MoE layer of AutoEP, the stacks of its experts

        # the tensor-parallel rank whose files are planned
        self.tensor_rank, self.tensor_ranks = 0, 1
        self.cuts: dict[str, Any] | None = None  # how all of them cut parameters, for their model files

        # all else is written under its own name, so no name may be one of DeepSpeed's
        self.scaler = self._choose_loss_scaler()
        for key in sorted((OWN | {"buffer_names"}) & self.rest.keys()):
            raise _make_reserved_key_error(key)

    def _move_client_entries(self) -> None:
        """Move the user's own entries in `self.rest` to where a reader of the files gives them the same names again.

        `model`, `optim` and, if the engine has a scheduler, `scheduler` go to the root. An `lr_scheduler` that is not
        the engine's, and None under a key of the engine's, go below `extra`, since a reader takes those at the root for
        the engine's.

        Raises:
            Unsupported: an entry must go below `extra`, and `extra` is not a dict.
        """
        rest = self.rest
        for key in [k for k in MAYBE if k in rest]:
            entries = (*self.ckpt.values.values(), *self.ckpt.tensors.values())
            is_extra = any(x.path[:2] == ("extra", key) for x in entries)
            if not is_extra and rest[key] is None:  # no scheduler
                rest["scheduler"] = rest.pop(key)
            elif is_extra and (key == "lr_scheduler" or rest[key] is None):
                inside = rest.setdefault("extra", {})
                if not isinstance(inside, dict):
                    raise _make_reserved_key_error(key)
                rest["extra"] = {**inside, key: rest.pop(key)}
        inside = rest.get("extra")
        scheduler = self.state.scheduler if self.state.scheduler is not None else rest.get("lr_scheduler")
        if isinstance(inside, dict):
            own = {k: inside[k] for k in list_client_keys(scheduler) if k in inside and k not in rest}
            rest |= own
            if own and not (left := {k: x for k, x in inside.items() if k not in own}):
                del rest["extra"]
            elif own:
                rest["extra"] = left

    def _check_param_groups(self) -> None:
        """Check that an engine can start with the param groups.

        At stages 1 and 2, groups without trained parameters are removed from `self.state`, with a note.

        Raises:
            Unsupported: no parameter is trained, one is a quantised weight's codes, or a group behind one that is left
                out has an option that is a tensor.
        """
        state = self.state
        codes = encodings.find_in_tensors(state.tensors)
        if said := next(filter(None, (codes.describe(n) for g in state.groups for n in g.params)), ""):
            raise Unsupported(
                f"{said}, and DeepSpeed trains the parameters of a group in float32. {encodings.advise_dequantizing()}",
                code="CKPT0318",
            )
        if not any(g.params for g in state.groups):
            raise Unsupported(
                "the optimizer of this checkpoint trains no parameter, and no engine of DeepSpeed starts with such a "
                f"one. {argument('only', ['model'])} writes the weights alone.",
                code="CKPT0316",
            )
        if self.stage < 3 and (idle := [i for i, g in enumerate(state.groups) if not g.params]):
            state.groups = [g for g in state.groups if g.params]
            self.notes.append(
                f"the param groups {idle} hold nothing that is trained and are left out: an engine of stage "
                f"{self.stage} does not start with such a group"
            )
            self._drop_tensor_options(idle)

    def _drop_tensor_options(self, idle: list[int]) -> None:
        """Drop the options of param groups that are left out, where they are tensors, such as a learning rate.

        Args:
            idle: the numbers of these groups.

        Raises:
            Unsupported: a group behind them has such an option, whose name would be another then.
        """
        for n, v in list(self.state.inlined.items()):
            if v.path[:2] != ("optim", "param_groups") or v.group < idle[0]:
                continue
            if v.group not in idle:
                raise Unsupported(
                    f"An engine of stage {self.stage} starts without the param groups {idle}, which hold nothing that "
                    f'is trained. "{n}" is a tensor, which keeps its name, and its group would get another number. '
                    f"Write stage 3, or leave the optimizer out with {argument('only', ['model'])}.",
                    code="CKPT0316",
                )
            del self.state.inlined[n]
            why = "its param group holds nothing that is trained, and is left out"
            self.state.dropped.append(Dropped(n, self.ckpt.tensors[n].nbytes, why))

    def _pop_ds_config(self) -> dict[str, object]:
        """Remove ds_config, DeepSpeed's configuration, from `self.rest` and return it; {} if there is none.

        `self.rest` is the state that is neither model nor optimizer.

        Raises:
            Unsupported: ds_config is not a dict, or one of DeepSpeed's counters is not an integer.
        """
        config = self.rest.pop("ds_config", {})
        kinds: dict[str, tuple[object, type]] = {k: (self.rest.get(k, 0), int) for k in DEEPSPEED_COUNTERS}
        for key, (x, kind) in ({"ds_config": ({} if config is None else config, dict)} | kinds).items():
            if not isinstance(x, kind) or any(tensors_of(x)):
                raise Unsupported(
                    f'the checkpoint has an entry "{key}" that is not what DeepSpeed keeps under that name. Leave it '
                    f"out: {argument('only', ['model', 'optim', 'scheduler'])}.",
                    code="CKPT0316",
                )
        return config if isinstance(config, dict) else {}

    def set_tensor_ranks(self, ranks: int, cuts: dict[str, object]) -> None:
        """Plan for an engine of several tensor-parallel ranks, and change the source's ds_config accordingly, if there
        is one.

        Args:
            ranks: the number of tensor-parallel ranks.
            cuts: universal_checkpoint_info, which states how these ranks cut each parameter.
        """
        self.tensor_ranks, self.cuts = ranks, cuts
        if self.ds_config:
            section = self.ds_config.get("tensor_parallel")
            section = {**(section if isinstance(section, dict) else {}), "autotp_size": ranks}
            self.ds_config = {**self.ds_config, "tensor_parallel": section}

    @property
    def model_rank(self) -> str:
        """The tensor-parallel rank as names of files have it: "mp_rank_00"."""
        return f"mp_rank_{self.tensor_rank:02}"

    def added_values(self) -> dict[str, object]:
        """Return {name: data} of the values that every DeepSpeed save has but the source does not."""
        ours = {
            "trainer.global_steps": self.steps,
            "trainer.skipped_steps": 0,
            "extra.buffer_names": list(self.state.buffers),
            "extra.ds_config": self.ds_config,
        }
        if "num_experts" in self.rest:
            ours["extra.num_experts"] = self.rest["num_experts"]
        held = [*self.ckpt.values, *self.ckpt.tensors]
        added = {n: x for n, x in ours.items() if not any(k == n or k.startswith(n + ".") for k in held)}
        if self.scaler:
            scaler = {f"scaler.{k}": x for k, x in {"overflow": False, **self.scaler}.items()}
            added |= {n: x for n, x in scaler.items() if n not in held}
        if all(e.option is None for e in (*self.ckpt.values.values(), *self.ckpt.tensors.values())):
            added |= {n: v.data for n, v in list_group_values(self.state.groups).items()}
        return added

    def values_to_be(self) -> tuple[dict[str, Value], dict[str, str]]:
        """Return the values that the files will hold, and which of them are not as in the source.

        Returns:
            ({canonical name: value} of all values that a reader of the files will find; {canonical name: explanation}
                of those that differ from the source's).
        """
        config = {joined(p): Value(p, x) for p, x in flatten_tree(self.ds_config, ("extra", "ds_config")).items()}
        changed: dict[str, str] = {}
        out = dict(self.ckpt.values)
        info, how = self.rest.get(INFO), "for the expert parallel ranks of the job that loads it"
        copied = info.get(AUTOEP) if isinstance(info, dict) else None
        restated = {(AUTOEP,): self.rest.get(AUTOEP), (INFO, AUTOEP): copied}
        placed = [
            (joined(path), {joined(p): Value(p, x) for p, x in flatten_tree(tree, path).items()}, how)
            for path, tree in ((("extra", *keys), tree) for keys, tree in restated.items() if self.stacks)
        ]
        names = {"extra.buffer_names": Value(("extra", "buffer_names"), list(self.state.buffers))}
        for head, after, how in (
            ("extra.buffer_names", names, "in the order in which the files list them"),
            ("extra.ds_config", config, f"for an engine of ZeRO stage {self.stage}"),
            ("optim.param_groups", list_group_values(self.state.groups), self.about_groups),
            *placed,
        ):
            if before := {n: v for n, v in out.items() if n == head or n.startswith(head + ".")}:
                after = {n: v for n, v in after.items() if n not in self.state.inlined}
                changed |= list_changed_values(before, after, how)
                out = {n: v for n, v in out.items() if n not in before} | after
        return out | self.state.inlined, changed

    @property
    def data_first(self) -> bool:
        """Whether ranks with the same experts are neighbours, as the configuration says."""
        return bool(self.ds_config.get(DATA_FIRST))

    def _precision(self) -> str:
        """Return the dtype in which the engine computes: that of ds_config, else float16 if there is a loss scaler of
        DeepSpeed's, which other engines do not have, else that of most bytes of the trained weights.

        A note is added if there is no ds_config.
        """
        for name, dtype in (("bf16", "bfloat16"), ("bfloat16", "bfloat16"), ("fp16", "float16")):
            section = self.ds_config.get(name)
            if isinstance(section, dict) and section.get("enabled") is True:
                return dtype
        if self.state.scaler:
            return "float16"
        bytes_of: dict[str, int] = {}
        for g in self.state.groups:
            for n in g.params:
                computed = self.rounded.get(f"model.{n}", self.tensors[n])
                bytes_of[computed.dtype] = bytes_of.get(computed.dtype, 0) + computed.nbytes
        most = max(bytes_of, key=lambda d: bytes_of[d], default="float32")
        found = most if most in ("bfloat16", "float16") else "float32"
        if not self.ds_config:
            self.notes.append(
                f"for a DeepSpeed engine that computes in {found}, as the weights are; else give "
                f"{argument('precision')}"
            )
        return found

    def _read_sub_group_size(self) -> float:
        """Return sub_group_size of ds_config, in elements, or DeepSpeed's default of 1e9."""
        found = get_zero_setting(self.ds_config, "sub_group_size")
        return found if isinstance(found, (int, float)) and not isinstance(found, bool) and found > 0 else 1e9

    def _adjust_config(self, sub_group_size: int | None, precision: str | None) -> None:
        """Change the source's ds_config where it contradicts the files.

        Args:
            sub_group_size: what the user asked for, in elements; None: it stays as it is.
            precision: the dtype that the user asked for; None: it stays as it is.
        """
        if not self.ds_config:
            return
        config = dict(self.ds_config)
        section = config.get("zero_optimization")
        section = dict(section) if isinstance(section, dict) else {}
        section["stage"] = self.stage
        if sub_group_size:
            section["sub_group_size"] = sub_group_size
        if self.stage < 3 and section.get("round_robin_gradients"):
            section["round_robin_gradients"] = False
            self.notes.append("the files are laid out for round_robin_gradients false; so must the engine's config be")
        config["zero_optimization"] = section
        if precision:
            for name, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
                if isinstance(config.get(name), dict) or dtype == precision:
                    inner = config.get(name)
                    config[name] = {**(inner if isinstance(inner, dict) else {}), "enabled": dtype == precision}
        self.ds_config = config

    def _note_foreign_scheduler(self, *, from_deepspeed: bool) -> None:
        """Add a note if the scheduler's state is not that of one of DeepSpeed's own schedulers, which the next job may
        expect, or is missing: an engine with a scheduler gives it whatever is there, and stops at None.

        DeepSpeed's own schedulers (runtime/lr_schedules.py) all read `last_batch_iteration` from it. `from_deepspeed`
        is whether the source is a save of DeepSpeed; then a note is needed only where ds_config names a scheduler.
        """
        found, section = self.state.scheduler, self.ds_config.get("scheduler")
        if isinstance(found, dict) and "last_batch_iteration" in found:
            return
        if found is None or not find_only_scheduler(self.ckpt):
            if not from_deepspeed:
                stops = ", and else stops there" if found is None else ""
                load = f"an engine that has one loads with load_lr_scheduler_states=False{stops}"
                self.notes += describe_missing_scheduler(self.ckpt, load)
            return
        named = section.get("type") if isinstance(section, dict) else None
        if from_deepspeed and not isinstance(named, str):
            return  # its job had no other scheduler either
        of_config = f", though ds_config of the source names {named}" if isinstance(named, str) else ""
        self.notes.append(
            f"the scheduler's state is not that of one of DeepSpeed's own{of_config}: pass the scheduler that the "
            "source had to deepspeed.initialize(lr_scheduler=...), or load with load_lr_scheduler_states=False; "
            "WarmupLR and the others stop with KeyError 'last_batch_iteration'"
        )

    def _find_global_steps(self) -> int:
        """Return global_steps: a counter of the trainer, else the largest step in the optimizer state, with a note."""
        found = self.state.counter("global_steps", "global_step", "step", "iteration", "steps")
        inner = self.rest.get("trainer")
        if found is None and isinstance(inner, dict):
            found = next((inner[k] for k in ("global_step", "step") if type(inner.get(k)) is int), None)
        if found is None:
            steps = [step_as_number(s.get("step")) for s in self.state.scalars.values()]
            found = max((int(n) for n in steps if n is not None and isfinite(n)), default=0)
            largest = ", the largest step of the optimizer" if steps else ""
            self.notes.append(f"global_steps is {found}{largest}: the checkpoint does not give it")
        return found

    def _choose_loss_scaler(self) -> dict[str, object]:
        """Return the loss scaler's state: for an fp16 engine the source's, or a fresh one with a note; for other
        engines {}.

        For other engines the source's is moved to `self.rest`, so that it is written nevertheless.
        """
        if self.precision == "float16":
            own = self.state.scaler
            lacks = {k: x for k, x in _FRESH_SCALER.items() if k not in own} if own.get("dynamic", not own) else {}
            if not own:
                self.notes.append(
                    "the loss scale starts at 65536, DeepSpeed's own: the checkpoint has none of DeepSpeed's kind"
                )
            elif lacks:
                self.notes.append(f"the loss scaler has no {', '.join(lacks)}, and gets DeepSpeed's defaults")
            return {**own, **lacks}
        if self.state.scaler:
            self.rest["scaler"] = self.state.scaler  # an engine of this precision scales no loss, but nothing is lost
        return {}

    def list_added_state(self, groups: list[dict[str, tuple[int, ...]]]) -> list[str]:
        """Return the names of the optimizer state that is added for parameters without any: zeros, and the step of
        their group.

        If there are any, a note is added with their number. `groups` is [{name: shape}], the parameters in each flat
        tensor.
        """
        out = []
        for group in groups:
            slots = dict.fromkeys([*self.slots_of(group), *(s for n in group for s in self.state.scalars.get(n, {}))])
            out += [f"optim.state.{n}.{s}" for n in group if n in self.state.fresh for s in slots]
        if out:
            self.notes.append(
                f"{len(self.state.fresh)} parameters that the next job trains have no state yet and get zeros and the "
                f"step of their group: {', '.join(self.state.fresh[:4])}"
            )
        return out

    def scaler_keys(self) -> dict[str, object]:
        """Return {key: value} of the loss scaler for an optimizer file; each has these keys, even if the engine
        scales no loss."""
        dynamic = bool(self.scaler.get("dynamic"))
        state = {k: v for k, v in self.scaler.items() if k != "overflow"} or {"cur_scale": 1.0, "dynamic": False}
        found = Opaque(Global(SCALERS, "DynamicLossScaler" if dynamic else "LossScaler"), ())
        found.state = state
        return {"loss_scaler": found, "dynamic_loss_scale": dynamic, "overflow": bool(self.scaler.get("overflow"))}

    def common_dtype(self, dtypes: list[str]) -> str:
        """Return the dtype of a flat tensor whose parts have these dtypes; float32 if there are none.

        If they differ, it is a dtype that holds all of them exactly, and a note is added.

        Raises:
            Unsupported: they differ, and some are not floating-point.
        """
        kinds = set(dtypes)
        if len(kinds) < 2:
            return kinds.pop() if kinds else "float32"
        if other := sorted(k for k in kinds if "float" not in k):
            raise Unsupported(
                f"parameters of one group are {' and '.join(sorted(kinds))}; no flat tensor holds {other[0]} too.",
                code="CKPT0316",
            )
        out = "float64" if "float64" in kinds else "float32"
        text = f"{' and '.join(sorted(kinds))} in one flat tensor are written as {out}, which holds both exactly"
        if text not in self.notes:
            self.notes.append(text)
        return out

    def slot_entry(self, fqn: str, slot: str) -> TensorEntry:
        """Return the entry of an optimizer slot ("exp_avg") of the parameter `fqn`, with the dtype to be written.

        Raises:
            KeyError: it has no such slot, as the parameters in `state.fresh`.
        """
        t = self.state.slots[fqn][slot]
        return replace(t, dtype=self.cast(joined(t.path), t.dtype))

    def slots_of(self, group: Iterable[str]) -> list[str]:
        """Return the names of the slots that all parameters in `group` have. Parameters without state yet are ignored.

        Raises:
            Unsupported: parameters have different slots.
        """
        found: list[str] | None = None
        first = ""
        for n in group:
            if n in self.state.fresh:
                continue
            mine = list(self.state.slots.get(n, {}))
            if found is None:
                found, first = mine, n
            elif set(mine) != set(found):
                raise Unsupported(
                    f'"{n}" has the optimizer slots {", ".join(mine) or "none"}, "{first}" has '
                    f"{', '.join(found) or 'none'}. DeepSpeed keeps those of a param group in one flat tensor each.",
                    code="CKPT0316",
                )
        return found or []

    def other_state(self, tree: FileTree, rank: int, world: int, each_rank: bool) -> dict[str, object]:
        """Return {key: value} of everything in a rank's model file except weights and their shapes.

        Args:
            tree: the file, to which tensors are added.
            rank: the data-parallel rank.
            world: the number of data-parallel ranks.
            each_rank: whether every rank has a file, and its own values of `per_rank` in it.
        """
        rest = dict(self.rest)
        each, number = rest.get("per_rank"), rank * self.tensor_ranks + self.tensor_rank
        if each_rank and isinstance(each, dict) and self._are_ranks_of_job(each, world * self.tensor_ranks):
            del rest["per_rank"]
            own = each.get(str(number))
            rest.update(own if isinstance(own, dict) else {})
        elif number:
            rest.pop("per_rank", None)  # for other ranks than there are now: rank 0 carries them
        state = self.state
        out: dict[str, object] = {k: None for k in MAYBE}
        if state.scheduler is not None:
            out["lr_scheduler"] = tree.add_tree(state.scheduler)
        out.update(self.counters)
        out.update(
            dp_world_size=world,
            mp_world_size=self.tensor_ranks,
            checkpoint_parallel_dimensions={"pp_degree": 1, "tp_degree": self.tensor_ranks},
            ds_config=self.ds_config,
            ds_version=DS_VERSION,
            **({} if self.cuts is None else {INFO: self.cuts}),
        )
        out.update({k: tree.add_tree(v) for k, v in rest.items()})
        return out

    def _are_ranks_of_job(self, each: dict[Any, Any], world: int) -> bool:
        """Return whether the keys of `each`, the state `per_rank`, are the ranks of a job of exactly `world` ranks, and
        no rank has a key of its own that the engine writes into every file.

        `world` must be the source's world size, or the highest of the keys plus one.
        """
        if any(key in OWN or key == "ds_config" for own in each.values() if isinstance(own, dict) for key in own):
            return False
        ranks = [int(k) if is_number_text(str(k)) else -1 for k in each]
        return bool(ranks) and min(ranks) >= 0 and max(ranks) < world and world in (self.source_world, max(ranks) + 1)


class ModelStateFiles:
    """The model files: one per rank at stage 3, with the parts of frozen parameters; else one, with all weights but
    those of experts, each of which has a file."""

    def __init__(
        self,
        plan: SavePlan,
        groups: list[dict[str, tuple[int, ...]]],
        world: int,
        local: list[dict[str, tuple[int, ...]]] | None = None,
    ) -> None:
        """Prepare the model files of a save.

        Args:
            plan: what all files of the save have in common.
            groups: [{name in the whole model: shape}], the parameters in each flat tensor.
            world: the number of ranks.
            local: [{name on a rank: shape}] of the same flat tensors, where ranks number their own experts; None if the
                names are those in `groups`.
        """
        self.local = local or groups
        self.plan, self.groups, self.world, self.stage = plan, groups, world, plan.stage
        self.tensors: dict[str, TensorEntry] = {}
        self.sources: dict[str, TensorEntry] = {}
        self.same = {f"model.{a}": f"model.{o}" for a, o in plan.state.tied.items()}

    def add(self, files: TorchFiles, each_rank: bool) -> None:
        """Add the model files, and record where each of their tensors lies: one file a rank at stage 3, else a single
        one.

        `each_rank` is whether each file has its rank's own values, such as random states.
        """
        plan, state = self.plan, self.plan.state
        placed: list[tuple[int, FileTree]] = []  # number of a file, its tensors
        for rank in range(self.world if self.stage == 3 else 1):
            tree = FileTree(rank)
            content = self._build_model_tree(tree, rank, each_rank)
            name = f"zero_pp_rank_{rank}_{plan.model_rank}" if self.stage == 3 else plan.model_rank
            placed.append((files.add(f"{plan.tag}/{name}_model_states.pt", content, tree.sizes), tree))
        for name, tree, content in self._build_expert_files():
            placed.append((files.add(f"{plan.tag}/{name}", content, tree.sizes), tree))
        for n in (n for own in plan.stacks.values() for n in own):
            t = self._cast_module_tensor(n)
            one = t.numel // t.shape[0]
            cuts = [
                FlatRange(e * one, (e + 1) * one, f, files.offset(f, tree.holes[n]))
                for e, (f, tree) in enumerate(row for row in placed if n in row[1].holes)
            ]
            self.tensors[joined(t.path)] = build_entry_from_ranges(t.shape, t.dtype, t.path, cuts)
            self.sources[joined(t.path)] = state.tensors[n]
        self.record(files, placed)
        for n in state.frozen if self.stage == 3 else ():
            t = plan.tensors[n]
            part = -(-t.numel // self.world)
            cuts = [
                FlatRange(
                    r * part, min((r + 1) * part, t.numel), number, files.offset(number, tree.holes[f"frozen {n}"])
                )
                for r, (number, tree) in enumerate(placed)
                if r * part < t.numel
            ]
            self.tensors[f"model.{n}"] = build_entry_from_ranges(t.shape, t.dtype, t.path, cuts)
            self.sources[f"model.{n}"] = state.tensors[n]

    def record(self, files: TorchFiles, placed: Iterable[tuple[int, FileTree]]) -> None:
        """Record where the whole tensors of files lie, and what fills them. `files` are all files of the save, `placed`
        (number in `files`, tensors) of those to record."""
        for number, tree in placed:
            for name, (key, entry, origin) in tree.whole.items():
                at = files.offset(number, key)
                self.tensors[name] = replace(
                    entry, chunks=Chunks.whole(entry.shape, number, at, entry.nbytes), coding="raw"
                )
                self.sources[name] = origin

    def draft(
        self,
        files: TorchFiles,
        ckpt: Checkpoint,
        sources: Mapping[str, TensorEntry],
        dropped: list[Dropped],
        notes: Sequence[str] = (),
    ) -> Draft:
        """Return the draft of the whole save.

        Args:
            files: all files of the save.
            ckpt: the checkpoint to be, with all tensors except those of the model files, and without values.
            sources: {name: tensor of the source that fills it} of those tensors.
            dropped: the state that the save does not hold.
            notes: further notes, besides those of the plan.
        """
        plan = self.plan
        values, changed = plan.values_to_be()
        added = plan.list_added_state(self.groups)
        return files.draft(
            replace(ckpt, tensors={**ckpt.tensors, **self.tensors}, values=values),
            {**sources, **self.sources},
            dropped=dropped,
            aliases=self.same,
            notes=[*plan.notes, *notes],
            synthesized_tensors=added,
            synthesized_values=plan.added_values(),
            changed=changed,
        )

    def add_module_tensor(self, tree: FileTree, name: str) -> TensorRef:
        """Add the tensor `name` of `module` to a file, and return the reference to pickle."""
        t = self._cast_module_tensor(name)
        return tree.add_tensor(joined(t.path), t, self.plan.state.tensors[name])

    def _cast_module_tensor(self, name: str) -> TensorEntry:
        """Return the tensor `name` of `module` as it is to be written, with the path that it has in the draft.

        A buffer or frozen parameter keeps its dtype; any other weight is rounded to the engine's precision when it is
        written.
        """
        plan, state, t = self.plan, self.plan.state, self.plan.tensors[name]
        if name in state.buffers or name in state.frozen:
            return t
        return replace(t, dtype=plan.precision, path=("module", name))

    def _build_expert_files(self) -> list[tuple[str, FileTree, dict[str, object]]]:
        """Return [(file name, tensors, content)] of the files of experts, one for each expert of each MoE layer."""
        layers: dict[str, dict[int, list[str]]] = {}
        for n in self.plan.tensors:
            if m := EXPERT_NAME.fullmatch(n):
                layers.setdefault(m[1], {}).setdefault(int(m[2]), []).append(n)
        out = []
        for k, experts in enumerate(layers.values()):
            for e, names in sorted(experts.items()):
                tree = FileTree(0)
                content: dict[str, object] = {n: self.add_module_tensor(tree, n) for n in names}
                out.append((f"layer_{k}_expert_{e}_mp_rank_00_model_states.pt", tree, content))
        for k, stacks in self.plan.stacks.items():
            for e in range(self.plan.tensors[stacks[0]].shape[0]):
                tree, content = FileTree(0), {}
                for n in stacks:
                    t = self._cast_module_tensor(n)
                    ref = tree.add_flat_tensor(n, t.dtype, t.numel // t.shape[0])
                    content[f"{n}.{e}"] = ref._replace(shape=t.shape[1:])
                out.append((f"layer_{k}_expert_{e}_mp_rank_00_model_states.pt", tree, content))
        return out

    def _build_model_tree(self, tree: FileTree, rank: int, each_rank: bool) -> dict[str, object]:
        """Return the content of a rank's model file.

        Args:
            tree: the file, to which tensors are added.
            rank: the rank.
            each_rank: whether the file has the rank's own values, such as random states.
        """
        plan, state, stage = self.plan, self.plan.state, self.stage
        trained = {n for g in self.groups for n in g}
        stacks = {n for own in plan.stacks.values() for n in own}
        module: dict[str, object] = {}
        for n, t in plan.tensors.items():
            if n in state.tied or n in stacks or EXPERT_NAME.fullmatch(n):
                continue
            if stage == 3 and n not in state.buffers:
                module[n] = tree.add_placeholder(plan.precision if n in trained else t.dtype)
            else:
                module[n] = self.add_module_tensor(tree, n)
        module.update({a: module[o] for a, o in state.tied.items()})
        frozen = {n: pickled_size(plan.tensors[n].shape) for n in state.frozen if n in module}
        fragments: Any = {n: module[n] for n in frozen}
        out = {
            "module": {**{n: module[n] for n in plan.tensors if n in module}, **tree.add_tree(state.extra_states)},
            "buffer_names": list(state.buffers),
            "optimizer": None,
            "param_shapes": [{n: pickled_size(s) for n, s in g.items()} for g in self.local],
            "frozen_param_shapes": frozen if stage > 1 else None,
            "shared_params": dict(state.tied) if rank == 0 else {},
            "frozen_param_fragments": fragments if stage > 1 else None,
            **plan.other_state(tree, rank, self.world, each_rank),
        }
        if stage == 3:  # last, so that these records lie in the same order behind those of one rank alone
            for n in state.frozen:
                t = plan.tensors[n]
                fragments[n] = tree.add_flat_tensor(f"frozen {n}", t.dtype, -(-t.numel // self.world))
        return out


def step_as_number(x: object) -> float | int | None:
    """Return a step, a number or a 0-dim tensor that was read, as a number; None if it is neither."""
    return decode_number(x.dtype, x.data) if isinstance(x, Inline) else x if isinstance(x, (int, float)) else None


def pickled_stage(stage: int) -> Opaque:
    """Return an object that pickles as ZeroStageEnum(stage), without importing DeepSpeed."""
    return Opaque(STAGE, (stage,), call=True)


def pickled_size(shape: tuple[int, ...]) -> Opaque:
    """Return an object that pickles as torch.Size(shape), which zero_to_fp32 asks for its numel()."""
    return Opaque(Global("torch", "Size"), (shape,), call=True)


def pickled_fragment(numel: int, start: int) -> Opaque:
    """Return an object that pickles as DeepSpeed's fragment_address: `numel` elements from element `start` of a flat
    tensor."""
    out = Opaque(Global("deepspeed.utils.tensor_fragment", "fragment_address"), ())
    out.state = {"numel": numel, "start": start}
    return out
