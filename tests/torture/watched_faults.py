"""Faults that are done to a finished save before a watcher reads it, and the kinds of findings that name each.

    FAULTS[trainer]   Fault(name, kinds, do), where do(save, earlier) damages a folder and returns the file or tensors hit

`earlier` is the save before. What the files' own CRC32s would show is done to bytes; what health has to show (NaN,
diverged ties, masters) is written with right CRC32s, as a trainer would have.
"""

from __future__ import annotations

import io
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch


class Fault(NamedTuple):
    """A fault; `kinds` are those of which one has to be reported, `needs` how many saves have to be before it."""

    name: str
    kinds: tuple[str, ...]
    do: Callable[[Path, Path], str]
    needs: int = 1


def cut(file: str, share: float = 0.6) -> Callable[[Path, Path], str]:
    def do(save: Path, earlier: Path) -> str:
        os.truncate(save / file, int((save / file).stat().st_size * share))
        return file

    return do


def missing(file: str) -> Callable[[Path, Path], str]:
    def do(save: Path, earlier: Path) -> str:
        (save / file).unlink()
        return file

    return do


def stale(file: str) -> Callable[[Path, Path], str]:
    def do(save: Path, earlier: Path) -> str:
        shutil.copyfile(earlier / file, save / file)
        return file

    return do


def flip(path: Path, offset: int, bit: int) -> None:
    with open(path, "r+b") as f:
        f.seek(offset)
        byte = f.read(1)[0]
        f.seek(offset)
        f.write(bytes([byte ^ (1 << bit)]))


