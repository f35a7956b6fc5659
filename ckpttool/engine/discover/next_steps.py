"""What to do next with a checkpoint: the last line of `inspect`.

The layout says it (`Program.next_step`). A claim that a trainer resumes at any world size stands there only where that
was run and gave the losses of a job that was never stopped (docs/how-to/trainers.md has the table); of anything else
the line names the command that makes it so.
"""

from __future__ import annotations

from collections.abc import Callable

from ... import layouts
from ...index.checkpoint import Checkpoint, DivergedNote, MixupNote, find_unnamed_optimizer_state
from ...index.names import KEEPS_NUMBERS, describe_weights_elsewhere
from ...program import Advice
from .unread_files import list_lost_state

__all__ = ["next_step"]


def next_step(ckpt: Checkpoint, path: str, exists: Callable[[str], bool], has_wrong_masters: bool = False) -> str:
    """Return one line of advice: whether the checkpoint's trainer can resume from it as it is, and which command to use
    for what the trainer cannot do.

    Args:
        ckpt: the checkpoint.
        path: path or URL of the checkpoint, for the commands in the line.
        exists: tells whether the checkpoint's folder has a file of the given name.
        has_wrong_masters: whether some fp32 masters do not round to their weights.
    """
    layout, program = layouts.find_by_checkpoint_layout(ckpt.layout), layouts.get_program_of(ckpt.layout)
    advice = Advice(ckpt, path, exists, _list_needed_options(ckpt, layout))
    if any(isinstance(note, MixupNote) for note in ckpt.notes):
        return (
            "no job should resume from it, since a rank's file is in another's place: fetch that file again; ckpttool "
            f"doctor {advice.quoted}"
        )
    if any(isinstance(note, DivergedNote) for note in ckpt.notes):
        return (
            "no conversion takes it as it is, since ranks have other numbers under the names of the same tensors: "
            f"ckpttool doctor {advice.quoted}"
        )
    if any(note.startswith("salvaged: ") for note in ckpt.notes):
        return (
            "what was left of a damaged checkpoint: a job resumes from it only if it needs nothing that is missing or "
            f"rebuilt; ckpttool verify {advice.quoted} names both"
        )
    if "model" not in advice.components:
        if instead := describe_weights_elsewhere(ckpt):
            return f"holds no model that ckpttool knows.{instead}"
        both = program.without_weights if "optim" in advice.components else ""
        return f"holds no weights: give the directory of the trainer that they are in, if there is one{both}"
    of_trainer = layout is not None and layout.of_trainer
    if not of_trainer and advice.adapter is not None and advice.adapter.alone:
        into = f"merged into its base model: {advice.merge('BASE')}"
        if any(f.endswith("adapter_model.safetensors") for f in ckpt.files):
            needs = "loads it" if exists("adapter_config.json") else "needs an adapter_config.json beside it"
            return f"PeftModel.from_pretrained {needs}; {into}"
        return f"for PEFT: {advice.extract()}; {into}"
    text = program.next_step(advice)
    if "resumes" in text and not advice.has_optimizer:
        return (
            "weights without an optimizer: a job that begins with a new one loads them, and one that resumes asks for "
            f"its state; {advice.export_advice()}"
        )
    if "resumes" in text and has_wrong_masters:  # a job would, with the wrong numbers
        return f"take another copy; of the weights alone: {advice.convert('--only model --to dcp -n RANKS')}"
    return text


def _list_needed_options(ckpt: Checkpoint, layout: layouts.Layout | None) -> str:
    """Return the options without which no conversion of the whole checkpoint succeeds, for `Advice.needs`.

    State that nobody looked into is dropped. For parameters that have only numbers, it is where their names are: a
    file with the layout of flat parameters, or another checkpoint.
    """
    out = []
    if any(n.startswith(KEEPS_NUMBERS) for n in ckpt.notes):
        flat = layout is not None and "flat_layout" in layout.reader_uses
        flat = flat and all(len(ckpt.tensors[n].shape) < 2 for n in find_unnamed_optimizer_state(ckpt))
        out += ["--flat-layout", "FILE"] if flat else ["--like", "NAMED_CHECKPOINT"]
    lost = list_lost_state(ckpt, (), None)
    if lost and all(r.component == "extra" for r in lost):
        out.append("--drop")
    elif lost and not any(t.path[0] == "optim" for t in ckpt.tensors.values()):
        out += ["--only", "model"]
    return " ".join(out)
