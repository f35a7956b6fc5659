"""The index of a folder of FSDP1's files, one torch.save file a rank; the package says what is in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ckpttool.bounded_json import parse
from ckpttool.engine.flat.flat_layout import FLAT
from ckpttool.errors import Corrupt, UsageError
from ckpttool.formats.sharded import is_sharded
from ckpttool.formats.stored_tensors import StoredTensor
from ckpttool.huggingface import model_names
from ckpttool.huggingface.model_names import ModelNames
from ckpttool.index.checkpoint import Checkpoint, Leaves, Salvage, TensorEntry, same_bytes, tied_weights
from ckpttool.index.composites import shape_of
from ckpttool.index.fqns import EXTRA_STATE, strip_wrappers
from ckpttool.index.names import canonical, with_canonical_keys
from ckpttool.index.records import Records
from ckpttool.layouts import ModelHints, Place, ReadOptions, checkpoint_of
from ckpttool.storage.source import Source

from ..rank_files import (
    Column,
    Files,
    Rank,
    assemble_tensor,
    collect_rank_values,
    group_rank_files,
    merge_other_state,
    read_rank_files,
    record_other_copies,
    select_first_replica,
)
from . import fairscale
from .flat_params import ModelInfo, RankSlices, Spans, find_flat_layout, find_model_names
from .optimizer import read_optimizer

__all__ = ["read"]


def read(where: Place, options: ReadOptions) -> Checkpoint:
    """Return the index of a folder of per-rank files.

    Raises:
        Corrupt: a rank is missing, exchanged, or of another step, or a file is damaged.
        Unsupported: neither files nor options describe the content of a flat parameter.
        UsageError: an option cannot be used.
    """
    try:
        return _read_folder(where.source, options)
    except UsageError:  # a ValueError too, and no fault of the files
        raise
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as e:
        raise Corrupt(
            f"{where.source.root}: the files of ranks are inconsistent ({type(e).__name__}: {e}); no release of FSDP1 "
            "writes such files.",
            code="CKPT0406",
        ) from e


def _read_folder(source: Source, options: ReadOptions) -> Checkpoint:
    """Read model, optimizer and the rest from the ranks' files, give them canonical names, and return the index.

    Raises:
        Corrupt: a rank is missing, exchanged, or of another step.
        Unsupported: the content of a flat parameter is not known.
        KeyError, TypeError, ValueError, IndexError, AttributeError: the files are not as FSDP1 writes them.
    """
    files = Files(source)
    lost: list[str] = []
    parts = read_rank_files(
        files, group_rank_files(source.list()), lost if options.salvage else None, options.allow_equal_ranks
    )
    config = model_names.load_config(options.config) if options.config is not None else _read_own_config(source)
    model: Mapping[str, object] = {}
    known = ModelInfo(None, {}, {}, RankSlices([], {}))
    if parts.model and "shard_metadata" in parts.model[0].tree:
        model, known = fairscale.read_model(files, parts.model)
    elif parts.model:
        model, known = _read_model(
            files, parts.model, lambda: find_model_names(files, options, config, parts.optimizers), options
        )
    leaves: Leaves = {("model", name): leaf for name, leaf in model.items()}
    if parts.model:
        extra_states = _read_extra_states(files, parts.model[0])
        leaves = {p: leaf for p, leaf in leaves.items() if p not in {q[:2] for q in extra_states}} | extra_states
    if parts.optimizers and (options.only is None or "optim" in options.only):
        leaves.update(read_optimizer(files, parts.optimizers, known, options, config))
    leaves.update(merge_other_state(files, parts.rest, leaves))
    like = options.like.optimizer if options.like else None
    named = with_canonical_keys(canonical(leaves, shape_of, like, same_bytes, options.only))
    out = checkpoint_of(named, "fsdp1", source.root, parts.world, files.names, source)
    out.notes = [*parts.notes, *out.notes]
    out.records, out.config = Records(files.records.values()), config
    out.ranks = {r.file: r.rank for ranks in (parts.model, *parts.optimizers) for r in ranks}
    if out.trainer is None and any(n.startswith("model_world_size_") for n in files.names):
        out.trainer = "verl"
    out.notes = [*out.notes, *dict.fromkeys(files.notes)]
    if lost:
        out.salvage = Salvage([f"{name} is missing; other ranks have copies of all its parts" for name in lost])
    record_other_copies(files.unlike, out)
    return out


def _read_extra_states(files: Files, rank: Rank) -> Leaves:
    """Return {path: leaf} of the extra states of modules (`get_extra_state()`) in the file of one rank.

    An extra state that is a tensor is left out, since it is read like a buffer.
    """
    out: Leaves = {}
    clean = strip_wrappers(str(k) for k in rank.tree)
    for key, x in rank.tree.items():
        name = clean[str(key)]
        if name.rpartition(".")[2] == EXTRA_STATE and not isinstance(x, StoredTensor):
            out |= files.leaves(rank.file, x, ("model", name))
    return out


def _read_own_config(source: Source) -> dict[str, object] | None:
    """Return the model's config.json from the folder, or from its huggingface/; None if there is none."""
    for name in ("config.json", "huggingface/config.json"):
        if source.exists(name):
            found = parse(source.read_all(name, 16 << 20), f"{source.root}/{name}")
            if isinstance(found, dict) and "model_type" in found:
                return found
    return None


# ----------------------------------------------------------------------------------------------------------- model


