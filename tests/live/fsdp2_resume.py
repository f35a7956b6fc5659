"""Resumes a fixture's job from a DCP checkpoint with torch alone, and judges the result.

    torchrun --standalone --nproc-per-node=N tests/live/fsdp2_resume.py CASE_DIR CHECKPOINT_DIR [...] --out result.json

``CASE_DIR`` is a case of ``fixtures/``; ``CHECKPOINT_DIR`` is its own ``ckpt`` or any DCP folder that should hold the
same state; there may be several pairs, one job after the other, because starting torch on every rank takes most of the
time. At any world size N the job is built again under FSDP2 over a 1-d mesh, filled
with wrong values, and loaded by ``get_state_dict``, ``dcp.load``, ``set_state_dict``. Then every tensor must be equal
to ``truth.safetensors`` bit for bit, and one more step must give the loss and the parameters of the job that was never
interrupted, up to the rounding of sums in another order. The wrong values are there because a frozen weight, or one
that the checkpoint forgot, would otherwise pass by being initialised from the same seed. A checkpoint without optimizer
is judged by its weights and the loss.

The verdicts are a JSON list, one object a pair: ``loaded_equal``, ``first_difference`` (null or a sentence), ``loss``, ``loss_reference``,
``max_param_difference`` (null without ``next.safetensors``), ``ok``; the exit status is 0 if all are ``ok``. No line of ckpttool runs here.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fixtures import jobs

# Largest difference of a loss or a parameter after one step. Another world size sums gradients in another order: that
# moves float32 by some 1e-7 and bfloat16 by a few of its steps.
TOLERANCE = {"float32": 5e-6, "bfloat16": 2e-2}


@torch.no_grad()
def spoil(job: jobs.Job) -> None:
    """Overwrites every parameter, buffer and learning rate of ``job`` with a value that no checkpoint has."""
    for parameter in job.model.parameters():
        parameter.fill_(-7.0)
    persistent = job.model.state_dict()
    for name, buffer in job.model.named_buffers():
        if name in persistent:
            buffer.copy_(buffer.logical_not() if buffer.dtype == torch.bool else torch.full_like(buffer, -7))
    for group in job.optimizer.param_groups:
        group["lr"] = 7.0


def load(job: jobs.Job, checkpoint: Path) -> bool:
    """Loads ``checkpoint`` into ``job`` as torch's own documentation does it; gives whether there was an optimizer.

    A collective.
    """
    model, optim = get_state_dict(job.model, job.optimizer)
    # get_state_dict invents a zero state for a parameter that never had a gradient; the checkpoint rightly has none,
    # and dcp.load would call it missing
    stored = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    if not any(key.startswith("optim.") for key in stored):
        dcp_load({"model": model}, checkpoint_id=checkpoint)
        set_model_state_dict(job.model, model)
        return False
    state: Any = optim["state"]
    for fqn in list(state):
        if not any(key.startswith(f"optim.state.{fqn}.") for key in stored):
            del state[fqn]
    dcp_load({"model": model, "optim": optim}, checkpoint_id=checkpoint)
    # not strict for the same parameter; what is missing in truth shows in the comparison
    set_state_dict(
        job.model,
        job.optimizer,
        model_state_dict=model,
        optim_state_dict=optim,
        options=StateDictOptions(strict=False),
    )
    return True


def difference(name: str, found: Tensor | None, expected: Tensor | None) -> str | None:
    """A sentence on how ``found`` is not bit for bit ``expected``, or None if it is."""
    if found is None or expected is None:
        return f"{name}: {'not loaded' if found is None else 'loaded, but not in the truth'}"
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return f"{name}: {found.dtype} {list(found.shape)} instead of {expected.dtype} {list(expected.shape)}"
    if not found.numel():
        return None
    flat, wanted = found.reshape(-1), expected.reshape(-1)
    unequal = (flat.view(torch.uint8) != wanted.view(torch.uint8)).reshape(len(flat), -1).any(dim=1)
    if not unequal.any():
        return None
    first = int(unequal.nonzero()[0])
    return (
        f"{name}: {int(unequal.sum())} of {len(flat)} elements differ, "
        f"the first at {first}: {flat[first].item()!r} instead of {wanted[first].item()!r}"
    )


def first_difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str | None:
    """The first ``difference`` between two sets of named tensors, in the order of the names."""
    for name in sorted({*found, *expected}):
        sentence = difference(name, found.get(name), expected.get(name))
        if sentence is not None:
            return sentence
    return None


def largest_difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest absolute difference between two sets of float32 tensors with the same names and shapes."""
    if found.keys() != expected.keys():
        raise ValueError(f"parameters differ by name: {sorted(found.keys() ^ expected.keys())}")
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)


def resume(folder: Path, checkpoint: Path) -> dict[str, Any]:
    """The verdict on ``checkpoint`` as a continuation of the case in ``folder``: a collective, the same everywhere."""
    case = jobs.read_case(folder)
    job = jobs.start({**case, "scheduler": False}, {"dp": dist.get_world_size()})
    spoil(job)
    with_optimizer = load(job, checkpoint)
    truth = jobs.truth_of(job.model, job.optimizer if with_optimizer else None)
    unequal = first_difference(truth, load_file(folder / "truth.safetensors"))

    loss = jobs.train_step(job, case["step"])
    parameter_difference = None
    if (folder / "next.safetensors").exists():
        parameter_difference = largest_difference(jobs.parameters_of(job.model), load_file(folder / "next.safetensors"))
    reference: float = case["loss_next"][0]
    tolerance = TOLERANCE[case["model"]["kwargs"].get("dtype", "float32")]
    # written so that NaN is not ok
    goes_on = abs(loss - reference) <= tolerance and (parameter_difference is None or parameter_difference <= tolerance)
    return {
        "loaded_equal": unequal is None,
        "first_difference": unequal,
        "loss": loss,
        "loss_reference": reference,
        "max_param_difference": parameter_difference,
        "ok": unequal is None and goes_on,
    }


def main() -> int:
    """Parses the command line, resumes, writes the verdicts from rank 0; 0 if all are good and 1 if not."""
    parser = argparse.ArgumentParser(description="Resume fixtures' jobs from DCP checkpoints and judge the results.")
    parser.add_argument("paths", type=Path, nargs="+", metavar="CASE_DIR CHECKPOINT_DIR")
    parser.add_argument("--out", type=Path, required=True, help="file for the verdicts")
    arguments = parser.parse_args()
    paths: list[Path] = arguments.paths
    if len(paths) % 2:
        parser.error("every case needs a checkpoint")
    rank, _ = jobs.join()
    verdicts = [resume(case, checkpoint) for case, checkpoint in zip(paths[::2], paths[1::2], strict=True)]
    if rank == 0:
        arguments.out.write_text(json.dumps(verdicts, indent=1) + "\n", encoding="utf-8")
    dist.destroy_process_group()
    return 0 if all(v["ok"] for v in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
