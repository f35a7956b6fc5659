"""The README, docs/reference/cli.md, docs/how-to/archive.md, docs/how-to/stores.md and docs/how-to/hub.md are true: their commands and their Python run,
their tables are those of the code."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from hub import Hub
from huggingface_hub.utils import close_session
from pages import program
from ranks import torchrun
from stores import moto
from typer.testing import CliRunner

import ckpttool
from ckpttool.cli.main import app
from ckpttool.errors import EXIT_CODES

REPOSITORY = Path(__file__).resolve().parents[1]
FIXTURES = REPOSITORY / "fixtures"
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
MIGRATIONS = README.partition("\n## Migrations\n")[2].partition("\n## ")[0]
CLI = (REPOSITORY / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
ARCHIVE = (REPOSITORY / "docs" / "how-to" / "archive.md").read_text(encoding="utf-8")
STORES = (REPOSITORY / "docs" / "how-to" / "stores.md").read_text(encoding="utf-8")
HUB = (REPOSITORY / "docs" / "how-to" / "hub.md").read_text(encoding="utf-8")
ENVIRONMENT = {
    **os.environ,
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "HF_HUB_OFFLINE": "1",
    "COLUMNS": "160",
}


def leaves(group: Any, above: tuple[str, ...] = ()) -> dict[str, Any]:
    """{command: what it is}; those of a group are "audit export", "audit ledger show"."""
    out: dict[str, Any] = {}
    for name, found in group.commands.items():
        path = (*above, name)
        out |= leaves(found, path) if hasattr(found, "commands") else {" ".join(path): found}
    return out


COMMANDS = leaves(typer.main.get_command(app))


def blocks(text: str, language: str) -> list[str]:
    """The fenced code blocks of one language, or of some: "sh|console"."""
    return re.findall(rf"^```(?:{language})\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def command_lines(text: str) -> list[str]:
    """The commands of ckpttool and tar in shell blocks, in order; those of a terminal session begin with "$ "."""
    joined = [block.replace("\\\n", "") for block in blocks(text, "sh|console")]
    lines = [line.removeprefix("$ ") for block in joined for line in block.splitlines()]
    return [line for line in lines if line.startswith(("ckpttool ", "tar "))]


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    """A folder with the checkpoints that the documents name."""
    shutil.copytree(FIXTURES / "fsdp2_w2_groups" / "ckpt", tmp_path / "run" / "ckpt")
    config = json.loads((FIXTURES / "fsdp2_w3" / "hf_ref" / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}), encoding="utf-8")
    shutil.copy(FIXTURES / "full_w1" / "ckpt" / "ids.pt", tmp_path / "numbered.pt")
    shutil.copy(FIXTURES / "full_w1" / "ckpt" / "fqn.pt", tmp_path / "names.pt")
    shutil.copytree(FIXTURES / "zero3_w4" / "ckpt", tmp_path / "zero3")
    shutil.copytree(FIXTURES / "fsdp1_w2_tied" / "ckpt", tmp_path / "fsdp1")
    described = FIXTURES / "fsdp1_w2_tied" / "flat_layout.json"
    ckpttool.convert(tmp_path / "fsdp1", tmp_path / "fsdp1.pt", flat_layout=described)
    (tmp_path / "store").mkdir()
    (tmp_path / "keys").mkdir()
    make_keys(tmp_path / "keys")
    return tmp_path


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with Hub() as hub:
        hub.environment(monkeypatch, tmp_path / ".home")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ".cache"))
        yield hub
        close_session()


def outside() -> dict[str, str]:
    """What a child is told of the Hub and of the store."""
    return {k: v for k, v in os.environ.items() if k.startswith(("AWS_", "HF_", "NO_PROXY", "XDG_CACHE_HOME"))}


def make_keys(folder: Path) -> None:
    """sign.pem and sign.pub, an EC key; archive.key and archive.pub, one of age."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from pyrage import x25519

    pem = serialization.Encoding.PEM
    key = ec.generate_private_key(ec.SECP256R1())
    plain = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "sign.pem").write_bytes(plain)
    public = key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    (folder / "sign.pub").write_bytes(public)
    identity = x25519.Identity.generate()
    (folder / "archive.key").write_text(f"{identity}\n")
    (folder / "archive.pub").write_text(f"{identity.to_public()}\n")


