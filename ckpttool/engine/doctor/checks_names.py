"""Checks of files that ranks have left out, and of the names and shapes of weights: prefixes of wrappers, weights
without elements, tied weights, rows of the vocabulary, codes and their scales."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Iterator, Mapping

from ... import layouts
from ...errors import CkpttoolError, argument
from ...formats import safetensors_header
from ...huggingface import encodings, model_names
from ...index.checkpoint import find_ranks_without_rng_state
from ...index.fqns import WRAPPERS
from ...index.vocabulary import find_embedding_and_head, find_vocabulary_weights
from ...options import HUB_LAYOUT
from ...storage.source import Source
from ..discover import detection
from .checks import Examined, check
from .findings import DAMAGE, NOTE, Finding, define_kind

WRAPPER_PREFIX = define_kind(
    "wrapper-prefix", 110, "names have a prefix of a wrapper module", "what-is-whole-and-yet-does-not-load"
)
EMPTY_WEIGHTS = define_kind(
    "empty-weights", 120, "weights have shape [0], since an engine had sharded them", "what-is-recognised"
)
VOCABULARY = define_kind(
    "vocabulary", 130, "the embedding has other rows than config.json has tokens", "rows-of-the-vocabulary"
)
RANDOM_STATES = define_kind(
    "random-states", 140, "some ranks have no random states of their own", "what-is-whole-and-yet-does-not-load"
)
ENCODING = define_kind(
    "encoding", 150, "weights are quantised: how, and what does not fit", "what-is-whole-and-yet-does-not-load"
)
TIED_WEIGHTS = define_kind(
    "tied-weights",
    250,
    "config.json ties weights that differ, or does not tie and one is missing",
    "what-is-recognised",
)

#: Which wrapper has put a prefix there.
_WRAPPER = {
    "_orig_mod": "torch.compile",
    "module": "DistributedDataParallel",
    "_fsdp_wrapped_module": "FSDP",
    "_checkpoint_wrapped_module": "activation checkpointing",
    "_forward_module": "Lightning",
}


@check(WRAPPER_PREFIX)
def find_wrapper_prefixes(at: Examined) -> list[Finding]:
    """Find weights whose names contain the prefix of a wrapper module, "_orig_mod." or "module."; the plain model
    refuses such names."""
    names_by_prefix: dict[str, list[str]] = {}
    for raw, clean in _find_renamed_weights(at).items():
        for prefix in dict.fromkeys(_list_wrapper_parts(raw, clean)):
            names_by_prefix.setdefault(prefix, []).append(raw)
    return [
        Finding(
            WRAPPER_PREFIX,
            NOTE,
            None,
            tuple(names),
            f'{len(names):,} weights have "{prefix}." of {_WRAPPER[prefix]} in their names, first "{names[0]}": a '
            "model without that wrapper finds missing and unexpected keys",
            at.copy_with("plain", *(["--strip-wrappers"] if at.opened.layout.own_keys else [])),
        )
        for prefix, names in names_by_prefix.items()
    ]


def _find_renamed_weights(at: Examined) -> Mapping[str, str]:
    """Return {name in the file: canonical name} of the weights whose two names differ; "" as the canonical name means
    that it is unknown."""
    ckpt = at.ckpt
    out = {str(p[-1]): str(q[1]) for q, p in ckpt.origin.items() if q[0] == "model" and len(q) == 2}
    if ckpt.layout == HUB_LAYOUT:
        clean = {t.parameter for t in ckpt.tensors.values() if t.component == "model"}
        for file in ckpt.files:
            if file.endswith(".safetensors"):
                try:
                    out |= {n: "" for n in safetensors_header.read_slots(at.source, file) if n not in clean}
                except CkpttoolError:
                    continue
    return out


def _list_wrapper_parts(raw: str, clean: str) -> list[str]:
    """List the parts of a weight's name that come from wrapper modules, such as "_orig_mod".

    Args:
        raw: the name in the file.
        clean: the canonical name; "" if it is not known.
    """
    parts = raw.split(".")[:-1]
    rest = [p for p in parts if p not in WRAPPERS]
    of_ddp = rest[:1] == ["module"] and not clean.startswith("module.")
    return [p for p in parts if p in WRAPPERS] + ["module"] * of_ddp


@check(RANDOM_STATES)
def find_lost_random_states(at: Examined) -> list[Finding]:
    """Find ranks without random states, where others have some."""
    if not (ranks := find_ranks_without_rng_state(at.ckpt)):
        return []
    text = (
        f"{len(ranks):,} rank{'s have' if len(ranks) > 1 else ' has'} no random states that can be read, first rank "
        f"{ranks[0]}: the trainer stops there, or goes on with other random numbers"
    )
    return [Finding(RANDOM_STATES, NOTE, None, (), text)]


@check(ENCODING)
def find_quantised_weights(at: Examined) -> list[Finding]:
    """Find quantised weights (codes with scales), quantised weights that are incomplete, and a config.json that says
    that weights are quantised when none is."""
    found = encodings.find_codes(at.ckpt, at.source if at.opened.folder else None)
    out = [
        Finding(
            ENCODING,
            DAMAGE if fault.sure else NOTE,
            None,
            fault.tensors,
            f"{fault.text}: the weights cannot be computed from that",
        )
        for fault in found.faults
    ]
    if found.weights:
        out.append(Finding(ENCODING, NOTE, None, (), found.summary()))
    if found.contradicted:
        text = (
            f"config.json says that the weights are quantised ({found.method}), and none is: loaders take them for "
            "codes. Remove its quantization_config"
        )
        out.append(Finding(ENCODING, NOTE, None, (), text))
    return out


# ------------------------------------------------------------------------------------------------------ empty weights


@check(EMPTY_WEIGHTS)
def find_empty_weights(at: Examined) -> list[Finding]:
    """Find weights of shape [0], as `save_pretrained` writes them when an engine shards the model: the file lacks their
    values.

    A model may have weights without elements. So they are reported only if the model of config.json gives them
    elements, or if most matrices in the file are empty.
    """
    out: list[Finding] = []
    for file, shapes in _list_weight_files(at):
        empty = [n for n, shape in shapes.items() if shape == (0,)]
        if not empty or not _should_have_elements(at, empty, shapes):
            continue
        text = (
            f"{len(empty):,} of {len(shapes):,} weights in {file or at.request.path} have shape [0], first {empty[0]}: "
            "save_pretrained was called where every rank has a part only (DeepSpeed ZeRO-3, FSDP), so their values are "
            "not in it"
        )
        repair = None
        if (engine_folder := next(_find_engine_checkpoints(at), None)) is not None:
            folder = at.source.root
            config = ["--config", folder] if at.source.exists("config.json") else []
            target = f"{folder.rstrip('/')}-hf"
            repair = shlex.join(["ckpttool", "convert", engine_folder, target, "--to", HUB_LAYOUT, *config])
            text += f"; {engine_folder} has them"
        else:
            text += (
                ". Look for the folder of the engine (global_step*/, pytorch_model_fsdp_0/, *.distcp) of the same "
                "step, and convert that. Without one they are lost; the next time, save with "
                "accelerator.get_state_dict(model)"
            )
        out.append(Finding(EMPTY_WEIGHTS, DAMAGE, file, tuple(empty), text, repair))
    return out


def _list_weight_files(at: Examined) -> Iterator[tuple[str | None, dict[str, tuple[int, ...]]]]:
    """Yield (file name, {weight: shape}) of the model: first (None, ...) for the weights that were read, then each
    safetensors file of the model in the folder that was not read."""
    yield None, {n: t.shape for n, t in at.weights.items()}
    if not at.opened.folder or at.source.is_remote:
        return
    for name in at.source.list():
        if name.startswith("model") and name.endswith(".safetensors") and name not in at.ckpt.files:
            try:
                yield name, {n: slot.shape for n, slot in safetensors_header.read_slots(at.source, name).items()}
            except CkpttoolError:
                continue


def _should_have_elements(at: Examined, empty: list[str], names: Collection[str]) -> bool:
    """Tell whether empty weights should have elements: by the shapes of the model of config.json, or because most
    matrices in the file are empty.

    Args:
        empty: the names of the weights without elements.
        names: the names of all weights in the file.
    """
    matrices = [n for n in names if n.endswith(".weight")]
    most = 2 * len([n for n in empty if n.endswith(".weight")]) > len(matrices) > 1
    config = at.model_config
    if most or config is None or "model_type" not in config:
        return most
    try:
        known = model_names.read_model_names(config).shapes
    except CkpttoolError:
        return False
    return any(0 not in known[n] for n in empty if n in known)


def _find_engine_checkpoints(at: Examined) -> Iterator[str]:
    """Yield the paths of complete checkpoints of an engine (DeepSpeed, FSDP) in this folder, then of those in its
    parent folder; the newest first in each."""
    root = at.source.root
    if at.source.is_remote:
        return
    for folder in (root, os.path.dirname(os.path.abspath(root))):
        with Source(folder) as there:
            rows = detection.find_checkpoints(there).checkpoints
        for c in reversed(rows):
            path = os.path.join(folder, c.name)
            of_engine = c.complete and not ((layout := layouts.find(c.layout)).is_file or layout.of_weights)
            if of_engine and os.path.abspath(path) != os.path.abspath(root):
                yield path


# -------------------------------------------------------------------------------------------- tied weights, vocabulary


@check(TIED_WEIGHTS)
def find_broken_ties(at: Examined) -> list[Finding]:
    """Find an embedding and an output layer that contradict tie_word_embeddings in config.json: tied but not equal, or
    not tied and the output layer is missing. Their bytes are compared only if the data is read."""
    config = at.model_config
    tie = None if config is None else config.get("tie_word_embeddings")
    embedding, head = find_embedding_and_head(at.weights)
    if config is None or tie is None or embedding is None:
        return []
    if head is None:
        # no output layer: right for a model without one, and for one with LoRA layers, whose names differ
        architectures = config.get("architectures")
        causal = isinstance(architectures, list) and any("CausalLM" in str(a) for a in architectures)
        if tie or not causal or any("lora_" in n or ".base_layer." in n for n in at.weights):
            return []
        text = (
            f'config.json does not tie the output layer to "{embedding}", and there is no lm_head.weight: '
            "from_pretrained would fill it with random numbers. If the model was trained with tied weights, set "
            '"tie_word_embeddings": true in config.json'
        )
        return [Finding(TIED_WEIGHTS, DAMAGE, None, (), text)]
    if not tie:
        return []
    a, b = at.weights[embedding], at.weights[head]
    names = f"model.{embedding}", f"model.{head}"
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        odd = f"{a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}"
    elif at.digests is not None and at.digests[names[0]] != at.digests[names[1]]:
        odd = "their bytes differ"
    else:
        return []
    text = (
        f'config.json ties "{embedding}" and "{head}", but they are not equal ({odd}): from_pretrained keeps the first '
        f"and drops the second. Which of them is right cannot be known from the files; {argument('untie', True)} "
        "writes both"
    )
    command = [
        "ckpttool",
        "convert",
        at.request.path,
        f"{at.request.path.rstrip('/')}-untied",
        "--to",
        HUB_LAYOUT,
        "--untie",
    ]
    repair = shlex.join([*command, *(["--config", at.request.config] if at.request.config else [])])
    return [Finding(TIED_WEIGHTS, DAMAGE, None, names, text, repair)]


@check(VOCABULARY)
def find_vocabulary_mismatch(at: Examined) -> list[Finding]:
    """Find embeddings whose number of rows is not the vocab_size of config.json: padded, or resized without changing
    config.json."""
    config = at.model_config
    size = None if config is None else config.get("vocab_size")
    if type(size) is not int or size < 1:
        return []
    odd = {n: t.shape[0] for n, t in find_vocabulary_weights(at.ckpt).items() if t.shape[0] != size and t.shape != (0,)}
    if not odd:
        return []
    rows = ", ".join(f"{n} has {k:,} rows" for n, k in odd.items())
    text = f"{rows}, config.json says vocab_size {size:,}: padded or resized, and from_pretrained refuses it"
    names = tuple(f"model.{n}" for n in odd)
    return [Finding(VOCABULARY, NOTE, None, names, text, at.copy_with("resized", "--vocab-size", str(size)))]
