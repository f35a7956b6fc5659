"""A sample of the lies of lying_servers.py: a right result or an error, soon, and with little memory. `make torture` tells them all."""

from __future__ import annotations

from pathlib import Path

import pytest
from lying_servers import LIES, Liar, child, idle, judged, ran

from ckpttool.errors import Unsafe
from ckpttool.storage.answer_limits import check_redirect

SAMPLE = [
    ("web", "gzip_bomb"), ("web", "slow_body"), ("web", "endless_listing"), ("s3", "endless_range"), ("s3", "same_token"), ("s3", "name_climbs"),
    ("s3", "redirects_elsewhere"), ("hub", "endless_whole"), ("hub", "continues_for_ever"), ("hub", "links_for_ever"), ("hub", "name_climbs"),
    ("hub", "come_back_next_year"), ("s3", "huge_tokens"), ("s3", "deep_xml"),
]  # fmt: skip


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lies")


@pytest.mark.parametrize(("kind", "name"), SAMPLE)
def test_a_lie_is_an_error_or_makes_no_difference(kind: str, name: str, work: Path) -> None:
    pytest.importorskip({"web": "aiohttp", "s3": "s3fs", "hub": "huggingface_hub"}[kind])
    with Liar(kind, name) as liar:
        done = ran(liar, work)
        assert liar.told and judged(liar, done, idle(kind, work).most_bytes) == [], done.text


@pytest.mark.parametrize("kind", ["web", "s3", "hub"])
def test_an_error_comes_in_time_with_the_usual_limits(kind: str, work: Path) -> None:
    """A server that stalls once is asked again, so the longest wait is that of two periods."""
    from ckpttool.storage.answer_limits import LIMITS

    assert LIMITS.stalls * LIMITS.stall_seconds <= 30 and LIMITS.question_seconds <= 60
    with Liar(kind, "silence") as liar:
        done = ran(liar, work, {"stall_seconds": 1.0})
        assert done.code == 9 and "makes no progress: in 1 seconds" in done.text
        assert liar.told == LIMITS.stalls


def test_a_name_of_a_listing_that_is_not_used_is_refused_too(work: Path) -> None:
    with Liar("s3", "name_twice") as liar:
        done = child(["inspect", "s3://b/d"], liar.environment(work), work / "out")
    assert done.code == 9 and "lists 'model.safetensors' twice" in done.text


def test_there_are_more_than_forty() -> None:
    assert all(len(LIES[kind]) >= 50 for kind in ("web", "s3", "gcs", "hub"))


@pytest.mark.parametrize(
    ("method", "at", "location", "result"),
    [
        ("GET", "https://h/a", "/b", True), ("GET", "https://h/a", "https://h:443/b", False), ("GET", "https://h/a", "https://other/b", False),
        ("GET", "http://h/a", "https://h/a", False), ("PUT", "https://h/a", "https://h/b", True), ("GET", "https://h/a", "http://h/a", None),
        ("GET", "https://h/a", "ftp://h/a", None), ("GET", "http://h/a", "file:///etc/passwd", None), ("PUT", "https://h/a", "https://other/b", None),
        ("GET", "https://h/a", "http://[", None),
    ],
)  # fmt: skip
def test_where_a_redirect_may_lead(method: str, at: str, location: str, result: bool | None) -> None:
    if result is not None:
        assert check_redirect(method, at, location) is result
        return
    with pytest.raises(Unsafe):
        check_redirect(method, at, location)
