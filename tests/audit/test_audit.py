"""Audit archives from end to end: any layout in, any layout out, checked by programs that know nothing of ckpttool."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import ckpttool_here
from pages import program
from peers import FIXTURES, load_dcp, load_full, same_value
from safetensors import safe_open
from safetensors.torch import load_file
from stores import moto

import ckpttool
from ckpttool.audit import archive_plan as plan
from ckpttool.audit import archive_store, byte_planes, ledger, manifest, provenance, pruning
from ckpttool.audit.archive import Archive, read_facts
from ckpttool.audit.archive_options import ArchiveOptions
from ckpttool.audit.archive_verification import verify_archive
from ckpttool.audit.export import Exported, export, restore
from ckpttool.audit.verify_in_store import verify
from ckpttool.engine.inspect import check_page_file
from ckpttool.engine.opening import open as open_checkpoint
from ckpttool.errors import CkpttoolError, Corrupt, DestinationExists, Differs, NoSpace, Unsupported, UsageError
from ckpttool.storage.source import Source

# a process forked from this one would begin with this one's peak of memory
CLI = ["sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-m", "ckpttool"]
EVERY_LAYOUT = [
    ("dcp", {"world_size": 3}), ("dcp", {"world_size": 4}), ("full", {}), ("zero3", {"world_size": 2}),
    ("zero3", {"world_size": 3}), ("fsdp1", {"world_size": 2}),
]  # fmt: skip


def archived(src: Path, dst: Path, **options: Any) -> Exported:
    """An export without a ledger."""
    return export(src, str(dst), ArchiveOptions(**options), in_ledger=False)


def state() -> dict[str, Any]:
    """Tensors of every kind of dtype and size, large ones among them, with values of many types."""
    g = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g) * 0.02

    head = normal(131, 2100)
    return {
        "model": {
            "embed.weight": head,
            "head.weight": head,
            "layers.0.w ö/b": normal(700, 501).to(torch.bfloat16),
            "layers.1.big": normal(1111, 997),
            "layers.1.double": normal(300, 300).double(),
            "layers.1.half": normal(640, 640).half(),
            "layers.2.fp8": normal(600, 600).to(torch.float8_e4m3fn),
            "layers.2.complex": torch.complex(normal(200, 300), normal(200, 300)),
            "layers.2.complex128": torch.complex(normal(150, 150).double(), normal(150, 150).double()),
            "ids": torch.randint(0, 1 << 40, (40_000,), generator=g),
            "bytes": torch.randint(0, 255, (300_001,), generator=g).to(torch.uint8),
            "mask": torch.rand(131, generator=g) > 0.5,
            "empty": torch.zeros(0, 36),
            "scalar": torch.tensor(1.5),
            "nan": torch.tensor([float("nan"), -0.0, float("inf"), 1e-45]),
            "zeros": torch.zeros(600, 600),
        },
        "step": 1200,
        "args": {"lr": 3e-4, "betas": (0.9, 0.95), "name": "run ö", "none": None, "nan": float("nan"), "big": 1 << 80},
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("state") / "state.pt"
    torch.save(state(), path)
    return path


@pytest.fixture(scope="module")
def of_one_state(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A real FSDP2 checkpoint with several param groups, and the same state in every other layout that holds it all."""
    work = tmp_path_factory.mktemp("layouts")
    first = FIXTURES / "fsdp2_w2_groups/ckpt"
    out = [first]
    for i, (layout, how) in enumerate(EVERY_LAYOUT):
        path = work / (f"{i}-{layout}" + (".pt" if layout == "full" else ""))
        ckpttool.convert(first, path, to=layout, **how)
        out.append(path)
    return out


# ------------------------------------------------------------------------------------------------ one state, one file


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_layout_and_the_world_size_play_no_part(of_one_state: list[Path], tmp_path: Path, shuffle: bool) -> None:
    made = [tmp_path / f"{i}" / "a.tar.zst" for i in range(len(of_one_state))]
    for src, dst in zip(of_one_state, made, strict=True):
        dst.parent.mkdir()
        archived(src, dst, reproducible=True, epoch=1_700_000_000, shuffle=shuffle, member_bytes=1 << 20)
    assert len({hashlib.sha256(p.read_bytes()).hexdigest() for p in made}) == 1


def test_a_real_zero_3_save_and_what_it_was_converted_to(tmp_path: Path) -> None:
    first = FIXTURES / "zero3_w4/ckpt"
    ckpttool.convert(first, tmp_path / "d", to="dcp", world_size=3)
    ckpttool.convert(first, tmp_path / "f.pt", to="full")
    hashes = set()
    for src in (first, tmp_path / "d", tmp_path / "f.pt"):
        archived(src, tmp_path / "a.tar.zst", reproducible=True)
        hashes.add(hashlib.sha256((tmp_path / "a.tar.zst").read_bytes()).hexdigest())
        (tmp_path / "a.tar.zst").unlink()
    assert len(hashes) == 1


def test_only_provenance_tells_two_sources_apart(of_one_state: list[Path], tmp_path: Path) -> None:
    unpacked = []
    for i, src in enumerate(of_one_state[:4]):
        archived(src, tmp_path / f"{i}.tar.zst", meta=(("who", "me"),))
        unpacked.append(unpack(tmp_path / f"{i}.tar.zst", tmp_path / f"{i}"))
    names = {p.name for p in unpacked[0].iterdir()}
    for folder in unpacked[1:]:
        assert {p.name for p in folder.iterdir()} == names
        same = {n for n in names if (folder / n).read_bytes() == (unpacked[0] / n).read_bytes()}
        assert names - same == {"PROVENANCE.json", "SHA256SUMS"}
    said = [json.loads((f / "PROVENANCE.json").read_text()) for f in unpacked]
    assert [(s["source"]["layout"], s["source"]["world_size"]) for s in said] == [
        ("dcp", 2), ("dcp", 3), ("dcp", 4), ("full", None),
    ]  # fmt: skip
    assert all(s["meta"] == {"who": "me"} and s["step"] == 3 for s in said)


