"""DCP folders for meshes of several dimensions: torch's own jobs read them, each rank from one file."""

from __future__ import annotations

import json
import os
import re
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ckpttool.converters.meshes import Cut, Mesh
from ckpttool.converters.options import MeshOptions
from ranks import LIVE, torchrun
from sampling import sample
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

import ckpttool
from ckpttool.errors import UsageError

sys.path.insert(0, str(LIVE))
import mesh_resume
import stages_and_contexts

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
FIXTURES = Path(__file__).parents[2] / "fixtures"
MESHES = ("dp_replicate=2,dp_shard=2", "dp_shard=2,tp=2,ep=2")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what one process has after two steps, and its next losses."""
    folder = tmp_path_factory.mktemp("mesh")
    model = mesh_resume.Model()
    opt = mesh_resume.make_optimizer(model)
    mesh_resume.train(model, opt, range(2))
    msd, osd = get_state_dict(model, opt)
    torch.save({"model": msd, "optim": osd}, folder / "state.pt")
    (folder / "losses.json").write_text(json.dumps(mesh_resume.train(model, opt, range(2, 4))))
    (folder / "plan.txt").write_text(mesh_resume.PLAN)
    return folder


def write(folder: Path, mesh: str) -> Path:
    plan = str(folder / "plan.txt") if "tp=" in mesh else None
    ckpttool.convert(
        folder / "state.pt", folder / mesh, to="dcp", options=MeshOptions(mesh, plan), canonical_keys=True, force=True
    )
    return folder / mesh


def test_jobs_of_every_mesh_resume_and_each_rank_reads_one_file(trained: Path) -> None:
    for mesh in MESHES:
        write(trained, mesh)
    said = torchrun(4, "mesh_resume.py", str(trained), *MESHES)
    assert (trained / "found.json").exists(), said
    found = json.loads((trained / "found.json").read_text())
    want = json.loads((trained / "losses.json").read_text())
    for mesh in MESHES:
        assert found[mesh]["odd"] == [], mesh
        assert found[mesh]["losses"] == pytest.approx(want, rel=1e-5), mesh
        replica = 2 if "dp_replicate" in mesh else 4
        for rank, files in enumerate(found[mesh]["files"]):
            own = {f"__{rank % replica}_0.distcp"}
            for name, places in files.items():
                assert len(places) == 1, name
                if name.startswith("optim.param_groups") or name.endswith(".step"):
                    own_or_first = {"__0_0.distcp"}  # what every rank has whole
                elif "tp=2" in mesh and (
                    "norm" in name or "down.bias" in name or ("experts" in name and "ep=" not in mesh)
                ):
                    own_or_first = {f"__{rank // 2 * 2}_0.distcp"}  # what both ranks of tp have
                else:
                    own_or_first = own
                assert set(places) == own_or_first, (mesh, rank, name)


CONTEXTS, STAGES = "dp_shard=2,cp=2", "pp=2,dp_shard=2"
ROWS = [(CONTEXTS, CONTEXTS), (STAGES, CONTEXTS), (STAGES, STAGES)]
RESUMES = sample("meshes with stages or contexts", ROWS, [(STAGES, CONTEXTS)])


@pytest.mark.live
@pytest.mark.slow
def test_jobs_with_stages_and_with_divided_contexts_resume(tmp_path: Path) -> None:
    """Of torch itself, under FSDP2. Each job of four ranks takes 6 s of CPU, which its imports are."""

    def run(name: str, mesh: str, *source: str) -> None:
        (tmp_path / name).mkdir()
        said = torchrun(4, "stages_and_contexts.py", str(tmp_path / name), mesh, *source)
        assert (tmp_path / name / "found.json").exists(), said
        losses = json.loads((tmp_path / name / "found.json").read_text())
        assert losses == pytest.approx(want, abs=1e-6, rel=0), name

    model = stages_and_contexts.Model()
    want = stages_and_contexts.train_alone(model, stages_and_contexts.make_optimizer(model), range(4))[2:]
    for source in {source for source, _ in RESUMES}:
        run(source, source)
    for source, mesh in RESUMES:
        name = f"{source} in {mesh}"
        out = tmp_path / f"for {name}"
        # the optimizer of a job with stages has flat keys, as in its own checkpoint
        plain = mesh == CONTEXTS
        ckpttool.convert(tmp_path / source / "ckpt", out, to="dcp", options=MeshOptions(mesh), canonical_keys=plain)
        run(name, mesh, str(out))
        before, after = (torch.load(tmp_path / n / "whole.pt", weights_only=True) for n in (source, name))
        assert before.keys() == after.keys() and all(torch.equal(t, after[n]) for n, t in before.items())
    for source in {source for source, _ in RESUMES}:
        ckpttool.convert(tmp_path / source / "ckpt", tmp_path / f"{source}.pt", to="full")
        tree = torch.load(tmp_path / f"{source}.pt", weights_only=True)
        model = stages_and_contexts.Model()
        opt = stages_and_contexts.make_optimizer(model)
        flat = StateDictOptions(flatten_optimizer_state_dict=source == STAGES)
        set_state_dict(model, opt, model_state_dict=tree["model"], optim_state_dict=tree["optim"], options=flat)
        assert stages_and_contexts.train_alone(model, opt, range(2, 4)) == pytest.approx(want, abs=1e-6, rel=0)


def test_another_mesh_loads_what_was_written_for_one(trained: Path) -> None:
    truth = torch.load(trained / "state.pt", weights_only=True)
    state = {"model": {n: torch.zeros_like(t) for n, t in truth["model"].items()}}
    dcp.load(state, checkpoint_id=str(write(trained, "dp_shard=3,tp=2,ep=2")), no_dist=True)
    assert all(torch.equal(t, truth["model"][n]) for n, t in state["model"].items())


@pytest.mark.parametrize("sizes", [(1, 2), (2, 2), (3, 2), (4, 2), (2, 3), (2, 4), (5, 1)])
def test_boxes_are_those_that_a_dtensor_of_torch_has(sizes: tuple[int, int]) -> None:
    shard, tp = sizes
    mesh = Mesh(dp_shard=shard, tp=tp)
    described = 0
    for rows, columns, tp_dim, fsdp_dim in product((1, 3, 8, 12, 66, 131), (6, 12), (None, 0, 1), (0, 1)):
        cut = Cut(tp=tp_dim, fsdp=fsdp_dim)
        on_tp = Replicate() if tp_dim is None else Shard(tp_dim)
        split = tp > 1 and tp_dim == fsdp_dim
        on_fsdp = _StridedShard(fsdp_dim, split_factor=tp) if split else Shard(fsdp_dim)
        try:
            given = {b.rank: (b.shape, b.start) for b in mesh.boxes("w", (rows, columns), cut)}
        except UsageError:
            continue  # judged by the jobs that torch refuses, below
        described += 1
        for rank in range(shard * tp):
            at = divmod(rank, tp)
            shape, start = _compute_local_shape_and_global_offset((rows, columns), sizes, list(at), (on_fsdp, on_tp))
            first = rank if tp_dim is not None else rank // tp * tp
            assert given.get(first) == ((shape, start) if 0 not in shape else None), (rows, columns, cut, rank)
    assert described > 30


def test_what_one_box_does_not_describe_is_refused() -> None:
    # 17 rows over tp=2 are 9 and 8, over dp_shard=4 3, 3, 3, 0 and 2, 2, 2, 2: rank 6 has none, and its DTensor says one
    shape, _ = _compute_local_shape_and_global_offset(
        (17, 4), (4, 2), [3, 0], (_StridedShard(0, split_factor=2), Shard(0))
    )
    assert shape == (1, 4)
    with pytest.raises(UsageError, match=r'"w" is \[17, 4\], and rank 6 of 8'):
        Mesh(dp_shard=4, tp=2).boxes("w", (17, 4), Cut(tp=0))
    # two weights side by side: the first rank of tp has rows 0 to 3 and 8 to 11, and DCP would read rows 0 to 7
    packed = (_StridedShard(0, split_factor=2),)
    assert _compute_local_shape_and_global_offset((16, 4), (2,), [0], packed) == ((8, 4), (0, 0))
    with pytest.raises(UsageError, match="does not describe as one box"):
        Mesh(dp_shard=2, tp=2).boxes("gate_up", (16, 4), Cut(tp=0, packed=2))
    with pytest.raises(UsageError, match="only into 2 equal parts"):
        Mesh(dp_shard=2, tp=2).boxes("w", (8, 5), Cut(tp=0, fsdp=1))


def test_few_experts_are_divided_along_dimension_1_as_torchtitan_does(trained: Path) -> None:
    with ckpttool.open(write(trained, "dp_shard=8,ep=4")) as opened:
        shapes = {c.shape for c in opened.checkpoint.tensors["model.layers.0.experts.w2"].chunks}
    assert shapes == {(2, 5, 12)}  # of [6, 10, 12], over ep=4 and then in halves; the last rank of ep has none


def test_a_folder_has_the_chunks_and_files_that_torch_saved_for_the_mesh(tmp_path: Path) -> None:
    real = FIXTURES / "fsdp2_w4_tp" / "ckpt"
    ckpttool.convert(real, tmp_path / "one", to="dcp", world_size=1)
    ckpttool.convert(tmp_path / "one", tmp_path / "two", to="dcp", options=MeshOptions("dp_shard=2,tp=2"), like=real)
    with ckpttool.open(real) as a, ckpttool.open(tmp_path / "two") as b:
        for name, t in a.checkpoint.tensors.items():
            there = b.checkpoint.tensors[name].chunks
            assert sorted(there.boxes()) == sorted(t.chunks.boxes()), name
            if len(there) == 4:
                assert sorted(zip(there.boxes(), there.file, strict=True)) == sorted(
                    zip(t.chunks.boxes(), t.chunks.file, strict=True)
                )


@pytest.mark.parametrize(
    ("mesh", "plan", "said"),
    [
        ("dp_shard=2,tp=2", None, "nothing says which tensors tensor parallelism divides"),
        ("tp=2,dp=2", None, "'dp=2' is no dimension with its size"),
        ("dp_shard=2,dp_shard=2", None, "each of them once"),
        ("dp_shard=3,ep=2", None, "2 does not divide 3"),
        ("dp_shard=99999,tp=9", None, "has 899,991 ranks; there may be 131,072"),
        ("dp_shard=2,tp=2", "wrong", "'wrong' is not a name and a style"),
        ("dp_shard=2,tp=2", "# nothing\nlayers.*.up sideways", "line 2: 'layers.*.up sideways'"),
        ("dp_shard=2,tp=2", "layers.*.upp colwise", "no parameter is named 'layers.*.upp'"),
        ("dp_shard=2,tp=2", "head shard(2)", "has no dimension 2"),
        (None, "head colwise", "tp_plan says how the dimensions of mesh divide"),
    ],
)
def test_what_is_wrong_with_a_mesh_or_a_plan_is_said(trained: Path, mesh: str, plan: str | None, said: str) -> None:
    (trained / "other.txt").write_text(plan or "")
    with pytest.raises(UsageError, match=re.escape(said)):
        options = MeshOptions(mesh, str(trained / "other.txt") if plan else None)
        ckpttool.plan(trained / "state.pt", trained / "new", to="dcp", options=options)


def test_a_plan_that_is_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for ever
    with pytest.raises(UsageError, match="is not a regular file"):
        MeshOptions("tp=2", str(tmp_path / "pipe"))


def test_a_plan_that_is_too_long_is_not_cut(tmp_path: Path) -> None:
    (tmp_path / "plan").write_text("a" * (1 << 20) + "b")
    with pytest.raises(UsageError, match=r"has more than 1,048,576 characters"):
        MeshOptions("tp=2", str(tmp_path / "plan"))


def test_a_template_without_tensor_parallelism_says_nothing_about_it(trained: Path) -> None:
    with pytest.raises(UsageError, match="FSDP alone divides tensors as they are divided there"):
        ckpttool.plan(
            trained / "state.pt",
            trained / "new",
            to="dcp",
            options=MeshOptions("tp=2"),
            like=write(trained, "dp_shard=2"),
        )


def test_one_dimension_is_the_same_folder_as_a_world_size(trained: Path) -> None:
    ckpttool.convert(trained / "state.pt", trained / "flat", to="dcp", world_size=3, canonical_keys=True)
    mesh = write(trained, "dp_shard=3")
    for path in [*trained.glob("flat/*.distcp"), trained / "flat" / ".metadata"]:
        assert path.read_bytes() == (mesh / path.name).read_bytes()
    with pytest.raises(UsageError, match="world_size=4: mesh has 3 ranks"):
        ckpttool.plan(trained / "state.pt", trained / "new", to="dcp", world_size=4, options=MeshOptions("dp_shard=3"))
