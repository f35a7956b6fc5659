"""Writes hf: weights as `save_pretrained` does, an adapter as PEFT does, or weights with the whole training state."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

from ckpttool import bounded_json
from ckpttool.engine.copy.tensor_digests import tensor_digests
from ckpttool.errors import MissingPackage, Unsupported, UsageError, argument
from ckpttool.huggingface import adapters, encodings, hub_names, lora, model_files
from ckpttool.huggingface.split_experts import split_experts
from ckpttool.index.checkpoint import Checkpoint, TensorEntry, Value, joined, tied_weights
from ckpttool.index.composites import MARK, Composite, class_label, find_composites
from ckpttool.index.draft import Draft, DraftFile, Dropped
from ckpttool.index.fqns import remove_prefix
from ckpttool.index.names import describe_weights_elsewhere
from ckpttool.layouts import WriteOptions
from ckpttool.storage.source import Source

from ..options import HfOptions
from . import training_state
from .memory_names import cut_into_hub_tensors, needs_transformers, ties
from .peft_folder import find_adapter_config, read_base_relation, refuse_adapter_alone, write_adapter
from .quantised_weights import metadata, name_inner_tensors
from .shards import INDEX, SALVAGE, WHOLE, draft_shard, refuse_unsupported_dtypes, split_shards

__all__ = ["prepare", "write", "write_file"]

#: Keys of config.json that say that weights are codes.
_QUANTIZATION = ("quantization_config", "quantization", "compression_config")
#: {quant_method: the list of its config with modules whose weights are no codes}.
_NOT_QUANTISED = {
    "compressed-tensors": "ignore",
    "fp8": "modules_to_not_convert",
    "mxfp4": "modules_to_not_convert",
    "awq": "modules_to_not_convert",
    "bitsandbytes": "llm_int8_skip_modules",
}


def prepare(ckpt: Checkpoint, source: Source, options: WriteOptions) -> Checkpoint:
    """Return the checkpoint with the weights named as they will be written.

    The prefix `strip_prefix` is removed from their names. If it was not given, a prefix of all weights that the model
    of the config does not have is removed. With `adapter`, only the adapter is kept, under PEFT's names.

    Raises:
        UsageError: no weight has the prefix. Unsupported: ckpttool finds no adapter.
    """
    own = options.of(HfOptions)
    if own.strip_prefix is not None:
        ckpt = remove_prefix(ckpt, own.strip_prefix)
    elif not own.adapter and (prefix := _find_common_prefix(ckpt, source, options)) is not None:
        ckpt = remove_prefix(ckpt, prefix)
        note = (
            f'"{prefix}" was left out of the names of all weights: without it they are those of the model of '
            "config.json"
        )
        ckpt.notes = [*ckpt.notes, note]
    if options.quantize is not None:
        return _with_hub_names(ckpt, source, options)
    if own.adapter:
        seen = lora.find_lora(ckpt)
        try:
            config = find_adapter_config(source, options, [], one_of_several=seen is not None and len(seen.names) > 1)
        except Unsupported:
            adapters.refuse_without_adapter(ckpt)  # which needs no config
            raise
        found = {"peft_type": "LORA"} if config is None else config[0]
        ckpt = adapters.keep_adapter_only(ckpt, found, own.adapter_name)
        if own.split_experts:
            ckpt = split_experts(ckpt, found, read_base_relation(source, options))
    return ckpt


def _with_hub_names(ckpt: Checkpoint, source: Source, options: WriteOptions) -> Checkpoint:
    """Return the checkpoint with the weights that the Hub has, which are quantised one by one: experts that are one
    parameter in memory are views of it.

    Raises:
        UsageError: an adapter or the optimizer is to be written, too.
        MissingPackage: transformers is needed for the names, and is not installed.
    """
    for name in ("adapter", "include_optimizer"):
        if getattr(options.of(HfOptions), name):
            raise UsageError(
                f"{argument('quantize', options.quantize)} writes a model for inference; leave "
                f"{argument(name, True, 'HfOptions')} out.",
                code="CKPT0204",
            )
    config = model_files.find_model_files(source, options.config, [])[0]
    model = {joined(t.path[1:]): t for t in ckpt.tensors.values() if t.path[0] == "model"}
    if config is None or encodings.find_in_tensors(model) or not needs_transformers(config, model):
        return ckpt
    relation = _ask_for_verdict(config, model, [], needed=True)
    if relation is None:
        return ckpt
    views = {k: replace(t, path=("model", k)) for k, t in cut_into_hub_tensors(model, relation).items()}
    tied = {k: model[k] for k in relation.tied if k in model and k not in views}
    rest = {n: t for n, t in ckpt.tensors.items() if t.path[0] != "model"}
    return replace(ckpt, tensors={"model." + k: t for k, t in (views | tied).items()} | rest)


def _find_common_prefix(ckpt: Checkpoint, source: Source, options: WriteOptions) -> str | None:
    """Return the prefix, such as "net.", that must be removed from all weights to get the names of the config's model.

    The result is None if the names are right as they are, if no such prefix exists, or if this cannot be told.
    """
    model = {joined(t.path[1:]): t for t in ckpt.tensors.values() if t.path[0] == "model"}
    if options.of(HfOptions).allow_name_mismatch or len({name.partition(".")[0] for name in model}) != 1:
        return None
    config = model_files.find_model_files(source, options.config, [])[0]
    relation = None if config is None else _ask_for_verdict(config, model, [])
    strip = relation.verdict.strip if relation and relation.verdict and not relation.verdict.good else None
    return strip if strip and all(name.startswith(strip) for name in model) else None


def _find_config_files(
    ckpt: Checkpoint, source: Source, options: WriteOptions, notes: list[str]
) -> tuple[dict[str, object] | None, dict[str, bytes]]:
    """Return (config.json or None, {name: bytes} of files to copy) of the model, adapted to what is written:
    dequantised or plain, quantised, of another vocabulary size, or untied.

    After a merge they are as PEFT leaves them: without adapter_config.json, at which from_pretrained would look for the
    adapter again.

    Raises:
        Unsupported: the weights are to be untied, and there is no config.json.
    """
    said: list[str] = []
    config, files, where = model_files.find_model_files(source, options.config, said)
    if where == ".." and config is not None and (why := _explain_mismatch(ckpt, config)) is not None:
        said = [
            f"config.json in '..' is of another model and was not taken: {why}; give {argument('config')} the config "
            "of this very model"
        ]
        config, files = None, {}
    notes += said
    if config is not None and (ckpt.dequantized or (ckpt.quantized is None and _is_declared_in_vain(ckpt, config))):
        config, files = _without_quantization(ckpt, config, files, notes)
    if options.vocab_size is not None and config is not None:
        config, files = _with_config_value(config, files, "vocab_size", options.vocab_size)
    if ckpt.quantized is not None and config is not None:
        config, files = _with_config_value(config, files, "quantization_config", ckpt.quantized["config"])
    if ckpt.merged is not None:
        files.pop(model_files.ADAPTER_CONFIG, None)
        if config is not None and ckpt.merged["untied"]:
            return _untie_config(config, files)
    return _untie_config(config, files) if options.of(HfOptions).untie else (config, files)


def _is_declared_in_vain(ckpt: Checkpoint, config: dict[str, Any]) -> bool:
    """Return whether a config declares a quantisation that no weight has.

    Such a config is that of the quantised model from which a job started; loaders would take the plain weights for
    packed codes.

    Args:
        ckpt: the checkpoint with the weights.
        config: the config to check.
    """
    stating = replace(ckpt, config=config)
    found = encodings.find_in_checkpoint(ckpt, encodings.read_quantization_config(stating, None))
    return found.contradicted and not find_composites(ckpt)


def _without_quantization(
    ckpt: Checkpoint, config: dict[str, Any], files: dict[str, bytes], notes: list[str]
) -> tuple[dict[str, object], dict[str, bytes]]:
    """Return (config, {name: bytes} of files to copy) in which no plain weight is declared quantised. `notes`
    gets what was removed or listed.

    Raises:
        Unsupported: some weights are still codes, and their config has no list of modules that are not.
    """
    stated = config.get("quantization_config")
    objects = [n for n, c in find_composites(ckpt).items() if c.path[0] == "model"]
    left = [*encodings.find_in_checkpoint(ckpt, stated).weights, *objects]
    if not left:
        gone = [n for n in sorted(encodings.OWN_CONFIGS) if files.pop(n, None) is not None]
        gone += [f"{key} of config.json" for key in _QUANTIZATION if key in config]
        if gone:
            more = " any more" if ckpt.dequantized else ""
            notes.append(f"left out, since no weight is codes{more}: {', '.join(gone)}")
        config = {k: v for k, v in config.items() if k not in _QUANTIZATION}
        text = config.get("text_config")
        if isinstance(text, dict) and not text.keys().isdisjoint(_QUANTIZATION):
            config["text_config"] = {k: v for k, v in text.items() if k not in _QUANTIZATION}
    else:
        method = stated.get("quant_method") if isinstance(stated, dict) else None
        key = _NOT_QUANTISED.get(str(method))
        if key is None or not isinstance(stated, dict):
            raise Unsupported(
                f'{len(left):,} weights are codes still, first "{left[0]}", and the quantization_config of '
                f"config.json ({method}) has no list for the {len(ckpt.dequantized):,} that are not. Dequantise all: "
                f"{argument('dequantize', ['*'])}.",
                code="CKPT0318",
            )
        modules = [n.removeprefix("model.").rpartition(".")[0] for n in ckpt.dequantized]
        config = {**config, "quantization_config": {**stated, key: [*(stated.get(key) or []), *modules]}}
        notes.append(f"quantization_config.{key} of config.json lists the {len(modules):,} dequantised weights, too")
    return config, {**files, "config.json": (json.dumps(config, indent=2) + "\n").encode()}


def _explain_mismatch(ckpt: Checkpoint, config: dict[str, object]) -> str | None:
    """Return, as text, how the weights differ from those of the model of a config.

    The result is None if they do not differ, or if this cannot be told.
    """
    objects = {joined(c.path[1:]): c for c in find_composites(ckpt).values() if c.path[0] == "model"}
    model = _as_dense_tensors(ckpt, objects)
    relation = _ask_for_verdict(config, model, [])
    if relation is not None and relation.verdict is not None:
        return None if relation.verdict.good else _describe_differences(model, relation.verdict)
    return hub_names.find_contradiction(config, {n: t.shape for n, t in model.items()})


def write(ckpt: Checkpoint, source: Source, options: WriteOptions) -> Draft:
    """Draft a folder that from_pretrained loads; with `adapter`, one that PEFT loads.

    Raises:
        Unsupported: there are no weights, config.json ties tensors whose bytes differ, or its model has other tensors.
        MissingPackage: transformers is needed for the names of this model on the Hub.
    """
    own = options.of(HfOptions)
    if own.adapter:
        return write_adapter(ckpt, source, options)
    notes: list[str] = []
    if not own.include_optimizer:
        refuse_adapter_alone(ckpt, notes)
    config, extra = _find_config_files(ckpt, source, options, notes)
    weights = _collect_weights(ckpt, source, options, config, notes)
    if config is not None and not own.allow_name_mismatch:
        _refuse_undeclared_codes(weights.shown, config, extra)
    model, rest, tied = weights.model, weights.rest, weights.tied
    groups = split_shards(model, own.max_shard_bytes, weights.together)
    n = len(groups)
    files = [WHOLE] if n == 1 else [f"model-{i + 1:05d}-of-{n:05d}.safetensors" for i in range(n)]
    tensors: dict[str, TensorEntry] = {}
    draft_files = [draft_shard(files[i], i, names, model, tensors, weights.metadata) for i, names in enumerate(groups)]
    sources = {"model." + k: weights.stored[k] for names in groups for k in names}
    dropped = weights.dropped
    records: list[DraftFile] = []
    if own.include_optimizer:
        fqns = {k.removeprefix("model."): v.removeprefix("model.") for k, v in tied.items()}
        held, shards, records = training_state.draft(ckpt, rest, split_shards(rest, own.max_shard_bytes, {}), n, fqns)
        tensors |= held
        sources |= {k: ckpt.tensors[k] for k in held}
        draft_files += shards
        dropped = []
    for name, data in extra.items():
        data = _with_config_dtype(name, data, weights.shown)
        draft_files.append(DraftFile(name, len(data), data))
    draft_files += records
    if n > 1:
        index = {
            "metadata": {
                "total_parameters": sum(t.numel for t in model.values()),
                "total_size": sum(t.nbytes for t in model.values()),
            },
            "weight_map": {k: files[i] for i, k in sorted((i, k) for i, names in enumerate(groups) for k in names)},
        }
        text = bounded_json.encode(index, indent=2, sort_keys=True) + b"\n"
        draft_files.append(DraftFile(INDEX, len(text), text))
    names_of_files = [f.name for f in draft_files]
    held_values = dict(ckpt.values) if own.include_optimizer else weights.marks
    out = Checkpoint("hf", options.target, None, names_of_files, [f.size for f in draft_files], tensors, held_values)
    return Draft(
        out,
        sources,
        draft_files,
        dropped=dropped,
        aliases=weights.aliases,
        notes=notes,
        synthesized_tensors=weights.added,
    )


def _untie_config(
    config: dict[str, object] | None, extra: dict[str, bytes]
) -> tuple[dict[str, object] | None, dict[str, bytes]]:
    """Return (config, {name: bytes} of files to copy) of a model without tied weights. `extra` are the files before the
    change.

    Raises:
        Unsupported: there is no config.json.
    """
    if config is None or "config.json" not in extra:
        raise Unsupported(
            f"{argument('untie', True, 'HfOptions')} changes config.json, and there is none beside the source. Give "
            f"{argument('config')}.",
            code="CKPT0312",
        )
    return _with_config_value(config, extra, "tie_word_embeddings", False)


def _with_config_value(
    config: dict[str, Any], extra: dict[str, bytes], key: str, value: object
) -> tuple[dict[str, object], dict[str, bytes]]:
    """Return (config, {name: bytes} of files to copy) with another value under `key`. If the config of the text model
    has the key, it is changed there. `extra` are the files before the change."""
    text = config.get("text_config")
    inside = isinstance(text, dict) and key in text
    if inside:
        config = {**config, "text_config": {**config["text_config"], key: value}}
    if not inside or key in config:
        config = {**config, key: value}
    return config, {**extra, "config.json": (json.dumps(config, indent=2) + "\n").encode()}


def write_file(ckpt: Checkpoint, source: Source, options: WriteOptions) -> Draft:
    """Draft one safetensors file with all weights, of any size. config.json decides the names, but is not written.

    Raises:
        UsageError: an option needs files besides the weights, or several files of weights.
        Unsupported: there are no weights, config.json ties tensors whose bytes differ, or its model has other tensors.
        MissingPackage: transformers is needed for the names of this model on the Hub.
    """
    own = options.of(HfOptions)
    asked_for = (("adapter", own.adapter), ("include_optimizer", own.include_optimizer), ("untie", own.untie))
    for name, asked in asked_for:
        if asked:
            raise UsageError(
                f"{argument(name, True)} writes several files, but the destination {options.target!r} is one. Give the "
                "name of a folder.",
                code="CKPT0211",
            )
    if own.max_shard_bytes != HfOptions.max_shard_bytes:
        raise UsageError(
            f"{argument('max_shard_bytes', own.max_shard_bytes)} splits weights into files, but the destination "
            f"{options.target!r} is one. Give the name of a folder.",
            code="CKPT0211",
        )
    notes: list[str] = []
    config, extra = _find_config_files(ckpt, source, options, [])
    if config is None:
        notes.append(
            "no config.json next to the source: names are written as they are in memory, and tied weights twice unless "
            f"they share bytes in the source; give {argument('config')} a folder or a model id"
        )
    else:
        notes.append(
            f"the file holds the weights alone, named as config.json says; from_pretrained loads a folder, with "
            f"{', '.join(list(extra)[:3])}{', ...' if len(extra) > 3 else ''} in it"
        )
    weights = _collect_weights(ckpt, source, options, config, notes)
    tensors: dict[str, TensorEntry] = {}
    kept = [n for n, t in ckpt.tensors.items() if t.path[0] == "model"]
    states = ckpt.salvage.states(kept) if ckpt.salvage is not None else {}
    metadata = weights.metadata | ({SALVAGE: json.dumps(states, separators=(",", ":"))} if states else {})
    file = draft_shard(options.target, 0, list(weights.model), weights.model, tensors, metadata)
    sources = {"model." + k: t for k, t in weights.stored.items()}
    out = Checkpoint("hf", options.target, None, [file.name], [file.size], tensors, weights.marks)
    out.config = config
    return Draft(
        out,
        sources,
        [file],
        dropped=weights.dropped,
        aliases=weights.aliases,
        notes=notes,
        synthesized_tensors=weights.added,
    )


class _Weights(NamedTuple):
    """What is written of a model, and what is not."""

    stored: dict[str, TensorEntry]  # as the source has it
    model: dict[str, TensorEntry]  # with the dtypes that it gets
    rest: dict[str, TensorEntry]  # that is not the model
    tied: dict[str, str]
    aliases: dict[str, str]  # the same, with the names that the kept ones have in the files
    together: dict[str, str]
    added: list[str]
    dropped: list[Dropped]
    shown: dict[str, TensorEntry]  # the model with quantised weights as the tensors that they show
    metadata: dict[str, str]  # of every file
    marks: dict[str, Value]  # what the quantised weights are: values that `metadata` holds


def _collect_weights(
    ckpt: Checkpoint, source: Source, options: WriteOptions, config: dict[str, object] | None, notes: list[str]
) -> _Weights:
    """Return the tensors that save_pretrained would write, and the list of what is dropped.

    Args:
        ckpt: what is written.
        source: where its bytes are.
        options: those of the conversion.
        config: config.json, or None.
        notes: gets notes for the user.

    Raises:
        Unsupported: there are no weights, config.json ties tensors whose bytes differ, or its model has other tensors;
            or quantised weights cannot be written with these options.
        MissingPackage: transformers is needed for the names of this model on the Hub.
    """
    objects = {joined(c.path[1:]): c for c in find_composites(ckpt).values() if c.path[0] == "model"}
    model = _as_dense_tensors(ckpt, objects)
    if not model:
        raise Unsupported(
            f"the checkpoint holds no model weights, and hf holds nothing else.{describe_weights_elsewhere(ckpt)}",
            code="CKPT0317",
        )
    if objects and options.of(HfOptions).include_optimizer:
        raise Unsupported(
            f'"{next(iter(objects))}" is a {class_label(next(iter(objects.values())).about)}: hf holds quantised '
            "weights "
            f"without the optimizer. Leave out {argument('include_optimizer', True, 'HfOptions')}, or choose dcp.",
            code="CKPT0319",
        )
    rest = {n: replace(t, dtype=options.cast(n, t.dtype)) for n, t in ckpt.tensors.items() if t.path[0] != "model"}
    dropped = [Dropped(n, t.nbytes, "hf holds weights only") for n, t in rest.items()]
    marks = {n: v for n, v in ckpt.values.items() if v.path[:1] + v.path[-1:] == ("model", MARK)}
    dropped += [Dropped(n, 0, "hf holds weights only") for n in ckpt.values if n not in marks]
    relation = None if config is None else _check_names(ckpt, config, model, options, notes)
    untie = options.of(HfOptions).untie
    stored, tied, together = _select_hub_tensors(ckpt, model, config, relation, source, notes, untie)
    hub = _map_to_hub_names(relation)
    aliases = {
        n: "model." + hub.get(kept.removeprefix("model."), kept.removeprefix("model.")) for n, kept in tied.items()
    }
    known = ties(config, model, relation).items()
    added = [f"model.{n}" for n, kept in known if n not in model and hub.get(kept, kept) in stored]
    shown = {k: t if k in objects else replace(t, dtype=options.cast("model." + k, t.dtype)) for k, t in stored.items()}
    stored, model = _split_quantised_weights(stored, shown, objects, relation, notes, config)
    refuse_unsupported_dtypes(model)
    listed = {n: c for n, c in objects.items() if n in shown}
    return _Weights(stored, model, rest, tied, aliases, together, added, dropped, shown, metadata(listed, shown), marks)


def _as_dense_tensors(ckpt: Checkpoint, objects: dict[str, Composite]) -> dict[str, TensorEntry]:
    """Return {name: weight} of the model, with one plain tensor for each quantised weight.

    Such a tensor has the dtype and shape that the quantised weight shows, and the place in files of its first inner
    tensor.

    Args:
        ckpt: the checkpoint.
        objects: {name: quantised weight}.
    """
    of = {joined(t.path): n for n, c in objects.items() for t in c.tensors.values()}
    out: dict[str, TensorEntry] = {}
    for full, t in ckpt.tensors.items():
        if t.path[0] != "model":
            continue
        name = of.get(full)
        if name is None:
            out[joined(t.path[1:])] = t
        elif name not in out:
            out[name] = replace(t, dtype=objects[name].dtype, shape=objects[name].shape, path=objects[name].path)
    return out


def _split_quantised_weights(
    stored: dict[str, TensorEntry],
    shown: dict[str, TensorEntry],
    objects: dict[str, Composite],
    relation: hub_names.Relation | None,
    notes: list[str],
    config: dict[str, object] | None,
) -> tuple[dict[str, TensorEntry], dict[str, TensorEntry]]:
    """Return ({name: tensor of the source}, {name: the same with the dtype to write}) of a model, in which quantised
    weights are replaced by their inner tensors.

    Args:
        stored: {name: weight} as the source has it.
        shown: {name: weight} with the dtype to write.
        objects: {name: quantised weight}; if it is empty, `stored` and `shown` are returned.
        relation: how names in memory and on the Hub differ; None if they do not.
        notes: gets notes for the user.
        config: config.json, or None.

    Raises:
        Unsupported: such a weight has another name or is several tensors on the Hub.
    """
    if not objects:
        return stored, shown
    old: dict[str, TensorEntry] = {}
    new: dict[str, TensorEntry] = {}
    for name, parts in ({} if relation is None else relation.joined).items():
        if several := [of for of, _ in parts if of in objects]:
            raise Unsupported(
                f'"{several[0]}" is quantised, and on the Hub it is a part of "{name}". Choose dcp or full.',
                code="CKPT0318",
            )
    for name, t in shown.items():
        view = None if relation is None else relation.views.get(name)
        whole = view is None or (view.of == name and view.shape == t.shape and not view.offset)
        if (view is not None and view.of in objects and not whole) or (name in objects and not whole):
            raise Unsupported(
                f'"{view.of if view else name}" is quantised, and on the Hub it is "{name}", or a part of it. Choose '
                "dcp or full.",
                code="CKPT0318",
            )
        if name in objects:
            inside = name_inner_tensors(name, objects[name])
            old |= inside
            new |= inside
        else:
            old[name], new[name] = stored[name], t
    kinds = ", ".join(dict.fromkeys(class_label(c.about) for c in objects.values()))
    notes.append(f"{len(objects):,} weights ({kinds}) are written as torchao names them in safetensors")
    if config is not None and "quantization_config" not in config:
        notes.append(
            "config.json has no quantization_config: from_pretrained needs one of torchao to put those weights together"
        )
    return old, new


def _ask_for_verdict(
    config: dict[str, Any], model: dict[str, TensorEntry], notes: list[str], *, needed: bool = False
) -> hub_names.Relation | None:
    """Return what transformers says of the names of weights, and whether they are those of the config's model.

    The result is None if transformers cannot answer, which is added to `notes` unless the config has no model_type.

    Args:
        config: config.json.
        model: {name: weight}.
        notes: gets a note for the user if there is no answer.
        needed: whether to raise, rather than return None, if transformers is not installed.

    Raises:
        MissingPackage: transformers is not installed, and its answer is `needed`.
    """
    if not isinstance(config.get("model_type"), str):
        return None
    shapes = encodings.find_parameter_shapes(model, config.get("quantization_config"))
    if shapes is None:
        notes.append(
            "names were not compared with those of the model of config.json: packed codes do not tell their shapes"
        )
        return None
    try:
        return hub_names.relate_to_hub(config, shapes, judge=True)
    except (MissingPackage, Unsupported) as e:
        if needed and isinstance(e, MissingPackage):
            raise MissingPackage(
                f"{e}. Or write the weights under the names they have now: "
                f"{argument('allow_name_mismatch', True, 'HfOptions')}."
            ) from None
        notes.append(f"names are kept as they are, and were not compared with those of the model of config.json: {e}")
        return None


def _check_names(
    ckpt: Checkpoint, config: dict[str, object], model: dict[str, TensorEntry], options: WriteOptions, notes: list[str]
) -> hub_names.Relation | None:
    """Check that the weights are those of the model of a config, and return how names differ on the Hub; None if they
    do not.

    The model of the config must have all of the weights and no others, with these shapes, however the config was found.
    With `allow_name_mismatch` a note says what differs.

    Raises:
        Unsupported: it has others. MissingPackage: transformers is needed for the names, and is not installed.
    """
    asks, allowed = needs_transformers(config, model), options.of(HfOptions).allow_name_mismatch
    odd = hub_names.find_contradiction(config, {n: t.shape for n, t in model.items()})
    coded = bool(encodings.find_in_tensors(model))  # scales keep the names of the Hub, so weights do, too
    if ckpt.layout == "hf" and ckpt.config is not None and options.config is None and not asks and odd is None:
        return None  # it is the source's own config: from_pretrained loads the one as it loads the other
    relation = _ask_for_verdict(config, model, notes, needed=asks and not allowed)
    verdict = None if relation is None else relation.verdict
    if verdict is not None and not verdict.good:
        text = (
            f"config.json describes a {verdict.model}, and the weights are not those of one: "
            f"{_describe_differences(model, verdict)}. {_suggest_remedy(ckpt, model, verdict, options)}"
        )
    elif verdict is None and odd is not None:
        text = f"config.json is of another model than the weights: {odd}. {_suggest_remedy(ckpt, model, None, options)}"
    else:
        if relation is not None and verdict is None:
            notes.append(
                "names were not compared with those of the model of config.json: transformers cannot load it on meta"
            )
        return relation if asks and not coded else None
    if not allowed:
        raise Unsupported(text, code="CKPT0311")
    notes.append(text.partition(" from_pretrained would")[0])
    return relation if asks and not coded else None


def _describe_differences(model: dict[str, TensorEntry], found: hub_names.LoadVerdict) -> str:
    """Return the differences in a verdict as text: tensors that are missing, unexpected, or of another shape."""
    parts = []
    if found.missing:
        parts.append(f'{len(found.missing)} of its {found.parameters} tensors are missing, first "{found.missing[0]}"')
    if found.unexpected:
        parts.append(
            f'{len(found.unexpected)} of the {len(model)} weights are not its own, first "{found.unexpected[0]}"'
        )
    if found.shapes:
        parts.append(f"{len(found.shapes)} have other shapes, first {found.shapes[0]}")
    return "; ".join(parts)


def _suggest_remedy(
    ckpt: Checkpoint, model: dict[str, TensorEntry], found: hub_names.LoadVerdict | None, options: WriteOptions
) -> str:
    """Return what to do if the weights are not those of the model of config.json, and what would happen otherwise, as
    text. `found` is transformers' verdict; None if it gave none."""
    if found is not None and found.strip:
        hint = (
            f'All names and shapes are right without the prefix "{found.strip}": add '
            f"{argument('strip_prefix', found.strip[:-1], 'HfOptions')}."
        )
    elif any("lora_" in n for n in model):
        hint = (
            f"The weights hold an adapter: {argument('adapter', True, 'HfOptions')} writes it as PEFT saves it, and "
            "ckpttool adapter merge writes the model with the adapter in its weights."
        )
    elif ckpt.trainer == "torchtitan":
        hint = (
            "These are torchtitan's own names, and no name map that comes with ckpttool is for this model: write one "
            "(docs, Name maps), or export with torchtitan's last_save_in_hf."
        )
    elif options.config is None:
        hint = (
            f"It was found beside the source: give {argument('config')} the config of this very model, or move that "
            "file away."
        )
    else:
        hint = "Give the config of this very model."
    return (
        f"from_pretrained would fill what is missing with random numbers. {hint} To write the weights as they are, for "
        f"code that loads them by itself, use {argument('allow_name_mismatch', True, 'HfOptions')}."
    )


