"""What DeepSpeed's layouts have in common: where a save lies, `*_model_states.pt`, and the state beside the tensors.

    DIR/latest                                       the tag of the newest save, no newline; written last
    DIR/<tag>/zero_pp_rank_<r>_mp_rank_00_model_states.pt       stage 3, one a rank
    DIR/<tag>/mp_rank_00_model_states.pt                        stages 0, 1, 2
    DIR/<tag>/[bf16_]zero_pp_rank_<r>_mp_rank_00_optim_states.pt    stages 1, 2, 3; bf16_ when the engine runs bf16
    DIR/<tag>/zero/<fqn>/fp32.pt ...                            a universal checkpoint (universal.py)

A model file is a dict: `module` the state dict (stage 3: (0,) placeholders, and real buffers), `buffer_names`,
`param_shapes` [{fqn: shape}] by sub-group (stage 3) or param group, in the order of the flat tensors,
`frozen_param_shapes`, `frozen_param_fragments`, `shared_params` {alias: owner} (rank 0 only), `lr_scheduler`, counters,
`ds_config`, and whatever the user gave as client_state, merged flat into the same dict.

Canonical names: `lr_scheduler` -> scheduler, the loss scaler of an fp16 engine -> scaler, `global_steps`,
`global_samples`, `skipped_steps` -> trainer; everything else of the dict, ds_config and buffer_names among it, -> extra
(or what names.py makes of it). What ranks disagree on (random states) is kept as extra.per_rank.<r>.<key>.

Sources: deepspeed 0.19.8, runtime/engine.py (_common_checkpoint_state, _save_checkpoint, _get_ckpt_name,
_load_checkpoint), runtime/fp16/loss_scaler.py, runtime/zero/config.py (ZeroStageEnum).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from ckpttool.bounded_json import parse
from ckpttool.errors import Corrupt, Unsafe, Unsupported, UsageError
from ckpttool.formats import stored_tensors, torch_zip
from ckpttool.formats.pickles import Global, Opaque, enum_members, short
from ckpttool.formats.stored_tensors import StoredTensor
from ckpttool.index import boxes
from ckpttool.index.checkpoint import (
    ITEMSIZE,
    Checkpoint,
    Chunks,
    Extent,
    Path,
    Record,
    TensorEntry,
    same_bytes,
    shape_of,
)
from ckpttool.index.fqns import strip_wrappers
from ckpttool.index.names import canonical, of_the_rest
from ckpttool.layouts import Place, ReadOptions, checkpoint_of
from ckpttool.storage.source import Source

__all__ = [
    "DERIVED", "MAYBE", "MODEL", "MODEL3", "OPTIM", "OWN", "SCALERS", "STAGE", "Cut", "File", "Reading", "alike",
    "from_cuts", "is_save", "saves", "scaler", "setting", "shapes_of",
]  # fmt: skip

MODEL3 = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt")
OPTIM = re.compile(r"(bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")

STAGE = Global("deepspeed.runtime.zero.config", "ZeroStageEnum")
SCALERS = "deepspeed.runtime.fp16.loss_scaler"

#: Keys of a model file that follow from the tensors and the number of ranks, or that have names of their own here.
OWN = frozenset((
    "module", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params",
    "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_version",
))  # fmt: skip
#: Keys that are there in every file, None where the engine has no such thing.
MAYBE = ("lr_scheduler", "data_sampler", "random_ltd")
#: Keys on which all ranks of one save agree.
_SAME = ("global_steps", "skipped_steps", "dp_world_size", "mp_world_size", "param_shapes")


def _rank_of(name: str) -> int | None:
    """The data parallel rank of a file with one a rank."""
    model, optim = MODEL3.fullmatch(name), OPTIM.fullmatch(name)
    return int(model[1]) if model else int(optim[2]) if optim else None


class Save(NamedTuple):
    """One save: the folder below the source's root ("" or "global_step3/"), the files in it."""

    folder: str
    names: list[str]

    def files(self, pattern: re.Pattern[str], group: int) -> dict[int, list[str]]:
        """{number in a group of the pattern: files that match}, in the order of the numbers."""
        found: dict[int, list[str]] = {}
        for n in self.names:
            if m := pattern.fullmatch(n):
                found.setdefault(int(m[group]), []).append(n)
        return dict(sorted(found.items()))


