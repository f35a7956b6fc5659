"""Megatron-LM's files of model-parallel ranks (`--ckpt-format torch`), the format before dist_checkpointing, as one
state.

    iter_0000003/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt      torch.save of {"args": Namespace, "checkpoint_version":
                                                                3.0, "iteration", "model" or "model0", "model1" of a
                                                                virtual pipeline, "optimizer", "opt_param_scheduler",
                                                                "rng_state": [{...}]}
    .../distrib_optim.pt                                        of DistributedOptimizer (megatron/legacy/optimizer.py)
    .../model_rng.pt, mp_rank_TT[_PPP]_DDD/optim.pt             of jobs of 2022 and 2023 with DistributedOptimizer; the
                                                                latter, of data-parallel ranks, are not read

TT is the tensor-parallel rank, PPP the pipeline-parallel one where there are several, EEE the expert-parallel one.
Every rank has its part of each parameter (megatron/legacy/sharding.py), and layers are numbered from 0 on each: stages
follow one another, in a virtual pipeline first all of the first chunks. What several ranks have alike is compared when
it is read (`check_replicas_equal`), and copies that differ are refused by name.

Names, and everything else, are those of dist_checkpointing (megatron/__init__.py).

Source: megatron/training/checkpointing.py of Megatron-LM, commit d98e8a6 (generate_state_dict, get_checkpoint_name).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ckpttool.engine.copy.tensor_digests import proof_digests
from ckpttool.errors import Corrupt, Unsupported
from ckpttool.formats import stored_tensors
from ckpttool.formats.pickles import short
from ckpttool.formats.stored_tensors import StoredTensor
from ckpttool.index import boxes
from ckpttool.index.checkpoint import Checkpoint, Chunks, Leaves, OtherCopy, Path, TensorEntry, joined
from ckpttool.index.names import CanonicalState
from ckpttool.index.records import Records
from ckpttool.layouts import checkpoint_of
from ckpttool.storage.source import Source

from ...rank_files import Files, are_leaves_equal, find_differing_file, format_step, load_rank_file
from ..buckets import LocalBoxes, Segment, add_segment
from ..keys import TRAINER, find_model_file, parse_common_state, to_plain_args
from .folders import parse_rank_folder, read_geometry, refuse_exchanged_folders, refuse_missing_ranks
from .sharding import (
    LAYER,
    Geometry,
    count_local_experts,
    flatten_state_dict,
    has_older_names,
    is_expert,
    place_shard,
    to_core_name,
    to_global_name,
)

__all__ = [
    "OPTIMIZER_FILE",
    "Parameter",
    "RankFile",
    "RankedSave",
    "build_ranked_checkpoint",
    "check_replicas_equal",
    "list_chained_optimizers",
    "read_ranks",
]

OPTIMIZER_FILE = "distrib_optim.pt"
_CHUNK = re.compile(r"model\d{0,4}")
_RNG = ("random_rng_state", "np_rng_state", "torch_rng_state", "cuda_rng_state", "rng_tracker_states")
_BUFFERS = (".router.expert_bias", ".router.local_tokens_per_expert")  # of the model, and of no optimizer
_TIED = "embedding.word_embeddings.weight"


class Parameter(NamedTuple):
    """A tensor of the model as one rank has it. `name` is the rank's own; `chunk` counts the chunks of a virtual
    pipeline."""

    name: str
    chunk: int
    local: LocalBoxes
    entry: TensorEntry

    @property
    def expert(self) -> bool:
        """Return whether the parameter belongs to an expert; experts may have an optimizer of their own."""
        return is_expert(self.name)


@dataclass
class RankFile:
    """The files of one model-parallel rank. `distributed` is (number of the file, what distrib_optim.pt holds)."""

    folder: str
    number: int
    tensor: int
    pipeline: int
    expert: int
    tree: dict[str, Any]
    distributed: tuple[int, object] | None = None
    parameters: list[Parameter] = field(default_factory=list)


@dataclass
class RankedSave:
    """The files of all ranks of one save, and the tensors of the model that they are."""

    files: Files
    geometry: Geometry
    ranks: list[RankFile]
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    copies: dict[LocalBoxes, list[tuple[RankFile, TensorEntry]]] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)  # names without a rule
    objects: Leaves = field(default_factory=dict)  # states that modules of Transformer Engine keep
    others: list[OtherCopy] = field(default_factory=list)  # of objects and random states, those unlike the first rank's
    older_names: bool = False

    def add_first(self, out: Leaves, rank: RankFile, at: Path, x: object) -> None:
        """Add to `out` one rank's copy of something that several ranks save, unless an earlier rank's copy is there.

        If an earlier copy is there and differs, the new one is recorded in `others`.

        Args:
            out: {canonical path: leaf} so far.
            rank: the rank whose copy it is.
            at: the canonical path of the thing, of two elements.
            x: the copy as the rank's file holds it.
        """
        new, kept = self.files.leaves(rank.number, x, at), {p: leaf for p, leaf in out.items() if p[:2] == at}
        if not kept:
            out |= new
        elif not are_leaves_equal(self.files, kept, new):
            self.others.append(OtherCopy(joined(at), [r.number for r in self.ranks].index(rank.number), 0))

    def weights(self) -> dict[str, TensorEntry]:
        """Return {name: tensor} of the whole model, joined from the parts of all ranks.

        Raises:
            Corrupt: the parts differ in dtype, or do not cover a tensor exactly once.
            Unsupported: a part that must be split is not contiguous in its file.
        """
        out: dict[str, TensorEntry] = {}
        for local, some in self.copies.items():
            entry = some[0][1]
            t = out.setdefault(
                local.weight,
                TensorEntry(entry.dtype, self.shapes[local.weight], (), Chunks(len(self.shapes[local.weight]))),
            )
            if entry.dtype != t.dtype:
                raise Corrupt(
                    f'{self.files.path(some[0][0].number)}: "{local.weight}" is {entry.dtype}, and {t.dtype} in '
                    "others.",
                    code="CKPT0409",
                )
            add_boxes(t.chunks, local, entry)
        for name, t in out.items():
            if (why := boxes.find_cover_problem(t.shape, t.chunks.boxes())) is not None:
                raise Corrupt(
                    f'{self.files.source.root}: "{name}" {list(t.shape)}: {why}. Ranks are missing or from other '
                    "saves.",
                    code="CKPT0408",
                )
        return out

    def leaves(self) -> Leaves:
        """Return {canonical path: leaf} of everything except the model and the optimizer's tensors.

        Random states are kept for each tensor- and pipeline-parallel rank, as in dist_checkpointing. Of the rest,
        values of another rank that differ from the first one's are at extra.<folder of the rank>.

        Raises:
            Corrupt: the optimizer has another form than Megatron-Core's.
        """
        first = self.ranks[0]
        out: Leaves = dict(self.objects)
        handled = ("rng_state", "optimizer", "args", *_RNG)
        tree = {k: x for k, x in first.tree.items() if not _CHUNK.fullmatch(k) and k != "rng_state" and k not in _RNG}
        out |= self.files.leaves(first.number, parse_common_state(tree, self.files.path(first.number)))
        for r in self.ranks:
            if r is not first:
                rest = {k: x for k, x in r.tree.items() if k not in handled and not _CHUNK.fullmatch(k)}
                rest = {k: x for k, x in rest.items() if k not in tree or tree[k] != x}
                if rest:
                    out |= self.files.leaves(r.number, rest, ("extra", r.folder))
            states = r.tree.get("rng_state", [{k: r.tree[k] for k in _RNG if k in r.tree}])
            if states and states != [{}]:
                place = f"shard_{r.pipeline}.{r.tensor}_{self.geometry.pipeline}.{self.geometry.tensor}"
                self.add_first(out, r, ("rng", place), [states])
        return out


def add_boxes(out: Chunks, local: LocalBoxes, entry: TensorEntry) -> None:
    """Add a rank's part of a tensor to the chunks of the whole tensor.

    Args:
        out: the chunks of the whole.
        local: the boxes of the whole that the rank holds.
        entry: the part as it lies in the rank's file.

    Raises:
        Unsupported: the part is not contiguous in the file, and consists of several boxes.
    """
    c = entry.chunks[0] if entry.chunks else None
    if c is None or not entry.numel:
        for start, shape in local.boxes:
            out.add(start, shape, 0, 0, 0)
    elif c.strides is None:
        flat = TensorEntry(entry.dtype, (entry.numel,), (), Chunks.whole((entry.numel,), *c.extent))
        add_segment(out, local, flat, Segment(0, entry.numel, []))
    elif len(local.boxes) == 1 and len(local.boxes[0][0]) == len(entry.shape):
        out.add(*local.boxes[0], c.extent.file, c.extent.offset, c.extent.length, c.strides)
    else:
        raise Unsupported(
            f'"{local.weight}" is not contiguous in the file of a rank, and it is to be taken apart.', code="CKPT0324"
        )


# --------------------------------------------------------------------------------------------------------- reading


def read_ranks(source: Source, optimizer: bool = True) -> RankedSave:
    """Read the files of all ranks below a folder. Without `optimizer`, distrib_optim.pt is not read.

    Raises:
        Corrupt: ranks are missing, or their files are from different saves.
        Unsupported: names and arguments do not tell how a parameter is cut.
    """
    # all files have to be those of one job, whose arguments say how many ranks there are
    names = {n: f"{n}/{file}" for n in sorted(source.list()) if (file := find_model_file(source, n))}
    files = Files(source)
    source.prefetch_ends(names.values())
    trees = {n: _load_rank_tree(files, name) for n, name in names.items()}
    first = next(iter(trees))
    args = to_plain_args(trees[first][1].get("args"))
    if not isinstance(args, dict):
        if len(trees) > 1 or first != "mp_rank_00":
            raise Unsupported(
                f"{source.root}/{first}: has no args, which tell how the files of the ranks go together.",
                code="CKPT0325",
            )
        args = {}
    geometry = read_geometry(args)
    folders = {name: parse_rank_folder(name, geometry, source.root) for name in trees}
    ranks = [RankFile(name, number, *folders[name], tree) for name, (number, tree) in trees.items()]
    ranks.sort(key=lambda r: (r.pipeline, r.expert, r.tensor))
    refuse_missing_ranks(folders, geometry, source.root)

    # and of one save
    arguments = {name: to_plain_args(tree.get("args")) for name, (_, tree) in trees.items()}
    odd = find_differing_file(_collect_save_facts(files, r, arguments) for r in ranks)
    if odd is not None:
        r, what = ranks[odd[0]], odd[1]
        here, there = (format_step(_collect_save_facts(files, x, arguments)[what]) for x in (r, ranks[0]))
        raise Corrupt(
            f"{files.path(r.number)}: the {what} here: {here}; in {ranks[0].folder}: "
            f"{there}. The files are from different saves; fetch the files of one save.",
            code="CKPT0409",
        )
    refuse_exchanged_folders(folders, arguments, geometry, source.root)

    for r in ranks:
        if optimizer and OPTIMIZER_FILE in source.list(r.folder):
            name = f"{r.folder}/{OPTIMIZER_FILE}"
            tree = load_rank_file(files, name)
            r.distributed = files.number(name), tree
    out = RankedSave(files, geometry, ranks)
    _place_models(out)
    return out


def build_ranked_checkpoint(ranks: RankedSave, optimizer: Mapping[Path, TensorEntry]) -> Checkpoint:
    """Build the index of a save from the files of its ranks and the optimizer's tensors, which have no parameters yet.

    `optimizer` is {path: tensor}.

    Raises:
        Corrupt: the ranks' parts of a tensor do not cover it exactly once.
    """
    leaves: Leaves = {("model", n): t for n, t in ranks.weights().items()}
    leaves |= optimizer
    leaves |= ranks.leaves()
    notes = []
    if ranks.older_names:
        notes.append(
            "the names are those of Megatron-LM before Megatron-Core; parameters have their names in Megatron-Core here"
        )
    source, world = ranks.files.source, ranks.geometry.args.get("world_size")
    world = world if isinstance(world, int) else len(ranks.ranks)
    named = CanonicalState(leaves, {}, TRAINER, notes)
    out = checkpoint_of(named, "megatron", source.root, world, ranks.files.names, source)
    out.others = ranks.others
    out.records, out.ranks = Records(ranks.files.records.values()), {r.number: k for k, r in enumerate(ranks.ranks)}
    return out


def _load_rank_tree(files: Files, name: str) -> tuple[int, dict[str, object]]:
    """Load the file of a rank, by its name below the source; return (its number among the files, what it holds).

    Raises:
        Corrupt: it is not a dict with a model.
    """
    tree, number = load_rank_file(files, name), files.number(name)
    if not isinstance(tree, dict) or not all(isinstance(k, str) for k in tree) or not any(map(_CHUNK.fullmatch, tree)):
        raise Corrupt(
            f'{files.path(number)}: holds {short(tree)}, not a dict with "model" as Megatron-LM writes it.',
            code="CKPT0406",
        )
    return number, tree


def list_chained_optimizers(tree: Mapping[str, Any], what: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return [(Megatron-Core's state of an optimizer, the state dict of torch's optimizer inside it)] of a rank's file.

    Several optimizers may be chained; the list is empty if the file has none.

    Args:
        tree: the content of the file.
        what: how errors name it.

    Raises:
        Corrupt: the optimizers have another form than Megatron-Core's.
    """
    x = tree.get("optimizer")
    out = []
    for one in x if isinstance(x, list) else [] if x is None else [x]:
        inner = one.get("optimizer", one) if isinstance(one, dict) else None
        groups = inner.get("param_groups", []) if isinstance(inner, dict) else None
        if inner is None or not isinstance(groups, list) or not all(isinstance(g, dict) for g in groups):
            raise Corrupt(f"{what}: its optimizer is {short(one)}, not what Megatron-Core saves.", code="CKPT0417")
        for g in groups:
            numbers = g.get("params", [])
            if not isinstance(numbers, list) or not all(isinstance(n, int) for n in numbers):
                raise Corrupt(
                    f"{what}: the parameters of a param group are {short(numbers)}, not numbers.", code="CKPT0417"
                )
        out.append((one, inner))
    return out


