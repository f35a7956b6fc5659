"""adapter extract and adapter merge for what is no linear layer: convolutions, stacks of experts, trained tokens. PEFT is the judge; what
shapes do not tell is refused."""

from __future__ import annotations

import copy
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpttool
from ckpttool.engine import merging
from ckpttool.errors import CkpttoolError, Corrupt, Unsupported, UsageError

ADAPTER = "adapter_model.safetensors"
WEIGHTS = "model.safetensors"
KERNELS: dict[str, Any] = {
    "conv1d": lambda: torch.nn.Conv1d(6, 4, 3, padding=1, bias=False),
    "pointwise1d": lambda: torch.nn.Conv1d(6, 5, 1),
    "conv2d": lambda: torch.nn.Conv2d(3, 8, 3, stride=2, dilation=2),
    "flat2d": lambda: torch.nn.Conv2d(3, 4, (1, 3)),
    "pointwise2d": lambda: torch.nn.Conv2d(5, 5, 1),
    "conv3d": lambda: torch.nn.Conv3d(2, 3, 2),
}


@pytest.fixture(scope="module")
def peft() -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield pytest.importorskip("peft", reason="needs peft")


class Net(torch.nn.Module):
    """Layers that are never run: PEFT wraps, saves and merges them."""

    def __init__(self, dtype: torch.dtype, **layers: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = torch.nn.ModuleDict({n: make() for n, make in layers.items()})
        self.head = torch.nn.Linear(4, 3)
        self.to(dtype)


def adapted(
    peft: Any,
    net: torch.nn.Module,
    at: Path,
    config: Any,
    autocast: bool = False,
    names: tuple[str, ...] = ("default",),
) -> Any:
    """The model with adapters whose numbers are not those of the beginning; base model and first adapter saved below `at`."""
    (at / "base").mkdir(parents=True)
    save_file(net.state_dict(), at / "base" / WEIGHTS)
    model = peft.get_peft_model(copy.deepcopy(net), config, adapter_name=names[0], autocast_adapter_dtype=autocast)
    for name in names[1:]:
        model.add_adapter(name, copy.deepcopy(config), autocast_adapter_dtype=autocast)
    for n, p in model.named_parameters():
        if "lora_" in n or "trainable_tokens_" in n:
            torch.nn.init.normal_(p, std=0.3)
    model.save_pretrained(at / "adapter")
    return model


def assert_same(mine: Path, theirs: Mapping[str, torch.Tensor]) -> None:
    found = load_file(mine)
    assert found.keys() == theirs.keys()
    wrong = [n for n, t in theirs.items() if found[n].dtype != t.dtype or not torch.equal(found[n], t)]
    assert not wrong


def check_both_ways(peft: Any, net: torch.nn.Module, at: Path, config: Any, **how: Any) -> None:
    """Compare a merge of base and adapter, one of the state of the job, and the adapter taken out of that, with PEFT's."""
    model = adapted(peft, net, at, config, **how)
    torch.save({"model": model.state_dict()}, at / "x.pt")
    ckpttool.convert(at / "x.pt", at / "dcp", to="dcp", world_size=3)
    where: dict[str, Any] = {"adapter_config": str(at / "adapter")}
    for source in ("x.pt", "dcp"):
        ckpttool.adapter_extract(at / source, at / f"extracted {source[:1]}", **where)
        assert (at / f"extracted {source[:1]}" / ADAPTER).read_bytes() == (at / "adapter" / ADAPTER).read_bytes()
        ckpttool.adapter_merge(at / source, at / f"merged {source}.safetensors", only=["model"], **where)
    theirs = copy.deepcopy(model).merge_and_unload().state_dict()
    assert_same(at / "merged x.pt.safetensors", theirs)
    assert_same(at / "merged dcp.safetensors", theirs)
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(net), at / "extracted d").merge_and_unload()
    ckpttool.adapter_merge(at / "base", at / "merged.safetensors", adapter=at / "adapter")
    assert_same(at / "merged.safetensors", loaded.state_dict())


