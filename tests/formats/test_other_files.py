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
import zstandard
from safetensors.torch import save

import ckpttool
from ckpttool.errors import CkpttoolError, Corrupt, NotRecognised, Unsupported

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


#: {folder: (its files, what it is)}. Only names are looked at, so the files are empty: none of these programs can be installed beside torch here.
FOREIGN = {
    "vllm": (["model-rank-0-part-0.safetensors", "model-rank-1-part-0.safetensors", "config.json"], "is vLLM's sharded_state"),
    "vllm of one rank": (["model-rank-0-part-0.safetensors", "model.safetensors.index.json"], "is vLLM's sharded_state"),
    "orbax": (["_CHECKPOINT_METADATA", "manifest.ocdbt", "d/8f3c", "ocdbt.process_0/d/1"], "is a checkpoint of Orbax (JAX)"),
    "orbax of items": (["_CHECKPOINT_METADATA", "default/manifest.ocdbt", "default/_METADATA"], "is a checkpoint of Orbax (JAX)"),
    "orbax run": (["100/default/manifest.ocdbt", "100/_CHECKPOINT_METADATA"], "100 is a checkpoint of Orbax (JAX)"),
    "saved model": (["saved_model.pb", "variables/variables.index"], "is a SavedModel of TensorFlow"),
    "tensorflow": (["checkpoint", "model.ckpt-9.index", "model.ckpt-9.data-00000-of-00001"], "is a checkpoint of TensorFlow"),
    "flax": (["flax_model.msgpack", "config.json"], "is a checkpoint of Flax (JAX)"),
    "flax of old": (["checkpoint_900"], "is a checkpoint of Flax (JAX)"),
    "mlx": (["weights.npz", "config.json"], "is a file of numpy arrays, as MLX saved weights"),
    "gguf": (["m-Q8_0.gguf"], "is a GGUF file of llama.cpp"),
    "keras": (["tf_model.h5", "config.json"], "is a model of Keras"),
}  # fmt: skip


@pytest.mark.parametrize("case", FOREIGN)
def test_a_folder_of_another_program_is_called_by_what_it_is_in_one_sentence_with_what_to_do(
    case: str, tmp_path: Path
) -> None:
    files, words = FOREIGN[case]
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for path in (tmp_path, *(tmp_path / n for n in files if n.startswith("model-rank-") or n.endswith(".msgpack"))):
        with pytest.raises(NotRecognised) as e:
            ckpttool.open(path)
        said = str(e.value)
        assert words in said and ", which ckpttool does not read. " in said and "\n" not in said
    if "vllm" in case:
        with pytest.raises(NotRecognised, match="vLLM"):
            ckpttool.open(tmp_path, source_layout="hf")


def test_a_part_of_vllm_s_sharded_state_is_never_read_as_a_model(tmp_path: Path) -> None:
    for rank in (0, 1):
        (tmp_path / f"model-rank-{rank}-part-0.safetensors").write_bytes(save({"lm_head.weight": torch.ones(4, 4)}))
    with pytest.raises(NotRecognised, match="is vLLM's sharded_state"):
        ckpttool.open(tmp_path / "model-rank-0-part-0.safetensors")
    (tmp_path / "model.safetensors").write_bytes(
        save({"lm_head.weight": torch.ones(8, 4)})
    )  # a model beside them is read
    with ckpttool.open(tmp_path) as opened:
        assert opened["model.lm_head.weight"].shape == (8, 4)


def test_an_archive_that_was_unpacked_is_no_model(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(3)}}, tmp_path / "in.pt")
    ckpttool.export(tmp_path / "in.pt", tmp_path / "a.tar.zst")
    with (
        (tmp_path / "a.tar.zst").open("rb") as f,
        zstandard.ZstdDecompressor().stream_reader(f, read_across_frames=True) as plain,
        tarfile.open(fileobj=plain, mode="r|") as t,
    ):
        t.extractall(tmp_path / "a", filter="data")
    for path in (tmp_path / "a", tmp_path / "a" / "tensors-00001.safetensors"):
        with pytest.raises(
            NotRecognised, match=r"is an audit archive of ckpttool that was unpacked.*Give the \.tar\.zst itself"
        ):
            ckpttool.open(path)
    (tmp_path / "a" / "MANIFEST.json").unlink()  # then it is somebody's file of that name
    with ckpttool.open(tmp_path / "a" / "tensors-00001.safetensors") as opened:
        assert len(opened) == 1
