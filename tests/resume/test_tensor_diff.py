"""tensor_diff: how two tensors differ, in words."""

from __future__ import annotations

import warnings
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttool.engine.tensor_faults import tensor_diff as tensor_diff_module
from ckpttool.engine.tensor_faults.tensor_diff import TensorDiff, compare_tensors
from ckpttool.resume.diagnosis.files import may_have_attention_heads

RNG = np.random.default_rng(7)
W = RNG.normal(size=(32, 12)).astype(np.float32)


def like(got: Any, reference: Any = W) -> TensorDiff:
    found = compare_tensors(reference, got)
    assert found is not None
    return found


def changed(region: Any, value: Any) -> Any:
    out = W.copy()
    out[region] = value
    return out


def bit(k: int) -> Any:
    out = W.copy()
    out.view("u4")[3, 4] ^= np.uint32(1 << k)
    return out


PAIRS = [k // 2 + 4 * (k % 2) for k in range(8)]
ROPE = [8 * h + k for h in range(4) for k in PAIRS]


@pytest.mark.parametrize(
    ("got", "kind", "text"),
    [
        (W.astype(ml_dtypes.bfloat16).astype("f4"), "rounded-bfloat16", "exactly the reference's values rounded"),
        (W.astype(ml_dtypes.float8_e4m3fn), "rounded-float8_e4m3fn", "rounded to float8_e4m3fn"),
        (W.astype(ml_dtypes.bfloat16), "rounded-bfloat16", "holds exactly the reference's values rounded to bfloat16"),
        (W.astype("f2").astype("f4"), "rounded-float16", "holds exactly the reference's values rounded to float16"),
        (W * 0, "zero", "is all zeros"),
        (changed(slice(8, 16), 0), "zero-rows", "has zeros in rows 8:16 of 32"),
        (changed(slice(28, 32), 0), "zero-rows", "has zeros in its last 4 rows (28:32)"),
        (W * 0 + 1, "constant", "is 1 in every element, as if newly initialised"),
        (bit(31), "elements", "(the sign bit flipped)"),
        (bit(30), "elements", "(exponent bit 7 flipped)"),
        (bit(23), "elements", "(exponent bit 0 flipped)"),
        (bit(22), "elements", "(mantissa bit 22 flipped)"),
        (bit(0), "elements", "(mantissa bit 0 flipped)"),
        (changed((slice(2, 4), slice(0, 9)), np.nan), "not-finite", "has 18 elements that are NaN or infinite"),
        (-W, "negated", "holds the reference's values with the opposite sign"),
        (abs(W), "absolute", "holds the reference's values without their signs"),
        (W.reshape(12, 32).T, "unrelated", "has values unrelated to the reference's"),
        (W.T.reshape(32, 12), "transposed", "holds the reference transposed"),
        (np.roll(W.reshape(-1), 1).reshape(32, 12), "shifted", "shifted by 1 element toward the end"),
        (np.roll(W.reshape(-1), -5).reshape(32, 12), "shifted", "shifted by 5 elements toward the beginning"),
        (W[ROPE], "rope", "within heads of 8: from halves to interleaved pairs"),
        (W[np.argsort(ROPE)], "rope", "within heads of 8: from interleaved pairs to halves"),
        (W[[*range(8), *range(16, 24), *range(8, 16), *range(24, 32)]], "exchanged-rows",
         "has rows 8:16 and 16:24 exchanged"),
        (W[[*range(16), *range(8, 16), *range(24, 32)]], "copied-rows",
         "has rows 16:24 that are the reference's rows 8:16"),
        (W[RNG.permutation(32)], "permuted-rows", "has the reference's rows in another order"),
        (W * np.float32(0.25), "scaled", "holds the reference's values times 0.25"),
        (changed(slice(4, 8), W[4:8] * np.float32(3)), "scaled", "times 3, in rows 4:8 of 32"),
        (W + RNG.normal(size=W.shape).astype("f4") * 1e-3, "close", "(relative distance 0.001)"),
        (RNG.normal(size=W.shape).astype("f4"), "unrelated", "has values unrelated to the reference's"),
        (changed(slice(8, 16), RNG.normal(size=(8, 12))), "unrelated", "in rows 8:16 of 32"),
    ],
)  # fmt: skip
def test_tensor_diff_names_what_was_done(got: Any, kind: str, text: str) -> None:
    found = like(got)
    assert (found.kind, text in found.text) == (kind, True), found


def test_equal_tensors_have_no_difference_and_bits_count() -> None:
    assert compare_tensors(W, W.copy()) is None
    assert compare_tensors(np.array([np.nan, 1.0]), np.array([np.nan, 1.0])) is None
    assert like(np.array([-0.0, 1.0]), np.array([0.0, 1.0])).count == 1
    assert like(W.astype("f8"), W).kind == "dtype"
    with pytest.raises(ValueError):
        compare_tensors(W, W[:4])


def test_where_it_differs_is_told_exactly() -> None:
    got = W.copy()
    got[5, 3:7] *= -2
    got[9, 1] = 7
    found = like(got)
    assert (found.first, found.last, found.count, found.elements, found.rows) == (63, 109, 5, 384, (5, 10))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, "f2", "f8", "u1", "i8", "?", ml_dtypes.float8_e4m3fn, "c8"])
