"""What commands that convert print of their results."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..printable import count_noun
from .terminal import Meter, describe_memory, note, print_json, say

if TYPE_CHECKING:
    from ..engine.conversion import ConvertResult

__all__ = ["describe_read_back", "print_delta", "print_notes", "print_result"]


def print_notes(notes: list[str], quiet: bool) -> None:
    """Print the notes of a result on stderr, each with "note:"; with `quiet`, print nothing."""
    for text in notes:
        note(f"note: {text}", quiet)


def describe_read_back(done: ConvertResult) -> str:
    """Return a text that says whether a result was read back, and proven to compute the same, for the end of a line."""
    proven = "" if done.proof is None else f", logits differ from the source's by {done.proof['largest']:.3g}"
    return (", read back and equal" if done.verified else ", not read back") + proven


def print_delta(path: str, as_json: bool, read_data: bool = False) -> bool:
    """Print what the delta or the chain of deltas at a path is, and tell whether there is one.

    Args:
        read_data: decode all of its changes first.

    Raises:
        CkpttoolError: it cannot be read, or is damaged.
    """
    from ..engine.deltas import summarise_deltas

    if (delta := summarise_deltas(path, read_data)) is None:
        return False
    if as_json:
        print_json(delta.to_json())
    for line in () if as_json else delta.lines():
        say(line)
    return True


def print_result(done: ConvertResult, source: str, meter: Meter, quiet: bool, more: str = "") -> None:
    """Print what was written, in how much time and memory, on stderr, and the digests on stdout.

    Args:
        source: what was converted, as the line names it: a layout, path or URL.
        meter: knows how long it took.
        quiet: print the digests alone.
        more: what else is known of the result, for the end of the line.
    """
    from ..engine.inspect import human

    where = f" for {count_noun(done.world_size, 'rank')}" if done.world_size else ""
    note(
        f"{source} -> {done.layout_to}{where}: {count_noun(done.tensors, 'tensor')}, {human(done.written_bytes)} in "
        f"{meter.seconds:.1f} s, {describe_memory()}{more}",
        quiet,
    )
    for component, root in done.digest.items():
        say(f"digest {component:10s} blake3:{root}")
