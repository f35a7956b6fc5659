"""torchtune's epoch_{n}/ and step_{n}/ with the recipe's state next to them, as one checkpoint.

    epoch_0/model-0000k-of-0000n.safetensors, .bin   the weights: under the names of the Hub, or torchtune's own
    epoch_0/adapter_model.safetensors, .pt           the adapter of a LoRA recipe, with adapter_config.json (PEFT)
    recipe_state/recipe_state.pt                     {"optimizer", "epochs_run", "total_epochs", "seed", ...}
    epoch_0/recipe_state.pt                          the same, where it is saved with each epoch, and what is written

The optimizer has torchtune's names of parameters (layers.0.attn.q_proj.weight). Where the weights have those too, it is
the optimizer of the state; where they have the names of the Hub, whose rows of q and k are also in another order, it is
data under `extra.recipe_state.optimizer`. Recipes write weights with the adapter merged into them, and the adapter
besides, which is under `extra.adapter`. With save_adapter_weights_only the adapter is all there is, and it is the
model.

Of all epochs there is one recipe_state.pt, and the last epoch of a run that has ended writes none. So `epochs_run`
tells which epoch it belongs to: epoch_{n} has run n + 1.

Sources: torchtune/training/checkpointing/{_checkpointer,_checkpoint_client,_utils}.py and recipes/ of 0.6.1; the
directories of the corpus, which its checkpointer wrote.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ckpttool import layouts
from ckpttool.errors import CkpttoolError
from ckpttool.formats import torch_zip
from ckpttool.program import Advice, ForTrainer, Half, Program, StateFile
from ckpttool.storage.overlay import find_parent_folder
from ckpttool.storage.source import Source
from ckpttool.storage.sources import open_source

from .dialect import DATA, FOREIGN, Dialect, DirectoryPart

__all__ = ["TORCHTUNE"]

_FOLDER = re.compile(r"(epoch|step)_(\d{1,9})")
_WEIGHTS = re.compile(r"model-\d{5}-of-\d{5}\.(safetensors|bin|pt)|hf_model_\d{4}_\d+\.pt|meta_model_\d+\.pt")
_INSIDE, _BESIDE = "recipe_state.pt", "recipe_state/recipe_state.pt"


def _detect(source: Source) -> tuple[bool, str]:
    """Return whether a folder is named epoch_<n> or step_<n> (or holds recipe_state.pt), and has weights and the
    recipe's state; and the reason as text."""
    _, name = find_parent_folder(source)
    names = source.list()
    if _FOLDER.fullmatch(name) is None and _INSIDE not in names:
        return False, "not named epoch_<n> or step_<n>"
    if not any(_WEIGHTS.fullmatch(n) or n.startswith("adapter_model.") or n == "model.safetensors" for n in names):
        return False, "no model-0000k-of-0000n.* and no adapter_model.*"
    if _INSIDE in names:
        return True, f"has {_INSIDE}"
    return (True, f"has ../{_BESIDE}") if _list_siblings(source) else (False, f"no ../{_BESIDE}")


def _list_siblings(source: Source) -> Sequence[str]:
    """Return the name of the file with the recipe's state, relative to the folder above; empty if there is none, or if
    the folder itself holds it."""
    parent, _ = find_parent_folder(source)
    if not parent or source.exists(_INSIDE):
        return ()
    try:
        with open_source(parent) as above:
            return (_BESIDE,) if above.exists(_BESIDE) else ()
    except (CkpttoolError, OSError):  # a folder that cannot be listed
        return ()


def _list_weight_parts(names: Sequence[str]) -> list[DirectoryPart]:
    """List the parts that hold weights. `names` are the names in the directory."""
    found = [n for n in names if _WEIGHTS.fullmatch(n)]
    if "model.safetensors.index.json" in names or "model.safetensors" in names:
        return [DirectoryPart("", "hf", "model")]
    return [DirectoryPart(n, "hf" if n.endswith(".safetensors") else "full", "model") for n in found]


