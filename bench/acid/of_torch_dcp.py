"""torch.distributed.checkpoint: dcp.load without a process group, dcp.save, and torch.load, each with its defaults."""

import builtins

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

NAME = "torch DCP"
VERSIONS = {"torch": torch.__version__}
CLAIMS = {"dcp": ("weights", "optimizer", "values"), "full": ("weights", "optimizer", "values")}
SAVES = ("dcp",)


def flat(tree, above=""):
    """{path with dots: leaf} of dicts and lists."""
    out = {}
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in items:
        name = f"{above}{key}"
        out |= flat(value, name + ".") if isinstance(value, dict | builtins.list | tuple) and value else {name: value}
    return out


def named(found):
    """The same under the names of the kit: weights that were saved alone, without a key above them, are those of the model."""
    bare = not any(k.startswith("optim.") for k in found) and not all(k.startswith("model.") for k in found)
    return {f"model.{k}": t for k, t in found.items()} if bare else found


def load(path, about):
    if about["layout"] == "full":
        return of_full(torch.load(path, map_location="cpu"))
    tree = {}  # what dcp_to_torch_save does, without writing a file
    _load_state_dict(tree, storage_reader=FileSystemReader(path), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return named(flat(tree))


def of_full(tree):
    """The names of the kit for a file of torch.save; where the optimizer counts parameters, the model's order names them."""
    model = next((tree[k] for k in ("model", "model_state_dict", "state_dict") if k in tree), tree)
    optim = next((tree[k] for k in ("optim", "optimizer", "optimizer_state_dict") if k in tree), {})
    out = {f"model.{k}": t for k, t in model.items() if isinstance(t, torch.Tensor)}
    seen, names = set(), []
    for name, tensor in model.items():  # parameters, each once
        if isinstance(tensor, torch.Tensor) and tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            names.append(name)
    for key, slots in optim.get("state", {}).items():
        fqn = names[key] if isinstance(key, int) else key
        out |= {f"optim.state.{fqn}.{slot}": t for slot, t in slots.items()}
    for i, group in enumerate(optim.get("param_groups", ())):
        out[f"optim.param_groups.{i}.lr"] = group["lr"]
    return out


def save(state, path, layout):
    dcp_save(state, storage_writer=FileSystemWriter(path), no_dist=True)


def list(path, about):
    if about["layout"] == "full":
        return [*of_full(torch.load(path, map_location="cpu"))]
    found = FileSystemReader(path).read_metadata().state_dict_metadata
    names = [k for k, m in found.items() if isinstance(m, TensorStorageMetadata)]
    return [*named(dict.fromkeys(names))]
