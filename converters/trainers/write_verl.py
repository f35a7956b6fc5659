"""Writes the step folder from which verl resumes with `strategy: fsdp2`, at any world size.

global_step_{step}/actor/
    model_world_size_{n}_rank_{rank}.pt        model.state_dict(): DTensors cut along dimension 0, buffers whole
    optim_world_size_{n}_rank_{rank}.pt        optimizer.state_dict(): parameters by number, slots cut likewise
    extra_state_world_size_{n}_rank_{rank}.pt  {"lr_scheduler", "rng": {"cpu", "numpy", "random", "cuda"}}
    fsdp_config.json                           {"FSDP_version", "world_size"}
global_step_{step}/data.pt                     the state of torchdata's loader, where verl saved one

Sources: verl/utils/checkpoint/fsdp_checkpoint_manager.py and checkpoint_manager.py, verl/workers/engine/fsdp/utils.py
(create_device_mesh) of verl 0.9.1; a test resumes with its FSDPCheckpointManager.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from ckpttool import bounded_json
from ckpttool.engine.flat.split_state import split_training_state
from ckpttool.errors import Unsupported
from ckpttool.formats.sharded import make_dtensor, make_mesh
from ckpttool.formats.stored_tensors import Inline
from ckpttool.formats.torch_pickles import TensorRef
from ckpttool.formats.torch_zip_writer import TorchFiles
from ckpttool.index.checkpoint import ITEMSIZE, Checkpoint, Chunks, Path, TensorEntry, joined, tied_weights
from ckpttool.index.composites import Composite, collapse_composites
from ckpttool.index.draft import Draft, Dropped
from ckpttool.index.schedulers import describe_missing_scheduler
from ckpttool.index.trees import nest
from ckpttool.layouts import WriteOptions
from ckpttool.storage.source import Source

from ..options import VerlOptions
from .join import (
    SmallFile,
    add_missing_options,
    collect_left_over_state,
    draft_small_files,
    join_drafts,
    make_component_tree,
    number_parameters,
    sort_param_groups,
)
from .write_directories import BEGINS_ANEW, describe_other_schedulers, note_missing_rng, refuse_several_optimizers

__all__ = ["write_verl"]

#: Keys at the root of what torchdata's StatefulDataLoader saves (torchdata/stateful_dataloader).
_OF_LOADER = frozenset(("_snapshot", "_num_yielded", "_sampler_iter_yielded"))


def write_verl(ckpt: Checkpoint, source: Source, options: WriteOptions) -> Draft:
    """Draft the step folder that verl's FSDPCheckpointManager loads on the ranks of a job with FSDP2.

    Raises:
        UsageError: no world size was given and the source has none.
        Unsupported: there are no weights, several optimizers, tensor subclasses, tensors in the scheduler, or the order
            of the optimizer's parameters is not known.
    """
    refuse_several_optimizers(ckpt, "verl")
    if found := [p for p, x in collapse_composites(ckpt.leaves()).items() if isinstance(x, Composite)]:
        raise Unsupported(
            f'"{joined(found[0])}" is a tensor of several parts, which FSDP2 does not cut into rows as verl saves '
            "them. Write dcp or full, which keep it as it is.",
            code="CKPT0316",
        )
    world = options.ranks(ckpt)
    placed: set[Path] = set()
    loader = _make_loader_file(ckpt, placed)
    extra, notes = _make_extra_state_files(ckpt, options.of(VerlOptions).mesh_device, world, placed)
    ckpt, steps, of_steps = add_missing_options(ckpt, by_dcp=False)
    rest, kept = collect_left_over_state(ckpt, placed)
    config = TorchFiles()
    config.literal("fsdp_config.json", bounded_json.encode({"FSDP_version": 2, "world_size": world}, indent=4) + b"\n")
    parts = [
        ("", draft_small_files(ckpt, [*rest, *loader], options)),
        ("actor/", config.draft(Checkpoint("data", options.target, None, [], [], {}, {}), {})),
        ("actor/", draft_small_files(ckpt, extra, options)),
        ("actor/", _draft_rank_files(ckpt, source, options, world)),
    ]
    out = join_drafts("verl", ckpt, parts, options, world)
    if ("scheduler",) not in ckpt.leaves() and not any(p[0] == "scheduler" for p in ckpt.leaves()):
        out.synthesized_values["scheduler"] = None
    one = "verl gives the state of all to the job's one, where a LambdaLR stops and others begin at step 0"
    several = any(p[0] == "scheduler" for p in ckpt.leaves())
    out.notes += [
        *describe_other_schedulers(ckpt),
        *describe_missing_scheduler(ckpt, one if several else BEGINS_ANEW),
        "for a job with strategy fsdp2 and one fsdp group of all ranks; verl reads the step from the name of the "
        "folder, global_step_<step>, and the tokenizer from the model's own folder",
        *notes,
        *of_steps,
        *kept,
    ]
    out.synthesized_values |= steps
    return out


def _make_loader_file(ckpt: Checkpoint, placed: set[Path]) -> list[SmallFile]:
    """Return [data.pt] with the state of torchdata's StatefulDataLoader; an empty list if the source has no such state.
    `placed` gets the canonical paths in the file."""
    found = {p: x for p, x in ckpt.leaves().items() if p[0] == "dataloader" and len(p) > 1}
    if not _OF_LOADER & {p[1] for p in found}:
        return []
    placed |= set(found)
    return [SmallFile("data.pt", {p[1:]: x for p, x in found.items()})]


def _make_extra_state_files(
    ckpt: Checkpoint, device: str, world: int, placed: set[Path]
) -> tuple[list[SmallFile], list[str]]:
    """Return (one file per rank with the scheduler and, if the source has all of its parts, the rank's RNG state; notes
    for the user). verl loads an RNG state only with all of its parts, one of which is that of the device.

    Args:
        ckpt: what is written.
        device: type of the devices of the job: cuda, npu or cpu.
        world: ranks of the job.
        placed: gets the canonical paths that are in the files.

    Raises:
        Unsupported: the scheduler has a tensor, of which every rank would need a copy.
    """
    leaves = ckpt.leaves()
    scheduler = {p: x for p, x in leaves.items() if p[0] == "scheduler"}
    if of_tensor := next((p for p, x in scheduler.items() if isinstance(x, TensorEntry)), None):
        raise Unsupported(
            f'"{joined(of_tensor)}" is a tensor, and verl keeps a scheduler of plain numbers. Write dcp or full, '
            "which keep it.",
            code="CKPT0316",
        )
    placed |= set(scheduler)
    saved: dict[Path, object] = {("lr_scheduler", *p[1:]): x for p, x in scheduler.items()} or {("lr_scheduler",): None}
    files, with_rng = [], []
    for rank in range(world):
        name = f"extra_state_world_size_{world}_rank_{rank}.pt"
        own = {p: x for p, x in leaves.items() if p[0] == "rng" and len(p) == 3 and str(p[1]) == str(rank)}
        own = {p: x for p, x in own.items() if p[2] != "cuda" or isinstance(x, TensorEntry)}  # that of one device
        if not {"cpu", "numpy", "python", device} <= {p[2] for p in own}:
            own = {}
        placed |= set(own)
        rng: dict[Path, object] = {("rng", "random" if p[2] == "python" else p[2]): x for p, x in own.items()}
        files.append(SmallFile(name, {**saved, **rng}))
        with_rng += files[-1:] if own else []
    return files, note_missing_rng(ckpt, with_rng, world)


def _draft_rank_files(ckpt: Checkpoint, source: Source, options: WriteOptions, world: int) -> Draft:
    """Draft the model files and the optimizer files of all ranks. Rank 0's model file, by which verl's folders are
    recognised, is written last."""
    whole = {f"model.{n}" for n in split_training_state(ckpt, source).buffers}
    leaves = ckpt.leaves()
    trees: dict[str, Mapping[Path, object]] = {}
    optim = {p: x for p, x in leaves.items() if p[0] == "optim"}
    numbers = number_parameters(ckpt, options, "verl", "") if optim else {}
    if numbers:
        trees["optim"] = make_component_tree((), numbers, optim)
        if not any(p[0] == "state" for p in trees["optim"]):
            trees["optim"] = {**trees["optim"], ("state",): {}}  # before the first step; load_state_dict asks for it
    trees["model"] = {p[1:]: x for p, x in leaves.items() if p[0] == "model"}
    # an optimizer counts the steps of each parameter in place, so only weights share a storage
    same = tied_weights({n: t for n, t in ckpt.tensors.items() if t.path[0] == "model"})
    out = _RankFiles(ckpt, options, world, whole, same)
    for component, tree in trees.items():
        out.add(component, tree)
    draft = out.draft()
    if numbers:
        draft.checkpoint.values = {n: v for n, v in ckpt.values.items() if v.path[0] in ("model", "optim")}
        sort_param_groups(draft, numbers)
    else:  # without an optimizer, or with Megatron-Core's before its first step
        why = "the param groups list no parameters, which verl numbers"
        draft.dropped += [
            Dropped(joined(p), x.nbytes if isinstance(x, TensorEntry) else 0, why) for p, x in optim.items()
        ]
    return draft


class _RankFiles:
    """The files of a model and an optimizer while they are laid out.

    Args:
        ckpt: what is written.
        options: those of the conversion.
        world: ranks of the job.
        whole: names of buffers, of which each rank has all.
        same: {name of a tied weight: the name that owns its bytes}.
    """

    def __init__(
        self, ckpt: Checkpoint, options: WriteOptions, world: int, whole: set[str], same: Mapping[str, str]
    ) -> None:
        """Begin without any file; the arguments are those of the class."""
        self.ckpt, self.options, self.world = ckpt, options, world
        self.whole, self.same = whole, same
        self.files = TorchFiles()
        self.tensors: dict[str, TensorEntry] = {}
        self.sources: dict[str, TensorEntry] = {}
        self._ends: dict[int, int] = {}  # {number of a file: byte at which what was placed in it ends}

    def add(self, component: str, tree: Mapping[Path, object]) -> None:
        """Add one file per rank for a component ("model" or "optim"). `tree` is {path in the file: leaf} of whole
        tensors; each file gets the rank's rows."""
        held = {joined(x.path): x for x in tree.values() if isinstance(x, TensorEntry)}
        owners = {name: x for name, x in held.items() if name not in self.same}
        places: dict[int, tuple[int, dict[str, int]]] = {}
        for rank in reversed(range(self.world)):
            mesh = make_mesh(self.options.of(VerlOptions).mesh_device, self.world, rank)
            rows = {name: self._rows(x, rank)[1] for name, x in owners.items()}
            stored = {n: prod(shape) * ITEMSIZE[self._dtype(owners[n])] for n, shape in rows.items() if prod(shape)}
            keys = {n: str(k) for k, n in enumerate(stored)}
            leaves: dict[Path, object] = {}
            for path, x in tree.items():
                leaves[path] = x
                if isinstance(x, TensorEntry):
                    owner, dtype = self.same.get(joined(x.path), joined(x.path)), self._dtype(x)
                    shape = rows[owner]
                    local = TensorRef(dtype, shape, keys[owner], prod(shape)) if owner in keys else None
                    own = local or Inline(dtype, shape, b"")
                    leaves[path] = make_dtensor(mesh, x.shape, own, dtype) if self._is_sharded(x) else own
            name = f"{component}_world_size_{self.world}_rank_{rank}.pt"
            file = self.files.add(name, nest(leaves), {keys[n]: size for n, size in stored.items()})
            places[rank] = (file, {n: self.files.offset(file, key) for n, key in keys.items()})
        for name, x in owners.items():
            self._record_places(name, x, {rank: (file, at.get(name, 0)) for rank, (file, at) in places.items()})
        for name, x in held.items():
            if name not in owners:
                self.tensors[name] = TensorEntry(self._dtype(x), x.shape, x.path, self.tensors[self.same[name]].chunks)
                self.sources[name] = self.ckpt.tensors[name]

    def _dtype(self, t: TensorEntry) -> str:
        """Return the dtype in which a tensor is written."""
        return self.options.cast(joined(t.path), t.dtype)

    def _is_sharded(self, t: TensorEntry) -> bool:
        """Return whether each rank has only some rows of a tensor: of a parameter, or of an optimizer slot with its
        shape."""
        if t.path[0] == "model":
            return bool(t.shape) and joined(t.path) not in self.whole
        of = self.ckpt.tensors.get(f"model.{t.path[2]}") if len(t.path) == 4 else None
        return of is not None and of.shape == t.shape and self._is_sharded(of)

    def _rows(self, t: TensorEntry, rank: int) -> tuple[int, tuple[int, ...]]:
        """Return (first row, shape) of a rank's part of a tensor, cut as torch.chunk does; all of it if it is not
        sharded."""
        if not self._is_sharded(t):
            return 0, t.shape
        each = -(-t.shape[0] // self.world)
        first, end = (min(r * each, t.shape[0]) for r in (rank, rank + 1))
        return first, (end - first, *t.shape[1:])

    def _record_places(self, name: str, t: TensorEntry, places: Mapping[int, tuple[int, int]]) -> None:
        """Record where the bytes of a tensor are written: its rows in the file of each rank, or a full copy in each.
        `places` are {rank: (number of its file, offset in it)}."""
        dtype = self._dtype(t)
        file, at = places[0]
        behind = self._ends.get(file) or self.files.head_bytes(file)
        if n := prod(self._rows(t, 0)[1]) * ITEMSIZE[dtype]:
            self._ends[file] = at + n
        if not self._is_sharded(t) and t.numel:
            for rank, (file, at) in places.items():
                copy = name if rank == 0 else f"replica.{rank}.{name}"
                chunks = Chunks.whole(t.shape, file, at, t.numel * ITEMSIZE[dtype])
                self.tensors[copy] = TensorEntry(dtype, t.shape, t.path if rank == 0 else (copy,), chunks)
                self.sources[copy] = self.ckpt.tensors[name]
            return
        chunks = Chunks(len(t.shape))
        for rank, (file, at) in sorted(places.items()):
            first, shape = self._rows(t, rank)
            if n := prod(shape):
                chunks.add((first, *(0,) * (len(shape) - 1)), shape, file, at, n * ITEMSIZE[dtype])
        if not t.numel:  # no bytes, but a place behind the tensor before it: files are written front to back
            chunks.add((0,) * len(t.shape), t.shape, places[0][0], behind, 0)
        self.tensors[name] = TensorEntry(dtype, t.shape, t.path, chunks)
        self.sources[name] = self.ckpt.tensors[name]

    def draft(self) -> Draft:
        """Return the draft of the files of all components that were added."""
        index = Checkpoint("verl", self.options.target, self.world, [], [], self.tensors, {})
        return self.files.draft(index, self.sources, aliases=dict(self.same))
