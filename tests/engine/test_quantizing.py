"""`--quantize fp8-block`: codes are those of transformers' own Fp8Quantize, scales amax / 448; transformers loads the folder and has the
numbers; and a folder in DeepSeek's form that was dequantised comes out as the same bytes."""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import ckpttool_here
from safetensors.torch import load_file, save_file

import ckpttool
from ckpttool.engine.transform import quantizing
from ckpttool.engine.transform.quantizing import QuantizedSource
from ckpttool.errors import Corrupt, Unsupported, UsageError
from ckpttool.huggingface import hub_names
from ckpttool.storage.overlay import PagedFile

Tensors = dict[str, torch.Tensor]
COMMON = {
    "vocab_size": 131,
    "max_position_embeddings": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
DEEPSEEK = {
    "hidden_size": 256, "intermediate_size": 384, "moe_intermediate_size": 128, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 128, "q_lora_rank": 128, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32,
    "v_head_dim": 64, **COMMON, "num_key_value_heads": 4,
}  # fmt: skip
#: {model_type: sizes of its config}.
MODELS: dict[str, dict[str, int]] = {
    "llama": {"hidden_size": 256, "intermediate_size": 384, **COMMON},
    "mixtral": {"hidden_size": 128, "intermediate_size": 256, "num_local_experts": 4, **COMMON},
    "deepseek_v3": DEEPSEEK,
}


def save_model(to: Path, kind: str, dtype: torch.dtype = torch.bfloat16, **sizes: Any) -> Path:
    import transformers

    torch.manual_seed(5)
    config = transformers.AutoConfig.for_model(kind, **{**MODELS.get(kind, {}), **sizes})
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.05)
    model.save_pretrained(to)
    return to


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for kind in MODELS:
        save_model(folder / kind, kind)
    return folder


def weights_of(folder: Path) -> Tensors:
    out: Tensors = {}
    for file in folder.glob("*.safetensors"):
        out |= load_file(file)
    return out


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
    )


def numbers_of(tensors: Tensors, block: int = 128) -> Tensors:
    """DeepSeek's weight_dequant: every weight in float32."""
    out = {}
    for name, t in tensors.items():
        if (scale := tensors.get(f"{name}_scale_inv")) is not None:
            spread = scale.repeat_interleave(block, -2)[: t.shape[0]].repeat_interleave(block, -1)[:, : t.shape[1]]
            out[name] = t.float() * spread
        elif not name.endswith("_scale_inv"):
            out[name] = t.float()
    return out


def deepseek_folder(source: Path, to: Path, **config: Any) -> Tensors:
    """What DeepSeek would publish of a model: every matrix of a layer but the router, blocks at the edges that are not whole, too; and scales
    that are amax / 448. Returns its tensors."""
    out: Tensors = {}
    for name, t in weights_of(source).items():
        if t.ndim != 2 or ".layers." not in name or name.endswith("gate.weight"):
            out[name] = t
            continue
        rows, columns = t.shape
        down, across = -(-rows // 128), -(-columns // 128)
        padded = torch.zeros(down * 128, across * 128)
        padded[:rows, :columns] = t.float()
        blocks = padded.view(down, 128, across, 128)
        out[f"{name}_scale_inv"] = scale = blocks.abs().amax((1, 3)) / 448
        out[name] = (
            (blocks / scale[:, None, :, None])
            .reshape(padded.shape)[:rows, :columns]
            .contiguous()
            .to(torch.float8_e4m3fn)
        )
    to.mkdir()
    save_file(out, to / "model.safetensors", {"format": "pt"})
    stated = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        **config,
    }
    (to / "config.json").write_text(
        json.dumps(json.loads((source / "config.json").read_text()) | {"quantization_config": stated})
    )
    return out


