"""docs/reference/formats.md: every layout that is written has a section, whose tree of files is what a conversion writes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from peers import FIXTURES, REPOSITORY

import ckpttool
from ckpttool.layouts import layouts

PAGE = (REPOSITORY / "docs" / "reference" / "formats.md").read_text(encoding="utf-8")
#: {layout: its section}; one heading may name several layouts.
SECTIONS = {name: text for text in PAGE.split("\n## ")[1:] for name in text.partition("\n")[0].split(", ")}
KINDS = ("sharded", "full", "ddp")


def names_of(layout: str, kind: str = "") -> Iterator[tuple[str, bool]]:
    """(pattern of a path below DIR, whether it is always there) of the tree in a section, for one state dict type."""
    tree = re.search(r"^```\n(.*?)^```$", SECTIONS[layout], re.MULTILINE | re.DOTALL)
    assert tree
    for line in tree[1].splitlines():
        names, _, said = line.partition("  ")
        only = said.strip().partition(":")[0]
        if only in KINDS and only != kind:
            continue
        folder = ""
        for i, name in enumerate(re.split(r", | \.\.\. ", names)):
            name, _, of = name.partition(" (")
            if i == 0:
                assert name.startswith("DIR/"), line
                folder = name.rstrip("/").rpartition("/")[0] + "/"
            path = (name if i == 0 else folder + name).removeprefix("DIR/")
            if not of or of == f"{layout})":
                yield as_pattern(path), not re.search(r"\bif ", said)


def as_pattern(path: str) -> str:
    """`<...>` is one part of a name, `[...]` may be absent, and all that lies in a folder is meant by its name."""
    parts = re.split(r"(<[^>]*>|\[|\])", path)
    special = {"[": "(?:", "]": ")?"}
    pattern = "".join(special.get(p) or ("[^/]+" if p[:1] == "<" else re.escape(p)) for p in parts)
    return pattern + ".+" if path.endswith("/") else pattern


def test_every_layout_that_is_written_has_a_section() -> None:
    assert [name for name, layout in layouts().items() if layout.write and name not in SECTIONS] == []


@pytest.mark.parametrize(
    ("source", "to", "world", "kind"),
    [
        ("fsdp2_w2_groups/ckpt", "dcp", 3, ""),
        ("fsdp1_w2_tied/ckpt", "fsdp1", 3, ""),
        ("checkpointing/fsdp/ckpt", "torch_checkpointing", 2, ""),
        *(("trainers/jobs/trainer", to, 2, kind) for to in ("accelerate", "trainer") for kind in KINDS),
        ("trainers/jobs/accelerate", "trainer", 1, "full"),
        ("trainers/jobs/trainer", "lightning", 3, ""),
        ("trainers/jobs/torchtitan", "torchtitan", 3, ""),
        *(("trainers/jobs/trainer", "llamafactory", 2, kind) for kind in ("sharded", "ddp")),
        ("trainers/jobs/accelerate", "verl", 2, ""),
        ("trainers/jobs/accelerate", "xtuner", 2, ""),
        ("maps/tune-llama3/epoch_0", "torchtune", None, ""),
        ("megatron/buckets_tp2/ckpt/iter_0000003", "megatron", 2, ""),
    ],
)
def test_the_tree_in_a_section_is_what_a_conversion_writes(
    source: str, to: str, world: int | None, kind: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    options = ckpttool.DirectoryOptions(state_dict_type=kind) if kind else None
    layout = FIXTURES / source / ".." / "flat_layout.json" if to == "fsdp1" else None
    ckpttool.convert(FIXTURES / source, out, to=to, world_size=world, options=options, flat_layout=layout)
    written = sorted(str(p.relative_to(out)) for p in out.rglob("*") if p.is_file())
    said = list(names_of(to, kind))
    assert [name for name in written if not any(re.fullmatch(p, name) for p, _ in said)] == []
    assert [p for p, always in said if always and not any(re.fullmatch(p, name) for name in written)] == []
