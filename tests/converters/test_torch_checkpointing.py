"""torch_checkpointing's folders, read and written; fixtures/checkpointing_jobs.py wrote the fixtures with its CheckpointManager."""

from __future__ import annotations

import json
import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import ckpttool_here
from peers import FIXTURES, REPOSITORY, difference, load_dcp, load_full, load_hf, same_value, tensors_of
from ranks import ENVIRONMENT, NURSERIES, one_at_a_time
from safetensors.torch import load_file

import ckpttool
from ckpttool.errors import Corrupt, NotRecognised, Unsafe, Unsupported

JOBS = FIXTURES / "checkpointing"
CASES = ("fsdp", "safetensors", "tp", "bare", "boxes", "one")


def truth_of(case: str) -> dict[str, torch.Tensor]:
    return load_file(JOBS / case / "truth.safetensors")


def state_of(path: Path) -> dict[str, torch.Tensor]:
    tree = load_full(path) if path.suffix else load_dcp(path)
    return {k: t for k, t in tensors_of(tree).items() if k.startswith(("model.", "optim."))}


def copied(case: str, to: Path) -> Path:
    shutil.copytree(JOBS / case / "ckpt", to / "ckpt")
    return to / "ckpt"


def changed(folder: Path, change: Callable[[Any], Any]) -> None:
    """The folder with another metadata.pkl."""
    file = folder / "metadata.pkl"
    found = pickle.loads(file.read_bytes())
    change(found)
    file.write_bytes(pickle.dumps(found))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("to", ["dcp", "full"])
def test_every_kind_of_item_is_read_bit_for_bit(case: str, to: str, tmp_path: Path) -> None:
    out = tmp_path / ("out" if to == "dcp" else "out.pt")
    done = ckpttool.convert(
        JOBS / case / "ckpt", out, to=to, world_size=3 if to == "dcp" else None, canonical_keys=True
    )
    assert done.verified and not done.dropped
    assert difference(state_of(out), truth_of(case)) == []


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_what_is_written_for_any_world_size_is_the_same_state(case: str, world: int, tmp_path: Path) -> None:
    source = JOBS / case / "ckpt"
    done = ckpttool.convert(source, tmp_path / "out", to="torch_checkpointing", world_size=world)
    assert done.verified and not done.dropped
    assert ckpttool.diff(source, tmp_path / "out").equal
    again = ckpttool.convert(tmp_path / "out", tmp_path / "back.pt", to="full", canonical_keys=True)
    assert not again.dropped and difference(state_of(tmp_path / "back.pt"), truth_of(case)) == []


@pytest.mark.parametrize("case", ["fsdp2_w3_tied_bf16", "fsdp2_w2_groups", "fsdp2_w2_flatopt", "awkward_w3"])
def test_a_folder_of_dcp_becomes_one_with_items_and_comes_back(case: str, tmp_path: Path) -> None:
    source = FIXTURES / case / "ckpt"
    ckpttool.convert(source, tmp_path / "out", to="torch_checkpointing", world_size=3)
    assert (tmp_path / "out" / "model_2.pt").exists() and (tmp_path / "out" / "metadata.pkl").exists()
    assert ckpttool.diff(source, tmp_path / "out").equal
    ckpttool.verify(tmp_path / "out", read_data=True)


def test_items_besides_the_model_have_empty_tensors_ties_and_nan(tmp_path: Path) -> None:
    none = torch.zeros(0, 4)
    model = {"first": torch.ones(3), "between": none, "a": torch.ones(4, 2), "end": none}
    model["tied"] = model["a"]
    ema = {n: t + 1 for n, t in model.items()} | {"b": torch.zeros(2)}
    ema["tied"] = ema["b"]
    saved = {"model": model, "ema": ema, "shared": dict(model), "best": float("nan")}
    torch.save(saved, tmp_path / "a.pt")
    ckpttool.convert(tmp_path / "a.pt", tmp_path / "out", to="torch_checkpointing", world_size=3)
    ckpttool.convert(tmp_path / "out", tmp_path / "back.pt", to="full")
    back = load_full(tmp_path / "back.pt")
    assert back.keys() == saved.keys() and back["best"] != back["best"]
    for item in ("model", "ema", "shared"):
        assert difference(back[item], saved[item]) == []
        shared = torch.load(tmp_path / "out" / f"{item}_0.pt", weights_only=True)
        owner = shared["b" if item == "ema" else "a"]
        assert shared["tied"].untyped_storage().data_ptr() == owner.untyped_storage().data_ptr()


