"""The reader's way to a GPU, on a machine without one: a stand-in device that copies as late as a GPU may.

A tensor of it lies in host memory and says that it is on cuda:0. A copy from a pinned buffer takes place only when somebody waits for
an event that was recorded after it, as on a GPU that is busy; so a buffer that is filled again too early, or a copy that nobody waits
for, leaves wrong bytes. CUDA itself, its allocator, its kernels and real streams are not here: tests/gpu has them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

import ckpttool
from ckpttool.live.reader import ReadRequest
from ckpttool.live.scatter import ReadPiece, Tuning, _group_pieces

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")

DEVICE = torch.device("cuda", 0)


class Stream:
    """Copies in their order; those up to a position have taken place."""

    def __init__(self) -> None:
        self.lock, self.copies, self.done = threading.RLock(), list[Callable[[], object]](), 0

    def run(self, until: int) -> None:
        """Make the copies before a position."""
        with self.lock:
            while self.done < until:
                self.copies[self.done]()
                self.done += 1


class StandIn:
    """What the reader uses of torch.cuda. `current` is the stream of each thread: only the job's thread has one at first."""

    def __init__(self) -> None:
        self.job, self.current = Stream(), threading.local()
        self.current.stream = self.job
        self.most_waiting = 0

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before = getattr(self.current, "stream", None)
        self.current.stream = stream
        yield
        self.current.stream = before

    def queue(self, copy: Callable[[], object]) -> None:
        """Queue a copy on this thread's stream, which must be the job's."""
        stream = getattr(self.current, "stream", None)
        assert stream is self.job, "a copy that the job's own work does not wait for"
        with stream.lock:
            stream.copies.append(copy)
            self.most_waiting = max(self.most_waiting, len(stream.copies) - stream.done)


class Event:
    """An event of the stand-in."""

    at = 0

    def record(self) -> None:
        stream = GPU[0].current.stream
        with stream.lock:
            self.at = len(stream.copies)

    def synchronize(self) -> None:
        GPU[0].job.run(self.at)


GPU: list[StandIn] = []


class OnDevice(Tensor):
    """A tensor of the stand-in. What reads or writes its elements is queued; views of it are made at once."""

    device = DEVICE  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if f is Tensor.copy_:
            target, source = (x.as_subclass(Tensor) for x in args[:2])
            if isinstance(args[1], OnDevice):
                GPU[0].queue(lambda: target.copy_(source))
            else:  # from memory that is not pinned: CUDA takes the bytes before it returns
                bytes_of = source.clone()
                GPU[0].queue(lambda: target.copy_(bytes_of))
            return args[0]
        return super().__torch_function__(f, types, args, kwargs or {})


class Pinned(Tensor):
    """A pinned buffer, from which a copy to the device takes its bytes later."""

    @classmethod
    def __torch_function__(cls, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if f is Tensor.to and args[1:] == (DEVICE,):
            assert kwargs == {"non_blocking": True}
            out, source = torch.empty(args[0].shape, dtype=args[0].dtype), args[0].as_subclass(Tensor)
            GPU[0].queue(lambda: out.copy_(source))
            return out.as_subclass(OnDevice)
        return super().__torch_function__(f, types, args, kwargs or {})


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    made, empty = StandIn(), torch.empty

    def empty_or_pinned(*size: Any, pin_memory: bool = False, **more: Any) -> Tensor:
        return empty(*size, **more).as_subclass(Pinned) if pin_memory else empty(*size, **more)

    GPU[:] = [made]
    monkeypatch.setattr(torch, "empty", empty_or_pinned)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", made.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: made.current.stream)
    yield made


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Tensor], Path]:
    """Tensors of several dtypes and shapes, as dcp.save writes them."""
    torch.manual_seed(0)
    known = {"large": torch.randn(600, 131), "odd": torch.randn(131, 36), "conv": torch.randn(7, 22, 3)}
    known |= {f"small.{i}": torch.randn(64, 8 + i % 3) for i in range(40)}
    known |= {"half": known["large"].bfloat16(), "mask": torch.rand(33, 5) > 0.5, "f8": torch.randn(33, 16).to(torch.float8_e4m3fn)}  # fmt: skip
    known["turned"] = torch.randn(40, 60).t()
    folder = tmp_path_factory.mktemp("saved")
    dcp.save({"model": known}, checkpoint_id=folder / "a", no_dist=True)
    return known, folder / "a"


