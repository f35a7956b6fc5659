"""Items of a store whose places are assumed: few requests, and never other bytes."""

from __future__ import annotations

import json
import shutil
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import stores
import torch
from stores import Lean
from torch.distributed import checkpoint as torch_dcp
from typer.testing import CliRunner

import ckpttool
from ckpttool.cli.main import app
from ckpttool.errors import CkpttoolError, Corrupt, RemoteError
from ckpttool.formats import zip_bytes
from ckpttool.storage import retries
from ckpttool.storage.remote import RemoteSource

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")
FIXTURES = Path(__file__).parents[2] / "fixtures"


@pytest.fixture
def lean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lean]:
    """A store whose bucket "b" is a folder."""
    (tmp_path / "store" / "b").mkdir(parents=True)
    with Lean(tmp_path / "store") as store:
        stores.set_environment(monkeypatch, store.endpoint)
        yield store


def saved(store: Lean, name: str, state: dict[str, Any]) -> Path:
    """A DCP folder of one rank, by torch."""
    folder = store.root / "b" / name
    torch_dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def adam_state(params: int, rows: int, columns: int) -> dict[str, Any]:
    """Weights with AdamW's moments and a step each, as a trainer has them in memory."""
    made = torch.Generator().manual_seed(1)
    weights = {f"layers.{i}.w": torch.randn(rows, columns, generator=made) for i in range(params)}
    moments = {n: {"step": torch.tensor(7.0), "exp_avg": w * 0.1, "exp_avg_sq": w * w} for n, w in weights.items()}
    groups = [{"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "params": list(weights)}]
    return {"model": weights, "optim": {"state": moments, "param_groups": groups}}


# ------------------------------------------------------------------------------------------------------- few requests


def test_requests_at_real_sizes(lean: Lean, tmp_path: Path) -> None:
    """What docs/how-to/stores.md promises: 62 MB in 120 tensors, in items of 340 kB on two ranks, in one file, and of a
    web server."""
    full, dcp = lean.root / "b" / "a.pt", lean.root / "b" / "dcp"
    state = adam_state(30, 480, 360)
    state["optim"]["state"] = {i: s for i, s in enumerate(state["optim"]["state"].values())}
    state["optim"]["param_groups"][0]["params"] = list(range(30))
    torch.save({"model": state["model"], "optimizer": state["optim"]}, full)
    ckpttool.convert(full, dcp, to="dcp", world_size=2, verify=False)
    most: dict[str, tuple[int, Callable[[], Any]]] = {
        "inspect": (6, lambda: ckpttool.inspect("s3://b/dcp")),
        "inspect full": (5, lambda: ckpttool.inspect("s3://b/a.pt")),
        "inspect web": (5, lambda: ckpttool.inspect(f"{lean.endpoint}/b/a.pt")),
        "verify": (20, lambda: ckpttool.verify("s3://b/dcp")),
        "convert": (60, lambda: ckpttool.convert("s3://b/dcp", tmp_path / "1", to="dcp", world_size=3)),
        "read full": (30, lambda: ckpttool.digest("s3://b/a.pt")),
    }
    for what, (n, run) in most.items():
        lean.asked()
        run()
        asked = lean.asked()
        assert len(asked) <= n, (what, len(asked), asked)
    assert ckpttool.diff(tmp_path / "1", full).equal


def test_verify_and_a_dry_run_say_what_they_did_not_look_into(lean: Lean, tmp_path: Path) -> None:
    saved(lean, "a", adam_state(5, 64, 64))
    planned = CliRunner().invoke(app, ["convert", "s3://b/a", str(tmp_path / "x.pt"), "--dry-run", "--json"])
    notes = json.loads(planned.stdout)["notes"]
    assert [n for n in notes if "items in the store were not looked into" in n and "the conversion reads" in n]
    found = ckpttool.verify("s3://b/a")
    assert "items in the store were not looked into" in found.notes[0] and "read_data" in found.notes[0]
    assert not ckpttool.verify("s3://b/a", read_data=True).notes


# ------------------------------------------------------------------------------------------------- other assumptions


def test_an_item_that_is_stored_column_by_column(lean: Lean, tmp_path: Path) -> None:
    """It has the dtype, shape and length of the others, and its numbers are in another order."""
    state = {f"model.w{i}": torch.randn(96, 96) for i in range(6)}
    state["model.w3"] = state["model.w3"].t()
    folder = saved(lean, "a", {"model": {n[6:]: t for n, t in state.items()}})
    back = ckpttool.convert("s3://b/a", tmp_path / "back", to="dcp", world_size=2)
    assert back.digest == ckpttool.digest(folder).digest and ckpttool.diff("s3://b/a", folder).equal
    with ckpttool.open("s3://b/a") as opened:
        assert (opened["model.w3"][5:9] == state["model.w3"][5:9].numpy()).all()


def moved_record(path: Path, name: str, by: int) -> None:
    """Write a .pt file again with `by` more bytes before the record `name`, and as many fewer behind it."""
    data = path.read_bytes()
    records = zip_bytes.read_zip_records(lambda a, n: data[a : a + n], 0, len(data), "x")
    out, rows = bytearray(), []
    for short, r in sorted(records.items(), key=lambda row: row[1].offset):
        at, payload = len(out), data[r.offset : r.offset + r.length]
        header = bytearray(zip_bytes.make_local_header(f"archive/{short}", r.length, r.crc32, at, 64))
        if short == name:
            extra = struct.unpack_from("<H", header, 28)[0]
            struct.pack_into("<H", header, 28, extra + by)
            header += bytes(by)
        out += header + payload + (bytes(64 - by) if short == name else bytes(64) if short.startswith("data/") else b"")
        rows.append((f"archive/{short}", at, r.length, r.crc32, False))
    path.write_bytes(out + zip_bytes.make_central_directory(rows, len(out)))


def test_a_record_that_begins_elsewhere(lean: Lean, tmp_path: Path) -> None:
    """The bytes come from where its header says, not from where those of the first record would have it."""
    path = lean.root / "b" / "a.pt"
    weights = {f"w{i}": torch.randn(200, 200) for i in range(5)}
    torch.save(weights, path)
    moved_record(path, "data/3", 24)
    assert torch.equal(torch.load(path)["w3"], weights["w3"])
    ckpttool.convert("s3://b/a.pt", tmp_path / "back", to="dcp", world_size=1)
    assert ckpttool.diff(tmp_path / "back", path).equal
    assert ckpttool.digest("s3://b/a.pt").digest == ckpttool.digest(path).digest


@pytest.mark.parametrize("what", ["header", "pickle", "directory", "payload"])
def test_an_item_that_is_damaged_is_refused_when_it_is_read(lean: Lean, tmp_path: Path, what: str) -> None:
    folder = saved(lean, "a", adam_state(4, 100, 100))
    path = folder / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    begins = [i for i in range(len(data)) if data[i : i + 4] == b"PK\5\6"][-1] - 60_000  # in the last tensor of 40 kB
    ends = data.index(b"PK\5\6", begins)
    first = data.rindex(b"PK\5\6", 0, ends) + 22
    at = {
        "header": data.index(b"data/0", first), "pickle": data.index(b"data.pkl", first) + 60,
        "directory": ends - 40, "payload": (first + ends) // 2,
    }[what]  # fmt: skip
    data[at] ^= 0x55
    path.write_bytes(data)
    with pytest.raises(CkpttoolError) as local:
        ckpttool.convert(folder, tmp_path / "1", to="dcp", world_size=1)
    with pytest.raises(CkpttoolError) as remote:
        ckpttool.convert("s3://b/a", tmp_path / "2", to="dcp", world_size=1)
    assert local.value.code == remote.value.code and not (tmp_path / "2").exists()
    with pytest.raises(CkpttoolError):
        ckpttool.verify("s3://b/a", read_data=True)


def test_an_item_of_another_shape(lean: Lean, tmp_path: Path) -> None:
    """Equal in length and in everything but the pickle."""
    folder = saved(lean, "a", {"model": {f"w{i}": torch.randn(60, 40) for i in range(4)}})
    other = saved(lean, "other", {"model": {f"w{i}": torch.randn(40, 60) for i in range(4)}})
    data, theirs = bytearray((folder / "__0_0.distcp").read_bytes()), (other / "__0_0.distcp").read_bytes()
    assert len(data) == len(theirs)
    data[len(data) * 3 // 4 :] = theirs[len(data) * 3 // 4 :]
    (folder / "__0_0.distcp").write_bytes(data)
    with pytest.raises(Corrupt, match="metadata says"):
        ckpttool.convert("s3://b/a", tmp_path / "back", to="dcp", world_size=1)


# --------------------------------------------------------------------------------------------- files of other ranks


def copied(store: Lean, fixture: str, name: str = "a") -> Path:
    folder = store.root / "b" / name
    shutil.copytree(FIXTURES / fixture / "ckpt", folder)
    return folder


def test_a_rank_s_file_that_is_a_copy_of_another_s(lean: Lean, tmp_path: Path) -> None:
    folder = lean.root / "b" / "a"
    ckpttool.convert(FIXTURES / "fsdp2_w3" / "ckpt", folder, to="dcp", world_size=2, verify=False)
    (folder / "ckpttool.json").unlink()
    assert ckpttool.verify("s3://b/a").structure == "ok"
    state = {"model": {f"w{i}": torch.randn(64, 64) for i in range(6)}}
    whole = saved(lean, "whole", state)
    ckpttool.convert(whole, lean.root / "b" / "two", to="dcp", world_size=2, verify=False)
    two = lean.root / "b" / "two"
    (two / "ckpttool.json").unlink()
    shutil.copy(two / "__0_0.distcp", two / "__1_0.distcp")
    for run in (lambda p: ckpttool.verify(p), lambda p: ckpttool.convert(p, tmp_path / "x", to="full")):
        for place in (two, "s3://b/two"):
            with pytest.raises(Corrupt, match="hold the same numbers"):
                run(place)


def test_files_of_two_steps(lean: Lean, tmp_path: Path) -> None:
    one, other = adam_state(4, 40, 30), adam_state(4, 40, 30)
    for s in other["optim"]["state"].values():
        s["step"] = torch.tensor(9.0)
    for name, state in (("one", one), ("other", other)):
        ckpttool.convert(saved(lean, f"{name}.w", state), lean.root / "b" / name, to="dcp", world_size=2, verify=False)
        (lean.root / "b" / name / "ckpttool.json").unlink()
    files = sorted((lean.root / "b" / "one").glob("*.distcp"))
    shutil.copy(lean.root / "b" / "other" / files[0].name, files[0])
    said = []
    for place in (lean.root / "b" / "one", "s3://b/one"):
        try:
            ckpttool.convert(place, tmp_path / str(len(said)), to="full")
            said.append("")
        except Corrupt as e:
            said.append(str(e).partition(": ")[2].partition(": ")[2])
    assert said[0] == said[1]


def test_files_of_ranks_are_the_same_in_a_store(lean: Lean, tmp_path: Path) -> None:
    folder = copied(lean, "zero3_w2_tied")
    assert ckpttool.verify("s3://b/a", read_data=True).digest == ckpttool.digest(folder).digest
    assert ckpttool.convert("s3://b/a", tmp_path / "x", to="dcp", world_size=3).verified


def test_two_threads_read_one_item(lean: Lean) -> None:
    """Pieces of one tensor, before anybody has looked into it."""
    from concurrent.futures import ThreadPoolExecutor

    from ckpttool.engine.opening import OpenOptions, open_checkpoint

    state = {"model": {f"w{i}": torch.randn(300, 300) for i in range(4)}}
    saved(lean, "a", state)
    with open_checkpoint("s3://b/a", OpenOptions(), prove_later=True) as opened, ThreadPoolExecutor(8) as pool:
        ckpt = opened.locate()
        before = opened.source.count_unproved()
        file, at, n = ckpt.tensors["model.w3"].chunks[0].extent
        cuts = [(a, min(a + 30_000, n) - a) for a in range(0, n, 30_000)]
        read = pool.map(lambda cut: opened.source.read(ckpt.files[file], at + cut[0], cut[1]), reversed(cuts))
        assert b"".join(reversed(list(read))) == np.ascontiguousarray(state["model"]["w3"].numpy()).tobytes()
        assert before[0] - opened.source.count_unproved()[0] == 1
        assert isinstance(opened.source, RemoteSource)
        opened.source.prove_all()
        assert opened.source.count_unproved()[0] == 0
        opened.recheck()


# ------------------------------------------------------------------------------------------------- how a store behaves


def test_a_slow_store_is_read_by_all_connections_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of eight connections, the usual number, at least seven carry something until the last request is sent, while the
    destination is written."""
    (tmp_path / "store" / "b").mkdir(parents=True)
    with Lean(tmp_path / "store", 0.03, 3e6) as store:
        stores.set_environment(monkeypatch, store.endpoint)
        saved(store, "a", {"model": {f"w{i}": torch.rand(1000, 800) for i in range(20)}})
        connections = []
        for attempt in range(3):  # a machine that does something else leaves connections idle
            store.asked()
            ckpttool.convert("s3://b/a", tmp_path / f"out{attempt}", to="dcp", world_size=3, verify=False)
            rows = [line.split() for line in store.asked()]
            long = [(float(a), float(b)) for method, *_, a, b in rows if method == "GET" and float(b) - float(a) > 0.2]
            first, last = min(a for a, _ in long), max(a for a, _ in long)
            connections.append(sum(min(b, last) - a for a, b in long if a < last) / (last - first))
            if connections[-1] > 7:
                return
    raise AssertionError(connections)


def test_a_storm_of_503(lean: Lean, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request is refused seven times, by a store that says that it is asked too much."""
    monkeypatch.setattr(retries, "POLICY", retries.RetryPolicy(first_wait_seconds=0.0001))
    folder, times = saved(lean, "a", adam_state(1, 100, 100)), Counter[str]()

    def rule(method: str, path: str) -> Any:
        times[method + path] += 1
        said = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
        return (503, said) if times[method + path] % 8 else None

    with stores.Flaky(lean.endpoint, rule) as proxy:
        stores.set_environment(monkeypatch, proxy.endpoint)
        done = ckpttool.convert("s3://b/a", tmp_path / "out", to="dcp", world_size=2)
    assert done.digest == ckpttool.digest(folder).digest


@pytest.mark.parametrize(("code", "status"), [("ExpiredToken", 400), ("RequestTimeTooSkewed", 403)])
def test_credentials_that_expire_meanwhile(
    lean: Lean, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, status: int
) -> None:
    """It stops at once, with what the store says, and leaves nothing."""
    saved(lean, "a", adam_state(4, 100, 100))
    said = f"<Error><Code>{code}</Code><Message>The provided token has expired.</Message></Error>".encode()
    data = [0]

    def rule(method: str, path: str) -> Any:
        data[0] += "distcp" in path
        return (status, said) if data[0] > 2 else None

    with stores.Flaky(lean.endpoint, rule) as proxy:
        stores.set_environment(monkeypatch, proxy.endpoint)
        with pytest.raises(RemoteError, match=f"{code}.*expired.*credentials") as e:
            ckpttool.convert("s3://b/a", tmp_path / "out", to="dcp", world_size=2)
    assert e.value.exit_code == 9 and not (tmp_path / "out").exists()


def test_requests_that_the_requester_pays(lean: Lean, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request says so, that of a header alone too."""
    saved(lean, "a", adam_state(2, 40, 40))
    monkeypatch.setitem(fsspec.config.conf, "s3", {"requester_pays": True})
    with stores.Flaky(lean.endpoint, lambda *_: None) as proxy:
        stores.set_environment(monkeypatch, proxy.endpoint)
        assert ckpttool.verify("s3://b/a", read_data=True).data == "ok"
        assert {h.get("x-amz-request-payer") for h in proxy.headers} == {"requester"}


def test_nobody_is_asked_for_credentials_where_anon_is_set(lean: Lean, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(lean, "a", adam_state(2, 40, 40))
    monkeypatch.setitem(fsspec.config.conf, "s3", {"anon": True})
    with stores.Flaky(lean.endpoint, lambda *_: None) as proxy:
        stores.set_environment(monkeypatch, proxy.endpoint)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        assert ckpttool.verify("s3://b/a", read_data=True).data == "ok"
        assert not any("authorization" in h for h in proxy.headers)
