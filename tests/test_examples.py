"""examples/resume-verify: scripts that are linted and run, manifests and a workflow that fit the command line."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from peers import FIXTURES, REPOSITORY
from ranks import ENVIRONMENT, one_at_a_time

import ckpttool

EXAMPLES = REPOSITORY / "examples" / "resume-verify"
SCRIPTS = sorted(p.name for p in EXAMPLES.iterdir() if p.suffix in (".sh", ".sbatch"))
VERDICTS = {10, 11, 12}


def program(folder: Path, name: str, text: str) -> None:
    """A program that stands for another one."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/bash\n{text}\n")
    (folder / name).chmod(0o755)


def path_with(folder: Path) -> str:
    """PATH with these programs first, and python3 and ckpttool of this environment."""
    return f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"


def documents(name: str) -> list[Any]:
    """What a YAML file holds."""
    return list(yaml.safe_load_all((EXAMPLES / name).read_text()))


def options_used(text: str) -> set[str]:
    """The long options that come after "resume-verify" in a script."""
    return {
        w
        for part in text.split("resume-verify ")[1:]
        for w in re.findall(r"(?<=\s)--[a-z-]+", part.partition("\n\n")[0])
    }


def known_options() -> set[str]:
    """The options of the command."""
    import typer.main

    from ckpttool.cli.main import app

    command: Any = typer.main.get_command(app)
    return {o for p in command.commands["resume-verify"].params for o in p.opts}


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_sound(name: str) -> None:
    shell = (EXAMPLES / name).read_text().partition("\n")[0].removeprefix("#!/bin/")
    subprocess.run([shell, "-n", EXAMPLES / name], check=True)
    if shutil.which("shellcheck") is None:
        if os.environ.get("CI") == "true":
            pytest.fail("shellcheck is not installed; tests/tools.sh does that")
        pytest.skip("shellcheck is not installed; `make tools` does that on Debian and Ubuntu")
    subprocess.run(["shellcheck", EXAMPLES / name], check=True)


def test_every_option_in_the_examples_is_one_of_the_command() -> None:
    (container,) = documents("job.yaml")[0]["spec"]["template"]["spec"]["containers"]
    used = {w for w in container["command"] if w.startswith("--")}
    for name in ("slurm.sbatch", "torchrun.sh", "github-actions.yml"):
        mine = options_used((EXAMPLES / name).read_text())
        assert {"--against", "--config", "--report"} <= mine, name
        used |= mine
    assert used - known_options() == {"--min-mfu", "--dtype"} - known_options() == set()


