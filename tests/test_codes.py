"""Codes of errors: a catalogue that is whole, places that raise each of them, and `ckpttool explain`."""

from __future__ import annotations

import ast
import importlib
import json
import pickle
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from commands import ckpttool_here

from ckpttool import errors
from ckpttool.cli.main import list_commands, list_flags
from ckpttool.codes import Code, get_code_prefix, load_codes
from ckpttool.engine.workers.part_requests import encode_error, parse_answer

ROOT = Path(__file__).resolve().parents[1]
SOURCES = [*(ROOT / "ckpttool").rglob("*.py"), *(ROOT / "converters").rglob("*.py")]
KNOWN = load_codes()
EXITS = {get_code_prefix(code): code for code, _ in errors.EXIT_CODES if code}
#: Places that raise an error with the general code of its exit code. Give a new one a code of its own, or one of those
#: that there are; the number may only become smaller.
MOST_GENERAL = 32


def error_classes() -> dict[str, Any]:
    """{name: class} of all errors, also those that other modules derive."""
    out = {n: x for n in errors.__all__ if isinstance(x := getattr(errors, n), type)}
    for path in SOURCES:
        module = "ckpttool." * (path.relative_to(ROOT).parts[0] == "converters") + ".".join(
            path.relative_to(ROOT).with_suffix("").parts
        )
        for name in re.findall(
            rf"^class (\w+)\((?:{'|'.join(out)})\):", path.read_text(encoding="utf-8"), re.MULTILINE
        ):
            out[name] = getattr(importlib.import_module(module), name)
    return out


CLASSES = error_classes()


def raised() -> Iterator[tuple[str, str, list[ast.expr]]]:
    """(where, code, what makes the text) of every place that makes an error of a class that it names."""
    for path in SOURCES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = {f.name: f for f in tree.body if isinstance(f, ast.FunctionDef)}
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            if name not in CLASSES:
                continue
            given = {k.arg: k.value for k in node.keywords}.get("code")
            if given is not None and not isinstance(given, ast.Constant):
                continue  # that of another error, which this one stands for
            code = CLASSES[name].code if given is None else ast.literal_eval(given)
            texts = node.args[:1]
            if texts and isinstance(texts[0], ast.Call) and (made := functions.get(getattr(texts[0].func, "id", ""))):
                texts = [r.value for r in ast.walk(made) if isinstance(r, ast.Return) and r.value is not None]
            yield f"{path.relative_to(ROOT)}:{node.lineno} {name}", code, texts


RAISED = list(raised())


def test_the_catalogue_has_every_code_that_the_type_has_and_says_all_of_each() -> None:
    assert list(KNOWN) == list(get_args(Code)) == sorted(KNOWN)
    assert {code[4:6] for code in KNOWN} == set(EXITS)
    assert {f"CKPT{number}00" for number in EXITS} <= set(KNOWN)
    for code, e in KNOWN.items():
        assert re.fullmatch(r"CKPT\d{4}", code)
        assert (
            {"title", "means", "why", "do", "commands"}
            <= set(e)
            <= {"title", "means", "why", "do", "commands", "message"}
        )
        assert not str(e["title"]).endswith(".") and all(
            str(e[part]).endswith(".") for part in ("means", "why", "do")
        ), code
    titles = [e["title"] for e in KNOWN.values()]
    assert len(set(titles)) == len(titles)


def test_the_commands_of_every_entry_are_ones_that_their_parsers_take() -> None:
    commands = dict(list_commands())
    for code, e in KNOWN.items():
        lines: Any = e["commands"]
        assert lines, code
        for line in lines:
            program, *words = shlex.split(line)
            name = next((n for n in (" ".join(words[:k]) for k in (3, 2, 1)) if n in commands), None)
            assert program == "ckpttool" and (name or words[0] in ("--version", "--help")), line
            if name and "--help" not in words:
                commands[name].make_context(name, words[len(name.split()) :])


def test_every_option_that_the_catalogue_names_is_one_of_a_command() -> None:
    every = frozenset().union(*(list_flags(command) for _, command in list_commands())) | {
        "--help",
        "--install-completion",
    }
    for code, e in KNOWN.items():
        named = re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", f"{e['means']} {e['why']} {e['do']}")
        assert set(named) <= every, code


def test_the_code_of_every_place_has_the_exit_code_of_its_class() -> None:
    assert [row for row, code, _ in RAISED if code[4:6] != get_code_prefix(CLASSES[row.split()[1]].exit_code)] == []
    assert {c.__name__: c.code for c in CLASSES.values() if c.code[4:6] != get_code_prefix(c.exit_code)} == {}


