"""Names that control a terminal, forge lines or are HTML, in every place of a checkpoint, and every command on it.

Whatever is printed is searched for characters that do not print, on a pipe and on a pseudo-terminal, and for lines that a name has made;
JSON is read back and has the exact names. `outputs` are the commands; `case` draws names and some of the commands.
"""

from __future__ import annotations

import json
import os
import pty
import random
import re
import select
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from commands import ckpttool_here

__all__ = ["PIECES", "case", "commands", "faults_of", "made", "on_terminal", "run", "wrong"]

#: What a terminal, a reader of lines, HTML, Markdown, rich, a template or a metrics file could take for its own.
PIECES = (
    "\x1b]0;PWNED\x07", "\x1b[2J\x1b[31m", "\x9b31m", "\u202eevil\u202c", "\u2066x\u2069", "\u200f\u061c", "a\u200bb\u2028c\u2029d\x85",
    "\nerror: FORGED", "\r\nFORGED: ok", "\rFORGED", "x\x08\x08y", "\x7f", "\x00", "\t", "\ufeff", "\U000e0041", "\ue000",
    "<img src=x onerror=window.hacked=1>", "</pre><script>window.hacked=1</script>", "[x](javascript:alert(1))", "\n# FORGED\n| a |",
    "[bold red]m[/bold red]", "[link=file:///etc]l[/link]", "{{7*7}}", "${x}", '"} 1\nFORGED{a="', "größe", "日本語", "e\u0301", "\\x1b", "`x`", "$(id)",
)  # fmt: skip

#: Sequences that rich itself writes to a terminal: colours, cursor, erase; and its line ends.
_OF_RICH = re.compile(r"\x1b\[[0-9;?]*[ABCDGHJKhlmsu]|\x1b\]8;[^\x1b]*\x1b\\|\r")


