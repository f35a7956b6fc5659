"""README.md of a repository: its model card.

A new card is YAML metadata, as huggingface_hub's ModelCardData writes it, a title, and our section. In an existing
card, everything but our section is kept byte for byte; if it has none, the section is added at the end. It is between

    <!-- ckpttool -->  ...  <!-- /ckpttool -->

and says what the weights are, where they come from, how to load them and how to check them. Texts from a checkpoint
are reduced to one line and cannot end the section, open a link or be HTML.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

__all__ = ["CardFacts", "find_base_model", "update_card"]

_BEGIN, _END = b"<!-- ckpttool -->", b"<!-- /ckpttool -->"
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
#: First parts of a path that nobody on the Hub is called by, and last parts that are steps of a run.
_FOLDERS = re.compile(
    r"models?|checkpoints?|ckpts?|data|datasets?|outputs?|out|results?|runs?|logs?|tmp|temp|home|mnt|scratch|work|workspace|"
    r"experiments?|exp|saved?|weights|pretrained|local|cache|content|root|user|opt|var",
    re.IGNORECASE,
)
#: {task_type of adapter_config.json: class that loads it}; AutoPeftModel is for none of them, and asks for
#: auto_mapping (peft/auto.py).
_PEFT_CLASSES = {
    "CAUSAL_LM": "AutoPeftModelForCausalLM",
    "SEQ_2_SEQ_LM": "AutoPeftModelForSeq2SeqLM",
    "SEQ_CLS": "AutoPeftModelForSequenceClassification",
    "TOKEN_CLS": "AutoPeftModelForTokenClassification",
    "QUESTION_ANS": "AutoPeftModelForQuestionAnswering",
    "FEATURE_EXTRACTION": "AutoPeftModelForFeatureExtraction",
}
_STEP = re.compile(r"(?:checkpoint|ckpt|step|iter|epoch|global_step)[-_]?\d+", re.IGNORECASE)


@dataclass(frozen=True)
class CardFacts:
    """The content of the section. `dtypes` {dtype: parameters}; `digest` {component: root}; `training` whether all
    state is there; `changed` whether tensors have other dtypes or names than in the checkpoint; `config` and `adapter`
    the config.json and adapter_config.json of the push, {} if there are none."""

    repo_id: str
    version: str
    layout: str
    world_size: int | None
    trainer: str | None
    step: int | None
    dtypes: dict[str, int]
    digest: dict[str, str]
    training: bool
    changed: bool = False
    config: dict[str, Any] = field(default_factory=dict)
    adapter: dict[str, object] = field(default_factory=dict)
    branch: str | None = None  # where that is not main

    @property
    def url(self) -> str:
        """Return the URL of the repository for commands, with the branch, if that is not main."""
        return f"hf://{self.repo_id}" + (f"@{self.branch}" if self.branch else "")


def find_base_model(facts: CardFacts) -> str | None:
    """Return the Hub id of the base model that adapter_config.json or config.json names; None if there is none, or
    if it may be a local path."""
    import os

    for found in (facts.adapter.get("base_model_name_or_path"), facts.config.get("_name_or_path")):
        if isinstance(found, str) and _ID.fullmatch(found) and found != facts.repo_id and not os.path.exists(found):
            first, last = found.split("/")
            if not _FOLDERS.fullmatch(first) and not _STEP.fullmatch(last):
                return found
    return None


def update_card(existing: bytes | None, facts: CardFacts) -> bytes:
    """Return README.md with ckpttool's section for these facts; everything outside of the section is kept.

    Args:
        existing: the present README.md; None to make a new one.
        facts: the content of the section.
    """
    section = _make_section(facts).encode()
    if existing is None:
        return _make_card_head(facts).encode() + section + b"\n"
    begin = existing.rfind(_BEGIN, 0, max(0, existing.rfind(_END)))  # the last one that is ended
    if begin >= 0:
        end = existing.find(_END, begin)
        return existing[:begin] + section + existing[end + len(_END) :]
    gap = b"" if not existing else b"\n" if existing.endswith(b"\n") else b"\n\n"
    return existing + gap + section + b"\n"


def _make_card_head(facts: CardFacts) -> str:
    """Return the beginning of a new README.md, before ckpttool's section: YAML metadata and a title."""
    from huggingface_hub import ModelCardData

    peft, known = bool(facts.adapter), "model_type" in facts.config
    data = ModelCardData(
        library_name="peft" if peft else "transformers" if known else None,
        tags=["ckpttool", *(["lora"] if facts.adapter.get("peft_type") == "LORA" else [])],
        base_model=find_base_model(facts),
    )
    return f"---\n{data.to_yaml()}\n---\n\n# {facts.repo_id.split('/')[1]}\n\n"


