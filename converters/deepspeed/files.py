"""The files of a DeepSpeed save: where it is, which files belong to it, and what each contains.

deepspeed/module_state.py describes the format.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from ckpttool.errors import Corrupt, Unsafe, Unsupported, UsageError, argument
from ckpttool.formats import stored_tensors, torch_zip
from ckpttool.formats.pickles import Global, Opaque, make_enum_stand_ins, short
from ckpttool.formats.stored_tensors import StoredTensor
from ckpttool.index import boxes
from ckpttool.index.checkpoint import (
    ITEMSIZE,
    Chunks,
    Leaves,
    Path,
    TensorEntry,
    with_one_nan,
)
from ckpttool.program import Saves
from ckpttool.storage.source import Source

from ..rank_files import find_differing_file

__all__ = [
    "EXPERT",
    "EXPERT_OPTIM",
    "LAYER",
    "MAYBE",
    "MODEL",
    "MODEL3",
    "OF_SWAPPED",
    "OPTIM",
    "OWN",
    "SAVES",
    "SCALERS",
    "STAGE",
    "UNIVERSAL",
    "File",
    "FlatRange",
    "Save",
    "are_values_equal",
    "build_entry_from_ranges",
    "build_param_group",
    "drop_added_option",
    "find_save",
    "get_zero_setting",
    "is_placeholder",
    "is_save",
    "is_shape",
    "list_client_keys",
    "list_deepspeed_saves",
    "list_pickle_stand_ins",
    "param_shapes",
    "parse_rank",
    "read_loss_scaler",
    "read_stage0_scaler",
    "read_tied_names",
    "refuse_mixed_saves",
    "refuse_model_parallel",
    "refuse_unsupported_files",
]


#: Each save is a folder named by its tag, next to a file that names the newest.
SAVES = Saves(
    "DeepSpeed",
    frozenset(("latest", "latest_universal")),
    "global_step",
    r"(bf16_)?zero_pp_rank_\d+.*\.pt|mp_rank_\d+_model_states\.pt|layer_\d+-model_.*\.pt"
    r"|layer_\d+_expert_\d+_mp_rank_\d+_model_states\.pt|expp_rank_\d+_mp_rank_\d+_optim_states\.pt",
)

MODEL3 = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt")
OPTIM = re.compile(r"(bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
#: An expert of a layer, and the optimizer of an expert parallel rank (experts.py).
EXPERT = re.compile(r"layer_(\d+)_expert_(\d+)_mp_rank_(\d+)_model_states\.pt")
EXPERT_OPTIM = re.compile(r"expp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
#: A layer of a pipeline, on one tensor parallel rank (pipeline.py).
LAYER = re.compile(r"layer_(\d+)-(?:model_(\d+)-)?model_states\.pt")

#: What to do with a save whose masters and moments are swap files, offloaded_tensors/rank<r>/<id>.tensor.swp of raw
#: numbers with padding behind them. `<id>` is the attribute ds_id of the empty flat tensor in the optimizer file, which
#: unpickling as data does not keep.
OF_SWAPPED = (
    "ckpttool does not read swap files. Load the save in its own job, and write a file of what "
    "safe_get_full_fp32_param and safe_get_full_optimizer_state of deepspeed.utils give; or train with "
    "offload_optimizer on cpu, or none, and save."
)
#: In a save, of a Universal Checkpoint.
UNIVERSAL = "zero/optimizer_state.pt"

#: The option that is added to the param groups of Adam.
_ADDED = "bias_correction"

STAGE = Global("deepspeed.runtime.zero.config", "ZeroStageEnum")
SCALERS = "deepspeed.runtime.fp16.loss_scaler"

#: Keys of a model file that follow from the tensors and the number of ranks, or that have names of their own here.
OWN = frozenset(
    (
        "module",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "frozen_param_fragments",
        "shared_params",
        "dp_world_size",
        "mp_world_size",
        "checkpoint_parallel_dimensions",
        "ds_version",
    )
)
#: Keys that are there in every file, None where the engine has no such thing.
MAYBE = ("lr_scheduler", "data_sampler", "random_ltd")

#: Keys on which all ranks of one save agree.
_SAME = (
    *("global_steps", "skipped_steps", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions"),
    *("param_shapes", "frozen_param_shapes"),
)


def list_client_keys(scheduler: object) -> tuple[str, ...]:
    """Return the keys of a model file under which the user's own client_state lies, and not a component of the save,
    although they are names of components.

    Args:
        scheduler: state of the engine's own scheduler; None if the engine has none. With one, an entry "scheduler" is
            the user's.
    """
    return ("model", "optim") if scheduler is None else ("model", "optim", "scheduler")


def parse_rank(name: str, tensor_ranks: int = 1) -> int | None:
    """Return the rank in the job that wrote a file, by the file's name; None for a file that belongs to no single rank.

    Args:
        name: of the file.
        tensor_ranks: the number of tensor-parallel ranks. DeepSpeed numbers all of one model replica before the next.
    """
    found = MODEL3.fullmatch(name) or OPTIM.fullmatch(name)
    if found:
        return int(found[found.re.groups - 1]) * tensor_ranks + int(found[found.re.groups])
    return int(m[1]) if tensor_ranks > 1 and (m := MODEL.fullmatch(name)) else None


class Save(NamedTuple):
    """One save: the folder below the source's root ("" or "global_step3/"), the files in it."""

    folder: str
    names: list[str]

    def files(self, pattern: re.Pattern[str], group: int) -> dict[int, list[str]]:
        """Return {number in group `group` of the pattern: names of the files that match}, in the order of the
        numbers."""
        found: dict[int, list[str]] = {}
        for n in self.names:
            if m := pattern.fullmatch(n):
                found.setdefault(int(m[group]), []).append(n)
        return dict(sorted(found.items()))

    def tensor_ranks(self, where: str) -> int:
        """Return the number of tensor-parallel ranks that the file names show, at least 1. `where` is the save's path,
        for errors.

        Raises:
            Corrupt: all files of one of these ranks are missing.
        """
        found = {r for n in self.names if (r := _parse_tensor_rank(n)) is not None}
        lost = next(r for r in range(len(found) + 1) if r not in found)
        if lost < len(found):
            raise Corrupt(
                f"{where}: there are files of model parallel rank {max(found)}, and none of rank {lost}. Fetch them.",
                code="CKPT0402",
            )
        return max(1, len(found))

    def of_tensor_rank(self, rank: int) -> Save:
        """Return the save without the files of other tensor-parallel ranks; the model files of stages 0 to 2 all
        stay."""
        return self._replace(
            names=[n for n in self.names if MODEL.fullmatch(n) or _parse_tensor_rank(n) in (None, rank)]
        )


