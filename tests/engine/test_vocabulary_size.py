"""`convert --vocab-size`: what torch and transformers read has the old rows bit for bit, zeros behind them, and learned rows are never cut."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import peers
import pytest
import torch
from commands import ckpttool_here
from test_doctor_names import hub_model

import ckpttool
from ckpttool.engine.doctor.examine import doctor

NAMES = ("model.embed_tokens.weight", "lm_head.weight")


def job(
    folder: Path, vocab: int, used: int, *, tie: bool = False, decay: float = 0.0
) -> tuple[Any, torch.optim.Optimizer]:
    """A Llama with so many rows of which only the first `used` see tokens, after three steps. Padding is equal at the start."""
    model = hub_model(folder, vocab, tie)
    with torch.no_grad():
        for w in {model.model.embed_tokens.weight, model.lm_head.weight}:
            w[used:] = 0.25
    optimizer = torch.optim.AdamW(list(model.named_parameters()), weight_decay=0.0)
    for step in range(3):
        ids = torch.randint(0, used, (2, 6), generator=torch.Generator().manual_seed(step))
        logits = model(ids).logits[..., :used]  # as Megatron does, which masks its padding
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}, folder / "step3.pt")
    model.save_pretrained(folder)
    return model


def state_of(tree: dict[str, Any]) -> dict[Any, Any]:
    """The state of the optimizer, under the trainer's key or under ours."""
    found: dict[Any, Any] = (tree.get("optimizer") or tree["optim"])["state"]
    return found


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("target", ["full", "dcp"])
def test_rows_are_padded_in_weights_and_moments_and_cut_again(tmp_path: Path, target: str, tie: bool) -> None:
    model = job(tmp_path / "m", 96, 90, tie=tie)
    src = tmp_path / "m" / "step3.pt"
    big, small = tmp_path / "big.pt", tmp_path / "small.pt"
    through = big if target == "full" else tmp_path / "big"
    to = [] if target == "full" else ["--to", "dcp", "-n", "3"]
    done = ckpttool_here("convert", src, through, *to, "--vocab-size", "128")
    assert done.returncode == 0, done.stderr
    assert "padded with zeros from 96 to 128 rows" in done.stderr
    if target == "dcp":
        assert ckpttool_here("convert", through, big).returncode == 0
    got, truth = torch.load(big, weights_only=False), torch.load(src, weights_only=False)
    for n in NAMES:
        assert torch.equal(got["model"][n][:96], truth["model"][n]) and not got["model"][n][96:].any()
    assert all(torch.equal(got["model"][n], t) for n, t in truth["model"].items() if n not in NAMES)
    place = {n: i for i, (n, _) in enumerate(model.named_parameters())}
    for n in NAMES[: 1 if tie else 2]:
        for slot in ("exp_avg", "exp_avg_sq"):
            (t,) = (of[slot] for key, of in state_of(got).items() if str(key) in (n, str(place[n])))
            assert torch.equal(t[:96], truth["optimizer"]["state"][place[n]][slot]) and not t[96:].any()
    bigger = type(model)(type(model.config)(**{**model.config.to_dict(), "vocab_size": 128}))
    bigger.load_state_dict(got["model"])
    if target == "full":  # DCP has text for keys
        torch.optim.AdamW(list(bigger.named_parameters())).load_state_dict(got.get("optimizer", got.get("optim")))
    done = ckpttool_here("convert", through, small, "--vocab-size", "90")
    assert done.returncode == 0, done.stderr  # the rows behind have no moments
    again = torch.load(small, weights_only=False)
    assert all(torch.equal(again["model"][n], truth["model"][n][:90]) for n in NAMES)
    first = next(iter(state_of(again).values()))["exp_avg"]
    assert torch.equal(first, truth["optimizer"]["state"][0]["exp_avg"][:90]) and again["step"] == 3


