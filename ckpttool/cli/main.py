"""The command line: parse, call one function of the library, print. Data goes to stdout, everything else to stderr."""

from __future__ import annotations

import atexit
import errno
import gc
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, cached_property
from importlib import import_module
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer

from ..errors import (
    EXIT_CODES,
    CkpttoolError,
    CommandLine,
    Interrupted,
    NoSpace,
    UsageError,
    get_change,
    get_failed_path,
    kind_of_failure,
    name_flags,
    note_change,
)
from ..printable import printable
from .help import HELP_FLAGS, App, Command, about, keep_called_command
from .layout_options import HfCommand, LayoutCommand
from .terminal import OutputLost, note, open_streams, print_json, refuse_empty_arguments, say

__all__ = ["build_app", "main"]

#: {a command: what typer makes it}, of the module and the function of its name; a group where None.
_COMMANDS: dict[str, type[Command] | None] = {
    "convert": LayoutCommand,
    "apply": Command,
    "inspect": Command,
    "ls": Command,
    "diff": Command,
    "compare": Command,
    "verify": Command,
    "doctor": Command,
    "resume-verify": Command,
    "watch": Command,
    "show": Command,
    "digest": Command,
    "stats": Command,
    "clean": Command,
    "prune": Command,
    "push": HfCommand,
    "pull": LayoutCommand,
    "average": LayoutCommand,
    "delta": Command,
    "adapter": None,
    "audit": None,
    "layouts": Command,
    "maps": Command,
    "acid": Command,
    "explain": Command,
}


def build_app(word: str | None = None) -> App:
    """Return the program, as an app of typer.

    Args:
        word: one of its commands, to build the program with that alone, so that no other module is imported; None, or
            any other word: all commands.
    """
    built = App(
        name="ckpttool",
        help="Move PyTorch training checkpoints between layouts and world sizes, bit for bit, in constant memory.\n\n"
        "Paths may be URLs (s3://, gs://, az://, hf://, https://). Every command has --json, and -h shows examples.",
        no_args_is_help=True,
        context_settings={"help_option_names": list(HELP_FLAGS)},
    )
    built.callback()(_root)
    for name in [word] if word in _COMMANDS else _COMMANDS:
        function = name.replace("-", "_")
        module = import_module(f".{function}", __package__)
        if (kind := _COMMANDS[name]) is None:
            built.add_typer(module.app)
        else:
            built.command(name, cls=kind)(getattr(module, function))
    return built


@cache
def _build_complete_app() -> App:
    """Return the program with all its commands; it is built once."""
    return build_app()


def __getattr__(name: str) -> Any:
    """Return the whole program for the attribute `app` of this module, built when it is first asked for.

    Raises:
        AttributeError: for any other name.
    """
    if name == "app":
        return _build_complete_app()
    raise AttributeError(name)


def _print_version(context: typer.Context, show: bool) -> None:
    """Print the version and exit, if --version was given (`show`)."""
    if show:
        from .._version import __version__
        from .versions import describe_versions

        if context.params["as_json"]:
            print_json(describe_versions())
        else:
            say(f"ckpttool {__version__}")
        raise typer.Exit


