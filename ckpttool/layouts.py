"""`Layout`, which the modules of converters/ export as LAYOUTS, and the detection of the layout of a path.

A layout is a few functions over the index; it never copies bytes. Other packages register theirs in the entry-point
group "ckpttool.layouts".
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import Field, dataclass, fields, replace
from functools import cache
from importlib import import_module
from importlib.machinery import PathFinder
from itertools import islice
from types import MappingProxyType, NoneType
from typing import Any, NamedTuple, TypeVar, get_args, get_type_hints

from .by_fields import ByFields
from .errors import Corrupt, NotRecognised, Unsupported, UsageError, argument
from .formats import other_files, safetensors_header
from .index import trainer_trees
from .index.checkpoint import Checkpoint, Chunks, Leaves, Path, TensorEntry, Value, joined, same_bytes
from .index.composites import Composite, add_composite, shape_of
from .index.draft import Draft
from .index.names import COMPONENTS, CanonicalState, canonical, restore_trainer_tree
from .index.optimizer_names import Orders, SameTensor
from .index.param_groups import Groups
from .index.paths import keep_extra_state_trees
from .options import option
from .program import ForTrainer, Program, Saves, StateFile
from .storage import urls
from .storage.source import Source, read_error

__all__ = [
    "Layout",
    "LayoutWarning",
    "ModelHints",
    "Place",
    "ReadOptions",
    "ReferenceModel",
    "Saves",
    "WriteOptions",
    "check_replaceable",
    "checkpoint_of",
    "choose_target_layout",
    "detect",
    "find",
    "find_by_checkpoint_layout",
    "find_by_trainer",
    "get_program_of",
    "late",
    "layouts",
    "list_layout_flags",
    "list_resuming_programs",
    "list_writable_layouts",
    "make_layout_options",
    "name_leaves",
    "option",
    "place",
    "replacing",
    "state_files",
    "tree_of",
]

_MODULES = (
    "dcp full hf deepspeed.zero deepspeed.universal fsdp1 audit trainers torchsnapshot megatron torch_checkpointing "
    "nanotron"
)
BUILT_IN = tuple(f"ckpttool.converters.{name}" for name in _MODULES.split())
_GROUP = "ckpttool.layouts"


#: (name of a tensor, its dtype) -> the dtype to write it in.
Cast = Callable[[str, str], str]


class Place(NamedTuple):
    """Where a checkpoint is: a folder, or (with `file`) one file of a folder."""

    source: Source
    file: str | None


class ReferenceModel(NamedTuple):
    """What another checkpoint of the same model tells about it.

    `shapes` {FQN: (shape, dtype)} of the model in its order; `tied` {FQN: the one before with the same bytes};
    `optimizer` FQNs in the order of its param groups, `groups` the same by group; None if it has none. `chunks` {FQN:
    the boxes that it is stored in}; `tensor_parallel` and `pipeline` are those of its `Checkpoint`.
    """

    shapes: dict[str, tuple[tuple[int, ...], str]]
    tied: dict[str, str]
    optimizer: tuple[str, ...] | None
    groups: Groups | None = None
    chunks: Mapping[str, Chunks] = MappingProxyType({})
    tensor_parallel: Mapping[str, Any] | None = None
    pipeline: Any = None


@dataclass(frozen=True, eq=False, repr=False)
class ModelHints(ByFields):
    """What the user says about the model because the files of a checkpoint do not; None if nothing was said."""

    config: str | None = None  # folder or id of a Hugging Face model
    like: ReferenceModel | None = None  # another checkpoint of the same model
    flat_layout: str | None = None  # file that describe_fsdp1 wrote in the job
    wrap: tuple[str, ...] | None = None  # patterns of the module paths that FSDP1 wrapped


@dataclass(frozen=True, eq=False, repr=False)
class ReadOptions(ModelHints):
    """Arguments of `Layout.read`."""

    only: frozenset[str] | None = None  # components that are needed; the others may be left out
    tag: str | None = None  # which of several saves in one folder
    allow_equal_ranks: bool = False  # also read files that look like copies of another rank's
    salvage: bool = False  # files of ranks may be lost: take what the others have
    beside: bool = True  # also read the files that a trainer wrote beside those of the layout (DeepSpeed)
    orders: Orders | None = None  # of the parameters, where the file that is read does not tell (names.canonical)


def name_leaves(leaves: Leaves, options: ReadOptions, same: SameTensor | None = same_bytes) -> CanonicalState:
    """Name the leaves of a tree that a program saved, {path: leaf}, with what the options say about its parameters.

    `same` returns whether two tensor leaves are the same tensor; None if this cannot be told.
    """
    like = options.like and options.like.optimizer
    return canonical(leaves, shape_of, like, same, options.only, _find_known_orders(options))


def _find_known_orders(options: ReadOptions) -> Orders | None:
    """Return the function that gives candidate orders of a model's parameters, or None if nothing tells the order.

    It is `ReadOptions.orders` if that is set; otherwise, with `ReadOptions.config`, one that sorts parameters in the
    order of the modules of that model.
    """
    if options.orders is not None or options.config is None:
        return options.orders
    from .huggingface import model_names

    given = options.config

    def of_config(model: Mapping[str, object]) -> list[Mapping[str, object]]:
        """Return the one order that the config gives to {FQN: leaf} of a model, in a list; the order that they have
        where the config is of a model with other names."""
        try:
            return [model_names.sort_by_module_order(model, model_names.load_config(given))]
        except Unsupported:  # other names: the order of the state dict is what there is
            return [model]

    return of_config


#: Hints that a reader may use, and arguments that a writer may use; those that neither uses are refused.
READ_HINTS = ("config", "like", "flat_layout", "wrap", "tag")
WRITE_HINTS = ("config", "like", "flat_layout", "wrap", "world_size")


T = TypeVar("T")


@dataclass(frozen=True, eq=False, repr=False)
class WriteOptions(ModelHints):
    """Arguments of `Layout.write`; None if the source or the layout decides. `own` is an instance of `Layout.options`,
    or None."""

    target: str = ""  # name of the destination
    world_size: int | None = None
    cast: Cast = lambda name, dtype: dtype
    own: object = None
    vocab_size: int | None = None  # of the model, where it was changed
    quantize: str | None = None  # the scheme that the weights will have; `prepare` gives them the names of the Hub
    #: the leaves at the places that a job asks for
    tree: Callable[[dict[Path, object]], dict[Path, object]] | None = None

    def of(self, kind: type[T]) -> T:
        """Return the layout's own options if they are an instance of `kind`; otherwise a `kind` with its defaults."""
        return self.own if isinstance(self.own, kind) else kind()

    def ranks(self, ckpt: Checkpoint) -> int:
        """Return the number of ranks of the job that will load the result: that of the mesh, the requested world size,
        or that of the source.

        Raises:
            UsageError: no world size was given and the source has none, or it is not that of the mesh.
        """
        of_mesh: int | None = getattr(self.own, "world_size", None)
        if of_mesh and self.world_size not in (None, of_mesh):
            raise UsageError(
                f"{argument('world_size', self.world_size)}: {argument('mesh')} has {of_mesh} ranks. Leave it out.",
                code="CKPT0209",
            )
        world = of_mesh or self.world_size or ckpt.world_size
        if not world or world < 1:
            raise UsageError(
                f"{argument('world_size')} is needed: the number of ranks of the job that will load this.",
                code="CKPT0209",
            )
        return world


