"""Memory of a training job that resumes from a checkpoint: bytes of parameters, gradients and optimizer state on each
rank, by sharding strategy; read from the index, with its real dtypes, slots and groups.

With P parameters, G bytes a gradient and K bytes of optimizer state a parameter, fp32 masters included:

    ddp     b P + G P + K P          zero1   b P + G P + K P/N        zero2   b P + (G + K) P/N
    zero3, fsdp2                             (b + G + K) P/N          hsdp    the same, N = ranks of a node

These are the rows of the ZeRO paper (Rajbhandari et al., arXiv:1910.02054, figure 1), whose Adam in mixed precision
has b = 2, G = 2 and K = 12. On top of them come the padding of what is divided, and what is not: buffers, scalars.

    fully_shard   a rank holds ceil(rows / N) rows of each parameter and gradient, padded, and its own rows of a moment
    zero1, zero2  the parameters of a group are one flat tensor, padded to a multiple of 2 N, of which a rank has 1/N
    zero3         a rank holds ceil(P / N) numbers of each parameter; those of at most 100,000 also stay whole
    DeepSpeed     has fp32 masters and moments whatever it computes in, and scalars once a group

That is what torch 2.13 and DeepSpeed 0.19.8 allocate; tests/live/test_job_memory.py measures it. Gradients of zero1 are
those during backward: DeepSpeed keeps 1/N of them afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from ..errors import Unsupported, UsageError, argument
from ..index.checkpoint import FLOATING, ITEMSIZE, Checkpoint, TensorEntry, tied_weights
from ..index.optimizers import find_optimizers, find_unassigned_state
from ..index.vocabulary import is_vocabulary_parameter
from ..options import SizeRequest, parse_size
from ..printable import count_noun
from .discover.unread_files import human

__all__ = ["FORMULAS", "STRATEGIES", "Devices", "JobMemory", "RankBytes", "compute_job_memory", "draw_memory"]

#: {strategy: the bytes of a rank, as people write them}.
FORMULAS = {
    "ddp": "bP + GP + KP",
    "zero1": "bP + GP + KP/N",
    "zero2": "bP + (G+K)P/N",
    "zero3": "(b+G+K)P/N",
    "fsdp2": "(b+G+K)P/N",
    "hsdp": "(b+G+K)P/N, N of a node",
}
STRATEGIES = tuple(FORMULAS)
_PRECISIONS = ("saved", "fp32", "mixed", "bf16")
_OPTIMIZERS = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",), "none": ()}
_PERSISTENT = 100_000  # stage3_param_persistence_threshold of DeepSpeed: smaller parameters are never divided
_MOST_LIVE = 1_000_000_000  # stage3_max_live_parameters
#: The block that a parameter is in: its name up to the first number.
_UNIT = re.compile(r"(.*?\.|)\d+(?=\.)")
_BUFFERS = re.compile(r"(^|\.)(running_mean|running_var|num_batches_tracked|inv_freq|e_score_correction_bias)$")


class Devices(NamedTuple):
    """The devices of a job: `nodes` of `per_node` each, with `memory` bytes; None where that was not given."""

    nodes: int
    per_node: int
    memory: int | None

    @classmethod
    def parse(cls, text: str) -> Devices:
        """Read "8x80GB", "4x8x80GB" (4 nodes of 8), or "8" alone.

        Raises:
            UsageError: it is something else, or more than a million devices.
        """
        m = re.fullmatch(r"(?:(?:(\d{1,6})x)?(\d{1,6})x([\d.]+ *[a-z]+)|(\d{1,6}))", text.strip().lower())
        nodes, per_node = (int(m[1] or 1), int(m[2] or m[4])) if m else (0, 0)
        if m is None or not 0 < nodes * per_node <= 1_000_000:
            raise UsageError(
                f"{argument('fits', text)}: write 8x80GB, or 4x8x80GB for 4 nodes of 8 devices.", code="CKPT0203"
            )
        return cls(nodes, per_node, None if m[3] is None else parse_size(m[3]))

    @property
    def ranks(self) -> int:
        """Return the number of devices of all nodes."""
        return self.nodes * self.per_node


class RankBytes(NamedTuple):
    """Bytes on one rank."""

    params: int
    grads: int
    optimizer: int

    @property
    def total(self) -> int:
        """Get the bytes of parameters, gradients and optimizer state together."""
        return sum(self)


class _Held(NamedTuple):
    """A tensor of the model, and what training keeps for it.

    `width`, `gathered` and `grad` are bytes a number of the parameter, of what is computed with, and of its gradient (0
    without one); `slots` [(shape, bytes a number)] of its optimizer state; `unit` the block that it is in, "" for none;
    `group` its param group; `buffer` whether it is no parameter.
    """

    shape: tuple[int, ...]
    width: float
    gathered: float
    grad: float
    slots: list[tuple[tuple[int, ...], float]]
    unit: str
    group: int
    buffer: bool

    @property
    def numel(self) -> int:
        """Get the number of elements of the tensor."""
        return prod(self.shape)


@dataclass(frozen=True)
class JobMemory:
    """What a job takes; sizes in bytes.

    `devices` as given; `precision` and `optimizer` what was assumed, in words; `parameters` how many numbers there are,
    `trained` how many of them have gradients; `largest_unit` {"name", "bytes"} that is gathered at once; `root` bytes
    of what is in no block; `full_save` host memory of rank 0 for a FULL_STATE_DICT; `largest_tensor` what a device
    needs for it; `rows` one for each strategy: {"strategy", "formula", "params", "grads", "optimizer", "gathered",
    "total", "fits", "spare", "offload"}. The first three are those of the largest rank; `gathered` is the most that is
    unsharded at a time, `total` the sum; `fits` and `spare` compare it with the memory of a device, None without one;
    `offload` is host memory of a node where params (FSDP), gradients and optimizer are offloaded. Activations are in
    none of them.
    """

    devices: Devices
    precision: str
    optimizer: str
    parameters: int
    trained: int
    largest_unit: dict[str, Any]
    root: int
    full_save: int
    largest_tensor: int
    rows: list[dict[str, Any]]
    notes: list[str]

    def to_json(self) -> dict[str, object]:
        """Convert to plain data."""
        return {**self.__dict__, "devices": self.devices._asdict(), "activations": "not included"}


def compute_job_memory(ckpt: Checkpoint, request: SizeRequest) -> JobMemory:
    """Compute the memory that training from a checkpoint takes on each rank.

    Args:
        ckpt: its index.
        request: devices, strategies, precision and optimizer; `fits` is set.

    Raises:
        UsageError: the request has an unknown value, or asks for an optimizer that the checkpoint does not have.
        Unsupported: the checkpoint has no weights.
    """
    assert request.fits is not None
    devices = Devices.parse(request.fits)
    chosen = tuple(request.strategy or (s for s in STRATEGIES if s != "hsdp" or devices.nodes > 1))
    for name, given, known in (
        ("strategy", chosen, STRATEGIES),
        ("precision", (request.precision,), _PRECISIONS),
        ("optimizer", (request.optimizer,), ("saved", *_OPTIMIZERS, None)),
    ):
        if odd := [x for x in given if x not in known]:
            raise UsageError(
                f"{argument(name, odd[0])}: choose from {', '.join(filter(None, known))}.", code="CKPT0203"
            )
    state = _State(ckpt, request)
    by_torch, by_deepspeed = state.list_held("fsdp2"), state.list_held("zero3")
    units = _sum_block_bytes(by_torch)
    unit = max((u for u in units if u), key=lambda u: units[u], default="")
    return JobMemory(
        devices=devices,
        precision=_describe_precision(request.precision),
        optimizer=state.words,
        parameters=sum(h.numel for h in by_torch if not h.buffer),
        trained=sum(h.numel for h in by_torch if h.grad),
        largest_unit={"name": unit or "the whole model", "bytes": units.get(unit, 0)},
        root=units.get("", 0) if unit else 0,
        full_save=round(sum(h.numel * h.width + sum(prod(s) * w for s, w in h.slots) for h in by_torch)),
        largest_tensor=round(max((h.numel * h.width for h in by_torch), default=0)),
        rows=[_make_strategy_row(s, by_deepspeed if s.startswith("zero") else by_torch, devices) for s in chosen],
        notes=list(dict.fromkeys(state.notes)),
    )


def _make_strategy_row(strategy: str, held: list[_Held], devices: Devices) -> dict[str, object]:
    """Return the row of a sharding strategy, as `JobMemory.rows` has it.

    Args:
        held: the tensors of the model, with the dtypes of that strategy.
    """
    largest = count_rank_bytes(held, strategy, devices, 0)  # chunks are never longer than the first
    gathered = 0
    if strategy in ("fsdp2", "hsdp", "zero3"):
        units, grads = _sum_block_bytes(held), _sum_block_bytes(held, of_gradients=True)
        root, block, whole = units.pop("", 0), max(units.values(), default=0), sum(h.numel * h.gathered for h in held)
        gathered = min(root + 2 * block, round(whole)) + max(grads.values(), default=0)
        if strategy == "zero3":
            numbers = sum(h.numel for h in held)
            gathered = max(gathered, round(whole * min(1, _MOST_LIVE / max(1, numbers))))
    total = largest.total + gathered
    moved = largest.total if strategy in ("fsdp2", "hsdp") else largest.grads + largest.optimizer
    return {
        "strategy": strategy,
        "formula": FORMULAS[strategy],
        **largest._asdict(),
        "gathered": gathered,
        "total": total,
        "fits": None if devices.memory is None else total <= devices.memory,
        "spare": None if devices.memory is None else devices.memory - total,
        "offload": None if strategy == "ddp" else moved * devices.per_node,
    }


def count_rank_bytes(held: Iterable[_Held], strategy: str, devices: Devices, rank: int) -> RankBytes:
    """Count the bytes of parameters, gradients and optimizer state on one rank, without what is gathered.

    Args:
        held: the tensors of the model, with the dtypes of that strategy.
        strategy: one of `STRATEGIES`; the formulas are at the top of the module.
    """
    n = {"ddp": 1, "hsdp": devices.per_node}.get(strategy, devices.ranks)
    held = list(held)
    buffers = sum(h.numel * h.width for h in held if h.buffer)
    weights = [h for h in held if not h.buffer]
    if strategy in ("ddp", "fsdp2", "hsdp"):
        params = sum(_count_shard_elements(h.shape, n) * h.width for h in weights)
        grads = sum(_count_shard_elements(h.shape, n) * h.grad for h in weights)
        optimizer = sum(_count_slot_elements(h.shape, s, n, rank % n) * w for h in weights for s, w in h.slots)
        return RankBytes(round(params + buffers), round(grads), round(optimizer))
    trained = [h for h in weights if h.grad]
    groups: dict[int, list[_Held]] = {}
    for h in trained:
        groups.setdefault(h.group, []).append(h)
    moments = {group: max(map(_count_moment_bytes, members)) for group, members in groups.items()}
    scalars = sum(w for g in groups.values() for s, w in max((h.slots for h in g), key=len) if not s)
    if strategy == "zero3":
        params = sum(-(-h.numel // n) * h.width + (h.numel <= _PERSISTENT) * h.numel * h.width for h in weights)
        grads = sum(-(-h.numel // n) * h.grad for h in trained)
        optimizer = sum(-(-h.numel // n) * (4 + moments[h.group]) for h in trained)
        return RankBytes(round(params + buffers), round(grads), round(optimizer + scalars))
    params, grads, optimizer = buffers + sum(h.numel * h.width for h in weights if not h.grad), 0.0, 0.0
    for group, members in groups.items():
        flat = -(-sum(h.numel for h in members) // (2 * n)) * 2 * n
        params += flat * members[0].width
        grads += (flat if strategy == "zero1" else flat // n) * members[0].grad
        optimizer += flat // n * (4 + moments[group])
    return RankBytes(round(params), round(grads), round(optimizer + scalars))


def _count_shard_elements(shape: tuple[int, ...], n: int) -> int:
    """Return how many elements of a parameter each of `n` ranks holds if its rows are divided, padded to equal
    shards."""
    return -(-shape[0] // n) * prod(shape[1:]) if shape else 1


def _count_slot_elements(shape: tuple[int, ...], slot: tuple[int, ...], n: int, rank: int) -> int:
    """Return how many elements of an optimizer slot a rank holds.

    They are its own rows if the slot has as many rows as the parameter; 1/n of the slot if it is the parameter in
    another shape (codes); otherwise the complete slot (scalars, factors).

    Args:
        shape, slot: shapes of the parameter and of the slot.
        n: number of ranks over which the parameter is sharded.
        rank: the rank's number among these, from 0.
    """
    if slot and shape and slot[0] == shape[0]:
        rows = -(-shape[0] // n)
        return max(0, min(rows, shape[0] - rank * rows)) * prod(slot[1:])
    divided = prod(slot) > 1 and prod(shape) in (prod(slot), 2 * prod(slot))
    return -(-prod(slot) // n) if divided else prod(slot)


def _count_moment_bytes(h: _Held) -> float:
    """Return the bytes of optimizer state divided by the number of elements of the parameter; slots without dimensions
    are left out."""
    return sum(prod(s) * w for s, w in h.slots if s) / max(1, h.numel)


def _sum_block_bytes(held: Iterable[_Held], of_gradients: bool = False) -> dict[str, int]:
    """Return the bytes of the unsharded parameters of each block, {"model.layers.3": bytes}; "" is all outside of
    blocks.

    Args:
        of_gradients: sum the gradients instead of the parameters.
    """
    sizes: dict[str, float] = {}
    for h in held:
        if not h.buffer:
            sizes[h.unit] = sizes.get(h.unit, 0) + h.numel * (h.grad if of_gradients else h.gathered)
    return {unit: round(n) for unit, n in sizes.items()}


class _State:
    """What a checkpoint says of a job: which tensors are trained, with which optimizer.

    `words` describes the optimizer, `notes` what was assumed.
    """

    def __init__(self, ckpt: Checkpoint, request: SizeRequest) -> None:
        """Collect the trained parameters and the optimizer's slots.

        Args:
            ckpt: the index of the checkpoint.
            request: precision and optimizer of the job.

        Raises:
            UsageError: the request asks for the saved optimizer, and the checkpoint has none by parameter.
        """
        self._ckpt, self._precision = ckpt, request.precision
        self.notes: list[str] = []
        own = [t for t in ckpt.tensors.values() if t.slot is not None]
        kinds = [o.name for o in find_optimizers(ckpt)]
        listed = {str(n): v.group for v in ckpt.values.values() if v.option == "params" for n in v.data}
        self._groups = listed
        given = request.optimizer or ("saved" if own or listed else "adamw")
        unassigned = find_unassigned_state(ckpt)
        if given == "saved" and not (own or listed):
            what = "the optimizer's tensors are not by parameter" if unassigned else "this checkpoint has no optimizer"
            raise UsageError(
                f"{argument('optimizer', 'saved')}: {what}. Choose adamw or sgd.",
                code="CKPT0205",
            )
        self._slots: dict[str, list[TensorEntry]] = {}
        for t in own if given == "saved" else ():
            self._slots.setdefault(t.parameter, []).append(t)
        self._assumed = () if given == "saved" else _OPTIMIZERS[given]
        self._trained = None if given != "none" else frozenset[str]()
        if given != "none" and (self._slots or own or listed):
            self._trained = frozenset({t.parameter for t in own} or listed)
        self.words = {
            "saved": f"as saved: {', '.join(dict.fromkeys(kinds)) or 'no state'}",
            "adamw": "AdamW, two moments and a step",
            "sgd": "SGD, one momentum buffer",
            "none": "none, so no gradients",
        }[given]
        if given != "saved" and request.optimizer is None:
            none = "the optimizer's tensors are not by parameter" if unassigned else "no optimizer is in the checkpoint"
            self.notes.append(f"{none}: AdamW with fp32 moments is assumed; {argument('optimizer')} names another one")

    def list_held(self, strategy: str) -> list[_Held]:
        """List the tensors of the model with the bytes that a strategy keeps for each; tied weights are listed once.

        Raises:
            Unsupported: there are no weights.
        """
        weights = {n: t for n, t in self._ckpt.tensors.items() if t.component == "model"}
        if not weights:
            raise Unsupported(
                "The checkpoint has no weights of a model, so the memory of a job cannot be computed.", code="CKPT0317"
            )
        tied = self._find_tied(weights)
        if coded := sum(t.dtype in ("uint8", "int8") or t.dtype.startswith("float8") for t in weights.values()):
            self.notes.append(f"{count_noun(coded, 'tensor')} of the model may be codes: they count as they are stored")
        return [self._describe_held(t, strategy) for n, t in weights.items() if n not in tied]

    def _find_tied(self, weights: Mapping[str, TensorEntry]) -> set[str]:
        """Return the names of weights that are a second name of another weight.

        They share its bytes; or config.json ties embedding and output layer; or, unless config.json unties them, they
        are one of two matrices of equal shape outside of blocks, and the optimizer has only the other one.
        """
        tied, ties = set(tied_weights(weights)), (self._ckpt.config or {}).get("tie_word_embeddings")
        alike: dict[tuple[str, tuple[int, ...]], list[str]] = {}
        for n, t in weights.items():
            if len(t.shape) == 2 and n not in tied and not _UNIT.match(t.local_name):
                alike.setdefault((t.dtype, t.shape), []).append(n)
        for pair in alike.values():
            known = [n for n in pair if self._trained is not None and weights[n].parameter in self._trained]
            if len(pair) == 2 and ties is not False and len(known) == 1:
                (other,) = set(pair) - set(known)
                tied.add(other)
                self.notes.append(f"{other} is taken for {known[0]}: the optimizer has one of the two")
            elif len(pair) == 2 and ties is True and all(is_vocabulary_parameter(weights[n].parameter) for n in pair):
                tied.add(pair[1])
        return tied

    def _describe_held(self, t: TensorEntry, strategy: str) -> _Held:
        """Return the bytes that a strategy keeps for one tensor of the model."""
        name, plain = t.parameter, t.dtype in FLOATING
        by_deepspeed = strategy.startswith("zero")
        stored = self._ckpt.rounded.get(f"model.{t.local_name}", t) if by_deepspeed else t
        width = float(ITEMSIZE[stored.dtype])
        # fully_shard refuses parameters without dimensions
        buffer = bool(_BUFFERS.search(t.local_name)) or t.dtype in ("bool", "int64", "int32") or not t.shape
        known = self._trained is None or name in self._trained
        if by_deepspeed and self._trained:  # it has a part of its flat groups for parameters without gradients, too
            known = known or name in self._groups
        trained = plain and not buffer and known
        asked = {"fp32": 4.0, "mixed": 2.0 if by_deepspeed else 4.0, "bf16": 2.0}.get(self._precision)
        if plain and asked is not None and not buffer:
            width = asked
        gathered = 2.0 if plain and self._precision == "mixed" else width
        moment = {"saved": None, "bf16": 2.0}.get(self._precision, 4.0) if not by_deepspeed else 4.0
        slots = [(s.shape, self._get_slot_width(s, t, moment)) for s in self._slots.get(name, ())] if trained else []
        if trained and self._assumed:
            slots = [(t.shape, moment or 4.0) for _ in self._assumed] + [((), 4.0)] * (len(self._assumed) > 1)
        found = _UNIT.match(t.local_name)
        unit = "" if found is None else found[0]
        grad = width if trained else 0.0
        return _Held(t.shape, width, gathered, grad, slots, unit, self._groups.get(name, 0), buffer)

    def _get_slot_width(self, slot: TensorEntry, of: TensorEntry, moment: float | None) -> float:
        """Return the bytes of an element of an optimizer slot.

        Args:
            of: the parameter.
            moment: bytes of an element of a moment (a slot of floating-point dtype and of the parameter's shape); None
                to count moments as they are stored, as all other slots are.
        """
        as_moment = moment is not None and slot.shape == of.shape and slot.shape and slot.dtype in FLOATING
        return moment if as_moment and moment is not None else float(ITEMSIZE[slot.dtype])


def _describe_precision(precision: str) -> str:
    """Return what a precision means, in words."""
    return {
        "saved": "saved: each tensor in the dtype that it has",
        "fp32": "fp32: parameters, gradients and moments",
        "mixed": "mixed: computes in bf16, from fp32 parameters (ddp, fsdp2, hsdp) or beside fp32 masters (zero)",
        "bf16": "bf16: parameters, gradients and moments; zero has fp32 masters and moments",
    }[precision]


def draw_memory(m: JobMemory) -> Iterator[Any]:
    """Yield drawings of the memory of a job for rich: a headline, a table of strategies, and notes on what is not
    included."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    nodes = f" ({count_noun(m.devices.nodes, 'node')} of {m.devices.per_node})" if m.devices.nodes > 1 else ""
    room = "" if m.devices.memory is None else f" with {human(m.devices.memory)}"
    yield Text.assemble(
        ("memory ", "bold"),
        f"of each of {count_noun(m.devices.ranks, 'device')}{nodes}{room}; P = {m.parameters:,} parameters, "
        f"{m.trained:,} trained; optimizer {m.optimizer}; {m.precision}",
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for title in ("", "params", "grads", "optimizer", "unsharded", "total", "", "offloaded", "formula"):
        table.add_column(title, justify="left" if title in ("", "formula") else "right")
    for r in m.rows:
        verdict = ""
        if r["fits"] is not None:
            verdict = f"fits, {human(r['spare'])} left" if r["fits"] else f"{human(-r['spare'])} too much"
        sizes = [human(r[k]) for k in ("params", "grads", "optimizer", "gathered", "total")]
        style = None if r["fits"] is None else "green" if r["fits"] else "red"
        offload = "" if r["offload"] is None else human(r["offload"])
        table.add_row(r["strategy"], *sizes, Text(verdict, style or ""), offload, r["formula"])
    yield table
    for text in (
        "not included: activations, workspaces, the CUDA context, buckets of communication",
        f"unsharded: the largest block, {m.largest_unit['name']} ({human(m.largest_unit['bytes'])}), twice, its "
        f"gradients, and {human(m.root)} outside of blocks; zero3 keeps up to 10^9 parameters",
        f"a full state dict (FULL_STATE_DICT): {human(m.full_save)} of host memory on rank 0, and "
        f"{human(m.largest_tensor)} of its device at a time",
        "offloaded: host memory of a node, where FSDP offloads parameters, gradients and optimizer, DeepSpeed the "
        "last two",
        "b, G and K are bytes a parameter, gradient and optimizer state (ZeRO, arXiv:1910.02054: 2, 2 and 12)",
        *m.notes,
    ):
        yield Text.assemble(("note", "blue"), " ", text)
