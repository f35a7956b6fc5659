"""Corrupt and malicious DeepSpeed saves: refused for the right reason, in bounded time and memory, and nothing runs."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from evil import Calls, Case, runs, saved
from peers import difference, load_full, tensors_of
from zero_evil import (
    MODEL,
    MODEL3,
    OPTIM,
    copied,
    inside,
    job,
    latest,
    model,
    model2,
    optim,
    optim2,
    put,
    renamed,
    strided,
    swapped,
    touched,
    uni,
    without,
    z0,
    z2,
    z3,
)
from zero_files import LossScaler, ZeroStageEnum, edit, save, save_of, universal, zero3

import ckpttool
from ckpttool.errors import CkpttoolError, Corrupt, Unsafe, Unsupported

STATE = ("optimizer_state_dict", "state")
GROUPS = ("optimizer_state_dict", "param_groups")
FRAGMENT = ("frozen_param_fragments", "f")
OTHER = "The files are from different saves"


def masters(change: Any, *ranks: int) -> Any:
    """The first flat tensor of stage 3 is another."""
    return optim(put("fp32_flat_groups", 0, change), *ranks)


def masters2(change: Any, *ranks: int) -> Any:
    """The first flat tensor of stage 2 is another."""
    return optim2(put("single_partition_of_fp32_groups", 0, change), *ranks)


def short(t: torch.Tensor) -> torch.Tensor:
    return t.detach()[:-1].clone()


def shape(value: Any, make: Any = model) -> Any:
    """param_shapes gives "w", which is (5, 3), another one."""
    return make(put("param_shapes", 0, "w", value))


def state_of(change: Any, *ranks: int) -> Any:
    """`state` of the base optimizer."""
    return optim(lambda t: change(t["optimizer_state_dict"]["state"]), *ranks)


def keyed(first: Any, second: Any) -> Any:
    return state_of(lambda s: [s.__setitem__(k, s.pop(i)) for i, k in enumerate((first, second))] and None)


def swapped_ids(t: Any) -> None:
    a, b = t["optimizer_state_dict"]["param_groups"]
    a["params"], b["params"] = b["params"], a["params"]


def deep(t: Any) -> None:
    x: Any = []
    for _ in range(300):
        x = {"k": x}
    t["deep"] = x


def deep_file(tag: Path) -> None:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        edit(tag / MODEL3.format(1), deep)
    finally:
        sys.setrecursionlimit(limit)


def outside(what: str) -> Any:
    """A case: `latest`, the folder of the tag, or a file in it is a link to one outside the checkpoint."""

    def make(folder: Path, canary: Path) -> Path:
        zero3(job(), folder, 2)
        names = {"latest": "latest", "tag": "global_step3", "file": "global_step3/" + OPTIM.format(1)}
        os.rename(folder / names[what], folder.parent / "outside")
        (folder / names[what]).symlink_to(folder.parent / "outside")
        return folder

    return make


def both_saves(folder: Path, canary: Path) -> Path:
    return zero3(job(steps=4), zero3(job(), folder, 2), 3)


def mixed(names: str) -> Any:
    """A case: rank 1's files are of the save before."""

    def make(folder: Path, canary: Path) -> Path:
        zero3(job(), folder, 2)
        zero3(job(steps=2, step=torch.tensor(2.0)), folder.parent / "before", 2)
        for n in (MODEL3, OPTIM):
            if n in names:
                shutil.copy(folder.parent / "before" / "global_step2" / n.format(1), folder / "global_step3")
        shutil.rmtree(folder.parent / "before")
        return folder

    return make


def many(n: int) -> Any:
    return model(lambda t: t.update({f"k{i}": i for i in range(n)}), 0)


