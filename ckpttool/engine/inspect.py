"""inspect: what a checkpoint is, in numbers and names; reads the index only.

`inspect` returns a `Summary`, which prints itself and draws itself in a notebook; `draw_summary` is that drawing.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from .. import layouts
from ..errors import CkpttoolError, DestinationExists, UsageError, argument
from ..formats.shown_values import list_instance_classes, to_readable
from ..huggingface import encodings, lora, model_files
from ..index.checkpoint import (
    PACKED,
    Checkpoint,
    TensorEntry,
    Value,
    find_orphaned_optimizer_state,
    find_unnamed_optimizer_state,
)
from ..index.composites import MARK, describe_composites, describe_unwrapped, find_composites
from ..index.fqns import mask_name_numbers
from ..index.names import step_count
from ..index.optimizers import (
    describe_incomplete_state,
    describe_lost_slots,
    find_lost_slots,
    find_optimizers,
    find_unassigned_state,
)
from ..index.param_groups import describe_ungrouped_state, find_ungrouped_state
from ..index.selection import NOT_RESUMED, EntrySelection
from ..index.weight_sets import describe_weight_sets
from ..options import SearchPart, SizeRequest, list_keywords
from ..printable import count_noun, list_first, printable
from ..program import Advice
from ..storage import urls
from ..storage.source import Source
from ..storage.whole_file import write_text_file
from .discover.next_steps import next_step
from .discover.unread_files import describe_files, human
from .opening import CheckpointPath, OpenCheckpoint, OpenOptions, open_checkpoint, show_path

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.tree import Tree

    from .diff import Difference
    from .memory import JobMemory
    from .stats import Statistics

__all__ = [
    "Summary",
    "check_page_file",
    "describe_chunks",
    "draw_folded",
    "draw_summary",
    "draw_tree",
    "fold_tensors",
    "human",
    "inspect",
    "summarise",
]


def _format_count(n: int) -> str:
    """Write a large number in short: 1.20 B, 350.00 M."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if n >= limit:
            return f"{n / limit:.2f} {unit}"
    return str(n)


