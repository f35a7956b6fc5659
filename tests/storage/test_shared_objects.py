"""Objects of S3 that several workers send at once: the bytes of one process, whatever is sent twice, lost, or late."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from peers import FIXTURES
from programs import SlowConversion, mpiexec, script
from stores import Flaky, Moto, What, moto

import ckpttool
from ckpttool.engine.planning import plan
from ckpttool.engine.workers import part_worker, parts
from ckpttool.errors import Corrupt, DestinationExists, Interrupted, RemoteError
from ckpttool.storage import retries, upload, upload_folder
from ckpttool.storage.objects import S3Object, s3_object
from ckpttool.storage.upload import UploadSizes

DCP, ZERO3, AWKWARD = (
    FIXTURES / "fsdp2_w3" / "ckpt",
    FIXTURES / "zero3_w4" / "ckpt",
    FIXTURES / "awkward_w3" / "ckpt",
)
KIB = 1 << 10
CELL = 16 * KIB
TARGETS: dict[str, dict[str, Any]] = {
    "dcp": {"world_size": 3}, "full": {}, "hf": {}, "zero3": {"world_size": 3}, "universal": {"only": ["model"]},
    "fsdp1": {"world_size": 3, "wrap": ["**.layers.*"]}, "accelerate": {"world_size": 2},
}  # fmt: skip


def set_cells(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    sizes = UploadSizes(part_bytes=nbytes, smallest_part_bytes=nbytes)
    monkeypatch.setattr(upload, "SIZES", sizes)
    monkeypatch.setattr("ckpttool.storage.shared_objects.SIZES", sizes)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Parts and cells of kilobytes, short waits, and no plan that outlives a test."""
    monkeypatch.setattr(retries, "POLICY", retries.RetryPolicy(first_wait_seconds=0.001))
    monkeypatch.setattr("ckpttool.storage.objects.POLICY", retries.POLICY)
    set_cells(monkeypatch, CELL)
    monkeypatch.setattr(parts, "_LEAST_BYTES", 8 * KIB)
    monkeypatch.setattr(parts, "_LEAST_BYTES_OF_A_FILE", KIB)
    yield
    part_worker.close_caches()


class Workers(Executor):
    """Does what is submitted at once; `harm(requests so far, request)` may raise before, and what it returns is the answer."""

    _max_workers = 2

    def __init__(self, harm: Callable[[int, dict[str, Any]], Any] = lambda i, request: None) -> None:
        self.harm, self.requests, self.answers = harm, list[dict[str, Any]](), list[dict[str, Any]]()

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        out: Future[Any] = Future()
        self.requests.append(json.loads(args[0]))
        try:
            answer = self.harm(len(self.requests) - 1, self.requests[-1]) or fn(*args)
            self.answers.append(json.loads(answer))
            out.set_result(answer)
        except Exception as e:
            out.set_exception(e)
        return out

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [r[kind] for r in self.requests if kind in r]


def objects(s3: Moto, bucket: str, prefix: str) -> dict[str, bytes]:
    """{name: bytes} below a prefix; ckpttool.json without the time at which it was written."""
    client, out = s3.client(), {}
    for o in client.list_objects_v2(Bucket=bucket[5:], Prefix=prefix).get("Contents", []):
        data = client.get_object(Bucket=bucket[5:], Key=o["Key"])["Body"].read()
        name = o["Key"].removeprefix(prefix)
        if name.endswith("ckpttool.json"):
            data = json.dumps({k: v for k, v in json.loads(data).items() if k != "created"}).encode()
        out[name] = data
    return out


def unfinished(s3: Moto, bucket: str) -> list[dict[str, str]]:
    return list(s3.client().list_multipart_uploads(Bucket=bucket[5:]).get("Uploads", []))


def listed(s3: Moto, bucket: str) -> int:
    """Parts that the store has of uploads that are not finished. One may finish between the two questions."""
    client, found = s3.client(), 0
    for u in unfinished(s3, bucket):
        with suppress(client.exceptions.NoSuchUpload):
            found += len(client.list_parts(Bucket=bucket[5:], Key=u["Key"], UploadId=u["UploadId"]).get("Parts", []))
    return found


