"""What is never pushed: pickles, which run code when loaded, archives, which hide their content, and texts that contain
a secret.

Weights are safetensors files that ckpttool writes; only their headers are searched. Every other file is searched
completely, by content and not by name. A message names the file and the kind of secret, never the secret.

    pickle      the opcodes of protocol 2 and later, or a stream of any protocol from the first byte that calls
                something, or that ends where the file ends; a zip with such a record (torch.save)
    archive     gzip, bzip2, xz, zip, 7z, zstd, lz4; .npy, which may hold pickled objects
    secret      tokens of known forms, private keys, signed URLs, URLs with a password, and long values of keys called
                api_key, token, secret, password, ...; of other keys that end in key or token, if they look random

JSON is also searched as data: with escapes decoded, lists of pairs and arguments ("--api-key", "..."), and bytes
as in values.json. UTF-16 is text. Special tokens ("pad_token": "<pad>"), vocabularies (where a word is followed
by its number), templates, paths, plain URLs and words with hyphens are not secrets.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import pickletools
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any

from ..bounded_json import refuse_bomb
from ..errors import Unsafe, argument
from ..huggingface.model_files import PACKED

__all__ = ["find_forbidden_kind", "refuse_forbidden"]

_PICKLE, _ARCHIVE = "a pickle", "an archive"


def _looks_random(text: str) -> bool:
    """Whether a text contains 16 or more letters and digits in a row that alternate as in a random key."""
    for run in re.findall(r"[A-Za-z0-9]{16,}", text):
        kinds = [0 if c.isdecimal() else 1 if c.isupper() else 2 for c in run]
        if kinds.count(0) >= 3 and sum(a != b for a, b in pairwise(kinds)) * 4 >= len(run):
            return True
    return False


def _looks_like_key(value: str) -> bool:
    """Return whether a value looks like a key: at least 16 characters, letters and digits of many kinds, and not a
    path, URL or date."""
    if len(value) < 16 or len(value) > 4096 or len(set(value)) < 9:
        return False
    if re.search(r"[A-Za-z]", value) is None or len(re.findall(r"[0-9]", value)) < 2:
        return False
    if re.fullmatch(r"[A-Za-z0-9_./+=:~!@#$%^&*-]+", value) is None or "://" in value:
        return False
    return _looks_random(value) if _PATH.match(value) else True


def _has_digits(text: str) -> bool:
    """Return whether a text has digits."""
    return re.search(r"[0-9]", text) is not None


def _has_both_cases(text: str) -> bool:
    """Return whether a text has upper-case and lower-case letters."""
    return re.search(r"[A-Z]", text) is not None and re.search(r"[a-z]", text) is not None


def _is_sk_key(text: str) -> bool:
    """Return whether a text that begins with "sk-" is a key and not words with hyphens."""
    return re.match(r"sk-(?:proj|svcacct|admin|ant-[a-z]+\d\d|or-v1)-", text) is not None or _looks_random(text)


def _is_password(text: str) -> bool:
    """Whether a text in the place of a password is one, and not a placeholder."""
    return not _PLACEHOLDER.fullmatch(text) and text.lower() not in ("password", "passwd", "pass", "pwd", "token")


#: (kind, texts of which one is in every such secret, the form, what its last group has to be).
_FORMS: tuple[tuple[str, tuple[str, ...], re.Pattern[str], Callable[[str], bool]], ...] = (
    (
        "a Hugging Face token",
        ("hf_", "api_org_"),
        re.compile(r"(?<![A-Za-z0-9_])((?:hf_|api_org_)[A-Za-z0-9]{30,})"),
        _has_both_cases,
    ),
    ("an AWS access key", ("AKIA", "ASIA"), re.compile(r"(?<![A-Z0-9])((?:AKIA|ASIA)[A-Z0-9]{16})(?![A-Z0-9])"), bool),
    ("a private key", ("PRIVATE KEY",), re.compile(r"-----BEGIN ((?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?)-----"), bool),
    (
        "a GitHub token",
        ("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_"),
        re.compile(r"(?<![A-Za-z0-9])(gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{40,})"),
        bool,
    ),
    ("a GitLab token", ("glpat-",), re.compile(r"(?<![A-Za-z0-9])glpat-([A-Za-z0-9_-]{20,})"), bool),
    ("an npm token", ("npm_",), re.compile(r"(?<![A-Za-z0-9_])npm_([A-Za-z0-9]{36})(?![A-Za-z0-9])"), _looks_random),
    ("an API key", ("sk-",), re.compile(r"(?<![A-Za-z0-9])(sk-[A-Za-z0-9_-]{20,})"), _is_sk_key),
    ("an API key", ("k_live_",), re.compile(r"(?<![A-Za-z0-9])[sr]k_live_([A-Za-z0-9]{16,})"), bool),
    ("a Slack token", ("xox",), re.compile(r"(?<![A-Za-z0-9])(xox[abeprs]-[A-Za-z0-9-]{16,})"), bool),
    ("a Google API key", ("AIza",), re.compile(r"(?<![A-Za-z0-9])AIza([A-Za-z0-9_-]{35})(?![A-Za-z0-9_-])"), bool),
    (
        "a JSON web token",
        ("eyJ",),
        re.compile(r"(?<![A-Za-z0-9_.-])(eyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{16,})"),
        bool,
    ),
    (
        "what a request is authorised by",
        ("earer ", "EARER ", "asic ", "BASIC "),
        re.compile(r"(?<![A-Za-z0-9])(?i:bearer|basic) {1,9}([A-Za-z0-9._~+/=-]{16,4096})"),
        _looks_like_key,
    ),
    (
        "the key of an account",
        ("AccountKey=", "SharedAccessKey="),
        re.compile(r"(?:AccountKey|SharedAccessKey)=([A-Za-z0-9+/]{40,100}={0,2})"),
        bool,
    ),
    (
        "a signed URL",
        ("Signature=", "sig="),
        re.compile(r"[?&](?:X-Amz-Signature|X-Goog-Signature|Signature|sig)=([A-Za-z0-9%~_+/=-]{30,2048})"),
        _has_digits,
    ),
    (
        "a URL with a password",
        ("://",),
        re.compile(r"(?<![a-z0-9+.-])[a-z][a-z0-9+.-]*://[^\s/:@\"'<>{}\\]*:([^\s/:@\"'<>{}\\]{3,})@[A-Za-z0-9\[]"),
        _is_password,
    ),
    (
        "a password of .netrc",
        ("machine",),
        re.compile(
            r"(?<![A-Za-z0-9])machine\s{1,9}\S{1,256}\s{1,99}login\s{1,9}\S{1,256}\s{1,99}password\s{1,9}(\S{3,256})"
        ),
        _is_password,
    ),
)
#: Keys whose values are secrets, if they are long.
_KEY = (
    r"(?:[A-Za-z0-9_.-]{0,64}(?:api[_-]?key|(?:hub|auth|access|refresh|bearer|api|hf|bot|wandb|github|gitlab|slack)[_-]?token|"
    r"(?:access|secret|private|wandb|account|signing|encryption)[_-]?key|client[_-]?secret|passw(?:or)?d|passphrase|[_.-]pwd)|"
    r"pwd|(?:[A-Za-z0-9_.-]{0,64}[._-])?secret|(?:[A-Za-z0-9_.-]{0,64}\.)?token|-{1,2}token)"
)
_OF_SECRET = re.compile(rf"(?i){_KEY}")
_MAYBE = re.compile(r"(?i)[A-Za-z0-9_.-]{0,64}(?:key|token)")
# "key": "value", key: value, key = 'value', and as values.json has it: {"path": [..., "key"], "data": "value"}; pairs
_NAMED = re.compile(
    rf"""(?i)(?P<key>{_KEY})(?:["']?\s*(?:[:=]|\]\s*,\s*"data"\s*:)\s*|(?P<pair>["']\s*,\s*)(?=["']))"""
    r"""(?P<quote>["']?)(?P<value>[^\s"',}\]]{12,4096})"""
)
_ARGUMENT = re.compile(rf"""(?i)(?P<key>--?{_KEY})\s{{1,9}}(?P<quote>["']?)(?P<value>[^\s"',}}\]]{{12,4096}})""")
#: One is in every such key; a search for them is a hundred times faster than one for the form.
_STEMS, _LONGEST_KEY, _SHORTEST = (b"key", b"token", b"secret", b"passw", b"passphrase", b"pwd"), 64, 10
_OF_KEYS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.-")
_PATH = re.compile(r"/|\.{1,2}/|~/|[A-Za-z]:[/\\]")
_PLACEHOLDER = re.compile(r"[<$*{].*|.*\*\*\*.*|(?i:none|null|true|false|your[_-].*|env[:.].*|os\.environ.*|x{3,})")
#: Keys by which JSON says how something is spelled, not what it is; those of values.json among them.
_SPELLING = frozenset(
    {"data", "value", "$tuple", "$set", "$frozenset", "$dict", "$object", "args", "state", "list", "dict"}
)


def refuse_forbidden(files: Iterable[tuple[str, bytes]]) -> None:
    """Refuse files that are never pushed: pickles, archives, and texts with secrets.

    Args:
        files: (name, bytes) of each; of weights, only the header.

    Raises:
        Unsafe: with the file and what was found.
    """
    for name, data in files:
        found = find_forbidden_kind(data)
        if found in (_PICKLE, _ARCHIVE):
            why = (
                "loading one runs code" if found == _PICKLE else "nobody can see what it holds, and a model needs none"
            )
            raise Unsafe(
                f"{name} is {found}: {why}, so it is never pushed. Take it away from the model's other files, or give "
                f"{argument('config')} with a folder that has none.",
                code="CKPT0705",
            )
        if found is not None:
            raise Unsafe(
                f"{name} seems to contain {found}. Anybody who can read the repository could use it, so nothing was "
                "pushed. Remove it from the file, and revoke it if others may have seen it.",
                code="CKPT0705",
            )


def find_forbidden_kind(data: bytes) -> str | None:
    """Return why a file with these bytes must not be pushed: "a pickle", "an archive" or the kind of secret in it, for
    a message; None if it may be pushed."""
    if _is_pickle(data) or _holds_pickle(data):
        return _PICKLE
    if data.startswith(PACKED) or zipfile.is_zipfile(io.BytesIO(data)):
        return _ARCHIVE
    found = _find_secret_in_text(data)
    if found is None and b"\0" in data:  # UTF-16 and UTF-32 of ASCII are that with NULs in between
        found = _find_secret_in_text(data.replace(b"\0", b""))
    if found is None and data.lstrip(b"\xef\xbb\xbf\xff\xfe\0 \t\r\n")[:1] in (b"{", b"["):
        found = _find_secret_in_json(data)
    return found


# ----------------------------------------------------------------------------------------------------------- secrets


def _find_secret_in_text(data: bytes) -> str | None:
    """Search the bytes of a text for secrets, and return the kind of the first one, for a message; None if there is
    none."""
    text = data.decode("latin-1")  # as many characters as bytes; all that is looked for is ASCII
    for kind, parts, form, check in _FORMS:
        if any(part in text for part in parts) and any(check(m[1]) for m in form.finditer(text)):
            return kind
    for found in _iterate_secret_keys(data.lower(), text):
        pair = found.groupdict().get("pair")  # words of a list, perhaps
        if _is_secret(found["key"], found["value"], bool(found["quote"]) and not pair):
            return _describe_secret_of_key(found["key"])
    return None


def _describe_secret_of_key(key: str) -> str:
    """Return how a message names a secret that only its key gives away: 'what its key "api_key" says'."""
    return f'what its key "{key.lstrip("-")[:40]}" says'


def _is_secret(key: str, value: str, quoted: bool) -> bool:
    """Whether a value is likely a secret, if its key is named like that of a secret.

    Args:
        key: the key.
        value: the value.
        quoted: whether the value is in quotes; for a password, quoted words are sufficient.
    """
    if _PLACEHOLDER.fullmatch(value):
        return False
    if _looks_like_key(value):
        return True
    chosen = re.search(r"(?i)passw|passphrase|pwd", key)  # by a person: words will do
    return chosen is not None and quoted and len(value) >= 12 and not _PATH.match(value) and "://" not in value


def _iterate_secret_keys(lower: bytes, text: str) -> Iterator[re.Match[str]]:
    """Yield the matches of keys that are named like those of secrets, with the groups "key", "value" and "quote".

    Args:
        lower: the text in lower case, as bytes.
        text: the text itself.
    """
    for stem in _STEMS:
        at = lower.find(stem)
        while at >= 0:
            start, end = at, at + len(stem)
            while start and at - start < _LONGEST_KEY and text[start - 1] in _OF_KEYS:
                start -= 1
            while end < len(text) and end - at < _LONGEST_KEY and text[end] in _OF_KEYS:
                end += 1
            if end - at < _LONGEST_KEY and (found := _NAMED.match(text, start) or _ARGUMENT.match(text, start)):
                yield found
            at = lower.find(stem, end)


class _Pairs(list[tuple[str, Any]]):
    """An object of JSON with all its keys, including duplicates."""


def _find_secret_in_json(data: bytes) -> str | None:
    """Search a JSON file for secrets that a search of its bytes would miss, such as those with escapes. Return the
    kind of the first one, for a message; None if there is none, or the bytes are not JSON."""
    try:
        refuse_bomb(data, "a file")
        read = json.loads(data, object_pairs_hook=_Pairs)
    except (Unsafe, ValueError, RecursionError):
        return None
    texts: list[str] = []
    todo: list[tuple[object, str | None]] = [(read, None)]
    while todo:
        x, key = todo.pop()
        if isinstance(x, _Pairs):
            texts += [k for k, _ in x if _is_long_enough(k)]
            todo += _iterate_json_values(x, key)
        elif isinstance(x, list):
            todo += ((item, key) for item in x)
            for name, item in pairwise(x):
                both = (
                    isinstance(item, str) and _is_long_enough(item) and isinstance(name, str) and _is_secret_key(name)
                )
                if both and _is_secret(name, item, False):
                    return _describe_secret_of_key(name)
        elif isinstance(x, str) and _is_long_enough(x):
            texts.append(x)
            if key is not None and _looks_secret(key, x):
                return _describe_secret_of_key(key)
    if b"\\" not in data and b'"$' not in data:
        return None  # it is spelled as it reads
    return _find_secret_in_text("\n".join(texts).encode("utf-8", "replace"))


def _iterate_json_values(x: _Pairs, above: str | None) -> Iterator[tuple[object, str | None]]:
    """Yield (value, its key or None) of a JSON object. What values.json encodes (bytes, texts, dicts) is decoded.

    Args:
        x: the object.
        above: the key whose value the object is; None if there is none.
    """
    above = next((_find_last_text(item) for key, item in x if key == "path"), None) or above
    for key, item in x:
        if key in ("$bytes", "$bytearray") and isinstance(item, str):
            try:
                yield base64.b64decode(item).decode("latin-1"), above
            except (binascii.Error, ValueError):
                yield item, above
        elif key == "$str" and isinstance(item, str) and re.fullmatch(r"(?:[0-9a-f]{2})*", item):
            yield bytes.fromhex(item).decode("latin-1"), above
        elif key == "$dict" and isinstance(item, list):
            for pair in item:
                if isinstance(pair, list) and len(pair) == 2:
                    yield pair[0], None
                    yield pair[1], _find_last_text(pair[0]) or above
        elif key not in ("$tensor", "path"):
            yield item, above if key in _SPELLING else key


def _find_last_text(x: object) -> str | None:
    """Return the last text in the JSON of a dict's key, which may be a tuple; None if the last element is no text."""
    while isinstance(x, list) and x:
        x = x[-1][1] if isinstance(x, _Pairs) else x[-1]
    return x if isinstance(x, str) else None


def _is_long_enough(text: str) -> bool:
    """Return whether a text has enough characters for a secret."""
    return len(text) >= _SHORTEST


def _is_secret_key(key: str) -> bool:
    """Return whether a key is named like that of a secret."""
    return len(key) <= _LONGEST_KEY and _OF_SECRET.fullmatch(key) is not None


def _looks_secret(key: str, value: str) -> bool:
    """Return whether the text `value` is a secret, judged with the name of its key."""
    if _is_secret_key(key):
        return _is_secret(key, value, True) and not re.search(r"\s", value)
    return len(value) >= 20 and _MAYBE.fullmatch(key) is not None and _looks_like_key(value) and _looks_random(value)


# ---------------------------------------------------------------------------------------------------------- pickles

_CALLS = frozenset({"REDUCE", "BUILD", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4"})


def _is_pickle(data: bytes) -> bool:
    """Return whether the bytes are a pickle, of any protocol, that torch.load or pickle.load would run."""
    if data[:1] == b"\x80" and data[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return True
    calls, end = _walk_opcodes(data)
    if not end:
        return False
    if calls:  # what follows is not read when it is loaded
        return True
    if end < 2 or data[end:].strip():
        return False
    try:
        pickletools.dis(io.BytesIO(data), _Nowhere())  # it keeps account of the stack, so that few texts pass
    except Exception:  # nothing to pop
        return False
    return True


def _walk_opcodes(data: bytes) -> tuple[bool, int]:
    """Parse the bytes as pickle opcodes, and return (whether one of them calls something, number of bytes up to the
    end of the pickle); (False, 0) if they are not a pickle."""
    stream, calls = io.BytesIO(data), False
    try:
        for op, arg, _ in pickletools.genops(stream):
            if op.name in ("GLOBAL", "INST") and not re.fullmatch(r"[A-Za-z_][\w.]* [A-Za-z_][\w.]*", str(arg)):
                return False, 0
            calls = calls or op.name in _CALLS
    except Exception:  # no opcode, a number that is none
        return False, 0
    return calls, stream.tell()


class _Nowhere(io.StringIO):
    """A file object that discards what is written."""

    def write(self, text: str, /) -> int:
        """Discard `text`, and return the number of its characters."""
        return len(text)


def _holds_pickle(data: bytes) -> bool:
    """Return whether the bytes are a zip with a pickle in it (torch.save)."""
    if not data.startswith(b"PK\x03\x04"):
        return False
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as z:
            return any(n.lower().endswith((".pkl", ".pickle")) for n in z.namelist())
    except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError):
        return b"data.pkl" in data
