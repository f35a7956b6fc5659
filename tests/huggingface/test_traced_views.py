"""What transformers joins and permutes on the way to the Hub, told element by element, and written so."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import ckpttool
from ckpttool.huggingface import hub_names
from ckpttool.huggingface.traced_views import make_trace
from tests.torture import hub_names as architectures

CASES: list[tuple[Callable[..., Any], dict[str, tuple[int, ...]]]] = [
    (lambda a, b: torch.cat([a, b]), {"a": (3, 4), "b": (2, 4)}),
    (lambda a, b: torch.cat([a, b]).reshape(2, 4, 3).transpose(0, 1).reshape(8, 3), {"a": (4, 3), "b": (4, 3)}),
    (lambda a: a.view(2, 2, 3, 5).transpose(1, 2).reshape(12, 5), {"a": (12, 5)}),
    (lambda a: a.reshape(2, 3, 2, 5).transpose(1, 2).reshape(2, 6, 5).contiguous().chunk(2, 1), {"a": (2, 6, 5)}),
    (lambda a, b, c, d: torch.cat([torch.stack([a, b]), torch.stack([c, d])], 1), dict.fromkeys("abcd", (2, 3))),
    (lambda a: [x.squeeze(0) for x in a.chunk(4, 1)[-1].chunk(3, 0)], {"a": (3, 8, 2)}),
    (lambda a: a[..., 1:3, -1], {"a": (3, 4, 2)}),
    (lambda a: torch.unbind(a, 1), {"a": (3, 4, 2)}),
    (lambda a, b: torch.cat([a, b]).split([1, 6]), {"a": (4, 2), "b": (3, 2)}),
    (lambda a: a.to(torch.bfloat16).t().permute(1, 0), {"a": (4, 2)}),
    (lambda a, b: torch.cat([a, b], -1), {"a": (2, 0), "b": (2, 3)}),
    (lambda a: a.reshape(()), {"a": (1, 1)}),
]


@pytest.mark.parametrize(("compute", "shapes"), CASES)
def test_every_element_is_told(compute: Callable[..., Any], shapes: dict[str, tuple[int, ...]]) -> None:
    named = {k: torch.empty(s, device="meta") for k, s in shapes.items()}
    with make_trace(named) as trace:
        out = compute(**named)
    real = {k: torch.randn(s) for k, s in shapes.items()}
    want = compute(**real)
    for told, t in zip(out, want, strict=True) if isinstance(want, (list, tuple)) else [(out, want)]:
        got = torch.full(t.shape, float("nan"), dtype=t.dtype)
        for p in trace.parts_of(told):
            for index in product(*(range(r.size) for r in p.runs)):
                to, of = list(p.start), list(p.at)
                for i, r in zip(index, p.runs, strict=True):
                    to[r.dim] += i * r.step
                    of[r.other_dim] += i * r.other_step
                assert got[tuple(to)].isnan()
                got[tuple(to)] = real[p.of][tuple(of)]
        assert torch.equal(got, t)


def test_what_it_does_not_know_is_not_told() -> None:
    named = {"a": torch.empty(4, 2, device="meta")}
    with make_trace(named) as trace:
        flipped, added = named["a"].flip(0), named["a"] + 1
        later = torch.cat([named["a"], added])
    assert [trace.parts_of(t) for t in (flipped, added, later)] == [None] * 3


@pytest.mark.parametrize(
    "name",
    ["DeepseekV3ForCausalLM", "GptOssForCausalLM", "HrmTextForCausalLM", "Inkling2ForCausalLM", "NemotronHForCausalLM", "NomicBertForMaskedLM"],
)  # fmt: skip
def test_an_architecture_is_named_as_transformers_names_it(name: str) -> None:
    """A sample of `python -m tests.torture.hub_names`: fused experts; gate and up in one matrix; their rows by turns; q, k and v."""
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    assert architectures.judge(name) == ("right", "")


@pytest.fixture
def asked_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """transformers is asked in this process, which has imported it already."""

    def here(function: str, argument: str, work_bytes: int, text: bytes) -> bytes:
        with monkeypatch.context() as m:
            m.setattr(torch.Tensor, "contiguous", torch.Tensor.contiguous)
            m.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text)))
            return hub_names._compute_relation(argument)

    monkeypatch.setattr(hub_names, "run_in_child", here)
    hub_names._ask_child.cache_clear()
    yield
    hub_names._ask_child.cache_clear()


def older(name: str) -> str:
    """The name that a weight of Gemma 3 had before its language model moved."""
    inner = name.replace("language_model.model.", "model.language_model.").replace(
        "vision_tower.", "model.vision_tower."
    )
    return f"model.{inner}" if inner.startswith("multi_modal") else inner


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "renamed"),
    [("Kimi_K25ForConditionalGeneration", None), ("Gemma3ForConditionalGeneration", None), ("Gemma3ForConditionalGeneration", older)],
)  # fmt: skip
def test_a_model_of_text_and_vision_goes_there_and_back(
    name: str, renamed: Callable[[str], str] | None, tmp_path: Path, asked_here: None
) -> None:
    """Kimi's vision has q, k and v in one matrix on the Hub, its rope permuted; the names of Gemma's are others in memory."""
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    model = architectures.build(name)
    model.save_pretrained(tmp_path / "theirs")
    file = tmp_path / "theirs" / "model.safetensors"
    theirs = load_file(file)
    if renamed is not None:
        save_file({renamed(n): t for n, t in theirs.items()}, file, metadata={"format": "pt"})
    ckpttool.convert(tmp_path / "theirs", tmp_path / "memory.pt")
    got = torch.load(tmp_path / "memory.pt", weights_only=True)["model"]
    state = model.state_dict()
    assert got.keys() == state.keys() and all(torch.equal(got[n], t) for n, t in state.items())
    ckpttool.convert(tmp_path / "memory.pt", tmp_path / "ours", to="hf", config=str(tmp_path / "theirs"))
    ours = load_file(tmp_path / "ours" / "model.safetensors")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[n], t) for n, t in theirs.items())
    assert ckpttool.verify(tmp_path / "ours", read_data=True).recorded == "equal"