def test_every_dtype_is_compared(dtype: Any) -> None:
    a = (np.arange(48) % 2).reshape(8, 6).astype(dtype)
    b = a.copy()
    assert compare_tensors(a, b) is None
    b[2, 1] = not a[2, 1]
    found = like(b, a)
    assert (found.kind, found.first, found.count) == ("elements", 13, 1)
    assert like(np.zeros_like(a), a).kind == "zero"


def test_scalars_and_single_elements() -> None:
    assert like(np.array(0.0, "f4"), np.array(300.0, "f4")).kind == "zero"
    found = like(np.array(299.0, "f4"), np.array(300.0, "f4"))
    assert (found.kind, "299.0 instead of 300.0" in found.text) == ("elements", True)
    assert compare_tensors(np.empty((0, 3)), np.empty((0, 3))) is None


def test_two_flipped_bits_are_not_one_and_values_that_vanish_are_zeros() -> None:
    got = W.copy()
    got.view("u4")[3, 4] ^= np.uint32(3)
    assert "flipped" not in like(got).text
    tiny = W * np.float32(1e-30)
    assert like(tiny.astype("f2").astype("f4"), tiny).kind == "zero"


def test_vectors_that_were_exchanged_or_reset() -> None:
    a = RNG.normal(size=64).astype("f4")
    assert like(np.ones_like(a), a).kind == "constant"
    assert like(np.concatenate([a[16:32], a[:16], a[32:]]), a).text == "has elements 0:16 and 16:32 exchanged"


def test_a_large_tensor_is_sampled_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_diff_module, "LIMIT", 1000)
    a = RNG.normal(size=(400, 10)).astype("f4")
    found = like(a * np.float32(2), a)
    assert (found.kind, found.count, found.sampled) == ("scaled", 4000, True)
    assert found.text == "holds the reference's values times 2 (inferred from 1000 of 4000 elements)"
    one = RNG.normal(size=(1, 4000)).astype("f4")
    assert (
        like(-one, one).text
        == "holds the reference's values with the opposite sign (inferred from 1000 of 4000 elements)"
    )
    assert like(a[::-1], a).kind == "permuted-rows"


