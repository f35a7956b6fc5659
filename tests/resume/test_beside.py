"""State beside model and optimizer has one form, whatever layout it was in."""

from __future__ import annotations

import collections
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckpttool
from ckpttool.resume.trace.side_state import collect_side_state, flatten_side_state


def tree() -> dict[str, Any]:
    """What trainers keep beside model and optimizer, with the shapes that layouts treat differently."""
    torch.manual_seed(3)
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    parts = [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)]
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, parts, milestones=[4])
    numbers = np.random.default_rng(1)
    return {
        "scheduler": scheduler.state_dict(),
        "rng": {
            "0": {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.Random(4).getstate()}
        },
        "dataloader": {
            "position": 3, "order": list(range(1000)), "few": (3, 1, 2), "shuffle": torch.arange(9), "seen": {5: 1, 6: 2},
            "nothing": {}, "empty": [], "snapshots": [{"worker": 0, "at": None}, {"worker": 1, "at": 7}],
        },
        "epoch": 2,
        "best_loss": math.inf,
        "ema": {"layer.0.w": torch.randn(3, 5).bfloat16(), "decay": 0.99},
        "losses": numbers.random((3, 2)), "half": np.float32(0.5), "flags": np.array([True, False]), "blob": b"\x00ab",
        "nested": [[1, 2], [3, [4, None]]], "ordered": collections.OrderedDict(a=1, b=torch.zeros(())),
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("layout", ["full", "dcp"])
def test_a_checkpoint_and_the_job_it_was_saved_by_give_the_same_values_and_marks(tmp_path: Path, layout: str) -> None:
    state = tree()
    here = collect_side_state(flatten_side_state(state))
    everything = {"model": {"w": torch.ones(2)}, **state}
    if layout == "full":
        torch.save(everything, tmp_path / "x")
    else:
        dcp.save(everything, checkpoint_id=tmp_path / "x", no_dist=True)
    with ckpttool.open(tmp_path / "x") as opened:
        ckpt = opened.checkpoint
        there = collect_side_state({v.path: v.data for v in ckpt.values.values() if v.path[0] != "model"})
        arrays = {n: t for n, t in ckpt.tensors.items() if t.path[0] != "model"}
        marks = {
            n: (t.dtype, t.shape, collect_side_state({t.path: opened[n].torch()}).others[n][2])
            for n, t in arrays.items()
        }
    assert there.values == here.values
    assert there.others | marks == here.others
    assert here.values["scheduler._schedulers.1.T_max"] == 9 and here.values["trainer.epoch"] == 2
    assert here.values["trainer.best_loss"] == "inf" and here.values["dataloader.snapshots.0.at"] is None
    assert here.values["dataloader.few"] == [3, 1, 2] and here.values["extra.half"] == 0.5
    assert here.others["extra.losses"][:2] == ("float64", (3, 2)) and here.others["dataloader.order"][0] == "list"
    assert here.others["rng.0.numpy.1"][:2] == ("uint32", (624,)) and here.others["rng.0.python.1"][:2] == (
        "list",
        (625,),
    )


def test_one_element_more_or_less_shows_in_the_mark_of_an_array_a_list_and_bytes() -> None:
    one = collect_side_state(flatten_side_state(tree())).others
    other = tree()
    other["dataloader"]["order"][7] += 1
    other["losses"][2, 1] = np.nextafter(other["losses"][2, 1], 1)
    other["blob"] += b"\x00"
    other["ema"]["layer.0.w"][2, 4] += 1
    changed = collect_side_state(flatten_side_state(other)).others
    names = {n for n, found in one.items() if changed[n] != found}
    assert names == {"dataloader.order", "extra.losses", "extra.blob", "extra.ema.layer.0.w"}


def test_what_is_no_plain_data_is_a_word_for_its_class() -> None:
    found = collect_side_state(
        flatten_side_state({"hook": print, "point": collections.namedtuple("Point", "x")(1), "kind": torch.float16})
    )
    assert found.values == {"extra.kind": "torch.float16"}
    assert found.others == {
        "extra.hook": ("object", (), "builtins.builtin_function_or_method"),
        "extra.point": ("object", (), "test_beside.Point"),
    }


def test_a_container_that_is_hashed_as_a_whole_has_the_hash_of_earlier_recordings() -> None:
    many = [*range(5000), print, "<pad>"]
    kind, shape, digest = collect_side_state({("extra", "table"): many}).others["extra.table"]
    assert (kind, shape, digest) == ("tree", (5002,), "2b9788fb9996b0ec")
    many[-1] = "<eos>"
    assert collect_side_state({("extra", "table"): many}).others["extra.table"][2] != digest
