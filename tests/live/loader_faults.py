"""Faults of ckpttool's own loader, one at a time, and who finds them.

    python tests/live/loader_faults.py [NAME...]       # about 10 s a fault on two cores

Each fault is a change of a line of ckpttool/live, made in a copy of the package whose loader no longer compares its own work
with the files. `ckpttool resume-verify` of that copy resumes a checkpoint of tests/live/witness_job.py against itself: the
reference is loaded by torch, so whatever the loader does wrong to the candidate differs from it. A fault is found if the exit code
is 10 or 12, or the load fails; a run without a fault has to pass. tests/resume/test_witness.py runs the first ones of the round.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[2]
JOB = REPOSITORY / "tests" / "live" / "witness_job.py"


class Fault(NamedTuple):
    """A line of a module of ckpttool/live, and what it becomes."""

    module: str
    line: str
    instead: str


#: The loader's own comparison at its end, which every copy lacks.
BLIND = Fault("live_job", "next(filter(None, self._iterate_differences()), None)", "None")

FAULTS = {
    # values
    "keys of a schedule stay text": Fault("live_values", "keys = _match_keys(stored, live)", "keys = {k: str(k) for k in stored}"),
    "a list of the live object is kept": Fault("live_values", "        return _make_container_like(live, items)\n    if isinstance(live, torch.Tensor):", "        return live\n    if isinstance(live, torch.Tensor):"),
    "the job's own scheduler state stays": Fault("live_job", "self._scheduler_state = fit_to_live(tree, live)", "self._scheduler_state = live"),
    "the scheduler is not loaded": Fault("live_job", "self._load_scheduler(self._scheduler_state)", "pass"),
    "extra states are not loaded": Fault("live_job", "**self._extra_state}\n        if state:", "}\n        if state:"),
    "tensors of extra states are the job's": Fault("live_job", "set_value_at(tree, path, fit_to_live(found[names[name]], x))", "isinstance(x, torch.Tensor) or set_value_at(tree, path, fit_to_live(found[names[name]], x))"),
    "numbers of extra states are the job's": Fault("live_job", "set_value_at(tree, path, fit_to_live(found[names[name]], x))", "type(x) is int or set_value_at(tree, path, fit_to_live(found[names[name]], x))"),
    # param groups
    "counters of groups count one step more": Fault("live_job", "        self._load_unfilled_state()\n", "        self._load_unfilled_state()\n        for o in self.optimizers:\n            for g in o.param_groups:\n                g['k'] += 1\n"),
    "options are not loaded": Fault("job_optimizers", "    for k, x in want.items():\n        held", "    for k, x in ():\n        held"),
    "only learning rates are loaded": Fault("job_optimizers", "for k, x in select_loaded_options(stored).items()}", "for k, x in select_loaded_options(stored).items() if k == 'lr'}"),
    "learning rates are not loaded": Fault("job_optimizers", 'and k not in ("params", "param_names")', 'and k not in ("params", "param_names", "lr")'),
    "groups get the options of each other": Fault("live_job", "leaves.setdefault(int(path[2]), {})", "leaves.setdefault(int(path[2]) if path[3] == 'params' else 1 - int(path[2]), {})"),
    "weight decay is the job's": Fault("job_optimizers", 'and k not in ("params", "param_names")', 'and k not in ("params", "param_names", "weight_sum")'),
    "zero options are left out": Fault("job_optimizers", "want = {k: fit_to_live(x, group.get(k)) for", "want = {k: fit_to_live(x, group.get(k) or 0.5) if x else 0.5 for"),
    # the optimizer's state
    "moments of a list are exchanged": Fault("live_job", "self._leaves[fqn] = {name: (path, x) for name, path, x in found}", "self._leaves[fqn] = {{'moments.0': 'moments.1', 'moments.1': 'moments.0'}.get(name, name): (path, x) for name, path, x in found}"),
    "numbers of the state are not set": Fault("live_job", "                    set_value_at(state, path, want)\n", "                    pass\n"),
    "steps are one higher": Fault("reader", "        torch.autograd.graph.increment_version(", "        for t in written:\n            if t.dtype == torch.float32 and not t.dim():\n                t.add_(1)\n        torch.autograd.graph.increment_version("),
    "numbers are one lower": Fault("torch_reader", "return type(held)(x) if", "return type(held)(x - 1) if"),
    "vectors have no state": Fault("live_job", "                if fqn in state:\n                    used.add(fqn)", "                if fqn in state and (p.dim() > 1 or used.add(fqn)):\n                    used.add(fqn)"),
    # bytes of tensors
    "shards begin at the first row": Fault("reader", "inside = sum((a - b)", "inside = 0 if len(w.start) == 2 else sum((a - b)"),
    "shards begin one element on": Fault("reader", "inside = sum((a - b) * s for a, b, s in zip(both[0], chunk.start, steps, strict=True))", "inside = sum((a - b) * s for a, b, s in zip(both[0], chunk.start, steps, strict=True)) + (both[0] == (8,) and both[1] == (4,))"),
    "the last chunk is left out": Fault("reader", "for k in self.chunk_rows(w.name, w.start, w.shape):", "for k in self.chunk_rows(w.name, w.start, w.shape)[: 1 if len(w.shape) == 1 else None]:"),
    "bool buffers are as the job had them": Fault("reader", "                if both is None:", "                if both is None or entry.dtype == 'bool' and target.zero_() is not None:"),
    "integers are not read": Fault("reader", "                if both is None:", "                if both is None or entry.dtype == 'int64':"),
    "runs of one file are read twice": Fault("scatter", "views.append(memoryview(bytearray(p.offset - end)))", "views.append(memoryview(bytearray(p.offset - end + 4)))"),
    "weights are read as if little were big": Fault("reader", "        torch.autograd.graph.increment_version(", "        for t in written:\n            if t.dtype == torch.float32 and t.dim() == 1 and t.numel() == 12:\n                t.copy_(t.flip(0))\n        torch.autograd.graph.increment_version("),
    "a frozen matrix is the job's": Fault("live_job", "            model[fqn] = t\n        if self.other:", "            if 'frozen' not in fqn:\n                model[fqn] = t\n        if self.other:"),
    "names fall on their neighbours": Fault("live_job", "        self.wanted[\"model\"] = model\n        return problems", "        if 'layers.0.inner.bias' in model:\n            model['layers.0.inner.bias'], model['layers.1.inner.bias'] = model['layers.1.inner.bias'], model['layers.0.inner.bias']\n        self.wanted[\"model\"] = model\n        return problems"),
}  # fmt: skip


def copy_with(folder: Path, *faults: Fault) -> Path:
    """A copy of the package in `folder` that has these faults; returns what PYTHONPATH has to have."""
    package = folder / "ckpttool"
    shutil.copytree(REPOSITORY / "ckpttool", package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(REPOSITORY / "converters", package / "converters", ignore=shutil.ignore_patterns("__pycache__"))
    for fault in faults:
        module = package / "live" / f"{fault.module}.py"
        text = module.read_text(encoding="utf-8")
        assert text.count(fault.line) == 1, f"{fault.module} has {text.count(fault.line)} times {fault.line!r}"
        module.write_text(text.replace(fault.line, fault.instead), encoding="utf-8")
    return folder


def save_checkpoint(folder: Path) -> Path:
    """A checkpoint of the job, saved by three ranks."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", str(JOB), "--out", str(folder)]
    where = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False, env=where)
    assert (folder / "done").exists(), done.stderr[-4000:]
    return folder / "dcp"


