"""Plan a conversion: open the source, ask the target layout for a draft, and refuse what would lose state. Nothing is
written."""

from __future__ import annotations

import fnmatch
import glob
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple, Unpack

from .. import layouts
from ..errors import Corrupt, IncompleteWeights, Unsupported, UsageError, argument, name_flags
from ..formats.pickles import find_unwritable_reason
from ..huggingface import encodings, model_files
from ..huggingface.encodings import Encodings
from ..huggingface.model_files import read_model_files
from ..index.checkpoint import (
    ITEMSIZE,
    NOT_TORCHS,
    PACKED,
    Checkpoint,
    Unread,
    find_orphaned_optimizer_state,
    find_unnamed_optimizer_state,
    joined,
    parse_floating_dtype,
)
from ..index.composites import Composite, class_label, describe_unwrapped, find_composites
from ..index.draft import Draft, Dropped
from ..index.fqns import remove_wrappers
from ..index.names import CANONICAL_KEYS_NOTE, KEEPS_NUMBERS, refuse_surrogates, with_component_keys
from ..index.optimizers import describe_lost_slots, describe_wide_slots, find_lost_slots
from ..index.param_groups import (
    describe_ungrouped_state,
    find_ungrouped_state,
    list_names_by_group,
    regroup_optimizer,
)
from ..index.paths import is_optimizer_state, keep_extra_state_trees, list_own_keys
from ..index.schedulers import complete_scheduler_state, describe_deepspeed_scheduler
from ..index.vocabulary import find_vocabulary_weights
from ..options import (
    ARCHIVE_LAYOUT,
    HUB_LAYOUT,
    OpenOptions,
    PlanKeywords,
    RunOptions,
    WriteRequest,
    list_keywords,
    split_keywords,
)
from ..printable import Shown, count_noun
from ..progress import log_detail, log_step
from ..storage.source import Source
from ..storage.urls import make_path_absolute
from . import mixups
from .averaging import open_average
from .conservation import Account
from .copy.averages import find_nonnegative_state
from .copy.value_digests import value_digest
from .difference import open_difference
from .discover import unread_files
from .fill_from import fill_missing_entries
from .map_choice import apply_name_map, resolve_map_argument
from .merging import open_merged
from .opening import (
    CheckpointPath,
    MergedCheckpoint,
    OpenCheckpoint,
    collect_model_hints,
    open_checkpoint,
    refuse_unused_hints,
)
from .patching import open_patched
from .plan_files import compute_plan_id, save_plan, with_absolute_paths
from .transform.changing import change_tensors
from .transform.data_position import move_data_position
from .transform.dequantizing import dequantize
from .transform.editing import reset_state, set_values
from .transform.quantizing import check_scheme, quantize
from .transform.remainders import describe_remainders, find_remainders, list_weights_with_remainders
from .transform.vocabulary_size import resize_vocabulary

__all__ = ["Plan", "make_dtype_chooser", "open_model", "plan", "plan_conversion", "with_map_text"]


@dataclass(repr=False)
class Plan(Shown):
    """A conversion that has not begun: the open source, the draft of the destination, its layout, and what becomes of
    every entry. Close it, or use `with`.

    `opened` has the state as it was changed for the destination, `source` the index as it was read. `src`, `dst`,
    `reading` and `writing` are what was asked for, with absolute paths in `reading`.
    """

    opened: OpenCheckpoint
    draft: Draft
    target: layouts.Layout
    account: Account
    source: Checkpoint
    src: CheckpointPath
    dst: str
    reading: OpenOptions
    writing: WriteRequest
    recheck: Callable[[], None]  # of the source as it was opened: `OpenCheckpoint.recheck`

    @cached_property
    def id(self) -> str:
        """Return the id of the plan in hex, which `compute_plan_id` computes from all that decides the bytes of the
        destination.

        `drop` changes no byte, and is left out. The scaling of a merge is in a file beside the adapter, and is added.
        With functions in `change`, the id is different each time.
        """
        merged: list[object] = [self.opened.checkpoint.merged] if self.opened.checkpoint.merged else []
        merged += [os.urandom(32)] if self.writing.change else []  # nobody knows what the functions do
        asked = (self.reading, replace(self.writing, drop=False), *merged)
        return compute_plan_id(self.opened.source, self.draft, self.target, *asked)

    @property
    def held_tensors(self) -> int:
        """Count the source's tensors that the destination holds, under whatever name."""
        return len(self.opened.checkpoint.tensors.keys() - {d.name for d in self.draft.dropped})

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        force: bool = False,
        verify: bool = True,
        prove_logits: bool = False,
    ) -> None:
        """Write the plan to a file for review, from which `apply` runs exactly this conversion. It is planned again for
        that, so the file is about the source as it is now.

        Args:
            path: the JSON file; an earlier plan there is replaced, no other file is.
            force, verify, prove_logits: as `convert`.

        Raises:
            UsageError: the source was no path or URL, a URL has credentials, or another file is at `path`.
            Unsupported: the server of the source gives no versions of its files.
            CkpttoolError: it cannot be planned any more, or the file not be written.
        """
        running = RunOptions(force=force, verify=verify, prove_logits=prove_logits)
        with name_flags(), plan_conversion(self.src, self.dst, self.reading, self.writing) as now:
            save_plan(path, now, running)

    def lines(self) -> Iterator[str]:
        """Yield lines of text: layouts, tensors, bytes and files, and how many entries would be dropped."""
        draft, ckpt = self.draft, self.draft.checkpoint
        ranks = f" for {count_noun(ckpt.world_size, 'rank')}" if ckpt.world_size else ""
        yield (
            f"{self.opened.layout.name} -> {self.target.name}{ranks}: {count_noun(self.held_tensors, 'tensor')}, "
            f"{unread_files.human(draft.nbytes)} in {count_noun(len(draft.files), 'file')}"
        )
        if dropped := self.account.dropped:
            yield f"left behind: {count_noun(len(dropped), 'entry', 'entries')}, first {dropped[0].name}"

    def __enter__(self) -> Plan:
        """Return the plan itself; the end of the `with` block closes the source."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the files of the source."""
        self.opened.source.close()


