"""`ckpttool.guard` in real jobs: transformers' Trainer, Lightning, torchtitan's CheckpointManager, a loop with dcp.async_save. The code
is that of docs/how-to/guard.md. One save of each is damaged after it was written."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from peers import FIXTURES

from ckpttool.errors import CkpttoolError, Corrupt, UsageError
from ckpttool.guard import Guard
from ckpttool.watching.journal import open_journal

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "guard.md"
QUICK = "settle=0.2"


def code_of(heading: str, *changes: tuple[str, str]) -> str:
    """The Python below a heading of the page, for a quick guard, with these changes."""
    text = re.search(rf"^## {heading}\n.*?^```py\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert text is not None
    code = re.sub(r"(\w*Guard)\((\)?)", lambda m: f"{m[1]}({QUICK}{m[2] or ', '}", text[1])
    for old, new in changes:
        assert old in code, (old, code)
        code = code.replace(old, new)
    return code


def run_code(code: str, **names: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the trainers
        exec(compile(code, str(PAGE), "exec"), names)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def events(run: Path) -> dict[str, str]:
    """{save: what the journal says of it}"""
    lines = (Path(f"{run}.ckpttool-watch") / "journal.jsonl").read_text().splitlines()
    return {e["name"]: e["event"] for e in map(json.loads, lines) if e["event"] != "begun"}


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings in the log."""
    return [r.getMessage() for r in caplog.records if r.name == "ckpttool" and r.levelno == logging.WARNING]


def children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError):  # a thread that has ended meanwhile
            found += map(int, (task / "children").read_text().split())
    return found


@pytest.fixture(autouse=True)
def no_process_stays() -> Iterator[None]:
    before = children(os.getpid())
    yield
    assert children(os.getpid()) == before and not [t for t in threading.enumerate() if t.name == "ckpttool-guard"]


