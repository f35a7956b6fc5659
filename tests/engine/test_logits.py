"""compare: equal models give equal bits, whatever their layouts; each fault is named with the first layer that it changes, and what
was done to a weight. transformers itself is the judge of what a model computes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import ckpttool_here
from peers import FIXTURES
from safetensors.torch import load_file, save_file

import ckpttool
from ckpttool.engine.logits import compare_logits, streaming
from ckpttool.engine.logits.proof import LogitProof
from ckpttool.engine.logits.sides import open_side
from ckpttool.errors import Differs, NoSpace, Unsupported, UsageError
from ckpttool.options import OpenOptions, WriteRequest

transformers = pytest.importorskip("transformers")

WEIGHTS = "model.safetensors"
Tensors = dict[str, torch.Tensor]
SIZES: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip


def llava() -> Any:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 28,
    }
    return LlavaForConditionalGeneration(LlavaConfig(
        vision_config=CLIPVisionConfig(**vision, patch_size=14), text_config=LlamaConfig(**SIZES), image_token_index=130,
        vision_feature_layer=-1,
    ))  # fmt: skip


def qwen2_vl() -> Any:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2}
    return transformers.Qwen2VLForConditionalGeneration(transformers.Qwen2VLConfig(
        text_config={**SIZES, "rope_parameters": rope}, vision_config=vision, image_token_id=130, video_token_id=129,
        vision_start_token_id=128, vision_end_token_id=127,
    ))  # fmt: skip


def of(model: str, config: str, **more: Any) -> Callable[[], Any]:
    """A model of transformers, by the names of its class and config."""
    return lambda: getattr(transformers, model)(getattr(transformers, config)(**{**SIZES, **more}))


EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": of("LlamaForCausalLM", "LlamaConfig"),
    "llama tied": of("LlamaForCausalLM", "LlamaConfig", tie_word_embeddings=True, num_hidden_layers=2),
    "qwen2": of("Qwen2ForCausalLM", "Qwen2Config"),
    "mixtral": of("MixtralForCausalLM", "MixtralConfig", **EXPERTS),
    "qwen3 moe": of(
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig", **EXPERTS, head_dim=8, moe_intermediate_size=24, norm_topk_prob=True
    ),
    "gpt2": of("GPT2LMHeadModel", "GPT2Config", n_embd=32, n_layer=3, n_head=4, n_positions=128),
    "t5": of("T5ForConditionalGeneration", "T5Config", d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4),
    "llava": llava,
    "qwen2 vl": qwen2_vl,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    yield tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def saved(folder: Path) -> Callable[[str], Path]:
    @cache
    def save(name: str) -> Path:
        """A model with weights that differ everywhere, as save_pretrained writes it."""
        torch.manual_seed(0)
        model = MODELS[name]()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p) * 0.05)
        model.save_pretrained(folder / name)
        return folder / name

    return save


def changed(base: Path, to: Path, change: Callable[[Tensors, dict[str, Any]], None]) -> Path:
    """A copy of a folder whose weights and config were changed."""
    shutil.copytree(base, to)
    tensors, config = load_file(to / WEIGHTS), json.loads((to / "config.json").read_text())
    change(tensors, config)
    save_file({n: t.clone().contiguous() for n, t in tensors.items()}, to / WEIGHTS, metadata={"format": "pt"})
    (to / "config.json").write_text(json.dumps(config))
    return to


# -------------------------------------------------------------------------------------------------------- equal models


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_streamed_model_has_the_logits_of_from_pretrained(name: str, saved: Callable[[str], Path]) -> None:
    path = saved(name)
    side = open_side("A", path, OpenOptions(), WriteRequest(to="hf"))
    with side.opened:
        streamed = streaming.StreamedModel.of_config(side.config, torch.float32, torch.device("cpu"))
        inputs = compare_logits.make_inputs(streamed, side, None, 0)
        layers: list[str] = []
        got = streamed.run(side, inputs, lambda layer, _: layers.append(layer))
    model = type(MODELS[name]()).from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        assert torch.equal(got, model(**inputs.tensors).logits)
    assert ("pixel_values" in inputs.tensors) == (name in ("llava", "qwen2 vl"))
    assert len(layers) > 4 and streamed.peak_bytes < sum(p.nbytes for p in model.parameters()) / 2


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_equal_models_give_equal_bits_in_other_layouts(name: str, saved: Callable[[str], Path], tmp_path: Path) -> None:
    path = saved(name)
    ckpttool.convert(path, tmp_path / "dcp", to="dcp", world_size=3)
    ckpttool.convert(path, tmp_path / "full.pt")
    for one in ("dcp", "full.pt"):
        found = ckpttool.compare(path, tmp_path / one, config=str(path))
        assert found.equal and found.largest == found.kl_max == 0 and found.bound is None
        assert found.layers and not any(row.relative for row in found.layers)
        assert found.weights > 10 and not found.weights_differ and found.top1_equal == found.tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("to", ["zero3", "fsdp1", "universal", "torch_checkpointing", "audit"])
def test_llama_gives_equal_bits_in_every_layout(to: str, saved: Callable[[str], Path], tmp_path: Path) -> None:
    path, out = saved("llama"), tmp_path / ("out.tar.zst" if to == "audit" else "out")
    wrap = {"wrap": ["model.layers.*"]} if to == "fsdp1" else {}
    ranks = {} if to in ("universal", "audit") else {"world_size": 3}
    ckpttool.convert(path, out, to=to, config=str(path), drop=True, **wrap, **ranks)  # type: ignore[arg-type]
    found = ckpttool.compare(out, path, config=str(path), **({"like": str(path)} if to == "fsdp1" else {}))
    assert found.equal and found.largest == 0 and not found.weights_differ


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["mcore-llama/ckpt/iter_0000003", "mcore-mixtral/ckpt/iter_0000003", "titan-llama3/ckpt", "tune-qwen2/epoch_0"],
)
def test_names_of_another_program_go_through_its_map(name: str, tmp_path: Path) -> None:
    source, config = FIXTURES / "maps" / name, str(FIXTURES / "maps" / name.partition("/")[0])
    ckpttool.convert(source, tmp_path / "hf", to="hf", config=config)
    found = ckpttool.compare(source, tmp_path / "hf", config=config)
    assert found.equal and found.largest == 0 and found.tokens > 20


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_merged_adapter_is_its_base_with_the_adapter(saved: Callable[[str], Path], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = transformers.LlamaForCausalLM.from_pretrained(saved("llama"))
    model = peft.get_peft_model(
        base, peft.LoraConfig(r=3, lora_alpha=7, target_modules=["q_proj"], task_type="CAUSAL_LM")
    )
    for n, p in model.named_parameters():
        if "lora_" in n:
            torch.nn.init.normal_(p, std=0.3)
    model.save_pretrained(tmp_path / "adapter")
    ckpttool.adapter_merge(saved("llama"), tmp_path / "merged", adapter=tmp_path / "adapter")
    found = ckpttool.compare(saved("llama"), tmp_path / "merged", adapter_a=tmp_path / "adapter")
    assert found.equal and found.largest == 0
    bare = ckpttool.compare(saved("llama"), tmp_path / "merged")
    assert not bare.equal and bare.first_layer == "model.layers.0"
    assert [c.name for c in bare.causes] == ["model.layers.0.self_attn.q_proj.weight"]


@pytest.mark.slow
def test_codes_are_computed_as_the_numbers_that_they_stand_for(saved: Callable[[str], Path], tmp_path: Path) -> None:
    def quantise(tensors: Tensors, config: dict[str, Any]) -> None:
        for n in [n for n in tensors if n.endswith("_proj.weight")]:
            scale = tensors[n].abs().max() / 448
            tensors[n] = (tensors[n] / scale).to(torch.float8_e4m3fn)
            tensors[n + "_scale_inv"] = scale.reshape(1, 1)
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}

    def halve(tensors: Tensors, config: dict[str, Any]) -> None:
        tensors["model.layers.1.mlp.down_proj.weight_scale_inv"] /= 2

    coded = changed(saved("llama"), tmp_path / "coded", quantise)
    ckpttool.convert(coded, tmp_path / "plain", to="hf", dequantize=["*"])
    found = ckpttool.compare(coded, tmp_path / "plain")
    assert found.equal and found.largest == 0
    wrong = ckpttool.compare(coded, changed(coded, tmp_path / "wrong", halve))
    assert not wrong.equal and wrong.first_layer == "model.layers.1"
    assert [c.how for c in wrong.causes] == ["holds A's values times 0.5"]
    rounded = ckpttool.compare(saved("llama"), coded, max_kl=0.1)  # what the codes have lost
    assert rounded.equal and rounded.kl_max is not None and rounded.kl_max > 1e-7
    assert not ckpttool.compare(saved("llama"), coded, max_kl=rounded.kl_max / 2).equal
    with pytest.raises(UsageError, match="at least 0"):  # no number is below NaN
        ckpttool.compare(saved("llama"), coded, max_kl=float("nan"))


@pytest.mark.slow
def test_an_average_is_compared_as_the_model_and_proven(saved: Callable[[str], Path], tmp_path: Path) -> None:
    path = saved("llama")
    model = load_file(path / WEIGHTS)
    torch.save({"model": model, "ema": {n: t * 0.9 for n, t in model.items()}}, tmp_path / "x.pt")
    out = tmp_path / "hf"
    done = ckpttool.convert(tmp_path / "x.pt", out, to="hf", config=str(path), weights="ema", prove_logits=True)
    assert done.proof and done.proof["largest"] == 0
    assert ckpttool.compare(tmp_path / "x.pt", out, config=str(path), weights="ema").largest == 0
    assert not ckpttool.compare(tmp_path / "x.pt", out, config=str(path)).equal
    words = ("average", path, out, tmp_path / "mean", "--to", "hf", "--config", path, "--prove-logits")
    assert "logits differ from the source's by 0" in ckpttool_here(*words).stderr
    mean = load_file(tmp_path / "mean" / WEIGHTS)["model.norm.weight"]
    assert torch.allclose(mean, model["model.norm.weight"] * 0.95)


# --------------------------------------------------------------------------------------------------------------- faults


def permuted(w: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of q or k from halves to interleaved pairs, as transformers' and Meta's rope want them."""
    return w.view(heads, 2, w.shape[0] // heads // 2, *w.shape[1:]).transpose(1, 2).reshape(w.shape)


def swap(a: str, b: str) -> Callable[[Tensors, dict[str, Any]], None]:
    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        tensors[a], tensors[b] = tensors[b], tensors[a]

    return change


def put(name: str, new: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors, dict[str, Any]], None]:
    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        tensors[name] = new(tensors[name])

    return change


