"""Directories of trainers: files and folders in several layouts that are one state.

A trainer's dialect lists the parts of a directory: which file or folder it is, which layout reads it, and
which component of the state it holds. `read` reads them and joins their indexes. What is no part and holds state by its
name is listed as unread, as for every layout (engine/discover/unread_files.py).

    DirectoryPart("pytorch_model_fsdp_0", "dcp", "model")    a folder, read by the layout dcp
    DirectoryPart("optimizer.pt", "full", "optim")           a file; numbers of parameters become the names of the model
                                                             part
    DirectoryPart("rng_state_1.pth", DATA, "rng", ("1",))    plain data: rng.1.<key>
    DirectoryPart("meta.pt", TREE, "trainer")                plain data whose keys say what they are: lr_schedulers,
                                                             epoch, loops
    DirectoryPart("../data.pt", DATA, "dataloader")          in the folder above, where the dialect's `siblings` names
                                                             it
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ckpttool import bounded_json, layouts
from ckpttool.by_fields import ByFields
from ckpttool.engine.recorded import RECORD
from ckpttool.errors import Corrupt, IncompleteWeights, MissingPackage, Unsafe, Unsupported, UsageError, argument
from ckpttool.formats import stored_tensors, torch_zip
from ckpttool.formats.pickles import short
from ckpttool.formats.stored_tensors import split_components
from ckpttool.huggingface import model_files, model_names
from ckpttool.index.checkpoint import (
    Checkpoint,
    Path,
    Salvage,
    TensorEntry,
    Unread,
    Value,
    joined,
    make_per_rank_path,
    same_value,
)
from ckpttool.index.composites import Composite, add_composite, shape_of
from ckpttool.index.draft import Draft
from ckpttool.index.names import (
    COMPONENTS,
    COUNTERS,
    KEEPS_NUMBERS,
    ROLES,
    CanonicalState,
    canonical,
    original_path,
)
from ckpttool.index.optimizer_names import iterate_possible_orders
from ckpttool.index.param_groups import list_numbered_parameters
from ckpttool.index.paths import is_number_text, keep_extra_state_trees
from ckpttool.index.schedulers import complete_scheduler_state
from ckpttool.layouts import Place, ReadOptions, WriteOptions
from ckpttool.program import Advice, Program, Saves
from ckpttool.storage.overlay import add_sibling_files
from ckpttool.storage.source import Source

from .. import dcp, hf
from ..rank_files import describe_lacking_entries

__all__ = [
    "DATA",
    "DEEPSPEED",
    "FOREIGN",
    "FSDP_SCALER",
    "LEFT_OVER",
    "LIGHTNING_SCALERS",
    "TREE",
    "Dialect",
    "DirectoryPart",
    "locate",
    "make_resume_advice",
    "make_unrun_program_rows",
    "name_tree_beside_model",
    "read",
    "to_live_peft_name",
    "with_peft_names",
]

#: The layout of a part that holds plain data: a file of torch.save or of JSON, and no state dict.
DATA = "data"
#: The same, of a part whose keys at the root have names and places as in a tree (names.canonical).
TREE = "tree"
#: The same as TREE, of a part with an optimizer that may have other names of parameters than the weights: then it is
#: data.
FOREIGN = "foreign"
#: The layout of LEFT_OVER, which join.collect_left_over_state describes.
_OURS = "ckpttool"
#: The file in which ckpttool keeps what the trainer of a directory has no file for.
LEFT_OVER = "ckpttool_state.pt"
#: Where Lightning's precision plugin of FSDPStrategy keeps its gradient scaler, as a canonical path.
FSDP_SCALER = ("extra", "FSDPPrecision")
#: The same of any strategy (plugins/precision/amp.py and fsdp.py).
LIGHTNING_SCALERS = (("extra", "MixedPrecision"), FSDP_SCALER)
#: The layout of a save of DeepSpeed's engine at any stage, which holds a model and its optimizer.
DEEPSPEED = "zero3"
_MOST_JSON = 256 << 20  # trainer_state.json with the log of a long run


@dataclass(frozen=True, eq=False, repr=False)
class DirectoryPart(ByFields):
    """A file or a folder of a trainer's directory, and what it is.

    Args:
        name: relative to the directory.
        layout: the layout that reads it; or DATA, or TREE.
        component: "model", "optim", "scheduler", ...; of a TREE, what is lost without it.
        under: the path below the component, where several parts share one: the rank of an RNG state.
        keys: {key at the root of a part of DATA: its canonical name}.
        whole: it holds the other components too.
        optional: it is listed as a file that was not read, where it cannot be read or its parameters cannot be named.
        renamed: what the names of the optimizer's parameters lack of those of the weights.
        places: {key at the root of a part of DATA: the canonical path of what it holds}, where that is not in the
            component.
        rank: whose file it is, where each rank writes one with the same keys; "" for the first. What a later rank
            repeats is there already, and what it has otherwise, outside of its own `places`, is
            extra.per_rank.<rank>.<key>.
    """

    name: str
    layout: str
    component: str
    under: Path = ()
    keys: Mapping[str, str] = field(default_factory=dict)
    whole: bool = False
    renamed: str = ""
    optional: bool = False
    places: Mapping[str, Path] = field(default_factory=dict)
    rank: str = ""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Dialect(ByFields):
    """How one trainer lays a checkpoint out.

    Args:
        name: what `--source-layout` calls it.
        title: what people call it; `Checkpoint.trainer` and messages have it.
        detect: whether a folder is this trainer's, and why, by the names in it.
        parts: the parts of such a folder, the model before the optimizer.
        siblings: files below the folder above that belong to the checkpoint; their parts are named "../<file>".
        notes: what to say about such a folder.
        write, options, suffixes: as those of `Layout`.
        world_size: ranks of the job, where the files tell.
        own_keys: the parts are one tree with keys of its own, which dcp and full put back.
        saves_peft_names: it saves an adapter of PEFT by `get_peft_model_state_dict`, without the adapter's own name in
            those of the parameters; otherwise by `state_dict` of the live module.
        aliases: other names of the layout.
        saves: how DeepSpeed keeps several saves in such a folder, where it is inside.
        program: what is known of the trainer besides: next steps, files beside its directory, `--for`, ...
    """

    name: str
    title: str
    detect: Callable[[Source], tuple[bool, str]]
    parts: Callable[[Source], Sequence[DirectoryPart]]
    siblings: Callable[[Source], Sequence[str]] = lambda source: ()
    notes: Callable[[Source], Sequence[str]] = lambda source: ()
    write: Callable[[Checkpoint, Source, WriteOptions], Draft] | None = None
    options: type | None = None
    world_size: Callable[[Source], int | None] = lambda source: None
    own_keys: bool = False
    saves_peft_names: bool = False
    suffixes: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    saves: Saves | None = None
    program: Program = Program()  # noqa: RUF009

    def layout(self) -> layouts.Layout:
        """Return the `Layout` that reads this trainer's directories, and writes them if `write` is set."""
        return layouts.Layout(
            name=self.name,
            title=f"directory of {self.title}",
            detect=self._detect,
            mount=self._mount,
            read=partial(read, self),
            locate=locate,
            write=self.write,
            prepare=lambda ckpt, source, options: with_peft_names(
                complete_scheduler_state(split_components(require_single_model(ckpt))), self.saves_peft_names
            ),
            options=self.options,
            suffixes=self.suffixes,
            aliases=self.aliases,
            of_trainer=True,
            keeps_subclasses=True,
            reader_uses=("config", "like", "flat_layout", "wrap", "tag"),
            writer_uses=("config", "like", "world_size"),
            needs_named_optimizer=True,
            sharding="fsdp2",
            saves=self.saves,
            program=self.program,
        )

    def _detect(self, where: Place) -> tuple[bool, str]:
        """Return whether a place is a folder of this trainer, and the reason as text."""
        if where.file is not None:
            return False, "a folder; this is a file"
        return self.detect(where.source)

    def _mount(self, where: Place) -> Place:
        """Return the folder with the files of the folder above that belong to the checkpoint (`siblings`), under the
        names "../<file>"; `where` itself if there are none."""
        source = where.source
        names = () if where.file is not None or source.sibling_names else self.siblings(source)
        if not names:
            return where
        return Place(add_sibling_files(source, names), None)


