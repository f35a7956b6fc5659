"""Folders of Megatron-Core's dist_checkpointing (fixtures/megatron, which megatron-core 0.16.1 and 0.12.0 wrote) against the tensors of
the live jobs."""

from __future__ import annotations

import argparse
import io
import json
import pickle
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from commands import ckpttool_here
from peers import FIXTURES, difference, load_dcp, load_full, load_hf
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex, TensorStorageMetadata

import ckpttool
from ckpttool.errors import Corrupt, Unsupported

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
MEGATRON = FIXTURES / "megatron"
CASES = sorted(p.parent.name for p in MEGATRON.glob("*/job.json"))


def folder(case: str) -> Path:
    return MEGATRON / case / "ckpt" / "iter_0000003"


def job(case: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((MEGATRON / case / "job.json").read_text())
    return found


def truth(case: str) -> dict[str, Tensor]:
    return load_file(MEGATRON / case / "truth.safetensors")


def named(tree: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of a converted state, under the names of truth.safetensors."""
    out = {f"model.{k}": t for k, t in tree["model"].items()}
    for name, slots in tree["optim"]["state"].items():
        out |= {f"optim.{name}.{slot}": t for slot, t in slots.items() if slot != "step"}
    return out | {f"master.{k}": t for k, t in tree["extra"]["master"].items()}


@pytest.mark.parametrize("case", CASES)
def test_a_state_is_that_of_the_live_job_bit_for_bit(case: str, tmp_path: Path) -> None:
    done = ckpttool.convert(folder(case), tmp_path / "out", to="dcp", world_size=3)
    assert done.verified and not done.dropped
    tree = load_dcp(tmp_path / "out")
    assert difference(named(tree), truth(case)) == []
    assert tree["trainer"] == {"iteration": 3} and tree["scheduler"]["num_steps"] == 36
    assert {float(slots["step"]) for slots in tree["optim"]["state"].values()} == {3.0}
    how = job(case)["how"]
    assert len(tree["rng"]) == how.get("tp", 1) * how.get("pp", 1)
    if case == "verl":  # which does not save them
        return
    args = tree["extra"]["args"]
    assert args["padded_vocab_size"] >= 131
    assert args["attention_backend"] == {"class": "megatron.core.transformer.enums.AttnBackend", "value": 5}


def hub_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a Llama or Mixtral with 4 heads in 2 groups, cut as Megatron joins them: [q, q, k, v] of each group, [gate, up]."""
    out = {"model.norm.weight": state["decoder.final_layernorm.weight"]}
    out["model.embed_tokens.weight"] = state["embedding.word_embeddings.weight"][:131]
    out["lm_head.weight"] = state["output_layer.weight"][:131]
    norms = {"self_attention.linear_qkv.": "input_layernorm", "mlp.linear_fc1.": "post_attention_layernorm"}
    for i in range(2):
        ours, theirs = f"decoder.layers.{i}.", f"model.layers.{i}."
        for name, norm in norms.items():
            out[f"{theirs}{norm}.weight"] = state[f"{ours}{name}layer_norm_weight"]
        groups = state[f"{ours}self_attention.linear_qkv.weight"].reshape(2, 4, 6, 16)
        out[f"{theirs}self_attn.q_proj.weight"] = groups[:, :2].reshape(24, 16)
        out[f"{theirs}self_attn.k_proj.weight"] = groups[:, 2].reshape(12, 16)
        out[f"{theirs}self_attn.v_proj.weight"] = groups[:, 3].reshape(12, 16)
        out[f"{theirs}self_attn.o_proj.weight"] = state[f"{ours}self_attention.linear_proj.weight"]
        if f"{ours}mlp.router.weight" not in state:
            gate, up = state[f"{ours}mlp.linear_fc1.weight"].chunk(2)
            parts = {"gate_proj": gate, "up_proj": up, "down_proj": state[f"{ours}mlp.linear_fc2.weight"]}
            out |= {f"{theirs}mlp.{n}.weight": t for n, t in parts.items()}
            continue
        moe = f"{theirs}block_sparse_moe."
        out[f"{moe}gate.weight"] = state[f"{ours}mlp.router.weight"]
        both, downs = (state[f"{ours}mlp.experts.experts.linear_{n}.weight"] for n in ("fc1", "fc2"))
        for e in range(4):
            gate, up = both[e].chunk(2)
            out |= {
                f"{moe}experts.{e}.{n}.weight": t for n, t in zip(("w1", "w3", "w2"), (gate, up, downs[e]), strict=True)
            }
    return out


@pytest.mark.parametrize("case", CASES)
def test_to_hf_has_the_weights_of_every_variant(case: str, tmp_path: Path) -> None:
    state = {n.removeprefix("model."): t for n, t in truth(case).items() if n.startswith("model.")}
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 6, "intermediate_size": 20, "vocab_size": 131, "tie_word_embeddings": False,
    }  # fmt: skip
    if "decoder.layers.0.mlp.router.weight" in state:
        config |= {
            "model_type": "mixtral",
            "architectures": ["MixtralForCausalLM"],
            "intermediate_size": 8,
            "num_local_experts": 4,
        }
    (tmp_path / "config.json").write_text(json.dumps(config))
    ckpttool.convert(folder(case), tmp_path / "hf", to="hf", config=str(tmp_path))
    found = load_hf(tmp_path / "hf")
    assert difference(found, {n: t.contiguous() for n, t in hub_names(state).items()}) == []


@pytest.mark.parametrize("case", ["tp2_pp2", "flat_ranges", "buckets_tp2"])
def test_names_shapes_and_groups_are_known_before_a_tensor_is_read(case: str) -> None:
    with ckpttool.open(folder(case)) as opened:
        shapes = {n: opened[n].shape for n in opened if n.startswith("model.")}  # buckets are looked into for that
        assert shapes == {n: tuple(t.shape) for n, t in truth(case).items() if n.startswith("model.")}
        groups = [opened.checkpoint.value(f"optim.param_groups.{i}.params") for i in range(2)]
    assert all(n.endswith(("norm.weight", "norm_weight")) for n in groups[1])
    assert sorted(groups[0] + groups[1]) == sorted(n.removeprefix("model.") for n in shapes)


def test_what_the_param_groups_hold_is_a_rule_of_megatron_and_said(tmp_path: Path) -> None:
    done = ckpttool.convert(folder("moe"), tmp_path / "out.pt", to="full")
    assert any("saves no parameters of its param groups" in n for n in done.notes)
    groups = load_full(tmp_path / "out.pt")["optim"]["param_groups"]
    assert [g["wd_mult"] for g in groups] == [1.0, 0.0] and groups[0]["betas"] == (0.9, 0.999)


@pytest.mark.parametrize(
    "said", [{"apply_wd_to_qk_layernorm": True}, {"no_weight_decay_cond_type": "apply_wd_to_qk_layernorm"}, {}]
)
@pytest.mark.parametrize("through", ["", "dcp"])
def test_norms_of_queries_and_keys_are_in_the_group_that_the_arguments_say(
    said: dict[str, object], through: str, tmp_path: Path
) -> None:
    """The groups are those of Megatron-Core's own function for these arguments."""
    pytest.importorskip("megatron.core", reason="megatron-core is installed by `make test`", exc_type=ImportError)
    from megatron.core.optimizer import OptimizerConfig, get_standard_config_overrides

    model = {NORM: torch.randn(4), FC2: torch.randn(4, 6)}
    model |= {f"decoder.layers.0.self_attention.{x}_layernorm.weight": torch.randn(4) for x in "qk"}
    model |= {
        f"decoder.layers.0.self_attention.linear_proj.{x}": torch.randn(*shape)
        for x, shape in (("weight", (4, 4)), ("bias", (4,)))
    }
    rules = get_standard_config_overrides(OptimizerConfig(apply_wd_to_qk_layernorm=bool(said)))
    bare = {n for n, t in model.items() if any(key.matches(torch.nn.Parameter(t), n) for key in rules)}
    assert NORM in bare and len(bare) == (2 if said else 4)
    groups = [
        {"lr": 0.1, "weight_decay": 0.1 * m, "wd_mult": m, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False, "step": 3}
        for m in (1.0, 0.0)
    ]  # fmt: skip
    source = tmp_path / "iter_0000003"
    tree = {
        **model,
        **{f"optimizer.state.{s}.{n}": torch.rand_like(t) for n, t in model.items() for s in ("exp_avg", "exp_avg_sq")},
    }
    dcp.save(tree, checkpoint_id=source, no_dist=True)
    (source / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    optimizer = {"optimizer": {"param_groups": groups}, "param_state_sharding_type": "fully_reshardable"}
    common = {
        "args": argparse.Namespace(num_layers=1, **said),
        "checkpoint_version": 3.0,
        "iteration": 3,
        "optimizer": optimizer,
    }
    torch.save(common, source / "common.pt")
    before: Path = source
    if through:
        before = tmp_path / through
        ckpttool.convert(source, before, to=through, world_size=2)
    done = ckpttool.convert(before, tmp_path / "out", to="megatron", world_size=2)
    assert done.verified and not done.dropped
    for path in (source, before, tmp_path / "out"):
        with ckpttool.open(path) as opened:
            found = {v.group: set(v.data) for v in opened.checkpoint.values.values() if v.option == "params"}
        assert found == {0: model.keys() - bare, 1: bare}
    if said:
        with pytest.raises(Unsupported, match=r"A job with apply_wd_to_qk_layernorm does not, .*'extra'\] keeps it"):
            ckpttool.convert(before, tmp_path / "alone", to="megatron", world_size=2, only=["model", "optim"])


def test_inspect_names_the_trainer_and_what_to_do_next() -> None:
    done = ckpttool_here("inspect", str(folder("tp2_pp2")))
    out = " ".join(done.stdout.split())
    assert done.returncode == 0
    assert "Megatron-Core" in out and "step 3" in out and "--to dcp -n RANKS" in out
    assert "not read" not in out


def test_inspect_does_not_take_buckets_for_no_state() -> None:
    """Whose parameters only their bytes tell, which inspect does not read."""
    said = ckpttool_here("inspect", folder("buckets_dp3"), "--fits", "8x80GB").stdout
    assert "optimizer unknown, state in 2 tensors of several parameters, which inspect does not take apart" in said
    assert "the optimizer's tensors are not by parameter: AdamW" in " ".join(said.split())
    found = ckpttool.inspect(folder("tp2_pp2")).optimizer
    assert found is not None and found["unassigned"] == 0


def test_weights_alone_need_no_proof_of_the_optimizer(tmp_path: Path) -> None:
    ckpttool.convert(folder("buckets_dp3"), tmp_path / "out.pt", to="full", only=["model"])
    found = {f"model.{k}": t for k, t in load_full(tmp_path / "out.pt")["model"].items()}
    assert difference(found, {k: t for k, t in truth("buckets_dp3").items() if k.startswith("model.")}) == []


def test_the_moments_alone_are_found_by_the_weights(tmp_path: Path) -> None:
    ckpttool.convert(folder("buckets_tp2"), tmp_path / "out.pt", to="full", only=["optim"])
    tree = load_full(tmp_path / "out.pt")
    assert set(tree) == {"optim"}
    found = {
        f"optim.{n}.{s}": t for n, slots in tree["optim"]["state"].items() for s, t in slots.items() if s != "step"
    }
    assert difference(found, {k: t for k, t in truth("buckets_tp2").items() if k.startswith("optim.")}) == []


@pytest.mark.parametrize("only", [None, ["optim"], ["model", "optim"]])
def test_param_groups_beside_buckets_follow_the_arguments_that_only_leaves_out(
    only: list[str] | None, tmp_path: Path
) -> None:
    step, old = tmp_path / "a", "decoder.layers.0.mlp.linear_fc1.layer_norm_weight"
    new = "decoder.layers.0.self_attention.q_layernorm.weight"
    shutil.copytree(folder("buckets_dp3"), step)
    stored = FileSystemReader(step).read_metadata()
    stored.state_dict_metadata = {new if k == old else k: x for k, x in stored.state_dict_metadata.items()}
    stored.storage_data = {
        MetadataIndex(new, k.offset, k.index) if k.fqn == old else k: x for k, x in stored.storage_data.items()
    }
    with (step / ".metadata").open("wb") as f:
        pickle.dump(stored, f)
    common = common_of(step)
    common["args"].apply_wd_to_qk_layernorm = True
    torch.save(common, step / "common.pt")
    ckpttool.convert(step, tmp_path / "out.pt", to="full", only=only)
    tree = load_full(tmp_path / "out.pt")
    assert [g["wd_mult"] for g in tree["optim"]["param_groups"] if new in g["params"]] == [1.0]
    assert only is None or "extra" not in tree


def altered(case: str, to: Path, changes: dict[str, Callable[[Tensor], Tensor]]) -> Path:
    """A copy of a checkpoint in which whole tensors are changed: read and written again by torch, item by item."""
    shutil.copytree(folder(case), to)
    stored = FileSystemReader(to).read_metadata()
    whole: dict[str, Tensor] = {}
    for k in changes:
        found = stored.state_dict_metadata[k]
        assert isinstance(found, TensorStorageMetadata)
        whole[k] = torch.empty(found.size, dtype=found.properties.dtype)
    dcp.load(whole, checkpoint_id=to, no_dist=True)
    whole = {k: changes[k](t) for k, t in whole.items()}
    for index, info in stored.storage_data.items():
        if index.fqn in changes:
            path = to / info.relative_path
            data = bytearray(path.read_bytes())
            old = torch.load(io.BytesIO(bytes(data[info.offset : info.offset + info.length])))
            box = tuple(slice(a, a + n) for a, n in zip(index.offset, old.shape, strict=True))
            new = io.BytesIO()
            torch.save(whole[index.fqn][box].clone(), new)
            assert len(new.getvalue()) == info.length
            data[info.offset : info.offset + info.length] = new.getvalue()
            path.write_bytes(data)
    return to


PARAM = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.param"


def test_a_segment_that_rounds_to_no_weight_is_refused(tmp_path: Path) -> None:
    def one_more(t: Tensor) -> Tensor:
        t[5] *= 1.5
        return t

    source = altered("buckets_dp3", tmp_path / "source", {PARAM: one_more})
    with pytest.raises(Unsupported, match="is not a weight of the model") as e:
        ckpttool.convert(source, tmp_path / "out.pt", to="full")
    assert PARAM.removesuffix(".param") in str(e.value) and "fully_reshardable" in str(e.value)
    ckpttool.convert(source, tmp_path / "out.pt", to="full", only=["model"])


def test_norms_that_are_still_ones_are_told_apart_by_their_neighbours(tmp_path: Path) -> None:
    weights = truth("buckets_ones")
    ones = [n for n in weights if n.startswith("model.") and weights[n].dim() == 1 and bool((weights[n] == 1).all())]
    assert len(ones) == 5  # two of each layer and the last
    done = ckpttool.convert(folder("buckets_ones"), tmp_path / "out.pt", to="full")
    assert any("order of the model" in n for n in done.notes)
    assert difference(named(load_full(tmp_path / "out.pt")), weights) == []


def test_equal_weights_that_could_be_exchanged_are_refused_by_name(tmp_path: Path) -> None:
    """All norms are ones, and what lies between the two norms of a layer is equal to that of the other layer: then their order in
    the buffer would be a guess."""
    live = truth("buckets_ones")
    changes: dict[str, Callable[[Tensor], Tensor]] = {}
    pairs = []
    for rest in ("self_attention.linear_proj.weight", "self_attention.linear_qkv.weight"):
        first, second = (f"decoder.layers.{i}.{rest}" for i in range(2))
        changes[second] = lambda t, x=live[f"model.{first}"]: x.clone()
        pairs.append((live[f"master.{first}"].flatten(), live[f"master.{second}"].flatten()))

    def segments(t: Tensor) -> Tensor:
        for first, second in pairs:
            at = next(k for k in range(0, len(t), 64) if torch.equal(t[k : k + len(second)], second))
            t[at : at + len(first)] = first
        return t

    source = altered("buckets_ones", tmp_path / "source", {**changes, PARAM: segments})
    with pytest.raises(Unsupported, match="fits several weights that are equal") as e:
        ckpttool.convert(source, tmp_path / "out.pt", to="full")
    assert "layer_norm_weight" in str(e.value)


@pytest.mark.parametrize("to", ["zero3", "zero1", "universal", "fsdp1"])
def test_engines_with_flat_tensors_get_the_masters_as_their_weights(to: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"wrap": ["**.layers.*"]} if to == "fsdp1" else {}
    world = {} if to == "universal" else {"world_size": 3}
    done = ckpttool.convert(folder("stacked_pp2_bf16"), tmp_path / "there", to=to, **world, **options)
    ckpttool.convert(tmp_path / "there", tmp_path / "back.pt", to="full")
    live = truth("stacked_pp2_bf16")
    wanted = {k: t for k, t in live.items() if k.startswith("optim.")}
    wanted |= {k.replace("master.", "model.", 1): t for k, t in live.items() if k.startswith("master.")}
    tree = load_full(tmp_path / "back.pt")
    assert "master" not in tree["extra"]
    tree["extra"]["master"] = {}
    assert difference(named(tree), wanted) == []
    count = sum(k.startswith("master.") for k in live)
    said = f"{count} fp32 masters (extra.master) are the weights of the result, as its engine keeps them; the bfloat16 weights"
    assert any(n.startswith(said) for n in done.notes)
    if to == "zero1":  # whose files have what the engine computes with, too
        low = torch.load(next((tmp_path / "there").glob("*/mp_rank_00_model_states.pt")), weights_only=False)["module"]
        rounded = {k.removeprefix("model."): t for k, t in live.items() if k.startswith("model.")}
        assert difference({k: t for k, t in low.items()}, rounded) == []


def test_masters_that_only_leaves_out_are_named(tmp_path: Path) -> None:
    source = folder("stacked_pp2_bf16")
    done = ckpttool.convert(source, tmp_path / "out", to="zero1", world_size=1, only=["model", "optim"], drop=True)
    assert any(
        "fp32 masters (extra.master) are left out" in n and "extra" in n.rsplit("only", 1)[1] for n in done.notes
    )
    with ckpttool.open(source, only=["model"]) as weights:
        assert not any("masters" in n for n in weights.checkpoint.notes)


@pytest.mark.parametrize("to", ["zero3", "zero1", "universal", "fsdp1"])
def test_masters_that_do_not_round_to_their_weights_are_not_put_in_their_place(to: str, tmp_path: Path) -> None:
    def two_more(t: Tensor) -> Tensor:
        t.view(-1)[[3, 7]] += 1
        return t

    source = altered("stacked_pp2_bf16", tmp_path / "source", {"decoder.final_layernorm.weight": two_more})
    world = {} if to == "universal" else {"world_size": 2}
    said = r'1 of \d+ fp32 masters do not round .* "model.decoder.final_layernorm.weight": 2 of 16 elements'
    with pytest.raises(Corrupt, match=said):  # a sample shows it
        ckpttool.convert(source, tmp_path / "there", to=to, **world)
    with pytest.raises(Unsupported, match=said):  # the engine's weights would not be those of the source
        ckpttool.convert(source, tmp_path / "there", to=to, allow_mixed_steps=True, **world)
    assert not (tmp_path / "there").exists()
    ckpttool.convert(source, tmp_path / "weights", to=to, only=["model"], **world)


# ---------------------------------------------------------------------------------------------------------- writing


def common_of(path: Path) -> dict[str, Any]:
    """common.pt, as Megatron-Core loads it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("megatron.core", exc_type=ImportError)  # whose enumerations the arguments hold
        found: dict[str, Any] = torch.load(path / "common.pt", weights_only=False)
    return found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("through", ["", "full", "dcp"])
def test_what_is_written_is_read_as_the_same_state(case: str, through: str, tmp_path: Path) -> None:
    source: Path = folder(case)
    if through:
        source = tmp_path / ("there.pt" if through == "full" else "there")
        ckpttool.convert(folder(case), source, to=through, world_size=2 if through == "dcp" else None)
    done = ckpttool.convert(source, tmp_path / "out", to="megatron", world_size=3)
    assert done.verified and not done.dropped
    found = ckpttool.diff(folder(case), tmp_path / "out")
    if case == "plain_optimizer":  # which has its step as a tensor
        assert all(n.endswith(".step") for n in [*found.only_in_a, *found.only_in_b, *found.values])
        assert not found.data and not found.shapes
    else:
        assert found.equal, found
    assert json.loads((tmp_path / "out" / "metadata.json").read_text())["sharded_backend"] == "torch_dist"
    common = common_of(tmp_path / "out")
    assert case == "verl" or common["args"].num_layers == 2
    assert common["iteration"] == 3 and common["checkpoint_version"] == 3.0
    assert common["content_metadata"]["distrib_optim_sharding_type"] == "fully_reshardable"
    assert [g["wd_mult"] for g in common["optimizer"]["optimizer"]["param_groups"]] == [1.0, 0.0]
    assert {g["step"] for g in common["optimizer"]["optimizer"]["param_groups"]} == {3.0}


def test_param_groups_have_what_a_fused_adam_needs_and_are_read_as_they_were(tmp_path: Path) -> None:
    """That of Transformer Engine needs a GPU. It reads bias_correction, and hands the step to a kernel that takes integers alone."""
    ckpttool.convert(folder("moe"), tmp_path / "out", to="megatron", world_size=2)
    common = common_of(tmp_path / "out")
    groups = common["optimizer"]["optimizer"]["param_groups"]
    assert [(type(g["step"]), g["step"], g["bias_correction"]) for g in groups] == [(int, 3, True)] * 2
    name = "optim.param_groups.1.bias_correction"
    with ckpttool.open(tmp_path / "out") as opened:
        steps = {v.data for v in opened.checkpoint.values.values() if v.path[-1] == "step"}
        assert {type(x) for x in steps} == {float} and name not in opened.checkpoint.values
    assert ckpttool.diff(folder("moe"), tmp_path / "out").equal
    # in the save of the job that resumed from it they are state
    before = common.pop("ckpttool")
    torch.save(common, tmp_path / "out" / "common.pt")
    (tmp_path / "out" / "ckpttool.json").unlink()
    with ckpttool.open(tmp_path / "out") as opened:
        assert opened.checkpoint.value("optim.param_groups.0.step") == 3 and opened.checkpoint.value(name) is True
    ckpttool.convert(tmp_path / "out", tmp_path / "again", to="megatron", world_size=1)
    assert "ckpttool" not in common_of(tmp_path / "again")
    assert ckpttool.diff(tmp_path / "out", tmp_path / "again").equal
    for wrong in ([], {"param_groups": [{}]}, {"param_groups": {2: {}}}, {"param_groups": {0: 1}}):
        torch.save({**common, "ckpttool": {**before, "optim": wrong}}, tmp_path / "out" / "common.pt")
        with pytest.raises(Corrupt, match="its entry ckpttool is not what ckpttool writes"):
            ckpttool.open(tmp_path / "out")


def other_trainer(
    path: Path,
    groups: list[dict[str, Any]],
    steps: tuple[float, float] = (3.0, 3.0),
    slots: tuple[str, ...] = ("exp_avg", "exp_avg_sq"),
) -> Path:
    """A state of torch's AdamW without fp32 copies, under names of Megatron-Core."""
    names = ("decoder.layers.0.mlp.linear_fc2.weight", "decoder.final_layernorm.weight")
    model = {names[0]: torch.randn(4, 6), names[1]: torch.randn(4)}
    state = {
        n: {"step": torch.tensor(s), **{k: torch.rand_like(model[n]) for k in slots}}
        for n, s in zip(names, steps, strict=True)
    }
    torch.save(
        {"model": model, "optim": {"state": state, "param_groups": groups}, "step": 3, "rng": {"torch": torch.ones(3)}},
        path,
    )
    return path


FC2, NORM = "decoder.layers.0.mlp.linear_fc2.weight", "decoder.final_layernorm.weight"


def test_a_state_of_another_trainer_gets_what_megatron_needs(tmp_path: Path) -> None:
    source = other_trainer(tmp_path / "a.pt", [{"lr": 0.5, "weight_decay": 0.1, "params": [FC2, NORM]}])
    with pytest.raises(Unsupported, match="no place for such a tensor"):
        ckpttool.convert(source, tmp_path / "out", to="megatron", world_size=2)
    done = ckpttool.convert(source, tmp_path / "out", to="megatron", world_size=2, drop=True)
    assert [name for name, *_ in done.dropped] == ["rng.torch"]
    assert any("written twice" in n for n in done.notes)
    assert any("have weight decay in the source" in n for n in done.notes)
    common = common_of(tmp_path / "out")
    assert common["iteration"] == 3 and common["checkpoint_version"] == 3.0
    first, second = common["optimizer"]["optimizer"]["param_groups"]
    assert (first["weight_decay"], first["wd_mult"], first["lr"], first["step"]) == (0.1, 1.0, 0.5, 3.0)
    assert (second["weight_decay"], second["wd_mult"], second["is_expert_parallel"]) == (0.0, 0.0, False)
    with ckpttool.open(tmp_path / "out") as opened:
        assert torch.equal(torch.from_numpy(opened[f"extra.master.{FC2}"][:]), torch.load(source)["model"][FC2])
        assert opened.checkpoint.value("trainer.step") == 3


@pytest.mark.parametrize("lacking", [False, True])
def test_a_group_of_a_fused_adam_that_counts_in_the_state_has_the_step_of_its_parameters(
    lacking: bool, tmp_path: Path
) -> None:
    """That of DeepSpeed puts `step: 0` into a group and never counts there (ops/adam/fused_adam.py)."""
    group = {"lr": 0.5, "weight_decay": 0.0, "betas": (0.9, 0.99), "eps": 1e-8, "bias_correction": True, "step": 0}
    state = torch.load(other_trainer(tmp_path / "a.pt", [group | {"params": [FC2, NORM]}]))
    del state["rng"]
    for slots in state["optim"]["state"].values():
        slots["step"] = 3
    if lacking:
        del state["optim"]["state"][NORM]["step"]
    torch.save(state, tmp_path / "b.pt")
    if lacking:
        with pytest.raises(Unsupported, match='the option "step" 0, and its parameters are at step 3'):
            ckpttool.convert(tmp_path / "b.pt", tmp_path / "out", to="megatron", world_size=2)
        return
    done = ckpttool.convert(tmp_path / "b.pt", tmp_path / "out", to="megatron", world_size=2)
    assert done.verified and "optim.param_groups.0.step" in done.changed and not done.dropped
    groups = common_of(tmp_path / "out")["optimizer"]["optimizer"]["param_groups"]
    assert [(type(g["step"]), g["step"]) for g in groups] == [(int, 3)] * 2
    with ckpttool.open(tmp_path / "out") as opened:
        assert opened.checkpoint.value(f"optim.state.{FC2}.step") == 3
    against = ckpttool.verify(tmp_path / "out", against=tmp_path / "b.pt", read_data=True).against
    assert against is not None and against["verdict"] == "equal"


def test_a_parameter_without_a_step_gets_that_of_its_group_and_it_is_listed(tmp_path: Path) -> None:
    group = {"lr": 0.5, "weight_decay": 0.0, "betas": (0.9, 0.99), "eps": 1e-8, "params": [FC2, NORM]}
    state = torch.load(other_trainer(tmp_path / "a.pt", [group]))
    del state["optim"]["state"][NORM]["step"]
    torch.save(state, tmp_path / "b.pt")
    done = ckpttool.convert(tmp_path / "b.pt", tmp_path / "out", to="megatron", world_size=2, drop=True)
    assert f"optim.state.{NORM}.step" in done.added and any(f"optim.state.{NORM}.step" in n for n in done.notes)


@pytest.mark.parametrize(
    ("groups", "steps", "why"),
    [
        ([{"lr": 0.5, "params": [FC2]}, {"lr": 0.1, "params": [NORM]}], (3.0, 3.0), "differ in 'lr'"),
        ([{"lr": 0.5, "params": [FC2, NORM]}], (3.0, 4.0), "at different steps"),
        (
            [{"lr": 0.5, "weight_decay": 0.1, "params": [FC2]}, {"lr": 0.5, "weight_decay": 0.2, "params": [NORM]}],
            (3.0, 3.0),
            "differ in 'weight_decay'",
        ),
        (
            [{"lr": 0.5, "weight_decay": 0.1, "params": [NORM]}, {"lr": 0.5, "weight_decay": 0.0, "params": [FC2]}],
            (3.0, 3.0),
            "would give it some",
        ),
        ([{"lr": 0.5, "wd_mult": 0.0, "params": [FC2, NORM]}], (3.0, 3.0), "is in a param group without weight decay"),
        ([{"lr": 0.5, "weight_decay": {}, "params": [FC2, NORM]}], (3.0, 3.0), "weight decay {}, which is no number"),
    ],
)
def test_an_optimizer_that_megatron_would_load_otherwise_is_refused(
    groups: list[dict[str, Any]], steps: tuple[float, float], why: str, tmp_path: Path
) -> None:
    source = other_trainer(tmp_path / "a.pt", groups, steps)
    with pytest.raises(Unsupported, match=why):
        ckpttool.convert(source, tmp_path / "out", to="megatron", world_size=2, drop=True)


@pytest.mark.parametrize("source", ["Megatron-Core", "OneCycleLR"])
def test_without_a_schedule_megatron_trains_on_at_the_rates_of_the_param_groups(source: str, tmp_path: Path) -> None:
    """As Megatron-Core's scheduler computes them, which asks each group for bounds of its own first."""
    pytest.importorskip("megatron.core", reason="megatron-core is installed by `make test`", exc_type=ImportError)
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    rate = 0.25
    if source == "OneCycleLR":
        group = {
            "lr": rate,
            "initial_lr": 0.1,
            "max_lr": 1.0,
            "min_lr": 1e-6,
            "weight_decay": 0.1,
            "params": [FC2, NORM],
        }
        path, more = other_trainer(tmp_path / "a.pt", [group]), {"drop": True}
    else:
        path, more = folder("moe"), {"reset": ["scheduler"], "set_values": {"optim.param_groups.*.lr": rate}}
    ckpttool.convert(path, tmp_path / "out", to="megatron", world_size=2, **more)
    common = common_of(tmp_path / "out")

    class Loaded:
        param_groups = common["optimizer"]["optimizer"]["param_groups"]

    wanted = [g["weight_decay"] for g in Loaded.param_groups]
    scheduler = OptimizerParamScheduler(
        Loaded, init_lr=0.0, max_lr=0.5, min_lr=0.05, lr_warmup_steps=0, lr_decay_steps=100, lr_decay_style="linear", start_wd=0.1,
        end_wd=0.1, wd_incr_steps=100, wd_incr_style="constant", use_checkpoint_opt_param_scheduler=True,
    )  # fmt: skip
    scheduler.load_state_dict(common["opt_param_scheduler"])
    for _ in range(3):
        assert [g["lr"] for g in Loaded.param_groups] == [rate, rate]
        scheduler.step(12)
        assert [g["weight_decay"] for g in Loaded.param_groups] == wanted


@pytest.mark.parametrize(
    "slots",
    [
        ("momentum_buffer",),
        ("exp_avg",),
        ("exp_avg", "exp_inf"),
        ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
        ("exp_avg", "exp_avg_diff", "exp_avg_sq"),
    ],
)
def test_state_that_megatron_loads_for_no_optimizer_is_refused(slots: tuple[str, ...], tmp_path: Path) -> None:
    """SGD, Lion, Adamax, amsgrad and Adan: DistributedOptimizer takes Adam's two moments alone, and SGD has no init_state_fn."""
    group = {"lr": 0.5, "weight_decay": 0.1, "params": [FC2, NORM]}
    source = other_trainer(tmp_path / "a.pt", [group], slots=slots)
    with pytest.raises(Unsupported, match=f"keeps {', '.join(slots)}.*and Megatron-Core loads exp_avg and exp_avg_sq"):
        ckpttool.convert(source, tmp_path / "out", to="megatron", world_size=2, drop=True)
    assert ckpttool.convert(source, tmp_path / "out", to="megatron", world_size=2, only=["model"]).verified


@pytest.mark.parametrize("option", ["max_coeff", "grad_averaging"])
def test_lamb_which_keeps_what_adam_keeps_is_refused_by_its_options(option: str, tmp_path: Path) -> None:
    source = other_trainer(tmp_path / "a.pt", [{"lr": 0.5, "weight_decay": 0.1, option: 10.0, "params": [FC2, NORM]}])
    with pytest.raises(Unsupported, match=f'option "{option}", which Lamb has'):
        ckpttool.convert(source, tmp_path / "out", to="megatron", world_size=2, drop=True)


def test_radam_which_keeps_what_adam_keeps_is_refused_by_the_option_that_it_lacks(tmp_path: Path) -> None:
    options = torch.optim.RAdam([torch.zeros(1)]).state_dict()["param_groups"][0]
    source = other_trainer(tmp_path / "a.pt", [{**options, "params": [FC2, NORM]}])
    with pytest.raises(Unsupported, match="torch's RAdam"):
        ckpttool.convert(source, tmp_path / "out", to="megatron", world_size=2, drop=True)
    adam = torch.optim.AdamW([torch.zeros(1)]).state_dict()["param_groups"][0]
    source = other_trainer(tmp_path / "b.pt", [{**adam, "params": [FC2, NORM]}])
    assert ckpttool.convert(source, tmp_path / "out", to="megatron", world_size=2, drop=True).verified


# ------------------------------------------------------------------------------------------------- folders of folders


def test_nemo_s_weights_and_context_are_the_same_state(tmp_path: Path) -> None:
    shutil.copytree(folder("tp2_pp2"), tmp_path / "step" / "weights")
    (tmp_path / "step" / "context").mkdir()
    (tmp_path / "step" / "context" / "model.yaml").write_text("_target_: nemo")
    assert ckpttool.diff(folder("tp2_pp2"), tmp_path / "step").equal


def test_verl_s_older_folder_is_the_same_state(tmp_path: Path) -> None:
    shutil.copytree(folder("tp2_pp2"), tmp_path / "actor" / "dist_ckpt")
    (tmp_path / "actor" / "huggingface").mkdir()
    assert ckpttool.diff(folder("tp2_pp2"), tmp_path / "actor").equal


def test_a_folder_of_verl_that_is_of_another_save_is_refused(tmp_path: Path) -> None:
    shutil.copytree(folder("verl"), tmp_path / "actor")
    shutil.copytree(tmp_path / "actor" / "model" / "dist_ckpt", tmp_path / "other")
    shutil.rmtree(tmp_path / "actor" / "extra" / "dist_ckpt")
    shutil.move(tmp_path / "other", tmp_path / "actor" / "extra" / "dist_ckpt")
    with pytest.raises(Corrupt, match="two keys mean"):
        ckpttool.convert(tmp_path / "actor", tmp_path / "out.pt", to="full")


def test_another_format_is_refused_by_its_name(tmp_path: Path) -> None:
    shutil.copytree(folder("tp2_pp2"), tmp_path / "a")
    (tmp_path / "a" / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(Unsupported, match="zarr"):
        ckpttool.open(tmp_path / "a")


#: What a copy that was cut off, or a tool that leaves small files out, makes of metadata.json; None: it is missing.
DAMAGED = [None, b"", b'{"sharded_backend": "torch_d', b"{}", b"[]", b"\0" * 40, b"not here"]


@pytest.mark.parametrize("text", DAMAGED)
@pytest.mark.parametrize("case", ["tp2_pp2", "verl"])
def test_a_folder_whose_metadata_json_is_not_whole_is_refused_and_no_plain_dcp(
    case: str, text: bytes | None, tmp_path: Path
) -> None:
    step = tmp_path / "iter_0000003"
    shutil.copytree(folder(case), step)
    name = step / ("optimizer/dist_ckpt" if case == "verl" else "") / "metadata.json"
    name.unlink() if text is None else name.write_bytes(text)
    for command in (["convert", step, tmp_path / "out", "--to", "full"], ["verify", step], ["inspect", step]):
        done = ckpttool_here(*command)
        assert done.returncode == Corrupt.exit_code, done
        assert "metadata.json" in done.stderr and "fetch that file" in done.stderr
    (step.parent / "latest_checkpointed_iteration.txt").write_text("3")  # by which a folder of Megatron-FSDP is known
    assert ckpttool_here("inspect", step).returncode == Corrupt.exit_code
    if (case, text) == ("tp2_pp2", None):
        assert "incomplete: no metadata.json" in ckpttool_here("inspect", tmp_path).stdout


@pytest.mark.parametrize("case", ["tp2_pp2", "stacked_pp2_bf16", "buckets_tp2", "flat_ranges"])
def test_what_a_lost_file_leaves_is_exact(case: str, tmp_path: Path) -> None:
    shutil.copytree(folder(case), tmp_path / "a")
    lost = sorted((tmp_path / "a").glob("__*.distcp"))[-1]
    lost.unlink()
    ckpttool.convert(tmp_path / "a", tmp_path / "out.pt", to="full", salvage=True)
    tree = load_full(tmp_path / "out.pt")
    tree["optim"], tree["extra"] = {"state": {}, **tree.get("optim", {})}, {"master": {}, **tree["extra"]}
    found, live = named(tree), truth(case)
    assert 0 < len(found) < len(live)
    assert difference(found, {k: t for k, t in live.items() if k in found}) == []


def fsdp_folder(run: Path) -> tuple[Path, dict[str, Tensor]]:
    """(a folder of Megatron-FSDP, the weights and moments that it stands for). Put together by hand with the names of its own saves, which
    live/test_megatron_fsdp.py has, and saved by torch."""
    gate, up, norm = torch.randn(5, 4), torch.randn(5, 4), torch.randn(4)
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    model = {f"module.{name}_w": gate, f"module.{name}_v": up, "module.decoder.final_layernorm.weight": norm}
    state = {
        f"module.module.{k}": {slot: torch.rand_like(t) for slot in ("exp_avg", "exp_avg_sq")} for k, t in model.items()
    }
    whole = {f"module.module.module.{name}": 1.0, "module.module.module.decoder.final_layernorm.weight": 0.0}
    meta = {k: {"lr": 0.1, "wd_mult": x, "lr_mult": 1.0, "step": 7} for k, x in whole.items()}
    optimizer = {"state": state, "param_to_group_meta": meta}
    tree = {
        "model": model,
        "optimizer": optimizer,
        "opt_param_scheduler": {"num_steps": 36},
        "iteration": 3,
        "checkpoint_version": 3.0,
    }
    dcp.save({**tree, "args": argparse.Namespace(num_layers=1)}, checkpoint_id=run / "iter_0000003", no_dist=True)
    (run / "latest_checkpointed_iteration.txt").write_text("3")
    wanted = {f"model.{name}": torch.cat([gate, up]), "model.decoder.final_layernorm.weight": norm}
    for slot in ("exp_avg", "exp_avg_sq"):
        halves = [state[f"module.module.module.{name}_{half}"][slot] for half in "wv"]
        wanted[f"optim.{name}.{slot}"] = torch.cat(halves)
        norms = state["module.module.module.decoder.final_layernorm.weight"]
        wanted[f"optim.decoder.final_layernorm.weight.{slot}"] = norms[slot]
    return run / "iter_0000003", wanted


@pytest.mark.parametrize("to", ["full", "dcp", "megatron"])
def test_halves_of_megatron_fsdp_are_one_tensor_again(to: str, tmp_path: Path) -> None:
    source, wanted = fsdp_folder(tmp_path / "run")
    done = ckpttool.convert(
        source, tmp_path / ("a.pt" if to == "full" else "a"), to=to, world_size=None if to == "full" else 2
    )
    assert done.verified and not done.dropped and any("_w and _v" in n for n in done.notes)
    out = tmp_path / "out.pt"
    ckpttool.convert(tmp_path / ("a.pt" if to == "full" else "a"), out, to="full")
    tree = load_full(out)
    tree["extra"].setdefault("master", {})
    found = named(tree)
    assert difference({k: t for k, t in found.items() if not k.startswith("master.")}, wanted) == []
    assert tree["scheduler"] == {"num_steps": 36} and tree["extra"]["args"] == {"num_layers": 1}
    groups = {g["wd_mult"]: g["params"] for g in tree["optim"]["param_groups"]}
    assert groups == {1.0: ["decoder.layers.0.mlp.linear_fc1.weight"], 0.0: ["decoder.final_layernorm.weight"]}
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 4, "num_attention_heads": 1}')
    two_tensors = ckpttool.HfOptions(allow_name_mismatch=True)  # are no whole model, which transformers would want
    ckpttool.convert(source, tmp_path / "hf", to="hf", config=str(tmp_path), map="megatron", options=two_tensors)
    gate, up = wanted["model.decoder.layers.0.mlp.linear_fc1.weight"].chunk(2)
    halves = {f"model.layers.0.mlp.{n}_proj.weight": t.contiguous() for n, t in (("gate", gate), ("up", up))}
    norm = {"model.norm.weight": wanted["model.decoder.final_layernorm.weight"]}
    assert difference(load_hf(tmp_path / "hf"), halves | norm) == []
    assert {s["step"] for s in tree["optim"]["state"].values()} == {7}


@pytest.mark.parametrize("name", ["linear_fc1.weight_w", "experts.linear_fc2.weight1"])
def test_half_of_a_gated_matrix_or_an_expert_that_is_missing_is_refused(name: str, tmp_path: Path) -> None:
    model = {f"module.decoder.layers.0.mlp.{name}": torch.ones(2, 3)}
    dcp.save({"model": model, "iteration": 3}, checkpoint_id=tmp_path / "iter_0000003", no_dist=True)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    with pytest.raises(Corrupt, match="one is missing"):
        ckpttool.open(tmp_path / "iter_0000003")


@pytest.mark.parametrize("key", ["lr", "step"])
def test_experts_with_different_hyperparameters_are_not_one_parameter(key: str, tmp_path: Path) -> None:
    names = [f"module.decoder.layers.0.mlp.experts.linear_fc2.weight{e}" for e in range(2)]
    meta = {f"module.module.{n}": {"lr": 0.1, "step": 7} | {key: e} for e, n in enumerate(names)}
    state = {f"module.module.{n}": {"exp_avg": torch.ones(2, 3)} for n in names}
    tree = {
        "model": {n: torch.ones(2, 3) for n in names},
        "optimizer": {"state": state, "param_to_group_meta": meta},
        "iteration": 3,
    }
    dcp.save(tree, checkpoint_id=tmp_path / "iter_0000003", no_dist=True)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    with pytest.raises(Unsupported, match=rf"has {key} 1, and another part of .* has 0: one parameter has one"):
        ckpttool.open(tmp_path / "iter_0000003")
    ckpttool.convert(tmp_path / "iter_0000003", tmp_path / "out.pt", to="full", only=["model"])


def test_a_dcp_folder_of_that_name_without_megatron_s_tracker_is_plain_dcp(tmp_path: Path) -> None:
    dcp.save({"model": {"w": torch.ones(2, 3)}}, checkpoint_id=tmp_path / "iter_0000003", no_dist=True)
    with ckpttool.open(tmp_path / "iter_0000003") as opened:
        assert opened.layout.name == "dcp"


@pytest.mark.parametrize("to", ["dcp", "full"])
def test_what_megatron_fsdp_v2_saved_is_plain_dcp(to: str, tmp_path: Path) -> None:
    """Of Megatron-LM's main branch: fixtures/megatron_fsdp_v2.py."""
    where = FIXTURES / "megatron_fsdp_v2"
    ckpttool.convert(where / "ckpt", tmp_path / "out", to=to, world_size=3 if to == "dcp" else None)
    for path in (where / "ckpt", tmp_path / "out"):
        with ckpttool.open(path) as found:
            assert difference({n: found[n].torch() for n in found}, load_file(where / "truth.safetensors")) == []


def add_item(path: Path, key: str, x: object) -> None:
    """Add the object of a rank to a folder."""
    item = io.BytesIO()
    torch.save([x], item)
    stored = FileSystemReader(path).read_metadata()
    name = f"__0_{90 + len(list(path.iterdir()))}.distcp"
    (path / name).write_bytes(item.getvalue())
    stored.state_dict_metadata[key] = BytesStorageMetadata()
    stored.storage_data[MetadataIndex(key)] = _StorageInfo(name, 0, len(item.getvalue()))
    with (path / ".metadata").open("wb") as f:
        pickle.dump(stored, f)


@pytest.mark.parametrize("case", ["tp2_pp2", "plain_optimizer"])
def test_a_common_state_that_is_an_item_is_that_of_common_pt(case: str, tmp_path: Path) -> None:
    """As versions behind 0.16.1 store it; put together by hand from what 0.16.1 wrote."""
    shutil.copytree(folder(case), tmp_path / "a")
    add_item(tmp_path / "a", "common_state/shard_0_1", common_of(tmp_path / "a"))
    (tmp_path / "a" / "common.pt").unlink()
    found = ckpttool.diff(folder(case), tmp_path / "a")
    assert found.equal, found
    (tmp_path / "a" / "metadata.json").unlink()
    with pytest.raises(Corrupt, match=r"metadata\.json is missing"):
        ckpttool.open(tmp_path / "a")


def scaler(scale: float, good: int) -> dict[str, object]:
    """The state of Megatron-Core's DynamicGradScaler."""
    return {"scale": torch.tensor([scale]), "growth_tracker": good, "hysteresis_tracker": 2}


@pytest.mark.parametrize("stored", ["common.pt", "item"])
@pytest.mark.parametrize("through", ["", "full", "zero3"])
def test_every_optimizer_of_a_chain_keeps_its_gradient_scaler(stored: str, through: str, tmp_path: Path) -> None:
    """Experts and the rest of a job in fp16 overflow at different steps, so their scales differ."""
    source = tmp_path / "a"
    shutil.copytree(folder("moe"), source)
    common = common_of(source)
    groups = common["optimizer"]["optimizer"]["param_groups"]
    chain = [groups, [{**groups[0], "is_expert_parallel": True}]]
    scalers = [scaler(65536.0, 3), scaler(32768.0, 4)]
    common["optimizer"] = {
        i: {**common["optimizer"], "optimizer": {"param_groups": g}, "grad_scaler": s}
        for i, (g, s) in enumerate(zip(chain, scalers, strict=True))
    }
    if stored == "item":
        (source / "common.pt").unlink()
        add_item(source, "common_state/shard_0_1", common)
    else:
        torch.save(common, source / "common.pt")
    before = source
    if through:
        before = tmp_path / ("there.pt" if through == "full" else "there")
        ckpttool.convert(source, before, to=through, world_size=2 if through == "zero3" else None)
    done = ckpttool.convert(before, tmp_path / "out", to="megatron", world_size=2)
    assert done.verified and not done.dropped
    found = [one["grad_scaler"] for one in common_of(tmp_path / "out")["optimizer"].values()]
    assert found == scalers
    assert ckpttool.diff(source, tmp_path / "out", only=["scaler"]).equal


@pytest.mark.parametrize(
    ("state", "loaded"),
    [
        (scaler(4096.0, 7), True),
        ({}, True),  # of a constant scale
        (torch.amp.GradScaler("cpu").state_dict() | {"scale": 4096.0, "_growth_tracker": 7}, False),
        ({"scale": torch.tensor([4096.0])}, False),
        ({**scaler(4096.0, 7), "scale": 4096.0}, False),
        ({"cur_scale": 4096.0, "dynamic": True, "cur_iter": 7}, False),  # DeepSpeed's
        (None, False),
    ],
)
def test_only_a_gradient_scaler_of_megatron_s_kind_is_one(state: Any, loaded: bool, tmp_path: Path) -> None:
    """Any other stops a job in fp16: `'float' object has no attribute 'cuda'`, KeyError 'hysteresis_tracker'."""
    source = other_trainer(tmp_path / "a.pt", [{"lr": 0.5, "params": [FC2, NORM]}])
    tree = torch.load(source)
    torch.save({k: x for k, x in tree.items() if k != "rng"} | {"scaler": state}, source)
    done = ckpttool.convert(source, tmp_path / "out", to="megatron", world_size=1)
    common = common_of(tmp_path / "out")
    if loaded:
        assert common["optimizer"]["grad_scaler"] == state
    else:
        assert "grad_scaler" not in common["optimizer"] and common["ckpttool"]["scaler"] == state
    assert any("starts with its initial loss scale" in n for n in done.notes) == (not loaded and state is not None)
    assert not done.dropped and ckpttool.diff(source, tmp_path / "out", only=["scaler"]).equal


def test_the_gradient_scaler_beside_buckets_is_that_of_the_optimizer(tmp_path: Path) -> None:
    """dp_reshardable, which saves one for each data-parallel group; those of a job with one optimizer are alike."""
    shutil.copytree(folder("buckets_tp2"), tmp_path / "a")
    for group in range(2):
        key = f"optimizer.distributed.dp_group_idx_{group}.grad_scaler/shard_0_1"
        add_item(tmp_path / "a", key, scaler(4096.0, 7))
    ckpttool.convert(tmp_path / "a", tmp_path / "out", to="megatron", world_size=2)
    assert common_of(tmp_path / "out")["optimizer"]["grad_scaler"] == scaler(4096.0, 7)
    key = "optimizer.distributed.dp_group_idx_1.grad_scaler/shard_0_1"
    add_item(tmp_path / "a", key, scaler(8192.0, 7))
    with pytest.raises(Corrupt, match=r'copies of 1 of \d+ tensors differ.*first is "scaler\.scale"'):
        ckpttool.verify(tmp_path / "a")
    add_item(tmp_path / "a", key, scaler(4096.0, 8))
    with pytest.raises(Unsupported, match="another gradient scaler"):
        ckpttool.open(tmp_path / "a")


@pytest.mark.parametrize("ranks", [False, True])
def test_a_job_asks_for_the_random_states_that_are_written_alone(ranks: bool, tmp_path: Path) -> None:
    """load_checkpoint asks for rng_state of Megatron-Core's ranks unless no_save_rng is set, and stops where there is none."""
    ckpttool.convert(folder("tp2_pp2"), tmp_path / "a.pt", only=["model", "optim", *(["rng"] if ranks else [])])
    tree = torch.load(tmp_path / "a.pt", weights_only=False)
    if not ranks:
        tree["rng"] = {"0": {"python": [3, 1.0]}}  # of another trainer
    torch.save(tree, tmp_path / "b.pt")
    (tmp_path / "config").mkdir()
    config = {
        "model_type": "llama",
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 131,
    }
    (tmp_path / "config" / "config.json").write_text(json.dumps(config))
    asked: dict[str, Any] = {"to": "megatron", "world_size": 1, "config": str(tmp_path / "config")}
    done = ckpttool.convert(tmp_path / "b.pt", tmp_path / "out", **asked)
    common = common_of(tmp_path / "out")
    assert common["args"].no_save_rng is not ranks
    # where consumed_train_samples is 0, Megatron-LM takes args.iteration * args.global_batch_size
    assert common["iteration"] == 0 and any("the data begins at its start" in n for n in done.notes)
    assert any("common.pt has iteration 0, since the source counts no steps" in n for n in done.notes)
    torch.save({**tree, "step": 3}, tmp_path / "c.pt")
    counted = ckpttool.convert(tmp_path / "c.pt", tmp_path / "counted", **asked)
    assert any("the data goes on at sample 3 x the job's" in n for n in counted.notes)
    with ckpttool.open(tmp_path / "out") as opened:
        kinds = {v.path[1] for v in opened.checkpoint.values.values() if v.path[0] == "rng"}
        kinds |= {t.path[1] for t in opened.checkpoint.tensors.values() if t.path[0] == "rng"}
    assert {str(k).startswith("shard_") for k in kinds} == {ranks}


def test_a_file_whose_lists_of_one_rank_no_job_can_merge_is_written_without_them(tmp_path: Path) -> None:
    """What Megatron-Core refuses with "Cannot merge two lists with different lengths", put together as such a version saves it."""
    shutil.copytree(folder("buckets_dp3"), tmp_path / "a")
    common = common_of(tmp_path / "a")
    lists = {0: {(torch.bfloat16, torch.float32): [[{"step": torch.tensor(3.0)}] * 7]}}
    common.setdefault("optimizer", {})["param_state"] = lists
    torch.save(common, tmp_path / "a" / "common.pt")
    done = ckpttool.convert(tmp_path / "a", tmp_path / "b", to="megatron", world_size=2)
    assert done.verified and not done.dropped
    assert "param_state" not in common_of(tmp_path / "b")["optimizer"]
    found = ckpttool.diff(folder("buckets_dp3"), tmp_path / "b")
    assert not (found.data or found.shapes or found.only_in_a) and all("param_state" in n for n in found.only_in_b)


def proving(said: list[tuple[str, int, int]]) -> list[tuple[int, int]]:
    """(bytes done, bytes in all) of what was read before the conversion."""
    stages = list(dict.fromkeys(what for what, _, _ in said))
    assert stages[0] == "prove", stages
    return [(done, total) for what, done, total in said if what == "prove"]


def test_the_proof_of_segments_reports_its_bytes(tmp_path: Path) -> None:
    said: list[tuple[str, int, int]] = []
    ckpttool.convert(folder("buckets_tp2"), tmp_path / "a.pt", progress=lambda *row: said.append(row))
    rows = proving(said)
    assert rows == sorted(rows) and rows[-1][0] == rows[-1][1]
    with ckpttool.open(folder("buckets_tp2")) as opened:
        held = opened.checkpoint.tensors.values()
        assert rows[-1][1] >= sum(t.nbytes for t in held if t.path[-1] == "param" or t.path[0] == "model")
    said.clear()
    ckpttool.convert(folder("tp2_pp2"), tmp_path / "b.pt", progress=lambda *row: said.append(row))
    assert not any(what == "prove" for what, _, _ in said)  # whose tensors have names


def test_a_long_proof_is_seen_on_stderr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1 << 30, 11))  # every block takes 11 s
    monkeypatch.setattr("ckpttool.cli.terminal.time.monotonic", lambda: next(clock))
    for words in (
        ["convert", "--to", "full"],
        ["convert", "--dry-run", "--to", "full"],
        ["digest"],
        ["inspect", "--tensor", "*"],
    ):
        out = [str(tmp_path / f"{len(words)}.pt")] if words[0] == "convert" else []
        done = ckpttool_here(*words, str(folder("buckets_tp2")), *out)
        assert done.returncode == 0, done.stderr
        lines = [line for line in done.stderr.splitlines() if line.startswith("prove ")]
        assert lines and all(re.search(r"of [\d.]+ GB, [\d.]+ GB/s, \d+ s left", line) for line in lines), words


