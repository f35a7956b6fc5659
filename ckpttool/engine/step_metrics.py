"""A number of each step of a run that says how good it is: for `prune --keep-best FILE:KEY`.

FILE is JSON in the folder of each step (`trainer_state.json`, `eval/metrics.json`). Where no step has such a file, it
is one of the run: JSON, or a JSON object a line with the step in "step", "global_step" or "iteration".

KEY is a path with dots: `eval.loss` is {"eval": {"loss": 0.3}}, or a key with that name. In a list of objects that hold
a step it is the one of the same step: `log_history.eval_loss` of Hugging Face's trainer_state.json.

A number that is not unique, or is NaN or infinite, is refused: a wrong guess deletes the best step.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from math import isfinite

from ..bounded_json import parse
from ..errors import CkpttoolError, UsageError, argument
from ..storage.source import Source
from ..storage.sources import open_source

__all__ = ["find_best_steps", "read_metrics"]

_MOST_BYTES = 32 << 20  # of a JSON file
_MOST_LINE = 16 << 20  # bytes of a line of a log
_BLOCK = 1 << 20
_STEP_KEYS = ("step", "global_step", "iteration")


def read_metrics(source: Source, where: str, steps: Mapping[str, int], by_epoch: bool = False) -> dict[str, float]:
    """Read a number for each step of a run, such as an evaluation loss.

    Args:
        source: opened at the run.
        where: "FILE:KEY", as the module describes it.
        steps: {path of a step, a folder or file of the source: its step}.
        by_epoch: whether the steps are epochs, which the file has under "epoch".

    Returns:
        {path of a step: its number}; steps without one are left out.

    Raises:
        UsageError: there is no such file or number, something else than a finite number is there, or a step has
            several.
        CkpttoolError: a file cannot be read.
    """
    file, colon, key = where.rpartition(":")
    if not colon or not file or not key:
        raise UsageError(
            f"{argument('keep_best')} {where!r}: write FILE:KEY, as trainer_state.json:best_metric.", code="CKPT0203"
        )
    step_keys = ("epoch",) if by_epoch else _STEP_KEYS
    held = {path: f"{path}/{file}" for path in steps if not os.path.isabs(file) and source.exists(f"{path}/{file}")}
    found: dict[str, list[float]] = {}
    for path, name in held.items():
        data = parse(source.read_all(name, _MOST_BYTES), name)
        found[path] = list(_find_numbers(data, key, steps[path], step_keys, name))
    if not held:
        of_step: dict[int, list[str]] = {}
        for path, number in steps.items():
            of_step.setdefault(number, []).append(path)
        for number, value in _read_run_log(source, file, key, of_step, step_keys):
            for path in of_step[number]:
                found.setdefault(path, []).append(value)
    for path, values in found.items():
        if len(set(values)) > 1:
            raise UsageError(
                f"{argument('keep_best')} {where}: {path} has several numbers: {', '.join(map(str, values[:4]))}. Give "
                "a file and a key that have one for each step.",
                code="CKPT0225",
            )
    out = {path: values[0] for path, values in found.items() if values}
    if not out:
        raise UsageError(
            f"{argument('keep_best')} {where}: {f'{len(held)} steps have {file}' if held else f'the run has {file}'}, "
            f"and none has a number at {key!r} for a step.",
            code="CKPT0225",
        )
    return out


def _read_run_log(
    source: Source, file: str, key: str, steps: Iterable[int], step_keys: tuple[str, ...]
) -> Iterator[tuple[int, float]]:
    """Yield (step, number) for the given steps from one file in which a trainer logs all steps of the run.

    Args:
        source: the folder of the run.
        file: path of the file, absolute or relative to the run.
        key: key of the number, dotted for nested objects.
        steps: the wanted steps.
        step_keys: keys under which an object of the file may have its step; the first that has an integer counts.

    Raises:
        UsageError: there is no such file, or a line of it is too long. Corrupt: it is neither JSON nor JSON objects,
            one a line.
    """
    if os.path.isabs(file):
        folder, file = os.path.split(file)
        with open_source(folder) as elsewhere:
            yield from _read_run_log(elsewhere, file, key, steps, step_keys)
        return
    if not source.exists(file):
        raise UsageError(
            f"{argument('keep_best')}: no step has a file {file}, and {source.root} has none.", code="CKPT0212"
        )
    wanted = set(steps)
    for n, (line, ended) in enumerate(_read_lines(source, file), 1):
        try:
            data = parse(line, f"{file}, line {n}")
        except CkpttoolError:
            if not ended and n > 1:  # it is being written
                return
            if n > 1:
                raise
            yield from _find_listed_numbers(
                parse(source.read_all(file, _MOST_BYTES), file), key, wanted, step_keys, file
            )
            return  # JSON on several lines
        for entry in data if isinstance(data, list) else [data]:
            if (number := _get_step(entry, step_keys)) in wanted:
                yield from ((number, x) for x in _find_numbers(entry, key, number, step_keys, file))
        if n == 1:
            yield from _find_listed_numbers(data, key, wanted, step_keys, file)


def _find_listed_numbers(
    data: object, key: str, wanted: Iterable[int], step_keys: tuple[str, ...], file: str
) -> Iterator[tuple[int, float]]:
    """Yield (step, number) for the wanted steps, from lists in JSON data whose objects name their step.

    Args:
        data: the parsed JSON.
        key: key of the number, dotted for nested objects.
        step_keys: keys under which an object may have its step; the first that has an integer counts.
        file: names the file in errors.
    """
    for number in sorted(wanted):
        yield from ((number, x) for x in _find_numbers(data, key, number, step_keys, file, only_lists=True))


def _read_lines(source: Source, file: str) -> Iterator[tuple[bytes, bool]]:
    """Yield (line, whether the end of a line is behind it) of the lines of a file that are not empty.

    Raises:
        UsageError: a line has more than `_MOST_LINE` bytes.
    """
    size, left = source.size(file), b""
    for at in range(0, size, _BLOCK):
        *lines, left = (left + source.read(file, at, min(_BLOCK, size - at))).split(b"\n")
        yield from ((line, True) for line in lines if line.strip())
        if len(left) > _MOST_LINE:
            raise UsageError(
                f"{argument('keep_best')}: a line of {file} has more than {_MOST_LINE:,} bytes. Give a file "
                "with a JSON object a line.",
                code="CKPT0212",
            )
    if left.strip():
        yield left, False


def _get_step(entry: object, step_keys: tuple[str, ...]) -> int | None:
    """Return the step in a JSON object, under the first of `step_keys` that has an integer; None if there is none."""
    if not isinstance(entry, dict):
        return None
    return next((int(entry[k]) for k in step_keys if isinstance(entry.get(k), int | float) and entry[k] % 1 == 0), None)


def _find_numbers(
    data: object, key: str, step: int, step_keys: tuple[str, ...], file: str, only_lists: bool = False
) -> Iterator[float]:
    """Yield the numbers at a dotted key in JSON data; in a list, those of the objects of this step. A null is skipped.

    Args:
        step_keys: keys under which an object may have its step; the first that has an integer counts.
        file: names the file in errors.
        only_lists: yield only numbers in lists, since the data outside of them is not of one step.

    Raises:
        UsageError: there is something else than a finite number at the key.
    """
    if isinstance(data, list):
        for entry in data:
            if _get_step(entry, step_keys) == step:
                yield from _find_numbers(entry, key, step, step_keys, file)
        return
    if not isinstance(data, dict):
        return
    parts = key.split(".")
    for n in range(len(parts), 0, -1):
        if (head := ".".join(parts[:n])) not in data:
            continue
        if n < len(parts):
            yield from _find_numbers(data[head], ".".join(parts[n:]), step, step_keys, file, only_lists)
        elif not only_lists and (value := data[head]) is not None:
            if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
                raise UsageError(
                    f"{argument('keep_best')}: {file} has {value!r:.60} at {key!r} for step {step}, which cannot be "
                    "compared. Give a key whose numbers are finite, or leave the option out.",
                    code="CKPT0225",
                )
            yield float(value)


def find_best_steps(
    values: Mapping[str, float], steps: Mapping[str, int], key: str, mode: str | None
) -> dict[str, str]:
    """Return {path of the best step: why it is the best}; of equal numbers, the earliest step is taken.

    Args:
        values: {path: number}, as `read_metrics` returns them.
        steps: {path: its step}.
        key: name of the number, for the text; if it contains "loss", "perplexity" or "ppl" and `mode` is None, small is
            good.
        mode: "min" or "max"; None to infer it from `key`, or to return both ends if that does not tell.
    """
    if mode is None and any(word in key.lower() for word in ("loss", "perplexity", "ppl")):
        mode = "min"
    out: dict[str, str] = {}
    for end, sign, word in (("min", 1, "smallest"), ("max", -1, "largest")):
        if mode in (None, end) and values:
            best = min(values, key=lambda path: (sign * values[path], steps[path], path))
            out.setdefault(best, f"{key} is {values[best]:g}, the {word}")
    return out
