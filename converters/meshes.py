"""Meshes of jobs: which box of a tensor each rank holds, and which rank's file it is written to.

Ranks are numbered as torchtitan numbers them: pp, dp_replicate, dp_shard, cp, tp, from the outermost dimension to the
innermost one (build_mesh in torchtitan/distributed/parallel_dims.py, 0.3.0). FSDP divides a tensor over dp_shard x cp
after tensor parallelism has divided it. Experts are divided over ep first, which takes its ranks from the innermost
ones of dp_shard x cp x tp, and FSDP divides them over what is left. Ranks that differ in pp or dp_replicate alone hold
the same boxes of a tensor, so there are files for one replica.

A box that several ranks hold is in the file of the first of them: DCP keeps one place for each box.

torch's DCP describes what a rank has of a DTensor by one box (_create_chunk_from_dtensor in
torch/distributed/checkpoint/planner_helpers.py, 2.13). FSDP2 gives a rank a piece of what tensor parallelism has left
it (fsdp/_fully_shard/_fsdp_param.py), and the DTensor says so by _StridedShard; where sizes do not divide, the two can
differ, and then no job can load the tensor with DCP.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from math import prod
from typing import NamedTuple

from ckpttool.by_fields import ByFields
from ckpttool.errors import UsageError, argument
from ckpttool.formats.placements import PlacementCut, ShardPiece, compute_local_pieces
from ckpttool.options import MOST_RANKS

__all__ = ["Cut", "Mesh", "RankBox"]


class Cut(NamedTuple):
    """How a mesh divides a tensor: tensor parallelism along dimension `tp` (None: it does not), where the tensor is
    `packed` weights side by side, each of them divided; expert parallelism along dimension 0, if `ep`; FSDP along
    dimension `fsdp`."""

    tp: int | None = None
    packed: int = 1
    ep: bool = False
    fsdp: int = 0


class RankBox(NamedTuple):
    """A box of a tensor that is written to the file of rank number `rank` of a replica."""

    rank: int
    start: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False, repr=False)
class Mesh(ByFields):
    """The sizes of a mesh."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Parse a text such as "dp_shard=4,tp=2".

        Raises:
            UsageError: it is not written like this, has more ranks than ckpttool allows, or ep does not divide the
                ranks that it is taken from.
        """
        names = [f.name for f in fields(cls)]
        sizes: dict[str, int] = {}
        for part in text.split(","):
            name, _, size = (s.strip() for s in part.partition("="))
            if name not in names or name in sizes or not size.isdecimal() or not int(size):
                raise UsageError(
                    f"{argument('mesh', text)}: {part.strip()!r} is no dimension with its size, as in dp_shard=4,tp=2. "
                    f"The dimensions are {', '.join(names)}, each of them once.",
                    code="CKPT0203",
                )
            sizes[name] = int(size)
        mesh = cls(**sizes)
        if mesh.world > MOST_RANKS:
            raise UsageError(
                f"{argument('mesh', text)} has {mesh.world:,} ranks; there may be {MOST_RANKS:,}.", code="CKPT0209"
            )
        if mesh.replica % mesh.ep:
            raise UsageError(
                f"{argument('mesh', text)}: ep takes its ranks from dp_shard x cp x tp, and {mesh.ep} does not divide "
                f"{mesh.replica}.",
                code="CKPT0209",
            )
        return mesh

    @property
    def replica(self) -> int:
        """Return the number of ranks that together hold one copy of the tensors; each of these ranks has a file."""
        return self.dp_shard * self.cp * self.tp

    @property
    def world(self) -> int:
        """Return the number of ranks of the job."""
        return self.pp * self.dp_replicate * self.replica

    @property
    def loaders(self) -> int:
        """Return the number of ranks that read different data."""
        return self.dp_replicate * self.dp_shard

    def __str__(self) -> str:
        """Return the sizes above 1 as text that `parse` reads, such as "dp_shard=4,tp=2"; "dp_shard=1" for one rank."""
        sizes = {f.name: getattr(self, f.name) for f in fields(self)}
        return ",".join(f"{n}={s}" for n, s in sizes.items() if s > 1) or "dp_shard=1"

    def boxes(self, name: str, shape: tuple[int, ...], cut: Cut) -> list[RankBox]:
        """Return the boxes of a tensor, without empty ones, each with the rank in whose file it is written.

        Args:
            name: name of the tensor, for the message.
            shape: its shape.
            cut: how the mesh divides it.

        Raises:
            UsageError: the part that a rank of the job would hold cannot be described by a DTensor.
        """
        try:
            return list(_divide_tensor(self, shape, cut))
        except ValueError as e:
            raise UsageError(
                f'{argument("mesh", str(self))}: "{name}" is {list(shape)}, and {e}, so no job with this mesh can load '
                "it with DCP. Choose a mesh that divides it.",
                code="CKPT0209",
            ) from None


@lru_cache(1024)
def _divide_tensor(mesh: Mesh, shape: tuple[int, ...], cut: Cut) -> tuple[RankBox, ...]:
    """Return the boxes of a tensor with the ranks that write them; see `Mesh.boxes`.

    Raises:
        ValueError: the part that a rank would hold cannot be described by a DTensor.
    """
    of_experts = cut.ep and mesh.ep > 1
    inner, parts = (mesh.ep, mesh.ep) if of_experts else (mesh.tp, mesh.tp if cut.tp is not None else 1)
    along = 0 if of_experts else cut.tp or 0
    outer = mesh.replica // inner
    if max(cut.fsdp, along) >= len(shape):
        raise ValueError(f"it has no dimension {max(cut.fsdp, along)}")
    out = []
    for rank in range(mesh.replica):
        o, i = divmod(rank, inner)
        if i >= parts:  # a copy of what the first of these ranks holds
            continue
        parallel = [PlacementCut(along, parts, i, cut.packed)] if parts > 1 else []
        split = parts if along == cut.fsdp else 1
        described = _find_local_pieces(shape, [PlacementCut(cut.fsdp, outer, o, split), *parallel])
        held = _find_local_pieces(shape, [*parallel, PlacementCut(cut.fsdp, outer, o)])
        if len(held) > 1 or described != held:
            raise ValueError(
                f"rank {rank} of {mesh.replica} would hold rows of it that a DTensor does not describe as one box"
            )
        if cut.fsdp and compute_local_pieces(shape, parallel)[1][cut.fsdp] % outer:
            raise ValueError(f"FSDP2 divides dimension {cut.fsdp} only into {outer} equal parts")
        out += [RankBox(rank, p.start, p.shape) for p in held]
    return tuple(out)


def _find_local_pieces(shape: tuple[int, ...], cuts: list[PlacementCut]) -> list[ShardPiece]:
    """Return the boxes of a tensor that a rank holds after these cuts, without empty ones."""
    return [p for p in compute_local_pieces(shape, cuts)[0] if prod(p.shape)]