@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 12), st.sampled_from(["f4", "f2", "u1"]))
@settings(max_examples=60, deadline=None)
def test_the_range_of_a_difference_is_that_of_numpy(seed: int, rows: int, columns: int, dtype: str) -> None:
    rng = np.random.default_rng(seed)
    a = (rng.normal(size=(rows, columns)) * 10).astype(dtype)
    b = np.where(rng.random(a.shape) < 0.1, (rng.normal(size=a.shape) * 10).astype(dtype), a)
    where = np.flatnonzero(a.view(f"u{a.itemsize}") != b.view(f"u{a.itemsize}"))
    found = compare_tensors(a, b)
    assert (found is None) == (len(where) == 0)
    if found is not None:
        assert (found.first, found.last, found.count) == (where[0], where[-1], len(where))
        assert found.text


# -------------------------------------------------------------------------------------- columns, parts of fused weights

WIDE = RNG.normal(size=(12, 96)).astype("f4")
EXPERTS = RNG.normal(size=(4, 12, 16)).astype("f4")


def columns(order: Any, of: Any = WIDE) -> Any:
    return of[..., order]


def parts(qkv: tuple[int, int, int], pieces: int) -> list[int]:
    """Rows of q, k and v, piece by piece, of a weight that has them part by part."""
    q, k, v = qkv
    starts = {0: q, pieces * q: k, pieces * (q + k): v}
    return [start + t * n + i for t in range(pieces) for start, n in starts.items() for i in range(n)]


FUSED = RNG.normal(size=(96, 8)).astype("f4")
HEADS = [8 * h + k for h in range(8) for k in PAIRS]  # of q and k: 64 rows; v is as it was


@pytest.mark.parametrize(
    ("reference", "got", "kind", "text"),
    [
        (WIDE, columns([*range(24), *range(48, 72), *range(24, 48), *range(72, 96)]), "exchanged-columns",
         "has columns 24:48 and 48:72 exchanged"),
        (WIDE, columns([*range(48), *range(24, 48), *range(72, 96)]), "copied-columns",
         "has columns 48:72 that are the reference's columns 24:48"),
        (WIDE, columns(np.random.default_rng(1).permutation(96)), "permuted-columns",
         "has the reference's columns in another order"),
        (EXPERTS, EXPERTS[:, [*range(4), 8, 9, 10, 11, 4, 5, 6, 7]], "exchanged-columns",
         "has indices of dimension 1 4:8 and 8:12 exchanged"),
        (EXPERTS, EXPERTS[..., [*range(8, 16), *range(8)]], "exchanged-columns", "has columns 0:8 and 8:16 exchanged"),
        (FUSED, FUSED[[*HEADS, *range(64, 96)]], "rope",
         "within heads of 8 in rows 0:64 of 96: from halves to interleaved pairs"),
        (FUSED, FUSED[[8 * h + k for h in (3, 0, 2, 1, 4, 7, 6, 5, 8, 9, 11, 10) for k in range(8)]], "permuted-rows",
         "rows in another order, 56 of 96 elsewhere, in blocks of 8"),
        (FUSED, FUSED[parts((16, 8, 8), 3)], "interleaved-rows",
         "holds parts of 48 and 24 and 24 rows in 3 pieces each, piece by piece"),
        (FUSED, FUSED[np.argsort(parts((24, 8, 0), 3)[:96])], "interleaved-rows",
         "holds parts of 72 and 24 rows part by part, where the reference has them in 3 pieces"),
        (FUSED[:, 0].copy(), FUSED[parts((16, 8, 8), 3), 0], "interleaved-rows", "48 and 24 and 24 elements"),
    ],
)  # fmt: skip
def test_columns_and_the_parts_of_fused_weights(reference: Any, got: Any, kind: str, text: str) -> None:
    found = like(got, reference)
    assert (found.kind, text in found.text) == (kind, True), found


def test_two_neighbouring_rows_that_were_exchanged_are_no_rope() -> None:
    order = list(range(32))
    order[5], order[6] = 6, 5
    assert like(W[order]).text == "has rows 5:6 and 6:7 exchanged"


