"""`change`: tensors that functions of the caller compute on the way, in any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peers import FIXTURES
from safetensors.numpy import load_file, save_file

import ckpttool
from ckpttool import Page
from ckpttool.errors import Corrupt, Interrupted, Unsupported, UsageError

AWKWARD = FIXTURES / "awkward_w3" / "ckpt"


def double(page: Page) -> Any:
    return page.values * 2


@pytest.mark.slow
@pytest.mark.parametrize("source", ["awkward_w3", "zero3_w4", "zero2_w3_bf16", "fsdp2_w2_zstd", "fsdp2_w3_tied_bf16"])
@pytest.mark.parametrize("to", ["dcp", "full"])
def test_what_matches_is_what_the_function_computes_and_the_rest_is_as_it_was(
    source: str, to: str, tmp_path: Path
) -> None:
    here = FIXTURES / source / "ckpt"
    ranks = {"world_size": 3} if to == "dcp" else {}
    with ckpttool.open(here) as before:
        names = [
            n for n in before if n.startswith(("model.", "optim.state")) and before[n].dtype in ("float32", "bfloat16")
        ]
        tied = [n for n in names if "embed" in n or "head" in n]  # in the order that has the second name first
        changed = {*names[::2], *tied}
        change = dict.fromkeys(sorted(changed, reverse=True), double)
        result = ckpttool.convert(here, tmp_path / "out", to=to, change=change, **ranks)
        assert result.verified and all(result.changed[n] == "changed by the caller" for n in changed)
        assert not changed & set(result.kept)
        with ckpttool.open(tmp_path / "out") as after:
            assert set(after) == set(before)
            for name in before:
                a, b = before[name].numpy(), after[name].numpy()
                assert a.dtype == b.dtype and a.shape == b.shape
                assert np.array_equal(a * 2 if name in changed else a, b, equal_nan="float" in before[name].dtype), name
    assert ckpttool.verify(tmp_path / "out", read_data=True).recorded == "equal"


@pytest.mark.slow
def test_pages_are_boxes_that_cover_every_element_once_and_another_checkpoint_is_read_by_them(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    shapes = {"wide": (3, 700_001), "deep": (2, 5, 300_000), "rows": (131, 7), "scalar": (), "empty": (0, 4)}
    files = [{n: rng.random(s, "f4") for n, s in shapes.items()} for _ in range(2)]
    for i, tensors in enumerate(files):
        save_file(tensors, tmp_path / f"{i}.safetensors")
    seen: dict[str, Any] = {n: np.zeros(s, int) for n, s in shapes.items()}
    most = 0

    def average(page: Page) -> Any:
        nonlocal most
        most = max(most, page.values.size)
        seen[page.name.removeprefix("model.")][page.index] += 1
        return (page.values.astype("f8") + other[page.name][page.index]) / 2

    with ckpttool.open(tmp_path / "1.safetensors") as other:
        ckpttool.convert(tmp_path / "0.safetensors", tmp_path / "out.safetensors", change={"model.*": average})
    assert most <= 1 << 20 and all((s == 1).all() for s in seen.values())
    found = load_file(tmp_path / "out.safetensors")
    for name in shapes:
        assert np.array_equal(found[name], ((files[0][name].astype("f8") + files[1][name]) / 2).astype("f4"))


def test_numbers_are_rounded_to_the_dtype_as_torch_does(tmp_path: Path) -> None:
    x = torch.randn(131, 5, dtype=torch.bfloat16)
    torch.save({"model": {"w": x}}, tmp_path / "a.pt")
    ckpttool.convert(tmp_path / "a.pt", tmp_path / "b.pt", change={"*": lambda page: page.values.astype("f4") / 3})
    found = torch.load(tmp_path / "b.pt", weights_only=True)["model"]["w"]
    assert torch.equal(found, (x.float() / 3).bfloat16())


def test_what_cannot_be_changed_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    w = torch.ones(4, 2)
    tree = {"model": {"a": w, "b": w, "half": torch.ones(3, dtype=torch.float16), "n": torch.tensor([1, 2])}}
    torch.save(tree, tmp_path / "a.pt")

    def broken(page: Page) -> Any:
        raise ZeroDivisionError("mine")

    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"model.c": double}, UsageError, r"change 'model\.c': no tensor has such a name\. The first name is model\.a"),
        ({"model.a": double}, UsageError, "tied weights.*Change both with one function"),
        ({"model.half": lambda page: page.values[1:]}, UsageError, r'made \[2\] of \[3\] of "model.half"'),
        ({"model.n": lambda page: page.values / 2}, UsageError, 'made float64 of "model.n", which is int64'),
        (
            {"model.half": lambda page: page.values.astype("f4") * 1e6},
            Unsupported,
            "3 numbers of .* do not fit into float16",
        ),
        ({"model.half": broken}, ZeroDivisionError, "mine"),
    ]
    for change, kind, words in cases:
        with pytest.raises(kind, match=words):
            ckpttool.convert(tmp_path / "a.pt", tmp_path / "out.pt", change=change)
        assert [p.name for p in tmp_path.iterdir()] == ["a.pt"]
    with pytest.raises(Unsupported, match=r"holds codes or scales.*dequantize"):
        ckpttool.plan(
            FIXTURES / "quantised" / "ct_fp8_block" / "ckpt",
            tmp_path / "out",
            to="dcp",
            world_size=1,
            change={"*": double},
        )
    ckpttool.convert(tmp_path / "a.pt", tmp_path / "out.pt", change={"model.[ab]": double})
    found = torch.load(tmp_path / "out.pt", weights_only=True)["model"]
    assert found["a"].data_ptr() == found["b"].data_ptr() and torch.equal(found["a"], 2 * w)


def test_a_changed_tensor_of_a_damaged_source_is_found_by_its_recorded_digest(tmp_path: Path) -> None:
    ckpttool.convert(AWKWARD, tmp_path / "hf", to="hf")
    file = tmp_path / "hf" / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-3] ^= 1
    file.write_bytes(raw)
    with pytest.raises(Corrupt, match="digest"):
        ckpttool.convert(tmp_path / "hf", tmp_path / "out", to="hf", change={"model.*": lambda page: page.values})


def test_a_run_with_another_function_takes_nothing_of_an_interrupted_one(tmp_path: Path) -> None:
    tensors = {f"w{i}": np.full((300, 1000), i, "f4") for i in range(6)}
    save_file(tensors, tmp_path / "a.safetensors")

    def stop(page: Page) -> Any:
        if page.name == "model.w5":
            raise KeyboardInterrupt
        return page.values + 100

    with pytest.raises(Interrupted, match="the same command starts over"):
        ckpttool.convert(tmp_path / "a.safetensors", tmp_path / "out", to="dcp", world_size=1, change={"*": stop})
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]
    ckpttool.convert(tmp_path / "a.safetensors", tmp_path / "out", to="dcp", world_size=1, change={"*": double})
    with ckpttool.open(tmp_path / "out") as after:
        assert all((after[f"model.{n}"].numpy() == 2 * x).all() for n, x in tensors.items())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.safetensors", "out"]