class Saver:
    """Trains a little and saves with DCP."""

    def __init__(self, run: Path) -> None:
        torch.manual_seed(0)
        self.run, self.model = run, torch.nn.Linear(8, 8)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def train(self, step: int) -> None:
        self.step = step
        self.model(torch.ones(8)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        named = {n: self.optimizer.state[p] for n, p in self.model.named_parameters()}
        return {"model": self.model.state_dict(), "optim": {"state": named}, "step": self.step}

    def save(self, step: int) -> Path:
        self.train(step)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is one process
            dcp.save(self.state(), checkpoint_id=self.run / f"step-{step}", no_dist=True)
        return self.run / f"step-{step}"


@pytest.fixture
def saver(tmp_path: Path) -> Saver:
    return Saver(tmp_path / "run")


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# ------------------------------------------------------------------------------------------------------- real trainers


@pytest.mark.live
def test_a_bad_save_of_transformers_trainer_is_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments

    class Damage(TrainerCallback):  # type: ignore[misc]
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 4:
                cut(Path(args.output_dir, "checkpoint-4", "optimizer.pt"))

    monkeypatch.chdir(tmp_path)
    config = LlamaConfig(vocab_size=31, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2)
    rows = [{"input_ids": (row := torch.arange(k, k + 6) % 31), "labels": row} for k in range(12)]
    args = TrainingArguments("runs/llama", max_steps=6, save_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True, disable_tqdm=True)  # fmt: skip
    code = code_of("Hugging Face Trainer", ("[Trainer", "[Damage(), Trainer"))
    with caplog.at_level(logging.WARNING, "ckpttool"):
        run_code(code, model=LlamaForCausalLM(config), args=args, data=rows, Damage=Damage)
    run = tmp_path / "runs" / "llama"
    assert events(run) == {"checkpoint-2": "verified", "checkpoint-4": "failed", "checkpoint-6": "verified"}
    (line,) = said(caplog)
    assert line.startswith(f"CKPT0433: {run}/checkpoint-4 is bad: cut: optimizer.pt"), line
    assert re.search(rf"The newest proved save is {run}/checkpoint-[26]\.$", line)

    from ckpttool.guard import TrainerGuard

    checked: list[str] = []
    guard = TrainerGuard()
    monkeypatch.setattr(guard, "check", checked.append)
    (tmp_path / "search" / "run-3" / "checkpoint-2").mkdir(parents=True)
    for searches in (True, False):
        guard.on_save(
            SimpleNamespace(output_dir="search"), SimpleNamespace(global_step=2, is_hyper_param_search=searches), None
        )
    assert checked == ["search/run-3/checkpoint-2", "search/checkpoint-2"]


@pytest.mark.live
@pytest.mark.parametrize("on_fault", ["warn", "raise"])
def test_a_bad_save_of_lightning_is_in_the_log_or_ends_the_fit(
    on_fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            if on_fault == "raise" and self.trainer.global_step > 2:
                time.sleep(0.05)
            return self.layer(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    class Damage(pl.Callback):  # type: ignore[misc]
        def on_train_batch_start(self, *_: Any) -> None:
            for path in Path("runs/lightning").glob("*step=4.ckpt"):
                if path.stat().st_size > 4000:
                    cut(path)

    monkeypatch.chdir(tmp_path)
    data = torch.utils.data.DataLoader(torch.ones(2000, 8), batch_size=1)
    quiet = 'accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False'
    changes = [("max_steps=6", f"max_steps={6 if on_fault == 'warn' else 2000}, {quiet}")]
    changes += [("[saves, ", "[saves, Damage(), "), (QUICK, f"{QUICK}, on_fault={on_fault!r}")]
    changes += [] if on_fault == "warn" else [("every_n_train_steps=2", "every_n_train_steps=4")]
    code = code_of("Lightning", *changes)
    with caplog.at_level(logging.WARNING, "ckpttool"):
        if on_fault == "raise":
            with pytest.raises(Corrupt, match=r"step=4\.ckpt is bad"):
                run_code(code, model=Module(), data=data, Damage=Damage)
            return
        run_code(code, model=Module(), data=data, Damage=Damage)
    found = {re.sub(r".*(step=\d+).*", r"\1", n): e for n, e in events(tmp_path / "runs" / "lightning").items()}
    assert found == {"step=2": "verified", "step=4": "failed", "step=6": "verified"}
    assert [line[:9] for line in said(caplog)] == ["CKPT0433:"]


@pytest.mark.live
@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_bad_save_of_torchtitan_is_in_the_log(
    mode: str, saver: Saver, tmp_path: Path, one_rank: None, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("torchtitan", reason="torchtitan is installed by `make test`")
    from torchtitan.components.checkpointer.dcp import CheckpointManager

    class Plain:
        def __init__(self, get: Callable[[], dict[str, Any]]) -> None:
            self.state_dict = get

        def load_state_dict(self, _: Any) -> None: ...

    config = CheckpointManager.Config(enable=True, folder="checkpoint", interval=2, keep_latest_k=0, async_mode=mode, last_save_model_only=False)  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        manager = config.build(
            dataloader=Plain(dict), model_parts=[saver.model], lr_schedulers=Plain(dict), sd_adapter=None, base_folder=str(tmp_path),
            optimizers=Plain(lambda: saver.state()["optim"]), states={"train_state": Plain(lambda: {"step": saver.step})},
        )  # fmt: skip

    def train() -> None:
        for step in range(1, 7):
            saver.train(step)
            manager.save(step, last_step=step == 6)
            if step == 4:
                manager.maybe_wait_for_saving()
                cut(tmp_path / "checkpoint" / "step-4" / "__0_0.distcp")

    code = code_of("torchtitan", ("(trainer.checkpointer)", f"(trainer.checkpointer, Guard({QUICK}))"))
    trainer = SimpleNamespace(checkpointer=manager, train=train, close=lambda: manager.close())
    with caplog.at_level(logging.WARNING, "ckpttool"):
        run_code(code, trainer=trainer, Guard=Guard)
    assert events(tmp_path / "checkpoint") == {"step-2": "verified", "step-4": "failed", "step-6": "verified"}
    assert [line[:9] for line in said(caplog)] == ["CKPT0433:"]


@pytest.mark.parametrize("damaged", [False, True])
def test_a_loop_with_async_save_ends_with_the_fault(
    damaged: bool, saver: Saver, tmp_path: Path, one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def train(step: int) -> None:
        saver.train(step)
        path = tmp_path / "runs" / "own" / "step-2"
        if damaged and step == 3:
            while not (path / ".metadata").exists():
                time.sleep(0.01)
            cut(path / "__0_0.distcp")

    code = code_of("A loop of your own")
    if damaged:
        with pytest.raises(Corrupt, match=r"step-2 is bad: cut: __0_0\.distcp") as e:
            run_code(code, train=train, state=saver.state)
        assert e.value.code == "CKPT0433"
    else:
        run_code(code, train=train, state=saver.state)
    expected = {"step-2": "failed" if damaged else "verified", "step-4": "verified", "step-6": "verified"}
    assert events(tmp_path / "runs" / "own") == expected


# -------------------------------------------------------------------------------------------------- when what happens


def test_a_fault_is_told_once_in_the_training_thread(saver: Saver) -> None:
    paths = [saver.save(step) for step in (1, 2, 3)]
    cut(paths[1] / "__0_0.distcp")
    told: list[tuple[str, int]] = []
    with Guard(settle=0, on_fault=lambda e: told.append((e["name"], threading.get_ident()))) as guard:
        for path in (*paths, paths[0]):
            guard.check(path)
        assert guard.finish() == [] and told == [("step-2", threading.get_ident())]
        guard.poll()
        guard.check(saver.save(4))  # after it has finished, it goes on
    assert len(told) == 1 and events(saver.run)["step-4"] == "verified"
    assert (Path(f"{saver.run}.ckpttool-watch") / "latest.verified").resolve() == saver.run / "step-4"
    assert not list(Path(f"{saver.run}.ckpttool-watch").glob("*lock*"))


def test_no_call_waits_and_what_was_not_read_is_said(saver: Saver, caplog: pytest.LogCaptureFixture) -> None:
    path = saver.save(1)
    guard = Guard(settle=60, timeout=0.2)
    began = time.perf_counter()
    guard.check(path)
    guard.poll()
    assert time.perf_counter() - began < 0.2
    assert guard.finish() == [str(path)]
    assert f"CKPT0104: {path} is not proved: the job ended" in caplog.text
    assert guard.finish() == []


def test_a_save_that_is_deleted_or_still_written_is_no_fault(
    saver: Saver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept, gone, late = (saver.save(step) for step in (1, 2, 3))
    (late / ".metadata").rename(tmp_path / "metadata")
    journal = Path(f"{saver.run}.ckpttool-watch") / "journal.jsonl"
    with Guard(settle=0.1, strict=True, timeout=60) as guard:
        for path in (gone, late, kept):
            guard.check(path)
        shutil.rmtree(gone)
        while not (journal.exists() and "step-1" in events(saver.run)):
            time.sleep(0.05)
        assert "step-3" not in events(saver.run)
        (tmp_path / "metadata").rename(late / ".metadata")
        for step in (4, 5):  # as Lightning's AsyncCheckpointIO: it writes later, and one is deleted before it was seen
            guard.check(saver.run / f"step-{step}")
        saver.save(5)
    assert events(saver.run).keys() >= {"step-1", "step-3", "step-5"} and said(caplog) == []
    assert set(events(saver.run).values()) <= {"verified", "deleted"}


def test_what_cannot_be_proved_is_said_and_stops_a_strict_job(
    saver: Saver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saver.save(1)
    for name in ("step-2", "other"):
        (saver.run / name).mkdir()
        (saver.run / name / "notes.txt").write_text("no checkpoint")
    with Guard(settle=0.1, stall=0.1) as guard:
        for name in ("step-2", "step-7", "other"):
            guard.check(saver.run / name)
        guard.check("s3://bucket/run/step-1")
    lines = said(caplog)
    assert len(lines) == 4 and all(line.startswith("CKPT0104: ") for line in lines), lines
    assert "s3://bucket/run/step-1 is not proved: s3://bucket/run: watch reads a folder" in lines[0]
    assert (
        "step-7 is not proved: it was not written for 0.1 s" in caplog.text and "step-2 is not proved: " in caplog.text
    )
    assert f"other is not proved: it is none of the saves that `ckpttool ls {saver.run}` lists" in caplog.text
    guard = Guard(settle=0, strict=True)
    with open_journal(f"{saver.run}.ckpttool-watch", str(saver.run)):
        guard.check(saver.run / "step-1")
        with pytest.raises(CkpttoolError, match=r"not proved: .*process") as e:
            guard.finish()
    assert e.value.code == "CKPT0104"
    with pytest.raises(UsageError, match="on_fault='stop'"):
        Guard(on_fault="stop")  # type: ignore[arg-type]


def test_a_reader_that_is_killed_ends_no_training(
    tmp_path: Path, saver: Saver, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(FIXTURES / "fsdp2_w3" / "ckpt", tmp_path / "slow" / "step-3")
    before = children(os.getpid())
    with Guard(settle=0, max_rate=1000) as guard:
        guard.check(tmp_path / "slow" / "step-3")
        while not (tmp_path / "slow.ckpttool-watch" / "journal.jsonl").exists():
            time.sleep(0.02)
        (reader,) = set(children(os.getpid())) - set(before)
        os.kill(reader, signal.SIGKILL)
        while not said(caplog):
            time.sleep(0.02)
        guard.check(saver.save(1))
    (line,) = said(caplog)
    assert re.search(
        r"step-3 is not proved: WorkerDied: worker process \d+ was ended by SIGKILL \(out of memory\?\)", line
    )
    assert events(saver.run) == {"step-1": "verified"}


def test_other_ranks_do_nothing(saver: Saver, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saver.save(1)
    monkeypatch.setenv("RANK", "1")
    with Guard(settle=0) as guard:
        guard.check(path)
    assert not Path(f"{saver.run}.ckpttool-watch").exists()


JOB = """
import sys, time
from ckpttool.guard import Guard
assert not {"torch", "transformers", "lightning", "pytorch_lightning", "torchtitan", "numpy"} & sys.modules.keys()
Guard(settle=0, max_rate=1000).check(sys.argv[1])
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_job_that_is_killed_leaves_no_process(number: int, tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "fsdp2_w3" / "ckpt", tmp_path / "run" / "step-3")
    job = subprocess.Popen([sys.executable, "-c", JOB, tmp_path / "run" / "step-3"])
    journal = tmp_path / "run.ckpttool-watch" / "journal.jsonl"
    while not journal.exists():
        assert job.poll() is None
        time.sleep(0.02)
    (reader,) = children(job.pid)
    nice = int(Path(f"/proc/{reader}/stat").read_text().rpartition(")")[2].split()[16])
    job.send_signal(number)
    job.wait()
    end = time.monotonic() + 10
    while Path(f"/proc/{reader}").exists() and time.monotonic() < end:
        time.sleep(0.02)
    assert not Path(f"/proc/{reader}").exists() and nice == 19
