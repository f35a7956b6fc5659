"""Tensor subclasses in pickles (torchao's optimizer states and quantised weights), taken apart and put together again.

torch pickles an object of a subclass that has no storage of its own as

    torch._tensor._rebuild_from_type_v2(torch._utils._rebuild_wrapper_subclass, cls,
        (cls, dtype, size, stride, storage_offset, layout, device, requires_grad), state)

where `state` is the object's __dict__, with the tensors that it is made of (torch/_tensor.py, `_reduce_ex_internal`).
The call is kept as an `Opaque`; `split_subclass` makes of it the value that index/composites.py describes and the
tensors inside, and `make_composite_call` the call again. `get_dense_tensor` knows the classes that only accompany a
dense weight through training.

TransformerEngine's quantised tensors are pickled as a call of a function of their own with what they are made of
(`_CALLS`); `convert_transformer_engine_args` turns that into the call above, and `make_rebuild_call` back. Source:
TransformerEngine 2.20, pytorch/tensor (`__reduce_ex__` of each class).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import Corrupt, Unsupported, argument
from ..index import boxes
from ..index.checkpoint import joined
from ..index.composites import Composite, SubclassFacts, class_label, has_padded_scales
from .pickles import Global, Opaque, map_children, short

__all__ = [
    "REBUILD",
    "TRANSFORMER_ENGINE",
    "WRAPPER",
    "convert_transformer_engine_args",
    "get_dense_tensor",
    "is_subclass",
    "make_composite_call",
    "make_placeholder",
    "make_rebuild_call",
    "split_subclass",
]

REBUILD = Global("torch._tensor", "_rebuild_from_type_v2")
WRAPPER = Global("torch._utils", "_rebuild_wrapper_subclass")
_SIZE = Global("torch", "Size")
_PLACEHOLDER = Global("ckpttool", "tensor")

_ROWS_AND_COLUMNS = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
#: {class of TransformerEngine: (module, function that makes its objects, names of the arguments)}; some are newer than
#: others, and come last.
_CALLS = {
    "Float8Tensor": (
        "float8_tensor",
        "_make_float8_tensor_in_reduce_ex",
        ("data", "fp8_dtype", "fp8_scale_inv", "dtype", "shape", "data_transpose"),
    ),
    "MXFP8Tensor": (
        "mxfp8_tensor",
        "_make_mxfp8_tensor_in_reduce_ex",
        (*_ROWS_AND_COLUMNS, "fp8_dtype", "dtype", "shape", "quantizer", "with_gemm_swizzled_scales"),
    ),
    "Float8BlockwiseQTensor": (
        "float8_blockwise_tensor",
        "_make_float8_blockwise_tensor_in_reduce_ex",
        ("shape", *_ROWS_AND_COLUMNS, "fp8_dtype", "dtype", "quantizer", "is_2D_scaled", "data_format"),
    ),
    "NVFP4Tensor": (
        "nvfp4_tensor",
        "_make_nvfp4_tensor_in_reduce_ex",
        (
            "shape",
            *_ROWS_AND_COLUMNS,
            *("amax_rowwise", "amax_columnwise", "fp4_dtype", "dtype", "quantizer", "with_gemm_swizzled_scales"),
            *("row_scaled_nvfp4", "nvfp4_use_4over6", "nvfp4_e4m3_max"),
        ),
    ),
}
_TENSORS = "transformer_engine.pytorch.tensor"
#: {(module, function): the class whose objects it makes}.
TRANSFORMER_ENGINE = {(f"{_TENSORS}.{module}", function): name for name, (module, function, _) in _CALLS.items()}

#: torchao's classes whose object is a dense weight and how to compute with it, and the attribute with the weight
#: (torchao/float8/fsdp_utils.py, prototype/moe_training/tensor.py, prototype/quantized_training).
_DENSE = {
    "WeightWithDynamicFloat8CastTensor": "_tensor",
    "WeightWithDelayedFloat8CastTensor": "_tensor",
    "MXFP8TrainingWeightWrapperTensor": "_data",
    "Float8TrainingWeightWrapperTensor": "_data",
    "ScaledGroupedMMTensor": "_data",
    "Int8MixedPrecisionTrainingLinearWeight": "_data",
    "BitNetTrainingLinearWeight": "_data",
}


def is_subclass(x: object) -> bool:
    """Return whether an object from a pickle is an instance of a tensor subclass, pickled as a call that rebuilds
    it."""
    return isinstance(x, Opaque) and x.call and x.cls == REBUILD and x.args[:1] == (WRAPPER,)


def get_dense_tensor(cls: Global, state: object) -> object:
    """Return the dense tensor inside an object of one of torchao's training wrappers, classes that only accompany a
    dense weight; None for all other classes.

    Args:
        cls: class of the object.
        state: its pickled state.
    """
    name = _DENSE.get(cls.name)
    if name is None or cls.module.partition(".")[0] != "torchao" or not isinstance(state, dict):
        return None
    return state.get(name)


def convert_transformer_engine_args(name: str, args: tuple[object, ...], what: str) -> tuple[object, ...]:
    """Convert the arguments of the call that TransformerEngine pickles for a quantised tensor to those of `REBUILD`:
    (`WRAPPER`, class, arguments of `WRAPPER`, state).

    Args:
        name: name of the tensor's class.
        args: the arguments of the pickled call.
        what: names the file in messages.

    Raises:
        Corrupt: no version of TransformerEngine writes such a call.
    """
    module, function, names = _CALLS[name]
    cls = Global(f"{_TENSORS}.{module}", name)
    state = dict(zip(names, args, strict=False))
    dtype, shape = state.pop("dtype", None), state.pop("shape", None)
    size = shape.args[0] if isinstance(shape, Opaque) and shape.cls == _SIZE and shape.args else shape
    if len(args) > len(names) or not isinstance(size, tuple) or not all(type(k) is int and k >= 0 for k in size):
        raise Corrupt(
            f"{what}: {function} is called with {short(args)}, which no TransformerEngine does.", code="CKPT0407"
        )
    return WRAPPER, cls, (cls, dtype, size, boxes.strides(size), 0, None, None, False), state


def make_placeholder(name: str) -> Opaque:
    """Return the object that replaces the inner tensor `name` in the value that describes a tensor subclass."""
    return Opaque(_PLACEHOLDER, (name,), call=True)


def split_subclass(x: Opaque, kind: type, what: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a pickled object of a tensor subclass: (the value that describes it, with placeholders for the inner
    tensors; {name: inner tensor}).

    The value has the keys "class", "dtype", "shape", "tensors" (their names) and "state"; "stride" and "requires_grad"
    only where they are not the default.

    Args:
        x: the object.
        kind: the Python class of inner tensors.
        what: names the object in messages.

    Raises:
        Corrupt: torch does not pickle an object so.
    """
    _, cls, args, state = x.args
    if not isinstance(args, tuple) or len(args) != 8 or args[0] != cls:
        raise Corrupt(
            f"{what}: a {cls} is put together from {short(args)}; torch does not write that.", code="CKPT0407"
        )
    _, dtype, shape, stride, offset, *_ = args
    sizes = all(isinstance(s, tuple) and all(type(k) is int and k >= 0 for k in s) for s in (shape, stride))
    if not isinstance(dtype, Global) or not sizes or len(shape) != len(stride) or offset != 0:
        raise Corrupt(
            f"{what}: a {cls} is put together from {short(args)}; torch does not write that.", code="CKPT0407"
        )
    if not isinstance(state, dict):
        raise Corrupt(f"{what}: the state of a {cls} is {short(state)}.", code="CKPT0407")
    tensors: dict[str, Any] = {}
    kept = _replace_tensors(state, (), kind, tensors)
    about = {"class": cls, "dtype": dtype.name, "shape": list(shape), "tensors": list(tensors), "state": kept}
    if stride != boxes.strides(shape):
        about["stride"] = list(stride)
    if args[7]:
        about["requires_grad"] = True
    return about, tensors


