"""Checkpoints in object stores: written as folders of objects, read with few requests, through connections that break."""

from __future__ import annotations

import errno
import io
import json
import signal
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from stores import Cutting, Flaky, Moto

from ckpttool import HfOptions
from ckpttool.engine.conversion import convert
from ckpttool.engine.copy import fill
from ckpttool.engine.diff import diff
from ckpttool.engine.opening import open as open_checkpoint
from ckpttool.engine.planning import plan
from ckpttool.engine.verification import verify
from ckpttool.errors import (
    CkpttoolError,
    Corrupt,
    DestinationExists,
    Differs,
    Interrupted,
    NoSpace,
    RemoteError,
    SourceChanged,
    UsageError,
)
from ckpttool.storage import listings, object_destinations, objects, retries, upload, upload_folder, urls
from ckpttool.storage.answer_limits import Limits
from ckpttool.storage.prefetch import FetchSizes
from ckpttool.storage.remote import RemoteSource
from ckpttool.storage.upload import UploadSizes

FIXTURES = Path(__file__).parents[2] / "fixtures"
DCP = str(FIXTURES / "fsdp2_w3" / "ckpt")
MIB = 1 << 20


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "POLICY", retries.RetryPolicy(first_wait_seconds=0.001))


def keys(s3: Moto, bucket: str) -> list[str]:
    return [o["Key"] for o in s3.client().list_objects_v2(Bucket=bucket[5:]).get("Contents", [])]


def unfinished(s3: Moto, bucket: str) -> list[Any]:
    return s3.client().list_multipart_uploads(Bucket=bucket[5:]).get("Uploads", [])


def done(proxy: Flaky) -> list[str]:
    """What was done to objects, in order: "+ name" of one that became visible, "- name" of one that was removed."""
    out = []
    for method, path, what in proxy.seen:
        name, _, query = path.partition("?")
        base = name.split("/", 3)[-1]
        if what is None and method == "DELETE" and "uploadId" not in query:
            out.append(f"- {base}")
        elif what is None and (
            (method == "PUT" and "partNumber" not in query) or (method == "POST" and "uploadId" in query)
        ):
            out.append(f"+ {base}")
    return out


@pytest.mark.parametrize(
    ("to", "ranks"), [("dcp", 3), ("zero3", 2), ("fsdp1", 3), ("universal", None), ("hf", None), ("full", None)]
)
def test_there_and_back(s3: Moto, bucket: str, tmp_path: Path, to: str, ranks: int | None) -> None:
    url = f"{bucket}/run 1/ü" + (".pt" if to == "full" else "")
    sent = convert(DCP, url, to=to, world_size=ranks)
    assert sent.verified and sent.destination == url
    assert not unfinished(s3, bucket) and not [k for k in keys(s3, bucket) if k.endswith(urls.UNFINISHED)]
    back = convert(url, tmp_path / "back", to="dcp", world_size=3)
    assert back.digest == sent.digest
    assert diff(DCP, str(tmp_path / "back"), only=["model"] if to == "hf" else None).equal
    if to == "dcp":
        assert verify(url, read_data=True, against=DCP).recorded == "equal"
        record = json.loads(s3.client().get_object(Bucket=bucket[5:], Key="run 1/ü/ckpttool.json")["Body"].read())
        assert record["world_size"] == 3 and record["digest"] == sent.digest


def test_the_marker_is_seen_last(s3: Moto, bucket: str, proxied: Flaky) -> None:
    url = f"{bucket}/a"
    convert(DCP, url, to="dcp", world_size=3, verify=False)
    seen = done(proxied)
    assert seen[0] == f"+ {urls.UNFINISHED}" and seen[-2:] == ["+ .metadata", f"- {urls.UNFINISHED}"]
    assert sorted(seen[1:-2]) == ["+ __0_0.distcp", "+ __1_0.distcp", "+ __2_0.distcp", "+ ckpttool.json"]


