"""What is done to a checkpoint, by the structure of its files, as a function of a random generator.

    mutate(rng, folder) -> what was done, in words; the folder is changed in place

Most mutations leave the layers around them sound: CRC32s are made right again, lengths and offsets of what follows too, so
that the damage reaches the code that reads the meaning. What would run when a pickle is executed makes the file CANARY in
the working directory.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import pickletools
import random
import re
import shutil
import struct
import sys
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import zstandard
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import zero_files

Mutation = Callable[[random.Random, bytes], tuple[bytes, str]]

CANARY = "torture-canary"
INTEGERS = (
    0, 1, -1, 2, 3, 4, 5, 7, 13, 127, 128, 255, 256, 4096, 65535, 65536, 2**31 - 1, 2**31, 2**32, 2**40, 2**53, 2**62,
    2**63 - 1, 2**63, 2**64, -(2**31), -(2**63), 10**30,
)  # fmt: skip
STRINGS = (
    "", ".", "..", "../x", "/etc/passwd", "a/b", "a\0b", "\ud800", "\x1b[2J", "a\nb", "model", "model.", "optim", "state",
    "é", "x" * 4000, "__metadata__", "0", "model.fc.weight", "fc.weight", "trainer",
)  # fmt: skip
DTYPES = (
    "float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", "complex64",
    "complex128", "float8_e4m3fn", "uint16", "uint64", "qint8", "complex32", "float4_e2m1fn_x2", "nothing",
)  # fmt: skip
STORAGES = (
    "FloatStorage", "DoubleStorage", "HalfStorage", "BFloat16Storage", "LongStorage", "IntStorage", "ByteStorage",
    "BoolStorage", "ComplexFloatStorage", "UntypedStorage", "QUInt8Storage", "NoStorage",
)  # fmt: skip
GLOBALS = (
    "os system", "builtins exec", "builtins eval", "builtins getattr", "subprocess Popen", "functools partial",
    "torch load", "torch.hub load", "operator attrgetter", "site execsitecustomize", "torture_canary_module thing",
    "collections OrderedDict", "collections defaultdict", "torch Size", "torch.nn.parameter Parameter", "ckpttool convert",
    "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter", "torch._utils _rebuild_tensor_v3", "decimal Decimal",
    "torch.storage UntypedStorage", "pathlib PosixPath", "numpy dtype", "torch.distributed.checkpoint.metadata Metadata",
)  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ bytes


def plain_bytes(rng: random.Random, data: bytes) -> tuple[bytes, str]:
    """Damage that knows nothing: flipped, cut, doubled, overwritten, moved."""
    if not data:
        return b"\0" * rng.choice([1, 8, 64]), "bytes: filled"
    b = bytearray(data)
    at, n = rng.randrange(len(b)), rng.choice([1, 2, 4, 8, 22, 64, 512])
    kind = rng.choice(
        ["bit", "bit", "bit", "byte", "cut", "append", "zeros", "ones", "double", "remove", "number", "swap"]
    )
    if kind == "bit":
        b[at] ^= 1 << rng.randrange(8)
    elif kind == "byte":
        b[at] = rng.randrange(256)
    elif kind == "cut":
        at = rng.choice([at, 0, len(b) - 1, len(b) // 2, max(0, len(b) - n)])
        del b[at:]
    elif kind == "append":
        b += rng.randbytes(n) if rng.random() < 0.5 else bytes(n)
    elif kind in ("zeros", "ones"):
        b[at : at + n] = (b"\0" if kind == "zeros" else b"\xff") * len(b[at : at + n])
    elif kind == "double":
        b[at:at] = b[at : at + n]
    elif kind == "remove":
        del b[at : at + n]
    elif kind == "number":
        size = rng.choice([2, 4, 8])
        b[at : at + size] = (rng.choice(INTEGERS) % (1 << 8 * size)).to_bytes(size, rng.choice(["little", "big"]))
    else:
        to = rng.randrange(len(b))
        first, second = sorted((at, to))
        n = min(n, second - first, len(b) - second)
        b[first : first + n], b[second : second + n] = b[second : second + n], b[first : first + n]
    return bytes(b), f"bytes: {kind} {n} at {at}"


# ---------------------------------------------------------------------------------------------------------- pickles


def integer(x: int) -> bytes:
    """The instruction that pushes an integer."""
    if 0 <= x < 256:
        return b"K" + bytes([x])
    if -(2**31) <= x < 2**31:
        return b"J" + struct.pack("<i", x)
    raw = x.to_bytes(x.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def text(x: str) -> bytes:
    """The instruction that pushes a string."""
    raw = x.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(raw)) + raw


def name(x: str) -> bytes:
    """GLOBAL, of "module attribute"."""
    return b"c" + x.replace(" ", "\n").encode() + b"\n"


def payloads() -> list[bytes]:
    """Instructions that push one thing, which is an action, a bomb or merely odd."""
    touch = f"open({CANARY!r}, 'w').close()"
    shell = f"touch {CANARY}"
    return [
        name("os system") + text(shell) + b"\x85R",
        name("posix system") + text(shell) + b"\x85R",
        name("builtins exec") + text(touch) + b"\x85R",
        name("__builtin__ eval") + text(touch) + b"\x85R",
        text("os") + text("system") + b"\x93" + text(shell) + b"\x85R",
        text("builtins") + text("exec.__call__") + b"\x93" + text(touch) + b"\x85R",
        b"(" + text(touch) + b"ibuiltins\nexec\n",
        name("subprocess Popen") + text(shell) + b"\x85\x81",
        name("torch.serialization load") + text(CANARY) + b"\x85R",
        name("torture_canary_module thing") + b")R",
        name("builtins bytearray") + integer(10**10) + b"\x85R",
        name("collections OrderedDict") + b")R",
        name("my.module Thing") + b")\x81}" + text("a") + integer(1) + b"sb",
        name("decimal Decimal") + text("1e999999999") + b"\x85R",
        b"K\x01" + b"2\x86" * 40,
        b"N" + b"\x85" * 200,
        b"}(" + text("a") + integer(1) + text("a") + integer(2) + b"u",
        b"}" + b"N" + integer(1) + b"s",
        *(integer(x) for x in (-1, 0, 2**63, 2**400)),
        *(text(x) for x in STRINGS),
        *(b"G" + struct.pack(">d", x) for x in (float("nan"), float("inf"), -0.0, 1e-310)),
        b"N", b"\x88", b"\x89", b"}", b"]", b")", b"\x8f", b"\x8c\x00",
    ]  # fmt: skip


_PUSHES = (
    "BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE", "NONE", "NEWTRUE", "NEWFALSE", "BINFLOAT",
    "BINGET", "LONG_BINGET", "EMPTY_TUPLE", "EMPTY_DICT", "EMPTY_LIST", "GLOBAL",
)  # fmt: skip


class Pickle:
    """The instructions of one pickle: names, arguments, bytes."""

    def __init__(self, data: bytes) -> None:
        found = list(pickletools.genops(data))
        ends = [at for _, _, at in found[1:]] + [found[-1][2] + 1]
        self.names = [op.name for op, _, _ in found]
        self.arguments = [arg for _, arg, _ in found]
        self.codes = [data[at:end] for (_, _, at), end in zip(found, ends, strict=True)]
        self.rest = data[ends[-1] :]

    def pick(self, rng: random.Random, *names: str) -> int | None:
        """A random instruction of these names."""
        found = [i for i, n in enumerate(self.names) if n in names]
        return rng.choice(found) if found else None

    @property
    def data(self) -> bytes:
        return b"".join(self.codes) + self.rest


def _number(rng: random.Random, p: Pickle) -> str | None:
    i = p.pick(rng, "BININT", "BININT1", "BININT2", "LONG1")
    if i is None:
        return None
    old = p.arguments[i]
    near = (old + 1, old - 1, old * 2, old // 2, rng.randrange(30))
    p.codes[i] = integer(new := rng.choice((*INTEGERS, *near, *near, *near)))
    return f"{old} -> {new}"


def _string(rng: random.Random, p: Pickle) -> str | None:
    i = p.pick(rng, "BINUNICODE", "SHORT_BINUNICODE")
    if i is None:
        return None
    old = p.arguments[i]
    new = rng.choice([
        *STRINGS[:6], rng.choice(STRINGS), old + "x", old[:-1], old.upper(), "model." + old, "module." + old, "../" + old, old[::-1],
        old.replace("0", "1"), old.replace("1", "0"), old.replace(".", "/"), old + "\0", rng.choice(DTYPES), rng.choice(STORAGES),
    ])  # fmt: skip
    p.codes[i] = text(new)
    return f"{old[:40]!r} -> {new[:40]!r}"


def _exchange(rng: random.Random, p: Pickle) -> str | None:
    kinds = rng.choice(
        [("BINUNICODE", "SHORT_BINUNICODE"), ("BININT", "BININT1", "BININT2"), ("BINGET", "LONG_BINGET"), _PUSHES]
    )
    i, j = p.pick(rng, *kinds), p.pick(rng, *kinds)
    if i is None or j is None:
        return None
    p.codes[i], p.codes[j] = p.codes[j], p.codes[i]
    return f"exchanged {str(p.arguments[i])[:30]!r} and {str(p.arguments[j])[:30]!r}"


def _copied(rng: random.Random, p: Pickle) -> str | None:
    i, j = p.pick(rng, *_PUSHES), p.pick(rng, *_PUSHES)
    if i is None or j is None:
        return None
    p.codes[i] = p.codes[j]
    return f"{str(p.arguments[j])[:30]!r} instead of {str(p.arguments[i])[:30]!r}"


def _global(rng: random.Random, p: Pickle) -> str | None:
    i = p.pick(rng, "GLOBAL")
    if i is None:
        return None
    old = str(p.arguments[i])
    kind = next((k for k in (DTYPES, STORAGES) if old.rpartition(" ")[2] in k), None)
    new = rng.choice(GLOBALS) if kind is None or rng.random() < 0.2 else "torch " + rng.choice(kind)
    p.codes[i] = name(new)
    return f"{old} -> {new}"


def _payload(rng: random.Random, p: Pickle) -> str | None:
    i = p.pick(rng, *_PUSHES)
    if i is None:
        return None
    new = rng.choice(payloads())
    p.codes[i] = new if rng.random() < 0.8 else new + b"0" + p.codes[i]
    return f"{str(p.arguments[i])[:30]!r} -> {new[:40]!r}"


def _memo(rng: random.Random, p: Pickle) -> str | None:
    i = p.pick(rng, "BINGET", "LONG_BINGET", "BINPUT", "LONG_BINPUT")
    if i is None:
        return None
    put = "PUT" in p.names[i]
    p.codes[i] = (b"q" if put else b"h") + bytes([rng.randrange(256)])
    return f"memo of instruction {i}"


def _instruction(rng: random.Random, p: Pickle) -> str | None:
    i, j = rng.randrange(len(p.codes)), rng.randrange(len(p.codes))
    kind = rng.choice(["removed", "doubled", "exchanged", "block removed", "block copied", "another"])
    if kind == "removed":
        p.codes[i] = b""
    elif kind == "doubled":
        p.codes[i] *= 2
    elif kind == "exchanged":
        p.codes[i], p.codes[j] = p.codes[j], p.codes[i]
    elif kind == "another":
        p.codes[i] = rng.choice(
            [b"R", b"b", b"\x81", b"0", b"t", b"\x85", b"\x86", b"\x87", b"u", b"s", b"e", b"2", b"\x92", b"Q"]
        )
    else:
        end = min(len(p.codes), i + rng.randrange(1, 25))
        block = b"".join(p.codes[i:end])
        if kind == "block removed":
            p.codes[i:end] = [b""] * (end - i)
        else:
            p.codes[j] += block
    return f"{kind}: instruction {i} {p.names[i]}"


def _key_twice(rng: random.Random, p: Pickle) -> str | None:
    """A key of a dict once more, with another of its values: SETITEMS with one pair too many."""
    i = p.pick(rng, "SETITEMS", "SETITEM")
    keys = [j for j, n in enumerate(p.names[:i]) if n in ("BINUNICODE", "SHORT_BINUNICODE")] if i is not None else []
    if i is None or not keys:
        return None
    key, value = rng.choice(keys[-8:]), p.pick(rng, *_PUSHES)
    pair = text(p.arguments[key]) + p.codes[value if value is not None else key]
    p.codes[i] = pair + p.codes[i] if p.names[i] == "SETITEMS" else p.codes[i] + pair + b"s"
    return f"key {p.arguments[key][:40]!r} twice"


def _metadata_of_tensor(rng: random.Random, p: Pickle) -> str | None:
    """The seventh argument of _rebuild_tensor_v2: what torch.load does with conj and neg."""
    calls = [
        i
        for i, (n, a) in enumerate(zip(p.names, p.arguments, strict=True))
        if n == "GLOBAL" and a == "torch._utils _rebuild_tensor_v2"
    ]
    if not calls and "BINGET" not in p.names:
        return None
    hooks = [
        i for i, n in enumerate(p.names) if n == "TUPLE" and i and p.names[i - 1] in ("BINPUT", "LONG_BINPUT", "REDUCE")
    ]
    hooks = [i for i in hooks if any(n == "REDUCE" for n in p.names[max(0, i - 3) : i])]
    if not hooks:
        return None
    key = rng.choice(["conj", "neg", "neg", "other"])
    i = rng.choice(hooks)
    p.codes[i] = b"}" + text(key) + b"\x88s" + p.codes[i]
    return f"{key} of a tensor"


_PICKLE = (
    [_number] * 5 + [_string] * 4 + [_exchange] * 3 + [_copied] * 2 + [_global] * 3 + [_payload] * 4 + [_memo]
    + [_instruction] * 3 + [_key_twice] * 2 + [_metadata_of_tensor] * 2
)  # fmt: skip


def pickled(rng: random.Random, data: bytes) -> tuple[bytes, str]:
    """One to three instructions of a pickle."""
    try:
        p = Pickle(data)
    except (ValueError, IndexError):
        return plain_bytes(rng, data)
    said = [done for _ in range(rng.choice([1, 1, 1, 2, 3])) if (done := rng.choice(_PICKLE)(rng, p))]
    if not said:
        return plain_bytes(rng, data)
    return p.data, "pickle: " + "; ".join(said)


# ------------------------------------------------------------------------------------------------------------- zips

Records = list[tuple[str, bytes]]


def records_of(data: bytes) -> Records:
    """The records of a zip."""
    with zipfile.ZipFile(io.BytesIO(data)) as z:
        return [(i.filename, z.read(i)) for i in z.infolist()]


def zipped(records: Records, **how: Any) -> bytes:
    """Records in a zip, stored, with their CRC32s."""
    out = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(out, "w") as z:
        warnings.simplefilter("ignore")  # two records of one name
        for record, body in records:
            z.writestr(zipfile.ZipInfo(record), body, **how)
    return out.getvalue()


def zip_file(rng: random.Random, data: bytes) -> tuple[bytes, str]:
    """A torch.save zip: its pickle, its tree, its records, its frame."""
    try:
        records = records_of(data)
    except Exception:  # a mutant of a mutant
        return plain_bytes(rng, data)
    kind = rng.choice(
        ["pickle"] * 8 + ["tree"] * 4 + ["frame", "frame", "records", "records", "storage", "bits", "bytes"]
    )
    pkl = next((i for i, (n, _) in enumerate(records) if n.endswith("data.pkl")), None)
    stored = [i for i, (n, body) in enumerate(records) if "/data/" in n and body]
    if kind == "pickle" and pkl is not None:
        body, said = pickled(rng, records[pkl][1])
        records[pkl] = records[pkl][0], body
        return zipped(records), "zip: " + said
    if kind == "tree":
        return tree_file(rng, data)
    if kind == "storage" and stored:
        i = rng.choice(stored)
        record, body = records[i]
        body = rng.choice(
            [body[:-1], body + b"\0", body * 2, b"", body[: len(body) // 2], records[rng.choice(stored)][1]]
        )
        records[i] = record, body
        return zipped(records), f"zip: {record} is {len(body)} bytes"
    if kind == "bits" and stored:
        i = rng.choice(stored)
        body = bytearray(records[i][1])
        body[rng.randrange(len(body))] ^= 1 << rng.randrange(8)
        if rng.random() < 0.5:
            records[i] = records[i][0], bytes(body)
            return zipped(records), f"zip: a bit of {records[i][0]}, its CRC32 made right"
        at = data.find(records[i][1])
        return data[:at] + bytes(body) + data[at + len(body) :], f"zip: a bit of {records[i][0]}"
    if kind == "records":
        return zipped(_records(rng, records)), "zip: records renamed, moved, removed or added"
    if kind == "frame":
        return zip_frame(rng, data)
    return plain_bytes(rng, data)


def _records(rng: random.Random, records: Records) -> Records:
    out = list(records)
    i, j = rng.randrange(len(out)), rng.randrange(len(out))
    record, body = out[i]
    kind = rng.choice(["rename", "remove", "twice", "order", "add", "exchange", "byteorder"])
    if kind == "rename":
        out[i] = (
            rng.choice(
                [
                    record + "x",
                    record.upper(),
                    "other/" + record,
                    record.replace("0", "1"),
                    "../" + record,
                    record.partition("/")[2] or "x",
                ]
            ),
            body,
        )
    elif kind == "remove":
        del out[i]
    elif kind == "twice":
        out.insert(j, (record, bytes(len(body)) if rng.random() < 0.5 else body))
    elif kind == "order":
        rng.shuffle(out)
    elif kind == "add":
        out.append(
            (
                record.partition("/")[0]
                + "/"
                + rng.choice(["data/99", "code/x.py", "constants.pkl", "ckpttool.json", "extra"]),
                b"abc",
            )
        )
    elif kind == "exchange":
        out[i], out[j] = (record, out[j][1]), (out[j][0], body)
    else:
        out = [(n, rng.choice([b"big", b"little", b"", b"LITTLE"]) if n.endswith("byteorder") else b) for n, b in out]
    return out


def zip_frame(rng: random.Random, data: bytes) -> tuple[bytes, str]:
    """The directory, a local header or the end record: one number in it."""
    places = {"local header": b"PK\x03\x04", "directory": b"PK\x01\x02", "end record": b"PK\x05\x06"}
    kind = rng.choice([*places, *places, "prefix", "comment", "zip64"])
    b = bytearray(data)
    end = data.rfind(b"PK\x05\x06")
    if kind == "prefix":
        return rng.choice([b"#!x\n", b"PK\x03\x04", bytes(64), b"\x80\x02"]) + data, "zip: something before it"
    if kind == "comment" and end >= 0:
        b[end + 20 : end + 22] = struct.pack("<H", 5)
        return bytes(b) + b"hello", "zip: a comment"
    if kind == "zip64" and end >= 0:
        at = end + rng.choice([8, 10, 12, 16])
        b[at : at + 2] = b"\xff\xff"
        return bytes(b), "zip: the end record points to zip64"
    found = [m.start() for m in re.finditer(re.escape(places.get(kind, b"PK\x01\x02")), data)]
    if not found:
        return plain_bytes(rng, data)
    at = rng.choice(found) + rng.randrange(4, {"local header": 30, "directory": 46}.get(kind, 22))
    if at + 4 > len(b):
        return plain_bytes(rng, data)
    if rng.random() < 0.6:
        b[at] ^= 1 << rng.randrange(8)
    else:
        b[at : at + 4] = struct.pack("<I", rng.choice(INTEGERS) % 2**32)
    return bytes(b), f"zip: {kind}, byte {at}"


# ------------------------------------------------------------------------------------------------------------ trees


def _nodes(x: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything in a tree of dicts and lists."""
    out: list[tuple[Any, Any]] = []
    todo = [x]
    while todo:
        node = todo.pop()
        keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else []
        for k in keys:
            out.append((node, k))
            todo.append(node[k])
    return out


