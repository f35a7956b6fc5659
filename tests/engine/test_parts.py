"""A draft that several workers fill in parts has the bytes of one that a single process writes, whatever dies on the way.

Workers run in this process here, so that each fault happens at a chosen moment; test_workers.py has real processes.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from peers import FIXTURES

import ckpttool
from ckpttool.engine.copy import fill
from ckpttool.engine.opening import OpenOptions
from ckpttool.engine.planning import Plan
from ckpttool.engine.workers import clusters, executors, part_worker, parts
from ckpttool.engine.workers.coordinator import digest_with_workers
from ckpttool.errors import CkpttoolError, Corrupt, Interrupted, NoSpace, SourceChanged, Unreadable, UsageError
from ckpttool.layouts import layouts
from ckpttool.storage import local_destination
from ckpttool.storage.shared_tree import has_coherent_page_cache
from ckpttool.storage.source import Source

FSDP2, ZERO3, FULL = (
    FIXTURES / "fsdp2_w3" / "ckpt",
    FIXTURES / "zero3_w4" / "ckpt",
    FIXTURES / "full_w1" / "ckpt" / "fqn.pt",
)
TARGETS: dict[str, dict[str, Any]] = {
    "dcp": {"world_size": 3}, "full": {}, "hf": {}, "zero3": {"world_size": 3}, "zero2": {"world_size": 2}, "zero1": {"world_size": 2},
    "universal": {}, "fsdp1": {"world_size": 3, "wrap": ["**.layers.*"]}, "accelerate": {"world_size": 2},
    "trainer": {"world_size": 2, "options": ckpttool.DirectoryOptions(state_dict_type="full")}, "lightning": {"world_size": 2},
    "torchtitan": {"world_size": 2}, "audit": {}, "megatron": {"world_size": 2}, "torch_checkpointing": {"world_size": 2},
    "llamafactory": {"world_size": 2}, "verl": {"world_size": 2}, "xtuner": {"world_size": 2},
}  # fmt: skip
SUFFIX = {"full": ".pt", "audit": ".tar.zst"}


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Parts of kilobytes, and no plan that outlives a test."""
    monkeypatch.setattr(parts, "_LEAST_BYTES", 8 << 10)
    monkeypatch.setattr(parts, "_LEAST_BYTES_OF_A_FILE", 1 << 10)
    yield
    part_worker.close_caches()


class Workers(Executor):
    """Does what is submitted at once; `before(number of the part submitted, request)` may do harm, and what it returns is the answer.
    The digests of the read-back are computed without harm."""

    def __init__(self, before: Callable[[int, dict[str, Any]], Any] = lambda i, request: None) -> None:
        self.before, self.requests, self.answers = before, list[str](), list[str]()

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        out: Future[Any] = Future()
        (request,) = args
        self.requests.append(request)
        try:
            asked = json.loads(request)
            harm = self.before(len(self.fills) - 1, asked) if "fill" in asked else None
            if harm is NEVER:
                return out
            self.answers.append(fn(request) if harm is None else harm)
            out.set_result(self.answers[-1])
        except Exception as e:
            out.set_exception(e)
        return out

    @property
    def fills(self) -> list[dict[str, Any]]:
        """The requests to fill a part."""
        return [asked["fill"] for asked in map(json.loads, self.requests) if "fill" in asked]


NEVER = object()


def crew(executor: Executor) -> executors.Workers:
    return executors.Workers(executor, 2, False, "two")


def contents(path: Path) -> dict[str, bytes]:
    """{name: bytes}; ckpttool.json without the time at which it was written."""
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    out = {str(p.relative_to(path)): p.read_bytes() for p in files}
    for name, data in out.items():
        if name.endswith("ckpttool.json"):
            out[name] = json.dumps({k: v for k, v in json.loads(data).items() if k != "created"}).encode()
    return out


def convert(src: Path, dst: Path, to: str, **more: Any) -> Any:
    return ckpttool.convert(src, dst, to=to, drop=True, **{**TARGETS[to], **more})


