"""python -m tests.torture.deletions: every line of a writer that stores something is deleted, one at a time, and somebody must notice.

A line that stores is an assignment to an item, `|=` and `+=`, and a call of append, extend, update or add. Without it, conversions of
several states either fail, by the law or by the reader, or give the same files as before: then the line stored nothing that these states
have. Where a conversion succeeds and gives other files, the tests of that writer are run without the line; it survives if they pass.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib.abc
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
#: {module of a writer: layouts that it takes part in}
WRITERS: dict[str, tuple[str, ...]] = {
    "converters/dcp/write_dcp.py": ("dcp",),
    "converters/full.py": ("full",),
    "converters/torch_checkpointing/write_items.py": ("torch_checkpointing",),
    "converters/deepspeed/write_common.py": ("zero3", "zero1", "universal"),
    "converters/deepspeed/write_zero.py": ("zero3", "zero2"),
    "converters/deepspeed/write_universal.py": ("universal",),
    "converters/fsdp1/write.py": ("fsdp1",),
    "converters/hf/write_hf.py": ("hf",),
    "converters/hf/training_state.py": ("hf",),
    "converters/trainers/write_directories.py": ("trainer", "accelerate", "lightning", "torchtitan"),
    "converters/trainers/join.py": ("trainer", "accelerate", "lightning"),
    "converters/megatron/write.py": ("megatron",),
    "converters/audit.py": ("audit",),
    "ckpttool/engine/flat/split_state.py": ("zero3", "fsdp1", "universal"),
}
#: {module of a writer: tests of what it writes that no reader of ckpttool looks at, which engines and trainers do}
TESTS: dict[str, tuple[str, ...]] = {
    "converters/torch_checkpointing/write_items.py": ("tests/converters/test_torch_checkpointing.py",),
    "converters/deepspeed/write_zero.py": ("tests/converters/test_zero.py",),
    "converters/deepspeed/write_universal.py": (
        "tests/converters/test_zero.py",
        "tests/converters/test_universal_amsgrad.py",
    ),
    "converters/fsdp1/write.py": ("tests/converters/test_fsdp1.py",),
    "converters/trainers/write_directories.py": (
        "tests/converters/test_trainers.py",
        "tests/converters/test_trainer_directories.py",
    ),
    "converters/megatron/write.py": ("tests/converters/test_megatron.py", "tests/converters/test_megatron_ranks.py"),
}
_DELETED = "CKPTTOOL_DELETED"  # FILE:LINE, of a run of pytest that has this module as a plugin
_STORING = ("append", "extend", "update", "add", "setdefault")
_SOURCES = ("source.pt", "groups.pt", "bare.pt")


def storing_lines(text: str) -> list[int]:
    """First lines of the statements that store something, inside functions whose names do not speak of reading."""
    found: list[int] = []
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, ast.FunctionDef) or function.name.startswith(
            ("read", "_read", "detect", "_agree", "_index")
        ):
            continue
        for x in ast.walk(function):
            to_item = isinstance(x, ast.Assign) and any(isinstance(t, ast.Subscript) for t in x.targets)
            call = x.value if isinstance(x, ast.Expr) and isinstance(x.value, ast.Call) else None
            method = call is not None and isinstance(call.func, ast.Attribute) and call.func.attr in _STORING
            if to_item or isinstance(x, ast.AugAssign) or method:
                found.append(x.lineno)
    return sorted(set(found))


def without(text: str, line: int) -> str:
    """The module with `pass` for the statement that begins at a line."""

    class Delete(ast.NodeTransformer):
        def generic_visit(self, node: ast.AST) -> Any:
            if (
                isinstance(node, ast.stmt)
                and node.lineno == line
                and not isinstance(node, (ast.If, ast.For, ast.FunctionDef, ast.With))
            ):
                return ast.copy_location(ast.Pass(), node)
            return super().generic_visit(node)

    return ast.unparse(ast.fix_missing_locations(Delete().visit(ast.parse(text))))


class _Patched(importlib.abc.MetaPathFinder, importlib.abc.SourceLoader):
    """Imports one module from other text."""

    def __init__(self, file: Path, text: str) -> None:
        self.file, self.text = file, text

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.rpartition(".")[2] != self.file.stem or not name.startswith("ckpttool."):
            return None
        return importlib.util.spec_from_file_location(name, self.file, loader=self)

    def get_data(self, path: Any) -> bytes:
        return self.text.encode() if str(path) == str(self.file) else b""

    def get_filename(self, fullname: str) -> str:
        return str(self.file)

    def path_stats(self, path: Any) -> Any:
        raise OSError


def failing_test(file: str, line: int) -> str:
    """The first test of a writer that fails without a statement; empty if all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "--tb=no", "-p", __spec__.name, *TESTS[file]]
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env={**os.environ, _DELETED: f"{file}:{line}"},
        capture_output=True,
        text=True,
        check=False,
    )
    return next((x for x in done.stdout.splitlines() if x.startswith(("FAILED", "ERROR"))), "")


if _DELETED in os.environ:
    _file, _, _line = os.environ[_DELETED].rpartition(":")
    _text = (REPOSITORY / _file).read_text()
    sys.meta_path.insert(0, _Patched(REPOSITORY / _file, without(_text, int(_line))))


