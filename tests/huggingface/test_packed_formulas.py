"""GPTQ, AWQ and bitsandbytes: `--dequantize` gives the numbers that gptqmodel 7.7, autoawq 0.2.9 and bitsandbytes 0.50 gave for weights that
they had packed themselves (fixtures/packed, made by fixtures/packed_jobs.py; the libraries are no dependency of the tests)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import ckpttool_here
from peers import FIXTURES
from safetensors.torch import load_file, save_file

import ckpttool
from ckpttool.errors import Corrupt, Unsupported

PACKED = FIXTURES / "packed"
CASES: dict[str, dict[str, Any]] = json.loads((PACKED / "cases.json").read_text())
#: {folder: how --dtype calls the dtype of its truth}.
FOLDERS = {
    "gptq_act_order": "fp16",
    "gptq_v2_3bit": "fp16",
    "awq": "fp16",
    "bnb_nf4": "bf16",
    "bnb_fp4": "fp16",
    "bnb_int8": "fp32",
}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
    )


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        out |= load_file(file)
    return out


def copy_of(name: str, to: Path, **config: Any) -> Path:
    """The fixture without its truth, in two shards that cut through its weights, as the Hub has large models."""
    to.mkdir()
    tensors = load_file(PACKED / name / "model.safetensors")
    names = sorted(tensors)
    of = {n: f"model-0000{1 + (i % 3 == 0)}-of-00002.safetensors" for i, n in enumerate(names)}
    for file in set(of.values()):
        save_file({n: tensors[n] for n in names if of[n] == file}, to / file, {"format": "pt"})
    (to / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": of}))
    found = json.loads((PACKED / name / "config.json").read_text())
    found["quantization_config"] |= config
    (to / "config.json").write_text(json.dumps(found))
    return to


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_has_the_numbers_of_its_library_bit_for_bit(name: str, tmp_path: Path) -> None:
    source = copy_of(name, tmp_path / "in")
    ckpttool.convert(source, tmp_path / "out", to="hf", dequantize=["*"], dtype=FOLDERS[name])
    truth, got = load_file(PACKED / name / "truth.safetensors"), weights_of(tmp_path / "out")
    assert len(truth) == 14 and [n for n, t in truth.items() if not same_bits(got[n], t)] == []
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    # through another layout, at three ranks, the codes are the same: dequantised there, so are the numbers
    ckpttool.convert(source, tmp_path / "dcp", to="dcp", world_size=3)
    ckpttool.convert(
        tmp_path / "dcp", tmp_path / "full.pt", to="full", dequantize=["*"], dtype=FOLDERS[name], config=str(source)
    )
    again = torch.load(tmp_path / "full.pt")["model"]
    assert [n for n, t in truth.items() if not same_bits(again[n], t)] == []


def test_transformers_loads_what_was_dequantised(tmp_path: Path) -> None:
    import transformers

    ckpttool.convert(
        copy_of("gptq_act_order", tmp_path / "in"), tmp_path / "out", to="hf", dequantize=["*"], dtype="fp16"
    )
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    state = model.state_dict()
    assert all(same_bits(state[n], t) for n, t in load_file(PACKED / "gptq_act_order" / "truth.safetensors").items())


#: {text of quantization_config: cases that it is true of}.
CONFIGS: dict[str, list[str]] = {}
for case, about in CASES.items():
    if case.startswith("gptq"):
        form = "gptq" if about["v1"] else "gptq_v2"
        said = {
            "quant_method": "gptq",
            "bits": about["bits"],
            "group_size": about["group_size"],
            "checkpoint_format": form,
        }
    elif case.startswith("awq"):
        said = {"quant_method": "awq", "bits": 4, "group_size": about["group_size"], "version": "gemm"}
    else:
        said = {"quant_method": "bitsandbytes"}
    CONFIGS.setdefault(json.dumps(said), []).append(case)


@pytest.mark.parametrize("config", CONFIGS)
def test_odd_shapes_and_all_bits(config: str, tmp_path: Path) -> None:
    """Sizes that no group and no block divides, absmax that is quantised itself, codes in other dtypes, zero points of both formats."""
    tensors = load_file(PACKED / "modules.safetensors")
    source = tmp_path / "in"
    source.mkdir()
    cases = CONFIGS[config]
    held = {
        n.replace(".", ".m.", 1): t
        for n, t in tensors.items()
        if n.partition(".")[0] in cases and not n.endswith(".truth")
    }
    save_file(held, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps({"quantization_config": json.loads(config)}))
    ckpttool.convert(source, tmp_path / "out.safetensors", dequantize=["*"], dtype="fp32")
    got = load_file(tmp_path / "out.safetensors")
    for case in cases:
        truth = tensors[f"{case}.truth"].float()
        if case.startswith("fp4"):  # bitsandbytes gives its second zero a sign or none, by the shape
            truth, got[f"{case}.m.weight"] = truth + 0.0, got[f"{case}.m.weight"] + 0.0
        assert same_bits(got[f"{case}.m.weight"], truth), case


def test_formats_of_gptq_and_awq_that_are_not_known_are_refused(tmp_path: Path) -> None:
    for name, config in (("gptq_act_order", {"checkpoint_format": "gptq_p"}), ("awq", {"version": "gemv"})):
        source = copy_of(name, tmp_path / name, **config)
        with pytest.raises(
            Unsupported, match=r"is codes in (gptq|awq) \(int4 .*whose numbers ckpttool does not compute"
        ):
            ckpttool.convert(source, tmp_path / "out", to="hf", dequantize=["*"])
    # without a config, nothing says whether zero points are stored minus one
    shutil.copy(PACKED / "gptq_act_order" / "model.safetensors", tmp_path / "alone.safetensors")
    with pytest.raises(Unsupported, match=r"of a checkpoint_format that only its config\.json says"):
        ckpttool.convert(tmp_path / "alone.safetensors", tmp_path / "out.pt", to="full", dequantize=["*"])


def damage(tmp_path: Path, name: str, change: Any) -> Path:
    source = copy_of(name, tmp_path / "in")
    for file in source.glob("*.safetensors"):
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, {"format": "pt"})
    return source


def test_codes_that_contradict_their_scales_are_corrupt(tmp_path: Path) -> None:
    def break_groups(tensors: dict[str, torch.Tensor]) -> None:
        for n, t in tensors.items():
            t[...] = t + 100 if n.endswith("0.self_attn.q_proj.g_idx") else t

    source = damage(tmp_path, "gptq_act_order", break_groups)
    done = ckpttool_here("convert", source, tmp_path / "out", "--to", "hf", "--dequantize", "*")
    assert (
        done.returncode == 4
        and 'q_proj.g_idx" names groups of 32 columns that have no scale: there are 2' in done.stderr
    )
    assert not (tmp_path / "out").exists() and "Traceback" not in done.stderr
    shutil.rmtree(source)

    def break_state(tensors: dict[str, torch.Tensor]) -> None:
        for n in tensors:
            if n.endswith("0.mlp.up_proj.weight.quant_state.bitsandbytes__nf4"):
                tensors[n] = torch.tensor(
                    list(b'{"shape": [64, 64], "dtype": "int9", "blocksize": 64}'), dtype=torch.uint8
                )

    with pytest.raises(Corrupt, match=r'quant_state\.bitsandbytes__nf4" is not what bitsandbytes writes'):
        ckpttool.convert(damage(tmp_path, "bnb_nf4", break_state), tmp_path / "out", to="hf", dequantize=["*"])


@pytest.mark.parametrize(
    ("name", "part", "made", "text"),
    [
        ("gptq_act_order", "qzeros", torch.zeros(3, 5, dtype=torch.int32), r'qzeros" is \[3, 5\], and not'),
        ("gptq_act_order", "g_idx", torch.zeros(32), 'g_idx" names groups of 32 columns that have no scale'),
        ("awq", "qzeros", torch.zeros(9, 9, dtype=torch.int32), r'qzeros" is \[9, 9\], and not'),
        ("bnb_nf4", "weight.quant_map", torch.zeros(3), 'quant_map" does not have 16 numbers'),
        ("bnb_nf4", "weight.nested_quant_map", torch.zeros(7), 'nested_quant_map" does not have 256 numbers'),
        ("bnb_nf4", "weight.nested_absmax", torch.zeros(0), 'nested_absmax" does not have 1 numbers'),
        ("bnb_fp4", "shape", [-96, -64], "is not what bitsandbytes writes"),
        ("bnb_fp4", "shape", [2**40, 2**40], "and a parameter of"),
        ("bnb_fp4", "shape", [64.0, 32.5], "is not what bitsandbytes writes"),
    ],
)
def test_tables_and_shapes_that_do_not_fit_are_corrupt(
    name: str, part: str, made: Any, text: str, tmp_path: Path
) -> None:
    done = []

    def change(tensors: dict[str, torch.Tensor]) -> None:
        of_state = "quant_state." if part == "shape" else f"0.mlp.up_proj.{part}"
        for n in [n for n in tensors if (of_state in n if part == "shape" else n.endswith(of_state))]:
            state = json.loads(bytes(tensors[n].tolist())) | {part: made} if part == "shape" else {}
            tensors[n] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8) if state else made
            done.append(n)

    source = damage(tmp_path, name, change)
    assert done
    for to in ("full", "dcp"):
        with pytest.raises(Corrupt, match=text):
            ckpttool.convert(source, tmp_path / "out", to=to, world_size=None if to == "full" else 2, dequantize=["*"])
        assert not (tmp_path / "out").exists()
