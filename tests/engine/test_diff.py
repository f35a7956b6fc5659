"""diff: one flipped bit is found, and the numbers it reports are those of numpy and torch."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import ckpttool_here
from peers import FIXTURES
from safetensors.torch import save_file
from torch import Tensor

import ckpttool
from ckpttool.engine.diff import Difference, TensorDifference
from ckpttool.errors import Differs, UsageError
from ckpttool.index.checkpoint import ITEMSIZE


def compare(tmp_path: Path, a: dict[str, object], b: dict[str, object], **how: float) -> Difference:
    """diff of two state dicts, one as a full file and one as a DCP folder for three ranks."""
    torch.save({"model": a}, tmp_path / "a.pt")
    torch.save({"model": b}, tmp_path / "b.pt")
    ckpttool.convert(tmp_path / "b.pt", tmp_path / "b", to="dcp", world_size=3, force=True)
    return ckpttool.diff(tmp_path / "a.pt", tmp_path / "b", **how)


def one(tmp_path: Path, a: Tensor, b: Tensor, **how: float) -> TensorDifference:
    found = compare(tmp_path, {"w": a}, {"w": b}, **how)
    assert not found.equal
    (difference,) = found.data
    return difference


@pytest.mark.parametrize(
    "dtype", ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "int64", "uint8", "bool"]
)
def test_one_flipped_bit_anywhere_is_found_in_its_place(dtype: str, tmp_path: Path) -> None:
    a = (torch.arange(37 * 11) % 2).reshape(37, 11).to(getattr(torch, dtype))
    for row, column in ((0, 0), (13, 4), (36, 10)):
        b = a.clone()
        cell = b[row, column : column + 1].view(torch.uint8)
        cell[0] ^= 1
        found = one(tmp_path, a, b)
        assert (found.name, found.elements, found.differing) == ("model.w", 407, 1)
        assert found.first == found.worst == (row, column)


def test_checkpoints_that_are_equal_are_equal_across_layouts(tmp_path: Path) -> None:
    source = FIXTURES / "fsdp2_w2_groups" / "ckpt"
    ckpttool.convert(source, tmp_path / "out.pt", to="full")
    found = ckpttool.diff(source, tmp_path / "out.pt")
    assert found.equal
    assert found.tensors == 53
    assert not (found.only_in_a or found.only_in_b or found.values or found.data or found.dtypes or found.shapes)


def test_nan_equals_nan_of_the_same_bits_and_nothing_else(tmp_path: Path) -> None:
    a = torch.tensor([1.0, math.nan, 3.0])
    assert compare(tmp_path, {"w": a}, {"w": a.clone()}).equal
    found = one(tmp_path, a, torch.tensor([1.0, 2.0, 3.0]))
    assert (found.differing, found.nan_mismatch, found.first, found.max_abs) == (1, 1, (1,), 0.0)
    other = a.clone()
    other.view(torch.int32)[1] ^= 1  # another payload
    found = one(tmp_path, a, other)
    assert (found.differing, found.nan_mismatch) == (1, 0)
    assert compare(tmp_path, {"w": a}, {"w": other}, atol=1e-9).equal
    assert not compare(tmp_path, {"w": a}, {"w": torch.tensor([1.0, 2.0, 3.0])}, atol=1e9).equal


def test_minus_zero_is_not_zero_but_is_within_any_tolerance(tmp_path: Path) -> None:
    a, b = torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])
    found = one(tmp_path, a, b)
    assert (found.differing, found.max_abs, found.max_ulp, found.first) == (1, 0.0, 0, (0,))
    assert compare(tmp_path, {"w": a}, {"w": b}, atol=1e-30).equal


def test_infinities_differ_by_infinity_and_equal_themselves(tmp_path: Path) -> None:
    a = torch.tensor([math.inf, -math.inf, math.inf, 1.0])
    found = one(tmp_path, a, torch.tensor([math.inf, -math.inf, -math.inf, 2.0]))
    assert (found.differing, found.max_abs, found.worst) == (2, math.inf, (2,))
    assert not compare(tmp_path, {"w": a}, {"w": -a}, rtol=1.0, atol=1e30).equal
    assert not compare(tmp_path, {"w": torch.ones(4)}, {"w": a}, rtol=1e-5).equal


def test_names_dtypes_shapes_and_values_that_differ_are_listed(tmp_path: Path) -> None:
    torch.save({"model": {"a": torch.ones(3), "b": torch.ones(2, 3), "c": torch.ones(4), "d": torch.ones(5)},
                "step": 1, "name": "x"}, tmp_path / "a.pt")  # fmt: skip
    torch.save({"model": {"a": torch.ones(3).half(), "b": torch.ones(3, 2), "d": torch.ones(5), "e": torch.ones(1)},
                "step": 2, "lr": 1.0}, tmp_path / "b.pt")  # fmt: skip
    found = ckpttool.diff(tmp_path / "a.pt", tmp_path / "b.pt")
    assert not found.equal
    assert found.only_in_a == ["model.c", "extra.name"]
    assert found.only_in_b == ["model.e", "extra.lr"]
    assert found.dtypes == {"model.a": ("float32", "float16")}
    assert found.shapes == {"model.b": ((2, 3), (3, 2))}
    assert found.values == {"trainer.step": ("1", "2")}
    assert found.data == []
    assert found.tensors == 3
    assert ckpttool.diff(tmp_path / "a.pt", tmp_path / "b.pt", only=["model"]).values == {}


def test_a_cast_is_a_difference_of_dtypes_and_of_the_elements_that_were_rounded(tmp_path: Path) -> None:
    a = torch.randn(41, 9, generator=torch.Generator().manual_seed(0))
    b = a.to(torch.bfloat16)
    found = compare(tmp_path, {"w": a}, {"w": b})
    assert found.dtypes == {"model.w": ("float32", "bfloat16")}
    gap = (a.double() - b.double()).abs()
    assert found.data[0].differing == int((gap > 0).sum())
    assert found.data[0].max_abs == float(gap.max())
    assert found.data[0].max_rel == float((gap / b.double().abs()).max())
    assert found.data[0].max_ulp is None
    close = compare(tmp_path, {"w": a}, {"w": b}, rtol=2**-8)
    assert close.equal
    assert close.within_tolerance == 1


def test_tolerances_are_those_of_torch_allclose(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(300, generator=generator)
    b = a + 1e-4 * torch.randn(300, generator=generator)
    for rtol, atol in ((0.0, 1e-3), (0.0, 1e-5), (1e-2, 0.0), (1e-4, 1e-4), (1e-4, 3e-4), (1.0, 0.0)):
        wanted = bool(torch.allclose(a.double(), b.double(), rtol=rtol, atol=atol))
        assert compare(tmp_path, {"w": a}, {"w": b}, rtol=rtol, atol=atol).equal == wanted, (rtol, atol)


def steps(x: Tensor, n: int) -> Tensor:
    """Every element moved by n units in the last place, by numpy's own nextafter."""
    values = x.numpy().copy()
    for _ in range(n):
        values = np.nextafter(values, np.array(np.inf, dtype=values.dtype))
    return torch.from_numpy(values)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("n", [1, 2, 7])