def _replace_tensors(x: Any, at: tuple[str, ...], kind: type, tensors: dict[str, object]) -> Any:
    """Return a copy of a tree with a placeholder for every tensor.

    Args:
        x: the tree.
        at: the keys that lead to it; joined by dots, they name a tensor.
        kind: the Python class of tensors.
        tensors: gets {name: tensor}.
    """
    if isinstance(x, kind):
        name = ".".join(at)
        tensors[name] = x
        return make_placeholder(name)
    if isinstance(x, dict):
        return type(x)((k, _replace_tensors(v, (*at, str(k)), kind, tensors)) for k, v in x.items())
    if type(x) in (list, tuple):
        return type(x)(_replace_tensors(v, (*at, str(i)), kind, tensors) for i, v in enumerate(x))
    if isinstance(x, Opaque) and x.cls == _SIZE:
        return x.args[0]  # a tuple, as which its own code compares it
    if isinstance(x, Opaque):
        nested = is_subclass(x)
        args = (
            (*x.args[:3], _replace_tensors(x.args[3], at, kind, tensors))
            if nested
            else _replace_tensors(x.args, (*at, "args"), kind, tensors)
        )
        out = Opaque(x.cls, args, x.call)
        out.label = x.label
        out.state = _replace_tensors(x.state, at, kind, tensors)
        out.list_items = _replace_tensors(x.list_items, (*at, "items"), kind, tensors)
        out.dict_items = _replace_tensors(x.dict_items, (*at, "items"), kind, tensors)
        return out
    return x


