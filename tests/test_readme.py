"""The README and the pages of docs/ are true: their commands and their Python run, and their tables agree with the code. The
site is built, with its warnings as errors."""

from __future__ import annotations

import html
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from fake_hub import Hub
from huggingface_hub.utils import close_session
from pages import program
from peers import hooks
from ranks import forked, one_at_a_time, torchrun
from stores import moto
from typer.testing import CliRunner

import ckpttool
from ckpttool.cli.main import app
from ckpttool.layouts import layouts, list_resuming_programs
from ckpttool.watching.watch import Watcher

REPOSITORY = Path(__file__).resolve().parents[1]
FIXTURES = REPOSITORY / "fixtures"
DOCS = REPOSITORY / "docs"
PAGES = {str(p.relative_to(DOCS)): p.read_text(encoding="utf-8") for p in sorted(DOCS.rglob("*.md"))}
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
MIGRATIONS, CLI = PAGES["how-to/migrations.md"], PAGES["reference/cli.md"]
ENVIRONMENT = {
    **os.environ,
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "HF_HUB_OFFLINE": "1",
    "COLUMNS": "160",
}


HOOKS = hooks()
#: huggingface_hub itself makes httpx warn with every PUT.
PUTS = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning")
COMMANDS: dict[str, Any] = HOOKS.commands()


def blocks(text: str, language: str) -> list[str]:
    """The fenced code blocks of one language, or of some: "sh|console"."""
    return re.findall(rf"^```(?:{language})\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def command_lines(text: str) -> list[str]:
    """The commands of ckpttool and tar in tables, whose last column they are, and in shell blocks, in order and each once; those
    of a terminal session begin with "$ "."""
    out = re.findall(r"^\|.*\| `(ckpttool [^`]+)` \|$", text, re.MULTILINE)
    joined = [re.sub(r" *\\\n *", " ", block) for block in blocks(text, "sh|console")]
    out += [line.removeprefix("$ ").partition("   #")[0].strip() for block in joined for line in block.splitlines()]
    return list(dict.fromkeys(line for line in out if line.startswith(("ckpttool ", "tar "))))


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    """A folder with the checkpoints that the documents name."""
    shutil.copytree(FIXTURES / "fsdp2_w2_groups" / "ckpt", tmp_path / "run" / "ckpt")
    config = json.loads((FIXTURES / "fsdp2_w3" / "hf_ref" / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}), encoding="utf-8")
    shutil.copy(FIXTURES / "full_w1" / "ckpt" / "ids.pt", tmp_path / "numbered.pt")
    shutil.copy(FIXTURES / "full_w1" / "ckpt" / "fqn.pt", tmp_path / "names.pt")
    shutil.copytree(FIXTURES / "zero3_w4" / "ckpt", tmp_path / "zero3")
    shutil.copytree(FIXTURES / "trainers" / "jobs" / "trainer", tmp_path / "checkpoint-3")
    shutil.copytree(FIXTURES / "fsdp1_w2_tied" / "ckpt", tmp_path / "fsdp1")
    described = FIXTURES / "fsdp1_w2_tied" / "flat_layout.json"
    ckpttool.convert(tmp_path / "fsdp1", tmp_path / "fsdp1.pt", flat_layout=described)
    (tmp_path / "store").mkdir()
    (tmp_path / "keys").mkdir()
    make_keys(tmp_path / "keys")
    return tmp_path


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with Hub() as hub:
        hub.environment(monkeypatch, tmp_path / ".home")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ".cache"))
        yield hub
        close_session()


def outside() -> dict[str, str]:
    """What a child is told of the Hub and of the store."""
    return {k: v for k, v in os.environ.items() if k.startswith(("AWS_", "HF_", "NO_PROXY", "XDG_CACHE_HOME"))}


def make_averages(desk: Path) -> None:
    """step-100, step-200 and step-300.pt, one model in three layouts; trained.pt, with an EMA and an optimizer; base, its
    config."""
    import torch
    from safetensors.torch import load_file

    shutil.copytree(FIXTURES / "hf_llama" / "ckpt", desk / "base", dirs_exist_ok=True)
    state = load_file(desk / "base" / "model.safetensors")
    torch.save({"model": state, "step": 300}, desk / "step-300.pt")
    adam = {i: {"exp_avg": torch.zeros_like(t)} for i, t in enumerate(state.values())}
    groups = [{"lr": 0.1, "params": list(adam)}]
    trained = {
        "model": state,
        "ema": {n: t / 2 for n, t in state.items()},
        "optimizer": {"state": adam, "param_groups": groups},
    }
    torch.save(trained, desk / "trained.pt")
    ckpttool.convert(desk / "step-300.pt", desk / "step-100", to="dcp", world_size=3)
    ckpttool.convert(desk / "step-300.pt", desk / "step-200", to="zero3", world_size=2)