def _other_tensor(rng: random.Random, t: torch.Tensor) -> Any:
    """A tensor as torch can save it, not as a state dict usually has it."""
    flat = t.detach().reshape(-1)
    makers: list[Callable[[], Any]] = [
        lambda: t.T if t.ndim == 2 else t.clone(), lambda: t[::2] if t.ndim else t, lambda: flat[1:], lambda: flat.clone(),
        lambda: t.to(getattr(torch, rng.choice(DTYPES[:10]))), lambda: torch.nn.Parameter(t.float()),
        lambda: torch.complex(t.float(), t.float()).conj(), lambda: torch._neg_view(t.float()), lambda: t.to("meta"),
        lambda: t.float().to_sparse() if t.ndim else t, lambda: t[None].expand(3, *t.shape), lambda: t.new_empty(0),
        lambda: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8), lambda: torch.full_like(t, 1), lambda: t + t,
        lambda: torch.as_strided(flat, (2, 2), (1, 1)) if flat.numel() > 3 else t, lambda: torch.tensor(3.5),
        lambda: torch.randn(2, 2).conj_physical(), lambda: (t, t), lambda: [t], lambda: {"a": t}, lambda: None,
    ]  # fmt: skip
    return rng.choice(makers)()


def changed_tree(rng: random.Random, tree: Any) -> str:
    """One thing in a tree of dicts, lists and tensors."""
    nodes = [(c, k) for c, k in _nodes(tree) if isinstance(c, (dict, list))]
    tensors = [(c, k) for c, k in nodes if isinstance(c[k], torch.Tensor)]
    if not nodes:
        return "nothing"
    c, k = rng.choice(tensors if tensors and rng.random() < 0.5 else nodes)
    kind = rng.choice(
        ["tensor", "tensor", "value", "key", "remove", "exchange", "share", "key of another kind", "order", "more"]
    )
    if kind == "tensor" and isinstance(c[k], torch.Tensor):
        c[k] = _other_tensor(rng, c[k])
    elif kind == "key" and isinstance(c, dict):
        c[rng.choice([*STRINGS, f"{k}x", f"model.{k}", f"module.{k}", f"_orig_mod.{k}"])] = c.pop(k)
    elif kind == "key of another kind" and isinstance(c, dict):
        c[rng.choice([0, -1, None, (1, 2), 1.5, True, b"x", 2**70])] = c.pop(k)
    elif kind == "remove":
        del c[k]
    elif kind in ("exchange", "share"):
        d, j = rng.choice(tensors if isinstance(c[k], torch.Tensor) else nodes)
        c[k], d[j] = (d[j], c[k]) if kind == "exchange" else (d[j], d[j])
    elif kind == "order" and isinstance(c, dict):
        items = list(c.items())
        rng.shuffle(items)
        c.clear()
        c.update(items)
    elif kind == "more" and isinstance(c, dict):
        c[rng.choice(["new", "step", "epoch", "rng_state", "model", "optimizer", "scaler"])] = rng.choice(
            [1, None, torch.ones(2), {"a": 1}]
        )
    else:
        c[k] = rng.choice(
            [
                None,
                True,
                -1,
                2**63,
                2**200,
                1e400,
                float("nan"),
                "",
                "\ud800",
                b"raw",
                [],
                {},
                (),
                {1, 2},
                [1, [2, {"a": None}]],
                torch.float16,
                torch.Size([1, 2]),
                torch.device("cpu"),
                1j,
                range(3),
            ]
        )
    return f"{kind} at {str(k)[:40]!r}"


