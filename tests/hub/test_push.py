"""push, with the real huggingface_hub against the small Hub of hub.py: what arrives is what convert writes, whatever happens
on the way, and what must not be pushed is not."""

from __future__ import annotations

import base64
import bz2
import dataclasses
import gzip
import hashlib
import importlib.util
import io
import json
import logging
import lzma
import os
import pickle
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from commands import ckpttool_here
from fake_hub import OWNER, STRANGER, Hub, _Handler
from huggingface_hub import ModelCard
from huggingface_hub.utils import close_session
from peers import FIXTURES, difference, files_of, load_dcp, tensors_of
from safetensors import deserialize
from safetensors.torch import load, load_file, save_file

import ckpttool
from ckpttool.engine import conversion, planning, recorded
from ckpttool.engine.copy import record_crcs
from ckpttool.errors import (
    CkpttoolError,
    Corrupt,
    DestinationExists,
    Differs,
    Interrupted,
    RemoteError,
    SourceChanged,
    Unsafe,
    Unsupported,
    UsageError,
)
from ckpttool.hub import client, hashing, model_card, screening
from ckpttool.hub import push as pushing
from ckpttool.hub.push import push
from ckpttool.hub.virtual_files import VirtualFile, make_contents
from ckpttool.storage import answer_limits, hub_limits, retries
from ckpttool.storage.buffers import IOBudget
from ckpttool.storage.source import Source

URL = "hf://org/name"
LLAMA, SHARDED = FIXTURES / "hf_llama" / "ckpt", FIXTURES / "hf_llama" / "ckpt_sharded"
DCP = FIXTURES / "fsdp2_w3" / "ckpt"
CONFIG = str(FIXTURES / "fsdp2_w3" / "hf_ref")

# huggingface_hub itself says that to httpx with every PUT
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    monkeypatch.setattr(retries, "POLICY", retries.RetryPolicy(first_wait_seconds=0.001))
    monkeypatch.setattr(client, "_WAIT", 0.001)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with Hub(part=16 << 10) as hub:
        hub.environment(monkeypatch, tmp_path)
        yield hub
        close_session()


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 6 MiB as a DCP folder of two ranks, its config beside it."""
    made, folder = tmp_path_factory.mktemp("made"), tmp_path_factory.mktemp("large")
    shutil.copy(LLAMA / "config.json", folder)
    dice = torch.Generator().manual_seed(7)
    tensors = {f"model.layers.{k}.weight": torch.randn(1536, 256, generator=dice) for k in range(4)}
    save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    ckpttool.convert(made, folder / "dcp", to="dcp", world_size=2)
    return folder / "dcp"


def head(hub: Hub, ref: str = "main") -> dict[str, bytes]:
    """{name: bytes} of the files at a ref."""
    return {n: hub.bytes_at("org/name", n, ref) for n in hub.repos["org/name"].at(ref).files}


def record(hub: Hub, repo: str = "org/name") -> Any:
    return json.loads(hub.bytes_at(repo, "ckpttool.json"))


def weights(hub: Hub) -> set[str]:
    return {n for n in hub.repos["org/name"].at("main").files if "safetensors" in n}


def commits(hub: Hub) -> list[str]:
    """Titles, the last first."""
    return [c.title for c in hub.api().list_repo_commits("org/name")]


command = ckpttool_here


def nothing_is_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("hashed again")

    monkeypatch.setattr(pushing, "hash_contents", never)
    monkeypatch.setattr(hashing, "_hash_content", never)


# ------------------------------------------------------------------------------------------------------ what arrives


def test_numbers_of_six_bits_are_pushed_byte_for_byte(hub: Hub, tmp_path: Path) -> None:
    """A file made by hand: the library reads F6 and has no way to write it."""
    text = b'{"w":{"dtype":"F6_E2M3","shape":[4,16],"data_offsets":[0,48]}}'
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(range(48)))
    push(str(tmp_path / "model.safetensors"), URL)
    ((name, found),) = deserialize(head(hub)["model.safetensors"])
    assert (name, found["dtype"], found["shape"], bytes(found["data"])) == ("w", "F6_E2M3", [4, 16], bytes(range(48)))


def test_an_average_is_pushed_as_the_model(hub: Hub, tmp_path: Path) -> None:
    """Also the x of a schedule-free optimizer, which is computed as it is uploaded."""
    for case in ("ema_pytorch", "schedulefree_adamw_bfloat16"):
        folder = FIXTURES / "averages" / case
        key = "ema" if case == "ema_pytorch" else "schedule-free-x"
        done = push(str(folder / "ckpt.pt"), URL, weights=key)
        found = dict(deserialize(head(hub)["model.safetensors"]))
        wanted = dict(deserialize((folder / "truth.safetensors").read_bytes()))
        assert found.keys() == wanted.keys() - {"head.weight"}  # tied, and written once
        assert all(bytes(found[n]["data"]) == bytes(wanted[n]["data"]) for n in found)
        assert any("are the model now" in note for note in done.notes)


@pytest.mark.parametrize(
    "case",
    ["fsdp2_w3", "fsdp2_w2_zstd", "fsdp2_w4_tp", "fsdp2_w3_tied_bf16", "full_w1", "zero3_w4", "universal_z3_w2",
     "fsdp1_w2_sharded", "hf_llama"],
)  # fmt: skip
def test_what_is_pushed_is_what_convert_writes(hub: Hub, tmp_path: Path, case: str) -> None:
    """Byte for byte, from every layout, in shards, with the digests of the source."""
    source = min(FIXTURES.glob(f"{case}/ckpt*"))
    source = min(source.glob("*.pt"), default=source) if case == "full_w1" else source
    reference = FIXTURES / case / "hf_ref"
    how: dict[str, Any] = {"config": str(reference)} if reference.is_dir() else {}
    if (FIXTURES / case / "flat_layout.json").exists():
        how["flat_layout"] = str(FIXTURES / case / "flat_layout.json")
    done = push(str(source), URL, options=ckpttool.HfOptions(max_shard_bytes=60_000), **how)
    ckpttool.convert(source, tmp_path / "hf", to="hf", options=ckpttool.HfOptions(max_shard_bytes=60_000), **how)
    found = head(hub)
    wanted = files_of(tmp_path / "hf")
    assert {n: d for n, d in found.items() if n in wanted} == wanted
    assert set(found) == {*wanted, "README.md", "ckpttool.json", ".gitattributes"}
    mine, other = record(hub), json.loads((tmp_path / "hf" / "ckpttool.json").read_text())
    assert done.digest == mine["digest"] == other["digest"]
    assert mine["tensors"] == other["tensors"] and mine["tied"] == other["tied"]
    assert mine["files"] == {n: {"sha256": hashlib.sha256(d).hexdigest(), "bytes": len(d)} for n, d in wanted.items()}
    assert set(done.files) == set(done.sent) == {*wanted, "README.md", "ckpttool.json"} and not done.there
    assert done.commit == hub.repos["org/name"].refs["main"] and done.created and done.private
    assert hub.repos["org/name"].private


def test_from_pretrained(hub: Hub, tmp_path: Path) -> None:
    """transformers in one process loads what was pushed of several layouts: the weights of the live jobs."""
    cases = {"fsdp2_w3": "ckpt", "fsdp2_w3_moe": "ckpt", "fsdp2_w3_tied_bf16": "ckpt", "hf_llama": "ckpt_sharded"}
    for case, name in cases.items():
        folder = FIXTURES / case
        config = str(folder / "hf_ref") if (folder / "hf_ref").is_dir() else str(folder / "ckpt")
        push(str(folder / name), f"org/{case}", config=config, options=ckpttool.HfOptions(max_shard_bytes=50_000))
    code = """
import sys, torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
for case in sys.argv[2:]:
    model = AutoModelForCausalLM.from_pretrained(f"org/{case}", dtype="auto")
    save_file({k: t.clone().contiguous() for k, t in model.state_dict().items()}, f"{sys.argv[1]}/{case}.safetensors")
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path), *cases], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for case in cases:
        truth = FIXTURES / case / "truth.safetensors"
        wanted = (
            {k.removeprefix("model."): t for k, t in load_file(truth).items() if k.startswith("model.")}
            if truth.exists()
            else load_file(LLAMA / "model.safetensors")
        )
        assert not difference(load_file(tmp_path / f"{case}.safetensors"), wanted), case


