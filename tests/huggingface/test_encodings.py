"""Weights that are codes: recognised in every scheme and layout, never cast, said by inspect and doctor; and what only looks like codes.

Names, dtypes and shapes of the schemes are those that compressed-tensors 0.20, ModelOpt, transformers, AutoGPTQ, AutoAWQ and bitsandbytes
write for a Linear of 128 inputs and 64 outputs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import ckpttool_here
from peers import FIXTURES
from safetensors.torch import load_file, save_file

import ckpttool
from ckpttool import layouts
from ckpttool.engine import planning
from ckpttool.errors import Unsupported
from ckpttool.huggingface import encodings
from ckpttool.index.checkpoint import Chunks, TensorEntry

F8, E8, BF16, F32 = torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.bfloat16, torch.float32
Q = "model.layers.0.self_attn.q_proj"


def t(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Random bits, none of them NaN in a float32 or bfloat16."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))
    return x.to(dtype) if dtype in (F32, BF16, F8, torch.float16) else torch.ones(shape).to(dtype) if dtype == E8 else (
        (x * 50).to(torch.int64).to(dtype)
    )  # fmt: skip


def of(*rows: tuple[str, torch.dtype, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    return {f"{Q}.{name}": t(dtype, *shape) for name, dtype, shape in rows}


U8, I8, I32, I64 = torch.uint8, torch.int8, torch.int32, torch.int64
#: {scheme: (how it is called, its tensors, codes first, scale second)}
SCHEMES: dict[str, tuple[str, dict[str, torch.Tensor]]] = {
    "deepseek": ("fp8 (float8_e4m3fn, blocks of 32x64)", of(("weight", F8, (64, 128)), ("weight_scale_inv", F32, (2, 2)))),
    "deepseek-own": ("fp8 (float8_e4m3fn, blocks of 32x64)", of(("weight", F8, (64, 128)), ("scale", E8, (2, 2)))),
    "fp8": ("fp8 (float8_e4m3fn, one scale each)", of(("weight", F8, (64, 128)), ("weight_scale", BF16, (1,)), ("input_scale", BF16, (1,)))),
    "fp8-modelopt": ("fp8 (float8_e4m3fn, one scale each)", of(("weight", F8, (64, 128)), ("weight_scale", F32, ()), ("input_scale", F32, ()))),
    "fp8-dynamic": ("fp8 (float8_e4m3fn, one scale a row)", of(("weight", F8, (64, 128)), ("weight_scale", BF16, (64, 1)))),
    "fp8-fbgemm": ("fp8 (float8_e4m3fn, one scale a row)", of(("weight", F8, (64, 128)), ("weight_scale", F32, (64,)))),
    "int8": ("int8 (one scale a row)", of(("weight", I8, (64, 128)), ("weight_scale", BF16, (64, 1)))),
    "w4a16": ("integers packed in int32", of(("weight_packed", I32, (64, 16)), ("weight_scale", BF16, (64, 1)), ("weight_shape", I64, (2,)))),
    "w4a16-asym": ("integers packed in int32", of(("weight_packed", I32, (64, 16)), ("weight_scale", BF16, (64, 1)), ("weight_shape", I64, (2,)),
                                                  ("weight_zero_point", I32, (8, 1)), ("weight_g_idx", I32, (128,)))),
    "w8a16": ("integers packed in int32", of(("weight_packed", I32, (64, 32)), ("weight_scale", BF16, (64, 4)), ("weight_shape", I64, (2,)))),
    "nvfp4": ("nvfp4 (groups of 16)", of(("weight_packed", U8, (64, 64)), ("weight_scale", F8, (64, 8)), ("weight_global_scale", F32, (1,)),
                                         ("input_global_scale", F32, (1,)))),
    "nvfp4-modelopt": ("nvfp4 (groups of 16)", of(("weight", U8, (64, 64)), ("weight_scale", F8, (64, 8)), ("weight_scale_2", F32, ()),
                                                  ("input_scale", F32, ()))),
    "mxfp4": ("mxfp4 (groups of 32)", of(("weight_packed", U8, (64, 64)), ("weight_scale", U8, (64, 4)))),
    "mxfp4-e8m0": ("mxfp4 (groups of 32)", of(("weight", I8, (64, 64)), ("scale", E8, (64, 4)))),
    "mxfp8": ("mxfp8 (float8_e4m3fn, groups of 32)", of(("weight", F8, (64, 128)), ("weight_scale", U8, (64, 4)))),
    "gpt-oss": ("mxfp4 (groups of 32)", of(("gate_up_proj_blocks", U8, (2, 64, 4, 16)), ("gate_up_proj_scales", U8, (2, 64, 4)))),
    "experts": ("fp8 (float8_e4m3fn, blocks of 32x64)", of(("gate_up_proj", F8, (2, 64, 128)), ("gate_up_proj_scale_inv", F32, (2, 2, 2)))),
    "gptq": ("gptq (int4 packed in int32), of a checkpoint_format that only its config.json says", of(("qweight", I32, (16, 64)), ("scales", torch.float16, (1, 64)), ("qzeros", I32, (1, 8)),
                                                   ("g_idx", I32, (128,)))),
    "awq": ("awq (int4 packed in int32)", of(("qweight", I32, (128, 8)), ("scales", torch.float16, (1, 64)), ("qzeros", I32, (1, 8)))),
    "bnb-nf4": ("bitsandbytes nf4", of(("weight", U8, (4096, 1)), ("weight.absmax", U8, (128,)), ("weight.quant_map", F32, (16,)),
                                       ("weight.nested_absmax", F32, (1,)), ("weight.nested_quant_map", F32, (256,)),
                                       ("weight.quant_state.bitsandbytes__nf4", U8, (80,)))),
    "bnb-int8": ("bitsandbytes int8 (one scale a row)", of(("weight", I8, (64, 128)), ("SCB", F32, (64,)), ("weight_format", U8, ()))),
}  # fmt: skip

PLAIN = {"model.embed_tokens.weight": t(BF16, 32, 128), "model.norm.weight": t(BF16, 128), f"{Q}.bias": t(BF16, 64)}


def entries(tensors: dict[str, torch.Tensor]) -> dict[str, TensorEntry]:
    return {
        n: TensorEntry(str(x.dtype).removeprefix("torch."), tuple(x.shape), ("model", n), Chunks(x.dim())) for n, x in tensors.items()
    }  # fmt: skip


def folder(path: Path, tensors: dict[str, torch.Tensor], quantization: dict[str, Any] | None = None) -> Path:
    path.mkdir()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = {"model_type": "llama", "dtype": "bfloat16", "tie_word_embeddings": False}
    extra = {} if quantization is None else {"quantization_config": quantization}
    (path / "config.json").write_text(json.dumps(config | extra))
    return path


@pytest.fixture(params=SCHEMES)
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def as_hf(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    return folder(path, tensors)


def as_dcp(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    ckpttool.convert(folder(path.with_name("hf"), tensors), path, to="dcp", world_size=2)
    return path


def as_full(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    torch.save(tensors, path.with_suffix(".pt"))
    return path.with_suffix(".pt")


def test_a_scheme_is_recognised_with_all_that_belongs_to_it(scheme: str) -> None:
    called, tensors = SCHEMES[scheme]
    found = encodings.find_in_tensors(entries(PLAIN | tensors))
    codes, scale = list(tensors)[:2]
    assert {n: (e.scheme, e.scale) for n, e in found.weights.items()} == {codes: (called, scale)}
    assert found.belongs == dict.fromkeys(tensors, codes)
    assert not found.faults and found.of == 4 and not found.contradicted
    last = scale.rpartition(".")[2]
    assert found.summary() == f"1 of 4 weights are codes: {called}, scales in {last}"


@pytest.mark.slow
@pytest.mark.parametrize("layout", [as_hf, as_dcp, as_full])
def test_no_cast_touches_codes_or_their_scales(
    scheme: str, layout: Callable[[Path, dict[str, torch.Tensor]], Path], tmp_path: Path
) -> None:
    _, tensors = SCHEMES[scheme]
    codes, scale = list(tensors)[:2]
    source, out = layout(tmp_path / "in", PLAIN | tensors), tmp_path / "out.pt"
    with pytest.raises(Unsupported) as e:
        ckpttool.convert(source, out, dtype="bf16")
    assert f'first "model.{codes}" with "model.{scale}"' in str(e.value) and "dtype='bf16': 1 of 4 weights" in str(
        e.value
    )
    for name, x in tensors.items():
        if x.dtype != torch.float16:
            with pytest.raises(Unsupported, match=r'"model\.[^"]*" (is codes|belongs to the codes)'):
                ckpttool.convert(source, out, cast={f"model.{name}": "fp16"})
    assert not out.exists()
    for options in ({"dtype": "keep"}, {"cast": {"model.*norm*": "fp32", "*.bias": "fp16"}}):
        ckpttool.convert(source, out, force=True, **options)
        with ckpttool.open(out) as got:
            for name, x in tensors.items():
                assert got[f"model.{name}"].dtype == str(x.dtype).removeprefix("torch.")
                assert got.read(f"model.{name}") == x.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    with ckpttool.open(out) as got:
        assert (got["model.model.norm.weight"].dtype, got[f"model.{Q}.bias"].dtype) == ("float32", "float16")


NEAR_MISSES = {
    "float8 without a scale": {"a.weight": t(F8, 8, 8)},
    "a parameter called scale": {"norm.weight": t(BF16, 8), "norm.scale": t(BF16, 8)},
    "a parameter called scale beside a float8 of another shape": {"a.weight": t(F8, 64, 64), "a.scale": t(F32, 7, 3)},
    "a learned weight_scale": {"a.weight": t(BF16, 8, 8), "a.weight_scale": t(BF16, 8, 1)},
    "scales of a feature pyramid": {"a.scales": t(F32, 3, 4), "a.weight": t(F32, 3, 4)},
    "logit_scale": {"logit_scale": t(F32), "logit": t(F32, 2)},
    "input_scale of a plain layer": {"a.weight": t(BF16, 8, 8), "a.input_scale": t(F32, 1)},
    "bytes": {"mask.weight": t(U8, 8, 8), "mask.weight_scale": t(F32, 3, 8)},
    "int8 without a scale": {"table.weight": t(I8, 8, 8)},
    "absmax of its own": {"a": t(BF16, 8), "a.absmax": t(F32, 1)},
    "blocks and scales of its own": {"x_blocks": t(U8, 4, 4), "x_scales": t(U8, 4)},
}


@pytest.mark.parametrize("case", NEAR_MISSES)
def test_what_only_looks_like_codes_is_cast_as_ever(case: str, tmp_path: Path) -> None:
    tensors = NEAR_MISSES[case]
    found = encodings.find_in_tensors(entries(tensors))
    assert not found and not found.belongs
    source = as_full(tmp_path / "in", {"model": tensors})
    ckpttool.convert(source, tmp_path / "out.pt", dtype="fp16")
    got = torch.load(tmp_path / "out.pt")["model"]
    assert {n: x.dtype for n, x in got.items()} == {
        n: torch.float16 if x.is_floating_point() else x.dtype for n, x in tensors.items()
    }


QUANTISED = {"quant_method": "compressed-tensors", "format": "float-quantized"}
#: {case: (tensors, quantization_config, sentence, whether doctor calls it damage)}
FAULTS: dict[str, tuple[dict[str, torch.Tensor], dict[str, Any] | None, str, bool]] = {
    "no scale": ({"a.weight": t(F8, 8, 8)}, QUANTISED, "1 tensor holds codes (float8_e4m3fn) without a scale", False),
    "no scale of a pack": ({"a.weight_packed": t(I32, 8, 8)}, None, "1 tensor holds packed codes (int32) without a scale", True),
    "no scales of GPTQ": ({"a.qweight": t(I32, 8, 8)}, None, "1 tensor holds packed codes (int32) without a scale", True),
    "no codes": ({"a.weight_scale_inv": t(F32, 1, 1)}, None, "1 tensor holds scales without codes", True),
    "no codes, by the config": ({"a.weight_scale": t(F32, 1), "b.weight_scale": t(F32, 1)}, QUANTISED, "2 tensors hold scales without codes", False),
    "codes that were cast": ({"a.weight": t(BF16, 8, 8), "a.weight_scale_inv": t(F32, 1, 1)}, None,
                             "1 tensor holds scales of weights that are bfloat16: a cast has rounded the codes", True),
    "a scale of another shape": ({"a.weight": t(F8, 64, 64), "a.weight_scale": t(F32, 7, 3)}, None,
                                 '1 tensor holds scales that do not fit their codes, first "model.a.weight_scale" float32 [7, 3] for codes of [64, 64]', False),
    "other blocks than the config says": ({"a.weight": t(F8, 256, 256), "a.weight_scale_inv": t(F32, 4, 4)},
                                          {"quant_method": "fp8", "weight_block_size": [128, 128]}, "1 tensor holds scales that do not fit", False),
    "codes of AQLM": ({"a.codes": t(I8, 8, 1, 1), "a.codebooks": t(F32, 1, 8, 1, 8), "a.scales": t(F32, 8, 1, 1, 1)}, {"quant_method": "aqlm"},
                      "3 tensors hold codes and scales in a scheme of aqlm that ckpttool does not know", False),
    "codes of HQQ": ({"a.W_q": t(U8, 4, 8), "a.scale": t(BF16, 1, 8), "a.zero": t(BF16, 1, 8), "a.bias": t(BF16, 8)}, {"quant_method": "hqq"},
                     "3 tensors hold codes and scales in a scheme of hqq", False),
    "packed codes of FP-Quant": ({"a.qweight": t(U8, 8, 8), "a.scales": t(U8, 8, 1), "a.weight_global_scale": t(F32, 1)}, {"quant_method": "fp_quant"},
                                 "3 tensors hold codes and scales in a scheme of fp_quant", False),
}  # fmt: skip


@pytest.mark.parametrize("case", FAULTS)
def test_an_encoding_that_is_not_whole_is_found_and_not_cast(case: str, tmp_path: Path) -> None:
    tensors, quantization, sentence, damage = FAULTS[case]
    source = folder(tmp_path / "in", {"b.bias": t(BF16, 3), **tensors}, quantization)
    diagnosis = ckpttool.doctor(source)
    texts = [f.text for f in diagnosis.findings if f.kind == "encoding"]
    assert len(texts) == 1 and texts[0].startswith(sentence) and diagnosis.sound == (not damage)
    summary = ckpttool.inspect(source)
    assert summary.encoding and summary.encoding["faults"][0].startswith(sentence) and sentence[:40] in str(summary)
    with pytest.raises(Unsupported, match="A cast would round") as e:
        ckpttool.convert(source, tmp_path / "out", to="dcp", world_size=1, dtype="fp16")
    assert "dequantize=" not in str(e.value)  # which would refuse them, too
    name = next(n for n in tensors if "scale" in n or len(tensors) == 1)
    with pytest.raises(Unsupported, match="belongs to no whole encoding"):
        ckpttool.convert(source, tmp_path / "out", to="dcp", world_size=1, cast={f"model.{name}": "fp16"})
    ckpttool.convert(source, tmp_path / "out", to="dcp", world_size=1, cast={"*.bias": "fp16"})


def test_a_folder_of_mlx_is_named_and_its_codes_are_not_cast(tmp_path: Path) -> None:
    q = "model.layers.0.self_attn.q_proj"
    codes = {
        f"{q}.weight": torch.zeros(64, 8, dtype=torch.uint32),
        f"{q}.scales": t(F32, 64, 1),
        f"{q}.biases": t(F32, 64, 1),
    }
    source = folder(tmp_path / "in", PLAIN | codes)
    (source / "config.json").write_text(
        json.dumps({"model_type": "llama", "quantization": {"group_size": 64, "bits": 4}})
    )
    assert "mlx (4 bits), scales in scales" in str(ckpttool.inspect(source))
    found = encodings.find_in_tensors(entries(codes), {"bits": 4})
    assert found.weights[f"{q}.weight"].shape == (64, 64) and set(found.belongs) == set(codes)
    with pytest.raises(Unsupported, match="A cast would round"):
        ckpttool.convert(source, tmp_path / "out", to="dcp", world_size=1, dtype="bf16")
    ckpttool.convert(source, tmp_path / "out", to="hf")
    back = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(back[n], x) for n, x in codes.items())


@pytest.mark.slow
def test_a_config_says_more_than_names(tmp_path: Path) -> None:
    _, fp8 = SCHEMES["fp8"]
    cache = {"model.layers.0.self_attn.k_scale": t(F32), "model.layers.0.self_attn.v_scale": t(F32)}
    found = encodings.find_in_tensors(entries(PLAIN | fp8 | cache), QUANTISED)
    assert set(found.belongs) == {*fp8, *cache} and found.of == 4
    assert not {*cache} & set(encodings.find_in_tensors(entries(PLAIN | fp8 | cache)).belongs)
    bits = {"config_groups": {"g": {"weights": {"num_bits": 4}}}, "quant_method": "compressed-tensors"}
    assert "int4 packed in int32" in encodings.find_in_tensors(entries(SCHEMES["w4a16"][1]), bits).summary()
    # ModelOpt says it in a file of its own, which goes along to hf
    source = folder(tmp_path / "in", PLAIN | fp8)
    (source / "hf_quant_config.json").write_text('{"producer": {}, "quantization": {"quant_algo": "FP8"}}')
    assert (ckpttool.inspect(source).encoding or {})["method"] == "modelopt"
    ckpttool.convert(source, tmp_path / "out", to="hf")
    assert (tmp_path / "out" / "hf_quant_config.json").read_bytes() == (source / "hf_quant_config.json").read_bytes()


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": {"a": 1}}, {"weight_block_size": [0, 0]}, {"weight_block_size": [[1], 2]}, {"weight_block_size": 7},
        {"config_groups": {"g": {"weights": {"block_structure": [1, 2, 3], "num_bits": [4]}}, "h": 3}}, {"config_groups": [1]},
        {"bits": True, "weight_block_size": [True, True]}, "fp8", [1],
    ],
)  # fmt: skip
def test_a_config_that_makes_no_sense_decides_nothing(config: Any) -> None:
    called, tensors = SCHEMES["deepseek"]
    assert [e.scheme for e in encodings.find_in_tensors(entries(tensors), config).weights.values()] == [called]


@pytest.mark.parametrize("shape", [(), (0,), (0, 4), (3, 0), (1, 1, 1, 1)])
@pytest.mark.parametrize("of_scale", [(), (0,), (3, 0), (0, 0, 0)])
def test_no_shapes_are_too_odd_to_look_at(shape: tuple[int, ...], of_scale: tuple[int, ...]) -> None:
    for _, tensors in SCHEMES.values():
        odd = {
            n: x.new_zeros(of_scale if "scale" in n or "absmax" in n or "SCB" in n else shape) if x.dim() else x
            for n, x in tensors.items()
        }
        found = encodings.find_in_tensors(entries(odd))
        assert found.of <= len(odd) and found.summary()


def test_weights_that_are_no_codes_beside_a_config_that_says_so_are_a_finding(tmp_path: Path) -> None:
    source = folder(tmp_path / "in", PLAIN, QUANTISED)
    (found,) = (f for f in ckpttool.doctor(source).findings if f.kind == "encoding")
    assert "config.json says that the weights are quantised (compressed-tensors), and none is" in found.text
    ckpttool.convert(source, tmp_path / "out", to="dcp", world_size=1, dtype="fp16")
    assert not ckpttool.doctor(tmp_path / "out").findings


@pytest.mark.parametrize(
    ("tensors", "quantization", "kept"),
    [
        (PLAIN, QUANTISED, False),
        (PLAIN, {"quant_method": "bitsandbytes", "load_in_4bit": True}, True),  # which quantises when it loads
        (PLAIN | FAULTS["codes of AQLM"][0], {"quant_method": "aqlm"}, True),
        (PLAIN | SCHEMES["fp8-dynamic"][1], QUANTISED, True),
    ],
)
def test_to_hf_no_config_says_that_plain_weights_are_quantised(
    tensors: dict[str, torch.Tensor], quantization: dict[str, Any], kept: bool, tmp_path: Path
) -> None:
    """A job often has the config of the quantised model that it started from."""
    source = folder(tmp_path / "in", tensors, quantization)
    done = ckpttool.convert(source, tmp_path / "out", to="hf")
    assert ("quantization_config" in json.loads((tmp_path / "out" / "config.json").read_text())) == kept
    said = "left out, since no weight is codes: quantization_config of config.json"
    assert (said in done.notes) == (not kept)


def test_inspect_and_doctor_say_what_weights_are(tmp_path: Path) -> None:
    source = folder(tmp_path / "in", PLAIN | SCHEMES["nvfp4"][1], QUANTISED)
    line = "1 of 4 weights are codes: nvfp4 (groups of 16), scales in weight_scale"
    assert line in ckpttool_here("inspect", source).stdout and line in ckpttool_here("doctor", source).stdout
    said = json.loads(ckpttool_here("inspect", source, "--json").stdout)["encoding"]
    schemes = {"nvfp4 (groups of 16), scales in weight_scale": 1}
    bits = (64 * 64 + 64 * 8 + 4) * 8 / 8192
    plain = (32 * 128 + 128 + 64) * 16
    assert said == {
        "weights": 1, "of": 4, "schemes": schemes, "faults": [], "method": "compressed-tensors", "parameters": 8192 + plain // 16,
        "encoded_parameters": 8192, "encoded_bits_per_parameter": bits,
        "bits_per_parameter": (bits * 8192 + plain + 32) / (8192 + plain // 16),
    }  # fmt: skip
    assert ckpttool.inspect(FIXTURES / "hf_llama" / "ckpt").encoding is None
    done = ckpttool_here("convert", source, tmp_path / "out", "--to", "full", "--dtype", "bf16")
    assert done.returncode == 3 and f'--dtype bf16: {line}; first "model.{Q}.weight_packed"' in done.stderr


@pytest.mark.parametrize("to", ["zero1", "zero3", "fsdp1", "universal"])
def test_engines_that_train_in_float32_are_refused_by_name(to: str, tmp_path: Path) -> None:
    source = folder(tmp_path / "in", PLAIN | SCHEMES["deepseek"][1])
    world = {} if to == "universal" else {"world_size": 2}
    with pytest.raises(
        Unsupported, match=rf'"[^"]*{Q}\.weight[^"]*" (is codes|belongs to).*trains.*makes numbers of them'
    ) as e:
        ckpttool.convert(source, tmp_path / "out", to=to, **world)
    assert "cast" not in str(e.value)


def test_dequantize_says_which_schemes_it_does_not_compute(tmp_path: Path) -> None:
    rows = of(("weight", torch.uint32, (64, 16)), ("scales", BF16, (64, 2)), ("biases", BF16, (64, 2)))
    source = folder(tmp_path / "in", PLAIN | rows)
    with pytest.raises(
        Unsupported, match=rf'"model.{Q}.weight" is codes in mlx, whose numbers ckpttool does not compute'
    ):
        ckpttool.convert(source, tmp_path / "out", to="dcp", world_size=1, dequantize=["*"])


@pytest.mark.parametrize("name", [f"{Q}.weight", f"{Q}.weight_scale_inv"])
def test_a_writer_that_casts_by_itself_is_refused_by_the_engine(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layout of another package need not know of codes: its draft is looked at."""
    dcp = layouts.find("dcp")

    def write(*args: Any) -> Any:
        assert dcp.write is not None
        draft = dcp.write(*args)
        tensors = draft.checkpoint.tensors
        tensors[f"model.{name}"] = replace(tensors[f"model.{name}"], dtype="bfloat16")
        return draft

    source = folder(tmp_path / "in", PLAIN | SCHEMES["deepseek"][1])
    monkeypatch.setattr(planning.layouts, "choose_target_layout", lambda *_: replace(dcp, write=write))
    with pytest.raises(Unsupported, match=rf'"model\.{name}" (is codes|belongs to).*dcp keeps it as bfloat16'):
        ckpttool.convert(source, tmp_path / "out", to="dcp", world_size=1)


