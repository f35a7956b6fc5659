"""The records of an archive: MANIFEST.json, SHA256SUMS and README.txt, written and proved.

MANIFEST.json describes the state: every tensor with its digest and its place, every data member with its SHA-256, the
Merkle root. It is the same, byte for byte, whatever layout and world size the state came from. PROVENANCE.json says
where it came from; it alone differs between two archives of one state, and `--reproducible` leaves the differences out.

A manifest is accepted only if it is, byte for byte, what ckpttool would write for its content.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..bounded_json import encode as encode_json
from ..bounded_json import parse
from ..errors import Corrupt, Unsafe
from ..index.checkpoint import ITEMSIZE, MAX_NUMEL, Chunks, Path, TensorEntry, joined
from ..index.digests import merkle_root
from ..index.names import COMPONENTS
from . import archive_plan as plan
from .byte_planes import BLOCK

__all__ = [
    "SCHEMA",
    "Manifest",
    "compute_max_record_bytes",
    "decode_and_check_manifest",
    "decode_sums",
    "encode_manifest",
    "encode_sums",
    "make_readme",
]

SCHEMA = "ckpttool.audit/1"
_MOST, _FLOOR, _RATIO = 1 << 30, 16 << 20, 10  # bytes of a record: in all, in any archive, and for every byte of it


@dataclass(frozen=True)
class Manifest:
    """The content of MANIFEST.json.

    `grouped` are the tensors of each member, in their order there; `hashes` {data member: (bytes, SHA-256)}.
    """

    tensors: dict[str, TensorEntry]
    digests: dict[str, str]
    grouped: list[list[str]]
    hashes: dict[str, tuple[int, str]]
    shuffle: bool
    step: int | None

    @property
    def merkle_root(self) -> str:
        """The Merkle root of all tensors."""
        return merkle_root((n, t.dtype, t.shape, self.digests[n]) for n, t in self.tensors.items())


def compute_max_record_bytes(archive_bytes: int) -> int:
    """Return the maximum size of a record (a JSON or text file) in an archive of `archive_bytes` bytes, so that a small
    file cannot fill the memory."""
    return min(_MOST, _FLOOR + _RATIO * archive_bytes)


def encode_manifest(found: Manifest, places: Mapping[str, plan.TensorPlace]) -> bytes:
    """Return the content of MANIFEST.json, with a line for each member and each tensor.

    Args:
        found: what to encode.
        places: {tensor: its place in the archive}.
    """
    parts: dict[str, list[str]] = {}
    for name, t in found.tensors.items():
        parts.setdefault(t.component, []).append(name)
    components = {
        c: {
            "merkle_root": merkle_root(
                (n, found.tensors[n].dtype, found.tensors[n].shape, found.digests[n]) for n in parts[c]
            ),
            "tensors": len(parts[c]),
            "bytes": sum(found.tensors[n].nbytes for n in parts[c]),
        }
        for c in sorted(parts, key=COMPONENTS.index)
    }
    head = {
        "schema": SCHEMA,
        "merkle_root": found.merkle_root,
        "digest": "BLAKE3 of the elements, row-major, little-endian",
        "coding": f"byte planes of {BLOCK} bytes" if found.shuffle else "plain",
        "step": found.step,
        "tensor_count": len(found.tensors),
        "tensor_bytes": sum(t.nbytes for t in found.tensors.values()),
        "components": components,
    }
    members = [{"name": n, "bytes": size, "sha256": h} for n, (size, h) in found.hashes.items()]
    rows = [_make_tensor_row(n, found, places[n]) for names in found.grouped for n in names]
    text = encode_json(head, indent=1)[:-2]
    return (
        text
        + b',\n "members": '
        + _encode_json_lines(members)
        + b',\n "tensors": '
        + _encode_json_lines(rows)
        + b"\n}\n"
    )


def _make_tensor_row(name: str, found: Manifest, place: plan.TensorPlace) -> dict[str, object]:
    """Return the entry of the tensor `name` in MANIFEST.json, as plain data."""
    t = found.tensors[name]
    row = {
        "name": name,
        "path": list(t.path),
        "dtype": t.dtype,
        "shape": list(t.shape),
        "digest": found.digests[name],
        "member": place.member,
        "offset": place.offset,
        "bytes": place.nbytes,
    }
    return row | {"planes": place.item} if place.item > 1 else row


def _encode_json_lines(rows: Sequence[object]) -> bytes:
    """Return a JSON array as bytes, with one line for each row."""
    return b"[\n" + b",\n".join(b"  " + encode_json(r) for r in rows) + b"\n ]" if rows else b"[]"


def decode_manifest(data: bytes, what: str) -> Manifest:
    """Parse MANIFEST.json. The member, offset and size that it gives for a tensor are not checked; `decode_and_check_manifest`
    does that.

    Args:
        what: the path, for messages.

    Raises:
        Corrupt, Unsafe: it is damaged.
    """
    parsed = parse(data, what)
    try:
        if parsed["schema"] != SCHEMA:
            raise Corrupt(
                f"{what} is of schema {str(parsed['schema'])[:60]!r}; this ckpttool knows {SCHEMA!r}.", code="CKPT0425"
            )
        tensors: dict[str, TensorEntry] = {}
        digests: dict[str, str] = {}
        by_member: dict[str, list[str]] = {}
        for row in parsed["tensors"]:
            name, path = row["name"], tuple(row["path"])
            t = _parse_tensor(path, row["dtype"], row["shape"], what)
            name.encode()
            if joined(path) != name or name in tensors:
                raise Corrupt(f"{what}: the entry of {name[:200]!r} is damaged, or there twice.", code="CKPT0425")
            tensors[name], digests[name] = t, _check_digest(row["digest"])
            by_member.setdefault(row["member"], []).append(name)
        hashes = {str(m["name"]): (_check_count(m["bytes"]), _check_digest(m["sha256"])) for m in parsed["members"]}
        step = parsed["step"]
        if step is not None:
            _check_count(step)
        grouped = list(by_member.values())
        return Manifest(tensors, digests, grouped, hashes, parsed["coding"] != "plain", step)
    except (LookupError, TypeError, ValueError, AttributeError) as e:
        raise Corrupt(f"{what} is damaged ({type(e).__name__}: {ascii(str(e))[:80]}).", code="CKPT0425") from None


def _parse_tensor(path: Path, dtype: object, shape: object, what: str) -> TensorEntry:
    """Check the path, dtype and shape of a tensor's row in a manifest, and return the tensor, without chunks.

    Args:
        what: the path of the manifest, for messages.

    Raises:
        Corrupt, Unsafe: path, dtype or shape are invalid.
        ValueError: a size of the shape is not a count.
    """
    if not path or path[0] not in COMPONENTS or not all(type(p) is int or type(p) is str for p in path):
        raise Corrupt(f"{what}: {str(path)[:80]} is not the path of a tensor.", code="CKPT0425")
    if not isinstance(dtype, str) or dtype not in ITEMSIZE:
        raise Corrupt(f"{what}: dtype {str(dtype)[:40]!r} is unknown.", code="CKPT0425")
    if not isinstance(shape, list) or len(shape) > 64:
        raise Corrupt(f"{what}: {str(shape)[:80]} is not a shape.", code="CKPT0425")
    total = 1
    for n in shape:
        total *= _check_count(n)
        if total > MAX_NUMEL:
            raise Unsafe(
                f"{what}: a tensor of shape {str(shape)[:80]} has more elements than any file holds.", code="CKPT0704"
            )
    return TensorEntry(dtype, tuple(shape), path, Chunks(len(shape)))


def _check_count(n: object) -> int:
    """Return `n` if it is an integer from 0 to `MAX_NUMEL`, otherwise raise ValueError."""
    if type(n) is not int or not 0 <= n <= MAX_NUMEL:
        raise ValueError(f"{str(n)[:40]} is not a count")
    return n


def _check_digest(text: object) -> str:
    """Return `text` if it is a digest of 64 digits in hex, otherwise raise ValueError."""
    if not isinstance(text, str) or len(text) != 64 or not set(text) <= set("0123456789abcdef"):
        raise ValueError(f"{str(text)[:80]!r} is not a digest")
    return text


def decode_and_check_manifest(data: bytes, mtime: int, head: bytes, what: str) -> tuple[Manifest, plan.ArchivePlan]:
    """Parse MANIFEST.json, and check that it is, byte for byte, what ckpttool would write for its content.

    Args:
        data: the bytes of MANIFEST.json.
        mtime: modification time of all members, in seconds.
        head: the content of README.txt; for the check only its length counts.
        what: the path, for messages.

    Returns:
        (the manifest, the plan of all places in its archive that follows from it).

    Raises:
        Corrupt, Unsafe: it is damaged, or not what ckpttool would write.
    """
    found = decode_manifest(data, what)
    planned = plan.make_plan(found.grouped, found.tensors, found.shuffle, mtime, head)
    if encode_manifest(found, planned.places) != data:
        raise Corrupt(f"{what} contradicts itself: its content, written again, gives other bytes.", code="CKPT0425")
    return found, planned


def encode_sums(hashes: Iterable[tuple[str, str]]) -> bytes:
    """Return the content of SHA256SUMS, for `sha256sum -c`; `hashes` are (member, SHA-256 in hex)."""
    return "".join(f"{h}  {name}\n" for name, h in hashes).encode()


def decode_sums(data: bytes, what: str) -> dict[str, str]:
    """Return {member: SHA-256 in hex} of SHA256SUMS.

    Args:
        what: the path, for messages.

    Raises:
        Corrupt: it is not what `encode_sums` writes.
    """
    found = {}
    for line in data.decode("utf-8", "replace").splitlines():
        h, _, name = line.partition("  ")
        found[name] = h
    try:
        if encode_sums((n, _check_digest(h)) for n, h in found.items()) == data:
            return found
    except ValueError:
        pass
    raise Corrupt(f"{what} is damaged: it is not a list of SHA-256 and names.", code="CKPT0425")


def sha256_hex(data: bytes) -> str:
    """Return the SHA-256 of these bytes in hex."""
    return hashlib.sha256(data).hexdigest()


def make_readme(shuffle: bool) -> bytes:
    """Return the content of README.txt, which says how to read the archive without ckpttool.

    Args:
        shuffle: whether large tensors are stored in byte planes, which the text then explains.
    """
    return (_README + (_PLANES.format(block=BLOCK) if shuffle else "")).encode()


_README = """\
This archive holds the state of a training run: one checkpoint, whole, in plain formats.

