"""Files next to a checkpoint that belong to it: the model's config and tokenizer, the trainer's configuration.

Read as data, small ones only; no pickles, no archives, and nothing whose name says that it is a secret.
"""

from __future__ import annotations

import os
import re
import sys
from typing import Any, NamedTuple

from .. import bounded_json
from ..errors import CkpttoolError, Corrupt, RemoteError, Unsafe, Unsupported, argument
from ..printable import printable
from ..storage.source import Source
from ..storage.urls import make_path_absolute

__all__ = [
    "ADAPTER_CONFIG",
    "PACKED",
    "ModelFiles",
    "fetch_from_hub",
    "find_adapter_files",
    "find_model_files",
    "is_model_or_trainer_file",
    "is_plain_file_name",
    "list_config_differences",
    "make_missing_config_error",
    "read_config_json",
    "read_model_files",
    "read_training_files",
]

ADAPTER_CONFIG = "adapter_config.json"

#: Where transformers saves the chat templates of a tokenizer besides the first.
_TEMPLATES = "additional_chat_templates"
#: Configs, and the files in which the tokenizers and processors of transformers 5.23 are saved (VOCAB_FILES_NAMES), and
#: mistral-common's; no code.
_MODEL = re.compile(
    r"config\.json|generation_config\.json|hf_quant_config\.json|quant(ize)?_config\.json|"
    r"tokenizer[^/]*(?<!\.py)(?<!\.pkl)(?<!\.pickle)|special_tokens_map\.json|added_tokens\.json|"
    r"(entity_|target_)?vocab(-src|-tgt)?\.(json|txt)|merges\.txt|dict\.txt|bpe\.codes|(source|target)\.spm|tekken\.json|"
    r"(normalizer|emoji|byte_maps|word_shape|word_pronunciation)\.json|[^/]*\.(model|tiktoken|jinja|tokenizer)|"
    rf"{_TEMPLATES}/[^/]*\.jinja|(pre)?processor_config\.json|chat_template[^/]*|adapter_config\.json|"
    r"(video_preprocessor|audio_tokenizer)_config\.json"
)
#: Keys of configs that say who saved the model, and from where.
_OF_SAVE = frozenset(("transformers_version", "peft_version", "_name_or_path", "base_model_name_or_path"))
_TRAINING = re.compile(
    r"[^/]*(config|args|params)[^/]*\.(json|ya?ml|toml)|trainer_state\.json|recipe\.ya?ml", re.IGNORECASE
)
_SECRET = re.compile(r"secret|credential|passw|token(?!izer)|api.?key|private", re.IGNORECASE)
#: How files begin that hold others, or that only a decoder can look into: gzip, compress, bzip2, xz, zip, 7z, zstd,
#: lz4, rar; .npy, which may hold pickled objects. No tokenizer needs one.
PACKED = (
    b"\x1f\x8b",
    b"\x1f\x9d",
    b"BZh",
    b"\xfd7zXZ\0",
    b"PK\x03\x04",
    b"PK\x05\x06",
    b"7z\xbc\xaf\x27\x1c",
    b"\x28\xb5\x2f\xfd",
    b"\x04\x22\x4d\x18",
    b"Rar!\x1a",
    b"\x93NUMPY",
)
#: What to fetch of a model on the Hub for the files of `_MODEL`.
_ON_HUB = [f"*.{end}" for end in ("json", "model", "txt", "jinja", "tiktoken", "tokenizer", "codes", "spm")]
#: Where trainers put the config of a model, from the folder of a checkpoint: verl (twice), NeMo AutoModel (twice),
#: scripts.
_FOLDERS = ("", "huggingface", "actor/huggingface", "model", "model/consolidated", "weights", "hf", "..")
_MOST_BYTES = 256 << 20  # of all these files of a folder; the largest tokenizers have a seventh of that
_MOST_FILES = 1000
_MOST_TRAINING_BYTES = 4 << 20


def read_config_json(source: Source) -> dict[str, Any]:
    """Read config.json of a folder.

    Raises:
        Corrupt, Unsafe: it is not a JSON object.
    """
    data = bounded_json.parse(source.read_all("config.json", 16 << 20), f"{source.root}/config.json")
    if not isinstance(data, dict):
        raise Corrupt(f"{source.root}/config.json is not a JSON object.", code="CKPT0406")
    return data


def is_model_or_trainer_file(name: str) -> bool:
    """Whether a file of this name is the config or tokenizer of a model, or a configuration of a trainer."""
    return _MODEL.fullmatch(name) is not None or _TRAINING.fullmatch(name) is not None


def is_plain_file_name(name: str) -> bool:
    """Whether a name is that of a file in a folder: printable, without a slash or backslash; transformers' folder of
    chat templates may come before it."""
    name = name.removeprefix(f"{_TEMPLATES}/")
    return name.isprintable() and name not in ("", ".", "..") and not set(name) & {"/", "\\"}


