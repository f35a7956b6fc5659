"""What all tests share: hypothesis without clocks or dice, what runs where, and a file that only executed code would make."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import answers
import pytest
import sampling
import stores
from hypothesis import HealthCheck, settings

from ckpttool.huggingface import hub_names, model_names

# A job in the background of a shell has SIGINT ignored, and hands that on to every child that a test interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup has it ignored, in the same way

if not hasattr(tarfile, "data_filter"):  # Python before 3.11.4; the archives that tests unpack are their own
    _extractall = tarfile.TarFile.extractall
    tarfile.TarFile.extractall = lambda self, *a, filter=None, **more: _extractall(self, *a, **more)

# Tests start some 3,000 processes of ckpttool. Where this is set, each one would compile the whole package again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# The same examples in every run; `pytest --hypothesis-profile=long` throws dice, and more of them.
settings.register_profile(
    "default",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large],
)
settings.register_profile("long", settings.get_profile("default"), derandomize=False, max_examples=5000)
settings.load_profile("default")


@cache
def launches_ranks(file: Path) -> bool:
    """Tell whether a file of tests launches ranks. Those files are run first, since they take longest, and by one worker: so
    no other one waits for its turn (ranks.one_at_a_time), and there is one nursery for each rank."""
    return re.search(r"^from (ranks|judged) import", file.read_text(encoding="utf-8"), re.MULTILINE) is not None


#: Where temporary files are in memory: half a gigabyte, and a tenth of the time of a run is saved.
MEMORY = Path("/dev/shm")


def pytest_configure(config: pytest.Config) -> None:
    """Keep temporary files in memory where there is plenty; a run of every row has them on the disk."""
    available = 0
    with contextlib.suppress(OSError, ValueError):
        (kibibytes,) = re.findall(r"MemAvailable: +(\d+)", Path("/proc/meminfo").read_text())
        available = min(int(kibibytes) << 10, shutil.disk_usage(MEMORY).free)
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        available = min(available, int(limit) if limit.isdigit() else available)
    usable = os.access(MEMORY, os.W_OK) and not os.statvfs(MEMORY).f_flag & os.ST_NOEXEC
    if available > 8 << 30 and usable and not sampling.EVERY:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """pytest's; on the disk for tests of how files are read and written, since memory has no page cache and no O_DIRECT."""
    here = request.path
    if not tmp_path.is_relative_to(MEMORY) or not (here.parent.name == "storage" or here.name == "test_stream.py"):
        yield tmp_path
        return
    folder = Path(tempfile.mkdtemp(prefix=f"{here.stem}-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file of tests is run by one worker, which makes what its tests share once.

    `--dist loadgroup` does not do it: pytest-xdist 3.8 marks groups by a private attribute that pytest 9.2 has not.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            if launches_ranks(config.rootpath / file):
                return "live"
            folder = Path(file).parent.name
            return folder if folder in ("gpu", "packaging") else file

        def remove_node(self, node: Any) -> str | None:
            """Give what a worker that died has not run to the others, except the test that killed it.

            pytest-xdist gives them that test again, and files that are done: a worker waits for ever after such a file.
            """
            files = self.assigned_work.pop(node)
            test = next((test for tests in files.values() for test, done in tests.items() if not done), None)
            for tests in files.values():
                if test in tests:
                    tests[test] = True
            self.workqueue.update({file: tests for file, tests in files.items() if not all(tests.values())})
            for other in self.assigned_work if test is not None else ():
                self._reschedule(other)
            return test

    config.option.loadscopereorder = False  # as pytest collects them: launching ones first
    return ByFile(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put what launches ranks first, and take away the rows that this run leaves out, unless tests are asked for by name."""
    chosen = config.getoption("keyword") or config.getoption("lf", False) or any("::" in word for word in config.args)
    if not chosen:
        left = sampling.leave_out(item.nodeid for item in items)
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left])
        items[:] = [item for item in items if item.nodeid not in left]
    items.sort(key=lambda item: not launches_ranks(item.path))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Freeze the objects that live as long as this worker: 10,000 tests, and the libraries that they import. Each full garbage
    collection would scan them again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Iterator[None]:
    """Show what a child process that failed wrote to stderr; CalledProcessError says only its arguments and status."""
    report: Any = yield
    failed = call.excinfo.value if call.excinfo else None
    if isinstance(failed, subprocess.CalledProcessError) and failed.stderr:
        said = failed.stderr if isinstance(failed.stderr, str) else failed.stderr.decode(errors="replace")
        report.sections.append(("stderr of the child process", said[-10_000:]))
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker hands to the process that writes the summary what its samples leave out."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = sampling.LEFT_OUT


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over what a worker left out; all workers collect the same tests."""
    sampling.LEFT_OUT.update(getattr(node, "workeroutput", {}).get("left_out", {}))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how many rows were not tested; of each table with -v."""
    some = {table: counts for table, counts in sorted(sampling.LEFT_OUT.items()) if counts[0]}
    if terminalreporter.verbosity > 0:
        for table, (left, rows) in some.items():
            terminalreporter.write_line(f"left out: {left} of {rows} {table}")
    if some:
        left, rows = map(sum, zip(*some.values(), strict=True))
        terminalreporter.write_line(
            f"{left:,} of {rows:,} rows of long tables were left out; `make test-all` runs them"
        )


@pytest.fixture(scope="session", autouse=True)
def _answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """All workers and ranks of a run share what transformers answers to one question."""
    root = tmp_path_factory.getbasetemp()
    folder = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "answers"
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ANSWERS", str(folder))
        for module in (hub_names, model_names):
            patch.setattr(module, "run_in_child", answers.asked_once)
        yield


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    """A file that no run may create: malicious content tries to."""
    return tmp_path / "canary"


@pytest.fixture
def s3() -> stores.Moto:
    """The S3 server of this test process."""
    return stores.moto()


@pytest.fixture
def bucket(s3: stores.Moto, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a new bucket of it."""
    return s3.bucket(monkeypatch)


@pytest.fixture
def proxied(s3: stores.Moto, bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[stores.Flaky]:
    """The same server behind a proxy that does harm when it is told to."""
    with stores.Flaky(s3.endpoint, lambda *_: None) as proxy:
        s3.environment(monkeypatch, proxy.endpoint)
        yield proxy
