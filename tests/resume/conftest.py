"""What several files of this folder share: the job of tests/live/zoo.py, trained once."""

from __future__ import annotations

import pytest
from judged import Zoo, zoo_in


@pytest.fixture(scope="session")
def zoo_original(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    """Its checkpoints and recordings."""
    return zoo_in(tmp_path_factory.mktemp("zoo"))