def test_the_state_alone_decides_and_not_threads_or_memory(saved: Path, tmp_path: Path) -> None:
    hashes = set()
    for i, how in enumerate(({"threads": 1}, {"threads": 5}, {"max_memory_bytes": 80_000_000})):
        export(saved, str(tmp_path / "a.tar.zst"), ArchiveOptions(reproducible=True, shuffle=True), force=i > 0,
               in_ledger=False, **how)  # fmt: skip
        hashes.add(hashlib.sha256((tmp_path / "a.tar.zst").read_bytes()).hexdigest())
    assert len(hashes) == 1


# ----------------------------------------------------------------------------------- with tar, zstd and sha256sum alone


def unpack(archive: Path, folder: Path) -> Path:
    """By tar and zstd, checked by sha256sum."""
    folder.mkdir()
    subprocess.run(["tar", "--zstd", "-xf", str(archive), "-C", str(folder)], check=True)
    done = subprocess.run(
        ["sha256sum", "--strict", "-c", "SHA256SUMS"], cwd=folder, capture_output=True, text=True, check=True
    )
    listed = {line.rpartition(": ")[0] for line in done.stdout.splitlines()}
    assert listed == {p.name for p in folder.iterdir()} - {"SHA256SUMS", "model.sig"}
    return folder


def bits(t: torch.Tensor) -> bytes:
    return t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b""


def test_unpacked_by_tar_and_loaded_by_safetensors(saved: Path, tmp_path: Path) -> None:
    archived(saved, tmp_path / "a.tar.zst", member_bytes=2_000_000)
    folder = unpack(tmp_path / "a.tar.zst", tmp_path / "x")
    found: dict[str, torch.Tensor] = {}
    members = sorted(folder.glob("tensors-*.safetensors"))
    assert len(members) > 3
    for member in members:
        found.update(load_file(member))
    want = state()["model"]
    assert set(found) == {f"model.{n}" for n in want}
    for name, t in want.items():
        have = found[f"model.{name}"]
        if t.dtype == torch.complex128:  # safetensors has no such dtype; the metadata of the file says what it is
            assert have.dtype == torch.uint8 and bits(have) == bits(t)
        else:
            assert (have.dtype, have.shape, bits(have)) == (t.dtype, t.shape, bits(t)), name


def test_planes_are_undone_by_the_ten_lines_of_the_readme(saved: Path, tmp_path: Path) -> None:
    archived(saved, tmp_path / "a.tar.zst", shuffle=True)
    folder = unpack(tmp_path / "a.tar.zst", tmp_path / "x")
    text = (folder / "README.txt").read_text()
    code = re.search(r"(    import numpy as np\n.*?)\n\n    #", text, re.DOTALL)
    assert code is not None and code[1].count("\n") < 10
    names: dict[str, Any] = {}
    exec("\n".join(line[4:] for line in code[1].splitlines()), names)  # as its reader would
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    rows = {r["name"]: r for r in manifest["tensors"]}
    assert {n for n, r in rows.items() if "planes" in r} == {
        f"model.{n}" for n, t in state()["model"].items() if t.nbytes >= plan.LARGE and t.element_size() > 1
    }
    for name, t in state()["model"].items():
        r = rows[f"model.{name}"]
        stored = (folder / r["member"]).read_bytes()[r["offset"] : r["offset"] + r["bytes"]]
        assert (names["undo"](stored, r["planes"]) if "planes" in r else stored) == bits(t), name
    with safe_open(folder / "tensors-00001.safetensors", "pt") as f:
        told = json.loads(f.metadata()["ckpttool.coded"])["model.layers.1.big"]
        assert told == {"dtype": "float32", "planes": 4, "shape": [1111, 997]}
        assert f.get_tensor("model.layers.1.big").dtype == torch.uint8  # nobody takes planes for numbers


def test_digests_of_the_manifest_are_what_the_readme_says(saved: Path, tmp_path: Path) -> None:
    from blake3 import blake3

    done = archived(saved, tmp_path / "a.tar.zst")
    folder = unpack(tmp_path / "a.tar.zst", tmp_path / "x")
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    for r in manifest["tensors"]:
        stored = (folder / r["member"]).read_bytes()[r["offset"] : r["offset"] + r["bytes"]]
        assert blake3(stored).hexdigest() == r["digest"]
    level = sorted((r["name"], r["dtype"], r["shape"], r["digest"]) for r in manifest["tensors"])
    nodes = [blake3(b"\0" + json.dumps(leaf, separators=(",", ":")).encode()).digest() for leaf in map(list, level)]
    while len(nodes) > 1:
        pairs = [blake3(b"\1" + a + b).digest() for a, b in zip(nodes[::2], nodes[1::2], strict=False)]
        nodes = pairs + nodes[len(pairs) * 2 :]
    assert nodes[0].hex() == manifest["merkle_root"] == done.facts.merkle_root
    assert manifest["merkle_root"] == ckpttool.digest(saved).digest["all"]


