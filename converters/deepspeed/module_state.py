"""What DeepSpeed's layouts have in common: the place of a save, `*_model_states.pt`, and the state besides the tensors.

    DIR/latest                                       the tag of the newest save, no newline; written last
    DIR/<tag>/zero_pp_rank_<r>_mp_rank_00_model_states.pt       stage 3, one a rank
    DIR/<tag>/mp_rank_00_model_states.pt                        stages 0, 1, 2
    DIR/<tag>/[bf16_]zero_pp_rank_<r>_mp_rank_00_optim_states.pt    stages 1, 2, 3; bf16_ when the engine runs bf16
    DIR/<tag>/zero/<fqn>/fp32.pt ...                            a universal checkpoint (universal.py)

A model file is a dict: `module` the state dict (stage 3: (0,) placeholders, and real buffers), `buffer_names`,
`param_shapes` [{fqn: shape}] by sub-group (stage 3) or param group, in the order of the flat tensors,
`frozen_param_shapes`, `frozen_param_fragments`, `shared_params` {alias: owner} (rank 0 only), `lr_scheduler`, counters,
`ds_config`, and whatever the user gave as client_state, merged flat into the same dict.

Canonical names: `lr_scheduler` -> scheduler, the loss scaler of an fp16 engine -> scaler, `global_steps`,
`global_samples`, `skipped_steps` -> trainer; everything else of the dict, ds_config and buffer_names among it, -> extra
(or what names.py makes of it). Values that differ between ranks (random states) are kept as extra.per_rank.<r>.<key>.

Sources: deepspeed 0.19.8, runtime/engine.py (_common_checkpoint_state, _save_checkpoint, _get_ckpt_name,
_load_checkpoint), runtime/fp16/loss_scaler.py, runtime/zero/config.py (ZeroStageEnum).
"""

from __future__ import annotations

import re
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

from ckpttool.bounded_json import parse
from ckpttool.errors import Corrupt, Unsafe, Unsupported
from ckpttool.formats import torch_zip
from ckpttool.formats.pickles import short
from ckpttool.formats.stored_tensors import StoredTensor
from ckpttool.index.checkpoint import (
    ITEMSIZE,
    Checkpoint,
    Chunks,
    Leaves,
    OtherCopy,
    Path,
    TensorEntry,
    Value,
    same_bytes,
)
from ckpttool.index.composites import shape_of
from ckpttool.index.fqns import EXTRA_STATE, strip_wrappers
from ckpttool.index.names import canonical, with_canonical_keys
from ckpttool.index.records import Records
from ckpttool.layouts import Place, ReadOptions, checkpoint_of
from ckpttool.storage.source import Source

from ..rank_files import Files, describe_lacking_entries
from .files import (
    MAYBE,
    MODEL,
    MODEL3,
    OPTIM,
    OWN,
    File,
    FlatRange,
    are_values_equal,
    build_entry_from_ranges,
    drop_added_option,
    find_save,
    get_zero_setting,
    is_placeholder,
    is_shape,
    list_client_keys,
    parse_rank,
    read_tied_names,
    refuse_mixed_saves,
    refuse_model_parallel,
    refuse_unsupported_files,
)

__all__ = ["DERIVED", "SaveReader"]


#: The note about the weights that a bf16 or fp16 engine computes with.
DERIVED = (
    "model weights are the fp32 masters; the low-precision weights the engine computes with follow from them by "
    "rounding"
)


#: What every rank's model file says of the model.
_OF_MODEL = {
    "module",
    "buffer_names",
    "param_shapes",
    "frozen_param_shapes",
    "shared_params",
    "frozen_param_fragments",
}
_TRAINER = ("global_step", "epoch", "max_steps", "num_train_epochs", "num_input_tokens_seen", "train_batch_size")


def _read_json(source: Source, name: str) -> dict[str, object]:
    """Read a file of JSON below the source; {} where it is damaged or no dict."""
    data = source.read_all(name, 64 << 20)
    try:
        found = parse(data, name)
    except (Corrupt, Unsafe):
        return {}
    return found if isinstance(found, dict) else {}


