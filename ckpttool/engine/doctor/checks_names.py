"""Checks of files that ranks have left out, and of the names and shapes of weights: prefixes of wrappers, weights
without elements, tied weights, rows of the vocabulary, codes and their scales."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from ...errors import CkpttoolError, argument
from ...formats import safetensors_header
from ...huggingface import encodings, model_names
from ...index.checkpoint import ranks_without_rng_state
from ...index.fqns import WRAPPERS
from ...index.vocabulary import embedding_and_head, vocabulary_of
from ...storage.source import Source
from ..discover import detection
from .findings import DAMAGE, NOTE, Examined, Finding

__all__ = [
    "empty_weights",
    "encoded_weights",
    "lost_random_states",
    "tied_weights",
    "vocabulary_rows",
    "wrapper_prefixes",
]

#: Which wrapper has put a prefix there.
_WRAPPER = {
    "_orig_mod": "torch.compile",
    "module": "DistributedDataParallel",
    "_fsdp_wrapped_module": "FSDP",
    "_checkpoint_wrapped_module": "activation checkpointing",
    "_forward_module": "Lightning",
}


def _raw_names(at: Examined) -> Mapping[str, str]:
    """{name in the file: canonical name} of weights that are not called the same."""
    ckpt = at.ckpt
    out = {str(p[-1]): str(q[1]) for q, p in ckpt.origin.items() if q[0] == "model" and len(q) == 2}
    if ckpt.layout == "hf":
        clean = {t.parameter for t in ckpt.tensors.values() if t.component == "model"}
        for file in ckpt.files:
            if file.endswith(".safetensors"):
                try:
                    out |= {n: "" for n in safetensors_header.slots(at.source, file) if n not in clean}
                except CkpttoolError:
                    continue
    return out


def _prefixes(raw: str, clean: str) -> list[str]:
    """The parts of a name that wrappers have put there."""
    parts = raw.split(".")[:-1]
    rest = [p for p in parts if p not in WRAPPERS]
    of_ddp = rest[:1] == ["module"] and not clean.startswith("module.")
    return [p for p in parts if p in WRAPPERS] + ["module"] * of_ddp


def wrapper_prefixes(at: Examined) -> list[Finding]:
    """Names that begin with what a wrapper module has put in front, "_orig_mod." or "module."; the plain model refuses
    them."""
    found: dict[str, list[str]] = {}
    for raw, clean in _raw_names(at).items():
        for part in dict.fromkeys(_prefixes(raw, clean)):
            found.setdefault(part, []).append(raw)
    return [
        Finding(
            "wrapper-prefix",
            NOTE,
            None,
            tuple(names),
            f'{len(names):,} weights have "{part}." of {_WRAPPER[part]} in their names, first "{names[0]}": a model '
            "without that wrapper finds missing and unexpected keys",
            at.copy("plain", *(["--strip-wrappers"] if at.opened.layout.own_keys else [])),
        )
        for part, names in found.items()
    ]


def lost_random_states(at: Examined) -> list[Finding]:
    """Ranks without random states, where others have some."""
    if not (ranks := ranks_without_rng_state(at.ckpt)):
        return []
    text = (
        f"{len(ranks):,} rank{'s have' if len(ranks) > 1 else ' has'} no random states that can be read, first rank "
        f"{ranks[0]}: the trainer stops there, or goes on with other random numbers"
    )
    return [Finding("random-states", NOTE, None, (), text)]


def encoded_weights(at: Examined) -> list[Finding]:
    """Weights that are codes with scales, those of which a part is not there, and a config that says what the weights
    are not."""
    config = encodings.stated(at.ckpt, at.source if at.opened.folder else None)
    found = encodings.of_checkpoint(at.ckpt, config)
    out = [
        Finding(
            "encoding",
            DAMAGE if fault.sure else NOTE,
            None,
            fault.tensors,
            f"{fault.text}: the weights cannot be computed from that",
        )
        for fault in found.faults
    ]
    if found.weights:
        out.append(Finding("encoding", NOTE, None, (), found.described()))
    if found.contradicted:
        text = (
            f"config.json says that the weights are quantised ({found.method}), and none is: loaders take them for "
            "codes. Remove its quantization_config"
        )
        out.append(Finding("encoding", NOTE, None, (), text))
    return out


# ---------------------------------------------------------------------------------------------------------- empty
# weights


def empty_weights(at: Examined) -> list[Finding]:
    """Weights of shape [0], which `save_pretrained` writes of an engine that shards them: the values are not in this
    file.

    A weight may have no elements in a model, so the model of config.json must have some, or nothing but such weights
    would be left.
    """
    out: list[Finding] = []
    for file, shapes in _weight_files(at):
        empty = [n for n, shape in shapes.items() if shape == (0,)]
        if not empty or not _should_have_elements(at, empty, shapes):
            continue
        where = next(_engine_folders(at), None)
        text = (
            f"{len(empty):,} of {len(shapes):,} weights in {file or at.path} have shape [0], first {empty[0]}: "
            "save_pretrained was called where every rank has a part only (DeepSpeed ZeRO-3, FSDP), so their values are "
            "not in it"
        )
        repair = None
        if where is not None:
            folder = at.source.root
            config = ["--config", folder] if at.source.exists("config.json") else []
            repair = shlex.join(["ckpttool", "convert", where, f"{folder.rstrip('/')}-hf", "--to", "hf", *config])
            text += f"; {where} has them"
        else:
            text += (
                ". Look for the folder of the engine (global_step*/, pytorch_model_fsdp_0/, *.distcp) of the same "
                "step, and convert that. Without one they are lost; the next time, save with "
                "accelerator.get_state_dict(model)"
            )
        out.append(Finding("empty-weights", DAMAGE, file, tuple(empty), text, repair))
    return out


def _weight_files(at: Examined) -> Iterator[tuple[str | None, dict[str, tuple[int, ...]]]]:
    """(file, {name of a weight: shape}): what was read as the model, and safetensors files of the model beside it."""
    model = {t.parameter: t.shape for t in at.ckpt.tensors.values() if t.component == "model" and len(t.path) == 2}
    yield None, model
    if not at.opened.folder or at.source.is_remote:
        return
    for name in at.source.list():
        if name.startswith("model") and name.endswith(".safetensors") and name not in at.ckpt.files:
            try:
                yield name, {n: slot.shape for n, slot in safetensors_header.slots(at.source, name).items()}
            except CkpttoolError:
                continue


def _should_have_elements(at: Examined, empty: list[str], shapes: Mapping[str, Any]) -> bool:
    matrices = [n for n in shapes if n.endswith(".weight")]
    most = 2 * len([n for n in empty if n.endswith(".weight")]) > len(matrices) > 1
    config = at.model_config
    if most or config is None or "model_type" not in config:
        return most
    try:
        known = model_names.names_of(config).shapes
    except CkpttoolError:
        return False
    return any(0 not in known[n] for n in empty if n in known)


def _engine_folders(at: Examined) -> Iterator[str]:
    """Checkpoints of an engine in the folder or beside it, the newest first."""
    root = at.source.root
    if at.source.is_remote:
        return
    for folder in (root, os.path.dirname(os.path.abspath(root))):
        with Source(folder) as there:
            rows = detection.below(there).checkpoints
        for c in reversed(rows):
            path = os.path.join(folder, c.name)
            if (
                c.complete
                and c.layout not in ("hf", "full", "audit")
                and os.path.abspath(path) != os.path.abspath(root)
            ):
                yield path


# ------------------------------------------------------------------------------------------------------ tied weights,
# rows


def tied_weights(at: Examined, digests: Mapping[str, str] | None = None) -> list[Finding]:
    """An embedding and an output layer that config.json ties and that are not equal, or that it does not tie and of
    which one is missing. `digests` {tensor: digest}, where the data was read."""
    config = at.model_config
    tie = None if config is None else config.get("tie_word_embeddings")
    model = {t.parameter: t for t in at.ckpt.tensors.values() if t.component == "model" and len(t.path) == 2}
    embedding, head = embedding_and_head(model)
    if config is None or tie is None or embedding is None:
        return []
    if head is None:
        architectures = config.get("architectures")
        causal = isinstance(architectures, list) and any("CausalLM" in str(a) for a in architectures)
        if tie or not causal or any("lora_" in n or ".base_layer." in n for n in model):
            return []
        text = (
            f'config.json does not tie the output layer to "{embedding}", and there is no lm_head.weight: '
            "from_pretrained would fill it with random numbers. If the model was trained with tied weights, set "
            '"tie_word_embeddings": true in config.json'
        )
        return [Finding("tied-weights", DAMAGE, None, (), text)]
    if not tie:
        return []
    a, b = model[embedding], model[head]
    names = f"model.{embedding}", f"model.{head}"
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        odd = f"{a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}"
    elif digests is not None and digests[names[0]] != digests[names[1]]:
        odd = "their bytes differ"
    else:
        return []
    text = (
        f'config.json ties "{embedding}" and "{head}", but they are not equal ({odd}): from_pretrained keeps the first '
        f"and drops the second. Which of them is right cannot be known from the files; {argument('untie', True)} "
        "writes both"
    )
    command = ["ckpttool", "convert", at.path, f"{at.path.rstrip('/')}-untied", "--to", "hf", "--untie"]
    return [
        Finding(
            "tied-weights",
            DAMAGE,
            None,
            names,
            text,
            shlex.join([*command, *(["--config", at.config] if at.config else [])]),
        )
    ]


def vocabulary_rows(at: Examined) -> list[Finding]:
    """Embeddings with more or fewer rows than config.json has tokens: padded, or resized without the config."""
    config = at.model_config
    size = None if config is None else config.get("vocab_size")
    if type(size) is not int or size < 1:
        return []
    odd = {n: t.shape[0] for n, t in vocabulary_of(at.ckpt).items() if t.shape[0] != size and t.shape != (0,)}
    if not odd:
        return []
    rows = ", ".join(f"{n} has {k:,} rows" for n, k in odd.items())
    text = f"{rows}, config.json says vocab_size {size:,}: padded or resized, and from_pretrained refuses it"
    return [
        Finding(
            "vocabulary",
            NOTE,
            None,
            tuple(f"model.{n}" for n in odd),
            text,
            at.copy("resized", "--vocab-size", str(size)),
        )
    ]