MISSING: dict[str, Case] = {
    "model file of rank 1": Case(z3(lambda t: os.unlink(t / MODEL3.format(1))), Corrupt, "1 model files are missing, first that of rank 1"),
    "model file of rank 0": Case(z3(lambda t: os.unlink(t / MODEL3.format(0))), Corrupt, "first that of rank 0"),
    "all model files": Case(z3(lambda t: [os.unlink(t / MODEL3.format(r)) for r in (0, 1)]), Corrupt, "2 model files are missing"),
    "optimizer file of rank 1": Case(z3(lambda t: os.unlink(t / OPTIM.format(1))), Corrupt, "1 optimizer files are missing, first that of rank 1"),
    "optimizer file of rank 0": Case(z3(lambda t: os.unlink(t / OPTIM.format(0))), Corrupt, "first that of rank 0"),
    "all optimizer files": Case(z3(lambda t: [os.unlink(t / OPTIM.format(r)) for r in (0, 1)]), Corrupt, "2 optimizer files are missing"),
    "a copy of rank 1 by another name": Case(z3(copied(MODEL3.format(1), "copy_" + MODEL3.format(1))), Corrupt, "would take it for one more rank"),
    "a copy of rank 1's optimizer by another name, stage 2": Case(z2(copied(OPTIM.format(1), "old_" + OPTIM.format(1))), Corrupt, "would take it for one more rank"),
    "files of the last of twelve ranks": Case(z3(lambda t: [os.unlink(t / n.format(11)) for n in (MODEL3, OPTIM)], 12), Corrupt, "first that of rank 11"),
    "optimizer file of stage 2": Case(z2(lambda t: os.unlink(t / OPTIM.format(1))), Corrupt, "1 optimizer files are missing, first that of rank 1"),
    "all optimizer files of stage 2": Case(z2(lambda t: [os.unlink(t / OPTIM.format(r)) for r in (0, 1)]), Corrupt, "2 optimizer files are missing"),
    "model file of stage 2": Case(z2(lambda t: os.unlink(t / MODEL)), Corrupt, ""),
    "half a file": Case(z3(lambda t: os.truncate(t / OPTIM.format(1), 900)), Corrupt, "cut off or overwritten"),
    "a file of a rank that is not": Case(z3(lambda t: [copied(n.format(1), n.format(2))(t) for n in (MODEL3, OPTIM)]), Corrupt, "the save is of 2 ranks, but"),
    "an optimizer file of rank 7": Case(z3(copied(OPTIM.format(1), OPTIM.format(7))), Corrupt, "zero_pp_rank_7_mp_rank_00_optim_states.pt is there"),
    "an optimizer file of rank 7 at stage 2": Case(z2(copied(OPTIM.format(1), OPTIM.format(7))), Corrupt, "is from another save"),
    "both prefixes for one rank": Case(z3(copied(OPTIM.format(1), "bf16_" + OPTIM.format(1))), Corrupt, "both the optimizer file of rank 1"),
    "another prefix for one rank": Case(z3(renamed(OPTIM.format(1), "bf16_" + OPTIM.format(1))), Corrupt, "bf16_"),
    "both spellings of one rank": Case(z3(copied(OPTIM.format(1), "zero_pp_rank_1_mp_rank_00optim_states.pt")), Corrupt, "both the optimizer file of rank 1"),
    "rank 1 and rank 01": Case(z3(copied(OPTIM.format(1), OPTIM.format("01"))), Corrupt, "both the optimizer file of rank 1"),
    "rank 1 in Arabic digits too": Case(z3(copied(OPTIM.format(1), OPTIM.format("\u0661"))), Corrupt, ""),
    "a rank of 200 digits": Case(z3(touched(OPTIM.format("1" + "0" * 200))), Corrupt, "is from another save"),
    "a rank that is a folder": Case(z3(lambda t: (os.unlink(t / OPTIM.format(1)), os.mkdir(t / OPTIM.format(1)))), Unsafe, "is not a regular file"),
    "a rank that is a pipe": Case(z3(lambda t: (os.unlink(t / OPTIM.format(1)), os.mkfifo(t / OPTIM.format(1)))), Unsafe, "is not a regular file"),
    "a model file of tensor parallel rank 1": Case(z3(copied(MODEL3.format(1), "zero_pp_rank_1_mp_rank_01_model_states.pt")), Unsupported, "model parallel rank 1"),
    "a model file of tensor parallel rank 1, stage 2": Case(z2(copied(MODEL, "mp_rank_01_model_states.pt")), Unsupported, "model parallel rank 1"),
    "one of two tensor parallel ranks": Case(model(put("mp_world_size", 2)), Unsupported, "tensor or pipeline"),
    "one of two pipeline stages": Case(model(put("checkpoint_parallel_dimensions", {"pp_degree": 2, "tp_degree": 1})), Unsupported, "tensor or pipeline"),
    "experts": Case(z3(touched("expp_rank_0_mp_rank_00_optim_states.pt")), Unsupported, "experts in files of their own"),
    "experts of a layer": Case(z3(touched("layer_0_expert_0_mp_rank_00_model_states.pt")), Unsupported, "experts in files of their own"),
    "pipeline stages": Case(z3(touched("layer_00-model_states.pt")), Unsupported, "pipeline stages in files of their own"),
    "experts in flat tensors": Case(optim(put("ds_zero_partition_groups", {"a": 1})), Unsupported, "AutoEP"),
    "optimizer state on NVMe": Case(z3(lambda t: os.mkdir(t / "offloaded_tensors")), Unsupported, "was on NVMe"),
    "flat tensors on NVMe": Case(masters(torch.empty(0)), Unsupported, "was on NVMe"),
    "rank 1's flat tensor on NVMe": Case(masters(torch.empty(0), 1), Unsupported, "was on NVMe"),
}  # fmt: skip

MIXED: dict[str, Case] = {
    "all of rank 1 from the save before": Case(mixed(MODEL3 + OPTIM), Corrupt, "global_steps is 2, rank 0 says 3"),
    "the optimizer file of rank 1 from the save before": Case(mixed(OPTIM), Corrupt, "step of flat tensor 0 is 2.0, rank 0 has 3.0"),
    "the model file of rank 1 from the save before": Case(mixed(MODEL3), Corrupt, "global_steps is 2, rank 0 says 3"),
    "a step that differs at stage 2": Case(optim2(put("base_optimizer_state", "state", 0, "step", torch.tensor(4.0)), 1), Corrupt, "step of flat tensor 0 is 4.0"),
    "a step that one rank lacks": Case(optim(without(*STATE, 0, "step"), 1), Corrupt, OTHER),
    "a step of half precision that differs": Case(z3(lambda t: [edit(t / OPTIM.format(r), inside(put(*STATE, 0, "step", torch.tensor(r + 1.0).half()))) for r in (0, 1)]), Corrupt, OTHER),
    "a learning rate that differs": Case(optim(put(*GROUPS, 0, "lr", 0.5), 1), Corrupt, "param_groups differ from rank 0's"),
    "a learning rate in a tensor that differs": Case(z3(lambda t: [edit(t / OPTIM.format(r), inside(put(*GROUPS, 0, "lr", torch.tensor(r + 1.0)))) for r in (0, 1)]), Corrupt, "param_groups differ"),
    "another number of ranks": Case(model(put("dp_world_size", 3), 1), Corrupt, "dp_world_size is 3, rank 0 says 2"),
    "other shapes": Case(model(put("param_shapes", 0, "w", (3, 5)), 1), Corrupt, "param_shapes is other than rank 0's"),
    "ranks of stage 2 in each other's place": Case(z2(swapped(OPTIM.format(0), OPTIM.format(1))), Corrupt, "was saved under the name"),
    "partition_count of another world": Case(optim(put("partition_count", 3)), Corrupt, "partition_count is 3, the save is of 2 ranks"),
    "partition_count of another world, stage 2": Case(optim2(put("partition_count", [2, 3])), Corrupt, "partition_count is [2, 3]"),
    "partition_count that is True": Case(z3(lambda t: edit(t / OPTIM.format(0), inside(put("partition_count", True))), 1), Corrupt, "partition_count"),
    "a stage that is False": Case(optim(put("zero_stage", False)), Corrupt, "'zero_stage' is False"),
    "stage 3 of masters of stage 2": Case(optim2(put("zero_stage", 3)), Corrupt, "zero_stage is 3"),
    "no zero_stage": Case(optim(without("zero_stage")), Corrupt, "'zero_stage' is missing"),
    "no partition_count": Case(optim(without("partition_count")), Corrupt, "'partition_count' is missing"),
    "a slot that rank 1 lacks": Case(optim(without(*STATE, 0, "exp_avg"), 1), Corrupt, OTHER),
    "a slot that rank 0 lacks": Case(optim(without(*STATE, 0, "exp_avg"), 0), Corrupt, OTHER),
    "a slot that rank 1 has alone": Case(optim(put(*STATE, 0, "max_exp_avg_sq", torch.ones(8)), 1), Corrupt, OTHER),
    "a loss scale of rank 1": Case(optim(lambda t: t.update(loss_scaler=LossScaler(cur_scale=8.0, dynamic=False)), 1), Corrupt, OTHER),
    "state beside the slots of rank 1": Case(optim(put("optimizer_state_dict", "slow", 2), 1), Unsupported, "keeps slow beside its state"),
    "another step of an elastic save": Case(z2(lambda t: [edit(t / OPTIM.format(r), inside(put("base_optimizer_state_step", r))) for r in (0, 1)], elastic=True), Corrupt, "base_optimizer_state_step is 1, rank 0 has 0"),
    "frozen parameters that only rank 1 has": Case(model(put("frozen_param_shapes", {"f": (3, 2), "g": (1,)}), 1), Corrupt, "frozen_param_shapes is other than rank 0's"),
    "a pipeline on rank 1": Case(model(put("checkpoint_parallel_dimensions", {"pp_degree": 2, "tp_degree": 1}), 1), Corrupt, "checkpoint_parallel_dimensions is"),
    "state that rank 1 lacks": Case(optim(without(*STATE, 0), 1), Corrupt, OTHER),
    "paddings that differ": Case(optim2(put("param_alignment_paddings", [[4], [0]]), 1), Corrupt, "param_alignment_paddings"),
    "dp_world_size 0": Case(model(put("dp_world_size", 0)), Corrupt, "dp_world_size is 0"),
    "dp_world_size 10**9": Case(model(put("dp_world_size", 10**9)), Corrupt, "dp_world_size is 1000000000"),
    "dp_world_size 2**20": Case(model(put("dp_world_size", 1 << 20)), Corrupt, "1048574 model files are missing"),
    "dp_world_size -1": Case(model(put("dp_world_size", -1)), Corrupt, "dp_world_size is -1"),
    "dp_world_size True": Case(z3(lambda t: edit(t / MODEL3.format(0), put("dp_world_size", True)), 1), Corrupt, "'dp_world_size' is True"),
    "dp_world_size 2.0": Case(model(put("dp_world_size", 2.0)), Corrupt, "'dp_world_size' is 2.0"),
    "no dp_world_size": Case(model(without("dp_world_size")), Corrupt, "'dp_world_size' is missing"),
    "dp_world_size 0 at stage 2": Case(model2(put("dp_world_size", 0)), Corrupt, "dp_world_size is 0"),
    "dp_world_size 2**20 at stage 2": Case(model2(put("dp_world_size", 1 << 20)), Corrupt, "1048574 optimizer files are missing"),
    "a list instead of an optimizer file": Case(z3(lambda t: save([1], t / OPTIM.format(1))), Corrupt, "holds a list, not a dict"),
    "a list instead of a model file": Case(z3(lambda t: save([1], t / MODEL3.format(1))), Corrupt, "holds a list, not a dict"),
}  # fmt: skip

