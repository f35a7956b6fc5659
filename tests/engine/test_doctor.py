"""`doctor` and `convert --salvage`: real files cut at every place where something changes. What is called whole is bit-equal to
what torch or safetensors read from the file before; what is called lost is not in the copy."""

from __future__ import annotations

import json
import shutil
import struct
import zipfile
from pathlib import Path
from typing import Any

import peers
import pytest
import torch
import torch.distributed.checkpoint as dcp
from commands import ckpttool_here
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import get_state_dict

import ckpttool
from ckpttool.engine.copy.fill import silent
from ckpttool.engine.copy.tensor_digests import tensor_digests
from ckpttool.engine.doctor.examine import Diagnosis, doctor
from ckpttool.engine.opening import OpenOptions, open_checkpoint

Tensors = dict[str, torch.Tensor]


def state() -> dict[str, Any]:
    """A state dict with shared, strided, empty and 0-dim tensors."""
    torch.manual_seed(0)
    embed = torch.randn(40, 16)
    model = {
        "embed": embed, "head": embed, "half": torch.randn(30, 7).bfloat16(), "turned": torch.randn(9, 33).t(),
        "rows": torch.randn(50, 8)[10:20], "none": torch.zeros(0, 4), "scale": torch.tensor(3.5), "mask": torch.rand(257) > 0.5,
    }  # fmt: skip
    return {"model": model, "step": torch.tensor(7), "note": "hello"}


def tensors_of(tree: dict[str, Any]) -> Tensors:
    return {f"model.{n}": t for n, t in tree["model"].items()} | {"trainer.step": tree["step"]}


