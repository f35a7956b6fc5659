"""The law of a conversion: every entry of the source is in the result, changed as declared, or listed as dropped."""

from __future__ import annotations

import collections
import itertools
import random
import shutil
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peers import REPOSITORY

import ckpttool
from ckpttool import layouts
from ckpttool.engine import planning
from ckpttool.errors import CkpttoolError, Differs, Unsupported
from ckpttool.index.checkpoint import Checkpoint

sys.path.insert(0, str(REPOSITORY))

from tests.torture import conserved

SEEDS = range(10)
#: What a writer does to the state that it is given: ways to lose or alter one entry.
Spoil = Callable[[random.Random, Checkpoint], Checkpoint]


def lose_tensor(r: random.Random, ckpt: Checkpoint) -> Checkpoint:
    name = r.choice(list(ckpt.tensors))
    return replace(ckpt, tensors={n: t for n, t in ckpt.tensors.items() if n != name})


def lose_value(r: random.Random, ckpt: Checkpoint) -> Checkpoint:
    name = r.choice(list(ckpt.values))
    return replace(ckpt, values={n: v for n, v in ckpt.values.items() if n != name})


def lose_value_in_place(r: random.Random, ckpt: Checkpoint) -> Checkpoint:
    del ckpt.values[r.choice(list(ckpt.values))]
    return ckpt


def alter_value(r: random.Random, ckpt: Checkpoint) -> Checkpoint:
    name = r.choice([n for n, v in ckpt.values.items() if other(v.data) is not None])
    value = ckpt.values[name]
    return replace(ckpt, values={**ckpt.values, name: value._replace(data=other(value.data))})


def alter_list_in_place(r: random.Random, ckpt: Checkpoint) -> Checkpoint:
    lists = [v.data for v in ckpt.values.values() if isinstance(v.data, list) and v.data]
    r.choice(lists).pop()
    return ckpt


