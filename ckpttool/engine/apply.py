"""apply: run the conversion that a plan file describes, exactly, or say what has changed since."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Unpack

from ..errors import name_flags
from ..options import ApplyKeywords, OpenOptions, WriteRequest, list_keywords, split_keywords
from ..storage.source import closed_on_error
from .conversion import ConvertResult, run_conversion
from .opening import CheckpointPath
from .plan_files import describe_plan, parse_plan, read_plan, refuse_outdated_plan
from .planning import Plan, plan_conversion

__all__ = ["apply"]


@list_keywords
def apply(path: str | os.PathLike[str], **keywords: Unpack[ApplyKeywords]) -> ConvertResult:
    """Run the conversion that a plan file describes, after checking that it would still do exactly what the file says.

    The conversion is planned again and compared with the file before the first byte is written.

    Args:
        path: the file that `Plan.save`, or `ckpttool convert --dry-run --plan`, wrote.
        max_memory_bytes, threads, workers, progress: as `convert`.

    Raises:
        SourceChanged: the source is not the one that was planned; the text lists files, tensors and values.
        Differs: another version of ckpttool runs, or what would be written differs for other reasons, which it lists.
        DestinationExists: something is at the destination.
        UsageError: the file is not a plan, or has options that this version does not know.
        CkpttoolError: whatever `convert` raises.
    """
    reviewed = read_plan(path)
    src, dst, reading, writing, said = parse_plan(reviewed)
    _, _, here = split_keywords(keywords)
    running = replace(here, force=said.force, verify=said.verify, prove_logits=said.prove_logits)

    def plan_again(src: CheckpointPath, dst: str, reading: OpenOptions, writing: WriteRequest) -> Plan:
        """Plan the conversion, and refuse one that is not the plan that was reviewed."""
        with name_flags():  # as it was when the plan was saved, since notes name options
            now = plan_conversion(src, dst, reading, writing)
        with closed_on_error([now.opened.source]):
            refuse_outdated_plan(reviewed, describe_plan(now, running))
        return now

    return run_conversion(src, dst, reading, writing, running, plan_again)
