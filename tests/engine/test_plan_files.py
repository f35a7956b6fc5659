"""Plans as files: what `convert --dry-run --plan` writes, `apply` runs, or refuses with what has changed; and that a plan and
the run agree for every layout that is written."""

from __future__ import annotations

import difflib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import ckpttool_here
from peers import FIXTURES, difference, load_dcp, load_full
from peers import tensors_of as tensors

import ckpttool
from ckpttool.engine.dry_run import estimate_conversion
from ckpttool.engine.plan_files import describe_plan
from ckpttool.errors import CkpttoolError, Corrupt, DestinationExists, Differs, SourceChanged, Unsafe, UsageError
from ckpttool.layouts import layouts, place
from ckpttool.options import OpenOptions, RunOptions, WriteRequest

AWKWARD = FIXTURES / "awkward_w3"
W3 = FIXTURES / "fsdp2_w3" / "ckpt"
WRITTEN = [name for name, layout in layouts().items() if layout.write is not None]
FILES = {"full": "out.pt", "audit": "out.tar.zst"}


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    """A folder with a checkpoint of three ranks in `ckpt`."""
    shutil.copytree(W3, tmp_path / "ckpt")
    return tmp_path


def planned(desk: Path, *words: object) -> dict[str, Any]:
    """The plan of a conversion of `ckpt` to `out`, in plan.json."""
    done = ckpttool_here("convert", desk / "ckpt", desk / "out", *words, "--dry-run", "--plan", desk / "plan.json")
    assert done.returncode == 0, done.stderr
    return dict(json.loads((desk / "plan.json").read_text()))


def sizes_of(path: Path) -> dict[str, int]:
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    names = {p.relative_to(path).as_posix() if path.is_dir() else p.name: p.stat().st_size for p in files}
    return {n: size for n, size in names.items() if n != "ckpttool.json"}


@pytest.mark.slow
@pytest.mark.parametrize("to", WRITTEN)
def test_a_plan_and_its_run_agree_for_every_layout(to: str, tmp_path: Path) -> None:
    out = tmp_path / FILES.get(to, "out")
    world = {} if "world_size" not in layouts()[to].writer_uses else {"world_size": 5}
    asked: dict[str, Any] = {"to": to, "drop": True, **world}
    found = estimate_conversion(AWKWARD / "ckpt", out, OpenOptions(), WriteRequest(**asked), RunOptions())
    with ckpttool.plan(AWKWARD / "ckpt", out, **asked) as plan:
        assert f"{found.tensors:,} tensors" in str(plan)
        plan.save(tmp_path / "plan.json")
    done = ckpttool.apply(tmp_path / "plan.json")
    assert (found.tensors, found.world_size, found.layout_to) == (done.tensors, done.world_size, done.layout_to)
    assert {d["name"] for d in found.dropped} == {name for name, *_ in done.dropped}
    said, written = {f["name"]: f["bytes"] for f in found.files}, sizes_of(out)
    assert said.keys() == written.keys()
    # what is made at the end is at most what was said, so that no disk that had room is full before the end
    assert {n: (said[n], written[n]) for n in said if said[n] < written[n]} == {}
    assert done.written_bytes == sum(written.values()) <= found.written_bytes == sum(said.values())
    if to != "audit":  # which is compressed
        assert found.written_bytes - done.written_bytes < 300 * (found.tensors * 5 + 100)
    saved = json.loads((tmp_path / "plan.json").read_text())
    assert saved["destination"]["files"] == said and saved["destination"]["tensors"] == found.tensors
    assert saved["entries"]["kept"] == len(done.kept) and saved["entries"]["changed"].keys() == done.changed.keys()


def test_names_of_hundreds_of_letters_are_counted(tmp_path: Path) -> None:
    names = [f"{'block_' * 60}{i}.weight" for i in range(20)]
    torch.save({"model": {n: torch.ones(3, 2) for n in names}}, tmp_path / "a.pt")
    for to, out in (("dcp", "dcp"), ("full", "b.pt")):
        asked = WriteRequest(to=to, world_size=3 if to == "dcp" else None)
        found = estimate_conversion(tmp_path / "a.pt", tmp_path / out, OpenOptions(), asked, RunOptions())
        ckpttool.convert(tmp_path / "a.pt", tmp_path / out, to=to, world_size=asked.world_size)
        written = sizes_of(tmp_path / out)
        assert all(f["bytes"] >= written[f["name"]] for f in found.files)