def _map_to_hub_names(relation: hub_names.Relation | None) -> dict[str, str]:
    """Return {name in memory: name on the Hub} of the weights that are one tensor on the Hub, under another name."""
    views = {} if relation is None else relation.views
    return {
        v.of: k for k, v in views.items() if v.of != k and relation is not None and relation.shapes[v.of] == v.shape
    }


def _select_hub_tensors(
    ckpt: Checkpoint,
    model: dict[str, TensorEntry],
    config: dict[str, object] | None,
    relation: hub_names.Relation | None,
    source: Source,
    notes: list[str],
    untie: bool,
) -> tuple[dict[str, TensorEntry], dict[str, str], dict[str, str]]:
    """Select the tensors that save_pretrained would write.

    Args:
        ckpt: the checkpoint.
        model: {name: weight}.
        config: config.json, or None.
        relation: how names in memory and on the Hub differ; None: names are kept as they are.
        source: where bytes of tied weights are read, to compare them.
        notes: gets the weights that are left out.
        untie: keep tensors that are tied only by having the same bytes of the same file.

    Returns:
        ({name: tensor}, {name of a tied weight that is left out: name of the one that is kept}, both with "model.",
            {name: name of the first of the weights that must be in the same shard}).

    Raises:
        Unsupported: tied by config, but their bytes differ.
    """
    together: dict[str, str] = {}
    # transformers does not load layers of multi-token prediction, so they have what others share with them
    further = hub_names.list_further_layers(config or {})
    tied = {} if untie else tied_weights({n: t for n, t in model.items() if not n.startswith(further)})
    tied.update({k: v for k, v in ties(config, model, relation).items() if k in model and v in model})
    if relation is not None:
        out = cut_into_hub_tensors(model, relation)
        together = relation.together
    else:
        out = dict(model)
    hub = _map_to_hub_names(relation)
    gone: dict[str, str] = {}
    for name, kept in sorted(tied.items()):
        there = hub.get(name, name)
        if there not in out or hub.get(kept, kept) not in out or name == kept:
            continue
        a, b = model[name], model[kept]
        if a.chunks[:] != b.chunks[:]:
            digests = tensor_digests({"a": a, "b": b}, source, ckpt.files, ckpt.records, lambda *_: None)
            if digests["a"] != digests["b"]:
                raise Unsupported(
                    f'config.json ties "{name}" to "{kept}", but their bytes differ; loading would lose one of them. '
                    f"Write both with {argument('untie', True, 'HfOptions')}, or find out which of them is right.",
                    code="CKPT0320",
                )
        del out[there]
        gone["model." + name] = "model." + kept
        notes.append(f'"{name}" is tied to "{kept}" (equal bytes) and written once, as save_pretrained does')
    return out, gone, together


