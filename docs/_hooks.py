"""What the site has from the code: the pages of docs/ with their marks replaced. docs/_build.py builds it from them.

<!-- options: audit export -->    a table of the command's options, from its typer declaration
<!-- exit-codes -->               ckpttool.errors.EXIT_CODES
<!-- causes -->                   every kind of cause that resume-verify reports
<!-- layouts -->                  every installed layout and what it holds
<!-- rows: resumed -->            a table of TABLES, whose rows stand with the layouts and trainers (`Program.rows`)
<!-- modules -->                  every module, with the first sentence of its docstring
<!-- codes -->                    every code of an error, from ckpttool/codes.toml
<!-- findings -->                 every kind of finding of `doctor`, and whether it takes --read-data
<!-- exports -->                  the names of `ckpttool` that the page does not describe above
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import typer.main

import ckpttool
from ckpttool.cli.main import app
from ckpttool.codes import load_codes
from ckpttool.engine.doctor.checks import list_kinds_from_data, load_checks
from ckpttool.engine.doctor.findings import KINDS, ordered_kinds
from ckpttool.errors import EXIT_CODES
from ckpttool.layouts import layouts, list_resuming_programs
from ckpttool.resume.diagnosis.kinds import list_kinds

#: What an option takes -> how the table shows it.
_VALUES = {"integer range": "N", "integer": "N", "float range": "X", "float": "X", "text": "TEXT"}

#: {table of which the rows stand in `Program.rows`: its head}. README.md has the first two, and a test compares them.
TABLES = {
    "readme-layouts": ("`--to`", "what it is", "reads, besides what ckpttool writes", "holds"),
    "readme-trainers": (
        "trainer (layout)", "read", "resumes (`--for`)", "optimizer", "scheduler", "RNG", "data loader",
    ),
    "layouts": ("", "reads", "writes"),
    "directories": ("directory", "layout", "what is read"),
    "for": ("`--for`", "what it writes", "how it is resumed"),
    "resumed": ("trainer", "read", "resumes", "optimizer", "scheduler", "RNG", "data loader"),
}  # fmt: skip


def commands(group: Any = None, above: tuple[str, ...] = ()) -> dict[str, Any]:
    """{name: command} of all commands; one of a group is called "audit export"."""
    out: dict[str, Any] = {}
    for name, found in (group or typer.main.get_command(app)).commands.items():
        path = (*above, name)
        out |= commands(found, path) if hasattr(found, "commands") else {" ".join(path): found}
    return out


def options_table(command: str) -> str:
    """The options of a command, one table for each panel of its --help."""
    panels: dict[str, list[str]] = {"": []}
    for p in commands()[command].params:
        if p.param_type_name != "option" or getattr(p, "hidden", False) or "--help" in p.opts:
            continue
        value = "" if p.is_flag else " " + (p.metavar or _VALUES.get(p.type.name, p.type.name.upper()))
        names = ", ".join(f"`{o}{value}`" for o in (*sorted(p.opts, key=len, reverse=True), *p.secondary_opts))
        usual = p.show_default if isinstance(p.show_default, str) else p.default
        default = "" if p.is_flag or usual is None or callable(usual) else f" Default: `{usual}`."
        text = (p.help or "").replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;")
        row = f"| {names} | {text}{default} |"
        panels.setdefault(getattr(p, "rich_help_panel", None) or "", []).append(row)
    tables = []
    for panel, rows in ((p, r) for p, r in panels.items() if r):
        head = [f"*{panel}*", ""] if panel and len(panels) > 1 else []
        tables.append("\n".join([*head, "| option | meaning |", "|---|---|", *rows]))
    return "\n\n".join(tables)


def exit_codes_table() -> str:
    """The table of exit codes."""
    return "\n".join(["| code | meaning |", "|---|---|", *(f"| {code} | {meaning} |" for code, meaning in EXIT_CODES)])


def codes_sections() -> str:
    """Every code of an error with its entry; the general one of each exit code, as a heading, begins the others."""
    out, meanings = [], {f"{min(code, 99):02d}": (code, text) for code, text in EXIT_CODES}
    for code, e in load_codes().items():
        exit_code, meaning = meanings[code[4:6]]
        if code.endswith("00"):
            out.append(f"## Exit code {exit_code}: {meaning}")
        out += [f"### {code}: {e['title']} {{#{code.lower()}}}", e["means"], f"*Why it stops us.* {e['why']}"]
        out += [f"*What to do.* {e['do']}", "```sh\n" + "\n".join(e["commands"]) + "\n```"]
        out += [f"```text\nerror: {e['message']}\n```"] if "message" in e else []
    return "\n\n".join(out)


def causes_table() -> str:
    """The table of the kinds of causes, with an anchor for each: faults.md#step-reset."""
    rows = (f'| <a id="{name}"></a>`{name}` | {sentence} |' for name, sentence in list_kinds().items())
    return "\n".join(["| `kind` | what it says |", "|---|---|", *rows])


