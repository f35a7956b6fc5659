"""A state taken apart for engines with flat tensors: groups, frozen, buffers, tied weights, slots, counters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peers import load_full, ranks_for
from torch import Tensor

import ckpttool
from ckpttool.engine.flat.split_state import Training, find_shared_scalars, split_training_state
from ckpttool.errors import Unsupported
from ckpttool.formats.stored_tensors import Inline


def moments(t: Tensor, step: Any = 3.0) -> dict[str, Any]:
    """Optimizer state of a parameter."""
    return {"step": torch.tensor(step) if isinstance(step, float) else step, "exp_avg": t * 2, "exp_avg_sq": t * t}


def optimizer(model: dict[str, Tensor], *groups: list[str], **options: Any) -> dict[str, Any]:
    """A state by names, with a learning rate of its own for every group."""
    return {
        "state": {n: moments(model[n]) for g in groups for n in g},
        "param_groups": [{"lr": 0.5 / (k + 1), **options, "params": list(g)} for k, g in enumerate(groups)],
    }


def weights(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    """Tensors of random numbers."""
    dice = torch.Generator().manual_seed(7)
    return {n.replace("__", "."): torch.randn(s, generator=dice) for n, s in shapes.items()}


def parts(folder: Path, **tree: Any) -> Training:
    """The parts of a state that was saved as one file."""
    torch.save(tree, folder / "in.pt")
    with ckpttool.open(folder / "in.pt") as opened:
        return split_training_state(opened.locate(), opened.source)


MODEL = weights(a__weight=(4, 3), a__bias=(3,), b__weight=(2, 3))


def test_groups_are_those_of_the_optimizer_in_its_order(tmp_path: Path) -> None:
    found = parts(
        tmp_path, model=MODEL, optim=optimizer(MODEL, ["b.weight", "a.weight"], ["a.bias"], betas=(0.9, 0.95))
    )
    assert [g.params for g in found.groups] == [("b.weight", "a.weight"), ("a.bias",)]
    assert [g.options for g in found.groups] == [{"lr": 0.5, "betas": (0.9, 0.95)}, {"lr": 0.25, "betas": (0.9, 0.95)}]
    assert (found.frozen, found.buffers, found.tied, found.dropped, found.notes) == ([], [], {}, [], [])
    assert list(found.tensors) == ["a.weight", "a.bias", "b.weight"]
    assert {n: list(s) for n, s in found.slots.items()} == {n: ["exp_avg", "exp_avg_sq"] for n in MODEL}


def test_steps_are_scalars_whether_tensors_or_numbers(tmp_path: Path) -> None:
    state = optimizer(MODEL, list(MODEL))
    state["state"]["a.bias"]["step"] = 3
    found = parts(tmp_path, model=MODEL, optim=state)
    assert found.scalars["a.bias"] == {"step": 3}
    assert found.scalars["a.weight"] == {"step": Inline("float32", (), b"\0\0\x40\x40")}


def test_a_tensor_as_learning_rate_is_an_option_of_its_group(tmp_path: Path) -> None:
    state = optimizer(MODEL, list(MODEL), lr=torch.tensor(0.5, dtype=torch.float64))
    found = parts(tmp_path, model=MODEL, optim=state)
    assert found.groups[0].options == {"lr": Inline("float64", (), b"\0\0\0\0\0\0\xe0\x3f")}
    assert found.dropped == []


def test_a_group_without_parameters_keeps_its_place(tmp_path: Path) -> None:
    found = parts(tmp_path, model=MODEL, optim=optimizer(MODEL, ["a.weight"], [], ["a.bias", "b.weight"]))
    assert [g.params for g in found.groups] == [("a.weight",), (), ("a.bias", "b.weight")]
    assert [g.options["lr"] for g in found.groups] == [0.5, 0.25, 0.5 / 3]


def test_without_param_groups_all_that_has_state_is_one_group_and_that_is_said(tmp_path: Path) -> None:
    state = optimizer(MODEL, ["b.weight", "a.weight"])
    found = parts(tmp_path, model=MODEL, optim={"state": state["state"]})
    assert [g for g in found.groups] == [(("a.weight", "b.weight"), {})]
    assert found.frozen == ["a.bias"]
    assert found.notes == ["the optimizer has no param groups; all its parameters make one, without hyperparameters"]


def test_without_an_optimizer_every_weight_is_trainable_and_that_is_said(tmp_path: Path) -> None:
    model = {**MODEL, "n": torch.tensor(3), "bn.running_mean": torch.zeros(3)}
    found = parts(tmp_path, model=model)
    assert [g for g in found.groups] == [(("a.weight", "a.bias", "b.weight"), {})]
    assert (found.frozen, found.buffers) == ([], ["n", "bn.running_mean"])
    assert "without optimizer state" in found.notes[-1]


def test_what_the_optimizer_does_not_list_is_frozen_by_name_or_a_buffer(tmp_path: Path) -> None:
    model = MODEL | weights(emb__weight=(2, 2), head__bias=(2,), scale=(2,), rope__inv_freq=(2,), bn__running_var=(2,))
    model |= {
        "seen": torch.tensor(3),
        "mask": torch.ones(2, 2, dtype=torch.bool),
        "q.weight": torch.ones(2, dtype=torch.int8),
    }
    found = parts(tmp_path, model=model, optim=optimizer(model, list(MODEL)))
    assert found.frozen == ["emb.weight", "head.bias"]
    assert found.buffers == ["scale", "rope.inv_freq", "bn.running_var", "seen", "mask", "q.weight"]
    assert found.notes == ["taken for buffers, since no optimizer trains them: scale, rope.inv_freq, bn.running_var"]


def test_a_list_of_buffers_that_came_along_decides(tmp_path: Path) -> None:
    model = MODEL | weights(scale=(2,), emb__weight=(2, 2), other__bias=(2,))
    found = parts(
        tmp_path, model=model, optim=optimizer(model, list(MODEL)), buffer_names=["other.bias", "gone", "a.weight"]
    )
    assert found.frozen == ["scale", "emb.weight"]
    assert found.buffers == ["other.bias"]
    assert found.notes == []
    assert "buffer_names" not in found.rest


@pytest.mark.parametrize("said", [5, "scale", {"a": 1}, {"a": torch.ones(2)}])
def test_a_list_of_buffers_that_is_none_stops_a_save_that_has_such_a_list(said: Any, tmp_path: Path) -> None:
    model = MODEL | weights(scale=(2,))
    torch.save({"model": model, "optim": optimizer(model, list(MODEL)), "buffer_names": said}, tmp_path / "in.pt")
    with pytest.raises(Unsupported, match='an entry "buffer_names" of its own'):
        ckpttool.convert(tmp_path / "in.pt", tmp_path / "out", to="zero3", world_size=2)


def test_a_listed_parameter_without_state_was_frozen_where_others_have_some(tmp_path: Path) -> None:
    state = optimizer(MODEL, ["a.weight", "a.bias"], ["b.weight"])
    del state["state"]["a.bias"], state["state"]["b.weight"]
    found = parts(tmp_path, model=MODEL, optim=state)
    assert [g.params for g in found.groups] == [("a.weight",), ()]
    assert found.frozen == ["a.bias", "b.weight"]
    assert found.notes == ["2 parameters of the optimizer have no state and are taken for frozen: a.bias, b.weight"]
    model = MODEL | {"empty": torch.zeros(0, 2)}
    found = parts(tmp_path, model=model, optim=optimizer(model, list(model)))
    assert found.notes == ["1 parameters of the optimizer have no elements and are taken for frozen: empty"]


def test_an_optimizer_that_has_not_stepped_freezes_nothing(tmp_path: Path) -> None:
    state = {**optimizer(MODEL, ["b.weight"], ["a.weight", "a.bias"]), "state": {}}
    found = parts(tmp_path, model=MODEL, optim=state)
    assert [g.params for g in found.groups] == [("b.weight",), ("a.weight", "a.bias")]
    assert (found.frozen, found.notes, found.slots) == ([], [], {})


def test_a_parameter_of_no_elements_is_frozen_and_its_empty_state_is_no_loss(tmp_path: Path) -> None:
    model = {**MODEL, "none.weight": torch.zeros(0, 3)}
    found = parts(tmp_path, model=model, optim=optimizer(model, list(model)))
    assert [g.params for g in found.groups] == [("a.weight", "a.bias", "b.weight")]
    assert found.frozen == ["none.weight"]
    assert [d.name for d in found.dropped if d.nbytes] == []


def test_state_that_no_group_lists_is_dropped_by_name(tmp_path: Path) -> None:
    state = optimizer(MODEL, ["a.weight"])
    state["state"]["b.weight"] = moments(MODEL["b.weight"])
    found = parts(tmp_path, model=MODEL, optim=state)
    assert {d.name for d in found.dropped} == {f"optim.state.b.weight.{s}" for s in ("step", "exp_avg", "exp_avg_sq")}
    assert "b.weight" not in found.slots and "b.weight" not in found.scalars
    assert found.frozen == ["a.bias", "b.weight"]


def test_a_slot_of_another_shape_than_its_parameter_is_dropped(tmp_path: Path) -> None:
    state = optimizer(MODEL, ["a.weight"])
    state["state"]["a.weight"]["exp_avg_sq_row"] = torch.ones(4)
    found = parts(tmp_path, model=MODEL, optim=state)
    assert [(d.name, d.nbytes) for d in found.dropped] == [("optim.state.a.weight.exp_avg_sq_row", 16)]
    assert list(found.slots["a.weight"]) == ["exp_avg", "exp_avg_sq"]


def test_other_entries_of_an_optimizer_are_dropped_by_name(tmp_path: Path) -> None:
    state = {**optimizer(MODEL, ["a.weight"]), "scale": 4.0, "more": {"t": torch.ones(2)}}
    found = parts(tmp_path, model=MODEL, optim=state)
    assert sorted((d.name, d.nbytes) for d in found.dropped) == [("optim.more.t", 8), ("optim.scale", 0)]


def test_an_optimizer_of_another_model_is_refused_with_its_first_stranger(tmp_path: Path) -> None:
    model = MODEL | weights(q=(2,), z=(2,))
    with pytest.raises(Unsupported, match='has 2 parameters that the model does not have, first "q"'):
        parts(tmp_path, model=MODEL, optim=optimizer(model, ["a.weight", "z", "q"]))


def test_an_optimizer_alone_is_refused(tmp_path: Path) -> None:
    torch.save({"model": MODEL, "optim": optimizer(MODEL, list(MODEL))}, tmp_path / "in.pt")
    with pytest.raises(Unsupported, match="holds no model weights"):
        ckpttool.convert(tmp_path / "in.pt", tmp_path / "out", to="zero3", world_size=2, only=["optim"])


# --------------------------------------------------------------------------------------------------------- tied


def test_names_of_one_storage_are_tied_and_the_trained_one_owns_it(tmp_path: Path) -> None:
    w = torch.randn(5, 2)
    for owner, alias in (("emb.weight", "head.weight"), ("head.weight", "emb.weight")):
        model = {"emb.weight": w, "head.weight": w}
        found = parts(tmp_path, model=model, optim=optimizer(model, [owner]))
        assert (found.tied, found.frozen, found.buffers) == ({alias: owner}, [], [])
    without = parts(tmp_path, model={"emb.weight": w, "head.weight": w})
    assert without.tied == {"head.weight": "emb.weight"}
    assert [g.params for g in without.groups] == [("emb.weight",)]


def test_matrices_with_equal_bytes_are_tied_where_one_of_them_is_trained(tmp_path: Path) -> None:
    w = torch.randn(5, 2)
    model = {
        "emb.weight": w,
        "head.weight": w.clone(),
        "almost.weight": w + torch.eye(5, 2) * 1e-3,
        "flat.bias": w.reshape(-1),
    }
    found = parts(tmp_path, model=model, optim=optimizer(model, ["head.weight"]))
    assert found.tied == {"emb.weight": "head.weight"}
    assert found.frozen == ["almost.weight", "flat.bias"]


def test_matrices_of_one_value_are_equal_without_being_tied(tmp_path: Path) -> None:
    model = {"a.weight": torch.ones(5, 2), "b.weight": torch.ones(5, 2), "c.weight": torch.zeros(5, 2)}
    found = parts(tmp_path, model=model, optim=optimizer(model, ["a.weight"]))
    assert (found.tied, found.frozen) == ({}, ["b.weight", "c.weight"])


def test_vectors_with_equal_bytes_are_not_tied(tmp_path: Path) -> None:
    model = {"a.bias": torch.arange(5.0), "b.bias": torch.arange(5.0)}
    found = parts(tmp_path, model=model, optim=optimizer(model, ["a.bias"]))
    assert (found.tied, found.frozen) == ({}, ["b.bias"])


def test_matrices_that_differ_in_their_last_element_are_not_tied(tmp_path: Path) -> None:
    w = torch.randn(300, 200)
    other = w.clone()
    other[-1, -1] += 1
    found = parts(tmp_path, model={"a.weight": w, "b.weight": other}, optim=optimizer({"a.weight": w}, ["a.weight"]))
    assert (found.tied, found.frozen) == ({}, ["b.weight"])


def test_one_storage_whose_names_are_both_trained_stays_two_parameters(tmp_path: Path) -> None:
    w = torch.randn(5, 2)
    model = {"emb.weight": w, "head.weight": w}
    found = parts(tmp_path, model=model, optim=optimizer(model, ["emb.weight", "head.weight"]))
    assert found.tied == {}
    assert [g.params for g in found.groups] == [("emb.weight", "head.weight")]


def test_three_names_of_one_storage_have_one_owner(tmp_path: Path) -> None:
    w = torch.randn(5, 2)
    model = {"a.weight": w, "b.weight": w, "c.weight": w}
    for owner in model:
        found = parts(tmp_path, model=model, optim=optimizer(model, [owner]))
        assert found.tied == {n: owner for n in model if n != owner}, owner


# --------------------------------------------------------------------------------------------------------- rest


def test_scheduler_and_everything_else_lie_under_the_keys_of_their_user(tmp_path: Path) -> None:
    tree = {
        "lr_scheduler": {"last_epoch": 3, "_last_lr": [0.1]}, "step": 7, "rng": {"cpu": torch.arange(4)},
        "notes": {"a": [1, {"b": "x"}]},
    }  # fmt: skip
    found = parts(tmp_path, model=MODEL, optim=optimizer(MODEL, list(MODEL)), **tree)
    assert found.scheduler == {"last_epoch": 3, "_last_lr": [0.1]}
    assert found.rest["step"] == 7 and found.rest["notes"] == {"a": [1, {"b": "x"}]}
    assert found.rest["rng"]["cpu"].shape == (4,)
    assert found.counter("global_steps", "step") == 7
    assert found.counter("global_steps") is None


# ----------------------------------------------------------------------------------------- shared_scalars, and --drop


def training(**steps: Any) -> Training:
    return Training({}, [], [], [], {}, {}, {n: {"step": v} for n, v in steps.items() if v is not None})


@pytest.mark.parametrize(
    ("steps", "kept", "lost"),
    [
        ({"a": 3, "b": 3, "c": 3}, {"step": 3}, []),
        ({"a": 3, "b": 4, "c": 4}, {"step": 4}, ["a"]),
        ({"a": 3, "b": 3, "c": None}, {}, ["a", "b"]),
        ({"a": None, "b": None, "c": 3}, {}, ["c"]),
        ({"a": 3, "b": 3.0}, {"step": 3}, ["b"]),
        ({"a": float("nan"), "b": float("nan")}, None, []),
        ({}, {}, []),
    ],
)
def test_a_flat_tensor_has_a_step_only_where_all_its_parameters_have_one_and_then_that_of_most(
    steps: dict[str, Any], kept: dict[str, Any] | None, lost: list[str]
) -> None:
    found, dropped = find_shared_scalars(training(**steps), steps, "a sub-group of ZeRO-3 has one step")
    assert kept is None or found == kept
    assert [d.name for d in dropped] == [f"optim.state.{n}.step" for n in lost]
    assert all(d.why.startswith("a sub-group of ZeRO-3 has one step; ") for d in dropped)


@pytest.mark.parametrize("to", ["zero3", "zero2", "universal"])
def test_two_steps_in_one_group_stop_a_conversion_unless_one_is_dropped(to: str, tmp_path: Path) -> None:
    state = optimizer(MODEL, list(MODEL))
    state["state"]["b.weight"]["step"] = torch.tensor(9.0)
    torch.save({"model": MODEL, "optim": state}, tmp_path / "in.pt")
    with pytest.raises(Unsupported, match=r'cannot hold 1 of the 14 entries, first "optim\.state\.b\.weight\.step"'):
        ckpttool.convert(tmp_path / "in.pt", tmp_path / "out", to=to, **ranks_for(to, 2))
    assert not (tmp_path / "out").exists()
    done = ckpttool.convert(tmp_path / "in.pt", tmp_path / "out", to=to, **ranks_for(to, 2), drop=True)
    assert [d[0] for d in done.dropped] == ["optim.state.b.weight.step"]
    ckpttool.convert(tmp_path / "out", tmp_path / "back.pt", to="full")
    back = load_full(tmp_path / "back.pt")["optim"]["state"]
    assert [back[n]["step"].item() for n in MODEL] == [3.0, 3.0, 3.0]
    assert all(torch.equal(back[n]["exp_avg"], MODEL[n] * 2) for n in MODEL)


@pytest.mark.parametrize("to", ["zero3", "zero2"])
def test_state_that_is_neither_tensor_nor_number_stops_a_conversion_unless_dropped(to: str, tmp_path: Path) -> None:
    state = optimizer(MODEL, list(MODEL))
    for n in MODEL:
        state["state"][n] |= {"GG": [[]], "kind": "soap"}
    torch.save({"model": MODEL, "optim": state}, tmp_path / "in.pt")
    with pytest.raises(Unsupported, match=r"cannot hold 6 of .*neither a tensor nor a number"):
        ckpttool.convert(tmp_path / "in.pt", tmp_path / "out", to=to, world_size=2)
    done = ckpttool.convert(tmp_path / "in.pt", tmp_path / "out", to=to, world_size=2, drop=True)
    assert {name for name, *_ in done.dropped} == {f"optim.state.{n}.{s}" for n in MODEL for s in ("GG", "kind")}


def test_a_model_and_an_optimizer_under_keys_of_the_user_s_own_reach_an_engine(tmp_path: Path) -> None:
    state = {"state": {}, "param_groups": [{"lr": 0.1, "params": [0, 1, 2]}]}
    state["state"] = {i: moments(t) for i, t in enumerate(MODEL.values())}
    torch.save({"net": MODEL, "opt": state, "best": 0.5}, tmp_path / "in.pt")
    ckpttool.convert(tmp_path / "in.pt", tmp_path / "out", to="zero3", world_size=2)
    ckpttool.convert(tmp_path / "out", tmp_path / "back.pt", to="full")
    back = load_full(tmp_path / "back.pt")
    for i, n in enumerate(MODEL):
        assert back["optim"]["state"][n]["exp_avg"].equal(state["state"][i]["exp_avg"]) and back["model"][n].equal(
            MODEL[n]
        )
    ckpttool.convert(tmp_path / "in.pt", tmp_path / "again.pt", to="full")
    again = load_full(tmp_path / "again.pt")
    assert list(again) == ["net", "opt", "best"] and list(again["opt"]["state"]) == [0, 1, 2]


def test_optimizers_that_no_engine_loads_are_named(tmp_path: Path) -> None:
    state = {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    found = parts(tmp_path, model=MODEL, optimizers=[state, state])
    assert any("no engine loads them: optimizers.0, optimizers.1" in n for n in found.notes)


@pytest.mark.parametrize("to", ["dcp", "audit", "hf"])
def test_such_optimizers_have_their_numbers_after_any_way_round(to: str, tmp_path: Path) -> None:
    state = {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    torch.save({"model": MODEL, "optimizers": [state, state]}, tmp_path / "in.pt")
    more = {"audit": {}, "dcp": {"world_size": 2}, "hf": {"options": ckpttool.HfOptions(include_optimizer=True)}}[to]
    out = tmp_path / ("out.tar.zst" if to == "audit" else "out")
    ckpttool.convert(tmp_path / "in.pt", out, to=to, **more)
    ckpttool.convert(out, tmp_path / "back.pt", to="full")
    assert [list(o["state"]) for o in load_full(tmp_path / "back.pt")["optimizers"]] == [[0], [0]]


def test_two_steps_in_two_groups_are_kept(tmp_path: Path) -> None:
    state = optimizer(MODEL, ["a.weight"], ["a.bias", "b.weight"])
    state["state"]["a.weight"]["step"] = torch.tensor(9.0)
    torch.save({"model": MODEL, "optim": state}, tmp_path / "in.pt")
    for to in ("zero3", "zero2", "universal"):
        done = ckpttool.convert(tmp_path / "in.pt", tmp_path / to, to=to, **ranks_for(to, 3))
        assert done.digest == ckpttool.digest(tmp_path / to).digest == ckpttool.digest(tmp_path / "in.pt").digest


@pytest.mark.parametrize("to", ["zero3", "zero2", "universal"])
def test_slots_that_one_parameter_of_a_group_lacks_are_named(to: str, tmp_path: Path) -> None:
    state = optimizer(MODEL, list(MODEL))
    del state["state"]["b.weight"]["exp_avg"]
    torch.save({"model": MODEL, "optim": state}, tmp_path / "in.pt")
    with pytest.raises(
        Unsupported, match=r'"b\.weight" has the optimizer slots exp_avg_sq, "a\.weight" has exp_avg, exp_avg_sq'
    ):
        ckpttool.convert(tmp_path / "in.pt", tmp_path / "out", to=to, **ranks_for(to, 2))