def test_one_frame_is_enough_for_one_tensor(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archived(saved, tmp_path / "a.tar.zst", shuffle=True)
    read: list[tuple[int, int]] = []
    real = Source.readinto

    def readinto(self: Source, name: str, offset: int, into: memoryview) -> None:
        read.append((offset, len(into)))
        real(self, name, offset, into)

    with open_checkpoint(tmp_path / "a.tar.zst") as opened:
        size = opened.source.base.size("a.tar.zst")  # type: ignore[attr-defined]
        monkeypatch.setattr(Source, "readinto", readinto)
        assert opened.read("model.layers.1.big") == bits(state()["model"]["layers.1.big"])
    assert 0 < sum(n for _, n in read) < size / 2


# -------------------------------------------------------------------------------------------------------- and back


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("layout", "how"), EVERY_LAYOUT)
def test_restored_into_every_layout(
    of_one_state: list[Path], tmp_path: Path, layout: str, how: dict[str, Any], shuffle: bool
) -> None:
    archived(of_one_state[0], tmp_path / "a.tar.zst", shuffle=shuffle)
    dst = tmp_path / ("out.pt" if layout == "full" else "out")
    done = restore(str(tmp_path / "a.tar.zst"), dst, to=layout, **how)
    assert done.digest == ckpttool.digest(of_one_state[0]).digest and done.verified
    assert ckpttool.diff(dst, of_one_state[0]).equal


def test_restored_for_torch_the_tree_is_the_users_own(tmp_path: Path) -> None:
    case = FIXTURES / "fsdp2_w2_groups"
    archived(case / "ckpt", tmp_path / "a.tar.zst")
    restore(str(tmp_path / "a.tar.zst"), tmp_path / "d", to="dcp", world_size=3)
    restore(str(tmp_path / "a.tar.zst"), tmp_path / "f.pt", to="full")
    want, have = load_dcp(case / "ckpt"), load_dcp(tmp_path / "d")
    assert set(want) == set(have) and all(same_value(want[k], have[k]) for k in want)
    full = load_full(tmp_path / "f.pt")
    assert {"lr_scheduler", "args", "step", "model"} <= set(full)


@pytest.mark.parametrize("shuffle", [False, True])
def test_every_dtype_comes_back_and_tied_weights_stay_tied(saved: Path, tmp_path: Path, shuffle: bool) -> None:
    archived(saved, tmp_path / "a.tar.zst", shuffle=shuffle, member_bytes=1 << 20)
    restore(str(tmp_path / "a.tar.zst"), tmp_path / "back.pt", to="full")
    want, have = state(), torch.load(tmp_path / "back.pt", weights_only=True)
    assert list(have) == ["model", "step", "args"] or set(have) == set(want)
    for name, t in want["model"].items():
        assert (have["model"][name].dtype, have["model"][name].shape) == (t.dtype, t.shape)
        assert bits(have["model"][name]) == bits(t), name
    assert have["model"]["head.weight"].data_ptr() == have["model"]["embed.weight"].data_ptr()
    assert (
        have["args"]["betas"] == (0.9, 0.95)
        and have["args"]["big"] == 1 << 80
        and have["args"]["nan"] != have["args"]["nan"]
    )


def test_an_hf_folder_comes_back_with_its_config(tmp_path: Path) -> None:
    case = shutil.copytree(FIXTURES / "hf_tied/ckpt", tmp_path / "case")
    (case / "additional_chat_templates").mkdir()
    (case / "additional_chat_templates/tool.jinja").write_text("{{ tool }}")  # as transformers saves a second one
    archived(case, tmp_path / "a.tar.zst")
    restore(str(tmp_path / "a.tar.zst"), tmp_path / "hf", to="hf")
    assert (tmp_path / "hf/additional_chat_templates/tool.jinja").read_text() == "{{ tool }}"
    weights = {p.name: p.read_bytes() for p in case.iterdir() if p.suffix == ".safetensors"}
    assert weights and {n: (tmp_path / "hf" / n).read_bytes() for n in weights} == weights
    said = json.loads((tmp_path / "hf/config.json").read_text())
    assert said == json.loads((case / "config.json").read_text())


def test_other_commands_take_an_archive(of_one_state: list[Path], tmp_path: Path) -> None:
    path = tmp_path / "a.tar.zst"
    archived(of_one_state[0], path)
    assert ckpttool.digest(path).digest == ckpttool.digest(of_one_state[0]).digest
    assert ckpttool.inspect(path).step == 3
    assert ckpttool.verify(path, read_data=True).recorded == "equal"
    again = tmp_path / "b.tar.zst"
    ckpttool.convert(path, again)  # the name tells the layout
    assert (
        read_facts(Source(tmp_path), "b.tar.zst").merkle_root == read_facts(Source(tmp_path), "a.tar.zst").merkle_root
    )


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
@pytest.mark.parametrize("shuffle", [False, True])
def test_torch_reads_an_archive_without_a_conversion(saved: Path, tmp_path: Path, shuffle: bool) -> None:
    import torch.distributed.checkpoint as dcp

    archived(saved, tmp_path / "a.tar.zst", shuffle=shuffle)
    want = state()["model"]
    tree = {"model": {n: torch.zeros_like(t) for n, t in want.items()}}
    dcp.load(tree, storage_reader=ckpttool.storage_reader(tmp_path / "a.tar.zst"))
    assert all(bits(tree["model"][n]) == bits(t) for n, t in want.items())