@pytest.mark.parametrize("case", CASES)
def test_to_hf_has_the_weights(case: str, tmp_path: Path) -> None:
    ckpttool.convert(JOBS / case / "ckpt", tmp_path / "out", to="hf")
    found = {f"model.{n}": t for n, t in load_hf(tmp_path / "out").items()}
    truth = {n: t for n, t in truth_of(case).items() if n.startswith("model.")}
    if "model.head.weight" in truth:
        found["model.head.weight"] = found["model.emb.weight"]  # tied, so it is there once
    assert difference(found, truth) == []


def test_a_rank_without_any_tensor_of_the_model_adds_no_entry(tmp_path: Path) -> None:
    torch.save({"model": {"codes": torch.get_rng_state()}}, tmp_path / "in.pt")
    ckpttool.convert(tmp_path / "in.pt", tmp_path / "out", to="torch_checkpointing", world_size=3)
    held = [torch.load(tmp_path / "out" / f"model_{rank}.pt") for rank in range(3)]
    assert [list(x) for x in held] == [["codes"], [], []]
    assert ckpttool.digest(tmp_path / "out") == ckpttool.digest(tmp_path / "in.pt")


@pytest.mark.parametrize(("own", "found"), [({}, {"a": {"b": 1}}), (5, {"a": 5, "a.b": 1})])
def test_a_dict_that_is_empty_on_a_rank_is_full_and_a_number_in_its_place_is_kept(
    own: Any, found: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "a").mkdir()
    for rank, inner in enumerate((own, {"b": 1})):
        torch.save({"w": torch.ones(2), "a": inner}, tmp_path / "a" / f"model_{rank}.pt")
        torch.save({"step": 3}, tmp_path / "a" / f"train_state_{rank}.pt")
    ckpttool.convert(tmp_path / "a", tmp_path / "out.pt", to="full")
    model = torch.load(tmp_path / "out.pt")["model"]
    assert model.pop("w").tolist() == [1, 1] and model == found


def test_a_state_without_entries_is_refused(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(2)}, "scheduler": {"last_epoch": 3}}, tmp_path / "in.pt")
    with pytest.raises(ckpttool.CkpttoolError, match="the state has no entries"):
        ckpttool.convert(tmp_path / "in.pt", tmp_path / "out", to="torch_checkpointing", world_size=2,
                         only=["scheduler"], reset=["scheduler"], drop=True)  # fmt: skip
    assert [f.name for f in tmp_path.iterdir()] == ["in.pt"]


def test_values_are_once_and_rng_is_of_every_rank(tmp_path: Path) -> None:
    source = JOBS / "safetensors" / "ckpt"
    ckpttool.convert(source, tmp_path / "out", to="dcp", world_size=2, canonical_keys=True)
    tree = load_dcp(tmp_path / "out")
    assert tree["trainer"] == {"step": 3, "tokens": 15} and tree["scheduler"]["last_epoch"] == 3
    assert tree["extra"]["note"] == b"saved by hand"
    for rank in "01":
        assert same_value(tree["rng"][rank], torch.load(source / f"rng_{rank}.pt", weights_only=True))


def test_a_state_dict_with_a_key_that_is_no_text_is_written_as_one_value(tmp_path: Path) -> None:
    w = torch.ones(3, 2)
    torch.save({"model": {"w": w, 5: w + 1}, "other": {"v": w}}, tmp_path / "in.pt")
    ckpttool.convert(tmp_path / "in.pt", tmp_path / "out", to="torch_checkpointing", world_size=2)
    assert same_value(torch.load(tmp_path / "out" / "model_0.pt", weights_only=True), {"w": w, 5: w + 1})


def test_a_list_of_which_ranks_differ_in_one_element_is_loaded_from_dcp(tmp_path: Path) -> None:
    source = copied("fsdp", tmp_path)
    tree = torch.load(source / "optimizer_1.pt", weights_only=False)
    tree["param_groups"][-1]["extra"] = b"of rank 1"
    torch.save(tree, source / "optimizer_1.pt")
    for rank in (0, 2):
        tree = torch.load(source / f"optimizer_{rank}.pt", weights_only=False)
        tree["param_groups"][-1]["extra"] = b"of another"
        torch.save(tree, source / f"optimizer_{rank}.pt")
    assert len(tree["param_groups"]) > 1
    done = ckpttool.convert(source, tmp_path / "out", to="dcp", world_size=2)
    own = load_dcp(tmp_path / "out")["per_rank"]["1"]["optimizer"]["param_groups"]
    assert not any("not every rank" in n for n in done.notes)
    assert own == {str(len(tree["param_groups"]) - 1): {"extra": b"of rank 1"}}


