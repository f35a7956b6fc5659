"""OLMo-core's step folders are one state (fixtures/olmo_jobs.py wrote the fixture, with OLMo-core's own classes)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import ckpttool_here
from peers import FIXTURES, difference, load_dcp, load_full, same_value, tensors_of
from safetensors.torch import load_file

import ckpttool
from ckpttool.errors import Corrupt, NotRecognised, Unsupported

RUN = FIXTURES / "trainers" / "olmo_core_w3"
STEP = RUN / "step3"
TRUTH = load_file(RUN / "truth.safetensors")


def rank_of(folder: Path, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(folder / "train" / f"rank{rank}.pt", weights_only=False)
    return found


def copied(to: Path) -> Path:
    shutil.copytree(STEP, to / "step3")
    return to / "step3"


def state_of(path: Path) -> dict[str, torch.Tensor]:
    tree = load_full(path) if path.suffix else load_dcp(path)
    return {k: t for k, t in tensors_of(tree).items() if k.startswith(("model.", "optim."))}


@pytest.mark.parametrize("to", ["dcp", "full"])
def test_weights_and_moments_are_those_of_the_job_bit_for_bit(to: str, tmp_path: Path) -> None:
    out = tmp_path / ("out" if to == "dcp" else "out.pt")
    done = ckpttool.convert(STEP, out, to=to, world_size=2 if to == "dcp" else None)
    assert done.verified and not done.dropped
    assert difference(state_of(out), TRUTH) == []


def test_to_hf_has_the_weights(tmp_path: Path) -> None:
    ckpttool.convert(STEP, tmp_path / "out", to="hf")
    found = {f"model.{n}": t for n, t in load_file(tmp_path / "out" / "model.safetensors").items()}
    assert difference(found, {n: t for n, t in TRUTH.items() if n.startswith("model.")}) == []


def test_counters_are_once_and_rng_is_of_every_rank(tmp_path: Path) -> None:
    ckpttool.convert(STEP, tmp_path / "out", to="dcp", world_size=2)
    tree = load_dcp(tmp_path / "out")
    saved = rank_of(STEP, 0)
    assert tree["trainer"]["global_step"] == 3
    assert tree["dataloader"] == saved["data_loader"] and tree["trainer"]["callbacks"]["speed"] == {"rank": 0}
    for rank in range(3):
        assert same_value(tree["rng"][str(rank)]["torch"], rank_of(STEP, rank)["rng"]["torch"])
    # what a rank saved otherwise than rank 0
    assert tree["extra"]["per_rank"] == {str(r): {"trainer": {"callbacks": {"speed": {"rank": r}}}} for r in (1, 2)}


def test_inspect_says_whose_it_is_and_that_nothing_is_to_be_done() -> None:
    found = json.loads(ckpttool_here("inspect", STEP, "--json").stdout)
    assert (found["layout"], found["trainer"], found["ranks"]) == ("olmo", "OLMo-core", 3)
    assert found["next"].startswith("resumes at any world size in OLMo-core; nothing to convert")
    assert not found["not_read"]


def test_the_run_lists_its_steps_and_files_are_answered_with_the_step(tmp_path: Path) -> None:
    for step in (3, 6, 9):
        shutil.copytree(STEP, tmp_path / f"step{step}")
    (tmp_path / "step9" / ".metadata.json").unlink()
    found = json.loads(ckpttool_here("inspect", tmp_path, "--json").stdout)
    assert [(c["name"], c["trainer"], c["complete"]) for c in found["checkpoints"]] == [
        ("step3", "OLMo-core", True), ("step6", "OLMo-core", True), ("step9", "OLMo-core", False),
    ]  # fmt: skip
    assert found["newest"] == str(tmp_path / "step6")
    for file in ("model_and_optim/__0_0.distcp", "train/rank1.pt"):
        with pytest.raises(NotRecognised, match=rf"is one file of the olmo checkpoint {tmp_path}/step6; give that"):
            ckpttool.open(tmp_path / "step6" / file)
    with ckpttool.open(tmp_path / "step9") as opened:
        assert any("the save had not ended" in n for n in opened.checkpoint.notes)


def test_a_missing_rank_is_named_and_half_of_a_step_names_the_other(tmp_path: Path) -> None:
    step = copied(tmp_path)
    (step / "train" / "rank1.pt").unlink()
    with ckpttool.open(step) as opened:
        assert any(n.startswith("no train/rank1.pt") for n in opened.checkpoint.notes)
    with pytest.raises(Unsupported, match=r"\.\./train/"):
        ckpttool.convert(step / "model_and_optim", tmp_path / "out", to="dcp", world_size=2)


@pytest.mark.parametrize("large", [False, True], ids=["our parser", "the C unpickler"])
@pytest.mark.parametrize(
    ("old", "new", "error", "says"),
    [(b"_StorageInfo", b"_StorageXnfo", Unsupported, r"_StorageXnfo"),
     (b"relative_path", b"relative_patX", Corrupt, "has the fields relative_patX, offset, length, not those of torch")],
    ids=["class", "field"],
)  # fmt: skip
def test_a_class_of_other_fields_or_another_name_is_named(
    old: bytes, new: bytes, error: Any, says: str, large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = copied(tmp_path)
    index = step / "model_and_optim" / ".metadata"
    index.write_bytes(index.read_bytes().replace(old, new))
    if large:
        from ckpttool.converters.dcp import dcp_metadata as _dcp_metadata

        monkeypatch.setattr(_dcp_metadata, "_LARGE_BYTES", 0)
    with pytest.raises(error, match=says):
        ckpttool.open(step)


def test_a_large_index_with_olmo_core_s_class_is_read_as_a_small_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckpttool.converters.dcp import dcp_metadata as _dcp_metadata

    def places() -> dict[str, Any]:
        with ckpttool.open(STEP) as opened:
            return {n: (t.dtype, t.shape, list(t.chunks)) for n, t in opened.checkpoint.tensors.items()}

    small = places()
    monkeypatch.setattr(_dcp_metadata, "_LARGE_BYTES", 0)
    assert places() == small


def test_what_only_a_later_rank_has_is_that_rank_s(tmp_path: Path) -> None:
    source = copied(tmp_path)
    for rank in range(3):
        more: dict[str, Any] = {"empty": {"seen": rank} if rank else {}, "rows": [5] * (rank + 1)}
        saved = rank_of(source, rank)
        saved["callbacks"] = more
        torch.save(saved, source / "train" / f"rank{rank}.pt")
    done = ckpttool.convert(source, tmp_path / "out.pt", to="full")
    assert not any("not every rank" in n for n in done.notes)
    tree = load_full(tmp_path / "out.pt")
    assert tree["trainer"]["callbacks"] == {"empty": {}, "rows": [5]}
    found = {r: x["trainer"]["callbacks"] for r, x in tree["extra"]["per_rank"].items()}
    assert found["1"] == {"empty": {"seen": 1}, "rows": [5, 5]}


def test_what_a_later_rank_lacks_is_named(tmp_path: Path) -> None:
    source = copied(tmp_path)
    for rank in range(3):
        saved = rank_of(source, rank)
        saved["callbacks"] = {"every": 1} | ({} if rank == 2 else {"counts": {"seen": 7}})
        torch.save(saved, source / "train" / f"rank{rank}.pt")
    done = ckpttool.convert(source, tmp_path / "out.pt", to="full")
    assert [n for n in done.notes if "not every rank" in n] == [
        "not every rank saved trainer.callbacks.counts.seen; what is written for several ranks has it for all"
    ]
    assert load_full(tmp_path / "out.pt")["trainer"]["callbacks"] == {"every": 1, "counts": {"seen": 7}}
