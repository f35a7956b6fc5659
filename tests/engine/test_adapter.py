"""adapter extract: the files of PEFT's save_pretrained. adapter merge: the bits of its merge_and_unload, in every layout; what
cannot be merged is refused by its name."""

from __future__ import annotations

import copy
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peers import FIXTURES
from safetensors.torch import load_file, save_file

import ckpttool
from ckpttool.engine import merging
from ckpttool.engine.copy import fill
from ckpttool.errors import CkpttoolError, Corrupt, Unsupported, UsageError
from ckpttool.huggingface import hub_names

WEIGHTS = "model.safetensors"
LAYER = "model.layers.0.self_attn.q_proj"


# ------------------------------------------------------------------------------------------------------- as PEFT does


@pytest.fixture(scope="module")
def peft() -> Iterator[Any]:
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield pytest.importorskip("peft", reason="needs peft")


def llama(dtype: torch.dtype, tied: bool = False) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=131, hidden_size=36, intermediate_size=50, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=10, max_position_embeddings=32, tie_word_embeddings=tied, attention_bias=True,
    )).to(dtype)  # fmt: skip


def tied_llama(dtype: torch.dtype) -> Any:
    return llama(dtype, tied=True)


def gpt2(dtype: torch.dtype) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=131, n_embd=36, n_layer=2, n_head=4, n_positions=32)).to(dtype)


def mixtral(dtype: torch.dtype) -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(
        vocab_size=131, hidden_size=36, intermediate_size=50, num_hidden_layers=2, num_attention_heads=4, head_dim=10,
        num_key_value_heads=2, num_local_experts=3, num_experts_per_tok=2, max_position_embeddings=32,
    )).to(dtype)  # fmt: skip


def gpt_oss(dtype: torch.dtype) -> Any:
    """Stacks that are (experts, in, out); those of down_proj are square."""
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(0)
    return GptOssForCausalLM(GptOssConfig(
        vocab_size=131, hidden_size=36, intermediate_size=36, num_hidden_layers=2, num_attention_heads=4, head_dim=10,
        num_key_value_heads=2, num_local_experts=5, num_experts_per_tok=2, max_position_embeddings=64,
    )).to(dtype)  # fmt: skip


def one_expert(dtype: torch.dtype) -> Any:
    model = mixtral(dtype)
    return type(model)(
        type(model.config)(**{**model.config.to_dict(), "num_local_experts": 1, "num_experts_per_tok": 1})
    ).to(dtype)


