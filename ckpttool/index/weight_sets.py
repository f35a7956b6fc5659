"""Sets of weights that a checkpoint holds besides its model: averages that trainers keep, and the trained weights where
the model is the average.

    extra.ema.<fqn>, extra.ema_model.module.<fqn>         a dict of tensors under any keys, wrapped or not
    extra.ema.shadow_params.<i>                           a list in the order of the model's parameters
    model.ema_net.<fqn>, model.model_ema.<fqn, no dots>   a module inside the model, beside the one that it averages
    optim.state.<fqn>.ax                                  a slot of an optimizer that averages

Tensors are such a set if their names, after the keys in front of them, are those of the model, with the same shapes.
Names, keys and shapes decide; no bytes are read.

Sources: torch/optim/swa_utils.py and asgd.py of 2.13 (AveragedModel, ax), lightning 2.6
(callbacks/weight_averaging.py), diffusers 0.36 (training_utils.py, EMAModel), timm (utils/checkpoint_saver.py),
ema_pytorch, schedulefree 1.4; ldm/modules/ema.py of CompVis' Stable Diffusion, which leaves the dots out of names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import NamedTuple

from ..errors import Unsupported, argument
from .checkpoint import Checkpoint, TensorEntry, joined, same_bytes, tied_weights
from .fqns import strip_wrapper_modules, strip_wrappers
from .optimizer_names import assign_names, iterate_possible_orders
from .schedule_free import find_free_parameters, has_schedule_free_optimizer

__all__ = [
    "OF_TRAINING",
    "WEIGHT_FILES",
    "WeightSet",
    "describe_weight_sets",
    "find_matching_keys",
    "find_unread_averages",
    "find_weight_sets",
    "is_average_key",
]

#: Where Lightning keeps the trained weights, and its model is the average.
OF_TRAINING = "current_model_state"
_WORDS = frozenset(
    (
        *("ema", "swa", "average", "averaged", "averages", "averaging", "avg", "shadow", "polyak", "target", "teacher"),
        *("slow", "ax", "lookahead"),
    )
)
_TRAINED = frozenset(("online", "current", "student", "trained"))
#: Slots whose names have such a word and that are no weights.
_MOMENTS = re.compile(r"exp_.*|.*(sq|square|grad|moment|step|var).*")
#: Buffers of torch's and transformers' modules, which averages of parameters do not have.
_BUFFERS = frozenset(
    (
        *("running_mean", "running_var", "num_batches_tracked", "inv_freq", "original_inv_freq", "position_ids"),
        *("token_type_ids", "masked_bias", "relative_position_index", "attn_mask"),
    )
)
_MODULE = ".module"
#: How names of files and folders end that may hold weights.
WEIGHT_FILES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".pkl", "/")


class WeightSet(NamedTuple):
    """Tensors that can stand for the weights of the model.

    `key`         what names it: the keys in front of its names
    `tensors`     {FQN in the model: its tensor}
    `of_model`    FQNs that it lacks and that the model keeps: buffers, and parameters that were not trained
    `missing`     parameters that it lacks, `reshaped` those of another shape, by FQN: a set that is not whole
    `beside`      whether the model holds it, as a module beside the one that it is an average of
    """

    key: str
    tensors: dict[str, TensorEntry]
    of_model: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    reshaped: tuple[str, ...] = ()
    beside: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether the set is complete: it has every parameter of the model, in the same shape."""
        return not self.missing and not self.reshaped