def configured(**values: Any) -> Callable[[Tensors, dict[str, Any]], None]:
    return lambda tensors, config: config.update(values)


def rope(tensors: Tensors, config: dict[str, Any]) -> None:
    for n, heads in (("q", 4), ("k", 2)):
        name = f"model.layers.1.self_attn.{n}_proj.weight"
        tensors[name] = permuted(tensors[name], heads)


def layers(source: str, to: str, *, both: bool = False) -> Callable[[Tensors, dict[str, Any]], None]:
    """Put the weights of one layer into another; with `both`, the other way round, too."""

    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        before = dict(tensors)
        for a, b in ((source, to), (to, source))[: 1 + both]:
            for n in before:
                if n.startswith(b + ".") and n.replace(b, a) in before:
                    tensors[n] = before[n.replace(b, a)]

    return change


def blocks(w: torch.Tensor) -> torch.Tensor:
    """Each group of 16 numbers multiplied by the square of its largest one: divided by the scale, where to multiply."""
    parts = w.view(w.shape[0], -1, 16)
    return (parts * parts.abs().amax(-1, keepdim=True) ** 2).view(w.shape)


def experts(tensors: Tensors, config: dict[str, Any]) -> None:
    for n in list(tensors):
        if ".layers.1." in n and ".experts.1." in n:
            swap(n, n.replace(".experts.1.", ".experts.3."))(tensors, config)


