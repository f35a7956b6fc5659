"""Plan a conversion: open the source, ask the target layout for a draft, and refuse what would lose state. Nothing is
written."""

from __future__ import annotations

import fnmatch
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from types import MappingProxyType
from typing import Unpack

from blake3 import blake3

from .. import layouts
from .._version import __version__
from ..errors import Corrupt, IncompleteWeights, Unsupported, UsageError, argument
from ..formats.pickles import unwritable
from ..huggingface import encodings
from ..huggingface.encodings import Encodings
from ..index.checkpoint import (
    NOT_TORCHS,
    Checkpoint,
    TensorEntry,
    Unread,
    floating_dtype,
    joined,
    orphaned_optimizer_state,
    unnamed_optimizer_state,
)
from ..index.composites import Composite, class_label, composites, describe_unwrapped
from ..index.draft import Draft, Dropped
from ..index.fqns import remove_wrappers
from ..index.names import CANONICAL_KEYS_NOTE, KEEPS_NUMBERS, refuse_surrogates
from ..index.optimizers import describe_lost_slots, find_per_rank_slots
from ..index.param_groups import names_by_group, regroup
from ..index.schedulers import complete_scheduler_state
from ..index.vocabulary import vocabulary_of
from ..options import Reading, list_reading_keywords
from ..printable import Shown
from ..storage.source import Source
from . import mixups
from .conservation import Account
from .copy.averages import averages_of
from .copy.value_digests import value_digest
from .discover import unread_files
from .fill_from import filled
from .map_choice import kept_text, under_other_names
from .merging import open_merged
from .opening import CheckpointPath, OpenCheckpoint, OpenOptions, model_of, open_with, refuse_unused
from .transform.dequantizing import dequantize
from .transform.vocabulary_size import resize_vocabulary

__all__ = ["Plan", "WriteRequest", "caster", "plan", "plan_id", "plan_with"]


@dataclass(frozen=True, kw_only=True)
class WriteRequest:
    """What a conversion is asked to write; the arguments of `plan`, which explains them."""

    to: str | None = None
    options: object = None
    world_size: int | None = None
    dtype: str | None = None
    cast: Mapping[str, str] | None = None
    canonical_keys: bool = False
    drop: bool = False
    ignore_recorded_digests: bool = False
    expected: Mapping[str, str] | None = None
    strip_wrappers: bool = False  # leave "_orig_mod." and the like out of the source's own keys
    vocab_size: int | None = None  # rows of the embedding and the output layer
    regroup: bool = False  # give the optimizer the param groups of `like`
    dequantize: Iterable[str] | None = None  # globs of quantised tensors to write as float32
    map: str | None = None  # a name map, as its text or the name of one that comes with ckpttool; "none" applies none

    def __post_init__(self) -> None:
        if self.world_size is not None and (type(self.world_size) is not int or self.world_size < 1):
            raise UsageError(f"{argument('world_size', self.world_size)}: it must be an integer of at least 1.")
        if self.vocab_size is not None and (type(self.vocab_size) is not int or self.vocab_size < 1):
            raise UsageError(f"{argument('vocab_size', self.vocab_size)}: it must be an integer of at least 1.")
        if self.map is not None:  # its text, since workers have no such file, and plan_id compares it
            object.__setattr__(self, "map", kept_text(self.map))
        if isinstance(self.dequantize, str):
            raise UsageError(f"dequantize={self.dequantize!r} is a string; give a list, such as [{self.dequantize!r}].")
        object.__setattr__(self, "dequantize", tuple(self.dequantize) if self.dequantize else None)
        # one way to say so, since plan_id compares requests
        object.__setattr__(self, "cast", dict(self.cast) if self.cast else None)
        object.__setattr__(self, "expected", None if self.expected is None else dict(self.expected))


@dataclass
class Plan(Shown):
    """A conversion that has not begun: the open source, the draft of the destination, its layout, and what becomes of
    every entry. Close it, or use `with`."""

    opened: OpenCheckpoint
    draft: Draft
    target: layouts.Layout
    account: Account

    def lines(self) -> Iterator[str]:
        """What would be written, and what would be left behind."""
        draft, ckpt = self.draft, self.draft.checkpoint
        ranks = f" for {ckpt.world_size} rank{'s' if ckpt.world_size != 1 else ''}" if ckpt.world_size else ""
        yield (
            f"{self.opened.layout.name} -> {self.target.name}{ranks}: {len(ckpt.tensors):,} tensors, "
            f"{unread_files.human(draft.nbytes)} in {len(draft.files):,} files"
        )
        if dropped := self.account.dropped:
            yield f"left behind: {len(dropped):,} entries, first {dropped[0].name}"

    def __enter__(self) -> Plan:
        return self

    def __exit__(self, *_: object) -> None:
        self.opened.source.close()


