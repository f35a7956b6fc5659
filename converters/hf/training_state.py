"""training_state/: what a training job needs besides the weights of an hf folder, without a pickle.

    training_state/state.safetensors     or, in shards,
    training_state/state-0000i-of-0000n.safetensors      every tensor that is no weight, by canonical name
    training_state/values.json                           every value (ckpttool/formats/values.py)
    training_state/index.json                            written last

    {"version": 1,
     "source": {"layout": "dcp", "world_size": 3, "trainer": null},
     "files": {"state.safetensors": {"bytes": 81920}, "values.json": {"bytes": 700, "sha256": hex}},
     "origin": [[["trainer", "step"], ["step"]]],
     "weights": ["model.embed_tokens.weight", ...],
     "tied": {"lm_head.weight": "model.embed_tokens.weight"},
     "tensors": {"optim.state.norm.weight.exp_avg": ["float32", [36], ["optim", "state", "norm.weight", "exp_avg"]]},
     "values": ["trainer.step", ...]}

`source` and `origin` are those of the checkpoint that was written: with them it becomes the very files again that it
would have become at once. `weights` are the FQNs in memory, in the order of the source, those without bytes of their
own too; `tied` says whose those have. `tensors` and `values` are in the order of the source. A dtype that safetensors
does not hold (complex128, complex32) is stored as bytes (U8, one dimension); the index has dtype and shape.

Nothing here is trusted: the files there are, their headers, the index and values.json must agree on every name, dtype,
shape and length, and the weights beside them must be those that are listed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

from ckpttool import bounded_json
from ckpttool.errors import Corrupt, Unsafe, Unsupported, argument
from ckpttool.formats import safetensors_header, values
from ckpttool.index.checkpoint import (
    ITEMSIZE,
    MAX_NUMEL,
    Checkpoint,
    Chunks,
    Path,
    TensorEntry,
    Value,
    joined,
    same_bytes,
)
from ckpttool.index.draft import DraftFile
from ckpttool.index.names import find_misplaced_path, is_trainer_tree_readable, refuse_surrogates
from ckpttool.storage.source import Source

__all__ = ["FOLDER", "INDEX", "INDEX_VERSION", "SavedState", "draft", "read", "restore_saved_weights"]

FOLDER = "training_state"
INDEX = f"{FOLDER}/index.json"
INDEX_VERSION = 1
_VALUES = "values.json"
_SHARD = re.compile(r"state(-\d{5,}-of-\d{5,})?\.safetensors")
_MOST_INDEX, _MOST_VALUES = 512 << 20, 256 << 20
_KEYS = ("version", "source", "files", "origin", "weights", "tied", "tensors", "values")


class SavedState(NamedTuple):
    """The content of the folder. `files` are the shards and the index, by their names in the folder of the
    checkpoint."""

    tensors: dict[str, TensorEntry]
    values: dict[str, Value]
    files: list[str]
    world_size: int | None
    trainer: str | None


# --------------------------------------------------------------------------------------------------------- writing


def draft(
    ckpt: Checkpoint,
    tensors: Mapping[str, TensorEntry],
    groups: Sequence[list[str]],
    first: int,
    tied: Mapping[str, str],
) -> tuple[dict[str, TensorEntry], list[DraftFile], list[DraftFile]]:
    """Draft the files of the folder `training_state`.

    Args:
        ckpt: what is written, all of it.
        tensors: its tensors besides weights, {name: tensor with the dtype to write}.
        groups: names of the tensors in each shard; sorted in place.
        first: number of the first shard among the files of the destination.
        tied: {FQN of a weight without bytes of its own: FQN of the weight that has them}.

    Returns:
        ({name: tensor of the destination, with its place}, the shards that hold them, the records (values.json and
            index.json) that come after all other files).

    Raises:
        Unsupported: a value is of no kind that values.json holds, a name is not text, or a record would be too large.
    """
    refuse_surrogates(ckpt.values)
    n = len(groups)
    names = ["state.safetensors"] if n == 1 else [f"state-{i + 1:05d}-of-{n:05d}.safetensors" for i in range(n)]
    out: dict[str, TensorEntry] = {}
    shards: list[DraftFile] = []
    for i, group in enumerate(groups):
        group.sort(key=lambda k: safetensors_header.sort_key(k, _to_header_type(tensors[k].dtype, tensors[k].shape)[0]))
        head = safetensors_header.encode_header(
            [(k, *_to_header_type(tensors[k].dtype, tensors[k].shape)) for k in group], {"format": "pt"}
        )
        at = len(head)
        for k in group:
            t = tensors[k]
            out[k] = replace(t, chunks=Chunks.whole(t.shape, first + i, at, t.nbytes), coding="raw")
            at += t.nbytes
        shards.append(DraftFile(f"{FOLDER}/{names[i]}", at, head))
    from hashlib import sha256

    held = values.encode(ckpt.values)
    index = {
        "version": INDEX_VERSION,
        "source": {"layout": ckpt.layout, "world_size": ckpt.world_size, "trainer": ckpt.trainer},
        "files": {
            **{name: {"bytes": f.size} for name, f in zip(names, shards, strict=True)},
            _VALUES: {"bytes": len(held), "sha256": sha256(held).hexdigest()},
        },
        "origin": [[list(a), list(b)] for a, b in ckpt.origin.items()],
        "weights": [joined(t.path[1:]) for t in ckpt.tensors.values() if t.path[0] == "model"],
        "tied": dict(tied),
        "tensors": {k: [t.dtype, list(t.shape), list(t.path)] for k, t in tensors.items()},
        "values": list(ckpt.values),
    }
    text = bounded_json.encode(index, separators=(",", ":")) + b"\n"
    for name, data, most in ((_VALUES, held, _MOST_VALUES), (INDEX, text, _MOST_INDEX)):
        try:
            if len(data) > most:
                raise Unsafe(f"{name} would have {len(data)} bytes; at most {most} are read", code="CKPT0704")
            bounded_json.refuse_bomb(data, name)
        except Unsafe as e:
            raise Unsupported(
                f"{str(e).rstrip('.')}. Such a record is refused by every reader. Keep less: "
                f"{argument('only', ['model', 'optim'])}.",
                code="CKPT0316",
            ) from None
    return out, shards, [DraftFile(f"{FOLDER}/{_VALUES}", len(held), held), DraftFile(INDEX, len(text), text)]


def _to_header_type(dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Return the (dtype, shape) of a tensor in the safetensors header: its own, or those of its bytes if safetensors
    does not have the dtype."""
    if dtype in safetensors_header.CODES:
        return dtype, shape
    return "uint8", (prod(shape) * ITEMSIZE[dtype],)


