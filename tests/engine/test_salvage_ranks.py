"""Files of ranks that are lost: what replicas, the engine's own copy of the weights, ties and another step of the run give back. What
is called exact has the digests that it had before."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import fsspec
import peers
import pytest
import torch
from commands import ckpttool_here
from stores import moto
from test_doctor import digests, train

import ckpttool
from ckpttool.engine.copy.fill import silent
from ckpttool.engine.copy.tensor_digests import tensor_digests
from ckpttool.engine.doctor.examine import doctor
from ckpttool.engine.opening import OpenOptions, open_checkpoint


def damaged(case: str, to: Path, *lost: str) -> Path:
    """A copy of a fixture without these files."""
    shutil.copytree(peers.FIXTURES / case / "ckpt", to)
    files = [p for pattern in lost for p in to.glob(pattern)]
    assert files
    for p in files:
        p.unlink()
    return to


def hints(case: str) -> dict[str, Any]:
    layout = peers.FIXTURES / case / "flat_layout.json"
    return {"flat_layout": str(layout)} if layout.exists() else {}


def truth(case: str) -> dict[str, str]:
    with open_checkpoint(peers.FIXTURES / case / "ckpt", OpenOptions(**hints(case))) as opened:
        ckpt = opened.locate()
        return tensor_digests(ckpt.tensors, opened.source, ckpt.files, ckpt.records, silent)


#: Every rank has what another rank has, too: hybrid sharding (two replicas of two shards), and none.
REPLICATED = (
    ("fsdp1_w4_hsdp_mesh", ("*_rank_0.pt",)), ("fsdp1_w4_hsdp_mesh", ("*_rank_3.pt",)),
    ("fsdp1_w2_noshard", ("*rank0.pt",)), ("fsdp1_w4_hsdp_mesh", ("*_rank_0.pt", "*_rank_3.pt")), ("fsdp1_w4_hsdp_mesh", ("optim*_rank_2.pt",)),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("case", "lost"), REPLICATED, ids=str)
def test_what_other_ranks_have_copies_of_is_exact(tmp_path: Path, case: str, lost: tuple[str, ...]) -> None:
    folder = damaged(case, tmp_path / "d", *lost)
    found = doctor(folder, **hints(case))
    wanted = truth(case)
    assert not found.sound and not found.missing and not found.rebuilt and found.exact == len(wanted)
    assert any("other ranks have copies" in f.text for f in found.findings)
    more = [x for k, v in hints(case).items() for x in (f"--{k.replace('_', '-')}", v)]
    assert ckpttool_here("convert", folder, tmp_path / "no", "--to", "dcp", *more).returncode == 4
    done = ckpttool_here("convert", folder, tmp_path / "copy", "--to", "dcp", "-n", "2", "--salvage", *more)
    assert done.returncode == 0, done.stderr
    assert digests(tmp_path / "copy") == wanted
    done = ckpttool_here(*shlex.split(found.next[0])[1:])
    assert done.returncode == 0, done.stderr


def test_one_shard_of_all_replicas_is_lost(tmp_path: Path) -> None:
    found = doctor(damaged("fsdp1_w4_hsdp_mesh", tmp_path / "d", "*_rank_1.pt", "*_rank_3.pt"))
    assert not found.sound and found.layout is None and found.exact == 0


@pytest.mark.slow
def test_weights_of_zero_1_and_2_are_in_the_model_file(tmp_path: Path) -> None:
    """At stages 1 and 2 every rank has all weights, in the dtype that the engine computes with; masters are cut over ranks."""
    for case, lost, rounded in (
        ("zero1_w2", "*/zero_pp_rank_1*optim*", False), ("zero2_w3_bf16", "*/*zero_pp_rank_0*optim*", True),
        ("zero2_w2_roundrobin", "*/*optim*", False),
    ):  # fmt: skip
        folder = damaged(case, tmp_path / case, lost)
        found = doctor(folder)
        wanted = {n: d for n, d in truth(case).items() if n.startswith("model.")}
        assert not found.sound and "optim" in found.missing and found.exact + len(found.rebuilt) == len(wanted)
        assert bool(found.rebuilt) is rounded
        got = digests(folder, salvage=True)
        assert got.keys() == wanted.keys()
        assert all(got[n] == wanted[n] for n in wanted if n not in found.rebuilt)
        if rounded:  # as the engine rounds its masters
            with (
                ckpttool.open(peers.FIXTURES / case / "ckpt") as whole,
                open_checkpoint(folder, OpenOptions(salvage=True)) as left,
            ):
                for n in found.rebuilt:
                    t = left[n].torch()
                    assert t.dtype == torch.bfloat16 and torch.equal(t, whole[n].torch().bfloat16()), n
        done = ckpttool_here("convert", folder, tmp_path / f"{case}.pt", "--salvage")
        assert done.returncode == 0, done.stderr
        told = json.loads(ckpttool_here("verify", tmp_path / f"{case}.pt", "--json").stdout)["salvage"]
        assert told["missing"] == found.missing and told["rebuilt"] == found.rebuilt and told["exact"] == found.exact


@pytest.mark.filterwarnings("ignore")
def test_what_is_lost_comes_from_another_step(tmp_path: Path) -> None:
    """A record of the newest save is cut off; the save before has it."""
    saved = train(tmp_path, (3, 5))
    data = (tmp_path / "step-5" / "__0_0.distcp").read_bytes()
    (tmp_path / "step-5" / "__0_0.distcp").write_bytes(data[: len(data) // 2])
    found = doctor(tmp_path / "step-5")
    lost = set(found.missing)
    assert lost and found.exact
    assert found.next[1].endswith(f"step-5-filled --to dcp -n 1 --salvage --fill-from {tmp_path / 'step-3'}")
    done = ckpttool_here(*shlex.split(found.next[1])[1:])
    assert done.returncode == 0, done.stderr
    (tmp_path / "step-5-filled").rename(tmp_path / "new")
    assert f"{len(lost)} tensors are from step-3" in done.stderr
    with (
        ckpttool.open(tmp_path / "new") as new,
        ckpttool.open(tmp_path / "step-3") as old,
        open_checkpoint(tmp_path / "step-5", OpenOptions(salvage=True)) as left,
    ):
        assert set(new) == set(old)
        for name in new:
            assert torch.equal(new[name].torch(), (old if name in lost else left)[name].torch()), name
            if name in saved[5]:
                assert torch.equal(new[name].torch(), saved[3 if name in lost else 5][name])
    record = json.loads((tmp_path / "new" / "ckpttool.json").read_text())
    assert record["tensors"].keys() == set(found_exact(record)) and not lost & record["tensors"].keys()
    told = json.loads(ckpttool_here("verify", tmp_path / "new", "--read-data", "--json").stdout)
    assert told["salvage"]["rebuilt"].keys() == lost and not told["salvage"]["missing"] and told["recorded"] == "equal"
    assert "rebuilt" in ckpttool_here("verify", tmp_path / "new").stdout
    again = doctor(tmp_path / "new")
    assert again.sound and again.rebuilt.keys() == lost


def found_exact(record: dict[str, Any]) -> list[str]:
    return [n for n, state in record["salvage"]["tensors"].items() if state == "exact"]


def test_the_optimizer_of_another_step_for_weights_of_zero(tmp_path: Path) -> None:
    folder = damaged("zero1_w2", tmp_path / "new", "*/*optim*")
    whole = peers.FIXTURES / "zero1_w2" / "ckpt"
    done = ckpttool_here(
        "convert", folder, tmp_path / "out", "--to", "zero1", "-n", "3", "--salvage", "--fill-from", whole
    )
    assert done.returncode == 0, done.stderr
    assert digests(tmp_path / "out") == truth("zero1_w2")
    told = json.loads(ckpttool_here("verify", tmp_path / "out", "--json").stdout)["salvage"]
    assert told["exact"] and told["rebuilt"] and all(n.startswith("optim.") for n in told["rebuilt"])


@pytest.mark.filterwarnings("ignore")
def test_the_python_functions_do_what_the_commands_do(tmp_path: Path) -> None:
    train(tmp_path, (3, 5))
    data = (tmp_path / "step-5" / "__0_0.distcp").read_bytes()
    (tmp_path / "step-5" / "__0_0.distcp").write_bytes(data[: len(data) // 2])
    found = ckpttool.doctor(tmp_path / "step-5")
    assert found.missing and not found.sound
    with pytest.raises(ckpttool.CkpttoolError):
        ckpttool.convert(tmp_path / "step-5", tmp_path / "a.pt")
    ckpttool.convert(tmp_path / "step-5", tmp_path / "a.pt", salvage=True)
    ckpttool.convert(tmp_path / "step-5", tmp_path / "b.pt", salvage=True, fill_from=tmp_path / "step-3")
    with ckpttool.open(tmp_path / "a.pt") as a, ckpttool.open(tmp_path / "b.pt") as b:
        assert len(a) == found.exact and len(b) == found.exact + len(found.missing)
    with ckpttool.plan(tmp_path / "step-5", tmp_path / "c.pt", salvage=True) as planned:
        assert len(planned.draft.checkpoint.tensors) == found.exact


@pytest.mark.filterwarnings("ignore")
def test_fill_from_refuses_another_model_and_a_checkpoint_that_is_whole(tmp_path: Path) -> None:
    train(tmp_path, (3, 5))
    data = (tmp_path / "step-5" / "__0_0.distcp").read_bytes()
    (tmp_path / "step-5" / "__0_0.distcp").write_bytes(data[: len(data) // 2])
    words = ("convert", tmp_path / "step-5", tmp_path / "new", "--to", "dcp", "--fill-from")
    assert ckpttool_here(*words, tmp_path / "step-3").returncode == 2  # without --salvage
    torch.save({"model": {"0.weight": torch.zeros(2, 2), "x": torch.zeros(3)}}, tmp_path / "other.pt")
    done = ckpttool_here(*words, tmp_path / "other.pt", "--salvage")
    assert done.returncode == 3 and "not from the same run" in done.stderr
    torch.save({"model": {"x": torch.zeros(3)}}, tmp_path / "other.pt")
    assert "no tensor of this checkpoint" in ckpttool_here(*words, tmp_path / "other.pt", "--salvage").stderr
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_damaged_copy_with_a_record_is_salvaged_and_what_is_left_has_its_digests(tmp_path: Path) -> None:
    train(tmp_path, (3, 5))
    for step in (3, 5):
        ckpttool.convert(tmp_path / f"step-{step}", tmp_path / f"c{step}", to="dcp", world_size=2)
    (tmp_path / "c5" / "__1_0.distcp").unlink()
    for more in ([], ["--fill-from", tmp_path / "c3"]):
        done = ckpttool_here(
            "convert", tmp_path / "c5", tmp_path / "out", "--to", "dcp", "-n", "1", "--salvage", *more, "--force"
        )
        assert done.returncode == 0 and "tensors have the recorded digests" in done.stderr, done.stderr
    told = json.loads(ckpttool_here("verify", tmp_path / "out", "--read-data", "--json").stdout)
    assert told["salvage"]["exact"] and told["salvage"]["rebuilt"] and not told["salvage"]["missing"]
    # a salvaged copy that is damaged once more: what was rebuilt before stays so
    (tmp_path / "out" / "__0_0.distcp").write_bytes((tmp_path / "out" / "__0_0.distcp").read_bytes()[:-3000])
    again = doctor(tmp_path / "out")
    assert again.missing and not again.sound
    done = ckpttool_here("convert", tmp_path / "out", tmp_path / "twice", "--to", "dcp", "-n", "1", "--salvage")
    assert done.returncode == 0, done.stderr
    twice = json.loads(ckpttool_here("verify", tmp_path / "twice", "--json").stdout)["salvage"]
    assert set(twice["rebuilt"]) == set(told["salvage"]["rebuilt"]) - set(twice["missing"]) and twice["missing"]


def test_a_tied_weight_that_is_lost_is_the_other_one(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    shutil.copytree(peers.FIXTURES / "fsdp2_w3_tied_bf16" / "ckpt", folder)
    with ckpttool.open(folder) as opened:
        ckpt = opened.checkpoint
        kept, lost = "model.model.embed_tokens.weight", "model.lm_head.weight"
        at = {n: {ckpt.files[c.extent.file]: c.extent for c in ckpt.tensors[n].chunks} for n in (kept, lost)}
        file = next(f for f in at[lost] if at[lost][f].offset > at[kept][f].offset)
    whole = digests(folder)
    data = (folder / file).read_bytes()
    (folder / file).write_bytes(data[: at[lost][file].offset + 5])
    assert lost in doctor(folder).missing
    config = json.loads((peers.FIXTURES / "fsdp2_w3_tied_bf16" / "hf_ref" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    found = doctor(folder)
    assert found.rebuilt == {lost: "tied to model.embed_tokens.weight by config.json"} and lost not in found.missing
    assert digests(folder, salvage=True)[lost] == whole[lost]


@pytest.mark.slow
def test_a_directory_of_a_trainer_is_filled_from_the_step_beside_it(tmp_path: Path) -> None:
    """checkpoint-3 of Trainer twice; the second, as checkpoint-7, has lost the weights of a rank."""
    source = next((peers.FIXTURES / "trainers" / "trainer_fsdp2_sharded" / "ckpt").glob("checkpoint-*"))
    for name in ("checkpoint-3", "checkpoint-7"):
        shutil.copytree(source, tmp_path / "run" / name)
    (tmp_path / "run" / "checkpoint-7" / "pytorch_model_fsdp_0" / "__1_0.distcp").unlink()
    found = doctor(tmp_path / "run" / "checkpoint-7")
    assert not found.sound and found.exact and all(n.startswith("model.") for n in found.missing)
    for line in found.next:
        done = ckpttool_here(*shlex.split(line)[1:])
        assert done.returncode == 0, done.stderr
        assert "not read" not in done.stderr  # the lost file is no file beside the checkpoint
    assert digests(tmp_path / "run" / "checkpoint-7-filled") == digests(source)
    told = json.loads(ckpttool_here("verify", tmp_path / "run" / "checkpoint-7-filled", "--json").stdout)["salvage"]
    assert told["rebuilt"].keys() == found.missing.keys() and told["exact"] == found.exact


def test_a_latest_that_names_a_lost_save(tmp_path: Path) -> None:
    folder = tmp_path / "z"
    shutil.copytree(peers.FIXTURES / "zero1_w2" / "ckpt", folder)
    shutil.copytree(folder / "global_step3", folder / "global_step9")
    (folder / "latest").write_text("global_step12")
    for lost in ("not there", "no file"):
        if lost == "no file":
            (folder / "global_step12").mkdir()
        found = doctor(folder)
        (one,) = [f for f in found.findings if f.file == "latest"]
        assert not found.sound and found.layout is None and "global_step9" in one.text and '"global_step12"' in one.text
        assert ("is not there" if lost == "not there" else "no file of the model") in one.text
        assert one.repair is not None and one.repair.endswith("--tag global_step9")
    shutil.rmtree(folder / "global_step9")
    assert ckpttool_here("doctor", folder, "--tag", "global_step3").returncode == 4  # latest is still wrong
    (folder / "latest").write_text("global_step3\n")
    assert doctor(folder).sound


def test_random_states_of_some_ranks(tmp_path: Path) -> None:
    shutil.copytree(peers.FIXTURES / "trainers" / "accelerate_fsdp1_sharded" / "ckpt", tmp_path / "a")
    assert not doctor(tmp_path / "a").findings
    (tmp_path / "a" / "random_states_0.pkl").unlink()
    (one,) = doctor(tmp_path / "a").findings
    assert (one.kind, one.severity) == ("random-states", "note") and "rank 0" in one.text


@pytest.mark.slow
def test_a_damaged_checkpoint_in_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same findings as on a disk, and a copy on the disk."""
    url = moto().bucket(monkeypatch)
    for case, lost in (("fsdp2_w3", "__2_0.distcp"), ("fsdp1_w4_hsdp_mesh", "*_rank_0.pt")):
        folder = damaged(case, tmp_path / case, lost)
        for file in folder.iterdir():
            with fsspec.open(f"{url}/{case}/{file.name}", "wb") as f:
                f.write(file.read_bytes())
        here, there = doctor(folder), doctor(f"{url}/{case}", read_data=True)
        assert (there.exact, there.missing, there.rebuilt) == (here.exact, here.missing, here.rebuilt)
        assert [f.kind for f in there.findings] == [f.kind for f in here.findings]
        done = ckpttool_here("convert", f"{url}/{case}", tmp_path / f"{case}.pt", "--salvage", "--canonical-keys")
        assert done.returncode == 0, done.stderr
        with ckpttool.open(tmp_path / f"{case}.pt") as opened:
            assert len(opened) == here.exact


