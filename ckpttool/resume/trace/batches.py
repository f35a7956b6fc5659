"""Batches as a function of (seed, global sample index), never of the rank, so that jobs with different world sizes see
the same data; and a digest that proves it.

Step s (the first after a checkpoint of step n is n + 1) uses the samples [(s - 1) * B, s * B) of a global batch of B.
They are cut into micro-batches of M; micro-batch k belongs to data-parallel rank k mod W. The shape of a forward pass
is therefore the same at every world size, which is what keeps bfloat16 losses equal from one to the next: its noise
comes from the shape, not from the number of ranks (measured; compare/bounds.py).

Data is one of

    "synthetic"      tokens drawn by a counter-based generator (Philox) from (seed, index); the second half of a row
                     repeats the first, so that there is something to learn
    x.npy            a matrix of token rows, or one long row of tokens that is cut into rows of `sequence`
    x.jsonl          one object a line: {"input_ids": [...]}, with "labels" if they differ, or {"text": "..."} for
                     the tokenizer of the model's folder; rows are cut or padded to `sequence`
    data of build()  a function of the sample index, or a sequence; one sample is a row of tokens or
                     {"input_ids": row, "labels": row, ...}
"""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ...bounded_json import parse
from ...errors import Corrupt, Unsafe, UsageError, argument

__all__ = [
    "BatchDigest",
    "Rows",
    "add_digests",
    "check_data_exists",
    "digest_and_mark_rows",
    "digest_batch",
    "list_micro_batches",
    "make_batch_fields",
    "open_data",
    "split_marks",
    "wrap_user_data",
]

#: sample index -> {"input_ids": int64 row, ...}; numpy arrays of one shape for every index.
Rows = Callable[[int], dict[str, Any]]

_MARK = 8  # characters

IGNORED = -100  # a label that does not count, as in torch.nn.functional.cross_entropy


