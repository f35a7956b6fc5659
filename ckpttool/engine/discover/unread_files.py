"""Files of a checkpoint that were not read: what trainers write next to the files of a layout.

HF Trainer puts optimizer.bin next to model.safetensors, Accelerate optimizer_0/ next to pytorch_model_fsdp_0/,
torchtune recipe_state/ next to epoch_0/, Lightning meta.pt into a DCP folder. A layout reads its own files. This module
lists the others, so that every command can name them and a conversion does not lose them in silence.

    list_unread_files(source, file, ckpt, saves)  [Unread], after the layout has read `ckpt`
    list_lost_state(ckpt, holds, only)            those that a layout which holds such components could keep
    describe_files(rows)                          as text: "optimizer.bin (1.2 GB, optimizer), ..."

A file was read when the source opened it. Names alone decide what a file holds, and sizes come from the directory or
from the listing of the store. Only one under a name that no trainer uses is opened, on a disk: another whole checkpoint
of the same model, such as ckpt.pt next to a DCP folder's files, is nothing that this one lacks. For a folder these are
all files in it and, next to it, the other half (`Program.halves`). For a single file it is the names that hold state
(`classify_state_file`), and no others: a folder of downloads is not one checkpoint. State that the checkpoint already
holds (a scheduler in DeepSpeed's own file) is listed, but is not a loss.

Sources: transformers/trainer.py (_save_optimizer_and_scheduler, _save_rng_state), accelerate/checkpointing.py and
utils/constants.py, torchtune/training/checkpointing/_checkpointer.py, lightning/pytorch/strategies/fsdp.py,
verl/trainer/ppo/ray_trainer.py, olmo_core/train/checkpoint.py, megatron/core/dist_checkpointing/serialization.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from functools import cache

from ... import layouts
from ...errors import CkpttoolError, Unsupported
from ...huggingface import lora, model_files
from ...index.checkpoint import Checkpoint, Unread
from ...printable import printable
from ...program import Saves, StateFile
from ...storage.overlay import find_parent_folder
from ...storage.source import Source
from ...storage.sources import open_source

__all__ = [
    "NOT_READ",
    "classify_state_file",
    "describe_files",
    "human",
    "list_lost_state",
    "list_unread_files",
    "make_unread_note",
]

#: How the reason of a `Dropped` ends that stands for a file.
NOT_READ = "in a file that was not read"


_TORCH = r"\.(bin|pt|pth|ckpt)"
#: Names that several trainers and scripts use; those of one trainer are in its `Program.state_files`.
_NAMES = (
    StateFile(
        rf"(optimizer|optim)(_\d+)?(_rank\d+)?{_TORCH}|optimizer\.safetensors|optimizer_\d+/", "optimizer", "optim"
    ),
    StateFile(rf"(lr_)?scheduler(_\d+)?{_TORCH}", "scheduler", "scheduler"),
    StateFile(rf"(rng|random)_states?(_\d+)?({_TORCH}|\.pkl)", "RNG", "rng"),
    StateFile(rf"(grad_)?scaler(_\d+)?{_TORCH}", "gradient scaler", "scaler"),
    StateFile(rf"sampler(_\d+)?{_TORCH}|dataloader(_\d+)?{_TORCH}", "data loader", "dataloader"),
    StateFile(r"adapter_model\.(safetensors|bin|pt)", "adapter", "adapter"),
    StateFile(r"optim(izer)?s?(_states?)?/", "optimizer", "optim"),
    StateFile(r"(lr_)?schedulers?/", "scheduler", "scheduler"),
    StateFile(r"(rng|random)(_states?)?/", "RNG", "rng"),
    StateFile(r"(data_?loaders?|samplers?)(_states?)?/", "data loader", "dataloader"),
    StateFile(rf"(training_args|args|hparams){_TORCH}", "arguments", ""),
    StateFile(
        r"(pytorch_model|pytorch_model_fsdp|model|consolidated|diffusion_pytorch_model|openvino_model|tf_model|flax_model|"
        r"rust_model|ggml-model)([-._]\w+)*\.(bin|pt|pth|safetensors|h5|msgpack|ot)|[^/]*\.(gguf|onnx|tflite|mlmodel)|"
        r"pytorch_model_fsdp_\d+/|sharded/|original/|consolidated/",
        "weights in another form",
        "",
    ),
)
#: What a name that no trainer is known to write suggests, in the checkpoint's own folder.
_WORDS = (
    ("optim", "optimizer", "optim"),
    ("sched", "scheduler", "scheduler"),
    ("rng", "RNG", "rng"),
    ("scaler", "scaler", "scaler"),
    ("sampler", "data loader", "dataloader"),
    ("dataloader", "data loader", "dataloader"),
    ("train", "training state", "trainer"),
    ("", "unknown", "extra"),
)
_STATE = r"(?is).*\.(bin|pt|pth|ckpt|pkl|pickle|distcp|safetensors|npz|npy|tar)"
#: Names that need no word: indices, programs, logs, texts, pictures; what ckpttool and torch write besides.
_PLAIN = (
    r"(?is)ckpttool\.json|flat_layout\.json|CHECKPOINT_COMPLETE|latest|latest_universal|.*\.index\.json|metadata\.json|.*\.(md|txt|py|sh|log|html|csv|"
    r"ya?ml|toml|png|jpe?g|gif|svg|pdf|ipynb)|(LICEN[CS]E|NOTICE|USE_POLICY).*|events\.out\..*|(all|train|eval)_results\.json|"
    r"preprocessor_config\.json|config_.*\.json|(runs|logs|wandb|tensorboard|lightning_logs|huggingface|hf|additional_chat_templates)/"
)
#: Folders that are saves of their own, of other steps.
_SAVES = r"(checkpoint|ckpt|step|epoch|iter|tag)[-_=]?\d.*/"
_ORDER = ("optim", "scheduler", "scaler", "rng", "dataloader", "trainer", "extra", "adapter", "")
_MOST = 1000  # rows; those beyond are one more


def human(n: float) -> str:
    """Return a number of bytes as text with a decimal unit: human(2_500_000) == "2.5 MB"."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(n) < 1000 or unit == "TB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    return ""


