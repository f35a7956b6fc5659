"""What a shell, a file system and a caller can do to a command: closed streams, full disks, odd paths, empty arguments.

None of it is a bug of ckpttool, and none of it may be reported as one.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from peers import FIXTURES, difference, load_dcp, load_full, tensors_of

import ckpttool
from ckpttool import errors, layouts
from ckpttool.cli import terminal
from ckpttool.cli.main import main
from ckpttool.engine.discover import unread_files

CKPTTOOL = f"{sys.executable} -m ckpttool"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with in.pt: a model of two weights with the state of AdamW."""
    folder = tmp_path_factory.mktemp("small")
    torch.save(state({"w": (2, 3), "b": (3,)}), folder / "in.pt")
    return folder


def state(shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(7)
    model = {n: torch.randn(*shape, generator=generator) for n, shape in shapes.items()}
    slots = {n: {"step": torch.tensor(3.0), "exp_avg": t * 2, "exp_avg_sq": t * t} for n, t in model.items()}
    return {"model": model, "optim": {"state": slots, "param_groups": [{"lr": 0.1, "params": list(model)}]}}


def shell(line: str, cwd: Path) -> subprocess.CompletedProcess[bytes]:
    done = subprocess.run(["bash", "-c", line], cwd=cwd, capture_output=True)
    assert b"Traceback" not in done.stderr, done.stderr
    assert b"bug of ckpttool" not in done.stderr, done.stderr
    return done


# --------------------------------------------------------------------------------------------------- three streams


def test_a_conversion_with_all_streams_closed_writes_the_whole_destination(small: Path) -> None:
    done = shell(f"{CKPTTOOL} convert in.pt closed --to dcp -n 1 <&- >&- 2>&-", small)
    assert done.returncode == 0
    assert difference(tensors_of(load_dcp(small / "closed")), tensors_of(load_full(small / "in.pt"))) == []


def test_a_locale_without_our_characters_gets_ascii_and_escapes_of_names(small: Path) -> None:
    (small / "wéß.pt").write_bytes((small / "in.pt").read_bytes())
    done = shell(f"PYTHONIOENCODING=ascii {CKPTTOOL} inspect wéß.pt --tree", small)
    assert done.returncode == 0 and b"####" in done.stdout and b"full checkpoint - 8 tensors" in done.stdout
    assert b"\\u" not in done.stdout
    done = shell(f"PYTHONIOENCODING=ascii {CKPTTOOL} inspect wéß", small)
    assert b"w\\xe9\\xdf: no such file or folder." in done.stderr


def test_a_full_stderr_does_not_end_a_conversion(small: Path) -> None:
    done = shell(f"{CKPTTOOL} convert in.pt logfull --to dcp -n 1 2>/dev/full", small)
    assert done.returncode == 0
    assert b"digest all" in done.stdout
    assert (small / "logfull" / ".metadata").exists()


@pytest.mark.parametrize("how", ["", " --json"])
def test_a_full_stdout_is_exit_8_and_the_conversion_stands(small: Path, how: str) -> None:
    done = shell(f"{CKPTTOOL} convert in.pt full{len(how)} --to dcp -n 1{how} >/dev/full", small)
    assert done.returncode == 8
    assert b"standard output: No space left on device" in done.stderr
    assert (small / f"full{len(how)}" / ".metadata").exists()


@pytest.mark.parametrize("command", ["--help", "inspect --tree in.pt"])
def test_a_reader_that_has_enough_ends_us_as_sigpipe_would(small: Path, command: str) -> None:
    done = shell(f"exec 3> >(exec true); sleep 0.2; {CKPTTOOL} {command} >&3", small)
    assert (done.returncode, done.stderr) == (141, b"")


# --------------------------------------------------------------------------------------------------------- folders


def test_a_removed_current_folder_is_named_and_absolute_paths_work_there(small: Path) -> None:
    here = "mkdir gone && cd gone && rmdir ../gone && "
    done = shell(here + f"{CKPTTOOL} inspect x", small)
    assert (done.returncode, b"current folder was removed" in done.stderr) == (2, True)
    done = shell(here + f"{CKPTTOOL} convert {small}/in.pt {small}/absolute --to dcp -n 1", small)
    assert (done.returncode, (small / "absolute" / ".metadata").exists()) == (0, True)


def test_paths_that_are_not_utf8_work_in_every_layout(small: Path) -> None:
    where = os.fsdecode(os.fsencode(small) + b"/\xff\xfe")
    os.mkdir(where)
    source = shutil.copy(small / "in.pt", os.path.join(where, os.fsdecode(b"s\xff.pt")))
    for to in ("dcp", "zero3", "fsdp1", "universal", "hf", "full", "audit"):
        suffix = {"full": ".pt", "audit": ".tar.zst"}.get(to, "")
        out = os.path.join(where, to + os.fsdecode(b"\xff") + suffix)
        world = {} if to in ("hf", "full", "universal", "audit") else {"world_size": 2}
        ckpttool.convert(source, out, to=to, **world)
        back = ckpttool.verify(out, read_data=True, against=source)
        assert back.against is not None and back.against["verdict"] == "equal", to
        if to == "hf":
            data = Path(out, "model.safetensors").read_bytes()  # the library itself opens no such path, nor does torch
            assert set(safetensors.torch.load(data)) == {"w", "b"}
        elif to == "full":
            assert "model" in torch.load(io.BytesIO(Path(out).read_bytes()), weights_only=True)


def test_a_folder_that_may_not_be_listed_is_an_error_with_its_name(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(path: Any) -> list[str]:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "listdir", denied)
    with pytest.raises(errors.CkpttoolError, match=r"cannot be listed: Permission denied"):
        ckpttool.open(small)


# ------------------------------------------------------------------------------------------------- empty arguments


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (["convert", "in.pt", "", "--to", "dcp"], "argument 3"),
        (["inspect", ""], "argument 2"),
        (["convert", "in.pt", "out", "--to", "dcp", "--only", ""], "--only"),
        (["convert", "in.pt", "out", "--to", "dcp", "--only="], "--only"),
        (["verify", "in.pt", "--against", ""], "--against"),
        (["convert", "in.pt", "out", "--to", "hf", "--max-shard-size="], "--max-shard-size"),
    ],
)
def test_an_empty_argument_is_a_usage_error(
    line: list[str], named: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], small: Path
) -> None:
    monkeypatch.chdir(small)
    monkeypatch.setattr(sys, "argv", ["ckpttool", *line])
    for stream in ("stdout", "stderr"):  # main wraps them
        monkeypatch.setattr(sys, stream, getattr(sys, stream))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert f"error: {named} is empty" in capfd.readouterr().err


