"""Megatron-LM's files of model-parallel ranks (fixtures/megatron/legacy_jobs.py) against what dist_checkpointing saved of the same live job."""

from __future__ import annotations

import pickle
import shutil
import tarfile
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import peers
import pytest
import torch
from peers import difference, load_full
from torch import Tensor

import ckpttool
from ckpttool.engine.discover.detection import find_checkpoints
from ckpttool.errors import Corrupt, NotRecognised, Unsafe, Unsupported
from ckpttool.storage.source import Source

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
ARCHIVES = peers.FIXTURES / "megatron" / "legacy"
MODELS = ["biases", "latent"]  # without optimizer
CASES = sorted({p.name.removesuffix(".tar.xz") for p in ARCHIVES.glob("*.tar.xz")} - set(MODELS))
ITERATION = "iter_0000003"
MODEL, OPTIMIZER = "model_optim_rng.pt", "distrib_optim.pt"


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A case on disk: ckpt/ of dist_checkpointing and legacy/."""
    root = tmp_path_factory.mktemp("ranks")

    @cache
    def unpack(case: str) -> Path:
        with tarfile.open(ARCHIVES / f"{case}.tar.xz") as archive:
            archive.extractall(root / case, filter="data")
        return root / case

    return unpack


def load(path: Path) -> Any:
    """A file as Megatron-LM loads it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("megatron.core", exc_type=ImportError)  # whose enumerations the arguments hold
        return torch.load(path, weights_only=False)


def changed(unpacked: Callable[[str], Path], case: str, to: Path) -> Path:
    """A copy of the files of ranks."""
    return Path(shutil.copytree(unpacked(case) / "legacy" / ITERATION, to / ITERATION))


def rewrite(path: Path, change: Callable[[Any], Any]) -> None:
    """Write a file again after `change`, which may return another tree."""
    tree = load(path)
    torch.save(change(tree) or tree, path)


@pytest.mark.parametrize("case", CASES)
def test_a_state_is_that_of_the_other_format_bit_for_bit(
    case: str, unpacked: Callable[[str], Path], tmp_path: Path
) -> None:
    theirs, ranks = unpacked(case) / "ckpt" / ITERATION, unpacked(case) / "legacy" / ITERATION
    found = ckpttool.diff(theirs, ranks)
    assert found.only_in_a == [] and found.only_in_b == ["extra.args.rank"]
    assert found.data == [] and found.shapes == {} and found.dtypes == {}
    if case != "vpp2":
        assert not found.values
        return
    groups = []  # whose members dist_checkpointing lists rank after rank
    for source in (theirs, ranks):
        ckpttool.convert(source, tmp_path / f"{len(groups)}.pt", to="full", only=["optim"])
        groups.append([set(g["params"]) for g in load_full(tmp_path / f"{len(groups)}.pt")["optim"]["param_groups"]])
    assert groups[0] == groups[1] and all(groups[0])


@pytest.mark.parametrize("case", MODELS)
def test_every_kind_of_parameter_is_cut_as_the_other_format_says(case: str, unpacked: Callable[[str], Path]) -> None:
    source = unpacked(case) / "legacy" / ITERATION
    found = ckpttool.diff(unpacked(case) / "ckpt" / ITERATION, source)
    assert found.equal, found
    with ckpttool.open(source) as opened:
        names = {n.split("layers.1.")[-1].removeprefix("model.") for n in opened}
    assert names >= {
        "biases": {"embedding.position_embeddings.weight", "self_attention.linear_qkv.bias", "self_attention.linear_proj.bias", "mlp.linear_fc1.bias"},
        "latent": {"self_attention.linear_q_down_proj.weight", "self_attention.linear_kv_up_proj.weight", "mlp.shared_experts.linear_fc1.weight",
                   "mlp.router.expert_bias", "mlp.experts.experts.linear_fc2.weight", "pre_mlp_layernorm.weight"},
    }[case]  # fmt: skip


