"""A QLoRA job, base model of NF4 codes included (fixtures/qlora_jobs.py, where bitsandbytes resumes it), through the commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peers import FIXTURES, difference, load_dcp, load_full, load_hf, same_value, tensors_of
from safetensors.torch import load_file

import ckpttool
from ckpttool.errors import Unsupported

QLORA = FIXTURES / "qlora"
JOB, BASE4, ADAPTER = QLORA / "job.pt", QLORA / "base4", QLORA / "adapter"


def test_the_adapter_of_the_state_is_the_file_that_peft_wrote(tmp_path: Path) -> None:
    ckpttool.adapter_extract(JOB, tmp_path / "peft", adapter_config=str(ADAPTER))
    name = "adapter_model.safetensors"
    assert (tmp_path / "peft" / name).read_bytes() == (ADAPTER / name).read_bytes()


@pytest.mark.parametrize("world_size", [1, 3])
def test_codes_scales_and_the_optimizer_go_through_layouts_of_jobs_bit_for_bit(world_size: int, tmp_path: Path) -> None:
    ckpttool.convert(JOB, tmp_path / "dcp", to="dcp", world_size=world_size)
    ckpttool.convert(tmp_path / "dcp", tmp_path / "back.pt")
    there, here, wanted = load_dcp(tmp_path / "dcp"), load_full(tmp_path / "back.pt"), load_full(JOB)
    model = {n: t for n, t in tensors_of(wanted).items() if n.startswith("model.")}
    assert len(model) > 50 and difference({n: t for n, t in tensors_of(there).items() if n in model}, model) == []
    assert difference(tensors_of(here["model"]), tensors_of(wanted["model"])) == []
    assert here["step"] == wanted["step"]
    names = [n for n in wanted["model"] if "lora_" in n]
    numbered = wanted["optimizer"]["state"]
    assert same_value([here["optimizer"]["state"][n] for n in names], [numbered[i] for i in range(len(names))])


def test_a_merge_into_codes_says_to_make_numbers_of_them_first(tmp_path: Path) -> None:
    for merge in (
        lambda: ckpttool.adapter_merge(BASE4, tmp_path / "out", adapter=ADAPTER),
        lambda: ckpttool.adapter_merge(JOB, dst=tmp_path / "out", adapter_config=str(ADAPTER)),
    ):
        with pytest.raises(Unsupported, match=r"quantised .*bitsandbytes nf4.*dequantize="):
            merge()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # of PEFT
def test_the_merged_model_computes_what_pefts_does_and_begins_with_the_numbers_of_bitsandbytes(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    truth = load_file(QLORA / "truth.safetensors")
    ckpttool.convert(BASE4, tmp_path / "base", to="hf", dequantize=["*"])
    numbers = {n.removeprefix("dequantised."): t for n, t in truth.items() if n.startswith("dequantised.")}
    assert difference(load_hf(tmp_path / "base"), numbers) == []
    assert "quantization_config" not in json.loads((tmp_path / "base" / "config.json").read_text())
    ckpttool.adapter_merge(tmp_path / "base", tmp_path / "merged", adapter=ADAPTER)
    ckpttool.convert(JOB, tmp_path / "plain.pt", dequantize=["*"])
    ckpttool.adapter_merge(tmp_path / "plain.pt", tmp_path / "second.pt", adapter_config=str(ADAPTER), drop=True)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    wanted = PeftModel.from_pretrained(base, str(ADAPTER)).merge_and_unload()
    found, ids = AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), truth["input_ids"]
    assert difference(load_hf(tmp_path / "merged"), {n: t.detach() for n, t in wanted.state_dict().items()}) == []
    with torch.no_grad():
        assert torch.equal(found(input_ids=ids).logits, wanted(input_ids=ids).logits)
        live = (found(input_ids=ids).logits.float() - truth["logits"]).abs().max()
    assert live < 0.02 * truth["logits"].abs().max()  # which computes in bf16 from codes, with fp32 norms
    second, first = load_full(tmp_path / "second.pt")["model"], load_hf(tmp_path / "merged")
    # in the state, what is no codes is fp32
    assert difference({n: t.to(first[n].dtype) for n, t in second.items()}, first) == []


def test_the_memory_of_the_job_is_that_of_codes_and_of_the_adapters_optimizer() -> None:
    found = ckpttool.inspect(JOB, fits="1x24GB", strategy=["ddp"]).memory
    assert found is not None
    adapter = sum(t.numel() for t in load_file(ADAPTER / "adapter_model.safetensors").values())
    row, state = found.rows[0], load_full(JOB)
    assert found.trained == adapter and row["grads"] == 4 * adapter
    assert row["params"] == sum(t.nbytes for t in state["model"].values())
    assert row["optimizer"] == sum(t.nbytes for slots in state["optimizer"]["state"].values() for t in slots.values())
