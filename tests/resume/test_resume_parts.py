"""The parts of resume-verify that need no launch: batches, fingerprints, traces, settings, the recorder, the job's doors."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import dataclass, fields, replace
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine.test_flat_layout import rank_of
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import ckpttool
from ckpttool.engine.opening import OpenOptions
from ckpttool.errors import Corrupt, Unsupported, UsageError
from ckpttool.formats.pickles import Truncated
from ckpttool.live.job_optimizers import create_optimizer_state
from ckpttool.options import ReadKeywords
from ckpttool.resume import verify as launch
from ckpttool.resume.compare.bounds import have_same_micro_batch_shape
from ckpttool.resume.job.peft_model import add_lora_layers
from ckpttool.resume.plan import choose_mesh, find_start_step
from ckpttool.resume.ranks import launch as ranks
from ckpttool.resume.ranks import torchrun, worker
from ckpttool.resume.request import (
    RunSettings,
    VerifyKeywords,
    VerifyRequest,
    parse_mesh,
    read_settings,
    write_settings,
)
from ckpttool.resume.trace import batches, fingerprint, live_facts
from ckpttool.resume.trace.model import Step, Trace, format_record_line, read_reference, read_trace, trace_to_json
from ckpttool.resume.trace.numerics import read_numerics, use_numerics, use_recorded_buffers

# --------------------------------------------------------------------------------------------------------- batches


@given(st.integers(1, 5), st.integers(1, 12), st.integers(1, 6), st.integers(1, 7))
def test_every_sample_of_a_step_counts_on_exactly_one_rank(step: int, micro: int, many: int, world: int) -> None:
    whole = micro * many
    passes = [batches.list_micro_batches(step, whole, micro, r, world) for r in range(world)]
    assert len({len(p) for p in passes}) == 1, "FSDP's collectives need as many passes on every rank"
    counted = sorted(i for p in passes for first, last, counts in p if counts for i in range(first, last))
    assert counted == list(range((step - 1) * whole, step * whole))
    assert all(last - first == micro for p in passes for first, last, _ in p)


def test_a_rank_without_a_micro_batch_of_its_own_repeats_one_that_does_not_count() -> None:
    assert batches.list_micro_batches(1, 8, 2, 1, 3) == [(2, 4, True), (0, 2, False)]
    assert batches.list_micro_batches(2, 2, 2, 1, 2) == [(2, 4, False)]


def test_the_digest_of_a_batch_knows_its_rows_and_not_their_order_or_their_ranks() -> None:
    rows = np.arange(24).reshape(4, 6)
    whole = batches.digest_and_mark_rows(rows)[0]
    assert batches.digest_and_mark_rows(rows[::-1])[0] == whole
    assert (batches.digest_and_mark_rows(rows[:1])[0] + batches.digest_and_mark_rows(rows[1:])[0]) % (1 << 128) == whole
    assert batches.digest_and_mark_rows(rows.astype("i4"))[0] == whole
    assert batches.digest_and_mark_rows(rows + 1)[0] != whole
    assert batches.digest_and_mark_rows(np.concatenate([rows, rows[:1]]))[0] != whole


def test_the_digest_of_samples_covers_every_tensor_and_which_belong_together() -> None:
    draw = np.random.default_rng(3)
    pixels = torch.from_numpy(draw.standard_normal((4, 3, 2)).astype("f4"))
    batch = {
        "pixels": pixels,
        "mask": torch.tensor([[True, False]] * 4),
        "y": torch.arange(4),
        "low": pixels.bfloat16(),
    }
    whole = batches.digest_batch(batch)
    assert whole.keys.keys() == batch.keys() and len(whole.marks) == 4 * 8
    halves = [{k: x[part] for k, x in batch.items()} for part in (slice(2, 4), slice(0, 2))]
    added = batches.add_digests([batches.digest_batch(h) for h in halves])
    assert (added.keys, added.whole) == (whole.keys, whole.whole) and added.marks != whole.marks
    same = {**batch, "y": batch["y"].int(), "pixels": pixels.numpy()}
    assert batches.digest_batch(same)[:2] == whole[:2], "an integer is an integer, and an array is a tensor"
    for key, other in (
        ("pixels", pixels.flip(2)), ("pixels", pixels.double()), ("pixels", pixels.reshape(4, 2, 3)), ("mask", batch["mask"].int()),
        ("low", pixels.half()), ("y", batch["y"] + 1),
    ):  # fmt: skip
        found = batches.digest_batch({**batch, key: other})
        assert [k for k in whole.keys if found.keys[k] != whole.keys[k]] == [key] and found.whole != whole.whole
    dealt = batches.digest_batch({**batch, "y": batch["y"].flip(0)})
    assert dealt.keys == whole.keys and dealt.whole != whole.whole, "another label for each picture"
    fields = batches.make_batch_fields([added, batches.digest_batch({})])
    assert (
        fields["batch"] is None
        and fields["inputs"].keys() == batch.keys()
        and [len(r) for r in fields["rows"]] == [32, 0]
    )
    assert batches.make_batch_fields([]) == {"batch": None, "inputs": {}, "samples": None, "rows": []}
    ids = torch.arange(12).reshape(4, 3)
    tokens = batches.make_batch_fields([batches.digest_batch({"input_ids": ids, "mask": batch["mask"]})])
    assert tokens["batch"] == f"{batches.digest_and_mark_rows(ids.numpy())[0]:032x}", "as earlier recordings have it"
    assert "".join(tokens["rows"]) == batches.digest_and_mark_rows(ids.numpy())[1]


def test_synthetic_rows_are_a_function_of_seed_and_index() -> None:
    rows, length = batches.open_data("synthetic", seed=3, sequence=11, vocabulary=50)
    again, _ = batches.open_data("synthetic", seed=3, sequence=11, vocabulary=50)
    other, _ = batches.open_data("synthetic", seed=4, sequence=11, vocabulary=50)
    assert length == 11
    ids = rows(7)["input_ids"]
    assert ids.shape == (11,) and ids.max() < 50 and ids.min() >= 0
    assert (ids == again(7)["input_ids"]).all()
    assert (ids != other(7)["input_ids"]).any() and (ids != rows(8)["input_ids"]).any()


def test_a_matrix_is_read_around_and_a_long_row_is_cut(tmp_path: Path) -> None:
    np.save(tmp_path / "m.npy", np.arange(12).reshape(3, 4))
    rows, length = batches.open_data(str(tmp_path / "m.npy"), seed=0, sequence=None, vocabulary=12)
    assert length == 4 and rows(4)["input_ids"].tolist() == [4, 5, 6, 7]
    np.save(tmp_path / "v.npy", np.arange(11, dtype=np.uint16))
    rows, length = batches.open_data(str(tmp_path / "v.npy"), seed=0, sequence=5, vocabulary=12)
    assert length == 5 and rows(1)["input_ids"].tolist() == [5, 6, 7, 8, 9]


def test_lines_have_labels_and_are_cut_or_padded_with_labels_that_do_not_count(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('{"input_ids": [1, 2, 3]}\n{"input_ids": [4], "labels": [5]}\n')
    rows, length = batches.open_data(str(file), seed=0, sequence=None, vocabulary=9)
    assert length == 3
    assert rows(1)["input_ids"].tolist() == [4, 0, 0] and rows(1)["labels"].tolist() == [5, -100, -100]
    assert rows(2)["labels"].tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [("x.npy", np.ones((2, 3)), "float64"), ("x.npy", np.full((2, 3), 70), "tokens 70..70"), ("x.npy", b"nonsense", "plain .npy"),
     ("x.npy", np.array([None]), "plain .npy"), ("x.jsonl", b"", "no lines"), ("x.jsonl", b"[1]\n", "line 1"), ("x.txt", b"", "npy or .jsonl"),
     ("x.jsonl", b'{"text": "a"}\n', "tokenizer"),
     ("x.jsonl", b'{"input_ids": [1, 2], "labels": [1]}\n', 'line 1: 1 "labels" for 2 "input_ids"')],
)  # fmt: skip
def test_data_that_is_none_is_refused_with_its_place(tmp_path: Path, name: str, content: Any, said: str) -> None:
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        np.save(path, content, allow_pickle=True)
    with pytest.raises(UsageError, match=said):
        rows, _ = batches.open_data(str(path), seed=0, sequence=None, vocabulary=50)
        rows(0)


def test_data_of_build_is_a_function_or_a_sequence_and_no_iterator() -> None:
    assert batches.wrap_user_data([[1, 2], [3, 4]])(3)["input_ids"].tolist() == [3, 4]
    assert batches.wrap_user_data(lambda i: {"input_ids": torch.tensor([i, i])})(3)["input_ids"].tolist() == [3, 3]
    with pytest.raises(UsageError, match="list_iterator"):
        batches.wrap_user_data(iter([1]))


def test_a_recording_of_other_bytes_is_no_recording(tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    file.write_bytes(b'{"kind": "start"}\n\xff\xfe\n')
    with pytest.raises(Corrupt, match="line 2: not a JSON object"):
        read_reference(file)


# ---------------------------------------------------------------------------------------------------- fingerprints


def mixed(bits: int, index: int) -> int:
    """The definition, in Python's own integers."""
    mask = (1 << 64) - 1
    z = ((bits + 1) * 0x94D049BB133111EB + index * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_a_fingerprint_is_the_sum_of_its_definition() -> None:
    values = torch.tensor([0, 1, -1, 77, -(1 << 62)], dtype=torch.int64)
    assert fingerprint.fingerprint_flat(values, 3) == sum(mixed(int(v), 3 + i) for i, v in enumerate(values)) % (
        1 << 64
    )
    assert fingerprint.fingerprint_flat(torch.tensor([True, False]), 0) == (mixed(1, 0) + mixed(0, 1)) % (1 << 64)


DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.bool, torch.int64, torch.complex64, torch.complex128, torch.float8_e4m3fn]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@given(st.lists(st.integers(1, 6), min_size=0, max_size=4), st.integers(0, 3), st.integers(0, 6))
def test_boxes_of_any_cut_add_up_to_the_whole(dtype: torch.dtype, shape: list[int], dim: int, at: int) -> None:
    torch.manual_seed(1)
    whole = (torch.rand(shape) * 100).to(dtype)
    want = fingerprint._fingerprint_shard(whole, (0,) * len(shape), shape)
    if not shape:
        return
    dim, at = dim % len(shape), at % (shape[dim % len(shape)] + 1)
    parts = whole.split([at, shape[dim] - at], dim)
    offsets = [0, at]
    got = sum(fingerprint._fingerprint_shard(p.contiguous(), [o if d == dim else 0 for d in range(len(shape))], shape) for p, o in zip(parts, offsets, strict=True))  # fmt: skip
    assert got % (1 << 64) == want


