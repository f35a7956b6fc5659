"""hf: Hugging Face safetensors, the weights of a model; on request, all other state, too.

    DIR/model.safetensors                                    or, in shards,
    DIR/model-0000i-of-0000n.safetensors + model.safetensors.index.json {"metadata", "weight_map": {name: file}}
    DIR/config.json, generation_config.json, tokenizer files
    DIR/training_state/                                      with include_optimizer: hf/training_state.py

    DIR/adapter_model.safetensors, adapter_config.json, tokenizer files      with adapter: as PEFT saves it
    NAME.safetensors                                         all weights in one file, where the destination is named so

Also read: any other *.safetensors, one such file, and the shards of torch's
HuggingFaceStorageWriter(save_distributed=True), `shard-*-model-*.safetensors`, where several files hold parts of one
tensor and `__metadata__["DCP_SHARDING_INFO"]` {name: {"saved_offsets"}} says which; the whole shape is the furthest
corner of all parts.

Canonical names are those in memory. If transformers uses other names on the Hub (fused experts),
huggingface/hub_names.py maps between the two, as views. Tied weights are written once, after comparing their bytes, and
are read under both names.

Written: names, tensors, order and header byte for byte as `save_pretrained` writes them; shards as
huggingface_hub splits them.

Sources: safetensors_header.py; transformers/modeling_utils.py (save_pretrained); huggingface_hub/serialization/_base.py
(split_state_dict_into_shards_factory); torch/distributed/checkpoint/{hf_storage,_hf_utils}.py.
"""

from __future__ import annotations

import re
from dataclasses import replace

from ckpttool import bounded_json
from ckpttool.errors import Corrupt, IncompleteWeights, Unsafe, Unsupported
from ckpttool.formats import other_files, safetensors_header
from ckpttool.huggingface import model_files
from ckpttool.index.checkpoint import Checkpoint, Chunk, Chunks, Leaves, Salvage, TensorEntry, joined
from ckpttool.index.fqns import strip_wrappers
from ckpttool.index.names import CanonicalState
from ckpttool.index.records import Extent
from ckpttool.layouts import Layout, Place, ReadOptions, checkpoint_of, late
from ckpttool.printable import list_first, printable
from ckpttool.program import Advice, Program
from ckpttool.storage import urls
from ckpttool.storage.source import Source

from ..options import HfOptions
from .shards import ADAPTER, INDEX, SALVAGE, WHOLE

__all__ = ["LAYOUTS"]

_NUMBERED = re.compile(r"(.*-)(\d{5})-of-(\d{5})\.safetensors")
#: Entries of `__metadata__` that are read, or that the writer has, too.
_READ = frozenset(("format", "tensor_names", SALVAGE))
_SHARD = re.compile(r"shard-\d+-model-\d+-of-\d+\.safetensors")


def detect(where: Place) -> tuple[bool, str]:
    """Return whether a place is a folder with *.safetensors, or one such file; and, as text, why or why not."""
    source, file = where
    if file is not None:
        yes = file.endswith(".safetensors") and not _is_foreign(source, file)
        return yes, "is a .safetensors file" if yes else "not a .safetensors file of a model"
    names = source.list()
    if ".metadata" in names:
        return False, "has .metadata, which is of dcp"
    if "latest" in names:
        return False, "has latest, which is of DeepSpeed"
    every = [n for n in names if n.endswith(".safetensors")]
    found = [n for n in every if not _is_foreign(source, n)]
    if every and not found:
        return False, f"has {every[0]}, which is no file of a model"
    if "metadata.pkl" in names and any(re.fullmatch(r"[\w-]+_0\.(pt|safetensors|json)", n) for n in names):
        return False, "has metadata.pkl and files of ranks, which are of torch_checkpointing"
    if INDEX in names:
        return True, f"has {INDEX}"
    if found:
        return True, f"has {found[0]}" + (f" and {len(found) - 1} more" if len(found) > 1 else "")
    return False, "no *.safetensors" + (
        ", only pickles (*.bin): give one as the path" if any(n.endswith(".bin") for n in names) else ""
    )