def read(dialect: Dialect, where: Place, options: ReadOptions) -> Checkpoint:
    """Read the parts of a trainer's directory and return their indexes, joined into one.

    A part that cannot be read is listed in `unread`. Weights and optimizers in a checkpoint layout raise instead,
    unless the part is optional.

    Raises:
        Corrupt: two parts hold the same entry, or weights or an optimizer are damaged. Unsupported: an optimizer
            numbers its parameters, and nothing tells their order.
        IncompleteWeights: weights lack their last rows. UsageError: an option does not fit the directory.
    """
    source = where.source
    config = model_files.read_config_json(source) if source.exists("config.json") else None
    if options.config is not None:
        config = model_names.load_config(options.config)
    out = Checkpoint(dialect.name, source.root, None, [], [], {}, {}, trainer=dialect.title, config=config)
    parts = [*dialect.parts(source), *([DirectoryPart(LEFT_OVER, _OURS, "extra")] if source.exists(LEFT_OVER) else [])]
    of_engine = False
    of_first_rank: set[str] = set()  # canonical names in the first rank's file, while those of later ranks are read
    if options.only is not None:
        parts = [p for p in parts if _is_part_needed(p, options.only)]
    source.prefetch_ends(p.name for p in parts if p.layout in (DATA, TREE))
    for part in parts:
        if part.component == "scheduler" and part.layout == DATA and of_engine:
            continue  # the scheduler that DeepSpeed's engine steps is in its own files
        is_state = part.layout not in (DATA, TREE, FOREIGN, _OURS)
        of_first_rank = of_first_rank if part.rank else set()
        try:
            found = (
                _read_checkpoint_part(source, part, options, out)
                if is_state
                else _read_data_part(source, part, options, out, of_first_rank)
            )
            if not part.rank:
                of_first_rank = {*found.tensors, *found.values}
            if part.layout == _OURS:  # what the source had, where a file has what its trainer needs instead
                out.values = {n: v for n, v in out.values.items() if n not in found.values}
            _merge_part_index(out, found, part)
        except (Corrupt, Unsafe, Unsupported) as e:
            if is_state and part.component in ("model", "optim") and not part.optional:
                raise
            # it may be left out, with --drop
            size, damaged = source.glance(part.name)[1], isinstance(e, Corrupt)
            out.unread.append(Unread(part.name, size, f"cannot be read: {e}", part.component, damaged))
            continue
        of_engine = of_engine or (
            part.layout == DEEPSPEED and any(v.path[0] == "scheduler" for v in found.values.values())
        )
    _refuse_truncated_weights(out)
    # a part may lack the file of a rank
    out.world_size = max(dialect.world_size(source) or 0, out.world_size or 0) or None
    out.notes += dialect.notes(source)
    if not dialect.own_keys:
        out.numbered, out.origin = list_numbered_parameters(out.origin), keep_extra_state_trees(out.origin)
    if RECORD in source.list():  # of all files and values; the digests in a .pt file are of its tensors alone
        out.recorded = {}
    return out


