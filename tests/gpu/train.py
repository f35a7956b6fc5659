"""The original job of test_resume_gpu: FSDP2 under NCCL, bfloat16, synthetic rows; saved after two steps, recorded after.

Its model is built on the GPU. With "deterministic" it computes with deterministic kernels, otherwise with those that torch chooses.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

import ckpttool
from ckpttool.resume.trace.batches import open_data

ROWS, MICRO, SEQUENCE, SAVED, STEPS = 8, 4, 1024, 2, 12


def main(folder: Path, kernels: str) -> None:
    """The whole job."""
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    torch.use_deterministic_algorithms(kernels == "deterministic")
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "config"), dtype=torch.float32)
    mesh = init_device_mesh("cuda", (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1)
    rows, _ = open_data("synthetic", seed=0, sequence=SEQUENCE, vocabulary=model.config.vocab_size)
    recorder = ckpttool.Recorder(
        folder / "reference.jsonl", model, optimizer,
        global_batch=ROWS, micro_batch=MICRO, sequence=SEQUENCE, dtype="bf16", clip=1.0, data="synthetic", seed=0,
    )  # fmt: skip
    for step in range(1, STEPS + 1):
        first = (step - 1) * ROWS
        ids = torch.stack([torch.as_tensor(rows(i)["input_ids"]) for i in range(first, first + ROWS)]).cuda()
        total = 0.0
        for part in ids.split(MICRO):
            logits = model(input_ids=part, use_cache=False).logits[:, :-1].float()
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum")
            loss = loss / (ROWS * (SEQUENCE - 1))
            loss.backward()
            total += loss.double().item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        recorder.step(step, loss=total, batch=ids, tokens=ROWS * (SEQUENCE - 1), grad_norm=norm)
        if step == SAVED:
            recorder.state(step)
            weights, state = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optim": state, "step": step}, checkpoint_id=folder / "ckpt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
    sys.stdout.flush()
    os._exit(0)  # threads of torch.distributed now and then abort the process on the usual way out
