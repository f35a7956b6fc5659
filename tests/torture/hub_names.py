"""Every architecture of the installed transformers that can be made tiny: do we name its weights as it does?

    python -m tests.torture.hub_names               all of them, some minutes; prints one line each that is not right, and counts
    python -m tests.torture.hub_names NAME ...      classes of models, such as GptOssForCausalLM

A model of random weights is saved by save_pretrained. Then `hub_names` must make the same tensors of its state dict, and,
of the files alone, the state dict that from_pretrained loads. What cannot be built tiny, or does not survive transformers'
own way there and back, is counted apart.
"""

from __future__ import annotations

import copy
import io
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file

from ckpttool.huggingface import hub_names
from ckpttool.index.axes import Link

_MOST = 30_000_000  # parameters
_KINDS = (
    "CAUSAL_LM",
    "IMAGE_TEXT_TO_TEXT",
    "MULTIMODAL_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "MASKED_LM",
)  # of the auto classes; then the bare model
#: Keys of a config without which the default is right for two layers.
_DROPPED = {"per_layer_config", "out_features", "stage_names", "out_indices", "pruned_heads", "architectures"}
_AT_MOST = {
    "vocab": 131, "kv_heads": 2, "key_value_heads": 2, "first_k_dense": 1, "moe_layer_start": 1, "n_group": 1, "lora_rank": 8,
    "topk_group": 1, "per_tok": 2, "top_k": 2, "topk": 2, "experts": 4, "heads": 4, "n_head": 4, "layers": 2, "n_layer": 2, "depth": 2,
    "max_position": 64, "n_positions": 64, "image_size": 16, "patch_size": 4,
}  # fmt: skip
_WIDE = ("hidden", "intermediate", "d_model", "ffn", "embd", "embed", "d_ff", "dim", "inner", "width", "mlp")


def shrink(key: str, value: Any, width: int) -> Any:
    """A value of a config, small."""
    if isinstance(value, dict):
        return {k: shrink(k, v, width) for k, v in value.items() if k not in _DROPPED}
    if isinstance(value, list) and (key.endswith("layer_types") or (len(value) > 2 and "intermediate" in key)):
        kinds = list(dict.fromkeys(value))
        return (kinds * 2)[-2:] if key == "layer_types" else value[:2] if key.endswith("layer_types") else [32, 32]
    if isinstance(value, list) and len(value) > 8:  # an entry for each layer
        return value[:2]
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if "token" in key and ("id" in key or "index" in key):
        return min(value, 5)
    most = next((n for word, n in _AT_MOST.items() if word in key.lower()), None)
    if most is None and "head_dim" in key.lower():
        most = width // 4
    if most is None and any(word in key.lower() for word in _WIDE):
        most = width * (2 if "inter" in key or "ff" in key else 1)
    return value if most is None else min(value, most)


def build(name: str) -> Any:
    """A tiny model of a class of transformers, with random weights.

    Raises:
        RuntimeError: no size of three fits.
    """
    import transformers

    cls = getattr(transformers, name)
    for width in (16, 64, 32):
        try:
            config = cls.config_class.from_dict(shrink("", cls.config_class().to_dict(), width))
            with torch.device("meta"):
                if sum(p.numel() for p in cls._from_config(copy.deepcopy(config)).parameters()) > _MOST:
                    continue
            torch.manual_seed(0)
            model = cls._from_config(config)
        except Exception as e:
            why = f"{type(e).__name__}: {str(e)[:150]}"
            continue
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn(p.shape))
        model.tie_weights()
        model.config.architectures = [name]
        return model
    raise RuntimeError(locals().get("why", "it is too large"))


def ask(config: dict[str, Any], tensors: dict[str, tuple[int, ...]] | None, load: bool) -> hub_names.Relation:
    """What `relate_to_hub` returns, asked in this process."""

    def here(function: str, argument: str, work_bytes: int, text: bytes) -> bytes:
        kept, sys.stdin = (torch.Tensor.contiguous, sys.stdin), SimpleNamespace(buffer=io.BytesIO(text))  # type: ignore[assignment]
        try:
            return hub_names._compute_relation(argument)
        finally:
            torch.Tensor.contiguous, sys.stdin = kept  # type: ignore[method-assign]

    child, hub_names.run_in_child = hub_names.run_in_child, here
    try:
        return hub_names.relate_to_hub(config, tensors, load=load)
    finally:
        hub_names.run_in_child = child