def convert(src: Path, dst: str, to: str, **more: Any) -> Any:
    return ckpttool.convert(src, dst, to=to, drop=True, **{**TARGETS[to], **more})


# -------------------------------------------------------------------------------------------------------- equal bytes


@pytest.mark.parametrize(
    ("source", "to"),
    [*((DCP, to) for to in TARGETS), (ZERO3, "dcp"), (AWKWARD, "dcp"), (AWKWARD, "full")],
    ids=lambda x: x if isinstance(x, str) else x.parent.name,
)
def test_workers_send_the_bytes_of_one_process(
    s3: Moto, bucket: str, source: Path, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if source != DCP:  # a smaller state, which would be one part
        set_cells(monkeypatch, CELL // 2)
    end = ".pt" if to == "full" else ""
    one = convert(source, f"{bucket}/one{end}", to, workers=1)
    executor = Workers()
    many = convert(source, f"{bucket}/many{end}", to, workers=executor)
    assert many.digest == one.digest and many.verified and not any("workers were not used" in n for n in many.notes)
    assert objects(s3, bucket, "one") == objects(s3, bucket, "many") and not unfinished(s3, bucket)
    assert len(executor.of("fill")) > 1 and executor.of("cells") and many.workers["parts"] == len(executor.of("fill"))


def test_the_cells_of_parts_are_not_read_twice(s3: Moto, bucket: str) -> None:
    """Only those that parts meet in, and the first and the last of each object, come after the parts."""
    executor = Workers()
    convert(DCP, f"{bucket}/a", "dcp", workers=executor, verify=False)
    early = sum(len(c) for a in executor.answers for c in a.get("cells", {}).values() if "digests" in a)
    late = sum(len(r["cells"]) for r in executor.of("cells"))
    assert early > late > 0
    with plan(DCP, f"{bucket}/a", to="dcp", world_size=3) as planned:
        assert early + late == sum(-(-f.size // (CELL)) for f in planned.draft.files[:3])


def test_a_dry_run_says_who_would_send(bucket: str) -> None:
    from ckpttool.engine.dry_run import estimate_conversion
    from ckpttool.engine.opening import OpenOptions
    from ckpttool.options import RunOptions, WriteRequest

    writing = WriteRequest(to="dcp", world_size=3)
    found = [estimate_conversion(DCP, f"{bucket}/a", OpenOptions(), writing, RunOptions(workers=n)) for n in (1, 4)]
    assert found[0].workers is None and found[1].workers is not None
    assert found[1].workers["memory_bytes"] == found[0].memory_bytes > upload.SIZES.buffered_bytes
    assert not listed_keys(bucket)


def listed_keys(bucket: str) -> list[str]:
    return [o["Key"] for o in moto().client().list_objects_v2(Bucket=bucket[5:]).get("Contents", [])]


def test_the_cut_has_cells_in_every_part(bucket: str) -> None:
    with plan(DCP, f"{bucket}/a", to="dcp", world_size=3) as planned:
        found = parts.cut_draft(planned.draft, CELL)
        assert all(p.nbytes >= 2 * CELL for p in found[:-1])
        assert len(found) < len(parts.cut_draft(planned.draft))


def test_a_cast_and_many_files_whose_cells_wait_on_the_disk(
    s3: Moto, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = UploadSizes(part_bytes=CELL, smallest_part_bytes=CELL, buffered_bytes=KIB)
    monkeypatch.setattr(upload, "SIZES", sizes)
    for name, workers in (("one", 1), ("many", Workers())):
        convert(DCP, f"{bucket}/{name}", "dcp", world_size=8, dtype="bf16", workers=workers)
    assert objects(s3, bucket, "one") == objects(s3, bucket, "many")


# ------------------------------------------------------------------------------------------------- sent twice, or lost


def test_a_part_that_is_sent_twice_does_no_harm(s3: Moto, bucket: str) -> None:
    """Also after others have sent theirs, and when what remains was sent."""
    convert(DCP, f"{bucket}/one", "dcp", workers=1)

    def twice(i: int, request: dict[str, Any]) -> None:
        if i % 3 == 1 or "cells" in request:
            part_worker.run(json.dumps(executor.requests[i - 1]))

    executor = Workers(twice)
    convert(DCP, f"{bucket}/many", "dcp", workers=executor)
    assert objects(s3, bucket, "one") == objects(s3, bucket, "many") and not unfinished(s3, bucket)


def test_a_worker_that_wakes_after_the_end_changes_nothing(s3: Moto, bucket: str, proxied: Flaky) -> None:
    executor = Workers()
    convert(DCP, f"{bucket}/a", "dcp", workers=executor, verify=False)
    before = objects(s3, bucket, "a")
    # what S3 answers, by its API reference; moto answers 500
    gone = 404, b"<Error><Code>NoSuchUpload</Code><Message>The specified upload does not exist.</Message></Error>"
    proxied.rule = lambda method, path: gone if method == "PUT" and "uploadId" in path else None
    for request in (executor.requests[0], {"cells": executor.of("cells")[0]}):
        answer = json.loads(part_worker.run(json.dumps(request)))
        assert "its parts are gone" in answer["error"]["message"]
    assert objects(s3, bucket, "a") == before and not unfinished(s3, bucket)


def test_a_part_that_another_run_replaces_is_sent_again(s3: Moto, bucket: str) -> None:
    """As a worker of an earlier run with other options might, whose upload this run goes on with."""
    convert(DCP, f"{bucket}/one", "dcp", workers=1)

    def replace(i: int, request: dict[str, Any]) -> None:
        if "cells" in request and not replaced:
            for name in ("__0_0.distcp", "__2_0.distcp"):
                url, upload_id = whole[name]
                at = s3_object(url)
                assert at is not None
                s3.client().upload_part(
                    Bucket=at.bucket, Key=at.key, UploadId=upload_id, PartNumber=3, Body=b"x" * CELL
                )
            replaced.append(1)
        whole.update(request.get("fill", request.get("cells", {})).get("tree", {}).get("objects", {}))

    replaced: list[int] = []
    whole: dict[str, Any] = {}
    done = convert(DCP, f"{bucket}/many", "dcp", workers=Workers(replace))
    assert replaced and done.workers["again"] >= 1
    assert objects(s3, bucket, "one") == objects(s3, bucket, "many")


def test_a_run_whose_parts_are_always_replaced_gives_up(s3: Moto, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = S3Object.list_parts

    def others(self: S3Object, *a: Any) -> Any:
        return {k: {**v, "ETag": '"other"'} for k, v in real(self, *a).items()}

    monkeypatch.setattr(S3Object, "list_parts", others)
    with pytest.raises(RemoteError, match="Another run sends to the same place"):
        convert(DCP, f"{bucket}/a", "dcp", workers=Workers())
    assert objects(s3, bucket, "a") == {}


def test_what_is_replaced_by_workers_loses_its_marker_first(s3: Moto, bucket: str, proxied: Flaky) -> None:
    convert(DCP, f"{bucket}/one", "dcp", workers=1)
    convert(DCP, f"{bucket}/many", "dcp", world_size=5, workers=Workers(), verify=False)
    with pytest.raises(DestinationExists):
        convert(DCP, f"{bucket}/many", "dcp", workers=Workers())
    proxied.seen.clear()
    convert(DCP, f"{bucket}/many", "dcp", workers=Workers(), force=True)
    assert objects(s3, bucket, "one") == objects(s3, bucket, "many") and not unfinished(s3, bucket)
    seen = [
        (m, p.rpartition("/")[2].partition("?")[0])
        for m, p, _ in proxied.seen
        if m in ("POST", "DELETE", "PUT") and "partNumber" not in p
    ]
    gone, back = (
        seen.index(("DELETE", ".metadata")),
        max(i for i, (m, n) in enumerate(seen) if m != "DELETE" and n == ".metadata"),
    )
    completed = [i for i, (m, n) in enumerate(seen) if m == "POST" and n == "__0_0.distcp"]
    assert completed[0] < gone < completed[-1] < back, "begun, hidden, completed, and the marker last"


def test_a_store_that_refuses_a_worker_is_the_error(bucket: str, proxied: Flaky) -> None:
    denied = 403, b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
    proxied.rule = lambda method, path: denied if method == "PUT" and "partNumber" in path else None
    with pytest.raises(RemoteError, match="does not allow it") as e:
        convert(DCP, f"{bucket}/a", "dcp", workers=Workers())
    assert e.value.exit_code == 9 and any("to continue" in n for n in e.value.__notes__)


def test_a_worker_that_dies_costs_its_part(s3: Moto, bucket: str) -> None:
    convert(DCP, f"{bucket}/one", "dcp", workers=1)
    died: set[str] = set()

    def die(i: int, request: dict[str, Any]) -> None:
        kind = next(iter(request))
        if kind not in died and i > 1:
            died.add(kind)
            raise BrokenPipeError("the worker died")

    done = convert(DCP, f"{bucket}/many", "dcp", workers=Workers(die))
    assert died >= {"fill", "cells"} and done.workers["again"] == 2
    assert objects(s3, bucket, "one") == objects(s3, bucket, "many")


def test_through_failures_of_the_store(s3: Moto, bucket: str, proxied: Flaky) -> None:
    convert(DCP, f"{bucket}/one", "dcp", workers=1)
    count, lock = 0, threading.Lock()

    def rule(method: str, path: str) -> What:
        nonlocal count
        with lock:
            count += 1
            what: What = (None, None, 503, None, "lose", None, "drop")[count % 7]
        begins = method == "POST" and path.endswith("?uploads")  # tried again, that begins two
        return 503 if begins and what == "lose" else what

    proxied.rule = rule
    convert(DCP, f"{bucket}/many", "dcp", workers=Workers(), verify=False)
    proxied.rule = lambda *_: None
    assert proxied.did(503) > 10 and proxied.did("lose") > 10
    assert objects(s3, bucket, "one") == objects(s3, bucket, "many") and not unfinished(s3, bucket)


# -------------------------------------------------------------------------------------------------- going on, and ends


@pytest.mark.parametrize("to", ["dcp", "full"])
@pytest.mark.parametrize("again", ["one process", "workers"])
def test_when_the_coordinator_dies_the_same_command_goes_on(
    s3: Moto, bucket: str, proxied: Flaky, to: str, again: str
) -> None:
    end = ".pt" if to == "full" else ""
    convert(DCP, f"{bucket}/one{end}", to, workers=1)

    def die(i: int, request: dict[str, Any]) -> None:
        if i == 4:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted, match="to continue: the store keeps the parts that were sent"):
        convert(DCP, f"{bucket}/many{end}", to, workers=Workers(die))
    there = listed(s3, bucket)
    assert there > 4 and objects(s3, bucket, "many") == {}
    proxied.seen.clear()
    done = convert(DCP, f"{bucket}/many{end}", to, workers=1 if again == "one process" else Workers())
    assert objects(s3, bucket, "one") == objects(s3, bucket, "many") and not unfinished(s3, bucket)
    assert done.workers["filled_before"] >= 2 and any("continued an interrupted run" in n for n in done.notes)
    sent = sum(m == "PUT" and "partNumber" in p and "many" in p and "json" not in p for m, p, _ in proxied.seen)
    cells = sum(
        -(-len(data) // (CELL)) for name, data in objects(s3, bucket, "many").items() if not name.endswith("json")
    )
    assert sent <= cells - there, "what was there was not sent again"


def test_another_command_uses_no_part_of_an_earlier_one(s3: Moto, bucket: str) -> None:
    """The cells of another cast are others, and so are those of a changed source."""
    convert(DCP, f"{bucket}/one", "dcp", workers=1)

    def die(i: int, request: dict[str, Any]) -> None:
        if i == 5:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        convert(DCP, f"{bucket}/many", "dcp", dtype="bf16", workers=Workers(die))
    assert listed(s3, bucket)
    convert(DCP, f"{bucket}/many", "dcp", workers=Workers())
    assert objects(s3, bucket, "one") == objects(s3, bucket, "many") and not unfinished(s3, bucket)


def test_two_uploads_of_one_object_are_both_removed(s3: Moto, bucket: str) -> None:
    client = s3.client()
    for _ in range(2):
        upload_id = client.create_multipart_upload(Bucket=bucket[5:], Key="a/__0_0.distcp")["UploadId"]
        client.upload_part(Bucket=bucket[5:], Key="a/__0_0.distcp", UploadId=upload_id, PartNumber=1, Body=b"?")
    convert(DCP, f"{bucket}/a", "dcp", workers=Workers())
    assert not unfinished(s3, bucket)


def test_an_error_about_the_bytes_leaves_nothing(s3: Moto, bucket: str) -> None:
    def damage(i: int, request: dict[str, Any]) -> str | None:
        if i != 4:
            return None
        assert listed(s3, bucket)
        return json.dumps({"error": {"kind": "Corrupt", "message": "a block is damaged", "notes": []}})

    with pytest.raises(Corrupt, match="a block is damaged"):
        convert(DCP, f"{bucket}/a", "dcp", workers=Workers(damage))
    assert objects(s3, bucket, "a") == {} and not unfinished(s3, bucket)


def test_an_abort_is_repeated_until_the_store_lists_no_part(s3: Moto, bucket: str, proxied: Flaky) -> None:
    """A part that was on its way when an upload was aborted may stay: S3 says to look, and to abort again."""

    def damage(i: int, request: dict[str, Any]) -> str | None:
        if i != 4:
            return None
        proxied.rule = late
        return json.dumps({"error": {"kind": "Corrupt", "message": "a block is damaged", "notes": []}})

    def late(method: str, path: str) -> What:
        if method == "DELETE" and "uploadId" in path and path not in aborted:
            aborted.append(path)
            return 204  # done, as it seems; but the part that was late is there
        return None

    aborted: list[str] = []
    with pytest.raises(Corrupt):
        convert(DCP, f"{bucket}/a", "dcp", workers=Workers(damage))
    assert len(aborted) == 4 and not unfinished(s3, bucket)


def test_a_part_that_arrives_after_the_abort_leaves_nothing(s3: Moto, bucket: str, proxied: Flaky) -> None:
    """A worker's UploadPart is held back until the coordinator has aborted everything."""
    held, go = threading.Event(), threading.Event()

    def rule(method: str, path: str) -> What:
        if method == "PUT" and "partNumber" in path and not held.is_set():
            held.set()
            assert go.wait(20)
        return None

    def damage(i: int, request: dict[str, Any]) -> str | None:
        if i != 2:
            return None
        proxied.rule = rule
        late = threading.Thread(target=part_worker.run, args=[json.dumps(request)])
        late.start()
        threads.append(late)
        assert held.wait(20)
        return json.dumps({"error": {"kind": "Corrupt", "message": "a block is damaged", "notes": []}})

    threads: list[threading.Thread] = []
    with pytest.raises(Corrupt):
        convert(DCP, f"{bucket}/a", "dcp", workers=Workers(damage))
    go.set()
    for thread in threads:
        thread.join()
    assert threads and objects(s3, bucket, "a") == {} and not unfinished(s3, bucket)


def test_stores_without_parts_say_that_one_process_writes(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload_folder.UploadFolder, "sharable", False)  # as of Google's
    executor = Workers()
    done = convert(DCP, f"{bucket}/a", "dcp", workers=executor)
    assert not executor.of("fill") and any("only S3 takes the parts" in n for n in done.notes)


# ----------------------------------------------------------------------------------------------------- real processes

SITE = """
from ckpttool.storage import upload
upload.SIZES = upload.UploadSizes(part_bytes=8 << 10, smallest_part_bytes=8 << 10)
"""


class Run(SlowConversion):
    """`ckpttool convert DCP URL --to dcp -n 3 --workers N`, while it runs."""

    def __init__(self, tmp_path: Path, url: str, workers: int, seconds: float = 0.05) -> None:
        super().__init__(tmp_path, DCP, url, "--to", "dcp", "-n", "3", "--workers", workers, seconds=seconds, more=SITE)

    def wait_for(self, s3: Moto, bucket: str, many: int) -> None:
        """Until the store has so many parts."""
        self.wait_until(lambda: listed(s3, bucket) >= many)


@pytest.mark.slow
def test_four_processes_three_of_which_are_killed(s3: Moto, bucket: str, tmp_path: Path) -> None:
    convert(DCP, f"{bucket}/one", "dcp", workers=1)
    run = Run(tmp_path, f"{bucket}/many", 4, seconds=0.3)
    run.wait_for(s3, bucket, 3)
    for pid in run.processes()[1][:3]:  # one of them may be between two parts
        os.kill(pid, signal.SIGKILL)
    found = run.result()
    assert found["workers"]["count"] == 4 and found["workers"]["again"] >= 1 and found["verified"]
    assert objects(s3, bucket, "one") == objects(s3, bucket, "many") and not unfinished(s3, bucket)


@pytest.mark.slow
def test_ranks_of_mpi(s3: Moto, bucket: str) -> None:
    """Which share nothing but the store."""
    convert(DCP, f"{bucket}/one", "dcp", workers=1)
    code = SITE.partition("load =")[0] + "from ckpttool.cli.main import main; main()"
    words = ["convert", str(DCP), f"{bucket}/many", "--to", "dcp", "-n", "3", "--json", "--workers", "mpi"]
    program = script(code, *words, before=mpiexec(4))
    out, err = program.communicate(timeout=60)
    assert program.returncode == 0, err
    assert json.loads(out)["workers"]["count"] == 3
    assert objects(s3, bucket, "one") == objects(s3, bucket, "many") and not unfinished(s3, bucket)


@pytest.mark.slow
def test_a_coordinator_that_is_killed(s3: Moto, bucket: str, tmp_path: Path) -> None:
    convert(DCP, f"{bucket}/one", "dcp", workers=1)
    run = Run(tmp_path, f"{bucket}/many", 3, seconds=0.2)
    run.wait_for(s3, bucket, 4)
    run.process.kill()
    run.process.communicate()
    assert objects(s3, bucket, "many") == {} and unfinished(s3, bucket)
    found = Run(tmp_path, f"{bucket}/many", 2, seconds=0.0).result()
    assert found["workers"]["filled_before"] >= 1 and found["verified"]
    assert objects(s3, bucket, "one") == objects(s3, bucket, "many") and not unfinished(s3, bucket)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_source_that_changes_between_an_upload_and_the_one_that_goes_on(
    s3: Moto, bucket: str, tmp_path: Path, replaced: bool
) -> None:
    """Other numbers of the same size and time of change: no object holds parts of both."""
    folder = tmp_path / "src"
    shutil.copytree(FIXTURES / "hf_llama" / "ckpt", folder)

    def harm(i: int, request: dict[str, Any]) -> None:
        if i >= 2:
            raise KeyboardInterrupt

    with pytest.raises((Interrupted, KeyboardInterrupt)):
        convert(folder, f"{bucket}/a", "dcp", workers=Workers(harm))
    assert listed(s3, bucket) > 0
    for file in folder.glob("*.safetensors"):
        data, was = bytearray(file.read_bytes()), file.stat()
        start = 8 + int.from_bytes(data[:8], "little")
        data[start:] = bytes(b ^ 1 for b in data[start:])
        if replaced:
            file.unlink()
        file.write_bytes(data)
        os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))
    part_worker.close_caches()
    done = convert(folder, f"{bucket}/a", "dcp", workers=Workers(), verify=False)
    whole = convert(folder, f"{bucket}/b", "dcp", workers=1)
    assert done.digest == whole.digest and objects(s3, bucket, "a/") == objects(s3, bucket, "b/")


@pytest.mark.parametrize("status", [405])
def test_a_store_that_does_not_list_parts(s3: Moto, bucket: str, proxied: Flaky, status: int) -> None:
    """One process sends everything, and a message says why."""
    said = b"<Error><Code>MethodNotAllowed</Code><Message>The specified method is not allowed.</Message></Error>"
    proxied.rule = lambda method, path: (status, said) if method == "GET" and "uploadId=" in path else None
    done = convert(DCP, f"{bucket}/a", to="dcp", world_size=3, workers=2)
    assert done.verified and done.workers is None
    assert any("workers were not used: the store does not list the parts" in n for n in done.notes)