# ---------------------------------------------------------------------------------------------------------- looking


def list_unread_files(source: Source, file: str | None, ckpt: Checkpoint, saves: Saves | None) -> list[Unread]:
    """List the files and folders that by their names belong to a checkpoint and were not read, the most important
    first. If a folder cannot be listed, a note is added to `ckpt.notes`.

    Args:
        source, file: the place that was read: a folder, and the name of the one file in it that is the checkpoint;
            `file` is None if the folder is the checkpoint.
        ckpt: the index that was read there, before components were left out.
        saves: how the checkpoint's layout keeps several saves in one folder; None if it does not.
    """
    held = {ckpt.component(n) for n in [*ckpt.tensors, *ckpt.values]} - {
        "trainer",
        "extra",
    }  # these may have several parts
    held |= {"adapter" for n in ckpt.files if n.startswith("adapter_model.")}
    rows: list[Unread] = []
    looks = [_list_unread_in_folder, _list_state_in_parent] if file is None else [_list_state_beside_file]
    for look in looks:
        try:
            rows += look(source, held, saves)
        except (CkpttoolError, OSError) as e:  # a folder that may be read but not listed
            ckpt.notes.append(f"the folder could not be listed for files that belong to the checkpoint: {e}")
    if file is None and source.local:
        rows = [
            r._replace(what=_COPY, component="") if _is_checkpoint_of_same_model(source, r, ckpt) else r for r in rows
        ]
        rows = [r._replace(what=_OF_PEFT, component="") if _is_copy_of_adapter(source, r, ckpt) else r for r in rows]
    rows.sort(key=lambda r: (_ORDER.index(r.component), r.what, r.name))
    if len(rows) > _MOST:
        rest = rows[_MOST:]
        rows[_MOST:] = [Unread(f"{len(rest)} more files", _sum_bytes(rest), "unknown", rest[0].component)]
    return rows


