"""Which adapter a state holds by its names, and the scaling of each module, with PEFT's own rule as the judge."""

from __future__ import annotations

import re
import time
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


FOREVER = [
    "(a+)+b", "(a|a)*b", ".*.*.*.*.*b", "a" * 2000 + ".*", r"(\w+){9}", ".?" * 400 + "!", "[a-z]?" * 30 + "!",
    "(?:a|)" * 30 + "!", "(a|aa|(a|aaa)a)" * 12 + "!", "(?:[(]|a|[^]()]|[])|])" * 12 + "!", "(?x:(a+)#\n+)b",
    "(?x)(a+)#\n+b", "(a+)(?#)+b", "?x:(a+)#\n+b", r"(a|[a-z]|\w)a?(a|[a-z]|\w)a?" * 4 + "!",
]  # fmt: skip


@pytest.mark.parametrize("pattern", FOREVER)
def test_a_pattern_that_could_take_forever_is_refused(pattern: str) -> None:
    with pytest.raises(Unsupported, match="could take forever"):
        lora._pattern_matches("rank_pattern", pattern, "a" * 60)


LAYERS = "|".join(map(str, range(80)))


@pytest.mark.parametrize(
    "pattern",
    [
        ".*q_proj", "model.layers.(0|1|2).self_attn.q_proj", r"^.*\.(q|k)_proj$", r".*?\.layers\.\d+\..*?[qk]_proj",
        rf"model\.layers\.({LAYERS})\.(self_attn|mlp)\.(?:q|k|v|o|gate|up|down)_proj", "^(?!.*vision).*q_proj",
        "model.layers.1.self_attn.q_proj",
    ],
)  # fmt: skip
def test_patterns_that_people_write_are_compared(pattern: str) -> None:
    assert lora._pattern_matches("rank_pattern", pattern, "model.layers.1.self_attn.q_proj")


def test_the_slowest_patterns_that_are_compared_take_little_time() -> None:
    before = time.process_time()
    for pattern in (".?" * 13 + "!", "(a|a)" * 13 + "!", ".*.*.*!", "(a|[a-z])a?" * 6 + "!", ".*(a|a|a|a|a|a)(a|a)!"):
        assert not lora._pattern_matches("rank_pattern", pattern, "a" * 60)
    assert time.process_time() - before < 5


@pytest.mark.parametrize("pattern", ["a{99999999999}", "(" * 499 + ")" * 499])
def test_a_text_that_is_no_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(Corrupt, match="which is not a pattern"):
        lora._pattern_matches("rank_pattern", pattern, "a" * 60)


@pytest.mark.parametrize("alpha", [10**400, -(10**400), float("nan"), float("inf")], ids=["+", "-", "nan", "inf"])
def test_an_alpha_that_no_number_of_a_weight_holds_is_refused(alpha: float) -> None:
    with pytest.raises(Corrupt, match="has no number as lora_alpha"):
        lora.compute_scaling({"r": 2, "lora_alpha": alpha}, "q_proj", 2)


def test_an_adapter_of_rank_0_is_refused() -> None:
    with pytest.raises(Corrupt, match='the lora_A of "q_proj" has no rows'):
        lora.compute_scaling({"r": 0, "lora_alpha": 4}, "q_proj", 0)
    for shape in ((0, 4), ()):
        with pytest.raises(Corrupt, match='the lora_A of "q" has no rows'):
            lora.make_adapter_config({"q.lora_A.weight": shape}, lora_alpha=4, rslora=False, base_model=None)


def plan(saved: dict[str, tuple[int, ...]], config: dict[str, Any], base: dict[str, tuple[int, ...]]) -> Any:
    return lora_changes.plan_changes({"": saved}, {"": {"r": 2, "lora_alpha": 4, **config}}, base, {})


@pytest.mark.parametrize(
    ("kernel", "fits"),
    [((), (5,)), ((3,), (1, 5, 1)), ((3, 3), (1, 5, 1, 1)), ((3, 3, 3), (1, 5, 1, 1, 1))],
)
def test_the_magnitude_of_dora_has_one_number_for_each_output(kernel: tuple[int, ...], fits: tuple[int, ...]) -> None:
    """Others broadcast to a weight of the right shape and the wrong numbers, or do not multiply."""
    base = {"q.weight": (5, 4, *kernel)}
    saved = {"q.lora_A.weight": (2, 4, *kernel), "q.lora_B.weight": (5, 2, *(1 for _ in kernel))}
    for shape in ((1,), (), (5,), (1, 5), (5, 1), (5, 3), (4,), (1, 5, 1), (1, 5, 1, 1), (1, 5, 1, 1, 1)):
        both = {**saved, "q.lora_magnitude_vector": shape}
        if shape == fits:
            assert plan(both, {"use_dora": True}, base)["q.weight"].updates[0].magnitude == "q.lora_magnitude_vector"
            continue
        with pytest.raises(Corrupt, match=r'q.lora_magnitude_vector" of the adapter is .* but lora_B has 5 rows'):
            plan(both, {"use_dora": True}, base)


def test_what_would_be_broadcast_or_lost_or_is_given_twice_is_refused() -> None:
    q, weight = {"q.lora_A.weight": (2, 4), "q.lora_B.weight": (5, 2)}, {"q.weight": (5, 4)}
    plan({**q, "q.lora_B.bias": (5,)}, {}, {**weight, "q.bias": (5,)})
    with pytest.raises(Corrupt, match=r'"q.lora_B.bias" of the adapter is \[1\], but "q.bias" .* is \[5\]'):
        plan({**q, "q.lora_B.bias": (1,)}, {}, {**weight, "q.bias": (5,)})
    with pytest.raises(Unsupported, match="is DoRA of a parameter that target_parameters names"):
        plan({**q, "q.lora_magnitude_vector": (5,)}, {"use_dora": True, "target_parameters": ["q.weight"]}, weight)
    tokens = {f"e.token_adapter.{lora.TOKENS}": (2, 4)}
    plan(tokens, {"trainable_token_indices": [1, 3]}, {"e.weight": (9, 4)})
    with pytest.raises(Corrupt, match=r'names row 3 of "e.weight" twice'):
        plan(tokens, {"trainable_token_indices": [3, 3]}, {"e.weight": (9, 4)})
    square = {f"{n}.lora_{x}.weight": shape for n in "pq" for x, shape in (("A", (2, 4)), ("B", (4, 2)))}
    with pytest.raises(Unsupported, match="ckpttool merges adapters of linear layers"):
        plan({**square, "q.lora_A.weight": ()}, {}, {"p.weight": (4, 4), "q.weight": (4, 4)})


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
