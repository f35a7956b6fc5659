"""DeepSpeed's layouts, with plain torch as the other side: read what an engine writes, let it find what we write."""

from __future__ import annotations

import os
import shutil
import types
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ckpttool.converters.deepspeed.geometry import concatenate_parameters, partition_parameters, split_into_subgroups
from hypothesis import given, settings
from hypothesis import strategies as st
from peers import FIXTURES, difference, load_full, ranks_for, same_value, tensors_of
from zero_files import (
    DynamicLossScaler,
    Job,
    LossScaler,
    awkward,
    edit,
    fragment_address,
    gathered3,
    gathered12,
    load,
    numbers,
    plain,
    save,
    save_of,
    universal,
    zero0,
    zero3,
    zero12,
)

import ckpttool
from ckpttool.errors import CkpttoolError, Corrupt, Unsafe, Unsupported, UsageError
from ckpttool.index.boxes import flat_to_boxes

BF16 = torch.bfloat16
ONE_GROUP = ["embed.weight", "fc.weight", "fc.bias", "gate", "scale", "head.bias"]

# -------------------------------------------------------------------------------------------------------- geometry

Parts = dict[str, list[tuple[int, int, int, int]]]


def parts_of(flats: Any) -> Parts:
    return {n: f.parts for n, f in flats.items()}


def test_stage_3_cuts_every_parameter_into_equal_parts_and_pads_the_last_ones() -> None:
    flats, lengths = partition_parameters([{"w": (131, 6), "one": (1,), "none": (0, 3), "two": (2,)}], 3)
    assert parts_of(flats) == {
        "w": [(0, 0, 262, 0), (1, 262, 524, 0), (2, 524, 786, 0)],
        "one": [(0, 0, 1, 262)],
        "none": [],
        "two": [(0, 0, 1, 263), (1, 1, 2, 263)],
    }
    assert lengths == [264]


def test_a_parameter_of_five_on_four_ranks_leaves_the_last_without_elements() -> None:
    flats, lengths = partition_parameters([{"a": (5,)}, {"b": (7, 1), "c": (4,)}], 4)
    assert parts_of(flats)["a"] == [(0, 0, 2, 0), (1, 2, 4, 0), (2, 4, 5, 0)]
    assert parts_of(flats)["b"] == [(0, 0, 2, 0), (1, 2, 4, 0), (2, 4, 6, 0), (3, 6, 7, 0)]
    assert parts_of(flats)["c"] == [(r, r, r + 1, 2) for r in range(4)]
    assert lengths == [2, 3]
    assert [flats[n].group for n in "abc"] == [0, 1, 1]


def test_one_rank_has_everything_and_a_hundred_ranks_have_an_element_each() -> None:
    shapes = [{"w": (3, 2), "b": (1,)}]
    assert parts_of(partition_parameters(shapes, 1)[0]) == {"w": [(0, 0, 6, 0)], "b": [(0, 0, 1, 6)]}
    flats, lengths = partition_parameters(shapes, 100)
    assert parts_of(flats) == {"w": [(r, r, r + 1, 0) for r in range(6)], "b": [(0, 0, 1, 1)]}
    assert lengths == [2]


def test_stages_1_and_2_let_parameters_straddle_ranks() -> None:
    assert parts_of(concatenate_parameters([{"w": (5,), "b": (1,)}], [4])) == {
        "w": [(0, 0, 4, 0), (1, 4, 5, 0)],
        "b": [(1, 0, 1, 1)],
    }
    assert parts_of(concatenate_parameters([{"a": (1,)}, {"w": (9,), "none": (0,), "b": (2,)}], [2, 4])) == {
        "a": [(0, 0, 1, 0)],
        "w": [(0, 0, 4, 0), (1, 4, 8, 0), (2, 8, 9, 0)],
        "none": [],
        "b": [(2, 0, 2, 1)],
    }


def test_padding_after_a_parameter_moves_those_behind_it() -> None:
    assert parts_of(concatenate_parameters([{"w": (3,), "v": (1,), "b": (2,)}], [4], [[1, 3, 0]])) == {
        "w": [(0, 0, 3, 0)],
        "v": [(1, 0, 1, 0)],
        "b": [(2, 0, 2, 0)],
    }


@pytest.mark.parametrize(
    ("world", "most", "wanted"),
    [
        (1, 50, [["a"], ["b", "c", "d"]]),
        (2, 50, [["a"], ["b", "c", "d"]]),
        (3, 50, [["a", "b", "c"], ["d"]]),
        (3, 47, [["a", "b"], ["c", "d"]]),
        (3, 44, [["a"], ["b", "c", "d"]]),
        (200, 50, [["a", "b", "c", "d"]]),
        (200, 1, [["a"], ["b"], ["c"], ["d"]]),
        (1, 1, [["a"], ["b"], ["c"], ["d"]]),
        (1, 178, [["a", "b", "c", "d"]]),
        (1, 177, [["a", "b", "c"], ["d"]]),
        (2, 1e9, [["a", "b", "c", "d"]]),
    ],
)
def test_borders_of_sub_groups_depend_on_the_number_of_ranks(world: int, most: float, wanted: list[list[str]]) -> None:
    group = {"a": (131,), "b": (9,), "c": (37,), "d": (1,)}
    assert [list(g) for g in split_into_subgroups(group, world, most)] == wanted


def test_a_group_whose_parameters_are_all_frozen_has_no_sub_group() -> None:
    assert split_into_subgroups({}, 3, 1e9) == []
    assert split_into_subgroups({}, 3, 1) == []


shapes_strategy = st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), min_size=1, max_size=6)


@given(groups=st.lists(shapes_strategy, min_size=1, max_size=3), world=st.integers(1, 9))
def test_every_element_of_every_parameter_lies_in_one_place_of_stage_3(groups: Any, world: int) -> None:
    named = [{f"{g}.{k}": s for k, s in enumerate(shapes)} for g, shapes in enumerate(groups)]
    flats, lengths = partition_parameters(named, world)
    taken = set()
    for f in flats.values():
        assert [a for _, a, _, _ in f.parts] == [0, *(b for _, _, b, _ in f.parts)][: len(f.parts)]
        for rank, first, last, at in f.parts:
            places = {(f.group, rank, at + k) for k in range(last - first)}
            assert places and not places & taken and at + last - first <= lengths[f.group]
            taken |= places
    assert len(taken) == sum(torch.Size(s).numel() for g in named for s in g.values())