@pytest.mark.parametrize(
    ("report", "status", "code", "said"),
    [
        (0, 0, 0, "may proceed"), (10, 1, 10, "keep the old checkpoint"), (11, 1, 11, "gate"), (12, 1, 12, "does not fit"),
        (0, 1, 1, "may proceed"), (None, 1, 1, "nothing was judged"), (None, 0, 1, "nothing was judged"), (None, 13, 13, "judged"),
    ],
)  # fmt: skip
def test_the_gate_ends_as_the_report_says(
    report: int | None, status: int, code: int, said: str, tmp_path: Path
) -> None:
    if report is not None:
        (tmp_path / "report.json").write_text(json.dumps({"verdict": "?", "exit_code": report}))
    done = subprocess.run(
        ["sh", EXAMPLES / "gate.sh", tmp_path, str(status)], env={"PATH": path_with(tmp_path)}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr


def cluster(tmp_path: Path, **more: str) -> dict[str, str]:
    """The variables of the scripts, for two nodes of one rank each."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    folder = FIXTURES / "fsdp2_w3"
    return {
        **os.environ, **ENVIRONMENT, "PATH": path_with(tmp_path / "bin"), "NEW": str(folder / "ckpt"), "OLD": str(folder / "ckpt"),
        "CONFIG": str(folder / "hf_ref"), "REPORT": str(tmp_path / "report"), "SCRATCH": str(tmp_path), "MASTER_PORT": str(port),
        "GPUS_PER_NODE": "1", **more,
    }  # fmt: skip


@pytest.mark.live
@pytest.mark.slow
def test_the_slurm_file_runs_two_ranks_and_ends_with_their_verdict(tmp_path: Path) -> None:
    # no Slurm here: srun starts its program once for each of two nodes, which are this machine. It ends none, so that this fails if
    # the torchrun of a node waits at its exit barrier, which it does for 300 s, deaf to SIGTERM
    program(tmp_path / "bin", "scontrol", "echo localhost; echo localhost")
    program(
        tmp_path / "bin", "srun",
        '[ "$1" = --kill-on-bad-exit=1 ] || exit 99\nshift\nSLURM_PROCID=0 "$@" & a=$!\n'
        f'SLURM_PROCID=1 "$@" > {tmp_path}/node1 2>&1 & b=$!\nwait $a; x=$?\nwait $b; [ $? -eq $x ] || exit 98\nexit $x',
    )  # fmt: skip
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "report.json").write_text('{"exit_code": 0}')  # of an earlier run
    ckpttool.convert(FIXTURES / "fsdp2_w3" / "ckpt", tmp_path / "new", to="dcp", only=["model"])
    options = "--min-mfu 0.4 --steps 1 --sequence 8 --global-batch 2 --no-round-trip --device cpu"
    slurm = {
        "SLURM_JOB_NODELIST": "node[0-1]",
        "SLURM_NNODES": "2",
        "SLURM_JOB_ID": "7",
        "SLURM_SUBMIT_DIR": str(EXAMPLES),
    }
    shutil.copy(EXAMPLES / "slurm.sbatch", tmp_path / "slurm_script")  # as Slurm does
    with one_at_a_time():
        done = subprocess.run(
            ["bash", tmp_path / "slurm_script"], env=cluster(tmp_path, NEW=str(tmp_path / "new"), OPTIONS=options, **slurm),
            cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
    ended = time.time()
    assert done.returncode == 10, (done.stdout[-2000:], done.stderr[-2000:])
    assert "keep the old checkpoint" in done.stderr
    for said in (done.stderr, (tmp_path / "node1").read_text()):
        assert re.findall(r"exitcode  : (\d+)", said) == ["10"], said[-2000:]
    assert ended - (tmp_path / "report" / "report.json").stat().st_mtime < 20
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert report["exit_code"] == 10 and report["candidate"]["world_size"] == 2
    assert {"state.names", "gate.min_mfu"} <= {c["name"] for c in report["checks"] if c["verdict"] == "fail"}


@pytest.mark.parametrize(("node", "code"), [("0", 10), ("1", 1)])
def test_without_a_scheduler_the_first_machine_tells_the_verdict(node: str, code: int, tmp_path: Path) -> None:
    report = tmp_path / "report" / "report.json"
    report.parent.mkdir()
    report.write_text('{"exit_code": 0}')
    verdict = 'printf \'{"exit_code": 10}\' > "$REPORT/report.json"; ' if node == "0" else ""
    program(tmp_path / "bin", "torchrun", f'echo "$@" > {tmp_path}/words; {verdict}exit 1')
    done = subprocess.run(
        ["sh", EXAMPLES / "torchrun.sh", "2", node, "first"], env=cluster(tmp_path, OPTIONS="--min-mfu 0.4"), capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    words = shlex.split((tmp_path / "words").read_text())
    assert {"--nnodes=2", f"--node-rank={node}", "--nproc-per-node=1", "--master-addr=first"} <= set(words)
    assert words[words.index("-m") + 1 : words.index("-m") + 3] == ["ckpttool", "resume-verify"]
    assert words[-2:] == ["--min-mfu", "0.4"]


@pytest.mark.parametrize("name", ["job.yaml", "indexed-job.yaml"])
def test_manifests_mount_what_they_name_and_do_not_try_a_verdict_again(name: str) -> None:
    *services, job = documents(name)
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    spec = job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    volumes = {v["name"]: v for v in pod["volumes"]}
    mounts = {m["name"]: m for m in container["volumeMounts"]}
    assert volumes.keys() == mounts.keys() and pod["restartPolicy"] == "Never"
    assert mounts["ckpt"]["readOnly"] and volumes["ckpt"]["persistentVolumeClaim"]["readOnly"]
    assert (mounts["shm"]["mountPath"], volumes["shm"]["emptyDir"]) == ("/dev/shm", {"medium": "Memory"})
    limits = container["resources"]["limits"]
    assert all(isinstance(v, str) for v in limits.values()) and "nvidia.com/gpu" in limits
    words = [*container["command"], *(e["value"] for e in container.get("env", ()))]
    places = [m["mountPath"] for m in mounts.values()]
    for word in words:
        assert isinstance(word, str)
        if word.startswith("/") and not word.startswith("/opt"):
            assert any(word == p or word.startswith(f"{p}/") for p in places), word
    if spec["backoffLimit"]:
        (rule,) = [r for r in spec["podFailurePolicy"]["rules"] if r["action"] == "FailJob"]
        assert set(rule["onExitCodes"]["values"]) == VERDICTS and rule["onExitCodes"]["operator"] == "In"
        assert rule["onExitCodes"]["containerName"] == container["name"]
    for service in services:
        (n,) = {spec["completions"], spec["parallelism"], int(container["command"][2])}
        assert n == 2 and spec["completionMode"] == "Indexed"
        assert service["spec"]["clusterIP"] == "None" and pod["subdomain"] == service["metadata"]["name"]
        assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
        assert container["command"][3:] == [
            "$(JOB_COMPLETION_INDEX)", f"{job['metadata']['name']}-0.{service['metadata']['name']}"
        ]  # fmt: skip
        given = {e["name"] for e in container["env"]}
        assert set(re.findall(r'"\$([A-Z]+)"', (EXAMPLES / "torchrun.sh").read_text())) <= given


@pytest.mark.parametrize("code", [0, 10, 11, 12, 13])
def test_the_workflow_ends_as_the_command_does_and_keeps_its_report(code: int, tmp_path: Path) -> None:
    (workflow,) = documents("github-actions.yml")
    (job,) = workflow["jobs"].values()
    assert set(workflow[True]["workflow_dispatch"]["inputs"]) == set(re.findall(r"inputs\.(\w+)", str(job["env"])))
    convert, verify, keep = job["steps"]
    assert "${{" not in convert["run"] + verify["run"], "what somebody typed must not become a part of a script"
    program(tmp_path / "bin", "ckpttool", f'printf "%s\\n" "$@" > {tmp_path}/words; exit {code}')
    given = {"PATH": path_with(tmp_path / "bin"), "NEW": "/new $x", "OLD": "/old;y", "CONFIG": "/c"}
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", verify["run"]], env=given, capture_output=True, text=True, check=False
    )
    assert done.returncode == code
    said = {10: "Training differs", 11: "A gate was not met", 12: "does not fit", 13: "Nothing was judged"}
    assert (said[code] in done.stdout) if code else not done.stdout
    words = (tmp_path / "words").read_text().splitlines()
    assert words[:4] == ["resume-verify", "/new $x", "--against", "/old;y"]
    assert words[words.index("--report") + 1] == keep["with"]["path"] and "cancelled" in keep["if"]


def test_the_documentation_shows_these_very_files() -> None:
    page = (REPOSITORY / "docs" / "how-to" / "resume-cluster.md").read_text()
    shown = set(re.findall(r'^--8<-- "examples/resume-verify/([\w.-]+)"$', page, re.MULTILINE))
    assert shown == {p.name for p in EXAMPLES.iterdir()}
    for path in (REPOSITORY / "docs").rglob("*.md"):
        assert "--8 <" not in path.read_text(), f"{path}: a formatter has broken the line that shows a file"
