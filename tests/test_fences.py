"""Fences: what is exported, what start-up may not import. Who may import whom stands in
pyproject.toml, for import-linter."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

import ckpttool
from ckpttool import errors

ROOT = Path(__file__).parents[1]
MODULES = {
    ".".join(("ckpttool", *path.relative_to(folder).with_suffix("").parts)): path
    for folder in (ROOT / "ckpttool", ROOT)
    for path in sorted((folder if folder.name == "ckpttool" else folder / "converters").rglob("*.py"))
}

#: What is not in the standard library and may be imported as a module is loaded; numpy, torch, ... only where used.
OUTSIDE: dict[str, set[str]] = {
    "storage.aiohttp_limits": {"aiohttp"},
    "audit.sidecar": {"blake3"},
    "audit.archive_hashing": {"blake3"},
    "watching.health": {"blake3"},
    "watching.journal": {"blake3"},
    "watching.saves": {"blake3"},
    "pytest_plugin": {"pytest"},
    "cli.acid": {"typer"},
    "cli.adapter.arguments": {"typer"},
    "cli.adapter.extract": {"typer"},
    "cli.adapter.merge": {"typer"},
    "cli.audit.audit_arguments": {"typer"},
    "cli.audit.export_command": {"typer"},
    "cli.audit.ledger_commands": {"typer"},
    "cli.audit.restore_command": {"typer"},
    "cli.audit.store_commands": {"typer"},
    "cli.audit.verify_command": {"typer"},
    "cli.apply": {"typer"},
    "cli.average": {"typer"},
    "cli.clean": {"typer"},
    "cli.compare": {"typer"},
    "cli.delta": {"typer"},
    "cli.completion": {"typer"},
    "cli.convert": {"typer"},
    "cli.diff": {"typer"},
    "cli.digest": {"typer"},
    "cli.doctor": {"typer"},
    "cli.explain": {"typer"},
    "cli.help": {"typer"},
    "cli.inspect": {"typer"},
    "cli.layout_options": {"typer"},
    "cli.ls": {"typer"},
    "cli.main": {"typer"},
    "cli.man": {"typer"},
    "cli.maps": {"typer"},
    "cli.prune": {"typer"},
    "cli.pull": {"typer"},
    "cli.push": {"typer"},
    "cli.shared_options": {"typer"},
    "cli.resume_verify": {"typer"},
    "cli.terminal": {"typer"},
    "cli.show": {"typer"},
    "cli.stats": {"typer"},
    "cli.verify": {"typer"},
    "cli.watch": {"typer"},
    "engine.workers.part_requests": {"blake3"},
    "engine.plan_files": {"blake3"},
    "engine.difference": {"blake3"},
    "engine.own_deltas": {"blake3"},
    "engine.copy.fill": {"blake3"},
    "engine.copy.tensor_digests": {"blake3"},
    "engine.copy.value_digests": {"blake3"},
    "formats.crc": {"isal"},
    "hub.hashing": {"blake3"},
    "index.digests": {"blake3"},
}
#: Modules that only functions import, so that they may import large packages as they are loaded.
LAZY: dict[str, set[str]] = {
    m: {"torch"} for m in ("live.torch_reader", "live.reader", "live.scatter", "live.live_job")
} | {"guard.trainer_guard": {"transformers"}, "guard.lightning_guard": {"lightning", "pytorch_lightning"}}
HEAVY = {"torch", "transformers", "numpy", "ml_dtypes", "rich", "zstandard", "safetensors", "huggingface_hub"}


@cache
def tree_of(module: str) -> ast.Module:
    """One file, parsed once for all fences."""
    return ast.parse(MODULES[module].read_text())


def short(module: str) -> str:
    return module.removeprefix("ckpttool.")


def imports(module: str, nodes: Iterable[ast.AST]) -> set[str]:
    """The packages of others that these statements import, but the standard library's."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {a.name.partition(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add((node.module or "").partition(".")[0])
    return names - set(sys.stdlib_module_names) - {"ckpttool"}


def as_it_is_loaded(tree: ast.Module) -> Iterator[ast.AST]:
    """What runs when a module is imported: neither the bodies of functions nor what only a type checker reads."""
    todo: list[ast.AST] = [tree]
    while todo:
        for node in ast.iter_child_nodes(todo.pop()):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                continue
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                continue
            todo.append(node)
            yield node


def test_nothing_heavy_is_imported_as_a_module_is_loaded() -> None:
    found = {short(m): imports(m, as_it_is_loaded(tree_of(m))) for m in MODULES}
    assert {m: names for m, names in found.items() if names} == OUTSIDE | LAZY
    assert not HEAVY & set().union(*OUTSIDE.values())