def _refuse_truncated_weights(ckpt: Checkpoint) -> None:
    """Raise if a weight has fewer rows than its optimizer state. Shards of torch's HuggingFaceStorageWriter do not say
    how many rows there are, but moments have the shape of the whole parameter.

    Raises:
        IncompleteWeights: with the first such weight.
    """
    if not any("shard-" in f and f.endswith(".safetensors") for f in ckpt.files):
        return
    for t in ckpt.tensors.values():
        of = ckpt.tensors.get(f"model.{t.path[2]}") if t.path[:2] == ("optim", "state") and len(t.path) == 4 else None
        if of is None or not of.shape or not t.shape:
            continue
        if of.shape[1:] == t.shape[1:] and 0 < of.shape[0] < t.shape[0]:
            raise IncompleteWeights(
                f'{ckpt.root}: the shards hold {of.shape[0]} rows of "{t.path[2]}", and its {t.path[3]} has '
                f"{t.shape[0]}: a shard of the weights is missing. The copy is incomplete; fetch the folder again."
            )


def _is_part_needed(part: DirectoryPart, only: frozenset[str]) -> bool:
    """Return whether a part must be read for the components `only`. Weights always must: their names resolve the
    numbers in an optimizer."""
    if part.layout in (TREE, FOREIGN):
        return bool(only - {"model"})  # what it holds besides, its keys tell
    return part.component in only or part.component == "model"  # the weights name the optimizer's numbers


