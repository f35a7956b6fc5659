"""`audit verify --workers`: what one process finds, found by many."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import worker_functions
from commands import ckpttool_here
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from peers import FIXTURES
from programs import mpiexec, script

from ckpttool.audit import parallel_reading
from ckpttool.audit.archive import Archive
from ckpttool.audit.archive_options import ArchiveOptions
from ckpttool.audit.archive_verification import ArchiveVerdict
from ckpttool.audit.export import export
from ckpttool.audit.parallel_reading import split_archive_into_parts
from ckpttool.audit.verify_in_store import verify
from ckpttool.engine.workers import parts
from ckpttool.engine.workers.local_processes import LocalProcesses
from ckpttool.errors import CkpttoolError, Differs, SourceChanged, UsageError
from ckpttool.storage.source import Source

NAMES = [f"layers.{i}.weight" for i in range(9)]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Parts of one member, and no archive that a test leaves open."""
    monkeypatch.setattr(parts, "_LEAST_BYTES", 1 << 18)
    yield
    parallel_reading._opened.close()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    g = torch.Generator().manual_seed(3)
    model: dict[str, torch.Tensor] = {n: torch.randn(331, 512 + i, generator=g) for i, n in enumerate(NAMES)}
    model |= {"empty": torch.zeros(0, 5), "scalar": torch.tensor(2.5), "zeros": torch.zeros(700, 700)}
    model["half"] = torch.randn(400, 500, generator=g).half()
    path = tmp_path_factory.mktemp("state") / "state.pt"
    torch.save({"model": model, "step": 7}, path)
    return path


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "shuffled"])
def made(request: pytest.FixtureRequest, saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An archive with many members."""
    path = tmp_path_factory.mktemp("store") / "a.tar.zst"
    export(saved, str(path), ArchiveOptions(member_bytes=1 << 20, shuffle=request.param), in_ledger=False)
    return path


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Path:
    """The same archive, for a test of its own."""
    return Path(shutil.copy(made, tmp_path / "a.tar.zst"))


def said(found: ArchiveVerdict) -> dict[str, Any]:
    return {k: v for k, v in found.to_json().items() if k != "workers"}


def frame_of(path: Path, name: str) -> tuple[int, int]:
    """(offset, bytes) of the first frame of a tensor in the file."""
    with Source(path.parent) as source:
        archive = Archive(source, path.name)
        k = list(archive.table.starts).index(archive.plan.places[name].at)
        return archive.table.offsets[k], archive.table.sizes[k]


def flip(path: Path, *at: int) -> None:
    data = bytearray(path.read_bytes())
    for k in at:
        data[k] ^= 4
    path.write_bytes(data)


class Here(Executor):
    """Does what is submitted at once; `harm(number of the request)` may raise before."""

    def __init__(self, harm: Any = lambda i: None) -> None:
        self.harm, self.requests = harm, list[dict[str, Any]]()

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        out: Future[Any] = Future()
        self.requests.append(json.loads(args[0]))
        try:
            self.harm(len(self.requests) - 1)
            out.set_result(fn(*args))
        except Exception as e:
            out.set_exception(e)
        return out


def test_parts_are_members_and_cover_every_frame(made: Path) -> None:
    with Source(made.parent) as source:
        archive = Archive(source, made.name)
        cut = split_archive_into_parts(archive)
        ends = {m.end for m in archive.plan.members}
        assert len(cut) > 5 and cut[0].first == 0 and cut[-1].stop == len(archive.table.starts)
        assert all(a.stop == b.first and archive.table.starts[b.first] in ends for a, b in pairwise(cut))
        assert sum(p.nbytes for p in cut) == archive.table.logical_size


@pytest.mark.slow
def test_any_number_of_processes_and_any_executor_agree(made: Path) -> None:
    one = verify(str(made), in_ledger=False)
    assert one.findings == [] and one.workers is None
    assert verify(str(made), workers=1).workers is None
    with ThreadPoolExecutor(3) as threads:
        for workers, count in ((2, 2), ("4", 4), (threads, 3)):
            found = verify(str(made), workers=workers)
            assert said(found) == said(one)
            assert found.workers is not None and found.workers["count"] == count and found.workers["parts"] > 5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("engine", ["mpi", "dask"])
def test_clusters_agree(store: Path, engine: str) -> None:
    damages(store)
    code = "from ckpttool.engine.workers import parts; parts._LEAST_BYTES = 1 << 18; from ckpttool.cli.main import main; main()"
    words = ["audit", "verify", str(store), "--no-ledger", "--json", "--workers"]
    if engine == "mpi":
        program = script(code, *words, "mpi", before=mpiexec(3))
        out, err = program.communicate(timeout=60)
    else:
        distributed = pytest.importorskip("distributed", reason="the extra [dask] is not installed")
        with distributed.LocalCluster(
            n_workers=2, threads_per_worker=2, processes=True, dashboard_address=None, silence_logs=50
        ) as cluster:
            program = script(code, *words, f"dask:{cluster.scheduler_address}")
            out, err = program.communicate(timeout=60)
    assert program.returncode == 4, err
    found = json.loads(out)
    assert found["workers"]["parts"] > 5 and found["workers"]["count"] == (2 if engine == "mpi" else 4)
    assert found["findings"] == verify(str(store)).to_json()["findings"] != []


def damages(path: Path) -> None:
    """In the middle of two tensors, and in the tar header of a member."""
    spots = []
    for name in ("model.layers.2.weight", "model.layers.6.weight"):
        offset, size = frame_of(path, name)
        spots.append(offset + size // 2)
    flip(path, *spots)


def test_damage_that_workers_find_is_what_one_process_finds(store: Path) -> None:
    damages(store)
    one = ckpttool_here("audit", "verify", store, "--no-ledger")
    many = ckpttool_here("audit", "verify", store, "--no-ledger", "--workers", "2")
    assert one.returncode == many.returncode == 4
    assert one.stdout == many.stdout
    first, _, rest = many.stderr.partition("\n")
    assert rest == one.stderr and first.startswith("2 processes read ")
    assert "layers.2.weight" in one.stdout and "layers.6.weight" in one.stdout
    found = verify(str(store), workers=Here())
    assert {f.tensor for f in found.findings} == {"model.layers.2.weight", "model.layers.6.weight"}
    assert said(found) == said(verify(str(store)))


def test_what_only_a_hash_tells_is_found(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every frame is whole, but another one than the manifest has the digest of."""
    real = Archive.__init__

    def another(self: Archive, *a: Any) -> None:
        real(self, *a)
        for name in ("model.layers.4.weight", "model.empty", "model.scalar"):
            self.manifest.digests[name] = "0" * 64
        self.sums["tensors-00002.safetensors"] = "1" * 64

    monkeypatch.setattr(Archive, "__init__", another)
    one = verify(str(store))
    executor = Here()
    assert said(verify(str(store), workers=executor)) == said(one) and len(executor.requests) > 5
    assert {f.tensor for f in one.findings} >= {"model.layers.4.weight", "model.empty", "model.scalar"}
    assert "tensors-00002.safetensors" in {f.member for f in one.findings}


@pytest.mark.parametrize("where", ["seek table", "CRC table", "cut off"])
def test_damaged_tables_are_looked_at_by_one_process_which_says_so(store: Path, where: str) -> None:
    size = store.stat().st_size
    with Source(store.parent) as source:
        frames = len(Archive(source, store.name).table.starts)
    if where == "cut off":
        with store.open("r+b") as f:
            f.truncate(size - 100_000)
    else:
        flip(store, size - 40 if where == "seek table" else size - 12 * frames - 40)
    one, executor = verify(str(store)), Here()
    many = verify(str(store), workers=executor)
    assert many.findings == one.findings != [] and executor.requests == []
    assert many.warnings == [
        "workers were not used: the structure is damaged, so its frames have to be searched for from front to back"
    ]


def test_a_worker_that_fails_costs_its_part_and_three_failures_the_run(store: Path, tmp_path: Path) -> None:
    def once(i: int) -> None:
        if i in (1, 4):
            raise BrokenPipeError("the worker died")

    found = verify(str(store), workers=Here(once))
    assert found.workers is not None and found.workers["again"] == 2 and said(found) == said(verify(str(store)))

    def always(i: int) -> None:
        if i >= 2:
            raise BrokenPipeError("the worker died")

    with pytest.raises(CkpttoolError, match="given to 3 workers, and none of them finished it: the worker died"):
        verify(str(store), workers=Here(always))


@pytest.mark.slow
def test_a_worker_process_that_is_killed_costs_its_part(store: Path, tmp_path: Path) -> None:
    class Killing(LocalProcesses):
        """Whose worker is killed by its third request."""

        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            self.many = getattr(self, "many", 0) + 1
            if self.many == 3:
                return super().submit(worker_functions.die_once, str(tmp_path / "dead"))
            return super().submit(fn, *args, **kwargs)

    executor = Killing(2)
    try:
        found = verify(str(store), workers=executor)
    finally:
        executor.shutdown(cancel_futures=True)
    assert (tmp_path / "dead").exists() and found.workers is not None and found.workers["again"] == 1
    assert said(found) == said(verify(str(store)))


def test_an_archive_that_is_replaced_meanwhile_is_no_verdict(store: Path, saved: Path) -> None:
    def replace(i: int) -> None:
        if i == 2:
            store.write_bytes(store.read_bytes())

    with pytest.raises(SourceChanged, match="changed while it was read"):
        verify(str(store), workers=Here(replace))
    verify(str(store), workers=Here())  # a worker that had opened the old one opens the new one

    def another(i: int) -> None:
        if i == 0:
            parallel_reading._opened.close()  # as a worker that begins
            store.unlink()
            export(saved, str(store), ArchiveOptions(member_bytes=2 << 20), in_ledger=False)

    with pytest.raises(CkpttoolError, match="another archive at"):
        verify(str(store), workers=Here(another))


def test_signed_and_compared(saved: Path, tmp_path: Path) -> None:
    pytest.importorskip("model_signing")
    key, public = tmp_path / "sign.key", tmp_path / "sign.pub"
    private = ec.generate_private_key(ec.SECP256R1())
    key.write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public.write_bytes(private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    path = tmp_path / "s.tar.zst"
    export(saved, str(path), ArchiveOptions(member_bytes=1 << 20, key=str(key)), in_ledger=False)
    found = verify(str(path), workers=Here(), public_key=str(public), against=str(saved))
    assert found.signature.startswith("good: ") and found.against == str(saved) and found.workers is not None
    assert said(found) == said(verify(str(path), public_key=str(public), against=str(saved)))
    with pytest.raises(Differs):
        verify(str(path), workers=Here(), against=str(FIXTURES / "fsdp2_w3/ckpt"))


def test_an_encrypted_archive_is_read_by_one_process_which_says_so(saved: Path, tmp_path: Path) -> None:
    pyrage = pytest.importorskip("pyrage")
    secret = pyrage.x25519.Identity.generate()
    identity = tmp_path / "identity.txt"
    identity.write_text(f"{secret}\n")
    path = tmp_path / "a.tar.zst.age"
    export(saved, str(path), ArchiveOptions(recipients=(str(secret.to_public()),)), in_ledger=False)
    executor = Here()
    inside = verify(str(path), identities=[str(identity)], workers=executor)
    assert inside.findings == [] and inside.merkle_root and inside.workers is None and executor.requests == []
    assert inside.warnings == ["workers were not used: an encrypted archive is decrypted, and read, by one process"]
    assert verify(str(path), workers=executor).warnings == ["workers were not used: one process hashes the ciphertext"]
    assert verify(str(path)).warnings == [] == verify(str(path), workers=1).warnings


def test_workers_that_would_have_nothing_to_do_are_refused(store: Path) -> None:
    with pytest.raises(UsageError, match="only structure and signature were asked for, which one process reads"):
        verify(str(store), quick=True, workers=2)
    done = ckpttool_here("audit", "verify", store, "--quick", "--workers", "2")
    assert done.returncode == 2 and "--workers 2" in done.stderr