@list_keywords
def plan(src: CheckpointPath, dst: str | os.PathLike[str], **keywords: Unpack[PlanKeywords]) -> Plan:
    """Plan what `convert` would write; write nothing.

    Args:
        (all): as `convert`.

    Raises:
        Unsupported: the layout cannot hold a part of the state, or state lies in files that were not read, and `drop`
            is not set.
    """
    reading, writing, _ = split_keywords(keywords)
    return plan_conversion(src, dst, reading, writing)


def with_map_text(writing: WriteRequest) -> WriteRequest:
    """Return the request with the text of a name map instead of its path.

    Workers may lack the file, and `compute_plan_id` covers the text.

    Raises:
        UsageError: there is no such map.
    """
    return writing if writing.map is None else replace(writing, map=resolve_map_argument(os.fspath(writing.map)))


def plan_conversion(
    src: CheckpointPath,
    dst: str | os.PathLike[str],
    reading: OpenOptions,
    writing: WriteRequest,
    prove_later: bool = True,
) -> Plan:
    """Open the source, rewrite its index step by step into the draft of the destination, and account for every entry.

    Between `open` and the draft, the index is rewritten four times, in this order:

        change    as the user asked, whatever the layout: filled from another step, dequantised, with other keys, under
                  other names, with more or fewer rows of the vocabulary
        regroup   the optimizer in the param groups of another checkpoint
        prepare   what the layout keeps of it (`Layout.prepare`)
        write     the draft: files, and where every byte of them comes from (`Layout.write`)

    Names decide the order: param groups are compared under the names that are written, and `prepare` sees the final
    groups. The account compares the index before and after each of them.

    Args:
        prove_later: as in `open_checkpoint`; whoever fills the draft calls `Plan.recheck` after reading all of it.

    Raises:
        Unsupported: the layout cannot hold a part of the state, or state lies in files that were not read, and `drop`
            is not set.
        CkpttoolError: the source cannot be read, or arguments are wrong. With any error, the source is closed.
    """
    writing = with_map_text(writing)
    target = layouts.choose_target_layout(writing.to, dst)
    _refuse_unfit_request(target, writing)
    if reading.apply and writing.vocab_size is not None:  # its rows alone would not have the checksums of the delta
        raise UsageError(
            f"{argument('vocab_size', writing.vocab_size)} and {argument('apply')}: apply the delta first, and give "
            "the result another vocabulary.",
            code="CKPT0204",
        )
    holds, drop = target.holds(writing.options), writing.drop
    model = collect_model_hints(reading)
    # an entry that cannot be read stops whoever needs it, and weights are never left out
    opened = _open_source(
        src, reading, model, lambda part: part == "model" or (not drop and (not holds or part in holds)), prove_later
    )
    recheck = opened.recheck
    try:
        # what nobody looks at: hints, and files with state beside the checkpoint
        _check_unused_hints(opened, reading, writing, target)
        aside = unread_files.list_lost_state(opened.checkpoint, holds, opened.selection.components)
        if aside and not drop:
            raise Unsupported(_explain_unread_files(opened, target, aside), code="CKPT0314")
        of_ranks = mixups.list_dropped_replicas(opened.checkpoint)
        # the state as it was asked for, and then as the layout keeps it
        account = Account()
        opened.locate()
        source = opened.stored
        for how, before, after in opened.changes:
            account.add_step(how, before, after)
        if reading.fill_from is not None:
            opened = _fill_lost_entries(
                opened, reading, account
            )  # it opens another checkpoint, which is closed with this one
        opened = _change_state(opened, writing, model.config, account, target)
        prepared = _prepare_for_layout(opened, target, dst, writing, model, account)
        opened = prepared.opened
        # the draft, which must account for every entry
        draft = _make_draft(opened.checkpoint, opened.source, target, prepared.options, account)
        _check_keys(opened.checkpoint, draft, target, writing.keys)
        _refuse_casts(draft, target, prepared.codes)
        _refuse_file_names(draft)
        as_saved = reading.allow_mixed_steps or reading.difference_to is not None
        draft.averages = frozenset() if as_saved else find_nonnegative_state(draft.sources)
        draft.dropped += prepared.unplaced
        if not drop:
            _refuse_lost_state(opened, draft, target, holds)
        draft.dropped += [*opened.left_behind, *opened.unwanted, *of_ranks]
        draft.dropped += [Dropped(r.name, r.bytes or 0, f"{r.what}, {unread_files.NOT_READ}") for r in aside]
        account.close(source, draft)
        draft.notes += account.list_values_set_in_vain()
        _refuse_unmatched_casts(writing.cast or {}, [*opened.checkpoint.tensors, *draft.checkpoint.tensors])
    except BaseException:
        opened.source.close()
        raise
    planned = Plan(
        opened, draft, target, account, source, src, os.fspath(dst), with_absolute_paths(reading), writing, recheck
    )
    log_step("planned %s", "; ".join(planned.lines()))
    for d in account.dropped:
        log_detail("left behind: %s, %d bytes: %s", d.name, d.nbytes, d.why)
    for name, how in account.changed.items():
        log_detail("changed: %s: %s", name, how)
    return planned