@list_reading_keywords
def plan(
    src: CheckpointPath,
    dst: str | os.PathLike[str],
    *,
    to: str | None = None,
    options: object = None,
    world_size: int | None = None,
    only: Iterable[str] | None = None,
    dtype: str | None = None,
    cast: Mapping[str, str] | None = None,
    canonical_keys: bool = False,
    drop: bool = False,
    salvage: bool = False,
    fill_from: str | os.PathLike[str] | None = None,
    strip_wrappers: bool = False,
    vocab_size: int | None = None,
    regroup: bool = False,
    dequantize: Iterable[str] | None = None,
    map: str | os.PathLike[str] | None = None,
    ignore_recorded_digests: bool = False,
    expected: Mapping[str, str] | None = None,
    **reading: Unpack[Reading],
) -> Plan:
    """What `convert` would write; writes nothing.

    Args:
        (all): as `convert`.

    Raises:
        Unsupported: the layout cannot hold a part of the state, or state lies in files that were not read, and `drop`
        is not
            set.
    """
    source = OpenOptions(
        only=only, salvage=salvage, fill_from=None if fill_from is None else os.fspath(fill_from), **reading
    )
    writing = WriteRequest(
        to=to,
        options=options,
        world_size=world_size,
        dtype=dtype,
        cast=cast,
        canonical_keys=canonical_keys,
        drop=drop,
        ignore_recorded_digests=ignore_recorded_digests,
        expected=expected,
        strip_wrappers=strip_wrappers,
        vocab_size=vocab_size,
        regroup=regroup,
        dequantize=dequantize,
        map=None if map is None else os.fspath(map),
    )
    return plan_with(src, dst, source, writing)


def plan_with(src: CheckpointPath, dst: str | os.PathLike[str], reading: OpenOptions, writing: WriteRequest) -> Plan:
    """`plan`."""
    target = layouts.target_of(writing.to, dst)
    _refuse_request(target, writing)
    holds, drop = target.holds(writing.options), writing.drop
    model = model_of(reading)
    # an entry that cannot be read stops whoever needs it, and weights are never left out
    opened = _opened(src, reading, model, lambda part: part == "model" or (not drop and (not holds or part in holds)))
    try:
        # what nobody looks at: hints, and files with state beside the checkpoint
        _note_unused(opened, reading, writing, target)
        aside = unread_files.lost(opened.checkpoint, holds, opened.only)
        if aside and not drop:
            raise Unsupported(_not_carried(opened, target, aside))
        of_ranks = mixups.left_out(opened.checkpoint)
        # the state as it was asked for, and then as the layout keeps it
        account, unplaced = Account(), list[Dropped]()
        source = opened.locate()
        _change(opened, reading, writing, model.config, account, to_hub=target.name == "hf")
        options, codes = _prepare(opened, target, dst, writing, model, account, unplaced)
        # the draft, which must account for every entry
        draft = _drafted(opened.checkpoint, opened.source, target, options, account)
        _refuse_casts(draft, target, codes)
        _refuse_file_names(draft)
        draft.averages = frozenset() if reading.allow_mixed_steps else averages_of(draft.sources)
        draft.dropped += unplaced
        if not drop:
            _refuse_loss(opened, draft, target, holds)
        draft.dropped += [*opened.left_behind, *of_ranks]
        draft.dropped += [Dropped(r.name, r.bytes or 0, f"{r.what}, {unread_files.NOT_READ}") for r in aside]
        account.close(source, draft)
        _refuse_patterns(writing.cast or {}, [*opened.checkpoint.tensors, *draft.checkpoint.tensors])
    except BaseException:
        opened.source.close()
        raise
    return Plan(opened, draft, target, account)


def _note_unused(opened: OpenCheckpoint, reading: OpenOptions, writing: WriteRequest, target: layouts.Layout) -> None:
    """Refuse hints that neither the reader nor the writer uses, or note them, where they are true of any model."""
    used = {
        *opened.layout.reader_uses,
        *target.writer_uses,
        *(["config"] if reading.merge or writing.map else []),  # for what is tied; for sizes of heads
    }
    opened.checkpoint.notes += refuse_unused(reading, f"{opened.layout.name} -> {target.name}", used)


