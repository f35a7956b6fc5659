"""`--map`: what becomes of weights, moments, step counts and param groups, read by torch; and what is refused, by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import ckpttool_here

import ckpttool
from ckpttool.errors import Unsupported, UsageError
from ckpttool.huggingface import maps
from ckpttool.index.expressions import evaluate, evaluate_size

HEAD = "sides here | there\n"
QKV = (
    HEAD
    + """
size h = head_dim
size n = heads / groups
layers.{i}.qkv [(g (n+1+1) h) x] = {i}.q [(g n h) x] + {i}.k [(g h) x] + {i}.v [(g h) x]
norm = norm
"""
)
CONFIG = '{"model_type": "x", "head_dim": 4, "heads": 6, "groups": 2}'


def state(model: dict[str, torch.Tensor], groups: list[list[str]] | None = None, **slots: Any) -> dict[str, Any]:
    """A state with Adam's moments, as get_state_dict names them."""
    seed = torch.Generator().manual_seed(7)
    optim = {
        n: {"step": torch.tensor(3.0), "exp_avg": torch.randn(w.shape, generator=seed), "exp_avg_sq": torch.rand(w.shape, generator=seed)}
        for n, w in model.items()
    }  # fmt: skip
    rows = [{"params": g, "lr": 0.1 * (i + 1)} for i, g in enumerate(groups or [list(model)])]
    return {"model": model, "optim": {"state": optim, "param_groups": rows}, **slots}


def fused(layers: int = 2) -> dict[str, torch.Tensor]:
    """Weights of the left side of QKV."""
    seed = torch.Generator().manual_seed(1)
    return {
        **{f"layers.{i}.qkv": torch.randn(40, 5, generator=seed) for i in range(layers)},
        "norm": torch.randn(3, generator=seed),
    }


def written(folder: Path, tree: dict[str, Any], text: str = QKV, config: str = CONFIG) -> tuple[Path, Path]:
    """(the checkpoint, the map)."""
    folder.mkdir(exist_ok=True)
    torch.save(tree, folder / "a.pt")
    (folder / "a.map").write_text(text)
    (folder / "config.json").write_text(config)
    return folder / "a.pt", folder / "a.map"


def through(folder: Path, tree: dict[str, Any], text: str = QKV, **more: Any) -> dict[str, Any]:
    """What torch reads of the mapped checkpoint."""
    src, name_map = written(folder, tree, text)
    out = folder / f"{len(list(folder.iterdir()))}.pt"
    ckpttool.convert(src, out, map=name_map, config=str(folder), canonical_keys=True, **more)
    found: dict[str, Any] = torch.load(out, weights_only=True)
    return found


def test_moments_are_cut_as_their_weight_is_and_steps_are_copied(tmp_path: Path) -> None:
    tree = state(fused())
    got = through(tmp_path, tree)
    for i in range(2):
        for mine, theirs in [
            (tree["model"][f"layers.{i}.qkv"], {k: got["model"][f"{i}.{k}"] for k in "qkv"}),
            *[
                (tree["optim"]["state"][f"layers.{i}.qkv"][s], {k: got["optim"]["state"][f"{i}.{k}"][s] for k in "qkv"})
                for s in ("exp_avg", "exp_avg_sq")
            ],
        ]:
            by_group = mine.view(2, 5, 4, 5)
            assert torch.equal(theirs["q"], by_group[:, :3].reshape(24, 5))
            assert torch.equal(theirs["k"], by_group[:, 3].reshape(8, 5)) and torch.equal(
                theirs["v"], by_group[:, 4].reshape(8, 5)
            )
        assert all(got["optim"]["state"][f"{i}.{k}"]["step"] == 3 for k in "qkv")
    assert got["optim"]["param_groups"][0]["params"] == ["0.q", "0.k", "0.v", "1.q", "1.k", "1.v", "norm"]
    assert got["optim"]["param_groups"][0]["lr"] == 0.1


