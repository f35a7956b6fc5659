"""ckpttool itself, held to the same rules: its public functions, as docs/reference/python.md has them."""

import importlib
import pkgutil
import tempfile
from pathlib import Path

import torch

import ckpttool

for package in ("ckpttool.converters", "ckpttool.engine", "ckpttool.formats"):  # once, and not again in each fork
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        importlib.import_module(module.name)

NAME = "ckpttool"
VERSIONS = {"ckpttool": ckpttool.__version__}
SAVES = ("dcp", "full", "hf", "zero", "universal", "fsdp1", "torch_checkpointing")


def _how(about):
    """What has to be said of flat parameters to read them."""
    return {"flat_layout": about["flat_layout"]} if "flat_layout" in about else {}


def load(path, about):
    with ckpttool.open(path, **_how(about)) as opened:
        found = {name: opened[name].numpy() for name in opened}
        return found | {name: value.data for name, value in opened.checkpoint.values.items()}


def save(state, path, layout):
    tree = {"model": {}, "optim": {"state": {}, "param_groups": [{"lr": 0.01, "params": []}]}}
    for name, tensor in state.items():
        if name.startswith("model."):
            tree["model"][name[6:]] = tensor
        else:
            fqn, _, slot = name.removeprefix("optim.state.").rpartition(".")
            tree["optim"]["state"].setdefault(fqn, {})[slot] = tensor
    tree["optim"]["param_groups"][0]["params"] = [n for n in tree["model"] if n in tree["optim"]["state"]]
    if not tree["optim"]["state"]:
        del tree["optim"]
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder, "state.pt")
        torch.save(tree, whole)
        to = {"zero": "zero3"}.get(layout, layout)
        ranks = {} if to in ("full", "hf", "universal") else {"world_size": 2}
        ckpttool.convert(whole, path, to=to, **ranks)


def list(path, about):
    with ckpttool.open(path, **_how(about)) as opened:
        return [*opened]


def verify(path, about):
    ckpttool.verify(path, read_data=True, **_how(about))