QV = ["q_proj", "v_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
CASES: dict[str, tuple[Callable[[torch.dtype], Any], dict[str, Any]]] = {
    "plain": (llama, {"target_modules": QV}),
    "patterns": (llama, {
        "target_modules": "all-linear", "use_rslora": True, "rank_pattern": {"q_proj": 5, r"layers\.1\..*k_proj": 7},
        "alpha_pattern": {"v_proj": 11, "^model.layers.0.mlp.down_proj": 3},
    }),
    "modules to save": (llama, {"target_modules": QV, "modules_to_save": ["lm_head", "norm"]}),
    "embeddings": (llama, {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}),
    "dora": (llama, {"target_modules": ["q_proj", "down_proj", "embed_tokens"], "use_dora": True}),
    "all biases": (llama, {"target_modules": ["q_proj"], "bias": "all"}),
    "own biases": (llama, {"target_modules": ["q_proj"], "bias": "lora_only", "lora_bias": True}),
    "tied": (tied_llama, {"target_modules": ["q_proj", "embed_tokens"]}),
    "tied, both adapted": (tied_llama, {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}),
    "tied, dora": (tied_llama, {"target_modules": ["lm_head"], "use_dora": True}),
    "tied, one saved": (tied_llama, {"target_modules": QV, "modules_to_save": ["lm_head"]}),
    "tied, saved once": (tied_llama, {"target_modules": QV, "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
    "conv1d": (gpt2, {"target_modules": ["c_attn", "c_proj", "c_fc"]}),
    "conv1d, square": (gpt2, {"target_modules": r".*attn\.c_proj", "fan_in_fan_out": True}),
    "conv1d and linear": (gpt2, {"target_modules": ["c_attn", "c_proj", "lm_head"]}),
    "experts": (mixtral, {"target_modules": ["q_proj"], "target_parameters": [*EXPERTS, "gate.weight"]}),
    "experts, rank 1": (mixtral, {"r": 1, "target_modules": [], "target_parameters": ["down_proj"]}),
    "experts, patterns": (mixtral, {
        "target_modules": QV, "target_parameters": EXPERTS, "modules_to_save": ["lm_head"], "use_rslora": True,
        "rank_pattern": {r".*\.gate_up_proj": 4}, "alpha_pattern": {r"layers\.1\..*down_proj": 5},
    }),
    "experts, transposed": (gpt_oss, {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    "experts, one of them": (one_expert, {"target_modules": [], "target_parameters": EXPERTS}),
    "parameters of linear layers": (llama, {"target_modules": ["v_proj"], "target_parameters": ["q_proj.weight"]}),
    "tied, one adapter": (
        tied_llama, {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True}),
    "tokens, kept tied": (
        tied_llama, {"target_modules": QV, "trainable_token_indices": [9, 4], "ensure_weight_tying": True}),
    "tokens": (llama, {"target_modules": QV, "trainable_token_indices": [130, 0, 7], "modules_to_save": ["norm"]}),
    "tokens of two": (llama, {"target_modules": QV, "trainable_token_indices": {"embed_tokens": [3], "lm_head": [9, 4]}}),
    "tokens, tied": (tied_llama, {"target_modules": QV, "trainable_token_indices": [5, 2]}),
    "tokens, tied, two lists": (tied_llama, {
        "target_modules": QV, "trainable_token_indices": {"embed_tokens": [3], "lm_head": [9, 4]}}),
    "conv1d, dora": (gpt2, {"target_modules": ["c_attn", "c_proj", "wte"], "use_dora": True}),
}  # fmt: skip


def adapted(peft: Any, at: Path, make: Callable[[torch.dtype], Any], dtype: torch.dtype, **how: Any) -> Any:
    """A model with a trained adapter; base model and adapter saved below `at`."""
    base = make(dtype)
    base.save_pretrained(at / "base")
    names, autocast = how.pop("names", ["default"]), how.pop("autocast", False)  # whether the adapter is in fp32
    config = peft.LoraConfig(**{"r": 3, "lora_alpha": 7, "task_type": "CAUSAL_LM", **how})
    model = peft.get_peft_model(base, copy.deepcopy(config), adapter_name=names[0], autocast_adapter_dtype=autocast)
    for name in names[1:]:
        model.add_adapter(name, copy.deepcopy(config), autocast_adapter_dtype=autocast)
    for n, p in model.named_parameters():
        if (
            "lora_" in n
            or "modules_to_save" in n
            or "trainable_tokens_" in n
            or (n.endswith("bias") and how.get("bias"))
        ):
            torch.nn.init.normal_(p, std=0.3)
    model.save_pretrained(at / "adapter")
    return model


def same_files(mine: Path, theirs: Path) -> None:
    assert (mine / WEIGHTS).read_bytes() == (theirs / WEIGHTS).read_bytes()
    assert json.loads((mine / "config.json").read_text()) == json.loads((theirs / "config.json").read_text())
    assert not (mine / "adapter_config.json").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("label", CASES)
def test_a_base_model_and_an_adapter_are_what_peft_merges(peft: Any, tmp_path: Path, label: str) -> None:
    from transformers import AutoModelForCausalLM

    make, how = CASES[label]
    for dtype in (torch.float32, torch.bfloat16):
        at = tmp_path / str(dtype)
        adapted(peft, at, make, dtype, **how)
        model = peft.PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(at / "base", dtype=dtype), at / "adapter"
        )
        model.merge_and_unload().save_pretrained(at / "theirs")
        ckpttool.adapter_merge(at / "base", at / "mine", adapter=at / "adapter")
        same_files(at / "mine", at / "theirs")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("label", CASES)
def test_the_state_of_a_job_is_what_its_live_model_merges(peft: Any, tmp_path: Path, label: str) -> None:
    make, how = CASES[label]
    for dtype, autocast in (
        (torch.float32, False),
        (torch.bfloat16, False),
        (torch.bfloat16, True),
        (torch.float16, True),
    ):
        at = tmp_path / f"{dtype} {autocast}"
        model = adapted(peft, at, make, dtype, autocast=autocast, **how)
        torch.save({"model": model.state_dict(), "step": 3}, at / "x.pt")
        model.merge_and_unload().save_pretrained(at / "theirs")
        where = {"adapter_config": str(at / "adapter"), "config": str(at / "base")}
        ckpttool.adapter_merge(at / "x.pt", at / "mine", **where)
        same_files(at / "mine", at / "theirs")
        ckpttool.convert(at / "x.pt", at / "dcp", to="dcp", world_size=3)  # tied weights are two there
        ckpttool.adapter_merge(at / "dcp", at / "sharded", only=["model"], **where)
        same_files(at / "sharded", at / "theirs")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_several_adapters_are_merged_in_the_order_in_which_they_are_named(peft: Any, tmp_path: Path) -> None:
    model = adapted(peft, tmp_path, llama, torch.bfloat16, target_modules=QV, names=["a", "b"])
    torch.save({"model": model.state_dict()}, tmp_path / "x.pt")
    where = {"adapter_config": str(tmp_path / "adapter"), "config": str(tmp_path / "base")}
    for names in (["b", "a"], ["b"]):
        copy.deepcopy(model).merge_and_unload(adapter_names=names).save_pretrained(tmp_path / f"theirs{len(names)}")
        done = ckpttool.adapter_merge(tmp_path / "x.pt", tmp_path / f"mine{len(names)}", adapter_name=names, **where)
        same_files(tmp_path / f"mine{len(names)}", tmp_path / f"theirs{len(names)}")
        assert json.loads((tmp_path / f"mine{len(names)}" / "ckpttool.json").read_text())["merged"]["names"] == names
    assert any(".lora_A.a.weight" in n for n, _, _ in done.dropped)
    with pytest.raises(UsageError, match=r"holds 2 adapters, a, b. Name those to merge.*adapter_name"):
        ckpttool.adapter_merge(tmp_path / "x.pt", tmp_path / "out", **where)
    with pytest.raises(UsageError, match="no such adapter; its adapters are a, b"):
        ckpttool.adapter_merge(tmp_path / "x.pt", tmp_path / "out", adapter_name="c", **where)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_layout_writes_the_same_and_each_weight_is_computed_once(
    peft: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapted(peft, tmp_path, llama, torch.float32, target_modules=QV, modules_to_save=["norm"])
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    done = ckpttool.adapter_merge(base, tmp_path / "mine", adapter=adapter)
    assert "merged 4 modules with scaling 2.33333 = alpha 7 / r, r 3" in done.notes
    computed: list[str] = []
    real = merging._apply_lora

    def counting(weight: Any, a: Any, b: Any, magnitude: Any, update: Any) -> Any:
        computed.append(update.module)
        return real(weight, a, b, magnitude, update)

    monkeypatch.setattr(merging, "_apply_lora", counting)
    for to, world in (("dcp", 3), ("zero3", 3), ("full", None), ("audit", None), ("fsdp1", 2), ("universal", None)):
        out = tmp_path / {"full": "x.pt", "audit": "x.tar.zst"}.get(to, to)
        computed.clear()
        again = ckpttool.adapter_merge(base, out, adapter=adapter, to=to, world_size=world)
        assert again.digest["model"] == done.digest["model"], to
        assert len(computed) == len(set(computed)) == 4, to
        assert ckpttool.verify(out, read_data=True).digest["model"] == done.digest["model"], to  # type: ignore[index]
    half = ckpttool.adapter_merge(base, tmp_path / "half", adapter=adapter, dtype="bf16")
    wanted = {n: t.bfloat16() for n, t in load_file(tmp_path / "mine" / WEIGHTS).items()}
    found = load_file(tmp_path / "half" / WEIGHTS)
    assert half.verified and all(torch.equal(found[n], t) for n, t in wanted.items())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_an_adapter_may_be_in_any_layout_and_need_no_adapter_config(peft: Any, tmp_path: Path) -> None:
    model = adapted(
        peft, tmp_path, llama, torch.float32, target_modules=QV, rank_pattern={"v_proj": 5}, use_rslora=True
    )
    torch.save(model.state_dict(), tmp_path / "x.pt")
    ckpttool.adapter_merge(tmp_path / "base", tmp_path / "mine", adapter=tmp_path / "adapter")
    bare = tmp_path / "bare"
    bare.mkdir()
    (tmp_path / "far").mkdir()
    shutil.copy(tmp_path / "adapter" / "adapter_model.safetensors", bare / "lora.safetensors")
    ckpttool.convert(bare / "lora.safetensors", tmp_path / "far" / "dcp", to="dcp", world_size=2)
    how: dict[str, Any] = {"lora_alpha": 7, "rslora": True}
    ckpttool.adapter_merge(tmp_path / "base", tmp_path / "two", adapter=tmp_path / "far" / "dcp", **how)
    ckpttool.adapter_merge(tmp_path / "x.pt", tmp_path / "one", config=str(tmp_path / "base"), **how)
    for name in ("one", "two"):
        same_files(tmp_path / name, tmp_path / "mine")
    with pytest.raises(Unsupported, match=r"no adapter_config\.json.*lora_alpha=16"):
        ckpttool.adapter_merge(tmp_path / "base", tmp_path / "out", adapter=bare / "lora.safetensors")
    with pytest.raises(UsageError, match=r"lora_alpha=7: the adapter has an adapter_config\.json, which says 7"):
        ckpttool.adapter_merge(tmp_path / "base", tmp_path / "out", adapter=tmp_path / "adapter", lora_alpha=7)


def test_embeddings_with_equal_bytes_are_tied_only_if_the_config_says_so(tmp_path: Path) -> None:
    same = torch.randn(7, 4)
    state = {"model.embed_tokens.weight": same, "lm_head.weight": same.clone()}
    torch.save({"model": state}, tmp_path / "base.pt")
    (tmp_path / "lora").mkdir()
    lora = {"lora_A.weight": torch.ones(2, 4), "lora_B.weight": torch.ones(7, 2)}
    save_file(
        {f"base_model.model.lm_head.{n}": t for n, t in lora.items()}, tmp_path / "lora" / "adapter_model.safetensors"
    )

    def merged(name: str, **how: Any) -> dict[str, torch.Tensor]:
        ckpttool.adapter_merge(
            tmp_path / "base.pt", tmp_path / name, adapter=tmp_path / "lora", lora_alpha=4, to="full", **how
        )
        out: dict[str, torch.Tensor] = torch.load(tmp_path / name)["model"]
        return out

    with pytest.raises(
        Unsupported, match=r'"model.embed_tokens.weight" and "lm_head.weight" have equal bytes.*Give config'
    ):
        merged("out.pt")
    for tied in (True, False):
        config = tmp_path / str(tied)
        config.mkdir()
        (config / "config.json").write_text(json.dumps({"model_type": "llama", "tie_word_embeddings": tied}))
        found = merged(f"{tied}.pt", config=str(config))
        assert torch.equal(found["lm_head.weight"], same + 4)
        assert torch.equal(found["model.embed_tokens.weight"], same + 4 if tied else same)


# ------------------------------------------------------------------------------------------------- what is not merged


def small(at: Path, dtype: torch.dtype = torch.float32, **config: Any) -> tuple[Path, Path]:
    """A base model of two tensors and an adapter of one, as folders."""
    (at / "base").mkdir(parents=True)
    (at / "adapter").mkdir()
    dice = torch.Generator().manual_seed(1)
    base = {f"{LAYER}.weight": torch.randn(5, 4, generator=dice).to(dtype), "model.norm.weight": torch.ones(4)}
    save_file(base, at / "base" / WEIGHTS)
    lora = {"lora_A.weight": torch.randn(2, 4, generator=dice), "lora_B.weight": torch.randn(5, 2, generator=dice)}
    save_file(
        {f"base_model.model.{LAYER}.{n}": t for n, t in lora.items()}, at / "adapter" / "adapter_model.safetensors"
    )
    said = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, **config}
    (at / "adapter" / "adapter_config.json").write_text(json.dumps(said))
    return at / "base", at / "adapter"


def refused(at: Path, text: str, error: type[CkpttoolError] = Unsupported, **how: Any) -> None:
    with pytest.raises(error, match=text):
        ckpttool.adapter_merge(at / "base", at / "out", **{"adapter": at / "adapter", **how})
    assert not (at / "out").exists()


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"peft_type": "IA3"}, "describes a 'IA3' adapter; ckpttool merges only LORA"),
        ({"peft_type": "LOHA"}, "describes a 'LOHA' adapter"),
        ({"layer_replication": [[0, 1]]}, "has layer_replication"),
        ({"alora_invocation_tokens": [3]}, "aLoRA"),
        ({"use_qalora": True}, "has use_qalora"),
        ({"shiny_new_field": 1}, "sets 'shiny_new_field', which ckpttool does not know"),
        ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights='pissa_niter_16'"),
        ({"rank_pattern": {"(a+)+": 3}}, "could take forever"),
    ],
)
def test_what_cannot_be_merged_exactly_is_refused_by_its_name(
    tmp_path: Path, config: dict[str, Any], text: str
) -> None:
    small(tmp_path, **config)
    refused(tmp_path, text)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"r": 3}, r'gives "model.layers.0.self_attn.q_proj" the rank 3, but its lora_A has 2 rows'),
        ({"rank_pattern": {"q_proj": 8}}, "the rank 8"),
        ({"lora_alpha": None}, "has no number as lora_alpha"),
        ({"lora_alpha": True}, "has no number as lora_alpha"),
        ({"alpha_pattern": {"q_proj": "4"}}, "has no number as lora_alpha, but '4'"),
        ({"alpha_pattern": [4]}, "alpha_pattern in adapter_config.json is not an object"),
        ({"rank_pattern": {"[": 8}}, "is not a pattern"),
        ({"use_dora": True}, "use_dora=True.*has no lora_magnitude_vector"),
        ({"trainable_token_indices": [1]}, "has trainable_token_indices, and no tensor"),
        (
            {"target_parameters": ["norm.weight"]},
            'LoRA for 0 parameters of "model.norm", and target_parameters names 1',
        ),
    ],
)
def test_an_adapter_config_that_is_of_another_adapter_is_found_out(
    tmp_path: Path, config: dict[str, Any], text: str
) -> None:
    small(tmp_path, **config)
    refused(tmp_path, text, Corrupt)


