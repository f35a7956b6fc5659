"""Lightning's consolidate_checkpoint, run as its documentation does with python -m, and torch.load of what it wrote.

It is Fabric's: that of lightning.pytorch stops at a checkpoint of ModelParallelStrategy, such as the kit's, with KeyError: 'model'.
"""

import os
import runpy
import sys

import lightning
import lightning.fabric.utilities
import torch

NAME = "Lightning consolidate_checkpoint"
VERSIONS = {"lightning": lightning.__version__, "torch": torch.__version__}
CLAIMS = {"lightning": ("weights", "optimizer")}


def load(path, about):
    out = os.path.join(os.getcwd(), "out.ckpt")
    sys.argv = ["consolidate_checkpoint", path, "--output_file", out]
    runpy.run_module("lightning.fabric.utilities.consolidate_checkpoint", run_name="__main__")
    tree = torch.load(out, map_location="cpu", weights_only=False)
    found = {f"model.{name}": t for name, t in tree["state_dict"].items()}
    for name, slots in tree["optimizer_0"]["state"].items():
        found |= {f"optim.state.{name}.{slot}": t for slot, t in slots.items()}
    return found