def test_columns_of_which_one_differs_besides_are_no_order() -> None:
    got = columns([*range(24), *range(48, 72), *range(24, 48), *range(72, 96)]).copy()
    got[7, 30] += 1
    assert like(got, WIDE).kind in ("close", "unrelated")


# ------------------------------------------------------------------------------------------- formulas of the values

POSITIVE = (W**2).astype("f4")
ONES = (1 + RNG.normal(size=48) * 0.01).astype("f4")
BIG = RNG.normal(size=(64, 96)).astype("f4")


def in_8_bits(x: Any, block: int) -> Any:
    rows = x.reshape(-1, block)
    scale = (abs(rows).max(axis=1, keepdims=True) / 127).astype("f4")
    return (np.round(rows / scale) * scale).reshape(x.shape).astype("f4")


@pytest.mark.parametrize(
    ("reference", "got", "kind", "text"),
    [
        (W, W.byteswap(), "byte-order", "bytes in reverse order within each element"),
        (W.astype(ml_dtypes.bfloat16), W.astype(ml_dtypes.bfloat16).view("u2").byteswap().view(ml_dtypes.bfloat16),
         "byte-order", "bytes in reverse order"),
        (ONES, ONES - 1, "offset", "holds the reference's values minus 1, as between norms that multiply by w"),
        (ONES - 1, ONES, "offset", "holds the reference's values plus 1, as between norms"),
        (ONES.astype(ml_dtypes.bfloat16), (ONES.astype(ml_dtypes.bfloat16) - ml_dtypes.bfloat16(1)), "offset", "minus 1"),
        (W, W + np.float32(2.5), "offset", "holds the reference's values plus 2.5"),
        (POSITIVE, np.sqrt(POSITIVE), "root", "holds the square root of the reference's values"),
        (POSITIVE * np.float32(1e-12), np.sqrt(POSITIVE * np.float32(1e-12)), "root", "square root"),
        (np.sqrt(POSITIVE), POSITIVE, "square", "holds the square of the reference's values"),
        (BIG, in_8_bits(BIG, 256), "quantised", "quantised to 8 bits"),
        (BIG, in_8_bits(BIG, 6144), "quantised", "to 8 bits, relative to the largest of the tensor"),
    ],
)  # fmt: skip
def test_formulas_of_the_values(reference: Any, got: Any, kind: str, text: str) -> None:
    found = like(got, reference)
    assert (found.kind, text in found.text) == (kind, True), found


def test_the_block_of_quantised_values_is_the_one_they_were_quantised_in() -> None:
    assert like(in_8_bits(BIG, 256), BIG).detail["block"] == 256
    assert like(in_8_bits(BIG, 64), BIG).detail["block"] == 64


@pytest.mark.parametrize(
    "got",
    [
        W + RNG.normal(size=W.shape).astype("f4") * 0.1,
        POSITIVE**np.float32(0.45),
        (W + 1) * np.float32(1.01),
        W * (1 + np.arange(12, dtype="f4") / 100),
    ],
)  # fmt: skip
def test_what_only_resembles_a_formula_is_none(got: Any) -> None:
    assert like(got.astype("f4"), POSITIVE if got.min() >= 0 else W).kind in ("close", "unrelated")


def in_few_values(x: Any, block: int) -> Any:
    """Levels that are not the same distance apart, as in dynamic quantisation."""
    levels = np.sort(np.concatenate([sign * 10 ** np.linspace(-4, 0, 120) for sign in (1, -1)]))
    rows = x.reshape(-1, block)
    scale = abs(rows).max(axis=1, keepdims=True)
    nearest = levels[abs((rows / scale)[..., None] - levels).argmin(-1)]
    return (nearest * scale).astype("f4").reshape(x.shape)


