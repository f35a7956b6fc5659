"""fsdp1: a folder with one torch.save file a rank, as jobs of FSDP1 write with LOCAL_STATE_DICT or SHARDED_STATE_DICT.

    local_rank{r}.pt          model.state_dict()       any names do that end in rank{r} or rank_{r} before the suffix:
    local_optim_rank{r}.pt    optimizer.state_dict()   model_world_size_4_rank_0.pt (verl), pytorch_model_fsdp_rank0.bin
    flat_layout.json          see flat_layout.py       (accelerate), checkpoint-shard0.pt (FairScale)

or one file a rank with everything in it: {"model": ..., "optim": ..., "step": ...}. Files are identified by their
content:

    model       "<wrapped module>._flat_param" -> ShardedTensor, 1-D, padding of the last slices removed; buffers under
                their FQN; with use_orig_params=True also each FQN as the 1-D slice this rank has, a view of the former
                (torch/distributed/fsdp/_state_dict_utils.py, _local_post_state_dict_hook)
                "<fqn>" -> ShardedTensor or DTensor, dim-0 shards (SHARDED_STATE_DICT), any mesh
                "<fqn>" -> whole tensor (NO_SHARD, and every job of one rank)
    optimizer   raw `optimizer.state_dict()`: numbers, slots as 1-D slices, those of use_orig_params=False with the
                zeros that pad the last ones; parameters of which a rank has no part are missing
                `FSDP.optim_state_dict`: FQNs, ShardedTensor or DTensor, whatever the type (also LOCAL_STATE_DICT)

A ShardedTensor is pickled as (local shards, metadata, process group state, ...), a DTensor as its local tensor and a
spec with mesh and placements; both carry the rank that wrote them, which reveals exchanged files. Neither is
ever built. Flat parameters do not say which parameters they contain: see `flat_layout`.

FairScale's shards (`flat_param_0`, `shard_metadata`) have padding in the model, too, and describe their own content.

Sources: torch/distributed/fsdp, torch/distributed/_shard/sharded_tensor/api.py, torch/distributed/tensor; fairscale
nn/data_parallel/fully_sharded_data_parallel.py; files of torch 2.10 to 2.13.
"""

from __future__ import annotations

from ckpttool.errors import Corrupt
from ckpttool.layouts import Layout, Place, late
from ckpttool.program import Advice, Program

from ..options import Fsdp1Options
from ..rank_files import SIDE, group_rank_files, has_model_or_optimizer

__all__ = ["LAYOUTS"]


def detect(where: Place) -> tuple[bool, str]:
    """Return (whether a place is a folder with files of ranks and without `.metadata`; why or why not)."""
    source, name = where
    if name is not None:
        return False, "a folder with one torch.save file a rank; this is a file"
    names = source.list()
    if ".metadata" in names:
        return False, "has .metadata, so that files of ranks are not all of it"
    try:
        groups = [g for g in group_rank_files(names) if not SIDE.match(g.pattern)]
    except Corrupt:
        return True, "has files of ranks"
    if not groups:
        return False, "no torch.save files of ranks (local_rank0.pt, model_world_size_2_rank_0.pt, ...)"
    if not has_model_or_optimizer(source, groups):
        return False, f"has {groups[0].pattern}, which hold neither weights nor an optimizer"
    return True, f"has {groups[0].pattern} of {len(groups[0].ranks)} ranks"


def _next_step(advice: Advice) -> str:
    """Return advice for the user: the job resumes at the same world size, and the command that converts for another
    one."""
    return f"resumes in its job at {advice.ranks}; at another world size: {advice.convert('--to dcp -n RANKS')}"


#: Its rows in the tables of the documents (docs/_hooks.py).
_ROWS = {
    "readme-layouts": (
        (
            "**fsdp1**",
            "FSDP1 files of each rank",
            "LOCAL_STATE_DICT, ShardedTensor, DTensor; FairScale",
            "everything",
        ),
    ),
    "layouts": (
        (
            "**fsdp1**",
            (
                "one file per rank: LOCAL_STATE_DICT, ShardedTensor, DTensor, raw or FSDP optimizer state, both "
                "settings of `use_orig_params`; FairScale shards"
            ),
            ("LOCAL_STATE_DICT and `optimizer.state_dict()` files, with a `flat_layout.json` that makes them readable"),
        ),
    ),
}
LAYOUTS = (
    Layout(
        name="fsdp1",
        title="FSDP1: one torch.save file a rank",
        detect=detect,
        read=late("ckpttool.converters.fsdp1.read_ranks:read"),
        write=late("ckpttool.converters.fsdp1.write:write"),
        prepare=late("ckpttool.converters.fsdp1.write:prepare"),
        options=Fsdp1Options,
        aliases=("local", "local_state_dict"),
        reader_uses=("config", "like", "flat_layout", "wrap"),
        needs_named_optimizer=True,
        joins_remainders=True,
        sharding="fsdp2",
        program=Program(rows=_ROWS, next_step=_next_step),
    ),
)