def tree_of(
    leaves: dict[Path, object], origin: Mapping[Path, Path], same: SameTensor | None, options: WriteOptions
) -> tuple[dict[Path, object], list[str]]:
    """Return the nested state to write: at the paths that a job needs (`WriteOptions.tree`), or else at those of the
    source.

    Args:
        leaves: {canonical path: leaf} of the state.
        origin: {canonical path: path in the source}.
        same: function that returns whether two tensor leaves are the same tensor; None if this cannot be told.
        options: those of the conversion.

    Returns:
        ({path of a leaf: leaf}, notes for the user).
    """
    if options.tree is None:
        return restore_trainer_tree(leaves, origin, same)
    trees = keep_extra_state_trees(origin)
    return options.tree({trees.get(p, p): leaf for p, leaf in leaves.items()}), []


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Layout(ByFields):
    """One layout: what `LAYOUTS` of a module in converters/ lists, and what the entry point of another package names.

    Args:
        name: what `--to` and `--from` call it, and `Checkpoint.layout` says.
        title: one line for people.
        detect: whether a place is this layout, and why: (True, "has .metadata"), or what was looked for: (False, "no
            .metadata"). Reads names and first bytes only.
        read: place -> index; reads headers and pickles only.
        write: index -> draft of the same checkpoint in this layout; None where it is only read.
        locate: parses what `read` has skipped (the framing of items), and returns an index of raw byte ranges.
        name_in_memory: the part of `locate` that gives weights their names in memory; it is called again where weights
            that kept other names, since they were codes, have become numbers.
        mount: the place to read from, if it is not the given one (the files inside an archive; a folder with files next
            to it).
        options: frozen dataclass of what only its writer understands, made with `option`; the command line makes its
            options of the fields, and `convert(options=)` takes an instance.
        prepare: the part of the source that these options ask for, under the names it gets; before `write`.
        holds: components that it can hold ("model", "optim", ...), with these options; empty for all of them.
        is_file: the checkpoint is one file and not a folder.
        as_file: of a folder, the same layout as one file; written where the destination has one of its `suffixes`.
        suffixes: endings of the names of such files, by which a destination without `--to` is known; of a folder,
            endings that it may have although files have them too (Lightning's .ckpt).
        aliases: other names that people use for it.
        reads_as: other names that `Checkpoint.layout` has of what it reads.
        own_keys: it keeps the keys of the trainer that wrote the source, unless canonical ones are asked for.
        reader_uses: those of READ_HINTS that `read` looks at; the others are refused where no writer looks at them
            either.
        writer_uses: those of WRITE_HINTS that `prepare` and `write` look at.
        keeps_config: what it writes can be read again without `ModelHints.config`.
        needs_named_optimizer: an engine or a trainer resumes from it, and finds the optimizer's state by the names or
            the order of the parameters; a state whose optimizer could not be named is refused.
        joins_remainders: its engine loads masters in fp32 alone, so those that are stored as remainders of weights are
            joined with them first.
        of_trainer: the directory of one trainer, made of parts in other layouts, which it outranks.
        keeps_subclasses: it holds objects of tensor subclasses (index/composites.py), as such or as what they are made
            of; the others are refused where there are any.
        keeps_calls: it holds every value as data. The others write pickles, in which no class may be called that
            ckpttool does not know (formats/pickles.py); values with such calls are listed as dropped.
        refuses_numbers: a state whose optimizer could not be named is refused, unless it may be carried as data.
        sharding: how a job that loads it divides its state, a strategy of `engine.memory`; None where it may be any.
        saves: how one folder can contain several saves; None if a folder is one save.
        program: what is known of the program that writes it: next steps, files beside it, `--for`, ...
        check_replaceable: raises if what is at a destination is of this layout and must not be replaced, by whatever
            layout.
        replacing: entered while what is at a destination is replaced; raises as `check_replaceable`.
    """

    name: str
    title: str
    detect: Callable[[Place], tuple[bool, str]]
    read: Callable[[Place, ReadOptions], Checkpoint]
    write: Callable[[Checkpoint, Source, WriteOptions], Draft] | None = None
    locate: Callable[[Checkpoint, Source], Checkpoint] | None = None
    name_in_memory: Callable[[Checkpoint], Checkpoint] = lambda ckpt: ckpt
    mount: Callable[[Place], Place] = lambda where: where
    options: type | None = None
    prepare: Callable[[Checkpoint, Source, WriteOptions], Checkpoint] = lambda ckpt, source, options: ckpt
    holds: Callable[[object], frozenset[str]] = lambda own: frozenset()
    is_file: bool = False
    as_file: Layout | None = None
    suffixes: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    reads_as: tuple[str, ...] = ()
    own_keys: bool = False
    reader_uses: tuple[str, ...] = READ_HINTS
    writer_uses: tuple[str, ...] = WRITE_HINTS
    keeps_config: bool = False
    needs_named_optimizer: bool = False
    joins_remainders: bool = False
    of_trainer: bool = False
    keeps_subclasses: bool = False
    keeps_calls: bool = False
    refuses_numbers: bool = False
    sharding: str | None = None
    saves: Saves | None = None
    program: Program = Program()  # noqa: RUF009
    check_replaceable: Callable[[str], None] = lambda path: None
    replacing: Callable[[str], AbstractContextManager[None]] = lambda path: nullcontext()

    @property
    def of_weights(self) -> bool:
        """Return whether the layout holds the weights of a model and nothing else, unless an option asks for more."""
        return self.holds(None) == {"model"}