def test_what_is_written_has_each_rank_s_own_rng_and_everything_else_on_every_rank(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = ckpttool.convert(JOBS / "fsdp" / "ckpt", out, to="torch_checkpointing", world_size=2)
    assert any("rng_<rank>.pt has each rank's own state" in n for n in done.notes)
    for rank in range(3):  # also of the rank that the new job does not have: it is state
        saved = torch.load(JOBS / "fsdp" / "ckpt" / f"rng_{rank}.pt", weights_only=True)
        assert same_value(torch.load(out / f"rng_{rank}.pt", weights_only=True), saved)
    for rank in range(2):
        assert torch.load(out / f"train_state_{rank}.pt", weights_only=True) == {"step": 3, "tokens": 15}
        model = torch.load(out / f"model_{rank}.pt", weights_only=True)
        assert model["two.bias"].shape == (1,) and model["emb.weight"].shape == ((66, 65)[rank], 6)


@pytest.mark.live
@pytest.mark.parametrize(("written", "ranks"), [(1, 1), (3, 1), (3, 2), (3, 3)])
def test_the_manager_itself_loads_what_is_written(written: int, ranks: int, tmp_path: Path) -> None:
    """CheckpointManager.load with DefaultResharder into a job with other weights: 131 rows, 2 rows on 3 ranks, tied, bf16."""
    pytest.importorskip("torch_checkpointing", reason="`make test` installs it")
    ckpttool.convert(JOBS / "fsdp" / "ckpt", tmp_path / "out", to="torch_checkpointing", world_size=written)
    job = [str(REPOSITORY / "fixtures" / "checkpointing_jobs.py"), "load", str(tmp_path / "out")]
    with one_at_a_time():
        NURSERIES.launch(
            ranks,
            [*job, str(JOBS / "fsdp" / "truth.safetensors")],
            tmp_path / "log",
            **ENVIRONMENT,
            TORCHELASTIC_RUN_ID="load",
        )
    log = (tmp_path / "log").read_text(encoding="utf-8", errors="replace")
    assert "LOADED 27 WRONG [] STEP 3 3" in log, log[-3000:]


@pytest.mark.filterwarnings("ignore")
def test_its_own_export_for_hugging_face_is_read_and_does_not_hide_the_rest(tmp_path: Path) -> None:
    pytest.importorskip("torch_checkpointing", reason="`make test` installs it")
    from torch_checkpointing.hf.consolidation import consolidate_hf_safetensors_checkpoint as consolidate
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    source = copied("safetensors", tmp_path)
    storage = LocalFileSystemStorageConfig(use_direct_io=False)
    consolidate(str(source), output_dir=str(tmp_path / "hf"), storage_config=storage)
    with ckpttool.open(tmp_path / "hf") as opened:
        assert opened.checkpoint.layout == "hf"
    ckpttool.convert(tmp_path / "hf", tmp_path / "out.pt", to="full")
    assert (
        difference(
            state_of(tmp_path / "out.pt"), {n: t for n, t in truth_of("safetensors").items() if n[:6] == "model."}
        )
        == []
    )
    consolidate(str(source), storage_config=storage)  # into the folder itself
    with ckpttool.open(source) as opened:
        assert opened.checkpoint.layout == "torch_checkpointing" and "optim" in {
            t.path[0] for t in opened.checkpoint.tensors.values()
        }
        assert [r.name for r in opened.checkpoint.unread] == ["model-00001-of-00001.safetensors"]


def test_inspect_says_what_the_manager_can_do_with_it() -> None:
    found = json.loads(ckpttool_here("inspect", JOBS / "tp" / "ckpt", "--json").stdout)
    assert (found["layout"], found["ranks"], found["step"]) == ("torch_checkpointing", 4, 3)
    assert "CheckpointManager loads it on up to 4 ranks with DefaultResharder" in found["next"]
    found = json.loads(ckpttool_here("inspect", JOBS / "bare" / "ckpt", "--json").stdout)
    assert found["next"].startswith("resumes in its job at 2 ranks; at another world size: ckpttool convert")


def test_a_save_that_has_not_ended_is_listed_as_such(tmp_path: Path) -> None:
    shutil.copytree(JOBS / "unfinished" / "tmp_ckpt", tmp_path / "tmp_step_6")
    shutil.copytree(JOBS / "fsdp" / "ckpt", tmp_path / "step_3")
    shutil.copytree(JOBS / "fsdp" / "ckpt", tmp_path / "tmp_step_9")
    with pytest.raises(NotRecognised):
        ckpttool.open(tmp_path / "tmp_step_6")
    found = json.loads(ckpttool_here("inspect", tmp_path, "--json").stdout)
    rows = {c["name"]: (c["layout"], c["complete"]) for c in found["checkpoints"]}
    assert rows["step_3"] == ("torch_checkpointing", True) and rows["tmp_step_9"] == ("torch_checkpointing", False)
    assert rows["tmp_step_6"] == ("torch_checkpointing", False)
    assert found["newest"] == str(tmp_path / "step_3")


def test_version_1_of_the_metadata_is_read_as_version_2(tmp_path: Path) -> None:
    source = copied("fsdp", tmp_path)

    def older(found: Any) -> None:
        flat, layouts = {}, {r: {} for r in range(3)}
        for item, data in found["metadata"].items():
            for path, groups in data["nested_path_to_metadata"].items():
                flat[json.dumps([item, *json.loads(path)])] = groups
            for r in layouts:
                layouts[r][item] = data["rank_to_layout_info"][r]
        found.clear()
        found |= {"metadata": flat, "rank_to_layout_info_mappings": layouts, "world_size": 3}

    changed(source, older)
    assert ckpttool.diff(source, JOBS / "fsdp" / "ckpt").equal
    ckpttool.convert(source, tmp_path / "hf", to="hf")
    found = ckpttool.diff(tmp_path / "hf", source, only=["model"])
    assert found.only_in_b == ["model.head.weight"] and not (found.only_in_a or found.data)  # tied, so it is there once
    ckpttool.convert(source, tmp_path / "two", to="torch_checkpointing", world_size=2)
    assert ckpttool.diff(tmp_path / "two", source).equal


def first(found: Any, item: str = "model") -> Any:
    return found["metadata"][item]["nested_path_to_metadata"]['["emb.weight"]'][0]["sharding_metadata"]


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (lambda f: first(f)["data"].update(global_shape=[130, 6]), Corrupt, r"of shape \(131, 6\); metadata.pkl says 0 and \(130, 6\)"),
        (lambda f: first(f)["data"].update(dtype="torch.float16"), Corrupt, "is torch.float32|float32 .* there, and metadata.pkl leaves"),
        (lambda f: first(f).update(type="MyShards"), Unsupported, "is described by 'MyShards', a class of the job"),
        (lambda f: first(f)["data"].update(placements=[{"type": "Partial"}]), Unsupported, "a placement of type 'Partial'"),
        (lambda f: first(f)["data"].update(placements=[]), Corrupt, "does not hold together"),
        (lambda f: first(f)["data"]["mesh_spec"].update(mesh_shape=(2,)), Corrupt, "does not hold together"),
        (lambda f: first(f)["data"]["mesh_spec"].update(mesh_data=(1, 0, 2)), Corrupt, r"begins at \[\[0, 0\]\] there, and metadata.pkl says \[\[44, 0\]\]"),
        (lambda f: f.update(version="3.0"), Unsupported, "has version '3.0'; ckpttool reads 1.0 and 2.0"),
        (lambda f: f.update(world_size=0), Corrupt, "world_size 0"),
        (lambda f: f.update(world_size=1 << 40), Corrupt, "world_size"),
        (lambda f: f["metadata"]["model"]["rank_to_layout_info"].pop(1), Corrupt, '"model" has no file for rank 1'),
        (lambda f: f["metadata"]["model"]["nested_path_to_metadata"].update({'["new"]': [{"ranks": (0,), "sharding_metadata": first(f)}]}), Corrupt, 'has no "model.new"'),
        (lambda f: f["metadata"]["model"]["rank_to_layout_info"].update({0: {"file_path": "../x.pt", "serialization_format": {"type": "TorchSerialization"}}}), Exception, "x.pt"),
        (lambda f: f["metadata"]["model"]["rank_to_layout_info"].update({0: {"file_path": "x", "serialization_format": {"type": "Zip"}}}), Unsupported, "Zip"),
    ],
)  # fmt: skip
def test_metadata_that_is_not_of_these_files_is_refused(change: Any, error: Any, says: str, tmp_path: Path) -> None:
    source = copied("fsdp", tmp_path)
    changed(source, change)
    with pytest.raises(error, match=says):
        ckpttool.open(source)