def tree_file(rng: random.Random, data: bytes) -> tuple[bytes, str]:
    """A torch.save file, loaded (torch's restricted unpickler), changed and saved by torch."""
    legacy = data[:2] != b"PK"
    try:
        with (
            zero_files.deepspeed_classes(),
            torch.serialization.safe_globals(list(zero_files.PLACES)),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            tree = torch.load(io.BytesIO(data), weights_only=True)
            if isinstance(tree, torch.Tensor):
                tree, said = _other_tensor(rng, tree), "another tensor"
            else:
                said = "; ".join(changed_tree(rng, tree) for _ in range(rng.choice([1, 1, 2])))
            out = io.BytesIO()
            torch.save(tree, out, _use_new_zipfile_serialization=not legacy)
    except Exception as e:  # what torch cannot load, or cannot save
        done, said = zip_frame(rng, data) if not legacy else plain_bytes(rng, data)
        return done, f"{said} (no tree: {type(e).__name__})"
    return out.getvalue(), "tree: " + said


def legacy_file(rng: random.Random, data: bytes) -> tuple[bytes, str]:
    """A legacy torch.save file: one of its five pickles, a count of elements, its bytes."""
    spans, at = [], 0
    try:
        for _ in range(5):
            stream = io.BytesIO(data[at:])
            for _ in pickletools.genops(stream):
                pass
            spans.append((at, at := at + stream.tell()))
    except (ValueError, IndexError):
        return plain_bytes(rng, data)
    kind = rng.choice(["pickle"] * 5 + ["tree"] * 3 + ["count", "bytes", "bytes"])
    if kind == "tree":
        return tree_file(rng, data)
    if kind == "count":
        b = bytearray(data)
        b[at : at + 8] = struct.pack("<Q", rng.choice(INTEGERS) % 2**64)
        return bytes(b), "legacy: an element count"
    if kind == "bytes":
        return plain_bytes(rng, data)
    a, z = spans[rng.choice([0, 1, 2, 3, 3, 3, 3, 3, 4])]
    body, said = pickled(rng, data[a:z])
    return data[:a] + body + data[z:], "legacy: " + said


# ------------------------------------------------------------------------------------------------------- JSON and hf


def json_text(rng: random.Random, data: bytes) -> tuple[bytes, str]:
    """One value, key or member of a JSON text, or its frame."""
    try:
        tree = json.loads(data)
    except ValueError:
        return plain_bytes(rng, data)
    nodes = _nodes(tree)
    if not nodes or rng.random() < 0.15:
        return rng.choice([
            (b"", "json: empty"), (b"[]", "json: a list"), (b"null", "json: null"), (b"[" * 5000 + b"]" * 5000, "json: deep"),
            (b'{"a":' * 3000 + b"1" + b"}" * 3000, "json: deep"), (b"\xef\xbb\xbf" + data, "json: BOM"), (data + b"{}", "json: more behind"),
            (data.replace(b'"', b"'"), "json: other quotes"), (b'{"x": NaN, ' + data[1:], "json: NaN"), plain_bytes(rng, data),
        ])  # fmt: skip
    c, k = rng.choice(nodes)
    old = c[k]
    kind = rng.choice(["value", "value", "near", "key", "remove", "exchange", "twice"])
    if kind == "twice" and isinstance(c, dict):
        whole = json.dumps(tree)
        mark = json.dumps(k) + ": "
        other = json.dumps(rng.choice(nodes)[1])
        return whole.replace(mark, f"{mark}{other}, {mark}", 1).encode(), f"json: {k[:40]!r} twice"
    if kind == "key" and isinstance(c, dict):
        c[rng.choice([*STRINGS, k + "x", "model." + k, k.replace(".", "/")])] = c.pop(k)
    elif kind == "remove":
        del c[k]
    elif kind == "exchange":
        d, j = rng.choice(nodes)
        c[k], d[j] = d[j], old
    elif kind == "near" and isinstance(old, (int, float)):
        c[k] = old + rng.choice([1, -1, 4, -4, 8, 100])
    else:
        c[k] = rng.choice(
            [
                None,
                True,
                [],
                {},
                1.5,
                "x",
                *INTEGERS[:20],
                *STRINGS,
                "F32",
                "BF16",
                "I64",
                "F4",
                float("nan"),
                [0, 4],
                [[1]],
            ]
        )
    try:
        out = json.dumps(tree, ensure_ascii=rng.random() < 0.7).encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError):  # exchanged with something inside itself
        return plain_bytes(rng, data)
    return out, f"json: {kind} at {str(k)[:40]!r}"


