"""The command line as a person or a script uses it: exit codes, messages, JSON."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import ckpttool_here
from peers import FIXTURES, REPOSITORY, difference, files_of, load_dcp, load_full, load_hf

import ckpttool
from ckpttool.errors import Interrupted

LLAMA = FIXTURES / "hf_llama" / "ckpt"
GROUPS = FIXTURES / "fsdp2_w2_groups" / "ckpt"
W3 = FIXTURES / "fsdp2_w3" / "ckpt"


run = ckpttool_here


def started(*args: object) -> subprocess.CompletedProcess[str]:
    """The program as a process of its own."""
    return subprocess.run(
        [Path(sys.executable).parent / "ckpttool", *map(str, args)], capture_output=True, text=True, cwd=REPOSITORY
    )


@pytest.mark.parametrize(
    "args",
    [["digest", W3], ["digest", W3, "--json"], ["inspect"], ["inspect", REPOSITORY / "docs"], ["diff", W3, LLAMA, "--json"],
     ["inspect", W3, "--no-such-option"], ["layouts"], ["digest", REPOSITORY / "nowhere", "--json"]],
)  # fmt: skip
def test_the_program_does_in_a_process_of_its_own_what_it_does_in_that_of_the_tests(args: list[object]) -> None:
    here, there = run(*args), started(*args)
    assert (here.returncode, here.stdout, here.stderr) == (there.returncode, there.stdout, there.stderr)


def fails(code: int, *args: object) -> str:
    """What stderr says when a command ends with an exit code; one error, no traceback."""
    done = run(*args)
    assert done.returncode == code, (done.returncode, done.stderr)
    assert "Traceback" not in done.stderr
    assert "bug of ckpttool" not in done.stderr
    return done.stderr


def says(*args: object) -> Any:
    """The JSON a command prints."""
    done = run(*args, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("option", ["--sub-group-size", "--zero-stage"])
def test_a_zero_is_a_value_and_not_an_option_left_out(tmp_path: Path, option: str) -> None:
    to = "zero3" if option == "--sub-group-size" else "universal"
    assert option[2:].split("-")[-1] in fails(2, "convert", W3, tmp_path / "out", "--to", to, option, 0)
    assert "this conversion writes dcp" in fails(2, "convert", W3, tmp_path / "out", "--to", "dcp", option, 0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["convert", W3, "OUT.pt", "-n", "8"], "--world-size 8 does not apply to full, which is one file. Leave it out"),
        (["convert", W3, "OUT.tar.zst", "-n", "8"], "--world-size 8 does not apply to audit, which is one file"),
        (["convert", W3, "OUT", "--to", "hf", "-n", "8"], "to hf, whose files are the same for any number of ranks"),
        (["convert", W3, "OUT", "--to", "universal", "-n", "8"], "choose one of: dcp, zero3, zero2, zero1, fsdp1, accelerate, trainer,"),
        (["convert", W3, "OUT", "--to", "zero3", "--wrap", "**"], "--wrap does not apply to dcp -> zero3; it is used to read fsdp1"),
        (["convert", LLAMA, "OUT", "--to", "zero3", "-n", "2", "--flat-layout", "f"], "--flat-layout does not apply to hf -> zero3"),
        (["convert", W3, "OUT", "--to", "dcp", "--tag", "x"], "--tag does not apply to dcp -> dcp; it is used to read zero3"),
        (["verify", W3, "--tag", "x"], "--tag does not apply to dcp;"),
        (["diff", W3, W3, "--wrap", "x"], "--wrap does not apply to dcp | dcp;"),
    ],
)  # fmt: skip
def test_an_option_that_neither_source_nor_target_uses_is_refused(args: list[Any], words: str, tmp_path: Path) -> None:
    assert words in fails(2, *(str(a).replace("OUT", str(tmp_path / "out")) for a in args))
    assert list(tmp_path.iterdir()) == []


def test_an_option_that_one_side_uses_is_taken(tmp_path: Path) -> None:
    assert run("convert", LLAMA, tmp_path / "a", "--to", "dcp", "-n", "2", "--config", LLAMA).returncode == 0
    assert run("convert", W3, tmp_path / "b", "--to", "zero3", "-n", "2", "--like", W3).returncode == 0
    assert run("diff", LLAMA, tmp_path / "a", "--config", LLAMA).returncode == 0


def test_what_is_true_of_the_model_may_be_given_where_it_is_not_needed(tmp_path: Path) -> None:
    """A script gives --config and --like for every checkpoint of a run; a note says where they were not looked at."""
    for command, words in (
        (["convert", LLAMA, tmp_path / "a", "--to", "hf", "--like", W3], "--like was not needed for hf -> hf"),
        (["inspect", LLAMA, "--like", W3], "--like was not needed for hf"),
        (
            ["convert", FIXTURES / "zero3_w3_groups" / "ckpt", tmp_path / "b.pt", "--config", LLAMA],
            "--config was not needed",
        ),
    ):
        done = run(*command)
        assert done.returncode == 0 and words in done.stderr + done.stdout, done.stderr


# ------------------------------------------------------------------------------------------------------------ JSON


def test_every_command_prints_json_that_parses(tmp_path: Path) -> None:
    out = says("convert", GROUPS, tmp_path / "out.pt", "--to", "full")
    assert (out["layout_from"], out["layout_to"], out["tensors"], out["verified"]) == ("dcp", "full", 53, True)
    assert says("digest", tmp_path / "out.pt")["digest"] == out["digest"]
    assert len(says("digest", tmp_path / "out.pt", "--tensors")["tensors"]) == 53
    found = says("inspect", GROUPS)
    assert (found["layout"], found["ranks"], found["step"], found["tensors"]) == ("dcp", 2, 3, 53)
    assert found["optimizer"]["groups"][1]["lr"] == 0.000625
    assert len(says("inspect", GROUPS, "--tree")["names"]) == 53
    (row,) = says("inspect", GROUPS, "--tensor", "model.lm_head.weight")
    assert [c["shape"] for c in row["where"]] == [[66, 36], [65, 36]]
    assert says("diff", GROUPS, tmp_path / "out.pt")["equal"] is True
    assert says("verify", GROUPS, "--read-data", "--against", tmp_path / "out.pt")["against"]["verdict"] == "equal"
    assert [x["name"] for x in says("layouts")][:3] == ["dcp", "full", "hf"]
    plan = says("convert", GROUPS, tmp_path / "no", "--to", "dcp", "-n", "3", "--dry-run")
    assert [f["name"] for f in plan["files"]] == ["__0_0.distcp", "__1_0.distcp", "__2_0.distcp", ".metadata"]


KEYS = {
    name.strip("`"): set(re.findall(r"`(\w+)`", keys))
    for name, keys in re.findall(
        r"^\| (`[^|]+`) \| (.+) \| `ckpttool", (REPOSITORY / "docs/reference/json.md").read_text(), re.MULTILINE
    )
}


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("convert", ["convert", W3, "OUT"]), ("convert --dry-run", ["convert", W3, "OUT", "--dry-run"]), ("inspect", ["inspect", W3]),
        ("diff", ["diff", W3, W3]), ("compare", ["compare", W3, W3, "--config", W3.parent / "hf_ref"]), ("verify", ["verify", W3, "--read-data", "--against", W3]), ("digest", ["digest", W3]), ("clean", ["clean", "OUT"]),
    ],
)  # fmt: skip
def test_the_keys_of_json_are_those_in_the_documentation(name: str, args: list[Any], tmp_path: Path) -> None:
    found = set(says(*(str(a).replace("OUT", str(tmp_path / "out.pt")) for a in args)))
    optional = {"recorded", "notes", "tensors", "names", "folded", "salvage"}
    assert found <= KEYS[name] and KEYS[name] - found <= optional, KEYS[name] ^ found


def test_a_dry_run_says_what_the_run_then_does(tmp_path: Path) -> None:
    plan = says("convert", GROUPS, tmp_path / "out", "--to", "hf", "--dry-run")
    done = says("convert", GROUPS, tmp_path / "out", "--to", "hf")
    same = (
        "source",
        "destination",
        "layout_from",
        "layout_to",
        "world_size",
        "tensors",
        "source_bytes",
        "written_bytes",
        "dropped",
        "not_read",
    )
    assert {k: plan[k] for k in same} == {k: done[k] for k in same}
    assert (plan["from"], plan["to"], plan["destination_bytes"]) == ("dcp", "hf", done["written_bytes"])
    model = says("inspect", GROUPS)["components"]["model"]["bytes"]
    assert plan["read_bytes"] == model + plan["written_bytes"]
    assert plan["seconds"] == round((plan["read_bytes"] + plan["written_bytes"]) / plan["bytes_per_second"], 3)
    without = says("convert", GROUPS, tmp_path / "x", "--to", "hf", "--dry-run", "--no-verify", "--max-memory", "100MB")
    assert without["read_bytes"] == model and 90e6 < without["memory_bytes"] <= 100e6
    shown = run("convert", GROUPS, tmp_path / "x", "--to", "hf", "--dry-run").stdout
    assert re.search(
        r"reads [\d.]+ .B, writes [\d.]+ .B: about 1 s if the disks do 1\.0 GB/s; memory: at most 1\d\d\.\d MB", shown
    )
    assert "MB are needed" in fails(
        2, "convert", GROUPS, tmp_path / "x", "--to", "hf", "--dry-run", "--max-memory", "1MB"
    )


def test_an_error_is_json_too_where_json_was_asked_for(tmp_path: Path) -> None:
    done = run("inspect", tmp_path / "nothing", "--json")
    assert done.returncode == 3
    error = json.loads(done.stdout)["error"]
    assert (error["kind"], error["exit_code"]) == ("NotRecognised", 3)
    assert str(tmp_path / "nothing") in error["message"]


# ------------------------------------------------------------------------------------------------------ exit codes


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["convert", W3, "OUT"], "Cannot infer the layout"),
        (["convert", W3, "OUT", "--to", "nonsense"], "Unknown layout 'nonsense'. Choose one of: dcp"),
        (["convert", W3, "OUT", "--to", "dcp", "--world-size", "0"], "--world-size"),
        (["convert", LLAMA, "OUT", "--to", "dcp"], "--world-size is needed"),
        (["convert", W3, "OUT.pt", "--only", "scheduler"], "the checkpoint holds model, optim, trainer"),
        (["convert", W3, "OUT.pt", "--dtype", "int8"], "Cannot cast to 'int8': it is not a floating-point"),
        (["convert", W3, "OUT.pt", "--cast", "model.*"], "write GLOB=DTYPE"),
        (["convert", W3, "OUT", "--to", "hf", "--max-shard-size", "many"], "'many' is not a size"),
        (["convert", W3, "OUT", "--to", "hf", "--max-memory", "1MB"], "MB are needed"),
        (
            ["inspect", W3, "--tensor", "nothing*"],
            "--tensor 'nothing*': no tensor matches; the first is 'model.model.embed_tokens.weight'",
        ),
        (
            ["inspect", W3, "--tensor", "lm_head"],
            "no tensor matches; 4 names contain it, first model.lm_head.weight: use '*lm_head*'",
        ),
        (["inspect", W3, "--tensor", "model.lm_hed.weight"], "did you mean 'model.lm_head.weight'?"),
        (["convert", W3, "OUT", "--to", "hf", "--max-shard-size", "5"], "'5' would be 5 bytes; write 5GB or 5MB"),
        (
            ["convert", W3, "OUT", "--for", "hf"],
            "Unknown trainer 'hf'. Choose one of: accelerate, trainer (Hugging Face Trainer, TRL)",
        ),
        (["convert", W3, "-", "--to", "full"], "cannot be written to standard output"),
        (["convert", W3, "~/out.pt"], "A ~ in quotes is not expanded"),
        (
            ["convert", W3, LLAMA / "config.json" / "out.pt"],
            "config.json is not a folder, so nothing can be written in it",
        ),
        (["convert", W3, "OUT/none/x.pt"], "does not exist. Create it first"),
        (["convert", W3, W3, "--to", "hf"], "is the source"),
        (["convert", W3, W3 / "out", "--to", "hf"], "is inside the source"),
        (["convert", W3, W3.parent, "--to", "hf"], "contains the source"),
        (["audit", "restore", W3, "OUT", "--to", "dcp"], "is a folder; an archive is a file"),
        (["audit", "ledger", "show", LLAMA / "config.json"], "config.json is not a folder; a store is a folder"),
        (["watch", W3.parent, "--once", "--state", LLAMA / "config.json"], "Give a folder of yours: --state"),
        (["inspect"], "PATH"),
        (["nonsense"], "nonsense"),
    ],
)
def test_2_is_a_command_line_that_makes_no_sense(args: list[object], words: str, tmp_path: Path) -> None:
    given = [str(a).replace("OUT", str(tmp_path / "out")) for a in args]
    assert words in fails(2, *given)
    assert list(tmp_path.iterdir()) == []


def test_3_is_what_no_layout_knows_with_what_each_looked_for_and_what_lies_below(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "log.txt").write_text("x")
    said = fails(3, "inspect", tmp_path / "runs")
    for words in ("dcp  .*no .metadata, no [*].distcp", "full  .*one .pt file", "hf  .*no [*].safetensors"):
        assert re.search(rf"(?m)^  {words}", said)
    shutil.copytree(W3, tmp_path / "runs" / "step-3")
    said = fails(3, "verify", tmp_path / "runs")
    assert "step 3  step-3  dcp" in said and f"The newest complete one is {tmp_path / 'runs' / 'step-3'}" in said
    (tmp_path / "x.txt").write_text("x")
    assert "neither a zip nor a legacy torch.save file" in fails(3, "inspect", tmp_path / "x.txt")
    assert "nowhere: no such file or folder.\nmore: ckpttool explain CKPT03" in fails(
        3, "inspect", tmp_path / "nowhere"
    )
    assert f"Did you mean {tmp_path / 'runs'}?" in fails(3, "inspect", tmp_path / "rums")
    (tmp_path / "link").symlink_to("/nonexistent")
    assert "It is a link to /nonexistent, where nothing is" in fails(3, "inspect", tmp_path / "link")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("org/llama-3", "A repository on the Hugging Face Hub is hf://org/llama-3."),
        ("https://huggingface.co/org/llama-3", "its files are at hf://org/llama-3."),
        ("https://huggingface.co/org/llama-3/tree/bf16", "its files are at hf://org/llama-3@bf16."),
        ("~/run", "A ~ in quotes is not expanded"),
        ("-", "standard input"),
    ],
)
def test_3_is_a_path_that_means_something_else_and_the_error_says_what(path: str, words: str) -> None:
    assert words in fails(3, "inspect", path)


def test_a_layout_that_is_only_read_is_refused_with_those_that_are_written(tmp_path: Path) -> None:
    said = fails(3, "convert", W3, tmp_path / "out", "--to", "skyrl")
    assert "reads skyrl, but does not write it. Choose one of: dcp, full" in said and "olmo" not in said


def test_3_is_an_interrupted_save_and_a_file_that_holds_no_state_dict(tmp_path: Path) -> None:
    shutil.copytree(W3, tmp_path / "a")
    (tmp_path / "a" / ".metadata").unlink()
    assert "the save was interrupted before its end" in fails(3, "inspect", tmp_path / "a")
    torch.save([1, 2, 3], tmp_path / "list.pt")
    assert "not a state dict" in fails(3, "inspect", tmp_path / "list.pt")


def test_4_names_file_tensor_and_numbers_of_a_copy_that_is_incomplete(tmp_path: Path) -> None:
    shutil.copytree(W3, tmp_path / "a")
    file = tmp_path / "a" / "__1_0.distcp"
    with file.open("r+b") as f:
        f.truncate(200_000)
    said = fails(4, "convert", tmp_path / "a", tmp_path / "out.pt", "--to", "full")
    assert "__1_0.distcp" in said
    assert '"optim.state.' in said
    assert "the file ends at 200000" in said
    file.unlink()
    assert "__1_0.distcp is missing" in fails(4, "inspect", tmp_path / "a")
    shutil.copytree(LLAMA, tmp_path / "h")
    with (tmp_path / "h" / "model.safetensors").open("r+b") as f:
        f.truncate(100_000)
    assert "model.safetensors has 100000 bytes" in fails(4, "verify", tmp_path / "h")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "h"]


@pytest.mark.parametrize("name", ["fsdp2_w3/ckpt/__1_0.distcp", "full_w1/ckpt/fqn.pt"])
def test_4_is_one_flipped_bit_where_the_file_carries_checksums(name: str, tmp_path: Path) -> None:
    source = FIXTURES / name
    target = tmp_path / source.name if source.suffix == ".pt" else tmp_path / "ckpt"
    if source.suffix == ".pt":
        shutil.copy(source, target)
    else:
        shutil.copytree(source.parent, target)
    file = target if target.is_file() else target / source.name
    data = bytearray(file.read_bytes())
    at = data.index(load_first_bytes(source))
    data[at] ^= 1
    file.write_bytes(data)
    said = fails(4, "convert", target, tmp_path / "out", "--to", "dcp", "-n", "2")
    assert file.name in said
    assert "CRC32" in said
    assert not (tmp_path / "out").exists()
    assert "CRC32" in fails(4, "verify", target, "--read-data")


def load_first_bytes(source: Path) -> bytes:
    """16 bytes in the middle of the tensor data of a fixture."""
    case = FIXTURES / source.relative_to(FIXTURES).parts[0]
    from safetensors.torch import load_file

    t = load_file(case / "truth.safetensors")["model.model.embed_tokens.weight"]
    rows = torch.chunk(t, 3)[1] if source.suffix != ".pt" else t
    return bytes(rows.contiguous().view(torch.uint8).flatten()[:16].numpy().tobytes())


def test_5_is_a_difference(tmp_path: Path) -> None:
    assert run("diff", W3, FIXTURES / "fsdp2_w1" / "ckpt", "-q").returncode == 5
    assert "not equal to" in fails(5, "verify", W3, "--against", FIXTURES / "fsdp2_w1" / "ckpt")
    assert run("convert", LLAMA, tmp_path / "out", "--to", "hf").returncode == 0
    file = tmp_path / "out" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    said = fails(5, "verify", tmp_path / "out", "--read-data")
    assert "ckpttool.json" in said
    assert 'first "model.' in said


def test_6_is_a_destination_that_exists(tmp_path: Path) -> None:
    (tmp_path / "out.pt").write_text("old")
    assert "--force" in fails(6, "convert", W3, tmp_path / "out.pt", "--to", "full")
    assert (tmp_path / "out.pt").read_text() == "old"


class Canary:
    """What runs a command when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        import os

        return os.system, (f"touch {self.path}",)