@dataclass(frozen=True, repr=False)
class Summary:
    """What a checkpoint is. Sizes are in bytes.

    `trainer` is the program that wrote it and `step` its optimizer step, None where the files do not tell; `ranks` the
    world size of the job, None for one file; `components` {"model": {"tensors", "bytes", "elements", "dtypes": {dtype:
    bytes}, "values"}, ...}; `optimizer` {"kind", "kinds": {name: parameters}, "slots": {slot: {"parameters", "bytes"}},
    "groups", "unassigned": how many tensors are not of one parameter each by their names}, None without one; `missing`
    sentences about what a resume would need and is not there; `not_read` files that the layout does not read, as
    `Unread.to_json` has them; `adapter` {"only": whether no base model is there,
    "ranks", "modules", "names", "base_model"} of LoRA, None without one; `encoding` {"weights": how many are codes with
    scales, "of": of how many, "schemes": {scheme: weights}, "faults": sentences about what is not whole, "method": the
    quant_method of config.json, None without one, "parameters": how many numbers the model has, codes counted as what
    they stand for, "encoded_parameters": how many of them are codes, "bits_per_parameter" and
    "encoded_bits_per_parameter": bits that one takes, scales included; None where the files do not tell}, None where no
    weight is codes; `weights` the sets of weights besides the model, {"key", "tensors", "bytes", "what", "option"}, the
    option being what exports one; `next` one line: whether its trainer resumes from it as it is, and the command for
    what it does not; `memory` what a job takes, where devices were given. `index` is the checkpoint that was
    summarised, without bytes of tensors; JSON does not have it.
    """

    path: str
    layout: str
    trainer: str | None
    step: int | None
    ranks: int | None
    files: int
    file_bytes: int
    tensors: int
    bytes: int
    components: dict[str, dict[str, Any]]
    optimizer: dict[str, Any] | None
    missing: list[str]
    notes: list[str]
    not_read: list[dict[str, Any]]
    next: str
    adapter: dict[str, Any] | None = None
    encoding: dict[str, Any] | None = None
    weights: list[dict[str, Any]] = field(default_factory=list)
    memory: JobMemory | None = None
    index: Checkpoint | None = field(default=None, compare=False)

    def to_json(self) -> dict[str, object]:
        """Convert to plain data."""
        memory = None if self.memory is None else self.memory.to_json()
        plain = asdict(replace(self, memory=None, index=None)) | {"memory": memory}
        return {k: v for k, v in plain.items() if k != "index"}

    def to_html(self, statistics: Statistics | None = None, difference: Difference | None = None) -> str:
        """Return a page about the checkpoint, as one HTML file that needs no network: sizes by module, which file and
        rank has which rows, param groups, a list of all tensors to search and sort.

        Args:
            statistics: what `stats(path, exponents=True)` returned, for norms and histograms of every tensor.
            difference: what `diff(path, other)` returned, for what differs from another checkpoint.

        Raises:
            UsageError: one of them is of another checkpoint.
        """
        from .page import render_checkpoint

        return render_checkpoint(self, statistics, difference)

    def save_html(
        self,
        file: str | os.PathLike[str],
        statistics: Statistics | None = None,
        difference: Difference | None = None,
        *,
        force: bool = False,
    ) -> None:
        """Write the page of `to_html` to a file, completely or not at all.

        Args:
            statistics, difference: as `to_html`.
            force: replace an existing file.

        Raises:
            DestinationExists: there is a file, and `force` is not set.
            UsageError: the file is a part of the checkpoint, or cannot be written.
        """
        check_page_file(file, self.path, force)
        write_text_file(Path(file), self.to_html(statistics, difference), make=False)

    def __repr__(self) -> str:
        """Return a line with layout, path, step, number of tensors and size."""
        step = "" if self.step is None else f", step {self.step:,}"
        text = f"{self.layout} checkpoint {self.path}{step}, {count_noun(self.tensors, 'tensor')}, {human(self.bytes)}"
        return f"<Summary: {printable(text)}>"

    def __str__(self) -> str:
        """Return the summary as text of several lines, as `draw_summary` draws it, without colours."""
        return _record_drawing(draw_summary(self)).export_text().rstrip("\n")

    def _repr_html_(self) -> str:
        """Return the summary as HTML, which a notebook shows."""
        shape = '<pre style="line-height:1.2">{code}</pre>'
        return _record_drawing(draw_summary(self)).export_html(inline_styles=True, code_format=shape)


def check_page_file(file: str | os.PathLike[str], source: str, force: bool) -> None:
    """Raise if a page cannot be written to a file.

    Args:
        source: path or URL of the checkpoint; no file in it may be replaced.
        force: whether an existing file may be replaced.

    Raises:
        DestinationExists: there is a folder, or a file and `force` is not set, or an archive that must be kept.
        UsageError: it is a URL, or lies in the checkpoint.
    """
    where, inside = os.path.realpath(file), os.path.realpath(source)
    if urls.is_url(file):
        said = f"{argument('html', os.fspath(file))}: a page is written to a file here, not to a URL."
        raise UsageError(said, code="CKPT0214")
    if not urls.is_url(source) and (where == inside or where.startswith(inside.rstrip("/") + "/")):
        said = f"{file} is a part of {source}, which must not change. Choose another file."
        raise UsageError(said, code="CKPT0211")
    if os.path.isdir(where) or (os.path.lexists(file) and not force):
        what = "a folder" if os.path.isdir(where) else f"already there; {argument('force', True)} replaces it"
        raise DestinationExists(f"{file} is {what}.", code="CKPT0601")
    layouts.check_replaceable(where)


def _record_drawing(drawing: RenderableType) -> Console:
    """Draw on a console of 120 columns that records it, and return that console, to be exported as text or as HTML."""
    from rich.console import Console

    console = Console(file=io.StringIO(), record=True, force_jupyter=False, width=120, highlight=False, emoji=False)
    console.print(drawing)
    return console