@pytest.mark.parametrize(
    "to", ["accelerate", "trainer", "lightning", "torchtitan", "megatron", "torch_checkpointing", "dcp", "audit"]
)
def test_layouts_that_keep_dtypes_keep_codes_and_scales(to: str, tmp_path: Path) -> None:
    tensors = SCHEMES["nvfp4"][1] | {n.replace("q_proj", "k_proj"): x for n, x in SCHEMES["deepseek"][1].items()}
    source, out = folder(tmp_path / "in", PLAIN | tensors), tmp_path / ("out.tar.zst" if to == "audit" else "out")
    ckpttool.convert(source, out, to=to, **({} if to == "audit" else {"world_size": 2}))
    with ckpttool.open(out) as opened, ckpttool.open(source) as before:
        assert set(encodings.find_in_checkpoint(opened.locate(), None).belongs) == {f"model.{n}" for n in tensors}
        for name in tensors:
            assert opened[f"model.{name}"].dtype == before[f"model.{name}"].dtype
            assert opened.read(f"model.{name}") == before.read(f"model.{name}")


@pytest.mark.slow
def test_to_hf_everything_stays_and_config_says_no_dtype_of_codes(tmp_path: Path) -> None:
    quantization = {"quant_method": "fp8", "weight_block_size": [32, 64]}
    source = folder(tmp_path / "in", PLAIN | SCHEMES["deepseek"][1], quantization)
    for first, options in ((source, {}), (source, {"cast": {"*embed*": "fp32"}})):
        ckpttool.convert(first, tmp_path / "out", to="hf", force=True, **options)
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        assert config["quantization_config"] == quantization
        assert config["dtype"] == ("float32" if options else "bfloat16")  # that of most numbers that are no codes
        got, wanted = load_file(tmp_path / "out" / "model.safetensors"), load_file(source / "model.safetensors")
        for name in SCHEMES["deepseek"][1]:
            assert got[name].dtype == wanted[name].dtype
            assert torch.equal(got[name].view(torch.uint8), wanted[name].view(torch.uint8))


