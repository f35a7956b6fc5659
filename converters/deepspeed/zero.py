"""zero3, zero2, zero1: what DeepSpeed's engine.save_checkpoint writes at each stage of ZeRO; stage 0 is read too.

Files and what they have in common: deepspeed/module_state.py. An optimizer file is {"optimizer_state_dict": ...,
"ds_config", "ds_version"}. Stage 3, W ranks:

    partition_count W, loss_scaler, zero_stage
    fp32_flat_groups        [tensor]   one per sub-group: the master weights
    optimizer_state_dict    state {sub-group: {step, exp_avg, exp_avg_sq}}, param_groups [{lr, ..., params:
                            [sub-groups]}]

A parameter of n elements is cut into W parts of p = ceil(n / W) elements. All ranks have p; elements beyond n are
padding (uninitialised in the masters, so never compared). A rank's flat tensor consists of its parts of the parameters,
in the order of param_shapes, without gaps: a parameter has the same offset on all ranks. A sub-group takes whole
parameters of one param group until the sum of p reaches sub_group_size, so its borders change with W.

Stages 1 and 2: `single_partition_of_fp32_groups` and `base_optimizer_state` per param group. The parameters of a group
are laid one after the other in the order of param_shapes (round_robin_gradients included; param_slice_mappings has the
wrong order then and is never used), `param_alignment_paddings` elements after each, the whole is padded to a multiple
of 2 W and cut into W equal parts. The masters lack the padding at the end, the slots have it (neither do with
elastic_checkpoint, which also keeps no param_groups; the masters of BF16_Optimizer have it). Stage 0: everything in
the model file; a bf16 engine has its masters there as `fp32_groups`.

Master weights are model.<fqn>; the low-precision weights of a bf16 or fp16 engine follow from them and are not state.
The `step` of a flat tensor is that of all its parameters.

Written: as above, with `latest` last. in fp32, or in the dtype of the source's weights and slots (a flat tensor has
one; if the source mixes them, fp32). The engine casts as it loads. Padding is zeros.

Sources: deepspeed 0.19.8, runtime/zero/stage3.py (_create_fp16_sub_groups, _rigid_state_dict, load_state_dict),
runtime/zero/partition_parameters.py (_partition_param), runtime/zero/stage_1_and_2.py (state_dict,
_load_legacy_checkpoint), runtime/bf16_optimizer.py, runtime/fp16/unfused_optimizer.py, utils/zero_to_fp32.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ckpttool.layouts import Layout, Place, late
from ckpttool.program import Advice, ForTrainer, Program, StateFile

from ..options import ZeroOptions
from . import files as ds

__all__ = ["LAYOUTS"]


def _detect_stage(where: Place, stage3: bool) -> tuple[bool, str]:
    """Return (whether a place is a DeepSpeed save of the stage; the file that shows it, or what is missing).

    `stage3` is whether stage 3 is meant; otherwise stages 0 to 2 are.
    """
    source, file = where
    if file not in (None, "latest"):
        return False, "a folder, or its latest; this is another file"
    names = source.list()
    found = {"": names} if ds.is_save(names) else {}
    if not found and ("latest" in names or "latest_universal" not in names):
        found = ds.list_deepspeed_saves(source)
    pattern = ds.MODEL3 if stage3 else ds.MODEL
    for tag, inside in found.items():
        if "zero" in inside:
            continue  # universal
        has = next((n for n in inside if pattern.fullmatch(n)), None)
        if has is None and stage3 and not any(ds.MODEL.fullmatch(n) or ds.MODEL3.fullmatch(n) for n in inside):
            has = next(n for n in inside if ds.OPTIM.fullmatch(n))  # its model files are lost: refused when it is read
        if has is not None:
            return True, f"has {tag + '/' if tag else ''}{has}"
    return False, f"no <tag>/{'zero_pp_rank_0_' if stage3 else ''}mp_rank_00_model_states.pt"


def _next_step(advice: Advice) -> str:
    """Return advice for the user: DeepSpeed resumes at the same world size, and the command that converts for
    another one."""
    to = "zero1" if advice.ckpt.layout == "zero0" else advice.ckpt.layout  # no engine of stage 0 is written
    again = advice.convert(f"--to {to} -n RANKS")
    return f"resumes in DeepSpeed at {advice.ranks}; at another world size: {again}"


#: Its rows in the tables of the documents (docs/_hooks.py).
_ROWS = {
    "readme-layouts": (
        (
            "**zero3**, **zero2**, **zero1**",
            "DeepSpeed ZeRO folder",
            "fp32, bf16, fp16, CPU offload, sub-groups, hpZ, AutoTP",
            "everything",
        ),
    ),
    "readme-trainers": (
        (
            "[DeepSpeed](docs/how-to/trainers/deepspeed.md) (**zero3**)",
            "ZeRO stages 0 to 3",
            "yes",
            "yes",
            "none saved",
            "none saved",
        ),
    ),
    "layouts": (
        (
            "**zero3**",
            (
                "saves of a stage 3 engine: sub-groups, several param groups, frozen and tied parameters, "
                "persistent small parameters, hpZ, fp32, bf16, fp16 with its loss scaler, CPU offload, saves at "
                "step 0; AutoTP of DeepSpeed 0.19, joined"
            ),
            (
                "files that a stage 3 engine resumes from at any world size, and that `zero_to_fp32.py` reads; for "
                "AutoTP too"
            ),
        ),
    ),
    "for": (
        (
            "a ZeRO-3 folder with `latest`",
            "`engine.load_checkpoint(DIR)`",
        ),
    ),
    "resumed": (
        (
            "DeepSpeed ZeRO-1 to 3",
            "yes",
            "yes, any world size",
            "yes",
            "yes",
            "in the trainer's files",
            "in the trainer's files",
        ),
    ),
}


#: The same of stages 2 and 1.
_ROWS_2 = {
    "layouts": (
        (
            "**zero2**, **zero1**",
            (
                "stages 2, 1 and 0: padding, round-robin gradients, `elastic_checkpoint`, `BF16_Optimizer`, AutoTP, "
                "experts of MoE layers, AutoEP; pipelines at stage 1"
            ),
            (
                "the same for stages 2 and 1, MoE layers and AutoEP at any expert parallel size, AutoTP; pipelines at "
                "stage 1"
            ),
        ),
    ),
}
#: What every stage has.
_PROGRAM = Program(next_step=_next_step, step_word="global_step")
_PROGRAM_OF_STAGE_3 = replace(
    _PROGRAM,
    rows=_ROWS,
    is_piece=lambda source, name: re.fullmatch(ds.SAVES.files, name) is not None,
    is_part=lambda name, beside: name == "zero",
    state_files=(
        StateFile(
            r"(bf16_)?zero_pp_rank_\d+_mp_rank_\d+_?optim_states\.pt|global_step\d+/", "DeepSpeed optimizer", "optim"
        ),
    ),
    resumed_by=(ForTrainer("deepspeed"),),
)


def _make_layout(stage: int, title: str, detect: Callable[[Place], tuple[bool, str]]) -> Layout:
    """Make the layout of a ZeRO stage, 1 to 3.

    Args:
        stage: the stage.
        title: how messages name it.
        detect: returns (whether a place is such a save, why or why not).
    """
    aliases = ("deepspeed", "zero") if stage == 3 else ()
    return Layout(
        name=f"zero{stage}",
        title=title,
        detect=detect,
        read=late("ckpttool.converters.deepspeed.read_zero:read"),
        write=partial(late("ckpttool.converters.deepspeed.write_zero:write_stage"), stage=stage),
        prepare=late("ckpttool.converters.deepspeed.write_zero:prepare"),
        options=ZeroOptions,
        aliases=aliases,
        reads_as=("zero0",) if stage == 2 else (),
        needs_named_optimizer=True,
        joins_remainders=True,
        sharding=f"zero{stage}",
        saves=ds.SAVES,
        program=_PROGRAM_OF_STAGE_3 if stage == 3 else replace(_PROGRAM, rows=_ROWS_2 if stage == 2 else {}),
        reader_uses=("tag",),
        writer_uses=("like", "world_size"),
    )


LAYOUTS = (
    _make_layout(3, "DeepSpeed ZeRO-3", lambda where: _detect_stage(where, True)),
    _make_layout(2, "DeepSpeed ZeRO-2; reads stages 0, 1 and 2", lambda where: _detect_stage(where, False)),
    _make_layout(1, "DeepSpeed ZeRO-1; read as zero2", lambda where: (False, "see zero2, which reads it")),
)
