"""Ranks of Megatron-FSDP that train three steps and save as Megatron-LM does with `--ckpt-format fsdp_dtensor`. Run by test_megatron_fsdp.py
under torchrun:

    megatron_fsdp.py CASES.json    [{"folder": run to save in, "truth": file, "how": arguments of fixtures/megatron/jobs.Job, "gated": swiglu or
                                     not, "ddp": arguments of DistributedDataParallelConfig}, or without "how", "gated" and "ddp": a model of
                                     torch's modules under megatron_fsdp.fully_shard, saved with plain DCP, or with "load" for "folder" loaded from there
                                     after three steps]

Rank 0 writes the same list with "losses" of the three steps after the save and "groups", {name of a parameter: [its weight decay, its step]}, into
CASES.json. `truth` is gathered from the ranks' own buffers: model.NAME as the forward pass computes with it, master.NAME in fp32 where the weights are
bf16, optim.NAME.SLOT.

All that shards, gathers, reduces, names and saves is Megatron-Core's own code. Stand-ins: torch.cuda's streams and device are answered for by the
CPU, gloo is NCCL (so that gradients are divided before they are summed: gradient_reduce_div_fusion=False), and `FusedAdam` is
TransformerEngine's. The calls of `save` are those of save_checkpoint and preprocess_fsdp_dtensor_state_dict in Megatron-LM 0.16.1
(training/checkpointing.py), which megatron-core does not contain.
"""

import json
import os
import random
import re
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from fixtures.jobs import leave
from fixtures.megatron import jobs

jobs.on_cpu()
import numpy  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch import nn  # noqa: E402


