"""The optimizer files of zero1, zero2 and zero3: flat tensors of masters and slots, as zero.py describes them."""

from __future__ import annotations

from math import prod

from ckpttool.engine.flat.split_state import find_shared_scalars
from ckpttool.formats.torch_pickles import TensorRef
from ckpttool.formats.torch_zip_writer import TorchFiles
from ckpttool.index.checkpoint import ITEMSIZE, Path, TensorEntry, joined
from ckpttool.index.draft import Dropped

from . import files as ds
from . import write_common as dw
from .experts import Experts
from .files import FlatRange
from .geometry import Groups, elements_per_rank, partition_parameters

__all__ = ["OptimizerFiles"]


class OptimizerFiles:
    """The optimizer files: flat tensors of masters, then of every slot, the same record by record on all ranks."""

    def __init__(
        self, plan: dw.SavePlan, groups: Groups, world: int, experts: Experts, local: Groups, replicas: list[int]
    ) -> None:
        """Lay out the flat tensors of all ranks.

        Args:
            plan: what all files of the save have in common.
            groups: [{name: shape}], the parameters in each flat tensor.
            world: the number of ranks.
            experts: which rank has which expert.
            local: the parameters as each rank has them.
            replicas: over how many ranks each flat tensor of stages 1 and 2 is partitioned.
        """
        self.plan, self.groups, self.world, self.stage = plan, groups, world, plan.stage
        self.experts, self.local, self.replicas = experts, local, replicas
        stage = plan.stage
        self.dropped: list[Dropped] = []
        self.tensors: dict[str, TensorEntry] = {}
        self.sources: dict[str, TensorEntry] = {}
        if stage == 3:
            self.flats, self.parts = partition_parameters(groups, world)
        else:
            self.parts = [elements_per_rank(self._count_raw_elements(g), n) for g, n in enumerate(replicas)]
            self.flats = experts.place(local, self.parts, None, replicas, "the save to write")
        # (group, slot or None for the masters, dtype); the order of the records in every file
        self.columns: list[tuple[int, str | None, str]] = [
            (g, None, plan.common_dtype([plan.tensors[n].dtype for n in group])) for g, group in enumerate(groups)
        ]
        slots = [plan.slots_of(group) for group in groups]
        for slot in dict.fromkeys(s for found in slots for s in found):
            for g, group in enumerate(groups):
                if slot in slots[g]:
                    dtypes = [plan.slot_entry(n, slot).dtype for n in group if n not in plan.state.fresh]
                    self.columns.append((g, slot, plan.common_dtype(dtypes)))
        what = f"ZeRO-{stage} keeps one for a whole {'sub-group' if stage == 3 else 'param group'}"
        self.scalars: list[dict[str, object]] = []
        for group in groups:
            scalars, lost = find_shared_scalars(plan.state, group, what)
            self.scalars.append(scalars)
            self.dropped += lost

    def numel_of(self, rank: int, column: tuple[int, str | None, str]) -> int:
        """Return the number of elements of one flat tensor in a rank's optimizer file.

        At stages 1 and 2 the masters are stored without the padding at the end of the group, slots with it.

        Args:
            rank: the rank.
            column: the flat tensor: (number of the group, slot or None for the masters, dtype).
        """
        g, slot, _ = column
        if self.stage == 3 or slot is not None:
            return self.parts[g]
        part = self.experts.ranks.split(rank, self.replicas[g])[1]
        return max(0, min(self.parts[g], self._count_raw_elements(g) - part * self.parts[g]))

    def _count_raw_elements(self, g: int) -> int:
        """Return the number of elements, without padding, of the parameters of group `g` that a rank has."""
        return sum(map(prod, self.local[g].values()))

    def add(self, files: TorchFiles, ids: list[list[int]]) -> None:
        """Add the optimizer files of all ranks, and record where each of their tensors lies.

        `ids` has, for each param group, the numbers of its flat tensors.
        """
        numbers = []
        for rank in range(self.world):
            sizes = {str(k): self.numel_of(rank, c) * ITEMSIZE[c[2]] for k, c in enumerate(self.columns)}
            name = f"{self.plan.tag}/{self.plan.prefix}zero_pp_rank_{rank}_{self.plan.model_rank}_optim_states.pt"
            numbers.append(files.add(name, self._build_optimizer_tree(rank, ids), sizes))
        for k, (g, slot, dtype) in enumerate(self.columns):
            at = [files.offset(f, str(k)) for f in numbers]
            for n in self.groups[g]:
                if slot is not None and n in self.plan.state.fresh:
                    continue  # zeros
                path: Path = ("model", n) if slot is None else ("optim", "state", n, slot)
                name = joined(path)
                cuts = [
                    FlatRange(first, last, numbers[r], at[r] + inside * ITEMSIZE[dtype])
                    for r, first, last, inside in self.flats[n].parts
                ]
                self.tensors[name] = ds.build_entry_from_ranges(self.flats[n].shape, dtype, path, cuts)
                self.sources[name] = self.plan.state.tensors[n] if slot is None else self.plan.state.slots[n][slot]

    def _build_optimizer_tree(self, rank: int, ids: list[list[int]]) -> dict[str, object]:
        """Return the content of a rank's optimizer file. `ids` has, for each param group, the numbers of its flat
        tensors."""
        masters: list[object] = []
        state: dict[int, dict[str, object]] = {g: dict(s) for g, s in enumerate(self.scalars) if s}
        for k, column in enumerate(self.columns):
            n = self.numel_of(rank, column)
            ref = TensorRef(column[2], (n,), str(k), n)
            if column[1] is None:
                masters.append(ref)
            else:
                state.setdefault(column[0], {})[column[1]] = ref
        groups = [ds.build_param_group(g.options, own) for g, own in zip(self.plan.state.groups, ids, strict=True)]
        base = {"state": state, "param_groups": groups}
        out = self.plan.scaler_keys()
        out["zero_stage"] = dw.pickled_stage(self.stage)
        if self.stage == 3:
            out.update(partition_count=self.world, optimizer_state_dict=base, fp32_flat_groups=masters)
        else:
            out.update(
                base_optimizer_state=base,
                single_partition_of_fp32_groups=masters,
                group_paddings=[self.parts[g] - self.numel_of(rank, (g, None, "")) for g in range(len(self.groups))],
                param_alignment_paddings=[[0] * len(g) for g in self.local],
                partition_count=self.replicas,
                ds_version=dw.DS_VERSION,
                param_slice_mappings=[self._build_slice_mappings(rank, g) for g in range(len(self.groups))],
            )
        return {"optimizer_state_dict": out, "ds_config": self.plan.ds_config, "ds_version": dw.DS_VERSION}

    def _build_slice_mappings(self, rank: int, g: int) -> dict[str, object]:
        """Return param_slice_mappings of group `g`: {name on the rank: address in the rank's flat tensor, to be
        pickled}.

        Parameters of which the rank has no part are left out.
        """
        out: dict[str, object] = {}
        for n in self.groups[g]:
            own = [(at, last - first) for r, first, last, at in self.flats[n].parts if r == rank]
            if own:  # several of a stack of experts, one after the other
                name = self.experts.local_name(n, self.world // self.replicas[g])[1]
                out[name] = dw.pickled_fragment(sum(k for _, k in own), min(own)[0])
        return out
