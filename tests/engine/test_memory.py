"""Memory of a job: what `inspect --fits` computes. tests/live/test_job_memory.py compares it with what engines allocate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import ckpttool_here
from peers import FIXTURES

import ckpttool
from ckpttool.engine.memory import Devices, JobMemory
from ckpttool.errors import UsageError

W3 = FIXTURES / "fsdp2_w3" / "ckpt"


def sized(path: Path, **asked: Any) -> JobMemory:
    found = ckpttool.inspect(path, **{"fits": "2x80GB", **asked}).memory
    assert found is not None
    return found


def row(path: Path, strategy: str, **asked: Any) -> dict[str, Any]:
    return sized(path, strategy=[strategy], **asked).rows[0]


@pytest.mark.parametrize(
    ("text", "devices"),
    [("8x80GB", (1, 8, 80_000_000_000)), ("4x8x80GiB", (4, 8, 80 << 30)), ("8", (1, 8, None)), ("1x141.5gb", (1, 1, 141_500_000_000))],
)  # fmt: skip
def test_devices_are_read_as_people_write_them(text: str, devices: tuple[int, int, int | None]) -> None:
    assert Devices.parse(text) == devices


@pytest.mark.parametrize("text", ["", "x", "0x80GB", "8x", "8x80", "8x80XB", "-1", "1.5x80GB", "9999999", "999999x999999", "8x80GBx", "8x1.2.3GB"])  # fmt: skip
def test_other_devices_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        Devices.parse(text)


def test_the_rows_of_the_paper_at_a_size_that_divides(tmp_path: Path) -> None:
    """Table 1 of the ZeRO paper: 7.5 B parameters with Adam in mixed precision on 64 devices take 120 GB, and 31.4, 16.6 and 1.9 GB
    in the three stages."""
    torch.save(
        {f"layers.{i}.w": torch.empty(3200, 25, 40, dtype=torch.bfloat16) for i in range(5)} | {"b": torch.ones(0)},
        tmp_path / "m.pt",
    )
    found = {r["strategy"]: r for r in sized(tmp_path / "m.pt", fits="64x120MB", precision="mixed").rows}
    state = {s: r["params"] + r["grads"] + r["optimizer"] for s, r in found.items()}
    p, scalars = 16_000_000, 4
    assert state["zero1"] == 4 * p + 12 * p // 64 + scalars
    assert state["zero2"] == 2 * p + 14 * p // 64 + scalars
    assert state["zero3"] == 16 * p // 64 + scalars
    assert state["ddp"] == 16 * p + 4 * 5 + 4  # fp32 parameters, gradients and two moments; a step of each
    assert [r["fits"] for r in found.values()] == [r["total"] <= 120_000_000 for r in found.values()]
    assert found["ddp"]["spare"] == 120_000_000 - found["ddp"]["total"] < 0


def test_slots_and_dtypes_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    model = torch.nn.Linear(6, 4, bias=False)
    for make, words, numbers in (
        (lambda p: torch.optim.AdamW(p, amsgrad=True), "AdamW or Adam", 3 * 24 + 1),
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), "SGD", 24),
        (lambda p: torch.optim.SGD(p, 0.1), "no state", 0),
        (lambda p: torch.optim.Adafactor(p), "Adafactor", 4 + 6 + 1),
    ):
        optimizer = make(model.parameters())
        model(torch.ones(1, 6)).sum().backward()
        optimizer.step()
        saved = optimizer.state_dict()
        optim = {
            "state": dict(zip(["weight"], saved["state"].values(), strict=False)),
            "param_groups": [{**group, "params": ["weight"]} for group in saved["param_groups"]],
        }
        torch.save({"model": model.state_dict(), "optim": optim}, tmp_path / "m.pt")
        found = row(tmp_path / "m.pt", "ddp")
        assert words in sized(tmp_path / "m.pt").optimizer
        assert (found["params"], found["grads"], found["optimizer"]) == (96, 96, 4 * numbers)


def test_weights_alone_get_the_optimizer_that_was_named_or_a_note(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(8, 4, dtype=torch.bfloat16)}, tmp_path / "w.pt")
    by = {o: row(tmp_path / "w.pt", "fsdp2", optimizer=o) for o in ("adamw", "sgd", "none", None)}
    assert {o: r["optimizer"] for o, r in by.items()} == {"adamw": 2 * 64 + 4, "sgd": 64, "none": 0, None: 2 * 64 + 4}
    assert by["none"]["grads"] == 0 and by[None]["grads"] == 32
    assert "AdamW with fp32 moments is assumed" in sized(tmp_path / "w.pt").notes[0]
    assert sized(tmp_path / "w.pt", optimizer="adamw").notes == []
    with pytest.raises(UsageError, match="has no optimizer"):
        sized(tmp_path / "w.pt", optimizer="saved")


def test_frozen_weights_have_no_gradients_and_tied_ones_count_once() -> None:
    case = json.loads((FIXTURES / "fsdp2_w2_frozen" / "case.json").read_text())
    found = sized(FIXTURES / "fsdp2_w2_frozen" / "ckpt")
    assert case["model"]["kwargs"]["freeze"] and 0 < found.trained < found.parameters
    tied = sized(FIXTURES / "fsdp2_w3_tied_bf16" / "ckpt")
    with ckpttool.open(FIXTURES / "fsdp2_w3_tied_bf16" / "ckpt") as opened:
        numbers = sum(t.numel for n, t in opened.checkpoint.tensors.items() if t.component == "model")
        head = opened.checkpoint.tensors["model.lm_head.weight"].numel
    assert tied.parameters == numbers - head and any("lm_head" in note for note in tied.notes)


def test_the_largest_block_is_what_is_gathered() -> None:
    found = sized(W3)
    with ckpttool.open(W3) as opened:
        blocks = {
            i: sum(t.nbytes for n, t in opened.checkpoint.tensors.items() if n.startswith(f"model.model.layers.{i}."))
            for i in (0, 1)
        }
        rest = sum(
            t.nbytes for n, t in opened.checkpoint.tensors.items() if n.startswith("model.") and ".layers." not in n
        )
        everything = sum(t.nbytes for t in opened.checkpoint.tensors.values() if t.component in ("model", "optim"))
    assert (found.largest_unit, found.root) == ({"name": "model.layers.0", "bytes": blocks[0]}, rest)
    assert found.full_save == everything
    fsdp2 = next(r for r in found.rows if r["strategy"] == "fsdp2")
    assert fsdp2["gathered"] == rest + 2 * blocks[0] + max(rest, blocks[0])
    assert fsdp2["offload"] == 2 * (fsdp2["params"] + fsdp2["grads"] + fsdp2["optimizer"])


def test_the_command_prints_the_table_its_formulas_and_what_is_not_in_it() -> None:
    done = ckpttool_here("inspect", W3, "--fits", "2x4x150kB", "--precision", "mixed")
    assert done.returncode == 0, done.stderr
    for words in ("(b+G+K)P/N", "activations", "arXiv:1910.02054", "hsdp", "too much", "fits, ", "FULL_STATE_DICT"):
        assert words in done.stdout
    said = json.loads(ckpttool_here("inspect", W3, "--fits", "3", "--strategy", "fsdp2", "--json").stdout)["memory"]
    assert said["activations"] == "not included" and said["devices"] == {"nodes": 1, "per_node": 3, "memory": None}
    assert [r["strategy"] for r in said["rows"]] == ["fsdp2"] and said["rows"][0]["fits"] is None
    for words in (
        ["--strategy", "fsdp2"],
        ["--optimizer", "sgd"],
        ["--fits", "8", "--strategy", "zero9"],
        ["--fits", "8", "--precision", "int3"],
    ):
        assert ckpttool_here("inspect", W3, *words).returncode == 2


@pytest.mark.parametrize(("to", "strategy"), [("dcp", "fsdp2"), ("zero2", "zero2"), ("zero3", "zero3"), ("full", None)])
def test_a_dry_run_says_what_the_job_holds(to: str, strategy: str | None, tmp_path: Path) -> None:
    world = ["-n", 3] if strategy else []
    words = ["convert", W3, tmp_path / ("out.pt" if to == "full" else "out"), "--to", to, *world, "--dry-run"]
    said = json.loads(ckpttool_here(*words, "--json").stdout)["memory"]
    printed = ckpttool_here(*words).stdout
    if strategy is None:
        assert said is None and "a job on" not in printed
        return
    wanted = row(W3, strategy, fits="3")
    assert {**said, "optimizer_is": None} == {**wanted, "optimizer_is": None}
    assert f"a job on 3 ranks, {strategy}, holds in each, but for activations: " in printed