def test_a_process_that_becomes_another_rank_counts_for_its_new_shards() -> None:
    """Submeshes of rank 2 and of rank 0 are equal and have one hash, and different ranks."""
    counts = {}
    for rank in (2, 0):
        with rank_of(rank, 4):
            tp = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
            tensor = DTensor.from_local(torch.ones(2), tp, [Shard(0)], run_check=False)
            counts[rank] = fingerprint.is_counted_on_this_rank(tensor)
    assert counts == {2: False, 0: True}


def test_a_fingerprint_sees_one_bit_an_exchange_and_a_shift() -> None:
    whole = torch.randn(5, 7)
    prints, _ = fingerprint.fingerprint_tensors({"a": whole}, "cpu")
    for change in (whole.flip(0), whole.roll(1), -whole, whole.bfloat16().float()):
        assert fingerprint.fingerprint_tensors({"a": change}, "cpu")[0] != prints
    bit = whole.clone()
    bit.view(torch.int32)[2, 3] ^= 1
    assert fingerprint.fingerprint_tensors({"a": bit}, "cpu")[0] != prints
    assert fingerprint.fingerprint_tensors({"b": whole.clone()}, "cpu")[0]["b"] == prints["a"], (
        "it does not depend on the name"
    )


def test_the_files_have_the_fingerprints_of_what_was_saved(tmp_path: Path) -> None:
    state = {"model": {"w": torch.randn(300, 70), "b": torch.randn(3).bfloat16(), "n": torch.tensor(3)}}
    torch.save(state, tmp_path / "x.pt")
    with ckpttool.open(tmp_path / "x.pt") as opened:
        names = list(opened.checkpoint.tensors)
        got = fingerprint.fingerprint_files(opened, names, 0, 1, "cpu")
        split = [fingerprint.fingerprint_files(opened, names, r, 2, "cpu") for r in range(2)]
        assert opened.read("model.n") == (3).to_bytes(8, "little")
    want, apart = fingerprint.fingerprint_tensors({f"model.{k}": v for k, v in state["model"].items()}, "cpu")
    assert got == want and not apart
    assert {n: f"{sum(int(s[n], 16) for s in split) % (1 << 64):016x}" for n in names} == want, (
        "ranks share the reading"
    )


