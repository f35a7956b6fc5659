"""Name maps of newer models, on jobs that the other programs run here and now (fixtures/newer_models.py): transformers has the logits of the live
model, with images where it sees them, goes on with its losses, and the way back is what the job wrote, bit for bit."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from ranks import run_map_jobs
from safetensors.torch import load_file

import ckpttool
from fixtures import map_jobs, newer_models

pytest.importorskip("torchtitan", reason="torchtitan is installed by `make test`")
pytest.importorskip("megatron.core", reason="megatron-core is installed by `make test`", exc_type=ImportError)
pytestmark = [pytest.mark.live]


class Job(NamedTuple):
    """What a job wrote, and the map of its model."""

    case: str
    folder: Path
    map: str

    @property
    def checkpoint(self) -> Path:
        """The checkpoint."""
        return self.folder / {"titan": "ckpt", "mcore": "ckpt/iter_0000003"}[self.case.partition("-")[0]]

    @property
    def config(self) -> dict[str, Any]:
        """The config.json of the same model in transformers."""
        found: dict[str, Any] = json.loads((self.folder / "config.json").read_text())
        return found


MAPS = {
    "titan-qwen35": "torchtitan-qwen3-5", "titan-qwen35-moe": "torchtitan-qwen3-5", "titan-kimi-k25": "torchtitan-kimi-k25",
    "titan-muse-glimmer": "torchtitan-muse-glimmer",
    "mcore-glm4-moe": "megatron-glm4-moe", "mcore-qwen2-moe+args": "megatron", "mcore-t5+args": "megatron-t5",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for all jobs."""
    return tmp_path_factory.mktemp("jobs")


@cache
def run_program(program: str, folder: Path) -> None:
    """Run all jobs of a program ("titan"), each into a folder of its own."""
    cases = [c for c in MAPS if c.startswith(program)]
    run_map_jobs(",".join(cases), folder if len(cases) > 1 else folder / cases[0])


@pytest.fixture(scope="module", params=MAPS)
def job(request: pytest.FixtureRequest, folder: Path) -> Job:
    """A job that has run."""
    case: str = request.param
    run_program(case.partition("-")[0], folder)
    return Job(case, folder / case, MAPS[case])


@pytest.fixture(scope="module")
def mapped(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole state under the names of transformers."""
    out = tmp_path_factory.mktemp("mapped") / "full.pt"
    ckpttool.convert(job.checkpoint, out, map=job.map, config=str(job.folder))
    return out


def model_class(config: dict[str, Any]) -> Any:
    """The class of transformers that a config names."""
    import transformers

    return getattr(transformers, config["architectures"][0])


def test_transformers_has_the_logits_of_the_live_model(job: Job, tmp_path: Path) -> None:
    done = ckpttool.convert(job.checkpoint, tmp_path / "hf", to="hf", config=str(job.folder))
    assert any(f"by the map {job.map}" in n for n in done.notes)  # which was found by the trainer
    model, said = model_class(job.config).from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not said["missing_keys"] and not said["unexpected_keys"] and not said["mismatched_keys"]
    live = load_file(job.folder / "expected.safetensors")
    with torch.no_grad():
        logits = model.eval()(**newer_models.inputs_of(live["ids"], job.config)).logits
    assert live["logits"].abs().max() > 0.1
    assert (logits - live["logits"]).abs().max().item() <= 1e-6


def test_training_goes_on_with_the_losses_of_the_live_job(job: Job, mapped: Path) -> None:
    cls, tree = model_class(job.config), torch.load(mapped, weights_only=True)
    model = cls(cls.config_class.from_pretrained(job.folder))
    if job.map == "megatron-t5":  # tied, until from_pretrained finds two different ones
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.load_state_dict(tree["model"])
    names, optim = dict(model.named_parameters()), tree["optim"]
    assert set(optim["state"]) == set(names)
    optimizer = map_jobs.restored_optimizer(names, optim)
    losses = []
    for number in (map_jobs.STEPS, map_jobs.STEPS + 1):  # the second depends on the moments
        rows = map_jobs.batch(number, job.config["vocab_size"])
        loss = map_jobs.loss_of(model(**newer_models.inputs_of(rows, job.config)).logits, rows)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    wanted = json.loads((job.folder / "expected.json").read_text())["next"]
    assert losses == pytest.approx(wanted, abs=1e-6, rel=0)


def test_the_way_back_is_what_the_job_wrote(job: Job, mapped: Path, tmp_path: Path) -> None:
    ckpttool.convert(mapped, tmp_path / "back", map=job.map, config=str(job.folder), to="dcp", world_size=1)
    found = ckpttool.diff(job.checkpoint, tmp_path / "back")
    if job.case.startswith("mcore"):  # rows behind the vocabulary were cut
        assert {(n.split(".")[-2], shapes) for n, shapes in found.shapes.items() if n.startswith("model.")} == {
            (n, ((144, 24), (131, 24))) for n in ("word_embeddings", "output_layer")
        }
        with ckpttool.open(job.checkpoint) as theirs, ckpttool.open(tmp_path / "back") as back:
            assert all(torch.equal(theirs[n].torch()[:131], back[n].torch()) for n in found.shapes)
        found.shapes = {}
    assert (found.data, found.shapes, found.dtypes, found.only_in_a, found.only_in_b) == ([], {}, {}, [], [])
    assert set(found.values) <= {"optim.param_groups.0.params", "optim.param_groups.1.params"}  # in another order
