"""Megatron-LM's files of ranks that do not belong together, that contradict their arguments, or that Megatron-LM does not write."""

from __future__ import annotations

import io
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peers import load_dcp, load_full
from test_megatron_ranks import MODEL, OPTIMIZER, changed, load, odd, rewrite, unpacked

import ckpttool
from ckpttool.errors import Corrupt, Unsupported

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
__all__ = ["unpacked"]
Unpack = Callable[[str], Path]
LAYER = "decoder.layers.0."


def everywhere(source: Path, change: Callable[[Any], Any]) -> Path:
    """Change the files of all ranks."""
    for path in source.glob(f"*/{MODEL}"):
        rewrite(path, change)
    return source


def argument(name: str, x: Any) -> Callable[[Any], None]:
    """Changes one argument of the job in a file."""
    return lambda tree: setattr(tree["args"], name, x)


def weight(name: str, x: Any) -> Callable[[Any], None]:
    """Puts a parameter into the model of a file, or what `x` makes of the old one."""

    def change(tree: Any) -> None:
        tree["model"][name] = x(tree["model"][name]) if callable(x) else x

    return change


@pytest.mark.parametrize(
    ("case", "pairs"),
    [
        ("tp2_plain", ["00", "01"]),
        ("tp2_pp2", ["00_000", "01_000"]),
        ("tp2_pp2", ["00_000", "00_001", "01_000", "01_001"]),
        ("vpp2", ["00_000", "00_001"]),
        ("ep2", ["00_000", "00_001"]),
        ("tp2_ep2_etp1", ["00_000", "01_001"]),
    ],
)
def test_exchanged_folders_are_refused(case: str, pairs: list[str], unpacked: Unpack, tmp_path: Path) -> None:
    source = changed(unpacked, case, tmp_path)
    for a, b in zip(pairs[::2], pairs[1::2], strict=True):
        (source / f"mp_rank_{a}").rename(source / "aside")
        (source / f"mp_rank_{b}").rename(source / f"mp_rank_{a}")
        (source / "aside").rename(source / f"mp_rank_{b}")
    with pytest.raises(Corrupt, match=rf"rank [123] of the job wrote mp_rank_{pairs[0]}, .* exchanged"):
        ckpttool.open(source)
    everywhere(source, argument("rank", 0))  # a tool that writes all folders from one process
    ckpttool.open(source).close()


def test_a_folder_copied_over_another_is_refused(unpacked: Unpack, tmp_path: Path) -> None:
    source = changed(unpacked, "tp2_pp2", tmp_path)
    shutil.rmtree(source / "mp_rank_01_000")
    shutil.copytree(source / "mp_rank_00_000", source / "mp_rank_01_000")
    with pytest.raises(Corrupt, match="rank 0 of the job wrote mp_rank_00_000, and rank 0 wrote mp_rank_01_000"):
        ckpttool.open(source)


def test_arguments_of_millions_of_ranks_are_refused_at_once(unpacked: Unpack, tmp_path: Path) -> None:
    source = everywhere(changed(unpacked, "ep2", tmp_path), argument("expert_model_parallel_size", 10**12))
    began = time.process_time()
    with pytest.raises(
        Corrupt, match=r"999999999998 of its folders are missing: mp_rank_00_002, .* and 999999999990 more"
    ):
        ckpttool.open(source)
    assert time.process_time() - began < 2


@pytest.mark.parametrize("x", [None, 0, ""])
def test_an_argument_that_is_none_of_a_type_means_what_it_means_to_megatron(
    x: Any, unpacked: Unpack, tmp_path: Path
) -> None:
    """`not args.untie_embeddings_and_output_weights`: the copy of the embedding on the last stage is no parameter of its own."""
    source = changed(unpacked, "pp2_fp32", tmp_path / "a")
    everywhere(source, argument("untie_embeddings_and_output_weights", x))
    found = ckpttool.diff(unpacked("pp2_fp32") / "legacy" / source.name, source)
    assert found.only_in_a == found.only_in_b == [] and list(found.values) == [
        "extra.args.untie_embeddings_and_output_weights"
    ]


def test_a_gate_that_the_arguments_deny_is_refused(unpacked: Unpack, tmp_path: Path) -> None:
    source = everywhere(changed(unpacked, "tp2_plain", tmp_path), argument("swiglu", False))
    with pytest.raises(Unsupported, match=r"20 rows .* linear_fc2 10 columns, which are not one matrix without a gate"):
        ckpttool.open(source)


