"""The position in the data at another number of ranks: none of the epoch's samples is read twice, none is left out.

torchdata is not among the packages of the tests. `Dealer` does what its StatefulDistributedSampler does with a state (it skips
`yielded` samples of torch's DistributedSampler), and the states have the keys of StatefulDataLoader 0.11.
"""

from __future__ import annotations

import pickle
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from ckpttool.converters.options import MeshOptions
from torch.utils.data import DistributedSampler

import ckpttool


def state(read: int, steps: int, workers: int, seed: int = 0, **more: Any) -> dict[str, Any]:
    """What StatefulDataLoader.state_dict() returns on one rank."""
    at = {
        "_index_sampler_state": None, "_sampler_iter_state": {"samples_yielded": read, "sampler_state": {"yielded": read}},
        "_sampler_iter_yielded": steps, "_IterableDataset_len_called": None, "_shared_seed": None,
    }  # fmt: skip
    none = {"dataset_state": None, "fetcher_state": None}
    if not workers:
        return {**at, **none, "_num_yielded": steps, "_iterator_finished": False, **more}
    main = {**at, "_num_workers": workers, "_base_seed": 100 + seed}
    of_workers = {f"worker_{i}": {"worker_id": i, **none} for i in range(workers)}
    snapshot = {
        "_snapshot_step": steps,
        "_last_yielded_worker_id": 0,
        "_main_snapshot": main,
        "_worker_snapshots": of_workers,
    }
    return {"_snapshot": snapshot, "_steps_since_snapshot": 0, "_iterator_finished": False, **more}


class Dealer:
    """The samples that one of several ranks reads after a state."""

    def __init__(self, samples: int, ranks: int, rank: int) -> None:
        self.sampler = DistributedSampler(range(samples), ranks, rank, shuffle=True, seed=5)

    def rest(self, loaded: dict[str, Any]) -> list[int]:
        main = loaded["_snapshot"]["_main_snapshot"] if "_snapshot" in loaded else loaded
        part = main["_sampler_iter_state"]
        assert part["samples_yielded"] == part["sampler_state"]["yielded"]
        return list(islice(iter(self.sampler), part["sampler_state"]["yielded"], None))


def moved(folder: Path, loaders: Any, ranks: int, **more: Any) -> tuple[Any, list[str], ckpttool.ConvertResult]:
    """The loaders' states after a conversion, its notes, and its result."""
    torch.save({"model": {"w": torch.zeros(3, 2)}, "dataloader": loaders, "step": 3, **more}, folder / "job.pt")
    result = ckpttool.convert(folder / "job.pt", folder / f"for{ranks}", to="dcp", world_size=ranks)
    ckpttool.convert(folder / f"for{ranks}", folder / "again.pt", force=True)
    again = torch.load(folder / "again.pt", weights_only=True)
    return again["dataloader"], [n for n in result.notes if "data loaders" in n], result


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("before", "batch", "after"), [(2, 4, 4), (4, 2, 1), (2, 4, 3), (3, 4, 2), (3, 4, 6)])
def test_the_rest_of_the_epoch_is_read_once(tmp_path: Path, before: int, batch: int, after: int, workers: int) -> None:
    samples, steps = 72, 3
    seen = [i for r in range(before) for i in islice(iter(Dealer(samples, before, r).sampler), steps * batch)]
    loaders = {f"rank_{r}": state(steps * batch, steps, workers, r) for r in range(before)}
    there, notes, result = moved(tmp_path, loaders, after)
    assert sorted(there) == [f"rank_{r}" for r in range(after)]
    rest = [i for r in range(after) for i in Dealer(samples, after, r).rest(there[f"rank_{r}"])]
    assert sorted(seen + rest) == list(range(samples))
    assert f"{before * batch * steps} samples of the epoch are read" in notes[0]
    gone = {n for n in (d[0] for d in result.dropped) if n.startswith("dataloader.")}
    assert {n.split(".")[1] for n in gone} == {f"rank_{r}" for r in range(after, before)}