def test_dtype_message_and_json_of_the_command(hub: Hub, tmp_path: Path) -> None:
    done = command("push", DCP, "org/name", "--config", CONFIG, "--dtype", "bf16", "-m", "words", "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["commit"] == hub.repos["org/name"].refs["main"] and said["private"] and not done.stderr
    assert commits(hub) == ["words", "initial commit"]
    tensors = load(hub.bytes_at("org/name", "model.safetensors"))
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    assert json.loads(hub.bytes_at("org/name", "config.json"))["dtype"] == "bfloat16"
    again = command("push", DCP, "org/name", "--config", CONFIG, "--dtype", "bf16")
    assert again.returncode == 0 and "nothing was sent, no commit made" in again.stdout
    assert "entries: optim (" in again.stderr and "--include-optimizer" in again.stderr


def test_numbers_that_a_cast_made_infinite_are_a_note_also_of_a_push_that_goes_on(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"a.weight": torch.tensor([1.0, 7e4, -1e9]), "b.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    note = "2 numbers of 1 tensor became infinite in float16, first in model.a.weight"
    with monkeypatch.context() as m:
        m.setattr(pushing.Push, "commit_in_rounds", lambda *_: (_ for _ in ()).throw(RemoteError("gone")))
        with pytest.raises(RemoteError):
            push(str(tmp_path), "hf://org/cast", dtype="fp16")
    assert note in push(str(tmp_path), "hf://org/cast", dtype="fp16").notes  # hashed before, by the journal
    lost = json.loads(hub.bytes_at("org/cast", "ckpttool.json"))["lost"]
    assert lost == {"model.a.weight": {"dtype": "float16", "infinite": 2, "nan": 0, "cut": 0}}


def test_no_optimizer_unless_asked_for(hub: Hub) -> None:
    done = push(str(DCP), URL, config=CONFIG)
    assert not any("training_state" in n for n in head(hub))
    assert {n.split(".")[0] for n, _, _ in done.dropped} == {"optim", "trainer"}


def test_the_whole_state(hub: Hub, tmp_path: Path) -> None:
    """--include-optimizer: no pickle is among the files, and the digest of all is that of the source."""
    done = push(
        str(DCP), URL, config=CONFIG, options=ckpttool.HfOptions(include_optimizer=True, max_shard_bytes=100_000)
    )
    assert done.dropped == []
    names = [n for n in head(hub) if n.startswith("training_state/")]
    assert names and all(n.endswith((".safetensors", ".json")) for n in names)
    assert done.digest == ckpttool.digest(DCP).digest
    assert ckpttool.digest(URL).digest == done.digest
    again = push(str(DCP), URL, config=CONFIG)  # the weights alone, later: the state would not belong to them
    assert set(names) < set(again.deleted) and not any(n.startswith("training_state/") for n in head(hub))


# ------------------------------------------------------------------------------------------------------ virtual files


@pytest.mark.parametrize("case", ["fsdp2_w3", "fsdp2_w2_zstd", "fsdp2_w4_tp", "zero3_w4"])
@pytest.mark.parametrize("dtype", ["keep", "bf16"])
def test_a_virtual_file_is_the_file_from_any_offset(tmp_path: Path, case: str, dtype: str) -> None:
    source = str(FIXTURES / case / "ckpt")
    # the weights are of several models; any config will do, since the files are compared, not loaded
    how: dict[str, Any] = {
        "config": CONFIG,
        "dtype": dtype,
        "options": ckpttool.HfOptions(allow_name_mismatch=True),
    }
    ckpttool.convert(source, tmp_path / "hf", to="hf", **how)
    wanted = (tmp_path / "hf" / "model.safetensors").read_bytes()
    planned = planning.plan(source, "name", to="hf", **how)
    opened, draft = planned.opened, planned.draft
    dice = random.Random(case)
    with opened:
        content = next(c for c in make_contents(opened, draft, IOBudget(1, 256 << 10)) if c.name == "model.safetensors")
        seen: list[int] = []
        with VirtualFile(content, seen.append) as f:
            assert f.read() == wanted and f.read(5) == b"" and f.tell() == len(wanted)
            assert sum(seen) == len(wanted)
            for _ in range(30):
                at, n = dice.randrange(len(wanted) + 10), dice.choice([0, 1, 100, 5_000, 1 << 20])
                assert f.seek(at) == at and f.read(n) == wanted[at : at + n]
            assert f.seek(-7, os.SEEK_END) == len(wanted) - 7 and f.read() == wanted[-7:]
            assert sum(seen) == len(wanted)
            buffer = bytearray(100)
            f.seek(50)
            assert f.readinto(buffer) == 100 and buffer == wanted[50:150]
            with pytest.raises(io.UnsupportedOperation):
                f.fileno()


def test_crc32s_are_compared_while_hashing_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent is known by its SHA-256."""
    planned = planning.plan(
        str(min((FIXTURES / "full_w1").glob("ckpt*/*.pt"))),
        "name",
        to="hf",
        config=CONFIG,
        options=ckpttool.HfOptions(allow_name_mismatch=True),
    )
    opened, draft = planned.opened, planned.draft
    with opened:
        assert opened.checkpoint.records
        monkeypatch.setattr(record_crcs, "crc32", None)
        with VirtualFile(next(c for c in make_contents(opened, draft, IOBudget(1)) if c.jobs)) as f:
            assert len(f.read()) == f.content.size


def test_seeking_reads_nothing_and_going_on_reads_nothing_twice(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = planning.plan(str(large), "name", to="hf")
    opened, draft = planned.opened, planned.draft
    begun: list[int] = []
    with opened:
        content = make_contents(opened, draft, IOBudget(1))[0]
        blocks = content.blocks
        monkeypatch.setattr(content, "blocks", lambda *a: begun.append(a[0]) or blocks(*a))
        with VirtualFile(content) as f:
            for at in range(0, content.size, 1 << 20):  # as SliceFileObj does around each part
                before = f.tell()
                f.seek(0, os.SEEK_END)
                f.seek(at)
                f.read(1 << 20)
                f.seek(before)
            assert begun == [0]
            f.seek(content.size - 10)
            f.read()
            assert begun == [0, 3]  # of the tensor that the byte lies in


def test_every_byte_of_the_source_is_read_twice_at_most(hub: Hub, large: Path, tmp_path: Path) -> None:
    """Counted by the server of the source, which is a repository too; in many parts."""
    hub.commit("org/source", {f"{p.name}": p.read_bytes() for p in large.iterdir()})
    hub.part = 1 << 20
    done = push("hf://org/source", URL)
    nbytes = sum(t.nbytes for t in torch_tensors(large).values())
    assert nbytes == 6 << 20
    read = hub.bytes_of(".distcp") or sum(n for p, n in hub.sent.items() if p.endswith(".distcp"))
    assert 2 * nbytes <= read < 2.02 * nbytes
    assert done.commit and load_hf_of(hub) == {n: t.tobytes() for n, t in numpy_of(large).items()}
    assert not list(tmp_path.rglob("*.safetensors")) and not list(tmp_path.rglob("*.distcp"))  # nothing was staged


def torch_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {k.removeprefix("model."): t for k, t in tensors_of(load_dcp(folder)).items()}


def numpy_of(folder: Path) -> dict[str, Any]:
    return {n: t.numpy() for n, t in torch_tensors(folder).items()}


def load_hf_of(hub: Hub) -> dict[str, bytes]:
    return {n: t.numpy().tobytes() for n, t in load(hub.bytes_at("org/name", "model.safetensors")).items()}


# ------------------------------------------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize("what", [500, 429, "drop", "lose"])
def test_failures_on_the_way(hub: Hub, large: Path, what: int | str) -> None:
    """Every request that is not a commit fails once, whatever signature is in its URL."""
    times: Counter[str] = Counter()

    def rule(method: str, path: str) -> int | str | None:
        path = re.sub(r"^/lfs/\w+", "/lfs", path)
        times[method + path] += 1
        failing = "/commit/" not in path and "repos/create" not in path
        return what if times[method + path] == 1 and failing else None

    hub.part = 1 << 20
    hub.rule = rule
    done = push(str(large), URL, options=ckpttool.HfOptions(max_shard_bytes=4 << 20))
    assert hub.did(what) > 10
    assert done.commit and sorted(weights(hub)) == [
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"
    ]  # fmt: skip


def test_somebody_else_commits_meanwhile(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """412: looked at again, nothing sent again, what the other did is kept."""
    hub.commit("org/name", {"README.md": b"one\n"})
    left = [b"two\n", b"three\n"]

    def rule(method: str, path: str) -> None:
        if "/commit/" in path and left:
            hub.commit("org/name", {"README.md": left.pop(0), "other.txt": b"x"})

    hub.rule = rule
    done = push(str(DCP), URL, config=CONFIG)
    assert hub.seen and sum("/commit/" in p for _, p, _, _ in hub.seen) == 3
    taken = {k: n for k, n in hub.taken.items()}
    assert taken == {record(hub)["files"]["model.safetensors"]["sha256"]: done.files["model.safetensors"]}
    assert head(hub)["README.md"].startswith(b"three\n\n<!-- ckpttool -->") and head(hub)["other.txt"] == b"x"
    left = [b"%d" % k for k in range(9)]
    with pytest.raises(RemoteError, match="somebody else is writing"):
        push(str(DCP), URL, config=CONFIG, dtype="bf16")


def test_the_answer_to_the_commit_is_lost(hub: Hub) -> None:
    left = ["lose"]
    hub.rule = lambda method, path: left.pop() if "/commit/" in path and left else None
    done = push(str(DCP), URL, config=CONFIG)
    assert done.commit == hub.repos["org/name"].refs["main"] and len(commits(hub)) == 2
    assert "model.safetensors" in done.sent


def test_a_hub_that_has_something_else(hub: Hub) -> None:
    """It tells another SHA-256 than that of what was sent, or another git name."""
    hub.lies["model.safetensors"] = "0" * 64
    with pytest.raises(Differs, match=r"model\.safetensors has \d+ bytes and SHA-256 0000.* at commit"):
        push(str(DCP), URL, config=CONFIG)
    hub.lies.clear()
    hub.repos.clear()

    def rule(method: str, path: str) -> None:
        if "paths-info" in path:
            hub.commit("org/name", {"config.json": b"{}"})
            hub.repos["org/name"].commits[path.rpartition("/")[2]].files["config.json"] = hub._blob(
                "config.json", b"{}"
            )

    hub.rule = rule
    with pytest.raises(Differs, match=r"config\.json has 2 bytes"):
        push(str(DCP), URL, config=CONFIG)


@pytest.mark.parametrize("where", ["/api/models/org/name", "/tree/", "/preupload/", "/validate-yaml", "/paths-info/"])
@pytest.mark.parametrize("answer", [b"[]", b'{"a": 1}', b"[1]", b"{" * 100_000])
def test_answers_of_another_shape(hub: Hub, where: str, answer: bytes) -> None:
    """JSON that no Hub sends is an error of the Hub, and no fault of ours; a commit that was made is named."""
    hub.commit("org/name", {"a": b"x"})
    hub.rule = lambda method, path: (200, answer) if where in path and "refs" not in path else None
    try:
        push(str(DCP), URL, config=CONFIG)
    except CkpttoolError as e:
        assert e.exit_code in (5, 9) and URL in str(e)
        if where == "/paths-info/":
            assert hub.repos["org/name"].refs["main"] in str(e)
    else:
        assert where in ("/tree/", "/validate-yaml")  # an empty list, or what nobody reads


ROW = {"type": "file", "path": "a", "size": 1, "oid": "1" * 40}


@pytest.mark.parametrize(
    ("where", "answer", "words"),
    [
        (
            "/refs", {"branches": [{"name": [1], "ref": "x", "targetCommit": "x"}], "tags": [], "converts": []},
            r"says '\[1\]' where the name",
        ),
        ("/paths-info/", [{**ROW, "path": ["a"]}], "is there, but was not checked.*where the name of a file or branch"),
        ("/tree/", [{**ROW, "path": ["a"]}], "where the name of a file or branch"),
        ("/tree/", [{**ROW, "path": {"a": 1}}], "where the name of a file or branch"),
        ("/tree/", [{**ROW, "path": "\ud800"}], "half of a surrogate pair"),
        (
            "?expand=", {"id": "org/name", "sha": "1" * 40, "private": "false", "tags": []},
            r"says 'false' where true or false \(private\) should be",
        ),
    ],
)  # fmt: skip
def test_answers_with_one_value_of_another_shape(hub: Hub, where: str, answer: Any, words: str) -> None:
    hub.commit("org/name", {"a": b"x"})
    hub.rule = lambda method, path: (200, json.dumps(answer).encode()) if where in path else None
    with pytest.raises((RemoteError, Unsafe), match=words) as e:
        push(str(DCP), URL, config=CONFIG, revision="exp" if where == "/refs" else None)
    assert URL in str(e.value)


@pytest.mark.parametrize(
    "change",
    [{"commitOid": [1]}, {"commitOid": "../x"}, {"commitUrl": 7}, {"commitUrl": "javascript:x"}, {"pullRequestUrl": {"a": 1}}],
)  # fmt: skip
def test_an_answer_to_the_commit_that_names_none(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    """The repository is looked at anew, and has the commit; that of a pull request cannot be seen there, so the error says
    that it may exist."""
    hub.commit("org/name", {"a": b"x"})
    route = _Handler._route

    def changed(self: _Handler, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        status, data, headers = route(self, body)
        return status, json.dumps({**json.loads(data), **change}).encode() if "/commit/" in self.path else data, headers

    monkeypatch.setattr(_Handler, "_route", changed)
    with pytest.raises(RemoteError, match="answer to a commit, which may have been made: look at http") as e:
        push(str(DCP), URL, config=CONFIG, pull_request=True)
    assert e.value.code == "CKPT0906" and "refs/pr/1" in hub.repos["org/name"].refs
    done = push(str(DCP), URL, config=CONFIG)
    assert done.commit == hub.repos["org/name"].refs["main"] and len(commits(hub)) == 2


@pytest.mark.parametrize("kind", [ValueError, RuntimeError])
def test_an_error_before_the_commit_is_not_called_its_answer(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    """huggingface_hub wraps what reading a file raises, and answers to other requests, in errors of these kinds."""
    monkeypatch.setattr(client, "_WAIT", 0.0)
    busy = OSError("busy")
    busy.response = SimpleNamespace(status_code=503)  # type: ignore[attr-defined]
    for cause, raised in ((SourceChanged("a changed"), SourceChanged), (busy, client.TransientError)):

        def create_commit(*_: object, cause: Exception = cause, **__: object) -> None:
            raise kind("Error while uploading 'a' to the Hub.") from cause

        repository = client.Repository("org/name")
        repository.api = SimpleNamespace(create_commit=create_commit, endpoint="http://127.0.0.1:1")
        with pytest.raises(raised) as e:
            repository.commit([], [], "message", "0" * 40, None, False)
        assert "may have been made" not in str(e.value)


def test_a_commit_that_cannot_be_checked_is_named(hub: Hub) -> None:
    hub.rule = lambda method, path: 503 if "paths-info" in path else None
    with pytest.raises(RemoteError, match="is there, but was not checked") as e:
        push(str(DCP), URL, config=CONFIG)
    assert hub.repos["org/name"].refs["main"] in str(e.value)


def test_a_hub_that_ignores_files(hub: Hub) -> None:
    """The .gitignore of a repository does not leave weights out."""
    hub.commit("org/name", {".gitignore": b"*.safetensors\n"})
    hub.api().upload_file(path_or_fileobj=b"12345678", path_in_repo="x.safetensors", repo_id="org/name")
    assert not weights(hub)  # so it does to others
    push(str(DCP), URL, config=CONFIG)
    assert "model.safetensors" in weights(hub)


def test_killed_in_the_middle_and_run_again(hub: Hub, large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL after two of four files; the next run hashes nothing and sends the other two, and the commit."""
    children: list[subprocess.Popen[str]] = []
    hub.part = 1 << 20
    shas: set[str] = set()

    def rule(method: str, path: str) -> str | None:
        if method == "POST" and path.endswith("/complete"):
            shas.add(path)
            if len(shas) == 3:
                children[0].send_signal(signal.SIGKILL)
                return "drop"
        return None

    hub.rule = rule
    args = ["push", str(large), "org/name", "--max-shard-size", "1600000", "--jobs", "1", "-q"]
    children.append(subprocess.Popen([sys.executable, "-m", "ckpttool", *args], text=True))
    assert children[0].wait(60) == -signal.SIGKILL
    assert len(commits(hub)) == 1 and len(hub.objects) == 2
    had = set(hub.objects)
    hub.rule = lambda method, path: None
    hub.forget()
    nothing_is_hashed(monkeypatch)
    done = push(str(large), URL, options=ckpttool.HfOptions(max_shard_bytes=1_600_000), threads=1)
    assert done.commit and len(commits(hub)) == 2
    assert not had & set(hub.taken) and len(hub.taken) == 2
    assert len([n for n in done.sent if n.endswith(".safetensors")]) == 2
    assert len([n for n in done.there if n.endswith(".safetensors")]) == 2


def test_interrupted(hub: Hub, large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is hashed, and while it is sent: no commit; what was done is not done again."""
    hub.part = 1 << 20

    def at(what: str) -> Any:
        def progress(doing: str, done: int, total: int) -> None:
            if doing == what and done > total / 2:
                raise KeyboardInterrupt

        return progress

    for what in ("hash", "upload"):
        with pytest.raises(Interrupted, match=r"has no new commit\. Run the same command again"):
            push(str(large), URL, options=ckpttool.HfOptions(max_shard_bytes=1_600_000), threads=1, progress=at(what))
    assert commits(hub) == ["initial commit"]
    nothing_is_hashed(monkeypatch)
    assert push(str(large), URL, options=ckpttool.HfOptions(max_shard_bytes=1_600_000)).commit


def test_a_source_that_changes(hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "src"
    shutil.copytree(LLAMA, folder)

    def progress(doing: str, done: int, total: int) -> None:
        if doing == "upload":
            os.utime(folder / "model.safetensors", (1, 1))

    with pytest.raises(Corrupt, match="changed while it was read"):
        push(str(folder), URL, progress=progress)
    assert commits(hub) == ["initial commit"]


@pytest.mark.parametrize("stopped", ["hash", "upload"])
@pytest.mark.parametrize("replaced", [False, True])
def test_a_source_that_changes_between_a_push_and_the_one_that_goes_on(
    hub: Hub, tmp_path: Path, stopped: str, replaced: bool
) -> None:
    """Other numbers of the same size and time of change, in place or as another file: what arrives is all of the new ones."""
    folder = tmp_path / "src"
    shutil.copytree(SHARDED, folder)

    def progress(doing: str, done: int, total: int) -> None:
        if doing == stopped and done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        push(str(folder), URL, threads=1, progress=progress)
    for file in folder.glob("*.safetensors"):
        data, was = bytearray(file.read_bytes()), file.stat()
        start = 8 + int.from_bytes(data[:8], "little")
        data[start:] = bytes(b ^ 1 for b in data[start:])
        if replaced:
            file.unlink()
        file.write_bytes(data)
        os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))
    done = push(str(folder), URL, threads=1)
    assert done.commit and done.digest == ckpttool.digest(str(folder)).digest
    ckpttool.pull(URL, tmp_path / "back", to="hf")
    assert ckpttool.digest(str(tmp_path / "back")).digest == done.digest


@pytest.mark.parametrize(
    "said",
    [
        {"transfer": "basic", "objects": []}, {"objects": [{"oid": "0" * 64, "size": 1}]}, {"transfer": "basic", "objects": [{"oid": "x", "size": -1, "actions": 7}]},
        {"transfer": "xet", "objects": "none"}, [], None, {"transfer": "basic", "objects": [{"oid": "../../x", "size": 1, "actions": {"upload": {"href": "file:///etc/passwd"}}}]},
        {"transfer": "multipart", "objects": [{"oid": "0" * 64, "size": 1, "actions": {"upload": {"href": "http://[", "header": {"chunk_size": "0"}}}}]},
    ],
)  # fmt: skip
def test_a_hub_that_lies_about_large_files_gets_no_commit(hub: Hub, said: Any) -> None:
    hub.rule = lambda method, path: (200, json.dumps(said).encode()) if "/objects/batch" in path else None
    with pytest.raises(CkpttoolError) as e:
        push(str(LLAMA), URL)
    assert URL in str(e.value) and commits(hub) == ["initial commit"]


@pytest.mark.parametrize("path", ["/lfs/", "/objects/batch", "/commit/", "/preupload/"])
def test_a_hub_that_takes_what_is_sent_and_says_nothing(hub: Hub, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setattr(answer_limits, "LIMITS", limits := answer_limits.Limits(stall_seconds=0.4, write_seconds=0.4))
    monkeypatch.setattr(client, "LIMITS", limits)
    monkeypatch.setattr(hub_limits, "LIMITS", limits)
    hub.rule = lambda method, at: time.sleep(2) if path in at else None
    began = time.monotonic()
    with pytest.raises(RemoteError, match=r"makes no progress: in 0\.4 seconds"):
        push(str(LLAMA), URL)
    assert time.monotonic() - began < 10


def test_a_damaged_source(hub: Hub, tmp_path: Path) -> None:
    """A file with CRC32s, one bit of whose weights is another: found while it is hashed, nothing is sent."""
    source = min((FIXTURES / "full_w1").glob("ckpt*/*.pt"))
    data = bytearray(source.read_bytes())
    opened = ckpttool.open(source)
    with opened:
        extent = opened.locate().tensors["model.model.embed_tokens.weight"].chunks[0].extent
    data[extent.offset + 5] ^= 1
    (tmp_path / "bad.pt").write_bytes(data)
    with pytest.raises(Corrupt, match="CRC32"):
        push(str(tmp_path / "bad.pt"), URL, config=CONFIG, options=ckpttool.HfOptions(allow_name_mismatch=True))
    assert not hub.taken and commits(hub) == ["initial commit"]


@pytest.mark.parametrize(
    ("token", "what", "words"),
    [
        ("hf_WrongWrongWrongWrongWrong0123456", None, r"not authenticated.*hf auth login.*HF_TOKEN.*HF_ENDPOINT"),
        (STRANGER, None, r"the token does not allow this.*write access.*pull_request=True"),
        (OWNER, 429, r"too many requests.*Wait a few minutes"),
        (OWNER, 503, r"does not answer.*Check the network and HF_ENDPOINT"),
        (OWNER, "drop", r"does not answer.*run the same command again"),
        (OWNER, (403, f"Bearer {OWNER} said {OWNER}".encode()), r"the token does not allow this"),
    ],
)
def test_refusals(hub: Hub, monkeypatch: pytest.MonkeyPatch, token: str, what: Any, words: str) -> None:
    """Found out before the source is read; with what to do, without the token."""
    hub.commit("org/name", {"a": b"x"}, private=False)
    monkeypatch.setenv("HF_TOKEN", token)
    hub.rule = lambda method, path: what
    nothing_is_hashed(monkeypatch)
    with pytest.raises(RemoteError, match=f"(?s){words}") as e:
        push(str(DCP), URL, config=CONFIG, public=True)
    assert token not in str(e.value) and OWNER not in str(e.value) and e.value.exit_code == 9
    assert URL in str(e.value) and len(hub.seen) < 20


def test_no_hub_at_all(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        free = s.getsockname()[1]
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free}")
    with pytest.raises(RemoteError, match=f"the Hub at http://127.0.0.1:{free} does not answer") as e:
        push(str(DCP), URL, config=CONFIG)
    assert "uploaded" not in str(e.value)  # nothing was
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(RemoteError, match="HF_HUB_OFFLINE is set"):
        push(str(DCP), URL, config=CONFIG)


def test_a_command_that_is_refused_says_one_line(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_WrongWrongWrongWrongWrong0123456")
    done = command("push", DCP, URL, "--config", CONFIG)
    error, more = done.stderr.splitlines()
    assert done.returncode == 9 and error.startswith("error: hf://org/name: ")
    assert more.startswith("more: ckpttool explain CKPT09")
    assert "hf_Wrong" not in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("target", "how"),
    [
        ("name", {}), ("hf://datasets/org/name", {}), ("hf://datasets/name", {}), ("hf://org/name/sub", {}), ("s3://org/name", {}),
        ("hf://org/na..me", {}), ("hf://org/name@a", {"revision": "b"}), ("hf://org/name@" + "0" * 40, {}), ("org/name", {"threads": 0}),
        ("hf://org/name@refs/heads/x", {}),
    ],
)  # fmt: skip
def test_targets_that_make_no_sense(hub: Hub, target: str, how: dict[str, Any]) -> None:
    hub.commit("org/name", {"a": b"x"})
    with pytest.raises(UsageError):
        push(str(DCP), target, config=CONFIG, **how)
    assert list(head(hub)) == ["a"]


# ------------------------------------------------------------------------------------------------------- repositories


def test_who_may_read(hub: Hub) -> None:
    """A new repository is private; an existing one is not changed, and a public one needs --public."""
    push(str(DCP), "org/new", config=CONFIG, public=True)
    assert not hub.repos["org/new"].private
    for name, public, words in (
        ("open", False, "is public: everybody could read"),
        ("closed", True, "is private, and"),
    ):
        hub.commit(f"org/{name}", {"a": b"x"}, private=public)
        with pytest.raises(UsageError, match=f"hf://org/{name} {words}"):
            push(str(DCP), f"org/{name}", config=CONFIG, public=public)
        assert set(hub.repos[f"org/{name}"].at("main").files) == {"a"}
        assert push(str(DCP), f"org/{name}", config=CONFIG, public=not public).commit
        assert hub.repos[f"org/{name}"].private == public


@pytest.mark.parametrize("there", [True, False])
def test_a_repository_that_becomes_public_meanwhile(hub: Hub, monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    """While it is looked at, hashed or sent: no commit. While the commit is made: it is told. One that somebody else made,
    public, between our look and ours: nothing is hashed."""
    if there:
        hub.commit("org/name", {"a": b"x"})
    opening = "/info/lfs/"

    def rule(method: str, path: str) -> None:
        if opening in path and "org/name" in hub.repos:
            hub.repos["org/name"].private = False

    hub.rule = rule
    with pytest.raises(UsageError, match="is public: everybody could read"):
        push(str(DCP), URL, config=CONFIG)
    assert "model.safetensors" not in head(hub)
    hub.repos["org/name"].private, opening = True, "/paths-info/"
    with pytest.raises(
        RemoteError, match=r"has the commit \w+, but in the meantime somebody made the repository public: .*--private"
    ):
        push(str(DCP), URL, config=CONFIG)
    hub.repos.clear()
    nothing_is_hashed(monkeypatch)
    hub.rule = lambda method, path: (
        hub.commit("org/name", {"a": b"x"}, private=False) and None if "create" in path else None
    )
    with pytest.raises(UsageError, match="is public: everybody could read"):
        push(str(DCP), URL, config=CONFIG)


def test_branches_and_pull_requests(hub: Hub) -> None:
    hub.commit("org/name", {"a": b"x"})
    done = push(str(DCP), URL, config=CONFIG, revision="exp/one")
    assert "model.safetensors" in head(hub, "exp/one") and set(head(hub)) == {"a"}
    assert done.commit == hub.repos["org/name"].refs["exp/one"]
    again = push(str(DCP), f"{URL}@exp/one", config=CONFIG)
    assert again.commit is None and again.revision == "exp/one"
    hub.forget()
    pull = push(str(DCP), URL, config=CONFIG, pull_request=True)
    assert set(head(hub)) == {"a"} and "model.safetensors" in head(hub, "refs/pr/1")
    assert pull.commit == hub.repos["org/name"].refs["refs/pr/1"] and (pull.page or "").endswith("/discussions/1")
    assert not hub.taken  # the branch had brought the weights
    more = push(str(DCP), f"{URL}@refs/pr/1", config=CONFIG, dtype="bf16")
    assert more.commit == hub.repos["org/name"].refs["refs/pr/1"] and set(head(hub)) == {"a"}
    assert ckpttool.digest(f"{URL}@exp%2Fone").digest["model"] == ckpttool.digest(DCP).digest["model"]


def test_a_pull_request_whose_answer_is_lost_is_not_opened_twice(hub: Hub) -> None:
    hub.commit("org/name", {"a": b"x"})
    hub.rule = lambda method, path: "lose" if "/commit/" in path else None
    with pytest.raises(RemoteError, match="does not answer"):
        push(str(DCP), URL, config=CONFIG, pull_request=True)
    assert [r for r in hub.repos["org/name"].refs if r.startswith("refs/pr/")] == ["refs/pr/1"]


def test_nothing_to_change(hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The second push makes no commit, from another machine neither; one file of many is sent alone."""
    push(str(SHARDED), URL)
    before = head(hub)
    hub.forget()
    again = push(str(SHARDED), URL)
    assert again.commit is None and not again.sent and set(again.there) == set(again.files)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    monkeypatch.setattr(recorded, "datetime", Later)
    assert push(str(SHARDED), URL).commit is None
    assert head(hub) == before and not hub.taken and not any("/commit/" in p for _, p, _, _ in hub.seen)
    folder = tmp_path / "changed"
    shutil.copytree(SHARDED, folder)
    shard = max(folder.glob("*.safetensors"))
    tensors = {k: t + 1 for k, t in load_file(shard).items()}
    save_file(tensors, shard, metadata={"format": "pt"})
    done = push(str(folder), URL)
    changed = {n for n, d in head(hub).items() if before.get(n) != d}
    assert changed == set(done.sent) and len(hub.taken) == 1
    assert {"README.md", "ckpttool.json"} < changed


class Later:
    """The clock an hour on."""

    @staticmethod
    def now(zone: Any) -> Any:
        from datetime import datetime, timedelta

        return datetime.now(zone) + timedelta(hours=1)


def test_weights_of_another_push_are_taken_away_and_nothing_else(hub: Hub) -> None:
    own = {
        "notes.txt": b"mine",
        "pytorch_model.bin": b"old",
        "model.fp16.safetensors": b"12345678",
        "eval/model.safetensors": b"1",
    }
    old = {
        "model-00001-of-00003.safetensors": b"a" * 9,
        "model.safetensors.index.json": b"{}",
        "training_state/x.safetensors": b"b",
    }
    hub.commit("org/name", {**own, **old})
    would = push(str(DCP), URL, config=CONFIG, dry_run=True)
    done = push(str(DCP), URL, config=CONFIG)
    assert would.deleted == done.deleted == sorted(old)
    assert all(head(hub)[n] == d for n, d in own.items()) and not set(old) & set(head(hub))
    assert any("pytorch_model.bin" in n and "pickles" in n for n in done.notes)
    assert len(commits(hub)) == 2


def test_dry_run_sends_nothing(hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nothing_is_hashed(monkeypatch)
    first = push(str(DCP), URL, config=CONFIG, dry_run=True)
    assert first.created and set(first.sent) == {"model.safetensors", "config.json", "generation_config.json"}
    assert not hub.repos and not (tmp_path / "cache").exists()
    hub.commit("org/name", {"config.json": (Path(CONFIG) / "config.json").read_bytes()})
    second = push(str(DCP), URL, config=CONFIG, revision="new", dry_run=True)
    assert not second.created and any("branch new would be created" in n for n in second.notes)
    assert {m for m, *_ in hub.seen} == {"GET"} and list(hub.repos["org/name"].refs) == ["main"]
    monkeypatch.undo()


def test_dry_run_of_the_command(hub: Hub) -> None:
    done = command("push", DCP, URL, "--config", CONFIG, "--dry-run")
    assert done.returncode == 0 and "(new, private): 3 files" in done.stdout and "nothing was sent" in done.stdout
    assert not hub.repos


def test_staged(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files are on the disk, and sent from there; a folder that was staged before is taken as it is."""
    stage = tmp_path / "stage"
    hub.rule = lambda method, path: 400 if "/commit/" in path else None
    with pytest.raises(RemoteError, match="the Hub refuses"):
        push(str(DCP), URL, config=CONFIG, stage=str(stage))
    hub.rule = lambda method, path: None
    wanted = files_of(stage)
    monkeypatch.setattr(conversion, "convert", None)
    done = push(str(DCP), URL, config=CONFIG, stage=str(stage))
    assert done.commit and {n: d for n, d in head(hub).items() if n in wanted} == wanted
    assert record(hub)["digest"] == json.loads((stage / "ckpttool.json").read_text())["digest"] == done.digest
    (stage / "config.json").write_text("{}")
    with pytest.raises(DestinationExists, match="stage="):
        push(str(DCP), URL, config=CONFIG, stage=str(stage))


# --------------------------------------------------------------------------------------------------------------- cards


@pytest.mark.parametrize(
    ("data", "words"), [(b"# \xff\xfe\n", r"is not UTF-8 \(byte 2\)"), (b"x" * (9 << 20), "has 9437184 bytes")]
)
def test_a_card_that_the_hub_does_not_take(hub: Hub, monkeypatch: pytest.MonkeyPatch, data: bytes, words: str) -> None:
    """Found out before the source is read, on a branch too."""
    nothing_is_hashed(monkeypatch)
    hub.commit("org/name", {"a": b"x"})
    hub.repos["org/name"].refs["exp"] = hub.repos["org/name"].refs["main"]
    hub.commit("org/name", {"README.md": data}, "exp")
    for dry_run in (False, True):
        with pytest.raises(Unsupported, match=rf"the existing README\.md {words}"):
            push(str(DCP), URL, config=CONFIG, revision="exp", dry_run=dry_run)


def test_a_record_that_is_nested_without_bound(hub: Hub) -> None:
    """Whatever lies there under the name of ckpttool.json is replaced."""
    for data in (b"[" * 100_000, b"{", b"[]", b'{"created": 1}'):
        hub.commit("org/name", {"ckpttool.json": data})
        assert push(str(DCP), URL, config=CONFIG).commit and record(hub)["tool"] == "ckpttool"


def test_a_new_card(hub: Hub) -> None:
    push(str(DCP), URL, config=CONFIG)
    text = hub.bytes_at("org/name", "README.md").decode()
    data = ModelCard(text).data
    assert data.library_name == "transformers" and data.tags == ["ckpttool"] and data.base_model is None
    total = sum(t.numel() for t in load(hub.bytes_at("org/name", "model.safetensors")).values())
    for words in (
        f"| parameters | {total:,} |", "| dtype | float32 |", "| training step | 3 |", "layout dcp of 3 ranks",
        record(hub)["digest"]["model"], "ckpttool verify hf://org/name --against", "ckpttool pull hf://org/name",
        'AutoModelForCausalLM.from_pretrained("org/name"', f"ckpttool {ckpttool.__version__}",
    ):  # fmt: skip
        assert words in text
    push(str(DCP), URL, config=CONFIG, dtype="bf16")  # not what the checkpoint has: the section says another way
    text = hub.bytes_at("org/name", "README.md").decode()
    assert "ckpttool verify hf://org/name --read-data" in text and "--against" not in text and "bfloat16" in text
    assert ckpttool.verify(URL, read_data=True).recorded == "equal"


@pytest.mark.parametrize(
    ("before", "after"),
    [(b"", b""), (b"---\nlicense: mit\n---\n# Mine\r\ncaf\xe9\n", b""), (b"top", b"\n\nbelow <b>\n"), (b"<!-- ckpttool --> torn\n", b"\n")],
)  # fmt: skip
def test_an_existing_card_keeps_everything_but_our_section(before: bytes, after: bytes) -> None:
    facts = model_card.CardFacts(
        "org/name", "1", "dcp", 8, "my|<b>trainer\n", 7, {"bfloat16": 10}, {"all": "a", "model": "a"}, False
    )
    section = model_card._make_section(facts).encode()
    old = before + b"<!-- ckpttool -->\nold\n<!-- /ckpttool -->" + after
    assert model_card.update_card(old, facts) == before + section + after
    assert model_card.update_card(before, facts).startswith(before) and section in model_card.update_card(before, facts)
    again = model_card.update_card(before, facts)
    assert model_card.update_card(again, facts) == again
    for odd in (
        b"<!-- /ckpttool -->\n",
        b"a<!-- /ckpttool -->\n<!-- ckpttool -->mine<!-- /ckpttool -->\nrest",
        b"<!-- ckpttool -->\n",
    ):
        once = model_card.update_card(odd + before, facts)  # marks that stand alone, or the wrong way round
        assert model_card.update_card(once, facts) == once and once.count(section) == 1
    assert b"<b>" not in section and b"my__b_trainer_" in section and b"load_file" in section


def test_a_card_on_a_branch_speaks_of_that_branch() -> None:
    """What it tells people to run finds these files, not those of main."""
    facts = model_card.CardFacts(
        "org/name", "1", "dcp", None, None, None, {"bfloat16": 1}, {}, False, False,
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, {}, "bf16",
    )  # fmt: skip
    section = model_card._make_section(facts)
    assert 'from_pretrained("org/name", revision="bf16", dtype="auto")' in section
    assert "ckpttool pull hf://org/name@bf16 " in section and "ckpttool verify hf://org/name@bf16 " in section
    assert "@" not in model_card._make_section(dataclasses.replace(facts, branch=None))


@pytest.mark.parametrize(
    ("config", "adapter", "wanted"),
    [
        ({"_name_or_path": "meta-llama/Llama-3.2-1B"}, {}, "meta-llama/Llama-3.2-1B"),
        ({"_name_or_path": "a/b"}, {"base_model_name_or_path": "Qwen/Qwen3-8B"}, "Qwen/Qwen3-8B"),
        ({"_name_or_path": "/home/me/model"}, {}, None),
        ({"_name_or_path": "./model"}, {}, None),
        ({"_name_or_path": "models/llama"}, {}, None),
        ({"_name_or_path": "run7/checkpoint-500"}, {}, None),
        ({"_name_or_path": "tests/fake_hub.py"}, {}, None),
        ({"_name_or_path": "org/name"}, {}, None),
        ({"_name_or_path": "gpt2"}, {}, None),
        ({"_name_or_path": 3}, {}, None),
    ],
)  # fmt: skip
def test_base_model(monkeypatch: pytest.MonkeyPatch, config: Any, adapter: Any, wanted: str | None) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    facts = model_card.CardFacts("org/name", "1", "dcp", None, None, None, {}, {}, False, False, config, adapter)
    assert model_card.find_base_model(facts) == wanted


# ------------------------------------------------------------------------------------------------- what is never pushed


def zipped(name: str) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as z:
        z.writestr(name, b"x")
    return out.getvalue()


SECRETS = {
    "a Hugging Face token": '{"x": "hf_' + "aB3dE5fG7h" * 4 + '"}',
    "an AWS access key": "id: AKIA" + "ABCDEFGH12345678",
    "a private key": "-----BEGIN " + "OPENSSH PRIVATE KEY-----\nb3Blbn\n",
    "a GitHub token": "x ghp_" + "a1B2" * 10,
    "an API key": "sk-proj-" + "a1B2c3D4" * 5,
    "a Slack token": "xoxb-" + "123456789012-abcdef",
    "a URL with a password": "https://" + "me:hunter22@example.com/x",
    "a Hugging Face token in UTF-16": ('{"x": "hf_' + "aB3dE5fG7h" * 4 + '"}').encode("utf-16").decode("latin-1"),
    "a Hugging Face token, escaped": '{"x": "\\u0068f_' + "aB3dE5fG7h" * 4 + '"}',
    "a GitLab token": "glpat-" + "a1B2c3D4e5F6g7H8i9J0",
    "an npm token": "npm_" + "a1B2c3" * 6,
    "an API key of payments": "sk_live_" + "a1B2c3D4e5F6g7H8",
    "a JSON web token": "eyJhbGciOiJIUzI1NiJ9." + "eyJzdWIiOiIxMjM0In0.dozjgNryP4J3jVmNHl0w5N",
    "what a request is authorised by": '{"Authorization": "Bearer 0a1b2c3d4e5f60718293"}',
    "the key of an account": "AccountName=x;AccountKey=" + "a1B2c3D4e5F6g7H8" * 5 + "==;",
    "a signed URL": "https://x.org/k?X-Amz-Signature=" + "0a1b2c3d4e5f6071" * 4,
    "a URL with a short password": "s3://u:" + "pw1@h/db",
    "a URL with a password alone": "https://:" + "hunter22@h/",
    "a password of .netrc": "machine api.wandb.ai\n  login user\n  password 0a1b2c3d4e5f60718293a4b5c6d7e8f901234567",
    'what its key "wandb_key" says': '{"wandb_key": "0a1b2c3d4e5f60718293a4b5c6d7e8f901234567"}',
    'what its key "runKey" says': '{"runKey": "0a1b2c3d4e5f60718293a4b5c6d7e8f901234567"}',
    'what its key "pwd" says': '{"pwd": "Zx81mQ0pL22vB7nR5tY"}',
    'what its key "passphrase" says': '{"passphrase": "correct-horse-battery"}',
    'what its key "api-key" says': '["--api-key", "0a1b2c3d4e5f60718293a4b5c6d7e8f9"]',
    'what its key "api-key" says, in a line': "run --api-key 0a1b2c3d4e5f60718293a4b5c6d7e8f9 --x",
    'what its key "token" says': '{"token": ["0a1b2c3d4e5f60718293a4b5c6d7e8f9"]}',
    'what its key "hub_token" says, in a text': '{"x": "Namespace(hub_token=\\"0a1b2c3d4e5f60718293a4b5c6d7e8f9\\")"}',
    'what its key "hub_token" says, in a dict': '{"a": {"data": {"$dict": [[1, "x"], ["hub_token", "abcd1234efgh5678ijkl"]]}}}',
    'what its key "api_key" says, of a tuple': '{"a": {"data": {"$dict": [[{"$tuple": ["a", "api_key"]}, "abcd1234efgh5678ijkl"]]}}}',
    'what its key "api_key" says, in a pair': '{"a": {"data": [["api_key", "abcd1234efgh5678ijkl"]]}}',
    "a Hugging Face token in bytes": '{"a": {"data": {"$bytes": "'
    + base64.b64encode(b"hf_" + b"aB3dE5fG7h" * 4).decode() + '"}}}',
    'what its key "api_key" says': '{"api_key": "0a1b2c3d4e5f60718293a4b5c6d7e8f901234567"}',
    'what its key "WANDB_API_KEY" says': "WANDB_API_KEY=0a1b2c3d4e5f60718293a4b5c6d7e8f901234567\n",
    'what its key "password" says': '{"db": {"password": "correct horse battery"}}'.replace(" horse", "-horse").replace(" b", "-b"),
    'what its key "hub_token" says': "hub_token: 0a1b2c3d4e5f60718293a4b5c6d7e8f9\n",
    'what its key "trainer.secret" says': '{\n"trainer.secret": {"path": ["trainer", "secret"], "data": "Zx81mQ0pL22vB7nR5tY"}\n}\n',
}  # fmt: skip


@pytest.mark.parametrize("kind", SECRETS)
def test_secrets_are_found(kind: str) -> None:
    data = SECRETS[kind].encode("latin-1")
    found = screening.find_forbidden_kind(data)
    assert found is not None and (kind.startswith((found, "a URL with")) or found.startswith("what its key"))
    with pytest.raises(Unsafe, match=r"conf/x\.json seems to contain") as e:
        screening.refuse_forbidden([("conf/x.json", data)])
    assert e.value.exit_code == 7
    for word in ("0a1b2c", "hunter22", "aB3dE5", "horse", "Zx81", "ABCDEFGH", "a1B2", "abcd1234", "dozjg", "pw1"):
        assert word not in str(e.value)


@pytest.mark.parametrize("protocol", range(6))
def test_pickles_are_found_by_content(protocol: int) -> None:
    for thing in ({"a": 1}, [1, 2.5, "x"], os.path.join, 7, "text", (None, True)):
        with pytest.raises(Unsafe, match=r"tokenizer\.model is a pickle"):
            screening.refuse_forbidden([("tokenizer.model", pickle.dumps(thing, protocol))])
    calls = pickle.dumps(Path("x"), protocol)  # what follows is not read by pickle.load
    assert screening.find_forbidden_kind(calls + b"\n{}\nand more") == "a pickle"


def test_archives_are_found() -> None:
    """What nobody has looked into is not pushed."""
    array = io.BytesIO()
    numpy.save(array, numpy.array([1]))
    made = [
        gzip.compress(b"x"),
        bz2.compress(b"x"),
        lzma.compress(b"x"),
        zipped("x.txt"),
        b"#!\n" + zipped("x"),
        array.getvalue(),
    ]
    for data in made:
        with pytest.raises(Unsafe, match=r"tokenizer\.model is an archive: nobody can see"):
            screening.refuse_forbidden([("tokenizer.model", data)])


def test_zips_of_torch_are_found() -> None:
    out = io.BytesIO()
    torch.save({"w": torch.zeros(2)}, out)
    for data in (out.getvalue(), zipped("archive/data.pkl"), zipped("x/data.pkl")[:60] + b"data.pkl"):
        assert screening.find_forbidden_kind(data) == "a pickle"


ORDINARY = [
    b"", b".", b"{}", b"I am a text.\n", b"(a.\n", b"c.", b"]", b"N.\n\n!\n", b"K.M.", b"vocab\nwith\nlines.",
    b"\x0a\x0e\x0a\x05<unk>\x15\x00\x00\x00\x00\x18\x02",  # the beginning of a sentencepiece model
    json.dumps({"pad_token": "<pad>", "eos_token": {"content": "</s>"}, "token": "<|reserved_special_token_123456|>"}).encode(),
    json.dumps({"password": 1234, "secret": 99, "token": 12, "api_key": 5, "token_type_ids_1234567890": 4, "sk-": 7}).encode(),
    json.dumps({"hub_token": "<HUB_TOKEN>", "hf_token": None, "api_key": "${OPENAI_API_KEY}", "access_token": "your_token_12345"}).encode(),
    b"{%- set token = message['role'] + '\\n' %}{{ bos_token }}{{ tokens[12].token }}",
    b"max_position_embeddings: 131072\ntokenizer_class: LlamaTokenizerFast\nsecret: None\n",
    b'{"auto_map": {"AutoModel": "modeling.Model"}, "_name_or_path": "https://huggingface.co/org/name@main"}',
    "".join(f"{t} {k}\n" for k, t in enumerate(["IQ==", "IyQ=", "c2stYWJj"])).encode(),
    b"sk-learn-is-a-package-in-python3-for-ml", b'{"sk-learn2abcdefghijklmnopqrs": 5}', b"(in the beginning\nfoo\n.", b"cat\ndog\n.\nand more\n",
    json.dumps({"private_key": "/home/user/.ssh/id_rsa2024", "access_token": "https://example.com/oauth2/token01", "PWD": "/home/me/project"}).encode(),
    json.dumps({"dataset_key": "imagenet_1k_2012_train_split", "image_key": "observation.images.top_camera_1", "mask_token": "extra_id_99_abcdefgh"}).encode(),
    json.dumps(["password", "administrator", "token", "characteristically", "secret", "service-account"]).encode(),
    json.dumps({"proxy": "http://user:password@proxy", "url": "https://x.org:8080/a@b", "text": "a bearer of good news from afar"}).encode(),
]  # fmt: skip


def test_ordinary_files_are_not_found() -> None:
    files = [p for p in FIXTURES.rglob("*.json") if p.parent.name in ("hf_ref", "ckpt", "ckpt_sharded")]
    assert len(files) > 10
    for data in [*ORDINARY, *(p.read_bytes() for p in files)]:
        assert screening.find_forbidden_kind(data) is None, data[:200]


def test_large_files_are_looked_through_quickly() -> None:
    """What could make a search go over a text again and again: runs without an end, keys without a value."""
    for piece in (
        "0123abcd",
        "aB3+/",
        "a.",
        "token",
        "sk-a",
        '"api_key": ',
        "hf_ ",
        "https://a:",
        "https://a:b",
        "eyJhbGci.",
        "machine login ",
        '["api_key",',
        "bearer a",
        "(" * 9,
        "eyJ0b2tlbiI6",
    ):
        assert screening.find_forbidden_kind((piece * (500_000 // len(piece))).encode()) is None


def test_an_adapter(hub: Hub, tmp_path: Path) -> None:
    """--adapter: its weights alone, as PEFT saves them; the weights of a model in the repository are left alone."""
    names = [f"base_model.model.model.layers.0.self_attn.q_proj.lora_{k}.default.weight" for k in "AB"]
    state = {names[0]: torch.ones(2, 8), names[1]: torch.ones(8, 2)}
    torch.save({"model": {**state, "base_model.model.lm_head.weight": torch.ones(4, 8)}}, tmp_path / "x.pt")
    said = {"peft_type": "LORA", "base_model_name_or_path": "Qwen/Qwen3-8B", "task_type": "CAUSAL_LM", "r": 2}
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "adapter_config.json").write_text(json.dumps(said))
    hub.commit("org/name", {"model.safetensors": b"12345678", "training_state/index.json": b"{}"})
    done = push(str(tmp_path / "x.pt"), URL, config=str(tmp_path / "conf"), options=ckpttool.HfOptions(adapter=True))
    assert done.deleted == [] and hub.bytes_at("org/name", "model.safetensors") == b"12345678"
    assert set(done.files) == {"adapter_model.safetensors", "adapter_config.json", "README.md", "ckpttool.json"}
    found = load(hub.bytes_at("org/name", "adapter_model.safetensors"))
    assert set(found) == {n.replace(".default", "") for n in names}
    card_ = ModelCard(hub.bytes_at("org/name", "README.md").decode())
    assert card_.data.library_name == "peft" and card_.data.base_model == "Qwen/Qwen3-8B"
    assert 'AutoPeftModelForCausalLM.from_pretrained("org/name")' in card_.text
    with pytest.raises(Unsupported, match="adapter"):
        push(str(DCP), URL, config=CONFIG, options=ckpttool.HfOptions(adapter=True))


def test_the_card_of_an_adapter_names_a_class_that_peft_loads_it_by() -> None:
    """AutoPeftModel raises for every task type, and without auto_mapping."""
    spec = importlib.util.find_spec("peft")
    assert spec is not None and spec.origin is not None
    classes = Path(spec.origin).with_name("auto.py").read_text()
    known = dict(re.findall(r'"(\w+)": PeftModel(For\w+),', classes))
    assert len(known) == 6
    for task, ending in known.items():
        assert re.search(rf"class AutoPeftModel{ending}\(.*\n.*\n *_target_peft_class = PeftModel{ending}\n", classes)
        adapter = {"base_model_name_or_path": "Qwen/Qwen3-8B", "task_type": task}
        facts = model_card.CardFacts("org/name", "1", "dcp", None, None, None, {}, {}, False, False, {}, adapter)
        assert f"from peft import AutoPeftModel{ending}\n" in model_card.update_card(None, facts).decode()
    of_none = {"base_model_name_or_path": "Qwen/Qwen3-8B", "task_type": None}
    facts = model_card.CardFacts("org/name", "1", "dcp", None, None, None, {}, {}, False, False, {}, of_none)
    text = model_card.update_card(None, facts).decode()
    assert "AutoPeftModel" not in text and 'PeftModel.from_pretrained(base, "org/name")' in text
    assert 'from_pretrained("Qwen/Qwen3-8B")' in text


def test_a_folder_with_a_secret_or_a_pickle_is_not_pushed(hub: Hub, tmp_path: Path) -> None:
    """Before anything is asked of the Hub."""
    shutil.copytree(LLAMA, tmp_path / "src")
    for name, data in (
        ("tokenizer_config.json", SECRETS["a Hugging Face token"].encode()),
        ("tokenizer.model", pickle.dumps({})),
    ):
        (tmp_path / "src" / name).write_bytes(data)
        for dry_run in (False, True):
            with pytest.raises(Unsafe, match=name):
                push(str(tmp_path / "src"), URL, dry_run=dry_run)
        (tmp_path / "src" / name).unlink()
    assert not hub.seen
    for name in ("tokenizer.pkl.gz", "tokenizer.npy"):
        (tmp_path / "src" / name).write_bytes(gzip.compress(pickle.dumps({})))
    done = push(str(tmp_path / "src"), URL)
    assert any("not copied" in n and "tokenizer.npy, tokenizer.pkl.gz" in n for n in done.notes)
    assert not any(n.startswith("tokenizer.") for n in head(hub))


def test_no_name_of_a_tensor_is_a_secret(hub: Hub, tmp_path: Path) -> None:
    """Names are in the headers of weights and in ckpttool.json."""
    torch.save({"model": {"hf_" + "aB3dE5fG7h" * 4 + ".weight": torch.zeros(2, 2)}}, tmp_path / "x.pt")
    with pytest.raises(Unsafe, match="a Hugging Face token") as e:
        push(str(tmp_path / "x.pt"), URL)
    assert "aB3dE5" not in str(e.value) and not hub.seen


def test_no_value_of_the_whole_state_is_a_secret(hub: Hub, tmp_path: Path) -> None:
    """values.json is looked at too."""
    torch.save(
        {"model": {"w": torch.zeros(2, 2)}, "args": {"wandb": {"api_key": "0a1b2c3d4e5f60718293a4b5c6d7e8f901234567"}}},
        tmp_path / "x.pt",
    )
    with pytest.raises(Unsafe, match=r"training_state/values\.json") as e:
        push(str(tmp_path / "x.pt"), URL, options=ckpttool.HfOptions(include_optimizer=True))
    assert "0a1b2c" not in str(e.value) and not hub.seen


def test_files_without_a_version_are_hashed_every_time(
    hub: Hub, large: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nobody can tell whether they are those of the last time; a server that sends neither ETag nor Last-Modified."""
    monkeypatch.setattr(Source, "has_versions", lambda self: False)
    first = push(str(large), URL)
    assert first.commit and any("gives no versions" in n for n in first.notes) and not list(tmp_path.rglob("*.jsonl"))
    nothing_is_hashed(monkeypatch)
    with pytest.raises(AssertionError, match="hashed again"):
        push(str(large), URL)


def test_nothing_of_the_client_is_shown_when_a_repository_is_read(hub: Hub) -> None:
    """Its warnings name URLs that are signed."""
    push(str(LLAMA), URL)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda r: said.append(r.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("huggingface_hub")
    logger.setLevel(logging.WARNING)
    logger.addHandler(handler)
    try:
        times: Counter[str] = Counter()

        def rule(method: str, path: str) -> int | None:
            times[path] += 1
            return 503 if times[path] == 1 else None

        hub.rule = rule
        ckpttool.digest(URL)
    finally:
        logger.removeHandler(handler)
    assert hub.did(503) > 1 and said == []


def test_the_journal_holds_no_secret_and_is_ones_own(hub: Hub, tmp_path: Path) -> None:
    push(str(DCP), URL, config=CONFIG)
    (journal,) = (tmp_path / "cache").rglob("*.jsonl")
    assert journal.stat().st_mode & 0o777 == 0o600 and OWNER not in journal.read_text()
    journal.write_bytes(journal.read_bytes()[:-9])  # a line that was cut off counts for nothing
    assert push(str(DCP), URL, config=CONFIG).commit is None
    said = journal.read_bytes()
    sha256 = record(hub)["files"]["model.safetensors"]["sha256"].encode()
    assert sha256 in said
    journal.write_bytes(
        said.replace(sha256, sha256[::-1]) + b'\n{"record": {}}\n{"file": "model.safetensors"}\n5 5\n' + b"[" * 100_000
    )
    assert push(str(DCP), URL, config=CONFIG).commit is None
    journal.unlink()
    os.mkfifo(journal)
    before = record(hub)
    done = push(str(DCP), URL, config=CONFIG)
    assert done.commit is None, {k: (before.get(k), v) for k, v in record(hub).items() if before.get(k) != v}


def test_the_same_push_later_from_another_machine_is_no_new_commit(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(str(DCP), URL, config=CONFIG)
    next((tmp_path / "cache").rglob("*.jsonl")).unlink()  # a journal, which has the record
    first = record(hub)["created"]
    clock = type("Later", (), {"now": lambda zone: datetime.now(zone) + timedelta(seconds=90)})
    monkeypatch.setattr(recorded, "datetime", clock)
    assert push(str(DCP), URL, config=CONFIG).commit is None
    assert record(hub)["created"] == first


def test_hashes_of_other_bytes_are_dropped(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that became another one, although its identity does not say so."""
    identities = Source.identities
    monkeypatch.setattr(Source, "identities", lambda self: {n: (0, 0, i[2], 0, 0) for n, i in identities(self).items()})
    shutil.copytree(LLAMA, tmp_path / "src")
    hub.rule = lambda method, path: 403 if "/info/lfs" in path else None
    with pytest.raises(RemoteError, match="the token does not allow this"):
        push(str(tmp_path / "src"), URL)  # hashed, not sent
    hub.rule = lambda method, path: None
    path = tmp_path / "src" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(RemoteError, match=r"its hashes were deleted\. Run the same command again"):
        push(str(tmp_path / "src"), URL)
    assert push(str(tmp_path / "src"), URL).commit
    assert hub.bytes_at("org/name", "model.safetensors")[-3:] == data[-3:]
