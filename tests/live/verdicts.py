"""What the scripts beside this one share: how a job that has loaded a checkpoint is judged.

A verdict is an object with

    loaded_equal          whether every tensor of the live job is bit for bit that of ``truth.safetensors``, and every
                          learning rate that of the source
    first_difference      null, or a sentence
    losses                of the next steps, on the global batches that the uninterrupted job had
    losses_reference      what the uninterrupted job had
    param_differences     the largest and the mean one to ``next.safetensors`` after the first of them; null without it
    ok                    all of it, within the rounding of sums in another order

Wrong moments leave the first loss as it is, hence several. No line of ckpttool runs here.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fixtures import jobs


class Tolerances(NamedTuple):
    """How far a job that goes on may be from the one that was not interrupted: a loss, and a parameter after one step."""

    absolute: float = 0.0
    relative: float = 0.0
    largest: float = 0.0
    mean: float = 0.0


def tolerances(case: Mapping[str, Any]) -> Tolerances:
    """For the precision of a case: another world size sums gradients in another order.

    That moves float32 by some 1e-7. In bfloat16 it moves a gradient by a part in 256 and more where terms cancel, and
    Adam divides by what may be as small: single elements mean little then, and all of them together do.
    """
    if case["model"]["kwargs"].get("dtype", "float32") != "float32":
        return Tolerances(absolute=2e-2, largest=2e-2, mean=1e-3)
    if case.get("precision", "float32") != "float32":
        return Tolerances(relative=1e-3, largest=2e-2, mean=5e-5)
    return Tolerances(absolute=5e-6, largest=5e-6, mean=5e-6)


def difference(name: str, found: Tensor | None, expected: Tensor | None) -> str | None:
    """A sentence on how ``found`` is not bit for bit ``expected``, or None if it is."""
    if found is None or expected is None:
        return f"{name}: {'not loaded' if found is None else 'loaded, but not in the truth'}"
    if name.startswith("model.") and found.dtype == torch.float32 and expected.dtype in (torch.bfloat16, torch.float16):
        expected = expected.float()  # a frozen weight that this engine keeps in float32, which is exact
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return f"{name}: {found.dtype} {list(found.shape)} instead of {expected.dtype} {list(expected.shape)}"
    if not found.numel():
        return None
    flat, wanted = found.reshape(-1), expected.reshape(-1)
    unequal = (flat.view(torch.uint8) != wanted.view(torch.uint8)).reshape(len(flat), -1).any(dim=1)
    if not unequal.any():
        return None
    first = int(unequal.nonzero()[0])
    return (
        f"{name}: {int(unequal.sum())} of {len(flat)} elements differ, "
        f"the first at {first}: {flat[first].item()!r} instead of {wanted[first].item()!r}"
    )


def first_difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str | None:
    """The first ``difference`` between two sets of named tensors, in the order of the names.

    A parameter that never had a gradient has no slots in torch's own optimizers and zeros in flat ones: zeros are right
    where the truth has no slot of it.
    """
    with_slots = {name.rpartition(".")[0] for name in expected if name.startswith("optim.")}
    for name in sorted({*found, *expected}):
        owner, _, slot = name.rpartition(".")
        if name.startswith("optim.") and owner not in with_slots and (slot == "step" or not found[name].any()):
            continue
        sentence = difference(name, found.get(name), expected.get(name))
        if sentence is not None:
            return sentence
    return None


def parameter_differences(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], truth: Mapping[str, Tensor]
) -> tuple[float, float]:
    """The largest and the mean absolute difference between two sets of parameters with the same names and shapes.

    Elements that never had a gradient are left out: flat optimizers decay them and the others do not, and where one gets
    its first gradient, Adam takes a whole step in a direction that a rounding decides.
    """
    if found.keys() != expected.keys():
        raise ValueError(f"parameters differ by name: {sorted(found.keys() ^ expected.keys())}")
    differences = [torch.zeros(1)]
    for name, tensor in expected.items():
        fqn = name.removeprefix("model.")
        slots = [t != 0 for key, t in truth.items() if key.rpartition(".")[0] == f"optim.{fqn}" and t.ndim]
        if slots:
            trained = torch.stack(slots).any(dim=0)
            differences.append((found[name] - tensor).abs()[trained])
    together = torch.cat(differences)
    return together.max().item(), together.mean().item()


def without_frozen_group(case: dict[str, Any]) -> dict[str, Any]:
    """The case with an optimizer that has no group of frozen parameters, for engines that take none."""
    kwargs = dict(case["optimizer"]["kwargs"])
    if kwargs.get("groups") == 4:
        kwargs["groups"] = 3
    return {**case, "optimizer": {**case["optimizer"], "kwargs": kwargs}}


def judge(
    folder: Path,
    *,
    state: Mapping[str, Tensor],
    train_step: Callable[[int], float],
    parameters: Callable[[], Mapping[str, Tensor]],
    groups: Iterable[dict[str, Any]],
    scheduled: bool,
) -> dict[str, Any]:
    """The verdict on a job that has loaded a checkpoint of the case in ``folder``; a collective, the same everywhere.

    ``state`` is what it holds, as ``truth_of`` of its engine gives it; without optimizer the slots are not judged and no
    step goes beyond the first. ``groups`` are those of its optimizer. Without a scheduler (``scheduled``) of its own it is
    given the learning rates of the uninterrupted job from its second step on.
    """
    case = jobs.read_case(folder)
    truth = load_file(folder / "truth.safetensors")
    groups = list(groups)
    sentence = first_difference(state, truth)
    wanted = [rates[: len(groups)] for rates in case.get("rates_next", ())]
    with_optimizer = any(name.startswith("optim.") for name in state) or case["step"] == 0
    losses: list[float] = []
    of_parameters: tuple[float, float] | None = None
    for later, _ in enumerate(case["loss_next"] if with_optimizer else case["loss_next"][:1]):
        rates = [float(group["lr"]) for group in groups]
        if wanted and with_optimizer and rates != wanted[later] and sentence is None:
            if later == 0 or scheduled:
                sentence = f"learning rates before step {later} of the resumed job: {rates} instead of {wanted[later]}"
            for group, rate in zip(groups, wanted[later], strict=True):
                group["lr"] = rate
        losses.append(train_step(case["step"] + later))
        if later == 0 and (folder / "next.safetensors").exists():
            following = load_file(folder / "next.safetensors")
            of_parameters = parameter_differences(parameters(), following, truth)

    most = tolerances(case)
    # written so that NaN is not ok
    goes_on = all(
        abs(loss - reference) <= most.absolute + most.relative * abs(reference)
        for loss, reference in zip(losses, case["loss_next"], strict=False)
    )
    if of_parameters is not None:
        goes_on = goes_on and of_parameters[0] <= most.largest and of_parameters[1] <= most.mean
    return {
        "loaded_equal": sentence is None,
        "first_difference": sentence,
        "losses": losses,
        "losses_reference": case["loss_next"],
        "param_differences": of_parameters,
        "ok": sentence is None and goes_on,
    }


def failed(error: BaseException) -> dict[str, Any]:
    """The verdict on a checkpoint that the engine refuses."""
    return {"loaded_equal": False, "first_difference": f"{type(error).__name__}: {error}"[:2000], "ok": False}


def run(description: str, words: str, resume: Callable[..., dict[str, Any]]) -> NoReturn:
    """Parses the command line, resumes, writes the verdicts from rank 0; exits with 0 if all are good and 1 if not.

    ``words`` names the arguments that one job takes; what the engine raises is a verdict if it raises it on every rank.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("arguments", nargs="+", metavar=words)
    parser.add_argument("--out", type=Path, required=True, help="file for the verdicts")
    parsed = parser.parse_args()
    each = len(words.split())
    if len(parsed.arguments) % each:
        parser.error(f"every job takes {words}")
    verdicts = []
    for first in range(0, len(parsed.arguments), each):
        case, checkpoint, *more = parsed.arguments[first : first + each]
        try:
            verdict = resume(Path(case), Path(checkpoint), *more)
        except (Exception, CheckpointException) as error:  # which is none
            verdict = failed(error)
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, verdict)
        verdicts.append(next((v for v in every if not v["ok"]), verdict))
    if dist.get_rank() == 0:
        parsed.out.write_text(json.dumps(verdicts, indent=1) + "\n", encoding="utf-8")
    jobs.leave(0 if all(v["ok"] for v in verdicts) else 1)
