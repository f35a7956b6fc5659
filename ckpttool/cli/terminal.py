"""What all commands share: arguments that mean the same everywhere, sizes, progress on stderr, data on stdout."""

from __future__ import annotations

import codecs
import io
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, TextIO, cast

import typer

from ..bounded_json import parse
from ..errors import Corrupt, Unsafe, UsageError
from ..printable import count_noun, printable, printable_json, printable_lines

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn, TaskID
    from rich.segment import Segment

__all__ = [
    "Json",
    "Latest",
    "Meter",
    "OutputLost",
    "Quiet",
    "Src",
    "Verbose",
    "describe_memory",
    "draw",
    "find_newest",
    "make_console",
    "note",
    "open_streams",
    "parse_rules",
    "print_json",
    "print_left_behind",
    "print_unread_files",
    "progress_bar",
    "refuse_empty_arguments",
    "say",
    "split_commas",
]

Src = Annotated[
    str,
    typer.Argument(
        help="A checkpoint in any layout: a folder, a file, or the URL of one (s3://, gs://, az://, hf://, https://).",
        show_default=False,
    ),
]


Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress and no notes.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Name everything that is left behind.")]
Latest = Annotated[
    bool,
    typer.Option(
        "--latest",
        help="Take the newest complete checkpoint below this folder, two levels down, from which a job can resume.",
    ),
]


def find_newest(path: str, latest: bool, quiet: bool = False) -> str:
    """Return the path of the checkpoint to read: `path` itself, or the newest complete checkpoint below it.

    Args:
        path: the path that was given.
        latest: whether to search the folder `path` for the newest complete checkpoint (--latest), which is printed.
        quiet: print nothing.

    Raises:
        CkpttoolError: there is no complete checkpoint below the folder.
    """
    if not latest:
        return path
    from ..engine.discover.detection import find_latest_checkpoint as look

    found, newer = look(path)
    note(f"latest: {found}", quiet)
    if newer:
        note(f"note: {newer}", quiet)
    return found


def split_commas(text: str) -> list[str]:
    """Return the parts of a text between commas, without surrounding spaces; empty parts are left out.

    Raises:
        UsageError: no part is left.
    """
    parts = [t.strip() for t in text.split(",") if t.strip()]
    if not parts:
        raise UsageError(
            f"{text!r} lists nothing. Give names with commas between them, or leave the option out.", code="CKPT0202"
        )
    return parts


def refuse_empty_arguments(arguments: Iterable[str]) -> None:
    """Raise UsageError if an argument of the command line is empty, as when a shell variable is not set.

    It must not mean the current folder, or all components.

    Raises:
        UsageError: with the option that has the empty value, or the number of the argument.
    """
    before = ""
    for i, text in enumerate(arguments):
        if not text or re.fullmatch(r"--[a-z-]+=", text):
            where = text[:-1] or (before if before.startswith("-") else f"argument {i + 1}")
            raise UsageError(f"{where} is empty. Is a variable of the shell not set?", code="CKPT0202")
        before = text


def parse_rules(rules: list[str], flag: str, form: str) -> dict[str, object]:
    """Return {left side: right side} of the values of a repeatable option, such as "GLOB=DTYPE".

    Args:
        rules: the values.
        flag: the option, for messages.
        form: how a value is written. If it ends with "VALUE", a value is split at its first "=", and the right side is
            parsed as JSON where it is JSON; otherwise it is split at its last "=".

    Raises:
        UsageError: a value has no "=", or nothing before it.
    """
    out: dict[str, Any] = {}
    plain = form.endswith("VALUE")
    for rule in rules:
        what, eq, to = rule.partition("=") if plain else rule.rpartition("=")
        if not eq or not what:
            raise UsageError(f"{flag} {rule!r}: write {form}.", code="CKPT0203")
        out[what] = _parse_plain_value(to) if plain else to
    return out


