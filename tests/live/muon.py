"""Ranks of Megatron-Core with its Muon, whole or layer by layer on the data-parallel ranks. Run by test_muon.py under torchrun:

    muon.py CASES.json    [{"folder": where to save, or "checkpoint": what to load, "truth": file, "layer_wise": whether,
                            "how": arguments of fixtures/megatron/jobs.Job}]

A case that loads gets what megatron_resume.py says.

NVIDIA's package emerging_optimizers, which Megatron-Core makes Muon of, is in no registry; `OrthogonalizedOptimizer` here is a stand-in for it:
what it keeps for a parameter (momentum_buffer), and an update in torch. What is saved, and in which form, is Megatron-Core's own code.
"""

import json
import os
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from fixtures.jobs import leave
from fixtures.megatron import jobs
from tests.live import megatron_resume

jobs.on_cpu()
import torch  # noqa: E402


class OrthogonalizedOptimizer(torch.optim.Optimizer):
    """Momentum, orthogonalized by the function that Megatron-Core passes."""

    def __init__(self, params: Any, lr: float, momentum_beta: float = 0.95, use_nesterov: bool = False, *, weight_decay: float = 0.01,
                 scaled_orthogonalize_fn: Any = None, **others: Any) -> None:  # fmt: skip
        super().__init__(params, {"lr": lr, "momentum_beta": momentum_beta, "weight_decay": weight_decay})
        self.orthogonalize_momentum = scaled_orthogonalize_fn

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                held = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                held.lerp_(p.grad, 1 - group["momentum_beta"])
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(held.sign(), alpha=group["lr"])


def with_muon(layer_wise: bool) -> None:
    """Have jobs of Megatron-Core use its Muon."""
    if "emerging_optimizers" not in sys.modules and find_spec("emerging_optimizers") is None:
        made: Any = ModuleType("emerging_optimizers.orthogonalized_optimizers")
        made.OrthogonalizedOptimizer, made.get_muon_scale_factor = OrthogonalizedOptimizer, lambda *a, **k: 1.0
        utils: Any = ModuleType("emerging_optimizers.orthogonalized_optimizers.muon_utils")
        utils.newton_schulz_tp = lambda x, *a, **k: x
        for module in (ModuleType("emerging_optimizers"), made, utils):
            sys.modules[module.__name__] = module
    import megatron.core.optimizer as optimizers
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
    from megatron.core.optimizer.muon import get_megatron_muon_optimizer

    # gloo gathers no tensors of unequal sizes
    LayerWiseDistributedOptimizer.allgather_params = LayerWiseDistributedOptimizer.broadcast_params
    optimizers.get_megatron_optimizer = partial(
        get_megatron_muon_optimizer, layer_wise_distributed_optimizer=layer_wise
    )


if __name__ == "__main__":
    path = Path(sys.argv[1])
    cases = json.loads(path.read_text())
    for case in cases:
        with_muon(case["layer_wise"])
        case["how"]["distributed"] = False
        if "checkpoint" in case:
            megatron_resume.resume(case)
        else:
            jobs.train_and_save(case)
    if int(os.environ["RANK"]) == 0:
        path.write_text(json.dumps(cases))
    leave()
