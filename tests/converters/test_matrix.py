"""Every fixture to every layout, read back by torch and safetensors and compared with the live job bit for bit."""

from __future__ import annotations

import io
import json
import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from peers import (
    FLAT,
    ORIGINALS,
    REPOSITORY,
    Original,
    difference,
    files_of,
    load_dcp,
    load_full,
    load_hf,
    ranks_for,
    raw,
    same_value,
)
from peers import tensors_of as tensors
from torch import Tensor

import ckpttool
from ckpttool.errors import Unsupported
from ckpttool.layouts import layouts

by_label = pytest.mark.parametrize("original", ORIGINALS, ids=[o.label for o in ORIGINALS])
WITHOUT_OPTIMIZER = ("safetensors", "hf_shards", "hf", "hf_with_index")


def world_of(original: Original) -> int:
    """A world size in 1..4, another one for most neighbours, so that all of them are met in a short run."""
    return 1 + ORIGINALS.index(original) % 4


def named(label: str) -> Original:
    return next(o for o in ORIGINALS if o.label == label)


def by_torch(original: Original) -> dict[str, Any]:
    """What torch's own loader makes of the original."""
    return load_dcp(original.path) if original.path.is_dir() else load_full(original.path)


def plain(x: Any) -> Any:
    """An OrderedDict as the dict it is."""
    return {k: plain(v) for k, v in x.items()} if isinstance(x, dict) else x


def with_names(tree: dict[str, Any]) -> dict[str, Any]:
    """A file whose optimizer numbers its parameters, as a sharded job asks for it: by names."""
    owners = [n for n in tree["model_state_dict"] if n != "lm_head.weight"]  # tied to the embedding
    optim = tree["optimizer_state_dict"]
    state = {owners[i]: slots for i, slots in optim["state"].items()}
    groups = [{**g, "params": [owners[i] for i in g["params"]]} for g in optim["param_groups"]]
    return {**tree, "optimizer_state_dict": {**optim, "state": state, "param_groups": groups}}


def assert_tree_is_that_of(original: Original, tree: dict[str, Any], sharded: bool) -> None:
    """Tensors equal those of the live job, and the tree is the one that torch's own loader finds in the original: every key,
    every nesting, every value."""
    assert difference(tensors(tree), original.truth()) == []
    if original.saved_as in WITHOUT_OPTIMIZER:
        assert (original.saved_as == "safetensors") or tree.keys() == {"model"}  # that one has its names at the root
        return
    wanted = plain(by_torch(original))
    if original.path.name == "ids.pt" and sharded:
        wanted = with_names(wanted)
    if original.saved_as == "raw" and not sharded:  # DCP keeps integer keys as text; optimizers want them back
        wanted["optimizer"]["state"] = {int(k): v for k, v in wanted["optimizer"]["state"].items()}
    assert same_value(tree, wanted)


@by_label
def test_a_full_file_holds_the_state_of_the_live_job(original: Original, tmp_path: Path) -> None:
    out = tmp_path / "out.pt"
    done = ckpttool.convert(original.path, out, to="full")
    assert_tree_is_that_of(original, load_full(out), sharded=False)
    assert not done.dropped


@by_label
def test_a_dcp_folder_holds_the_state_of_the_live_job(original: Original, tmp_path: Path) -> None:
    ckpttool.convert(original.path, tmp_path / "out", to="dcp", world_size=world_of(original))
    assert_tree_is_that_of(original, load_dcp(tmp_path / "out"), sharded=True)


@pytest.mark.parametrize("label", ["fsdp2_w2_flatopt", "fsdp2_w2_raw", "full_w1/ids.pt", "fsdp2_w2_stserial"])
@pytest.mark.parametrize("by", ["audit", "hf"])
def test_the_tree_of_the_trainer_comes_back_through_an_archive_and_an_hf_folder(
    label: str, by: str, tmp_path: Path
) -> None:
    original = named(label)
    between = tmp_path / ("a.tar.zst" if by == "audit" else "hf")
    ckpttool.convert(
        original.path, between, to=by, **({"options": ckpttool.HfOptions(include_optimizer=True)} if by == "hf" else {})
    )
    ckpttool.convert(between, tmp_path / "out", to="dcp", world_size=3)
    assert_tree_is_that_of(original, load_dcp(tmp_path / "out"), sharded=True)
    ckpttool.convert(between, tmp_path / "out.pt", to="full")
    assert_tree_is_that_of(original, load_full(tmp_path / "out.pt"), sharded=False)


