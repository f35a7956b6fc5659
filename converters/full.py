"""full: one torch.save file (.pt, .pth, .bin, .ckpt), zip or legacy, of a tree of dicts and lists.

Read: any tree whose leaves are tensors and plain values, in the forms that names.py knows: {"model", "optim"},
{"model_state_dict", "optimizer_state_dict"}, {"state_dict", "optimizer_states"}, a bare state dict; integer optimizer
ids are named if order and shapes leave only one way. Storages may be shared (tied weights), larger than what is used of
them (views) or strided (transposed). Modules that were pickled whole are their state dicts. Containers other
than dicts with string keys and lists are values, kept whole.

Written: a zip of stored records under `archive/`, each 64-byte aligned and with its CRC32, that
`torch.load(weights_only=True, mmap=True)` reads:

    {"model": {fqn: tensor}, "optim": {"state": {fqn: {slot: tensor}}, "param_groups": [...]}, ...the rest}

or, of what was dcp or full, the source's own tree: its keys, its names of parameters, its integer ids.
Tied weights share a storage again; tensors of the optimizer never do. `archive/ckpttool.json` holds the digests; torch
does not look at it. What weights_only=True would refuse (instances of classes) is listed as dropped; numpy arrays
become tensors.

Sources: torch/serialization.py, torch/_weights_only_unpickler.py (what may be loaded), torch_zip.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ckpttool.bounded_json import parse
from ckpttool.engine.copy.value_digests import digest_values_without_arrays
from ckpttool.engine.recorded import MOST_RECORD_BYTES
from ckpttool.errors import Corrupt, Unreadable, Unsafe, Unsupported
from ckpttool.formats import stored_tensors, torch_pickles, torch_zip, zip_bytes
from ckpttool.formats.pickles import Global, Opaque, list_children
from ckpttool.formats.subclasses import make_composite_call
from ckpttool.formats.whole_modules import replace_modules
from ckpttool.index.checkpoint import (
    ITEMSIZE,
    Checkpoint,
    Chunks,
    Leaves,
    Salvage,
    TensorEntry,
    Value,
    joined,
    same_bytes,
    tied_weights,
)
from ckpttool.index.composites import MARK, Composite, collapse_composites, shape_of
from ckpttool.index.draft import Draft, Dropped
from ckpttool.index.names import original_path
from ckpttool.index.records import Records
from ckpttool.index.trees import nest
from ckpttool.layouts import Layout, Place, ReadOptions, WriteOptions, checkpoint_of, name_leaves, tree_of
from ckpttool.printable import count_noun
from ckpttool.program import Advice, Program
from ckpttool.storage import source
from ckpttool.storage.source import Source

__all__ = ["LAYOUTS"]

_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")
_LEGACY = b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
# What torch's weights_only unpickler builds besides plain values (torch/_weights_only_unpickler.py): by a call, and as
# a reference.
_LOADABLE = {Global("torch", "device"), Global("torch", "Size"), Global("collections", "Counter")}
_REFERENCES = {
    *_LOADABLE,
    Global("collections", "OrderedDict"),
    *(Global("torch", name) for name in (*ITEMSIZE, "Tensor")),
}


def detect(where: Place) -> tuple[bool, str]:
    """Return (whether a place is one file that torch.save wrote, the reason as text)."""
    source, name = where
    if name is None:
        return False, "one .pt file; this is a folder"
    head = source.read(name, 0, min(source.size(name), 64))
    if zip_bytes.is_zip(head):
        return True, "is a zip, as torch.save writes"
    if _LEGACY in head:
        return True, "is a legacy torch.save file"
    if name.endswith(_SUFFIXES):
        return True, f"is named {name.rpartition('.')[2]}"
    return False, "neither a zip nor a legacy torch.save file"


def read(where: Place, options: ReadOptions) -> Checkpoint:
    """Return the index of a file.

    Raises:
        Unsupported: it holds no dict of tensors. Corrupt: it is damaged, or a folder. Unsafe: its pickle would run
            code.
    """
    source, name = where
    if name is None:
        raise Corrupt(
            f"{source.root} is a folder, and a file of torch.save has this name. Fetch the checkpoint again.",
            code="CKPT0401",
        )
    what = f"{source.root}/{name}"
    read_at = source.reader_of(name)
    modules: list[str] = []
    directory = torch_zip.read_directory(read_at, 0, source.size(name), what)
    tree = torch_zip.read(read_at, 0, source.size(name), what, later=True, records=directory)
    tree = replace_modules(tree, what, modules)
    if not isinstance(tree, dict):
        kind = f"an instance of {tree.cls}" if isinstance(tree, Opaque) else f"a {type(tree).__name__}"
        if isinstance(tree, stored_tensors.StoredTensor):
            kind = "a single tensor"
        raise Unsupported(f"{what} holds {kind}, not a state dict. Save model.state_dict() instead.", code="CKPT0307")
    entries, records = stored_tensors.read_leaves(tree, (), 0, read_at, what)
    # an optimizer without slots, as SGD without momentum, is a file of a directory whose model has the tensors
    of_directory = options.orders is not None and "param_groups" in tree
    # a dict with a key that is not text is one value, at the root
    if () in entries or (not of_directory and not any(shape_of(x) is not None for x in entries.values())):
        raise Unsupported(f"{what} holds no tensor at a key of a dict; nothing in it is a state dict.", code="CKPT0307")
    named = name_leaves(entries, options)
    out = checkpoint_of(named, "full", source.root, None, [name], source)
    out.records, out.notes = Records(records), [*modules, *out.notes]
    try:
        out.recorded = _read_own_record(read_at, directory, what, "ckpttool.json")
        out.recorded_values = _read_own_record(read_at, directory, what, "ckpttool-values.json")
        if states := _read_own_record(read_at, directory, what, "ckpttool-salvage.json"):
            out.salvage = Salvage.of_states(states)
    except Unreadable:
        raise
    except (Corrupt, Unsafe) as e:
        out.notes.append(
            f"the digests in its ckpttool.json were not compared, since it is damaged: {str(e).rstrip('.')}"
        )
    return out


def _read_own_record(
    read_at: source.ReadAt, directory: Mapping[str, zip_bytes.ZipRecord] | None, what: str, record_name: str
) -> dict[str, str]:
    """Return a record that `write` added to the zip, {name: text}; empty if there is none.

    Args:
        read_at: reads (offset, bytes) of the file.
        directory: {name: record} of the zip; None for a legacy file, which has no such records.
        what: name of the file in messages.
        record_name: "ckpttool.json" (digests of tensors), "ckpttool-values.json" (those of values) or
            "ckpttool-salvage.json" (how each tensor was salvaged).

    Raises:
        Corrupt, Unsafe: the record is damaged or too large.
    """
    record = (directory or {}).get(record_name)
    if record is None:
        return {}
    if record.length > MOST_RECORD_BYTES:
        raise Unsafe(
            f"{what}: {record_name} has {record.length} bytes; at most {MOST_RECORD_BYTES} are read", code="CKPT0704"
        )
    found = parse(read_at(record.offset, record.length), f"{what}: {record_name}")
    if not isinstance(found, dict) or not all(isinstance(d, str) for d in found.values()):
        raise Corrupt(f"{what}: {record_name} is not a map of names to text", code="CKPT0406")
    return found


def write(ckpt: Checkpoint, source: Source, options: WriteOptions) -> Draft:
    """Draft one zip, as torch.save writes. The world size has no meaning here. Values that
    torch.load(weights_only=True) would refuse are dropped; numpy arrays become tensors.

    Raises:
        Unsupported: there are no tensors, and the file is no part of a trainer's directory.
    """
    from ckpttool.formats.numpy_values import numpy_to_torch
    from ckpttool.formats.torch_zip_writer import TorchFiles

    if options.tree is None and not ckpt.tensors and ckpt.salvage is None:
        raise Unsupported(
            "the checkpoint holds no tensors, and a file without any is not read as a checkpoint. Write dcp or audit, "
            "which keep such a state.",
            code="CKPT0317",
        )
    values = {n: Value(v.path, numpy_to_torch(v.data)) for n, v in ckpt.values.items()}
    dropped = [
        Dropped(n, 0, why)
        for n, v in values.items()
        if v.path[-1] != MARK and (why := _explain_unloadable(v.data)) is not None
    ]
    arrays = [n for n, v in values.items() if v.data is not ckpt.values[n].data]
    for d in dropped:
        del values[d.name]
    wanted = {n: replace(t, dtype=options.cast(n, t.dtype)) for n, t in ckpt.tensors.items()}
    # an optimizer counts the steps of each parameter in place: those that ranks share in ZeRO's files must not share a
    # storage
    may_share = {n: t for n, t in ckpt.tensors.items() if t.path[0] != "optim"}
    same = {n: o for n, o in tied_weights(may_share).items() if wanted[n].dtype == wanted[o].dtype}
    keys = {name: str(i) for i, name in enumerate(n for n in ckpt.tensors if n not in same)}
    leaves: Leaves = {t.path: t for t in wanted.values()}
    leaves |= {v.path: v.data for v in values.values()}
    tree, notes = tree_of(collapse_composites(leaves), ckpt.origin, same_bytes, options)
    optimizer = {p[1] for p in leaves if p[0] == "optim" and len(p) > 1}
    if "param_groups" in optimizer and "state" not in optimizer and ("optim", "state") not in ckpt.origin:
        # Optimizer.load_state_dict asks for it where there are no slots, as in SGD
        places = [original_path(("optim", "param_groups"), ckpt.origin), ("optim", "param_groups")]
        if options.tree is not None:
            places = [p[: p.index("param_groups") + 1] for p in tree if "param_groups" in p[:2]]
        groups = next((a for a in places if any(p[: len(a)] == a for p in tree)), None)
        if groups is not None:
            tree[*groups[:-1], "state"] = {}
    if arrays:
        notes.append(
            f"numpy arrays and scalars in {count_noun(len(arrays), 'value')}, first {arrays[0]}, are torch tensors and "
            "numbers in this file, since torch.load(weights_only=True) refuses numpy"
        )

    def ref(t: TensorEntry) -> torch_pickles.TensorRef:
        """Return the reference to a tensor's storage that is pickled."""
        name = joined(t.path)
        return torch_pickles.TensorRef(t.dtype, t.shape, keys[same.get(name, name)], t.numel)

    for path, leaf in tree.items():
        if isinstance(leaf, TensorEntry):
            tree[path] = ref(leaf)
        elif isinstance(leaf, Composite):
            tree[path] = make_composite_call(leaf, {n: ref(t) for n, t in leaf.tensors.items()})
    files = TorchFiles()
    files.add(options.target, nest(tree), {key: wanted[n].nbytes for n, key in keys.items()})
    tensors: dict[str, TensorEntry] = {}
    for name, t in wanted.items():
        at = files.offset(0, keys[same.get(name, name)])
        tensors[name] = replace(t, chunks=Chunks.whole(t.shape, 0, at, t.nbytes), coding="raw")
    out = Checkpoint("full", options.target, None, [], [], tensors, values)
    return files.draft(
        out,
        dict(ckpt.tensors),
        dropped=dropped,
        aliases=same,
        notes=notes,
        changed=dict.fromkeys(arrays, "numpy arrays and scalars became torch tensors and numbers"),
        recorded=True,
        salvage=ckpt.salvage.states(wanted, values) if ckpt.salvage is not None else None,
        values=digest_values_without_arrays(values),
    )