def is_save(names: Iterable[str]) -> bool:
    """Whether a folder with these entries is one save."""
    return any(MODEL3.fullmatch(n) or MODEL.fullmatch(n) or OPTIM.fullmatch(n) for n in names)


def saves(source: Source) -> dict[str, list[str]]:
    """{tag: entries of its folder} of the saves in a folder."""
    out = {}
    for name in source.list()[:2000]:
        inside = source.list(name)
        if is_save(inside):
            out[name] = inside
    return out


def find(source: Source, tag: str | None, latest: str = "latest") -> Save:
    """The save a folder stands for: it is one, or its file `latest` names one, or there is one alone.

    Raises:
        Corrupt: the tag is not there. UsageError: there are several and none is named.
    """
    names = source.list()
    if is_save(names) and tag is None:
        return Save("", names)
    said = f"--tag {tag}"
    if tag is None and source.exists(latest):
        tag = source.read_all(latest, 4096).decode("utf-8", "replace").strip()
        said = f"the file {latest} ({tag!r})"
    if tag is not None:
        if not tag or tag in (".", "..") or "/" in tag or "\0" in tag:
            raise Unsafe(f"{source.root}/{latest} names {tag[:80]!r}, which is not a folder in the same place.")
        inside = source.list(tag)
        if not is_save(inside):
            others = ", ".join(saves(source)) or "none"
            raise Corrupt(
                f"{source.root}: the save that {said} points to is missing. The save was not finished, or the folder was "
                f"not copied whole; saves here: {others}. Choose one with --tag."
            )
        return Save(tag + "/", inside)
    there = saves(source)
    if len(there) != 1:
        raise UsageError(
            f"{source.root} has no file {latest} and {len(there)} saves: {', '.join(there)}. Choose one with --tag."
        )
    tag, inside = next(iter(there.items()))
    return Save(tag + "/", inside)


def refuse_foreign(save: Save, where: str) -> None:
    """Refuse what is not data parallel alone.

    Raises:
        Unsupported: tensor or pipeline parallel ranks, experts in files of their own, optimizer state on NVMe.
    """
    for n in save.names:
        m = MODEL3.fullmatch(n) or MODEL.fullmatch(n) or OPTIM.fullmatch(n)
        if m and int(m[m.re.groups]):
            raise Unsupported(
                f"{where}{n}: written by model parallel rank {int(m[m.re.groups])}. ckpttool reads saves of data "
                "parallel training; merge the model parallel ranks with the trainer's own tools first."
            )
        if n.startswith(("expp_rank_", "layer_")) and n.endswith(".pt"):
            raise Unsupported(
                f"{where}{n}: {'experts' if 'exp' in n else 'pipeline stages'} in files of their own, which ckpttool "
                "does not read."
            )
    if "offloaded_tensors" in save.names:
        raise Unsupported(
            f"{where}offloaded_tensors: the optimizer state was on NVMe and was saved as raw swap files, which only the "
            "same job at the same paths can read. Save once with offload_optimizer on cpu, or none."
        )


# --------------------------------------------------------------------------------------------------------- reading


class File:
    """One torch file of a save, unpickled as data; `number` is its place in the list of the checkpoint's files."""

    def __init__(self, source: Source, name: str, number: int, dict_only: bool = True) -> None:
        self.source, self.name, self.number = source, name, number
        self.what = f"{source.root}/{name}"
        self.read_at = source.reader_of(name)
        tree = torch_zip.read(self.read_at, 0, source.size(name), self.what, _stand_ins(self.what))
        if dict_only and not isinstance(tree, dict):
            raise Corrupt(f"{self.what} holds a {type(tree).__name__}, not a dict; DeepSpeed did not write it.")
        self.tree: Any = tree

    def get(self, key: str, kind: type | tuple[type, ...], inside: dict[str, Any] | None = None) -> Any:
        """A value of the dict.

        Raises:
            Corrupt: it is missing or of another type.
        """
        found = (self.tree if inside is None else inside).get(key)
        if not isinstance(found, kind) or isinstance(found, bool):
            raise Corrupt(
                f"{self.what}: {key!r} is {'missing' if found is None else short(found)}. The file is not a whole "
                "DeepSpeed save of this kind."
            )
        return found

    def scalar(self, t: StoredTensor) -> float | int | None:
        """The value of a 0-dim tensor, None for a dtype that no counter has."""
        found = None if t.shape else stored_tensors.inlined(t, self.read_at, self.what)
        return None if found is None else stored_tensors.number_in(found.dtype, found.data)