def test_what_is_replaced_loses_its_marker_first(s3: Moto, bucket: str, proxied: Flaky) -> None:
    url = f"{bucket}/a"
    convert(DCP, url, to="dcp", world_size=3, verify=False)
    with pytest.raises(DestinationExists, match="5 objects"):
        convert(DCP, url, to="dcp", world_size=2)
    proxied.seen.clear()
    convert(DCP, url, to="dcp", world_size=2, force=True)
    seen = done(proxied)
    assert seen[:3] == [f"+ {urls.UNFINISHED}", "- .metadata", "- __2_0.distcp"]
    assert seen[-2:] == ["+ .metadata", f"- {urls.UNFINISHED}"]
    assert keys(s3, bucket) == [f"a/{n}" for n in (".metadata", "__0_0.distcp", "__1_0.distcp", "ckpttool.json")]
    assert verify(url, against=DCP).against["verdict"] == "equal"


def test_a_bucket_that_keeps_versions_keeps_what_was_replaced(s3: Moto, bucket: str) -> None:
    client, name = s3.client(), bucket[5:]
    client.put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": "Enabled"})
    convert(DCP, f"{bucket}/a", to="dcp", world_size=2, verify=False)
    before = {k: client.get_object(Bucket=name, Key=k)["Body"].read() for k in keys(s3, bucket)}
    convert(DCP, f"{bucket}/a", to="dcp", world_size=1, force=True)
    assert verify(f"{bucket}/a", against=DCP).against["verdict"] == "equal"
    kept: dict[str, list[bytes]] = {}
    for v in client.list_object_versions(Bucket=name)["Versions"]:
        body = client.get_object(Bucket=name, Key=v["Key"], VersionId=v["VersionId"])["Body"].read()
        kept.setdefault(v["Key"], []).append(body)
    assert all(data in kept[key] for key, data in before.items())


def test_force_does_not_replace_what_is_no_checkpoint(s3: Moto, bucket: str) -> None:
    s3.client().put_object(Bucket=bucket[5:], Key="home/thesis.tex", Body=b"x")
    with pytest.raises(DestinationExists, match="not a checkpoint"):
        convert(DCP, f"{bucket}/home", to="dcp", force=True)
    assert keys(s3, bucket) == ["home/thesis.tex"]


@pytest.mark.parametrize("which", ["__1_0.distcp", ".metadata"])
def test_a_store_that_fails_while_objects_become_visible(s3: Moto, bucket: str, proxied: Flaky, which: str) -> None:
    """What is there by then is taken for no checkpoint by anybody, and the same command again replaces it."""
    url = f"{bucket}/a"
    proxied.rule = lambda method, path: 500 if method == "PUT" and path.endswith(which) else None
    with pytest.raises(RemoteError, match="no answer in 5 tries"):
        convert(DCP, url, to="dcp", world_size=3)
    assert f"a/{urls.UNFINISHED}" in keys(s3, bucket) and "a/.metadata" not in keys(s3, bucket)
    with pytest.raises(Corrupt, match="interrupted while its files became visible"):
        open_checkpoint(url)
    proxied.rule = lambda method, path: None
    convert(DCP, url, to="dcp", world_size=2)
    assert keys(s3, bucket) == [f"a/{n}" for n in (".metadata", "__0_0.distcp", "__1_0.distcp", "ckpttool.json")]
    assert verify(url, against=DCP).against["verdict"] == "equal"


def test_a_note_is_no_leave_to_remove_other_things(s3: Moto, bucket: str) -> None:
    put = s3.client().put_object
    put(Bucket=bucket[5:], Key="a/thesis.tex", Body=b"x")
    for note in (b'{"names": ["other"]}', b"[]", b"{", b""):
        put(Bucket=bucket[5:], Key=f"a/{urls.UNFINISHED}", Body=note)
        with pytest.raises(DestinationExists):
            convert(DCP, f"{bucket}/a", to="dcp")
    assert "a/thesis.tex" in keys(s3, bucket)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Corrupt("x"), RuntimeError("x")])