# --------------------------------------------------------------------------------------------------------- convolutions


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "how",
    [{}, {"use_dora": True}, {"use_rslora": True, "r": 1}, {"lora_bias": True, "target_modules": [*KERNELS][1:]}],
    ids=["plain", "dora", "rank 1", "biases"],
)
def test_convolutions_are_what_peft_merges(peft: Any, tmp_path: Path, how: dict[str, Any]) -> None:
    for k, (dtype, autocast) in enumerate(
        ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, False))
    ):
        config = peft.LoraConfig(**{"r": 2, "lora_alpha": 3, "target_modules": [*KERNELS, "head"], **how})
        check_both_ways(peft, Net(dtype, **KERNELS), tmp_path / str(k), config, autocast=autocast)


@pytest.mark.slow
def test_a_kernel_of_three_dimensions_with_one_element_is_merged_though_peft_cannot(peft: Any, tmp_path: Path) -> None:
    net = Net(torch.float32, point=lambda: torch.nn.Conv3d(3, 4, 1))
    model = adapted(peft, net, tmp_path, peft.LoraConfig(r=2, lora_alpha=2, target_modules=["point"]))
    ckpttool.adapter_merge(tmp_path / "base", tmp_path / "out.safetensors", adapter=tmp_path / "adapter")
    x = torch.randn(2, 3, 4, 4, 4)
    net.load_state_dict(load_file(tmp_path / "out.safetensors"))
    torch.testing.assert_close(net.body["point"](x), model.base_model.model.body["point"](x))


def test_the_adapter_of_a_grouped_convolution_is_taken_out_and_not_merged(peft: Any, tmp_path: Path) -> None:
    net = Net(torch.float32, grouped=lambda: torch.nn.Conv1d(6, 4, 3, groups=2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = adapted(peft, net, tmp_path, peft.LoraConfig(r=4, target_modules=["grouped"]))
    torch.save({"model": model.state_dict()}, tmp_path / "x.pt")
    ckpttool.adapter_extract(tmp_path / "x.pt", tmp_path / "out", adapter_config=str(tmp_path / "adapter"))
    assert (tmp_path / "out" / ADAPTER).read_bytes() == (tmp_path / "adapter" / ADAPTER).read_bytes()
    with pytest.raises(NotImplementedError):
        model.merge_and_unload()
    with pytest.raises(
        Unsupported, match=r'"body.grouped.weight" \[4, 3, 3\] is a convolution of groups.*PEFT merges none'
    ):
        ckpttool.adapter_merge(tmp_path / "base", tmp_path / "merged", adapter=tmp_path / "adapter")


@pytest.mark.filterwarnings("ignore")
def test_attention_with_one_tensor_for_three_is_refused_by_its_name(peft: Any, tmp_path: Path) -> None:
    net = Net(torch.float32, attention=lambda: torch.nn.MultiheadAttention(4, 2))
    adapted(peft, net, tmp_path, peft.LoraConfig(r=2, target_modules=["attention"]))
    with pytest.raises(Unsupported, match="is of a MultiheadAttention, which ckpttool does not merge"):
        ckpttool.adapter_merge(tmp_path / "base", tmp_path / "merged", adapter=tmp_path / "adapter")


# -------------------------------------------------------------------------------------------------------------- experts


class Experts(torch.nn.Module):
    """Stacks of matrices as transformers' experts: (experts, out, in), or the other way around."""

    def __init__(self, n: int, hidden: int, inner: int, transposed: bool) -> None:
        super().__init__()
        up, down = (n, 2 * inner, hidden), (n, hidden, inner)
        if transposed:
            up, down, self.is_transposed = (n, hidden, 2 * inner), (n, inner, hidden), True
        self.gate_up_proj = torch.nn.Parameter(torch.randn(up))
        self.down_proj = torch.nn.Parameter(torch.randn(down))


class Moe(torch.nn.Module):
    def __init__(
        self, dtype: torch.dtype, n: int = 3, hidden: int = 5, inner: int = 7, transposed: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.mlp = torch.nn.ModuleDict({"experts": Experts(n, hidden, inner, transposed)})
        self.to(dtype)


BOTH = ["experts.gate_up_proj", "experts.down_proj"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("inner", [7, 5], ids=["odd", "square"])
def test_experts_are_what_peft_merges(peft: Any, tmp_path: Path, transposed: bool, inner: int) -> None:
    for k, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16)):
        net = Moe(dtype, inner=inner, transposed=transposed)
        config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=[], target_parameters=BOTH)
        check_both_ways(peft, net, tmp_path / str(k), config)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("to", "world"), [("fsdp1", 3), ("zero3", 3), ("zero1", 2), ("universal", None), ("audit", None)]
)
def test_the_adapter_of_experts_comes_out_of_every_layout(
    peft: Any, tmp_path: Path, to: str, world: int | None
) -> None:
    config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=[], target_parameters=BOTH)
    model = adapted(peft, Moe(torch.float32), tmp_path, config)
    torch.save({"model": model.state_dict()}, tmp_path / "x.pt")
    source, where = tmp_path / ("x.tar.zst" if to == "audit" else "folder"), str(tmp_path / "adapter")
    ckpttool.convert(tmp_path / "x.pt", source, to=to, world_size=world)
    ckpttool.adapter_extract(source, tmp_path / "out", adapter_config=where)
    assert (tmp_path / "out" / ADAPTER).read_bytes() == (tmp_path / "adapter" / ADAPTER).read_bytes()
    ckpttool.adapter_merge(source, tmp_path / "merged.safetensors", adapter_config=where, only=["model"])
    assert_same(tmp_path / "merged.safetensors", model.merge_and_unload().state_dict())