To unpack and check it, with nothing but tar, zstd and sha256sum:

    mkdir opened
    tar --zstd -xf ARCHIVE.tar.zst -C opened
    (cd opened && sha256sum -c SHA256SUMS)

If it holds a model.sig, it is signed. To check that, with the signer's public key or root certificate, which must come
from somewhere else, and OpenSSF's model-signing (pip install model-signing):

    python -m model_signing verify key opened --signature opened/model.sig --public_key SIGNER.pub
    python -m model_signing verify certificate opened --signature opened/model.sig --certificate_chain ROOT.crt

If it was encrypted, its name was ARCHIVE.tar.zst.age. To open such a file, with age (https://age-encryption.org) and the
secret key of a recipient:

    age -d -i SECRET.key -o ARCHIVE.tar.zst ARCHIVE.tar.zst.age

What lies in it:

  tensors-*.safetensors   the tensors: 8 bytes n (little-endian), n bytes of JSON {name: {dtype, shape, data_offsets}},
                          then the bytes of the tensors; https://github.com/huggingface/safetensors
  values.json             everything that is not a tensor: step, learning rates, random state, ...; {"$tuple": [...]} and other
                          objects of one key that begins with "$" are values that JSON does not have: $set, $frozenset;
                          $dict of pairs; $bytes, $bytearray in base64; $float inf, -inf or the bits of a NaN;
                          $complex; $int, $str in hexadecimal; $global a name in a Python module; $object an
                          instance of such a class, its parts as data; $tensor a small tensor
  MANIFEST.json           every tensor: name, dtype, shape, digest, member, offset and bytes in it; every data member
                          with its SHA-256; "merkle_root", one digest of all tensors
  PROVENANCE.json         where the state came from, who kept it and why
  RETENTION.json          until when it must be kept, where that was said
  SHA256SUMS              SHA-256 of every file but itself and the signature
  model.sig               the signature, where there is one: an OpenSSF model-signing bundle over all other files

Names of tensors begin with what they belong to: model, optim, scheduler, rng, ... "model.x" is the parameter x;
"optim.state.x.exp_avg" is what the optimizer keeps for it.

To load a tensor in Python:

    from safetensors import safe_open
    with safe_open("tensors-00001.safetensors", "numpy") as f:
        print(f.keys()); w = f.get_tensor("model.lm_head.weight")

(bfloat16 and float8 need "pt", that is PyTorch, instead of "numpy".)

The digest of a tensor is BLAKE3 of its bytes. The Merkle root is made of BLAKE3, too:
    leaf  = BLAKE3(byte 0, JSON [name, dtype, shape, digest] without spaces, beyond ASCII as \\u escapes)
    node  = BLAKE3(byte 1, left, right); leaves in sorted order; an odd one moves up as it is

With ckpttool: `ckpttool audit verify ARCHIVE`, `ckpttool audit restore ARCHIVE FOLDER --to dcp --world-size 8`.
The file consists of independent zstd frames and ends with a seek table (zstd seekable format), so that one tensor can be
read without the others.
"""

_PLANES = """
Byte planes: tensors with "planes": k in MANIFEST.json are stored as bytes (U8), reordered because that compresses better.
Their dtype and shape are in MANIFEST.json and in the metadata of the file. To undo it, in Python:

    import numpy as np
    def undo(stored, k, block={block}):
        out = []
        for a in range(0, len(stored), block):
            piece = np.frombuffer(stored[a:a + block], "u1")
            out.append(piece.reshape(k, -1).T.tobytes())
        return b"".join(out)

    # then, for float32: np.frombuffer(undo(stored, 4), "<f4").reshape(shape)
"""