def _collect_save_facts(files: Files, rank: RankFile, arguments: Mapping[str, object]) -> dict[str, object]:
    """Return {description: value} of everything in a rank's file that all files of one save must have in common.

    This is the iteration, the parallel sizes, the param groups and the gradient scalers. Tensors in these are read,
    since a capturable optimizer has its learning rate in one.

    Args:
        files: the files read.
        rank: the rank whose file it is.
        arguments: {folder of a rank: the job's arguments in its file}.
    """
    args, what = arguments[rank.folder], files.path(rank.number)
    found = {
        "iteration": rank.tree.get("iteration"),
        "parallel sizes": read_geometry(args)[:4] if isinstance(args, dict) else None,
        "param groups": _list_shared_param_groups(rank.tree, what),
        "gradient scalers": [one.get("grad_scaler") for one, _ in list_chained_optimizers(rank.tree, what)],
    }
    read_at = files.reader(rank.number)
    return {k: stored_tensors.inline_tensors(x, read_at, what) for k, x in found.items()}


def _list_shared_param_groups(tree: Mapping[str, object], what: str) -> list[list[dict[str, object]]]:
    """Return [[hyperparameters of a param group]] for each optimizer in a rank's file.

    The numbers of the parameters, which differ between pipeline stages, are left out.

    Args:
        tree: the content of the file.
        what: how errors name it.
    """
    return [
        [{k: v for k, v in g.items() if k != "params"} for g in inner.get("param_groups", [])]
        for _, inner in list_chained_optimizers(tree, what)
    ]