def flip_in_zip(file: str, of_most: bool = True) -> Callable[[Path, Path], str]:
    """Flips a bit in the middle of the largest member of a file of torch.save."""

    def do(save: Path, earlier: Path) -> str:
        import zipfile

        with zipfile.ZipFile(save / file) as z:
            member = max(z.infolist(), key=lambda m: m.file_size)
        with open(save / file, "rb") as f:
            f.seek(member.header_offset + 26)
            head = f.read(4)
        start = member.header_offset + 30 + int.from_bytes(head[:2], "little") + int.from_bytes(head[2:], "little")
        flip(save / file, start + member.file_size // 2, 0)
        return file

    return do


# ------------------------------------------------------------------------------------------------------- DCP


def dcp_items(save: Path) -> dict[tuple[str, Any], Any]:
    """{(FQN, offset): storage of the item} of a DCP folder."""
    with open(save / ".metadata", "rb") as f:
        metadata = pickle.load(f)
    return {(i.fqn, tuple(i.offset) if i.offset is not None else None): s for i, s in metadata.storage_data.items()}


def flip_in_dcp(name: str) -> Callable[[Path, Path], str]:
    """Flips the lowest bit of a number in the middle of an item."""

    def do(save: Path, earlier: Path) -> str:
        item = next(s for (fqn, _), s in dcp_items(save).items() if fqn == name)
        data = (save / item.relative_path).read_bytes()[item.offset : item.offset + item.length]
        tensor = torch.load(io.BytesIO(data), weights_only=True)
        raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        flip(save / item.relative_path, item.offset + data.index(raw) + len(raw) // 2, 0)
        return f"{item.relative_path} {name}"

    return do


def change_in_dcp(change: Callable[[torch.Tensor], None], *names: str) -> Callable[[Path, Path], str]:
    """Changes the first item of each tensor in the same way, and writes it as torch.save does, with right CRC32s. A
    second one gets the rounded numbers of the first."""

    def do(save: Path, earlier: Path) -> str:
        changed: torch.Tensor | None = None
        for name in names:
            item = next(s for (fqn, _), s in dcp_items(save).items() if fqn == name)
            path = save / item.relative_path
            data = path.read_bytes()
            tensor = torch.load(io.BytesIO(data[item.offset : item.offset + item.length]), weights_only=True)
            if changed is None:
                change(tensor)
                changed = tensor
            else:
                tensor.copy_(changed)
            out = io.BytesIO()
            torch.save(tensor, out)
            assert len(out.getvalue()) == item.length, (name, len(out.getvalue()), item.length)
            path.write_bytes(data[: item.offset] + out.getvalue() + data[item.offset + item.length :])
        return " ".join(names)

    return do


def put_nan(t: torch.Tensor) -> None:
    t.detach().view(-1)[t.numel() // 2] = float("nan")


def shift(t: torch.Tensor) -> None:
    t.view(-1)[t.numel() // 2 :] += 0.5


#: What names each kind of damage: the finding that says it, whatever else is said besides.
_CUT = ("cut", "damaged", "unreadable")
_FSDP2 = (
    Fault("cut of a rank's file", _CUT, cut("__1_0.distcp")),
    Fault("cut of .metadata", _CUT, cut(".metadata")),
    Fault("bit flip in a weight", ("checksum",), flip_in_dcp("model.layers.1.1.weight")),
    Fault("bit flip in exp_avg_sq", ("checksum",), flip_in_dcp("optim.state.layers.0.3.weight.exp_avg_sq")),
    Fault("missing rank file", ("missing",), missing("__2_0.distcp")),
    Fault("stale rank file", ("stale-file",), stale("__0_0.distcp")),
    Fault("stale rank file of another rank", ("stale-file",), stale("__2_0.distcp")),
    Fault("NaN in a weight and its master", ("nan",), change_in_dcp(put_nan, "master.layers.2.1.weight", "model.layers.2.1.weight")),
    Fault("NaN in exp_avg", ("nan",), change_in_dcp(put_nan, "optim.state.layers.1.3.weight.exp_avg")),
    Fault("diverged tie", ("diverged-tie",), change_in_dcp(shift, "master.head.weight", "model.head.weight"), 2),
    Fault("master of another step", ("masters",), change_in_dcp(shift, "master.layers.0.1.weight")),
    Fault("missing rank file, rank 0", ("missing",), missing("__0_0.distcp")),
)  # fmt: skip


# ------------------------------------------------------------------------------------------- DeepSpeed and Trainer

_OPTIM = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"
_MODEL = "zero_pp_rank_{}_mp_rank_00_model_states.pt"


def change_in_torch(file: str, change: Callable[[Any], None]) -> Callable[[Path, Path], str]:
    """Changes what a file of torch.save holds, and writes it again."""

    def do(save: Path, earlier: Path) -> str:
        state = torch.load(save / file, weights_only=False)
        change(state)
        torch.save(state, save / file)
        return file

    return do


def nan_in_masters(state: Any) -> None:
    put_nan(state["optimizer_state_dict"]["fp32_flat_groups"][0])


_ZERO3 = (
    Fault("cut of a rank's optimizer", _CUT, cut(_OPTIM.format(1))),
    Fault("empty file", ("empty",), cut(_OPTIM.format(2), 0)),
    Fault("bit flip in a rank's optimizer", ("checksum",), flip_in_zip(_OPTIM.format(0))),
    Fault("bit flip in another rank's", ("checksum",), flip_in_zip(_OPTIM.format(2))),
    Fault("missing optimizer of a rank", ("missing",), missing(_OPTIM.format(1))),
    Fault("missing model states of a rank", ("missing",), missing(_MODEL.format(2))),
    Fault("stale optimizer of a rank", ("stale-file",), stale(_OPTIM.format(1))),
    Fault("stale optimizer of rank 0", ("stale-file",), stale(_OPTIM.format(0))),
    Fault("NaN in a rank's masters", ("nan",), change_in_torch(_OPTIM.format(1), nan_in_masters)),
)


def safetensors_place(path: Path, name: str) -> tuple[int, int]:
    """(first byte of a tensor, its bytes) in a file of safetensors."""
    import json

    data = path.read_bytes()
    n = int.from_bytes(data[:8], "little")
    start, end = json.loads(data[8 : 8 + n])[name]["data_offsets"]
    return 8 + n + start, end - start


def write_in_safetensors(name: str, value: bytes | None) -> Callable[[Path, Path], str]:
    """Writes a float32 into the middle of a weight; None flips the highest bit of an exponent there."""

    def do(save: Path, earlier: Path) -> str:
        path = save / "model.safetensors"
        start, length = safetensors_place(path, name)
        at = start + length // 8 * 4
        if value is None:
            flip(path, at + 3, 6)
        else:
            with open(path, "r+b") as f:
                f.seek(at)
                f.write(value)
        return f"model.safetensors model.{name}"

    return do


_UP = "model.layers.0.mlp.up_proj.weight"
_TRAINER = (
    Fault("cut of the weights", _CUT, cut("model.safetensors")),
    Fault("cut of the optimizer", _CUT, cut("optimizer.pt")),
    Fault("bit flip in the optimizer", ("checksum",), flip_in_zip("optimizer.pt")),
    Fault("flip of an exponent's highest bit in a weight", ("norm-jump", "nan"), write_in_safetensors(_UP, None)),
    Fault("missing optimizer", ("gone", "missing"), missing("optimizer.pt")),
    Fault("stale weights", ("stale-file",), stale("model.safetensors")),
    Fault("stale optimizer", ("stale-file", "not-advanced", "mixed-steps"), stale("optimizer.pt")),
    Fault("NaN in a weight", ("nan",), write_in_safetensors(_UP, b"\x00\x00\xc0\x7f")),
    Fault("stale scheduler", ("not-advanced", "stale-file"), stale("scheduler.pt")),
)

FAULTS = {"fsdp2": _FSDP2, "zero3": _ZERO3, "trainer": _TRAINER}
