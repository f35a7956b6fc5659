"""Build the site: `python docs/_build.py [FOLDER]`, which `make docs` runs.

FOLDER (an empty one; build/docs, which is made anew) gets everything that the generator reads, and the result in FOLDER/site:

mkdocs.yml   as it is here; the generator runs in FOLDER
docs/        the pages, with their marks replaced (docs/_hooks.py), and the pictures
README.md    of which index.md includes a table; examples/, of which pages include scripts, is a link
ckpttool/    links that make the package as it is installed, with converters/ inside, for the pages of the API; _keywords.py is for them, too

The generator sees only Markdown and mkdocs.yml. docs/explanation/reasons.md says why it is Zensical.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from _hooks import expand_marks

ROOT = Path(__file__).resolve().parents[1]
USUAL = ROOT / "build" / "docs"


def write_input(folder: Path) -> None:
    """Write what the generator reads into an empty folder."""
    (folder / "ckpttool").mkdir(parents=True)
    for path in (*(ROOT / "ckpttool").iterdir(), ROOT / "converters"):
        if not (folder / "ckpttool" / path.name).is_symlink():  # a checkout may have converters/ linked there already
            (folder / "ckpttool" / path.name).symlink_to(path)
    (folder / "examples").symlink_to(ROOT / "examples")
    for name in ("mkdocs.yml", "README.md", "docs/_keywords.py"):
        shutil.copy(ROOT / name, folder)
    for path in (p for p in (ROOT / "docs").rglob("*") if p.suffix in (".md", ".svg", ".css")):
        target = folder / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            target.write_text(expand_marks(path.read_text(encoding="utf-8")), encoding="utf-8")
        else:
            shutil.copy(path, target)


def main() -> int:
    """Build the site and say where it is."""
    folder = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else USUAL
    if folder == USUAL:
        shutil.rmtree(folder, ignore_errors=True)
    elif folder.exists() and any(folder.iterdir()):
        sys.exit(f"{folder} is not empty")
    write_input(folder)
    done = subprocess.run([sys.executable, "-m", "zensical", "build", "--strict"], cwd=folder, check=False)
    print(folder / "site" / "index.html" if done.returncode == 0 else "the site was not built", file=sys.stderr)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
