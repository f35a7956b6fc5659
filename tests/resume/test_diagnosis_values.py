"""diagnosis of values: which fault left a factor, a root, an average, a merged adapter, or one stale file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from resume.test_diagnosis import blamed, files
from resume.test_judge import FQNS, edit_state, job, shape_of

import ckpttool
from ckpttool.resume.compare.verdict import Cause
from ckpttool.resume.trace.side_state import make_array_mark

Tree = dict[str, Any]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with files(tmp_path_factory.mktemp("original"), "a") as opened:
        yield opened


@pytest.fixture
def both(original: Any, tmp_path: Path) -> Callable[..., list[Cause]]:
    """What is blamed where files were changed so, and these names have other fingerprints."""

    def found(change: Callable[[Tree], Any], names: Callable[[str], bool]) -> list[Cause]:
        with files(tmp_path, "b", change) as spoiled:
            return blamed(job(), edit_state(job(), names), opened=(original, spoiled))

    return found


Q = "model.layers.1.self_attn.q_proj.weight"


def moments(n: str) -> bool:
    return n.startswith("optim.") and not n.endswith(".step")


def times(first: float, second: float) -> Callable[[Tree], None]:
    def change(tree: Tree) -> None:
        for s in tree["optim"]["state"].values():
            s["exp_avg"] *= first
            s["exp_avg_sq"] *= second

    return change


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (
            32768.0, 32768.0**2,
            "(exp_avg x32768, exp_avg_sq x1.07374e+09): their gradients were multiplied by a loss scale of 32768",
        ),
        (4.0, 16.0, "(exp_avg x4, exp_avg_sq x16): their gradients were summed over 4 ranks instead of averaged"),
        (3.0, 9.0, "(exp_avg x3, exp_avg_sq x9): their gradients were summed over 3 ranks or accumulation steps instead "
         "of averaged"),
        (0.25, 1 / 16, "(exp_avg x0.25, exp_avg_sq x0.0625): their gradients were divided by 4 once too often (the "
         "number of ranks, or of accumulation steps)"),
        (3.0, 5.0, "(exp_avg x3, exp_avg_sq x5)"),
        (1.37, 1.37**2, "(exp_avg x1.37, exp_avg_sq x1.8769)"),
        (-4.0, 16.0, "(exp_avg x-4, exp_avg_sq x16)"),
    ],
)  # fmt: skip
def test_factors_of_moments_tell_what_left_them(first: float, second: float, text: str, both: Any) -> None:
    (found,) = both(times(first, second), moments)
    assert (found.kind, found.text) == ("scaled", f"all 78 moments are multiplied {text}")


@pytest.mark.slow
def test_a_factor_of_the_first_moment_alone_is_not_that_of_gradients(both: Any) -> None:
    (found,) = both(times(10.0, 1.0), lambda n: n.endswith(".exp_avg"))
    assert (found.kind, found.text) == ("scaled", "all 39 exp_avg tensors are multiplied (exp_avg x10)")


@pytest.mark.slow
def test_a_scale_that_the_scaler_has_is_named_though_it_is_small(original: Any, tmp_path: Path) -> None:
    with files(tmp_path, "b", times(16.0, 256.0)) as b:
        a = original
        reference, got = job(), edit_state(job(), moments)
        assert "summed over 16 ranks or accumulation" in blamed(reference, got, opened=(a, b))[0].text
        reference.values["scaler.scale"] = 16.0
        assert "multiplied by the loss scale, 16" in blamed(reference, got, opened=(a, b))[0].text


@pytest.mark.slow
def test_bias_correction_is_that_of_each_group_and_step(original: Any, tmp_path: Path) -> None:
    slow = set(FQNS[10:])

    def corrected(tree: Tree, swapped: bool = False) -> None:
        for n, s in tree["optim"]["state"].items():
            betas = (0.8, 0.99) if (n in slow) != swapped else (0.9, 0.95)
            s["exp_avg"] /= 1 - betas[0] ** 12
            s["exp_avg_sq"] /= 1 - betas[1] ** 12

    def young(trace: Any) -> Any:
        trace.scalars = dict.fromkeys(trace.scalars, 12.0)
        trace.groups = [
            {"betas": (0.9, 0.95), "params": [n for n in FQNS if n not in slow]},
            {"betas": (0.8, 0.99), "params": [n for n in FQNS if n in slow]},
        ]
        return trace

    with files(tmp_path, "b", corrected) as b:
        (found,) = blamed(young(job()), young(edit_state(job(), moments)), opened=(original, b))
        assert found.kind == "scaled"
        assert found.text.endswith(
            "): they were divided by 1 - beta^step, so that the bias correction is applied twice"
        )
        assert "exp_avg x1.07379 to x1.39359" in found.text
    with files(tmp_path, "c", lambda tree: corrected(tree, True)) as b:
        (found,) = blamed(young(job()), young(edit_state(job(), moments)), opened=(original, b))
        assert "bias correction" not in found.text


@pytest.mark.slow
def test_one_scaled_tensor_says_only_its_factor(both: Any) -> None:
    def change(tree: Tree) -> None:
        tree["model"][Q] *= 2

    (found,) = both(change, lambda n: n == f"model.{Q}")
    assert found.text == "layer 1, self_attn.q_proj holds the reference's values times 2"


@pytest.mark.slow
def test_roots_in_a_slot_are_one_cause(both: Any) -> None:
    def change(tree: Tree) -> None:
        for s in tree["optim"]["state"].values():
            s["exp_avg_sq"].sqrt_()

    (found,) = both(change, lambda n: n.endswith(".exp_avg_sq"))
    assert (found.kind, found.text) == (
        "root", "all 39 exp_avg_sq tensors hold the square root of the reference's values",
    )  # fmt: skip


def close(t: Any) -> None:
    t *= (
        0.03 * torch.randn(t.shape, generator=torch.Generator().manual_seed(1))
    ).exp()  # averages of squares stay above 0


@pytest.mark.slow
def test_moments_of_another_step_are_called_moments(both: Any) -> None:
    def change(tree: Tree) -> None:
        for s in tree["optim"]["state"].values():
            close(s["exp_avg"])
            close(s["exp_avg_sq"])

    (found,) = both(change, moments)
    assert (found.kind, found.text) == (
        "close", "all 78 moments are close to the reference's: from another step, or computed differently; weights and the "
        "optimizer's steps are the reference's",
    )  # fmt: skip


@pytest.mark.slow
def test_rows_of_the_first_tensor_are_not_said_of_the_others(both: Any) -> None:
    def change(tree: Tree) -> None:
        for n in ("model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.weight"):
            rows = slice(16, 32) if "q_proj" in n else slice(0, 16)
            tree["model"][n][rows] = tree["model"][n][rows].bfloat16().float()

    (found,) = both(
        change,
        lambda n: n.startswith(("model.model.layers.1.self_attn.q", "model.model.layers.1.self_attn.k")),
    )
    assert found.text == "2 weights of layer 1 hold exactly the reference's values rounded to bfloat16"
    assert found.evidence[0].endswith("rounded to bfloat16, in rows 16:32 of 64")


@pytest.mark.slow
def test_what_was_done_besides_rounding_comes_before_the_rounding(both: Any) -> None:
    def change(tree: Tree) -> None:
        tree["model"] = {n: t.bfloat16().float() for n, t in tree["model"].items()}
        tree["model"][Q] = tree["model"][Q][:, [*range(16, 32), *range(16), *range(32, 64)]].contiguous()

    found = both(change, lambda n: n.startswith("model."))
    assert [(c.kind, len(c.tensors)) for c in found] == [("exchanged-columns", 1), ("rounded-bfloat16", 38)]


# ------------------------------------------------------------------------------------------- tensors from elsewhere


def averages(act: Callable[[Any], Any]) -> Callable[[Tree], None]:
    """A tree that has averages, and weights made of them."""

    def change(tree: Tree) -> None:
        tree["ema"] = {n: t * 0.99 + 0.001 for n, t in tree["model"].items()}
        for n in tree["model"]:
            if ".layers.0." in n:
                tree["model"][n] = act(tree["ema"][n].clone())

    return change


def with_averages(tree: Tree) -> None:
    tree["ema"] = {n: t * 0.99 + 0.001 for n, t in tree["model"].items()}


def layer0(n: str) -> bool:
    return n.startswith("model.model.layers.0.")


def test_averages_that_were_loaded_as_weights_have_a_fingerprint() -> None:
    a, b = job(), edit_state(job(), layer0)
    for t in (a, b):
        t.others = {f"extra.ema.{n}": b.state[f"model.{n}"] for n in FQNS}
    (found,) = blamed(a, b)
    assert (found.kind, found.text) == (
        "copied", "9 weights of layer 0 hold the values of extra.ema, loaded in their place",
    )  # fmt: skip
    assert len(found.tensors) == 9
    for t in (a, b):
        t.others = {f"extra.ema.{n}": ("float32", (4,), "11") for n in FQNS}
    assert [c.kind for c in blamed(a, b)] == ["weights-differ"]


@pytest.mark.slow
def test_averages_that_were_rounded_are_recognised_by_their_values(tmp_path: Path) -> None:
    with (
        files(tmp_path, "a", with_averages) as a,
        files(tmp_path, "b", averages(lambda t: t.bfloat16().float())) as b,
        files(tmp_path, "c", averages(lambda t: t + 0.001 * torch.rand_like(t))) as c,
    ):
        (found,) = blamed(job(), edit_state(job(), layer0), opened=(a, b))
        assert (found.kind, found.text) == (
            "copied", "9 weights of layer 0 hold exactly the values that the reference has in extra.ema rounded to bfloat16",
        )  # fmt: skip
        assert [x.kind for x in blamed(job(), edit_state(job(), layer0), opened=(a, c))] == ["close"]


def with_adapter(change: Callable[[Tree], None] | None = None) -> Callable[[Tree], None]:
    def act(tree: Tree) -> None:
        g = torch.Generator().manual_seed(5)
        module = Q.removesuffix(".weight")
        tree["model"][f"{module}.lora_A.default.weight"] = torch.randn((4, 64), generator=g)
        tree["model"][f"{module}.lora_B.default.weight"] = torch.randn((64, 4), generator=g)
        if change is not None:
            change(tree)

    return act


@pytest.mark.slow
@pytest.mark.parametrize(("wrong", "kind"), [(False, "lora-merged"), (True, "unrelated")])
def test_an_adapter_that_was_merged_and_kept_is_recognised(wrong: bool, kind: str, tmp_path: Path) -> None:
    def merged(tree: Tree) -> None:
        a, b = (tree["model"][Q.replace("weight", f"lora_{x}.default.weight")] for x in "AB")
        tree["model"][Q] += 2 * b @ (a.flip(1) if wrong else a)

    with files(tmp_path, "a", with_adapter()) as a, files(tmp_path, "b", with_adapter(merged)) as b:
        (found,) = blamed(job(), edit_state(job(), lambda n: n == f"model.{Q}"), opened=(a, b))
    assert found.kind == kind
    assert ("plus 2 times lora_b x lora_a: its adapter was merged" in found.text) is not wrong


# ---------------------------------------------------------------------------------------------------------- one file


def rank1(tree: Tree, which: Callable[[str], bool] = lambda n: True) -> None:
    """What rank 1 of 4 has is of another step."""
    state = tree["optim"]["state"]
    for n, t in tree["model"].items():
        for x in (t, state[n]["exp_avg"], state[n]["exp_avg_sq"]):
            part = -(-x.shape[0] // 4)
            if which(n):
                close(x[part : 2 * part])


def tensors(n: str) -> bool:
    return not n.endswith(".step")


@pytest.mark.slow
def test_a_stale_file_is_named_with_its_rank(both: Any) -> None:
    (found,) = both(rank1, tensors)
    assert (found.kind, found.text) == (
        "one-file", "every difference lies in __1_0.distcp (rank 1): its parts of 117 tensors (weights and "
        "optimizer state) are from another step, or were computed differently",
    )  # fmt: skip
    assert found.place is not None and found.place.startswith("__1_0.distcp, bytes ")
    assert len(found.tensors) == 117


@pytest.mark.slow
def test_a_stale_file_is_named_though_only_some_tensors_were_read(both: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpttool.resume.diagnosis.files._MORE", 0)
    (found,) = both(rank1, tensors)
    assert found.kind == "one-file"
    assert "109 tensors were not read; all have a part in it" in found.evidence


@pytest.mark.slow
def test_a_copy_in_one_file_shows_which_file_of_the_reference_was_read_wrongly(original: Any, tmp_path: Path) -> None:
    with files(tmp_path, "a") as a, files(tmp_path, "b", rank1), ckpttool.open(tmp_path / "b.pt") as b:
        (found,) = blamed(job(), edit_state(job(), tensors), opened=(a, b))
    assert found.kind == "one-file"
    assert found.text.startswith("every difference lies in __1_0.distcp (rank 1) of the reference: its parts")


def of_ranks(act: Callable[[Any, Any, Any], None]) -> Callable[[Tree], None]:
    """Act on what ranks 1 and 2 of 4 have of each tensor, given the tensor as it was."""

    def change(tree: Tree) -> None:
        state = tree["optim"]["state"]
        for n, t in tree["model"].items():
            for x in (t, state[n]["exp_avg"], state[n]["exp_avg_sq"]):
                part = -(-x.shape[0] // 4)
                old = x.clone()
                act(x[part : 2 * part], x[2 * part : 3 * part], (old[part : 2 * part], old[2 * part : 3 * part]))

    return change


@pytest.mark.slow
def test_a_copy_in_which_a_rank_has_the_parts_of_another_is_named_with_both(original: Any, tmp_path: Path) -> None:
    # in files of ranks, this is refused before anything is loaded
    tree = torch.load(original.source.root.replace("/a", "/a.pt"), weights_only=True)
    of_ranks(lambda one, two, old: two.copy_(old[0]))(tree)
    torch.save(tree, tmp_path / "b.pt")
    with ckpttool.open(tmp_path / "b.pt") as b:
        (found,) = blamed(job(), edit_state(job(), tensors), opened=(original, b))
    assert (found.kind, found.text) == (
        "one-file", "every difference lies in __2_0.distcp (rank 2) of the reference: its parts of 117 tensors (weights and "
        "optimizer state) are those of __1_0.distcp",
    )  # fmt: skip


@pytest.mark.slow
def test_two_files_that_are_exchanged_are_named(both: Any) -> None:
    def swap(one: Any, two: Any, old: Any) -> None:
        one.copy_(old[1])
        two.copy_(old[0])

    (found,) = both(of_ranks(swap), tensors)
    assert (found.kind, found.text) == (
        "exchanged", "__1_0.distcp (rank 1) and __2_0.distcp (rank 2) are exchanged: every difference lies in their parts of "
        "117 tensors (weights and optimizer state)",
    )  # fmt: skip


@pytest.mark.slow
def test_two_files_of_another_step_are_not_called_exchanged(both: Any) -> None:
    def stale(one: Any, two: Any, old: Any) -> None:
        close(one)
        close(two)

    assert [c.kind for c in both(of_ranks(stale), tensors)] == ["close"]


@pytest.mark.slow
def test_few_tensors_of_a_file_do_not_make_it_the_cause(both: Any) -> None:
    def last_rows(tree: Tree) -> None:
        state = tree["optim"]["state"]["lm_head.weight"]
        for t in (tree["model"]["lm_head.weight"], state["exp_avg"], state["exp_avg_sq"]):
            t[-4:] = 0

    (found,) = both(last_rows, lambda n: "lm_head" in n and tensors(n))
    assert found.kind == "zero-rows"


@pytest.mark.slow
def test_half_of_the_tensors_of_a_file_do_not_make_it_the_cause(both: Any) -> None:
    half = set(FQNS[::2])
    found = both(lambda tree: rank1(tree, half.__contains__), lambda n: tensors(n) and any(f in n for f in half))
    assert "one-file" not in [c.kind for c in found]


@pytest.mark.slow
def test_a_file_with_everything_in_it_is_no_cause(tmp_path: Path) -> None:
    for name, change in (("a", None), ("b", rank1)):
        files(tmp_path, name, change).close()
    with ckpttool.open(tmp_path / "a.pt") as a, ckpttool.open(tmp_path / "b.pt") as b:
        assert [c.kind for c in blamed(job(), edit_state(job(), tensors), opened=(a, b))] == ["close"]


# ------------------------------------------------------------------------------------------ names that used to be wrong


@pytest.mark.slow
@pytest.mark.parametrize("other", ["model.layers.3.mlp.zeros", "model.layers.3.lora_B.weight"])
def test_zeros_are_zeros_and_not_the_bytes_of_another_tensor(other: str, original: Any, tmp_path: Path) -> None:
    """Zero points of a quantised layer, and the zeros of a LoRA, have the fingerprint of any zeros."""
    name, shape = f"optim.state.{FQNS[1]}.exp_avg_sq", shape_of(FQNS[1])
    nothing = make_array_mark(torch.zeros(shape))
    reference, got = job(), job()
    for trace in (reference, got):
        trace.state[other] = ("int8" if other.endswith("zeros") else "float32", shape, nothing[2])
        trace.stored[other] = nothing[2]
    got.state[name], got.stored[name] = nothing, nothing[2]
    with files(tmp_path, "b", lambda tree: tree["optim"]["state"][FQNS[1]]["exp_avg_sq"].zero_()) as spoiled:
        (found,) = blamed(reference, got, opened=(original, spoiled))
    assert (found.kind, found.text) == ("zero", "layer 0, self_attn.q_proj, exp_avg_sq is all zeros")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fqn", "kind"), [("model.layers.1.mlp.up_proj.weight", "interleaved-rows"), (Q, "rope")]
)  # fmt: skip
def test_rows_dealt_in_turn_are_rope_in_attention_alone(fqn: str, kind: str, both: Callable[..., list[Cause]]) -> None:
    order = [k // 2 + 32 * (k % 2) for k in range(64)]
    (found,) = both(lambda t: t["model"][fqn].copy_(t["model"][fqn][order].clone()), lambda n: n == f"model.{fqn}")
    assert found.kind == kind, found.text


@pytest.mark.parametrize(
    ("pairs", "text"),
    [
        ([("blocks.0.n1.weight", "blocks.0.n2.weight")], "n1 and n2 are exchanged in layer 0 (weights)"),
        ([("blocks.0.attn.qkv.bias", "blocks.0.attn.qkv.weight")], "attn.qkv.bias and attn.qkv.weight are exchanged in layer 0 (weights)"),
        ([("head.norm.bias", "head.norm.weight")], "head.norm.bias and head.norm.weight are exchanged (weights)"),
        ([(f"blocks.{i}.{m}.bias", f"blocks.{i}.{m}.weight") for i in (0, 1) for m in ("n1", "mlp.fc")],
         "bias and weight of n1, mlp.fc are exchanged in layers 0, 1 (weights)"),
    ],
)  # fmt: skip
def test_exchanged_tensors_have_the_names_of_their_modules(pairs: list[tuple[str, str]], text: str) -> None:
    reference, got = job(), job()
    for k, two in enumerate(pairs):
        marks = [f"{k:08x}{i:08x}" for i in range(2)]
        for fqn, ours, theirs in zip(two, marks, marks[::-1], strict=True):
            reference.state[f"model.{fqn}"], got.state[f"model.{fqn}"] = (("float32", (8,), x) for x in (ours, theirs))
            got.stored[f"model.{fqn}"] = theirs
    (found,) = blamed(reference, got)
    assert (found.kind, found.text) == ("exchanged", text)
