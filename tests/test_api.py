"""The Python API: what help() and a type checker show, and options of layouts."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
import torch
from peers import FIXTURES, REPOSITORY

import ckpttool
from ckpttool.errors import UsageError
from ckpttool.layouts import READ_HINTS, WRITE_HINTS, layouts, list_layout_flags

DCP = FIXTURES / "fsdp2_w3" / "ckpt"
FUNCTIONS = ("convert", "diff", "digest", "doctor", "export", "inspect", "load", "open", "plan", "pull", "push", "restore", "resume_verify", "storage_reader", "verify")  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_signature_is_complete_and_explained(name: str) -> None:
    function = getattr(ckpttool, name)
    parameters = inspect.signature(function).parameters.values()
    assert all(p.kind is not p.VAR_KEYWORD for p in parameters)
    text = function.__doc__
    if (
        "(all): as" in text
        or "(the others): as" in text
        or "those of `open`" in text
        or "those of `storage_reader`" in text
    ):
        return
    gone = [p.name for p in parameters if not re.search(rf"\b{p.name}\b", text)]
    assert gone == []


def test_every_public_name_is_listed_by_dir_and_is_there() -> None:
    assert dir(ckpttool) == sorted(ckpttool.__all__)
    for name in ckpttool.__all__:
        assert getattr(ckpttool, name).__doc__ or name == "__version__"


def test_mypy_sees_a_misspelt_option_of_a_layout(tmp_path: Path) -> None:
    """As a user has the package: with its converters inside. tests/typed_calls.py has the functions."""
    (tmp_path / "site" / "ckpttool").mkdir(parents=True)
    for path in (REPOSITORY / "ckpttool").iterdir():
        (tmp_path / "site" / "ckpttool" / path.name).symlink_to(path)
    (tmp_path / "site" / "ckpttool" / "converters").symlink_to(REPOSITORY / "converters")
    (tmp_path / "calls.py").write_text(
        "import ckpttool\nckpttool.ZeroOptions(sub_group_size=1000)\nckpttool.ZeroOptions(subgroup_size=1000)\n"
    )
    modules = ["ckpttool", "ckpttool.by_fields", "ckpttool.converters.options", "calls"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--follow-imports=skip", "--cache-dir", tmp_path / "cache", "--config-file=",
         *(word for module in modules for word in ("-m", module))],
        cwd=tmp_path, env={"MYPYPATH": str(tmp_path / "site"), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    errors = [line.partition(" error:")[0] for line in done.stdout.splitlines() if line.startswith("calls.py:")]
    assert errors == ["calls.py:3:"], done.stdout


def test_options_of_another_layout_are_refused(tmp_path: Path) -> None:
    for options, to in (
        (ckpttool.HfOptions(), "dcp"), (ckpttool.UniversalOptions(stage=2), "zero3"), (ckpttool.ZeroOptions(), "full"), ("x", "hf"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=rf"options={type(options).__name__}.*does not apply to {to}"):
            ckpttool.convert(DCP, tmp_path / "out", to=to, options=options)
    assert list(tmp_path.iterdir()) == []


def test_options_that_make_no_sense_are_refused() -> None:
    calls: list[Any] = [
        lambda: ckpttool.ZeroOptions(sub_group_size=0), lambda: ckpttool.UniversalOptions(stage=4),
        lambda: ckpttool.HfOptions(adapter=True, include_optimizer=True), lambda: ckpttool.HfOptions(max_shard_bytes=0),
        lambda: ckpttool.plan(DCP, "x", to="dcp", world_size=0), lambda: ckpttool.plan(DCP, "x", to="dcp", world_size="8"),  # type: ignore[arg-type]
        lambda: ckpttool.open(DCP, only="model"),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(UsageError):
            call()
    with pytest.raises(FrozenInstanceError):
        ckpttool.ZeroOptions().write_tag = "x"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ckpttool.plan(DCP, "x", to="dcp", world_size=0), "world_size=0: it must be an integer of at least 1."),
        (lambda: ckpttool.plan(DCP, "x", to="hf", world_size=2), "world_size=2 does not apply to hf"),
        (lambda: ckpttool.plan(DCP, "x", to="dcp", wrap=["**"]), "wrap does not apply to dcp -> dcp; it is used to read fsdp1"),
        (lambda: ckpttool.open(DCP, only=["modle"]), "only=['modle']: the checkpoint holds model, optim, trainer."),
        (lambda: ckpttool.convert(DCP, "x", to="dcp", threads=0), "threads=0: it must be at least 1."),
        (lambda: ckpttool.convert(DCP, "x", to="dcp", max_memory_bytes=1), "max_memory_bytes=1: at least"),
        (lambda: ckpttool.HfOptions(max_shard_bytes=0), "max_shard_bytes=0: it must be at least 1."),
        (lambda: ckpttool.plan(DCP, "x"), "Cannot infer the layout from 'x'. Pass to: dcp"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_a_value_error_that_names_the_keyword(
    call: Callable[[], object], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="^" + re.escape(words)) as e:
        call()
    assert isinstance(e.value, UsageError) and "--" not in str(e.value)
    assert list(tmp_path.iterdir()) == []


def test_every_layout_says_which_arguments_it_uses() -> None:
    for layout in layouts().values():
        assert set(layout.reader_uses) <= set(READ_HINTS) and set(layout.writer_uses) <= set(WRITE_HINTS)
    assert {x.name for x in layouts().values() if x.write is not None and "world_size" in x.writer_uses} == {
        "dcp",
        "zero3",
        "zero2",
        "zero1",
        "fsdp1",
        "accelerate",
        "trainer",
        "lightning",
        "torchtitan",
        "torchtune",
        "verl",
        "llamafactory",
        "xtuner",
        "megatron",
        "torch_checkpointing",
    }


def test_every_option_of_a_layout_has_a_sentence_and_every_layout_has_its_names() -> None:
    names: list[str] = []
    for layout in layouts().values():
        names += [layout.name, *layout.aliases]
        for flag, field in list_layout_flags(layout).items():
            assert re.fullmatch(r"--[a-z0-9-]+", flag) and field.metadata["help"].endswith("."), flag
    assert len(set(names)) == len(names)


def test_results_are_drawn_once_in_a_notebook_and_are_no_dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for IPython's shell, by which rich knows a notebook: it would display the drawing itself, too, and needs IPython for
    that, which is not here."""
    shell = type("ZMQInteractiveShell", (), {})
    monkeypatch.setattr("builtins.get_ipython", shell, raising=False)
    torch.save({"model": {"w": torch.arange(4.0)}}, tmp_path / "a.pt")
    torch.save({"model": {"w": torch.arange(4.0) + 1, "x<b>": torch.ones(1)}}, tmp_path / "b.pt")
    a, b = tmp_path / "a.pt", tmp_path / "b.pt"
    assert ckpttool.inspect(a)._repr_html_().startswith("<pre")
    shown = ckpttool.diff(a, b)._repr_html_()
    assert "only in B: model.x&lt;b&gt;" in shown and "data: model.w: 4 of 4 elements differ" in shown
    assert "different: 1 tensor in both" in str(ckpttool.diff(a, b))
    done = ckpttool.convert(a, tmp_path / "dcp", to="dcp", world_size=1)
    for found, word in (
        (done, "full -> dcp for 1 rank"), (ckpttool.digest(a), "blake3:"), (ckpttool.verify(a), "structure ok"), (ckpttool.doctor(a), "sound"),
    ):  # fmt: skip
        assert word in str(found) and len(found._repr_html_()) < 2000
    with ckpttool.plan(a, tmp_path / "x", to="hf") as plan:
        assert "full -> hf: 1 tensor," in str(plan) and plan._repr_html_() and "object at 0x" not in str(plan)