def run_all(lines: list[str], desk: Path, **more: str) -> None:
    """Every line, or block of lines, exits 0, one after the other in one folder; `more` is environment."""
    assert lines
    for line in lines:
        done = subprocess.run(
            ["bash", "-e", "-u", "-o", "pipefail", "-c", line],
            cwd=desk,
            env={**ENVIRONMENT, **more},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"


def run_here(texts: list[str], desk: Path) -> None:
    """Blocks of lines as `run_all` runs them; what is ckpttool and nothing else in this process, which takes a fifth of the
    time."""
    assert texts
    for text in texts:
        if "$" in text:
            run_all([text], desk, **outside())
            continue
        for line in text.splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] != ["ckpttool"]:
                run_all([line], desk)
                continue
            done = CliRunner().invoke(app, words[1:])
            assert done.exit_code == 0, f"{line}\n{done.output}{done.exception!r}"


def test_every_command_of_the_readme_runs_and_then_its_python(desk: Path, hub: Hub) -> None:
    lines, apart = command_lines(README), command_lines(MIGRATIONS)
    assert 0 < len(apart) < len(lines)
    run_all([line for line in lines if line not in apart], desk, **outside())  # the others run in the next test
    (script,) = blocks(README, "python")
    done = subprocess.run(
        [sys.executable, "-c", script + "\nimport sys; assert 'torch' not in sys.modules"],
        cwd=desk,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


#: The guide that begins so -> what the README converts there, the ranks and the engine of the job that goes on.
GUIDES = {
    "deepspeed -> fsdp2": ("zero3_w4", 3, "fsdp2"),
    "fsdp2 -> deepspeed": ("fsdp2_w2_groups", 3, "zero3"),
    "deepspeed -> deepspeed": ("zero3_w4", 2, "zero3"),
    "fsdp1 -> fsdp2": ("fsdp1_w2_tied", 3, "fsdp2"),
    "fsdp2 -> fsdp1": ("fsdp1_w2_tied", 4, "fsdp1"),
}


@pytest.mark.live
@pytest.mark.slow
def test_the_lines_of_every_migration_guide_resume_in_the_engine_they_are_for(desk: Path) -> None:
    run_all(command_lines(MIGRATIONS), desk)
    guides = {block[2:].partition(":")[0]: block for block in blocks(README, "py")}
    assert {name for name in guides if "->" in name} == GUIDES.keys()
    for world, engine in dict.fromkeys((world, engine) for _, world, engine in GUIDES.values()):
        words: list[str] = []
        for k, (name, (case, ranks, kind)) in enumerate(GUIDES.items()):
            if (ranks, kind) == (world, engine):
                lines = desk / f"guide-{k}.py"
                lines.write_text(guides[name], encoding="utf-8")
                words += [str(FIXTURES / case), str(desk), engine, str(lines)]
        out = desk / "verdicts.json"
        said = torchrun(world, "readme_guides.py", *words, "--out", str(out))
        assert out.exists(), said[-4000:]
        verdicts = json.loads(out.read_text())
        out.unlink()
        assert [v for v in verdicts if not v["ok"]] == []
        assert all(len(v["losses"]) == 3 for v in verdicts)


def test_every_command_of_the_reference_runs(desk: Path, hub: Hub) -> None:
    run_all(["ckpttool convert run/ckpt hf --to hf --config llama", *command_lines(CLI)], desk, **outside())


def test_every_recipe_of_the_archive_guide_runs_as_it_stands_and_then_its_reader(
    desk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("age", "zstd", "openssl"):
        program(name)
    shutil.rmtree(desk / "store")
    shutil.rmtree(desk / "keys")
    s3 = moto()
    s3.environment(monkeypatch)
    s3.client().create_bucket(Bucket="models-archive", ObjectLockEnabledForBucket=True)
    run_all(blocks(ARCHIVE, "sh"), desk, **outside())
    (script,) = blocks(ARCHIVE, "python")
    done = subprocess.run([sys.executable, "-c", script], cwd=desk, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# huggingface_hub itself says that to httpx with every PUT
@pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning")
def test_every_recipe_of_the_guides_to_stores_and_to_the_hub_runs_as_it_stands(
    desk: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    s3 = moto()
    s3.environment(monkeypatch)
    client = s3.client()
    client.create_bucket(Bucket="models")
    hub.upload("org/base", FIXTURES / "hf_llama" / "ckpt")
    monkeypatch.chdir(desk)
    run_here(blocks(STORES, "sh"), desk)
    names = [f"base_model.model.model.layers.0.self_attn.q_proj.lora_{k}.default.weight" for k in "AB"]
    (desk / "lora").mkdir()
    torch.save({"model": {names[0]: torch.ones(2, 8), names[1]: torch.ones(8, 2)}}, desk / "lora" / "step3.pt")
    said = {"peft_type": "LORA", "base_model_name_or_path": "org/base", "task_type": "CAUSAL_LM", "r": 2}
    (desk / "lora" / "adapter_config.json").write_text(json.dumps(said))
    run_here(blocks(HUB, "sh"), desk)
    found = client.list_objects_v2(Bucket="models")["Contents"]
    assert {"from-the-hub/.metadata", "run7/step3/.metadata", "run7/step3.pt"} <= {o["Key"] for o in found}
    assert hub.repos["org/llama-3"].private and {"bf16", "refs/pr/1"} <= hub.repos["org/llama-3"].refs.keys()


def test_the_readme_shows_the_table_of_exit_codes() -> None:
    table = README.partition("<!-- exit-codes -->")[2].partition("<!-- /exit-codes -->")[0]
    rows = re.findall(r"^\| (\d+) \| (.*?) \|$", table, re.MULTILINE)
    assert tuple((int(code), meaning) for code, meaning in rows) == EXIT_CODES


def test_the_readme_shows_the_output_of_what_it_runs_as_the_demo_prints_it(desk: Path) -> None:
    """The words, not the numbers: those of the pasted session come from a larger model."""
    shown = blocks(README, "console")[0].splitlines()
    done = subprocess.run(
        ["bash", "-c", shown[0][2:]], cwd=desk, env=ENVIRONMENT, capture_output=True, text=True, check=True
    )

    def words(lines: list[str]) -> list[str]:
        return re.findall(r"[A-Za-z_]{3,}", " ".join(lines))

    assert words(done.stdout.splitlines()) == words(shown[1:])


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_has_help_and_a_section_in_both_documents(command: str) -> None:
    assert COMMANDS[command].help
    assert f"\n### {command.split()[0]}\n" in README
    assert f"ckpttool {command} " in README or f"ckpttool {command}\n" in README
    assert f"\n## {command}\n" in CLI


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_option_is_in_the_section_of_its_command(command: str) -> None:
    section = CLI.partition(f"\n## {command}\n")[2].partition("\n## ")[0]
    for parameter in COMMANDS[command].params:
        for option in parameter.opts:
            if option.startswith("--") and option != "--help":
                assert f"`{option}" in section, f"{option} of {command} is not documented"


def test_no_section_documents_an_option_that_its_command_does_not_have() -> None:
    for command in COMMANDS:
        section = CLI.partition(f"\n## {command}\n")[2].partition("\n## ")[0]
        known = {o for parameter in COMMANDS[command].params for o in (*parameter.opts, *parameter.secondary_opts)}
        tables = "".join(line for line in section.splitlines() if line.startswith("| `"))
        assert set(re.findall(r"`(--[a-z-]+)", tables)) <= known


def test_every_file_that_the_documents_link_to_is_there() -> None:
    for document in [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]:
        for target in re.findall(r"\]\((?!http)([^)#]+)", document.read_text(encoding="utf-8")):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_every_test_that_the_security_promises_name_is_there() -> None:
    text = (REPOSITORY / "docs" / "explanation" / "security.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\btests/[a-z_/]+(?:\.py)?", text))
    assert named
    assert [path for path in sorted(named) if not (REPOSITORY / path).exists()] == []