def make_adapter(desk: Path) -> None:
    """base, a model of transformers; lora/adapter, what PEFT saves of an adapter of it; lora/ckpt, the state of the job; moe/base, a
    config.json; moe/adapter, of the experts of its model."""
    import numpy as np
    from safetensors.numpy import load_file, save_file

    shutil.copytree(FIXTURES / "hf_llama" / "ckpt", desk / "base")
    base = load_file(desk / "base" / "model.safetensors")
    (desk / "lora" / "adapter").mkdir(parents=True)
    name = "model.layers.0.self_attn.q_proj"
    rows, columns = base[f"{name}.weight"].shape
    matrices = {"A": np.full((4, columns), 0.5, "f4"), "B": np.full((rows, 4), 0.25, "f4")}
    saved = {f"base_model.model.{name}.lora_{k}.weight": m for k, m in matrices.items()}
    save_file(saved, desk / "lora" / "adapter" / "adapter_model.safetensors")
    said = {
        "peft_type": "LORA",
        "base_model_name_or_path": "org/base",
        "task_type": "CAUSAL_LM",
        "r": 4,
        "lora_alpha": 16,
    }
    (desk / "lora" / "adapter" / "adapter_config.json").write_text(json.dumps(said))
    live = {n.replace(name, f"{name}.base_layer"): t for n, t in base.items()}
    live |= {f"{name}.lora_{k}.default.weight": m for k, m in matrices.items()}
    save_file({f"base_model.model.{n}": t for n, t in live.items()}, desk / "state.safetensors")
    ckpttool.convert(desk / "state.safetensors", desk / "lora" / "ckpt", to="dcp", world_size=2)
    sizes = {"hidden_size": 8, "intermediate_size": 6, "num_local_experts": 3, "num_hidden_layers": 1, "vocab_size": 11}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    for folder in ("base", "adapter"):
        (desk / "moe" / folder).mkdir(parents=True)
    (desk / "moe" / "base" / "config.json").write_text(json.dumps({"model_type": "mixtral", **sizes, **heads}))
    stack = {"base_layer.lora_A": (6, 8), "base_layer.lora_B": (12, 6), "lora_A": (6, 6), "lora_B": (8, 6)}
    experts = "base_model.model.model.layers.0.mlp.experts"
    saved = {f"{experts}.{k}.weight": np.full(shape, 0.5, "f4") for k, shape in stack.items()}
    save_file(saved, desk / "moe" / "adapter" / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": [], "peft_version": "0.21.2"}
    said = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "peft_version": "0.21.2"}
    said["target_parameters"] = ["experts.gate_up_proj", "experts.down_proj"]
    (desk / "moe" / "adapter" / "adapter_config.json").write_text(json.dumps(said))