def find_weight_sets(ckpt: Checkpoint) -> dict[str, WeightSet]:
    """Find the sets of weights that a checkpoint holds in addition to its model, and return {key: set}, incomplete sets
    last.

    If the checkpoint has no model, every dict of weights is a set.
    """
    model = {t.local_name: t for t in ckpt.tensors.values() if t.component == "model"}
    rest = {n: t for n, t in ckpt.tensors.items() if t.component not in ("model", "optim", "rng")}
    if not model:
        return _find_sets_without_model(rest.values())
    trained = frozenset(t.parameter for t in ckpt.tensors.values() if t.slot is not None)
    found = [
        *_find_sets_by_prefix(rest.values(), model),
        *_find_sets_in_lists(rest.values(), ckpt, model, trained),
        *_find_average_slots(ckpt, model),
        *_find_average_modules(model),
    ]
    tied = tied_weights(model) if found else {}
    sets = [_make_weight_set(model, trained, tied, *one) for one in found]
    out: dict[str, WeightSet] = {}
    held: set[frozenset[int]] = set()
    for one in sorted(sets, key=lambda s: (not s.is_whole, len(s.key))):
        same = frozenset(id(t.chunks) for t in one.tensors.values())
        if same not in held and one.key not in out:  # two keys may be the same tensors
            held.add(same)
            out[one.key] = one
    return out


def is_average_key(key: str) -> bool:
    """Whether the words of a key say that an average of weights is below it: true of "ema" and "ema.ema_model", but
    not of "ema.online_model"."""
    return not _WORDS.isdisjoint(_split_words(key)) and _TRAINED.isdisjoint(_split_words(key.rpartition(".")[2]))


def find_matching_keys(asked: str, keys: Iterable[str]) -> list[str]:
    """Return the keys that a user's text names; several if it is ambiguous, [] if there are none.

    The first rule that matches at least one key decides: the key itself; the last element of the key; a word in its
    last element ("ema" in "state_dict_ema"); any element; any word; and for a word such as "ema", all keys of averages.
    """
    listed = list(keys)
    steps = (
        lambda key: key == asked,
        lambda key: key.endswith(f".{asked}"),
        lambda key: asked in _split_words(key.rpartition(".")[2]),
        lambda key: f".{asked}." in f".{key}.",
        lambda key: asked in _split_words(key),
        lambda key: asked in _WORDS and len(asked) > 2 and is_average_key(key),
    )
    return next((found for step in steps if (found := [key for key in listed if step(key)])), [])