def test_a_matrix_that_is_cut_by_some_layers_alone_needs_the_arguments(
    unpacked: Callable[[str], Path], tmp_path: Path
) -> None:
    """Megatron-Core's own layers cut the down projections of latent attention, those of Transformer Engine do not."""
    source = changed(unpacked, "latent", tmp_path)
    for rank in range(2):
        rewrite(source / f"mp_rank_{rank:02d}" / MODEL, lambda tree: delattr(tree["args"], "kv_lora_rank"))
    with pytest.raises(Unsupported, match=r'linear_kv_down_proj\.weight" has 7 rows .* not among the arguments'):
        ckpttool.open(source)


def test_the_jobs_are_of_every_kind(unpacked: Callable[[str], Path]) -> None:
    folders = {c: sorted(p.name for p in (unpacked(c) / "legacy" / ITERATION).iterdir()) for c in CASES}
    assert folders["tp2_pp2"] == [f"mp_rank_{t:02d}_{p:03d}" for t in range(2) for p in range(2)]
    assert folders["ep2"] == ["mp_rank_00_000", "mp_rank_00_001"] == folders["vpp2"]
    assert folders["tp2_ep2_etp1"] == ["mp_rank_00_000", "mp_rank_01_001"]  # experts are not cut, all else is
    assert folders["tp2_plain"] == ["mp_rank_00", "mp_rank_01"] and folders["ones"] == ["mp_rank_00"]
    stages = [
        load(unpacked("tp2_pp2") / "legacy" / ITERATION / f"mp_rank_00_{p:03d}" / MODEL)["model"] for p in range(2)
    ]
    assert [len({n.split(".")[2] for n in m if ".layers." in n}) for m in stages] == [2, 1]  # stages of unequal depth
    weights = load(unpacked("ones") / "legacy" / ITERATION / "mp_rank_00" / MODEL)["model"]
    assert sum(bool((t == 1).all()) for t in weights.values() if t is not None) == 5
    bucket = load(unpacked("dp2_buckets") / "legacy" / ITERATION / "mp_rank_00" / OPTIMIZER)
    assert next(iter(bucket[0].values()))["numel_unpadded"] % 64  # a bucket ends between two multiples of 64


@pytest.mark.parametrize(("case", "to"), [*((c, "dcp") for c in CASES), ("tp2_pp2", "megatron"), ("tp2_pp2", "zero3")])
def test_other_layouts_take_the_whole_state(
    case: str, to: str, unpacked: Callable[[str], Path], tmp_path: Path
) -> None:
    source = unpacked(case) / "legacy" / ITERATION
    done = ckpttool.convert(source, tmp_path / "out", to=to, world_size=3, drop=to == "zero3")
    assert done.verified and (to == "zero3" or not done.dropped)
    assert any(
        "rounds to the weight bit for bit" in n or (case == "pp2_fp32" and "rule for param groups" in n)
        for n in done.notes
    )
    if to != "zero3":
        assert ckpttool.diff(source, tmp_path / "out").equal
        return
    ckpttool.convert(tmp_path / "out", tmp_path / "back.pt", to="full")
    with ckpttool.open(source) as live:
        wanted = {n: live[n].torch() for n in live if n.startswith("optim.state.")}
    slots = load_full(tmp_path / "back.pt")["optim"]["state"]
    found = {f"optim.state.{n}.{s}": t for n, of in slots.items() for s, t in of.items() if s != "step"}
    assert difference(found, wanted) == []


def test_the_model_of_transformers_has_the_logits_of_the_other_format(
    unpacked: Callable[[str], Path], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    LlamaConfig(
        architectures=["LlamaForCausalLM"], vocab_size=131, hidden_size=8, intermediate_size=20, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=6, tie_word_embeddings=False, rms_norm_eps=1e-6,
    ).save_pretrained(tmp_path / "config")  # fmt: skip
    logits = []
    for kind in ("ckpt", "legacy"):
        source = unpacked("tp2_pp2") / kind / ITERATION
        done = ckpttool.convert(source, tmp_path / kind, to="hf", config=str(tmp_path / "config"))
        assert any("by the map megatron" in n for n in done.notes)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / kind).eval()
        with torch.no_grad():
            logits.append(model(torch.arange(1, 130)[None]).logits)
    assert torch.equal(*logits) and logits[0].std() > 0


