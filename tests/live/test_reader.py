"""Any layout into a live job: names, boxes, values, refusals; real FSDP2 jobs that load every fixture under torchrun."""

from __future__ import annotations

import gc
import itertools
import json
import math
import os
import random
import shutil
import subprocess
import sys
import warnings
import zlib
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from peers import FIXTURES, FLAT, ORIGINALS, REPOSITORY, Original, load_dcp, same_value
from ranks import torchrun
from safetensors.torch import load_file
from sampling import sample
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import ckpttool
from ckpttool.engine.opening import OpenCheckpoint
from ckpttool.errors import CkpttoolError, Corrupt, Differs, SourceChanged, Unsafe, Unsupported
from ckpttool.index import boxes
from ckpttool.index.check import check
from ckpttool.index.checkpoint import ITEMSIZE, Checkpoint, Chunks, TensorEntry, Value, joined
from ckpttool.layouts import detect, find, place
from ckpttool.live import torch_reader
from ckpttool.live.name_lookup import NameLookup
from ckpttool.live.plain_values import is_lossless_cast, to_plain
from ckpttool.live.reader import LiveReader, ReadRequest
from ckpttool.live.scatter import Tuning
from ckpttool.storage.source import Source

sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests" / "attacks")]

from evil import runs  # noqa: E402

from fixtures import jobs  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")


def failure(error: CheckpointException) -> BaseException:
    """What happened on the one rank."""
    return next(iter(error.failures.values()))[0]


def load(tree: dict[str, Any], path: Path, planner: Any = None, **how: Any) -> Any:
    """dcp.load through our reader, which is given back; what it raises comes bare."""
    ours = ckpttool.storage_reader(path, **how)
    try:
        dcp.load(tree, storage_reader=ours, planner=planner)
    except CheckpointException as e:
        raise failure(e) from e
    return ours


# ------------------------------------------------------------------------------------------------------- live jobs


def can_be_split(o: Original) -> bool:
    """Whether tensor parallelism over two ranks can have the model: two key/value heads, and no tied weights."""
    model = jobs.read_case(o.folder)["model"]
    told = model["kwargs"]
    return model["name"] == "llama" and "num_key_value_heads" not in told and not told.get("tie_word_embeddings")


#: torch cannot put a flattened optimizer back together when a parameter has no state.
NOT_FLAT = {"awkward_w3", "zero3_w3_fresh"}

#: name -> (ranks, mesh, {way to load: which of the checkpoints, a slice of them}, whether all models are sharded so: not all
#: can with TP, and replicas are no other case). Every checkpoint is loaded by ours at 3 ranks and by dcp.load at 1 or 2;
#: other meshes and ways take turns, since what they change does not depend on the layout.
JOBS: dict[str, tuple[int, dict[str, int], dict[str, slice], bool]] = {
    "1 rank": (1, {"dp": 1}, {"dcp": slice(0, None, 2)}, True),
    "2 ranks": (2, {"dp": 2}, {"dcp": slice(1, None, 2), "flat": slice(1, None, 3), "bare": slice(2, None, 4)}, True),
    "3 ranks": (3, {"dp": 3}, {"load": slice(None), "dcp": slice(3, None, 6)}, True),
    "4 ranks": (4, {"dp": 4}, {"load": slice(0, None, 5)}, True),
    "HSDP 2 x 2": (4, {"replicate": 2, "shard": 2}, {"dcp": slice(0, None, 2)}, False),
    "FSDP 2 x TP 2": (
        4, {"dp": 2, "tp": 2}, {"load": slice(0, None, 2), "dcp": slice(1, None, 2), "bare": slice(0, None, 3)}, False,
    ),
}  # fmt: skip


@pytest.mark.live
@pytest.mark.slow
@pytest.mark.parametrize("name", sample("live jobs that are filled", JOBS, ["1 rank", "FSDP 2 x TP 2"]))
def test_a_live_job_filled_from_every_layout_holds_the_truth_and_trains_on(name: str, tmp_path: Path) -> None:
    world, mesh, ways, every = JOBS[name]
    words: list[str] = []
    labels: list[str] = []
    possible = [o for o in [*ORIGINALS, *FLAT] if every or can_be_split(o)]
    for way, some in ways.items():
        for o in [o for o in possible if way != "flat" or o.case not in NOT_FLAT][some]:
            uses_config = "config" in detect(place(o.path)).reader_uses
            how = {**o.how, **({"config": o.config} if o.config and uses_config else {})}
            words += [str(o.folder), str(o.path), json.dumps({"way": way, "how": how, "mesh": mesh})]
            labels.append(f"{o.label} {way}")
    out = tmp_path / "verdicts.json"
    said = torchrun(world, "reader_jobs.py", *words, "--out", str(out))
    assert out.exists(), said[-4000:]
    verdicts = dict(zip(labels, json.loads(out.read_text()), strict=True))
    assert {label: v for label, v in verdicts.items() if not v["ok"]} == {}
    assert len(verdicts) > 3
    if name == "3 ranks":
        assert len({label.split()[0] for label in labels}) == len(possible) > 40, "every checkpoint there is"
        assert os.listdir(os.environ["ANSWERS"]), "a model with fused experts is asked for"


@pytest.mark.live
@pytest.mark.slow
def test_the_judge_of_these_jobs_sees_a_checkpoint_whose_bytes_are_others(tmp_path: Path) -> None:
    case = FIXTURES / "fsdp2_w3"
    shutil.copytree(case / "ckpt", tmp_path / "ckpt")
    tensor = load_file(case / "truth.safetensors")["model.lm_head.weight"]
    first = tensor.numpy().tobytes()[:64]
    changed = 0
    for path in (tmp_path / "ckpt").glob("*.distcp"):
        data = path.read_bytes()
        changed += data.count(first)
        path.write_bytes(data.replace(first, bytes(64)))
    assert changed == 1
    out = tmp_path / "verdicts.json"
    words = [w for way in ("load", "dcp") for w in (str(case), str(tmp_path / "ckpt"), json.dumps({"way": way}))]
    said = torchrun(2, "reader_jobs.py", *words, "--out", str(out))
    assert out.exists(), said[-4000:]
    for verdict in json.loads(out.read_text()):
        assert not verdict["ok"] and "lm_head" in verdict["first_difference"]


# ----------------------------------------------------------------------------------------------------------- names


def index(tensors: list[tuple[Any, ...]], values: dict[tuple[Any, ...], Any], **more: Any) -> Checkpoint:
    """An index of these paths; no file behind it."""
    listed = {joined(p): TensorEntry("float32", (4,), p, Chunks.whole((4,), 0, 0, 16)) for p in tensors}
    return Checkpoint("full", "/x", 1, ["f"], [16], listed, {joined(p): Value(p, v) for p, v in values.items()}, **more)