# ---------------------------------------------------------------------------------------------------------- models


def _place_models(out: RankedSave) -> None:
    """Find the place of every rank's parameters in the model, and add them to `out`.

    Raises:
        Corrupt: the ranks' models contradict one another.
        Unsupported: queries, keys and values are in the order of the first versions of the format, or it is not known
            how a parameter is cut.
    """
    models: dict[int, list[dict[str, Any]]] = {}
    for r in out.ranks:
        chunks = sorted((k for k in r.tree if _CHUNK.fullmatch(k)), key=lambda k: int(k[5:] or 0))
        if not all(isinstance(r.tree[k], dict) for k in chunks):
            raise Corrupt(f"{out.files.path(r.number)}: its model is not a state dict.", code="CKPT0406")
        models[r.number] = [flatten_state_dict(r.tree[k], out.files.path(r.number)) for k in chunks]
        if len(chunks) != len(models[out.ranks[0].number]):
            raise Corrupt(
                f"{out.files.path(r.number)}: has {len(chunks)} chunks of a model, and others have another number.",
                code="CKPT0409",
            )
    if any(has_older_names(one) for some in models.values() for one in some):
        version = out.ranks[0].tree.get("checkpoint_version", 0)
        if not isinstance(version, (int, float)) or version < 2:
            raise Unsupported(
                f"{out.files.source.root}: is of version {version} of the format, in which queries, keys and values "
                "have another order. Load it in the Megatron-LM that wrote it, and save it with a newer one.",
                code="CKPT0329",
            )
        out.older_names = True
        models = {n: [{to_core_name(k): x for k, x in one.items()} for one in some] for n, some in models.items()}
    offsets = _count_layer_offsets(out, models)
    tied = not out.geometry.args.get("untie_embeddings_and_output_weights", True) and out.geometry.pipeline > 1
    for chunk in range(len(models[out.ranks[0].number])):
        for r in out.ranks:
            _place_chunk(out, r, chunk, models[r.number][chunk], offsets, tied)


