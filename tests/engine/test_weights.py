"""--weights: the averages that trainers keep, exported as the model; the truth is what the library evaluates with.

fixtures/averages is of schedulefree, diffusers and ema_pytorch themselves (fixtures/averages_jobs.py); torch's own classes and
Lightning run here; timm's and CompVis' files are made here as their code writes them."""

from __future__ import annotations

import copy
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from commands import ckpttool_here
from peers import FIXTURES, raw
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import ckpttool
from ckpttool.engine import computed_files
from ckpttool.errors import CkpttoolError, Corrupt, Unsupported, UsageError

AVERAGES = FIXTURES / "averages"


class Net(nn.Module):
    """A tied embedding, a parameter without dimensions, and batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.emb = nn.Embedding(131, 6)
        self.conv = nn.Conv1d(6, 6, 3)
        self.bn = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 131, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.bn(self.conv(self.emb(x).transpose(1, 2))) * self.scale
        return self.head(h.transpose(1, 2)).float().pow(2).mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, averaged: Any = None) -> None:
    for step in range(3):
        torch.manual_seed(step)
        model(torch.randint(0, 131, (3, 9))).backward()
        optimizer.step()
        optimizer.zero_grad()
        if averaged is not None:
            averaged.update_parameters(model)


@pytest.fixture(scope="module")
def job() -> tuple[Net, torch.optim.Optimizer, Any]:
    """A model, its optimizer, and torch's average of it."""
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    train(model, optimizer, averaged)
    return model, optimizer, averaged


def differing(path: Path, wanted: dict[str, Tensor], **how: Any) -> list[str]:
    """The names of weights that are not bit for bit those that are wanted, or that are only in one of the two."""
    with ckpttool.open(path, **how) as opened:
        found = {n.removeprefix("model."): opened[n].torch() for n in opened}
    return sorted(
        {n for n in {**found, **wanted} if n not in found or n not in wanted or raw(found[n]) != raw(wanted[n])}
    )


def save_forms(job: Any, folder: Path) -> dict[str, tuple[Path, str, dict[str, Tensor]]]:
    """{form: (file, key of its average, the average)}: what trainers and libraries write."""
    model, optimizer, averaged = job
    state, mean = model.state_dict(), averaged.module.state_dict()
    usual = {"optimizer": optimizer.state_dict(), "epoch": 3}
    lightning = {"pytorch-lightning_version": "2.6.6", "epoch": 1, "global_step": 3, "loops": {}, "lr_schedulers": []}
    lightning["optimizer_states"] = [optimizer.state_dict()]
    scaled = {n: p.detach() * 0.5 for n, p in model.named_parameters()}
    whole = {**state, **scaled, "head.weight": scaled["emb.weight"]}
    forms: dict[str, tuple[dict[str, Any], str, dict[str, Tensor]]] = {
        "ema": ({"model": state, "ema": mean, "step": 3}, "ema", mean),
        "under another key": ({"model": state, **usual, "polyak": mean}, "polyak", mean),
        "AveragedModel": ({"model": state, **usual, "swa_model": averaged.state_dict()}, "swa", mean),
        "AveragedModel alone": (averaged.state_dict(), "module", mean),
        "timm": ({"arch": "net", "state_dict": state, "state_dict_ema": mean, **usual}, "ema", mean),
        "compiled": ({"model": state, "ema": {f"_orig_mod.{n}": t for n, t in mean.items()}}, "ema", mean),
        "parameters alone": ({"model": state, **usual, "ema": {"decay": 0.9, "shadow": scaled}}, "shadow", whole),
        "a list": ({"model": state, **usual, "ema": {"shadow_params": list(scaled.values()), "decay": 0.9}}, "ema", whole),
        "a callback of Lightning": ({**lightning, "state_dict": state, "callbacks": {"EMA": {"ema_state_dict": mean}}}, "ema_state_dict", mean),
        "inside the model": (
            {**lightning, "state_dict": {f"net.{n}": t for n, t in state.items()} | {f"net_ema.{n}": t for n, t in mean.items()}},
            "ema", {f"net.{n}": t for n, t in mean.items()},
        ),
        "CompVis": (
            {"state_dict": {f"model.{n}": t for n, t in state.items()} | {f"model_ema.{n.replace('.', '')}": t for n, t in mean.items()}
             | {"model_ema.decay": torch.tensor(0.9), "model_ema.num_updates": torch.tensor(3), "first_stage.weight": torch.ones(2)}},
            "ema", {f"model.{n}": t for n, t in mean.items()} | {"first_stage.weight": torch.ones(2)},
        ),
        "a teacher without a model": ({"student": state, "teacher": mean, "epoch": 1}, "teacher", mean),
    }  # fmt: skip
    out = {}
    for form, (tree, key, wanted) in forms.items():
        path = folder / f"{form.replace(' ', '_')}.pt"
        torch.save(tree, path)
        out[form] = (path, key, wanted)
    return out


