"""The model in FairScale's shards (`flat_param_0`, `shard_metadata`), which describe their own content.

Source: fairscale nn/data_parallel/fully_sharded_data_parallel.py.
"""

from __future__ import annotations

from math import prod

from ckpttool.engine.flat import flat_layout
from ckpttool.engine.flat.flat_layout import Flat, FlatLayout
from ckpttool.errors import Corrupt, Unsupported
from ckpttool.index.checkpoint import TensorEntry

from ..rank_files import Files, Rank, select_first_replica
from .flat_params import ModelInfo, RankSlices, Spans

__all__ = ["read_model"]


def read_model(files: Files, ranks: list[Rank]) -> tuple[dict[str, object], ModelInfo]:
    """Read the model from FairScale's shards, whose content `shard_metadata` describes.

    Args:
        files: the files read.
        ranks: what each rank's file holds of the model.

    Returns:
        ({name: tensor or value}, what reading the optimizer needs to know about the model).

    Raises:
        Unsupported: each rank has experts of its own.
        Corrupt: the metadata contradicts the tensors.
    """
    try:
        return _cut_by_metadata(files, ranks)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as e:
        raise Corrupt(
            f"{files.source.root}: shard_metadata does not fit the model ({type(e).__name__}: {e}); files of different "
            "saves, or a release of FairScale that ckpttool does not know.",
            code="CKPT0409",
        ) from None


def _cut_by_metadata(files: Files, ranks: list[Rank]) -> tuple[dict[str, object], ModelInfo]:
    """Cut the parameters out of FairScale's flat parameters, as `shard_metadata` in the files describes them.

    Args:
        files: the files read.
        ranks: what each rank's file holds of the model.

    Returns:
        ({name: tensor or value}, what reading the optimizer needs to know about the model), as `read_model` returns.

    Raises:
        KeyError, TypeError, ValueError, IndexError, AttributeError: the metadata does not fit the tensors.
        Unsupported: each rank has experts of its own.
    """
    trees = [
        {k.replace("_fsdp_wrapped_module.", "").replace("_fpw_module.", ""): x for k, x in r.tree.items()}
        for r in ranks
    ]
    metas = [r.tree["shard_metadata"] for r in ranks]
    out: dict[str, object] = {}
    flats: list[Flat] = []
    for i, wrapped in enumerate(metas[0]["param_metadata"]):
        path = wrapped["fsdp_path"].replace("_fsdp_wrapped_module.", "").replace("_fpw_module.", "")
        if wrapped.get("no_broadcast_optim_state") and len(ranks) > 1:
            raise Unsupported(
                f'{files.path(ranks[0].file)}: "{path}" has experts that each rank has for itself; ckpttool reads '
                "shards of what ranks have together.",
                code="CKPT0325",
            )
        for backing, described in wrapped["params"].items():
            key = f"{path}.{backing}" if path else backing
            spans, at, dtype = [], 0, ""
            for r, tree, meta in zip(ranks, trees, metas, strict=True):
                t, pad = tree[key], meta["param_metadata"][i]["params"][backing]["padding"]
                n = prod(t.shape) - pad
                if not t.contiguous or n < 0 or (dtype and t.dtype != dtype):
                    raise ValueError(f"{key} of rank {r.rank}: {t.dtype} {t.shape}, of which {pad} are padding")
                files.keep(r.file, t)
                spans.append((at, at + n, r.file, t.extent[0]))
                at, dtype = at + n, t.dtype
            columns = [list(c) for c in zip(*[s for s in spans if s[0] < s[1]], strict=True)] or [[], [], [], []]
            params = [
                (f"{path}.{n}" if path else n, tuple(s))
                for n, s in zip(described["names"], described["shapes"], strict=True)
            ]
            params = [(n.replace("_fpw_module.", ""), s) for n, s in params]
            flat = flat_layout.lay_out_flat_parameter(key, params, dtype=dtype)
            if flat.numel != at or [prod(s) for _, s in params] != list(described["numels"]):
                raise ValueError(f"{key} has {at} elements, its parameters {flat.numel}")
            whole = Spans(columns[0], columns[1], columns[2], columns[3], dtype)
            out.update((p.name, TensorEntry(dtype, p.shape, (), whole.chunks(p))) for p in flat.parts)
            flats.append(flat)
        for one, other in wrapped.get("shared_param_info") or ():
            for a, b in ((one, other), (f"{path}.{one}", f"{path}.{other}")):
                if a in out:
                    out.setdefault(b, out[a])
    for name in metas[0].get("buffer_names") or ():
        if name not in out and all(name in t for t in trees):
            out[name] = select_first_replica(files, ranks, name, [t[name] for t in trees])
    shapes = {p.name: p.shape for f in flats for p in f.parts}
    own = RankSlices([(i, len(ranks)) for i in range(len(ranks))], {})
    return out, ModelInfo(FlatLayout(False, len(ranks), tuple(flats), tuple(out)), shapes, {}, own)