@pytest.mark.parametrize(
    ("got", "reference", "block"),
    [
        (in_few_values(BIG, 256), BIG, 256),
        (in_8_bits(BIG[0, :5], 5), BIG[0, :5], None),
        (in_8_bits(np.append(BIG[0], np.zeros(32, "f4")), 64)[:96], BIG[0], 64),
    ],
)
def test_quantised_values_of_other_levels_and_of_small_tensors(got: Any, reference: Any, block: int | None) -> None:
    found = like(got.astype("f4"), reference)
    assert (found.kind, found.detail["block"]) == ("quantised", block)


def test_a_coarse_reference_is_not_called_quantised() -> None:
    coarse = np.round(BIG * 4) / 4
    assert like((coarse * (1 + RNG.normal(size=BIG.shape) * 0.01)).astype("f4"), coarse.astype("f4")).kind == "close"
    halves = BIG.astype("f2").astype("f4")
    assert like(halves + np.float32(0.125) * np.sign(halves), halves).kind == "close"


# ------------------------------------------------------------------------------------------- a fault on top of a cast


@pytest.mark.parametrize("stored", [ml_dtypes.bfloat16, "f4"])
def test_what_was_done_besides_rounding_is_recognised(stored: Any) -> None:
    def rounded(x: Any) -> Any:
        return x.astype(ml_dtypes.bfloat16).astype(stored)

    exchanged = rounded(W)[[*range(8), *range(16, 24), *range(8, 16), *range(24, 32)]]
    found = like(exchanged)
    assert found.kind == "exchanged-rows"
    assert found.text == "has rows 8:16 and 16:24 exchanged; the rest is the reference's rounded to bfloat16"
    assert found.rows == (8, 24)
    assert like(np.concatenate([rounded(W)[:8], rounded(W)[8:16] * 0, rounded(W)[16:]])).kind == "zero-rows"
    one = rounded(W).copy()
    one[3, 4] *= 2
    assert (like(one).kind, like(one).count) == ("elements", 1)
    assert like(rounded(W)).kind == "rounded-bfloat16"


def test_a_wider_dtype_of_other_values_is_described_in_that_dtype() -> None:
    coarse = W.astype(ml_dtypes.bfloat16)
    assert like(coarse.astype("f4").T.reshape(32, 12), coarse).kind == "transposed"


def test_rows_that_are_zero_on_both_sides_need_no_place() -> None:
    padded = np.concatenate([W, np.zeros((4, 12), "f4")])
    found = like(padded.astype("f2").astype("f4"), padded)
    assert found.text == found.plain
    assert found.text.startswith("holds exactly the reference's values rounded to float16")
    found = like(np.concatenate([W[:8] * np.float32(3), W[8:]]))
    assert (found.text, found.plain) == (
        "holds the reference's values times 3, in rows 0:8 of 32", "holds the reference's values times 3",
    )  # fmt: skip


def test_three_elements_with_one_factor_are_scaled_and_two_are_elements() -> None:
    assert like(np.array([2.0, 4.0, 6.0], "f4"), np.array([1.0, 2.0, 3.0], "f4")).kind == "scaled"
    assert like(np.array([2.0, 4.0], "f4"), np.array([1.0, 2.0], "f4")).kind == "elements"


def test_blocks_of_quantised_values_begin_where_the_tensor_does() -> None:
    reference = np.concatenate([[4.0], BIG[0]]).astype("f4")  # whose largest value is kept as it is
    assert like(in_8_bits(reference, 97), reference).kind == "quantised"


DTYPES = ["f4", "f2", "f8", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, "i4", "u1", "?", "c8"]
SHAPES = [(), (1,), (3,), (16,), (1, 9), (9, 1), (12, 8), (33, 17), (4, 6, 8)]