# ---------------------------------------------------------------------------------------------------- transformers judges


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_transformers_has_the_same_codes_and_loads_the_numbers(kind: str, models: Path, tmp_path: Path) -> None:
    import transformers
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    if not hasattr(Fp8Quantize, "_quantize_one"):
        pytest.skip("this transformers quantises in another function")
    done = ckpttool.convert(models / kind, tmp_path / "out", to="hf", quantize="fp8-block")
    old, new = weights_of(models / kind), weights_of(tmp_path / "out")
    stated = transformers.FineGrainedFP8Config(weight_block_size=(128, 128))
    theirs: Any = Fp8Quantize(types.SimpleNamespace(quantization_config=stated))
    coded = [n for n in new if f"{n}_scale_inv" in new]
    whole = [n for n in coded if all(size % 128 == 0 for size in old[n].shape)]
    assert coded and len(whole) > len(coded) // 2
    for name in whole:
        said = theirs._quantize_one(name, old[name])
        assert same_bits(new[name], said[name]), name
        amax = old[name].float().reshape(old[name].shape[0] // 128, 128, -1, 128).abs().amax((1, 3))
        assert same_bits(new[f"{name}_scale_inv"], amax / 448)
        # transformers rounds twice, 1 / (448 / amax): its scales may differ in the last bit
        assert torch.all((said[f"{name}_scale_inv"].view(torch.int32) - (amax / 448).view(torch.int32)).abs() <= 1)
    assert all(same_bits(new[n], t) for n, t in old.items() if n not in coded)
    # what it is, the config says; from_pretrained has the numbers
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (
        config["quantization_config"]["weight_block_size"] == [128, 128]
        and "lm_head" in config["quantization_config"]["modules_to_not_convert"]
    )
    how = transformers.FineGrainedFP8Config(dequantize=True)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", quantization_config=how, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    plain = tmp_path / "numbers"
    plain.mkdir()
    save_file(numbers_of(new), plain / "model.safetensors", {"format": "pt"})
    (plain / "config.json").write_text((models / kind / "config.json").read_text())
    wanted = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).state_dict()
    state = model.state_dict()
    assert state.keys() == wanted.keys() and [n for n, t in state.items() if not torch.equal(t, wanted[n])] == []
    # the error is that of these numbers
    about = done.about["quantized"]
    error = [(numbers_of(new)[n].double() - old[n].double(), old[n].double()) for n in coded]
    relative = (sum(e.square().sum() for e, _ in error) / sum(x.square().sum() for _, x in error)).sqrt()
    assert about["rms_relative_error"] == pytest.approx(relative.item(), rel=1e-6) and 0.02 < relative < 0.03
    assert about["max_abs_error"] == pytest.approx(max(e.abs().max().item() for e, _ in error), rel=1e-6)
    each = {n: (e.square().sum() / x.square().sum()).sqrt().item() for n, (e, x) in zip(coded, error, strict=True)}
    worst = max(each, key=lambda n: each[n])
    assert about["worst"]["tensor"] == f"model.{worst}" and about["worst"]["rms_relative_error"] == pytest.approx(
        each[worst], rel=1e-6
    )
    assert json.loads((tmp_path / "out" / "ckpttool.json").read_text())["quantized"] == about and about[
        "weights"
    ] == len(coded)
    assert any(f"{len(coded)} weights are fp8-block now; against the source, the error is 2." in n for n in done.notes)


