"""`ckpttool resume-verify` as a user meets it: jobs of one's own, other launchers, dropout, gates, signals, refusals.

Ranks come from the nurseries of ranks.py, except in the tests that need the real program: one where torchrun starts it, one where the
job of its ranks fails, one that is stopped by a signal, and one of a Python caller.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import ckpttool_here
from ranks import forked, one_at_a_time

import ckpttool
from ckpttool.resume.trace.model import format_record_line
from fixtures import jobs

REPOSITORY = Path(__file__).resolve().parents[2]
FIXTURES = REPOSITORY / "fixtures"
JOBS = REPOSITORY / "tests" / "live" / "verify_job.py"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "160"}

pytestmark = [pytest.mark.live, pytest.mark.slow]


def command(*args: Any, launcher: tuple[str, ...] = ()) -> list[str]:
    """The command line of a run."""
    words = [*launcher, "-m", "ckpttool"] if launcher else [sys.executable, "-m", "ckpttool"]
    return [*words, "resume-verify", *map(str, args)]


def started(*args: Any, launcher: tuple[str, ...] = ()) -> tuple[int, dict[str, Any], str]:
    """The same as `verify`, by the real program and the real torchrun."""
    with one_at_a_time():
        done = subprocess.run(
            command(*args, "--json", launcher=launcher), capture_output=True, text=True, check=False, env=ENVIRONMENT
        )
    return parsed(done)


def verify(*args: Any) -> tuple[int, dict[str, Any], str]:
    """(exit code, what --json printed, stderr)."""
    with one_at_a_time(), forked():
        return parsed(ckpttool_here("resume-verify", *args, "--json"))


def parsed(done: subprocess.CompletedProcess[str]) -> tuple[int, dict[str, Any], str]:
    assert "Traceback" not in done.stderr, done.stderr
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout), done.stderr


def failures(report: dict[str, Any]) -> list[tuple[str, str]]:
    """(name, text) of what failed."""
    return [(c["name"], c["text"]) for c in report["checks"] if c["verdict"] == "fail"]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of the Llama of fsdp2_w2_groups."""
    model: Any = jobs.build("llama", num_hidden_layers=1)
    folder = tmp_path_factory.mktemp("config")
    model.config.save_pretrained(folder)
    return folder


SMALL = ["--global-batch", 8, "--micro-batch", 2, "--sequence", 16, "--steps", 2]


def recorded(case: str, file: Path) -> Path:
    """The losses of a fixture's uninterrupted job, as a reference."""
    known = json.loads((FIXTURES / case / "case.json").read_text())
    first = known["step"] + 1
    file.write_text(
        "".join(format_record_line("step", step=first + k, loss=x) for k, x in enumerate(known["loss_next"]))
    )
    return file


def test_a_job_of_ones_own_goes_on_with_tied_frozen_and_idle_parameters_and_buffers(tmp_path: Path) -> None:
    code, report, _ = verify(
        FIXTURES / "awkward_w3" / "ckpt", "--job", f"{JOBS}:build", "--reference", recorded("awkward_w3", tmp_path / "r.jsonl"),
        "--world-size", 2, "--global-batch", 24, "--micro-batch", 12, "--steps", 3, "--profile", "standard",
    )  # fmt: skip
    assert code == 0, failures(report)
    got = report["candidate"]
    assert got["tied"] == [["embedding.weight", "head.weight"]]
    assert [s["step"] for s in got["steps"]] == [4, 5, 6]
    assert got["stored"] == {n: s[2] for n, s in got["state"].items()}, (
        "every tensor, buffers and both names of the tied one"
    )
    assert {"model.mask", "model.count", "model.paths.größe.weight"} <= got["state"].keys()
    assert got["roundtrip"]["differing"] == []


def test_a_job_on_meta_with_a_scheduler_and_a_loss_goes_on_with_its_learning_rates(tmp_path: Path) -> None:
    source = FIXTURES / "fsdp2_w2_groups" / "ckpt"
    reference = recorded("fsdp2_w2_groups", tmp_path / "r.jsonl")
    job = ["--job", f"{JOBS}:meta", "--world-size", 3, "--global-batch", 24, "--micro-batch", 4, "--steps", 3]
    code, report, _ = verify(source, "--reference", reference, *job, "--report", tmp_path / "report")
    assert code == 0, failures(report)
    rates = [s["learning_rates"] for s in report["candidate"]["steps"]]
    assert rates == [[pytest.approx(0.01 / (1 + k)), pytest.approx(0.0025 / (1 + k))] for k in (3, 4, 5)]
    assert json.loads((tmp_path / "report" / "report.json").read_text())["verdict"] == "pass"
    assert "<html" in (tmp_path / "report" / "report.html").read_text()