def test_every_layout_that_is_written_is_tried() -> None:
    untried = {"torchtune"}  # refuses the names of transformers; its files are those of full
    assert set(TARGETS) | untried == {x.name for x in layouts().values() if x.write is not None}


@pytest.mark.slow
@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("source", [FSDP2, ZERO3, FULL, FIXTURES / "awkward_w3" / "ckpt"], ids=lambda p: p.parent.name)
def test_parts_have_the_bytes_of_one_pass(source: Path, to: str, tmp_path: Path) -> None:
    name = f"out{SUFFIX.get(to, '')}"
    for folder in ("one", "many"):
        (tmp_path / folder).mkdir()
    one = convert(source, tmp_path / "one" / name, to)
    workers = Workers()
    many = convert(source, tmp_path / "many" / name, to, workers=workers)
    assert one.digest == many.digest and many.verified
    if to == "audit":
        assert not workers.requests and any("workers were not used: an archive" in n for n in many.notes)
        return
    assert len(workers.requests) >= 3
    assert contents(tmp_path / "one" / name) == contents(tmp_path / "many" / name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "to", "how"),
    [
        ("fsdp2_w3", "dcp", {"only": ["optim"], "cast": {"optim.*": "bf16"}}),
        ("fsdp2_w3", "dcp", {"canonical_keys": True, "dtype": "fp16"}),
        ("torchao/adamw8bit_w2", "dcp", {"dequantize": ["optim.*"]}),
        ("fsdp2_w3", "hf", {"options": ckpttool.HfOptions(include_optimizer=True, max_shard_bytes=60_000)}),
        ("maps/titan-llama3", "hf", {"map": "torchtitan-llama3", "config": str(FIXTURES / "maps" / "titan-llama3")}),
        ("fsdp2_w3", "universal", {"options": ckpttool.UniversalOptions(stage=1)}),
        ("fsdp2_w3", "zero3", {"options": ckpttool.ZeroOptions(precision="bf16", sub_group_size=5000)}),
        ("fsdp2_w3", "accelerate", {"options": ckpttool.DirectoryOptions(state_dict_type="ddp")}),
    ],
    ids=lambda x: x if isinstance(x, str) else "+".join(x),
)
def test_options_give_workers_the_bytes_of_one_pass(source: str, to: str, how: dict[str, Any], tmp_path: Path) -> None:
    found = FIXTURES / source / "ckpt"
    for folder in ("one", "many"):
        (tmp_path / folder).mkdir()
    one = convert(found, tmp_path / "one" / "out", to, **how)
    workers = Workers()
    many = convert(found, tmp_path / "many" / "out", to, workers=workers, **how)
    assert one.digest == many.digest and len(workers.fills) > 2
    assert contents(tmp_path / "one" / "out") == contents(tmp_path / "many" / "out")