def _read_checkpoint_part(source: Source, part: DirectoryPart, options: ReadOptions, whole: Checkpoint) -> Checkpoint:
    """Return the index of a part that is a checkpoint in a layout of its own. Parameters of an optimizer get the names
    that the weights have.

    Args:
        source: the directory.
        part: which part.
        options: those of the whole read.
        whole: the index of the parts read so far; gets the part's config.json if it has none.

    Raises:
        UsageError: `options.tag` chooses among saves where all are read. Corrupt, Unsupported: the part cannot be read,
            or holds another component than it should.
    """
    is_folder = bool(part.name) and source.glance(part.name)[0]
    where = Place(source.below(part.name), None) if is_folder else Place(source, part.name or None)
    model = _collect_weights(whole, part)
    mine = options if part.whole else replace(options, only=None)
    if model:
        mine = replace(mine, orders=lambda _: _list_parameter_orders(model, whole, options))
    if part.layout == DEEPSPEED:
        if options.tag is not None and part.name:
            raise UsageError(
                f"{argument('tag', options.tag)} chooses one of several saves of an engine; the folders of "
                f"{source.root} are the models of one save, and all are read. Give {source.root}/{options.tag} for one "
                "of them.",
                code="CKPT0205",
            )
        found = layouts.find(part.layout).read(where, replace(options, beside=False))
        found.notes.append(f"the model and the optimizer are a save of DeepSpeed, {found.layout}")
    else:
        found = layouts.find(part.layout).read(where, mine)
    whole.config = whole.config or found.config
    if part.component == "model" and not part.whole:
        found = _with_root_tensors_as_weights(found)
    stray = [n for n in [*found.tensors, *found.values] if found.component(n) != part.component]
    if part.component == "optim" and stray and len(stray) == len(found.tensors) + len(found.values):
        asked = options.only is not None and "optim" in options.only
        if part.optional or asked or not any(n.startswith(KEEPS_NUMBERS) for n in found.notes):
            raise Unsupported(
                f"{source.root}/{part.name}: {' '.join(found.notes) or 'it holds no state of an optimizer.'}",
                code="CKPT0330",
            )
        found = _move_below_extra(found, (part.name.rpartition("/")[2].partition(".")[0], "optimizer"))
    if part.component == "optim" and not part.whole:
        _refuse_stray_weights(f"{source.root}/{part.name}", (t.path for t in found.tensors.values()), whole)
    if part.component == "optim" and model:
        named = {str(t.path[2]) for t in found.tensors.values() if t.path[:2] == ("optim", "state") and len(t.path) > 2}
        if not named <= set(model) and part.renamed and {part.renamed + n for n in named} <= set(model):
            found = with_optimizer_prefix(found, part.renamed)
        elif not named <= set(model) and {to_saved_peft_name(n) for n in named} <= set(model):
            found = with_peft_names(found, saved=True)
    if not found.tensors and not found.values:
        kind = _CALLED.get(part.component, part.component)
        found.notes.append(f"{part.name or 'the folder'} holds no tensors: the trainer saved no {kind} there")
    if is_folder:
        found.files = [f"{part.name}/{f}" for f in found.files]
    if part.component == "extra":  # weights that are not those of the model: an adapter next to it
        found.tensors = {n: replace(t, path=("extra", *t.path[1:])) for n, t in found.tensors.items()}
        found.recorded = {}
    return found


def _collect_weights(whole: Checkpoint, part: DirectoryPart) -> dict[str, TensorEntry]:
    """Return {FQN: weight} of the model that a part belongs to.

    Of several models, it is the one with the number of the part. If none has that number, the weights of all models
    are returned, and their FQNs begin with the number of the model.

    Args:
        whole: the index of the parts read so far.
        part: the part, such as an optimizer.
    """
    weights = [t for t in whole.tensors.values() if t.path[0] == "model"]
    numbers = {t.path[1:2] for t in weights} if part.component == "optim" and part.under else set[Path]()
    own = part.under if part.under in numbers else next(iter(numbers)) if len(numbers) == 1 else ()
    return {joined(t.path[1 + len(own) :]): t for t in weights if t.path[1 : 1 + len(own)] == own}


def _with_root_tensors_as_weights(ckpt: Checkpoint) -> Checkpoint:
    """Return the index of a model's state dict with every tensor at its root as a weight, unless weights are below a
    key there.

    A buffer `step`, as ema_pytorch's EMA has, would otherwise be read as a counter of a trainer.
    """
    moved = {
        n: at
        for n, t in ckpt.tensors.items()
        if t.path[0] != "model" and len(at := original_path(t.path, ckpt.origin)) == 1
    }
    below = (original_path(t.path, ckpt.origin) for t in ckpt.tensors.values() if t.path[0] == "model")
    if not moved or any(len(at) > 1 and at[0] in ROLES for at in below):
        return ckpt
    paths: dict[str, Path] = {n: ("model", *at) for n, at in moved.items()}
    tensors = {
        joined(paths[n]) if n in paths else n: replace(t, path=paths.get(n, t.path)) for n, t in ckpt.tensors.items()
    }
    return replace(ckpt, tensors=tensors, origin=ckpt.origin | {paths[n]: at for n, at in moved.items()})


def _refuse_stray_weights(what: str, paths: Iterable[Path], whole: Checkpoint) -> None:
    """Raise if a file of another component holds a weight although the weights were read from files of their own.

    Args:
        what: name of the file in messages.
        paths: canonical paths of the file's entries.
        whole: the index of the parts read so far.

    Raises:
        Corrupt: with the name of the first such weight.
    """
    weight = next((p for p in paths if p[0] == "model"), None)
    if weight is not None and any(t.path[0] == "model" for t in whole.tensors.values()):
        raise Corrupt(
            f'{what} holds "{joined(weight[1:])}", which looks like a weight, and the weights of this checkpoint are '
            "in other files. It is another file under this name, or was changed; fetch it again.",
            code="CKPT0411",
        )


def _move_below_extra(ckpt: Checkpoint, below: Path) -> Checkpoint:
    """Return the checkpoint with every entry moved from its component to the path ("extra", *below), without `origin`
    and `recorded`: the entries are plain data there."""
    moved = [replace(t, path=("extra", *below, *t.path[1:])) for t in ckpt.tensors.values()]
    values = [Value(("extra", *below, *v.path[1:]), v.data) for v in ckpt.values.values()]
    return replace(
        ckpt,
        tensors={joined(t.path): t for t in moved},
        values={joined(v.path): v for v in values},
        origin={},
        recorded={},
    )


