"""`ckpttool acid`: the kit is what it says, and a program that lies is found."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import lzma
import re
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import ckpttool_here
from safetensors.numpy import save_file

import ckpttool
from ckpttool.acid.child import describe_value
from ckpttool.acid.kit import choose_cases, open_kit, read_expected_state
from ckpttool.acid.run import acid
from ckpttool.errors import Corrupt, NotRecognised, Unsafe, Unsupported, UsageError
from fixtures import acid_kit

REPOSITORY = Path(__file__).resolve().parents[1]


# ------------------------------------------------------------------------------------------------------------- the kit


def test_the_kit_is_what_its_script_makes() -> None:
    assert lzma.decompress(acid_kit.KIT.read_bytes()) == acid_kit.make_tar()
    assert acid_kit.KIT.stat().st_size < 1_250_000


def program_at(path: Path) -> Any:
    """The module of a program, in this process."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_is_expected_is_what_torch_reads() -> None:
    torch_program = program_at(REPOSITORY / "bench" / "acid" / "of_torch_dcp.py")
    with open_kit(None) as cases:
        read = 0
        for case in (c for c in choose_cases(cases, ("dcp_awkward", "dcp_zstd", "full_*")) if c.expect == "state"):
            expected = read_expected_state(case)
            assert expected is not None
            found = torch_program.load(str(case.folder / case.path), case.about)
            assert {k: describe_value(found[k]) for k in expected.tensors} == expected.tensors, case.name
            assert {k: found[k] for k in expected.values} == expected.values, case.name
            read += 1
        assert read == 6


#: What ckpttool itself accepts: a call of exec in Lightning's meta.pt, whose result is dropped, is data, and is not executed.
NOT_REFUSED = {"lightning_malicious"}


def test_ckpttool_reads_the_golden_cases_and_refuses_the_broken_ones() -> None:
    some = (
        "zero3_groups",
        "tc_strided",
        "fsdp1_flat",
        "hf_*",
        "universal",
        "lightning",
        "*_malicious",
        "*_stale",
        "zero3_*",
        "dcp_*",
    )
    accepted = set()
    with open_kit(None) as cases:
        for case in choose_cases(cases, some):
            how = {k: str(case.folder / v) for k, v in case.about.items() if k == "flat_layout"}
            path = case.folder / case.path
            if not case.golden and case.fault != "tied and diverged":
                with contextlib.suppress(Corrupt, Unsafe, Unsupported, NotRecognised):
                    ckpttool.verify(path, read_data=True, **how)
                    accepted.add(case.name)
                continue
            expected = read_expected_state(case)
            assert expected is not None
            with ckpttool.open(path, **how) as opened:
                found = {k: describe_value(opened[k].numpy()) for k in opened}
                values = {k: v.data for k, v in opened.checkpoint.values.items()}
            tied = {k for names in case.tied for k in names if k not in found}
            assert {k: found.get(k) for k in expected.tensors.keys() - tied} == {
                k: expected.tensors[k] for k in expected.tensors.keys() - tied
            }, case.name
            assert {k: values[k] for k in expected.values} == expected.values, case.name
    assert accepted == NOT_REFUSED


def test_a_kit_that_is_none_or_is_damaged_is_refused(tmp_path: Path) -> None:
    def run(kit: Path) -> None:
        with open_kit(str(kit)):
            pass

    cut = tmp_path / "cut.tar.xz"
    cut.write_bytes(acid_kit.KIT.read_bytes()[:600_000])
    later = tmp_path / "later"
    later.mkdir()
    (later / "kit.json").write_text(json.dumps({"version": 2, "cases": []}))
    for kit, kind in [
        (cut, Corrupt),
        (tmp_path / "none", NotRecognised),
        (tmp_path, NotRecognised),
        (later, Unsupported),
    ]:
        with pytest.raises(kind):
            run(kit)
    with open_kit(None) as cases, pytest.raises(UsageError, match=r"cases='xyzzy' matches no case; .*dcp_awkward"):
        choose_cases(cases, ("full_*", "xyzzy"))