def test_only_and_dtype(of_one_state: list[Path], tmp_path: Path) -> None:
    done = export(of_one_state[0], str(tmp_path / "m.tar.zst"), ArchiveOptions(only=("model",)), in_ledger=False)
    assert done.facts.components == ("model",)
    with Source(tmp_path) as source:
        archive = Archive(source, "m.tar.zst")
        assert archive.provenance["only"] == ["model"]
        assert verify_archive(source, "m.tar.zst", against=str(of_one_state[2])).findings == []
    half = export(of_one_state[0], str(tmp_path / "h.tar.zst"), ArchiveOptions(), dtype="bf16", in_ledger=False)
    with open_checkpoint(tmp_path / "h.tar.zst") as opened:
        kinds = {t.dtype for t in opened.checkpoint.tensors.values() if t.path[0] == "model"}
    assert kinds == {"bfloat16"} and half.facts.merkle_root != done.facts.merkle_root


# ------------------------------------------------------------------------------------------------------------- verify


def test_three_depths(of_one_state: list[Path], tmp_path: Path) -> None:
    path = str(tmp_path / "a.tar.zst")
    done = export(of_one_state[0], path, ArchiveOptions())
    assert verify(path, quick=True).depth == "quick"
    full = verify(path)
    assert (full.depth, full.findings, full.merkle_root) == ("full", [], done.facts.merkle_root)
    assert verify(path, deep=True).against == "what the ledger recorded at the export"
    assert verify(path, against=str(of_one_state[3])).depth == "deep"
    with pytest.raises(Differs, match="differs from"):
        verify(path, against=str(FIXTURES / "fsdp2_w3/ckpt"))
    with pytest.raises(Differs, match="Merkle root"):
        verify(path, root="0" * 64)
    with pytest.raises(UsageError, match="no ledger"):
        shutil.copy(path, tmp_path / "b.tar.zst")
        (tmp_path / "ledger.jsonl").unlink()
        verify(str(tmp_path / "b.tar.zst"), deep=True)


def test_altered_bytes_have_a_place(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.tar.zst"
    archived(saved, path, member_bytes=1 << 20)
    with Source(tmp_path) as source:
        archive = Archive(source, "a.tar.zst")
        place = archive.plan.places["model.layers.1.big"]
        table = archive.table
        k = next(i for i, s in enumerate(table.starts) if s == place.at)
        at = table.offsets[k] + table.sizes[k] // 2
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)
    with Source(tmp_path) as source:
        found = verify_archive(source, "a.tar.zst").findings
    assert [(f.tensor, f.member) for f in found] == [("model.layers.1.big", place.member)]
    assert (
        found[0].file_start is not None
        and found[0].file_end is not None
        and found[0].file_start <= at < found[0].file_end
    )
    assert (found[0].tensor_start, found[0].start) == (0, place.offset)
    with pytest.raises(Corrupt, match=r"layers\.1\.big"):
        restore(str(path), tmp_path / "out.pt", to="full")
    assert not (tmp_path / "out.pt").exists()


def test_the_command_line(of_one_state: list[Path], tmp_path: Path) -> None:
    def run(*words: str, code: int = 0) -> dict[str, Any]:
        done = subprocess.run(
            [*CLI, "audit", *words, "--json"], capture_output=True, text=True, cwd=tmp_path, check=False
        )
        assert done.returncode == code, done.stderr
        return json.loads(done.stdout)  # type: ignore[no-any-return]

    made = run(
        "export", str(of_one_state[0]), "a.tar.zst", "--meta", "ticket=X-1", "--git-commit", "abc", "--retain", "7y"
    )
    assert made["meta"] == {"ticket": "X-1"} and made["peak_memory_mib"] < 200 and made["ledger"]["seq"] == 1
    assert run("verify", "a.tar.zst")["sound"] is True
    assert run("list", ".")[0]["facts"]["retain_until"] > "2033"
    assert run("ledger", "verify", ".")["entries"] == 2
    run("export", str(of_one_state[0]), "a.tar.zst", code=6)
    data = bytearray((tmp_path / "a.tar.zst").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "a.tar.zst").write_bytes(data)
    assert run("verify", "a.tar.zst", code=4)["error"]["kind"] == "Corrupt"
    assert [e["event"] for e in run("ledger", "show", ".")] == ["export", "verify", "verify"]
    assert run("ledger", "show", ".")[-1]["sound"] is False


def test_archives_and_a_ledger_of_an_earlier_version(tmp_path: Path) -> None:
    """fixtures/audit_store was written before holds had files, and with other words in README.txt."""
    pytest.importorskip("model_signing")
    store = shutil.copytree(FIXTURES / "audit_store", tmp_path / "store")
    for name in ("plain", "signed"):
        path = str(store / f"{name}.tar.zst")
        key = str(store / "sign.pub") if name == "signed" else None
        for how in ({"quick": True}, {"deep": True}):
            found = verify(path, public_key=key, **how)
            assert found.findings == [] and "recorded on" in str(found.ledger)
        step = 2 if name == "signed" else 1
        ckpttool.convert(path, tmp_path / f"{name}.pt", to="full")
        back = torch.load(tmp_path / f"{name}.pt", weights_only=True)
        big = (torch.arange(131 * 1024) % 131).to(torch.bfloat16).reshape(131, 1024)
        assert torch.equal(back["model"]["big"], big) and back["trainer"]["step"] == step
        assert torch.equal(back["model"]["w"], torch.arange(12.0).reshape(3, 4) * step)
    assert verify(str(store / "sealed.tar.zst.age"), deep=True).findings == []
    rows = {r.name.partition(".")[0]: r for r in archive_store.list_archives(str(store))}
    assert {n: (r.ledger, r.held) for n, r in rows.items()} == {
        "plain": ("match", ()), "signed": ("match", ("case 2",)), "sealed": ("match", ("case 1",)),
    }  # fmt: skip
    assert (
        rows["plain"].warnings == rows["sealed"].warnings == () and "lost with the ledger" in rows["signed"].warnings[0]
    )
    assert ledger.verify_chain(str(store))["entries"] == 12
    with pytest.raises(Differs, match="another archive than the one recorded as plain"):
        shutil.copy(store / "signed.tar.zst", store / "plain.tar.zst")
        verify(str(store / "plain.tar.zst"))