#: PEFT names the parameters of a live adapter by the adapter's own name too, and leaves that out in what it saves.
#: The magnitudes of DoRA are a module by now, and a parameter in files.
_LIVE = re.compile(
    r"(\.lora_[AB])\.[^.]+(?=\.)|(\.lora_embedding_[AB])\.[^.]+$|(\.lora_magnitude_vector)\.[^.]+\.weight$"
)
_SAVED = re.compile(r"(\.lora_[AB]|\.lora_magnitude_vector)(?=\.[^.]+$)|(\.lora_embedding_[AB])$")
_PEFT = "base_model.model."
_SEVERAL_ADAPTERS = (
    "several adapters have weights of the same parameters, so all names keep those of the adapters "
    "(lora_A.default.weight), which PEFT leaves out in what it saves: a job with one adapter does not find its weights "
    "by them"
)
_CALLED = {"model": "weights", "optim": "optimizer state"}


def require_single_model(ckpt: Checkpoint) -> Checkpoint:
    """Return the checkpoint unchanged if it holds one model.

    Raises:
        Unsupported: it holds several models, as Accelerate saves them, or tensors of several parts (torchao).
    """
    inside = {str(t.path[1]) for t in ckpt.tensors.values() if t.path[0] == "model" and len(t.path) > 2}
    if parts := sorted(n for n in inside if not is_number_text(n)):
        raise Unsupported(
            f'"model.{parts[0]}" is a tensor of several parts; the directories of trainers are written with plain '
            "tensors. Use dcp or full, which keep it as it is.",
            code="CKPT0316",
        )
    if inside:
        raise Unsupported(
            f"The source holds {len(inside)} models, numbered {', '.join(sorted(inside))}, each with its optimizer; "
            "the directories of trainers are written for one. Use dcp or full, which keep all of them.",
            code="CKPT0328",
        )
    return ckpt


def to_saved_peft_name(fqn: str) -> str:
    """Return the name that PEFT gives a parameter of an adapter in a file: "q_proj.lora_A.default.weight" becomes
    "q_proj.lora_A.weight"."""
    return _LIVE.sub(r"\1\2\3", fqn)


def to_live_peft_name(fqn: str) -> str:
    """Return the name that a module with one adapter, called "default", gives a parameter that PEFT saved:
    "q_proj.lora_A.weight" becomes "q_proj.lora_A.default.weight"."""
    return _SAVED.sub(r"\1\2.default", f"{fqn}.weight" if fqn.endswith(".lora_magnitude_vector") else fqn)


def with_peft_names(ckpt: Checkpoint, saved: bool) -> Checkpoint:
    """Return the checkpoint with the parameters of an adapter of PEFT named as PEFT saves them, or as the live module
    has them, in the model and in the optimizer. If two parameters would get the same name, all names are kept and a
    note is added."""

    def rename(fqn: str) -> str:
        """Return the name of a parameter; modules that are not PEFT's may have live names like its saved ones."""
        return to_saved_peft_name(fqn) if saved else to_live_peft_name(fqn) if fqn.startswith(_PEFT) else fqn

    tensors, values = _rename_parameters(ckpt, rename, weights=True)
    if len(tensors) != len(ckpt.tensors):
        return replace(
            ckpt,
            notes=[*ckpt.notes, _SEVERAL_ADAPTERS] if saved and _SEVERAL_ADAPTERS not in ckpt.notes else ckpt.notes,
        )
    return ckpt if tensors.keys() == ckpt.tensors.keys() else replace(ckpt, tensors=tensors, values=values)


def with_optimizer_prefix(ckpt: Checkpoint, prefix: str) -> Checkpoint:
    """Return the checkpoint with `prefix` put before every parameter name in the optimizer; weights keep their
    names."""
    tensors, values = _rename_parameters(ckpt, lambda fqn: prefix + fqn, weights=False)
    return replace(ckpt, tensors=tensors, values=values, origin={})


def _rename_parameters(
    ckpt: Checkpoint, rename: Callable[[str], str], weights: bool
) -> tuple[dict[str, TensorEntry], dict[str, Value]]:
    """Return ({name: tensor}, {name: value}) of a checkpoint whose parameters have other names.

    Args:
        ckpt: the checkpoint.
        rename: returns the new name of a parameter.
        weights: whether weights get new names too, or the optimizer alone.
    """

    def rename_in_path(path: Path) -> Path:
        """Return the canonical path of an entry, with the parameter in it renamed."""
        is_weight = path[0] == "model" and len(path) == 2 and weights
        at = 1 if is_weight else 2 if path[:2] == ("optim", "state") else len(path)
        return (*path[:at], rename(str(path[at])), *path[at + 1 :]) if at < len(path) else path

    tensors = {
        joined(p := rename_in_path(t.path)): t if p == t.path else replace(t, path=p) for t in ckpt.tensors.values()
    }
    values = {}
    for v in ckpt.values.values():
        path, data = rename_in_path(v.path), v.data
        if path[:2] == ("optim", "param_groups") and path[3:] == ("params",) and isinstance(data, list):
            data = [rename(n) if isinstance(n, str) else n for n in data]
        values[joined(path)] = Value(path, data)
    return tensors, values


