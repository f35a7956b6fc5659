"""maps --derive: a name map that is proposed from two models, and proven by logits where both can be built."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace

from ..errors import RemoteError, Unsupported, UsageError, argument
from ..extras import require_packages
from ..huggingface import Config, maps, model_files
from ..huggingface.model_names import load_config, read_model_names
from ..index.map_derivation import NamedWeight, ProposedMap, propose_map
from ..options import HUB_LAYOUT, CompareRequest, OpenOptions, WriteRequest
from ..printable import count_noun
from ..storage import urls
from .copy.fill import Progress, silent
from .copy.tensor_digests import tensor_digests
from .logits.compare_logits import compare_sides
from .logits.sides import ModelSide, open_side
from .map_choice import NO_MAP
from .opening import OpenCheckpoint, open_checkpoint
from .transform.mapping import apply_map

__all__ = ["DerivedMap", "derive_map"]

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
_HEADS = ("lm_head", "output", "embed_out")
_LIMITS = (
    "names and shapes do not tell the order of rows (rope), whether a square is transposed, or how a weight is scaled",
    "compare logits before you rely on this map",
)


@dataclass
class DerivedMap:
    """A proposed map: its `text`, in which only what is decided is a line; `evidence` {why: weights that it decides};
    `proposed` {weight of A: weight of B} that stay comments; `undecided_a`, `undecided_b` {weight: why}; `logits`, the
    numbers of their comparison, None where none was made; `notes`."""

    text: str
    evidence: dict[str, int]
    proposed: dict[str, str]
    undecided_a: dict[str, str]
    undecided_b: dict[str, str]
    logits: dict[str, object] | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Tell whether the map decides every weight of both models."""
        return not (self.proposed or self.undecided_a or self.undecided_b)

    def headline(self) -> str:
        """Return a line of text: for how many weights the map is decided, and how many are proposed or undecided."""
        counts = {"proposed": len(self.proposed), "in A alone": len(self.undecided_a)}
        counts["in B alone"] = len(self.undecided_b)
        left = ", ".join(f"{n:,} {what}" for what, n in counts.items() if n)
        return f"{count_noun(sum(self.evidence.values()), 'weight')} decided; undecided: {left or 'none'}"


@dataclass
class _Model:
    """A model by its names: its weights, what a map calls it, its config if it has one, whether it holds values, and
    whether its weights are in the order of its modules."""

    weights: list[NamedWeight]
    side: str
    config: Config | None
    has_values: bool
    ordered: bool


def derive_map(
    a: str | os.PathLike[str], b: str | os.PathLike[str], *, prove_logits: bool = False, progress: Progress = silent
) -> DerivedMap:
    """Propose a name map from the names and shapes of two models, and from their bytes if both have weights.

    Args:
        a, b: two checkpoints in any layout; or, for a model without weights, a folder, file or id of the Hub with
            config.json, for which transformers gives names and shapes.
        prove_logits: compare the logits of A, computed with its own config.json, with those computed with B's after
            renaming by the proposed map; if they are equal, all proposals are accepted.
        progress: called with ("digest" or "compare", bytes read, bytes in all).

    Raises:
        UsageError: with `prove_logits`, one of the two has no config.json, or A has no weights.
        MissingPackage: a config needs transformers. CkpttoolError: one of the two cannot be read.
    """
    with ExitStack() as stack:
        opened = [_open_weights_or_none(os.fspath(path), stack) for path in (a, b)]
        left, right = (
            _read_config_model(os.fspath(path)) if one is None else _read_checkpoint_model(one)
            for path, one in zip((a, b), opened, strict=True)
        )
        if prove_logits and (left.config is None or right.config is None or not left.has_values):
            raise UsageError(
                f"{argument('prove_logits', True)}: both models need a config.json, and the first one its weights. "
                "Leave it out, or add what is missing.",
                code="CKPT0216",
            )
        if opened[0] is not None and opened[1] is not None:
            for model, other, one in ((left, right, opened[0]), (right, left, opened[1])):
                _add_digests(model, other, one, progress)
        for one in filter(None, opened):
            one.source.assert_unchanged()
    found = propose_map(left.weights, right.weights, left.ordered and right.ordered)
    sides = (left.side, right.side) if left.side != right.side else (f"{left.side} A", f"{right.side} B")

    def write(what: ProposedMap, notes: Iterable[str]) -> str:
        """Return the text of a map."""
        about = "proposed from the names, shapes and bytes of two models"
        return what.write(sides, (right.config or {}).get("model_type"), about, notes)

    logits, notes = None, list[str]()
    if prove_logits:
        assert right.config is not None
        trial = found.accept_proposals()
        logits, said = _compare_logits(os.fspath(a), write(trial, ()), right.config, progress)
        notes.append(said)
        found = trial if logits["equal"] else found
    if logits is None or not logits["equal"]:
        notes += _LIMITS
    return DerivedMap(
        write(found, notes),
        dict(Counter(why for _, why in found.decided.values())),
        {x: y for x, (y, _) in found.proposed.items()},
        found.left_a,
        found.left_b,
        logits,
        notes,
    )