@list_keywords
def inspect(
    path: CheckpointPath,
    *,
    only: Iterable[str] | None = None,
    weights: str | None = None,
    fits: str | None = None,
    strategy: Iterable[str] | None = None,
    precision: str = "saved",
    optimizer: str | None = None,
    **reading: Unpack[SearchPart],
) -> Summary:
    """Summarise a checkpoint: layout, ranks, step, components, parameters, dtypes, optimizer and what is missing; reads
    headers only.

    Args:
        fits: devices of a job, "8x80GB", or "4x8x80GB" for 4 nodes of 8: `Summary.memory` says what training takes on
            each.
        strategy: the sharding strategies to compute that for: "ddp", "zero1", "zero2", "zero3", "fsdp2", "hsdp"; None
            for all.
        precision: dtypes of that job: "saved" (those of the checkpoint), "fp32", "mixed" or "bf16".
        optimizer: of that job: "saved", "adamw", "sgd" or "none"; None for that of the checkpoint, or "adamw" if it has
            none.
        (the others): as `open`.
    """
    sizes = SizeRequest(fits=fits, strategy=strategy, precision=precision, optimizer=optimizer)
    options = OpenOptions(only=only, weights=weights, allow_equal_ranks=True, allow_mixed_steps=True, **reading)
    with open_checkpoint(path, options, needed=lambda component: False, prove_later=True) as opened:
        return summarise(opened, show_path(path), sizes)


def summarise(
    opened: OpenCheckpoint,
    path: str | os.PathLike[str],
    sizes: SizeRequest = SizeRequest(),  # noqa: B008
) -> Summary:
    """Summarise an open checkpoint. If only a part of it was opened, missing state is not listed.

    Args:
        path: path or URL of the checkpoint, for messages.
        sizes: a job whose memory is computed, if its `fits` is set.
    """
    ckpt, only = opened.checkpoint, opened.selection.only
    components: dict[str, dict[str, Any]] = {}
    entries: list[TensorEntry | Value] = [*ckpt.tensors.values(), *ckpt.values.values()]
    for t in entries:
        c = components.setdefault(t.component, {"tensors": 0, "bytes": 0, "elements": 0, "dtypes": {}, "values": 0})
        if isinstance(t, Value):
            c["values"] += 1
            continue
        c["tensors"] += 1
        c["bytes"] += t.nbytes
        c["elements"] += t.numbers
        c["dtypes"][t.dtype] = c["dtypes"].get(t.dtype, 0) + t.nbytes
    order = ("model", "optim", "scheduler", "scaler", "rng", "dataloader", "trainer", "extra")
    wrong = opened.describe_sampled_masters()
    shown = urls.redact_url(os.fspath(path)) if urls.is_url(path) else os.fspath(path)
    return Summary(
        path=urls.display_path(path),
        layout=ckpt.layout,
        trainer=ckpt.trainer,
        step=step_count(ckpt.value),
        ranks=ckpt.world_size,
        files=len(ckpt.files),
        file_bytes=sum(ckpt.sizes),
        tensors=len(ckpt.tensors),
        bytes=ckpt.nbytes,
        components={k: components[k] for k in order if k in components},
        optimizer=_describe_optimizer(ckpt),
        missing=_list_missing(ckpt) if opened.selection == EntrySelection() else [],
        notes=[
            *ckpt.notes,
            *_make_notes(ckpt),
            *([wrong] if wrong else ()),
            *([f"only {', '.join(only)} was looked at"] if only is not None else []),
        ],
        not_read=[r.to_json() for r in ckpt.unread],
        next=_describe_next_step(opened, shown, wrong is not None),
        adapter=_describe_adapter(ckpt, opened.source),
        encoding=_describe_encoding(opened),
        weights=describe_weight_sets(ckpt) if ckpt.derived is None else [],
        memory=_compute_job_memory(ckpt, sizes),
        index=ckpt,
    )


def _compute_job_memory(ckpt: Checkpoint, sizes: SizeRequest) -> JobMemory | None:
    """Compute the memory of a training job; None if the request names no devices."""
    if sizes.fits is None:
        return None
    from .memory import compute_job_memory

    return compute_job_memory(ckpt, sizes)