WRONG_SHAPES = {
    "too large": (6, 3), "too small": (4, 3), "negative": (-5, 3), "twice negative": (-5, -3), "a list": [5, 3], "None": None,
    "a number": 15, "of 2**80 elements": (1 << 40, 1 << 40), "of 2**62": (1 << 62,), "with a fraction": (5.0, 3), "of nothing": (0, 3),
    "of no dimensions": (), "of True": (True, 15), "a text": "53",
}  # fmt: skip

SHAPES: dict[str, Case] = {
    **{f"a shape {k}": Case(shape(v), Corrupt, "") for k, v in WRONG_SHAPES.items()},
    **{f"a shape {k} at stage 2": Case(shape(v, model2), Corrupt, "") for k, v in WRONG_SHAPES.items()},
    "a shape of as many elements at stage 2": Case(shape((3, 5), model2), Corrupt, '"w" is (5, 3) in module and (3, 5) in param_shapes'),
    "a shape of 65 dimensions": Case(shape((1,) * 64 + (15,)), Corrupt, ""),
    "one name in two groups": Case(model(put("param_shapes", 1, {"w": (5, 3)})), Corrupt, 'lists "w" twice'),
    "a dict of shapes": Case(model(put("param_shapes", {"w": (5, 3)})), Corrupt, ""),
    "a list of pairs": Case(model(put("param_shapes", [[("w", (5, 3))], []])), Corrupt, "not a list of names and shapes"),
    "a number as name": Case(model(put("param_shapes", 0, {5: (5, 3)})), Corrupt, "not a list of names and shapes"),
    "no groups": Case(model(put("param_shapes", [])), Corrupt, "flat tensors"),
    "no param_shapes": Case(model(put("param_shapes", None)), Corrupt, "'param_shapes' is missing"),
    "a group more": Case(model(put("param_shapes", lambda s: [*s, {}])), Corrupt, "flat tensors"),
    "names that are one without a wrapper": Case(model(put("module", "_orig_mod.buf", torch.ones(2))), Corrupt, "the same parameter twice"),
    "a placeholder for nothing": Case(model(put("module", "ghost", torch.empty(0))), Corrupt, '"ghost" is a placeholder'),
    "a module that is a list": Case(model(put("module", [1])), Corrupt, "'module' is [1]"),
    "a module that is a text": Case(model(put("module", "x")), Corrupt, "'module' is 'x'"),
    "no module": Case(model(without("module")), Corrupt, "'module' is missing"),
    "a dict in the module": Case(model(put("module", "w", {"a": 1})), Unsupported, "neither a tensor nor the extra state"),
    "a number as name in the module": Case(model(put("module", 5, torch.ones(2))), Unsupported, "neither a tensor nor the extra state"),
    "buffer_names that are a number": Case(model(put("buffer_names", 5)), Corrupt, "buffer_names"),
    "buffer_names of a number": Case(model(put("buffer_names", [5])), Corrupt, "buffer_names"),
    "no buffer_names": Case(model(without("buffer_names")), Corrupt, 'has no "buffer_names"'),
    "no buffer_names at stage 2": Case(model2(without("buffer_names")), Corrupt, 'has no "buffer_names"'),
    "no shared_params where a weight may be tied": Case(
        model2(lambda t: (t.pop("shared_params"), t["module"].update(ghost=torch.ones(5, 3)))[1]), Corrupt, '"shared_params" is missing'
    ),
    "other buffer_names on rank 1": Case(z3(lambda t: edit(t / MODEL3.format(1), put("buffer_names", None)), 2), Corrupt, "buffer_names is None, and"),
    "buffer_names of dicts": Case(model(put("buffer_names", [{"a": 1}])), Corrupt, "buffer_names"),
}  # fmt: skip

