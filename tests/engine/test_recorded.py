"""The digests in ckpttool.json count: whatever copies or loads a checkpoint compares them, and says where it did not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import ckpttool
from ckpttool.audit.archive_options import ArchiveOptions
from ckpttool.audit.export import export
from ckpttool.engine.recorded import RECORD
from ckpttool.errors import Corrupt, Differs

LAYOUTS: dict[str, dict[str, Any]] = {
    "dcp": {"world_size": 3}, "hf": {}, "hf+": {"to": "hf", "options": ckpttool.HfOptions(include_optimizer=True)}, "zero2": {"world_size": 3},
    "zero3": {"world_size": 3}, "universal": {}, "fsdp1": {"world_size": 3, "wrap": ["l.*"]},
}  # fmt: skip


def state() -> dict[str, Any]:
    g = torch.Generator().manual_seed(1)
    model = {
        "emb.weight": torch.randn(131, 8, generator=g), "l.0.w": torch.randn(6, 5, generator=g),
        "l.0.b": torch.randn(6, generator=g),
    }  # fmt: skip
    slots = {n: {"step": torch.tensor(3.0), "exp_avg": t * 2, "exp_avg_sq": t * t} for n, t in model.items()}
    group = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "params": list(model)}
    return {"model": {**model, "head.weight": model["emb.weight"]}, "optim": {"state": slots, "param_groups": [group]}}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One state in every layout that keeps a record beside it."""
    root = tmp_path_factory.mktemp("made")
    torch.save(state(), root / "x.pt")
    for name, how in LAYOUTS.items():
        ckpttool.convert(root / "x.pt", root / name, drop=True, verify=False, **{"to": name, **how})
    return root


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Callable[[str], Path]:
    def of(name: str) -> Path:
        shutil.copytree(made / name, tmp_path / "src" / name)
        return tmp_path / "src" / name

    return of


def flip(folder: Path) -> str:
    """Flip one bit of a tensor of the model where nothing but the record can tell; the name of the tensor."""
    with ckpttool.open(folder) as opened:
        ckpt = opened.locate()
        name = "model.l.0.w"
        where = ckpt.tensors[name].chunks[-1].extent
        path = folder / ckpt.files[where.file]
        data = bytearray(path.read_bytes())
        data[where.offset + where.length - 1] ^= 64
    path.write_bytes(data)
    return name


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    record = json.loads((folder / RECORD).read_text())
    change(record)
    (folder / RECORD).write_text(json.dumps(record))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_was_not_touched_converts_and_loses_nothing(layout: str, made: Path, tmp_path: Path) -> None:
    done = ckpttool.convert(made / layout, tmp_path / "out", to="dcp", world_size=2, verify=False)
    record = json.loads((made / layout / RECORD).read_text())
    assert done.compared >= len(record["tensors"]) - len(record["tied"])
    assert not [n for n in done.notes if RECORD in n]
    assert set(record["files"]) == {
        str(p.relative_to(made / layout)) for p in (made / layout).rglob("*") if p.is_file() and p.name != RECORD
    }


def test_one_flipped_bit_in_a_file_without_checksums(copy: Callable[[str], Path], tmp_path: Path) -> None:
    src = copy("hf")
    name = flip(src)
    text = (
        f'1 of [34] tensors do not have the digest .* first "{name}" in model.safetensors.*ignore_recorded_digests=True'
    )
    for to, how in (
        ("dcp", {"world_size": 2}),
        ("hf", {}),
        ("hf", {"dtype": "bfloat16"}),
        ("dcp", {"world_size": 1, "only": ["model"]}),
    ):
        with pytest.raises(Corrupt, match=text):
            ckpttool.convert(src, tmp_path / "out", to=to, **how)  # type: ignore[arg-type]
    with pytest.raises(Corrupt, match=text):
        export(src, str(tmp_path / "a.tar.zst"), ArchiveOptions(), in_ledger=False)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["src"]
    with pytest.raises(Differs):
        ckpttool.verify(src, read_data=True)

    done = ckpttool.convert(src, tmp_path / "out", to="dcp", world_size=1, ignore_recorded_digests=True)
    assert any("were not compared" in n for n in done.notes) and done.compared == 0
    assert json.loads((tmp_path / "out" / RECORD).read_text())["source"]["recorded_digests"] == "ignored"
    kept = export(src, str(tmp_path / "a.tar.zst"), ArchiveOptions(), in_ledger=False, ignore_recorded_digests=True)
    assert any("were not compared" in n for n in kept.result.notes)
    (src / RECORD).unlink()
    ckpttool.convert(src, tmp_path / "out2", to="dcp", world_size=1)


