"""hf: Hugging Face safetensors, the weights of a model; all else of a state where it is asked for.

    DIR/model.safetensors                                    or, in shards,
    DIR/model-0000i-of-0000n.safetensors + model.safetensors.index.json {"metadata", "weight_map": {name: file}}
    DIR/config.json, generation_config.json, tokenizer files
    DIR/training_state/                                      with include_optimizer: _training_state.py

    DIR/adapter_model.safetensors, adapter_config.json, tokenizer files      with adapter: as PEFT saves it

Also read: any other *.safetensors, one such file, and the shards of torch's
HuggingFaceStorageWriter(save_distributed=True), `shard-*-model-*.safetensors`, where several files hold parts of one
tensor and `__metadata__["DCP_SHARDING_INFO"]` {name: {"saved_offsets"}} says which; the whole shape is the furthest
corner of all parts.

Canonical names are those in memory. Where transformers keeps other ones on the Hub (fused experts), huggingface/hub_names.py
relates the two, in both directions, as views. Tied weights are written once, after their bytes were compared, and both
names are there again on reading.

Written: names, tensors, order and header byte for byte as `save_pretrained` writes them; shards as
huggingface_hub splits them.

Sources: safetensors_header.py; transformers/modeling_utils.py (save_pretrained); huggingface_hub/serialization/_base.py
(split_state_dict_into_shards_factory); torch/distributed/checkpoint/{hf_storage,_hf_utils}.py.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ckpttool import bounded_json
from ckpttool.engine.fill import tensor_digests
from ckpttool.errors import Corrupt, MissingPackage, Unsupported, UsageError
from ckpttool.formats import safetensors_header
from ckpttool.huggingface import adapters, hub_names, model_files
from ckpttool.index import boxes
from ckpttool.index.checkpoint import (
    ITEMSIZE,
    Checkpoint,
    Chunk,
    Chunks,
    Extent,
    Path,
    TensorEntry,
    joined,
    tied_weights,
)
from ckpttool.index.draft import Draft, DraftFile, Dropped
from ckpttool.index.fqns import strip_wrappers, without_prefix
from ckpttool.index.names import Named
from ckpttool.layouts import Layout, Place, ReadOptions, WriteOptions, checkpoint_of, option
from ckpttool.storage.source import Source

from . import _training_state as training_state

__all__ = ["LAYOUTS"]

_INDEX = "model.safetensors.index.json"
_ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER = "adapter_model.safetensors"
_WHOLE = "model.safetensors"
_NUMBERED = re.compile(r"(.*-)(\d{5})-of-(\d{5})\.safetensors")
_SHARD = re.compile(r"shard-\d+-model-\d+-of-\d+\.safetensors")
#: Output embeddings that transformers ties to the input embedding when the config says so, for hub_names.PLAIN.
_HEADS = ("lm_head.weight",)
_EMBEDDINGS = (
    "model.embed_tokens.weight",
    "transformer.wte.weight",
    "gpt_neox.embed_in.weight",
    "model.decoder.embed_tokens.weight",
)


def detect(where: Place) -> tuple[bool, str]:
    """A folder with *.safetensors, or one such file."""
    source, file = where
    if file is not None:
        yes = file.endswith(".safetensors")
        return yes, "is a .safetensors file" if yes else "not a .safetensors file"
    names = source.list()
    if ".metadata" in names:
        return False, "has .metadata, which is of dcp"
    if "latest" in names:
        return False, "has latest, which is of DeepSpeed"
    found = [n for n in names if n.endswith(".safetensors")]
    if _INDEX in names:
        return True, f"has {_INDEX}"
    if found:
        return True, f"has {found[0]}" + (f" and {len(found) - 1} more" if len(found) > 1 else "")
    return False, "no *.safetensors" + (
        ", only pickles (*.bin): give one as the path" if any(n.endswith(".bin") for n in names) else ""
    )


# --------------------------------------------------------------------------------------------------------- reading


def read(where: Place, options: ReadOptions) -> Checkpoint:
    """The index of a folder: headers only."""
    source, file = where
    names = [file] if file is not None else source.list()
    shards = [n for n in names if _SHARD.fullmatch(n)]
    notes: list[str] = []
    if file is None and _INDEX in names:
        tensors, files = _indexed(source, notes)
    elif shards:
        tensors, files = _sharded(source, shards)
    else:
        tensors, files = _plain(source, _counting(source, names))
    state = training_state.read(source, len(files)) if training_state.FOLDER in names else None
    config = model_files.read_config(source) if file is None and "config.json" in names else None
    if options.config is not None:
        config = model_files.of_model(options.config)[0] or config
    if not tensors:
        raise Corrupt(f"{source.root}: its safetensors files hold no tensor.")
    clean = strip_wrappers(tensors)
    leaves: dict[Path, Any] = {("model", clean[n]): t for n, t in tensors.items()}
    if state is not None:
        leaves |= {t.path: t for t in state.tensors.values()} | {v.path: v for v in state.values.values()}
        files += state.files
    out = checkpoint_of(Named(leaves, {}, None, notes), "hf", source.root, None, files, source)
    out.config = config
    if state is not None:
        out.world_size, out.trainer = state.world_size, state.trainer
    return out


def locate(ckpt: Checkpoint, source: Source) -> Checkpoint:
    """The same weights under the names they have in memory, as config.json tells; with a training state, as that tells.

    Raises:
        Corrupt: the training state is that of other weights.
    """
    model = {str(t.path[1]): t for t in ckpt.tensors.values() if t.path[0] == "model"}
    if ckpt.config is not None and model:
        notes = list(ckpt.notes)
        tensors = {joined(t.path): t for t in _in_memory(model, ckpt.config, notes).values()}
        tensors.update((n, t) for n, t in ckpt.tensors.items() if t.path[0] != "model")
        ckpt = replace(ckpt, tensors=tensors, notes=notes)
    if training_state.INDEX not in ckpt.files:
        return ckpt
    return training_state.merged(ckpt, source)


def _counting(source: Source, names: list[str]) -> list[str]:
    """The files that are the model, where no index says: all there are, but beside model.safetensors what transformers
    does not read.

    Raises:
        Corrupt: of numbered shards some are missing.
    """
    files = [n for n in names if n.endswith(".safetensors")]
    if _WHOLE in files and ("config.json" in names or _ADAPTER in files):
        files = [n for n in files if n == _WHOLE or ("config.json" not in names and n != _ADAPTER)]
    for name in files:
        m = _NUMBERED.fullmatch(name)
        if m is None or len(files) == 1 == len(names):  # one file that was given itself
            continue
        missing = [
            i
            for i in range(1, min(int(m[3]), 10**5) + 1)
            if f"{m[1]}{i:0{len(m[2])}d}-of-{m[3]}.safetensors" not in files
        ]
        if missing:
            raise Corrupt(
                f"{source.root}: {name} is one of {int(m[3])} shards, and number {missing[0]} is missing. The copy is "
                "incomplete; fetch the folder again, or give the file itself to read it alone."
            )
    return files


def _plain(source: Source, files: list[str]) -> tuple[dict[str, TensorEntry], list[str]]:
    out: dict[str, TensorEntry] = {}
    safetensors_header.prefetch(source, files)
    for i, file in enumerate(files):
        for name, slot in safetensors_header.slots(source, file).items():
            if name in out:
                raise Corrupt(
                    f'"{name}" is in {file} and in {files[out[name].chunks[0].extent.file]}, and no index says which counts.'
                )
            out[name] = _entry(name, slot, i)
    return out, files


def _entry(name: str, slot: safetensors_header.Slot, file: int) -> TensorEntry:
    return TensorEntry(
        slot.dtype, slot.shape, ("model", name), Chunks.whole(slot.shape, file, slot.offset, slot.length)
    )


def _indexed(source: Source, notes: list[str]) -> tuple[dict[str, TensorEntry], list[str]]:
    what = f"{source.root}/{_INDEX}"
    index = bounded_json.parse(source.read_all(_INDEX, 128 << 20), what)
    weights = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weights, dict) or not all(isinstance(v, str) for v in weights.values()):
        raise Corrupt(f"{what}: no weight_map of names to files.")
    files = sorted(set(weights.values()))
    aside = [n for n in source.list() if n.endswith(".safetensors") and n not in files]
    if _WHOLE in aside:
        raise Unsupported(
            f"{source.root} holds {_WHOLE}, which transformers reads, and {_INDEX}, which names other files. One of the two "
            f"is left over from an earlier save: remove it, or give {_WHOLE} itself."
        )
    safetensors_header.prefetch(source, files)
    slots = [safetensors_header.slots(source, f) for f in files]
    at = {f: i for i, f in enumerate(files)}
    out: dict[str, TensorEntry] = {}
    for name, file in weights.items():
        i = at[file]
        if name not in slots[i]:
            raise Corrupt(
                f'{what} says "{name}" is in {file}, which does not hold it. The shards are not of one model.'
            )
        out[name] = _entry(name, slots[i][name], i)
    extra = [(n, i) for i, s in enumerate(slots) for n in s if weights.get(n) != files[i]]
    for name, i in extra:
        if name in out:
            raise Corrupt(
                f'"{name}" is in {weights[name]} as {_INDEX} says, and in {files[i]} too; which one counts is not clear.'
            )
        out[name] = _entry(name, slots[i][name], i)
    if extra:
        notes.append(
            f"{len(extra)} tensors are not listed in {_INDEX} and were taken from their files, first {extra[0][0]}"
        )
    return out, files


def _sharded(source: Source, files: list[str]) -> tuple[dict[str, TensorEntry], list[str]]:
    parts: dict[str, list[tuple[str, tuple[int, ...], Chunk]]] = {}
    safetensors_header.prefetch(source, files)
    for i, file in enumerate(files):
        slots, meta = safetensors_header.read_header(source, file)
        info = bounded_json.parse(meta.get("DCP_SHARDING_INFO", "{}").encode(), f"{source.root}/{file}")
        for name, slot in slots.items():
            entry = info.get(name) if isinstance(info, dict) else None
            start = entry.get("saved_offsets") if isinstance(entry, dict) else None
            if (
                not isinstance(start, list)
                or len(start) != len(slot.shape)
                or not all(type(k) is int and 0 <= k < 1 << 56 for k in start)
            ):
                raise Corrupt(f'{file}: DCP_SHARDING_INFO does not say where the part of "{name}" belongs.')
            chunk = Chunk(tuple(start), slot.shape, Extent(i, slot.offset, slot.length))
            parts.setdefault(name, []).append((slot.dtype, tuple(start), chunk))
    out: dict[str, TensorEntry] = {}
    for name, rows in parts.items():
        if len({d for d, _, _ in rows}) != 1 or len({len(s) for _, s, _ in rows}) != 1:
            raise Corrupt(f'the parts of "{name}" have different dtypes or dimensions.')
        shape = tuple(max(c.start[d] + c.shape[d] for _, _, c in rows) for d in range(len(rows[0][1])))
        unique = {(c.start, c.shape): c for _, _, c in rows}  # a replicated tensor is in several files
        chunks = Chunks.of(len(shape), unique.values())
        out[name] = TensorEntry(rows[0][0], shape, ("model", name), chunks)
    return out, files


def _in_memory(tensors: dict[str, TensorEntry], config: dict[str, Any], notes: list[str]) -> dict[str, TensorEntry]:
    """The same tensors under the names a model has in memory, tied ones under both."""
    relation = _relation(config, tensors, notes)
    if (
        relation is not None
        and set(relation.views) - set(relation.tied) <= set(tensors)
        and any(v.of != k for k, v in relation.views.items())
    ):
        tensors = _fuse(tensors, relation)
    tied = _ties(config, tensors, relation)
    for name, kept in tied.items():
        if name not in tensors and kept in tensors:
            tensors[name] = replace(tensors[kept], path=("model", name))
            notes.append(f'"{name}" is tied to "{kept}" (config.json); both names are kept')
    return tensors


def _ties(
    config: dict[str, Any] | None, tensors: dict[str, TensorEntry], relation: hub_names.Relation | None
) -> dict[str, str]:
    """{name: the one whose bytes it has} of what the model of a config ties."""
    if config is None:
        return {}
    if relation is not None:
        return relation.tied if config.get("tie_word_embeddings", True) else {}
    return _usual_ties(config, tensors)


def _usual_ties(config: dict[str, Any], tensors: dict[str, TensorEntry]) -> dict[str, str]:
    if not config.get("tie_word_embeddings"):
        return {}
    kept = next((n for n in _EMBEDDINGS if n in tensors), None)
    return dict.fromkeys(_HEADS, kept) if kept else {}


def _asks_transformers(config: dict[str, Any], tensors: dict[str, TensorEntry]) -> bool:
    """Whether transformers must be asked: names may differ on the Hub, or only its defaults tell what is tied."""
    if not isinstance(config.get("model_type"), str):
        return False
    if any("lora_" in n or ".base_layer." in n for n in tensors):
        return False  # an adapter: PEFT's names are written as they are
    return config["model_type"] not in hub_names.PLAIN or "tie_word_embeddings" not in config


def _relation(
    config: dict[str, Any],
    tensors: dict[str, TensorEntry],
    notes: list[str],
) -> hub_names.Relation | None:
    """What transformers says of the names, where it must be asked and knows."""
    if not _asks_transformers(config, tensors):
        return None
    try:
        return hub_names.relate(config, None)
    except (MissingPackage, Unsupported) as e:
        notes.append(f"names are kept as they are: {e}")
        return None


def _fuse(tensors: dict[str, TensorEntry], relation: hub_names.Relation) -> dict[str, TensorEntry]:
    """Hub tensors put together: each view of a parameter becomes a chunk of it."""
    chunks: dict[str, Chunks] = {}
    dtypes: dict[str, str] = {}
    out: dict[str, TensorEntry] = {}
    for name, view in relation.views.items():
        t = tensors.get(name)
        if t is None:
            continue
        whole = relation.shapes[view.of]
        if t.shape != view.shape:
            raise Corrupt(f'"{name}" is {t.shape}; config.json makes it {view.shape}. They are not of the same model.')
        start, shape, strides = _box_of(view, whole, name)
        columns = chunks.setdefault(view.of, Chunks(len(whole)))
        dtypes.setdefault(view.of, t.dtype)
        if dtypes[view.of] != t.dtype:
            raise Unsupported(f'the parts of "{view.of}" have dtypes {dtypes[view.of]} and {t.dtype}.')
        for c in t.chunks:
            columns.add(start, shape, *c.extent, strides=strides)
    for name, columns in chunks.items():
        out[name] = TensorEntry(dtypes[name], relation.shapes[name], ("model", name), columns)
    known = set(relation.views)
    out.update({n: t for n, t in tensors.items() if n not in known})
    return {**{n: out[n] for n in relation.shapes if n in out}, **out}


def _box_of(
    view: hub_names.View, whole: tuple[int, ...], name: str
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...] | None]:
    """(start, shape, strides) of a view in its parameter: strides, in elements of the view's own row-major bytes, where
    dimensions are swapped; else None.

    Raises:
        Unsupported: the view is not a box.
    """
    full = boxes.strides(whole)
    start, left = [], view.offset
    for s in full:
        start.append(left // s if s else 0)
        left -= start[-1] * s if s else 0
    shape, strides = [1] * len(whole), [0] * len(whole)
    own = boxes.strides(view.shape)
    free = list(range(len(whole)))
    for n, s, w in zip(view.shape, view.strides, own, strict=True):
        if n == 1:
            continue
        d = next((i for i in free if full[i] == s and whole[i] > 1), None)
        if d is None:
            raise Unsupported(f'"{name}" is not a box of "{view.of}".')
        free.remove(d)
        shape[d], strides[d] = n, w
    return tuple(start), tuple(shape), None if boxes.is_row_major(shape, strides) else tuple(strides)


# --------------------------------------------------------------------------------------------------------- writing


@dataclass(frozen=True)
class HfOptions:
    """What an hf folder is to hold."""

    max_shard_bytes: int = option(
        5_000_000_000, "Largest file of tensors, in bytes.", flag="--max-shard-size", size=True
    )
    adapter: bool = option(False, "Write the adapter alone, as PEFT saves it.")
    include_optimizer: bool = option(False, "Write the optimizer and all other state beside the weights.")
    strip_prefix: str | None = option(
        None, "Modules that names of weights begin with, to leave out; other names stay.", metavar="PREFIX"
    )
    allow_name_mismatch: bool = option(
        False, "Write weights that the model of the config does not have, or has in other shapes."
    )

    def __post_init__(self) -> None:
        if self.adapter and self.include_optimizer:
            raise UsageError("--adapter writes the adapter alone; it cannot be combined with --include-optimizer.")
        if self.max_shard_bytes < 1:
            raise UsageError(f"max_shard_bytes is {self.max_shard_bytes}; it must be at least 1.")


def _holds(own: object) -> frozenset[str]:
    """Weights; with the optimizer, everything."""
    return frozenset() if isinstance(own, HfOptions) and own.include_optimizer else frozenset({"model"})


def prepare(ckpt: Checkpoint, source: Source, options: WriteOptions) -> Checkpoint:
    """The checkpoint without `strip_prefix`; with `adapter`, nothing but the adapter, under the names that PEFT gives it.

    Raises:
        UsageError: no weight has the prefix. Unsupported: there is no adapter that ckpttool knows.
    """
    own = options.of(HfOptions)
    if own.strip_prefix is not None:
        ckpt = without_prefix(ckpt, own.strip_prefix)
    if own.adapter:
        ckpt = adapters.alone(ckpt, model_files.adapter(source, options.config, [])[0])
    return ckpt


def write(ckpt: Checkpoint, source: Source, options: WriteOptions) -> Draft:
    """A folder that from_pretrained loads.

    Raises:
        Unsupported: there are no weights, config.json ties tensors whose bytes differ, or its model has other tensors.
        MissingPackage: only transformers knows the names that this model has on the Hub.
    """
    own = options.of(HfOptions)
    if own.adapter:
        return _write_adapter(ckpt, source, options)
    model = {joined(t.path[1:]): t for t in ckpt.tensors.values() if t.path[0] == "model"}
    if not model:
        raise Unsupported("the checkpoint holds no model weights, and hf holds nothing else.")
    notes: list[str] = []
    rest = {n: replace(t, dtype=options.cast(n, t.dtype)) for n, t in ckpt.tensors.items() if t.path[0] != "model"}
    dropped = [Dropped(n, t.nbytes, "hf holds weights only") for n, t in rest.items()]
    dropped += [Dropped(n, 0, "hf holds weights only") for n in ckpt.values]
    config, extra = model_files.beside(source, options.config, notes)
    relation = None if config is None else _judged(ckpt, config, model, options, notes)
    stored, tied, together = _hub_tensors(ckpt, model, config, relation, source, notes)
    added = [f"model.{n}" for n, kept in _ties(config, model, relation).items() if n not in model and kept in stored]
    model = {k: replace(t, dtype=options.cast("model." + k, t.dtype)) for k, t in stored.items()}
    _refuse_dtypes(model)
    groups = _split(model, own.max_shard_bytes, together)
    n = len(groups)
    files = [_WHOLE] if n == 1 else [f"model-{i + 1:05d}-of-{n:05d}.safetensors" for i in range(n)]
    tensors: dict[str, TensorEntry] = {}
    draft_files = [_shard(files[i], i, names, model, tensors) for i, names in enumerate(groups)]
    sources = {"model." + k: stored[k] for names in groups for k in names}
    records: list[DraftFile] = []
    if own.include_optimizer:
        fqns = {k.removeprefix("model."): v.removeprefix("model.") for k, v in tied.items()}
        held, shards, records = training_state.draft(ckpt, rest, _split(rest, own.max_shard_bytes, {}), n, fqns)
        tensors |= held
        sources |= {k: ckpt.tensors[k] for k in held}
        draft_files += shards
        dropped = []
    for name, data in extra.items():
        data = _with_dtype(name, data, model)
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
        text = (json.dumps(index, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()
        draft_files.append(DraftFile(_INDEX, len(text), text))
    names_of_files = [f.name for f in draft_files]
    held_values = dict(ckpt.values) if own.include_optimizer else {}
    out = Checkpoint("hf", options.target, None, names_of_files, [f.size for f in draft_files], tensors, held_values)
    return Draft(out, sources, draft_files, dropped=dropped, same=tied, notes=notes, added=added)


def _shard(
    file: str, i: int, names: list[str], model: dict[str, TensorEntry], tensors: dict[str, TensorEntry]
) -> DraftFile:
    """File number `i`, with these weights; adds their places to `tensors`."""
    names.sort(key=lambda k: safetensors_header.sort_key(k, model[k].dtype))
    head = safetensors_header.header([(k, model[k].dtype, model[k].shape) for k in names], {"format": "pt"})
    at = len(head)
    for k in names:
        t = model[k]
        tensors["model." + k] = TensorEntry(t.dtype, t.shape, ("model", k), Chunks.whole(t.shape, i, at, t.nbytes))
        at += t.nbytes
    return DraftFile(file, at, head)


def _write_adapter(ckpt: Checkpoint, source: Source, options: WriteOptions) -> Draft:
    """A folder that PEFT loads, of a checkpoint that holds an adapter and nothing else (adapters.alone)."""
    notes: list[str] = []
    stored = {joined(t.path[1:]): t for t in ckpt.tensors.values()}
    model = {k: replace(t, dtype=options.cast("model." + k, t.dtype)) for k, t in stored.items()}
    _refuse_dtypes(model)
    tensors: dict[str, TensorEntry] = {}
    files = [_shard(_ADAPTER, 0, list(model), model, tensors)]
    extra = model_files.adapter(source, options.config, notes)[1]
    extra[_ADAPTER_CONFIG] = extra.pop(_ADAPTER_CONFIG)  # last
    files += [DraftFile(n, len(data), data) for n, data in extra.items()]
    out = Checkpoint("hf", options.target, None, [f.name for f in files], [f.size for f in files], tensors, {})
    return Draft(out, {n: ckpt.tensors[n] for n in tensors}, files, notes=notes)


def _refuse_dtypes(model: dict[str, TensorEntry]) -> None:
    for name, t in model.items():
        if t.dtype not in safetensors_header.CODES:
            raise Unsupported(f'"{name}" is {t.dtype}, which safetensors does not hold. Cast it with --cast.')


def _judged(
    ckpt: Checkpoint, config: dict[str, Any], model: dict[str, TensorEntry], options: WriteOptions, notes: list[str]
) -> hub_names.Relation | None:
    """What transformers says of the names, where they may differ on the Hub; the model of the config has all of them and no
    others, with these shapes. That is asked where a config was given, or transformers is asked anyway.

    Raises:
        Unsupported: it has not.
    """
    asks = _asks_transformers(config, model)
    if not isinstance(config.get("model_type"), str) or not (asks or options.config):
        return None
    try:
        relation = hub_names.relate(config, {k: t.shape for k, t in model.items()}, judge=True)
    except MissingPackage as e:
        if asks and not options.of(HfOptions).allow_name_mismatch:
            raise MissingPackage(
                f"{e}. Or write the weights under the names they have now: --allow-name-mismatch."
            ) from None
        notes.append(f"names are kept as they are, and were not compared with those of the model of config.json: {e}")
        return None
    except Unsupported as e:
        notes.append(f"names are kept as they are, and were not compared with those of the model of config.json: {e}")
        return None
    if relation.verdict is None:
        notes.append(
            "names were not compared with those of the model of config.json: transformers cannot load it on meta"
        )
    elif not relation.verdict.good:
        said = _mismatch(ckpt, model, relation.verdict)
        if not options.of(HfOptions).allow_name_mismatch:
            raise Unsupported(said)
        notes.append(said.partition(" from_pretrained would")[0])
    return relation if asks else None


def _mismatch(ckpt: Checkpoint, model: dict[str, TensorEntry], found: hub_names.Verdict) -> str:
    """What a verdict that is not good says, and what to do."""
    parts = []
    if found.missing:
        parts.append(f'{len(found.missing)} of its {found.parameters} tensors are missing, first "{found.missing[0]}"')
    if found.unexpected:
        parts.append(
            f'{len(found.unexpected)} of the {len(model)} weights are not its own, first "{found.unexpected[0]}"'
        )
    if found.shapes:
        parts.append(f"{len(found.shapes)} have other shapes, first {found.shapes[0]}")
    if found.strip:
        hint = (
            f'All names and shapes are right without the prefix "{found.strip}": add --strip-prefix {found.strip[:-1]}.'
        )
    elif any("lora_" in n for n in model):
        hint = "The weights hold an adapter: --adapter writes it as PEFT saves it."
    elif ckpt.trainer == "torchtitan":
        hint = "These are torchtitan's own names, which its state_dict_adapter maps: export with torchtitan's last_save_in_hf."
    else:
        hint = "Give the config of this very model."
    return (
        f"config.json describes a {found.model}, and the weights are not those of one: {'; '.join(parts)}. "
        f"from_pretrained would fill what is missing with random numbers. {hint} To write the weights as they are, for code "
        "that loads them by itself, use --allow-name-mismatch."
    )


def _hub_tensors(
    ckpt: Checkpoint,
    model: dict[str, TensorEntry],
    config: dict[str, Any] | None,
    relation: hub_names.Relation | None,
    source: Source,
    notes: list[str],
) -> tuple[dict[str, TensorEntry], dict[str, str], dict[str, str]]:
    """The tensors save_pretrained would write, as views of the source's, {left out: its twin} of tied ones, and
    {name: first one} of those that it never puts into different shards."""
    together: dict[str, str] = {}
    tied = tied_weights(model)
    tied.update({k: v for k, v in _ties(config, model, relation).items() if k in model and v in model})
    if relation is not None:
        out = {k: _crop(k, model[v.of], v) for k, v in relation.views.items()}
        together = relation.together
    else:
        out = dict(model)
    gone: dict[str, str] = {}
    for name, kept in sorted(tied.items()):
        if name not in out or kept not in out or name == kept:
            continue
        a, b = model[name], model[kept]
        if a.chunks[:] != b.chunks[:]:
            digests = tensor_digests({"a": a, "b": b}, source, ckpt.files, ckpt.records, lambda *_: None)
            if digests["a"] != digests["b"]:
                raise Unsupported(
                    f'config.json ties "{name}" to "{kept}", but their bytes differ; loading would lose one of them. '
                    'Set "tie_word_embeddings": false in the config given with --config, or find out which is right.'
                )
        del out[name]
        gone["model." + name] = "model." + kept
        notes.append(f'"{name}" is tied to "{kept}" (equal bytes) and written once, as save_pretrained does')
    return out, gone, together


def _crop(name: str, t: TensorEntry, view: hub_names.View) -> TensorEntry:
    """A part of a tensor as a tensor of its own."""
    if view.shape == t.shape and view.offset == 0 and view.strides == boxes.strides(t.shape):
        return t
    start, shape, _strides = _box_of(view, t.shape, name)
    if t.chunks.zstd:
        raise Unsupported(f'"{view.of}" is compressed and must be split; convert the checkpoint to dcp first.')
    item = ITEMSIZE[t.dtype]
    full = boxes.strides(t.shape)
    # which dimension of the view runs along which dimension of the tensor; one of length 1 runs along none
    along = [next((d for d in range(len(full)) if n > 1 and full[d] == s and shape[d] == n), None)
             for n, s in zip(view.shape, view.strides, strict=True)]  # fmt: skip
    chunks = Chunks(len(view.shape))
    for c in t.chunks:
        both = boxes.meet((c.start, c.shape), (start, shape))
        if both is None:
            continue
        inner = c.strides or boxes.strides(c.shape)
        inside = tuple(a - b for a, b in zip(both[0], c.start, strict=True))
        offset = c.extent.offset + sum(i * s for i, s in zip(inside, inner, strict=True)) * item
        new_start = tuple(0 if d is None else both[0][d] - start[d] for d in along)
        new_shape = tuple(1 if d is None else both[1][d] for d in along)
        new_strides = tuple(0 if d is None else inner[d] for d in along)
        span = boxes.span(new_shape, new_strides) * item
        plain = boxes.is_row_major(new_shape, new_strides)
        chunks.add(new_start, new_shape, c.extent.file, offset, span, strides=None if plain else new_strides)
    return TensorEntry(t.dtype, view.shape, ("model", name), chunks)


def _split(model: dict[str, TensorEntry], most: int, together: dict[str, str]) -> list[list[str]]:
    """Shards as huggingface_hub makes them: fill one until the next tensor does not fit; larger ones stand alone.
    Tensors that share a storage when transformers saves them (experts of one layer) go where the first of them goes.
    """
    units: dict[str, list[str]] = {}
    for name in model:
        first = together.get(name, name)
        units.setdefault(first if first in model else name, []).append(name)
    groups: list[list[str]] = []
    current: list[str] = []
    size = 0
    for names in units.values():
        n = sum(model[k].nbytes for k in names)
        if n > most:
            groups.append(names)
            continue
        if size + n > most:
            groups.append(current)
            current, size = [], 0
        current.extend(names)
        size += n
    return [*groups, current] if current else groups


# ---------------------------------------------------------------------------------------------------------- config


def _with_dtype(name: str, data: bytes, model: dict[str, TensorEntry]) -> bytes:
    """config.json says the dtype of the weights beside it, as save_pretrained writes it."""
    if name != "config.json":
        return data
    config = bounded_json.parse(data, name)
    sizes: dict[str, int] = {}
    for t in model.values():
        if "float" in t.dtype:
            sizes[t.dtype] = sizes.get(t.dtype, 0) + prod(t.shape)
    main = max(sizes, key=lambda k: sizes[k]) if sizes else None
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    if main is None or config.get(key) in (None, main) or not isinstance(config.get(key), str):
        return data
    config[key] = main
    return (json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


LAYOUTS = (
    Layout(
        name="hf", title="Hugging Face safetensors", detect=detect, read=read, write=write, locate=locate, options=HfOptions,
        prepare=prepare, holds=_holds, aliases=("huggingface", "safetensors", "transformers"), keeps_config=True,
    ),
)  # fmt: skip
