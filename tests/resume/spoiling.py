"""What is done to a checkpoint in the tests of faults, and what must be said about it.

A state is the tree that the job saved, {"model", "optim", ...}; what is done to it is a function of (the state, that of an
earlier step).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

State = dict[str, Any]
Spoil = Callable[[State, State], Any]


def model(fqn: str) -> str:
    return f"model.{fqn}"


def moment(fqn: str, slot: str) -> str:
    return f"optim.state.{fqn}.{slot}"


@dataclass(frozen=True)
class Fault:
    """One fault, and its verdict.

    `spoil` changes the state, `job` is a function of the job's file, "" for --config, and `settings` replaces some of the
    run's; `reference` replaces fields of the reference's trace. `tied` is a fault of the tied model, and
    `oldest` one whose earlier step is the earliest.

    `check` is the first check that fails with everything known, `dynamic` the first with numbers of the run alone, None
    where nothing is seen, and `recorded` says whether a recorded trajectory shows it. `kind` is that of the first
    cause, `tensors` the first of its tensors, `said` words that its text has. `rank` is whose shard the first
    difference lies in.
    """

    check: str | None
    kind: str | None
    dynamic: str | None
    tensors: tuple[str, ...] = ()
    spoil: Spoil | None = None
    rank: int | None = None
    job: str = "build"
    settings: dict[str, Any] = field(default_factory=dict)
    reference: dict[str, Any] = field(default_factory=dict)
    tied: bool = False
    oldest: bool = False
    recorded: bool = True
    said: str = ""


def one_of_each_kind(faults: Mapping[str, Fault], earlier: Iterable[Fault] = ()) -> set[str]:
    """Return the names of faults such that every kind, every first check, a rank's shard and the tied model are among them.

    Args:
        earlier: faults of other suites; their kinds and checks are not looked for again.
    """
    seen: set[object] = {x for f in earlier for x in (f.kind, f.check)}
    out = set()
    for name, f in faults.items():
        new = {f.kind, f.check, *(["of a rank"] if f.rank is not None else []), *(["tied"] if f.tied else [])} - seen
        if new:
            out.add(name)
            seen |= new
    return out


def weight(fqn: str, act: Callable[[Any], Any]) -> Spoil:
    """Act on a weight; what is given back, if anything, takes its place."""

    def spoil(state: State, old: State) -> None:
        found = act(state["model"][fqn])
        if isinstance(found, torch.Tensor):
            state["model"][fqn] = found.contiguous()

    return spoil


def slot(fqn: str, name: str, act: Callable[[Any], Any]) -> Spoil:
    """Act on a slot of the optimizer's state."""

    def spoil(state: State, old: State) -> None:
        found = act(state["optim"]["state"][fqn][name])
        if isinstance(found, torch.Tensor):
            state["optim"]["state"][fqn][name] = found.contiguous()

    return spoil


def every_slot(name: str, act: Callable[[Any], Any]) -> Spoil:
    """Act on a slot of every parameter that has it."""

    def spoil(state: State, old: State) -> None:
        for fqn, slots in state["optim"]["state"].items():
            if name in slots:
                slot(fqn, name, act)(state, old)

    return spoil


def every_weight(act: Callable[[Any], Any]) -> Spoil:
    """Act on every weight."""

    def spoil(state: State, old: State) -> None:
        for fqn in state["model"]:
            weight(fqn, act)(state, old)

    return spoil


def option(key: str, value: Any, group: int | None = None) -> Spoil:
    """An option of one param group, or of all."""

    def spoil(state: State, old: State) -> None:
        for i, g in enumerate(state["optim"]["param_groups"]):
            if group in (None, i):
                g[key] = value

    return spoil


def in_turn(*acts: Spoil) -> Spoil:
    """One after the other."""

    def spoil(state: State, old: State) -> None:
        for act in acts:
            act(state, old)

    return spoil


def zero(rows: slice) -> Callable[[Any], Any]:
    def act(t: Any) -> None:
        t[rows] = 0

    return act


def shift(t: Any) -> Any:
    """Everything one element on, as a wrong offset into a flat buffer gives it."""
    return t.reshape(-1).roll(1).reshape(t.shape)


def rounded(dtype: torch.dtype) -> Callable[[Any], Any]:
    return lambda t: t.to(dtype).to(t.dtype) if t.ndim else None


def flip(bit: int, index: tuple[int, ...]) -> Callable[[Any], Any]:
    """One bit of one element."""

    def act(t: Any) -> None:
        t.view(torch.int32)[index] ^= 1 << bit if bit < 31 else -(1 << 31)

    return act


def exchange(parts: Iterable[str], pairs: Iterable[tuple[str, str]]) -> Spoil:
    """Parameters under each other's names: their weights ("model"), their optimizer state ("optim")."""
    parts, pairs = tuple(parts), tuple(pairs)

    def spoil(state: State, old: State) -> None:
        for tree in [state["model"]] * ("model" in parts) + [state["optim"]["state"]] * ("optim" in parts):
            for a, b in pairs:
                tree[a], tree[b] = tree[b], tree[a]

    return spoil


def without(*path: str) -> Spoil:
    """An entry is not there."""

    def spoil(state: State, old: State) -> None:
        at: Any = state
        for key in path[:-1]:
            at = at[key]
        del at[path[-1]]

    return spoil


def put(value: Any, *path: str) -> Spoil:
    """An entry is another."""

    def spoil(state: State, old: State) -> None:
        at: Any = state
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value() if callable(value) else value

    return spoil