def resume(checkpoint: Path, path: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """The command of the package that PYTHONPATH has."""
    command = [
        "-c", "from ckpttool.__main__ import main; main()", "resume-verify", str(checkpoint), "--against", str(checkpoint),
        "--job", f"{JOB}:build", "-n", "2", "--steps", "2", "--global-batch", "12", "--micro-batch", "2", "--no-round-trip", *more,
    ]  # fmt: skip
    where = {**os.environ, "PYTHONPATH": str(path), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-P", *command], capture_output=True, text=True, check=False, env=where)


def main(names: list[str]) -> int:
    """Run the faults of these names, or all; the exit status is how many were not found."""
    missed = []
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = save_checkpoint(Path(folder) / "job")
        chosen = {n: f for n, f in FAULTS.items() if not names or n in names}
        for k, (name, fault) in enumerate({"none": None, **chosen}.items()):
            path = copy_with(Path(folder) / str(k), BLIND, *([fault] if fault else ()))
            done = resume(checkpoint, path)
            found = done.returncode in (10, 12)
            if found != (fault is not None):
                missed.append(name)
            said = [line for line in done.stdout.splitlines() if "cause" in line.lower() or "FAIL" in line] or (
                done.stderr or done.stdout
            ).splitlines()[-1:]
            print(
                f"{'found ' if found else 'passed'} {done.returncode:3} {name}: {said[0].strip()[:150] if said else ''}",
                flush=True,
            )
            shutil.rmtree(path)
    print(f"{len(chosen) + 1 - len(missed)} of {len(chosen) + 1} as they should be; not: {', '.join(missed) or 'none'}")
    return len(missed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
