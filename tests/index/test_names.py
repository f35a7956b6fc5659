"""Names: what trainers call things, and what we call them; and back again."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttool.errors import CkpttoolError, Corrupt, Unsupported
from ckpttool.index import composites
from ckpttool.index.checkpoint import Chunks, Number, TensorEntry, joined, same_bytes
from ckpttool.index.fqns import strip_wrappers
from ckpttool.index.names import COMPONENTS, KEEPS_NUMBERS, canonical, original_path, restore_trainer_tree
from ckpttool.index.optimizer_names import assign_names
from ckpttool.index.trees import check_no_leaf_inside_leaf, nest
from ckpttool.layouts import list_resuming_programs


class T:
    """A leaf that is a tensor."""

    def __init__(self, *shape: int) -> None:
        self.shape = shape

    def __repr__(self) -> str:
        return f"T{self.shape}"


def shape_of(x: Any) -> tuple[int, ...] | None:
    return x.shape if isinstance(x, T) else None


def leaves(tree: Any, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], Any]:
    """As dcp and full flatten: dicts, and lists that hold dicts."""
    if isinstance(tree, dict) and tree:
        return {p: v for k, x in tree.items() for p, v in leaves(x, (*path, k)).items()}
    if isinstance(tree, list) and any(isinstance(x, (dict, T)) for x in tree):
        return {p: v for i, x in enumerate(tree) for p, v in leaves(x, (*path, i)).items()}
    return {path: tree}


def names(tree: Any, **how: Any) -> dict[str, Any]:
    return {joined(p): v for p, v in canonical(leaves(tree), shape_of, **how).leaves.items()}


W, B, S = T(4, 3), T(4), T()
MODEL = {"fc.weight": W, "fc.bias": B}
ADAM = {"step": S, "exp_avg": W, "exp_avg_sq": W}
ADAM_B = {"step": S, "exp_avg": B, "exp_avg_sq": B}
BY_NAME = {
    "state": {"fc.weight": ADAM, "fc.bias": ADAM_B},
    "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": ["fc.weight", "fc.bias"]}],
}
BY_NUMBER = {
    "state": {"0": ADAM, "1": ADAM_B},
    "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1]}],
}
CANONICAL = {
    "model.fc.weight": W, "model.fc.bias": B,
    **{f"optim.state.fc.weight.{k}": v for k, v in ADAM.items()},
    **{f"optim.state.fc.bias.{k}": v for k, v in ADAM_B.items()},
    "optim.param_groups.0.lr": 0.1, "optim.param_groups.0.betas": (0.9, 0.99),
    "optim.param_groups.0.params": ["fc.weight", "fc.bias"],
}  # fmt: skip


# -------------------------------------------------------------------------------------------------------- dialects


@pytest.mark.parametrize(
    "tree",
    [
        {"model": MODEL, "optim": BY_NAME},
        {"model": MODEL, "optimizer": BY_NAME},
        {"model_state_dict": MODEL, "optimizer_state_dict": BY_NUMBER},
        {"state_dict": MODEL, "optimizer_states": [BY_NUMBER]},
        {"app": {"model": MODEL, "optim": BY_NAME}},
        {**MODEL, "optimizer": BY_NAME},
        {"model": MODEL, "optim": BY_NUMBER},
        {"model": {f"module.{k}": v for k, v in MODEL.items()}, "optim": BY_NUMBER},
        {"model": {"_orig_mod.fc.weight": W, "_orig_mod.fc.bias": B}, "optim": BY_NAME},
        {
            "model": {f"_fsdp_wrapped_module.{k}": v for k, v in MODEL.items()},
            "optim": {
                "state": {"_fsdp_wrapped_module.fc.weight": ADAM, "_fsdp_wrapped_module.fc.bias": ADAM_B},
                "param_groups": [
                    {
                        "lr": 0.1,
                        "betas": (0.9, 0.99),
                        "params": ["_fsdp_wrapped_module.fc.weight", "_fsdp_wrapped_module.fc.bias"],
                    }
                ],
            },
        },
    ],
    ids=[
        "model, optim", "model, optimizer", "_state_dict", "Lightning", "app", "torchtitan", "numbers", "DDP", "compile",
        "FSDP1",
    ],
)  # fmt: skip
def test_every_usual_tree_gets_the_canonical_names(tree: Any) -> None:
    assert names(tree) == CANONICAL


def test_a_bare_state_dict_is_a_model() -> None:
    assert names(MODEL) == {"model.fc.weight": W, "model.fc.bias": B}
    assert names({"state_dict": MODEL}) == {"model.fc.weight": W, "model.fc.bias": B}


def test_keys_of_the_user_s_own_are_known_by_what_lies_there() -> None:
    usual = names({"model": MODEL, "optim": BY_NAME, "ema_decay": 0.9})
    for tree in (
        {"net": MODEL, "opt": BY_NAME},
        {"net": MODEL, "solver": [BY_NAME]},
        {"state_dict": MODEL, "opt": BY_NAME},
    ):
        assert names({**tree, "ema_decay": 0.9}) == usual
    found = canonical(leaves({"net": MODEL, "opt": BY_NAME}), shape_of)
    assert found.origin["model",] == ("net",) and found.origin["optim",] == ("opt",)
    assert found.notes == ['"net" is taken for the model: it holds weights, and no other key does']


def test_of_two_keys_with_weights_or_two_optimizers_none_is_taken() -> None:
    two = {"critic": MODEL, "generator": MODEL, "opt": BY_NAME}
    assert {n.split(".")[0] for n in names(two)} == {"extra"}
    assert {n.split(".")[0] for n in names({"model": MODEL, "opt_a": BY_NAME, "opt_b": BY_NAME})} == {"model", "extra"}


def test_an_optimizer_by_its_contents_whose_numbers_say_nothing_stays_what_it_was() -> None:
    tree = {"net": {"a.weight": W, "b.weight": W}, "opt": {"state": {"0": ADAM}, "param_groups": [{"params": [0]}]}}
    found = canonical(leaves(tree), shape_of)
    assert {joined(p) for p in found.leaves if p[0] == "extra"} == {
        "extra.opt.state.0.step", "extra.opt.state.0.exp_avg", "extra.opt.state.0.exp_avg_sq", "extra.opt.param_groups.0.params",
    }  # fmt: skip
    assert '"opt" holds an optimizer that cannot be read as one' in found.notes[-1]


def test_an_optimizer_flattened_by_torch_is_put_together_again() -> None:
    flat: dict[str, Any] = {}
    for n, slots in (("fc.weight", ADAM), ("fc.bias", ADAM_B)):
        flat.update({f"state.{n}.{k}": v for k, v in slots.items()})
        flat.update({f"param_groups.{n}.lr": 0.1, f"param_groups.{n}.betas": (0.9, 0.99)})
    assert names({"model": MODEL, "optim": flat}) == CANONICAL


def test_a_flattened_optimizer_of_several_groups_is_told_apart_by_its_options() -> None:
    flat = {"param_groups.fc.weight.lr": 0.1, "param_groups.fc.bias.lr": 0.2, "param_groups.fc.bias.decay": 0}
    found = names({"model": MODEL, "optim": flat})
    assert found["optim.param_groups.0.params"] == ["fc.weight"] and found["optim.param_groups.0.lr"] == 0.1
    assert found["optim.param_groups.1.params"] == ["fc.bias"] and found["optim.param_groups.1.decay"] == 0


def test_param_groups_stored_as_one_item_are_taken_apart() -> None:
    optim = {"state": {"fc.weight": ADAM, "fc.bias": ADAM_B}}
    tree = {**leaves({"model": MODEL, "optim": optim}), ("optim", "param_groups"): BY_NAME["param_groups"]}
    found = canonical(tree, shape_of)
    assert {joined(p): v for p, v in found.leaves.items()} == CANONICAL


def test_an_optimizer_without_any_state_yet_keeps_its_groups() -> None:
    found = names({"model": MODEL, "optim": {"state": {}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}})
    assert found["optim.param_groups.0.params"] == ["fc.weight", "fc.bias"]
    assert not [n for n in found if n.startswith("optim.state")]


def test_counters_schedulers_and_the_rest_have_their_places() -> None:
    tree = {
        "model": MODEL, "step": 3, "epoch": 1, "lr_scheduler": {"last_epoch": 3}, "scaler": {"scale": 2.0},
        "rng_state": {"cpu": T(5)}, "dataloader": {"seen": 9}, "train_state": {"step": 4, "ntokens": 5}, "args": "x",
        "extra": {"note": 1}, "ema": {"fc.weight": W},
    }  # fmt: skip
    tree.pop("step")
    found = names(tree)
    assert {n: v for n, v in found.items() if not n.startswith("model")} == {
        "trainer.epoch": 1, "scheduler.last_epoch": 3, "scaler.scale": 2.0, "rng.cpu": tree["rng_state"]["cpu"],
        "dataloader.seen": 9, "trainer.step": 4, "trainer.ntokens": 5, "extra.args": "x", "extra.note": 1,
        "extra.ema.fc.weight": W,
    }  # fmt: skip
    assert {n.partition(".")[0] for n in found} <= set(COMPONENTS)


def test_trainers_are_recognised() -> None:
    list_resuming_programs()  # loads the layouts, which know the trees of trainers
    titan = canonical(leaves({**MODEL, "optimizer": BY_NAME, "train_state": {"step": 1}}), shape_of)
    assert titan.trainer == "torchtitan"
    lightning = canonical(leaves({"state_dict": MODEL, "loops": {"a": 1}, "callbacks": {"b": 1}}), shape_of)
    assert lightning.trainer == "Lightning"
    assert canonical(leaves({"model": MODEL}), shape_of).trainer is None


def test_of_two_keys_that_mean_the_same_the_second_keeps_its_name() -> None:
    found = names({"model": MODEL, "step": 3, "train_state": {"step": 4}})
    assert (found["trainer.step"], found["extra.train_state.step"]) == (3, 4)
    found = names({"model": MODEL, "rng": 3, "rng_state": 4})
    assert (found["rng"], found["extra.rng_state"]) == (3, 4)


def test_numbers_that_follow_shapes_are_said_in_a_note() -> None:
    found = canonical(leaves({"model": MODEL, "optim": BY_NUMBER}), shape_of)
    assert found.notes == ["the optimizer numbers its parameters; their names follow from the order and shapes of the model's 2 parameters"]  # fmt: skip


def test_a_tied_weight_is_one_parameter_of_a_numbered_optimizer() -> None:
    model = {"embed.weight": W, "fc.bias": B, "head.weight": W}
    found = names({"model": model, "optim": BY_NUMBER}, same=lambda a, b: a is b)
    assert found["optim.param_groups.0.params"] == ["embed.weight", "fc.bias"]


def test_names_listed_by_the_optimizer_itself_are_taken() -> None:
    square = {"a.weight": T(2, 2), "b.weight": T(2, 2)}
    optim = {"state": {}, "param_groups": [{"params": [0, 1], "param_names": ["b.weight", "a.weight"]}]}
    assert names({"model": square, "optim": optim})["optim.param_groups.0.params"] == ["b.weight", "a.weight"]


def test_like_gives_the_order() -> None:
    square = {"a.weight": T(2, 2), "b.weight": T(2, 2)}
    optim = {"state": {}, "param_groups": [{"params": [1], "lr": 1}, {"params": [0]}]}
    found = names({"model": square, "optim": optim}, like=("b.weight", "a.weight"))
    assert found["optim.param_groups.0.params"] == ["b.weight"] and found["optim.param_groups.1.params"] == ["a.weight"]
    with pytest.raises(Unsupported, match="like names 3 parameters in its optimizer, this one has 2"):
        names({"model": square, "optim": optim}, like=("a", "b", "c"))


SEVERAL = {
    "model": {"a.weight": T(2, 2), "b.weight": T(2, 2)},
    "optim": {"state": {}, "param_groups": [{"params": [0]}]},
}
NONE = {"model": MODEL, "optim": {"state": {"0": {"exp_avg": T(9, 9)}}, "param_groups": [{"params": [0]}]}}


@pytest.mark.parametrize(("tree", "said"), [(SEVERAL, "more than one order of the 2"), (NONE, "no order of the 2")])
def test_numbers_that_fit_in_no_way_or_in_several_are_kept_or_refused(tree: dict[str, Any], said: str) -> None:
    found = canonical(leaves(tree), shape_of)
    assert said in found.notes[0] and found.notes[0].startswith(KEEPS_NUMBERS)
    assert ("extra", "optim", "param_groups", 0, "params") in found.leaves and found.origin == {
        ("extra", "optim"): ("optim",)
    }
    assert not any(p[0] == "optim" for p in found.leaves)
    with pytest.raises(Unsupported, match=said):
        canonical(leaves(tree), shape_of, only=frozenset(("model", "optim")))
    assert all(p[0] == "model" for p in canonical(leaves(tree), shape_of, only=frozenset(("model",))).leaves)


@pytest.mark.parametrize(
    "group",
    [{"params": 5}, {"params": "ab"}, {"params": None}],
)
def test_params_that_are_no_list_are_corrupt(group: Any) -> None:
    with pytest.raises(Corrupt, match="params is"):
        names({"model": MODEL, "optim": {"state": {}, "param_groups": [group]}})


@pytest.mark.parametrize(
    "group",
    [{"params": [[1]]}, {"params": [0, None]}, {"params": [0.5]}, {"params": [{}, {}]}, {"params": [True, "a"]}],
)  # fmt: skip
def test_params_that_are_neither_names_nor_numbers_are_refused(group: Any) -> None:
    tree = {**leaves({"model": MODEL}), **{("optim", "param_groups", 0, k): v for k, v in group.items()}}
    with pytest.raises(CkpttoolError):
        canonical(tree, shape_of)


def test_the_numbers_of_real_optimizers_are_resolved() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 5))
    net[2].bias.requires_grad_(False)
    decay = [p for p in net.parameters() if p.ndim > 1]
    plain = [p for p in net.parameters() if p.ndim == 1 and p.requires_grad]
    optimizer = torch.optim.AdamW([{"params": decay}, {"params": plain, "weight_decay": 0.0}])
    net(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    model = {k: T(*v.shape) for k, v in net.state_dict().items()}
    state = {str(k): {s: T(*x.shape) for s, x in v.items()} for k, v in optimizer.state_dict()["state"].items()}
    optim = {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}
    found = canonical(leaves({"model": model, "optim": optim}), shape_of)
    names_of = {joined(p): v for p, v in found.leaves.items()}
    assert names_of["optim.param_groups.0.params"] == ["0.weight", "2.weight"]
    by_identity = {id(p): n for n, p in net.named_parameters()}
    assert names_of["optim.param_groups.1.params"] == [by_identity[id(p)] for p in plain]


# --------------------------------------------------------------------------------------------------- and back again

ROOTS = (
    "step",
    "epoch",
    "scheduler",
    "lr_scheduler",
    "rng",
    "rng_state",
    "scaler",
    "trainer",
    "train_state",
    "extra",
    "args",
    "ema",
    "loops",
)
REST = st.dictionaries(
    st.tuples(st.sampled_from(ROOTS), st.sampled_from(("a", "b")) | st.integers(0, 1))
    | st.tuples(st.sampled_from(ROOTS)),
    st.integers(),
    max_size=6,
).filter(lambda d: not any(p != q and q[: len(p)] == p for p in d for q in d))


def test_keys_of_a_user_come_back() -> None:
    tree = {"model": MODEL, "lr_schedulers": [{"last_epoch": 3}], "train_state": {"step": 4}, "epoch": 1, "args": "x"}
    found = canonical(leaves(tree), shape_of)
    back = {original_path(p, found.origin): v for p, v in found.leaves.items() if p[0] != "model"}
    assert nest(back) == {k: v for k, v in tree.items() if k != "model"}


@pytest.mark.slow
@given(REST)
@settings(max_examples=150)
def test_every_leaf_of_the_rest_gets_back_the_path_it_had(rest: dict[tuple[Any, ...], Any]) -> None:
    tree = {("model", "w"): W, **rest}
    try:
        found = canonical(tree, shape_of)
    except Corrupt:
        return  # two of them mean the same
    back = {original_path(p, found.origin): v for p, v in found.leaves.items() if p[0] != "model"}
    assert back == rest


def stored(tree: Any, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], Any]:
    """The leaves of a tree as `full` hands them over: tensors as entries, integer keys as such."""
    if isinstance(tree, dict) and tree:
        keys = [Number(k) if isinstance(k, int) else k for k in tree]
        return {p: v for k, x in zip(keys, tree.values(), strict=True) for p, v in stored(x, (*path, k)).items()}
    if isinstance(tree, list) and any(isinstance(x, (dict, T)) for x in tree):
        return {p: v for i, x in enumerate(tree) for p, v in stored(x, (*path, i)).items()}
    if isinstance(tree, T):
        n = 4 * max(1, tree.shape[0] if tree.shape else 1) * (tree.shape[1] if len(tree.shape) > 1 else 1)
        return {path: TensorEntry("float32", tree.shape, path, Chunks.whole(tree.shape, 0, id(tree), n))}
    return {path: tree}


NUMBERED = {
    "state": {0: ADAM, 1: ADAM_B}, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1]}],
}  # fmt: skip
FLATTENED = {
    **{f"state.{n}.{k}": v for n, slots in (("fc.weight", ADAM), ("fc.bias", ADAM_B)) for k, v in slots.items()},
    **{
        f"param_groups.{n}.{k}": v
        for n in ("fc.weight", "fc.bias")
        for k, v in (("lr", 0.1), ("decay", n == "fc.bias"))
    },
}
REST_OF = {"lr_scheduler": {"last_epoch": 3}, "train_state": {"step": 4}, "epoch": 1, "args": {"x": [1]}, "rng": T(5)}


def prefixed(prefix: str, optim: dict[str, Any]) -> dict[str, Any]:
    """A tree whose names all begin so, those in a flattened optimizer too."""
    state = {f"{prefix}{k}": v for k, v in optim["state"].items()}
    groups = [{**g, "params": [prefix + n for n in g["params"]]} for g in optim["param_groups"]]
    return {"model": {prefix + k: v for k, v in MODEL.items()}, "optim": {"state": state, "param_groups": groups}}


WRITTEN: dict[str, Any] = {
    "Accelerate's optimizer folder": {"optimizer": BY_NAME},
    "model, optimizer": {"model": MODEL, "optimizer": BY_NAME, **REST_OF},
    "integer ids": {"model_state_dict": MODEL, "optimizer_state_dict": NUMBERED, **REST_OF},
    "integer ids, no step yet": {"model": MODEL, "optim": {"state": {}, "param_groups": NUMBERED["param_groups"]}},
    "Lightning": {"state_dict": MODEL, "optimizer_states": [NUMBERED], "loops": {"a": 1}, "callbacks": {}, "lr_schedulers": [{"b": 1}]},
    "Lightning, two optimizers": {"state_dict": MODEL, "optimizer_states": [BY_NAME, BY_NAME]},
    "Lightning, sharded": {"state_dict": MODEL, "optimizer_0": BY_NAME},
    "torchtitan": {**MODEL, "optimizer": FLATTENED, "train_state": {"step": 3}, "dataloader": {"dp_rank_0": b"x"}},
    "OLMo-core": {"model": MODEL, "optim": FLATTENED},
    "below one key": {"app": {"model": MODEL, "optim": BY_NAME, **REST_OF}},
    "below one key, of another name": {"state": {"state_dict": MODEL, "optimizer": FLATTENED, "epoch": 3}},
    "bare": MODEL,
    "compile": prefixed("_orig_mod.", BY_NAME),
    "DDP": prefixed("module.", BY_NAME),
    "DDP, integer ids": {"model": prefixed("module.", BY_NAME)["model"], "optimizer": NUMBERED},
    "compile, flattened": {
        "model": {f"_orig_mod.{k}": v for k, v in MODEL.items()},
        "optim": {k.replace(".fc.", "._orig_mod.fc.", 1): v for k, v in FLATTENED.items()},
    },
    "compile, of the model alone": {"model": prefixed("_orig_mod.", BY_NAME)["model"], "optim": BY_NAME},
    "integer ids, one value as state": {"model": MODEL, "optim": {**NUMBERED, "state": {0: ADAM, 1: [1, 2]}}},
    "nested modules": {"model": {"fc": {"weight": W, "bias": B}}, "optim": BY_NAME},
    "a second model": {"model": MODEL, "ema": MODEL, "state_dict": {"a": W}, "model_ema": {"b": 1}},
    "keys that mean the same": {"model": MODEL, "rng": {"a": 1}, "rng_state": {"b": 1}, "step": 3, "trainer": {"step": 4}},
    "integers as keys of the rest": {"model": MODEL, "other": {"state": {0: ADAM}}},
}  # fmt: skip


@pytest.mark.parametrize("kind", WRITTEN)
def test_the_tree_that_a_trainer_wrote_comes_back(kind: str) -> None:
    leaves = stored(WRITTEN[kind])
    found = canonical(leaves, composites.shape_of, None, same_bytes)
    tree, notes = restore_trainer_tree(found.leaves, found.origin, same_bytes)
    assert (tree, notes) == (leaves, [])
    assert nest(tree) == nest(leaves)
    pairs = [[list(a), list(b)] for a, b in found.origin.items()]
    read_again = {
        tuple(a): tuple(b) for a, b in json.loads(json.dumps(pairs))
    }  # as archives and training states keep it
    assert restore_trainer_tree(found.leaves, read_again, same_bytes)[0] == leaves


def test_where_the_own_keys_do_not_lead_back_the_canonical_ones_stay() -> None:
    leaves = stored(WRITTEN["integer ids"])
    found = canonical(leaves, composites.shape_of, None, same_bytes)
    optimizer = {p: v for p, v in found.leaves.items() if p[0] == "optim"}  # --only optim: nothing names the numbers
    tree, notes = restore_trainer_tree(optimizer, found.origin, same_bytes)
    assert tree is optimizer and "could not be read again" in notes[0]
    tied = stored(
        {"model": {"a.weight": W, "b.weight": W}, "optim": {"state": {0: ADAM}, "param_groups": [{"params": [0]}]}}
    )
    found = canonical(tied, composites.shape_of, None, same_bytes)
    assert restore_trainer_tree(found.leaves, found.origin, same_bytes)[0] == tied
    tree, notes = restore_trainer_tree(found.leaves, found.origin, None)  # DCP does not show that they are one
    assert tree is found.leaves and notes
    wrong = {("model", "fc.weight"): ("x",), ("model", "fc.bias"): ("x",)}
    bare = {("model", k): v for (k,), v in stored(MODEL).items()}
    assert restore_trainer_tree(bare, wrong, None)[0] is bare


def test_a_part_of_a_state_has_the_keys_it_had() -> None:
    for kind in ("torchtitan", "Lightning", "compile"):
        leaves = stored(WRITTEN[kind])
        found = canonical(leaves, composites.shape_of, None, same_bytes)
        model = {p: v for p, v in found.leaves.items() if p[0] == "model"}
        tree, notes = restore_trainer_tree(model, found.origin, same_bytes)
        assert len(tree) == 2 and all(leaves[p] is t for p, t in tree.items()) and not notes


def test_two_entries_of_a_model_with_one_name_are_refused() -> None:
    with pytest.raises(Corrupt, match="two entries"):
        names({"model": {"fc": {"weight": W}, "fc.weight": B}})


# -------------------------------------------------------------------------------------------------------- wrappers


def test_wrapper_prefixes_are_removed_wherever_they_stand() -> None:
    found = strip_wrappers([
        "_fsdp_wrapped_module.layers.0._fsdp_wrapped_module._checkpoint_wrapped_module.w", "_orig_mod.layers.1.w", "b",
        "_forward_module.c",
    ])  # fmt: skip
    assert list(found.values()) == ["layers.0.w", "layers.1.w", "b", "c"]


def test_the_prefix_of_ddp_is_removed_only_where_every_name_has_it() -> None:
    assert strip_wrappers(["module.a", "module.b"]) == {"module.a": "a", "module.b": "b"}
    assert strip_wrappers(["module.a", "b"]) == {"module.a": "module.a", "b": "b"}
    assert strip_wrappers(["_orig_mod.module.a"]) == {"_orig_mod.module.a": "a"}
    assert strip_wrappers([]) == {}


def test_two_names_that_are_one_without_wrappers_are_an_error_that_names_both() -> None:
    with pytest.raises(Corrupt, match=r'"a\.w" and "_orig_mod\.a\.w" are both "a\.w"'):
        strip_wrappers(["a.w", "_orig_mod.a.w"])


def test_a_name_that_ends_like_a_wrapper_is_left_alone() -> None:
    assert strip_wrappers(["my_orig_mod.weight"]) == {"my_orig_mod.weight": "my_orig_mod.weight"}


# ------------------------------------------------------------------------------------------------------ name_order


def named(*shapes: tuple[int, ...], suffix: str = ".weight") -> list[tuple[str, tuple[int, ...]]]:
    return [(f"p{i}{suffix}", s) for i, s in enumerate(shapes)]


def test_one_group_in_the_order_of_the_model_is_unique() -> None:
    assert assign_names(named((2,), (3,), (2,)), [[(2,), (3,), (2,)]]) == (
        [["p0.weight", "p1.weight", "p2.weight"]],
        [],
        1,
    )


def test_shapes_that_are_not_known_fit_any_name() -> None:
    assert assign_names(named((2,), (3,)), [[None, None]]) == ([["p0.weight", "p1.weight"]], [], 1)


def test_buffers_are_left_out_before_weights() -> None:
    state = [("bn.weight", (4,)), ("bn.bias", (4,)), ("bn.running_mean", (4,)), ("bn.running_var", (4,))]
    assert assign_names(state, [[(4,), (4,)]]) == ([["bn.weight", "bn.bias"]], ["bn.running_mean", "bn.running_var"], 1)


def test_a_frozen_weight_is_left_out_where_shapes_leave_one_way() -> None:
    assert assign_names(named((2,), (3,), (4,)), [[(2,), (4,)]]) == ([["p0.weight", "p2.weight"]], ["p1.weight"], 1)


def test_several_groups_are_disjoint_subsequences() -> None:
    found = assign_names(named((2, 2), (2,), (3, 3), (3,)), [[(2, 2), (3, 3)], [(2,), (3,)]])
    assert found == ([["p0.weight", "p2.weight"], ["p1.weight", "p3.weight"]], [], 1)
    assert assign_names(named((2,), (3,)), [[(3,)], [(2,)]]) == ([["p1.weight"], ["p0.weight"]], [], 1)


def test_what_fits_in_several_ways_is_left_open() -> None:
    assert assign_names(named((2,), (2,)), [[(2,)]]) == (None, [], 2)
    assert assign_names(named((2,), (2,)), [[(2,)], [(2,)]]) == (None, [], 2)
    assert assign_names(named((2,), (2,), (2,)), [[(2,), (2,)]])[2] == 3


def test_what_fits_in_no_way_has_no_answer() -> None:
    assert assign_names(named((2,)), [[(3,)]]) == (None, [], 0)
    assert assign_names(named((2,)), [[(2,), (2,)]]) == (None, [], 0)
    assert assign_names(named((2,), (3,)), [[(3,), (2,)]]) == (None, [], 0)


def test_nothing_is_the_order_of_nothing() -> None:
    assert assign_names([], []) == ([], [], 1)


def every_way(names: list[tuple[str, tuple[int, ...]]], groups: list[list[Any]]) -> list[tuple[int, list[list[str]]]]:
    """All assignments of names to groups, with the number of weights left out: the slow, plain definition."""
    out = []
    for choice in itertools.product(range(-1, len(groups)), repeat=len(names)):
        got = [[n for n, c in zip(names, choice, strict=True) if c == g] for g in range(len(groups))]
        if all(
            len(a) == len(b) and all(s is None or s == n[1] for n, s in zip(a, b, strict=True))
            for a, b in zip(got, groups, strict=True)
        ):
            left = sum(n[0].endswith((".weight", ".bias")) for n, c in zip(names, choice, strict=True) if c == -1)
            out.append((left, [[n for n, _ in g] for g in got]))
    return out


@pytest.mark.slow
@given(st.data())
@settings(max_examples=200)
def test_the_order_is_the_only_one_of_all_that_leaves_fewest_weights_out(data: st.DataObject) -> None:
    shape = st.sampled_from(((2,), (3,), (2, 2)))
    suffix = st.sampled_from((".weight", ".running_mean"))
    n = data.draw(st.integers(0, 5))
    state = [(f"p{i}{data.draw(suffix)}", data.draw(shape)) for i in range(n)]
    groups = data.draw(st.lists(st.lists(st.none() | shape, max_size=3), max_size=2))
    ways = every_way(state, groups)
    best = [g for left, g in ways if left == min(x for x, _ in ways)]
    resolved, left, count = assign_names(state, groups)
    assert count == len(best)
    if count == 1:
        assert resolved == best[0]
        assert sorted([*left, *itertools.chain(*best[0])]) == sorted(n for n, _ in state)
    else:
        assert resolved is None


def test_the_parameters_of_a_large_model_are_put_in_order_at_once() -> None:
    layer = [(64, 64), (64, 64), (64, 16), (64,), (64,), (128, 64), (64, 128)]
    state = named(*(layer * 100))
    began = time.process_time()
    assert assign_names(state, [[s for _, s in state]])[2] == 1
    matrices, vectors = [s for _, s in state if len(s) > 1], [s for _, s in state if len(s) == 1]
    assert assign_names(state, [matrices, vectors])[2] == 1
    assert time.process_time() - began < 3


@pytest.mark.slow
def test_a_group_for_every_layer_is_left_open_in_bounded_time() -> None:
    layer = [(4, 4), (4,), (8, 4), (8,)]
    began = time.process_time()
    assert assign_names(named(*(layer * 14)), [list(layer) for _ in range(14)])[0] is None
    assert time.process_time() - began < 1.2


# ------------------------------------------------------------------------------------------------------------ nest


def test_nest_builds_dicts_of_text_and_lists_of_numbers() -> None:
    assert nest({("a", 0): 1, ("a", 1): 2}) == {"a": [1, 2]}
    assert nest({("a", 1): 2, ("a", 0): 1, ("b", "c"): {"x": 1}}) == {"a": [1, 2], "b": {"c": {"x": 1}}}
    assert nest({("g", 0, "lr"): 1, ("g", 1, "lr"): 2}) == {"g": [{"lr": 1}, {"lr": 2}]}
    assert nest({}) == {}
    assert nest({(): [1]}) == [1]


def test_an_entry_inside_another_one_is_refused() -> None:
    for paths in [("a",), ("a", "b")], [("a", "b", 0), ("a",)], [("a", 0, "b", "c"), ("a", 0, "b")]:
        with pytest.raises(Corrupt, match="inside a value that is neither a dict nor a list"):
            check_no_leaf_inside_leaf(paths)
    check_no_leaf_inside_leaf([("a", "b"), ("a", "b.c"), ("a.b",), ("b", 0), ("b", 1)])


@pytest.mark.slow
@given(
    st.recursive(
        st.integers(), lambda x: st.dictionaries(st.text(max_size=2), x, min_size=1, max_size=3)
        | st.lists(st.dictionaries(st.text(max_size=2), x, min_size=1), min_size=1, max_size=3), max_leaves=10,
    ).filter(lambda t: isinstance(t, dict))
)  # fmt: skip
def test_a_tree_is_nested_again_from_its_leaves(tree: Any) -> None:
    assert nest(leaves(tree)) == tree


def test_the_state_of_an_optimizer_that_numbers_parameters_has_numbers_again() -> None:
    groups = [{"params": [0, 2], "lr": 0.1}]
    by_text = {("a", "state", "0", "step"): 1, ("a", "state", "2", "step"): 2, ("a", "param_groups"): groups}
    assert nest(by_text) == {"a": {"state": {0: {"step": 1}, 2: {"step": 2}}, "param_groups": groups}}
    named = [{"params": ["0", "2"]}]
    assert nest({**by_text, ("a", "param_groups"): named})["a"]["state"].keys() == {"0", "2"}
    one_value = {0: {"step": 1}, "6": 0.1}  # such keys are no parameters' alone, so nobody turned them into text
    assert nest({("a", "state"): one_value, ("a", "param_groups"): groups})["a"]["state"] == one_value


def test_a_parameter_whose_state_is_one_value_has_its_name() -> None:
    found = names({"model": MODEL, "optim": {**BY_NUMBER, "state": {"0": ADAM, "1": [1, 2]}}})
    assert found["optim.state.fc.bias"] == [1, 2] and "optim.state.1" not in found


def test_a_list_of_parameters_with_a_dict_or_tensor_in_it_is_refused() -> None:
    for odd in ({"step": S}, T(3)):
        groups = [{"params": [odd, "fc.bias"], "lr": 0.1}]
        with pytest.raises(Corrupt, match="neither names nor numbers alone"):
            names({"model": MODEL, "optim": {**BY_NAME, "param_groups": groups}})


def test_a_path_inside_a_leaf_is_an_error() -> None:
    with pytest.raises(Corrupt, match=r"'a\.b' is inside a value"):
        nest({("a",): 1, ("a", "b"): 2})


def test_a_leaf_in_the_place_of_a_tree_is_an_error_too() -> None:
    with pytest.raises(Corrupt):
        nest({("a", "b"): 2, ("a",): 1})
    with pytest.raises(Corrupt):
        nest({("a",): 1, (): 2})