def _count_layer_offsets(
    out: RankedSave, models: Mapping[int, list[dict[str, object]]]
) -> dict[tuple[int, int, str], int]:
    """Return the number in the whole model of the first layer that each chunk of each pipeline stage has.

    Layers are counted chunk by chunk, and stage after stage within a chunk of the virtual pipeline.

    Args:
        out: the save.
        models: {number of a rank's file: its state dict for each chunk}.

    Returns:
        {(chunk, pipeline stage, name of a list of layers): number of the first layer}.

    Raises:
        Corrupt: ranks of a stage have different layers, or the arguments state another number of layers.
    """
    counts: dict[tuple[int, int, str], int] = {}
    for r in out.ranks:
        for chunk, model in enumerate(models[r.number]):
            found: dict[str, set[int]] = {}
            for name in model:
                if m := LAYER.fullmatch(name):
                    found.setdefault(m["head"], set()).add(int(m["i"]))
            for head, numbers in found.items():
                n = max(numbers) + 1
                if len(numbers) != n or counts.setdefault((chunk, r.pipeline, head), n) != n:
                    raise Corrupt(
                        f"{out.files.path(r.number)}: has {len(numbers)} layers below {head}, up to {n - 1}, unlike "
                        "other ranks of its stage or with gaps.",
                        code="CKPT0409",
                    )
    heads = dict.fromkeys(head for *_, head in counts)
    offsets: dict[tuple[int, int, str], int] = {}
    total = dict.fromkeys(heads, 0)
    for chunk in range(len(next(iter(models.values())))):
        for stage in range(out.geometry.pipeline):
            for head in heads:
                offsets[chunk, stage, head] = total[head]
                total[head] += counts.get((chunk, stage, head), 0)
    stated = out.geometry.args.get("num_layers")
    if (
        isinstance(stated, int)
        and [h for h in heads if not h.startswith("mtp.")] == ["decoder.layers"]
        and total["decoder.layers"] != stated
    ):
        raise Corrupt(
            f"{out.files.source.root}: its arguments say {stated} layers, and the ranks have "
            f"{total['decoder.layers']}. Files are from other saves.",
            code="CKPT0409",
        )
    return offsets


