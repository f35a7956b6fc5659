"""Geometry of flat parameters, wrap patterns, the JSON file; and FSDP1 itself asked, on a process group that is not one."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ckpttool.engine.flat import flat_layout
from ckpttool.engine.flat.flat_layout import (
    Flat,
    FlatLayout,
    FlatPart,
    cut_part_into_boxes,
    find_rank_slice,
    lay_out_flat_parameter,
)
from ckpttool.errors import Corrupt, Unsafe, Unsupported
from ckpttool.huggingface import model_names
from ckpttool.index import boxes
from ckpttool.live.fsdp1 import describe_fsdp1


@contextmanager
def rank_of(rank: int, world: int) -> Iterator[None]:
    """A process group whose other ranks do not exist: FSDP1 cuts its parameters, and nothing is ever sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # FSDP1 is deprecated, and NO_SHARD warns of itself
            yield
    finally:
        dist.destroy_process_group()


# -------------------------------------------------------------------------------------------------------- geometry

LLAMA_ROOT = [("model.embed_tokens.weight", (131, 36)), ("model.norm.weight", (36,)), ("lm_head.weight", (131, 36))]


def firsts(flat: Flat) -> list[int]:
    return [p.first for p in flat.parts]


def test_without_orig_params_nothing_lies_between_parameters() -> None:
    flat = lay_out_flat_parameter("", LLAMA_ROOT)
    assert firsts(flat) == [0, 4716, 4752]
    assert flat.numel == 9468
    assert flat.key == "_flat_param"


def test_orig_params_begin_at_multiples_of_16_bytes_and_the_world_size_divides_the_whole() -> None:
    assert firsts(lay_out_flat_parameter("", LLAMA_ROOT, align=4, shards=3)) == [0, 4716, 4752]
    flat = lay_out_flat_parameter("", LLAMA_ROOT, align=8, shards=3)
    assert firsts(flat) == [0, 4720, 4760]
    assert flat.numel == 9477
    assert lay_out_flat_parameter("", [("a", (3,)), ("b", (4,))], align=4, shards=3).numel == 9


def test_the_last_slices_are_short_or_empty() -> None:
    assert [find_rank_slice(9468, 3, r) for r in range(3)] == [(0, 3156), (3156, 6312), (6312, 9468)]
    assert [find_rank_slice(5722, 8, r) for r in (6, 7)] == [(4296, 5012), (5012, 5722)]
    assert [find_rank_slice(3, 4, r) for r in range(4)] == [(0, 1), (1, 2), (2, 3), (3, 3)]
    assert [find_rank_slice(5, 4, r) for r in range(4)] == [(0, 2), (2, 4), (4, 5), (5, 5)]


def test_a_slice_of_a_matrix_is_at_most_three_boxes() -> None:
    part = FlatPart("w", (4, 3), 5)
    assert list(cut_part_into_boxes(part, 7, 15)) == [
        ((0, 2), (1, 1), None, 7),
        ((1, 0), (2, 3), None, 8),
        ((3, 0), (1, 1), None, 14),
    ]
    assert list(cut_part_into_boxes(part, 0, 5)) == []


def test_a_transposed_weight_lies_in_the_order_of_its_storage() -> None:
    part = FlatPart("w", (2, 3), 10, strides=(1, 2))  # stored as a (3, 2) matrix
    assert list(cut_part_into_boxes(part, 12, 16)) == [((0, 1), (2, 2), (1, 2), 12)]


@pytest.mark.slow
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.integers(0, 7),
    st.integers(1, 6),
    st.randoms(use_true_random=False),
)
def test_slices_of_all_ranks_make_the_whole_parameter(shape: list[int], first: int, ranks: int, dice: Any) -> None:
    order = list(range(len(shape)))
    dice.shuffle(order)
    stored = boxes.strides([shape[d] for d in order])
    steps = tuple(stored[order.index(d)] for d in range(len(shape)))
    part = FlatPart("w", tuple(shape), first, strides=steps)
    flat = torch.arange(first + part.numel + 3)
    wanted = flat[first : first + part.numel].as_strided(shape, steps)
    found = torch.full(shape, -1)
    for r in range(ranks):
        for start, size, strides, at in cut_part_into_boxes(part, *find_rank_slice(len(flat), ranks, r)):
            assert strides is not None
            box = tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))
            assert bool((found[box] == -1).all())
            found[box] = flat[at:].as_strided(size, strides)
    assert torch.equal(found, wanted)


# ------------------------------------------------------------------------------------------------- wrapped modules