def test_7_is_a_file_that_would_run_code_and_nothing_runs(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(2)}, "x": Canary(tmp_path / "canary")}, tmp_path / "evil.pt")
    for command in (["inspect"], ["verify"], ["digest"]):
        assert "never runs" in fails(7, *command, tmp_path / "evil.pt")
    assert "system" in fails(7, "convert", tmp_path / "evil.pt", tmp_path / "out", "--to", "dcp", "-n", "2")
    assert [p.name for p in tmp_path.iterdir()] == ["evil.pt"]


def test_8_is_a_disk_that_is_too_small(tmp_path: Path) -> None:
    elements = 1 << 41  # 8 TB, as a hole
    head = json.dumps({"w": {"dtype": "F32", "shape": [elements], "data_offsets": [0, 4 * elements]}}).encode()
    with (tmp_path / "huge.safetensors").open("wb") as f:
        f.write(len(head).to_bytes(8, "little") + head)
        f.truncate(8 + len(head) + 4 * elements)
    assert "bytes free" in fails(8, "convert", tmp_path / "huge.safetensors", tmp_path / "out.pt", "--to", "full")
    assert [p.name for p in tmp_path.iterdir()] == ["huge.safetensors"]


def test_exit_codes_stand_in_the_help() -> None:
    text = " ".join(run("--help").stdout.replace("│", " ").split())
    for words in ("4 incomplete or corrupt", "6 destination exists or locked", "130 interrupted (resumable)"):
        assert words in text