@pytest.mark.filterwarnings("ignore")
def test_a_large_stack_is_computed_a_few_experts_at_a_time(
    peft: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = Moe(torch.float32, n=7, hidden=64, inner=96)
    adapted(peft, net, tmp_path, peft.LoraConfig(r=4, target_modules=[], target_parameters=BOTH))
    seen: list[tuple[str, int]] = []
    real = merging._multiply_stack

    def counting(a: Any, b: Any, update: Any, part: range) -> Any:
        seen.append((update.module, len(part)))
        return real(a, b, update, part)

    monkeypatch.setattr(merging, "_multiply_stack", counting)
    monkeypatch.setattr(merging, "_STACK_BYTES", 120 << 10)  # two matrices of gate_up_proj, five of down_proj
    ckpttool.adapter_merge(tmp_path / "base", tmp_path / "out", adapter=tmp_path / "adapter", to="dcp", world_size=2)
    assert sorted(seen) == [("mlp.experts.down_proj", n) for n in (2, 5)] + [
        ("mlp.experts.gate_up_proj", n) for n in (1, 2, 2, 2)
    ]
    loaded = peft.PeftModel.from_pretrained(net, tmp_path / "adapter").merge_and_unload()
    ckpttool.convert(tmp_path / "out", tmp_path / "again.safetensors")
    assert_same(tmp_path / "again.safetensors", loaded.state_dict())


@pytest.mark.filterwarnings("ignore")
def test_several_adapters_of_the_same_experts_are_merged_in_order(peft: Any, tmp_path: Path) -> None:
    config = peft.LoraConfig(r=2, target_modules=[], target_parameters=BOTH)
    model = adapted(peft, Moe(torch.bfloat16), tmp_path, config, names=("a", "b"))
    torch.save({"model": model.state_dict()}, tmp_path / "x.pt")
    ckpttool.adapter_merge(
        tmp_path / "x.pt",
        tmp_path / "out.safetensors",
        adapter_name=["b", "a"],
        adapter_config=str(tmp_path / "adapter"),
    )
    assert_same(tmp_path / "out.safetensors", model.merge_and_unload(adapter_names=["b", "a"]).state_dict())


def moe_folder(
    at: Path, shapes: Mapping[str, tuple[int, ...]], loras: Mapping[str, tuple[int, int, int]], **config: Any
) -> None:
    """A base model with parameters of these shapes in "experts", and an adapter {wrapper: (in, rank of A, out)}."""
    (at / "base").mkdir(parents=True)
    (at / "adapter").mkdir()
    dice = torch.Generator().manual_seed(1)
    save_file(
        {f"experts.{n}": torch.randn(s, generator=dice) for n, s in shapes.items()}, at / "base" / "model.safetensors"
    )
    tensors = {}
    for wrapper, (i, r, o) in loras.items():
        tensors[f"base_model.model.{wrapper}.lora_A.weight"] = torch.randn(r, i, generator=dice)
        tensors[f"base_model.model.{wrapper}.lora_B.weight"] = torch.randn(o, r, generator=dice)
    save_file(tensors, at / "adapter" / ADAPTER)
    said = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 4,
        "peft_version": "0.21.2",
        "target_parameters": list(shapes),
        **config,
    }
    (at / "adapter" / "adapter_config.json").write_text(json.dumps(said))