def test_every_code_is_raised_somewhere_and_few_places_have_a_general_one() -> None:
    used = {code for _, code, _ in RAISED}
    # two are those of reports, which resume-verify and compare end with; CKPT1400 is raised by `kind_of_failure`
    assert set(KNOWN) - used <= {"CKPT0600", "CKPT1000", "CKPT1100", "CKPT1400"}
    general = [row for row, code, _ in RAISED if code.endswith("00") and code != "CKPT9900"]
    assert len(general) <= MOST_GENERAL, "\n" + "\n".join(general)


def pattern(node: ast.expr) -> str:
    """A regular expression for the text that an expression makes: its constants, and anything for what is put in."""
    if isinstance(node, ast.Constant):
        return re.escape(str(node.value))
    if isinstance(node, ast.JoinedStr):
        return "".join(map(pattern, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return pattern(node.left) + pattern(node.right)
    return ".*"


@pytest.mark.parametrize("code", KNOWN)
def test_the_example_of_a_code_is_what_one_of_its_places_says(code: str) -> None:
    message = KNOWN[code].get("message")
    patterns = [pattern(text) for _, its, texts in RAISED if its == code for text in texts]
    told = [p for p in patterns if len(p.replace(".*", "").replace("\\", "")) >= 10]
    if message is None:
        assert not told, "give an example"
    else:
        assert any(re.fullmatch(p, str(message), re.DOTALL) for p in told), "\n".join(told)


def test_an_error_keeps_its_code_and_kind_through_a_pickle_and_a_worker() -> None:
    class Own(errors.Corrupt):
        code = "CKPT0403"

    assert (Own("x").code, Own("x").kind) == ("CKPT0403", "Corrupt")
    e = errors.Corrupt("x", code="CKPT0412")
    again = pickle.loads(pickle.dumps(e))
    with pytest.raises(errors.Corrupt) as answered:
        parse_answer(encode_error(e))
    assert again.code == answered.value.code == e.code == "CKPT0412"
    assert (again.kind, answered.value.kind, errors.Locked("x").code) == ("Corrupt", "Corrupt", "CKPT0604")


def test_an_error_ends_with_the_command_that_explains_it(tmp_path: Path) -> None:
    done = ckpttool_here("inspect", tmp_path / "nothing")
    first, last = done.stderr.splitlines()
    assert first.startswith("error: ") and last == "more: ckpttool explain CKPT0302" and done.returncode == 3
    error = json.loads(ckpttool_here("inspect", tmp_path / "nothing", "--json").stdout)["error"]
    assert (error["code"], error["kind"], error["exit_code"]) == ("CKPT0302", "NotRecognised", 3)
    explained = ckpttool_here(*last.split()[2:])
    assert explained.returncode == 0 and explained.stdout.startswith("CKPT0302  There is no such file or folder\n")


@pytest.mark.parametrize(
    ("words", "first", "many"),
    [
        ("CKPT0412", "CKPT0412", False), ("ckpt0412", "CKPT0412", False), ("412", "CKPT0412", False), ("0412", "CKPT0412", False),
        ("4", "CKPT0400", True), ("Corrupt", "CKPT0400", True), ("corrupt", "CKPT0400", True), ("CKPT0400", "CKPT0400", True),
        ("12", "CKPT1200", True), ("130", "CKPT9900", False), ("Locked", "CKPT0604", False), ("shard missing", "CKPT0401", True),
        ("", "CKPT0100", True),
    ],
)  # fmt: skip
def test_explain_finds_codes_by_number_exit_code_class_and_words(words: str, first: str, many: bool) -> None:
    done = ckpttool_here("explain", *words.split())
    rows = json.loads(ckpttool_here("explain", *words.split(), "--json").stdout)
    assert done.stdout.startswith(first) and rows[0]["code"] == first and (len(rows) > 1) == many
    assert all(row["code"] in done.stdout for row in rows)
    if not many:
        assert " ".join(rows[0]["do"].split()) in " ".join(done.stdout.split())
        assert all(f"\n  {line}\n" in done.stdout for line in rows[0]["commands"])


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("CKPT0499", "CKPT0400"),
        ("9999", "CKPT9900"),
        ("Corupt", "Corrupt"),
        ("xyzzy", "`ckpttool explain` lists all codes"),
        ("\t", "`ckpttool explain` lists all codes"),
    ],
)
def test_explain_suggests_what_is_like_a_code_that_there_is_not(words: str, hint: str) -> None:
    done = ckpttool_here("explain", words)
    assert done.returncode == 2 and hint in done.stderr


def test_the_codes_of_the_page_are_those_that_explain_knows() -> None:
    from peers import hooks

    text = hooks().codes_sections()
    assert [*re.findall(r"^### (CKPT\d{4}): .* \{#ckpt\d{4}\}$", text, re.MULTILINE)] == list(KNOWN)