def _is_foreign(source: Source, name: str) -> bool:
    """Return whether a safetensors file belongs to something else than the model of this folder.

    It does if it is a part of vLLM's sharded_state or of an unpacked archive, or if its name is that of optimizer or
    RNG state.

    Args:
        source: the folder.
        name: the name of the file.
    """
    if name in ("optimizer_state.safetensors", "rng_state.safetensors"):
        return True
    if not name.startswith(("model-rank-", "tensors-")):
        return False
    beside = ("MANIFEST.json",) if name.startswith("tensors-") and source.exists("MANIFEST.json") else ()
    return other_files.identify_foreign_checkpoint((name,), beside) is not None


# --------------------------------------------------------------------------------------------------------- reading


def read(where: Place, options: ReadOptions) -> Checkpoint:
    """Return the index of a folder or of one file; only headers are read.

    Raises:
        NotRecognised: its only files are parts of another program's checkpoint.
        Corrupt: files are missing, damaged or contradict each other. IncompleteWeights: rows of the embedding are
            missing.
        Unsupported: an index names other files than model.safetensors, which is there too.
    """
    from ckpttool.formats.deltas import refuse_delta

    from . import training_state
    from .quantised_weights import assemble_quantised_weights

    source, file = where
    refuse_delta(source, file)
    names = [file] if file is not None else source.list()
    own = [n for n in names if not (n.endswith(".safetensors") and _is_foreign(source, n))]
    if own != names:
        if not any(n.endswith(".safetensors") for n in own):
            other_files.refuse_foreign_checkpoint(
                names, ("MANIFEST.json",), urls.display_path(f"{source.root}/{file}" if file else source.root)
            )
        names = own
    shards = [n for n in names if _SHARD.fullmatch(n)]
    notes: list[str] = []
    about: dict[str, str] = {}
    if file is None and INDEX in names:
        tensors, files = _read_indexed_files(source, notes, about)
    elif shards:
        tensors, files = _read_rank_shards(source, shards)
        notes.append(
            f"{len(shards)} shards, which do not say how many there should be: shapes are those that their parts make "
            "up"
        )
    else:
        tensors, files = _read_plain_files(source, _list_model_files(source, names), about)
    state = training_state.read(source, len(files)) if training_state.FOLDER in names else None
    config = model_files.read_config_json(source) if file is None and "config.json" in names else None
    if options.config is not None:
        config = model_files.read_model_files(options.config)[0] or config
    if not tensors:
        raise Corrupt(f"{source.root}: its safetensors files hold no tensor.", code="CKPT0401")
    if shards and config is not None:
        _refuse_truncated_vocabulary(source, tensors, config)
    plain = frozenset(tensors)
    objects = assemble_quantised_weights(source, files, tensors, notes)
    if left := [printable(k)[:60] for k in about if k not in _READ and k not in plain and k not in objects]:
        notes.append(f"__metadata__ in the headers of the files is not carried: {list_first(left, 5)}")
    clean = strip_wrappers(tensors)
    leaves: Leaves = {("model", clean[n]): t for n, t in tensors.items()}
    leaves |= {found.path: found for found in objects.values()}
    if state is not None:
        leaves |= {t.path: t for t in state.tensors.values()} | {v.path: v for v in state.values.values()}
        files += state.files
    out = checkpoint_of(CanonicalState(leaves, {}, None, notes), "hf", source.root, None, files, source)
    out.config = config
    if file is not None:
        out.salvage = _parse_salvage(source, file, notes)
    if state is not None:
        out.world_size, out.trainer = state.world_size, state.trainer
    return out


def _refuse_truncated_vocabulary(source: Source, tensors: dict[str, TensorEntry], config: dict[str, object]) -> None:
    """Raise if an embedding has fewer rows than `vocab_size` in config.json, since a shard is then missing.

    Files of torch's HuggingFaceStorageWriter do not state how many rows a tensor has, so only the config shows this.

    Args:
        source: the folder.
        tensors: {name: tensor} of the weights.
        config: config.json.

    Raises:
        IncompleteWeights: with the first such weight.
    """
    from ckpttool.index.vocabulary import is_vocabulary_parameter

    rows = config.get("vocab_size")
    for name, t in tensors.items():
        if is_vocabulary_parameter(name) and type(rows) is int and t.shape and 0 < t.shape[0] < rows:
            raise IncompleteWeights(
                f'{source.root}: the shards hold {t.shape[0]} rows of "{name}", and config.json says vocab_size '
                f"{rows}: a shard of the weights is missing. The copy is incomplete; fetch the folder again."
            )