@about(
    ("What is in this folder, and what loads it?", "ckpttool inspect run/ckpt"),
    ("Is it complete and undamaged?", "ckpttool verify run/ckpt --read-data"),
    ("A model for from_pretrained", "ckpttool convert run/ckpt hf --to hf --config llama"),
    ("The same state for another number of ranks", "ckpttool convert run/ckpt dcp3 --to dcp --world-size 3"),
    ("The weights alone, in bf16", "ckpttool convert run/ckpt weights.pt --only model --dtype bf16"),
    ("What does this error mean?", "ckpttool explain CKPT0308"),
    ("The options, examples and exit codes of a command", "ckpttool convert --help"),
    exits=[code for code, _ in EXIT_CODES],
)
def _root(
    as_json: Annotated[
        bool, typer.Option("--json", is_eager=True, help="With --version: also of Python, packages and file formats.")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    if as_json:
        raise UsageError("--json goes after the command, or with --version.", code="CKPT0201")


class _Command(CommandLine):
    """The command that the arguments name, and whose options the others are."""

    def __init__(self, program: Any) -> None:
        """Find the command in `program`, typer's command object, when it is first asked for."""
        self._program = program

    @cached_property
    def flags(self) -> frozenset[str]:
        """The option names that the command has, such as "--to"."""
        found = self._program
        for word in sys.argv[1:]:
            if (below := getattr(found, "commands", {}).get(word)) is None:
                break
            found = below
        return list_flags(found)

    def owner(self, flag: str) -> str | None:
        """Return the first command that has the option `flag`, such as "ckpttool convert"; None if none has it."""
        return next((f"ckpttool {name}" for name, command in list_commands() if flag in list_flags(command)), None)


def list_commands(group: Any = None, above: str = "") -> Iterator[tuple[str, object]]:
    """Yield (its words after "ckpttool", such as "audit export", the command as an object of typer) for every command.

    Args:
        group: the group whose commands are listed; None: the complete program.
        above: the words before those of the group's commands, with a space at the end.
    """
    for name, found in getattr(group or typer.main.get_command(_build_complete_app()), "commands", {}).items():
        if hasattr(found, "commands"):
            yield from list_commands(found, f"{above}{name} ")
        else:
            yield above + name, found


def list_flags(command: Any) -> frozenset[str]:
    """Return the names of a command's options: "--to", "-n", ... The command is an object of typer."""
    return frozenset(flag for p in command.params for flag in (*p.opts, *p.secondary_opts))


#: What asks us to end.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_stopped = 0  # how many signals have asked us to end


def _handle_signal(signum: int, frame: FrameType | None) -> None:
    """Handle a signal that asks to end this process: raise KeyboardInterrupt.

    In a finalizer, where that would be lost, SIGINT is sent again a moment later instead.

    Args:
        signum, frame: the arguments that Python passes to a handler.
    """
    global _stopped
    _stopped += 1
    while frame is not None:
        if frame.f_code is _handle_unraisable.__code__:  # what is raised there is lost, too, with a traceback
            return _send_interrupt_soon()
        frame = frame.f_back
    raise KeyboardInterrupt


def main() -> None:
    """Run the command that `sys.argv` names, print an error as a line on stderr, and exit with its code."""
    global _stopped
    _stopped = 0
    note_change("")
    try:
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                signal.signal(number, _handle_signal)
        sys.unraisablehook = _handle_unraisable
        open_streams()
        warnings.showwarning = _show_warning
        logging.setLogRecordFactory(_make_log_record)
        _run_and_report_errors()
    except KeyboardInterrupt:  # before anything was begun, or another one while an error was printed
        _print_and_exit(Interrupted(_explain_interrupt()))


def _run_and_report_errors() -> None:
    """Run the command that `sys.argv` names, print what it raises as an error, and exit with the code of that error.

    This never returns.

    Raises:
        Exception: a bug, if CKPTTOOL_DEBUG is set.
        KeyboardInterrupt: a signal arrived while an error was printed.
    """
    try:
        _run_command()
    except OutputLost as e:
        _exit_without_output(e.error)
    except CkpttoolError as e:
        _print_and_exit(e)
    except KeyboardInterrupt:
        _print_and_exit(Interrupted(_explain_interrupt()))
    except MemoryError:
        _print_and_exit(NoSpace("not enough memory.", code="CKPT0802"))
    except OSError as e:
        _print_and_exit(_convert_os_error(e))
    except Exception as e:  # a fault of ours: no traceback unless asked for, but say where it was
        if _stopped:  # a library has made another error of the interrupt
            _print_and_exit(Interrupted(_explain_interrupt()))
        if os.environ.get("CKPTTOOL_DEBUG"):
            raise
        import traceback

        where = traceback.extract_tb(e.__traceback__)[-1]
        text = f"unexpected {type(e).__name__}: {e} ({os.path.basename(where.filename)}:{where.lineno})."
        whose = (
            f"fault of the package {theirs}, which adds a layout to ckpttool"
            if (theirs := _find_foreign_package(e))
            else "bug of ckpttool"
        )
        _print_and_exit(
            CkpttoolError(f"{text} This is a {whose}; CKPTTOOL_DEBUG=1 shows the traceback to report.", code="CKPT0101")
        )


def _find_foreign_package(e: Exception) -> str | None:
    """Return the package, not ckpttool, whose layout raised an exception; None if ckpttool's own code did."""
    from traceback import walk_tb

    from .. import layouts

    functions = [f for x in layouts.layouts().values() for f in (x.detect, x.read, x.write)]
    theirs = {getattr(f, "__module__", "ckpttool").partition(".")[0] for f in functions}
    frames = [frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in walk_tb(e.__traceback__)]
    last = next((n for n in reversed(frames) if n in theirs), "ckpttool")
    return None if last == "ckpttool" else last


def _explain_interrupt() -> str:
    """Return the message for an interrupt that no command handled: what was changed, and what may be left over."""
    if done := get_change():
        return f"interrupted. {done}"
    if _stopped > 1:
        return (
            "interrupted twice. No destination was changed; what was being written may be left beside it: the same "
            "command goes on from that or removes it, and `ckpttool clean` removes it, too."
        )
    return "interrupted; nothing was changed."


def _handle_unraisable(what: sys.UnraisableHookArgs) -> None:
    """Handle an exception in a finalizer, which Python cannot raise.

    For a KeyboardInterrupt, SIGINT is sent again a moment later; anything else is shown as Python does.

    Args:
        what: the arguments that Python passes to `sys.unraisablehook`.
    """
    if what.exc_type is KeyboardInterrupt:
        _send_interrupt_soon()
    else:
        sys.__unraisablehook__(what)


def _send_interrupt_soon() -> None:
    """Send SIGINT to this process in 10 ms."""
    again = threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT))
    again.daemon = True
    again.start()


_usual = warnings.showwarning