def test_a_mesh_moves_the_states_of_data_parallel_ranks_alone(tmp_path: Path) -> None:
    mesh = MeshOptions("dp_replicate=2,dp_shard=2,tp=2", None)
    (tmp_path / "plan.txt").write_text("w colwise\n")
    for prefix, said in (
        ("dp_rank_", "are moved to 4"),
        ("rank_", "not named by data-parallel ranks, of which the job has 4"),
    ):
        loaders = {f"{prefix}{r}": state(12, 3, 0) for r in range(2)}
        torch.save({"model": {"net.w": torch.zeros(4, 2)}, "dataloader": loaders}, tmp_path / "job.pt")
        options = replace(mesh, tp_plan=str(tmp_path / "plan.txt"))
        with ckpttool.plan(tmp_path / "job.pt", tmp_path / "new", to="dcp", options=options) as planned:
            assert said in " ".join(planned.opened.checkpoint.notes)


def test_a_list_of_states_stays_a_list(tmp_path: Path) -> None:
    there, notes, _ = moved(tmp_path, [state(12, 3, 2, r) for r in range(2)], 4)
    assert isinstance(there, list) and [Dealer(48, 4, r).rest(s)[0] for r, s in enumerate(there)]
    assert "ranks from 2 on have the workers' seeds of the first ones" in notes[0]


@pytest.mark.parametrize(
    ("loaders", "why"),
    [
        ([state(5, 1, 0)] * 3, "since 15 samples are not a multiple of 4; 15 samples are read"),
        ([state(12, 3, 0), state(16, 4, 0)], "since the ranks are not at one step; 28 samples are read"),
        ([state(12, 3, 0, dataset_state={"sample_idx": 3})] * 2, "since datasets or samplers have state of their own"),
        ([state(12, 3, 0, _iterator_finished=True)] * 2, "since an epoch has just ended"),
        ([{"_sampler_iter_state": {"samples_yielded": 4}}] * 2, "since no StatefulDistributedSampler deals"),
        ([{"offset": 3}] * 2, "since they are not of torchdata's"),
    ],
)
def test_what_cannot_be_exact_stays_as_it_is_and_is_said(tmp_path: Path, loaders: list[Any], why: str) -> None:
    named = {f"dp_rank_{r}": s for r, s in enumerate(loaders)}
    there, notes, result = moved(tmp_path, named, 4)
    assert there == named and len(notes) == 1 and why in notes[0]
    assert not any(n.startswith("dataloader") for n in result.changed)


def test_the_index_at_which_the_job_must_begin_is_said(tmp_path: Path) -> None:
    _, notes, _ = moved(tmp_path, {f"rank_{r}": state(5, 1, 0) for r in range(3)}, 2)
    assert notes[0].endswith("has to set its position itself: begin at sample 15 of the epoch's order")


def test_the_same_number_of_ranks_changes_nothing_and_reset_leaves_the_states_out(tmp_path: Path) -> None:
    loaders = {f"rank_{r}": state(12, 3, 2, r) for r in range(2)}
    there, notes, _ = moved(tmp_path, loaders, 2)
    assert there == loaders and notes == []
    result = ckpttool.convert(tmp_path / "job.pt", tmp_path / "new", to="dcp", world_size=4, reset=["dataloader"])
    assert not [n for n in result.notes if "data loaders" in n]


def test_the_samples_of_torchtitans_loaders_are_counted(tmp_path: Path) -> None:
    def pickled(read: int) -> bytes:
        return pickle.dumps({"dataset_state": {"sample_idx": read, "inputs_buffer": [1, 2]}, "_num_yielded": 3})

    loaders = {"dp_rank_0": pickled(120), "dp_rank_1": pickled(121), "world_size": 2}
    there, notes, _ = moved(tmp_path, loaders, 4)
    assert there == loaders
    assert "packs tokens of each rank's own part of the dataset; 241 samples are read" in notes[0]