def late(where: str) -> Callable[..., Any]:
    """Return a function that imports another function when it is called, and calls it with the same arguments.

    Writers of layouts are referred to like this: a command that only reads a checkpoint loads the modules of all
    layouts to detect its layout.

    Args:
        where: the function, written like an entry point: "package.module:function".
    """
    module, _, name = where.partition(":")
    return lambda *args, **options: getattr(import_module(module), name)(*args, **options)


def checkpoint_of(
    named: CanonicalState, layout: str, root: str, world: int | None, files: list[str], source: Source
) -> Checkpoint:
    """Make a Checkpoint, the index of a checkpoint, of the named leaves of a state.

    Args:
        named: {canonical path: leaf}, where a leaf is a TensorEntry, a Composite, a Value or plain data; and where each
            came from.
        layout: name of the layout that was read.
        root: folder or URL of the checkpoint.
        world: number of ranks that wrote it; None if it is not known.
        files: names of its files below `root`; entries refer to them by position.
        source: what the files are read from; it is asked for their sizes.

    Raises:
        Corrupt: two leaves have one name, or a file is missing.
    """
    out = Checkpoint(layout, root, world, files, [source.size(f) for f in files], {}, {})
    for path, leaf in sorted(named.leaves.items(), key=lambda kv: COMPONENTS.index(str(kv[0][0]))):
        name = joined(path)
        if name in out.tensors or name in out.values:
            raise Corrupt(f'two entries of the checkpoint are named "{name}".', code="CKPT0416")
        if isinstance(leaf, TensorEntry):
            out.tensors[name] = leaf if leaf.path == path else replace(leaf, path=path)
        elif isinstance(leaf, Composite):
            add_composite(out, replace(leaf, path=path))
        else:
            out.values[name] = Value(path, leaf.data if isinstance(leaf, Value) else leaf)
    out.origin, out.trainer, out.notes = named.origin, named.trainer, named.notes
    return out


