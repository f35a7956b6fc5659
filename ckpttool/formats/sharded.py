"""Sharded tensors as jobs pickle them, read and written as data: ShardedTensor and DTensor, without torch.

A ShardedTensor is (local shards, metadata, process group state, sharding spec, init_rrefs): its metadata lists offsets
and sizes of all shards, the state has the rank that wrote it (torch/distributed/_shard/sharded_tensor/api.py,
`__getstate__`). A DTensor is a local tensor and a spec, {mesh, placements, tensor_meta}; which box of the whole the
local tensor is follows from the mesh's size, the rank's coordinates, and the placements (placements.py), which cut from
left to right, or as `shard_order` says (torch/distributed/tensor/_dtensor_spec.py).

`make_stand_ins` keeps both as `Opaque`; `read_shards` says what one rank has of such a tensor; `make_sharded_tensor`
and `make_dtensor` make one. The attributes of a DeviceMesh and of a spec are other ones in torch 2.9, 2.10 and 2.13, so
those made here are calls of their constructors, which torch 2.10 and later load.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

from ..errors import Corrupt, Unsafe, Unsupported
from ..index import boxes
from ..index.checkpoint import ITEMSIZE
from ..storage.source import ReadAt
from . import torch_zip
from .pickle_writer import CommonList
from .pickles import MEMORY_FORMATS, Global, Opaque, make_enum_stand_ins, resolve_attribute, short
from .placements import PlacementCut, ShardPiece, compute_local_pieces
from .stored_tensors import StoredTensor, inline_tensors
from .subclasses import is_subclass
from .torch_pickles import TensorRef

__all__ = [
    "Boxes",
    "ShardTable",
    "Shards",
    "get_local_tensor",
    "is_sharded",
    "make_dtensor",
    "make_mesh",
    "make_sharded_tensor",
    "make_stand_ins",
    "read_shards",
]

_SHARDED = "torch.distributed._shard.sharded_tensor"


class Shards(NamedTuple):
    """What one rank has of a ShardedTensor or DTensor: `pieces` are (start, tensor).

    `place` is (which slice of a flat parameter this rank would hold, how many there are), `listed` (start, shape) of
    the parts of all ranks, None where the file does not list them.
    """

    dtype: str
    shape: tuple[int, ...]
    pieces: list[tuple[tuple[int, ...], StoredTensor]]
    rank: int | None
    world: int | None
    place: tuple[int, int] | None
    listed: Boxes | None = None


#: (start, shape) of parts of a tensor.
Boxes = frozenset[tuple[tuple[int, ...], tuple[int, ...]]]


def make_stand_ins(what: str) -> dict[tuple[str, str], Any]:
    """Return stand-ins for the classes and functions in files of ranks: {(module, name): what replaces it}. Nothing is
    built, and ShardedTensor and DTensor are kept as `Opaque`.

    Args:
        what: names the file in messages.
    """

    def from_type(func: object, cls: object, args: object, state: object) -> object:
        """Keep ShardedTensor and DTensor as `Opaque`; handle other classes of tensors as `torch_zip.rebuild_from_type`
        does.

        Raises:
            Unsafe, Unsupported, Corrupt: as that does.
        """
        if (
            isinstance(cls, Global)
            and cls.module.startswith("torch.distributed.")
            and cls.name in ("ShardedTensor", "DTensor")
        ):
            out = Opaque(cls, args if isinstance(args, tuple) else ())
            out.state = state
            return out
        return torch_zip.rebuild_from_type(what, func, cls, args, state)

    def get(obj: object, name: object) -> Any:
        """Resolve a pickled getattr: ShardedTensor.ProcessGroupState is pickled so, and by some versions of Python the
        memory format too.

        Raises:
            Unsafe: it refers to nothing that a checkpoint needs.
        """
        if obj is memory_format:
            return formats(obj, name)
        if isinstance(obj, Global) and obj.module.startswith(_SHARDED) and name != "ProcessGroupState":
            raise Unsafe(f"{what}: the pickle takes {short(name)} of {short(obj)}.", code="CKPT0701")
        if (found := resolve_attribute(obj, name)) is None:
            raise Unsafe(f"{what}: the pickle calls getattr({short(obj)}, {short(name)}).", code="CKPT0701")
        return found

    def memory_format(number: object) -> Any:
        """Return the number of a memory format, in the place of torch's class of them."""
        return number

    formats = make_enum_stand_ins((memory_format, {name: k for k, name in enumerate(MEMORY_FORMATS)}))[
        "builtins", "getattr"
    ]
    out: dict[tuple[str, str], Any] = {("torch._tensor", "_rebuild_from_type_v2"): from_type}
    out.update(torch_zip.make_size_stand_in(what))
    for builtins in ("__builtin__", "builtins"):
        out[builtins, "getattr"] = get
    for module in (f"{_SHARDED}.metadata", "torch.distributed.checkpoint.metadata"):
        for name in ("MEM_FORMAT_ENCODING", "_MEM_FORMAT_ENCODING"):
            out[module, name] = memory_format
    return out


