"""Tensor subclasses in pickles (torchao's optimizer states and quantised weights), taken apart and put together again.

torch pickles an object of a subclass that has no storage of its own as

    torch._tensor._rebuild_from_type_v2(torch._utils._rebuild_wrapper_subclass, cls,
        (cls, dtype, size, stride, storage_offset, layout, device, requires_grad), state)

where `state` is the object's __dict__, with the tensors that it is made of (torch/_tensor.py, `_reduce_ex_internal`).
The call is kept as an `Opaque`; `split_subclass` makes of it the value that index/composites.py describes and the
tensors inside, and `put_together` the call again. `dense_inside` knows the classes that only accompany a dense weight
through training.

TransformerEngine's quantised tensors are pickled as a call of a function of their own with what they are made of
(`_CALLS`); `call_of_transformer_engine` turns that into the call above, and `rebuild_call` back. Source:
TransformerEngine 2.20, pytorch/tensor (`__reduce_ex__` of each class).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import Corrupt, Unsupported, argument
from ..index import boxes
from ..index.checkpoint import joined
from ..index.composites import Composite, class_label, has_padded_scales
from .pickles import Global, Opaque, map_children, short

__all__ = [
    "REBUILD",
    "TRANSFORMER_ENGINE",
    "WRAPPER",
    "call_of_transformer_engine",
    "dense_inside",
    "is_subclass",
    "placeholder",
    "put_together",
    "rebuild_call",
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
    """Whether something out of a pickle is an object of a tensor subclass."""
    return isinstance(x, Opaque) and x.call and x.cls == REBUILD and x.args[:1] == (WRAPPER,)


def dense_inside(cls: Global, state: object) -> Any:
    """Return the dense tensor that an object of a training wrapper, a class of torchao around a dense weight, holds in
    its pickled state; None for all other classes."""
    name = _DENSE.get(cls.name)
    if name is None or cls.module.partition(".")[0] != "torchao" or not isinstance(state, dict):
        return None
    return state.get(name)


def call_of_transformer_engine(name: str, args: tuple[Any, ...], what: str) -> tuple[Any, ...]:
    """Turn the arguments with which TransformerEngine pickles a quantised tensor into those of `REBUILD`.

    Args:
        name: the class of the tensor.
        args: what its function is called with.
        what: names the file in messages.

    Raises:
        Corrupt: no version of TransformerEngine calls it so.
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


def placeholder(name: str) -> Opaque:
    """Make what stands, in the value that describes a tensor subclass, for the tensor `name` inside it."""
    return Opaque(_PLACEHOLDER, (name,), call=True)


def split_subclass(x: Opaque, kind: type, what: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a pickled object of a tensor subclass: (the value that describes it, with a placeholder for each tensor
    inside; {name: tensor inside}).

    The value has "class", "dtype", "shape", "tensors" (their names), "state", and "stride" and "requires_grad" where
    they are not the usual.

    Args:
        kind: the Python class by which tensors inside are recognised.
        what: names the object in messages.

    Raises:
        Corrupt: it is not pickled as torch does.
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


def _replace_tensors(x: Any, at: tuple[str, ...], kind: type, tensors: dict[str, Any]) -> Any:
    """Return a tree with a placeholder for every tensor in it, which is added to `tensors`, {name: tensor}, under the
    name of its place.

    Args:
        at: the keys that lead to the tree.
        kind: the Python class by which tensors are recognised.
    """
    if isinstance(x, kind):
        name = ".".join(at)
        tensors[name] = x
        return placeholder(name)
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


def put_together(found: Composite, tensors: Mapping[str, object]) -> Opaque:
    """Make the pickled call that makes a tensor subclass again.

    Args:
        found: the tensor subclass.
        tensors: {name of a tensor inside: what stands for it in the pickle to write}.

    Raises:
        Unsupported: it is an object on some ranks only, and a plain tensor on others.
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
    return rebuild_call(found.about, tensors)


def rebuild_call(about: Mapping[str, Any], tensors: Mapping[str, Any]) -> Opaque:
    """Make the pickled call that rebuilds a tensor subclass.

    Args:
        about: the value that describes it.
        tensors: {name of a tensor inside: what stands for it in the pickle to write}.
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
