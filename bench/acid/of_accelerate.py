"""accelerate merge-weights: `merge_fsdp_weights` on the folder of the weights, as its documentation says."""

import os

import accelerate
import torch
from accelerate.utils import merge_fsdp_weights
from safetensors.torch import load_file

NAME = "accelerate merge-weights"
VERSIONS = {"accelerate": accelerate.__version__, "torch": torch.__version__}
CLAIMS = {"accelerate": ("weights",)}


def load(path, about):
    merge_fsdp_weights(os.path.join(path, "pytorch_model_fsdp_0"), os.path.join(os.getcwd(), "out"))
    return {f"model.{name}": t for name, t in load_file("out/model.safetensors").items()}