def test_norms_are_added_up_in_float64() -> None:
    t = torch.full((1000, 1000), 1e-3)
    assert fingerprint.compute_global_norms({"t": t, "none": torch.empty(0)}, "cpu") == {
        "t": pytest.approx(float(t.double().norm()), rel=1e-14),
        "none": 0.0,
    }


# ---------------------------------------------------------------------------------------------------------- traces


def test_a_trace_comes_back_from_its_json_with_its_infinities(tmp_path: Path) -> None:
    trace = Trace(
        source="x", start=3, state={"model.w": ("float32", (2, 3), "ab")}, values={"extra.word": "nan"},
        steps=[Step(4, math.nan, math.inf, learning_rates=[0.1], grads={"w": -math.inf})],
    )  # fmt: skip
    (tmp_path / "t.json").write_text(json.dumps(trace_to_json(trace), allow_nan=False))
    back = read_trace(tmp_path / "t.json")
    assert math.isnan(back.steps[0].loss) and back.steps[0].grad_norm == math.inf
    assert back.steps[0].grads == {"w": -math.inf} and back.values == {"extra.word": "nan"}
    assert back.state == trace.state and back.start == 3


def test_recorded_lines_are_read_in_any_order_and_the_last_of_a_step_counts(tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    file.write_text(
        format_record_line("start", world_size=4, global_batch=8, nonsense=1)
        + format_record_line("step", step=2, loss=2.0)
        + format_record_line("step", step=1, loss=1.0)
        + format_record_line("state", step=1, state={"model.w": ["float32", [2], "ab"]}, scalars={}, groups=[])
        + format_record_line("step", step=2, loss=2.5)
        + '{"kind": "step", "st'  # the job was killed here
    )
    trace = read_reference(file)
    assert [(s.step, s.loss) for s in trace.steps] == [(1, 1.0), (2, 2.5)]
    assert trace.world_size == 4 and trace.start == 1 and trace.state == {"model.w": ("float32", (2,), "ab")}


@pytest.mark.parametrize(
    ("text", "said"),
    [("", "no step"), ("{}\n", "line 1"), ("[1]\n", "line 1"), ('{"kind": "step", "step": 1, "loss": "x"}\n', "line 1"), ("{\n{}\n", "line 1")],
)  # fmt: skip
def test_a_file_that_no_recorder_wrote_is_refused_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "r.jsonl").write_text(text)
    with pytest.raises(Corrupt, match=said):
        read_reference(tmp_path / "r.jsonl")
    with pytest.raises(UsageError, match="No such file"):
        read_reference(tmp_path / "none.jsonl")


