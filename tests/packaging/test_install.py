"""The sdist and the wheel made from it, taken by pip in an empty venv, where only what `pip install ckpttool` brings can be
imported: what works without torch and transformers, and what the rest says."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

import pytest
from fake_hub import Hub
from packaging.metadata import parse_email
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from peers import FIXTURES

ROOT = Path(__file__).parents[2]
DCP, CONFIG = FIXTURES / "fsdp2_w3" / "ckpt", FIXTURES / "fsdp2_w3" / "hf_ref"
MOE, MOE_CONFIG = FIXTURES / "fsdp2_w3_moe" / "ckpt", FIXTURES / "fsdp2_w3_moe" / "hf_ref"


def backend(call: str, folder: Path) -> str:
    """What a function of the build backend returns for a tree."""
    code = f"import setuptools.build_meta as backend\nprint(backend.{call})"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tree)
    for name in ("ckpttool", "converters"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("tests", "fixtures", "docs", "bench"):
        os.symlink(ROOT / name, tree / name)
    return out / backend(f"build_sdist({str(out)!r})", tree)


@pytest.fixture(scope="session")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as tar:
        tar.extractall(tree, filter="data")
    return sdist.parent / backend(f"build_wheel({str(sdist.parent)!r})", next(tree.iterdir()))


def needed(wheel: Path) -> set[str]:
    """Names of what pip installs with a wheel, by the metadata of the wheel and of what is installed here."""
    with zipfile.ZipFile(wheel) as z:
        data = z.read(next(n for n in z.namelist() if n.endswith(".dist-info/METADATA")))
    todo, out = parse_email(data)[0]["requires_dist"], set[str]()
    while todo:
        wanted = Requirement(todo.pop())
        name = canonicalize_name(wanted.name)
        if name in out or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
            continue
        out.add(name)
        todo += distribution(name).requires or []
    return out


@pytest.fixture(scope="session")
def slim(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bin/ of a venv with the wheel and what it requires, which are links to what is installed here."""
    venv = tmp_path_factory.mktemp("slim")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    site = next(venv.glob("lib/python*/site-packages"))
    for name in needed(wheel):
        found = distribution(name)
        for top in {f.parts[0] for f in found.files or () if f.parts[0] not in ("..", "__pycache__")}:
            os.symlink(str(found.locate_file(top)), site / top)
    pip = [sys.executable, "-m", "pip", "--python", str(venv / "bin" / "python"), "install"]
    done = subprocess.run([*pip, "--no-index", str(wheel)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return venv / "bin"


def run(slim: Path, *args: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([str(slim / "ckpttool"), *map(str, args)], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr and "bug of ckpttool" not in done.stderr, done.stderr
    return done


def python(slim: Path, code: str, cwd: Path) -> str:
    done = subprocess.run([str(slim / "python"), "-c", code], capture_output=True, text=True, check=False, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_sdist_holds_the_package_and_no_fixtures(sdist: Path) -> None:
    with tarfile.open(sdist) as tar:
        names = {m.name.partition("/")[2] for m in tar.getmembers()}
    assert {n.partition("/")[0] for n in names if n} == {
        "CHANGELOG.md", "LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "ckpttool", "ckpttool.egg-info", "converters",
        "pyproject.toml", "setup.cfg", "setup.py",
    }  # fmt: skip
    assert sdist.stat().st_size < 3_200_000  # 1.2 MB of it is the kit of the acid test


def test_the_wheel_holds_every_module_and_what_they_read(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as z:
        inside = {n for n in z.namelist() if ".dist-info/" not in n and ".data/" not in n}
    files = [p for p in (ROOT / "ckpttool").rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    mine = {str(p.relative_to(ROOT)) for p in files}
    assert inside == mine | {f"ckpttool/{p.relative_to(ROOT)}" for p in (ROOT / "converters").rglob("*.py")}
    read = (
        "resume/report/alerts.yml",
        "resume/report/templates/report.html.j2",
        "pages/templates/page.css",
        "pages/templates/inspect.js",
    )
    assert {f"ckpttool/{name}" for name in read} <= inside


def test_the_man_page_is_installed_and_has_every_command(wheel: Path, slim: Path) -> None:
    with zipfile.ZipFile(wheel) as z:
        (name,) = (n for n in z.namelist() if ".data/" in n)
        text = z.read(name).decode()
    assert name.endswith(".data/data/share/man/man1/ckpttool.1")
    assert (slim.parent / "share" / "man" / "man1" / "ckpttool.1").read_text() == text
    for command in ("convert", "resume\\-verify", "audit ledger verify", "pull"):
        assert f"\n.SS ckpttool {command} [OPTIONS]" in text
    assert "\\-\\-max\\-shard\\-size SIZE" in text and "ckpttool diff run/ckpt step3.pt" in text
    if shutil.which("groff"):
        done = subprocess.run(
            ["groff", "-man", "-Tutf8", "-ww", "-z"], input=text, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0 and not done.stderr, done.stderr


def test_slim_is_without_torch_and_transformers(wheel: Path) -> None:
    assert not needed(wheel) & {"torch", "transformers", "deepspeed", "s3fs", "pyrage", "model-signing"}
    assert len(needed(wheel)) < 40


def test_conversions_without_torch(slim: Path, tmp_path: Path) -> None:
    code = f"""
import importlib.util, json, ckpttool
assert not any(importlib.util.find_spec(n) for n in ("torch", "transformers", "s3fs"))
assert "site-packages" in ckpttool.__file__, ckpttool.__file__
model = ckpttool.digest({str(DCP)!r}).digest
source = {str(DCP)!r}
for to, more in (("dcp", dict(world_size=2)), ("full", {{}}), ("zero3", dict(world_size=3)), ("zero1", dict(world_size=2)),
                 ("universal", {{}}), ("fsdp1", dict(world_size=2)), ("hf", dict(config={str(CONFIG)!r}))):
    done = ckpttool.convert(source, to + (".pt" if to == "full" else ""), to=to, **more)
    assert done.verified and done.digest["model"] == model["model"], to
    assert to == "hf" or done.digest["optim"] == model["optim"], to
    if to not in ("full", "hf"):
        source = to
again = ckpttool.convert("fsdp1", "cast", to="dcp", world_size=2, dtype="bf16")
print(json.dumps(sorted(n for n in ("torch", "transformers") if n in __import__("sys").modules)))
"""
    assert json.loads(python(slim, code, tmp_path)) == []
    with open(tmp_path / "hf" / "config.json") as f:
        assert json.load(f)["model_type"] == "llama"
    assert run(slim, "inspect", tmp_path / "zero3").returncode == 0
    assert run(slim, "verify", tmp_path / "universal", "--read-data", "--against", DCP).returncode == 0
    assert run(slim, "diff", tmp_path / "full.pt", tmp_path / "fsdp1", "--only", "model,optim").returncode == 0


def test_an_archive_without_torch(slim: Path, tmp_path: Path) -> None:
    archive = tmp_path / "a.tar.zst"
    assert run(slim, "audit", "export", DCP, archive).returncode == 0
    done = run(slim, "audit", "verify", archive)
    assert done.returncode == 0 and "sound (every hash)" in done.stderr


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with Hub() as hub:
        hub.environment(monkeypatch, tmp_path)
        yield hub


def test_push_of_a_plain_model_without_torch(slim: Path, hub: Hub) -> None:
    done = run(slim, "push", DCP, "hf://org/name", "--config", CONFIG)
    assert done.returncode == 0, done.stderr
    assert {"model.safetensors", "config.json"} <= set(hub.repos["org/name"].at("main").files)
    assert "were not compared with those of the model of config.json" in done.stderr
    assert "pip install 'ckpttool[torch]'" in done.stderr


TORCH, TRANSFORMERS = "pip install 'ckpttool[torch]'", "needs torch and transformers, which are not installed"
NEEDS = {
    "resume-verify": (
        ["resume-verify", DCP, "--config", CONFIG],
        f"resume-verify needs torch and transformers, which are not installed: {TORCH}",
    ),
    "names of the Hub": (["convert", MOE, "OUT", "--to", "hf", "--config", MOE_CONFIG], f"{TRANSFORMERS}: {TORCH}"),
    "order of the model": (
        ["convert", FIXTURES / "hf_llama" / "ckpt", "OUT", "--to", "fsdp1", "-n", "2", "--config", CONFIG], TRANSFORMERS,
    ),
    "signature": (
        ["audit", "export", DCP, "OUT.tar.zst", "--sign-key", "KEY"],
        "signing needs model-signing, which is not installed: pip install 'ckpttool[audit]'",
    ),
    "encryption": (
        ["audit", "export", DCP, "OUT.tar.zst.age", "--encrypt-to", "age1" + "q" * 58],
        "encryption needs pyrage, which is not installed: pip install 'ckpttool[audit]'",
    ),
    "s3": (["convert", DCP, "s3://b/x", "--to", "dcp"], "s3:// needs s3fs, which is not installed: pip install 'ckpttool[s3]'"),
    "gs": (["inspect", "gs://b/x"], "gs:// needs gcsfs, which is not installed: pip install 'ckpttool[gcs]'"),
    "az": (["inspect", "az://c/x"], "az:// needs adlfs, which is not installed: pip install 'ckpttool[azure]'"),
}  # fmt: skip


@pytest.mark.parametrize("what", NEEDS)
def test_what_needs_an_extra_says_so_and_writes_nothing(slim: Path, tmp_path: Path, what: str) -> None:
    arguments, said = NEEDS[what]
    shutil.copy(FIXTURES / "audit_store" / "sign.pub", tmp_path / "KEY")
    names = [str(a).replace("OUT", str(tmp_path / "out")).replace("KEY", str(tmp_path / "KEY")) for a in arguments]
    done = run(slim, *names)
    assert done.returncode == 2 and said in done.stderr, done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["KEY"]


def test_the_python_api_says_what_it_needs(slim: Path, tmp_path: Path) -> None:
    code = f"""
import ckpttool
for call in (lambda: ckpttool.storage_reader({str(DCP)!r}), lambda: ckpttool.load(None, None, {str(DCP)!r}),
             lambda: ckpttool.resume_verify({str(DCP)!r}, job="job.py:build")):
    try:
        call()
    except ckpttool.CkpttoolError as e:
        print(type(e).__name__, e)
"""
    rows = python(slim, code, tmp_path).splitlines()
    reader = f"MissingPackage loading into a live job needs torch, which is not installed: {TORCH}"
    assert rows == [
        reader,
        reader,
        f"MissingPackage resume-verify needs torch, which is not installed: {TORCH}",
    ]


def test_names_are_kept_where_the_user_says_so(slim: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run(slim, "convert", MOE, out, "--to", "hf", "--config", MOE_CONFIG, "--allow-name-mismatch")
    assert done.returncode == 0 and "names are kept as they are" in done.stderr, done.stderr