class _ModelNames(NamedTuple):
    """What the model file of rank 0 lists: its state dict, frozen parameters, buffers, and {alias: owner} of all
    ranks."""

    module: dict[object, object]
    frozen: dict[str, tuple[int, ...]]
    buffers: list[str]
    aliases: dict[str, str]


class SaveReader:
    """The state that is collected while the files of one save are read."""

    def __init__(
        self,
        where: Place,
        options: ReadOptions,
        latest: str = "latest",
        beside: SaveReader | None = None,
        rank: int = 0,
    ) -> None:
        """Find the save and check the names of its files.

        Args:
            where: the folder.
            options: what to read, and from which save.
            latest: the name of the file that names the newest save.
            beside: the reader of tensor-parallel rank 0, if this one is to read the files of another; the two number
                all files together.
            rank: the tensor-parallel rank whose files are read.

        Raises:
            Corrupt: the save is missing, or a file has a wrong name.
            Unsafe: the tag is not the name of a folder.
            Unsupported: the save is pipeline parallel, or has experts or swapped state in files of their own.
            UsageError: there are several saves, and none is named.
        """
        self.source, self.options = where.source, options
        self.save = find_save(where.source, options.tag, latest)
        self.where = f"{self.source.root}/{self.save.folder}"
        refuse_unsupported_files(self.save, self.where)
        self.tensor_rank, self.tensor_ranks = rank, self.save.tensor_ranks(self.where)
        self.save = self.save.of_tensor_rank(rank)
        self.source.prefetch_ends(self.save.folder + n for n in self.save.names if n.endswith(".pt"))
        self.files: Files = Files(where.source) if beside is None else beside.files
        self.everyone: list[File] = []  # the model files of all ranks, if there are several tensor-parallel ones
        self.notes: list[str] = []
        if beside is None and self.save.folder and options.tag is None and not self.source.exists(latest):
            self.notes.append(
                f"there is no file {latest}, so DeepSpeed's load_checkpoint finds this save only with "
                f'tag="{self.save.folder[:-1]}"'
            )
        self.homes: dict[str, File] = {}  # of entries of `module` that have files of their own
        self.stacks: dict[str, TensorEntry] = {}  # weights of which each expert has a part in a file of its own
        self.masters: dict[str, TensorEntry] = {}  # trainable parameters, wherever their weights lie
        self.model: dict[str, TensorEntry] = {}
        self.rounded: dict[str, TensorEntry] = {}  # what the engine computes with, of weights that have masters
        self.optim: Leaves = {}
        self.rest: Leaves = {}
        self.others: list[tuple[str, int, int]] = []  # (name, rank, bytes) of other copies of buffers and extra states

    def load(self, name: str, dict_only: bool = True) -> File:
        """Unpickle a file of the save, given by its name in the save's folder, and add it to the files of the
        checkpoint.

        `dict_only` is whether the file must hold a dict.

        Raises:
            Corrupt: it is damaged, holds no dict though it must, or was saved as the file of another rank and the
                option `allow_equal_ranks` is not set.
        """
        out = self._load_from_source(self.save.folder + name, dict_only)
        allowed = self.options.allow_equal_ranks
        self.notes += torch_zip.refuse_file_of_other_rank(out.read_at, self.source.size(out.name), out.what, allowed)
        return out

    def _load_from_source(self, name: str, dict_only: bool = True) -> File:
        """Unpickle a file, given by its path below the source, and add it to the files of the checkpoint.

        `dict_only` is whether the file must hold a dict.

        Raises:
            Corrupt: it is damaged, or holds no dict though it must.
        """
        return File(self.source, name, self.files.number(name), dict_only)

    def keep_crc(self, file: File, t: StoredTensor) -> StoredTensor:
        """Remember the CRC32 of the storage of a tensor in `file`, so that reading it is checked; return the tensor."""
        self.files.keep(file.number, t)
        return t

    def whole_tensor(self, file: File, t: StoredTensor, path: Path) -> TensorEntry:
        """Return the entry, at the canonical path `path`, of a tensor that `file` holds completely, and remember its
        CRC32."""
        return self.files.entry(file.number, t, path)

    def add_leaves(self, path: Path, value: object, file: File) -> None:
        """Add the tensors and data of a nested value from `file` to the save, under paths that begin with `path`.

        They go to the optimizer if `path` begins with "optim", else to the rest of the state.
        """
        (self.optim if path[0] == "optim" else self.rest).update(self.files.leaves(file.number, value, path))

    def add_slot(self, name: str, slot: str, leaf: object) -> None:
        """Add what the optimizer keeps for the parameter `name` under `slot`: the entry of a tensor, whatever path it
        has so far, or a value."""
        path: Path = ("optim", "state", name, slot)
        self.optim[path] = replace(leaf, path=path) if isinstance(leaf, TensorEntry) else Value(path, leaf)

    def files_of_ranks(self, pattern: re.Pattern[str], group: int, world: int, what: str) -> list[str]:
        """Return the names of the files of ranks 0 to world-1, one a rank.

        Args:
            pattern: matches the names of such files.
            group: the group of the pattern that is the rank.
            world: the number of ranks.
            what: how errors name such a file, such as "optimizer".

        Raises:
            Corrupt: with the rank that has no file or two, or that should not exist.
        """
        found = self.save.files(pattern, group)
        for r, names in found.items():
            if len(names) > 1:
                raise Corrupt(
                    f"{self.where}: {' and '.join(names)} are both the {what} file of rank {r}; one of them is of "
                    "another save. Remove it.",
                    code="CKPT0411",
                )
        kinds = {m[1] for names in found.values() for n in names if (m := pattern.fullmatch(n)) and pattern is OPTIM}
        if len(kinds) > 1:
            raise Corrupt(
                f"{self.where}: {what} files with and without the prefix bf16_; one engine writes one kind. Some are "
                "of another save.",
                code="CKPT0409",
            )
        missing = [r for r in range(world) if r not in found]
        if missing:
            example = next(iter(found.values()))[0] if found else ""
            raise Corrupt(
                f"{self.where}: the save is of {world} ranks, and {len(missing)} {what} files are missing, first that "
                f"of rank {missing[0]}" + (f" (named like {example})" if example else "") + ". Fetch them.",
                code="CKPT0402",
            )
        if more := [names[0] for r, names in found.items() if r >= world]:
            raise Corrupt(
                f"{self.where}: the save is of {world} ranks, but {more[0]} is there. It is from another save.",
                code="CKPT0409",
            )
        return [found[r][0] for r in range(world)]

    def load_models(self) -> list[File]:
        """Load the model files of the tensor-parallel rank: one, or one a rank in the order of the ranks at stage 3.

        Raises:
            Corrupt: one is missing, or from another save.
        """
        if self.save.files(MODEL, 1):
            return [self.load(self.files_of_ranks(MODEL, 1, self.tensor_ranks, "model")[self.tensor_rank])]
        found = self.save.files(MODEL3, 1)
        if not found:
            self.files_of_ranks(MODEL3, 1, len(self.save.files(OPTIM, 2)), "model")
        first = self.load(next(iter(found.values()))[0])
        world = first.get("dp_world_size", int)
        if not 0 < world <= 1 << 20:
            raise Corrupt(f"{first.what}: dp_world_size is {world}.", code="CKPT0406")
        names = self.files_of_ranks(MODEL3, 1, world, "model")
        out = [first, *map(self.load, names[1:])]
        refuse_mixed_saves(out)
        return out

    def add_model_state(self, models: list[File]) -> None:
        """Add the weights, in the order of `module`, the state dict in a model file, and all other state in the model
        files.

        The weights are masters (fp32 copies), frozen parameters, buffers and tied weights. The masters must be in
        `self.masters` already. `models` are the model files, in the order of the ranks.

        Raises:
            Corrupt: a placeholder belongs to no parameter, or the ranks' files contradict one another.
            Unsupported: an entry is neither a tensor nor the extra state of a module.
        """
        first = models[0]
        refuse_model_parallel(first, self.tensor_ranks)
        _check_same_model_keys(models)
        listed = self._read_model_names(models)
        for name, t in listed.module.items():
            self._add_module_entry(name, t, listed, models)
        for rank, f in enumerate(models[1:], 1):  # what rank 0 does not have is no buffer: those are listed
            of_rank = rank * self.tensor_ranks + self.tensor_rank
            self.others += [(str(n), of_rank, 0) for n in f.get("module", dict) if n not in listed.module]
        for name, stack in self.stacks.items():
            self.model[name] = self.masters.get(name, stack)
            if self.model[name].dtype != stack.dtype:
                self.rounded[name] = stack
        # `module` need not have what has its weights in other files
        self.model.update({n: t for n, t in self.masters.items() if n not in self.model})
        for name, shape in listed.frozen.items():
            if name not in self.model:
                self.model[name] = self._read_frozen_parameter(name, shape, models)
        for alias, owner in listed.aliases.items():
            if owner not in self.model:
                raise Corrupt(f'{first.what}: "{alias}" is tied to "{owner}", which is not there.', code="CKPT0406")
            self.model[alias] = replace(self.model[owner], path=("model", alias))
        self.model = {n: self.model[n] for n in [*(n for n in listed.module if n in self.model), *self.model]}
        self._note_omitted_weights(first, listed.module)
        if self.tensor_rank == 0:  # it adds that of the others too
            self.add_other_state(self.everyone or models)

    def _read_model_names(self, models: list[File]) -> _ModelNames:
        """Return the state dict, frozen parameters, buffers and tied weights that the model files list.

        Raises:
            Corrupt: the lists have other forms than DeepSpeed's, or contradict one another.
        """
        first = models[0]
        module, aliases = first.get("module", dict), read_tied_names([*models, *self.everyone])
        frozen = first.tree.get("frozen_param_shapes") or {}
        buffers = first.buffer_names()
        if not isinstance(frozen, dict) or not all(is_shape(s) for s in frozen.values()):
            raise Corrupt(f"{first.what}: frozen_param_shapes is {short(frozen)}.", code="CKPT0406")
        for alias in aliases:
            if alias in self.masters or alias in frozen or alias in buffers:
                raise Corrupt(
                    f'{first.what}: "{alias}" is in shared_params, but has weights of its own as well.', code="CKPT0406"
                )
        return _ModelNames(module, frozen, buffers, aliases)

    def _add_module_entry(self, name: object, t: object, listed: _ModelNames, models: list[File]) -> None:
        """Add one entry of `module`, the state dict in a model file: a weight from wherever it lies, a buffer, or the
        extra state of a module.

        Args:
            name: the key of the entry.
            t: its value in the file of rank 0.
            listed: the names that the model files list.
            models: the model files, in the order of the ranks.

        Raises:
            Corrupt: it is a placeholder of no parameter, or is in none of the lists that DeepSpeed makes.
            Unsupported: it is neither a tensor nor the extra state of a module.
        """
        first = self.homes.get(str(name), models[0])
        if isinstance(name, str) and name.rpartition(".")[2] == EXTRA_STATE and name not in listed.buffers:
            self.add_leaves(("model", name), t, first)
            self._record_differing_copies(name, t, models)
            return
        if not isinstance(name, str) or not isinstance(t, StoredTensor):
            raise Unsupported(
                f"{first.what}: module holds {short(t)} under {short(name)}, which is neither a tensor nor the "
                "extra state of a module.",
                code="CKPT0307",
            )
        if name in self.masters:
            self._add_master(name, t, first)
        elif name in listed.aliases:
            return  # with its owner
        elif name in listed.frozen:
            self.model[name] = self._read_frozen_parameter(name, listed.frozen[name], models)
        elif is_placeholder(t) and name not in listed.buffers and self.tensor_ranks == 1:  # else a part may be empty
            raise Corrupt(
                f'{first.what}: "{name}" is a placeholder in module, but neither param_shapes nor '
                "frozen_param_shapes names it.",
                code="CKPT0412",
            )
        elif self.masters and name not in listed.buffers and "shared_params" not in models[0].tree:
            raise Corrupt(
                f'{first.what}: "{name}" is in module, but not in param_shapes, and "shared_params" is '
                "missing, which would say whether it is tied to a weight that is. The file is damaged, or of "
                "DeepSpeed before 0.9: resume it with a later release and save it again.",
                code="CKPT0412",
            )
        else:
            self.model[name] = self.whole_tensor(first, t, ("model", name))
            if t.numel:
                self._record_differing_copies(name, t, models)

    def _add_master(self, name: str, t: StoredTensor, first: File) -> None:
        """Add the master of a weight, its fp32 copy, as the weight.

        Args:
            name: the name of the weight.
            t: what `module` of rank 0 has of it, a placeholder or the rounded weight.
            first: the model file of rank 0.

        Raises:
            Corrupt: the two have different shapes.
        """
        master = self.model[name] = self.masters[name]
        if not is_placeholder(t) and t.shape != master.shape:
            raise Corrupt(
                f'{first.what}: "{name}" is {t.shape} in module and {master.shape} in param_shapes.', code="CKPT0412"
            )
        if t.dtype != master.dtype and t.numel and t.contiguous:
            chunks = Chunks.whole(t.shape, first.number, *t.extent)
            self.rounded[name] = TensorEntry(t.dtype, t.shape, ("model", name), chunks)

    def _note_omitted_weights(self, first: File, module: dict[object, object]) -> None:
        """Add to `self.notes` that weights which are their fp32 masters, rounded, are not kept beside these, and that
        frozen parameters were left out of the save.

        `module` is the state dict in `first`, the model file of rank 0.
        """
        if any(
            n in self.masters and isinstance(t, StoredTensor) and t.dtype != self.masters[n].dtype
            for n, t in module.items()
        ):
            self.notes.append(DERIVED)
        lists_frozen = (
            any(map(is_placeholder, module.values())) or get_zero_setting(first.tree.get("ds_config"), "stage") == 2
        )  # stages 0 and 1 have no such list
        if lists_frozen and first.tree.get("frozen_param_shapes", {}) is None:
            self.notes.append(
                "frozen parameters, if the model has any, were left out when this was saved "
                "(exclude_frozen_parameters); they must come from elsewhere"
            )

    def _record_differing_copies(self, name: str, value: object, models: list[File]) -> None:
        """Compare the ranks' copies of the entry `name` of `module`; add each that differs from rank 0's to
        `self.others`.

        Args:
            name: the key of the entry.
            value: its value in the file of rank 0.
            models: the model files, in the order of the ranks.
        """
        for rank, f in enumerate(models[1:], 1):
            module = f.tree.get("module")
            if isinstance(module, dict) and not are_values_equal(value, module.get(name), models[0], f):
                nbytes = prod(value.shape) * ITEMSIZE[value.dtype] if isinstance(value, StoredTensor) else 0
                self.others.append((name, rank * self.tensor_ranks + self.tensor_rank, nbytes))

    def add_other_state(self, files: list[File]) -> None:
        """Add everything in the model files except module and optimizer. Rank 0's values are kept under their own
        names, those of other ranks below extra.per_rank.<rank> where they differ.

        `files` are the model files, in the order of the ranks.

        Raises:
            Unsupported: a key is not text.
        """
        first = files[0]
        differing, lacking = list[str](), list[str]()
        for key in dict.fromkeys(k for f in files for k in f.tree):
            if not isinstance(key, str):
                raise Unsupported(f"{first.what}: a key {short(key)} that is not text.", code="CKPT0307")
            if key in OWN:
                continue
            have = [(r, f) for r, f in enumerate(files) if key in f.tree and not (key in MAYBE and f.tree[key] is None)]
            if not have:
                continue
            if have[0][0] > 0:
                for r, f in have:
                    self.add_leaves(("per_rank", str(r), key), f.tree[key], f)
                differing.append(key)
                continue
            value = first.tree[key]
            # the job's own "model" or "optim" is neither, nor is its "scheduler" that of the engine
            # and a "scaler" that has keys of the engine's loss scaler would take its place
            taken = key == "scaler" and isinstance(value, dict) and any((key, str(k)) in self.rest for k in value)
            own = taken or key in list_client_keys(first.tree.get("lr_scheduler"))
            path: Path = ("extra", key) if own else (key,)
            self.add_leaves(path, value, first)
            others = [
                (r, f)
                for r, f in enumerate(files)
                if r and key in f.tree and not are_values_equal(value, f.tree[key], first, f)
            ]
            if others:
                differing.append(key)
            for rank, f in others:
                self.add_leaves(("per_rank", str(rank), key), f.tree[key], f)
            if any(key not in f.tree for f in files) and value is not None:
                lacking.append(key)
        if lacking:
            self.notes.append(describe_lacking_entries(lacking))
        if differing:
            self.notes.append(
                f"ranks differ in {', '.join(sorted(differing))}: rank 0's is kept under its name, the others' as "
                "extra.per_rank.<rank>"
            )

    def add_param_groups(self, file: File, groups: list[Any], members: list[list[str]]) -> None:
        """Add the param groups, with names of parameters in place of the numbers of flat tensors.

        Args:
            file: the optimizer file that they are from.
            groups: the param groups as the file has them.
            members: the names of the parameters in each flat tensor, in order.

        Raises:
            Corrupt: the groups do not list every flat tensor once, in order.
        """
        listed: list[int] = []
        for i, group in enumerate(groups):
            ids = group.get("params") if isinstance(group, dict) else None
            if not isinstance(ids, list) or not all(type(k) is int and 0 <= k < len(members) for k in ids):
                raise Corrupt(
                    f"{file.what}: param group {i} lists {short(ids)}; there are {len(members)} flat tensors.",
                    code="CKPT0417",
                )
            listed += ids
            for key, value in drop_added_option(group).items():
                data = [n for k in ids for n in members[k]] if key == "params" else value
                self.add_leaves(("optim", "param_groups", i, str(key)), data, file)
        if listed != list(range(len(members))):
            raise Corrupt(
                f"{file.what}: the param groups list the flat tensors {listed} of {len(members)}.", code="CKPT0417"
            )

    def _read_frozen_parameter(self, name: str, shape: tuple[int, ...], models: list[File]) -> TensorEntry:
        """Return the entry of a frozen parameter: complete in a single model file, or with one padded part in each
        rank's.

        `models` are the model files, in the order of the ranks.

        Raises:
            Corrupt: a rank's part has another dtype or length than follows from the shape.
        """
        n = prod(shape)
        part = -(-n // len(models))
        cuts, dtype = [], None
        for r, f in enumerate(models):
            t = f.get(name, StoredTensor, f.get("frozen_param_fragments", dict))
            dtype = dtype or t.dtype
            if len(models) == 1 and t.shape == shape:
                return self.whole_tensor(f, t, ("model", name))
            if t.shape != (part,) or t.dtype != dtype or not t.contiguous:
                raise Corrupt(
                    f'{f.what}: the part of the frozen parameter "{name}" is {t.dtype} {t.shape}; {shape} on '
                    f"{len(models)} ranks has {part} elements each.",
                    code="CKPT0412",
                )
            if r * part < n:
                cuts.append(FlatRange(r * part, min(n, (r + 1) * part), f.number, self.keep_crc(f, t).extent[0]))
        assert dtype is not None
        return build_entry_from_ranges(shape, dtype, ("model", name), cuts)

    def add_trainer_files(self) -> None:
        """Add what HF Trainer and Accelerate write beside the folder of the save: scheduler and counters. Nothing is
        added if the user gave the folder of the save itself, or wants no files beside it."""
        if not self.save.folder or not self.options.beside:
            return  # the tag's own folder was given: what lies above it is not asked for
        for name in self.source.list():
            if name in ("scheduler.bin", "scheduler.pt") and not any(p[0] == "lr_scheduler" for p in self.rest):
                file = self._load_from_source(name)
                self.add_leaves(("lr_scheduler",), file.tree, file)
        if self.source.exists("trainer_state.json"):
            parsed = _read_json(self.source, "trainer_state.json")
            self.rest.update({("trainer", k): parsed[k] for k in _TRAINER if isinstance(parsed.get(k), (int, float))})
            if parsed.get("log_history"):
                self.notes.append("the counters of trainer_state.json are kept, its log_history is not")

    def build_checkpoint(self, layout: str, world: int | None, like: tuple[str, ...] | None = None) -> Checkpoint:
        """Build the index of everything that was added.

        Args:
            layout: the name of the layout.
            world: the number of ranks; None if the layout has none.
            like: the names of the parameters, in the order in which the optimizer numbers them; None if the optimizer
                has names, or if the numbers are to be matched by shapes.
        """
        if self.tensor_rank == 0:
            self.add_trainer_files()
        clean = strip_wrappers(self.model)
        listed = self.rest.get(("buffer_names",))
        if isinstance(listed, list):
            self.rest["buffer_names",] = [clean.get(n, n) for n in listed]
        leaves: Leaves = {("model", n): t for n, t in self.model.items()}
        leaves.update(self.optim)
        leaves.update(self.rest)
        named = with_canonical_keys(canonical(leaves, shape_of, like, same_bytes, self.options.only))
        out = checkpoint_of(named, layout, self.source.root, world, self.files.names, self.source)
        out.records = Records(self.files.records.values())
        ranks = {i: parse_rank(n.rpartition("/")[2], self.tensor_ranks) for i, n in enumerate(self.files.names)}
        out.ranks = {i: r for i, r in ranks.items() if r is not None}
        out.notes = self.notes + out.notes
        out.trainer = out.trainer or "DeepSpeed"
        out.others = [OtherCopy(f"model.{clean.get(n, n)}", rank, nbytes) for n, rank, nbytes in self.others]
        out.rounded = {f"model.{clean.get(n, n)}": t for n, t in self.rounded.items()}
        return out


def _check_same_model_keys(models: list[File]) -> None:
    """Check that the model files of all ranks have the same keys about the model, and the same buffers.

    Raises:
        Corrupt: with a file that lacks one, or has other buffers.
    """
    first = models[0]
    if "buffer_names" not in first.tree:
        raise Corrupt(
            f'{first.what} has no "buffer_names", which DeepSpeed writes into every file of model states, and by '
            "which it knows one. The file is damaged, or another program changed it; fetch it again.",
            code="CKPT0406",
        )
    for other in models[1:]:
        if odd := sorted(_OF_MODEL & (first.tree.keys() ^ other.tree.keys())):
            has, lacks = (first, other) if odd[0] in first.tree else (other, first)
            raise Corrupt(
                f'{lacks.what} has no "{odd[0]}", and {has.what} has one. Every rank writes it, so the file is '
                "damaged or of another version; fetch it again.",
                code="CKPT0409",
            )
        if other.tree.get("buffer_names") != first.tree["buffer_names"]:
            raise Corrupt(
                f"{other.what}: buffer_names is {short(other.tree.get('buffer_names'))}, and "
                f"{short(first.tree['buffer_names'])} in {first.what}. Every rank writes the same, so one of the "
                "files is damaged or of another model.",
                code="CKPT0409",
            )