def same(a: Any, b: Any) -> bool:
    """Whether two trees are equal, bit for bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(v, b[k]) for k, v in a.items())
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(torch.equal(a, b)) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("middle", ["full", "dcp"])
def test_there_and_back_is_the_identity(tmp_path: Path, middle: str) -> None:
    tree = state(fused(3), [["layers.2.qkv", "norm"], ["layers.0.qkv", "layers.1.qkv"]], trainer={"step": 3})
    src, name_map = written(tmp_path, tree)
    there = tmp_path / ("there.pt" if middle == "full" else "there")
    to = {"to": "dcp", "world_size": 3} if middle == "dcp" else {}
    ckpttool.convert(src, there, map=name_map, config=str(tmp_path), canonical_keys=True, **to)
    ckpttool.convert(there, tmp_path / "back.pt", map=name_map, config=str(tmp_path), canonical_keys=True)
    assert same(torch.load(tmp_path / "back.pt"), tree)


def test_names_that_no_line_is_about_stop_it(tmp_path: Path) -> None:
    tree = state({**fused(), "bias": torch.zeros(2), "scale": torch.zeros(2)})
    with pytest.raises(
        Unsupported, match=r'4 of 10 names are not names of here: "model.bias", "model.scale", "optim.state.bias"'
    ):
        through(tmp_path, tree)
    del tree["model"]["bias"], tree["model"]["scale"]
    with pytest.raises(Unsupported, match=r'"optim.state.bias"'):
        through(tmp_path, tree)


def test_a_factored_slot_is_refused_where_its_parameter_is_cut_and_goes_along_where_it_is_renamed(
    tmp_path: Path,
) -> None:
    tree = state(fused())
    for n, slots in tree["optim"]["state"].items():
        slots["exp_avg_sq_row"] = torch.ones(tree["model"][n].shape[0])
    with pytest.raises(
        Unsupported, match=r'"optim.state.layers.0.qkv.exp_avg_sq_row" is \[40\].* cuts, joins or permutes'
    ):
        through(tmp_path, tree)
    rename = HEAD + "layers.{i}.qkv = blocks.{i}.attn\nnorm = norm\n"
    got = through(tmp_path, tree, rename)
    assert torch.equal(got["optim"]["state"]["blocks.1.attn"]["exp_avg_sq_row"], torch.ones(40))


def parted() -> dict[str, torch.Tensor]:
    """Weights of the right side of QKV."""
    seed = torch.Generator().manual_seed(2)
    return {
        "0.q": torch.randn(24, 5, generator=seed),
        "0.k": torch.randn(8, 5, generator=seed),
        "0.v": torch.randn(8, 5, generator=seed),
    }


def test_what_cannot_be_joined_is_refused(tmp_path: Path) -> None:
    tree = state(parted())
    tree["optim"]["state"]["0.k"]["step"] = torch.tensor(4.0)
    with pytest.raises(Unsupported, match=r'"optim.state.0.q.step" and "optim.state.0.k.step" differ'):
        through(tmp_path, tree)
    with pytest.raises(Unsupported, match=r'"0.q" and "0.v" are in different param groups'):
        through(tmp_path, state(parted(), [["0.q", "0.k"], ["0.v"]]))
    tree = state(parted())
    del tree["optim"]["state"]["0.v"]
    with pytest.raises(Unsupported, match=r'state for "0.q" and none for "0.v"'):
        through(tmp_path, tree)
    tree = state(parted())
    tree["model"]["0.k"] = tree["model"]["0.k"].bfloat16()
    with pytest.raises(Unsupported, match=r'"model.0.q" is float32 and "model.0.k" is bfloat16'):
        through(tmp_path, tree)
    with pytest.raises(
        Unsupported, match=r'"layers.0.qkv" is made of 3 tensors, and 1 of them are not here, first "0.v"'
    ):
        through(tmp_path, {"model": {k: v for k, v in parted().items() if k != "0.v"}})


def test_a_shape_that_the_map_does_not_allow_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r'"layers.0.qkv" is \[41, 5\], and the map given says'):
        through(tmp_path, {"model": {"layers.0.qkv": torch.zeros(41, 5)}})
    src, name_map = written(tmp_path, {"model": fused()}, config='{"model_type": "x"}')
    with pytest.raises(Unsupported, match=r'needs h = head_dim, of config.json for "layers.0.qkv"'):
        ckpttool.convert(src, tmp_path / "o.pt", map=name_map, config=str(tmp_path))


def test_experts_that_are_numbered_become_one_tensor_and_layers_may_be_stacked(tmp_path: Path) -> None:
    text = (
        HEAD
        + """