def test_files_of_two_ranks_in_each_others_place(copy: Callable[[str], Path], tmp_path: Path) -> None:
    """Their CRC32s are right and their sizes are equal: nothing but the digests can tell."""
    src = copy("zero2")
    (tag,) = (p for p in src.iterdir() if p.is_dir())
    a, b = (tag / f"bf16_zero_pp_rank_{r}_mp_rank_00_optim_states.pt" for r in (0, 1))
    if not a.exists():
        a, b = (tag / f"zero_pp_rank_{r}_mp_rank_00_optim_states.pt" for r in (0, 1))
    first, second = a.read_bytes(), b.read_bytes()
    a.write_bytes(second)
    b.write_bytes(first)
    with pytest.raises(Corrupt, match=r"recorded|same"):
        ckpttool.convert(src, tmp_path / "out", to="dcp", world_size=2)
    assert not (tmp_path / "out").exists()


def test_names_dtypes_and_shapes_count_before_a_byte_is_copied(copy: Callable[[str], Path], tmp_path: Path) -> None:
    src = copy("hf")
    tensors = load_file(src / "model.safetensors")
    less = {n: t for n, t in tensors.items() if n != "l.0.b"}
    other = {**tensors, "l.0.w": tensors["l.0.w"].reshape(5, 6)}
    more = {**tensors, "l.1.b": tensors["l.0.b"].clone()}
    for found, text in (
        (less, '1 of the . tensors .* first "model.l.0.b"'),
        (other, r'"model.l.0.w" is float32 \[5, 6\]'),
    ):
        save_file(found, src / "model.safetensors", {"format": "pt"})
        with pytest.raises(Corrupt, match=text):
            ckpttool.plan(src, tmp_path / "out", to="dcp", world_size=1)
        with pytest.raises(Differs):
            ckpttool.verify(src, read_data=True)
    save_file(more, src / "model.safetensors", {"format": "pt"})
    done = ckpttool.convert(src, tmp_path / "out", to="dcp", world_size=1)
    assert any('1 tensors are not listed in ckpttool.json, first "model.l.1.b"' in n for n in done.notes)
    assert done.compared == done.tensors - 1


def test_a_component_that_was_removed_is_named_with_the_way_on(copy: Callable[[str], Path], tmp_path: Path) -> None:
    src = copy("hf+")
    shutil.rmtree(src / "training_state")
    with pytest.raises(Corrupt, match=r"first \"optim.*only=\['model'\]"):
        ckpttool.convert(src, tmp_path / "out", to="dcp", world_size=1)
    assert ckpttool.convert(src, tmp_path / "out", to="dcp", world_size=1, only=["model"]).compared


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"tensors": {"a": 3}, "tied": {}}', "[" * 5000 + "]" * 5000, '{"tensors": 3}', ""]
)
def test_a_damaged_record_is_a_note(text: str, copy: Callable[[str], Path], tmp_path: Path) -> None:
    src = copy("zero3")
    (src / RECORD).write_text(text)
    done = ckpttool.convert(src, tmp_path / "out", to="dcp", world_size=2, verify=False)
    assert any("were not compared, since it is damaged" in n for n in done.notes)
    found = ckpttool.verify(src, read_data=True)
    assert found.recorded == "damaged" and "not compared" in found.notes[0]
    with pytest.warns(UserWarning, match="damaged"):
        ckpttool.storage_reader(src)


def test_a_save_of_a_later_step_in_the_same_folder_is_not_the_one_of_the_record(
    copy: Callable[[str], Path], made: Path, tmp_path: Path
) -> None:
    """A DeepSpeed job goes on from a folder that ckpttool wrote, and saves there."""
    src = copy("zero3")
    later = state()
    later["model"] = {n: t + 1 for n, t in later["model"].items()}
    torch.save(later, tmp_path / "y.pt")
    ckpttool.convert(
        tmp_path / "y.pt",
        tmp_path / "later",
        to="zero3",
        world_size=3,
        drop=True,
        options=ckpttool.ZeroOptions(write_tag="global_step9"),
    )
    shutil.copytree(tmp_path / "later" / "global_step9", src / "global_step9")
    (src / "latest").write_text("global_step9")
    done = ckpttool.convert(src, tmp_path / "out", to="dcp", world_size=1)
    assert any("describes other files than global_step9/" in n for n in done.notes) and not done.compared
    assert ckpttool.verify(src, read_data=True).recorded == "other files"


def test_a_record_of_an_older_version_says_nothing_of_files(copy: Callable[[str], Path], tmp_path: Path) -> None:
    src = copy("hf")
    edit(src, lambda r: r.pop("files"))
    assert ckpttool.convert(src, tmp_path / "a", to="dcp", world_size=1).compared
    flip(src)
    with pytest.raises(Corrupt, match="recorded"):
        ckpttool.convert(src, tmp_path / "b", to="dcp", world_size=1)


