"""`--weights KEY`: which weights of a checkpoint are the model.

    extra.ema.w    ->   model.w          averages and other copies, where they lie
    y, z           ->   model.w = x      schedule-free: lerp(y, z, 1 - 1/beta1), computed as it is read

The result is a model with its names and nothing of a training: the optimizer belongs to the weights that were trained.
Sets of weights are found by names and shapes (index/weight_sets.py), also in files beside the checkpoint, such as
ema.pt.

x has the bits that `optimizer.eval()` of schedulefree gives where torch's lerp uses fused multiply-add, as it does on
all CPUs with AVX2 and on GPUs: weights in bf16 and fp16 are computed in fp32 and rounded once.

Sources: schedulefree 1.4 (adamw_schedulefree.py, sgd_schedulefree.py, radam_schedulefree.py: eval and train),
aten/src/ATen/native/Lerp.h of torch 2.13.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from ..errors import Corrupt, Unsupported, UsageError, argument
from ..index.checkpoint import Checkpoint, Chunks, TensorEntry, joined
from ..index.composites import find_composites
from ..index.draft import Dropped
from ..index.records import Records
from ..index.schedule_free import find_free_parameters, has_schedule_free_optimizer
from ..index.weight_sets import (
    OF_TRAINING,
    WEIGHT_FILES,
    WeightSet,
    find_matching_keys,
    find_unread_averages,
    find_weight_sets,
    is_average_key,
)
from ..printable import count_noun, list_first
from ..storage.overlay import ComputedSource, JoinedSource, name_in_joined
from ..storage.source import Source, closed_on_error
from .computed_files import BoxReader, ComputedFiles, cast_array, choose_page_size
from .copy.fill import silent
from .copy.tensor_digests import tensor_digests

if TYPE_CHECKING:
    from .copy.dtypes import Array
    from .opening import OpenCheckpoint

__all__ = ["ChosenWeights", "choose_weights", "find_equal_tensors", "remove_optimizer_notes"]

#: What names the weights of a schedule-free optimizer.
_FREE = {f"schedule-free-{name}": name for name in "xyz"}
_NOT_CARRIED = "it is of the training, and not of the weights that were chosen"


# ------------------------------------------------------------------------------------------------------------ choosing


class ChosenWeights(NamedTuple):
    """A model of weights that were chosen.

    `checkpoint`, `source`  its index and files, `left_behind` what is not in it
    `whole`                 the checkpoint that it is taken from, with what was joined to it
    `kept`                  {tensor that is copied: its name in `whole`}
    `inputs`                names of the tensors there that others are computed from
    """

    checkpoint: Checkpoint
    source: Source
    left_behind: list[Dropped]
    whole: OpenCheckpoint
    kept: dict[str, str]
    inputs: frozenset[str]


def choose_weights(opened: OpenCheckpoint, key: str, open_beside: Callable[[str], OpenCheckpoint]) -> ChosenWeights:
    """Choose a set of the weights of an open checkpoint as its model.

    Args:
        opened: the complete state.
        key: names the set: "ema", a file beside the checkpoint, "schedule-free-x".
        open_beside: opens the checkpoint at a path, for files beside this one.

    Raises:
        UsageError: no set of weights has this name, or several have.
        Unsupported: the set is incomplete, or is quantised.
    """
    ckpt = opened.locate()
    if key in _FREE or (key in ("x", "y") and has_schedule_free_optimizer(ckpt)):
        return _choose_schedule_free(opened, _FREE.get(key, key))
    remove_optimizer_notes(opened)
    sets = find_weight_sets(ckpt)
    whole = [k for k, s in sets.items() if s.is_whole]
    keys = find_matching_keys(key, whole)
    # Lightning's WeightAveraging saves the average as the model
    if not keys and OF_TRAINING in sets and (key == "average" or (is_average_key(key) and len(key) > 1)):
        chosen = WeightSet("state_dict", {t.local_name: t for t in ckpt.tensors.values() if t.component == "model"})
        return _export_weight_set(opened, chosen, "the model of the checkpoint is the average already")
    if not keys and (beside := _find_weights_beside(opened, key)):
        opened = _join_weights_beside(opened, beside, open_beside)
        sets = find_weight_sets(opened.checkpoint)
        whole = [k for k, s in sets.items() if s.is_whole]
        names = [k for k in whole if k == beside.rstrip("/") or k.startswith(beside.rstrip("/") + ".")]
        keys = (
            names
            if len(names) < 2
            else find_matching_keys(key, [k for k in names if is_average_key(k.removeprefix(beside))])
        )
    if len(keys) == 1:
        return _export_weight_set(opened, sets[keys[0]])
    raise _explain_unusable_set(opened, key, sets, keys)


def remove_optimizer_notes(opened: OpenCheckpoint) -> None:
    """Remove the notes on the optimizer from a checkpoint of which only weights are used."""
    notes = opened.checkpoint.notes
    notes[:] = [note for note in notes if not note.startswith("the optimizer ")]


def _explain_unusable_set(
    opened: OpenCheckpoint, key: str, sets: Mapping[str, WeightSet], keys: list[str]
) -> UsageError | Unsupported:
    """Return the error for a key that names no set of weights, several, or an incomplete one.

    Args:
        sets: {key: set of weights} in the checkpoint.
        keys: the sets that `key` names.
    """
    said, root = argument("weights", key), opened.location
    if len(keys) > 1:
        return UsageError(
            f"{said}: {root} has {len(keys)} sets of weights of such a name: {', '.join(keys)}. Name one.",
            code="CKPT0208",
        )
    partial = find_matching_keys(key, [k for k, s in sets.items() if not s.is_whole])
    if partial:
        found = sets[max(partial, key=lambda k: len(sets[k].tensors))]
        of_another_shape = [f'"{n}" is {list(found.tensors[n].shape)}' for n in found.reshaped]
        what = [
            *(
                [f"it lacks {count_noun(len(found.missing), 'parameter')}: {list_first(found.missing, 8)}"]
                if found.missing
                else []
            ),
            *(
                [f"{count_noun(len(found.reshaped), 'tensor')} have another shape, first {of_another_shape[0]}"]
                if found.reshaped
                else []
            ),
        ]
        return Unsupported(
            f'{said}: "{found.key}" holds {count_noun(len(found.tensors), "tensor")} with names of the model, but not '
            f"the whole of it: {'; '.join(what)}. A model of two sets of weights would be neither of them.",
            code="CKPT0335",
        )
    have = [k for k, s in sets.items() if s.is_whole]
    have += list(_FREE)[:1] if has_schedule_free_optimizer(opened.checkpoint) else []
    have += list(find_unread_averages(opened.checkpoint))
    there = f"it holds {', '.join(have)}" if have else "it holds no weights besides those of the model"
    return UsageError(f"{said}: {root} has no set of weights of such a name; {there}.", code="CKPT0207")


def _export_weight_set(opened: OpenCheckpoint, chosen: WeightSet, note: str = "") -> ChosenWeights:
    """Make a set of weights the model of a checkpoint.

    Args:
        note: a further note for the result; "" for none.

    Raises:
        Unsupported: the set is quantised.
    """
    ckpt = opened.checkpoint
    if codes := next((n for n, c in find_composites(ckpt).items() if c.path[0] == "model"), None):
        raise Unsupported(
            f'{argument("weights", chosen.key)}: "{codes}" is a quantised tensor, and whether the codes of the two fit '
            "is not known. Convert the checkpoint as it is, and take the weights with the program that quantised them.",
            code="CKPT0318",
        )
    model = {t.local_name: t for t in ckpt.tensors.values() if t.component == "model"}
    tensors, of_model = dict(chosen.tensors), list(chosen.of_model)
    twins = find_equal_tensors(opened, {n: model[n] for n in of_model}, {n: model[n] for n in tensors if n in model})
    tensors |= {n: tensors[m] for n, m in twins.items()}  # tied weights of which the set has one name
    of_model = [n for n in of_model if n not in twins]
    if chosen.beside and chosen.key != "module":  # the rest of a model that has the module, too
        inside = {id(t.chunks) for t in tensors.values()}
        rest = [n for n, t in model.items() if n not in tensors and n not in of_model and id(t.chunks) not in inside]
        of_model += [n for n in rest if not n.startswith(chosen.key + ".")]
    order = [n for n in model if n in tensors or n in of_model] if model and chosen.key != "module" else list(tensors)
    names = {id(t.chunks): n for n, t in ckpt.tensors.items()}
    entries = {n: tensors.get(n) or model[n] for n in order}
    kept = {f"model.{n}": names[id(t.chunks)] for n, t in entries.items()}
    out = {f"model.{n}": replace(t, path=("model", n)) for n, t in entries.items()}
    notes = [note] if note else []
    dtypes = {(model[n].dtype, t.dtype) for n, t in tensors.items() if n in model and model[n].dtype != t.dtype}
    if dtypes:
        notes.append("; ".join(f"they are {b}, and the weights of the model {a}" for a, b in sorted(dtypes)))
    if of_model:
        notes.append(
            f"{count_noun(len(of_model), 'tensor')} that the set lacks are those of the model: "
            f"{list_first(of_model, 8)}"
        )
    if not model:
        notes.append("there is no model beside it whose names and shapes it could be compared with")
    trained = [] if chosen.key in ("state_dict", "module") else [n for n in model if n in tensors]
    return _make_chosen_weights(opened, chosen.key, out, kept, notes, len(trained), of_model, ComputedFiles(ckpt))


def _make_chosen_weights(
    opened: OpenCheckpoint,
    key: str,
    tensors: dict[str, TensorEntry],
    kept: dict[str, str],
    notes: list[str],
    replaced: int,
    of_model: list[str],
    computed: ComputedFiles,
    inputs: Iterable[str] = (),
) -> ChosenWeights:
    """Build the index of chosen weights, with notes and the entries that are left behind.

    Args:
        key: names the chosen set of weights.
        tensors: {name: tensor} of the exported model.
        kept: {name of one that is copied: its name in `opened`}.
        replaced: how many weights of the old model are left behind.
        of_model: FQNs whose tensors are those of the old model.
        computed: the files, including computed ones.
        inputs: names of the tensors that weights are computed from.
    """
    ckpt, source = opened.checkpoint, opened.source
    used = {*kept.values(), *inputs}
    behind = [Dropped(n, t.nbytes, _NOT_CARRIED) for n, t in ckpt.tensors.items() if n not in used and n not in tensors]
    values = {n: v for n, v in ckpt.values.items() if v.component == "model"}
    behind += [Dropped(n, 0, _NOT_CARRIED) for n in ckpt.values if n not in values]
    parts = dict.fromkeys(d.name.partition(".")[0] for d in behind)
    said = f'the weights "{key}" are the model now: {count_noun(len(tensors) - len(of_model), "tensor")}'
    if replaced or behind:
        left = [f"the {count_noun(replaced, 'weight')} of the model"] if replaced else []
        left += [f"{count_noun(len(behind), 'entry', 'entries')} of {', '.join(parts)}"] if behind else []
        said += f"; left behind: {' and '.join(left)}"
    out = replace(
        ckpt.without_source_facts(),
        files=computed.names,
        sizes=computed.sizes,
        tensors=tensors,
        values=values,
        notes=[*ckpt.notes, said, *notes],
        derived={
            "weights": {"key": key, "tensors": len(tensors) - len(of_model), "of_model": of_model, "notes": notes}
        },
    )
    if computed.made:
        source = ComputedSource(source, computed.made, (), computed.working_bytes)
    return ChosenWeights(out, source, behind, opened, kept, frozenset(inputs))


def find_equal_tensors(
    opened: OpenCheckpoint, some: Mapping[str, TensorEntry], others: Mapping[str, TensorEntry]
) -> dict[str, str]:
    """Find tied weights that were saved twice, by reading tensors of one dtype and shape and comparing their bytes.

    Returns:
        {name in `some`: the first name in `others` with equal bytes}; only tensors of at least two dimensions.
    """
    pairs = {n: [m for m, o in others.items() if (o.dtype, o.shape) == (t.dtype, t.shape)] for n, t in some.items()}
    pairs = {n: of for n, of in pairs.items() if of and len(some[n].shape) > 1}
    looked_at = {n: some[n] for n in pairs} | {m: others[m] for of in pairs.values() for m in of}
    ckpt = opened.checkpoint
    found = tensor_digests(looked_at, opened.source, ckpt.files, ckpt.records, silent) if pairs else {}
    twins = {n: next((m for m in of if found[m] == found[n]), None) for n, of in pairs.items()}
    return {n: m for n, m in twins.items() if m is not None}


# ------------------------------------------------------------------------------------------------------- files beside


def _find_weights_beside(opened: OpenCheckpoint, key: str) -> str | None:
    """Return the name of the file or folder beside a checkpoint that a key names; None if there is none.

    Raises:
        UsageError: there are several.
    """
    rows = {r.name: r.name.rstrip("/") for r in opened.checkpoint.unread if r.name.endswith(WEIGHT_FILES)}
    found = (
        [n for n, bare in rows.items() if bare == key.rstrip("/")]
        or [n for n, bare in rows.items() if os.path.splitext(bare)[0] == key]
        or [n for n, bare in rows.items() if find_matching_keys(key, [bare])]
    )
    if len(found) > 1:
        raise UsageError(
            f"{argument('weights', key)}: {len(found)} files beside the checkpoint have such a name: "
            f"{', '.join(found)}. Name one.",
            code="CKPT0208",
        )
    return found[0] if found else None


def _join_weights_beside(
    opened: OpenCheckpoint, name: str, open_beside: Callable[[str], OpenCheckpoint]
) -> OpenCheckpoint:
    """Return a checkpoint with the tensors of a file or folder beside it added as extra.NAME; closing it closes both.

    Raises:
        CkpttoolError: the file or folder cannot be read.
    """
    inner = open_beside(f"{opened.source.root}/{name}".rstrip("/"))
    with closed_on_error([inner.source]):
        theirs = inner.locate()
    ckpt, n = opened.checkpoint, len(opened.checkpoint.files)
    moved: dict[str, TensorEntry] = {}
    for t in theirs.tensors.values():
        path = ("extra", name.rstrip("/"), *(t.path[1:] if t.component in ("model", "extra") else t.path))
        moved[joined(path)] = replace(t, path=path, chunks=t.chunks.moved(n))
    whole = replace(
        ckpt,
        tensors=ckpt.tensors | moved,
        files=[*ckpt.files, *map(name_in_joined, theirs.files)],
        sizes=[*ckpt.sizes, *theirs.sizes],
        records=Records([*ckpt.records, *(r.moved(n) for r in theirs.records)]),
        unread=[r for r in ckpt.unread if r.name != name],
        notes=[x for x in ckpt.notes if not x.startswith("not read")],
    )
    return replace(opened, checkpoint=whole, source=JoinedSource(opened.source, inner.source))


# ------------------------------------------------------------------------------------------------------ schedule-free


def _choose_schedule_free(opened: OpenCheckpoint, which: str) -> ChosenWeights:
    """Make x, y or z of a schedule-free optimizer the model.

    Args:
        which: "x", the average to evaluate and publish; "y", where gradients are taken; or "z", the plain iterate.

    Raises:
        Unsupported: the optimizer is another one, or a weight is of a dtype that is not computed.
        Corrupt: a z does not have the shape and the dtype of its weight.
    """
    ckpt = opened.checkpoint
    free = find_free_parameters(ckpt)
    remove_optimizer_notes(opened)
    computed, reader = ComputedFiles(ckpt), BoxReader(ckpt, opened.source)
    tensors: dict[str, TensorEntry] = {}
    kept: dict[str, str] = {}
    inputs: set[str] = set()
    same: dict[tuple[object, ...], TensorEntry] = {}  # tied weights are computed once
    for name, t in ckpt.tensors.items():
        if t.component != "model":
            continue
        of = free.get(t.local_name)
        place = (t.dtype, t.shape, tuple(t.chunks[:]))
        if of is not None and (of.z.shape, of.z.dtype) != (t.shape, t.dtype):
            raise Corrupt(
                f'"{name}" is {t.dtype} {list(t.shape)}, and its z {of.z.dtype} {list(of.z.shape)}.', code="CKPT0417"
            )
        if of is None and place in same:
            tensors[name] = replace(same[place], path=t.path)
        elif of is None or which == ("y" if of.train_mode else "x"):
            tensors[name], kept[name] = t, name
        elif which == "z":
            tensors[name], kept[name] = replace(of.z, path=t.path), joined(of.z.path)
        else:
            if t.dtype not in ("float32", "bfloat16", "float16"):
                raise Unsupported(
                    f'"{name}" is {t.dtype}: schedule-free-{which} is computed of fp32, bf16 and fp16.', code="CKPT0335"
                )
            weight = 1 - 1 / of.beta if which == "x" else 1 - of.beta
            lerp, page = _make_lerp_function(reader, t, of.z, weight), choose_page_size([t, of.z])
            file = computed.add(f"{name} (schedule-free-{which})", t.dtype, t.shape, lerp, page)
            tensors[name] = same[place] = replace(t, chunks=Chunks.whole(t.shape, *file))
            inputs |= {name, joined(of.z.path)}
    computed.working_bytes += reader.working_bytes
    modes = {of.train_mode for of in free.values()}
    is_now = "x" if modes == {False} else "y" if modes == {True} else "x in some groups and y in others"
    weight_of = {"x": "lerp(y, z, 1 - 1/beta1)", "y": "lerp(x, z, 1 - beta1)", "z": "the optimizer's z"}[which]
    note = f"the weights in the checkpoint are {is_now}" + (f"; {which} is {weight_of}" if is_now != which else "")
    bare = [n.removeprefix("model.") for n in tensors if n.removeprefix("model.") not in free]
    twins = find_equal_tensors(
        opened,
        {n: ckpt.tensors[f"model.{n}"] for n in bare if f"model.{n}" in kept},
        {n: ckpt.tensors[f"model.{n}"] for n in free},
    )
    for n, m in twins.items():  # tied weights that were saved twice
        tensors[f"model.{n}"] = replace(tensors[f"model.{m}"], path=("model", n))
        kept.pop(f"model.{n}")
    of_model = [n for n in bare if f"model.{n}" in kept]
    replaced = sum(1 for n in tensors if kept.get(n) != n)
    return _make_chosen_weights(
        opened, f"schedule-free-{which}", tensors, kept, [note], replaced, of_model, computed, inputs
    )


def _make_lerp_function(
    reader: BoxReader, start_of: TensorEntry, end_of: TensorEntry, weight: float
) -> Callable[[int, int], Array]:
    """Return a function that computes elements [first, end) of torch's `start.lerp(end, weight)`, in the dtype of
    `start_of`."""

    def compute(first: int, end: int) -> Array:
        """Compute elements [first, end)."""
        a, b = (cast_array(reader.read_range(t, first, end), t.dtype, "float32")[0] for t in (start_of, end_of))
        return cast_array(_interpolate(a, b, weight), "float32", start_of.dtype)[0]

    return compute


def _interpolate(a: Array, b: Array, weight: float) -> Array:
    """Return a + weight * (b - a) of float32 arrays, with the bits that torch's lerp gives.

    torch starts from the nearer end and uses one fused multiply-add. Here, the product is computed exactly in float64,
    and the sum is rounded to odd before it is rounded to float32, so that only one rounding has an effect.
    """
    import numpy as np

    w = np.float32(weight)
    near, factor = (a, w) if abs(w) < 0.5 else (b, w - np.float32(1))
    with np.errstate(all="ignore"):
        product, base = (b - a).astype("f8") * np.float64(factor), near.astype("f8")
        total = product + base
        rest = total - product
        lost = (product - (total - rest)) + (base - rest)
        bits = total.view("i8")
        inexact = (lost != 0) & (bits & 1 == 0) & np.isfinite(total)
        bits += np.where(inexact, np.where((lost > 0) == (total > 0), 1, -1), 0)
        out: Array = total.astype("f4")
    return out
