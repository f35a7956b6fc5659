"""The names of weights in memory, and those that transformers gives them on the Hub.

If the two differ (fused experts, moved prefixes), huggingface/hub_names.py asks transformers, and tensors of one are
views of tensors of the other: `restore_memory_names` joins the Hub's tensors, `cut_into_hub_tensors` makes them again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ckpttool.errors import Corrupt, MissingPackage, Unsupported
from ckpttool.huggingface import encodings, hub_names
from ckpttool.index import boxes
from ckpttool.index.axes import Compressed, place_chunks
from ckpttool.index.checkpoint import ITEMSIZE, Chunks, TensorEntry

__all__ = ["crop_to_view", "cut_into_hub_tensors", "needs_transformers", "restore_memory_names", "ties"]


#: Output embeddings that transformers ties to the input embedding when the config says so, for hub_names.PLAIN.
_HEADS = ("lm_head.weight",)
_EMBEDDINGS = (
    "model.embed_tokens.weight",
    "transformer.wte.weight",
    "gpt_neox.embed_in.weight",
    "model.decoder.embed_tokens.weight",
)


def restore_memory_names(
    tensors: dict[str, TensorEntry], config: dict[str, Any], notes: list[str]
) -> dict[str, TensorEntry]:
    """Return {name in memory: weight}; a tied weight is there under both names. Weights of a quantised model (packed
    codes) keep the names of the Hub, and so do their scales; tied names are not added to them.

    Args:
        tensors: {name in the files: weight}; may be changed in place.
        config: config.json.
        notes: gets the tied weights, and why names were kept.

    Raises:
        Corrupt, Unsupported: parts do not make up the parameters of the model of the config.
    """
    codes = encodings.find_in_tensors(tensors, config.get("quantization_config"))
    relation = None if codes else _ask_for_hub_names(config, tensors, notes)
    if relation is not None:
        usual = {n for n, v in relation.views.items() if v.of not in relation.tied} | relation.joined.keys()
        further = hub_names.list_further_layers(config)  # which not every folder has
        usual = {n for n in usual if not n.startswith(further)}
        if usual <= tensors.keys():
            if relation.joined or any(v.of != k for k, v in relation.views.items()):
                tensors = _fuse_hub_tensors(tensors, relation)
        elif tensors.keys() - relation.views.keys() - relation.joined.keys() - relation.shapes.keys():
            loaded = _ask_for_loaded_names(config, tensors, notes)
            if loaded is not None and loaded.joined:
                notes.append(
                    "the names in the files are not those that save_pretrained writes: read as from_pretrained"
                )
                tensors = _fuse_hub_tensors(tensors, loaded)
    tied = ties(config, tensors, relation)
    for name, kept in (*tied.items(), *((kept, name) for name, kept in tied.items())):  # files may have either
        if name not in tensors and kept in tensors and kept not in codes.belongs:
            tensors[name] = replace(tensors[kept], path=("model", name))
            notes.append(f'"{name}" is tied to "{kept}" (config.json) and read under both names')
    return tensors


def ties(
    config: dict[str, object] | None, tensors: dict[str, TensorEntry], relation: hub_names.Relation | None
) -> dict[str, str]:
    """Return {name of a weight: name of the weight that it is tied to} in the model of a config.

    Args:
        config: config.json; None, for no config, gives an empty result.
        tensors: {name: weight}.
        relation: what transformers says of the names; if None, only an output layer and an embedding with usual names
            can be tied.
    """
    if config is None:
        return {}
    if relation is not None:
        return relation.tied if config.get("tie_word_embeddings", True) else {}
    return _find_usual_ties(config, tensors)


def _find_usual_ties(config: dict[str, object], tensors: dict[str, TensorEntry]) -> dict[str, str]:
    """Return {output layer: embedding} if both have usual names and the config says that they are tied."""
    if not config.get("tie_word_embeddings"):
        return {}
    kept = next((n for n in _EMBEDDINGS if n in tensors), None)
    return dict.fromkeys(_HEADS, kept) if kept else {}


def needs_transformers(config: dict[str, object], tensors: dict[str, TensorEntry]) -> bool:
    """Return whether only transformers can tell the names of a model's weights in memory, or which of them are tied.

    It must be asked unless names on the Hub are known to be the same for this type of model, and the config states
    whether weights are tied. The result is False for an adapter, and for a config without `model_type`.

    Args:
        config: config.json.
        tensors: {name: weight}.
    """
    if not isinstance(config.get("model_type"), str):
        return False
    if any("lora_" in n or ".base_layer." in n for n in tensors):
        return False  # an adapter: PEFT's names are written as they are
    return config["model_type"] not in hub_names.PLAIN or "tie_word_embeddings" not in config


def _ask_for_hub_names(
    config: dict[str, object],
    tensors: dict[str, TensorEntry],
    notes: list[str],
) -> hub_names.Relation | None:
    """Return what transformers says of the names of a model's weights in memory and on the Hub.

    The result is None if transformers need not be asked, or cannot answer; the latter is added to `notes`.

    Args:
        config: config.json.
        tensors: {name: weight}.
        notes: gets a note for the user on why names are kept.
    """
    if not needs_transformers(config, tensors):
        return None
    try:
        return hub_names.relate_to_hub(config, None, further=bool(hub_names.list_further_layers(config)))
    except (MissingPackage, Unsupported) as e:
        notes.append(f"names are kept as they are: {e}")
        return None


def _ask_for_loaded_names(
    config: dict[str, object], tensors: dict[str, TensorEntry], notes: list[str]
) -> hub_names.Relation | None:
    """Return how from_pretrained maps weights whose names are not those that save_pretrained writes; None if it cannot
    load them, which is added to `notes`."""
    try:
        return hub_names.relate_to_hub(config, {n: t.shape for n, t in tensors.items()}, load=True)
    except Unsupported as e:
        notes.append(f"names are kept as they are: {e}")
        return None


def _fuse_hub_tensors(tensors: dict[str, TensorEntry], relation: hub_names.Relation) -> dict[str, TensorEntry]:
    """Return {name in memory: parameter}: tensors of the Hub are joined to the parameters of which they are parts, as
    chunks. Other tensors are kept.

    Raises:
        Corrupt: one has another shape than the config makes it. Unsupported: parts have different dtypes, or are no
            boxes.
    """
    chunks: dict[str, Chunks] = {}
    dtypes: dict[str, str] = {}
    out: dict[str, TensorEntry] = {}

    def chunks_of(parameter: str, name: str, shape: tuple[int, ...]) -> Chunks:
        """Return the chunks of a parameter, to which a tensor of the Hub, of this shape by its config, adds its own."""
        t = tensors[name]
        if t.shape != shape:
            raise Corrupt(
                f'"{name}" is {t.shape}; config.json makes it {shape}. They do not belong to the same model.',
                code="CKPT0412",
            )
        if dtypes.setdefault(parameter, t.dtype) != t.dtype:
            raise Unsupported(
                f'the parts of "{parameter}" have dtypes {dtypes[parameter]} and {t.dtype}.', code="CKPT0332"
            )
        return chunks.setdefault(parameter, Chunks(len(relation.shapes[parameter])))

    for name, view in relation.views.items():
        if name in tensors:
            start, shape, strides = _find_box(view, relation.shapes[view.of], name)
            columns = chunks_of(view.of, name, view.shape)
            for c in tensors[name].chunks:
                columns.add(start, shape, *c.extent, strides=strides)
    for name, parts in relation.joined.items():
        for parameter, link in parts if name in tensors else ():
            place_chunks(link, tensors[name], chunks_of(parameter, name, link.part_shape), to_whole=True)
    for name, columns in chunks.items():
        out[name] = TensorEntry(dtypes[name], relation.shapes[name], ("model", name), columns)
    known = relation.views.keys() | relation.joined.keys()
    out.update({n: t for n, t in tensors.items() if n not in known})
    return {**{n: out[n] for n in relation.shapes if n in out}, **out}


def _find_box(
    view: hub_names.View, whole: tuple[int, ...], name: str
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...] | None]:
    """Return (start, shape, strides) of the box in a parameter that a view covers.

    Strides are in elements of the view's own row-major bytes if dimensions are swapped; None if they are not.

    Args:
        view: the part of a parameter that the Hub has as a tensor.
        whole: shape of the parameter.
        name: the tensor's name on the Hub, for the message.

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
            raise Unsupported(f'"{name}" is not a box of "{view.of}".', code="CKPT0316")
        free.remove(d)
        shape[d], strides[d] = n, w
    return tuple(start), tuple(shape), None if boxes.is_row_major(shape, strides) else tuple(strides)


