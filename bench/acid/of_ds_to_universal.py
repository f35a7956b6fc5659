"""DeepSpeed's ds_to_universal, by its `main`, with the defaults of its command line. Of its output the tensors are read.

It makes a folder for each parameter. Frozen parameters and buffers stay in the model's file, as they were, and are read there.
"""

import os
from argparse import Namespace
from pathlib import Path

import deepspeed
import torch
from deepspeed.checkpoint.ds_to_universal import main

NAME = "DeepSpeed ds_to_universal"
VERSIONS = {"deepspeed": deepspeed.__version__}
CLAIMS = {"zero": ("weights", "optimizer")}


def load(path, about):
    tag = Path(path, "latest").read_text().strip()
    out = os.path.join(os.getcwd(), "universal")
    main(
        Namespace(
            input_folder=os.path.join(path, tag),
            output_folder=out,
            num_extract_workers=4,
            num_merge_workers=2,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=False,
        )
    )
    found = {}
    states = [torch.load(file, weights_only=False) for file in sorted(Path(out).glob("*model_states.pt"))]
    shapes = {name: shape for group in states[0]["param_shapes"] for name, shape in group.items()}
    for name in states[0]["buffer_names"]:
        found[f"model.{name}"] = states[0]["module"][name]
    for name, shape in (states[0].get("frozen_param_shapes") or {}).items():
        parts = [state["frozen_param_fragments"][name].flatten() for state in states]
        found[f"model.{name}"] = torch.cat(parts)[: shape.numel()].reshape(shape)
    for file in sorted(Path(out, "zero").glob("*/*.pt")):  # of stage 3 they are flat, and DeepSpeed reshapes them
        fqn, slot = file.parent.name, file.stem
        content = torch.load(file, weights_only=False)
        tensor = content["param"] if isinstance(content, dict) else content
        if isinstance(tensor, torch.Tensor):
            name = f"model.{fqn}" if slot == "fp32" else f"optim.state.{fqn}.{slot}"
            found[name] = tensor.reshape(shapes[fqn]) if slot != "step" else tensor
    common = torch.load(Path(out, "zero", "optimizer_state.pt"), weights_only=False)  # has the step of each group
    steps = [slots["step"] for slots in common["optimizer_state_dict"]["state"].values()]
    if all(step == steps[0] for step in steps):
        found |= {name.replace(".exp_avg_sq", ".step"): steps[0] for name in [*found] if name.endswith(".exp_avg_sq")}
    return found
