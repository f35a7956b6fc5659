"""What torch and safetensors themselves find in a checkpoint, and the fixtures; no line of ckpttool runs here."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import shutil
import tarfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

REPOSITORY = Path(__file__).resolve().parents[1]
FIXTURES = REPOSITORY / "fixtures"


def _unpack_fixtures() -> None:
    """Unpack fixtures/NAME.tar.xz into fixtures/NAME, which git ignores, where that was not done or the archive is another
    one since. tests/README.md has the command that packs them."""
    for archive in FIXTURES.glob("*.tar.xz"):
        name = archive.name.partition(".")[0]
        folder, stamp = FIXTURES / name, FIXTURES / f".unpacked-{name}"
        with archive.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # the workers of one run start together
            digest = sha256(file.read()).hexdigest()
            if folder.is_dir() and stamp.is_file() and stamp.read_text() == digest:
                continue
            shutil.rmtree(folder, ignore_errors=True)
            with tarfile.open(archive) as packed:
                packed.extractall(FIXTURES, filter="data")
            stamp.write_text(digest)


_unpack_fixtures()
CASES = sorted(p.parent.name for p in FIXTURES.glob("*/case.json"))


class Original(NamedTuple):
    """One checkpoint of a fixture."""

    label: str
    case: str
    path: Path

    @property
    def folder(self) -> Path:
        """The fixture."""
        return FIXTURES / self.case

    @property
    def config(self) -> str | None:
        """Where the config.json of its model is, if the fixture has one."""
        return str(self.folder / "hf_ref") if (self.folder / "hf_ref").is_dir() else None

    @property
    def saved_as(self) -> str:
        """How it was written, by the name in fixtures/make.py."""
        return str(self._said()["save"])

    @property
    def engine(self) -> str | None:
        """Which engine kept it in flat tensors: "deepspeed", "fsdp1" or none."""
        found = self._said().get("engine")
        return str(found) if found in ("deepspeed", "fsdp1") else None

    @property
    def how(self) -> dict[str, str]:
        """What has to be said to read it, beside the path."""
        layout = self.folder / "flat_layout.json"
        return {"flat_layout": str(layout)} if layout.exists() else {}

    def _said(self) -> dict[str, Any]:
        said: dict[str, Any] = json.loads((self.folder / "case.json").read_text(encoding="utf-8"))
        return said

    def truth(self) -> dict[str, Tensor]:
        """The tensors of the live job; those that the file holds, where it holds the weights only."""
        tensors = load_file(self.folder / "truth.safetensors")
        if self.path.name == "views.pt":
            return {k: t for k, t in tensors.items() if k.startswith("model.")}
        return tensors


def _originals() -> Iterator[Original]:
    for case in CASES:
        for path in sorted((FIXTURES / case).glob("ckpt*")):
            inner = sorted(path.glob("*.pt")) if Original(case, case, path).engine is None else []
            for p in inner or [path]:
                short = "" if p.name == "ckpt" else "/" + p.name
                yield Original(case + short, case, p)


_ALL = list(_originals())
ORIGINALS = [o for o in _ALL if o.engine is None]
#: Those of engines with flat tensors; torch itself has no reader of them.
FLAT = [o for o in _ALL if o.engine is not None]


def load_full(path: Path) -> dict[str, Any]:
    """What torch.load gives, with the restricted unpickler and, for a zip, from mapped memory."""
    with path.open("rb") as f:
        is_zip = f.read(2) == b"PK"
    tree: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    return tree


def load_dcp(path: Path) -> dict[str, Any]:
    """The whole state dict of a DCP folder, as torch's own dcp_to_torch_save reads it."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    tree: dict[str, Any] = {}
    _load_state_dict(
        tree, storage_reader=FileSystemReader(path), planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )  # fmt: skip
    return tree


def from_pretrained(folder: Path) -> tuple[Any, dict[str, Any]]:
    """(model, what transformers says about the loading)."""
    from transformers import AutoModelForCausalLM

    model, said = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype="auto")
    return model, said


def load_hf(path: Path) -> dict[str, Tensor]:
    """Every tensor of every safetensors file of a folder."""
    return {k: t for file in sorted(path.glob("*.safetensors")) for k, t in load_file(file).items()}


def ranks_for(to: str, world_size: int) -> dict[str, int]:
    """The argument `world_size` of a conversion, for layouts that have one."""
    from ckpttool.layouts import find

    return {"world_size": world_size} if "world_size" in find(to).writer_uses else {}


def tensors_of(tree: dict[str, Any]) -> dict[str, Tensor]:
    """`model.<fqn>` and `optim.<fqn>.<slot>` of a tree as the fixtures have them, the names of truth.safetensors."""
    tree = tree.get("app", tree)
    bare = {k: t for k, t in tree.items() if isinstance(t, Tensor)}
    model = next((tree[k] for k in ("model", "model_state_dict", "state_dict") if k in tree), bare)
    optim = next((tree[k] for k in ("optim", "optimizer", "optimizer_state_dict") if k in tree), {})
    owners = [n for n in model if n != "lm_head.weight"]  # tied to the embedding where parameters have numbers
    out = {f"model.{k}": t for k, t in model.items()}
    for key, slots in optim.get("state", {}).items():
        fqn = owners[int(key)] if str(key).isdigit() else key
        out.update({f"optim.{fqn}.{slot}": t for slot, t in slots.items()})
    out.update({f"optim.{k[len('state.') :]}": t for k, t in optim.items() if k.startswith("state.")})
    return out


def raw(t: Tensor) -> bytes:
    """The row-major bytes of a tensor."""
    return bytes(t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()) if t.numel() else b""


def difference(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    """Everything in which two sets of named tensors are not the same bit for bit, as sentences."""
    out = [f"{k} is missing" for k in wanted if k not in found] + [f"{k} is new" for k in found if k not in wanted]
    for k in found.keys() & wanted.keys():
        a, b = found[k], wanted[k]
        if a.dtype != b.dtype or a.shape != b.shape:
            out.append(f"{k} is {a.dtype} {list(a.shape)} instead of {b.dtype} {list(b.shape)}")
        elif raw(a) != raw(b):
            out.append(f"{k} has other bytes")
    return sorted(out)


def same_value(a: Any, b: Any) -> bool:
    """Whether two plain values are equal in type and content, tensors bit for bit."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and not difference({"": a}, {"": b})
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_value(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same_value, a, b))
    return bool(a == b)


def files_of(path: Path) -> dict[str, bytes]:
    """{relative name: bytes} of a file or folder, without the record that holds the time."""
    if path.is_file():
        return {"": path.read_bytes()}
    found = {str(p.relative_to(path)): p for p in sorted(path.rglob("*")) if p.is_file()}
    return {name: p.read_bytes() for name, p in found.items() if name != "ckpttool.json"}


def hooks() -> Any:
    """docs/_hooks.py, which makes the tables of the site."""
    found = importlib.util.spec_from_file_location("_hooks", REPOSITORY / "docs" / "_hooks.py")
    assert found and found.loader
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module