def other(x: Any) -> Any:
    """A value of the same kind that is another one; None for kinds without one here."""
    if isinstance(x, bool):
        return not x
    if isinstance(x, int):
        return x + 1
    if isinstance(x, float):
        return -x if x == 0 else x * (1 + 2**-52)
    if isinstance(x, str):
        return x + " "
    return x[::-1] if isinstance(x, (list, tuple)) and len(x) > 1 and x[::-1] != x else None


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state in which every kind of entry occurs, and which every layout can hold."""
    path = tmp_path_factory.mktemp("law") / "source.pt"
    torch.manual_seed(1)
    names = {"emb.weight": (7, 3), "w.weight": (3, 5), "w.bias": (5,)}
    groups = [{"lr": 0.1, "betas": (0.9, 0.999), "weight_decay": 0.0, "params": list(names)}]
    slots = {
        n: {"exp_avg": torch.randn(s), "exp_avg_sq": torch.rand(s), "step": torch.tensor(3.0)} for n, s in names.items()
    }
    torch.save(
        {
            "model": {
                **{n: torch.randn(s) for n, s in names.items()},
                "w._extra_state": {"recipe": "delayed", "amax": [1.0, 2.0]},
            },
            "optim": {"state": slots, "param_groups": groups},
            "scheduler": {"last_epoch": 3, "base_lrs": [0.1, 0.2]},
            "step": 3,
            "rng": {"python": (3, (1, 2), None)},
            "args": {"lr": 0.1, "name": "run", "flags": [True, 1, -0.0]},
        },
        path,
    )
    return path


@pytest.mark.slow
@pytest.mark.parametrize("spoil", [lose_tensor, lose_value, lose_value_in_place, alter_value, alter_list_in_place])
@pytest.mark.parametrize("to", conserved.WRITTEN)
def test_a_writer_that_is_given_less_or_other_state_is_found_before_a_byte_is_written(
    to: str, spoil: Spoil, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suffix = conserved.SUFFIX.get(to, "")
    good, out = tmp_path / f"good{suffix}", tmp_path / f"out{suffix}"
    assert conserved.unaccounted(source, good, conserved.converted(source, good, to, 2, drop=False)) == []
    target = layouts.choose_target_layout(to, out)
    assert target.write is not None
    refused = 0
    for seed in SEEDS:
        r = random.Random(seed)

        def write(ckpt: Checkpoint, *more: Any, r: random.Random = r) -> Any:
            return target.write(spoil(r, ckpt), *more)

        with monkeypatch.context() as patched:
            patched.setattr(
                planning.layouts, "choose_target_layout", lambda *_, write=write: replace(target, write=write)
            )
            try:
                conserved.converted(source, out, to, 2, drop=False)
            except (Differs, Unsupported) as e:  # some writers find that the rest does not fit together
                refused += 1
                assert isinstance(e, Unsupported) or "Nothing was written" in str(e)
                assert list(tmp_path.iterdir()) == [good]
                continue
        # these two list the parameters of a group by a rule of their own
        assert to in ("megatron", "fsdp1") and ckpttool.diff(out, good).equal
        shutil.rmtree(out)
    assert refused >= len(SEEDS) - 3


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 90, 15))
def test_generated_states_are_conserved(first: int, tmp_path: Path) -> None:
    """Every pair of written layouts occurs; `make torture` takes 10,000 more."""
    found = [conserved.case(first + k, tmp_path / "work") for k in range(15)]
    assert [row for row in found if row["status"] not in ("conserved", "refused")] == []
    assert sum(row["status"] == "conserved" for row in found) > 5


@pytest.mark.parametrize("beside", ({}, {"n": 3}))
def test_an_element_of_a_list_that_is_dropped_leaves_the_others_where_they_were(
    tmp_path: Path, beside: dict[str, int]
) -> None:
    w, x = torch.arange(6.0), range(3)
    held = {"a": [w, x, w + 1], "b": [{"c": x}, {"d": w, "e": x}], "f": [w, [x], {"g": {"h": x}}, w], **beside}
    torch.save({"model": {"w": w + 2}, "extra": held}, tmp_path / "in.pt")
    done = ckpttool.convert(tmp_path / "in.pt", tmp_path / "out.pt", to="full", drop=True)
    assert {name for name, _, _ in done.dropped} == {f"extra.{n}" for n in ("a.1", "b.0.c", "b.1.e", "f.1", "f.2.g.h")}
    found = torch.load(tmp_path / "out.pt", weights_only=True)["extra"]
    assert [None if x is None else len(x) for x in found["a"]] == [6, None, 6] and found["b"][0] is None
    assert [x is None for x in found["f"]] == [False, True, True, False] and found["b"][1].keys() == {"d"}
    ckpttool.verify(tmp_path / "out.pt", read_data=True)


def test_an_element_that_full_cannot_hold_leaves_none_at_its_position(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(2)}, "mine": [1, frozenset((2,)), {"a": 3}]}, tmp_path / "in.pt")
    done = ckpttool.convert(tmp_path / "in.pt", tmp_path / "out.pt", to="full", drop=True)
    assert [name for name, _, _ in done.dropped] == ["extra.mine.1"]
    assert torch.load(tmp_path / "out.pt")["mine"] == [1, None, {"a": 3}]


@pytest.mark.parametrize(
    "mine",
    [
        [{b"k": frozenset()}, {1, 2}, {"a": frozenset()}],
        [{0: 1}, 2, {"a": frozenset()}],
        [{"a": frozenset()}, 3, {"b": 1}],
        [{"a": frozenset()}, "None", []],
    ],
)
def test_a_list_that_loses_all_for_which_a_reader_takes_it_apart(mine: list[Any], tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(2)}, "mine": mine}, tmp_path / "in.pt")
    done = ckpttool.convert(tmp_path / "in.pt", tmp_path / "out.pt", to="full", drop=True)
    left = [x for i, x in enumerate(mine) if not any(n.startswith(f"extra.mine.{i}") for n, _, _ in done.dropped)]
    found = torch.load(tmp_path / "out.pt")["mine"]
    assert left and [x for x in found if x is not None] == left
    assert all(found[mine.index(x)] == x for x in left)
    assert conserved.unaccounted(tmp_path / "in.pt", tmp_path / "out.pt", done) == []
    ckpttool.verify(tmp_path / "out.pt", read_data=True)
    again = ckpttool.convert(tmp_path / "out.pt", tmp_path / "dcp", to="dcp", world_size=1)
    assert {n for n in done.kept if n.startswith("extra.mine")} <= set(again.kept)


def test_none_in_a_value_that_dcp_takes_apart_is_no_place_of_a_lost_element(tmp_path: Path) -> None:
    value = {1.5: [bytearray(b"x")], 0: [None, collections.Counter({6: 2}), torch.Size((2,))]}
    torch.save({"model": {"w": torch.ones(2)}, "mine": collections.OrderedDict(d=value)}, tmp_path / "in.pt")
    done = ckpttool.convert(tmp_path / "in.pt", tmp_path / "dcp", to="dcp", world_size=1)
    assert conserved.unaccounted(tmp_path / "in.pt", tmp_path / "dcp", done) == []
    with ckpttool.open(tmp_path / "dcp") as opened:
        assert conserved.identical(opened.checkpoint.values["extra.mine.d"].data[0][0], None)


@pytest.mark.slow
def test_counters_of_a_deepspeed_engine_come_back_from_torchtitan(tmp_path: Path) -> None:
    source = REPOSITORY / "fixtures" / "zero3_w3_groups" / "ckpt"
    ckpttool.convert(source, tmp_path / "titan", to="torchtitan", drop=True)
    done = ckpttool.convert(tmp_path / "titan", tmp_path / "back", to="universal", drop=True)
    assert {"trainer.global_steps", "trainer.skipped_steps"} <= set(done.kept)
    with ckpttool.open(source) as a, ckpttool.open(tmp_path / "back") as b:
        for name in ("trainer.global_steps", "trainer.skipped_steps"):
            assert b.locate().values[name] == a.locate().values[name]


def test_states_of_ranks_that_the_engine_does_not_have_stay_with_rank_0(tmp_path: Path) -> None:
    state = {
        "model": {"w": torch.ones(2)},
        "rng": torch.arange(4),
        "per_rank": {str(r): {"rng": torch.arange(4) + r} for r in (1, 2)},
    }
    torch.save(state, tmp_path / "in.pt")
    ckpttool.convert(tmp_path / "in.pt", tmp_path / "dcp", to="dcp", world_size=2)
    for out, world in (("two", 2), ("three", 3)):
        ckpttool.convert(tmp_path / "dcp", tmp_path / out, to="zero3", world_size=world)
    for out in ("two", "three"):
        found = ckpttool.verify(tmp_path / out, against=tmp_path / "in.pt")
        assert found.against is not None and found.against["verdict"] == "equal"
    third = torch.load(next((tmp_path / "three").glob("*/zero_pp_rank_2_*_model_states.pt")), weights_only=False)
    assert third["rng"].tolist() == [2, 3, 4, 5]


def test_verify_says_which_values_it_does_not_compare(tmp_path: Path) -> None:
    source = REPOSITORY / "fixtures" / "zero3_w3_groups" / "ckpt"
    done = ckpttool.convert(source, tmp_path / "zero1", to="zero1", drop=True)
    assert list(done.changed) == ["extra.ds_config.zero_optimization.stage"]
    found = ckpttool.verify(tmp_path / "zero1", against=source)
    assert [n for n in found.notes if n.startswith("not compared")] == [
        "not compared, since a conversion changed them, as ckpttool.json says: 1 of the values, first extra.ds_config.zero_optimization.stage"
    ]


#: What a program may save as one of the components that other programs save as a dict with names.
ODD: dict[str, Any] = {
    "two": [{"last_epoch": 3}, {"last_epoch": 4}], "none": None, "number": 1.5, "integers": {0: {"a": 1}, 1: {"a": torch.ones(2)}},
    "lists": [[{"a": 1}], []], "tensor": [torch.ones(2), None], "counter": collections.Counter({3: 1}),
    "ordered": collections.OrderedDict(a=collections.OrderedDict()),
}  # fmt: skip
#: What has a key that means something else to some program, or two keys with one meaning.
ODD_KEYS: list[dict[str, Any]] = [
    {"scheduler": {"last_epoch": 3}, "lr_scheduler": {"last_epoch": 4}, "step": 3, "trainer": [{"a": 1}]},
    {"scheduler": 5, "lr_scheduler": collections.OrderedDict(a=1), "data_sampler": None, "iteration": {"a": 1}},
    {"lr_scheduler": None, "ds_config": None, "callbacks": torch.ones(2), "dataloader": collections.OrderedDict()},
    {"step": -3, "epoch": 0.0, "global_step": collections.Counter({3: 1}), "pytorch-lightning_version": {"a": 1}},
    {"global_step": torch.ones(2), "epoch": collections.OrderedDict()},
]


@pytest.mark.slow
@pytest.mark.parametrize("to", conserved.WRITTEN)
def test_components_that_are_no_dict_with_names(to: str, tmp_path: Path) -> None:
    weights = {"a.weight": torch.randn(7, 3), "a.bias": torch.randn(1)}
    slots = {n: {"step": torch.tensor(3.0), "exp_avg": x, "exp_avg_sq": x * x} for n, x in weights.items()}
    groups = [{"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "params": list(weights)}]
    components = ("scheduler", "rng", "scaler", "dataloader", "trainer", "args"), ("extra",)
    all_odd = [dict.fromkeys(keys, value) for value, keys in itertools.product(ODD.values(), components)]
    for k, odd in enumerate([*all_odd, *ODD_KEYS]):
        source, out = tmp_path / "source.pt", tmp_path / f"{k}{conserved.SUFFIX.get(to, '')}"
        torch.save({"model": weights, "optim": {"state": slots, "param_groups": groups}, **odd}, source)
        if to == "verl" and odd.get("scheduler") is ODD["tensor"]:
            with pytest.raises(Unsupported, match="a scheduler of plain numbers"):
                conserved.converted(source, out, to, 2)
            continue
        done = conserved.converted(source, out, to, 2)
        assert not conserved.unaccounted(source, out, done), odd
        assert {n.partition(".")[0] for n, _, _ in done.dropped} <= {*odd, "extra", "scheduler", "trainer"}, odd


@pytest.mark.parametrize("optim", [{}, {"param_groups": []}])
@pytest.mark.parametrize("to", ["zero3", "zero1", "universal", "fsdp1"])
def test_the_param_group_that_an_optimizer_without_any_gets_is_listed(
    to: str, optim: dict[str, Any], tmp_path: Path
) -> None:
    weights = {"b": torch.ones(6, 4), "a": torch.ones(4)}
    state = {n: {"exp_avg": w / 2, "exp_avg_sq": w / 4, "step": torch.tensor(3.0)} for n, w in weights.items()}
    torch.save({"model": weights, "optim": {"state": state, **optim}}, tmp_path / "in.pt")
    world = {} if to == "universal" else {"world_size": 2}
    done = ckpttool.convert(tmp_path / "in.pt", tmp_path / "out", to=to, **world)
    assert done.verified and not done.dropped and "optim.param_groups.0.params" in done.added
    assert not ckpttool.diff(tmp_path / "in.pt", tmp_path / "out").values
    with pytest.raises(Unsupported, match="No param group lists parameters"):
        ckpttool.convert(tmp_path / "in.pt", tmp_path / "other", to="llamafactory", world_size=2)


SEEN = struct.pack("<5q", *range(5))


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested dicts and lists."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (dict, list)):
        for x in tree.values() if isinstance(tree, dict) else tree:
            yield from _tensors(x)


@pytest.mark.parametrize("to", ["accelerate", "trainer", "torchtune", "llamafactory"])
def test_all_files_of_a_directory_are_compared_with_its_record(to: str, tmp_path: Path) -> None:
    """Those of torch.save carry digests of their own, and others beside them do not."""
    weights = {"b.weight": torch.ones(6, 4), "a.weight": torch.ones(4)}
    state = {n: {"exp_avg": w / 2, "exp_avg_sq": w / 4, "step": torch.tensor(3.0)} for n, w in weights.items()}
    optim = {"state": state, "param_groups": [{"lr": 0.1, "params": list(weights)}]}
    extra = {"job": {"seen": torch.arange(5)}, "rng": {"0": {"cpu": torch.arange(16, dtype=torch.uint8)}}}
    torch.save({"model": weights, "optim": optim, **extra}, tmp_path / "in.pt")
    world = {} if to == "torchtune" else {"world_size": 1}
    ckpttool.convert(tmp_path / "in.pt", tmp_path / "out", to=to, drop=True, **world)
    assert ckpttool.verify(tmp_path / "out", read_data=True).recorded == "equal"
    (file,) = (p for p in (tmp_path / "out").rglob("*") if p.is_file() and SEEN in p.read_bytes())
    tree = torch.load(file, weights_only=False)
    next(t for t in _tensors(tree) if t.tolist() == [0, 1, 2, 3, 4])[2] = 9
    torch.save(tree, file)
    with pytest.raises(CkpttoolError, match=r"digest"):
        ckpttool.verify(tmp_path / "out", read_data=True)


@pytest.mark.parametrize("to", ["zero3", "zero1", "fsdp1"])
def test_the_record_has_the_dtype_of_steps_that_no_cast_applies_to(to: str, tmp_path: Path) -> None:
    weights = {"b.weight": torch.ones(6, 4), "a.weight": torch.ones(4)}
    state = {n: {"exp_avg": w / 2, "exp_avg_sq": w / 4, "step": torch.tensor(3.0)} for n, w in weights.items()}
    optim = {"state": state, "param_groups": [{"lr": 0.1, "params": list(weights)}]}
    torch.save({"model": weights, "optim": optim}, tmp_path / "in.pt")
    ckpttool.convert(tmp_path / "in.pt", tmp_path / "out", to=to, world_size=2, cast={"optim.*": "float64"})
    assert ckpttool.verify(tmp_path / "out", read_data=True).recorded == "equal"


def test_a_model_with_extra_states_gets_the_same_files_as_one_without(tmp_path: Path) -> None:
    """Extra states alone have keys of the source then, which are no keys of a trainer."""
    extra = {"hyper": {"q": 5}, "pytorch-lightning_version": "2.5"}
    found: list[Any] = []
    for more in (dict[str, Any](), {"0._extra_state": {"amax": 2.0}}):
        state = {"w": {"exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2), "step": torch.tensor(3.0)}}
        optim = {"state": state, "param_groups": [{"lr": 0.1, "params": ["w"]}]}
        torch.save({"model": {"w": torch.ones(2), **more}, "optim": optim, "extra": extra}, tmp_path / "a.pt")
        to: dict[str, Any] = {"world_size": 1, "force": True}
        ckpttool.convert(tmp_path / "a.pt", tmp_path / "t", to="torch_checkpointing", canonical_keys=True, **to)
        ckpttool.convert(tmp_path / "a.pt", tmp_path / "by.pt", to="full", canonical_keys=True, force=True)
        ckpttool.convert(tmp_path / "by.pt", tmp_path / "l", to="lightning", **to)
        meta = torch.load(tmp_path / "l" / "meta.pt", weights_only=True)
        found.append((sorted(p.name for p in (tmp_path / "t").iterdir()), meta))
        tree = torch.load(tmp_path / "t" / "model_0.pt", weights_only=True)
        assert tree.get("0._extra_state") == more.get("0._extra_state")
    assert found[0] == found[1] and "optimizer_0.pt" in found[0][0] and found[0][1]["hyper"] == {"q": 5}
