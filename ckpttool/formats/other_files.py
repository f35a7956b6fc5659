"""Files that are not what their name or place says: a git-lfs pointer, a web page, a GGUF file, an archive.

The readers of tensors call `refuse_foreign_file` before they call such a file damaged. `refuse_foreign_checkpoint` says
whose checkpoint a folder is that no layout reads, by the names in it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from ..errors import Corrupt, NotRecognised, Unsupported
from .zip_bytes import is_zip, read_first_record_name

__all__ = [
    "HEAD_BYTES",
    "LFS_POINTER",
    "identify_foreign_checkpoint",
    "is_text",
    "is_web_page",
    "refuse_foreign_checkpoint",
    "refuse_foreign_file",
    "refuse_foreign_format",
]

#: As much of the beginning of a file as `refuse_foreign_file` looks at.
HEAD_BYTES = 512
LFS_POINTER = b"version https://git-lfs.github.com/spec/"

_UNPACK = "Unpack it and give the file or folder inside"
#: {first bytes: (what the file is, what to do)}
_FORMATS = {
    b"GGUF": ("a GGUF file of llama.cpp", "Give the checkpoint that it was converted from"),
    b"\x89HDF\r\n\x1a\n": ("an HDF5 file", "Save the weights with torch.save or safetensors where they can be loaded"),
    b"\x93NUMPY": ("one numpy array", "Save the state dict with torch.save or safetensors"),
    b"\x1f\x8b": ("compressed with gzip", _UNPACK),
    b"BZh": ("compressed with bzip2", _UNPACK),
    b"\xfd7zXZ\0": ("compressed with xz", _UNPACK),
    b"7z\xbc\xaf\x27\x1c": ("a 7z archive", _UNPACK),
}
_TENSORFLOW = "Load it in TensorFlow, and save the variables with safetensors.tensorflow.save_file"
#: (names of files, a name beside them or "", what they are, what to do) of checkpoints that no layout reads, the surest
#: first.
_CHECKPOINTS = (
    (
        r"model-rank-\d+-part-\d+\.safetensors",
        "",
        "vLLM's sharded_state",
        "Each rank has its share of fused weights there, and nothing says how they were cut: give the model that it "
        "was made from",
    ),
    (
        r"tensors-\d{5}\.safetensors",
        r"MANIFEST\.json",
        "an audit archive of ckpttool that was unpacked",
        "Give the .tar.zst itself: `ckpttool audit restore` makes a checkpoint of it",
    ),
    (
        r"manifest\.ocdbt|_CHECKPOINT_METADATA|_METADATA",
        "",
        "a checkpoint of Orbax (JAX)",
        "Restore it with Orbax, and save the arrays with safetensors.flax.save_file",
    ),
    (r"saved_model\.pb(txt)?|keras_metadata\.pb", "", "a SavedModel of TensorFlow", _TENSORFLOW),
    (r".+\.(index|meta|data-\d{5}-of-\d{5})", r".+\.data-\d{5}-of-\d{5}", "a checkpoint of TensorFlow", _TENSORFLOW),
    (
        r".+\.msgpack|checkpoint_\d+",
        "",
        "a checkpoint of Flax (JAX)",
        "Read it with flax.serialization.msgpack_restore, and save the arrays with safetensors.flax.save_file",
    ),
    (
        r".+\.npz",
        "",
        "a file of numpy arrays, as MLX saved weights",
        "Save the arrays with safetensors where they can be loaded",
    ),
    (r".+\.gguf", "", *_FORMATS[b"GGUF"]),
    (r".+\.(h5|keras)", "", "a model of Keras", _TENSORFLOW),
)
_TAR = slice(257, 262)
_SAFETENSORS = rb'(?s)....[\0-\x05]\0\0\0\{[\s]*"'  # a header of at most 100 MB


def is_text(head: bytes) -> bool:
    """Return whether the first bytes of a file are printable ASCII text; False for b""."""
    return bool(head) and all(9 <= c <= 13 or 32 <= c < 127 for c in head)


def is_web_page(head: bytes) -> bool:
    """Return whether the first bytes of a file look like HTML or XML."""
    return head.lstrip()[:1] == b"<"


def refuse_foreign_file(head: bytes, what: str) -> None:
    """Refuse a file that is not a tensor file, with a message that says what it is; do nothing if its kind is unknown.

    Args:
        head: the first `HEAD_BYTES` bytes of the file.
        what: names the file in messages.

    Raises:
        Corrupt: it is a git-lfs pointer, a web page or text.
        Unsupported: it is a file of another format.
    """
    if head.startswith(LFS_POINTER):
        raise Corrupt(
            f"{what} is a git-lfs pointer: the file itself was never downloaded. Run `git lfs pull` in its repository, "
            "or download it with `hf download`.",
            code="CKPT0413",
        )
    if is_web_page(head):
        raise Corrupt(
            f"{what} is a web page: the download failed, or it needs a login. Download the file again.", code="CKPT0413"
        )
    if is_text(head):
        raise Corrupt(
            f"{what} is text ({head[:60].decode()!r}), not tensors: the download failed. Download the file again.",
            code="CKPT0413",
        )
    refuse_foreign_format(head, what)


def refuse_foreign_format(head: bytes, what: str) -> None:
    """Refuse a file of a known format that ckpttool does not read, such as GGUF; do nothing for any other file.

    Args:
        head: the first `HEAD_BYTES` bytes of the file.
        what: names the file in messages.

    Raises:
        Unsupported: it is of such a format.
    """
    for magic, (kind, advice) in _FORMATS.items():
        if head.startswith(magic):
            raise Unsupported(f"{what} is {kind}, which ckpttool does not read. {advice}.", code="CKPT0306")
    if head[_TAR] == b"ustar":
        raise Unsupported(f"{what} is a tar archive, which ckpttool does not read. {_UNPACK}.", code="CKPT0306")
    if re.match(_SAFETENSORS, head) and not what.endswith(".safetensors"):
        raise Unsupported(
            f"{what} holds safetensors, but is not named so. Give it a name that ends in .safetensors.", code="CKPT0306"
        )
    if len(head) >= 30 and is_zip(head) and "/" not in (name := read_first_record_name(head)):
        kind, advice = (
            ("a numpy .npz file", _FORMATS[b"\x93NUMPY"][1]) if name.endswith(".npy") else ("a zip archive", _UNPACK)
        )
        raise Unsupported(f"{what} is {kind}, which torch.save did not write. {advice}.", code="CKPT0306")


def identify_foreign_checkpoint(names: Iterable[str], beside: Collection[str]) -> tuple[str, str, str] | None:
    """Find, by file names, a checkpoint of a kind that no layout reads: (name of the file that shows it, what it is,
    what to do); None if there is none.

    Args:
        names: the file names to look at.
        beside: all names in their folder.
    """
    names = list(names)
    for pattern, other, kind, advice in _CHECKPOINTS:
        if not other or any(re.fullmatch(other, n) for n in beside):
            for name in names:
                if re.fullmatch(pattern, name):
                    return name, kind, advice
    return None


def refuse_foreign_checkpoint(names: Iterable[str], beside: Collection[str], what: str) -> None:
    """Refuse files that no layout recognises if their names show what they are; otherwise do nothing.

    Args:
        names: the file names.
        beside: all names in their folder.
        what: their path, for messages.

    Raises:
        NotRecognised: they are a checkpoint of another program; the message names it.
    """
    if (found := identify_foreign_checkpoint(names, beside)) is not None:
        name, kind, advice = found
        shown = "" if what.rpartition("/")[2] == name else f" ({name})"
        raise NotRecognised(f"{what} is {kind}{shown}, which ckpttool does not read. {advice}.", code="CKPT0306")