# --------------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize("size", ["40KB", "40000", "0.04MB", "40 kb", "40000b", "39.0625KiB", "0.00004gb"])
def test_sizes_are_read_as_people_write_them(size: str, tmp_path: Path) -> None:
    plan = says("convert", W3, tmp_path / "out", "--to", "hf", "--max-shard-size", size, "--dry-run")
    shards = [f["name"] for f in plan["files"] if f["name"].endswith(".safetensors")]
    assert shards == [f"model-0000{i}-of-00004.safetensors" for i in (1, 2, 3, 4)]


@pytest.mark.parametrize("size", ["-5GB", "5XB", "GB", "5GB6", "1e3"])
def test_what_is_no_size_is_refused(size: str, tmp_path: Path) -> None:
    assert "is not a size" in fails(2, "convert", W3, tmp_path / "out", "--to", "hf", f"--max-shard-size={size}")


def test_a_dry_run_counts_the_memory_of_every_worker(tmp_path: Path) -> None:
    def planned(*words: object, to: str = "dcp", out: str = "out") -> dict[str, Any]:
        return says("convert", GROUPS, tmp_path / out, "--to", to, "--dry-run", *words)

    one, four = planned("--workers", 1), planned("--workers", 4)
    each = one["memory_bytes"]
    assert one["workers"] is None and planned()["workers"] is None, "few bytes"
    assert four["workers"] == {"name": "4 processes", "count": 4, "memory_bytes": each}
    assert 4 * each < four["memory_bytes"] < 5 * each
    assert planned("--workers", 4, "--max-memory", "100MB")["workers"]["memory_bytes"] <= 100_000_000
    there = planned("--workers", "dask:tcp://10.0.0.1:8786")  # which is not asked
    assert there["workers"] == {"name": "dask:tcp://10.0.0.1:8786", "count": None, "memory_bytes": each}
    assert there["memory_bytes"] < each
    archive = planned("--workers", 4, to="audit", out="a.tar.zst")
    assert archive["workers"] is None and "workers would not be used: an archive" in archive["notes"][-1]
    fails(2, "convert", GROUPS, tmp_path / "out", "--to", "dcp", "--dry-run", "--workers", "many")
    shown = run("convert", GROUPS, tmp_path / "out", "--to", "dcp", "--dry-run", "--workers", 4).stdout
    assert re.search(r"memory: at most \d+\.\d MB in all, \d+\.\d MB in each of 4 processes", shown)