def _list_parameter_orders(
    model: Mapping[str, TensorEntry], whole: Checkpoint, options: ReadOptions
) -> Iterable[Mapping[str, TensorEntry]]:
    """Return the candidate orders of the weights in the module, likeliest first, each as {name: weight}. Files of
    torch.save keep the order; safetensors files sort the names.

    Args:
        model: {name: weight} in the order of the files.
        whole: the index of the parts read so far, with config.json if there is one; gets a note if that config gives no
            order.
        options: options of the read; its `like` and `config` can tell the order.

    Raises:
        MissingPackage, Unsupported: the order cannot be taken from the config that the user gave.
    """
    known = list(options.like.shapes) if options.like is not None else []
    if set(known) >= set(model) and known != sorted(known):  # sorted ones may come from safetensors too
        return [{n: model[n] for n in known if n in model}]
    if not any(f.endswith(".safetensors") for f in whole.files):
        return [model]
    if whole.config is not None:
        try:
            return [model_names.sort_by_module_order(model, whole.config)]
        except (MissingPackage, Unsupported) as e:
            if options.config is not None:
                raise
            whole.notes.append(f"the order of the parameters was not taken from config.json: {str(e).rstrip('.')}")
    return ({n: model[n] for n in order} for order in iterate_possible_orders(model))


def _read_data_part(
    source: Source, part: DirectoryPart, options: ReadOptions, whole: Checkpoint, of_first_rank: Iterable[str]
) -> Checkpoint:
    """Return the index of a part that is plain data, a file of torch.save or of JSON. Tensors stay in the file: the
    index refers to their bytes.

    Args:
        source: the directory.
        part: which part.
        options: those of the whole read.
        whole: the index of the parts read so far.
        of_first_rank: the canonical names in the first rank's file, where this one is a later rank's; a note names
            those that this one lacks.

    Raises:
        Corrupt: the file is damaged or holds something else. Unsafe: its pickle would run code. Unsupported: it cannot
            be read.
    """
    what = f"{source.root}/{part.name}"
    out = Checkpoint(DATA, source.root, None, [part.name], [source.size(part.name)], {}, {})
    if part.name.endswith(".json"):
        tree = bounded_json.parse(source.read_all(part.name, _MOST_JSON), what)
        leaves: dict[Path, object] = {(str(k),): v for k, v in tree.items()} if isinstance(tree, dict) else {(): tree}
    else:
        read_at = source.reader_of(part.name)
        out.notes += torch_zip.refuse_file_of_other_rank(read_at, out.sizes[0], what, options.allow_equal_ranks)
        tree = torch_zip.read(read_at, 0, source.size(part.name), what)
        leaves, records = stored_tensors.read_leaves(tree, (), 0, read_at, what)
        out.records.extend(records)
    if part.layout != DATA and () in leaves:
        raise Corrupt(f"{what} holds {short(leaves[()])}, not a dict with names.", code="CKPT0406")
    if part.layout == _OURS:
        leaves, copies = _parse_left_over(leaves, what)
        whole.tensors = {n: t for n, t in whole.tensors.items() if t.path not in copies}
        whole.values = {n: v for n, v in whole.values.items() if v.path not in copies}
    if part.layout == FOREIGN:
        leaves = _with_foreign_optimizer_as_extra(leaves, whole, part, out.notes)
    if part.layout in (TREE, FOREIGN):
        named = name_tree_beside_model(leaves) if part.layout == TREE else canonical(leaves, shape_of)
        leaves, out.origin = named.leaves, named.origin
        if part.component != "model":
            _refuse_stray_weights(what, (p for p, x in leaves.items() if isinstance(x, TensorEntry)), whole)
    shared_homes = {part.component, *(p[0] for p in part.places.values() if part.rank not in p)}
    lacking = {n for n in of_first_rank if n.partition(".")[0] in shared_homes}
    for path, leaf in leaves.items():
        if part.layout == DATA:
            shared = part.rank and part.rank not in part.places.get(str(path[0]) if path else "", ())
            path = _to_canonical_path(part, path)
            if lacking:  # an empty dict of the first rank may be a full one here
                lacking -= {joined(path[:i]) for i in range(1, len(path) + 1)}
            if shared and (known := whole.values.get(joined(path))) is not None and same_value(known.data, leaf):
                continue
            if shared:
                path = ("extra", *make_per_rank_path(part.rank, path))
        if (name := joined(path)) in out.tensors or name in out.values:
            raise Corrupt(f'two entries of {what} are named "{name}".', code="CKPT0416")
        if isinstance(leaf, TensorEntry):
            out.tensors[name] = replace(leaf, path=path)
        elif isinstance(leaf, Composite):
            add_composite(out, replace(leaf, path=path))
        else:
            out.values[name] = Value(path, leaf)
    if lacking and (note := describe_lacking_entries(lacking)) not in whole.notes:
        out.notes.append(note)
    return out


