"""Saves of DeepSpeed's AutoTP: tests/live/autotp_job.py made fixtures/autotp, and resumes what is written."""

from __future__ import annotations

import json
import shutil
import tarfile
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import peers
import pytest
import torch
import zero_files
from ckpttool.converters.deepspeed.tensor_cuts import ParameterCut, cut_for_ranks, parse_parameter_map
from ranks import torchrun
from safetensors.torch import load_file

import ckpttool
from ckpttool.errors import CkpttoolError, Corrupt, Unsupported, UsageError

ARCHIVES = peers.FIXTURES / "autotp"
CASES = sorted(p.name.removesuffix(".tar.xz") for p in ARCHIVES.glob("*.tar.xz"))
TP3, TP2 = "tp3_z2_fp32", "tp2_dp2_z1_bf16"
MODEL = "global_step3/mp_rank_{:02}_model_states.pt"
INFO = "universal_checkpoint_info"
Unpack = Callable[[str], Path]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Unpack:
    """A case on disk."""
    root = tmp_path_factory.mktemp("autotp")

    @cache
    def unpack(case: str) -> Path:
        with tarfile.open(ARCHIVES / f"{case}.tar.xz") as archive:
            archive.extractall(root, filter="data")
        return root / case

    return unpack


def held(path: Path) -> dict[str, torch.Tensor]:
    """All masters and moments of a checkpoint."""
    with ckpttool.open(path) as opened:
        return {n: opened[n].torch() for n in opened if n.startswith(("model.", "optim.")) and not n.endswith(".step")}


@pytest.mark.parametrize("case", CASES)
def test_masters_and_moments_are_those_of_the_ranks(case: str, unpacked: Unpack) -> None:
    folder = unpacked(case)
    truth, found = load_file(folder / "truth.safetensors"), held(folder / "ckpt")
    assert found.keys() - truth.keys() == {"model.layers.0.seen"} and not truth.keys() - found.keys()
    for name, x in truth.items():
        assert found[name].dtype == x.dtype and torch.equal(found[name], x), name
    about = json.loads((folder / "case.json").read_text())
    with ckpttool.open(folder / "ckpt") as opened:
        assert opened.checkpoint.world_size == about["world"]
        assert sorted(set(opened.checkpoint.ranks.values())) == list(range(about["world"]))
        steps = {n: opened[n].torch() for n in opened if n.endswith(".step")}
        assert len(steps) == 8
        # DeepSpeed has one for each flat tensor, and its safe_get_full_optimizer_state, which made the truth, gives none
        for path in (folder / "ckpt" / "global_step3").glob("*_optim_states.pt"):
            flat = zero_files.load(path)["optimizer_state_dict"]
            base = flat["base_optimizer_state" if "base_optimizer_state" in flat else "optimizer_state_dict"]
            own = base["state"][0]["step"]
            assert all(x.dtype == own.dtype and torch.equal(x, own) for x in steps.values()) and float(own) == 3
        assert opened.checkpoint.value("trainer.global_steps") == 3
        assert opened.checkpoint.value("optim.param_groups.0.lr") == 0.01
        assert not [n for n in opened.checkpoint.values if INFO in n], "it would say of whole weights how they are cut"
        assert ckpttool.verify(folder / "ckpt", read_data=True).numbers == "ok"


@pytest.mark.parametrize("to", ["dcp", "full", "zero3", "zero1", "universal", "hf"])
@pytest.mark.parametrize("case", CASES)
def test_it_is_written_in_other_layouts(case: str, to: str, unpacked: Unpack, tmp_path: Path) -> None:
    folder = unpacked(case)
    target = tmp_path / ("out.pt" if to == "full" else "out")
    world: dict[str, Any] = {} if to in ("full", "hf", "universal") else {"world_size": 3}
    ckpttool.convert(folder / "ckpt", target, to=to, **world)
    truth, found = load_file(folder / "truth.safetensors"), held(target)
    kept = [n for n in truth if to != "hf" or n.startswith("model.")]
    assert all(torch.equal(found[n], truth[n]) for n in kept) and len(kept) == (8 if to == "hf" else 24)


