"""Placements cut as torch cuts."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor.placement_types import Shard, _StridedShard

from ckpttool.formats.placements import PlacementCut, compute_local_pieces


def by_torch(whole: torch.Tensor, cuts: list[PlacementCut]) -> torch.Tensor:
    for cut in cuts:
        placement = Shard(cut.dim) if cut.split == 1 else _StridedShard(cut.dim, split_factor=cut.split)
        whole = placement._split_tensor(whole, cut.parts, with_padding=False)[0][cut.at]
    return whole


@given(st.data())
def test_a_local_tensor_is_put_where_torch_took_it_from(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 11), min_size=1, max_size=3))
    cuts = []
    for _ in range(data.draw(st.integers(0, 3))):
        parts = data.draw(st.integers(1, 4))
        dim, at = data.draw(st.integers(0, len(shape) - 1)), data.draw(st.integers(0, parts - 1))
        cuts.append(PlacementCut(dim, parts, at, data.draw(st.integers(1, 4))))
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    local = by_torch(whole, cuts)
    pieces, found = compute_local_pieces(shape, cuts)
    assert found == tuple(local.shape) or local.numel() == 0 == torch.Size(found).numel()
    covered = 0
    for p in pieces:
        mine = local[tuple(slice(a, a + n) for a, n in zip(p.local, p.shape, strict=True))]
        theirs = whole[tuple(slice(a, a + n) for a, n in zip(p.start, p.shape, strict=True))]
        assert torch.equal(mine, theirs)
        covered += mine.numel()
    assert covered == local.numel()


@pytest.mark.parametrize("rows", [1, 3, 7, 10, 16])
def test_all_ranks_of_a_mesh_have_every_row_once(rows: int) -> None:
    """FSDP over tensor parallelism, uneven."""
    seen: list[int] = []
    for dp, tp in product(range(3), range(2)):
        pieces, _ = compute_local_pieces((rows, 2), [PlacementCut(0, 3, dp, 2), PlacementCut(0, 2, tp)])
        seen += [i for p in pieces for i in range(p.start[0], p.start[0] + p.shape[0])]
    assert sorted(seen) == list(range(rows))


def test_sizes_out_of_a_file_take_no_more_work_than_the_tensor_has_rows() -> None:
    pieces, local = compute_local_pieces((7, 2), [PlacementCut(0, 10**12, 3, 10**12), PlacementCut(1, 10**15, 1)])
    assert local == (0, 1) and not any(p.shape[0] for p in pieces)
    with pytest.raises(ValueError, match="more than 1048576"):
        compute_local_pieces((1 << 40,), [PlacementCut(0, 2, 0, 1 << 39)])
    with pytest.raises(ValueError, match="more than 1048576 boxes"):
        compute_local_pieces((5000, 5000), [PlacementCut(0, 2, 0, 2500), PlacementCut(1, 2, 0, 2500)])


@pytest.mark.parametrize(
    "cut",
    [
        PlacementCut(0, 2, 0, 0),
        PlacementCut(-1, 2, 0),
        PlacementCut(0, 2, 0, -1),
        PlacementCut(0, 2, 2),
        PlacementCut(0, 2, -1),
    ],
)
def test_nonsense_is_refused(cut: PlacementCut) -> None:
    with pytest.raises(ValueError, match="split factor"):
        compute_local_pieces((4, 4), [cut])
    with pytest.raises(IndexError):
        compute_local_pieces((4, 4), [PlacementCut(2, 2, 0)])