def test_the_last_shard_of_torchs_writer_is_missed_by_the_rows_of_the_vocabulary(tmp_path: Path) -> None:
    """Its files do not say how many they are: what is left would look like a smaller model, and must not be called exact."""
    whole = peers.FIXTURES / "trainers" / "transformers_w2" / "ckpt"
    shutil.copytree(whole, tmp_path / "t")
    (tmp_path / "t" / "weights" / "shard-00002-model-00001-of-00001.safetensors").unlink()
    for path in (tmp_path / "t", tmp_path / "t" / "weights"):
        found = doctor(path)
        assert not found.sound and found.exact == 0 and found.layout is None
        assert any("a shard of the weights is missing" in f.text for f in found.findings)
        for more in ([], ["--only", "model"], ["--salvage"], ["--only", "model", "--salvage"]):
            done = ckpttool_here("convert", path, tmp_path / "x.pt", *more)
            assert done.returncode == 4, (more, done.stderr)
    assert doctor(whole / "weights").sound
    (tmp_path / "t" / "weights" / "config.json").unlink()  # then the moments show it
    found = doctor(tmp_path / "t")
    assert not found.sound and found.exact == 0 and found.layout is None and len(found.findings) == 1


@pytest.mark.slow
def test_values_that_are_lost_are_named_and_those_of_another_step_stay_rebuilt(tmp_path: Path) -> None:
    """By the names that a reader of the copy gives them, so that --only and --fill-from find them, in every later copy."""
    folder, whole = damaged("fsdp2_w2_groups", tmp_path / "d", "__1_0.distcp"), peers.FIXTURES / "fsdp2_w2_groups/ckpt"
    with ckpttool.open(whole) as opened:
        names = {*opened.checkpoint.tensors, *opened.checkpoint.values}
    lost = set(ckpttool.doctor(folder).missing)
    assert lost < names and {"trainer.step", "scheduler.last_epoch", "optim.param_groups.1.params"} <= lost
    ckpttool.convert(folder, tmp_path / "a", to="dcp", world_size=2, salvage=True, fill_from=whole)
    ckpttool.convert(tmp_path / "a", tmp_path / "b.pt", to="full", ignore_recorded_digests=True)
    ckpttool.convert(tmp_path / "b.pt", tmp_path / "c.tar.zst", to="audit")
    ckpttool.convert(tmp_path / "c.tar.zst", tmp_path / "e", to="dcp", world_size=1)
    for copy in (tmp_path / "a", tmp_path / "b.pt", tmp_path / "c.tar.zst", tmp_path / "e"):
        told = ckpttool.verify(copy, read_data=True)
        assert told.recorded == "equal" and told.salvage is not None
        assert told.salvage["rebuilt"].keys() == lost and not told.salvage["missing"]
        assert any(n.startswith("salvaged: ") for n in ckpttool.inspect(copy).notes)
    assert digests(tmp_path / "a") == truth("fsdp2_w2_groups")