def _open_weights_or_none(path: str, stack: ExitStack) -> OpenCheckpoint | None:
    """Open the weights of a checkpoint until `stack` closes; None if `path` is a model's config without weights.

    Raises:
        CkpttoolError: it cannot be read.
    """
    if not urls.is_url(path):
        if os.path.isfile(path) and path.endswith(".json"):
            return None
        if not os.path.exists(path) and _HUB_ID.fullmatch(path):
            return None
        names = os.listdir(path) if os.path.isdir(path) else []
        if "config.json" in names and all(map(model_files.is_model_or_trainer_file, names)):
            return None
    opened = open_checkpoint(path, OpenOptions(only=("model",)))
    stack.callback(opened.close)
    opened.locate()
    return opened


def _read_config_model(given: str) -> _Model:
    """Describe the model of a config.json by names and shapes; second names of tied weights are left out.

    Args:
        given: folder, file or id of the Hub, as `load_config` takes it.

    Raises:
        CkpttoolError: there is no config.json, or transformers cannot build the model.
    """
    try:
        config = load_config(given)
    except (RemoteError, Unsupported) as e:  # it has no option of its own here
        raise type(e)(str(e).replace(argument("config", given), given), code=e.code) from None
    found = read_model_names(config)
    weights = [NamedWeight(n, shape) for n, shape in found.shapes.items() if n not in found.tied]
    return _Model(weights, "transformers", config, has_values=False, ordered=True)


def _read_checkpoint_model(opened: OpenCheckpoint) -> _Model:
    """Describe the model of an open checkpoint by names and shapes; an output layer tied to the embedding is left out.

    `ordered` is False if the names are sorted, or in files of the Hub: then their order is not that of the modules.
    """
    ckpt = opened.checkpoint
    of_bytes: dict[tuple[object, ...], str] = {}
    weights = {t.local_name: t for t in ckpt.tensors.values() if t.component == "model"}
    for n, t in sorted(weights.items(), key=lambda row: _is_head(row[0])):
        if of_bytes.setdefault((t.shape, *t.chunks), n) != n and _is_head(n):
            del weights[n]
    names = list(weights)
    config = ckpt.config or model_files.find_model_files(opened.source, None, [])[0]
    is_hub = ckpt.layout == HUB_LAYOUT
    side = "transformers" if is_hub else re.sub(r"[|#\s]+", " ", ckpt.trainer or opened.layout.name).strip()
    rows = [NamedWeight(n, t.shape) for n, t in weights.items()]
    return _Model(rows, side, config, has_values=True, ordered=not is_hub and names != sorted(names))


def _is_head(name: str) -> bool:
    """Tell whether a name is that of an output layer, which models tie to their embedding."""
    return name.removesuffix(".weight").rpartition(".")[2] in _HEADS


def _add_digests(model: _Model, other: _Model, opened: OpenCheckpoint, progress: Progress) -> None:
    """Set the digest of each weight of `model` that has the shape of some weight of `other`, and None for the others;
    equal digests mean equal dtypes and bytes.

    Args:
        opened: the checkpoint that `model` describes, whose tensors are read.
        progress: called with ("digest", bytes read, bytes in all).

    Raises:
        Corrupt, SourceChanged: bytes are missing or damaged.
    """
    shapes = {w.shape for w in other.weights}
    ckpt = opened.checkpoint
    wanted = {w.name: ckpt.tensors[f"model.{w.name}"] for w in model.weights if w.shape in shapes}
    found = tensor_digests(wanted, opened.source, ckpt.files, ckpt.records, progress)
    model.weights = [
        w._replace(digest=f"{wanted[w.name].dtype} {found[w.name]}" if w.name in found else None) for w in model.weights
    ]


def _compare_logits(path: str, text: str, config: Config, progress: Progress) -> tuple[dict[str, object], str]:
    """Compare the logits of a checkpoint with those of the same weights renamed by a map and run by another config.

    Args:
        path: the checkpoint; its own config.json gives the first logits.
        text: the map.
        config: config of the other model.

    Returns:
        (`LogitComparison.summarise()`, a sentence).

    Raises:
        MissingPackage: torch or transformers is not installed. Unsupported: the map does not cover some names, or a
            model cannot be built.
    """
    require_packages("comparing logits", "torch", "transformers")
    a = open_side("A", path, OpenOptions(), WriteRequest(to=HUB_LAYOUT, map=NO_MAP))
    with closing(a.opened):
        ckpt, source = apply_map(a.opened.checkpoint, a.opened.source, maps.load_map(text), config)
        b = ModelSide("B", replace(a.opened, checkpoint=ckpt, source=source), dict(config))
        found = compare_sides(a, b, CompareRequest(), progress)
    if odd := found.misfit_a or found.misfit_b:
        name, how = next(iter(odd.items()))
        return found.summarise(), f'logits could not be compared: "{name}" {how}'
    bound = "" if found.bound is None else f", by rounding at most {found.bound:.3g}"
    return found.summarise(), f"logits with all lines and proposals: {found.headline()}{bound}"
