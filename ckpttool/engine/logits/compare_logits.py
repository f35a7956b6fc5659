"""compare: what two checkpoints compute on the same tokens, layer by layer, in the memory of one layer.

    A on the prompts           each layer's output goes to a temporary file
    B on the same prompts      each layer's output is compared with A's at once
    A again, otherwise         only if something differs: with other kernels for attention, and another number of
                               threads. By how much A then differs from itself is what rounding alone does; ten
                               times that is what two equal models may differ

Equal weights and configs take equal paths, and give equal bits.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import IO, TYPE_CHECKING, Any

from ...errors import Unsupported, UsageError, argument, kind_of_failure
from ...options import CompareRequest, Progress
from ...printable import Shown, count_noun, list_first, replace_non_finite_numbers
from .causes import LayerCause, explain_layer, find_config_differences
from .prompts import ModelInputs, make_inputs, read_prompts
from .sides import ModelSide
from .streaming import StreamedModel

if TYPE_CHECKING:
    import torch

__all__ = ["LayerDifference", "LogitComparison", "LogitNoise", "compare_sides"]

#: How many times more than the measured noise two equal models may differ.
_MARGIN = 10
#: Of so many weights of a side it is said that they are missing, or have another shape.
_MOST_MISFITS = 8
#: Rows of logits that are compared at one time.
_ROWS = 64
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}


@dataclass
class LayerDifference:
    """How far the outputs of a layer are apart: the largest difference of two numbers, and the distance relative to the
    length of A's output. `bound` is what the relative one may be by rounding alone, None where nothing was measured."""

    name: str
    largest: float
    relative: float
    bound: float | None = None

    @property
    def exceeds(self) -> bool:
        """Tell whether the difference is larger than rounding explains."""
        return self.relative > (self.bound or 0)


@dataclass
class LogitNoise:
    """By how much A differs from itself when it is computed in another way: the largest difference of two logits."""

    what: str
    largest: float