def test_half_a_lora_behind_a_square_one_is_refused(tmp_path: Path) -> None:
    """How a square weight is stored, the other modules tell; one of them has no lora_B here."""
    base, adapter = small(tmp_path)
    square, broken = (f"model.layers.{k}.mlp.fc" for k in (0, 1))
    weights = {f"{n}.weight": torch.ones(4, 4) for n in (square, broken)}
    save_file({**load_file(base / WEIGHTS), **weights}, base / WEIGHTS)
    file = adapter / "adapter_model.safetensors"
    lora = {f"{square}.lora_A.weight": torch.ones(2, 4), f"{square}.lora_B.weight": torch.ones(4, 2),
            f"{broken}.lora_A.weight": torch.ones(2, 4)}  # fmt: skip
    save_file({**load_file(file), **{f"base_model.model.{n}": t for n, t in lora.items()}}, file)
    refused(tmp_path, rf'{broken}".* has only .*lora_A.weight. The file is incomplete', Corrupt)


def test_tensors_that_do_not_fit_the_base_model_are_refused(tmp_path: Path) -> None:
    def case(label: str, text: str, error: type[CkpttoolError], change: Callable[[dict[str, Any]], Any]) -> None:
        _, adapter = small(tmp_path / label)
        file = adapter / "adapter_model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)
        refused(tmp_path / label, text, error)

    a, b = (f"base_model.model.{LAYER}.lora_{x}.weight" for x in "AB")
    case("gone", "has only .*lora_A.weight. The file is incomplete", Corrupt, lambda t: t.pop(b))
    case("rank", "cannot be multiplied", Corrupt, lambda t: t.update({b: torch.ones(5, 3)}))
    for dtype in (torch.int32, torch.bool):
        case(f"{dtype}", r"lora_A.weight. of the adapter is (int32|bool), and .* of floating-point numbers", Unsupported,
             lambda t, dtype=dtype: t.update({a: torch.ones(2, 4, dtype=dtype), b: torch.ones(5, 2, dtype=dtype)}))  # fmt: skip
    case("mixed", "lora_A.weight. of the adapter is float64, but its lora_B is float32", Unsupported,
         lambda t: t.update({a: torch.ones(2, 4, dtype=torch.float64)}))  # fmt: skip
    case("shape", r"lora_B @ lora_A is \[6, 4\]", Corrupt, lambda t: t.update({b: torch.ones(6, 2)}))
    case("conv", "matrices have two dimensions", Unsupported, lambda t: t.update({a: torch.ones(2, 4, 1, 1)}))
    case(
        "new",
        'lora_new.weight" fits no LORA',
        Unsupported,
        lambda t: t.update({a.replace("_A", "_new"): torch.ones(1)}),
    )
    case("tokens", 'belongs to "embed.weight", which the base model does not have', Unsupported,
         lambda t: t.update({"base_model.model.embed.token_adapter.trainable_tokens_delta": torch.ones(1, 4)}))  # fmt: skip
    case("other", 'which the base model does not have; its first tensor is "model', Unsupported,
         lambda t: t.update({"base_model.model.lm_head.weight": torch.ones(4, 4)}))  # fmt: skip
    case("vocabulary", "the vocabulary was resized", Corrupt,
         lambda t: t.update({"base_model.model.model.norm.weight": torch.ones(7)}))  # fmt: skip


