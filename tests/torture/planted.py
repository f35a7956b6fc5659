"""Modules that somebody planted in the current folder, beside the checkpoint and beside the config, while every command runs.

    run(lab, until, log, part, parts, most, first)      cases until a time, a line each in `log`

A planted module writes its name into a canary, and nothing else. Planted are all modules of Python, all that is installed here, and those
that are imported only where they are installed; and the metadata of a package that registers itself with ckpttool, fsspec and torch. A
command must do its work as ever, and the canary must stay away.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .faults import Lab

REPOSITORY = Path(__file__).resolve().parents[2]
FIXTURES = REPOSITORY / "fixtures"
SECONDS = 120

#: What is imported where it is installed, and often is not.
OPTIONAL = (
    "_sysconfigdata__linux_x86_64-linux-gnu", "aim", "aiodns", "apex", "awscrt", "azure", "backports", "bcrypt", "bitsandbytes", "bokeh",
    "brotli", "brotlicffi", "cchardet", "chardet", "clearml", "colorama", "comet_ml", "converters", "cuda", "cudf", "cupy", "dill",
    "dvclive", "envwrap", "essentia", "eventlet", "flash_attn", "flash_attn_interface", "flax", "flint", "fx2trt_oss", "gdbm", "gevent",
    "gmpy", "gmpy2", "h2", "habana_frameworks", "hf_transfer", "hf_xet", "hqq", "hvac", "intel_extension_for_pytorch", "IPython",
    "ipywidgets", "jax", "kernels", "keylet", "librosa", "lz4", "lzmaffi", "matplotlib", "megatron", "mistral_common", "mlflow", "mlx",
    "monkeytype", "multipart", "nanotron", "numba", "onnx", "onnx_tf", "onnxruntime", "opt_einsum", "optimum", "org", "orjson", "pandas", "PIL",
    "pkcs11", "pretty_midi", "pyarrow", "pydantic", "pydot", "pynvml", "pyzstd", "rmm", "scipy", "sentencepiece", "setproctitle",
    "shellingham", "simplejson", "sitecustomize", "sklearn", "snappy", "socks", "socksio", "soundfile", "soxr", "swanlab", "tabulate",
    "tensorboard", "tensorboardX", "tensorflow", "tensorrt", "torch2trt", "torch_mlu", "torch_musa", "torch_npu", "torch_sdaa", "torch_xla",
    "torchao", "torchaudio", "torchcomms", "torchdistx", "torchvision", "tornado", "trackio", "transformer_engine", "tree", "triton", "tvm",
    "ucp", "ujson", "urlparse", "usercustomize", "uvloop", "wandb", "wsaccel", "xarray", "zstd",
)  # fmt: skip
NAMES = tuple(
    sorted(
        name
        for name in {
            *sys.stdlib_module_names,
            sysconfig._get_sysconfigdata_name(),  # type: ignore[attr-defined]
            *packages_distributions(),
            *OPTIONAL,
            "ckpttool",
            "planted_entry",
        }
        if "/" not in name
    )
)
GROUPS = (
    "ckpttool.layouts",
    "fsspec.specs",
    "torch.backends",
    "keyring.backends",
    "pytest11",
    "mpi4py",
    "distributed",
    "peft",
    "transformers",
)

RECIPE = """
import torch
from beside import rows

class Tiny(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = torch.nn.Embedding(32, 8)
        self.out = torch.nn.Linear(8, 32, bias=False)
    def forward(self, input_ids):
        return self.out(self.emb(input_ids))

def build():
    model = Tiny()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01), None, rows
