"""--dequantize of encoded weights: the numbers are those of the library that made them, bit for bit, in every layout.

compressed-tensors is no dependency of the tests: fixtures/quantised holds what its 0.20 compressed and decompressed
(fixtures/quantised_jobs.py). transformers itself loads what it can (fp8, gpt-oss). ModelOpt's formulas are written out here in torch, as
modelopt 0.47 has them in torch/quantization/qtensor/{fp8,nvfp4}_tensor.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import ckpttool_here
from peers import FIXTURES
from safetensors.torch import load_file, save_file
from torch import Tensor

import ckpttool
from ckpttool.errors import CkpttoolError, Corrupt, Unsupported, UsageError
from ckpttool.huggingface.decoding import unpack_bits
from ckpttool.storage.overlay import ComputedSource, PagedFile
from ckpttool.storage.source import Source

CASES = sorted(p.name for p in (FIXTURES / "quantised").glob("ct_*"))
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
F8, E8, BF16, F32, U8, I32 = (
    torch.float8_e4m3fn,
    torch.float8_e8m0fnu,
    torch.bfloat16,
    torch.float32,
    torch.uint8,
    torch.int32,
)
W = "layer.weight"


def random_codes(*shape: int, dtype: torch.dtype = F8, seed: int = 0) -> Tensor:
    """Random bits that are no NaN."""
    x = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=U8)
    return x.masked_fill((x & 0x7F) == 0x7F, 3).view(dtype)


def random_scales(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)).add(0.01).mul(0.02).to(dtype)


def folder(path: Path, tensors: dict[str, Tensor], quantization: dict[str, Any] | None = None, **config: Any) -> Path:
    path.mkdir()
    save_file({n: x.clone() for n, x in tensors.items()}, path / "model.safetensors", metadata={"format": "pt"})
    stated = config | ({} if quantization is None else {"quantization_config": quantization})
    (path / "config.json").write_text(json.dumps(stated))
    return path


def equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(U8), b.view(U8))


def dequantised(tmp_path: Path, tensors: dict[str, Tensor], dtype: str | None = "bf16", **quantization: Any) -> Tensor:
    """The one weight of a folder, through ckpttool."""
    source = folder(tmp_path / "in", tensors, quantization or None)
    ckpttool.convert(source, tmp_path / "out", to="hf", dequantize=["*"], dtype=dtype)
    (weight,) = load_file(tmp_path / "out" / "model.safetensors").values()
    return weight


# --------------------------------------------------------------------------------------------------- compressed-tensors


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [*DTYPES, None])
@pytest.mark.parametrize("case", CASES)
def test_numbers_are_those_of_compressed_tensors(case: str, dtype: str | None, tmp_path: Path) -> None:
    """transformers takes what `decompress` gives to the dtype of the parameter, which config.json says where nobody asks."""
    source = FIXTURES / "quantised" / case
    result = ckpttool.convert(source / "ckpt", tmp_path / "out", to="hf", dequantize=["*"], dtype=dtype)
    got, plain = load_file(tmp_path / "out" / "model.safetensors"), load_file(source / "ckpt" / "model.safetensors")
    to = BF16 if dtype is None else DTYPES[dtype]
    truth = load_file(source / "truth.safetensors")
    for name, x in truth.items():
        assert equal(got.pop(name), x.to(to)), name
    assert len(truth) == 7 and sorted(got) == sorted(n for n in plain if "proj" not in n)
    assert all(equal(x, plain[n].to(to)) for n, x in got.items())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == str(to).removeprefix("torch.")
    assert not result.dropped and any("quantization_config of config.json" in n for n in result.notes)


#: {target: options of it}
TARGETS: dict[str, dict[str, Any]] = {
    "dcp": {"world_size": 3}, "full": {}, "hf": {}, "zero3": {"world_size": 3}, "universal": {}, "fsdp1": {"world_size": 2},
    "torch_checkpointing": {"world_size": 2}, "audit": {},
}  # fmt: skip


SUFFIXES = {"full": "out.pt", "audit": "out.tar.zst"}
#: Every case with three targets, every target with six cases.
PAIRS = [(case, (list(TARGETS) * 2)[i % 8 + 2 * k]) for i, case in enumerate(CASES) for k in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "to"), PAIRS)
def test_every_layout_takes_the_numbers(case: str, to: str, tmp_path: Path) -> None:
    source, out = FIXTURES / "quantised" / case, tmp_path / SUFFIXES.get(to, "out")
    ckpttool.convert(source / "ckpt", out, to=to, dequantize=["*"], dtype="bf16", **TARGETS[to])
    ckpttool.verify(out, read_data=True)
    with ckpttool.open(out) as got:
        for name, x in load_file(source / "truth.safetensors").items():
            assert torch.equal(got[f"model.{name}"].torch().to(BF16), x.to(BF16)), name
        assert not [n for n in got if n.endswith(("_scale", "_packed", "_shape", "_zero_point"))]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "to"), [(c, t) for c, t in PAIRS if t in ("dcp", "full", "hf", "audit")])
def test_without_it_codes_are_carried_and_never_cast(case: str, to: str, tmp_path: Path) -> None:
    source, out = FIXTURES / "quantised" / case / "ckpt", tmp_path / SUFFIXES.get(to, "out")
    tensors = load_file(source / "model.safetensors")
    codes = next(n for n in tensors if n.endswith(("up_proj.weight_packed", "up_proj.weight")))
    with pytest.raises(
        Unsupported, match=r"codes and scales are copied bit for bit; dequantize=\['\*'\] makes weights in bf16"
    ):
        ckpttool.convert(source, out, to=to, dtype="bf16", **TARGETS[to])
    with pytest.raises(Unsupported, match=r"is codes in .* or add dequantize=\['\*'\]"):
        ckpttool.convert(source, out, to=to, cast={f"model.{codes}": "fp32"}, **TARGETS[to])
    ckpttool.convert(source, out, to=to, cast={"*norm*": "fp32"}, **TARGETS[to])
    with ckpttool.open(out) as got:
        for name, x in tensors.items():
            if "norm" not in name:
                assert got.read(f"model.{name}") == x.contiguous().view(-1).view(U8).numpy().tobytes()


def test_order_of_activations_says_which_scale_a_column_has(tmp_path: Path) -> None:
    """compressed-tensors up to 0.8 stored weight_g_idx, the group of each column; those since have none."""
    case = FIXTURES / "quantised" / "ct_w4_group_asym"
    tensors, name = load_file(case / "ckpt" / "model.safetensors"), "model.layers.0.mlp.up_proj.weight"
    parts = {f"{W}{end}": tensors[f"{name}{end}"] for end in ("_packed", "_scale", "_shape", "_zero_point")}
    order = torch.tensor([1, 0] * 16, dtype=I32)
    got = dequantised(tmp_path, {**parts, f"{W}_g_idx": order}, "fp32")
    codes = torch.from_numpy(unpack_bits(parts[f"{W}_packed"].numpy(), 4, 32)).float()
    zeros = torch.from_numpy(unpack_bits(parts[f"{W}_zero_point"].numpy().T, 4, 48)).float().T
    scale = parts[f"{W}_scale"].float()
    assert equal(got, ((codes - zeros[:, order]) * scale[:, order]).half().float())


@pytest.mark.parametrize("bits", range(1, 9))
def test_integers_of_any_number_of_bits_are_unpacked(bits: int) -> None:
    numbers = np.random.default_rng(bits).integers(0, 1 << bits, (3, 37))
    text = ["".join(f"{n:0{bits}b}"[::-1] for n in row).ljust(320, "0") for row in numbers]
    words = np.array(
        [[int(t[i : i + 32][::-1], 2) for i in range(0, 32 * -(-37 * bits // 32), 32)] for t in text], "u4"
    )
    assert (unpack_bits(words.view("i4"), bits, 37) == numbers).all()


# ----------------------------------------------------------------------------------- transformers, DeepSeek, ModelOpt


def blocks_of(codes: Tensor, scale: Tensor, size: int) -> Tensor:
    """float32 numbers of square blocks that need not divide the shape."""
    spread = scale.float().repeat_interleave(size, -2).repeat_interleave(size, -1)
    return codes.float() * spread[..., : codes.shape[-2], : codes.shape[-1]]


BLOCK = {"quant_method": "fp8", "weight_block_size": [32, 32]}
fp8, ints = random_codes(100, 72), random_codes(64, 40, dtype=torch.int8, seed=3)
e5m2 = random_codes(100, 72, dtype=U8).bitwise_and(0xFB).view(torch.float8_e5m2)  # neither NaN nor infinite
grid = random_scales(4, 3)
FP4_TABLE = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def fp4(codes: Tensor) -> Tensor:
    u = codes.view(U8).int()
    return torch.stack([FP4_TABLE[u & 15], FP4_TABLE[u >> 4]], -1).flatten(-2)


pairs = random_codes(64, 32, dtype=U8, seed=5)
exponents = torch.randint(110, 135, (64, 2), dtype=U8, generator=torch.Generator().manual_seed(2))
sixteenths = random_codes(64, 4, seed=6)
experts, expert_scales = random_codes(3, 100, 72, seed=7), random_scales(3, 4, 3)
MODELOPT = {"quant_method": "modelopt"}
#: {case: (tensors, quantization_config, the numbers in a dtype)}
FORMULAS: dict[str, tuple[dict[str, Tensor], dict[str, Any], Callable[[torch.dtype], Tensor]]] = {
    "deepseek": ({W: fp8, f"{W}_scale_inv": grid}, BLOCK, lambda to: blocks_of(fp8, grid, 32).to(to)),
    "bfloat16 scales": ({W: fp8, f"{W}_scale_inv": grid.bfloat16()}, BLOCK, lambda to: blocks_of(fp8, grid.bfloat16(), 32).to(to)),
    "float16 scales": ({W: fp8, f"{W}_scale_inv": grid.half()}, BLOCK, lambda to: blocks_of(fp8, grid.half(), 32).to(to)),
    "e8m0 scales": ({W: fp8, "layer.scale": grid.to(E8)}, BLOCK, lambda to: blocks_of(fp8, grid.to(E8), 32).to(to)),
    "e5m2": ({W: e5m2, f"{W}_scale_inv": grid}, BLOCK, lambda to: blocks_of(e5m2, grid, 32).to(to)),
    "experts": ({"x.gate_up_proj": experts, "x.gate_up_proj_scale_inv": expert_scales}, BLOCK, lambda to: blocks_of(experts, expert_scales, 32).to(to)),
    "experts, one scale each": ({"x.w": experts, "x.w_scale": expert_scales[:, :1, :1]}, {}, lambda to: (experts.float() * expert_scales[:, :1, :1]).to(to)),
    "one scale without dimensions": ({W: fp8, f"{W}_scale": grid[0, 0]}, {}, lambda to: (fp8.float() * grid[0, 0]).to(to)),
    "a scale a row": ({W: fp8, f"{W}_scale": random_scales(100)}, {}, lambda to: (fp8.float() * random_scales(100)[:, None]).to(to)),
    "int8": ({W: ints, f"{W}_scale": random_scales(64, 1)}, {}, lambda to: (ints.float() * random_scales(64, 1)).to(to)),
    "fp4 experts of DeepSeek": ({W: pairs.view(torch.int8), "layer.scale": exponents.view(E8)}, {},
                                lambda to: (fp4(pairs) * exponents.view(E8).float().repeat_interleave(32, -1)).to(to)),
    # the scale is rounded to the dtype before, and the product again
    "fp8 of ModelOpt": ({W: fp8, f"{W}_scale": grid[0, 0]}, MODELOPT, lambda to: fp8.to(to) * grid[0, 0].to(to)),
    "nvfp4 of ModelOpt": ({W: pairs, f"{W}_scale": sixteenths, f"{W}_scale_2": grid[0, 0]}, MODELOPT,
                          lambda to: (fp4(pairs) * (sixteenths.float() * grid[0, 0]).repeat_interleave(16, -1)).to(to)),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", FORMULAS)
def test_numbers_are_those_of_the_reference(case: str, dtype: str, tmp_path: Path) -> None:
    tensors, quantization, numbers = FORMULAS[case]
    assert equal(dequantised(tmp_path, tensors, dtype, **quantization), numbers(DTYPES[dtype]))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("case", ["deepseek", "experts", "fp4 experts of DeepSeek", "nvfp4 of ModelOpt"])
@pytest.mark.parametrize("to", ["dcp", "dcp+zstd", "full"])
def test_codes_are_read_from_any_layout_and_across_its_cuts(case: str, to: str, tmp_path: Path) -> None:
    """Three ranks cut 100 rows at 34 and 68, inside blocks of 32 rows."""
    tensors, quantization, numbers = FORMULAS[case]
    source, middle = folder(tmp_path / "in", tensors, quantization), tmp_path / "middle"
    if to == "full":
        middle = middle.with_suffix(".pt")
        torch.save({"model": tensors}, middle)
    elif to == "dcp+zstd":
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint._extension import ZStandard

        dcp.save(
            {"model": tensors}, storage_writer=dcp.FileSystemWriter(middle, _extensions=[ZStandard()]), no_dist=True
        )
    else:
        ckpttool.convert(source, middle, to="dcp", world_size=3)
    ckpttool.convert(middle, tmp_path / "out", to="dcp", world_size=2, dequantize=["model.*"], dtype="bf16")
    name = next(n for n in tensors if "scale" not in n)
    with ckpttool.open(tmp_path / "out") as got:
        assert list(got) == [f"model.{name}"] and torch.equal(got[f"model.{name}"].torch(), numbers(BF16))


@pytest.mark.slow
def test_workers_compute_the_same(tmp_path: Path) -> None:
    source = FIXTURES / "quantised" / "ct_w4_group"
    one = ckpttool.convert(source / "ckpt", tmp_path / "one", to="dcp", world_size=2, dequantize=["*"])
    two = ckpttool.convert(source / "ckpt", tmp_path / "two", to="dcp", world_size=2, dequantize=["*"], workers=2)
    assert one.digest == two.digest and two.workers


# ------------------------------------------------------------------------------------------------ transformers itself

LLAMA: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
                         "vocab_size": 131, "max_position_embeddings": 64}  # fmt: skip


def quantise(folder: Path, encode: Callable[[str, Tensor], dict[str, Tensor]], quantization: dict[str, Any]) -> Path:
    """Encode the weights of a folder that save_pretrained wrote."""
    tensors = load_file(folder / "model.safetensors")
    coded = {n: x for name, w in tensors.items() for n, x in encode(name, w).items()}
    save_file({n: x.contiguous() for n, x in coded.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return folder


def in_blocks(dtype: torch.dtype, size: int = 32) -> Callable[[str, Tensor], dict[str, Tensor]]:
    def encode(name: str, w: Tensor) -> dict[str, Tensor]:
        if not name.endswith("_proj.weight"):
            return {name: w}
        scale = w.float().unflatten(0, (-1, size)).unflatten(-1, (-1, size)).abs().amax((1, 3)) / 448
        scale = scale.log2().ceil().exp2().to(dtype) if dtype == E8 else scale.to(dtype)
        return {name: (w.float() / blocks_of(torch.ones(w.shape), scale, size)).to(F8), f"{name}_scale_inv": scale}

    return encode


def one_scale_each(name: str, w: Tensor) -> dict[str, Tensor]:
    if not name.endswith("_proj.weight"):
        return {name: w}
    scale = (w.float().abs().max() / 448).bfloat16()
    return {
        name: (w.float() / scale.float()).to(F8),
        f"{name}_scale_inv": scale,
        name.replace("weight", "activation_scale"): scale.clone(),
    }


def as_gpt_oss(name: str, w: Tensor) -> dict[str, Tensor]:
    if not name.endswith(("gate_up_proj", "down_proj")):
        return {name: w}
    experts, rows, columns = w.shape
    codes = random_codes(experts, columns, rows // 32, 16, dtype=U8)
    return {f"{name}_blocks": codes, f"{name}_scales": random_codes(*codes.shape[:3], dtype=U8, seed=2) % 8 + 118}


def load_both(source: Path, out: Path, model: type[Any], **options: Any) -> None:
    """Both load as the same model, bit for bit, and nothing is missing; both compute the same."""
    theirs = model.from_pretrained(source, dtype=BF16, **options)
    mine, loading = model.from_pretrained(out, dtype=BF16, output_loading_info=True)
    assert not any(loading[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    a, b = theirs.state_dict(), mine.state_dict()
    assert a.keys() == b.keys() and [n for n in a if not equal(a[n], b[n])] == []
    tokens = torch.arange(9)[None]
    with torch.no_grad():
        assert torch.equal(theirs(tokens).logits, mine(tokens).logits)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("encode", "about"),
    [
        (in_blocks(F32), {"weight_block_size": [32, 32], "activation_scheme": "dynamic"}),
        (in_blocks(E8), {"weight_block_size": [32, 32], "activation_scheme": "dynamic", "scale_fmt": "ue8m0"}),
        (one_scale_each, {"activation_scheme": "static"}),
    ],
)
@pytest.mark.slow
def test_transformers_loads_the_model_that_it_would_have_dequantised(
    encode: Callable[..., Any], about: dict[str, Any], tmp_path: Path
) -> None:
    """Without a GPU, from_pretrained dequantises fp8 itself."""
    from transformers import LlamaConfig, LlamaForCausalLM

    LlamaForCausalLM(LlamaConfig(**LLAMA, tie_word_embeddings=False)).to(BF16).save_pretrained(tmp_path / "in")
    source = quantise(tmp_path / "in", encode, {"quant_method": "fp8", **about})
    result = ckpttool.convert(source, tmp_path / "out", to="hf", dequantize=["*"])
    load_both(source, tmp_path / "out", LlamaForCausalLM)
    lost = [n for n, _, why in result.dropped if "scales activations" in why]
    assert len(lost) == (7 if encode is one_scale_each else 0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_experts_of_the_hub_are_joined_for_a_job_and_written_apart(tmp_path: Path) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {**LLAMA, "head_dim": 16, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, tie_word_embeddings=False)).to(BF16).save_pretrained(tmp_path / "in")
    about = {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}
    source = quantise(tmp_path / "in", in_blocks(F32), about)
    ckpttool.convert(source, tmp_path / "out", to="hf", dequantize=["*"])
    load_both(source, tmp_path / "out", Qwen3MoeForCausalLM)
    ckpttool.convert(source, tmp_path / "dcp", to="dcp", world_size=2, dequantize=["*"])
    model = Qwen3MoeForCausalLM.from_pretrained(tmp_path / "out", dtype=BF16)
    with ckpttool.open(tmp_path / "dcp") as got:
        want = model.state_dict()
        assert {n.removeprefix("model.") for n in got} == want.keys()
        assert all(torch.equal(got[f"model.{n}"].torch(), x) for n, x in want.items())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_gpt_oss_is_what_transformers_dequantises(tmp_path: Path) -> None:
    from transformers import GptOssConfig, GptOssForCausalLM, Mxfp4Config

    sizes = {**LLAMA, "head_dim": 16, "num_local_experts": 3, "num_experts_per_tok": 2}
    GptOssForCausalLM(GptOssConfig(**sizes)).to(BF16).save_pretrained(tmp_path / "in")
    source = quantise(tmp_path / "in", as_gpt_oss, {"quant_method": "mxfp4"})
    ckpttool.convert(source, tmp_path / "out", to="hf", dequantize=["*"])
    load_both(source, tmp_path / "out", GptOssForCausalLM, quantization_config=Mxfp4Config(dequantize=True))
    said = (ckpttool.inspect(source).encoding or {})["encoded_parameters"]
    assert said == 3 * 64 * 2 * 96 + 3 * 96 * 64


# -------------------------------------------------------------------------------------------------- torchao, its objects


@pytest.mark.parametrize("name", ["float8", "int8", "mx8", "mx4", "nvfp4"])
def test_objects_of_torchao_with_a_scale_a_block(name: str, tmp_path: Path) -> None:
    source, weight = FIXTURES / "torchao" / "weights", f"model.layer.{name}.weight"
    ckpttool.convert(source / "weights.pt", tmp_path / "out", to="dcp", world_size=1, dequantize=[weight])
    with ckpttool.open(tmp_path / "out") as got:
        assert equal(got[weight].torch(), load_file(source / "truth.safetensors")[weight])


@pytest.mark.parametrize("name", ["nvfp4_swizzled", "nf4"])
def test_other_objects_of_torchao_are_refused_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(
        Unsupported, match=rf'"model.layer.{name}.weight" is a torchao N\w+, whose numbers ckpttool does not'
    ):
        ckpttool.convert(
            FIXTURES / "torchao/weights/weights.pt",
            tmp_path / "out",
            to="full",
            dequantize=[f"model.layer.{name}.weight"],
        )


# ------------------------------------------------------------------------------------------------------- what is said


def test_some_weights_only_and_the_config_says_which(tmp_path: Path) -> None:
    source = FIXTURES / "quantised" / "ct_fp8_channel"
    options = {"to": "hf", "dequantize": ["model.layers.0.mlp.*"], "dtype": None}
    ckpttool.convert(source / "ckpt", tmp_path / "out", **options)
    stated = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert stated["ignore"] == ["lm_head", *(f"model.layers.0.mlp.{n}_proj" for n in ("down", "gate", "up"))]
    got, truth = load_file(tmp_path / "out" / "model.safetensors"), load_file(source / "truth.safetensors")
    codes = load_file(source / "ckpt" / "model.safetensors")
    for name, x in truth.items():
        assert equal(got[name], x.to(BF16) if ".mlp." in name else codes[name])
        assert (f"{name}_scale" in got) == (".mlp." not in name)
    result = ckpttool.convert(source / "ckpt", tmp_path / "other", **{**options, "dtype": "fp32"})
    assert any(n.startswith("4 of 12 weights are codes: fp8") and n.endswith("stay codes") for n in result.notes)
    other = load_file(tmp_path / "other" / "model.safetensors")
    assert all(equal(other[n], x.float() if ".mlp." in n else codes[n]) for n, x in truth.items())


@pytest.mark.slow
def test_a_config_without_a_list_of_plain_modules_takes_all_or_none(tmp_path: Path) -> None:
    tensors = {
        f"{n}.{end}": x
        for n in "ab"
        for end, x in (("weight", fp8), ("weight_scale", grid[0, 0]), ("input_scale", grid[0, 1]))
    }
    source = folder(tmp_path / "in", {**tensors, "a.k_scale": grid[0, 0]}, MODELOPT, model_type="llama")
    (source / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    with pytest.raises(
        Unsupported, match=r"1 weights are codes still, first .model.b.weight.*\(modelopt\) has no list"
    ):
        ckpttool.convert(
            source,
            tmp_path / "out",
            to="hf",
            dequantize=["a.weight"],
            options=ckpttool.layouts.find("hf").options(allow_name_mismatch=True),
        )
    done = ckpttool_here(
        "convert", source, tmp_path / "out", "--to", "hf", "--dequantize", "*", "--allow-name-mismatch"
    )
    assert done.returncode == 0, done.stderr
    assert sorted(load_file(tmp_path / "out" / "model.safetensors")) == ["a.weight", "b.weight"]
    assert "hf_quant_config.json" not in {p.name for p in (tmp_path / "out").iterdir()}
    assert (
        "left out, since no weight is codes any more: hf_quant_config.json, quantization_config of config.json"
        in done.stderr
    )
    record = json.loads((tmp_path / "out" / "ckpttool.json").read_text())
    assert {"model.a.input_scale", "model.b.input_scale", "model.a.k_scale"} <= {
        name for name, _, _ in record["dropped"]
    }


REFUSED: dict[str, tuple[dict[str, Tensor], str, type[CkpttoolError], str]] = {
    "no such name": ({W: fp8, f"{W}_scale": grid[0, 0]}, "other.*", UsageError, r"no quantised tensor has such a name. The first is model.layer.weight"),
    "no codes": ({W: fp8.float()}, "*", UsageError, r"no quantised tensor has such a name. The checkpoint holds none"),
    "no scale": ({f"{W}_packed": random_codes(8, 4, dtype=I32)}, "*", Corrupt, r"1 tensor holds packed codes \(int32\) without a scale"),
    "scaled inputs": ({W: fp8, f"{W}_scale": grid[0, 0], "layer.pre_quant_scale": grid[0]}, "*", Unsupported, "the inputs of the layer are multiplied"),
    "both": ({f"{W}_packed": pairs, f"{W}_scale": exponents, W: fp8}, "*", Corrupt, "there is a tensor of that name beside it"),
    "another shape": ({f"{W}_packed": random_codes(8, 16, dtype=I32), f"{W}_scale": random_scales(8, 1), f"{W}_shape": torch.tensor([8, 900])}, "*",
                      Corrupt, r"packed in \[8, 4\] words of 32 bits, and the parameter is \[8, 900\]"),
    "groups without a scale": ({f"{W}_packed": random_codes(8, 16, dtype=I32), f"{W}_scale": random_scales(8, 2), f"{W}_shape": torch.tensor([8, 32]),
                                f"{W}_g_idx": torch.full((32,), 9, dtype=I32)}, "*", Corrupt, r'weight_g_idx" does not fit \[8, 32\] codes in 2 groups'),
    "other zero points": ({f"{W}_packed": random_codes(8, 16, dtype=I32), f"{W}_scale": random_scales(8, 2), f"{W}_shape": torch.tensor([8, 32]),
                           f"{W}_zero_point": torch.zeros(5, 5, dtype=I32)}, "*", Corrupt, r'weight_zero_point" does not fit \[8, 32\] codes in 2 groups'),
    "no shape": ({f"{W}_packed": random_codes(8, 16, dtype=I32), f"{W}_scale": random_scales(8, 1)}, "*", Corrupt, "nothing says the shape"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_computed_is_refused_by_name(case: str, tmp_path: Path) -> None:
    tensors, pattern, error, text = REFUSED[case]
    with pytest.raises(error, match=text):
        ckpttool.convert(folder(tmp_path / "in", tensors), tmp_path / "out", to="full", dequantize=[pattern])
    assert not (tmp_path / "out").exists()
    ckpttool.inspect(tmp_path / "in")


def test_numbers_beyond_a_dtype_are_counted_as_in_any_cast(tmp_path: Path) -> None:
    source = folder(tmp_path / "in", {W: fp8, f"{W}_scale": torch.tensor(1e4)})
    result = ckpttool.convert(source, tmp_path / "out", to="full", dequantize=["*"], dtype="fp16")
    assert any("became infinite in float16, first in model.layer.weight" in n for n in result.notes)


def test_a_record_of_the_codes_is_compared(tmp_path: Path) -> None:
    ckpttool.convert(FIXTURES / "quantised" / "ct_fp8_channel" / "ckpt", tmp_path / "in", to="hf")
    path = tmp_path / "in" / "model.safetensors"
    ckpttool.convert(tmp_path / "in", tmp_path / "good", to="full", dequantize=["*"])
    data = bytearray(path.read_bytes())
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    at = 8 + int.from_bytes(data[:8], "little") + header["model.layers.0.mlp.up_proj.weight"]["data_offsets"][0]
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(Corrupt, match=r"up_proj\.weight"):
        ckpttool.convert(tmp_path / "in", tmp_path / "bad", to="full", dequantize=["*"])


# ------------------------------------------------------------------------------------------------------------- memory


def test_pages_are_computed_one_at_a_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"real")
    asked: list[int] = []

    def compute(page: int) -> memoryview:
        asked.append(page)
        return memoryview(bytes(range(10 * page, min(10 * page + 10, 25))))

    with ComputedSource(Source(str(tmp_path)), {"made": PagedFile(25, 10, compute)}, (), 0) as source:
        assert source.read("made", 3, 5) == bytes(range(3, 8)) and source.read("made", 8, 14) == bytes(range(8, 22))
        assert source.read("made", 20, 5) == bytes(range(20, 25)) and source.read("file", 0, 4) == b"real"
    assert asked == [0, 1, 2]


@pytest.mark.parametrize("kind", ["blocks", "transposed", "packed"])
@pytest.mark.slow
def test_memory_does_not_grow_with_a_tensor(kind: str, tmp_path: Path) -> None:
    """One weight of 67 million numbers, 268 MB in float32, in a process that is told to take 150 MB."""
    rows, columns = 8192, 8192
    if kind == "blocks":
        tensors = {
            W: torch.zeros(rows, columns, dtype=F8),
            f"{W}_scale_inv": random_scales(rows // 128, columns // 128),
        }
    elif kind == "packed":
        tensors = {f"{W}_packed": torch.zeros(rows, columns // 8, dtype=I32), f"{W}_scale": random_scales(rows, columns // 128),
                   f"{W}_shape": torch.tensor([rows, columns])}  # fmt: skip
    else:
        tensors = {
            "x_blocks": torch.zeros(1, rows, columns // 32, 16, dtype=U8),
            "x_scales": torch.zeros(1, rows, columns // 32, dtype=U8),
        }
    source = folder(tmp_path / "in", tensors)
    command = [
        "convert",
        source,
        tmp_path / "out.safetensors",
        "--to",
        "hf",
        "--dequantize",
        "*",
        "--dtype",
        "fp32",
        "--max-memory",
        "150MB",
    ]
    code = (
        "import sys\nfrom ckpttool.cli.main import main\n"
        "try: main()\nfinally: print(next(x for x in open('/proc/self/status') if x.startswith('VmHWM')).split()[1])"
    )
    done = subprocess.run([sys.executable, "-c", code, *map(str, command)], capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[-1]) << 10 < 150_000_000, done.stderr
    assert (tmp_path / "out.safetensors").stat().st_size > 4 * rows * columns


@pytest.mark.slow
def test_what_inspect_counts_takes_time_in_proportion(tmp_path: Path) -> None:
    """16,000 weights; a search among all of them for each took minutes."""
    small = {
        f"layers.{i}.weight{end}": x
        for i in range(16_000)
        for end, x in (("", fp8[:2, :2]), ("_scale_inv", grid[:1, :1]))
    }
    source = folder(tmp_path / "in", small)
    begin = time.process_time()
    said = ckpttool.inspect(source).encoding or {}
    assert said["parameters"] == said["encoded_parameters"] == 64_000 and said["encoded_bits_per_parameter"] == 16
    assert time.process_time() - begin < 15


def without(end: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda t: t.pop(next(n for n in t if n.endswith(end)))


def with_other(end: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], object]:
    """The first tensor with such an ending is another one."""

    def put(tensors: dict[str, Tensor]) -> None:
        name = next(n for n in tensors if n.endswith(end))
        tensors[name] = change(tensors[name]).contiguous()

    return put


#: {case: (fixture, what is damaged, the error's words)}
DAMAGED: dict[str, tuple[str, Callable[[dict[str, Tensor]], object], str]] = {
    "no scale of the whole": ("quantised/ct_nvfp4/ckpt", without("weight_global_scale"), "nvfp4 without the scale of the whole weight"),
    "three of them": ("quantised/ct_nvfp4/ckpt", with_other("weight_global_scale", lambda x: x.reshape(1).repeat(3)), "3.* numbers, and one scales a weight"),
    "fewer zero points": ("quantised/ct_w4_group_asym/ckpt", with_other("weight_zero_point", lambda x: x[:-1]), "does not fit"),
    "one row of zero points": ("quantised/ct_int8_group_asym/ckpt", with_other("weight_zero_point", lambda x: x[:1]), "zero points in .* scales in"),
    "groups of another size": ("quantised/ct_w4_group/ckpt", with_other("weight_shape", lambda x: x - torch.tensor([0, 4])), "the groups of config.json make"),
    "a short table": ("packed/bnb_nf4", with_other("quant_map", lambda x: x[:3]), "does not have (16|256) numbers"),
    "no nested scales": ("packed/bnb_nf4", with_other("nested_absmax", lambda x: x[:0]), "does not have 1 numbers"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_tensors_that_contradict_each_other_are_corrupt_and_never_stretched(case: str, tmp_path: Path) -> None:
    name, damage, text = DAMAGED[case]
    tensors = load_file(FIXTURES / name / "model.safetensors")
    damage(tensors)
    (tmp_path / "in").mkdir()
    save_file(tensors, tmp_path / "in" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "in" / "config.json").write_bytes((FIXTURES / name / "config.json").read_bytes())
    with pytest.raises(Corrupt, match=text):
        ckpttool.convert(tmp_path / "in", tmp_path / "out", to="hf", dequantize=["*"])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("quantization", ["fp8", [1], 3])
def test_a_quantization_config_that_is_no_object_says_nothing(quantization: Any, tmp_path: Path) -> None:
    source = folder(tmp_path / "in", {W: fp8, f"{W}_scale": grid[0, 0]}, quantization)
    done = ckpttool.convert(source, tmp_path / "out.pt", to="full", dequantize=["*"])
    assert ckpttool.inspect(source).encoding["weights"] == 1 and any("computed numbers" in n for n in done.notes)
