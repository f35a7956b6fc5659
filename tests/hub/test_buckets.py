"""Datasets and buckets of the Hub as sources, on the Hub of fake_hub.py; nothing is written to either."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import OWNER, STRANGER, Hub
from huggingface_hub import hf_file_system

from ckpttool.engine.conversion import convert
from ckpttool.engine.diff import diff
from ckpttool.engine.verification import verify
from ckpttool.errors import MissingPackage, NotRecognised, RemoteError, SourceChanged, Unsafe, UsageError
from ckpttool.hub.client import parse_target
from ckpttool.layouts import place
from ckpttool.storage import listings, retries
from ckpttool.storage.answer_limits import Limits
from ckpttool.storage.remote import RemoteSource

DCP = Path(__file__).parents[2] / "fixtures" / "fsdp2_w3" / "ckpt"
pytestmark = pytest.mark.skipif(
    not hasattr(hf_file_system, "HfFileSystemResolvedBucketPath"), reason="this huggingface_hub has no buckets"
)
BUCKET, DATASET = "hf://buckets/org/runs", "hf://datasets/org/runs"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    monkeypatch.setattr(retries, "POLICY", retries.RetryPolicy(first_wait_seconds=0.001))
    with Hub(page=2) as hub:  # more pages than one
        hub.environment(monkeypatch, tmp_path)
        files = {f"a/step 3/{p.name}": p.read_bytes() for p in DCP.iterdir()}
        hub.buckets["org/runs"] = {**files, "a/step 33/other": b"x", "a/step 3.txt": b"y", "z": b"z"}
        hub.commit("datasets/org/runs", dict(files))
        yield hub


@pytest.mark.parametrize("url", [BUCKET, DATASET])
def test_a_checkpoint_is_read(hub: Hub, tmp_path: Path, url: str) -> None:
    done = convert(f"{url}/a/step 3", tmp_path / "out", to="dcp", world_size=2)
    assert done.verified and diff(str(DCP), str(tmp_path / "out")).equal
    verify(f"{url}/a/step 3", read_data=True, against=str(DCP))


def test_what_a_bucket_lists(hub: Hub) -> None:
    """The folders beside one whose names begin like its own are not in it."""
    source = RemoteSource(BUCKET)
    assert source.list() == ["a", "z"] and source.list("a") == ["step 3", "step 3.txt", "step 33"]
    assert source.list("a/step 3") == sorted(p.name for p in DCP.iterdir())
    assert source.list("none") == [] and source.list("z") == []
    assert source.modified("z") == 1767225600.0 and source.size("a/step 3.txt") == 1
    assert source.exists("z") and not source.exists("a") and not source.exists("none") and source.has_versions()
    assert source.commit is None


@pytest.mark.parametrize("listed", [True, False])
def test_a_file_that_changes_is_an_error(hub: Hub, listed: bool) -> None:
    """The file has as many bytes as before, and huggingface_hub has seen it."""
    source = RemoteSource(BUCKET)
    if listed:
        source.list()
    assert source.read("z", 0, 1) == b"z"
    source.assert_unchanged()
    hub.buckets["org/runs"]["z"] = b"Z"
    with pytest.raises(SourceChanged, match="hf://buckets/org/runs/z changed"):
        source.assert_unchanged()
    del hub.buckets["org/runs"]["z"]
    with pytest.raises(SourceChanged, match="hf://buckets/org/runs/z changed"):
        source.assert_unchanged()


def test_a_dataset_is_read_at_one_commit(hub: Hub) -> None:
    source = RemoteSource(DATASET)
    assert source.list("a") == ["step 3"]
    hub.commit("datasets/org/runs", {"a/step 4/x": b"1"})
    assert source.commit and not source.exists("a/step 4/x")
    source.assert_unchanged()


@pytest.mark.parametrize(
    ("url", "token", "text"),
    [
        ("hf://buckets/org/none", OWNER, "the Hub has no such bucket, or the token may not see it"),
        (f"{BUCKET}/a/none", OWNER, "the Hub has the bucket, and no such file or folder in it"),
        (BUCKET, STRANGER, "the Hub has no such bucket, or the token may not see it"),
        ("hf://datasets/org/none", OWNER, "the Hub has no such repository, or the token"),
        (f"{DATASET}@dev", OWNER, "the Hub has the repository, and no such revision"),
    ],
)
def test_what_is_missing(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, url: str, token: str, text: str
) -> None:
    hub.environment(monkeypatch, tmp_path, token)
    with pytest.raises(NotRecognised, match=text) as e:
        place(url)
    assert token not in str(e.value)


def test_listings_have_an_end(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listings, "LIMITS", Limits(names=5))
    hub.buckets["org/runs"] = {f"f{k}": b"" for k in range(9)}
    with pytest.raises(RemoteError, match="more than 5 names"):
        RemoteSource(BUCKET).list()
    monkeypatch.undo()


def test_a_name_that_leads_elsewhere(hub: Hub) -> None:
    hub.buckets["org/runs"] = {"../x": b"", "a": b""}
    with pytest.raises(Unsafe):
        RemoteSource(BUCKET).list()


@pytest.mark.parametrize(("url", "text"), [(BUCKET, "hf buckets sync"), (DATASET, "ckpttool push")])
def test_nothing_is_written(hub: Hub, url: str, text: str) -> None:
    with pytest.raises(UsageError, match="does not write to them") as e:
        convert(str(DCP), f"{url}/new", to="dcp", world_size=2)
    assert text in str(e.value) and not any(method in ("PUT", "POST") for method, *_ in hub.seen)
    with pytest.raises(UsageError, match=r"push and pull take model repositories.*`ckpttool convert` reads it"):
        parse_target(url)


def test_an_old_huggingface_hub_is_named(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("huggingface_hub.hf_file_system.HfFileSystemResolvedBucketPath")
    with pytest.raises(MissingPackage, match="has no buckets in its file system: pip install -U huggingface_hub"):
        RemoteSource(BUCKET)
    assert RemoteSource(DATASET).list() == ["a"]


@pytest.mark.parametrize("kind", ["datasets", "buckets"])
def test_the_page_of_one_names_its_url(kind: str) -> None:
    with pytest.raises(NotRecognised, match=f"its files are at hf://{kind}/org/runs"):
        place(f"https://huggingface.co/{kind}/org/runs")
