"""Which tensors of a model a mesh divides, and along which dimensions: what no checkpoint of another mesh says.

FSDP divides every parameter along dimension 0. What tensor parallelism divides is in a plan:

    # a glob of names of parameters or of their modules, and a style
    layers.*.attention.w[qkv]    colwise
    layers.*.attention.wo        rowwise
    tok_embeddings               embedding_rowwise
    layers.*.moe.experts.*       ep  fsdp=1

or in the plan that transformers has for the model of a config, or in how the tensors of another checkpoint are stored.
What none of them names is whole on each rank of tp. The styles are those of torch and transformers: colwise divides the
rows of a linear layer's weight and its bias, rowwise the columns of the weight and no bias
(torch/distributed/tensor/parallel/style.py; transformers/distributed/tensor_parallel.py, 5.23).
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping
from math import prod

from ckpttool.errors import Unsupported, UsageError, argument
from ckpttool.huggingface.model_names import load_config, read_model_names
from ckpttool.index.checkpoint import Checkpoint, Path, TensorEntry, joined
from ckpttool.index.paths import is_optimizer_state
from ckpttool.layouts import WriteOptions
from ckpttool.printable import count_noun

from .meshes import Cut, Mesh
from .options import MeshOptions

__all__ = ["MeshPlan"]

_Shapes = Mapping[str, tuple[int, ...]]
#: What a user may write, and what transformers' plans say of parameters that stay whole.
_STYLES = (
    "colwise",
    "rowwise",
    "embedding_rowwise",
    "embedding_colwise",
    "packed_colwise",
    "packed_rowwise",
    "shard(DIM)",
    "ep",
    "replicate",
)
_WHOLE = (
    "replicate",
    "replicated_with_grad_allreduce",
    "sequence_parallel",
    "mla_kv_a_proj",
    "all_reduce",
    "moe_tp_experts",
    "moe_identity_expert",
    "ep_dispatch_experts",
    "local_params",
)


class MeshPlan:
    """How a mesh divides the tensors of a checkpoint, and a note that says so to people.

    Raises:
        UsageError: nothing says what tensor parallelism divides, a plan is not one of this model, or the other
            checkpoint does not show its mesh.
        Unsupported: the config, or the other checkpoint, is of another model.
    """

    def __init__(self, ckpt: Checkpoint, mesh: Mesh, options: WriteOptions) -> None:
        """Determine how a mesh divides each tensor, and describe that in `note`.

        Tensor parallelism follows the first of these that is given: the option `tp_plan`, the --like checkpoint,
        transformers' plan for the model of --config.

        Args:
            ckpt: the checkpoint to divide.
            mesh: the sizes of the mesh.
            options: those of the conversion.
        """
        self.mesh = mesh
        self.shapes = dict(_iterate_parameter_shapes(ckpt))
        plan = options.of(MeshOptions).tp_plan
        if plan is not None:
            self.cuts, said = _parse_plan(plan, self.shapes), "the plan"
        elif mesh.tp > 1 and options.like is not None:
            chunks = {n: c.boxes() for n, c in options.like.chunks.items()}
            self.cuts, said = _infer_cuts(chunks, {n: s for n, (s, _) in options.like.shapes.items()}, self.shapes)
        elif options.config is not None and (mesh.tp > 1 or mesh.ep > 1):
            self.cuts, said = _read_transformers_plan(options.config, mesh, self.shapes)
        elif mesh.tp > 1:
            raise UsageError(
                f"{argument('mesh', str(mesh))}: nothing says which tensors tensor parallelism divides, and how. Give "
                f"{argument('tp_plan', 'FILE')}, or {argument('like')} a checkpoint of such a job, or "
                f"{argument('config')} the model, if the job divides it as transformers does.",
                code="CKPT0209",
            )
        else:
            self.cuts, said = {}, ""
        self._set_expert_cuts()
        by = {
            "tp": sum(c.tp is not None and not c.ep for c in self.cuts.values()) if mesh.tp > 1 else 0,
            "ep": sum(c.ep for c in self.cuts.values()),
        }
        parts = [f"{d} divides {count_noun(n, 'parameter')}" for d, n in by.items() if n]
        self.note = ", ".join(
            [f"for the mesh {mesh}: FSDP divides {count_noun(len(self.shapes), 'parameter')}", *parts]
        )
        self.note += f" ({said})" if said else ""
        if mesh.replica < mesh.world:
            self.note += f"; ranks with the same part read the same of {count_noun(mesh.replica, 'file')}"

    def _set_expert_cuts(self) -> None:
        """Set how FSDP and ep divide stacked experts, in place. If no plan names the experts, they are found by their
        names.

        FSDP divides as in torchtitan (apply_fsdp in torchtitan/distributed/fsdp.py, 0.3.0): experts, if there are
        enough of them for all ranks, otherwise dimension 1.

        Raises:
            UsageError: the mesh has ep, and the model has no stacked experts.
        """
        if self.mesh.ep == 1:
            self.cuts = {n: c._replace(ep=False, fsdp=max(c.fsdp, 0)) for n, c in self.cuts.items()}
            return
        if not any(c.ep for c in self.cuts.values()):
            stacked = [n for n, s in self.shapes.items() if len(s) == 3 and "experts" in n.split(".")]
            self.cuts |= dict.fromkeys(stacked, Cut(ep=True, fsdp=-1))
        experts = [n for n, c in self.cuts.items() if c.ep]
        if not experts:
            raise UsageError(
                f"{argument('mesh', str(self.mesh))}: the model has no stacked experts, tensors of three dimensions in "
                f"a module named experts, for ep to divide. {argument('tp_plan')} says which they are.",
                code="CKPT0209",
            )
        for n in experts:
            if self.cuts[n].fsdp < 0:
                few = self.mesh.replica > self.shapes[n][0]
                self.cuts[n] = self.cuts[n]._replace(fsdp=1 if few else 0)

    def cut(self, t: TensorEntry) -> Cut:
        """Return how a tensor is divided: a slot as its parameter, if it has the same shape, or else by FSDP alone."""
        fqn = _find_parameter_name(t.path)
        return self.cuts.get(fqn, Cut()) if self.shapes.get(fqn) == t.shape else Cut()

    def divides(self, path: Path) -> bool:
        """Return whether the parameter at a path, or the one that the optimizer slot at the path belongs to, is divided
        by more than FSDP along dimension 0."""
        return self.cuts.get(_find_parameter_name(path), Cut()) != Cut()


def _find_parameter_name(path: Path) -> str:
    """Return the FQN of the parameter at a path, or of the one that optimizer state at the path belongs to; "" for any
    other path."""
    if path[0] == "model":
        return joined(path[1:])
    of_state = is_optimizer_state(path) or path[:2] == ("extra", "master")
    return str(path[2]) if of_state and len(path) > 2 else ""


def _iterate_parameter_shapes(ckpt: Checkpoint) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (FQN, shape) of the parameters; of an optimizer without its model, the shape of the largest slot."""
    found: dict[str, tuple[int, ...]] = {}
    for t in ckpt.tensors.values():
        fqn = _find_parameter_name(t.path)
        if fqn and t.shape and (t.path[0] == "model" or prod(t.shape) > prod(found.get(fqn, ()))):
            found[fqn] = t.shape
    yield from found.items()