@pytest.mark.slow
def test_apply_runs_what_was_reviewed_with_all_its_options(desk: Path) -> None:
    plan = planned(desk, "--to", "full", "--dtype", "bf16", "--cast", "model.lm_head.*=fp32", "--only", "model,optim")
    assert plan["options"] == {
        "reading": {"only": ["model", "optim"]},
        "writing": {"to": "full", "dtype": "bf16", "cast": {"model.lm_head.*": "fp32"}},
    }
    assert "float32 became bfloat16" in plan["entries"]["changed"]["model.model.embed_tokens.weight"]
    assert all(Path(plan[side]["path"]).is_absolute() for side in ("source", "destination"))
    done = ckpttool_here("apply", desk / "plan.json", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tensors"] == plan["destination"]["tensors"]
    ckpttool.convert(
        desk / "ckpt", desk / "twin.pt", dtype="bf16", cast={"model.lm_head.*": "fp32"}, only=["model", "optim"]
    )
    found, wanted = tensors(load_full(desk / "out")), tensors(load_full(desk / "twin.pt"))
    assert difference(found, wanted) == [] and found["model.lm_head.weight"].dtype == torch.float32


def test_a_plan_of_python_is_that_of_the_command_line(desk: Path) -> None:
    planned(desk, "--to", "zero3", "-n", "3")
    with ckpttool.plan(desk / "ckpt", desk / "out", to="zero3", world_size=3) as plan:
        plan.save(desk / "python.json")
    assert (desk / "python.json").read_bytes() == (desk / "plan.json").read_bytes()


def test_plans_of_two_options_differ_in_the_lines_that_differ(desk: Path) -> None:
    texts = []
    for rank in ("2", "3"):
        planned(desk, "--to", "dcp", "-n", rank)
        texts.append((desk / "plan.json").read_text().splitlines())
    odd = [line for line in difflib.ndiff(*texts) if line[:2] in ("- ", "+ ")]
    tensors = [line for line in texts[0] if '"model.model.embed_tokens.weight"' in line]
    assert len(tensors) == 1 and len(odd) < 20 and not any("model." in line for line in odd)


@pytest.mark.slow
def test_the_id_of_a_plan_is_that_of_the_journal(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that apply continues what convert began, and convert what apply began."""
    saved = planned(desk, "--to", "dcp", "-n", "2")["id"]
    from ckpttool.engine import conversion

    seen = []
    open_destination = conversion.open_destination

    def watch(*arguments: Any) -> Any:
        seen.append(arguments[3])
        return open_destination(*arguments)

    monkeypatch.setattr(conversion, "open_destination", watch)
    ckpttool.apply(desk / "plan.json", threads=1)
    ckpttool.convert(desk / "ckpt", desk / "again", to="dcp", world_size=2, drop=True)
    assert seen == [saved, saved]
    assert difference(tensors(load_dcp(desk / "out")), tensors(load_dcp(desk / "ckpt"))) == []


# ----------------------------------------------------------------------------------------------------- what has changed


def train_on(desk: Path) -> None:
    shutil.rmtree(desk / "ckpt")
    ckpttool.convert(W3, desk / "ckpt", to="dcp", world_size=3, only=["model", "trainer"])


CHANGES: dict[str, tuple[Callable[[Path], object], type[CkpttoolError], str]] = {
    "a file was written to": (lambda d: os.utime(d / "ckpt" / "__1_0.distcp"), SourceChanged, "source.files.__1_0.distcp.modified: "),
    "the files are those of another step": (train_on, SourceChanged, " more like that\n  source.values."),
    "the source is gone": (lambda d: shutil.rmtree(d / "ckpt"), CkpttoolError, "ckpt"),
    "something is at the destination": (lambda d: (d / "out").mkdir(), DestinationExists, "out exists"),
}  # fmt: skip


@pytest.mark.parametrize("what", CHANGES)
def test_what_has_changed_since_is_said_and_nothing_is_written(what: str, desk: Path) -> None:
    planned(desk, "--to", "dcp", "-n", "2")
    change, kind, words = CHANGES[what]
    change(desk)
    before = sorted(desk.rglob("*"))
    with pytest.raises(kind) as e:
        ckpttool.apply(desk / "plan.json")
    assert words in str(e.value)
    assert sorted(desk.rglob("*")) == before
    done = ckpttool_here("apply", desk / "plan.json", "--json")
    assert done.returncode == e.value.exit_code and json.loads(done.stdout)["error"]["kind"] == type(e.value).__name__


def test_another_version_is_said(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned(desk, "--to", "dcp", "-n", "2")
    from ckpttool.engine import plan_files

    monkeypatch.setattr(plan_files, "__version__", "9.9.9")
    with pytest.raises(Differs, match="1 difference") as e:
        ckpttool.apply(desk / "plan.json")
    assert 'ckpttool: "9.9.9", planned was ' in str(e.value) and not (desk / "out").exists()


@pytest.mark.slow
def test_a_config_that_changed_is_said(desk: Path) -> None:
    shutil.copytree(FIXTURES / "hf_llama" / "ckpt", desk / "llama")
    planned(desk, "--to", "hf", "--config", desk / "llama")
    config = json.loads((desk / "llama" / "config.json").read_text())
    (desk / "llama" / "config.json").write_text(json.dumps({**config, "note": "changed"}))
    with pytest.raises(Differs, match="not what would be done now") as e:
        ckpttool.apply(desk / "plan.json")
    assert "destination.files.config.json: " in str(e.value) and not (desk / "out").exists()


# ------------------------------------------------------------------------------------------------------ plans of others


def edited(*keys: str, to: object) -> Callable[[dict[str, Any]], object]:
    def edit(plan: dict[str, Any]) -> None:
        at = plan
        for key in keys[:-1]:
            at = at.setdefault(key, {})
        at[keys[-1]] = to

    return edit


HOSTILE: dict[str, tuple[Callable[[dict[str, Any]], object], type[CkpttoolError]]] = {
    "a destination that is relative": (edited("destination", "path", to="../out"), UsageError),
    "a destination with .. in it": (edited("destination", "path", to="/tmp/../etc/out"), UsageError),
    "a destination that is no text": (edited("destination", "path", to=7), UsageError),
    "the source as destination": (lambda p: edited("destination", "path", to=p["source"]["path"])(p), CkpttoolError),
    "a huge number of ranks": (edited("options", "writing", "world_size", to=10**30), CkpttoolError),
    "a huge vocabulary": (edited("options", "writing", "vocab_size", to=10**30), CkpttoolError),
    "a text for a switch": (edited("options", "writing", "drop", to="false"), UsageError),
    "a number for a switch": (edited("options", "running", "force", to=1), UsageError),
    "true for a number": (edited("options", "writing", "world_size", to=True), UsageError),
    "a text for a list": (edited("options", "reading", "only", to="model"), UsageError),
    "an unknown option": (edited("options", "writing", "colour", to="red"), UsageError),
    "unknown options": (edited("options", "shell", to={"run": "rm"}), UsageError),
    "options of another layout": (edited("options", "layout", to={"stage": 2}), UsageError),
    "workers, which may be code": (edited("options", "running", "workers", to="os:getcwd"), UsageError),
    "an adapter to merge": (edited("options", "reading", "merge", to={"adapter": "/x"}), UsageError),
    "options that are a list": (edited("options", "writing", to=[]), UsageError),
    "a field of its own": (edited("approved", to=True), Differs),
    "fewer tensors than there are": (lambda p: p["source"]["tensors"].popitem(), SourceChanged),
    "another size of a file": (edited("destination", "files", ".metadata", to=1), Differs),
    "a note that is not ours": (lambda p: p["notes"].append("all is well"), Differs),
    "a drop that it does not list": (lambda p: edited("options", "reading", "only", to=["model"])(p), CkpttoolError),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("what", HOSTILE)
def test_a_plan_that_was_edited_is_refused(what: str, desk: Path) -> None:
    plan = planned(desk, "--to", "dcp", "-n", "2")
    edit, kind = HOSTILE[what]
    edit(plan)
    (desk / "plan.json").write_text(json.dumps(plan))
    before = sorted(desk.rglob("*"))
    done = ckpttool_here("apply", desk / "plan.json")
    assert done.returncode not in (0, 1) and "Traceback" not in done.stderr, done.stderr
    with pytest.raises(kind):
        ckpttool.apply(desk / "plan.json")
    assert sorted(desk.rglob("*")) == before


def test_a_destination_that_was_edited_is_where_it_is_written(desk: Path) -> None:
    """Whoever edits a plan reviews it again: it does what its text says."""
    plan = planned(desk, "--to", "dcp", "-n", "2")
    plan["destination"]["path"] = str(desk / "elsewhere")
    (desk / "plan.json").write_text(json.dumps(plan, indent=4))
    assert ckpttool_here("apply", desk / "plan.json").returncode == 0
    assert (desk / "elsewhere" / ".metadata").exists() and not (desk / "out").exists()


@pytest.mark.parametrize(
    ("data", "kind"),
    [(b"", Corrupt), (b"[]", UsageError), (b"{}", UsageError), (b'{"ckpttool": 1}', UsageError), (b"[" * 10_000, Unsafe), ('{"ckpttool": "\u202e"}'.encode(), Unsafe), (b"\x80\x02.", Corrupt),
     (b'{"ckpttool": "1", "ckpttool": "2"}', Unsafe), (b"{\"a\": " + b"9" * 5000 + b"}", Corrupt), (b"[" + b"[]," * 4_000_000 + b"0]", Unsafe)],
)  # fmt: skip
def test_what_is_no_plan_is_refused(data: bytes, kind: type[CkpttoolError], tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_bytes(data)
    with pytest.raises(kind):
        ckpttool.apply(tmp_path / "plan.json")
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for ever
    with pytest.raises(UsageError, match="is not a regular file"):
        ckpttool.apply(tmp_path / "pipe")
    assert ckpttool_here("apply", tmp_path / "nothing.json").returncode == 2
    assert ckpttool_here("apply", tmp_path).returncode == 2


@pytest.mark.slow
def test_a_plan_is_written_over_nothing_but_a_plan(desk: Path) -> None:
    planned(desk, "--to", "dcp", "-n", "2")
    planned(desk, "--to", "dcp", "-n", "3")  # an earlier plan
    (desk / "notes.json").write_text("{}")
    for name in ("notes.json", "ckpt", "ckpt/plan.json", "ckpt/.metadata", "nowhere/plan.json"):
        before = {p: p.stat().st_mtime_ns for p in desk.rglob("*")}
        done = ckpttool_here("convert", desk / "ckpt", desk / "out", "--to", "dcp", "--dry-run", "--plan", desk / name)
        assert done.returncode not in (0, 1) or name.startswith("nowhere"), done.stderr
        assert done.returncode and {p: p.stat().st_mtime_ns for p in desk.rglob("*")} == before
    done = ckpttool_here("convert", desk / "ckpt", desk / "out", "--to", "dcp", "--plan", desk / "p.json")
    assert done.returncode == 2 and "--dry-run" in done.stderr and not (desk / "out").exists()


def test_credentials_and_open_checkpoints_are_in_no_plan(desk: Path) -> None:
    with ckpttool.plan(desk / "ckpt", desk / "out", to="dcp") as plan:
        for url in ("https://user:secret@host/ckpt", "https://host/ckpt/?token=secret", "s3://key:secret@bucket/x"):
            for changed in (
                replace(plan, src=url),
                replace(plan, dst=url),
                replace(plan, reading=replace(plan.reading, like=url)),
            ):
                with pytest.raises(UsageError, match="credentials") as e:
                    describe_plan(changed, RunOptions())
                assert "secret" not in str(e.value)
    with (
        ckpttool.plan(place(desk / "ckpt"), desk / "out", to="dcp") as plan,
        pytest.raises(UsageError, match="needs the path or URL"),
    ):
        plan.save(desk / "plan.json")
    assert sorted(p.name for p in desk.iterdir()) == ["ckpt"]