def _get_attributes(x: object) -> dict[str, Any]:
    """Return {name: value} of an instance's attributes, pickled as its __dict__ or as (None, {slot: value}); {} for
    anything else."""
    state = x.state if isinstance(x, Opaque) else None
    if isinstance(state, tuple) and len(state) == 2 and all(isinstance(s, dict | None) for s in state):
        return {**(state[0] or {}), **(state[1] or {})}
    return state if isinstance(state, dict) else {}


def is_sharded(x: object) -> bool:
    """Return whether an object from a pickle is a ShardedTensor or DTensor."""
    return isinstance(x, Opaque) and x.cls.name in ("ShardedTensor", "DTensor")


def get_local_tensor(x: Opaque) -> Any:
    """Return the local tensor of a DTensor, on the rank that pickled it; None for a ShardedTensor, which may have
    several."""
    return _get_attributes(x).get("_local_tensor")


def read_shards(x: Opaque, key: str, read_at: ReadAt, what: str, tables: dict[int, Boxes]) -> Shards:
    """Return what one rank's file holds of a ShardedTensor or DTensor.

    Args:
        x: the tensor, as pickled.
        key: its name, for messages.
        read_at: reads bytes (offset, length) of the file.
        what: names the file in messages.
        tables: {id of a pickled list of all shards: its boxes}, for lists that several tensors share; a new one is
            added.

    Raises:
        Corrupt: it contradicts itself.
        Unsupported: it has a placement that a checkpoint cannot hold, or parts that are tensor subclasses.
    """
    try:
        return _read_sharded_tensor(x, tables) if x.cls.name == "ShardedTensor" else _read_dtensor(x, read_at, what)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as e:
        raise Corrupt(
            f'{what}: "{key}" is a {x.cls.name} that does not hold together ({type(e).__name__}: {e}).', code="CKPT0407"
        ) from None


def _read_sharded_tensor(x: Opaque, tables: dict[int, Boxes]) -> Shards:
    """Return what one rank holds of a pickled ShardedTensor.

    Args:
        x: the tensor, as pickled.
        tables: {id of a pickled list of all shards: its boxes}; a new one is added.

    Raises:
        ValueError, KeyError, TypeError, IndexError, AttributeError: it contradicts itself, or is malformed.
    """
    local, meta, group = x.state[:3]
    fields = _get_attributes(meta)
    shape = _check_sizes(fields["size"])
    dtype = fields["tensor_properties"].state[0].name
    table = fields["shards_metadata"]
    if id(table) not in tables:
        entries = map(_get_attributes, table)
        tables[id(table)] = frozenset(
            (_check_sizes(s["shard_offsets"]), _check_sizes(s["shard_sizes"])) for s in entries
        )
    listed = tables[id(table)]
    pieces = []
    for shard in map(_get_attributes, local):
        tensor, place = shard["tensor"], _get_attributes(shard["metadata"])
        start, size = _check_sizes(place["shard_offsets"]), _check_sizes(place["shard_sizes"])
        if not isinstance(tensor, StoredTensor) or tensor.shape != size or (start, size) not in listed:
            raise ValueError(f"a shard at {start} of size {size} that its table does not have")
        dtype = tensor.dtype
        pieces.append((start, tensor))
    ranks = _get_attributes(group)
    rank, world = ranks.get("global_rank"), ranks.get("global_world_size")
    where = (ranks["local_rank"], ranks["local_world_size"]) if "local_rank" in ranks else None
    return Shards(dtype, shape, pieces, rank, world, where, listed)