def open_model(src: CheckpointPath, reading: OpenOptions, writing: WriteRequest) -> OpenCheckpoint:
    """Open the weights of a checkpoint under the names that its model has in memory.

    An adapter is merged, and codes and names are converted, as a conversion to hf would do it; tied weights appear
    under each of their names.

    Raises:
        CkpttoolError: the source cannot be read, or arguments are wrong. With any error, the source is closed.
    """
    writing, hub, model = with_map_text(writing), layouts.find(HUB_LAYOUT), collect_model_hints(reading)
    opened = _open_source(src, reading, model, lambda part: part == "model")
    try:
        opened.locate()
        opened = _change_state(opened, writing, model.config, Account(), hub)
        found = opened.checkpoint
        options = layouts.WriteOptions(config=model.config, own=writing.options)
        ckpt = hub.prepare(replace(found, tensors=dict(found.tensors)), opened.source, options)
        config = ckpt.config or model_files.find_model_files(opened.source, model.config, [])[0]
        named = hub.name_in_memory(replace(ckpt, config=config, tensors=dict(ckpt.tensors)))
        return replace(opened, checkpoint=named, located=True)
    except BaseException:
        opened.close()
        raise


def _check_unused_hints(
    opened: OpenCheckpoint, reading: OpenOptions, writing: WriteRequest, target: layouts.Layout
) -> None:
    """Raise if a hint was given that neither the reader nor the writer uses; unused `config` and `like` become notes.

    Raises:
        UsageError: with the layouts that use the hint.
    """
    inputs = opened.parts if reading.average is not None and isinstance(opened, MergedCheckpoint) else ()
    used = {
        *opened.layout.reader_uses,
        *(hint for one, _ in inputs for hint in one.layout.reader_uses),
        *target.writer_uses,
        # for what is tied; for sizes of heads; for how codes were made
        *(["config"] if reading.merge or writing.map or writing.dequantize else []),
        # for how a mesh divides tensors
        *(["config", "like"] if (mesh := getattr(writing.options, "sizes", None)) and mesh.tp * mesh.ep > 1 else []),
        *(["config", "like"] if getattr(writing.options, "tensor_parallel", None) else []),
    }
    opened.checkpoint.notes += refuse_unused_hints(reading, f"{opened.layout.name} -> {target.name}", used)


class _Prepared(NamedTuple):
    """What a layout keeps of a state, and what its writer is told."""

    opened: OpenCheckpoint
    options: layouts.WriteOptions
    codes: Encodings  # the weights that are codes, under the names that are written
    unplaced: list[Dropped]  # what has no place in it


def _prepare_for_layout(
    opened: OpenCheckpoint,
    target: layouts.Layout,
    dst: str | os.PathLike[str],
    writing: WriteRequest,
    model: layouts.ModelHints,
    account: Account,
) -> _Prepared:
    """Regroup the optimizer if requested, reduce the state to what the layout can hold, and collect the writer's
    options.

    Args:
        account: gets what changed.

    Raises:
        Unsupported: the layout cannot hold tensor subclasses, quantised weights or an optimizer without names, or a
            cast cannot convert them.
        UsageError: regrouping was requested without a checkpoint that has param groups.
    """
    ckpt, unplaced = opened.checkpoint, list[Dropped]()
    # what no cast may touch: parts of tensor subclasses, codes and their scales
    objects = find_composites(ckpt)
    parts = {joined(t.path): n for n, c in objects.items() for t in c.tensors.values()}
    quantization = encodings.read_quantization_config(ckpt, opened.source if opened.folder else None)
    if ckpt.dequantized:
        left = encodings.find_in_checkpoint(ckpt, quantization)
        ckpt.notes += [f"{left.summary()}; they were not dequantised and stay codes"] if left.weights else []
    else:
        _refuse_dtype_for_codes(writing.dtype, encodings.find_in_checkpoint(ckpt, quantization))
    options = layouts.WriteOptions(
        config=model.config,
        like=model.like,
        flat_layout=model.flat_layout,
        wrap=model.wrap,
        target=os.path.basename(make_path_absolute(dst)),
        world_size=writing.world_size,
        own=writing.options,
        vocab_size=writing.vocab_size,
        quantize=writing.quantize,
    )
    # the three rewrites
    if writing.regroup:
        before = ckpt
        ckpt, unplaced = _regroup_optimizer(ckpt, model.like)
        account.add_step("in other param groups", before, ckpt)
    if not target.keeps_calls:
        ckpt, calls = _drop_values_with_calls(ckpt)
        unplaced = [*unplaced, *calls]
    before, ckpt = ckpt, target.prepare(ckpt, opened.source, options)
    account.add_step(f"as {target.name} keeps it", before, ckpt)
    opened = replace(opened, checkpoint=ckpt)
    if writing.quantize is not None:
        opened = _quantize_weights(opened, before, model.config, account)
        ckpt = opened.checkpoint
        quantization = (ckpt.quantized or {}).get("config")
    # what the layout cannot hold
    codes = encodings.find_in_checkpoint(ckpt, quantization)
    holds = target.holds(writing.options)
    _refuse_non_torch_dtypes(target, ckpt)
    _refuse_subclasses(target, {n: c for n, c in objects.items() if not holds or c.path[0] in holds})
    _check_optimizer(ckpt, target, writing.drop)
    ckpt.notes += describe_unwrapped(ckpt.tensors.values())
    refuse_surrogates(ckpt.tensors)  # every record lists them by name
    halves = list_weights_with_remainders(ckpt) if not holds or holds & {"optim", "extra"} else frozenset()
    ckpt.notes += describe_remainders(find_remainders(ckpt)) if halves else []
    cast = make_dtype_chooser(writing.dtype, writing.cast or {}, parts, codes, halves)
    return _Prepared(opened, replace(options, cast=cast), codes, unplaced)


def _quantize_weights(
    opened: OpenCheckpoint, before: Checkpoint, config: str | None, account: Account
) -> OpenCheckpoint:
    """Replace weights by codes and scales; weights with recorded digests are added to `inputs`, to be compared later.

    Args:
        opened: the state as the layout keeps it, under the names of the Hub.
        before: its index before the layout prepared it.
        config: folder or id of a Hugging Face model; None if none was given.
        account: gets what changed.

    Raises:
        Unsupported: the weights cannot be quantised.
        MissingPackage: a package that this needs is not installed.
    """
    plain = opened.checkpoint
    ckpt, source = quantize(opened, config)
    account.add_step("quantised", plain, ckpt, computed=True)
    kept = {n: d for n, d in plain.recorded.items() if ckpt.tensors.get(n) is before.tensors[n]}
    lost = replace(before, tensors={n: before.tensors[n] for n in plain.recorded if n not in kept})
    inputs = (*opened.inputs, replace(opened, checkpoint=lost))
    return replace(opened, checkpoint=replace(ckpt, recorded=kept), source=source, inputs=inputs)