def _prepare(
    opened: OpenCheckpoint,
    target: layouts.Layout,
    dst: str | os.PathLike[str],
    writing: WriteRequest,
    model: layouts.ModelHints,
    account: Account,
    unplaced: list[Dropped],
) -> tuple[layouts.WriteOptions, Encodings]:
    """Make `opened` what the layout keeps of the state, and return (arguments of its writer, weights that are codes).
    What has no place goes to `unplaced`.

    Raises:
        Unsupported: the state has objects, an optimizer without names, or codes, and the layout or a cast needs others.
    """
    objects = composites(opened.checkpoint)
    parts = {joined(t.path): n for n, c in objects.items() for t in c.tensors.values()}
    quantization = encodings.read_quantization_config(opened.checkpoint, opened.source if opened.folder else None)
    _refuse_dtype(writing.dtype, encodings.find_in_checkpoint(opened.checkpoint, quantization))
    options = layouts.WriteOptions(
        config=model.config,
        like=model.like,
        flat_layout=model.flat_layout,
        wrap=model.wrap,
        target=os.path.basename(os.path.abspath(dst)),
        world_size=writing.world_size,
        own=writing.options,
        vocab_size=writing.vocab_size,
    )
    if writing.regroup:
        regrouped_state = _regrouped(opened.checkpoint, model.like, unplaced)
        account.add_step("in other param groups", opened.checkpoint, regrouped_state)
        opened.checkpoint = regrouped_state
    if not target.keeps_calls:
        opened.checkpoint = _without_calls(opened.checkpoint, unplaced)
    ckpt = target.prepare(opened.checkpoint, opened.source, options)
    account.add_step(f"as {target.name} keeps it", opened.checkpoint, ckpt)
    opened.checkpoint = ckpt
    codes = encodings.find_in_checkpoint(ckpt, quantization)  # under the names that are written
    holds = target.holds(writing.options)
    _refuse_dtypes(target, ckpt)
    _refuse_subclasses(target, {n: c for n, c in objects.items() if not holds or c.path[0] in holds})
    _check_optimizer(ckpt, target, writing.drop)
    ckpt.notes += describe_unwrapped(ckpt.tensors.values())
    refuse_surrogates(ckpt.tensors)  # every record lists them by name
    return replace(options, cast=caster(writing.dtype, writing.cast or {}, parts, codes)), codes


def _drafted(
    ckpt: Checkpoint, source: Source, target: layouts.Layout, options: layouts.WriteOptions, account: Account
) -> Draft:
    """The draft of a state in a layout.

    Raises:
        Differs: it does not account for every entry of the state. The others: as the layout's writer.
    """
    assert target.write is not None
    # the writer gets dicts of its own: what it removes from them, or alters in a value, is still known here
    digests = {n: value_digest(v) for n, v in ckpt.values.items()}
    draft = target.write(replace(ckpt, tensors=dict(ckpt.tensors), values=dict(ckpt.values)), source, options)
    account.add_draft(ckpt, digests, draft)
    theirs = target.own_keys and any(p[0] in ("model", "optim") for p in ckpt.origin)
    if theirs and CANONICAL_KEYS_NOTE not in draft.notes:
        draft.notes.append(
            f"model and optimizer keep the keys of the source; {argument('canonical_keys', True)} writes model and "
            "optim"
        )
    return draft


def _refuse_patterns(cast: Iterable[str], names: list[str]) -> None:
    """Refuse globs of `cast` that match nothing."""
    for pattern in cast:
        if not fnmatch.filter(names, pattern):
            raise UsageError(
                f"{argument('cast')} {pattern!r}: no tensor has such a name. The first name is {names[0]}."
            )


def _refuse_request(target: layouts.Layout, writing: WriteRequest) -> None:
    """Refuse arguments that do not go with a layout, before anything is opened.

    Raises:
        Unsupported: the layout is only read. UsageError: an argument is for other layouts.
    """
    if target.write is None:
        raise Unsupported(
            f"ckpttool reads {target.name}, but does not write it. Choose one of: {', '.join(layouts.written())}."
        )
    if writing.options is not None and type(writing.options) is not target.options:
        kind, wanted = type(writing.options).__name__, target.options.__name__ if target.options else "no options"
        raise UsageError(f"options={kind}(...) does not apply to {target.name}, which takes {wanted}.")
    if writing.canonical_keys and not target.own_keys:
        keep = ", ".join(x.name for x in layouts.layouts().values() if x.own_keys)
        raise UsageError(f"{argument('canonical_keys')} applies to {keep}; {target.name} has keys of its own.")
    if writing.world_size is not None:
        _refuse_world_size(target, writing.world_size)