def _parse_style(style: str, shape: tuple[int, ...]) -> Cut | None:
    """Return how a style ("colwise", ...) divides a parameter of a shape; None if the style is not known."""
    ndim = len(shape)
    if m := re.fullmatch(r"shard\((\d)\)", style):
        return Cut(tp=int(m[1]))
    if style in ("ep", "grouped_gemm"):
        return Cut(ep=True, fsdp=-1)
    if style in _WHOLE:
        return Cut()
    name = re.sub(r"_(rep|gather_output|split_input)$", "", style)
    packed = 2 if name.startswith("packed_") and ndim > 1 else 1
    if name in ("colwise", "packed_colwise"):
        return Cut(tp=max(ndim - 2, 0), packed=packed)
    if name in ("rowwise", "packed_rowwise"):
        return Cut(tp=ndim - 1, packed=packed) if ndim > 1 else Cut()
    return Cut(tp=0 if name == "embedding_rowwise" else 1) if name in _STYLES else None


def _parse_plan(text: str, shapes: _Shapes) -> dict[str, Cut]:
    """Return {FQN: how it is divided} of the text of a plan. Of lines that match a parameter, the first one counts.

    Raises:
        UsageError: a line is not written so, matches nothing, or divides a dimension that a parameter does not have.
    """
    out: dict[str, Cut] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"{argument('tp_plan')}, line {number}"
        fsdp = re.fullmatch(r"fsdp=(\d)", words[2]) if len(words) == 3 else None
        if (
            len(words) < 2
            or len(words) > 3
            or (len(words) == 3) != (fsdp is not None)
            or _parse_style(words[1], ()) is None
        ):
            raise UsageError(
                f"{where}: {line.strip()!r} is not a name and a style, and perhaps fsdp=DIM. The styles are "
                f"{', '.join(_STYLES)}.",
                code="CKPT0203",
            )
        matched = [n for n in shapes if _matches_name(n, words[0])]
        if not matched:
            raise UsageError(
                f"{where}: no parameter is named {words[0]!r}. The first one is {next(iter(shapes), 'none')!r}.",
                code="CKPT0207",
            )
        for name in matched:
            cut = _parse_style(words[1], shapes[name])
            assert cut is not None
            cut = cut._replace(fsdp=int(fsdp[1])) if fsdp else cut
            if max(cut.tp or 0, cut.fsdp) >= len(shapes[name]):
                raise UsageError(
                    f'{where}: "{name}" is {list(shapes[name])}, and has no dimension {max(cut.tp or 0, cut.fsdp)}.',
                    code="CKPT0203",
                )
            out.setdefault(name, cut)
    return out


