"""Megatron-LM's files of ranks, from before torch_dist: which folders are such, and the functions that read them."""

from __future__ import annotations

from ckpttool.index.checkpoint import Checkpoint
from ckpttool.layouts import ReadOptions
from ckpttool.storage.source import Source

from ..keys import BUCKETS, find_model_file, replace_unnamed_optimizer

__all__ = ["RankFolders"]


class RankFolders:
    """The dialect of folders with a file for each model-parallel rank (legacy/ranks.py)."""

    def __init__(self, file: str) -> None:
        """Keep the path of a rank's `file` as the evidence for the format."""
        self.evidence = f"has {file} of Megatron-LM"

    @classmethod
    def find(cls, source: Source) -> RankFolders | None:
        """Find a file of a model-parallel rank in the folders below a source; None where there is none."""
        for folder in source.list():
            if name := find_model_file(source, folder):
                return cls(f"{folder}/{name}")
        return None

    def read(self, source: Source, options: ReadOptions) -> Checkpoint:
        """Return the index of all ranks' files. The optimizer's state has no names of parameters yet.

        That state is left out if `options.only` has neither "optim" nor "extra".

        Raises:
            Corrupt: ranks are missing, or their files are from different saves.
            Unsupported: names and arguments do not determine how a parameter is cut, or the optimizer has an unknown
                form.
        """
        from .optimizer import read_raw_optimizer
        from .ranks import build_ranked_checkpoint, read_ranks

        optimizer = options.only is None or bool(options.only & {"optim", "extra"})
        ranks = read_ranks(source, optimizer)
        return build_ranked_checkpoint(ranks, read_raw_optimizer(ranks) if optimizer else {})

    def locate(self, ckpt: Checkpoint, source: Source) -> Checkpoint:
        """Compare the copies that several ranks hold, find the parameters of the optimizer's state, and return the
        index with both.

        Raises:
            Corrupt: ranks are at different steps, or one lacks its part of a parameter.
            Unsupported: copies differ, or nothing proves to which parameter a part of the optimizer belongs.
        """
        from .optimizer import resolve_optimizer_names
        from .ranks import check_replicas_equal, read_ranks

        unnamed = {str(t.path[0]) for t in ckpt.tensors.values() if BUCKETS in t.path}
        ranks = read_ranks(source, bool(unnamed))
        weights = (str(t.path[1]) for t in ckpt.tensors.values() if t.path[0] == "model")
        check_replicas_equal(ranks, weights, ckpt)
        out = ckpt
        if unnamed:
            named, notes = resolve_optimizer_names(ranks, ckpt)
            replace_unnamed_optimizer(out, named, notes, unnamed)
        return out
