"""Names that control a terminal, forge lines, or are HTML: no output of any command has them raw, and no browser runs them."""

from __future__ import annotations

import json
import logging
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from commands import ckpttool_here
from pages import Browser, browser
from peers import REPOSITORY
from sampling import sample

import ckpttool
from ckpttool.cli.main import list_commands
from ckpttool.errors import CkpttoolError
from ckpttool.hub import model_card
from ckpttool.printable import printable, printable_json
from ckpttool.testing import assert_same_training_state

sys.path.insert(0, str(REPOSITORY))

from tests.torture import terminal

BAD = "".join(p for p in terminal.PIECES if not p.isascii() or not p.isprintable())


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def test_every_command_is_tried(tmp_path: Path) -> None:
    r = random.Random(0)
    terminal.made(r, tmp_path / "x")
    tried = {" ".join(map(str, words[:n])) for words in terminal.commands(tmp_path / "x", r) for n in (1, 2, 3)}
    assert {name for name, _ in list_commands()} - tried == {
        "audit hold",
        "audit release",
        "audit restore",
        "audit ledger add",
    }


@pytest.mark.parametrize("part", sample("sixteenths of all commands", range(16), [5]))
def test_no_output_of_any_command_has_a_character_that_does_not_print(tmp_path: Path, part: int) -> None:
    r = random.Random(part)
    names = terminal.made(r, tmp_path / "x")
    lines = terminal.commands(tmp_path / "x", r)
    assert len(lines) > 50
    for words in lines[part::16]:
        assert terminal.wrong(words, names) == [], words


@pytest.mark.slow
def test_a_case_of_make_torture(tmp_path: Path) -> None:
    assert terminal.case(7, tmp_path / "x")["status"] == "printable"


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [["inspect"], ["inspect", "--tree"], ["digest", "--tensors"], ["verify", "--read-data"]], ids=" ".join
)
def test_nor_what_is_written_to_a_terminal(tmp_path: Path, words: list[str]) -> None:
    terminal.made(random.Random(3), tmp_path / "x")
    found = terminal.on_terminal([words[0], tmp_path / "x" / "a.pt", *words[1:]])
    assert terminal.faults_of(found, terminal=True) == []


def test_letters_of_every_script_stay_as_they_are() -> None:
    assert printable("größe 日本語 мир שלום ñ 🙂") == "größe 日本語 мир שלום ñ 🙂"
    assert printable("a\x1b[2J\n\u202e\u200b\x9b\x7f\udcff") == "a\\x1b[2J\\n\\u202e\\u200b\\x9b\\x7f\\udcff"


def test_json_has_escapes_for_what_does_not_print_and_is_the_same_data() -> None:
    data = {BAD: [BAD, {"größe": "日本語"}]}
    text = printable_json(data)
    assert json.loads(text) == data and "größe" in text and "日本語" in text
    assert all(line.isprintable() for line in text.split("\n"))


def test_an_error_is_printable_wherever_it_is_shown() -> None:
    e = CkpttoolError(f"{BAD} is wrong.", listing=f"a\nb{BAD}".replace("\n", "", 0))
    e.add_note(BAD)
    assert str(e).split("\n")[0].isprintable() and all(x.isprintable() for x in str(e).split("\n"))
    assert all(x.isprintable() for x in e.__notes__) and e.args == (f"{BAD} is wrong.",)


_FOREIGN = """
import logging, warnings
from ckpttool.cli import main
BAD = "1\\nerror: FORGED\\x1b[31m\\nok: every byte proved\\u202e"
def log():
    logging.getLogger("transformers").warning("a factor of %s", BAD)
    logging.getLogger("transformers").warning("%d", BAD)
    try:
        raise ValueError(BAD)
    except ValueError:
        logging.getLogger("fsspec").exception("failed")
    warnings.warn(BAD)
main._run_command = log
main.main()
"""


