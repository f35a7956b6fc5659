"""DeepSpeed's zero_to_fp32: `get_fp32_state_dict_from_zero_checkpoint`. It gives weights, as float32."""

import deepspeed
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

NAME = "DeepSpeed zero_to_fp32"
VERSIONS = {"deepspeed": deepspeed.__version__}
CLAIMS = {"zero": ("weights",)}
WIDENS = True


def load(path, about):
    return {f"model.{name}": t for name, t in get_fp32_state_dict_from_zero_checkpoint(path).items()}