@pytest.mark.parametrize(
    "to", ["dcp", "full", "hf", "zero3", "zero1", "universal", "fsdp1", "audit", "torch_checkpointing"]
)
@pytest.mark.parametrize("source", ["fsdp2_w2_groups", "fsdp2_w3_tied_bf16", "hf_tied", "fsdp1_w2_tied"])
def test_a_dry_run_counts_what_the_run_counts_and_no_two_notes_contradict_each_other(
    tmp_path: Path, source: str, to: str
) -> None:
    out = tmp_path / {"full": "x.pt", "audit": "x.tar.zst"}.get(to, "x")
    ranks = [] if to in ("hf", "full", "audit", "universal") else ["-n", 2]
    words = ["convert", FIXTURES / source / "ckpt", out, "--to", to, "--drop", *ranks, "--json"]
    plan, done = run(*words, "--dry-run"), run(*words)
    if plan.returncode:
        assert (plan.returncode, plan.stdout) == (done.returncode, done.stdout)
        return
    a, b = json.loads(plan.stdout), json.loads(done.stdout)
    same = ("tensors", "dropped", "world_size", "source_bytes", "not_read")
    assert {k: a[k] for k in same} == {k: b[k] for k in same}
    said: dict[str, set[str]] = {}
    for text in b["notes"]:
        for name in re.findall('"([^"]+)"', text):
            said.setdefault(name, set()).update(w for w in ("both names are kept", "written once") if w in text)
    assert all(len(words) < 2 for words in said.values()), b["notes"]


