"""URLs of the Hub on the command line, and --config where it is no folder; with the small Hub of fake_hub.py."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import ckpttool_here as run
from fake_hub import Hub
from huggingface_hub.utils import close_session
from peers import FIXTURES

from ckpttool.hub import client
from ckpttool.hub.push import push
from ckpttool.storage import retries

DCP, CONFIG = FIXTURES / "fsdp2_w3" / "ckpt", str(FIXTURES / "fsdp2_w3" / "hf_ref")
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


@pytest.mark.parametrize("branch", ["feature/bf16", "a/b/c", "plain"])
def test_the_url_that_push_prints_is_one_that_every_command_reads(hub: Hub, branch: str, tmp_path: Path) -> None:
    done = push(str(DCP), "hf://org/name", config=CONFIG, revision=branch)
    url = f"{done.url}@{done.revision}"
    assert url == f"hf://org/name@{branch}"
    found = run("inspect", url, "--json")
    assert found.returncode == 0 and json.loads(found.stdout)["layout"] == "hf", found.stderr
    for command in (["verify", url, "--read-data"], ["digest", url], ["inspect", f"{url}/model.safetensors"]):
        assert run(*command).returncode == 0
    assert run("convert", url, tmp_path / "out", "--to", "dcp", "-n", "2").returncode == 0
    assert run("diff", DCP, tmp_path / "out", "--only", "model").returncode == 0


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("hf://org/name@nope", "the Hub has the repository, and no such revision of it."),
        ("hf://org/name@no/such/branch", "the Hub has the repository, and no such revision of it."),
        ("hf://org/nothing", "the Hub has no such repository, or the token may not see it."),
        ("hf://org/name/none", "the Hub has the repository, and no such file or folder in it."),
        ("hf://org/name@main/none", "the Hub has the repository, and no such file or folder in it."),
    ],
)
def test_what_the_hub_does_not_have_is_told_from_what_it_hides(hub: Hub, url: str, words: str) -> None:
    push(str(DCP), "hf://org/name", config=CONFIG)
    done = run("inspect", url)
    assert done.returncode == 3 and f"{url}: {words}" in done.stderr, done.stderr


@pytest.mark.parametrize("url", ["hf://org/private", "hf://org/nothing"])
def test_without_a_token_a_repository_may_be_private(hub: Hub, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    push(str(DCP), "hf://org/private", config=CONFIG)
    monkeypatch.delenv("HF_TOKEN")
    done = run("inspect", url)
    assert done.returncode == 9 and done.stderr.count("\n") == 2
    assert f"{url}: the Hub has no such repository, or it is private, and there is no token." in done.stderr
    assert "`hf auth login` or set HF_TOKEN" in done.stderr and "For more" not in done.stderr


def test_a_config_that_is_neither_a_folder_nor_a_model_is_told_apart_from_a_hub_that_is_away(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    for given, words in (
        ("org/nowhere", "there is no such folder, and no model of that name on the Hub"), ("./nowhere", "no such folder. Check the path."),
        ("/no/such/folder", "no such folder. Check the path."), ("a:b", "no model of that name on the Hub"),
    ):  # fmt: skip
        done = run("convert", DCP, out, "--to", "hf", "--config", given)
        assert done.returncode == 3 and words in done.stderr and "\\n" not in done.stderr, done.stderr
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    done = run("convert", DCP, out, "--to", "hf", "--config", "nowhere")
    assert done.returncode == 9 and "did not give a model of that name" in done.stderr and "\\n" not in done.stderr
    assert not out.exists()