def test_a_quantised_base_model_and_one_that_holds_an_adapter_are_refused(tmp_path: Path) -> None:
    small(tmp_path / "int8", torch.int8)
    refused(tmp_path / "int8", "is int8: the base model is quantised")
    base, adapter = small(tmp_path / "twice")
    save_file({**load_file(base / WEIGHTS), **load_file(adapter / "adapter_model.safetensors")}, base / WEIGHTS)
    refused(tmp_path / "twice", "given as the base model, holds an adapter itself")
    with pytest.raises(Unsupported, match=r"holds an adapter only \(r=2, 1 module\).*ckpttool adapter merge BASE"):
        ckpttool.adapter_merge(adapter, tmp_path / "out")
    with pytest.raises(Unsupported, match="has no adapter"):
        ckpttool.adapter_merge(small(tmp_path / "none")[0], tmp_path / "out", lora_alpha=3)


def test_a_tokenizer_of_the_adapter_that_is_not_that_of_the_base_model_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: Any) -> bytes:
        """Answer as the child with transformers does of such a model_type, which takes it 15 s."""
        raise Corrupt("no library has this model", code="CKPT0418")

    monkeypatch.setattr(hub_names, "run_in_child", unknown)
    base, adapter = small(tmp_path)
    (base / "config.json").write_text(json.dumps({"model_type": "of no library"}))
    for folder in (base, adapter):
        (folder / "tokenizer.json").write_text("{}")
    merged = ckpttool.adapter_merge(base, tmp_path / "same", adapter=adapter)
    assert not any(n.startswith("not copied") for n in merged.notes)
    (adapter / "tokenizer.json").write_text('{"added_tokens": []}')
    (adapter / "chat_template.jinja").write_text("{{ x }}")
    merged = ckpttool.adapter_merge(base, tmp_path / "out", adapter=adapter)
    assert any(n.startswith("not copied: chat_template.jinja, tokenizer.json beside the adapter") for n in merged.notes)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"