def _change(
    opened: OpenCheckpoint,
    reading: OpenOptions,
    writing: WriteRequest,
    config: str | None,
    account: Account,
    *,
    to_hub: bool,
) -> None:
    """Make `opened` the state as it was asked for, whatever the layout: filled from another step, dequantized, under
    other names, with more or fewer rows of the vocabulary."""
    ckpt = opened.checkpoint
    if reading.fill_from is not None:
        filled(opened, reading.fill_from, None if reading.only is None else tuple(reading.only))
        account.add_step(f"filled from {reading.fill_from}", ckpt, opened.checkpoint)
        ckpt = opened.checkpoint
    if writing.expected is None:
        opened.expect_recorded(writing.ignore_recorded_digests)
    else:
        ckpt.recorded = {**ckpt.recorded, **writing.expected}
    if writing.dequantize:
        inside = {n: t for n, t in ckpt.tensors.items() if n in ckpt.recorded}
        plain, computed = dequantize((ckpt, opened.source), writing.dequantize)
        inputs = replace(ckpt, tensors={n: t for n, t in inside.items() if n not in plain.tensors})
        opened.inputs = (*opened.inputs, replace(opened, checkpoint=inputs))
        account.add_step("dequantised", ckpt, plain, computed=True)
        ckpt = opened.checkpoint = plain
        opened.source = computed
    if writing.canonical_keys:
        ckpt.origin = {}
        whole = complete_scheduler_state(ckpt)
        account.add_step("with all that LambdaLR saves", ckpt, whole)
        ckpt = whole
    elif writing.strip_wrappers:
        ckpt = opened.checkpoint = remove_wrappers(ckpt)
    before_map = ckpt
    ckpt, opened.source = under_other_names(
        ckpt, opened.source, writing.map, config, vocab_size=writing.vocab_size, to_hub=to_hub
    )
    account.add_step(f"under the names of {'the Hub' if to_hub else writing.map}", before_map, ckpt)
    opened.checkpoint = ckpt
    cut = {t.shape[0] for t in vocabulary_of(ckpt).values()} if ckpt is not before_map else set()
    if writing.vocab_size is not None and cut != {writing.vocab_size}:
        codes = encodings.find_in_checkpoint(ckpt, None)
        if said := next(filter(None, (codes.describe(f"model.{n}") for n in vocabulary_of(ckpt))), ""):
            raise Unsupported(
                f"{argument('vocab_size', writing.vocab_size)}: {said}, with scales for the rows that there are. "
                "Dequantise the weights with the program that quantised them first."
            )
        opened.checkpoint, opened.source = resize_vocabulary((ckpt, opened.source), writing.vocab_size)
        account.add_step(f"a vocabulary of {writing.vocab_size:,} rows", ckpt, opened.checkpoint)


def _without_calls(ckpt: Checkpoint, unplaced: list[Dropped]) -> Checkpoint:
    """The same state for a layout of pickles, which must not call what a checkpoint names when they are loaded; values
    with such calls go to `unplaced`."""
    found = {n: why for n, v in ckpt.values.items() if (why := unwritable(v.data)) is not None}
    unplaced += [Dropped(n, 0, why) for n, why in found.items()]
    return replace(ckpt, values={n: v for n, v in ckpt.values.items() if n not in found}) if found else ckpt