def safetensors_file(rng: random.Random, data: bytes) -> tuple[bytes, str]:
    """The header of a safetensors file, its length, its data."""
    n = int.from_bytes(data[:8], "little")
    if len(data) < 9 or n > len(data) or rng.random() < 0.2:
        return plain_bytes(rng, data)
    header, body = data[8 : 8 + n], data[8 + n :]
    if rng.random() < 0.1:
        wrong = rng.choice([*(x % 2**64 for x in INTEGERS), n + 1, n - 1, n + 8])
        return wrong.to_bytes(8, "little") + data[8:], "safetensors: header length"
    kind = rng.random()
    if kind < 0.25:
        tree = json.loads(header)
        a, b = (rng.choice([k for k in tree if k != "__metadata__"]) for _ in range(2))
        part = rng.choice(["data_offsets", "dtype", "shape"])
        tree[a][part], tree[b][part] = tree[b][part], tree[a][part]
        header, said = json.dumps(tree).encode(), f"{part} of {a!r} and {b!r} exchanged"
    else:
        header, said = json_text(rng, header.rstrip(b" "))
    if kind > 0.9:
        body, said = rng.choice([(body + bytes(8), said + ", longer"), (body[:-8], said + ", shorter")])
    if rng.random() < 0.6:
        header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + body, "safetensors: " + said