def make_keys(folder: Path) -> None:
    """sign.pem and sign.pub, an EC key; archive.key and archive.pub, one of age."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from pyrage import x25519

    pem = serialization.Encoding.PEM
    key = ec.generate_private_key(ec.SECP256R1())
    plain = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "sign.pem").write_bytes(plain)
    public = key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    (folder / "sign.pub").write_bytes(public)
    identity = x25519.Identity.generate()
    (folder / "archive.key").write_text(f"{identity}\n")
    (folder / "archive.pub").write_text(f"{identity.to_public()}\n")


def run_all(lines: list[str], desk: Path, **more: str) -> None:
    """Every line, or block of lines, exits 0, one after the other in one folder; `more` is environment."""
    assert lines
    for line in lines:
        done = subprocess.run(
            ["bash", "-e", "-u", "-o", "pipefail", "-c", line],
            cwd=desk,
            env={**ENVIRONMENT, **more},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"


def run_here(texts: list[str], desk: Path, *, live: bool = False) -> dict[str, str]:
    """Blocks of lines as `run_all` runs them, in the current folder; what is ckpttool and nothing else runs in this process,
    which takes a fifth of the time. Of resume-verify only the options are looked at, unless `live`. Returns what each of the
    lines that ran in this process printed."""
    assert texts
    printed: dict[str, str] = {}
    for text in texts:
        if "$" in text:
            run_all([text], desk, **outside())
            continue
        for line in text.replace("\\\n", "").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] != ["ckpttool"]:
                run_all([line], desk)
            elif words[1] == "resume-verify" and not live:
                COMMANDS["resume-verify"].make_context("resume-verify", words[2:])
            else:
                done = CliRunner().invoke(app, words[1:])
                assert done.exit_code == 0, f"{line}\n{done.output}{done.exception!r}"
                printed[line] = done.output
    return printed


def words(text: str) -> list[str]:
    """The words of what a command printed, not its numbers and digests: those of a pasted session come from a larger model."""
    return re.findall(r"[A-Za-z_]{3,}", re.sub(r"blake3:[0-9a-f]+", "", text))


def not_as_printed(page: str, printed: dict[str, str]) -> list[str]:
    """The sessions of a page that show other words than their commands printed. Of one with "..." every line must be among them;
    one that shows nothing is not compared."""
    wrong = []
    for block in blocks(page, "console"):
        for session in re.sub(r" *\\\n *", " ", block).split("$ ")[1:]:
            line, *shown = session.splitlines()
            got = words(printed.get(line, ""))
            if any("..." in x for x in shown):
                fine = all(" ".join(words(x)) in " ".join(got) for x in shown)
            else:
                fine = sorted(words("\n".join(shown))) == sorted(got)
            wrong += [session] if got and shown and not fine else []
    return wrong


def test_the_readme_is_one_page() -> None:
    assert len(README.splitlines()) <= 160


@PUTS
@pytest.mark.slow
def test_every_command_of_the_readme_runs_and_then_its_python(
    desk: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(desk)
    with one_at_a_time(), forked():  # the demo runs the same command under the real torchrun
        printed = run_here(command_lines(README), desk, live=True)
    assert not_as_printed(README, printed) == []
    run_script(README, desk)


def test_every_command_of_getting_started_and_trainers_runs(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(desk)
    printed = run_here(command_lines(PAGES["getting-started.md"]), desk)
    assert not_as_printed(PAGES["getting-started.md"], printed) == []
    run_here(command_lines(PAGES["how-to/trainers.md"]), desk)


def test_every_command_of_look_runs_and_prints_what_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from safetensors.torch import load_file

    monkeypatch.chdir(tmp_path)
    state = load_file(FIXTURES / "hf_llama" / "ckpt" / "model.safetensors")
    after = {n: t * 1.01 if "mlp" in n else t.clone() for n, t in state.items()}
    after["lm_head.weight"][3] *= -1
    for step, model in ((100, state), (200, after)):
        torch.save({"model": model, "step": step}, "x.pt")
        Path("run").mkdir(exist_ok=True)
        ckpttool.convert("x.pt", f"run/step-{step}", to="dcp", world_size=3)
    page, printed = PAGES["how-to/look.md"], {}
    for line in command_lines(page):
        done = CliRunner().invoke(app, shlex.split(line)[1:])
        assert done.exit_code == (5 if " diff " in line else 0), done.output
        printed[line] = done.stdout
    assert len(printed) == 3 and not_as_printed(page, printed) == []
    numbers = re.findall(r"relative L2 [0-9.]+|[0-9,]+ ulp", page)
    assert len(numbers) == 6 and all(n in printed[line] for n in numbers)
    run_script(page, tmp_path)
    assert Path("step-200.html").stat().st_size > 50_000 < Path("step-200-again.html").stat().st_size


@pytest.mark.parametrize("page", [name for name in PAGES if name.startswith("how-to/trainers/")])
def test_every_command_of_a_trainer_s_page_runs(page: str, desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = FIXTURES / "trainers"
    for name, source in {
        "accelerate-3": "jobs/accelerate", "lightning-3.ckpt": "jobs/lightning", "step-3": "jobs/torchtitan",
        "deepspeed-3": "jobs/deepspeed", "verl/actor": "verl_fsdp2_w3/ckpt", "torchtune": "torchtune_hf",
        "snapshot": "torchsnapshot_w1/ckpt/snap", "automodel": "automodel_w2", "olmo": "olmo_core_w3", "nanotron": "../nanotron/zero1", "tc/step-3": "../checkpointing/fsdp/ckpt", "megatron": "../megatron/buckets_tp2/ckpt", "transformers-3": "transformers_w2/ckpt",
    }.items():  # fmt: skip
        shutil.copytree(jobs / source, desk / name)
    with tarfile.open(FIXTURES / "autotp" / "tp2_dp2_z1_bf16.tar.xz") as archive:
        archive.extractall(desk / "unpacked", filter="data")
    (desk / "unpacked" / "tp2_dp2_z1_bf16" / "ckpt").rename(desk / "autotp")
    with tarfile.open(FIXTURES / "deepspeed" / "parallel.tar.xz") as archive:
        archive.extractall(desk / "unpacked", filter="data")
    with tarfile.open(FIXTURES / "deepspeed" / "pipelines.tar.xz") as archive:
        archive.extractall(desk / "unpacked", filter="data")
    for name, folder in {
        "moe-on-4": "moe_z2_ep2_w4", "autoep-on-4": "autoep_z2_ep2_w4", "pipeline": "pipeline_twice_pp2_w2",
        "saved-by-3-stages": "pipeline_twice_pp3_w3",
    }.items():  # fmt: skip
        (desk / "unpacked" / folder / "ck").rename(desk / name)
    ckpttool.convert(jobs / "jobs/accelerate", desk / "checkpoint-7", to="llamafactory", world_size=2)
    if page.endswith("torchtune.md"):
        tune = FIXTURES / "maps" / "tune-llama3"
        ckpttool.convert(tune / "epoch_0", desk / "from.pt", map="torchtune-llama3", config=str(tune))
        (desk / "DIR").mkdir()
        shutil.copy(tune / "config.json", desk / "DIR")
    for name in ("resharded", "megatron-run"):
        (desk / name).mkdir()
    (desk / "llama-16").mkdir()  # of the job in megatron/
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 16, "num_attention_heads": 4, "head_dim": 6,
              "num_key_value_heads": 2, "intermediate_size": 20, "vocab_size": 131, "num_hidden_layers": 2, "tie_word_embeddings": False}  # fmt: skip
    (desk / "llama-16" / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(desk)
    run_here(command_lines(PAGES[page]), desk)


#: {page of a trainer: (a checkpoint that it wrote, its layout)}
OF_TRAINERS = {
    "hf-trainer": ("trainers/jobs/trainer", "trainer"), "accelerate": ("trainers/jobs/accelerate", "accelerate"),
    "lightning": ("trainers/jobs/lightning", "lightning"), "torchtitan": ("trainers/jobs/torchtitan", "torchtitan"),
    "deepspeed": ("trainers/jobs/deepspeed", "zero3"), "torch": ("fsdp2_w2_groups/ckpt", "dcp"),
    "automodel": ("trainers/automodel_w2/epoch_0_step_3", "automodel"),
    "megatron": ("megatron/tp2_pp2/ckpt/iter_0000003", "megatron"),
    "olmo": ("trainers/olmo_core_w3/step3", "olmo"), "nanotron": ("nanotron/zero1/3", "nanotron"),
    "transformers": ("trainers/transformers_w2/ckpt", "transformers_sharded"),
    "verl": ("trainers/verl_fsdp2_w3/ckpt", "verl"), "torchtune": ("trainers/torchtune_hf/epoch_0", "torchtune"),
    "torchsnapshot": ("trainers/torchsnapshot_w1/ckpt/snap", "torchsnapshot"),
    "llamafactory": ("trainers/jobs/accelerate", "llamafactory"),
}  # fmt: skip


@pytest.mark.parametrize("page", OF_TRAINERS)
def test_the_table_of_trainers_is_true(page: str, tmp_path: Path) -> None:
    """Each cell, of a checkpoint that the trainer wrote, or resumes from; tests/live/test_resume_pairs.py runs that."""
    checkpoint, layout = OF_TRAINERS[page]
    if page == "llamafactory":  # its own are 60 kB of pickles for this model
        checkpoint = ckpttool.convert(FIXTURES / checkpoint, tmp_path / "out", to=layout, world_size=2).destination
    (row,) = [line for line in README.splitlines() if f"(docs/how-to/trainers/{page}.md)" in line]
    name, _, resumes, *state = [cell.strip() for cell in row.strip("|").split("|")]
    assert f"**{layout}**" in name
    assert resumes == (
        "yes" if layout in {x.name for x, program in list_resuming_programs().values() if not program.refused} else "no"
    )
    with ckpttool.open(FIXTURES / checkpoint) as opened:
        found = {str(path[0]) for path in opened.checkpoint.leaves()}
        as_data = any(path[:3] == ("extra", "recipe_state", "optimizer") for path in opened.checkpoint.leaves())
    for component, cell in zip(("optim", "scheduler", "rng", "dataloader"), state, strict=True):
        if cell == "as data":
            assert as_data and component not in found
        elif cell == "under your key":
            assert "extra" in found
        elif (component, cell) != ("dataloader", "yes"):  # an option of most trainers, which these jobs did not set
            assert (component in found) == (cell != "none saved"), (component, cell, found)


def test_every_command_of_the_guide_to_damage_runs_on_a_file_that_was_cut_off(
    desk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(desk)
    whole = (desk / "names.pt").read_bytes()
    (desk / "cut.pt").write_bytes(whole[: len(whole) // 3])
    for step in (3, 5):
        shutil.copytree(desk / "run" / "ckpt", desk / f"step-{step}")
    (desk / "step-5" / "__1_0.distcp").unlink()
    for name in ("old.pt", "step3.pt", "new.pt"):
        ckpttool.convert(desk / "run" / "ckpt", desk / name)
    job = torch.load(desk / "new.pt")
    groups = job["optim"]["param_groups"]
    job["optim"]["param_groups"] = [{**groups[0], "params": [n for g in groups for n in g["params"]]}]
    torch.save(job, desk / "new.pt")
    codes = {"ckpttool doctor cut.pt": 4, "ckpttool doctor old.pt": 5}
    for line in command_lines(PAGES["how-to/doctor.md"]):
        done = CliRunner().invoke(app, shlex.split(line)[1:])
        wanted = next((code for start, code in codes.items() if line.startswith(start)), 0)
        assert done.exit_code == wanted, f"{line}\n{done.output}"


def test_every_command_of_the_guide_to_name_maps_runs(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = FIXTURES / "maps" / "titan-llama3"
    shutil.copytree(case / "ckpt", desk / "step-3")
    (desk / "DIR").mkdir()
    shutil.copy(case / "config.json", desk / "DIR")
    (desk / "mine.map").write_text("sides mine | theirs\na.{i} [(p h)] = b.{i} [(h p)]\nsize p = 2\n")
    torch.save({"model": {f"a.{i}": torch.arange(6) + i for i in range(2)}}, desk / "mine.pt")
    torch.save({"model": {f"net.{i}": torch.arange(6) + i for i in range(2)}}, desk / "other.pt")
    monkeypatch.chdir(desk)
    run_here(command_lines(PAGES["how-to/name-maps.md"]), desk)
    assert torch.load(desk / "theirs.pt")["model"]["b.1"].tolist() == [1, 4, 2, 5, 3, 6]


def test_every_command_of_the_guide_to_parts_runs(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(desk)
    page = PAGES["how-to/parts.md"]
    printed = run_here(command_lines(page), desk)
    (shown,) = re.findall(r"^note ckpttool.*$", page, re.MULTILINE)
    assert shown in printed["ckpttool inspect part"]
    assert ckpttool.diff(desk / "run" / "ckpt", desk / "back.pt").equal


def test_the_python_of_the_reference_runs(desk: Path) -> None:
    run_script(PAGES["reference/python.md"], desk)


def make_run(desk: Path) -> None:
    """out/checkpoint-100 to -500 of Hugging Face's Trainer, a day apart; -300 is unfinished, and -200 was the best."""
    for k, step in enumerate(range(100, 600, 100)):
        at = desk / "out" / f"checkpoint-{step}"
        shutil.copytree(FIXTURES / "trainers" / "trainer_ddp" / "ckpt" / "checkpoint-3", at)
        state = json.loads((at / "trainer_state.json").read_text())
        state["best_model_checkpoint"] = "out/checkpoint-200"
        state["log_history"].append({"step": step, "eval_loss": abs(step - 200) / 100 + 3.1})
        (at / "trainer_state.json").write_text(json.dumps(state, indent=2, sort_keys=True) + "\n")
        if step == 300:
            (at / "trainer_state.json").unlink()
        when = time.time() - (12 - k) * 86_400 - 60
        for file in (*at.iterdir(), at):
            os.utime(file, (when, when))