def _stand_ins(what: str) -> dict[tuple[str, str], Any]:
    def stage(n: Any = 0) -> int:
        if type(n) is not int or not 0 <= n <= 3:
            raise Corrupt(f"{what}: ZeRO stage {short(n)}.")
        return n

    named = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3}
    return {(STAGE.module, STAGE.name): stage, **enum_members((stage, named))}


@lru_cache(1 << 16)
def _boxes(shape: tuple[int, ...], first: int, last: int) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """(start, shape, elements) of the boxes of a flat range."""
    return [(start, size, prod(size)) for start, size in boxes.flat_to_boxes(shape, first, last)]


class Cut(NamedTuple):
    """Elements [first, last) of a flattened tensor, at a byte of a file."""

    first: int
    last: int
    file: int
    offset: int


def from_cuts(shape: tuple[int, ...], dtype: str, path: Path, cuts: Iterable[Cut]) -> TensorEntry:
    """A tensor whose flat ranges lie at some places."""
    chunks, item = Chunks(len(shape)), ITEMSIZE[dtype]
    for first, last, file, offset in cuts:
        for start, size, n in _boxes(shape, first, last):
            chunks.add(start, size, file, offset, n * item)
            offset += n * item
    return TensorEntry(dtype, shape, path, chunks)


def shapes_of(file: File, key: str = "param_shapes") -> list[dict[str, tuple[int, ...]]]:
    """param_shapes, checked."""
    found = file.get(key, (list, dict))
    found = [found] if isinstance(found, dict) else found  # before 0.4: one group
    for group in found:
        if not isinstance(group, dict) or not all(isinstance(k, str) and _is_shape(v) for k, v in group.items()):
            raise Corrupt(f"{file.what}: {key} is not a list of names and shapes.")
    names = [n for g in found for n in g]
    if len(set(names)) != len(names):
        twice = next(n for n in names if names.count(n) > 1)
        raise Corrupt(f'{file.what}: {key} lists "{twice}" twice.')
    groups: list[dict[str, tuple[int, ...]]] = found
    return groups


def _is_shape(x: Any) -> bool:
    return isinstance(x, tuple) and len(x) <= 64 and all(type(n) is int and n >= 0 for n in x)


def refuse_parallel(file: File) -> None:
    """Refuse a model file of one of several model parallel ranks, whatever files are there.

    Raises:
        Unsupported: with the degrees that the file states.
    """
    stated = file.tree.get("checkpoint_parallel_dimensions")
    degrees = {"mp_world_size": file.tree.get("mp_world_size"), **(stated if isinstance(stated, dict) else {})}
    if more := {k: n for k, n in degrees.items() if n not in (None, 1)}:
        raise Unsupported(
            f"{file.what}: {short(more)}: a part of a model that was trained with tensor or pipeline parallelism. ckpttool "
            "reads saves of data parallel training; merge the model parallel ranks with the trainer's own tools first."
        )


def setting(config: Any, key: str) -> Any:
    """A key of zero_optimization in a ds_config, None where it is not given."""
    section = config.get("zero_optimization") if isinstance(config, dict) else None
    return section.get(key) if isinstance(section, dict) else None


def refuse_mixed(files: Sequence[File]) -> None:
    """Refuse model files of different saves.

    Raises:
        Corrupt: with the rank that differs from rank 0.
    """
    for f in files[1:]:
        for key in _SAME:
            a, b = files[0].tree.get(key), f.tree.get(key)
            if a != b:
                shown = f"{short(b)}, rank 0 says {short(a)}" if key != "param_shapes" else "other than rank 0's"
                raise Corrupt(
                    f"{f.what}: {key} is {shown}. The files are of different saves; fetch all of one save again."
                )


def placeholder(x: Any) -> bool:
    """Whether an entry of `module` stands for a parameter that lies elsewhere."""
    return isinstance(x, StoredTensor) and x.shape == (0,)