def _parse_plain_value(text: str) -> object:
    """Return the value of a text that is JSON, True, False or None; any other text is returned unchanged."""
    words = {"True": True, "False": False, "None": None}
    try:
        return words[text] if text in words else parse(text.encode(errors="surrogateescape"), "value")
    except (Corrupt, Unsafe):
        return text


#: Columns of a terminal: of most, and those that every part of a bar fits into.
_USUAL, _WIDE = 80, 100
#: The most columns of a table in a file; longer cells are cut.
_OF_TABLES = 10_000


def progress_bar() -> Meter:
    """Return a function for the argument `progress`: it draws a bar on stderr or, if that is no terminal, prints a line
    every ten seconds.

    Examples:
        >>> ckpttool.convert("run/ckpt", "out", to="hf", progress=ckpttool.progress_bar())  # doctest: +SKIP
    """
    return Meter(quiet=False, alone=True)


def _get_bar_total(total: int) -> int | None:
    """Return `total`, the bytes of a stage, as the total of its bar; None, for a bar without a total, if it is at most
    1."""
    return total if total > 1 else None


class Meter:
    """Progress on stderr: a live bar on a terminal, a line every ten seconds in a log, nothing with --quiet.

    In a `with`, the bar is taken off the screen at the end, and `seconds` is how long it took.
    """

    def __init__(self, quiet: bool, alone: bool = False) -> None:
        """Begin to measure time.

        Args:
            quiet: show no progress.
            alone: nobody closes it, so each bar is taken off the screen at the end of its stage.
        """
        self.quiet, self.alone = quiet, alone
        self.bar: Progress | None = None
        self.task: TaskID | None = None
        self.what, self.began, self.said = "", 0.0, 0.0
        self.created, self.seconds = time.monotonic(), 0.0

    def __enter__(self) -> Meter:
        return self

    def __exit__(self, *_: object) -> None:
        """Take the bar off the screen, and set `seconds`."""
        self.close()
        self.seconds = time.monotonic() - self.created

    def measure_costs(self) -> dict[str, object]:
        """Return {"seconds": how long the run took, "peak_memory_mib": of this process}, for JSON. Call it after the
        `with` block."""
        return {"seconds": round(self.seconds, 3), "peak_memory_mib": measure_peak_memory()}

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show how far a run is.

        Args:
            what: the stage, such as "copy"; a new one begins a new bar.
            done, total: bytes of it.
        """
        if self.quiet:
            return
        now = time.monotonic()
        if what != self.what:
            self.close()
            self.what, self.began, self.said = what, now, now
            if sys.stderr.isatty():
                self._start_bar(what, total)
        if self.bar is not None and self.task is not None:
            if now - self.said > 0.1 or done == total:
                self.bar.update(self.task, completed=done, total=_get_bar_total(total), memory=describe_memory())
                self.said = now
        elif now - self.said >= 10 and total <= 1:
            note(f"{what} took {now - self.began:.0f} s")
            self.said = now
        elif now - self.said >= 10:
            rate = done / (now - self.began)
            left = (total - done) / rate if rate else 0
            note(
                f"{what} {done / 1e9:.1f} of {total / 1e9:.1f} GB, {rate / 1e9:.2f} GB/s, {left:.0f} s left, "
                f"{describe_memory()}"
            )
            self.said = now
        if self.alone and done >= total:
            self.close()

    def _start_bar(self, what: str, total: int) -> None:
        """Draw the bar of a new stage, `what`, with `total` bytes."""
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        console = make_console(stderr=True)
        columns: list[str | ProgressColumn] = [TextColumn("{task.description:8s}")]
        columns.append(BarColumn(None if console.width < _WIDE else 40))  # a wrapped line would stay on the screen
        columns += (
            [DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()] if total > 1 else [TimeElapsedColumn()]
        )
        if console.width >= _USUAL:
            columns.append(TextColumn("{task.fields[memory]}"))
        bar = Progress(*columns, console=console, transient=True)
        self.task = bar.add_task(what, total=_get_bar_total(total), memory="")
        bar.start()
        self.bar = bar

    def close(self) -> None:
        """Take the bar off the screen, if there is one; the next call begins a stage."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None
        self.what = ""


