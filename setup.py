"""The build: pyproject.toml says everything but this, that the man page is made from the program's own help."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from setuptools import setup

from distutils.command.install_data import install_data  # isort: skip  (of setuptools)

ROOT = Path(__file__).resolve().parent
PAGE = ROOT / "build" / "ckpttool.1"


class InstallData(install_data):
    """Writes ckpttool.1 before it is put into the wheel."""

    def run(self) -> None:
        with tempfile.TemporaryDirectory() as folder:  # the package as it is installed: with converters/ inside
            installed = Path(folder, "ckpttool")
            installed.mkdir()
            for path in (*(ROOT / "ckpttool").iterdir(), ROOT / "converters"):
                (installed / path.name).symlink_to(path)
            done = subprocess.run(
                [sys.executable, "-m", "ckpttool.cli.man"],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([folder, *filter(None, sys.path)]), "COLUMNS": "80"},
                stdout=subprocess.PIPE,
                check=True,
                text=True,
            )
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(done.stdout)
        super().run()


setup(cmdclass={"install_data": InstallData}, data_files=[("share/man/man1", [str(PAGE.relative_to(ROOT))])])
