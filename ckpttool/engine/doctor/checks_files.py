"""Checks of whole files: what `salvage.find_problems` says of those that are cut off, lost or something else, and what
a layout could not read."""

from __future__ import annotations

from ...errors import CkpttoolError, Corrupt, Differs
from ..recorded import RECORD
from ..salvage import Problem, ProblemKind
from ..verification import VerifyResult, compare_recorded_digests
from .checks import Examined, check
from .findings import DAMAGE, NOTE, Finding, FindingKind, define_kind

__all__ = [
    "DIFFERS",
    "FILE_KINDS",
    "LOST",
    "MISSING",
    "NOT_READ",
    "SALVAGED",
    "UNREADABLE",
    "make_file_finding",
    "make_refusal_finding",
]

#: The kinds of damaged files, as findings.
FILE_KINDS: dict[ProblemKind, FindingKind] = {
    "cut": define_kind("cut", 10, "a file ends too early, or is zeros from some byte on", "what-is-recognised"),
    "empty": define_kind("empty", 11, "a file has no bytes", "what-is-recognised"),
    "zeros": define_kind("zeros", 12, "a file begins with zeros", "what-is-recognised"),
    "lfs-pointer": define_kind("lfs-pointer", 13, "git-lfs never downloaded the file", "what-is-recognised"),
    "web-page": define_kind("web-page", 14, "a file is a web page: the download failed", "what-is-recognised"),
    "text": define_kind("text", 15, "a file is text: the download failed", "what-is-recognised"),
    "no-metadata": define_kind("no-metadata", 16, "a DCP folder has no `.metadata`", "what-is-recognised"),
    "missing": define_kind("missing", 17, "a file that others name is not there", "what-is-recognised"),
    "damaged": define_kind("damaged", 18, "a file cannot be read as what it is", "what-is-recognised"),
}
MISSING = FILE_KINDS["missing"]
CHECKSUM = define_kind("checksum", 19, "bytes do not have the CRC32 that the file carries", "what-is-recognised")
DIFFERS = define_kind("differs", 20, "not what was recorded when it was written", "what-is-recognised")
UNREADABLE = define_kind("unreadable", 210, "what stops a conversion, with its message", "what-is-recognised")
#: What is said of a checkpoint as a whole.
SALVAGED = define_kind("salvaged", 30, "this is a salvaged copy", "what-is-recognised")
LOST = define_kind("lost", 300, "how many tensors or values are lost", "what-is-recognised")
NOT_READ = define_kind("not-read", 310, "only a part was looked at", "what-is-whole-and-yet-does-not-load")


def make_file_finding(problem: Problem) -> Finding:
    """Convert a problem of a file, as `find_problems` in salvage.py returns it, to a finding of damage."""
    kind = FILE_KINDS[problem.kind]
    return Finding(kind, DAMAGE, problem.file, (), f"{problem.file} {problem.text}", problem.repair)


def make_refusal_finding(e: CkpttoolError) -> Finding:
    """Convert the error that was raised when the checkpoint was opened to a finding."""
    wrong = e.wrong_bytes if isinstance(e, Corrupt) else None
    return Finding(CHECKSUM if wrong else UNREADABLE, DAMAGE, wrong, (), str(e))


@check(DIFFERS, reads_data=True, needs_whole=True)
def compare_with_record(at: Examined) -> list[Finding]:
    """Compare the digests of tensors and values with those that ckpttool.json, or the checkpoint itself, has.

    Returns:
        One finding of damage if a digest differs; otherwise a finding for each note that the comparison makes.
    """
    out = VerifyResult(at.request.path, at.ckpt.layout, len(at.ckpt.tensors), at.ckpt.nbytes, "ok", 0, [])
    try:
        compare_recorded_digests(at.opened, at.digests or {}, out)
    except Differs as e:
        return [Finding(DIFFERS, DAMAGE, None, (), str(e))]
    return [Finding(DIFFERS, NOTE, RECORD, (), text) for text in out.notes]


@check(UNREADABLE)
def find_damaged_unread_files(at: Examined) -> list[Finding]:
    """Find damaged files that the layout has left out and that no other finding is about."""
    known = {f.file for f in at.found}
    return [
        Finding(UNREADABLE, DAMAGE, r.name, (), f"{r.name} {r.what}")
        for r in at.ckpt.unread
        if r.damaged and r.name not in known
    ]