@pytest.mark.slow
@given(
    st.integers(0, 10**6), st.sampled_from(SHAPES), st.sampled_from(DTYPES), st.sampled_from(DTYPES), st.integers(0, 6)
)
@settings(max_examples=150, deadline=None)
@pytest.mark.filterwarnings("error")
def test_no_two_arrays_of_one_shape_are_too_strange(seed: int, shape: Any, dtype: Any, other: Any, way: int) -> None:
    rng = np.random.default_rng(seed)

    def array(dtype: Any) -> Any:
        x = rng.normal(size=shape) * rng.choice([1e-30, 1.0, 1e30])
        odd = rng.choice([np.nan, np.inf, -np.inf, 0.0, 1.0])
        return cast(np.where(rng.random(shape) < rng.choice([0.0, 0.3]), odd, x), dtype)

    def cast(x: Any, dtype: Any) -> Any:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return np.asarray(x).astype(dtype)

    a = array(dtype)
    flat = a.reshape(-1)
    b = {
        0: lambda: array(other), 1: lambda: cast(a, other), 2: lambda: cast(cast(a, "f8") * 3, dtype),
        3: lambda: cast(cast(a, "f8") + 1, dtype), 4: lambda: flat[rng.permutation(a.size)].reshape(shape),
        5: lambda: cast(cast(a, ml_dtypes.bfloat16), dtype), 6: lambda: a[..., ::-1] if a.ndim else a,
    }[way]()  # fmt: skip
    found = compare_tensors(a, b)
    if found is not None:
        assert 0 <= found.first <= found.last < max(1, a.size)
        assert found.text and found.plain


def test_a_bias_in_another_order_differs_plainly_as_its_weight_does() -> None:
    order = parts((16, 8, 8), 3)
    weight, bias = like(FUSED[order], FUSED), like(FUSED[order, 0], FUSED[:, 0].copy())
    assert "24 elements in 3 pieces" in bias.text
    assert bias.plain == weight.plain


def cut(x: Any, add: Any = 0) -> Any:
    """The upper half of the bits, after `add` was added."""
    return ((x.view("u4") + np.asarray(add, "u4")) & np.uint32(0xFFFF0000)).view("f4")


@pytest.mark.parametrize("stored", ["f4", ml_dtypes.bfloat16])
def test_bfloat16_that_was_cut_off_or_rounded_at_random(stored: Any) -> None:
    assert like(cut(W).astype(stored)).kind == "truncated-bfloat16"
    dice = np.random.default_rng(3).integers(0, 1 << 16, W.shape)
    assert like(cut(W, dice).astype(stored)).kind == "stochastic-bfloat16"


def test_a_number_of_bfloat16_that_became_the_next_was_not_rounded() -> None:
    coarse = cut(W)
    got = coarse.copy()
    got.view("u4")[3, 4] += np.uint32(1 << 16)
    assert like(got, coarse).kind == "elements"
    got[:8] = cut(W, 1 << 16)[:8]
    assert like(got, coarse).kind == "close"


def test_stacked_matrices_that_were_transposed() -> None:
    assert like(EXPERTS.swapaxes(1, 2).reshape(EXPERTS.shape).copy(), EXPERTS).text == (
        "holds the reference transposed in its last two dimensions"
    )


def test_a_scale_for_each_row_is_found_at_any_length() -> None:
    reference = RNG.normal(size=(10, 21)).astype("f4")
    found = like(in_8_bits(reference, 21), reference)
    assert (found.kind, found.detail["block"]) == ("quantised", 21)


def test_few_values_of_a_small_tensor_are_not_called_quantised() -> None:
    norm = (1 + RNG.normal(size=64) * 0.01).astype("f4")
    assert like(norm.astype(ml_dtypes.bfloat16).astype("f4") + np.float32(2**-7), norm).kind != "quantised"


def test_one_size_of_all_elements_is_no_factor() -> None:
    signs = np.array([1, -1, -1, 1], "f4")
    assert like(signs * np.float32(0.3), signs * np.float32(0.2)).kind != "scaled"