def test_param_groups_that_are_no_list_are_refused(tmp_path: Path) -> None:
    source = other_trainer(tmp_path / "a.pt", [{"lr": 0.5, "weight_decay": 0.1, "params": [FC2, NORM]}])
    ckpttool.convert(source, tmp_path / "a", to="megatron", world_size=2, drop=True)
    common = common_of(tmp_path / "a")
    common["optimizer"]["optimizer"]["param_groups"] = 0.5
    torch.save(common, tmp_path / "a" / "common.pt")
    with pytest.raises(Corrupt, match=r"common\.pt: the param groups of its optimizer are 0\.5"):
        ckpttool.open(tmp_path / "a")


def test_a_folder_without_common_pt_is_incomplete_but_for_its_weights(tmp_path: Path) -> None:
    source = next((FIXTURES / "megatron" / "tp2_pp2" / "ckpt").glob("iter_*"))
    shutil.copytree(source, tmp_path / source.name)
    (tmp_path / source.name / "common.pt").unlink()
    with pytest.raises(
        Corrupt, match=r"no common\.pt, in which .* param groups, scheduler, iteration and arguments.*only=\['model'\]"
    ):
        ckpttool.open(tmp_path / source.name)
    with ckpttool.open(tmp_path / source.name, only=["model"]) as opened:
        assert len(opened) == 15
    done = ckpttool.convert(tmp_path / source.name, tmp_path / "x.pt", to="full", salvage=True)
    assert any("no common.pt" in note and note.endswith("these are lost") for note in done.notes)


def test_param_groups_that_list_no_parameters_are_refused_where_a_job_needs_them(tmp_path: Path) -> None:
    """torchtitan's files have options by parameter, so that they would be lost; FSDP1's groups would be empty."""
    weights = {"decoder.b.weight": torch.ones(6, 4), "decoder.a.weight": torch.ones(4)}
    state = {n: {"exp_avg": w / 2, "exp_avg_sq": w / 4, "step": torch.tensor(3.0)} for n, w in weights.items()}
    groups = [{"lr": 0.1, "max_lr": 0.2}, {"lr": 0.3, "max_lr": 0.4}]
    torch.save({"model": weights, "optim": {"state": state, "param_groups": groups}}, tmp_path / "in.pt")
    for to in ("torchtitan", "accelerate", "lightning", "fsdp1", "zero3"):
        with pytest.raises(Unsupported, match=r"param groups? lists? (no )?parameters"):
            ckpttool.convert(tmp_path / "in.pt", tmp_path / "out", to=to, world_size=2, drop=True)
    done = ckpttool.convert(tmp_path / "in.pt", tmp_path / "out", to="dcp", world_size=2)
    assert done.verified and not done.dropped