@pytest.mark.parametrize("version", ["0.18.1", "0.17.1", None])
@pytest.mark.parametrize("inner", [7, 5])
def test_the_experts_of_an_old_peft_are_read_as_it_did(tmp_path: Path, version: str | None, inner: int) -> None:
    """Before 0.19 lora_A had as many columns as a matrix has rows (peft 0.18, lora/layer.py: "o r e, e r i -> e i o")."""
    moe_folder(tmp_path, {"down_proj": (3, 5, inner)}, {"experts": (5, 6, inner)}, peft_version=version)
    ckpttool.adapter_merge(tmp_path / "base", tmp_path / "out.safetensors", adapter=tmp_path / "adapter")
    base, lora = load_file(tmp_path / "base" / WEIGHTS), load_file(tmp_path / "adapter" / ADAPTER)
    a, b = (lora[f"base_model.model.experts.lora_{x}.weight"] for x in "AB")
    delta = torch.stack([(b[:, e::3] @ a[2 * e : 2 * e + 2]).T for e in range(3)]) * 2
    torch.testing.assert_close(
        load_file(tmp_path / "out.safetensors")["experts.down_proj"], base["experts.down_proj"] + delta
    )


def test_inspect_says_the_rank_of_one_expert(tmp_path: Path) -> None:
    moe_folder(tmp_path, {"down_proj": (3, 5, 7)}, {"experts": (7, 6, 5)})
    found = ckpttool.inspect(tmp_path / "adapter").adapter
    assert found is not None and found["ranks"] == [2] and found["modules"] == 1