@by_label
def test_an_hf_folder_holds_the_weights_of_the_live_job(original: Original, tmp_path: Path) -> None:
    done = ckpttool.convert(original.path, tmp_path / "out", to="hf", config=original.config)
    found = load_hf(tmp_path / "out")
    truth = {k.removeprefix("model."): t for k, t in original.truth().items() if k.startswith("model.")}
    if original.config is not None:
        assert difference(found, load_hf(Path(original.config))) == []
    elif original.case == "hf_moe":  # fused in memory, one tensor an expert on the Hub
        assert difference(found, load_hf(original.path)) == []
    else:
        once = {k: t for k, t in truth.items() if k in found or not any(raw(t) == raw(truth[o]) for o in found)}
        assert difference(found, once) == []
    left = {name for name, _, _ in done.dropped}
    assert left == {n for n in [*state_names(original)] if not n.startswith("model.")}


def state_names(original: Original) -> list[str]:
    with ckpttool.open(original.path) as opened:
        return [*opened.checkpoint.tensors, *opened.checkpoint.values]


@by_label
def test_the_digest_is_the_same_in_every_layout_at_every_world_size_and_after_a_round_trip(
    original: Original, tmp_path: Path
) -> None:
    wanted = ckpttool.digest(original.path).digest
    world = world_of(original)
    path: Path = original.path
    for i, (to, size) in enumerate([("dcp", world), ("full", None), ("dcp", 1 + world % 4), ("full", None)]):
        step = tmp_path / f"{i}{'.pt' if to == 'full' else ''}"
        assert ckpttool.convert(path, step, to=to, world_size=size).digest == wanted
        assert ckpttool.digest(step).digest == wanted
        path = step
    if (
        original.saved_as != "raw"
    ):  # its numbers become names on the way from a file of one process to a folder of ranks
        assert same_value(load_full(tmp_path / "1.pt"), load_full(tmp_path / "3.pt"))


def test_every_world_size_from_one_to_four_and_one_above_the_longest_dimension_has_the_same_digest(
    tmp_path: Path,
) -> None:
    source = named("awkward_w3").path
    wanted = ckpttool.digest(source).digest
    for world in (1, 2, 3, 4, 200):
        ckpttool.convert(source, tmp_path / str(world), to="dcp", world_size=world)
        assert ckpttool.digest(tmp_path / str(world)).digest == wanted
        assert difference(tensors(load_dcp(tmp_path / str(world))), named("awkward_w3").truth()) == []


DRIVER = """
import sys, ckpttool
for spec in sys.argv[2:]:
    src, name, to = spec.split("=")
    ckpttool.convert(src, f"{sys.argv[1]}/{name}", to=to, world_size=3 if to == "dcp" else None)
"""


def test_the_same_conversion_gives_the_same_bytes_whatever_the_hash_seed(tmp_path: Path) -> None:
    specs = []
    for label in ("fsdp2_w2_groups", "awkward_w3", "fsdp2_w3_moe", "hf_tied", "full_w1/ids.pt"):
        for to, suffix in (("full", ".pt"), ("dcp", ""), ("hf", "")):
            specs.append(f"{named(label).path}={label.replace('/', '_')}-{to}{suffix}={to}")
    for seed in ("1", "2"):
        (tmp_path / seed).mkdir()
        subprocess.run(
            [sys.executable, "-c", DRIVER, str(tmp_path / seed), *specs],
            check=True, cwd=REPOSITORY, env={**os.environ, "PYTHONHASHSEED": seed},
        )  # fmt: skip
    first, second = files_of(tmp_path / "1"), files_of(tmp_path / "2")
    records = {n for n in first if n.endswith("ckpttool.json")}
    assert first.keys() == second.keys()
    assert [n for n in first if n not in records and first[n] != second[n]] == []


def plain_metadata(folder: Path) -> Any:
    with (folder / ".metadata").open("rb") as f:
        return pickle.load(f)