@pytest.mark.slow
@pytest.mark.parametrize("to", ["dcp", "full", "hf", "zero3"])
def test_on_a_network_file_system_the_coordinator_writes_shared_pages(
    to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_destination, "has_coherent_page_cache", lambda folder: False)
    name = f"out{SUFFIX.get(to, '')}"
    (tmp_path / "one").mkdir()
    convert(FSDP2, tmp_path / "one" / name, to)
    workers = Workers()
    convert(FSDP2, tmp_path / name, to, workers=workers)
    assert contents(tmp_path / "one" / name) == contents(tmp_path / name)
    answers = [json.loads(a)["fringes"] for a in workers.answers if "fringes" in json.loads(a)]
    pieces = [(at, data) for files in answers for rows in files.values() for at, data in rows]
    assert pieces and all(len(data) < 4 * 4096 // 3 + 8 for _, data in pieces)


def test_a_file_system_that_machines_share_is_known_by_its_mount(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    rows = [
        "22 1 8:1 / / rw - ext4 /dev/sda rw",
        "30 22 0:40 / /data rw shared:1 - nfs4 host:/x rw",
        "31 30 8:2 / /data/local rw - xfs /dev/b rw",
    ]
    mounts.write_text("\n".join(rows) + "\n")
    answers = {
        path: has_coherent_page_cache(path, str(mounts))
        for path in ("/home/x", "/data/run", "/data/local/run", "/database")
    }
    assert answers == {"/home/x": True, "/data/run": False, "/data/local/run": True, "/database": True}
    assert has_coherent_page_cache("/", str(tmp_path / "missing"))


def test_the_cut_covers_every_tensor_once_and_depends_on_the_draft_alone() -> None:
    with ckpttool.plan(FSDP2, "out", to="dcp", world_size=3) as planned:
        first = parts.cut_draft(planned.draft)
        assert [p.number for p in first] == list(range(len(first))) and len(first) > 3
        assert first[0].first == 0 and first[-1].stop == len(planned.draft.checkpoint.tensors)
        assert all(a.stop == b.first for a, b in pairwise(first))
        assert sum(p.nbytes for p in first) == sum(t.nbytes for t in planned.draft.checkpoint.tensors.values())
        assert parts.cut_draft(planned.draft) == first


@pytest.mark.slow
def test_what_fails_is_done_again_and_three_failures_end_the_run(tmp_path: Path) -> None:
    convert(FSDP2, tmp_path / "one", "hf")

    def twice(i: int, request: dict[str, Any]) -> None:
        if tries.setdefault(number := request["fill"]["part"][0], 0) < 2:
            tries[number] += 1
            raise BrokenPipeError("the worker died")

    tries: dict[int, int] = {}
    convert(FSDP2, tmp_path / "many", "hf", workers=Workers(twice))
    assert contents(tmp_path / "one") == contents(tmp_path / "many") and set(tries.values()) == {2}

    def always(i: int, request: dict[str, Any]) -> None:
        if request["fill"]["part"][0] == 2:
            raise BrokenPipeError("the worker died")

    with pytest.raises(CkpttoolError, match="given to 3 workers, and none of them finished it: the worker died"):
        convert(FSDP2, tmp_path / "never", "hf", workers=Workers(always))
    assert not (tmp_path / "never").exists()
    again = Workers()
    done = convert(FSDP2, tmp_path / "never", "hf", workers=again)
    assert contents(tmp_path / "never") == contents(tmp_path / "one")
    assert any("continued an interrupted run" in n for n in done.notes)
    assert 0 < len(again.fills) < len(parts_of("hf", tmp_path))


def parts_of(to: str, tmp_path: Path) -> list[parts.WorkPart]:
    with ckpttool.plan(FSDP2, tmp_path / "x", to=to, **TARGETS[to]) as planned:
        return parts.cut_draft(planned.draft)


@pytest.mark.slow
@pytest.mark.parametrize("to", ["dcp", "full", "zero3"])
def test_when_the_coordinator_dies_any_run_goes_on(to: str, tmp_path: Path) -> None:
    def die(i: int, request: dict[str, Any]) -> None:
        if i == 3:
            raise KeyboardInterrupt

    name = f"out{SUFFIX.get(to, '')}"
    (tmp_path / "one").mkdir()
    convert(FSDP2, tmp_path / "one" / name, to)
    for workers in (None, Workers()):
        with pytest.raises(Interrupted):
            convert(FSDP2, tmp_path / name, to, workers=Workers(die))
        assert not (tmp_path / name).exists()
        done = convert(FSDP2, tmp_path / name, to, workers=workers, verify=False)
        assert done.verified and any("continued an interrupted run: 3 parts were filled" in n for n in done.notes)
        assert contents(tmp_path / name) == contents(tmp_path / "one" / name)
        (shutil.rmtree if (tmp_path / name).is_dir() else os.unlink)(tmp_path / name)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["one"], "nothing is left beside the destination"


@pytest.mark.slow
def test_workers_go_on_where_one_process_was_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert(FSDP2, tmp_path / "one", "dcp")
    monkeypatch.setattr(fill, "_JOURNAL_BYTES", 1)
    seen = 0

    def stop(what: str, done: int, total: int) -> None:
        nonlocal seen
        seen += 1
        if what == "copy" and seen == 60:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        convert(FSDP2, tmp_path / "out", "dcp", progress=stop)
    workers = Workers()
    convert(FSDP2, tmp_path / "out", "dcp", workers=workers)
    assert contents(tmp_path / "out") == contents(tmp_path / "one")
    there = [fill["there"] for fill in workers.fills]
    assert there[0] and not there[-1]


@pytest.mark.slow
def test_a_worker_that_wakes_after_the_commit_writes_nothing(tmp_path: Path) -> None:
    for to in ("hf", "full"):
        out = tmp_path / f"out{SUFFIX.get(to, '')}"
        workers = Workers()
        convert(FSDP2, out, to, workers=workers)
        before = contents(out)
        fills = [json.dumps({"fill": fill}) for fill in workers.fills]
        for request in (fills[0], fills[-1]):
            answer = json.loads(part_worker.run(request))
            assert "no longer being filled" in answer["error"]["message"]
        assert contents(out) == before
        assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == []


@pytest.mark.slow
def test_a_worker_that_is_late_does_not_disturb_the_read_back(tmp_path: Path) -> None:
    """Its part was given to another one, which was faster; it still writes the same bytes."""
    workers, late = Workers(), list[str]()

    def progress(what: str, done: int, total: int) -> None:
        if what == "verify" and len(late) < 2:
            answer = json.loads(part_worker.run(json.dumps({"fill": workers.fills[0]})))
            late.append(answer["error"]["message"])

    convert(FSDP2, tmp_path / "out", "dcp", workers=workers, progress=progress)
    assert len(late) == 2 and all("no longer being filled" in text for text in late)


@pytest.mark.slow
def test_a_part_that_two_workers_do_not_finish_is_given_to_a_third(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where none is done, so that nothing says how long one takes; where nobody is free, a warning says so."""
    for name, value in (("_UNKNOWN_SECONDS", 0.2), ("_SILENT_SECONDS", 0.3)):
        monkeypatch.setattr(parts, name, value)
    given: list[Future[str]] = []

    class Frozen(Executor):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[str]:
            given.append(Future())
            if len(given) == 3:
                threading.Timer(2.5, given[-1].set_result, ["{}"]).start()
            return given[-1]

    part, results = parts.WorkPart(0, 0, 1, 1000), dict[int, Any]()
    workers = executors.Workers(Frozen(), 3, False, "three workers")
    with pytest.warns(
        clusters.FrozenWorkers, match=r"part 0 \(1,000 bytes\) has been at work for .* in . of the workers of three"
    ):
        again = parts.run_parts([part], results, str, workers, lambda done, total: None, str)
    assert (again, len(given), results) == (2, 3, {0: {}})


@pytest.mark.slow
def test_a_slow_part_is_given_to_a_second_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "_SLOW_SECONDS", 0.1)
    convert(FSDP2, tmp_path / "one", "dcp")
    workers = Workers(lambda i, request: NEVER if i == 2 else None)
    convert(FSDP2, tmp_path / "out", "dcp", workers=workers)
    numbers = [fill["part"][0] for fill in workers.fills]
    assert numbers.count(2) == 2 and len(numbers) == len(set(numbers)) + 1
    assert contents(tmp_path / "one") == contents(tmp_path / "out")


def test_a_source_that_changes_under_one_worker_ends_the_run(tmp_path: Path) -> None:
    shutil.copytree(FSDP2, tmp_path / "source")

    def change(i: int, request: dict[str, Any]) -> None:
        if i == 2:
            path = tmp_path / "source" / "__1_0.distcp"
            path.write_bytes(path.read_bytes())

    with pytest.raises(SourceChanged, match="changed while it was read"):
        convert(tmp_path / "source", tmp_path / "out", "hf", workers=Workers(change))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]


@pytest.mark.slow
def test_errors_of_a_worker_are_those_of_the_run(tmp_path: Path) -> None:
    def full_disk(i: int, request: dict[str, Any]) -> str | None:
        return part_requests_error(NoSpace("no space left")) if i == 2 else None

    with pytest.raises(NoSpace, match="no space left"):
        convert(FSDP2, tmp_path / "out", "hf", workers=Workers(full_disk))
    assert not (tmp_path / "out").exists()
    convert(FSDP2, tmp_path / "out", "hf", workers=Workers())
    passing = Workers(lambda i, request: part_requests_error(Unreadable("stale handle")) if i == 1 else None)
    convert(FSDP2, tmp_path / "other", "hf", workers=passing)
    assert contents(tmp_path / "other") == contents(tmp_path / "out")


def part_requests_error(e: CkpttoolError) -> str:
    from ckpttool.engine.workers.part_requests import encode_error

    return encode_error(e)


@pytest.mark.slow
def test_a_worker_refuses_to_fill_what_it_would_plan_otherwise(tmp_path: Path) -> None:
    def another(i: int, request: dict[str, Any]) -> str:
        request["fill"]["job"]["plan"] = "0" * 64
        return part_worker.run(json.dumps(request))

    with pytest.raises(CkpttoolError, match=r"plans the conversion of .* differently from the process that asked"):
        convert(FSDP2, tmp_path / "out", "hf", workers=Workers(another))


@pytest.mark.parametrize("damaged", ["zero", "dcp"])
def test_a_damaged_byte_in_a_record_that_two_parts_read_is_found(damaged: str, tmp_path: Path) -> None:
    """The flat tensors of DeepSpeed are records that hold many parameters: no part reads one whole."""
    source = shutil.copytree(ZERO3 if damaged == "zero" else FSDP2, tmp_path / "source")
    path = max(source.rglob("*optim_states.pt" if damaged == "zero" else "*.distcp"), key=lambda p: p.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(Corrupt, match="CRC32"):
        convert(source, tmp_path / "out", "dcp", workers=Workers())
    assert not (tmp_path / "out").exists()
    with ckpttool.open(source) as opened, pytest.raises(Corrupt, match="CRC32"):
        opened.locate()
        digest_with_workers(opened, source, OpenOptions(), crew(Workers()), fill.silent, "read")


@pytest.mark.parametrize("source", [FSDP2, ZERO3, FULL], ids=lambda p: p.parent.name)
def test_digests_by_workers_are_those_of_one_pass(source: Path) -> None:
    one = ckpttool.digest(source).tensors
    workers = Workers()
    with ckpttool.open(source) as opened:
        opened.locate()
        many = digest_with_workers(opened, source, OpenOptions(), crew(workers), fill.silent, "read")
    assert many == one and len(workers.requests) > 2


@pytest.mark.slow
def test_threads_of_one_process_may_work_for_two_conversions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """dask's workers have a thread for each core: a plan stays open until the last of them has done with it."""
    made = list[Plan]()
    planned = part_worker._plan_asked
    monkeypatch.setattr(part_worker._planned, "make", lambda job: made.append(planned(job)) or made[-1])
    used: dict[int, int] = {}
    early = list[str]()
    fill_part = part_worker.fill_part

    def closed_late(draft: Any, source: Any, *more: Any, **how: Any) -> Any:
        used[id(source)] = used.get(id(source), 0) + 1
        try:
            return fill_part(draft, source, *more, **how)
        finally:
            used[id(source)] -= 1

    def close(self: Source) -> None:
        early.extend([self.root] * used.get(id(self), 0))
        closing(self)

    closing = Source.close
    monkeypatch.setattr(part_worker, "fill_part", closed_late)
    monkeypatch.setattr(Source, "close", close)
    for name in "ab":
        convert(FSDP2, tmp_path / f"one_{name}", "dcp" if name == "a" else "hf")
    with ThreadPoolExecutor(4) as executor, ThreadPoolExecutor(2) as runs:
        done = [
            runs.submit(convert, FSDP2, tmp_path / name, to, workers=executor)
            for name, to in (("a", "dcp"), ("b", "hf"))
        ]
        assert all(d.result().digest for d in done)
    assert len(made) > 2 and not early
    for name in "ab":
        assert contents(tmp_path / name) == contents(tmp_path / f"one_{name}")


@pytest.mark.slow
def test_casts_count_in_their_order_for_workers_too(tmp_path: Path) -> None:
    cast = OrderedDict([("optim.*", "bf16"), ("model.*", "fp16"), ("*norm*", "fp32")])  # not sorted by name
    convert(FSDP2, tmp_path / "one", "dcp", cast=cast)
    workers = Workers()
    convert(FSDP2, tmp_path / "many", "dcp", cast=cast, workers=workers)
    assert len(workers.fills) > 3 and contents(tmp_path / "one") == contents(tmp_path / "many")


def test_relative_paths_mean_the_same_to_workers_in_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = {f"layers.{i}.lora_{x}.weight": torch.ones(8, 8) for i in range(20) for x in "AB"}
    torch.save({"model": weights}, tmp_path / "source.pt")
    (tmp_path / "beside").mkdir()
    said = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": [str(i) for i in range(20)]}
    (tmp_path / "beside" / "adapter_config.json").write_text(json.dumps(said))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    workers = Workers(lambda i, request: os.chdir(tmp_path / "elsewhere"))
    options = ckpttool.HfOptions(adapter=True, adapter_config="beside")
    convert(Path("source.pt"), Path("out"), "hf", options=options, workers=workers)
    assert workers.fills and (tmp_path / "out" / "adapter_config.json").exists()


@pytest.mark.slow
def test_a_config_that_was_corrected_after_an_interrupted_run_begins_anew(tmp_path: Path) -> None:
    """It says which rows of a fused tensor are whose; shapes, names and files are the same either way."""
    source, name_map = FIXTURES / "maps" / "titan-llama3" / "ckpt", "torchtitan-llama3"
    config = json.loads((source.parent / "config.json").read_text())

    def die(i: int, request: dict[str, Any]) -> None:
        if i == 3:
            raise KeyboardInterrupt

    (tmp_path / "config.json").write_text(
        json.dumps({**config, "head_dim": 2, "num_attention_heads": 12, "num_key_value_heads": 4})
    )
    more = {"map": name_map, "config": str(tmp_path)}
    with pytest.raises(Interrupted):
        convert(source, tmp_path / "out", "dcp", workers=Workers(die), **more)
    (tmp_path / "config.json").write_text(json.dumps(config))
    convert(source, tmp_path / "out", "dcp", workers=Workers(), **more)
    convert(source, tmp_path / "one", "dcp", **more)
    assert contents(tmp_path / "one") == contents(tmp_path / "out")


def test_a_source_without_versions_is_converted_by_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its plan id has a salt, so no worker could find the same plan."""
    monkeypatch.setattr("ckpttool.storage.source.Source.has_versions", lambda self: False)
    workers = Workers()
    done = convert(FSDP2, tmp_path / "out", "hf", workers=workers)
    assert not workers.fills and any("whose server tells no versions" in n for n in done.notes)


def test_workers_that_would_have_nothing_to_do_are_refused() -> None:
    with pytest.raises(UsageError, match=r"only the structure was asked for, which one process reads\. Give read_data"):
        ckpttool.verify(FSDP2, workers=2)
    assert ckpttool.verify(FSDP2, read_data=True, workers=Workers()).data == "ok"


def test_a_part_with_a_large_tensor_is_begun_first(tmp_path: Path) -> None:
    """It stands last in the files, where one worker would be left with it."""
    torch.save({f"w{i}": torch.arange(n) for i, n in enumerate([3000] * 6 + [40_000, 3000, 60_000])}, tmp_path / "a.pt")
    workers = Workers()
    convert(tmp_path / "a.pt", tmp_path / "out", "dcp", world_size=1, workers=workers)
    assert [asked["part"][0] for asked in workers.fills] == [8, 6, 0, 1, 2, 3, 4, 5, 7]
    convert(tmp_path / "a.pt", tmp_path / "alone", "dcp", world_size=1)
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")


def test_progress_counts_the_bytes_of_parts(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    lock = threading.Lock()

    def progress(what: str, done: int, total: int) -> None:
        with lock:
            seen.append((what, done, total))

    convert(FSDP2, tmp_path / "out", "dcp", workers=Workers(), progress=progress, verify=False)
    copied = [row for row in seen if row[0] == "copy"]
    assert copied[0][1] == 0 and copied[-1][1] == copied[-1][2] > 0
    assert [row[1] for row in copied] == sorted(row[1] for row in copied)