# ------------------------------------------------------------------------------------------- an export and its line


def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file system has no lock for the ledger, as NFS without lockd, and has them for all else."""
    import fcntl

    flock = fcntl.flock

    def fails(fd: int, how: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").endswith("ledger.jsonl"):
            raise OSError(37, "No locks available")
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", fails)


def small(path: Path) -> Path:
    torch.save({"model": {"w": torch.arange(131.0)}, "step": 3}, path)
    return path


def test_a_ledger_that_cannot_be_locked_stops_an_export_before_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger.append_entry(str(tmp_path), "verify", "x.tar.zst")
    with monkeypatch.context() as m:
        no_locks(m)
        with pytest.raises(CkpttoolError, match="cannot be locked: No locks available"):
            export(small(tmp_path / "s.pt"), str(tmp_path / "a.tar.zst"), ArchiveOptions())
    assert sorted(os.listdir(tmp_path)) == ["ledger.jsonl", "s.pt"]


def test_an_archive_without_its_line_is_told_and_can_be_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finding 20: the archive had its name, the first line of the ledger failed, and nothing said what that left."""
    path = tmp_path / "a b.tar.zst"
    with monkeypatch.context() as m:
        no_locks(m)
        with pytest.raises(
            CkpttoolError, match=r"No locks.*is whole, but the ledger has no line.*ledger add '.*a b\.tar"
        ):
            export(small(tmp_path / "s.pt"), str(path), ArchiveOptions(hold="case"))
    assert "does not know" in str(verify(str(path)).ledger)
    assert archive_store.list_archives(str(tmp_path))[0].ledger == "unknown"
    entry = archive_store.add_to_ledger(str(path))
    assert (entry["event"], entry["archive"], entry["legal_hold"]) == ("add", "a b.tar.zst", "case")
    assert (
        verify(str(path), deep=True).findings == [] and archive_store.list_archives(str(tmp_path))[0].ledger == "match"
    )