@pytest.mark.parametrize("label", ["fsdp2_w2_groups", "awkward_w3", "fsdp2_w3_moe", "fsdp2_w4_tp", "hf_tied"])
@pytest.mark.parametrize("world", [2, 3])
def test_every_rank_has_one_file_with_just_its_rows_by_torch_chunk(label: str, world: int, tmp_path: Path) -> None:
    original = named(label)
    ckpttool.convert(original.path, tmp_path / "out", to="dcp", world_size=world)
    assert sorted(os.listdir(tmp_path / "out")) == sorted(
        [".metadata", "ckpttool.json", *(f"__{r}_0.distcp" for r in range(world))]
    )
    meta = plain_metadata(tmp_path / "out")
    blobs = {r: (tmp_path / "out" / f"__{r}_0.distcp").read_bytes() for r in range(world)}
    items = {(i.fqn, None if i.offset is None else tuple(i.offset)): s for i, s in meta.storage_data.items()}
    seen = dict.fromkeys(range(world), 0)
    truth = {
        ("optim.state." + k.removeprefix("optim.") if k.startswith("optim.") else k): t
        for k, t in original.truth().items()
    }
    for name, whole in truth.items():
        is_sharded = whole.ndim > 0 and (whole.ndim > 1 or whole.is_floating_point())
        parts = torch.chunk(whole, world) if is_sharded else (whole,)
        start = 0
        for rank, part in enumerate(parts):
            where = items.pop((name, (start, *[0] * (whole.ndim - 1)) if whole.ndim else ()))
            assert where.relative_path == f"__{rank}_0.distcp"
            item = blobs[rank][where.offset : where.offset + where.length]
            assert difference({name: torch.load(io.BytesIO(item), weights_only=True)}, {name: part}) == []
            seen[rank] += where.length
            start += len(part) if part.ndim else 0
    for where in items.values():  # values, and tensors among what the user put there: in the first file
        assert where.relative_path == "__0_0.distcp"
        seen[0] += where.length
    assert seen == {r: len(b) for r, b in blobs.items()}  # and nothing else


@by_label
def test_the_metadata_is_plain_pickle_of_torch_and_holds_no_path_of_this_machine(
    original: Original, tmp_path: Path
) -> None:
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

    ckpttool.convert(original.path, tmp_path / "out", to="dcp", world_size=2)
    raw_bytes = (tmp_path / "out" / ".metadata").read_bytes()
    assert not [w for w in (b"pathlib", str(tmp_path).encode(), str(original.path).encode()) if w in raw_bytes]
    meta = plain_metadata(tmp_path / "out")
    assert type(meta) is Metadata
    assert {type(s.relative_path) for s in meta.storage_data.values()} == {str}
    assert {s.relative_path for s in meta.storage_data.values()} <= {"__0_0.distcp", "__1_0.distcp"}
    assert meta.planner_data.keys() == meta.state_dict_metadata.keys()
    for key, entry in meta.state_dict_metadata.items():
        assert ".".join(map(str, meta.planner_data[key])) == key
        if isinstance(entry, TensorStorageMetadata):
            assert type(entry.size) is torch.Size
            assert all(type(c.offsets) is torch.Size and type(c.sizes) is torch.Size for c in entry.chunks)
            assert entry.properties.layout is torch.strided
            assert entry.properties.memory_format is torch.contiguous_format


@by_label
def test_every_zip_written_has_right_checksums(original: Original, tmp_path: Path) -> None:
    ckpttool.convert(original.path, tmp_path / "out.pt", to="full")
    with zipfile.ZipFile(tmp_path / "out.pt") as z:
        assert z.testzip() is None
    ckpttool.convert(original.path, tmp_path / "out", to="dcp", world_size=2)
    blobs = {p.name: p.read_bytes() for p in (tmp_path / "out").glob("*.distcp")}
    for index, where in plain_metadata(tmp_path / "out").storage_data.items():
        item = blobs[where.relative_path][where.offset : where.offset + where.length]
        with zipfile.ZipFile(io.BytesIO(item)) as z:
            assert z.testzip() is None, index


def test_storages_of_a_full_file_begin_at_multiples_of_64_bytes(tmp_path: Path) -> None:
    ckpttool.convert(named("fsdp2_w2_groups").path, tmp_path / "out.pt", to="full")
    data = (tmp_path / "out.pt").read_bytes()
    with zipfile.ZipFile(tmp_path / "out.pt") as z:
        for info in z.infolist():
            if "/data/" in info.filename:
                n, extra = (int.from_bytes(data[info.header_offset + k :][:2], "little") for k in (26, 28))
                assert (info.header_offset + 30 + n + extra) % 64 == 0, info.filename


def test_tied_weights_of_a_full_file_share_a_storage_again(tmp_path: Path) -> None:
    ckpttool.convert(named("full_w1/fqn.pt").path, tmp_path / "out.pt", to="full")
    model = load_full(tmp_path / "out.pt")["model"]
    assert model["lm_head.weight"].data_ptr() == model["model.embed_tokens.weight"].data_ptr()