def gate_and_up(layer: str, gate: str, up: str) -> Callable[[Tensors, dict[str, Any]], None]:
    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        for n in [n for n in tensors if n.startswith(layer) and n.endswith(gate)]:
            swap(n, n.removesuffix(gate) + up)(tensors, config)

    return change


def untied(tensors: Tensors, config: dict[str, Any]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * 1.5


ROPE = {"rope_type": "default", "rope_theta": 5e5}


@dataclass
class Fault:
    """A fault, the first layer that it changes, and what is said: names of causes, and a pattern of the first text."""

    model: str
    change: Callable[[Tensors, dict[str, Any]], None]
    layer: str
    names: list[str]
    how: str


L1 = "model.layers.1"
FAULTS: dict[str, Fault] = {
    "rope": Fault("llama", rope, L1, [f"{L1}.self_attn.{n}_proj.weight" for n in "qk"], "halves to interleaved pairs"),
    "k and v": Fault(
        "llama", swap(f"{L1}.self_attn.k_proj.weight", f"{L1}.self_attn.v_proj.weight"), L1,
        [f"{L1}.self_attn.{n}_proj.weight" for n in "kv"], r'exchanged with ".*v_proj',
    ),
    "q and k of a fused weight": Fault(
        "gpt2", put("transformer.h.1.attn.c_attn.weight", lambda w: torch.cat([w[:, 32:64], w[:, :32], w[:, 64:]], 1)),
        "transformer.h.1", ["transformer.h.1.attn.c_attn.weight"], r"columns 0:32 and 32:64 exchanged \(q and k\)",
    ),
    "gate and up": Fault(
        "llama", gate_and_up(L1, "gate_proj.weight", "up_proj.weight"), L1,
        [f"{L1}.mlp.gate_proj.weight", f"{L1}.mlp.up_proj.weight"], 'exchanged with ".*up_proj',
    ),
    "gate and up of experts": Fault(
        "mixtral", gate_and_up(L1, "w1.weight", "w3.weight"), L1, [f"{L1}.mlp.experts.gate_up_proj"],
        r"in 4 experts of 4, the first of them 0: it has rows 0:48 and 48:96 exchanged \(gate and up\)",
    ),
    "head of an untied model": Fault(
        "llama", lambda t, _: t.update({"lm_head.weight": t["model.embed_tokens.weight"]}), "lm_head", ["lm_head.weight"],
        'holds the values of A\'s "model.embed_tokens.weight"',
    ),
    "head of a tied model": Fault("llama tied", untied, "lm_head", ["lm_head.weight"], 'is tied to "model.embed_tokens.weight" in A'),
    "eps": Fault("llama", configured(rms_norm_eps=1e-5), "model.layers.0", ["rms_norm_eps"], "is 1e-06 in A's .* and 1e-05 in B's"),
    "theta": Fault(
        "llama", configured(rope_parameters=ROPE), "model.rotary_emb", ["rope_parameters.rope_theta"], "is 10000.0 .* and 500000.0"
    ),
    "activation": Fault("qwen2", configured(hidden_act="gelu"), "model.layers.0", ["hidden_act"], "is 'silu' .* and 'gelu'"),
    "top k of experts": Fault(
        "qwen3 moe", configured(norm_topk_prob=False), "model.layers.0", ["norm_topk_prob"], "is True .* and False"
    ),
    "expert moved": Fault(
        "mixtral", experts, L1, [f"{L1}.mlp.experts.gate_up_proj", f"{L1}.mlp.experts.down_proj"],
        "expert 1 holds A's expert 3, expert 3 holds A's expert 1",
    ),
    "router": Fault(
        "qwen3 moe", put(f"{L1}.mlp.gate.weight", lambda w: w[[2, 3, 1, 0]]), L1, [f"{L1}.mlp.gate.weight"], "rows in another order",
    ),
    "stale layer": Fault("llama", layers(L1, "model.layers.2"), "model.layers.2", ["model.layers.2"], "weights of A's model.layers.1, all 9"),
    "layers exchanged": Fault("llama", layers("model.layers.2", L1, both=True), L1, [L1], "the two are exchanged"),
    "layer of t5": Fault("t5", layers("encoder.block.0", "encoder.block.1"), "encoder.block.1", ["encoder.block.1"], "weights of A's encoder.block.0"),
    "one scale for all": Fault("llama", put(f"{L1}.mlp.down_proj.weight", lambda w: w / 448), L1, [f"{L1}.mlp.down_proj.weight"], "values times 0.0022"),
    "a scale for each row": Fault(
        "llama", put(f"{L1}.mlp.up_proj.weight", lambda w: w * w.abs().amax(1, keepdim=True)), L1, [f"{L1}.mlp.up_proj.weight"],
        "times a factor for each row",
    ),
    "a scale for each block": Fault(
        "llama", put(f"{L1}.mlp.up_proj.weight", blocks), L1, [f"{L1}.mlp.up_proj.weight"], "times a factor for each group of 16"
    ),
    "transposed": Fault("llama", put(f"{L1}.self_attn.o_proj.weight", lambda w: w.T), L1, [f"{L1}.self_attn.o_proj.weight"], "holds A's values transposed"),
    "of another shape": Fault(
        "llama", put(f"{L1}.mlp.up_proj.weight", lambda w: w.T), L1, [f"{L1}.mlp.up_proj.weight"],
        r"is \[32, 48\], and the model has \[48, 32\], in B",
    ),
    "norm of zeros": Fault("llama", put("model.norm.weight", torch.zeros_like), "model.norm", ["model.norm.weight"], "is all zeros"),
    "norm minus one": Fault("llama", put(f"{L1}.input_layernorm.weight", lambda w: w - 1), L1, [f"{L1}.input_layernorm.weight"], "minus 1"),
    "bias of zeros": Fault("qwen2", put(f"{L1}.self_attn.q_proj.bias", torch.zeros_like), L1, [f"{L1}.self_attn.q_proj.bias"], "is all zeros"),
    "bias dropped": Fault(
        "qwen2", lambda t, _: t.__delitem__(f"{L1}.self_attn.q_proj.bias"), L1, [f"{L1}.self_attn.q_proj.bias"], "is missing, in B"
    ),
    "rounded": Fault(
        "llama", put(f"{L1}.mlp.up_proj.weight", lambda w: w.bfloat16().float()), L1, [f"{L1}.mlp.up_proj.weight"],
        "exactly A's values rounded to bfloat16",
    ),
    "positions shifted": Fault(
        "gpt2", put("transformer.wpe.weight", lambda w: torch.roll(w, 1, 0)), "transformer.wpe", ["transformer.wpe.weight"], "holds A's values shifted by 1 row|rows in another order",
    ),
    "projector": Fault(
        "llava", put("multi_modal_projector.linear_1.weight", torch.t), "model.multi_modal_projector",
        ["model.multi_modal_projector.linear_1.weight"], "transposed",
    ),
    "vision tower": Fault(
        "llava", layers("vision_tower.encoder.layers.0", "vision_tower.encoder.layers.1"), "model.vision_tower.encoder.layers.1", ["model.vision_tower.encoder.layers.1"], "A's model.vision_tower.encoder.layers.0",
    ),
    "merger of patches": Fault(
        "qwen2 vl", put("visual.merger.mlp.2.weight", lambda w: -w), "model.visual.merger", ["model.visual.merger.mlp.2.weight"], "opposite sign",
    ),
    "cross-attention": Fault(
        "t5", put("decoder.block.1.layer.1.EncDecAttention.k.weight", lambda w: w.flip(0)), "decoder.block.1",
        ["decoder.block.1.layer.1.EncDecAttention.k.weight"], "rows in another order",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_with_the_first_layer_that_it_changes(
    name: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    fault = FAULTS[name]
    base = saved(fault.model)
    found = ckpttool.compare(base, changed(base, tmp_path / "b", fault.change), config=str(base))
    assert not found.equal
    assert (found.first_layer, [c.name for c in found.causes]) == (fault.layer, fault.names), str(found)
    assert re.search(fault.how, found.causes[0].how), found.causes[0].how
    if found.layers:
        first = next(k for k, row in enumerate(found.layers) if row.exceeds)
        assert found.layers[first].name == fault.layer and not any(row.relative for row in found.layers[:first])
        assert found.largest is not None and found.bound is not None and found.largest > found.bound
    json.dumps(found.to_json(), allow_nan=False)


def test_all_faults_that_are_promised_are_planted() -> None:
    assert len(FAULTS) >= 20 and {f.model for f in FAULTS.values()} >= {
        "llama",
        "mixtral",
        "qwen3 moe",
        "gpt2",
        "t5",
        "llava",
    }


@pytest.mark.slow
def test_what_rounding_does_is_measured_and_counts_as_equal(saved: Callable[[str], Path], tmp_path: Path) -> None:
    def nudge(tensors: Tensors, config: dict[str, Any]) -> None:
        tensors["model.norm.weight"][3] += 1e-7

    found = ckpttool.compare(saved("llama"), changed(saved("llama"), tmp_path / "b", nudge))
    assert found.equal and found.largest and found.bound and found.largest < found.bound < 1e-4
    assert found.bound == 10 * max(n.largest for n in found.noise) and "eager" in found.noise[0].what
    assert found.first_layer == "model.norm" and found.weights_differ == ["model.norm.weight"]


def test_kernels_that_overflow_set_no_bound(saved: Callable[[str], Path], tmp_path: Path) -> None:
    """eager attention in fp16 gives NaN here, sdpa does not: a bound of infinity would make all models equal."""

    def enlarge(tensors: Tensors, config: dict[str, Any]) -> None:
        tensors.update({n: t * 2000 for n, t in tensors.items() if "q_proj" in n or "k_proj" in n})

    a = changed(saved("llama"), tmp_path / "a", enlarge)
    found = ckpttool.compare(a, changed(a, tmp_path / "b", put("model.norm.weight", lambda w: w * 2)), dtype="fp16")
    assert not found.equal and found.bound is not None and found.bound < 1
    assert found.notes == [
        "A overflows float16 with eager attention for sdpa, which therefore says nothing about rounding"
    ]
    assert not any("eager" in n.what for n in found.noise)


@pytest.mark.slow
def test_a_tensor_of_an_expert_that_is_missing_is_named_as_in_the_file(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    name = "model.layers.1.block_sparse_moe.experts.2.w2.weight"
    b = changed(saved("mixtral"), tmp_path / "b", lambda t, c: t.pop(name))
    found = ckpttool.compare(saved("mixtral"), b)
    assert found.misfit_b == {"model.layers.1.mlp.experts.down_proj": f'lacks "{name}"'} and not found.misfit_a
    assert found.first_layer == "model.layers.1" and not found.equal


@pytest.mark.slow
def test_a_cap_of_the_logits_is_named_though_no_layer_differs(tmp_path: Path) -> None:
    of("Gemma2ForCausalLM", "Gemma2Config", head_dim=8)().save_pretrained(tmp_path / "a")
    b = changed(tmp_path / "a", tmp_path / "b", configured(final_logit_softcapping=0.01))
    found = ckpttool.compare(tmp_path / "a", b)
    assert not found.equal and found.first_layer is None and "every layer gives equal numbers" in found.notes[0]
    assert found.config == {"final_logit_softcapping": (30.0, 0.01)} and "final_logit_softcapping" in str(found)


@pytest.mark.slow
def test_tied_weights_may_lie_under_any_of_their_names(saved: Callable[[str], Path], tmp_path: Path) -> None:
    """Which of them a file has depends on the program that wrote it; from_pretrained takes each."""
    for model, kept, other in (
        ("t5 tied", "shared.weight", "decoder.embed_tokens.weight"),
        ("llama tied", "model.embed_tokens.weight", "lm_head.weight"),
    ):
        if model == "t5 tied":
            t5 = transformers.T5Config(vocab_size=131, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
            transformers.T5ForConditionalGeneration(t5).save_pretrained(a := tmp_path / "t5")
        else:
            a = saved(model)
        b = changed(a, tmp_path / f"{model} b", lambda t, c, k=kept, o=other: t.update({o: t.pop(k)}))
        found = ckpttool.compare(a, b)
        assert found.largest == 0 and not found.weights_differ, str(found)


@pytest.mark.slow
def test_an_expert_that_no_token_reaches_is_named_all_the_same(saved: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "ids").write_text("[5]\n")
    hidden = []
    for k in range(4):
        change = put(f"{L1}.block_sparse_moe.experts.{k}.w2.weight", lambda w: w * 2)
        b = changed(saved("mixtral"), tmp_path / f"b{k}", change)
        found = ckpttool.compare(saved("mixtral"), b, prompts=tmp_path / "ids")
        assert found.weights_differ == [f"{L1}.mlp.experts.down_proj"]
        hidden += [k] if found.equal and "no prompt shows the other values of 1 weight" in found.notes[0] else []
    assert len(hidden) == 2


# ------------------------------------------------------------------------------------------------- prompts and refusals


@pytest.mark.slow
def test_prompts_are_ids_or_text_for_the_tokenizer_of_the_config(saved: Callable[[str], Path], tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    a, file = saved("llama"), tmp_path / "prompts"
    file.write_text('[1, 2, 3]\n\n{"input_ids": [4]}\n')
    found = ckpttool.compare(a, a, prompts=file)
    assert (found.prompts, found.tokens) == (2, 4)
    file.write_text("[1, 131]\n")
    with pytest.raises(UsageError, match="token 131 is outside the vocabulary of 131 rows"):
        ckpttool.compare(a, a, prompts=file)
    file.write_text('a b a\n{"text": "b"}\n')
    with pytest.raises(UsageError, match=r"needs a tokenizer|the tokenizer in"):
        ckpttool.compare(a, a, prompts=file)
    words = Tokenizer(models.WordLevel({"a": 7, "b": 8, "?": 0}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    own = tmp_path / "own"
    shutil.copytree(a, own)
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(own)
    found = ckpttool.compare(a, own, prompts=file, config_a=str(own))
    assert (found.prompts, found.tokens) == (2, 4)
    file.write_text("")
    with pytest.raises(UsageError, match="holds no prompt"):
        ckpttool.compare(a, a, prompts=file)
    for line in ("[]", "[1.5]", '{"ids": [1]}'):
        file.write_text(f"[1]\n{line}\n")
        with pytest.raises(UsageError, match="is neither text nor a list of one or more token ids"):
            ckpttool.compare(a, a, prompts=file)
    file.write_text("[" + "1, " * 200 + "1]")
    short = tmp_path / "gpt2"
    config = transformers.GPT2Config(vocab_size=131, n_embd=32, n_layer=1, n_head=4, n_positions=64)
    transformers.GPT2LMHeadModel(config).save_pretrained(short)
    with pytest.raises(Unsupported, match="A prompt has 201 tokens, and the model 64 positions"):
        ckpttool.compare(short, short, prompts=file)


def test_another_seed_draws_other_tokens_and_the_same_one_the_same(saved: Callable[[str], Path]) -> None:
    side = open_side("A", saved("llama"), OpenOptions(), WriteRequest(to="hf"))
    with side.opened:
        model = streaming.StreamedModel.of_config(side.config, torch.float32, torch.device("cpu"))
    ids = [compare_logits.make_inputs(model, side, None, seed).tensors["input_ids"] for seed in (0, 0, 1)]
    assert torch.equal(ids[0], ids[1]) and not torch.equal(ids[0], ids[2])
    lengths = [int(n) for n in compare_logits.make_inputs(model, side, None, 0).tensors["attention_mask"].sum(1)]
    assert len(set(lengths)) == len(lengths) > 2 and min(lengths) == 1
    assert {0, 1, 2, 130} <= set(ids[0][0].tolist())  # the special ids and the ends of the vocabulary


@pytest.mark.slow
def test_a_config_of_another_model_is_refused_with_a_name(saved: Callable[[str], Path], tmp_path: Path) -> None:
    other = changed(saved("llama"), tmp_path / "other", lambda t, c: c.update(num_hidden_layers=4))
    with pytest.raises(Unsupported, match=r'A: .* 9 weights are not as it has them: "model.layers.3.* is missing'):
        ckpttool.compare(saved("llama"), saved("llama"), config_a=str(other), config_b=str(other))
    wide = changed(saved("llama"), tmp_path / "wide", lambda t, c: c.update(intermediate_size=50))
    with pytest.raises(Unsupported, match=r"is \[32, 48\], and the model has \[32, 50\]"):
        ckpttool.compare(saved("llama"), saved("llama"), config_a=str(wide), config_b=str(wide))
    torch.save({"model": load_file(saved("llama") / WEIGHTS)}, tmp_path / "x.pt")
    with pytest.raises(UsageError, match=r"has no config\.json"):
        ckpttool.compare(tmp_path / "x.pt", saved("llama"))
    with pytest.raises(UsageError, match="int8': choose one of fp32"):
        ckpttool.compare(saved("llama"), saved("llama"), dtype="int8")
    for device in ("nonsense", "meta"):
        with pytest.raises(UsageError, match=f"device='{device}'"):
            ckpttool.compare(saved("llama"), saved("llama"), device=device)
    gpt2 = changed(saved("llama"), tmp_path / "gpt2", configured(model_type="gpt2"))  # what from_pretrained goes by
    assert ckpttool.compare(saved("llama"), gpt2).misfit_b["transformer.wte.weight"] == "is missing"


def test_a_model_type_that_is_no_text_is_said(saved: Callable[[str], Path], tmp_path: Path) -> None:
    odd = changed(saved("llama"), tmp_path / "odd", configured(model_type=["llama"]))
    with pytest.raises(UsageError, match=r"odd has no model_type that is a text in its config\.json"):
        ckpttool.compare(odd, odd)


def test_a_model_under_another_architecture_is_compared_and_said(saved: Callable[[str], Path], tmp_path: Path) -> None:
    as_mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}
    found = ckpttool.compare(saved("llama"), changed(saved("llama"), tmp_path / "b", configured(**as_mistral)))
    assert found.equal and found.notes == ["by their config.json, A is a LlamaForCausalLM and B a MistralForCausalLM"]


def test_code_beside_a_config_is_never_run(saved: Callable[[str], Path], tmp_path: Path) -> None:
    def add(tensors: Tensors, config: dict[str, Any]) -> None:
        config["auto_map"] = {"AutoModelForCausalLM": "evil.Model", "AutoConfig": "evil.Config"}

    b = changed(saved("llama"), tmp_path / "b", add)
    (b / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    assert ckpttool.compare(saved("llama"), b).equal
    assert not (tmp_path / "ran").exists()


def test_a_reference_that_is_not_a_number_is_refused(saved: Callable[[str], Path], tmp_path: Path) -> None:
    b = changed(saved("llama"), tmp_path / "b", put("model.norm.weight", lambda w: w * float("nan")))
    with pytest.raises(Unsupported, match="A's logits are NaN at 71 of 71 positions"):
        ckpttool.compare(b, b)
    found = ckpttool.compare(saved("llama"), b)
    assert not found.equal and found.first_layer == "model.norm" and found.to_json()["largest"] == "inf"


def test_a_full_disk_is_named(saved: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    full = open("/dev/full", "r+b", buffering=0)  # noqa: SIM115  (compare closes it)
    monkeypatch.setattr(compare_logits.tempfile, "TemporaryFile", lambda **_: full)
    with pytest.raises(NoSpace, match=r"temporary file in .*No space left on device. Set TMPDIR"):
        ckpttool.compare(saved("llama"), saved("llama"))


def test_a_weight_that_is_used_outside_its_layer_is_never_what_memory_held(
    saved: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama import modeling_llama

    forward = modeling_llama.LlamaForCausalLM.forward

    @wraps(forward)
    def with_own_head(self: Any, *given: Any, **named: Any) -> Any:
        out = forward(self, *given, **named)
        out.logits = out.logits + self.lm_head.weight.sum()
        return out

    monkeypatch.setattr(modeling_llama.LlamaForCausalLM, "forward", with_own_head)
    with pytest.raises(Unsupported, match="or LlamaForCausalLM uses a weight outside the layer"):
        ckpttool.compare(saved("llama"), saved("llama"))


# ---------------------------------------------------------------------------------------------------- the command line


@pytest.mark.slow
def test_the_command_prints_and_writes_what_it_found(saved: Callable[[str], Path], tmp_path: Path) -> None:
    a = saved("llama")
    b = changed(a, tmp_path / "b", FAULTS["eps"].change)
    done = ckpttool_here("compare", a, a)
    assert done.returncode == 0 and "largest logit difference: 0; top-1 agrees at 71 of 71" in done.stdout
    done = ckpttool_here("compare", a, b, "--json", "--report", tmp_path / "report")
    found = json.loads(done.stdout)
    assert done.returncode == 5 and found["first_layer"] == "model.layers.0"
    assert found["config"] == {"rms_norm_eps": [1e-06, 1e-05]} and found["kl_max"] > found["kl_mean"] > 0
    assert json.loads((tmp_path / "report/report.json").read_text())["causes"] == found["causes"]
    page = (tmp_path / "report/report.html").read_text()
    assert page.count("<tr") == 1 + len(found["layers"]) and "rms_norm_eps" in page and "default-src &#39;none" in page
    done = ckpttool_here("compare", a, b, "--config-b", a / "config.json", "--quiet")
    assert done.returncode == 0 and done.stderr == ""
    done = ckpttool_here("compare", a, b, "--max-kl", 1)
    assert done.returncode == 0 and "rms_norm_eps is 1e-06 in A's config.json" in done.stdout


# ------------------------------------------------------------------------------------------------------- --prove-logits


@pytest.mark.slow
def test_a_conversion_proves_that_its_result_computes_the_same(saved: Callable[[str], Path], tmp_path: Path) -> None:
    source, config = tmp_path / "x.pt", str(saved("llama tied"))
    torch.save({"model": transformers.AutoModelForCausalLM.from_pretrained(config).state_dict(), "step": 3}, source)
    for to, more in (("hf", {}), ("hf", {"dtype": "bf16"}), ("hf", {"vocab_size": 160}), ("dcp", {"world_size": 2})):
        out = tmp_path / f"{to}{len(more)}{''.join(more)}"
        done = ckpttool.convert(source, out, to=to, config=config, drop=True, prove_logits=True, **more)  # type: ignore[arg-type]
        record = json.loads((out / "ckpttool.json").read_text())["proof"]
        assert done.proof == record and record["equal"] and record["largest"] == 0 and record["tokens"] > 20
    done = ckpttool.convert(source, tmp_path / "w.safetensors", to="hf", config=config, drop=True, prove_logits=True)
    assert done.proof and done.proof["largest"] == 0
    assert ckpttool.convert(source, tmp_path / "no", to="hf", config=config, drop=True).proof is None


@pytest.mark.slow
def test_a_result_that_computes_something_else_is_not_committed(
    saved: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prove = LogitProof.prove

    def spoil_first(self: LogitProof, path: str, *rest: Any) -> Any:
        tensors = load_file(f"{path}/{WEIGHTS}")
        rope(tensors, {})
        save_file(tensors, f"{path}/{WEIGHTS}", metadata={"format": "pt"})
        return prove(self, path, *rest)

    monkeypatch.setattr(LogitProof, "prove", spoil_first)
    with pytest.raises(
        Differs, match=r"first layer that differs is model.layers.1: .*q_proj.weight has its rows reordered"
    ):
        ckpttool.convert(saved("llama"), tmp_path / "out", to="hf", prove_logits=True)
    assert list(tmp_path.iterdir()) == []
    done = ckpttool_here("convert", saved("llama"), tmp_path / "out", "--to", "hf", "--prove-logits")
    assert done.returncode == 5 and "A is the source and B the result. Nothing was left there." in done.stderr

    def spoil_unused(self: LogitProof, path: str, *rest: Any) -> Any:
        tensors = load_file(f"{path}/{WEIGHTS}")
        tensors["model.embed_tokens.weight"][unused, 3] *= 2
        save_file(tensors, f"{path}/{WEIGHTS}", metadata={"format": "pt"})
        return prove(self, path, *rest)

    side = open_side("A", saved("llama"), OpenOptions(), WriteRequest(to="hf"))
    with side.opened:
        model = streaming.StreamedModel.of_config(side.config, torch.float32, torch.device("cpu"))
        used = compare_logits.make_inputs(model, side, None, 0).tensors["input_ids"]
    unused = min(set(range(131)) - set(used.flatten().tolist()))
    monkeypatch.setattr(LogitProof, "prove", spoil_unused)
    with pytest.raises(Differs, match=r"other values in 1 weight that no prompt shows: model.embed_tokens.weight"):
        ckpttool.convert(saved("llama"), tmp_path / "out", to="hf", prove_logits=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_what_cannot_be_proven_is_refused_before_anything_is_written(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    torch.save({"model": load_file(saved("llama") / WEIGHTS)}, tmp_path / "x.pt")
    with pytest.raises(UsageError, match=r"has no config\.json"):
        ckpttool.convert(tmp_path / "x.pt", tmp_path / "out", to="dcp", world_size=1, prove_logits=True)
    with pytest.raises(UsageError, match=r"quantize='fp8-block' the result never computes the same"):
        ckpttool.convert(saved("llama"), tmp_path / "out", to="hf", quantize="fp8-block", prove_logits=True)
    other = changed(saved("llama"), tmp_path / "other", lambda t, c: c.update(num_hidden_layers=2))
    with pytest.raises(Unsupported, match=r'"model.layers.2.*" is no weight of the model'):
        ckpttool.convert(
            tmp_path / "x.pt", tmp_path / "out", to="dcp", world_size=1, config=str(other), prove_logits=True
        )
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------------------------------------------------------- memory

_MEASURED = """
import resource, sys, torch, transformers, ckpttool
from ckpttool.engine.logits import compare_logits
transformers.LlamaForCausalLM
ckpttool.compare(sys.argv[2], sys.argv[2])  # what imports and kernels take
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = ckpttool.compare(sys.argv[1], sys.argv[1])
assert found.equal
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, found.layer_bytes)
"""


@pytest.mark.slow  # 200 MB are written and read twice
def test_one_layer_is_in_memory_at_a_time(saved: Callable[[str], Path], tmp_path: Path) -> None:
    sizes = {"hidden_size": 384, "intermediate_size": 1280, "num_hidden_layers": 24, "vocab_size": 512}
    config = transformers.LlamaConfig(**{**SIZES, **sizes, "head_dim": 128})
    with torch.device("meta"):
        shapes = {n: p.shape for n, p in transformers.LlamaForCausalLM(config).state_dict().items()}
    save_file(
        {n: torch.zeros(s, dtype=torch.float32) for n, s in shapes.items()},
        tmp_path / WEIGHTS,
        metadata={"format": "pt"},
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", _MEASURED, str(tmp_path), str(saved("llama"))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    grown, layer = map(int, done.stdout.split())
    whole = (tmp_path / WEIGHTS).stat().st_size
    assert whole > 20 * layer and layer < 10 << 20
    assert grown << 10 < 6 * layer  # one layer, the matrix that is read, buffers