FLAT: dict[str, Case] = {
    "of two dimensions": Case(masters(lambda t: t.detach().view(-1, 2)), Corrupt, "fp32_flat_groups"),
    "of no dimension": Case(masters(torch.tensor(1.0)), Corrupt, "fp32_flat_groups"),
    "that is a number": Case(masters(5), Corrupt, "fp32_flat_groups"),
    "of integers": Case(masters(lambda t: t.detach().long()), Corrupt, "fp32_flat_groups"),
    "of integers, rank 1": Case(masters(lambda t: t.detach().long(), 1), Corrupt, "rank_1"),
    "of bf16, rank 1": Case(masters(lambda t: t.detach().bfloat16(), 1), Corrupt, "other dtypes than rank 0's"),
    "of float64, rank 0": Case(masters(lambda t: t.detach().double(), 0), Corrupt, "other dtypes than rank 0's"),
    "with gaps": Case(masters(strided), Corrupt, "fp32_flat_groups"),
    "with gaps, rank 1": Case(masters(strided, 1), Corrupt, "rank_1"),
    "expanded": Case(masters(lambda t: torch.ones(1).expand(t.shape)), Corrupt, "fp32_flat_groups"),
    "expanded, rank 1": Case(masters(lambda t: torch.ones(1).expand(t.shape), 1), Corrupt, "rank_1"),
    "too short": Case(masters(short), Corrupt, "flat tensor 0 has 7 elements; the 1 parameters"),
    "too short, rank 1": Case(masters(short, 1), Corrupt, "rank_1"),
    "too long": Case(masters(torch.ones(9)), Corrupt, "has 9 elements; the 1 parameters that param_shapes puts into it have 8 on each of 2 ranks"),
    "none": Case(optim(put("fp32_flat_groups", [])), Corrupt, "are not 2 flat tensors"),
    "missing": Case(optim(without("fp32_flat_groups")), Corrupt, "'fp32_flat_groups' is missing"),
    "three": Case(optim(put("fp32_flat_groups", lambda g: [*g, torch.ones(2)])), Corrupt, "are not 2 flat tensors"),
    "of stage 2, too short": Case(masters2(short), Corrupt, "flat tensor 0 has 7 elements"),
    "of stage 2, too long": Case(masters2(torch.ones(99)), Corrupt, "99 elements"),
    "of stage 2, too long, rank 1": Case(masters2(torch.ones(99), 1), Corrupt, "99 elements"),
    "of stage 2, empty": Case(masters2(torch.empty(0)), Corrupt, "0 elements"),
    "of stage 2, empty, rank 0": Case(masters2(torch.empty(0), 0), Corrupt, "0 elements"),
    "of stage 2, with gaps": Case(masters2(strided), Corrupt, "single_partition_of_fp32_groups"),
    "of stage 2, with gaps, rank 1": Case(masters2(strided, 1), Corrupt, "rank_1"),
    "of stage 2, of integers, rank 1": Case(masters2(lambda t: t.long(), 1), Corrupt, "rank_1"),
    "of stage 2, of bf16, rank 1": Case(masters2(lambda t: t.bfloat16(), 1), Corrupt, "other dtypes than rank 0's"),
    "padded by -1": Case(optim2(put("param_alignment_paddings", [[-1], [0]])), Corrupt, "param_alignment_paddings is [[-1], [0]]"),
    "padded by 2**60": Case(optim2(put("param_alignment_paddings", [[1 << 60], [0]])), Corrupt, ""),
    "padded by True": Case(optim2(put("param_alignment_paddings", [[True], [0]])), Corrupt, "param_alignment_paddings"),
    "with a padding that is a number": Case(optim2(put("param_alignment_paddings", 5)), Corrupt, "param_alignment_paddings is 5"),
    "with paddings that are numbers": Case(optim2(put("param_alignment_paddings", [[0], [0], 5])), Corrupt, "param_alignment_paddings"),
    "with a padding too many": Case(optim2(put("param_alignment_paddings", [[0, 0], [0]])), Corrupt, "param_alignment_paddings"),
}  # fmt: skip