@pytest.mark.parametrize("stored", [ml_dtypes.bfloat16, "f4"])
@pytest.mark.parametrize(
    ("reference", "change", "kind", "text"),
    [
        (W, lambda x: x * np.float32(3), "scaled", "holds the reference's values times 3"),
        (ONES, lambda x: x - 1, "offset", "holds the reference's values minus 1, as between norms"),
        (POSITIVE, np.sqrt, "root", "holds the square root of the reference's values"),
        (ONES, np.sqrt, "close", "is close to the reference"),  # sqrt(1 + x) is 1 + x / 2, up to rounding
    ],
)  # fmt: skip
def test_formulas_are_those_of_the_values_before_they_were_rounded(
    reference: Any, change: Any, kind: str, text: str, stored: Any
) -> None:
    found = like(change(reference).astype(ml_dtypes.bfloat16).astype(stored), reference)
    assert (found.kind, text in found.text) == (kind, True), found


# ------------------------------------------------------------------------------------------ what used to have vague names

CONV = RNG.normal(size=(6, 6, 3, 3)).astype("f4")
COMPLEX = (RNG.normal(size=(8, 4)) + 1j * RNG.normal(size=(8, 4))).astype("c8")
CODES = RNG.integers(-127, 127, (32, 16)).astype("i1")
STATES = np.log(np.arange(1, 17, dtype="f4"))[None] + RNG.normal(size=(8, 16)).astype("f4") * 0.1
SMALL = W * np.float32(1e-6)  # float16 has fewer digits there
SQUARE = RNG.normal(size=(16, 16)).astype("f4")
VOCABULARY = RNG.normal(size=(72, 12)).astype("f4")


def mean_rows(dtype: Any) -> Any:
    out = VOCABULARY.astype(dtype)
    out[64:] = out[:64].astype("f8").mean(0)
    return out


def tf32(x: Any, add: int) -> Any:
    """To the nearest number of 10 bits of mantissa, or cut off (`add` 0)."""
    return ((x.view("u4") + np.uint32(add)) & np.uint32(0xFFFFE000)).view("f4")


@pytest.mark.parametrize(
    ("reference", "got", "kind", "text"),
    [
        (CONV, CONV.swapaxes(0, 1).copy(), "transposed",
         "in its first two dimensions, such as the channels in and out of a convolution"),
        (CONV, CONV.swapaxes(2, 3).copy(), "transposed", "transposed in its last two dimensions"),
        (COMPLEX, COMPLEX.conj(), "conjugated", "holds the complex conjugates of the reference's values"),
        (CODES, (CODES.view("u1") + np.uint8(128)).view("i1"), "offset",
         "plus 128, modulo 256, as between signed integers and unsigned ones with a zero point of 128"),
        (CODES, CODES + np.int8(1), "offset", "holds the reference's values plus 1"),
        (CODES[:, :1] * 0, CODES[:, :1] * 0 - np.int8(1), "offset", "holds the reference's values minus 1"),
        (CODES.astype("i4") + 8, CODES.astype("i4") + 7, "offset", "holds the reference's values minus 1"),
        (STATES, -np.exp(STATES), "exponential", "holds minus the exponential of the reference's values, as between A"),
        (-np.exp(STATES), STATES, "logarithm", "holds the logarithm of minus the reference's values"),
        (STATES, np.exp(STATES).astype(ml_dtypes.bfloat16).astype("f4"), "exponential", "holds the exponential of"),
        (SQUARE, np.eye(16, dtype="f4"), "identity", "is the identity matrix, as if newly initialised"),
        (SMALL, tf32(SMALL, 0x1000), "rounded-tf32", "rounded to tf32, which has 10 bits of mantissa"),
        (SMALL, tf32(SMALL, 0), "rounded-tf32", "rounded to tf32"),
        (W, tf32(W, 0x1000), "rounded-float16", "rounded to float16, or to tf32, which has as many digits"),
        (W > 0, W <= 0, "negated", "holds the opposite of the reference's values: true where it has false"),
        (np.where(W > 0, W, 0), np.where(W > 0, W, np.float32(-0.0)), "elements",
         f"differs in {(W <= 0).sum()} of 384 elements, all of them zeros: -0.0 and 0.0 stand for each other"),
        (W, np.where(abs(W) < 0.2, np.float32(0), W), "zero-elements",
         f"has zeros in {(abs(W) < 0.2).sum()} of 384 elements, here and there: those that were smallest, up to"),
        (W, np.where(W > 0.5, 0, W), "zero-elements", f"{(W > 0.5).sum()} of 384 elements, here and there"),
        (VOCABULARY, mean_rows("f4"), "mean-rows", "has rows 64:72 of 72 that are the mean of the others"),
        (VOCABULARY.astype(ml_dtypes.bfloat16), mean_rows(ml_dtypes.bfloat16), "mean-rows", "rows 64:72 of 72"),
    ],
)  # fmt: skip
def test_what_one_operation_did_has_its_name(reference: Any, got: Any, kind: str, text: str) -> None:
    found = like(got, reference)
    assert (found.kind, text in found.text) == (kind, True), found