def layouts() -> dict[str, Layout]:
    """Return a new dict {name: layout} of every layout, built-in ones first."""
    return dict(_get_cached_layouts())


def _get_cached_layouts() -> dict[str, Layout]:
    """Return {name: layout} of every layout. It is the cached dict itself, which callers must not change; for calls
    that are made for every file."""
    return _load_layouts(BUILT_IN, tuple(sys.path))


@cache
def _load_layouts(built_in: tuple[str, ...], path: tuple[str, ...]) -> dict[str, Layout]:
    """Import all layouts and return {name: layout}, built-in ones first; cached.

    Args:
        built_in: names of the modules that have a LAYOUTS.
        path: folders of `sys.path` in which other packages are looked for.
    """
    found = {layout.name: layout for module in built_in for layout in import_module(module).LAYOUTS}
    return found | _load_package_layouts(path)


def _list_trainer_trees() -> list[trainer_trees.TrainerTree]:
    """Return the rules of all layouts that tell a trainer by the keys of its state dict."""
    return [x.program.tree for x in layouts().values() if x.program.tree is not None]


trainer_trees.known_trees = _list_trainer_trees


class LayoutWarning(UserWarning):
    """A layout of another package cannot be used."""


@cache
def _load_package_layouts(path: tuple[str, ...]) -> dict[str, Layout]:
    """Return {name: layout} of other packages, in the folders of `path`. One that cannot be loaded, or whose name is
    taken, is left out, with a warning that names it."""
    if not _may_have_entry_points(path):
        return {}
    from importlib.metadata import entry_points

    built_in = {layout.name for module in BUILT_IN for layout in import_module(module).LAYOUTS}
    of_name: dict[str, list[tuple[str, Layout]]] = {}
    for point in entry_points(group=_GROUP):
        who = f"{point.dist.name if point.dist else 'a package'} ({point.name} = {point.value})"
        try:
            loaded: object = point.load()
        except (Exception, SystemExit) as e:
            _warn_left_out(f"The layout of {who} cannot be loaded: {type(e).__name__}: {e}")
            continue
        if not isinstance(loaded, Layout):
            _warn_left_out(f"The layout of {who} is a {type(loaded).__name__} and not a ckpttool.layouts.Layout")
        elif loaded.name in built_in:
            _warn_left_out(f"The layout of {who} is named {loaded.name!r}, like one of ckpttool's own")
        else:
            of_name.setdefault(loaded.name, []).append((who, loaded))
    for name, rows in of_name.items():
        if len(rows) > 1:
            _warn_left_out(f"{len(rows)} packages have a layout named {name!r}: {', '.join(who for who, _ in rows)}")
    return {name: rows[0][1] for name, rows in of_name.items() if len(rows) == 1}