def _matches_name(fqn: str, pattern: str) -> bool:
    """Return whether a glob pattern matches a parameter.

    It may match the FQN of the parameter or of its module, or the end of either that follows a dot.
    """
    return any(fnmatch.fnmatchcase(n, p) for n in (fqn, fqn.rpartition(".")[0]) for p in (pattern, f"*.{pattern}"))


def _read_transformers_plan(config: str, mesh: Mesh, shapes: _Shapes) -> tuple[dict[str, Cut], str]:
    """Return ({FQN: how it is divided}, name of the plan for messages) from transformers' plans for the model of a
    config.

    Raises:
        Unsupported: it is another model, or transformers has no plan for it.
        MissingPackage: transformers is not installed.
    """
    about = load_config(config)
    names = read_model_names(about)
    kind = f"transformers' plan for {about['model_type']}"
    if odd := [n for n in shapes if n not in names.shapes]:
        raise Unsupported(
            f'The config describes a {about["model_type"]} model without "{odd[0]}", which these weights have. Give '
            f"{argument('config')} that of the model, or write {argument('tp_plan')}.",
            code="CKPT0311",
        )
    if mesh.tp > 1 and not names.tp_plan:
        raise Unsupported(
            f"{kind} is empty, so it does not say what tensor parallelism divides. {argument('tp_plan')} does.",
            code="CKPT0311",
        )
    out = {}
    for name, style in {**names.tp_plan, **(names.ep_plan if mesh.ep > 1 else {})}.items():
        if name in shapes:
            cut = _parse_style(style, shapes[name])
            if cut is None:
                raise Unsupported(
                    f'{kind} divides "{name}" as {style}, which ckpttool does not know. {argument("tp_plan")} says it '
                    "in other words.",
                    code="CKPT0311",
                )
            out[name] = cut
    return out, kind


def _infer_cuts(
    chunks: Mapping[str, list[tuple[tuple[int, ...], tuple[int, ...]]]], theirs: _Shapes, shapes: _Shapes
) -> tuple[dict[str, Cut], str]:
    """Infer how tensor parallelism divides parameters from another checkpoint: the one mesh of dp_shard and tp that
    gives its boxes.

    Experts are ignored. A tensor whose boxes are the same with and without tensor parallelism counts as whole.

    Args:
        chunks: {FQN: its boxes} of the other checkpoint.
        theirs: {FQN: its shape} of the other checkpoint.
        shapes: {FQN: shape} of the parameters to divide.

    Returns:
        ({FQN: how it is divided}, where that is from, for messages).

    Raises:
        UsageError: no mesh with tp gives these boxes, or several do.
        Unsupported: a parameter is not in the other checkpoint.
    """
    if missing := [n for n in shapes if n not in chunks]:
        raise Unsupported(
            f'The checkpoint of {argument("like")} does not have "{missing[0]}", and does not say how it is divided.',
            code="CKPT0311",
        )
    rows = {n: frozenset(c) for n, c in chunks.items() if theirs[n] and "experts" not in n.split(".")}
    most = max((len(b) for b in rows.values()), default=0)
    found = []
    for tp in (n for n in range(1, most + 1) if most % n == 0):
        fitting = dict(_find_fitting_cuts(rows, theirs, Mesh(dp_shard=most // tp, tp=tp)))
        if len(fitting) == len(rows):
            found.append((tp, fitting))
    plans = [(tp, cuts) for tp, cuts in found if tp > 1]
    if len(found) != 1 or not plans:
        several = f"{'more than one' if found else 'no'} mesh of dp_shard and tp"
        why = "FSDP alone" if found and found[0][0] == 1 else several
        raise UsageError(
            f"The checkpoint of {argument('like')} does not show what tensor parallelism divides: {why} divides "
            f"tensors as they are divided there. Give {argument('tp_plan')}.",
            code="CKPT0209",
        )
    tp, cuts = plans[0]
    return cuts, f"as the checkpoint of {argument('like')} is divided, over dp_shard={most // tp},tp={tp}"


def _find_fitting_cuts(
    rows: Mapping[str, frozenset[tuple[tuple[int, ...], tuple[int, ...]]]], shapes: _Shapes, mesh: Mesh
) -> Iterator[tuple[str, Cut]]:
    """Yield (FQN, how it is divided) of the tensors whose boxes the mesh can give. `rows` are {FQN: its boxes}."""
    for name, boxes in rows.items():
        shape = shapes[name]
        for cut in (Cut(), *(Cut(tp=d) for d in range(len(shape)) if mesh.tp > 1)):
            try:
                given = {(b.start, b.shape) for b in mesh.boxes(name, shape, cut)}
            except UsageError:
                continue
            if given == boxes:
                yield name, cut
                break