def _describe_next_step(opened: OpenCheckpoint, path: str, has_wrong_masters: bool) -> str:
    """Return one line of advice on what to do with a checkpoint, or with the part of it that was opened.

    Args:
        path: path or URL of the checkpoint, for the commands in it.
        has_wrong_masters: whether some fp32 masters do not round to their weights.
    """
    record = opened.recorded()
    if opened.selection.by_component and (record is None or record.selection is None):
        if opened.selection.only is not None:  # what else there is was not looked at
            return f"only a part was looked at; of the whole: ckpttool inspect {Advice(opened.checkpoint, path).quoted}"
        return next_step(opened.checkpoint, path, opened.source.exists, has_wrong_masters)
    return f"a part of a checkpoint: ckpttool.open reads its tensors, and convert writes it. {NOT_RESUMED}"


def _describe_encoding(opened: OpenCheckpoint) -> dict[str, object] | None:
    """Describe weights that are stored as codes, as `Summary.encoding` has it; None where there are none."""
    ckpt = opened.checkpoint
    found = encodings.find_codes(ckpt, opened.source)
    if not found:
        return None
    from .transform.decoding_weights import count_parameters  # which loads what reads tensors

    return {
        "weights": len(found.weights),
        "of": found.of,
        "schemes": found.schemes(),
        "faults": [fault.text for fault in found.faults],
        "method": found.method,
        **count_parameters(opened, found),
    }


def _describe_adapter(ckpt: Checkpoint, source: Source) -> dict[str, object] | None:
    """Describe the LoRA of a checkpoint, as `Summary.adapter` has it; None where it has none. An adapter_config.json is
    read from `source`."""
    found = lora.find_lora(ckpt)
    if found is None:
        return None
    try:
        beside = model_files.find_adapter_files(source, None, [])
    except CkpttoolError:  # damaged, or it cannot be listed; the weights are what is looked at
        beside = None
    config = {} if beside is None else beside[0]
    base, ranks = config.get("base_model_name_or_path"), sorted(found.ranks)
    if config.get("target_parameters"):  # the tensors of a stack have its rank times the number of its matrices
        patterns = config.get("rank_pattern")
        said = [config.get("r"), *(patterns.values() if isinstance(patterns, dict) else ())]
        ranks = sorted({r for r in said if type(r) is int}) or ranks
    return {
        "only": found.alone,
        "ranks": ranks,
        "modules": found.modules,
        "names": [n for n in found.names if n],
        "base_model": base if isinstance(base, str) else None,
    }


def _summarise_slots(ckpt: Checkpoint) -> dict[str, dict[str, int]]:
    """Return {slot of the optimizer: {"parameters": how many have it, "bytes"}}; a slot of several tensors, such as
    SOAP's, counts once a parameter."""
    sizes: dict[str, int] = {}
    parameters: dict[str, set[str]] = {}
    for t in ckpt.tensors.values():
        if (slot := t.slot) is not None:
            parameters.setdefault(slot, set()).add(t.parameter)
            sizes[slot] = sizes.get(slot, 0) + t.nbytes
    return {slot: {"parameters": len(names), "bytes": sizes[slot]} for slot, names in parameters.items()}


def _describe_optimizer(ckpt: Checkpoint) -> dict[str, object] | None:
    """Describe the optimizer, its kind, slots and param groups, as `Summary.optimizer` has it; None where there is no
    state and no group."""
    slots = _summarise_slots(ckpt)
    groups: dict[int, dict[str, Any]] = {}
    for v in ckpt.values.values():
        if v.option is not None:
            key = str(v.path[3])
            group = groups.setdefault(v.group, {})
            if key == "params":
                group["parameters"] = len(v.data)
            elif v.data is None or isinstance(v.data, (bool, int, float, str)) or key == "betas":
                group[key] = v.data
    unassigned = len(find_unassigned_state(ckpt))
    if not slots and not groups and not unassigned:
        return None
    kinds: dict[str, int] = {}
    for state in find_optimizers(ckpt):
        kinds[state.name] = kinds.get(state.name, 0) + len(state.slots)
    kind = next(iter(kinds)) if len(kinds) == 1 else ", ".join(f"{k} ({n} parameters)" for k, n in kinds.items())
    if not kinds:
        kind = "unknown" if unassigned or any("betas" in group for group in groups.values()) else "SGD"
    return {
        "kind": kind,
        "kinds": kinds,
        "slots": slots,
        "groups": [groups[i] for i in sorted(groups)],
        "unassigned": unassigned,
    }