def _list_parts(source: Source) -> list[DirectoryPart]:
    """List the parts: weights, adapter, and the recipe's state if it belongs to this epoch."""
    names = source.list()
    out = _list_weight_parts(names)
    adapter = next(
        (n for n in ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt") if n in names), None
    )
    if adapter is not None and out:
        out.append(DirectoryPart(adapter, "hf" if adapter.endswith(".safetensors") else "full", "extra", ("adapter",)))
        if "adapter_config.json" in names:
            out.append(DirectoryPart("adapter_config.json", DATA, "extra", ("adapter_config",)))
    elif adapter is not None:
        out.append(DirectoryPart(adapter, "hf" if adapter.endswith(".safetensors") else "full", "model"))
    recipe, other = _find_recipe_state(source)
    if recipe is not None and not other:
        out.append(DirectoryPart(recipe, FOREIGN, "optim"))
    return out


def _note_recipe_of_other_epoch(source: Source) -> list[str]:
    """Return one note if the recipe's state is that of another epoch or step, or cannot be read; otherwise an empty
    list."""
    recipe, other = _find_recipe_state(source)
    return [f"{recipe} {other}: it was not read, and this state has no optimizer"] if other else []


def _find_recipe_state(source: Source) -> tuple[str | None, str]:
    """Find the recipe's state, and whether it belongs to this epoch or step.

    Returns:
        (name of the file, why it belongs to another epoch or step); the name is None if there is no file, and the
            reason is "" if the state belongs to this one.
    """
    if source.exists(_INSIDE):
        return _INSIDE, ""
    if not source.sibling_names:
        return None, ""
    file = f"../{_BESIDE}"
    parent, name = find_parent_folder(source)
    m = _FOLDER.fullmatch(name)
    assert m is not None
    kind, number = m[1], int(m[2])
    with open_source(parent) as above:
        numbers = _collect_folder_numbers(above.list(), kind)
    last = number >= max(numbers)
    try:
        tree: object = torch_zip.read(source.reader_of(file), 0, source.size(file), f"{source.root}/{file}")
    except CkpttoolError:  # read as a part it says what is wrong with it
        return file, "" if last else "cannot be read, and belongs to a later epoch"
    said = tree if isinstance(tree, dict) else {}
    run = said.get("epochs_run" if kind == "epoch" else "steps_run")
    if type(run) is not int:
        return file, "" if last else f"is that of {kind}_{max(numbers)}"
    mine = number + (kind == "epoch")
    if run == mine:
        return file, ""
    if run == number and number - 1 not in numbers and not (number and number + 1 == said.get("total_epochs")):
        return file, ""  # a script that counts from 0
    return file, f"is that of {kind}_{run - (kind == 'epoch')}"


def _collect_folder_numbers(names: Iterable[str], kind: str) -> set[int]:
    """Return the numbers of the folders of epochs, or of steps, among some names; `kind` is "epoch" or "step"."""
    return {int(m[2]) for n in names if (m := _FOLDER.fullmatch(n)) and m[1] == kind}


def _is_last_folder(above: str, names: Sequence[str], name: str) -> bool:
    """Return whether `name` is the folder of the last epoch or step among `names`; the recipe's state belongs to the
    last one. `above` is not used."""
    m = _FOLDER.fullmatch(name)
    return m is not None and int(m[2]) == max(_collect_folder_numbers(names, m[1]))


def _describe_next_step(advice: Advice) -> str:
    """Return advice: whether a recipe resumes or starts with a new optimizer, and the command that converts the weights
    to hf."""
    model = advice.convert("--to hf")
    if not any(_INSIDE in n for n in advice.ckpt.files):
        return f"torchtune starts with a new optimizer from these weights; for transformers: {model}"
    return f"resumes in torchtune with should_load_recipe_state=True; for transformers: {model}"


_RECIPE = StateFile(r"recipe_state\.pt|recipe_state/", "optimizer and training progress", "optim")
#: Its rows in the tables of the documents (docs/_hooks.py).
_ROWS = {
    "readme-trainers": (
        (
            "[torchtune](docs/how-to/trainers/torchtune.md) (**torchtune**)",
            "`epoch_N` with `recipe_state`, LoRA",
            "as data",
            "none saved",
            "none saved",
            "yes",
        ),
    ),
    "layouts": (
        (
            "**torchtune**",
            "`epoch_N` or `step_N` with `../recipe_state/recipe_state.pt`, LoRA recipes too",
            "`epoch_N` with `recipe_state.pt` in it, of a model with torchtune's names (`--map torchtune-llama3`)",
        ),
    ),
    "for": (
        (
            "`model-00001-of-00001.bin` and `recipe_state.pt`, with `--map torchtune-llama3`",
            "a distributed recipe, `FullModelTorchTuneCheckpointer` with `should_load_recipe_state: True`",
        ),
    ),
    "directories": (
        (
            "torchtune's `epoch_N` or `step_N`",
            "`torchtune`",
            (
                "weights, the adapter of a LoRA recipe, and `../recipe_state/recipe_state.pt` if its `epochs_run` "
                "belongs to this epoch: optimizer, counters, seed"
            ),
        ),
    ),
    "resumed": (
        (
            "torchtune",
            "yes",
            "yes, any world size; weights with torchtune's names",
            "as data, where the weights have names of the Hub",
            "recipes save none",
            "recipes save none",
            "read, where the recipe saves it",
        ),
    ),
}
TORCHTUNE = Dialect(
    name="torchtune",
    title="torchtune",
    detect=_detect,
    siblings=_list_siblings,
    write=layouts.late("ckpttool.converters.trainers.write_directories:write_torchtune"),
    parts=_list_parts,
    notes=_note_recipe_of_other_epoch,
    program=Program(
        rows=_ROWS,
        next_step=_describe_next_step,
        state_files=(_RECIPE,),
        halves=(Half(_FOLDER.pattern, _RECIPE, _is_last_folder),),
        is_part=lambda name, beside: name == "recipe_state",
        resumed_by=(ForTrainer("torchtune"),),
    ),
)
