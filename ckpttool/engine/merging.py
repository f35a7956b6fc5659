"""A base model and its LoRA as one checkpoint, whose merged weights are computed when they are read.

    base model        q_proj.weight ------------------------------.
    adapter           q_proj.lora_A.weight, q_proj.lora_B.weight --+-- ComputedSource: q_proj.weight + scaling * B @ A
                                                                   |
    every other tensor of the base model, where it lies -----------'

Every layout writes such a checkpoint as any other. A merged weight is a file of its own in the index, which exists
nowhere (computed_files.py): it is computed when it is read, one weight at a time. Nothing but weights is in it:
optimizer state is that of the adapter's training.

The result has the bits of PEFT's merge_and_unload on a CPU, so torch does the same operations in the same dtypes:
matrices in bf16 and fp16 are multiplied in fp32, and the sum is rounded once to the dtype of the weight. An adapter
that is given beside its base model is taken to fp32 first, as PeftModel.from_pretrained does; one in the state of a job
keeps its dtype, as its live model does.

Sources: peft/tuners/lora/{layer,variants,dora}.py, peft/tuners/tuners_utils.py (cast_adapter_dtype), of peft 0.21.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import layouts
from ..errors import Corrupt, MissingPackage, Unsupported, UsageError, argument
from ..extras import require_packages
from ..huggingface import adapters, encodings, hub_names, lora, lora_changes, model_files
from ..index.checkpoint import FLOATING, ITEMSIZE, Chunks, TensorEntry, tied_weights
from ..index.draft import Dropped
from ..index.paths import keep_extra_state_trees
from ..printable import count_noun, quote_path
from ..storage.overlay import ComputedSource
from ..storage.source import closed_on_error
from .computed_files import ComputedFiles
from .copy.fill import silent
from .copy.tensor_digests import tensor_digests
from .opening import (
    CheckpointPath,
    MergedCheckpoint,
    MergeRequest,
    OpenCheckpoint,
    OpenOptions,
    collect_model_hints,
    open_checkpoint,
)
from .selecting import make_selection
from .weights import find_equal_tensors

if TYPE_CHECKING:
    from types import EllipsisType

    import torch

    from .copy.dtypes import Array

__all__ = ["open_merged"]

_TORCH_BYTES = 256 << 20  # what importing torch takes
#: As much of a stack of matrices is computed at once as this; PEFT multiplies all at once, with the same bits.
_STACK_BYTES = 32 << 20
#: Modules that models tie to each other.
_EMBEDDINGS = (
    "embed_tokens",
    "wte",
    "embed_in",
    "word_embeddings",
    "embedding",
    "lm_head",
    "embed_out",
    "output",
    "tok_embeddings",
)
_NOT_MERGED = "it is of the adapter's training, and the merged model begins with none"


@dataclass
class _Adapter:
    """One adapter to merge."""

    opened: OpenCheckpoint
    tensors: dict[str, TensorEntry]  # by the name that PEFT saves, without "model."
    stored: dict[str, str]  # {that name: name in the checkpoint}
    config: dict[str, Any] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)  # tokenizer and other files beside it


def open_merged(
    src: CheckpointPath, options: OpenOptions, request: MergeRequest, model: layouts.ModelHints | None = None
) -> MergedCheckpoint:
    """Open `src` with an adapter merged into its weights; the adapter is in another checkpoint, or in `src` itself.

    Args:
        request: which adapter, and its config.
        model: what `collect_model_hints(options)` returns; None to call it here.

    Raises:
        Unsupported: the adapter, or the base model, cannot be merged; the message names the reason.
        UsageError: there is no adapter of the given name, there are several and none was named, or `options.only` names
            entries instead of components.
        Corrupt: adapter and base model do not fit.
        MissingPackage: torch is not installed.
    """
    require_packages("ckpttool adapter merge", "torch")
    if not make_selection(options).by_component:
        raise UsageError(
            f"{argument('only', options.only)}: a merge makes whole models, and takes components. Merge first, and "
            "convert a part of the result.",
            code="CKPT0205",
        )
    opened: list[OpenCheckpoint] = []
    with closed_on_error(part.source for part in opened):
        base = open_checkpoint(src, options, model or collect_model_hints(options), check_hints=False)
        opened.append(base)
        theirs = base
        if request.adapter is not None:
            theirs = open_checkpoint(request.adapter, OpenOptions(only=options.only))
            opened.append(theirs)
            if options.only is not None and lora.find_lora(theirs.checkpoint) is None:  # it may be in another component
                opened.pop().source.close()
                theirs = open_checkpoint(request.adapter, OpenOptions())
                opened.append(theirs)
        for part in opened:
            part.locate()
        return _merge_states(base, theirs, request, options.config)


class _MergePlan(NamedTuple):
    """What a merge changes."""

    named: dict[str, str]  # {name of a weight in the base model: in its checkpoint}
    chosen: dict[str, _Adapter]
    changes: dict[str, lora_changes.Change]
    notes: list[str]
    untied: list[str]  # tied weights of which one is changed and another one is not


def _merge_states(
    base: OpenCheckpoint, theirs: OpenCheckpoint, request: MergeRequest, config: str | None
) -> MergedCheckpoint:
    """Build the merged checkpoint; its weights are computed when they are read.

    Args:
        theirs: the checkpoint with the adapter; `base` itself if it holds both.
        config: folder or id of a Hugging Face model; None if none was given.

    Raises:
        Unsupported, UsageError: the adapter cannot be merged.
        Corrupt: the two do not fit.
    """
    given, old = theirs is not base, base.checkpoint
    plan = _plan_merge(base, theirs, request, config)
    files = ComputedFiles(old)
    tensors = _build_merge_index(base, plan, files, upcast=given)
    scaling: dict[str, dict[str, float]] = {a: {} for a in plan.chosen}
    for update in (u for c in plan.changes.values() for u in c.updates):
        scaling[update.adapter][update.module] = update.scaling
    ckpt = replace(
        old,
        files=files.names,
        sizes=files.sizes,
        tensors=tensors,
        values={n: v for n, v in old.values.items() if v.path[0] == "model"},
        origin=keep_extra_state_trees(old.origin),
        trainer=None,
        recorded={},
        notes=[*old.notes, *plan.notes],
        merged={
            "adapter": os.path.basename(theirs.checkpoint.root) if given else None,
            "names": [n for n in plan.chosen if n],
            "scaling": scaling if len(plan.chosen) > 1 else next(iter(scaling.values())),
            "untied": plan.untied,
        },
    )
    changed = frozenset(plan.named[n] for n in plan.changes)
    read = frozenset(found.stored[n] for found in plan.chosen.values() for n in found.tensors)
    return MergedCheckpoint.of(
        ((base, changed), (theirs, read)) if given else ((base, changed | read),),
        ckpt,
        ComputedSource(base.source, files.made, [theirs.source], _TORCH_BYTES + files.working_bytes),
        {f"model.{n}": there for n, there in plan.named.items() if n not in plan.changes},
        _list_unmerged_entries(base, theirs, plan.named, read),
        base.selection,
    )


def _plan_merge(base: OpenCheckpoint, theirs: OpenCheckpoint, request: MergeRequest, config: str | None) -> _MergePlan:
    """Decide which weights of the base model the requested adapters change, and how.

    Args:
        theirs: the checkpoint with the adapter; `base` itself if it holds both.
        config: folder or id of a Hugging Face model; None if none was given.

    Raises:
        Unsupported, UsageError: an adapter cannot be merged, or changes no weight.
        Corrupt: it does not fit the base model.
    """
    given = theirs is not base
    named = _map_base_names(base, given)
    chosen = _choose_adapters(theirs, request, given)
    pieces = _rename_adapter_modules(base, named, chosen, config)
    try:
        changes = lora_changes.plan_changes(
            {a: {n: t.shape for n, t in found.tensors.items()} for a, found in chosen.items()},
            {a: found.config for a, found in chosen.items()},
            {n: base.checkpoint.tensors[there].shape for n, there in named.items()},
            pieces,
        )
    except Corrupt as e:
        codes = encodings.find_in_checkpoint(base.checkpoint, None)
        if not codes.weights:
            raise
        raise Unsupported(
            f"the base model is quantised ({codes.summary()}), and an adapter is added to numbers. First write the "
            f"base model with {argument('dequantize', ['*'])}, then merge the adapter into that.",
            code="CKPT0318",
        ) from e
    if not changes:
        raise Unsupported("the adapter changes no tensor of the base model.", code="CKPT0323")
    # weights that are one parameter change together
    tied = _find_tied_groups(base, named, changes, config)
    changes = _add_tied_weights(named, tied, changes)
    for names in tied:
        if _has_one_shared_copy([changes.get(n) for n in names], chosen):
            changes |= {n: changes[names[0]] for n in names}
    notes = [*_describe_merge(chosen, changes), *_describe_left_files(base, chosen, config)]
    untied = next((names for names in tied if len({changes.get(n) for n in names}) > 1), [])
    if untied:
        notes.append(
            f"{' and '.join(untied)} are no longer tied, since the adapter has a copy of its own (modules_to_save); "
            "config.json gets tie_word_embeddings=false, as PEFT does"
        )
    return _MergePlan(named, chosen, changes, notes, untied)


def _build_merge_index(
    base: OpenCheckpoint, plan: _MergePlan, files: ComputedFiles, upcast: bool
) -> dict[str, TensorEntry]:
    """Build the index of a merge, {name: tensor}: each weight that changes is a computed file of its own.

    Of a large stack of matrices, a few are computed at a time.

    Args:
        files: files of the base model; the computed ones are added.
        upcast: whether fp16, bf16 and float8 tensors of the adapter are converted to fp32 first.

    Raises:
        Unsupported: a weight that changes is quantised.
    """
    old = base.checkpoint
    tensors: dict[str, TensorEntry] = {}
    made: dict[tuple[object, ...], Chunks] = {}  # tied weights share a file
    for name, there in plan.named.items():
        entry, change = old.tensors[there], plan.changes.get(name)
        if change is None:
            tensors[f"model.{name}"] = replace(entry, path=("model", name))
            continue
        if entry.dtype not in FLOATING:
            raise Unsupported(
                f'"{there}" is {entry.dtype}: the base model is quantised, and a merge into it would be of other '
                "weights. Give the base model in bf16 or fp32.",
                code="CKPT0318",
            )
        weight = (change, entry.dtype, entry.shape, tuple(entry.chunks[:]))
        if weight not in made:
            compute = _make_merge_function(base, there, change, plan.chosen, upcast=upcast)
            # matrices that are computed together, and the memory: the weight, the product of the matrices in fp32 and
            # its rounded copy; for DoRA the sum as well, once for the norm and once for the result
            several = min(change.stacked, max(1, _STACK_BYTES * change.stacked // max(1, entry.nbytes)))
            item, sums = ITEMSIZE[entry.dtype], 4 if any(u.magnitude for u in change.updates) else 1
            page, each = entry.numel // change.stacked * several, 2 * item + max(4, item) * sums
            file = files.add(f"{name} (merged)", entry.dtype, entry.shape, compute, page, each)
            made[weight] = Chunks.whole(entry.shape, *file)
        tensors[f"model.{name}"] = TensorEntry(entry.dtype, entry.shape, ("model", name), made[weight])
    return tensors


def _map_base_names(base: OpenCheckpoint, given: bool) -> dict[str, str]:
    """Return {name of a weight in the base model: its name in the checkpoint}.

    Args:
        given: whether the adapter is in another checkpoint than the base model.

    Raises:
        Unsupported: there are no weights, or the base model that was given holds an adapter.
    """
    model = {t.local_name: n for n, t in base.checkpoint.tensors.items() if t.component == "model"}
    if not given:
        return adapters.find_base_names(model)
    if any(p.startswith("lora_") for n in model for p in n.split(".")):
        raise Unsupported(
            f"{base.source.root}, given as the base model, holds an adapter itself. Merge that first: ckpttool adapter "
            "merge SRC DST.",
            code="CKPT0321",
        )
    if not model:
        raise Unsupported(f"{base.source.root} holds no weights to merge an adapter into.", code="CKPT0317")
    return model


def _choose_adapters(theirs: OpenCheckpoint, request: MergeRequest, given: bool) -> dict[str, _Adapter]:
    """Choose the adapters that were asked for, {name: adapter}, in that order; the only one, where none was named.

    Args:
        theirs: the checkpoint with the adapters.
        given: whether that is another checkpoint than the base model.

    Raises:
        UsageError: there is no adapter of a name, there are several and none was named, or an option contradicts
            adapter_config.json.
        Unsupported: there is no adapter, no config of it, or it cannot be merged.
    """
    ckpt = theirs.checkpoint
    own = adapters.adapter_as_model(ckpt)
    if (
        not given
        and any(t.path[:2] == ("extra", "adapter") for t in ckpt.tensors.values())
        and lora.find_lora(ckpt) is None
    ):
        raise Unsupported(
            f"{theirs.location} holds an adapter and weights that it is already merged into, as torchtune saves "
            "them. Write the weights with ckpttool convert, or merge the adapter into the base model that training "
            f"began with: ckpttool adapter merge BASE {quote_path(theirs.location)} DST.",
            code="CKPT0321",
        )
    seen = lora.find_lora(own)
    if not given and seen is not None and seen.alone:
        raise Unsupported(
            f"{theirs.location} holds an adapter only ({seen}), and no base model. Give both: ckpttool adapter "
            f"merge BASE {quote_path(theirs.location)} DST.",
            code="CKPT0321",
        )
    names: tuple[str | None, ...] = request.names or (None,)
    if request.names == () and seen is not None and len([n for n in seen.names if n]) > 1:
        raise UsageError(
            f"{theirs.location} holds {len(seen.names)} adapters, {', '.join(seen.names)}. Name those to merge, in "
            f"order: {argument('adapter_name', seen.names[0])}.",
            code="CKPT0208",
        )
    return {wanted or "": _read_adapter(theirs, request, seen, wanted, given) for wanted in names}


def _read_adapter(
    theirs: OpenCheckpoint, request: MergeRequest, seen: lora.AdapterShape | None, wanted: str | None, given: bool
) -> _Adapter:
    """Return an adapter of a checkpoint, with its config.

    Args:
        theirs: the checkpoint with the adapter.
        request: the adapter's config, or the lora_alpha to use without one.
        seen: names of the adapters whose tensors the checkpoint has; None if there are none.
        wanted: name of the adapter; None for the only one.
        given: whether `theirs` is another checkpoint than the base model.

    Raises:
        UsageError: there is no adapter of that name, or an option contradicts adapter_config.json.
        Unsupported: there is no adapter, no config of it, or it cannot be merged.
        Corrupt: it has a rank of 0.
    """
    if wanted is not None and (seen is None or wanted not in seen.names):
        there = f"its adapters are {', '.join(seen.names)}" if seen and seen.names != ("",) else "none has a name"
        raise UsageError(
            f"{argument('adapter_name', wanted)}: {theirs.location} has no such adapter; {there}.", code="CKPT0207"
        )
    several = seen is not None and len(seen.names) > 1
    known = model_files.find_adapter_files(theirs.source, request.config, [], wanted, one_of_several=several)
    config = None if known is None else known[0]
    if config is None and seen is None:
        raise Unsupported(f"{theirs.location} has no adapter: no tensor has lora_* in its name.", code="CKPT0321")
    if config is None and request.lora_alpha is None:
        raise model_files.make_missing_config_error(request.config, "adapter_config")
    if config is not None and request.lora_alpha is not None:
        raise UsageError(
            f"{argument('lora_alpha', request.lora_alpha)}: the adapter has an adapter_config.json, which says "
            f"{str(config.get('lora_alpha'))[:40]}. Leave the option out.",
            code="CKPT0205",
        )
    if config is not None:
        lora.refuse_unmergeable(config, base_is_given=given)
    ckpt = theirs.checkpoint
    reduced = adapters.keep_adapter_only(ckpt, config or {"peft_type": "LORA"}, wanted)
    found = {t.local_name: t for t in reduced.tensors.values()}
    by_chunks = {id(t.chunks): n for n, t in ckpt.tensors.items()}  # whatever renames a tensor keeps them
    stored = {n: by_chunks[id(t.chunks)] for n, t in found.items()}
    _check_dtypes(found, upcast=given)
    if config is None:
        assert request.lora_alpha is not None
        config = lora.make_adapter_config(
            {n: t.shape for n, t in found.items()},
            lora_alpha=request.lora_alpha,
            rslora=request.rslora,
            base_model=None,
        )
    elif request.rslora and not config.get("use_rslora"):
        raise UsageError(
            f"{argument('rslora')}: adapter_config.json has use_rslora=false. Leave the option out.",
            code="CKPT0205",
        )
    return _Adapter(theirs, found, stored, config, {} if known is None else known[1])


def _check_dtypes(tensors: Mapping[str, TensorEntry], *, upcast: bool) -> None:
    """Check that the LoRA and the trained tokens of an adapter are of floating-point numbers that torch can multiply,
    and each lora_A and lora_B of one dtype.

    Args:
        tensors: {name as PEFT saves it: tensor}.
        upcast: whether fp16, bf16 and float8 tensors are converted to fp32 first.

    Raises:
        Unsupported: they are not.
    """
    wrappers = lora.group_by_wrapper(tensors).values()
    dtypes: dict[str, str] = {}
    for n in (*(n for kinds in wrappers for n in kinds.values()), *(n for n in tensors if n.endswith(lora.TOKENS))):
        t = tensors[n]
        low = t.dtype in ("float16", "bfloat16") or t.dtype.startswith("float8")
        dtypes[n] = "float32" if upcast and low else t.dtype
        if dtypes[n] not in FLOATING:
            raise Unsupported(
                f'"{n}" of the adapter is {t.dtype}, and ckpttool merges adapters of floating-point numbers in at '
                "least 16 bits, or in float8 beside a base model.",
                code="CKPT0322",
            )
    for kinds in wrappers:
        a, b = kinds.get("a"), kinds.get("b")
        if a and b and dtypes[a] != dtypes[b]:
            raise Unsupported(
                f'"{a}" of the adapter is {tensors[a].dtype}, but its lora_B is {tensors[b].dtype}, and ckpttool '
                "multiplies matrices of one dtype. Save both in the same.",
                code="CKPT0322",
            )


def _describe_left_files(base: OpenCheckpoint, chosen: Mapping[str, _Adapter], config: str | None) -> list[str]:
    """Return a list of one note that names the files beside adapters, such as a tokenizer with new tokens, that differ
    from the base model's and are not copied; [] if there are none.

    Args:
        chosen: {name: adapter}.
        config: folder or id of a Hugging Face model with the base model's files; None if none was given.
    """
    given = {n: data for a in chosen.values() for n, data in a.files.items() if n != model_files.ADAPTER_CONFIG}
    of_base = model_files.find_model_files(base.source, config, []).files if given else {}
    left = sorted(n for n, data in given.items() if of_base.get(n) != data)
    if not left:
        return []
    return [
        f"not copied: {', '.join(left)} beside the adapter, since the base model's are others; copy them into the "
        "result if the adapter was trained with them"
    ]


def _rename_adapter_modules(
    base: OpenCheckpoint, named: Mapping[str, str], chosen: Mapping[str, _Adapter], config: str | None
) -> dict[str, list[hub_names.Piece]]:
    """Rename the modules of adapters from their names on the Hub to those that they have in memory.

    Nothing is renamed if the adapters already use the names in memory, or if the base model has no config.json.

    Args:
        named: {name of a weight in the base model: its name in the checkpoint}.
        chosen: {name: adapter}; their tensors are renamed in place.
        config: folder or id of a Hugging Face model; None if none was given.

    Returns:
        {tensor of the base model: the modules on the Hub that it is made of}; {} if nothing was renamed.
    """
    modules = {n.rpartition(".")[0] for n in named}
    wrappers = {lora.to_base_name(w) for found in chosen.values() for w in lora.group_by_wrapper(found.tensors)}
    model = None if wrappers <= modules else _find_base_config(base, config)
    if model is None or "model_type" not in model:
        return {}
    try:
        pieces, moved = hub_names.find_hub_modules(hub_names.relate_to_hub(model, None))
    except (Unsupported, MissingPackage):  # then the module is named that the base model does not have
        return {}
    back = {hub: here for here, hub in moved.items()}
    for found in chosen.values():
        renamed = {n: adapters.rename_adapter_tensor(n, back) for n in found.tensors}
        found.tensors = {renamed[n]: t for n, t in found.tensors.items()}
        found.stored = {renamed[n]: there for n, there in found.stored.items()}
    return {n: several for n, several in pieces.items() if n in named}


def _find_base_config(base: OpenCheckpoint, config: str | None) -> dict[str, object] | None:
    """Return the content of config.json of the base model: that in `config` if it is given, else the one beside the
    weights.

    None if there is none.
    """
    if base.checkpoint.config is not None and not config:
        return base.checkpoint.config
    return model_files.find_model_files(base.source, config, [])[0]


def _add_tied_weights(
    named: Mapping[str, str], tied: list[list[str]], plan: dict[str, lora_changes.Change]
) -> dict[str, lora_changes.Change]:
    """Return the plan of changes extended to tied weights.

    Tied weights are one parameter in PEFT's model, so a change of one of them in place changes all.

    Args:
        named: {name of a weight in the base model: its name in the checkpoint}.
        tied: lists of names of weights that are one parameter.
        plan: {name of a weight: its change}.

    Raises:
        Unsupported: tied weights have LoRA and trained tokens, or several adapters of which one uses DoRA.
    """
    out = dict(plan)
    for names in tied:
        here = [plan[n] for n in names if n in plan and not plan[n].is_copy]
        updates = tuple(u for change in here for u in change.updates)
        rows = tuple(dict.fromkeys(r for change in here for r in change.rows))
        if updates and rows:
            raise Unsupported(
                f'"{names[0]}" and "{names[1]}" are tied; one has trained tokens and the other one LoRA. Merge it with '
                "PEFT.",
                code="CKPT0322",
            )
        if len(updates) > 1 and any(u.magnitude for u in updates):
            raise Unsupported(
                f'"{names[0]}" and "{names[1]}" are tied, and both have an adapter with DoRA. Merge it with PEFT.',
                code="CKPT0322",
            )
        starts = [change.start for change in here if change.start is not None]
        for n in names if here else ():
            if n not in plan or not plan[n].is_copy:
                out[n] = lora_changes.Change(starts[-1] if starts else None, updates, rows=rows)
    return {n: out[n] for n in named if n in out}


def _has_one_shared_copy(rows: list[lora_changes.Change | None], chosen: Mapping[str, _Adapter]) -> bool:
    """Tell whether an adapter replaces all weights of a tied group by equal copies, which PEFT ties
    (ensure_weight_tying).

    The copies are read from the adapter and compared.

    Args:
        rows: the change of each weight of the group; None if it is not changed.
        chosen: {name: adapter}.
    """
    starts = [c.start for c in rows if c is not None and c.is_copy and c.start is not None]
    if len(starts) < len(rows) or not all(chosen[a].config.get("ensure_weight_tying") for a, _ in starts):
        return False
    found = [chosen[a] for a, _ in starts]
    ckpt, source = found[0].opened.checkpoint, found[0].opened.source
    wanted = {f.stored[n]: ckpt.tensors[f.stored[n]] for f, (_, n) in zip(found, starts, strict=True)}
    return len(set(tensor_digests(wanted, source, ckpt.files, ckpt.records, silent).values())) == 1


def _find_tied_groups(
    base: OpenCheckpoint, named: Mapping[str, str], plan: Mapping[str, lora_changes.Change], config: str | None
) -> list[list[str]]:
    """Find the weights of the base model that are one parameter under several names.

    They share bytes of a file; or they are embeddings with equal bytes, unless config.json says that these are not
    tied.

    Args:
        named: {name of a weight in the base model: its name in the checkpoint}.
        plan: {name of a weight: its change}.
        config: folder or id of a Hugging Face model; None if none was given.

    Returns:
        Lists of names, one for each such parameter.

    Raises:
        Unsupported: embeddings that the adapter changes have equal bytes, and there is no config.json.
    """
    old = base.checkpoint.tensors
    groups: dict[str, list[str]] = {}
    for other, first in tied_weights({n: old[there] for n, there in named.items()}).items():
        groups.setdefault(first, [first]).append(other)
    grouped = {n for names in groups.values() for n in names}
    alike: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for n, there in named.items():
        t, parts = old[there], n.split(".")
        if (
            n not in grouped
            and len(parts) > 1
            and parts[-1] == "weight"
            and parts[-2] in _EMBEDDINGS
            and len(t.shape) == 2
        ):
            alike.setdefault((t.dtype, t.shape), []).append(n)
    pairs = {n: old[named[n]] for names in alike.values() if len(names) > 1 for n in names}
    same: dict[str, list[str]] = {}
    for n, first in find_equal_tensors(base, pairs, pairs).items():
        same.setdefault(first, []).append(n)
    equal = [names for names in same.values() if len(names) > 1]
    if changed := [names for names in equal if any(n in plan for n in names)]:
        model = _find_base_config(base, config)
        if model is None:
            one, other = changed[0][:2]
            raise Unsupported(
                f'"{one}" and "{other}" have equal bytes, and the adapter changes '
                f'"{next(n for n in changed[0] if n in plan)}": whether the two are tied, so that both change, is in '
                f"the model's config.json, which is not here. Give {argument('config')}.",
                code="CKPT0312",
            )
        text = model.get("text_config")
        inner = text.get("tie_word_embeddings") if isinstance(text, dict) else None
        if model.get("tie_word_embeddings", inner) is False:
            equal = []
    return [*groups.values(), *equal]


def _describe_merge(chosen: Mapping[str, _Adapter], plan: Mapping[str, lora_changes.Change]) -> list[str]:
    """Return sentences on what a merge does: the scaling above all.

    Args:
        chosen: {name: adapter}.
        plan: {name of a weight: its change}.
    """
    by_factor: dict[str, int] = {}
    for update in {(u.adapter, u.module): u for c in plan.values() for u in c.updates}.values():
        config = chosen[update.adapter].config
        root = "sqrt(r)" if config.get("use_rslora") else "r"
        alpha = update.scaling * (update.rank**0.5 if config.get("use_rslora") else update.rank)
        text = f"scaling {update.scaling:.6g} = alpha {alpha:.6g} / {root}, r {update.rank}" + (
            ", DoRA" if update.magnitude else f", stacks of {update.stacked}" if update.stacked > 1 else ""
        )
        by_factor[text] = by_factor.get(text, 0) + 1
    out = [f"merged {count_noun(n, 'module')} with {text}" for text, n in by_factor.items()]
    if replaced := [n for n, c in plan.items() if c.start is not None]:
        many = "1 tensor is" if len(replaced) == 1 else f"{len(replaced)} tensors are"
        out.append(
            f'{many} taken from the adapter as a whole (modules_to_save, biases, embeddings), first "{replaced[0]}"'
        )
    out += [f'{count_noun(len(r.indices), "row")} of "{n}" are trained tokens' for n, c in plan.items() for r in c.rows]
    if biases := [n for n, c in plan.items() if c.biases]:
        out.append(f'{len(biases)} bias{"es are" if len(biases) > 1 else " is"} merged, first "{biases[0]}"')
    return out


def _list_unmerged_entries(
    base: OpenCheckpoint, theirs: OpenCheckpoint, named: Mapping[str, str], read: frozenset[str]
) -> list[Dropped]:
    """List what the merged checkpoint does not have: all but weights, and tensors of adapters that are not merged.

    Args:
        named: {name of a weight in the base model: its name in the checkpoint}.
        read: names of the adapter's tensors that are merged.
    """
    rows: dict[str, Dropped] = {}
    used = {*named.values(), *read}
    for part in (base,) if base.selection.only is not None else (base, theirs):
        for n, t in part.checkpoint.tensors.items():
            if t.component != "model":
                rows[n] = Dropped(n, t.nbytes, _NOT_MERGED)
            elif n not in used:
                rows[n] = Dropped(
                    n, t.nbytes, "it is of an adapter that was not asked for, or what its own copy replaces"
                )
        rows |= {n: Dropped(n, 0, _NOT_MERGED) for n, v in part.checkpoint.values.items() if v.component != "model"}
    return list(rows.values())


# ---------------------------------------------------------------------------------------------------------- computing


def _make_merge_function(
    base: OpenCheckpoint,
    name: str,
    change: lora_changes.Change,
    chosen: Mapping[str, _Adapter],
    *,
    upcast: bool,
) -> Callable[[int, int], Array]:
    """Return a function that computes elements [first, end) of a merged weight, as an array of their bytes.

    Args:
        name: the weight's name in the base checkpoint.
        change: how it changes; `first` and `end` are multiples of the size of one of its stacked matrices.
        chosen: {name: adapter}.
        upcast: whether fp16, bf16 and float8 tensors of the adapter are converted to fp32 first.
    """

    def of_adapter(adapter: str, tensor: str) -> torch.Tensor:
        """Read the tensor that PEFT saves under this name, of the adapter of that name; in fp32, where `upcast` asks
        for it."""
        import torch

        found = chosen[adapter]
        out = found.opened[found.stored[tensor]].torch()
        low = out.dtype in (torch.float16, torch.bfloat16) or "float8" in str(out.dtype)
        return out.float() if upcast and low else out

    def compute(first: int, end: int) -> Array:
        """Compute the elements [first, end), and return their bytes."""
        import torch

        each = base.checkpoint.tensors[name].numel // change.stacked
        part = range(first // each, end // each)
        index: slice | EllipsisType = slice(part.start, part.stop) if len(part) < change.stacked else ...
        with torch.no_grad():
            if change.start is None:
                weight = base[name].torch(index)
            else:
                found = chosen[change.start[0]]
                weight = found.opened[found.stored[change.start[1]]].torch(index)
                weight = weight.to(getattr(torch, base.checkpoint.tensors[name].dtype))
            for rows in change.rows:
                new = of_adapter(rows.adapter, rows.name).to(weight.dtype)
                weight = weight.index_copy(0, torch.tensor(rows.indices, dtype=torch.int64), new)
            for update in change.updates:
                if update.parts:
                    a, b = _assemble_stack_lora(update, weight.shape[-2], of_adapter)
                else:
                    a, b = (of_adapter(update.adapter, n) for n in (update.a, update.b))
                if update.kind == "parameter":
                    weight += _multiply_stack(a, b, update, part).to(weight.dtype)
                    continue
                magnitude = None if update.magnitude is None else of_adapter(update.adapter, update.magnitude)
                weight = _apply_lora(weight, a, b, magnitude, update)
            for adapter, bias, factor in change.biases:
                weight += of_adapter(adapter, bias) * factor
            return weight.contiguous().reshape(-1).view(torch.uint8).numpy()

    return compute


def _assemble_stack_lora(
    update: lora_changes.Update, rows: int, read: Callable[[str, str], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return lora_A and lora_B of a stack of matrices whose parts have a LoRA each.

    For the parts of one matrix, the rows of A are concatenated, and B is block-diagonal, as in PEFT.

    Args:
        rows: number of rows of each matrix.
        read: returns a tensor of an adapter; called with (name of the adapter, name of the tensor).
    """
    import torch

    firsts = sorted({p.first for p in update.parts})
    a = b = None
    for part in update.parts:
        mine, k = read(update.adapter, part.a), firsts.index(part.first) * update.rank
        if a is None or b is None:
            a = torch.zeros(update.stacked, len(firsts) * update.rank, mine.shape[1], dtype=mine.dtype)
            b = torch.zeros(rows, len(firsts) * update.rank, update.stacked, dtype=mine.dtype)
        a[part.matrix, k : k + update.rank] = mine
        b[part.first : part.first + part.rows, k : k + update.rank, part.matrix] = read(update.adapter, part.b)
    assert a is not None and b is not None
    return a.reshape(-1, a.shape[-1]), b.reshape(rows, -1)


