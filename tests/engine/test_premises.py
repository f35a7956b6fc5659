"""The premises of the maps for Megatron-Core, with the arguments that jobs of published models have and the config.json of those."""

from __future__ import annotations

from typing import Any

import pytest

from ckpttool.engine.transform.premises import check_premises
from ckpttool.errors import Unsupported
from ckpttool.huggingface import maps

WHERE = "the job (extra.args)"
#: What the jobs of all of them have alike, by Megatron-LM's own names.
ALIKE = {
    "swiglu": True, "normalization": "RMSNorm", "position_embedding_type": "rope", "rotary_percent": 1.0, "rotary_interleaved": False,
    "apply_layernorm_1p": False, "group_query_attention": True, "use_rope_scaling": False, "rope_scaling_factor": 8.0, "num_experts": None,
    "moe_router_topk": 2, "moe_router_pre_softmax": False, "moe_router_score_function": "softmax", "moe_router_num_groups": None,
    "moe_router_topk_scaling_factor": None, "moe_shared_expert_intermediate_size": None, "moe_shared_expert_gate": False, "moe_ffn_hidden_size": None, "window_size": None,
    "untie_embeddings_and_output_weights": True, "add_qkv_bias": False, "add_bias_linear": False, "qk_layernorm": False,
    "rotary_seq_len_interpolation_factor": None, "softmax_type": "vanilla", "apply_residual_connection_post_layernorm": False,
    "rope_type": None, "rotary_scaling_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0, "q_lora_rank": None, "norm_epsilon": 1e-5,
}  # fmt: skip


def of(
    layers: int, hidden: int, ffn: int, heads: int, groups: int, head: int, base: int, **more: Any
) -> dict[str, Any]:
    """The arguments of a job."""
    sizes = {
        "num_layers": layers,
        "hidden_size": hidden,
        "ffn_hidden_size": ffn,
        "num_attention_heads": heads,
        "num_query_groups": groups,
    }
    return {**ALIKE, **sizes, "kv_channels": head, "rotary_base": base, **more}  # fmt: skip


