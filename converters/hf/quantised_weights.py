"""Quantised weights of torchao in safetensors files, as torchao and transformers name them.

    layer._weight_qdata  layer._weight_scale      the tensors inside of `layer.weight`
    __metadata__["layer.weight"]                  JSON {"_type": "Float8Tensor", "_data": {attribute: value},
                                                  "_tensor_data_names": [...]}
    __metadata__["layer.bias"]                    JSON {"_type": "Tensor"}
    __metadata__["tensor_names"]                  JSON [all names]

In `_data` a dtype is {"_type": "torch.dtype", "_data": "bfloat16"}, a member of an enum {"_type": class, "_data": its
name}, and a dataclass {"_type": class, "_data": {field: value}}. Every shard has all of it.

Sources: torchao/prototype/safetensors/{safetensors_support,safetensors_utils}.py of 0.18; the attributes of the classes
in torchao/quantization/quantize_/workflows and torchao/prototype/mx_formats;
transformers/quantizers/quantizer_torchao.py of 5.23.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ckpttool import bounded_json
from ckpttool.errors import Corrupt, Unsupported
from ckpttool.formats import safetensors_header
from ckpttool.formats.pickles import Global, Opaque
from ckpttool.formats.subclasses import make_placeholder
from ckpttool.index import boxes
from ckpttool.index.checkpoint import TensorEntry
from ckpttool.index.composites import Composite, class_label
from ckpttool.storage.source import Source

__all__ = ["assemble_quantised_weights", "metadata", "name_inner_tensors"]

_NAMES = "tensor_names"
_QUANT, _MX = "torchao.quantization.", "torchao.prototype.mx_formats."


class _Class(NamedTuple):
    """A class of weights: its module as pickles name it, tensors that it always and may have, attributes as `_data` has
    them, and as __dict__ has."""

    module: str
    may: tuple[str, ...]
    data: tuple[str, ...]
    state: tuple[str, ...]


_CLASSES = {
    "Float8Tensor": _Class(
        "torchao.quantization",
        (),
        ("block_size", "mm_config", "act_quant_kwargs", "kernel_preference", "dtype"),
        ("qdata", "scale", "block_size", "mm_config", "act_quant_kwargs", "kernel_preference"),
    ),
    "Int8Tensor": _Class(
        "torchao.quantization",
        ("zero_point", "act_quant_scale", "act_quant_zero_point", "act_pre_scale"),
        ("act_quant_kwargs", "reduce_range", "block_size", "dtype"),
        (
            "qdata",
            "scale",
            "block_size",
            "zero_point",
            "act_quant_kwargs",
            "act_quant_scale",
            "act_quant_zero_point",
            "act_pre_scale",
            "reduce_range",
        ),
    ),
    "MXTensor": _Class(
        _MX + "mx_tensor",
        (),
        ("elem_dtype", "block_size", "orig_dtype", "kernel_preference", "act_quant_kwargs", "is_swizzled_scales"),
        (
            "qdata",
            "scale",
            "elem_dtype",
            "block_size",
            "orig_dtype",
            "kernel_preference",
            "act_quant_kwargs",
            "is_swizzled_scales",
        ),
    ),
    "NVFP4Tensor": _Class(
        _MX + "nvfp4_tensor",
        ("per_tensor_scale", "act_per_tensor_scale"),
        ("is_swizzled_scales", "use_triton_kernel", "act_quant_kwargs", "block_size", "orig_dtype"),
        (
            "qdata",
            "scale",
            "block_size",
            "orig_dtype",
            "per_tensor_scale",
            "act_per_tensor_scale",
            "is_swizzled_scales",
            "use_triton_kernel",
            "act_quant_kwargs",
        ),
    ),
}
#: Enums: their values are the names in small letters, or numbers.
_ENUMS = {
    "KernelPreference": (_QUANT + "quantize_.common.kernel_preference", None),
    "ScaleCalculationMode": (_MX + "config", None),
    "MappingType": (_QUANT + "quant_primitives", ("SYMMETRIC", "SYMMETRIC_NO_CLIPPING_ERR", "ASYMMETRIC")),
}
#: Dataclasses, by the modules that pickles name.
_DATACLASSES = {
    "PerRow": _QUANT + "granularity",
    "PerTensor": _QUANT + "granularity",
    "QuantizeTensorToFloat8Kwargs": _QUANT + "quantize_.workflows.float8.float8_tensor",
    "QuantizeTensorToInt8Kwargs": _QUANT + "quantize_.workflows.int8.int8_tensor",
    "QuantizeTensorToMXKwargs": _CLASSES["MXTensor"].module,
    "QuantizeTensorToNVFP4Kwargs": _CLASSES["NVFP4Tensor"].module,
}


def _to_flat_name(name: str, inside: str) -> str:
    """Return the name in the file of the tensor `inside` ("qdata", "scale", ...) of the weight `name`: "a.b.weight" has
    "a.b._weight_qdata"."""
    module, dot, last = name.rpartition(".")
    return f"{module}{dot}_{last}_{inside}"


# --------------------------------------------------------------------------------------------------------- writing


def name_inner_tensors(name: str, found: Composite) -> dict[str, TensorEntry]:
    """Return {name in the file: tensor} of the tensors inside a quantised weight.

    Raises:
        Unsupported: torchao has no names for its class.
    """
    if found.about["class"][1] not in _CLASSES or "." not in name:
        raise Unsupported(
            f'"{name}" is a {class_label(found.about)}, which torchao does not write to safetensors; it writes '
            f"{', '.join(_CLASSES)} in modules. dcp and full carry it as it is.",
            code="CKPT0319",
        )
    return {_to_flat_name(name, inside): t for inside, t in found.tensors.items()}


def metadata(objects: Mapping[str, Composite], names: Iterable[str]) -> dict[str, str]:
    """Return {name: JSON text}, the entries of a safetensors `__metadata__` that describe weights to torchao.

    There is one entry for each weight, quantised or not, and one that lists all names; without quantised weights there
    are none.

    Args:
        objects: {name in memory: quantised weight}.
        names: names of all weights, in memory.

    Raises:
        Unsupported: an attribute is of a class that is not known.
    """
    if not objects:
        return {}
    listed = list(names)
    out = {n: json.dumps(_describe_weight(n, objects[n]) if n in objects else {"_type": "Tensor"}) for n in listed}
    return {**out, _NAMES: json.dumps(listed)}


def _describe_weight(name: str, found: Composite) -> dict[str, object]:
    """Return the entry of torchao's `__metadata__` for a quantised weight: {"_type", "_data", "_tensor_data_names"}.

    Raises:
        Unsupported: it is of another version of torchao, or has an attribute that is not known.
    """
    kind = _CLASSES[found.about["class"][1]]
    given = {**found.about["state"], "dtype": Global("torch", found.dtype)}
    inside = [n for n in (*kind.may, "qdata", "scale") if n in found.tensors]
    if {*inside} != {*found.tensors} or not {*kind.data} <= given.keys():
        raise Unsupported(
            f'"{name}" is a {class_label(found.about)} of another version of torchao: {", ".join(given)}.',
            code="CKPT0329",
        )
    data = {k: _encode_attribute(given[k], name) for k in kind.data}
    return {"_type": found.about["class"][1], "_data": data, "_tensor_data_names": inside}


def _encode_attribute(x: Any, name: str) -> object:
    """Return an attribute of a quantised weight in the form in which torchao writes it as JSON.

    Args:
        x: the attribute as unpickled: plain data, a torch dtype, or an enum member or dataclass of torchao.
        name: the name of the weight, for the message.

    Raises:
        Unsupported: how torchao writes it is not known.
    """
    if isinstance(x, Global) and x.module == "torch":
        return {"_type": "torch.dtype", "_data": x.name}
    if isinstance(x, Opaque) and x.call and x.cls.name in _ENUMS:
        members = _ENUMS[x.cls.name][1]
        return {
            "_type": x.cls.name,
            "_data": str(x.args[0]).upper() if members is None else members[int(x.args[0]) - 1],
        }
    if isinstance(x, Opaque) and x.cls.name in _DATACLASSES and not x.call and isinstance(x.state, dict):
        return {"_type": x.cls.name, "_data": {k: _encode_attribute(v, name) for k, v in x.state.items()}}
    if isinstance(x, (list, tuple)) and not isinstance(x, Global):
        return [_encode_attribute(v, name) for v in x]
    if x is None or isinstance(x, (bool, int, float, str)):
        return x
    raise Unsupported(
        f'"{name}": ckpttool does not know how torchao writes {x!r} to safetensors. dcp and full carry it as it is.',
        code="CKPT0319",
    )


# --------------------------------------------------------------------------------------------------------- reading


def assemble_quantised_weights(
    source: Source, files: list[str], tensors: dict[str, TensorEntry], notes: list[str]
) -> dict[str, Composite]:
    """Return {name in memory: quantised weight}, assembled from the tensors by `__metadata__`; empty if there are none.

    Args:
        source: the folder.
        files: its files; the `__metadata__` of the first one is read.
        tensors: {name in the file: tensor}; the tensors inside quantised weights are removed from it.
        notes: gets the weights of unknown classes, whose tensors are left as they are.

    Raises:
        Corrupt: a tensor that the metadata names is not there, or it describes a weight as torchao does not.
    """
    if not any(re.search(r"(^|\.)_\w+_qdata$", n) for n in tensors):
        return {}
    meta = safetensors_header.read_header(source, files[0])[1]
    what = f"{source.root}/{files[0]}: __metadata__"
    names = _parse_entry(meta.get(_NAMES, "[]"), what)
    out: dict[str, Composite] = {}
    unknown = []
    for name in names if isinstance(names, list) else ():
        row = _parse_entry(meta[name], what) if isinstance(name, str) and name in meta else None
        if not isinstance(row, dict) or row.get("_type") in (None, "Tensor"):
            continue
        inside = row.get("_tensor_data_names")
        kind = _CLASSES.get(str(row["_type"]))
        if kind is None or not isinstance(row.get("_data"), dict) or not isinstance(inside, list):
            unknown.append(str(row["_type"]))
            continue
        if gone := [n for n in inside if _to_flat_name(name, str(n)) not in tensors]:
            raise Corrupt(
                f'{source.root}: "{_to_flat_name(name, str(gone[0]))}" is missing, a part of the {row["_type"]} '
                f'"{name}". '
                "Fetch the files again.",
                code="CKPT0419",
            )
        out[name] = _make_composite(
            name,
            str(row["_type"]),
            kind,
            row["_data"],
            {str(n): tensors.pop(_to_flat_name(name, str(n))) for n in inside},
            what,
        )
    if unknown:
        notes.append(
            f"{len(unknown)} quantised weights ({', '.join(dict.fromkeys(unknown))}) are read as the tensors that they "
            "are made of"
        )
    return out


def _parse_entry(text: str, what: str) -> object:
    """Parse the JSON of an entry of `__metadata__`; `what` names it in messages."""
    return bounded_json.parse(text.encode("utf-8", "surrogatepass"), what)


def _make_composite(
    name: str, cls: str, kind: _Class, data: dict[str, object], inside: dict[str, TensorEntry], what: str
) -> Composite:
    """Make a quantised weight from its inner tensors and its attributes in a file.

    Args:
        name: the name of the weight, in memory.
        cls: the name of the weight's class in torchao.
        kind: which tensors and attributes that class has.
        data: {attribute: value as torchao writes it in JSON}.
        inside: {name inside the weight, such as "qdata": tensor}.
        what: where tensors and attributes were read, for the message.

    Raises:
        Corrupt: they do not fit the class.
    """
    try:
        given = {k: _decode_attribute(v) for k, v in data.items()}
        dtype = given.get("dtype") or given["orig_dtype"]
        qdata = inside["qdata"]
        packed = cls == "NVFP4Tensor" or (cls == "MXTensor" and given["elem_dtype"].name == "float4_e2m1fn_x2")
        shape = [*qdata.shape[:-1], qdata.shape[-1] * 2] if packed else list(qdata.shape)
        state = {k: make_placeholder(k) if k in inside else given.get(k) for k in kind.state}
        ordered = {k: inside[k] for k in kind.state if k in inside}
        about: dict[str, object] = {
            "class": Global(kind.module, cls),
            "dtype": dtype.name,
            "shape": shape,
            "tensors": list(ordered),
            "state": state,
        }
        if cls == "MXTensor" and packed:
            about["stride"] = list(boxes.strides(qdata.shape))
    except (KeyError, AttributeError, TypeError, ValueError, IndexError) as e:
        raise Corrupt(
            f'{what}: "{name}" is described differently from how torchao does it ({type(e).__name__}: {e}).',
            code="CKPT0419",
        ) from None
    return Composite(("model", name), about, {k: replace(t, path=("model", name, k)) for k, t in ordered.items()})


def _decode_attribute(x: object) -> Any:
    """Return an attribute of a quantised weight from the form in which torchao writes it as JSON.

    The result is plain data, or what unpickling gives for a torch dtype, an enum member or a dataclass of torchao. This
    is the inverse of `_encode_attribute`.

    Raises:
        KeyError, ValueError, AttributeError, TypeError: torchao does not encode anything like that.
    """
    if isinstance(x, list):
        return [_decode_attribute(v) for v in x]
    if not isinstance(x, dict):
        return x
    cls, data = x["_type"], x["_data"]
    if cls == "torch.dtype":
        return Global("torch", str(data))
    if cls in _ENUMS:
        module, members = _ENUMS[cls]
        return Opaque(Global(module, cls), (data.lower() if members is None else members.index(data) + 1,), call=True)
    out = Opaque(Global(_DATACLASSES[cls], cls), ())
    out.state = {k: _decode_attribute(v) for k, v in data.items()}
    return out
