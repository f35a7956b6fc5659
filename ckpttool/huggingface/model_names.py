"""Names, shapes and order of a Hugging Face model's state dict, from its config.

transformers builds the model on the meta device in a child process, so torch is never imported here.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from ..bounded_json import parse
from ..errors import Corrupt, Unsupported, argument
from ..extras import require_packages
from ..formats.sandbox import run_in_child
from ..storage.source import Source
from . import Config, hub_names, model_files

__all__ = ["ModelNames", "load_config", "read_model_names", "sort_by_module_order"]

Shape = tuple[int, ...]


class ModelNames(NamedTuple):
    """What the state dict of a model holds: `shapes` in its order, `tied` {name: the one before}, `buffers`, the
    modules that transformers never splits (`_no_split_modules`), which auto-wrap policies wrap, and how its plans of
    tensor and expert parallelism divide parameters, {name: style}."""

    shapes: dict[str, Shape]
    tied: dict[str, str]
    buffers: frozenset[str]
    blocks: tuple[str, ...]
    tp_plan: Mapping[str, str] = MappingProxyType({})
    ep_plan: Mapping[str, str] = MappingProxyType({})


def load_config(given: str) -> dict[str, object]:
    """Load the config.json that --config names: in a folder, a file, or of a model id on the Hub.

    Raises:
        Unsupported: there is none, or it has no model_type. RemoteError: the Hub did not answer.
        Corrupt, Unsafe: it is not JSON.
    """
    if not os.path.isdir(given) and not os.path.isfile(given):
        given = model_files.fetch_from_hub(given, ["config.json"])
    folder, name = os.path.split(given) if os.path.isfile(given) else (given, "config.json")
    with Source(folder or ".") as there:
        found = parse(there.read_all(name, 16 << 20), f"{folder}/{name}")
    if not isinstance(found, dict) or "model_type" not in found:
        raise Unsupported(f"{argument('config', given)}: {name} has no model_type.", code="CKPT0311")
    return found


def read_model_names(config: Config) -> ModelNames:
    """Return the names and shapes of a Hugging Face model. A child process builds it on the meta device.

    Raises:
        MissingPackage: transformers is not installed. Unsupported: it does not know the architecture.
    """
    require_packages(
        f"asking for the parameters of model_type {hub_names.quote_model_type(config)} in their order",
        "torch",
        "transformers",
    )
    try:
        answer = json.loads(_ask_child(json.dumps(config).encode()))
    except Corrupt as e:
        raise Unsupported(
            f"transformers cannot build model_type {hub_names.quote_model_type(config)}: {e}", code="CKPT0333"
        ) from None
    return ModelNames(
        {n: tuple(s) for n, s in answer["shapes"].items()},
        answer["tied"],
        frozenset(answer["buffers"]),
        tuple(answer["blocks"]),
        answer["tp_plan"],
        answer["ep_plan"],
    )


T = TypeVar("T")


def sort_by_module_order(tensors: Mapping[str, T], config: Config) -> dict[str, T]:
    """Return the tensors of a model, or of PEFT's adapter for it, in the order of the model's `named_parameters()`.
    `tensors` are {FQN: anything}.

    Raises:
        MissingPackage: transformers is not installed. Unsupported: the config is that of another model.
    """
    order = {name: i for i, name in enumerate(read_model_names(config).shapes)}
    modules = {name.rpartition(".")[0]: i for name, i in order.items()}

    def place(name: str) -> tuple[int, str]:
        """Return where a tensor comes: (number of its parameter, or of the module whose adapter it is of, rest of the
        name, which sorts tensors of one adapter).

        Raises:
            Unsupported: the model has no such parameter or module.
        """
        if name in order:
            return order[name], ""
        inner = name.removeprefix("base_model.model.")
        module, _, rest = inner.partition(".lora_")
        at = (
            order.get(inner.replace(".base_layer.", ".").replace(".original_module.", "."))
            if not rest
            else modules.get(module)
        )
        if at is None:
            raise Unsupported(
                f'The config describes a {config.get("model_type")} model without "{name}", which these weights have. '
                f"Give {argument('config')} the folder or id of the model that was trained.",
                code="CKPT0311",
            )
        return at, rest  # lora_A before lora_B, as PEFT adds them

    return {name: tensors[name] for name in sorted(tensors, key=place)}


@lru_cache(4)
def _ask_child(config: bytes) -> bytes:
    """Send a config (JSON) to the child process, and return the names and shapes of its model (JSON). This takes
    seconds, so answers are cached."""
    return run_in_child("ckpttool.huggingface.model_names:_compute_model_names", "transformers", 0, config)


def _compute_model_names(_: str) -> bytes:
    """Answer `_ask_child`, in the child process: read a config from stdin, and return the fields of `ModelNames` as
    JSON. The argument is not used."""
    model = hub_names.build_meta_model(json.loads(sys.stdin.buffer.read()))
    model.tie_weights()
    first: dict[int, str] = {}
    tied = {n: o for n, p in model.named_parameters(remove_duplicate=False) if (o := first.setdefault(id(p), n)) != n}
    parameters = {n for n, _ in model.named_parameters(remove_duplicate=False)}
    state = model.state_dict()
    whole = set(getattr(model, "_no_split_modules", None) or ())
    return json.dumps(
        {
            "shapes": {n: list(v.shape) for n, v in state.items()},
            "tied": tied,
            "buffers": [n for n in state if n not in parameters],
            "blocks": [n for n, m in model.named_modules() if type(m).__name__ in whole],
            "tp_plan": _match_plan_styles(parameters, getattr(model, "_tp_plan", None)),
            "ep_plan": _match_plan_styles(parameters, getattr(model, "_ep_plan", None)),
        }
    ).encode()


def _match_plan_styles(parameters: Iterable[str], plan: Mapping[str, str] | None) -> dict[str, str]:
    """Return {parameter: style} for the parameters that a parallelism plan of transformers divides.

    Args:
        parameters: names of all parameters.
        plan: {name of a parameter or module, with * for the number of a layer: style}; None if the model has no plan.
    """
    known = plan or {}
    out = {}
    for name in sorted(parameters):
        general = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)
        style = known.get(name) or known.get(general) or known.get(general.rpartition(".")[0])
        if style is not None:
            out[name] = style
    return out