def _show_warning(message: Warning | str, category: type[Warning], *more: Any, **where: Any) -> None:
    """Print a warning of ckpttool in one line, and warnings of other packages as Python does, with escapes for what
    does not print in their text."""
    if category.__module__.startswith("ckpttool."):
        note(f"warning: {message}")
    else:
        _usual(printable(str(message)), category, *more, **where)


_make_usual_log_record = logging.getLogRecordFactory()


def _make_log_record(*given: Any, **more: Any) -> logging.LogRecord:
    """Make a log record whose text is one line: other packages log what a config says, which could forge lines of ours.
    An exception becomes part of that line, without its traceback.

    Args:
        given, more: the arguments that `logging` passes to a factory of records.
    """
    record = _make_usual_log_record(*given, **more)
    try:
        text = record.getMessage()
    except Exception:  # arguments that do not fit the message
        text = f"{record.msg} {record.args!r}"
    error = record.exc_info[1] if record.exc_info else None
    record.msg = printable(text if error is None else f"{text} ({type(error).__name__}: {error})")
    record.args = record.exc_info = None
    return record


def _run_command() -> None:
    """Run the command that `sys.argv` names, and exit with its status.

    Raises:
        UsageError: an argument is empty or wrong. CkpttoolError, OutputLost, KeyboardInterrupt: what the command
            raises.
    """
    refuse_empty_arguments(sys.argv[1:])
    words = sys.argv[1:]
    program = typer.main.get_command(keep_called_command(build_app(next(iter(words), None)), words))
    try:
        with name_flags(_Command(program)):
            status = _run_program(program)
    finally:
        sys.stdout.flush()  # here, where a failure has a handler
    _exit_process(status)


def _run_program(program: Any) -> int:
    """Run a program with `sys.argv`, and return the exit status.

    Args:
        program: the command object that typer makes of the program.

    Raises:
        UsageError: the command line is wrong; a note of the exception has the usage.
        KeyboardInterrupt: typer has caught a signal.
        Exception: anything that the command raises.
    """
    try:
        status = program(standalone_mode=False)
    except Exception as e:
        if not hasattr(e, "format_message"):  # click's own class differs between versions of typer
            raise
        error = UsageError(e.format_message(), code="CKPT0201")
        if (ctx := getattr(e, "ctx", None)) is not None:
            error.add_note(f"{' '.join(ctx.get_usage().split())}; `{ctx.command_path} -h` explains it.")
        raise error from None
    status = status if isinstance(status, int) else 0
    if status == 130 and _stopped:
        raise KeyboardInterrupt  # typer has made an exit of it
    return status


def _exit_process(status: int) -> NoReturn:
    """End this process with a status; a signal that arrives while it ends does not change the status."""

    def end(signum: int, frame: FrameType | None) -> None:
        """Handle a signal: end this process at once, with `status`."""
        os._exit(status)

    for number in _SIGNALS:
        if signal.getsignal(number) is _handle_signal:
            signal.signal(number, end)
    if (clusters := sys.modules.get("ckpttool.engine.workers.clusters")) is not None:
        clusters.end_mpi_ranks(status)
    atexit.register(_ignore_signals)
    atexit.register(gc.freeze)  # or Python looks for cycles among all objects before it ends
    sys.exit(status)


def _ignore_signals() -> None:
    """Ignore signals while Python ends: it restores the default handlers, which would end this process with another
    status."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _exit_without_output(e: OSError) -> None:
    """Exit after standard output failed with this error: with status 141 if its reader has gone, otherwise with a
    message and the code of the error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if isinstance(e, BrokenPipeError):
        _exit_process(141)  # as a program that SIGPIPE ends: whoever read our output has enough
    note(
        f"error: standard output: {e.strerror}. What was printed is incomplete; a checkpoint that this command wrote "
        "is not affected."
    )
    note(f"more: ckpttool explain {(error := _convert_os_error(e)).code}")
    _exit_process(error.exit_code)


def _convert_os_error(e: OSError) -> CkpttoolError:
    """Return the CkpttoolError that corresponds to an OSError which no command handled."""
    try:
        os.getcwd()
    except OSError:
        return UsageError("The current folder was removed. Change to another one, or give absolute paths.")
    name = get_failed_path(e, "the system")
    kind = NoSpace if e.errno in (errno.ENOMEM, errno.EMFILE, errno.ENFILE) else kind_of_failure(e)
    return kind(f"{name}: {e.strerror or e}" + (f" (errno {e.errno})." if e.errno else "."))


def _print_and_exit(e: CkpttoolError) -> NoReturn:
    """Print an error on stderr, with --json also on stdout, and exit with its code."""
    if "--json" in sys.argv:
        with suppress(OutputLost):
            print_json({"error": {"code": e.code, "kind": e.kind, "exit_code": e.exit_code, "message": str(e)}})
            sys.stdout.flush()
    for line in f"error: {e}".split("\n"):  # an error of several lines is a list of ours
        note(line)
    for text in getattr(e, "__notes__", ()):
        note(f"note: {text}")
    note(f"more: ckpttool explain {e.code}")
    _exit_process(e.exit_code)


if __name__ == "__main__":
    main()