LISTED = index(
    [
        ("model", "model.embed.weight"), ("model", "head.weight"), ("model", "module.odd.weight"),
        ("optim", "state", "model.embed.weight", "exp_avg"), ("optim", "state", "head.weight", "exp_avg"),
        ("rng", "torch"),
    ],
    {
        ("optim", "param_groups", 0, "lr"): 0.1, ("optim", "param_groups", 0, "params"): ["model.embed.weight"],
        ("optim", "param_groups", 1, "lr"): 0.2, ("optim", "param_groups", 1, "params"): ["head.weight"],
        ("scheduler", "last_epoch"): 3, ("trainer", "step"): 7, ("extra", "args", "lr"): 0.5,
    },
    origin={("trainer", "step"): ("step",), ("scheduler",): ("lr_scheduler",), ("rng",): ("rng_states",),
            ("extra", "args"): ("args",)},
)  # fmt: skip

UNDERSTOOD = {
    # canonical names
    "model.model.embed.weight": "model.model.embed.weight",
    "optim.state.head.weight.exp_avg": "optim.state.head.weight.exp_avg",
    "optim.param_groups.1.lr": "optim.param_groups.1.lr",
    "trainer.step": "trainer.step",
    # the source's own
    "step": "trainer.step",
    "lr_scheduler.last_epoch": "scheduler.last_epoch",
    "args.lr": "extra.args.lr",
    "rng_states.torch": "rng.torch",
    # other words for a component
    "optimizer.state.head.weight.exp_avg": "optim.state.head.weight.exp_avg",
    "model_state_dict.head.weight": "model.head.weight",
    "state_dict.model.embed.weight": "model.model.embed.weight",
    "optimizer_states.0.state.head.weight.exp_avg": "optim.state.head.weight.exp_avg",
    "lr_scheduler_state_dict.last_epoch": "scheduler.last_epoch",
    "train_state.step": "trainer.step",
    "rng.torch": "rng.torch",
    # bare FQNs
    "model.embed.weight": "model.model.embed.weight",
    "head.weight": "model.head.weight",
    # one key in front of all
    "app.model.head.weight": "model.head.weight",
    "app.optimizer.state.head.weight.exp_avg": "optim.state.head.weight.exp_avg",
    # wrappers inside FQNs
    "model._orig_mod.head.weight": "model.head.weight",
    "_orig_mod.model.embed._checkpoint_wrapped_module.weight": "model.model.embed.weight",
    "model.module.head.weight": "model.head.weight",
    "module.model._fsdp_wrapped_module.embed.weight": "model.model.embed.weight",
    "model.module.odd.weight": "model.module.odd.weight",
    "model.module.module.odd.weight": "model.module.odd.weight",
    "optim.state._orig_mod.head.weight.exp_avg": "optim.state.head.weight.exp_avg",
    # flattened optimizers
    "state.head.weight.exp_avg": "optim.state.head.weight.exp_avg",
    "param_groups.head.weight.lr": "optim.param_groups.1.lr",
    "optim.param_groups.model.embed.weight.lr": "optim.param_groups.0.lr",
    "optimizer.param_groups._orig_mod.head.weight.lr": "optim.param_groups.1.lr",
    "param_groups.0.lr": "optim.param_groups.0.lr",
    # what is not there
    "model.missing": None,
    "optim.state.head.weight.exp_avg_sq": None,
    "optim.param_groups.head.weight.betas": None,
    "optim.param_groups.absent.weight.lr": None,
    "global_step": None,
    "lr": None,
    "": None,
    "model": None,
    "model.": None,
}  # fmt: skip


@pytest.mark.parametrize("asked", UNDERSTOOD)
def test_a_name_is_understood_in_the_ways_that_jobs_have(asked: str) -> None:
    assert NameLookup(LISTED).find(asked) == UNDERSTOOD[asked]