layers{.i}.w [f x]    = blocks.{i}.up [f x]
layers.{i}.e [e x f]  = blocks.{i}.expert.{e} [f x]     # transposed
"""
    )
    model = {"layers.w": torch.randn(3, 4, 5), **{f"layers.{i}.e": torch.randn(2, 5, 4) for i in range(3)}}
    tree = state(model)
    got = through(tmp_path, tree, text)
    assert len(got["model"]) == 3 + 6
    for i in range(3):
        assert torch.equal(got["model"][f"blocks.{i}.up"], model["layers.w"][i])
        for e in range(2):
            assert torch.equal(got["model"][f"blocks.{i}.expert.{e}"], model[f"layers.{i}.e"][e].T)
            assert torch.equal(
                got["optim"]["state"][f"blocks.{i}.expert.{e}"]["exp_avg"],
                tree["optim"]["state"][f"layers.{i}.e"]["exp_avg"][e].T,
            )
    back = through(tmp_path, got, text)  # numbered layers are the first of the two ways to write them
    assert torch.equal(back["model"]["layers.2.w"], model["layers.w"][2])
    assert torch.equal(back["model"]["layers.2.e"], model["layers.2.e"])
    del got["model"]["blocks.1.expert.0"]
    with pytest.raises(Unsupported, match=r'first "blocks.1.expert.0"'):
        through(tmp_path, {"model": got["model"]}, text)


def test_numbers_in_names_and_sizes_of_files_do_not_make_it_hang(tmp_path: Path) -> None:
    text = HEAD + "e [n x] = expert.{n} [x]\n"
    with pytest.raises(
        Unsupported, match=r'"e" is made of 900,000,000 tensors, and 899,999,999 of them are not here, first "expert.0"'
    ):
        through(tmp_path, {"model": {"expert.899999999": torch.zeros(2)}}, text)
    with pytest.raises(Unsupported, match="not names of here"):
        through(tmp_path, {"model": {f"expert.{'9' * 5000}": torch.zeros(2)}}, text)
    with pytest.raises(Unsupported, match=r'"e" would become 1,000,000,000,000 tensors'):
        through(tmp_path, {"model": {"e": torch.zeros(10**12, 0)}}, text)
    with pytest.raises(Unsupported, match=r'first "expert.1"'):
        through(tmp_path, {"model": {"expert.0": torch.zeros(2), "expert.2": torch.zeros(2)}}, text)


PADDED = HEAD + "size v = vocab_size\nemb [(v+_) x] = wte.weight [v x]\n"


@pytest.mark.parametrize(
    ("rows", "moments", "said"),
    [
        ("equal", "some", "all equal, so nothing was learned"),
        ("random", "zero", "moments of 0, so nothing was learned"),
        ("random", "some", "of which 2 have moments that are not 0: what was learned in them is not carried"),
        ("random", "none", "without an optimizer nothing tells whether they were trained"),
    ],
)
def test_rows_of_padding_are_cut_and_said(tmp_path: Path, rows: str, moments: str, said: str) -> None:
    weight = torch.randn(10, 3)
    if rows == "equal":
        weight[7:] = 0.5
    tree = state({"emb": weight})
    for slot in ("exp_avg", "exp_avg_sq"):
        tree["optim"]["state"]["emb"][slot][7 if moments == "zero" else 9 :] = 0
    if moments == "none":
        del tree["optim"]
    src, name_map = written(tmp_path, tree, PADDED, '{"model_type": "x", "vocab_size": 7}')
    done = ckpttool.convert(src, tmp_path / "o.pt", map=name_map, config=str(tmp_path), canonical_keys=True)
    note = next(n for n in done.notes if "rows behind" in n)
    assert said in note and note.startswith('"emb": 3 rows behind the 7 of the vocabulary were cut')
    got = torch.load(tmp_path / "o.pt")
    assert torch.equal(got["model"]["wte.weight"], weight[:7])
    if moments != "none":
        assert torch.equal(got["optim"]["state"]["wte.weight"]["exp_avg"], tree["optim"]["state"]["emb"]["exp_avg"][:7])


def test_param_groups_that_the_map_would_join_are_refused_before_padding_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckpttool.engine.transform import mapping

    looked: list[str] = []
    odd_rows = mapping.find_unequal_rows

    def counted(*args: Any) -> Any:
        looked.append("rows")
        return odd_rows(*args)

    monkeypatch.setattr(mapping, "find_unequal_rows", counted)
    text = PADDED + "q [f x] + v [f x] = qv [((1+1) f) x]\n"
    model = {"emb": torch.randn(10, 3), "q": torch.randn(2, 3), "v": torch.randn(2, 3)}
    config = '{"model_type": "x", "vocab_size": 7}'
    src, name_map = written(tmp_path, state(model, [["emb"], ["q", "v"]]), text, config)
    ckpttool.convert(src, tmp_path / "o.pt", map=name_map, config=str(tmp_path))
    assert looked
    looked.clear()
    src, name_map = written(tmp_path, state(model, [["emb", "q"], ["v"]]), text, config)
    with pytest.raises(Unsupported, match=r'"q" and "v" are in different param groups'):
        ckpttool.convert(src, tmp_path / "p.pt", map=name_map, config=str(tmp_path))
    assert looked == []


def test_padding_is_kept_where_nothing_tells_the_size_of_the_vocabulary_or_it_was_asked_for(tmp_path: Path) -> None:
    weight = torch.randn(10, 3)
    src, name_map = written(tmp_path, {"model": {"emb": weight}}, PADDED, '{"model_type": "x"}')
    done = ckpttool.convert(src, tmp_path / "o.pt", map=name_map, config=str(tmp_path), canonical_keys=True)
    assert torch.equal(torch.load(tmp_path / "o.pt")["model"]["wte.weight"], weight)
    assert any("padding, if there are some, are kept" in n for n in done.notes)
    (tmp_path / "config.json").write_text('{"model_type": "x", "vocab_size": 7}')
    ckpttool.convert(src, tmp_path / "p.pt", map=name_map, config=str(tmp_path), canonical_keys=True, vocab_size=10)
    assert torch.equal(torch.load(tmp_path / "p.pt")["model"]["wte.weight"], weight)
    # and back, with more rows: zeros, since the embedding has that many rows in the end
    text = PADDED.replace("emb [", "word_embeddings.weight [")
    src, name_map = written(tmp_path, {"model": {"wte.weight": weight}}, text, '{"model_type": "x", "vocab_size": 10}')
    ckpttool.convert(src, tmp_path / "q.pt", map=name_map, config=str(tmp_path), canonical_keys=True, vocab_size=12)
    got = torch.load(tmp_path / "q.pt")["model"]["word_embeddings.weight"]
    assert torch.equal(got[:10], weight) and got.shape == (12, 3) and not got[10:].any()


def test_what_is_no_tensor_in_the_model_is_renamed_or_stops_it(tmp_path: Path) -> None:
    text = HEAD + "a = b\na._extra_state = b._extra_state\n"
    tree = {"model": {"a": torch.ones(2), "a._extra_state": [1, 2]}}
    assert through(tmp_path, tree, text)["model"]["b._extra_state"] == [1, 2]
    tree["model"]["c._extra_state"] = [3]
    with pytest.raises(Unsupported, match=r'1 of 3 names are not names of here: "model.c._extra_state"'):
        through(tmp_path, tree, text)


def test_what_a_map_leaves_out_is_said_and_refused_where_it_must_be_zero(tmp_path: Path) -> None:
    text = HEAD + "a = b\nignore-zero bias.{i} : there is no bias there\nignore cache : it is computed\n"
    model = {"a": torch.ones(2), "bias.0": torch.zeros(3), "cache": torch.ones(1)}
    src, name_map = written(tmp_path, {"model": model}, text)
    done = ckpttool.convert(src, tmp_path / "o.pt", map=name_map, canonical_keys=True)
    assert {
        '1 entries were left out, first "bias.0": there is no bias there',
        '1 entries were left out, first "cache": it is computed',
    } <= set(done.notes)
    assert set(torch.load(tmp_path / "o.pt")["model"]) == {"b"}
    model["bias.0"][1] = 1
    with pytest.raises(Unsupported, match=r'"bias.0" is not 0, and there has nothing to put it in'):
        through(tmp_path, {"model": model}, text)


def test_zeros_that_the_other_side_has_not_are_made_again(tmp_path: Path) -> None:
    text = HEAD + "gate.{i} = g.{i}\nignore-zero bias.{i} [e] float32 with gate.{i} [e x] : there is no bias there\n"
    model = {f"gate.{i}": torch.randn(3 + i, 2) for i in range(2)} | {f"bias.{i}": torch.zeros(3 + i) for i in range(2)}
    src, name_map = written(tmp_path, {"model": model}, text)
    ckpttool.convert(src, tmp_path / "there.pt", map=name_map, canonical_keys=True)
    assert set(torch.load(tmp_path / "there.pt")["model"]) == {"g.0", "g.1"}
    for out, how in (("back.pt", {}), ("back", {"to": "dcp", "world_size": 3})):
        done = ckpttool.convert(tmp_path / "there.pt", tmp_path / out, map=name_map, canonical_keys=True, **how)
        assert '2 tensors of zeros were added, first "model.bias.0": there is no bias there' in done.notes
        assert ckpttool.diff(src, tmp_path / out, only=["model"]).equal
    assert ckpttool.diff(tmp_path / "there.pt", src, map=name_map, only=["model"]).equal
    for line, why in (
        ("gate.{i} [e x] float32 with gate.{i} [e x]", 'makes two tensors of the name "model.gate.0"'),
        ("bias.{i} [e] float32 with gate.{i} [(e x)]", r"is \[3, 2\], and the map .*: it has 2 dimensions"),
        ("bias.{i} [e] float32 with gate.{i} [(e y) x]", "the size of e does not follow"),
    ):
        with pytest.raises(Unsupported, match=why):
            through(
                tmp_path, {"model": {"g.0": torch.randn(3, 2)}}, HEAD + f"gate.{{i}} = g.{{i}}\nignore-zero {line}\n"
            )
    unused = "ignore-zero z [e] float32 with zz [e] : unused\n"
    src, name_map = written(tmp_path, {"model": {"g.0": torch.randn(3, 2)}}, text + unused)
    assert not any("unused" in n for n in ckpttool.convert(src, tmp_path / "once.pt", map=name_map).notes)
    for line in (
        "[e] float3 with gate.{i} [e x]",
        "[k] float32 with gate.{i} [e x]",
        "[e] float32 with gate [e x]",
        "with gate.{i} [e x]",
    ):
        with pytest.raises(UsageError, match=r"is not NAME \[axes\] DTYPE with OTHER \[axes\]"):
            through(tmp_path, {"model": model}, HEAD + f"gate.{{i}} = g.{{i}}\nignore-zero bias.{{i}} {line} : why\n")


COPIED = (
    HEAD
    + """
