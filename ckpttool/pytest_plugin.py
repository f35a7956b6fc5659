"""What pytest gets from ckpttool where it is installed: the fixture `assert_same_training_state`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

__all__ = ["assert_same_training_state"]


@pytest.fixture
def assert_same_training_state() -> Callable[..., None]:
    """Return `ckpttool.testing.assert_same_training_state`."""
    from .testing import assert_same_training_state as compare

    return compare