# ---------------------------------------------------------------------------------------------- what does not fit together


def test_missing_ranks_are_named(unpacked: Callable[[str], Path], tmp_path: Path) -> None:
    source = changed(unpacked, "tp2_pp2", tmp_path)
    shutil.rmtree(source / "mp_rank_01_000")
    shutil.rmtree(source / "mp_rank_00_001")
    with pytest.raises(Corrupt, match="2 of its folders are missing: mp_rank_01_000, mp_rank_00_001"):
        ckpttool.open(source)


@pytest.mark.parametrize("lost", ["mp_rank_01_000", f"mp_rank_00_001/{OPTIMIZER}", f"mp_rank_00_001/{MODEL}"])
def test_the_list_of_a_run_says_what_a_step_lacks(lost: str, unpacked: Callable[[str], Path], tmp_path: Path) -> None:
    source = changed(unpacked, "tp2_pp2", tmp_path)
    shutil.copytree(source, tmp_path / "iter_0000006")
    shutil.copytree(unpacked("tp2_ep2_etp1") / "legacy" / ITERATION, tmp_path / "iter_0000009")
    gone = tmp_path / "iter_0000006" / lost
    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("9")
    found = {Path(c.path).name: c for c in find_checkpoints(Source(str(tmp_path))).checkpoints}
    assert {n: c.complete for n, c in found.items()} == {ITERATION: True, "iter_0000006": False, "iter_0000009": True}
    assert found["iter_0000006"].lacks == f"no {lost}" and found["iter_0000009"].newest


@pytest.mark.parametrize("part", ["", f"/{MODEL}", f"/{OPTIMIZER}"])
def test_one_rank_s_files_are_no_checkpoint(part: str, unpacked: Callable[[str], Path]) -> None:
    source = unpacked("tp2_pp2") / "legacy" / ITERATION
    kind = "file" if part else "folder"
    with pytest.raises(
        NotRecognised,
        match=rf"mp_rank_01_000{part} is one {kind} of the megatron checkpoint {source}; give that folder",
    ):
        ckpttool.open(f"{source}/mp_rank_01_000{part}")


def test_a_folder_of_another_job_is_refused(unpacked: Callable[[str], Path], tmp_path: Path) -> None:
    source = changed(unpacked, "tp2_plain", tmp_path)
    shutil.copytree(source / "mp_rank_01", source / "mp_rank_02")
    with pytest.raises(Corrupt, match="mp_rank_02: is of no rank of a job of 2 tensor-"):
        ckpttool.open(source)


def test_files_of_two_saves_are_refused(unpacked: Callable[[str], Path], tmp_path: Path) -> None:
    source = changed(unpacked, "tp2_plain", tmp_path)
    rewrite(source / "mp_rank_01" / MODEL, lambda tree: tree.update(iteration=4))
    with pytest.raises(Corrupt, match="the iteration here: 4; in mp_rank_00: 3"):
        ckpttool.open(source)


def test_a_norm_that_differs_between_tensor_parallel_ranks_is_refused(
    unpacked: Callable[[str], Path], tmp_path: Path
) -> None:
    source = changed(unpacked, "tp2_pp2", tmp_path)

    def one_more(tree: Any) -> None:
        tree["model"]["decoder.layers.0.input_layernorm.weight"][3] += 0.5

    rewrite(source / "mp_rank_01_001" / MODEL, one_more)
    with pytest.raises(
        Unsupported,
        match="is the same on every rank in Megatron-LM, and differs between mp_rank_00_001 and mp_rank_01_001",
    ) as e:
        ckpttool.convert(source, tmp_path / "out.pt", to="full", only=["model"])
    assert '"decoder.layers.2.self_attention.linear_qkv.layer_norm_weight"' in str(e.value)


