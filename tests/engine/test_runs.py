"""`ls`: the steps of a run with what each lacks, who names it, and what resumes from it."""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import ckpttool_here as run
from peers import FIXTURES
from stores import Flaky, moto

import ckpttool
from ckpttool.engine.runs import describe_age, list_run
from ckpttool.errors import NotRecognised
from ckpttool.storage import remote

TRAINERS = FIXTURES / "trainers"
DDP = TRAINERS / "trainer_ddp" / "ckpt" / "checkpoint-3"
DCP = FIXTURES / "fsdp2_w3" / "ckpt"
OLD = time.time() - 40 * 86_400


def copy(source: Path, at: Path, age: bool = True) -> Path:
    """A copy of a checkpoint, as if it had been saved 40 days ago."""
    shutil.copytree(source, at)
    for p in (at, *at.rglob("*")):
        p.chmod(0o755 if p.is_dir() else 0o644)
        os.utime(p, (OLD, OLD) if age else None)
    return at


def rows(path: Path | str, *more: str) -> dict[str, dict[str, Any]]:
    """{name: step} of what `ls --json` prints."""
    done = run("ls", path, "--json", *more)
    assert done.returncode == 0, done.stderr
    return {s["name"]: s for s in json.loads(done.stdout)["steps"]}


def test_every_column_of_a_run_of_the_trainer(tmp_path: Path) -> None:
    for step in (100, 200, 300, 400):
        copy(DDP, tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-300" / "trainer_state.json").unlink()
    (tmp_path / "checkpoint-400" / "trainer_state.json").unlink()
    for p in (tmp_path / "checkpoint-300", *(tmp_path / "checkpoint-300").rglob("*")):
        os.utime(p, (OLD, OLD))
    found = rows(tmp_path)
    assert [(s["step"], s["complete"], s["being_written"], s["newest"]) for s in found.values()] == [
        (100, True, False, False), (200, True, False, True), (300, False, False, False), (400, False, True, False),
    ]  # fmt: skip
    assert {s["world_size"] for s in found.values()} == {2, None} and found["checkpoint-400"]["world_size"] is None
    assert found["checkpoint-100"]["age"] == pytest.approx(40 * 86_400, abs=3600)
    assert found["checkpoint-100"]["bytes"] == sum(p.stat().st_size for p in DDP.iterdir())
    for name in ("checkpoint-100", "checkpoint-200"):  # the line of `inspect`, for its own path
        said = json.loads(run("inspect", tmp_path / name, "--json").stdout)
        assert (found[name]["next_step"], found[name]["world_size"]) == (said["next"], said["ranks"])
    done = run("ls", tmp_path)
    assert "being written: no trainer_state.json" in done.stdout and "incomplete: no trainer_state.json" in done.stdout
    assert [line.split()[:2] for line in done.stdout.splitlines()[1:]] == [[str(n), f"checkpoint-{n}"] for n in (100, 200, 300, 400)]  # fmt: skip
    assert "40 d" in done.stdout and "checkpoint-100 to checkpoint-200, 2 steps: resumes in Trainer" in done.stderr
    assert run("ls", tmp_path, "-q").stderr == ""
    assert run("inspect", tmp_path, "--latest", "--json").stdout.count(str(tmp_path / "checkpoint-200"))
    fast = rows(tmp_path, "--fast")
    assert {s["next_step"] for s in fast.values()} == {None} and list(fast) == list(found)


@pytest.mark.parametrize(
    ("source", "name", "pointer", "text", "layout"),
    [
        (FIXTURES / "zero3_w4" / "ckpt" / "global_step3", "global_step{}", "latest", "global_step{}", "zero3"),
        (FIXTURES / "nanotron" / "zero0" / "3", "{}", "latest.txt", "{}", "nanotron"),
        (
            TRAINERS / "verl_fsdp2_w3" / "ckpt",
            "global_step_{}",
            "latest_checkpointed_iteration.txt",
            "{}",
            "verl",
        ),
        (DCP, "step-{}", "latest.verified", '{{"step": "step-{}", "digest": "x"}}', "dcp"),
        (DCP, "step-{}", "LAST", "out/run/step-{}\n", "dcp"),
    ],
)
def test_the_pointer_of_a_trainer_is_shown_and_one_to_nothing_is_said(
    source: Path, name: str, pointer: str, text: str, layout: str, tmp_path: Path
) -> None:
    for step in (10, 20):
        (tmp_path / name.format(step)).parent.mkdir(exist_ok=True)
        copy(source, tmp_path / name.format(step))
    (tmp_path / pointer).write_text(text.format(10))
    found = rows(tmp_path)
    assert found[name.format(10)]["named_by"] == [pointer] and found[name.format(20)]["named_by"] == []
    assert {s["layout"] for s in found.values()} == {layout} and [s["step"] for s in found.values()] == [10, 20]
    assert f"{pointer} names it" in run("ls", tmp_path).stdout
    if not text.startswith("{{"):
        (tmp_path / pointer).write_text(text.format(30))
        said = run("ls", tmp_path, "--fast").stderr
        assert said == f"warning: {pointer} names {text.format(30).strip()}, which is not here\n"


def test_a_file_that_holds_something_else_is_no_pointer(tmp_path: Path) -> None:
    for step in (1, 2):
        copy(DCP, tmp_path / f"step-{step}")
    (tmp_path / "logs").mkdir()
    for name, text in (
        ("best_loss.txt", "0.25"),
        ("latest", "logs"),
        ("last_words", "to be\nor not"),
        ("latest_run.json", "{}"),
        ("last", "\xff"),
    ):
        (tmp_path / name).write_text(text, encoding="latin-1")
    assert list_run(tmp_path).pointers == []


def test_links_point_too_and_a_link_to_an_incomplete_step_is_said(tmp_path: Path) -> None:
    for step in (3, 6):
        copy(DCP, tmp_path / f"step-{step}")
    (tmp_path / "step-6" / ".metadata").unlink()
    (tmp_path / "LATEST").symlink_to("step-6")
    found = list_run(tmp_path)
    assert [s.named_by for s in found.steps] == [(), ("LATEST",)]
    (warning,) = found.warnings()
    assert warning.startswith("LATEST names step-6, which is incomplete: no .metadata")
    assert found.newest is not None and found.newest.name == "step-3"


def test_the_best_checkpoint_that_a_trainer_s_state_names_is_shown(tmp_path: Path) -> None:
    for step in (100, 200, 300):
        here = copy(DDP, tmp_path / f"checkpoint-{step}")
        state = json.loads((here / "trainer_state.json").read_text())
        state["best_model_checkpoint"] = "/where/it/was/trained/checkpoint-100"
        (here / "trainer_state.json").write_text(json.dumps(state))
    assert rows(tmp_path)["checkpoint-100"]["named_by"] == ["checkpoint-300: trainer.best_model_checkpoint"]
    shutil.rmtree(tmp_path / "checkpoint-100")
    assert "names /where/it/was/trained/checkpoint-100, which is not here" in run("ls", tmp_path).stderr


def test_a_step_that_does_not_open_is_not_the_newest(tmp_path: Path) -> None:
    for step in (1, 2):
        copy(DCP, tmp_path / f"step-{step}")
    os.truncate(tmp_path / "step-2" / "__0_0.distcp", 100)
    found = list_run(tmp_path)
    assert found.newest is not None and found.newest.name == "step-1" and found.steps[1].complete
    assert "does not open: " in found.steps[1].state and "needs" in found.steps[1].state


def test_a_step_that_its_trainer_has_not_named_yet_is_being_written(tmp_path: Path) -> None:
    for step in (10, 20):
        copy(FIXTURES / "zero3_w4" / "ckpt" / "global_step3", tmp_path / f"global_step{step}", age=step == 10)
    (tmp_path / "latest").write_text("global_step10")
    assert [s.being_written for s in list_run(tmp_path, look=False).steps] == [False, True]
    (tmp_path / "latest").write_text("global_step20")
    assert [s.being_written for s in list_run(tmp_path, look=False).steps] == [False, False]


@pytest.mark.slow
def test_recorded_digests_are_those_of_the_files_that_are_there(tmp_path: Path) -> None:
    done = ckpttool.convert(DCP, tmp_path / "step-1", to="dcp", world_size=2)
    ckpttool.convert(DCP, tmp_path / "step-2", to="dcp", world_size=3)
    found = list_run(tmp_path).steps
    assert [s.digest for s in found] == [done.digest, done.digest] and [s.world_size for s in found] == [2, 3]
    assert f"digest {done.digest['all'][:12]}" in str(list_run(tmp_path))
    with open(tmp_path / "step-2" / "__0_0.distcp", "ab") as f:
        f.write(b"more")
    assert list_run(tmp_path, look=False).steps[1].digest is None


def test_a_checkpoint_itself_a_file_and_nothing(tmp_path: Path) -> None:
    at = copy(DDP, tmp_path / "checkpoint-7")
    (step,) = list_run(at).steps
    assert (step.name, step.step, step.path, step.newest) == ("", 7, str(at), True) and step.next_step
    (step,) = list_run(FIXTURES / "full_w1" / "ckpt" / "fqn.pt").steps
    assert (step.name, step.layout, step.files) == ("fqn.pt", "full", 1)
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "none"):
        with pytest.raises(NotRecognised):
            list_run(path)
    assert run("ls", tmp_path / "empty").returncode == 3