PATHS = ["", "model", "model.layers", "model.layers.0", "model.layers.0.mlp", "model.layers.10", "layers.1", "head"]


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("**.layers.*", ["model.layers.0", "model.layers.10", "layers.1"]),
        ("layers.*", ["layers.1"]),
        ("*.layers.*", ["model.layers.0", "model.layers.10"]),
        ("model.layers.?", ["model.layers.0"]),
        ("**.mlp", ["model.layers.0.mlp"]),
        ("head", ["head"]),
        ("**", PATHS[1:]),
        ("nothing.*", []),
    ],
)
def test_a_star_is_one_component_and_two_are_any_number(pattern: str, found: list[str]) -> None:
    assert flat_layout.match_modules(PATHS, [pattern]) == found


def test_repeated_blocks_are_numbered_modules_with_modules_inside() -> None:
    names = [f"model.layers.{i}.self_attn.q_proj.weight" for i in range(12)]
    assert flat_layout.find_block_patterns(["model.embed.weight", *names, "lm_head.weight"]) == ["model.layers.*"]
    experts = [f"h.{i}.experts.{k}.w.weight" for i in range(2) for k in range(3)]
    assert flat_layout.find_block_patterns(experts) == ["h.*"]
    assert flat_layout.find_block_patterns(["0.weight", "2.weight", "heads.0.weight", "heads.1.weight"]) == []


def test_a_parameter_lies_in_the_innermost_wrapped_module_around_it() -> None:
    names = ["emb.w", "a.x", "a.b.x", "a.b.y", "a.z", "c.0.x"]
    assert flat_layout.assign_params_to_modules(names, ["a", "a.b", "c", "c.0"]) == {
        "": ["emb.w"], "a": ["a.x", "a.z"], "a.b": ["a.b.x", "a.b.y"], "c.0": ["c.0.x"],
    }  # fmt: skip
    assert list(flat_layout.assign_params_to_modules(["b.c.x", "b.y", "z"], ["b", "b.c"])) == [
        "",
        "b",
        "b.c",
    ]  # as a walk meets them


def test_a_tied_weight_that_nobody_named_is_found_by_the_size() -> None:
    flat = flat_layout.find_fitting_layout("", LLAMA_ROOT, lambda f: f.numel == 4752)
    assert flat is not None
    assert [p.name for p in flat.parts] == ["model.embed_tokens.weight", "model.norm.weight"]
    assert flat.shared == (("lm_head.weight", "model.embed_tokens.weight"),)
    assert flat_layout.find_fitting_layout("", LLAMA_ROOT, lambda f: f.numel == 4751) is None


def test_two_ways_to_tie_are_not_chosen_between() -> None:
    three = [("a.weight", (5, 2)), ("b.weight", (5, 2)), ("c.weight", (5, 2))]
    with pytest.raises(Unsupported, match=r'"b\.weight" or "c\.weight"'):
        flat_layout.find_fitting_layout("", three, lambda f: f.numel == 20)
    flat = flat_layout.find_fitting_layout("", three, lambda f: f.numel == 20, tied={"c.weight": "a.weight"})
    assert flat is not None and [p.name for p in flat.parts] == ["a.weight", "b.weight"]


def test_equal_layers_are_never_taken_for_tied() -> None:
    layers = [(f"layers.{i}.weight", (5, 2)) for i in range(3)]
    assert flat_layout.find_fitting_layout("", layers, lambda f: f.numel == 20) is None


def test_names_in_the_order_of_the_alphabet_are_no_order() -> None:
    names = [f"layers.0.{n}" for n in ("a", "b", "c", "d", "e", "f", "g", "h")]
    with pytest.raises(Unsupported, match="alphabet"):
        flat_layout.refuse_sorted_names(names, "--like")
    flat_layout.refuse_sorted_names([*names[4:], *names[:4]], "--like")


# ----------------------------------------------------------------------------------------------------------- JSON

LAYOUT = FlatLayout(
    True, 3,
    (
        Flat("", (FlatPart("emb.w", (4, 3), 0),), 12, "float32", (("head.w", "emb.w"),)),
        Flat("layers.0", (FlatPart("layers.0.a", (2, 2), 0, (1, 2)), FlatPart("layers.0.b", (), 4)), 6, "bfloat16"),
    ),
    ("emb.w", "layers.0.a", "layers.0.b", "count", "head.w"), (("emb.w", "layers.0.a"), ("layers.0.b",)),
    (("x", "y"),),
)  # fmt: skip


def text(change: Any = None) -> bytes:
    tree = flat_layout.to_json(LAYOUT)
    if change is not None:
        change(tree)
    return json.dumps(tree).encode()


