"""What --help, TAB and the man page say: examples that the parser takes, exit codes, names of layouts."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from commands import ckpttool_here

from ckpttool.cli.help import GROUPS, get_about
from ckpttool.cli.main import app
from ckpttool.errors import EXIT_CODES
from ckpttool.layouts import layouts

PROGRAM: Any = typer.main.get_command(app)


def commands(group: Any = PROGRAM, above: str = "") -> dict[str, Any]:
    """{name: command}, of groups too: "audit export"."""
    out: dict[str, Any] = {}
    for name, found in group.commands.items():
        out |= commands(found, f"{above}{name} ") if hasattr(found, "commands") else {above + name: found}
    return out


COMMANDS = commands()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_example_of_a_command_is_one_that_its_parser_takes(name: str) -> None:
    said = get_about(COMMANDS[name])
    assert said is not None and said.examples
    for what, line in said.examples:
        words = shlex.split(line)
        assert words[: 1 + len(name.split())] == ["ckpttool", *name.split()], line
        COMMANDS[name].make_context(name, words[1 + len(name.split()) :])
        assert what and not what.endswith(".")
    assert len(said.examples) >= 3 or name in ("clean", "layouts") or name.startswith("audit ")


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_shows_its_examples_and_its_exit_codes(name: str) -> None:
    text, said = ckpttool_here(*name.split(), "--help").stdout, get_about(COMMANDS[name])
    assert said is not None
    for what, line in said.examples:
        assert f"  # {what}\n  {line}\n" in text
    shown = dict(re.findall(r"^  (\d+) +(.+)$", text.partition("\nExit codes:\n")[2], re.MULTILINE))
    assert {int(code) for code in shown} == set(said.exits) <= {code for code, _ in EXIT_CODES}
    assert {0, 1, 2} <= set(said.exits)


def test_every_command_is_in_one_group_of_the_help() -> None:
    listed = [name for names in GROUPS.values() for name in names]
    assert len(listed) == len(set(listed)) and set(PROGRAM.commands) <= set(listed)
    text = ckpttool_here("--help").stdout
    shown = re.findall(
        r"^(?:([A-Z]\w+):|  ([a-z-]+)  +[A-Z].*)$",
        text.partition("\nLook:")[2].partition("\nExamples:")[0],
        re.MULTILINE,
    )
    assert [name for _, name in shown if name] == [name for name in listed if name in PROGRAM.commands]
    assert [group for group, _ in shown if group] == list(GROUPS)[1:]


#: What people want, in their words -> the command whose line in `ckpttool --help` has these words.
WANTED = {
    "what it contains": "inspect", "what it lacks": "inspect", "what loads it": "inspect", "values of a tensor": "show", "slice": "show",
    "norm": "stats", "NaN": "stats", "zeros": "stats", "how far moved": "stats", "layer": "stats", "compare two checkpoints": "diff",
    "tensor by tensor": "diff", "error": "explain", "Hugging Face": "convert", "DeepSpeed": "convert", "one file": "convert", "ranks": "convert",
    "average": "average", "EMA": "average", "LoRA": "adapter", "merge base model": "adapter", "layouts": "layouts", "renames keys": "maps",
    "download complete": "verify", "every byte": "verify", "wrong": "doctor", "repair": "doctor", "digest": "digest", "two models compute": "compare",
    "goes on as before": "resume-verify", "years": "audit", "retention": "audit", "interrupted": "clean", "upload Hub": "push",
    "download Hub": "pull",
}  # fmt: skip


@pytest.mark.parametrize("words", WANTED)
def test_the_help_of_the_program_has_the_words_for_a_task_at_its_command(words: str) -> None:
    text = re.sub(r"\n {10,}", " ", ckpttool_here("--help").stdout)
    lines = {m[1]: m[2] for m in re.finditer(r"^  ([a-z-]+)  +([A-Z].*)$", text, re.MULTILINE)}
    assert all(re.search(rf"\b{w}", lines[WANTED[words]], re.IGNORECASE) for w in words.split())


def test_the_examples_of_the_program_are_ones_that_parsers_take() -> None:
    said = get_about(PROGRAM)
    assert said is not None
    for _, line in said.examples:
        program, name, *words = shlex.split(line)
        if "--help" not in words:
            COMMANDS[name].make_context(name, words)
        assert program == "ckpttool"


def test_exit_codes_that_a_command_is_known_to_end_with_are_in_its_help() -> None:
    for name, codes in {
        "diff": {5},
        "resume-verify": {10, 11},
        "convert": {4, 6, 8, 130},
        "audit verify": {4, 5},
    }.items():
        said = get_about(COMMANDS[name])
        assert said is not None and codes <= set(said.exits)


@pytest.mark.parametrize("name", ["convert", "pull", "audit restore"])
def test_the_layouts_that_can_be_written_are_in_the_help_of_to(name: str) -> None:
    (option,) = (p for p in COMMANDS[name].params if "--to" in p.opts)
    wanted = {x.name for x in layouts().values() if x.write is not None and x.detect.__module__.startswith("ckpttool.")}
    assert set(re.findall(r"[a-z0-9_]+", option.help.partition(": ")[2])) - {"or"} == wanted


CKPT = Path(__file__).parents[2] / "fixtures/fsdp2_w3/ckpt"


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("convert a b --to z", {"zero3", "zero2", "zero1"}), ("inspect a --source-layout d", {"dcp", "diffusers"}),
        ("convert a b --dtype fp", {"fp16", "fp32", "fp64"}), ("digest a --only optim,s", {"optim,scheduler", "optim,scaler"}),
        ("diff a b --map meta", {"meta-llama"}), ("convert a b --reset rn", {"rng"}),
        (f"inspect {CKPT} --tensor model.lm", {"model.lm_head.weight"}), (f"show {CKPT} model.lm", {"model.lm_head.weight"}),
        (f"stats {CKPT} --only optim,model.lm", {"optim,model.lm_head.weight"}), ("inspect /nowhere --tensor model", set()),
    ],
)  # fmt: skip
def test_tab_completes_values_of_options_without_large_packages(words: str, wanted: set[str]) -> None:
    code = (
        "import sys, atexit\n"
        "atexit.register(lambda: print(sorted({'numpy', 'torch', 'rich.markdown'} & sys.modules.keys()), file=sys.stderr))\n"
        "from ckpttool.cli.main import main\nsys.argv = ['ckpttool']\nmain()\n"
    )
    line = f"ckpttool {words}"
    environment = {
        **os.environ, "_CKPTTOOL_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1),
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert set(done.stdout.split()) == wanted, done.stderr
    assert done.stderr.strip() == "[]"
