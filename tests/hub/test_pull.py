"""pull, with the real huggingface_hub against the small Hub of hub.py: one commit, the digests of the push, any layout."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_hub import STRANGER, Hub
from huggingface_hub.utils import close_session
from peers import FIXTURES, difference, load_dcp, load_hf, tensors_of
from safetensors.torch import load, save

import ckpttool
from ckpttool.errors import Corrupt, DestinationExists, RemoteError, UsageError
from ckpttool.hub import client
from ckpttool.hub.pull import pull
from ckpttool.hub.push import push
from ckpttool.storage import retries

URL = "hf://org/name"
LLAMA = FIXTURES / "hf_llama" / "ckpt"
DCP = FIXTURES / "fsdp2_w3" / "ckpt"
CONFIG = str(FIXTURES / "fsdp2_w3" / "hf_ref")

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    monkeypatch.setattr(retries, "POLICY", retries.RetryPolicy(first_wait_seconds=0.001))
    monkeypatch.setattr(client, "_WAIT", 0.001)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with Hub() as hub:
        hub.environment(monkeypatch, tmp_path)
        yield hub
        close_session()


def digest(path: object) -> Any:
    return ckpttool.digest(str(path)).digest


def other(data: bytes) -> bytes:
    """The same file with other weights."""
    return save({k: t + 1 for k, t in load(data).items()}, metadata={"format": "pt"})


def test_push_and_pull(hub: Hub, tmp_path: Path) -> None:
    """The weights of a DCP of three ranks come back for two, equal; the commit is in the record."""
    pushed = push(str(DCP), URL, config=CONFIG)
    done = pull(URL, tmp_path / "dcp", world_size=2)
    assert done.commit == pushed.commit and done.compared == len(load_hf_names(hub))
    assert done.result.digest == pushed.digest == digest(tmp_path / "dcp")
    assert any("training from it starts with a new optimizer" in n for n in done.notes)
    wanted = {k: t for k, t in tensors_of(load_dcp(DCP)).items() if k.startswith("model.")}
    assert not difference(tensors_of(load_dcp(tmp_path / "dcp")), wanted)
    record = json.loads((tmp_path / "dcp" / "ckpttool.json").read_text())
    assert record["source"]["commit"] == done.commit and record["world_size"] == 2
    assert record["source"]["url"].startswith(URL)
    assert ckpttool.verify(f"{URL}@{done.commit}", against=tmp_path / "dcp").against["verdict"] == "equal"


def load_hf_names(hub: Hub) -> set[str]:
    return set(load(hub.bytes_at("org/name", "model.safetensors")))


def test_the_whole_state_comes_back(hub: Hub, tmp_path: Path) -> None:
    pushed = push(str(DCP), URL, config=CONFIG, options=ckpttool.HfOptions(include_optimizer=True))
    done = pull(URL, tmp_path / "dcp", world_size=5)
    assert done.result.digest == pushed.digest == digest(DCP) and "optim" in pushed.digest
    assert ckpttool.diff(tmp_path / "dcp", DCP).equal
    assert not any("only weights" in n for n in done.notes)
    assert done.compared == done.result.tensors
    part = pull(URL, tmp_path / "part", world_size=2, only=["model"])
    assert part.compared == part.result.tensors < done.compared
    weights = pull(URL, tmp_path / "hf", to="hf", config=CONFIG, drop=True)
    assert not any("only weights" in n for n in (*part.notes, *weights.notes))  # of the repository


@pytest.mark.parametrize("to", ["hf", "full"])
def test_other_layouts_and_casts(hub: Hub, tmp_path: Path, to: str) -> None:
    push(str(LLAMA), URL)
    path = tmp_path / ("x.pt" if to == "full" else "x")
    done = pull(URL, path, to=to, dtype="bf16")
    assert done.compared and done.result.layout_to == to
    assert digest(path) != digest(LLAMA)
    if to == "hf":
        assert {str(t.dtype) for t in load_hf(path).values()} == {"torch.bfloat16"}


@pytest.mark.parametrize("where", ["@main", "@v1", "@{old}"])
def test_revisions(hub: Hub, tmp_path: Path, where: str) -> None:
    """A branch that moves while it is read; a tag and a commit that are older."""
    old = push(str(LLAMA), URL).commit
    assert old
    hub.repos["org/name"].refs["v1"] = old
    newer = other(hub.bytes_at("org/name", "model.safetensors"))

    def rule(method: str, path: str) -> None:
        if "/resolve/" in path:
            hub.commit("org/name", {"model.safetensors": newer})

    hub.rule = rule
    done = pull(URL + where.format(old=old), tmp_path / "dcp", world_size=2)
    assert done.commit == old and done.result.digest == digest(LLAMA) and done.compared
    assert hub.repos["org/name"].refs["main"] != old


def test_weights_that_somebody_changed_later_are_not_compared(hub: Hub, tmp_path: Path) -> None:
    push(str(LLAMA), URL)
    hub.commit("org/name", {"README.md": b"mine"})
    assert pull(URL, tmp_path / "a", world_size=1).compared
    hub.commit("org/name", {"model.safetensors": other(hub.bytes_at("org/name", "model.safetensors"))})
    done = pull(URL, tmp_path / "b", world_size=1)
    assert not done.compared and any(
        "model.safetensors is not the file that ckpttool.json describes" in n for n in done.notes
    )
    assert done.result.digest != digest(LLAMA)
    hub.repos.clear()
    push(str(LLAMA), URL)
    record = json.loads(hub.bytes_at("org/name", "ckpttool.json"))
    record["files"] = {"adapter_model.safetensors": {"sha256": "0" * 64, "bytes": 8}}
    record["tensors"] = {"model.lora_A.weight": ["float32", [2], "0" * 64]}
    hub.commit("org/name", {"ckpttool.json": json.dumps(record).encode()})
    assert any("adapter_model.safetensors is not the file" in n for n in pull(URL, tmp_path / "f", world_size=1).notes)
    record["files"] = {}
    hub.commit("org/name", {"ckpttool.json": json.dumps(record).encode()})
    done = pull(URL, tmp_path / "g", world_size=1)
    assert not done.compared and any("belongs to other weights" in n for n in done.notes)
    hub.commit("org/name", {"ckpttool.json": b"[]"})
    assert any("is not what a push writes" in n for n in pull(URL, tmp_path / "c", world_size=1).notes)
    hub.commit("org/name", {"ckpttool.json": b"[" * 100_000})
    assert any("is not what a push writes" in n for n in pull(URL, tmp_path / "e", world_size=1).notes)
    hub.commit("org/name", {"ckpttool.json": None})
    assert any("has no ckpttool.json" in n for n in pull(URL, tmp_path / "d", world_size=1).notes)


def test_bytes_that_are_not_those_that_were_pushed(hub: Hub, tmp_path: Path) -> None:
    """The Hub tells the SHA-256 of the push and serves other weights: found by the digests, nothing is left."""
    push(str(LLAMA), URL)
    sha256 = hub.repos["org/name"].at("main").files["model.safetensors"].sha256
    assert sha256
    hub.objects[sha256] = other(hub.objects[sha256])
    with pytest.raises(Corrupt, match="do not have the digest that was recorded"):
        pull(URL, tmp_path / "dcp", world_size=2)
    assert not (tmp_path / "dcp").exists()


@pytest.mark.parametrize("what", ["cut", "drop", 500, 429])
def test_failures_on_the_way(hub: Hub, tmp_path: Path, what: int | str) -> None:
    push(str(LLAMA), URL)
    count = [0]

    def rule(method: str, path: str) -> int | str | None:
        count[0] += 1
        return what if count[0] % 3 == 0 else None

    hub.rule = rule
    assert pull(URL, tmp_path / "dcp", world_size=2).result.digest == digest(LLAMA)
    assert hub.did(what) > 2


def test_refusals(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    push(str(LLAMA), URL)
    (tmp_path / "there").mkdir()
    with pytest.raises(DestinationExists):
        pull(URL, tmp_path / "there")
    for target in ("s3://bucket/name", "name", "hf://datasets/org/name"):
        with pytest.raises(UsageError):
            pull(target, tmp_path / "dcp")
    for target in ("org/none", f"{URL}@none"):
        with pytest.raises(RemoteError, match="the repository or the revision does not exist"):
            pull(target, tmp_path / "dcp")
    for token, words in ((STRANGER, "does not exist"), ("hf_WrongWrongWrongWrongWrong0123456", "hf auth login")):
        monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(RemoteError, match=words) as e:
            pull(URL, tmp_path / "dcp")
        assert token not in str(e.value)
    assert not (tmp_path / "dcp").exists()


def test_the_command(hub: Hub, tmp_path: Path) -> None:
    """The default is dcp; the commit and the digests are on stdout."""
    commit = push(str(LLAMA), URL).commit
    done = subprocess.run(
        [sys.executable, "-m", "ckpttool", "pull", URL, tmp_path / "dcp", "--world-size", "8"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"commit {commit}\n")
    assert "blake3:{model}".format(**digest(LLAMA)) in done.stdout
    assert (
        "hf://org/name -> dcp for 8 ranks" in done.stderr and "digests equal to those that were pushed" in done.stderr
    )
    assert ckpttool.inspect(tmp_path / "dcp").ranks == 8