@pytest.mark.slow
def test_codes_beside_a_config_that_does_not_say_so_are_refused(tmp_path: Path) -> None:
    source = folder(tmp_path / "in", PLAIN | SCHEMES["fp8-dynamic"][1])
    with pytest.raises(Unsupported, match=r"config\.json has no quantization_config"):
        ckpttool.convert(source, tmp_path / "out", to="hf")
    ckpttool.convert(source, tmp_path / "out", to="hf", options=ckpttool.HfOptions(allow_name_mismatch=True))
    ckpttool.convert(source, tmp_path / "out.safetensors")  # no config goes with it


def test_rows_of_a_vocabulary_of_codes_cannot_be_added(tmp_path: Path) -> None:
    head = {"lm_head.weight": t(F8, 32, 128), "lm_head.weight_scale": t(F32, 32, 1)}
    source = folder(tmp_path / "in", PLAIN | head)
    with pytest.raises(Unsupported, match=r'vocab_size=40: "model.lm_head.weight" is codes'):
        ckpttool.convert(source, tmp_path / "out", to="dcp", world_size=1, vocab_size=40)


def encoded_model(path: Path, fixture: str, wanted: str) -> tuple[Path, dict[str, torch.Tensor]]:
    """A model of a fixture with DeepSeek's fp8 in the weights whose names contain `wanted`."""
    of = FIXTURES / fixture / "ckpt"
    config = json.loads((of / "config.json").read_text())
    tensors: dict[str, torch.Tensor] = {}
    for file in of.glob("*.safetensors"):
        for name, x in load_file(file).items():
            if wanted in name and x.dim() == 2:
                tensors[name] = x.to(F8)
                tensors[f"{name}_scale_inv"] = torch.full([-(-n // 128) for n in x.shape], 0.5)
            else:
                tensors[name] = x
    path.mkdir()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (path / "config.json").write_text(json.dumps(config))
    return path, tensors


@pytest.mark.slow
def test_a_config_of_the_model_knows_the_tensors_of_an_encoding(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    source, tensors = encoded_model(tmp_path / "in", "hf_llama", "_proj")
    ckpttool.convert(source, tmp_path / "out", to="hf", config=str(source))
    got = load_file(tmp_path / "out" / "model.safetensors")
    assert {n: (x.dtype, x.shape) for n, x in got.items()} == {n: (x.dtype, x.shape) for n, x in tensors.items()}
    lost = tmp_path / "lost"
    lost.mkdir()
    save_file({n: x for n, x in tensors.items() if "up_proj" not in n}, lost / "model.safetensors")
    with pytest.raises(Unsupported, match=r"of its [0-9]+ tensors are missing"):  # it is still looked at
        ckpttool.convert(lost, tmp_path / "out2", to="hf", config=str(source))


@pytest.mark.slow
def test_experts_that_are_codes_keep_the_names_that_their_scales_have(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    source, tensors = encoded_model(tmp_path / "in", "hf_moe", ".experts.")
    assert sum("_scale_inv" in n for n in tensors) > 3
    ckpttool.convert(source, tmp_path / "dcp", to="dcp", world_size=2)
    with ckpttool.open(tmp_path / "dcp") as opened:
        assert {n.removeprefix("model.") for n in opened} == set(tensors)
        assert not encodings.find_in_checkpoint(opened.checkpoint, None).faults
    ckpttool.convert(tmp_path / "dcp", tmp_path / "out", to="hf", config=str(source))
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == set(tensors)


@pytest.mark.slow
def test_recognition_takes_time_in_proportion_to_the_number_of_tensors() -> None:
    one, dtypes = Chunks(2), ("float8_e4m3fn", "float32")

    def model(n: int) -> dict[str, TensorEntry]:
        names = [(f"layers.{i}.q.{leaf}", k) for i in range(n) for k, leaf in enumerate(("weight", "weight_scale_inv"))]
        return {name: TensorEntry(dtypes[k], ((256, 256), (2, 2))[k], ("model", name), one) for name, k in names}

    def seconds(n: int) -> float:
        tensors = model(n)
        best = 9.0
        for _ in range(3):
            began = time.thread_time()
            assert len(encodings.find_in_tensors(tensors).weights) == n
            best = min(best, time.thread_time() - began)
        return best

    assert seconds(16_000) < 16 * seconds(2_000)


def test_storage_reader_does_not_cast_codes_into_a_job(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    source = folder(tmp_path / "in", PLAIN | SCHEMES["fp8-dynamic"][1])
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        same = {f"{Q}.weight": torch.zeros(64, 128, dtype=F8), "model.norm.weight": torch.zeros(128)}
        dcp.load({"model": same}, storage_reader=ckpttool.storage_reader(source))
        assert torch.equal(same[f"{Q}.weight"].view(U8), SCHEMES["fp8-dynamic"][1][f"{Q}.weight"].view(U8))
        for name, shape in ((f"{Q}.weight", (64, 128)), (f"{Q}.weight_scale", (64, 1))):
            with pytest.raises(
                BaseException, match=rf'"model\.{Q}\.[a-z_]+" (is codes|belongs to the codes).* in the job'
            ):
                dcp.load({"model": {name: torch.zeros(shape)}}, storage_reader=ckpttool.storage_reader(source))
        plain = folder(tmp_path / "plain", {"table.weight": t(I8, 8, 8)})  # numbers, as its config says of no codes
        wide = {"table.weight": torch.zeros(8, 8, dtype=torch.int16)}
        dcp.load({"model": wide}, storage_reader=ckpttool.storage_reader(plain))
        assert torch.equal(wide["table.weight"], t(I8, 8, 8).to(torch.int16))