OPTIMIZER: dict[str, Case] = {
    "state of flat tensor 5": Case(state_of(lambda s: s.update({5: {"step": 1}})), Corrupt, "there are 2 flat tensors"),
    "state of flat tensor -1": Case(state_of(lambda s: s.update({-1: {"step": 1}})), Corrupt, "there are 2 flat tensors"),
    "state of a text": Case(state_of(lambda s: s.update(a={"step": 1})), Corrupt, "not a state and param groups"),
    "state of a tuple": Case(state_of(lambda s: s.update({(1, 2): {"step": 1}})), Corrupt, "not a state and param groups"),
    "state of fractions": Case(keyed(0.0, 1.0), Corrupt, "not a state and param groups"),
    "state of truth values": Case(keyed(False, True), Corrupt, "not a state and param groups"),
    "state that is a list": Case(optim(put(*STATE, [{}])), Corrupt, "'state' is [{}]"),
    "state of a tensor that is a number": Case(optim(put(*STATE, 0, 5)), Corrupt, "not a state and param groups"),
    "a slot of another length": Case(optim(put(*STATE, 0, "exp_avg", torch.ones(7))), Corrupt, "exp_avg of flat tensor 0 has 7 elements instead of 8"),
    "a slot of another length, rank 1": Case(optim(put(*STATE, 0, "exp_avg", torch.ones(7)), 1), Corrupt, "rank_1_mp_rank_00_optim_states.pt: exp_avg of flat tensor 0 has 7"),
    "a slot of another length, stage 2": Case(optim2(put("base_optimizer_state", "state", 0, "exp_avg", torch.ones(7))), Corrupt, "has 7 elements instead of 8"),
    "a slot of two dimensions": Case(optim(put(*STATE, 0, "exp_avg", torch.ones(4, 2))), Corrupt, "exp_avg of flat tensor 0"),
    "a slot with gaps": Case(optim(put(*STATE, 0, "exp_avg", strided)), Corrupt, "exp_avg of flat tensor 0"),
    "a slot with gaps, rank 1": Case(optim(put(*STATE, 0, "exp_avg", strided), 1), Corrupt, "exp_avg of flat tensor 0"),
    "a slot of another dtype, rank 1": Case(optim(put(*STATE, 0, "exp_avg", torch.ones(8).half()), 1), Corrupt, "exp_avg of flat tensor 0"),
    "a slot that is a list of tensors": Case(optim(put(*STATE, 0, "exp_avg", [torch.ones(8)])), Corrupt, "exp_avg of flat tensor 0"),
    "a slot named by a number": Case(optim(put(*STATE, 0, 7, torch.ones(8))), Corrupt, "7"),
    "one id in two groups": Case(optim(put(*GROUPS, 1, "params", [0])), Corrupt, "list the flat tensors [0, 0] of 2"),
    "ids in another order": Case(optim(swapped_ids), Corrupt, "list the flat tensors [1, 0] of 2"),
    "all ids in one group and one again": Case(optim(put(*GROUPS, 1, "params", [0, 1])), Corrupt, "list the flat tensors [0, 0, 1] of 2"),
    "an id too many": Case(optim(put(*GROUPS, 1, "params", [9])), Corrupt, "param group 1 lists [9]"),
    "a negative id": Case(optim(put(*GROUPS, 1, "params", [-1])), Corrupt, "param group 1 lists [-1]"),
    "a name for an id": Case(optim(put(*GROUPS, 1, "params", ["w"])), Corrupt, "param group 1 lists ['w']"),
    "a truth value for an id": Case(optim(put(*GROUPS, 1, "params", [True])), Corrupt, "param group 1 lists [True]"),
    "a group without ids": Case(optim(without(*GROUPS, 1, "params")), Corrupt, "param group 1 lists None"),
    "no groups": Case(optim(put(*GROUPS, [])), Corrupt, "flat tensors [] of 2"),
    "numbers for groups": Case(optim(put(*GROUPS, [1, 2])), Corrupt, "not a state and param groups"),
    "no param_groups": Case(optim(without(*GROUPS)), Corrupt, "'param_groups' is missing"),
    "stage 0: a master of another shape": Case(z0(put("optimizer", "fp32_groups", 0, 0, torch.ones(3))), Corrupt, 'the master of "w" in fp32_groups'),
    "stage 0: a master less": Case(z0(put("optimizer", "fp32_groups", [[]])), Corrupt, "fp32_groups does not fit"),
    "stage 0: one group of masters too many, which is no list": Case(
        z0(put("optimizer", "fp32_groups", lambda groups: [None, *groups])), Corrupt, "fp32_groups does not fit"
    ),
    "stage 0: masters by name": Case(z0(put("optimizer", "fp32_groups", {"a": 1})), Corrupt, "fp32_groups does not fit"),
    "stage 0: no masters": Case(z0(without("optimizer", "fp32_groups")), Corrupt, "has no fp32_groups"),
    "stage 0: no optimizer": Case(z0(without("optimizer")), Corrupt, 'has no "optimizer"'),
    "stage 0: no groups": Case(z0(without("optimizer", "optimizer_state_dict", "param_groups")), Corrupt, "'param_groups' is missing"),
    "stage 0: no state": Case(z0(without("optimizer", "optimizer_state_dict", "state")), Corrupt, "'state' is missing"),
    "stage 0: a list for the optimizer": Case(z0(put("optimizer", [1])), Corrupt, "'optimizer' is [1]"),
    "stage 0: ids that are names": Case(z0(put("optimizer", "optimizer_state_dict", "param_groups", 0, "params", ["x"])), Corrupt, "param_groups"),
    "stage 0: ids that are a number": Case(z0(put("optimizer", "optimizer_state_dict", "param_groups", 0, "params", 5)), Corrupt, "param_groups"),
    "stage 0: numbers for groups": Case(z0(put("optimizer", "optimizer_state_dict", "param_groups", [5])), Corrupt, "param_groups"),
    "stage 0: a placeholder": Case(z0(put("module", "w", torch.empty(0))), Corrupt, '"w" is a placeholder'),
    "stage 0: flat masters": Case(z0(lambda t: (t["optimizer"].pop("fp32_groups"), t["optimizer"].update(fp32_groups_flat=[]))[1]), Unsupported, "whose order the file does not hold"),
}  # fmt: skip

TIED: dict[str, Case] = {
    "a circle": Case(model(put("shared_params", {"a": "c", "c": "a"}), 0), Corrupt, "is tied to"),
    "to itself": Case(model(put("shared_params", {"w": "w"}), 0), Corrupt, ""),
    "to nothing": Case(model(put("shared_params", {"a": "ghost"}), 0), Corrupt, '"a" is tied to "ghost", which is not there'),
    "though it is trained": Case(model(put("shared_params", {"b": "w", "a": "w"}), 0), Corrupt, '"b"'),
    "though it is frozen": Case(model(put("shared_params", {"f": "w", "a": "w"}), 0), Corrupt, '"f"'),
    "though it is a buffer": Case(model(put("shared_params", {"buf": "w", "a": "w"}), 0), Corrupt, '"buf"'),
    "by numbers": Case(model(put("shared_params", {1: 2}), 0), Corrupt, "shared_params is {1: 2}"),
    "in a list": Case(model(put("shared_params", [1]), 0), Corrupt, "shared_params is [1]"),
    "frozen, too long": Case(model(put(*FRAGMENT, torch.ones(5))), Corrupt, '"f" is float32 (5,); (3, 2) on 2 ranks has 3 elements each'),
    "frozen, too long, rank 1": Case(model(put(*FRAGMENT, torch.ones(5)), 1), Corrupt, "rank_1"),
    "frozen, missing on rank 1": Case(model(without(*FRAGMENT), 1), Corrupt, "'f' is missing"),
    "frozen, of another dtype on rank 1": Case(model(put(*FRAGMENT, torch.ones(3).half()), 1), Corrupt, "float16 (3,)"),
    "frozen, with gaps on rank 1": Case(model(put(*FRAGMENT, strided), 1), Corrupt, "rank_1"),
    "frozen, of a negative shape": Case(model(put("frozen_param_shapes", "f", (-3, -2))), Corrupt, "frozen_param_shapes"),
    "frozen, of 2**120 elements": Case(model(put("frozen_param_shapes", "f", (1 << 60, 1 << 60))), Corrupt, "elements each"),
    "frozen, stored nowhere": Case(model(put("frozen_param_shapes", "ghost", (3,))), Corrupt, "'ghost' is missing"),
    "frozen, a number for the shapes": Case(model(put("frozen_param_shapes", 5)), Corrupt, "frozen_param_shapes is 5"),
    "frozen, named by a number": Case(model(put("frozen_param_shapes", {5: (3, 2)})), Corrupt, ""),
    "frozen, no fragments": Case(model(put("frozen_param_fragments", None)), Corrupt, "'frozen_param_fragments' is missing"),
}  # fmt: skip

