"""Writes directories of trainers: the drafts of several layouts, joined into one.

model, optimizer      by the writers of dcp or full, under the keys that the trainer asks for
small files           scheduler, scaler, RNG of each rank, ...: torch.save files; trainer_state.json
ckpttool_state.pt     what the trainer has no file for, so that nothing is lost: counters of other trainers, RNG of
                      ranks that the new job does not have. The trainer does not look at it; ckpttool reads it back
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ckpttool.errors import Unsupported, argument
from ckpttool.formats.subclasses import make_composite_call
from ckpttool.formats.torch_pickles import TensorRef
from ckpttool.formats.torch_zip_writer import TorchFiles
from ckpttool.huggingface import model_names
from ckpttool.index.checkpoint import Checkpoint, Chunks, Number, Path, TensorEntry, Value, joined
from ckpttool.index.composites import Composite, collapse_composites
from ckpttool.index.draft import Draft, DraftFile, Written
from ckpttool.index.param_groups import list_numbered_parameters
from ckpttool.index.paths import keep_extra_state_trees
from ckpttool.index.trees import nest
from ckpttool.layouts import WriteOptions
from ckpttool.printable import list_first
from ckpttool.storage.source import Source

from .. import full
from ..dcp.write_dcp import list_missing_options, list_missing_steps
from ..dcp.write_dcp import write as write_dcp
from ..options import DirectoryOptions
from .dialect import LEFT_OVER, LIGHTNING_SCALERS, to_live_peft_name

__all__ = [
    "SmallFile",
    "add_missing_options",
    "collect_left_over_state",
    "draft_model_and_optimizer",
    "draft_small_files",
    "join_drafts",
    "knows_parameter_order",
    "make_component_tree",
    "number_parameters",
    "sort_param_groups",
    "state_dict_type",
]


@dataclass(frozen=True)
class SmallFile:
    """A file of torch.save or of JSON with the leaves {path in its tree: leaf of the source}; an empty file where there
    are none."""

    name: str
    leaves: Mapping[Path, TensorEntry | object]


def state_dict_type(ckpt: Checkpoint, options: WriteOptions) -> str:
    """Return the state dict type to write: the one that was asked for; else ddp for a job of one rank, which has
    nothing to shard, and sharded for others.

    Raises:
        UsageError: no world size was given and the source has none.
    """
    return options.of(DirectoryOptions).state_dict_type or ("ddp" if options.ranks(ckpt) == 1 else "sharded")


def add_missing_options(ckpt: Checkpoint, by_dcp: bool = True) -> tuple[Checkpoint, dict[str, object], list[str]]:
    """Add what a job with torch's AdamW and schedulers asks for and the checkpoint's optimizer lacks.

    These are options of param groups, and the steps of parameters.

    Args:
        ckpt: what is written; it is not changed.
        by_dcp: whether the trainer asks dcp for every option that its optimizer has; if not, steps alone are added.

    Returns:
        (the checkpoint with the additions, {canonical name: value} of the additions, notes for the user on them).
    """
    made, steps = list_missing_options(ckpt) if by_dcp else {}, list_missing_steps(ckpt)
    notes = []
    if said := ", ".join(dict.fromkeys(f"{p[3]} {x}" for p, x in made.items() if p[3] != "initial_lr")):
        notes.append(
            "the param groups lack options for which a job with torch's optimizer asks, and do not say whether theirs "
            f"was Adam or AdamW: it was taken for AdamW, whose defaults were added ({said}). A job with Adam sets "
            "decoupled_weight_decay to False after the load"
        )
    if rates := dict.fromkeys(str(x) for p, x in made.items() if p[3] == "initial_lr"):
        notes.append(
            "the param groups lack initial_lr, for which a job with a scheduler of torch asks: "
            f"{list_first(rates)} was added, the scheduler's base_lrs or the group's max_lr or lr"
        )
    if steps:
        notes.append(
            f"the optimizer counts its steps by param group ({list_first(dict.fromkeys(steps.values()))}), and torch's "
            "AdamW by parameter: each parameter got the step of its group"
        )
    made |= steps
    full = replace(ckpt, values={**ckpt.values, **{joined(p): Value(p, data) for p, data in made.items()}})
    return full, {joined(p): data for p, data in made.items()}, notes


def draft_model_and_optimizer(
    ckpt: Checkpoint,
    source: Source,
    options: WriteOptions,
    names: Mapping[str, tuple[str, str]],
    at_root: bool = False,
) -> list[tuple[str, Draft]]:
    """Draft the model and the optimizer, each if the checkpoint has it.

    Sharded ones are written as dcp, the others as files of torch.save.

    Args:
        ckpt: what is written.
        source: where its bytes are.
        options: those of the conversion.
        names: {state dict type: (name of the model, name of the optimizer)}: of folders of dcp, or of files.
        at_root: a folder of dcp holds the state dict itself; otherwise it is below the key "model" or "optimizer".

    Returns:
        [(folder with "/", or "" for the directory itself, draft)], the model first.

    Raises:
        Unsupported: the type is ddp, whose optimizer numbers its parameters, and their order is not known; or ddp of an
            adapter.
    """
    kind = state_dict_type(ckpt, options) if "ddp" in names else "sharded"
    sharded = kind == "sharded"
    adapter = next(
        (n for t in ckpt.tensors.values() if t.path[0] == "model" and to_live_peft_name(n := str(t.path[1])) != n), None
    )
    if kind == "ddp" and adapter is not None:
        raise Unsupported(
            f'The weights are those of an adapter, first "{adapter}". A job without FSDP reads them from '
            "adapter_model.safetensors, which this does not write. `ckpttool adapter extract` does; or choose another "
            "state dict type.",
            code="CKPT0321",
        )
    otherwise = f"; or write it for a job with FSDP: {argument('state_dict_type', 'sharded', 'DirectoryOptions')}"
    numbers = number_parameters(ckpt, options, "A job without FSDP", otherwise) if kind == "ddp" else {}
    out = []
    for component, key, name in zip(("model", "optim"), ("model", "optimizer"), names[kind], strict=True):
        part = ckpt.only([component])
        if not part.tensors and not part.values:
            continue
        part = replace(part, origin=keep_extra_state_trees(part.origin), ranks={}, notes=[])
        write = write_dcp if sharded else full.write
        tree = partial(make_component_tree, (key,) if sharded and not at_root else (), numbers)
        folder, _, file = (f"{name}/" if sharded else name).rpartition("/")
        draft = write(part, source, replace(options, target=file or name, own=None, tree=tree))
        if numbers and component == "optim":
            sort_param_groups(draft, numbers)
        out.append((f"{folder}/" if folder else "", draft))
    return out


def sort_param_groups(draft: Draft, numbers: Mapping[str, int]) -> None:
    """Sort the `params` of each param group of a draft by number, in place, and add their names as `param_names`.
    `numbers` are {FQN: number}."""
    for n, v in list(draft.checkpoint.values.items()):
        if v.path[:2] == ("optim", "param_groups") and v.path[3:] == ("params",):
            listed = sorted(v.data, key=lambda fqn: numbers[fqn])
            if listed != v.data:
                draft.checkpoint.values[n] = Value(v.path, listed)
                draft.changed[n] = "in the order of the modules"
            names = f"{joined(v.path[:3])}.param_names"
            if names not in draft.checkpoint.values:
                draft.synthesized_values[names] = [to_live_peft_name(fqn) for fqn in listed]
            elif draft.checkpoint.values[names].data != (own := [to_live_peft_name(fqn) for fqn in listed]):
                draft.checkpoint.values[names] = Value((*v.path[:3], "param_names"), own)
                draft.changed[names] = "in the order of the modules"


def number_parameters(ckpt: Checkpoint, options: WriteOptions, job: str, otherwise: str) -> dict[str, int]:
    """Return {FQN: number} as `Optimizer.state_dict()` numbers the parameters of a job: group by group, each in the
    order of the module.

    The order comes from `options.config` or `options.like`, or from the numbers in the source. Without them it is the
    order of the param groups, if the model's weights have the same one and neither is alphabetical, as files sort
    names.

    Args:
        ckpt: the checkpoint with names.
        options: those of the conversion.
        job: subject of the error message, as "A job without FSDP".
        otherwise: end of the error message, another way out; "" for none.

    Raises:
        Unsupported: the order is not known, or the optimizer does not list its parameters.
        MissingPackage: transformers is needed for the order, and is not installed. RemoteError: the Hub did not answer.
    """
    groups = [data for p, data in ckpt.leaves().items() if p[:2] == ("optim", "param_groups") and p[3:] == ("params",)]
    if any(not isinstance(g, list) or not all(isinstance(n, str) for n in g) for g in groups):
        raise Unsupported(
            "The optimizer's param groups do not list their parameters by name, so they cannot be numbered.",
            code="CKPT0308",
        )
    weights = [str(t.path[1]) for t in ckpt.tensors.values() if t.path[0] == "model" and len(t.path) == 2]
    if options.like is not None and options.like.optimizer is not None:
        order = list(options.like.optimizer)
    elif options.config is not None:
        order = list(model_names.sort_by_module_order(dict.fromkeys(weights), model_names.load_config(options.config)))
    else:
        order = list(ckpt.numbered or list_numbered_parameters(ckpt.origin)) or (
            [] if weights == sorted(weights) else weights
        )
    place = {name: i for i, name in enumerate(order)}
    known = all(name in place for group in groups for name in group)
    in_order = [sorted(group, key=lambda name: place[name]) for group in groups] if known else []
    hinted = options.like is not None or options.config is not None
    if not known or (not hinted and in_order != groups):
        count = sum(map(len, groups))
        raise Unsupported(
            f"{job} numbers the {count:,} parameters of its optimizer in the order of the model's "
            f"modules, and this checkpoint does not tell that order. Give {argument('config')} the folder or id of the "
            f"Hugging Face model, or {argument('like')} a checkpoint that such a job saved with names"
            f"{otherwise}.",
            code="CKPT0308",
        )
    return {name: i for i, name in enumerate(n for g in in_order for n in g)}


def knows_parameter_order(ckpt: Checkpoint) -> bool:
    """Tell whether `number_parameters` numbers the parameters of a checkpoint without a config or another one."""
    try:
        return bool(number_parameters(ckpt, WriteOptions(), "a job", ""))
    except Unsupported:
        return False


def make_component_tree(key: Path, numbers: Mapping[str, int], leaves: dict[Path, object]) -> dict[Path, object]:
    """Return {path in the file: leaf} of one component, below `key`.

    With `numbers`, the optimizer refers to its parameters by number and has their names in `param_names`, as torch >=
    2.6 saves them (Optimizer.state_dict); otherwise the parameters of an adapter have the names of the live module.

    Args:
        key: path in the file below which the component is; () for the root.
        numbers: {FQN: number of the parameter}; empty where names are kept.
        leaves: {canonical path: leaf}.

    Raises:
        Unsupported: the optimizer has state of a parameter that no param group lists.
    """

    def name(fqn: str) -> str | int:
        """Return what the file has for a parameter: its number, or its name in the live module.

        Raises:
            Unsupported: no param group lists the parameter.
        """
        if numbers and fqn not in numbers:
            raise Unsupported(
                f'optim.state has an entry for "{fqn}", which no param group lists; the optimizer would not know what '
                "to do with it.",
                code="CKPT0308",
            )
        return numbers[fqn] if numbers else to_live_peft_name(fqn)

    out: dict[Path, object] = {}
    for path, leaf in leaves.items():
        if path[:2] == ("optim", "state") and len(path) > 2:
            at = name(str(path[2]))
            path = ("optim", "state", Number(at) if isinstance(at, int) else at, *path[3:])
        elif path[:2] == ("optim", "param_groups") and path[3:] == ("params",) and isinstance(leaf, list):
            if numbers:
                leaf = sorted(leaf, key=lambda n: numbers[n])
                out[*key, *path[1:3], "param_names"] = [to_live_peft_name(n) for n in leaf]
            leaf = [name(n) if isinstance(n, str) else n for n in leaf]
        elif numbers and path[3:] == ("param_names",):
            continue
        out[*key, *path[1:]] = leaf
    return out


def draft_small_files(ckpt: Checkpoint, files: Sequence[SmallFile], options: WriteOptions) -> Draft:
    """Draft files of torch.save and JSON. Tensors of `ckpt` in them are copied from the source, those of another file
    too, whose paths begin with "replica"; all other leaves are written as they are."""
    out = TorchFiles()
    tensors: dict[str, TensorEntry] = {}
    for file in files:
        if file.name.endswith(".json"):
            out.literal(file.name, (json.dumps(nest(dict(file.leaves)), indent=2) + "\n").encode())
            continue
        if not file.leaves:
            out.literal(file.name, b"")
            continue
        tree: dict[Path, object] = {}
        storages: dict[str, int] = {}
        entries: list[tuple[str, TensorEntry]] = []
        for path, leaf in collapse_composites(file.leaves).items():
            if isinstance(leaf, TensorEntry):
                leaf = _add_storage(leaf, options, storages, entries)
            elif isinstance(leaf, Composite):
                inside = {n: _add_storage(t, options, storages, entries) for n, t in leaf.tensors.items()}
                leaf = make_composite_call(leaf, inside)
            tree[path] = leaf
        number = out.add(file.name, nest(tree), storages)
        for key, t in entries:
            at = out.offset(number, key)
            tensors[joined(t.path)] = replace(t, chunks=Chunks.whole(t.shape, number, at, t.nbytes), coding="raw")
    index = Checkpoint("data", options.target, None, [], [], tensors, {})
    sources = {n: ckpt.tensors[joined(t.path[1:]) if t.path[0] == "replica" else n] for n, t in tensors.items()}
    return out.draft(index, sources)


def _add_storage(
    t: TensorEntry, options: WriteOptions, storages: dict[str, int], entries: list[tuple[str, TensorEntry]]
) -> TensorRef:
    """Add a tensor to a file, in a storage of its own, and return the reference that is pickled for it.

    Args:
        t: the tensor.
        options: says to which dtype it is cast.
        storages: gets {key of the storage: number of bytes}.
        entries: gets (key of the storage, tensor with the dtype to write).
    """
    t = replace(t, dtype=options.cast(joined(t.path), t.dtype))
    key = str(len(storages))
    storages[key] = t.nbytes
    entries.append((key, t))
    return TensorRef(t.dtype, t.shape, key, t.numel)


def join_drafts(
    name: str, ckpt: Checkpoint, parts: Sequence[tuple[str, Draft]], options: WriteOptions, world: int | None
) -> Draft:
    """Join the drafts of the parts of a directory into one draft. Files keep the order of the parts.

    Args:
        name: the layout of the result.
        ckpt: what is written, all of it.
        parts: (folder with "/", or "" for the directory itself, draft).
        options: those of the conversion.
        world: ranks of the new job; None where any number reads it.
    """
    files: list[DraftFile] = []
    tensors: dict[str, TensorEntry] = {}
    out = Draft(Checkpoint(name, options.target, world, [], [], tensors, dict(ckpt.values)), {}, files)
    of_file: list[tuple[Draft, int]] = []
    of_name: dict[str, Draft] = {}
    for folder, part in parts:
        by = len(files)
        files += [replace(f, name=folder + f.name) for f in part.files]
        of_file += [(part, i) for i in range(len(part.files))]
        for n, t in part.checkpoint.tensors.items():
            tensors[n] = replace(t, chunks=t.chunks.moved(by))
            of_name[n] = part
        out.sources |= part.sources
        out.aliases |= part.aliases
        out.synthesized_values |= part.synthesized_values
        out.taken_apart |= part.taken_apart
        out.changed |= part.changed
        out.checkpoint.values |= {n: part.checkpoint.values[n] for n in part.changed}
        out.dropped += part.dropped
        out.synthesized_tensors += part.synthesized_tensors
        out.notes += [n for n in part.notes if n not in out.notes]
    out.checkpoint.files, out.checkpoint.sizes = [f.name for f in files], [f.size for f in files]

    def before(name: str, t: TensorEntry, row: int, written: Sequence[Written]) -> bytes:
        part = of_name[name]
        return part.before(name, part.checkpoint.tensors[name], row, written) if part.before else b""

    def after(name: str, t: TensorEntry, row: int, written: Sequence[Written]) -> bytes:
        part = of_name[name]
        return part.after(name, part.checkpoint.tensors[name], row, written) if part.after else b""

    def tail(file: int, written: Sequence[Written], digests: dict[str, str]) -> bytes:
        part, own = of_file[file]
        return part.tail(own, written, digests) if part.tail else b""

    out.before, out.after, out.tail = before, after, tail
    return out


def collect_left_over_state(
    ckpt: Checkpoint, placed: set[Path], copies: Collection[Path] = ()
) -> tuple[list[SmallFile], list[str]]:
    """Collect the state besides model and optimizer that no other file holds, for the file ckpttool_state.pt.

    The file is {"values": ((path, data), ...), "tensors": {"0": tensor, ...}, "paths": (path of tensor 0, ...)}, and
    has "copies": (path, ...) where a reader has to leave out what other files hold in the form of this trainer.

    Args:
        ckpt: what is written.
        placed: the canonical paths that other files hold.
        copies: the canonical paths that a reader gives to copies in other files, whose originals are not in `placed`.

    Returns:
        ([ckpttool_state.pt], [a note on it]); two empty lists if nothing is left.
    """
    rest = {p: leaf for p, leaf in ckpt.leaves().items() if p[0] not in ("model", "optim") and p not in placed}
    if not rest:
        return [], []
    tensors = [leaf for leaf in rest.values() if isinstance(leaf, TensorEntry)]
    values = tuple((_with_text_numbers(p), leaf) for p, leaf in rest.items() if not isinstance(leaf, TensorEntry))
    leaves: dict[Path, object] = {("values",): values, ("paths",): tuple(_with_text_numbers(t.path) for t in tensors)}
    leaves |= {("tensors", str(i)): t for i, t in enumerate(tensors)}
    if copies:
        leaves["copies",] = tuple(sorted(copies, key=joined))
    kept = sorted({str(p[0]) if p[0] != "extra" else joined(p[:2]) for p in rest})
    scalers = ["scaler", *map(joined, LIGHTNING_SCALERS)]  # the copies that are not RNG states are of one of these
    twice = {n for p in copies for n in (["rng"] if p[0] == "rng" else scalers)} & set(kept)
    alone = [name for name in kept if name not in twice]
    said = [f"what this trainer has no file for: {list_first(alone, 8)}"] if alone else []
    said += (
        [f"the source's own form of {list_first(sorted(twice))}, which this trainer loads in another"] if twice else []
    )
    return [SmallFile(LEFT_OVER, leaves)], [f"{LEFT_OVER} keeps {'; and '.join(said)}"]


def _with_text_numbers(path: Path) -> Path:
    """Return the path with every `Number` of a parameter as text, as in DCP; other integers stay."""
    return tuple(p if type(p) is int else str(p) for p in path)