@pytest.mark.parametrize(
    ("name", "x", "why"),
    [
        (f"{LAYER}mlp.linear_fc1.weight", torch.tensor(1.0), r"has the shape \[\] on a rank"),
        (f"{LAYER}mlp.linear_fc2.weight", torch.ones(5), r"has the shape \[5\] on a rank"),
        (f"{LAYER}self_attention.linear_q_down_proj.weight", torch.tensor(1.0), r"has the shape \[\] on a rank"),
        (5, torch.ones(2), "the key 5 is not text"),
        ("decoder", {"final_layernorm": {"weight": torch.ones(2)}}, "makes a name that another key makes"),
    ],
)
def test_parameters_that_are_none_of_megatron_s_are_refused(
    name: Any, x: Any, why: str, unpacked: Unpack, tmp_path: Path
) -> None:
    source = changed(unpacked, "tp2_plain", tmp_path)
    rewrite(source / "mp_rank_01" / MODEL, weight(name, x))
    with pytest.raises(Corrupt, match=why):
        ckpttool.open(source)


@pytest.mark.parametrize(
    "name", ["decoder.layers.{}.x", LAYER + "mlp.experts.local_experts.{}.x", LAYER + "mlp.experts.linear_fc1.weight{}"]
)
def test_numbers_of_thousands_of_digits_are_parts_of_names(name: str, unpacked: Unpack, tmp_path: Path) -> None:
    name = name.format("9" * 5000)
    source = everywhere(changed(unpacked, "ones", tmp_path), weight(name, torch.ones(2)))
    everywhere(source, lambda tree: tree.update({"model" + "9" * 5000: 3}))
    ckpttool.convert(source, tmp_path / "out.pt", to="full", only=["model"])
    assert name in load_full(tmp_path / "out.pt")["model"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (odd(["optimizer", "state"], [1]), r"the state of its optimizer is \[1\]"),
        (
            odd(["optimizer", "state", 99], {"exp_avg": torch.ones(3)}),
            r"state of \['99'\], which are in none of its param groups",
        ),
        (odd(["optimizer", "param_groups", 0, "params"], []), "which are in none of its param groups"),
        (odd(["fp32_from_fp16_params"], 5), "the fp32 copies in its optimizer are 5"),
        (odd(["fp32_from_fp16_params"], lambda copies: copies[:1]), "not a list of tensors for each param group"),
        (odd(["fp32_from_fp16_params", 0, 2], None), "not a list of tensors for each param group"),
        (
            odd(["optimizer", "state", 2, "exp_avg"], lambda t: t.t().contiguous().t()),
            "not contiguous tensors of one shape",
        ),
    ],
)
def test_an_optimizer_that_would_lose_something_is_refused(
    change: Callable[[Any], None], why: str, unpacked: Unpack, tmp_path: Path
) -> None:
    source = everywhere(changed(unpacked, "tp2_plain", tmp_path), change)
    with pytest.raises((Corrupt, Unsupported), match=why):
        ckpttool.convert(source, tmp_path / "out.pt", to="full")
    assert not (tmp_path / "out.pt").exists()


def test_a_slot_of_another_optimizer_in_the_buffers_is_refused(unpacked: Unpack, tmp_path: Path) -> None:
    source = changed(unpacked, "ones", tmp_path)

    def add(tree: Any) -> None:
        slots = next(iter(tree[0].values()))
        slots["momentum"] = slots["exp_avg"].clone()

    rewrite(source / "mp_rank_00" / OPTIMIZER, add)
    with pytest.raises(Unsupported, match=r"its buffer 0 has \['momentum'\] besides param, exp_avg, exp_avg_sq"):
        ckpttool.open(source)


def test_fp32_copies_are_kept_before_the_first_step(unpacked: Unpack, tmp_path: Path) -> None:
    """torch's optimizer has no state then; the copies are all that there is."""
    source = everywhere(changed(unpacked, "tp2_plain", tmp_path), odd(["optimizer", "state"], {}))
    ckpttool.convert(source, tmp_path / "out.pt", to="full")
    copies = load(source / "mp_rank_00" / MODEL)["optimizer"]["fp32_from_fp16_params"][0]
    kept = load_full(tmp_path / "out.pt")["extra"]["master"]["embedding.word_embeddings.weight"]
    assert torch.equal(kept[: len(copies[0])], copies[0])