def test_training_state_is_not_carried_unless_that_was_asked_for(tmp_path: Path) -> None:
    base, adapter = small(tmp_path)
    torch.save({"model": load_file(base / WEIGHTS), "step": 3}, tmp_path / "x.pt")

    def merge(name: str, **how: Any) -> Any:
        world = {"world_size": 2} if "to" in how else {}
        return ckpttool.adapter_merge(tmp_path / "x.pt", tmp_path / name, adapter=adapter, **world, **how)

    with pytest.raises(
        Unsupported, match=r"writes weights only, and the source holds 1 entries of trainer.*only=\['model'\]"
    ):
        merge("out", to="dcp")
    assert [n for n, _, _ in merge("dropped", to="dcp", drop=True).dropped] == ["trainer.step"]
    assert merge("only", to="dcp", only=["model"]).dropped == []
    assert [n for n, _, _ in merge("hf").dropped] == ["trainer.step"]


def test_damage_to_what_was_recorded_is_found_in_all_that_is_merged(tmp_path: Path) -> None:
    small(tmp_path / "raw")
    for name, options in (("base", None), ("adapter", ckpttool.HfOptions(adapter=True))):
        ckpttool.convert(tmp_path / "raw" / name, tmp_path / name, to="hf", options=options)
    done = ckpttool.adapter_merge(tmp_path / "base", tmp_path / "good", adapter=tmp_path / "adapter")
    assert done.compared == 1 and ckpttool.verify(tmp_path / "good", read_data=True).recorded == "equal"
    for file in ("base/model.safetensors", "adapter/adapter_model.safetensors"):
        data = bytearray((tmp_path / file).read_bytes())
        data[-6] ^= 1
        good = (tmp_path / file).read_bytes()
        (tmp_path / file).write_bytes(data)
        refused(tmp_path, "do not have the digest that was recorded", Corrupt)
        ckpttool.adapter_merge(
            tmp_path / "base", tmp_path / "out", adapter=tmp_path / "adapter", ignore_recorded_digests=True, force=True
        )
        shutil.rmtree(tmp_path / "out")
        (tmp_path / file).write_bytes(good)


def test_an_interrupted_merge_goes_on_with_the_same_scaling_and_begins_anew_with_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fill, "_JOURNAL_BYTES", 1)
    (tmp_path / "lora").mkdir()
    names = [f"model.layers.{k}.q_proj" for k in range(12)]
    save_file(
        {f"{n}.weight": torch.full((320, 256), k * 1.0) for k, n in enumerate(names)}, tmp_path / "base.safetensors"
    )
    lora = {
        f"base_model.model.{n}.lora_{x}.weight": torch.ones(*s)
        for n in names
        for x, s in (("A", (2, 256)), ("B", (320, 2)))
    }
    save_file(lora, tmp_path / "lora" / "adapter_model.safetensors")
    (tmp_path / "config").mkdir()
    config = tmp_path / "config" / "adapter_config.json"
    config.write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))

    def merge() -> ckpttool.ConvertResult:
        return ckpttool.adapter_merge(
            tmp_path / "base.safetensors",
            tmp_path / "out.pt",
            adapter=tmp_path / "lora",
            adapter_config=str(config.parent),
        )

    real, left = merging._apply_lora, iter([True] * 9)

    def interrupted(*args: Any) -> Any:
        if not next(left, False):
            raise KeyboardInterrupt
        return real(*args)

    for alpha, goes_on in ((4, True), (8, False)):
        left = iter([True] * 9)
        monkeypatch.setattr(merging, "_apply_lora", interrupted)
        with pytest.raises(CkpttoolError, match="interrupted"):
            merge()
        monkeypatch.setattr(merging, "_apply_lora", real)
        config.write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": alpha}))
        done = merge()
        assert any("continued an interrupted run" in n for n in done.notes) == goes_on, done.notes
        found = torch.load(tmp_path / "out.pt")["model"]
        assert all(
            torch.equal(found[f"{n}.weight"], torch.full((320, 256), float(k + alpha))) for k, n in enumerate(names)
        )
        (tmp_path / "out.pt").unlink()
        config.write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))