@given(
    shapes=shapes_strategy, world=st.integers(1, 9),
    paddings=st.lists(st.integers(0, 3), min_size=6, max_size=6),
)  # fmt: skip
def test_every_element_of_every_parameter_lies_in_one_place_of_stages_1_and_2(
    shapes: Any, world: int, paddings: list[int]
) -> None:
    group = {str(k): s for k, s in enumerate(shapes)}
    total = sum(torch.Size(s).numel() for s in shapes) + sum(paddings[: len(shapes)])
    part = -(-total // (2 * world)) * 2
    flats = concatenate_parameters([group], [part], [paddings[: len(shapes)]])
    places = [r * part + at + k for f in flats.values() for r, a, b, at in f.parts for k in range(b - a)]
    wanted, start = [], 0
    for s, pad in zip(shapes, paddings, strict=False):
        n = torch.Size(s).numel()
        wanted += range(start, start + n)
        start += n + pad
    assert places == wanted
    assert all(0 <= r < world for f in flats.values() for r, _, _, _ in f.parts)
    assert all(sum(torch.Size(k).numel() for _, k in flat_to_boxes(f.shape, a, b)) == b - a for f in flats.values() for _, a, b, _ in f.parts)  # fmt: skip


# --------------------------------------------------------------------------------------------------------- reading


def read(path: Path, **how: Any) -> tuple[dict[str, Any], Any]:
    """(tree as torch reads it, result) of a conversion to one file."""
    out = path.parent / f"{path.name}.{len(os.listdir(path.parent))}.pt"
    done = ckpttool.convert(path, out, to="full", **how)
    return load_full(out), done


def assert_same_state(tree: dict[str, Any], job: Job) -> None:
    """Every tensor bit for bit; the groups by name, in the order and with the options of the job."""
    found = tensors_of(tree)
    if not isinstance(job.step, torch.Tensor):
        steps = {k: found.pop(k) for k in list(found) if k.endswith(".step")}
        assert steps == ({} if job.step is None else {f"optim.{n}.step": job.step for g in job.groups for n in g})
    assert difference(found, job.truth()) == []
    if "optim" in tree:
        wanted = [{**job.option(g), "params": names} for g, names in enumerate(job.groups)]
        assert same_value([{k: g[k] for k in sorted(g)} for g in tree["optim"]["param_groups"]], [{k: g[k] for k in sorted(g)} for g in wanted])  # fmt: skip


Make = Callable[[Path], tuple[Job, Path]]
SGD = {"slots": ("momentum_buffer",), "step": None}
FROZEN_GROUP = {"groups": [ONE_GROUP[:3], [], ONE_GROUP[3:]]}


def case(maker: Any, job: dict[str, Any], *args: Any, **how: Any) -> Make:
    def make(folder: Path) -> tuple[Job, Path]:
        made = awkward(**job)
        return made, maker(made, folder / "in", *args, **how)

    return make


READ: dict[str, Make] = {
    "ZeRO-3 of one rank": case(zero3, {}, 1),
    "ZeRO-3 of two": case(zero3, {}, 2),
    "ZeRO-3 of three": case(zero3, {}, 3),
    "ZeRO-3 of eleven, rank 10 after 9": case(zero3, {}, 11),
    "ZeRO-3 of more ranks than most parameters have elements": case(zero3, {}, 40),
    "ZeRO-3 with a sub-group for every parameter": case(zero3, {}, 3, 1),
    "ZeRO-3 with sub-groups of a few": case(zero3, {}, 2, 300),
    "ZeRO-3 of bf16 with fp32 masters": case(zero3, {"precision": BF16}, 3, 100),
    "ZeRO-3 with a number as step": case(zero3, {"step": 3}, 2),
    "ZeRO-3 with SGD, which has no step": case(zero3, SGD, 2),
    "ZeRO-3 before its first step": case(zero3, {"slots": (), "step": None}, 2),
    "ZeRO-3 with a group that is all frozen": case(zero3, FROZEN_GROUP, 2, 300),
    "ZeRO-3 in legacy files": case(zero3, {}, 2, _use_new_zipfile_serialization=False),
    "ZeRO-3 of an old release, names without an underscore": case(zero3, {}, 2, old_name=True),
    "ZeRO-3 without frozen, tied and buffers": lambda f: (plain(), zero3(plain(), f / "in", 2)),
    "ZeRO-2 of one rank": case(zero12, {}, 1),
    "ZeRO-2 of three": case(zero12, {}, 3),
    "ZeRO-2 of eleven": case(zero12, {}, 11),
    "ZeRO-2 with ranks that hold padding alone": case(zero12, {"groups": [["scale"], ONE_GROUP[:4], ["head.bias"]]}, 7),
    "ZeRO-2 of bf16": case(zero12, {"precision": BF16}, 3),
    "ZeRO-2 with parameters aligned to 16 bytes": case(zero12, {}, 3, aligned=True),
    "ZeRO-2 of bf16, aligned": case(zero12, {"precision": BF16}, 2, aligned=True),
    "ZeRO-2 whose masters keep the padding": case(zero12, {}, 3, stripped=False),
    "ZeRO-2 with a number as step": case(zero12, {"step": 3}, 2),
    "ZeRO-2 with SGD": case(zero12, SGD, 2),
    "ZeRO-2 in legacy files": case(zero12, {}, 2, _use_new_zipfile_serialization=False),
    "ZeRO-1 of two": case(zero12, {}, 2, 1),
    "ZeRO-1 of bf16": case(zero12, {"precision": BF16}, 3, 1),
    "BF16_Optimizer, which states no stage": case(zero12, {"precision": BF16}, 3, 1, bf16_optimizer=True),
    "stage 0": case(zero0, {"groups": [ONE_GROUP]}, 2),
    "stage 0 of bf16": case(zero0, {"groups": [ONE_GROUP], "precision": BF16}, 2, masters=True),
    "universal of stage 3": case(universal, {}, 3),
    "universal of stage 2": case(universal, {}, 3, 2),
    "universal of stage 1": case(universal, {}, 2, 1),
    "universal of bf16": case(universal, {"precision": BF16}, 2, 3),
    "universal with a number as step": case(universal, {"step": 3}, 2, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_a_save_is_read_as_the_state_of_its_job(name: str, tmp_path: Path) -> None:
    job, folder = READ[name](tmp_path)
    tree, done = read(folder)
    assert_same_state(tree, job)
    assert not done.dropped
    assert (tree["global_steps"], tree["skipped_steps"], tree["global_samples"]) == (3, 1, 36)
    assert done.layout_from == "universal" if "universal" in name else done.layout_from.startswith("zero")


#: All that DeepSpeed 0.19's DynamicLossScaler has.
SCALER: dict[str, Any] = {
    "cur_scale": 1024.0, "dynamic": True, "cur_iter": 5, "last_overflow_iter": -1, "scale_factor": 2.0, "scale_window": 500,
    "min_scale": 1, "delayed_shift": 2, "cur_hysteresis": 2, "consecutive_hysteresis": False, "raise_error_at_min_scale": True,
    "dtype": torch.float16,
}  # fmt: skip


def test_elastic_saves_hold_no_hyperparameters_and_that_is_said(tmp_path: Path) -> None:
    job = awkward()
    tree, done = read(zero12(job, tmp_path / "in", 3, 1, elastic=True))
    assert difference(tensors_of(tree), job.truth()) == []
    assert [g["params"] for g in tree["optim"]["param_groups"]] == job.groups
    assert any("elastic_checkpoint keeps no hyperparameters" in n for n in done.notes)


def test_the_step_that_elastic_saves_have_of_their_groups_is_kept(tmp_path: Path) -> None:
    folder = zero12(awkward(), tmp_path / "in", 2, 1, elastic=True)
    for rank in range(2):
        file = save_of(folder) / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        edit(file, lambda t: t["optimizer_state_dict"].update(base_optimizer_state_step=7))
    assert {g["step"] for g in read(folder)[0]["optim"]["param_groups"]} == {7}


@pytest.mark.parametrize("make", [zero12, zero3, universal])
def test_what_an_optimizer_keeps_beside_its_state_is_read_and_never_left_out_unsaid(make: Any, tmp_path: Path) -> None:
    """As wrappers of optimizers do, such as Lookahead with its slow weights."""
    folder = make(plain(), tmp_path / "in", 2)
    for file in [*folder.glob("*/*_optim_states.pt"), *folder.glob("*/zero/optimizer_state.pt")]:
        key = "base_optimizer_state" if make is zero12 else "optimizer_state_dict"
        outer = (lambda t: t) if make is universal else (lambda t: t["optimizer_state_dict"])
        edit(file, lambda t, key=key, outer=outer: outer(t)[key].update(slow={"step": 2}))
    assert read(folder)[0]["optim"]["slow"] == {"step": 2}
    with pytest.raises(Unsupported, match=r'cannot hold .*"optim\.slow\.step"'):
        ckpttool.convert(folder, tmp_path / "out", to="zero3", world_size=2)


def test_what_an_optimizer_cuts_by_its_own_rule_is_refused_but_for_the_weights(tmp_path: Path) -> None:
    folder = zero3(plain(), tmp_path / "in", 2)
    file = save_of(folder) / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    edit(file, lambda t: t["optimizer_state_dict"]["optimizer_state_dict"].update(slow=torch.ones(2)))
    with pytest.raises(Unsupported, match=r"keeps slow beside its state .* only=\['model'\] leaves the optimizer out"):
        ckpttool.open(folder)
    ckpttool.convert(folder, tmp_path / "out.pt", to="full", only=["model"])


@pytest.mark.parametrize("to", ["fsdp1", "zero3", "verl", "dcp"])
def test_a_nan_among_the_options_of_a_group_is_the_same_on_all_ranks(to: str, tmp_path: Path) -> None:
    job = plain(options=[{"lr": 0.1, "best": float("nan")}], step=torch.tensor(float("nan")))
    folder = zero3(job, tmp_path / "in", 2)
    ckpttool.convert(folder, tmp_path / "out", to=to, world_size=2)
    assert ckpttool.diff(folder, tmp_path / "out", only=["optim"]).equal


def test_entries_of_the_module_that_rank_0_lacks_are_listed_as_left_behind(tmp_path: Path) -> None:
    folder = zero3(plain(), tmp_path / "in", 2)
    file = save_of(folder) / "zero_pp_rank_1_mp_rank_00_model_states.pt"
    edit(file, lambda t: t["module"].update({"x._extra_state": {"amax": 2.0}}))
    done = ckpttool.convert(folder, tmp_path / "out", to="dcp", world_size=2)
    assert [name for name, *_ in done.dropped] == ["extra.per_rank.1.model.x._extra_state"]


def test_what_some_ranks_do_not_save_and_what_no_deepspeed_writes_is_said(tmp_path: Path) -> None:
    folder = zero3(plain(client={"epoch": 2}), tmp_path / "in", 2)
    edit(save_of(folder) / "zero_pp_rank_1_mp_rank_00_model_states.pt", lambda t: t.pop("epoch") and None)
    file = save_of(folder) / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    edit(file, lambda t: t["optimizer_state_dict"].update(averages=1))
    tree, done = read(folder)
    assert tree["epoch"] == 2
    assert sum("not every rank saved epoch;" in n or "hold averages too" in n for n in done.notes) == 2


@pytest.mark.parametrize("only", [None, ["model", "optim", "scaler"]])
def test_an_engine_with_a_loss_scaler_computes_in_fp16_whatever_its_config_leaves_out(
    only: list[str] | None, tmp_path: Path
) -> None:
    """Masters are in fp32 in the layouts between; an engine in fp32 would scale no loss from here on."""
    scaler = DynamicLossScaler(**SCALER)
    folder = zero12(plain(precision=torch.float16, scaler=scaler), tmp_path / "in", 2)
    ckpttool.convert(folder, tmp_path / "dcp", to="dcp", world_size=2)
    ckpttool.convert(tmp_path / "dcp", tmp_path / "out", to="zero2", world_size=2, only=only)
    found = load(save_of(tmp_path / "out") / "zero_pp_rank_1_mp_rank_00_optim_states.pt")["optimizer_state_dict"]
    assert vars(found["loss_scaler"]) == vars(scaler) and found["dynamic_loss_scale"] is True


@pytest.mark.parametrize("make", [zero0, zero12, zero3, universal])
def test_a_scaler_of_the_client_state_does_not_take_the_place_of_the_engine_s(make: Any, tmp_path: Path) -> None:
    scaler, client = LossScaler(cur_scale=8.0, dynamic=False), {"scaler": {"cur_scale": 2.0}}
    job = plain(client=client, precision=torch.float16, scaler=scaler)
    folder = make(job, tmp_path / "in", 2, **({"masters": True} if make is zero0 else {}))
    if make is zero0:
        edit(save_of(folder) / "mp_rank_00_model_states.pt", lambda t: t["optimizer"].update(cur_scale=8.0))
    tree = read(folder)[0]
    assert tree["scaler"]["cur_scale"] == 8.0 and tree["extra"]["scaler"] == {"cur_scale": 2.0}
    ckpttool.convert(folder, tmp_path / "out", to="zero2", world_size=2)
    assert ckpttool.diff(folder, tmp_path / "out", only=["scaler"]).equal


def test_round_robin_saves_lie_in_the_order_of_param_shapes_whatever_the_slices_say(tmp_path: Path) -> None:
    job = awkward()
    folder = zero12(job, tmp_path / "in", 3, orders=[g[::-1] for g in job.groups])
    tree, _ = read(folder)
    assert difference(tensors_of(tree), job.truth()) == []
    assert [sorted(g["params"]) for g in tree["optim"]["param_groups"]] == [sorted(g) for g in job.groups]


def test_the_folder_the_tag_and_latest_are_one_checkpoint(tmp_path: Path) -> None:
    folder = zero3(awkward(), tmp_path / "in", 2)
    wanted = ckpttool.digest(folder).digest
    for path in (folder / "global_step3", folder / "latest"):
        assert ckpttool.digest(path).digest == wanted
    assert ckpttool.digest(folder, tag="global_step3").digest == wanted


def test_of_several_saves_latest_names_one_and_a_tag_any(tmp_path: Path) -> None:
    first, second = plain(steps=3), plain(steps=4, step=torch.tensor(4.0))
    folder = zero3(first, zero3(second, tmp_path / "in", 3), 2)
    assert read(folder)[0]["global_steps"] == 3
    assert read(folder, tag="global_step4")[0]["global_steps"] == 4
    (folder / "latest").write_text("global_step4\n")
    assert read(folder)[0]["global_steps"] == 4
    assert_same_state(read(folder)[0], second)
    with pytest.raises(Corrupt, match=r"the save that tag='nothing' points to is missing.*global_step3, global_step4"):
        ckpttool.open(folder, tag="nothing", source_layout="zero3")
    with pytest.raises(Unsafe, match=r"names '\.\./in', which is not a folder in the same place"):
        ckpttool.open(folder, tag="../in", source_layout="zero3")


def test_without_latest_one_save_is_taken_and_of_several_none(tmp_path: Path) -> None:
    folder = zero3(plain(), tmp_path / "in", 2)
    os.unlink(folder / "latest")
    assert_same_state(read(folder)[0], plain())
    zero3(plain(steps=4), folder, 2)
    os.unlink(folder / "latest")
    with pytest.raises(UsageError, match=r"2 saves: global_step3, global_step4\. Choose one with tag"):
        ckpttool.open(folder)


def test_a_tag_may_be_any_name(tmp_path: Path) -> None:
    folder = zero3(plain(), tmp_path / "in", 2, tag="pytorch_model ü.1")
    assert_same_state(read(folder)[0], plain())


def test_stray_files_beside_the_save_change_nothing(tmp_path: Path) -> None:
    folder = zero3(plain(), tmp_path / "in", 2)
    for name in (
        "zero_to_fp32.py",
        "global_step3/notes.txt",
        "global_step3/zero_pp_rank_0_mp_rank_00_model_states.pt.tmp",
    ):
        (folder / name).write_bytes(b"x")
    assert_same_state(read(folder)[0], plain())


def test_what_every_rank_has_alone_is_kept_by_rank_and_comes_back_for_as_many(tmp_path: Path) -> None:
    folder = zero3(plain(), tmp_path / "in", 2)
    for r in (0, 1):
        path = save_of(folder) / f"zero_pp_rank_{r}_mp_rank_00_model_states.pt"
        edit(path, lambda t, r=r: t.update(rng=torch.arange(r, r + 4), same={"a": torch.ones(2)}))
    tree, done = read(folder)
    assert tree["rng"].tolist() == [0, 1, 2, 3]
    assert tree["per_rank"]["1"]["rng"].tolist() == [1, 2, 3, 4]
    assert tree["same"]["a"].tolist() == [1, 1] and "same" not in tree["per_rank"]["1"]
    assert any("ranks differ in rng" in n for n in done.notes)
    for world in (2, 3):
        out = tmp_path / f"z{world}"
        ckpttool.convert(folder, out, to="zero3", world_size=world)
        models = [load(save_of(out) / f"zero_pp_rank_{r}_mp_rank_00_model_states.pt") for r in range(world)]
        if world == 2:
            assert [m["rng"].tolist()[0] for m in models] == [0, 1]
            assert all("per_rank" not in m for m in models)
        else:
            assert models[0]["per_rank"]["1"]["rng"].tolist() == [1, 2, 3, 4]
        assert ckpttool.digest(out).digest == ckpttool.digest(folder).digest


def test_a_key_that_one_rank_has_alone_is_kept_under_its_number(tmp_path: Path) -> None:
    folder = zero3(plain(), tmp_path / "in", 2)
    edit(
        save_of(folder) / "zero_pp_rank_1_mp_rank_00_model_states.pt",
        lambda t: t.update(mine={"a": 5, "t": torch.ones(2)}),
    )
    tree, _ = read(folder)
    assert tree["per_rank"]["1"]["mine"]["a"] == 5
    assert tree["per_rank"]["1"]["mine"]["t"].tolist() == [1, 1]
    assert "mine" not in tree


@pytest.mark.parametrize("key", ["optimizer", "ds_config"])
def test_a_rank_s_own_key_with_a_name_of_the_engine_s_is_kept(key: str, tmp_path: Path) -> None:
    tree, _ = read(zero3(plain(), tmp_path / "in", 2))
    tree["per_rank"] = {"0": {"seed": 1}, "1": {"seed": 2, key: {"lr": "odd"}}}
    torch.save(tree, tmp_path / "in.pt")
    ckpttool.convert(tmp_path / "in.pt", tmp_path / "out", to="zero3", world_size=2)
    assert read(tmp_path / "out")[0]["per_rank"] == tree["per_rank"]


def test_equal_buffers_of_legacy_files_are_not_said_to_differ(tmp_path: Path) -> None:
    folder = zero3(awkward(), tmp_path / "in", 2, _use_new_zipfile_serialization=False)
    assert not [n for n in read(folder)[1].notes if "differ" in n]


@settings(max_examples=25)
@given(
    shapes=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), min_size=1, max_size=5),
    split=st.integers(0, 5), world=st.integers(1, 6), target=st.integers(1, 6), most=st.sampled_from([1, 7, 40, 10**9]),
    stage=st.sampled_from([1, 2, 3]), aligned=st.booleans(), to=st.sampled_from(["zero3", "zero2", "zero1", "universal"]),
)  # fmt: skip
def test_a_state_is_the_same_whatever_it_was_written_for(
    shapes: Any,
    split: int,
    world: int,
    target: int,
    most: int,
    stage: int,
    aligned: bool,
    to: str,
    tmp_path_factory: Any,
) -> None:
    folder = tmp_path_factory.mktemp("zero")
    names = [f"p{k}" for k in range(len(shapes))]
    job = plain(
        weights={n: numbers(n, s) for n, s in zip(names, shapes, strict=True)},
        groups=[g for g in (names[:split], names[split:]) if g],
    )
    if stage == 3:
        zero3(job, folder / "a", world, most)
    else:
        zero12(job, folder / "a", world, stage, aligned=aligned)
    options = (ckpttool.UniversalOptions if to == "universal" else ckpttool.ZeroOptions)(sub_group_size=most)
    done = ckpttool.convert(folder / "a", folder / "b", to=to, **ranks_for(to, target), options=options)
    assert done.digest == ckpttool.digest(folder / "b").digest
    if to == "zero3":
        assert difference(gathered3(folder / "b"), job.truth()) == []
    elif to != "universal":
        assert difference(gathered12(folder / "b"), job.truth()) == []
    back = ckpttool.convert(folder / "b", folder / "c.pt", to="full")
    assert back.digest == done.digest
    assert_same_state(load_full(folder / "c.pt"), job)


# --------------------------------------------------------------------------------------------------------- writing


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, Path]:
    """A save of ZeRO-3 on three ranks."""
    job = awkward(precision=BF16, scheduler={"last_epoch": 3}, client={"epoch": 4, "rng": torch.arange(5)})
    return job, zero3(job, tmp_path_factory.mktemp("source") / "in", 3, 100)