def cut_into_hub_tensors(model: dict[str, TensorEntry], relation: hub_names.Relation) -> dict[str, TensorEntry]:
    """Return {name on the Hub: tensor} of weights. No bytes are moved: chunks refer to parts of the weights.

    Args:
        model: {name in memory: weight}.
        relation: how names in memory and on the Hub differ.

    Raises:
        Unsupported: a weight is compressed and must be split, or a part of it is not a box.
    """
    out = {k: crop_to_view(k, model[v.of], v) for k, v in relation.views.items()}
    for name, parts in relation.joined.items():
        first = model[parts[0][0]]
        chunks = Chunks(len(parts[0][1].part_shape))
        for of, link in parts:
            if model[of].dtype != first.dtype:
                raise Unsupported(
                    f'"{name}" is made of weights with dtypes {first.dtype} and {model[of].dtype}.', code="CKPT0332"
                )
            try:
                place_chunks(link, model[of], chunks, to_whole=False)
            except Compressed:
                raise _make_compressed_error(of) from None
        out[name] = TensorEntry(first.dtype, parts[0][1].part_shape, ("model", name), chunks)
    return out


def _make_compressed_error(name: str) -> Unsupported:
    """Make the error for a compressed weight of which a part is needed."""
    return Unsupported(
        f'"{name}" is compressed and must be split; convert the checkpoint to dcp first.', code="CKPT0324"
    )


def crop_to_view(name: str, t: TensorEntry, view: hub_names.View) -> TensorEntry:
    """Return a view of a parameter as a tensor of its own. No bytes are moved.

    Args:
        name: name of the tensor on the Hub.
        t: the parameter.
        view: shape, strides and offset of the tensor in it.

    Raises:
        Unsupported: the parameter is compressed, or the view is not a box.
    """
    if view.shape == t.shape and view.offset == 0 and view.strides == boxes.strides(t.shape):
        return t
    start, shape, _strides = _find_box(view, t.shape, name)
    if t.chunks.zstd:
        raise _make_compressed_error(view.of)
    item = ITEMSIZE[t.dtype]
    full = boxes.strides(t.shape)
    # which dimension of the view runs along which dimension of the tensor; one of length 1 runs along none
    along = [
        next((d for d in range(len(full)) if n > 1 and full[d] == s and shape[d] == n), None)
        for n, s in zip(view.shape, view.strides, strict=True)
    ]
    chunks = Chunks(len(view.shape))
    for c in t.chunks:
        both = boxes.intersect((c.start, c.shape), (start, shape))
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