@pytest.mark.parametrize(
    "names", [["/{out}"], ["//{out}"], ["../out"], ["a\0b"], ["a", "a/b"], ["a/b", "a"], ["a", "a/b/c"]]
)
def test_a_kit_whose_members_are_no_files_below_its_folder_is_refused(names: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    with tarfile.open(tmp_path / "kit.tar.xz", "w:xz", format=tarfile.PAX_FORMAT) as packed:
        for name in names:
            member = tarfile.TarInfo("x")
            member.pax_headers = {"path": name.format(out=str(out)[1:])}
            packed.addfile(member)
    with pytest.raises(NotRecognised, match="not a kit"), open_kit(str(tmp_path / "kit.tar.xz")):
        pass
    assert not out.exists()


# ---------------------------------------------------------------------------------------------------------- programs

TRUE = {"model.a": [[1.5, -2.0], [0.0, 4.0]], "model.b": [1.0], "optim.state.a.exp_avg": [[0.5, 0.5], [0.5, 0.25]]}
HONEST = """
import json, os, sys, time
import numpy as np
def load(path, about):
    if "expected" in str(os.listdir(os.path.dirname(path))):
        raise AssertionError("a program could read the answer")
    with open(path) as f:
        said = json.load(f)
    if said.get("sum") != 11.75:
        raise ValueError("the numbers are damaged")
    return {k: np.array(v, "f4") for k, v in said["tensors"].items()} | {"optim.param_groups.0.lr": 0.1}
def list(path, about):
    with open(path) as f:
        return json.load(f)["tensors"]
def verify(path, about):
    load(path, about)
SAVES = ["made_up"]
load_honestly = load
def save(state, path, layout):
    tensors = {k: t.tolist() for k, t in state.items()}
    with open(path, "w") as f:
        json.dump({"tensors": tensors, "sum": 11.75}, f)
"""
#: {what a program does: (what is changed in the honest one, {case: {column: verdict}} where they are others)}.
LIARS: dict[str, tuple[str, dict[str, dict[str, str]]]] = {
    "is honest": ("", {}),
    "has a dataclass and says one part": (
        "from __future__ import annotations\nfrom dataclasses import dataclass\nCLAIMS = {'made_up': ('weights')}\n"
        "@dataclass\nclass Options:\n strict: bool = True\n",
        {"whole": {"optimizer": "", "values": ""}},
    ),
    "prints garbage": ("def load(path, about, load=load):\n print('{]' * 9000, flush=True); return load(path, about)", {}),
    "drops a tensor": (
        "def load(path, about, load=load):\n d = load(path, about); d.pop('model.b'); return d",
        {"whole": {"weights": "lost", "save": "lost"}},
    ),
    "has names of its own": (
        "def load(path, about, load=load):\n return {k.replace('model.', ''): v for k, v in load(path, about).items()}",
        {"whole": {"weights": "lost", "save": "lost"}},
    ),
    "names what it drops": (
        "def load(path, about, load=load):\n d = load(path, about); d.pop('model.b'); return d, ['model.b']",
        {"whole": {"weights": "named", "save": "named"}},
    ),
    "gives None for a tensor": (
        "def load(path, about, load=load):\n return load(path, about) | {'model.b': None}",
        {"whole": {"weights": "wrong", "save": "wrong"}},
    ),
    "flips a bit": (
        "def load(path, about, load=load):\n d = load(path, about); d['model.a'].view('u4')[0, 0] ^= 1; return d",
        {"whole": {"weights": "wrong", "save": "wrong"}},
    ),
    "changes a dtype": (
        "def load(path, about, load=load):\n d = load(path, about); d['model.b'] = d['model.b'].astype('f8'); return d",
        {"whole": {"weights": "wrong", "save": "wrong"}},
    ),
    "invents a tensor": (
        "def load(path, about, load=load):\n d = load(path, about); d['optim.state.b.exp_avg'] = d['model.b']; return d",
        {"whole": {"optimizer": "wrong", "save": "wrong"}},
    ),
    "has another learning rate": (
        "def load(path, about, load=load):\n return load(path, about) | {'optim.param_groups.0.lr': 0.2}",
        {"whole": {"values": "wrong"}},
    ),
    "accepts everything": (
        "def load(path, about):\n s = json.load(open(path))\n return {k: np.array(v, 'f4') for k, v in s['tensors'].items()} | {'optim.param_groups.0.lr': 0.1}\ndef verify(path, about): pass",
        {"broken": {"load": "accepted", "verify": "accepted"}, "evil": {"load": "accepted", "verify": "accepted"}},
    ),
    "executes code": (
        "def load(path, about, load=load):\n exec(json.load(open(path)).get('code', '')); return load(path, about)",
        {"evil": {"load": "ran code", "verify": "ran code"}},
    ),
    "refuses everything": (
        "def load(path, about):\n raise ValueError('no')",
        {
            "whole": {"weights": "refused", "optimizer": "refused", "values": "refused", "verify": "refused", "save": "refused"},
            "broken": {"load": "unproven", "verify": "unproven"}, "evil": {"load": "unproven", "verify": "unproven"},
        },
    ),
    "crashes": (
        "def load(path, about):\n os.abort()",
        {
            "whole": {"weights": "crashed", "optimizer": "crashed", "values": "crashed", "verify": "crashed", "save": "crashed"},
            "broken": {"load": "crashed", "verify": "crashed"}, "evil": {"load": "crashed", "verify": "crashed"},
        },
    ),
    "hangs on a broken one": (
        "def load(path, about, load=load):\n try: return load(path, about)\n except ValueError: time.sleep(99)\ndef verify(path, about): raise ValueError('no')",
        {
            "whole": {"verify": "refused"},
            "broken": {"load": "hung", "verify": "unproven"}, "evil": {"load": "hung", "verify": "unproven"},
        },
    ),
    "crashes on a whole one": (
        "def load(path, about, load=load):\n load(path, about); os.abort()\ndef verify(path, about, load=load_honestly): load(path, about)",
        {"whole": dict.fromkeys(("weights", "optimizer", "values", "save"), "crashed"), "broken": {"load": "unproven"}, "evil": {"load": "unproven"}},
    ),
    "handles weights alone": (
        "CLAIMS = {'made_up': ['weights']}\ndef load(path, about, load=load):\n return {k: v for k, v in load(path, about).items() if k[:6] == 'model.'}",
        {"whole": {"optimizer": "", "values": ""}},
    ),
}  # fmt: skip
#: {what a program does: (a case, a column, and the reason of its verdict)}.
REASONS = {
    "drops a tensor": ("whole", "weights", "missing: model.b"),
    "has names of its own": ("whole", "weights", "missing: model.a and 1 more; it gave a, of no part"),
    "gives None for a tensor": ("whole", "weights", "model.b: None, not float32 [1]"),
    "flips a bit": ("whole", "weights", "model.a: other elements"),
    "changes a dtype": ("whole", "weights", "model.b: float64 [1], not float32 [1]"),
    "invents a tensor": ("whole", "optimizer", "not in the checkpoint: optim.state.b.exp_avg"),
    "has another learning rate": ("whole", "values", "optim.param_groups.0.lr: 0.2, not 0.1"),
    "crashes": ("broken", "load", "its process ended with signal 6, Aborted"),
    "hangs on a broken one": ("broken", "load", "no answer in 2 s"),
}
RIGHT = {
    "whole": dict.fromkeys(("weights", "optimizer", "values", "list", "verify", "save"), "right"),
    "broken": {"load": "right", "verify": "right"},
    "evil": {"load": "right", "verify": "right"},
}


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A kit with a checkpoint that is whole, one with another number, and one with code."""
    folder = tmp_path_factory.mktemp("kit")
    said: dict[str, Any] = {"tensors": TRUE, "sum": 11.75}
    for name, content in {
        "whole": said,
        "broken": said | {"sum": 11.0},
        "evil": said | {"sum": 0, "code": "open('acid-canary', 'w').close()"},
    }.items():
        case = folder / "cases" / name
        case.mkdir(parents=True)
        (case / "ckpt.json").write_text(json.dumps(content))
        golden = name == "whole"
        about = {
            "version": 1, "name": name, "kind": "golden" if golden else "broken", "fault": None if golden else name, "what": "made up",
            "made_of": None if golden else "whole", "expect": "state" if golden else "refused", "path": "ckpt.json",
            "parts": ["weights", "optimizer"], "touches": [] if golden else ["weights"], "tied": [], "about": {"layout": "made_up"},
        }  # fmt: skip
        (case / "case.json").write_text(json.dumps(about))
        if golden:
            for state in ("expected.safetensors", "expected_as_stored.safetensors"):
                save_file({k: np.array(v, "f4") for k, v in TRUE.items()}, case / state)
            (case / "expected.json").write_text('{"values": {"optim.param_groups.0.lr": 0.1}}')
    (folder / "kit.json").write_text(json.dumps({"version": 1, "cases": ["whole", "broken", "evil"]}))
    return folder


@pytest.mark.parametrize("what", LIARS)
def test_a_program_that(what: str, kit: Path, tmp_path: Path) -> None:
    change, others = LIARS[what]
    program = tmp_path / "program.py"
    program.write_text(change + HONEST if "__future__" in change else HONEST + change)
    done = acid(str(program), kit=str(kit), seconds=2 if "hangs" in what else 60, processes=1)
    found = {row.case.name: row.verdicts for row in done.rows}
    wanted = {name: {c: v for c, v in (row | others.get(name, {})).items() if v} for name, row in RIGHT.items()}
    assert found == wanted
    if what in REASONS:
        case, column, reason = REASONS[what]
        assert {row.case.name: row.reasons for row in done.rows}[case][column] == reason
    bad = {"lost", "wrong", "accepted", "ran code", "crashed", "hung"}
    assert done.passed == (not any(v in bad for row in wanted.values() for v in row.values()))


def test_a_broken_case_alone_has_the_verdict_of_a_full_run(kit: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(HONEST + LIARS["refuses everything"][0])
    done = acid(str(program), kit=str(kit), cases=("br*",), processes=1)
    assert {row.case.name: row.verdicts for row in done.rows} == {"broken": {"load": "unproven", "verify": "unproven"}}
    assert done.rows[0].reasons["load"] == "whole, the whole one that it was made of: refused, ValueError: no"
    assert done.also_run == ["whole"] and done.passed and done.summary["golden"] == {}

    lines = ckpttool_here("acid", str(program), "--kit", str(kit), "--case", "broken")
    assert "broken  load unproven, verify unproven\n" in lines.stdout and "golden: no verdicts\n" in lines.stdout
    assert "also run, but not listed, since broken ones were made of it: whole\n" in lines.stderr

    program.write_text(HONEST)
    done = acid(str(program), kit=str(kit), cases=("broken", "whole"), processes=1)
    assert [row.verdicts for row in done.rows] == [RIGHT["whole"], RIGHT["broken"]] and done.also_run == []


def test_verify_alone_is_doubted_too(kit: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("def verify(path, about):\n raise ValueError('no')")
    done = acid(str(program), kit=str(kit), processes=1)
    assert [row.verdicts for row in done.rows] == [{"verify": v} for v in ("refused", "unproven", "unproven")]


def test_the_command_prints_a_card_and_exits_with_5_if_something_is_wrong(kit: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(HONEST + LIARS["executes code"][0])
    done = ckpttool_here("acid", str(program), "--kit", str(kit), "--python", sys.executable)
    assert done.returncode == 5, done.stderr
    assert "evil    load ran code, verify ran code\n" in done.stdout
    assert done.stdout.endswith("golden: 6 right\nbroken: 2 right, 2 ran code\n")
    said = json.loads(ckpttool_here("acid", str(program), "--kit", str(kit), "--case", "whole", "--json").stdout)
    assert said["passed"] and said["summary"] == {"golden": {"right": 6}, "broken": {}} and said["kit_version"] == 1


def test_the_reader_of_the_page_has_the_card_that_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (REPOSITORY / "docs" / "explanation" / "acid-test.md").read_text(encoding="utf-8")
    reader, command, shown = re.findall(r"```py\n(.*?)```.*?\$ ckpttool (.*?)\n(.*?)```", page, re.DOTALL)[0]
    monkeypatch.chdir(tmp_path)
    Path("reader.py").write_text(reader)
    done = ckpttool_here(*command.split())
    assert done.stdout == shown and done.returncode == 5, done.stderr


def test_a_program_that_is_none_is_refused(kit: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import nothing_of_that_name")
    with pytest.raises(UsageError, match="No module named 'nothing_of_that_name'"):
        acid(str(program), kit=str(kit))
    with pytest.raises(UsageError, match="python='/nowhere/python' cannot be started"):
        acid(str(program), kit=str(kit), python="/nowhere/python")
    with pytest.raises(NotRecognised, match="no such file"):
        acid(str(tmp_path / "none.py"), kit=str(kit))
    program.write_text("import sys; sys.exit('usage: program FILE')")
    with pytest.raises(UsageError, match=r"cannot be imported: SystemExit: usage: program FILE\. .*python"):
        acid(str(program), kit=str(kit))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def read(path): pass", "load, list, verify and save, looked for at its top level, it has none, and no CLAIMS; .* made_up"),
        ("load = {}", "it has none"),
        ("def load(path, about): pass\nCLAIMS = {'dcp': ('weights',)}", "it has load, and CLAIMS of dcp; .* made_up"),
        ("def load(path, about): pass\nCLAIMS = {}", "it has load, and CLAIMS of nothing"),
        ("def load(path, about): pass\nCLAIMS = {'made_up': ('weight',)}", "'weight' of made_up in CLAIMS. Parts are weights, "),
        ("def load(path, about): pass\ndef save(state, path, layout): pass", r"lacks SAVES\."),
        ("def load(path, about): pass\nSAVES = 'dcp'", r"lacks save\."),
        ("def save(state, path, layout): pass\nSAVES = ['dcp']", r"lacks load\."),
    ],
)  # fmt: skip
def test_a_program_of_which_something_would_not_be_tested_is_refused(
    text: str, said: str, kit: Path, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(text)
    with pytest.raises(UsageError, match=said) as e:
        acid(str(program), kit=str(kit), processes=1)
    assert e.value.code == "CKPT0227"


def test_a_program_without_verdicts_exits_with_2(kit: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("def convert(path): pass")
    done = ckpttool_here("acid", str(program), "--kit", str(kit))
    assert done.returncode == 2 and done.stdout == "" and "more: ckpttool explain CKPT0227" in done.stderr
    program.write_text("def list(path, about): return []")
    done = ckpttool_here("acid", str(program), "--kit", str(kit), "--case", "broken")
    assert done.returncode == 2 and "it has list, and no CLAIMS" in done.stderr