def _explain_unloadable(x: object) -> str | None:
    """Return why torch.load(weights_only=True) would refuse a value; None where it would not."""
    todo = [x]
    while todo:
        v = todo.pop()
        if isinstance(v, Opaque):
            if v.cls not in _LOADABLE:
                return f"an instance of {v.cls}, which torch.load(weights_only=True) refuses"
            todo += v.parts()[1:]
        elif isinstance(v, Global) and v not in _REFERENCES:
            return f"a reference to {v}, which torch.load(weights_only=True) refuses"
        elif isinstance(v, frozenset):
            return "a frozenset, which torch.load(weights_only=True) refuses"
        elif not isinstance(v, stored_tensors.Inline):
            todo.extend(list_children(v))
    return None


def _describe_next_step(advice: Advice) -> str:
    """Return advice: the commands that convert the file for an adapter, a job of several ranks, or transformers."""
    if advice.adapter is not None:
        return advice.extract_adapter()
    job, model = advice.convert("--to dcp -n RANKS"), advice.convert("--to hf --config MODEL")
    return f"for a job of several ranks: {job}; for transformers: {model}"


#: Its rows in the tables of the documents (docs/_hooks.py).
_ROWS = {
    "readme-layouts": (
        (
            "**full**",
            "one `torch.save` file",
            "`.pt`, `.pth`, `.bin`, `.ckpt`, legacy and zip",
            "everything `weights_only=True` loads",
        ),
    ),
    "layouts": (
        (
            "**full**",
            "`.pt`, `.pth`, `.bin`, `.ckpt`: zip and legacy `torch.save`; shared storages, views, strides; modules",
            "a zip with correct CRC32s and 64-byte alignment, for `torch.load(weights_only=True, mmap=True)`",
        ),
    ),
}
LAYOUTS = (
    Layout(
        name="full",
        title="one torch.save file (FULL_STATE_DICT)",
        detect=detect,
        read=read,
        write=write,
        is_file=True,
        suffixes=(".pt", ".pth", ".bin", ".ckpt"),
        aliases=("torch", "pytorch", "pt", "full_state_dict"),
        own_keys=True,
        reader_uses=("config", "like"),
        writer_uses=(),
        keeps_subclasses=True,
        program=Program(rows=_ROWS, next_step=_describe_next_step),
    ),
)