def _make_draft(
    ckpt: Checkpoint, source: Source, target: layouts.Layout, options: layouts.WriteOptions, account: Account
) -> Draft:
    """Let the layout make the draft of a state, and have the account compare the two.

    Raises:
        Differs: the draft does not account for every entry of the state.
        CkpttoolError: what the layout's writer raises.
    """
    assert target.write is not None
    # the writer gets dicts of its own: what it removes from them, or alters in a value, is still known here
    digests = {n: value_digest(v) for n, v in ckpt.values.items()}
    draft = target.write(replace(ckpt, tensors=dict(ckpt.tensors), values=dict(ckpt.values)), source, options)
    account.add_draft(ckpt, digests, draft)
    if target.name == ARCHIVE_LAYOUT:
        return draft
    has_own_schedule = any(n.startswith("scheduler.") for n in draft.synthesized_values)  # as Megatron-Core's
    if (target.saves is None or target.of_trainer) and not has_own_schedule:  # else the engine is DeepSpeed
        draft.notes += describe_deepspeed_scheduler(draft.checkpoint)
    if not target.joins_remainders:  # DeepSpeed and Megatron-Core keep fp32; FSDP1's writer notes it for its own files
        draft.notes += describe_wide_slots(draft.checkpoint)
    return draft


def _check_keys(ckpt: Checkpoint, draft: Draft, target: layouts.Layout, asked: Mapping[str, str] | None) -> None:
    """Check the keys of model and optimizer in a draft; add a note if they are those of the source.

    Args:
        asked: {component: key} that the user chose; None for the default.

    Raises:
        UsageError: a checkpoint with the chosen keys could not be read again.
    """
    readable = CANONICAL_KEYS_NOTE not in draft.notes
    if asked and not readable:
        raise UsageError(
            f"{argument('keys')} {', '.join(f'{name}={key}' for name, key in asked.items())}: a checkpoint with these "
            "keys could not be read again, since they do not tell which part is the model and which the optimizer. "
            "Choose others.",
            code="CKPT0203",
        )
    theirs = target.own_keys and any(p[0] in ("model", "optim") for p in list_own_keys(ckpt.origin))
    if theirs and readable and not asked:
        draft.notes.append(
            f"model and optimizer keep the keys of the source; {argument('canonical_keys', True)} writes model and "
            f"optim, {argument('keys')} others"
        )


def _refuse_unmatched_casts(cast: Iterable[str], names: list[str]) -> None:
    """Raise if a pattern of `cast` matches none of `names`.

    Raises:
        UsageError: with the first such pattern.
    """
    for pattern in cast:
        if not fnmatch.filter(names, pattern):
            raise UsageError(
                f"{argument('cast')} {pattern!r}: no tensor has such a name. "
                + (f"The first name is {names[0]}." if names else "There is no tensor."),
                code="CKPT0207",
            )


def _refuse_unfit_request(target: layouts.Layout, writing: WriteRequest) -> None:
    """Raise if arguments do not go with the layout; called before anything is opened.

    Raises:
        Unsupported: ckpttool does not write the layout, or quantised weights need another destination.
        UsageError: an argument is for other layouts.
    """
    if target.write is None:
        raise Unsupported(
            f"ckpttool reads {target.name}, but does not write it. Choose one of: "
            f"{', '.join(layouts.list_writable_layouts())}.",
            code="CKPT0315",
        )
    if writing.options is not None and type(writing.options) is not target.options:
        kind, wanted = type(writing.options).__name__, target.options.__name__ if target.options else "no options"
        raise UsageError(f"options={kind}(...) does not apply to {target.name}, which takes {wanted}.", code="CKPT0205")
    for name in ("canonical_keys", "keys"):
        if getattr(writing, name) and not target.own_keys:
            keep = ", ".join(x.name for x in layouts.layouts().values() if x.own_keys)
            raise UsageError(f"{argument(name)} applies to {keep}; {target.name} has keys of its own.", code="CKPT0205")
    if writing.quantize is not None:
        check_scheme(writing.quantize)
        if target.name != HUB_LAYOUT or target.is_file:
            what = "one file, without the config.json that says what its codes are" if target.is_file else target.name
            raise Unsupported(
                f"{argument('quantize', writing.quantize)} goes with a folder in hf, which from_pretrained and serving "
                f"programs load. The destination is {what}: write a folder, or leave it out.",
                code="CKPT0334",
            )
    if writing.world_size is not None:
        _refuse_world_size(target, writing.world_size)


def _fill_lost_entries(opened: OpenCheckpoint, reading: OpenOptions, account: Account) -> OpenCheckpoint:
    """Fill what a salvaged source has lost from the checkpoint at `reading.fill_from`, which is set.

    Args:
        account: gets what changed.

    Raises:
        Unsupported: that checkpoint is of another model, or was salvaged itself.
        CkpttoolError: it cannot be opened.
    """
    assert reading.fill_from is not None
    path = os.fspath(reading.fill_from)
    filled = fill_missing_entries(opened, path, None if reading.only is None else tuple(reading.only))
    account.add_step(f"filled from {path}", opened.checkpoint, filled.checkpoint)
    return filled


