"""A checkpoint that does not fit the job: how it differs, whether that is a loss, and what would make it fit.

    found = compare_names_and_shapes({"net.w": (8, 4)}, {"w": (8, 4)}, tied)  # {"prefix": "net.", ...}, on a rank
    does_not_fit_job(reference, trace), describe_misfit(trace)                # where the runs are judged

A checkpoint of another model, or with other names, is not damaged; the job may be wrong instead.
But if the original fits the same job, or if a recorded job held tensors that this checkpoint lacks, then something was
lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ...errors import argument
from ...huggingface import lora
from ...printable import count_noun, list_first
from ..trace.model import Trace
from ..trace.records import MisfitRecord
from .differences import find_missing_and_extra_tensors, find_shape_and_dtype_differences
from .side_state_differences import is_recording, select_side_state

__all__ = ["compare_names_and_shapes", "describe_misfit", "does_not_fit_job"]

Shapes = Mapping[str, tuple[int, ...]]


def compare_names_and_shapes(stored: Shapes, live: Shapes, tied: Sequence[Sequence[str]]) -> MisfitRecord:
    """Compare the names and shapes of a checkpoint's model with those of a job's model.

    Args:
        stored: {FQN: shape} of the checkpoint's model.
        live: {FQN: shape} of the job's model.
        tied: the FQNs of each parameter of the job that has several.

    Returns:
        A record of the differences. `prefix` is a prefix of all names of the checkpoint without which these and their
        shapes are those of the job, else ""; `job_prefix` is the same for the names of the job. `rows` is [found,
        wanted] if only the number of rows differs, and is the same for all tensors that differ. `adapter` describes the
        LoRA adapter of a checkpoint that holds no other weights.
    """
    missing = [n for n in live if n not in stored]
    surplus = [n for n in stored if n not in live]
    shapes = {n: [list(stored[n]), list(live[n])] for n in stored if n in live and stored[n] != live[n]}
    out: MisfitRecord = {"missing": missing, "surplus": surplus, "shapes": shapes}
    if surplus:
        out["prefix"] = next(
            (p for p in _list_common_prefixes(stored) if _fits_job(_strip_prefix(stored, p), live, tied)), ""
        )
        out["job_prefix"] = next(
            (p for p in _list_common_prefixes(live) if _fits_job(stored, _strip_prefix(live, p), [])), ""
        )
    rows = {(a[0], b[0]) for a, b in shapes.values() if a and b and a[1:] == b[1:]}
    if shapes and not surplus and len(rows) == 1 and all(a[1:] == b[1:] and a for a, b in shapes.values()):
        out["rows"] = list(rows.pop())
    if missing and (held := lora.find_lora_in_shapes(stored)) is not None and held.alone:
        out["adapter"] = str(held)
    return out


def _list_common_prefixes(names: Iterable[str]) -> list[str]:
    """List the dotted prefixes that all names have in common, the longest first: ["a.b.", "a."]."""
    parts: list[str] | None = None
    for n in names:
        mine = n.split(".")[:-1]
        parts = (
            mine
            if parts is None
            else parts[
                : next(
                    (i for i, (a, b) in enumerate(zip(parts, mine, strict=False)) if a != b), min(len(parts), len(mine))
                )
            ]
        )
    return [".".join((parts or [])[:k]) + "." for k in range(len(parts or []), 0, -1)]


def _strip_prefix(names: Shapes, prefix: str) -> dict[str, tuple[int, ...]]:
    """Return {name without the prefix: shape}; a name that does not begin with it stays."""
    return {n.removeprefix(prefix): shape for n, shape in names.items()}


def _fits_job(stored: Shapes, live: Shapes, tied: Sequence[Sequence[str]]) -> bool:
    """Tell whether the names and shapes of a checkpoint are those of a job; of a tied parameter one name suffices.

    Args:
        stored: {FQN: shape} of the checkpoint's model.
        live: {FQN: shape} of the job's model.
        tied: the FQNs of each parameter of the job that has several.
    """
    others = {n: set(group) for group in tied for n in group}
    return all(live.get(n) == shape for n, shape in stored.items()) and all(
        n in stored or any(m in stored for m in others.get(n, ())) for n in live
    )


def does_not_fit_job(reference: Trace | None, got: Trace) -> bool:
    """Tell whether loading failed because checkpoint and job have different models.

    False if the checkpoint instead lost something that the reference has. `reference` is None if there is none.
    """
    if got.failed is None or got.misfit is None:
        return False
    if reference is None or reference.failed is not None:
        return True
    if got.misfit.get("prefix"):
        return True
    if not is_recording(reference):
        return False
    missing, _ = find_missing_and_extra_tensors(reference, got)
    gone = select_side_state(reference, "scheduler") and not select_side_state(got, "scheduler")
    return not (reference.state and (missing or find_shape_and_dtype_differences(reference, got)[0])) and not gone


def describe_misfit(got: Trace) -> str:
    """Return a text about what does not fit, and what would make it fit. `got` is a run whose load failed for that
    reason."""
    how: MisfitRecord = got.misfit or {"missing": [], "surplus": [], "shapes": {}}
    if adapter := how.get("adapter"):
        return (
            f"the checkpoint holds an adapter ({adapter}) and none of the {count_noun(len(how['missing']), 'tensor')} "
            "of the base model. Merge it into that with `ckpttool adapter merge BASE ADAPTER DST`, and verify the "
            "result, or give a checkpoint that holds both"
        )
    if prefix := how.get("prefix"):
        return (
            f'every name of the checkpoint begins with "{prefix}", and is otherwise that of the job. Pass '
            f"{argument('module_prefix', prefix)}, and the job's model gets these names"
        )
    if prefix := how.get("job_prefix"):
        return (
            f'every name of the job begins with "{prefix}", and is otherwise that of the checkpoint. Let the job be '
            f'the module below "{prefix[:-1]}"'
        )
    if rows := how.get("rows"):
        return (
            f"{list_first(how['shapes'])} have {rows[0]} rows in the checkpoint and {rows[1]} in the job. Take the "
            f"configuration that the checkpoint was trained with, or convert it with {argument('vocab_size', rows[1])}"
        )
    parts = [
        f"the checkpoint lacks {count_noun(len(how['missing']), 'tensor')} of the job, first {how['missing'][0]}"
        if how.get("missing")
        else "",
        f"it has {count_noun(len(how['surplus']), 'tensor')} that the job lacks, first {how['surplus'][0]}"
        if how.get("surplus")
        else "",
        f"{count_noun(len(how['shapes']), 'tensor')} have another shape, first {next(iter(how['shapes']))}"
        if how.get("shapes")
        else "",
    ]
    found = "; ".join(p for p in parts if p)
    if not found:
        failed = got.failed or ""
        why = (failed.partition("does not fit the job: ")[2] or failed).rstrip(".")
        return f"the model fits, the optimizer or the scheduler does not: {why}"
    return f"{found}. Give the job that saved the checkpoint"
