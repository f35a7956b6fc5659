"""Ranks of Megatron-Core with its precision-aware optimizer, saved in every sharding. Run by test_precision_aware.py under torchrun:

    precision_aware.py CASES.json    [{"folder": where to save, "truth": file, "how": arguments of fixtures/megatron/jobs.Job,
                                       "optimizer": arguments of OptimizerConfig}]

Only TransformerEngine's FusedAdam has what that optimizer needs, and it needs a GPU. `FusedAdam` here is a stand-in for it: the methods that
Megatron-Core calls, by TransformerEngine 2.20's rules for what it keeps (pytorch/optimizers/fused_adam.py), in torch. What is saved, and in which
form, is Megatron-Core's own code.
"""

import json
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from fixtures.jobs import leave
from fixtures.megatron import jobs

jobs.on_cpu()
import torch  # noqa: E402


class FusedAdam(torch.optim.Optimizer):
    """AdamW whose master is a bf16 weight and an int16 remainder, or fp32, and whose moments are fp32, bf16 or scaled fp16."""

    def __init__(self, params: Any, lr: float = 1e-3, betas: Any = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0, *,
                 bias_correction: bool = True, adam_w_mode: bool = True, master_weights: bool = False, master_weight_dtype: Any = torch.float32,
                 exp_avg_dtype: Any = torch.float32, exp_avg_sq_dtype: Any = torch.float32, use_decoupled_grad: bool = False,
                 store_param_remainders: bool = False) -> None:  # fmt: skip
        super().__init__(
            params,
            {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bias_correction": bias_correction},
        )
        self.remainders = store_param_remainders
        self.dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype, "master_param": master_weight_dtype}
        self.scales: dict[Any, dict[str, Any]] = {}

    def has_remainder(self, p: Any, name: str) -> bool:
        return self.remainders and name == "master_param" and p.dtype == torch.bfloat16

    def get_unscaled_state(self, p: Any, name: str) -> Any:
        held = self.state[p][name]
        if self.has_remainder(p, name):
            return held
        return held.float() * self.scales[p][name] if held.dtype == torch.float16 else held.float()

    def set_scaled_state(self, p: Any, name: str, value: Any) -> None:
        if self.has_remainder(p, name):
            assert value.dtype == torch.int16
            self.state[p][name] = value.clone()
            return
        assert value.dtype == torch.float32
        scale = torch.ones(1)
        if self.dtypes[name] == torch.float16:
            scale = value.abs().amax().reshape(1) / (torch.finfo(torch.float16).max / 2) if value.numel() else scale
            value = value * torch.where(scale > 0, scale.reciprocal(), 0.0)
        self.scales.setdefault(p, {})[name] = scale
        self.state[p][name] = value.to(self.dtypes[name], copy=True)

    def initialize_state(self, p: Any, store_param_remainders: bool = False) -> None:
        for name in ("exp_avg", "exp_avg_sq"):
            self.set_scaled_state(p, name, torch.zeros(p.shape))
        master = (
            torch.zeros(p.shape, dtype=torch.int16) if self.has_remainder(p, "master_param") else p.detach().float()
        )
        self.set_scaled_state(p, "master_param", master)

    @torch.no_grad()
    def step(self, closure: Any = None, grad_scaler: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if not self.state[p]:
                    self.initialize_state(p)
                grad = getattr(p, "decoupled_grad", None)
                if grad is None:
                    continue
                grad, (b1, b2) = grad.float(), group["betas"]
                first, second = (self.get_unscaled_state(p, n) for n in ("exp_avg", "exp_avg_sq"))
                low = self.state[p]["master_param"]
                if low.dtype == torch.int16:
                    high = torch.where(low < 0, p.view(torch.int16) - 1, p.view(torch.int16)).to(torch.int32)
                    master = ((high << 16) | (low.to(torch.int32) & 0xFFFF)).view(torch.float32)
                else:
                    master = low.float()
                first, second = b1 * first + (1 - b1) * grad, b2 * second + (1 - b2) * grad * grad
                update = (
                    first / (1 - b1 ** group["step"]) / ((second / (1 - b2 ** group["step"])).sqrt() + group["eps"])
                )
                master = master - group["lr"] * (update + group["weight_decay"] * master)
                if low.dtype == torch.int16:
                    bits = master.contiguous().view(torch.int32)
                    low = (((bits & 0xFFFF) ^ 0x8000) - 0x8000).to(torch.int16)
                    p.copy_((((bits >> 16) + (low < 0)) & 0xFFFF).to(torch.int16).view(torch.bfloat16))
                    self.state[p]["master_param"] = low
                else:
                    p.copy_(master)
                    self.set_scaled_state(p, "master_param", master)
                self.set_scaled_state(p, "exp_avg", first)
                self.set_scaled_state(p, "exp_avg_sq", second)


def with_fused_adam(**how: Any) -> None:
    """Have Megatron-Core make its optimizers of `FusedAdam`, with these arguments of OptimizerConfig."""
    import megatron.core.optimizer as made
    import megatron.core.optimizer.distrib_optimizer as distributed
    import megatron.core.optimizer.optimizer_config as config

    for name in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.optimizers"):
        sys.modules.setdefault(name, ModuleType(name)).FusedAdam = FusedAdam  # type: ignore[attr-defined]
    made.Adam = distributed.Adam = FusedAdam
    made.USING_PYTORCH_OPTIMIZER, distributed.USING_TE_OPTIMIZER, distributed.HAVE_APEX_OR_TE = False, True, True
    made.is_te_min_version = config.is_te_min_version = lambda *a, **k: True
    how = {k: getattr(torch, v) if isinstance(v, str) else v for k, v in how.items()}
    made.OptimizerConfig = partial(config.OptimizerConfig, use_precision_aware_optimizer=True, **how)


def save(case: dict[str, Any]) -> None:
    """Train three steps, and save."""
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.models.gpt.gpt_model
    import megatron.core.optimizer  # noqa: F401  before TransformerEngine seems to be there

    sys.modules.pop("transformer_engine", None)
    with_fused_adam(**case["optimizer"])
    jobs.train_and_save(case)


if __name__ == "__main__":
    for each in json.loads(Path(sys.argv[1]).read_text()):
        save(each)
    leave()