copy-left   tail.out.w of out.w
copy-right  further.{i}.emb of emb with further.{i}.norm
in.w = emb
out.w = head
tail.out.w = head
extra.{i}.norm = further.{i}.norm
"""
)


def test_a_weight_that_a_side_has_twice_is_there_once_on_the_other(tmp_path: Path) -> None:
    out, emb = torch.randn(3, 2), torch.randn(4, 2)
    left = {"in.w": emb, "out.w": out, "tail.out.w": out.clone(), "extra.0.norm": torch.ones(2), "extra.1.norm": torch.zeros(2)}  # fmt: skip
    right = {"emb": emb, "head": out, **{f"further.{i}.{n}": t for i in range(2) for n, t in {"norm": left[f"extra.{i}.norm"], "emb": emb}.items()}}  # fmt: skip
    src, name_map = written(tmp_path, {"model": left}, COPIED)
    done = ckpttool.convert(src, tmp_path / "there.pt", map=name_map, canonical_keys=True)
    assert same(torch.load(tmp_path / "there.pt")["model"], right)
    assert {
        'copies of other weights, left out after a comparison of bytes: 1, first "model.tail.out.w"',
        'copies of other weights, added since there has them: 2, first "model.further.0.emb"',
    } <= set(done.notes)
    assert same(through(tmp_path, {"model": {n: t.clone() for n, t in right.items()}}, COPIED)["model"], left)
    moments = {n: {"exp_avg": torch.randn(t.shape)} for n, t in left.items() if n != "tail.out.w"}
    tree = through(
        tmp_path, {"model": left, "optim": {"state": moments, "param_groups": [{"params": list(moments)}]}}, COPIED
    )
    assert set(tree["optim"]["state"]) == {"emb", "head", "further.0.norm", "further.1.norm"}
    # the only one is no copy
    assert same(
        through(tmp_path, {"model": {"in.w": emb, "tail.out.w": out}}, COPIED)["model"], {"emb": emb, "head": out}
    )
    for odd in (out + 1, out.half(), out.reshape(2, 3)):
        with pytest.raises(Unsupported, match=r'"model.tail.out.w" and "model.out.w" differ, and the map'):
            through(tmp_path, {"model": {**left, "tail.out.w": odd}}, COPIED)
    kept = through(tmp_path, {"model": {**left, "tail.out.w": out + 1}}, COPIED, drop_matching=["model.tail.out.w"])
    assert same(kept["model"], right)


def test_numbers_behind_a_size_of_the_config(tmp_path: Path) -> None:
    text = HEAD + "size depth = layers\nnext.{i}.w [a b] = all.{i+depth}.w [a b]\nfirst.{i}.w [a b] = all.{i}.w [a b]\n"
    left = {"first.0.w": torch.ones(2, 1), "first.1.w": torch.zeros(2, 1), "next.0.w": torch.full((2, 1), 2.0)}
    src, name_map = written(tmp_path, state(left), text, '{"layers": 2}')
    ckpttool.convert(src, tmp_path / "there.pt", map=name_map, config=str(tmp_path), canonical_keys=True)
    there = torch.load(tmp_path / "there.pt")
    assert {n: int(t[0]) for n, t in there["model"].items()} == {"all.0.w": 1, "all.1.w": 0, "all.2.w": 2}
    assert set(there["optim"]["state"]) == set(there["optim"]["param_groups"][0]["params"]) == set(there["model"])
    ckpttool.convert(
        tmp_path / "there.pt", tmp_path / "back.pt", map=name_map, config=str(tmp_path), canonical_keys=True
    )
    assert same(torch.load(tmp_path / "back.pt"), torch.load(src))
    (tmp_path / "config.json").write_text('{"other": 2}')
    with pytest.raises(Unsupported, match=r'needs depth = layers, of config.json for "next.0.w"') as stopped:
        ckpttool.convert(src, tmp_path / "o.pt", map=name_map, config=str(tmp_path))
    assert stopped.value.code == "CKPT0312"
    # without such layers the size is not needed
    src, name_map = written(tmp_path, state({"first.0.w": torch.ones(2, 1)}), text, '{"other": 2}')
    ckpttool.convert(src, tmp_path / "o.pt", map=name_map, config=str(tmp_path), canonical_keys=True)
    assert set(torch.load(tmp_path / "o.pt")["model"]) == {"all.0.w"}


@pytest.mark.slow
def test_workers_get_the_text_of_a_map_file(tmp_path: Path) -> None:
    src, name_map = written(tmp_path, state(fused(4)))
    for out, workers in (("one", "1"), ("two", "2")):
        done = ckpttool_here(
            "convert",
            src,
            tmp_path / out,
            "--to",
            "dcp",
            "-n",
            "2",
            "--map",
            name_map,
            "--config",
            tmp_path,
            "--workers",
            workers,
        )
        assert done.returncode == 0, done.stderr
    assert ckpttool.diff(tmp_path / "one", tmp_path / "two").equal


def test_diff_and_inspect_look_through_a_map(tmp_path: Path) -> None:
    tree = state(fused())
    src, name_map = written(tmp_path, tree)
    ckpttool.convert(src, tmp_path / "there", to="dcp", world_size=2, map=name_map, config=str(tmp_path))
    found = ckpttool.diff(src, tmp_path / "there", map=name_map, config=str(tmp_path))
    assert found.equal and found.tensors == 28
    back = ckpttool_here("diff", tmp_path / "there", src, "--map", name_map, "--config", tmp_path)
    assert back.returncode == 0, back.stdout + back.stderr
    tree["optim"]["state"]["layers.1.qkv"]["exp_avg"][39, 4] += 1
    torch.save(tree, src)
    found = ckpttool.diff(src, tmp_path / "there", map=name_map, config=str(tmp_path))
    assert [t.name for t in found.data] == ["optim.state.1.v.exp_avg"] and found.data[0].first == (7, 4)
    shown = ckpttool_here("inspect", src, "--tensor", "model.1.k", "--map", name_map, "--config", tmp_path)
    assert "not looked at" not in shown.stdout + back.stdout
    assert shown.returncode == 0 and "model.1.k  float32 [8, 5]" in shown.stdout and "2 chunks" in shown.stdout


def test_recorded_digests_of_renamed_tensors_are_compared(tmp_path: Path) -> None:
    src, name_map = written(tmp_path, state(fused()))
    ckpttool.convert(src, tmp_path / "dcp", to="dcp", world_size=2)
    done = ckpttool.convert(tmp_path / "dcp", tmp_path / "o.pt", map=name_map, config=str(tmp_path))
    # the norm with its three slots goes on as it is; two layers with two moments do not, and their steps are copied
    assert done.compared == 4 and any(
        n.startswith("the recorded digests of 8 tensors were not compared") for n in done.notes
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a = b\n", "sides LEFT"), (HEAD, "no line NAME"), (HEAD + "a\n", "is not NAME = NAME"), (HEAD + "a = b = c\n", "is not NAME = NAME"),
        (HEAD + "a = b + c\n", "made of several needs axes"), (HEAD + "a [x] = b\n", "either all tensors"),
        (HEAD + "a.{i} = b\n", "needs axes"), (HEAD + "a.{i} = b.{j}\n", "same variables"),
        (HEAD + "a [x y] = b [x z]\n", "axes of its part"), (HEAD + "a [(f+f) x] = b [f x]\n", "2 terms"),
        (HEAD + "a [(_+f) x] = b [f x]\n", "_ comes last"), (HEAD + "a + b = c + d\n", "only one side"),
        (HEAD + "size v = __import__('os')\na = b\n", "a size is made of numbers"), (HEAD + "a{.i} = b.{i}\n", "need their axes"),
        (HEAD + "a.{i}.{i} = b\n", "variable twice"), (HEAD + "include nowhere\n", "include nowhere: no such map"),
        ("include meta-llama\n" * 3000, ":2: meta-llama is included a second time"),
        (HEAD + "a [x (v+_)] = b [x v]\n", "only rows can be padding"), (HEAD + "a [_ x] = b [_ x]\n", ":2: .*_ is a term of a sum"),
        (HEAD + f"a [{'(' * 4000}x] = b [x]\n", "nested deeper than 50"), (HEAD + "a{i}{j}.x = b{i}{j}.x\n", "other text than digits between"),
        (HEAD + "a.{i}1{j} = b.{i}.{j}\n", "other text than digits between"), (HEAD + "size = 3\na = b\n", "write size NAME"),
        (HEAD + "ignore a.{i}.{i} : why\n", ":2: .* variable twice"), (HEAD + "ignore a{.i} : why\n", r"\{\.i\} is for equations"),
        (HEAD + "ignore : why\n", "is not the name of a tensor"), (HEAD + "ignore-zero a [x] float32 with : why\n", "is not the name of a tensor"),
        (HEAD + "copy-left a : b\n", "write copy-left NAME of OTHER"), (HEAD + "copy-right a.{i} of b\n", ":2: a.{i} has other variables"),
        (HEAD + "copy-right a.{i} of b.{j} with c.{i}\n", "or b.{j} has more"), (HEAD + "a.{*+n} = b.{*}\n", "on both sides of a line"),
        (HEAD + "ignore-zero a [x x] float32 with b [x] : why\n", ":2: .* stands for two axes"), (HEAD + "a" * 5000 + "\n", r"a\.\.\.' is not NAME"),
    ],
)  # fmt: skip
def test_a_map_that_makes_no_sense_is_refused_with_its_line(text: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        maps.load_map(text)


def test_a_file_that_is_no_map_is_refused(tmp_path: Path) -> None:
    src, name_map = written(tmp_path, {"model": {"a": torch.ones(2)}}, HEAD + "a = b\n# " + "x" * (1 << 20))
    with pytest.raises(UsageError, match="more than 1,048,576 characters"):
        ckpttool.convert(src, tmp_path / "o.pt", map=name_map)
    with pytest.raises(UsageError, match="not a regular file"):
        ckpttool.convert(src, tmp_path / "o.pt", map=tmp_path)
    name_map.write_text(HEAD + "a = b\n", encoding="utf-8-sig")
    ckpttool.convert(src, tmp_path / "o.pt", map=name_map, canonical_keys=True)
    assert set(torch.load(tmp_path / "o.pt")["model"]) == {"b"}


def test_sizes_are_expressions_over_the_config() -> None:
    assert evaluate_size("head_dim | hidden / heads", {"hidden": 40, "heads": 4}) == 10
    assert evaluate_size("head_dim | hidden / heads", {"hidden": 40, "heads": 4, "head_dim": 16}) == 16
    assert (
        evaluate_size("2 * a + 1", {"a": 3}) == 7
        and evaluate_size("a", {"a": None}) is None
        and evaluate_size("a", {"a": True}) is None
    )
    with pytest.raises(UsageError, match="not a whole number"):
        evaluate_size("a / 3", {"a": 10})


def test_no_map_and_no_such_map(tmp_path: Path) -> None:
    src, _ = written(tmp_path, {"model": fused()})
    with pytest.raises(UsageError, match="no such file, and no such map"):
        ckpttool.convert(src, tmp_path / "o.pt", map="nonsense")
    row = json.loads(ckpttool_here("maps", "meta-llama", "--json").stdout)
    assert row["right"] == "transformers" and row["text"] == ckpttool_here("maps", "meta-llama").stdout
    ckpttool.convert(src, tmp_path / "o.pt", map="none", canonical_keys=True)
    assert set(torch.load(tmp_path / "o.pt")["model"]) == set(fused())


@pytest.mark.parametrize(
    ("expression", "value"),
    [("a", 6), ("7", 7), ("a / 2 | b", 3), ("c | a", 6), ("c | c", None), ("a - 2 - 1", 3), ("a - (2 - 1)", 5), ("2 + a * 2", 14), ("(2+a)*2", 16),
     ("a / 2 / 3", 1), ("d / 2 | e / f / 2", 4), ("c + 1", None), ("²", None), ("g.h * 2", 8), ("g.i | a", 6),
     ("g | a", 6)],
)  # fmt: skip
def test_sizes_are_expressions_of_the_config(expression: str, value: int | None) -> None:
    assert evaluate_size(expression, {"a": 6, "b": 1, "e": 16, "f": 2, "g": {"h": 4}}) == value


@pytest.mark.parametrize(
    "expression",
    ["", "a b", "a +", "(a", "a)", "a ** 2", "-a", "1.5", "a + 1.", "'a'", "(" * 300, "a" * 400, "()", "a || b"],
)
def test_what_is_no_expression_is_refused(expression: str) -> None:
    with pytest.raises(UsageError, match=r"not of|not an expression"):
        evaluate_size(expression, {"a": 6})


def test_a_size_must_be_whole() -> None:
    for expression in ("a / 4", "a / 0"):
        with pytest.raises(UsageError, match="not a whole number"):
            evaluate_size(expression, {"a": 6})
    with pytest.raises(UsageError, match="5 - 6, which is less than 0"):
        evaluate_size("5 - a", {"a": 6})


ROPE = (
    HEAD
    + """
