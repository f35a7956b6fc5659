"""The folders mp_rank_TT[_PPP][_EEE] of Megatron-LM's model-parallel ranks: which ranks of the job they are, and
whether all are there."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice, pairwise

from ckpttool.errors import Corrupt, Unsupported

from ..keys import RANK
from .sharding import Geometry

__all__ = ["RankNumbers", "parse_rank_folder", "read_geometry", "refuse_exchanged_folders", "refuse_missing_ranks"]

#: (tensor-, pipeline-, expert-parallel rank)
RankNumbers = tuple[int, int, int]


def read_geometry(args: Mapping[str, object]) -> Geometry:
    """Return the parallel sizes that the arguments of a job state; a missing one is 1.

    Where the tensor-parallel size of experts is missing, it is that of the rest of the model.
    """

    def size(key: str, otherwise: int) -> int:
        """Return the argument `key` if it is a positive number, else `otherwise`."""
        n = args.get(key)
        return n if isinstance(n, int) and n > 0 else otherwise

    tensor = size("tensor_model_parallel_size", size("model_parallel_size", 1))
    return Geometry(
        tensor,
        size("pipeline_model_parallel_size", 1),
        size("expert_model_parallel_size", 1),
        size("expert_tensor_parallel_size", tensor),
        args,
    )


def parse_rank_folder(folder: str, geometry: Geometry, root: str) -> RankNumbers:
    """Parse the name mp_rank_TT[_PPP][_EEE] of a folder into (tensor-, pipeline-, expert-parallel rank).

    The name has a pipeline rank only if the job has several stages, and an expert rank only if it has several
    expert-parallel ranks. `root` is the path of the checkpoint, for errors.

    Raises:
        Corrupt: the job has no such rank.
    """
    m = RANK.fullmatch(folder)
    assert m is not None
    rest = [int(n) for n in m.groups()[1:] if n is not None]
    wanted = [n for n in (geometry.pipeline, geometry.expert) if n > 1]
    found = dict(zip((k for k in ("pipeline", "expert") if getattr(geometry, k) > 1), rest, strict=False))
    out = int(m[1]), found.get("pipeline", 0), found.get("expert", 0)
    if (
        len(rest) < len(wanted)
        or any(rest[len(wanted) :])
        or any(n >= k for n, k in zip((out[0], *rest), (geometry.tensor, *wanted), strict=False))
    ):
        raise Corrupt(
            f"{root}/{folder}: is of no rank of a job of {_describe_sizes(geometry)}, which its arguments say.",
            code="CKPT0409",
        )
    return out


def _describe_sizes(geometry: Geometry) -> str:
    """Return the parallel sizes of a job as text for an error."""
    return f"{geometry.tensor} tensor-, {geometry.pipeline} pipeline- and {geometry.expert} expert-parallel ranks"


def refuse_missing_ranks(folders: Mapping[str, RankNumbers], geometry: Geometry, root: str) -> None:
    """Refuse folders that are not exactly those of all ranks of the job.

    Args:
        folders: {folder: its tensor-, pipeline- and expert-parallel rank}.
        geometry: the parallel sizes of the job.
        root: the path of the checkpoint, for errors.

    Raises:
        Corrupt: two folders belong to one rank, or some are missing; the error names these.
        Unsupported: experts are cut so that the names of the folders do not determine the part that each has.
    """
    have = set(folders.values())
    if len(have) != len(folders):
        raise Corrupt(f"{root}: two folders are of one rank.", code="CKPT0411")
    same = geometry.expert_tensor == geometry.tensor
    if geometry.expert_tensor not in (1, geometry.tensor):
        raise Unsupported(
            f"{root}: experts are cut among {geometry.expert_tensor} tensor-parallel ranks and all else among "
            f"{geometry.tensor}; names of folders tell only one of them.",
            code="CKPT0325",
        )
    if not same:  # a rank's folder has the numbers of two cuts, and each has to be whole
        have = {(t, p, e) for t, p, _ in have for _, q, e in have if p == q}
    tensor, pipeline, expert = geometry[:3]
    if lost := pipeline * tensor * expert - len(have):
        every = ((t, p, e) for p in range(pipeline) for t in range(tensor) for e in range(expert))
        some = [_make_folder_name(*rank, geometry) for rank in islice((r for r in every if r not in have), 8)]
        shown = ", ".join(some) + (f" and {lost - len(some)} more" if lost > len(some) else "")
        raise Corrupt(
            f"{root}: a job of {_describe_sizes(geometry)} wrote it, and {lost} of its folders are missing: {shown}. "
            "Fetch the files of all ranks.",
            code="CKPT0402",
        )


def refuse_exchanged_folders(
    folders: Mapping[str, RankNumbers], arguments: Mapping[str, object], geometry: Geometry, root: str
) -> None:
    """Refuse folders whose order is not that of the ranks in their arguments, which grow along every parallel
    dimension.

    Nothing is refused if all folders state the same rank, since a tool then wrote them from one process, or if some
    state none.

    Args:
        folders: {folder: its tensor-, pipeline- and expert-parallel rank}.
        arguments: {folder: the job's arguments in its file}.
        geometry: the parallel sizes.
        root: the path of the checkpoint, for errors.

    Raises:
        Corrupt: folders were exchanged or copied over others; the error names these.
    """
    wrote = {f: a["rank"] for f, a in arguments.items() if isinstance(a, dict) and type(a.get("rank")) is int}
    if len(wrote) < len(folders) or len(set(wrote.values())) == 1:
        return
    lines: dict[object, list[str]] = {}
    for folder, (t, p, e) in folders.items():
        n = wrote[folder]
        if geometry.expert_tensor < geometry.tensor and (n % geometry.tensor, n % geometry.expert) != (t, e):
            raise Corrupt(
                f"{root}: by the arguments in the files, rank {n} of the job wrote {folder}, which is the folder of "
                "another rank. Folders were exchanged or copied over others; fetch them again.",
                code="CKPT0410",
            )
        lines.setdefault(("tensor", p, e), []).append(folder)
        lines.setdefault(("pipeline", t, e), []).append(folder)
        if geometry.args.get("context_parallel_size", 1) == 1:  # else several processes write one folder
            lines.setdefault(("expert", t, p), []).append(folder)
        lines.setdefault(n, []).append(folder)
    for line in lines.values():
        for a, b in pairwise(sorted(line, key=lambda f: folders[f])):
            if wrote[a] >= wrote[b]:
                raise Corrupt(
                    f"{root}: by the arguments in the files, rank {wrote[a]} of the job wrote {a}, and rank {wrote[b]} "
                    f"wrote {b}. Megatron-LM numbers ranks the other way round, so folders were exchanged or copied "
                    "over others; fetch them again.",
                    code="CKPT0410",
                )


def _make_folder_name(t: int, p: int, e: int, geometry: Geometry) -> str:
    """Return the name of the folder of the tensor-parallel rank `t`, pipeline rank `p` and expert-parallel rank `e`."""
    name = f"mp_rank_{t:02d}" + (f"_{p:03d}" if geometry.pipeline > 1 else "")
    return name + (f"_{e:03d}" if geometry.expert > 1 else "")
