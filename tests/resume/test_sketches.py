"""Sketches of tensors: what shards add up to, how well they tell the distance of two tensors, and that they stay what they are."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from ckpttool.resume.trace import sketches
from ckpttool.resume.trace.sketches import (
    WIDE,
    decode_sketches,
    encode_sketches,
    estimate_sketch_distance,
    sketch_shard,
)

SHAPE = (7, 50, 131)
#: Of 1, 2, 3, 4, 5, and of two ones that lie where the second and third tables of signs begin anew.
GOLDEN = [-3.0, -1.0, 7.0, 1.0, 1.0, 1.0, -3.0, -9.0, -5.0, 3.0, 9.0, 5.0, 1.0, 3.0, 5.0, 5.0]
LATER = [0.0, -2.0, -2.0, 0.0, 0.0, -2.0, -2.0, -2.0, 2.0, 0.0, 0.0, 0.0, -2.0, 2.0, -2.0, 0.0]


def sketched(x: torch.Tensor) -> np.ndarray:
    return np.array(sketch_shard(x, x))


@pytest.mark.parametrize("rows", [64, 1])
@pytest.mark.parametrize("cuts", [((0, 2, 7), (0, 50), (0, 131)), ((0, 7), (0, 17, 50), (0, 131)), ((0, 3, 7), (0, 50), (0, 1, 131)),
                                  ((0, 7), (0, 20, 50), (0, 64, 131))])  # fmt: skip
def test_shards_of_any_shape_add_up_to_the_whole(
    cuts: tuple[tuple[int, ...], ...], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one row of signs at once, a row of this tensor is larger than a block."""
    monkeypatch.setattr(sketches, "_ROWS", rows)
    monkeypatch.setattr(sketches, "_ROW", 1 << (14 if rows > 1 else 12))
    sketches._make_sign_tables.cache_clear()
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    whole = sketches._sketch_box(x, (0, 0, 0), SHAPE, 0)
    total = torch.zeros(WIDE, dtype=torch.float64)
    for box in itertools.product(*(itertools.pairwise(of) for of in cuts)):
        part = x[tuple(slice(a, b) for a, b in box)]
        total += sketches._sketch_box(part, [a for a, _ in box], SHAPE, 0)
    sketches._make_sign_tables.cache_clear()
    assert torch.allclose(total, whole, rtol=0, atol=1e-10)


@pytest.mark.slow
def test_the_distance_of_two_sketches_is_that_of_the_tensors() -> None:
    draw = torch.Generator().manual_seed(1)
    ratios = []
    for n in range(200):
        x, y = (torch.randn(1000 + 300 * n, generator=draw, dtype=torch.float64) for _ in range(2))
        ratios.append(estimate_sketch_distance(sketched(x), sketched(x + 1e-4 * y)) / (1e-4 * y.norm().item()))
    assert abs(np.mean(ratios) - 1) < 0.05 and 0.12 < np.std(ratios) < 0.24 and 0.4 < min(ratios) < max(ratios) < 1.7


def test_one_column_or_one_element_that_differs_is_seen() -> None:
    x = torch.randn(256, 64, dtype=torch.float64)
    for change in ((slice(None), 3), (17, 5), (slice(None), slice(0, 64, 16))):
        y = x.clone()
        y[change] += 1
        assert estimate_sketch_distance(sketched(x), sketched(y)) > 0.3 * (x - y).norm().item()


def test_tensors_of_every_kind_have_a_sketch_and_an_empty_shard_adds_nothing() -> None:
    assert sketched(torch.zeros(0)).tolist() == [0.0] * WIDE
    for x in (
        torch.tensor(3),
        torch.ones(4, dtype=torch.bool),
        torch.ones(3, dtype=torch.bfloat16),
        torch.ones(2, 3).t(),
    ):
        assert abs(sketched(x)).sum() > 0
    z = torch.randn(5, 3, dtype=torch.complex128)
    assert sketched(z).tolist() == sketched(torch.view_as_real(z)).tolist()


def test_sketches_of_recordings_stay_comparable() -> None:
    """If this fails, recordings of earlier versions would be compared with other signs."""
    found = sketched(torch.arange(1, 6, dtype=torch.float64)).tolist()
    assert found == GOLDEN
    assert sketches._sketch_flat(torch.ones(2), (1 << 29) - 1).tolist() == LATER


def test_sketches_are_a_text_and_back() -> None:
    rows = np.random.default_rng(0).normal(size=(3, WIDE))
    for kind, off in (("f4", 1e-7), ("f8", 0.0)):
        back = decode_sketches(encode_sketches(rows, kind), 3, kind)
        assert back is not None and np.abs(back - rows).max() <= off * 4
    for text, count in ((None, 3), ("", 3), ("!", 3), (encode_sketches(rows), 2), (encode_sketches(rows), 0)):
        assert decode_sketches(text, count) is None