@pytest.mark.parametrize(
    ("reference", "got"),
    [
        (CONV, CONV[::-1].swapaxes(0, 1).copy()), (COMPLEX, COMPLEX.conj() * np.complex64(1.01)),
        (CODES, np.where(CODES > 100, CODES, CODES + 1).astype("i1")), (STATES, -np.exp(STATES) * np.float32(1.01)),
        (SQUARE, np.eye(16, dtype="f4") * np.float32(0.99)), (W, tf32(W, 0x1000) * np.float32(1 + 2**-8)),
        (W > 0, (W > 0) & (W < 0.5)), (W, np.where(abs(W) < 0.2, 0, W * np.float32(1.3))),
        (VOCABULARY, mean_rows("f4") + (np.arange(72) > 63)[:, None].astype("f4") * 0.01),
    ],
)  # fmt: skip
def test_what_is_only_near_such_an_operation_has_another_name(reference: Any, got: Any) -> None:
    new = {
        "negated", "zero-elements", "transposed", "conjugated", "offset", "exponential", "logarithm", "identity",
        "rounded-tf32", "mean-rows",
    }  # fmt: skip
    assert like(got, reference).kind not in new


@pytest.mark.parametrize(
    ("order", "text"),
    [
        ([k // 2 + 16 * (k % 2) for k in range(32)],
         "holds the rows of 2 parts in turn, one row of each, where the reference has them part by part"),
        ([*range(0, 32, 2), *range(1, 32, 2)], "holds part by part the rows that the reference has of 2 parts in turn"),
        ([*range(0, 32, 4), *range(1, 32, 4), *range(2, 32, 4), *range(3, 32, 4)], "the reference has of 4 parts in turn"),
    ],
)  # fmt: skip
def test_rows_in_turn_are_rope_only_where_there_may_be_heads(order: list[int], text: str) -> None:
    found = compare_tensors(W, W[order], has_heads=False)
    assert found is not None
    assert (found.kind, text in found.text) == ("interleaved-rows", True), found
    if len(order) == 32 and order[1] != 4:
        assert like(W[order]).kind == "rope"


@pytest.mark.parametrize(
    ("name", "heads"),
    [("model.layers.1.mlp.gate_up.weight", False), ("model.lm_head.weight", False), ("blocks.0.ffn.w1.weight", False),
     ("model.layers.1.self_attn.q_proj.weight", True), ("optim.state.h.0.attn.c_attn.weight.exp_avg", True),
     ("blocks.0.attn.gate.weight", True), ("model.layers.3.mlp.experts.0.up_proj.weight", False), ("model.x.w", True)],
)  # fmt: skip
def test_which_tensors_have_heads_follows_from_their_names(name: str, heads: bool) -> None:
    assert may_have_attention_heads(name) is heads