def _change_state(
    opened: OpenCheckpoint, writing: WriteRequest, config: str | None, account: Account, target: layouts.Layout
) -> OpenCheckpoint:
    """Make the changes that the user asked for, whatever the layout.

    In this order: expected digests, edited values, dequantisation, functions of the caller, keys, names, vocabulary
    size.

    Args:
        config: folder or id of a Hugging Face model; None if none was given.
        account: gets what changed.
        target: the layout that will be written.

    Raises:
        Corrupt: the source does not match its record.
        Unsupported, UsageError: a change cannot be made, such as another number of rows for quantised weights.
    """
    ckpt = opened.checkpoint
    # what it must be, before anything is changed
    if writing.expected is None:
        opened.expect_recorded(writing.ignore_recorded_digests)  # of a merge, this adds to its inputs
    else:
        ckpt = replace(ckpt, recorded={**ckpt.recorded, **writing.expected})
    opened = replace(opened, checkpoint=_edit_state(ckpt, writing, account))
    opened = _compute_tensors(opened, writing, config, account, target)
    ckpt, source, to_hub = opened.checkpoint, opened.source, target.name == HUB_LAYOUT
    # its keys, then its names
    if writing.canonical_keys:
        plain_keys = replace(ckpt, origin=keep_extra_state_trees(ckpt.origin))
        ckpt = complete_scheduler_state(plain_keys)
        account.add_step("with all that LambdaLR saves", plain_keys, ckpt)
    elif writing.strip_wrappers:
        ckpt = remove_wrappers(ckpt)
    before_map, name_map = ckpt, None if writing.map is None else os.fspath(writing.map)
    ckpt, source = apply_name_map(ckpt, source, name_map, config, vocab_size=writing.vocab_size, to_hub=to_hub)
    called = "the Hub" if to_hub else "the map given" if name_map and "\n" in name_map else name_map
    account.add_step(f"under the names of {called}", before_map, ckpt)
    # a map may have cut the vocabulary already
    cut = {t.shape[0] for t in find_vocabulary_weights(ckpt).values()} if ckpt is not before_map else set()
    if writing.vocab_size is not None and cut != {writing.vocab_size}:
        codes = encodings.find_in_checkpoint(ckpt, None)
        if said := next(filter(None, (codes.describe(f"model.{n}") for n in find_vocabulary_weights(ckpt))), ""):
            raise Unsupported(
                f"{argument('vocab_size', writing.vocab_size)}: {said}, with scales for the rows that there are. "
                f"{argument('dequantize', ['*'])} makes numbers of them.",
                code="CKPT0318",
            )
        before_cut = ckpt
        ckpt, source = resize_vocabulary((ckpt, source), writing.vocab_size)
        account.add_step(f"a vocabulary of {writing.vocab_size:,} rows", before_cut, ckpt)
    if writing.keys:
        ckpt = with_component_keys(ckpt, writing.keys)
    return replace(opened, checkpoint=ckpt, source=source)


def _compute_tensors(
    opened: OpenCheckpoint, writing: WriteRequest, config: str | None, account: Account, target: layouts.Layout
) -> OpenCheckpoint:
    """Dequantise weights, then apply the functions of the caller, as requested, and return the checkpoint with the
    computed tensors.

    Args:
        opened: the source.
        writing: which weights to dequantise, and the caller's functions.
        config: folder or id of a Hugging Face model; None if none was given.
        account: gets what changed.
        target: the layout that will be written.

    Raises:
        Unsupported, UsageError: weights cannot be dequantised, or a tensor cannot be changed.
    """
    ckpt = opened.checkpoint
    # an engine that loads masters needs those that are stored as remainders of weights, and none loads remainders that
    # were stored as numbers
    halves = map(glob.escape, find_remainders(ckpt) if target.joins_remainders else ckpt.numeric_remainders)
    if patterns := [*(writing.dequantize or ()), *halves]:
        beside = opened.source if opened.folder else None
        stating = ckpt if config is None else replace(ckpt, config=read_model_files(config)[0])
        codes = encodings.find_in_checkpoint(ckpt, encodings.read_quantization_config(stating, beside))
        choose = make_dtype_chooser(writing.dtype, writing.cast or {})
        plain, source, lost = dequantize(opened, patterns, codes, choose, encodings.read_model_dtype(stating, beside))
        opened = _replace_computed_tensors(opened, opened.layout.name_in_memory(plain), source, "dequantised", account)
        account.dropped += lost
    if writing.change:
        beside = opened.source if opened.folder else None
        changed, source = change_tensors(opened.checkpoint, opened.source, beside, writing.change)
        opened = _replace_computed_tensors(opened, changed, source, "changed by the caller", account)
    return opened


def _replace_computed_tensors(
    opened: OpenCheckpoint, made: Checkpoint, source: Source, how: str, account: Account
) -> OpenCheckpoint:
    """Return the checkpoint `opened` with the index and files of a state that was computed from it. Tensors with a
    recorded digest that no longer applies are added to `inputs`, so that their old bytes are compared with it later.

    Args:
        made, source: the index of the new state, and the files that its tensors lie in.
        how: what was done to the tensors, in words: "dequantised".
        account: gets what changed.
    """
    ckpt = opened.checkpoint
    inside = {n: t for n, t in ckpt.tensors.items() if n in ckpt.recorded and n not in made.recorded}
    account.add_step(how, ckpt, made, computed=True)
    inputs = (*opened.inputs, replace(opened, checkpoint=replace(ckpt, tensors=inside)))
    return replace(opened, checkpoint=made, source=source, inputs=inputs)


def _edit_state(ckpt: Checkpoint, writing: WriteRequest, account: Account) -> Checkpoint:
    """Set values, leave out what is to be reset, and move the data position to another number of ranks, as requested.

    Args:
        account: gets what changed.

    Raises:
        UsageError: no entry has such a name, or a value cannot be set.
    """
    if writing.set_values:
        before = ckpt
        ckpt, changed = set_values(ckpt, writing.set_values)
        account.add_step(f"set by {argument('set_values')}", before, ckpt)
        account.changed |= changed
        account.set_values += changed
    if writing.reset:
        before = ckpt
        ckpt, how = reset_state(ckpt, tuple(writing.reset))
        account.add_step(how, before, ckpt)
    mesh = getattr(writing.options, "sizes", None)
    if ranks := writing.world_size if mesh is None else mesh.loaders:
        before = ckpt
        ckpt, notes = move_data_position(ckpt, ranks, ranks if mesh is None else mesh.world)
        account.add_step(f"the data position of {count_noun(ranks, 'rank')}", before, ckpt)
        ckpt = replace(ckpt, notes=[*ckpt.notes, *notes])
    return ckpt