@pytest.mark.parametrize("equal", [True, False])
def test_a_name_without_a_rule_is_read_only_where_all_ranks_have_the_same(
    equal: bool, unpacked: Callable[[str], Path], tmp_path: Path
) -> None:
    source = changed(unpacked, "tp2_plain", tmp_path)
    for rank in range(2):

        def add(tree: Any, rank: int = rank) -> None:
            tree["model"]["decoder.layers.0.mixer.in_proj.weight"] = torch.full(
                (4, 3), float(rank + 1 if not equal else 1)
            )

        rewrite(source / f"mp_rank_{rank:02d}" / MODEL, add)
    if equal:
        ckpttool.convert(source, tmp_path / "out.pt", to="full", only=["model"])
        assert load_full(tmp_path / "out.pt")["model"]["decoder.layers.0.mixer.in_proj.weight"].shape == (4, 3)
        return
    with pytest.raises(
        Unsupported,
        match=r'"decoder\.layers\.0\.mixer\.in_proj\.weight" differs between mp_rank_00 and mp_rank_01, and no rule',
    ):
        ckpttool.convert(source, tmp_path / "out.pt", to="full", only=["model"])


def test_two_copies_of_tied_embeddings_that_differ_are_refused(unpacked: Callable[[str], Path], tmp_path: Path) -> None:
    source = changed(unpacked, "pp2_fp32", tmp_path)
    with ckpttool.open(source) as opened:
        assert "model.output_layer.weight" not in opened

    def one_more(tree: Any) -> None:
        tree["model"]["output_layer.weight"][7, 1] += 0.5

    rewrite(source / "mp_rank_00_001" / MODEL, one_more)
    with pytest.raises(Unsupported, match=r'"embedding\.word_embeddings\.weight" is the same on every rank'):
        ckpttool.convert(source, tmp_path / "out.pt", to="full", only=["model"])


def test_a_file_that_ends_early_is_refused(unpacked: Callable[[str], Path], tmp_path: Path) -> None:
    source = changed(unpacked, "tp2_pp2", tmp_path)
    path = source / "mp_rank_01_001" / MODEL
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(Corrupt, match=f"mp_rank_01_001/{MODEL}"):
        ckpttool.open(source)


def test_a_pickle_that_would_run_code_is_refused(unpacked: Callable[[str], Path], tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "ran",)

    source = changed(unpacked, "tp2_plain", tmp_path)
    rewrite(source / "mp_rank_01" / MODEL, lambda tree: tree["args"].__setattr__("evil", Evil()))
    assert b"touch" in pickle.dumps(Evil())
    with pytest.raises(Unsafe):
        ckpttool.open(source)
    assert not (tmp_path / "ran").exists()


# ------------------------------------------------------------------------------------------------------ the optimizer


def weights_alone(source: Path, to: Path) -> dict[str, Tensor]:
    """The weights, which need no proof of the optimizer."""
    ckpttool.convert(source, to, to="full", only=["model"])
    found: dict[str, Tensor] = load_full(to)["model"]
    return found


def test_a_buffer_that_is_not_the_copy_of_the_weights_is_refused(
    unpacked: Callable[[str], Path], tmp_path: Path
) -> None:
    source = changed(unpacked, "dp2_buckets", tmp_path)

    def one_more(tree: Any) -> None:
        next(iter(tree[0].values()))["param"][1800] *= 1.5

    rewrite(source / "mp_rank_00" / OPTIMIZER, one_more)
    with pytest.raises(
        Unsupported, match=r'after 5 parameters, "decoder\.layers\.1\.self_attention\.linear_qkv\.weight" should follow'
    ) as e:
        ckpttool.convert(source, tmp_path / "out.pt", to="full")
    assert "only=['model']" in str(e.value)
    assert len(weights_alone(source, tmp_path / "weights.pt")) == 15