def test_a_dry_run_counts_the_memory_of_a_merge_and_computes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckpttool.engine.dry_run import estimate_conversion
    from ckpttool.engine.opening import MergeRequest, OpenOptions
    from ckpttool.options import RunOptions, WriteRequest

    base, adapter = small(tmp_path)
    monkeypatch.setattr(merging, "_apply_lora", None)
    found = [
        estimate_conversion(
            base, tmp_path / "out", OpenOptions(merge=merge), WriteRequest(to="hf"), RunOptions()
        ).memory_bytes
        for merge in (None, MergeRequest(adapter=str(adapter)))
    ]
    one_reader_less = 3 * (4 << 20)
    assert found[1] - found[0] == (256 << 20) + 5 * 4 * 12 - one_reader_less
    with pytest.raises(UsageError, match="MB are needed"):
        ckpttool.adapter_merge(base, tmp_path / "out", adapter=adapter, max_memory_bytes=150 << 20)
    assert os.listdir(tmp_path) == ["base", "adapter"] or sorted(os.listdir(tmp_path)) == ["adapter", "base"]


# ------------------------------------------------------------------------------------------------------ adapter extract


def live_state(names: list[str]) -> dict[str, torch.Tensor]:
    """A model of two layers as PEFT holds it, with adapters of rank 2 and 3 around one of them."""
    q, v = (f"base_model.model.{LAYER}", f"base_model.model.{LAYER.replace('q_proj', 'v_proj')}")
    out = {f"{m}.base_layer.weight": torch.ones(5, 4) for m in (q, v)}
    for k, name in enumerate(names):
        for m, r in ((q, 2), (v, 3)):
            out |= {
                f"{m}.lora_A.{name}.weight": torch.full((r, 4), k + 1.0),
                f"{m}.lora_B.{name}.weight": torch.ones(5, r),
            }
    return out | {"base_model.model.model.norm.weight": torch.ones(4)}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_an_adapter_config_that_is_made_loads_in_peft_and_merges_the_same(peft: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    how = {
        "target_modules": ["q_proj", "down_proj", "embed_tokens"],
        "use_dora": True,
        "rank_pattern": {"down_proj": 5},
    }
    model = adapted(peft, tmp_path, llama, torch.float32, modules_to_save=["lm_head"], **how)
    torch.save({"model": model.state_dict(), "step": 3}, tmp_path / "x.pt")
    ckpttool.convert(tmp_path / "x.pt", tmp_path / "dcp", to="dcp", world_size=3)
    done = ckpttool.adapter_extract(tmp_path / "dcp", tmp_path / "made", lora_alpha=7, base_model="org/base")
    made = json.loads((tmp_path / "made" / "adapter_config.json").read_text())
    assert (made["r"], made["lora_alpha"], made["use_dora"], made["base_model_name_or_path"]) == (
        3,
        7,
        True,
        "org/base",
    )
    assert made["modules_to_save"] == ["lm_head"] and set(made["rank_pattern"].values()) == {5}
    assert any(n.startswith("made adapter_config.json: r 3, lora_alpha 7, 5 target modules") for n in done.notes)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    peft.PeftModel.from_pretrained(base, tmp_path / "made").merge_and_unload().save_pretrained(tmp_path / "again")
    model.merge_and_unload().save_pretrained(tmp_path / "theirs")
    same_files(tmp_path / "again", tmp_path / "theirs")


@pytest.mark.parametrize(
    ("to", "world"),
    [("dcp", 3), ("dcp", 8), ("zero3", 3), ("zero1", 2), ("universal", None), ("fsdp1", 3), ("audit", None), ("trainer", 2),
     ("lightning", 2), ("torchtitan", 2)],
)  # fmt: skip
def test_a_state_in_any_layout_gives_the_same_adapter_and_the_same_merged_model(
    tmp_path: Path, to: str, world: int | None
) -> None:
    state = live_state(["default"])
    state |= {f"base_model.model.{LAYER}.lora_magnitude_vector.default.weight": torch.arange(1.0, 6)}
    other = LAYER.replace("q_proj", "v_proj")
    state |= {f"base_model.model.{other}.lora_magnitude_vector.default.weight": torch.arange(2.0, 7)}
    torch.save({"model": state}, tmp_path / "x.pt")
    source = tmp_path / ("x.tar.zst" if to == "audit" else "folder")
    ckpttool.convert(tmp_path / "x.pt", source, to=to, world_size=world)
    for name, path in (("1", tmp_path / "x.pt"), ("2", source)):
        ckpttool.adapter_extract(path, tmp_path / f"extracted{name}", lora_alpha=6)
        ckpttool.adapter_merge(path, tmp_path / f"merged{name}", lora_alpha=6, only=["model"])
    for folder, files in (
        ("extracted", ["adapter_model.safetensors", "adapter_config.json"]), ("merged", [WEIGHTS]),
    ):  # fmt: skip
        for file in files:
            assert (tmp_path / f"{folder}1" / file).read_bytes() == (tmp_path / f"{folder}2" / file).read_bytes()
    assert set(load_file(tmp_path / "merged2" / WEIGHTS)) == {f"{LAYER}.weight", f"{other}.weight", "model.norm.weight"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_one_of_several_adapters_has_the_files_that_peft_saves_of_it(peft: Any, tmp_path: Path) -> None:
    model = adapted(peft, tmp_path, llama, torch.float32, target_modules=QV, names=["default", "b"], bias="none")
    torch.save({"model": model.state_dict()}, tmp_path / "x.pt")
    ckpttool.convert(tmp_path / "x.pt", tmp_path / "dcp", to="dcp", world_size=3)
    for source in ("x.pt", "dcp"):
        for name, folder in (("default", "adapter"), ("b", "adapter/b"), (None, "adapter")):
            out = tmp_path / f"{source}-{name}"
            done = ckpttool.adapter_extract(tmp_path / source, out, adapter_name=name, config=str(tmp_path / "adapter"))
            for file in ("adapter_model.safetensors", "adapter_config.json"):
                assert (out / file).read_bytes() == (tmp_path / folder / file).read_bytes(), (source, name, file)
            assert any("the adapters " in n for n in done.notes)


def test_the_directories_of_trainers_give_the_files_that_the_trainer_wrote(tmp_path: Path) -> None:
    theirs = FIXTURES / "trainer_ddp_lora_w2" / "ckpt" / "checkpoint-3"
    sharded = FIXTURES / "trainers" / "trainer_fsdp2_sharded_lora" / "ckpt" / "checkpoint-3"
    (tmp_path / "config").mkdir()
    shutil.copy(theirs / "adapter_config.json", tmp_path / "config")
    ckpttool.adapter_extract(theirs, tmp_path / "ddp")
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "ddp" / file).read_bytes() == (theirs / file).read_bytes()
    ckpttool.adapter_extract(sharded, tmp_path / "a", adapter_config=str(tmp_path / "config"))
    ckpttool.adapter_extract(
        sharded, tmp_path / "b", config=str(tmp_path / "config")
    )  # it has no config.json for the reader
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    truth = load_file(sharded.parents[1] / "truth.safetensors")
    found = load_file(tmp_path / "a" / "adapter_model.safetensors")
    assert len(found) == 8
    for name, tensor in found.items():
        live = name.replace("lora_A.", "lora_A.default.").replace("lora_B.", "lora_B.default.")
        assert torch.equal(tensor, truth.get(f"model.{live}", truth.get(f"model.{name}")))


def test_what_a_trainers_module_puts_before_the_names_of_peft_is_left_out(tmp_path: Path) -> None:
    plain = live_state(["default"])
    torch.save(plain, tmp_path / "x.pt")
    torch.save(
        {"state_dict": {**{f"net.{n}": t for n, t in plain.items()}, "metric.total": torch.ones(1)}}, tmp_path / "y.pt"
    )
    for name in "xy":
        ckpttool.adapter_extract(tmp_path / f"{name}.pt", tmp_path / f"e{name}", lora_alpha=6)
        done = ckpttool.adapter_merge(tmp_path / f"{name}.pt", tmp_path / f"m{name}", lora_alpha=6)
        assert done.digest
    file = "adapter_model.safetensors"
    assert (tmp_path / "ex" / file).read_bytes() == (tmp_path / "ey" / file).read_bytes()
    mine, theirs = (load_file(tmp_path / f"m{name}" / WEIGHTS) for name in "yx")
    assert mine.pop("metric.total") and mine.keys() == theirs.keys()
    assert all(torch.equal(mine[n], t) for n, t in theirs.items())
    assert ckpttool.inspect(tmp_path / "y.pt").adapter["modules"] == 2  # type: ignore[index]


def test_an_adapter_config_is_never_that_of_another_adapter(tmp_path: Path) -> None:
    torch.save(live_state(["default", "b"]), tmp_path / "x.pt")
    said = {"peft_type": "LORA", "r": 2, "rank_pattern": {"v_proj": 3}, "lora_alpha": 4}
    (tmp_path / "adapter_config.json").write_text(json.dumps(said))  # which is that of default
    with pytest.raises(Unsupported, match=r"no adapter_config\.json, which says by how much"):
        ckpttool.adapter_extract(tmp_path / "x.pt", tmp_path / "out", adapter_name="b")
    with pytest.raises(Unsupported, match=r"no adapter_config\.json, which says by how much"):
        ckpttool.adapter_merge(tmp_path / "x.pt", tmp_path / "out", adapter_name="b")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "adapter_config.json").write_text(json.dumps({**said, "lora_alpha": 40}))
    ckpttool.adapter_extract(tmp_path / "x.pt", tmp_path / "extracted", adapter_name="b")
    assert json.loads((tmp_path / "extracted" / "adapter_config.json").read_text())["lora_alpha"] == 40
    done = ckpttool.adapter_merge(tmp_path / "x.pt", tmp_path / "merged", adapter_name=["default", "b"])
    assert [n for n in done.notes if n.startswith("merged")] == [
        "merged 1 module with scaling 2 = alpha 4 / r, r 2", "merged 1 module with scaling 20 = alpha 40 / r, r 2",
        "merged 1 module with scaling 1.33333 = alpha 4 / r, r 3", "merged 1 module with scaling 13.3333 = alpha 40 / r, r 3",
    ]  # fmt: skip
    scaling = json.loads((tmp_path / "merged" / "ckpttool.json").read_text())["merged"]["scaling"]
    assert {name: modules[LAYER] for name, modules in scaling.items()} == {"default": 2.0, "b": 20.0}


