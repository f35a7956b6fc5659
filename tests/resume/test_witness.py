"""The reference of --against is loaded by the reader of the program that wrote it, and so faults of ckpttool's own loader are found."""

from __future__ import annotations

import io
import json
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import ckpttool_here
from judged import Runs, first
from peers import REPOSITORY
from ranks import forked, one_at_a_time, torchrun

from ckpttool.resume.compare.judge import judge_single_run
from ckpttool.resume.compare.not_verified import list_not_verified
from ckpttool.resume.diagnosis.causes import find_causes
from ckpttool.resume.job.origin import _MetadataUnpickler
from ckpttool.resume.request import RunSettings

JOB = REPOSITORY / "tests" / "live" / "witness_job.py"
TORCH = {"dcp": "torch's dcp.load", "full.pt": "torch.load"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The checkpoint of three ranks, resumed by two: by its origin's readers, by ckpttool, and by spoiled loaders."""
    folder = tmp_path_factory.mktemp("witness")
    log = torchrun(3, JOB.name, "--out", str(folder))
    assert (folder / "done").exists(), log[-4000:]
    own = RunSettings(
        source=str(folder / "dcp"), mesh={"dp_shard": 2}, job=f"{JOB}:build_sound", steps=2, start=4, global_batch=12, micro_batch=2,
        round_trip=False,
    )  # fmt: skip
    plan = {f"origin {name}": replace(own, source=str(folder / name), loader="origin") for name in TORCH}
    plan |= {f"own {name}": replace(own, source=str(folder / name)) for name in TORCH}
    for fault in ("text_keys", "counting_on"):
        plan[fault] = replace(own, job=f"{JOB}:build_{fault}")
        plan[f"origin {fault}"] = replace(plan[fault], loader="origin")
    return Runs(plan).launch(folder / "runs")


@pytest.mark.live
@pytest.mark.slow
@pytest.mark.parametrize("name", TORCH)
def test_torch_and_ckpttool_load_alike(runs: Runs, name: str) -> None:
    reference, got = runs.traces[f"origin {name}"], runs.traces[f"own {name}"]
    assert reference.loaders == dict.fromkeys(("model", "optim", "scheduler"), TORCH[name])
    assert set(got.loaders.values()) == {"ckpttool"}
    checks = judge_single_run(reference, got).checks
    assert first(checks) is None
    by_name = {c.name: c for c in checks}
    assert by_name["state.values"].verdict == by_name["state.reference"].verdict == "pass"
    assert by_name["steps.loss"].number == 0, "bit-equal"
    assert not [text for text in list_not_verified(reference, got, checks) if "ckpttool's loader" in text]


@pytest.mark.live
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "check", "cause"),
    [("text_keys", "state.values", "loaded-values"), ("counting_on", "config.groups", "option-k")],
)
def test_a_fault_of_the_loader_is_no_fault_of_both_sides(runs: Runs, fault: str, check: str, cause: str) -> None:
    reference, got = runs.traces[f"origin {fault}"], runs.traces[fault]
    assert set(reference.loaders.values()) == {TORCH["dcp"]}, "the spoiled loader has no part in it"
    checks = judge_single_run(reference, got).checks
    assert check in {c.name for c in checks if c.verdict == "fail"}
    assert find_causes(reference, got, checks)[0].kind == cause
    both = judge_single_run(got, got).checks
    assert first(both) is None, "where ckpttool loads both sides, nobody sees it"
    assert any("it loaded both sides, as asked" in text for text in list_not_verified(got, got, both))


def verify_against_itself(source: Path, build: Path) -> dict[str, Any]:
    """The report on a checkpoint that is its own reference, in one step of two ranks; it has to pass."""
    words = ["--job", f"{build}:build", "-n", 2, "--steps", 1, "--global-batch", 4, "--no-round-trip"]
    with one_at_a_time(), forked():
        done = ckpttool_here("resume-verify", source, "--against", source, *words, "--scratch", build.parent, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.mark.live
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fixture", "reader", "own"),
    [
        ("zero3_w3_groups", "DeepSpeed's ds_to_universal", ["model", "optim"]),
        ("universal_z3_w2", "torch.load of DeepSpeed's universal save", ["model", "optim"]),
        ("fsdp1_w2_sharded", "", ["model", "optim"]),
    ],
)
def test_who_loads_other_layouts(tmp_path: Path, fixture: str, reader: str, own: list[str]) -> None:
    if reader.startswith("DeepSpeed"):
        pytest.importorskip("deepspeed")
    folder = REPOSITORY / "fixtures" / fixture
    case = json.loads((folder / "case.json").read_text())
    build = tmp_path / "job.py"
    build.write_text(
        f"from fixtures import jobs\n\n\ndef build():\n    model = jobs.build({case['model']['name']!r}, **{case['model']['kwargs']!r})\n"
        f"    return {{'model': model, 'optimizer': jobs.build_optimizer(model, {case['optimizer']['name']!r}, **{case['optimizer']['kwargs']!r}),\n"
        "            'data': lambda i: {'input_ids': jobs.sample(i), 'labels': jobs.sample(i)}}\n"
    )
    source = folder / "ckpt"
    report = verify_against_itself(source, build)
    reference = report["reference"]
    for component in own:
        assert reference["loaders"][component].startswith(reader or "ckpttool")
    if not reader:
        assert "no other reader of this layout" in reference["unwitnessed"]["model"]
        assert "faults of ckpttool's loader in model, optimizer" in " ".join(report["not_verified"])
    assert {*os.listdir(tmp_path)} <= {"job.py", "__pycache__"}, "what DeepSpeed made is gone"


@pytest.mark.live
@pytest.mark.slow
def test_a_directory_of_a_trainer_is_loaded_by_torch_and_a_scheduler_of_functions_takes_its_state(
    tmp_path: Path,
) -> None:
    folder = REPOSITORY / "fixtures" / "trainers" / "trainer_fsdp2_sharded"
    case = json.loads((folder / "case.json").read_text())
    config = {k: x for k, x in case["model"]["config"].items() if k != "transformers_version"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    build = tmp_path / "job.py"
    build.write_text(
        "import torch\nfrom transformers import AutoConfig, AutoModelForCausalLM\n\n\ndef build():\n"
        f"    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained({str(tmp_path)!r}), dtype=torch.float32)\n"
        "    groups = [{'params': [p for p in model.parameters() if (p.dim() > 1) is flag]} for flag in (True, False)]\n"
        "    optimizer = torch.optim.AdamW(groups)\n"
        "    return {'model': model, 'optimizer': optimizer,\n"
        "            'scheduler': torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (1 + k)),\n"
        f"            'data': lambda i: torch.arange(i, i + 16).remainder({config['vocab_size']}).numpy()}}\n"
    )
    source = folder / "ckpt" / "checkpoint-3"
    report = verify_against_itself(source, build)
    loaders = report["reference"]["loaders"]
    assert loaders == {"model": TORCH["dcp"], "optim": TORCH["dcp"], "scheduler": "torch.load"}


class Runs_:
    """Stands for a class that a hostile metadata names."""

    def __reduce__(self) -> Any:
        return os.system, ("true",)


@pytest.mark.parametrize("hostile", [Runs_(), print, os.path.join], ids=["a call", "a builtin", "a function"])
def test_a_metadata_that_names_anything_else_is_not_unpickled(hostile: Any) -> None:
    with pytest.raises(pickle.UnpicklingError, match="no class of torch's metadata"):
        _MetadataUnpickler(io.BytesIO(pickle.dumps(hostile))).load()
