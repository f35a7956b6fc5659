"""The program: `ckpttool` and `python -m ckpttool`. Until its modules are imported, a signal ends it here, with a word.

Python puts the current folder first on the path for `-m`, and a folder that somebody else has filled may hold a
torch.py, so it is removed. A ckpttool.py in it is found before this file; `python -P -m ckpttool` and `ckpttool` leave
the folder out.
"""

import os
import sys

try:  # before anything is imported that Python has not imported itself
    if not sys.flags.safe_path and sys.path[0] == os.getcwd():
        del sys.path[0]
except FileNotFoundError:  # the folder was removed, and Python left it out
    pass

import gc
import signal
from typing import NoReturn

__all__ = ["main"]


def _exit_on_signal(signum: int, frame: object) -> NoReturn:
    """End the process at once with exit code 130 and a message; a signal handler."""
    text = "interrupted; nothing was changed."
    if "--json" in sys.argv:
        about = '"code": "CKPT9900", "kind": "Interrupted", "exit_code": 130'
        os.write(1, f'{{"error": {{{about}, "message": "{text}"}}}}\n'.encode())
    os.write(2, f"error: {text}\nmore: ckpttool explain CKPT9900\n".encode())
    os._exit(130)


def main() -> None:
    """Run the command line (`cli.main.main`). Until its modules are imported, a signal ends the process with exit code
    130."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, _exit_on_signal)
    # a large index is millions of objects that live until the end; looking for cycles is half of the time
    gc.disable()
    from .cli.main import main as run

    run()


if __name__ == "__main__":
    main()