def test_options_about_an_adapter_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    for text, how in (
        ("is about an adapter; give adapter=True too", {"lora_alpha": 4.0}),
        ("is about an adapter", {"adapter_name": "b"}),
        ("base_model='x' is for the adapter_config.json that lora_alpha makes", {"adapter": True, "base_model": "x"}),
        ("must be a number above 0", {"adapter": True, "lora_alpha": 0.0}),
        ("must be a number above 0", {"adapter": True, "lora_alpha": float("inf")}),
    ):
        with pytest.raises(UsageError, match=text):
            ckpttool.HfOptions(**how)  # type: ignore[arg-type]
    torch.save(live_state(["default"]), tmp_path / "x.pt")
    with pytest.raises(
        UsageError, match=r"adapter_name='b': the checkpoint has no such adapter; its adapters are default"
    ):
        ckpttool.adapter_extract(tmp_path / "x.pt", tmp_path / "out", adapter_name="b", lora_alpha=4)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "lora_alpha": 8}))
    with pytest.raises(UsageError, match=r"there is an adapter_config.json, which says 8"):
        ckpttool.adapter_extract(tmp_path / "x.pt", tmp_path / "out", lora_alpha=4)


def test_weights_that_may_hold_the_adapter_already_are_not_merged_again(tmp_path: Path) -> None:
    state = {n.replace(".base_layer", ""): t for n, t in live_state(["default"]).items()}
    torch.save(state, tmp_path / "x.pt")
    with pytest.raises(Unsupported, match="not as its base_layer: the adapter may be merged into it already"):
        ckpttool.adapter_merge(tmp_path / "x.pt", tmp_path / "out", lora_alpha=4)


