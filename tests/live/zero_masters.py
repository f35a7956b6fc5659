"""Ranks of a DeepSpeed engine in bf16 that load what was made of a Megatron-Core job, and say what they hold then. Run by test_zero_masters.py:

    zero_masters.py JOB.json    {"checkpoint": folder, "stage": 1 to 3, "shapes": {FQN: shape}, "groups": [[FQN, ...], ...], "out": file}

Rank 0 writes `out`: model.<FQN>, the fp32 partitions of all ranks; module.<FQN>, what the engine computes with; optim.<FQN>.<slot>.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from fixtures import jobs, zero_jobs

import deepspeed  # isort: skip  (after zero_jobs, which prepares the ground)


def main() -> None:
    """One rank."""
    jobs.join()
    zero_jobs.prepare()
    job = json.loads(Path(sys.argv[1]).read_text())
    model = torch.nn.Module()
    for fqn, shape in job["shapes"].items():
        at = model
        *inner, last = fqn.split(".")
        for name in inner:
            if not hasattr(at, name):
                at.add_module(name, torch.nn.Module())
            at = getattr(at, name)
        at.register_parameter(last, torch.nn.Parameter(torch.full(shape, 7.0)))
    named = dict(model.named_parameters())
    optimizer = torch.optim.AdamW([{"params": [named[n] for n in names]} for names in job["groups"]])
    config = {
        "train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True, "bf16": {"enabled": True},
        "zero_optimization": {"stage": job["stage"]},
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=optimizer)
    path, _ = engine.load_checkpoint(job["checkpoint"])
    assert path is not None
    loaded = zero_jobs.ZeroJob(engine, job["stage"])
    held = zero_jobs.truth_of(loaded)
    held |= {f"module.{n}": zero_jobs._full(loaded, p) for n, p in engine.module.named_parameters()}
    if dist.get_rank() == 0:
        save_file({n: t.contiguous() for n, t in held.items()}, job["out"])


if __name__ == "__main__":
    main()
    jobs.leave()