_COPY = "another checkpoint of the same model"
_OF_PEFT = "its adapter once more, by names and shapes, as PEFT saves it"


def _is_checkpoint_of_same_model(source: Source, row: Unread, ckpt: Checkpoint) -> bool:
    """Tell whether a file with an unknown name is a checkpoint itself, with the weights and the optimizer state of the
    same model. Weights alone do not count: they may be an average, i.e. further state.

    Args:
        source: the folder of the checkpoint.
        row: the file in that folder; the answer is False if its name is not of the unknown kind.
        ckpt: the index of the checkpoint, for the names and shapes of its weights.
    """
    model = {n: t.shape for n, t in ckpt.tensors.items() if t.path[0] == "model"}
    large = sum(t.nbytes for t in ckpt.tensors.values() if t.path[0] == "model")
    if (row.what, row.component) != ("unknown", "extra") or not model or (row.bytes or 0) < large:
        return False
    numbered = False
    with Source(source.root) as again:
        where = layouts.Place(again, row.name)
        try:
            if not again.exists(row.name):
                return False
            layout = layouts.detect(where)
            try:
                found = layout.read(where, layouts.ReadOptions())
            except Unsupported:  # an optimizer that numbers its parameters
                found = layout.read(where, layouts.ReadOptions(only=frozenset(["model"])))
                numbered = True
        except CkpttoolError:
            return False
    optimizer = numbered or any(t.path[0] == "optim" for t in found.tensors.values())
    return optimizer and model == {n: t.shape for n, t in found.tensors.items() if t.path[0] == "model"}


def _is_copy_of_adapter(source: Source, row: Unread, ckpt: Checkpoint) -> bool:
    """Tell whether a file is a copy, saved by PEFT, of an adapter that the checkpoint holds.

    Trainer writes such a copy next to the weights of DeepSpeed and of FSDP's FULL_STATE_DICT, whose tensor names
    contain the adapter's name; the copy's names do not.

    Args:
        source: the folder of the checkpoint.
        row: the file in that folder.
        ckpt: the index of the checkpoint.
    """
    seen = lora.find_lora(ckpt) if row.component == "adapter" else None
    if seen is None:
        return False
    left_out = {"modules_to_save", *seen.names}
    model = {n: t.shape for n, t in ckpt.tensors.items() if t.path[0] == "model"}
    held = {".".join(k for k in n.split(".") if k not in left_out): shape for n, shape in model.items()}
    with Source(source.root) as again:
        where = layouts.Place(again, row.name)
        try:
            found = layouts.detect(where).read(where, layouts.ReadOptions())
        except CkpttoolError:
            return False
    saved = {n: t.shape for n, t in found.tensors.items()}
    return bool(saved) and all(held.get(n) == shape for n, shape in saved.items())


def _list_unread_in_folder(source: Source, held: set[str], saves: Saves | None) -> Iterator[Unread]:
    """Yield the state files that the layout did not read, in the checkpoint's folder and in those subfolders of which
    it read other files.

    Args:
        held: names of the components that the checkpoint has, such as "optim"; an unread file of one of them is yielded
            with the component "", which means that nothing is lost.
        saves: how the layout keeps several saves in one folder, so that the other saves are ignored; None if it does
            not.
    """
    read = {n for n in source.identities() if not n.startswith("../")}
    used = {n[:i] for n in read for i, c in enumerate(n) if c == "/"}
    for folder in ("", *sorted(used)):
        for entry in source.list(folder):
            name = f"{folder}/{entry}" if folder else entry
            if name in read or name in used or (kind := _classify_checkpoint_file(entry)) is None:
                continue
            is_folder, size = source.glance(name)
            if not is_folder:
                if size or not entry.endswith(".distcp"):  # a rank that had nothing to write
                    yield _make_unread(name, size, *kind, held)
                continue
            kind = classify_state_file(entry + "/")
            if saves is not None and (kind is None or saves.folder in entry):
                continue  # another save, whatever its tag is called
            if kind is not None and _holds_state(source, name, kind):
                yield _make_unread(name + "/", _sum_folder_bytes(source, name), *kind, held)
            elif not folder and not re.fullmatch(_SAVES, entry + "/") and not re.fullmatch(_PLAIN, entry + "/"):
                yield _make_unread(name + "/", None, "folder", "", held)