def _read_model_folder(source: Source, notes: list[str]) -> tuple[dict[str, object] | None, dict[str, bytes]]:
    """Read (config.json or None, {name: bytes} of files to copy) of a folder; `notes` gets what is not copied.

    Raises:
        Corrupt, Unsafe: config.json is not a JSON object, or the files are too large or too many.
    """
    names = source.list()
    names += [f"{_TEMPLATES}/{n}" for n in source.list(_TEMPLATES)] if _TEMPLATES in names else []
    names = [n for n in names if _MODEL.fullmatch(n) and source.exists(n)]
    if odd := [printable(n) for n in names if not is_plain_file_name(n)]:
        more = f", ... ({len(odd)} files)" if len(odd) > 5 else ""
        notes.append(f"not copied: names with unprintable characters or a backslash: {', '.join(odd[:5])}{more}")
        names = [n for n in names if is_plain_file_name(n)]
    if len(names) > _MOST_FILES or (total := sum(map(source.size, names))) > _MOST_BYTES:
        many = f"{len(names):,} files" if len(names) > _MOST_FILES else f"{total:,} bytes"
        raise Corrupt(
            f"{source.root}: the config and tokenizer files are {many} in all; a model has at most {_MOST_FILES:,} of "
            f"them, with {_MOST_BYTES:,} bytes.",
            code="CKPT0406",
        )
    found = read_config_json(source) if "config.json" in names else None
    files = {n: source.read_all(n, _MOST_BYTES) for n in names}
    packed = [n for n, data in files.items() if data.startswith(PACKED)]
    if packed:
        notes.append(f"not copied: archives or arrays, which no tokenizer needs: {', '.join(packed)}")
    if code := _list_code_files(files):
        notes.append(
            f"not copied: the code {', '.join(code)}, which from_pretrained runs if trust_remote_code is set "
            "(auto_map); copy it and what it imports, if the model needs it"
        )
    return found, {n: files[n] for n in names if n not in packed}


def _list_code_files(files: dict[str, bytes]) -> list[str]:
    """List the files of Python code that `auto_map` in some configs names, sorted; code of another repository
    ("org/name--module.Class") is found there.

    Args:
        files: {name: bytes} of the configs and of other files.
    """
    found: set[str] = set()
    for name in (n for n in files if n.endswith("config.json")):
        try:
            config = bounded_json.parse(files[name], name)
        except CkpttoolError:  # it is copied as it is
            continue
        auto = config.get("auto_map") if isinstance(config, dict) else None
        for classes in auto.values() if isinstance(auto, dict) else ():
            for c in classes if isinstance(classes, list) else [classes]:  # a tokenizer has two
                if isinstance(c, str) and "--" not in c:
                    found.add(f"{printable(c.rpartition('.')[0])}.py")
    return sorted(found)


def fetch_from_hub(model: str, patterns: list[str]) -> str:
    """Fetch the files of a model on the Hub whose names match one of some patterns (as in a shell); return their folder
    on this machine.

    Raises:
        Unsupported: there is no such model, or the name is a path. RemoteError: the Hub did not answer, or sends a path
            as the name of a file in the cache. Unsafe: the Hub names an address without https, although it has one.
    """
    what = f"{argument('config', model)}: there is no such folder"
    if model.startswith(("/", ".", "~")) or model.count("/") > 1:
        raise Unsupported(f"{what}. Check the path.", code="CKPT0302")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    from ..storage.answer_limits import RequestBudget, within_budget_in_all_threads
    from ..storage.hub_limits import bound_hub_client, disabled_xet
    from ..storage.retries import find_own_error

    bound_hub_client()
    outer = sys.exception()
    try:
        with disabled_xet(), within_budget_in_all_threads(RequestBudget(f"hf://{model}", downloads=True)):
            return snapshot_download(model, allow_patterns=patterns)
    except (RepositoryNotFoundError, HFValidationError):
        raise Unsupported(
            f"{what}, and no model of that name on the Hub, or the token may not see it. Check the path or the model "
            "id.",
            code="CKPT0302",
        ) from None
    except Exception as e:
        own = find_own_error(e, outer)
        reason = " ".join(str(own or e).partition("\n")[0].split()).rstrip(".")
        raise (RemoteError if own is None else type(own))(
            f"{what}, and the Hub did not give a model of that name ({reason}). Check the path, or the network.",
            code="CKPT0901" if own is None else own.code,
        ) from None