def _parse_tensor_rank(name: str) -> int | None:
    """Return the tensor-parallel rank in a file's name; None if the name has none."""
    m = MODEL3.fullmatch(name) or MODEL.fullmatch(name) or OPTIM.fullmatch(name)
    return int(m[m.re.groups]) if m else None


def is_save(names: Iterable[str]) -> bool:
    """Return whether a folder with files of these names is one save of DeepSpeed."""
    return any(MODEL3.fullmatch(n) or MODEL.fullmatch(n) or OPTIM.fullmatch(n) for n in names)


def list_deepspeed_saves(source: Source) -> dict[str, list[str]]:
    """Return {tag: names of the files in its folder} of the saves in a folder. Only its first 2000 entries are
    examined."""
    out = {}
    for name in source.list()[:2000]:
        inside = source.list(name)
        if is_save(inside):
            out[name] = inside
    return out


def find_save(source: Source, tag: str | None, latest: str = "latest") -> Save:
    """Find the save in a folder: the folder itself, the one with the tag, the one that the file `latest` names, or the
    only one.

    Args:
        source: the folder.
        tag: the name of the save's folder; None: the user gave none.
        latest: the name of the file that names the newest save.

    Raises:
        Corrupt: the folder with the tag is not there, or is no save.
        Unsafe: the tag is not the name of a folder.
        UsageError: there are several saves or none, and no tag.
    """
    names = source.list()
    if is_save(names) and tag is None:
        return Save("", names)
    origin = argument("tag", tag)
    if tag is None and source.exists(latest):
        tag = source.read_all(latest, 4096).decode("utf-8", "replace").strip()
        origin = f"the file {latest} ({tag!r})"
    if tag is not None:
        if not tag or tag in (".", "..") or "/" in tag or "\0" in tag:
            raise Unsafe(
                f"{source.root}/{latest} names {tag[:80]!r}, which is not a folder in the same place.", code="CKPT0702"
            )
        inside = source.list(tag)
        if not is_save(inside):
            others = ", ".join(list_deepspeed_saves(source)) or "none"
            raise Corrupt(
                f"{source.root}: the save that {origin} points to is missing. The save was not finished, or the folder "
                f"was not copied whole; saves here: {others}. Choose one with {argument('tag')}.",
                code="CKPT0401",
            )
        return Save(tag + "/", inside)
    there = list_deepspeed_saves(source)
    if len(there) != 1:
        raise UsageError(
            f"{source.root} has no file {latest} and {len(there)} saves: {', '.join(there)}. Choose one with "
            f"{argument('tag')}.",
            code="CKPT0208",
        )
    tag, inside = next(iter(there.items()))
    return Save(tag + "/", inside)