def _list_state_beside_file(source: Source, held: set[str], saves: Saves | None) -> Iterator[Unread]:
    """Yield the state files that lie in the same folder as a single-file checkpoint; none for a web server.

    Args:
        held: names of the components that the checkpoint has, such as "optim"; files of these are ignored.
        saves: not used; `_list_unread_in_folder`, which is called in the same place, needs them.
    """
    if not source.root.startswith("http"):  # where listings are pages for people, a question a file is too much
        yield from _list_state_by_name(source, set(source.identities()), held, "", None)


def _list_state_in_parent(source: Source, held: set[str], saves: Saves | None) -> Iterator[Unread]:
    """Yield the state files in the parent folder, where a trainer spreads one checkpoint over several folders; their
    names begin with "../".

    Args:
        held: names of the components that the checkpoint has, such as "optim"; files of these are ignored.
        saves: how the layout keeps several saves in one folder; None if it does not.
    """
    parent, name = find_parent_folder(source)
    known = (half for layout in layouts.layouts().values() for half in layout.program.halves)
    halves = [h for h in known if re.fullmatch(h.folder, name)]
    if not parent or (not halves and saves is None):
        return
    with open_source(parent) as above:
        names = above.list()
        half = next((h for h in halves if h.belongs(parent, names, name)), None)
        if halves and half is None:
            return
        if half is None and (saves is None or not saves.pointers & set(names)):
            return
        stem = re.sub(r"\d+", "", name)
        same = {n for n in names if re.sub(r"\d+", "", n) == stem}  # other steps, or another model and its optimizer
        same |= {n.split("/")[1] for n in source.identities() if n.startswith("../")}
        yield from _list_state_by_name(above, same, held, "../", None if half is None else half.other)


def _list_state_by_name(
    source: Source, skip: set[str], held: set[str], above: str, kind: StateFile | None
) -> Iterator[Unread]:
    """Yield the state files in a folder that have names which trainers use, except for components that the checkpoint
    has.

    Args:
        source: the folder.
        skip: names of entries of the folder that are ignored.
        held: names of the components that the checkpoint has, such as "optim".
        above: prefix of each name in the result, such as "../".
        kind: the one kind of file to look for; None for all.
    """
    for entry in source.list():
        for name in (entry, entry + "/") if entry not in skip else ():
            found = (
                classify_state_file(name) if kind is None else kind[1:] if re.fullmatch(kind.pattern, name) else None
            )
            if found is None or found[1] in ("", "adapter") or found[1] in held:
                continue
            is_folder, size = source.glance(entry)
            if is_folder == name.endswith("/") and (not is_folder or _holds_state(source, entry, found)):
                yield Unread(printable(above + name), _sum_folder_bytes(source, entry) if is_folder else size, *found)


def _holds_state(source: Source, folder: str, kind: tuple[str, str]) -> bool:
    """Tell whether a folder with the name of a state folder contains state files; a folder of source code may be called
    dataloader, too. Always True if the kind has no component.

    Args:
        folder: path of the folder in `source`.
        kind: (what it is, its component), as `classify_state_file` returns it for the folder's name.
    """
    return not kind[1] or any(n == ".metadata" or re.fullmatch(_STATE, n) for n in source.list(folder))


