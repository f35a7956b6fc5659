"""`maps --derive`: what is decided becomes what the other model has, bit for bit; what is not stays a comment, and `--map` refuses its names."""

from __future__ import annotations

import json
from pathlib import Path

import peers
import pytest
import torch
from commands import ckpttool_here

import ckpttool
from ckpttool.engine.map_proposals import DerivedMap, derive_map
from ckpttool.errors import NotRecognised, Unsupported, UsageError
from ckpttool.huggingface import maps
from ckpttool.index.map_derivation import NamedWeight, propose_map
from ckpttool.index.map_groups import group_names

#: {name in one program: (name in the other, shape)}, of a layer in which shapes tell nothing but the norms from the rest.
LAYER = {
    "attn.wq": ("self_attn.q_proj", (8, 8)),
    "attn.wo": ("self_attn.o_proj", (8, 8)),
    "mlp.w1": ("mlp.gate", (8, 8)),
    "mlp.w3": ("mlp.up", (8, 8)),
    "mlp.w2": ("mlp.down", (8, 12)),
    "norm": ("ln", (8,)),
}


def pair(ones: bool = False) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The same weights under two programs' names, of which the second's layers begin with 1 and are in another order."""
    seed = torch.Generator().manual_seed(5)
    rows = [
        (f"layers.{i}.{a}.weight", f"model.blocks.{i + 1}.{b}.weight", torch.randn(shape, generator=seed))
        for i in range(2)
        for a, (b, shape) in LAYER.items()
    ]
    rows += [
        ("tok.weight", "model.embed.weight", torch.randn(131, 8, generator=seed)),
        ("scale", "s", torch.tensor(2.0)),
    ]
    if ones:
        rows += [(f"layers.0.n{k}", f"model.blocks.1.m{k}", torch.ones(5)) for k in range(2)]
    return {a: t for a, _, t in rows}, {b: t for _, b, t in reversed(rows)}


def derived(folder: Path, a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> DerivedMap:
    """The map of two states, which is written to a.map, too."""
    torch.save({"model": a}, folder / "a.pt")
    torch.save({"model": b}, folder / "b.pt")
    found = derive_map(folder / "a.pt", folder / "b.pt")
    (folder / "a.map").write_text(found.text)
    return found


def test_the_same_bytes_decide_whatever_names_order_and_layers_are(tmp_path: Path) -> None:
    a, b = pair()
    found = derived(tmp_path, a, b)
    assert found.complete
    assert found.evidence == {"the same bytes in both": len(a)}
    ckpttool.convert(tmp_path / "a.pt", tmp_path / "out.pt", map=tmp_path / "a.map")
    assert ckpttool.diff(tmp_path / "out.pt", tmp_path / "b.pt").equal
    ckpttool.convert(tmp_path / "out.pt", tmp_path / "back.pt", map=tmp_path / "a.map")
    assert ckpttool.diff(tmp_path / "back.pt", tmp_path / "a.pt").equal


def test_equal_bytes_that_two_weights_have_stay_undecided_and_are_refused_by_name(tmp_path: Path) -> None:
    found = derived(tmp_path, *pair(ones=True))
    assert not found.complete
    assert list(found.undecided_a) == ["layers.0.n0", "layers.0.n1"]
    assert all("nothing tells them apart" in why for why in found.undecided_a.values())
    with pytest.raises(Unsupported, match=r'2 of 16 names are not names of full A: "model\.layers\.0\.n0"'):
        ckpttool.convert(tmp_path / "a.pt", tmp_path / "out.pt", map=tmp_path / "a.map")
    assert not (tmp_path / "out.pt").exists()


def test_rows_in_another_order_are_not_taken_for_the_same_weight(tmp_path: Path) -> None:
    a, b = pair()
    b["model.blocks.1.self_attn.q_proj.weight"] = b["model.blocks.1.self_attn.q_proj.weight"].flip(0).clone()
    found = derived(tmp_path, a, b)
    assert found.undecided_a == {
        "layers.0.attn.wq.weight": "8x8, and none in B has these bytes: rows in another order there?"
    }
    assert found.undecided_b.keys() == {"model.blocks.1.self_attn.q_proj.weight"}


def test_of_other_values_only_shapes_names_and_order_tell(tmp_path: Path) -> None:
    a, _ = pair()
    b = {f"net.{i}.{n}.weight": torch.randn(shape) for i in range(2) for n, shape in LAYER.values()}
    b |= {"wte.weight": torch.randn(131, 8)}
    a = {n: t for n, t in a.items() if n != "scale"}
    found = derived(tmp_path, a, b)
    assert "layers.{i}.mlp.w2.weight = net.{i}.mlp.down.weight\n" in found.text  # its shape
    assert "\ntok.weight = wte.weight\n" in found.text
    assert not any("mlp.w1" in line and not line.startswith("#") for line in found.text.splitlines())
    with pytest.raises(Unsupported, match="8 of 13 names are not names of full A"):
        ckpttool.convert(tmp_path / "a.pt", tmp_path / "out.pt", map=tmp_path / "a.map")


def of_layer(rows: dict[str, tuple[int, ...]], layers: int = 2) -> list[NamedWeight]:
    """The weights of alike layers, {name: shape}."""
    return [NamedWeight(n.replace("#", str(i)), shape) for i in range(layers) for n, shape in rows.items()]


@pytest.mark.parametrize(
    ("ours", "theirs", "ordered", "decided", "proposed"),
    [
        # order and names agree
        (["l.#.wq", "l.#.wo"], ["b.#.q", "b.#.o"], True, {"l.0.wq": "b.0.q", "l.1.wo": "b.1.o"}, {}),
        # they contradict each other: torchtitan's attention_norm is no post_attention_layernorm
        (["l.#.attention_norm", "l.#.ffn_norm"], ["b.#.input_norm", "b.#.post_attention_norm"], True, {}, {}),
        (["l.#.w1", "l.#.w3"], ["b.#.gate", "b.#.up"], True, {}, {"l.0.w1": "b.0.gate", "l.1.w3": "b.1.up"}),
        (["l.#.wo", "l.#.wq"], ["b.#.q", "b.#.o"], False, {}, {"l.0.wq": "b.0.q"}),
        (["l.#.w1", "l.#.w3"], ["b.#.gate", "b.#.up"], False, {}, {}),
        (["l.#.w1"], ["b.#.gate", "b.#.up"], True, {}, {}),
        # other weights of the layer have the shape, with one number more
        (["l.#.fc", "l.#.w1"], ["b.#.mlp.0", "b.#.proj"], True, {}, {"l.0.fc": "b.0.mlp.0"}),
        (["l.#.experts.0.w", "l.#.experts.1.w"], ["b.#.e.0.up", "b.#.e.1.up"], True, {"l.1.experts.1.w": "b.1.e.1.up"}, {}),
    ],
)  # fmt: skip
def test_equal_shapes_are_decided_only_where_order_and_names_agree(
    ours: list[str], theirs: list[str], ordered: bool, decided: dict[str, str], proposed: dict[str, str]
) -> None:
    a, b = (of_layer(dict.fromkeys(names, (4, 4))) for names in (ours, theirs))
    found = propose_map(a, b, ordered)
    for wanted, rows in ((decided, found.decided), (proposed, found.proposed)):
        assert wanted.items() <= {x: y for x, (y, _) in rows.items()}.items()
        assert bool(wanted) == bool(rows)
    left = {*found.decided, *found.proposed, *found.left_a}
    assert left == {n.replace("#", str(i)) for n in ours for i in range(2)}  # nothing is lost


@pytest.mark.parametrize("name", ["a\nmodel.x", "a b", "size", "a#b", "a=b", "w[0]", "{i}", "w\x1b[2J", "model:"])
def test_a_name_that_a_map_cannot_hold_is_undecided_and_makes_no_line(name: str) -> None:
    found = propose_map(
        [NamedWeight(name, (3,)), NamedWeight("w", (4,))], [NamedWeight(name, (3,)), NamedWeight("v", (4,))], True
    )
    assert found.decided.keys() == {"w"}
    text = found.write(("here", "there"), None, "a test")
    assert [line for line in text.splitlines() if " = " in line] == ["w = v"]
    assert len(maps.load_map(text).lines) == 1
    assert found.left_a == {name: "a map cannot hold such a name"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "inside", "known"),
    [("titan-llama3", "ckpt", "torchtitan-llama3"), ("tune-qwen2", "epoch_0", "torchtune-qwen2")],
)
def test_of_a_real_checkpoint_and_a_config_nothing_is_decided_wrongly(case: str, inside: str, known: str) -> None:
    folder = peers.FIXTURES / "maps" / case
    found = derive_map(folder / inside, folder / "config.json")
    assert "models   " + json.loads((folder / "config.json").read_text())["model_type"] in found.text
    with ckpttool.open(folder / inside) as opened:
        names = [t.local_name for t in opened.checkpoint.tensors.values() if t.component == "model"]
    truth, mine = ({n: (g.line.parts[0] if g.from_whole else g.line.whole).named(g.numbers) for g in group_names(names, maps.load_map(m), "model", True)[0] for n in g.names.values()} for m in (known, found.text))  # fmt: skip
    assert len(mine) == sum(found.evidence.values()) >= 13
    assert mine.items() <= truth.items()
    assert found.proposed.items() <= truth.items()


@pytest.mark.slow
def test_equal_logits_decide_proposals_and_other_logits_do_not(tmp_path: Path) -> None:
    from transformers import Jais2Config, Starcoder2Config, Starcoder2ForCausalLM

    sizes = {"vocab_size": 131, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_act": "relu2", "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0}  # fmt: skip
    ours = Starcoder2Config(**sizes, use_bias=True, sliding_window=None, residual_dropout=0.0, embedding_dropout=0.0)
    theirs = Jais2Config(**sizes, head_dim=4, layer_norm_eps=ours.norm_epsilon, attention_bias=True, mlp_bias=True, rope_parameters=ours.rope_parameters)  # fmt: skip
    torch.manual_seed(0)
    state = {n: torch.randn_like(t) for n, t in Starcoder2ForCausalLM(ours).state_dict().items()}
    for config, name in ((ours, "a"), (ours, "swapped"), (theirs, "b")):
        config.save_pretrained(tmp_path / name)
    torch.save(state, tmp_path / "a" / "m.pt")
    found = derive_map(tmp_path / "a" / "m.pt", tmp_path / "b", prove_logits=True)
    assert found.complete
    assert found.logits is not None
    assert found.logits["largest"] == 0
    assert "model.layers.{i}.mlp.c_fc.weight = model.layers.{i}.mlp.up_proj.weight\n" in found.text
    # the model computes the same; its state dict has the two in another order, so that the proposal is wrong
    torch.save(dict(sorted(state.items(), key=lambda row: "c_fc" in row[0])), tmp_path / "swapped" / "m.pt")
    found = derive_map(tmp_path / "swapped" / "m.pt", tmp_path / "b", prove_logits=True)
    assert found.logits is not None
    assert found.logits["equal"] is False
    assert found.proposed["model.layers.0.mlp.c_fc.weight"] == "model.layers.0.mlp.down_proj.weight"
    assert "#model.layers.{i}.mlp.c_fc.weight = " in found.text
    assert "different, largest logit difference" in found.notes[0]


@pytest.mark.slow
def test_the_command_prints_a_map_and_ends_with_5_where_something_is_undecided(tmp_path: Path) -> None:
    found = derived(tmp_path, *pair(ones=True))
    done = ckpttool_here("maps", tmp_path / "a.pt", "--derive", tmp_path / "b.pt")
    assert (done.returncode, done.stdout) == (5, found.text)
    assert "14 weights decided; undecided: 2 in A alone, 2 in B alone" in done.stderr
    read = json.loads(ckpttool_here("maps", tmp_path / "a.pt", "--derive", tmp_path / "b.pt", "--json").stdout)
    assert (read["text"], read["complete"], read["logits"]) == (found.text, False, None)


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    derived(tmp_path, *pair())
    with pytest.raises(NotRecognised, match="no such file or folder"):
        derive_map(tmp_path / "none.pt", tmp_path / "b.pt")
    done = ckpttool_here("maps", "--derive", tmp_path / "b.pt")
    assert done.returncode == 2
    assert "Give the checkpoint to start from" in done.stderr
    done = ckpttool_here("maps", "--prove-logits")
    assert done.returncode == 2
    assert "needs --derive" in done.stderr
    (tmp_path / "config.json").write_text("{}")
    done = ckpttool_here("maps", tmp_path / "a.pt", "--derive", tmp_path / "config.json")
    assert done.stderr.startswith(f"error: {tmp_path / 'config.json'}: config.json has no model_type.")
    with pytest.raises(UsageError, match=r"both models need a config\.json"):
        derive_map(tmp_path / "a.pt", tmp_path / "b.pt", prove_logits=True)