def test_dry_run_writes_nothing_and_names_the_files(tmp_path: Path) -> None:
    done = run("convert", GROUPS, tmp_path / "out", "--to", "hf", "--dry-run")
    assert done.returncode == 0
    assert "model.safetensors" in done.stdout
    assert re.search(r"left behind: \d+ entries: optim \(\d+, ", done.stderr)
    assert list(tmp_path.iterdir()) == []


def test_dry_run_fails_where_the_run_would_and_says_how_much_is_free(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "x").write_text("x")
    for args, code in (
        ([GROUPS, tmp_path / "there", "--to", "hf"], 6), ([GROUPS, tmp_path / "there", "--to", "hf", "--force"], 6),
        ([GROUPS, tmp_path / "none" / "x", "--to", "hf"], 2), ([GROUPS, GROUPS, "--to", "hf"], 2),
    ):  # fmt: skip
        assert fails(code, "convert", *args, "--dry-run") == fails(code, "convert", *args)
    assert says("convert", GROUPS, tmp_path / "out", "--to", "hf", "--dry-run")["free_bytes"] > 1 << 20
    assert "free there" in run("convert", GROUPS, tmp_path / "out", "--to", "hf", "--dry-run").stdout
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "args", [["convert", "a", "b", "--world_size", "8"], ["convert"], ["inspct", "a"], ["convert", "a", "b", "-n", "x"]], ids=" ".join
)  # fmt: skip
def test_an_error_of_the_command_line_is_json_too(args: list[str]) -> None:
    done = run(*args, "--json")
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["exit_code"], error["kind"]) == (2, 2, "UsageError")
    assert error["message"] and "Traceback" not in done.stderr