def _drop_values_with_calls(ckpt: Checkpoint) -> tuple[Checkpoint, list[Dropped]]:
    """Leave out values with calls that their pickle would make when it is loaded; returns (the rest, what was left
    out)."""
    found = {n: why for n, v in ckpt.values.items() if (why := find_unwritable_reason(v.data)) is not None}
    if not found:
        return ckpt, []
    rest = replace(ckpt, values={n: v for n, v in ckpt.values.items() if n not in found})
    return rest, [Dropped(n, 0, why) for n, why in found.items()]


def _check_optimizer(ckpt: Checkpoint, target: layouts.Layout, drop: bool) -> None:
    """Refuse optimizer state that the layout's loader cannot use, and add notes on state that has no parameter or was
    lost.

    Args:
        drop: whether state without names may be kept as data.

    Raises:
        Unsupported: the state has no names, and what resumes from the layout needs them; or it is malformed.
    """
    if target.needs_named_optimizer:
        _refuse_malformed_optimizer(ckpt)
    unnamed = [] if drop else find_unnamed_optimizer_state(ckpt)
    numbered = next((n.removeprefix(f"{KEEPS_NUMBERS}: ") for n in ckpt.notes if n.startswith(KEEPS_NUMBERS)), None)
    by_name = target.needs_named_optimizer or target.refuses_numbers  # a job of ranks asks for names
    if numbered and not drop and by_name and any(t.path[0] == "model" for t in ckpt.tensors.values()):
        raise Unsupported(
            f"{target.name} needs the names of the parameters: {numbered} {argument('drop', True)} keeps the state "
            "under its numbers, as data that no job looks at; full keeps it as it is.",
            code="CKPT0308",
        )
    if target.needs_named_optimizer and unnamed:
        raise Unsupported(
            f"{target.name} needs the optimizer under the names of the weights, and {len(unnamed)} of its tensors have "
            f'names of its own, first "{unnamed[0]}". {argument("only", ["model"])} converts the weights alone, '
            f"{argument('drop', True)} keeps those tensors as data that no engine looks at; dcp and full carry "
            "everything.",
            code="CKPT0330",
        )
    if odd := find_orphaned_optimizer_state(ckpt):
        ckpt.notes.append(
            f"the optimizer has state for {count_noun(len(odd), 'parameter')} that the model does not have, first "
            f'"{odd[0]}": are the two of one training run?'
        )
    if lost_slots := find_lost_slots(ckpt):
        ckpt.notes.append(describe_lost_slots(ckpt, lost_slots))
    if ungrouped := find_ungrouped_state(ckpt):
        ckpt.notes.append(describe_ungrouped_state(ungrouped))


def _refuse_malformed_optimizer(ckpt: Checkpoint) -> None:
    """Raise for optimizer state of a structure that no engine and no trainer loads.

    Raises:
        Unsupported: the state, or that of a parameter, is not a dict, or a param group is a list.
    """
    odd = ""
    for path in chain((v.path for v in ckpt.values.values() if v.data != {}), (t.path for t in ckpt.tensors.values())):
        if odd:
            break
        if is_optimizer_state(path) and len(path) < 4:
            odd = (
                f'"{joined(path)}" is {"a tensor" if joined(path) in ckpt.tensors else "a value"}. The state of an '
                "optimizer is a dict of its parameters, and that of a parameter a dict of its slots"
            )
        elif path[:2] == ("optim", "param_groups") and len(path) > 3 and type(path[3]) is int:
            odd = f'"{joined(path[:3])}" is a list. A param group is a dict of options'
    if odd:
        raise Unsupported(
            f"{odd}, so no engine and no trainer loads it. {argument('only', ['model'])} converts the weights alone; "
            "dcp and full keep it.",
            code="CKPT0330",
        )


def _refuse_lost_state(opened: OpenCheckpoint, draft: Draft, target: layouts.Layout, holds: frozenset[str]) -> None:
    """Raise if state would be lost of components that the layout can hold.

    Args:
        holds: the components that it can hold; empty if it can hold all.

    Raises:
        Unsupported: with the first entry that would be lost.
    """
    behind = [d for d in opened.left_behind if d.name.partition(".")[0] != "model"]
    if (
        behind
        and opened.checkpoint.derived is None
        and (not holds or any(d.name.partition(".")[0] in holds for d in behind))
    ):
        raise Unsupported(_explain_dropped_training_state(behind), code="CKPT0313")
    lost = [d for d in draft.dropped if not holds or d.name.partition(".")[0] in holds]
    if lost:
        count = len(opened.checkpoint.tensors) + len(opened.checkpoint.values)
        raise Unsupported(
            f'{target.name} cannot hold {len(lost)} of the {count} entries, first "{lost[0].name}" ({lost[0].why}). '
            f"Use {argument('drop', True)} to go on without them, or another layout.",
            code="CKPT0313",
        )


def _open_source(
    src: CheckpointPath,
    reading: OpenOptions,
    model: layouts.ModelHints,
    needed: Callable[[str], bool],
    prove_later: bool = False,
) -> OpenCheckpoint:
    """Open the source: a checkpoint, or one that is averaged, merged, patched, or the difference to another.

    If it is too damaged to open and another checkpoint will fill it, open its weights alone.

    Args:
        model: what `collect_model_hints(reading)` returns.
        needed: tells, for the name of a component, whether an entry of it that cannot be read is an error.
        prove_later: as in `open_checkpoint`, if the source is one checkpoint.

    Raises:
        CkpttoolError: it cannot be opened or merged.
    """
    if reading.average is not None:
        return open_average(src, replace(reading, average=None), reading.average, model)
    if reading.difference_to is not None:
        return open_difference(src, reading, model)
    if reading.apply:
        return open_patched(src, reading, model)
    if reading.merge is not None:
        return open_merged(src, replace(reading, merge=None), reading.merge, model)
    try:
        return open_checkpoint(src, reading, model, False, needed, prove_later)
    except IncompleteWeights:
        raise
    except Corrupt:
        if reading.fill_from is None or reading.only is not None:
            raise
        return open_checkpoint(src, replace(reading, only=("model",)), model, check_hints=False, needed=needed)


