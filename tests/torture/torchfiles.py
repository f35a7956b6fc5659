"""What is done to bytes, pickles, zips and torch.save files, as functions of (random generator, bytes): for mutations.py.

What would run when a pickle is executed makes the file CANARY in the working directory.
"""

from __future__ import annotations

import io
import pickletools
import random
import re
import struct
import sys
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

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
        b"K\x01" + b"q\x63h\x63\x86" * 40,
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


def nodes_of(x: Any) -> list[tuple[Any, Any]]:
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
    nodes = [(c, k) for c, k in nodes_of(tree) if isinstance(c, (dict, list))]
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