def _read_dtensor(x: Opaque, read_at: ReadAt, what: str) -> Shards:
    """Return what one rank holds of a pickled DTensor: its local tensor, and the boxes of the complete tensor that
    follow from mesh and placements.

    Args:
        x: the tensor, as pickled.
        read_at: reads bytes (offset, length) of the file.
        what: names the file in messages.

    Raises:
        ValueError, KeyError, TypeError, IndexError, AttributeError: it contradicts itself, or is malformed.
        Unsupported: it has a placement or a tensor subclass that is not supported.
    """
    fields = _get_attributes(x)
    tensor, stated = fields["_local_tensor"], fields["_spec"]
    spec = _get_attributes(stated) or dict(zip(("mesh", "placements", "tensor_meta"), stated.args, strict=True))
    meta = spec["tensor_meta"]
    shape = _check_sizes((meta.args or tuple(_get_attributes(meta).values()))[0])
    if is_subclass(tensor):
        raise Unsupported(
            f"{what}: holds a DTensor whose parts are {tensor.args[1]}, which ckpttool joins only where "
            "torch.distributed.checkpoint saved them. Save with that, or leave this component out.",
            code="CKPT0319",
        )
    if not isinstance(tensor, StoredTensor):
        raise ValueError("no local tensor")
    # what torch shows as its dtype and shape: arguments 1 and 2 of torch._utils._rebuild_wrapper_subclass
    shown = (x.args[1].name, _check_sizes(x.args[2]))
    if shown != (tensor.dtype, shape):
        raise ValueError(f"it shows {shown[0]} of shape {shown[1]}, and is {tensor.dtype} of shape {shape}")
    mesh = spec["mesh"]
    if mesh.call:
        sizes, at, rank, world = _read_mesh_call(*mesh.args)
    else:
        sizes, at, rank, world = _read_mesh(_get_attributes(mesh), read_at, what)
    kinds = [
        (p.cls.name, f.get("dim"), f.get("split_factor", 1)) for p in spec["placements"] for f in [_get_attributes(p)]
    ]
    if len(kinds) != len(sizes):
        raise ValueError(f"{len(kinds)} placements on a mesh of {len(sizes)} dimensions")
    order = list(range(len(kinds)))
    if not any(kind == "_StridedShard" for kind, *_ in kinds):
        for dim, dims in ((e.args[0], e.args[1]) for e in spec.get("shard_order") or () if isinstance(e, Opaque)):
            inside = iter(dims)
            order = [next(inside) if kinds[d][1] == dim else d for d in order]
    slice_at, slices = 0, 1
    cuts = []
    for d in order:
        kind, dim, split = kinds[d]
        if kind == "Replicate":
            continue
        if kind not in ("Shard", "_StridedShard") or type(dim) is not int:
            raise Unsupported(
                f"{what}: holds a DTensor with placement {kind}, which a checkpoint cannot hold.", code="CKPT0319"
            )
        cuts.append(PlacementCut(dim, sizes[d], at[d], split if kind == "_StridedShard" else 1))
        slice_at, slices = slice_at * sizes[d] + at[d], slices * sizes[d]
    pieces, box = compute_local_pieces(shape, cuts)
    if tensor.shape != box and prod(tensor.shape) + prod(box):
        raise ValueError(f"a local tensor of {tensor.shape} where mesh and placements leave {box}")
    held = [(p.start, _slice_local_tensor(tensor, p)) for p in pieces if prod(p.shape) or not shape]
    return Shards(tensor.dtype, shape, held, rank, world, (slice_at, slices))