def layouts_table() -> str:
    """The table of layouts."""
    rows = (
        f"| `{name}` | {layout.title} | {', '.join(sorted(layout.holds(None))) or 'everything'} |"
        for name, layout in layouts().items()
    )
    return "\n".join(["| name | what it is | holds |", "|---|---|---|", *rows])


def findings_table() -> str:
    """Every kind of finding of doctor, in the order in which it lists them, each with a link to what says more."""
    load_checks()
    from_data = list_kinds_from_data()
    rows = (
        f"| [`{kind}`](#{KINDS[kind].section}) | {KINDS[kind].meaning} | {'yes' if kind in from_data else ''} |"
        for kind in ordered_kinds()
    )
    return "\n".join(["| kind | what it is about | needs `--read-data` |", "|---|---|---|", *rows])


def rows_table(table: str) -> str:
    """A table of the rows that layouts and trainers have for it; those that `--for` writes come first."""
    resumed = {layout.name: name for name, (layout, program) in list_resuming_programs().items() if not program.refused}
    known = layouts()
    order = [*resumed, *(name for name in known if name not in resumed)] if "layouts" not in table else [*known]
    lines = []
    for layout in order:
        for cells in known[layout].program.rows.get(table, ()):
            if table == "for":
                cells = (f"`{resumed[layout]}`", *cells)
            elif table == "readme-trainers":
                cells = (*cells[:2], "yes" if layout in resumed else "no", *cells[2:])
            lines.append(f"| {' | '.join(cells)} |")
    head = TABLES[table]
    return "\n".join([f"| {' | '.join(head)} |".replace("|  |", "| |"), "|" + "---|" * len(head), *lines])


def modules_table() -> str:
    """Every module by folder, with the first sentence of its docstring."""
    root = Path(__file__).resolve().parents[1]
    folders: dict[str, list[str]] = {}
    for path in sorted([*(root / "ckpttool").rglob("*.py"), *(root / "converters").rglob("*.py")]):
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        sentence = re.split(r"(?<=\.)\s", " ".join(text.split("\n\n")[0].split()), maxsplit=1)[0]
        for mark in "|[":
            sentence = sentence.replace(mark, f"\\{mark}")
        if path.name != "__init__.py":
            folders.setdefault(str(path.parent.relative_to(root)), []).append(f"| `{path.name}` | {sentence} |")
    return "\n\n".join(
        f"## {folder}/\n\n| module | what it is |\n|---|---|\n" + "\n".join(rows) for folder, rows in folders.items()
    )


def exports(page: str) -> str:
    """Names of ckpttool.__all__ that the page does not describe yet, as mkdocstrings wants them."""
    skipped = {"__version__", "CkpttoolError", *re.findall(r"^::: ckpttool\.(\w+)$", page, re.MULTILINE)}
    return "\n".join(f"::: ckpttool.{name}" for name in ckpttool.__all__ if name not in skipped)


def expand_marks(markdown: str) -> str:
    """Return the text of a page with its marks replaced by what they stand for."""
    markdown = re.sub(r"^<!-- options: (.+?) -->$", lambda m: options_table(m[1]), markdown, flags=re.MULTILINE)
    markdown = re.sub(r"^<!-- rows: (.+?) -->$", lambda m: rows_table(m[1]), markdown, flags=re.MULTILINE)
    markdown = markdown.replace("<!-- exports -->", exports(markdown))
    made = {
        "<!-- causes -->": causes_table,
        "<!-- exit-codes -->": exit_codes_table,
        "<!-- layouts -->": layouts_table,
        "<!-- modules -->": modules_table,
        "<!-- findings -->": findings_table,
        "<!-- codes -->": codes_sections,
    }
    for mark, make in made.items():
        markdown = markdown.replace(mark, make()) if mark in markdown else markdown
    return markdown