@pytest.mark.slow
def test_ranks_and_workers_give_the_same_bytes_and_errors(models: Path, tmp_path: Path) -> None:
    """Experts that are one parameter in memory, cut by three ranks inside of blocks, and filled by two workers; each of the three processes
    asks transformers for the names, which takes the time."""
    ckpttool.convert(models / "mixtral", tmp_path / "plain", to="hf", quantize="fp8-block")
    ckpttool.convert(models / "mixtral", tmp_path / "dcp", to="dcp", world_size=3)
    done = ckpttool_here(
        "convert", tmp_path / "dcp", tmp_path / "out", "--to", "hf", "--config", models / "mixtral", "--quantize", "fp8-block", "--workers", "2",
        "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["workers"]["count"] == 2 and said["verified"]
    assert said["about"]["quantized"] == json.loads((tmp_path / "plain" / "ckpttool.json").read_text())["quantized"]
    one, two = weights_of(tmp_path / "plain"), weights_of(tmp_path / "out")
    assert one.keys() == two.keys() and all(same_bits(t, two[n]) for n, t in one.items())
    assert "model.layers.0.block_sparse_moe.experts.3.w1.weight_scale_inv" in two


@pytest.mark.slow
def test_a_dry_run_counts_that_weights_are_read_twice(models: Path, tmp_path: Path) -> None:
    said = json.loads(
        ckpttool_here(
            "convert",
            models / "llama",
            tmp_path / "out",
            "--to",
            "hf",
            "--quantize",
            "fp8-block",
            "--dry-run",
            "--json",
        ).stdout
    )
    done = ckpttool.convert(models / "llama", tmp_path / "out", to="hf", quantize="fp8-block")
    assert said["written_bytes"] == done.written_bytes
    old, new = weights_of(models / "llama"), weights_of(tmp_path / "out")
    once = sum(t.nbytes for t in old.values())
    twice = sum(t.nbytes for n, t in old.items() if f"{n}_scale_inv" in new)
    assert said["read_bytes"] == once + twice + done.written_bytes


# ------------------------------------------------------------------------------------------------- what came in goes out


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_what_came_in_goes_out(dtype: str, models: Path, tmp_path: Path) -> None:
    """DeepSeek's folder, dequantised into a training job at three ranks, and quantised again by its own config: partial blocks, latent
    projections of 160 rows, experts. Weights were bfloat16 before, so that the largest number of a block survives bfloat16 too."""
    sizes = {"kv_lora_rank": 128, "qk_rope_head_dim": 32}  # kv_a_proj_with_mqa has 160 rows
    assert DEEPSEEK | sizes == DEEPSEEK
    old = deepseek_folder(models / "deepseek_v3", tmp_path / "fp8")
    assert old["model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv"].shape == (2, 2)
    ckpttool.convert(tmp_path / "fp8", tmp_path / "dcp", to="dcp", world_size=3, dequantize=["*"], dtype=dtype)
    ckpttool.convert(tmp_path / "dcp", tmp_path / "out", to="hf", quantize="fp8-block", config=str(tmp_path / "fp8"))
    new = weights_of(tmp_path / "out")
    assert new.keys() == old.keys()
    coded = [n for n in old if n.removesuffix("_scale_inv") in old and ("_scale_inv" in n or f"{n}_scale_inv" in old)]
    assert len(coded) == 56 and [n for n in coded if not same_bits(new[n], old[n])] == []
    stated = [json.loads((tmp_path / f / "config.json").read_text())["quantization_config"] for f in ("fp8", "out")]
    assert stated[0] == stated[1]
    # and without the detour
    ckpttool.convert(
        tmp_path / "fp8", tmp_path / "again", to="hf", dequantize=["*"], dtype="fp32", quantize="fp8-block"
    )
    again = weights_of(tmp_path / "again")
    assert again.keys() == old.keys() and [n for n in coded if not same_bits(again[n], old[n])] == []


def test_scales_that_are_amax_by_448_are_found_again() -> None:
    """amax * (code / 448) in float32 gives them back, whatever amax is; scales made otherwise may change in the last bit."""
    bits = np.random.default_rng(2).integers(0x0A000000, 0x7D000000, 200_000, dtype="u4")
    amax = bits.view("f4")
    scale = amax / np.float32(448)
    again = (np.float32(448) * scale) / np.float32(448)
    assert np.array_equal(scale.view("u4"), again.view("u4"))
    # and the largest number of a bfloat16 weight survives that it is dequantised in bfloat16
    coarse = torch.from_numpy(amax).bfloat16()
    assert torch.equal((coarse.float() / 448 * 448).bfloat16(), coarse)
    other = np.float32(1) / (np.float32(1) / amax * np.float32(448))
    moved = (np.float32(448) * other) / np.float32(448)
    steps = np.abs(moved.view("i4") - other.view("i4"))
    assert steps.max() <= 1 and 0 < np.count_nonzero(steps) < len(steps) // 4


# --------------------------------------------------------------------------------------------------------- which weights


@pytest.mark.slow
def test_blocks_that_are_not_whole_stay_unless_the_config_asks(tmp_path: Path) -> None:
    """transformers infers the size of a block from the number of scales: 320 rows with 3 of them are refused, 384 with 2 would be wrong."""
    source = save_model(tmp_path / "in", "llama", intermediate_size=320)
    done = ckpttool.convert(source, tmp_path / "out", to="hf", quantize="fp8-block")
    new = weights_of(tmp_path / "out")
    assert [
        n for n in new if ".mlp." in n and "scale" in n
    ] == [] and "model.layers.1.self_attn.o_proj.weight_scale_inv" in new
    stated = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    kept = [f"model.layers.{i}.mlp.{m}_proj" for i in range(2) for m in ("down", "gate", "up")]
    assert sorted(stated["modules_to_not_convert"]) == sorted(["lm_head", *kept])
    assert any("8 weights become fp8 in blocks of 128x128; 6 that are no whole blocks stay" in n for n in done.notes)
    config = tmp_path / "stated"
    config.mkdir()
    asked = {
        "quant_method": "fp8",
        "weight_block_size": [64, 32],
        "modules_to_not_convert": ["lm_head", "model.layers.0.self_attn", "gate_proj"],
    }
    text = json.dumps(json.loads((source / "config.json").read_text()) | {"quantization_config": asked})
    (config / "config.json").write_text(text)
    ckpttool.convert(source, tmp_path / "asked", to="hf", quantize="fp8-block", config=str(config))
    new = weights_of(tmp_path / "asked")
    assert {n.removesuffix(".weight_scale_inv") for n in new if n.endswith("_scale_inv")} == {
        *(f"model.layers.1.self_attn.{m}_proj" for m in "qkvo"), *(f"model.layers.{i}.mlp.{m}_proj" for i in range(2) for m in ("down", "up")),
    }  # fmt: skip
    assert new["model.layers.0.mlp.up_proj.weight_scale_inv"].shape == (5, 8)


@pytest.mark.slow
def test_routers_embeddings_and_heads_stay(models: Path, tmp_path: Path) -> None:
    ckpttool.convert(models / "mixtral", tmp_path / "out", to="hf", quantize="fp8-block")
    plain = {n: t for n, t in weights_of(tmp_path / "out").items() if t.dtype == torch.bfloat16}
    assert {n for n, t in plain.items() if t.ndim > 1} == {
        "model.embed_tokens.weight", "lm_head.weight", *(f"model.layers.{i}.block_sparse_moe.gate.weight" for i in range(2)),
    }  # fmt: skip


def test_a_model_that_transformers_does_not_know_is_quantised_by_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*args: Any, **how: Any) -> Any:
        raise Unsupported(
            "transformers does not know model_type 'of_nobody'"
        )  # as its child process says, after five seconds each time

    monkeypatch.setattr(hub_names, "relate_to_hub", unknown)
    source = tmp_path / "in"
    source.mkdir()
    p = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": (131, 128), f"{p}attn.wq.weight": (128, 128), f"{p}mlp.gate.weight": (4, 128),
        f"{p}mlp.experts.0.w1.weight": (256, 128), f"{p}norm.weight": (128,), f"{p}rel_embed.weight": (32, 128),
        "vision_tower.layers.0.fc.weight": (128, 128), "lm_head.weight": (131, 128),
    }  # fmt: skip
    save_file({n: torch.randn(s).bfloat16() for n, s in shapes.items()}, source / "model.safetensors")
    (source / "config.json").write_text(
        json.dumps({"model_type": "of_nobody", "architectures": ["NobodysForCausalLM"]})
    )
    ckpttool.convert(source, tmp_path / "out", to="hf", quantize="fp8-block")
    coded = {n for n in weights_of(tmp_path / "out") if n.endswith("_scale_inv")}
    assert coded == {f"{p}attn.wq.weight_scale_inv", f"{p}mlp.experts.0.w1.weight_scale_inv"}
    stated = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert stated["modules_to_not_convert"] == ["lm_head", f"{p}mlp.gate", "vision_tower.layers.0.fc"]


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"quantize": "nvfp4"}, Unsupported, "writes fp8-block alone.*'nvfp4' are made by ModelOpt"),
        ({"quantize": "gptq"}, Unsupported, "made by gptqmodel"),
        ({"quantize": "w4a16"}, Unsupported, "made by llm-compressor, which writes compressed-tensors"),
        ({"quantize": "nf4"}, Unsupported, "made by bitsandbytes"),
        ({"quantize": "q4_k_m"}, Unsupported, r"made by llama\.cpp"),
        ({"quantize": "int3"}, Unsupported, "writes fp8-block alone, which needs no data for calibration.$"),
        ({"to": "dcp", "world_size": 1}, Unsupported, "goes with a folder in hf.*The destination is dcp"),
        ({"to": "zero3", "world_size": 2}, Unsupported, "The destination is zero3"),
        (
            {"to": None, "dst": "out.safetensors"},
            Unsupported,
            r"one file, without the config\.json that says what its codes are",
        ),
        ({"options": ckpttool.HfOptions(include_optimizer=True)}, UsageError, "writes a model for inference"),
        ({"options": ckpttool.HfOptions(adapter=True)}, UsageError, "writes a model for inference"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    options: dict[str, Any], error: type[Exception], text: str, models: Path, tmp_path: Path
) -> None:
    dst = tmp_path / options.pop("dst", "out")
    with pytest.raises(error, match=text):
        ckpttool.convert(models / "llama", dst, **{"to": "hf", "quantize": "fp8-block", **options})
    assert not dst.exists()