LATEST: dict[str, Case] = {
    "above": Case(latest(b"../global_step3"), Unsafe, "names '../global_step3', which is not a folder in the same place"),
    "at /": Case(latest(b"/etc"), Unsafe, "names '/etc'"),
    "the folder itself": Case(latest(b"."), Unsafe, "names '.'"),
    "the folder above": Case(latest(b".."), Unsafe, "names '..'"),
    "a path": Case(latest(b"global_step3/"), Unsafe, "names 'global_step3/'"),
    "a name with a zero byte": Case(latest(b"a\0b"), Unsafe, "names 'a\\x00b'"),
    "nothing": Case(latest(b""), CkpttoolError, ""),
    "ten megabytes": Case(latest(b"x" * 10_000_000), Corrupt, "has 10000000 bytes; such a file has at most 4096"),
    "300 letters": Case(latest(b"x" * 300), Corrupt, "the save that"),
    "no text": Case(latest(b"\xff\xfe"), Corrupt, "the save that"),
    "a save that is gone": Case(latest(b"global_step9"), Corrupt, "saves here: global_step3. Choose one with tag"),
    "and is a link": Case(outside("latest"), Unsafe, "is a link to"),
    "a folder that is a link": Case(outside("tag"), Unsafe, "is a link to"),
    "a folder in which a file is a link": Case(outside("file"), Unsafe, "is a link to"),
}  # fmt: skip


def with_canary(make: Any) -> Any:
    """A case that needs to know the canary."""
    return lambda folder, canary: make(canary)(folder, canary)


class Exec:
    """An instance of builtins.exec, as far as a pickle can say so."""

    __module__ = "builtins"
    __qualname__ = "exec"


def exec_slices(tag: Path) -> None:
    """The fragment_address of param_slice_mappings are instances of builtins.exec: bytes changed in the pickle."""
    path = tag / OPTIM.format(1)
    edit(path, lambda t: None)
    from evil import rezipped

    def change(records: dict[str, bytes]) -> None:
        name = next(n for n in records if n.endswith("data.pkl"))
        old = b"cdeepspeed.utils.tensor_fragment\nfragment_address\n"
        assert old in records[name]
        records[name] = records[name].replace(old, b"cbuiltins\nexec\n")

    path.write_bytes(rezipped(path.read_bytes(), change))


CODE: dict[str, Case] = {
    "LossScaler that calls os.system": Case(with_canary(lambda c: optim(lambda t: t.update(loss_scaler=Calls(os.system, f"touch {c}")))), Unsafe, ".system('touch"),
    "LossScaler of rank 1": Case(with_canary(lambda c: optim(lambda t: t.update(loss_scaler=runs(c)), 1)), Unsafe, ".exec("),
    "LossScaler with such a state": Case(with_canary(lambda c: optim(lambda t: t.update(loss_scaler=LossScaler(cur_scale=runs(c))))), Unsafe, ".exec("),
    "fragments that are builtins.exec": Case(z2(exec_slices), Unsafe, "an instance of builtins.exec"),
    "slices that run": Case(with_canary(lambda c: optim2(put("param_slice_mappings", [{"w": runs(c)}]))), Unsafe, ".exec("),
    "client state of rank 1": Case(with_canary(lambda c: model(put("mine", runs(c)), 1)), Unsafe, ".exec("),
    "a module entry of rank 1": Case(with_canary(lambda c: model(put("module", "w", runs(c)), 1)), Unsafe, ".exec("),
    "a step": Case(with_canary(lambda c: optim(put(*STATE, 0, "step", runs(c)))), Unsafe, ".exec("),
    "ds_config": Case(with_canary(lambda c: model(put("ds_config", runs(c)))), Unsafe, ".exec("),
    "stage 2": Case(with_canary(lambda c: model2(put("ds_config", runs(c)))), Unsafe, ".exec("),
    "stage 0": Case(with_canary(lambda c: z0(put("optimizer", "cur_scale", runs(c)))), Unsafe, ".exec("),
    "a bare pickle for a file": Case(with_canary(lambda c: z3(lambda t: (t / OPTIM.format(1)).write_bytes(saved(runs(c), _use_new_zipfile_serialization=False)))), Unsafe, ".exec("),
    "scheduler.bin beside the save": Case(with_canary(lambda c: z3(lambda t: save(runs(c), t.parent / "scheduler.bin"))), Unsafe, ".exec("),
    "universal: a slot": Case(with_canary(lambda c: uni(lambda t: save(runs(c), t / "zero/w/exp_avg.pt"))), Unsafe, ".exec("),
    "universal: a further file": Case(with_canary(lambda c: uni(lambda t: save(runs(c), t / "zero/w/evil.pt"))), Unsafe, ".exec("),
    "universal: optimizer_state.pt": Case(with_canary(lambda c: uni(lambda t: edit(t / "zero/optimizer_state.pt", put("loss_scaler", runs(c))))), Unsafe, ".exec("),
    "stage 10**9": Case(optim(put("zero_stage", Calls(ZeroStageEnum, 10**9))), Corrupt, "ZeRO stage 1000000000"),
    "stage '3'": Case(optim(put("zero_stage", Calls(ZeroStageEnum, "3"))), Corrupt, "ZeRO stage '3'"),
    "client state 300 deep": Case(z3(deep_file), Unsafe, "nested deeper than 100"),
    "a client key that is a number": Case(model(put(5, 1)), Unsupported, "a key 5 that is not text"),
    "two client keys that are one": Case(model(lambda t: t.update({"a.b": 1, "a": {"b": 2}})), Corrupt, '"extra.a.b"'),
}  # fmt: skip


def parameter(file: str, value: Any, stage: int = 3) -> Any:
    """A file of the folder of "w" holds something else."""
    return uni(lambda t: save(value, t / "zero" / "w" / file), stage)


def named(name: str) -> Any:
    """The first parameter is called so in the model files."""
    return uni(lambda t: [edit(t / MODEL3.format(r), put("param_shapes", 0, {name: (5, 3)})) for r in (0, 1)])


def moved(tag: Path) -> None:
    shutil.move(tag / "zero" / "w", tag.parent.parent / "outside")
    (tag / "zero" / "w").symlink_to(tag.parent.parent / "outside")


def state_file(change: Any) -> Any:
    return uni(lambda t: edit(t / "zero" / "optimizer_state.pt", change))