def _make_section(facts: CardFacts) -> str:
    """Return ckpttool's section of README.md, in Markdown."""
    total = sum(facts.dtypes.values())
    most = sorted(facts.dtypes, key=lambda d: -facts.dtypes[d])
    dtypes = ", ".join(d if len(most) == 1 else f"{d} ({facts.dtypes[d]:,})" for d in most)
    by = f", of {_escape_for_table(facts.trainer)}" if facts.trainer else ""
    ranks = f" of {facts.world_size} ranks" if facts.world_size else ""
    rows = [("parameters", f"{total:,}"), ("dtype", dtypes)]
    if facts.step is not None:
        rows.append(("training step", f"{facts.step:,}"))
    rows.append(("made from", f"a checkpoint in the layout {_escape_for_table(facts.layout)}{ranks}{by}"))
    rows += [(f"digest of {_escape_for_table(k)}", f"`blake3:{v}`") for k, v in facts.digest.items() if k != "all"]
    if len(facts.digest) > 2:
        rows.append(("digest of all", f"`blake3:{facts.digest['all']}`"))
    rows.append(("written by", f"ckpttool {facts.version}"))
    state = "the whole training state" if facts.training else "the weights (no optimizer state is here)"
    return "\n".join(
        [
            _BEGIN.decode(),
            "## Checkpoint",
            "",
            "| | |",
            "|---|---|",
            *(f"| {k} | {v} |" for k, v in rows),
            "",
            "To load it:",
            "",
            "```python",
            *_make_load_instructions(facts),
            "```",
            "",
            *_make_check_instructions(facts),
            "",
            f"To get {state} as a checkpoint of `torch.distributed.checkpoint` for 8 ranks:",
            "",
            "```",
            f"ckpttool pull {facts.url} CHECKPOINT --to dcp --world-size 8",
            "```",
            _END.decode(),
        ]
    )


def _make_check_instructions(facts: CardFacts) -> list[str]:
    """Return the lines of Markdown that say how to check the weights."""
    if facts.changed:
        lines, option = ["To check every tensor against the digests in `ckpttool.json`:"], "--read-data"
    else:
        lines = [
            "To check it, tensor by tensor, against the checkpoint that it was made from, wherever that is and "
            "whatever its layout",
            "(`ckpttool.json` holds the digest of each tensor):",
        ]
        option = "--against CHECKPOINT"
    return [*lines, "", "```", f"ckpttool verify {facts.url} {option}", "```"]


def _make_load_instructions(facts: CardFacts) -> list[str]:
    """Return the lines of Python that load the weights."""
    where = f'"{facts.repo_id}"' + (f', revision="{facts.branch}"' if facts.branch else "")
    if facts.adapter:
        task, mapping = facts.adapter.get("task_type"), facts.adapter.get("auto_mapping")
        name = _PEFT_CLASSES.get(str(task)) if task is not None else "AutoPeftModel" if mapping is not None else None
        if name is not None:
            return [f"from peft import {name}", "", f"model = {name}.from_pretrained({where})"]
        base = find_base_model(facts) or "BASE"
        return [
            "from peft import PeftModel",
            "from transformers import AutoModelForCausalLM",
            "",
            f'base = AutoModelForCausalLM.from_pretrained("{base}")  # or the class that the adapter was trained with',
            f"model = PeftModel.from_pretrained(base, {where})",
        ]
    names = facts.config.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else "AutoModel"
    if name.endswith("ForCausalLM"):
        name = "AutoModelForCausalLM"
    if "model_type" in facts.config and name.isidentifier() and name.isascii():
        return [f"from transformers import {name}", "", f'model = {name}.from_pretrained({where}, dtype="auto")']
    return [
        "from pathlib import Path",
        "",
        "from huggingface_hub import snapshot_download",
        "from safetensors.torch import load_file",
        "",
        f'files = Path(snapshot_download({where})).glob("*.safetensors")',
        "tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}",
    ]


def _escape_for_table(text: str) -> str:
    """Return a text from a checkpoint for one cell of a table: at most 80 characters, with underscores for what
    Markdown or HTML could interpret."""
    return re.sub(r"[^\w .,:+/-]", "_", text, flags=re.ASCII)[:80]
