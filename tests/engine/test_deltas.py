"""Deltas of weights: those of SkyRL and ModelExpress as their own code wrote them (fixtures/deltas), TRL's as its
pull requests describe them, and ckpttool's own."""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import ckpttool_here
from hypothesis import given, settings
from hypothesis import strategies as st
from peers import load_full, same_value
from safetensors.torch import load_file, save_file

import ckpttool
from ckpttool.errors import CkpttoolError, Corrupt, Unsupported, UsageError

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
State = dict[str, torch.Tensor]


def bits(t: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    return t.dtype, tuple(t.shape), t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same(a: State, b: State) -> bool:
    return {n: bits(t) for n, t in a.items()} == {n: bits(t) for n, t in b.items()}


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """base/, deltas in order, and the weights that the program's own receiver made of them."""
    pytest.importorskip("xxhash")
    out = tmp_path_factory.mktemp("deltas")
    with tarfile.open(FIXTURES / "deltas" / "programs.tar.xz") as archive:
        archive.extractall(out, filter="data")
    return out


CHAINS = {"skyrl": ("sync", "v3"), "modelexpress": ("deltas", "v2")}


@pytest.mark.parametrize("program", CHAINS)
def test_a_chain_gives_what_the_receiver_of_its_program_made_of_it(
    program: str, programs: Path, tmp_path: Path
) -> None:
    root, (chain, last) = programs / program, CHAINS[program]
    before = {p: p.read_bytes() for p in root.rglob("*") if p.is_file()}
    done = ckpttool.convert(root / "base", tmp_path / "out.safetensors", apply=[root / chain])
    assert done.verified
    assert same(load_file(tmp_path / "out.safetensors"), load_file(root / last / "model.safetensors"))
    one_by_one = sorted((root / chain).iterdir())
    ckpttool.convert(root / "base", tmp_path / "dcp", to="dcp", world_size=3, apply=one_by_one)
    with ckpttool.open(tmp_path / "dcp") as opened:
        made = {n.removeprefix("model."): opened[n].torch() for n in opened}
    assert same(made, load_file(root / last / "model.safetensors"))
    record = json.loads((tmp_path / "dcp" / "ckpttool.json").read_text())
    assert [d["name"] for d in record["applied"]["deltas"]] == [p.name for p in one_by_one]
    assert before == {p: p.read_bytes() for p in root.rglob("*") if p.is_file()}


@pytest.mark.parametrize("program", CHAINS)
def test_pages_in_any_order_are_those_of_the_whole(
    program: str, programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpttool.engine.computed_files.MOST_ELEMENTS", 24)
    root, (chain, last) = programs / program, CHAINS[program]
    name, wanted = "model.embed_tokens.weight", load_file(root / last / "model.safetensors")
    ckpttool.convert(root / "base", tmp_path / "o.safetensors", apply=[root / chain])
    assert same(load_file(tmp_path / "o.safetensors"), wanted)
    with ckpttool.plan(root / "base", tmp_path / "p.safetensors", apply=[root / chain]) as planned:
        for rows in (slice(100, 131), slice(7, 9), slice(0, 131), slice(50, 51)):
            assert bits(planned.opened[f"model.{name}"].torch((rows,))) == bits(wanted[name][rows])


@pytest.mark.parametrize("program", CHAINS)
def test_what_does_not_follow_on_the_base_is_refused(program: str, programs: Path, tmp_path: Path) -> None:
    root, (chain, last) = programs / program, CHAINS[program]
    deltas = sorted((root / chain).iterdir())
    with pytest.raises(Unsupported, match="is version"):  # the one between is not given
        ckpttool.convert(root / "base", tmp_path / "o", to="hf", apply=[deltas[1], deltas[0]])
    with pytest.raises(Corrupt, match="not the version that the delta was made from") as e:
        ckpttool.convert(root / last, tmp_path / "o", to="hf", apply=deltas[:1])
    assert e.value.code == "CKPT0432"
    assert not (tmp_path / "o").exists()
    ckpttool.convert(root / "base", tmp_path / "first", to="dcp", world_size=1, apply=deltas[:1])
    with pytest.raises(Unsupported, match="version"):  # its record says which version it is
        ckpttool.convert(tmp_path / "first", tmp_path / "o", to="dcp", apply=deltas[:1])
    ckpttool.convert(tmp_path / "first", tmp_path / "o", to="dcp", apply=deltas[1:])
    cut = load_file(root / "base" / "model.safetensors")
    cut.pop("model.embed_tokens.weight")
    save_file(cut, tmp_path / "cut.safetensors")
    with pytest.raises(Unsupported, match="does not have"):
        ckpttool.convert(tmp_path / "cut.safetensors", tmp_path / "x.safetensors", apply=deltas[:1])


def test_another_shape_dtype_or_name_is_refused_before_anything_is_written(programs: Path, tmp_path: Path) -> None:
    root = programs / "skyrl"
    for change in (lambda t: t.float(), lambda t: t[:-1].clone()):
        state = load_file(root / "base" / "model.safetensors")
        state["model.embed_tokens.weight"] = change(state["model.embed_tokens.weight"])
        save_file(state, tmp_path / "other.safetensors")
        with pytest.raises(Unsupported) as e:
            ckpttool.convert(tmp_path / "other.safetensors", tmp_path / "o.safetensors", apply=[root / "sync"])
        assert e.value.code == "CKPT0342" and not (tmp_path / "o.safetensors").exists()


def _cut(p: Path) -> None:
    p.write_bytes(p.read_bytes()[:-40])


def _flip(p: Path) -> None:
    data = bytearray(p.read_bytes())
    data[-12] ^= 1
    p.write_bytes(bytes(data))


@pytest.mark.parametrize("program", CHAINS)
@pytest.mark.parametrize("damage", [_cut, _flip, Path.unlink])
def test_a_damaged_payload_is_never_applied(
    program: str, damage: Callable[[Path], None], programs: Path, tmp_path: Path
) -> None:
    chain, _ = CHAINS[program]
    shutil.copytree(programs / program, tmp_path / "c")
    payload = sorted((tmp_path / "c" / chain).rglob("*.safetensors"))[-1]
    damage(payload)
    with pytest.raises(CkpttoolError) as e:
        ckpttool.convert(tmp_path / "c" / "base", tmp_path / "o.safetensors", apply=[tmp_path / "c" / chain])
    assert e.value.exit_code == 4 and not (tmp_path / "o.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize("program", CHAINS)
@given(where=st.floats(0, 1), byte=st.integers(0, 255), cut=st.booleans())
@settings(max_examples=60)
def test_any_byte_of_a_manifest_or_header_may_be_another(
    program: str, programs: Path, tmp_path_factory: pytest.TempPathFactory, where: float, byte: int, cut: bool
) -> None:
    chain, last = CHAINS[program]
    out = tmp_path_factory.mktemp("m")
    shutil.copytree(programs / program, out / "c")
    files = sorted(p for p in (out / "c" / chain).rglob("*") if p.is_file())
    data = b"".join(p.read_bytes() for p in files)
    at = min(int(where * len(data)), len(data) - 1)
    for file in files:
        size = file.stat().st_size
        if at < size:
            text = file.read_bytes()
            file.write_bytes(text[:at] if cut else text[:at] + bytes([byte]) + text[at + 1 :])
            break
        at -= size
    try:
        ckpttool.convert(out / "c" / "base", out / "o.safetensors", apply=[out / "c" / chain])
    except CkpttoolError:
        assert not (out / "o.safetensors").exists()
    else:
        assert same(load_file(out / "o.safetensors"), load_file(programs / program / last / "model.safetensors"))
    shutil.rmtree(out)


def test_exchanged_payloads_are_never_applied(programs: Path, tmp_path: Path) -> None:
    shutil.copytree(programs / "skyrl", tmp_path / "c")
    one, two, _ = sorted((tmp_path / "c" / "sync").glob("*/*.safetensors"))
    shutil.copy(one, two)
    with pytest.raises(Corrupt):
        ckpttool.convert(tmp_path / "c" / "base", tmp_path / "o.safetensors", apply=[tmp_path / "c" / "sync"])


def test_a_gap_in_a_chain_is_named(programs: Path, tmp_path: Path) -> None:
    shutil.copytree(programs / "skyrl", tmp_path / "c")
    shutil.rmtree(tmp_path / "c" / "sync" / "delta-00000002")
    with pytest.raises(Unsupported, match=r"are no chain.*1 on 0.*3 on 2"):
        ckpttool.convert(tmp_path / "c" / "base", tmp_path / "o.safetensors", apply=[tmp_path / "c" / "sync"])


def test_inspect_and_verify_say_what_a_delta_is(programs: Path) -> None:
    delta = programs / "skyrl" / "sync" / "delta-00000002"
    said = json.loads(ckpttool_here("inspect", str(delta), "--json").stdout)
    assert (said["kind"], said["program"], said["version"], said["base_version"]) == ("delta", "SkyRL", "2", "1")
    chain = ckpttool_here("verify", str(delta.parent), "--read-data").stdout
    assert "a chain of 3 deltas of SkyRL, version 3 on version 0, not a checkpoint" in chain
    assert "ok: every change was decoded" in chain
    refused = ckpttool_here("convert", str(delta), str(delta) + "-x", "--to", "hf")
    assert refused.returncode == 3 and "is a delta of SkyRL" in refused.stderr and "--apply" in refused.stderr


def test_a_tied_weight_follows_the_one_that_a_delta_changes(programs: Path, tmp_path: Path) -> None:
    root, name = programs / "skyrl", "model.embed_tokens.weight"
    state: dict[str, Any] = load_file(root / "base" / "model.safetensors")
    state["again.weight"] = state[name]
    torch.save({"model": state}, tmp_path / "base.pt")
    ckpttool.convert(tmp_path / "base.pt", tmp_path / "o.pt", apply=[root / "sync"])
    made = torch.load(tmp_path / "o.pt")["model"]
    assert bits(made["again.weight"]) == bits(load_file(root / "v3" / "model.safetensors")[name])
    assert made["again.weight"].data_ptr() == made[name].data_ptr()


def test_the_optimizer_of_the_base_is_left_behind_and_said_so(programs: Path, tmp_path: Path) -> None:
    root = programs / "skyrl"
    state = load_file(root / "base" / "model.safetensors")
    torch.save({"model": state, "optim": {"state": {}, "param_groups": []}, "step": 3}, tmp_path / "base.pt")
    done = ckpttool.convert(tmp_path / "base.pt", tmp_path / "o.pt", apply=[root / "sync"])
    assert done.dropped and all("of before" in why for _, _, why in done.dropped)


# -------------------------------------------------------------------------------------------------------------- TRL


def write_trl(path: Path, old: State, new: State, encoding: str, version: int) -> None:
    """Write a patch as TRL's encode_patch (#5937) does or, for "values", the one of its first pull request (#5417)."""
    tensors: State = {}
    for name, t in new.items():
        at = (t.reshape(-1) != old[name].reshape(-1)).nonzero(as_tuple=True)[0]
        gaps = at - torch.cat([at.new_full((1,), -1), at[:-1]]) - 1
        ends = (".indices", ".values") if encoding == "values" else (".idx", ".val")
        if len(at):
            tensors[name + ends[0]] = gaps.to(torch.uint16) if encoding == "gap_delta" else at.to(torch.int32)
            tensors[name + ends[1]] = t.reshape(-1)[at]
    about = {"format": "sparse_weight_patch", "version": "1", "model_version": str(version)}
    about |= (
        {"prev_model_version": str(version - 1)} if encoding == "values" else {"sparse": "True", "encoding": encoding}
    )
    path.parent.mkdir(exist_ok=True)
    save_file(tensors, path, metadata=about)


@pytest.fixture
def steps(tmp_path: Path) -> list[State]:
    """Three versions of weights in bf16; more positions than a block holds change."""
    g = torch.Generator().manual_seed(0)
    out = [{"w": torch.randn(300, 131, generator=g).bfloat16(), "v": torch.randn(7, generator=g).bfloat16()}]
    for k in (1, 2):
        now = {n: t.clone() for n, t in out[-1].items()}
        now["w"].view(-1)[k :: 3 - k] *= 1.5
        now["v"][k] = float("nan")
        out.append(now)
    save_file(out[0], tmp_path / "base.safetensors")
    return out


@pytest.mark.parametrize("encoding", ["values", "raw", "gap_delta"])
def test_patches_of_trl_are_applied_in_order(encoding: str, steps: list[State], tmp_path: Path) -> None:
    for k in (1, 2):
        write_trl(tmp_path / "deltas" / f"step_{k:06d}.safetensors", steps[k - 1], steps[k], encoding, k)
    done = ckpttool.convert(tmp_path / "base.safetensors", tmp_path / "o.safetensors", apply=[tmp_path / "deltas"])
    assert same(load_file(tmp_path / "o.safetensors"), steps[2])
    assert any("nothing shows that the base is the version" in note for note in done.notes)
    said = ckpttool_here("verify", str(tmp_path / "deltas"), "--read-data").stdout
    assert "a chain of 2 deltas of TRL" in said and "no checksums" in said
    for path in ("deltas", "deltas/step_000001.safetensors"):
        with pytest.raises(CkpttoolError, match=r"not a checkpoint|without a config\.json") as e:
            ckpttool.open(tmp_path / path)
        assert e.value.exit_code == 3


def test_positions_that_do_not_ascend_or_fit_are_refused(steps: list[State], tmp_path: Path) -> None:
    for at in ([3, 3], [5, 2], [-1, 2], [1, 7]):
        save_file(
            {"v.indices": torch.tensor(at, dtype=torch.int32), "v.values": torch.zeros(2).bfloat16()},
            tmp_path / "p.safetensors",
        )
        with pytest.raises(Corrupt, match="do not ascend, or beyond"):
            ckpttool.convert(
                tmp_path / "base.safetensors", tmp_path / "o.safetensors", apply=[tmp_path / "p.safetensors"]
            )
        assert not (tmp_path / "o.safetensors").exists()


def test_the_sha256_of_all_weights_is_compared(steps: list[State], tmp_path: Path) -> None:
    import hashlib

    for right in (True, False):
        path = tmp_path / f"{right}.safetensors"
        write_trl(path, steps[0], steps[1], "values", 1)
        digest = hashlib.sha256(b"".join(bits(steps[1 if right else 0][n])[2] for n in sorted(steps[1]))).hexdigest()
        tensors = load_file(path)
        save_file(
            tensors, path, metadata={"format": "sparse_weight_patch", "model_version": "1", "checksum_sha256": digest}
        )
        if right:
            ckpttool.convert(tmp_path / "base.safetensors", tmp_path / "o.safetensors", apply=[path])
        else:
            with pytest.raises(Corrupt, match="SHA-256"):
                ckpttool.convert(tmp_path / "base.safetensors", tmp_path / "p.safetensors", apply=[path])


# ---------------------------------------------------------------------------------------------------- ckpttool's own

DTYPES = ("bool", "uint8", "int16", "int64", "float16", "bfloat16", "float32", "float64", "complex64", "float8_e4m3fn", "float8_e5m2")  # fmt: skip
SHAPES = [(), (0, 4), (1,), (7, 3), (2, 131)]
TENSOR = st.tuples(st.sampled_from(DTYPES), st.sampled_from(SHAPES), st.integers(0, 3))
STATES = st.dictionaries(st.sampled_from("abcdef"), TENSOR, min_size=1)


def make(spec: dict[str, tuple[str, tuple[int, ...], int]]) -> State:
    """Tensors of random bytes, NaN with payloads among them; of booleans, 0 and 1."""
    out: State = {}
    for name, (dtype, shape, seed) in spec.items():
        item = torch.empty((), dtype=getattr(torch, dtype)).element_size()
        count = torch.Size(shape).numel() * item
        raw = torch.randint(0, 2 if dtype == "bool" else 256, (count,), generator=torch.Generator().manual_seed(seed))
        out[name] = raw.to(torch.uint8).view(getattr(torch, dtype)).reshape(shape)
    return out


@pytest.mark.slow
@given(STATES, STATES)
@settings(max_examples=40)
def test_a_delta_applied_to_its_base_is_the_other_checkpoint(
    tmp_path_factory: pytest.TempPathFactory, old: Any, new: Any
) -> None:
    root = tmp_path_factory.mktemp("own")
    a, b = make(old), make(new)
    torch.save({"model": a}, root / "a.pt")
    save_file(b, root / "b.safetensors")
    ckpttool.delta(root / "a.pt", root / "b.safetensors", root / "d.tar.zst")
    done = ckpttool.convert(root / "a.pt", root / "out.safetensors", apply=[root / "d.tar.zst"])
    assert same(load_file(root / "out.safetensors"), b)
    assert done.digest == ckpttool.digest(root / "b.safetensors").digest
    shutil.rmtree(root)


@pytest.fixture
def own(steps: list[State], tmp_path: Path) -> list[Path]:
    """Three checkpoints in two layouts, and the deltas between them."""
    for k in (1, 2):
        save_file(steps[k], tmp_path / f"{k}.safetensors")
    ckpttool.convert(tmp_path / "1.safetensors", tmp_path / "1", to="dcp", world_size=3)
    ckpttool.delta(tmp_path / "base.safetensors", tmp_path / "1", tmp_path / "d1.tar.zst")
    ckpttool.delta(tmp_path / "1", tmp_path / "2.safetensors", tmp_path / "d2.tar.zst")
    return [tmp_path / "d1.tar.zst", tmp_path / "d2.tar.zst"]


def test_a_chain_of_own_deltas_is_applied_in_one_go(own: list[Path], steps: list[State], tmp_path: Path) -> None:
    ckpttool.convert(tmp_path / "base.safetensors", tmp_path / "o.safetensors", apply=own)
    assert same(load_file(tmp_path / "o.safetensors"), steps[2])
    for wrong in (own[::-1], own[1:], [own[0], own[0]]):
        with pytest.raises(CkpttoolError) as e:
            ckpttool.convert(tmp_path / "base.safetensors", tmp_path / "p.safetensors", apply=wrong)
        assert e.value.code in ("CKPT0342", "CKPT0432") and not (tmp_path / "p.safetensors").exists()
    said = json.loads(ckpttool_here("verify", str(own[0]), "--read-data", "--json").stdout)
    assert (said["kind"], said["program"], said["checksums"], said["read"]) == ("delta", "ckpttool", "blake3", True)


def test_a_base_with_a_record_of_other_digests_is_refused_without_reading_it(own: list[Path], tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"in its ckpttool\.json"):
        ckpttool.convert(tmp_path / "1", tmp_path / "p", to="dcp", apply=own[:1])


def test_a_damaged_own_delta_is_refused(own: list[Path], tmp_path: Path) -> None:
    data = own[0].read_bytes()
    for k in range(8):
        at = (2 * k + 1) * len(data) // 16
        own[0].write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        with pytest.raises(CkpttoolError):
            ckpttool.convert(tmp_path / "base.safetensors", tmp_path / "p.safetensors", apply=own[:1])
        assert not (tmp_path / "p.safetensors").exists()


@pytest.mark.slow
def test_a_delta_is_no_checkpoint(own: list[Path], tmp_path: Path) -> None:
    for command in (["convert", str(own[0]), str(tmp_path / "x"), "--to", "dcp"], ["digest", str(own[0])], ["diff", str(own[0]), str(own[1])]):  # fmt: skip
        done = ckpttool_here(*command)
        assert done.returncode == 3 and "is a delta of ckpttool, and not a checkpoint" in done.stderr


@pytest.mark.slow
def test_the_optimizer_and_its_values_are_in_a_delta_that_was_asked_for_them(tmp_path: Path) -> None:
    run = FIXTURES / "fsdp2_w3" / "ckpt"
    with ckpttool.open(run) as opened:
        names = [n for n in opened if n.startswith("model.")]
    ckpttool.convert(run, tmp_path / "a", to="dcp", world_size=2, change={names[0]: lambda page: page.values * 1.5})
    ckpttool.delta(tmp_path / "a", run, tmp_path / "d.tar.zst", only=["model", "optim"])
    ckpttool.convert(tmp_path / "a", tmp_path / "o", to="dcp", world_size=1, drop=True, apply=[tmp_path / "d.tar.zst"])
    found = [ckpttool.digest(path, only=["model", "optim"]).digest for path in (run, tmp_path / "o")]
    assert found[0] == found[1]


def test_nothing_at_the_path_of_a_delta_is_a_usage_error(steps: list[State], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="no delta"):
        ckpttool.convert(tmp_path / "base.safetensors", tmp_path / "o.safetensors", apply=[tmp_path / "empty"])
    with pytest.raises(UsageError, match="goes with neither"):
        ckpttool.convert(tmp_path / "base.safetensors", tmp_path / "o.safetensors", apply=["x"], salvage=True)


def test_what_a_delta_does_not_have_is_not_passed_over(programs: Path) -> None:
    delta = str(programs / "skyrl" / "sync" / "delta-00000001")
    for words in (["inspect", delta, "--tree"], ["inspect", delta, "--tensor", "*"], ["verify", delta, "--against", delta]):  # fmt: skip
        done = ckpttool_here(*words)
        assert done.returncode == 3 and "not a checkpoint" in done.stderr


def test_values_of_the_model_are_those_of_the_new_checkpoint(tmp_path: Path) -> None:
    for k in (1, 2):
        model = {"w": torch.ones(3) * k, "l._extra_state": {"scale": k, "amax": [k, 2]}}
        torch.save({"model": model, "step": k}, tmp_path / f"{k}.pt")
    ckpttool.delta(tmp_path / "1.pt", tmp_path / "2.pt", tmp_path / "d.tar.zst")
    ckpttool.convert(tmp_path / "1.pt", tmp_path / "out.pt", to="full", apply=[tmp_path / "d.tar.zst"])
    assert same_value(load_full(tmp_path / "out.pt"), {"model": load_full(tmp_path / "2.pt")["model"]})
