"""A layout of your own: a folder with one .npy file for every weight, NAME.npy. Functions over the index; no byte is copied here."""

import io
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np

from ckpttool.errors import Corrupt, Unsupported
from ckpttool.index.checkpoint import ITEMSIZE, Checkpoint, Chunks, TensorEntry
from ckpttool.index.draft import Draft, DraftFile, Dropped
from ckpttool.layouts import Layout, Place, ReadOptions, WriteOptions, option
from ckpttool.storage.source import Source


@dataclass(frozen=True)
class NpyOptions:
    """Options of the command line (`--npy-only`, `--no-npy-integers`), and `convert(options=NpyOptions(...))` in Python."""

    npy_only: str = option("*", "Glob of the weights to write; the others are left behind.", metavar="GLOB")
    npy_most: int = option(1 << 40, "Elements of the largest weight to write.")
    npy_integers: bool = option(True, "Write weights that are integers or bools, too.")


def detect(where: Place) -> tuple[bool, str]:
    found = [] if where.file else [n for n in where.source.list() if n.endswith(".npy")]
    return (True, f"has {found[0]}") if found else (False, "no *.npy")


def read(where: Place, options: ReadOptions) -> Checkpoint:
    """Where the bytes of every tensor are: in which file, from which byte on."""
    files = [n for n in where.source.list() if n.endswith(".npy")]
    sizes, tensors = [where.source.size(f) for f in files], {}
    for i, file in enumerate(files):
        head = io.BytesIO(where.source.read(file, 0, min(sizes[i], 4096)))
        try:
            np.lib.format.read_magic(head)
            shape, fortran, dtype = np.lib.format.read_array_header_1_0(head)
        except ValueError as e:
            raise Corrupt(f"{where.source.root}/{file} is not an .npy file of version 1: {e}.") from None
        if fortran or dtype.name not in ITEMSIZE:
            raise Unsupported(f"{where.source.root}/{file}: only row-major arrays of numbers are read.")
        name, chunks = file.removesuffix(".npy"), Chunks.whole(shape, i, head.tell(), sizes[i] - head.tell())
        tensors[f"model.{name}"] = TensorEntry(dtype.name, shape, ("model", name), chunks)
    return Checkpoint("npy", where.source.root, None, files, sizes, tensors, {})


def write(ckpt: Checkpoint, source: Source, options: WriteOptions) -> Draft:
    """What every file begins with, and which tensor follows. What is not written is named, with the reason."""
    mine, files, tensors = options.of(NpyOptions), [], {}
    dropped = [Dropped(n, 0, "npy holds weights only") for n in ckpt.values]
    for name, t in ckpt.tensors.items():
        dtype = options.cast(name, t.dtype)
        wanted = fnmatchcase(name, f"model.{mine.npy_only}") and t.numel <= mine.npy_most
        if (
            t.component != "model"
            or not wanted
            or not (mine.npy_integers or "float" in dtype)
            or dtype not in np.sctypeDict
        ):
            dropped.append(Dropped(name, t.nbytes, f"no weight that the options ask for and numpy has: {dtype}"))
            continue
        head, about = io.BytesIO(), {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": t.shape}
        np.lib.format.write_array_header_1_0(head, about)
        nbytes = t.numel * ITEMSIZE[dtype]
        tensors[name] = TensorEntry(dtype, t.shape, t.path, Chunks.whole(t.shape, len(files), head.tell(), nbytes))
        files.append(DraftFile(f"{name.removeprefix('model.')}.npy", head.tell() + nbytes, head.getvalue()))
    out = Checkpoint("npy", options.target, None, [f.name for f in files], [f.size for f in files], tensors, {})
    return Draft(out, {n: ckpt.tensors[n] for n in tensors}, files, dropped=dropped)


LAYOUT = Layout(
    name="npy", title="a folder of .npy files", detect=detect, read=read, write=write, options=NpyOptions,
    holds=lambda own: frozenset({"model"}), reader_uses=(), writer_uses=(),
)  # fmt: skip
