"""What `inspect --fits` says of a rank is what torch and DeepSpeed allocate there, at three ranks, for the awkward model: uneven and
empty shards, three param groups, a frozen parameter, one without gradient, a tied head, buffers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from peers import FIXTURES
from ranks import torchrun

import ckpttool
from ckpttool.engine.memory import Devices, RankBytes, _State, count_rank_bytes
from ckpttool.options import SizeRequest

FSDP2, ZERO = FIXTURES / "awkward_w3", FIXTURES / "zero3_w3_groups"


def predict(case: Path, strategy: str, precision: str, rank: int) -> RankBytes:
    with ckpttool.open(case / "ckpt") as opened:
        held = _State(opened.checkpoint, SizeRequest(fits="3", precision=precision)).list_held(strategy)
        return count_rank_bytes(held, strategy, Devices(1, 3, None), rank)


@pytest.mark.live
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "precision", "jobs"),
    [
        ("float32", "saved", [(FSDP2, "fsdp2"), (FSDP2, "zero2"), (ZERO, "zero1"), (ZERO, "zero2")]),
        ("bfloat16", "mixed", [(FSDP2, "fsdp2"), (ZERO, "zero2"), (ZERO, "zero3"), (FSDP2, "zero3")]),
    ],
)
def test_the_bytes_of_every_rank_are_those_that_torch_and_deepspeed_allocate(
    dtype: str, precision: str, jobs: list[tuple[Path, str]], tmp_path: Path
) -> None:
    out = tmp_path / "measured.json"
    words = [f"{case}:{strategy}" for case, strategy in jobs]
    said = torchrun(3, "memory_of_ranks.py", dtype, *words, "--out", str(out))
    assert out.exists(), said[-3000:]
    measured: dict[str, list[dict[str, Any]]] = json.loads(out.read_text())
    assert list(measured) == words
    for (case, strategy), ranks in zip(jobs, measured.values(), strict=True):
        for rank, found in enumerate(ranks):
            wanted = predict(case, strategy, precision, rank)._asdict()
            if (
                strategy == "zero1"
            ):  # DeepSpeed keeps a third of the gradients after backward; the paper's row has all of them
                assert wanted.pop("grads") == 3 * found.pop("grads")
            assert found == wanted, (case, strategy, rank)
        shown = ckpttool.inspect(case / "ckpt", fits="3", precision=precision, strategy=[strategy]).memory
        assert shown is not None
        largest = max(ranks, key=lambda r: sum(r.values()))
        assert {k: shown.rows[0][k] for k in largest if k in ("params", "optimizer")} == {
            k: largest[k] for k in ("params", "optimizer")
        }