def test_a_pickle_that_calls_something_is_refused(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (print, ("run",))

    source = copied("fsdp", tmp_path)
    (source / "metadata.pkl").write_bytes(pickle.dumps({"metadata": Evil(), "world_size": 3, "version": "2.0"}))
    with pytest.raises(Unsafe, match=r"calls builtins\.print"):
        ckpttool.open(source)


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda d: (d / "model_1.pt").unlink(), "has no model_1.pt, the file of rank 1"),
        (lambda d: (d / "rng_1.pt").unlink(), r"has no rng_1\.\*, the file of rank 1"),
        (lambda d: (d / "model_2.pt").write_bytes(b""), "model_2.pt is empty: the save was interrupted"),
        (lambda d: (d / "metadata.pkl").write_bytes(b""), "metadata.pkl is empty: the save was interrupted"),
        (lambda d: shutil.copy(d / "model_0.pt", d / "model_1.pt"), 'model_1.pt: "model.emb.weight" is of rank 0'),
    ],
)
def test_missing_empty_and_exchanged_files_are_refused(harm: Any, says: str, tmp_path: Path) -> None:
    source = copied("fsdp", tmp_path)
    harm(source)
    with pytest.raises(Corrupt, match=says):
        ckpttool.open(source)


def test_plain_tensors_of_several_ranks_without_metadata_are_copies_or_refused(tmp_path: Path) -> None:
    for rank in range(2):
        torch.save({"w": torch.arange(6.0)}, tmp_path / f"model_{rank}.pt")
        torch.save({"step": 3}, tmp_path / f"train_state_{rank}.pt")
    with ckpttool.open(tmp_path) as opened:
        assert opened["model.w"].shape == (6,)
    torch.save({"w": torch.arange(6.0) + 1}, tmp_path / "model_1.pt")
    with pytest.raises(
        Unsupported, match=r"differs from that of rank 0, and no metadata\.pkl says whether they are copies"
    ):
        ckpttool.open(tmp_path)
    with ckpttool.open(tmp_path, allow_equal_ranks=True) as opened:
        assert opened["model.w"].shape == (6,)
        assert "ranks differ in model.w: rank 0's is read, rank 1's is not" in opened.checkpoint.notes
    for rank in range(2, 6):
        torch.save({"w": torch.arange(6.0) + rank}, tmp_path / f"model_{rank}.pt")
        torch.save({"step": 3}, tmp_path / f"train_state_{rank}.pt")
    with ckpttool.open(tmp_path, allow_equal_ranks=True) as opened:
        (note,) = (n for n in opened.checkpoint.notes if n.startswith("ranks differ in model.w"))
        assert note.endswith("rank 0's is read, rank 1's, rank 2's, rank 3's and 2 more are not")
    for other, shown in ((torch.zeros(7), "float32 tensor"), (3, "3, <float32")):
        torch.save({"w": other}, tmp_path / "model_1.pt")
        with pytest.raises(Unsupported, match=f"differs from that of rank 0 .*{shown}"):
            ckpttool.open(tmp_path, allow_equal_ranks=True)