def _warn_left_out(what: str) -> None:
    """Warn about a layout of another package that is left out; `what` says why, as a sentence without its full stop."""
    warnings.warn(f"{what}. It is left out.", LayoutWarning, stacklevel=2)


def _may_have_entry_points(path: Iterable[str]) -> bool:
    """Return whether a package in these folders of `sys.path` may have an entry point of the group "ckpttool.layouts".
    This is 30 times faster than importlib.metadata."""
    if any(hasattr(finder, "find_distributions") for finder in sys.meta_path if finder is not PathFinder):
        return True
    for folder in path:
        try:
            names = os.listdir(folder or ".")
        except OSError:
            if os.path.isfile(folder):  # a zip file
                return True
            continue
        if folder.endswith(".egg"):
            return True
        for name in names:
            if name.endswith((".dist-info", ".egg-info", ".egg")):
                with suppress(OSError), open(os.path.join(folder, name, "entry_points.txt"), "rb") as f:
                    if _GROUP.encode() in f.read():
                        return True
    return False


def find(name: str, *, to_write: bool = False) -> Layout:
    """Return a layout by its name or one of its aliases, in upper or lower case; `to_write` is whether the error lists
    only those that can be written.

    Raises:
        UsageError: there is none.
    """
    known = layouts()
    wanted = name.lower()
    if wanted in known:
        return known[wanted]
    by_alias = {alias: layout for layout in known.values() for alias in layout.aliases}
    if wanted in by_alias:
        return by_alias[wanted]
    from difflib import get_close_matches

    close = get_close_matches(wanted, [*known, *by_alias], 1)
    hint = f" Did you mean {close[0]}?" if close else ""
    listed = list_writable_layouts() if to_write else known
    raise UsageError(f"Unknown layout {name!r}.{hint} Choose one of: {', '.join(listed)}.", code="CKPT0206")


def find_by_checkpoint_layout(name: str | None) -> Layout | None:
    """Return the layout for a name in `Checkpoint.layout`: the one with that name, or the one that reads checkpoints of
    that name (`reads_as`); None if there is none."""
    return next((x for x in _get_cached_layouts().values() if name == x.name or name in x.reads_as), None)


def get_program_of(name: str | None) -> Program:
    """Return what is known of the program that writes a layout, by the name in `Checkpoint.layout`; an empty `Program`
    where no layout has that name."""
    found = find_by_checkpoint_layout(name)
    return Program() if found is None else found.program


def state_files() -> tuple[StateFile, ...]:
    """List the files that trainers write next to those of a layout, for all layouts."""
    return tuple(file for layout in _get_cached_layouts().values() for file in layout.program.state_files)