def _parse_salvage(source: Source, file: str, notes: list[str]) -> Salvage | None:
    """Return the record of a salvaged copy in the metadata of a file; None if there is none, or if it cannot be read,
    which is added to `notes`."""
    text = safetensors_header.read_header(source, file)[1].get(SALVAGE)
    if text is None:
        return None
    try:
        states = bounded_json.parse(text.encode("utf-8", "surrogatepass"), f"{source.root}/{file}: {SALVAGE}")
    except (Corrupt, Unsafe) as e:
        notes.append(f"what was salvaged is not known: {e}")
        return None
    if not isinstance(states, dict) or not all(isinstance(state, str) for state in states.values()):
        notes.append(f"what was salvaged is not known: {SALVAGE} is not a map of names to text")
        return None
    return Salvage.of_states(states)


def with_memory_names(ckpt: Checkpoint) -> Checkpoint:
    """Return the checkpoint with its weights under the names that they have in memory, as config.json implies.

    A checkpoint without config.json is returned unchanged.

    Args:
        ckpt: the checkpoint; all its tensors must have their byte ranges in files.

    Raises:
        Corrupt: config.json is of another model. Unsupported: weights cannot be put together as its model has them.
    """
    model = {str(t.path[1]): t for t in ckpt.tensors.values() if t.path[0] == "model" and len(t.path) == 2}
    if ckpt.config is not None and model:
        from .memory_names import restore_memory_names

        notes = list(ckpt.notes)
        tensors = {joined(t.path): t for t in restore_memory_names(model, ckpt.config, notes).values()}
        tensors.update((n, t) for n, t in ckpt.tensors.items() if t.path[0] != "model" or len(t.path) > 2)
        ckpt = replace(ckpt, tensors=tensors, notes=notes)
    return ckpt


def locate(ckpt: Checkpoint, source: Source) -> Checkpoint:
    """Return the checkpoint with its weights under the names that they have in memory.

    The names follow from config.json. If the folder has a training state of ckpttool, order and names are those that it
    records.

    Raises:
        Corrupt: the training state belongs to other weights, or config.json to another model. Unsupported: weights
            cannot be put together as its model has them.
    """
    from . import training_state

    ckpt = with_memory_names(ckpt)
    if training_state.INDEX not in ckpt.files:
        return ckpt
    return training_state.restore_saved_weights(ckpt, source)


def _list_model_files(source: Source, names: list[str]) -> list[str]:
    """List the safetensors files among `names` that hold the weights of the model, in a folder without an index.

    All of them do, except beside model.safetensors: with a config.json, model.safetensors is the only one; without, the
    file of an adapter is left out.

    Args:
        source: the folder.
        names: names of files in the folder.

    Raises:
        Corrupt: numbered shards are missing.
    """
    files = [n for n in names if n.endswith(".safetensors")]
    if WHOLE in files and ("config.json" in names or ADAPTER in files):
        files = [n for n in files if n == WHOLE or ("config.json" not in names and n != ADAPTER)]
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
                "incomplete; fetch the folder again, or give the file itself to read it alone.",
                code="CKPT0401",
            )
    return files


def _read_plain_files(
    source: Source, files: list[str], about: dict[str, str]
) -> tuple[dict[str, TensorEntry], list[str]]:
    """Read the headers of safetensors files that hold each tensor once.

    Args:
        source: the folder.
        files: the names of the files.
        about: gets the entries of the files' `__metadata__`.

    Returns:
        ({name: tensor}, `files`, to which the file numbers of the tensors refer).

    Raises:
        Corrupt: two files hold the same tensor.
    """
    out: dict[str, TensorEntry] = {}
    safetensors_header.prefetch_headers(source, files)
    for i, file in enumerate(files):
        slots, meta = safetensors_header.read_header(source, file)
        about.update(meta)
        for name, slot in slots.items():
            if name in out:
                raise Corrupt(
                    f'"{name}" is in {file} and in {files[out[name].chunks[0].extent.file]}, and no index says which '
                    "counts. Give the file that you want, or remove the other.",
                    code="CKPT0411",
                )
            out[name] = _make_entry(name, slot, i)
    return out, files


