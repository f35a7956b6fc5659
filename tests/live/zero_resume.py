"""Resumes a fixture's job from a DeepSpeed checkpoint with DeepSpeed alone, and judges the result.

    torchrun --standalone --nproc-per-node=N tests/live/zero_resume.py CASE_DIR CHECKPOINT_DIR TARGET [...] --out FILE

``CASE_DIR`` is a case of ``fixtures/`` of any engine; ``CHECKPOINT_DIR`` a DeepSpeed checkpoint for N ranks that should
hold the same state. ``TARGET`` is what the engine is to be: ``zero3``, ``zero2``, ``zero1``, ``zero0``, or ``universal3``
to ``universal1`` for the stage that loads a Universal Checkpoint; ``zero3:300`` has a ``sub_group_size`` of 300. Stage 3
does not go into one launch with the others, see ``fixtures/zero_jobs.py``.

The job is built with wrong values everywhere and loaded by ``engine.load_checkpoint``, optimizer included; see
``verdicts`` for the judgement. What ``zero_to_fp32`` finds in the checkpoint has to be the truth as well
(``zero_to_fp32_equal``, null where it does not apply).

DeepSpeed does not restore buffers and frozen weights from a Universal Checkpoint, whoever wrote it. They are set by hand
then, from the truth, and named in the verdict (``set_by_hand``).
"""

from contextlib import nullcontext, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import verdicts
from safetensors.torch import load_file
from torch import Tensor

from fixtures import jobs, zero_jobs

import deepspeed  # isort: skip  (after zero_jobs, which prepares the ground)


def script_difference(folder: Path, checkpoint: Path, left_out: set[str]) -> str | None:
    """How what DeepSpeed's own script reads is not the truth, or None; it gives every float tensor as float32."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with redirect_stdout(StringIO()):
        found = get_fp32_state_dict_from_zero_checkpoint(str(checkpoint))
    truth = load_file(folder / "truth.safetensors")

    def widened(tensors: dict[str, Any]) -> dict[str, Any]:
        return {k: t.float().contiguous() if t.is_floating_point() else t for k, t in tensors.items()}

    wanted = {k.removeprefix("model."): t for k, t in truth.items() if k.startswith("model.")}
    wanted = {name: tensor for name, tensor in wanted.items() if name not in left_out}
    return verdicts.first_difference(widened(dict(found)), widened(wanted))


def set_by_hand(job: zero_jobs.ZeroJob, truth: dict[str, Tensor]) -> list[str]:
    """Gives buffers and frozen weights the values of ``truth``; their names. A collective at stage 3."""
    frozen = {fqn: parameter for fqn, parameter in job.model.named_parameters() if not parameter.requires_grad}
    gathered = deepspeed.zero.GatheredParameters(list(frozen.values()), modifier_rank=0)
    with torch.no_grad(), gathered if job.stage == 3 and frozen else nullcontext():
        for fqn, parameter in frozen.items():
            parameter.copy_(truth[f"model.{fqn}"])
    buffers = dict(jobs.persistent_buffers(job.model))
    for fqn, buffer in buffers.items():
        buffer.copy_(truth[f"model.{fqn}"])
    return sorted({**frozen, **buffers})


def resume(folder: Path, checkpoint: Path, target: str) -> dict[str, Any]:
    """The verdict on ``checkpoint`` as a continuation of the case in ``folder``: a collective."""
    case = jobs.read_case(folder)
    kind, _, subgroup = target.partition(":")
    stage = int(kind[-1])
    if stage in (1, 2):
        case = verdicts.without_frozen_group(case)  # which the engine of these stages does not start with
    settings = {**case.get("settings", {}), "stage": stage, "zero": {}}
    if stage == case.get("settings", {}).get("stage"):
        settings["zero"] = case["settings"].get("zero", {})
    if subgroup:
        settings["zero"] = {**settings["zero"], "sub_group_size": int(subgroup)}
    more: dict[str, Any] = {"checkpoint": {"load_universal": True}} if kind.startswith("universal") else {}
    planned = {"precision": "float32", **case, "settings": settings}
    job = zero_jobs.start(planned, spoiled=True, **more)
    path, _ = job.engine.load_checkpoint(str(checkpoint))
    if path is None:
        raise FileNotFoundError(f"DeepSpeed finds no checkpoint in {checkpoint}")
    by_hand: list[str] = []
    if kind.startswith("universal"):
        by_hand = set_by_hand(job, load_file(folder / "truth.safetensors"))
    verdict = verdicts.judge(
        folder,
        state=zero_jobs.truth_of(job),
        train_step=lambda step: zero_jobs.train_step(job, step),
        parameters=lambda: zero_jobs.parameters_of(job),
        groups=job.inner.param_groups,
        scheduled=case["scheduler"],
    )
    frozen = {fqn for fqn, parameter in job.model.named_parameters() if not parameter.requires_grad}
    job.close()
    verdict |= {"zero_to_fp32_equal": None, "set_by_hand": by_hand}
    if stage and kind.startswith("zero"):
        # at stage 1 frozen weights are in the module only, where the script does not look for them
        left_out = frozen if stage == 1 else set()
        sentence = script_difference(folder, checkpoint, left_out) if dist.get_rank() == 0 else None
        verdict["zero_to_fp32_equal"] = sentence is None
        verdict["first_difference"] = verdict["first_difference"] or (sentence and f"zero_to_fp32: {sentence}")
        verdict["ok"] = verdict["ok"] and sentence is None
    return verdict


def main() -> None:
    """One rank of the launch."""
    jobs.join()
    zero_jobs.prepare()
    verdicts.run(
        "Resume fixtures' jobs from DeepSpeed checkpoints and judge the results.",
        "CASE_DIR CHECKPOINT_DIR TARGET",
        resume,
    )


if __name__ == "__main__":
    main()