def _describe_instances(ckpt: Checkpoint) -> list[str]:
    """Return a list with one note on values that hold objects of classes, which are carried as data and not built; []
    if there are none."""
    found = {
        n: classes for n, v in ckpt.values.items() if v.path[-1] != MARK and (classes := list_instance_classes(v.data))
    }
    if not found:
        return []
    named = list(dict.fromkeys(str(cls) for classes in found.values() for cls in classes))
    count = f"{len(found)} value{'s hold' if len(found) > 1 else ' holds'} instances of classes, kept as data"
    shown = list_first(named, 4)
    return [f"{count}: {shown}, first {next(iter(found))}"]


def _make_notes(ckpt: Checkpoint) -> list[str]:
    """Return notes on values that are objects, on lost optimizer state, and on which weights a schedule-free model
    has."""
    objects = [
        *_describe_instances(ckpt),
        *describe_composites(find_composites(ckpt)),
        *describe_unwrapped(ckpt.tensors.values()),
    ]
    if lost := find_lost_slots(ckpt):
        return [*objects, describe_lost_slots(ckpt, lost)]
    if not any(state.name.startswith("schedule-free") for state in find_optimizers(ckpt)):
        return objects
    modes = {v.data for v in ckpt.values.values() if v.is_param_group and v.path[-1] == "train_mode"}
    x = "x, the averaged weights to evaluate and to publish (optimizer.eval() was called before the save)"
    y = "y, at which gradients are taken, and not x, the averaged ones to evaluate and to publish"
    which = {
        frozenset((True,)): f"{y}: {argument('weights', 'schedule-free-x')} exports those",
        frozenset((False,)): x,
    }.get(
        frozenset(modes), "x after optimizer.eval(), and y after optimizer.train(): the param groups do not say which"
    )
    return [*objects, f"schedule-free: the model's weights are {which}"]


def _list_missing(ckpt: Checkpoint) -> list[str]:
    """List, in sentences, what a resume would need and the checkpoint lacks, and where model and optimizer do not
    match."""
    out: list[str] = []
    have = {ckpt.component(n) for n in [*ckpt.tensors, *ckpt.values]}
    if "model" not in have:
        out.append("no model weights")
    if "optim" not in have:
        out.append(_explain_no_optimizer(ckpt))
        return out
    if odd := find_orphaned_optimizer_state(ckpt):
        out.append(
            f"the optimizer has state for {count_noun(len(odd), 'parameter')} that the model does not "
            f"have, first {odd[0]}"
        )
    out += describe_incomplete_state(ckpt)
    every = {n for state in find_optimizers(ckpt) for n in state.slots}
    listed = {n for v in ckpt.values.values() if v.option == "params" for n in v.data}
    bare = sorted(n for n in listed - every if isinstance(n, str))
    if every and bare:
        out.append(f"{len(bare)} parameters of the optimizer have no state, first {bare[0]}")
    if ungrouped := find_ungrouped_state(ckpt):
        out.append(describe_ungrouped_state(ungrouped))
    outside = [
        t.parameter
        for t in ckpt.tensors.values()
        if t.component == "model" and len(t.path) == 2 and t.parameter not in listed.union(ungrouped)
    ]
    if listed and outside:
        out.append(
            f"{len(outside)} {'tensor of the model is' if len(outside) == 1 else 'tensors of the model are'} not in "
            f"the optimizer (buffers, frozen or tied), first {outside[0]}"
        )
    return out