def _read_model(
    files: Files,
    ranks: list[Rank],
    names: Callable[[], tuple[ModelNames, str] | None],
    options: ModelHints,
) -> tuple[dict[str, TensorEntry], ModelInfo]:
    """Read the model from the ranks' files.

    Args:
        files: the files read.
        ranks: what each rank has of the model.
        names: called only for flat parameters whose layout neither files nor options give; returns (names and shapes in
            the model's order, their origin as text), or None if they are not known.
        options: what the user states about the model.

    Returns:
        ({FQN: tensor or value}, what reading the optimizer needs to know about the model).

    Raises:
        Corrupt: the ranks contradict one another.
        Unsupported: the content of a flat parameter is not known.
    """
    keys = list(dict.fromkeys(k for r in ranks for k in r.tree))
    clean = strip_wrappers(str(k) for k in keys)
    columns = {clean[str(k)]: collect_rank_values(files, ranks, k) for k in keys}
    places = _find_shard_places(files, ranks)
    if any(n.rpartition(".")[2] == FLAT for n in columns):
        return _cut_flat_parameters(files, ranks, columns, places, names, options)
    out = {n: assemble_tensor(files, ranks, n, column) for n, column in columns.items()}
    tensors = {n: t for n, t in out.items() if isinstance(t, TensorEntry)}
    sharded = {n for n, column in columns.items() if is_sharded(column[0])}
    params = {n: t.shape for n, t in tensors.items() if n in sharded or (not sharded and "float" in t.dtype)}
    own = [places[r.rank] if sharded else (0, 1) for r in ranks]
    return out, ModelInfo(None, params, tied_weights(tensors), RankSlices(own, {}))


def _find_shard_places(files: Files, ranks: list[Rank]) -> dict[int, tuple[int, int]]:
    """Return {rank: (its position in the group of ranks that shard the model together, size of that group)}.

    The rank's sharded tensors state it; if they do not, the group consists of all ranks.
    """
    out = {}
    for r in ranks:
        place = next((files.shards(r.file, str(k), x).place for k, x in r.tree.items() if is_sharded(x)), None)
        out[r.rank] = place or (r.rank, len(ranks))
    return out


def _cut_flat_parameters(
    files: Files,
    ranks: list[Rank],
    columns: dict[str, Column],
    places: dict[int, tuple[int, int]],
    names: Callable[[], tuple[ModelNames, str] | None],
    options: ModelHints,
) -> tuple[dict[str, TensorEntry], ModelInfo]:
    """Cut the parameters of a LOCAL_STATE_DICT out of its flat parameters.

    Args:
        files: the files read.
        ranks: what each rank has of the model.
        columns: {name: what each of `ranks` has under it}.
        places: {rank: (its position in its sharding group, size of the group)}.
        names: returns (names and shapes in the model's order, their origin as text), or None if they are not known.
        options: what the user states about the model.

    Returns:
        ({FQN: tensor or value}, what reading the optimizer needs to know about the model).

    Raises:
        Corrupt: the ranks contradict one another, or a flat parameter is not a 1-D tensor of floats.
        Unsupported: the content of a flat parameter is not known.
    """
    plain = {n: c for n, c in columns.items() if n.rpartition(".")[2] != FLAT}
    flats: dict[str, TensorEntry] = {}
    pieces: dict[str, list[tuple[int, StoredTensor] | None]] = {}
    for name, column in columns.items():
        if name in plain:
            continue
        module, t = name.rpartition(".")[0], assemble_tensor(files, ranks, name, column)
        if not isinstance(t, TensorEntry) or len(t.shape) != 1 or "float" not in t.dtype:
            raise Corrupt(
                f'{files.source.root}: the flat parameter of module "{module}" is not a 1-D tensor of floats.',
                code="CKPT0412",
            )
        flats[module] = t
        had = [files.shards(r.file, name, x).pieces for r, x in zip(ranks, column, strict=True) if is_sharded(x)]
        pieces[module] = [(p[0][0][0], p[0][1]) if p else None for p in had]
    own = RankSlices([places[r.rank] for r in ranks], pieces)
    layout, slices = find_flat_layout(files, plain, flats, own, names, options)
    out: dict[str, TensorEntry] = {}
    for flat in layout.flats:
        whole = Spans.of(flats[flat.module])
        for part in flat.parts:
            # a parameter's own slices are more certain than the flat parameter: they do not depend on the alignment
            spans = whole
            if part.name in slices:
                spans = Spans.joined(files, part.first, [(ranks[i], plain[part.name][i]) for i in own.first_ranks()])
            out[part.name] = TensorEntry(whole.dtype, part.shape, (), spans.chunks(part))
        for alias, owner in flat.shared:
            out[alias] = out[owner]
    lost = [n for n in slices if n not in out]
    if lost:
        raise Corrupt(
            f'{files.source.root}: "{lost[0]}" is in the files, but not in a flat parameter of the layout given.',
            code="CKPT0412",
        )
    for name, column in plain.items():
        if name not in out:
            out[name] = select_first_replica(files, ranks, name, column)
    listed = [n for n in layout.names or () if n in out]
    out = {n: out[n] for n in dict.fromkeys((*listed, *out))}
    params = {p.name: p.shape for f in layout.flats for p in f.parts}
    tied = {a: b for f in layout.flats for a, b in f.shared}
    return out, ModelInfo(layout, {n: params[n] for n in out if n in params}, tied, own)