@pytest.mark.parametrize(
    ("shapes", "loras", "config", "error", "text"),
    [
        ({"down_proj": (3, 5, 5)}, {"experts": (5, 6, 5)}, {}, Unsupported, r"a stack of square matrices \[3, 5, 5\]"),
        ({"w1": (3, 4, 5), "w3": (3, 4, 5)}, {"experts": (5, 6, 4), "experts.base_layer": (5, 6, 4)}, {}, Unsupported,
         "the same shape, and the file does not say which LoRA is whose"),
        ({"w1": (3, 4, 5)}, {"experts": (5, 6, 4), "experts.base_layer": (5, 6, 4)}, {}, Corrupt, "LoRA for 2 parameters of \"experts\", and target_parameters names 1"),
        ({"w1": (3, 4, 5)}, {"experts": (5, 6, 6)}, {}, Corrupt, r"lora_A and lora_B \[6, 5\] \[6, 6\] do not fit the parameters of the base model, w1 \[3, 4, 5\]"),
        ({"w1": (4, 4, 5)}, {"experts": (5, 6, 4)}, {}, Corrupt, "do not fit"),
        ({"w1": (3, 4, 5)}, {"experts": (5, 9, 4)}, {}, Corrupt, 'gives "experts.w1" the rank 2, but its lora_A has 3 rows'),
        ({"w1": (3, 4, 5)}, {"experts": (5, 6, 4)}, {"target_parameters": "w1"}, Corrupt, "not a list of names"),
        ({"w1": (3, 4, 5)}, {"experts": (5, 6, 4)}, {"target_parameters": ["w2"]}, Unsupported, r'is of a parameter of "experts" \(target_parameters: w2\), and the base model has none of them there, but experts.w1\. Give'),
        ({"w1": (3, 4, 5)}, {"experts": (5, 6, 4)}, {"use_dora": True}, Corrupt, "has no lora_magnitude_vector"),
    ],
)  # fmt: skip
def test_experts_that_do_not_fit_are_refused(
    tmp_path: Path, shapes: Any, loras: Any, config: dict[str, Any], error: type[CkpttoolError], text: str
) -> None:
    moe_folder(tmp_path, shapes, loras, **config)
    with pytest.raises(error, match=text):
        ckpttool.adapter_merge(tmp_path / "base", tmp_path / "out", adapter=tmp_path / "adapter")
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------------------------- trained tokens


class Words(torch.nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed_tokens, self.proj = torch.nn.Embedding(11, 4), torch.nn.Linear(4, 4, bias=False)
        self.to(dtype)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_an_adapter_of_trained_tokens_alone_is_what_peft_merges(peft: Any, tmp_path: Path) -> None:
    for k, dtype in enumerate((torch.float32, torch.bfloat16)):
        config = peft.TrainableTokensConfig(token_indices=[10, 0, 3], target_modules=["embed_tokens"])
        check_both_ways(peft, Words(dtype), tmp_path / str(k), config, autocast=True)


def test_trained_tokens_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "adapter").mkdir()
    save_file({"embed.weight": torch.ones(4, 3), "q.weight": torch.ones(4, 3)}, tmp_path / "base" / WEIGHTS)
    adapter = {"embed.token_adapter.trainable_tokens_delta": torch.zeros(2, 3)}
    adapter |= {"q.lora_A.weight": torch.ones(2, 3), "q.lora_B.weight": torch.ones(4, 2)}
    save_file({f"base_model.model.{n}": t for n, t in adapter.items()}, tmp_path / "adapter" / ADAPTER)

    def refused(error: type[CkpttoolError], text: str, indices: Any) -> None:
        said = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "trainable_token_indices": indices}
        (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(said))
        with pytest.raises(error, match=text):
            ckpttool.adapter_merge(tmp_path / "base", tmp_path / "out", adapter=tmp_path / "adapter")

    refused(Corrupt, r'which of the 4 rows of "embed.weight" are trained, but \[1, 4\]', [1, 4])
    refused(Corrupt, r"are trained, but \[-1, 0\]", [-1, 0])
    refused(Corrupt, "are trained, but None", {"wte": [1, 2]})
    refused(Corrupt, re.escape('is [2, 3], but adapter_config.json names 1 rows of "embed.weight", [4, 3]'), [1])
    refused(Corrupt, "are trained, but None", None)
    with pytest.raises(Unsupported, match=r"in adapter_config.json alone. Give it with adapter_config"):
        (tmp_path / "adapter" / "adapter_config.json").unlink()
        ckpttool.adapter_extract(tmp_path / "adapter", tmp_path / "made", lora_alpha=4)


# ------------------------------------------------------------------------------------------- one adapter for each expert