def _slice_local_tensor(tensor: StoredTensor, piece: ShardPiece) -> StoredTensor:
    """Return the box of a rank's local tensor that holds `piece` of the complete tensor, as a view of the same
    storage."""
    at = sum(a * s for a, s in zip(piece.local, tensor.strides, strict=True)) * ITEMSIZE[tensor.dtype]
    return tensor._replace(shape=piece.shape, at=tensor.at + at)


def _read_mesh(mesh: dict[str, Any], read_at: ReadAt, what: str) -> tuple[list[int], list[int], int | None, int | None]:
    """Read the attributes of a pickled DeviceMesh: (size of each dimension; the rank's coordinates; the rank, None
    where it does not say; number of ranks, None likewise).

    Args:
        mesh: {attribute: value}.
        read_at: reads bytes (offset, length) of the file.
        what: names the file in messages.

    Raises:
        ValueError: the coordinates do not fit the sizes.
        KeyError, TypeError, IndexError: an attribute is missing, or is something else.
        Unsupported, Corrupt: the tensor of ranks is too large, or damaged.
    """
    grid = mesh.get("mesh")
    if isinstance(grid, StoredTensor):  # torch < 2.10
        sizes = list(grid.shape)
    else:
        layout = _get_attributes(mesh["_layout"])
        axes = [_get_attributes(a)["shape"] for a in layout["axes"]] if "axes" in layout else layout["shape"]
        sizes = [prod(_flatten_ints(a)) for a in axes]
    at = list(mesh["_coordinate_on_dim"])
    if len(at) != len(sizes) or not all(type(c) is int and 0 <= c < n for c, n in zip(at, sizes, strict=True)):
        raise ValueError(f"coordinates {at} on a mesh of {sizes}")
    rank = mesh.get("_rank")
    ranks = grid if isinstance(grid, StoredTensor) else mesh.get("_rank_map")
    if rank is None and isinstance(grid, StoredTensor) and grid.dtype in ("int32", "int64"):
        item, k = ITEMSIZE[grid.dtype], boxes.flat_start(grid.shape, at)
        rank = int.from_bytes(inline_tensors(grid, read_at, what).data[k * item :][:item], "little")
    world = prod(ranks.shape) if isinstance(ranks, StoredTensor) and ranks is not grid else None
    return sizes, at, rank if type(rank) is int else None, world


def _read_mesh_call(device: object, ranks: Any, named: Any) -> tuple[list[int], list[int], int | None, int | None]:
    """Read the arguments of the pickled call that creates a one-dimensional DeviceMesh (`make_mesh`): ([size of the
    mesh], [the rank's coordinate], the rank, number of ranks), the last two never None.

    Args:
        device: type of the devices, which is ignored.
        ranks: the ranks in the mesh: 0, 1, ...
        named: the keyword arguments, {name: value}.

    Raises:
        ValueError: the ranks are not consecutive from 0, or the rank is not among them.
        KeyError, TypeError: an argument is missing or malformed.
    """
    rank, world = named["_rank"], len(ranks)
    if type(rank) is not int or not 0 <= rank < world or list(ranks) != list(range(world)):
        raise ValueError(f"rank {short(rank)} on a mesh of {short(ranks)}")
    return [world], [rank], rank, world


def _flatten_ints(x: object) -> list[int]:
    """Return the integers in nested tuples or lists, in no particular order.

    Raises:
        ValueError: there are more than a mesh has, as in a list that contains itself, or something else is among them.
    """
    out: list[int] = []
    left = [x]
    for _ in range(4096):
        if not left:
            return out
        y = left.pop()
        if type(y) is int:
            out.append(y)
        elif isinstance(y, (tuple, list)) and len(y) <= 64:
            left += y
        else:
            break
    raise ValueError(f"{short(x)} is not the shape of a mesh")