def list_micro_batches(
    step: int, global_batch: int, micro_batch: int, rank: int, world: int
) -> list[tuple[int, int, bool]]:
    """List the forward passes of a data-parallel rank in a step: [(first sample, one past the last, whether it
    counts)].

    Every rank has the same number of passes, since FSDP's collectives need all of them; if the micro-batches are not
    divisible by the world size, the last pass of some ranks repeats an earlier micro-batch and does not count.

        list_micro_batches(1, 8, 2, 1, 3) == [(2, 4, True), (0, 2, False)]

    Args:
        step: number of the step; the first of a training is 1.
        global_batch: rows of the step, over all ranks.
        micro_batch: rows of one forward pass.
        rank: number of the data-parallel rank.
        world: number of such ranks.
    """
    n = global_batch // micro_batch
    first = (step - 1) * global_batch
    out = []
    for k in range(rank, -(-n // world) * world, world):
        at = first + (k if k < n else 0) * micro_batch
        out.append((at, at + micro_batch, k < n))
    return out


def digest_and_mark_rows(rows: Iterable[object]) -> tuple[int, str]:
    """Return (digest of rows of tokens, their marks one after the other).

    The digest is the sum of each row's BLAKE3 mod 2^128. It depends neither on the order of the rows nor on their
    distribution over ranks; the digests of parts add up to that of all rows. A mark is the first 48 bits of the row's
    BLAKE3 in base64, 8 characters: 4096 rows are 32 KiB of JSON, and among a million rows two have the same by chance
    once in 500. Marks explain how batches differ; the digest decides whether they differ.
    """
    import numpy as np
    from blake3 import blake3

    total, marks = 0, []
    for row in rows:
        whole = blake3(np.ascontiguousarray(row, dtype="<i8").tobytes()).digest(16)
        total += int.from_bytes(whole, "little")
        marks.append(_make_mark(whole))
    return total % (1 << 128), "".join(marks)


class BatchDigest(NamedTuple):
    """The digest of samples: sums mod 2^128 of hashes of each sample, so that their order does not matter, and those of
    ranks add up.

    `keys` has one for every tensor of a sample, {key: sum}; that of input_ids is as from `digest_and_mark_rows`.
    `whole` is that of whole samples, in which it matters which tensors belong together; None if it is not known.
    `marks` are those of the rows, as `digest_and_mark_rows` has them: of input_ids, or of whole samples where there are
    none.
    """

    keys: dict[str, int]
    whole: int | None
    marks: str


def digest_batch(batch: Mapping[str, object]) -> BatchDigest:
    """Compute the digest of a batch, from dtype, shape and bytes of each tensor of every sample.

    Integers of any size count as int64.

    Args:
        batch: {key: tensor or array (samples, ...), or a list with one for each sample}. Nested dicts are flattened,
            with dots in the keys; other values are left out. If `input_ids` has one dimension, everything is one
            sample.

    Raises:
        ValueError: tensors have different numbers of samples.
        TypeError: token ids are no integers, or elements have no bytes, as those of sparse tensors.
    """
    from blake3 import blake3

    arrays = dict(_list_arrays(batch))
    if getattr(batch.get("input_ids"), "ndim", 2) == 1:
        arrays = {k: [x] for k, x in arrays.items()}
    if len(counts := {len(x) for x in arrays.values()}) > 1:
        sizes = ", ".join(f"{k} {len(x)}" for k, x in arrays.items())
        raise ValueError(f"its tensors have {len(counts)} numbers of samples: {sizes}")
    hashes = {k: [_hash_sample(x, k == "input_ids") for x in rows] for k, rows in arrays.items()}
    together = [
        blake3(b"".join(k.encode() + b"\0" + hashes[k][i] for k in sorted(hashes))).digest(16)
        for i in range(max(counts, default=0))
    ]
    sums = {k: sum(int.from_bytes(h, "little") for h in every) % (1 << 128) for k, every in hashes.items()}
    whole = sum(int.from_bytes(h, "little") for h in together) % (1 << 128)
    return BatchDigest(sums, whole, "".join(map(_make_mark, hashes.get("input_ids", together))))


def add_digests(parts: Sequence[BatchDigest]) -> BatchDigest:
    """Add the digests of parts of a batch, such as micro-batches.

    A key that is not in every part with samples is left out of the sum; the digest of complete samples is then None.
    """
    full = [p for p in parts if p.keys]
    common = [k for k in full[0].keys if all(k in p.keys for p in full)] if full else []
    sums = {k: sum(p.keys[k] for p in full) % (1 << 128) for k in common}
    wholes = [p.whole if len(p.keys) == len(common) else None for p in full]
    whole = None if None in wholes else sum(w for w in wholes if w is not None) % (1 << 128)
    return BatchDigest(sums, whole, "".join(p.marks for p in parts))


def make_batch_fields(ranks: Sequence[BatchDigest]) -> dict[str, Any]:
    """Return the fields of a `Step` about its batch, from the digests of each rank's part.

    They are {"batch": digest of the token ids in hex or None, "inputs": {key: digest} of the other keys, "samples":
    digest of complete samples or None, "rows": marks of each rank}.
    """
    total = add_digests(ranks)
    text = {k: f"{x:032x}" for k, x in total.keys.items()}
    whole = None if total.whole is None or not text else f"{total.whole:032x}"
    rows = [rank.marks for rank in ranks] if text else []
    return {"batch": text.pop("input_ids", None), "inputs": text, "samples": whole, "rows": rows}


def _list_arrays(batch: Mapping[str, object], at: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (key, values) for each entry of a batch that has arrays; others are left out.

    The values are a tensor or an array, or a list with one for each sample. Nested dicts are flattened, with dots in
    the keys.

    Args:
        batch: {key: values, or a nested dict}.
        at: put before every key.
    """
    import numpy as np

    for key, x in batch.items():
        if isinstance(x, Mapping):
            yield from _list_arrays(x, f"{at}{key}.")
        elif getattr(x, "ndim", 0):
            yield f"{at}{key}", x
        elif isinstance(x, (list, tuple)) and x:
            plain = all(isinstance(v, (bool, int, float, list, tuple)) for v in x)
            if plain or all(hasattr(v, "ndim") for v in x):
                yield f"{at}{key}", np.asarray(x) if plain else x


def _hash_sample(x: Any, ids: bool) -> bytes:
    """Hash one sample's tensor into 16 bytes.

    Args:
        x: the tensor, array or number of one sample.
        ids: whether these are token ids, of which only the elements are hashed, as int64; otherwise dtype and shape are
            hashed, too.

    Raises:
        TypeError: token ids are no integers.
    """
    import numpy as np
    from blake3 import blake3

    name = str(getattr(x, "dtype", "")).removeprefix("torch.")
    if hasattr(x, "detach"):
        import torch

        x = x.detach().cpu()
        if name == "bfloat16" or name.startswith("float8"):  # which numpy does not have
            x = x.view(torch.int16 if x.element_size() == 2 else torch.int8)
        x = x.numpy()
    x = np.asarray(x)
    if ids and x.dtype.kind not in "iub":
        raise TypeError(f"token ids of dtype {name}")
    if ids:
        return blake3(np.ascontiguousarray(x, dtype="<i8").tobytes()).digest(16)
    if x.dtype.kind in "iu" and "int" in name:
        name, x = "int", x.astype("<i8")
    return blake3(f"{name or x.dtype.name} {list(x.shape)} ".encode() + x.tobytes()).digest(16)


def _make_mark(whole: bytes) -> str:
    """Return the mark of a row from its hash: the first 48 bits in base64."""
    return base64.b64encode(whole[:6]).decode()


def split_marks(ranks: Sequence[str]) -> list[list[str]]:
    """Split the joined marks of each rank's rows: [[mark of each row] for each rank].

    Args:
        ranks: a text for each rank, with 8 characters for each of its rows.
    """
    return [[marks[i : i + _MARK] for i in range(0, len(marks), _MARK)] for marks in ranks]


def check_data_exists(data: str) -> None:
    """Refuse a file of token rows that does not exist; "synthetic" needs none.

    Raises:
        UsageError: there is no such file.
    """
    if data != "synthetic" and not os.path.exists(data):
        raise UsageError(f"{argument('data', data)}: no such file, and not the word synthetic.", code="CKPT0212")


def open_data(
    data: str, *, seed: int, sequence: int | None, vocabulary: int | None, tokenizer: str | None = None
) -> tuple[Rows, int]:
    """Open the token rows of a job: (function from sample index to row, tokens of a row).

    Args:
        data: "synthetic", or a .npy or .jsonl file.
        seed: of synthetic rows.
        sequence: tokens of a row; None for what the file has, or 512.
        vocabulary: number of token ids that the model has; None if it is not known, then ids are not checked.
        tokenizer: a Hugging Face folder whose tokenizer encodes lines of text; None for none.

    Raises:
        UsageError: there is no such file, it holds something else, or there is no vocabulary for synthetic rows. The
            function raises it for tokens outside the vocabulary.
    """
    if data == "synthetic":
        if vocabulary is None:
            raise UsageError(
                f"{argument('data', data)} needs a model with a vocabulary. Give {argument('data')} a file, or return "
                "data from build().",
                code="CKPT0217",
            )
        return _make_synthetic_rows(seed, sequence or 512, vocabulary), sequence or 512
    check_data_exists(data)
    if data.endswith(".npy"):
        matrix = _open_npy_rows(data, sequence)
        return _with_vocabulary_check(lambda i: {"input_ids": matrix(i)}, data, vocabulary), len(matrix(0))
    if data.endswith((".jsonl", ".json")):
        return _open_jsonl_rows(data, sequence, vocabulary, tokenizer)
    raise UsageError(f"{argument('data', data)}: give a .npy or .jsonl file, or the word synthetic.", code="CKPT0212")


def _make_synthetic_rows(seed: int, sequence: int, vocabulary: int) -> Rows:
    """Return a function from sample index to {"input_ids": `sequence` tokens}; a row's second half repeats the
    first."""

    def row(index: int) -> dict[str, Any]:
        import numpy as np

        draw = np.random.Generator(np.random.Philox(key=[seed % (1 << 64), index % (1 << 64)]))
        half = draw.integers(0, vocabulary, (sequence + 1) // 2, dtype=np.int64)
        return {"input_ids": np.concatenate([half, half])[:sequence]}

    return row


def _open_npy_rows(path: str, sequence: int | None) -> Callable[[int], Any]:
    """Open a .npy file of token rows, and return a function from sample index to row, which wraps around at the end.

    `sequence` shortens rows; None keeps their length. A 1-d array is cut into rows of `sequence`, or of 512.

    Raises:
        UsageError: it is no such file, or has fewer tokens than `sequence`.
    """
    import numpy as np

    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as e:
        raise UsageError(f"{argument('data', path)}: not a plain .npy file ({e}).", code="CKPT0217") from None
    if tokens.dtype.kind not in "iu" or tokens.ndim not in (1, 2) or not tokens.size:
        raise UsageError(
            f"{argument('data', path)}: {tokens.dtype} {tokens.shape}; token rows are a matrix of integers, "
            "or one row.",
            code="CKPT0217",
        )
    if tokens.ndim == 1:
        length = sequence or 512
        if len(tokens) < length:
            raise UsageError(
                f"{argument('data', path)}: {len(tokens)} tokens, fewer than one row of {length} "
                f"({argument('sequence')}).",
                code="CKPT0217",
            )
        tokens = tokens[: len(tokens) // length * length].reshape(-1, length)
    elif sequence and sequence > tokens.shape[1]:
        raise UsageError(
            f"{argument('data', path)}: rows of {tokens.shape[1]} tokens, but {argument('sequence')} is {sequence}.",
            code="CKPT0217",
        )
    return lambda i: np.array(tokens[i % len(tokens)][:sequence], dtype=np.int64)


def _open_jsonl_rows(
    path: str, sequence: int | None, vocabulary: int | None, tokenizer: str | None
) -> tuple[Rows, int]:
    """Open a .jsonl file: (function from sample index to row, tokens of a row). A line is read when its row is
    requested.

    Args:
        path: the file.
        sequence: tokens of a row, to which lines are cut or padded; None for those of the first line.
        vocabulary: number of token ids; None if it is not known.
        tokenizer: folder of the tokenizer for lines of text; None for none.

    Raises:
        UsageError: the file has no lines, or its first line is no row. The function raises it for other lines.
    """
    import numpy as np

    where = [0]
    with open(path, "rb") as f:
        for text in f:
            where.append(where[-1] + len(text))
    count = len(where) - 1
    if not count:
        raise UsageError(f"{argument('data', path)}: no lines.", code="CKPT0217")
    encode = _make_lazy_tokenizer(tokenizer)

    def record(index: int) -> dict[str, list[int]]:
        """Read and parse the line of a sample index; indices go on from the first line after the last."""
        k = index % count
        with open(path, "rb") as f:
            f.seek(where[k])
            raw = f.read(where[k + 1] - where[k])
        try:
            found = parse(raw, path)
            ids = found["input_ids"] if "input_ids" in found else encode(found["text"])
            tokens = {"input_ids": [int(t) for t in ids], "labels": [int(t) for t in found.get("labels", ids)]}
        except UsageError:
            raise
        except (Corrupt, Unsafe, ValueError, LookupError, TypeError, AttributeError):
            raise UsageError(
                f'{argument("data", path)}, line {k + 1}: not an object with "input_ids" or "text", as every line must '
                "be.",
                code="CKPT0217",
            ) from None
        if len(tokens["labels"]) != len(tokens["input_ids"]):
            raise UsageError(
                f'{argument("data", path)}, line {k + 1}: {len(tokens["labels"]):,} "labels" for '
                f'{len(tokens["input_ids"]):,} "input_ids"; give one for each.',
                code="CKPT0217",
            )
        return tokens

    length = sequence or len(record(0)["input_ids"])

    def row(index: int) -> dict[str, Any]:
        got = record(index)
        ids = np.zeros(length, dtype=np.int64)
        labels = np.full(length, IGNORED, dtype=np.int64)
        n = min(length, len(got["input_ids"]))
        ids[:n], labels[:n] = got["input_ids"][:n], got["labels"][:n]
        return {"input_ids": ids, "labels": labels}

    return _with_vocabulary_check(row, path, vocabulary), length


def _make_lazy_tokenizer(folder: str | None) -> Callable[[str], list[int]]:
    """Return a function that encodes text with the tokenizer of a folder, which is loaded on the first call.

    The function raises UsageError if `folder` is None or has no tokenizer.
    """
    loaded: list[Any] = []

    def encode(text: str) -> list[int]:
        """Return the token ids of a text; the first call loads the tokenizer."""
        if not loaded:
            if folder is None:
                raise UsageError(
                    f"lines of text need the tokenizer of a Hugging Face folder ({argument('config')}); no folder was "
                    "given.",
                    code="CKPT0217",
                )
            from transformers import AutoTokenizer

            try:
                loaded.append(AutoTokenizer.from_pretrained(folder, trust_remote_code=False))
            except (OSError, ValueError) as e:
                raise UsageError(
                    f"{argument('config', folder)}: no tokenizer for lines of text ({str(e).splitlines()[0]}).",
                    code="CKPT0217",
                ) from None
        return list(loaded[0](text)["input_ids"])

    return encode


def _with_vocabulary_check(rows: Rows, path: str, vocabulary: int | None) -> Rows:
    """Return a function that returns the same rows, and raises UsageError for a token outside the vocabulary.

    `path` is the file of the rows, for that error. Nothing is refused if `vocabulary` is None (not known).
    """

    def row(index: int) -> dict[str, Any]:
        """Return the row of a sample index, unless it has tokens outside the vocabulary."""
        out = rows(index)
        ids = out["input_ids"]
        if vocabulary is not None and len(ids) and (int(ids.max()) >= vocabulary or int(ids.min()) < 0):
            raise UsageError(
                f"{argument('data', path)}: sample {index} has tokens {int(ids.min())}..{int(ids.max())}, but the "
                f"vocabulary of the model has {vocabulary}: another tokenizer?",
                code="CKPT0217",
            )
        return out

    return row


def wrap_user_data(data: Any) -> Rows:
    """Return a function from sample index to {name: numpy array} for the data of `build()`.

    `data` is a function of the sample index, or a sequence, which is read cyclically; a sample that is no dict is
    {"input_ids": it}.

    Raises:
        UsageError: it is neither. The function raises it where the user's function has no such sample.
    """
    import numpy as np

    def row(index: int) -> dict[str, Any]:
        """Return the sample of an index as {name: numpy array}."""
        try:
            sample = data(index) if callable(data) else data[index % len(data)]
        except IndexError as e:
            raise UsageError(
                f"the data of build() has no sample {index} ({e}). Step n of the training reads the samples from (n - "
                f"1) x {argument('global_batch')} on: let the function go on, as data[index % len(data)] does, or take "
                f"fewer {argument('steps')}.",
                code="CKPT0217",
            ) from None
        if not isinstance(sample, dict):
            sample = {"input_ids": sample}
        return {k: np.asarray(v) for k, v in sample.items()}

    if not callable(data) and not (
        isinstance(data, Sequence) or (hasattr(data, "__getitem__") and hasattr(data, "__len__"))
    ):
        raise UsageError(
            f"build() returned data of type {type(data).__name__}. Return a function of the sample index or a "
            "sequence, so that batches do not depend on the rank.",
            code="CKPT0217",
        )
    return row
