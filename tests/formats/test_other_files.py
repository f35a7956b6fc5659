"""Files of another kind under the name of a file of tensors are called by what they are, not damaged."""

from __future__ import annotations

import gzip
import io
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save

import ckpttool
from ckpttool.errors import CkpttoolError, Corrupt, Unsupported

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 12345\n"


def written(write: Callable[[io.BytesIO], object]) -> bytes:
    """What a function writes to a file."""
    out = io.BytesIO()
    write(out)
    return out.getvalue()


def tar(out: io.BytesIO) -> None:
    with tarfile.open(fileobj=out, mode="w") as t:
        t.addfile(tarfile.TarInfo("model.pt"))


def zipped(out: io.BytesIO) -> None:
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as z:
        z.writestr("model.pt", b"x" * 999)


def script(out: io.BytesIO) -> None:
    """The records of torch.jit.save, which compresses its code and nothing else (torch.jit itself is deprecated)."""
    with zipfile.ZipFile(out, "w") as z:
        z.writestr("model/data.pkl", pickle.dumps(None, 2))
        z.writestr("model/code/__torch__/model.py", b"class Model(Module):\n" * 20, zipfile.ZIP_DEFLATED)


#: {what it is: (the file, the error, words of its message)}
FILES: dict[str, tuple[bytes, type[CkpttoolError], str]] = {
    "a pointer": (POINTER, Corrupt, "is a git-lfs pointer: the file itself was never downloaded. Run `git lfs pull`"),
    "a page": (b"<!doctype html><title>404</title>", Corrupt, "is a web page: the download failed"),
    "an answer": (b"Entry not found", Corrupt, "is text ('Entry not found'), not tensors: the download failed"),
    "gguf": (b"GGUF\x03\0\0\0" + bytes(99), Unsupported, "is a GGUF file of llama.cpp, which ckpttool does not read"),
    "tar": (written(tar), Unsupported, "is a tar archive, which ckpttool does not read. Unpack it"),
    "gzip": (gzip.compress(b"x"), Unsupported, "is compressed with gzip"),
    "npy": (written(lambda f: np.save(f, np.ones(3))), Unsupported, "is one numpy array"),
}
#: {the same of files that would be read under another name or with another program}
TORCH = {
    "safetensors": (save({"w": torch.ones(3)}), Unsupported, "holds safetensors, but is not named so"),
    "npz": (written(lambda f: np.savez(f, w=np.ones(3))), Unsupported, "is a numpy .npz file, which torch.save did not write"),
    "zip": (written(zipped), Unsupported, "is a zip archive, which torch.save did not write"),
    "pickle": (pickle.dumps({"step": 3}), Unsupported, "is a plain pickle, which torch.save does not write"),
    "TorchScript": (written(script), Unsupported, "this is a TorchScript archive"),
    "a tensor": (written(lambda f: torch.save(torch.ones(3), f)), Unsupported, "holds a single tensor, not a state dict"),
}  # fmt: skip
CASES = [(f"{k}.{end}", *FILES[k]) for k in FILES for end in ("pt", "safetensors")] + [
    (f"{k}.pt", *TORCH[k]) for k in TORCH
]


@pytest.mark.parametrize(("name", "data", "kind", "words"), CASES, ids=[c[0] for c in CASES])
def test_a_file_of_another_kind_is_called_by_what_it_is(
    name: str, data: bytes, kind: type[CkpttoolError], words: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(CkpttoolError) as e:
        ckpttool.open(tmp_path / name)
    assert type(e.value) is kind and words in str(e.value) and name in str(e.value)


def test_a_file_under_no_known_name_is_called_by_what_it_is_and_a_text_is_not_called_a_failed_download(
    tmp_path: Path,
) -> None:
    (tmp_path / "model.gguf").write_bytes(FILES["gguf"][0])
    with pytest.raises(Unsupported, match="is a GGUF file"):
        ckpttool.open(tmp_path / "model.gguf")
    (tmp_path / "notes.txt").write_text("lr 3e-4\n")
    with pytest.raises(CkpttoolError, match="is not a checkpoint that ckpttool knows"):
        ckpttool.open(tmp_path / "notes.txt")