# --------------------------------------------------------------------------------------------------------- reading


def read(source: Source, first: int) -> SavedState:
    """Read the training state of an hf folder; of shards, only headers are read.

    Args:
        source: the folder of the checkpoint.
        first: number of the first shard among the checkpoint's files.

    Raises:
        Corrupt, Unsafe: it is incomplete, damaged, or contradicts itself.
        Unsupported: a newer ckpttool wrote it.
    """
    there = source.list(FOLDER)
    if "index.json" not in there:
        raise Corrupt(
            f"{source.root}/{FOLDER} has no index.json: it is incomplete, or of another program. Fetch it again, or "
            "remove it to read the weights alone.",
            code="CKPT0401",
        )
    index, what = _read_index_record(source)
    files = _check_files(index["files"], there, source, what)
    tensors = _read_tensors(index["tensors"], files, source, first, what)
    held = _read_values(index, source)
    paths = [t.path for t in tensors.values()] + [v.path for v in held.values()]
    if (path := find_misplaced_path(paths)) is not None:
        raise Corrupt(f'{what}: "{joined(path)}" is of no component, or lies in another entry.', code="CKPT0406")
    if len(set(paths)) != len(paths) or tensors.keys() & held.keys():
        raise Corrupt(f"{what}: a value has the name of a tensor.", code="CKPT0406")
    _parse_weights(index, what)
    _parse_origin(index["origin"], what)
    parsed = index["source"]
    if not isinstance(parsed, dict):
        raise Corrupt(f"{what}: source is not an object.", code="CKPT0406")
    world, trainer = parsed.get("world_size"), parsed.get("trainer")
    return SavedState(
        tensors,
        held,
        [*(f"{FOLDER}/{f}" for f in files), INDEX],
        world if type(world) is int and 0 < world < 1 << 20 else None,
        trainer if isinstance(trainer, str) else None,
    )


def _read_index_record(source: Source) -> tuple[dict[str, object], str]:
    """Return (index.json, what it is called in messages).

    Raises:
        Corrupt: it is damaged or no index. Unsupported: it is of another version.
    """
    what = f"{source.root}/{INDEX}"
    data = source.read_all(INDEX, _MOST_INDEX)
    index = bounded_json.parse(data, what)
    if not isinstance(index, dict) or not {*_KEYS} <= {*index}:
        raise Corrupt(f"{what}: not an index of a training state.", code="CKPT0406")
    if index["version"] != INDEX_VERSION:
        raise Unsupported(
            f"{what}: version {str(index['version'])[:20]}; this ckpttool reads version {INDEX_VERSION}. "
            "Use a newer one.",
            code="CKPT0329",
        )
    return index, what