def test_a_layout_survives_its_file() -> None:
    assert flat_layout.parse_layout_json(text(), "x.json") == LAYOUT


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.update(format="other"),
        lambda t: t.update(version=2),
        lambda t: t.update(shards=0),
        lambda t: t.update(use_orig_params=1),
        lambda t: t["flat_params"][1]["params"][1].update(first=3),
        lambda t: t["flat_params"][1]["params"][0].update(strides=[1, 3]),
        lambda t: t["flat_params"][1]["params"][0].update(name="emb.w"),
        lambda t: t["flat_params"][0].update(numel=11),
        lambda t: t["flat_params"][0].update(dtype="float33"),
        lambda t: t["flat_params"][0]["shared"].update({"head.w": "nobody"}),
        lambda t: t["flat_params"][0]["params"][0].update(shape=[-4, 3]),
        lambda t: t["flat_params"][0]["params"][0].update(shape=[1 << 60, 3]),
        lambda t: t["flat_params"].append(t["flat_params"][0]),
        lambda t: t.pop("flat_params"),
        lambda t: t.update(flat_params=3),
        lambda t: t.update(names=[1]),
        lambda t: t.update(copies=[]),
    ],
)
def test_a_layout_that_contradicts_itself_is_refused(change: Any) -> None:
    with pytest.raises(Corrupt, match=r"x\.json"):
        flat_layout.parse_layout_json(text(change), "x.json")


def test_a_file_that_is_no_layout_is_refused_with_how_to_make_one() -> None:
    for data in (b"[]", b"{}", b"3"):
        with pytest.raises(Corrupt, match="describe_fsdp1"):
            flat_layout.parse_layout_json(data, "x.json")
    with pytest.raises(Corrupt):
        flat_layout.parse_layout_json(b"{", "x.json")
    with pytest.raises(Unsafe):
        flat_layout.parse_layout_json(b'{"format": 1, "format": 2}', "x.json")


# ---------------------------------------------------------------------------------------------------------- FSDP1


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 7)
        self.b = nn.Linear(7, 5, bias=False)


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.emb = nn.Embedding(11, 5)
        self.layers = nn.ModuleList([Block(), Block()])
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.emb.weight


def wrapped(model: nn.Module, **how: Any) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    return FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu"), **how
    )


@pytest.mark.parametrize("world", [1, 2, 3, 7])
@pytest.mark.parametrize(("uop", "align"), [(False, 0), (True, 4), (True, 8)])
def test_fsdp1_lays_its_flat_parameters_out_as_we_do(world: int, uop: bool, align: int) -> None:
    from torch.distributed.fsdp import MixedPrecision

    with rank_of(0, world):
        model = Tiny()
        state = model.state_dict()
        parameters = {n: tuple(p.shape) for n, p in model.named_parameters(remove_duplicate=False)}
        how = {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)} if align == 8 else {}
        live = wrapped(model, use_orig_params=uop, **how)
        optimizer = torch.optim.AdamW(live.parameters())
        described = describe_fsdp1(live, optimizer)
        told = flat_layout.parse_layout_json(json.dumps(described).encode(), "x.json")
    ordered = [n for n in state if n in parameters]
    tied = {"head.weight": "emb.weight"}
    made = []
    for module, names in flat_layout.assign_params_to_modules(ordered, ["layers.0", "layers.1"]).items():
        params = [(n, parameters[n]) for n in names if n not in tied]
        shared = [(n, tied[n]) for n in names if n in tied]
        made.append(lay_out_flat_parameter(module, params, align, world, "float32", shared))
    keys = [n for n in ordered if n not in tied] if uop else [f.key for f in made]
    assert told == FlatLayout(uop, world, tuple(made), tuple(state), (tuple(keys),))


def test_a_transposed_parameter_is_described_by_its_strides() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.arange(6.0).reshape(2, 3).t())

    with rank_of(0, 2):
        live = wrapped(Odd(), use_orig_params=False)
        described = describe_fsdp1(live)
        flat = live._handle.flat_param.detach().clone()
    part = flat_layout.parse_layout_json(json.dumps(described).encode(), "x.json").flats[0].parts[0]
    assert part == FlatPart("w", (3, 2), 0, (1, 3))
    assert flat.tolist() == [0.0, 1.0, 2.0]  # row-major would be 0, 3, 1


def test_a_model_that_fsdp1_does_not_wrap_is_refused() -> None:
    with pytest.raises(Unsupported, match="FullyShardedDataParallel"):
        describe_fsdp1(nn.Linear(2, 2))


@pytest.mark.slow
def test_names_of_a_hub_model_come_from_transformers_in_a_child(tmp_path: Path) -> None:
    config = {
        "model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "vocab_size": 11, "hidden_size": 8,
        "intermediate_size": 6, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
        "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    names = model_names.read_model_names(model_names.load_config(str(tmp_path)))
    assert next(iter(names.shapes)) == "model.embed_tokens.weight"
    assert names.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    assert names.blocks == ("model.layers.0", "model.layers.1")
    with pytest.raises(Unsupported, match="no model_type"):
        (tmp_path / "config.json").write_text("{}")
        model_names.load_config(str(tmp_path))