def _place_chunk(
    out: RankedSave,
    r: RankFile,
    chunk: int,
    model: Mapping[str, object],
    offsets: Mapping[tuple[int, int, str], int],
    tied: bool,
) -> None:
    """Add one rank's chunk of the model to `out`: tensors with their place in the model, and states of modules as
    objects.

    Args:
        out: the save.
        r: the rank.
        chunk: the number of the chunk in the virtual pipeline.
        model: {name: tensor or state} of the chunk.
        offsets: {(chunk, stage, path of a list of layers): the number of the first layer}.
        tied: whether the output layer of the last stage is a copy of the embedding.

    Raises:
        Corrupt: ranks' parts of a parameter give different shapes of the whole.
        Unsupported: names and arguments do not determine how a parameter is cut.
    """
    layers: dict[str, list[str]] = {}
    for name in model:
        m = LAYER.fullmatch(name)
        layers.setdefault(f"{m['head']}.{m['i']}" if m else "", []).append(name)
    for name, x in model.items():
        m = LAYER.fullmatch(name)
        layer = f"{m['head']}.{m['i']}" if m else ""
        fused = f"{layer}.self_attention.linear_qkv.weight" in model and f"{layer}.input_layernorm.weight" in model
        whole, e = to_global_name(name, offsets[chunk, r.pipeline, m["head"]] if m else 0, fused)
        if tied and whole == "output_layer.weight":
            whole = _TIED
        here = count_local_experts(layers[layer]) if e is not None else 0
        experts, number = here * out.geometry.expert, None if e is None else r.expert * here + e
        if whole.endswith("._extra_state") or not isinstance(x, StoredTensor):
            _add_object(out, r, whole, x, number, experts)
        else:
            _refuse_unplaceable_parameter(out, name)
            behind = None
            if ".linear_fc1.weight" in name:
                behind = model.get(name.replace(".linear_fc1.weight", ".linear_fc2.weight"))
            columns = behind.shape[1] if isinstance(behind, StoredTensor) and len(behind.shape) == 2 else None
            part = place_shard(whole, x.shape, out.geometry, r.tensor, number, experts, columns)
            entry = out.files.entry(r.number, x)
            if out.shapes.setdefault(whole, part.shape) != part.shape:
                raise Corrupt(
                    f'{out.files.path(r.number)}: "{name}" makes {list(part.shape)}, and those of other ranks '
                    f"{list(out.shapes[whole])}.",
                    code="CKPT0412",
                )
            if not part.known:
                out.unknown.add(whole)
            out.copies.setdefault(part.local, []).append((r, entry))
            if not name.endswith(_BUFFERS):
                r.parameters.append(Parameter(name, chunk, part.local, entry))