def read_model_files(
    config: str, notes: list[str] | None = None, *, of_adapter: bool = False
) -> tuple[dict[str, object] | None, dict[str, bytes]]:
    """Return (config.json or None if there is none, {name: bytes} to copy) of a folder, of the folder of a file, or of
    a Hub model id.

    Args:
        config: the folder, file or id.
        notes: gets what is not copied; None where nobody asks.
        of_adapter: whether an adapter's files are looked for. If not, the folder must have a config.json; that of an
            adapter needs none.

    Raises:
        Unsupported: it is none of these, or the folder has no config.json. RemoteError: the Hub did not answer.
        Corrupt, Unsafe: config.json is not a JSON object, or no file; `config` is a FIFO or the like.
    """
    given = config
    if not os.path.isdir(config):
        if os.path.isfile(config):
            config = os.path.dirname(make_path_absolute(config))
        elif os.path.exists(config):
            raise Unsafe(f"{argument('config', given)} is no folder and not a regular file.", code="CKPT0702")
        else:
            config = fetch_from_hub(config, _ON_HUB)
    with Source(config) as source:
        found, files = _read_model_folder(source, [] if notes is None else notes)
    if found is None and not of_adapter:
        if os.path.lexists(os.path.join(config, "config.json")):
            raise Unsafe(f"{argument('config', given)}: its config.json is not a regular file.", code="CKPT0702")
        if ADAPTER_CONFIG not in files:
            raise Unsupported(
                f"{argument('config', given)} has no config.json, which describes the model. Check the path or the "
                "model id.",
                code="CKPT0302",
            )
    return found, files


class ModelFiles(NamedTuple):
    """config.json and files to copy; `where` is their folder, from that of the source, and None where it was given or
    there is none."""

    config: dict[str, Any] | None
    files: dict[str, bytes]
    where: str | None


def find_model_files(source: Source, given: str | None, notes: list[str]) -> ModelFiles:
    """Find the config and tokenizer of a model: those of `given` (a folder, a file or a Hub model id), or if that is
    None, those in the source's folder or near it. `notes` gets a sentence on where they were found, or that there are
    none.

    Raises:
        Unsupported: `given` is none of these, or has no config.json and is no adapter's. RemoteError: the Hub did not
            answer.
        Corrupt, Unsafe: the config.json of `given` is not a JSON object, or no file.
    """
    if given is not None:
        return ModelFiles(*read_model_files(given, notes), None)
    for below in _FOLDERS if source.local_folder else ("",):
        new_notes: list[str] = []
        try:
            if not below:
                config, files = _read_model_folder(source, new_notes)
            elif os.path.isfile(os.path.join(source.root, below, "config.json")):
                config, files = read_model_files(os.path.join(source.root, below), new_notes)
            else:
                continue
        except (Corrupt, Unsafe) as e:
            notes.append(f"config and tokenizer files in {os.path.join(source.root, below)} were not used: {e}")
            continue
        if config and "model_type" in config:
            where = os.path.relpath(os.path.join(source.root, below), source.root)
            place = "the folder of the source" if where == "." else f"{where!r}, from the source"
            notes.append(f"config and tokenizer files taken from {place}")
            notes += new_notes
            return ModelFiles(config, files, where)
    notes.append(
        "no config.json beside the source: from_pretrained needs one, and without it names are written as they are in "
        "memory, and tied weights twice unless they share bytes in the source; give "
        f"{argument('config')} a folder or a model id"
    )
    return ModelFiles(None, {}, None)


def find_adapter_files(
    source: Source, given: str | None, notes: list[str], name: str | None = None, *, one_of_several: bool = False
) -> tuple[dict[str, Any], dict[str, bytes]] | None:
    """Find (adapter_config.json, {name: bytes} of the adapter's files to copy, including it); None if there is none.

    The folder `given` is searched, or else the source's own folder, model/ in it, where NeMo AutoModel saves an
    adapter, and the folder above it. In each of them, a folder with the adapter's name comes first, if the name is
    known. The config of the base model is not among the files.

    Args:
        source: the checkpoint.
        given: a folder, a file or a Hub model id; None to search near the source.
        notes: gets a sentence on where they were found.
        name: the adapter's name; None if it is not known.
        one_of_several: the checkpoint holds several adapters. Then an adapter that is not called default must have its
            file in a folder of its own, as PEFT saves them, unless it is in a folder that was given.

    Raises:
        Corrupt, Unsafe: adapter_config.json is not a JSON object. Unsupported: `given` is none of these.
        RemoteError: the Hub did not answer.
    """
    files: dict[str, bytes] = {}
    if given is not None:
        own = os.path.join(given, name or "")
        files = read_model_files(own if name and os.path.isdir(own) else given, notes, of_adapter=True)[1]
    else:
        folders: list[str] = []
        for below in ("", "model", "..") if source.local_folder else ("", "model"):
            folders += [os.path.join(below, name)] if name else []
            folders += [] if one_of_several and name not in (None, "default") else [below]
        for folder in folders:
            if files := _read_adapter_folder(source, folder, notes):
                notes.append(f"{ADAPTER_CONFIG} and tokenizer files taken from {folder or '.'!r} beside the source")
                break
    if ADAPTER_CONFIG not in files:
        return None
    parsed = bounded_json.parse(files[ADAPTER_CONFIG], ADAPTER_CONFIG)
    if not isinstance(parsed, dict):
        raise Corrupt(f"{ADAPTER_CONFIG} is not a JSON object.", code="CKPT0418")
    return parsed, {n: files[n] for n in files if n not in ("config.json", "generation_config.json")}