def test_a_copy_that_rounds_to_no_weight_is_refused(unpacked: Callable[[str], Path], tmp_path: Path) -> None:
    source = changed(unpacked, "tp2_plain", tmp_path)

    def one_more(tree: Any) -> None:
        tree["optimizer"]["fp32_from_fp16_params"][0][2].data[3] *= 1.5

    rewrite(source / "mp_rank_01" / MODEL, one_more)
    with pytest.raises(Unsupported, match="rounds to no weight of the rank"):
        ckpttool.convert(source, tmp_path / "out.pt", to="full")
    weights_alone(source, tmp_path / "weights.pt")


def test_equal_weights_of_two_param_groups_are_refused(unpacked: Callable[[str], Path], tmp_path: Path) -> None:
    """Two matrices of one rank are equal, and one of them is in another group: then values prove nothing."""
    source = changed(unpacked, "tp2_plain", tmp_path)
    first, second = (f"decoder.layers.{i}.self_attention.linear_proj.weight" for i in range(2))

    def exchange(tree: Any) -> None:
        tree["model"][second] = tree["model"][first].clone()
        optimizer = tree["optimizer"]
        copies, groups = optimizer["fp32_from_fp16_params"], optimizer["optimizer"]["param_groups"]
        copies[0].pop(5)
        copies[1].append(copies[0][1].detach().clone())
        groups[1]["params"].append(groups[0]["params"].pop(5))

    rewrite(source / "mp_rank_00" / MODEL, exchange)
    with pytest.raises(
        Unsupported, match="2 fp32 copies of the optimizer round to each of 2 weights that are equal"
    ) as e:
        ckpttool.convert(source, tmp_path / "out.pt", to="full")
    assert first in str(e.value) and second in str(e.value)


def test_fp32_states_that_do_not_fit_the_rule_are_refused(unpacked: Callable[[str], Path], tmp_path: Path) -> None:
    source = changed(unpacked, "pp2_fp32", tmp_path)

    def frozen(tree: Any) -> None:
        tree["optimizer"]["state"].pop(tree["optimizer"]["param_groups"][0]["params"].pop(1))

    rewrite(source / "mp_rank_00_001" / MODEL, frozen)
    with pytest.raises(Unsupported, match="param group 0 has the state of 4 parameters"):
        ckpttool.convert(source, tmp_path / "out.pt", to="full")


def odd(where: list[Any], x: Any) -> Callable[[Any], None]:
    """Puts `x`, or what it makes of the old value, at a place in the optimizer of a file."""

    def change(tree: Any) -> None:
        at = tree["optimizer"]
        for key in where[:-1]:
            at = at[key]
        at[where[-1]] = x(at[where[-1]]) if callable(x) else x

    return change


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (odd(["optimizer", "param_groups"], 5), "its optimizer is"),
        (odd(["optimizer", "param_groups", 0, "params", 1], [7]), "the parameters of a param group are"),
        (odd(["optimizer", "param_groups", 0, "lr"], 0.5), "the param groups here"),
        (odd(["optimizer", "state", 2], [1]), "state of parameter 2 is"),
        (odd(["optimizer", "state", 2, "exp_avg"], "x"), "not contiguous tensors of one shape"),
        (odd(["optimizer", "state", 2, "exp_avg"], lambda t: t[:3]), "not contiguous tensors of one shape"),
        (
            odd(["optimizer", "state", 2, "exp_avg"], lambda t: t.half()),
            "is float16 on some ranks, and float32 on others",
        ),
        (odd(["optimizer", "state", 2, "step"], torch.tensor(4.0)), "is at another step than on other ranks"),
        (odd(["optimizer", "state", 2, "step"], torch.tensor([4.0, 4.0])), "is at another step than on other ranks"),
        (
            odd(["optimizer", "state"], lambda state: {k: v for k, v in state.items() if k != 2}),
            "A rank lacks its part",
        ),
        (odd(["fp32_from_fp16_params", 0], lambda copies: copies[1:]), "have fp32 copies"),
        (odd(["grad_scaler"], {"scale": torch.tensor([8.0]), "growth_tracker": 1}), "the gradient scalers here"),
    ],
)
def test_what_megatron_does_not_write_so_is_refused(
    change: Callable[[Any], None], why: str, unpacked: Callable[[str], Path], tmp_path: Path
) -> None:
    source = changed(unpacked, "tp2_plain", tmp_path)
    rewrite(source / "mp_rank_01" / MODEL, change)
    with pytest.raises((Corrupt, Unsupported), match=why):
        ckpttool.convert(source, tmp_path / "out.pt", to="full")