class FusedAdam(torch.optim.AdamW):
    """torch's AdamW that keeps what TransformerEngine's does (pytorch/optimizers/fused_adam.py): moments of every parameter, an empty shard's, too,
    and the step in the param group. With torch's own, ranks disagree on what they save, and Megatron-FSDP stops in a collective."""

    def __init__(self, params: Any, adam_w_mode: bool = True, **how: Any) -> None:
        super().__init__(params, **how)

    def __setstate__(self, state: Any) -> None:
        torch.optim.Optimizer.__setstate__(self, state)  # AdamW's asks for the step of each parameter

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if not self.state[p]:
                    self.state[p].update({name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")})
                self.state[p]["step"] = torch.tensor(group["step"] - 1.0)
        super().step()
        for slots in self.state.values():
            del slots["step"]


class Stream:
    """A stream of a GPU, or an event on one: here all work is done when its call returns."""

    def wait_stream(self, other: Any) -> None: ...

    wait_event = wait_stream

    def wait(self) -> None: ...

    def record_event(self) -> Any:
        return self


class Torch(ModuleType):
    """torch, whose every device is the CPU."""

    device = staticmethod(lambda name: torch.device("cpu"))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def with_fsdp(gated: bool = True, **ddp: Any) -> None:
    """Have jobs.Job make Megatron-FSDP's modules and optimizers, as Megatron-LM's get_model does."""
    import megatron.core.distributed as made
    import megatron.core.optimizer as optimizers
    import megatron.core.transformer.transformer_config as config
    from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter
    from megatron.core.distributed.fsdp.src.megatron_fsdp import megatron_fsdp
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module

    class Wrapped(mcore_fsdp_adapter.FullyShardedDataParallel):
        def __init__(self, config: Any, ddp: Any, module: Any) -> None:
            module = Float16Module(config, module) if config.bf16 else module
            super().__init__(config, ddp, module, device=torch.device("cpu"))

    def configured(**how: Any) -> Any:
        return TransformerConfig(**how | {"gated_linear_unit": gated})  # which the package keeps

    cuda: Any = torch.cuda
    cuda.Stream = cuda.current_stream = lambda *a, **k: Stream()
    cuda.stream = lambda *a, **k: nullcontext()
    mesh: Any = torch.distributed.DeviceMesh
    mesh.from_group = staticmethod(partial(_on_cpu, mesh.from_group))
    megatron_fsdp.torch = Torch("torch")
    mcore_fsdp_adapter.TELinear = type(None)  # of which no module is
    made.DistributedDataParallel = Wrapped
    made.DistributedDataParallelConfig = partial(
        DistributedDataParallelConfig, use_megatron_fsdp=True, gradient_reduce_div_fusion=False, **ddp
    )
    config.TransformerConfig = configured
    optimizers.Adam, optimizers.USING_PYTORCH_OPTIMIZER = FusedAdam, False


def _on_cpu(from_group: Any, groups: Any, device_type: str, *a: Any, **k: Any) -> Any:
    return from_group(groups, "cpu", *a, **k)


def state(job: Any, gated: bool, experts: int) -> dict[str, Any]:
    """The state dict that Megatron-LM gives to torch.distributed.checkpoint.save."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import preprocess_state_dict_for_uneven_dtensor
    from megatron.core.transformer import fsdp_dtensor_checkpoint as fsdp
    from megatron.core.utils import unwrap_model

    module = unwrap_model(job.model)
    model = module.state_dict_for_save_checkpoint()
    optimizer = job.optimizer.sharded_state_dict({}, metadata={"distrib_optim_sharding_type": "fsdp_dtensor"})
    fsdp.handle_fp8_extra_state_case(model)
    if gated:
        model, optimizer = fsdp.handle_swiglu_in_state_dict(module, model, optimizer)
    if experts:
        model = fsdp.handle_experts_in_state_dict(model, experts)
    rng = {"random_rng_state": random.getstate(), "np_rng_state": numpy.random.get_state(),
           "torch_rng_state": torch.get_rng_state()[:64].clone(), "rng_tracker_states": {"model": torch.arange(8)}}  # fmt: skip
    place = f"({job.ps.get_pipeline_model_parallel_rank()}, {job.ps.get_tensor_model_parallel_rank()})"
    common = job.common(experts)
    common["args"].swiglu = gated
    return preprocess_state_dict_for_uneven_dtensor(
        {**common, "model": model, "optimizer": optimizer, "rng_state": {place: [rng]}}
    )


def name_in_file(job: Any, name: str) -> str:
    """The name in dist_checkpointing of a parameter on this rank; experts keep their number, that in the whole model."""
    name = name.replace("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")
    name = name.replace("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")
    if "local_experts" in name:
        head, _, rest = name.partition("local_experts.")
        number, _, rest = rest.partition(".")
        first = job.ps.get_expert_model_parallel_rank() * job.module.config.num_moe_experts // job.ep
        name = f"{head}local_experts.{int(number) + first}.{rest}"
    return name


def local(job: Any) -> dict[str, Any]:
    """jobs.Job.local of a job whose parameters are sharded: from the flat buffers of Megatron-FSDP, and not from the DTensors that it saves."""
    out: dict[str, Any] = {}
    buffers = job.model.param_and_grad_buffer
    for name, p in job.module.named_parameters():
        whole = p.orig_param
        group = buffers.parameter_groups[buffers.param_to_param_group[whole]]
        mine = getattr(p, "megatron_fsdp_slice", slice(0, whole.numel()))
        key = name_in_file(job, name)
        slots = {k: v.to_local() for k, v in job.optimizer.optimizer.state[p].items() if k != "step"}
        slots["param"] = p.to_local()
        if group.model_weight_buffer is not None:
            number = group.model_weight_buffer.param_idx[whole]
            slots["computed"] = group.model_weight_buffer.get_item(
                number, only_shard=mine.stop - mine.start < whole.numel()
            )
        dim = whole.partition_dim if getattr(whole, "tensor_model_parallel", False) else -1
        flat = {k: (mine.start, mine.stop, v.detach().clone().flatten()) for k, v in slots.items()}
        out[key] = torch.empty(whole.shape), dim, flat
    return out


def truth(job: Any) -> dict[str, Any]:
    """All tensors of the job, gathered; on every rank."""
    job.local = lambda: local(job)
    found = {k: t for k, t in jobs.truth(job).items() if not k.startswith("model.")}
    computed = {k: found.pop(k) for k in [k for k in found if k.endswith(".computed")]}
    for k in [k for k in found if k.startswith("master.")]:
        name = k.removeprefix("master.")
        found[f"model.{name}"] = computed.get(f"optim.{name}.computed", found[k])
        if found[f"model.{name}"].dtype == found[k].dtype:
            del found[k]
    return found


def save(case: dict[str, Any]) -> None:
    """Train three steps, save, and train three more."""
    with_fsdp(case["gated"], **case["ddp"])
    job = jobs.Job(**case["how"])
    for k in range(jobs.STEPS):
        job.step(k)
    run = Path(case["folder"])
    tree = state(job, case["gated"], case["how"].get("experts", 0))
    dcp.save(tree, checkpoint_id=run / f"iter_{jobs.STEPS:07d}")
    write(truth(job), case["truth"])
    (run / "latest_checkpointed_iteration.txt").write_text(str(jobs.STEPS))
    names = {p: name_in_file(job, name) for name, p in job.module.named_parameters()}
    case["groups"] = {
        re.sub(r"local_experts\.\d+", "experts", names[p]): [g["weight_decay"], g["step"]]
        for g in job.optimizer.param_groups
        for p in g["params"]
    }
    case["scheduler"] = job.scheduler.state_dict()
    case["losses"] = [job.step(k) for k in range(jobs.STEPS, 2 * jobs.STEPS)]


def save_or_load_standalone(case: dict[str, Any]) -> None:
    """Train a model of torch's modules three steps under megatron_fsdp.fully_shard, and save or load as its README does; but for the hook with
    which 0.16.1 prepares the optimizer's state dict, which returns the one of before the first step, without any moments."""
    from megatron.core.distributed.fsdp.src import megatron_fsdp
    from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import preprocess_state_dict_for_uneven_dtensor

    with_fsdp()
    sys.modules[megatron_fsdp.fully_shard.__module__].DistributedDataParallelConfig = sys.modules[  # type: ignore[attr-defined]
        "megatron.core.distributed"
    ].DistributedDataParallelConfig
    torch.manual_seed(1)
    blocks = [nn.TransformerEncoderLayer(16, 2, 40, dropout=0.0, batch_first=True) for _ in range(2)]
    net = nn.Sequential(nn.Embedding(jobs.VOCAB, 16), *blocks, nn.Linear(16, jobs.VOCAB)).bfloat16()
    model, optimizer = megatron_fsdp.fully_shard(
        net, FusedAdam(net.parameters(), lr=1e-2), fsdp_unit_modules=[nn.TransformerEncoderLayer], device=torch.device("cpu"),
        device_mesh=dist.init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("fsdp", "tp")),
        dp_shard_dim="fsdp", tp_dim="tp", preproc_state_dict_for_dcp_ckpt=False,
    )  # fmt: skip
    for k in range(jobs.STEPS):
        x = torch.randint(0, jobs.VOCAB, (4, 8), generator=torch.Generator().manual_seed(8 * k + dist.get_rank()))
        nn.functional.cross_entropy(model(x).float().flatten(0, 1), x.roll(-1, 1).flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    tree = preprocess_state_dict_for_uneven_dtensor({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    if "load" in case:
        dcp.load(tree, checkpoint_id=case["load"])
        model.load_state_dict(tree["model"])
        optimizer.load_state_dict(tree["optimizer"])
    else:
        dcp.save(tree, checkpoint_id=case["folder"])
    ranks = SimpleNamespace(get_tensor_model_parallel_rank=lambda: 0)
    job = SimpleNamespace(model=model, module=net, optimizer=SimpleNamespace(optimizer=optimizer), ps=ranks)
    write(truth(job), case["truth"])


def write(found: dict[str, Any], file: str) -> None:
    if dist.get_rank() == 0:
        save_file({k: t.contiguous() for k, t in found.items()}, file)


if __name__ == "__main__":
    cases = json.loads(Path(sys.argv[1]).read_text())
    dist.init_process_group("gloo")
    for each in cases:
        save(each) if "how" in each else save_or_load_standalone(each)
    if int(os.environ["RANK"]) == 0:
        Path(sys.argv[1]).write_text(json.dumps(cases))
    leave()
