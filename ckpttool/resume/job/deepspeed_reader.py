"""Reads a save of DeepSpeed by DeepSpeed's own code: its ds_to_universal converts the ranks' shares into whole tensors,
a file for each, and torch.load reads those.

ds_to_universal runs in a process of its own, in which every torch.load has weights_only, with DeepSpeed's classes of
plain data allowed: nothing of the save runs. It needs as much disk as the save.

    zero/<FQN>/fp32.pt, exp_avg.pt, step.pt, ...        (deepspeed/checkpoint/ds_to_universal.py, 0.19)
"""

from __future__ import annotations

import glob
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from ...live.collectives import run_on_first_rank
from ...live.job_optimizers import list_optimizers
from ..trace.live_facts import named_parameters
from .build import Job

__all__ = ["NoReader", "fill_tensor", "find_save_folder", "prepare_deepspeed_load"]

_CONVERT = """
import sys, torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
sys.argv[1:] = [part for word in sys.argv[1:] for part in ("--" + word).split("=", 1)]
torch.serialization.add_safe_globals([DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address])
ds_to_universal.main(ds_to_universal.parse_arguments())
"""


class NoReader(Exception):
    """DeepSpeed cannot read this save here; the text says why."""


class DeepSpeedLoad(NamedTuple):
    """What DeepSpeed reads, {component: name of the reader}, and the function that loads it into the job."""

    readers: dict[str, str]
    load: Callable[[], None]


def find_save_folder(files: list[str]) -> str | None:
    """Return the DeepSpeed save (of ZeRO's ranks, or universal) that contains the files of a checkpoint; None if
    none does."""
    for path in files:
        folder, name = os.path.split(path)
        if name.endswith("_optim_states.pt"):
            return folder
        at = f"{os.sep}zero{os.sep}"
        if name == "fp32.pt" and at in path:
            return path[: path.rindex(at)]
    return None


def prepare_deepspeed_load(job: Job, save: str, scratch: str | None, trained: bool) -> DeepSpeedLoad:
    """Convert a ZeRO save with DeepSpeed, unless it is universal already, and prepare its load into a job. A
    collective.

    Args:
        job: the job as it was built.
        save: the folder of the save.
        scratch: a folder that all ranks share, for the converted save; None if there is none.
        trained: also load the optimizer's slots.

    Returns:
        The names of the readers, and the function that loads.

    Raises:
        NoReader: DeepSpeed is not installed or cannot convert the save, or the save lacks a parameter of the job.
    """
    universal = save
    if not os.path.isdir(os.path.join(save, "zero")):
        if why := run_on_first_rank(lambda: _convert_to_universal(save, scratch)):
            raise NoReader(why)
        universal = os.path.join(str(scratch), "universal")
    params = {n: p for n, p in named_parameters(job.model).items() if p.requires_grad}
    files = {n: glob.glob(os.path.join(glob.escape(os.path.join(universal, "zero", n)), "*.pt")) for n in params}
    if lost := [n for n, found in files.items() if not any(f.endswith("fp32.pt") for f in found)]:
        raise NoReader(f"DeepSpeed's universal save has no {lost[0]}")
    who = "DeepSpeed's ds_to_universal" if universal != save else "torch.load of DeepSpeed's universal save"
    readers = {"model": f"{who} (trained weights)"}
    if trained:
        readers["optim"] = f"{who} (slots; ckpttool: options)"

    def load() -> None:
        """Copy the whole tensors into the job."""
        owners = {id(p): o for o in list_optimizers(job.optimizer) for g in o.param_groups for p in g["params"]}
        for n, p in params.items():
            for path in files[n]:
                slot = os.path.basename(path)[:-3]
                if slot == "fp32":
                    fill_tensor(p, _load_tensor(path))
                elif trained and slot in (state := owners[id(p)].state.get(p, {})):
                    state[slot] = _fill_slot(state[slot], _load_tensor(path))

    return DeepSpeedLoad(readers, load)


def _convert_to_universal(save: str, scratch: str | None) -> str | None:
    """Let DeepSpeed convert a save into the folder "universal" of `scratch`; return why that failed, or None if it
    did not."""
    if importlib.util.find_spec("deepspeed") is None:
        return "DeepSpeed is not installed here"
    if scratch is None:
        return "there is no scratch folder that all ranks share, which DeepSpeed's conversion needs"
    need = sum(os.path.getsize(f) for f in glob.glob(os.path.join(glob.escape(save), "*.pt")))
    if shutil.disk_usage(scratch).free < 2 * need:
        return f"{scratch} has no room for DeepSpeed's conversion, {2 * need / 1e9:.1f} GB"
    target = os.path.join(scratch, "universal")
    shutil.rmtree(target, ignore_errors=True)
    plain = {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1", "DS_ACCELERATOR": "cpu"}
    ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    words = {"input_folder": save, "output_folder": target, "num_extract_workers": 1, "num_merge_workers": 1}
    given = [*(f"{k}={x}" for k, x in words.items()), "inject_missing_state"]
    done = subprocess.run(
        [sys.executable, "-P", "-c", _CONVERT, *given],
        env={**{k: v for k, v in os.environ.items() if k not in ranks}, **plain},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    if not done.returncode:
        return None
    lines = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
    return f"DeepSpeed's ds_to_universal failed: {lines[-1][:200]}"


def _load_tensor(path: str) -> object:
    """Return the tensor in a file of a universal DeepSpeed save, on the CPU.

    Args:
        path: full path of the file.
    """
    import torch

    found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    return found["param"] if isinstance(found, dict) else found


def _fill_slot(live: object, stored: Any) -> object:
    """Return what an optimizer gets as one of its slots: the live tensor, filled in place with the stored one, or a
    number if the job has no tensor there.

    Args:
        live: the job's tensor or number in that slot.
        stored: the stored tensor.
    """
    if not hasattr(live, "element_size"):
        return stored.item()
    fill_tensor(live, stored)
    return live


def fill_tensor(live: Any, whole: Any) -> None:
    """Copy an unsharded tensor into a live one with as many elements; each rank takes its shard if that is a
    DTensor."""
    import torch
    from torch.distributed.tensor import DTensor, distribute_tensor

    with torch.no_grad():
        whole = whole.reshape(live.shape).to(live.device)
        if isinstance(live, DTensor):
            whole = distribute_tensor(whole, live.device_mesh, live.placements, src_data_rank=None)
        live.copy_(whole)
