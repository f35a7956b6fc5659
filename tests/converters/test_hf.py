"""hf folders: what transformers and save_pretrained write and read, byte for byte and tensor for tensor."""

from __future__ import annotations

import json
import os
import random
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from commands import ckpttool_here
from peers import FIXTURES, Original, difference, files_of, from_pretrained, load_hf
from peers import ORIGINALS as ALL
from safetensors import deserialize, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import ckpttool
from ckpttool.engine.conversion import convert
from ckpttool.engine.diff import diff
from ckpttool.engine.opening import open as open_checkpoint
from ckpttool.errors import CkpttoolError, Corrupt, Differs, Unsafe, Unsupported, UsageError
from ckpttool.huggingface import model_files
from ckpttool.huggingface.hub_names import PLAIN
from ckpttool.storage.source import Source

WITH_REFERENCE = [o for o in ALL if o.config is not None]
HUB = [o for o in ALL if o.saved_as in ("hf", "hf_with_index")]


def labels(originals: list[Original]) -> list[str]:
    return [o.label for o in originals]


def assert_loads_into(folder: Path, truth: dict[str, Tensor]) -> None:
    """transformers finds every parameter and no other, and they are those of the live job."""
    model, said = from_pretrained(folder)
    assert not any(said[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")), said
    wanted = {k.removeprefix("model."): t for k, t in truth.items() if k.startswith("model.")}
    assert difference(dict(model.state_dict()), wanted) == []


@pytest.mark.parametrize("original", WITH_REFERENCE + HUB, ids=labels(WITH_REFERENCE + HUB))
def test_from_pretrained_misses_nothing_and_has_the_weights_of_the_live_job_whatever_lies_beside_them(
    original: Original, tmp_path: Path
) -> None:
    source: Path = original.path
    if original in HUB:  # by way of training's layout
        ckpttool.convert(source, tmp_path / "dcp", to="dcp", world_size=3)
        source = tmp_path / "dcp"
    ckpttool.convert(
        source,
        tmp_path / "out",
        to="hf",
        config=original.config or str(original.path),
        options=ckpttool.HfOptions(include_optimizer=True),
    )
    assert_loads_into(tmp_path / "out", original.truth())
    assert ckpttool.diff(tmp_path / "out", source).equal


@pytest.mark.parametrize("original", WITH_REFERENCE, ids=labels(WITH_REFERENCE))
def test_files_are_those_of_save_pretrained_byte_for_byte(original: Original, tmp_path: Path) -> None:
    assert original.config is not None
    ckpttool.convert(original.path, tmp_path / "out", to="hf", config=original.config)
    assert files_of(tmp_path / "out") == files_of(Path(original.config))


ONE_FILE = [o for o in HUB if o.path.name == "ckpt"]


@pytest.mark.parametrize("original", ONE_FILE, ids=labels(ONE_FILE))
def test_there_and_back_by_way_of_dcp_gives_the_same_bytes(original: Original, tmp_path: Path) -> None:
    ckpttool.convert(original.path, tmp_path / "dcp", to="dcp", world_size=3)
    ckpttool.convert(tmp_path / "dcp", tmp_path / "out", to="hf", config=str(original.path))
    assert files_of(tmp_path / "out") == files_of(original.path)


def test_shards_of_a_training_checkpoint_are_those_of_save_pretrained_of_the_live_model(tmp_path: Path) -> None:
    wanted = FIXTURES / "hf_llama" / "ckpt_sharded"  # the same shapes, saved with max_shard_size="40KB"
    ckpttool.convert(
        FIXTURES / "fsdp2_w3" / "ckpt",
        tmp_path / "out",
        to="hf",
        config=str(wanted),
        options=ckpttool.HfOptions(max_shard_bytes=40_000),
    )
    index = "model.safetensors.index.json"
    assert (tmp_path / "out" / index).read_bytes() == (wanted / index).read_bytes()
    assert sorted(files_of(tmp_path / "out")) == sorted(files_of(wanted))


@pytest.mark.parametrize("case", ["hf_llama", "hf_tied", "hf_moe"])
def test_shards_and_index_are_those_of_save_pretrained_at_every_size(case: str, tmp_path: Path) -> None:
    sizes = ["1", "20000"] if case == "hf_moe" else ["1", "5000", "9432", "20000", "40000", "1000000"]
    source = FIXTURES / case / "ckpt"
    model, _ = from_pretrained(source)
    for size in sizes:
        model.save_pretrained(tmp_path / size, max_shard_size=int(size))
        out = tmp_path / f"ours-{size}"
        ckpttool.convert(source, out, to="hf", options=ckpttool.HfOptions(max_shard_bytes=int(size)))
        found, wanted = files_of(out), files_of(tmp_path / size)
        assert sorted(found) == sorted(wanted), size
        # a config.json that another release of transformers wrote is not spelled as this one does
        other = json.loads(found["config.json"])["transformers_version"] != transformers.__version__
        spelled = {"config.json", "generation_config.json"} if other else set()
        assert [n for n in wanted if n not in spelled and found[n] != wanted[n]] == [], size


@pytest.mark.parametrize("case", ["fsdp2_w3_tied_bf16", "fsdp2_w3"])
def test_the_config_says_the_dtype_the_weights_were_cast_to(case: str, tmp_path: Path) -> None:
    original = next(o for o in ALL if o.case == case)
    assert original.config is not None
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        out = tmp_path / name
        ckpttool.convert(original.path, out, to="hf", config=original.config, dtype=name)
        assert json.loads((out / "config.json").read_text())["dtype"] == name
        wanted = {k: t.to(dtype) for k, t in load_hf(Path(original.config)).items()}
        assert difference(load_hf(out), wanted) == []
        model, _ = from_pretrained(out)
        assert model.dtype is dtype


def test_weights_that_the_config_ties_but_that_differ_are_refused(tmp_path: Path) -> None:
    config = FIXTURES / "hf_tied" / "ckpt"
    source = FIXTURES / "fsdp2_w2_groups" / "ckpt"  # the same shapes, untied
    with pytest.raises(ckpttool.CkpttoolError, match=r'ties "lm_head\.weight" to "model\.embed_tokens\.weight"') as e:
        ckpttool.convert(  # the config has two layers, the state one
            source, tmp_path / "out", to="hf", config=str(config), options=ckpttool.HfOptions(allow_name_mismatch=True)
        )
    assert e.value.exit_code == 3
    assert not (tmp_path / "out").exists()


def test_tokenizer_files_come_along_and_code_and_weights_beside_them_do_not(tmp_path: Path) -> None:
    config = tmp_path / "config"
    (config / "additional_chat_templates").mkdir(parents=True)
    stated = json.loads((FIXTURES / "hf_llama" / "ckpt" / "config.json").read_text())
    stated["auto_map"] = {
        "AutoModelForCausalLM": "modeling_evil.Model",
        "AutoConfig": "org/name--configuration_other.C",
    }
    code = {"AutoTokenizer": [None, "tokenizer_evil.Fast"]}
    for name, text in {
        "config.json": json.dumps(stated), "tokenizer.json": "{}", "tokenizer_config.json": json.dumps({"auto_map": code}),
        "special_tokens_map.json": "{}", "vocab.json": "{}", "merges.txt": "", "tokenizer.model": "x", "chat_template.jinja": "y",
        "additional_chat_templates/tools.jinja": "z", "normalizer.json": "{}", "tekken.json": "{}", "source.spm": "s", "bpe.codes": "",
        "modeling_evil.py": "raise SystemExit", "tokenizer_evil.py": "raise SystemExit", "tokenizer.pkl": "p",
        "pytorch_model.bin": "x", "README.md": "z",
    }.items():  # fmt: skip
        (config / name).write_text(text)
    done = ckpttool.convert(FIXTURES / "fsdp2_w3" / "ckpt", tmp_path / "out", to="hf", config=str(config))
    left = {"modeling_evil.py", "tokenizer_evil.py", "tokenizer.pkl", "pytorch_model.bin", "README.md"}
    assert files_of(tmp_path / "out").keys() == files_of(config).keys() - left | {"model.safetensors"}
    assert any(n.startswith("not copied: the code modeling_evil.py, tokenizer_evil.py, which") for n in done.notes)


@pytest.mark.parametrize(("files", "size", "words"), [(5, 60 << 20, "314,572,800 bytes"), (1001, 0, "1,001 files")])
def test_too_many_bytes_of_tokenizer_files_are_refused_before_one_is_read(
    files: int, size: int, words: str, tmp_path: Path
) -> None:
    for k in range(files):
        with open(tmp_path / f"tokenizer{k}.json", "wb") as f:
            f.truncate(size)
    with pytest.raises(Corrupt, match=rf"the config and tokenizer files are {words} in all; a model has at most 1,000"):
        model_files.read_model_files(str(tmp_path))
    notes: list[str] = []
    with Source(tmp_path) as source:
        assert model_files.find_model_files(source, None, notes).files == {}
    assert words in notes[0] and "were not used" in notes[0]


@pytest.mark.parametrize(
    ("kind", "error", "why"),
    [
        (None, Unsupported, "has no config.json, which describes the model"),
        ("folder", Unsafe, "its config.json is not a regular file"),
        ("pipe", Unsafe, "its config.json is not a regular file"),
        ("given", Unsafe, "is no folder and not a regular file"),
    ],
)
def test_a_folder_that_was_given_without_a_config_is_refused(
    kind: str | None, error: type[CkpttoolError], why: str, tmp_path: Path
) -> None:
    folder, weights = tmp_path / "c", tmp_path / "a.pt"
    torch.save({"model": {"w": torch.ones(2)}}, weights)
    folder.mkdir()
    (folder / "generation_config.json").write_text("{}")
    if kind == "folder":
        (folder / "config.json").mkdir()
    elif kind is not None:
        os.mkfifo(folder / "config.json")
    given = folder / "config.json" if kind == "given" else folder
    with pytest.raises(error, match=why):
        ckpttool.convert(weights, tmp_path / "out", to="hf", config=str(given))
    assert not (tmp_path / "out").exists()


def test_an_adapter_s_folder_that_was_given_needs_no_config(tmp_path: Path) -> None:
    (tmp_path / model_files.ADAPTER_CONFIG).write_text("{}")
    assert model_files.read_model_files(str(tmp_path)) == (None, {model_files.ADAPTER_CONFIG: b"{}"})


def test_files_with_names_that_no_archive_keeps_are_left_out(tmp_path: Path) -> None:
    odd = [b"\x1b[31m", b"\\..\\x", "\xa0".encode(), "\u202e".encode(), "\u2028".encode(), b"\xff"]
    for name in odd:
        (tmp_path / os.fsdecode(b"tokenizer" + name + b".json")).write_text("{}")
        (tmp_path / os.fsdecode(b"config" + name + b".yaml")).write_text("{}")
    (tmp_path / "additional_chat_templates").mkdir()
    good = ["config.json", "tokenizer \u00fc.json", "additional_chat_templates/tools.jinja", "train_config.yaml"]
    for name in good:
        (tmp_path / name).write_text('{"model_type": "llama"}')
    with Source(tmp_path) as source:
        notes: list[str] = []
        found = model_files.find_model_files(source, None, notes)
        assert sorted(found.files) == sorted(good[:3])
        assert sorted(model_files.read_training_files(source, None)) == sorted(good)
    note = next(n for n in notes if n.startswith("not copied: names with unprintable characters or a backslash: "))
    assert note.endswith(", ... (6 files)") and note.isprintable()


def test_architectures_taken_for_plain_have_the_same_names_in_memory_and_on_the_hub() -> None:
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    small: dict[str, Any] = {
        "vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 8, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 8, "ffn_dim": 16,
        "pad_token_id": 0, "word_embed_proj_dim": 16, "max_position_embeddings": 16,
    }  # fmt: skip
    assert PLAIN
    for kind in sorted(PLAIN):
        config = transformers.AutoConfig.for_model(kind, **small)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        state = dict(model.state_dict())
        assert set(revert_weight_conversion(model, dict(state))) == set(state), kind


# -------------------------------------------------------------------------------------------- which files are the model


def _copied(tmp_path: Path, name: str = "hf_llama", **shards: int) -> Path:
    out = tmp_path / "hf"
    convert(FIXTURES / name / "ckpt", out, to="hf", **shards)
    return out


@pytest.mark.parametrize("shard", [None, 1])
def test_metadata_of_headers_that_is_not_carried_is_named(shard: int | None, tmp_path: Path) -> None:
    """kohya's alpha, diffusers' adapter config and torchao's classes that are not known are there alone."""
    options = ckpttool.HfOptions(max_shard_bytes=shard) if shard else None
    ckpttool.convert(FIXTURES / "hf_llama" / "ckpt", tmp_path / "in", to="hf", options=options)
    assert not any("__metadata__" in n for n in ckpttool.inspect(tmp_path / "in").notes)
    file = sorted((tmp_path / "in").glob("*.safetensors"))[-1]
    save_file(load_file(file), file, metadata={"format": "pt", "ss_network_alpha": "16", "a\nb": "c"})
    done = ckpttool.convert(tmp_path / "in", tmp_path / "out", to="dcp", world_size=1)
    (said,) = (n for n in done.notes if "__metadata__" in n)
    assert said.startswith("__metadata__ in the headers of the files is not carried: ")
    assert "ss_network_alpha" in said and "\n" not in said


def test_an_incomplete_copy_without_its_index_is_no_model(tmp_path: Path) -> None:
    """The names of shards say how many there are."""
    out = _copied(tmp_path, options=ckpttool.HfOptions(max_shard_bytes=40_000))
    names = sorted(p.name for p in out.glob("model-*.safetensors"))
    assert len(names) > 2
    (out / "model.safetensors.index.json").unlink()
    assert not diff(str(FIXTURES / "hf_llama" / "ckpt"), str(out)).only_in_a  # all shards are there
    (out / names[0]).unlink()
    with pytest.raises(Corrupt, match=f"one of {len(names)} shards, and number 1 is missing"):
        open_checkpoint(out)
    with open_checkpoint(out / names[1]) as one:
        assert one.checkpoint.tensors  # what was asked for by name


@pytest.mark.parametrize("other", ["adapter_model.safetensors", "consolidated.safetensors"])
def test_what_lies_beside_the_model_is_named_and_not_joined(tmp_path: Path, other: str) -> None:
    out = _copied(tmp_path)
    save_file({"another.weight": torch.ones(3)}, out / other)
    with open_checkpoint(out) as opened:
        assert "model.another.weight" not in opened.checkpoint.tensors
        assert any(other in note and "not read" in note for note in opened.checkpoint.notes)
    (out / "config.json").unlink()
    with open_checkpoint(out) as opened:  # no model of transformers: several files are one state, but for an adapter
        assert ("model.another.weight" in opened.checkpoint.tensors) == (other[0] == "c")


def test_two_models_in_one_folder(tmp_path: Path) -> None:
    out = _copied(tmp_path, options=ckpttool.HfOptions(max_shard_bytes=40_000))
    save_file({"another.weight": torch.ones(3)}, out / "extra.safetensors")
    with open_checkpoint(out) as opened:
        assert any("extra.safetensors" in note for note in opened.checkpoint.notes)
    save_file({"another.weight": torch.ones(3)}, out / "model.safetensors")
    with pytest.raises(Unsupported, match="left over from an earlier save"):
        open_checkpoint(out)


# ------------------------------------------------------------------------------------------------------------- one file


@pytest.mark.parametrize("to", [None, "hf", "safetensors"])
@pytest.mark.parametrize("case", ["fsdp2_w3", "fsdp2_w3_moe", "fsdp2_w3_tied_bf16", "hf_tied"])
def test_one_file_has_the_weights_of_the_folder_byte_for_byte(case: str, to: str | None, tmp_path: Path) -> None:
    source = FIXTURES / case / "ckpt"
    config = str(FIXTURES / case / "hf_ref") if (FIXTURES / case / "hf_ref").exists() else str(source)
    ckpttool.convert(source, tmp_path / "folder", to="hf", config=config)
    done = ckpttool.convert(source, tmp_path / "out.safetensors", to=to, config=config)
    assert (
        done.layout_to == "hf"
        and done.verified
        and sorted(p.name for p in tmp_path.iterdir()) == ["folder", "out.safetensors"]
    )
    assert (tmp_path / "out.safetensors").read_bytes() == (tmp_path / "folder" / "model.safetensors").read_bytes()
    with safe_open(tmp_path / "out.safetensors", "pt") as f:
        names = set(f.keys())
        assert f.metadata() == {"format": "pt"}
    assert names == set(load_file(tmp_path / "folder" / "model.safetensors"))
    assert ckpttool.inspect(tmp_path / "out.safetensors").layout == "hf"
    assert ckpttool.digest(tmp_path / "out.safetensors", config=config).digest["model"] == done.digest["model"]


def test_shards_become_one_file_under_the_names_on_the_hub(tmp_path: Path) -> None:
    source = FIXTURES / "fsdp2_w3_moe" / "ckpt"
    options = ckpttool.HfOptions(max_shard_bytes=50_000)
    ckpttool.convert(
        source, tmp_path / "shards", to="hf", config=str(FIXTURES / "fsdp2_w3_moe" / "hf_ref"), options=options
    )
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    done = ckpttool.convert(tmp_path / "shards", tmp_path / "one.safetensors")
    wanted = {k: t for p in (tmp_path / "shards").glob("*.safetensors") for k, t in load_file(p).items()}
    assert difference(load_file(tmp_path / "one.safetensors"), wanted) == []
    assert any("from_pretrained loads a folder, with config.json" in n for n in done.notes)


def test_what_lies_beside_weights_is_refused_for_one_file(tmp_path: Path) -> None:
    for options, word in (
        (ckpttool.HfOptions(include_optimizer=True), "include_optimizer=True writes several files"),
        (ckpttool.HfOptions(adapter=True), "adapter"),
        (ckpttool.HfOptions(max_shard_bytes=1000), "max_shard_bytes=1000 splits weights into files"),
    ):
        with pytest.raises(CkpttoolError, match=word):
            ckpttool.convert(FIXTURES / "fsdp2_w3" / "ckpt", tmp_path / "x.safetensors", options=options)
    with pytest.raises(UsageError, match="world_size=2 does not apply to hf, which is one file"):
        ckpttool.convert(FIXTURES / "fsdp2_w3" / "ckpt", tmp_path / "x.safetensors", world_size=2)
    with pytest.raises(UsageError, match="dcp writes a folder"):
        ckpttool.convert(FIXTURES / "fsdp2_w3" / "ckpt", tmp_path / "x.safetensors", to="dcp")
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------- several numbers in a byte, or in three

#: name -> (safetensors' dtype, shape in numbers, bytes), in the order in which the library writes dtypes.
PACKED = {
    "b": ("F32", [4], 16),
    "six": ("F6_E3M2", [8], 6),
    "w": ("F6_E2M3", [64, 32], 1536),
    "four": ("F4", [4, 16], 32),
}


def packed(path: Path, names: Sequence[str] = tuple(PACKED), seed: int = 0) -> Path:
    """A file of such tensors with random bytes, by hand: the library reads F6 and has no way to write it."""
    entries, at = {}, 0
    for name in names:
        dtype, shape, size = PACKED[name]
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + random.Random(seed).randbytes(at))
    return path


def as_the_library_reads_it(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    return {n: (x["dtype"], x["shape"], bytes(x["data"])) for n, x in deserialize(path.read_bytes())}


def test_numbers_of_four_and_six_bits_pass_byte_for_byte_and_are_counted(tmp_path: Path) -> None:
    source = packed(tmp_path / "in.safetensors")
    assert ckpttool.inspect(source).components["model"]["elements"] == 4 + 8 + 64 * 32 + 4 * 16
    shown = ckpttool_here("inspect", source, "--tree").stdout
    assert "four float4_e2m1fn_x2 [4, 8], 64 numbers" in shown and "w f6_e2m3_x4 [64, 8], 2,048 numbers" in shown
    assert "64 numbers, 32 B" in ckpttool_here("inspect", source, "--tensor", "*four").stdout
    (row,) = json.loads(ckpttool_here("inspect", source, "--tensor", "*.w", "--json").stdout)
    assert row["numbers"] == 2048 and row["bytes"] == 1536
    ckpttool.convert(source, tmp_path / "folder", to="hf", cast={"*.b": "bf16"})
    how: dict[str, Any]
    for how, name in (({"dtype": "bf16"}, "model.six"), ({"cast": {"*four": "fp32"}}, "model.four")):
        with pytest.raises(Unsupported, match=rf'"{name}" is f.*, \d numbers in \d bytes, which ckpttool copies'):
            ckpttool.convert(source, tmp_path / "cast", to="hf", **how)
    assert not (tmp_path / "cast").exists()
    ckpttool.convert(source, tmp_path / "out.safetensors", workers=2)
    ckpttool.export(source, tmp_path / "a.tar.zst")
    ckpttool.restore(tmp_path / "a.tar.zst", tmp_path / "restored", to="hf")
    wanted = as_the_library_reads_it(source)
    for path in (tmp_path / "out.safetensors", tmp_path / "restored" / "model.safetensors"):
        assert as_the_library_reads_it(path) == wanted
        assert ckpttool.diff(path, source).equal and ckpttool.verify(path, read_data=True).data == "ok"
    cast = as_the_library_reads_it(tmp_path / "folder" / "model.safetensors")
    assert cast.pop("b")[0] == "BF16" and cast == {n: x for n, x in wanted.items() if n != "b"}
    assert ckpttool.doctor(source, read_data=True).sound


@pytest.mark.parametrize(
    ("to", "options"),
    [("dcp", {"world_size": 2}), ("full", {}), ("zero1", {"world_size": 2}), ("zero3", {"world_size": 2}), ("universal", {}), ("fsdp1", {"world_size": 2}),
     ("torch_checkpointing", {"world_size": 2}), ("megatron", {"world_size": 1}), ("accelerate", {}), ("trainer", {}), ("lightning", {}), ("torchtitan", {"world_size": 2})],
)  # fmt: skip
def test_six_bits_are_refused_by_name_where_torch_reads(to: str, options: dict[str, int], tmp_path: Path) -> None:
    packed(tmp_path / "in.safetensors", ("b", "w"))
    with pytest.raises(
        Unsupported, match=r'"model\.w" is f6_e2m3_x4, numbers of six bits, which torch has no dtype for'
    ):
        ckpttool.convert(tmp_path / "in.safetensors", tmp_path / "out", to=to, drop=True, **options)
    assert not (tmp_path / "out").exists()


def test_what_six_bits_mean_is_not_guessed(tmp_path: Path) -> None:
    packed(tmp_path / "in.safetensors", ("b", "w"))
    packed(tmp_path / "other.safetensors", ("b", "w"), 1)
    with ckpttool.open(tmp_path / "in.safetensors") as opened:
        w = opened["model.w"]
        for act in (w.numpy, w.torch, lambda: w[0], ckpttool.storage_reader(tmp_path / "in.safetensors").read_metadata):
            with pytest.raises(Unsupported, match="six bits"):
                act()
    done = ckpttool_here("diff", tmp_path / "in.safetensors", tmp_path / "other.safetensors")
    assert done.returncode == Differs.exit_code and "other bytes" in done.stderr
    text = b'{"w":{"dtype":"F6_E2M3","shape":[4,6],"data_offsets":[0,18]}}'
    (tmp_path / "odd.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(18))
    with pytest.raises(Unsupported, match=r"4 numbers share bytes, and the last dimension is no multiple"):
        ckpttool.open(tmp_path / "odd.safetensors")


def test_numbers_of_four_bits_are_compared_one_by_one(tmp_path: Path) -> None:
    source = packed(tmp_path / "in.safetensors", ("four",))
    data = bytearray(source.read_bytes())
    data[-1] ^= 0x70  # the last number, of which the low bits are the one before
    (tmp_path / "other.safetensors").write_bytes(data)
    (found,) = ckpttool.diff(source, tmp_path / "other.safetensors").data
    assert (found.elements, found.differing, found.first) == (64, 1, (3, 15))
    save_file({"four": torch.zeros(4, 8)}, tmp_path / "wide.safetensors")
    assert ckpttool.diff(source, tmp_path / "wide.safetensors").shapes == {"model.four": ((4, 16), (4, 8))}