# --------------------------------------------------------------------------------------------------------------- dcp


def dcp_metadata(rng: random.Random, folder: Path) -> str:
    """The meaning of .metadata: chunks, places, sizes, paths. It is that of a seed, so it may be unpickled."""
    path = folder / ".metadata"
    meta = pickle.loads(path.read_bytes())
    said = rng.choice([_chunk, _place, _place, _places, _planner, _properties, _more_or_less])(rng, meta)
    path.write_bytes(pickle.dumps(meta, protocol=rng.choice([2, 4, 4, 5])))
    return f".metadata: {said}"


def _tensor(rng: random.Random, meta: Any) -> tuple[str, Any]:
    return rng.choice([(k, v) for k, v in meta.state_dict_metadata.items() if isinstance(v, TensorStorageMetadata)])


def _near(rng: random.Random, sizes: Any) -> torch.Size:
    out = list(sizes)
    if not out or rng.random() < 0.1:
        return torch.Size([*out, rng.choice([0, 1])])
    i = rng.randrange(len(out))
    out[i] = rng.choice([out[i] + 1, max(0, out[i] - 1), 0, out[i] * 2, out[-1 - i], 2**40])
    return torch.Size(out)


def _chunk(rng: random.Random, meta: Any) -> str:
    key, entry = _tensor(rng, meta)
    i = rng.randrange(len(entry.chunks)) if entry.chunks else None
    kind = rng.choice(["offsets", "sizes", "remove", "twice", "size", "split"])
    if kind == "size" or i is None:
        entry.size = _near(rng, entry.size)
    elif kind == "remove":
        del entry.chunks[i]
    elif kind == "twice":
        entry.chunks.append(entry.chunks[i])
    elif kind == "offsets":
        entry.chunks[i] = ChunkStorageMetadata(_near(rng, entry.chunks[i].offsets), entry.chunks[i].sizes)
    elif kind == "sizes":
        entry.chunks[i] = ChunkStorageMetadata(entry.chunks[i].offsets, _near(rng, entry.chunks[i].sizes))
    else:
        entry.chunks.reverse()
    return f"{kind} of {key!r}"