def refuse_unsupported_files(save: Save, where: str) -> None:
    """Refuse a save that has state in files of a kind that is not read; only the names of the files are examined.

    Args:
        save: the save.
        where: its path with a slash at the end, for errors.

    Raises:
        Unsupported: an expert or a layer is cut over model parallel ranks, or is in a file that is not named as
            DeepSpeed 0.19 names it, or belongs to a save of stage 3; or the optimizer state was on NVMe.
        Corrupt: DeepSpeed's zero_to_fp32.py would mistake a file for that of one more rank.
    """
    apart = () if any(map(MODEL3.fullmatch, save.names)) else (EXPERT, EXPERT_OPTIM, LAYER)  # none at stage 3
    for n in save.names:
        m = next(filter(None, (p.fullmatch(n) for p in (MODEL3, MODEL, OPTIM, *apart))), None)
        foreign = not m and n.startswith(("expp_rank_", "expert_", "layer_")) and n.endswith(".pt")
        if n.endswith(("_model_states.pt", "_optim_states.pt")) and not m and not foreign:
            raise Corrupt(
                f"{where}{n}: named like no file that DeepSpeed writes, but it ends as the files of its ranks do, so "
                "DeepSpeed's own zero_to_fp32.py would take it for one more rank. Move it out of the folder, or give "
                "it its own name back.",
                code="CKPT0409",
            )
        if m and m.re in apart and int(m[m.re.groups] or 0):
            raise Unsupported(
                f"{where}{n}: written by model parallel rank {int(m[m.re.groups])}, which has a part of an expert or "
                "layer. Merge the model parallel ranks with the trainer's own tools first.",
                code="CKPT0325",
            )
        if foreign:
            raise Unsupported(
                f"{where}{n}: {'experts' if 'exp' in n else 'pipeline stages'} in files of their own. ckpttool reads "
                "these at ZeRO stage 0 to 2, named as DeepSpeed names them now.",
                code="CKPT0325",
            )
    if "offloaded_tensors" in save.names:
        raise Unsupported(
            f"{where}offloaded_tensors: the optimizer state was on NVMe, and with it the weights in fp32, which were "
            f"saved as raw swap files. {OF_SWAPPED}",
            code="CKPT0326",
        )


# --------------------------------------------------------------------------------------------------------- reading