def _read_adapter_folder(source: Source, folder: str, notes: list[str]) -> dict[str, bytes]:
    """Return {name: bytes} of the files to copy from a folder with an adapter_config.json; {} if it has none.

    Args:
        source: the checkpoint.
        folder: path relative to the source's folder; "" for that folder itself. It may lead outside, such as "..".
        notes: gets a sentence on files that are not copied.
    """
    if not folder:
        return _read_model_folder(source, notes)[1] if source.exists(ADAPTER_CONFIG) else {}
    if not folder.startswith(".."):
        return _read_model_folder(source.below(folder), notes)[1] if source.exists(f"{folder}/{ADAPTER_CONFIG}") else {}
    path = os.path.join(source.root, folder)
    if not os.path.isdir(path):
        return {}
    with Source(path) as other:
        return _read_model_folder(other, notes)[1] if other.exists(ADAPTER_CONFIG) else {}


def list_config_differences(a: Source, b: Source) -> dict[str, tuple[object, object]]:
    """List where the config.json and adapter_config.json beside two checkpoints differ. A file that only one of the two
    has is not compared: other layouts have none.

    Args:
        a, b: the folders of the two checkpoints.

    Returns:
        {"config.json: KEY": (value of a, value of b)}, with None for a key that one of them lacks; keys of nested dicts
            are joined by dots.

    Raises:
        Corrupt, Unsafe: one of them is not JSON, or is too large.
    """
    out: dict[str, tuple[object, object]] = {}

    def compare(name: str, x: object, y: object) -> None:
        """Add what differs below `name`."""
        if isinstance(x, dict) and isinstance(y, dict):
            for key in sorted((x.keys() | y.keys()) - _OF_SAVE):
                compare(f"{name}.{key}" if name else key, x.get(key), y.get(key))
        elif x != y:
            out[f"{file}: {name}"] = (x, y)

    for file in ("config.json", ADAPTER_CONFIG):
        if all(file in s.list() for s in (a, b)):
            compare("", *(bounded_json.parse(s.read_all(file, _MOST_BYTES), f"{s.root}/{file}") for s in (a, b)))
    return out


def make_missing_config_error(given: str | None, option: str = "config") -> Unsupported:
    """Make the error for an adapter_config.json that is needed and missing.

    Args:
        given: the folder that the user gave for it; None if it was searched near the source.
        option: the option that takes the folder.
    """
    where = f"{argument(option, given)} has" if given is not None else "beside the source there is"
    return Unsupported(
        f"{where} no {ADAPTER_CONFIG}, which says by how much the adapter is scaled. Give {argument(option)} the "
        "folder with the one that peft_config.save_pretrained(DIR) writes in the job. Without one, give "
        f"{argument('lora_alpha', 16)} (the LoraConfig's; no tensor shows it) and, if it had use_rslora, "
        f"{argument('rslora')}; ranks and modules follow from the tensors.",
        code="CKPT0312",
    )


def read_training_files(source: Source, given: str | None) -> dict[str, bytes]:
    """Return {name: bytes} of the configuration files of a training run: those of the model, and those of the trainer
    in the folder of the checkpoint and in the folder above it. Of two files with one name, the nearest is used.

    Args:
        source: the checkpoint.
        given: the model's folder or id; None to search for its files near the checkpoint.
    """
    out = dict(find_model_files(source, given, [])[1])
    for folder in ("", "..") if source.local_folder else ("",):
        where = Source(os.path.join(source.root, folder)) if folder else source
        for name in where.list():
            if name in out or not _TRAINING.fullmatch(name) or _SECRET.search(name) or not where.exists(name):
                continue
            left = min(_MOST_TRAINING_BYTES, _MOST_BYTES - sum(map(len, out.values())))
            if len(out) >= _MOST_FILES or not is_plain_file_name(name):  # an archive needs a plain name
                continue
            try:
                out[name] = where.read_all(name, left)
            except CkpttoolError:
                continue  # a link that leads out, or a large one: not what is looked for
    return {n: out[n] for n in sorted(out)}