FORMS = (
    "ema", "under another key", "AveragedModel", "AveragedModel alone", "timm", "compiled", "parameters alone", "a list",
    "a callback of Lightning", "inside the model", "CompVis", "a teacher without a model",
)  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_an_average_is_exported_as_the_model(job: Any, form: str, tmp_path: Path) -> None:
    path, key, wanted = save_forms(job, tmp_path)[form]
    said = ckpttool.inspect(path).weights
    if form != "a teacher without a model":  # what else a file without a model holds, nobody knows
        assert len(said) == 1 and said[0]["what"].startswith("average" if form != "AveragedModel alone" else "weights")
        assert differing(path, wanted, weights=said[0]["key"]) == []
    done = ckpttool.convert(path, tmp_path / "out", to="dcp", world_size=3, weights=key)
    assert differing(tmp_path / "out", wanted) == []
    assert any("are the model now" in note for note in done.notes)
    record = json.loads((tmp_path / "out" / "ckpttool.json").read_text())
    assert record["weights"]["key"] and not any(n.startswith(("optim.", "extra.")) for n in record["tensors"])
    ckpttool.convert(path, tmp_path / "out.pt", to="full", weights=key)
    found = torch.load(tmp_path / "out.pt")["model"]
    assert list(found) == [n for n in wanted if n in found] and found.keys() == wanted.keys()
    heads = [n for n in found if n.endswith("head.weight")]
    assert all(found[n].data_ptr() == found[n.replace("head", "emb")].data_ptr() for n in heads) or form in (
        "inside the model",
        "CompVis",
    )


def test_diff_digest_and_the_tree_show_the_chosen_weights(job: Any, tmp_path: Path) -> None:
    path, _, mean = save_forms(job, tmp_path)["timm"]
    torch.save({"model": mean}, tmp_path / "mean.pt")
    assert ckpttool.diff(path, tmp_path / "mean.pt", weights="ema").equal
    assert not ckpttool.diff(path, tmp_path / "mean.pt", only=["model"]).equal
    assert ckpttool.digest(path, weights="ema").digest == ckpttool.digest(tmp_path / "mean.pt").digest
    done = ckpttool_here("inspect", path, "--weights", "ema", "--tree")
    assert done.returncode == 0 and "optim" not in done.stdout.partition("note")[0]
    shown = ckpttool_here("inspect", path).stdout
    assert "state_dict_ema: 10 tensors" in shown and "exported by --weights state_dict_ema" in shown
    said = json.loads(ckpttool_here("inspect", path, "--json").stdout)["weights"]
    assert said == [
        {"key": "state_dict_ema", "tensors": 10, "bytes": 6852, "what": "average", "option": "--weights state_dict_ema"}
    ]


def test_the_rest_is_left_behind_by_name(job: Any, tmp_path: Path) -> None:
    path, key, _ = save_forms(job, tmp_path)["timm"]
    done = ckpttool.convert(path, tmp_path / "out.pt", to="full", weights=key)
    dropped = {name for name, _, _ in done.dropped}
    assert {"optim.state.emb.weight.exp_avg", "extra.arch", "trainer.epoch"} <= dropped
    note = next(note for note in done.notes if "are the model now" in note)
    assert "left behind: the 10 weights of the model and" in note and "optim" in note