# ---------------------------------------------------------------------------------------------- what adapters are called


def test_a_state_that_is_an_adapter_only_is_called_so(tmp_path: Path) -> None:
    _, adapter = small(tmp_path, base_model_name_or_path="org/base")
    ckpttool.convert(adapter, tmp_path / "a.pt")
    torch.save(live_state(["default"]), tmp_path / "both.pt")
    found = ckpttool.inspect(adapter)
    assert found.adapter == {"only": True, "ranks": [2], "modules": 1, "names": [], "base_model": "org/base"}
    assert "adapter only: r=2, 1 module, base model org/base" in str(found)
    assert found.next.startswith(
        "PeftModel.from_pretrained loads it; merged into its base model: ckpttool adapter merge BASE"
    )
    assert ckpttool.inspect(tmp_path / "a.pt").next.startswith("for PEFT: ckpttool adapter extract")
    both = ckpttool.inspect(tmp_path / "both.pt")
    assert both.adapter == {"only": False, "ranks": [2, 3], "modules": 2, "names": ["default"], "base_model": None}
    assert "base model and adapter: r=2, 3, 2 modules" in str(both) and "ckpttool adapter merge" in both.next
    assert ckpttool.inspect(tmp_path / "base").adapter is None
    different = ckpttool.diff(adapter, tmp_path / "both.pt")
    assert (different.adapter_a, different.adapter_b) == ("r=2, 1 module", None)
    with pytest.raises(
        Unsupported, match=r"holds an adapter only \(r=2, 1 module\).*ckpttool adapter extract .*adapter merge BASE"
    ):
        ckpttool.convert(tmp_path / "a.pt", tmp_path / "hf", to="hf")
    ckpttool.convert(tmp_path / "a.pt", tmp_path / "dcp", to="dcp", world_size=2)  # as any state


def test_the_commands_do_what_the_functions_do(tmp_path: Path) -> None:
    from commands import ckpttool_here

    base, adapter = small(tmp_path)
    ckpttool.adapter_merge(base, tmp_path / "theirs", adapter=adapter)
    done = ckpttool_here("adapter", "merge", base, adapter, tmp_path / "mine")
    assert done.returncode == 0 and "merged 1 module with scaling 2 = alpha 4 / r, r 2" in done.stderr, done.stderr
    assert (tmp_path / "mine" / WEIGHTS).read_bytes() == (tmp_path / "theirs" / WEIGHTS).read_bytes()
    torch.save(live_state(["a", "b"]), tmp_path / "x.pt")
    done = ckpttool_here(
        "adapter", "merge", tmp_path / "x.pt", tmp_path / "dcp", "--to", "dcp", "-n", 2, "--adapter-name", "b,a",
        "--lora-alpha", 4, "--json",
    )  # fmt: skip
    assert json.loads(done.stdout)["layout_to"] == "dcp", done.stderr
    done = ckpttool_here("adapter", "extract", tmp_path / "x.pt", tmp_path / "b", "--adapter", "b", "--lora-alpha", 4)
    assert done.returncode == 0 and float(
        load_file(tmp_path / "b" / "adapter_model.safetensors").popitem()[1].flatten()[0]
    ) in (1, 2)
    assert "4 paths were given" in ckpttool_here("adapter", "merge", *"abcd").stderr
    assert ckpttool_here("adapter", "merge", base, adapter, tmp_path / "o", "--lora-alpha", 3).returncode == 2
    assert (
        "--sub-group-size applies to"
        in ckpttool_here("adapter", "merge", base, adapter, tmp_path / "o", "--sub-group-size", 3).stderr
    )


@pytest.mark.slow
def test_an_adapter_of_torchtune_is_taken_out_and_not_merged_into_weights_that_hold_it(tmp_path: Path) -> None:
    epoch = FIXTURES / "trainers" / "torchtune_lora" / "epoch_0"
    ckpttool.adapter_extract(epoch, tmp_path / "adapter")
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "adapter" / file).read_bytes() == (epoch / file).read_bytes()
    with pytest.raises(
        Unsupported, match="holds an adapter and weights that it is already merged into, as torchtune saves them"
    ):
        ckpttool.adapter_merge(epoch, tmp_path / "out")
    ckpttool.convert(epoch, tmp_path / "base", to="hf")  # any model of these shapes
    for only in (None, ["model"]):
        out = tmp_path / f"out{only}"
        ckpttool.adapter_merge(tmp_path / "base", out, adapter=epoch, only=only)
        base, found = (load_file(p / WEIGHTS) for p in (tmp_path / "base", out))
        lora = load_file(epoch / "adapter_model.safetensors")
        name = "model.layers.1.self_attn.v_proj"
        a, b = (lora[f"base_model.model.{name}.lora_{x}.weight"] for x in "AB")
        assert torch.equal(found[f"{name}.weight"], base[f"{name}.weight"] + b @ a * 2)
        assert torch.equal(found["model.norm.weight"], base["model.norm.weight"])
