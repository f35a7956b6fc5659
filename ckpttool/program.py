"""`Program`: what is known of the program that writes a layout, besides how to read and write its files.

A layout (layouts.py) or a dialect (converters/trainers/dialect.py) has one, and the engine asks it:

    next_step                                   the last line of `inspect`           engine/discover/next_steps.py
    state_files, halves                         files that no layout reads           engine/discover/unread_files.py
    unfinished, gaps, is_piece, part_folders    what a folder is, and what it lacks  engine/discover/detection.py
    resumed_by                                  `convert --for`                      cli/convert.py
    tree                                        keys at the root of a tree           index/trainer_trees.py
    rows                                        rows of the tables in the documents  docs/_hooks.py

So adding a trainer adds one file. The core names none (tests/test_fences.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, NamedTuple

from .by_fields import ByFields
from .huggingface import encodings, lora
from .index.checkpoint import Checkpoint, find_unnamed_optimizer_state
from .index.trainer_trees import TrainerTree
from .printable import quote_path
from .storage.source import Source

__all__ = ["Advice", "ForTrainer", "Half", "Program", "Saves", "SeenFolder", "StateFile", "Unfinished"]


class StateFile(NamedTuple):
    """Files that trainers write.

    Args:
        pattern: of their names, of folders with "/" at the end.
        what: what they hold, in words.
        component: of a state; "adapter" is one beside the weights of a model; "" is no state: arguments, or the same
            weights in another form.
    """

    pattern: str
    what: str
    component: str


class Half(NamedTuple):
    """Folders that hold one half of a checkpoint, whose other half lies in the folder above.

    Args:
        folder: pattern of their names.
        other: the other half; all names that trainers use where None.
        belongs: whether the other half belongs to this folder, by the path and the names of the folder above, and the
            name of this one.
    """

    folder: str
    other: StateFile | None = None
    belongs: Callable[[str, Sequence[str], str], bool] = lambda above, names, name: True


class Saves(NamedTuple):
    """How a layout keeps several saves in one folder: each in a folder of its own, named by a tag.

    Args:
        engine: whose saves they are.
        pointers: files next to those folders that hold the tag of the newest save.
        folder: what only names of such folders contain.
        files: pattern of the files of a save.
    """

    engine: str
    pointers: frozenset[str]
    folder: str
    files: str


@dataclass(frozen=True, eq=False, repr=False)
class SeenFolder(ByFields):
    """A folder that is judged by the names in it.

    Args:
        source: opened at the folder.
        names: what it contains.
        name: its own name.
        layout: the name of the layout that it has; None where no layout knows it.
        is_temporary: its name is that of an unfinished save, as tmp-3.
    """

    source: Source
    names: Sequence[str]
    name: str
    layout: str | None
    is_temporary: bool

    #: What a folder lacks whose name is that of an unfinished save.
    STILL_WRITTEN: ClassVar[str] = "its name is that of an unfinished save"


class Unfinished(NamedTuple):
    """What a folder lacks of a complete save, and as which layout it is listed: as the one that was detected where
    None."""

    lacks: str
    layout: str | None = None


class ForTrainer(NamedTuple):
    """A program that resumes from a layout.

    Args:
        name: what `--for` calls it.
        called: what people call it, where that is something else.
        canonical_keys: it asks for canonical keys.
        refused: why ckpttool does not write for it, and what to do; "" where it does.
    """

    name: str
    called: str = ""
    canonical_keys: bool = False
    refused: str = ""


@dataclass(frozen=True, eq=False, repr=False)
class Advice(ByFields):
    """The index and the path of a checkpoint, from which a layout's program writes advice on the next step, with
    commands.

    Args:
        exists: tells whether the checkpoint's folder has a file of the given name.
        needs: options without which no conversion of the whole state succeeds, such as "--drop"; "" for none.
    """

    ckpt: Checkpoint
    path: str
    exists: Callable[[str], bool] = lambda name: False
    needs: str = ""

    @property
    def quoted(self) -> str:
        """Return the path, quoted for a shell."""
        return quote_path(self.path)

    def convert(self, options: str) -> str:
        """Return the command line that converts the checkpoint to OUT, with these options ("--to hf") at its end, and
        with those that it needs if the options are for a job's ranks, which read the whole state."""
        words = options.split()
        needs = f" {self.needs}" if self.needs and "-n" in words and "--only" not in words else ""
        return f"ckpttool convert {self.quoted} OUT {options}{needs}"

    @cached_property
    def components(self) -> frozenset[str]:
        """Return the components that the checkpoint has tensors of: some of "model", "optim" and the others."""
        return frozenset(str(t.path[0]) for t in self.ckpt.tensors.values())

    @property
    def has_optimizer(self) -> bool:
        """Return whether the checkpoint holds optimizer state, including state whose parameters could not be named, or
        param groups alone (as of SGD)."""
        groups = any(v.path[:2] == ("optim", "param_groups") for v in self.ckpt.values.values())
        return groups or "optim" in self.components or bool(find_unnamed_optimizer_state(self.ckpt))

    @cached_property
    def adapter(self) -> lora.AdapterShape | None:
        """Return the LoRA adapter among the weights; None where there is none."""
        return lora.find_lora(self.ckpt)

    @property
    def ranks(self) -> str:
        """Return the world size at which it was saved, as words: "8 ranks"; "the world size that wrote it" where it is
        not known."""
        world = self.ckpt.world_size
        if world is None:
            return "the world size that wrote it"
        return "1 rank" if world == 1 else f"{world} ranks"

    def export_advice(self, more: str = "") -> str:
        """Return advice with the command that exports the checkpoint as a Hugging Face model, or, if it holds an
        adapter alone, as a PEFT adapter.

        Args:
            more: further options for `--to hf`, beginning with a space.
        """
        if self.adapter is not None and self.adapter.alone:
            return f"for PEFT: {self.extract()}"
        return f"for transformers: {self.convert(f'--to hf{more}')}"

    @cached_property
    def _adapter_options(self) -> str:
        """Return the options, with a space before them, that commands about the adapter need: the name of the first one
        of several, and a placeholder for alpha if there is no adapter_config.json. "" for none."""
        from shlex import quote

        names = [n for n in self.adapter.names if n] if self.adapter is not None else []
        name = names[0] if len(names) > 1 else ""
        folders = {"" if name in ("", "default") else name, *names[:1]}
        config = any(
            self.exists("/".join(filter(None, (below, folder, "adapter_config.json"))))
            for below in ("", "model", "..")
            for folder in folders
        )
        options = [*(["--adapter-name", quote(name)] if name else []), *([] if config else ["--lora-alpha", "ALPHA"])]
        return "".join(f" {option}" for option in options)

    def extract(self) -> str:
        """Return the command line that extracts the adapter to OUT."""
        return f"ckpttool adapter extract {self.quoted} OUT{self._adapter_options}"

    def merge(self, base: str = "") -> str:
        """Return the command line that merges the adapter into the weights beside it, or into those of `base`."""
        return f"ckpttool adapter merge {base}{' ' * bool(base)}{self.quoted} OUT{self._adapter_options}"

    def extract_adapter(self) -> str:
        """Return advice with two commands: one extracts the adapter, and one merges it into the weights."""
        if encodings.find_in_checkpoint(self.ckpt, None).weights:
            return f"its adapter for PEFT: {self.extract()}; it is merged only into weights that are not quantised"
        return f"its adapter for PEFT: {self.extract()}; merged: {self.merge()}"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Program(ByFields):
    """What is known of the program that writes a layout. Patterns are regular expressions that match a whole name.

    Args:
        next_step: what resumes from a checkpoint as it is, and the command for what does not: one line.
        without_weights: what else to do with a folder that holds an optimizer and no weights.
        state_files: files that it writes next to those that the layout reads.
        halves: its folders whose other half lies in the folder above.
        part_folders: pattern of its folders that may be one part of a trainer's directory; a file in one is answered
            with that directory.
        rank_folders: pattern of its folders that are a part even where they are given themselves.
        is_piece: whether a file of a folder holds a part of a checkpoint, although a layout may take it for one.
        is_part: whether an entry of a folder, by its name and those beside it, belongs to a checkpoint and is none, so
            that no list of checkpoints has it.
        unfinished: what a folder lacks that is the beginning of a save of this layout; asked about every folder, also
            those of other layouts; None of any other folder.
        gaps: what a folder of this layout lacks, the most telling first.
        gap_beside: what a folder of this name that holds weights alone lacks, where complete saves of this layout lie
            beside it; None where nothing.
        is_export: whether a save of this layout is weights alone, from which no job resumes.
        is_stray: whether the files of a folder that is this layout, by their names, may be there by chance, so that
            checkpoints below it count first.
        step_word: what stands before the step in the names of its folders: "checkpoint"; "" for numbers alone; None
            where nothing is known.
        resumed_by: the programs that resume from the layout.
        tree: how its trees are known, where it writes those in another layout.
        saves_every_rng: each of its ranks saves its random states.
        keeps_options: its saves hold param groups with all options that the job's optimizer has.
        about_masters: a sentence on fp32 masters that do not round to the weights.
        rows: {table of the documents: its rows about this layout, each of cells in Markdown}; see docs/_hooks.py.
    """

    next_step: Callable[[Advice], str] = lambda advice: f"for transformers: {advice.convert('--to hf --config MODEL')}"
    without_weights: str = ""
    state_files: tuple[StateFile, ...] = ()
    halves: tuple[Half, ...] = ()
    part_folders: str | None = None
    rank_folders: str | None = None
    is_piece: Callable[[Source, str], bool] = lambda source, name: False
    is_part: Callable[[str, Sequence[str]], bool] = lambda name, beside: False
    unfinished: Callable[[SeenFolder], Unfinished | None] = lambda folder: None
    gaps: Callable[[SeenFolder], Iterable[str]] = lambda folder: ()
    gap_beside: Callable[[str], str | None] = lambda name: None
    is_export: Callable[[Source], bool] = lambda source: False
    is_stray: Callable[[Sequence[str]], bool] = lambda names: False
    step_word: str | None = None
    resumed_by: tuple[ForTrainer, ...] = ()
    tree: TrainerTree | None = None
    saves_every_rng: bool = False
    keeps_options: bool = True
    about_masters: str = ""
    rows: Mapping[str, tuple[tuple[str, ...], ...]] = field(default_factory=dict)