class File:
    """One torch file of a save, unpickled as data; `number` is its place in the list of the checkpoint's files."""

    def __init__(self, source: Source, name: str, number: int, dict_only: bool = True) -> None:
        """Unpickle a file.

        Args:
            source: where it lies.
            name: its path below the source.
            number: its place in the list of the checkpoint's files.
            dict_only: whether it must hold a dict.

        Raises:
            Corrupt: it is damaged, or holds no dict and must.
        """
        self.source, self.name, self.number = source, name, number
        self.what = f"{source.root}/{name}"
        self.read_at = source.reader_of(name)
        tree = torch_zip.read(self.read_at, 0, source.size(name), self.what, list_pickle_stand_ins(self.what))
        if dict_only and not isinstance(tree, dict):
            raise Corrupt(
                f"{self.what} holds a {type(tree).__name__}, not a dict; DeepSpeed did not write it.", code="CKPT0406"
            )
        self.tree: Any = tree

    def buffer_names(self) -> list[str]:
        """Return the names of the buffers that the file lists; [] if it lists none.

        Raises:
            Corrupt: it lists something else.
        """
        found = self.tree.get("buffer_names") or []
        if not isinstance(found, list) or not all(isinstance(n, str) for n in found):
            raise Corrupt(f"{self.what}: buffer_names is {short(found)}.", code="CKPT0406")
        return found

    def get(self, key: str, kind: type | tuple[type, ...], inside: dict[str, Any] | None = None) -> Any:
        """Return the value under `key` in the file's dict, or in `inside`, a dict that is part of it.

        Args:
            key: the key.
            kind: the type or types that the value may have; a bool is never accepted.
            inside: the dict to look in; None: the whole file's.

        Raises:
            Corrupt: the key is missing, or the value has another type.
        """
        found = (self.tree if inside is None else inside).get(key)
        if not isinstance(found, kind) or isinstance(found, bool):
            raise Corrupt(
                f"{self.what}: {key!r} is {'missing' if found is None else short(found)}. The file is not a whole "
                "DeepSpeed save of this kind.",
                code="CKPT0406",
            )
        return found

    def scalar(self, t: StoredTensor) -> float | int | None:
        """Return the value of a 0-dim tensor of this file; None if it has dimensions or its dtype is not that of a
        counter."""
        found = None if t.shape else stored_tensors.inline_tensors(t, self.read_at, self.what)
        return None if found is None else stored_tensors.decode_number(found.dtype, found.data)


def list_pickle_stand_ins(what: str) -> dict[tuple[str, str], object]:
    """Return {(module, name) of a class: callable to unpickle in its place} for the classes that DeepSpeed pickles.

    Enums become numbers. `what` is the path of the file, for errors.
    """

    def stage(n: object = 0) -> int:
        """Return the number of a ZeroStageEnum; raise Corrupt if it is not 0 to 3."""
        if type(n) is not int or not 0 <= n <= 3:
            raise Corrupt(f"{what}: ZeRO stage {short(n)}.", code="CKPT0406")
        return n

    named = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3}
    return {
        (STAGE.module, STAGE.name): stage,
        **make_enum_stand_ins((stage, named)),
        **torch_zip.make_size_stand_in(what),
    }


@lru_cache(1 << 16)
def _split_into_boxes(
    shape: tuple[int, ...], first: int, last: int
) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Split elements [first, last) of a flattened tensor of this shape into boxes; return [(start, shape, elements)]
    of them."""
    return [(start, size, prod(size)) for start, size in boxes.flat_to_boxes(shape, first, last)]


class FlatRange(NamedTuple):
    """Elements [first, last) of a flattened tensor, at a byte of a file."""

    first: int
    last: int
    file: int
    offset: int


def build_entry_from_ranges(shape: tuple[int, ...], dtype: str, path: Path, cuts: Iterable[FlatRange]) -> TensorEntry:
    """Return the entry of a tensor that is stored as flat ranges of its elements.

    Args:
        shape: the shape of the tensor.
        dtype: its dtype.
        path: its canonical path.
        cuts: the ranges in the order of the elements, each with its place in a file; whether they cover the tensor is
            not checked here.
    """
    chunks, item = Chunks(len(shape)), ITEMSIZE[dtype]
    for first, last, file, offset in cuts:
        for start, size, n in _split_into_boxes(shape, first, last):
            chunks.add(start, size, file, offset, n * item)
            offset += n * item
    return TensorEntry(dtype, shape, path, chunks)


def build_param_group(options: Mapping[str, Any], params: list[int]) -> dict[str, Any]:
    """Return a param group as a file holds it: the options, the numbers of its flat tensors, and behind these, for
    Adam, `bias_correction`: True, unless it is one of the options.

    An engine takes the groups as the file has them, and DeepSpeed's own Adams (FusedAdam, DeepSpeedCPUAdam), which read
    this option in every step, are what most configurations ask for. torch's Adam has no such option: it always
    corrects, and keeps one that it does not know. AMSGrad gets none, as DeepSpeed's Adams do not have it, and neither
    do torch's NAdam, RAdam and Adamax, whose groups have `foreach` without `amsgrad`.
    """
    group = {**options, "params": params}
    adam = {"betas", "eps"} <= options.keys() and not options.get("amsgrad", "foreach" in options)
    return {**group, _ADDED: True} if adam and _ADDED not in options else group


def drop_added_option(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a param group without the entry that `build_param_group` adds and that is no state
    (`bias_correction`: True, last and right behind `params`); a copy with all entries if the group has no such end.

    The entry is behind `params`, which is the last entry of a group as torch's optimizers give it, and so as an engine
    that has loaded such a group saves it.
    """
    added = list(group)[-2:] == ["params", _ADDED] and group[_ADDED] is True
    return {k: x for k, x in group.items() if not (added and k == _ADDED)}