def every_dtype() -> dict[str, Tensor]:
    """A tensor of every dtype torch can save, of bits that no arithmetic would keep: NaN payloads, -0.0, denormals."""
    bits = torch.arange(256, dtype=torch.uint8).repeat(7)[: 16 * 15].contiguous()
    names = (
        "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu "
        "int64 int32 int16 int8 uint64 uint32 uint16 uint8 complex128 complex64 complex32"
    )
    found = {n: bits.clone().view(getattr(torch, n)).reshape(3, -1) for n in names.split()}
    found["bool"] = (bits % 3 == 0).reshape(16, 15)
    found["scalar"] = torch.tensor(-0.0)
    found["empty"] = torch.empty(0, 4)
    found["empty_inside"] = torch.empty(3, 0, 2, dtype=torch.int64)
    found["five"] = torch.arange(2 * 3 * 2 * 5 * 2, dtype=torch.int32).reshape(2, 3, 2, 5, 2)
    return found


@pytest.mark.parametrize(
    "odd",
    [
        [{}],
        [{6: 1}],
        [[[1]]],
        [[], {}],
        [[{}]],
        [[{}], {}],
        [None, [[]]],
        [{}, {"a": 1}],
        [[{"a": torch.ones(2)}, {}], 3],
    ],
    ids=repr,
)
def test_torch_finds_a_list_of_anything_that_a_dcp_folder_holds(odd: list[Any], tmp_path: Path) -> None:
    """Its planner has a key for an item of a list only where the list holds a tensor or a dict that it takes apart."""
    groups = [{"lr": 0.1, 6: ["w"]}]  # as odd, and in a place that has a meaning
    tree = {"model": {"w": torch.ones(4)}, "optim": {"state": {"w": {"m": torch.ones(4)}}, "param_groups": groups}}
    torch.save({**tree, "odd": odd}, tmp_path / "in.pt")
    ckpttool.convert(tmp_path / "in.pt", tmp_path / "out", to="dcp", world_size=2)
    found = load_dcp(tmp_path / "out")
    assert repr(found["odd"]) == repr(odd)
    assert found["optim"]["param_groups"] == groups


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_every_dtype_survives_in_every_layout_that_has_it(tmp_path: Path) -> None:
    state = every_dtype()
    torch.save({"model": state}, tmp_path / "in.pt")
    for world in (1, 2, 3, 7):
        ckpttool.convert(tmp_path / "in.pt", tmp_path / f"d{world}", to="dcp", world_size=world)
        assert difference(load_dcp(tmp_path / f"d{world}")["model"], state) == []
        ckpttool.convert(tmp_path / f"d{world}", tmp_path / f"f{world}.pt", to="full")
        assert difference(load_full(tmp_path / f"f{world}.pt")["model"], state) == []
    kept = {k: t for k, t in state.items() if k not in ("complex128", "complex32")}
    torch.save({"model": kept}, tmp_path / "kept.pt")
    ckpttool.convert(tmp_path / "kept.pt", tmp_path / "hf", to="hf")
    assert difference(load_hf(tmp_path / "hf"), kept) == []


def test_views_strides_and_shared_storages_become_the_tensors_they_show(tmp_path: Path) -> None:
    base = torch.arange(4000, dtype=torch.float32)
    state = {
        "rows": base[100:1300].view(30, 40)[3:7],
        "columns": base.view(50, 80)[:, 11:30],
        "transposed": base.view(50, 80).t(),
        "flipped_dims": base[:3840].view(8, 6, 80).permute(2, 0, 1),
        "stepped": base[::7],
        "expanded": base[:5].expand(4, 5),
        "diagonal": base[:900].view(30, 30).diagonal(),
    }
    torch.save({"model": state}, tmp_path / "in.pt")
    for world in (1, 3):
        ckpttool.convert(tmp_path / "in.pt", tmp_path / f"d{world}", to="dcp", world_size=world)
        assert difference(load_dcp(tmp_path / f"d{world}")["model"], state) == []
    ckpttool.convert(tmp_path / "in.pt", tmp_path / "out.pt", to="full")
    assert difference(load_full(tmp_path / "out.pt")["model"], state) == []
    ckpttool.convert(tmp_path / "in.pt", tmp_path / "hf", to="hf")
    assert difference(load_hf(tmp_path / "hf"), {k: t.contiguous() for k, t in state.items()}) == []


# ------------------------------------------------------------------------------------- engines with flat tensors