def made(r: random.Random, folder: Path) -> list[str]:
    """Two training states, a model for from_pretrained and a store with an archive, full of such names; the names of the tensors."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "store").mkdir(parents=True)

    def name() -> str:
        return "".join(r.choice(PIECES) for _ in range(r.randint(1, 3)))

    names = [f"l.{i}.{name()}" for i in range(4)]
    texts = {f"v{i}{name()}": r.choice([name(), [name()], {name(): 3}]) for i in range(3)}
    weights = {n: torch.arange(6.0).reshape(3, 2) + 1 for n in names}
    slots = {
        n: {"step": torch.tensor(3.0), "exp_avg": w, "exp_avg_sq": w * w, f"s{name()}": w} for n, w in weights.items()
    }
    groups = [{"lr": 0.1, "params": names, "name": name(), f"k{name()}": name()}]
    state = {"model": weights, "optim": {"state": slots, "param_groups": groups}, "trainer": {"step": 3, **texts}}
    torch.save(state, folder / "a.pt")
    other = {n: w + 1 for n, w in list(weights.items())[1:]} | {f"z{name()}": torch.ones(2)}
    torch.save({"model": other, "trainer": {"step": 4, **{k: str(v) + "x" for k, v in texts.items()}}}, folder / "b.pt")
    torch.save({"model": {f"b{name()}": torch.ones(3, dtype=torch.int64), **weights}}, folder / "buffers.pt")
    file = re.sub("[/\0]", "", f"f{name()}")[:60]
    hidden = folder / re.sub("[/\0]", "", f"d{name()}")[:60]
    hidden.mkdir()
    shutil.copy(folder / "a.pt", hidden / f"{file}.pt")
    (hidden / f"{file}.bin").write_bytes(b"x" * 2000)
    config = {
        "architectures": [name()],
        "model_type": name(),
        "tie_word_embeddings": True,
        "_name_or_path": name(),
        name(): name(),
    }
    (hidden / "config.json").write_text(json.dumps(config))
    (folder / "damaged.pt").write_bytes((folder / "a.pt").read_bytes()[:-900])
    (folder / "bad.map").write_text(f"LEFT{name()} | RIGHT\nx{name()} y")
    return names


def commands(folder: Path, r: random.Random) -> list[list[Any]]:
    """Command lines about what `made` left."""
    hidden = next(p for p in sorted(folder.iterdir()) if p.name.startswith("d") and p.is_dir())
    file = next(p for p in sorted(hidden.iterdir()) if p.suffix == ".pt")
    a, b = folder / "a.pt", folder / "b.pt"
    evil = r.choice(PIECES).replace("\0", "") or "x"
    out = folder / f"out{r.random()}"
    lines = [
        ["inspect", a], ["inspect", a, "--tree"], ["inspect", a, "--json", "--tree"], ["inspect", a, "--tensor", "*"],
        ["inspect", a, "--tensor", evil], ["inspect", file], ["inspect", hidden], ["inspect", folder], ["inspect", f"{folder}/{evil}"],
        ["inspect", folder, "--latest"], ["verify", a, "--read-data"], ["verify", file, "--against", a], ["verify", a, "--against", b],
        ["doctor", a], ["doctor", a, "--read-data", "-v"], ["doctor", folder / "damaged.pt"], ["doctor", a, "--like", b], ["doctor", a, "--json"],
        ["digest", a], ["digest", a, "--tensors"], ["digest", a, "--tensors", "--json"], ["diff", a, b], ["diff", a, b, "--json"],
        ["diff", file, a], ["convert", a, out, "--to", "dcp", "-n", 2, "-v"], ["convert", a, out, "--to", "hf", "-v"],
        ["convert", file, out, "--to", "hf", "--drop", "-v"], ["convert", folder / "buffers.pt", out, "--to", "zero3", "-n", 2, "--drop", "-v"],
        ["convert", a, out, "--to", "zero3", "-n", 2, "--drop"], ["convert", a, out, "--to", "universal", "--drop", "-v"],
        ["convert", a, out, "--to", "fsdp1", "-n", 2, "--drop", "-v"], ["convert", a, f"{out}.pt", "--cast", f"{evil}=bf16"],
        ["convert", a, f"{out}.pt", "--map", folder / "bad.map"], ["convert", a, f"{out}.pt", "--map", evil], ["convert", a, b],
        ["convert", a, f"{out}{evil.replace('/', '')}.pt"], ["convert", a, out, "--to", evil], ["convert", a, out, "--dry-run", "--to", "dcp", "-n", 2],
        ["convert", folder / "damaged.pt", f"{out}.pt", "--salvage"], ["convert", a, f"{out}.pt", "--only", evil], ["convert", a, f"{out}.pt", f"--{evil}"],
        ["audit", "export", a, folder / "store" / f"{r.random()}.tar.zst", "--meta", f"k={evil}"], ["audit", "list", folder / "store"],
        ["audit", "list", folder / "store", "--json"], ["audit", "ledger", "show", folder / "store"], ["audit", "ledger", "verify", folder / "store"],
        ["audit", "verify", folder / "store" / evil.replace("/", "")], ["audit", "prune", folder / "store", "--keep-last", 1, "--dry-run"],
        ["clean", folder], ["clean", hidden], ["layouts", evil], [evil], ["maps", evil], ["maps", evil, "--derive", evil], ["explain", evil], ["explain", evil, "--json"], ["acid", evil], ["acid", a, "--kit", evil], ["adapter", "extract", a, out], ["adapter", "merge", a, b, out],
        ["push", a, f"hf://x/ {evil}", "--dry-run"], ["pull", f"hf://x/ {evil}", out],
        ["ls", folder], ["ls", hidden, "--json"], ["prune", folder, "--keep-last", 1], ["prune", folder, "--keep-best", f"{evil}:{evil}"],
        ["inspect", a, "--fold"], ["inspect", a, "--html", f"{out}.html", "--stats", "--against", b], ["diff", a, b, "--sort", "moved", "--fold", "--top", 3],
        ["show", a, "*"], ["show", a, evil], ["show", a, f"{evil}[0]", "--json"], ["stats", a], ["stats", a, "--each", "--csv"], ["stats", a, "--json"],
        ["stats", b, "--against", a, "--sort", evil], ["average", a, b, out, "--to", "hf", "--drop", "-v"], ["compare", a, b, "--config", hidden],
        ["delta", a, b, f"{out}.tar.zst"], ["convert", a, f"{out}.pt", "--apply", b], ["convert", a, f"{out}.pt", "--apply", evil],
        ["watch", folder, "--once", "--settle", 0, "--state", f"{out}.state", "--accept", evil], ["watch", hidden, "--once", "--settle", 0, "--state", f"{out}.hidden", "--json"],
        ["convert", a, f"{out}.plan", "--to", "dcp", "-n", 2, "--dry-run", "--plan", f"{out}.json"], ["apply", f"{out}.json"], ["apply", evil],
        ["resume-verify", a, "--against", b, "--config", hidden], ["resume-verify", a, "--against", b, "--job", f"{evil}.py:f"],
    ]  # fmt: skip
    return [words for words in lines if not any("\0" in str(w) for w in words)]  # which no shell can pass


def faults_of(printed: str, terminal: bool = False, quotes: bool = False) -> list[str]:
    """Characters that do not print, lines that a name has made, and faults of ours; with `quotes`, the text may quote
    messages of faults, as `explain` does."""
    text = _OF_RICH.sub("", printed) if terminal else printed
    out = [
        f"{c!a} in {text[max(0, i - 40) : i + 20]!a}" for i, c in enumerate(text) if not c.isprintable() and c != "\n"
    ]
    if "Traceback" in text or ("bug of ckpttool" in text and not quotes):
        out.append(f"a fault of ours: {text[-600:]!a}")
    if terminal:  # its lines are as wide as it is, and a word of a name may begin one
        return out[:5]
    out += [f"a line of a name: {line!a}" for line in text.split("\n") if re.match(r"\s*(error: |# )?FORGED", line)]
    return out[:5]


def on_terminal(words: Sequence[Any], seconds: float = 60) -> str:
    """What a command writes to a terminal 200 columns wide."""
    pid, fd = pty.fork()
    if pid == 0:
        os.environ.update(COLUMNS="200", TERM="xterm-256color")
        os.execv(sys.executable, [sys.executable, "-m", "ckpttool", *map(str, words)])
    out, end = b"", time.monotonic() + seconds
    while time.monotonic() < end:
        if select.select([fd], [], [], 1)[0]:
            try:
                piece = os.read(fd, 1 << 16)
            except OSError:  # its end, on Linux
                break
            if not piece:
                break
            out += piece
    os.close(fd)
    os.waitpid(pid, 0)
    return out.decode(errors="backslashreplace")


def _json_faults(words: Sequence[Any], printed: str, names: Sequence[str]) -> Iterator[str]:
    """JSON that is none, or that has other names of tensors."""
    try:
        found, *_ = map(
            json.loads, printed.splitlines() if words[0] == "watch" else [printed]
        )  # watch: a line for each event
    except ValueError as e:
        yield f"no JSON: {e}"
        return
    listed = found.get("names") if words[0] == "inspect" else found.get("tensors") if words[0] == "digest" else None
    if listed is not None and not {f"model.{n}" for n in names} <= set(listed):
        yield f"other names: {sorted(listed)[:3]!a}"


def wrong(words: Sequence[Any], names: Sequence[str]) -> list[str]:
    """What a command prints on a pipe that it should not."""
    done = ckpttool_here(*words)
    found = faults_of(done.stdout, quotes=words[0] == "explain") + faults_of(done.stderr)
    return [*found, *(_json_faults(words, done.stdout, names) if "--json" in words else ())]


def case(number: int, work: Path, most: int = 6) -> dict[str, Any]:
    """Names of their own, and `most` of the commands: all but one on a pipe."""
    r = random.Random(number)
    names = made(r, work)
    lines = r.sample(commands(work, r), most)
    why = ""
    for k, words in enumerate(lines):
        quotes = words[0] == "explain"
        found = faults_of(on_terminal(words), terminal=True, quotes=quotes) if k == 0 else wrong(words, names)
        if found:
            why = f"{' '.join(map(str, words))!a}: {found}"
            break
    shutil.rmtree(work, ignore_errors=True)
    return {
        "id": f"terminal:names:{number}",
        "status": "raw" if why else "printable",
        "why": why,
        "commands": len(lines),
    }


def run(lab: Any, until: float, log: Path, part: int, parts: int, most: int, first: int) -> None:
    """Every `parts`-th case from number `first` on, into `log`, until a time or a number of them."""
    with log.open("a") as f:
        for number in range(first + part, first + part + parts * most, parts):
            if time.time() > until:
                return
            done = case(number, lab.out.parent / f"terminal{part}")
            f.write(
                json.dumps({**done, "bad": bool(done["why"]), "said": done["why"][:300], "detail": done["why"]}) + "\n"
            )
            f.flush()
