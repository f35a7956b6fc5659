"""One rank reads the index and the others get it: the same index, no work of theirs, and errors that reach all of them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peers import FLAT, ORIGINALS
from ranks import torchrun
from torch.distributed.checkpoint.state_dict import get_state_dict

import ckpttool
from ckpttool.layouts import detect, place

WORLD = 3


def checkpoints() -> list[tuple[str, dict[str, Any]]]:
    """One of each layout."""
    out: dict[str, tuple[str, dict[str, Any]]] = {}
    for o in [*ORIGINALS, *FLAT]:
        uses_config = "config" in detect(place(o.path)).reader_uses
        how = {**o.how, **({"config": o.config} if o.config and uses_config else {})}
        out.setdefault(detect(place(o.path)).name, (str(o.path), how))
    return list(out.values())


def save(path: Path, seed: int) -> None:
    """A checkpoint of the job of shared_jobs.py, with a random state of each of 5 ranks and no counter."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 7), torch.nn.Linear(7, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=seed / 100)
    for _ in range(2):
        model(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    rng = {str(r): {"torch": torch.get_rng_state()} for r in range(5)}
    torch.save({"model": weights, "optim": moments, "rng": rng}, path.with_suffix(".pt"))
    ckpttool.convert(path.with_suffix(".pt"), path, to="dcp", world_size=5)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    """What every rank left, and the folder."""
    scratch = tmp_path_factory.mktemp("shared")
    save(scratch / "one", 1)
    save(scratch / "two", 2)
    ckpttool.convert(scratch / "one", scratch / "archive.tar.zst", to="audit")
    for name in ("copy", "damaged", "mixed"):
        shutil.copytree(scratch / "one", scratch / name)
    index = scratch / "damaged" / ".metadata"
    index.write_bytes(index.read_bytes()[:-40])
    shutil.copy(scratch / "mixed" / "__1_0.distcp", scratch / "mixed" / "__2_0.distcp")
    (scratch / "mixed" / "ckpttool.json").unlink()
    words = scratch / "words.json"
    every = [*checkpoints(), (str(scratch / "archive.tar.zst"), {})]
    words.write_text(json.dumps({"checkpoints": every, "scratch": str(scratch)}))
    log = torchrun(WORLD, "shared_jobs.py", str(words), str(scratch / "out"))
    out = [scratch / f"out-{rank}.json" for rank in range(WORLD)]
    assert all(p.exists() for p in out), log[-4000:]
    return [json.loads(p.read_text()) for p in out], scratch


pytestmark = pytest.mark.live


def test_every_rank_has_the_index_that_it_would_have_read_and_reads_nothing_for_it(found: Any) -> None:
    ranks, _ = found
    for rank in ranks:
        assert {p: d for p, d in rank["same"].items() if d} == {}
    assert len(ranks[0]["same"]) > 6


def test_all_ranks_hold_one_state_and_only_the_first_reads_what_is_small(found: Any) -> None:
    ranks, scratch = found
    with ckpttool.open(scratch / "one") as opened:
        weight = opened["model.0.weight"].torch().tolist()
    for rank in ranks:
        for case in ("loaded", "copy on rank 1"):
            mine = rank[case]
            assert mine["model"]["0.weight"] == weight and mine["lr"] == 0.01 and mine["step"] == 2
            assert {k: v for k, v in mine.items() if k != "calls"} == {
                k: v for k, v in ranks[0]["loaded"].items() if k != "calls"
            }
    first, *others = (r["loaded"]["calls"] for r in ranks)
    assert first["list"] and all("list" not in o and "run" not in o for o in others)
    assert all(o["readinto"] < first["readinto"] for o in others)
    assert ranks[1]["copy on rank 1"]["calls"]["list"], "the place is another one, so that rank reads its index"


@pytest.mark.parametrize(
    ("case", "rank", "its", "others"),
    [
        ("other on rank 1", None, "rank 1 sees another checkpoint under .*: its values are others", ""),
        ("nothing on rank 1", 1, "nothing.*", r"^\w+: rank 1 cannot load the checkpoint, so no rank does: .*nothing"),
        ("damaged", 0, r"Truncated: .*\.metadata", r"^Truncated: rank 0 cannot load the checkpoint, so no rank does: .*\.metadata"),
    ],
)  # fmt: skip
def test_what_one_rank_cannot_open_none_loads(found: Any, case: str, rank: int | None, its: str, others: str) -> None:
    ranks, _ = found
    for k, mine in enumerate(ranks):
        text = its if rank is None or k == rank else others
        assert re.search(text, mine[case], re.DOTALL), (k, mine[case])


def test_where_one_rank_does_not_hold_what_is_in_the_files_all_raise(found: Any) -> None:
    ranks, _ = found
    for k, mine in enumerate(ranks):
        text = mine["forgets on rank 1"]
        assert text.startswith(
            "Differs: " if k == 1 else "Differs: rank 1 does not hold what is in the files, so no rank goes on"
        )
        assert '"optim.state.0.weight.step" is tensor(2.) in the checkpoint and tensor(3.) in the job' in text


def test_no_rank_loads_a_folder_in_which_a_ranks_file_is_a_copy(found: Any) -> None:
    ranks, _ = found
    for mine in ranks:
        for text in mine["mixed"]:
            assert "__1_0.distcp of rank 1 and __2_0.distcp of rank 2 hold the same numbers" in text
        assert mine["mixed, allowed"] == ""


def test_a_file_that_changed_after_the_index_was_read_is_refused_by_every_rank(found: Any) -> None:
    ranks, _ = found
    for mine in ranks:
        assert (
            "is not the file that the rank had which read the index" in mine["touched"]
            or "changed while" in mine["touched"]
        )
    assert "is not the file that the rank had" in ranks[1]["touched"]


def test_one_rank_can_load_alone(found: Any) -> None:
    ranks, scratch = found
    with ckpttool.open(scratch / "one") as opened:
        assert ranks[0]["alone"] == opened["model.0.bias"].torch().tolist()