class OutputLost(Exception):
    """Standard output cannot be written to. Not an OSError, so that no library in between handles it as its own."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error.strerror)
        self.error = error


class _Stream:
    """A standard stream. Whatever is written has escapes for what does not print, but for line ends; `write_raw` is for
    controls of the terminal, by rich."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        """Write a text, with escapes for what does not print; returns the characters that were written."""
        return self.write_raw(printable_lines(text))

    def write_raw(self, text: str) -> int:
        """Write a text as it is; returns the characters that were written."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class Stdout(_Stream):
    """Standard output; its failures raise OutputLost, unlike those of the files that a command works on."""

    def write_raw(self, text: str) -> int:
        """Write a text as it is; returns the characters that were written.

        Raises:
            OutputLost: it failed.
        """
        try:
            return self._file.write(text)
        except OSError as e:
            raise OutputLost(e) from None

    def flush(self) -> None:
        """Flush the stream.

        Raises:
            OutputLost: it failed.
        """
        try:
            self._file.flush()
        except OSError as e:
            raise OutputLost(e) from None


class Stderr(_Stream):
    """Standard error, whose failures are ignored: a full log or a closed terminal must not end a conversion."""

    def write_raw(self, text: str) -> int:
        """Write a text as it is, and ignore failures; returns the characters that were, or should have been,
        written."""
        with suppress(OSError):
            return self._file.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush the stream, and ignore failures."""
        with suppress(OSError):
            self._file.flush()


class _RawStream:
    """A `Stdout` or `Stderr` whose `write` is `write_raw`."""

    def __init__(self, file: TextIO) -> None:
        self._file, self.write = file, getattr(file, "write_raw", file.write)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


#: Characters of ours for a terminal or a file that is not UTF-8.
_IN_ASCII = str.maketrans("█─│├└·→≤≥…’", "#-||`-><>.'")


def _replace_unencodable(e: UnicodeError) -> tuple[str | bytes, int]:
    """Return (a replacement, the position at which to continue) for characters that a stream cannot encode.

    This is an error handler of codecs. Characters that ckpttool draws with become similar ones in ASCII, others, as in
    names of files, escapes.

    Raises:
        UnicodeError: `e` itself, if it is not about encoding.
    """
    if not isinstance(e, UnicodeEncodeError):
        raise e
    text = e.object[e.start : e.end].translate(_IN_ASCII)
    return text.encode("ascii", "backslashreplace").decode("ascii"), e.end


def open_streams() -> None:
    """Replace stdout and stderr by `Stdout` and `Stderr`, and open those of descriptors 0 to 2 that the caller closed.

    Otherwise a file of a checkpoint could get one of these descriptors.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    codecs.register_error("ckpttool", _replace_unencodable)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="ckpttool")
    sys.stdout = cast("TextIO", Stdout(sys.stdout or open(os.devnull, "w")))  # noqa: SIM115
    sys.stderr = cast("TextIO", Stderr(sys.stderr or open(os.devnull, "w")))  # noqa: SIM115


def describe_memory() -> str:
    """Return the peak memory of this process as text: "peak 123 MiB"."""
    return f"peak {measure_peak_memory()} MiB"


def measure_peak_memory() -> int:
    """Return the peak memory of this process, in MiB."""
    from ..storage.buffers import read_peak_memory

    return round(read_peak_memory() / (1 << 20))


def say(text: str = "") -> None:
    """Print a line on stdout. Control characters and line ends in it, as names may have, are printed as escapes.

    Raises:
        OutputLost: stdout cannot be written to.
    """
    print(printable(text))  # noqa: T201