def name_tree_beside_model(leaves: Mapping[Path, object]) -> CanonicalState:
    """Rename the leaves of a trainer's tree whose model and optimizer are elsewhere to canonical names: what looks like
    one of them is data that the user's code added, and goes under extra.

    A tree without any key of a trainer is named as any other, since it may be a state dict.

    Args:
        leaves: {path in the tree: leaf}.
    """
    known = {
        p: x
        for p, x in leaves.items()
        if str(p[0]) in COUNTERS or ROLES.get(str(p[0]), "model") not in ("model", "optim")
    }
    named = canonical(known or leaves, shape_of)
    for p, x in leaves.items() if known else ():
        if p not in known:
            as_is = p[0] == "extra" and len(p) > 1 and not isinstance(p[1], int)
            named.leaves[p if as_is else ("extra", *p)] = x
            named.origin.update({} if as_is else {("extra", p[0]): (p[0],)})
    return named


def _to_canonical_path(part: DirectoryPart, path: Path) -> Path:
    """Return the canonical path of a leaf in a part of plain data. `path` is its path in the file."""
    if part.component == "trainer" and (not path or isinstance(path[0], int)):  # no dict, which has counters
        return ("extra", "trainer", *path)
    if not path:
        return (part.component,)
    head = str(path[0])
    if head in part.places:
        return (*part.places[head], *path[1:])
    return (part.component, part.keys.get(head, path[0]), *path[1:])


def _with_foreign_optimizer_as_extra(
    leaves: dict[Path, object], whole: Checkpoint, part: DirectoryPart, notes: list[str]
) -> dict[Path, object]:
    """Return {path: leaf} of a part. If its optimizer names parameters that the weights do not have, the optimizer is
    moved to extra.<name of the file>.optimizer.

    Args:
        leaves: {path in the file: leaf}.
        whole: the index of the parts read so far, with the weights.
        part: the part that holds the leaves.
        notes: gets a note if the optimizer is moved.
    """
    model = {joined(t.path[1:]) for t in whole.tensors.values() if t.path[0] == "model"}
    named = dict.fromkeys(p[2] for p in leaves if p[:2] == ("optimizer", "state") and len(p) > 3)
    lists = [x for p, x in leaves.items() if p[:2] == ("optimizer", "param_groups") and p[-1] == "params"]
    if not named:  # an optimizer without slots, as SGD, names its parameters in the groups alone
        named = dict.fromkeys(n for x in lists if isinstance(x, list) for n in x if isinstance(n, str))
    known = named.keys() <= model if named else not lists
    if known or not any(p[0] == "optimizer" for p in leaves):
        return leaves
    stem = part.name.rpartition("/")[2].partition(".")[0]
    called = f'"{next(iter(named))}"' if named else "names of its own"
    notes.append(
        f"the optimizer names the parameters differently from the weights ({called}), so it is carried as data, under "
        f"extra.{stem}.optimizer; no other trainer finds its moments there"
    )
    return {("extra", stem, *p) if p[0] == "optimizer" else p: leaf for p, leaf in leaves.items()}


def _parse_left_over(leaves: Mapping[Path, Any], what: str) -> tuple[dict[Path, object], set[Path]]:
    """Parse ckpttool_state.pt, the file in which ckpttool keeps state that the trainer has no file for.

    Args:
        leaves: {path in the file: leaf}.
        what: name of the file in messages.

    Returns:
        ({canonical path: leaf} of that state, the canonical paths of RNG states and gradient scalers in other files
            that are only copies of it).

    Raises:
        Corrupt: ckpttool did not write the file like this.
    """
    values, paths = leaves.get(("values",), ()), leaves.get(("paths",), ())
    out: dict[Path, object] = {}
    try:
        for path, data in (*values, *((p, leaves["tensors", str(i)]) for i, p in enumerate(paths))):
            if path[0] not in COMPONENTS or path in out or not all(isinstance(x, (str, int)) for x in path):
                raise ValueError(path)
            out[path] = data
        copies = {p for p in leaves.get(("copies",), ()) if p[0] in ("rng", "scaler") or p[:2] == FSDP_SCALER}
    except (TypeError, ValueError, KeyError, IndexError) as e:
        raise Corrupt(
            f"{what}: not a file of state that ckpttool wrote ({e!r:.80}). Remove it to go on without it.",
            code="CKPT0406",
        ) from None
    return out, copies