def test_a_job_without_deterministic_kernels_is_run_without_and_asks_for_the_option_where_it_cannot(
    tmp_path: Path,
) -> None:
    source = FIXTURES / "fsdp2_w2_groups" / "ckpt"
    reference = recorded("fsdp2_w2_groups", tmp_path / "r.jsonl")
    job = [
        "--job",
        f"{JOBS}:scattered",
        "--reference",
        reference,
        "--global-batch",
        24,
        "--micro-batch",
        12,
        "--steps",
        3,
    ]
    code, report, said = verify(source, *job)
    assert code == 0, failures(report)
    assert report["candidate"]["environment"]["deterministic"] is False
    assert any("the runs were made without deterministic kernels" in note for note in report["candidate"]["notes"])
    assert "torch has no deterministic kernel for put_" in said and "Starting once more without" in said
    code, report, _ = verify(source, *job, "--deterministic")
    assert code == 3 and "pass --no-deterministic" in report["error"]["message"].lower()


def test_torchrun_may_start_it_and_rank_0_alone_speaks(config: Path, tmp_path: Path) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    source = FIXTURES / "fsdp2_w2_groups" / "ckpt"
    code, report, said = started(
        source, "--against", source, "--config", config, *SMALL, "--scratch", tmp_path, launcher=torchrun
    )
    assert code == 0 and report["verdict"] == "pass", failures(report)
    assert report["candidate"]["world_size"] == 2 and report["candidate"]["roundtrip"]["differing"] == []
    assert said.count("step 1 of 2") == 2, "the reference's and the candidate's, by one rank"
    assert os.listdir(tmp_path) == []


def test_dropout_is_comparable_at_the_saved_world_size_with_its_generators_and_at_no_other(
    config: Path, tmp_path: Path
) -> None:
    wet = json.loads((config / "config.json").read_text()) | {"attention_dropout": 0.3}
    (tmp_path / "config.json").write_text(json.dumps(wet))
    source = FIXTURES / "fsdp2_w2_groups" / "ckpt"
    how = [source, "--against", source, "--config", tmp_path, *SMALL, "--keep-dropout"]
    code, report, _ = verify(*how, "--world-size", 2)
    assert code == 0 and report["candidate"]["dropout"] and report["candidate"]["environment"]["rng_restored"], (
        failures(report)
    )
    losses = [s["loss"] for s in report["candidate"]["steps"]]
    assert losses == [s["loss"] for s in report["reference"]["steps"]]
    code, report, _ = verify(*how, "--world-size", 1)
    assert code == 10 and report["verdict"] == "not comparable"
    code, report, _ = verify(*how[:-1], "--world-size", 1)
    assert code == 0 and not report["candidate"]["dropout"]
    assert [s["loss"] for s in report["candidate"]["steps"]] != losses


def test_gates_calibration_and_metrics(config: Path, tmp_path: Path) -> None:
    source = FIXTURES / "fsdp2_w2_groups" / "ckpt"
    code, report, _ = verify(
        source, "--against", source, "--config", config, *SMALL, "--calibrate", "--max-load-seconds", 600,
        "--max-step-seconds", 1e-6, "--min-mfu", 0.5, "--metrics", tmp_path / "m.prom", "--junit", tmp_path / "j.xml",
    )  # fmt: skip
    assert code == 11 and report["verdict"] == "gate failed" and report["calibrated"]
    gates = {c["name"]: c["verdict"] for c in report["checks"] if c["stage"] == "gate"}
    assert sorted(gates.values()) == ["fail", "fail", "pass"], "no peak is known of a CPU: asked for and not shown"
    assert {c["source"] for c in report["checks"] if c["stage"] == "step 1" and c["bound"]} <= {
        "calibrated",
        "measured",
    }
    assert (
        "ckpttool_resume_verdict" in (tmp_path / "m.prom").read_text()
        and "<testsuite" in (tmp_path / "j.xml").read_text()
    )


