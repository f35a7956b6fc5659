"""`ckpttool resume-verify`: parse, call, draw, write reports."""

from __future__ import annotations

import gc
import os
import sys
import time
from typing import Annotated, Any

import typer

from ..errors import UsageError, kind_of_failure
from ..options import OpenOptions
from ..printable import printable
from .help import READING, about
from .shared_options import add_shared_options, pick_keywords
from .terminal import (
    Json,
    Latest,
    Quiet,
    Src,
    draw,
    find_newest,
    make_console,
    note,
    print_json,
)

__all__ = ["resume_verify"]


@about(
    (
        "Does the converted checkpoint train as the original does?",
        "ckpttool resume-verify dcp3 --against run/ckpt --config llama --world-size 3 --against-world-size 4",
    ),
    (
        "Compare with what ckpttool.Recorder wrote in the original job",
        "ckpttool resume-verify zero3 --reference reference.jsonl --config llama --data tokens.npy",
    ),
    ("Your own job, and a report", "ckpttool resume-verify dcp3 --against run/ckpt --job job.py:build --report report"),
    exits=(*READING, 10, 11, 12, 13),
    meaning={
        10: "training does not continue as before, or that could not be judged",
        11: "a gate is not met",
        12: "the checkpoint does not fit the job",
    },
)
@add_shared_options("only")
def resume_verify(
    src: Src,
    reading: OpenOptions,
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            help="The original checkpoint, in any layout: the reference.",
            metavar="PATH",
            rich_help_panel="Reference",
        ),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            "--reference", help="What ckpttool.Recorder wrote in the original job (JSONL).", rich_help_panel="Reference"
        ),
    ] = None,
    job: Annotated[
        str | None,
        typer.Option(
            "--job",
            help="Your own job: a function that builds it. That file, and the modules beside it, run as your code.",
            metavar="MODULE.PY:BUILD",
            rich_help_panel="Job",
        ),
    ] = None,
    latest: Latest = False,
    world_size: Annotated[
        int | None,
        typer.Option(
            "--world-size", "-n", min=1, help="Ranks of the job; by default one per GPU.", rich_help_panel="Job"
        ),
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            "--mesh", help="Mesh of the job.", metavar="dp_replicate=R,dp_shard=S,tp=T", rich_help_panel="Job"
        ),
    ] = None,
    against_world_size: Annotated[
        int | None,
        typer.Option(
            "--against-world-size",
            min=1,
            help="Ranks of the reference run; by default the same.",
            rich_help_panel="Reference",
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option("--steps", min=1, help="Optimizer steps to run.", rich_help_panel="Batches")
    ] = 10,
    start_step: Annotated[
        int | None,
        typer.Option(
            "--start-step", min=0, help="Step of the checkpoint, if the files do not say.", rich_help_panel="Batches"
        ),
    ] = None,
    data: Annotated[
        str,
        typer.Option(
            "--data", help="Token rows: a .npy or .jsonl file, or synthetic.", metavar="FILE", rich_help_panel="Batches"
        ),
    ] = "synthetic",
    seed: Annotated[int, typer.Option("--seed", help="Seed of synthetic data.", rich_help_panel="Batches")] = 0,
    sequence: Annotated[
        int | None, typer.Option("--seq-len", "--sequence", min=2, help="Tokens of a row.", rich_help_panel="Batches")
    ] = None,
    global_batch: Annotated[
        int | None,
        typer.Option(
            "--global-batch", min=1, help="Rows of one optimizer step, over all ranks.", rich_help_panel="Batches"
        ),
    ] = None,
    micro_batch: Annotated[
        int | None,
        typer.Option(
            "--micro-batch",
            min=1,
            help="Rows of one forward pass; the same at every world size.",
            rich_help_panel="Batches",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype", help="Compute dtype: fp32, or bf16 with gradients reduced in fp32.", rich_help_panel="Job"
        ),
    ] = None,
    device: Annotated[
        str, typer.Option("--device", help="auto, cuda (NCCL) or cpu (gloo).", rich_help_panel="Job")
    ] = "auto",
    clip: Annotated[
        float | None,
        typer.Option(
            "--max-grad-norm",
            "--clip",
            min=0,
            help="Largest gradient norm; larger ones are scaled down. 0 is no limit.",
            rich_help_panel="Job",
        ),
    ] = None,
    profile: Annotated[
        str, typer.Option("--profile", help="Strictness: strict, standard or relaxed.", rich_help_panel="Judgement")
    ] = "strict",
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate",
            help="Measure the noise of this job first, with one more run.",
            rich_help_panel="Judgement",
        ),
    ] = False,
    keep_dropout: Annotated[
        bool,
        typer.Option(
            "--keep-dropout", help="Leave dropout on; comparable only at the saved world size.", rich_help_panel="Job"
        ),
    ] = False,
    activation_checkpointing: Annotated[
        bool,
        typer.Option(
            "--activation-checkpointing", help="Recompute activations in the backward pass.", rich_help_panel="Job"
        ),
    ] = False,
    compile_: Annotated[
        bool, typer.Option("--compile", help="torch.compile every block.", rich_help_panel="Job")
    ] = False,
    cpu_offload: Annotated[
        bool,
        typer.Option("--cpu-offload", help="Parameters and optimizer state in host memory.", rich_help_panel="Job"),
    ] = False,
    module_prefix: Annotated[
        str | None,
        typer.Option(
            "--module-prefix",
            help="Prefix that the names of the checkpoint have and those of the job's model do not, such as net. of a "
            "LightningModule.",
            metavar="NAME.",
            rich_help_panel="Job",
        ),
    ] = None,
    deterministic: Annotated[
        bool | None,
        typer.Option(
            "--deterministic/--no-deterministic",
            help="Use deterministic kernels and collectives. By default as the job of --reference did; otherwise if "
            "torch has them.",
            rich_help_panel="Job",
        ),
    ] = None,
    reread: Annotated[
        bool,
        typer.Option(
            help="Read the files again and compare them with the state of the job.", rich_help_panel="Judgement"
        ),
    ] = True,
    round_trip: Annotated[
        bool, typer.Option(help="Save after the first step, load that, and continue.", rich_help_panel="Judgement")
    ] = True,
    scratch: Annotated[
        str | None,
        typer.Option(
            "--scratch",
            help="Folder that all ranks share, for the save of --round-trip.",
            metavar="DIR",
            rich_help_panel="Judgement",
        ),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout",
            min=1,
            help="Seconds without progress after which the job ends and the silent rank is named.",
            metavar="SECONDS",
            rich_help_panel="Job",
        ),
    ] = 600.0,
    min_mfu: Annotated[
        float | None, typer.Option("--min-mfu", min=0, max=1, help="Gate: minimum MFU.", rich_help_panel="Gates")
    ] = None,
    peak_tflops: Annotated[
        float | None,
        typer.Option(
            "--peak-tflops",
            min=0,
            help="Peak of one GPU for the MFU, if ckpttool does not know it.",
            rich_help_panel="Gates",
        ),
    ] = None,
    max_reserved_gib: Annotated[
        float | None,
        typer.Option(
            "--max-reserved-gib", min=0, help="Gate: maximum memory reserved on a rank.", rich_help_panel="Gates"
        ),
    ] = None,
    max_step_seconds: Annotated[
        float | None,
        typer.Option("--max-step-seconds", min=0, help="Gate: maximum median step time.", rich_help_panel="Gates"),
    ] = None,
    max_load_seconds: Annotated[
        float | None,
        typer.Option("--max-load-seconds", min=0, help="Gate: maximum load time.", rich_help_panel="Gates"),
    ] = None,
    report: Annotated[
        str | None,
        typer.Option(
            "--report",
            help="Write report.html and report.json to this folder.",
            metavar="DIR",
            rich_help_panel="Reports",
        ),
    ] = None,
    junit: Annotated[
        str | None, typer.Option("--junit", help="Write JUnit XML.", metavar="FILE", rich_help_panel="Reports")
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option("--metrics", help="Write Prometheus metrics.", metavar="FILE.prom", rich_help_panel="Reports"),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Load a checkpoint into a live FSDP2 job and check that training continues as before; exit 10 if not, 12 if it
    does not fit."""
    from ..resume.ranks.torchrun import exit_together, is_rank_of_job, lasting_job
    from ..resume.report import files as reports
    from ..resume.report.terminal import render_terminal
    from ..resume.verify import resume_verify as run

    if report is not None:
        try:
            os.makedirs(report, exist_ok=True)
        except OSError as e:
            raise kind_of_failure(e, UsageError)(f"--report {report}: {e.strerror or e}.") from None
    if metrics is not None and not os.path.isdir(os.path.dirname(os.path.abspath(metrics))):
        raise UsageError(
            f"--metrics {metrics}: this folder does not exist: {os.path.dirname(os.path.abspath(metrics))}."
        )
    for option, file in (("--junit", junit), ("--metrics", metrics)):
        if file is not None and os.path.exists(file) and not os.path.isfile(file):
            raise UsageError(f"{option} {file}: there is something that is not a regular file.")
    gc.enable()  # a training job makes cycles
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from ..engine.workers.local_worker import die_with_parent

        die_with_parent(os.getppid())  # however torchrun ends
    src = find_newest(src, latest, quiet or as_json)
    telling = _Telling(quiet)
    with lasting_job():
        try:
            found = run(
                src,
                against=against,
                reference=reference,
                job=job,
                world_size=world_size,
                mesh=mesh,
                against_world_size=against_world_size,
                steps=steps,
                start_step=start_step,
                data=data,
                seed=seed,
                sequence=sequence,
                global_batch=global_batch,
                micro_batch=micro_batch,
                dtype=dtype,
                device=device,
                clip=clip,
                profile=profile,
                calibrate=calibrate,
                keep_dropout=keep_dropout,
                activation_checkpointing=activation_checkpointing,
                compile=compile_,
                cpu_offload=cpu_offload,
                module_prefix=module_prefix,
                deterministic=deterministic,
                reread=reread,
                round_trip=round_trip,
                scratch=scratch,
                timeout=timeout,
                peak_tflops=peak_tflops,
                min_mfu=min_mfu,
                max_reserved_gib=max_reserved_gib,
                max_step_seconds=max_step_seconds,
                max_load_seconds=max_load_seconds,
                status=telling,
                **pick_keywords(run, reading),
            )
        finally:
            telling.close()
        if found is not None:  # None on other ranks than the first of a job that was started from outside
            if not as_json:
                draw(render_terminal(found))
                sys.stdout.flush()
            reports.write_reports(found, folder=report, junit_file=junit, metrics_file=metrics)
            if as_json:
                print_json(found.to_json())
        if is_rank_of_job():
            exit_together(0 if found is None else found.exit_code)
    if found is not None and found.exit_code:
        raise typer.Exit(found.exit_code)


class _Telling:
    """Progress on stderr: one changing line on a terminal, one line per step in a log."""

    def __init__(self, quiet: bool) -> None:
        self.quiet, self.began, self.status = quiet, time.monotonic(), None

    status: Any

    def __call__(self, text: str) -> None:
        if self.quiet:
            return
        if not sys.stderr.isatty():
            note(f"[{time.monotonic() - self.began:6.1f} s] {text}")
            return
        if self.status is None:
            self.status = make_console(stderr=True).status("")
            self.status.start()
        from rich.text import Text

        self.status.update(Text(printable(text)))

    def close(self) -> None:
        """Take the line off the screen."""
        if self.status is not None:
            self.status.stop()
            self.status = None