def tied(files: Sequence[File]) -> dict[str, str]:
    """{alias: owner}; DeepSpeed lists them in the file of rank 0 only."""
    out: dict[str, str] = {}
    for f in files:
        shared = f.tree.get("shared_params") or {}
        if not isinstance(shared, dict) or not all(isinstance(x, str) for kv in shared.items() for x in kv):
            raise Corrupt(f"{f.what}: shared_params is {short(shared)}.")
        out.update(shared)
    return out


def alike(a: Any, b: Any, in_a: File | None = None, in_b: File | None = None) -> bool:
    """Whether two ranks' values are the same: their pickles and the CRC32s of their tensors, or, in the legacy format,
    which has none, their bytes."""
    if isinstance(a, StoredTensor) and isinstance(b, StoredTensor):
        if (a.dtype, a.shape, a.strides) != (b.dtype, b.shape, b.strides):
            return False
        if a.storage.crc32 is not None:
            return (a.at, a.storage.crc32) == (b.at, b.storage.crc32)
        return in_a is not None and in_b is not None and in_a.read_at(*a.extent) == in_b.read_at(*b.extent)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(alike(v, b[k], in_a, in_b) for k, v in a.items())
    if isinstance(a, (list, tuple)) and type(a) is type(b):
        return len(a) == len(b) and all(alike(x, y, in_a, in_b) for x, y in zip(a, b, strict=True))
    return bool(a == b) or (a != a and b != b)


def scaler(optim: dict[str, Any]) -> dict[Path, Any]:
    """Leaves of a loss scaler that scales; the static one with factor 1 of bf16 and fp32 engines says nothing."""
    found = optim.get("loss_scaler")
    state = found.state if isinstance(found, Opaque) else None
    if not isinstance(state, dict) or not (state.get("dynamic") or state.get("cur_scale", 1) != 1):
        return {}
    out: dict[Path, Any] = {("scaler", str(k)): v for k, v in state.items()}
    out["scaler", "overflow"] = bool(optim.get("overflow"))
    return out


#: What is said of the weights that a bf16 or fp16 engine computes with.
DERIVED = "model weights are the fp32 masters; the low-precision weights the engine computes with follow from them by rounding"


#: What every rank's model file says of the model.
_OF_MODEL = {
    "module", "buffer_names", "param_shapes", "frozen_param_shapes", "shared_params", "frozen_param_fragments",
}  # fmt: skip
_TRAINER = ("global_step", "epoch", "max_steps", "num_train_epochs", "num_input_tokens_seen", "train_batch_size")


def _json(source: Source, name: str) -> dict[str, Any]:
    data = source.read_all(name, 64 << 20)
    try:
        found = parse(data, name)
    except (Corrupt, Unsafe):
        return {}
    return found if isinstance(found, dict) else {}


