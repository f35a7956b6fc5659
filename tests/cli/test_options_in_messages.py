"""A message recommends no option that the command lacks: neither where it is made by `argument`, nor where it is written out."""

from __future__ import annotations

import ast
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import TypeGuard

import pytest
import torch
from commands import ckpttool_here
from peers import FIXTURES
from safetensors.torch import save_file

import ckpttool
from ckpttool import errors
from ckpttool.cli.main import list_commands, list_flags
from ckpttool.cli.shared_options import list_shared_options
from ckpttool.engine.deltas import DeltaSummary
from ckpttool.errors import CommandLine, argument, name_flags
from ckpttool.options import (
    ConvertKeywords,
    OpenOptions,
    ReadKeywords,
    RunOptions,
    WriteRequest,
)
from ckpttool.program import Advice

REPOSITORY = Path(__file__).resolve().parents[2]
FLAGS = {name: list_flags(command) for name, command in list_commands()}
EVERY = frozenset().union(*FLAGS.values())

#: Options of other programs, after their names; and of the layouts' own options, whose help texts name each other.
_OTHERS = re.compile(r"\b(hf|git|dask|ray|srun|tar|python -m \S+|lfs|Megatron with)\s[^`;]*$")


def texts(path: Path) -> Iterator[str]:
    """The strings of a module that are no docstrings, nor rows of tables for the docs; what an f-string puts in is {}, and
    what `Advice.convert` gets is a part of a command line of convert, as is why convert does not write for a trainer."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside: set[int] = set()
    of_convert: set[int] = set()
    for n in ast.walk(tree):
        if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant):
            inside.add(id(n.value))
        if isinstance(n, ast.JoinedStr):
            inside |= {id(v) for v in ast.walk(n) if v is not n and not _is_advice(v)} - _of_advice(n)
        if isinstance(n, ast.Assign) and "_ROWS" in ast.unparse(n.targets[0]):
            inside |= {id(v) for v in ast.walk(n.value)}
        if isinstance(n, ast.keyword) and n.arg == "rows":
            inside |= {id(v) for v in ast.walk(n.value)}
        if isinstance(n, ast.keyword) and n.arg == "refused":
            of_convert.add(id(n.value))
        if _is_advice(n):
            of_convert |= {id(v) for v in n.args}
    for n in ast.walk(tree):
        if id(n) in inside:
            continue
        before = "ckpttool convert " if id(n) in of_convert else ""
        if isinstance(n, ast.JoinedStr):
            yield before + "".join(str(v.value) if isinstance(v, ast.Constant) else "{}" for v in n.values)
        elif isinstance(n, ast.Constant) and isinstance(n.value, str):
            yield before + n.value


def _is_advice(n: ast.AST) -> TypeGuard[ast.Call]:
    """Whether it is `advice.convert("--to hf")`, a whole command line."""
    return isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr == "convert"


def _of_advice(n: ast.AST) -> set[int]:
    """The arguments of such calls inside an f-string."""
    return {id(a) for v in ast.walk(n) if _is_advice(v) for a in v.args}


def lacking(text: str) -> list[str]:
    """Options in a text that the command before them does not have, or that no command is named for."""
    out = []
    for m in re.finditer(r"(?<![\w-])--[a-z][a-z-]*[a-z]", text):
        before = text[: m.start()]
        if (
            re.fullmatch(r"\s*--[a-z-]+( [A-Z]+|=\{\})?", text)
            or text.startswith("With --")
            or "that of --config" in text
        ):
            # a word of a command line; the help of an option
            wanted = m[0] in EVERY or m[0] == "--include"
        elif _OTHERS.search(before):
            wanted = True
        else:
            named = re.findall(r"ckpttool ((?:audit ledger|audit|adapter)? ?[a-z-]+)", before)
            wanted = bool(named) and m[0] in FLAGS.get(named[-1].strip(), ())
        if not wanted:
            out.append(m[0])
    return out


def test_the_scan_finds_what_it_should() -> None:
    assert lacking("give --config, or leave it out") == ["--config"]
    assert lacking("write `ckpttool diff A B --drop`") == ["--drop"]
    assert lacking("write `ckpttool convert A B --drop`; `hf repos settings x --public`") == []


@pytest.mark.parametrize("folder", ["ckpttool", "converters"])
def test_no_module_but_the_commands_writes_an_option_without_its_command(folder: str) -> None:
    found = {}
    for path in sorted((REPOSITORY / folder).rglob("*.py")):
        if "cli" in path.parts or path.name in ("errors.py", "options.py", "request.py", "__main__.py", "manifest.py"):
            continue
        if odd := [(flag, text[-80:]) for text in texts(path) for flag in lacking(text)]:
            found[path.name] = odd
    assert found == {}


def test_every_name_that_messages_give_to_argument_is_an_option_or_an_argument_of_the_recorder_or_the_guard() -> None:
    names: set[str] = set()
    for path in [*(REPOSITORY / "ckpttool").rglob("*.py"), *(REPOSITORY / "converters").rglob("*.py")]:
        for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(n, ast.Call)
                and getattr(n.func, "id", "") == "argument"
                and isinstance(n.args[0], ast.Constant)
            ):
                names.add(str(n.args[0].value))
    odd = {n for n in names if (errors._FLAGS.get(n) or "--" + n.replace("_", "-")) not in EVERY}
    assert odd == {"extra", "probe", "on_fault"}


def test_an_option_that_the_command_lacks_is_named_with_one_that_has_it() -> None:
    class Of(CommandLine):
        def owner(self, flag: str) -> str | None:
            return next((f"ckpttool {n}" for n, flags in FLAGS.items() if flag in flags), None)

    for name, flags in FLAGS.items():
        with name_flags(Of(flags)):
            assert argument("json", True) == "--json" if "--json" in flags else True
            assert argument("drop", True) == ("--drop" if "--drop" in flags else "--drop of `ckpttool convert`"), name
            assert argument("world_size", 3).startswith("--world-size 3")
            assert argument("probe", 3) == "probe=3"


def test_a_command_says_whose_option_it_recommends(tmp_path: Path) -> None:
    """Two saves of DeepSpeed in one folder without `latest`: verify has the option that chooses one, `audit verify --against` does not."""
    torch.save({"model": {"w": torch.randn(4, 64)}}, tmp_path / "s.pt")
    ckpttool.convert(tmp_path / "s.pt", tmp_path / "zero", to="zero3", world_size=1)
    (tmp_path / "zero" / "latest").unlink()
    (save,) = (p for p in (tmp_path / "zero").iterdir() if p.is_dir())
    shutil.copytree(save, tmp_path / "zero" / "global_step7")
    ckpttool.export(tmp_path / "s.pt", tmp_path / "a.tar.zst")
    commands = (
        ("verify", tmp_path / "zero"),
        ("audit", "verify", tmp_path / "a.tar.zst", "--against", tmp_path / "zero"),
    )
    done = [ckpttool_here(*words) for words in commands]
    assert "Choose one with --tag." in done[0].stderr
    assert "Choose one with --tag of `ckpttool convert`." in done[1].stderr


_PARTS = ("--drop-matching", "--rename")
_WHOLE = dict.fromkeys(_PARTS, "convert changes single entries")
#: What a command that reads a checkpoint has no use for, and why.
LACKS: dict[str, dict[str, str]] = {
    "inspect": dict.fromkeys(("--allow-equal-ranks", "--allow-mixed-steps"), "it shows such a checkpoint, with a note"),
    "diff": dict.fromkeys(("--allow-equal-ranks", "--allow-mixed-steps"), "to look at them is what it is for"),
    "compare": {**dict.fromkeys(("--only", "--allow-equal-ranks", "--allow-mixed-steps"), "to look at the weights is what it is for"), **_WHOLE},
    "verify": {"--weights": "it checks what is there"},
    "doctor": {**dict.fromkeys(("--only", "--weights", "--allow-equal-ranks", "--allow-mixed-steps"), "it looks at all, and refuses nothing"), **_WHOLE},
    "watch": {**dict.fromkeys(("--only", "--weights", "--tag"), "it looks at whole saves, each by itself"), **_WHOLE},
    "push": {"--only": "the Hub gets the model; --include-optimizer pushes the rest", **_WHOLE},
    "pull": {"--weights": "a repository has the weights that were pushed", **_WHOLE},
    "resume-verify": {**dict.fromkeys(("--only", "--weights"), "a job needs its whole state"), **_WHOLE},
    "adapter extract": {**dict.fromkeys(("--only", "--weights"), "it takes the adapter"), **_WHOLE},
    "adapter merge": {"--weights": "which adapter is merged, its own options say", **_WHOLE},
    "average": {"--only": "it takes the model", **_WHOLE},
    "delta": {"--weights": "it is between whole states", **_WHOLE},
    "audit export": {"--weights": "an archive has the state as it is", **_WHOLE},
    "audit restore": {**dict.fromkeys(("--weights", "--source-layout", "--tag", "--allow-equal-ranks", "--allow-mixed-steps"), "the source is an archive"), **_WHOLE},
}  # fmt: skip
READERS = (
    "convert", "inspect", "verify", "diff", "compare", "digest", "doctor", "push", "pull", "resume-verify", "adapter extract", "adapter merge", "average", "delta", "audit export",
    "audit restore", "show", "stats", "watch",
)  # fmt: skip

_CHANGES = (
    "--canonical-keys",
    "--keys",
    "--strip-wrappers",
    "--vocab-size",
    "--regroup",
    "--dequantize",
    "--quantize",
    "--map",
    "--set",
    "--reset",
)
#: What a command that writes a checkpoint has no use for, and why.
LACKS_IN_WRITING: dict[str, dict[str, str]] = {
    "convert": {},
    "pull": dict.fromkeys(_CHANGES, "convert changes the state of a repository, too: its source may be hf://"),
    "push": {
        **dict.fromkeys((*_CHANGES, "--to", "--world-size"), "the Hub gets hf, which no job loads"),
        "--quantize": "convert writes the folder, whose error is looked at before it is published",
    },
    "adapter extract": dict.fromkeys((*_CHANGES, "--to", "--world-size", "--cast", "--drop"), "PEFT's folder has one form, and holds no other state"),
    "adapter merge": dict.fromkeys(_CHANGES, "it is the state of a base model, with nothing of the training"),
    "average": dict.fromkeys((c for c in _CHANGES if c != "--quantize"), "it has weights only, under the names of all checkpoints"),
    "audit export": dict.fromkeys((*_CHANGES, "--to", "--world-size", "--cast"), "an archive has the state as it is, at no world size"),
    "audit restore": dict.fromkeys((*_CHANGES, "--cast", "--ignore-recorded-digests"), "the state is the archive's, and compared with it"),
}  # fmt: skip
#: What a command that copies tensors has no use for, and why.
LACKS_IN_RUNNING: dict[str, dict[str, str]] = {
    "convert": {},
    "pull": dict.fromkeys(("--no-verify", "--max-memory", "--workers", "--prove-logits"), "convert has them, for hf:// too"),
    "push": dict.fromkeys(("--force", "--no-verify", "--max-memory", "--workers", "--prove-logits"), "it makes a commit, and the Hub has the hashes of all files"),
    "adapter extract": {"--workers": "an adapter is small", "--prove-logits": "an adapter is no model"},
    "adapter merge": {"--workers": "tensors are computed, by one process"},
    "average": {"--workers": "tensors are computed, by one process"},
    "audit export": dict.fromkeys(("--workers", "--prove-logits"), "an archive is one file, with digests of all tensors"),
    "audit restore": dict.fromkeys(("--workers", "--prove-logits"), "an archive is one file, with digests of all tensors"),
}  # fmt: skip


def flags_of_request(request: type) -> set[str]:
    flags = {f.metadata["flag"] or "--" + f.name.replace("_", "-") for f in list_shared_options(request)}
    return {flag.partition("/")[0] for flag in flags}


def test_every_command_that_reads_a_checkpoint_has_all_options_of_reading() -> None:
    wanted = flags_of_request(OpenOptions)
    assert {name: wanted - FLAGS[name] for name in READERS} == {n: set(LACKS.get(n, ())) for n in READERS}
    takes = {name for name, of in FLAGS.items() if {"--like", "--flat-layout"} <= of}
    assert takes == set(READERS), "another command reads checkpoints"


@pytest.mark.parametrize(("request_", "lacks"), [(WriteRequest, LACKS_IN_WRITING), (RunOptions, LACKS_IN_RUNNING)])
def test_every_command_that_writes_a_checkpoint_has_all_options_of_writing_and_of_running(
    request_: type, lacks: dict[str, dict[str, str]]
) -> None:
    wanted = flags_of_request(request_)
    assert {name: wanted - FLAGS[name] for name in lacks} == {name: set(reasons) for name, reasons in lacks.items()}
    takes = {name for name, of in FLAGS.items() if {"--dtype", "--like"} <= of} - {"resume-verify", "compare"}
    assert takes == set(lacks), "another command writes checkpoints"


def test_a_layout_that_one_of_two_has_is_that_of_this_one(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(2)}}, tmp_path / "a.pt")
    ckpttool.convert(tmp_path / "a.pt", tmp_path / "dcp", to="dcp", world_size=1)
    assert ckpttool.diff(tmp_path / "a.pt", tmp_path / "dcp", source_layout="full", tag=None).equal
    assert ckpttool_here("diff", tmp_path / "a.pt", tmp_path / "dcp", "--source-layout", "dcp").returncode == 0
    done = ckpttool_here("diff", tmp_path / "a.pt", tmp_path / "dcp", "--source-layout", "zero3")
    assert done.returncode == 2 and "is of this layout" in done.stderr


def test_the_keywords_of_functions_are_the_fields_of_the_options() -> None:
    made = {f.name: str(f.type) for f in list_shared_options(OpenOptions, "only", "weights", "drop_matching", "rename")}
    assert {n: t.__forward_arg__ for n, t in ReadKeywords.__annotations__.items()} == made
    for function in (
        ckpttool.open,
        ckpttool.convert,
        ckpttool.verify,
        ckpttool.digest,
        ckpttool.push,
        ckpttool.load,
        ckpttool.resume_verify,
    ):
        listed = signature(function).parameters
        assert made.keys() <= listed.keys() and "reading" not in listed, function
        assert {listed[n].default for n in made} == {None, False}
    with pytest.raises(TypeError, match=r"digest\(\) got an unexpected keyword argument 'onyl'"):
        ckpttool.digest("x", onyl=["model"])  # type: ignore[call-arg]


def test_convert_takes_every_field_of_the_three_requests() -> None:
    made = {f.name: f for request in (WriteRequest, RunOptions, OpenOptions) for f in fields(request)}
    # those are `adapter_merge`, `average` and `delta`
    del made["merge"], made["average"], made["difference_to"], made["as_delta"]
    assert {n: t.__forward_arg__ for n, t in ConvertKeywords.__annotations__.items()} == {
        n: f.type for n, f in made.items()
    }
    listed = signature(ckpttool.convert).parameters
    assert {n: p.default for n, p in listed.items() if n in made} == {n: f.default for n, f in made.items()}
    with pytest.raises(TypeError, match=r"convert\(\) got an unexpected keyword argument 'world_sze'"):
        ckpttool.convert("x", "y", world_sze=2)  # type: ignore[call-arg]


def test_options_and_commands_to_copy_are_quoted_for_a_shell(tmp_path: Path) -> None:
    """What a checkpoint, or its folder, calls something could run when somebody pastes the command."""
    evil = "x $(touch RUN)"
    with name_flags():
        assert argument("weights", evil) == "--weights 'x $(touch RUN)'"
        assert argument("config", "-a=b,c/d") == "--config -a=b,c/d"
        assert argument("only", ["model", "a*"]) == "--only 'model,a*'"
    assert argument("weights", evil) == f"weights={evil!r}"
    path = tmp_path / evil
    shutil.copytree(FIXTURES / "fsdp1_w3_uop0" / "ckpt", path)
    undescribed = ckpttool_here("inspect", path).stderr
    shutil.rmtree(path)
    path.mkdir()
    pair = {f"base_model.model.l.lora_{side}.weight": torch.ones(2, 2) for side in "AB"}
    save_file(pair, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["l"]}')
    alone = ckpttool_here("convert", path, tmp_path / "out", "--to", "hf").stderr
    merged = ckpttool_here("adapter", "merge", path, tmp_path / "out").stderr
    delta = str(DeltaSummary(str(path), "TRL", None, None, 1, 1, None, False))
    for text, commands in ((undescribed, 3), (alone, 2), (merged, 1), (delta, 1)):
        assert text.count(shlex.quote(str(path))) == commands, text
    torch.save({"model": {"w": torch.ones(1)}, f"ema {evil}": {"w": torch.zeros(1)}}, tmp_path / "a.pt")
    assert f"--weights 'ema {evil}'" in ckpttool_here("inspect", tmp_path / "a.pt").stdout
    ckpt = ckpttool.inspect(tmp_path / "a.pt").index
    assert ckpt is not None and Advice(ckpt, "-x.pt").convert("--to hf") == "ckpttool convert ./-x.pt OUT --to hf"