def files_below(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


@pytest.mark.parametrize("world", [1, 2, 4, 64])
@pytest.mark.parametrize("to", ["zero3", "zero2", "zero1"])
def test_an_engine_finds_in_its_flat_tensors_what_the_source_held(
    to: str, world: int, source: tuple[Job, Path], tmp_path: Path
) -> None:
    job, folder = source
    done = ckpttool.convert(folder, tmp_path / "out", to=to, **ranks_for(to, world))
    wanted = ckpttool.digest(folder).digest
    assert not done.dropped and {**done.digest, "values": ""} == {**wanted, "values": ""}
    # groups list what is trained
    assert (done.digest["values"] != wanted["values"]) == bool(done.changed)
    found = (gathered3 if to == "zero3" else gathered12)(tmp_path / "out")
    assert difference(found, job.truth()) == []
    model = [f"zero_pp_rank_{r}_mp_rank_00_model_states.pt" for r in range(world)] if to == "zero3" else ["mp_rank_00_model_states.pt"]  # fmt: skip
    optim = [f"bf16_zero_pp_rank_{r}_mp_rank_00_optim_states.pt" for r in range(world)]
    wanted = [*(f"global_step3/{n}" for n in model + optim), "ckpttool.json", "latest"]
    assert files_below(tmp_path / "out") == sorted(wanted)
    assert (tmp_path / "out" / "latest").read_bytes() == b"global_step3"


@pytest.mark.parametrize("to", ["zero3", "zero2", "zero1", "universal"])
def test_every_zip_of_a_save_has_right_checksums(to: str, source: tuple[Job, Path], tmp_path: Path) -> None:
    ckpttool.convert(source[1], tmp_path / "out", to=to, **ranks_for(to, 3))
    files = [p for p in (tmp_path / "out").rglob("*.pt")]
    assert len(files) == {"zero3": 6, "universal": 26}.get(to, 4)
    for p in files:
        with zipfile.ZipFile(p) as z:
            assert z.testzip() is None, p


def test_model_files_of_stage_3_say_what_the_engine_and_its_tools_ask_for(
    source: tuple[Job, Path], tmp_path: Path
) -> None:
    job, folder = source
    ckpttool.convert(folder, tmp_path / "out", to="zero3", world_size=2)
    files = [load(save_of(tmp_path / "out") / f"zero_pp_rank_{r}_mp_rank_00_model_states.pt") for r in (0, 1)]
    for m in files:
        assert list(m["module"]) == list(job.weights)
        for n, t in m["module"].items():
            wanted = (0,) if n not in job.buffers else tuple(job.weights[n].shape)
            assert tuple(t.shape) == wanted
            assert t.dtype == (job.weights[n].dtype if n in [*job.buffers, *job.frozen] else BF16)
        assert m["buffer_names"] == ["pos_table", "seen"]
        assert [list(g) for g in m["param_shapes"]] == [
            ["head.bias", "embed.weight"],
            ["fc.weight"],
            ["scale", "fc.bias", "gate"],
        ]
        assert all(type(s) is torch.Size for g in m["param_shapes"] for s in g.values())
        assert m["frozen_param_shapes"] == {"lora.weight": torch.Size([5, 7])}
        assert m["frozen_param_fragments"]["lora.weight"].shape == (18,)
        assert (m["dp_world_size"], m["mp_world_size"], m["optimizer"]) == (2, 1, None)
        assert (m["global_steps"], m["skipped_steps"], m["global_samples"]) == (3, 1, 36)
        assert m["lr_scheduler"] == {"last_epoch": 3}
        assert m["epoch"] == 4 and m["rng"].tolist() == [0, 1, 2, 3, 4]
        assert m["ds_config"]["zero_optimization"]["stage"] == 3 and m["ds_config"]["train_batch_size"] == 12
        assert m["ds_version"] == "0.19.8" and m["data_sampler"] is None and m["random_ltd"] is None
    assert [m["shared_params"] for m in files] == [{"lm_head.weight": "embed.weight"}, {}]


def test_optimizer_files_of_stage_3_hold_classes_of_deepspeed_by_name(source: tuple[Job, Path], tmp_path: Path) -> None:
    ckpttool.convert(source[1], tmp_path / "out", to="zero3", world_size=2)
    for r in (0, 1):
        found = load(save_of(tmp_path / "out") / f"bf16_zero_pp_rank_{r}_mp_rank_00_optim_states.pt")[
            "optimizer_state_dict"
        ]
        assert type(found["loss_scaler"]) is LossScaler
        assert vars(found["loss_scaler"]) == {"cur_scale": 1.0, "dynamic": False}
        assert found["zero_stage"] == 3 and type(found["zero_stage"]).__name__ == "ZeroStageEnum"
        assert (found["partition_count"], found["dynamic_loss_scale"], found["overflow"]) == (2, False, False)
        assert [g["params"] for g in found["optimizer_state_dict"]["param_groups"]] == [[0, 1], [2]]
        assert [g["lr"] for g in found["optimizer_state_dict"]["param_groups"]] == [0.01, 0.02]
        assert [sorted(s) for s in found["optimizer_state_dict"]["state"].values()] == [
            ["exp_avg", "exp_avg_sq", "step"]
        ] * 3
        assert [len(t) for t in found["fp32_flat_groups"]] == [66 + 393, 27, 1 + 5 + 15]


def test_optimizer_files_of_stage_2_say_where_every_parameter_lies(source: tuple[Job, Path], tmp_path: Path) -> None:
    job, folder = source
    ckpttool.convert(folder, tmp_path / "out", to="zero2", world_size=2)
    whole = dict.fromkeys((n for g in job.groups for n in g), 0)
    for r in (0, 1):
        found = load(save_of(tmp_path / "out") / f"bf16_zero_pp_rank_{r}_mp_rank_00_optim_states.pt")[
            "optimizer_state_dict"
        ]
        assert found["partition_count"] == [2, 2] and found["zero_stage"] == 2
        assert found["group_paddings"] == [r, 0]
        assert found["param_alignment_paddings"] == [[0, 0, 0], [0, 0, 0]]
        for g, slices in enumerate(found["param_slice_mappings"]):
            for n, piece in slices.items():
                assert type(piece) is fragment_address
                flat = job.weights[n].reshape(-1)[whole[n] :][: piece.numel]
                held = found["single_partition_of_fp32_groups"][g][piece.start :][: piece.numel]
                assert torch.equal(held, flat)
                whole[n] += piece.numel
    assert whole == {n: job.weights[n].numel() for n in whole}


def test_a_universal_checkpoint_has_a_folder_a_parameter_in_the_form_of_its_stage(
    source: tuple[Job, Path], tmp_path: Path
) -> None:
    job, folder = source
    for stage in (3, 2):
        out = tmp_path / str(stage)
        ckpttool.convert(folder, out, to="universal", options=ckpttool.UniversalOptions(stage=stage))
        tag = (out / "latest_universal").read_text()
        assert tag == "global_step3_universal"
        for n in (n for g in job.groups for n in g):
            slots = {"fp32": job.weights[n], "exp_avg": job.slot(n, "exp_avg"), "exp_avg_sq": job.slot(n, "exp_avg_sq")}
            assert set(os.listdir(out / tag / "zero" / n)) == {f"{s}.pt" for s in (*slots, "step")}
            for slot, t in slots.items():
                x = load(out / tag / "zero" / n / f"{slot}.pt")
                if stage == 3:
                    assert torch.equal(x, t.reshape(-1))
                else:
                    assert x["cat_dim"] == 0 and torch.equal(x["param"], t)
            assert load(out / tag / "zero" / n / "step.pt").item() == 3
        state = load(out / tag / "zero" / "optimizer_state.pt")
        assert [g["lr"] for g in state["param_groups"]] == [0.01, 0.02] and state["zero_stage"] == stage
        if stage == 3:
            assert state["partition_count"] == 1
            # numbers: DeepSpeed gives all groups the step of the first, and each would count one and the same tensor
            assert {g: repr(s["step"]) for g, s in state["optimizer_state_dict"]["state"].items()} == {0: "3", 1: "3"}


def test_one_flat_tensor_keeps_the_step_that_torch_counts_in_at_stage_3(tmp_path: Path) -> None:
    folder = zero3(awkward(groups=[ONE_GROUP]), tmp_path / "in", 2)
    for most, kind in ((None, torch.Tensor), (3, int)):
        out = tmp_path / str(most)
        ckpttool.convert(folder, out, to="universal", options=ckpttool.UniversalOptions(sub_group_size=most))
        (path,) = out.glob("*/zero/optimizer_state.pt")
        assert type(load(path)["optimizer_state_dict"]["state"][0]["step"]) is kind
        assert same_value(read(out)[0]["optim"]["state"], read(folder)[0]["optim"]["state"])


def test_a_loss_scaler_that_scales_comes_back_and_one_of_another_precision_is_kept(tmp_path: Path) -> None:
    job = plain(precision=torch.float16, scaler=DynamicLossScaler(**SCALER))
    folder = zero3(job, tmp_path / "in", 2)
    for r in (0, 1):
        path = save_of(folder) / f"zero_pp_rank_{r}_mp_rank_00_model_states.pt"
        edit(path, lambda t: t["ds_config"].update(fp16={"enabled": True}))
    for to in ("zero3", "zero2"):
        ckpttool.convert(folder, tmp_path / to, to=to, **ranks_for(to, 3))
        found = load(save_of(tmp_path / to) / "zero_pp_rank_1_mp_rank_00_optim_states.pt")["optimizer_state_dict"]
        assert type(found["loss_scaler"]) is DynamicLossScaler and vars(found["loss_scaler"]) == SCALER
        assert found["dynamic_loss_scale"] is True
    ckpttool.convert(folder, tmp_path / "bf", to="zero3", world_size=1, options=ckpttool.ZeroOptions(precision="bf16"))
    ckpttool.convert(
        tmp_path / "bf", tmp_path / "again", to="zero3", world_size=2, options=ckpttool.ZeroOptions(precision="fp16")
    )
    found = load(save_of(tmp_path / "again") / "zero_pp_rank_1_mp_rank_00_optim_states.pt")["optimizer_state_dict"]
    assert vars(found["loss_scaler"]) == SCALER


def test_the_loss_scaler_of_a_stage_0_engine_is_that_of_other_stages(tmp_path: Path) -> None:
    """FP16_UnfusedOptimizer, which MoE without ZeRO has in fp16, saves a part of the scaler, as entries of its own."""
    folder = zero0(plain(precision=torch.float16), tmp_path / "in", 2, masters=True)
    engine = {k: SCALER[k] for k in ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")}
    model = save_of(folder) / "mp_rank_00_model_states.pt"
    edit(model, lambda t: t["optimizer"].update(engine, dynamic_loss_scale=True))
    done = ckpttool.convert(folder, tmp_path / "out", to="zero2", world_size=2)
    found = load(save_of(tmp_path / "out") / "zero_pp_rank_1_mp_rank_00_optim_states.pt")["optimizer_state_dict"]
    assert type(found["loss_scaler"]) is DynamicLossScaler and vars(found["loss_scaler"]) == SCALER
    assert any("no min_scale, delayed_shift, cur_hysteresis," in n for n in done.notes)


def test_step_0_is_written_without_optimizer_state(tmp_path: Path) -> None:
    job = awkward(slots=(), step=None)
    folder = zero3(job, tmp_path / "in", 2)
    for to in ("zero3", "zero2"):
        ckpttool.convert(folder, tmp_path / to, to=to, **ranks_for(to, 3))
        found = load(save_of(tmp_path / to) / "zero_pp_rank_2_mp_rank_00_optim_states.pt")["optimizer_state_dict"]
        base = found["optimizer_state_dict" if to == "zero3" else "base_optimizer_state"]
        assert base["state"] == {} and [g["params"] for g in base["param_groups"]] == [[0], [1]]


@pytest.mark.parametrize("to", ["zero2", "zero3", "universal", "fsdp1"])
def test_an_optimizer_without_state_is_written_and_one_without_parameters_is_refused(to: str, tmp_path: Path) -> None:
    w = numbers("w", (5, 3))
    for name, params in (("sgd", [0]), ("idle", [])):
        groups = [{"lr": 0.1, "params": params}]
        torch.save({"model": {"w": w}, "optimizer": {"state": {}, "param_groups": groups}}, tmp_path / f"{name}.pt")
    how = {} if to == "universal" else {"world_size": 2}
    ckpttool.convert(tmp_path / "sgd.pt", tmp_path / "out", to=to, drop=True, **how)
    with ckpttool.open(tmp_path / "out") as found:
        assert found.read("model.w") == w.numpy().tobytes()
    if to != "fsdp1":
        with pytest.raises(Unsupported, match="trains no parameter"):
            ckpttool.convert(tmp_path / "idle.pt", tmp_path / "other", to=to, drop=True, **how)


def test_a_group_that_is_all_frozen_keeps_its_entry_at_stage_3(tmp_path: Path) -> None:
    job = awkward(**FROZEN_GROUP)
    ckpttool.convert(zero3(job, tmp_path / "in", 2), tmp_path / "out", to="zero3", world_size=3)
    found = load(save_of(tmp_path / "out") / "zero_pp_rank_0_mp_rank_00_optim_states.pt")["optimizer_state_dict"]
    assert [g["params"] for g in found["optimizer_state_dict"]["param_groups"]] == [[0], [], [1]]
    assert [g["lr"] for g in found["optimizer_state_dict"]["param_groups"]] == [0.01, 0.02, 0.03]
    assert difference(gathered3(tmp_path / "out"), job.truth()) == []


def test_options_of_the_command_line_decide_tag_precision_and_sub_groups(
    source: tuple[Job, Path], tmp_path: Path
) -> None:
    ckpttool.convert(
        source[1], tmp_path / "out", to="zero3", world_size=2, options=ckpttool.ZeroOptions(precision="fp32", sub_group_size=1), tag=None
    )  # fmt: skip
    m = load(save_of(tmp_path / "out") / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    assert len(m["param_shapes"]) == 6 and m["module"]["embed.weight"].dtype == torch.float32
    assert m["ds_config"]["bf16"]["enabled"] is False
    assert m["ds_config"]["zero_optimization"]["sub_group_size"] == 1
    assert (save_of(tmp_path / "out") / "zero_pp_rank_1_mp_rank_00_optim_states.pt").exists()


@pytest.mark.parametrize("n", [2, 3])
def test_the_stage_of_the_target_and_of_the_option_must_be_one(
    n: int, source: tuple[Job, Path], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=rf"UniversalOptions.* does not apply to zero{n}, which takes ZeroOptions"):
        ckpttool.convert(source[1], tmp_path / "out", to=f"zero{n}", options=ckpttool.UniversalOptions(stage=5 - n))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("precision", ["fp64", "float8_e4m3fn"])
def test_a_precision_that_no_engine_has_is_refused(precision: str, source: tuple[Job, Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="precision"):
        ckpttool.convert(source[1], tmp_path / "out", to="zero3", options=ckpttool.ZeroOptions(precision=precision))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", ["zero3", "zero2", "universal"])
def test_a_cast_of_slots_is_done_or_refused_and_never_forgotten(
    to: str, source: tuple[Job, Path], tmp_path: Path
) -> None:
    try:
        ckpttool.convert(source[1], tmp_path / "out", to=to, cast={"optim.*.exp_avg": "bfloat16"})
    except (Unsupported, UsageError):
        return
    found = tensors_of(read(tmp_path / "out")[0])
    assert {t.dtype for n, t in found.items() if n.endswith(".exp_avg")} == {BF16}


def test_a_source_without_ranks_needs_a_world_size(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(3)}}, tmp_path / "in.pt")
    with pytest.raises(UsageError, match="world_size is needed"):
        ckpttool.convert(tmp_path / "in.pt", tmp_path / "out", to="zero3")


# ------------------------------------------------------------------------------------------- odd states, written


def full(path: Path, names: dict[str, tuple[int, ...]], trained: list[str] | None = None, **more: Any) -> Path:
    """A state dict in one file, with AdamW's state of what is trained."""
    model = {n: numbers(n or "empty", s) for n, s in names.items()}
    trained = list(names) if trained is None else trained
    state = {n: {"step": torch.tensor(3.0), "exp_avg": model[n] * 2, "exp_avg_sq": model[n] ** 2} for n in trained}
    torch.save(
        {"model": model, "optim": {"state": state, "param_groups": [{"lr": 0.1, "params": trained}]}, **more}, path
    )
    return path


@pytest.mark.parametrize("to", ["zero3", "universal"])
@pytest.mark.parametrize(
    "name", ["a/b", "ünï.wéights", "日本", "a b", "..", ".", "", "a..b", ".a", "a.", "-x", "a\\b", "optimizer_state.pt", "fp32.pt", "a" * 200, "frozen"]
)  # fmt: skip
@pytest.mark.parametrize("frozen", [False, True])
def test_an_odd_name_of_a_parameter_is_kept_or_refused(to: str, name: str, frozen: bool, tmp_path: Path) -> None:
    name += ".weight" if frozen and name not in ("", ".", "..") else ""
    src = full(tmp_path / "in.pt", {name: (3, 2), "z": (4,)}, ["z"] if frozen else None)
    try:
        done = ckpttool.convert(src, tmp_path / "out", to=to, **ranks_for(to, 2))
    except CkpttoolError as e:
        assert type(e) is Unsupported, e
        assert to == "universal" or "\\" in name or "/" in name or not name.strip("."), e
        assert sorted(os.listdir(tmp_path)) == ["in.pt"]
        return
    assert done.digest == ckpttool.digest(src).digest
    assert (
        difference({k: t for k, t in tensors_of(read(tmp_path / "out")[0]).items()}, tensors_of(load_full(src))) == []
    )
    assert all(p.is_relative_to(tmp_path / "out") for p in (tmp_path / "out").rglob("*"))
    assert sorted(p.name for p in tmp_path.iterdir() if not p.name.endswith(".pt")) == ["out"]


@pytest.mark.parametrize("value", [5, {"a": torch.ones(2)}], ids=["number", "tensor"])
@pytest.mark.parametrize(
    "key",
    ["module", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params", "dp_world_size",
     "mp_world_size", "checkpoint_parallel_dimensions", "ds_version", "ds_config", "buffer_names", "lr_scheduler",
     "data_sampler", "random_ltd", "global_steps", "skipped_steps", "global_samples", "per_rank", "scaler", "zero_stage", "num_experts"],
)  # fmt: skip
def test_an_entry_named_like_one_of_deepspeed_is_refused_or_comes_back(key: str, value: Any, tmp_path: Path) -> None:
    src = full(tmp_path / "in.pt", {"w": (3, 2), "b": (4,)}, **{key: value})
    try:
        ckpttool.convert(src, tmp_path / "out", to="zero3" if isinstance(value, int) else "zero2", world_size=2)
    except CkpttoolError as e:
        assert type(e) is Unsupported and f'"{key}' in str(e), e
        assert not (tmp_path / "out").exists()
        return
    assert ckpttool.digest(tmp_path / "out").tensors == ckpttool.digest(src).tensors
    with ckpttool.open(src) as a, ckpttool.open(tmp_path / "out") as b:
        wanted = {n: v.data for n, v in a.checkpoint.values.items()}
        found = {n: v.data for n, v in b.checkpoint.values.items()}
    assert {n: found.get(n) for n in wanted} == wanted


@pytest.mark.parametrize("to", ["zero3", "zero2", "universal"])
def test_a_group_without_hyperparameters_and_worlds_larger_than_every_tensor(to: str, tmp_path: Path) -> None:
    model = {"one": numbers("one", (1,)), "w": numbers("w", (2, 3))}
    state = {n: {"step": 3, "exp_avg": t * 2} for n, t in model.items()}
    torch.save(
        {"model": model, "optim": {"state": state, "param_groups": [{"params": ["w", "one"]}]}}, tmp_path / "in.pt"
    )
    for world in (1, 64):
        out = tmp_path / f"{to}{world}"
        done = ckpttool.convert(tmp_path / "in.pt", out, to=to, **ranks_for(to, world))
        assert done.digest == ckpttool.digest(out).digest == ckpttool.digest(tmp_path / "in.pt").digest
        back = read(out)[0]["optim"]
        assert back["param_groups"] == [{"params": ["w", "one"]}]
        assert {n: s["step"] for n, s in back["state"].items()} == {"w": 3, "one": 3}


@pytest.mark.parametrize("to", ["zero3", "zero2", "universal"])
def test_parameters_of_no_elements_and_of_no_dimensions_are_carried_or_refused(to: str, tmp_path: Path) -> None:
    for k, shapes in enumerate(
        [{"e.weight": (0, 3), "w": (2, 3)}, {"s": (), "w": (2, 3)}, {"s": ()}, {"s": (), "t": ()}]
    ):
        src = full(tmp_path / f"{k}.pt", shapes)
        out = tmp_path / f"out{k}"
        try:
            done = ckpttool.convert(src, out, to=to, **ranks_for(to, 2), drop=k == 0)
        except CkpttoolError as e:
            assert type(e) is Unsupported and k > 0, (k, e)
            continue
        wanted = {n: d for n, d in ckpttool.digest(src).tensors.items() if not n.startswith("optim.state.e.weight")}
        assert wanted.items() <= ckpttool.digest(out).tensors.items(), k
        if to == "zero3" and k in (1, 2, 3):  # a flat tensor of the optimizer is as long as the masters
            optim = load(save_of(out) / "zero_pp_rank_0_mp_rank_00_optim_states.pt")["optimizer_state_dict"]
            for g, s in optim["optimizer_state_dict"]["state"].items():
                assert s["exp_avg"].shape == optim["fp32_flat_groups"][g].shape
        assert all("e.weight" in n and why == "its parameter has no elements" for n, _, why in done.dropped)


def test_tensors_of_several_dtypes_in_one_group_are_written_in_one_that_holds_both(tmp_path: Path) -> None:
    model = {
        "a": numbers("a", (3, 2), BF16),
        "b": numbers("b", (5,), torch.float16),
        "c": numbers("c", (2,), torch.float64),
    }
    state = {n: {"exp_avg": t * 2} for n, t in model.items()}
    torch.save(
        {"model": model, "optim": {"state": state, "param_groups": [{"params": list(model)}]}}, tmp_path / "in.pt"
    )
    done = ckpttool.convert(tmp_path / "in.pt", tmp_path / "out", to="zero3", world_size=2)
    assert [n for n in done.notes if "are written as" in n] == [
        "bfloat16 and float16 and float64 in one flat tensor are written as float64, which holds both exactly"
    ]
    found = gathered3(tmp_path / "out")
    assert all(torch.equal(found[f"model.{n}"], t.double()) for n, t in model.items())
    assert all(torch.equal(found[f"optim.{n}.exp_avg"], (t * 2).double()) for n, t in model.items())


def test_complex_parameters_never_lose_a_part(tmp_path: Path) -> None:
    model = {"a": torch.randn(3, dtype=torch.complex64), "b": torch.randn(4)}
    torch.save({"model": model, "optim": {"state": {}, "param_groups": [{"params": ["a", "b"]}]}}, tmp_path / "in.pt")
    try:
        done = ckpttool.convert(tmp_path / "in.pt", tmp_path / "out", to="zero3", world_size=2)
    except Unsupported:
        return
    assert done.digest == ckpttool.digest(tmp_path / "in.pt").digest


def test_a_save_that_was_converted_twice_has_the_same_bytes(source: tuple[Job, Path], tmp_path: Path) -> None:
    shutil.copytree(source[1], tmp_path / "again")
    for name, path in (("a", source[1]), ("b", tmp_path / "again")):
        ckpttool.convert(path, tmp_path / name, to="zero3", world_size=2)
    one, two = tmp_path / "a", tmp_path / "b"
    assert files_below(one) == files_below(two)
    assert [
        f for f in files_below(one) if f != "ckpttool.json" and (one / f).read_bytes() != (two / f).read_bytes()
    ] == []


def test_a_save_holds_no_path_of_this_machine_and_names_no_class_of_ours(
    source: tuple[Job, Path], tmp_path: Path
) -> None:
    ckpttool.convert(source[1], tmp_path / "out", to="zero3", world_size=2)
    for p in (tmp_path / "out").rglob("*.pt"):
        with zipfile.ZipFile(p) as z:
            pickled = z.read(next(n for n in z.namelist() if n.endswith("data.pkl")))
        assert b"ckpttool" not in pickled and str(tmp_path).encode() not in pickled


def test_a_file_of_another_value_than_a_save_is_named(tmp_path: Path) -> None:
    folder = zero3(plain(), tmp_path / "in", 2)
    save([1], save_of(folder) / "zero_pp_rank_1_mp_rank_00_optim_states.pt")
    with pytest.raises(Corrupt, match=r"zero_pp_rank_1_mp_rank_00_optim_states\.pt holds a list, not a dict"):
        ckpttool.open(folder)


@pytest.mark.parametrize("to", ["zero3", "zero2", "zero1", "universal"])
def test_a_parameter_without_state_is_frozen_or_gets_zeros_where_like_says_that_it_is_trained(
    to: str, tmp_path: Path
) -> None:
    model = {n: numbers(n, shape) for n, shape in {"a": (3, 2), "idle": (5,), "b": (4,)}.items()}
    state = {n: {"step": torch.tensor(3.0), "exp_avg": model[n] * 2, "exp_avg_sq": model[n] ** 2} for n in ("a", "b")}
    groups = [{"lr": 0.1, "params": list(model)}]
    torch.save({"model": model, "optim": {"state": state, "param_groups": groups}}, tmp_path / "in.pt")
    ckpttool.convert(tmp_path / "in.pt", tmp_path / "frozen", to=to, **ranks_for(to, 2))
    assert read(tmp_path / "frozen")[0]["optim"]["param_groups"][0]["params"] == ["a", "b"]
    torch.save(
        {"model": model, "optim": {"state": {n: state["a"] for n in ()}, "param_groups": groups}}, tmp_path / "like.pt"
    )
    done = ckpttool.convert(tmp_path / "in.pt", tmp_path / "out", to=to, **ranks_for(to, 2), like=tmp_path / "like.pt")
    assert [n for n in done.notes if "get zeros and the step of their group: idle" in n]
    optim = read(tmp_path / "out")[0]["optim"]
    assert optim["param_groups"][0]["params"] == ["a", "idle", "b"]
    assert optim["state"]["idle"]["exp_avg"].tolist() == [0.0] * 5 and float(optim["state"]["idle"]["step"]) == 3
    wanted, found = (ckpttool.digest(tmp_path / n).tensors for n in ("in.pt", "out"))
    assert wanted.items() <= found.items()
    assert found.keys() - wanted.keys() == {f"optim.state.idle.{s}" for s in ("step", "exp_avg", "exp_avg_sq")}
    assert ckpttool.verify(tmp_path / "out", read_data=True).recorded == "equal"


@pytest.mark.parametrize("to", ["zero3", "zero1", "universal"])
def test_a_scheduler_that_deepspeed_s_own_do_not_load_is_said_with_what_to_do(to: str, tmp_path: Path) -> None:
    world = {} if to == "universal" else {"world_size": 2}
    source = FIXTURES / "fsdp2_w2_groups" / "ckpt"
    done = ckpttool.convert(source, tmp_path / to, to=to, **world)
    said = [n for n in done.notes if "KeyError 'last_batch_iteration'" in n]
    assert (
        len(said) == 1
        and "deepspeed.initialize(lr_scheduler=...)" in said[0]
        and "load_lr_scheduler_states=False" in said[0]
    )
    file = next((tmp_path / to).glob("*/*_model_states.pt"))
    state = torch.load(file, weights_only=False)["lr_scheduler"]
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD([{"params": [p]} for p in model.parameters()], lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1.0).load_state_dict(state)  # what the note says to do
    schedules = pytest.importorskip("deepspeed.runtime.lr_schedules", exc_type=ImportError)
    with pytest.raises(KeyError, match="last_batch_iteration"):
        schedules.WarmupLR(optimizer).load_state_dict(state)
    without = ckpttool.convert(source, tmp_path / "none", to=to, only=["model", "optim"], **world)
    assert not any("last_batch_iteration" in n for n in without.notes)


@pytest.mark.parametrize("to", ["dcp", "full", "accelerate"])
def test_a_scheduler_of_deepspeed_that_torch_s_do_not_load_is_said_with_what_to_do(to: str, tmp_path: Path) -> None:
    world = {} if to == "full" else {"world_size": 3}
    done = ckpttool.convert(FIXTURES / "zero3_w4" / "ckpt", tmp_path / "out", to=to, **world)
    assert (
        len([n for n in done.notes if "{last_batch_iteration: 2}" in n and "deepspeed.runtime.lr_schedules" in n]) == 1
    )
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    cosine.load_state_dict({"last_batch_iteration": 2})
    assert cosine.last_epoch == 0  # without a word
    schedules = pytest.importorskip("deepspeed.runtime.lr_schedules", exc_type=ImportError)
    same = schedules.WarmupLR(optimizer)
    same.load_state_dict({"last_batch_iteration": 2})
    assert same.last_batch_iteration == 2
    for quiet, name in (("audit", "out.tar.zst"), ("hf", "hf")):
        done = ckpttool.convert(FIXTURES / "zero3_w4" / "ckpt", tmp_path / name, to=quiet)
        assert not any("last_batch_iteration" in n for n in done.notes)


def test_a_scheduler_of_a_deepspeed_job_is_not_judged_again(tmp_path: Path) -> None:
    done = ckpttool.convert(FIXTURES / "zero3_w4" / "ckpt", tmp_path / "out", to="zero3", world_size=2)
    assert not any("last_batch_iteration" in n for n in done.notes)


def step_with(
    module: str, builder: str, base: Any, flats: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> list[tuple[Any, ...]]:
    """Load a base optimizer's state into DeepSpeed's own Adam of a module, as an engine does, and let it step on its flat tensors: the
    arguments of the kernel, which is a stand-in, since it cannot be built here."""
    calls: list[tuple[Any, ...]] = []
    own = pytest.importorskip(f"deepspeed.ops.adam.{module}", exc_type=ImportError)

    def note(*args: Any) -> None:
        calls.append(args)

    kernels = types.SimpleNamespace(
        multi_tensor_adam=note, create_adam=note, adam_update=note, destroy_adam=lambda _: None
    )
    monkeypatch.setattr(own, builder, lambda: types.SimpleNamespace(load=lambda: kernels))
    # as the engine's `load_state_dict` of a stage: one flat tensor a param group, and the groups of the file in place of its own
    params = [torch.nn.Parameter(t.clone()) for t in flats]
    cls = own.FusedAdam if module == "fused_adam" else own.DeepSpeedCPUAdam
    optimizer = cls([{"params": [p]} for p in params], lr=7.0)
    optimizer.load_state_dict(base)
    for p in params:
        p.grad = torch.zeros_like(p)
    calls.clear()
    optimizer.step()
    assert all(list(g)[-1] == "params" for g in optimizer.state_dict()["param_groups"])  # what the next save has
    return calls


@pytest.mark.parametrize(("module", "builder"), [("fused_adam", "FusedAdamBuilder"), ("cpu_adam", "CPUAdamBuilder")])
def test_deepspeed_s_own_adam_steps_with_the_groups_of_torch_s(
    module: str, builder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = torch.nn.Parameter(torch.ones(6))
    adam = torch.optim.AdamW([w], lr=0.5)
    w.grad = torch.ones(6)
    adam.step()
    state = adam.state_dict()
    options = {k: x for k, x in state["param_groups"][0].items() if k != "params"}
    optim = {"state": {"w": state["state"][0]}, "param_groups": [{**options, "params": ["w"]}]}
    torch.save({"model": {"w": w.detach()}, "optim": optim, "step": 1}, tmp_path / "in.pt")
    for to in ("zero1", "zero2"):
        ckpttool.convert(tmp_path / "in.pt", tmp_path / to, to=to, world_size=1)
        (path,) = save_of(tmp_path / to).glob("*_optim_states.pt")
        whole = load(path)["optimizer_state_dict"]
        (group,) = whole["base_optimizer_state"]["param_groups"]
        assert group == {**options, "params": [0], "bias_correction": True}
        masters = whole["single_partition_of_fp32_groups"]
        (call,) = step_with(module, builder, whole["base_optimizer_state"], masters, monkeypatch)
        assert 0.5 in [x for x in call if isinstance(x, float)]
        # of what is added, a reader finds nothing, and of an engine's save everything
        assert read(tmp_path / to)[0]["optim"]["param_groups"] == [{**options, "params": ["w"]}]
        edit(path, lambda tree: tree["optimizer_state_dict"]["base_optimizer_state"]["param_groups"][0].update(
            params=tree["optimizer_state_dict"]["base_optimizer_state"]["param_groups"][0].pop("params")
        ))  # fmt: skip
        assert read(tmp_path / to)[0]["optim"]["param_groups"][0]["bias_correction"] is True


@pytest.mark.parametrize("to", ["zero1", "zero3"])
@pytest.mark.parametrize(
    ("options", "added"),
    [
        ({"lr": 0.5, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}, True),
        ({"lr": 0.5, "betas": (0.9, 0.99), "eps": 1e-8, "bias_correction": False}, False),
        ({"lr": 0.5, "betas": (0.9, 0.99), "eps": 1e-8, "amsgrad": True, "foreach": None}, False),
        ({"lr": 0.5, "betas": (0.9, 0.99), "eps": 1e-8, "foreach": None}, False),  # RAdam
        ({"lr": 0.5, "betas": (0.9, 0.99), "weight_decay": 0.1}, False),  # Lion
        ({"lr": 0.5, "momentum": 0.9}, False),
    ],
)
def test_only_adam_gets_a_bias_correction_and_no_state_is_changed(
    options: dict[str, Any], added: bool, to: str, tmp_path: Path
) -> None:
    state = {"w": {"step": torch.tensor(3.0), "exp_avg": torch.ones(6), "exp_avg_sq": torch.ones(6)}}
    optim = {"state": state, "param_groups": [{**options, "params": ["w"]}]}
    torch.save({"model": {"w": torch.ones(6)}, "optim": optim}, tmp_path / "in.pt")
    ckpttool.convert(tmp_path / "in.pt", tmp_path / "out", to=to, world_size=1)
    (path,) = save_of(tmp_path / "out").glob("*_optim_states.pt")
    whole = load(path)["optimizer_state_dict"]
    (group,) = whole["optimizer_state_dict" if to == "zero3" else "base_optimizer_state"]["param_groups"]
    assert group == {**options, "params": [0], **({"bias_correction": True} if added else {})}
    assert read(tmp_path / "out")[0]["optim"]["param_groups"] == optim["param_groups"]


def test_extra_states_and_buffers_that_ranks_hold_differently_are_listed(tmp_path: Path) -> None:
    model = {
        "w.weight": torch.ones(4, 3),
        "count": torch.arange(3),
        "w._extra_state": {"scale": 1.0, "amax": torch.ones(2)},
    }
    slots = {"w.weight": {"exp_avg": torch.ones(4, 3), "exp_avg_sq": torch.ones(4, 3)}}
    groups = [{"lr": 0.1, "params": ["w.weight"]}]
    torch.save({"model": model, "optim": {"state": slots, "param_groups": groups}}, tmp_path / "in.pt")
    done = ckpttool.convert(tmp_path / "in.pt", tmp_path / "zero", to="zero3", world_size=2)
    assert not done.dropped and {"model.w._extra_state.scale", "model.w._extra_state.amax"} <= {*done.kept}
    (file,) = (tmp_path / "zero").glob("*/zero_pp_rank_1_*model_states.pt")
    tree = torch.load(file, weights_only=False)
    tree["module"]["w._extra_state"]["scale"] = 2.0
    tree["module"]["count"] += 1
    torch.save(tree, file)
    back = ckpttool.convert(tmp_path / "zero", tmp_path / "back.pt", ignore_recorded_digests=True)
    left = {name: why for name, _, why in back.dropped}
    assert left.keys() == {"extra.per_rank.1.model.w._extra_state", "extra.per_rank.1.model.count"}
    assert load_full(tmp_path / "back.pt")["model"]["w._extra_state"]["scale"] == 1.0


@pytest.mark.parametrize("to", ["zero1", "zero3"])
def test_client_state_that_is_called_as_a_component_stays_at_the_root(to: str, tmp_path: Path) -> None:
    own = {"model": "llama", "optim": {"name": "adamw"}, "scheduler": {"kind": "linear"}}
    shutil.copytree(FIXTURES / "zero1_w2" / "ckpt", tmp_path / "in")
    edit(save_of(tmp_path / "in") / "mp_rank_00_model_states.pt", lambda tree: tree | own)
    ckpttool.convert(tmp_path / "in", tmp_path / "out", to=to, world_size=3)
    for file in save_of(tmp_path / "out").glob("*_model_states.pt"):
        tree = load(file)
        assert {key: tree[key] for key in own} == own and "extra" not in tree
        assert tree["lr_scheduler"] == load(save_of(tmp_path / "in") / "mp_rank_00_model_states.pt")["lr_scheduler"]


def test_a_learning_rate_in_a_tensor_of_a_group_that_is_left_out_is_dropped_by_name(tmp_path: Path) -> None:
    weights = {n: torch.ones(4, 2) for n in ("a.weight", "b.weight", "c.weight")}
    state = {n: {"exp_avg": w, "exp_avg_sq": w, "step": torch.tensor(3.0)} for n, w in weights.items() if n[0] != "b"}
    groups = [{"lr": torch.tensor(lr), "params": [n]} for lr, n in zip((0.5, 0.25, 0.125), weights, strict=True)]
    groups[1]["params"] = []

    def save(*order: int) -> Path:
        optim = {"state": state, "param_groups": [groups[i] for i in order]}
        torch.save({"model": weights, "optim": optim}, tmp_path / "in.pt")
        return tmp_path / "in.pt"

    with pytest.raises(Unsupported, match=r"optim\.param_groups\.2\.lr.* Write stage 3"):
        ckpttool.convert(save(0, 1, 2), tmp_path / "out", to="zero1", world_size=2, drop=True)
    with pytest.raises(Unsupported, match=r"optim\.param_groups\.2\.lr.*is left out"):
        ckpttool.convert(save(0, 2, 1), tmp_path / "out", to="zero1", world_size=2)
    done = ckpttool.convert(save(0, 2, 1), tmp_path / "out", to="zero1", world_size=2, drop=True)
    assert done.verified and [n for n, *_ in done.dropped] == ["optim.param_groups.2.lr"]
    assert ckpttool.verify(tmp_path / "out", read_data=True).recorded == "equal"


def test_what_was_data_beside_a_component_stays_data_without_it(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(4, 2)}, "rng": {"torch": torch.arange(3)}, "rng_state": "mine", "extra": 5}
    torch.save(state, tmp_path / "in.pt")
    done = ckpttool.convert(tmp_path / "in.pt", tmp_path / "out", to="zero2", world_size=2, reset=["rng"])
    with ckpttool.open(tmp_path / "out") as opened:
        data = {n: v.data for n, v in opened.checkpoint.values.items() if n.startswith("extra.")}
    assert done.verified and data == {"extra.rng_state": "mine", "extra.extra": 5}


def test_a_tied_weight_has_the_dtype_of_its_owner_in_the_record(tmp_path: Path) -> None:
    cast = {"*layers.0*": "fp16", "*norm*": "fp32"}
    done = ckpttool.convert(
        FIXTURES / "fsdp2_w3_tied_bf16" / "ckpt", tmp_path / "out", to="zero1", world_size=2, cast=cast
    )
    assert done.changed["model.lm_head.weight"] == "bfloat16 became float32"
    assert ckpttool.verify(tmp_path / "out", read_data=True).recorded == "equal"


def test_the_step_of_a_group_is_nothing_new_where_the_own_one_was_dropped(tmp_path: Path) -> None:
    cast = {"*layers.0*step": "fp16"}
    ckpttool.convert(FIXTURES / "fsdp2_w3" / "ckpt", tmp_path / "in", to="dcp", world_size=1, cast=cast)
    done = ckpttool.convert(tmp_path / "in", tmp_path / "out", to="zero3", world_size=3, drop=True)
    assert done.dropped and {n.rpartition(".")[2] for n, *_ in done.dropped} == {"step"}
    assert ckpttool.verify(tmp_path / "out", read_data=True).recorded == "equal"


def test_parameters_of_fused_adam_have_the_step_of_the_last_one_at_stage_0(tmp_path: Path) -> None:
    """It counts in the state of the last parameter of each group alone, and hands that step to the kernel for all."""
    shutil.copytree(FIXTURES / "zero0_w2" / "ckpt", tmp_path / "in")
    (path,) = tmp_path.glob("in/*/mp_rank_00_model_states.pt")
    saved = torch.load(path, weights_only=False)
    inner = saved["optimizer"].get("optimizer_state_dict", saved["optimizer"])
    for group in inner["param_groups"]:
        group["bias_correction"] = True
        for k in group["params"]:
            inner["state"][k]["step"] = 3 if k == group["params"][-1] else 0
    torch.save(saved, path)
    with ckpttool.open(tmp_path / "in") as opened:
        steps = {v.data for v in opened.checkpoint.values.values() if v.path[0] == "optim" and v.path[-1] == "step"}
        assert steps == {3} and any("the step of the last one of their group" in n for n in opened.checkpoint.notes)
    done = ckpttool.convert(tmp_path / "in", tmp_path / "out", to="zero1", world_size=2)
    assert done.verified and not done.dropped


@pytest.mark.parametrize("to", ["zero1", "zero2", "zero3"])
def test_a_step_that_is_a_number_where_others_are_tensors_is_that_of_the_group(to: str, tmp_path: Path) -> None:
    weights = {n: torch.randn(3, 2) for n in ("a.weight", "b.weight", "c.weight")}
    state = {n: {"step": torch.tensor(3.0), "exp_avg": w, "exp_avg_sq": w * w} for n, w in weights.items()}
    state["a.weight"]["step"] = 7
    groups = [{"params": ["a.weight", "b.weight"], "lr": 0.1}, {"params": ["c.weight"], "lr": 0.2}]
    torch.save({"model": weights, "optim": {"state": state, "param_groups": groups}}, tmp_path / "in.pt")
    done = ckpttool.convert(tmp_path / "in.pt", tmp_path / "out", to=to, world_size=2, drop=True)
    (dropped,) = [name for name, *_ in done.dropped]
    steps = {f"optim.state.{n}.step" for n in ("a.weight", "b.weight")}
    with ckpttool.open(tmp_path / "out") as opened:
        (kept,) = steps - {dropped}
        assert {n: v.data for n, v in opened.checkpoint.values.items() if n in steps} in ({}, dict.fromkeys(steps, 7))
        assert kept in opened.checkpoint.values or kept in opened.checkpoint.tensors