def load(path: Path, known: dict[str, Tensor], stage: int, threads: int, gaps: bool = False) -> Callable[[], list[str]]:
    """Fill the middle of each tensor on the stand-in; returns a function that names those with other bytes than the file."""
    opened = ckpttool.storage_reader(path).opened
    opened.tuning = Tuning(stage_bytes=stage, threads=threads)
    wanted, expected = [], []
    for n, t in known.items():
        start = tuple(k // 3 for k in t.shape)
        size = tuple(k - a - (k > 5) for k, a in zip(t.shape, start, strict=True))
        expected.append(t[tuple(slice(a, a + k) for a, k in zip(start, size, strict=True))])
        wide = torch.zeros([2 * k for k in size] if gaps else size, dtype=t.dtype).as_subclass(OnDevice)
        wanted.append(ReadRequest(f"model.{n}", start, size, wide[tuple(slice(None, None, 2 if gaps else 1) for _ in size)]))  # fmt: skip
    opened.fill(wanted)
    return lambda: [w.name for w, t in zip(wanted, expected, strict=True) if not same(w.target.as_subclass(Tensor), t)]


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("stage", [1 << 10, 1 << 13, 8 << 20])
def test_every_copy_has_arrived_on_the_stream_of_the_job_though_the_device_copies_as_late_as_it_may(
    stage: int, threads: int, gaps: bool, saved: tuple[dict[str, Tensor], Path], gpu: StandIn
) -> None:
    known, path = saved
    assert load(path, known, stage, threads, gaps)() == []
    assert gpu.job.done == len(gpu.job.copies), "a copy that nobody has waited for"
    assert gpu.most_waiting > 1, "the device was behind"


def test_the_stand_in_shows_copies_that_nobody_waits_for_and_buffers_that_are_filled_again_too_early(
    saved: tuple[dict[str, Tensor], Path], gpu: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, path = saved
    monkeypatch.setattr(Event, "synchronize", lambda self: None)
    wrong = load(path, known, 1 << 10, 1)
    assert wrong() == [f"model.{n}" for n in known], "nothing has arrived"
    gpu.job.run(len(gpu.job.copies))  # as if it had waited at the end, and not before it used a buffer again
    assert len(wrong()) >= len(known) - 2, "all but the last two buffers were filled again"


def test_what_is_on_another_device_is_never_taken_for_host_memory(
    saved: tuple[dict[str, Tensor], Path], gpu: StandIn
) -> None:
    known, path = saved
    tree = {"model": {n: torch.zeros(t.shape, dtype=t.dtype).as_subclass(OnDevice) for n, t in known.items()}}
    dcp.load(tree, storage_reader=ckpttool.storage_reader(path), no_dist=True)
    assert all(type(t) is OnDevice for t in tree["model"].values())
    assert [n for n, t in known.items() if not same(tree["model"][n].as_subclass(Tensor), t)] == []


def test_what_goes_to_two_devices_is_read_by_two_calls() -> None:
    """The copies of one call are in the stream of one device, and only that one is waited for."""
    on = [torch.empty(4, device=device) for device in ("cpu", "meta", "meta", "cpu")]
    pieces = [ReadPiece(0, 16 * k, 16, None, t, "float32") for k, t in enumerate(on)]
    groups = list(_group_pieces(pieces, Tuning()))
    assert [[p.target.device.type for p in group] for group in groups] == [["cpu"], ["meta", "meta"], ["cpu"]]
