"""DeepSpeed with experts in files of their own, and pipelines: saves of real jobs (fixtures/deepspeed_jobs.py)."""

from __future__ import annotations

import inspect
import json
import lzma
import re
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed.moe.utils as moe_utils
import pytest
import torch
from ckpttool.converters.deepspeed import write_experts
from commands import ckpttool_here
from peers import FIXTURES, load_full
from ranks import torchrun
from zero_files import LossScaler, edit

import ckpttool
from ckpttool.errors import Corrupt, Unsupported, UsageError
from fixtures.deepspeed_jobs import digest, read_truth

SAVES = [
    "moe_z1_ep2_w2",
    "moe_z2_ep2_w4",
    "moe_z0_ep2_w2",
    "autoep_z2_ep2_w4",
    "pipeline_z1_pp2_w4",
    "pipeline_twice_pp2_w2",
]


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deepspeed")
    for archive in sorted((FIXTURES / "deepspeed").glob("*.tar.xz")):
        with lzma.open(archive) as f, tarfile.open(fileobj=f) as tar:
            tar.extractall(folder, filter="data")
    return folder


def truth_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "truth.json").read_text())
    return found


def assert_like_the_ranks(path: Path, digests: dict[str, str]) -> None:
    """What live ranks had is what is read, and nothing else is but counters, buffers and what has no state."""
    with ckpttool.open(path) as opened:
        found = {n: digest(opened[n].torch().clone()) for n in digests}
        rest = {n for n in opened if n not in digests and not n.endswith(".step")}
    assert found == digests
    assert all(re.search(r"\.(scale|factor|gate\.gate\.weight)$", n) for n in rest), rest


@pytest.mark.parametrize("name", SAVES)
def test_a_save_has_the_weights_and_moments_of_the_live_ranks(name: str, saves: Path) -> None:
    assert_like_the_ranks(saves / name / "ck", truth_of(saves / name)["digests"])