def changed(unpacked: Unpack, case: str, to: Path) -> Path:
    """A copy of the save."""
    return Path(shutil.copytree(unpacked(case) / "ckpt", to / "in"))


def rewrite(path: Path, change: Callable[[Any], Any]) -> None:
    """Change a file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        zero_files.edit(path, change)


def every_map(change: Callable[[dict[str, Any]], Any], name: str) -> Callable[[Path], None]:
    """Change the map of a parameter in the model files of all ranks."""

    def edit(folder: Path) -> None:
        for path in sorted(folder.glob("global_step3/*_model_states.pt")):
            rewrite(path, lambda tree: change(tree[INFO]["affine_map"]["params"][f"^{name}$"]) and None)

    return edit


def flat_master(rank: int, element: int) -> Callable[[Path], None]:
    """Change an element of the flat masters of a rank, at stage 2 of three ranks with one group."""

    def change(tree: Any) -> None:
        tree["optimizer_state_dict"]["single_partition_of_fp32_groups"][0].detach()[element] += 1

    return lambda folder: rewrite(folder / f"global_step3/zero_pp_rank_0_mp_rank_{rank:02}_optim_states.pt", change)


def in_model(rank: int, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """Change the model file of a rank."""
    return lambda folder: rewrite(folder / MODEL.format(rank), lambda tree: change(tree) and None)


HEAD = r"lm_head\.weight"
ATTACKS: dict[str, tuple[Callable[[Path], Any], type[CkpttoolError], str]] = {
    "no map at all": (
        in_model(0, lambda t: t[INFO].pop("affine_map")), Unsupported,
        "has no affine_map.*Load it once with DeepSpeed 0.19 or newer in the same job, and save",
    ),
    "Megatron-DeepSpeed": (
        in_model(0, lambda t: t.update({INFO: {"universal_checkpoint_version": 0.2}, "checkpoint_version": 3.0})), Unsupported,
        "of Megatron-DeepSpeed.*ds_to_universal.py.*--tensor-model-parallel-size 1",
    ),
    "no info on rank 1": (in_model(1, lambda t: t.pop(INFO)), Corrupt, "universal_checkpoint_info is other than"),
    "a later version": (in_model(0, lambda t: t[INFO]["affine_map"].update(version=2)), Unsupported, "version 2"),
    "a parameter without a map": (
        lambda folder: [in_model(r, lambda t: t[INFO]["affine_map"]["params"].pop(f"^{HEAD}$"))(folder) for r in range(3)],
        Unsupported, 'no map of "lm_head.weight"',
    ),
    "a scaled piece": (every_map(lambda m: m["ranks"][1]["pieces"][0].update(scale=0.5), HEAD), Unsupported, "times 0.5"),
    "a piece moved by a row": (
        every_map(lambda m: m["ranks"][1]["pieces"][0].update(source=[43 * 4, [4, 1]]), HEAD),
        Unsupported, "do not cover the whole exactly once",
    ),
    "a piece left out": (every_map(lambda m: m["ranks"][2]["pieces"].clear(), HEAD), Unsupported, "do not cover"),
    "a piece behind the end": (
        every_map(lambda m: m["ranks"][2]["pieces"][0].update(source=[130 * 4, [4, 1]]), HEAD), Unsupported, "is no box",
    ),
    "a transposed piece": (
        every_map(lambda m: m["ranks"][0]["pieces"][0].update(source=[0, [1, 131]]), HEAD), Unsupported, "is no box",
    ),
    "a piece of text": (every_map(lambda m: m["ranks"][0].update(pieces="x"), HEAD), Corrupt, "another form"),
    "negative sizes": (every_map(lambda m: m.update(logical_shape=[-1, 4]), HEAD), Corrupt, "another form"),
    "maps of other ranks": (every_map(lambda m: m["ranks"].pop(2), HEAD), Corrupt, "affine_map is of ranks"),
    "a piece on ranks that do not hold it": (
        every_map(lambda m: m["ranks"][0]["pieces"][0].update(locations=[0, 1]), HEAD), Corrupt, "hold a piece",
    ),
    "parts of another shape": (
        every_map(lambda m: m.update(logical_shape=[131, 5]), HEAD), Unsupported, "is no box",
    ),
    "another tensor parallel size": (in_model(0, lambda t: t.update(mp_world_size=4)), Corrupt, "mp_world_size"),
    "pipeline stages": (
        lambda folder: [in_model(r, lambda t: t["checkpoint_parallel_dimensions"].update(pp_degree=2))(folder) for r in range(3)],
        Unsupported, "pp_degree",
    ),
    "rank 1's model file is lost": (lambda folder: (folder / MODEL.format(1)).unlink(), Corrupt, "model files are missing"),
    "all files of rank 1 are lost": (
        lambda folder: [p.unlink() for p in folder.glob("*/*mp_rank_01*")], Corrupt, "none of rank 1",
    ),
    "all files of rank 2 are lost": (lambda folder: [p.unlink() for p in folder.glob("*/*mp_rank_02*")], Corrupt, "mp_world_size"),
    "a file of a later step": (in_model(2, lambda t: t.update(global_steps=4)), Corrupt, "global_steps is other than"),
    # the first parameter of the group is embed_tokens, which all ranks have whole
    "replicas that differ": (flat_master(2, 0), Corrupt, '1 of .* tensors differ.*"model.embed_tokens.weight", of which rank 2'),
}  # fmt: skip


@pytest.mark.parametrize("what", ATTACKS)
def test_it_is_refused_by_name(what: str, unpacked: Unpack, tmp_path: Path) -> None:
    change, kind, said = ATTACKS[what]
    folder = changed(unpacked, TP3, tmp_path)
    change(folder)
    with pytest.raises(kind, match=said) as error:
        ckpttool.convert(folder, tmp_path / "out", to="dcp", world_size=1)
    assert error.value.code != "CKPT0300" and not (tmp_path / "out").exists()


@pytest.mark.parametrize("megatron", [False, True])
def test_a_universal_checkpoint_of_such_ranks_is_refused_with_what_is_read(
    megatron: bool, unpacked: Unpack, tmp_path: Path
) -> None:
    folder = changed(unpacked, TP3, tmp_path)
    (folder / "global_step3" / "zero").mkdir()
    torch.save({}, folder / "global_step3" / "zero" / "optimizer_state.pt")
    (folder / "latest").rename(folder / "latest_universal")
    if megatron:
        in_model(0, lambda t: t.update({INFO: {}, "checkpoint_version": 3.0}))(folder)
    with pytest.raises(Unsupported, match="Megatron-DeepSpeed.*and save" if megatron else "Convert that one"):
        ckpttool.convert(folder, tmp_path / "out", to="full")


def test_what_one_rank_holds_alone_needs_no_other(unpacked: Unpack, tmp_path: Path) -> None:
    folder = changed(unpacked, TP3, tmp_path)
    flat_master(2, 0)(folder)
    ckpttool.convert(folder, tmp_path / "out", to="dcp", world_size=1, only=["model.lm_head.weight"])


def test_a_file_copied_over_another_ranks_is_refused(unpacked: Unpack, tmp_path: Path) -> None:
    folder = changed(unpacked, TP2, tmp_path)
    name = "global_step3/bf16_zero_pp_rank_1_mp_rank_{:02}_optim_states.pt"
    shutil.copy(folder / name.format(0), folder / name.format(1))
    with pytest.raises(Corrupt):
        ckpttool.convert(folder, tmp_path / "out", to="dcp", world_size=1)


def test_what_is_said_of_any_rank_is_said_of_the_save(unpacked: Unpack, tmp_path: Path) -> None:
    folder = changed(unpacked, "tp2_z3_bf16", tmp_path)
    (file,) = folder.rglob("*mp_rank_01_optim_states.pt")
    rewrite(file, lambda tree: tree["optimizer_state_dict"].update(averages=1))
    with ckpttool.open(folder) as opened:
        assert any("hold averages too" in n for n in opened.checkpoint.notes)


def test_learning_rates_that_differ_are_refused(unpacked: Unpack, tmp_path: Path) -> None:
    folder = changed(unpacked, TP3, tmp_path)

    def change(tree: Any) -> None:
        tree["optimizer_state_dict"]["base_optimizer_state"]["param_groups"][0]["lr"] = 0.5

    rewrite(folder / "global_step3/zero_pp_rank_0_mp_rank_01_optim_states.pt", change)
    with pytest.raises(Corrupt, match=r"param_groups.0.lr.* is 0.5 on model parallel rank 1"):
        ckpttool.convert(folder, tmp_path / "out", to="dcp", world_size=1)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.slow
def test_deepspeed_resumes_at_another_tensor_parallel_size(stage: int, unpacked: Unpack, tmp_path: Path) -> None:
    folder = unpacked(TP3)
    options = ckpttool.UniversalOptions(stage=stage)
    ckpttool.convert(folder / "ckpt", tmp_path / "universal", to="universal", options=options)
    said = torchrun(2, "autotp_job.py", "resume", str(tmp_path), "2", str(stage), "fp32", str(tmp_path / "universal"))
    assert (tmp_path / "resumed.json").exists(), said[-4000:]
    found, whole = (json.loads(p.read_text()) for p in (tmp_path / "resumed.json", folder / "case.json"))
    assert found["step"] == 6 and found["losses"] == pytest.approx(whole["losses"], rel=1e-6)


# ------------------------------------------------------------------------------------------- written for such ranks


def write(source: Path, out: Path, to: str, world: int, tensor: int, like: Path | None = None, **more: Any) -> None:
    """A save for an engine of AutoTP."""
    more = {**more, **({} if like is None else {"like": like})}
    ckpttool.convert(source, out, to=to, world_size=world, options=ckpttool.ZeroOptions(tensor_parallel=tensor), **more)


def differences(a: Any, b: Any, where: str = "") -> list[str]:
    """Where two files that torch loads differ: keys, types, numbers."""
    if isinstance(a, torch.Tensor):
        return [] if isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b) else [where]
    if isinstance(a, dict):
        odd = [f"{where}/{k}" for k in a.keys() ^ b.keys()]
        return odd + [x for k in a.keys() & b.keys() for x in differences(a[k], b[k], f"{where}/{k}")]
    if isinstance(a, (list, tuple)):
        return [where] * (len(a) != len(b)) + [
            x for k, (u, v) in enumerate(zip(a, b, strict=False)) for x in differences(u, v, f"{where}/{k}")
        ]
    if getattr(a, "__dict__", None):
        return differences(vars(a), vars(b), where)
    return [] if type(a) is type(b) and a == b else [where]


@pytest.mark.parametrize("case", CASES)
def test_every_file_is_what_deepspeed_itself_saves(case: str, unpacked: Unpack, tmp_path: Path) -> None:
    folder = unpacked(case)
    about = json.loads((folder / "case.json").read_text())
    write(folder / "ckpt", tmp_path / "out", f"zero{about['stage']}", about["world"], about["tp"])
    theirs = sorted(p.relative_to(folder / "ckpt") for p in folder.glob("ckpt/*/*.pt"))
    assert theirs == sorted(p.relative_to(tmp_path / "out") for p in tmp_path.glob("out/*/*.pt"))
    for name in theirs:
        found = differences(zero_files.load(folder / "ckpt" / name), zero_files.load(tmp_path / "out" / name))
        odd = {x for x in found if not x.endswith("/param_groups/0/bias_correction")}  # torch's AdamW has none
        assert odd <= {"/optimizer_state_dict/clip_grad"}, name  # the engine keeps its own


@pytest.mark.parametrize(
    ("case", "to", "world", "tensor", "like"),
    [
        (TP2, "zero2", 6, 2, None),  # another stage, other data-parallel ranks: cuts within rows of columns
        (TP2, "zero3", 6, 2, None),
        (TP2, "zero1", 3, 3, TP3),  # unequal parts, as the other job has them
        (TP3, "zero3", 4, 2, "tp2_z3_bf16"),
        ("dcp", "zero1", 4, 2, TP2),  # from a program without such ranks
    ],
)
def test_any_state_is_written_for_tensor_parallel_ranks(
    case: str, to: str, world: int, tensor: int, like: str | None, unpacked: Unpack, tmp_path: Path
) -> None:
    folder = unpacked(TP3 if case == "dcp" else case)
    source = folder / "ckpt"
    if case == "dcp":
        ckpttool.convert(source, tmp_path / "dcp", to="dcp", world_size=1)
        source = tmp_path / "dcp"
    write(source, tmp_path / "out", to, world, tensor, like and unpacked(like) / "ckpt")
    truth, found = load_file(folder / "truth.safetensors"), held(tmp_path / "out")
    assert all(torch.equal(found[n], x) for n, x in truth.items())
    names = {p.name for p in tmp_path.glob("out/global_step3/*optim_states.pt")}
    assert len(names) == world and all(any(f"mp_rank_{t:02}" in n for n in names) for t in range(tensor))
    first = zero_files.load(next(tmp_path.glob("out/global_step3/*mp_rank_01_model_states.pt")))
    assert (first["mp_world_size"], first["dp_world_size"]) == (tensor, world // tensor)
    assert first["ds_config"]["tensor_parallel"]["autotp_size"] == tensor
    assert first["checkpoint_parallel_dimensions"] == {"pp_degree": 1, "tp_degree": tensor}


@pytest.mark.parametrize("stage", [2, 3])
def test_what_is_not_trained_is_cut_as_well(stage: int, unpacked: Unpack, tmp_path: Path) -> None:
    ckpttool.convert(unpacked(TP3) / "ckpt", tmp_path / "in.pt", to="full", canonical_keys=True)
    tree, name = torch.load(tmp_path / "in.pt"), "layers.0.down_proj.weight"
    del tree["optim"]["state"][name]
    tree["optim"]["param_groups"][0]["params"].remove(name)
    torch.save(tree, tmp_path / "in.pt")
    write(tmp_path / "in.pt", tmp_path / "out", f"zero{stage}", 2, 2, unpacked(TP2) / "ckpt")
    assert torch.equal(held(tmp_path / "out")[f"model.{name}"], tree["model"][name])
    for rank, part in enumerate(tree["model"][name].split([4, 3], 1)):  # cut by columns, as DeepSpeed cuts 7
        file = ("zero_pp_rank_0_" if stage == 3 else "") + f"mp_rank_{rank:02}_model_states.pt"
        found = zero_files.load(tmp_path / "out" / "global_step3" / file)
        assert found["frozen_param_shapes"] == {name: part.shape}
        assert torch.equal(found["frozen_param_fragments"][name].view(part.shape), part)
        assert found["buffer_names"] == ["layers.0.seen"] and torch.equal(
            found["module"]["layers.0.seen"], torch.arange(3.0)
        )


NOT_WRITTEN: dict[str, tuple[dict[str, Any], type[CkpttoolError], str]] = {
    "unequal parts": ({"tensor": 2, "world": 2}, Unsupported, "3 ranks have other than equal parts of it. Give a save"),
    "ranks that do not divide": ({"tensor": 3, "world": 4}, UsageError, "does not divide 4 ranks"),
    "no rank": ({"tensor": 0, "world": 3}, UsageError, "must be at least 1"),
    "nothing says it": ({"of": {}, "tensor": 2, "world": 2}, Unsupported, "save it at step 0, and give that"),
    "a save of another model": (
        {"of": {"head.weight": (131, 4)}, "tensor": 2, "world": 2, "like": TP2}, Unsupported,
        'head.weight": which part .* not in that save',
    ),
    "another shape": (
        {"of": {"lm_head.weight": (132, 4)}, "tensor": 2, "world": 2, "like": TP2}, Unsupported,
        r"it has the shape \[132, 4\] here, and \[131, 4\] in that save",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", NOT_WRITTEN)
def test_what_nothing_says_is_not_written(what: str, unpacked: Unpack, tmp_path: Path) -> None:
    how, kind, said = NOT_WRITTEN[what]
    source = unpacked(TP3) / "ckpt"
    if (shapes := how.get("of")) is not None:
        source = tmp_path / "in.pt"
        torch.save({"model": {n: torch.ones(k) for n, k in {"norm.weight": (4,), **shapes}.items()}}, source)
    with pytest.raises(kind, match=said):
        write(
            source, tmp_path / "out", "zero1", how["world"], how["tensor"], how.get("like") and unpacked(TP2) / "ckpt"
        )
    assert not (tmp_path / "out").exists()


INFOS: dict[str, tuple[Callable[[Any], Any], type[CkpttoolError] | None, str]] = {
    "sub-parameters of another form": (lambda i: i.update(parameter_with_sub_params=[3, {"shape": 1}, {"patterns": 2}]), None, ""),
    "bytes": (lambda i: i.update(original_vocab_size=b"131"), Corrupt, "no plain data"),
    "a map that no parameter has": (lambda i: i["affine_map"]["params"].update(other=5), None, ""),
}  # fmt: skip


@pytest.mark.parametrize("what", INFOS)
def test_what_says_how_to_cut_may_be_anything(what: str, unpacked: Unpack, tmp_path: Path) -> None:
    change, kind, said = INFOS[what]
    folder = changed(unpacked, TP3, tmp_path)
    for rank in range(3):
        in_model(rank, lambda t: change(t[INFO]))(folder)
    if kind is None:
        write(folder, tmp_path / "out", "zero1", 3, 3)
        return
    with pytest.raises(kind, match=said):
        write(folder, tmp_path / "out", "zero1", 3, 3)


def test_a_universal_checkpoint_is_for_any_number_of_them(unpacked: Unpack, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="load a universal checkpoint, each its part"):
        options = ckpttool.UniversalOptions(tensor_parallel=2)
        ckpttool.convert(unpacked(TP2) / "ckpt", tmp_path / "out", to="universal", options=options)


@pytest.mark.parametrize("subs", [None, (8, 8), (4, 12)])
@pytest.mark.parametrize("axis", [0, 1])
def test_cuts_for_other_ranks_are_those_of_deepspeed(axis: int, subs: tuple[int, ...] | None) -> None:
    """Whatever the key-value heads are, a cut that follows from another one is that of DeepSpeed's own functions."""
    shards = pytest.importorskip("deepspeed.module_inject.tp_shard", exc_type=ImportError)
    affine = pytest.importorskip("deepspeed.checkpoint.affine", exc_type=ImportError)
    shape = (16, 2) if axis == 0 else (3, 16)

    def theirs(ranks: int, heads: int | None) -> ParameterCut:
        meta = shards.AutoTPMeta(num_kv_heads=heads)
        widths = [shards.get_shard_size_list(n, ranks, meta, "q_proj") for n in subs or (16,)]
        return parse_parameter_map(affine.sub_param_map(shape, subs or (16,), widths, axis).to_dict(), ranks, "q_proj")

    followed = 0
    for before in (1, 2, 3, 4, 8):
        for after in (2, 3, 4, 8):
            for heads in (None, 1, 2, 4, 8, 16):
                for told in (None, heads):
                    found = cut_for_ranks(theirs(before, heads), after, subs, told) if before > 1 else "one rank"
                    if not isinstance(found, str):
                        want = theirs(after, heads)
                        assert (found.shape, found.parts) == (want.shape, want.parts), (before, after, heads)
                        assert sorted(found.pieces) == sorted(want.pieces)
                        followed += before != after
    assert followed >= 8
    whole = parse_parameter_map(affine.replicated_map(shape, 2).to_dict(), 2, "norm")
    assert cut_for_ranks(whole, 5, None, None) == parse_parameter_map(
        affine.replicated_map(shape, 5).to_dict(), 5, "norm"
    )


@pytest.mark.slow
def test_deepspeed_resumes_from_the_files_of_other_tensor_parallel_ranks(unpacked: Unpack, tmp_path: Path) -> None:
    folder = unpacked(TP3)
    write(folder / "ckpt", tmp_path / "zero3", "zero3", 2, 2, unpacked("tp2_z3_bf16") / "ckpt")
    said = torchrun(2, "autotp_job.py", "resume", str(tmp_path), "2", "3", "fp32", str(tmp_path / "zero3"))
    assert (tmp_path / "resumed.json").exists(), said[-4000:]
    found, whole = (json.loads(p.read_text()) for p in (tmp_path / "resumed.json", folder / "case.json"))
    assert found["step"] == 6 and found["losses"] == pytest.approx(whole["losses"], rel=1e-6)
