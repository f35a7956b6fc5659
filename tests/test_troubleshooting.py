"""docs/troubleshooting.md is true: each of its sessions runs on a checkpoint that has the fault, and prints what the page shows."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from commands import ckpttool_here
from safetensors.torch import load_file, save_file
from test_readme import FIXTURES, PAGES, blocks, not_as_printed

import ckpttool

PAGE = PAGES["troubleshooting.md"]
CODES = PAGES["reference/codes.md"]
SESSIONS = [line for block in blocks(PAGE + CODES, "console") for line in re.findall(r"^\$ (.+)$", block, re.MULTILINE)]


def make_runs(desk: Path) -> None:
    """Whole ones: run, with an interrupted step; llama; zero3; checkpoint-3; step3.pt; one without its optimizer; one whose weights were
    sorted, with a numbered optimizer."""
    for step in (3, 9):
        shutil.copytree(FIXTURES / "fsdp2_w3" / "ckpt", desk / "run" / f"step-{step}")
    (desk / "run" / "step-9" / ".metadata").unlink()
    shutil.copytree(FIXTURES / "fsdp2_w3" / "hf_ref", desk / "llama")
    shutil.copytree(FIXTURES / "zero3_w4" / "ckpt", desk / "zero3")
    shutil.copytree(FIXTURES / "trainers" / "jobs" / "trainer", desk / "checkpoint-3")
    ckpttool.convert(desk / "run" / "step-3", desk / "step3.pt")
    ckpttool.convert(desk / "run" / "step-3", desk / "taken", to="dcp", world_size=1)
    job = torch.load(desk / "step3.pt")
    model = job["model"]
    torch.save({"model": model, "step": 3}, desk / "weights.pt")
    adam = {i: {"exp_avg": torch.zeros_like(t)} for i, t in enumerate(model.values())}
    numbered = {"state": adam, "param_groups": [{"lr": 0.1, "params": list(adam)}]}
    torch.save({"model": dict(sorted(model.items())), "optim": numbered}, desk / "sorted.pt")


def make_faults(desk: Path) -> None:
    """Beside what `make_runs` made, those with a fault each."""
    job = torch.load(desk / "step3.pt")
    model: dict[str, torch.Tensor] = job["model"]
    torch.save({f"_orig_mod.module.{n}": t for n, t in model.items()}, desk / "wrapped.pt")
    (desk / "zero3" / "saved").mkdir()
    save_file({n: torch.zeros(0) for n in model}, desk / "zero3" / "saved" / "model.safetensors")
    q, k = (f"model.layers.0.self_attn.{m}_proj.weight" for m in "qk")
    moments = job["optim"]["state"][q]
    torch.save({**job, "model": {**model, k: poisoned(model[k])}}, desk / "nan.pt")
    moments["exp_avg_sq"] = -moments["exp_avg_sq"]
    torch.save(job, desk / "jump.pt")
    whole = (desk / "step3.pt").read_bytes()
    (desk / "cut.pt").write_bytes(whole[: len(whole) // 2])
    torch.save(torch.nn.Linear(2, 2), desk / "model.pt")
    (desk / "logs").mkdir()
    (desk / "logs" / "log.txt").write_text("x")
    shutil.copytree(FIXTURES / "fsdp1_w2_noshard" / "ckpt", desk / "replicas")
    replica = torch.load(desk / "replicas" / "local_rank1.pt")
    replica["head.weight"] = replica["head.weight"] + 0.5
    torch.save(replica, desk / "replicas" / "local_rank1.pt")


def poisoned(t: torch.Tensor) -> torch.Tensor:
    """A copy with one NaN."""
    out = t.clone()
    out[0, 5] = float("nan")
    return out


def make_models(desk: Path) -> None:
    """foreign, with the config of another model; tied, whose tied weights differ; pointer, of git-lfs; lora, whose B is zero."""
    (desk / "foreign").mkdir()
    torch.save({"emb.weight": torch.ones(5, 4), "layers.0.w": torch.ones(4, 4)}, desk / "foreign" / "own.pt")
    shutil.copy(desk / "llama" / "config.json", desk / "foreign")
    shutil.copytree(FIXTURES / "hf_tied" / "ckpt", desk / "tied")
    base = load_file(desk / "tied" / "model.safetensors")
    save_file({**base, "lm_head.weight": base["model.embed_tokens.weight"] + 1}, desk / "tied" / "model.safetensors")
    (desk / "pointer").mkdir()
    shutil.copy(desk / "tied" / "config.json", desk / "pointer")
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 1000\n"
    (desk / "pointer" / "model.safetensors").write_text(pointer)
    (desk / "lora").mkdir()
    q = "base_model.model.model.layers.0.self_attn.q_proj"
    matrices = {f"{q}.lora_A.weight": torch.ones(4, 36), f"{q}.lora_B.weight": torch.zeros(40, 4)}
    save_file(matrices, desk / "lora" / "adapter_model.safetensors")
    said = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "base_model_name_or_path": "org/base",
        "task_type": "CAUSAL_LM",
    }
    (desk / "lora" / "adapter_config.json").write_text(json.dumps(said))


def test_every_session_of_the_page_is_what_its_command_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_runs(tmp_path)
    make_faults(tmp_path)
    make_models(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    printed = {}
    for line in SESSIONS:
        done = ckpttool_here(*shlex.split(line)[1:])
        text = (done.stdout + done.stderr).replace(f"{tmp_path}/", "")
        assert (done.returncode != 0) == bool(re.search(r"^error: |: damaged$", text, re.MULTILINE)), f"{line}\n{text}"
        printed[line] = text
    assert not_as_printed(PAGE, printed) == not_as_printed(CODES, printed) == []


def test_every_symptom_has_a_section_with_a_command() -> None:
    rows = re.findall(r"\]\(#([^)]+)\) \|$", PAGE, re.MULTILINE)
    sections = {
        re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-"): text
        for title, text in re.findall(r"^## (.+)\n((?:(?!## ).*\n)*)", PAGE, re.MULTILINE)
    }
    assert set(rows) == set(sections) and len(sections) >= 20
    assert [title for title, text in sections.items() if "```console" not in text] == []
    assert len(SESSIONS) == len(set(SESSIONS))


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("troubleshooting", "troubleshooting.md"), ("glossary", "glossary.md"), ("upgrade", "how-to/upgrade.md"), ("permission denied", "troubleshooting.md"),
        ("not a checkpoint", "troubleshooting.md"), ("average", "how-to/average.md"), ("rename", "how-to/name-maps.md"), ("nan", "troubleshooting.md"),
        ("migration", "how-to/migrations.md"), ("out of memory", "troubleshooting.md"), ("codes", "reference/codes.md"), ("which layout", "troubleshooting.md"),
    ],
)  # fmt: skip
def test_what_people_search_for_is_in_a_heading_of_the_page(words: str, page: str) -> None:
    """The search of the site puts headings first."""
    headings = re.findall(r"^#+ (.+)$", PAGES[page], re.MULTILINE)
    assert any(all(re.search(rf"\b{w}", h, re.IGNORECASE) for w in words.split()) for h in headings)
    assert "`pytorch_model.bin`" in PAGES["troubleshooting.md"]