@dataclass(repr=False)
class LogitComparison(Shown):
    """What `compare` found; `equal` is True if no logit differs by more than `bound`, or the KL divergence is at most
    the one that was allowed.

    KL divergences are of B from A, in nats. `bound` is None where every logit is equal, so that nothing was measured.
    `causes` are what explains the first layer that differs; `layers` are in the order in which they are computed.
    `weights_differ` are all weights with other values, `unreached` those that no prompt made the model read, and
    which were compared all the same. `misfit_a` and `misfit_b` {weight: "is missing", ...} are what does not fit the
    model; then nothing is computed.
    """

    equal: bool
    model: str
    dtype: str
    device: str
    prompts: int
    tokens: int
    kl_mean: float | None = None
    kl_max: float | None = None
    largest: float | None = None
    top1_equal: int | None = None
    bound: float | None = None
    noise: list[LogitNoise] = field(default_factory=list)
    first_layer: str | None = None
    causes: list[LayerCause] = field(default_factory=list)
    layers: list[LayerDifference] = field(default_factory=list)
    config: dict[str, tuple[object, object]] = field(default_factory=dict)
    weights: int = 0
    weights_differ: list[str] = field(default_factory=list)
    unreached: list[str] = field(default_factory=list)
    misfit_a: dict[str, str] = field(default_factory=dict)
    misfit_b: dict[str, str] = field(default_factory=dict)
    layer_bytes: int = 0
    notes: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Tell whether the two differ."""
        return not self.equal

    @property
    def word(self) -> str:
        """The verdict: "equal" or "different"."""
        return "equal" if self.equal else "different"

    def to_json(self) -> dict[str, object]:
        """Convert to plain data; numbers that are infinite or NaN become text."""
        plain: dict[str, Any] = replace_non_finite_numbers(asdict(self))
        return plain

    def summarise(self) -> dict[str, object]:
        """Return the verdict and the numbers as plain data, without the layers and the weights."""
        plain = self.to_json()
        return dict(list(plain.items())[: list(plain).index("bound") + 1])

    def headline(self) -> str:
        """Return the verdict and the largest difference."""
        return self.word + ("" if self.largest is None else f", largest logit difference {self.largest:.3g}")

    def lines(self) -> Iterator[str]:
        """Yield the lines of the report: KL divergence, logit difference, bound, first layer that differs with its
        causes, and the verdict."""
        if self.kl_max is not None and self.kl_mean is not None:
            yield f"KL divergence: mean {self.kl_mean:.3g}, max {self.kl_max:.3g} nats over {self.tokens:,} positions"
        if self.largest is not None:
            agreed = (
                "" if self.top1_equal is None else f"; top-1 agrees at {self.top1_equal:,} of {self.tokens:,} positions"
            )
            yield f"largest logit difference: {self.largest:.3g}{agreed}"
        if self.bound is not None:
            noise = ", ".join(f"{n.what}: {n.largest:.3g}" for n in self.noise)
            yield f"bound: {self.bound:.3g}, {_MARGIN} times the most that A differs from itself ({noise})"
        if self.first_layer is not None:
            row = next((x for x in self.layers if x.name == self.first_layer), None)
            by = (
                ""
                if row is None
                else f": relative {row.relative:.3g}"
                + ("" if row.bound is None else f", by rounding at most {row.bound:.3g}")
            )
            yield f"first layer that differs: {self.first_layer}{by}"
        for cause in self.causes:
            yield f"  {cause.name} {cause.how}"
        for key, (x, y) in () if self.causes else self.config.items():
            yield f"config.json: {key}: {x!r} | {y!r}"
        if self.weights_differ:
            first = list_first(self.weights_differ)
            yield f"other values: {len(self.weights_differ):,} of {self.weights:,} weights, {first}"
        on = count_noun(self.prompts, "prompt")
        yield f"{self.word}: {self.model} on {on}, computed in {self.dtype} on {self.device}"


def compare_sides(
    a: ModelSide, b: ModelSide, request: CompareRequest, progress: Progress, tokenizer: str | None = None
) -> LogitComparison:
    """Compare what the models of two open checkpoints compute.

    Args:
        a: the reference.
        b: the checkpoint that is compared with it.
        request: prompts, seed, dtype, device, and the KL divergence that is allowed.
        progress: called with ("compare", bytes read, bytes in all).
        tokenizer: the folder that may contain a tokenizer, for prompts in text; None where there is none.

    Raises:
        Unsupported: transformers cannot build or run the model, or neither side fits its config.
        UsageError: the dtype, the device or the prompts make no sense.
        CkpttoolError: a weight cannot be read.
    """
    device, dtype = _find_device(request.device), _find_dtype(request.dtype)
    model_a = StreamedModel.of_config(a.config, dtype, device)
    model_b = model_a if a.config == b.config else StreamedModel.of_config(b.config, dtype, device)
    name = type(model_a.model).__name__
    out = LogitComparison(False, name, str(dtype).removeprefix("torch."), str(device), 0, 0)
    out.config, out.weights = find_config_differences(a.config, b.config), len(model_a.wanted)
    if (other := type(model_b.model).__name__) != name:
        out.notes.append(f"by their config.json, A is a {name} and B a {other}")
    if not _check_weights(model_a, model_b, a, b, out):
        return out
    prompts = None if request.prompts is None else read_prompts(request.prompts, tokenizer)
    inputs = make_inputs(model_a, a, prompts, request.seed)
    out.prompts, out.tokens = inputs.prompts, inputs.tokens
    _report_read_bytes((a, b), progress)
    with tempfile.TemporaryFile(buffering=0) as file:
        recorded = _Recording(file, inputs)
        logits = inputs.rows_of(model_a.run(a, inputs, recorded.add))
        rows: list[LayerDifference] = []
        theirs = inputs.rows_of(model_b.run(b, inputs, recorded.comparing(rows)))
        if logits.shape != theirs.shape:
            raise Unsupported(
                f"A gives logits of {list(logits.shape)} and B of {list(theirs.shape)}: they are not comparable.",
                code="CKPT0333",
            )
        out.layers, out.tokens = rows, len(logits)
        _compare_all_weights(model_a, a, b, out)
        _measure_logits(logits, theirs, out)
        _refuse_nan(logits, out)
        out.equal = out.largest == 0
        if out.equal and out.weights_differ:
            many = count_noun(len(out.weights_differ), "weight")
            out.notes.append(f"no prompt shows the other values of {many}: {list_first(out.weights_differ)}")
        if not out.equal or any(row.relative for row in rows):
            _measure_noise(model_a, a, inputs, recorded, logits, out)
            assert out.bound is not None and out.largest is not None and out.kl_max is not None
            allowed = request.max_kl is not None and out.kl_max <= request.max_kl
            out.equal = out.largest <= out.bound or allowed
            _explain_first_layer(model_a, a, b, out)
    out.layer_bytes = max(model_a.peak_bytes, model_b.peak_bytes)
    for side in (a, b):
        side.opened.source.assert_unchanged()
    return out


def _find_device(asked: str) -> torch.device:
    """Return the torch device of this name.

    Raises:
        UsageError: this machine does not have it, or it cannot compute.
    """
    import torch

    try:
        device = torch.device(asked)
        torch.zeros(1, device=device).item()  # "meta" is a device that computes nothing
        if device.type == "cuda":
            torch.cuda.set_device(device)  # kernels of other libraries compute on the current one
            torch.backends.cudnn.allow_tf32 = False  # convolutions in float32, too
    except (RuntimeError, AssertionError) as e:
        raise UsageError(f"{argument('device', asked)}: {str(e).splitlines()[0]}", code="CKPT0219") from None
    return device


def _find_dtype(asked: str) -> torch.dtype:
    """Return the torch dtype with a short name such as "bf16".

    Raises:
        UsageError: the name is none of `_DTYPES`.
    """
    import torch

    if asked not in _DTYPES:
        raise UsageError(f"{argument('dtype', asked)}: choose one of {', '.join(_DTYPES)}.", code="CKPT0203")
    dtype: torch.dtype = getattr(torch, _DTYPES[asked])
    return dtype


def _check_weights(
    model_a: StreamedModel, model_b: StreamedModel, a: ModelSide, b: ModelSide, out: LogitComparison
) -> bool:
    """Tell whether each side has exactly the weights of its model. If not, the misfits, their causes and a note are put
    into `out`.

    Raises:
        Unsupported: a weight has the same fault on both sides, so the config is of another model.
    """
    out.misfit_a, out.misfit_b = model_a.find_misfit(a), model_b.find_misfit(b)
    if any(out.misfit_b.get(n) == how for n, how in out.misfit_a.items()):
        model_a.refuse_misfit(a, out.misfit_a)
    for side, misfit in ((a, out.misfit_a), (b, out.misfit_b)):
        out.causes += [LayerCause(n, f"{how}, in {side.label}") for n, how in list(misfit.items())[:_MOST_MISFITS]]
    if not out.causes:
        return True
    wrong = out.misfit_a.keys() | out.misfit_b.keys()
    out.first_layer = next((layer for layer, places in model_a.layers.items() if wrong & places.keys()), None)
    out.notes.append("nothing was computed: a model with weights that are missing would hold random numbers")
    return False


def _refuse_nan(logits: torch.Tensor, out: LogitComparison) -> None:
    """Raise an error if logits of A, the reference, are NaN: nothing can be compared with them.

    Raises:
        Unsupported: some logits are NaN.
    """
    if bool(logits.isnan().any()):
        raise Unsupported(
            f"A's logits are NaN at {int(logits.isnan().any(-1).sum())} of {len(logits)} positions: its weights hold "
            f"NaN or are too large for {out.dtype}, or {out.model} uses a weight outside the layer that it belongs to. "
            f"Count them in each weight: {argument('read_data', True)}.",
            code="CKPT0333",
        )


def _report_read_bytes(sides: tuple[ModelSide, ModelSide], progress: Progress) -> None:
    """Set both sides to report the bytes of the weights that they read to `progress`, with the bytes of all their
    weights as the total."""
    total = sum(t.nbytes for side in sides for t in side.tensors.values())
    done = 0

    def count(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress("compare", min(done, total), total)

    for side in sides:
        side.progress = count


class _Recording:
    """The outputs of A's layers, in a file that is gone when it is closed."""

    def __init__(self, file: IO[bytes], inputs: ModelInputs) -> None:
        """Begin an empty recording.

        Args:
            file: a temporary file, opened for reading and writing, which is empty.
            inputs: the batch that the models compute; its padding is left out of what is recorded.
        """
        self._file, self._inputs = file, inputs
        self._places: dict[str, list[tuple[int, tuple[int, ...]]]] = {}

    def add(self, layer: str, outputs: list[torch.Tensor]) -> None:
        """Write the outputs of a layer of A to the file.

        Raises:
            NoSpace: the disk of the temporary file is full.
        """
        for found in outputs:
            rows = self._inputs.rows_of(found).float().cpu().contiguous()
            self._places.setdefault(layer, []).append((self._file.tell(), tuple(rows.shape)))
            left = memoryview(rows.numpy().tobytes())
            try:
                while left:
                    left = left[self._file.write(left) :]
            except OSError as e:
                where = f"the temporary file in {tempfile.gettempdir()}, for the outputs of A's layers"
                raise kind_of_failure(e)(f"{where}: {e.strerror}. Set TMPDIR to a folder with more room.") from e

    def comparing(self, rows: list[LayerDifference]) -> Callable[[str, list[torch.Tensor]], None]:
        """Return a function to pass to `StreamedModel.run` as its sink: called with (layer, its outputs), it compares
        them with those recorded from A, and appends a `LayerDifference` to `rows`. Layers that A does not have are
        ignored."""

        def compare(layer: str, outputs: list[torch.Tensor]) -> None:
            largest = relative = 0.0
            places = self._places.get(layer)
            if places is None:
                return
            for place, found in zip(places, outputs, strict=False):
                here = self._inputs.rows_of(found).float().cpu()
                if tuple(here.shape) != place[1]:
                    largest = relative = math.inf
                    continue
                one = _measure_distance(self._read(*place), here)
                largest, relative = max(largest, one[0]), max(relative, one[1])
            rows.append(LayerDifference(layer, largest, relative))

        return compare

    def _read(self, at: int, shape: tuple[int, ...]) -> torch.Tensor:
        """Read a recorded output of A.

        Args:
            at: offset in the file.
            shape: shape of the output, in float32.
        """
        import torch

        end = self._file.tell()
        self._file.seek(at)
        found = torch.frombuffer(bytearray(self._file.read(4 * math.prod(shape)) or bytes(4)), dtype=torch.float32)
        self._file.seek(end)
        return found[: math.prod(shape)].reshape(shape)


