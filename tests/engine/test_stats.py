"""stats and show: equal to what numpy says of every tensor of every fixture, whoever reads, and easy on large tensors."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import ckpttool_here as run_here
from peers import FIXTURES
from safetensors.torch import save_file
from sampling import sample

import ckpttool
from ckpttool.engine.copy.tensor_statistics import TensorStatistics
from ckpttool.engine.page import describe_tensors
from ckpttool.engine.stats import COLUMNS, Statistics, stats
from ckpttool.errors import CkpttoolError, UsageError
from ckpttool.index.checkpoint import NOT_TORCHS

W3 = FIXTURES / "fsdp2_w3" / "ckpt"


def ckpttool_here(*args: Any) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    done = run_here(*args)
    return done.returncode, done.stdout, done.stderr


def by_numpy(x: np.ndarray[Any, Any]) -> dict[str, Any]:
    """The same of an array in memory, in float64."""
    wide = np.abs(x.astype("c16")) if x.dtype.kind == "c" else x.astype("f8")
    wide = wide.reshape(-1)
    fine = wide[np.isfinite(wide)]
    counts = {
        "elements": wide.size, "nan": int(np.isnan(wide).sum()), "infinite": int(np.isinf(wide).sum()), "zeros": int((fine == 0).sum()),
    }  # fmt: skip
    if not fine.size:
        return {**counts, **dict.fromkeys(("norm", "mean", "std", "min", "max"))}
    numbers = {
        "norm": np.linalg.norm(fine),
        "mean": fine.mean(),
        "std": fine.std(),
        "min": fine.min(),
        "max": fine.max(),
    }
    return {**counts, **{k: float(v) for k, v in numbers.items()}}


def agree(found: TensorStatistics, x: np.ndarray[Any, Any], name: str) -> None:
    want = by_numpy(x)
    for key, value in want.items():
        got = getattr(found, key)
        scale = abs(want["norm"] or 0.0) if key in ("mean", "std") else abs(value or 0)
        if key in ("norm", "mean", "std") and value is not None:
            assert math.isclose(got, value, rel_tol=1e-12, abs_tol=1e-12 * scale), (name, key)
        else:
            assert got == value, (name, key)


def all_statistics(top: Path, depth: int = 3) -> Iterator[tuple[Path, dict[str, Any], Statistics]]:
    """The statistics of every checkpoint below a folder of the fixtures, and what it takes to read it."""
    flat = top.parent / "flat_layout.json"
    how: dict[str, Any] = {"flat_layout": flat} if top.name == "ckpt" and flat.exists() else {}
    try:
        yield top, how, stats(top, exponents=True, **how)
    except CkpttoolError:
        for path in sorted(top.iterdir()) if top.is_dir() and depth else ():
            if path.suffix in (".pt", ".zst") or path.is_dir():
                yield from all_statistics(path, depth - 1)


@pytest.mark.slow
def test_every_tensor_of_every_fixture_has_the_statistics_that_numpy_computes_and_the_page_shows_them() -> None:
    tensors = opened = 0
    layouts, dtypes = set(), set()
    every = sorted(path for path in FIXTURES.iterdir() if path.is_dir())
    # those of maps take most of the time, since transformers is asked for the names of each model
    chosen = sample("folders whose statistics are computed", every, [x for x in every if not x.name.startswith("maps")])
    for path, how, found in (x for folder in chosen for x in all_statistics(folder)):
        assert found.index is not None
        opened += 1
        layouts.add(found.index.layout)
        shown = json.loads(json.dumps(describe_tensors(found.index, found)))
        with ckpttool.open(path, **how) as ckpt:
            assert shown["names"] == [r.name for r in found.rows] == list(ckpt)
            for i, row in enumerate(found.rows):
                entry = ckpt[row.name]
                assert shown["dtypes"][shown["dtype"][i]] == row.dtype == entry.dtype
                assert tuple(shown["shapes"][shown["shape"][i]]) == row.shape == entry.shape
                assert shown["bytes"][i] == entry.nbytes
                for key in ("norm", "mean", "std", "min", "max", "zeros", "nan", "infinite", "elements"):
                    got, want = shown["statistics"][key][i], getattr(row.numbers, key)
                    assert got == want if type(want) is not float else math.isclose(got, want, rel_tol=1e-6), (
                        path,
                        row.name,
                        key,
                    )
                low, counts = (shown["statistics"]["exponents"] or {i: None})[i] or (0, [])
                assert {low + k: n for k, n in enumerate(counts) if n} == row.numbers.exponents
                fresh = row.dtype not in dtypes
                # of each fixture a few, and the first of every dtype: the rest is of the same kinds, and takes time
                if (
                    (fresh or i % (1 + len(found.rows) // 5) == 0)
                    and entry.nbytes < 1 << 16
                    and row.dtype not in NOT_TORCHS
                ):
                    agree(row.numbers, entry.numpy(), f"{path} {row.name}")
                    dtypes.add(row.dtype)
                    tensors += 1
    assert opened > 140 and tensors > 600 and len(layouts) > 15, (opened, tensors, layouts)
    assert dtypes >= {"float32", "bfloat16", "float16", "float8_e4m3fn", "int64", "int32", "uint8", "bool"}, dtypes


def odd(path: Path) -> Path:
    g = torch.Generator().manual_seed(5)
    x = torch.randn(3, 300_000, generator=g) * 1e-3 + 5.0  # several pieces, a mean far from zero
    holes = torch.randn(131, 7, generator=g)
    holes[3, 2], holes[5, 5], holes[9, 0], holes[0, :4] = math.nan, math.inf, -math.inf, 0.0
    torch.save(
        {"model": {
            "x": x, "bf16": x.bfloat16(), "holes": holes, "none": torch.full((3,), math.nan), "empty": torch.zeros(0, 5),
            "scalar": torch.tensor(-2.5), "large": torch.tensor([2**62 + 1, -(2**63)]), "flags": torch.tensor([True, False, True]),
            "complex": torch.tensor([3 + 4j, 0j]), "f8": holes[10:].to(torch.float8_e4m3fn), "same.0.w": x[:1], "same.1.w": x[1:],
        }}, path,
    )  # fmt: skip
    return path


@pytest.mark.slow
@pytest.mark.parametrize("workers", [None, 2])
def test_hard_numbers_are_counted_and_left_out_whoever_reads(workers: int | None, tmp_path: Path) -> None:
    path = odd(tmp_path / "odd.pt")
    found = stats(path, workers=workers, exponents=True)
    assert found.digest == ckpttool.digest(path).digest
    rows = {r.name.removeprefix("model."): r for r in found.rows}
    with ckpttool.open(path) as ckpt:
        for name, row in rows.items():
            array = ckpt[f"model.{name}"].numpy()
            if name != "large":
                agree(row.numbers, array, name)
            fine = np.abs(array.astype("c16" if name == "complex" else "f8"))
            fine = fine[np.isfinite(fine) & (fine > 0)]
            powers, counts = np.unique(np.floor(np.log2(fine)), return_counts=True)
            assert row.numbers.exponents == dict(zip(powers.astype(int).tolist(), counts.tolist(), strict=True)), name
    assert (rows["large"].numbers.min, rows["large"].numbers.max) == (-(2**63), 2**62 + 1)
    assert (rows["holes"].numbers.nan, rows["holes"].numbers.infinite) == (1, 2)
    assert (rows["none"].numbers.norm, rows["empty"].numbers.mean) == (None, None)


def test_folded_rows_are_as_one_tensor_and_sorting_puts_what_has_no_number_last(tmp_path: Path) -> None:
    found = stats(odd(tmp_path / "odd.pt"))
    folded = {r.name: r for r in found.folded().rows}
    both, whole = folded["model.same.#.w"], folded["model.x"]
    assert both.tensors == 2 and both.shape is None and both.numbers.elements == whole.numbers.elements
    for key in ("norm", "mean", "std", "min", "max"):
        assert getattr(both.numbers, key) == pytest.approx(getattr(whole.numbers, key), rel=1e-12)
    by_norm = [r.numbers.norm for r in found.sorted_by("norm").rows]
    known = [n for n in by_norm if n is not None]
    assert known == sorted(known, reverse=True) and by_norm[len(known) :] == [None, None]
    with pytest.raises(UsageError, match="no such column"):
        found.sorted_by("colour")


def test_how_far_tensors_moved_is_measured_against_another_layout(tmp_path: Path) -> None:
    model = {
        "layers.0.w": torch.ones(131, 3),
        "layers.1.w": torch.ones(131, 3),
        "b": torch.zeros(2),
        "gone": torch.ones(1),
        "cut": torch.ones(4),
    }
    torch.save({"model": model, "optim": {}}, tmp_path / "a.pt")
    after = {
        "layers.0.w": torch.full((131, 3), 1.5),
        "layers.1.w": torch.ones(131, 3).bfloat16(),
        "b": torch.ones(2),
        "new": torch.ones(1),
        "cut": torch.ones(2, 2),
    }
    save_file(after, tmp_path / "b.safetensors")
    found = stats(tmp_path / "b.safetensors", against=tmp_path / "a.pt")
    moved = {r.name: r.moved for r in found.rows}
    assert moved == {
        "model.layers.0.w": 0.5,
        "model.layers.1.w": 0.0,
        "model.b": math.inf,
        "model.new": None,
        "model.cut": None,
    }
    assert (found.only_here, found.only_there) == (["model.new"], ["model.gone"])
    assert found.not_compared == ["model.cut"]
    for folder in (tmp_path / "c", tmp_path / "d"):  # codes are not numbers, and have none of this either
        folder.mkdir()
        weight = torch.arange(16, dtype=torch.int8).reshape(4, 4)
        save_file({"l.weight": weight, "l.weight_scale": torch.ones(4, 1)}, folder / "model.safetensors")
        group = {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
        }
        how = {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "config_groups": {"g": group},
            "ignore": [],
        }
        (folder / "config.json").write_text(json.dumps({"quantization_config": how}))
    coded = stats(tmp_path / "c", against=tmp_path / "d")
    assert all(r.codes and r.moved is None for r in coded.rows) and len(coded.not_compared) == 2
    folded = {r.name: r.moved for r in found.folded().rows}
    assert folded["model.layers.#.w"] == pytest.approx(math.hypot(0.5 * 1.5, 0) / math.hypot(1.5, 1.0), rel=1e-6)


def test_the_command_prints_a_table_json_and_csv(tmp_path: Path) -> None:
    code, out, err = ckpttool_here("stats", W3, "--only", "model", "--sort", "norm")
    lines = out.splitlines()
    assert code == 0 and lines[0].split()[:4] == ["name", "tensors", "dtype", "shape"], (out, err)
    assert "model.model.layers.#.mlp.up_proj.weight" in out and len(lines) == 13
    code, out, _ = ckpttool_here("stats", W3, "--each", "--csv", "-q")
    rows = list(csv.DictReader(out.splitlines()))
    assert code == 0 and tuple(rows[0]) == COLUMNS and len(rows) == 84
    code, out, _ = ckpttool_here("stats", W3, "--each", "--json", "-q")
    assert [r["name"] for r in json.loads(out)["rows"]] == [r["name"] for r in rows]
    for words in (["--sort", "colour"], ["--exponents"], ["--csv", "--json"]):
        assert ckpttool_here("stats", W3, *words)[0] == 2, words


def test_show_prints_what_an_index_of_numpy_selects_and_reads_no_more(tmp_path: Path) -> None:
    names = (
        "model.lm_head.weight[2:5, :8]",
        "optim.param_groups.0.lr",
        "model.model.norm.weight[-1]",
        "*lm_head.weight[...]",
    )
    code, out, err = ckpttool_here("show", W3, *names, "--json")
    assert code == 0, err
    rows = json.loads(out)
    with ckpttool.open(W3) as ckpt:
        head, norm = ckpt["model.lm_head.weight"], ckpt["model.model.norm.weight"]
        assert rows[0]["values"] == head[2:5, :8].tolist() and rows[0]["shape"] == [131, 36]
        assert (rows[1]["values"], rows[1]["dtype"]) == (0.01, None)
        assert rows[2]["values"] == norm[-1].item()
        assert rows[3]["values"] == head.numpy().tolist()
        whole = np.array2string(head.numpy(), threshold=0, max_line_width=100)
    code, out, _ = ckpttool_here("show", W3, "model.lm_head.weight")
    assert out.split("\n", 1)[1].rstrip("\n") == whole, "the ends of each dimension, as numpy prints them"
    for bad, said in (
        ("model.lm_head.weight[1, 99]", "99 is outside dimension 1"), ("model.lm_head.weight[a]", "neither an integer nor a slice"),
        ("model.lm_head.weigh", "Did you mean 'model.lm_head.weight'"), ("model.lm_head.weight[1,2,3]", "has 2 dimensions"),
    ):  # fmt: skip
        code, _, err = ckpttool_here("show", W3, bad)
        assert code == 2 and said in err, err


def test_a_large_tensor_is_shown_by_its_ends_and_not_printed_whole(tmp_path: Path) -> None:
    path = tmp_path / "large.safetensors"
    header = {"w": {"dtype": "BF16", "shape": [1 << 16, 1 << 14], "data_offsets": [0, 1 << 31]}}
    text = json.dumps(header).encode()
    with path.open("wb") as f:  # 2 GB of zeros that take no place
        f.write(len(text).to_bytes(8, "little") + text)
        f.truncate(8 + len(text) + (1 << 31))
    code, out, err = ckpttool_here("show", path, "model.w", "model.w[-1, 5:7]")
    assert (
        code == 0 and "[65536, 16384]" in out and "[0. 0. 0. ... 0. 0. 0.]" in out and out.rstrip().endswith("[0. 0.]")
    ), err
    for index in ("[:, :]", "[...]", "[::60000]"):
        code, _, err = ckpttool_here("show", path, f"model.w{index}")
        assert code == 2 and "selects more than" in err, index