def test_no_log_line_or_warning_of_another_package_forges_a_line() -> None:
    """transformers logs values of a config.json as they are."""
    done = subprocess.run([sys.executable, "-c", _FOREIGN], capture_output=True, text=True, check=True)
    said = [line for line in done.stderr.split("\n") if "FORGED" in line]
    assert len(said) == 4 and not any(line.startswith(("error", "ok")) for line in done.stderr.split("\n"))
    assert terminal.faults_of(done.stderr) == []
    assert said[0] == "a factor of 1\\nerror: FORGED\\x1b[31m\\nok: every byte proved\\u202e"


@pytest.mark.parametrize(
    ("shell", "words"),
    [
        *((shell, "show a.pt model.w") for shell in ("zsh", "bash", "fish", "powershell")),
        ("zsh", "digest a.pt --only optim,model.w"), ("zsh", "digest a.pt --only $(touch\\ RUN),model.w"),
    ],
)  # fmt: skip
def test_tab_offers_no_name_that_a_shell_changes_or_runs(tmp_path: Path, shell: str, words: str) -> None:
    """zsh evaluates the words that it is given, and bash inserts them as they are."""
    plain = ["w.0", "w@x", "w+y", "w%F", "w/z", "w-q", "w_"]
    made = ["\\$(touch RUN)", "$(touch RUN)", "`touch RUN`", ";touch RUN", "\ntouch", '"a', "'b'", "\\", " c"]
    made += ["{a,b}", "*", "~=", ":x", "é"]
    torch.save({"model": {n: torch.ones(2) for n in [*plain, *(f"w{x}" for x in made)]}}, tmp_path / "a.pt")
    line = f"ckpttool {words}"
    environment = os.environ | {
        "_CKPTTOOL_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": line, "COMP_WORDS": line, "COMP_CWORD": "3",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args", "_TYPER_COMPLETE_WORD_TO_COMPLETE": line.split()[-1],
    }  # fmt: skip
    done = subprocess.run(
        [_write_program(tmp_path)], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    before = "optim," if "optim" in words else ""
    offered = [] if "RUN" in words else [f"{before}model.{n}" for n in plain]
    assert re.findall(r"[^\s\"]*model\.[^\s\":]*", done.stdout) == offered
    assert not set(done.stdout) & set("$`;\\{~") and "RUN" not in done.stdout


def _write_program(folder: Path) -> Path:
    """A script called ckpttool, as pip installs it."""
    program = folder / "ckpttool"
    program.write_text(f"#!{sys.executable}\nfrom ckpttool.cli.main import main\nmain()\n")
    program.chmod(0o755)
    return program


def test_bash_inserts_what_it_can_run(tmp_path: Path) -> None:
    from typer._completion_shared import get_completion_script

    torch.save({"model": {n: torch.ones(2) for n in ("w.0", "w$(touch${IFS}RUN)", "w;>RUN")}}, tmp_path / "a.pt")
    _write_program(tmp_path)
    script = get_completion_script(prog_name="ckpttool", complete_var="_CKPTTOOL_COMPLETE", shell="bash")
    call = 'COMP_WORDS=(ckpttool show a.pt model.w) COMP_CWORD=3; _ckpttool_completion ./ckpttool; eval "echo ${COMPREPLY[*]}"'
    done = subprocess.run(["bash", "-c", f"{script}\n{call}"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "model.w.0\n" and not (tmp_path / "RUN").exists()


def test_no_cell_of_a_table_is_wrapped_in_a_file(tmp_path: Path) -> None:
    name = f"{'w' * 120} error: FORGED {'z' * 60}"
    (tmp_path / "store").mkdir()
    torch.save({"model": {name: torch.ones(2)}}, tmp_path / "a.pt")
    assert ckpttool_here("audit", "export", tmp_path / "a.pt", tmp_path / "store" / f"{name}.tar.zst").returncode == 0
    for words in (["inspect", tmp_path / "a.pt", "--fold"], ["audit", "list", tmp_path / "store"]):
        printed = ckpttool_here(*words).stdout
        assert name in printed and terminal.faults_of(printed) == []


def test_nor_has_what_python_shows_or_logs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    name, a, b = f"w{BAD}\nERROR:root:FORGED", tmp_path / "a.pt", tmp_path / "b.pt"
    weights = {name: torch.ones(2, dtype=torch.int64), "l.weight": torch.ones(2, 2)}
    slots = {0: {"step": torch.tensor(1.0), "exp_avg": torch.ones(2, 2), "exp_avg_sq": torch.ones(2, 2)}}
    groups = [{"lr": 0.1, "params": [0]}]
    torch.save({"model": weights, "optimizer": {"state": slots, "param_groups": groups}}, a)
    torch.save({"model": {name: torch.zeros(2, dtype=torch.int64)}}, b)
    with caplog.at_level(logging.DEBUG, "ckpttool"):
        ckpttool.convert(a, tmp_path / "out", to="zero3", world_size=2, drop=True)
    shown = [r.getMessage() for r in caplog.records]
    with pytest.raises(AssertionError) as differs:
        assert_same_training_state(a, b)
    shown += str(differs.value).split("\n")
    with ckpttool.open(a) as opened:
        handle = opened[f"model.{name}"]
        shown.append(repr(handle))
        for index in (5, (0, 0), "x"):
            with pytest.raises((IndexError, TypeError)) as wrong:
                handle[index]  # type: ignore[index]
            shown.append(str(wrong.value))
    assert sum("FORGED" in line for line in shown) > 5
    assert all(line.isprintable() for line in shown)


def test_what_a_notebook_draws_runs_nothing_and_is_as_it_is(chromium: Browser, tmp_path: Path) -> None:
    drawn = 0
    for number in range(8):
        terminal.made(random.Random(number), tmp_path / "x")
        a, b = tmp_path / "x" / "a.pt", tmp_path / "x" / "b.pt"
        for found in (
            ckpttool.inspect(a),
            ckpttool.diff(a, b),
            ckpttool.doctor(tmp_path / "x" / "damaged.pt"),
            ckpttool.digest(a),
            ckpttool.verify(a),
        ):
            html = found._repr_html_()
            drawn += "&lt;img" in html
            _looks(chromium, tmp_path, html)
            assert all(line.isprintable() for line in str(found).split("\n"))
    assert drawn >= 5


def test_a_model_card_runs_nothing(chromium: Browser, tmp_path: Path) -> None:
    """As Markdown that leaves HTML in, which the Hub does not do."""
    from markdown_it import MarkdownIt

    for piece in terminal.PIECES:
        evil = piece * 2
        config = {"architectures": [evil], "model_type": evil, "_name_or_path": evil}
        adapter = {"base_model_name_or_path": evil, "task_type": evil, "peft_type": evil}
        for kind in ({}, adapter):
            facts = model_card.CardFacts(
                "a/b", "0", evil, 2, evil, 3, {"torch.float32": 3}, {"all": "0", evil: "1"}, True, False, config, kind
            )
            text = model_card.update_card(None, facts).decode()
            assert all(line.isprintable() for line in text.split("\n")), piece
            assert "FORGED" not in [line.strip()[:6] for line in text.replace("# ", "").split("\n")]
            _looks(
                chromium,
                tmp_path,
                MarkdownIt("commonmark", {"html": True}).enable("table").render(text.partition("\n---\n")[2]),
            )


def _looks(chromium: Browser, folder: Path, html: str) -> None:
    """The HTML has no element that acts, and nothing in it runs."""
    path = folder / "page.html"
    path.write_text(f"<!doctype html><meta charset=utf-8><body>{html}", encoding="utf-8")
    chromium.open(path)
    assert chromium.ask("typeof window.hacked") == "undefined"
    assert chromium.ask("document.querySelectorAll('body script, body img, body iframe').length") == 0
    assert (
        chromium.ask(
            "[...document.querySelectorAll('body a')].filter(a => /^(javascript|file|data):/.test(a.href)).length"
        )
        == 0
    )
    assert all(c.isprintable() or c in "\n\t" for c in chromium.ask("document.body.innerText"))


def test_a_hole_would_be_seen(chromium: Browser, tmp_path: Path) -> None:
    for piece in (
        "<img src=x onerror=window.hacked=1>",
        "<script>window.hacked=1</script>",
        "<a href='javascript:1'>x</a>",
    ):
        with pytest.raises(AssertionError):
            _looks(chromium, tmp_path, piece)