def _refuse_unplaceable_parameter(out: RankedSave, name: str) -> None:
    """Refuse a parameter that ranks hold in a form whose place in the model is not known; `name` is its name on a rank.

    Raises:
        Unsupported: all experts are in one matrix, or ranks share key-value groups.
    """
    if re.search(r"\.experts\.weight[12]$", name):
        raise Unsupported(
            f'{out.files.source.root}: "{name}" holds all experts of a rank in one transposed matrix '
            "(moe_use_legacy_grouped_gemm). Load it in Megatron-LM, and save it with its options ckpt-convert-format "
            "torch_dist and ckpt-convert-save DIR.",
            code="CKPT0325",
        )
    if out.geometry.args.get("group_query_attention") and name.endswith(".linear_qkv.weight"):
        groups = out.geometry.args.get("num_query_groups")
        if isinstance(groups, int) and groups < out.geometry.tensor:
            raise Unsupported(
                f'{out.files.source.root}: "{name}" has keys and values of {groups} groups on {out.geometry.tensor} '
                "tensor-parallel ranks, some of which have the same ones.",
                code="CKPT0325",
            )


def _add_object(out: RankedSave, r: RankFile, name: str, x: object, expert: int | None, experts: int) -> None:
    """Add an object that is not a tensor of the model, such as the state of a module, unless another rank has added it.

    As in dist_checkpointing, it is stored in a list of one element.

    Args:
        out: the save.
        r: the rank.
        name: the object's name in the whole model.
        x: the object.
        expert: the number in the model of its expert; None if it belongs to none.
        experts: the number of experts of its layer in the model.
    """
    at: Path = ("extra", f"{name}/shard_{expert or 0}_{experts or 1}")
    if x is not None or name != "output_layer._extra_state":
        out.add_first(out.objects, r, at, [x])


# ---------------------------------------------------------------------------------------------------------- proofs


def check_replicas_equal(ranks: RankedSave, names: Iterable[str], ckpt: Checkpoint) -> None:
    """Check that all ranks' copies of some tensors of the model are equal, by reading all of them.

    Args:
        ranks: the files of all ranks.
        names: the names of the tensors.
        ckpt: the checkpoint to which they belong.

    Raises:
        Unsupported: two copies differ, so that none is known to be the model's, or no rule states how ranks cut the
            tensor.
    """
    wanted = set(names)
    several = [(local, some) for local, some in ranks.copies.items() if len(some) > 1 and local.weight in wanted]
    jobs = {
        f"{k}:{i}": replace(entry, path=("copy", k, i))
        for k, (_, some) in enumerate(several)
        for i, (_, entry) in enumerate(some)
    }
    digests = proof_digests(jobs, ckpt, ranks.files.source)
    for k, (local, some) in enumerate(several):
        odd = next((i for i in range(len(some)) if digests[f"{k}:{i}"] != digests[f"{k}:0"]), None)
        if odd is None:
            continue
        a, b = some[0][0].folder, some[odd][0].folder
        if local.weight in ranks.unknown:
            raise Unsupported(
                f'{ranks.files.source.root}: "{local.weight}" differs between {a} and {b}, and no rule of ckpttool '
                "says how tensor-parallel ranks cut a parameter of this name. Load it in Megatron-LM, and save it with "
                "its options ckpt-convert-format torch_dist and ckpt-convert-save DIR.",
                code="CKPT0325",
            )
        raise Unsupported(
            f'{ranks.files.source.root}: "{local.weight}" is the same on every rank in Megatron-LM, and differs '
            f"between {a} and {b}, so that none of them is the one of the model. Fetch both again; if they differ in "
            "the job, too, load it there and save it as torch_dist.",
            code="CKPT0325",
        )
