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
    """Return whether a result was read back, and by how much its logits differ if they were compared, as text that
    follows a comma."""
    proven = "" if done.proof is None else f", logits differ from the source's by {done.proof['largest']:.3g}"
    return (", read back and equal" if done.verified else ", not read back") + proven


def print_delta(path: str, as_json: bool, read_data: bool = False) -> bool:
    """Describe the delta, or the chain of deltas, at a path on stdout.

    Args:
        as_json: print JSON.
        read_data: decode all changes in it first.

    Returns:
        Whether there is a delta at that path; if not, nothing is printed.

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
    """Print what a conversion wrote, in how much time and memory, on stderr, and the digests on stdout.

    Args:
        source: what was converted, as the line names it: a layout, path or URL.
        meter: has measured how long the conversion took.
        quiet: print only the digests.
        more: text to append to the line.
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