def _measure_distance(x: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
    """Return (largest difference of two elements, norm of the difference divided by the norm of x) of two tensors of
    one shape.

    Equal infinities, and NaN on both sides, count as equal; NaN on one side gives infinity.
    """
    same = (x == y) | (x.isnan() & y.isnan())
    if bool(same.all()):
        return 0.0, 0.0
    gap = (x.double() - y.double()).abs().masked_fill(same, 0).nan_to_num(nan=math.inf)
    length = float(x.double().nan_to_num(posinf=0, neginf=0).norm())
    return float(gap.max()), float(gap.norm()) / length if length else math.inf


def _measure_logits(x: torch.Tensor, y: torch.Tensor, out: LogitComparison) -> None:
    """Measure the KL divergence, the largest difference and the top-1 agreement of the logits of A (`x`) and B (`y`),
    of shape [positions, vocabulary], and put them into `out`."""
    import torch

    divergences, largest, agreed = [], 0.0, 0
    for k in range(0, len(x), _ROWS):
        p, q = x[k : k + _ROWS].double(), y[k : k + _ROWS].double()
        largest = max(largest, _measure_distance(p, q)[0])
        agreed += int((p.argmax(-1) == q.argmax(-1)).sum())
        log_p, log_q = torch.log_softmax(p, -1), torch.log_softmax(q, -1)
        each = torch.where((log_p > -math.inf) & (log_p != log_q), log_p.exp() * (log_p - log_q), 0)
        divergences.append(each.sum(-1).clamp(min=0))
    kl = torch.cat(divergences)
    out.kl_mean, out.kl_max = float(kl.mean()), float(kl.max())
    out.largest, out.top1_equal = largest, agreed


def _compare_all_weights(model: StreamedModel, a: ModelSide, b: ModelSide, out: LogitComparison) -> None:
    """Compare the digests of all weights and put the names of those that differ into `out.weights_differ`. Weights that
    no prompt made the models read are read for that, and listed in `out.unreached`."""
    for name in model.wanted:
        stored = [model.name_in(side, name) for side in (a, b)]
        if None in stored:
            continue
        for side, n in zip((a, b), stored, strict=True):
            if n is not None and n not in side.digests:
                side.read(n)
                out.unreached += [name] if side is a else []
        if a.digests[str(stored[0])] != b.digests[str(stored[1])]:
            out.weights_differ.append(name)


def _measure_noise(
    model: StreamedModel,
    a: ModelSide,
    inputs: ModelInputs,
    recorded: _Recording,
    logits: torch.Tensor,
    out: LogitComparison,
) -> None:
    """Compute A again with other kernels or threads, and set the bounds of the layers and of the logits in `out` from
    the differences.

    Args:
        model: the model of A.
        recorded, logits: the layer outputs and the logits of the first run of A.
    """
    noise: dict[str, float] = {}
    for what, change, back in _list_other_ways(model):
        rows: list[LayerDifference] = []
        try:
            change()
            again = inputs.rows_of(model.run(a, inputs, recorded.comparing(rows)))
        except (Unsupported, ValueError, ImportError):  # this model has no such kernels
            continue
        finally:
            back()
        largest = _measure_distance(logits, again)[0]
        if not math.isfinite(largest):  # a bound of infinity would make everything equal
            out.notes.append(f"A overflows {out.dtype} with {what}, which therefore says nothing about rounding")
            continue
        out.noise.append(LogitNoise(what, largest))
        for row in rows:
            noise[row.name] = max(noise.get(row.name, 0.0), row.relative if math.isfinite(row.relative) else 0.0)
    out.bound = _MARGIN * max((n.largest for n in out.noise), default=0.0)
    most = 0.0
    for row in out.layers:  # what comes in with it, a layer hands on
        most = max(most, noise.get(row.name, 0.0))
        row.bound = _MARGIN * most


def _list_other_ways(model: StreamedModel) -> list[tuple[str, Callable[[], object], Callable[[], object]]]:
    """List ways to compute the same model with another attention kernel or another number of threads, as (description,
    function that switches to the way, function that switches back)."""
    import torch

    usual = getattr(model.model.config, "_attn_implementation", None)
    other = "sdpa" if usual == "eager" else "eager"
    ways: list[tuple[str, Callable[[], object], Callable[[], object]]] = []
    if usual is not None:
        attend = model.model.set_attn_implementation
        ways.append((f"{other} attention for {usual}", lambda: attend(other), lambda: attend(usual)))
    if model.device.type == "cpu":
        threads = torch.get_num_threads()
        more = 1 if threads > 1 else 2
        what = f"{count_noun(more, 'thread')} for {threads}"
        ways.append((what, lambda: torch.set_num_threads(more), lambda: torch.set_num_threads(threads)))
    return ways


def _explain_first_layer(model: StreamedModel, a: ModelSide, b: ModelSide, out: LogitComparison) -> None:
    """Put into `out` the first layer that differs by more than rounding, or else the first that differs at all, and its
    causes; a note if no layer differs."""
    first = next((row for row in out.layers if row.exceeds), None) or next((r for r in out.layers if r.relative), None)
    if first is None:  # a cap or a factor of the logits
        out.notes.append("every layer gives equal numbers: the logits differ by what is done to them at the end")
        return
    out.first_layer = first.name
    out.causes = explain_layer(model, a, b, first.name)
    if not out.causes:
        out.notes.append(f"no weight of {first.name} differs, and no key of config.json that is known to matter")
