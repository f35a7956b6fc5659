"""universal: DeepSpeed's Universal Checkpoint, one folder per parameter, for any number of ranks.

    DIR/latest_universal                             the tag, no newline; written last
    DIR/<tag>/zero/<fqn>/fp32.pt exp_avg.pt exp_avg_sq.pt       stage 3: a bare flat tensor, its shape is in
                                                                param_shapes
                                                     stages 1, 2: {"param": tensor, "cat_dim": 0}, and step.pt;
                                                                stage 3 of an AutoTP job: the same without step.pt,
                                                                without which each rank takes the whole for its part
                                                     stage 3 with several flat tensors: step.pt too, as it was
    DIR/<tag>/zero/optimizer_state.pt                loss scaler, param_groups; stage 3: the steps, as
                                                     numbers where there are several flat tensors
    DIR/<tag>/*_model_states.pt                      as in a ZeRO save (deepspeed/module_state.py): of the ranks it was
                                                     made from

What is not trained is only in the model files, so they are needed for buffers and frozen parameters, which
DeepSpeed's own loader does not restore from here; nor does it, at stage 3, restore the hyperparameters of other param
groups than the first, or slots other than exp_avg and exp_avg_sq. zero3 has none of these problems: write that if the
number of ranks is known.

Written (deepspeed/write_universal.py): for --zero-stage 1, 2 or 3, the model file of one rank. An AutoTP job of any
size cuts the whole tensors by itself.

Sources: deepspeed 0.19.8, checkpoint/ds_to_universal.py, runtime/zero/stage3.py
(load_hp_checkpoint_state_from_checkpoint_dir_stage3), runtime/base_optimizer.py, checkpoint/universal_checkpoint.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import prod
from typing import Any

from ckpttool.errors import Corrupt, Unsupported
from ckpttool.formats.pickles import short
from ckpttool.formats.stored_tensors import StoredTensor
from ckpttool.index.checkpoint import Checkpoint, TensorEntry
from ckpttool.layouts import Layout, Place, ReadOptions, late
from ckpttool.program import Advice, Program

from ..options import UniversalOptions
from . import files as ds
from .files import FlatRange
from .module_state import SaveReader
from .tensor_cuts import INFO, advise_joining

__all__ = ["LAYOUTS"]

_BY_GROUP = "max_exp_avg_sq"


def detect(where: Place) -> tuple[bool, str]:
    """Return (whether a place is a universal checkpoint; the file that shows it, or what is missing).

    It is one if it has zero/optimizer_state.pt next to model files, or if it has no `latest`, and has a
    `latest_universal` or the folder of a save with zero/ in it.
    """
    source, file = where
    if file is not None:
        yes = file == "latest_universal"
        return yes, "is a latest_universal" if yes else "a folder, or its latest_universal; this is another file"
    names = source.list()
    if source.exists(ds.UNIVERSAL) and ds.is_save(names):
        return True, f"has {ds.UNIVERSAL}"
    if "latest_universal" in names and "latest" not in names:
        return True, "has latest_universal"
    if "latest" not in names:
        for tag, inside in ds.list_deepspeed_saves(source).items():
            if "zero" in inside:
                return True, f"has {tag}/{ds.UNIVERSAL}"
    return False, "no latest_universal" + (" without a latest" if "latest_universal" in names else "")


def read(where: Place, options: ReadOptions) -> Checkpoint:
    """Return the index of a universal checkpoint.

    Raises:
        Corrupt: a parameter that param_shapes names has no folder or files of the wrong size, or files are from
            different saves.
        Unsupported: a parameter has a name that no folder can have, or the save is not purely data parallel.
    """
    reading = SaveReader(where, options, "latest_universal")
    models = reading.load_models()
    if reading.tensor_ranks > 1:
        info = models[0].tree.get(INFO)
        joined = isinstance(info, dict) and "affine_map" in info
        raise Unsupported(
            f"{reading.where}: made from a save of {reading.tensor_ranks} tensor parallel ranks, whose model files are "
            "joined only when that save itself is read"
            + (". Convert that one." if joined else f", which has no affine_map. {advise_joining(models[0].tree)}"),
            code="CKPT0325",
        )
    shapes = ds.param_shapes(models[0])
    if reading.save.files(ds.MODEL, 1) and ds.get_zero_setting(
        models[0].tree.get("ds_config"), "round_robin_gradients"
    ):
        raise Corrupt(
            f"{reading.where}: made from a save with round_robin_gradients, of which ds_to_universal.py puts the wrong "
            "bytes under most names and does not report it. Convert that save itself."
        )
    state = reading.load(ds.UNIVERSAL)
    slots: dict[str, dict[str, Any]] = {}
    for group in shapes:
        for name, shape in group.items():
            slots[name] = _read_parameter(reading, name, shape)
            if not isinstance(slots[name].get("fp32"), TensorEntry):
                raise Corrupt(
                    f'{reading.where}zero/{name}: fp32.pt is missing, the weights of "{name}". Fetch it.',
                    code="CKPT0401",
                )
            reading.masters[name] = replace(slots[name].pop("fp32"), path=("model", name))
    _refuse_unknown_folders(reading, models[0], slots.keys())
    reading.rest.update(ds.read_loss_scaler(state.tree))
    reading.add_model_state(models)
    members = [list(g) for g in shapes]
    listed = state.get("param_groups", list)
    _refuse_missing_slots(reading, members, listed, slots)
    base = state.tree.get("optimizer_state_dict")
    steps = base.get("state") if isinstance(base, dict) else None
    for g, names in enumerate(members):
        own = steps.get(g) if isinstance(steps, dict) else None
        for name in names:
            for slot, entry in slots[name].items():
                reading.add_slot(name, slot, entry)
            for slot, x in (own if isinstance(own, dict) else {}).items():
                if ("optim", "state", name, str(slot)) in reading.optim or (isinstance(x, StoredTensor) and x.shape):
                    continue  # rank 0's part of what lies in the parameter's folder
                leaf = reading.whole_tensor(state, x, ()) if isinstance(x, StoredTensor) else x
                reading.add_slot(name, str(slot), leaf)
    for key, x in base.items() if isinstance(base, dict) else ():
        if key not in ("state", "param_groups"):
            reading.add_leaves(("optim", str(key)), x, state)
    reading.add_param_groups(state, listed, members)
    return reading.build_checkpoint("universal", None)


def _refuse_missing_slots(
    reading: SaveReader, members: list[list[str]], groups: list[Any], slots: dict[str, dict[str, object]]
) -> None:
    """Refuse a save in which parameters of one optimizer have different slots.

    Groups whose options have the same names are of one optimizer: Muon's have other options than those of the Adam
    beside it. Only the maximum of AMSGrad (max_exp_avg_sq), an option of a param group, may differ between its groups.

    Args:
        reading: the reader of the save.
        members: the names of the parameters in each param group.
        groups: the param groups as the file has them.
        slots: {parameter: {slot: tensor or number}}.

    Raises:
        Corrupt: a file is missing in the folder of one of two parameters; it names them and the file.
    """
    of: dict[frozenset[str], str] = {}  # the first parameter of each optimizer
    for i, group in enumerate(members):
        options = groups[i] if i < len(groups) and isinstance(groups[i], dict) else ()
        for n in group:
            first = of.setdefault(frozenset(map(str, options)), n)
            odd = {s for s in slots[group[0]].keys() ^ slots[n].keys() if s == _BY_GROUP}
            other = group[0] if odd else first
            if missing := odd | {s for s in slots[first].keys() ^ slots[n].keys() if s != _BY_GROUP}:
                raise Corrupt(
                    f'{reading.where}zero/{n}: {min(missing)}.pt is there for only one of "{other}" and "{n}". The '
                    "copy is incomplete; fetch it again.",
                    code="CKPT0401",
                )


def _refuse_unknown_folders(reading: SaveReader, model: ds.File, params: Iterable[str]) -> None:
    """Refuse folders of parameters that the model does not have. DeepSpeed writes them for buffers and frozen
    parameters too.

    Args:
        reading: the reader of the save.
        model: the model file of rank 0, which lists all tensors.
        params: the names of the parameters that are trained.

    Raises:
        Corrupt: with the folder.
    """
    known = {*params, *model.get("module", dict)}
    for name in reading.source.list(reading.save.folder + "zero"):
        if name not in known and reading.source.list(f"{reading.save.folder}zero/{name}"):
            raise Corrupt(
                f"{reading.where}zero/{name}: the folder of a parameter that neither param_shapes nor module lists, so "
                "nothing would read it. The files are from different saves, or one was changed.",
                code="CKPT0409",
            )


def _read_parameter(reading: SaveReader, name: str, shape: tuple[int, ...]) -> dict[str, object]:
    """Read one parameter's folder; return {"fp32": weight, "exp_avg": slot, "step": tensor or number}, one entry for
    each file.

    `shape` is the parameter's shape by param_shapes. The paths of the entries are empty.

    Raises:
        Corrupt: a file holds no tensor, or one of another size or of no floating-point dtype.
        Unsupported: no folder can have the parameter's name.
    """
    folder = f"zero/{name}"
    if "/" in name or name in (".", ".."):
        raise Unsupported(f'{reading.where}: a parameter named "{name}".')
    out: dict[str, Any] = {}
    files = [n for n in reading.source.list(reading.save.folder + folder) if n.endswith(".pt")]
    reading.source.prefetch_ends(f"{reading.save.folder}{folder}/{n}" for n in files)
    for file in files:
        f = reading.load(f"{folder}/{file}", dict_only=False)
        x = f.tree.get("param") if isinstance(f.tree, dict) else f.tree
        slot = file.removesuffix(".pt")
        if not isinstance(x, StoredTensor):
            if slot == "step" and type(x) in (int, float):
                out[slot] = x
                continue
            raise Corrupt(f"{f.what} holds {short(x)}, not a tensor.", code="CKPT0412")
        if slot != "step" and "float" not in x.dtype:
            raise Corrupt(f"{f.what}: a tensor of {x.dtype}; weights and slots are floating-point.", code="CKPT0412")
        if (slot == "step" and not x.shape) or x.shape == shape:
            out[slot] = reading.whole_tensor(f, x, ())
        elif x.shape == (x.numel,) and x.contiguous and x.numel == prod(shape):
            reading.keep_crc(f, x)
            out[slot] = ds.build_entry_from_ranges(shape, x.dtype, (), [FlatRange(0, x.numel, f.number, x.extent[0])])
        else:
            raise Corrupt(
                f'{f.what}: a tensor of shape {x.shape}; param_shapes says that "{name}" has {shape}.', code="CKPT0412"
            )
    return out


def _next_step(advice: Advice) -> str:
    """Return advice for the user: DeepSpeed resumes with load_universal, and the command that converts for a job
    without it."""
    return f"resumes in DeepSpeed with load_universal; without it: {advice.convert('--to zero3 -n RANKS')}"


#: Its rows in the tables of the documents (docs/_hooks.py).
_ROWS = {
    "readme-layouts": (
        (
            "**universal**",
            "DeepSpeed Universal Checkpoint",
            "what `ds_to_universal.py` makes",
            "everything",
        ),
    ),
    "layouts": (
        (
            "**universal**",
            "what `ds_to_universal.py` writes, for any stage",
            "the same, for AutoTP jobs of any size too; DeepSpeed's loader restores less than the files hold, see "
            "[formats](formats.md#universal)",
        ),
    ),
}
LAYOUTS = (
    Layout(
        name="universal",
        title="DeepSpeed Universal Checkpoint",
        detect=detect,
        read=read,
        write=late("ckpttool.converters.deepspeed.write_universal:write"),
        prepare=late("ckpttool.converters.deepspeed.write_universal:prepare"),
        options=UniversalOptions,
        aliases=("deepspeed-universal", "ucp"),
        needs_named_optimizer=True,
        joins_remainders=True,
        reader_uses=("tag",),
        writer_uses=("like",),
        saves=ds.SAVES,
        program=Program(rows=_ROWS, next_step=_next_step),
    ),
)