def _explain_no_optimizer(ckpt: Checkpoint) -> str:
    """Return a sentence that says why there is no state of an optimizer, and what that means."""
    aside = [r for r in ckpt.unread if r.component == "optim"]
    if aside:
        return (
            f"the optimizer state was not read: it is in {describe_files(aside)}, which the layout {ckpt.layout} does "
            "not "
            "include"
        )
    if aside := [r for r in ckpt.unread if r.component == "extra"]:
        return f"no optimizer state in the files that were read; not looked into: {describe_files(aside)}"
    if data := find_unnamed_optimizer_state(ckpt):
        return (
            f"the optimizer does not have the names of the weights, so its {len(data)} tensors are carried as data: "
            "its own trainer resumes with them, other engines start with a new optimizer"
        )
    return "no optimizer state: training from here starts with a new optimizer"


def describe_chunks(ckpt: Checkpoint, names: Iterable[str]) -> list[dict[str, Any]]:
    """Describe tensors and where their bytes are, as plain data.

    Returns:
        For each name {"name", "dtype", "shape", "numbers": how many, "bytes", "chunks": how many, "where"}. "where"
        lists the first 64 chunks as {"start", "shape", "file", "offset", "length"}. For packed dtypes, "numbers" counts
        all numbers in an element.
    """
    out = []
    for n in names:
        t = ckpt.tensors[n]
        out.append(
            {
                "name": n,
                "dtype": t.dtype,
                "shape": list(t.shape),
                "numbers": t.numbers,
                "bytes": t.nbytes,
                "chunks": len(t.chunks),
                "where": [
                    {
                        "start": list(c.start),
                        "shape": list(c.shape),
                        "file": ckpt.files[c.extent.file],
                        "offset": c.extent.offset,
                        "length": c.extent.length,
                    }
                    for c in t.chunks[:64]
                ],
            }
        )
    return out


def fold_tensors(ckpt: Checkpoint) -> list[dict[str, object]]:
    """Describe the tensors of a checkpoint, with one row for those whose names differ only in numbers.

    Returns:
        Rows {"name": "layers.#.weight", "tensors": how many, "dtypes": {dtype: tensors}, "shapes": {shape such as
        "131x36": tensors}, "numbers", "bytes"}; the last two are sums.
    """
    out: dict[str, dict[str, Any]] = {}
    for name, t in ckpt.tensors.items():
        folded = mask_name_numbers(name)
        row = out.setdefault(
            folded, {"name": folded, "tensors": 0, "dtypes": {}, "shapes": {}, "numbers": 0, "bytes": 0}
        )
        for key, found in (("dtypes", t.dtype), ("shapes", "x".join(map(str, t.shape)) or "1 number")):
            row[key][found] = row[key].get(found, 0) + 1
        for key, n in (("tensors", 1), ("numbers", t.numbers), ("bytes", t.nbytes)):
            row[key] += n
    return list(out.values())


# --------------------------------------------------------------------------------------------------------- drawing