def test_units_in_the_last_place_are_counted_as_nextafter_steps(dtype: torch.dtype, n: int, tmp_path: Path) -> None:
    for x in (1.0, -1.0, 1e-40, 0.0, -0.0, 3e38, -1e-45, 1.9999999):
        a = torch.tensor([x], dtype=dtype)
        found = one(tmp_path, a, steps(a, n))
        assert (found.max_ulp, found.differing) == (n, 1), x


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_units_in_the_last_place_of_short_floats(dtype: torch.dtype, tmp_path: Path) -> None:
    a = torch.tensor([1.0, -2.0, 0.25]).to(dtype)
    b = a.clone()
    b.view(torch.int16)[1] += 5
    assert one(tmp_path, a, b).max_ulp == 5
    b = torch.tensor([1.0, -2.0, -0.25]).to(dtype)
    found = one(tmp_path, a, b)
    assert (found.max_ulp, found.opposite_signs) == (None, 1)  # a distance through zero means nothing


def test_numbers_are_those_of_torch_on_a_large_tensor(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(2)
    a = torch.randn(2000, 700, generator=generator)
    b = a.clone()
    where = torch.randperm(a.numel(), generator=generator)[:1000]
    b.view(-1)[where] += torch.randn(1000, generator=generator) * 1e-3
    found = one(tmp_path, a, b)
    gap = (a.double() - b.double()).abs()
    assert found.differing == int((gap > 0).sum())
    assert found.max_abs == float(gap.max())
    assert found.max_rel == float((gap / b.double().abs()).max())
    assert found.worst == tuple(divmod(int(gap.argmax()), 700))
    assert found.first == tuple(divmod(int((gap.view(-1) > 0).nonzero()[0]), 700))


def test_large_integers_that_differ_by_one_differ_by_one(tmp_path: Path) -> None:
    a = torch.tensor([2**60, 5])
    found = one(tmp_path, a, a + torch.tensor([1, 0]))
    assert (found.differing, found.max_abs, found.max_ulp) == (1, 1.0, None)
    assert not compare(tmp_path, {"w": a}, {"w": a + 1}, atol=0.5).equal


DTYPES = [d for d in ITEMSIZE if hasattr(torch, d)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_command_compares_every_dtype_with_itself_and_with_others(dtype: str, tmp_path: Path) -> None:
    def saved(d: str, seed: int) -> Path:
        raw = torch.randint(
            0, 2 if d == "bool" else 256, (32 * ITEMSIZE[d],), generator=torch.Generator().manual_seed(seed)
        )
        torch.save(
            {"model": {"w": raw.to(torch.uint8).view(getattr(torch, d)).reshape(4, 8)}}, tmp_path / f"{d}{seed}.pt"
        )
        return tmp_path / f"{d}{seed}.pt"

    one = saved(dtype, 1)
    for other in {dtype, "float32", "float4_e2m1fn_x2", "bool", "complex64", "uint64", "float8_e8m0fnu"}:
        done = ckpttool_here("diff", one, saved(other, 2))
        assert done.returncode == 5, (other, done.stderr)
    assert ckpttool_here("diff", one, one).returncode == 0


def changed_model(tmp_path: Path) -> tuple[Path, Path]:
    """Two files of a model in which some of eight layers moved, signs turned, and names, shapes and NaN differ."""
    g = torch.Generator().manual_seed(3)
    a = {f"layers.{i}.w": torch.randn(131, 7, generator=g) for i in range(8)}
    b = {n: t.clone() for n, t in a.items()}
    for i in (1, 2, 6):
        b[f"layers.{i}.w"] += 1e-3 * i * torch.randn(131, 7, generator=g)
    b["layers.5.w"][3, 2] *= -1
    b["layers.6.w"][0, 0] = math.nan
    extra = {"head.w": torch.ones(3), "norm": torch.ones(4)}
    torch.save({"model": {**a, **extra}, "optim": {}}, tmp_path / "a.pt")
    torch.save({"model": {**b, "layers.9.w": torch.ones(2), "norm": torch.ones(5)}}, tmp_path / "b.pt")
    return tmp_path / "a.pt", tmp_path / "b.pt"


@pytest.mark.slow
@pytest.mark.parametrize("workers", [None, 2])
def test_relative_norms_and_the_summary_of_a_component_are_those_of_numpy(workers: int | None, tmp_path: Path) -> None:
    a, b = changed_model(tmp_path)
    found = ckpttool.diff(a, b, workers=workers)
    moved: dict[str, float] = {}
    apart, norms = [], []
    with ckpttool.open(a) as x, ckpttool.open(b) as y:
        for name in x:
            if name not in y or x[name].shape != y[name].shape:
                continue
            u, v = (side[name].numpy().astype("f8").ravel() for side in (x, y))
            apart.append(np.linalg.norm((u - v)[np.isfinite(u - v)]))
            norms.append(np.linalg.norm(v[np.isfinite(v)]))
            if not np.array_equal(u, v):
                moved[name] = apart[-1] / norms[-1]
    assert {t.name: t.moved for t in found.data} == pytest.approx(moved, rel=1e-12)
    part = found.components["model"]
    assert (part.equal, part.changed, part.other_shape, part.only_in_a, part.only_in_b) == (4, 4, 1, 1, 1)
    assert part.moved == pytest.approx(np.linalg.norm(apart) / np.linalg.norm(norms), rel=1e-12)
    assert part.max_abs == max(t.max_abs for t in found.data)
    assert [t.opposite_signs > 0 for t in found.data if t.name == "model.layers.5.w"] == [True]
    assert (
        found.changed == 4
        and json.loads(json.dumps(found.to_json(), allow_nan=False))["components"]["model"]["equal"] == 4
    )


def test_rows_are_sorted_folded_and_cut_and_the_rest_is_counted(tmp_path: Path) -> None:
    a, b = changed_model(tmp_path)
    found = ckpttool.diff(a, b)
    for order, key in (("moved", "moved"), ("abs", "max_abs"), ("rel", "max_rel")):
        values = [getattr(t, key) for t in found.sorted_by(order).data]
        assert values == sorted(values, reverse=True) and len(values) == 4, order
    assert found.sorted_by("ulp").data[0].opposite_signs == max(t.opposite_signs for t in found.data)
    with pytest.raises(UsageError, match="no such order"):
        found.sorted_by("size")
    (row,) = found.folded().data
    assert (row.name, row.tensors, row.differing) == ("model.layers.#.w", 4, sum(t.differing for t in found.data))
    distance, norm = (math.hypot(*(getattr(t, key) for t in found.data)) for key in ("distance", "norm"))
    assert row.moved == pytest.approx(distance / norm) and row.worst_name == found.sorted_by("abs").data[0].name
    done = ckpttool_here("diff", a, b, "--sort", "moved", "--top", 1)
    lines = [line for line in done.stdout.splitlines() if line.startswith("data:")]
    assert done.returncode == 5 and lines[1:] == ["data: ... 3 more tensors"]
    assert lines[0].startswith(f"data: {found.sorted_by('moved').data[0].name}: ")
    assert "4 equal, 4 changed, 1 of another shape, 1 only in A, 1 only in B; max abs" in done.stdout
    plain = json.loads(ckpttool_here("diff", a, b, "--sort", "abs", "--top", 2, "--json").stdout)
    assert [t["name"] for t in plain["data"]] == [t.name for t in found.sorted_by("abs").data[:2]] and plain[
        "changed"
    ] == 4


def test_a_change_of_sign_is_no_distance_and_a_large_one_is_not_printed(tmp_path: Path) -> None:
    found = one(tmp_path, torch.tensor([1.0, -2.0, 1.0]), torch.tensor([1.0, 2.0, 1.0000001]))
    assert (found.max_ulp, found.opposite_signs) == (1, 1) and "1 ulp, 1 of opposite signs" in str(found)
    far = one(tmp_path, torch.tensor([1.0, 0.0]), torch.tensor([1.0, 3.0]))
    assert far.max_ulp == 1077936128 and "ulp" not in str(far)  # too far apart to be counted in units
    zero = one(tmp_path, torch.ones(2), torch.zeros(2))
    assert zero.moved == math.inf


def test_configs_beside_equal_weights_are_compared_and_do_not_count(tmp_path: Path) -> None:
    for side, base in (("a", 1e4), ("b", 5e5)):
        (tmp_path / side).mkdir()
        save_file({"w": torch.ones(3)}, tmp_path / side / "model.safetensors")
        config = {
            "rope_parameters": {"rope_theta": base, "rope_type": "default"},
            "transformers_version": side,
            "vocab_size": 3,
        }
        (tmp_path / side / "config.json").write_text(json.dumps(config))
    found = ckpttool.diff(tmp_path / "a", tmp_path / "b")
    key = "config.json: rope_parameters.rope_theta"
    assert found.equal and found.configs == {key: ("10000.0", "500000.0")}
    assert f"not counted: {key}: 10000.0 | 500000.0" in found.lines()
    assert any(key in note for note in ckpttool.verify(tmp_path / "a", against=tmp_path / "b").notes)
    ckpttool.convert(tmp_path / "a", tmp_path / "a.pt")
    assert not ckpttool.diff(tmp_path / "a", tmp_path / "a.pt").configs


#: What may differ in one entry beside its bytes: (entry of A, entry of B).
UNLIKE: dict[str, tuple[object, object]] = {
    "shape": (torch.zeros(2, 3), torch.zeros(3, 2)),
    "dtype": (torch.zeros(3), torch.zeros(3, dtype=torch.int32)),
    "dimensions": (torch.tensor(3.0), torch.tensor([3.0])),
    "no elements": (torch.zeros(0, 3), torch.zeros(3, 0)),
    "a tensor and an int": (torch.tensor(3.0), 3),
    "a tensor and another number": (torch.tensor(3.0), 999.0),
    "an array and a tensor of another shape": (np.zeros((2, 3)), torch.zeros(3, 2, dtype=torch.float64)),
    "an array and a tensor of other bytes": (np.arange(3), torch.zeros(3, dtype=torch.int64)),
}


@pytest.mark.parametrize("what", UNLIKE)
def test_entries_that_are_not_alike_are_equal_to_no_command(what: str, tmp_path: Path) -> None:
    for side, entry in zip("ab", UNLIKE[what], strict=True):
        torch.save({"model": {"w": torch.ones(2)}, "mine": {"x": entry}}, tmp_path / f"{side}.pt")
    for a, b in ("ab", "ba"):
        found = ckpttool.diff(tmp_path / f"{a}.pt", tmp_path / f"{b}.pt")
        assert not found.equal and any("extra.mine.x" in line for line in found.lines())
        with pytest.raises(Differs, match=r"1 tensors or values are others.*extra\.mine\.x"):
            ckpttool.verify(tmp_path / f"{a}.pt", against=tmp_path / f"{b}.pt")


def test_checkpoints_without_a_common_component_are_not_equal(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(2)}}, tmp_path / "a.pt")
    torch.save({"optim": {"state": {"w": {"exp_avg": torch.ones(2)}}, "param_groups": []}}, tmp_path / "b.pt")
    with pytest.raises(Differs, match=r"nothing was compared .* model and optim have no component in common"):
        ckpttool.verify(tmp_path / "a.pt", against=tmp_path / "b.pt")
