"""Generated states through every written layout: each entry is kept and equal, changed as declared, or dropped with a reason.

The source is a torch.save file of a small training state and of values of every kind, or, in one of four cases, a fixture; it goes to
one layout and from there to another, in two of five cases with options that cast, select, rename or leave out.
What was kept is compared here, bit by bit, by a comparison that shares nothing with ckpttool's own; and `verify --read-data` must find
each result equal to its record.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import json
import pathlib
import random
import shutil
import struct
import time
import types
import uuid
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import ShardingStrategy

import ckpttool
from ckpttool import layouts
from ckpttool.errors import CkpttoolError, Unsupported, UsageError
from ckpttool.formats.pickles import Opaque

__all__ = ["SOURCES", "SUFFIX", "WRITTEN", "case", "converted", "run", "saved_state", "unaccounted"]

WRITTEN = tuple(layouts.list_writable_layouts())
SOURCES = sorted(
    path / "ckpt"
    for path in (Path(__file__).resolve().parents[2] / "fixtures").iterdir()
    if path.name.startswith(("fsdp1_", "fsdp2_", "zero", "universal_", "awkward_")) and (path / "ckpt").is_dir()
)
SUFFIX = {"full": ".pt", "audit": ".tar.zst"}
_WITHOUT_RANKS = ("full", "hf", "audit", "universal")
_FLOATS = (
    0.0,
    -0.0,
    1e-45,
    5e-324,
    float("inf"),
    float("-inf"),
    struct.unpack(">d", bytes.fromhex("7ff8000000000abc"))[0],
    0.1,
    1e308,
)
_TEXTS = ("", "a", "ß∂𝄞", "\x00\n", "<a>", "None", "3", "a.b", "\ud800")


#: Keys that mean something to some program.
_ODD_KEYS = (
    *("extra", "trainer", "rng", "scaler", "dataloader", "scheduler", "args", "lr_scheduler", "rng_state", "sampler"),
    *("callbacks", "ds_config", "data_sampler", "iteration", "loops", "opt_param_scheduler", "optimizer_2", "ema"),
)


def any_value(r: random.Random, depth: int = 0) -> Any:
    """A value of some kind; containers hold others, three levels deep at most."""
    leaves = (
        lambda: None,
        lambda: r.random() < 0.5,
        lambda: r.choice((0, 1, -1, 255, -(1 << 31), 1 << 63, -(1 << 64) - 1, 1 << 200)),
        lambda: r.choice(_FLOATS),
        lambda: r.choice(_TEXTS),
        lambda: r.choice((b"", b"\x00\xff", b"abc")),
        lambda: bytearray(b"\x01\x02"),
        lambda: complex(r.choice(_FLOATS), -0.0),
        lambda: torch.Size((2, 3)),
        lambda: torch.bfloat16,
        lambda: torch.device("cpu"),
        lambda: collections.Counter({3: 1, 6: 2}),
        lambda: torch.tensor([1, 2], dtype=torch.int16),
        lambda: collections.defaultdict(list, {"a": [1]}),
        lambda: r.choice(
            (ShardingStrategy.FULL_SHARD, types.SimpleNamespace(a=-0.0), argparse.Namespace(lr=0.1, flag=True))
        ),
        lambda: r.choice((decimal.Decimal("1.50"), datetime.datetime(2026, 1, 2), datetime.timedelta(1))),
        lambda: r.choice((uuid.UUID(int=5), pathlib.PurePosixPath("a/b"))),
    )
    if depth == 3 or r.random() < 0.5:
        return r.choice(leaves)()
    some = [any_value(r, depth + 1) for _ in range(r.randrange(4))]
    keys = r.sample((0, 1.5, -3, "a", "b.c", b"k", (1, "x"), None), len(some))
    containers = (
        lambda: some,
        lambda: tuple(some),
        lambda: dict(zip("abcd", some, strict=False)),
        lambda: dict(zip(keys, some, strict=True)),
        lambda: {1, 2, "x"} if r.random() < 0.5 else frozenset((True, None)),
        lambda: collections.OrderedDict(zip("dcba", some, strict=False)),
        lambda: collections.OrderedDict(zip(keys, some, strict=True)),
    )
    return r.choice(containers)()


def saved_state(r: random.Random, path: Path) -> None:
    """A torch.save file of a training state: hard shapes and dtypes, values of every kind everywhere."""
    shapes = {"emb.weight": (7, 3), "layers.0.w.weight": (3, 5), "layers.0.w.bias": (5,), "scale": (), "empty": (0, 4)}
    model: dict[str, Any] = {n: torch.randn(s) for n, s in shapes.items()}
    model["counts"] = torch.arange(3)
    model["mask"] = torch.tensor([True, False])
    if r.random() < 0.6:
        model["layers.0.w._extra_state"] = r.choice(
            ({"recipe": "delayed", "scale": 0.5, "amax": [1.0, -0.0]}, {"n": 3, "history": torch.ones(2)}, 7, None)
        )
    trained = ["emb.weight", "layers.0.w.weight", "layers.0.w.bias", "scale"]
    slots = {
        n: {"exp_avg": torch.randn(shapes[n]), "exp_avg_sq": torch.rand(shapes[n]), "step": torch.tensor(3.0)}
        for n in trained
    }
    if r.random() < 0.3:
        del slots["scale"]
    options = {"lr": 0.1, "betas": (0.9, 0.999), "weight_decay": 0.0, "flag": r.choice((None, True, 1, "1"))}
    groups = [{**options, "params": trained[:2]}, {**options, "lr": torch.tensor(0.25), "params": trained[2:]}]
    state: dict[str, Any] = {
        "model": model,
        "optim": {"state": slots, "param_groups": groups if r.random() < 0.7 else [{**options, "params": trained}]},
    }
    if r.random() < 0.6:
        state["scheduler"] = {
            "last_epoch": 3,
            "base_lrs": [0.1],
            "milestones": collections.Counter((3, 6)),
            "_last_lr": [-0.0],
        }
    if r.random() < 0.6:
        state |= {"step": 3, "epoch": r.choice((1, 0.5))}
    if r.random() < 0.5:
        state["rng"] = {"torch": torch.arange(9, dtype=torch.uint8), "python": (3, (1, 2), None)}
    state |= {f"extra_{k}": any_value(r) for k in range(r.randrange(1, 5))}
    if r.random() < 0.3:  # a component that holds what no trainer puts there
        for key in r.sample(_ODD_KEYS, r.choice((1, 1, 2))):
            state[key] = any_value(r)
    torch.save(state, path)


def identical(a: Any, b: Any) -> bool:
    """Whether two values of an index are equal in types, bits and order."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, complex):
        return identical(a.real, b.real) and identical(a.imag, b.imag)
    if isinstance(a, dict):
        return len(a) == len(b) and all(identical(x, y) and identical(a[x], b[y]) for x, y in zip(a, b, strict=True))
    if isinstance(a, Opaque):
        return a.call == b.call and all(identical(x, y) for x, y in zip(a.parts(), b.parts(), strict=True))
    if isinstance(a, (set, frozenset)):
        return {(type(x), x) for x in a} == {(type(x), x) for x in b}
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(identical(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def unaccounted(source: Path, out: Path, done: ckpttool.ConvertResult) -> list[str]:
    """What is wrong with the account of a conversion: entries in no list or in two, and kept ones that are not equal."""
    wrong: list[str] = []
    dropped = {name for name, _, _ in done.dropped}
    lists = (set(done.kept), set(done.changed), dropped)
    with ckpttool.open(source) as a, ckpttool.open(out) as b:
        x, y = a.locate(), b.locate()
        held, there = {**x.tensors, **x.values}, {**y.tensors, **y.values}
        for name in held:
            count = sum(name in names for names in lists)
            if count != 1:
                wrong.append(f"{name} is in {count} lists")
            elif name in done.kept and name not in there:
                wrong.append(f"{name} is called kept, and is not there")
            elif name in done.kept and name in x.values and name in y.values:
                if not identical(x.values[name].data, y.values[name].data):
                    wrong.append(f"{name} is called kept: {x.values[name].data!r} became {y.values[name].data!r}")
            elif name in done.kept and name in x.tensors and name in y.tensors and a.read(name) != b.read(name):
                wrong.append(f"{name} is called kept, and has other bytes")
        wrong += [f"{n} is new" for n in there if n not in held and n not in done.added]
        wrong += [f"{n} is kept, and the source does not have it" for n in done.kept if n not in held]
    return wrong


def converted(
    source: Path, out: Path, to: str, world: int, drop: bool = True, **options: Any
) -> ckpttool.ConvertResult:
    """The whole state in another layout, or what the options ask for."""
    own = ckpttool.HfOptions(include_optimizer=True) if to == "hf" else None
    size = None if to in _WITHOUT_RANKS else world
    return ckpttool.convert(source, out, to=to, world_size=size, options=own, drop=drop, **options)


def any_options(r: random.Random) -> dict[str, Any]:
    """Options of a conversion that change what is written."""
    kinds: dict[str, Any] = {
        "dtype": ("bf16", "fp16", "fp32"),
        "cast": (
            {"optim.*": "fp16"}, {"*": "float64"}, {"*": "bf16"}, {"model.*weight": "float64"}, {"*exp_avg": "bf16"},
            {"*layers.0*": "fp16", "*norm*": "fp32"},
        ),
        "only": (
            ["model"], ["model", "optim"], ["optim"], ["model", "scheduler"], ["*weight*"], ["*layers.0*"],
            ["model", "trainer", "rng", "extra"],
        ),
        "drop_matching": (["*bias"], ["*layers.0*"], ["optim.*exp_avg_sq"], ["*step*"], ["extra*"], ["*lr*"], ["rng.*"]),
        "rename": ({r"layers\.": "blocks."}, {r"^": "net."}, {r"weight$": "kernel"}),
        "reset": (["scheduler"], ["rng"], ["optim"], ["*step*"], ["trainer"]),
        "canonical_keys": (True,),
    }  # fmt: skip
    return {name: r.choice(kinds[name]) for name in r.sample(sorted(kinds), r.choice((1, 1, 2)))}


def case(number: int, work: Path) -> dict[str, Any]:
    """Case `number`: {"id", "status", "why"}; status is "conserved", "refused" or a failure."""
    r = random.Random(number)
    torch.manual_seed(number)
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    first, second = WRITTEN[number % len(WRITTEN)], WRITTEN[number // len(WRITTEN) % len(WRITTEN)]
    path = work / "source.pt"
    if r.random() < 0.75:
        saved_state(r, path)
    else:
        path = r.choice(SOURCES)
    out = {"id": f"conserved:{first}-{second}:{number}", "status": "conserved", "why": ""}
    options = any_options(r) if r.random() < 0.4 else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for k, to in enumerate((first, second)):
            target = work / f"{k}{SUFFIX.get(to, '')}"
            try:
                done = converted(path, target, to, 1 + r.randrange(3), **({} if k else options))
                wrong = unaccounted(path, target, done) if k or not options else []
                found = ckpttool.verify(target, read_data=True)
                # an archive records digests of tensors; its values have the hash that reading checks
                if found.recorded != "equal" and not (to == "audit" and found.tensors == 0):
                    wrong.append(f"verify says of the record of {to}: {found.recorded}")
            except Unsupported as e:
                return out | {"status": "refused", "why": str(e)}
            except UsageError as e:
                if k or not options:
                    return out | {"status": "not conserved", "why": f"UsageError: {e}"}
                return out | {"status": "refused", "why": str(e)}
            except CkpttoolError as e:
                return out | {"status": "not conserved", "why": f"{type(e).__name__}: {e}"}
            except Exception as e:
                return out | {"status": "unexpected exception", "why": f"{type(e).__name__}: {e}"}
            if wrong:
                return out | {"status": "not conserved", "why": "; ".join(wrong[:5])}
            path = target
    return out


def run(lab: Any, until: float, log: Path, part: int, parts: int, most: int, first: int) -> None:
    """Every `parts`-th case from number `first` on, into `log`, until a time or a number of them."""
    with log.open("a") as f:
        for number in range(first + part, first + part + parts * most, parts):
            if time.time() > until:
                return
            done = case(number, lab.out.parent / f"conserved{part}")
            bad = done["status"] not in ("conserved", "refused")
            f.write(json.dumps({**done, "bad": bad, "said": done["why"][:300], "detail": done["why"]}) + "\n")
            f.flush()