def _check_optimizer(ckpt: Checkpoint, target: layouts.Layout, drop: bool) -> None:
    """Note what is odd about the state of an optimizer.

    Raises:
        Unsupported: it has no names, and what resumes from the layout finds it by them, or it is a tensor.
    """
    if target.needs_named_optimizer:
        _refuse_odd_optimizer(ckpt)
    unnamed = [] if drop else unnamed_optimizer_state(ckpt)
    numbered = next((n.removeprefix(f"{KEEPS_NUMBERS}: ") for n in ckpt.notes if n.startswith(KEEPS_NUMBERS)), None)
    by_name = target.needs_named_optimizer or target.name == "dcp"  # a job of ranks asks for names
    if numbered and not drop and by_name and any(t.path[0] == "model" for t in ckpt.tensors.values()):
        raise Unsupported(
            f"{target.name} needs the names of the parameters: {numbered} {argument('drop', True)} keeps the state "
            "under its numbers, as data that no job looks at; full keeps it as it is."
        )
    if target.needs_named_optimizer and unnamed:
        raise Unsupported(
            f"{target.name} needs the optimizer under the names of the weights, and {len(unnamed)} of its tensors have "
            f'names of its own, first "{unnamed[0]}". {argument("only", ["model"])} converts the weights alone, '
            f"{argument('drop', True)} keeps those tensors as data that no engine looks at; dcp and full carry "
            "everything."
        )
    if odd := orphaned_optimizer_state(ckpt):
        ckpt.notes.append(
            f"the optimizer has state for {len(odd)} parameters that the model does not have, first "
            f'"{odd[0]}": are the two of one training run?'
        )
    if lost_slots := find_per_rank_slots(ckpt):
        ckpt.notes.append(describe_lost_slots(ckpt, lost_slots))


def _refuse_odd_optimizer(ckpt: Checkpoint) -> None:
    """Refuse an optimizer that no engine and no trainer loads.

    Raises:
        Unsupported: its state is a tensor, or a param group is a list.
    """
    odd = (
        '"optim.state" is a tensor. The state of an optimizer is a dict of its parameters'
        if "optim.state" in ckpt.tensors
        else ""
    )
    for path in chain((v.path for v in ckpt.values.values()), (t.path for t in ckpt.tensors.values())):
        if path[:2] == ("optim", "param_groups") and len(path) > 3 and type(path[3]) is int:
            odd = odd or f'"{joined(path[:3])}" is a list. A param group is a dict of options'
    if odd:
        raise Unsupported(
            f"{odd}, so no engine and no trainer loads it. {argument('only', ['model'])} converts the weights alone; "
            "dcp and full keep it."
        )


def _refuse_loss(opened: OpenCheckpoint, draft: Draft, target: layouts.Layout, holds: frozenset[str]) -> None:
    """Refuse to lose state of components that the layout can hold.

    Raises:
        Unsupported: with the first entry that would be lost.
    """
    behind = [d for d in opened.left_behind if d.name.partition(".")[0] != "model"]
    if behind and (not holds or any(d.name.partition(".")[0] in holds for d in behind)):
        raise Unsupported(_training_state(behind))
    lost = [d for d in draft.dropped if not holds or d.name.partition(".")[0] in holds]
    if lost:
        count = len(opened.checkpoint.tensors) + len(opened.checkpoint.values)
        raise Unsupported(
            f'{target.name} cannot hold {len(lost)} of the {count} entries, first "{lost[0].name}" ({lost[0].why}). '
            f"Use {argument('drop', True)} to go on without them, or another layout."
        )


def _opened(
    src: CheckpointPath, reading: OpenOptions, model: layouts.ModelHints, needed: Callable[[str], bool]
) -> OpenCheckpoint:
    """The source, merged with an adapter where that was asked; of one whose optimizer is lost and that another
    checkpoint shall fill, the weights."""
    if reading.merge is not None:
        return open_merged(src, replace(reading, merge=None), reading.merge, model)
    try:
        return open_with(src, reading, model, check_hints=False, needed=needed)
    except IncompleteWeights:
        raise
    except Corrupt:
        if reading.fill_from is None or reading.only is not None:
            raise
        return open_with(src, replace(reading, only=("model",)), model, check_hints=False, needed=needed)


def _regrouped(ckpt: Checkpoint, like: layouts.ReferenceModel | None, unplaced: list[Dropped]) -> Checkpoint:
    """The same state in the param groups of another checkpoint; state of parameters that are in none of them goes to
    `unplaced`.

    Raises:
        UsageError: no checkpoint with such groups was named. Unsupported: the source's groups do not list names.
    """
    if like is None or like.groups is None:
        has = "no checkpoint was given" if like is None else "its param groups do not list names of parameters"
        raise UsageError(
            f"{argument('regroup', True)} takes the param groups of the checkpoint that {argument('like')} names: "
            f"{has}."
        )
    if names_by_group(ckpt) is None:
        raise Unsupported(
            f"{argument('regroup', True)}: {ckpt.root} has no param groups that list names of parameters, so nothing "
            "says which state belongs where."
        )
    out, gone, notes = regroup(ckpt, like.groups)
    nbytes = {n: ckpt.tensors[n].nbytes if n in ckpt.tensors else 0 for n in gone}
    unplaced += [Dropped(n, nbytes[n], f"no param group of {argument('like')} has the parameter") for n in gone]
    out.notes = [*out.notes, *notes]
    return out


