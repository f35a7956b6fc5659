"""average: the numbers of torch on the gathered states, bit for bit, whatever the layouts and world sizes; what is no average
of one model is refused by its tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import ckpttool_here
from peers import FIXTURES, raw
from safetensors.torch import load_file
from torch import Tensor, nn

import ckpttool
from ckpttool.engine import computed_files
from ckpttool.errors import Corrupt, Unsupported, UsageError

WIDE = {"fp64": torch.float64, "fp32": torch.float32}
#: Saves of real engines, of one model each time: (fixture, its file or folder).
OF_ENGINES = {
    "fsdp1, zero3, zero2, universal": ("fsdp1_w3_uop0", "zero3_w4", "zero2_w2_roundrobin", "universal_z3_w2"),
    "fsdp2, hsdp, hf": ("fsdp2_w3", "fsdp2_w4_hsdp", "hf_llama"),
}


def in_order(
    states: list[dict[str, Tensor]], combine: Callable[[list[Tensor]], Tensor], wide: torch.dtype
) -> dict[str, Tensor]:
    """The average by torch: each tensor in the dtype of accumulation, rounded once; of integers the last."""
    out = {}
    for name, last in states[-1].items():
        if not last.is_floating_point():
            out[name] = last
            continue
        dtype = torch.float64 if last.dtype == torch.float64 else wide
        out[name] = combine([s[name].to(dtype) for s in states]).to(last.dtype)
    return out


def mean(xs: list[Tensor]) -> Tensor:
    total = xs[0]
    for x in xs[1:]:
        total = total + x
    return total / len(xs)


def weighted(*factors: float) -> Callable[[list[Tensor]], Tensor]:
    def combine(xs: list[Tensor]) -> Tensor:
        total = xs[0] * factors[0]
        for x, factor in zip(xs[1:], factors[1:], strict=True):
            total = total + x * factor
        return total

    return combine


def ema(decay: float) -> Callable[[list[Tensor]], Tensor]:
    def combine(xs: list[Tensor]) -> Tensor:
        from torch.optim.swa_utils import get_ema_avg_fn

        step, out = get_ema_avg_fn(decay), xs[0]
        for x in xs[1:]:
            out = step(out, x, torch.tensor(0))
        return out

    return combine


class Net(nn.Module):
    """What is awkward: 131 rows that are tied, no dimensions, no elements, odd names, four dtypes, counters and masks."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.emb = nn.Embedding(131, 7)
        self.head = nn.Linear(7, 131, bias=False)
        self.head.weight = self.emb.weight
        self.scale = nn.Parameter(torch.randn(()))
        self.bn = nn.BatchNorm1d(7)
        self.bn.running_mean = torch.randn(7)
        self.bn.num_batches_tracked = torch.tensor(10 * seed)
        self.b16 = nn.Parameter(torch.randn(37, 5).bfloat16())
        self.f16 = nn.Parameter(torch.randn(11).half() * 100)
        self.add_module("ünïcode module", nn.Linear(3, 3).double())
        self.register_parameter("0", nn.Parameter(torch.randn(3, 1, 4)))
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("mask", torch.tensor([True, False]))