def test_lazy_modules_are_imported_by_functions_only() -> None:
    names = {m.rpartition(".")[2] for m in LAZY}
    eager = {
        (short(m), node.module)
        for m in MODULES
        if short(m) not in LAZY
        for node in as_it_is_loaded(tree_of(m))
        if isinstance(node, ast.ImportFrom) and names & {*(node.module or "").split("."), *(a.name for a in node.names)}
    }
    assert eager == set()


def test_what_reads_an_index_needs_the_standard_library_only() -> None:
    plain = [
        m for m in MODULES
        if short(m).startswith(("index.", "errors", "layouts", "storage.source", "formats.pickles", "formats.sandbox"))
    ]  # fmt: skip
    found = {short(m): imports(m, ast.walk(tree_of(m))) for m in plain}
    assert {m: names for m, names in found.items() if names} == {"index.digests": {"blake3"}}


def test_every_module_says_what_it_is() -> None:
    assert [m for m in MODULES if tree_of(m).body and not ast.get_docstring(tree_of(m))] == []


def test_every_public_function_and_class_says_what_it_is() -> None:
    assert [
        f"{m}.{node.name}"
        for m in MODULES
        for node in tree_of(m).body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    ] == []


def test_what_a_module_exports_is_there() -> None:
    wrong = []
    for module in MODULES:
        listed = [
            n.value
            for n in tree_of(module).body
            if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__"
        ]
        if listed:
            loaded = importlib.import_module(module.removesuffix(".__init__"))
            names = ast.literal_eval(listed[0])
            wrong += [f"{module}.{n}" for n in names if not hasattr(loaded, n) or names.count(n) > 1]
    assert wrong == []


def test_a_converter_exports_its_layouts_and_nothing_else() -> None:
    from ckpttool.layouts import BUILT_IN, Layout

    for module in BUILT_IN:
        loaded = importlib.import_module(module)
        assert loaded.__all__ == ["LAYOUTS"], module
        assert loaded.LAYOUTS and all(isinstance(x, Layout) for x in loaded.LAYOUTS), module
    exporting = {
        short(m).partition(".")[2].removesuffix(".__init__")
        for m in MODULES
        if short(m).startswith("converters.") and "LAYOUTS = " in MODULES[m].read_text(encoding="utf-8")
    }
    assert exporting == {m.removeprefix("ckpttool.converters.") for m in BUILT_IN}


def test_no_two_public_classes_have_one_name() -> None:
    defined: dict[str, list[str]] = {}
    for module in MODULES:
        for node in tree_of(module).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                defined.setdefault(node.name, []).append(short(module))
    assert {name: where for name, where in defined.items() if len(where) > 1} == {}
    assert len(defined) > 200


def test_no_two_layouts_have_one_name() -> None:
    from ckpttool.layouts import BUILT_IN

    names = [x.name for module in BUILT_IN for x in importlib.import_module(module).LAYOUTS]
    assert len(set(names)) == len(names) > 5


#: Words that are the name of a layout or a trainer and mean something else in a module.
OTHER_MEANINGS = {
    "audit.archive_verification": {"full"},  # how deep an archive is verified
    "audit.verify_in_store": {"full"},
    "cli.audit.verify_command": {"full"},
    "cli.audit.__init__": {"audit"},  # the group of commands
    "cli.main": {"audit"},
    "extras": {"audit"},  # what pip installs
    "engine.memory": {"zero1", "zero2", "zero3"},  # how a job divides its state
    "engine.salvage": {"hf"},  # the program of huggingface_hub
    "formats.deltas": {"SkyRL"},  # whose deltas are no checkpoints
    "huggingface.hub_names": {"olmo"},  # a `model_type`
    "huggingface.model_files": {"hf"},  # a folder
    "resume.report.html_page": {"full"},  # a key of JSON
    "storage.listings": {"hf"},  # the scheme of a URL
    "storage.remote": {"hf"},
}
MOST_NAMES_IN_THE_CORE = 10


def names_of_layouts_and_trainers() -> set[str]:
    """What layouts, trainers and the programs of `--for` are called; torch is also a package."""
    from ckpttool.layouts import BUILT_IN, list_resuming_programs

    known = [x for module in BUILT_IN for x in importlib.import_module(module).LAYOUTS]
    titles = {x.title.removeprefix("directory of ") for x in known if x.of_trainer}
    trees = {x.program.tree.name for x in known if x.program.tree is not None}
    return {*(x.name for x in known), *titles, *trees, *list_resuming_programs()} - {"torch", "deepspeed"}


def is_about_a_layout(node: ast.AST, parents: Mapping[ast.AST, ast.AST]) -> bool:
    """Whether a constant is compared with the name of a layout or given as one; "trainer" is also a component."""
    above = parents[node]
    if isinstance(above, (ast.Tuple, ast.Set, ast.List)):
        above = parents[above]
    if isinstance(above, ast.Compare):
        return any(isinstance(x, ast.Attribute) and x.attr in ("layout", "name", "trainer") for x in ast.walk(above))
    if isinstance(above, ast.keyword):
        return above.arg in ("to", "source_layout", "layout")
    return isinstance(above, ast.Call) and ast.unparse(above.func).endswith(("find", "program_of"))