def test_a_file_of_a_rank_is_answered_with_its_folder() -> None:
    for file in ("model_0.pt", "train_state_2.pt", "metadata.pkl"):
        with pytest.raises(
            NotRecognised, match=f"{file} is one file of the torch_checkpointing checkpoint .*ckpt; give that"
        ):
            ckpttool.open(JOBS / "fsdp" / "ckpt" / file)


def test_a_tensor_subclass_is_refused_by_its_class(tmp_path: Path) -> None:
    shutil.copy(JOBS / "one" / "ckpt" / "model_0.pt", tmp_path)
    shutil.copy(FIXTURES / "torchao" / "adamw4bit_w1" / "ckpt.pt", tmp_path / "optimizer_0.pt")
    with pytest.raises(
        Unsupported, match=r"exp_avg\" is a torchao OptimState4bit, which ckpttool reads from dcp and full only"
    ):
        ckpttool.open(tmp_path)


def test_only_the_model_does_not_fail_over_what_lies_in_other_items(tmp_path: Path) -> None:
    source = copied("fsdp", tmp_path)
    (source / "optimizer_1.pt").write_bytes(b"PK")
    (source / "rng_2.pt").unlink()
    with pytest.raises(Corrupt):
        ckpttool.open(source)
    ckpttool.convert(source, tmp_path / "out", to="dcp", world_size=2, only={"model"})
    assert (
        difference(state_of(tmp_path / "out"), {n: t for n, t in truth_of("fsdp").items() if n[:6] == "model."}) == []
    )


