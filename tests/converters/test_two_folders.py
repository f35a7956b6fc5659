"""The weights in one folder and the optimizer in another are one state (fixtures/transformers_jobs.py wrote the fixtures)."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from commands import ckpttool_here
from peers import FIXTURES, REPOSITORY, difference, load_dcp, load_full, load_hf, same_value, tensors_of
from ranks import ENVIRONMENT, NURSERIES, one_at_a_time
from safetensors.torch import load_file, save_file

import ckpttool
from ckpttool.errors import Corrupt, NotRecognised, Unsupported

PAIR = FIXTURES / "trainers" / "transformers_w2" / "ckpt"
TRUTH = FIXTURES / "trainers" / "transformers_w2" / "truth.safetensors"
AUTOMODEL = FIXTURES / "trainers" / "automodel_w2" / "epoch_0_step_3"
#: Of steps 3 to 5 of the job that was never stopped.
UNINTERRUPTED = [4.122189521789551, 4.138580322265625, 4.121163368225098]


def state_of(path: Path) -> dict[str, torch.Tensor]:
    tree = (load_full if path.suffix else load_dcp)(path)
    return {k: t for k, t in tensors_of(tree).items() if k.startswith(("model.", "optim."))}


def weights_in_hf(source: Path, out: Path) -> bool:
    """Whether `--to hf` has the weights bit for bit."""
    ckpttool.convert(source, out, to="hf")
    found = {f"model.{n}": t for n, t in load_hf(out).items()}
    return difference(found, {n: t for n, t in load_file(TRUTH).items() if n.startswith("model.")}) == []


@pytest.mark.parametrize("source", [PAIR, AUTOMODEL], ids=["transformers", "automodel"])
@pytest.mark.parametrize("to", ["dcp", "full"])
def test_both_folders_are_one_state_bit_for_bit(source: Path, to: str, tmp_path: Path) -> None:
    out = tmp_path / ("out" if to == "dcp" else "out.pt")
    done = ckpttool.convert(source, out, to=to, world_size=3 if to == "dcp" else None)
    assert done.verified and not done.dropped
    assert difference(state_of(out), load_file(TRUTH)) == []


def test_the_folder_of_automodel_has_rng_loader_scheduler_and_step(tmp_path: Path) -> None:
    ckpttool.convert(AUTOMODEL, tmp_path / "out", to="dcp", world_size=3)
    tree = load_dcp(tmp_path / "out")
    assert tree["trainer"] == {"step": 3, "epoch": 0} and tree["scheduler"]["last_epoch"] == 3
    for rank in "01":
        for name in ("rng", "dataloader"):
            saved = torch.load(AUTOMODEL / name / f"{name}_dp_rank_{rank}.pt", weights_only=True)
            assert same_value(tree[name][rank], saved)
    with ckpttool.open(AUTOMODEL) as opened:
        ckpt = opened.checkpoint
        assert (ckpt.layout, ckpt.trainer, ckpt.world_size) == ("automodel", "NeMo AutoModel", 2)
        assert [(r.name, r.component) for r in ckpt.unread] == [("losses.json", "")]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_automodel_0_7_names_rng_by_global_rank_and_keeps_an_ema_in_dcp(tmp_path: Path) -> None:
    """save_on_global_ranks, save_distributed_state and lifecycle.py of 0.7.0."""
    source = tmp_path / "epoch_0_step_3"
    shutil.copytree(AUTOMODEL, source)
    for rank in "01":
        (source / "rng" / f"rng_dp_rank_{rank}.pt").rename(source / "rng" / f"rng_global_rank_{rank}.pt")
    dcp.save({"shadow": {"w": torch.arange(5.0)}}, checkpoint_id=str(source / "ema"), no_dist=True)
    (source / ".incomplete").touch()
    ckpttool.convert(source, tmp_path / "out", to="dcp", world_size=2)
    tree = load_dcp(tmp_path / "out")
    assert set(tree["rng"]) == {"0", "1"}
    assert [float(x) for x in tree["extra"]["ema"]["shadow"]["w"]] == [0, 1, 2, 3, 4]
    with ckpttool.open(source) as opened:
        assert opened.checkpoint.world_size == 2
        assert any("AutoModel does not resume from it" in n for n in opened.checkpoint.notes)
    assert weights_in_hf(source, tmp_path / "hf")
    shutil.copytree(AUTOMODEL, tmp_path / "epoch_0_step_1")
    found = json.loads(ckpttool_here("inspect", tmp_path, "--json").stdout)
    assert found["newest"] == str(tmp_path / "epoch_0_step_1")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_automodel_with_dcp_weights_and_files_of_older_releases(tmp_path: Path) -> None:
    source = tmp_path / "epoch_0_step_3"
    shutil.copytree(AUTOMODEL, source)
    weights = {n.removeprefix("model."): t for n, t in load_file(TRUTH).items() if n.startswith("model.")}
    shutil.rmtree(source / "model")
    dcp.save(weights, checkpoint_id=str(source / "model"), no_dist=True)
    for name in ("rng", "dataloader"):
        (source / name / f"{name}_dp_rank_0.pt").rename(source / f"{name}.pt")
        shutil.rmtree(source / name)
    torch.save({"seen": 5}, source / "sampler.pt")
    ckpttool.convert(source, tmp_path / "out", to="dcp", world_size=2)
    assert difference(state_of(tmp_path / "out"), load_file(TRUTH)) == []
    tree = load_dcp(tmp_path / "out")
    assert tree["dataloader"] == {"_num_yielded": 3} and tree["extra"]["sampler"] == {"seen": 5}
    assert set(tree["rng"]) == {"0"}
    assert weights_in_hf(source, tmp_path / "hf")


def test_automodel_s_adapter_has_other_names_in_its_optimizer(tmp_path: Path) -> None:
    """Model names get base_model.model. for PEFT, those of the optimizer do not."""
    truth = load_file(TRUTH)
    source = tmp_path / "epoch_0_step_3"
    shutil.copytree(AUTOMODEL, source)
    for file in (source / "model").iterdir():
        file.unlink()
    weights = {n.removeprefix("model."): t for n, t in truth.items() if n.startswith("model.")}
    save_file({f"base_model.model.{n}": t for n, t in weights.items()}, source / "model" / "adapter_model.safetensors")
    ckpttool.convert(source, tmp_path / "out", to="dcp", world_size=2)
    tree = load_dcp(tmp_path / "out")
    assert tree["model"].keys() == tree["optim"]["state"].keys() == {f"base_model.model.{n}" for n in weights}
    for n in weights:
        assert torch.equal(tree["optim"]["state"][f"base_model.model.{n}"]["exp_avg"], truth[f"optim.{n}.exp_avg"])
    assert {n for g in tree["optim"]["param_groups"] for n in g["params"]} == set(tree["model"])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_automodel_s_adapter_becomes_one_of_peft(tmp_path: Path) -> None:
    source = tmp_path / "epoch_0_step_3"
    shutil.copytree(AUTOMODEL, source)
    for name in ("model", "optim"):
        shutil.rmtree(source / name)
    (source / "model").mkdir()
    q = "model.layers.0.self_attn.q_proj.lora_"
    weights = {f"{q}A.weight": torch.randn(2, 16), f"{q}B.weight": torch.randn(16, 2)}
    prefixed = {f"base_model.model.{n}": t for n, t in weights.items()}
    save_file(prefixed, source / "model" / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["q_proj"],
        "base_model_name_or_path": "x",
    }
    (source / "model" / "adapter_config.json").write_text(json.dumps(config))
    state = {n: {"exp_avg": t * 2} for n, t in weights.items()}
    optim = {"state": state, "param_groups": [{"lr": 0.1, "params": list(weights)}]}
    dcp.save({"optim": optim}, checkpoint_id=str(source / "optim"), no_dist=True)
    with pytest.raises(
        Unsupported, match=r"holds an adapter only \(r=2, 1 module\), which from_pretrained cannot load alone"
    ):
        ckpttool.convert(source, tmp_path / "hf", to="hf")
    ckpttool.convert(source, tmp_path / "peft", to="hf", options=ckpttool.HfOptions(adapter=True))
    assert difference(load_file(tmp_path / "peft" / "adapter_model.safetensors"), prefixed) == []
    assert json.loads((tmp_path / "peft" / "adapter_config.json").read_text())["r"] == 2


def test_consolidated_weights_are_the_same_again(tmp_path: Path) -> None:
    source = tmp_path / "epoch_0_step_3"
    shutil.copytree(AUTOMODEL, source)
    ckpttool.convert(PAIR, source / "model" / "consolidated", to="hf")
    with ckpttool.open(source) as opened:
        assert ("model/consolidated/", "") in [(r.name, r.component) for r in opened.checkpoint.unread]
    done = ckpttool.convert(source, tmp_path / "out", to="hf")
    assert done.verified and (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize("where", ["optimizer inside", "both in one folder", "other names"])
def test_the_user_of_transformers_names_the_folders(where: str, tmp_path: Path) -> None:
    source = tmp_path / "save"
    shutil.copytree(PAIR / "weights", source / "sharded" if where == "other names" else source)
    shutil.copytree(
        PAIR / "optimizer",
        source / {"optimizer inside": "my-optim", "both in one folder": "", "other names": "adam_optim"}[where],
        dirs_exist_ok=True,
    )
    torch.save({"last_epoch": 3}, source / "scheduler.pt")
    ckpttool.convert(source, tmp_path / "out", to="dcp", world_size=2)
    assert difference(state_of(tmp_path / "out"), load_file(TRUTH)) == []
    assert load_dcp(tmp_path / "out")["scheduler"] == {"last_epoch": 3}
    assert weights_in_hf(source, tmp_path / "hf")


def test_weights_alone_name_the_optimizer_beside_them(tmp_path: Path) -> None:
    with ckpttool.open(PAIR / "weights") as opened:
        assert [(r.name, r.component) for r in opened.checkpoint.unread] == [("../optimizer/", "optim")]
    with pytest.raises(Unsupported, match=r"\.\./optimizer/ \(\d+\.\d kB, optimizer\)"):
        ckpttool.convert(PAIR / "weights", tmp_path / "out", to="dcp", world_size=2)
    assert weights_in_hf(PAIR / "weights", tmp_path / "hf")


def test_each_folder_alone_says_how_to_give_both(tmp_path: Path) -> None:
    shutil.copytree(PAIR / "weights", tmp_path / "here" / "w")
    shutil.copytree(PAIR / "optimizer", tmp_path / "there" / "state")
    for folder, says in (
        ("here/w", "if save_optimizer_distributed wrote an optimizer, move both folders into one"),
        ("there/state", "or move this folder and that of the weights into one"),
    ):
        assert says in json.loads(ckpttool_here("inspect", tmp_path / folder, "--json").stdout)["next"]
    truth = load_file(TRUTH)
    for folder, kind in (("here/w", "model."), ("there/state", "optim.")):
        ckpttool.convert(tmp_path / folder, tmp_path / f"{kind}pt", to="full")
        assert (
            difference(state_of(tmp_path / f"{kind}pt"), {n: t for n, t in truth.items() if n.startswith(kind)}) == []
        )
    shutil.copytree(tmp_path / "there" / "state", tmp_path / "here" / "optimizer")
    with ckpttool.open(tmp_path / "here") as opened:
        assert opened.checkpoint.layout == "transformers_sharded"


def test_a_shard_of_the_weights_that_is_missing_is_missed_by_the_moments(tmp_path: Path) -> None:
    source = tmp_path / "save"
    shutil.copytree(PAIR, source)
    (source / "weights" / "shard-00002-model-00001-of-00001.safetensors").unlink()
    (source / "weights" / "config.json").unlink()  # which says how many rows the vocabulary has
    with pytest.raises(Corrupt, match=r"the shards hold 31 rows of .*, and its exp_avg has 61: a shard"):
        ckpttool.open(source)
    with ckpttool.open(source / "weights") as opened:
        assert any("1 shards, which do not say how many" in n for n in opened.checkpoint.notes)


def test_a_run_lists_each_step_once_and_a_file_is_answered_with_its_directory(tmp_path: Path) -> None:
    for step in (3, 6):
        shutil.copytree(AUTOMODEL, tmp_path / f"epoch_0_step_{step}")
    for link in ("LATEST", "LOWEST_VAL"):
        (tmp_path / link).symlink_to("epoch_0_step_6")
    found = json.loads(ckpttool_here("inspect", tmp_path, "--json").stdout)
    assert [c["name"] for c in found["checkpoints"]] == ["epoch_0_step_3", "epoch_0_step_6"]
    assert found["newest"] == str(tmp_path / "epoch_0_step_6")
    with ckpttool.open(tmp_path / "LATEST") as opened:
        assert opened.checkpoint.layout == "automodel"
    step = tmp_path / "epoch_0_step_6"
    for file in (step / "optim" / "__0_0.distcp", step / "model" / "shard-00001-model-00001-of-00001.safetensors"):
        with pytest.raises(NotRecognised, match=rf"is one file of the automodel checkpoint {step}; give that"):
            ckpttool.open(file)


def test_inspect_says_whose_it_is() -> None:
    for source, layout in ((PAIR, "transformers_sharded"), (AUTOMODEL, "automodel")):
        found = json.loads(ckpttool_here("inspect", source, "--json").stdout)
        assert found["layout"] == layout and found["optimizer"]["kind"] and found["next"]


@pytest.mark.live
@pytest.mark.slow
def test_transformers_resumes_from_its_two_folders_at_three_ranks(tmp_path: Path) -> None:
    """What `inspect` says of them: nothing to convert."""
    job = [str(REPOSITORY / "fixtures" / "transformers_jobs.py"), "resume", str(PAIR)]
    with one_at_a_time():
        NURSERIES.launch(3, job, tmp_path / "log", **ENVIRONMENT, TORCHELASTIC_RUN_ID="resume")
    log = (tmp_path / "log").read_text(encoding="utf-8", errors="replace")
    found = re.search(r"LOSSES (\[.*\])", log)
    assert found, log[-3000:]
    assert json.loads(found[1]) == pytest.approx(UNINTERRUPTED, abs=2e-6)