@pytest.mark.parametrize("path", ["", "a\0b"])
def test_python_gets_usage_errors_for_paths_that_are_none(path: str, small: Path) -> None:
    with pytest.raises(errors.UsageError, match="cannot be a destination"):
        ckpttool.convert(small / "in.pt", path, to="dcp", world_size=1)
    with pytest.raises(errors.UsageError if not path else errors.NotRecognised):
        ckpttool.open(path)


def test_only_commas_are_not_all_components() -> None:
    with pytest.raises(errors.UsageError, match="lists nothing"):
        terminal.split_commas(" , ")
    assert terminal.split_commas("a, b,") == ["a", "b"]


# ------------------------------------------------------------------------------------------------------------ URLs


def test_a_store_that_refuses_the_connection_is_a_remote_error() -> None:
    with pytest.raises(errors.RemoteError, match=r"ftp://127\.0\.0\.1:9"):
        ckpttool.open("ftp://127.0.0.1:9/x")


def test_the_scheme_of_a_url_may_be_in_capitals(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(layouts, "_open_remote", lambda url, folder: asked.append(url))
    layouts.place("S3://bucket/Folder/")
    assert asked == ["s3://bucket/Folder"]


def test_a_url_with_one_slash_is_explained() -> None:
    with pytest.raises(errors.NotRecognised, match="two slashes"):
        ckpttool.open("s3:/bucket/x")


# ----------------------------------------------------------------------------------------------- what a file can do


@pytest.mark.parametrize("to", ["dcp", "full", "hf", "zero2", "zero3", "universal", "fsdp1", "audit"])
def test_a_name_with_half_a_surrogate_pair_is_refused_before_anything_is_written(tmp_path: Path, to: str) -> None:
    torch.save({"model": {"\ud800": torch.ones(2)}}, tmp_path / "in.pt")
    out = tmp_path / ("out" + {"full": ".pt", "audit": ".tar.zst"}.get(to, ""))
    world = {} if to in ("hf", "full", "universal", "audit") else {"world_size": 1}
    with pytest.raises(errors.Unsupported, match=r"model\.\\ud800"):
        ckpttool.convert(tmp_path / "in.pt", out, to=to, **world)
    assert os.listdir(tmp_path) == ["in.pt"]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("shapes", ["w23 e03", "e03 w23", "a5 e30 w23", "a7 e0 f02 b4"])
def test_empty_tensors_have_a_place_in_fsdp1(tmp_path: Path, shapes: str, use_orig_params: bool, ranks: int) -> None:
    model = {x[0]: torch.randn(*map(int, x[1:])) for x in shapes.split()}
    torch.save({"model": model}, tmp_path / "in.pt")
    how: dict[str, Any] = {"world_size": ranks, "options": ckpttool.Fsdp1Options(use_orig_params=use_orig_params)}
    ckpttool.convert(tmp_path / "in.pt", tmp_path / "out", to="fsdp1", **how)
    assert ckpttool.diff(tmp_path / "in.pt", tmp_path / "out").equal
    ckpttool.convert(tmp_path / "out", tmp_path / "back.pt")
    assert difference(tensors_of(load_full(tmp_path / "back.pt")), tensors_of({"model": model})) == []


def test_a_module_of_empty_parameters_alone_is_refused_for_fsdp1(tmp_path: Path) -> None:
    torch.save({"model": {"e": torch.empty(0, 3)}}, tmp_path / "in.pt")
    with pytest.raises(errors.Unsupported, match='first "e"'):
        ckpttool.convert(tmp_path / "in.pt", tmp_path / "out", to="fsdp1", world_size=2)
    assert os.listdir(tmp_path) == ["in.pt"]


@pytest.mark.parametrize("name", ["a\0b", "x" * 300, "a/b"])
def test_a_name_that_no_folder_can_have_is_refused_for_universal(tmp_path: Path, name: str) -> None:
    torch.save(state({name: (2,)}), tmp_path / "in.pt")
    with pytest.raises(errors.Unsupported, match="in a folder of its name"):
        ckpttool.convert(tmp_path / "in.pt", tmp_path / "out", to="universal")
    assert os.listdir(tmp_path) == ["in.pt"]


def test_a_tensor_named_like_the_metadata_of_safetensors_is_refused(tmp_path: Path) -> None:
    torch.save({"model": {"__metadata__": torch.ones(3), "w": torch.ones(2)}}, tmp_path / "in.pt")
    with pytest.raises(errors.Unsupported, match="__metadata__"):
        ckpttool.convert(tmp_path / "in.pt", tmp_path / "out", to="hf", verify=False)
    assert os.listdir(tmp_path) == ["in.pt"]


@pytest.mark.parametrize("stage", [1, 2])
def test_float4_is_not_made_a_master_of_zero(tmp_path: Path, stage: int) -> None:
    packed = torch.randint(0, 255, (4, 6), dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    torch.save({"model": {"w": packed}}, tmp_path / "in.pt")
    with pytest.raises(errors.Unsupported, match=r'"model\.w" is float4_e2m1fn_x2'):
        ckpttool.convert(tmp_path / "in.pt", tmp_path / "out", to=f"zero{stage}", world_size=2, drop=True)
    assert os.listdir(tmp_path) == ["in.pt"]


@pytest.mark.parametrize("group", [{"params": [0]}, {"params": [0], "param_names": ["w"]}])
def test_state_of_a_parameter_that_no_group_lists_is_damage(tmp_path: Path, group: dict[str, Any]) -> None:
    state = {0: {"exp_avg": torch.ones(2)}, 65536: {"exp_avg": torch.ones(2)}}
    torch.save(
        {"model": {"w": torch.ones(2)}, "optimizer": {"state": state, "param_groups": [group]}}, tmp_path / "in.pt"
    )
    with pytest.raises(errors.Corrupt, match="parameter 65536, which no param group lists"):
        ckpttool.open(tmp_path / "in.pt")


def test_param_groups_that_number_and_name_parameters_are_damage(tmp_path: Path) -> None:
    groups = [{"params": ["w"]}, {"params": [0]}]
    tree = {
        "model": {"w": torch.ones(2)},
        "optim": {"state": {"w": {"exp_avg": torch.ones(2)}}, "param_groups": groups},
    }
    torch.save(tree, tmp_path / "in.pt")
    with pytest.raises(errors.Corrupt, match="by number in one group, first 0, and by name in another"):
        ckpttool.open(tmp_path / "in.pt")


@pytest.mark.parametrize("kind", ["fifo", "folder"])
def test_a_metadata_that_is_no_regular_file_is_refused(tmp_path: Path, small: Path, kind: str) -> None:
    ckpttool.convert(small / "in.pt", tmp_path / "dcp", to="dcp", world_size=2)
    metadata = tmp_path / "dcp" / ".metadata"
    metadata.unlink()
    os.mkfifo(metadata) if kind == "fifo" else metadata.mkdir()
    with pytest.raises(errors.Unsafe, match="not a regular file"):
        ckpttool.open(tmp_path / "dcp", source_layout="dcp")


# ------------------------------------------------------------------------------------- what the fuzzer found, minimized


def test_state_of_an_optimizer_that_is_a_tensor_itself(tmp_path: Path) -> None:
    torch.save(
        {"model": {"w": torch.ones(3)}, "optim": {"state": torch.ones(3), "param_groups": []}}, tmp_path / "in.pt"
    )
    ckpttool.convert(tmp_path / "in.pt", tmp_path / "out", to="dcp", world_size=2)
    assert load_dcp(tmp_path / "out")["optim"]["state"].tolist() == [1.0, 1.0, 1.0]
    for to in ("zero3", "trainer", "torchtitan", "megatron"):
        with pytest.raises(errors.Unsupported, match="The state of an optimizer is a dict"):
            ckpttool.convert(
                tmp_path / "in.pt", tmp_path / "there", to=to, world_size=2 if to != "megatron" else None, drop=True
            )


@pytest.mark.parametrize("found", [torch.ones(()), 3, [1, 2]], ids=["tensor", "number", "list"])
def test_state_of_a_parameter_that_is_no_dict(tmp_path: Path, found: object) -> None:
    tree = state({"w": (2, 3), "b": (3,)})
    tree["optim"]["state"]["b"] = found
    torch.save(tree, tmp_path / "in.pt")
    ckpttool.convert(tmp_path / "in.pt", tmp_path / "dcp", to="dcp", world_size=2)
    for to in ("megatron", "zero3", "universal", "fsdp1", "trainer", "torchtitan", "torch_checkpointing"):
        size = None if to in ("megatron", "universal") else 2
        with pytest.raises(errors.Unsupported, match=r'"optim.state.b" is .*that of a parameter a dict of its slots'):
            ckpttool.convert(tmp_path / "in.pt", tmp_path / "there", to=to, world_size=size, drop=True)


def test_a_param_group_that_is_a_list(tmp_path: Path) -> None:
    tree = state({"w": (2, 3), "b": (3,)})
    tree["optim"]["param_groups"] = [[1, [2, {"a": None}]], {"lr": 0.1, "params": ["w", "b"]}]
    torch.save(tree, tmp_path / "in.pt")
    ckpttool.convert(tmp_path / "in.pt", tmp_path / "dcp", to="dcp", world_size=1)
    for to in ("megatron", "zero3", "universal", "fsdp1", "trainer", "torchtitan", "torch_checkpointing"):
        size = None if to in ("megatron", "universal") else 1
        with pytest.raises(errors.Unsupported, match="A param group is a dict"):
            ckpttool.convert(tmp_path / "in.pt", tmp_path / "there", to=to, world_size=size, drop=True)


def test_a_step_in_a_param_group_that_is_not_that_of_its_parameters(tmp_path: Path) -> None:
    tree = state({"w": (2, 3), "b": (3,)})
    tree["optim"]["param_groups"][0]["step"] = 1
    torch.save(tree, tmp_path / "in.pt")
    with pytest.raises(errors.Unsupported, match=r'the option "step" 1, and its parameters are at step 3'):
        ckpttool.convert(tmp_path / "in.pt", tmp_path / "there", to="megatron", drop=True)


def test_a_step_that_is_no_number_has_no_place_in_megatron(tmp_path: Path) -> None:
    tree = state({"w": (2, 3), "b": (3,)})
    tree["optim"]["state"]["b"]["step"] = torch.tensor([3.0])
    torch.save(tree, tmp_path / "in.pt")
    with pytest.raises(errors.Unsupported, match=r'"optim\.state\.b\.step" \(Megatron-Core has no place'):
        ckpttool.convert(tmp_path / "in.pt", tmp_path / "there", to="megatron")


def test_an_optimizer_in_a_list_that_is_no_dict_is_kept_as_it_is(tmp_path: Path) -> None:
    tree = {
        "state_dict": state({"w": (2, 3)})["model"],
        "optimizer_states": [0.5],
        "pytorch-lightning_version": "2.6.0",
    }
    torch.save(tree, tmp_path / "in.ckpt")
    ckpttool.convert(tmp_path / "in.ckpt", tmp_path / "out.pt", to="full")
    assert load_full(tmp_path / "out.pt")["optimizer_states"] == [0.5]


@pytest.mark.parametrize("key", ["²", "9" * 5000])
def test_digits_that_int_refuses_are_no_number(tmp_path: Path, key: str) -> None:
    tree = state({"w": (2, 3)})
    tree["scheduler"] = {"milestones": {key: 1}}
    torch.save(tree, tmp_path / "sound.pt")
    ckpttool.convert(tmp_path / "sound.pt", tmp_path / "dcp", to="dcp", world_size=1)
    assert load_dcp(tmp_path / "dcp")["scheduler"] == {"milestones": {key: 1}}
    tree["optim"]["state"] = {key: tree["optim"]["state"]["w"]}
    tree["optim"]["param_groups"][0]["params"] = [0]
    torch.save(tree, tmp_path / "in.pt")
    with pytest.raises(errors.Corrupt, match=f"an entry for parameter {key[:20]}"):
        ckpttool.open(tmp_path / "in.pt")


def test_half_of_a_surrogate_pair_in_a_key_is_converted_and_written_down(tmp_path: Path) -> None:
    tree = {"model": state({"w": (2, 3)})["model"], "scheduler": {"last\ud800": 4, "\udfff": {"x": 1.5}}}
    torch.save(tree, tmp_path / "in.pt")
    ckpttool.convert(tmp_path / "in.pt", tmp_path / "out.pt", to="full")
    assert torch.load(tmp_path / "out.pt")["scheduler"] == tree["scheduler"]
    assert shell(f"{CKPTTOOL} verify out.pt --read-data", tmp_path).returncode == 0


def test_a_folder_in_the_place_of_a_trainer_s_file(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "trainers" / "trainer_fsdp2_full" / "ckpt" / "checkpoint-3", tmp_path / "a")
    (tmp_path / "a" / "optimizer.bin").unlink()
    (tmp_path / "a" / "optimizer.bin").mkdir()
    (tmp_path / "a" / "optimizer.bin" / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(errors.Corrupt, match=r"optimizer\.bin is a folder"):
        ckpttool.open(tmp_path / "a")


def test_an_index_that_names_a_file_with_half_a_surrogate_pair(tmp_path: Path, small: Path) -> None:
    ckpttool.convert(small / "in.pt", tmp_path / "hf", to="hf")
    (tmp_path / "hf" / "model.safetensors.index.json").write_text(
        '{"metadata": {}, "weight_map": {"w": "\\ud800.safetensors", "b": "model.safetensors"}}'
    )
    with pytest.raises(errors.CkpttoolError, match="half a surrogate pair"):
        ckpttool.open(tmp_path / "hf")


def test_a_step_that_is_infinite_is_no_number_of_steps(tmp_path: Path) -> None:
    tree = state({"w": (2, 3)})
    tree["optim"]["state"]["w"]["step"] = torch.tensor(float("inf"))
    torch.save(tree, tmp_path / "in.pt")
    done = ckpttool.convert(tmp_path / "in.pt", tmp_path / "out", to="zero2", world_size=2, drop=True)
    assert any("global_steps is 0" in n for n in done.notes)


def test_a_folder_of_a_parameter_that_a_universal_checkpoint_does_not_list(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "universal_z3_w2" / "ckpt", tmp_path / "uc")
    (folder,) = tmp_path.glob("uc/*_universal/zero")
    first = next(p for p in sorted(folder.iterdir()) if p.is_dir())
    ckpttool.open(tmp_path / "uc")
    shutil.copytree(first, folder / "ghost.weight")
    with pytest.raises(errors.Corrupt, match=r"zero/ghost\.weight"):
        ckpttool.open(tmp_path / "uc")


@pytest.mark.parametrize("key", ["buffer_names", "shared_params"])
def test_what_one_rank_of_zero_says_of_the_model_and_another_does_not(tmp_path: Path, key: str) -> None:
    shutil.copytree(FIXTURES / "zero3_w3_groups" / "ckpt", tmp_path / "z")
    (path,) = tmp_path.glob("z/global_step*/zero_pp_rank_1_mp_rank_00_model_states.pt")
    tree = torch.load(path, weights_only=False)
    tree[f"{key}x"] = tree.pop(key)
    torch.save(tree, path)
    with pytest.raises(errors.Corrupt, match=rf'rank_1_mp_rank_00_model_states\.pt has no "{key}"'):
        ckpttool.open(tmp_path / "z")


def test_a_folder_whose_other_files_could_not_be_listed_is_a_note(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*args: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(small))

    monkeypatch.setattr(unread_files, "_list_state_beside_file", denied)
    with ckpttool.open(small / "in.pt") as opened:
        assert any("could not be listed" in n and "Permission denied" in n for n in opened.checkpoint.notes)


# ----------------------------------------------------------------------------------------------------- permissions


def _without_override() -> None:
    """Root without CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH, so that permissions hold; any other user as it is."""
    import ctypes

    for capability in (1, 2):
        ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP


@pytest.mark.parametrize(
    ("closed", "mode", "line", "said"),
    [
        ("in.pt", 0o000, "verify in.pt", b"in.pt cannot be read: Permission denied."),
        ("in.pt", 0o000, "doctor in.pt", b"in.pt cannot be read: Permission denied."),
        ("in.pt", 0o000, "inspect in.pt --json", b"in.pt cannot be read: Permission denied."),
        ("runs/ckpt/__0_0.distcp", 0o000, "verify runs/ckpt", b"__0_0.distcp cannot be read: Permission denied."),
        ("runs/ckpt/__0_0.distcp", 0o000, "doctor runs/ckpt", b"__0_0.distcp cannot be read: Permission denied."),
        ("runs/ckpt/__0_0.distcp", 0o000, "convert runs/ckpt x.pt", b"__0_0.distcp cannot be read: Permission denied."),
        ("runs/ckpt", 0o000, "inspect runs", b"runs/ckpt cannot be listed: Permission denied."),
        ("runs/ckpt", 0o000, "inspect runs/ckpt", b"runs/ckpt cannot be listed: Permission denied."),
        ("runs", 0o000, "inspect runs/ckpt", b"runs/ckpt cannot be read: Permission denied."),
        ("full", 0o555, "convert in.pt full/out --to dcp -n 1", b"the folder {full} is not writable: Permission denied. The destination is untouched."),
        ("full", 0o555, "convert in.pt full/out.pt --json", b"the folder {full} is not writable: Permission denied."),
        ("full", 0o555, "audit export in.pt full/a.tar.zst", b"Permission denied."),
    ],
)  # fmt: skip
def test_what_is_not_permitted_is_exit_14_and_no_damage(
    tmp_path: Path, small: Path, closed: str, mode: int, line: str, said: bytes
) -> None:
    shutil.copy(small / "in.pt", tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "full").mkdir()
    ckpttool.convert(tmp_path / "in.pt", tmp_path / "runs" / "ckpt", to="dcp", world_size=2)
    there = sorted(p for p in tmp_path.rglob("*"))
    (tmp_path / closed).chmod(mode)
    try:
        done = subprocess.run(
            f"{CKPTTOOL} {line}", shell=True, cwd=tmp_path, capture_output=True, preexec_fn=_without_override
        )
    finally:
        (tmp_path / closed).chmod(0o755)
    assert done.returncode == 14, done
    assert said.replace(b"{full}", os.fsencode(tmp_path / "full")) in done.stderr, done.stderr
    assert b'"exit_code": 14' in done.stdout if "--json" in line else done.stdout == b""
    assert sorted(p for p in tmp_path.rglob("*")) == there


_LINES = """
import json, sys
from commands import ckpttool_here
for line in json.load(sys.stdin):
    done = ckpttool_here(*line.split())
    print(json.dumps([done.returncode, done.stdout + done.stderr]))
"""


def test_no_command_passes_over_a_step_that_may_not_be_listed(tmp_path: Path, small: Path) -> None:
    """`last` has a closed newest step, `first` a closed oldest one, `half` a closed folder in the newest one."""
    ckpttool.convert(small / "in.pt", tmp_path / "one", to="dcp", world_size=1)
    trainer = FIXTURES / "trainers" / "trainer_fsdp2_sharded" / "ckpt" / "checkpoint-3"
    for run, source in (("last", tmp_path / "one"), ("first", tmp_path / "one"), ("half", trainer)):
        for step in (1, 2, 3):
            shutil.copytree(source, tmp_path / run / f"step-{step}")
    (tmp_path / "last" / "lost+found").mkdir()
    closed = [tmp_path / p for p in ("last/step-3", "first/step-1", "half/step-3/optimizer_0", "last/lost+found")]
    lines = ["ls last", "inspect last", "digest last --latest", "prune last --keep-last 1 --yes", "watch last --once --settle 0",
             "digest first --latest", "prune first --keep-last 1", "digest half --latest", "ls half"]  # fmt: skip
    for path in closed:
        path.chmod(0o000)
    try:
        done = subprocess.run(
            [sys.executable, "-c", _LINES], input=json.dumps(lines), text=True, cwd=tmp_path, capture_output=True,
            preexec_fn=_without_override, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        )  # fmt: skip
    finally:
        for path in closed:
            path.chmod(0o755)
    assert done.returncode == 0, done.stderr
    found = dict(zip(lines, map(json.loads, done.stdout.splitlines()), strict=True))
    for line in lines[:5]:
        assert re.search("step-3:? cannot be listed: Permission denied", found[line][1]), (line, found[line])
        assert "lost+found" not in found[line][1], (line, found[line])
    assert [found[line][0] for line in lines] == [0, 0, 14, 0, 4, 0, 0, 14, 0], found  # 4: the steps are copies
    for line in ("ls last", "inspect last", "ls half"):
        assert "newest complete" not in found[line][1], found[line]
    said = found["prune last --keep-last 1 --yes"][1]
    assert "refused      step-1: step-3 cannot be listed, and may need it" in said
    assert "kept         step-2: the newest complete one of those that can be listed, one" in said
    assert (tmp_path / "last" / "step-1").exists()
    assert "step-3: not judged" in found["watch last --once --settle 0"][1]
    said = found["digest first --latest"][1]
    assert f"latest: {tmp_path / 'first' / 'step-3'}" in said and "note: step-1 cannot be listed" in said
    assert "would delete step-2" in found["prune first --keep-last 1"][1]
    assert "step-3/optimizer_0 cannot be listed: Permission denied" in found["digest half --latest"][1]