def test_one_file_alone_is_not_what_the_record_is_about(copy: Callable[[str], Path], tmp_path: Path) -> None:
    src = copy("hf")
    flip(src)
    assert ckpttool.convert(src / "model.safetensors", tmp_path / "a", to="dcp", world_size=1).compared == 0


def test_a_damaged_record_inside_a_pt_file_is_a_note(made: Path, tmp_path: Path) -> None:
    ckpttool.convert(made / "hf", tmp_path / "x.pt")
    data = (tmp_path / "x.pt").read_bytes()
    at = data.rindex(b"{", 0, data.index(b'"model.emb.weight"'))
    (tmp_path / "x.pt").write_bytes(data[:at] + b"[" + data[at + 1 :])
    done = ckpttool.convert(tmp_path / "x.pt", tmp_path / "out", to="dcp", world_size=1)
    assert any("ckpttool.json were not compared" in n for n in done.notes)


def empty() -> dict[str, Any]:
    return {"model": {n: torch.zeros_like(t) for n, t in state()["model"].items() if n != "head.weight"}}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:.* rounded to the dtype")
def test_a_job_that_loads_compares_what_it_reads(copy: Callable[[str], Path]) -> None:
    for layout in ("dcp", "hf"):
        src = copy(layout)
        live = empty()
        reader = ckpttool.storage_reader(src)
        dcp.load(live, storage_reader=reader, no_dist=True)
        assert torch.equal(live["model"]["l.0.w"], state()["model"]["l.0.w"]) and reader.bytes_checked == 0
        half = {"model": {n: t.bfloat16() for n, t in live["model"].items()}}
        reader = ckpttool.storage_reader(src)
        dcp.load(half, storage_reader=reader, no_dist=True)
        assert reader.bytes_checked == sum(t.nbytes for t in live["model"].values())  # of another dtype: read once more
        flip(src)
        for target in (live, half):
            with pytest.raises(BaseException, match=r'"model\.l\.0\.w" in') as failed:
                dcp.load(target, storage_reader=ckpttool.storage_reader(src), no_dist=True)
            assert any(isinstance(e, Corrupt) for e, _ in failed.value.failures.values())  # type: ignore[attr-defined]
        dcp.load(live, storage_reader=ckpttool.storage_reader(src, ignore_recorded_digests=True), no_dist=True)


def test_load_compares_what_it_reads(copy: Callable[[str], Path]) -> None:
    src = copy("hf")
    model = torch.nn.ModuleDict({"emb": torch.nn.Embedding(131, 8), "head": torch.nn.Linear(8, 131, bias=False)})
    model["l"] = torch.nn.ModuleList([torch.nn.ParameterDict({"w": torch.zeros(6, 5), "b": torch.zeros(6)})])
    model["head"].weight = model["emb"].weight
    ckpttool.load(model, None, src)
    flip(src)
    with pytest.raises(Corrupt, match=r'"model\.l\.0\.w" in model\.safetensors'):
        ckpttool.load(model, None, src)
    ckpttool.load(model, None, src, ignore_recorded_digests=True)


def test_the_ranks_share_out_what_none_of_them_reads_whole(copy: Callable[[str], Path]) -> None:
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

    reader = ckpttool.storage_reader(copy("dcp"))
    shapes = {n: t.shape for n, t in reader.opened.ckpt.tensors.items()}

    def item(name: str, start: int, n: int) -> ReadItem:
        shape = shapes[name]
        box = torch.Size([n, *shape[1:]]), torch.Size([start, *[0] * (len(shape) - 1)])
        at = MetadataIndex(name, box[1])
        return ReadItem(LoadItemType.TENSOR, at, box[1], at, box[1], box[0])

    world, plans = 3, []
    for r in range(world):
        items = [item(n, r * (s[0] // world), s[0] // world) for n, s in shapes.items() if s]
        whole = [item("model.l.0.b", 0, 6)] if r == 2 else []
        plans.append(LoadPlan([*items, *whole]))
    shares = [p.storage_data.names for p in reader.prepare_global_plan(plans)]
    every = [n for share in shares for n in share]
    assert sorted(every) == sorted(n for n, s in shapes.items() if s) and "model.l.0.b" in shares[2]
    for share in shares:
        reader.opened.check_recorded(share)
    assert reader.bytes_checked == sum(reader.opened.ckpt.tensors[n].nbytes for n in every)


@pytest.mark.parametrize("name", ["a.pt", "a.tar.zst"])
def test_components_of_a_file_that_carries_its_own_digests_can_be_used_alone(name: str, tmp_path: Path) -> None:
    torch.save(state(), tmp_path / "source.pt")
    ckpttool.convert(tmp_path / "source.pt", tmp_path / name)
    done = ckpttool.convert(tmp_path / name, tmp_path / "model.pt", only=["model"])
    assert done.compared == done.tensors == 4
    assert ckpttool.verify(tmp_path / name, read_data=True, only=["optim"]).recorded == "equal"