def _merge_part_index(out: Checkpoint, found: Checkpoint, part: DirectoryPart) -> None:
    """Merge the index `found` of a part into `out`, the index of the directory, in place.

    Raises:
        Corrupt: `out` has an entry of the part already.
    """
    by = len(out.files)

    def place(path: Path) -> Path:
        """Return the canonical path that an entry of the part has in the directory."""
        return (path[0], *part.under, *path[1:])

    for entry in (*found.tensors.values(), *found.values.values()):
        if (name := joined(place(entry.path))) in out.tensors or name in out.values:
            raise Corrupt(
                f'{out.root}/{part.name} holds "{name}", and another file of the directory does too. Two saves lie in '
                "one folder, or the directory was put together by hand: give the part that counts as the path.",
                code="CKPT0411",
            )
    out.files += found.files
    out.sizes += found.sizes
    for t in found.tensors.values():
        out.tensors[joined(place(t.path))] = replace(t, path=place(t.path), chunks=t.chunks.moved(by))
    for v in found.values.values():
        out.values[joined(place(v.path))] = Value(place(v.path), v.data)
    out.records.extend(r.moved(by) for r in found.records)
    out.ranks |= {file + by: rank for file, rank in found.ranks.items()}
    out.spreads_tensors |= found.spreads_tensors
    out.tails |= {file + by: n for file, n in found.tails.items()}
    out.notes += found.notes
    for other in found.others:
        of = found.tensors.get(other.name) or found.values.get(other.name)
        out.others.append(other._replace(name=joined(place(of.path) if of is not None else (other.name,))))
    if found.salvage is not None:
        out.salvage = out.salvage or Salvage()
        out.salvage.problems += found.salvage.problems
        for n, why in found.salvage.missing.items():
            out.salvage.missing[joined(place(tuple(n.split(".", 1))))] = why
        for n, how in found.salvage.rebuilt.items():
            out.salvage.rebuilt[joined(place((found.tensors.get(n) or found.values[n]).path))] = how
    out.origin |= found.origin
    if found.world_size is not None:
        out.world_size = max(out.world_size or 0, found.world_size)
    if not part.under:
        out.recorded |= found.recorded
        out.rounded |= {n: replace(t, chunks=t.chunks.moved(by)) for n, t in found.rounded.items()}


def locate(ckpt: Checkpoint, source: Source) -> Checkpoint:
    """Return the index with every tensor as raw byte ranges: those in dcp items are found (`dcp.locate`), and weights
    in safetensors files get their names in memory (`hf.locate`).

    Raises:
        Corrupt, Unsafe, Unsupported: an item is damaged, would run code, or cannot be read.
    """
    if any(t.coding != "raw" for t in ckpt.tensors.values()):
        ckpt = dcp.locate(ckpt, source)
    if ckpt.config is not None and any(f.endswith(".safetensors") for f in ckpt.files):
        ckpt = hf.locate(ckpt, source)
    return ckpt


def make_resume_advice(program: str, where: str | None = "at any world size") -> Callable[[Advice], str]:
    """Return a function from `Advice` to a text: the program resumes from the checkpoint, and the command that converts
    it to dcp.

    Args:
        program: the program's name in the text.
        where: at which world size it resumes, as text; None for that of the ranks that saved.
    """

    def next_step(advice: Advice) -> str:
        """Return one line with the command."""
        at = f"at {advice.ranks}" if where is None else where
        return f"resumes in {program} {at}; for torch's own: {advice.convert('--to dcp -n RANKS')}"

    return next_step


def make_unrun_program_rows(
    name: str,
    title: str,
    what: str,
    state: str,
    *,
    optimizer: str = "yes",
    rng: str = "yes",
    loader: str,
    saved: bool = False,
) -> dict[str, tuple[tuple[str, ...], ...]]:
    """Return {table of the documents (docs/_hooks.py): rows} for a program that was not run as a whole.

    Args:
        name: name of the layout.
        title: name of the program.
        what: the files that a checkpoint consists of.
        state: the state that it holds.
        optimizer, rng, loader: text on whether the optimizer, the RNG states and the data loader are read.
        saved: True if the program's own code has saved a small job on CPUs that other jobs resumed; False if only its
            source was read.
    """
    read = "yes; its code that saves was run" if saved else "yes; the format of its files, the program was not run"
    return {
        "readme-trainers": ((f"{title} (**{name}**)", what, optimizer, "yes", rng, loader),),
        "layouts": ((f"**{name}**", f"{title}: {what}", "not written"),),
        "directories": ((f"{title}: {what}", f"`{name}`", state),),
        "resumed": ((title, read, "not written", optimizer, "yes", rng, loader),),
    }