def test_a_difference_is_true_and_a_summary_draws_itself(tmp_path: Path) -> None:
    tree = {"model": {"w": torch.arange(4.0)}}
    torch.save(tree, tmp_path / "a.pt")
    tree["model"]["w"][1] = 7
    torch.save(tree, tmp_path / "b.pt")
    assert not ckpttool.diff(tmp_path / "a.pt", tmp_path / "a.pt")
    assert ckpttool.diff(tmp_path / "a.pt", tmp_path / "b.pt")
    found = ckpttool.inspect(DCP)
    assert "dcp checkpoint" in str(found) and "<pre" in found._repr_html_()
    with ckpttool.open(DCP) as opened:
        assert (
            len(repr(opened)) < 300 and "84 tensors" in repr(opened.checkpoint) and len(repr(opened.checkpoint)) < 300
        )
    with ckpttool.plan(DCP, tmp_path / "dcp", to="dcp") as planned:
        assert "84 tensors, " in repr(planned) and len(repr(planned)) < 300 and len(repr(planned.draft)) < 300


#: Modules whose messages name whole commands of the program, or that only the program calls.
OF_THE_PROGRAM = {"flat_params.py", "audit.py"}


def test_no_message_of_the_library_names_a_flag() -> None:
    """`errors.argument` names options, since a caller in Python knows keywords."""
    folders = [
        REPOSITORY / "converters",
        *(REPOSITORY / "ckpttool" / n for n in ("engine", "formats", "huggingface", "index", "live", "storage")),
    ]
    files = [REPOSITORY / "ckpttool" / "layouts.py", *(p for folder in folders for p in folder.rglob("*.py"))]
    wrong = [
        f"{path.name}:{text.lineno} {text.value}"
        for path in files
        if path.name not in OF_THE_PROGRAM
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Raise)
        for text in ast.walk(node)
        if isinstance(text, ast.Constant)
        and isinstance(text.value, str)
        and re.search(r"(^|[\s`'\"(])--[a-z]", text.value)
        and not re.search(r"\b(dask|ray|srun|mpiexec) (scheduler|start|--)", text.value)  # commands of other programs
    ]
    assert wrong == []
    assert len(files) > 60