by_flat_label = pytest.mark.parametrize("original", FLAT, ids=[o.label for o in FLAT])
TARGETS = ("dcp", "full", "hf", "zero3", "zero2", "zero1", "universal", "fsdp1")
PAIRS = [(a, b) for a in TARGETS for b in TARGETS if a != b and a != "hf"]


@by_flat_label
def test_a_full_file_holds_the_state_of_the_live_engine(original: Original, tmp_path: Path) -> None:
    done = ckpttool.convert(original.path, tmp_path / "out.pt", **original.how)
    tree = load_full(tmp_path / "out.pt")
    assert difference(tensors(tree), original.truth()) == []
    assert not done.dropped
    said = json.loads((original.folder / "case.json").read_text())
    trained = {k.removeprefix("optim.").removesuffix(".exp_avg") for k in original.truth() if k.endswith(".exp_avg")}
    groups = tree["optim"]["param_groups"]
    assert len(groups) == said["optimizer"]["kwargs"].get("groups", 1)
    listed = [n for g in groups for n in g["params"]]
    assert len(set(listed)) == len(listed) and (set(listed) >= trained if trained else listed)
    if original.engine == "deepspeed":
        assert tree["global_steps"] == said["step"]


@by_flat_label
def test_the_source_of_an_engine_comes_back_with_an_equal_digest_at_every_world_size(
    original: Original, tmp_path: Path
) -> None:
    with ckpttool.open(original.path, **original.how) as opened:
        own = opened.layout.name
    wanted = ckpttool.digest(original.path, **original.how).digest
    ckpttool.convert(original.path, tmp_path / "dcp", to="dcp", world_size=2, **original.how)
    for world in (1, 5) if own != "universal" else (None,):
        like = original.path if own == "verl" else None  # which numbers its parameters in the order of the model
        done = ckpttool.convert(tmp_path / "dcp", tmp_path / str(world), to=own, world_size=world, like=like)
        assert agree(done, wanted)
        assert ckpttool.digest(tmp_path / str(world)).digest == done.digest


#: What a configuration of DeepSpeed gets that says nothing of ZeRO; it stays when the files are read again.
STAGE = "extra.ds_config.zero_optimization.stage"


def agree(done: ckpttool.ConvertResult, wanted: dict[str, str], *before: ckpttool.ConvertResult) -> bool:
    """Whether digests are equal; that of the values is another one where this layout, or one before it, had to change some and said so."""
    tensors = {k: d for k, d in done.digest.items() if k != "values"}
    same = done.digest.get("values") == wanted.get("values")
    said = any(r.changed or STAGE in r.added for r in (done, *before))
    return tensors == {k: d for k, d in wanted.items() if k != "values"} and (same or said)