def find_by_trainer(trainer: str | None) -> Layout | None:
    """Return the layout of the trainer with this name in `Checkpoint.trainer`, if its state dicts are recognised by
    their keys; None otherwise."""
    return next((x for x in layouts().values() if x.program.tree and x.program.tree.name == trainer), None)


def list_resuming_programs() -> dict[str, tuple[Layout, ForTrainer]]:
    """Return {name that `--for` takes: (the layout that the program resumes from, what is known of the program)};
    programs whose layout is a trainer's own directory come first."""
    rows = [(layout, program) for layout in layouts().values() for program in layout.program.resumed_by]
    rows.sort(key=lambda row: (not row[0].of_trainer, "" if row[0].of_trainer else row[1].name))
    return {program.name: (layout, program) for layout, program in rows}


def choose_target_layout(to: str | None, dst: str | os.PathLike[str]) -> Layout:
    """Return the layout to write: the one that was named, or the one whose suffix the name of the destination has.
    Where a layout can be a folder or one file, the suffix decides which.

    Args:
        to: name or alias of a layout; None to go by the destination.
        dst: path or URL of the destination.

    Raises:
        UsageError: there is no such layout, the name of the destination tells none, or a folder would be named like a
            file, or a file like one of another layout.
    """
    text = os.fspath(dst)
    known = layouts().values()
    files = [x if x.as_file is None else x.as_file for x in known]
    if to is None:
        if of_suffix := [x for x in files if x.suffixes and text.endswith(x.suffixes)]:
            return of_suffix[0]
        raise UsageError(
            f"Cannot infer the layout from {text!r}. Pass {argument('to')}: {', '.join(list_writable_layouts())}.",
            code="CKPT0206",
        )
    target = find(to, to_write=True)
    if target.as_file is not None and text.endswith(target.as_file.suffixes):
        return target.as_file
    if not target.is_file and text.endswith(tuple({s for x in files for s in x.suffixes} - set(target.suffixes))):
        raise UsageError(
            f"{target.name} writes a folder, but the destination {text!r} has the name of a file. Give the name of a "
            "folder.",
            code="CKPT0211",
        )
    others = {s for x in files if x is not target for s in x.suffixes} | {".safetensors"}
    if target.is_file and not text.endswith(target.suffixes) and text.endswith(tuple(others)):
        raise UsageError(
            f"{target.name} writes another kind of file than {text!r} is named. Let the name end in "
            f"{' or '.join(target.suffixes)}.",
            code="CKPT0211",
        )
    return target


def check_replaceable(dst: str) -> None:
    """Ask every layout whether what is at a destination may be replaced, by whatever layout.

    Args:
        dst: its path or URL.

    Raises:
        DestinationExists: it must not be replaced, such as an archive under a legal hold.
    """
    for layout in layouts().values():
        layout.check_replaceable(dst)


@contextmanager
def replacing(dst: str) -> Iterator[None]:
    """While the block replaces what is at a destination, keep every layout from protecting it (`Layout.replacing`).

    Raises:
        DestinationExists: it must not be replaced.
        CkpttoolError: a layout cannot record the replacement.
    """
    with ExitStack() as entered:
        for layout in layouts().values():
            entered.enter_context(layout.replacing(dst))
        yield


def list_writable_layouts() -> list[str]:
    """List the names of the layouts that can be written."""
    return [name for name, layout in layouts().items() if layout.write is not None]


def list_layout_flags(layout: Layout) -> dict[str, Field[object]]:
    """Return {option of the command line ("--max-shard-size"): field of `Layout.options`} for the fields that were made
    with `option`; {} if the layout has no options."""
    made = [f for f in fields(layout.options) if "help" in f.metadata] if layout.options else []
    return {f.metadata["flag"] or "--" + f.name.replace("_", "-"): f for f in made}


def get_option_type(layout: Layout, option: Field[object]) -> type:
    """Return the type of a field of `Layout.options`: bool, int or float, and str for any other; `| None` is
    ignored."""
    try:
        hint: object = get_type_hints(layout.options)[option.name]
    except NameError:  # of a name that only a type checker has imported
        hint = option.type
    kinds = [t for t in get_args(hint) or (hint,) if t is not NoneType]
    return next((t for t in (bool, int, float) if kinds in ([t], [t.__name__], [f"{t.__name__} | None"])), str)


