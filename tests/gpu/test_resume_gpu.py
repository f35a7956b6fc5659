"""resume-verify on a GPU: FSDP2 under NCCL, bfloat16, a Llama of more than a billion parameters.

    python -m pytest -q -s tests/gpu

prints the numbers that stand in docs/how-to/gpu.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32000, "hidden_size": 2048,
    "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4,
    "max_position_embeddings": 2048, "tie_word_embeddings": False, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job of one GPU with the kernels that torch chooses: two steps, dcp.save, ten recorded steps more."""
    return job(tmp_path_factory.mktemp("gpu"), "usual")


def job(folder: Path, kernels: str, **changed: Any) -> Path:
    """A folder with config, checkpoint and recording."""
    (folder / "config").mkdir()
    (folder / "config" / "config.json").write_text(json.dumps({**CONFIG, **changed}))
    torchrun(HERE / "train.py", folder, kernels)
    return folder


def torchrun(script: Path, *args: Any) -> str:
    """One rank on one GPU; what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", str(script), *map(str, args)],
        capture_output=True, text=True, check=False, env={**os.environ, "HF_HUB_OFFLINE": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def verify(*args: Any) -> tuple[int, dict[str, Any]]:
    """(exit code, report) of one command."""
    done = subprocess.run(
        [sys.executable, "-m", "ckpttool", "resume-verify", *map(str, args), "--json"],
        capture_output=True, text=True, check=False, env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.stdout, done.stderr[-4000:]
    return done.returncode, json.loads(done.stdout)


def numbers(report: dict[str, Any]) -> str:
    """What is worth a line in docs/how-to/gpu.md."""
    shown = [f"{c['name']} {c['number']:.2e} (bound {c['bound']:.0e})" for c in report["checks"] if c["number"] is not None and c["bound"]]  # fmt: skip
    return "; ".join([report["verdict"], *shown, json.dumps(report["metrics"])])


JOB = ["--global-batch", "8", "--micro-batch", "4", "--sequence", "1024", "--dtype", "bf16", "--clip", "1.0"]


def test_a_billion_parameters_go_on_as_the_recorded_job_did(original: Path) -> None:
    code, report = verify(
        original / "ckpt", "--reference", original / "reference.jsonl", "--config", original / "config", *JOB
    )
    print("\nreference:", numbers(report))
    assert report["candidate"]["parameters"] > 1_000_000_000
    assert report["candidate"]["device"] == "cuda" and "nccl" in report["candidate"]["environment"]
    assert code == 0 and report["verdict"] == "pass", [c for c in report["checks"] if c["verdict"] != "pass"]
    assert report["candidate"]["environment"]["deterministic"] is False, "as the recorded job computed"
    assert report["candidate"]["roundtrip"]["differing"] == []
    assert 0.0 < report["metrics"].get("mfu", 0.5) < 1.0


def test_a_recorded_job_with_deterministic_kernels_is_met_with_the_same_kernels(tmp_path: Path) -> None:
    folder = job(tmp_path, "deterministic", num_hidden_layers=2)
    code, report = verify(
        folder / "ckpt", "--reference", folder / "reference.jsonl", "--config", folder / "config", *JOB
    )
    print("\ndeterministic:", numbers(report), report["candidate"]["notes"])
    assert code == 0, [c for c in report["checks"] if c["verdict"] == "fail"]
    assert report["candidate"]["environment"]["deterministic"] is True


def test_a_conversion_goes_on_as_its_source_and_a_dropped_optimizer_does_not(original: Path, tmp_path: Path) -> None:
    import ckpttool

    ckpttool.convert(original / "ckpt", tmp_path / "eight", to="dcp", world_size=8)
    code, report = verify(tmp_path / "eight", "--against", original / "ckpt", "--config", original / "config", *JOB)
    print("\nagainst:", numbers(report))
    assert code == 0, [c for c in report["checks"] if c["verdict"] == "fail"]
    for key in ("loss", "grads", "updates"):
        assert [s[key] for s in report["candidate"]["steps"]] == [s[key] for s in report["reference"]["steps"]], key
    print("loaded by:", report["reference"]["loaders"], report["candidate"]["loaders"])
    assert all("torch" in who for who in report["reference"]["loaders"].values())
    after = {c["name"]: c["verdict"] for c in report["checks"] if c["name"].startswith("after.")}
    assert after["after.weights"] == after["after.optimizer"] == "pass", after
    ckpttool.convert(original / "ckpt", tmp_path / "bare", to="dcp", world_size=8, only=["model", "trainer"])
    code, report = verify(
        tmp_path / "bare", "--against", original / "ckpt", "--config", original / "config", *JOB, "--steps", "3"
    )
    assert code == 10 and report["causes"][0]["kind"] == "optimizer-missing", report["causes"]


@pytest.mark.parametrize(("build", "code"), [("warmup", 0), ("no_momentum", 10)])
def test_a_fresh_job_is_saved_and_resumed_bit_equal_or_its_save_is_blamed(build: str, code: int) -> None:
    jobs = HERE.parent / "live" / "fresh_jobs.py"
    found, report = verify("--fresh", "--job", f"{jobs}:{build}")
    print(f"\nfresh {build}:", numbers(report))
    assert found == code, [c for c in report["checks"] if c["verdict"] == "fail"]
    assert report["candidate"]["device"] == "cuda"
    verdict = next(c["verdict"] for c in report["checks"] if c["name"] == "fresh.bit_equal")
    assert verdict == ("fail" if code else "pass")


def test_gates_on_memory_and_speed_are_judged_by_what_the_gpu_reports(original: Path) -> None:
    code, report = verify(
        original / "ckpt", "--config", original / "config", *JOB, "--steps", "4", "--max-reserved-gib", "0.5",
        "--max-step-seconds", "600", "--no-deterministic",
    )  # fmt: skip
    print("\nno determinism:", numbers(report))
    gates = {c["name"]: c for c in report["checks"] if c["stage"] == "gate"}
    assert code == 11 and len(gates) == 2
    assert sorted(c["verdict"] for c in gates.values()) == ["fail", "pass"]
    assert report["candidate"]["memory"][0]["reserved_bytes"] > 10 * 2**30


def test_loading_is_as_fast_as_torchs_own_reader(original: Path) -> None:
    times = json.loads(torchrun(HERE / "load_times.py", original).splitlines()[-1])
    print("\nload:", times)
    assert times["equal"]
    assert times["ratio"] <= 1.0