# -------------------------------------------------------------------------------------------------------- settings


def test_meshes_are_written_as_dimensions_and_refused_with_what_is_wrong() -> None:
    assert parse_mesh(None, 3) == {"dp_shard": 3}
    assert parse_mesh("dp_replicate=2,dp_shard=3,tp=2", 1) == {"dp_replicate": 2, "dp_shard": 3, "tp": 2}
    assert parse_mesh("tp=2", 1) == {"dp_shard": 1, "tp": 2}
    for bad in ("dp=2", "tp", "tp=0", "tp=2,tp=2", "tp=x", ""):
        with pytest.raises(UsageError, match="mesh="):
            parse_mesh(bad, 1)


def test_settings_reach_the_workers_as_they_are(tmp_path: Path) -> None:
    runs = [
        RunSettings(
            "a", OpenOptions(config="c", wrap=["x"]), {"dp_shard": 2, "tp": 3}, rates={4: [0.1, 0.2]}, clip=1.0
        ),
        RunSettings("b"),
    ]
    write_settings(str(tmp_path / "r"), runs)
    assert read_settings(str(tmp_path / "r")) == runs
    assert [r.world_size for r in runs] == [6, 1]


# -------------------------------------------------------------------------------------------------------- recorder


def little() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 2))
    model[0].bias.requires_grad_(False)
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)


def test_a_recorder_writes_what_the_optimizer_did_in_numbers_that_are_not_rounded(tmp_path: Path) -> None:
    model, optimizer = little()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    ids = torch.arange(6).reshape(2, 3)
    with ckpttool.Recorder(tmp_path / "r.jsonl", model, optimizer, global_batch=2, clip=0.01) as rec:
        rec.state(0)
        loss = model(torch.ones(2, 3)).square().mean()
        loss.backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 7.0  # the scheduler's turn
        rec.step(1, loss=loss, batch=[ids[:1], ids[1:]], grad_norm=norm, tokens=4)
    trace = read_reference(tmp_path / "r.jsonl")
    (step,) = trace.steps
    assert trace.dropout and trace.global_batch == 2 and trace.clip == 0.01 and trace.world_size == 1
    assert step.loss == loss.item() and step.tokens == 4 and step.learning_rates == [0.1]
    assert step.grad_norm == float(norm) and step.batch == f"{batches.digest_and_mark_rows(ids.numpy())[0]:032x}"
    assert step.grads == {n: pytest.approx(float(g.norm()), rel=1e-6) for n, g in grads.items()}, "before clipping"
    moved = {n: float((p.detach() - before[n]).norm()) for n, p in model.named_parameters() if p.requires_grad}
    assert step.updates == {n: pytest.approx(v, rel=1e-6) for n, v in moved.items()}
    assert "0.bias" not in step.updates
    assert step.update_norm == pytest.approx(math.hypot(*moved.values()), rel=1e-6)
    assert trace.state.keys() == {f"model.{n}" for n in before}, "there was no optimizer state before the first step"
    assert trace.groups[0]["lr"] == 0.1 and "fused" not in trace.groups[0]


@pytest.mark.slow
def test_buffers_that_no_checkpoint_has_are_those_of_the_recorded_job(tmp_path: Path) -> None:
    class Rotary(torch.nn.Module):
        def __init__(self, last: float) -> None:
            super().__init__()
            self.register_buffer("inv_freq", torch.tensor([1.0, 0.5, last]), persistent=False)
            self.register_buffer("mask", torch.zeros(2000), persistent=False)
            self.register_buffer("kept", torch.ones(2))

    theirs, ours = (torch.nn.ModuleDict({"rope": Rotary(last)}) for last in (0.25, 0.25 + 2**-20))
    recorder = ckpttool.Recorder(tmp_path / "r.jsonl", torch.compile(theirs, backend="eager"))
    recorder.state(0)
    with (tmp_path / "r.jsonl").open("a") as f:
        f.write(format_record_line("step", step=1, loss=1.0))
    known = read_reference(tmp_path / "r.jsonl", 0)
    assert [*known.buffers] == ["rope.inv_freq"], "neither what the checkpoint has nor what is large"
    (note,) = use_recorded_buffers(ours, known.buffers)
    assert "rope.inv_freq" in note and "9.5e-07" in note
    assert (
        torch.equal(ours["rope"].inv_freq, theirs["rope"].inv_freq) and use_recorded_buffers(ours, known.buffers) == []
    )
    assert use_recorded_buffers(torch.nn.ModuleDict({"other": Rotary(1.0)}), known.buffers) == []