def test_quiet_says_nothing_on_stderr(tmp_path: Path) -> None:
    for args in (["convert", W3, tmp_path / "out.pt", "--to", "full"], ["digest", W3], ["verify", W3, "--read-data"],
                 ["diff", W3, W3], ["convert", W3, tmp_path / "hf", "--to", "hf"]):  # fmt: skip
        assert run(*args, "-q").stderr == ""


def test_only_takes_some_components(tmp_path: Path) -> None:
    assert run("convert", GROUPS, tmp_path / "out.pt", "--only", "model,rng").returncode == 0
    tree, whole = load_full(tmp_path / "out.pt"), load_dcp(GROUPS)
    assert tree.keys() == {"model", "rng"}
    assert difference(tree["model"], whole["model"]) == []
    assert difference(tree["rng"]["1"], whole["rng"]["1"]) == []


def test_dtype_casts_weights_as_torch_does_and_leaves_the_optimizer(tmp_path: Path) -> None:
    assert run("convert", W3, tmp_path / "out.pt", "--dtype", "bf16").returncode == 0
    tree, whole = load_full(tmp_path / "out.pt"), load_dcp(W3)
    assert difference(tree["model"], {k: t.bfloat16() for k, t in whole["model"].items()}) == []
    for fqn, slots in whole["optim"]["state"].items():
        assert difference(tree["optim"]["state"][fqn], slots) == []