def test_rows_that_were_trained_are_not_cut(tmp_path: Path) -> None:
    job(tmp_path / "m", 96, 90)
    for size, moments in ((80, True), (89, True)):
        done = ckpttool_here("convert", tmp_path / "m" / "step3.pt", tmp_path / "x.pt", "--vocab-size", size)
        assert done.returncode == 3, done.stderr
        assert f"of the last {96 - size} rows" in done.stderr and "first row" in done.stderr
        assert ("moments that are not 0" in done.stderr) is moments
    # without moments, different rows may be anything
    done = ckpttool_here(
        "convert", tmp_path / "m" / "step3.pt", tmp_path / "x.pt", "--vocab-size", 80, "--only", "model"
    )
    assert done.returncode == 3 and "moments" not in done.stderr
    assert not (tmp_path / "x.pt").exists()
    # and equal ones are padding
    done = ckpttool_here(
        "convert", tmp_path / "m" / "step3.pt", tmp_path / "x.pt", "--vocab-size", 92, "--only", "model"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_resized_folder_of_the_hub_says_so_in_its_config(tmp_path: Path) -> None:
    job(tmp_path / "m", 96, 90)
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps({**config, "vocab_size": 90}))
    (tmp_path / "m" / "step3.pt").rename(tmp_path / "step3.pt")
    found = doctor(tmp_path / "m")
    (one,) = found.findings
    assert found.sound and (one.kind, one.severity) == ("vocabulary", "note")
    assert "model.embed_tokens.weight has 96 rows" in one.text and "vocab_size 90" in one.text
    assert one.repair is not None
    done = ckpttool_here(*shlex.split(one.repair)[1:])
    assert done.returncode == 0, done.stderr
    model, said = peers.from_pretrained(tmp_path / "m-resized")
    assert not said["missing_keys"] and model.lm_head.weight.shape == (90, 16)
    assert not doctor(tmp_path / "m-resized").findings
    for size in (96, 100, 90):  # --config says 90: what is written says what it has
        out = tmp_path / f"hf{size}"
        words = ["--vocab-size", str(size)] if size != 96 else []
        done = ckpttool_here("convert", tmp_path / "step3.pt", out, "--to", "hf", "--config", tmp_path / "m", *words)
        if size == 96:
            assert done.returncode == 3  # the model of the config has 90
            continue
        assert done.returncode == 0, done.stderr
        assert json.loads((out / "config.json").read_text())["vocab_size"] == size
        model, said = peers.from_pretrained(out)
        assert not said["missing_keys"] and model.model.embed_tokens.weight.shape == (size, 16)
    done = ckpttool_here("convert", tmp_path / "m", tmp_path / "one.safetensors", "--vocab-size", 90)
    assert done.returncode == 0, done.stderr


def test_digests_of_changed_rows_are_not_those_of_the_record(tmp_path: Path) -> None:
    job(tmp_path / "m", 96, 90)
    ckpttool.convert(tmp_path / "m" / "step3.pt", tmp_path / "d", to="dcp", world_size=2)
    done = ckpttool_here("convert", tmp_path / "d", tmp_path / "e", "--to", "dcp", "-n", "2", "--vocab-size", "128")
    assert done.returncode == 0 and "tensors have the recorded digests" in done.stderr, done.stderr
    assert ckpttool_here("verify", tmp_path / "e", "--read-data").returncode == 0


def test_what_has_no_rows_of_a_vocabulary(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.zeros(4, 4)}}, tmp_path / "w.pt")
    done = ckpttool_here("convert", tmp_path / "w.pt", tmp_path / "x.pt", "--vocab-size", 8)
    assert done.returncode == 3 and "embed_tokens" in done.stderr
    hub_model(tmp_path / "m")
    assert ckpttool_here("convert", tmp_path / "m", tmp_path / "x", "--to", "hf", "--vocab-size", 96).returncode == 2
    assert ckpttool_here("convert", tmp_path / "m", tmp_path / "x", "--to", "hf", "--vocab-size", 0).returncode == 2
    for shape in ((96, 96), (7,)):  # factors as SOAP has them, blocks as bitsandbytes has
        state = {"state": {0: {"step": torch.tensor(1.0), "GG": torch.ones(shape)}}, "param_groups": [{"params": [0], "param_names": ["embed_tokens.weight"]}]}  # fmt: skip
        torch.save({"model": {"embed_tokens.weight": torch.ones(96, 16)}, "optimizer": state}, tmp_path / "s.pt")
        done = ckpttool_here("convert", tmp_path / "s.pt", tmp_path / "x.pt", "--vocab-size", 128)
        assert done.returncode == 3 and "GG" in done.stderr and "--only model" in done.stderr