models x
size pair = 2
size half = head_dim / 2
premise heads = heads
premise theta | 10000 = rope.theta | theta
premise act is 'silu' = act is 'silu' or act is 'swish' if gated
add-one *norm if centered
when turned: q [(g half pair) x] = query [(g pair half) x]
q = query
norm = ln
"""
)


def rope_state(dtype: torch.dtype = torch.float32, args: dict[str, Any] | None = None) -> dict[str, Any]:
    """A state of the left side of ROPE, with masters and the arguments of its job."""
    seed = torch.Generator().manual_seed(3)
    model = {"q": torch.randn(8, 3, generator=seed), "norm": torch.randn(500, generator=seed) * 0.3}
    tree = state({n: w.to(dtype) for n, w in model.items()})
    return tree | {"extra": {"args": args, "master": model} if args is not None else {}}


def test_lines_count_where_the_job_s_arguments_say_so(tmp_path: Path) -> None:
    tree = rope_state(args={"heads": 6, "turned": True, "centered": False})
    got = through(tmp_path, tree, ROPE)
    assert torch.equal(got["model"]["query"], tree["model"]["q"].view(2, 2, 2, 3).transpose(1, 2).reshape(8, 3))
    moments = tree["optim"]["state"]["q"]["exp_avg"].view(2, 2, 2, 3).transpose(1, 2).reshape(8, 3)
    assert torch.equal(got["optim"]["state"]["query"]["exp_avg"], moments)
    assert torch.equal(got["model"]["ln"], tree["model"]["norm"])
    got = through(tmp_path, rope_state(args={"heads": 6, "turned": False, "centered": False}), ROPE)
    assert torch.equal(got["model"]["query"], tree["model"]["q"])


@pytest.mark.parametrize("through_dcp", [False, True])
def test_the_job_s_arguments_count_where_only_the_model_is_wanted(through_dcp: bool, tmp_path: Path) -> None:
    tree = rope_state(args={"heads": 6, "turned": True, "centered": True})
    src, name_map = written(tmp_path, tree, ROPE)
    if through_dcp:
        ckpttool.convert(src, tmp_path / "dcp", to="dcp", world_size=2)
        src = tmp_path / "dcp"
    ckpttool.convert(src, tmp_path / "o.pt", map=name_map, config=str(tmp_path), canonical_keys=True, only=["model"])
    got = torch.load(tmp_path / "o.pt")
    assert list(got) == ["model"] and torch.equal(got["model"]["ln"], tree["model"]["norm"] + 1)
    assert torch.equal(got["model"]["query"], tree["model"]["q"].view(2, 2, 2, 3).transpose(1, 2).reshape(8, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norms_that_are_stored_less_one_are_the_sum_that_the_job_multiplies_with(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    tree = rope_state(dtype, {"heads": 6, "turned": False, "centered": True})
    src, name_map = written(tmp_path, tree, ROPE)
    done = ckpttool.convert(src, tmp_path / "o.pt", map=name_map, canonical_keys=True)
    got = torch.load(tmp_path / "o.pt")
    old = tree["model"]["norm"]
    assert torch.equal(got["model"]["ln"], old + 1)
    rounded = int(((old + 1) - 1 != old).sum())
    assert any(f"{str(dtype)[6:]} rounds in {rounded:,} of 500 elements" in n for n in done.notes) and rounded > 100
    master = got["extra"]["master"]["ln"]
    assert master.dtype == torch.float32 and torch.equal(master.to(dtype), got["model"]["ln"])
    before = tree["extra"]["master"]["norm"]  # a master is no further from it than its weight was
    assert ((master.double() - 1 - before.double()).abs() <= (old.double() - before.double()).abs() + 2e-7).all()
    moments = got["optim"]["state"]["ln"]
    assert all(torch.equal(t, tree["optim"]["state"]["norm"][s]) for s, t in moments.items())
    ckpttool.convert(tmp_path / "o.pt", tmp_path / "back.pt", map=name_map, canonical_keys=True, config=str(tmp_path))
    back = torch.load(tmp_path / "back.pt")
    assert torch.equal(back["model"]["norm"] + 1, old + 1)  # which is all that the job looks at


def test_a_decay_of_norms_that_are_stored_less_one_is_said(tmp_path: Path) -> None:
    tree = rope_state(args={"heads": 6, "centered": True})
    for group in tree["optim"]["param_groups"]:
        group["weight_decay"] = 0.1
    src, name_map = written(tmp_path, tree, ROPE)
    done = ckpttool.convert(src, tmp_path / "o.pt", map=name_map)
    assert any("1 of these have a weight decay of 0.1" in n for n in done.notes)


@pytest.mark.parametrize(
    ("args", "config", "said"),
    [
        ({"heads": 3}, {}, r"\(extra.args\) has heads = 3, and config.json beside the source has heads = 6"),
        ({"heads": 6}, {"rope": {"theta": 5e5}}, "has none of theta, and .* rope.theta = 500000.0"),
        ({"heads": 6, "gated": True, "act": "silu"}, {"act": "gelu"}, "act = 'silu', and .* act = 'gelu'"),
        ({"heads": 6}, {"model_type": "y"}, "it is for model_type x, and config.json beside the source says 'y'"),
    ],
)
def test_a_job_that_contradicts_a_premise_is_refused_with_both_values(
    args: dict[str, Any], config: dict[str, Any], said: str, tmp_path: Path
) -> None:
    src, name_map = written(tmp_path, rope_state(args=args), ROPE, json.dumps({**json.loads(CONFIG), **config}))
    with pytest.raises(Unsupported, match=said):
        ckpttool.convert(src, tmp_path / "o.pt", map=name_map)
    assert not (tmp_path / "o.pt").exists()


def test_premises_that_nothing_tells_are_said_once(tmp_path: Path) -> None:
    src, name_map = written(tmp_path, rope_state(), ROPE)
    done = ckpttool.convert(src, tmp_path / "o.pt", map=name_map)
    said = [n for n in done.notes if "premises" in n]
    assert (
        len(said) == 1 and "has no arguments of the job" in said[0] and "heads, theta, act, turned, centered" in said[0]
    )
    src, name_map = written(tmp_path, rope_state(args={"heads": 6, "turned": False}), ROPE)
    done = ckpttool.convert(src, tmp_path / "p.pt", map=name_map)
    said = [n for n in done.notes if "premises" in n]
    assert len(said) == 1 and "does not say all" in said[0] and said[0].endswith(": centered")
    src, name_map = written(tmp_path, rope_state(args={"heads": 6, "turned": False, "centered": False}), ROPE)
    done = ckpttool.convert(src, tmp_path / "q.pt", map=name_map)
    assert not any("premises" in n for n in done.notes)


def test_the_arguments_are_those_of_nemo_and_of_meta_too(tmp_path: Path) -> None:
    src, name_map = written(tmp_path, rope_state(), ROPE.replace("heads = heads", "n_heads = heads"))
    (tmp_path / "params.json").write_text(json.dumps({"dim": 8, "n_layers": 2, "n_heads": 3}))
    with pytest.raises(Unsupported, match=r"params.json has n_heads = 3, and .* heads = 6"):
        ckpttool.convert(src, tmp_path / "o.pt", map=name_map)
    (tmp_path / "context").mkdir()
    (tmp_path / "context" / "model.yaml").write_text(
        "_target_: a.Model\nconfig:\n  _target_: a.Config\n  activation:\n    n_heads: 9\n  n_heads: 4\n  kind: 'x'\ndata: 1\n"
    )
    with pytest.raises(Unsupported, match=r"model.yaml has n_heads = 4, and .* heads = 6"):
        ckpttool.convert(src, tmp_path / "o.pt", map=name_map)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("premise a", "write premise JOB = CONFIG"), ("premise a = b c", "is not an expression of"), ("premise a = b if", "is not an expression of"),
        ("premise a + = b", "is not an expression of"), ("add-one a", "write add-one GLOB if CONDITION"), ("add-one a b if c", "write add-one"),
        ("add-one a if (", "is not an expression of"), ("when a b: c = d", "is not an expression of"), ("when a: c", "is not NAME = NAME"),
    ],
)  # fmt: skip
def test_premises_that_make_no_sense_are_refused_with_their_line(line: str, why: str) -> None:
    with pytest.raises(UsageError, match=f":2: .*{why}"):
        maps.load_map(f"{HEAD}{line}\na = b\n")


def test_expressions_of_premises() -> None:
    job = {"a": 6, "on": True, "off": False, "none": None, "kind": "x", "inside": {"b": 2.5}, "row": [7, 0]}
    for expression, value in {
        "a": 6, "inside.b": 2.5, "row.0": 7, "row.2": None, "none": None, "none | 'y'": "y", "kind is 'x'": True, "off | true": False,
        "kind is 'y' or a is 6": True, "none is 1": None, "(none | 0) is 0": True, "a / 2 - 1": 2, "1e-5": 1e-5, "on + 1": None,
    }.items():  # fmt: skip
        assert evaluate(expression, job) == value, expression