def _places_of(meta: Any) -> list[Any]:
    """In an order that does not depend on which of torch's threads was first."""
    return sorted(meta.storage_data, key=repr)


def _place(rng: random.Random, meta: Any) -> str:
    index = rng.choice(_places_of(meta))
    info = meta.storage_data[index]
    change = rng.choice([
        {"offset": rng.choice([info.offset + 1, info.offset - 1, 0, -1, 2**62, info.offset + info.length])},
        {"length": rng.choice([info.length + 1, info.length - 1, 0, -1, 2**62, info.length * 2])},
        {"relative_path": rng.choice(["__0_1.distcp", "__1_0.distcp", "../x", "/etc/passwd", "", ".", ".metadata", "./" + info.relative_path])},
    ])  # fmt: skip
    meta.storage_data[index] = replace(info, **change)
    return f"place of {index.fqn!r}: {change}"


def _places(rng: random.Random, meta: Any) -> str:
    a, b = rng.choice(_places_of(meta)), rng.choice(_places_of(meta))
    kind = rng.choice(["exchanged", "shared"])
    x, y = meta.storage_data[a], meta.storage_data[b]
    meta.storage_data[a], meta.storage_data[b] = (y, x) if kind == "exchanged" else (x, x)
    return f"places of {a.fqn!r} {tuple(a.offset or ())} and {b.fqn!r} {tuple(b.offset or ())} {kind}"


