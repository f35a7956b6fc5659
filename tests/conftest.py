"""What all tests share: hypothesis without clocks or dice, and a file that only executed code would make."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A job in the background of a shell has SIGINT ignored, and hands that on to every child that a test interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

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


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    """A file that no run may create: malicious content tries to."""
    return tmp_path / "canary"