def make_layout_options(target: Layout, given: Mapping[str, object]) -> object:
    """Make the options of a layout from those of the command line; None if none were given.

    Args:
        target: the layout that is written.
        given: {option: value}, such as {"--max-shard-size": 5000000000}.

    Raises:
        UsageError: one of them belongs to other layouts.
    """
    own = list_layout_flags(target)
    for flag in given:
        if flag not in own:
            theirs = [x.name for x in layouts().values() if flag in list_layout_flags(x)]
            raise UsageError(
                f"{flag} applies to {', '.join(theirs)}; this conversion writes {target.name}.", code="CKPT0205"
            )
    if not given or target.options is None:
        return None
    return target.options(**{own[flag].name: value for flag, value in given.items()})


def place(path: str | os.PathLike[str]) -> Place:
    """Return the `Place` of a path or URL: a folder, a file, an object of a store, or a prefix in it.

    Raises:
        UsageError: the path is empty, or the URL is of no known store.
        NotRecognised: nothing is there.
        NotPermitted: the user may not look there.
        RemoteError: the store fails.
    """
    if not os.fspath(path):
        raise UsageError("The path is empty: an empty string names no file or folder.", code="CKPT0202")
    if urls.is_url(path):
        url = urls.lower_scheme(os.fspath(path))
        urls.refuse_azure_query(url)
        if page := re.fullmatch(_HUB_PAGE, url):
            repository = f"hf://{page[1]}@{page[2]}" if page[2] else f"hf://{page[1]}"
            raise NotRecognised(
                f"{urls.redact_url(url)} is the page of a repository on the Hub; its files are at {repository}.",
                code="CKPT0302",
            )
        # a web server also answers requests for a folder, whose URL ends with a slash
        folder = url.lower().startswith("http") and url.partition("?")[0].endswith("/")
        return _open_remote(url.rstrip("/"), folder)
    text = urls.make_path_absolute(path)
    if os.path.isdir(text):
        return Place(Source(text), None)
    if os.path.exists(text):
        return Place(Source(os.path.dirname(text)), os.path.basename(text))
    try:
        os.stat(text)
    except PermissionError as e:
        raise read_error(e, text) from None
    except (OSError, ValueError):
        pass
    raise NotRecognised(
        f"{os.fspath(path)}: no such file or folder.{_suggest_for_missing_path(os.fspath(path))}", code="CKPT0302"
    )


_NO_URL = re.compile(r"(s3a?|gc?s|az|abfss?|hf|https?):/*", re.IGNORECASE)
# text, since re compiles a pattern at its first use, and few commands need these
_HUB_ID = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"
_HUB_PAGE = (
    r"(?i)https?://(?:huggingface\.co|hf\.co)/((?:datasets/|buckets/)?[\w.-]+/[\w.-]+)(?:/tree/([^?#]+?))?/?(?:[?#].*)?"
)
_MOST_LISTED = 10_000


def _suggest_for_missing_path(path: str) -> str:
    """Return a hint for a path at which nothing exists, a sentence that begins with a space; "" if there is none."""
    if _NO_URL.match(path):
        return " The URL of a store has two slashes, as in s3://bucket/folder."
    if path == "-":
        return " A checkpoint cannot be read from standard input; give its path."
    if path.startswith("~"):
        return " A ~ in quotes is not expanded; give the whole path."
    if os.path.islink(path):
        return f" It is a link to {os.readlink(path)}, where nothing is."
    folder, name = os.path.split(path.rstrip("/"))
    if re.fullmatch(_HUB_ID, path) and not os.path.exists(folder):
        return f" A repository on the Hugging Face Hub is hf://{path}."
    from difflib import get_close_matches

    with suppress(OSError), os.scandir(folder or ".") as entries:
        if close := get_close_matches(name, [e.name for e in islice(entries, _MOST_LISTED)], 1, 0.75):
            return f" Did you mean {os.path.join(folder, close[0])}?"
    return ""