def _training_state(behind: list[Dropped]) -> str:
    """Why a merge stops at state of the adapter's training."""
    parts = ", ".join(dict.fromkeys(d.name.partition(".")[0] for d in behind))
    return (
        f"a merge writes weights only, and the source holds {len(behind)} entries of {parts} besides, first "
        f'"{behind[0].name}": they are of the training of the adapter and do not fit the merged model. '
        f"Use {argument('only', ['model'])} or {argument('drop', True)} to go on without them."
    )


def _refuse_world_size(target: layouts.Layout, world_size: int) -> None:
    """Refuse a world size for a layout that is the same at every one."""
    if "world_size" not in target.writer_uses:
        why = "which is one file" if target.is_file else "whose files are the same for any number of ranks"
        per_rank = [x.name for x in layouts.layouts().values() if x.write is not None and "world_size" in x.writer_uses]
        raise UsageError(
            f"{argument('world_size', world_size)} does not apply to {target.name}, {why}. Leave it out, or choose one "
            f"of: {', '.join(per_rank)}."
        )


def _refuse_dtype(dtype: str | None, found: Encodings) -> None:
    """Refuse a dtype for all weights where some are codes: nobody asks for bf16 to get fp8.

    Raises:
        Unsupported: with the first codes and their scale, or with what is not whole.
    """
    if dtype in (None, "keep") or not found:
        return
    what = [f.text for f in found.faults]
    if found.weights:
        codes, first = next(iter(found.weights.items()))
        what.insert(0, f'{found.summary()}; first "{codes}" with "{first.scale}"')
    raise Unsupported(
        f"{argument('dtype', dtype)}: {'; '.join(what)}. A cast would round codes and scales and multiply nothing, and "
        f"make a model of other weights. Without {argument('dtype')}, codes and scales are copied bit for bit; for "
        f"weights in {dtype}, dequantise with the program that quantised them, and convert what it saves. "
        f"{argument('cast')} changes tensors that are no codes."
    )


def _refuse_casts(draft: Draft, target: layouts.Layout, codes: Encodings) -> None:
    """Refuse a layout's own choice of dtype (masters of ZeRO are float32) where numpy cannot convert the source's, or
    where that is codes or their scales.

    Raises:
        Unsupported: with the first such tensor.
    """
    for name, t in draft.checkpoint.tensors.items():
        of = draft.sources.get(name)
        if of is not None and of.dtype != t.dtype and (said := codes.describe(joined(of.path))):
            raise Unsupported(
                f"{said}, and {target.name} keeps it as {t.dtype}: its engine trains numbers, not codes. "
                f"{encodings.ADVICE}"
            )
        if of is not None and of.dtype != t.dtype and "float4_e2m1fn_x2" in (of.dtype, t.dtype):
            raise Unsupported(
                f'"{joined(of.path)}" is {of.dtype}, two numbers in a byte, and the destination keeps it as {t.dtype}. '
                "ckpttool moves such tensors, it does not convert them. Choose a layout that keeps dtypes, such as dcp."
            )


def _refuse_file_names(draft: Draft) -> None:
    """Names of files that no file system and no store would take, as where a layout has a file for each value.

    Raises:
        Unsupported: a name is longer than 255 bytes.
    """
    for f in draft.files:
        part = max(map(os.fsencode, f.name.split("/")), key=len)
        if len(part) > 255:
            raise Unsupported(
                f"this layout would write a file with a name of {len(part):,} bytes, "
                f"{part[:40].decode(errors='replace')}…; the limit is 255. The name is that of an entry of the state: "
                "rename it, or write another layout."
            )


def _refuse_dtypes(target: layouts.Layout, ckpt: Checkpoint) -> None:
    """Refuse dtypes that torch does not have for a layout that torch reads: those that write no pickles keep them.

    Raises:
        Unsupported: with the first such tensor.
    """
    name = None if target.keeps_calls else next((n for n, t in ckpt.tensors.items() if t.dtype in NOT_TORCHS), None)
    if name is not None:
        raise Unsupported(
            f'"{name}" is {ckpt.tensors[name].dtype}, numbers of six bits, which torch has no dtype for, and '
            f"{target.name} is read by torch. hf and audit keep its bytes as they are."
        )