def follow(link: Link, part: torch.Tensor, whole: torch.Tensor, to_whole: bool) -> None:
    """Copies the elements of a link from one tensor to the other."""
    size = [r.size for r in link.runs]
    at = link.part_start or (0,) * part.ndim
    a = part.as_strided(
        size,
        [r.step * part.stride(r.dim) for r in link.runs],
        sum(i * s for i, s in zip(at, part.stride(), strict=True)),
    )
    b = whole.as_strided(
        size,
        [r.other_step * whole.stride(r.other_dim) for r in link.runs],
        sum(i * s for i, s in zip(link.start, whole.stride(), strict=True)),
    )
    (b if to_whole else a).copy_(a if to_whole else b)


def unset(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of what no weight is."""
    return torch.full(shape, float("nan") if dtype.is_floating_point else -1, dtype=dtype)


def save_as_ours(relation: hub_names.Relation, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of the Hub that a relation makes of a state dict."""
    state = {n: t.contiguous() for n, t in state.items()}
    out = {n: state[v.of].as_strided(v.shape, v.strides, v.offset) for n, v in relation.views.items()}
    for name, parts in relation.joined.items():
        out[name] = unset(parts[0][1].part_shape, state[parts[0][0]].dtype)
        for of, link in parts:
            follow(link, out[name], state[of], to_whole=False)
    return out


def load_as_ours(relation: hub_names.Relation, files: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state dict that a relation, asked with `load`, makes of the tensors of files; those that it does not know keep
    their names."""
    out = {n: t for n, t in files.items() if n not in relation.joined}
    for name, parts in relation.joined.items():
        for of, link in parts:
            whole = out.setdefault(of, unset(relation.shapes[of], files[name].dtype))
            follow(link, files[name].contiguous(), whole, to_whole=True)
    return out


def judge(name: str) -> tuple[str, str]:
    """(right, wrong, not built, or not transformers' own), and what is wrong, of a class of transformers."""
    try:
        model = build(name)
    except Exception as e:
        return "not built", str(e)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = json.loads((Path(folder) / "config.json").read_text())
        files: dict[str, torch.Tensor] = {}
        for f in Path(folder).glob("*.safetensors"):
            files |= load_file(f)
        try:
            back, said = type(model).from_pretrained(folder, output_loading_info=True)
        except Exception as e:
            return "not transformers' own", f"{type(e).__name__}: {str(e)[:150]}"
    state, theirs = model.state_dict(), back.state_dict()
    if said["missing_keys"] or said["unexpected_keys"] or any(not torch.equal(state[n], theirs[n]) for n in state):
        return "not transformers' own", "it loads other weights than it saved"
    ours = save_as_ours(ask(copy.deepcopy(config), None, False), state)
    wrong = [f"saves {n}" for n, t in files.items() if n not in ours or not torch.equal(ours[n], t)]
    wrong += [
        f"adds {n}" for n in ours.keys() - files.keys() if not any(torch.equal(ours[n], t) for t in files.values())
    ]
    loaded = load_as_ours(ask(config, {n: tuple(t.shape) for n, t in files.items()}, True), files)
    here = {theirs[n].data_ptr() for n in loaded if n in theirs}
    for n, t in theirs.items():
        if n not in loaded and t.data_ptr() not in here:
            wrong.append(f"does not load {n}")
        elif n in loaded and not torch.equal(loaded[n].to(t.dtype), t):
            wrong.append(f"loads {n}")
    return ("wrong" if wrong else "right"), "; ".join(wrong[:3])


def main() -> None:
    """All architectures, or those that were named."""
    from transformers.models.auto import modeling_auto
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tables = [getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES", {}) for kind in _KINDS]
    of_type: dict[str, str] = {}
    for table in (*tables, modeling_auto.MODEL_MAPPING_NAMES):
        for kind, names in table.items():
            of_type.setdefault(kind, names if isinstance(names, str) else names[0])
    counts: Counter[str] = Counter()
    for name in sys.argv[1:] or sorted(set(of_type.values())):
        try:
            result, why = judge(name)
        except Exception as e:
            result, why = "wrong", f"{type(e).__name__}: {str(e)[:150]}"
        counts[result] += 1
        if result != "right" or sys.argv[1:]:
            print(f"{name}: {result} {why}", flush=True)
    print(dict(counts))
    sys.exit(counts["wrong"] > 0)


if __name__ == "__main__":
    main()
