"""What is never pushed: pickles, which run code where they are loaded, and texts that hold a secret.

Weights are safetensors and are written by us. Every other file of a push is looked at whole, by its content and not by
its name. A message names the file and the kind of secret, never the secret.

    pickle      the opcodes of protocol 2 and later, or a protocol 0 or 1 stream from its first byte to its last; a zip with
                such a record (torch.save)
    secret      tokens of known forms (Hugging Face, AWS, OpenAI, Anthropic, GitHub, Slack, Google), private keys, URLs with
                a password, and long values of keys called api_key, token, secret, password, ...

Special tokens ("pad_token": "<pad>"), vocabularies (where a word is followed by its number) and templates are none of it.
"""

from __future__ import annotations

import io
import pickletools
import re
import zipfile
from collections.abc import Iterable, Iterator

from ..errors import Unsafe

__all__ = ["kind_of", "screen"]

#: (kind, texts of which one is in every such secret, the form).
_FORMS: tuple[tuple[str, tuple[str, ...], re.Pattern[str]], ...] = (
    ("a Hugging Face token", ("hf_", "api_org_"), re.compile(r"(?<![A-Za-z0-9_])(?:hf_|api_org_)[A-Za-z0-9]{30,}")),
    ("an AWS access key", ("AKIA", "ASIA"), re.compile(r"(?<![A-Z0-9])(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Z0-9])")),
    ("a private key", ("PRIVATE KEY",), re.compile(r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----")),
    (
        "a GitHub token", ("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_"),
        re.compile(r"(?<![A-Za-z0-9])(?:gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{40,})"),
    ),
    (
        "an API key", ("sk-",),
        re.compile(r"(?<![A-Za-z0-9])sk-(?=[A-Za-z_-]*[0-9])(?=[0-9_-]*[A-Za-z])[A-Za-z0-9_-]{20,}"),
    ),
    ("a Slack token", ("xox",), re.compile(r"(?<![A-Za-z0-9])xox[abeprs]-[A-Za-z0-9-]{16,}")),
    ("a Google API key", ("AIza",), re.compile(r"(?<![A-Za-z0-9])AIza[A-Za-z0-9_-]{35}(?![A-Za-z0-9_-])")),
    (
        "a URL with a password", ("://",),
        re.compile(
            r"(?<![a-z0-9+.-])[a-z][a-z0-9+.-]*://[^\s/:@\"'<>{}\\]+:[^\s/:@\"'<>{}\\]{6,}@[A-Za-z0-9\[]"
        ),
    ),
)  # fmt: skip
_KEY = (
    r"(?:[A-Za-z0-9_.-]{0,64}(?:api[_-]?key|apikey|hub[_-]?token|auth[_-]?token|access[_-]?token|access[_-]?key|"
    r"secret[_-]?key|client[_-]?secret|private[_-]?key|passw(?:or)?d)|(?:[A-Za-z0-9_.-]{0,64}\.)?(?:token|secret|hf_token))"
)
# "key": "value", key: value, key = 'value', and as values.json has it: {"path": [..., "key"], "data": "value"}
_NAMED = re.compile(
    rf"""(?i)(?P<key>{_KEY})["']?\s*(?:[:=]|\]\s*,\s*"data"\s*:)\s*(?P<quote>["']?)(?P<value>[^\s"',}}\]]{{12,4096}})"""
)
#: One is in every such key; a search for them is a hundred times faster than one for the form.
_STEMS, _LONGEST_KEY = (b"key", b"token", b"secret", b"passw"), 64
_OF_KEYS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.-")
_PLACEHOLDER = re.compile(r"[<$*{].*|.*\*\*\*.*|(?i:none|null|true|false|your[_-].*|env[:.].*|os\.environ.*)")


def screen(files: Iterable[tuple[str, bytes]]) -> None:
    """Refuse what is never pushed, in (name, bytes) of files beside the weights.

    Raises:
        Unsafe: with the file and what was found.
    """
    for name, data in files:
        found = kind_of(data)
        if found == "a pickle":
            raise Unsafe(
                f"{name} is a pickle: loading one runs code, so it is never pushed. Take it away from the model's other "
                "files, or give --config with a folder that has none."
            )
        if found is not None:
            raise Unsafe(
                f"{name} seems to hold {found}; whoever may read the repository could use it, so nothing was pushed. Take it "
                "out of the file (and replace it by another one where others may have seen it)."
            )


def kind_of(data: bytes) -> str | None:
    """What of a file must not be pushed, "a pickle" or the kind of secret; None of one that may."""
    if _is_pickle(data) or _holds_pickle(data):
        return "a pickle"
    text = data.decode("latin-1")  # as many characters as bytes; all that is looked for is ASCII
    for kind, parts, form in _FORMS:
        if any(part in text for part in parts) and form.search(text):
            return kind
    for found in _named(data.lower(), text):
        value = found["value"]
        if _PLACEHOLDER.fullmatch(value):
            continue
        if _mixed(value) or (found["quote"] and re.search(r"(?i)passw", found["key"])):
            return f'what its key "{found["key"][:40]}" says'
    return None


def _named(lower: bytes, text: str) -> Iterator[re.Match[str]]:
    """Keys that speak of secrets, with their values."""
    for stem in _STEMS:
        at = lower.find(stem)
        while at >= 0:
            start, end = at, at + len(stem)
            while start and at - start < _LONGEST_KEY and text[start - 1] in _OF_KEYS:
                start -= 1
            while end < len(text) and end - at < _LONGEST_KEY and text[end] in _OF_KEYS:
                end += 1
            if end - at < _LONGEST_KEY and (found := _NAMED.match(text, start)):
                yield found
            at = lower.find(stem, end)


def _mixed(value: str) -> bool:
    """Whether a value looks drawn by lot: letters and digits, of many kinds, and long."""
    return (
        len(value) >= 16
        and re.search(r"[A-Za-z]", value) is not None
        and len(re.findall(r"[0-9]", value)) >= 2
        and len(set(value)) >= 9
        and re.fullmatch(r"[A-Za-z0-9_./+=:~!@#$%^&*-]+", value) is not None
    )


def _is_pickle(data: bytes) -> bool:
    if data[:1] == b"\x80" and data[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return True
    if not data.rstrip().endswith(b".") or data[:1] not in b"(])}lcidISVFLMNGJKTUX":
        return False
    stream = io.BytesIO(data)
    try:
        pickletools.dis(stream, _Nowhere())  # it keeps account of the stack, so that few texts pass
    except Exception:  # no opcode, a number that is none, nothing to pop
        return False
    return stream.tell() > 1 and not data[stream.tell() :].strip()


class _Nowhere(io.StringIO):
    """Where what is written is not kept."""

    def write(self, text: str, /) -> int:
        return len(text)


def _holds_pickle(data: bytes) -> bool:
    if not data.startswith(b"PK\x03\x04"):
        return False
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as z:
            return any(n.endswith((".pkl", ".pickle")) for n in z.namelist())
    except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError):
        return b"data.pkl" in data
