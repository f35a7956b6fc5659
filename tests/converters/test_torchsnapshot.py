"""Snapshots of torchsnapshot: one that release 0.1.0 wrote (fixtures/trainers/torchsnapshot_w1), and manifests of several ranks in its form."""

from __future__ import annotations

import base64
import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from peers import FIXTURES, difference, load_dcp, load_full, tensors_of
from safetensors.torch import load_file

import ckpttool
from ckpttool.errors import CkpttoolError, Corrupt, Unsafe, Unsupported

CASE = FIXTURES / "trainers" / "torchsnapshot_w1"
SNAP = CASE / "ckpt" / "snap"
ROWS = torch.arange(24, dtype=torch.float32).reshape(6, 4)


def test_a_real_snapshot_bit_for_bit(tmp_path: Path) -> None:
    for to, load in (("dcp", load_dcp), ("full", load_full)):
        done = ckpttool.convert(SNAP, tmp_path / to, to=to, world_size=3 if to == "dcp" else None)
        assert done.verified and not done.dropped
        tree = load(tmp_path / to)
        found = {k: t for k, t in tensors_of(tree).items() if k.startswith(("model.", "optim."))}
        assert difference(found, load_file(CASE / "truth.safetensors")) == []
        assert [len(g["params"]) for g in tree["optim"]["param_groups"]] == [16, 5]
        assert tree["optim"]["param_groups"][0]["betas"] == (0.9, 0.999)
        assert tree["optim"]["param_groups"][0]["foreach"] is None and tree["optim"]["param_groups"][1]["lr"] == 0.002
        assert tree["progress"] == {"step": 3}
    with ckpttool.open(SNAP) as opened:
        ckpt = opened.checkpoint
        assert (ckpt.layout, ckpt.world_size, ckpt.unread) == ("torchsnapshot", 1, [])


# ------------------------------------------------------------------------------------------------- several ranks