def test_a_sealed_archive_without_its_sidecar_is_told(
    tmp_path: Path, keys: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = os.replace

    def fails(a: str, b: str) -> None:
        if b.endswith(".age.json"):
            raise OSError(28, "No space left on device")
        replace(a, b)

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(NoSpace, match=r"a\.tar\.zst\.age\.json is missing.*Delete the archive and export again"):
        export(small(tmp_path / "s.pt"), str(tmp_path / "a.tar.zst.age"), ArchiveOptions(recipients=(keys[1],)))
    assert sorted(os.listdir(tmp_path)) == ["a.tar.zst.age", "identity.txt", "s.pt"]


def test_a_sealed_archive_is_added_if_its_ciphertext_is_the_one_described(
    tmp_path: Path, keys: tuple[Path, str]
) -> None:
    path = tmp_path / "a.tar.zst.age"
    export(small(tmp_path / "s.pt"), str(path), ArchiveOptions(recipients=(keys[1],)), in_ledger=False)
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(Corrupt, match="ciphertext is not the one"):
        archive_store.add_to_ledger(str(path))
    path.write_bytes(data)
    assert archive_store.add_to_ledger(str(path))["ciphertext_sha256"] == hashlib.sha256(data).hexdigest()
    assert verify(str(path), deep=True).findings == []


def test_a_sidecar_without_a_hash_is_damaged(tmp_path: Path, keys: tuple[Path, str]) -> None:
    path = tmp_path / "a.tar.zst.age"
    export(small(tmp_path / "s.pt"), str(path), ArchiveOptions(recipients=(keys[1],)), in_ledger=False)
    beside = tmp_path / "a.tar.zst.age.json"
    good = json.loads(beside.read_text())
    for key in good["ciphertext"]:
        for bad in ({}, {key: None}, {key: [5]}, {key: True}, {key: 5 if key not in ("bytes", "block_bytes") else "5"}):
            rest = {k: v for k, v in good["ciphertext"].items() if k != key}
            beside.write_text(json.dumps(good | {"ciphertext": rest | bad}))
            for quick in (True, False):
                with pytest.raises(Corrupt, match="hashes of the ciphertext are missing"):
                    verify(str(path), quick=quick)
    beside.write_text(json.dumps(good))
    assert verify(str(path), quick=True).findings == []


def test_a_bad_verdict_is_told_though_the_ledger_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise NoSpace("ledger.jsonl: No space left on device.")

    a, b = (str(tmp_path / f"{n}.tar.zst") for n in "ab")
    export(small(tmp_path / "s.pt"), a, ArchiveOptions())
    torch.save({"model": {"w": torch.arange(7.0)}}, tmp_path / "t.pt")
    export(tmp_path / "t.pt", b, ArchiveOptions())
    monkeypatch.setattr(ledger, "append_entry", full)
    with pytest.raises(NoSpace, match="No space left"):
        verify(a)
    shutil.copy(a, b)
    with pytest.raises(Differs, match="another archive") as swapped:
        verify(b)
    why = "this verdict is not in the ledger: ledger.jsonl: No space left on device"
    assert swapped.value.__notes__ == [why]
    with open(a, "r+b") as f:
        f.seek(1000)
        f.write(b"damage")
    found = verify(a)
    assert found.findings and found.warnings == [why]


def test_an_export_on_a_clock_that_went_back_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Later(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime(2099, 1, 1, tzinfo=UTC)

    with monkeypatch.context() as m:
        m.setattr(ledger, "datetime", Later)
        ledger.append_entry(str(tmp_path), "verify", "x.tar.zst")
    done = export(small(tmp_path / "s.pt"), str(tmp_path / "a.tar.zst"), ArchiveOptions())
    assert any("2099-01-01T00:00:00Z" in n and "clock" in n for n in done.result.notes)
    (found,) = ledger.verify_chain(str(tmp_path))["backwards"]
    assert found["line"] == 2


def test_readme_txt_has_the_commands_that_open_and_check_an_archive(tmp_path: Path) -> None:
    """They run as they stand, on an archive that was signed and encrypted."""
    pytest.importorskip("model_signing")
    pyrage = pytest.importorskip("pyrage")
    for name in ("age", "openssl"):
        program(name)
    secret = pyrage.x25519.Identity.generate()
    (tmp_path / "SECRET.key").write_text(f"{secret}\n")
    key = ["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", "k.pem"]
    public = ["openssl", "ec", "-in", "k.pem", "-pubout", "-out", "SIGNER.pub"]
    for words in (key, public):
        subprocess.run(words, cwd=tmp_path, check=True, capture_output=True)
    path = tmp_path / "ARCHIVE.tar.zst.age"
    options = ArchiveOptions(recipients=(str(secret.to_public()),), key=str(tmp_path / "k.pem"))
    export(small(tmp_path / "s.pt"), str(path), options)
    # the sidecar has the first command, since README.txt lies in the ciphertext
    first = json.loads((tmp_path / "ARCHIVE.tar.zst.age.json").read_text())["open"]
    text = manifest.make_readme(False).decode()
    assert f"    {first}\n" in text
    lines = re.findall(r"^    ((?:mkdir|tar|\(cd|python|age) .*)$", text, re.MULTILINE)
    steps = [first, *(s for s in lines if not s.startswith("age") and "certificate" not in s)]
    assert len(steps) == 5 and "model_signing verify key" in steps[-1]
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(["sh", "-ec", "\n".join(steps)], cwd=tmp_path, env=env, check=True, capture_output=True)
    assert (tmp_path / "opened" / "README.txt").read_text() == text


# ------------------------------------------------------------------------------------------------------ interruptions

KILLED = """
import os, signal, sys
from ckpttool.engine.copy import fill
from ckpttool.audit.export import export
from ckpttool.audit.archive_options import ArchiveOptions
fill._JOURNAL_BYTES, fill._JOURNAL_SECONDS = 1, 0
at = float(sys.argv[3])
def hook(what, done, total):
    if what == "copy" and done >= at * total:
        os.kill(os.getpid(), signal.SIGKILL)
how = ArchiveOptions(reproducible=True, shuffle=True, member_bytes=1 << 20)
print(export(sys.argv[1], sys.argv[2], how, in_ledger=False, progress=hook).result.notes)
"""


def test_killed_in_the_middle_and_run_again(saved: Path, tmp_path: Path) -> None:
    archived(saved, tmp_path / "want.tar.zst", reproducible=True, shuffle=True, member_bytes=1 << 20)
    want = (tmp_path / "want.tar.zst").read_bytes()
    dst = tmp_path / "k" / "want.tar.zst"
    dst.parent.mkdir()
    continued = 0
    for at in (0.2, 0.5, 0.8, 0.99):
        killed = subprocess.run(
            [sys.executable, "-c", KILLED, str(saved), str(dst), str(at)], check=False, capture_output=True
        )
        assert killed.returncode == -9, killed.stderr
        assert [p.name for p in dst.parent.iterdir() if not p.name.startswith(".")] == []
        done = subprocess.run(
            [sys.executable, "-c", KILLED, str(saved), str(dst), "2"], check=True, capture_output=True, text=True
        )
        continued += "continued" in done.stdout
        assert dst.read_bytes() == want
        assert [p.name for p in dst.parent.iterdir()] == ["want.tar.zst"]
        dst.unlink()
    assert continued >= 3


def test_memory_does_not_grow_with_the_state(tmp_path: Path) -> None:
    peaks = []
    for i, n in enumerate((4, 32)):
        torch.save({"model": {f"w{k}": torch.randn(1024, 2048) for k in range(n)}}, tmp_path / f"{i}.pt")
        for words in (
            ["export", f"{i}.pt", f"{i}.tar.zst", "--shuffle", "--no-ledger", "-j", "2"],
            ["verify", f"{i}.tar.zst", "-j", "2"],
            ["restore", f"{i}.tar.zst", f"{i}-back.pt", "--to", "full", "-j", "2"],
        ):
            done = subprocess.run([*CLI, "audit", *words, "--json"], cwd=tmp_path, capture_output=True, check=True)
            peaks.append(json.loads(done.stdout)["peak_memory_mib"])
    assert max(peaks) < 300
    assert all(large < small + 110 for small, large in zip(peaks[:3], peaks[3:], strict=True)), peaks


# -------------------------------------------------------------------------------------------------------- encryption


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, str]:
    pyrage = pytest.importorskip("pyrage")
    secret = pyrage.x25519.Identity.generate()
    path = tmp_path / "identity.txt"
    path.write_text(f"# created for a test\n{secret}\n")
    return path, str(secret.to_public())


def test_sealed_and_opened(of_one_state: list[Path], tmp_path: Path, keys: tuple[Path, str]) -> None:
    identity, recipient = keys
    path = tmp_path / "a.tar.zst.age"
    done = export(of_one_state[0], str(path), ArchiveOptions(recipients=(recipient,)))
    data = path.read_bytes()
    said = json.loads((tmp_path / "a.tar.zst.age.json").read_text())
    assert said["ciphertext"]["sha256"] == hashlib.sha256(data).hexdigest()
    assert said["archive"]["merkle_root"] == done.facts.merkle_root == ckpttool.digest(of_one_state[0]).digest["all"]
    assert read_facts(Source(tmp_path), path.name).encrypted
    assert verify(str(path)).findings == []  # the ciphertext, without a key
    inside = verify(str(path), identities=[str(identity)], against=str(of_one_state[2]))
    assert inside.findings == [] and inside.merkle_root == done.facts.merkle_root
    restore(str(path), tmp_path / "d", identities=[str(identity)], to="dcp", world_size=2)
    assert ckpttool.diff(tmp_path / "d", of_one_state[0]).equal
    with pytest.raises(UsageError, match="encrypted"):
        ckpttool.inspect(path)
    if shutil.which("age"):
        subprocess.run(["age", "-d", "-i", str(identity), "-o", str(tmp_path / "p.tar.zst"), str(path)], check=True)
        assert verify(str(tmp_path / "p.tar.zst")).findings == []
    path.write_bytes(data[:-1000] + bytes([data[-1000] ^ 1]) + data[-999:])
    wrong = verify(str(path)).findings
    assert len(wrong) == 1 and wrong[0].file_start == 0 and wrong[0].file_end == len(data)
    with pytest.raises(Corrupt):
        verify(str(path), identities=[str(identity)])
    left = {p.name for p in tmp_path.iterdir()}
    assert left <= {"identity.txt", path.name, path.name + ".json", "ledger.jsonl", "d", "p.tar.zst"}


# ------------------------------------------------------------------------------------------------------ object stores


def test_a_store_in_s3(of_one_state: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = moto().bucket(monkeypatch, lock=True) + "/kept"
    local = archived(of_one_state[0], tmp_path / "a.tar.zst", reproducible=True)
    there = export(of_one_state[1], f"{url}/a.tar.zst", ArchiveOptions(reproducible=True, retain="90d", hold="case 7"))
    assert there.facts.merkle_root == local.facts.merkle_root and there.entry is not None
    with pytest.raises(DestinationExists):
        export(of_one_state[1], f"{url}/a.tar.zst", ArchiveOptions())
    assert verify(f"{url}/a.tar.zst", against=str(of_one_state[0])).findings == []
    assert ckpttool.inspect(f"{url}/a.tar.zst").step == 3
    restore(f"{url}/a.tar.zst", tmp_path / "d", to="dcp", world_size=3)
    assert ckpttool.diff(tmp_path / "d", of_one_state[0]).equal
    from ckpttool.audit import archive_store

    export(of_one_state[1], f"{url}/b.tar.zst", ArchiveOptions(meta=(("run", "x"),)))
    rows = {r.name: r for r in archive_store.list_archives(url)}
    assert rows["a.tar.zst"].held == ("case 7",) and rows["a.tar.zst"].verified
    done = pruning.prune(url, keep_last=1)
    assert (done.deleted, set(done.kept), set(done.refused)) == ((), {"b.tar.zst"}, {"a.tar.zst"})


def test_the_readers_of_planes_agree_with_numpy() -> None:
    data = os.urandom(byte_planes.BLOCK * 2 + 4096)
    for item in (1, 2, 4, 8, 16):
        stored = bytes(byte_planes.split(data, item))
        want = b"".join(
            np.frombuffer(data[a : a + byte_planes.BLOCK], "u1").reshape(-1, item).T.tobytes()
            for a in range(0, len(data), byte_planes.BLOCK)
        )
        assert stored == want and bytes(byte_planes.merge(stored, item)) == data


def test_a_cast_on_the_way_back_does_not_hide_what_was_altered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"model": {"a": torch.arange(64.0), "b": torch.ones(8)}}, tmp_path / "s.pt")
    from ckpttool.audit import manifest

    encode = manifest.encode_manifest  # the digest of another tensor, in an archive that is whole otherwise
    monkeypatch.setattr(
        manifest, "encode_manifest",
        lambda found, places: encode(
            manifest.Manifest(
                found.tensors, {n: "ab" * 32 if n == "model.a" else d for n, d in found.digests.items()}, found.grouped,
                found.hashes, found.shuffle, found.step,
            ), places,
        ),
    )  # fmt: skip
    export(tmp_path / "s.pt", str(tmp_path / "a.tar.zst"), ArchiveOptions(), verify=False, in_ledger=False)
    monkeypatch.undo()
    for dtype in (None, "bf16"):
        with pytest.raises(Corrupt, match=r"model\.a"):
            restore(str(tmp_path / "a.tar.zst"), tmp_path / "out.pt", to="full", dtype=dtype)
    assert not (tmp_path / "out.pt").exists()


