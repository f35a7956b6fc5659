"""Fences: who may import whom, what is exported, what start-up may not import, what the README must say."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import ckpttool
from ckpttool import errors

ROOT = Path(__file__).parents[1]
FOLDERS = {
    "ckpttool": ROOT / "ckpttool",
    "ckpttool.audit": ROOT / "ckpttool" / "audit",
    "ckpttool.hub": ROOT / "ckpttool" / "hub",
    "ckpttool.resume": ROOT / "ckpttool" / "resume",
    "ckpttool.converters": ROOT / "converters",
}
MODULES = {
    f"{package}.{path.stem}": path for package, folder in FOLDERS.items() for path in sorted(folder.glob("*.py"))
}

#: What a module may import of ours, when it runs and when it is asked: the rooms of docs/design.md. A module that is
#: not here may import none of ours; a new one needs a line here, and a reason.
ROOMS: dict[str, set[str]] = {
    "errors": set(),
    "_version": set(),
    "boxes": set(),
    "jsontext": {"errors"},
    "crc": set(),
    "index": {"errors", "boxes"},
    "child": {"errors"},
    "store": {"errors"},
    "pickles": {"errors"},
    "names": {"errors", "index"},
    "hubnames": {"errors", "child"},
    "stfile": {"errors", "index", "jsontext", "store"},
    "modelfiles": {"errors", "jsontext", "store"},
    "remote": {"errors", "store"},
    "beside": {"errors", "index", "modelfiles", "remote", "store"},
    "digests": {"index"},
    "torchzip": {"errors", "boxes", "crc", "index", "pickles"},
    "partial": {"errors"},
    "draft": {"errors", "index", "partial", "store"},
    "values": {"errors", "index", "jsontext", "pickles", "torchzip"},
    "adapters": {"errors", "index"},
    "torchdraft": {"crc", "draft", "index", "pickles", "torchzip"},
    "stream": {"errors", "boxes", "crc", "index", "store"},
    "objects": {"errors", "jsontext", "remote"},
    "sending": {"draft", "objects", "remote"},
    "fill": {"errors", "boxes", "crc", "index", "store", "stream", "partial", "draft", "sending"},
    "sharded": {"errors", "boxes", "index", "pickles", "torchzip"},
    "flatlayout": {"errors", "boxes", "child", "hubnames", "index", "jsontext", "store"},
    "training": {"errors", "draft", "fill", "index", "names", "store", "stream", "torchzip"},
    "layouts": {"errors", "index", "names", "remote", "store", "draft"},
    "mixups": {"crc", "errors", "index", "store", "stream", "torchzip"},
    "recorded": {"errors", "index", "jsontext", "store"},
    "conversion": {
        "_version",
        "adapters",
        "beside",
        "digests",
        "draft",
        "errors",
        "fill",
        "index",
        "layouts",
        "mixups",
        "modelfiles",
        "names",
        "objects",
        "partial",
        "recorded",
        "remote",
        "sending",
        "store",
        "stream",
    },
    "comparison": {"boxes", "conversion", "errors", "fill", "index", "stream"},
    "summary": {"beside", "conversion", "index", "names", "remote"},
    "audit.planes": set(),
    "audit.options": {"errors"},
    "audit.tarball": {"errors"},
    "audit.retention": {"errors", "jsontext"},
    "audit.signing": {"errors", "jsontext"},
    "audit.sealing": {"errors", "store"},
    "audit.seekable": {"audit.planes", "crc", "draft", "errors", "store"},
    "audit.plan": {"audit.seekable", "audit.tarball", "index", "names", "stfile"},
    "audit.manifest": {"audit.plan", "audit.planes", "digests", "errors", "index", "jsontext", "names"},
    "audit.provenance": {
        "_version",
        "audit.manifest",
        "audit.options",
        "audit.retention",
        "audit.tarball",
        "errors",
        "index",
        "jsontext",
        "modelfiles",
        "names",
        "store",
    },
    "audit.sidecar": {"errors", "fill", "jsontext", "objects", "remote", "store"},
    "audit.archive": {
        "audit.manifest",
        "audit.plan",
        "audit.provenance",
        "audit.retention",
        "audit.seekable",
        "audit.sidecar",
        "audit.signing",
        "audit.tarball",
        "errors",
        "index",
        "names",
        "store",
        "values",
    },
    "audit.spool": {"audit.archive", "audit.sealing", "draft", "errors", "store"},
    "audit.ledger": {"audit.retention", "errors", "jsontext", "objects", "remote"},
    "audit.shelf": {
        "audit.archive",
        "audit.ledger",
        "audit.retention",
        "audit.sidecar",
        "errors",
        "fill",
        "objects",
        "remote",
        "store",
    },
    "audit.verification": {
        "audit.archive",
        "audit.manifest",
        "audit.plan",
        "audit.planes",
        "audit.seekable",
        "audit.signing",
        "audit.tarball",
        "comparison",
        "errors",
        "fill",
        "layouts",
        "store",
    },
    "audit.export": {
        "audit.archive",
        "audit.ledger",
        "audit.options",
        "audit.sidecar",
        "audit.spool",
        "conversion",
        "errors",
        "fill",
        "layouts",
        "remote",
        "store",
    },
    "audit.checking": {
        "audit.archive",
        "audit.ledger",
        "audit.shelf",
        "audit.sidecar",
        "audit.spool",
        "audit.verification",
        "errors",
        "fill",
        "layouts",
        "remote",
        "store",
    },
    "audit.commands": {
        "audit.checking",
        "audit.export",
        "audit.ledger",
        "audit.options",
        "audit.retention",
        "audit.shelf",
        "errors",
        "summary",
        "terminal",
    },
    "resume.trace": {"errors", "jsontext"},
    "resume.settings": {"errors"},
    "resume.verdict": {"resume.trace"},
    "resume.batches": {"errors", "jsontext"},
    "resume.fingerprint": {"boxes", "stream"},
    "resume.recorder": {"_version", "names", "reader", "resume.batches", "resume.fingerprint", "resume.trace"},
    "resume.bounds": {"errors", "resume.trace"},
    "resume.words": set(),
    "resume.differences": {"resume.trace", "resume.words"},
    "resume.dynamics": {"resume.bounds", "resume.differences", "resume.trace", "resume.verdict", "resume.words"},
    "resume.judge": {
        "names",
        "resume.bounds",
        "resume.differences",
        "resume.dynamics",
        "resume.trace",
        "resume.verdict",
        "resume.words",
    },
    "resume.likeness": set(),
    "resume.inspection": {"boxes", "conversion", "errors", "index", "resume.likeness", "resume.words", "stream"},
    "resume.case": {"conversion", "resume.trace", "resume.verdict"},
    "resume.blame_state": {"resume.case", "resume.differences", "resume.inspection", "resume.trace", "resume.words"},
    "resume.blame_config": {"resume.case", "resume.differences", "resume.trace", "resume.words"},
    "resume.blame_numbers": {"resume.case", "resume.differences", "resume.trace", "resume.words"},
    "resume.blame": {
        "conversion",
        "resume.blame_config",
        "resume.blame_numbers",
        "resume.blame_state",
        "resume.case",
        "resume.differences",
        "resume.trace",
        "resume.verdict",
        "resume.words",
    },
    "resume.gates": {"resume.bounds", "resume.trace", "resume.verdict"},
    "resume.contents": {"resume.differences", "resume.trace", "resume.verdict", "resume.words"},
    "resume.page": {"resume.contents", "resume.verdict", "resume.words"},
    "resume.report": {"_version", "errors", "resume.contents", "resume.page", "resume.verdict", "resume.words"},
    "resume.job": {"errors", "index", "reader", "resume.recorder", "resume.settings"},
    "resume.worker": {
        "conversion",
        "errors",
        "fetch",
        "reader",
        "resume.batches",
        "resume.fingerprint",
        "resume.job",
        "resume.recorder",
        "resume.settings",
        "resume.trace",
    },
    "resume.launch": {
        "_version",
        "conversion",
        "errors",
        "names",
        "resume.blame",
        "resume.bounds",
        "resume.gates",
        "resume.judge",
        "resume.settings",
        "resume.trace",
        "resume.verdict",
        "resume.worker",
        "stream",
    },
    "fetch": {
        "boxes",
        "conversion",
        "errors",
        "fill",
        "index",
        "layouts",
        "mixups",
        "names",
        "pickles",
        "recorded",
        "store",
        "stream",
        "torchzip",
    },
    "reader": {"errors", "fetch", "fill", "index", "names", "pickles"},
    "hub.virtual": {"conversion", "draft", "errors", "index", "stream"},
    "hub.hashing": {"conversion", "errors", "fill", "hub.virtual", "stream"},
    "hub.journal": {"hub.hashing"},
    "hub.screening": {"errors", "jsontext", "modelfiles"},
    "hub.card": set(),
    "hub.client": {"errors", "remote"},
    "hub.push": {
        "_version",
        "conversion",
        "draft",
        "errors",
        "fill",
        "hub.card",
        "hub.client",
        "hub.hashing",
        "hub.journal",
        "hub.screening",
        "hub.virtual",
        "jsontext",
        "layouts",
        "names",
        "stream",
    },
    "hub.pull": {"conversion", "errors", "fill", "hub.client", "jsontext", "remote"},
    "hub.commands": {"hub.pull", "hub.push", "summary", "terminal"},
    "terminal": {"beside", "errors", "index"},
    "cli": {
        "audit.commands",
        "hub.commands",
        "errors",
        "conversion",
        "comparison",
        "summary",
        "layouts",
        "partial",
        "remote",
        "_version",
        "resume.launch",
        "resume.report",
        "terminal",
    },
    "__init__": {
        "_version",
        "comparison",
        "conversion",
        "errors",
        "flatlayout",
        "index",
        "partial",
        "reader",
        "summary",
    },
    "__main__": {"cli"},
}
#: What is not in the standard library and may be imported as a module is loaded; numpy, torch, ... only where used.
OUTSIDE: dict[str, set[str]] = {
    "crc": {"isal"},
    "digests": {"blake3"},
    "fill": {"blake3"},
    "conversion": {"blake3"},
    "audit.sidecar": {"blake3"},
    "audit.verification": {"blake3"},
    "audit.commands": {"typer"},
    "hub.hashing": {"blake3"},
    "hub.commands": {"typer"},
    "terminal": {"typer"},
    "cli": {"typer"},
}
#: What one family of layouts shares lies in modules with an underscore, which its own layouts may import and no others.
FAMILIES: dict[str, set[str]] = {
    "_deepspeed_write": {"_deepspeed"},
    "zero": {"_deepspeed", "_deepspeed_write"},
    "universal": {"_deepspeed", "_deepspeed_write"},
    "fsdp1": {"_fsdp1_write", "_ranks"},
    "hf": {"_training_state"},
}
HEAVY = {"torch", "transformers", "numpy", "ml_dtypes", "rich", "zstandard", "safetensors", "huggingface_hub"}


@cache
def tree_of(module: str) -> ast.Module:
    """One file, parsed once for all fences."""
    return ast.parse(MODULES[module].read_text())


@cache
def imports(module: str) -> list[tuple[str, bool]]:
    """(module imported, at the top level?) of one file; ours by their short names, "converters.x" for converters."""
    package = module.rpartition(".")[0]
    out: list[tuple[str, bool]] = []
    typing_only: set[int] = set()
    tree = tree_of(module)
    top = {id(n) for s in tree.body for n in ast.walk(s) if not isinstance(s, (ast.FunctionDef, ast.ClassDef))}
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            typing_only |= {id(n) for s in node.body for n in ast.walk(s)}
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        found: list[str] = []
        if isinstance(node, ast.Import):
            found = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join(
                    [*package.split(".")[: len(package.split(".")) - node.level + 1], *([base] if base else [])]
                )
            inner = {f"{base}.{a.name}" for a in node.names}
            found = [n if n in MODULES else base for n in inner] if inner & MODULES.keys() else [base]
        out.extend((n, id(node) in top) for n in set(found))
    return out


def short(module: str) -> str:
    return module.removeprefix("ckpttool.")


def ours(module: str) -> set[str]:
    return {short(n) if n != "ckpttool" else "__init__" for n, _ in imports(module) if n.split(".")[0] == "ckpttool"}


CORE = [m for m in MODULES if not m.startswith("ckpttool.converters.")]
CONVERTERS = [m for m in MODULES if m.startswith("ckpttool.converters.")]


@pytest.mark.parametrize("module", CORE)
def test_a_module_imports_only_what_its_room_allows(module: str) -> None:
    assert ours(module) <= ROOMS.get(short(module), set())


def test_the_table_of_rooms_names_no_module_that_is_gone() -> None:
    assert set(ROOMS) <= {short(m) for m in CORE}
    assert set().union(*ROOMS.values()) <= {short(m) for m in CORE}


def test_no_rooms_open_into_each_other_in_a_circle() -> None:
    TopologicalSorter({short(m): ours(m) - {short(m)} for m in CORE}).prepare()


@pytest.mark.parametrize("module", CONVERTERS)
def test_a_converter_imports_the_core_and_never_another_converter_but_what_its_family_shares(module: str) -> None:
    found = ours(module)
    family = FAMILIES.get(module.rpartition(".")[2], set())
    assert {n for n in found if n.startswith("converters")} <= {f"converters.{n}" for n in family}
    assert not found & {"cli", "conversion", "comparison", "summary", "__init__"}
    assert not any(n == "converters" for n, _ in imports(module)), "the installed name is ckpttool.converters"


def test_what_a_family_shares_has_an_underscore_and_no_layout_and_is_used_by_all_that_may() -> None:
    shared = {m.rpartition(".")[2] for m in CONVERTERS} - {"__init__"}
    assert {n for n in shared if n.startswith("_")} == set().union(*FAMILIES.values())
    for name, family in FAMILIES.items():
        assert {f"converters.{n}" for n in family} <= ours(f"ckpttool.converters.{name}")
    for name in set().union(*FAMILIES.values()):
        assert not hasattr(importlib.import_module(f"ckpttool.converters.{name}"), "LAYOUTS")


@pytest.mark.parametrize("module", [m for m in CONVERTERS if not m.rpartition(".")[2].startswith("_")])
def test_a_converter_exports_its_layouts_and_nothing_else(module: str) -> None:
    from ckpttool.layouts import Layout

    loaded = importlib.import_module(module)
    assert loaded.__all__ == ["LAYOUTS"]
    assert loaded.LAYOUTS and all(isinstance(x, Layout) for x in loaded.LAYOUTS)


def test_no_two_layouts_have_one_name() -> None:
    from ckpttool.layouts import BUILT_IN

    names = [x.name for module in BUILT_IN for x in importlib.import_module(module).LAYOUTS]
    assert len(set(names)) == len(names) > 5


@pytest.mark.parametrize("module", MODULES)
def test_nobody_imports_the_command_line(module: str) -> None:
    assert "cli" not in ours(module) or module == "ckpttool.__main__"


@pytest.mark.parametrize("module", MODULES)
def test_nothing_heavy_is_imported_as_a_module_is_loaded(module: str) -> None:
    at_top = {n.split(".")[0] for n, top in imports(module) if top}
    assert not at_top & HEAVY
    foreign = at_top - set(sys.stdlib_module_names) - {"ckpttool", "__future__"}
    assert foreign <= OUTSIDE.get(short(module), set())


@pytest.mark.parametrize(
    "module", ["errors", "boxes", "index", "names", "pickles", "store", "child", "layouts", "torchzip"]
)
def test_what_reads_an_index_needs_the_standard_library_only(module: str) -> None:
    anywhere = {n.split(".")[0] for n, _ in imports(f"ckpttool.{module}")} - {"ckpttool"}
    assert anywhere - set(sys.stdlib_module_names) <= ({"numpy"} if module == "torchzip" else set())


@pytest.mark.parametrize("module", MODULES)
def test_every_module_says_what_it_is(module: str) -> None:
    tree = tree_of(module)
    assert not tree.body or ast.get_docstring(tree)


@pytest.mark.parametrize("module", MODULES)
def test_every_public_function_and_class_says_what_it_is(module: str) -> None:
    tree = tree_of(module)
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            assert ast.get_docstring(node), node.name


@pytest.mark.parametrize("module", MODULES)
def test_what_a_module_exports_is_there(module: str) -> None:
    tree = tree_of(module)
    names = next((ast.literal_eval(n.value) for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__"), [])  # fmt: skip
    if short(module) != "__main__":
        loaded = importlib.import_module(module.removesuffix(".__init__"))
        assert [n for n in names if not hasattr(loaded, n)] == []
        assert len(set(names)) == len(names)


def test_the_public_door_is_sorted_and_every_name_opens() -> None:
    assert ckpttool.__all__ == sorted(ckpttool.__all__)
    for name in ckpttool.__all__:
        assert getattr(ckpttool, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = ckpttool.nonsense
    assert set(ckpttool.__all__) <= set(ckpttool._WHERE) | {"__version__"}


# -------------------------------------------------------------------------------------------------------- start-up


def run(*args: str) -> tuple[int, set[str], str]:
    """(exit code, top-level modules imported, stderr) of one command."""
    code = (
        "import sys, atexit, json\n"
        "atexit.register(lambda: sys.stderr.write('\\nMODULES ' + json.dumps(sorted({m.split('.')[0] for m in sys.modules}))))\n"
        "from ckpttool.cli import main\n"
        f"sys.argv = ['ckpttool', *{list(args)!r}]\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    text, _, modules = done.stderr.rpartition("\nMODULES ")
    return done.returncode, set(json.loads(modules)), text


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch

    path = tmp_path_factory.mktemp("small") / "x.pt"
    torch.save({"model": {"w": torch.arange(12.0).reshape(3, 4)}, "step": 3}, path)
    return path


@pytest.mark.parametrize(
    "args",
    [["--help"], ["--version"], ["convert", "--help"], ["layouts"], ["inspect", "X"], ["inspect", "X", "--json"], ["inspect", "X", "--tree"],
     ["diff", "X", "X"], ["digest", "X"], ["verify", "X", "--read-data"], ["convert", "X", "OUT", "--to", "dcp", "--world-size", "2"],
     ["convert", "X", "OUT", "--to", "hf"], ["convert", "X", "OUT", "--to", "full"], ["convert", "X", "OUT", "--to", "dcp", "-n", "2", "--dry-run"]],
    ids=" ".join,
)  # fmt: skip
def test_no_command_without_a_cast_imports_torch_or_transformers(args: list[str], small: Path, tmp_path: Path) -> None:
    status, modules, said = run(*[{"X": str(small), "OUT": str(tmp_path / "out")}.get(a, a) for a in args])
    assert status == 0, said
    assert not modules & {"torch", "transformers", "safetensors", "pydantic"}
    if args[0] in ("--help", "--version", "layouts"):
        assert "numpy" not in modules


def test_importing_the_package_imports_nothing_of_others() -> None:
    code = "import sys, json, ckpttool; print(json.dumps(sorted({m.split('.')[0] for m in sys.modules})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(json.loads(done.stdout)) & {*HEAVY, "typer", "blake3", "isal"}


# ---------------------------------------------------------------------------------------------------- what is said


def commands() -> dict[str, str]:
    """{command: its help text}."""
    from ckpttool.cli import app

    out = {}
    for c in app.registered_commands:
        assert c.callback is not None
        out[c.name or c.callback.__name__] = (c.help or c.callback.__doc__ or "").strip()
    return out


@pytest.mark.parametrize("command", commands())
def test_every_command_has_a_help_text_and_stands_in_the_readme(command: str) -> None:
    assert commands()[command].endswith(".")
    assert f"ckpttool {command}" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("command", commands())
def test_every_option_of_a_command_has_a_help_text(command: str) -> None:
    import typer

    from ckpttool.cli import app

    group = typer.main.get_command(app)
    for parameter in group.commands[command].params:  # type: ignore[attr-defined]
        assert getattr(parameter, "help", None) or parameter.name == "help", f"{command} {parameter.name}"


def test_the_commands_are_those_that_are_promised() -> None:
    assert set(commands()) >= {"convert", "diff", "digest", "inspect", "layouts", "verify"}


def classes() -> list[type[errors.CkpttoolError]]:
    return [getattr(errors, n) for n in errors.__all__ if n != "EXIT_CODES"]


def test_the_table_of_exit_codes_is_that_of_the_classes() -> None:
    codes = [code for code, _ in errors.EXIT_CODES]
    assert codes == sorted(codes) and len(set(codes)) == len(codes)
    assert {c.exit_code for c in classes()} | {0} == set(codes)
    assert all(issubclass(c, errors.CkpttoolError) for c in classes())


def test_the_docstring_of_errors_draws_every_class_with_its_code() -> None:
    drawn = dict(re.findall(r"(\w+)\s+(\d+)\s{2,}\S", errors.__doc__ or ""))
    assert {k: int(v) for k, v in drawn.items()} == {c.__name__: c.exit_code for c in classes()}


def test_the_readme_has_the_same_table_of_exit_codes() -> None:
    text = (ROOT / "README.md").read_text()
    rows = {
        int(code): meaning.strip() for code, meaning in re.findall(r"^\|\s*`?(\d+)`?\s*\|\s*([^|]+?)\s*\|", text, re.M)
    }
    assert {c: rows.get(c) for c, _ in errors.EXIT_CODES} == dict(errors.EXIT_CODES)


def test_every_layout_stands_in_the_readme() -> None:
    from ckpttool.layouts import layouts

    words = set(re.findall(r"\w+", (ROOT / "README.md").read_text()))
    assert set(layouts()) <= words


#: Who parses JSON besides jsontext, which bounds what it takes: of text that we ourselves wrote a moment ago, or of children
#: of ours that answer.
OWN_JSON = {
    "hubnames", "flatlayout", "audit.ledger", "converters.dcp", "partial", "hub.journal", "hub.screening", "resume.trace",
    "resume.launch", "resume.settings", "resume.recorder",
}  # fmt: skip


def test_json_of_others_is_parsed_in_one_place() -> None:
    calls = {m for m, path in MODULES.items() if re.search(r"\bjson\.loads?\(", path.read_text(encoding="utf-8"))}
    short = {m.removeprefix("ckpttool.") for m in calls}
    assert short == {"jsontext", *OWN_JSON}