AMBIGUOUS = {
    "one parameter in two groups": (
        index([], {("optim", "param_groups", 0, "lr"): 1, ("optim", "param_groups", 0, "params"): ["w"],
                   ("optim", "param_groups", 1, "lr"): 2, ("optim", "param_groups", 1, "params"): ["w"]}),
        "param_groups.w.lr",
    ),
    "DDP's prefix, or a module of that name": (
        index([("model", "w"), ("model", "x.module.w"), ("model", "module._.w")], {}), None,
    ),
    "the source's own key is another entry's canonical name": (
        index([], {("trainer", "step"): 1, ("extra", "trainer", "step"): 2},
              origin={("trainer", "step"): ("step",), ("extra", "trainer"): ("trainer",)}),
        "trainer.step",
    ),
    "a FQN that begins as an optimizer does": (
        index([("model", "state.w.exp_avg"), ("optim", "state", "w", "exp_avg")], {}), "state.w.exp_avg",
    ),
    "a FQN with and without DDP's prefix": (
        index([("model", "module.w"), ("model", "w")], {}), "model._orig_mod.module.w",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [k for k, v in AMBIGUOUS.items() if v[1]])
def test_a_name_that_means_two_things_is_no_guess(name: str) -> None:
    ckpt, asked = AMBIGUOUS[name]
    assert asked is not None
    with pytest.raises(Unsupported, match="can mean"):
        NameLookup(ckpt).find(asked)


def test_names_that_are_asked_for_together_are_understood_in_one_way() -> None:
    names = NameLookup(index([("model", "model.w"), ("model", "w")], {}))
    assert names.find("model.w") == "model.w" and names.find("w") == "model.w"
    names.check_consistent(["model.w", "model.model.w"])
    with pytest.raises(Unsupported, match='both mean "model'):
        names.check_consistent(["w", "model.w"])
    two = NameLookup(index([("model", "w"), ("model", "v")], {("trainer", "step"): 1}))
    two.check_consistent(["app.model.w", "app.model.v", "step"])
    with pytest.raises(Unsupported, match="different leading keys"):
        two.check_consistent(["vision.model.w", "text.model.v"])
    with pytest.raises(Unsupported, match="different leading keys"):
        two.check_consistent(["vision.model.w", "v"])


def test_a_bare_state_dict_whose_names_mean_two_things_is_refused_before_a_byte_is_written(tmp_path: Path) -> None:
    torch.save({"model": {"model.w": torch.ones(2), "w": torch.zeros(2)}, "optim": {"state": {}}}, tmp_path / "a.pt")
    tree = {"model.w": torch.full((2,), 5.0), "w": torch.full((2,), 5.0)}
    with pytest.raises(Unsupported, match="both mean"):
        load(tree, tmp_path / "a.pt")
    assert all((t == 5).all() for t in tree.values())


# ------------------------------------------------------------------------------------------------------------ boxes


def opened(ckpt: Checkpoint, folder: Path) -> Any:
    """An index of ours behind the reader."""
    check(ckpt)
    return LiveReader(folder, OpenCheckpoint(ckpt, Source(folder), find("full"), folder=True))


def pieces_of(shape: tuple[int, ...], draw: random.Random) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Boxes that cover a tensor: flat ranges as ZeRO makes them, or a grid, or rows, or one."""
    kind = draw.choice(["one", "rows", "grid", "flat"])
    if kind == "flat":
        cuts = sorted({0, prod(shape), *(draw.randrange(prod(shape) + 1) for _ in range(6))})
        return [b for a, z in itertools.pairwise(cuts) for b in boxes.flat_to_boxes(shape, a, z)]
    axes = []
    for d, n in enumerate(shape):
        cut = kind == "grid" or (kind == "rows" and d == 0)
        cuts = sorted({0, n, *(draw.randrange(n + 1) for _ in range(2 if cut else 0))})
        axes.append(list(itertools.pairwise(cuts)))
    out: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), ())]
    for axis in axes:
        out = [((*s, a), (*k, b - a)) for s, k in out for a, b in axis]
    draw.shuffle(out)
    return out


TARGETS = ("contiguous", "transposed", "gaps", "other dtype")


@given(seed=st.integers(0, 1 << 40))
def test_any_box_of_any_tensor_in_any_chunks_is_what_numpy_says(
    seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    draw = random.Random(seed)
    folder = tmp_path_factory.mktemp("boxes")
    dtype = draw.choice(["float32", "bfloat16", "int64", "uint8", "bool", "float8_e4m3fn", "float16"])
    shape = tuple(draw.randint(1, 9) for _ in range(draw.randint(0, 4)))
    item = ITEMSIZE[dtype]
    generator = np.random.default_rng(seed)
    raw = generator.integers(0, 2 if dtype == "bool" else 120, (*shape, item), dtype=np.uint8)
    chunks, content = Chunks(len(shape)), bytearray(draw.randbytes(draw.randrange(20)))
    for start, size in pieces_of(shape, draw):
        part = raw[tuple(slice(a, a + k) for a, k in zip(start, size, strict=True))]
        content += bytes(draw.randrange(30))
        if draw.random() < 0.4 and len(size) > 1:  # stored in another order of dimensions
            order = draw.sample(range(len(size)), len(size))
            steps = [0] * len(size)
            step = 1
            for d in reversed(order):
                steps[d], step = step, step * size[d]
            body = part.transpose([*order, len(size)]).tobytes()
            chunks.add(start, size, 0, len(content), len(body), tuple(steps))
        else:
            body = part.tobytes()
            chunks.add(start, size, 0, len(content), len(body))
        content += body
    (folder / "f").write_bytes(content)
    entry = TensorEntry(dtype, shape, ("model", "w"), chunks)
    it = opened(Checkpoint("full", str(folder), 1, ["f"], [len(content)], {"model.w": entry}, {}), folder)
    wanted, expected = [], []
    for _ in range(4):
        start = tuple(draw.randrange(n) for n in shape)
        size = tuple(draw.randint(1, n - a) for n, a in zip(shape, start, strict=True))
        kind = draw.choice(TARGETS)
        named = getattr(torch, dtype)
        if kind == "transposed":
            target = torch.empty(size[::-1], dtype=named).permute(tuple(range(len(size)))[::-1])
        elif kind == "gaps":
            target = torch.empty([2 * n for n in size], dtype=named)[tuple(slice(0, 2 * n, 2) for n in size)]
        else:
            target = torch.empty(size, dtype=torch.float64 if kind == "other dtype" and item > 1 else named)
        part = np.ascontiguousarray(raw[tuple(slice(a, a + k) for a, k in zip(start, size, strict=True))])
        truth = torch.from_numpy(part.reshape(-1).copy()).view(named).reshape(size)
        wanted.append(ReadRequest("model.w", start, size, target))
        expected.append(truth.to(target.dtype))
    it.tuning = Tuning(
        stage_bytes=draw.choice([16, 64, 1 << 20]), gap_bytes=draw.choice([0, 8, 1 << 14]),
        long_run_bytes=draw.choice([4, 1 << 16]), threads=draw.choice([1, 3]),
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        it.fill(wanted)
    for w, truth in zip(wanted, expected, strict=True):
        got = torch.empty(w.shape, dtype=w.target.dtype).copy_(w.target).reshape(-1).view(torch.uint8)
        assert torch.equal(got, truth.reshape(-1).view(torch.uint8)), (dtype, shape, w.start, w.shape)


@pytest.mark.parametrize("case", ["fsdp2_w2_zstd", "zero3_w4", "fsdp2_w3", "fsdp2_w4_tp", "fsdp1_w3_uop0", "hf_llama"])
@pytest.mark.parametrize("stage", [256, 1 << 20])
def test_boxes_of_real_checkpoints_are_those_of_the_truth(case: str, stage: int) -> None:
    o = next(o for o in [*ORIGINALS, *FLAT] if o.case == case)
    draw = random.Random(case)
    truth = {n: t for n, t in o.truth().items() if n.startswith("model.")}
    ours = ckpttool.storage_reader(o.path, **o.how).opened
    ours.tuning = Tuning(stage_bytes=stage)
    wanted, expected = [], []
    for name, t in truth.items():
        for _ in range(6):
            start = [draw.randrange(n) for n in t.shape]
            size = [draw.randint(1, n - a) for n, a in zip(t.shape, start, strict=True)]
            part = t[tuple(slice(a, a + k) for a, k in zip(start, size, strict=True))]
            expected.append(part)
            wanted.append(ReadRequest(name, tuple(start), tuple(size), torch.empty_like(part.contiguous())))
    ours.fill(wanted)
    for w, t in zip(wanted, expected, strict=True):
        assert torch.equal(w.target, t), (w.name, w.start, w.shape)


class Counted:
    """os.preadv that keeps what was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ranges: list[tuple[int, int]] = []
        real = os.preadv

        def preadv(fd: int, views: Any, offset: int, *more: Any) -> int:
            n = real(fd, views, offset, *more)
            self.ranges.append((offset, n))
            return n

        monkeypatch.setattr(os, "preadv", preadv)


def test_a_rank_reads_its_own_bytes_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    w = torch.arange(512 * 4096, dtype=torch.float32).reshape(512, 4096)  # rows of 16 KiB
    torch.save({"model": {"w": w}}, tmp_path / "a.pt")
    it = ckpttool.storage_reader(tmp_path / "a.pt").opened
    base = it.ckpt.tensors["model.w"].chunks.offset[0]
    counted = Counted(monkeypatch)

    def box(start: tuple[int, int], size: tuple[int, int]) -> list[tuple[int, int]]:
        counted.ranges.clear()
        target = torch.empty(size)
        it.fill([ReadRequest("model.w", start, size, target)])
        assert torch.equal(target, w[start[0] : start[0] + size[0], start[1] : start[1] + size[1]])
        return counted.ranges

    assert box((128, 0), (128, 4096)) == [(base + 128 * 16384, 128 * 16384)], "rows are one read"
    columns = box((0, 1024), (512, 1024))  # runs of 4 KiB with 12 KiB between, which cost less than a read each
    assert sum(n for _, n in columns) == 511 * 16384 + 4096
    it.tuning = Tuning(gap_bytes=4096)
    runs_of = box((0, 1024), (512, 1024))
    assert runs_of == [(base + 16384 * i + 4096, 4096) for i in range(512)], "runs far apart are read alone"


def parsed_items(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tensors of the items of DCP that are parsed from now on, one entry an item."""
    from ckpttool.converters.dcp.items import Items

    seen: list[str] = []
    real = Items._parse_item
    monkeypatch.setattr(Items, "_parse_item", lambda self, name, *more: (seen.append(name), real(self, name, *more))[1])
    return seen


def test_only_items_that_a_rank_needs_are_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = FIXTURES / "fsdp2_w3" / "ckpt"
    opened = ckpttool.open(folder)
    it = LiveReader(folder, opened)  # as on a rank that does not coordinate the load
    seen = parsed_items(monkeypatch)
    t = load_file(FIXTURES / "fsdp2_w3" / "truth.safetensors")["model.lm_head.weight"]  # 131 rows: 44, 44, 43
    for _ in range(2):
        target = torch.empty(40, 36)
        it.fill([ReadRequest("model.lm_head.weight", (50, 0), (38, 36), target[:38])])
        assert torch.equal(target[:38], t[50:88])
    assert seen == ["model.lm_head.weight"], "one of its three items, once"
    opened.close()


def items(folder: Path, n: int = 4) -> tuple[dict[str, Tensor], Path, list[int]]:
    """A DCP folder of tensors of one kind, its one file, and where the items are."""
    tensors = {f"w{i}": torch.randn(64, 8) for i in range(n)}
    dcp.save({"model": tensors}, checkpoint_id=folder, no_dist=True)
    with ckpttool.open(folder) as it:
        offsets = [t.chunks.offset[0] for t in it.checkpoint.tensors.values()]
    return tensors, next(folder.glob("*.distcp")), sorted(offsets)


def test_items_of_one_kind_are_looked_into_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = parsed_items(monkeypatch)
    tensors, _, _ = items(tmp_path / "a")
    tree = {"model": {n: torch.zeros(64, 8) for n in tensors}}
    load(tree, tmp_path / "a")
    assert same_value(tree["model"], tensors) and len(seen) == 1


def test_an_item_that_lost_the_checksum_in_its_directory_is_read_as_the_others_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = parsed_items(monkeypatch)
    tensors, file, offsets = items(tmp_path / "a")
    data = file.read_bytes()
    crc = zlib.crc32(tensors["w3"].numpy().tobytes()).to_bytes(4, "little")
    assert data.count(crc) == 2 and data.rindex(crc) > offsets[3], "behind the data, and in the directory"
    file.write_bytes(data[: data.rindex(crc)] + bytes(4) + data[data.rindex(crc) + 4 :])
    tree = {"model": {n: torch.zeros(64, 8) for n in tensors}}
    load(tree, tmp_path / "a")
    assert same_value(tree["model"], tensors) and seen == ["model.w0"]


FLAWS = {
    "another stride in the pickle": (b"K\x08K\x01\x86", b"K\x01K\x08\x86"),
    "another dtype in the pickle": (b"FloatStorage", b"IntoxStorage"),
    "a record of another name in the directory": (b"archive/data/0", b"archive/data/1"),
    "a call in the pickle": (b"torch._utils", b"posix.system"[:12]),
}


@pytest.mark.parametrize("name", FLAWS)
def test_an_item_that_is_framed_otherwise_is_looked_into_by_itself(name: str, tmp_path: Path) -> None:
    before, after = FLAWS[name]
    tensors, file, offsets = items(tmp_path / "a")
    data = file.read_bytes()
    root = data[offsets[0] : offsets[1]].partition(b"/data.pkl")[0].rpartition(b"\x00")[2] or b"archive"
    before, after = (x.replace(b"archive", root[-7:]) for x in (before, after))
    head, tail = data[: offsets[2]], data[offsets[2] :]
    assert before in tail[: offsets[3] - offsets[2]]
    file.write_bytes(head + tail.replace(before, after, 1))
    tree = {"model": {n: torch.full((64, 8), 5.0) for n in tensors}}
    with pytest.raises(CkpttoolError):
        load(tree, tmp_path / "a")
    assert all((t == 5).all() for t in tree["model"].values())


# ------------------------------------------------------------------------------------------------- torch's own reader


@pytest.mark.parametrize("case", ["fsdp2_w2_groups", "awkward_w3", "fsdp2_w2_flatopt"])
def test_a_whole_tree_comes_as_torch_itself_loads_it(case: str) -> None:
    folder = FIXTURES / case / "ckpt"
    theirs = load_dcp(folder)
    ours: dict[str, Any] = {}
    wanted = _skeleton(theirs)
    load(wanted, folder)
    ours.update(wanted)
    assert same_value(ours, theirs)


def _skeleton(x: Any) -> Any:
    if isinstance(x, dict):
        return {k: _skeleton(v) for k, v in x.items()}
    if isinstance(x, list) and any(isinstance(v, (dict, list, Tensor)) for v in x):
        return [_skeleton(v) for v in x]
    return torch.full_like(x, 1) if isinstance(x, Tensor) else None


@pytest.mark.parametrize("o", [*ORIGINALS[:3], *FLAT[:2], FLAT[-1]], ids=lambda o: o.label)
def test_torch_may_ask_for_everything_without_knowing_what_there_is(o: Original) -> None:
    found = _load_state_dict_from_keys(storage_reader=ckpttool.storage_reader(o.path, **o.how))
    truth = o.truth()
    assert found["model"].keys() == {n.removeprefix("model.") for n in truth if n.startswith("model.")}
    for n, t in truth.items():
        if n.startswith("model."):
            assert torch.equal(found["model"][n.removeprefix("model.")], t)


def test_a_name_that_is_not_there_is_missing_as_torch_says_it() -> None:
    folder = FIXTURES / "zero2_w3_bf16" / "ckpt"
    with pytest.raises(RuntimeError, match=r"Missing key in checkpoint state_dict: model\.nothing"):
        load({"model": {"nothing": torch.zeros(2)}}, folder)
    tree = {"model": {"nothing": torch.zeros(2), "temperature": torch.zeros(1)}}
    load(tree, folder, DefaultLoadPlanner(allow_partial_load=True))
    assert not tree["model"]["nothing"].any() and tree["model"]["temperature"].all()


def test_a_tensor_of_another_shape_is_torchs_error() -> None:
    with pytest.raises(ValueError, match="Size mismatch"):
        load({"model": {"temperature": torch.zeros(2)}}, FIXTURES / "zero2_w3_bf16" / "ckpt")


def test_the_reader_can_be_given_another_checkpoint(tmp_path: Path) -> None:
    for i in range(2):
        torch.save({"model": {"w": torch.full((2,), float(i))}}, tmp_path / f"{i}.pt")
    ours = ckpttool.storage_reader(tmp_path / "0.pt")
    for i in (0, 1, 1):
        tree = {"model": {"w": torch.full((2,), 9.0)}}
        dcp.load(tree, storage_reader=ours, checkpoint_id=str(tmp_path / f"{i}.pt"))
        assert tree["model"]["w"].tolist() == [i, i]
    assert ours.validate_checkpoint_id(tmp_path) and not ours.validate_checkpoint_id(tmp_path / "none")


def test_no_descriptor_stays_open() -> None:
    gc.collect()
    before = set(os.listdir("/proc/self/fd"))
    ours = load({"model": {"temperature": torch.zeros(1)}}, FIXTURES / "zero2_w3_bf16" / "ckpt")
    assert set(os.listdir("/proc/self/fd")) <= before, "all was read"
    unused = ckpttool.storage_reader(FIXTURES / "zero3_w4" / "ckpt")
    assert not set(os.listdir("/proc/self/fd")) <= before
    del ours, unused
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) <= before, "it is gone"


def test_importing_it_imports_no_torch() -> None:
    code = "import sys, ckpttool.live.load; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# ----------------------------------------------------------------------------------------------------------- dtypes


@pytest.mark.parametrize(
    ("a", "b"),
    [("bfloat16", "float32"), ("float16", "float32"), ("float32", "float64"), ("bool", "float32"), ("int32", "float64"),
     ("uint8", "int16"), ("int8", "bfloat16"), ("float8_e4m3fn", "bfloat16"), ("float32", "complex64")],
)  # fmt: skip
def test_a_wider_dtype_loses_nothing_and_the_way_back_does(a: str, b: str) -> None:
    assert is_lossless_cast(a, a) and is_lossless_cast(a, b) and not is_lossless_cast(b, a)


@pytest.mark.parametrize(
    ("a", "b"),
    [("bfloat16", "float16"), ("float16", "bfloat16"), ("int32", "float32"), ("int64", "float64"), ("int8", "uint8"),
     ("float8_e5m2", "float8_e4m3fn"), ("float64", "complex64")],
)  # fmt: skip
def test_what_has_numbers_that_the_other_has_not_is_not_lossless(a: str, b: str) -> None:
    assert not is_lossless_cast(a, b)


def test_rounding_is_said_once_and_is_that_of_torch(tmp_path: Path) -> None:
    tensors = {f"w{i}": torch.randn(5, 7) for i in range(3)} | {"n": torch.arange(3)}
    torch.save({"model": tensors}, tmp_path / "a.pt")
    tree = {"model": {n: torch.zeros_like(t, dtype=torch.bfloat16) for n, t in tensors.items() if n != "n"}}
    with pytest.warns(
        UserWarning, match='3 tensors .* "model.w0" is float32 in the checkpoint and bfloat16 in the job'
    ) as said:
        load(tree, tmp_path / "a.pt")
    assert len([w for w in said if "rounded" in str(w.message)]) == 1
    assert all(torch.equal(t, tensors[n].bfloat16()) for n, t in tree["model"].items())
    wider = {"model": {n: torch.zeros_like(t, dtype=torch.float64) for n, t in tensors.items() if n != "n"}}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*rounded")
        load(wider, tmp_path / "a.pt")
    assert all(torch.equal(t, tensors[n].double()) for n, t in wider["model"].items())


@pytest.mark.parametrize("kept", ["number", "tensor", "whole number"])
@pytest.mark.parametrize("asked", ["number", "tensor", "whole number"])
def test_the_step_of_an_optimizer_comes_as_the_job_keeps_it(kept: str, asked: str, tmp_path: Path) -> None:
    kinds: dict[str, Any] = {"number": 3.0, "tensor": torch.tensor(3.0), "whole number": 3}
    torch.save(
        {"model": {"w": torch.ones(2)}, "optim": {"state": {"w": {"step": kinds[kept], "exp_avg": torch.ones(2)}},
                                                   "param_groups": [{"lr": 0.1, "params": ["w"]}]}},
        tmp_path / "a.pt",
    )  # fmt: skip
    held: dict[str, Any] = {"number": 9.0, "tensor": torch.tensor(9.0), "whole number": 9}
    mine = held[asked]
    tree = {"optim": {"state": {"w": {"step": mine}}}}
    load(tree, tmp_path / "a.pt")
    got = tree["optim"]["state"]["w"]["step"]
    assert type(got) is type(mine) and got == 3
    assert asked != "tensor" or got is mine, "in place"


# ----------------------------------------------------------------------------------------------------------- values


def test_random_states_come_back_as_real_arrays_and_are_the_same_generator(tmp_path: Path) -> None:
    np_state = np.random.RandomState(5).get_state()
    py_state = random.Random(5).getstate()
    dcp.save(
        {"rng": {"numpy": np_state, "python": py_state, "torch": torch.get_rng_state()}, "x": np.float32(1.5),
         "table": np.asfortranarray(np.arange(6.0).reshape(2, 3)), "size": torch.Size([2, 3]), "kind": torch.bfloat16,
         "where": torch.device("cpu")},
        checkpoint_id=tmp_path / "a", no_dist=True,
    )  # fmt: skip
    names = {"numpy": None, "python": None, "torch": torch.zeros(5056, dtype=torch.uint8)}
    tree = {"rng": names, "x": None, "table": None, "size": None, "kind": None, "where": None}
    load(tree, tmp_path / "a")
    generator, other = np.random.RandomState(1), random.Random(1)
    generator.set_state(tree["rng"]["numpy"])
    other.setstate(tree["rng"]["python"])
    assert generator.rand(10).tolist() == np.random.RandomState(5).rand(10).tolist()
    assert other.random() == random.Random(5).random()
    assert torch.equal(tree["rng"]["torch"], torch.get_rng_state())
    assert type(tree["x"]) is np.float32 and tree["x"] == 1.5
    assert tree["table"].flags.f_contiguous and (tree["table"] == np.arange(6.0).reshape(2, 3)).all()
    assert tree["size"] == torch.Size([2, 3]) and tree["kind"] is torch.bfloat16
    assert tree["where"] == torch.device("cpu")


def test_an_instance_of_a_class_is_refused_by_name_and_only_when_it_is_asked_for(tmp_path: Path) -> None:
    import datetime

    torch.save({"model": {"w": torch.ones(2)}, "made": datetime.date(2026, 1, 2)}, tmp_path / "a.pt")
    tree: dict[str, Any] = {"model": {"w": torch.zeros(2)}}
    load(tree, tmp_path / "a.pt")
    assert tree["model"]["w"].tolist() == [1, 1]
    tree = {"model": {"w": torch.zeros(2)}, "made": None}
    with pytest.raises(Unsupported, match=r'"extra\.made" holds an instance of datetime\.date'):
        load(tree, tmp_path / "a.pt")
    assert not tree["model"]["w"].any(), "nothing was written"
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(2))
    done = ckpttool.load(model, None, tmp_path / "a.pt")
    assert any("datetime.date" in note for note in done.notes) and "made" not in done.values.get("extra", {})


BAD_ARRAYS = {
    "an array of objects": ("O8", (1,), b"x" * 8, False),
    "too few bytes": ("f4", (3,), b"x" * 8, False),
    "a negative shape": ("f4", (-1,), b"", False),
    "strings": ("S4", (1,), b"abcd", False),
    "a huge shape": ("f4", (1 << 62, 1 << 62, 0, 5), b"x", False),
}


@pytest.mark.parametrize("name", BAD_ARRAYS)
def test_an_array_that_is_not_plain_numbers_is_refused(name: str) -> None:
    from ckpttool.formats.pickles import Global, Opaque

    kind, shape, data, order = BAD_ARRAYS[name]
    dtype = Opaque(Global("numpy", "dtype"), (kind, False, True), call=True)
    dtype.state = (3, "<", None, None, None, -1, -1, 0)
    array = Opaque(
        Global("numpy._core.multiarray", "_reconstruct"), (Global("numpy", "ndarray"), (0,), b"b"), call=True
    )
    array.state = (1, shape, dtype, order, data)
    with pytest.raises(Unsupported, match="_reconstruct"):
        to_plain(array, "rng.x")


# -------------------------------------------------------------------------------------------------------- refusals


def test_a_checkpoint_that_would_run_code_does_not(tmp_path: Path, canary: Path) -> None:
    torch.save({"model": {"w": torch.ones(2)}, "step": runs(canary)}, tmp_path / "a.pt")
    with pytest.raises(Unsafe):
        ckpttool.storage_reader(tmp_path / "a.pt")
    dcp.save({"model": {"w": torch.ones(2)}, "step": runs(canary)}, checkpoint_id=tmp_path / "b", no_dist=True)
    tree: dict[str, Any] = {"model": {"w": torch.zeros(2)}, "step": None}
    with pytest.raises(Unsafe):
        load(tree, tmp_path / "b")
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(2))
    with pytest.raises(Unsafe):
        ckpttool.load(model, None, tmp_path / "b")
    # a pickle in the place of a tensor's item
    dcp.save({"model": {"w": torch.ones(2)}}, checkpoint_id=tmp_path / "c", no_dist=True)
    evil = tmp_path / "evil"
    torch.save(runs(canary), evil)
    file = next((tmp_path / "c").glob("*.distcp"))
    file.write_bytes(evil.read_bytes().ljust(file.stat().st_size, b"\0"))
    with pytest.raises(CkpttoolError):
        load({"model": {"w": torch.zeros(2)}}, tmp_path / "c")
    assert not canary.exists()
    torch.load(evil, weights_only=False)
    assert canary.exists(), "the trap works"


def test_nothing_but_our_own_pickles_reaches_torchs_unpickler(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bytes] = []
    real_save, real_load = torch_reader._pickle_for_planner, torch.load

    def saved(x: Any) -> Any:
        out = real_save(x)
        made.append(out.getvalue())
        return out

    def checked(f: Any, *more: Any, **how: Any) -> Any:
        assert f.getvalue() in made
        return real_load(f, *more, **how)

    monkeypatch.setattr(torch_reader, "_pickle_for_planner", saved)
    monkeypatch.setattr(torch, "load", checked)
    folder = FIXTURES / "fsdp2_w2_groups" / "ckpt"
    load(_skeleton({"args": {"name": 1, "tuple": 1}, "step": 1, "optim": {"param_groups": [{"lr": 1}]}}), folder)
    assert len(made) == 4


@pytest.mark.parametrize("when", ["before", "after it was opened"])
def test_a_file_that_ends_too_early_is_an_error_and_not_zeros(when: str, tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(100_000)}}, tmp_path / "a.pt")
    tree = {"model": {"w": torch.zeros(100_000)}}
    if when == "before":
        os.truncate(tmp_path / "a.pt", 200_000)
        with pytest.raises(CkpttoolError):
            load(tree, tmp_path / "a.pt")
    else:
        ours = ckpttool.storage_reader(tmp_path / "a.pt")
        os.truncate(tmp_path / "a.pt", 200_000)
        with pytest.raises(CheckpointException) as e:
            dcp.load(tree, storage_reader=ours)
        assert isinstance(failure(e.value), SourceChanged)


def test_an_item_that_is_cut_off_is_found_before_anything_is_written(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "fsdp2_w3" / "ckpt", tmp_path / "ckpt")
    truth = load_file(FIXTURES / "fsdp2_w3" / "truth.safetensors")
    file = tmp_path / "ckpt" / "__1_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 5000] = bytes(5000)
    file.write_bytes(data)
    tree = {"model": {n[6:]: torch.full_like(t, 5) for n, t in truth.items() if n.startswith("model.")},
            "optim": {"state": {}}}  # fmt: skip
    for n, t in truth.items():
        if n.startswith("optim."):
            fqn, _, slot = n[6:].rpartition(".")
            tree["optim"]["state"].setdefault(fqn, {})[slot] = torch.full_like(t, 5)
    with pytest.raises(Corrupt):
        load(tree, tmp_path / "ckpt")
    assert all((t == 5).all() for t in tree["model"].values())


def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"model": {"w": torch.ones(1000)}}, tmp_path / "a.pt")
    real = os.preadv

    def preadv(*more: Any) -> int:
        os.utime(tmp_path / "a.pt", ns=(1, 1))
        return real(*more)

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(SourceChanged):
        load({"model": {"w": torch.zeros(1000)}}, tmp_path / "a.pt")


# ------------------------------------------------------------------------------------------------------------- load


class Small(nn.Module):
    """Two layers, a buffer, and a parameter that never has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 5)
        self.b = nn.Linear(5, 2)
        self.unused = nn.Parameter(torch.ones(4))
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        return (self.b(self.a(x)) ** 2).sum()


def groups_of(model: Small) -> list[dict[str, Any]]:
    return [
        {"params": [model.a.weight, model.b.weight, model.unused], "lr": 0.1},
        {"params": [model.a.bias, model.b.bias], "lr": 0.2, "weight_decay": 0.3},
    ]


@pytest.fixture
def trained(tmp_path: Path) -> tuple[Small, torch.optim.Optimizer, Path]:
    """A job after three steps, and its checkpoint."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    torch.manual_seed(0)
    model = Small()
    optimizer = torch.optim.AdamW(groups_of(model), betas=(0.8, 0.95))
    for _ in range(3):
        model(torch.randn(4, 3)).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.seen += 1
    optimizer.param_groups[0]["lr"] = 0.05
    names = {p: n for n, p in model.named_parameters()}
    optim = {
        "state": {names[p]: dict(s) for p, s in optimizer.state.items()},
        "param_groups": [
            {**{k: v for k, v in g.items() if k != "params"}, "params": [names[p] for p in g["params"]]}
            for g in optimizer.param_groups
        ],
    }
    torch.save({"model": get_model_state_dict(model), "optim": optim, "step": 42}, tmp_path / "a.pt")
    return model, optimizer, tmp_path / "a.pt"


def fresh(groups: Any = groups_of, kind: Any = torch.optim.AdamW, **options: Any) -> tuple[Small, Any]:
    model = Small()
    jobs.spoil(model)
    return model, kind(groups(model), **options)


def snapshot(model: nn.Module, optimizer: Any) -> Any:
    names = {p: n for n, p in model.named_parameters()}
    return (
        {n: t.clone() for n, t in model.state_dict().items()},
        {names[p]: {k: v.clone() if isinstance(v, Tensor) else v for k, v in s.items()}
         for p, s in optimizer.state.items()},
        [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups],
    )  # fmt: skip


def test_load_gives_back_the_job_and_keeps_how_it_computes(trained: Any) -> None:
    model, optimizer, path = trained
    other, theirs = fresh(lr=7.0, foreach=True)
    done = ckpttool.load(other, theirs, path)
    assert done.step == 42 and done.values == {"trainer": {"step": 42}} and done.notes == []
    assert done.bytes > 0 and done.seconds > 0
    (a, b, c), (x, y, z) = snapshot(model, optimizer), snapshot(other, theirs)
    assert same_value(a, x) and same_value(b, y)
    assert all(g["foreach"] is True for g in z) and [g["lr"] for g in z] == [0.05, 0.2]
    assert [{**g, "foreach": None} for g in z] == [{**g, "foreach": None} for g in c]
    assert other.unused not in theirs.state, "it never had a gradient"
    assert all(p.grad is None for p in other.parameters())
    x = torch.randn(4, 3)
    for m, o in ((model, optimizer), (other, theirs)):
        m(x).backward()
        o.step()
    assert same_value(model.state_dict(), other.state_dict())


def test_load_into_a_job_that_has_trained_already_replaces_all_of_its_state(trained: Any) -> None:
    model, optimizer, path = trained
    other, theirs = fresh(lr=7.0)
    other.unused.grad = torch.ones(4)
    other(torch.ones(4, 3)).backward()
    theirs.step()
    theirs.zero_grad()
    assert other.unused in theirs.state
    ckpttool.load(other, theirs, path)
    assert same_value(snapshot(model, optimizer)[:2], snapshot(other, theirs)[:2])


def test_groups_are_matched_by_what_they_hold_and_not_by_their_number(trained: Any) -> None:
    model, optimizer, path = trained
    other, theirs = fresh(groups=lambda m: groups_of(m)[::-1], lr=7.0)
    ckpttool.load(other, theirs, path)
    assert [g["lr"] for g in theirs.param_groups] == [0.2, 0.05]
    assert [g["weight_decay"] for g in theirs.param_groups] == [0.3, 0.01]
    assert same_value(snapshot(model, optimizer)[1], snapshot(other, theirs)[1])


def test_options_that_json_made_lists_are_tuples_again(trained: Any) -> None:
    path = trained[2]
    tree = torch.load(path, weights_only=False)
    for g in tree["optim"]["param_groups"]:
        g["betas"] = list(g["betas"])
    torch.save(tree, path)
    other, theirs = fresh(lr=7.0)
    ckpttool.load(other, theirs, path)
    assert [g["betas"] for g in theirs.param_groups] == [(0.8, 0.95)] * 2


def test_a_scheduler_that_does_not_load_its_state_is_named_with_what_both_have(trained: Any) -> None:
    tree = torch.load(trained[2], weights_only=False)
    model, optimizer = fresh()
    rates = torch.optim.lr_scheduler

    def built(*kinds: Any) -> Any:
        made = [k(optimizer, lambda n: 1.0) if k is rates.LambdaLR else k(optimizer, 10) for k in kinds]
        return rates.SequentialLR(optimizer, made, [3])

    tree["scheduler"] = built(rates.CosineAnnealingLR, rates.LambdaLR).state_dict()
    torch.save(tree, trained[2])
    said = "a scheduler that the job's SequentialLR does not load: KeyError: 'lr_lambdas'.*Build the schedulers as the trainer did"
    with pytest.raises(Differs, match=said):
        ckpttool.load(model, optimizer, trained[2], scheduler=built(rates.LambdaLR, rates.CosineAnnealingLR))


def one_group(m: Small) -> Any:
    return [{"params": list(m.parameters())}]


class Wider(Small):
    """Another shape, one parameter more and one less."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Linear(5, 7)
        self.more = nn.Parameter(torch.zeros(1))
        del self.unused
        jobs.spoil(self)


MISFITS: dict[str, tuple[Any, list[str]]] = {
    "groups that would mix options": (
        lambda: fresh(groups=one_group), ["different groups of the checkpoint", '"unused" in 0', '"a.bias" in 1', "lr 0.05", "lr 0.2"],
    ),
    "another optimizer": (lambda: fresh(kind=torch.optim.SGD, lr=0.1, momentum=0.9), ['"momentum_buffer" in the job', '"exp_avg"']),
    "one without momentum": (lambda: fresh(kind=torch.optim.SGD, lr=0.1), ['"exp_avg"', "in the job"]),
    "another model": (
        lambda: (m := Wider(), torch.optim.AdamW(m.parameters())),
        ['the model has "more", which the checkpoint lacks', 'the checkpoint has "unused", which the model lacks', '"b.weight" has shape [2, 5] in the checkpoint and [7, 5] in the model', "which no param group"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_is_said_with_names_and_nothing_has_changed(name: str, trained: Any) -> None:
    make, said = MISFITS[name]
    model, optimizer = make()
    before = snapshot(model, optimizer)
    with pytest.raises(Unsupported) as e:
        ckpttool.load(model, optimizer, trained[2])
    assert all(words in str(e.value) for words in said), str(e.value)
    assert same_value(before, snapshot(model, optimizer))


def test_an_optimizer_that_cannot_make_its_state_and_a_model_without_memory_are_refused(trained: Any) -> None:
    model, optimizer = fresh(groups=lambda m: m.parameters(), kind=torch.optim.LBFGS)
    before = snapshot(model, optimizer)[::2]
    with pytest.raises(Unsupported):
        ckpttool.load(model, optimizer, trained[2])
    assert same_value(before, snapshot(model, optimizer)[::2])
    with torch.device("meta"):
        nowhere = Small()
    with pytest.raises(Unsupported, match="meta device"):
        ckpttool.load(nowhere, None, trained[2])


def test_weights_alone_need_no_optimizer_and_an_optimizer_needs_its_state(tmp_path: Path, trained: Any) -> None:
    model, _, path = trained
    other, theirs = fresh(lr=7.0)
    done = ckpttool.load(other, None, path)
    assert done.step == 42 and same_value(model.state_dict(), other.state_dict())
    torch.save({"model": model.state_dict(), "step": 1}, tmp_path / "weights.pt")
    before = snapshot(other, theirs)
    with pytest.raises(Unsupported, match="Pass optimizer=None"):
        ckpttool.load(other, theirs, tmp_path / "weights.pt")
    assert same_value(before, snapshot(other, theirs))


def test_the_schedule_goes_on_and_one_of_another_kind_is_refused() -> None:
    folder = FIXTURES / "fsdp2_w2_groups"
    case = jobs.read_case(folder)
    job = jobs.start(case, None)
    jobs.spoil(job.model, job.optimizer)
    done = ckpttool.load(job.model, job.optimizer, folder / "ckpt", scheduler=job.scheduler)
    assert job.scheduler is not None and job.scheduler.last_epoch == 3 and "scheduler" not in done.values
    assert [g["lr"] for g in job.optimizer.param_groups] == [0.01 / 4, 0.0025 / 4]
    assert done.step == 3 and done.values["extra"]["args"]["name"] == "größe-1"
    assert done.values["rng"]["0"]["torch"].dtype == torch.uint8
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(job.optimizer, 10)
    with pytest.raises(Unsupported, match=r"CosineAnnealingLR has .*T_max"):
        ckpttool.load(job.model, job.optimizer, folder / "ckpt", scheduler=cosine)
    with pytest.raises(Unsupported, match="has no scheduler state"):
        other = jobs.start(jobs.read_case(FIXTURES / "fsdp2_w1"), None)
        ckpttool.load(other.model, other.optimizer, FIXTURES / "fsdp2_w1" / "ckpt", scheduler=cosine)


def test_tied_weights_are_loaded_by_the_name_that_the_checkpoint_has(tmp_path: Path) -> None:
    def make() -> nn.Module:
        model = nn.Module()
        model.first = nn.Linear(3, 3, bias=False)
        model.second = nn.Linear(3, 3, bias=False)
        model.second.weight = model.first.weight
        return model

    w = torch.randn(3, 3)
    torch.save({"model": {"second.weight": w}, "optim": {
        "state": {"second.weight": {"step": torch.tensor(2.0), "exp_avg": w + 1, "exp_avg_sq": w + 2}},
        "param_groups": [{"lr": 0.5, "params": ["second.weight"]}]}}, tmp_path / "a.pt")  # fmt: skip
    model = make()
    optimizer = torch.optim.Adam(model.parameters())
    done = ckpttool.load(model, optimizer, tmp_path / "a.pt")
    assert torch.equal(model.first.weight, w) and done.step == 2
    assert torch.equal(optimizer.state[model.first.weight]["exp_avg"], w + 1)


@pytest.mark.parametrize("wrap", ["compiled", "checkpointed"])
def test_wrapped_models_load_by_their_plain_names(wrap: str, trained: Any) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model, optimizer, path = trained
    other, theirs = fresh(lr=7.0)
    bare = snapshot(model, optimizer)
    if wrap == "compiled":
        ckpttool.load(torch.compile(other, backend="eager"), theirs, path)
        assert same_value(bare[:2], snapshot(other, theirs)[:2])
    else:
        inner = other.a
        other.a = checkpoint_wrapper(inner)  # type: ignore[no-untyped-call]
        ckpttool.load(other, theirs, path)
        assert torch.equal(inner.weight, model.a.weight)
        assert torch.equal(theirs.state[inner.weight]["exp_avg"], optimizer.state[model.a.weight]["exp_avg"])


def test_a_large_tensor_of_the_rest_is_left_out_and_said(tmp_path: Path, trained: Any) -> None:
    torch.save(
        {"model": {"w": torch.ones(2)}, "big": {"t": torch.zeros(1 << 19)}, "small": {"t": torch.ones(3)}},
        tmp_path / "a.pt",
    )
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(2))
    done = ckpttool.load(model, None, tmp_path / "a.pt")
    assert done.step is None and done.values["extra"]["small"]["t"].tolist() == [1, 1, 1]
    assert "big" not in done.values["extra"] and any('"extra.big.t"' in note for note in done.notes)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """torch's planner logs every failure as an error, which these tests want."""
    import logging

    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("layout", ["full", "dcp"])
def test_what_the_job_ties_must_be_equal_in_the_checkpoint(tmp_path: Path, layout: str) -> None:
    def model() -> torch.nn.ModuleDict:
        out = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3, bias=False), "b": torch.nn.Linear(3, 3, bias=False)})
        out["b"].weight = out["a"].weight
        return out

    same, other = torch.arange(9.0).reshape(3, 3), torch.arange(9.0).reshape(3, 3) + 1
    for name, pair in (("equal", (same, same.clone())), ("apart", (same, other))):
        torch.save({"model": {"a.weight": pair[0], "b.weight": pair[1]}}, tmp_path / f"{name}.pt")
        place = tmp_path / f"{name}.pt"
        if layout == "dcp":
            place = tmp_path / name
            ckpttool.convert(tmp_path / f"{name}.pt", place, to="dcp", world_size=2)
        live = model()
        before = live["a"].weight.detach().clone()
        if name == "equal":
            ckpttool.load(live, None, place)
            assert torch.equal(live["b"].weight, same) and live["b"].weight is live["a"].weight
        else:
            with pytest.raises(Unsupported, match=r'"a\.weight" and "b\.weight" are one tied parameter'):
                ckpttool.load(live, None, place)
            assert torch.equal(live["a"].weight, before), "nothing was changed"


