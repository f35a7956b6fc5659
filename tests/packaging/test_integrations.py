"""What brings ckpttool into people's tests and pipelines: the plugin of pytest and the action of GitHub, run as these run them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from commands import ckpttool_here
from peers import FIXTURES

import ckpttool
from ckpttool.testing import assert_same_training_state

ROOT = Path(__file__).parents[2]
DCP = FIXTURES / "fsdp2_w3" / "ckpt"
TEST = """
import ckpttool

def test_the_same(assert_same_training_state):
    assert_same_training_state({a!r}, {b!r})

def test_another(assert_same_training_state):
    assert_same_training_state({a!r}, {c!r})
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """same/ at another world size, and other.pt, in which the learning rate is another."""
    out = tmp_path_factory.mktemp("made")
    ckpttool.convert(DCP, out / "same", to="dcp", world_size=2)
    done = ckpttool_here("convert", DCP, out / "other.pt", "--set", "optim.param_groups.0.lr=0.5")
    assert done.returncode == 0, done.stderr
    return out


def test_pytest_shows_in_what_two_states_differ(made: Path) -> None:
    (made / "test_states.py").write_text(TEST.format(a=str(DCP), b=str(made / "same"), c=str(made / "other.pt")))
    plugin = () if b"ckpttool.pytest_plugin" in _plugins() else ("-p", "ckpttool.pytest_plugin")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *plugin, "test_states.py"]
    done = subprocess.run(command, cwd=made, capture_output=True, text=True)
    assert "1 failed, 1 passed" in done.stdout, done.stdout
    assert "value: optim.param_groups.0.lr:" in done.stdout and "def diff(" not in done.stdout


def _plugins() -> bytes:
    """The plugins that pytest loads by itself."""
    code = "from importlib.metadata import entry_points; print([e.value for e in entry_points(group='pytest11')])"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout


def test_state_that_was_not_read_is_no_success(tmp_path: Path) -> None:
    shutil.copytree(DCP, tmp_path / "a")
    (tmp_path / "a" / "scheduler.pt").write_bytes(b"state of some kind")
    with pytest.raises(AssertionError, match=r"not compared, in A: scheduler\.pt"):
        assert_same_training_state(tmp_path / "a", DCP)
    assert_same_training_state(DCP, DCP, only=["model"])


@pytest.mark.parametrize(
    ("converted", "only", "status"), [("same", "", 0), ("other.pt", "", 5), ("other.pt", "model", 0)]
)
def test_the_action_of_github_fails_where_a_state_is_another(
    converted: str, only: str, status: int, made: Path
) -> None:
    action = yaml.safe_load((ROOT / ".github" / "actions" / "gate" / "action.yml").read_text())
    step = action["runs"]["steps"][1]
    summary = made / f"{converted}{only}.md"
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "GITHUB_STEP_SUMMARY": str(summary),
    }
    environment |= {"ORIGINAL": str(DCP), "CONVERTED": str(made / converted), "ONLY": only}
    bash = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]  # as its runner does
    assert subprocess.run(bash, env=environment, capture_output=True).returncode == status
    assert ("equal:" in summary.read_text()) == (status == 0)