def test_the_core_names_few_layouts_and_trainers() -> None:
    """What is known of one stands with it (Layout, Dialect, Program), so that adding one touches one file."""
    names, found = names_of_layouts_and_trainers(), []
    assert {"dcp", "zero3", "Lightning", "torchtitan", "NeMo AutoModel"} <= names
    for module in (m for m in MODULES if not m.startswith("ckpttool.converters")):
        tree = tree_of(module)
        parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        for node in ast.walk(tree):
            if not isinstance(node, ast.Constant) or node.value not in names or isinstance(parents[node], ast.Expr):
                continue
            if node.value in OTHER_MEANINGS.get(short(module), ()):
                continue
            if node.value != "trainer" or is_about_a_layout(node, parents):
                found.append(f"{MODULES[module].relative_to(ROOT)}:{node.lineno}: {node.value!r}")
    assert len(found) <= MOST_NAMES_IN_THE_CORE, "\n" + "\n".join(found)


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
        "from ckpttool.cli.main import main\n"
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
    assert not modules & {"torch", "transformers", "pydantic"}
    if args[0] in ("--help", "--version", "layouts"):
        assert "numpy" not in modules


def test_importing_the_package_imports_nothing_of_others() -> None:
    code = "import sys, json, ckpttool; print(json.dumps(sorted({m.split('.')[0] for m in sys.modules})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(json.loads(done.stdout)) & {*HEAVY, "typer", "blake3", "isal"}


# ---------------------------------------------------------------------------------------------------- what is said


def commands() -> dict[str, str]:
    """{command: its help text}."""
    from ckpttool.cli.main import app

    out = {}
    for c in app.registered_commands:
        assert c.callback is not None
        out[c.name or c.callback.__name__] = (c.help or c.callback.__doc__ or "").strip()
    return out


@pytest.mark.parametrize("command", commands())
def test_every_command_has_a_help_text(command: str) -> None:
    assert commands()[command].endswith(".")


@pytest.mark.parametrize("command", commands())
def test_every_option_of_a_command_has_a_help_text(command: str) -> None:
    import typer

    from ckpttool.cli.main import app

    group = typer.main.get_command(app)
    for parameter in group.commands[command].params:  # type: ignore[attr-defined]
        assert getattr(parameter, "help", None) or parameter.name == "help", f"{command} {parameter.name}"


def test_the_commands_are_those_that_are_promised() -> None:
    assert set(commands()) >= {"convert", "diff", "digest", "inspect", "layouts", "verify"}


def classes() -> list[type[errors.CkpttoolError]]:
    return [x for n in errors.__all__ if isinstance(x := getattr(errors, n), type)]


def test_the_table_of_exit_codes_is_that_of_the_classes() -> None:
    codes = [code for code, _ in errors.EXIT_CODES]
    assert codes == sorted(codes) and len(set(codes)) == len(codes)
    assert {c.exit_code for c in classes()} | {0} == set(codes)
    assert all(issubclass(c, errors.CkpttoolError) for c in classes())


def test_the_docstring_of_errors_draws_every_class_with_its_code() -> None:
    drawn = dict(re.findall(r"(\w+)\s+(\d+)\s{2,}\S", errors.__doc__ or ""))
    assert {k: int(v) for k, v in drawn.items()} == {c.__name__: c.exit_code for c in classes()}


#: Who parses JSON besides bounded_json, which bounds what it takes: of text that we ourselves wrote a moment ago, or of children
#: of ours that answer.
OWN_JSON = {
    "acid.child", "audit.ledger", "audit.parallel_reading", "converters.dcp.dcp_metadata", "hub.journal", "hub.screening", "huggingface.hub_names", "huggingface.model_names",
    "engine.workers.part_requests", "engine.workers.part_worker", "formats.values", "resume.ranks.interpreter", "resume.ranks.launch", "resume.request", "resume.trace.live_facts", "resume.trace.model",
    "resume.job.watchdog",
    "storage.partial", "storage.shared_tree", "guard.background", "watching.journal", "watching.proofs",
}  # fmt: skip


def test_json_of_others_is_parsed_in_one_place() -> None:
    calls = {m for m, path in MODULES.items() if re.search(r"\bjson\.loads?\(", path.read_text(encoding="utf-8"))}
    short = {m.removeprefix("ckpttool.") for m in calls}
    assert short == {"bounded_json", *OWN_JSON}


def test_the_tests_that_are_sampled_and_those_that_are_left_out_are_there() -> None:
    import sampling

    for name in (*sampling.SAMPLED, *sampling.JOBS, *sampling.ALIKE, *sampling.ALIKE.values()):
        file, _, test = name.partition("::")
        assert f"def {test}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), name
