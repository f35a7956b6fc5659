"""transformers: `AutoModelForCausalLM.from_pretrained`; what it reports as missing counts as named."""

import transformers
from transformers import AutoModelForCausalLM

NAME = "transformers"
VERSIONS = {"transformers": transformers.__version__}
CLAIMS = {"hf": ("weights",)}


def load(path, about):
    model, said = AutoModelForCausalLM.from_pretrained(path, dtype="auto", output_loading_info=True)
    state = {f"model.{name}": t for name, t in model.state_dict().items()}
    named = {f"model.{name}" for name in said["missing_keys"]}
    return {name: t for name, t in state.items() if name not in named}, named
