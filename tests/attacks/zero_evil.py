"""Parts of malicious DeepSpeed saves; the good ones are made by zero_files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from zero_files import Job, edit, numbers, plain, save_of, universal, zero0, zero3, zero12

Make = Callable[[Path, Path], Path]

MODEL3 = "zero_pp_rank_{}_mp_rank_00_model_states.pt"
OPTIM = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
MODEL = "mp_rank_00_model_states.pt"


def job(**more: Any) -> Job:
    """Two trained parameters in two groups, one frozen, one tied, one buffer."""
    weights = {"w": numbers("w", (5, 3)), "b": numbers("b", (4,)), "f": numbers("f", (3, 2))}
    weights |= {"a": weights["w"], "buf": numbers("buf", (2,))}
    parts = {"groups": [["w"], ["b"]], "frozen": ["f"], "tied": {"a": "w"}, "buffers": ["buf"]}
    return plain(**{"weights": weights, **parts, **more})


def z3(change: Callable[[Path], Any] = lambda tag: None, world: int = 2, **how: Any) -> Make:
    """A case: the folder of the tag of a save of stage 3 was changed."""

    def make(folder: Path, canary: Path) -> Path:
        zero3(job(**how.pop("job", {})), folder, world, **how)
        change(save_of(folder))
        return folder

    return make


def z2(change: Callable[[Path], Any] = lambda tag: None, world: int = 2, **how: Any) -> Make:
    """The same of stage 2."""

    def make(folder: Path, canary: Path) -> Path:
        zero12(job(**how.pop("job", {})), folder, world, **how)
        change(save_of(folder))
        return folder

    return make


def z0(change: Callable[[Any], Any]) -> Make:
    """A case: the file of a save of stage 0 was changed."""

    def make(folder: Path, canary: Path) -> Path:
        zero0(job(), folder, 2, masters=True)
        edit(save_of(folder) / MODEL, change)
        return folder

    return make


def uni(change: Callable[[Path], Any] = lambda tag: None, stage: int = 3) -> Make:
    """A case: the folder of a universal checkpoint was changed."""

    def make(folder: Path, canary: Path) -> Path:
        universal(job(), folder, 2, stage)
        change(folder / (folder / "latest_universal").read_text())
        return folder

    return make


def model(change: Callable[[Any], Any], *ranks: int) -> Make:
    """A case: what the model files of stage 3 hold was changed, of both ranks where none is named."""
    return z3(lambda tag: [edit(tag / MODEL3.format(r), change) for r in ranks or (0, 1)])


def optim(change: Callable[[Any], Any], *ranks: int) -> Make:
    """A case: `optimizer_state_dict` of the optimizer files of stage 3."""
    return z3(lambda tag: [edit(tag / OPTIM.format(r), inside(change)) for r in ranks or (0, 1)])


def model2(change: Callable[[Any], Any]) -> Make:
    """A case: the model file of stage 2."""
    return z2(lambda tag: edit(tag / MODEL, change))


def optim2(change: Callable[[Any], Any], *ranks: int) -> Make:
    """A case: `optimizer_state_dict` of the optimizer files of stage 2."""
    return z2(lambda tag: [edit(tag / OPTIM.format(r), inside(change)) for r in ranks or (0, 1)])


def inside(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A change of what lies under optimizer_state_dict."""

    def outer(tree: Any) -> None:
        new = change(tree["optimizer_state_dict"])
        if new is not None:
            tree["optimizer_state_dict"] = new

    return outer


def put(*path: Any) -> Callable[[Any], None]:
    """put("a", 0, "b", 5): tree["a"][0]["b"] = 5; a callable last element is called with what is there."""
    *keys, value = path

    def change(tree: Any) -> None:
        for k in keys[:-1]:
            tree = tree[k]
        tree[keys[-1]] = (
            value(tree.get(keys[-1]) if isinstance(tree, dict) else tree[keys[-1]]) if callable(value) else value
        )

    return change


def without(*path: Any) -> Callable[[Any], None]:
    """The entry at a path is gone."""

    def change(tree: Any) -> None:
        for k in path[:-1]:
            tree = tree[k]
        del tree[path[-1]]

    return change


def renamed(old: str, new: str) -> Callable[[Path], None]:
    """A file of the folder is called otherwise."""
    return lambda tag: os.rename(tag / old, tag / new)


def copied(old: str, new: str) -> Callable[[Path], None]:
    """A file is there a second time."""
    return lambda tag: shutil.copy(tag / old, tag / new) and None


def swapped(a: str, b: str) -> Callable[[Path], None]:
    """Two files have each other's names."""

    def change(tag: Path) -> None:
        os.rename(tag / a, tag / "x")
        os.rename(tag / b, tag / a)
        os.rename(tag / "x", tag / b)

    return change


def touched(name: str) -> Callable[[Path], None]:
    """A further file of three bytes."""

    def change(tag: Path) -> None:
        (tag / name).parent.mkdir(parents=True, exist_ok=True)
        (tag / name).write_bytes(b"abc")

    return change


def latest(data: bytes, name: str = "latest") -> Make:
    """A case: the file `latest` is these bytes."""

    def make(folder: Path, canary: Path) -> Path:
        zero3(job(), folder, 2)
        (folder / name).write_bytes(data)
        return folder

    return make


def strided(t: torch.Tensor) -> torch.Tensor:
    """The same length, every second element of another storage."""
    return torch.arange(2.0 * t.numel())[::2]
