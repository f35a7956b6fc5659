"""What is done to a checkpoint, by the structure of its files, as a function of a random generator.

    mutate(rng, folder) -> what was done, in words; the folder is changed in place

Most mutations leave the layers around them sound: CRC32s are made right again, lengths and offsets of what follows too, so
that the damage reaches the code that reads the meaning.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import zstandard
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata

from .torchfiles import (
    DTYPES,
    INTEGERS,
    STRINGS,
    Mutation,
    legacy_file,
    nodes_of,
    pickled,
    plain_bytes,
    zip_file,
)  # fmt: skip

# ------------------------------------------------------------------------------------------------------- JSON and hf


def json_text(rng: random.Random, data: bytes) -> tuple[bytes, str]:
    """One value, key or member of a JSON text, or its frame."""
    try:
        tree = json.loads(data)
    except ValueError:
        return plain_bytes(rng, data)
    nodes = nodes_of(tree)
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


def is_of_torch(folder: Path) -> bool:
    """Whether .metadata of a seed holds nothing but torch's classes, so that it can be unpickled and pickled again."""
    data = (folder / ".metadata").read_bytes()
    return not any(word in data for word in (b"megatron", b"olmo_core", b"SavePlan"))


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
    if path.suffix == ".json" or data[:1] == b"{":
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
    of_dcp = [folder / n.removesuffix(".metadata") for n in names if n.rpartition("/")[2] == ".metadata"]
    of_dcp = [p for p in of_dcp if is_of_torch(p)]
    if of_dcp and (kind := rng.random()) < 0.65:
        inside = rng.choice(of_dcp) if of_dcp != [folder] else folder
        is_safetensors = any((folder / n).read_bytes()[8:10] == b'{"' for n in names if n.endswith(".distcp"))
        if kind < 0.25:
            return dcp_metadata(rng, inside)
        if not is_safetensors:
            return dcp_item(rng, inside)
    name = rng.choices(names, [3 if n.endswith((".json", ".metadata")) else 2 for n in names])[0]
    path = folder / name
    data = path.read_bytes()
    done, said = _by_content(path, data)(rng, data)
    path.write_bytes(done)
    return f"{name}: {said}" + (" (nothing changed)" if done == data else "")