def test_a_run_that_ends_early_leaves_nothing(
    s3: Moto, bucket: str, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    monkeypatch.setattr(upload, "SIZES", UploadSizes(part_bytes=32 << 10, smallest_part_bytes=32 << 10))
    sent = 0

    def stop(what: str, done: int, total: int) -> None:
        nonlocal sent
        sent = len(unfinished(s3, bucket))
        if sent:
            raise error

    with pytest.raises(Interrupted if isinstance(error, KeyboardInterrupt) else type(error)):
        convert(DCP, f"{bucket}/a", to="dcp", world_size=3, progress=stop)
    assert sent and keys(s3, bucket) == [] and not unfinished(s3, bucket)


def test_parts_of_a_killed_run_are_removed(s3: Moto, bucket: str) -> None:
    """And not those of other runs, which may be alive, at other places."""
    client = s3.client()
    for key in ("a/__0_0.distcp", "a/__9_0.distcp", "a/step10/.metadata", "ab/x"):
        client.create_multipart_upload(Bucket=bucket[5:], Key=key)
    convert(DCP, f"{bucket}/a", to="dcp", world_size=1)
    assert [u["Key"] for u in unfinished(s3, bucket)] == ["a/step10/.metadata", "ab/x"]
    client.create_multipart_upload(Bucket=bucket[5:], Key="z/global_step3/zero_pp_rank_0_mp_rank_00_model_states.pt")
    convert(DCP, f"{bucket}/z", to="zero3", world_size=1)
    assert len(unfinished(s3, bucket)) == 2


def test_a_folder_that_a_console_made_is_empty(s3: Moto, bucket: str) -> None:
    s3.client().put_object(Bucket=bucket[5:], Key="a/", Body=b"")
    convert(DCP, f"{bucket}/a", to="dcp", world_size=1)
    assert verify(f"{bucket}/a", against=DCP).against["verdict"] == "equal"


def test_an_interruption_says_what_is_there(s3: Moto, bucket: str, proxied: Flaky) -> None:
    url = f"{bucket}/a"
    convert(DCP, url, to="dcp", world_size=1, verify=False)

    def stop(what: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(Interrupted, match=r"s3://.*/a is untouched\. Run the same command again"):
        convert(DCP, url, to="dcp", force=True, progress=stop)
    assert verify(url, against=DCP).against["verdict"] == "equal"

    once, begun = threading.Lock(), threading.Event()

    def interrupt(*_: object) -> None:
        begun.set()
        raise KeyboardInterrupt

    def rule(method: str, path: str) -> None:
        """Interrupt the main thread once, and answer when it was: later, the conversion could have ended, and pytest would."""
        if method == "PUT" and path.endswith("distcp") and once.acquire(blocking=False):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            assert begun.wait(10)

    usual = signal.signal(signal.SIGINT, interrupt)
    proxied.rule = rule
    try:
        with pytest.raises(Interrupted, match="what they replace is gone"):
            convert(DCP, url, to="dcp", force=True)
    finally:
        signal.signal(signal.SIGINT, usual)
    assert begun.is_set()


def test_no_room_for_parts_that_wait(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.BytesIO):
        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(upload, "SIZES", UploadSizes(buffered_bytes=1))
    monkeypatch.setattr(tempfile, "TemporaryFile", Full)
    with pytest.raises(NoSpace, match=f"{tempfile.gettempdir()}: No space left on device.*TMPDIR"):
        convert(DCP, f"{bucket}/a", to="dcp", world_size=3)


@pytest.mark.parametrize("on_disk", [False, True])
def test_many_files_at_once_take_no_more_memory(
    s3: Moto, bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, on_disk: bool
) -> None:
    """Parts get smaller; where even the smallest are too many, they wait on the disk."""
    assert upload.SIZES.smallest_part_bytes == 5 * MIB  # as S3 wants them
    buffered = (64 << 10) if on_disk else (256 << 10)
    sizes = UploadSizes(smallest_part_bytes=16 << 10, part_bytes=64 << 10, buffered_bytes=buffered)
    monkeypatch.setattr(upload, "SIZES", sizes)
    made: list[Any] = []
    begin = upload_folder.UploadFolder.__init__

    def spy(self: Any, *a: Any, **k: Any) -> None:
        begin(self, *a, **k)
        made.append(self)

    monkeypatch.setattr(upload_folder.UploadFolder, "__init__", spy)
    convert(DCP, f"{bucket}/a", to="dcp", world_size=8)
    assert (made[0].part_bytes, made[0].on_disk) == ((16 << 10, True) if on_disk else (32 << 10, False))


def test_how_many_files_are_open_at_once() -> None:
    for to, ranks, shard, many in (("dcp", 3, 10**9, 3), ("dcp", 7, 10**9, 7), ("hf", None, 20_000, 1)):
        planned = plan(
            DCP, "x", to=to, world_size=ranks, options=HfOptions(max_shard_bytes=shard) if to == "hf" else None
        )
        opened, draft = planned.opened, planned.draft
        opened.source.close()
        assert object_destinations._compute_max_open_files(draft) == many
        assert to == "dcp" or len(draft.files) > 5


def test_shards_are_ended_one_by_one(s3: Moto, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else sixty-four of them would wait in memory."""
    most = 0
    real = fill._Filling.open_out

    def out(self: Any, file: int) -> Any:
        nonlocal most
        found = real(self, file)
        most = max(most, len(self.outs))
        return found

    monkeypatch.setattr(fill._Filling, "open_out", out)
    convert(DCP, f"{bucket}/a", to="hf", options=HfOptions(max_shard_bytes=20_000), verify=False)
    assert len(keys(s3, bucket)) > 5 and most <= 2


@pytest.mark.parametrize(
    ("dst", "why"),
    [("hf://org/name", "ckpttool push"), ("https://h.example/x", "reading only"), ("http://h/x", "reading")],
)
def test_places_that_are_not_written_to_so(dst: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        convert(DCP, dst, to="dcp")


def test_the_source_is_never_the_destination(bucket: str) -> None:
    convert(DCP, f"{bucket}/a/b", to="dcp", verify=False)
    for dst, why in {"a/b": "is the", "a/b/": "is the", "a/b/c": "is inside the", "a": "contains the"}.items():
        with pytest.raises(UsageError, match=f"{dst} {why} source"):
            convert(f"{bucket}/a/b", f"{bucket}/{dst}", to="dcp", force=True)


def test_an_index_that_is_read_in_a_child(s3: Moto, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of megabytes is; the child has no credentials and asks no store."""
    from ckpttool.converters.dcp import dcp_metadata as _dcp_metadata

    convert(DCP, f"{bucket}/a", to="dcp", world_size=3, verify=False)
    monkeypatch.setattr(_dcp_metadata, "_LARGE_BYTES", 0)
    assert diff(DCP, f"{bucket}/a").equal


# -------------------------------------------------------------------------------------------------------- few requests


def test_few_requests(s3: Moto, bucket: str, proxied: Flaky) -> None:
    """A listing tells all sizes, and announced ranges come together: requests do not grow with files and tensors."""
    for to, ranks, read, convert_ in (
        ("dcp", 4, 12, 30),
        ("zero3", 4, 16, 30),
        ("fsdp1", 4, 24, 40),
        ("full", None, 5, 10),  # one of them lists what lies beside the file
    ):
        url = f"{bucket}/{to}" + (".pt" if to == "full" else "")
        convert(DCP, url, to=to, world_size=ranks, verify=False)
        proxied.seen.clear()
        with open_checkpoint(url) as opened:
            assert len(proxied.seen) <= read, [s[:2] for s in proxied.seen]
            opened.locate()
            opened.source.assert_unchanged()
        assert len(proxied.seen) <= convert_, [s[:2] for s in proxied.seen]


def test_announced_ranges(s3: Moto, bucket: str, proxied: Flaky) -> None:
    data = bytes(range(256)) * 4096
    for name in ("a", "b"):
        s3.client().put_object(Bucket=bucket[5:], Key=name, Body=data)
    source = RemoteSource(bucket)
    source.list()

    def asked() -> list[str]:
        return sorted(
            h["range"]
            for h, s in zip(proxied.headers, proxied.seen, strict=True)
            if "range" in h and "gone" not in s[1]
        )

    ranges = [("a", k * 1000, 100) for k in range(60)] + [("b", 500_000, 100), ("b", 900_000, 100), ("gone", 0, 5)]
    source.prefetch(iter(ranges))
    assert asked() == []  # nothing is fetched before something is wanted
    for name, offset, n in ranges[:-1]:
        assert source.read(name, offset + 7, n - 7) == data[offset + 7 : offset + n]
    assert asked() == ["bytes=0-59099", "bytes=500000-500099", "bytes=900000-900099"]
    assert source.read("a", 90_000, 10) == data[90_000:90_010]  # not announced
    with pytest.raises(Corrupt, match="missing"):
        source.read("gone", 0, 5)
    proxied.headers.clear(), proxied.seen.clear()
    source.prefetch(("a", k * 10_000, 10) for k in (30, 50, 70))
    assert source.read("a", 700_000, 10) == data[700_000:700_010]  # what comes before it is not wanted any more
    assert asked() == ["bytes=700000-700009"]


def test_what_is_kept_of_announced_ranges_is_bounded(bucket: str, s3: Moto, monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytes(range(256)) * 1024
    s3.client().put_object(Bucket=bucket[5:], Key="a", Body=data)
    monkeypatch.setattr(RemoteSource, "sizes", FetchSizes(kept_bytes=4096, gap_bytes=0))
    source = RemoteSource(bucket)
    source.prefetch(("a", k * 600, 500) for k in range(100))
    for k in range(100):
        assert source.read("a", k * 600, 500) == data[k * 600 : k * 600 + 500]
        assert source._ahead._bytes <= 4096 and source._ahead._bytes == sum(map(len, source._ahead._kept.values()))


def test_an_object_that_is_replaced_meanwhile(s3: Moto, bucket: str) -> None:
    for many in (2, 5):  # asked one by one, and by a listing
        for k in range(many):
            s3.client().put_object(Bucket=bucket[5:], Key=f"{many}/{k}", Body=b"0123")
        source = RemoteSource(f"{bucket}/{many}")
        source.list()
        for k in range(many):
            source.size(str(k))
        source.assert_unchanged()
        s3.client().put_object(Bucket=bucket[5:], Key=f"{many}/1", Body=b"4567")
        with pytest.raises(SourceChanged, match=f"{many}/1"):
            source.assert_unchanged()
        s3.client().delete_object(Bucket=bucket[5:], Key=f"{many}/1")
        with pytest.raises(SourceChanged, match=f"{many}/1"):
            source.assert_unchanged()


def test_a_connection_cut_every_so_often(
    s3: Moto, bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """There and back, with connections that break every 200 kB in either direction: equal digests."""
    monkeypatch.setattr(RemoteSource, "sizes", FetchSizes(request_bytes=64 << 10))
    monkeypatch.setattr(upload, "SIZES", UploadSizes(part_bytes=64 << 10, smallest_part_bytes=64 << 10))
    monkeypatch.setattr(retries, "POLICY", retries.RetryPolicy(tries=8, first_wait_seconds=0.001))
    with Cutting(s3.endpoint, 250_000) as proxy:
        s3.environment(monkeypatch, proxy.endpoint)
        sent = convert(DCP, f"{bucket}/a", to="dcp", world_size=2)
        back = convert(f"{bucket}/a", tmp_path / "back", to="dcp", world_size=3)
        assert proxy.cuts >= 5
    assert sent.digest == back.digest
    assert diff(DCP, str(tmp_path / "back")).equal


@pytest.mark.parametrize(
    ("change", "kind", "words", "note"),
    [
        (lambda data: bytes([*data[:-1], data[-1] ^ 1]), Differs, "The store returns other bytes than were sent; ask its operators.", None),
        (lambda data: data[:-1], Corrupt, "", "is in place, but cannot be read back. Remove it."),
    ],
)  # fmt: skip
def test_a_store_that_returns_other_bytes_than_were_sent(
    s3: Moto, bucket: str, monkeypatch: pytest.MonkeyPatch, change: Any, kind: type[CkpttoolError], words: str, note: str | None
) -> None:  # fmt: skip
    """Nobody is told that it was not read back, or that it is ckpttool's fault."""
    url, client, real = f"{bucket}/a", s3.client(), upload_folder.UploadFolder.commit

    def commit(self: Any) -> None:
        real(self)
        at = {"Bucket": bucket[5:], "Key": "a/model.safetensors"}
        client.put_object(**at, Body=change(client.get_object(**at)["Body"].read()))

    monkeypatch.setattr(upload_folder.UploadFolder, "commit", commit)
    with pytest.raises(kind) as e:
        convert(DCP, url, to="hf")
    notes = [n for n in getattr(e.value, "__notes__", []) if n.startswith(url)]
    assert str(e.value).endswith(words) and "report" not in str(e.value)
    assert notes == ([] if note is None else [f"{url} {note}"])


def test_a_destination_with_names_without_end(s3: Moto, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listings, "LIMITS", Limits(names=100))

    def page(n: int) -> bytes:
        rows = "".join(f"<Contents><Key>a/{n}-{k}</Key><Size>1</Size></Contents>" for k in range(40))
        more = f"<NextContinuationToken>{n}</NextContinuationToken>" if n < 20 else ""
        return f"<ListBucketResult><IsTruncated>{str(n < 20).lower()}</IsTruncated>{more}{rows}</ListBucketResult>".encode()

    rule = lambda m, p: (200, page(len(proxy.seen))) if "list-type" in p else None  # noqa: E731
    with Flaky(s3.endpoint, rule) as proxy:
        s3.environment(monkeypatch, proxy.endpoint)
        with pytest.raises(RemoteError, match=r"has more than 100 objects.*Choose another prefix") as e:
            upload_folder.UploadFolder(f"{bucket}/a", ["x"], force=True, open_at_once=1, largest=1)
        assert e.value.code == "CKPT0906" and len(proxy.seen) == 3


# ------------------------------------------------------------------------------------------------------ two runs at once


def during(monkeypatch: pytest.MonkeyPatch, method: str, call: Any) -> None:
    """Do something before the first time that a method of UploadFolder runs."""
    real = getattr(upload_folder.UploadFolder, method)

    def first_call(self: Any, *a: Any) -> Any:
        monkeypatch.setattr(upload_folder.UploadFolder, method, real)
        call()
        return real(self, *a)

    monkeypatch.setattr(upload_folder.UploadFolder, method, first_call)


OTHER = str(FIXTURES / "fsdp2_w2_groups" / "ckpt")


def test_what_another_run_finished_meanwhile_is_not_touched(
    s3: Moto, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{bucket}/a"
    during(monkeypatch, "commit", lambda: convert(OTHER, url, to="dcp", world_size=3, verify=False))
    with pytest.raises(DestinationExists, match="appeared there during the upload; nothing was replaced"):
        convert(DCP, url, to="dcp", world_size=3)
    assert verify(url, against=OTHER).against["verdict"] == "equal"
    assert not [k for k in keys(s3, bucket) if k.endswith(urls.UNFINISHED)] and not unfinished(s3, bucket)


def test_a_run_that_finds_the_note_of_another_stops(s3: Moto, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url, put = f"{bucket}/a", s3.client().put_object
    during(monkeypatch, "commit", lambda: put(Bucket=bucket[5:], Key=f"a/{urls.UNFINISHED}", Body=b'{"names": ["x"]}'))
    with pytest.raises(DestinationExists, match="another run"):
        convert(DCP, url, to="dcp", world_size=3)
    assert keys(s3, bucket) == [f"a/{urls.UNFINISHED}"] and not unfinished(s3, bucket)


def test_a_run_whose_note_was_taken_over_puts_no_marker(s3: Moto, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its marker would stand over the other's files."""
    url, real = f"{bucket}/a", objects.get_with_token

    def replaced(at: str) -> Any:
        s3.client().put_object(Bucket=bucket[5:], Key=f"a/{urls.UNFINISHED}", Body=b'{"names": ["x"]}')
        return real(at)

    monkeypatch.setattr(upload_folder, "get_with_token", replaced)
    with pytest.raises(DestinationExists, match="another run"):
        convert(DCP, url, to="dcp", world_size=3)
    assert "a/.metadata" not in keys(s3, bucket)
    with pytest.raises(Corrupt, match="interrupted"):
        open_checkpoint(url)