def _planner(rng: random.Random, meta: Any) -> str:
    keys = list(meta.planner_data)
    a, b = rng.choice(keys), rng.choice(keys)
    kind = rng.choice(["exchanged", "removed", "another", "same"])
    if kind == "exchanged":
        meta.planner_data[a], meta.planner_data[b] = meta.planner_data[b], meta.planner_data[a]
    elif kind == "removed":
        del meta.planner_data[a]
    elif kind == "same":
        meta.planner_data[a] = meta.planner_data[b]
    else:
        path = meta.planner_data[a]
        meta.planner_data[a] = rng.choice(
            [(*path, "x"), path[:-1], ("extra", *path), tuple(map(str, path)), (0, *path[1:]), "x", (a,)]
        )
    return f"paths of {a!r}: {kind}"


def _properties(rng: random.Random, meta: Any) -> str:
    key, entry = _tensor(rng, meta)
    old = entry.properties.dtype
    entry.properties.dtype = getattr(torch, rng.choice(DTYPES[:10]))
    return f"{key!r} is {entry.properties.dtype}, was {old}"


def _more_or_less(rng: random.Random, meta: Any) -> str:
    keys = list(meta.state_dict_metadata)
    a, b = rng.choice(keys), rng.choice(keys)
    kind = rng.choice(["removed", "renamed", "exchanged", "another index"])
    if kind == "removed":
        del meta.state_dict_metadata[a]
    elif kind == "renamed":
        meta.state_dict_metadata[a + "x"] = meta.state_dict_metadata.pop(a)
    elif kind == "exchanged":
        m = meta.state_dict_metadata
        m[a], m[b] = m[b], m[a]
    else:
        index = rng.choice(_places_of(meta))
        other = MetadataIndex(index.fqn, torch.Size([1] * len(index.offset)) if index.offset is not None else None, 5)
        meta.storage_data[other] = meta.storage_data[index] if rng.random() < 0.5 else meta.storage_data.pop(index)
    return f"{a!r}: {kind}"


def dcp_item(rng: random.Random, folder: Path) -> str:
    """One item of a data file, with all that follows it in its place and .metadata made right."""
    path = folder / ".metadata"
    meta = pickle.loads(path.read_bytes())
    index = rng.choice(_places_of(meta))
    info = meta.storage_data[index]
    file = folder / info.relative_path
    data = file.read_bytes()
    old = data[info.offset : info.offset + info.length]
    if old[:2] == b"PK":
        new, said = zip_file(rng, old)
    elif old[:4] == b"\x28\xb5\x2f\xfd":
        new, said = zip_file(rng, zstandard.ZstdDecompressor().decompressobj().decompress(old))
        new = zstandard.ZstdCompressor().compress(new)
    else:
        new, said = plain_bytes(rng, old)
    file.write_bytes(data[: info.offset] + new + data[info.offset + info.length :])
    more = len(new) - len(old)
    for other, at in meta.storage_data.items():
        if at.relative_path != info.relative_path:
            continue
        if other == index:
            meta.storage_data[other] = replace(at, length=len(new))
        elif at.offset >= info.offset + info.length:
            meta.storage_data[other] = replace(at, offset=at.offset + more)
    path.write_bytes(pickle.dumps(meta))
    return f"{info.relative_path}: item {index.fqn!r}: {said}"


# ----------------------------------------------------------------------------------------------------------- archives