def draw_summary(s: Summary) -> RenderableType:
    """Draw a summary as rich prints it: headline, table of components, optimizer, notes."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [_draw_headline(s)]
    if s.adapter:
        parts.append(_draw_adapter(s.adapter))
    if s.encoding:
        parts += _draw_encoding(s.encoding)
    parts.append(_draw_components(s))
    if s.optimizer:
        parts += _draw_optimizer(s.optimizer)
    for w in s.weights:
        many = "" if w["tensors"] is None else f"{w['tensors']:,} tensors, "
        size = "" if w["bytes"] is None else f"{human(w['bytes'])}, "
        text = printable(f"{w['key']}: {many}{size}{w['what']}; exported by {w['option']}")
        parts.append(Text.assemble(("weights ", "bold"), text))
    for text in s.missing:
        parts.append(Text.assemble(("-", "yellow"), " ", printable(text)))
    for text in s.notes:
        parts.append(Text.assemble(("note", "blue"), " ", printable(text)))
    parts.append(Text.assemble(("next", "green"), " ", printable(s.next)))
    if s.memory is not None:
        from .memory import draw_memory

        parts += draw_memory(s.memory)
    return Group(*parts)


def _draw_headline(s: Summary) -> RenderableType:
    """Draw the layout, who saved it at which step on how many ranks, and its sizes."""
    from rich.text import Text

    head = Text.assemble((s.layout, "bold cyan"), (" checkpoint", "bold"))
    facts = [
        s.trainer,
        None if s.step is None else f"step {s.step:,}",
        s.ranks and count_noun(s.ranks, "rank"),
    ]
    for fact in facts:
        if fact:
            head.append(f" · {printable(str(fact))}")
    head.append(f" · {count_noun(s.tensors, 'tensor')}, {human(s.bytes)}")
    there = "in the store" if urls.is_url(s.path) else "on disk"
    head.append(f" · {count_noun(s.files, 'file')}, {human(s.file_bytes)} {there}")
    return head


def _draw_adapter(adapter: dict[str, Any]) -> RenderableType:
    """Draw the line about a LoRA adapter, given `Summary.adapter`."""
    from rich.text import Text

    ranks = ", ".join(map(str, adapter["ranks"]))
    facts = [f"r={ranks}, {count_noun(adapter['modules'], 'module')}"]
    if len(adapter["names"]) > 1:
        facts.append(f"called {', '.join(adapter['names'])}")
    if adapter["base_model"]:
        facts.append(f"base model {adapter['base_model']}")
    title = "adapter only: " if adapter["only"] else "base model and adapter: "
    return Text.assemble((title, "bold"), printable(", ".join(facts)))


def _draw_encoding(encoding: dict[str, Any]) -> Iterator[RenderableType]:
    """Draw the lines about quantised weights, given `Summary.encoding`: how, how many parameters, what is wrong."""
    from rich.text import Text

    if encoding["weights"]:
        schemes = encodings.describe_schemes(encoding["weights"], encoding["of"], encoding["schemes"])
        yield Text.assemble(("encoded ", "bold"), printable(schemes))
    if encoding["encoded_parameters"]:
        every, coded = (_format_count(encoding[k]) for k in ("parameters", "encoded_parameters"))
        bits = f"{encoding['bits_per_parameter']:.2f} bits each; {coded} of them codes of"
        bits += f" {encoding['encoded_bits_per_parameter']:.2f} bits, scales included"
        yield Text.assemble(("parameters ", "bold"), f"{every}, {bits}")
    for text in encoding["faults"]:
        yield Text.assemble(("-", "yellow"), " ", printable(text))


def _draw_components(s: Summary) -> RenderableType:
    """Draw the table of components: their tensors, bytes and dtypes, with a bar for their part of all bytes."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for title, right in (("", False), ("tensors", True), ("elements", True), ("bytes", True), ("dtypes", False)):
        table.add_column(title, justify="right" if right else "left")
    total = max(1, s.bytes)
    table.add_column("", justify="left")
    for name, c in s.components.items():
        dtypes = ", ".join(f"{k}" + (f" {human(v)}" if len(c["dtypes"]) > 1 else "") for k, v in c["dtypes"].items())
        bar = "█" * max(1, round(24 * c["bytes"] / total)) if c["bytes"] else ""
        table.add_row(
            Text(printable(name), "bold"),
            f"{c['tensors']:,}" if c["tensors"] else "",
            _format_count(c["elements"]) if c["tensors"] else "",
            human(c["bytes"]) if c["tensors"] else "",
            dtypes or count_noun(c["values"], "value"),
            f"[cyan]{bar}[/]",
        )
    return table


def _draw_optimizer(optimizer: dict[str, Any]) -> Iterator[RenderableType]:
    """Yield a line about the kind and the slots of an optimizer, as `Summary.optimizer` has it, and one for each param
    group."""
    from rich.text import Text

    slots = "; ".join(f"{k} of {v['parameters']} parameters" for k, v in optimizer["slots"].items())
    if tensors := optimizer["unassigned"]:
        state = f"state in {count_noun(tensors, 'tensor')} of several parameters, which inspect does not take apart"
        slots = f"{slots}; {state}" if slots else state
    slots = slots or "no state"
    yield Text.assemble(("optimizer ", "bold"), printable(f"{optimizer['kind']}, {slots}"))
    for i, g in enumerate(optimizer["groups"]):
        shown = ", ".join(
            f"{k} {g[k]}" for k in ("lr", "weight_decay", "betas", "momentum", "eps") if g.get(k) is not None
        )
        yield Text(printable(f"  group {i}: {g.get('parameters', '?')} parameters, {shown}"))