def _check_sizes(x: object) -> tuple[int, ...]:
    """Return a pickled tuple or list of sizes or offsets as a tuple.

    Raises:
        ValueError: it is not up to 64 integers from 0 on.
    """
    if isinstance(x, (tuple, list)) and len(x) <= 64 and all(type(n) is int and n >= 0 for n in x):
        return tuple(x)
    raise ValueError(f"{short(x)} is not a size")


# --------------------------------------------------------------------------------------------------------- writing


class ShardTable:
    """The shards of 1-D tensors of one job as ShardedTensors list them; made once, since pickles then share them.

    A rank's own shard has a record of its own beside that list, as torch pickles it, so that the list is the same on
    all ranks.
    """

    def __init__(self, world: int) -> None:
        self.world = world
        self.places = [_make_remote_device(r) for r in range(world)]
        self.specs: dict[str, Opaque] = {}
        self.lists: dict[tuple[tuple[int, int], ...], CommonList] = {}

    def shards(self, bounds: tuple[tuple[int, int], ...]) -> CommonList:
        """Return the ShardMetadata of a 1-D tensor's shards, of all ranks that hold elements, as a list that is pickled
        once and copied from then on. For the same bounds it is the same object.

        Args:
            bounds: for each rank, (first element of its shard, end) in the whole tensor.
        """
        if bounds not in self.lists:
            held = [_make_shard_metadata(p, a, b) for p, (a, b) in zip(self.places, bounds, strict=True) if a < b]
            self.lists[bounds] = CommonList(held)
        return self.lists[bounds]

    def spec(self, key: str) -> Opaque:
        """Return the pickled ChunkShardingSpec of a tensor. Each tensor has its own list of placements, since shared
        references in a pickle may not expand to more than a multiple of its bytes (`pickles.load`).

        Args:
            key: name of the tensor.
        """
        if key not in self.specs:
            fields = {"dim": 0, "placements": CommonList(self.places)}
            chunks = "torch.distributed._shard.sharding_spec.chunk_sharding_spec"
            self.specs[key] = _make_instance(chunks, "ChunkShardingSpec", fields)
        return self.specs[key]


def make_sharded_tensor(
    table: ShardTable, key: str, bounds: tuple[tuple[int, int], ...], rank: int, ref: TensorRef | None, dtype: str
) -> Opaque:
    """Make the record of a 1-D ShardedTensor as a rank pickles it.

    Args:
        table: the shards of the tensors of the job.
        key: the name of the tensor.
        bounds: (first element, end) by rank.
        rank: the rank that the file is of.
        ref: its own shard; None where it holds nothing.
        dtype: torch's name of the dtype.
    """
    cls, kind = Global(f"{_SHARDED}.api", "ShardedTensor"), Global("torch", dtype)
    size, shards = bounds[-1][1], table.shards(bounds)
    strided = Opaque(Global("torch.serialization", "_get_layout"), ("torch.strided",), call=True)
    local = []
    if ref is not None:
        own = _make_shard_metadata(_make_remote_device(rank), *bounds[rank])
        local.append(_make_instance(f"{_SHARDED}.shard", "Shard", (None, {"tensor": ref, "metadata": own})))
    memory = Opaque(Global(f"{_SHARDED}.metadata", "MEM_FORMAT_ENCODING"), (0,), call=True)
    properties = _make_instance(f"{_SHARDED}.metadata", "TensorProperties", (kind, strided, True, memory, False))
    shape = Opaque(Global("torch", "Size"), ((size,),), call=True)
    about = {"shards_metadata": shards, "size": shape, "tensor_properties": properties}
    meta = _make_instance(f"{_SHARDED}.metadata", "ShardedTensorMetadata", about)
    # ShardedTensor.ProcessGroupState is a class inside a class, which protocol 2 spells as a call of getattr
    nested: Any = Opaque(Global("__builtin__", "getattr"), (cls, "ProcessGroupState"), call=True)
    group = Opaque(nested, ())
    group.state = {
        "local_rank": rank,
        "global_rank": rank,
        "local_world_size": table.world,
        "global_world_size": table.world,
    }
    wrapper = (cls, kind, (size,), (1,), 0, strided, Opaque(Global("torch", "device"), ("cpu",), call=True), True)
    return Opaque(
        Global("torch._tensor", "_rebuild_from_type_v2"),
        (
            Global("torch._utils", "_rebuild_wrapper_subclass"),
            cls,
            wrapper,
            (local, meta, group, table.spec(key), False),
        ),
        call=True,
    )


