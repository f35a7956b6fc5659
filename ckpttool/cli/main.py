"""The command line: parse, call one function of the library, print. Data goes to stdout, everything else to stderr."""

from __future__ import annotations

import errno
import gc
import os
import signal
import sys
import warnings
from contextlib import suppress
from typing import Annotated, Any

import typer

from ..errors import EXIT_CODES, CkpttoolError, Interrupted, NoSpace, NotRecognised, UsageError, as_flags
from .adapter import app as adapter_app
from .audit import app as audit_app
from .clean import clean
from .convert import convert
from .diff import diff
from .digest import digest
from .doctor import doctor
from .help import App, about, only_what_runs
from .inspect import inspect
from .layout_options import HfCommand, LayoutCommand
from .layouts import layouts
from .maps import maps
from .pull import pull
from .push import push
from .resume_verify import resume_verify
from .terminal import OutputLost, note, print_json, printable, refuse_empty, streams
from .verify import verify

__all__ = ["app", "main"]

app = App(
    name="ckpttool",
    help="Move PyTorch training checkpoints between layouts and world sizes, bit for bit, in constant memory.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


app.command(cls=LayoutCommand)(convert)
app.command()(inspect)
app.command()(diff)
app.command()(verify)
app.command()(doctor)
app.command("resume-verify")(resume_verify)
app.command()(digest)
app.command()(clean)
app.command(cls=HfCommand)(push)
app.command(cls=LayoutCommand)(pull)
app.add_typer(adapter_app)
app.add_typer(audit_app)
app.command()(layouts)
app.command()(maps)


def _version(show: bool) -> None:
    if show:
        from .._version import __version__

        print(f"ckpttool {__version__}")
        raise typer.Exit


@app.callback()
@about(
    ("What is in this folder?", "ckpttool inspect run/ckpt"),
    ("The same state for another number of ranks", "ckpttool convert run/ckpt dcp3 --to dcp --world-size 3"),
    ("The options, examples and exit codes of a command", "ckpttool convert --help"),
    exits=[code for code, _ in EXIT_CODES],
)
def _root(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def _stop(signum: int, frame: Any) -> None:
    raise KeyboardInterrupt


def main() -> None:
    """Entry point: runs a command and turns what it raises into a line on stderr and an exit code."""
    signal.signal(signal.SIGTERM, _stop)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        signal.signal(signal.SIGHUP, _stop)
    streams()
    warnings.showwarning = _show
    gc.disable()  # a large index is millions of objects that live until the end; looking for cycles is half of the time
    try:
        with as_flags():
            _run()
    except OutputLost as e:
        _lost(e.error)
    except CkpttoolError as e:
        _fail(e, e.exit_code)
    except KeyboardInterrupt:
        _fail(Interrupted("interrupted; nothing was changed."), 130)
    except MemoryError:
        _fail(NoSpace("not enough memory."), 8)
    except OSError as e:
        found = _refused(e)
        _fail(found, found.exit_code)
    except Exception as e:  # a fault of ours: no traceback unless asked for, but say where it was
        if os.environ.get("CKPTTOOL_DEBUG"):
            raise
        import traceback

        where = traceback.extract_tb(e.__traceback__)[-1]
        text = f"unexpected {type(e).__name__}: {e} ({os.path.basename(where.filename)}:{where.lineno})."
        _fail(CkpttoolError(f"{text} This is a bug of ckpttool; CKPTTOOL_DEBUG=1 shows the traceback to report."), 1)


_usual = warnings.showwarning


def _show(message: Warning | str, category: type[Warning], *more: Any, **where: Any) -> None:
    """Print a warning of ckpttool in one line, and warnings of other packages as usual."""
    if category.__module__.startswith("ckpttool."):
        note(f"warning: {printable(str(message))}")
    else:
        _usual(message, category, *more, **where)


def _run() -> None:
    refuse_empty(sys.argv[1:])
    program = typer.main.get_command(only_what_runs(app, sys.argv[1:]))
    try:
        sys.exit(_status(program) if "--json" in sys.argv else program())
    finally:
        sys.stdout.flush()  # here, where a failure has a handler


def _status(program: Any) -> int:
    """The exit status of a command line. Its mistakes are raised, so that `--json` prints them as JSON too."""
    try:
        status = program(standalone_mode=False)
    except Exception as e:
        if not hasattr(e, "format_message"):  # click's own class differs between versions of typer
            raise
        raise UsageError(e.format_message()) from None
    return status if isinstance(status, int) else 0


def _lost(e: OSError) -> None:
    """Exit after standard output failed. It is redirected to /dev/null, so that Python does not fail again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if isinstance(e, BrokenPipeError):
        sys.exit(141)  # as a program that SIGPIPE ends: whoever read our output has enough
    print(
        f"error: standard output: {e.strerror}. What was printed is incomplete; a checkpoint that this command wrote is not "
        "affected.",
        file=sys.stderr,
    )
    sys.exit(_refused(e).exit_code)


def _refused(e: OSError) -> CkpttoolError:
    """The error for an OSError that no command handled."""
    try:
        os.getcwd()
    except OSError:
        return UsageError("The current folder was removed. Change to another one, or give absolute paths.")
    name = os.fsdecode(e.filename) if isinstance(e.filename, (str, bytes)) else "the system"
    kind = (
        NoSpace if e.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EMFILE, errno.ENFILE) else CkpttoolError
    )
    return kind(f"{name}: {e.strerror or e}" + (f" (errno {e.errno})." if e.errno else "."))


def _fail(e: CkpttoolError, code: int) -> None:
    if "--json" in sys.argv:
        with suppress(OutputLost):
            print_json({"error": {"kind": type(e).__name__, "exit_code": code, "message": str(e)}})
            sys.stdout.flush()
    # names from files do not draw on the screen, nor make lines of their own; what NotRecognised lists are ours
    lines = str(e).split("\n") if isinstance(e, NotRecognised) else [str(e)]
    print("error: " + "\n".join(map(printable, lines)), file=sys.stderr)
    for text in getattr(e, "__notes__", ()):
        print("note: " + printable(text), file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