def test_a_directory_names_the_values_that_a_part_lost_and_its_copy_is_compared_with_what_was_written(
    tmp_path: Path,
) -> None:
    source = next((peers.FIXTURES / "trainers" / "trainer_fsdp2_sharded" / "ckpt").glob("checkpoint-*"))
    shutil.copytree(source, tmp_path / "c")
    (tmp_path / "c" / "optimizer_0" / "__1_0.distcp").unlink()
    for only, to in ((["optim"], "dcp"), (None, "trainer")):
        ckpttool.convert(tmp_path / "c", tmp_path / "o", to=to, salvage=True, only=only, force=True)
        told = ckpttool.verify(tmp_path / "o", read_data=True)
        assert told.salvage is not None and "optim.param_groups.0.lr" in told.salvage["missing"]
    state = tmp_path / "o" / "trainer_state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"max_steps": 77}))
    with pytest.raises(ckpttool.CkpttoolError, match=r"trainer\.max_steps"):
        ckpttool.verify(tmp_path / "o", read_data=True)


def test_what_only_the_lost_rank_had_is_missing_beside_what_others_have(tmp_path: Path) -> None:
    """FSDP1 with replicas: all tensors are exact, but for the random states of the rank."""
    folder = damaged("fsdp1_w4_hsdp_mesh", tmp_path / "d", "*_rank_0.pt")
    for rank in (1, 2, 3):
        torch.save({"rng": {"cpu": torch.get_rng_state()}}, folder / f"extra_state_world_size_4_rank_{rank}.pt")
    ckpttool.convert(folder, tmp_path / "o", to="dcp", world_size=4, salvage=True)
    told = ckpttool.verify(tmp_path / "o").salvage
    assert told is not None and list(told["missing"]) == ["rng.0"] and not told["rebuilt"]
    record = json.loads((tmp_path / "o" / "ckpttool.json").read_text())["salvage"]
    assert any("model_world_size_4_rank_0.pt is missing" in text for text in record["problems"])


@pytest.mark.slow
def test_what_was_in_a_lost_common_pt_is_missing(tmp_path: Path) -> None:
    whole = peers.FIXTURES / "megatron" / "stacked_pp2_bf16" / "ckpt" / "iter_0000003"
    shutil.copytree(whole, tmp_path / "iter_0000003")
    (tmp_path / "iter_0000003" / "common.pt").unlink()
    lost = {"optim.param_groups", "scheduler", "trainer", "extra.args"}
    assert ckpttool.doctor(tmp_path / "iter_0000003").missing.keys() == lost
    ckpttool.convert(tmp_path / "iter_0000003", tmp_path / "o", to="dcp", salvage=True)
    told = ckpttool.verify(tmp_path / "o").salvage
    assert told is not None and told["missing"].keys() == lost
    ckpttool.convert(tmp_path / "iter_0000003", tmp_path / "f", to="dcp", salvage=True, fill_from=whole)
    told = ckpttool.verify(tmp_path / "f", read_data=True).salvage
    assert told is not None and not told["missing"] and "optim.param_groups.0.lr" in told["rebuilt"]