def draw_tree(ckpt: Checkpoint) -> RenderableType:
    """Draw the names of tensors and values as rich's tree; repeated blocks (layers.0, layers.1, ...) that are alike are
    drawn once."""
    from rich.tree import Tree

    root = Tree(f"[bold]{ckpt.layout}[/] {human(ckpt.nbytes)}")
    top: dict[str, object] = {}
    for t in ckpt.tensors.values():
        keys = [k for p in t.path for k in (p.split(".") if isinstance(p, str) else [str(p)])]
        _get_parent_branch(top, keys)[keys[-1]] = t
    for v in ckpt.values.values():
        keys = [str(p) for p in v.path]
        _get_parent_branch(top, keys).setdefault(keys[-1], _stringify_keys(to_readable(v.data)))
    _add_branches(root, top)
    return root


def _get_parent_branch(top: dict[str, Any], keys: list[str]) -> dict[str, object]:
    """Return the dict in the tree `top` that holds the last of `keys`; dicts for the keys before it are made if
    missing."""
    at = top
    for k in keys[:-1]:
        inner = at.setdefault(k, {})
        at = inner if isinstance(inner, dict) else at.setdefault(k + ".", {})
    return at


def _stringify_keys(x: object) -> object:
    """Return a value with the keys of its dicts, also nested ones, as text; other values and empty dicts are
    unchanged."""
    return {str(k): _stringify_keys(v) for k, v in x.items()} if isinstance(x, dict) and x else x


def _make_structure_key(x: object) -> object:
    """Return a description of a branch of names, equal for branches with the same names, dtypes, shapes and values."""
    if isinstance(x, dict):
        return tuple((k, _make_structure_key(v)) for k, v in x.items())
    return (x.dtype, x.shape) if isinstance(x, TensorEntry) else repr(x)


def _add_branches(node: Tree, x: dict[str, object]) -> None:
    """Add the entries of a dict to a node of rich's tree, recursively; numbered entries that are alike become one."""
    from rich.markup import escape

    items = list(x.items())
    if all(k.isdecimal() for k in x):
        items.sort(key=lambda kv: int(kv[0]))
    i = 0
    while i < len(items):
        key, value = items[i]
        if isinstance(value, dict) and value:
            j = i + 1
            if re.fullmatch(r"\d+", key):
                while (
                    j < len(items)
                    and items[j][0].isdecimal()
                    and _make_structure_key(items[j][1]) == _make_structure_key(value)
                ):
                    j += 1
            label = f"[cyan]{escape(printable(key))}[/]" + (
                f" .. [cyan]{items[j - 1][0]}[/] ({j - i} alike)" if j - i > 1 else ""
            )
            _add_branches(node.add(label), value)
            i = j
            continue
        if isinstance(value, TensorEntry):
            several = f", {value.numbers:,} numbers" if value.dtype in PACKED else ""
            node.add(f"{escape(printable(key))} [dim]{value.dtype} {list(value.shape)}{several}[/]")
        else:
            text = repr(value)
            node.add(f"{escape(printable(key))} [dim]= {escape(text if len(text) < 60 else text[:57] + '...')}[/]")
        i += 1


def draw_folded(rows: list[dict[str, Any]]) -> RenderableType:
    """Draw what `fold_tensors` returned as a table of rich."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("name", "tensors", "dtype", "shape", "bytes"):
        table.add_column(title, justify="right" if title in ("tensors", "bytes") else "left", overflow="fold")
    for row in rows:
        dtypes, shapes = (
            ", ".join(f"{k} ({n:,})" if len(row[key]) > 1 else k for k, n in list(row[key].items())[:4])
            + (f" and {len(row[key]) - 4} more" if len(row[key]) > 4 else "")
            for key in ("dtypes", "shapes")
        )
        table.add_row(Text(printable(row["name"])), f"{row['tensors']:,}", dtypes, shapes, human(row["bytes"]))
    return table