@pytest.mark.parametrize(
    ("case", "folder", "key", "name"),
    [
        ("ep2", "mp_rank_00_001", ["rng_state", 0, "torch_rng_state"], "rng.shard_0.0_1.1"),
        (
            "tp2_plain",
            "mp_rank_01",
            ["model", "decoder.layers.0.mlp.linear_fc1._extra_state"],
            "extra.decoder.layers.0.mlp.linear_fc1._extra_state/shard_0_1",
        ),
    ],
)
def test_what_ranks_have_of_their_own_beside_the_first_is_listed_as_left_behind(
    case: str, folder: str, key: list[Any], name: str, unpacked: Callable[[str], Path], tmp_path: Path
) -> None:
    """Random states of expert parallel ranks, states of Transformer Engine on tensor parallel ones."""
    source = changed(unpacked, case, tmp_path)

    def change(tree: Any) -> None:
        at = tree
        for k in key[:-1]:
            at = at[k]
        at[key[-1]] = torch.arange(5)

    rewrite(source / folder / MODEL, change)
    done = ckpttool.convert(source, tmp_path / "out", to="megatron", world_size=1)
    assert [n for n, *_ in done.dropped] == [f"extra.per_rank.1.{name}"]


def test_a_missing_file_of_the_optimizer_is_named(unpacked: Callable[[str], Path], tmp_path: Path) -> None:
    source = changed(unpacked, "tp2_pp2", tmp_path)
    (source / "mp_rank_01_000" / OPTIMIZER).unlink()
    with pytest.raises(Corrupt, match=f"mp_rank_01_000: {OPTIMIZER}, which has the state"):
        ckpttool.open(source)
    weights_alone(source, tmp_path / "weights.pt")


def test_an_optimizer_in_files_of_data_parallel_ranks_is_refused(
    unpacked: Callable[[str], Path], tmp_path: Path
) -> None:
    source = changed(unpacked, "tp2_plain", tmp_path)
    (source / "mp_rank_00" / "layer_wise_optimizer_0.pt").touch()
    with pytest.raises(Unsupported, match=r"mp_rank_00/layer_wise_optimizer_0\.pt"):
        ckpttool.open(source)
    weights_alone(source, tmp_path / "weights.pt")


def test_another_form_of_the_buffers_is_refused(unpacked: Callable[[str], Path], tmp_path: Path) -> None:
    source = changed(unpacked, "ones", tmp_path)

    def older(tree: Any) -> None:
        del tree["buckets_coalesced"]

    rewrite(source / "mp_rank_00" / OPTIMIZER, older)
    with pytest.raises(Unsupported, match="buckets_coalesced"):
        ckpttool.open(source)
    weights_alone(source, tmp_path / "weights.pt")


# --------------------------------------------------------------------------------------------------------- older jobs