def make_mesh(device: str, world: int, rank: int) -> Opaque:
    """Return the pickled record of a one-dimensional DeviceMesh, "fsdp", on one rank: a call of its constructor that
    creates no process group, and the name of the group of all ranks.

    Args:
        device: type of the devices, such as "cuda".
        world: number of ranks.
        rank: the rank that the file is of.
    """
    cls = Global("torch.distributed.device_mesh", "DeviceMesh")
    constructor: Any = Opaque(Global("functools", "partial"), (cls,), call=True)
    constructor.state = (cls, (), {"mesh_dim_names": ("fsdp",), "_init_backend": False, "_rank": rank}, None)
    out = Opaque(constructor, (device, list(range(world))), call=True)
    out.state = {"_dim_group_names": ["0"]}
    return out


def make_dtensor(mesh: Opaque, shape: tuple[int, ...], local: object, dtype: str) -> Opaque:
    """Return the pickled record of a DTensor that is sharded along dimension 0.

    Args:
        mesh: what `make_mesh` returned; all tensors of a file share one.
        shape: of the complete tensor.
        local: the rows of this rank, as they are pickled.
        dtype: torch's name of the dtype.
    """
    cls, kind, stride = Global("torch.distributed.tensor", "DTensor"), Global("torch", dtype), boxes.strides(shape)
    described = "torch.distributed.tensor._dtensor_spec"
    meta = Opaque(Global(described, "TensorMeta"), (Opaque(Global("torch", "Size"), (shape,), call=True), stride, kind))
    rows = _make_instance("torch.distributed.tensor.placement_types", "Shard", {"dim": 0})
    spec = Opaque(Global(described, "DTensorSpec"), (mesh, (rows,), meta), call=True)
    strided = Opaque(Global("torch.serialization", "_get_layout"), ("torch.strided",), call=True)
    device = Opaque(Global("torch", "device"), ("cpu",), call=True)
    wrapper = (cls, kind, shape, stride, 0, strided, device, False)
    return Opaque(
        Global("torch._tensor", "_rebuild_from_type_v2"),
        (
            Global("torch._utils", "_rebuild_wrapper_subclass"),
            cls,
            wrapper,
            (None, {"_local_tensor": local, "_spec": spec}),
        ),
        call=True,
    )


def _make_instance(module: str, name: str, state: object) -> Opaque:
    """Make the record of an instance of class `name` in `module`, with a state."""
    out = Opaque(Global(module, name), ())
    out.state = state
    return out


def _make_remote_device(rank: int) -> Opaque:
    """Return the pickled record of a torch.distributed._remote_device, the placement of a rank's shard."""
    device = Opaque(Global("torch", "device"), ("cpu",), call=True)
    fields = {"_worker_name": None, "_rank": rank, "_device": device}
    return _make_instance("torch.distributed.remote_device", "_remote_device", fields)


def _make_shard_metadata(place: Opaque, a: int, b: int) -> Opaque:
    """Return the pickled record of a ShardMetadata for elements [a, b).

    Args:
        place: the placement, a pickled _remote_device.
        a, b: first element and end.
    """
    fields = {"shard_offsets": [a], "shard_sizes": [b - a], "placement": place}
    return _make_instance("torch.distributed._shard.metadata", "ShardMetadata", (None, fields))