def param_shapes(file: File) -> list[dict[str, tuple[int, ...]]]:
    """Return param_shapes of a model file: [{name of a parameter: shape}], one dict for each flat tensor.

    Raises:
        Corrupt: it is missing, has another form, or lists a name twice.
    """
    found = file.get("param_shapes", (list, dict))
    found = [found] if isinstance(found, dict) else found  # before 0.4: one group
    for group in found:
        if not isinstance(group, dict) or not all(isinstance(k, str) and is_shape(v) for k, v in group.items()):
            raise Corrupt(f"{file.what}: param_shapes is not a list of names and shapes.", code="CKPT0406")
    names = [n for g in found for n in g]
    if len(set(names)) != len(names):
        twice = next(n for n in names if names.count(n) > 1)
        raise Corrupt(f'{file.what}: param_shapes lists "{twice}" twice.', code="CKPT0406")
    groups: list[dict[str, tuple[int, ...]]] = found
    return groups


def is_shape(x: object) -> bool:
    """Return whether data from a pickle is a shape: a tuple of up to 64 integers that are not negative."""
    return isinstance(x, tuple) and len(x) <= 64 and all(type(n) is int and n >= 0 for n in x)


def refuse_model_parallel(file: File, tensor_ranks: int = 1) -> None:
    """Refuse a model file that states other model parallel degrees than those of the files that are read.

    Args:
        file: the model file.
        tensor_ranks: the number of tensor-parallel ranks whose files are read.

    Raises:
        Unsupported: it is one part of a tensor or pipeline parallel model.
        Corrupt: it states another number of tensor-parallel ranks than there are files for.
    """
    stated = file.tree.get("checkpoint_parallel_dimensions")
    degrees = {"mp_world_size": file.tree.get("mp_world_size"), **(stated if isinstance(stated, dict) else {})}
    if more := {k: n for k, n in degrees.items() if n not in (None, 1 if k == "pp_degree" else tensor_ranks)}:
        if tensor_ranks > 1 and degrees.get("pp_degree") in (None, 1):
            raise Corrupt(
                f"{file.what}: {short(more)}, and there are files of {tensor_ranks} model parallel ranks. Fetch all "
                "files of one save.",
                code="CKPT0402",
            )
        raise Unsupported(
            f"{file.what}: {short(more)}: a part of a model that was trained with tensor or pipeline parallelism. "
            "ckpttool reads saves of data parallel training; merge the model parallel ranks with the trainer's own "
            "tools first.",
            code="CKPT0325",
        )


def get_zero_setting(config: object, key: str) -> object:
    """Return the value under `key` in zero_optimization of `config`, DeepSpeed's configuration; None where it is
    missing."""
    section = config.get("zero_optimization") if isinstance(config, dict) else None
    return section.get(key) if isinstance(section, dict) else None