def older_modules(source: Path) -> None:
    """Give a file the names that Megatron-LM's modules had before Megatron-Core; by hand, since those are in no package."""
    names = {
        "self_attention.linear_qkv": "self_attention.query_key_value", "self_attention.linear_proj": "self_attention.dense",
        "mlp.linear_fc1": "mlp.dense_h_to_4h", "mlp.linear_fc2": "mlp.dense_4h_to_h", "pre_mlp_layernorm": "post_attention_norm",
        "input_layernorm": "input_norm", "final_layernorm": "final_norm",
    }  # fmt: skip

    def change(tree: Any) -> None:
        model = {n: t for n, t in tree["model"].items() if t is not None}
        encoder = {}
        for n, t in model.items():
            if n.startswith("decoder."):
                n = n.removeprefix("decoder.")
                for a, b in names.items():
                    n = n.replace(a, b)
                encoder[n] = t
        tree["model"] = {"language_model": {
            "embedding": {"word_embeddings": {"weight": model["embedding.word_embeddings.weight"]}}, "encoder": encoder,
            "output_layer": {"weight": model["output_layer.weight"]},
        }}  # fmt: skip

    rewrite(source, change)


def test_names_of_older_modules_are_those_of_megatron_core(unpacked: Callable[[str], Path], tmp_path: Path) -> None:
    source = changed(unpacked, "tp2_plain", tmp_path)
    for rank in range(2):
        older_modules(source / f"mp_rank_{rank:02d}" / MODEL)
    found = ckpttool.diff(unpacked("tp2_plain") / "legacy" / ITERATION, source)
    assert all("_extra_state" in n for n in found.only_in_a) and found.only_in_b == []
    assert found.data == [] and found.shapes == {} and found.values == {}
    with ckpttool.open(source) as opened:
        assert any("before Megatron-Core" in n for n in opened.checkpoint.notes)
    rewrite(source / "mp_rank_00" / MODEL, lambda tree: tree.update(checkpoint_version=1.0))
    with pytest.raises(Unsupported, match=r"version 1\.0 .* have another order"):
        ckpttool.open(source)


def test_of_jobs_of_2023_the_weights_are_read_and_the_shards_of_the_optimizer_are_not(
    unpacked: Callable[[str], Path], tmp_path: Path
) -> None:
    """model_rng.pt, and each data-parallel rank's optim.pt in a folder of its own."""
    source = changed(unpacked, "ones", tmp_path)
    (source / "mp_rank_00" / MODEL).rename(source / "mp_rank_00" / "model_rng.pt")
    (source / "mp_rank_00_000").mkdir()
    shutil.move(source / "mp_rank_00" / OPTIMIZER, source / "mp_rank_00_000" / "optim.pt")
    rewrite(source / "mp_rank_00" / "model_rng.pt", lambda tree: tree.pop("optimizer") and None)
    with pytest.raises(Unsupported, match=r"mp_rank_00_000/optim\.pt"):
        ckpttool.open(source)
    assert len(weights_alone(source, tmp_path / "weights.pt")) == 15


@pytest.mark.parametrize("case", CASES)
def test_the_proof_of_the_optimizer_reports_bytes_of_a_known_total(
    case: str, unpacked: Callable[[str], Path], tmp_path: Path
) -> None:
    said: list[tuple[int, int]] = []

    def progress(what: str, done: int, total: int) -> None:
        if what == "prove":
            said.append((done, total))

    ckpttool.convert(unpacked(case) / "legacy" / ITERATION, tmp_path / "a.pt", progress=progress)
    assert said and said == sorted(said)
    done, total = said[-1]
    known = [t for _, t in said if t > said[0][1]] or [total]  # after the copies of the model were compared
    assert done <= total <= 2 * known[0], (done, total, known[0])


@pytest.mark.parametrize("tried", [1, 2, 1000])
def test_the_end_of_a_bucket_is_found_wherever_it_is_among_those_that_are_tried(
    tried: int, unpacked: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpttool.converters.megatron.legacy.optimizer._TRIED", tried)
    found = ckpttool.diff(unpacked("dp2_buckets") / "ckpt" / ITERATION, unpacked("dp2_buckets") / "legacy" / ITERATION)
    assert found.only_in_a == [] and found.data == [] and found.shapes == {}