def test_the_transcripts_of_the_guide_to_runs_are_what_the_commands_print(
    desk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(desk)
    monkeypatch.chdir(desk)
    page = PAGES["how-to/runs.md"]
    printed = run_here(command_lines(page), desk)
    for block in blocks(page, "console"):
        for session in block.split("$ ")[1:]:
            line, _, said = session.partition("\n")
            here = printed[line].replace(str(desk), "/data").splitlines()
            assert sorted(here) == sorted(said.splitlines()), "in a terminal, notes come after the table"


def run_script(text: str, desk: Path) -> None:
    """The only block of Python runs and imports no torch."""
    (script,) = blocks(text, "python")
    done = subprocess.run(
        [sys.executable, "-c", script + "\nimport sys; assert 'torch' not in sys.modules"],
        cwd=desk,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.live
@pytest.mark.slow
def test_the_smoke_test_of_its_page_passes_as_printed(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = PAGES["how-to/smoke-test.md"]
    (desk / "recipe.py").write_text(blocks(page, "py")[0])
    monkeypatch.chdir(desk)
    with one_at_a_time(), forked():
        printed = run_here([line for line in command_lines(page) if "srun" not in line], desk, live=True)
    assert not_as_printed(page, printed) == []


#: The guide that begins so -> what the guide converts there, the ranks and the engine of the job that goes on.
GUIDES = {
    "deepspeed -> fsdp2": ("zero3_w4", 3, "fsdp2"),
    "fsdp2 -> deepspeed": ("fsdp2_w2_groups", 3, "zero3"),
    "deepspeed -> deepspeed": ("zero3_w4", 2, "zero3"),
    "fsdp1 -> fsdp2": ("fsdp1_w2_tied", 3, "fsdp2"),
    "fsdp2 -> fsdp1": ("fsdp1_w2_tied", 4, "fsdp1"),
}


@pytest.mark.live
@pytest.mark.slow
def test_the_lines_of_every_migration_guide_resume_in_the_engine_they_are_for(
    desk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(desk)
    run_here(command_lines(MIGRATIONS.partition("## Every migration")[0]), desk)  # tests/test_migrations.py runs those
    guides = {block[2:].partition(":")[0]: block for block in blocks(MIGRATIONS, "py")}
    assert {name for name in guides if "->" in name} == GUIDES.keys()
    for world, engine in dict.fromkeys((world, engine) for _, world, engine in GUIDES.values()):
        words: list[str] = []
        for k, (name, (case, ranks, kind)) in enumerate(GUIDES.items()):
            if (ranks, kind) == (world, engine):
                lines = desk / f"guide-{k}.py"
                lines.write_text(guides[name], encoding="utf-8")
                words += [str(FIXTURES / case), str(desk), engine, str(lines)]
        out = desk / "verdicts.json"
        said = torchrun(world, "readme_guides.py", *words, "--out", str(out))
        assert out.exists(), said[-4000:]
        verdicts = json.loads(out.read_text())
        out.unlink()
        assert [v for v in verdicts if not v["ok"]] == []
        assert all(len(v["losses"]) == 3 for v in verdicts)


@PUTS
def test_every_command_of_the_reference_runs(desk: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(desk)
    make_adapter(desk)
    make_averages(desk)
    make_run(desk)
    shutil.copy(REPOSITORY / "bench" / "acid" / "of_ckpttool.py", desk / "reader.py")
    # `watch --once` waits for the end of a save, and this one was copied just now
    monkeypatch.setattr(Watcher, "_measure_rest", lambda self, save: (3600.0, 3600.0))
    run_here(command_lines(CLI), desk)


def test_every_command_of_the_guide_to_adapters_runs(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(desk)
    make_adapter(desk)
    shutil.copytree(FIXTURES / "qlora", desk / "qlora")
    page = PAGES["how-to/adapters.md"]
    printed = run_here(command_lines(page), desk)
    (shown,) = blocks(page, "text")
    assert set(shown.splitlines()) <= {line.rstrip() for line in printed["ckpttool inspect qlora/job.pt"].splitlines()}


def test_every_command_of_the_guide_to_averages_runs(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(desk)
    make_averages(desk)
    printed = run_here(command_lines(PAGES["how-to/average.md"]), desk)
    shown = re.findall(r"^weights .*$", PAGES["how-to/average.md"], re.MULTILINE)
    assert shown and all(line.partition(";")[0] in printed["ckpttool inspect trained.pt"] for line in shown)


def test_every_command_of_the_guide_to_deltas_prints_what_it_shows(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("xxhash")
    monkeypatch.chdir(desk)
    with tarfile.open(FIXTURES / "deltas" / "programs.tar.xz") as archive:
        archive.extractall(desk / "programs", filter="data")
    for there, here in (("base", "base"), ("sync", "weights"), ("v3", "trained")):
        (desk / "programs" / "skyrl" / there).rename(desk / here)
    page = PAGES["how-to/deltas.md"]
    printed = "".join(run_here(command_lines(page), desk).values()).splitlines()
    (shown,) = blocks(page, "text")
    assert [line for line in shown.splitlines() if line not in printed] == []
    run_here(["ckpttool audit verify trained.delta.tar.zst"], desk)


def test_every_command_of_the_guide_to_quantised_models_runs(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(desk)
    shutil.copytree(FIXTURES / "quantised" / "ct_w4_group" / "ckpt", desk / "int4")
    low = {
        "exp_avg": torch.ones(8, 3),
        "exp_avg_sq": torch.ones(8, 3),
        "master_param": torch.ones(8, 3, dtype=torch.int16),
    }
    optim = {"state": {"w": low}, "param_groups": [{"lr": 0.1, "step": 3, "params": ["w"]}]}
    torch.save({"model": {"w": torch.ones(8, 3, dtype=torch.bfloat16)}, "optim": optim}, desk / "te.pt")
    run_here(command_lines(PAGES["how-to/quantised.md"]), desk)


def test_every_command_of_the_guide_to_sizes_prints_what_it_shows(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(desk)
    shutil.copytree(FIXTURES / "hf_llama" / "ckpt", desk / "base")
    page = PAGES["how-to/sizing.md"]
    printed = run_here(command_lines(page), desk)
    shown = blocks(page, "text")
    assert len(shown) == 2
    for block, text in zip(shown, printed.values(), strict=False):
        lines = [line.rstrip() for line in text.splitlines()]
        assert [line for line in block.splitlines() if line.rstrip() not in lines] == []


def test_every_command_of_the_guide_to_meshes_prints_what_it_shows(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(desk)
    shutil.copytree(FIXTURES / "fsdp2_w3_moe" / "ckpt", desk / "mixtral")
    part = {"samples_yielded": 12, "sampler_state": {"yielded": 12}}
    loader = {
        "_sampler_iter_state": part,
        "_sampler_iter_yielded": 3,
        "dataset_state": None,
        "_iterator_finished": False,
    }
    torch.save({"model": {"w": torch.zeros(4)}, "dataloader": {"rank_0": loader, "rank_1": loader}}, desk / "job.pt")
    page = PAGES["how-to/meshes.md"]
    (plan,) = re.findall(r"<<END\n(.*?)^END$", page, re.MULTILINE | re.DOTALL)
    (desk / "plan.txt").write_text(plan)
    printed = "\n".join(run_here(command_lines(page), desk).values())
    shown = blocks(page, "text")
    assert len(shown) == 3 and all(block.strip() in printed for block in shown)


def test_every_command_of_the_guide_to_plans_runs(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(desk)
    page = PAGES["how-to/plans.md"]
    run_here(command_lines(page), desk)
    saved = (desk / "plan.json").read_text().splitlines()
    (shown,) = blocks(page, "json")
    assert [line for line in shown.splitlines() if line not in saved and f"{line}," not in saved] == []


@pytest.mark.slow
def test_every_command_of_the_guide_to_comparisons_runs(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(desk)
    make_adapter(desk)
    printed = run_here(blocks(PAGES["how-to/compare.md"], "sh"), desk)
    compared = [text for line, text in printed.items() if line.startswith("ckpttool compare")]
    assert len(compared) == 3 and all("largest logit difference: 0; top-1" in text for text in compared)
    assert (desk / "compared" / "report.html").is_file()
    assert json.loads((desk / "proven" / "ckpttool.json").read_text())["proof"]["largest"] == 0


def test_every_recipe_of_the_archive_guide_runs_as_it_stands_and_then_its_reader(
    desk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("age", "zstd", "openssl"):
        program(name)
    shutil.rmtree(desk / "store")
    shutil.rmtree(desk / "keys")
    s3 = moto()
    s3.environment(monkeypatch)
    s3.client().create_bucket(Bucket="models-archive", ObjectLockEnabledForBucket=True)
    monkeypatch.chdir(desk)
    run_here(blocks(PAGES["how-to/archive.md"], "sh"), desk)
    (script,) = blocks(PAGES["reference/archive-format.md"], "python")
    done = subprocess.run([sys.executable, "-c", script], cwd=desk, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@PUTS
@pytest.mark.slow
def test_every_tool_of_the_comparison_gives_what_the_page_says(
    desk: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(desk)
    shutil.copytree(FIXTURES / "hf_llama" / "ckpt", desk / "base")
    page = PAGES["explanation/comparison.md"]
    lines = "".join(blocks(page, "sh")).splitlines()
    modules = [line for line in lines if line.startswith("python -m ")]
    run_modules = (
        "import runpy, shlex, sys\n"
        "for line in sys.argv[1:]:\n"
        "    sys.argv = shlex.split(line)[2:]\n"
        "    runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)\n"
    )  # in one process, since most of the time is the import of torch and DeepSpeed
    run_all([shlex.join(["python", "-c", run_modules, *modules])], desk)
    run_all([line for line in lines if line.startswith("hf ")], desk, **outside())
    printed = run_here([line for line in lines if line.startswith("ckpttool ")], desk)
    assert len(modules) == 3
    found = [re.search(r"\d+ tensors in both, 0 with", out) for line, out in printed.items() if " diff " in line]
    assert len(found) == 4
    assert all(f and f"{f[0]} other values" in page for f in found)


@PUTS
def test_every_recipe_of_the_guides_to_stores_and_to_the_hub_runs_as_it_stands(
    desk: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    s3 = moto()
    s3.environment(monkeypatch)
    client = s3.client()
    client.create_bucket(Bucket="models")
    hub.upload("org/base", FIXTURES / "hf_llama" / "ckpt")
    monkeypatch.chdir(desk)
    run_here(blocks(PAGES["how-to/stores.md"], "sh"), desk)
    names = [f"base_model.model.model.layers.0.self_attn.q_proj.lora_{k}.default.weight" for k in "AB"]
    (desk / "lora").mkdir()
    torch.save({"model": {names[0]: torch.ones(2, 8), names[1]: torch.ones(8, 2)}}, desk / "lora" / "step3.pt")
    said = {"peft_type": "LORA", "base_model_name_or_path": "org/base", "task_type": "CAUSAL_LM", "r": 2}
    (desk / "lora" / "adapter_config.json").write_text(json.dumps(said))
    run_here(blocks(PAGES["how-to/hub.md"], "sh"), desk)
    found = client.list_objects_v2(Bucket="models")["Contents"]
    assert {"from-the-hub/.metadata", "run7/step3/.metadata", "run7/step3.pt"} <= {o["Key"] for o in found}
    assert hub.repos["org/llama-3"].private and {"bf16", "refs/pr/1"} <= hub.repos["org/llama-3"].refs.keys()


def test_the_picture_shows_the_commands_that_its_script_runs() -> None:
    text = html.unescape(re.sub(r"<[^>]+>", "", (DOCS / "terminal.svg").read_text(encoding="utf-8"))).replace(
        "\xa0", " "
    )
    script = (REPOSITORY / "fixtures" / "recording.py").read_text(encoding="utf-8")
    for command in re.findall(r'"(ckpttool [^"]+)"', script):
        assert f"$ {command}" in text


def test_every_command_has_help_a_section_an_example_and_a_table_of_options() -> None:
    wrong = []
    for name, command in COMMANDS.items():
        section = CLI.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        fine = command.help and f"\nckpttool {name}" in section and f"\n<!-- options: {name} -->\n" in section
        wrong += [] if fine else [name]
    assert wrong == []


def test_the_prose_of_a_command_names_no_option_that_no_command_has() -> None:
    known = {o for c in COMMANDS.values() for p in c.params for o in (*p.opts, *p.secondary_opts)} | {
        "--version",
        "--help",
    }
    assert set(re.findall(r"`(--[a-z-]+)", CLI + README)) <= known


def test_every_command_line_of_every_page_has_only_options_that_are_there() -> None:
    """Also of pages whose commands do not run in a test, because their paths are those of a cluster."""
    wrong = []
    for page, text in {**PAGES, "README.md": README}.items():
        for line in (line for line in command_lines(text) if line.startswith("ckpttool ")):
            words = shlex.split(line, comments=True)[1:]
            name = next(
                (n for n in sorted(COMMANDS, key=len, reverse=True) if words[: len(n.split())] == n.split()), ""
            )
            known = {o for p in COMMANDS[name].params for o in (*p.opts, *p.secondary_opts)} if name else set()
            wrong += [
                f"{page}: {w}" for w in words if w.startswith("-") and w.partition("=")[0] not in {*known, "--help"}
            ]
    assert wrong == []


def test_every_layout_stands_in_the_readme_and_in_the_reference() -> None:
    names = set(layouts())
    page = HOOKS.expand_marks(PAGES["reference/layouts.md"])
    assert names <= set(re.findall(r"\w+", README)) and names <= set(re.findall(r"\w+", page))


@pytest.mark.parametrize("table", ["readme-layouts", "readme-trainers"])
def test_the_tables_of_the_readme_are_those_of_the_layouts_and_trainers(table: str) -> None:
    """GitHub shows README.md without docs/_hooks.py."""
    made = HOOKS.rows_table(table)
    head = made.partition("\n")[0]
    assert head in README
    there = README[README.index(head) :].partition("\n\n")[0]
    assert there == made, f"put this into README.md:\n{made}"


def test_every_row_of_a_layout_is_in_a_table_that_a_page_has() -> None:
    shown = {mark for text in PAGES.values() for mark in re.findall(r"^<!-- rows: (.+?) -->$", text, re.MULTILINE)}
    assert shown | {"readme-layouts", "readme-trainers"} == set(HOOKS.TABLES)
    for layout in layouts().values():
        for table, rows in layout.program.rows.items():
            made = {"for": 1, "readme-trainers": 1}.get(table, 0)  # the cells that the hook adds
            assert all(len(row) + made == len(HOOKS.TABLES[table]) for row in rows), (layout.name, table)


def test_the_site_builds_without_a_warning_and_has_every_page_and_option(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "docs/_build.py", tmp_path],
        cwd=REPOSITORY,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    site = tmp_path / "site"
    text = (site / "reference" / "cli" / "index.html").read_text(encoding="utf-8")
    for command in COMMANDS.values():
        for parameter in command.params:
            assert all(
                f"<code>{o}" in text or f"{o}</code>" in text for o in parameter.opts if o[:2] == "--" and o != "--help"
            )
    codes = (site / "reference" / "exit-codes" / "index.html").read_text(encoding="utf-8")
    assert "incomplete or corrupt" in codes
    python = (site / "reference" / "python" / "index.html").read_text(encoding="utf-8")
    assert all(
        f'id="ckpttool.{name}"' in python for name in ckpttool.__all__ if name not in ("__version__", "CkpttoolError")
    )
    assert "<blockquote" not in python, "an example outside a section of examples is a quotation to Markdown"
    keyword = re.sub(r"<[^>]+>|\s+", "", python.partition('id="ckpttool.convert"')[2])
    assert "world_size(int|None,default:None)" in keyword
    found = {
        (i["location"], i["title"]) for i in json.loads((site / "search.json").read_text(encoding="utf-8"))["items"]
    }
    symptoms = re.findall(r"^## (.+)$", PAGES["troubleshooting.md"], re.MULTILINE)
    assert set(symptoms) <= {title for location, title in found if location.startswith("troubleshooting/")}


def test_every_page_is_in_the_navigation() -> None:
    def files(node: Any) -> list[str]:
        if isinstance(node, str):
            return [node]
        return [f for part in (node.values() if isinstance(node, dict) else node) for f in files(part)]

    settings = (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8")
    assert sorted(files(yaml.safe_load(settings)["nav"])) == sorted(PAGES)


def test_every_file_that_the_documents_link_to_is_there() -> None:
    for document in [REPOSITORY / "README.md", *sorted(DOCS.rglob("*.md"))]:
        for target in re.findall(r"\]\((?!http)([^)#]+)", document.read_text(encoding="utf-8")):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_every_test_that_the_security_promises_name_is_there() -> None:
    text = PAGES["explanation/security.md"]
    named = set(re.findall(r"\btests/[a-z_/]+(?:\.py)?", text))
    assert named
    assert [path for path in sorted(named) if not (REPOSITORY / path).exists()] == []
