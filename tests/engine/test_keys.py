"""`keys`: the keys under which a job looks for the components of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from commands import ckpttool_here
from peers import FIXTURES

import ckpttool
from ckpttool.errors import UsageError

ZERO = FIXTURES / "zero3_w4" / "ckpt"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("keys", "flat"),
    [
        ({"optim": "optimizer", "scheduler": "sched"}, ("model.", "optimizer.state.", "sched.")),
        ({"model": "app.model", "optim": "app.optim"}, ("app.model.", "app.optim.state.")),
    ],
)
def test_a_loop_loads_deepspeed_s_state_under_its_own_keys(
    keys: dict[str, str], flat: tuple[str, ...], tmp_path: Path
) -> None:
    words = [word for name, key in keys.items() for word in ("--keys", f"{name}={key}")]
    done = ckpttool_here("convert", ZERO, tmp_path / "out", "--to", "dcp", "-n", "2", *words)
    assert done.returncode == 0 and "keep the keys" not in done.stderr
    names = dcp.FileSystemReader(str(tmp_path / "out")).read_metadata().state_dict_metadata
    assert all(any(n.startswith(prefix) for n in names) for prefix in flat)
    assert not any(n.startswith("optim.") for n in names)
    assert ckpttool.diff(ZERO, tmp_path / "out").equal
    name = next(n for n in names if n.startswith(flat[1]) and n.endswith("exp_avg"))
    with ckpttool.open(ZERO) as opened:
        wanted = opened[name.replace(flat[1], "optim.state.")].torch()
    tree: dict[str, Any] = {name: torch.zeros_like(wanted)}
    dcp.load(tree, checkpoint_id=tmp_path / "out", no_dist=True)
    assert torch.equal(tree[name], wanted)


def test_keys_of_one_file_replace_those_of_the_source(tmp_path: Path) -> None:
    torch.save({"net": {"conv.weight": torch.ones(3)}, "epoch": 2}, tmp_path / "in.pt")
    result = ckpttool.convert(tmp_path / "in.pt", tmp_path / "out.pt", keys={"model": "state_dict"})
    assert not any("keys of the source" in n for n in result.notes)
    assert list(torch.load(tmp_path / "out.pt", weights_only=True)) == ["state_dict", "epoch"]


@pytest.mark.parametrize(
    ("keys", "to", "kind", "words"),
    [
        ({"optm": "x"}, "dcp", UsageError, r"keys=\['optm'\]: the checkpoint holds "),
        ({"model": "x", "optim": "x"}, "dcp", UsageError, "keys x, x: each component needs a key of its own"),
        ({"model": "x.", "optim": "y"}, "dcp", UsageError, "each component needs a key"),
        ({"model": "optim", "optim": "model"}, "dcp", UsageError, "could not be read again"),
        ({"optim": "optimizer"}, "zero3", UsageError, "applies to dcp, full, .*; zero3 has keys of its own"),
    ],
)
def test_keys_that_no_reader_would_understand_are_refused(
    keys: dict[str, str], to: str, kind: type[Exception], words: str, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=words):
        ckpttool.convert(ZERO, tmp_path / "out", to=to, world_size=2, keys=keys)
    assert not list(tmp_path.iterdir())