def test_kernels_of_a_gpu_are_those_of_the_recorded_job() -> None:
    try:
        use_numerics(True, {})
        assert read_numerics() == {
            "deterministic": True,
            "tf32": False,
            "cudnn_tf32": False,
            "bf16_reduced_precision": False,
        }
        known = {"deterministic": False, "tf32": True, "cudnn_tf32": False, "bf16_reduced_precision": True}
        use_numerics(False, known)
        assert read_numerics() == known
        use_numerics(False, {"tf32": False})
        assert read_numerics()["cudnn_tf32"], "torch's default, where an older recording does not say"
        torch.use_deterministic_algorithms(True, warn_only=True)
        assert read_numerics()["deterministic"] is False, "attention adds in any order with warn_only"
    finally:
        use_numerics(False, {"tf32": False, "bf16_reduced_precision": True})


@pytest.mark.slow
def test_tf32_that_was_set_by_torch_s_newer_names_is_read_and_overruled() -> None:
    """transformers does so for `tf32=True`; torch then raises RuntimeError where `allow_tf32` is read."""
    code = """if True:
        import torch
        from ckpttool.resume.trace.numerics import read_numerics, use_numerics
        torch.backends.fp32_precision = "tf32"
        first = read_numerics()
        use_numerics(True, {})
        then = read_numerics()
        print(first["tf32"], first["cudnn_tf32"], then["tf32"], then["cudnn_tf32"])
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True", "False", "False"]


def test_runs_of_one_device_share_its_kernels() -> None:
    a = Trace(
        micro_batch=4, sequence=8, dtype="bf16", device="cuda", global_batch=8, environment={"deterministic": True}
    )
    assert have_same_micro_batch_shape(a, a) and not have_same_micro_batch_shape(
        a, replace(a, environment={"deterministic": False})
    )
    assert have_same_micro_batch_shape(a, replace(a, device="cpu", environment={"deterministic": False})), (
        "the CPU has one order"
    )


def test_a_job_that_needs_more_gpus_names_the_cpu() -> None:
    with pytest.raises(UsageError, match=r"3 ranks, but this machine has 1 GPU\. Pass device='cpu'"):
        choose_mesh(3, None, False, "cuda", 1)


def test_the_state_of_a_trained_job_has_its_moments_and_steps(tmp_path: Path) -> None:
    model, optimizer = little()
    rec = ckpttool.Recorder(tmp_path / "r.jsonl", model, optimizer, norms=False)
    for step in (1, 2):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        rec.step(step, loss=0.5)
    rec.state(2)
    trace = read_reference(tmp_path / "r.jsonl")
    assert {"optim.state.0.weight.exp_avg", "optim.state.2.bias.step"} <= trace.state.keys()
    assert trace.scalars["optim.state.0.weight.step"] == 2.0
    assert trace.steps[0].grads == {} and trace.steps[0].update_norm is None and trace.steps[0].grad_norm is None
    assert not any("0.bias" in n for n in trace.state if n.startswith("optim")), "frozen"


def test_a_recorder_goes_without_an_optimizer_of_torch(tmp_path: Path) -> None:
    rec = ckpttool.Recorder(tmp_path / "r.jsonl", micro_batch=2)
    rec.step(5, loss=1.25, learning_rates=[0.5], grad_norm=torch.tensor(2.0))
    (step,) = read_reference(tmp_path / "r.jsonl").steps
    assert (step.loss, step.learning_rates, step.grad_norm) == (1.25, [0.5], 2.0)
    rec.state(5)
    lacks = read_reference(tmp_path / "r.jsonl").unrecorded
    assert set(lacks) == {"model", "optimizer", "scheduler", "scaler", "dataloader", "extra", "probe"}


def test_tied_names_and_dropouts_are_found() -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight
    assert live_facts.list_tied_names(model) == [["a.weight", "b.weight"]]
    assert not live_facts.has_dropout(model)
    model["a"].attention_dropout = 0.25
    assert live_facts.has_dropout(model)


# ----------------------------------------------------------------------------------------------------- before a launch


@pytest.mark.parametrize(
    ("how", "said"),
    [({"against": "x", "reference": "y"}, "give one"), ({"steps": 0}, "steps=0: must be at least 1"), ({"profile": "lax"}, "strict, standard, relaxed"), ({"mesh": "dp_shard=2,tp=2", "world_size": 3}, "4 ranks, but there are 3"),
     ({"global_batch": 3, "micro_batch": 2}, "not a multiple"), ({"dtype": "fp8"}, "fp32 or bf16"), ({"device": "tpu"}, "auto, cuda or cpu"),
     ({"micro_batch": 3, "global_batch": 3, "calibrate": True}, "neither half nor double")],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_before_anything_starts(tmp_path: Path, how: dict[str, Any], said: str) -> None:
    torch.save({"model": {"w": torch.ones(2)}, "step": 3}, tmp_path / "x.pt")
    with pytest.raises(UsageError, match=said):
        launch.resume_verify(tmp_path / "x.pt", **{"device": "cpu", **how})


def test_a_reference_that_ends_before_the_checkpoint_is_refused(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(2)}, "step": 3}, tmp_path / "x.pt")
    (tmp_path / "r.jsonl").write_text(format_record_line("step", step=3, loss=1.0))
    with pytest.raises(UsageError, match=r"steps 3\.\.3, but the checkpoint is of step 3"):
        launch.resume_verify(tmp_path / "x.pt", reference=tmp_path / "r.jsonl", device="cpu")


def test_the_keywords_for_type_checkers_are_the_fields_of_the_request() -> None:
    made = {f.name: f.type for f in fields(VerifyRequest) if f.name not in ("source", "reading")}
    typed = {
        n: t.__forward_arg__ for n, t in VerifyKeywords.__annotations__.items() if n not in ReadKeywords.__annotations__
    }
    assert typed == made
    listed = signature(ckpttool.resume_verify).parameters
    assert [*listed][1 : 1 + len(made)] == [*made] and {*listed} - {*made} == {"source", *ReadKeywords.__annotations__}
    with pytest.raises(TypeError, match=r"resume_verify\(\) got an unexpected keyword argument 'step'"):
        ckpttool.resume_verify("x", step=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("state", "step"),
    [({"model": {}, "step": 7}, 7), ({"model": {}, "global_step": 8, "epoch": 1}, 8), ({"model": {}, "epoch": 1}, 0),
     ({"model": {"w": torch.ones(2)}, "optimizer": {"state": {0: {"step": torch.tensor(9.0), "exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 1, "params": [0]}]}}, 9)],
)  # fmt: skip
def test_the_step_of_a_checkpoint_is_its_counter_or_that_of_its_optimizer(
    tmp_path: Path, state: Any, step: int
) -> None:
    state["model"].setdefault("w", torch.ones(2))
    torch.save(state, tmp_path / "x.pt")
    with ckpttool.open(tmp_path / "x.pt") as opened:
        assert find_start_step(opened) == step


@pytest.mark.parametrize(("folder", "step"), [("step-4", 4), ("ckpt", 8), ("step-5", 8)])
def test_the_step_of_a_checkpoint_with_a_file_of_a_later_one_is_that_of_its_folder(
    tmp_path: Path, folder: str, step: int
) -> None:
    weights = {n: torch.ones(2) for n in "ab"}
    slots = {i: {"step": torch.tensor(s), "exp_avg": torch.ones(2)} for i, s in enumerate((4.0, 8.0))}
    tree = {"model": weights, "optimizer": {"state": slots, "param_groups": [{"lr": 1, "params": [0, 1]}]}}
    torch.save(tree, tmp_path / "x.pt")
    ckpttool.convert(tmp_path / "x.pt", tmp_path / folder, to="dcp", world_size=2)
    with ckpttool.open(tmp_path / folder) as opened:
        assert find_start_step(opened) == step


# ------------------------------------------------------------------------------------------- what a hostile tester found


def test_of_several_recorded_states_that_of_the_checkpoint_counts(tmp_path: Path) -> None:
    states = [format_record_line("state", step=n, state={"model.w": ["float32", [2], f"{n:02x}"]}) for n in (3, 6, 9)]
    (tmp_path / "r.jsonl").write_text("".join(states) + format_record_line("step", step=10, loss=1.0))
    assert read_reference(tmp_path / "r.jsonl", 6).state["model.w"][2] == "06"
    assert read_reference(tmp_path / "r.jsonl", 7).start == 9


@pytest.mark.parametrize(
    "record",
    [{"kind": "step", "step": 1, "loss": 1.0, "grads": [1]}, {"kind": "step", "step": 1, "loss": 1.0, "learning_rates": 3},
     {"kind": "step", "step": 1, "loss": 1.0, "grad_norm": "much"}, {"kind": "start", "config": 3}, {"kind": "start", "global_batch": "x"},
     {"kind": "state", "step": 1, "state": {}, "scalars": [1]}, {"kind": "state", "step": 1, "state": {}, "groups": [3]}],
)  # fmt: skip
def test_a_reference_whose_facts_are_of_another_kind_is_refused_before_a_run(tmp_path: Path, record: Any) -> None:
    (tmp_path / "r.jsonl").write_text(json.dumps(record) + "\n" + format_record_line("step", step=2, loss=1.0))
    with pytest.raises(Corrupt, match="line 1"):
        read_reference(tmp_path / "r.jsonl")


def test_a_recorder_that_begins_again_takes_away_the_half_line_of_the_killed_one(tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    file.write_text(format_record_line("step", step=1, loss=1.0) + '{"kind": "step", "st')
    ckpttool.Recorder(file).step(2, loss=2.0)
    assert [s.step for s in read_reference(file).steps] == [1, 2]


@pytest.mark.parametrize(
    "words", [{"RANK": "0", "WORLD_SIZE": "abc"}, {"RANK": "0", "WORLD_SIZE": "1"}, {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}],
)  # fmt: skip
def test_an_environment_that_makes_no_sense_is_refused(tmp_path: Path, words: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    for key in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(key, raising=False)
    for key, value in words.items():
        monkeypatch.setenv(key, value)
    torch.save({"model": {"w": torch.ones(2)}, "step": 3}, tmp_path / "x.pt")
    with pytest.raises(UsageError, match="make no sense"):
        launch.resume_verify(tmp_path / "x.pt", device="cpu")


@pytest.mark.parametrize(
    ("names", "config", "says"),
    [
        (["default"], None, "holds LoRA layers, and adapter_config.json, which describes them, is neither in"),
        (["default"], {"peft_type": "LOHA"}, "adapter_config.json is of LOHA, not of LORA"),
        (["a", "b"], {"peft_type": "LORA"}, r"holds several adapters \(a, b\)"),
        (
            ["x"],
            {"peft_type": "LORA", "use_qalora": True},
            r"sets 'use_qalora': its inputs are pooled in groups \(QALoRA\)\. Give the job",
        ),
        (["x"], {"peft_type": "LORA", "tomorrow": 1}, "sets 'tomorrow': ckpttool does not know what that changes"),
        (
            ["x"],
            {"peft_type": "LORA", "r": 2, "target_modules": ["zzz"]},
            "PEFT does not make the layers .*Target modules .*not found",
        ),
        (["x"], {"peft_type": "LORA", "r": "two", "target_modules": ["q"]}, "PEFT does not make the layers"),
    ],
)
def test_lora_layers_that_cannot_be_made_are_refused(tmp_path: Path, names: list[str], config: Any, says: str) -> None:
    torch.save({"model": {f"q.lora_A.{n}.weight": torch.ones(2, 3) for n in names}}, tmp_path / "x.pt")
    (tmp_path / "of_model").mkdir()
    if config is not None:
        (tmp_path / "of_model" / "adapter_config.json").write_text(json.dumps(config))
    settings = RunSettings(source=str(tmp_path / "x.pt"), config=str(tmp_path / "of_model"))
    model = torch.nn.ModuleDict({"q": torch.nn.Linear(3, 3)})
    with ckpttool.open(tmp_path / "x.pt") as opened, pytest.raises(Unsupported, match=says):
        add_lora_layers(model, settings, opened)


def test_an_adapter_config_is_found_beside_the_checkpoint_and_needs_a_peft_that_knows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"model": {"q.lora_A.weight": torch.ones(2, 3)}}, tmp_path / "x.pt")
    (tmp_path / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "r": 2, "target_modules": ["q"], "use_dora": true}'
    )
    (tmp_path / "of_model").mkdir()
    settings = RunSettings(source=str(tmp_path / "x.pt"), config=str(tmp_path / "of_model"))
    with ckpttool.open(tmp_path / "x.pt") as opened:
        made = add_lora_layers(torch.nn.ModuleDict({"q": torch.nn.Linear(3, 3)}), settings, opened)
        assert "q.lora_magnitude_vector.default.weight" in dict(made.named_parameters())

        @dataclass
        class Old:
            r: int = 8

        monkeypatch.setattr("peft.LoraConfig", Old)
        with pytest.raises(
            Unsupported, match=r"sets 'target_modules', which PEFT .* here does not have\. Install a newer"
        ):
            add_lora_layers(made, settings, opened)


def test_only_fields_that_say_which_layers_there_are_are_taken_from_an_adapter_config(tmp_path: Path) -> None:
    torch.save({"model": {"q.lora_A.x.weight": torch.ones(2, 3)}}, tmp_path / "x.pt")
    config = {
        "peft_type": "LORA",
        "r": 2,
        "target_modules": ["q"],
        "megatron_config": {},
        "megatron_core": "antigravity",
    }
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with ckpttool.open(tmp_path / "x.pt") as opened:
        model = torch.nn.ModuleDict({"q": torch.nn.Linear(3, 3), "k": torch.nn.Linear(3, 3)})
        made = add_lora_layers(model, RunSettings(source=str(tmp_path / "x.pt"), config=str(tmp_path)), opened)
    assert {n for n, _ in made.named_parameters() if "lora" in n} == {"q.lora_A.x.weight", "q.lora_B.x.weight"}
    assert "antigravity" not in sys.modules


def test_data_that_ends_says_which_samples_a_step_reads() -> None:
    rows = batches.wrap_user_data(lambda index: [[1, 2], [3, 4]][index])
    assert rows(1)["input_ids"].tolist() == [3, 4]
    with pytest.raises(UsageError, match=r"has no sample 2 \(list index out of range\)\. Step n .*index % len"):
        rows(2)


def test_an_error_of_a_rank_keeps_its_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "exit_process", lambda status: None)
    worker._exit_with_error(str(tmp_path), 1, Truncated("__1_0.distcp ends early."))
    with pytest.raises(Corrupt, match=r"__1_0\.distcp ends early") as raised:
        ranks.raise_rank_error(str(tmp_path), {1: 1})
    assert raised.value.exit_code == 4


def test_a_reference_that_says_nothing_of_the_optimizer_proves_nothing() -> None:
    from ckpttool.resume.compare.verdict import Check, Report

    first = Check("step 1", "step1.loss", "pass", "")
    assert Report(Trace(), Trace(), "strict", [first]).word == "not comparable"
    assert Report(Trace(), Trace(), "strict", [first, Check("steps", "steps.loss", "pass", "")]).word == "pass"


@pytest.mark.parametrize("built", ["train", "eval"])
def test_the_probe_leaves_in_evaluation_mode_what_the_job_keeps_there(built: str, tmp_path: Path) -> None:
    """As a frozen BatchNorm; a model that from_pretrained() made is in evaluation mode whole, and training begins with train()."""
    from types import SimpleNamespace

    import torch.distributed as dist

    from ckpttool.resume.job.training import measure_probe

    model = torch.nn.Sequential(torch.nn.Embedding(7, 4), torch.nn.BatchNorm1d(3), torch.nn.Linear(4, 7))
    getattr(model, built)()
    model[1].eval()
    seen: list[bool] = []

    def loss(m: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[None, None, torch.Tensor]:
        seen.append(m.training or m[1].training)  # type: ignore[index]
        return None, None, m(batch["input_ids"])

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        job: Any = SimpleNamespace(model=model, loss=loss)
        rows = batches.wrap_user_data(lambda index: [1, 2, index])
        measure_probe(job, rows, RunSettings(source="x", micro_batch=2), str(tmp_path / "probe.npy"), trace := Trace())
    finally:
        dist.destroy_process_group()
    assert seen == [False] and trace.probe["agree"] is True
    assert [model.training, model[0].training, model[1].training] == [True, True, built == "eval"]


@pytest.mark.parametrize(
    ("kind", "text", "lost"),
    [
        ("DistBackendError", "NCCL error: invalid usage, Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 0", False),
        ("DistBackendError", "ncclSystemError: System call (e.g. socket, malloc) failed. No network interface found", False),
        ("DistBackendError", "ncclRemoteError: possibly due to a network error or a remote process exiting prematurely.", True),
        ("DistBackendError", "Last error: Connection closed by remote peer node3", True),
        ("DistNetworkError", "The client socket has failed to connect", True),
    ],
)  # fmt: skip
def test_an_error_of_nccl_is_of_a_lost_rank_if_it_says_so(kind: str, text: str, lost: bool) -> None:
    assert torchrun.is_lost_peer_error(getattr(torch.distributed, kind)(text)) is lost


@pytest.mark.parametrize(
    ("environment", "count", "gpu"),
    [
        ({"RANK": "5", "LOCAL_RANK": "1"}, 4, 1),
        ({"RANK": "5", "SLURM_LOCALID": "3"}, 4, 3),
        ({"RANK": "5", "SLURM_LOCALID": "3"}, 1, 0),
        ({"RANK": "5"}, 4, 1),
    ],
)
def test_a_rank_has_the_gpu_of_its_number_on_the_machine(
    environment: dict[str, str], count: int, gpu: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "LOCAL_RANK", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert torchrun._choose_gpu(count) == gpu
    monkeypatch.setenv("LOCAL_RANK", "8")
    with pytest.raises(UsageError, match="LOCAL_RANK is 8, and this rank sees"):
        torchrun._choose_gpu(count)


@pytest.mark.parametrize("several", [False, True])
def test_the_generator_of_a_gpu_is_restored_from_one_state_or_from_a_list(
    several: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the second GPU, which a stand-in for torch.cuda takes the state of."""
    of_gpus = [torch.full((16,), k, dtype=torch.uint8) for k in range(2)]
    own = {"cpu": torch.get_rng_state(), "cuda": of_gpus if several else of_gpus[1]}
    torch.save({"model": {"w": torch.ones(1)}, "rng": {"0": own}}, tmp_path / "a.pt")
    torch.save({"model": {"w": torch.ones(1)}, "rng": {"0": {"cpu": own["cpu"]}}}, tmp_path / "b.pt")
    given: list[torch.Tensor] = []
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_rng_state", given.append)
    settings = RunSettings(source="", keep_dropout=True, device="cuda")
    out, without = Trace(), Trace()
    with ckpttool.open(tmp_path / "a.pt") as opened:
        worker._restore_random_states(settings, opened, out)
    with ckpttool.open(tmp_path / "b.pt") as opened:
        worker._restore_random_states(settings, opened, without)
    assert out.environment["rng_restored"] and len(given) == 1 and torch.equal(given[0], of_gpus[1])
    assert without.environment["rng_restored"] is False and "no generators of GPUs" in without.notes[0]


def test_a_gpu_without_memory_is_not_a_checkpoint_that_does_not_fit() -> None:
    class Full(torch.optim.AdamW):
        def step(self, closure: Any = None) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

    optimizer = Full([torch.nn.Parameter(torch.ones(2))])
    with pytest.raises(torch.OutOfMemoryError):
        create_optimizer_state(optimizer, list(optimizer.param_groups[0]["params"]), [])
