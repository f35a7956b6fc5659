"""A model of transformers whose weights are in memory one layer at a time.

    model = StreamedModel(config, dtype, device)
    model.run(side, inputs, sink)          # sink(layer, its outputs), in the order in which layers are computed

The model is built on the meta device, so it takes no memory, and no code beside a checkpoint is run. A layer is a child
of a ModuleList, or another module that holds none: an embedding, a norm, the output layer. Just before its forward its
weights are read, and right after it they are let go. In between a weight is NaN, one number for all its elements: code
may look at its device and dtype at any time, and what is computed with it by mistake is no number.

Buffers that no checkpoint has (inv_freq) are computed by transformers' own initialisation, as from_pretrained does it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...errors import Unsupported, argument
from ...huggingface.hub_names import build_meta_model, relate_to_hub
from .sides import ModelSide

if TYPE_CHECKING:
    import torch

    from .prompts import ModelInputs

__all__ = ["Sink", "StreamedModel", "list_tensors"]

#: Gets (name of a layer, its outputs) when the layer has been computed; "#2" is put behind the name at its second call.
Sink = Callable[[str, "list[torch.Tensor]"], None]

_UNKNOWN = "is no weight of the model"
#: transformers ignores these where older versions saved them.
_NOT_WANTED = re.compile(r"(^|\.)(rotary_emb\.inv_freq|position_ids)$")


@dataclass
class StreamedModel:
    """A model whose parameters are on the meta device but for those of the layer that is computed.

    `layers` {name: {name of a weight that it reads: (module, its attribute, whether it is a buffer)}}; `tied` {name:
    the one that transformers ties it to}; `peak_bytes` is the most that weights took at one time.
    """

    model: Any
    dtype: torch.dtype
    device: torch.device
    layers: dict[str, dict[str, tuple[Any, str, bool]]] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    peak_bytes: int = 0
    _live_bytes: int = 0

    @classmethod
    def of_config(cls, config: dict[str, object], dtype: torch.dtype, device: torch.device) -> StreamedModel:
        """Build the model of a config.json, with its parameters on the meta device.

        Raises:
            Unsupported: transformers does not know the model, or does not say what a buffer holds.
        """
        import torch

        try:
            model = build_meta_model({**config, "dtype": str(dtype).removeprefix("torch."), "use_cache": False})
        except Exception as e:  # whatever transformers raises on a config that it does not know
            what = f"model_type {config.get('model_type')!r}"
            raise Unsupported(
                f"transformers cannot build {what} from config.json: {type(e).__name__}: {e}", code="CKPT0333"
            ) from None
        model.eval()
        tied = getattr(model, "all_tied_weights_keys", None)
        out = cls(model, dtype, torch.device(device), tied=dict(tied) if isinstance(tied, dict) else {})
        out._compute_buffers()
        out._find_layers("", model, set())
        for layer in out.layers:
            out._release_weights(layer)
        return out

    @property
    def wanted(self) -> dict[str, tuple[int, ...]]:
        """The parameters of the model, {name: shape}; without buffers, which can be computed."""
        return {
            n: tuple(module._parameters[k].shape)
            for layer in self.layers.values()
            for n, (module, k, buffer) in layer.items()
            if not buffer
        }

    @property
    def buffers(self) -> set[str]:
        """The names of persistent buffers, which a checkpoint may have."""
        return {n for layer in self.layers.values() for n, place in layer.items() if place[2]}

    @property
    def positions(self) -> int:
        """The largest number of tokens in a prompt, by the model's config; 2**20 where the config has no limit."""
        most = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return most if isinstance(most, int) else 1 << 20

    def name_in(self, side: ModelSide, name: str) -> str | None:
        """Return the name, without "model.", under which a side's checkpoint has a weight of the model.

        That is the weight's own name, or one that it is tied to; None if the checkpoint has none of these.

        Args:
            name: the name of the model's parameter.
        """
        kept = self.tied.get(name, name)
        names = (name, kept, *(n for n, of in self.tied.items() if of == kept))
        return next((n for n in names if f"model.{n}" in side.opened.checkpoint.tensors), None)

    def find_misfit(self, side: ModelSide) -> dict[str, str]:
        """Return {weight: fault} of a side's weights that do not fit the model: "is missing", another shape, or no
        weight of the model. Missing weights come first."""
        wanted, ignored = self.wanted, getattr(self.model, "_keys_to_ignore_on_load_unexpected", None) or ()
        known = {*wanted, *self.buffers, *self.tied}
        out = {n: "is missing" for n in wanted if self.name_in(side, n) is None}
        for n, t in side.tensors.items():
            if n in wanted and t.shape != wanted[n]:
                out[n] = f"is {list(t.shape)}, and the model has {list(wanted[n])}"
            elif n not in known and not _NOT_WANTED.search(n) and not any(re.search(p, n) for p in ignored):
                out[n] = _UNKNOWN
        return self._name_missing_parts(side, out)

    def _name_missing_parts(self, side: ModelSide, misfit: dict[str, str]) -> dict[str, str]:
        """Return `misfit` with the missing Hub tensors named instead of the parameters that consist of them.

        If a part is missing, no parts are joined to parameters, and every parameter seems to be missing.

        Args:
            misfit: {weight: fault}, as `find_misfit` describes it.
        """
        try:
            views = relate_to_hub(side.config, None).views if {"is missing", _UNKNOWN} <= set(misfit.values()) else {}
        except Unsupported:
            return misfit
        if not any(n in side.tensors and view.of != n for n, view in views.items()):
            return misfit
        lacking = {view.of: n for n, view in reversed(views.items()) if n not in side.tensors}
        out = {n: how if lacking[n] == n else f'lacks "{lacking[n]}"' for n, how in misfit.items() if n in lacking}
        return out | {n: how for n, how in misfit.items() if how != "is missing" and n not in views}

    def refuse_misfit(self, side: ModelSide, misfit: dict[str, str]) -> None:
        """Raise an error if the weights of a side do not fit the model.

        Args:
            misfit: what `find_misfit` returned.

        Raises:
            Unsupported: it is not empty.
        """
        if misfit:
            name, how = next(iter(misfit.items()))
            raise Unsupported(
                f"{side.label}: config.json describes a {type(self.model).__name__}, and {len(misfit)} weights are not "
                f'as it has them: "{name}" {how}. Give {argument("config")} the config of this very model.',
                code="CKPT0311",
            )

    def run(self, side: ModelSide, inputs: ModelInputs, sink: Sink) -> torch.Tensor:
        """Run the model on a batch and return its logits on the CPU, in float32; the last hidden states if it has no
        output layer.

        Args:
            side: where the weights are read from.
            inputs: the batch.
            sink: called with (layer, its outputs) after each layer; "#2" follows the layer's name in its second call.

        Raises:
            Unsupported: the model uses a weight outside the layer that it belongs to, or needs other inputs.
            CkpttoolError: a weight cannot be read.
        """
        given = inputs.tensors
        with self.reading_from(side, sink):
            try:
                out = self.model(**self.place(given))
            except (
                TypeError,
                ValueError,
                RuntimeError,
                NotImplementedError,
                AttributeError,
                KeyError,
                IndexError,
            ) as e:
                most, tokens = self.positions, given["input_ids"].shape[1]
                raise Unsupported(
                    f"{type(self.model).__name__} cannot be run layer by layer on {', '.join(given)}: "
                    f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"
                    + (f". A prompt has {tokens:,} tokens, and the model {most:,} positions." if tokens > most else ""),
                    code="CKPT0333",
                ) from e
        logits = getattr(out, "logits", None)
        found: torch.Tensor = (out[0] if logits is None else logits).float().cpu()
        return found

    def place(self, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the arguments of the model's forward, {name: tensor}, on the device of the model;
        floating-point tensors are cast to the model's dtype."""
        return {k: v.to(self.device, self.dtype if v.is_floating_point() else v.dtype) for k, v in given.items()}

    @contextmanager
    def reading_from(self, side: ModelSide, sink: Sink) -> Iterator[None]:
        """Within the `with` block, read the weights of each layer from `side` when the layer is computed, release them
        afterwards, and call `sink` with (layer, its outputs); "#2" follows the layer's name in its second call."""
        import torch

        calls: dict[str, int] = {}
        handles = []

        def before(name: str) -> Any:
            return lambda module, arguments: self._load_weights(side, name)

        def after(name: str, is_layer: bool) -> Any:
            def hook(module: object, arguments: object, output: object) -> None:
                self._release_weights(name)
                if is_layer:
                    calls[name] = calls.get(name, 0) + 1
                    sink(name if calls[name] == 1 else f"{name}#{calls[name]}", list_tensors(output))

            return hook

        for name in self.layers:
            module = self.model.get_submodule(name)
            is_layer = not _has_module_list(module) or _is_module_list_item(self.model, name)
            handles += [
                module.register_forward_pre_hook(before(name)),
                module.register_forward_hook(after(name, is_layer)),
            ]
        try:
            with torch.inference_mode():
                yield
        finally:
            for handle in handles:
                handle.remove()
            for name in self.layers:
                self._release_weights(name)

    def _load_weights(self, side: ModelSide, layer: str) -> None:
        """Read the weights of a layer from a side into the module's parameters and buffers."""
        import torch

        for name, (module, key, buffer) in self.layers[layer].items():
            stored = self.name_in(side, name)
            if stored is None and buffer:
                continue  # as it was computed
            assert stored is not None  # `find_misfit` was asked
            value = side.read(stored)
            # a copy, so that equal weights lie equally in memory and kernels take equal paths
            value = value.to(self.device, self.dtype if value.is_floating_point() else value.dtype, copy=True)
            self._live_bytes += 0 if buffer else value.nbytes
            self.peak_bytes = max(self.peak_bytes, self._live_bytes)
            if buffer:
                module._buffers[key] = value
            else:
                module._parameters[key] = torch.nn.Parameter(value, requires_grad=False)

    def _release_weights(self, layer: str) -> None:
        """Free the weights of a layer: its parameters become expanded tensors of a single NaN."""
        import torch

        for module, key, buffer in self.layers[layer].values():
            if buffer:
                continue
            old = module._parameters[key]
            if old.is_contiguous() and old.device.type != "meta":
                self._live_bytes -= old.nbytes
            value = torch.full((), math.nan, dtype=self.dtype, device=self.device).expand(old.shape)
            module._parameters[key] = torch.nn.Parameter(value, requires_grad=False)

    def _compute_buffers(self) -> None:
        """Compute every buffer with transformers' own initialisation of modules.

        Raises:
            Unsupported: the initialisation leaves a non-persistent buffer unset.
        """
        import torch

        for module in self.model.modules():
            module._is_hf_initialized = False
            for key, value in module._buffers.items():
                if value is not None:
                    module._buffers[key] = torch.full_like(value, _unset_value(value), device=self.device)
        self.model.initialize_weights()
        for name, value in self.model.named_buffers():
            unset = value.isnan() if value.is_floating_point() else value == _unset_value(value)
            if value.dtype != torch.bool and value.numel() and bool(unset.all()) and not self._is_persistent(name):
                raise Unsupported(
                    f'transformers does not say how {type(self.model).__name__} computes "{name}".', code="CKPT0333"
                )

    def _is_persistent(self, name: str) -> bool:
        """Tell whether a buffer is in the state dict."""
        parent, _, key = name.rpartition(".")
        return key not in self.model.get_submodule(parent)._non_persistent_buffers_set

    def _find_layers(self, name: str, module: torch.nn.Module, seen: set[int]) -> None:
        """Add the layers of a module to `layers`: the items of module lists, and submodules without lists. A module
        with a list in it is an entry with the parameters of its own.

        Args:
            name: the module's path.
            seen: ids of the modules that were visited.
        """
        import torch

        if id(module) in seen:
            return
        seen.add(id(module))
        below = f"{name}." if name else ""
        if isinstance(module, torch.nn.ModuleList):
            for key, child in module.named_children():
                self.layers[below + key] = dict(self._list_parameter_places(below + key, child, deep=True))
        elif _has_module_list(module):
            self.layers[name] = dict(self._list_parameter_places(name, module, deep=False))
            for key, child in module.named_children():
                self._find_layers(below + key, child, seen)
        elif any(True for _ in (*module.parameters(), *module.buffers())):
            self.layers[name] = dict(self._list_parameter_places(name, module, deep=True))

    def _list_parameter_places(
        self, name: str, module: torch.nn.Module, deep: bool
    ) -> Iterator[tuple[str, tuple[object, str, bool]]]:
        """Yield (name, (module, attribute, whether it is a buffer)) of the parameters and persistent buffers of a
        module; with `deep`, also of its submodules."""
        for path, inner in module.named_modules(prefix=name) if deep else ((name, module),):
            below = f"{path}." if path else ""
            for key, value in inner._parameters.items():
                if value is not None:
                    yield below + key, (inner, key, False)
            for key, value in inner._buffers.items():
                if value is not None and key not in inner._non_persistent_buffers_set:
                    yield below + key, (inner, key, True)


def list_tensors(output: object) -> list[torch.Tensor]:
    """List the floating-point tensors in the output of a module: a tensor, or nested tuples, lists and dicts."""
    import torch

    if isinstance(output, torch.Tensor):
        return [output] if output.is_floating_point() else []
    inside = output.values() if isinstance(output, dict) else output if isinstance(output, (tuple, list)) else ()
    return [t for x in inside for t in list_tensors(x)]


def _has_module_list(module: torch.nn.Module) -> bool:
    """Tell whether a module is a ModuleList or contains one at any depth."""
    import torch

    return any(isinstance(m, torch.nn.ModuleList) for m in module.modules())


def _is_module_list_item(model: torch.nn.Module, name: str) -> bool:
    """Tell whether the module of this name is an item of a ModuleList."""
    import torch

    return isinstance(model.get_submodule(name.rpartition(".")[0]), torch.nn.ModuleList)


def _unset_value(value: torch.Tensor) -> float | int | bool:
    """Return the value that marks a buffer of this dtype as not yet computed: NaN, False, or the smallest integer."""
    import torch

    if value.is_floating_point():
        return float("nan")
    return False if value.dtype == torch.bool else torch.iinfo(value.dtype).min