def latest_universal(folder: Path, canary: Path) -> Path:
    universal(job(), folder, 2)
    (folder / "latest_universal").write_text("../in/global_step3_universal")
    return folder


UNIVERSAL: dict[str, Case] = {
    "no fp32.pt": Case(uni(lambda t: os.unlink(t / "zero/w/fp32.pt")), Corrupt, 'fp32.pt is missing, the weights of "w"'),
    "no folder of a parameter": Case(uni(lambda t: shutil.rmtree(t / "zero/w")), Corrupt, 'fp32.pt is missing, the weights of "w"'),
    "no exp_avg.pt of one parameter": Case(uni(lambda t: os.unlink(t / "zero/w/exp_avg.pt")), Corrupt, "exp_avg"),
    "no step.pt of one parameter": Case(uni(lambda t: os.unlink(t / "zero/w/step.pt"), 2), Corrupt, "step"),
    "an element less": Case(parameter("fp32.pt", torch.ones(14)), Corrupt, 'a tensor of shape (14,); param_shapes says that "w" has (5, 3)'),
    "another shape": Case(parameter("fp32.pt", torch.ones(3, 5)), Corrupt, "a tensor of shape (3, 5)"),
    "another shape, stage 2": Case(parameter("fp32.pt", {"param": torch.ones(3, 5), "cat_dim": 0}, 2), Corrupt, "a tensor of shape (3, 5)"),
    "a flat tensor with gaps": Case(parameter("fp32.pt", strided(torch.ones(15))), Corrupt, "a tensor of shape (15,)"),
    "no dimension": Case(parameter("exp_avg.pt", torch.tensor(5.0)), Corrupt, "a tensor of shape ()"),
    "a number for the weights": Case(parameter("fp32.pt", 5), Corrupt, "fp32.pt"),
    "a folder of no parameter": Case(uni(lambda t: save(torch.ones(5, 3), t / "zero/ghost/fp32.pt")), Corrupt, "zero/ghost: the folder of a parameter that neither"),
    "a number for a slot": Case(parameter("exp_avg.pt", 5), Corrupt, "exp_avg.pt"),
    "a dict without a tensor": Case(parameter("fp32.pt", {"a": 1}), Corrupt, "fp32.pt holds"),
    "integers for the weights": Case(parameter("fp32.pt", torch.arange(15)), Corrupt, "fp32.pt"),
    "a step of five": Case(parameter("step.pt", torch.ones(5)), Corrupt, "step.pt"),
    "a step of five, stage 2": Case(parameter("step.pt", torch.ones(5), 2), Corrupt, "step.pt"),
    "a step that is a text": Case(parameter("step.pt", "x"), Corrupt, "step.pt holds 'x'"),
    "a step that is True": Case(parameter("step.pt", True, 2), Corrupt, "step.pt"),
    "a folder for a slot": Case(uni(lambda t: os.mkdir(t / "zero/w/x.pt")), Unsafe, "is not a regular file"),
    "a folder that is a link": Case(uni(moved), Unsafe, "is a link to"),
    "a parameter called ..": Case(named(".."), Unsupported, 'a parameter named ".."'),
    "a parameter called ../../..": Case(named("../../.."), Unsupported, "a parameter named"),
    "a parameter called a/b": Case(named("a/b"), Unsupported, 'a parameter named "a/b"'),
    "a parameter called nothing": Case(named(""), CkpttoolError, ""),
    "a parameter with a zero byte": Case(named("a\0b"), CkpttoolError, ""),
    "a parameter of 5000 letters": Case(named("x" * 5000), Corrupt, "fp32.pt is missing"),
    "a parameter of 2**80 elements": Case(uni(lambda t: [edit(t / MODEL3.format(r), put("param_shapes", 0, "w", (1 << 40, 1 << 40))) for r in (0, 1)]), Corrupt, ""),
    "no optimizer_state.pt": Case(uni(lambda t: os.unlink(t / "zero/optimizer_state.pt")), Corrupt, "optimizer_state.pt is missing"),
    "no param_groups": Case(state_file(without("param_groups")), Corrupt, "'param_groups' is missing"),
    "an id too many": Case(state_file(put("param_groups", 0, "params", [9])), Corrupt, "param group 0 lists [9]"),
    "one id in two groups": Case(state_file(put("param_groups", 0, "params", [1])), Corrupt, "param group"),
    "a text for an id": Case(state_file(put("param_groups", 0, "params", ["0"])), Corrupt, "param group 0 lists ['0']"),
    "numbers for groups": Case(state_file(put("param_groups", [1, 2])), Corrupt, "param group 0 lists None"),
    "no model file of rank 1": Case(uni(lambda t: os.unlink(t / MODEL3.format(1))), Corrupt, "first that of rank 1"),
    "latest_universal that leads out": Case(latest_universal, Unsafe, "names '../in/global_step3_universal'"),
}  # fmt: skip

#: Odd, but what it says is clear: the state must be that of the job.
ODD: dict[str, Any] = {
    "a learning rate that is NaN": optim(put(*GROUPS, 0, "lr", float("nan"))),
    "a tensor as learning rate": optim(put(*GROUPS, 0, "lr", torch.tensor(0.5))),
    "latest with a newline": latest(b"global_step3\n"),
    "a tie to a tie": model(put("shared_params", {"a": "w", "c": "a"}), 0),
    "flat tensors of one storage": optim(lambda t: t.update(fp32_flat_groups=list(torch.cat([x.detach() for x in t["fp32_flat_groups"]]).split([len(x) for x in t["fp32_flat_groups"]])))),
    "slots in the storage of the weights": optim(lambda t: t["optimizer_state_dict"]["state"][0].update(exp_avg=torch.cat([t["fp32_flat_groups"][0].detach(), t["optimizer_state_dict"]["state"][0]["exp_avg"]])[8:])),
    "client state called optim": model(put("optim", {"state": {"w": {"exp_avg": torch.zeros(5, 3)}}, "param_groups": []})),
    "client state called model": model(put("model", {"w": torch.zeros(5, 3), "q": torch.ones(2)})),
    "client state called state_dict": model(put("state_dict", {"w": torch.zeros(5, 3)})),
    "client state called optimizer_state_dict": model(put("optimizer_state_dict", {"state": {}, "param_groups": []})),
    "client state called extra": model(put("extra", {"k": 1})),
    "client state called trainer": model(put("trainer", {"global_steps": 99})),
    "client state called rng, and rng_state": model(lambda t: t.update(rng={"a": 1}, rng_state={"a": 2})),
    "client state called scheduler": model(lambda t: t.update(scheduler={"a": 1}, lr_scheduler={"b": 2})),
    "client state called per_rank": model(put("per_rank", {"1": {"q": 5}})),
    "client state of NaN": model(put("loss", float("nan"))),
    "5,000 client keys": many(5_000),
    "client state 90 deep": model(lambda t: t.update(x=[[[[[[[[[[[[1]]]]]]]]]]]])),
    "a scaler with a state of its own": optim(put("loss_scaler", LossScaler(cur_scale=5.0, dynamic=True, x={"a": [1]}))),
    "a pipe for latest": lambda folder, _: (zero3(job(), folder, 2), os.unlink(folder / "latest"), os.mkfifo(folder / "latest"), folder)[-1],
    "an older save beside it": both_saves,
    "universal: weights that are transposed": uni(lambda t: edit(t / "zero/w/fp32.pt", lambda x: x.view(5, 3).t().contiguous().t())),
    "universal: state of another world": state_file(put("partition_count", 7)),
    "universal: beside the save it was made from": lambda folder, _: zero3(job(), universal(job(), folder, 2), 2),
}  # fmt: skip