def cuts(path: Path) -> list[int]:
    """Places where something begins or ends in a zip of torch, and their neighbours."""
    size = path.stat().st_size
    out = {0, 1, 29, 30, 64, size - 1, size - 22, size - 23, size // 2}
    data = path.read_bytes()
    with zipfile.ZipFile(path) as z:
        for r in z.infolist():
            name_n, extra_n = struct.unpack("<HH", data[r.header_offset + 26 : r.header_offset + 30])
            begin = r.header_offset + 30 + name_n + extra_n
            end = begin + r.file_size
            for at in (r.header_offset, begin, begin + r.file_size // 2, end, end + 16):
                out |= {at - 1, at, at + 1}
            out.add(r.header_offset + 35)
    return sorted(at for at in out if 0 <= at < size)


def assert_copy(copy: Path, found: Diagnosis, truth: Tensors) -> None:
    """The copy has what `found` calls whole, bit for bit, by torch.load, and nothing that it calls lost."""
    tree = torch.load(copy, weights_only=True)
    flat = {f"model.{n}": t for n, t in tree.get("model", {}).items()}
    flat |= {"trainer.step": tree["step"]} if "step" in tree else {}
    assert len(flat) == found.exact and not flat.keys() & found.missing.keys()
    assert flat.keys() | {n for n in found.missing if n in truth} == truth.keys()
    for name, t in flat.items():
        assert t.dtype == truth[name].dtype and torch.equal(t, truth[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("legacy", [False, True])
def test_a_torch_file_cut_anywhere_gives_exactly_the_tensors_that_are_whole(tmp_path: Path, legacy: bool) -> None:
    whole = tmp_path / "whole.pt"
    tree = state()
    torch.save(tree, whole, _use_new_zipfile_serialization=not legacy)
    data, truth = whole.read_bytes(), tensors_of(tree)
    places = range(0, len(data), 37) if legacy else cuts(whole)
    seen: set[int] = set()
    done_with: set[frozenset[str]] = set()
    for at in places:
        path, copy = tmp_path / "cut.pt", tmp_path / "copy.pt"
        path.write_bytes(data[:at])
        found = doctor(path)
        assert (
            not found.sound and found.findings and found.findings[0].kind in ("cut", "empty", "damaged", "unreadable")
        )
        if found.layout is None:
            assert found.exact == 0
            with pytest.raises(ckpttool.CkpttoolError):
                ckpttool.convert(path, copy)
            continue
        assert path.read_bytes() == data[:at]
        if (lost := frozenset(found.missing)) in done_with and at % 5:
            continue  # the same tensors as at a place before
        done_with.add(lost)
        done = ckpttool_here("convert", path, copy, "--salvage", "--force", "-q")
        assert done.returncode == 0, (at, done.stderr)
        assert_copy(copy, found, truth)
        seen.add(found.exact)
    assert {1, len(truth)} & seen and len(seen) >= 4


def test_every_record_that_is_before_the_cut_is_found(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(1000), "b": torch.arange(2000), "c": torch.arange(10)}, tmp_path / "w.pt")
    data = (tmp_path / "w.pt").read_bytes()
    with zipfile.ZipFile(tmp_path / "w.pt") as z:
        last = z.getinfo("w/data/2").header_offset
    (tmp_path / "w.pt").write_bytes(data[:last])
    found = doctor(tmp_path / "w.pt")
    assert (found.exact, sorted(found.missing)) == (2, ["model.c"])


def test_zeros_instead_of_the_end_are_no_tensors(tmp_path: Path) -> None:
    """A crash of the machine leaves a file of the right size whose last blocks are zeros."""
    tree = {"a": torch.arange(1000), "b": torch.arange(2000), "c": torch.arange(3000)}
    torch.save(tree, tmp_path / "w.pt")
    data = (tmp_path / "w.pt").read_bytes()
    half = len(data) // 2
    (tmp_path / "w.pt").write_bytes(data[:half] + bytes(len(data) - half))
    found = doctor(tmp_path / "w.pt", read_data=True)
    assert not found.sound and found.exact == 2 and list(found.missing) == ["model.c"]


def test_a_record_that_was_overwritten_is_found_by_its_crc32(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(1000), "b": torch.arange(2000)}, tmp_path / "w.pt")
    data = bytearray((tmp_path / "w.pt").read_bytes())
    at = data.index(struct.pack("<2q", 500, 501))
    data[at] ^= 1
    (tmp_path / "w.pt").write_bytes(data[:-30])
    assert doctor(tmp_path / "w.pt").missing == {}
    with_data = doctor(tmp_path / "w.pt", read_data=True)
    assert any("CRC32" in f.text for f in with_data.findings) and not with_data.sound
    assert ckpttool_here("convert", tmp_path / "w.pt", tmp_path / "x.pt", "--salvage").returncode == 4
    assert not (tmp_path / "x.pt").exists()


def test_code_in_the_pickle_of_a_cut_file_is_refused(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (print, ("ran",))

    torch.save({"a": torch.arange(1000), "x": Evil()}, tmp_path / "w.pt")
    (tmp_path / "w.pt").write_bytes((tmp_path / "w.pt").read_bytes()[:-200])
    found = doctor(tmp_path / "w.pt")
    assert found.layout is None and any("never runs" in f.text for f in found.findings)


def test_a_salvaged_copy_says_what_it_is(tmp_path: Path) -> None:
    tree = state()
    torch.save(tree, tmp_path / "w.pt")
    data = (tmp_path / "w.pt").read_bytes()
    (tmp_path / "w.pt").write_bytes(data[: len(data) // 2])
    found = doctor(tmp_path / "w.pt")
    assert found.missing
    for target in ("copy.pt", "copy"):
        words = [] if target.endswith(".pt") else ["--to", "dcp", "-n", "2"]
        done = ckpttool_here("convert", tmp_path / "w.pt", tmp_path / target, *words, "--salvage")
        assert done.returncode == 0 and "salvaged" in done.stderr
        told = json.loads(ckpttool_here("verify", tmp_path / target, "--read-data", "--json").stdout)
        assert told["salvage"] == {"exact": found.exact, "rebuilt": {}, "missing": found.missing}
        assert told["recorded"] == "equal"
        assert "missing" in ckpttool_here("verify", tmp_path / target).stdout
        again = doctor(tmp_path / target)
        assert again.sound and again.missing == found.missing
    record = json.loads((tmp_path / "copy" / "ckpttool.json").read_text())
    assert {n for n, s in record["salvage"]["tensors"].items() if s == "exact"} == record["tensors"].keys()
    ckpttool.convert(tmp_path / "copy", tmp_path / "second.pt")  # what was lost stays known
    assert doctor(tmp_path / "second.pt").missing == found.missing


def test_what_changed_since_it_was_written_is_not_sound(tmp_path: Path) -> None:
    ckpttool.convert(peers.FIXTURES / "hf_llama" / "ckpt", tmp_path / "hf", to="hf")
    assert not doctor(tmp_path / "hf", read_data=True).findings
    (file,) = (tmp_path / "hf").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    found = doctor(tmp_path / "hf", read_data=True)
    assert not found.sound and [f.kind for f in found.findings] == ["differs"]
    (tmp_path / "hf" / "ckpttool.json").write_text("{}")
    found = doctor(tmp_path / "hf", read_data=True)
    assert found.sound and [f.text.partition(":")[0] for f in found.findings] == ["digests were not compared"]


def shards(folder: Path) -> dict[str, Tensors]:
    torch.manual_seed(1)
    folder.mkdir()
    out = {
        f"model-0000{i}-of-00003.safetensors": {f"layers.{i}.{n}": torch.randn(20 + i, 8) for n in "abc"}
        for i in (1, 2, 3)
    }
    for file, tensors in out.items():
        save_file(tensors, folder / file)
    index = {"metadata": {}, "weight_map": {n: f for f, tensors in out.items() for n in tensors}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return out


BAD = {
    "lfs-pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 4000000000\n",
    "web-page": b"<!doctype html>\n<html><head><title>429</title></head></html>",
    "text": b"Access to model x is restricted. You must be authenticated to access it.",
    "empty": b"",
    "zeros": bytes(5000),
    "damaged": b"\x30\0\0\0\0\0\0\0{\"a\":",
}  # fmt: skip


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("kind", [*BAD, "missing", "cut"])
def test_a_shard_that_is_none_leaves_the_others(tmp_path: Path, kind: str, indexed: bool) -> None:
    folder = tmp_path / "m"
    truth = shards(folder)
    if not indexed:
        (folder / "model.safetensors.index.json").unlink()
    name = "model-00002-of-00003.safetensors"
    data = (folder / name).read_bytes()
    if kind == "missing":
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(data[:-900] if kind == "cut" else BAD[kind])
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    found = doctor(folder)
    assert not found.sound and found.findings[0].kind == kind and found.findings[0].file == name
    if kind in ("lfs-pointer", "web-page", "missing", "text"):
        assert any(name in line and ("lfs pull" in line or "hf download" in line) for line in found.next)
    done = ckpttool_here("convert", folder, tmp_path / "out", "--to", "hf", "--salvage")
    assert done.returncode == 0, done.stderr
    got: Tensors = {}
    for p in (tmp_path / "out").glob("*.safetensors"):
        got |= load_file(p)
    whole = {n: t for f, tensors in truth.items() if f != name for n, t in tensors.items()}
    if kind == "cut":
        kept = [n for n in sorted(truth[name]) if f"model.{n}" not in found.missing]
        assert 0 < len(kept) < 3
        whole |= {n: truth[name][n] for n in kept}
    assert got.keys() == whole.keys() and all(torch.equal(got[n], t) for n, t in whole.items())
    assert len(got) == found.exact
    if indexed or kind == "cut":
        assert {n.removeprefix("model.") for n in found.missing} == {n for t in truth.values() for n in t} - got.keys()
    assert before == {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.mark.slow
def test_a_safetensors_file_cut_anywhere(tmp_path: Path) -> None:
    truth = {"a": torch.randn(10, 3), "b": torch.randn(5).bfloat16(), "c": torch.tensor(1.0), "d": torch.zeros(0)}
    save_file(truth, tmp_path / "whole.safetensors")
    data = (tmp_path / "whole.safetensors").read_bytes()
    counts = set()
    for at in range(0, len(data), 3):
        path = tmp_path / "cut.safetensors"
        path.write_bytes(data[:at])
        found = doctor(path)
        assert not found.sound
        if found.layout is None:
            assert at < 8 + struct.unpack("<Q", data[:8])[0] + 4
            continue
        done = ckpttool_here("convert", path, tmp_path / "out.safetensors", "--salvage", "--force", "-q")
        assert done.returncode == 0, done.stderr
        got = load_file(tmp_path / "out.safetensors")
        assert len(got) == found.exact and all(torch.equal(got[n], truth[n]) for n in got)
        assert {f"model.{n}" for n in truth} == {f"model.{n}" for n in got} | found.missing.keys()
        counts.add(len(got))
        told = json.loads(ckpttool_here("verify", tmp_path / "out.safetensors", "--json").stdout).get("salvage")
        assert told == ({"exact": len(got), "rebuilt": {}, "missing": found.missing} if found.missing else None)
        assert doctor(tmp_path / "out.safetensors").missing == found.missing
    assert len(counts) >= 3


def test_a_dcp_folder_without_a_rank_file_or_with_a_cut_one(tmp_path: Path) -> None:
    original = next(o for o in peers.ORIGINALS if o.label == "fsdp2_w3")
    for kind in ("gone", "cut"):
        folder = tmp_path / kind
        shutil.copytree(original.path, folder)
        last = max(folder.glob("__2_*.distcp"))
        data = last.read_bytes()
        last.unlink() if kind == "gone" else last.write_bytes(data[: len(data) // 2])
        found = doctor(folder)
        assert not found.sound and found.exact and found.missing
        assert any(last.name in f.text for f in found.findings)
        done = ckpttool_here("convert", folder, tmp_path / f"{kind}.pt", "--salvage", "--canonical-keys")
        assert done.returncode == 0, done.stderr
        truth = original.truth()
        with ckpttool.open(tmp_path / f"{kind}.pt") as opened:
            assert len(opened) == found.exact
            for name in opened:
                assert name not in found.missing
                if name in truth:
                    assert torch.equal(opened[name].torch(), truth[name]), name


#: Fixtures whose folder or file is one checkpoint by itself.
SOUND = [o for o in peers.ORIGINALS if o.case.startswith(("awkward", "fsdp2", "full", "hf", "zero", "universal"))]


@pytest.mark.parametrize("original", SOUND, ids=lambda o: o.label)
def test_sound_checkpoints_are_sound(original: peers.Original) -> None:
    found = doctor(original.path, config=original.config, read_data=True)
    assert found.sound and not found.missing and not found.findings, found
    assert found.exact


#: Of every trainer and of FSDP1, which needs a description of its flat parameters.
TRAINERS = [
    p for p in sorted((peers.FIXTURES / "trainers").glob("*/ckpt")) if p.parent.name != "accelerate_fsdp1_local"
]
TRAINERS = [next(p.glob("checkpoint-*"), p) for p in TRAINERS if p.parent.name != "torchsnapshot_w1"]
TRAINERS += [p for p in sorted((peers.FIXTURES / "trainers" / "jobs").iterdir()) if p.is_dir()]
TRAINERS += [peers.FIXTURES / "trainers" / name for name in ("lightning_w2", "titan_w2")]


@pytest.mark.parametrize("path", TRAINERS, ids=lambda p: str(p.relative_to(peers.FIXTURES)))
def test_sound_directories_of_trainers_are_sound(path: Path) -> None:
    found = doctor(path, read_data=True)
    known = ["random-states"] if path.parent.name == "accelerate_deepspeed_z3" else []  # rank 1 saved none
    assert found.sound and found.exact and [f.kind for f in found.findings] == known, found


@pytest.mark.parametrize("original", [o for o in peers.FLAT if o.case.startswith("fsdp1")], ids=lambda o: o.label)
def test_sound_files_of_fsdp1_are_sound(original: peers.Original) -> None:
    found = doctor(original.path, read_data=True, **original.how)
    notes = [f for f in found.findings if f.kind == "not-read"] if original.case == "fsdp1_w2_noshard" else []
    assert found.sound and found.exact and found.findings == notes, found


def test_what_needs_a_hint_is_not_called_damaged(tmp_path: Path) -> None:
    """Flat parameters of FSDP1 without a description: nothing can be read, and nothing is wrong."""
    done = ckpttool_here("doctor", peers.FIXTURES / "fsdp1_w3_uop0" / "ckpt")
    assert done.returncode == 3 and "does not say which parameters" in done.stderr
    layout = peers.FIXTURES / "fsdp1_w3_uop0" / "flat_layout.json"
    done = ckpttool_here("doctor", peers.FIXTURES / "fsdp1_w3_uop0" / "ckpt", "--flat-layout", layout)
    assert done.returncode == 0, done.stderr


def test_the_command_prints_and_exits(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(1000), "b": torch.arange(2000)}, tmp_path / "w.pt")
    assert ckpttool_here("doctor", tmp_path / "w.pt").returncode == 0
    data = (tmp_path / "w.pt").read_bytes()
    (tmp_path / "w.pt").write_bytes(data[: len(data) - 8000])
    done = ckpttool_here("doctor", tmp_path / "w.pt")
    assert done.returncode == 4 and "lost: model.b" in done.stdout
    line = next(x for x in done.stdout.splitlines() if x.startswith("next: ckpttool convert"))
    assert ckpttool_here(*line.split()[2:]).returncode == 0
    assert list(torch.load(tmp_path / "w-salvaged.pt")) == ["a"]
    assert json.loads(ckpttool_here("doctor", tmp_path / "w.pt", "--json").stdout)["exact"] == 1
    assert ckpttool_here("doctor", tmp_path / "nothing").returncode == 3


def digests(path: Path, salvage: bool = False) -> dict[str, str]:
    with open_checkpoint(path, OpenOptions(salvage=salvage)) as opened:
        ckpt = opened.locate()
        return tensor_digests(ckpt.tensors, opened.source, ckpt.files, ckpt.records, silent)


#: (fixture, file of it): one of every kind of file that ranks write.
CUT = (
    ("fsdp1_w1", "local_rank0.pt"), ("fsdp1_w2_sharded", "model_world_size_2_rank_1.pt"), ("fsdp2_w2_hfshard", "shard-*1-model*"),
    ("fsdp2_w2_stserial", "__1_0.distcp"), ("fsdp2_w3", "__0_0.distcp"), ("fsdp2_w2_zstd", "__0_0.distcp"),
    ("zero0_w2", "global_step3/mp_rank_00_model_states.pt"), ("zero1_w2", "global_step3/zero_pp_rank_0*_optim_states.pt"),
    ("zero3_w2_fp16", "global_step3/zero_pp_rank_1*_optim_states.pt"),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("case", "file"), CUT, ids=lambda x: x.partition("/")[0] if isinstance(x, str) else "")
def test_what_is_whole_in_a_folder_with_a_cut_file_is_what_it_was(tmp_path: Path, case: str, file: str) -> None:
    truth = digests(peers.FIXTURES / case / "ckpt")
    kept = set()
    for percent in (35, 66, 90, 99):
        folder = tmp_path / str(percent)
        shutil.copytree(peers.FIXTURES / case / "ckpt", folder)
        (path,) = folder.glob(file)
        data = path.read_bytes()
        path.write_bytes(data[: len(data) * percent // 100])
        found = doctor(folder)
        assert not found.sound and any(path.name in f.text for f in found.findings)
        if found.layout is None or any("--only" in line for line in found.next):
            continue
        whole = digests(folder, salvage=True)
        assert len(whole) == found.exact and not whole.keys() & found.missing.keys()
        assert {n: truth[n] for n in whole} == whole
        kept.add(len(whole))
    assert kept


def train(folder: Path, steps: tuple[int, ...], inside: str = "") -> dict[int, Tensors]:
    """Saves of one run by torch itself, in folders step-N."""
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(12, 20), torch.nn.Linear(20, 12))
    optimizer = torch.optim.AdamW(model.parameters())
    out = {}
    for step in range(1, max(steps) + 1):
        model(torch.randn(4, 12)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in steps:
            state = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
            dcp.save({**state, "step": torch.tensor(step)}, checkpoint_id=folder / f"step-{step}" / inside)
            out[step] = {f"model.{n}": t.clone() for n, t in model.state_dict().items()}
    return out


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("inside", ["", "dcp"])
def test_a_folder_without_metadata_is_rebuilt_with_that_of_another_step(tmp_path: Path, inside: str) -> None:
    truth = train(tmp_path, (3, 5, 9), inside)
    broken = tmp_path / "step-5" / inside
    (broken / ".metadata").unlink()
    before = {p.name: p.read_bytes() for p in broken.iterdir()}
    found = doctor(broken)
    assert not found.sound and found.exact == 0 and not found.missing and len(found.rebuilt) == 4 + 12 + 1
    assert all("step-3" in how for how in found.rebuilt.values())
    done = ckpttool_here("convert", broken, tmp_path / "new", "--to", "dcp", "-n", "1", "--salvage")
    assert done.returncode == 0, done.stderr
    with ckpttool.open(tmp_path / "new") as opened:
        for name, t in truth[5].items():
            assert torch.equal(opened[name].torch(), t) and not torch.equal(t, truth[3][name])
    record = json.loads((tmp_path / "new" / "ckpttool.json").read_text())
    assert record["tensors"] == {} and all(s.startswith("rebuilt: ") for s in record["salvage"]["tensors"].values())
    told = json.loads(ckpttool_here("verify", tmp_path / "new", "--read-data", "--json").stdout)
    assert told["salvage"]["exact"] == 0 and len(told["salvage"]["rebuilt"]) == 17 and "recorded" not in told
    assert before == {p.name: p.read_bytes() for p in broken.iterdir()}


@pytest.mark.filterwarnings("ignore")
def test_the_metadata_of_another_model_rebuilds_nothing(tmp_path: Path) -> None:
    train(tmp_path, (3, 5))
    (tmp_path / "step-5" / ".metadata").unlink()
    shutil.rmtree(tmp_path / "step-3")
    for size in (12, 400):  # the first has files of the same sizes with a tensor of another shape in them
        sd = {"w": torch.zeros(size, 4)}
        dcp.save(sd, checkpoint_id=tmp_path / "step-3")
        if size == 12:
            a, b = (tmp_path / f"step-{n}" / "__0_0.distcp" for n in (3, 5))
            a.write_bytes(b.read_bytes())
        found = doctor(tmp_path / "step-5")
        assert not found.sound and found.layout is None and found.exact == 0 and not found.rebuilt
        assert any(f.kind == "no-metadata" for f in found.findings)
        assert ckpttool_here("convert", tmp_path / "step-5", tmp_path / "x.pt", "--salvage").returncode in (3, 4)
        assert not (tmp_path / "x.pt").exists()


@pytest.mark.filterwarnings("ignore")
def test_a_metadata_file_that_was_not_renamed_is_its_own(tmp_path: Path) -> None:
    truth = train(tmp_path, (5,))
    (tmp_path / "step-5" / ".metadata").rename(tmp_path / "step-5" / ".metadata.tmp")
    found = doctor(tmp_path / "step-5")
    assert not found.sound and found.exact == 17 and not found.rebuilt and not found.missing
    assert ckpttool_here("convert", tmp_path / "step-5", tmp_path / "x.pt", "--salvage").returncode == 0
    loaded = torch.load(tmp_path / "x.pt")["model"]
    assert all(torch.equal(loaded[n.removeprefix("model.")], t) for n, t in truth[5].items())