def test_one_step_is_read_for_all_whose_files_have_equal_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(1, 41):
        copy(DCP, tmp_path / f"step-{step}")
    copy(FIXTURES / "fsdp2_w1" / "ckpt", tmp_path / "step-20b")
    opened: list[str] = []
    real = ckpttool.engine.runs.open_checkpoint  # type: ignore[attr-defined]
    monkeypatch.setattr(
        "ckpttool.engine.runs.open_checkpoint", lambda where, *a, **k: opened.append(where.source.root) or real(where, *a, **k)
    )  # fmt: skip
    found = list_run(tmp_path)
    assert sorted(Path(p).name for p in opened) == ["step-20b", "step-40"]
    assert all(s.next_step and s.path in s.next_step for s in found.steps)
    assert {s.world_size for s in found.steps if s.name != "step-20b"} == {3}


@pytest.mark.slow
def test_a_run_in_a_store_is_listed_with_few_requests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    s3 = moto()
    url = s3.bucket(monkeypatch)
    client, bucket = s3.client(), url.removeprefix("s3://")
    for step in range(10, 310, 10):
        for file in DCP.iterdir():
            client.put_object(Bucket=bucket, Key=f"run/step-{step}/{file.name}", Body=file.read_bytes())
    client.put_object(Bucket=bucket, Key="run/latest", Body=b"step-290")
    client.delete_object(Bucket=bucket, Key="run/step-300/.metadata")
    with Flaky(s3.endpoint, lambda *_: None) as proxy:
        s3.environment(monkeypatch, proxy.endpoint)
        found = rows(f"{url}/run")
        asked = len(proxy.seen)
        assert list(found) == [f"step-{n}" for n in range(10, 310, 10)] and asked < 20, proxy.seen
        assert found["step-300"]["being_written"] and found["step-290"]["named_by"] == ["latest"]
        assert found["step-290"]["newest"] and found["step-290"]["world_size"] == 3
        assert f"convert {url}/run/step-10 OUT" in found["step-10"]["next_step"]
        assert list(rows(f"{url}/run/step-20")) == [""]
        for more in ({"names": 50}, {}):  # too many names for one listing; one that leads elsewhere
            monkeypatch.setattr(remote, "LIMITS", replace(remote.LIMITS, **more))
            client.put_object(Bucket=bucket, Key="run/a//b", Body=b"" if more else b"x")
            proxy.seen.clear()
            again = rows(f"{url}/run")
            assert len(proxy.seen) > 30 and {n: s["bytes"] for n, s in again.items()} == {
                n: s["bytes"] for n, s in found.items()
            }
        assert run("ls", f"{url}/none").returncode == 3


def test_ages_are_in_words() -> None:
    now = time.time()
    ages = [describe_age(now - s) for s in (0, 59, 60, 3_599, 3_600, 86_400, 40 * 86_400, -50)]
    assert ages == ["0 s", "59 s", "1 min", "59 min", "1 h", "1 d", "40 d", "0 s"] and describe_age(None) == ""