class Snapshot:
    """A manifest under construction, and the files that it names."""

    def __init__(self, root: Path, world: int) -> None:
        self.root, self.world, self.manifest = root, world, {}  # type: ignore[var-annotated]
        root.mkdir()

    def tensor(self, t: torch.Tensor, name: str, *, replicated: bool = False, batched: bool = False) -> dict[str, Any]:
        """An entry, and its bytes: in a file of its own, or after the others in one."""
        file = self.root / ("batched/one" if batched else name)
        file.parent.mkdir(parents=True, exist_ok=True)
        before = file.stat().st_size if file.exists() else 0
        with open(file, "ab") as f:
            f.write(t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return {
            "type": "Tensor", "location": str(file.relative_to(self.root)), "serializer": "buffer_protocol", "dtype": str(t.dtype),
            "shape": list(t.shape), "replicated": replicated, "byte_range": [before, file.stat().st_size] if batched else None,
        }  # fmt: skip

    def shard(self, t: torch.Tensor, name: str, at: tuple[int, ...]) -> dict[str, Any]:
        return {"offsets": list(at), "sizes": list(t.shape), "tensor": self.tensor(t, name)}

    def add(self, path: str, entry: dict[str, Any]) -> None:
        self.manifest[path] = entry

    def value(self, path: str, x: Any) -> None:
        text = (
            base64.b64encode(struct.pack("<d", x) if isinstance(x, float) else x).decode()
            if isinstance(x, (float, bytes))
            else str(x)
        )
        self.add(path, {"type": type(x).__name__, "serialized_value": text, "replicated": False, "readable": None})

    def done(self) -> Path:
        whole = {"version": "0.1.0", "world_size": self.world, "manifest": self.manifest}
        (self.root / ".snapshot_metadata").write_text(json.dumps(whole, indent=2))
        return self.root


def two_ranks(path: Path) -> Snapshot:
    """A sharded weight, a chunked one, a replicated bias, RNG and counters of two ranks."""
    out = Snapshot(path, 2)
    for rank in range(2):
        at = f"{rank}/model"
        out.add(at, {"type": "OrderedDict", "keys": ["w", "a%2Fb"]})
        half = out.shard(ROWS[rank * 3 : rank * 3 + 3], f"sharded/model/w_{rank}", (rank * 3, 0))
        out.add(f"{at}/w", {"type": "ShardedTensor", "shards": [half]})
        out.add(f"{rank}/rng", {"type": "dict", "keys": ["rng_state"]})
        out.add(
            f"{rank}/rng/rng_state",
            out.tensor(torch.tensor([rank, 9], dtype=torch.uint8), f"{rank}/rng/rng_state", batched=True),
        )
        out.add(f"{rank}/progress", {"type": "dict", "keys": ["step", "seen", "names", "of", "empty", "none"]})
        out.value(f"{rank}/progress/step", 3)
        out.value(f"{rank}/progress/seen", 0.5 + rank)
        out.add(f"{rank}/progress/names", {"type": "list"})
        out.value(f"{rank}/progress/names/0", "a b")
        out.value(f"{rank}/progress/names/1", True)
        out.add(f"{rank}/progress/of", {"type": "dict", "keys": [7, "7b"]})
        out.value(f"{rank}/progress/of/7", b"\0x")
        out.value(f"{rank}/progress/of/7b", 1)
        out.add(f"{rank}/progress/empty", {"type": "dict", "keys": []})
        out.add(f"{rank}/progress/none", {"type": "list"})
    chunks = [out.shard(ROWS[:4], "replicated/model/c_0", (0, 0)), out.shard(ROWS[4:], "replicated/model/c_4", (4, 0))]
    chunked = {"type": "ChunkedTensor", "dtype": "torch.float32", "shape": [6, 4], "chunks": chunks, "replicated": True}
    out.add("0/model/a%2Fb", chunked)
    out.add("1/model/a%2Fb", chunked)
    return out


def test_ranks_are_one_state(tmp_path: Path) -> None:
    source = two_ranks(tmp_path / "snap").done()
    done = ckpttool.convert(source, tmp_path / "out", to="dcp", world_size=3)
    tree = load_dcp(tmp_path / "out")
    assert torch.equal(tree["model"]["w"], ROWS) and torch.equal(tree["model"]["a/b"], ROWS)
    for rank in ("0", "1"):
        assert tree["rng"][rank]["rng_state"].tolist() == [int(rank), 9]
    assert tree["progress"]["step"] == 3 and tree["progress"]["names"] == ["a b", True]
    assert tree["progress"]["empty"] == {} and tree["progress"]["none"] == []
    with ckpttool.open(source) as opened:
        values = {n: v.data for n, v in opened.checkpoint.values.items()}
        assert values["extra.progress.of.7"] == b"\0x" and values["extra.progress.of.7b"] == 1
        assert values["extra.progress.seen"] == 0.5 and values["extra.per_rank.1.progress.seen"] == 1.5
        assert sum("seen" in n for n in values) == 2
    assert any("ranks differ in progress.seen" in n for n in done.notes)


def test_values_that_only_a_later_rank_has_are_that_rank_s(tmp_path: Path) -> None:
    """They would lengthen the first rank's list."""
    out = two_ranks(tmp_path / "snap")
    out.value("1/progress/names/2", 5)
    out.value("1/progress/empty/seen", 6)
    out.value("0/progress/lost", 7)
    with ckpttool.open(out.done()) as opened:
        said = [n for n in opened.checkpoint.notes if "not every rank saved" in n]
        assert len(said) == 1 and "progress.lost" in said[0] and "seen" not in said[0], said
        values = {n: v.data for n, v in opened.checkpoint.values.items()}
    assert values["extra.progress.names"] == ["a b", True] and values["extra.progress.empty"] == {}
    assert values["extra.per_rank.1.progress.names.2"] == 5 and values["extra.per_rank.1.progress.empty.seen"] == 6


def test_one_rank_may_hold_what_others_do_not(tmp_path: Path) -> None:
    """Stages of a pipeline; shards that some ranks got nothing of."""
    out = two_ranks(tmp_path / "snap")
    out.add("1/model/last", out.tensor(ROWS[0], "1/model/last"))
    out.manifest["1/model/w"]["shards"].append(out.shard(ROWS[6:], "sharded/model/w_none", (6, 0)))
    with ckpttool.open(out.done()) as opened:
        assert opened["model.last"].numpy().tolist() == [0, 1, 2, 3]
        assert opened["model.w"].shape == (6, 4)


def test_tensors_of_several_ranks_may_be_parts(tmp_path: Path) -> None:
    out = two_ranks(tmp_path / "snap")
    for rank in range(2):
        out.add(f"{rank}/model/mine", out.tensor(ROWS + rank, f"{rank}/model/mine"))
        out.add(f"{rank}/model/count", out.tensor(torch.tensor(4), f"{rank}/model/count"))
    source = out.done()
    with pytest.raises(Unsupported, match=r"their own model\.mine.*replicated.*allow_equal_ranks"):
        ckpttool.open(source)
    with ckpttool.open(source, allow_equal_ranks=True) as opened:
        assert opened["model.mine"].numpy().tolist() == ROWS.tolist()
        assert opened["model.count"].numpy().tolist() == 4
        assert any("first rank" in n for n in opened.checkpoint.notes)


def test_a_tensor_that_torch_saved(tmp_path: Path) -> None:
    out = two_ranks(tmp_path / "snap")
    z = torch.tensor([1 + 2j, 3j])
    torch.save(z, out.root / "z")
    entry = {
        "type": "Tensor",
        "location": "z",
        "serializer": "torch_save",
        "dtype": "torch.complex64",
        "shape": [2],
        "replicated": True,
    }
    out.add("0/model/z", entry)
    with ckpttool.open(out.done()) as opened:
        assert opened["model.z"].numpy().tolist() == z.tolist()
    entry["shape"] = [3]
    with pytest.raises(Corrupt, match="the manifest says complex64"):
        ckpttool.open(out.done())
    entry["serializer"] = "per_tensor_affine_qtensor"
    with pytest.raises(Unsupported, match="quantized"):
        ckpttool.open(out.done())


# ----------------------------------------------------------------------------------------------------- damage


def changed(tmp_path: Path, change: Any) -> Path:
    out = two_ranks(tmp_path / "snap")
    change(out)
    return out.done()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda s: s.manifest["0/model/w"]["shards"].clear(), Corrupt, '"model.w"'),
        (lambda s: s.manifest["1/model/w"]["shards"][0].update(offsets=[2, 0]), Corrupt, '"model.w"'),
        (lambda s: s.manifest["1/model/w"]["shards"][0].update(offsets=[3]), Corrupt, "1 offsets and 2 sizes"),
        (lambda s: s.manifest["0/model/w"].update(type="Tensor"), Corrupt, "rank 0 has no shards"),
        (lambda s: s.manifest["0/rng/rng_state"].update(byte_range=[0, 99]), Corrupt, "not copied whole"),
        (lambda s: s.manifest["0/rng/rng_state"].update(byte_range=[0, 1]), Corrupt, "rng_state"),
        (lambda s: s.manifest["0/rng/rng_state"].update(byte_range=[-2, 0]), Corrupt, "not a list of sizes"),
        (lambda s: s.manifest["0/rng/rng_state"].update(location="../x"), Unsafe, "leads out"),
        (lambda s: s.manifest["0/rng/rng_state"].update(location="gone"), CkpttoolError, "gone"),
        (lambda s: s.manifest["0/rng/rng_state"].update(dtype="torch.quint8"), Unsupported, "quint8"),
        (lambda s: s.manifest["0/rng/rng_state"].update(shape=[2.5]), Corrupt, "not a list of sizes"),
        (lambda s: s.manifest["0/progress/seen"].update(serialized_value="??"), Corrupt, "of type float"),
        (lambda s: s.manifest["0/progress/step"].update(type="Fraction"), Unsupported, "Fraction"),
        (lambda s: s.manifest.pop("0/progress/names/0") and s.manifest.pop("1/progress/names/0"), Corrupt, "names are missing"),
        (lambda s: s.manifest.update({"2/model/w": {"type": "dict"}}), Corrupt, "one of 2 ranks"),
        (lambda s: s.manifest.update({"0/x": 3}), Corrupt, "has no type"),
        (lambda s: setattr(s, "world", 0), Corrupt, "world_size"),
    ],
)  # fmt: skip
def test_a_damaged_manifest_is_refused(change: Any, error: type[CkpttoolError], words: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=words):
        ckpttool.open(changed(tmp_path, change))


def test_yaml_is_refused_with_the_way_out(tmp_path: Path) -> None:
    shutil.copytree(SNAP, tmp_path / "snap")
    (tmp_path / "snap" / ".snapshot_metadata").write_text("version: 0.0.1\nworld_size: 1\nmanifest: {}\n")
    with pytest.raises(Unsupported, match=r"YAML.*0\.1\.0"):
        ckpttool.open(tmp_path / "snap")