def _regroup_optimizer(ckpt: Checkpoint, like: layouts.ReferenceModel | None) -> tuple[Checkpoint, list[Dropped]]:
    """Give the optimizer the param groups of another checkpoint.

    Args:
        like: the model of the other checkpoint; None if none was given.

    Returns:
        (the new index, what was left out because no group has its parameter).

    Raises:
        UsageError: no checkpoint with param groups that list names was given.
        Unsupported: the source's groups do not list names.
    """
    if like is None or like.groups is None:
        has = "no checkpoint was given" if like is None else "its param groups do not list names of parameters"
        raise UsageError(
            f"{argument('regroup', True)} takes the param groups of the checkpoint that {argument('like')} names: "
            f"{has}.",
            code="CKPT0204",
        )
    if list_names_by_group(ckpt) is None:
        raise Unsupported(
            f"{argument('regroup', True)}: {ckpt.root} has no param groups that list names of parameters, so nothing "
            "says which state belongs where.",
            code="CKPT0308",
        )
    out, gone, notes = regroup_optimizer(ckpt, like.groups)
    nbytes = {n: ckpt.tensors[n].nbytes if n in ckpt.tensors else 0 for n in gone}
    unplaced = [Dropped(n, nbytes[n], f"no param group of {argument('like')} has the parameter") for n in gone]
    return replace(out, notes=[*out.notes, *notes]), unplaced


def _explain_dropped_training_state(behind: list[Dropped]) -> str:
    """Return the message of a merge that stops because it would drop training state.

    Args:
        behind: the entries that would be dropped.
    """
    parts = ", ".join(dict.fromkeys(d.name.partition(".")[0] for d in behind))
    return (
        f"a merge writes weights only, and the source holds {len(behind)} entries of {parts} besides, first "
        f'"{behind[0].name}": they are of the training of the adapter and do not fit the merged model. '
        f"Use {argument('only', ['model'])} or {argument('drop', True)} to go on without them."
    )


def _refuse_world_size(target: layouts.Layout, world_size: int) -> None:
    """Refuse a world size for a layout whose files do not depend on it.

    Raises:
        UsageError: with the layouts that it applies to.
    """
    if "world_size" not in target.writer_uses:
        why = "which is one file" if target.is_file else "whose files are the same for any number of ranks"
        per_rank = [x.name for x in layouts.layouts().values() if x.write is not None and "world_size" in x.writer_uses]
        raise UsageError(
            f"{argument('world_size', world_size)} does not apply to {target.name}, {why}. Leave it out, or choose one "
            f"of: {', '.join(per_rank)}.",
            code="CKPT0205",
        )


def _refuse_dtype_for_codes(dtype: str | None, found: Encodings) -> None:
    """Raise if one dtype is requested for all weights, and some are codes, which a cast would destroy.

    Args:
        dtype: the requested dtype; None and "keep" are none.
        found: the weights that are codes.

    Raises:
        Unsupported: with the first codes and their scale, or with what is incomplete.
    """
    if dtype in (None, "keep") or not found:
        return
    what = [f.text for f in found.faults]
    plain = f"; {argument('dequantize', ['*'])} makes weights in {dtype} of them" if found.weights else ""
    if found.weights:
        codes, first = next(iter(found.weights.items()))
        what.insert(0, f'{found.summary()}; first "{codes}" with "{first.scale}"')
    raise Unsupported(
        f"{argument('dtype', dtype)}: {'; '.join(what)}. A cast would round codes and scales and multiply nothing, and "
        f"make a model of other weights. Without {argument('dtype')}, codes and scales are copied bit for bit{plain}. "
        f"{argument('cast')} changes tensors that are no codes.",
        code="CKPT0318",
    )


def _refuse_casts(draft: Draft, target: layouts.Layout, codes: Encodings) -> None:
    """Raise if a layout's own choice of dtype (such as ZeRO's fp32 masters) would cast codes, scales or float4 tensors.

    Args:
        codes: the weights that are codes.

    Raises:
        Unsupported: with the first such tensor.
    """
    for name, t in draft.checkpoint.tensors.items():
        of = draft.sources.get(name)
        if of is not None and of.dtype != t.dtype and (said := codes.describe(joined(of.path))):
            raise Unsupported(
                f"{said}, and {target.name} keeps it as {t.dtype}: its engine trains numbers, not codes. "
                f"{encodings.advise_dequantizing()}",
                code="CKPT0318",
            )
        if of is not None and of.dtype != t.dtype and "float4_e2m1fn_x2" in (of.dtype, t.dtype):
            raise Unsupported(
                f'"{joined(of.path)}" is {of.dtype}, two numbers in a byte, and the destination keeps it as {t.dtype}. '
                "ckpttool moves such tensors, it does not convert them. Choose a layout that keeps dtypes, such "
                "as dcp.",
                code="CKPT0332",
            )


def _refuse_file_names(draft: Draft) -> None:
    """Raise for file names that a file system or a store rejects, as of layouts with a file for each value.

    Raises:
        Unsupported: a part of a name is longer than 255 bytes, is empty, "." or "..", or has a null byte or a surrogate
            that stands for no byte (PEP 383).
    """
    for f in draft.files:
        parts = f.name.split("/")
        part = max((p.encode("utf-8", "surrogatepass") for p in parts), key=len)
        if len(part) > 255:
            problem = f"with a name of {len(part):,} bytes, {part[:40].decode(errors='replace')}…; the limit is 255"
        elif {"", ".", ".."} & {*parts} or re.search("[\0\ud800-\udc7f\udd00-\udfff]", f.name):
            problem = f"named {f.name[-80:]!a}, which no file can be"
        else:
            continue
        raise Unsupported(
            f"this layout would write a file {problem}. The name is that of an entry of the state: rename it, or write "
            "another layout.",
            code="CKPT0316",
        )