@pytest.fixture(params=["blocks of 1 MiB", "blocks of 13 elements"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that end inside tensors, and ones that hold whole tensors."""
    if "13" in request.param:
        monkeypatch.setattr(computed_files, "MOST_ELEMENTS", 13)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], list[dict[str, Tensor]]]:
    """One model three times, as one file, as dcp of three ranks and as a folder of the Hub, which has one of two tied names."""
    folder = tmp_path_factory.mktemp("three")
    states = [Net(i).state_dict() for i in range(3)]
    for i, state in enumerate(states):
        torch.save({"model": state, "optimizer": {"state": {}, "param_groups": []}, "step": i}, folder / f"{i}.pt")
    ckpttool.convert(folder / "1.pt", folder / "dcp", to="dcp", world_size=3)
    ckpttool.convert(folder / "2.pt", folder / "hf", to="hf")
    return [folder / "0.pt", folder / "dcp", folder / "hf"], states


def found_in(path: Path) -> dict[str, Tensor]:
    with ckpttool.open(path) as opened:
        return {n.removeprefix("model."): opened[n].torch() for n in opened if n.startswith("model.")}


@pytest.mark.slow
@pytest.mark.parametrize("kind", OF_ENGINES)
@pytest.mark.parametrize("accumulate", WIDE)
@pytest.mark.usefixtures("blocks")
def test_three_saves_of_engines_have_the_average_of_their_gathered_states(
    kind: str, accumulate: str, tmp_path: Path
) -> None:
    cases = OF_ENGINES[kind]
    truth = [load_file(FIXTURES / case / "truth.safetensors") for case in cases]
    states = [{n.removeprefix("model."): t for n, t in of.items() if n.startswith("model.")} for of in truth]
    wanted = in_order(states, mean, WIDE[accumulate])
    paths = [FIXTURES / case / "ckpt" for case in cases]
    # what differs is the training, so that the states are no copies of each other
    assert any(raw(states[0][n]) != raw(states[1][n]) for n in wanted) or kind.startswith("fsdp2")
    flat = FIXTURES / cases[0] / "flat_layout.json"  # what the first says of itself; the others have no use for it
    hints: Any = {"flat_layout": flat} if flat.exists() else {}
    done = ckpttool.average(paths, tmp_path / "out", to="dcp", world_size=3, accumulate=accumulate, **hints)
    found = found_in(tmp_path / "out")
    assert found.keys() == wanted.keys() and [n for n in wanted if raw(found[n]) != raw(wanted[n])] == []
    assert done.digest["model"] == ckpttool.digest(tmp_path / "out").digest["model"]
    if kind.startswith("fsdp1"):
        return
    # the states of training are left behind, by name
    assert {name.partition(".")[0] for name, _, _ in done.dropped} >= {"optim"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keywords", "combine"),
    [({}, mean), ({"coefficients": (0.2, 0.3, 0.5)}, weighted(0.2, 0.3, 0.5)), ({"ema_decay": 0.9}, ema(0.9)),
     ({"coefficients": (1, -1, 0.5), "linear": True}, weighted(1, -1, 0.5))],
    ids=["mean", "coefficients", "ema", "linear"],
)  # fmt: skip
@pytest.mark.parametrize("accumulate", WIDE)
@pytest.mark.parametrize("to", ["full", "dcp", "zero3", "hf", "universal"])
@pytest.mark.usefixtures("blocks")
def test_every_layout_gets_the_bits_of_torch(
    three: tuple[list[Path], list[dict[str, Tensor]]],
    keywords: Any,
    combine: Any,
    accumulate: str,
    to: str,
    tmp_path: Path,
) -> None:
    paths, states = three
    wanted = in_order(states, combine, WIDE[accumulate])
    ranks = {} if to in ("full", "hf", "universal") else {"world_size": 3}
    dst = tmp_path / ("out.pt" if to == "full" else "out")
    done = ckpttool.average(paths, dst, to=to, accumulate=accumulate, **ranks, **keywords)
    found = found_in(dst)
    if to == "full":
        found = torch.load(dst)["model"]
        assert found["head.weight"].data_ptr() == found["emb.weight"].data_ptr(), "tied weights stay tied"
    if to == "hf":
        wanted = {n: t for n, t in wanted.items() if n != "head.weight"}
    if to in ("zero3", "universal"):  # the masters of their engine have more bits, which hold these numbers
        found = {n: t.to(wanted[n].dtype) for n, t in found.items()}
    assert [n for n in wanted if n not in found] == []
    assert [n for n in wanted if n in found and raw(found[n]) != raw(wanted[n])] == []
    assert any("bn.num_batches_tracked differ" in note for note in done.notes)
    assert any("update_bn" in note for note in done.notes)


def test_the_record_has_the_inputs_and_their_digests(three: tuple[list[Path], Any], tmp_path: Path) -> None:
    ckpttool.average(three[0], tmp_path / "out", to="dcp", world_size=2, coefficients=[0.25, 0.25, 0.5])
    said = json.loads((tmp_path / "out" / "ckpttool.json").read_text())["average"]
    assert (said["method"], said["accumulate"], said["coefficients"]) == ("coefficients", "float64", [0.25, 0.25, 0.5])
    assert [(one["name"], one["layout"], one["world_size"], one["step"]) for one in said["inputs"]] == [
        ("0.pt", "full", None, 0), ("dcp", "dcp", 3, 1), ("hf", "hf", None, None),
    ]  # fmt: skip
    assert [one["digest"] for one in said["inputs"]] == [
        ckpttool.digest(p, only=["model"]).digest["model"] for p in three[0]
    ]


def test_task_arithmetic_adds_scaled_differences(
    three: tuple[list[Path], list[dict[str, Tensor]]], tmp_path: Path
) -> None:
    paths, (a, b, base) = three
    done = ckpttool.average(paths[:2], tmp_path / "out.pt", base=paths[2], scale=[0.5, 0.25], to="full")
    found = torch.load(tmp_path / "out.pt")["model"]
    for name in (n for n in base if base[n].is_floating_point()):
        start = base[name].double()
        wanted = start + (a[name].double() - start) * 0.5 + (b[name].double() - start) * 0.25
        assert raw(found[name]) == raw(wanted.to(base[name].dtype)), name
    assert found["bn.num_batches_tracked"] == 10 and "task arithmetic (scale 0.5, 0.25)" in done.notes[0]
    ckpttool.average(paths[:1], tmp_path / "same.pt", base=paths[2], to="full")
    same = torch.load(tmp_path / "same.pt")["model"]
    assert torch.allclose(same["emb.weight"], a["emb.weight"], rtol=1e-12)


@pytest.mark.parametrize("t", [0.0, 0.3, 1.0])
@pytest.mark.usefixtures("blocks")
def test_slerp_goes_along_the_arc(three: tuple[list[Path], list[dict[str, Tensor]]], t: float, tmp_path: Path) -> None:
    paths, states = three
    ckpttool.average(paths[:2], tmp_path / "out.pt", slerp=t, to="full")
    found = torch.load(tmp_path / "out.pt")["model"]
    for name in ("emb.weight", "0", "b16", "f16", "scale", "ünïcode module.weight"):
        x, y = (states[i][name].double() for i in range(2))
        cosine = (x * y).sum() / (x.norm() * y.norm())
        angle = torch.acos(cosine.clamp(-1, 1))
        near = (
            ((1 - t) * x + t * y)
            if cosine.abs() >= 0.9995
            else (torch.sin((1 - t) * angle) * x + torch.sin(t * angle) * y) / torch.sin(angle)
        )
        assert torch.allclose(found[name].double(), near, rtol=1e-2 if name in ("b16", "f16") else 1e-6, atol=1e-7), (
            name
        )


def changed(state: dict[str, Tensor], **changes: Tensor | None) -> dict[str, Tensor]:
    return {n: t for n, t in (state | changes).items() if t is not None}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"bn.weight": None}, '"bn.weight" is not in'),
        ({"new": torch.ones(2)}, '"new" is not in'),
        ({"scale": torch.ones(1)}, '"scale" is float32'),
        ({"b16": torch.ones(37, 5)}, "float32 [37, 5] in"),
        ({"mask": torch.tensor([False, True])}, "a mask or an index"),
        ({"b16": torch.ones(37, 5).to(torch.float8_e4m3fn)}, "has no average"),
        ({"head.weight": torch.ones(131, 7)}, '"head.weight" is not in'),
    ],
)  # fmt: skip
def test_other_models_are_refused_by_their_tensors(
    three: tuple[list[Path], list[dict[str, Tensor]]], change: Any, said: str, tmp_path: Path
) -> None:
    paths, states = three
    torch.save({"model": changed(states[0], **change)}, tmp_path / "odd.pt")
    for order in ([paths[2], tmp_path / "odd.pt"], [tmp_path / "odd.pt", paths[2]]):
        with pytest.raises(Unsupported) as e:
            ckpttool.average(order, tmp_path / "out")
        assert said in str(e.value) and "odd.pt" in str(e.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("count", "keywords", "said"),
    [
        (1, {}, "One checkpoint has no average"),
        (3, {"coefficients": [1, 2]}, "are 2, and 3 checkpoints were given"),
        (3, {"coefficients": [1, 1, 1]}, "sum to 3"),
        (3, {"coefficients": [float("nan"), 1, 1]}, "finite"),
        (2, {"ema_decay": 0.5, "slerp": 0.2}, "each is another average"),
        (2, {"ema_decay": 1.5}, "between 0 and 1"),
        (3, {"slerp": 0.5}, "two checkpoints"),
        (3, {"scale": 2}, "goes with"),
        (3, {"linear": True}, "goes with"),
        (3, {"accumulate": "bf16"}, "fp64 or fp32"),
        (3, {"weights": "ema"}, "no set of weights"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    three: tuple[list[Path], Any], count: int, keywords: Any, said: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=said):
        ckpttool.average(three[0][:count], tmp_path / "out", **keywords)


def test_a_result_that_does_not_fit_its_dtype_is_refused(three: tuple[list[Path], Any], tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r'"f16": .* numbers of the result do not fit into float16'):
        ckpttool.average(three[0], tmp_path / "out", coefficients=[1, 1, 1e6], linear=True)
    assert not (tmp_path / "out").exists()


def test_an_input_that_is_not_what_was_recorded_is_refused(three: tuple[list[Path], Any], tmp_path: Path) -> None:
    copy = tmp_path / "hf"
    copy.mkdir()
    for name in ("model.safetensors", "ckpttool.json"):
        (copy / name).write_bytes((three[0][2] / name).read_bytes())
    data = bytearray((copy / "model.safetensors").read_bytes())
    data[-3] ^= 1
    (copy / "model.safetensors").write_bytes(data)
    for order in ([three[0][0], copy], [copy, three[0][0]]):
        with pytest.raises(Corrupt, match="do not have the digest that was recorded"):
            ckpttool.average(order, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_damage_in_a_file_of_torch_is_found_while_blocks_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(computed_files, "MOST_ELEMENTS", 100)
    for i in range(2):
        torch.save({"model": {"a.weight": torch.full((50, 40), 1.0 + i)}}, tmp_path / f"{i}.pt")
    data = bytearray((tmp_path / "0.pt").read_bytes())
    at = data.index(torch.full((50, 40), 1.0).numpy().tobytes())
    data[at + 3000] ^= 1
    (tmp_path / "0.pt").write_bytes(data)
    with pytest.raises(Corrupt, match="CRC32"):
        ckpttool.average([tmp_path / "0.pt", tmp_path / "1.pt"], tmp_path / "out")


def test_the_averages_of_trainers_are_averaged(
    three: tuple[list[Path], list[dict[str, Tensor]]], tmp_path: Path
) -> None:
    states = three[1][:2]
    for i, state in enumerate(states):
        torch.save({"model": {n: torch.zeros_like(t) for n, t in state.items()}, "ema": state}, tmp_path / f"{i}.pt")
    ckpttool.average([tmp_path / "0.pt", tmp_path / "1.pt"], tmp_path / "out.pt", weights="ema", to="full")
    found, wanted = torch.load(tmp_path / "out.pt")["model"], in_order(states, mean, torch.float64)
    assert [n for n in wanted if raw(found[n]) != raw(wanted[n])] == []
    with pytest.raises(UsageError, match="no set of weights"):
        ckpttool.average([three[0][0], tmp_path / "1.pt"], tmp_path / "no.pt", weights="ema")


def test_the_command_prints_what_it_computes(three: tuple[list[Path], Any], tmp_path: Path) -> None:
    done = ckpttool_here(
        "average", *three[0], tmp_path / "out", "--to", "dcp", "-n", 3, "--accumulate", "fp32", "--json"
    )
    said = json.loads(done.stdout)
    assert done.returncode == 0 and said["verified"] and said["layout_to"] == "dcp"
    assert said["notes"][0].startswith("mean of 0.pt (full), dcp (dcp), hf (hf), computed in float32 in this order")
    dry = ckpttool_here("average", *three[0], tmp_path / "dry", "--dry-run", "--json")
    assert dry.returncode == 0 and json.loads(dry.stdout)["read_bytes"] > 0 and not (tmp_path / "dry").exists()
    for words, code in (
        ((three[0][0], tmp_path / "x"), 2),
        ((*three[0], tmp_path / "x", "--coefficients", "1,a,2"), 2),
        ((*three[0], three[0][1], "--to", "dcp", "--force"), 2),
        ((*three[0][:1], tmp_path / "none", tmp_path / "x"), 3),
    ):
        assert ckpttool_here("average", *words).returncode == code, words


class Scaled(nn.Linear):
    """Keeps a scale in the state dict, as modules for fp8 do."""

    scale: Any = None

    def get_extra_state(self) -> Any:
        return self.scale

    def set_extra_state(self, state: Any) -> None:
        self.scale = state


@pytest.mark.slow
def test_extra_states_are_those_of_the_last_and_load_from_every_file(tmp_path: Path) -> None:
    """`load_state_dict` asks for one entry of each module, also in files whose keys are not the source's."""
    for name, amax in (("a", 1.0), ("b", 2.0)):
        model = nn.Sequential(Scaled(2, 2))
        model[0].scale = {"amax": amax, "history": [1, 2]}
        adam = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 2)).sum().backward()
        adam.step()
        torch.save({"model": model.state_dict(), "optim": adam.state_dict()}, tmp_path / f"{name}.pt")
    done = ckpttool.average([tmp_path / "a.pt", tmp_path / "b.pt"], tmp_path / "mean.pt", to="full")
    assert any("2 values of the model are those of b.pt; 0._extra_state.amax differ" in note for note in done.notes)
    assert not any("keep the keys of the source" in note for note in done.notes)
    ckpttool.convert(tmp_path / "b.pt", tmp_path / "own.pt", to="full", canonical_keys=True)
    ckpttool.convert(tmp_path / "b.pt", tmp_path / "t", to="trainer", world_size=1)
    ckpttool.convert(tmp_path / "t", tmp_path / "back.pt", to="full")
    for file in ("mean.pt", "own.pt", "t/pytorch_model.bin", "back.pt"):
        tree = torch.load(tmp_path / file, weights_only=True)
        model = nn.Sequential(Scaled(2, 2))
        model.load_state_dict(tree.get("model", tree))
        assert model[0].scale == {"amax": 2.0, "history": [1, 2]}, file