def _parse_weights(index: dict[str, Any], what: str) -> tuple[list[str], dict[str, str]]:
    """Return (FQNs of the weights, {FQN of a tied weight: FQN of the weight whose bytes it has}) from index.json.
    `what` is the name of that file in messages.

    Raises:
        Corrupt: they are no such lists, or contradict each other.
    """
    weights, tied = index["weights"], index["tied"]
    if not _is_text_list(weights) or len(set(weights)) != len(weights):
        raise Corrupt(f"{what}: weights are not names, or one is there twice.", code="CKPT0406")
    own = {*weights} - {*tied} if isinstance(tied, dict) else None
    if own is None or len(own) != len(weights) - len(tied) or not {*map(str, tied.values())} <= own:
        raise Corrupt(f"{what}: tied weights that are not listed.", code="CKPT0406")
    return weights, tied


def _is_text_list(x: object) -> bool:
    """Return whether a value is a list of strings."""
    return isinstance(x, list) and all(type(k) is str for k in x)


def _parse_path(x: object, what: str) -> Path:
    """Return the path that a list in index.json stands for; `what` names that file in messages.

    Raises:
        Corrupt: `x` is not a list of names and positions.
    """
    if not isinstance(x, list) or not x or not all(type(k) is str or (type(k) is int and k >= 0) for k in x):
        raise Corrupt(f"{what}: {str(x)[:80]} is not a path.", code="CKPT0406")
    return tuple(x)


def _parse_origin(rows: object, what: str) -> dict[Path, Path]:
    """Return {canonical path: path in the user's own tree} from the rows of index.json, which `what` names in messages.

    Raises:
        Corrupt: a row is not two paths.
    """
    if not isinstance(rows, list) or not all(isinstance(r, list) and len(r) == 2 for r in rows):
        raise Corrupt(f"{what}: origin is not pairs of paths.", code="CKPT0406")
    return {_parse_path(a, what): _parse_path(b, what) for a, b in rows}


def _check_files(said: object, there: list[str], source: Source, what: str) -> list[str]:
    """Check the files in the folder against index.json, and return the names of the shards.

    Args:
        said: {file: {"bytes": size, ...}} as index.json has it.
        there: names of the files in the folder.
        source: the checkpoint.
        what: name of index.json in messages.

    Raises:
        Corrupt: files are missing, too many, or of another length. Unsafe: a name leads out of the folder.
    """
    if not isinstance(said, dict) or _VALUES not in said:
        raise Corrupt(f"{what}: files does not list {_VALUES}.", code="CKPT0406")
    for name, row in said.items():
        if "/" in name or "\\" in name or name in ("", ".", ".."):
            raise Unsafe(f"{what} names {name!a}, which leads out of {FOLDER}.", code="CKPT0702")
        if name != _VALUES and not _SHARD.fullmatch(name):
            raise Corrupt(f"{what} names {name!a}, which is not a file of a training state.", code="CKPT0406")
        if name not in there:
            raise Corrupt(
                f"{source.root}/{FOLDER}/{name} is missing. The copy is incomplete; fetch the file again.",
                code="CKPT0401",
            )
        size = source.size(f"{FOLDER}/{name}")
        if not isinstance(row, dict) or row.get("bytes") != size:
            raise Corrupt(
                f"{source.root}/{FOLDER}/{name} has {size} bytes, which is not what index.json says. The copy is "
                "incomplete, or of another step; fetch the folder again.",
                code="CKPT0409",
            )
    if extra := [n for n in there if n.endswith(".safetensors") and n not in said]:
        raise Corrupt(
            f"{source.root}/{FOLDER}/{extra[0]} is not listed in index.json: files of two saves are mixed.",
            code="CKPT0409",
        )
    return [n for n in said if n != _VALUES]


