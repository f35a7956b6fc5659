"""Lookup of the names that a live job asks for: each is found among the canonical ones, however the job spells it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

from ..errors import Unsupported
from ..index.checkpoint import Checkpoint, TensorEntry, Value, joined
from ..index.fqns import strip_wrapper_modules
from ..index.names import COUNTERS, ROLES, original_path

__all__ = ["NameLookup"]


class NameLookup:
    """The names that a live job may use for entries of a checkpoint; `find` returns canonical ones.

    Tried in this order; a name that fits two entries is an error: the canonical name or the name that the source itself
    had; then another word for a component ("optimizer.", "model_state_dict."), a counter at the root ("step"), a bare
    FQN, wrapper prefixes inside FQNs, one wrapper key in front of all ("app.model."), and per-parameter options of an
    optimizer that was flattened ("param_groups.<fqn>.lr"), which the group that lists the parameter answers.
    """

    def __init__(self, ckpt: Checkpoint, pieces: Mapping[str, Value] = MappingProxyType({})) -> None:
        """Index the names of a checkpoint's entries.

        Args:
            ckpt: the index of the checkpoint.
            pieces: {canonical name: value} of further entries that `find` may return, for values that are dicts and
                that torch asks for piece by piece.
        """
        entries: dict[str, TensorEntry | Value] = {**pieces, **ckpt.tensors, **ckpt.values}
        self._entries = entries
        self._own: dict[str, str] = {}
        self._groups: dict[str, set[str]] = {}
        for name, entry in entries.items():
            if entry.component not in ("model", "optim"):
                self._own[joined(original_path(entry.path, ckpt.origin))] = name
            elif entry.option == "params":
                members = entry.data if isinstance(entry, Value) else None
                for fqn in members if isinstance(members, list) else ():
                    self._groups.setdefault(str(fqn), set()).add(str(entry.path[2]))
        self._memo: dict[str, tuple[str, str] | None] = {}

    def find(self, asked: str) -> str | None:
        """Return the canonical name of the entry that the job asks for as `asked`; None if the checkpoint has no such
        entry.

        Raises:
            Unsupported: it fits several entries.
        """
        if asked not in self._memo:
            found = {name: "" for name in (asked, self._own.get(asked, "")) if name in self._entries}
            if not found:
                found = {name: way for name, way in self._iterate_aliases(asked) if name in self._entries}
            if len(found) > 1:
                raise Unsupported(
                    f'"{asked}" can mean {" or ".join(map(repr, sorted(found)))} of this checkpoint. Ask for it by one '
                    "of these names.",
                    code="CKPT0338",
                )
            self._memo[asked] = next(iter(found.items()), None)
        known = self._memo[asked]
        return known[0] if known else None

    def check_consistent(self, asked: Iterable[str]) -> None:
        """Check that all names of one state dict are understood in the same way; names that the checkpoint lacks are
        ignored.

        Raises:
            Unsupported: a name fits several entries, two names mean one tensor, or the names fit only if different
                leading keys are removed.
        """
        meaning: dict[str, str] = {}
        ways: dict[str, str] = {}
        for name in asked:
            found = self.find(name)
            if found is None or not isinstance(self._entries[found], TensorEntry):
                continue
            other = meaning.setdefault(found, name)
            if other != name:
                raise Unsupported(
                    f'"{other}" and "{name}" both mean "{found}" of this checkpoint; one of them would get the wrong '
                    "tensor. Put the model under the key \"model\", as in {'model': ..., 'optim': ...}.",
                    code="CKPT0338",
                )
            ways.setdefault((self._memo[name] or ("", ""))[1], name)
        wrapped = [w for w in ways if w.startswith("key ")]
        if len(wrapped) > 1 or (wrapped and "bare" in ways):
            examples = ", ".join(f'"{ways[w]}"' for w in [*wrapped, *(w for w in ("bare",) if w in ways)])
            raise Unsupported(
                f"the names {examples} match this checkpoint only if different leading keys are removed. "
                "Use the names that the checkpoint has.",
                code="CKPT0338",
            )

    def _iterate_aliases(self, asked: str) -> Iterator[tuple[str, str]]:
        """Yield (canonical name, how the job's name was read to mean it) for every meaning that a name of the job may
        have; the checkpoint need not have an entry of that canonical name.

        How it was read is "" for a name with its component, "bare" for an FQN alone, and "key K" if a leading key K was
        removed.

        Args:
            asked: the name that the job uses, such as "app.model.norm.weight".
        """
        top, _, rest = asked.partition(".")
        yield from ((n, "") for n in self._iterate_spelled_names(asked))
        if top in COUNTERS:
            yield f"trainer.{asked}", ""
        yield from ((n, "bare") for n in self._iterate_component_names("model", asked))
        if top in ("state", "param_groups"):
            yield from ((n, "") for n in self._iterate_component_names("optim", asked))
        if ROLES.get(rest.partition(".")[0]) in ("model", "optim"):
            yield from ((n, f"key {top}") for n in self._iterate_spelled_names(rest))

    def _iterate_spelled_names(self, name: str) -> Iterator[str]:
        """Yield the canonical names that a name may mean if its first part is a word that trainers use for a component
        ("optimizer.", "state_dict."); nothing for other names. The checkpoint need not have entries of these names."""
        top, _, rest = name.partition(".")
        role = ROLES.get(top)
        if role and rest:
            yield from self._iterate_component_names(role, rest)
            if role == "optim" and rest.startswith("0."):  # Lightning's list of optimizers, of one
                yield from self._iterate_component_names(role, rest[2:])

    def _iterate_component_names(self, role: str, rest: str) -> Iterator[str]:
        """Yield the canonical names that a name of a known component may mean; the checkpoint need not have entries of
        these names.

        Args:
            role: the component as canonical names begin with it, such as "model" or "optim".
            rest: the name without its first part, which was the job's word for the component.
        """
        yield f"{role}.{rest}"
        if role == "model":
            yield from (f"model.{fqn}" for fqn in _iterate_unwrapped_fqns(rest))
        elif role == "optim" and rest.startswith("state."):
            yield from (f"optim.state.{fqn}" for fqn in _iterate_unwrapped_fqns(rest[len("state.") :]))
        elif role == "optim" and rest.startswith("param_groups."):
            fqn, _, key = rest[len("param_groups.") :].rpartition(".")
            for name in (fqn, *_iterate_unwrapped_fqns(fqn)):
                yield from (f"optim.param_groups.{i}.{key}" for i in self._groups.get(name, ()))


def _iterate_unwrapped_fqns(fqn: str) -> Iterator[str]:
    """Yield an FQN without wrapper modules (FSDP, torch.compile), and, if it then begins with DDP's "module.", also
    without that."""
    stripped = strip_wrapper_modules(fqn)
    yield stripped
    if stripped.startswith("module."):
        yield stripped.removeprefix("module.")