def mixtral_and_qwen(kind: str) -> Any:
    import transformers

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 131, "hidden_size": 36, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 10,
        "num_key_value_heads": 2, "num_experts_per_tok": 2, "max_position_embeddings": 32,
    }  # fmt: skip
    if kind == "mixtral":
        config = transformers.MixtralConfig(**sizes, intermediate_size=50, num_local_experts=3)
        return transformers.MixtralForCausalLM(config)
    sizes |= {"num_experts": 3, "moe_intermediate_size": 22, "intermediate_size": 50, "mlp_only_layers": [1]}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize(
    "how", [{}, {"r": 1, "use_rslora": True}, {"alpha_pattern": {"down_proj": 5}}], ids=["plain", "rank 1", "pattern"]
)
def test_split_experts_are_the_same_adapter(peft: Any, tmp_path: Path, kind: str, how: dict[str, Any]) -> None:
    model, at = mixtral_and_qwen(kind), tmp_path
    model.save_pretrained(at / "base")
    config = peft.LoraConfig(
        **{"r": 2, "lora_alpha": 6, "target_modules": ["q_proj"], "target_parameters": [*BOTH, "gate.weight"], **how}
    )
    wrapped = peft.get_peft_model(model, config)
    for n, p in wrapped.named_parameters():
        if "lora_" in n:
            torch.nn.init.normal_(p, std=0.3)
    wrapped.save_pretrained(at / "adapter")
    torch.save({"model": wrapped.state_dict()}, at / "x.pt")
    ckpttool.convert(at / "x.pt", at / "dcp", to="dcp", world_size=3)
    ckpttool.convert(at / "x.pt", at / "zero", to="zero3", world_size=3)
    base: dict[str, Any] = {"config": str(at / "base"), "split_experts": True}
    done = ckpttool.adapter_extract(at / "adapter", at / "split", **base)
    assert any(n.startswith("split the LoRA of") for n in done.notes)
    for source in ("dcp", "zero"):
        ckpttool.adapter_extract(at / source, at / f"of_{source}", adapter_config=str(at / "adapter"), **base)
        assert (at / f"of_{source}" / ADAPTER).read_bytes() == (at / "split" / ADAPTER).read_bytes()
    as_peft_018(at / "adapter", at / "old")
    ckpttool.adapter_extract(at / "old", at / "of_old", **base)
    assert (at / "of_old" / ADAPTER).read_bytes() == (at / "split" / ADAPTER).read_bytes()
    ckpttool.adapter_merge(at / "base", at / "merged", adapter=at / "adapter")
    found = load_file(at / "merged" / WEIGHTS)
    said = json.loads((at / "split" / "adapter_config.json").read_text())
    assert not any("experts" in n for n in said["target_parameters"] or ())
    by_hand, modules = merged_by_hand(at / "base", at / "split")
    assert len(modules) == (2 * (1 + 1 + 9) if kind == "mixtral" else 2 + 1 + 9)
    assert_close(found, by_hand)
    # and back: each expert's is put into the stack again
    ckpttool.adapter_merge(at / "base", at / "mine", adapter=at / "split")
    assert_close(load_file(at / "mine" / WEIGHTS), by_hand)
    if how.keys() <= {"r"}:  # PEFT takes every expert for one of the usual rank and alpha
        loaded = peft.PeftModel.from_pretrained(type(model).from_pretrained(at / "base"), at / "split")
        loaded.merge_and_unload().save_pretrained(at / "theirs")
        assert (at / "mine" / WEIGHTS).read_bytes() == (at / "theirs" / WEIGHTS).read_bytes()
    # of some experts only
    some = {
        n: t
        for n, t in load_file(at / "split" / ADAPTER).items()
        if ".experts.1" in n and not re.search("(w3|up_proj).lora", n)
    }
    save_file(some, at / "split" / ADAPTER)
    (at / "split" / "ckpttool.json").unlink()
    (at / "split" / "adapter_config.json").write_text(json.dumps({**said, "target_parameters": None}))
    ckpttool.adapter_merge(at / "base", at / "some", adapter=at / "split", to="dcp", world_size=3)
    ckpttool.convert(at / "some", at / "some_hf", to="hf", config=str(at / "base"))
    by_hand, modules = merged_by_hand(at / "base", at / "split")
    assert len(modules) == (4 if kind == "mixtral" else 2)
    assert_close(load_file(at / "some_hf" / WEIGHTS), by_hand)


