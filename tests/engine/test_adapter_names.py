"""LoRA through a name map: a live PEFT model of the other names goes on with the same losses; what cannot follow is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import ckpttool
from ckpttool import layouts
from ckpttool.errors import Unsupported

if TYPE_CHECKING:
    from peft import PeftModel

pytestmark = pytest.mark.slow  # its functions import peft, which takes three seconds

MAP = """sides mine | theirs
tok.weight = embed.weight
head.weight = lm_head.weight
layers.{i}.wq.{*} = blocks.{i}.q_proj.{*}
layers.{i}.wo.weight = blocks.{i}.o_proj.weight
layers.{i}.norm.{*} = blocks.{i}.ln.{*}
"""
MINE, THEIRS = ("tok", "layers", "wq", "wo", "norm", "head"), ("embed", "blocks", "q_proj", "o_proj", "ln", "lm_head")


class Block(nn.Module):
    """Three modules under the names of a program."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        for n, module in zip(names[2:5], (nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.LayerNorm(8)), strict=True):
            self.add_module(n, module)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self.children():
            x = module(x)
        return x


class Net(nn.Module):
    """A model under the names of a program."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.add_module(names[0], nn.Embedding(131, 8))
        self.add_module(names[1], nn.ModuleList(Block(names) for _ in range(2)))
        self.add_module(names[5], nn.Linear(8, 131, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self.children():
            for m in module if isinstance(module, nn.ModuleList) else [module]:
                x = m(x)
        return x


def job(names: tuple[str, ...], dora: bool) -> tuple[PeftModel, torch.optim.AdamW]:
    """A PEFT model with two param groups."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=2, target_modules=[names[2], names[3]], modules_to_save=[names[5]], init_lora_weights=False, use_dora=dora
    )
    model = get_peft_model(Net(names), config)
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, torch.optim.AdamW([{"params": trained[:3]}, {"params": trained[3:], "lr": 0.02}], lr=0.01)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """One step on the same tokens; returns the loss."""
    optimizer.zero_grad()
    loss = model(torch.arange(15).view(3, 5)).pow(2).mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def saved(folder: Path, text: str = MAP, dora: bool = False) -> tuple[PeftModel, torch.optim.AdamW]:
    """A job after one step, saved as a.pt; and a.map."""
    torch.manual_seed(0)
    model, optimizer = job(MINE, dora)
    step(model, optimizer)
    weights, state = get_state_dict(model, optimizer)
    torch.save({"model": weights, "optim": state}, folder / "a.pt")
    (folder / "a.map").write_text(text)
    return model, optimizer


@pytest.mark.parametrize("dora", [False, True])
def test_a_job_of_the_other_names_goes_on_with_the_same_losses(tmp_path: Path, dora: bool) -> None:
    model, optimizer = saved(tmp_path, dora=dora)
    result = ckpttool.convert(tmp_path / "a.pt", tmp_path / "b.pt", map=tmp_path / "a.map")
    assert any("those of the adapter after their base weights" in n for n in result.notes)
    state = torch.load(tmp_path / "b.pt")
    theirs, theirs_optimizer = job(THEIRS, dora)
    set_state_dict(theirs, theirs_optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    assert [step(theirs, theirs_optimizer) for _ in range(3)] == [step(model, optimizer) for _ in range(3)]
    ckpttool.convert(tmp_path / "b.pt", tmp_path / "back.pt", map=tmp_path / "a.map")
    assert ckpttool.diff(tmp_path / "back.pt", tmp_path / "a.pt").equal


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("layers.{i}.wo.weight [(a b) x] = blocks.{i}.o_proj.weight [(b a) x]\nsize a = 2", 'layers.0.wo.weight" is more than renamed'),
        ("layers.{i}.wo.weight [x y] = blocks.{i}.o_proj.weight [y x]", 'layers.0.wo.weight" is more than renamed'),
        ("layers.{i}.wo.weight [(a+a) x] = blocks.{i}.g.weight [a x] + blocks.{i}.u.weight [a x]", 'layers.0.wo.weight" is more than renamed'),
        ("", r"2 weights that have an adapter, or stand beside it, are not names of mine: layers\.0\.wo\.weight"),
        ("layers.{i}.wo.weight = blocks.{i}.o_proj", "not in the module that the others go to"),
    ],
)  # fmt: skip
def test_what_an_adapter_cannot_follow_is_refused_by_name(tmp_path: Path, line: str, says: str) -> None:
    saved(tmp_path, MAP.replace("layers.{i}.wo.weight = blocks.{i}.o_proj.weight", line))
    with pytest.raises(Unsupported, match=says):
        ckpttool.convert(tmp_path / "a.pt", tmp_path / "b.pt", map=tmp_path / "a.map")
    assert not (tmp_path / "b.pt").exists()


def test_an_adapter_alone_follows_and_its_config_is_not_taken_for_that_of_the_new_names(tmp_path: Path) -> None:
    from peft import PeftModel

    model, _ = saved(tmp_path)
    model.save_pretrained(tmp_path / "peft")
    ckpttool.convert(tmp_path / "peft", tmp_path / "b.pt", map=tmp_path / "a.map")
    names = {n.replace(".default", "") for n in job(THEIRS, False)[0].state_dict() if "lora_" in n}
    assert {n for n in torch.load(tmp_path / "b.pt")["model"] if "lora_" in n} == names
    hf = layouts.find("hf").options
    assert hf is not None
    with pytest.raises(Unsupported, match=r"target_modules \['wo', 'wq'\], and no module of the adapter is among them"):
        ckpttool.convert(tmp_path / "peft", tmp_path / "out", to="hf", map=tmp_path / "a.map", options=hf(adapter=True))
    ckpttool.adapter_extract(tmp_path / "b.pt", tmp_path / "made", lora_alpha=8)
    theirs: Any = PeftModel.from_pretrained(Net(THEIRS), str(tmp_path / "made"))
    assert torch.equal(
        theirs.base_model.model.blocks[1].o_proj.lora_B.default.weight,
        model.base_model.model.layers[1].wo.lora_B.default.weight,
    )


def test_a_map_of_the_adapters_own_names_is_used_as_it_is(tmp_path: Path) -> None:
    saved(tmp_path, "sides mine | theirs\n{*} = net.{*}\n")
    ckpttool.convert(tmp_path / "a.pt", tmp_path / "b.pt", map=tmp_path / "a.map")
    before, after = (torch.load(tmp_path / f)["model"] for f in ("a.pt", "b.pt"))
    assert list(after) == [f"net.{n}" for n in before]