def refuse_mixed_saves(files: Sequence[File], keys: Sequence[str] = _SAME) -> None:
    """Refuse model files of different saves.

    Args:
        files: one file for each rank, in the order of the ranks.
        keys: the keys on which they have to agree.

    Raises:
        Corrupt: what a rank has under a key differs from rank 0's.
    """
    odd = find_differing_file({key: f.tree.get(key) for key in keys} for f in files)
    if odd is not None:
        rank, key = odd
        a, b = files[0].tree.get(key), files[rank].tree.get(key)
        shown = f"{short(b)}, rank 0 says {short(a)}" if "param_shapes" not in key else "other than rank 0's"
        raise Corrupt(
            f"{files[rank].what}: {key} is {shown}. The files are from different saves; fetch all of one save again.",
            code="CKPT0409",
        )


def is_placeholder(x: object) -> bool:
    """Return whether an entry of `module`, the state dict in a model file, is an empty tensor in place of a parameter
    that lies in other files."""
    return isinstance(x, StoredTensor) and x.shape == (0,)


def read_tied_names(files: Sequence[File]) -> dict[str, str]:
    """Return {alias: owner} of the tied weights that the model files list; DeepSpeed lists them in rank 0's file only.

    Raises:
        Corrupt: a list has anything but names.
    """
    out: dict[str, str] = {}
    for f in files:
        shared = f.tree.get("shared_params") or {}
        if not isinstance(shared, dict) or not all(isinstance(x, str) for kv in shared.items() for x in kv):
            raise Corrupt(f"{f.what}: shared_params is {short(shared)}.", code="CKPT0406")
        out.update(shared)
    return out


def are_values_equal(a: object, b: object, in_a: File | None = None, in_b: File | None = None) -> bool:
    """Return whether two ranks have equal values: plain data, and tensors by their CRC32s. Tensors in torch.save's
    legacy format have none; their bytes are compared.

    Args:
        a: the value of one rank.
        b: the value of another.
        in_a: the file that `a` is from; if it or `in_b` is None, tensors without CRC32 count as different.
        in_b: the file that `b` is from.
    """
    if isinstance(a, StoredTensor) and isinstance(b, StoredTensor):
        if (a.dtype, a.shape, a.strides) != (b.dtype, b.shape, b.strides):
            return False
        if a.storage.crc32 is not None:
            return (a.at, a.storage.crc32) == (b.at, b.storage.crc32)
        return in_a is not None and in_b is not None and in_a.read_at(*a.extent) == in_b.read_at(*b.extent)
    if isinstance(a, dict) and isinstance(b, dict):
        a, b = with_one_nan(a), with_one_nan(b)
        return a.keys() == b.keys() and all(are_values_equal(v, b[k], in_a, in_b) for k, v in a.items())
    if isinstance(a, (list, tuple)) and type(a) is type(b):
        return len(a) == len(b) and all(are_values_equal(x, y, in_a, in_b) for x, y in zip(a, b, strict=True))
    return bool(a == b) or (a != a and b != b)


def read_loss_scaler(optim: dict[str, object]) -> Leaves:
    """Return {path: value} of the loss scaler in an optimizer file, under canonical paths that begin with "scaler".

    `optim` is the file's `optimizer_state_dict`. The static scaler with factor 1, which bf16 and fp32 engines have,
    gives {}.
    """
    found = optim.get("loss_scaler")
    state = found.state if isinstance(found, Opaque) else None
    if not isinstance(state, dict) or not (state.get("dynamic") or state.get("cur_scale", 1) != 1):
        return {}
    out: Leaves = {("scaler", str(k)): v for k, v in state.items()}
    out["scaler", "overflow"] = bool(optim.get("overflow"))
    return out


def read_stage0_scaler(optimizer: dict[Any, Any]) -> dict[str, object]:
    """Return {key: value} of the loss scaler that a stage 0 engine saves as entries of its optimizer, with the keys
    that the state of a scaler object has at other stages; {} without loss scaling, or for torch's own state dict.

    Args:
        optimizer: the dict under the key `optimizer` in a file of the save.
    """
    other = ("optimizer_state_dict", "fp32_groups")
    if other[0] not in optimizer or not (optimizer.get("dynamic_loss_scale") or optimizer.get("cur_scale", 1) != 1):
        return {}
    return {{"dynamic_loss_scale": "dynamic"}.get(k, str(k)): x for k, x in optimizer.items() if k not in other}