def as_peft_018(adapter: Path, at: Path) -> None:
    """The same adapter of experts as PEFT 0.18 saves it, whose A and B are those of the transposed matrices."""
    saved, out = load_file(adapter / ADAPTER), {}
    for n, a in saved.items():
        if "experts" in n and "lora_A" in n:
            b = saved[n.replace("lora_A", "lora_B")]
            out[n] = b.reshape(len(b), -1, 3).permute(2, 1, 0).reshape(-1, len(b)).contiguous()
            columns = a.reshape(3, -1, a.shape[1]).permute(2, 1, 0)
            out[n.replace("lora_A", "lora_B")] = columns.reshape(a.shape[1], -1).contiguous()
        elif "experts" not in n:
            out[n] = a
    said = json.loads((adapter / "adapter_config.json").read_text())
    at.mkdir()
    save_file(out, at / ADAPTER)
    (at / "adapter_config.json").write_text(json.dumps({**said, "peft_version": "0.18.1"}))


def merged_by_hand(base: Path, adapter: Path) -> tuple[dict[str, torch.Tensor], set[str]]:
    """Every tensor of the Hub, plus scaling * B @ A where the adapter has a LoRA for it; and its modules."""
    lora, weights = load_file(adapter / ADAPTER), load_file(base / WEIGHTS)
    said = json.loads((adapter / "adapter_config.json").read_text())
    modules = {n.removeprefix("base_model.model.").partition(".lora_")[0] for n in lora}
    for m in modules:
        a, b = (lora[f"base_model.model.{m}.lora_{x}.weight"] for x in "AB")
        patterns = said["alpha_pattern"].items()
        alpha = next((v for k, v in patterns if re.fullmatch(rf"(.*\.)?({k})", m)), said["lora_alpha"])
        assert len(a) == said["r"]
        weights[f"{m}.weight"] += b @ a * (alpha / (len(a) ** 0.5 if said["use_rslora"] else len(a)))
    return weights, modules


def assert_close(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for n, t in wanted.items():
        torch.testing.assert_close(found[n], t, msg=n)


@pytest.mark.slow
def test_experts_that_the_hub_does_not_split_are_not_split_here(peft: Any, tmp_path: Path) -> None:
    import transformers

    config = transformers.GptOssConfig(
        vocab_size=131, hidden_size=36, intermediate_size=36, num_hidden_layers=1, num_attention_heads=4, head_dim=10,
        num_key_value_heads=2, num_local_experts=3, num_experts_per_tok=2, max_position_embeddings=64,
    )  # fmt: skip
    transformers.GptOssForCausalLM(config).save_pretrained(tmp_path / "base")
    moe_folder(tmp_path / "x", {"gate_up_proj": (3, 36, 72), "down_proj": (3, 36, 36)}, {})
    lora = {"experts.base_layer": (36, 6, 72), "experts": (36, 6, 36)}
    tensors = {}
    for wrapper, (i, r, o) in lora.items():
        tensors[f"base_model.model.model.layers.0.mlp.{wrapper}.lora_A.weight"] = torch.ones(r, i)
        tensors[f"base_model.model.model.layers.0.mlp.{wrapper}.lora_B.weight"] = torch.ones(o, r)
    save_file(tensors, tmp_path / "x" / "adapter" / ADAPTER)
    for how, text in (
        (
            {"config": str(tmp_path / "base")},
            "there is nothing to split: programs that serve this model load the adapter",
        ),
        ({}, "needs the config.json of the base model"),
    ):
        with pytest.raises(Unsupported, match=text):
            ckpttool.adapter_extract(tmp_path / "x" / "adapter", tmp_path / "out", split_experts=True, **how)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="is about an adapter"):
        ckpttool.HfOptions(split_experts=True)