def pairs() -> list[Any]:
    """Every ordered pair of layouts, with an original of one engine after the other."""
    have = [
        o for o in [*FLAT, *ORIGINALS] if o.saved_as not in (*WITHOUT_OPTIMIZER, "views") and o.path.name != "views.pt"
    ]
    assert len(have) > 20
    pool = {engine: [o for o in have if o.engine == engine] for engine in ("deepspeed", "fsdp1", None)}
    out = []
    for k, (a, b) in enumerate(PAIRS):
        mine = pool[("deepspeed", "fsdp1", None)[k % 3]]
        original = mine[k // 3 % len(mine)]
        out.append(pytest.param(a, b, original, id=f"{a}-{b}-{original.label}"))
    return out


@pytest.mark.parametrize(("a", "b", "original"), pairs())
def test_a_state_goes_from_any_layout_to_any_other_and_home_again_with_one_digest(
    a: str, b: str, original: Original, tmp_path: Path
) -> None:
    """At three world sizes, none of them the source's."""
    wanted = ckpttool.digest(original.path, **original.how).digest
    k = PAIRS.index((a, b))
    first = ckpttool.convert(original.path, tmp_path / "a", to=a, **ranks_for(a, 1 + k % 5), **original.how)
    assert agree(first, wanted) and not first.dropped
    second = ckpttool.convert(tmp_path / "a", tmp_path / "b", to=b, **ranks_for(b, 1 + (k + 2) % 5))
    if b == "hf":
        assert second.digest["model"] == wanted["model"]
        return
    assert agree(second, wanted, first) and not second.dropped
    home = ckpttool.convert(tmp_path / "b", tmp_path / "home.pt", to="full")
    assert agree(home, wanted, first, second) and not home.dropped
    assert difference(tensors(load_full(tmp_path / "home.pt")), original.truth()) == []


@by_flat_label
def test_every_zip_written_from_an_engine_has_right_checksums(original: Original, tmp_path: Path) -> None:
    to = ("zero3", "zero2", "universal", "fsdp1", "zero1")[FLAT.index(original) % 5]
    ckpttool.convert(original.path, tmp_path / "out", to=to, **ranks_for(to, 3), **original.how)
    files = list((tmp_path / "out").rglob("*.pt"))
    assert len(files) >= 4
    for p in files:
        with zipfile.ZipFile(p) as z:
            assert z.testzip() is None, p


ADAM = {"step": torch.tensor(1.0), "exp_avg": torch.ones(5, 3), "exp_avg_sq": torch.ones(5, 3)}
GROUP = {"lr": 0.1, "weight_decay": 0.5, "params": ["fc.weight"]}
SPARSE: dict[str, dict[str, Any]] = {
    "weights": {}, "trainer": {"trainer": {"step": 3}},
    "optimizer": {"optim": {"state": {"fc.weight": ADAM}, "param_groups": [{**GROUP, "betas": (0.9, 0.99)}]}},
    "sgd": {"optim": {"state": {}, "param_groups": [{**GROUP, "momentum": 0}]}},
}  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("beside", SPARSE)
def test_what_is_written_of_a_sparse_state_is_recognised_for_what_it_is(
    beside: str, ranks: int, tmp_path: Path
) -> None:
    torch.save({"model": {"fc.weight": torch.ones(5, 3)}, **SPARSE[beside]}, tmp_path / "s.pt")
    written = 0
    for layout in (x for x in layouts().values() if x.write):
        world = {} if layout.name in ("full", "hf", "audit", "universal") else {"world_size": ranks}
        out = tmp_path / (layout.name + {"full": ".pt", "audit": ".tar.zst"}.get(layout.name, ""))
        try:
            ckpttool.convert(tmp_path / "s.pt", out, to=layout.name, drop=True, **world)
        except Unsupported:
            continue
        written += 1
        with ckpttool.open(out) as opened:
            read_as = "dcp" if layout.name == "torchtitan" else layout.name
            assert opened.checkpoint.layout == read_as
            assert opened["model.fc.weight"].numpy().tobytes() == torch.ones(5, 3).numpy().tobytes()
            if "optim" in SPARSE[beside] and layout.name != "hf":
                assert opened.checkpoint.values["optim.param_groups.0.lr"].data == 0.1
    assert written >= 10


def test_an_optimizer_without_slots_goes_through_the_directories_of_trainers(tmp_path: Path) -> None:
    """SGD without momentum: torch saves no state for it, and asks for the key all the same."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    source = tmp_path / "checkpoint-3"
    source.mkdir()
    torch.save(model.state_dict(), source / "pytorch_model.bin")
    torch.save(optimizer.state_dict(), source / "optimizer.pt")
    torch.save({"last_epoch": 3}, source / "scheduler.pt")
    (source / "trainer_state.json").write_text('{"global_step": 3}')
    ckpttool.convert(source, tmp_path / "dcp", to="dcp", world_size=2)
    for to, name, file in (
        ("trainer", "checkpoint-4", "optimizer.pt"),
        ("accelerate", "a", "optimizer.bin"),
        ("full", "x.pt", ""),
    ):
        ckpttool.convert(
            tmp_path / "dcp", tmp_path / name, to=to, world_size=1 if file else None, drop=True, like=source
        )
        found = torch.load(tmp_path / name / file if file else tmp_path / name)
        found = found if file else found["optim"]
        assert found["state"] == {} and found["param_groups"][0]["lr"] == 0.125
        if file:
            torch.optim.SGD(model.parameters(), lr=1).load_state_dict(found)
            assert "starts with a new optimizer" not in ckpttool.inspect(tmp_path / name).next


def test_param_groups_of_the_users_own_get_no_state_beside_them(tmp_path: Path) -> None:
    mine = {"param_groups": [{"lr": 0.5}], "note": "mine"}
    torch.save({"model": {"fc.weight": torch.ones(5, 3)}, **SPARSE["sgd"], "mine": mine}, tmp_path / "s.pt")
    ckpttool.convert(tmp_path / "s.pt", tmp_path / "dcp", to="dcp", world_size=2)
    ckpttool.convert(tmp_path / "dcp", tmp_path / "out.pt", to="full")
    found = torch.load(tmp_path / "out.pt")
    assert found["mine"] == mine and found["optim"]["state"] == {}
