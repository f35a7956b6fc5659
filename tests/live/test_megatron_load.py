"""What ckpttool writes as `megatron` is loaded by Megatron-Core itself, at other tensor and pipeline parallel sizes than those of the save,
and trains on with the losses of the job that was never stopped."""

from __future__ import annotations

import json
from typing import Any

import pytest
from peers import FIXTURES
from ranks import torchrun

import ckpttool

pytest.importorskip("megatron.core", reason="megatron-core is installed by `make test`", exc_type=ImportError)
pytestmark = [pytest.mark.live]
MEGATRON = FIXTURES / "megatron"
#: {fixture: how the job that loads is built, on two ranks}; the padding of the vocabulary is part of the loss
JOBS: dict[str, dict[str, Any]] = {
    "tp2_pp2": {"padded": 160},
    "stacked_pp2_bf16": {"bf16": True, "tp": 2, "padded": 144},
    "buckets_dp3": {"bf16": True, "pp": 2},
    "moe": {"experts": 4},
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two ranks say of each case."""
    out = tmp_path_factory.mktemp("megatron")
    cases = []
    for case, how in JOBS.items():
        ckpttool.convert(MEGATRON / case / "ckpt" / "iter_0000003", out / case, to="megatron", world_size=3)
        same = (how.get("tp", 1), how.get("pp", 1)) == tuple(
            json.loads((MEGATRON / case / "job.json").read_text())["how"].get(k, 1) for k in ("tp", "pp")
        )
        truth = str(MEGATRON / case / "truth.safetensors")
        cases.append({"checkpoint": str(out / case), "truth": truth, "how": how, "rng": same})
    path = out / "cases.json"
    path.write_text(json.dumps(cases))
    said = torchrun(2, "megatron_resume.py", str(path))
    found = json.loads(path.read_text())
    assert all("losses" in c for c in found), said[-4000:]
    return dict(zip(JOBS, found, strict=True))


@pytest.mark.parametrize("case", JOBS)
def test_megatron_loads_it_at_another_parallel_size_bit_for_bit(case: str, loaded: dict[str, Any]) -> None:
    found = loaded[case]
    assert found["different"] == []
    assert found["iteration"] == 3 and found["args"] == [2, "AttnBackend.auto"]
    assert found.get("rng_bytes", 64) == 64


@pytest.mark.parametrize("case", JOBS)
def test_it_trains_on_as_the_job_that_was_never_stopped(case: str, loaded: dict[str, Any]) -> None:
    wanted = json.loads((MEGATRON / case / "job.json").read_text())["losses_after"]
    assert loaded[case]["losses"] == pytest.approx(wanted, rel=5e-5 if JOBS[case].get("bf16") else 2e-6)