def _split_words(key: str) -> set[str]:
    """Return the set of words in a key, in lower case: ema, state, dict and callback for
    "EMACallback.ema_state_dict"."""
    return set(re.findall(r"[a-z0-9]+", re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", key).lower()))


# -------------------------------------------------------------------------------------------------- the kinds of sets

#: (key, {FQN: tensor}, FQNs of the module that a set inside the model averages; None for all of the model).
_Found = tuple[str, dict[str, TensorEntry], frozenset[str] | None]


def _find_sets_by_prefix(tensors: Iterable[TensorEntry], model: Mapping[str, TensorEntry]) -> list[_Found]:
    """Find dicts of tensors with the names of the model's tensors: the names without their first keys are those of the
    model, or those of the model without the outer modules that all of its names have.

    Args:
        tensors: the tensors to look at.
        model: {FQN: tensor}.

    Returns:
        (key in front of the names, {FQN in the model: tensor}, None) of each dict.
    """
    known = {n: n for n in model}
    for head in accumulate(next(iter(model)).split(".")[:-1], "{}.{}".format):
        if all(n.startswith(f"{head}.") for n in model):
            known |= {n.removeprefix(f"{head}."): n for n in model}
    out: dict[str, dict[str, TensorEntry]] = {}
    for t in tensors:
        parts = strip_wrapper_modules(joined(t.path[1:])).split(".")
        for i in range(1, len(parts)):
            if (fqn := known.get(".".join(parts[i:]))) is not None:
                out.setdefault(".".join(parts[:i]), {})[fqn] = t
    return [(key.removesuffix(_MODULE), found, None) for key, found in out.items()]


def _find_sets_in_lists(
    tensors: Iterable[TensorEntry], ckpt: Checkpoint, model: Mapping[str, TensorEntry], trained: frozenset[str]
) -> list[_Found]:
    """Find lists of tensors whose shapes fit the model's parameters in exactly one way.

    Args:
        tensors: the tensors to look at.
        ckpt: the checkpoint.
        model: {FQN: tensor}.
        trained: FQNs for which the optimizer has state.

    Returns:
        (key of the list, {FQN in the model: tensor}, None) of each list.
    """
    lists: dict[str, dict[int, TensorEntry]] = {}
    for t in tensors:
        if type(t.path[-1]) is int:
            lists.setdefault(joined(t.path[1:-1]), {})[t.path[-1]] = t
    if not lists:
        return []
    tied = tied_weights(model)
    alone = [n for n in model if n not in tied]
    by_file = any(ckpt.files[f].endswith(".safetensors") for t in model.values() for f in t.chunks.file[:1])
    out: list[_Found] = []
    for key, found in lists.items():
        shapes = [found[i].shape for i in sorted(found)]
        answers = set()
        for order in iterate_possible_orders(alone) if by_file else [alone]:  # safetensors keeps no order
            listed = [n for n in order if n in trained] if len(trained) == len(shapes) else order
            names, _, _ = assign_names([(n, model[n].shape) for n in listed], [shapes])
            answers.add(None if names is None else tuple(names[0]))
        answers -= {None} if by_file else set()
        if len(answers) == 1 and (names_in_order := answers.pop()) is not None:
            out.append((key, dict(zip(names_in_order, (found[i] for i in sorted(found)), strict=True)), None))
    return out


def _find_average_slots(ckpt: Checkpoint, model: Mapping[str, TensorEntry]) -> list[_Found]:
    """Find slots of the optimizer that are averages by their names, and return (slot, {FQN: tensor}, None) of each;
    `model` is {FQN: weight}."""
    slots = {t.slot for t in ckpt.tensors.values()} - {None}
    out: dict[str, dict[str, TensorEntry]] = {
        str(slot): {} for slot in slots if is_average_key(str(slot)) and not _MOMENTS.fullmatch(str(slot))
    }
    for t in ckpt.tensors.values() if out else ():
        of = model.get(t.parameter)
        if t.slot in out and len(t.path) == 4 and of is not None and of.shape == t.shape:
            out[str(t.slot)][t.parameter] = t
    return [(slot, found, None) for slot, found in out.items() if found]


def _find_average_modules(model: Mapping[str, TensorEntry]) -> list[_Found]:
    """Find modules of the model that are averages of other modules of it, by their names. For the state dict of torch's
    AveragedModel, return all of the model as one set.

    Args:
        model: {FQN: tensor}.

    Returns:
        (name of the averaging module, {FQN of the weight that is averaged: tensor of its average}, FQNs of all weights
            of the averaged module) of each.
    """
    if "n_averaged" in model and all(n.startswith("module.") for n in model if n != "n_averaged"):
        plain = strip_wrappers(n for n in model if n != "n_averaged")
        return [("module", {fqn: model[n] for n, fqn in plain.items()}, frozenset(plain.values()))]
    out: list[_Found] = []
    tops = {".".join(n.split(".")[:i]) for n in model for i in (1, 2) if n.count(".") >= i}
    for top in sorted(tops):
        if not is_average_key(top.rpartition(".")[2]):
            continue
        mine = {n.removeprefix(top + "."): t for n, t in model.items() if n.startswith(top + ".")}
        others = [n for n in model if not n.startswith(top + ".")]
        for spell in (str, lambda n: n.replace(".", "")):  # CompVis' LitEma leaves the dots out
            heads = {""} | {".".join(n.split(".")[:i]) + "." for n in others for i in (1, 2) if n.count(".") >= i}
            below = {h: {spell(n.removeprefix(h)): n for n in others if n.startswith(h)} for h in heads}
            best = max(below, key=lambda h: (len(below[h].keys() & mine.keys()), -len(below[h])))
            both = {fqn: mine[n] for n, fqn in below[best].items() if n in mine}
            if len(both) * 2 > len(mine):
                out.append((top, both, frozenset(below[best].values())))
                break
    return out


def _find_sets_without_model(tensors: Iterable[TensorEntry]) -> dict[str, WeightSet]:
    """Return {key: set} of the dicts of weights, for a checkpoint that has no model."""
    out: dict[str, dict[str, TensorEntry]] = {}
    for t in tensors:
        if len(t.path) > 2 and isinstance(t.path[-1], str):
            out.setdefault(joined(t.path[1:-1]), {})[t.path[-1]] = t
    sets = {}
    for key, found in out.items():
        names = [n for n in found if n != "n_averaged"]
        if any(n.endswith(".weight") for n in names):
            sets[key] = WeightSet(key, {fqn: found[n] for n, fqn in strip_wrappers(names).items()})
    return sets


def _make_weight_set(
    model: Mapping[str, TensorEntry],
    trained: frozenset[str],
    tied: Mapping[str, str],
    key: str,
    tensors: Mapping[str, TensorEntry],
    inside: frozenset[str] | None,
) -> WeightSet:
    """Make a `WeightSet` of the tensors that were found under a key, with the parameters of the model that it lacks.

    Args:
        model: {FQN: tensor}.
        trained: FQNs for which the optimizer has state.
        tied: {name of a tied weight: the first name of the same bytes}.
        key: the key of the set.
        tensors: {FQN: tensor} that were found.
        inside: FQNs of the module that the set averages, if the set is a module of the model itself; else None.
    """
    if key == "module":  # all of the model
        return WeightSet(key, dict(tensors), beside=True)
    wanted = model if inside is None else inside
    reshaped = tuple(n for n, t in tensors.items() if t.shape != model[n].shape)
    lacks = [n for n in wanted if n not in tensors]
    out = {n: tensors[n] for n in model if n in tensors}
    keeps: list[str] = []
    missing: list[str] = []
    for n in lacks:
        twin = next((m for m in (tied.get(n, ""), *tied) if m in tensors and same_bytes(model[n], model[m])), None)
        t = model[n]
        if twin is not None:
            out[n] = tensors[twin]
        elif "float" not in t.dtype or n.rpartition(".")[2] in _BUFFERS or (trained and n not in trained):
            keeps.append(n)
        else:
            missing.append(n)
    out = {n: out[n] for n in model if n in out}
    return WeightSet(key, out, tuple(keeps), tuple(missing), reshaped, inside is not None)


# ---------------------------------------------------------------------------------------------------------- describing


def find_unread_averages(ckpt: Checkpoint) -> dict[str, int | None]:
    """Return {name: bytes, None if unknown} of the files and folders next to a checkpoint that were not read, and
    whose names say that they hold averages of weights."""
    return {r.name: r.bytes for r in ckpt.unread if r.name.endswith(WEIGHT_FILES) and is_average_key(r.name)}


def describe_weight_sets(ckpt: Checkpoint) -> list[dict[str, object]]:
    """Describe the sets of weights that a checkpoint holds in addition to its model, for `Summary.weights`.

    Returns one dict per set: {"key", "tensors": count or None, "bytes": size or None, "what": description, "option":
    argument that selects it}.
    """
    rows: list[tuple[str, int | None, int | None, str]] = []
    sets = find_weight_sets(ckpt) if any(t.component == "model" for t in ckpt.tensors.values()) else {}
    for key, s in sets.items():
        if s.is_whole:
            what = "average" if is_average_key(key) else "weights besides the model"
            what = "the weights that were trained; the model is their average" if key == OF_TRAINING else what
            rows.append((key, len(s.tensors), sum(t.nbytes for t in s.tensors.values()), what))
    if has_schedule_free_optimizer(ckpt):
        try:
            free = find_free_parameters(ckpt)
        except Unsupported:
            free = {}
        if any(of.train_mode for of in free.values()):
            size = sum(of.z.nbytes for of in free.values())
            rows.append(("schedule-free-x", len(free), size, "average, computed of y and z"))
    beside = find_unread_averages(ckpt).items()
    rows += [(name, None, size, "beside the checkpoint, by its name an average") for name, size in beside]
    return [
        {"key": key, "tensors": tensors, "bytes": nbytes, "what": what, "option": argument("weights", key)}
        for key, tensors, nbytes, what in rows
    ]