"""
SMALL = [
    "--steps",
    "1",
    "--world-size",
    "1",
    "--global-batch",
    "2",
    "--micro-batch",
    "1",
    "--sequence",
    "16",
    "--device",
    "cpu",
    "--no-round-trip",
]
LIVE = """
import os, sys
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import ckpttool
state = {"lin.weight": torch.zeros(6, 4)}
dcp.load({"model": state}, storage_reader=ckpttool.storage_reader(sys.argv[1]), no_dist=True)
assert state["lin.weight"].abs().sum() > 0
ckpttool.convert(sys.argv[1], sys.argv[2], to="dcp", world_size=2, workers=2)
"""

#: {name: the words after `ckpttool`}; {o} is a folder that is empty before each, and its exit code is 0.
COMMANDS: dict[str, list[str]] = {
    "version": ["--version"],
    "layouts": ["layouts"],
    "maps": ["maps"],
    "inspect": ["inspect", "{ck}"],
    "inspect-large": ["inspect", "{wide}"],
    "verify": ["verify", "{ck}", "--read-data"],
    "verify-workers": ["verify", "{ck}", "--read-data", "--workers", "2"],
    "doctor": ["doctor", "{ck}", "--read-data"],
    "diff": ["diff", "{ck}", "{ck2}"],
    "digest": ["digest", "{zero}", "--tensors"],
    "dcp": ["convert", "{ck}", "{o}/dcp", "--to", "dcp", "-n", "2", "--workers", "2"],
    "full": ["convert", "{zero}", "{o}/full.pt", "--to", "full", "--config", "{conf}"],
    "hf": ["convert", "{ck}", "{o}/hf", "--to", "hf", "--config", "{conf}"],
    "zero3": ["convert", "{ck}", "{o}/zero", "--to", "zero3", "-n", "2", "--config", "{conf}"],
    "fsdp1": ["convert", "{ck}", "{o}/fsdp1", "--to", "fsdp1", "-n", "2", "--wrap", "model.layers.*", "--config", "{conf}"],
    "trainer": ["convert", "{ck}", "{o}/trainer", "--for", "trainer", "-n", "2", "--config", "{conf}"],
    "names-of-transformers": ["convert", "{moe}", "{o}/moe", "--to", "dcp", "-n", "2"],
    "clean": ["clean", "{here}", "--dry-run"],
    "extract": ["adapter", "extract", "{lora}", "{o}/extracted"],
    "merge": ["adapter", "merge", "{base}", "{adapter}", "{o}/merged"],
    "export": ["audit", "export", "{ck}", "{o}/a.tar.zst", "--sign-key", "{key}/sign.pem", "--retain", "1d"],
    "export-age": ["audit", "export", "{ck}", "{o}/a.tar.zst.age", "--encrypt-to", "{recipient}"],
    "audit-verify": ["audit", "verify", "{store}/a.tar.zst", "--deep", "--public-key", "{key}/sign.pub", "--workers", "2"],
    "restore": ["audit", "restore", "{store}/a.tar.zst", "{o}/restored", "--to", "dcp", "-n", "2"],
    "list": ["audit", "list", "{store}"],
    "hold": ["audit", "hold", "{store}/a.tar.zst", "case 3"],
    "release": ["audit", "release", "{store}/b.tar.zst", "case closed"],
    "prune": ["audit", "prune", "{store}", "--keep-last", "1"],
    "ledger": ["audit", "ledger", "verify", "{store}"],
    "push": ["push", "{ck}", "hf://owner/pushed", "--config", "{conf}"],
    "pull": ["pull", "hf://owner/there", "{o}/pulled", "-n", "2"],
    "resume-verify-job": ["resume-verify", "{tiny}", "--job", "{job}/recipe.py:build", *SMALL],
    "resume-verify": ["resume-verify", "{ck}", "--against", "{ck}", "--config", "{conf}", "--report", "{o}/report", *SMALL],
    "python": ["{job}/live.py", "{base}", "{o}/live"],
}  # fmt: skip
SLOW = ("resume-verify-job", "resume-verify", "python", "names-of-transformers")


class Field:
    """A folder in which `here` is the current one, with checkpoints and configs in folders of it; what a test trusts is beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.here, self.canary = folder, folder / "here", folder / "canary"
        self.places = {
            name: self.here / name
            for name in ("ck", "ck2", "conf", "hf", "moe", "zero", "lora", "base", "adapter", "wide", "tiny")
        }
        self.places |= {name: folder / name for name in ("job", "key", "o", "store")}
        self.words = {"here": str(self.here), **{name: str(path) for name, path in self.places.items()}}
        self._planted: list[Path] = []

    def prepare(self) -> Field:
        """Write what commands are run on."""
        import numpy as np
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from safetensors.numpy import save_file

        for name, source in {
            "ck": "fsdp2_w3/ckpt", "ck2": "fsdp2_w3/ckpt", "hf": "fsdp2_w3/hf_ref", "moe": "hf_moe/ckpt", "zero": "zero3_w4/ckpt",
            "lora": "trainer_ddp_lora_w2/ckpt/checkpoint-3",
        }.items():  # fmt: skip
            shutil.copytree(FIXTURES / source, self.places[name])
        for name in ("conf", "base", "adapter", "job", "key", "o", "store"):
            self.places[name].mkdir(parents=True)
        shutil.copy(self.places["hf"] / "config.json", self.places["conf"])
        w = np.arange(24, dtype=np.float32).reshape(6, 4)
        save_file({"lin.weight": w}, self.places["base"] / "model.safetensors")
        halves = {"base_model.model.lin.lora_A.weight": w[:2], "base_model.model.lin.lora_B.weight": w[:, :2].copy()}
        save_file(halves, self.places["adapter"] / "adapter_model.safetensors")
        described = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["lin"]}
        (self.places["adapter"] / "adapter_config.json").write_text(json.dumps(described))
        (self.places["job"] / "recipe.py").write_text(RECIPE)
        (self.places["job"] / "beside.py").write_text(
            "import torch\ndef rows(i):\n    return torch.arange(16) + i % 8\n"
        )
        (self.places["job"] / "live.py").write_text(LIVE)
        tensors = {"emb.weight": np.ones((32, 8), np.float32), "out.weight": np.ones((32, 8), np.float32)}
        save_file(tensors, self.folder / "tiny.safetensors")
        save_file({f"{'n' * 4000}.{i}": w for i in range(300)}, self.folder / "wide.safetensors")
        key = ec.generate_private_key(ec.SECP256R1())
        plain = serialization.NoEncryption()
        (self.places["key"] / "sign.pem").write_bytes(
            key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
        )
        (self.places["key"] / "sign.pub").write_bytes(
            key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        )
        import pyrage

        self.words["recipient"] = str(pyrage.x25519.Identity.generate().to_public())
        for words in (
            ["convert", self.folder / "wide.safetensors", self.places["wide"], "--to", "dcp", "-n", "1"],
            ["convert", self.folder / "tiny.safetensors", self.places["tiny"], "--to", "dcp", "-n", "1"],
            [
                "audit",
                "export",
                self.places["ck"],
                self.places["store"] / "a.tar.zst",
                "--sign-key",
                self.places["key"] / "sign.pem",
            ],
            ["audit", "export", self.places["ck"], self.places["store"] / "b.tar.zst", "--legal-hold", "case 2"],
        ):
            subprocess.run([*program("command"), *map(str, words)], check=True, capture_output=True, cwd=self.folder)
        shutil.copytree(self.places["store"], self.folder / "kept")
        return self

    def plant(self, names: Sequence[str], form: str = "module") -> None:
        """Put modules of these names, as files or as packages, into the current folder and into each one of a checkpoint or a config."""
        for path in self._planted:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        self._planted = []
        one = self.folder / "planted.py"
        one.write_text(f"open({str(self.canary)!r}, 'a').write(f'{{__name__}} {{__file__}}\\n')\n")
        for folder in (self.here, *(p for name, p in self.places.items() if p.parent == self.here)):
            for name in names:
                path = folder / (f"{name}.py" if form == "module" else name)
                if form == "package":
                    path.mkdir()
                os.link(one, path if form == "module" else path / "__init__.py")
                self._planted.append(path)
            registered = folder / "planted-1.0.dist-info"
            registered.mkdir()
            (registered / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1.0\n")
            (registered / "entry_points.txt").write_text(
                "".join(f"[{g}]\nplanted = planted_entry:LAYOUT\n" for g in GROUPS)
            )
            self._planted.append(registered)

    def run(self, name: str, launcher: str, where: str, environment: dict[str, str]) -> tuple[list[str], str]:
        """(what is wrong, what was printed) of a command that is run in one of the folders."""
        for fresh in ("o", "store"):
            shutil.rmtree(self.places[fresh])
        self.places["o"].mkdir()
        shutil.copytree(self.folder / "kept", self.places["store"])
        self.canary.unlink(missing_ok=True)
        words = [word.format(**self.words) for word in COMMANDS[name]]
        begin = [sys.executable] if name == "python" else program(launcher)
        try:
            done = subprocess.run(
                [*begin, *words], cwd=self.here if where == "here" else self.places[where], env=environment, capture_output=True, text=True,
                timeout=SECONDS,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return [f"not done after {SECONDS} s"], ""
        said = done.stdout[-1000:] + done.stderr[-2000:]
        bad = [f"exit {done.returncode}"] if done.returncode else []
        bad += ["a traceback"] if "Traceback" in said else []
        if self.canary.exists():
            bad += [f"it ran {line}" for line in self.canary.read_text().splitlines()[:5]]
        return bad, said


def program(launcher: str) -> list[str]:
    """The words that begin a command line."""
    command = [str(Path(sys.executable).with_name("ckpttool"))]
    return {
        "command": command,
        "-m": [sys.executable, "-m", "ckpttool"],
        "-P -m": [sys.executable, "-P", "-m", "ckpttool"],
    }[launcher]


def names_for(launcher: str) -> tuple[str, ...]:
    """What may be planted: `python -m ckpttool` runs the ckpttool.py of the current folder by Python's own rule."""
    return tuple(name for name in NAMES if name != "ckpttool") if launcher == "-m" else NAMES


@contextmanager
def surroundings(folder: Path) -> Iterator[dict[str, str]]:
    """The environment of commands, with a Hub of their own that has the repositories which they need."""
    import pytest

    sys.path.insert(0, str(REPOSITORY / "tests"))
    from fake_hub import Hub

    files = {p.name: p.read_bytes() for p in (FIXTURES / "fsdp2_w3" / "hf_ref").iterdir()}
    with Hub() as hub, pytest.MonkeyPatch.context() as patch:
        hub.environment(patch, folder)
        hub.commit("owner/there", files)
        yield {
            **{k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONSAFEPATH")},
            "XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "160",
        }  # fmt: skip


def case(field: Field, number: int, environment: dict[str, str]) -> dict[str, Any]:
    """One command, with some of the names planted."""
    rng = random.Random(number)
    name = list(COMMANDS)[number % len(COMMANDS)]
    launcher = rng.choice(("command", "-m", "-P -m"))
    where = rng.choice(("here", "ck", "conf"))
    names = names_for(launcher)
    chosen = names if rng.random() < 0.5 else sorted(rng.sample(names, rng.randint(1, len(names))))
    form = rng.choice(("module", "package"))
    field.plant(chosen, form)
    bad, said = field.run(name, launcher, where, environment)
    return {
        "id": f"planted:{name}:{number}", "status": "clean" if not bad else "planted code ran, or the command failed", "bad": bool(bad),
        "said": f"{launcher}, in {where}, {len(chosen)} {form}s", "detail": "; ".join(bad) + ("\n" + said if bad else ""),
    }  # fmt: skip


def replay(number: int, folder: Path) -> dict[str, Any]:
    """One case again."""
    folder.mkdir(parents=True)
    with surroundings(folder) as environment:
        return case(Field(folder).prepare(), number, environment)


def run(lab: Lab, until: float, log: Path, part: int, parts: int, most: int, first: int) -> None:
    """Cases until a time, in the order of their numbers, in a process without what a lab changes."""
    folder = lab.out.parent / f"planted{part}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    words = [str(folder), str(log), repr(until), *map(str, (first + part, first + most, parts))]
    environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    subprocess.run([sys.executable, "-m", "tests.torture.planted", *words], check=True, cwd=REPOSITORY, env=environment)
    shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """The same, from a command line."""
    folder, log, until = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
    with surroundings(folder) as environment, log.open("a") as f:
        field = Field(folder).prepare()
        for number in range(*map(int, sys.argv[4:])):
            if time.time() > until:
                break
            f.write(json.dumps(case(field, number, environment)) + "\n")
            f.flush()


if __name__ == "__main__":
    main()