def hub(
    kind: str, layers: int, hidden: int, ffn: int, heads: int, groups: int, base: float, **more: Any
) -> dict[str, Any]:
    """A config.json of transformers 4."""
    return {
        "model_type": kind, "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": ffn, "num_attention_heads": heads,
        "num_key_value_heads": groups, "rope_theta": base, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False, **more,
    }  # fmt: skip


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
YARN = {
    "type": "yarn",
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 4096,
}
LATENT = {"q_lora_rank": 1536, "kv_lora_rank": 512, "v_head_dim": 128}
MODELS = {
    "Llama-3.1-8B": ("megatron", of(32, 4096, 14336, 32, 8, 128, 500000, use_rope_scaling=True),
                     hub("llama", 32, 4096, 14336, 32, 8, 500000.0, rope_scaling=LLAMA3)),
    "Llama-2-7B": ("megatron", of(32, 4096, 11008, 32, 32, 128, 10000), hub("llama", 32, 4096, 11008, 32, 32, 10000.0, rope_scaling=None)),
    "Qwen2.5-1.5B": ("megatron", of(28, 1536, 8960, 12, 2, 128, 1000000, add_qkv_bias=True, untie_embeddings_and_output_weights=False, norm_epsilon=1e-6),
                     hub("qwen2", 28, 1536, 8960, 12, 2, 1e6, tie_word_embeddings=True, rms_norm_eps=1e-6, use_sliding_window=False, sliding_window=131072)),
    "Qwen3-30B-A3B": ("megatron", of(48, 2048, 6144, 32, 4, 128, 1000000, qk_layernorm=True, num_experts=128, moe_router_topk=8, moe_ffn_hidden_size=768, norm_epsilon=1e-6),
                      hub("qwen3_moe", 48, 2048, 6144, 32, 4, 1e6, head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True,
                          attention_bias=False, rms_norm_eps=1e-6)),
    "Qwen1.5-MoE-A2.7B": ("megatron", of(24, 2048, 5632, 16, 16, 128, 1000000, add_qkv_bias=True, num_experts=60, moe_router_topk=4, moe_router_pre_softmax=True,
                                         moe_ffn_hidden_size=1408, moe_shared_expert_intermediate_size=5632, moe_shared_expert_gate=True, norm_epsilon=1e-6),
                          hub("qwen2_moe", 24, 2048, 5632, 16, 16, 1e6, num_experts=60, num_experts_per_tok=4, moe_intermediate_size=1408, norm_topk_prob=False,
                              shared_expert_intermediate_size=5632, use_sliding_window=False, sliding_window=32768, rms_norm_eps=1e-6)),
    "Mixtral-8x7B": ("megatron", of(32, 4096, 14336, 32, 8, 128, 1000000, num_experts=8, moe_ffn_hidden_size=14336),
                     hub("mixtral", 32, 4096, 14336, 32, 8, 1e6, num_local_experts=8, num_experts_per_tok=2, sliding_window=None)),
    "DeepSeek-V3": ("megatron-mla", of(61, 7168, 18432, 128, 128, 128, 10000, multi_latent_attention=True, rope_type="yarn", rotary_scaling_factor=40.0, mscale_all_dim=1.0,
                                       num_experts=256, moe_router_topk=8, moe_router_pre_softmax=True, moe_router_score_function="sigmoid", moe_router_num_groups=8,
                                       moe_router_group_topk=4, moe_router_topk_scaling_factor=2.5, moe_shared_expert_intermediate_size=2048, moe_ffn_hidden_size=2048,
                                       qk_head_dim=128, qk_pos_emb_head_dim=64, norm_epsilon=1e-6, **LATENT),
                    hub("deepseek_v3", 61, 7168, 18432, 128, 128, 10000, n_routed_experts=256, num_experts_per_tok=8, n_group=8, topk_group=4, n_shared_experts=1,
                        routed_scaling_factor=2.5, moe_intermediate_size=2048, qk_nope_head_dim=128, qk_rope_head_dim=64, norm_topk_prob=True, rope_scaling=YARN,
                        rms_norm_eps=1e-6, **LATENT)),
    "T5-v1.1-base": ("megatron-t5", {
        "hidden_size": 768, "encoder_num_layers": 12, "decoder_num_layers": 12, "num_attention_heads": 12, "kv_channels": 64, "ffn_hidden_size": 2048,
        "position_embedding_type": "relative", "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128, "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-6, "softmax_scale": 1.0, "gated_linear_unit": True, "bias_activation_fusion": True, "add_bias_linear": False,
        "share_embeddings_and_output_weights": False, "layernorm_zero_centered_gamma": False}, {
        "model_type": "t5", "d_model": 768, "num_layers": 12, "num_decoder_layers": 12, "num_heads": 12, "d_kv": 64, "d_ff": 2048,
        "relative_attention_num_buckets": 32, "layer_norm_epsilon": 1e-6, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_published_model_fits_its_job_and_nothing_is_unknown(name: str) -> None:
    which, job, config = MODELS[name]
    assert check_premises(maps.load_map(which), (job, WHERE), config, None) == []


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("Llama-3.1-8B", {"rope_scaling": None}, "use_rope_scaling = True"),
        ("Llama-3.1-8B", {"rope_scaling": {**LLAMA3, "factor": 32.0}}, "rope_scaling_factor = 8.0, and .* rope_scaling.factor = 32.0"),
        ("Llama-3.1-8B", {"rope_scaling": {**LLAMA3, "low_freq_factor": 2.0}}, "right for 1 only, and .*low_freq_factor = 2.0"),
        ("Llama-2-7B", {"num_key_value_heads": 8}, "num_query_groups = 32"), ("Llama-2-7B", {"num_hidden_layers": 31}, "num_layers = 32"),
        ("Llama-2-7B", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "use_rope_scaling = False, and .* 'linear'"),
        ("Llama-2-7B", {"attention_bias": True}, "add_qkv_bias = False"), ("Qwen3-30B-A3B", {"norm_topk_prob": False}, "moe_router_pre_softmax = False"),
        ("Qwen3-30B-A3B", {"num_experts_per_tok": 4}, "moe_router_topk = 8"), ("Mixtral-8x7B", {"num_local_experts": 4}, "num_experts = 8"),
        ("DeepSeek-V3", {"routed_scaling_factor": 1.0}, "moe_router_topk_scaling_factor = 2.5"), ("DeepSeek-V3", {"n_shared_experts": 2}, "= 2048, and"),
        ("Qwen1.5-MoE-A2.7B", {"norm_topk_prob": True}, "moe_router_pre_softmax = True"), ("Qwen1.5-MoE-A2.7B", {"qkv_bias": False}, "add_qkv_bias = True"),
        ("Qwen1.5-MoE-A2.7B", {"shared_expert_intermediate_size": 1408}, "moe_shared_expert_intermediate_size = 5632, and"),
        ("Qwen1.5-MoE-A2.7B", {"model_type": "qwen3_moe"}, "moe_shared_expert_gate = True"),
        ("Qwen2.5-1.5B", {"use_sliding_window": True}, "window_size.*use_sliding_window = True"),
        ("T5-v1.1-base", {"tie_word_embeddings": True}, "right for true only"), ("T5-v1.1-base", {"feed_forward_proj": "relu"}, "gated_linear_unit = True"),
        ("T5-v1.1-base", {"feed_forward_proj": "gated-silu"}, "bias_activation_fusion = True"),
        ("T5-v1.1-base", {"relative_attention_max_distance": 64}, "relative_attention_max_distance = 128, and"),
        ("DeepSeek-V3", {"rope_scaling": {**YARN, "factor": 4}}, "rotary_scaling_factor = 40.0"), ("DeepSeek-V3", {"rope_interleave": False}, "rope_interleave = False"),
    ],
)  # fmt: skip
def test_a_config_of_another_model_is_refused(name: str, change: dict[str, Any], said: str) -> None:
    which, job, config = MODELS[name]
    with pytest.raises(Unsupported, match=said):
        check_premises(maps.load_map(which), (job, WHERE), {**config, **change}, "CONFIG")


@pytest.mark.parametrize(
    "change",
    [{"rotary_percent": 0.5}, {"normalization": "LayerNorm"}, {"position_embedding_type": "learned_absolute"}, {"swiglu": False},
     {"qk_l2_norm": True}, {"attention_output_gate": True}, {"softmax_type": "learnable"}, {"rotary_seq_len_interpolation_factor": 4},
     {"window_size": (4095, 0)}, {"moe_router_score_function": "sigmoid"}, {"apply_residual_connection_post_layernorm": True}, {"no_rope_freq": 4}],
)  # fmt: skip
def test_a_job_that_no_config_of_the_map_s_models_can_say_is_refused(change: dict[str, Any]) -> None:
    which, job, config = MODELS["Llama-2-7B"]
    with pytest.raises(Unsupported, match=next(iter(change))):
        check_premises(maps.load_map(which), ({**job, **change}, WHERE), config, None)


@pytest.mark.parametrize(
    "change",
    [{"softmax_scale": None}, {"position_embedding_type": "learned_absolute"}, {"normalization": "LayerNorm"}, {"gated_linear_unit": False},
     {"share_embeddings_and_output_weights": True}, {"add_bias_linear": True}],
)  # fmt: skip
def test_a_job_whose_t5_transformers_does_not_have_is_refused(change: dict[str, Any]) -> None:
    which, job, config = MODELS["T5-v1.1-base"]
    with pytest.raises(Unsupported, match=next(iter(change))):
        check_premises(maps.load_map(which), ({**job, **change}, WHERE), config, None)