def _refuse_subclasses(target: layouts.Layout, objects: Mapping[str, Composite]) -> None:
    """Refuse objects of tensor subclasses for a layout that has no place for them.

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
        f"checkpoint has {len(objects):,} such tensors, and {target.name} has only plain ones. {'; '.join(ways)}."
    )


def _not_carried(opened: OpenCheckpoint, target: layouts.Layout, rows: list[Unread]) -> str:
    """Why a conversion stops at files that were not read."""
    where = opened.source.root if opened.folder else os.path.join(opened.source.root, opened.checkpoint.files[0])
    return (
        f"{where} is read as {opened.layout.name}, which does not include these files of the same checkpoint: "
        f"{unread_files.listed(rows)}. The {target.name} checkpoint would look complete, but training could not resume "
        f"from it. Use {argument('drop', True)} to convert without them, or {argument('only', ['model'])} for the "
        "weights alone."
    )


def caster(
    dtype: str | None,
    cast: Mapping[str, str],
    inside: Mapping[str, str] = MappingProxyType({}),
    codes: Encodings = Encodings(),  # noqa: B008
) -> layouts.Cast:
    """The dtype that a tensor gets, by its name and its stored dtype: `dtype` for floating-point weights, `cast` for
    names.

    Args:
        inside: {tensor: the object of a subclass that is made of it}; those stay as they are.
        codes: weights that are codes; they and their scales stay as they are.

    Raises (when it is called):
        Unsupported: one of those is named by `cast`.
    """
    whole = None if dtype in (None, "keep") else floating_dtype(str(dtype))
    rules = [(pattern, floating_dtype(to)) for pattern, to in cast.items()]

    def choose(name: str, stored: str) -> str:
        if name in inside:
            if any(fnmatch.fnmatchcase(name, pattern) for pattern, _ in rules):
                raise Unsupported(
                    f'{argument("cast")}: "{name}" is a part of the quantised tensor "{inside[name]}", whose numbers '
                    "only mean something together. Leave it out of the pattern."
                )
            return stored
        if said := codes.describe(name):
            if any(fnmatch.fnmatchcase(name, pattern) and to != stored for pattern, to in rules):
                raise Unsupported(
                    f"{argument('cast')}: {said}. A cast would change the codes or their scales, and not give the "
                    "numbers of the weight. Leave it out of the pattern, or dequantise with the program that quantised "
                    "it."
                )
            return stored
        if "float" not in stored or stored.startswith("float4"):
            return stored
        out = whole if whole and name.startswith("model.") else stored
        for pattern, to in rules:
            if fnmatch.fnmatchcase(name, pattern):
                out = to
        return out

    return choose


def plan_id(source: Source, draft: Draft, target: layouts.Layout, *asked: object) -> str:
    """Digest of everything that decides the bytes of the destination: source, draft, and the dataclasses `asked`.
    Machines that see the same files agree on it. The draft says where every byte comes from, so it also tells what
    files besides the source decided, such as a config.json that names the sizes of heads.

    If the source has no version ids, a random salt is mixed in, so that the id never matches an earlier run."""
    h = blake3(b"" if source.has_versions() else os.urandom(32))
    identities = sorted((name, *identity[1:]) for name, identity in source.identities().items())  # without the device
    h.update(
        json.dumps([__version__, target.name, source.root, identities, list(map(repr, asked))], default=str).encode()
    )
    for f in draft.files:
        h.update(os.fsencode(f"{f.name} {f.size}\n"))
        if not callable(f.head):
            h.update(f.head)
    for name, entry in draft.checkpoint.tensors.items():
        h.update(os.fsencode(f"{name} {draft.aliases.get(name)}\n"))
        for t in (entry, draft.sources.get(name)):
            if t is not None:
                h.update(_place_of(t))
    return h.hexdigest()


def _place_of(t: TensorEntry) -> bytes:
    """Dtype, shape and chunks of a tensor, as bytes."""
    c = t.chunks
    said = f"{t.dtype} {t.shape} {len(c)} {c.strides or ''} {c.zstd or ''}\n"
    return b"".join((said.encode(), c.file, c.offset, c.length, c.start, c.shape))