def note(text: str, quiet: bool = False) -> None:
    """Print a line for people on stderr, unless `quiet`. Control characters and line ends in it, as names may have, are
    printed as escapes."""
    if not quiet:
        print(printable(text), file=sys.stderr, flush=True)  # noqa: T201


def print_left_behind(dropped: list[tuple[str, int, str]], quiet: bool, verbose: bool = False) -> None:
    """Print on stderr one line about entries that the destination does not hold, and one about files that were not
    read.

    Args:
        dropped: (name, bytes, why) of each entry or file.
        quiet: print nothing.
        verbose: print every name, too.
    """
    from ..engine.discover.unread_files import NOT_READ, describe_files, human
    from ..index.checkpoint import Unread

    files = [Unread(n, b, why.removesuffix(f", {NOT_READ}"), "") for n, b, why in dropped if why.endswith(NOT_READ)]
    if files:
        note(f"left behind: {describe_files(files)}", quiet)
    rows = dropped[: len(dropped) - len(files)]
    of: dict[str, list[int]] = {}
    for name, nbytes, _ in rows:
        of.setdefault(name.partition(".")[0], []).append(nbytes)
    if rows:
        parts = ", ".join(
            f"{part} ({len(sizes)}{f', {human(sum(sizes))}' if sum(sizes) else ''})" for part, sizes in of.items()
        )
        reasons = list(dict.fromkeys(why for _, _, why in rows))
        why = reasons[0] if len(reasons) == 1 else f"{reasons[0]}; and {len(reasons) - 1} other reasons"
        more = "" if verbose else "; -v names them"
        entries = count_noun(len(rows), "entry", "entries")
        note(f"left behind: {entries}: {parts}: {why}{more}", quiet)
    for name, nbytes, why in rows if verbose else ():
        note(f"  {name}, {human(nbytes)}: {why}", quiet)


def print_unread_files(rows: list[dict[str, Any]], quiet: bool, of: str = "") -> None:
    """Print on stderr which files of a checkpoint a command did not read.

    Args:
        rows: the fields of `Unread`, one dict a file.
        quiet: print nothing.
        of: what a line begins with, such as the path of the checkpoint and a colon.
    """
    from ..engine.discover import unread_files
    from ..index.checkpoint import Unread

    for text in unread_files.make_unread_note([Unread(**r) for r in rows]):
        note(f"note: {of}{text}", quiet)


def print_json(data: object) -> None:
    """Print plain data as JSON on stdout; a value that JSON does not have is converted by `str`."""
    print(printable_json(data, default=str))  # noqa: T201


def draw(*renderables: object) -> None:
    """Print tables and trees of rich on stdout. If that is not a terminal, neither lines nor the cells of a table are
    wrapped."""
    from rich.table import Table

    on_screen = sys.stdout.isatty()
    screen = make_console(highlight=False, emoji=False, width=None if on_screen else 160)
    for r in renderables:
        if on_screen:
            screen.print(r)
        elif isinstance(r, Table):  # in a file, a wrapped name would begin a line
            for column in r.columns:
                column.no_wrap = True
            wide = make_console(highlight=False, emoji=False, width=_OF_TABLES)
            with wide.capture() as shown:
                wide.print(r)
            print("\n".join(map(str.rstrip, shown.get().splitlines())))  # noqa: T201
        else:
            screen.print(r, soft_wrap=True)


def make_console(stderr: bool = False, **options: Any) -> Console:
    """Return a `rich.console.Console` that escapes control characters in printed text; rich's own styling works.

    Args:
        stderr: whether it prints on stderr, not on stdout.
        options: further arguments of `Console`.
    """
    from rich.console import Console
    from rich.segment import Segment

    class Safe(Console):
        def render(self, *given: Any, **more: Any) -> Iterator[Segment]:
            for text, style, control in super().render(*given, **more):
                yield Segment(text if control else printable_lines(text), style, control)

    return Safe(file=cast("TextIO", _RawStream(sys.stderr if stderr else sys.stdout)), **options)