class Counting(torch.optim.Optimizer):
    """Counts steps and a factor as numbers of Python."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.5, "sizes": torch.tensor([1.0, 2.0])})

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["step"] = state.get("step", 20_000_000) + 1
            state["factor"] = state.get("factor", 0.96) * 1.1
            state["on"] = True


def test_numbers_of_an_optimizer_that_are_no_tensors_come_back_as_they_were(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    optimizer = Counting(model.parameters())
    optimizer.step()
    optimizer.param_groups[0]["sizes"] = torch.tensor([3.0, 4.0])
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, optim = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": optim}, checkpoint_id=tmp_path / "c", no_dist=True)
    other = torch.nn.Linear(2, 1, bias=False)
    fresh = Counting(other.parameters())
    ckpttool.load(other, fresh, tmp_path / "c")
    state = fresh.state[other.weight]
    assert state == {"step": 20_000_001, "factor": 0.96 * 1.1, "on": True}
    assert {k: type(v) for k, v in state.items()} == {"step": int, "factor": float, "on": bool}
    assert fresh.param_groups[0]["sizes"].tolist() == [3.0, 4.0]


@pytest.mark.parametrize(
    ("number", "dtype", "held"),
    [
        (7, torch.float32, 7.0),
        (0.1, torch.float32, pytest.approx(0.1)),
        (7.0, torch.int64, 7),
        (math.inf, torch.float32, math.inf),
        (7.5, torch.int64, None),
        (2**24 + 1, torch.float32, None),
        (300, torch.int8, None),
        (1e300, torch.float32, None),
        (math.nan, torch.int64, None),
    ],
)
def test_a_number_that_the_tensor_of_the_job_cannot_hold_is_refused(
    number: float, dtype: torch.dtype, held: float | None, tmp_path: Path
) -> None:
    tree = {"model": {"w": torch.ones(2)}, "optim": {"state": {"w": {"step": number}}, "param_groups": []}}
    torch.save(tree, tmp_path / "a.pt")
    job = {"optim": {"state": {"w": {"step": torch.zeros((), dtype=dtype)}}}}
    if held is None:
        with pytest.raises(Unsupported, match="cannot hold it"):
            load(job, tmp_path / "a.pt")
        return
    load(job, tmp_path / "a.pt")
    assert job["optim"]["state"]["w"]["step"].item() == held