def _classify_checkpoint_file(name: str) -> tuple[str, str] | None:
    """Return (what it is in words, its component) of a file in the checkpoint's own folder, by its name: ("RNG",
    "rng"). The component is "" if it has none. None for files that need no mention: config, tokenizer, texts."""
    if (known := classify_state_file(name)) is not None:
        return known
    if name.startswith((".", "tokenizer")):
        return None
    if not re.fullmatch(_STATE, name):
        return None if re.fullmatch(_PLAIN, name) or model_files.is_model_or_trainer_file(name) else ("unknown", "")
    if name.endswith(".distcp"):
        return "left over from another save: .metadata does not name it", ""
    return next((what, component) for word, what, component in _WORDS if word in name.lower())


def classify_state_file(name: str) -> tuple[str, str] | None:
    """Return (what it is in words, its component) for a file or folder name that trainers use: ("RNG", "rng"). The
    component is "" if it has none. None for any other name. The name of a folder has to end with "/"."""
    known = (*_NAMES, *layouts.state_files())
    m = _compile_pattern(known).fullmatch(name)
    return None if m is None else next(k[1:] for i, k in enumerate(known) if m[f"k{i}"] is not None)


@cache
def _compile_pattern(known: tuple[StateFile, ...]) -> re.Pattern[str]:
    """Return one regular expression that matches the names of all these kinds of files, with the groups k0, k1, ... for
    the kinds in order."""
    return re.compile("|".join(f"(?P<k{i}>{k.pattern})" for i, k in enumerate(known)))


def _make_unread(name: str, size: int | None, what: str, component: str, held: set[str]) -> Unread:
    """Return the `Unread` of a file. Its component is "" if it is in `held`, the components that the checkpoint has:
    then the file is no loss."""
    return Unread(printable(name), size, what, "" if component in held else component)


def _sum_folder_bytes(source: Source, folder: str) -> int:
    """Return the bytes of the first `_MOST` files of a folder, as far as their sizes are known."""
    return sum(source.glance(f"{folder}/{n}")[1] or 0 for n in source.list(folder)[:_MOST])


def _sum_bytes(rows: Iterable[Unread]) -> int:
    """Return the total bytes of unread files; unknown sizes count as 0."""
    return sum(r.bytes or 0 for r in rows)


# ---------------------------------------------------------------------------------------------------------- judging


def list_lost_state(ckpt: Checkpoint, holds: Collection[str], only: Collection[str] | None) -> list[Unread]:
    """List the unread files without which a conversion would give a checkpoint that only looks complete: state of
    requested components that the target can hold.

    Empty if the checkpoint has no weights of a model, or if only trainer_state.json is unread: Trainer writes that file
    next to weights that are to be published, too.

    Args:
        holds: components that the target holds; empty if it holds all.
        only: components that were asked for; None for all.
    """
    if not any(t.path[0] == "model" for t in ckpt.tensors.values()):
        return []
    found = [
        r
        for r in ckpt.unread
        if r.component and (not holds or r.component in holds) and (only is None or r.component in only)
    ]
    return [] if all(r.name.endswith("trainer_state.json") for r in found) else found


def describe_files(rows: Iterable[Unread]) -> str:
    """Return a text that lists files with their sizes and contents. Files whose names differ only in numbers form one
    item; eight items are named, and the rest is counted.
    """
    groups: dict[tuple[str, str], list[Unread]] = {}
    for r in rows:
        groups.setdefault((re.sub(r"\d+", "#", r.name), r.what), []).append(r)
    parts = []
    for same in list(groups.values())[:8]:
        size = "" if all(r.bytes is None for r in same) else f"{human(_sum_bytes(same))}, "
        more = f" and {len(same) - 1} more" if len(same) > 1 else ""
        parts.append(f"{same[0].name}{more} ({size}{same[0].what})")
    if rest := [r for same in list(groups.values())[8:] for r in same]:
        parts.append(f"and {len(rest)} more ({human(_sum_bytes(rest))})")
    return ", ".join(parts)


def make_unread_note(rows: list[Unread]) -> list[str]:
    """Return the checkpoint's notes about unread files: a list of one sentence, or an empty list where there are no
    files."""
    return [f"not read, so not carried: {describe_files(rows)}"] if rows else []
