"""The table of docs/how-to/migrations.md: every command runs on checkpoints that the engines themselves saved, for each engine that its
row names; the result has the weights and the optimizer of the source, bit for bit."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import ckpttool_here
from test_readme import FIXTURES, MIGRATIONS

import ckpttool

ROWS = [
    [cell.strip() for cell in row.split(" | ")]
    for row in re.findall(r"^\| (.+`ckpttool .+`) \|$", MIGRATIONS.partition("## Every migration")[2], re.MULTILINE)
]
#: {an engine: its fixture}; ZeRO-2's is of another model, which is no language model of Megatron.
ENGINES = {
    "DDP": "full_w1/ckpt/ids.pt", "FSDP1": "fsdp1_w2_tied/ckpt", "FSDP2": "fsdp2_w3/ckpt", "HSDP": "fsdp2_w4_hsdp/ckpt",
    "ZeRO-1": "zero1_w2/ckpt", "ZeRO-2": "zero2_w3_bf16/ckpt", "ZeRO-3": "zero3_w2_tied/ckpt", "Megatron": "megatron/buckets_tp2/ckpt/iter_0000003",
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 131, "hidden_size": 36, "intermediate_size": 50,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10, "tie_word_embeddings": False,
}  # fmt: skip
OF_MEGATRON = {"hidden_size": 16, "intermediate_size": 20, "head_dim": 6}


def engines_in(cell: str) -> list[str]:
    """The engines that a cell names: ZeRO-1, 2, 3 are three."""
    return [f"ZeRO-{name}" if name.isdigit() else name for name in cell.split(", ")]


@pytest.fixture
def desk(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder with the checkpoint of an engine under the name that the page gives it, and llama, the config of its model."""
    engine: str = request.param
    source = FIXTURES / ENGINES[engine]
    name = {"DDP": "ddp.pt", "FSDP1": "fsdp1", "Megatron": "iter_0000003"}.get(
        engine, "zero" if "ZeRO" in engine else "fsdp2"
    )
    case = FIXTURES / Path(ENGINES[engine]).parts[0] / "case.json"
    own: dict[str, Any] = json.loads(case.read_text())["model"]["kwargs"] if case.exists() else OF_MEGATRON
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(json.dumps({**LLAMA, **own}))
    if engine == "DDP":  # as one saves it, without what the fixture has for other tests
        job = torch.load(source)
        torch.save({key: job[key] for key in ("model_state_dict", "optimizer_state_dict", "step")}, tmp_path / name)
    else:
        shutil.copytree(source, tmp_path / name)
    return tmp_path


def test_there_is_a_row_for_every_pair() -> None:
    pairs = [(a, b) for row in ROWS for a in engines_in(row[0]) for b in engines_in(row[1])]
    assert sorted(pairs) == sorted((a, b) for a in ENGINES for b in ENGINES)
    assert all(len(row) == 6 and all(row) for row in ROWS)


@pytest.mark.parametrize(("engine", "desk"), [(e, e) for e in ENGINES], indirect=["desk"], ids=list(ENGINES))
def test_every_migration_from_an_engine_keeps_weights_and_optimizer(
    engine: str, desk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(desk)
    results: list[str] = []
    for row in (r for r in ROWS if engine in engines_in(r[0])):
        if (
            engine in ("ZeRO-2", "HSDP") and row[1] == "Megatron"
        ):  # whose fixtures have groups or an SGD that it refuses
            continue
        for to in engines_in(row[1]) if "zero3" in row[5] else [""]:
            words = shlex.split(row[5].strip("`").replace("zero3", to.lower().replace("-", "") or "zero3"))
            if words[1] == "convert":
                results.append(f"{to}{len(results)}-{words[3]}")
                words[3] = results[-1]
            done = ckpttool_here(*words[1:])
            assert done.returncode == 0, f"{shlex.join(words)}\n{done.stderr}"
            if words[1] == "convert":
                assert_same_state(words[2], words[3], "--map" in words)
    if engine == "Megatron":  # under the names of transformers: all have equal moments
        first, *others = (r for r in results if ckpttool.inspect(r).layout != "megatron")
        found = [ckpttool.diff(first, other, only=["optim"]) for other in others]
        assert len(found) == 5 and all(d.tensors > 40 and not (d.data or d.shapes) for d in found), found


def assert_same_state(old: str, new: str, mapped: bool) -> None:
    """`new` has the weights and optimizer of `old`; one for Megatron is mapped back first. What comes from Megatron has other names."""
    if mapped and old.startswith("iter_"):
        return
    if mapped:
        ckpttool.convert(new, f"{new}-back", to="dcp", world_size=2, map="megatron", config="llama")
        new = f"{new}-back"
    got = ckpttool.diff(old, new, only=["model", "optim"], config="llama" if "fsdp1" in (old, new) else None)
    # Megatron-Core keeps the step in its param groups, of which it has two with options of their own
    lost = [name for name in got.only_in_a if not (mapped and name.endswith(".step"))]
    values = {} if mapped else got.values
    assert got.tensors > 20 and not (got.data or got.shapes or got.dtypes or lost or values), (old, new, got)