def test_a_tensor_on_one_rank_and_a_number_on_another_is_refused(tmp_path: Path) -> None:
    for rank, w in enumerate((1, torch.ones(2))):
        torch.save({"w": w}, tmp_path / f"model_{rank}.pt")
        torch.save({"step": 3}, tmp_path / f"train_state_{rank}.pt")
    with pytest.raises(Corrupt, match="is 1 there, and a tensor on other ranks"):
        ckpttool.open(tmp_path)


def test_a_rank_of_another_step_is_refused(tmp_path: Path) -> None:
    """Only the steps of its optimizer show it: nothing else that ranks share is in two files."""
    shutil.copytree(FIXTURES / "checkpointing" / "fsdp" / "ckpt", source := tmp_path / "in")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = torch.load(source / "optimizer_1.pt", weights_only=False)
    for slots in tree["state"].values():
        slots["step"] += 1
    torch.save(tree, source / "optimizer_1.pt")
    with pytest.raises(
        Corrupt, match=r'optimizer_1\.pt: "optimizer\.state\.emb\.weight\.step" is 4, in optimizer_0\.pt it is 3'
    ):
        ckpttool.open(source)
    with ckpttool.open(source, only=["model"]) as opened:
        assert opened["model.emb.weight"].shape == (131, 6)


def test_an_entry_whose_name_no_file_can_have_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(2)}, "k" * 300: [1]}, tmp_path / "in.pt")
    with pytest.raises(Unsupported, match=r"a name of 30\d bytes, k+…; the limit is 255"):
        ckpttool.convert(tmp_path / "in.pt", tmp_path / "out", to="torch_checkpointing", world_size=1)
    assert [p.name for p in tmp_path.iterdir()] == ["in.pt"]


@pytest.mark.parametrize("slot", ["exp_avg_sq\0", "../../exp_avg_sq"])
def test_a_slot_whose_name_no_file_can_have_is_refused_and_leaves_nothing(slot: str, tmp_path: Path) -> None:
    state = {"w": {"step": torch.tensor(1.0), "exp_avg": torch.ones(2), slot: torch.ones(2)}}
    group = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "params": ["w"]}
    torch.save({"model": {"w": torch.ones(2)}, "optim": {"state": state, "param_groups": [group]}}, tmp_path / "in.pt")
    with pytest.raises(Unsupported, match="which no file can be"):
        ckpttool.convert(tmp_path / "in.pt", tmp_path / "out", to="universal")
    assert [p.name for p in tmp_path.iterdir()] == ["in.pt"]


def test_a_hyperparameter_that_a_rank_lacks_is_named(tmp_path: Path) -> None:
    source = copied("fsdp", tmp_path)
    tree = torch.load(source / "optimizer_1.pt", weights_only=False)
    del tree["param_groups"][0]["eps"]
    torch.save(tree, source / "optimizer_1.pt")
    with ckpttool.open(source) as opened:
        assert [n for n in opened.checkpoint.notes if "not every rank saved optimizer.param_groups.0.eps;" in n]


def test_values_of_an_item_that_only_a_later_rank_has_are_that_rank_s(tmp_path: Path) -> None:
    source = copied("safetensors", tmp_path)
    changed(source, lambda found: found["metadata"].update(ema=found["metadata"]["optimizer"]))
    for rank in range(2):
        tree = torch.load(source / f"optimizer_{rank}.pt", weights_only=False)
        tree["param_groups"][0].update({"seen": 5, "more": {"n": 6}} if rank else {"more": {}})
        torch.save(tree, source / f"ema_{rank}.pt")
    with ckpttool.open(source) as opened:
        assert not any("not every rank" in n for n in opened.checkpoint.notes)
        found = {n: v.data for n, v in opened.checkpoint.values.items() if n.endswith("seen")}
    assert found == {"extra.per_rank.1.ema.param_groups.0.seen": 5}