@pytest.mark.parametrize(
    ("name", "to", "world", "size", "names"),
    [
        ("moe_z1_ep2_w2", "zero2", 4, 4, ["ep_size_4"]),
        ("moe_z1_ep2_w2", "zero1", 3, 1, ["ep_size_1"]),
        ("moe_z2_ep2_w4", "zero1", 8, 2, ["ep_size_2", "ep_size_2"]),
        ("moe_z0_ep2_w2", "zero2", 2, 1, ["ep_size_1", "ep_size_1"]),
        ("autoep_z2_ep2_w4", "zero1", 8, 4, ["ep_size_4"]),
        ("autoep_z2_ep2_w4", "zero2", 3, 1, ["ep_size_1"]),
    ],
)
def test_experts_are_written_for_any_number_of_expert_parallel_ranks(
    name: str, to: str, world: int, size: int, names: list[str], saves: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    ckpttool.convert(
        saves / name / "ck", out, to=to, world_size=world, options=ckpttool.ZeroOptions(expert_parallel=size)
    )
    assert_like_the_ranks(out, truth_of(saves / name)["digests"])
    step = out / "global_step3"
    assert len(list(step.glob("layer_?_expert_?_mp_rank_00_model_states.pt"))) == 8
    rank = (
        "bf16_" * (truth_of(saves / name)["args"]["dtype"] == "bfloat16")
        + f"zero_pp_rank_{world - 1}_mp_rank_00_optim_states.pt"
    )
    state = torch.load(step / rank, weights_only=False)["optimizer_state_dict"]
    groups = state["base_optimizer_state"]["param_groups"]
    assert [g["name"] for g in groups if g.get("moe")] == names
    assert state["partition_count"] == [world // size if g.get("moe") else world for g in groups]
    # on a rank, experts are numbered from 0
    numbers = {int(m[1]) for g in state["param_slice_mappings"] for n in g if (m := re.search(r"experts\.(\d+)\.", n))}
    assert numbers <= set(range(4 // size))


@pytest.mark.parametrize(("name", "counts"), [("moe_z2_ep2_w4", [4, 4, 2, 2]), ("autoep_z2_ep2_w4", [4, 2])])
def test_experts_go_through_other_layouts_and_back(name: str, counts: list[int], saves: Path, tmp_path: Path) -> None:
    source = saves / name / "ck"
    ckpttool.convert(source, tmp_path / "dcp", to="dcp", world_size=3)
    ckpttool.convert(tmp_path / "dcp", tmp_path / "back", to="zero2", world_size=4)
    with ckpttool.open(tmp_path / "back") as a, ckpttool.open(source) as b:
        assert a.checkpoint.values == b.checkpoint.values
    assert_like_the_ranks(tmp_path / "back", truth_of(saves / name)["digests"])
    for rank in range(4):
        file = next(source.glob(f"global_step3/*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")).relative_to(source)
        a, b = (torch.load(p / file, weights_only=False)["optimizer_state_dict"] for p in (source, tmp_path / "back"))
        key = "single_partition_of_fp32_groups"
        assert all(map(torch.equal, a[key], b[key]))
        assert a["partition_count"] == b["partition_count"] == counts
        mine, theirs = ([{n: vars(x) for n, x in g.items()} for g in s["param_slice_mappings"]] for s in (a, b))
        assert mine == theirs
    for file in source.glob("global_step3/layer_*_expert_*.pt"):
        a, b = (torch.load(p / file.relative_to(source)) for p in (source, tmp_path / "back"))
        assert a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def test_what_autoep_says_of_its_layers_is_of_the_ranks_that_load_it(saves: Path, tmp_path: Path) -> None:
    """DeepSpeed itself makes of the placements what is written as affine_maps."""
    from deepspeed.checkpoint.autoep_affine import autoep_metadata_to_affine_map
    from deepspeed.checkpoint.autoep_zero3_metadata import validate_autoep_zero3_partitioned_metadata

    own = ckpttool.ZeroOptions(expert_parallel=4)
    ckpttool.convert(saves / "autoep_z2_ep2_w4" / "ck", tmp_path / "out", to="zero2", world_size=8, options=own)
    model = torch.load(tmp_path / "out" / "global_step3" / MODEL, weights_only=False)
    validate_autoep_zero3_partitioned_metadata(model["ds_autoep_layers"], require_partitioned=False)
    assert model["universal_checkpoint_info"]["ds_autoep_layers"] == model["ds_autoep_layers"]
    assert model["ds_config"]["expert_parallel"]["autoep_size"] == 4
    for layer in model["ds_autoep_layers"]:
        assert (layer["ep_size"], layer["num_local_experts"]) == (4, 1)
        for name, stated in layer["affine_maps"]["params"].items():
            autoep_metadata_to_affine_map(layer, stated["logical_shape"], name)  # it compares the two


def test_param_groups_that_an_engine_would_divide_elsewhere_are_refused(
    saves: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    divided = inspect.signature(moe_utils.split_params_into_different_moe_groups_for_optimizer).parameters
    assert divided["max_group_size"].default == write_experts.MOST_IN_GROUP
    monkeypatch.setattr(write_experts, "MOST_IN_GROUP", 150)  # six stacks, of 24 elements each on one of two ranks
    source = saves / "autoep_z2_ep2_w4" / "ck"
    for size in (2, 4):
        own = ckpttool.ZeroOptions(expert_parallel=size)
        ckpttool.convert(source, tmp_path / f"{size}", to="zero2", world_size=4, options=own)
    with pytest.raises(Unsupported, match=r"other param groups than those of the source.*regroup"):
        ckpttool.convert(
            source, tmp_path / "1", to="zero2", world_size=4, options=ckpttool.ZeroOptions(expert_parallel=1)
        )


@pytest.mark.parametrize(
    ("name", "frozen"),
    [("moe_z1_ep2_w2", "blocks.0.moe.deepspeed_moe.experts"), ("autoep_z2_ep2_w4", "model.layers.0.mlp.experts")],
)
def test_frozen_experts_are_written_at_stage_1(name: str, frozen: str, saves: Path, tmp_path: Path) -> None:
    ckpttool.convert(saves / name / "ck", tmp_path / "all.pt", to="full")
    tree = load_full(tmp_path / "all.pt")
    for fqn in [n for n in tree["optim"]["state"] if n.startswith(frozen)]:
        del tree["optim"]["state"][fqn]
    for group in tree["optim"]["param_groups"]:
        group["params"] = [n for n in group["params"] if not n.startswith(frozen)]
    torch.save(tree, tmp_path / "less.pt")
    own = ckpttool.ZeroOptions(expert_parallel=4)
    ckpttool.convert(tmp_path / "less.pt", tmp_path / "out", to="zero1", world_size=4, options=own)
    digests = {n: d for n, d in truth_of(saves / name)["digests"].items() if not n.startswith(f"optim.state.{frozen}")}
    assert_like_the_ranks(tmp_path / "out", digests)
    with pytest.raises(Unsupported, match="loads the frozen experts of rank 0 on every rank"):
        ckpttool.convert(tmp_path / "less.pt", tmp_path / "2", to="zero2", world_size=4, options=own)


def test_stacks_without_a_list_of_their_layers_are_refused(saves: Path, tmp_path: Path) -> None:
    ckpttool.convert(saves / "autoep_z2_ep2_w4" / "ck", tmp_path / "all.pt", to="full")
    tree = load_full(tmp_path / "all.pt")
    del tree["ds_autoep_layers"]
    torch.save(tree, tmp_path / "less.pt")
    with pytest.raises(Unsupported, match="convert the save of the AutoEP job itself"):
        ckpttool.convert(tmp_path / "less.pt", tmp_path / "out", to="zero2", world_size=2)


@pytest.mark.parametrize("name", SAVES)
def test_every_save_is_one_torch_file(name: str, saves: Path, tmp_path: Path) -> None:
    ckpttool.convert(saves / name / "ck", tmp_path / "all.pt", to="full")
    tree = load_full(tmp_path / "all.pt")
    found = {f"model.{n}": digest(t) for n, t in tree["model"].items()}
    for fqn, slots in tree["optim"]["state"].items():
        found.update({f"optim.state.{fqn}.{slot}": digest(t) for slot, t in slots.items()})
    digests = truth_of(saves / name)["digests"]
    assert {n: found[n] for n in digests} == digests


TWICE = "pipeline_twice_pp2_w2"


@pytest.mark.parametrize(
    ("name", "world", "like", "changed"),
    [
        ("pipeline_z1_pp2_w4", 2, None, []),
        ("pipeline_z1_pp2_w4", 8, None, []),
        (TWICE, 2, None, []),
        (TWICE, 6, "pipeline_twice_pp3_w3", ["extra.buffer_names", "optim.param_groups.0.params"]),
    ],
)
def test_a_pipeline_is_written_for_the_stages_of_its_job(
    name: str, world: int, like: str | None, changed: list[str], saves: Path, tmp_path: Path
) -> None:
    """Every file has what the engine of the job has in its own; the layers are the same files for any number of stages."""
    source, job = saves / name / "ck", saves / (like or name) / "ck"
    report = ckpttool.convert(source, tmp_path / "out", to="zero1", world_size=world, like=like and job)
    assert sorted(n for n in report.changed if not n.endswith("1.params")) == changed
    assert_like_the_ranks(tmp_path / "out", truth_of(saves / name)["digests"])
    step, theirs = tmp_path / "out" / "global_step3", next(job.glob("global_step*"))
    stages = len(list(theirs.glob("mp_rank_*")))
    models = {f.name for f in theirs.iterdir() if "optim" not in f.name}
    assert {f.name for f in step.iterdir() if "optim" not in f.name} == models
    assert len(list(step.glob("*zero_pp_rank_*_optim_states.pt"))) == world
    for file in models:
        a, b = (torch.load(folder / file, weights_only=False) for folder in (theirs, step))
        if file.startswith("mp_rank"):
            assert b["dp_world_size"] == world // stages
            for key in ("dp_world_size", "global_steps", "global_samples"):
                assert type(a.pop(key)) is type(b.pop(key)) is int
            assert a == b
        else:
            saved = torch.load(source / "global_step3" / file)
            assert a.keys() == b.keys() == saved.keys() and all(torch.equal(saved[n], b[n]) for n in b)
    for file in sorted(source.glob("global_step3/*_optim_states.pt")) if name.endswith(f"w{world}") else ():
        a, b = (torch.load(f / file.name, weights_only=False)["optimizer_state_dict"] for f in (file.parent, step))
        key = "single_partition_of_fp32_groups"
        assert all(map(torch.equal, a[key], b[key]))
        groups = [{**g, "bias_correction": True} for g in a["base_optimizer_state"]["param_groups"]]  # torch's AdamW
        assert groups == b["base_optimizer_state"]["param_groups"]
        for k, slots in a["base_optimizer_state"]["state"].items():
            assert all(torch.equal(t, b["base_optimizer_state"]["state"][k][slot]) for slot, t in slots.items())


def test_a_stage_keeps_its_own_client_state(saves: Path, tmp_path: Path) -> None:
    """For other stages, the file of the first has the state of all."""
    shutil.copytree(saves / TWICE / "ck", tmp_path / "ck")
    own = {"mine": 8, "lr_scheduler": {"last_epoch": 3}}  # a scheduler that the first stage has not
    _edit("mp_rank_01_model_states.pt", lambda tree: tree.update(own))(tmp_path / "ck" / "global_step3")
    ckpttool.convert(tmp_path / "ck", tmp_path / "same", to="zero1", world_size=4)
    like = saves / "pipeline_twice_pp3_w3" / "ck"
    ckpttool.convert(tmp_path / "ck", tmp_path / "other", to="zero1", world_size=3, like=like)
    for out, stages, mine, others in (("same", 2, [7, 8], None), ("other", 3, [7, 7, 7], {"1": own})):
        names = [f"global_step3/mp_rank_{s:02}_model_states.pt" for s in range(stages)]
        trees = [torch.load(tmp_path / out / name, weights_only=False) for name in names]
        assert [t["mine"] for t in trees] == mine
        assert [t["lr_scheduler"] for t in trees] == [
            None,
            *(own["lr_scheduler"] if n == 8 else None for n in mine[1:]),
        ]
        assert trees[0].get("per_rank") == others and "per_rank" not in trees[1]


def test_a_pipeline_goes_through_other_layouts_with_a_save_of_its_job(saves: Path, tmp_path: Path) -> None:
    ckpttool.convert(saves / TWICE / "ck", tmp_path / "dcp", to="dcp", world_size=3)
    like = saves / "pipeline_twice_pp3_w3" / "ck"
    ckpttool.convert(tmp_path / "dcp", tmp_path / "back", to="zero1", world_size=3, like=like)
    assert_like_the_ranks(tmp_path / "back", truth_of(saves / TWICE)["digests"])
    ckpttool.convert(saves / TWICE / "ck", tmp_path / "direct", to="zero1", world_size=3, like=like)
    for file in sorted((tmp_path / "direct").rglob("*.pt")):
        assert file.read_bytes() == (tmp_path / "back" / file.relative_to(tmp_path / "direct")).read_bytes()


OTHER_JOB: dict[str, tuple[str, str, str]] = {
    "a job without a pipeline": (TWICE, "moe_z1_ep2_w2", "is a save of no pipeline"),
    "a pipeline of other layers": (TWICE, "pipeline_z1_pp2_w4", 'no file of a layer has "tied_modules.twice.factor"'),
    "another model": ("moe_z1_ep2_w2", TWICE, "a pipeline has no place for experts"),
}


@pytest.mark.parametrize("case", OTHER_JOB)
def test_a_pipeline_is_not_written_for_a_job_of_other_layers(case: str, saves: Path, tmp_path: Path) -> None:
    name, like, text = OTHER_JOB[case]
    with pytest.raises(Unsupported, match=re.escape(text)):
        ckpttool.convert(saves / name / "ck", tmp_path / "out", to="zero1", world_size=2, like=saves / like / "ck")


def _other_shape(tree: dict[str, Any]) -> None:
    tree["param_shapes"][0]["1.up.weight"] = torch.Size([4, 3])


def _other_group(tree: dict[str, Any]) -> None:
    tree["param_shapes"][1]["1.up.weight"] = tree["param_shapes"][0].pop("1.up.weight")


def _less(tree: dict[str, Any]) -> None:
    del tree["param_shapes"][0]["1.up.weight"]


def _no_buffer(tree: dict[str, Any]) -> None:
    tree["buffer_names"].remove("1.factor")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (_other_shape, '"1.up.weight" is [4, 3], and [3, 4] in the state'),
        (_other_group, '"1.up.weight" is in param group 1 of stage 0, and not in that of the state'),
        (_less, 'no stage trains "1.up.weight"'),
        (_no_buffer, '"1.factor" is a buffer in one of them only'),
        (lambda t: t["param_shapes"].append({"more.weight": torch.Size([1])}), "stage 0 has 3 param groups"),
    ],
)
def test_stages_that_do_not_fit_the_state_are_refused(
    change: Callable[[dict[str, Any]], None], text: str, saves: Path, tmp_path: Path
) -> None:
    """The stages are handed to the writer as a reader gave them, since a reader refuses such saves."""

    from ckpttool.engine import opening

    found = opening.collect_model_hints(opening.OpenOptions(like=saves / TWICE / "ck")).like
    assert found is not None
    stages, buffers = ([[dict(g) for g in s] for s in found.pipeline.stages], [list(b) for b in found.pipeline.buffers])
    change({"param_shapes": stages[0], "buffer_names": buffers[0]})
    job = found.pipeline._replace(stages=stages, buffers=buffers)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Unsupported, match=re.escape(text)):
        patch.setattr("ckpttool.converters.deepspeed.write_zero.find_pipeline", lambda *a: job)
        ckpttool.convert(saves / TWICE / "ck", tmp_path / "out", to="zero1", world_size=2)


@pytest.mark.parametrize("key", ["single_partition_of_fp32_groups", "exp_avg"])
def test_copies_of_a_tied_layer_that_differ_between_stages_are_refused(key: str, saves: Path, tmp_path: Path) -> None:
    shutil.copytree(saves / TWICE / "ck", tmp_path / "ck")

    def change(tree: dict[str, Any]) -> None:
        state = tree["optimizer_state_dict"]
        flat = state[key][0] if key in state else state["base_optimizer_state"]["state"][0][key]
        flat.data[0] += 1  # tied_modules.twice.up.weight

    _edit("zero_pp_rank_0_mp_rank_01_optim_states.pt", change)(tmp_path / "ck" / "global_step3")
    ckpttool.convert(saves / TWICE / "ck", tmp_path / "whole.pt", to="full")
    with pytest.raises(Corrupt, match=r"tied_modules\.twice\.up\.weight"):
        ckpttool.convert(tmp_path / "ck", tmp_path / "all.pt", to="full")


REFUSED: dict[str, tuple[str, str, dict[str, Any], type[Exception], str]] = {
    "stage 3": ("moe_z1_ep2_w2", "zero3", {}, Unsupported, "Write zero1 or zero2"),
    "universal": ("moe_z1_ep2_w2", "universal", {}, Unsupported, "has no place for experts"),
    "three of four experts": ("moe_z1_ep2_w2", "zero1", {"expert_parallel": 3}, UsageError, "must divide both"),
    "AutoEP, stage 3": ("autoep_z2_ep2_w4", "zero3", {}, Unsupported, "Write zero1 or zero2"),
    "AutoEP, universal": ("autoep_z2_ep2_w4", "universal", {}, Unsupported, "has no place for experts"),
    "AutoEP, three of four": ("autoep_z2_ep2_w4", "zero1", {"expert_parallel": 3}, UsageError, "must divide both"),
    "a pipeline, stage 2": (
        "pipeline_z1_pp2_w4",
        "zero2",
        {},
        Unsupported,
        "no engine would load one at stage 2. Write zero1",
    ),
    "a pipeline, universal": ("pipeline_z1_pp2_w4", "universal", {}, Unsupported, "asks for files of layers"),
    "two stages on three ranks": ("pipeline_z1_pp2_w4", "zero1", {}, UsageError, "cannot share 2 stages"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_engine_would_load_is_not_written(case: str, saves: Path, tmp_path: Path) -> None:
    name, to, own, error, text = REFUSED[case]
    kind = ckpttool.UniversalOptions if to == "universal" else ckpttool.ZeroOptions
    how = {} if to == "universal" else {"world_size": 3}
    with pytest.raises(error, match=text):
        ckpttool.convert(saves / name / "ck", tmp_path / "out", to=to, options=kind(**own), **how)
    assert not (tmp_path / "out").exists()


def _exchange(a: str, b: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        first, second = folder / a, folder / b
        data = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(data)

    return change


def _remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _rename(name: str, to: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).rename(folder / to)

    return change


def _edit(name: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        tree = torch.load(folder / name, weights_only=False)
        change(tree)
        torch.save(tree, folder / name)

    return edit


def _rename_expert(tree: dict[str, Any]) -> None:
    for places in tree["optimizer_state_dict"]["param_slice_mappings"]:
        for name in [n for n in places if "deepspeed_experts" in n][:1]:
            places[f"other.{name}"] = places.pop(name)


def _grow_stack(groups: list[dict[str, torch.Size]]) -> None:
    for shapes in groups:
        for name in [n for n in shapes if ".experts." in n][:1]:
            shapes[name] = torch.Size((shapes[name][0] + 1, *shapes[name][1:]))


def _rename_to_number(tree: dict[str, Any]) -> None:
    for places in tree["optimizer_state_dict"]["param_slice_mappings"]:
        places[0] = places.pop(next(iter(places)))


def _rename_factor(tree: dict[str, Any]) -> None:
    tree["other"] = tree.pop("factor")


def test_files_of_a_tied_layer_may_hold_other_buffers(saves: Path, tmp_path: Path) -> None:
    """Found by all targets of a mutant of tests/torture: deepspeed-pipeline_twice:2026112910390."""
    copy = shutil.copytree(saves / TWICE / "ck", tmp_path / "copy")
    _edit("layer_03-model_states.pt", _rename_factor)(copy / "global_step3")
    done = ckpttool.convert(copy, tmp_path / "out", to="zero1", world_size=2)
    assert done.verified and not done.dropped


def _scale_second_stage(folder: Path) -> None:
    scaler = LossScaler(cur_scale=8.0, dynamic=False)
    for file in folder.glob("*_mp_rank_01_optim_states.pt"):
        edit(file, lambda t: t["optimizer_state_dict"].update(loss_scaler=scaler))


EXPERT = "layer_{}_expert_{}_mp_rank_00_model_states.pt"
MODEL = "mp_rank_00_model_states.pt"
DAMAGE: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "a lost expert": ("moe_z1_ep2_w2", _remove(EXPERT.format(1, 2)), "layer_1_expert_2_mp_rank_00"),
    "a fifth expert": ("moe_z1_ep2_w2", _rename(EXPERT.format(0, 3), EXPERT.format(0, 4)), "layer_0_expert_3"),
    "experts exchanged": ("moe_z1_ep2_w2", _exchange(EXPERT.format(0, 1), EXPERT.format(0, 2)), "was saved under the name"),
    "layers exchanged": ("moe_z1_ep2_w2", _exchange(EXPERT.format(0, 1), EXPERT.format(1, 1)), "was saved under the name"),
    "a third layer": ("moe_z1_ep2_w2", _edit(MODEL, lambda t: t.update(num_experts=[4])), "num_experts says 1"),
    "ranks exchanged": (
        "moe_z2_ep2_w4",
        _exchange("bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt"),
        "was saved under the name",
    ),
    "the other order of ranks": (
        "moe_z2_ep2_w4",
        _edit(MODEL, lambda t: t["ds_config"].update(use_data_before_expert_parallelism=True)),
        "lists other parts",
    ),
    "an expert of a layer that is not there": (
        "moe_z1_ep2_w2",
        _edit("zero_pp_rank_1_mp_rank_00_optim_states.pt", _rename_expert),
        "lists other parts",
    ),
    "a part without a name": (
        "moe_z1_ep2_w2",
        _edit("zero_pp_rank_1_mp_rank_00_optim_states.pt", _rename_to_number),
        "lists other parts",
    ),
    "a lost optimizer of experts": ("moe_z0_ep2_w2", _remove("expp_rank_1_mp_rank_00_optim_states.pt"), "expp_rank_0"),
    "experts with another loss scale, without ZeRO": (
        "moe_z0_ep2_w2",
        _edit("expp_rank_1_mp_rank_00_optim_states.pt", lambda t: t["optimizer"].update(cur_scale=8.0)),
        "loss scaler differs",
    ),
    "a model file of another save, without ZeRO": (
        "moe_z0_ep2_w2",
        _edit(MODEL, lambda t: t["optimizer"]["optimizer_state_dict"]["state"][0]["exp_avg"].add_(1)),
        "its optimizer is not that of",
    ),
    "an optimizer without ZeRO beside one with": (
        "moe_z1_ep2_w2",
        lambda folder: torch.save({"optimizer": {"state": {}}}, folder / "expp_rank_0_mp_rank_00_optim_states.pt"),
        "It is of another save",
    ),
    "a tensor parallel expert": (
        "moe_z1_ep2_w2", _rename(EXPERT.format(0, 0), "layer_0_expert_0_mp_rank_01_model_states.pt"), "parallel rank 1",
    ),
    "a stack of more experts than have files": (
        "autoep_z2_ep2_w4", _edit(MODEL, lambda t: _grow_stack(t["param_shapes"])), "there are files of 2 experts",
    ),
    "a lost layer": ("pipeline_z1_pp2_w4", _remove("layer_03-model_states.pt"), "layer_03"),
    "a lost stage": ("pipeline_z1_pp2_w4", _remove("mp_rank_01_model_states.pt"), "mp_world_size is 2"),
    "a stage of another step": (
        "pipeline_z1_pp2_w4", _edit("mp_rank_01_model_states.pt", lambda t: t.update(global_steps=2)), "global_steps is 2, rank 0 says 3",
    ),
    "a stage with another loss scale": ("pipeline_z1_pp2_w4", _scale_second_stage, "loss_scaler differs"),
    "a tensor parallel layer": (
        "pipeline_z1_pp2_w4", _rename("layer_03-model_states.pt", "layer_03-model_01-model_states.pt"), "parallel rank 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_save_is_refused_with_the_file(case: str, saves: Path, tmp_path: Path) -> None:
    name, change, text = DAMAGE[case]
    shutil.copytree(saves / name / "ck", tmp_path / "ck")
    change(tmp_path / "ck" / "global_step3")
    with pytest.raises((Corrupt, Unsupported), match=re.escape(text)):
        ckpttool.open(tmp_path / "ck").close()


def test_masters_that_differ_between_expert_parallel_ranks_are_said(saves: Path, tmp_path: Path) -> None:
    shutil.copytree(saves / "moe_z0_ep2_w2" / "ck", tmp_path / "ck")
    change = _edit("expp_rank_1_mp_rank_00_optim_states.pt", lambda t: t["optimizer"]["fp32_groups"][0][0].add_(1))
    change(tmp_path / "ck" / "global_step3")
    with ckpttool.open(tmp_path / "ck") as opened:
        assert any("ranks differ in the state of 1 parameters" in n for n in opened.checkpoint.notes)


def test_the_weights_of_a_save_without_zero_are_read_alone(saves: Path) -> None:
    with ckpttool.open(saves / "moe_z0_ep2_w2" / "ck", only=["model"]) as opened:
        assert {n.partition(".")[0] for n in opened} == {"model"}


def test_inspect_says_what_a_pipeline_has_twice(saves: Path) -> None:
    done = ckpttool_here("inspect", str(saves / "pipeline_z1_pp2_w4" / "ck"))
    assert "tied_modules.embed.weight" in done.stdout + done.stderr


@pytest.mark.live
@pytest.mark.parametrize("name", ["moe_z1_ep2_w2", "autoep_z2_ep2_w4"])
def test_deepspeed_resumes_at_another_number_of_expert_parallel_ranks(name: str, saves: Path, tmp_path: Path) -> None:
    """The real engine is the judge: what its ranks hold after loading, and the losses of the next three steps."""
    own = ckpttool.ZeroOptions(expert_parallel=1)
    ckpttool.convert(saves / name / "ck", tmp_path / "ck", to="zero2", world_size=2, options=own)
    truth = truth_of(saves / name)
    args = {"kind": truth["args"]["kind"], "stage": 2, "ep": 1, "load": str(tmp_path / "ck"), "out": str(tmp_path)}
    said = torchrun(2, str(FIXTURES / "deepspeed_jobs.py"), json.dumps(args))
    assert (tmp_path / "result.json").exists(), said[-4000:]
    assert read_truth(tmp_path) == truth["digests"]
    assert json.loads((tmp_path / "result.json").read_text())["losses"] == pytest.approx(truth["losses"], abs=1e-6)


@pytest.mark.live
@pytest.mark.parametrize(
    ("name", "world", "like", "off"),
    [(TWICE, 3, "pipeline_twice_pp3_w3", 1e-6), ("pipeline_z1_pp2_w4", 2, None, 2e-3)],  # bf16 sums of fewer ranks
)
def test_deepspeed_resumes_a_pipeline_at_other_stages_and_ranks(
    name: str, world: int, like: str | None, off: float, saves: Path, tmp_path: Path
) -> None:
    job = like and saves / like / "ck"
    ckpttool.convert(saves / name / "ck", tmp_path / "ck", to="zero1", world_size=world, like=job)
    truth = truth_of(saves / name)
    stages = 3 if like else 2
    args = {**truth["args"], "stages": stages, "load": str(tmp_path / "ck"), "out": str(tmp_path)}
    said = torchrun(world, str(FIXTURES / "deepspeed_jobs.py"), json.dumps(args))
    assert (tmp_path / "result.json").exists(), said[-4000:]
    assert read_truth(tmp_path) == truth["digests"]
    assert json.loads((tmp_path / "result.json").read_text())["losses"] == pytest.approx(truth["losses"], abs=off)
