"""Layouts of other packages: examples/my_layout, installed and found by its entry point, and what goes wrong with such."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from peers import FIXTURES
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
TRUTH = FIXTURES / "fsdp2_w3" / "truth.safetensors"
DCP = FIXTURES / "fsdp2_w3" / "ckpt"


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH with the example, installed by pip."""
    tree, out = tmp_path_factory.mktemp("example"), tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "examples" / "my_layout", tree, dirs_exist_ok=True)
    pip = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*pip, "--target", str(out), str(tree)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out


def run(*args: object, site: Path, ok: bool = True) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, "-m", "ckpttool", *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert (done.returncode == 0) is ok, done.stderr
    return done


def package(site: Path, name: str, code: str) -> None:
    """A distribution with a module and its layout, as an installer leaves it."""
    site.mkdir(exist_ok=True)
    (site / f"{name}.py").write_text(code)
    info = site / f"{name}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[ckpttool.layouts]\nx = {name}:LAYOUT\n")


def named(name: str) -> str:
    return (
        "from ckpttool.converters.full import LAYOUTS\nfrom dataclasses import is_dataclass, replace\n"
        f"x = LAYOUTS[0]\nLAYOUT = replace(x, name={name!r}) if is_dataclass(x) else x._replace(name={name!r})\n"
    )


def test_the_example_is_read_and_written(site: Path, tmp_path: Path) -> None:
    assert re.search(r"(?m)^npy +a folder of .npy files +read, write ", run("layouts", site=site).stdout)
    done = run("convert", DCP, tmp_path / "npy", "--to", "npy", "--drop", site=site)
    assert "read back and equal" in done.stderr
    truth = {n.removeprefix("model."): t for n, t in load_file(TRUTH).items() if n.startswith("model.")}
    found = {p.name.removesuffix(".npy"): np.load(p) for p in (tmp_path / "npy").glob("*.npy")}
    assert found.keys() == truth.keys()
    assert all(np.array_equal(found[n], t.numpy()) for n, t in truth.items())
    run("convert", tmp_path / "npy", tmp_path / "back", "--to", "dcp", "-n", "3", site=site)
    run("diff", DCP, tmp_path / "back", "--only", "model", site=site)
    run("convert", DCP, tmp_path / "norms", "--to", "npy", "--npy-only", "*norm*", "--drop", site=site)
    assert {p.name for p in (tmp_path / "norms").glob("*.npy")} == {f"{n}.npy" for n in truth if "norm" in n}
    run("convert", DCP, tmp_path / "small", "--to", "npy", "--npy-most", "40", "--no-npy-integers", "--drop", site=site)
    small = {f"{n}.npy" for n, t in truth.items() if t.numel() <= 40 and t.is_floating_point()}
    assert 0 < len(small) < len(truth) and {p.name for p in (tmp_path / "small").glob("*.npy")} == small
    said = run(
        "convert", DCP, tmp_path / "x", "--to", "npy", "--npy-most", "many", "--drop", site=site, ok=False
    ).stderr
    assert "--npy-most" in said and "not a valid integer" in said
    helped = run("convert", "--help", site=site).stdout
    assert "--npy-only GLOB" in helped and "--npy-most INTEGER" in helped and "--no-npy-integers" in helped
    refused = run("convert", DCP, tmp_path / "x", "--to", "dcp", "-n", "2", "--npy-only", "*", site=site, ok=False)
    assert "--npy-only applies to npy; this conversion writes dcp." in refused.stderr
    np.save(tmp_path / "npy" / "odd.npy", np.array(["text"]))
    assert "only row-major arrays of numbers are read" in run("inspect", tmp_path / "npy", site=site, ok=False).stderr


@pytest.mark.parametrize("future", ["", "from __future__ import annotations\n"])
def test_options_have_the_types_of_their_fields_however_these_are_written(tmp_path: Path, future: str) -> None:
    code = future + (
        "from dataclasses import dataclass, replace\nfrom typing import Optional\nfrom ckpttool.converters.full import LAYOUTS\n"
        "from ckpttool.layouts import option\n@dataclass(frozen=True)\nclass Own:\n    rows: int | None = option(None, 'Rows.')\n"
        "    part: Optional[float] = option(None, 'Part.')\n    quick: bool = option(False, 'Quick.')\n    name: str = option('a', 'Name.')\n"
        "def write(ckpt, source, options):\n    raise KeyError(options.of(Own))\n"
        "LAYOUT = replace(LAYOUTS[0], name='mine', options=Own, write=write, aliases=(), suffixes=('.mine',), reader_uses=())\n"
    )
    package(tmp_path / "site", "mine", code)
    given = ["--rows", "0", "--part", "0.5", "--quick", "--name", "b"]
    done = run("convert", DCP, tmp_path / "out.mine", "--to", "mine", *given, site=tmp_path / "site", ok=False)
    assert "Own(rows=0, part=0.5, quick=True, name='b')" in done.stderr
    assert (
        "a fault of the package mine, which adds a layout to ckpttool" in done.stderr
        and "bug of ckpttool" not in done.stderr
    )


def test_without_the_package_its_files_are_not_recognised(site: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "w.npy", np.zeros(3))
    assert "npy dir" in run("inspect", tmp_path, site=site).stdout.replace("checkpoint", "dir")
    assert run("inspect", tmp_path, site=tmp_path, ok=False).returncode == 3


@pytest.mark.parametrize(
    ("modules", "said"),
    [
        ({"broken": "import nothing_of_that_name"}, "broken (x = broken:LAYOUT) cannot be loaded: ModuleNotFoundError"),
        ({"dies": "raise SystemExit(3)"}, "dies (x = dies:LAYOUT) cannot be loaded: SystemExit"),
        ({"other": "LAYOUT = 3"}, "other (x = other:LAYOUT) is a int and not a ckpttool.layouts.Layout"),
        ({"mine": named("dcp")}, "mine (x = mine:LAYOUT) is named 'dcp', like one of ckpttool's own"),
        ({"one": named("new"), "two": named("new")}, "2 packages have a layout named 'new'"),
    ],
    ids=["no import", "exit", "no layout", "our name", "one name twice"],
)  # fmt: skip
def test_a_layout_that_cannot_be_used_is_named_and_left_out(tmp_path: Path, modules: dict[str, str], said: str) -> None:
    for name, code in modules.items():
        package(tmp_path / "site", name, code)
    done = run("inspect", DCP, site=tmp_path / "site")
    assert f"warning: The layout of {said}" in done.stderr or f"warning: {said}" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout.startswith("dcp checkpoint")
    assert "new" not in run("layouts", site=tmp_path / "site").stdout.split()