OF_NO_FILE = ("shapes: names that are one without a wrapper", "code: two client keys that are one")

REFUSED = {
    f"{kind}: {name}": case
    for kind, table in (
        ("missing", MISSING), ("mixed", MIXED), ("shapes", SHAPES), ("flat", FLAT), ("optimizer", OPTIMIZER), ("tied", TIED),
        ("latest", LATEST), ("code", CODE), ("universal", UNIVERSAL),
    )
    for name, case in table.items()
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- bounds

EVENTS: list[str] = []
LISTENING: list[str] = []  # the folder that may be written to
ACTS = (
    "exec", "compile", "import", "os.system", "os.exec", "os.fork", "os.posix_spawn", "subprocess.Popen", "pickle.find_class",
    "marshal.loads", "socket.connect", "os.symlink", "os.link", "os.chmod",
)  # fmt: skip


def hear(event: str, args: tuple[Any, ...]) -> None:
    """Note what acts, or writes outside."""
    if not LISTENING:
        return
    if event == "open" and (set(args[1] or "") & set("wax+") or args[2] & (os.O_WRONLY | os.O_RDWR)):
        if not str(args[0]).startswith(LISTENING[0]):
            EVENTS.append(f"{event} {args}")
    elif event in ACTS:
        EVENTS.append(f"{event} {args}"[:200])


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Everything that is imported only when it is needed was imported, and from now on events are heard."""
    folder = tmp_path_factory.mktemp("warm")
    for i, make in enumerate((z3(), z2(), uni())):
        ckpttool.convert(make(folder / str(i), folder), folder / f"{i}.pt", to="full")
    sys.addaudithook(hear)


@contextmanager
def bounded(home: Path) -> Iterator[None]:
    """Ten seconds, two gigabytes more than now, and no event by which a process acts."""

    def late(*_: Any) -> None:
        raise AssertionError("ten seconds have passed")

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    old = signal.signal(signal.SIGALRM, late) if threading.current_thread() is threading.main_thread() else None
    resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + (2 << 30), before[1]))
    signal.alarm(10)
    EVENTS.clear()
    LISTENING.append(str(home))
    try:
        yield
    finally:
        LISTENING.clear()
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert EVENTS == []


def everything_below(folder: Path) -> set[str]:
    return {os.path.join(r, f) for r, ds, fs in os.walk(folder) for f in [*ds, *fs]}


@pytest.mark.parametrize("name", REFUSED)
def test_a_save_that_is_not_one_is_refused_and_nothing_is_left(
    name: str, warm: None, tmp_path: Path, canary: Path
) -> None:
    case = REFUSED[name]
    assert case.kind is not None
    source = case.make(tmp_path / "in", canary)
    home = tmp_path / "home"
    home.mkdir()
    before = everything_below(tmp_path)
    with bounded(home), pytest.raises(CkpttoolError) as e:
        ckpttool.convert(source, home / "out.pt", to="full", drop=True)
    assert isinstance(e.value, case.kind), e.value
    assert e.value.exit_code in (3, 4, 7)
    assert case.said in str(e.value)
    assert len(str(e.value)) < 12_000
    assert str(tmp_path / "in") in str(e.value) or name in OF_NO_FILE, "the message names a file or a folder"
    assert everything_below(tmp_path) == before, "something was left behind"
    assert not canary.exists()


@pytest.mark.parametrize("name", ODD)
def test_a_save_that_is_odd_is_read_as_the_state_of_its_job(
    name: str, warm: None, tmp_path: Path, canary: Path
) -> None:
    source = ODD[name](tmp_path / "in", canary)
    home = tmp_path / "home"
    home.mkdir()
    before = everything_below(tmp_path)
    with bounded(home):
        done = ckpttool.convert(source, home / "out.pt", to="full")
    assert done.verified
    found = tensors_of(load_full(home / "out.pt"))
    assert difference({k: t for k, t in found.items() if k != "model.c"}, job().truth()) == []
    assert everything_below(tmp_path) == before | {str(home / "out.pt")}
    assert not canary.exists()
    if name.startswith(("client", "5,000")):  # and what the client said is not lost on the way to another engine
        ckpttool.convert(source, home / "again", to="zero3", world_size=2)
        with ckpttool.open(source) as a, ckpttool.open(home / "again") as b:
            wanted, kept = ({n: repr(v.data) for n, v in x.checkpoint.values.items()} for x in (a, b))
        assert {n: kept.get(n) for n in wanted if not n.startswith("extra.ds_config")} == {
            n: v for n, v in wanted.items() if not n.startswith("extra.ds_config")
        }
        assert ckpttool.digest(source).digest == ckpttool.digest(home / "again").digest


def test_the_command_line_says_it_in_one_line_and_with_an_exit_code(tmp_path: Path, canary: Path) -> None:
    import subprocess

    source = REFUSED["code: LossScaler of rank 1"].make(tmp_path / "in", canary)
    done = subprocess.run(
        [sys.executable, "-m", "ckpttool", "convert", source, tmp_path / "out", "--to", "zero3", "-n", "3"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 7
    assert "zero_pp_rank_1_mp_rank_00_optim_states.pt" in done.stderr and "Traceback" not in done.stderr
    assert not canary.exists() and not (tmp_path / "out").exists()
    assert save_of(tmp_path / "in").is_dir()