def make_composite_call(found: Composite, tensors: Mapping[str, object]) -> Opaque:
    """Return the pickled call that rebuilds a tensor subclass.

    Args:
        found: the tensor subclass.
        tensors: {name of an inner tensor: what represents it in the pickle}.

    Raises:
        Unsupported: it is split among ranks so that no single object can hold it: with scales padded for each rank, or
            as a plain tensor on some ranks.
    """
    if "parts" in found.about and has_padded_scales(found.about):
        raise Unsupported(
            f'"{joined(found.path)}" is a {class_label(found.about)} whose scales are padded for the parts of ranks. '
            f"dcp carries it at the world size of the save; {argument('dequantize', ['*'])} writes plain numbers.",
            code="CKPT0319",
        )
    if "parts" in found.about:
        raise Unsupported(
            f'"{joined(found.path)}" is a {class_label(found.about)} on some ranks and a plain tensor on others, which '
            "one object cannot be. dcp carries it at the world size of the save; "
            f"{argument('dequantize', ['optim.*'])} writes plain numbers.",
            code="CKPT0319",
        )
    return make_rebuild_call(found.about, tensors)


def make_rebuild_call(about: SubclassFacts, tensors: Mapping[str, object]) -> Opaque:
    """Return the pickled call that rebuilds a tensor subclass.

    Args:
        about: the value that describes it, as `split_subclass` returns it.
        tensors: {name of an inner tensor: what represents it in the pickle}.
    """
    cls = Global(*about["class"])
    shape = tuple(about["shape"])
    if cls.module.startswith(f"{_TENSORS}."):
        _, function, names = _CALLS[cls.name]
        given = {
            **_insert_tensors(about["state"], tensors),
            "dtype": Global("torch", about["dtype"]),
            "shape": Opaque(_SIZE, (shape,), call=True),
        }
        return Opaque(Global(cls.module, function), tuple(given[n] for n in names if n in given), call=True)
    strided = Opaque(Global("torch.serialization", "_get_layout"), ("torch.strided",), call=True)
    device = Opaque(Global("torch", "device"), ("cpu",), call=True)
    stride = tuple(about.get("stride") or boxes.strides(shape))
    dtype = Global("torch", about["dtype"])
    args = (cls, dtype, shape, stride, 0, strided, device, about.get("requires_grad", False))
    return Opaque(REBUILD, (WRAPPER, cls, args, _insert_tensors(about["state"], tensors)), call=True)


def _insert_tensors(x: object, tensors: Mapping[str, object]) -> Any:
    """Return a tree with every placeholder in it replaced by its tensor in `tensors`, {name: tensor}."""
    if isinstance(x, Opaque) and x.cls == _PLACEHOLDER:
        return tensors[x.args[0]]
    return map_children(x, lambda part: _insert_tensors(part, tensors))