def _multiply_stack(a: torch.Tensor, b: torch.Tensor, update: lora_changes.Update, part: range) -> torch.Tensor:
    """Return scaling * B @ A for some matrices of a stack, in the dtype of A and B.

    Args:
        part: numbers of the matrices; a stack of one matrix is computed as a linear layer.
    """
    import torch

    if update.stacked == 1:
        return _multiply_lora(a, b, update)
    mine = slice(part.start, part.stop)
    a, b = a.reshape(update.stacked, -1, a.shape[-1])[mine], b.reshape(b.shape[0], -1, update.stacked)[..., mine]
    product = torch.einsum("o r e, e r i -> e i o" if update.transposed else "o r e, e r i -> e o i", b, a)
    return product * update.scaling


def _multiply_lora(a: torch.Tensor, b: torch.Tensor, update: lora_changes.Update) -> torch.Tensor:
    """Return scaling * B @ A in the dtype of the adapter and the layout of the weight; fp16 and bf16 are multiplied
    in fp32."""
    import torch

    dtype = (b if update.kind in ("linear", "parameter") else a).dtype
    half = dtype in (torch.float16, torch.bfloat16)
    if half:
        a, b = a.float(), b.float()
    if update.kind != "convolution":
        product = b @ a
    elif a.shape[2:] == (1, 1):
        product = (b[:, :, 0, 0] @ a[:, :, 0, 0])[..., None, None]
    else:
        convolve = (torch.conv1d, torch.conv2d, torch.conv3d)[a.ndim - 3]
        product = convolve(a.transpose(0, 1), b).transpose(0, 1)
    delta = (product.T if update.transposed else product).mul_(update.scaling)
    return delta.to(dtype) if half else delta


def _apply_lora(
    weight: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    magnitude: torch.Tensor | None,
    update: lora_changes.Update,
) -> torch.Tensor:
    """Return a weight with one LoRA merged; the operations, their order and their dtypes are PEFT's. `weight` may be
    changed in place.

    Args:
        a, b: the two matrices of the LoRA, or kernels.
        magnitude: of DoRA; None for a plain LoRA.
    """
    import torch

    delta = _multiply_lora(a, b, update)
    if magnitude is None:
        weight += delta.to(weight.dtype) if update.kind == "embedding" else delta
        return weight
    # DoRA: the norm of every row of what the layer multiplies with
    rows = (weight.T + delta.T) if update.transposed else (weight + delta)
    if update.kind == "convolution":
        norm = rows.norm(p=2, dim=tuple(range(1, rows.ndim)), keepdim=True).transpose(1, 0)
    else:
        norm = torch.linalg.norm(rows, dim=1).to(rows.dtype)
    del rows
    factor = magnitude / norm
    shaped = factor.view(1, -1) if update.transposed else factor.view(-1, *(1 for _ in weight.shape[1:]))
    out: torch.Tensor = shaped * (weight + delta)
    return out.to(weight.dtype)