def _read_tensors(rows: object, files: list[str], source: Source, first: int, what: str) -> dict[str, TensorEntry]:
    """Return {name: tensor} of the shards, which must be those of index.json, in its order.

    Args:
        rows: {name: [dtype, shape, path]} as index.json has it.
        files: the shards, by name in the folder.
        source: the checkpoint.
        first: number of the first shard among the checkpoint's files.
        what: name of index.json in messages.

    Raises:
        Corrupt: index and shards differ, or a tensor is a weight.
    """
    found: dict[str, tuple[int, safetensors_header.Slot]] = {}
    safetensors_header.prefetch_headers(source, [f"{FOLDER}/{file}" for file in files])
    for i, file in enumerate(files):
        for name, slot in safetensors_header.read_slots(source, f"{FOLDER}/{file}").items():
            if name in found:
                raise Corrupt(
                    f'"{name}" is in {files[found[name][0]]} and in {file} of {source.root}/{FOLDER}.', code="CKPT0411"
                )
            found[name] = i, slot
    if not isinstance(rows, dict):
        raise Corrupt(f"{what}: tensors is not an object.", code="CKPT0406")
    if odd := found.keys() ^ rows.keys():
        name = min(odd)
        where = "the files, but not in index.json" if name in found else "index.json, but in no file"
        raise Corrupt(f'{source.root}/{FOLDER}: "{name}" is in {where}. They are not from one save.', code="CKPT0411")
    out: dict[str, TensorEntry] = {}
    for name, row in rows.items():
        i, slot = found[name]
        if not isinstance(row, list) or len(row) != 3 or not isinstance(row[0], str) or row[0] not in ITEMSIZE:
            raise Corrupt(f'{what}: the entry of "{name}" is damaged.', code="CKPT0406")
        dtype, shape, path = row[0], row[1], _parse_path(row[2], what)
        if joined(path) != name:
            raise Corrupt(f'{what}: "{name}" has the path {str(path)[:80]}.', code="CKPT0406")
        if path[0] == "model":
            raise Corrupt(f'{what}: "{name}" is a weight; those lie beside {FOLDER}, not in it.', code="CKPT0406")
        if not isinstance(shape, list) or not all(type(k) is int and 0 <= k <= MAX_NUMEL for k in shape):
            raise Corrupt(f'{what}: "{name}" has shape {str(shape)[:80]}.', code="CKPT0406")
        if (slot.dtype, slot.shape) != _to_header_type(dtype, tuple(shape)):
            raise Corrupt(
                f'{what} says "{name}" is {dtype} {shape}; it is {slot.dtype} {list(slot.shape)} in {files[i]}. They '
                "are not from one save.",
                code="CKPT0412",
            )
        chunks = Chunks.whole(shape, first + i, slot.offset, slot.length)
        out[name] = TensorEntry(dtype, tuple(shape), path, chunks)
    return out


def _read_values(index: dict[str, Any], source: Source) -> dict[str, Value]:
    """Return {name: value} of values.json, in the order of index.json (`index`).

    Raises:
        Corrupt: the file was altered, or holds other values than are listed.
    """
    from hashlib import sha256

    what = f"{source.root}/{FOLDER}/{_VALUES}"
    data = source.read_all(f"{FOLDER}/{_VALUES}", _MOST_VALUES)
    if sha256(data).hexdigest() != index["files"][_VALUES].get("sha256"):
        raise Corrupt(f"{what} was altered after it was written; take another copy.", code="CKPT0405")
    found = values.decode(data, what)
    order = index["values"]
    if not _is_text_list(order) or sorted(order) != sorted(found):
        raise Corrupt(f"{what} holds other values than index.json lists; they are not from one save.", code="CKPT0409")
    return {n: found[n] for n in order}


def restore_saved_weights(ckpt: Checkpoint, source: Source) -> Checkpoint:
    """Return the checkpoint with its weights as they were when it was written: in that order, under their names in
    memory, tied ones under both names, and with the keys of the user's own tree.

    Raises:
        Corrupt: the weights are not those that the training state was written with, or its index is damaged.
    """
    index, what = _read_index_record(source)
    weights, tied = _parse_weights(index, what)
    model = {joined(t.path[1:]): t for t in ckpt.tensors.values() if t.path[0] == "model"}
    rest = {n: t for n, t in ckpt.tensors.items() if t.path[0] != "model"}
    if model:
        for name, kept in tied.items():
            if name not in model and kept in model:
                model[name] = replace(model[kept], path=("model", name))
        listed = {n: model[n] for n in weights if n in model}
        odd = [n for n in weights if n not in model]
        odd += [n for n, t in model.items() if n not in listed and not any(same_bytes(t, k) for k in listed.values())]
        if odd:
            parsed = next((n for n in reversed(ckpt.notes) if n.startswith("names are kept")), "")
            raise Corrupt(
                f"{what} was written with other weights than lie beside it: {len(odd)} names differ, first "
                f'"{odd[0]}"{f" ({parsed})" if parsed else ""}. Remove {FOLDER} to read the weights alone.',
                code="CKPT0409",
            )
        model = listed
    out = replace(ckpt, tensors={**{joined(t.path): t for t in model.values()}, **rest})
    out.origin = _parse_origin(index["origin"], what)
    if not is_trainer_tree_readable(out):
        out.origin = {}
    return out
