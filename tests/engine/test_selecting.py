"""Parts of checkpoints (`--only`, `--drop-matching`), other names (`--rename`), other values (`--set`, `--reset`): what torch
loads afterwards, and what is refused."""

from __future__ import annotations

import fnmatch
import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from commands import ckpttool_here
from peers import same_value

import ckpttool
from ckpttool.errors import Corrupt, Differs, Unsupported, UsageError

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
DCP = FIXTURES / "fsdp2_w3" / "ckpt"
LAYOUTS = [
    "fsdp2_w3/ckpt", "fsdp2_w3_tied_bf16/ckpt", "awkward_w3/ckpt", "full_w1/ckpt/fqn.pt", "zero3_w3_groups/ckpt",
    "zero2_w3_bf16/ckpt", "universal_z3_w2/ckpt", "megatron/buckets_tp2/ckpt/iter_0000003", "torchao/adamw8bit_w2/ckpt",
    "trainers/jobs/trainer",
]  # fmt: skip


def small_state(**more: Any) -> dict[str, Any]:
    """A model of two blocks and its AdamW, in two groups, as `get_state_dict` names them."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 3))
    optimizer = torch.optim.AdamW([{"params": m.parameters(), "lr": 0.1 * (i + 1)} for i, m in enumerate(model)])
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    names, found = [n for n, _ in model.named_parameters()], optimizer.state_dict()
    state = {names[i]: s for i, s in found["state"].items()}
    groups = [{**g, "params": [names[i] for i in g["params"]]} for g in found["param_groups"]]
    return {"model": model.state_dict(), "optim": {"state": state, "param_groups": groups}, **more}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    scheduler = {"base_lrs": [0.1, 0.2], "last_epoch": 1, "_step_count": 2, "_last_lr": [0.1, 0.2]}
    torch.save(small_state(scheduler=scheduler, step=1), tmp_path / "a.pt")
    return tmp_path / "a.pt"


@pytest.mark.slow
@pytest.mark.parametrize("path", LAYOUTS)
def test_tensors_of_a_part_have_the_digests_that_they_have_in_the_whole(path: str) -> None:
    whole = ckpttool.digest(FIXTURES / path).tensors
    names = list(whole)
    for glob in (names[0], names[-1][:-3] + "*", "*" + names[len(names) // 2][-9:], ".".join(names[0].split(".")[:-1])):
        wanted = {n: d for n, d in whole.items() if any(fnmatch.fnmatchcase(n, g) for g in (glob, glob + ".*"))}
        found = ckpttool.digest(FIXTURES / path, only=[glob]).tensors
        assert found == wanted and found, glob
        if len(wanted) < len(whole):
            assert ckpttool.digest(FIXTURES / path, drop_matching=[glob]).tensors == {
                n: d for n, d in whole.items() if n not in wanted
            }


@pytest.mark.slow
def test_workers_read_the_same_part_under_the_same_names(saved: Path) -> None:
    asked: dict[str, Any] = {"only": ["model", "*.exp_avg"], "drop_matching": ["*.bias*"], "rename": {"^0": "zero"}}
    one, two = (ckpttool.digest(saved, workers=n, **asked) for n in (None, 2))
    assert one == two and list(one.tensors) == [
        "model.zero.weight", "model.1.weight", "optim.state.zero.weight.exp_avg", "optim.state.1.weight.exp_avg",
    ]  # fmt: skip
    assert [r.name for r in ckpttool.stats(saved, workers=2, **asked).rows] == list(one.tensors)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_part_has_the_param_groups_of_its_parameters_and_says_that_it_is_one(saved: Path, tmp_path: Path) -> None:
    only = ["model.1", "optim.state.1.*", "optim.param_groups"]
    done = ckpttool.convert(saved, tmp_path / "part", to="dcp", world_size=3, only=only)
    assert "left out as asked: 8 of 16 tensors of model, optim. A job resumes from a part only" in done.notes[0]
    assert done.changed == {"optim.param_groups.0.params": "without the parameters that were left out"}
    model = {"1.weight": torch.zeros(3, 2), "1.bias": torch.zeros(3)}
    dcp.load({"model": model}, checkpoint_id=tmp_path / "part")
    assert torch.equal(model["1.weight"], torch.load(saved)["model"]["1.weight"])
    with ckpttool.open(tmp_path / "part") as opened:
        groups = [opened.checkpoint.value(f"optim.param_groups.{i}.params") for i in range(2)]
    assert groups == [[], ["1.weight", "1.bias"]]
    assert json.loads((tmp_path / "part" / "ckpttool.json").read_text())["selection"] == {"only": only, "left_out": []}
    assert ckpttool.verify(tmp_path / "part", read_data=True).recorded == "equal"
    assert ckpttool.verify(tmp_path / "part", against=saved).against
    found = ckpttool.inspect(tmp_path / "part")
    assert found.next.startswith("a part of a checkpoint") and any("a part of a checkpoint" in n for n in found.notes)
    other = tmp_path / "b.pt"
    tree = torch.load(saved)
    tree["model"]["1.weight"] += 1
    torch.save(tree, other)
    with pytest.raises(Differs, match="1 tensors or values are others, 0 are missing"):
        ckpttool.verify(tmp_path / "part", against=other)


def test_components_that_were_not_asked_for_are_not_said_to_be_in_one_of_two_alone(saved: Path, tmp_path: Path) -> None:
    found = ckpttool.verify(saved, against=saved, only=["model"])
    assert found.against and found.against["components"] == ["model"] and not found.notes
    torch.save({"model": torch.load(saved)["model"]}, tmp_path / "weights.pt")
    found = ckpttool.verify(saved, against=tmp_path / "weights.pt", only=["model", "optim"])
    assert found.notes == ["not compared, since only one of the two has it: optim"]


def test_recorded_digests_of_a_part_are_compared(saved: Path, tmp_path: Path) -> None:
    ckpttool.convert(saved, tmp_path / "whole", to="dcp", world_size=1)
    record = json.loads((tmp_path / "whole" / "ckpttool.json").read_text())
    record["tensors"]["model.1.weight"][2] = "0" * 64
    record["values"]["optim.param_groups.0.params"] = "0" * 64
    (tmp_path / "whole" / "ckpttool.json").write_text(json.dumps(record))
    out = tmp_path / "out.pt"
    assert ckpttool.convert(tmp_path / "whole", out, only=["model.0"], rename={"^": "net."}).compared == 2
    with pytest.raises(Corrupt, match=r"model\.net\.1\.weight"):
        ckpttool.convert(tmp_path / "whole", tmp_path / "x.pt", only=["model.1"], rename={"^": "net."})
    with pytest.raises(Corrupt, match=r"optim\.param_groups\.0\.params"):  # cut and renamed, and looked at before
        only = ["model.0", "optim.state.0", "optim.param_groups"]
        ckpttool.convert(tmp_path / "whole", tmp_path / "x.pt", only=only, rename={"^": "net."})
    with pytest.raises(Differs, match=r"first \"model\.1\.weight\""):
        ckpttool.verify(tmp_path / "whole", read_data=True, only=["model"], rename={"^": "net."})


def test_what_is_dropped_is_listed_with_its_reason(saved: Path, tmp_path: Path) -> None:
    done = ckpttool.convert(saved, tmp_path / "out.pt", drop_matching=["optim.state.*.exp_avg_sq", "scheduler"])
    gone = {name: why for name, _, why in done.dropped}
    assert len([n for n in gone if n.endswith(".exp_avg_sq")]) == 4 and "scheduler.base_lrs" in gone
    assert set(gone.values()) == {"left out by drop_matching"}
    state = torch.load(tmp_path / "out.pt")["optim"]["state"]
    assert {slot for slots in state.values() for slot in slots} == {"step", "exp_avg"}
    assert not {*done.kept, *done.changed} & gone.keys()


def test_a_renamed_state_is_the_state_of_the_other_model(saved: Path, tmp_path: Path) -> None:
    done = ckpttool.convert(
        saved, tmp_path / "r.pt", rename={r"^(\d)\.": r"net.layers.\1.", r"layers\.0": "layers.zero"}
    )
    tree, before = torch.load(tmp_path / "r.pt"), torch.load(saved)
    names = {n: f"net.layers.{'zero' if n[0] == '0' else '1'}{n[1:]}" for n in before["model"]}
    assert {names[n]: t.tolist() for n, t in before["model"].items()} == {
        n: t.tolist() for n, t in tree["model"].items()
    }
    assert [g["params"] for g in tree["optim"]["param_groups"]] == [
        [names[n] for n in g["params"]] for g in before["optim"]["param_groups"]
    ]
    assert torch.equal(
        tree["optim"]["state"][names["1.bias"]]["exp_avg"], before["optim"]["state"]["1.bias"]["exp_avg"]
    )
    assert set(done.changed.values()) == {"renamed by rename"} and not done.dropped and not done.added
    back = {r"^net\.layers\.(zero|1)": r"\1", "^zero": "0"}
    assert ckpttool.diff(tmp_path / "r.pt", saved, rename=back).equal
    ckpttool.convert(tmp_path / "r.pt", tmp_path / "back", to="dcp", world_size=3, rename=back)
    assert ckpttool.diff(tmp_path / "back", saved).equal
    record = json.loads((tmp_path / "back" / "ckpttool.json").read_text())
    assert record["renamed"]["optim.state.net.layers.1.bias.exp_avg"] == "optim.state.1.bias.exp_avg"


def test_a_numbered_optimizer_keeps_its_numbers(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    torch.save({"net": model.state_dict(), "opt": optimizer.state_dict()}, tmp_path / "a.pt")
    ckpttool.convert(tmp_path / "a.pt", tmp_path / "b.pt", rename={"^0": "first"})
    tree = torch.load(tmp_path / "b.pt")
    assert list(tree["net"]) == ["first.weight", "first.bias"] and list(tree["opt"]["state"]) == [0, 1]
    optimizer.load_state_dict(tree["opt"])


@pytest.mark.slow
def test_parts_of_tensor_subclasses_and_fp32_masters_go_along(tmp_path: Path) -> None:
    for path, rule in (
        ("torchao/adamw8bit_w2/ckpt", {"^": "net."}),
        ("megatron/buckets_tp2/ckpt/iter_0000003", {"^": "net."}),
    ):
        done = ckpttool.convert(FIXTURES / path, tmp_path / "a", to="dcp", world_size=2, rename=rule, force=True)
        assert not done.dropped
        with ckpttool.open(tmp_path / "a") as opened:
            named = {t.parameter for t in opened.checkpoint.tensors.values()} - {""}
            masters = [t.path[2] for t in opened.checkpoint.tensors.values() if t.path[:2] == ("extra", "master")]
        assert all(n.startswith("net.") for n in [*named, *masters]) and named
        assert bool(masters) == path.startswith("megatron")
        assert ckpttool.diff(tmp_path / "a", FIXTURES / path, rename={r"^net\.": ""}).equal


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"only": ["model.2.*"]}, r"only=\['model\.2\.\*'\]: no name matches; did you mean 'model\.[01]\.\w+'\?"),
        ({"only": ["0.weight"]}, r"3 names contain it|names contain it, first model\.0\.weight: use '\*0\.weight\*'"),
        ({"only": ["modle"]}, r"only=\['modle'\]: the checkpoint holds model, optim, scheduler, trainer\."),
        ({"drop_matching": ["rng"]}, "the checkpoint holds model"),
        ({"drop_matching": ["*"]}, "nothing is left of the checkpoint"),
        ({"only": "model"}, r"give a list of strings, such as \['model'\]"),
        ({"rename": {"x": "y"}}, r"rename 'x': no name matches\. The first is '0\.weight'"),
        ({"rename": {"(": "y"}}, "unterminated subpattern"),
        ({"rename": {"0": r"\1"}}, "invalid group reference 1"),
        ({"rename": {"^0": ""}}, r'"0\.weight" would become "\.weight", in which a part is empty'),
        ({"rename": {r"\d\.": ""}}, r'"model\.0\.weight" and "model\.1\.weight" would both be named "model\.weight"'),
    ],
)  # fmt: skip
def test_what_selects_nothing_or_makes_no_sense_is_refused(saved: Path, asked: dict[str, Any], why: str) -> None:
    with pytest.raises((UsageError, Unsupported), match=why):
        ckpttool.open(saved, **asked)


def test_a_name_of_a_thousand_characters_is_the_longest_that_is_renamed(tmp_path: Path) -> None:
    torch.save({"model": {"a" * 1001: torch.ones(1), "b": torch.ones(1)}}, tmp_path / "a.pt")
    with pytest.raises(Unsupported, match=r"has 1,001 characters; names of up to 1,000 are renamed"):
        ckpttool.open(tmp_path / "a.pt", rename={"(a*)*c": ""})


@pytest.mark.parametrize(("kind", "goes_on"), [("LambdaLR", False), ("StepLR", True), ("CosineAnnealingLR", True)])
def test_schedulers_go_on_from_a_rate_that_is_set_as_the_note_says(kind: str, goes_on: bool) -> None:
    """What set_values says of them; CosineAnnealingLR scales the rate that it finds."""
    optimizer = torch.optim.SGD([torch.ones(1)], lr=0.1)
    options: dict[str, Any] = {"lr_lambda": lambda step: 1.0} if kind == "LambdaLR" else {}
    options |= {"step_size": 9} if kind == "StepLR" else {"T_max": 1000} if kind == "CosineAnnealingLR" else {}
    scheduler = getattr(torch.optim.lr_scheduler, kind)(optimizer, **options)
    optimizer.step()
    scheduler.step()
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5 if goes_on else 0.1, rel=1e-2)


@pytest.mark.slow
def test_values_are_set_and_state_is_reset(saved: Path, tmp_path: Path) -> None:
    wanted = {
        "optim.param_groups.*.lr": 1,
        "optim.param_groups.1.betas": [0.8, 0.9],
        "optim.param_groups.0.foreach": True,
    }
    asked = {"set_values": wanted, "reset": ["scheduler.base_lrs", "trainer"]}
    done = ckpttool.convert(saved, tmp_path / "b.pt", **asked, workers=2)
    tree = torch.load(tmp_path / "b.pt")
    groups = tree["optim"]["param_groups"]
    assert [(g["lr"], g["betas"], g["foreach"]) for g in groups] == [
        (1.0, (0.9, 0.999), True), (1.0, (0.8, 0.9), None),
    ]  # fmt: skip
    assert "base_lrs" not in tree["scheduler"] and "step" not in tree
    assert done.changed["optim.param_groups.0.lr"] == "set to 1.0, was 0.1" and len(done.changed) == 4
    assert {n: why for n, _, why in done.dropped} == dict.fromkeys(
        ["scheduler.base_lrs", "trainer.step"], "reset by reset: a job starts it new"
    )
    assert any(
        "the scheduler is kept: LambdaLR, OneCycleLR and those of engines compute it again" in n for n in done.notes
    )
    optimizer = torch.optim.AdamW(
        [{"params": [torch.ones(2, 3), torch.ones(2)]}, {"params": [torch.ones(3, 2), torch.ones(3)]}]
    )
    numbers = {n: i for i, n in enumerate(torch.load(saved)["model"])}
    optimizer.load_state_dict({
        "state": {numbers[n]: s for n, s in tree["optim"]["state"].items()},
        "param_groups": [{**g, "params": [numbers[n] for n in g["params"]]} for g in groups],
    })  # fmt: skip
    assert optimizer.param_groups[1]["betas"] == (0.8, 0.9)


def test_a_dry_run_and_the_record_list_what_is_set(saved: Path, tmp_path: Path) -> None:
    words = (
        "convert",
        saved,
        tmp_path / "out",
        "--to",
        "dcp",
        "--set",
        "optim.param_groups.*.lr=1e-5",
        "--reset",
        "scheduler",
    )
    planned = json.loads(ckpttool_here(*words, "-n", "2", "--dry-run", "--json").stdout)
    assert {"name": "optim.param_groups.1.lr", "how": "set to 1e-05, was 0.2"} in planned["changed"]
    assert {d["name"] for d in planned["dropped"]} >= {"scheduler.base_lrs"}
    done = json.loads(ckpttool_here(*words, "-n", "2", "--json").stdout)
    assert done["changed"] == planned["changed"] and done["dropped"] == planned["dropped"]
    record = json.loads((tmp_path / "out" / "ckpttool.json").read_text())
    assert record["changed"]["optim.param_groups.0.lr"] == "set to 1e-05, was 0.1"
    assert ckpttool.verify(tmp_path / "out", read_data=True).recorded == "equal"


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"set_values": {"optim.param_groups.*.lx": 1}}, r"no name matches; did you mean 'optim\.param_groups\.\d\.\w+'\?"),
        ({"set_values": {"model.0.weight": 1}}, '"model.0.weight" is a tensor. Only values are set'),
        ({"set_values": {"optim.param_groups.*.lr": "fast"}}, "is 0.1, and 'fast' is no float"),
        ({"set_values": {"trainer.step": 1.5}}, "is 1, and 1.5 is no int"),
        ({"set_values": {"trainer.step": True}}, "and True is no int"),
        ({"set_values": {"optim.param_groups.0.betas": [0.1]}}, "which takes a list of 2 elements"),
        ({"set_values": {"optim.param_groups.*.params": []}}, "lists parameters; rename renames them"),
        ({"set_values": {"extra.args*": 1}}, "what is inside an object is not set"),
        ({"reset": ["model"]}, "is of the model, and no job starts with new weights"),
        ({"reset": ["rng"]}, "the checkpoint holds extra, model, optim, trainer"),
        ({"set_values": {"trainer.step": 2}, "only": ["model"]}, "no name matches: the checkpoint, or what is selected of it, has none"),
        ({"set_values": {"trainer": 2}, "only": ["model"]}, "no name matches: the checkpoint, or what is selected of it, has none"),
    ],
)  # fmt: skip
def test_what_cannot_be_set_or_reset_is_refused(tmp_path: Path, asked: dict[str, Any], why: str) -> None:
    torch.save(small_state(step=1, args=Namespace(lr=0.1)), tmp_path / "a.pt")
    with pytest.raises(UsageError, match=why):
        ckpttool.convert(tmp_path / "a.pt", tmp_path / "b.pt", **asked)
    assert not (tmp_path / "b.pt").exists()


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"reset": ["optim"]}, "reset by reset: a job starts it new"),
        ({"to": "hf", "set_values": {"trainer.step": 2, "optim.param_groups.0.lr": 1}}, "hf holds weights only"),
        ({}, None),
    ],
)
def test_a_value_that_was_set_and_is_left_out_is_named(more: dict[str, Any], why: str | None, tmp_path: Path) -> None:
    torch.save(small_state(step=1), tmp_path / "a.pt")
    asked = {"to": "full", "set_values": {"optim.param_groups.0.lr": 1}, **more}
    done = ckpttool.convert(tmp_path / "a.pt", tmp_path / "b", **asked)
    said = [n for n in done.notes if "which set_values changed" in n]
    assert [n.partition(" not in the result: ")[2] for n in said] == ([] if why is None else [why])
    assert why is None or f"which set_values changed, {'are' if 'to' in more else 'is'} not in" in said[0]


@pytest.mark.slow
def test_an_archive_of_a_part_says_which_and_is_compared_with_that(saved: Path, tmp_path: Path) -> None:
    words = (
        "audit",
        "export",
        saved,
        tmp_path / "p.tar.zst",
        "--only",
        "model.1,optim.state.1",
        "--only",
        "optim.param_groups",
    )
    assert ckpttool_here(*words).returncode == 0
    done = ckpttool_here("audit", "verify", tmp_path / "p.tar.zst", "--against", saved)
    assert done.returncode == 0 and "model.1, optim.state.1, optim.param_groups of" in done.stderr
    assert "a part of a checkpoint was kept, model.1" in ckpttool_here("inspect", tmp_path / "p.tar.zst").stdout


def test_a_merge_takes_components_only(saved: Path, tmp_path: Path) -> None:
    done = ckpttool_here("adapter", "merge", saved, tmp_path / "out", "--only", "model.0", "--to", "dcp", "-n", "1")
    assert done.returncode == 2 and "a merge makes whole models" in done.stderr


def test_weights_of_a_set_are_selected_and_renamed_too(tmp_path: Path) -> None:
    model = {n: torch.rand(3, 2) for n in ("a.w", "b.w")}
    torch.save({"model": model, "ema": {n: t / 2 for n, t in model.items()}}, tmp_path / "a.pt")
    ckpttool.convert(tmp_path / "a.pt", tmp_path / "b.pt", weights="ema", only=["model.a"], rename={"^a": "c"})
    assert torch.equal(torch.load(tmp_path / "b.pt")["model"]["c.w"], model["a.w"] / 2)


REST = "sides mine | theirs\nnorm = last\n{*} = {*}\n"


@pytest.mark.parametrize(
    ("text", "before", "after"),
    [
        ("sides a | b\n{*} = net.{*}\n", ["x.w", "y"], ["net.x.w", "net.y"]),
        ("sides a | b\nnet.{*} = {*}\n", ["net.x", "net.net.y"], ["x", "net.y"]),
        (REST, ["norm", "x"], ["last", "x"]),
        ("sides a | b\nlayers.{i}.{*} = {*}.at.{i}\n", ["layers.3.q.w", "layers.0.b"], ["q.w.at.3", "b.at.0"]),
        ("sides a | b\n{*}.weight [o i] = {*}.kernel [i o]\n{*} = {*}\n", ["x.weight", "y"], ["x.kernel", "y"]),
    ],
)
def test_a_line_for_the_rest_goes_both_ways(tmp_path: Path, text: str, before: list[str], after: list[str]) -> None:
    model = {n: torch.rand(2, 3) for n in before}
    adam = {n: {"step": torch.tensor(1.0), "exp_avg": torch.rand(2, 3)} for n in model}
    optim = {"state": adam, "param_groups": [{"lr": 0.1, "params": list(model)}]}
    torch.save({"model": model, "optim": optim}, tmp_path / "a.pt")
    (tmp_path / "own.map").write_text(text)
    for here, there in (("a.pt", "b.pt"), ("b.pt", "c.pt")):
        ckpttool.convert(tmp_path / here, tmp_path / there, map=tmp_path / "own.map")
    tree = torch.load(tmp_path / "b.pt")
    assert list(tree["model"]) == after == tree["optim"]["param_groups"][0]["params"]
    turned = "kernel" in text
    assert torch.equal(tree["model"][after[0]], model[before[0]].T if turned else model[before[0]])
    assert ckpttool.diff(tmp_path / "a.pt", tmp_path / "c.pt").equal


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a = b\n", r"own\.map:1: the line sides"), ("sides a | b\n\nx = {*}\n", r"own\.map:3: \{\*\} is on both sides"),
        ("sides a | b\n{*}{*} = x\n", r"own\.map:2: .*twice"), ("sides a | b\n{.*} = {.*}\n", r"own\.map:2: \{\.\*\} is no variable"),
        ("sides a | b\nx = y = z\n", r"own\.map:2: "),
    ],
)  # fmt: skip
def test_a_bad_map_names_its_file_and_line(saved: Path, tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "own.map").write_text(text)
    with pytest.raises(UsageError, match=why):
        ckpttool.convert(saved, tmp_path / "b.pt", map=tmp_path / "own.map")


def test_an_extra_state_is_one_tree_under_its_new_name(tmp_path: Path) -> None:
    state = {"amax": 1.0, "history": [torch.ones(2), {"x": 2}]}
    torch.save({"model": {"a.w": torch.ones(2), "a._extra_state": state}, "step": 1}, tmp_path / "a.pt")
    for canonical_keys in (False, True):
        options: dict[str, Any] = {"rename": {"^a": "b"}, "canonical_keys": canonical_keys, "force": True}
        ckpttool.convert(tmp_path / "a.pt", tmp_path / "out.pt", **options)
        model = torch.load(tmp_path / "out.pt")["model"]
        assert model.keys() == {"b.w", "b._extra_state"} and same_value(model["b._extra_state"], state)
    renamed = {"rename": {r"history\.0": "first"}}  # a part of it: entries of their own
    ckpttool.convert(tmp_path / "a.pt", tmp_path / "out.pt", force=True, **renamed)
    assert "a._extra_state.first" in torch.load(tmp_path / "out.pt")["model"]
    for wrapper in ("_orig_mod", "module", "module._orig_mod"):
        model = {f"{wrapper}.{n}": x for n, x in {"a.w": torch.ones(2), "a._extra_state": state}.items()}
        torch.save({"model": model, "step": 1}, tmp_path / "a.pt")
        ckpttool.convert(tmp_path / "a.pt", tmp_path / "out.pt", force=True, strip_wrappers=True)
        assert torch.load(tmp_path / "out.pt")["model"].keys() == {"a.w", "a._extra_state"}
