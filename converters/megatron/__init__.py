"""megatron: folders of Megatron-Core's dist_checkpointing in the format torch_dist, and of frameworks that have them
inside.

    DIR/.metadata, DIR/__{rank}_{n}.distcp    a folder of dcp; layers may be stacked, and the plans of all ranks follow
                                              .metadata's fields
    DIR/metadata.json                         {"sharded_backend": "torch_dist", "sharded_backend_version": 1, ...}
    DIR/common.pt                             torch.save of {"args": Namespace, "iteration", "opt_param_scheduler",
                                              "optimizer": {"optimizer": {"param_groups"}, "param_state_sharding_type"},
                                              "content_metadata", ...}; in newer versions the item
                                              common_state/shard_0_1 instead
    DIR/../latest_checkpointed_iteration.txt  names the newest iter_{iteration:07d}

    iter_N/ without metadata.json             Megatron-FSDP's fsdp_dtensor: megatron/fsdp_dtensor.py
    mp_rank_XX[_YYY]/model_optim_rng.pt       the format before dist_checkpointing: megatron/legacy/ranks.py

    {weights/, context/}                      NeMo 2: DIR is weights/
    {model, optimizer, extra}/dist_ckpt/      verl since 0.9: three such folders are one state; before, dist_ckpt/ alone

Keys: a parameter has the name that Megatron's modules give it, with global numbers of layers, whatever the tensor and
pipeline parallel sizes were; with `non_homogeneous_layers` false, "decoder.layers.mlp.linear_fc1.weight" is all layers
of a pipeline, first axis. Objects are items {key}/shard_{place}_{shape}, a list of one. The optimizer's tensors, by
`distrib_optim_sharding_type`:

    fully_reshardable           optimizer.state.{param, exp_avg, exp_avg_sq}.{key}, in the shape of the parameter
    fully_sharded_model_space   the same with fp32_param; before 0.14 as flat ranges of boxes
                                (megatron/stacked.py, `unflatten_ranges`)
    dp_reshardable              optimizer.distributed.dp_group_idx_{i}.gbuf_idx_{j}.dtype_{..}.bucket_idx_{k}.{param,
                                exp_avg, exp_avg_sq}: the buckets of DistributedOptimizer, without names
                                (megatron/buckets.py)

Canonical names: model.{key}, optim.state.{key}.{slot}, extra.master.{key} for the fp32 copy of a weight, scheduler.*,
rng.shard_{place}.*, trainer.iteration, extra.args.*, and extra.{key} for any other object. Stacked layers are taken
apart: each has its number.

Sources: megatron/core/dist_checkpointing/{serialization,mapping}.py and strategies/torch.py,
megatron/core/optimizer/{optimizer, distrib_optimizer,__init__}.py of megatron-core 0.16.1; strategies/torch.py of 0.12;
the folders in fixtures/, which 0.16.1 wrote.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol
from weakref import WeakKeyDictionary

from ckpttool.errors import Unsupported
from ckpttool.index.checkpoint import Checkpoint
from ckpttool.layouts import Layout, Place, ReadOptions, late
from ckpttool.program import Advice, ForTrainer, Program, SeenFolder, StateFile
from ckpttool.storage.source import Source

from .dist_checkpointing import DistCheckpointing
from .fsdp_dtensor import FsdpDtensor
from .keys import RANK
from .legacy import RankFolders

__all__ = ["LAYOUTS"]

_NOT_MEGATRON = "no metadata.json with sharded_backend"


class MegatronDialect(Protocol):
    """One of the three formats that a folder of Megatron can have, chosen for one folder."""

    evidence: str  # what in the folder shows that it has this format

    def read(self, source: Source, options: ReadOptions) -> Checkpoint:
        """Return the index of the folder: all tensors and values under their canonical names.

        The byte ranges of tensors in the files may be left to `locate`.
        """

    def locate(self, ckpt: Checkpoint, source: Source) -> Checkpoint:
        """Return the index `ckpt`, which `read` returned, with the byte ranges in files of all tensors that lack
        them."""


_chosen: WeakKeyDictionary[Source, MegatronDialect] = WeakKeyDictionary()


def _choose_dialect(source: Source) -> MegatronDialect | None:
    """Return the one of Megatron's formats that a folder has; None if it has none of them.

    The result is remembered for the source, so that the folder is listed only once.
    """
    if source not in _chosen:
        found = DistCheckpointing.find(source) or FsdpDtensor.find(source) or RankFolders.find(source)
        if found is None:
            return None
        _chosen[source] = found
    return _chosen[source]


def detect(where: Place) -> tuple[bool, str]:
    """Return (whether a place is a folder in one of Megatron's formats, or contains such folders; why or why not, as
    text)."""
    if where.file is not None:
        return False, "a folder with metadata.json of Megatron-Core; this is a file"
    dialect = _choose_dialect(where.source)
    return (False, _NOT_MEGATRON) if dialect is None else (True, dialect.evidence)


def read(where: Place, options: ReadOptions) -> Checkpoint:
    """Return the index of a folder in one of Megatron's formats.

    Stacked layers, flat ranges and buckets get the shapes of the model, so their byte ranges in the files are found
    here already.

    Raises:
        Unsupported: it has none of the formats, its metadata.json names another one than torch_dist, or a part of it
            has no place in the shapes of the model.
        Corrupt: files are missing or damaged, or contradict one another.
    """
    dialect = _choose_dialect(where.source)
    if dialect is None:
        raise Unsupported(f"{where.source.root}: {_NOT_MEGATRON}.")
    return dialect.read(where.source, options)


def locate(ckpt: Checkpoint, source: Source) -> Checkpoint:
    """Return the index with the byte ranges in files of all tensors, and with names of parameters for the optimizer's
    state.

    Raises:
        Unsupported: nothing proves to which parameter a part of the optimizer belongs, or ranks have different copies
            of what they should share.
    """
    dialect = _choose_dialect(source)
    if dialect is None:
        raise Unsupported(f"{source.root}: {_NOT_MEGATRON}.")
    return dialect.locate(ckpt, source)


#: Files in the folder of a model-parallel rank.
_RANK_FILES = frozenset(("model_optim_rng.pt", "model_rng.pt", "distrib_optim.pt", "optim.pt"))


def _next_step(advice: Advice) -> str:
    """Return advice for the user: Megatron-Core resumes from the folder, and the commands that convert for other
    sizes."""
    return (
        f"resumes in Megatron-Core; at any other TP and PP size: {advice.convert('--to megatron -n FILES')}; for "
        f"torch's own, under Megatron's names: {advice.convert('--to dcp -n RANKS')}"
    )


def _is_piece(source: Source, name: str) -> bool:
    """Return whether a file is only one rank's piece of a checkpoint: a rank's file in a folder named mp_rank_XX."""
    return name in _RANK_FILES and RANK.fullmatch(source.root.rstrip("/").rpartition("/")[2]) is not None


def _find_missing_files(folder: SeenFolder) -> Iterator[str]:
    """Yield each file or folder that is missing in a folder, as "no <name>".

    These are metadata.json, folders of model-parallel ranks that follow from the numbers of the other folders, and
    files that the folders of other ranks have.
    """
    if {".metadata", "common.pt"} <= set(folder.names) and "metadata.json" not in folder.names:
        yield "no metadata.json"
    folders = {n: set(folder.source.list(n)) - {"optim.pt"} for n in folder.names if RANK.fullmatch(n)}
    files: set[str] = set().union(*folders.values())
    of: dict[int, set[tuple[int, ...]]] = {}  # {tensor-parallel rank: the other numbers}
    for name, has in folders.items():
        if has:
            m = RANK.fullmatch(name)
            assert m is not None
            of.setdefault(int(m[1]), set()).add(tuple(int(n) for n in m.groups()[1:] if n is not None))
            yield from (f"no {name}/{file}" for file in sorted(files - has))
    most = max(map(len, of.values()), default=0)  # experts may be on some tensor-parallel ranks alone, on each as many
    for first in range(max(of, default=-1) + 1):
        here = of.get(first, set())
        for rest in sorted(set().union(*of.values()) - here) if len(here) < most else ():
            yield "no " + "_".join((f"mp_rank_{first:02d}", *(f"{n:03d}" for n in rest)))


#: Its rows in the tables of the documents (docs/_hooks.py).
_ROWS = {
    "readme-trainers": (
        (
            "[Megatron-Core, NeMo 2](docs/how-to/trainers/megatron.md) (**megatron**)",
            "`torch_dist`, every sharding of the optimizer; `mp_rank_XX` of all ranks",
            "yes",
            "yes",
            "yes",
            "none saved",
        ),
    ),
    "layouts": (
        (
            "**megatron**",
            (
                "Megatron-Core's `iter_N` in the format `torch_dist`: plain and stacked layers, any tensor, "
                "pipeline and expert parallel size, the optimizer as `fully_reshardable`, "
                "`fully_sharded_model_space` (flat ranges, too) or `dp_reshardable`; Megatron-FSDP's "
                "`fsdp_dtensor`; the older `mp_rank_XX/model_optim_rng.pt` and `distrib_optim.pt` of all tensor-, "
                "pipeline- and expert-parallel ranks; NeMo 2's `weights/` and `context/`; verl's `dist_ckpt/` "
                "folders. See [Megatron-Core](../how-to/trainers/megatron.md)"
            ),
            (
                "a folder that `dist_checkpointing.load` reads at any tensor, pipeline and data parallel size: "
                "plain layers, the optimizer as `fully_reshardable`, fp32 copies of the weights where the source "
                "has none"
            ),
        ),
    ),
    "directories": (
        (
            (
                "Megatron-Core's `iter_N` (`torch_dist`, `fsdp_dtensor`, and `mp_rank_XX/model_optim_rng.pt` of all "
                "ranks), NeMo 2's `weights/` and `context/`, verl's `dist_ckpt/` folders"
            ),
            "`megatron`",
            (
                "weights, optimizer, param groups, scheduler, RNG of every model-parallel rank, arguments; all "
                "`dist_ckpt/` folders of verl are one state"
            ),
        ),
    ),
    "for": (
        (
            "`torch_dist` with `fully_reshardable`, and `args` and a schedule where the source has none",
            "`--load` of the folder above it, with `latest_checkpointed_iteration.txt`",
        ),
    ),
    "resumed": (
        (
            "Megatron-Core, NeMo 2",
            "yes, `torch_dist`",
            "yes, `--for megatron`: any TP, PP and DP size",
            "yes",
            "yes",
            "of every model-parallel rank",
            "files beside it are named, not read",
        ),
    ),
}
LAYOUTS = (
    Layout(
        name="megatron",
        title="directory of Megatron-Core",
        detect=detect,
        read=read,
        locate=locate,
        aliases=("torch_dist", "mcore", "megatron-core", "nemo"),
        of_trainer=True,
        reader_uses=(),
        write=late("ckpttool.converters.megatron.write:write"),
        prepare=late("ckpttool.converters.megatron.write:prepare"),
        writer_uses=("world_size",),
        needs_named_optimizer=True,
        joins_remainders=True,
        program=Program(
            rows=_ROWS,
            next_step=_next_step,
            state_files=(StateFile(r"common\.pt", "param groups, scheduler, arguments", "optim"),),
            rank_folders=RANK.pattern,
            is_piece=_is_piece,
            gaps=_find_missing_files,
            keeps_options=False,
            resumed_by=(ForTrainer("megatron", "Megatron-LM"),),
            about_masters=(
                ". Megatron-Core itself saves such masters in fully_reshardable where embeddings are tied and the "
                "pipeline has several stages, or with overlapped gradient reduction"
            ),
        ),
    ),
)