@pytest.mark.slow
def test_what_lightnings_callback_writes(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch", reason="needs lightning")
    callbacks = pytest.importorskip("lightning.pytorch.callbacks")
    if not hasattr(callbacks, "EMAWeightAveraging"):
        pytest.skip("needs lightning 2.6")

    from lightning.pytorch.plugins.environments import LightningEnvironment

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Tensor, i: int) -> Tensor:
            return self.net(batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    class Keep(lightning.Callback):  # type: ignore[misc,name-defined]
        def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
            self.trained = copy.deepcopy(module.state_dict())

    keep = Keep()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        trainer = lightning.Trainer(
            max_steps=3, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
            enable_checkpointing=True, plugins=[LightningEnvironment()], default_root_dir=tmp_path,
            callbacks=[keep, callbacks.EMAWeightAveraging(decay=0.9), callbacks.ModelCheckpoint(tmp_path, "last", every_n_train_steps=3)],
        )  # fmt: skip
        trainer.fit(Module(), torch.utils.data.DataLoader(torch.randint(0, 131, (12, 9)), batch_size=4))
    path = tmp_path / "last.ckpt"
    averaged = torch.load(path, weights_only=False)["state_dict"]
    assert any(raw(averaged[n]) != raw(keep.trained[n]) for n in averaged)
    (said,) = ckpttool.inspect(path).weights
    assert said["key"] == "current_model_state" and "the model is their average" in said["what"]
    for key, wanted in (("ema", averaged), ("average", averaged), ("current_model_state", keep.trained)):
        done = ckpttool.convert(path, tmp_path / key, to="dcp", world_size=2, weights=key)
        assert differing(tmp_path / key, wanted) == []
        assert any("is the average already" in note for note in done.notes) == (key != "current_model_state")


@pytest.mark.slow
@pytest.mark.parametrize("case", sorted(p.name for p in AVERAGES.glob("schedulefree_*")))
@pytest.mark.parametrize("most", [1 << 20, 13])
def test_x_of_schedule_free_has_the_bits_of_eval(
    case: str, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(computed_files, "MOST_ELEMENTS", most)
    path, truth = AVERAGES / case / "ckpt.pt", load_file(AVERAGES / case / "truth.safetensors")
    assert "schedule-free-x" in [one["key"] for one in ckpttool.inspect(path).weights]
    done = ckpttool.convert(path, tmp_path / "out", to="dcp", world_size=3, weights="schedule-free-x")
    assert differing(tmp_path / "out", truth) == []
    assert "the weights in the checkpoint are y; x is lerp(y, z, 1 - 1/beta1)" in done.notes
    state = torch.load(path, weights_only=False)
    assert differing(path, state["model"], weights="schedule-free-y") == []
    names = [n for n, _ in Net().named_parameters()]
    z = {n: state["optimizer"]["state"][i]["z"] for i, n in enumerate(names)}
    wanted = state["model"] | z | {"head.weight": z["emb.weight"]}
    assert differing(path, wanted, weights="schedule-free-z") == []
    # saved after eval(): the weights are x
    truth["head.weight"] = truth["emb.weight"]
    truth = {n: truth[n] for n in state["model"]}
    state["model"], state["optimizer"]["param_groups"][0]["train_mode"] = truth, False
    torch.save(state, tmp_path / "eval.pt")
    assert differing(tmp_path / "eval.pt", truth, weights="x") == []
    back = {n: truth[n].clone().lerp_(t, 1 - momentum(state)) for n, t in z.items()}
    wanted = truth | back | {"head.weight": back["emb.weight"]}
    assert differing(tmp_path / "eval.pt", wanted, weights="schedule-free-y") == []
    assert not [one for one in ckpttool.inspect(tmp_path / "eval.pt").weights if one["key"] == "schedule-free-x"]


def momentum(state: dict[str, Any]) -> float:
    group = state["optimizer"]["param_groups"][0]
    return float(group["momentum"] if "momentum" in group else group["betas"][0])


def test_lerp_is_that_of_torch_for_any_weight() -> None:
    from ckpttool.engine import weights

    torch.manual_seed(0)
    for w in (1 - 1 / 0.9, 1 - 1 / 0.5, 1 - 1 / 0.3, 0.1, 0.5, 0.7, 1.0):
        a = torch.randn(20_000) * 10 ** torch.randint(-30, 30, (20_000,))
        b = a * (1 + torch.randn(20_000) * 1e-3)
        a[:4], b[2:6] = torch.tensor([0.0, -0.0, float("inf"), 3e38]), torch.tensor([0.0, 1e-45, float("inf"), -3e38])
        found = torch.from_numpy(weights._interpolate(a.numpy(), b.numpy(), w))
        wanted = a.lerp(b, w)
        same = (found == wanted) | (found.isnan() & wanted.isnan())
        assert same.all(), (w, a[~same][:3], b[~same][:3])


@pytest.mark.parametrize(
    ("case", "weights"),
    [
        ("diffusers_folders", "unet_ema"),
        ("diffusers_folders", "ema"),
        ("diffusers_registered", "ema"),
        ("ema_pytorch", "ema"),
    ],
)
def test_averages_of_other_libraries(case: str, weights: str, tmp_path: Path) -> None:
    path = AVERAGES / case / "ckpt"
    path = path if path.exists() else path.with_suffix(".pt")
    truth = load_file(AVERAGES / case / "truth.safetensors")
    ckpttool.convert(path, tmp_path / "out", to="dcp", world_size=2, weights=weights)
    if case == "diffusers_registered":  # safetensors has one of the two names
        del truth["head.weight"]
    assert differing(tmp_path / "out", truth) == []
    with pytest.raises(CkpttoolError):
        ckpttool.convert(path, tmp_path / "no", to="dcp", world_size=2, weights="nothing")


def test_an_average_in_a_file_beside_the_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    shutil.copytree(FIXTURES / "hf_tied" / "ckpt", folder)
    state = load_file(next(folder.glob("*.safetensors")))
    mean = {n: t * 2 for n, t in state.items()}
    torch.save(mean, folder / "ema.pt")
    (said,) = ckpttool.inspect(folder).weights
    assert (said["key"], said["tensors"]) == ("ema.pt", None)
    for key in ("ema", "ema.pt"):
        done = ckpttool.convert(folder, tmp_path / key.replace(".", "-"), to="hf", weights=key)
        found = load_file(next((tmp_path / key.replace(".", "-")).glob("*.safetensors")))
        assert found.keys() == state.keys() and all(raw(found[n]) == raw(mean[n]) for n in found)
        assert (tmp_path / key.replace(".", "-") / "config.json").exists() and "the weights" in " ".join(done.notes)
    torch.save({"model": state, "ema": mean, "step": 3}, folder / "ema.pt")
    ckpttool.convert(folder, tmp_path / "inner", to="hf", weights="ema")
    found = load_file(next((tmp_path / "inner").glob("*.safetensors")))
    assert all(raw(found[n]) == raw(mean[n]) for n in found)
    torch.save({n: t[:-1] for n, t in mean.items()}, folder / "ema.pt")
    with pytest.raises(Unsupported, match="another shape"):
        ckpttool.convert(folder, tmp_path / "no", to="hf", weights="ema")


@pytest.mark.slow
@pytest.mark.parametrize("form", ["a dict", "a slot", "asgd"])
def test_averages_in_a_sharded_checkpoint(form: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer: Any = (
        torch.optim.ASGD(model.parameters(), 1e-2, t0=1)
        if form == "asgd"
        else torch.optim.AdamW(model.parameters(), 1e-2)
    )
    train(model, optimizer)
    weights, state = get_state_dict(model, optimizer)
    weights = {n: t.clone() for n, t in weights.items()}  # as a sharded job saves tied weights: twice
    scaled = {n: p.detach() * 0.5 for n, p in model.named_parameters()}
    tree: dict[str, Any] = {"model": weights, "optim": state}
    key = {"a dict": "ema", "a slot": "ema", "asgd": "ax"}[form]
    if form == "a dict":
        tree["ema"] = scaled
    elif form == "a slot":  # as an optimizer beside the one that trains, whose state are averages
        for n, t in scaled.items():
            state["state"][n]["ema"] = t
    else:
        scaled = {n: state["state"][n]["ax"] for n in scaled}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(tree, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    wanted = weights | scaled | {"head.weight": scaled["emb.weight"]}
    assert [one["key"] for one in ckpttool.inspect(tmp_path / "ckpt").weights] == [key]
    done = ckpttool.convert(tmp_path / "ckpt", tmp_path / "out.pt", to="full", weights=key, workers=2)
    assert differing(tmp_path / "out.pt", wanted) == []
    assert any("bn.running_mean, bn.running_var, bn.num_batches_tracked" in note for note in done.notes)
    if form != "asgd":
        with pytest.raises(UsageError, match="no set of weights"):
            ckpttool.open(tmp_path / "ckpt", weights="exp_avg")


def test_digests_that_were_recorded_of_an_average_are_compared(job: Any, tmp_path: Path) -> None:
    path, _, mean = save_forms(job, tmp_path)["timm"]
    ckpttool.convert(path, tmp_path / "dcp", to="dcp", world_size=2)
    done = ckpttool.convert(tmp_path / "dcp", tmp_path / "out", to="dcp", world_size=3, weights="ema")
    assert done.compared == len(mean) and differing(tmp_path / "out", mean) == []
    record = json.loads((tmp_path / "dcp" / "ckpttool.json").read_text())
    record["tensors"]["extra.state_dict_ema.bn.bias"][2] = "0" * 64
    (tmp_path / "dcp" / "ckpttool.json").write_text(json.dumps(record))
    with pytest.raises(Corrupt, match="do not have the digest"):
        ckpttool.convert(tmp_path / "dcp", tmp_path / "no", to="dcp", world_size=3, weights="ema")


def test_what_is_not_whole_or_not_clear_is_refused_by_name(job: Any, tmp_path: Path) -> None:
    model = job[0].state_dict()
    part = {n: t for n, t in model.items() if n != "conv.weight"} | {"emb.weight": model["emb.weight"][:130]}
    torch.save({"model": model, "ema": part}, tmp_path / "part.pt")
    with pytest.raises(Unsupported, match=r"lacks 1 parameter: conv\.weight; .*\"emb\.weight\" is \[130, 6\]"):
        ckpttool.convert(tmp_path / "part.pt", tmp_path / "out", to="hf", weights="ema")
    assert ckpttool.inspect(tmp_path / "part.pt").weights == []
    torch.save({"model": model, "ema_fast": model, "ema_slow": copy.deepcopy(model)}, tmp_path / "two.pt")
    with pytest.raises(UsageError, match="2 sets of weights of such a name: ema_fast, ema_slow"):
        ckpttool.convert(tmp_path / "two.pt", tmp_path / "out", to="hf", weights="ema")
    with pytest.raises(UsageError, match=r"two\.pt has no set of weights of such a name; it holds ema_fast, ema_slow"):
        ckpttool.convert(tmp_path / "two.pt", tmp_path / "out", to="hf", weights="nope")
    with pytest.raises(Unsupported, match="no state of a schedule-free optimizer"):
        ckpttool.convert(tmp_path / "two.pt", tmp_path / "out", to="hf", weights="schedule-free-x")
    with pytest.raises(UsageError, match="a model of weights alone"):
        ckpttool.convert(tmp_path / "two.pt", tmp_path / "out", to="hf", weights="ema_slow", only=["optim"])
    assert not (tmp_path / "out").exists()


def test_a_dtype_of_its_own_is_kept_and_said(job: Any, tmp_path: Path) -> None:
    model = {n: t.bfloat16() if t.is_floating_point() else t for n, t in job[0].state_dict().items()}
    mean = job[2].module.state_dict()
    torch.save({"model": model, "ema": mean}, tmp_path / "a.pt")
    done = ckpttool.convert(tmp_path / "a.pt", tmp_path / "out", to="dcp", world_size=1, weights="ema")
    assert (
        differing(tmp_path / "out", mean) == []
        and "they are float32, and the weights of the model bfloat16" in done.notes
    )
    ckpttool.convert(tmp_path / "a.pt", tmp_path / "low", to="dcp", world_size=1, weights="ema", dtype="bf16")
    assert differing(tmp_path / "low", {n: t.bfloat16() if t.is_floating_point() else t for n, t in mean.items()}) == []