@pytest.mark.parametrize(
    ("stated", "text"),
    [
        (
            {"quant_method": "compressed-tensors"},
            "quant_method 'compressed-tensors', and not 'fp8'.*made by llm-compressor",
        ),
        ({"quant_method": "awq"}, "made by autoawq"),
        (
            {"quant_method": "fp8", "weight_block_size": None},
            "weight_block_size None: it is of fp8 with one scale a tensor or a row",
        ),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "static"},
            "activation_scheme 'static'",
        ),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "expert_dtype": "fp4"}, "expert_dtype 'fp4'"),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": "lm_head"},
            "modules_to_not_convert 'lm_head', which is not a list of names",
        ),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["(?:[a-z_.0-9]+)+!"]},
            "in modules_to_not_convert of config.json could take forever",
        ),
    ],
)
def test_a_config_of_another_scheme_is_refused(stated: dict[str, Any], text: str, models: Path, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.mkdir()
    found = json.loads((models / "llama" / "config.json").read_text()) | {"quantization_config": stated}
    (config / "config.json").write_text(json.dumps(found))
    ckpttool.convert(models / "llama", tmp_path / "dcp", to="dcp", world_size=1)
    with pytest.raises(Unsupported, match=text):
        ckpttool.convert(tmp_path / "dcp", tmp_path / "out", to="hf", quantize="fp8-block", config=str(config))


def test_codes_are_not_quantised_again(models: Path, tmp_path: Path) -> None:
    deepseek_folder(models / "llama", tmp_path / "fp8")
    with pytest.raises(Unsupported, match=r"14 of 21 weights are codes.*dequantize=\['\*'\], too"):
        ckpttool.convert(tmp_path / "fp8", tmp_path / "out", to="hf", quantize="fp8-block")


def test_without_a_config_nobody_would_know_the_codes(tmp_path: Path) -> None:
    save_file({"model.layers.0.q_proj.weight": torch.randn(128, 128)}, tmp_path / "w.safetensors")
    with pytest.raises(
        Unsupported, match=r"from_pretrained knows the codes by the quantization_config of config\.json"
    ):
        ckpttool.convert(tmp_path / "w.safetensors", tmp_path / "out", to="hf", quantize="fp8-block")


# --------------------------------------------------------------------------------------------------------------- numbers


def quantise(x: torch.Tensor, **how: Any) -> tuple[torch.Tensor, torch.Tensor]:
    found = quantizing._quantize_blocks(x.float().numpy(), quantizing._Scheme(**how))
    return torch.from_numpy(found.codes.view("u1")).view(torch.float8_e4m3fn), torch.from_numpy(found.scales)


@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
def test_awkward_blocks_have_the_codes_of_transformers(scale_fmt: str) -> None:
    """Zeros, zeros with a sign, one number, numbers that overflow or vanish, ties, float16's subnormals; scales of powers of two."""
    import transformers
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    if not hasattr(Fp8Quantize, "_quantize_one"):
        pytest.skip("this transformers quantises in another function")
    torch.manual_seed(0)
    x = torch.randn(8 * 128, 2 * 128)
    x[:128, :128] = 0
    x[128:256, :128] = -0.0
    x[256:384, :128] = 0
    x[300, 7] = -3e-30
    x[384:512] *= 3e38 / 5
    x[512:640] = torch.randint(-448, 449, (128, 256)).float() + 0.5
    x[640:768] = (torch.randn(128, 256) * 1e-7).half().float()
    x[768:896] = 2.0 ** torch.randint(-20, 20, (128, 256))
    stated = transformers.FineGrainedFP8Config(weight_block_size=(128, 128), scale_fmt=scale_fmt)
    said: Any = Fp8Quantize(types.SimpleNamespace(quantization_config=stated))  # type: ignore[arg-type]
    wanted = said._quantize_one("w.weight", x)
    codes, scales = quantise(x, exponents=scale_fmt == "ue8m0")
    assert same_bits(codes, wanted["w.weight"])
    theirs = wanted["w.weight_scale_inv"].float()
    assert (
        torch.equal(scales, theirs)
        if scale_fmt == "ue8m0"
        else torch.all((scales.view(torch.int32) - theirs.view(torch.int32)).abs() <= 1)
    )
    assert scales[0, 0] == 1 and torch.isfinite(codes.float()).all()


def test_numbers_too_small_for_a_scale_become_zeros() -> None:
    codes, scales = quantise(torch.full((128, 128), 1e-40))
    assert scales.item() == 1 and not codes.float().any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_no_scale_holds_are_named(bad: float, models: Path, tmp_path: Path) -> None:
    tensors = weights_of(models / "llama")
    tensors["model.layers.1.mlp.up_proj.weight"][300, 200] = bad
    source = tmp_path / "in"
    source.mkdir()
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    (source / "config.json").write_text((models / "llama" / "config.json").read_text())
    with pytest.raises(
        Corrupt, match=r'"model.model.layers.1.mlp.up_proj.weight" holds infinite numbers or NaN in rows 0 to 383'
    ):
        ckpttool.convert(source, tmp_path / "out", to="hf", quantize="fp8-block")
    assert not (tmp_path / "out").exists()


def test_pages_and_slabs_do_not_show(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With pages of one row of blocks, computed a block at a time, the bytes and the errors are the same."""
    done = ckpttool.convert(models / "llama", tmp_path / "out", to="hf", quantize="fp8-block")
    monkeypatch.setattr(quantizing, "_NUMBERS", 128 * 128)
    small = ckpttool.convert(models / "llama", tmp_path / "small", to="hf", quantize="fp8-block")
    assert done.digest == small.digest
    one, two = done.about["quantized"], small.about["quantized"]
    assert (
        two["rms_relative_error"] == pytest.approx(one["rms_relative_error"], rel=1e-12)
        and one["worst"]["tensor"] == two["worst"]["tensor"]
    )


def test_errors_of_pages_that_an_interrupted_run_has_written_are_computed(models: Path, tmp_path: Path) -> None:
    done = ckpttool.convert(models / "llama", tmp_path / "out", to="hf", quantize="fp8-block")
    with ckpttool.plan(models / "llama", tmp_path / "again", to="hf", quantize="fp8-block") as planned:
        source, about = planned.opened.source, planned.opened.checkpoint.quantized
        assert isinstance(source, QuantizedSource) and about is not None and not source.measured
        file = next(iter(about["files"]))
        made = source.made[file]
        assert isinstance(made, PagedFile) and made.compute(0)
        assert list(source.measured) == [f"0 {file}"]
        assert source.compute_errors(about) == done.about["quantized"]