def test_what_no_reader_would_take_is_not_written(tmp_path: Path) -> None:
    torch.save({"model": {"a": torch.ones(8)}, "text": "x" * 20_000_000}, tmp_path / "s.pt")
    with pytest.raises(Unsupported, match=r"values\.json would have"):
        export(tmp_path / "s.pt", str(tmp_path / "a.tar.zst"), ArchiveOptions(), verify=False, in_ledger=False)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["s.pt"]
    torch.save({"model": {"a": torch.ones(8)}, "text": "x" * 10_000_000}, tmp_path / "s.pt")
    archived(tmp_path / "s.pt", tmp_path / "a.tar.zst")
    restore(str(tmp_path / "a.tar.zst"), tmp_path / "b.pt", to="full")
    assert torch.load(tmp_path / "b.pt", weights_only=True)["text"] == "x" * 10_000_000


@pytest.mark.parametrize(
    "odd",
    [
        {"step": 1 << 62}, {"optim": {"param_groups": torch.ones(2)}}, {"a": {"b": torch.ones(1)}, "step": -1},
    ],
    ids=["step", "groups", "names"],
)  # fmt: skip
def test_what_is_exported_encrypted_can_be_read(tmp_path: Path, keys: tuple[Path, str], odd: dict[str, Any]) -> None:
    """Nobody reads it back when it is written, so the records must be right from the start."""
    deep: Any = torch.ones(3)
    for _ in range(70):
        deep = {"x": deep}
    torch.save({"model": {"w": torch.ones(2), "deep": deep}, **odd}, tmp_path / "s.pt")
    archived(tmp_path / "s.pt", tmp_path / "a.tar.zst.age", recipients=(keys[1],))
    restore(str(tmp_path / "a.tar.zst.age"), tmp_path / "b.pt", to="full", identities=[str(keys[0])])
    assert ckpttool.diff(tmp_path / "b.pt", tmp_path / "s.pt").equal