def test_cast_takes_globs_of_which_the_last_counts_and_dtype_leaves_integers_alone(tmp_path: Path) -> None:
    source = FIXTURES / "awkward_w3" / "ckpt"
    rules = ["--cast", "model.*.weight=fp16", "--cast", "model.blocks.*=fp64", "--cast", "*.exp_avg=bf16"]
    assert run("convert", source, tmp_path / "out", "--to", "dcp", "-n", "2", "--dtype", "bf16", *rules).returncode == 0
    tree, whole = load_dcp(tmp_path / "out"), load_dcp(source)
    for name, t in whole["model"].items():
        to = (
            torch.float64
            if name.startswith("blocks.")
            else torch.float16
            if name.endswith(".weight")
            else torch.bfloat16
        )
        wanted = t.to(to) if t.is_floating_point() else t
        assert difference({name: tree["model"][name]}, {name: wanted}) == []
    for fqn, slots in whole["optim"]["state"].items():
        wanted_slots = {**slots, "exp_avg": slots["exp_avg"].bfloat16()}
        assert difference(tree["optim"]["state"][fqn], wanted_slots) == []


def dcp_with_a_namespace(path: Path) -> argparse.Namespace:
    import torch.distributed.checkpoint as dcp

    args = argparse.Namespace(lr=0.1, betas=(0.9, 0.95), name="größe", layers=[1, 2], nested=argparse.Namespace(x=None))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": {"w": torch.ones(5, 3)}, "args": args, "step": 3}, checkpoint_id=path, no_dist=True)
    return args


def test_what_the_target_cannot_hold_needs_drop_and_dcp_carries_it_unchanged(tmp_path: Path) -> None:
    args = dcp_with_a_namespace(tmp_path / "in")
    said = fails(3, "convert", tmp_path / "in", tmp_path / "out.pt", "--to", "full")
    assert '"extra.args"' in said
    assert "argparse.Namespace" in said
    assert "--drop" in said
    assert not (tmp_path / "out.pt").exists()
    done = run("convert", tmp_path / "in", tmp_path / "out.pt", "--to", "full", "--drop")
    assert done.returncode == 0
    assert re.search(r"left behind: 1 entry: extra \(1\): .*argparse\.Namespace", done.stderr)
    assert load_full(tmp_path / "out.pt").keys() == {"model", "step"}
    assert run("convert", tmp_path / "in", tmp_path / "out", "--to", "dcp", "-n", "3").returncode == 0
    tree = load_dcp(tmp_path / "out")
    assert tree["args"] == args
    assert type(tree["args"].nested) is argparse.Namespace
    assert type(tree["args"].betas) is tuple
    assert tree["step"] == 3


def test_hf_holds_weights_only_and_says_what_it_leaves_behind(tmp_path: Path) -> None:
    done = run("convert", GROUPS, tmp_path / "out", "--to", "hf")
    assert done.returncode == 0
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("left behind: "))
    for words in ("optim (", "rng (", "scheduler (", ": hf holds weights only; -v names them"):
        assert words in line
    named = run("convert", GROUPS, tmp_path / "out", "--to", "hf", "--force", "--verbose").stderr
    assert "  optim.state.lm_head.weight.exp_avg, " in named and "-v" not in named
    assert difference(load_hf(tmp_path / "out"), load_dcp(GROUPS)["model"]) == []