def _refuse_undeclared_codes(model: dict[str, TensorEntry], config: dict[str, object], files: dict[str, bytes]) -> None:
    """Raise if weights are packed codes and config.json does not declare a quantisation: from_pretrained would load the
    codes as numbers. `files` are the files to copy, by name.

    Raises:
        Unsupported: with the first codes.
    """
    if not {"quantization_config", "quantization"}.isdisjoint(config) or not encodings.OWN_CONFIGS.isdisjoint(files):
        return
    if (found := encodings.find_in_tensors(model)).weights:
        raise Unsupported(
            f'{found.summary()}; first "{next(iter(found.weights))}". config.json has no quantization_config, so '
            f"that from_pretrained would take the codes for the weights. Give {argument('config')} the folder of the "
            "quantised model. To write them as they are, for code that knows them, use "
            f"{argument('allow_name_mismatch', True, 'HfOptions')}.",
            code="CKPT0318",
        )


def _with_config_dtype(name: str, data: bytes, model: dict[str, TensorEntry]) -> bytes:
    """Return the content of a file to copy. In config.json the dtype is set to the one that most elements of `model`
    have, as save_pretrained does; packed codes and their scales do not count."""
    if name != "config.json":
        return data
    config = bounded_json.parse(data, name)
    sizes: dict[str, int] = {}
    codes = encodings.find_in_tensors(model, config.get("quantization_config"))
    for n, t in model.items():
        if "float" in t.dtype and not codes.describe(n):
            sizes[t.dtype] = sizes.get(t.dtype, 0) + prod(t.shape)
    main = max(sizes, key=lambda k: sizes[k]) if sizes else None
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    if main is None or config.get(key) in (None, main) or not isinstance(config.get(key), str):
        return data
    config[key] = main
    return bounded_json.encode(config, indent=2, sort_keys=True) + b"\n"