def test_steps_are_compared_without_checksums(unpacked: Unpack, tmp_path: Path) -> None:
    """The format of torch before 1.6 has none."""
    source = changed(unpacked, "tp2_plain", tmp_path)
    path = source / "mp_rank_01" / MODEL
    torch.save(load(path), path, _use_new_zipfile_serialization=False)
    assert ckpttool.diff(unpacked("tp2_plain") / "legacy" / source.name, source).equal
    tree = load(path)
    odd(["optimizer", "state", 2, "step"], torch.tensor(4.0))(tree)
    torch.save(tree, path, _use_new_zipfile_serialization=False)
    with pytest.raises(Corrupt, match="is at another step than on other ranks"):
        ckpttool.convert(source, tmp_path / "out.pt", to="full")


def test_states_of_transformer_engine_before_1_14_are_carried(unpacked: Unpack, tmp_path: Path) -> None:
    """They are io.BytesIO of a pickle, which stays as it is."""
    name, state = f"{LAYER}mlp.linear_fc1._extra_state", b"\x80\x02cos\nsystem\n(U\x04exitR."
    source = everywhere(changed(unpacked, "tp2_plain", tmp_path), weight(name, io.BytesIO(state)))
    ckpttool.convert(source, tmp_path / "out", to="megatron", world_size=2)
    found = ckpttool.diff(source, tmp_path / "out")
    assert found.only_in_a == [] and found.values == {}
    (kept,) = load_dcp(tmp_path / "out")[f"{name}/shard_0_1"]
    assert type(kept) is io.BytesIO and kept.getvalue() == state


def test_ranks_may_have_the_learning_rate_in_a_tensor(unpacked: Unpack, tmp_path: Path) -> None:
    def change(tree: Any) -> None:
        for group in tree["optimizer"]["optimizer"]["param_groups"]:
            group["lr"] = torch.tensor(group["lr"])
        tree["iteration"] = torch.tensor(tree["iteration"])

    source = everywhere(changed(unpacked, "tp2_plain", tmp_path), change)
    done = ckpttool.convert(source, tmp_path / "x.pt", to="full")
    assert done.verified and not done.dropped
    tree = load_full(tmp_path / "x.pt")
    assert all(float(g["lr"]) > 0 for g in tree["optim"]["param_groups"])
    rewrite(source / "mp_rank_01" / MODEL, lambda tree: tree.update(iteration=torch.tensor(4)))
    with pytest.raises(Corrupt, match="the iteration here: 4; in mp_rank_00: 3"):
        ckpttool.open(source)


class ByName:
    """Pickles as the member of an enumeration that Python 3.11.0 to 3.11.3 pickles, Debian 12's among them."""

    def __init__(self, of: type, name: str) -> None:
        self.of, self.name = of, name

    def __reduce__(self) -> Any:
        return getattr, (self.of, self.name)


def test_an_argument_that_python_3_11_2_pickled_by_its_name_is_carried(unpacked: Unpack, tmp_path: Path) -> None:
    source = changed(unpacked, "tp2_plain", tmp_path)
    backends = type(load(source / "mp_rank_00" / MODEL)["args"].attention_backend)
    everywhere(source, argument("attention_backend", ByName(backends, "flash")))
    ckpttool.convert(source, tmp_path / "x.pt", to="full")
    done = ckpttool.convert(tmp_path / "x.pt", tmp_path / "out", to="megatron", world_size=2)
    assert done.verified and not done.dropped
    found = load_full(tmp_path / "x.pt")["extra"]["args"]["attention_backend"]
    assert found == {"class": "megatron.core.transformer.enums.AttnBackend", "value": 1}
    assert load(tmp_path / "out" / "common.pt")["args"].attention_backend is backends.flash
    for rank in range(
        2
    ):  # what np.random.set_state takes, which a file of torch.load(weights_only=True) has as a tensor
        before = load(source / f"mp_rank_0{rank}" / MODEL)["rng_state"][0]["np_rng_state"]
        ((after,),) = load_dcp(tmp_path / "out")[f"rng_state/shard_0.{rank}_1.2"]
        assert after["np_rng_state"][0] == "MT19937" and after["np_rng_state"][2:] == before[2:]
        assert after["np_rng_state"][1].numpy().tobytes() == before[1].tobytes()