def _make_entry(name: str, slot: safetensors_header.Slot, file: int) -> TensorEntry:
    """Return the entry of a weight that file number `file` holds completely; `slot` is its slot in the file's
    header."""
    return TensorEntry(
        slot.dtype, slot.shape, ("model", name), Chunks.whole(slot.shape, file, slot.offset, slot.length)
    )


def _read_indexed_files(
    source: Source, notes: list[str], about: dict[str, str]
) -> tuple[dict[str, TensorEntry], list[str]]:
    """Return ({name: tensor}, files) of the shards that model.safetensors.index.json lists. Tensors in them that the
    index does not list are included; `notes` gets their number, and `about` the metadata of the shards.

    Raises:
        Corrupt: the shards do not hold what it says. Unsupported: model.safetensors is there, and the index names
            others.
    """
    what = f"{source.root}/{INDEX}"
    index = bounded_json.parse(source.read_all(INDEX, 128 << 20), what)
    weights = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weights, dict) or not all(isinstance(v, str) for v in weights.values()):
        raise Corrupt(f"{what}: no weight_map of names to files.", code="CKPT0406")
    files = sorted(set(weights.values()))
    aside = [n for n in source.list() if n.endswith(".safetensors") and n not in files]
    if WHOLE in aside:
        raise Unsupported(
            f"{source.root} holds {WHOLE}, which transformers reads, and {INDEX}, which names other files. One of the "
            f"two is left over from an earlier save: remove it, or give {WHOLE} itself.",
            code="CKPT0328",
        )
    safetensors_header.prefetch_headers(source, files)
    slots = []
    for f in files:
        found, meta = safetensors_header.read_header(source, f)
        slots.append(found)
        about.update(meta)
    at = {f: i for i, f in enumerate(files)}
    out: dict[str, TensorEntry] = {}
    for name, file in weights.items():
        i = at[file]
        if name not in slots[i]:
            raise Corrupt(
                f'{what} says "{name}" is in {file}, which does not hold it. The shards do not belong to one model.',
                code="CKPT0412",
            )
        out[name] = _make_entry(name, slots[i][name], i)
    extra = [(n, i) for i, s in enumerate(slots) for n in s if weights.get(n) != files[i]]
    for name, i in extra:
        if name in out:
            raise Corrupt(
                f'"{name}" is in {weights[name]} as {INDEX} says, and in {files[i]} too; which one counts is not '
                "clear.",
                code="CKPT0411",
            )
        out[name] = _make_entry(name, slots[i][name], i)
    if extra:
        notes.append(
            f"{len(extra)} tensors are not listed in {INDEX} and were taken from their files, first {extra[0][0]}"
        )
    return out, files


def _read_rank_shards(source: Source, files: list[str]) -> tuple[dict[str, TensorEntry], list[str]]:
    """Read the headers of the shards of torch's HuggingFaceStorageWriter, several of which hold parts of one tensor.

    Args:
        source: the folder.
        files: the names of the shards.

    Returns:
        ({name: whole tensor}, `files`, to which the file numbers of the tensors refer).

    Raises:
        Corrupt: a shard does not say where a part belongs, or parts of a tensor do not fit.
    """
    parts: dict[str, list[tuple[str, tuple[int, ...], Chunk]]] = {}
    safetensors_header.prefetch_headers(source, files)
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
                raise Corrupt(
                    f'{file}: DCP_SHARDING_INFO does not say where the part of "{name}" belongs.', code="CKPT0406"
                )
            chunk = Chunk(tuple(start), slot.shape, Extent(i, slot.offset, slot.length))
            parts.setdefault(name, []).append((slot.dtype, tuple(start), chunk))
    out: dict[str, TensorEntry] = {}
    for name, rows in parts.items():
        if len({d for d, _, _ in rows}) != 1 or len({len(s) for _, s, _ in rows}) != 1:
            raise Corrupt(f'the parts of "{name}" have different dtypes or dimensions.', code="CKPT0412")
        shape = tuple(max(c.start[d] + c.shape[d] for _, _, c in rows) for d in range(len(rows[0][1])))
        unique = {(c.start, c.shape): c for _, _, c in rows}  # a replicated tensor is in several files
        chunks = Chunks.of(len(shape), unique.values())
        out[name] = TensorEntry(rows[0][0], shape, ("model", name), chunks)
    return out, files