def frames(rng: random.Random, data: bytes) -> tuple[bytes, str]:
    """A file of zstd frames: one of them changed and sealed again, moved, doubled, removed."""
    found = [m.start() for m in re.finditer(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18", data)]
    if len(found) < 3 or rng.random() < 0.3:
        return plain_bytes(rng, data)
    parts = [data[a:z] for a, z in zip(found, [*found[1:], len(data)], strict=True)]
    i, j = rng.randrange(len(parts)), rng.randrange(len(parts))
    kind = rng.choice(["content", "content", "content", "remove", "twice", "exchange", "skippable"])
    if kind == "remove":
        del parts[i]
    elif kind == "twice":
        parts.insert(j, parts[i])
    elif kind == "exchange":
        parts[i], parts[j] = parts[j], parts[i]
    elif kind == "skippable":
        parts.insert(i, b"\x50\x2a\x4d\x18\x04\0\0\0abcd")
    else:
        try:
            content = zstandard.ZstdDecompressor().decompressobj().decompress(parts[i])
        except zstandard.ZstdError:
            return plain_bytes(rng, data)
        content = (json_text if content[:1] == b"{" else plain_bytes)(rng, content)[0]
        parts[i] = zstandard.ZstdCompressor(write_checksum=True).compress(content)
    return b"".join(parts), f"frames: {kind} {i}"


# ------------------------------------------------------------------------------------------------------------ folders


def of_files(rng: random.Random, folder: Path) -> str:
    """Files missing, exchanged, linked, copied from another rank, of another kind."""
    names = files_of(folder)
    a, b = (folder / rng.choice(names) for _ in range(2))
    alike = [n for n in names if (folder / n).suffix == a.suffix and n != a.name]
    if alike and rng.random() < 0.7:
        b = folder / rng.choice(alike)
    kind = rng.choice(
        [
            "remove",
            "rename",
            "exchange",
            "exchange",
            "copy",
            "copy",
            "empty",
            "folder",
            "link",
            "link out",
            "hard link",
            "FIFO",
            "more",
        ]
    )
    if kind == "remove":
        a.unlink()
    elif kind == "rename":
        n = a.name
        a.rename(
            a.with_name(
                rng.choice(
                    [
                        n + ".bak",
                        n.replace("0", "1", 1),
                        n.replace("1", "0", 1),
                        n.upper(),
                        n.replace("_0", "_00"),
                        "x" + n,
                    ]
                )
            )
        )
    elif kind == "exchange":
        x, y = a.read_bytes(), b.read_bytes()
        a.write_bytes(y)
        b.write_bytes(x)
    elif kind == "copy":
        a.write_bytes(b.read_bytes())
    elif kind == "more":
        new = a.with_name(
            rng.choice(
                [
                    "copy_" + a.name,
                    "__9_0.distcp",
                    "optimizer.bin",
                    "latest",
                    ".metadata",
                    "model.safetensors",
                    "config.json",
                    "ckpttool.json",
                    "zero_pp_rank_9_mp_rank_00_optim_states.pt",
                ]
            )
        )
        if not new.exists():
            shutil.copy(a, new)
    else:
        a.unlink()
        if kind == "empty":
            a.touch()
        elif kind == "folder":
            a.mkdir()
        elif kind == "FIFO":
            os.mkfifo(a)
        elif kind == "link out":
            a.symlink_to("/etc/passwd")
        elif kind == "link" and b != a:
            a.symlink_to(b.name)
        elif b != a:
            os.link(b, a)
    return f"{kind} {a.relative_to(folder)} {b.relative_to(folder)}"


def files_of(folder: Path) -> list[str]:
    """Regular files below a folder, sorted."""
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def tag(rng: random.Random, data: bytes) -> tuple[bytes, str]:
    """`latest` of DeepSpeed."""
    old = data.decode()
    new = rng.choice(
        [
            "",
            "\n",
            "..",
            "/etc",
            ".",
            old + "/",
            old + "\n",
            old + "\0",
            " " + old,
            "./" + old,
            f"{old}/../{old}",
            "global_step9",
            "\x1b[2J",
            "x" * 9999,
        ]
    )
    return new.encode(), f"tag {new[:30]!r}"


def _by_content(path: Path, data: bytes) -> Mutation:
    if path.name.startswith("latest"):
        return tag
    if path.suffix == ".json":
        return json_text
    if path.suffix == ".safetensors":
        return safetensors_file
    if path.suffix == ".zst":
        return frames
    if data[:4] == b"PK\x03\x04" and path.suffix != ".distcp":
        return zip_file
    if data[:3] == b"\x80\x02\x8a":
        return legacy_file
    return pickled if data[:1] == b"\x80" else plain_bytes


def mutate(rng: random.Random, folder: Path) -> str:
    """Change one file of a checkpoint, or what files there are; what was done, in words."""
    names = files_of(folder)
    if rng.random() < (0.08 if len(names) > 1 else 0.02):
        return of_files(rng, folder)
    if (folder / ".metadata").exists() and (kind := rng.random()) < 0.65:
        is_safetensors = any((folder / n).read_bytes()[8:10] == b'{"' for n in names if n.endswith(".distcp"))
        if kind < 0.25:
            return dcp_metadata(rng, folder)
        if not is_safetensors:
            return dcp_item(rng, folder)
    name = rng.choices(names, [3 if n.endswith((".json", ".metadata")) else 2 for n in names])[0]
    path = folder / name
    data = path.read_bytes()
    done, said = _by_content(path, data)(rng, data)
    path.write_bytes(done)
    return f"{name}: {said}" + (" (nothing changed)" if done == data else "")