def results(work: Path, sources: Path, targets: tuple[str, ...]) -> dict[str, str]:
    """{conversion: digest of all files, or the error that refused it}."""
    from . import conserved

    out: dict[str, str] = {}
    work.mkdir()
    for to in targets:
        for name in _SOURCES:
            where = work / f"{to}-{Path(name).stem}{conserved.SUFFIX.get(to, '')}"
            try:
                conserved.converted(sources / name, where, to, 2)
                wrong = conserved.unaccounted(
                    sources / name, where, conserved.converted(sources / name, work / f"again{where.name}", to, 2)
                )
                out[f"{to} {name}"] = f"error: {wrong[0]}" if wrong else _digest(where)
            except Exception as e:
                out[f"{to} {name}"] = f"error: {type(e).__name__}: {str(e)[:200]}"
    return out


def _digest(path: Path) -> str:
    """Of the names and bytes of all files, but for the time in a record."""
    h = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            data = file.read_bytes()
            if file.name == "ckpttool.json":
                data = json.dumps({**json.loads(data), "created": 0}).encode()
            h.update(f"{file.relative_to(path)} {len(data)}\n".encode() + data)
    return h.hexdigest()


def make_sources(folder: Path) -> None:
    """States that have something for every line: groups that a Megatron job has, several groups, no optimizer; random states, scheduler,
    extra states, tied and frozen weights, buffers."""
    import torch

    from . import conserved

    torch.manual_seed(7)
    names = {"emb.weight": (7, 3), "w.weight": (3, 5), "w.bias": (5,)}
    model: dict[str, Any] = {n: torch.randn(s) for n, s in names.items()}
    model |= {"frozen.weight": torch.randn(4, 4), "counts": torch.arange(3), "mask": torch.tensor([True, False])}
    model["tied.weight"] = model["emb.weight"]
    model["w._extra_state"] = {"recipe": "delayed", "amax": [1.0, 2.0], "history": torch.ones(2)}
    slots = {
        n: {"exp_avg": torch.randn(s), "exp_avg_sq": torch.rand(s), "step": torch.tensor(3.0)} for n, s in names.items()
    }
    rest = {
        "scheduler": {"last_epoch": 3, "base_lrs": [0.1]}, "step": 3, "epoch": 1, "rng": {"0": {"torch": torch.arange(9, dtype=torch.uint8)}},
        "args": {"lr": 0.1, "flags": [True, -0.0]}, "scaler": {"scale": 2.0, "_growth_tracker": 1}, "weights": torch.ones(2),
        "dataloader": {"sampler": {"seed": 3}}, "counted": {3: 1},
    }  # fmt: skip
    one = [{"lr": 0.1, "betas": (0.9, 0.999), "weight_decay": 0.0, "params": list(names)}]
    two = [
        {**one[0], "params": ["emb.weight"]},
        {**one[0], "lr": 0.2, "weight_decay": 0.1, "params": ["w.weight", "w.bias"]},
    ]
    torch.save({"model": model, "optim": {"state": slots, "param_groups": one}, **rest}, folder / "source.pt")
    torch.save({"model": model, "optim": {"state": slots, "param_groups": two}, **rest}, folder / "groups.pt")
    torch.save({"model": model, **rest}, folder / "bare.pt")
    assert conserved.WRITTEN


def judged(file: str, line: int, text: str, sources: Path, baseline: dict[str, str], work: Path) -> tuple[str, str]:
    """("refused", "same files" or "survived", by what) of a module without one statement; in a forked child."""
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        verdict = ("refused", "does not import")
        try:
            for name in [n for n in sys.modules if n.startswith(("ckpttool", "tests.torture"))]:
                del sys.modules[name]
            sys.meta_path.insert(0, _Patched(REPOSITORY / file, text))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = results(work, sources, WRITERS[file])
            odd = {k: v for k, v in found.items() if v != baseline[k]}
            quiet = {k: v for k, v in odd.items() if not v.startswith("error")}
            verdict = (
                ("survived", json.dumps(quiet))
                if quiet
                else ("refused", next(iter(odd.values())))
                if odd
                else ("same files", "")
            )
        except Exception:
            verdict = ("refused", traceback.format_exc(limit=-1))
        finally:
            os.write(writer, json.dumps(verdict).encode()[:4000])
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as f:
        said = f.read()
    os.waitpid(pid, 0)
    verdict = json.loads(said)
    return verdict[0], verdict[1]


def main() -> int:
    """All deletions; the exit status is 1 if one survived."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="*", default=list(WRITERS))
    work = Path(tempfile.mkdtemp(prefix="ckpttool-deletions-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    counts: Counter[tuple[str, str]] = Counter()
    try:
        make_sources(work)
        for file in parser.parse_args().modules:
            baseline = results(work / "baseline", work, WRITERS[file])
            text = (REPOSITORY / file).read_text()
            for line in storing_lines(text):
                kind, why = judged(file, line, without(text, line), work, baseline, work / "mutant")
                if kind == "survived" and (test := failing_test(file, line)):
                    kind, why = "failing test", test
                counts[file, kind] += 1
                if kind != "refused":
                    print(f"{kind}: {file}:{line}: {text.splitlines()[line - 1].strip()[:90]} {why[:160]}", flush=True)
                shutil.rmtree(work / "mutant", ignore_errors=True)
            shutil.rmtree(work / "baseline", ignore_errors=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    for file in dict.fromkeys(f for f, _ in counts):
        print(
            f"| {file} | {counts[file, 'refused']} | {counts[file, 'failing test']} | {counts[file, 'same files']} | {counts[file, 'survived']} |"
        )
    return int(any(kind == "survived" for _, kind in counts))


if __name__ == "__main__":
    raise SystemExit(main())