def _get_held_components(own: object) -> frozenset[str]:
    """Return the components that a folder written with `own`, the layout's own options, can hold: {"model"}; with
    `HfOptions.include_optimizer` every component, which the empty set stands for."""
    return frozenset() if isinstance(own, HfOptions) and own.include_optimizer else frozenset({"model"})


#: Names in a folder of a model, as transformers, PEFT or torch saves one.
_OWN = re.compile(
    r"(config|adapter_config)\.json|model\.safetensors(\.index\.json)?|adapter_model\.safetensors|"
    r".+-\d{5}-of-\d{5}\.(safetensors|bin)"
)


def _describe_next_step(advice: Advice) -> str:
    """Return the last line that `inspect` prints about a folder: how from_pretrained loads it, or why it must not and
    which command mends that."""
    from ckpttool.huggingface import hub_names

    ckpt = advice.ckpt
    shapes = {joined(t.path[1:]): t.shape for t in ckpt.tensors.values() if t.path[0] == "model"}
    values = [n for n in shapes if n.endswith(".values")]
    if changed := sum(f"{n.removesuffix('.values')}.indices" in shapes for n in values):
        return (
            f"an update of {changed} weight{'s'[: changed > 1]} (.values at .indices) and no model: apply it to the "
            "weights that it was made from, with the program that made it, and give those"
        )
    if ckpt.config is not None and (odd := hub_names.find_contradiction(ckpt.config, shapes)) is not None:
        return (
            f"config.json is of another model than the weights ({odd}): from_pretrained would fill what is missing "
            f"with random numbers. With the config of this very model: {advice.convert('--to hf --config MODEL')}"
        )
    job = advice.convert("--to dcp -n RANKS")
    if any(_SHARD.fullmatch(f.rpartition("/")[2]) for f in ckpt.files) and "optim" not in advice.components:
        return (
            "from_pretrained reads it; if save_optimizer_distributed wrote an optimizer, move both folders into one "
            f"and give that; weights alone for a training job: {job}"
        )
    reads = "reads it" if ckpt.config is not None else "needs a config.json beside it"
    return f"from_pretrained {reads}; for a training job: {job}"


#: Its rows in the tables of the documents (docs/_hooks.py).
_ROWS = {
    "readme-layouts": (
        (
            "**hf**",
            "Hugging Face safetensors folder",
            "shards, PEFT adapters ([extracted and merged](docs/how-to/adapters.md)), torch's own HF shards",
            "weights; all state with `--include-optimizer`",
        ),
    ),
    "layouts": (
        (
            "**hf**",
            ("`model.safetensors`, shards with an index, any `*.safetensors`, torch's `shard-*-model-*.safetensors`"),
            (
                "names, tensors and headers as `save_pretrained` writes them; tied weights once; shards split as "
                "huggingface_hub splits them; one file if the destination is named `*.safetensors`"
            ),
        ),
    ),
}
_FOLDER = Layout(
    name="hf",
    title="Hugging Face safetensors",
    detect=detect,
    read=read,
    locate=locate,
    name_in_memory=with_memory_names,
    options=HfOptions,
    keeps_subclasses=True,
    keeps_calls=True,
    write=late("ckpttool.converters.hf.write_hf:write"),
    prepare=late("ckpttool.converters.hf.write_hf:prepare"),
    holds=_get_held_components,
    aliases=("huggingface", "safetensors", "transformers"),
    keeps_config=True,
    reader_uses=("config",),
    writer_uses=("config",),
    program=Program(
        rows=_ROWS,
        next_step=_describe_next_step,
        is_export=lambda source: True,
        keeps_options=False,
        is_stray=lambda names: not any(map(_OWN.fullmatch, names)),
    ),
)
_FILE = replace(
    _FOLDER,
    write=late("ckpttool.converters.hf.write_hf:write_file"),
    is_file=True,
    suffixes=(".safetensors",),
    keeps_config=False,
)
LAYOUTS = (replace(_FOLDER, as_file=_FILE),)
