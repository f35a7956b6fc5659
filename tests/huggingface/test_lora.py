"""Which adapter a state holds by its names, and the scaling of each module, with PEFT's own rule as the judge."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest

from ckpttool.errors import Corrupt, Unsupported
from ckpttool.huggingface import lora, lora_changes

MODULES = [
    "model.layers.1.self_attn.q_proj", "model.layers.11.self_attn.q_proj", "model.layers.1.mlp.down_proj", "lm_head", "q_proj",
    "xq_proj", "model.q_projx", "model.layers.1.self_attn.q_proj.k",
]  # fmt: skip
PATTERNS = [
    "q_proj", "layers.1.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "lm_head", "^model.*q_proj", r".*\.down_proj",
    r"layers\.\d+\..*proj", "(q|down)_proj", "self_attn", "1.self_attn.q_proj", "q_pro.", "[lx].*", "",
]  # fmt: skip


def test_a_pattern_matches_what_it_matches_in_peft() -> None:
    pytest.importorskip("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other = pytest.importorskip("peft.utils.other", reason="needs peft")
    for pattern in PATTERNS:
        for module in MODULES:
            theirs = other.get_pattern_key([pattern], module) == pattern
            assert lora._pattern_matches("rank_pattern", pattern, module) == theirs, (pattern, module)
    both = {"r": 8, "rank_pattern": {"q_proj": 2, "layers.1.self_attn.q_proj": 3}, "lora_alpha": 6}
    assert lora.compute_scaling(both, MODULES[0], 2) == 3.0  # the first that matches, in the order of the file
    assert lora.compute_scaling({**both, "use_rslora": True}, "lm_head", 8) == 6 / 8**0.5


@pytest.mark.parametrize("pattern", ["(a+)+b", "(a|a)*b", ".*.*.*.*.*b", "a" * 2000 + ".*", r"(\w+){9}"])
def test_a_pattern_that_could_take_forever_is_refused(pattern: str) -> None:
    with pytest.raises(Unsupported, match="could take forever"):
        lora._pattern_matches("rank_pattern", pattern, "a" * 60)


def names(text: str) -> dict[str, tuple[int, ...]]:
    return {n: (3, 4) if "lora_A" in n or "embedding_A" in n else (4, 3) for n in text.split()}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("base_model.model.q.lora_A.weight base_model.model.q.lora_B.weight", ((3,), 1, ("",), True)),
        ("base_model.model.q.lora_A.weight base_model.model.lm_head.weight", ((3,), 1, ("",), True)),
        (
            "base_model.model.q.lora_A.x.weight base_model.model.lm_head.modules_to_save.x.weight",
            ((3,), 1, ("x",), True),
        ),
        ("base_model.model.q.lora_A.x.weight base_model.model.norm.weight", ((3,), 1, ("x",), False)),
        ("base_model.model.q.lora_A.x.weight base_model.model.q.base_layer.weight", ((3,), 1, ("x",), False)),
        ("base_model.model.q.lora_A.weight base_model.model.q.base_layer.weight", ((3,), 1, ("",), False)),
        ("net.base_model.model.q.lora_A.weight", ((3,), 1, ("",), True)),
        ("q.lora_A.a.weight q.lora_A.b.weight k.lora_embedding_A.b", ((3,), 2, ("a", "b"), True)),
        ("q.lora_A.weight q.weight", ((3,), 1, ("",), False)),
        (
            "base_model.model.e.token_adapter.trainable_tokens_delta.x base_model.model.q.lora_A.x.weight",
            ((3,), 1, ("x",), True),
        ),
        ("q.weight k.weight", None),
        ("lora_head.weight", None),
    ],
)
def test_what_a_state_holds_is_seen_in_its_names(text: str, found: Any) -> None:
    seen = lora.find_lora_in_shapes(names(text))
    assert (None if seen is None else (tuple(seen.ranks), seen.modules, seen.names, seen.alone)) == found


def test_the_rank_of_a_stack_is_that_of_one_of_its_matrices() -> None:
    experts = "base_model.model.mlp.experts."
    shapes = {
        f"{experts}base_layer.base_layer.gate_up_proj": (3, 10, 4),
        f"{experts}base_layer.base_layer.down_proj": (3, 4, 5),
        f"{experts}base_layer.lora_A.default.weight": (6, 4),
        f"{experts}lora_A.default.weight": (6, 5),
    }
    seen = lora.find_lora_in_shapes(shapes)
    assert seen is not None and (seen.ranks, seen.modules, seen.alone) == ({2: 2}, 2, False)


def test_a_made_config_needs_the_matrices() -> None:
    with pytest.raises(Unsupported, match="has no lora_A"):
        lora.make_adapter_config(names("base_model.model.q.lora_B.weight"), lora_alpha=4, rslora=False, base_model=None)
    assert re.search(r'"lora_alpha": 4,', lora.encode_adapter_config(
        lora.make_adapter_config(names("base_model.model.q.lora_A.weight"), lora_alpha=4.0, rslora=False, base_model=None)
    ).decode())  # fmt: skip
    for stack in ("mlp.experts.base_layer", "mlp.experts"):
        with pytest.raises(Unsupported, match=r"which parameters .target_parameters. and with which rank"):
            lora.make_adapter_config(names(f"{stack}.lora_A.weight"), lora_alpha=4, rslora=False, base_model=None)
    with pytest.raises(Corrupt, match="cannot be multiplied"):
        lora_changes.plan_changes(
            {"": {"q.lora_A.weight": (3, 4), "q.lora_B.weight": (5, 2)}},
            {"": {"r": 3, "lora_alpha": 1}},
            {"q.weight": (5, 4)},
            {},
        )
