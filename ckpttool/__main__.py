"""The program: `ckpttool` and `python -m ckpttool`. Until its modules are imported, a signal ends it here, with a word."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any, NoReturn

__all__ = ["main"]


def _stop(signum: int, frame: Any) -> NoReturn:
    text = "interrupted; nothing was changed."
    if "--json" in sys.argv:
        os.write(1, f'{{"error": {{"kind": "Interrupted", "exit_code": 130, "message": "{text}"}}}}\n'.encode())
    os.write(2, f"error: {text}\n".encode())
    os._exit(130)


def main() -> None:
    """`cli.main.main`."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, _stop)
    from .cli.main import main as run

    run()


if __name__ == "__main__":
    main()
