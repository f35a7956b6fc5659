"""A user's own job for `ckpttool resume-verify --job`: the model that trips converters, with its own data and loss."""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from fixtures import jobs


def sample(index: int) -> dict[str, Any]:
    """One row, as `jobs.batch` has it."""
    return {"input_ids": jobs.sample(index), "labels": jobs.sample(index)}


def build() -> Any:
    """The job of fixtures/awkward_w3: tied, frozen, a parameter without gradients, odd names, bool and int buffers."""
    model = jobs.build("awkward")
    return model, jobs.build_optimizer(model, "adamw", lr=0.01), None, sample


def meta(mesh: Any, device: str) -> Any:
    """A Llama on the meta device that is sharded here, with a scheduler, an optimizer factory and a loss of its own."""
    assert mesh.mesh_dim_names == ("dp_shard",) and device == "cpu"
    model = jobs.build("llama", num_hidden_layers=1)
    for module in model.modules():
        for name, p in list(module._parameters.items()):
            if p is not None:
                module._parameters[name] = torch.nn.Parameter(p.detach().to("meta"))

    def loss(model: Any, batch: Any) -> Any:
        logits = model(input_ids=batch["input_ids"]).logits
        target = batch["labels"][:, 1:].flatten()
        each = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), target, reduction="sum")
        return each, target.numel(), logits

    def optimizer(model: Any) -> Any:
        return jobs.build_optimizer(model, "adamw", lr=0.01, groups=2)

    return {"model": model, "optimizer": optimizer, "scheduler": jobs.build_scheduler, "data": sample, "loss": loss}


def scattered(mesh: Any, device: str) -> Any:
    """The job of `meta` with a loss of an operation of which torch has no deterministic kernel, on no device."""
    job = meta(mesh, device)
    inner = job["loss"]

    def loss(model: Any, batch: Any) -> Any:
        return (
            inner(model, batch)[0] * torch.zeros(1).put_(torch.tensor([0]), torch.ones(1))[0],
            *inner(model, batch)[1:],
        )

    return {**job, "loss": loss}


def broken() -> Any:
    """A job that cannot be built."""
    raise RuntimeError("the data set is not mounted")


def nothing() -> Any:
    """Not a job."""
    return 3


def odd(tokenizer: Any) -> Any:
    """Asks for what nobody has."""
    return tokenizer
