"""Names and tensors as `save_pretrained` writes them, from what transformers itself knows; as views, never as data.

transformers v5 keeps some models under other names than the Hub does: experts of a layer are fused into one 3-D
parameter, prefixes moved. `relate_to_hub` asks transformers in a child process (so that torch is never imported here):
the model is built on the meta device, its own `revert_weight_conversion` runs on meta tensors, and every result is a
view whose storage, offset and strides say which part of which parameter it is. The same table read backwards puts Hub
tensors together again. What transformers joins or permutes on the way to the Hub (fused q, k and v; experts whose gate
and up rows alternate) is no view of one parameter: traced_views.py tells what it consists of.

Most architectures need none of that; those in PLAIN are known to have equal names, which a test proves with
transformers, and cost nothing.

`relate_to_hub` can also judge: the same child lets `from_pretrained` load the names and shapes that would be written,
all of them on the meta device, and reports what it misses, does not expect, or finds in another shape.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import Corrupt, Unsafe, Unsupported
from ..extras import require_packages
from ..formats.sandbox import run_in_child
from ..index.axes import AxisRun, Link
from ..printable import shorten_middle
from ..progress import log_step, report_progress
from . import Config

if TYPE_CHECKING:
    import torch

__all__ = [
    "PLAIN",
    "LoadVerdict",
    "Piece",
    "Relation",
    "build_meta_model",
    "find_contradiction",
    "find_hub_modules",
    "list_further_layers",
    "quote_model_type",
    "relate_to_hub",
]

#: model_type of architectures whose parameters have the same names in memory and on the Hub.
PLAIN = frozenset(
    (
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "gemma",
        "gemma2",
        "phi",
        "phi3",
        "granite",
        "olmo",
        "olmo2",
        "starcoder2",
        "stablelm",
        "cohere",
        "smollm3",
        "gpt2",
        "opt",
    )
)


_LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.")


_MOST_LAYERS = 10_000
_MOST_FURTHER = 100


class View(NamedTuple):
    """A tensor that is part of another: offset and strides in its elements."""

    of: str
    shape: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]


class LoadVerdict(NamedTuple):
    """What `from_pretrained` says of some weights. `shapes` are sentences; `strip` is the prefix without which all
    names and shapes are right, None where no prefix does that."""

    model: str
    parameters: int
    missing: list[str]
    unexpected: list[str]
    shapes: list[str]
    strip: str | None

    @property
    def good(self) -> bool:
        """Whether `from_pretrained` would load every weight and needs no other one."""
        return not (self.missing or self.unexpected or self.shapes)


class Relation(NamedTuple):
    """`views` {Hub name: part of a parameter in memory}; `joined` {Hub name that is no such part: [(parameter, how
    elements of the Hub's tensor, the part, stand in the parameter, the whole)]}; `shapes` {parameter: shape}; `tied`
    {dropped: kept}; `together` {Hub name: first one in the same storage when transformers saves}, which its shards do
    not separate; `verdict` and `linear`, the parameters that transformers would quantise, where they were asked for."""

    views: dict[str, View]
    joined: dict[str, list[tuple[str, Link]]]
    shapes: dict[str, tuple[int, ...]]
    tied: dict[str, str]
    together: dict[str, str]
    verdict: LoadVerdict | None = None
    linear: tuple[str, ...] = ()


def relate_to_hub(
    config: dict[str, object],
    tensors: dict[str, tuple[int, ...]] | None,
    judge: bool = False,
    linear: bool = False,
    load: bool = False,
    further: bool = False,
) -> Relation:
    """Ask transformers, in a child process, how the parameters of a model in memory and its tensors on the Hub
    correspond.

    Args:
        config: content of config.json.
        tensors: {name in memory: shape}; None for the model's own list.
        judge: also find out whether the model of `config` loads these tensors (`Relation.verdict`).
        linear: also list the parameters that transformers would quantise (`Relation.linear`).
        load: take `tensors` for {name in files: shape}, where the names may be those of an older transformers or of
            another class of the model; `Relation.joined` is then what `from_pretrained` makes of them, {} if it would
            miss a weight.
        further: add to the model's own list the layers of multi-token prediction that `config` counts, with the names
            and shapes of its last layer.

    Raises:
        MissingPackage: transformers is not installed.
        Unsupported: it does not know the architecture, or computes new values for the Hub instead of renaming.
    """
    require_packages(
        f"asking how the Hub names the weights of model_type {quote_model_type(config)}", "torch", "transformers"
    )
    most = _MOST_LAYERS if tensors is None else min(_MOST_LAYERS, len(tensors))
    layers = config.get("num_hidden_layers", config.get("n_layer"))
    if isinstance(layers, int) and layers > most:  # transformers would build them all
        weights = "" if tensors is None else f" for {len(tensors):,} weights"
        raise Unsupported(
            f"config.json describes {layers:,} layers{weights}; it is that of another model.", code="CKPT0311"
        )
    asked = {"config": config, "tensors": tensors, "judge": judge, "linear": linear, "load": load, "further": further}
    question = json.dumps(asked).encode()
    try:
        answer = json.loads(_ask_child(question))
    except (Corrupt, Unsafe) as e:
        raise Unsupported(
            f"transformers cannot tell the Hub names of model_type {quote_model_type(config)}: {str(e)[:300]}",
            code="CKPT0333",
        ) from None
    views = {k: View(of, tuple(s), o, tuple(st)) for k, (of, s, o, st) in answer["views"].items()}
    verdict = None if answer["verdict"] is None else LoadVerdict(**answer["verdict"])
    shapes = {k: tuple(v) for k, v in answer["shapes"].items()}
    joined = {name: [(of, _parse_link(link)) for of, link in found] for name, found in answer["joined"].items()}
    return Relation(views, joined, shapes, answer["tied"], answer["together"], verdict, tuple(answer["linear"]))


def quote_model_type(config: Mapping[str, object]) -> str:
    """Return the model_type of a config for a message, quoted and in at most 60 characters; it may be of any type."""
    return shorten_middle(repr(config.get("model_type")), 60)


def _parse_link(link: list[Any]) -> Link:
    """Make a `Link` from its fields in JSON."""
    runs, *shapes = link
    return Link(tuple(AxisRun(*r) for r in runs), *map(tuple, shapes))


class Piece(NamedTuple):
    """A module of the Hub whose weight is `rows` rows, from `first` on, of matrix number `matrix` of a parameter."""

    module: str
    matrix: int
    first: int
    rows: int


def find_hub_modules(relation: Relation) -> tuple[dict[str, list[Piece]], dict[str, str]]:
    """Return ({parameter: the modules on the Hub into which it is split, if there are several}, {module in memory: its
    name on the Hub, if that differs}).

    Raises:
        Unsupported: a tensor on the Hub is part of a parameter, but not complete rows of one of its matrices.
    """
    pieces: dict[str, list[Piece]] = {}
    moved: dict[str, str] = {}
    for name, view in relation.views.items():
        whole, module = relation.shapes[view.of], name.rpartition(".")[0]
        if view.shape == whole:
            if view.of != name:
                moved[view.of.rpartition(".")[0]] = module
            continue
        rows, columns = whole[-2:] if len(whole) > 1 else (1, 1)
        if view.shape[1:] != (columns,) or view.strides != (columns, 1):
            raise Unsupported(
                f'"{name}" is neither whole rows of "{view.of}" nor all of it; ckpttool cannot split it.',
                code="CKPT0316",
            )
        matrix, first = divmod(view.offset // max(1, columns), rows)
        pieces.setdefault(view.of, []).append(Piece(name.removesuffix(".weight"), matrix, first, view.shape[0]))
    return pieces, moved


def list_further_layers(config: Config) -> tuple[str, ...]:
    """List the prefixes that names of layers of multi-token prediction have on the Hub, "model.layers.61.".

    They are behind the other layers, and config.json counts them (`num_nextn_predict_layers` of DeepSeek V3 and GLM
    4.5). transformers has no such layers and does not load them; vLLM and SGLang do.

    Args:
        config: config.json.
    """
    first, count = (config.get(k) for k in ("num_hidden_layers", "num_nextn_predict_layers"))
    if not (isinstance(first, int) and isinstance(count, int) and count <= _MOST_FURTHER):
        return ()
    return tuple(f"model.layers.{first + k}." for k in range(count))


def find_contradiction(config: Config, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """Compare the shape of the embedding and the number of layers with a config, without transformers. Return a text on
    why the weights are not those of the model in the config; None if nothing shows that, or if its architecture is not
    in `PLAIN`.

    Args:
        config: content of config.json.
        shapes: {name: shape} of the weights.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in PLAIN:
        return None
    embedding = "wte.weight" if kind == "gpt2" else "embed_tokens.weight"
    of = next((n for n in shapes if n.endswith(embedding)), None)
    if of is None:
        return f'no weight has the name of its embedding, "...{embedding}"'
    size, layers = (
        config.get(a, config.get(b)) for a, b in (("hidden_size", "n_embd"), ("num_hidden_layers", "n_layer"))
    )
    if isinstance(size, int) and "word_embed_proj_dim" not in config and shapes[of][-1:] != (size,):
        return f'"{of}" is {list(shapes[of])}, and a token of the model has {size} numbers'
    here = 1 + max((int(m[1]) for n in shapes for m in _LAYER.finditer(n)), default=-1)
    if isinstance(layers, int) and here != layers:
        return f"the weights have {here} layers, and the model has {layers}"
    return None


@lru_cache(16)
def _ask_child(question: bytes) -> bytes:
    """Send a question to the child process and return its answer. This takes seconds, and one conversion asks the same
    question for its source, its draft and the result, so answers are cached.

    Args:
        question: JSON of {argument of `relate_to_hub`: value}.

    Returns:
        JSON with the fields of a `Relation`.
    """
    log_step("asking transformers for the names and shapes of the model of config.json")
    report_progress("transformers", 0, 1)
    answer = run_in_child("ckpttool.huggingface.hub_names:_compute_relation", "transformers", 0, question)
    report_progress("transformers", 1, 1)
    return answer


def build_meta_model(config_dict: dict[str, Any]) -> Any:
    """Build transformers' model of a config on the meta device, with names and shapes but without weights, and return
    it. To be called in a child process; code next to the weights is never run.

    Args:
        config_dict: content of config.json; the keys for code, kernels and quantisation are removed from this dict.

    Raises:
        ValueError: transformers does not know the model_type, or cannot build the model.
    """
    import torch
    import transformers

    kind = config_dict.get("model_type")
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:  # it would list all that it knows
        raise ValueError(f"the installed transformers, {transformers.__version__}, does not know this model_type")
    # code beside the weights is never imported, kernels and quantizers are never fetched: names do not depend on them
    for key in ("auto_map", "attn_implementation", "_attn_implementation", "quantization_config"):
        config_dict.pop(key, None)
    config = transformers.AutoConfig.for_model(**json.loads(json.dumps(config_dict), object_hook=_parse_float))
    cls = next(
        (getattr(transformers, a) for a in config_dict.get("architectures") or () if hasattr(transformers, a)), None
    )
    if cls is not None and not isinstance(config, cls.config_class):  # from_pretrained goes by the model_type, too
        cls = None
    with torch.device("meta"):
        if cls is not None:
            model = cls._from_config(config)
        else:
            model = transformers.AutoModelForCausalLM.from_config(config)
    return model


def _parse_float(found: dict[str, Any]) -> object:
    """Return the float of an object {"__float__": text}, which transformers writes into config.json for Infinity and
    NaN; any other object unchanged."""
    return float(found["__float__"]) if found.keys() == {"__float__"} else found


def _compute_relation(_: str) -> bytes:
    """Answer a question of `_ask_child`, in the child process: read it from stdin, and return the fields of a
    `Relation` as JSON. The argument is not used.

    Raises:
        ValueError: a tensor on the Hub has computed values, and is not made of parts of parameters.
    """
    import torch
    from transformers.core_model_loading import revert_weight_conversion

    from .traced_views import make_trace

    question = json.loads(sys.stdin.buffer.read())
    model = build_meta_model(question["config"])
    own = {k: tuple(v.shape) for k, v in model.state_dict().items()}
    if question["further"] and (prefixes := list_further_layers(question["config"])):
        last = f"model.layers.{question['config']['num_hidden_layers'] - 1}."
        of_last = {k: s for k, s in own.items() if k.startswith(last)}
        own |= {prefix + k.removeprefix(last): s for prefix in prefixes for k, s in of_last.items()}
    shapes = {k: tuple(v) for k, v in (question["tensors"] or own).items()}
    state = {k: torch.empty(s, device="meta") for k, s in shapes.items()}
    if question["load"]:
        answer = {"views": {}, "joined": _trace_load(model, state), "shapes": own, "tied": {}, "together": {}}
        return json.dumps({**answer, "verdict": None, "linear": ()}).encode()
    by_storage = {v.untyped_storage()._cdata: k for k, v in state.items()}
    try:
        verdict = _judge_loading(model, state) if question["judge"] else None
    except Exception:  # no verdict then; what transformers cannot load this way it may load from files
        verdict = None
    saved = revert_weight_conversion(model, dict(state))
    first: dict[int, str] = {}
    together = {k: o for k, t in saved.items() if (o := first.setdefault(t.untyped_storage()._cdata, k)) != k}
    # the conversion makes its pieces contiguous for the writer; here they must stay views, so that they can be told
    torch.Tensor.contiguous = lambda self, **_: self  # type: ignore[method-assign]
    views: dict[str, object] = {}
    joined: dict[str, Any] = {}
    with make_trace(state) as trace:
        reverted = revert_weight_conversion(model, dict(state))
    for name, t in reverted.items():
        of = by_storage.get(t.untyped_storage()._cdata)
        if of is not None:
            views[name] = (of, tuple(t.shape), t.storage_offset(), t.stride())
        elif (parts := trace.parts_of(t)) is not None:
            shape = tuple(t.shape)
            joined[name] = [(p.of, (p.runs, shape, shapes[p.of], p.at, p.start)) for p in parts]
        else:
            raise ValueError(f"{name} is computed, and not made of parts of parameters")
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    if not isinstance(tied, dict):
        tied = {}
    return json.dumps(
        {
            "views": views,
            "joined": joined,
            "shapes": shapes,
            "tied": dict(tied),
            "together": together,
            "verdict": None if verdict is None else verdict._asdict(),
            "linear": _list_linear_parameters(model) if question["linear"] else (),
        }
    ).encode()


def _trace_load(model: Any, state: dict[str, Any]) -> dict[str, object]:
    """Find out, in the child process, which parameters `from_pretrained` makes of the tensors in files.

    Args:
        model: transformers' model, on the meta device.
        state: {name in the files: meta tensor}.

    Returns:
        {name in the files: [(parameter, fields of the `Link` between the two)]}, for `Relation.joined`; {} where
            `from_pretrained` would miss a weight.
    """
    from transformers.utils import logging

    from .traced_views import make_trace

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # a trace sees its own thread only
    options = {"device_map": "meta", "output_loading_info": True, "ignore_mismatched_sizes": True}
    with make_trace(state) as trace:
        loaded, info = type(model).from_pretrained(None, config=model.config, state_dict=dict(state), **options)
    joined: dict[str, Any] = {}
    for name, t in loaded.state_dict().items() if not info["missing_keys"] and not info["mismatched_keys"] else ():
        for p in trace.parts_of(t) or ():
            link = [r.swapped() for r in p.runs], tuple(state[p.of].shape), tuple(t.shape), p.start, p.at
            joined.setdefault(p.of, []).append((name, link))
    return joined


def _list_linear_parameters(model: torch.nn.Module) -> list[str]:
    """List, in the child process, the parameters that transformers would quantise: weights of linear layers, and of
    experts that are one parameter of three dimensions, [experts, out, in]; but not its output layer."""
    from torch import nn
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    skip = HfQuantizer.get_modules_to_not_convert(model, None, model._keep_in_fp32_modules)
    out: list[str] = []
    for name, module in model.named_modules():
        if not should_convert_module(name, skip):
            continue
        if type(module) is nn.Linear:
            out.append(f"{name}.weight")
        elif name.endswith(".experts") and not getattr(module, "is_transposed", False):
            own = dict(module.named_parameters(recurse=False))
            out += [f"{name}.{n}" for n, p in own.items() if p.ndim == 3 and not any(n.endswith("bias") for n in own)]
    return out


def _judge_loading(model: torch.nn.Module, state: dict[str, Any]) -> LoadVerdict:
    """Find out, in the child process, whether a state can be saved for the Hub and loaded back: as it is, or without a
    prefix in its names. `state` is {name in memory: meta tensor}.

    Raises:
        NotImplementedError: this torch cannot do that with meta tensors.
    """
    found = _load_back(model, state)
    if found.good:
        return found
    parts = next((n.split(".") for n in state if n in found.unexpected), next(iter(state)).split("."))
    for k in range(1, len(parts)):
        prefix = ".".join(parts[:k]) + "."
        short = {n.removeprefix(prefix): t for n, t in state.items()}
        if len(short) == len(state) and _load_back(model, short).good:
            return found._replace(strip=prefix)
    return found


def _load_back(model: Any, state: dict[str, object]) -> LoadVerdict:
    """Have `from_pretrained` load a state, {name in memory: meta tensor}, as it would be saved; return what it says.

    Raises:
        NotImplementedError: this torch cannot do that with meta tensors.
    """
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    shapes: list[str] = []
    missing: list[str] = []
    unexpected: list[str] = []
    try:
        saved = revert_weight_conversion(model, dict(state))
        _, info = type(model).from_pretrained(
            None,
            config=model.config,
            state_dict=saved,
            device_map="meta",
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
        further = list_further_layers(model.config.to_dict())
        missing = sorted(info["missing_keys"])
        unexpected = sorted(n for n in info["unexpected_keys"] if not n.startswith(further))
        shapes = [
            f'"{n}" is {list(mine)}, the model has {list(its)}' for n, mine, its in sorted(info["mismatched_keys"])
        ]
    except NotImplementedError:  # this torch has an operator for no meta tensors: nothing is known of the shapes
        raise
    except RuntimeError as e:  # a conversion of names that takes tensors of other shapes
        shapes = [str(e).splitlines()[0][:200]]
    return LoadVerdict(type(model).__name__, len(model.state_dict()), missing, unexpected, shapes, None)