def test_like_names_the_parameters_of_an_optimizer_that_numbers_them(tmp_path: Path) -> None:
    w = [torch.nn.Parameter(torch.full((4, 4), float(i))) for i in range(3)]
    optimizer = torch.optim.AdamW([{"params": [w[2]]}, {"params": [w[0], w[1]], "lr": 0.5}])
    sum((p * p).sum() for p in w).backward()
    optimizer.step()
    model = {n: p.detach() for n, p in zip("abc", w, strict=True)}
    torch.save({"model": model, "optimizer": optimizer.state_dict()}, tmp_path / "ids.pt")
    assert "--like" in fails(3, "convert", tmp_path / "ids.pt", tmp_path / "out", "--to", "dcp", "-n", "2")
    named = {"state": {}, "param_groups": [{"lr": 0.1, "params": ["c"]}, {"lr": 0.5, "params": ["a", "b"]}]}
    torch.save({"model": model, "optim": named}, tmp_path / "named.pt")
    like = ["--like", tmp_path / "named.pt"]
    assert run("convert", tmp_path / "ids.pt", tmp_path / "out", "--to", "dcp", "-n", "2", *like).returncode == 0
    optim = load_dcp(tmp_path / "out")["optimizer"]
    for n, p in zip("abc", w, strict=True):
        assert difference({n: optim["state"][n]["exp_avg"]}, {n: optimizer.state[p]["exp_avg"]}) == []
    assert [(g["params"], g["lr"]) for g in optim["param_groups"]] == [(["c"], 0.001), (["a", "b"], 0.5)]
    assert run("convert", tmp_path / "ids.pt", tmp_path / "model.pt", "--only", "model").returncode == 0


# --------------------------------------------------------------------------------------------------------- reading


def test_inspect_draws_the_checkpoint_the_tree_and_the_chunks_of_a_tensor() -> None:
    screen = run("inspect", GROUPS).stdout
    for words in ("dcp checkpoint", "step 3", "2 ranks", "53 tensors", "AdamW", "group 1: 3 parameters", "bfloat16"):
        assert words in screen, words
    tree = run("inspect", W3, "--tree").stdout
    assert "0 .. 1 (2 alike)" in tree
    assert "q_proj" in tree
    rows = run("inspect", W3, "--tensor", "model.lm_head.*").stdout
    assert "[0:44, 0:36]  __0_0.distcp bytes " in rows
    assert "[88:131, 0:36]  __2_0.distcp bytes " in rows


@pytest.mark.parametrize(
    "label",
    ["fsdp2_w3/ckpt", "full_w1/ckpt/ids.pt", "hf_llama/ckpt_sharded", "fsdp2_w2_hfshard/ckpt", "awkward_w3/ckpt"],
)
def test_reading_commands_change_nothing(label: str) -> None:
    path = FIXTURES / label
    before = files_of(path), sorted(p.name for p in path.parent.iterdir())
    for args in (["inspect", path, "--tree"], ["digest", path], ["verify", path, "--read-data"], ["diff", path, path]):
        done = run(*args)
        assert done.returncode == 0, done.stderr
    assert (files_of(path), sorted(p.name for p in path.parent.iterdir())) == before


def test_an_optimizer_of_another_model_is_carried_and_said(tmp_path: Path) -> None:
    tree = {"model": {"w": torch.ones(2)}, "optim": {"state": {"v": {"exp_avg": torch.ones(2)}}, "param_groups": []}}
    torch.save(tree, tmp_path / "two.pt")
    result = ckpttool.convert(tmp_path / "two.pt", tmp_path / "out", to="dcp", world_size=2)
    assert [n for n in result.notes if "state for 1 parameter that the model does not have" in n]
    assert "optim.state.v.exp_avg" in ckpttool.digest(tmp_path / "out").tensors
    assert any("does not have, first v" in n for n in ckpttool.inspect(tmp_path / "two.pt").missing)


def test_an_interruption_before_anything_was_kept_does_not_promise_to_continue(tmp_path: Path) -> None:
    def stop(what: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(
        Interrupted, match=r"is untouched\. Too little was copied to be kept: the same command starts over"
    ):
        ckpttool.convert(W3, tmp_path / "out", to="dcp", progress=stop)
    assert not (tmp_path / "out").exists()