def _open_remote(url: str, is_folder: bool) -> Place:
    """Open one object of a store, or all objects below a prefix; of the Hub also where the branch in the URL has
    slashes.

    Args:
        url: without a slash at its end.
        is_folder: the URL is known to be a folder's, so no object of that name is looked for.

    Raises:
        NotRecognised: nothing is there.
    """
    from .storage import remote  # at the first URL, since most checkpoints are local

    for spelled in (url, *_list_longer_revisions(url)):
        if found := _open_object_or_prefix(spelled, is_folder):
            return found
    raise NotRecognised(remote.RemoteSource(url).explain_missing(), code="CKPT0302")


def _list_longer_revisions(url: str) -> list[str]:
    """List the other readings of hf://org/name@a/b/c, as URLs: those in which the revision is "a/b" or "a/b/c" instead
    of "a"; [] for other URLs."""
    repository, at, rest = url.partition("@")
    parts = rest.split("/")
    if not url.startswith("hf://") or not at or parts[0] == "refs":
        return []
    return [f"{repository}@{'/'.join(['%2F'.join(parts[:n]), *parts[n:]])}" for n in range(2, min(len(parts), 8) + 1)]


def _open_object_or_prefix(url: str, is_folder: bool) -> Place | None:
    """Open one object of a store, or all objects below a prefix; None where there is neither.

    Args:
        url: without a slash at its end.
        is_folder: do not look for an object of that name.
    """
    from .storage import remote

    folder, name = urls.split_url(url)
    if not is_folder and name and folder.count("/") >= 2:  # no bucket alone
        source = remote.RemoteSource(folder)
        if source.exists(name):
            source.prefetch_ends([name])
            return Place(source, name)
        source.close()
    source = remote.RemoteSource(url)
    if not (names := source.list()):
        source.close()
        return None
    safetensors_header.prefetch_headers(
        source, [n for n in names if n.endswith(".safetensors") and not source.glance(n)[0]]
    )
    return Place(source, None)


def detect(where: Place) -> Layout:
    """Return the one layout that recognises a place; one of a trainer's directory outranks the others.

    Raises:
        NotRecognised: none does; with what each of them looked for.
        Unsupported: more than one does.
        Unsafe, Corrupt, RemoteError: as the readers of names and first bytes raise them.
    """
    answers = [(layout, *layout.detect(where)) for layout in layouts().values()]
    yes = [(layout, why) for layout, is_it, why in answers if is_it]
    yes = [row for row in yes if row[0].of_trainer] or yes
    if len(yes) == 1:
        return yes[0][0]
    path = os.path.join(where.source.root, where.file) if where.file else where.source.root
    if yes:
        matches = "; ".join(f"{layout.name}: {why}" for layout, why in yes)
        raise Unsupported(
            f"{path} matches more than one layout ({matches}). Choose with {argument('source_layout')}.",
            code="CKPT0305",
        )
    if where.file:
        head = where.source.read(where.file, 0, min(where.source.size(where.file), other_files.HEAD_BYTES))
        other_files.refuse_foreign_format(head, path)
    raise NotRecognised(
        f"{path} is not a checkpoint that ckpttool knows. It looked for:",
        listing=_format_reasons(answers),
        code="CKPT0301",
    )


def _format_reasons(answers: Iterable[tuple[Layout, bool, str]]) -> str:
    """Return a text with a line for each reason why layouts do not recognise a place, and the layouts that have it;
    reasons that several share come last.

    Args:
        answers: (layout, whether it recognises the place, why).
    """
    names: dict[str, list[str]] = {}
    for layout, _, why in answers:
        names.setdefault(why, []).append(layout.name)
    width = max((len(n[0]) for n in names.values() if len(n) == 1), default=0)
    own = [f"  {n[0]:{width}s} {why}" for why, n in names.items() if len(n) == 1]
    return "\n".join(own + [f"  {', '.join(n)}: {why}" for why, n in names.items() if len(n) > 1])
