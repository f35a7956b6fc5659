"""`ckpttool inspect`: parse, call, draw."""

from __future__ import annotations

import os
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import NotRecognised, Unsupported, UsageError, argument
from ..options import OpenOptions, SizeRequest
from ..printable import count_noun
from .completion import complete_entry_name
from .help import READING, about
from .shared_options import NameMap, Workers, add_shared_options, pick_keywords
from .terminal import (
    Json,
    Latest,
    Meter,
    Src,
    draw,
    find_newest,
    note,
    print_json,
    say,
)

if TYPE_CHECKING:
    from ..engine.discover.detection import Checkpoints
    from ..engine.inspect import Summary
    from ..index.checkpoint import Checkpoint

__all__ = ["inspect"]


@about(
    ("Layout, step, ranks, components, optimizer", "ckpttool inspect run/ckpt"),
    ("The checkpoints of a run, by step", "ckpttool inspect run"),
    ("The newest complete one of them", "ckpttool inspect run --latest"),
    ("All names", "ckpttool inspect step3.pt --tree"),
    ("A row for all layers", "ckpttool inspect step3.pt --fold"),
    ("A page for a ticket", "ckpttool inspect run/ckpt --html ckpt.html --stats"),
    ("File and byte range of every chunk", "ckpttool inspect run/ckpt --tensor '*.mlp.down_proj.weight'"),
    ("Does training fit on 8 devices, and how sharded?", "ckpttool inspect run/ckpt --fits 8x80GB"),
    exits=READING,
)
@add_shared_options("allow_equal_ranks", "allow_mixed_steps")
def inspect(
    path: Src,
    reading: OpenOptions,
    sizes: SizeRequest,
    show_tree: Annotated[bool, typer.Option("--tree", help="Print all names as a tree.")] = False,
    tensor: Annotated[
        str | None,
        typer.Option(
            "--tensor",
            help="Print file and byte range of every chunk of the tensors that match.",
            metavar="GLOB",
            autocompletion=complete_entry_name,
        ),
    ] = None,
    fold: Annotated[
        bool, typer.Option("--fold", help="List all tensors; those whose names differ only in numbers are one row.")
    ] = False,
    html: Annotated[
        str | None,
        typer.Option("--html", help="Write a page for a browser, in one file.", metavar="FILE"),
    ] = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="With --html: norms and histograms of all tensors; reads every byte.")
    ] = False,
    against: Annotated[
        str | None,
        typer.Option("--against", help="With --html: another checkpoint to compare; reads both.", metavar="PATH"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the FILE of --html.")] = False,
    name_map: NameMap = None,
    latest: Latest = False,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Show what a checkpoint contains, what it lacks, and what loads it; reads headers only."""
    from ..engine import inspect as look
    from ..engine.discover.detection import Checkpoints
    from ..engine.opening import open_checkpoint

    path = find_newest(path, latest, as_json)
    if html is not None:
        for source in (path, against or path):
            look.check_page_file(html, source, force)
    given = {"stats": stats, "against": against, "force": force, "workers": workers}
    if html is None and (unused := [name for name, value in given.items() if value]):
        said = f"{argument(unused[0], True)} is about the page. Give {argument('html')} FILE, too."
        raise UsageError(said, code="CKPT0204")
    try:
        options = replace(reading, allow_equal_ranks=True, allow_mixed_steps=True)
        # a map looks at the config, whatever the layout
        found = open_checkpoint(
            path, options, check_hints=name_map is None, needed=lambda component: name_map is not None, prove_later=True
        )
    except (NotRecognised, Unsupported) as e:
        from .results import print_delta

        drawn = show_tree or fold or tensor is not None or html is not None
        if not (drawn or name_map or sizes.fits) and print_delta(path, as_json):
            return
        if not isinstance(e, NotRecognised) or not isinstance(e.below, Checkpoints) or drawn:
            raise
        if as_json:
            print_json(e.below.to_json())
            return
        for line in _describe_checkpoints_below(e.below):
            say(line)
        return
    with found as opened:
        if name_map is not None or tensor is not None or stats or against is not None:
            from ..engine.copy.tensor_digests import reporting

            with Meter(as_json) as meter, reporting(meter):
                opened.locate()
        if name_map is not None:
            from ..engine.map_choice import rename_opened

            opened = rename_opened(opened, name_map, reading.config)
        s = look.summarise(opened, path, sizes)
        if html is not None:
            _write_html_page(s, html, path, options, stats, against, name_map, workers, force, as_json)
        if tensor is not None:
            _print_chunks(opened.checkpoint, tensor, as_json)
            return
        rows = look.fold_tensors(opened.checkpoint) if fold else []
        if as_json:
            listed = {n: [t.dtype, list(t.shape)] for n, t in opened.checkpoint.tensors.items()} if show_tree else None
            more = {"names": listed, "folded": rows if fold else None}
            print_json({**s.to_json(), **{k: v for k, v in more.items() if v is not None}})
            return
        trees = [look.draw_tree(opened.checkpoint)] if show_tree else []
        draw(look.draw_summary(s), *trees, *([look.draw_folded(rows)] if fold else []))


def _write_html_page(
    summary: Summary,
    file: str,
    path: str,
    reading: OpenOptions,
    counted: bool,
    against: str | None,
    name_map: str | None,
    workers: str | None,
    force: bool,
    as_json: bool,
) -> None:
    """Write the HTML page of a checkpoint, and say on stderr where it is.

    Args:
        summary: the summary of the checkpoint.
        file: where to write the page.
        path: path or URL of the checkpoint.
        reading: how to read it.
        counted: whether the page has statistics of all tensors.
        against: another checkpoint, whose differences the page lists; None: no comparison.
        name_map: name map that renames the tensors; None: none.
        workers: which processes read, as in `ckpttool.convert`; None: this one.
        force: whether to replace an existing file.
        as_json: print nothing on stderr.

    Raises:
        UsageError: `counted` and `name_map` are both given.
    """
    from ..engine.diff import diff
    from ..engine.stats import stats

    if name_map is not None and counted:
        said = f"{argument('stats', True)} reads names as they were saved; leave out {argument('map')}."
        raise UsageError(said, code="CKPT0204")
    with Meter(as_json) as meter:
        statistics, compared = None, None
        if counted:
            statistics = stats(path, exponents=True, workers=workers, progress=meter, **pick_keywords(stats, reading))
        if against is not None:
            how = pick_keywords(diff, reading)
            compared = diff(path, against, map=name_map, workers=workers, progress=meter, **how)
        summary.save_html(file, statistics, compared, force=force)
    note(f"{file}: {os.path.getsize(file):,} bytes", as_json)


def _print_chunks(ckpt: Checkpoint, pattern: str, as_json: bool) -> None:
    """Print in which file, and at which bytes of it, the chunks of tensors are.

    Args:
        pattern: glob for the names of the tensors.
        as_json: print JSON.

    Raises:
        UsageError: no name matches.
    """
    import fnmatch

    from ..engine.inspect import describe_chunks, human
    from ..index.selection import explain_no_match

    names = [n for n in ckpt.tensors if fnmatch.fnmatchcase(n, pattern)]
    if not names:
        raise UsageError(
            f"{argument('tensor')} {pattern!r}: {explain_no_match(pattern, ckpt.tensors, 'tensor')}", code="CKPT0207"
        )
    rows = describe_chunks(ckpt, names)
    if as_json:
        print_json(rows)
        return
    for r in rows:
        several = f"{r['numbers']:,} numbers, " if r["numbers"] != prod(r["shape"]) else ""
        say(f"{r['name']}  {r['dtype']} {r['shape']}  {several}{human(r['bytes'])}, {r['chunks']} chunks")
        for c in r["where"]:
            spans = ", ".join(f"{a}:{a + n}" for a, n in zip(c["start"], c["shape"], strict=True))
            say(f"    [{spans}]  {c['file']} bytes {c['offset']}..{c['offset'] + c['length']}")


def _describe_checkpoints_below(found: Checkpoints) -> list[str]:
    """Return lines of text that list the checkpoints below a folder, and suggest the next command."""
    answer = found.newest
    lines = [f"{found.path}: {count_noun(len(found.checkpoints), 'checkpoint')} below it", *str(found).split("\n")]
    if len(answer) == 1:
        lines.append(f"next: give the path of one, or --latest for {answer[0].path}")
    else:
        lines.append("next: give the path of one")
    return lines
