"""Where ranks come from: a process that has imported what every rank imports, and forks one for each launch.

    python tests/live/nursery.py

Each line of stdin is a launch: {"arguments": [...], "environment": {...}, "folder": ..., "log": file}, where ``arguments`` are a
script and its own, or ``-m``, a module and its own. The answer is two lines: the process id of the rank, and its status
once it has ended. Importing torch and transformers takes most of the time of a rank, so ``ranks.Launcher`` keeps one
nursery for each rank: ranks that were forked from one process would have one hash seed and the same addresses, and sets
would have the same order on all of them, which hides what torchrun shows.
"""

import gc
import importlib
import json
import os
import runpy
import sys
import traceback
from typing import Any

#: All that the scripts beside this one import and use but ckpttool, our fixtures, and DeepSpeed, which changes torch.
COMMON = (
    "torch", "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp", "torch.distributed.tensor.parallel",
    "torch.distributed.device_mesh", "torch._dynamo", "torch._inductor.compile_fx", "safetensors.torch", "transformers.models.llama.modeling_llama",
    "transformers.models.mixtral.modeling_mixtral", "transformers.models.auto.modeling_auto",
)  # fmt: skip


def rank(launch: dict[str, Any]) -> None:
    """Be the rank that a launch describes, as `python ARGUMENTS` would."""
    log = os.open(launch["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for there, here in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(there, here)
    os.environ.clear()
    os.environ.update(launch["environment"])
    os.chdir(launch["folder"])
    first, *rest = launch["arguments"]
    if first == "-m":
        sys.path[0] = launch["folder"]
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(first)
        sys.argv = [first, *rest]
        runpy.run_path(first, run_name="__main__")


def main() -> None:
    """Fork a rank for every line."""
    for name in COMMON:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # so that no collection of a rank touches the pages that it shares
    if len(os.listdir("/proc/self/task")) > 1:
        sys.exit("something that was imported has started a thread, and a fork takes only one along")
    for line in sys.stdin:
        child = os.fork()
        if not child:
            status = 1
            try:
                rank(json.loads(line))
                status = 0
            except SystemExit as e:
                status = e.code if isinstance(e.code, int) else int(e.code is not None)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
