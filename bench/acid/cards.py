"""Runs every program of this folder over the kit, and writes the score cards into docs/explanation/acid-test.md.

    python bench/acid/cards.py [--json FILE] [--only NAME ...]

The scripts in reproductions/ are run, too, each in an empty folder with kit.tar.xz, and are put below, with what they print.
--json keeps what `ckpttool acid --json` prints of each. The page has the cards between two comments; the rest is not touched.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ckpttool.acid.scoring import FAILURES

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "explanation" / "acid-test.md"
BEGIN, END = "<!-- cards: python bench/acid/cards.py writes what follows -->", "<!-- end of cards -->"
ORDER = ("ckpttool", "torch_dcp", "torch_checkpointing", "accelerate", "lightning", "zero_to_fp32", "ds_to_universal", "transformers", "safetensors")  # fmt: skip
FAULTS = (
    "cut",
    "bit flip",
    "missing rank",
    "copied rank",
    "stale rank",
    "mixed steps",
    "tied and diverged",
    "malicious",
)
ABOUT = """Each script stands alone, or beside the kit, `kit.tar.xz`; `cards.py` ran them all, with the versions of the tables.

"""
GOLDEN = ("weights", "optimizer", "values", "list", "verify", "save")


def run(name: str) -> dict:
    """The card of a program, with how long it took."""
    began = time.monotonic()
    command = [sys.executable, "-m", "ckpttool", "acid", str(HERE / f"of_{name}.py"), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode not in (0, 5):
        raise SystemExit(f"{name}: exit code {done.returncode}")
    return json.loads(done.stdout) | {"seconds": time.monotonic() - began}


def share(verdicts: list[str]) -> str:
    """ "5 of 6", or a dash if there is nothing to judge."""
    return f"{verdicts.count('right')} of {len(verdicts)}" if verdicts else "–"


def shorten(reason: str) -> str:
    """The line of a message that names the error, without folders of this run."""
    lines = reason.splitlines()
    line = next((line for line in reversed(lines[1:]) if re.match(r"[\w.]*(Error|Exception)\b", line)), lines[0])
    return re.sub(r"(?<=['\" ])/\S*/case/", "", line)[:160]


def reproductions() -> str:
    """Every script of reproductions/, with what it prints when it is run now; lines that DeepSpeed prints are left out."""
    out = []
    for script in sorted((HERE / "reproductions").glob("*.py")):
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(HERE.parents[1] / "ckpttool" / "acid" / "kit.tar.xz", folder)
            done = subprocess.run([sys.executable, script], cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{script.name} failed:\n{done.stderr[-2000:]}")
        said = [
            s
            for s in done.stdout.splitlines()
            if not re.match(r"Processing|Parsing|Detected|Reconstructed|Convert|\*\*\*", s)
        ]
        title, _, code = script.read_text(encoding="utf-8").partition("\n")
        out.append(
            f"### {title.removeprefix('# ')}\n\n```py\n{code.strip()}\n```\n\nIt prints:\n\n```text\n"
            + "\n".join(said)
            + "\n```\n"
        )
        print(script.name, *said, sep="\n  ", file=sys.stderr, flush=True)
    return "\n".join(out)


def tables(cards: dict[str, dict]) -> str:
    """The two tables and the list of failures, in Markdown."""
    lines = ["", f"| whole checkpoints: right | {' | '.join(GOLDEN)} |", f"|---|{'---|' * len(GOLDEN)}"]
    for card in cards.values():
        rows = [r["verdicts"] for r in card["cases"] if r["kind"] == "golden"]
        versions = ", ".join(f"{k} {v}" for k, v in card["versions"].items())
        cells = [share([v[column] for v in rows if column in v]) for column in GOLDEN]
        lines.append(f"| {card['program']} ({versions}) | {' | '.join(cells)} |")
    lines += ["", f"| broken checkpoints: right | {' | '.join(FAULTS)} |", f"|---|{'---|' * len(FAULTS)}"]
    for card in cards.values():
        for function in ("load", "verify"):
            cells = []
            for fault in FAULTS:
                found = [r["verdicts"] for r in card["cases"] if r["fault"] == fault]
                cells.append(share([v[function] for v in found if v.get(function, "unproven") != "unproven"]))
            if set(cells) != {"–"}:
                lines.append(f"| {card['program']}, {function} | {' | '.join(cells)} |")
    lines.append("")
    for card in cards.values():
        found = [
            f"`{row['case']}` {column} {verdict}"
            + (f" ({shorten(row['reasons'][column])})" if verdict in ("wrong", "lost", "refused") else "")
            for row in card["cases"]
            for column, verdict in row["verdicts"].items()
            if verdict in FAILURES or (verdict == "refused" and column in row["reasons"])
        ]
        lines += [f"**{card['program']}**: " + ("; ".join(found) if found else "no failure") + ".", ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="+", choices=ORDER, default=ORDER)
    how = parser.parse_args()
    cards = {}
    for name in how.only:
        cards[name] = run(name)
        print(f"{name}: {cards[name]['seconds']:.0f} s", file=sys.stderr, flush=True)
    if how.json:
        how.json.write_text(json.dumps(cards, indent=1) + "\n")
    if how.only == ORDER:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        PAGE.write_text(
            before
            + BEGIN
            + "\n"
            + tables(cards)
            + "\n## Reproductions\n\n"
            + ABOUT
            + reproductions()
            + END
            + rest.partition(END)[2],
            encoding="utf-8",
        )
    else:
        print(tables(cards))


if __name__ == "__main__":
    main()
