"""`python -m ckpttool`, without the current folder on the path, where Python puts it first for `-m`: a folder that somebody else has
filled may hold a torch.py. A ckpttool.py in it is found before this file; `python -P -m ckpttool` and `ckpttool` leave the folder out."""

import os
import sys

try:
    if not sys.flags.safe_path and sys.path[0] == os.getcwd():
        del sys.path[0]
except FileNotFoundError:  # the folder was removed, and Python left it out
    pass

from .cli.main import main

main()
