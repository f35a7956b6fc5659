"""What commands that convert print of their results."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..printable import count_noun
from .terminal import Meter, describe_memory, note, say

if TYPE_CHECKING:
    from ..engine.conversion import ConvertResult

__all__ = ["describe_read_back", "print_notes", "print_result"]


def print_notes(notes: list[str], quiet: bool) -> None:
    """Print the notes of a result."""
    for text in notes:
        note(f"note: {text}", quiet)


def describe_read_back(done: ConvertResult) -> str:
    """Say whether a result was read back, for the end of its line."""
    return ", read back and equal" if done.verified else ", not read back"


def print_result(done: ConvertResult, source: str, meter: Meter, quiet: bool, more: str = "") -> None:
    """Print what was written from `source`, in how much time and memory, and the digests.

    Args:
        more: what else is known of it, for the end of the line.
    """
    from ..engine.inspect import human

    where = f" for {count_noun(done.world_size, 'rank')}" if done.world_size else ""
    note(
        f"{source} -> {done.layout_to}{where}: {done.tensors:,} tensors, {human(done.written_bytes)} in "
        f"{meter.seconds:.1f} s, {describe_memory()}{more}",
        quiet,
    )
    for component, root in done.digest.items():
        say(f"digest {component:10s} blake3:{root}")