class Reading:
    """What is put together while the files of one save are read."""

    def __init__(self, where: Place, options: ReadOptions, latest: str = "latest") -> None:
        self.source, self.options = where.source, options
        self.save = find(where.source, options.tag, latest)
        self.where = f"{self.source.root}/{self.save.folder}"
        refuse_foreign(self.save, self.where)
        self.source.prefetch_ends(self.save.folder + n for n in self.save.names if n.endswith(".pt"))
        self.names: list[str] = []
        self.records: dict[tuple[int, int], Record] = {}
        self.notes: list[str] = []
        self.masters: dict[str, TensorEntry] = {}  # trainable parameters, wherever their weights lie
        self.model: dict[str, TensorEntry] = {}
        self.optim: dict[Path, Any] = {}
        self.rest: dict[Path, Any] = {}

    def file(self, name: str, dict_only: bool = True) -> File:
        """Unpickle a file of the save."""
        self.names.append(self.save.folder + name)
        out = File(self.source, self.names[-1], len(self.names) - 1, dict_only)
        first = torch_zip.saved_as(out.read_at, self.source.size(out.name))
        if (
            first is not None
            and not self.options.allow_equal_ranks
            and _rank_of(f"{first}.pt") not in (None, _rank_of(name))
        ):
            raise Corrupt(
                f"{out.what}: the file was saved under the name {short(first)}, by another rank. It was copied over the file of "
                "this rank, or exchanged with it; fetch the files again. If files are renamed on purpose, use "
                "--allow-equal-ranks."
            )
        return out

    def seen(self, file: File, t: StoredTensor) -> StoredTensor:
        """The tensor; the CRC32 of its storage is checked when it is read."""
        s = t.storage
        if s.crc32 is not None:
            self.records[file.number, s.offset] = Record(Extent(file.number, s.offset, s.length), s.crc32)
        return t

    def whole(self, file: File, t: StoredTensor, path: Path) -> TensorEntry:
        """A tensor that lies in one file."""
        self.seen(file, t)
        strides = None if t.contiguous else t.strides
        return TensorEntry(t.dtype, t.shape, path, Chunks.whole(t.shape, file.number, *t.extent, strides))

    def take(self, path: Path, value: Any, file: File) -> None:
        """Everything below a key, to where `path` says."""
        found, crcs = stored_tensors.leaves(value, path, file.number, file.read_at, file.what)
        (self.optim if path[0] == "optim" else self.rest).update(found)
        for r in crcs:
            self.records[r.extent.file, r.extent.offset] = r

    def ranks(self, pattern: re.Pattern[str], group: int, world: int, what: str) -> list[str]:
        """The one file of every rank 0 .. world-1.

        Raises:
            Corrupt: with the rank that has none or two, or that should not be there.
        """
        found = self.save.files(pattern, group)
        for r, names in found.items():
            if len(names) > 1:
                raise Corrupt(
                    f"{self.where}: {' and '.join(names)} are both the {what} file of rank {r}; one of them is of another "
                    "save. Remove it."
                )
        kinds = {m[1] for names in found.values() for n in names if (m := pattern.fullmatch(n)) and pattern is OPTIM}
        if len(kinds) > 1:
            raise Corrupt(
                f"{self.where}: {what} files with and without the prefix bf16_; one engine writes one kind. Some are of "
                "another save."
            )
        missing = [r for r in range(world) if r not in found]
        if missing:
            example = next(iter(found.values()))[0] if found else ""
            raise Corrupt(
                f"{self.where}: the save is of {world} ranks, and {len(missing)} {what} files are missing, first that of "
                f"rank {missing[0]}" + (f" (named like {example})" if example else "") + ". Fetch them."
            )
        if more := [names[0] for r, names in found.items() if r >= world]:
            raise Corrupt(f"{self.where}: the save is of {world} ranks, but {more[0]} is there. It is of another save.")
        return [found[r][0] for r in range(world)]

    def models3(self) -> list[File]:
        """The model files of stage 3, one a rank, of one save."""
        found = self.save.files(MODEL3, 1)
        if not found:
            self.ranks(MODEL3, 1, len(self.save.files(OPTIM, 2)), "model")
        first = self.file(next(iter(found.values()))[0])
        world = first.get("dp_world_size", int)
        if not 0 < world <= 1 << 20:
            raise Corrupt(f"{first.what}: dp_world_size is {world}.")
        names = self.ranks(MODEL3, 1, world, "model")
        out = [first, *map(self.file, names[1:])]
        refuse_mixed(out)
        return out

    def take_module(self, models: list[File]) -> None:
        """The weights, in the order of `module`: masters, frozen parameters, buffers, tied ones; and what lies beside.

        Raises:
            Corrupt: a placeholder stands for nothing.
        """
        first = models[0]
        refuse_parallel(first)
        if "buffer_names" not in first.tree:
            raise Corrupt(
                f'{first.what} has no "buffer_names", which DeepSpeed writes into every file of model states, and by which '
                "it knows one. The file is damaged, or another program changed it; fetch it again."
            )
        for other in models[1:]:
            if odd := sorted(_OF_MODEL & (first.tree.keys() ^ other.tree.keys())):
                has, lacks = (first, other) if odd[0] in first.tree else (other, first)
                raise Corrupt(
                    f'{lacks.what} has no "{odd[0]}", and {has.what} has one. Every rank writes it, so the file is damaged or of '
                    "another version; fetch it again."
                )
            if other.tree.get("buffer_names") != first.tree["buffer_names"]:
                raise Corrupt(
                    f"{other.what}: buffer_names is {short(other.tree.get('buffer_names'))}, and {short(first.tree['buffer_names'])} "
                    f"in {first.what}. Every rank writes the same, so one of the files is damaged or of another model."
                )
        module = first.get("module", dict)
        aliases = tied(models)
        frozen = first.tree.get("frozen_param_shapes") or {}
        buffers = first.tree.get("buffer_names") or []
        low: set[str] = set()
        differing: list[str] = []
        if not isinstance(buffers, list) or not all(isinstance(n, str) for n in buffers):
            raise Corrupt(f"{first.what}: buffer_names is {short(buffers)}.")
        if not isinstance(frozen, dict) or not all(_is_shape(s) for s in frozen.values()):
            raise Corrupt(f"{first.what}: frozen_param_shapes is {short(frozen)}.")
        for alias in aliases:
            if alias in self.masters or alias in frozen or alias in buffers:
                raise Corrupt(f'{first.what}: "{alias}" is in shared_params, but has weights of its own as well.')
        for name, t in module.items():
            if not isinstance(name, str) or not isinstance(t, StoredTensor):
                raise Unsupported(
                    f"{first.what}: module holds {short(t)} under {short(name)}, which is not a tensor (extra state of a "
                    "module); ckpttool does not carry it."
                )
            if name in self.masters:
                self.model[name] = self.masters[name]
                if not placeholder(t) and t.shape != self.masters[name].shape:
                    raise Corrupt(
                        f'{first.what}: "{name}" is {t.shape} in module and {self.masters[name].shape} in param_shapes.'
                    )
                if t.dtype != self.masters[name].dtype:
                    low.add(t.dtype)
            elif name in aliases:
                continue
            elif name in frozen:
                self.model[name] = self._frozen(name, frozen[name], models)
            elif placeholder(t) and name not in buffers:
                raise Corrupt(
                    f'{first.what}: "{name}" is a placeholder in module, but neither param_shapes nor frozen_param_shapes '
                    "names it."
                )
            else:
                if self.masters and name not in buffers and "shared_params" not in first.tree:
                    raise Corrupt(
                        f'{first.what}: "{name}" is in module, but not in param_shapes, and "shared_params" is missing, which would say '
                        "whether it is tied to a weight that is. The file is damaged, or of DeepSpeed before 0.9: resume it "
                        "with a later release and save it again."
                    )
                self.model[name] = self.whole(first, t, ("model", name))
                others = [(f, f.tree["module"].get(name)) for f in models[1:] if isinstance(f.tree.get("module"), dict)]
                if t.numel and any(not alike(t, o, first, f) for f, o in others):
                    differing.append(name)
        self.model.update({n: t for n, t in self.masters.items() if n not in self.model})
        for name, shape in frozen.items():
            if name not in self.model:
                self.model[name] = self._frozen(name, shape, models)
        for alias, owner in aliases.items():
            if owner not in self.model:
                raise Corrupt(f'{first.what}: "{alias}" is tied to "{owner}", which is not there.')
            self.model[alias] = replace(self.model[owner], path=("model", alias))
        self.model = {n: self.model[n] for n in [*(n for n in module if n in self.model), *self.model]}
        if low:
            self.notes.append(DERIVED)
        if differing:
            self.notes.append(f"ranks differ in the buffers {', '.join(differing[:4])}; rank 0's are taken")
        told = (
            any(map(placeholder, module.values())) or setting(first.tree.get("ds_config"), "stage") == 2
        )  # stages 0 and 1 have no such list
        if told and first.tree.get("frozen_param_shapes", {}) is None:
            self.notes.append(
                "frozen parameters, if the model has any, were left out when this was saved (exclude_frozen_parameters); "
                "they must come from elsewhere"
            )
        self.take_beside(models)

    def take_beside(self, files: list[File]) -> None:
        """Everything beside module and optimizer; ranks that agree give one."""
        first = files[0]
        differing: list[str] = []
        for key in dict.fromkeys(k for f in files for k in f.tree):
            if not isinstance(key, str):
                raise Unsupported(f"{first.what}: a key {short(key)} that is not text.")
            if key in OWN:
                continue
            if key not in first.tree:
                for r, f in enumerate(files):
                    if key in f.tree:
                        self.take(("per_rank", str(r), key), f.tree[key], f)
                differing.append(key)
                continue
            value = first.tree[key]
            if key in MAYBE and value is None:
                continue
            # the user's own "model" or "optim" is neither
            path: Path = ("extra", key) if key in ("model", "optim") else (key,)
            self.take(path, value, first)
            others = [
                (r, f) for r, f in enumerate(files) if r and key in f.tree and not alike(value, f.tree[key], first, f)
            ]
            if others:
                differing.append(key)
            for rank, f in others:
                self.take(("per_rank", str(rank), key), f.tree[key], f)
        if differing:
            self.notes.append(
                f"ranks differ in {', '.join(sorted(differing))}: rank 0's is kept under its name, the others' as "
                "extra.per_rank.<rank>"
            )

    def take_groups(self, file: File, groups: list[Any], members: list[list[str]]) -> None:
        """The param groups, whose `params` number flat tensors: those of `members` names, in order, each once.

        Raises:
            Corrupt: they list others.
        """
        listed: list[int] = []
        for i, group in enumerate(groups):
            ids = group.get("params") if isinstance(group, dict) else None
            if not isinstance(ids, list) or not all(type(k) is int and 0 <= k < len(members) for k in ids):
                raise Corrupt(
                    f"{file.what}: param group {i} lists {short(ids)}; there are {len(members)} flat tensors."
                )
            listed += ids
            for key, value in group.items():
                data = [n for k in ids for n in members[k]] if key == "params" else value
                self.take(("optim", "param_groups", i, str(key)), data, file)
        if listed != list(range(len(members))):
            raise Corrupt(f"{file.what}: the param groups list the flat tensors {listed} of {len(members)}.")

    def _frozen(self, name: str, shape: tuple[int, ...], models: list[File]) -> TensorEntry:
        """A frozen parameter: whole in a file of stage 2, else one padded part a rank."""
        n = prod(shape)
        part = -(-n // len(models))
        cuts, dtype = [], None
        for r, f in enumerate(models):
            t = f.get(name, StoredTensor, f.get("frozen_param_fragments", dict))
            dtype = dtype or t.dtype
            if len(models) == 1 and t.shape == shape:
                return self.whole(f, t, ("model", name))
            if t.shape != (part,) or t.dtype != dtype or not t.contiguous:
                raise Corrupt(
                    f'{f.what}: the part of the frozen parameter "{name}" is {t.dtype} {t.shape}; {shape} on '
                    f"{len(models)} ranks has {part} elements each."
                )
            if r * part < n:
                cuts.append(Cut(r * part, min(n, (r + 1) * part), f.number, self.seen(f, t).extent[0]))
        assert dtype is not None
        return from_cuts(shape, dtype, ("model", name), cuts)

    def take_side_files(self) -> None:
        """What HF Trainer and Accelerate put beside the save: scheduler and counters are taken; unread_files.py names the rest."""
        if not self.save.folder:
            return  # the tag's own folder was given: what lies above it is not asked for
        for name in self.source.list():
            if name in ("scheduler.bin", "scheduler.pt") and not any(p[0] == "lr_scheduler" for p in self.rest):
                self.names.append(name)
                file = File(self.source, name, len(self.names) - 1)
                self.take(("lr_scheduler",), file.tree, file)
        if self.source.exists("trainer_state.json"):
            said = _json(self.source, "trainer_state.json")
            self.rest.update({("trainer", k): said[k] for k in _TRAINER if isinstance(said.get(k), (int, float))})
            if said.get("log_history"):
                self.notes.append("of trainer_state.json the counters are carried, log_history is not")

    def done(self, layout: str, world: int | None, like: tuple[str, ...] | None = None) -> Checkpoint:
        """The checkpoint of what was read. `like` names numbered parameters, where there are such."""
        self.take_side_files()
        clean = strip_wrappers(self.model)
        listed = self.rest.get(("buffer_names",))
        if isinstance(listed, list):
            self.rest["buffer_names",] = [clean.get(n, n) for n in listed]
        leaves: dict[Path, Any] = {("model", n): t for n, t in self.model.items()}
        leaves.update(self.optim)
        leaves.update(self.rest)
        named = of_the_rest(canonical(leaves, shape_of, like, same_bytes, self.options.only))
        out = checkpoint_of(named, layout, self.source.root, world, self.names, self.source)
        out.records = list(self.records.values())
        out.ranks = {i: r for i, n in enumerate(self.names) if (r := _rank_of(n.rpartition("/")[2])) is not None}
        out.notes = self.notes + out.notes
        out.trainer = out.trainer or "DeepSpeed"
        return out
