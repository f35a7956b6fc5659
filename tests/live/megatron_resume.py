"""Ranks of a Megatron-Core job that load checkpoints with `dist_checkpointing.load`, compare their modules and optimizers with the tensors of
the job that saved, and train on. Run by test_megatron_load.py under torchrun:

    megatron_resume.py CASES.json    [{"checkpoint": folder, "truth": file, "how": arguments of fixtures/megatron/jobs.Job}]

Rank 0 writes the same list with "different" (sentences), "losses", "iteration" and "step" of each into CASES.json.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from fixtures.jobs import leave
from fixtures.megatron import jobs


def differences(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Where two sets of tensors are not equal bit for bit. Rows of padding that only one of two vocabularies has are left out."""
    import torch

    out = [f"{k} is on one side only" for k in found.keys() ^ wanted.keys()]
    for k in found.keys() & wanted.keys():
        a, b = found[k], wanted[k]
        if "word_embeddings" in k or "output_layer" in k:
            rows = min(len(a), len(b))
            a, b = a[:rows], b[:rows]
        if a.dtype != b.dtype or not torch.equal(a, b):
            out.append(f"{k} is {a.dtype} {list(a.shape)} and differs from {b.dtype} {list(b.shape)}")
    return sorted(out)


def with_torch_s_adam() -> None:
    """Megatron-Core 0.16 loads tensors for all that torch's Adam keeps of a parameter, and its own savers leave out one of them: the step,
    which it has set before, from the param groups. (The Adam of Transformer Engine, which needs a GPU, keeps no such tensor.)"""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    load = DistributedOptimizer._set_main_param_and_optimizer_states

    def patched(self: Any, param: Any, tensors: dict[str, Any]) -> None:
        load(self, param, {"step": self._get_main_param_and_optimizer_states(param)["step"], **tensors})

    DistributedOptimizer._set_main_param_and_optimizer_states = patched


def resume(case: dict[str, Any]) -> None:
    """Load one checkpoint and train on."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling
    from safetensors.torch import load_file

    job = jobs.Job(**case["how"])
    job.metadata = dist_checkpointing.load_content_metadata(case["checkpoint"])  # as Megatron-LM does
    job.step(99)  # Megatron-Core asks torch's Adam for a state before it loads one; all of it has other values then
    state = job.state(is_loading=True)
    if not case.get("rng"):
        del state["rng_state"]  # of another number of model-parallel ranks
    # another trainer's state has no _extra_state: --dist-ckpt-strictness log_unexpected, and Megatron-LM loads such a model not strictly
    foreign = case.get("override", False)
    strict = StrictHandling.LOG_UNEXPECTED if foreign else StrictHandling.RAISE_UNEXPECTED
    loaded = dist_checkpointing.load(state, case["checkpoint"], strict=strict)
    job.module.load_state_dict(loaded["model"], strict=not foreign)
    job.optimizer.load_state_dict(loaded["optimizer"])
    for optimizer in getattr(job.optimizer, "chained_optimizers", [job.optimizer]):
        for slots in optimizer.optimizer.state.values():
            if "step" in slots:
                slots["step"] = slots["step"].clone()  # one tensor for all after the load, which each would count up
    job.scheduler.num_steps = 0  # it adds what it loads
    if foreign:  # --override-opt-param-scheduler
        job.scheduler.override_opt_param_scheduler, job.scheduler.use_checkpoint_opt_param_scheduler = True, False
    job.scheduler.load_state_dict(loaded["opt_param_scheduler"])
    case["different"] = differences(jobs.truth(job), load_file(case["truth"]))
    case["iteration"] = loaded["iteration"]
    case["args"] = [loaded["args"].num_layers, str(getattr(loaded["args"], "attention_backend", None))]
    if case.get("rng"):
        case["rng_bytes"] = len(loaded["rng_state"][0][0]["torch_rng_state"])
    case["losses"] = [job.step(k) for k in range(jobs.STEPS, 2 * jobs.STEPS)]


if __name__ == "__main__":
    jobs.on_cpu()
    with_torch_s_adam()
    path = Path(sys.argv[1])
    cases = json.loads(path.read_text())
    for case in cases:
        resume(case)
    if int(os.environ["RANK"]) == 0:
        path.write_text(json.dumps(cases))
    leave()