def _refuse_non_torch_dtypes(target: layouts.Layout, ckpt: Checkpoint) -> None:
    """Raise if a tensor has a dtype that torch does not have, and torch reads the layout.

    Layouts without pickles keep such tensors.

    Raises:
        Unsupported: with the first such tensor.
    """
    name = None if target.keeps_calls else next((n for n, t in ckpt.tensors.items() if t.dtype in NOT_TORCHS), None)
    if name is not None:
        raise Unsupported(
            f'"{name}" is {ckpt.tensors[name].dtype}, numbers of six bits, which torch has no dtype for, and '
            f"{target.name} is read by torch. hf and audit keep its bytes as they are.",
            code="CKPT0332",
        )


def _refuse_subclasses(target: layouts.Layout, objects: Mapping[str, Composite]) -> None:
    """Refuse tensors of subclasses (quantised ones of torchao) for a layout that has no place for them.

    Args:
        objects: {name: the object and the tensors in it}.

    Raises:
        Unsupported: with the first, and its class.
    """
    if not objects or target.keeps_subclasses:
        return
    name, first = next(iter(objects.items()))
    keep = ", ".join(x.name for x in layouts.layouts().values() if x.keeps_subclasses and x.write is not None)
    ways = [f"{keep} carry them as they are"]
    if first.path[0] != "model":
        ways[:0] = [
            f"{argument('dequantize', ['optim.*'])} writes the exact float32 value of each code",
            f"{argument('only', ['model'])} leaves the optimizer out",
        ]
    raise Unsupported(
        f'"{name}" is a {class_label(first.about)} of {list(first.shape)}, made of {", ".join(first.tensors)}; the '
        f"checkpoint has {len(objects):,} such tensors, and {target.name} has only plain ones. {'; '.join(ways)}.",
        code="CKPT0319",
    )


def _explain_unread_files(opened: OpenCheckpoint, target: layouts.Layout, rows: list[Unread]) -> str:
    """Return the message of a conversion that stops because files of the checkpoint were not read.

    Args:
        opened: the source of the conversion.
        target: the layout that was to be written.
        rows: the files that were not read.
    """
    return (
        f"{opened.location} is read as {opened.layout.name}, which does not include these files of the same "
        f"checkpoint: {unread_files.describe_files(rows)}. The {target.name} checkpoint would look complete, but "
        "training "
        f"could not resume from it. Use {argument('drop', True)} to convert without them, or "
        f"{argument('only', ['model'])} for the weights alone."
    )


def make_dtype_chooser(
    dtype: str | None,
    cast: Mapping[str, str],
    inside: Mapping[str, str] = MappingProxyType({}),
    codes: Encodings = Encodings(),  # noqa: B008
    halves: frozenset[str] = frozenset(),
) -> layouts.Cast:
    """Return a function of (name, stored dtype) of a tensor that returns its dtype in the destination.

    Args:
        dtype: for weights in floating point; None and "keep" leave them unchanged.
        cast: {pattern of names: dtype}; the last pattern that matches counts.
        inside: {tensor: the object of a tensor subclass that it is a part of}; their dtypes stay.
        codes: weights that are codes; their dtypes and those of their scales stay.
        halves: weights whose fp32 masters are stored as remainders of them; their dtypes stay.

    Raises:
        UsageError: a dtype is not a floating-point one.
        Unsupported: raised by the returned function: a tensor whose dtype has to stay would be cast.
    """
    whole = None if dtype in (None, "keep") else parse_floating_dtype(str(dtype))
    rules = [(pattern, parse_floating_dtype(to)) for pattern, to in cast.items()]

    def choose(name: str, stored: str) -> str:
        """Return the dtype of a tensor in the destination; `stored` is that in the source."""
        if name in inside:
            if any(fnmatch.fnmatchcase(name, pattern) for pattern, _ in rules):
                raise Unsupported(
                    f'{argument("cast")}: "{name}" is a part of the quantised tensor "{inside[name]}", whose numbers '
                    "only mean something together. Leave it out of the pattern.",
                    code="CKPT0318",
                )
            return stored
        if said := codes.describe(name):
            if any(fnmatch.fnmatchcase(name, pattern) and to != stored for pattern, to in rules):
                raise Unsupported(
                    f"{argument('cast')}: {said}. A cast would change the codes or their scales, and not give the "
                    f"numbers of the weight. Leave it out of the pattern, or add {argument('dequantize', ['*'])}.",
                    code="CKPT0318",
                )
            return stored
        if "float" not in stored and stored not in PACKED:
            return stored
        out = whole if whole and name.startswith("model.") else stored
        for pattern, to in rules:
            if fnmatch.fnmatchcase(name, pattern):
                out = to
        if out != stored and name in halves:
            raise Unsupported(
                f'"{name}" in {out}: its fp32 master is stored as the int16 remainder of the bf16 weight '
                f"(store_param_remainders), and would be lost. Add {argument('dequantize', ['*master*'])}, which "
                "joins both first, or cast other tensors.",
                code="CKPT0318",
            )
        if out != stored and stored in PACKED:
            raise Unsupported(
                f'{argument("cast")} and {argument("dtype")}: "{name}" is {stored}, {PACKED[stored]} numbers in '
                f"{ITEMSIZE[stored]} bytes, which ckpttool copies and does not cast. Cast other tensors by name: "
                f"{argument('cast', {'PATTERN': 'DTYPE'})}.",
                code="CKPT0332",
            )
        return out

    return choose