def test_records_that_no_reader_accepts_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(provenance._KINDS, "versions", lambda x: False)
    with pytest.raises(Unsupported, match=r"could not be read again: PROVENANCE.json: its entry 'versions'"):
        archived(small(tmp_path / "s.pt"), tmp_path / "a.tar.zst")
    assert os.listdir(tmp_path) == ["s.pt"]


def test_nothing_replaces_an_archive_on_hold(tmp_path: Path) -> None:
    """Neither another archive, nor a checkpoint or page of any kind."""
    src, store = small(tmp_path / "s.pt"), tmp_path / "ck"
    ckpttool.convert(src, store, to="dcp", world_size=1)
    export(src, str(store / "a.tar.zst"), ArchiveOptions(hold="case 1"))
    before = {p.name: p.read_bytes() for p in store.iterdir()}
    for dst, how in ((store / "a.tar.zst", {"to": "full"}), (store, {"to": "dcp", "world_size": 1})):
        with pytest.raises(DestinationExists, match=r"under legal hold: case 1|in it, which .* would delete"):
            ckpttool.convert(src, dst, force=True, **how)
    with pytest.raises(DestinationExists, match="under legal hold"):
        check_page_file(store / "a.tar.zst", str(src), force=True)
    assert {p.name: p.read_bytes() for p in store.iterdir()} == before


@pytest.mark.parametrize("name", ["x.tar.zst", "x.tar.zst.age", "x.safetensors"])
def test_a_file_is_not_named_like_one_of_another_layout(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"another kind of file than .* Let the name end in \.pt or"):
        ckpttool.convert(small(tmp_path / "s.pt"), tmp_path / name, to="full")


def test_an_encrypted_archive_for_a_url_needs_a_folder_here(tmp_path: Path, keys: tuple[Path, str]) -> None:
    archived(small(tmp_path / "s.pt"), tmp_path / "a.tar.zst.age", recipients=(keys[1],))
    with pytest.raises(UsageError, match=r"scratch='FOLDER'"):
        restore(str(tmp_path / "a.tar.zst.age"), "s3://bucket/x.pt", identities=[str(keys[0])], to="full")


def test_a_damaged_frame_of_many_tensors_is_one_line(tmp_path: Path) -> None:
    torch.save({"model": {f"layer.{i}.weight": torch.randn(8, 8) for i in range(50)}}, tmp_path / "s.pt")
    ckpttool.export(tmp_path / "s.pt", tmp_path / "a.tar.zst")
    raw = bytearray((tmp_path / "a.tar.zst").read_bytes())
    raw[len(raw) // 2] ^= 1
    (tmp_path / "a.tar.zst").write_bytes(raw)
    done = ckpttool_here("audit", "verify", tmp_path / "a.tar.zst")
    assert done.returncode == 4 and done.stdout.count("the frame has CRC32") == 1
    (line,) = done.stdout.splitlines()
    assert line.startswith("wrong: ") and line.endswith(" and 46 more") and "The same frame holds model.layer." in line
    found = json.loads(ckpttool_here("audit", "verify", tmp_path / "a.tar.zst", "--json").stdout)
    assert len({f["tensor"] for f in found["findings"]}) == 50


def test_an_archive_of_a_state_without_tensors(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(2)}, "scheduler": {"last_epoch": 3}}, tmp_path / "in.pt")
    done = ckpttool.convert(tmp_path / "in.pt", tmp_path / "a.tar.zst", only=["scheduler"])
    assert done.verified and not verify(str(tmp_path / "a.tar.zst")).findings
    ckpttool.convert(tmp_path / "a.tar.zst", tmp_path / "out", to="dcp", world_size=1)
    with open_checkpoint(tmp_path / "out") as opened:
        assert {n: v.data for n, v in opened.checkpoint.values.items()} == {"scheduler.last_epoch": 3}
