"""check(): what an index may not say; and the columns it is kept in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckpttool
from ckpttool.errors import Corrupt
from ckpttool.index.check import check
from ckpttool.index.checkpoint import ITEMSIZE, NOT_TORCHS, Checkpoint, Chunk, Chunks, TensorEntry, Value, joined
from ckpttool.index.fqns import rename_parameters
from ckpttool.index.param_groups import list_names_by_group
from ckpttool.index.records import Extent


def checkpoint(entry: TensorEntry, sizes: tuple[int, ...] = (1000, 1000)) -> Checkpoint:
    """An index of one tensor "model.w" in some files."""
    return Checkpoint("full", "/x", None, [f"f{i}" for i in range(len(sizes))], list(sizes), {"model.w": entry}, {})


def tensor(shape: tuple[int, ...], *rows: Chunk, dtype: str = "float32", coding: str = "raw") -> TensorEntry:
    return TensorEntry(dtype, shape, ("model", "w"), Chunks.of(len(shape), rows), coding)


def chunk(start: tuple[int, ...], shape: tuple[int, ...], offset: int, length: int, **more: Any) -> Chunk:
    return Chunk(start, shape, Extent(0, offset, length), **more)


def refusal(entry: TensorEntry, sizes: tuple[int, ...] = (1000, 1000)) -> str:
    with pytest.raises(Corrupt) as e:
        check(checkpoint(entry, sizes))
    return str(e.value)


# ----------------------------------------------------------------------------------------------------------- sound


def test_a_whole_tensor_a_scalar_and_an_empty_one_are_sound() -> None:
    check(checkpoint(tensor((2, 3), chunk((0, 0), (2, 3), 0, 24))))
    check(checkpoint(tensor((), chunk((), (), 7, 8), dtype="int64")))
    check(checkpoint(tensor((0, 3), chunk((0, 0), (0, 3), 0, 0))))
    check(checkpoint(tensor((0, 3))))


def test_rows_in_any_order_and_empty_shards_of_ranks_without_a_share_are_sound() -> None:
    rows = [chunk((4, 0), (1, 3), 0, 12), chunk((0, 0), (2, 3), 12, 24), chunk((5, 0), (0, 3), 36, 0)]
    check(checkpoint(tensor((5, 3), *rows, chunk((2, 0), (2, 3), 40, 24))))


def test_a_grid_of_two_dimensions_is_sound() -> None:
    rows = [chunk((i, j), (1, 2), 16 * i + 8 * (j // 2), 8) for i in (0, 1) for j in (0, 2)]
    check(checkpoint(tensor((2, 4), *rows)))


def test_a_chunk_may_end_where_its_file_ends() -> None:
    check(checkpoint(tensor((2,), chunk((0,), (2,), 992, 8))))
    assert "needs bytes 993..1001 but the file ends at 1000" in refusal(tensor((2,), chunk((0,), (2,), 993, 8)))


@given(st.sampled_from(sorted(ITEMSIZE.keys() - NOT_TORCHS)), st.lists(st.integers(0, 4), max_size=3).map(tuple))
def test_a_tensor_of_any_dtype_and_shape_in_one_chunk_is_sound(dtype: str, shape: tuple[int, ...]) -> None:
    n = ITEMSIZE[dtype]
    for k in shape:
        n *= k
    check(checkpoint(tensor(shape, chunk((0,) * len(shape), shape, 0, n), dtype=dtype), (2000,)))


# --------------------------------------------------------------------------------------------------------- refused


def test_a_hole_between_rows_is_refused() -> None:
    said = refusal(tensor((5, 3), chunk((0, 0), (2, 3), 0, 24), chunk((3, 0), (2, 3), 24, 24)))
    assert said == '"model.w" (5, 3): chunks hold 12 of 15 elements.'


def test_a_hole_at_the_end_is_refused() -> None:
    assert "hold 6 of 15" in refusal(tensor((5, 3), chunk((0, 0), (2, 3), 0, 24)))


def test_a_tensor_without_chunks_is_refused() -> None:
    assert "hold 0 of 15" in refusal(tensor((5, 3)))
    assert "hold 0 of 1 " in refusal(tensor(()))


def test_rows_that_overlap_are_refused() -> None:
    said = refusal(tensor((5, 3), chunk((0, 0), (3, 3), 0, 36), chunk((2, 0), (3, 3), 36, 36)))
    assert "chunks [0:3, 0:3] and [2:5, 0:3] overlap" in said


def test_an_overlap_that_makes_up_for_a_hole_is_refused() -> None:
    assert "overlap" in refusal(tensor((4,), chunk((0,), (2,), 0, 8), chunk((1,), (2,), 8, 8)))
    assert "overlap" in refusal(tensor((2, 2), chunk((0, 0), (2, 1), 0, 8), chunk((0, 0), (1, 2), 8, 8)))


def test_a_scalar_stored_twice_is_refused() -> None:
    assert "overlap" in refusal(tensor((), chunk((), (), 0, 4), chunk((), (), 4, 4)))


def test_a_grid_with_a_hole_is_refused() -> None:
    rows = [chunk((i, j), (1, 2), 0, 8) for i in (0, 1) for j in (0, 2)]
    assert "hold 6 of 8" in refusal(tensor((2, 4), *rows[:3]))


def test_a_chunk_outside_the_tensor_is_refused() -> None:
    assert "reaches outside" in refusal(tensor((5, 3), chunk((0, 0), (5, 3), 0, 60), chunk((9, 0), (1, 3), 60, 12)))
    assert "reaches outside" in refusal(tensor((5, 3), chunk((0, 0), (6, 3), 0, 72)))
    assert "reaches outside" in refusal(tensor((2, 4), chunk((0, 2), (2, 4), 0, 32)))


def test_a_chunk_of_negative_size_is_refused() -> None:
    assert "reaches outside" in refusal(tensor((4,), chunk((0,), (5,), 0, 20), chunk((5,), (-1,), 20, 0)))


def test_an_empty_shard_outside_the_tensor_is_refused() -> None:
    assert "reaches outside" in refusal(tensor((4,), chunk((0,), (4,), 0, 16), chunk((9,), (0,), 0, 0)))


def test_an_extent_past_its_own_file_is_refused_though_another_file_is_longer() -> None:
    entry = tensor((4,), Chunk((0,), (4,), Extent(1, 4, 16)))
    assert refusal(entry, (1000, 10)).startswith('f1: "model.w" needs bytes 4..20 but the file ends at 10.')


@pytest.mark.parametrize("length", [0, 23, 25, 48])
def test_an_extent_longer_or_shorter_than_dtype_times_shape_is_refused(length: int) -> None:
    said = refusal(tensor((2, 3), chunk((0, 0), (2, 3), 0, length)))
    assert said.startswith(f'f0: a chunk of "model.w" is {length} bytes long, but float32 (2, 3) needs 24.')


def test_an_item_with_framing_must_be_at_least_as_long_as_its_payload() -> None:
    check(checkpoint(tensor((2, 3), chunk((0, 0), (2, 3), 0, 700), coding="torch.save")))
    check(checkpoint(tensor((2, 3), chunk((0, 0), (2, 3), 0, 9), coding="torch.save+zstd")))
    assert "needs 24" in refusal(tensor((2, 3), chunk((0, 0), (2, 3), 0, 23), coding="torch.save"))


def test_a_dtype_that_torch_does_not_have_is_refused() -> None:
    assert refusal(tensor((1,), chunk((0,), (1,), 0, 4), dtype="float99")).startswith(
        "\"model.w\" has dtype 'float99', which torch does not have"
    )


_OVERFLOWING = [(1 << 57,), (1 << 30, 1 << 30), (1 << 62, 1 << 62, 1 << 62), (-1,), (-2, -3)]
_OVERFLOWING_WHILE_EMPTY = [(0, 1 << 63), (0, 1 << 40, 1 << 40), (0, 10**30)]


@pytest.mark.parametrize("shape", [*_OVERFLOWING, *_OVERFLOWING_WHILE_EMPTY])
def test_a_shape_that_overflows_is_refused(shape: tuple[int, ...]) -> None:
    entry = TensorEntry("float32", shape, ("model", "w"), Chunks(len(shape)))
    assert "than torch can count" in refusal(entry)


def test_an_entry_inside_another_one_is_refused() -> None:
    found = checkpoint(tensor((0, 3)))
    found.values["model.w.x"] = Value(("model", "w", "x"), 1)
    with pytest.raises(Corrupt, match=r"'model\.w\.x' is inside a value that is neither a dict nor a list"):
        check(found)


@pytest.mark.parametrize(("offset", "length"), [(-1, 4), (0, -4), (1 << 62, 4), (0, 1 << 62)])
def test_a_byte_range_that_no_file_has_is_refused(offset: int, length: int) -> None:
    assert "the index is damaged" in refusal(tensor((1,), chunk((0,), (1,), offset, length)))


def test_chunks_of_other_dimensions_than_the_tensor_are_refused() -> None:
    entry = TensorEntry("float32", (2, 3), ("model", "w"), Chunks.of(1, [chunk((0,), (6,), 0, 24)]))
    assert "chunks have 1 dimensions, the tensor has 2" in refusal(entry)


@pytest.mark.parametrize(
    ("start", "shape"), [((0,), (2, 3)), ((0, 0), (2,)), ((0, 0, 0), (2, 3)), ((), ()), ((0,), (2,))]
)
def test_a_row_of_other_dimensions_than_its_columns_is_refused(start: tuple[int, ...], shape: tuple[int, ...]) -> None:
    with pytest.raises((Corrupt, ValueError)):
        check(checkpoint(tensor((2, 3), chunk(start, shape, 0, 24))))


@pytest.mark.parametrize("strides", [(1, 2), (1, 1000), (1, -1)])
def test_a_strided_chunk_whose_elements_lie_outside_its_extent_is_refused(strides: tuple[int, ...]) -> None:
    assert refusal(tensor((2, 3), chunk((0, 0), (2, 3), 996, 4, strides=strides)))


def test_a_strided_chunk_within_its_extent_is_sound() -> None:
    check(checkpoint(tensor((2, 3), chunk((0, 0), (2, 3), 976, 24, strides=(1, 2)))))


def test_a_chunk_within_another_that_is_the_whole_tensor_is_refused() -> None:
    assert "overlap" in refusal(tensor((4, 3), chunk((0, 0), (4, 3), 0, 48), chunk((1, 0), (2, 3), 48, 24)))


@pytest.mark.slow
@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.data())
def test_shards_of_dim_0_with_one_gone_moved_or_twice_are_refused(sizes: list[int], data: st.DataObject) -> None:
    rows, at = [], 0
    for n in sizes:
        rows.append(chunk((at, 0), (n, 2), 8 * at, 8 * n))
        at += n
    rows = list(data.draw(st.permutations(rows)))
    check(checkpoint(tensor((at, 2), *rows)))
    k = data.draw(st.integers(0, len(rows) - 1))
    first = rows[k].start[0] + data.draw(st.sampled_from((-2, -1, 1, 2)))
    refusal(tensor((at, 2), *rows[:k], *rows[k + 1 :]))
    refusal(tensor((at, 2), *rows, rows[k]))
    refusal(tensor((at, 2), *rows[:k], rows[k]._replace(start=(first, 0)), *rows[k + 1 :]))


# --------------------------------------------------------------------------------------------------------- columns

NUMBERS = st.integers(0, (1 << 62) - 1)


@st.composite
def rows_of(draw: st.DrawFn, ndim: int) -> list[Chunk]:
    place = st.tuples(*[NUMBERS] * ndim)
    more = st.none() | place
    zstd = st.none() | st.tuples(NUMBERS, st.none() | st.integers(0, (1 << 32) - 1))
    extent = st.builds(Extent, NUMBERS, NUMBERS, NUMBERS)
    return draw(st.lists(st.builds(Chunk, place, place, extent, more, zstd), max_size=6))


@pytest.mark.slow
@given(st.data())
def test_columns_give_back_the_chunks_they_were_made_of(data: st.DataObject) -> None:
    ndim = data.draw(st.integers(0, 4))
    rows = data.draw(rows_of(ndim))
    chunks = Chunks.of(ndim, rows)
    assert list(chunks) == chunks[:] == rows and len(chunks) == len(rows)
    assert chunks[1:] == rows[1:] and chunks[::-1] == rows[::-1]
    assert [chunks[k - len(rows)] for k in range(len(rows))] == rows
    assert chunks.boxes() == [(c.start, c.shape) for c in rows]
    with pytest.raises(IndexError):
        chunks[len(rows)]


def test_whole_is_one_chunk_from_the_origin() -> None:
    assert Chunks.whole((2, 3), 1, 7, 24)[:] == [Chunk((0, 0), (2, 3), Extent(1, 7, 24))]
    assert Chunks.whole((), 0, 0, 4)[:] == [Chunk((), (), Extent(0, 0, 4))]
    assert Chunks.whole((2, 3), 1, 7, 24, (1, 2))[0].strides == (1, 2)


def test_rows_in_order_are_those_of_dim_0_shards_without_the_empty_ones() -> None:
    rows = [chunk((3, 0), (2, 3), 0, 24), chunk((5, 0), (0, 3), 0, 0), chunk((0, 0), (3, 3), 0, 36)]
    assert Chunks.of(2, rows).rows_in_order() == [2, 0]
    assert Chunks.of(2, [chunk((0, 0), (2, 2), 0, 16), chunk((0, 2), (2, 1), 0, 8)]).rows_in_order() is None
    assert Chunks.of(0, [chunk((), (), 0, 4)]).rows_in_order() == [0]


def test_a_number_too_large_for_a_column_is_no_silent_wrap() -> None:
    for start in (1 << 63, 10**30):
        with pytest.raises(Corrupt, match="which no tensor reaches"):
            Chunks(1).add((start,), (1,), 0, 0, 4)


# ------------------------------------------------------------------------------------------------------ checkpoint


def test_only_keeps_components_and_nbytes_counts_tensors() -> None:
    both = checkpoint(tensor((2,), chunk((0,), (2,), 0, 8)))
    both.tensors["optim.state.w.exp_avg"] = TensorEntry(
        "bfloat16", (2,), ("optim", "state", "w", "exp_avg"), Chunks.whole((2,), 0, 8, 4)
    )
    both.values["trainer.step"] = Value(("trainer", "step"), 3)
    assert both.nbytes == 12
    assert both.component("trainer.step") == "trainer" and both.component("model.w") == "model"
    assert set(both.only(["model"]).tensors) == {"model.w"} and not both.only(["model"]).values
    assert set(both.only(["optim", "trainer"]).tensors) == {"optim.state.w.exp_avg"}


def test_joined_keeps_dots_of_fqns() -> None:
    assert joined(("model", "norm.weight")) == "model.norm.weight"
    assert joined(("optim", "param_groups", 0, "lr")) == "optim.param_groups.0.lr"


def test_a_folder_of_many_files_asks_for_the_layouts_once_or_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckpttool import layouts

    for i in range(300):
        (tmp_path / f"x{i}.bin").touch()
    asked: list[int] = []
    real = layouts.layouts
    monkeypatch.setattr(layouts, "layouts", lambda: (asked.append(1), real())[1])
    with pytest.raises(ckpttool.CkpttoolError, match="is not a checkpoint"):
        ckpttool.open(tmp_path)
    assert len(asked) < 5


# ---------------------------------------------------------------------------------------------- names that it is kept by


def test_whatever_names_a_parameter_has_its_new_name() -> None:
    ckpt = checkpoint(tensor((2,), chunk((0,), (2,), 0, 8)))
    path = ("optim", "param_groups", 0, "params")
    ckpt.values = {joined(path): Value(path, ["w"]), "model.n": Value(("model", "n"), 3)}
    ckpt.recorded, ckpt.recorded_values = {"model.w": "aa"}, {"model.n": "bb"}
    ckpt.dequantized, ckpt.numeric_remainders = {"model.w": "model.codes"}, frozenset({"model.w"})
    ckpt.numbered, ckpt.rounded = ("w",), dict(ckpt.tensors)
    out, renamed = rename_parameters(ckpt, lambda name: f"a.{name}")
    assert renamed == {"model.w": "model.a.w", "model.n": "model.a.n"}
    assert out.values[joined(path)].data == ["a.w"] and out.numbered == ("a.w",)
    assert (out.recorded, out.recorded_values) == ({"model.a.w": "aa"}, {"model.a.n": "bb"})
    assert out.dequantized == {"model.a.w": "model.codes"} and out.numeric_remainders == {"model.a.w"}
    assert out.tensors.keys() == out.rounded.keys() == {"model.a.w"}


def test_groups_with_a_number_missing_list_no_names() -> None:
    ckpt = checkpoint(tensor((2,), chunk((0,), (2,), 0, 8)))
    for i in (0, 2):
        path = ("optim", "param_groups", i, "params")
        ckpt.values[joined(path)] = Value(path, [f"w{i}"])
    assert list_names_by_group(ckpt) is None
    path = ("optim", "param_groups", 1, "params")
    ckpt.values[joined(path)] = Value(path, [])
    assert list_names_by_group(ckpt) == (("w0",), (), ("w2",))