@pytest.mark.parametrize(
    ("job", "code", "said"),
    [("broken", 1, "rank 0 failed: RuntimeError: the data set is not mounted"), ("nothing", 2, "the model is a int"),
     ("odd", 2, "requires tokenizer"), ("none", 2, "has no function none")],
)  # fmt: skip
def test_a_job_that_cannot_be_built_ends_with_a_sentence(job: str, code: int, said: str) -> None:
    run = started if job == "broken" else verify
    got, report, _ = run(FIXTURES / "awkward_w3" / "ckpt", "--job", f"{JOBS}:{job}")
    assert got == code and said in report["error"]["message"]
    if code == 1:
        log = Path(report["error"]["message"].rpartition(" ")[2].rstrip("."))
        assert "Traceback" in log.read_text() and "not mounted" in log.read_text()
        shutil.rmtree(log.parent)


def test_a_checkpoint_of_another_model_does_not_fit_and_what_is_missing_is_named(config: Path) -> None:
    code, report, _ = verify(FIXTURES / "awkward_w3" / "ckpt", "--config", config, *SMALL)
    assert code == 12 and report["verdict"] == "does not fit"
    assert "model.embed_tokens.weight" in report["candidate"]["failed"]
    assert "lacks 12 tensors of the job, first model.embed_tokens.weight" in report["causes"][0]["text"]
    assert report["not_verified"] == ["everything after loading: the checkpoint could not be loaded"]


def test_names_below_a_module_that_the_job_lacks_do_not_fit_until_the_option_that_is_named_is_given(
    config: Path, tmp_path: Path
) -> None:
    ckpttool.convert(FIXTURES / "fsdp2_w2_groups" / "ckpt", tmp_path / "plain.pt", to="full")
    tree = torch.load(tmp_path / "plain.pt", weights_only=True)
    tree["model"] = {f"a.net.{n}": t for n, t in tree["model"].items()}
    tree["optim"]["state"] = {f"a.net.{n}": s for n, s in tree["optim"]["state"].items()}
    for group in tree["optim"]["param_groups"]:
        group["params"] = [f"a.net.{n}" for n in group["params"]]
    torch.save(tree, tmp_path / "prefixed.pt")
    how = [tmp_path / "prefixed.pt", "--config", config, *SMALL]
    code, report, _ = verify(*how)
    assert code == 12 and report["verdict"] == "does not fit"
    assert "Pass --module-prefix a.net.," in report["causes"][0]["text"]
    code, report, _ = verify(*how, "--against", how[0], "--module-prefix", "a.net.", "--world-size", 2)
    assert code == 0 and report["verdict"] == "pass", failures(report)
    assert "model.a.net.model.embed_tokens.weight" in report["candidate"]["state"]
    assert report["candidate"]["roundtrip"]["differing"] == []
    assert report["not_verified"][0].startswith(
        "faults of job, data, loss or model configuration: both runs were built from"
    )
    assert any(
        x.startswith("compared as stored, but not used by this job: random states") for x in report["not_verified"]
    )


def test_a_signal_ends_all_ranks_and_leaves_nothing(config: Path, tmp_path: Path) -> None:
    source = FIXTURES / "fsdp2_w2_groups" / "ckpt"
    with one_at_a_time():
        how = {**ENVIRONMENT, "TMPDIR": str(tmp_path)}
        words = command(source, "--config", config, "--world-size", 2, "--steps", 1_000_000)
        with subprocess.Popen(words, env=how, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as child:
            assert child.stderr is not None
            for text in child.stderr:
                if "step 3 of" in text:
                    break
            child.send_signal(signal.SIGTERM)
            rest = child.stderr.read()
        assert child.returncode == 130, rest
    assert "Traceback" not in rest and "error: stopped" in rest
    time.sleep(0.5)
    left = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True, check=False).stdout
    assert not left, "no rank may be left behind"
    assert not [n for n in os.listdir(tmp_path) if n.startswith("ckpttool")]


def test_a_python_caller_gets_the_report(config: Path) -> None:
    source = FIXTURES / "fsdp2_w2_groups" / "ckpt"
    told: list[str] = []
    with one_at_a_time():
        report = ckpttool.resume_verify(
            source,
            config=str(config),
            world_size=2,
            steps=1,
            global_batch=2,
            sequence=8,
            device="cpu",
            round_trip=False,
            status=told.append,
        )
    assert report is not None and report.word == "no reference" and report.exit_code == 0
    assert report.candidate.roundtrip == {"skipped": "it was switched off"} and any("loading" in t for t in told)
    assert torch.isfinite(torch.tensor(report.candidate.steps[0].loss))
    loads = report.candidate.loads
    assert [m["rank"] for m in loads] == [0, 1] and all(m["host_bytes"] > 1 << 26 for m in loads)
    assert report.candidate.load_seconds == max(m["seconds"] for m in loads) > 0
    assert report.candidate.load_bytes == sum(m["bytes"] for m in loads) > 0
