"""Weights whose bytes are codes: which tensors are codes, which are their scales, and in which scheme.

A number of such a weight is its code times a scale that another tensor holds, so neither means anything without the
other, and a cast of either makes other weights. They are known by their names, dtypes and shapes, in any layout:

    codes                     scale               scheme
    w            float8       w_scale_inv         fp8 of DeepSeek and transformers: blocks of 128 x 128
    w            float8, int8 w_scale             fp8, int8, mxfp8 (scales uint8 or e8m0) of compressed-tensors,
                 ModelOpt, FBGEMM
    w            uint8        w_scale             nvfp4 of ModelOpt, with w_scale_2; two codes a byte
    w_packed     int32        w_scale             integers of 4 or 8 bits of compressed-tensors, with w_shape,
                 w_zero_point, w_g_idx
    w_packed     uint8        w_scale             nvfp4 (with w_global_scale) and mxfp4 of compressed-tensors; two codes
                 a byte
    w_blocks     uint8        w_scales            mxfp4 of gpt-oss: [..., groups, 16]
    m.qweight    int32        m.scales            GPTQ, AWQ, with m.qzeros, m.g_idx
    m.weight     float8, int8 m.scale             DeepSeek's own files
    m.weight     int8         m.SCB               bitsandbytes, 8 bits
    m.weight     uint32       m.scales            MLX, 2 to 8 bits, with m.biases; [rows, columns * bits / 32]
    w            any          w.absmax            bitsandbytes, 4 bits, with w.quant_map, w.quant_state.*

`w` is the name of a parameter, "model.layers.0.mlp.up_proj.weight", and `m` of its module. A pair counts if the scale
has a shape that fits the codes. What config.json says (`read_quantization_config`) decides where names alone do not: a
plain float8 weight, or a parameter that is called "scale", is no code.

Sources: compressed_tensors/compressors 0.20; transformers/quantizers and integrations 5.23 (finegrained_fp8, mxfp4,
bitsandbytes, awq); modelopt/torch/export/quant_utils.py; mlx.core.quantize; DeepSeek-V3 inference/fp8_cast_bf16.py; OCP
Microscaling Formats 1.0 (groups of 32).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import NamedTuple

from .. import bounded_json
from ..by_fields import ByFields
from ..errors import CkpttoolError, argument
from ..index.checkpoint import FLOATING, Checkpoint, TensorEntry, joined
from ..index.composites import find_composites
from ..storage.source import Source
from . import Config

__all__ = [
    "OF_ACTIVATIONS",
    "OWN_CONFIGS",
    "Encoded",
    "Encodings",
    "Fault",
    "advise_dequantizing",
    "describe_schemes",
    "find_codes",
    "find_in_checkpoint",
    "find_in_tensors",
    "find_parameter_shapes",
    "read_model_dtype",
    "read_quantization_config",
]

_Shape = tuple[int, ...]
_Block = tuple[int, int]  # rows, columns

_FLOAT8 = frozenset(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"))
_EXPONENTS = frozenset(("uint8", "float8_e8m0fnu"))
_TWO_IN_A_BYTE = frozenset(("uint8", "int8", "float4_e2m1fn_x2"))
_CODES = _FLOAT8 | _TWO_IN_A_BYTE
#: Dtypes that the codes of other programs have besides: int64 is of counters and positions.
_OTHER_CODES = _CODES | {"int16", "uint16", "int32", "uint32"}


class _Pair(NamedTuple):
    """How names and dtypes of codes and their scale go together. Where `sure`, no other tensors have such names."""

    scale: str
    codes: str
    dtypes: frozenset[str]
    sure: bool = True

    @property
    def leaf(self) -> str:
        """Return the ending that makes the parameter's name of the scale's name without its `scale`: ".weight", or ""
        where the rest is the parameter's name already."""
        return ".weight" if self.codes in (".weight", ".qweight") else ""


_PAIRS = (
    _Pair("_scale_inv", "", _CODES),
    _Pair("_scale", "_packed", frozenset(("int32", "uint8"))),
    _Pair("_scale", "", _CODES, sure=False),
    _Pair("_scales", "_blocks", frozenset(("uint8",)), sure=False),
    _Pair(".scales", ".qweight", frozenset(("int32",))),
    _Pair(".scale", ".weight", _FLOAT8 | {"int8", "float4_e2m1fn_x2"}, sure=False),
    _Pair(".SCB", ".weight", frozenset(("int8",))),
    _Pair(".scales", ".weight", frozenset(("uint32",))),
    _Pair(".absmax", "", _CODES | FLOATING, sure=False),
)
_SCALES = tuple(pair.scale for pair in _PAIRS)
#: What inputs and outputs of a layer are quantised with, which a plain weight has no use for.
OF_ACTIVATIONS = (
    "input_scale",
    "input_zero_point",
    "input_global_scale",
    "output_scale",
    "output_zero_point",
    "activation_scale",
)
#: What else belongs to codes: after the name of the weight, and in its module.
_WITH_WEIGHT = (
    "_scale_2",
    "_global_scale",
    "_zero_point",
    "_shape",
    "_g_idx",
    "_format",
    ".quant_map",
    ".nested_absmax",
    ".nested_quant_map",
    ".quant_state.bitsandbytes__nf4",
    ".quant_state.bitsandbytes__fp4",
)
_WITH_MODULE = ("qzeros", "g_idx", "zero_point", "weight_format", *OF_ACTIVATIONS, "pre_quant_scale", "biases")
#: Scales of the cache of keys and values, beside weights that may be no codes.
_OF_CACHE = ("k_scale", "v_scale", "q_scale", "kv_scale")
#: Methods that may stand in the config of plain weights: they quantise when a model is loaded, or make tensor
#: subclasses.
_AT_LOAD = frozenset(("bitsandbytes", "torchao", "quanto", "hqq", "eetq", "higgs", "metal"))


#: Files beside config.json in which programs say how they have quantised: ModelOpt, AutoGPTQ, AutoAWQ.
OWN_CONFIGS = frozenset(("hf_quant_config.json", "quantize_config.json", "quant_config.json"))


@dataclass(frozen=True, eq=False, repr=False)
class Encoded(ByFields):
    """One weight that is codes.

    `scheme`    text for people
    `kind`      which formula gives its numbers (huggingface/decoding.py); "" where none is known
    `weight`    name of the parameter that it is
    `shape`     shape of that parameter; None where only the tensor `parts["shape"]`, or nothing, says it
    `parts`     {what it is: name of the tensor}: "codes" and "scale", and, where there are such tensors, what their
                names end with: "zero_point", "scale_2", "global_scale", "shape", "g_idx", "qzeros", "quant_map", ...
    `block`     (rows, columns) of the parameter that share a scale; None where the formula knows itself
    `bits`      of one code; None where neither dtypes nor the config say so
    `rounded`   dtype in which the reference multiplies, and so rounds, before it gives any other; "" is the one that
                is asked for
    `dtype`     dtype that the reference gives where neither the model nor the caller asks for one
    """

    scheme: str
    kind: str
    weight: str
    shape: _Shape | None
    parts: Mapping[str, str]
    block: _Block | None = None
    bits: int | None = None
    rounded: str = "float32"
    dtype: str = "bfloat16"
    rounds_scale: bool = False  # whether the scale, too, is rounded to `rounded`

    @property
    def scale(self) -> str:
        """Return the name of the tensor that has the scales of this weight."""
        return self.parts["scale"]


class Fault(NamedTuple):
    """Tensors of an encoding that is not whole, what is wrong, and whether that is `sure`: no other tensors have such
    names."""

    tensors: tuple[str, ...]
    text: str
    sure: bool


@dataclass(frozen=True, eq=False, repr=False)
class Encodings(ByFields):
    """The encoded weights of a checkpoint.

    `weights` {codes: what they are}; `belongs` {tensor: the codes that it belongs to}, the codes themselves included;
    `faults` what belongs to no whole encoding; `method` the quant_method of the config, None without one; `of` the
    number of weights, encoded or not.
    """

    weights: Mapping[str, Encoded] = field(default_factory=dict)
    belongs: Mapping[str, str] = field(default_factory=dict)
    faults: Sequence[Fault] = ()
    method: str | None = None
    of: int = 0

    def __bool__(self) -> bool:
        """Return whether there are encoded weights, or tensors that belong to no whole encoding (`faults`)."""
        return bool(self.weights or self.faults)

    @property
    def contradicted(self) -> bool:
        """Return whether the config says that the stored weights are codes, and yet there are neither encoded weights
        nor incomplete encodings (`faults`)."""
        return self.method is not None and self.method not in _AT_LOAD and not self and self.of > 0

    @cached_property
    def _faulty(self) -> dict[str, str]:
        """Return {tensor: what is wrong with its encoding}."""
        return {n: fault.text for fault in self.faults for n in fault.tensors}

    def describe(self, name: str) -> str:
        """Return a sentence on the role of a tensor in an encoding (codes, scale, ...); "" if it belongs to none."""
        of = self.belongs.get(name)
        if of is None:
            return f'"{name}" belongs to no whole encoding ({self._faulty[name]})' if name in self._faulty else ""
        if of not in self.weights:
            return f'"{name}" is a scale of encoded numbers'
        return f'"{name}" {"is codes" if name == of else f"belongs to the codes {of},"} in {self.weights[of].scheme}'

    def schemes(self) -> dict[str, int]:
        """Return {description: number of weights}. A description has the text of a scheme and the last part of its
        scales' names: "int8 (one scale a row), scales in weight_scale"."""
        out: dict[str, int] = {}
        for found in self.weights.values():
            text = f"{found.scheme}, scales in {found.scale.rpartition('.')[2]}"
            out[text] = out.get(text, 0) + 1
        return out

    def summary(self) -> str:
        """Return a line on how many weights are codes, and in which schemes."""
        return describe_schemes(len(self.weights), self.of, self.schemes())


def advise_dequantizing() -> str:
    """Return advice, as a sentence, for a layout that cannot hold quantised codes."""
    return (
        f"{argument('dequantize', ['*'])} makes numbers of them; layouts that keep dtypes, such as dcp or hf, carry "
        "them as they are."
    )


def describe_schemes(weights: int, of: int, schemes: Mapping[str, int]) -> str:
    """Return a text that says how many weights are quantised codes, and in which schemes.

    Args:
        weights: number of weights that are codes.
        of: number of all weights.
        schemes: {text of a scheme: number of weights}.
    """
    several = len(schemes) > 1
    listed = "; ".join(text + (f" ({n:,})" if several else "") for text, n in schemes.items())
    return f"{weights:,} of {of:,} weights are codes: {listed}"


def read_quantization_config(ckpt: Checkpoint, source: Source | None) -> Config | None:
    """Read the quantization_config of a checkpoint from the config next to it: that of config.json, or the content of
    ModelOpt's hf_quant_config.json. None if there is none.

    Args:
        ckpt: the checkpoint; the config that it holds itself comes first.
        source: the checkpoint's own folder; None if the checkpoint is one file in a folder of others.
    """
    for config in _iterate_configs(ckpt, source):
        if isinstance(found := config.get("quantization_config"), dict):
            return found
        if isinstance(own := config.get("quantization"), dict):  # ModelOpt's has quant_algo, MLX's group_size and bits
            return {"quant_method": "modelopt" if "quant_algo" in own else "mlx", **own}
    return None


def read_model_dtype(ckpt: Checkpoint, source: Source | None) -> str | None:
    """Return torch's name of the dtype in which the model computes ("bfloat16"), by the config next to a checkpoint;
    None if no config says it.

    Args:
        ckpt: the checkpoint; the config that it holds itself comes first.
        source: the checkpoint's own folder; None if the checkpoint is one file in a folder of others.
    """
    stated = (str(config.get(key)) for config in _iterate_configs(ckpt, source) for key in ("dtype", "torch_dtype"))
    return next((dtype for dtype in stated if dtype in FLOATING), None)


def _iterate_configs(ckpt: Checkpoint, source: Source | None) -> Iterator[Config]:
    """Yield the configs next to a checkpoint, the one that it holds itself first; after each one its text_config, if it
    has any. Damaged configs are skipped.

    Args:
        ckpt: the checkpoint.
        source: the checkpoint's own folder; None to yield only the config that the checkpoint holds itself.
    """
    for name in ("", "config.json", "hf_quant_config.json") if source is not None else ("",):
        found: object = ckpt.config
        try:
            if source is not None and name:
                found = bounded_json.parse(source.read_all(name, 16 << 20), name) if name in source.list() else None
        except CkpttoolError:  # damaged, or it cannot be listed: names and shapes tell most
            continue
        if isinstance(found, dict):
            yield found
            if isinstance(text := found.get("text_config"), dict):
                yield text


def find_codes(ckpt: Checkpoint, source: Source | None) -> Encodings:
    """Find the encoded weights of a checkpoint as the config next to it declares them.

    Args:
        ckpt: the checkpoint; the config that it holds itself comes first.
        source: the checkpoint's own folder; None if the checkpoint is one file in a folder of others.
    """
    return find_in_checkpoint(ckpt, read_quantization_config(ckpt, source))


def find_in_checkpoint(ckpt: Checkpoint, config: Config | None) -> Encodings:
    """Find the encoded weights of a checkpoint, by canonical name. Optimizer state and the tensors inside tensor
    subclasses are not searched.

    Args:
        ckpt: the checkpoint.
        config: its quantization_config; None if there is none.
    """
    inside = {joined(t.path) for c in find_composites(ckpt).values() for t in c.tensors.values()}
    tensors = {n: t for n, t in ckpt.tensors.items() if t.path[0] != "optim" and n not in inside}
    return find_in_tensors(tensors, config)


def find_in_tensors(tensors: Mapping[str, TensorEntry], config: Config | None = None) -> Encodings:
    """Find the encoded weights among tensors, {name: tensor}, in time linear in their number. `config` is their
    quantization_config, None if there is none."""
    config = config if isinstance(config, dict) else {}
    method = str(config.get("quant_method") or "of no name") if config else None
    quantised = method is not None and method not in _AT_LOAD
    said = _parse_quantization_config(config)
    # pairs of codes and scales, with the tensors that belong to them
    weights: dict[str, Encoded] = {}
    belongs: dict[str, str] = {}
    misfits: dict[str, str] = {}
    unfit: set[str] = set()
    for name in (n for n in tensors if n.endswith(_SCALES)):
        for pair, codes in _iterate_candidate_pairs(name, tensors):
            found = _match_scheme(pair, codes, name, tensors, said)
            if found is not None:
                parts = _find_parts(codes, name, pair, tensors)
                weights[codes] = _make_encoded(found, name[: -len(pair.scale)] + pair.leaf, parts, tensors, said)
                belongs |= dict.fromkeys(parts.values(), codes)
            elif pair.sure or quantised or (tensors[codes].dtype in _FLOAT8 and pair.scale == "_scale"):
                shapes = f"{list(tensors[name].shape)} for codes of {list(tensors[codes].shape)}"
                unfit |= {name, codes}
                misfits[name] = f'"{name}" {tensors[name].dtype} {shapes}'
            break
    if quantised:
        belongs |= {n: n for n in tensors if n.rpartition(".")[2] in _OF_CACHE and n not in belongs}
    # what should belong to a pair and does not
    lonely: dict[tuple[str, bool], list[str]] = {}
    left = {n: t for n, t in tensors.items() if n not in belongs and n not in unfit}
    unknown = dict.fromkeys(() if method is None else _list_unknown_codes(left))
    if unknown:
        lonely[f"codes and scales in a scheme of {method} that ckpttool does not know", False] = [*unknown]
    for name, t in left.items():
        if name not in unknown and (what := _describe_incomplete(name, t, tensors, quantised)):
            lonely.setdefault(what, []).append(name)
    faults = [
        Fault(tuple(names), f'{_describe_tensor_count(names)} {text}, first "{names[0]}"', sure)
        for (text, sure), names in lonely.items()
    ]
    if misfits:
        first = next(iter(misfits.values()))
        text = f"{_describe_tensor_count(list(misfits))} scales that do not fit their codes, first {first}"
        faults.insert(0, Fault(tuple(sorted(unfit)), text, sure=False))
    scales = {*misfits, *(n for (text, _), names in lonely.items() if text.startswith("scales") for n in names)}
    of = sum(n not in scales and (n not in belongs or n in weights) for n in tensors)
    return Encodings(weights, belongs, faults, method, of)


def _describe_tensor_count(names: Sequence[str]) -> str:
    """Return how a sentence about some tensors begins: "1 tensor holds", "5 tensors hold"."""
    return "1 tensor holds" if len(names) == 1 else f"{len(names):,} tensors hold"


def find_parameter_shapes(tensors: Mapping[str, TensorEntry], config: Config | None = None) -> dict[str, _Shape] | None:
    """Return {name: shape} of the parameters that some tensors encode or are; None if the shape of one does not
    follow from its codes. `config` is their quantization_config, None if there is none."""
    found = find_in_tensors(tensors, config)
    weights = {n: (w.weight, w.shape) for n, w in found.weights.items()}
    shapes = [weights.get(n, (n, t.shape)) for n, t in tensors.items() if n in weights or n not in found.belongs]
    known = {n: shape for n, shape in shapes if shape is not None}
    return None if any(shape is None for _, shape in shapes) else known


def _iterate_candidate_pairs(name: str, tensors: Mapping[str, TensorEntry]) -> Iterator[tuple[_Pair, str]]:
    """Yield (pair, name of the codes) for each kind of pair in which the tensor `name` may be the scale, by its name
    and the dtype of the codes."""
    for pair in _PAIRS:
        if name.endswith(pair.scale):
            codes = name[: -len(pair.scale)] + pair.codes
            if codes in tensors and tensors[codes].dtype in pair.dtypes:
                yield pair, codes


def _find_parts(codes: str, scale: str, pair: _Pair, tensors: Mapping[str, TensorEntry]) -> dict[str, str]:
    """Return {role: name} of the tensors that belong to some codes: "codes", "scale", and, where there are such
    tensors, what their names end with, such as "zero_point" (`Encoded.parts`).

    Args:
        codes: name of the codes.
        scale: name of their scale.
        pair: how the two names go together.
        tensors: {name: tensor} of all tensors of the model.
    """
    stem, module = scale[: -len(pair.scale)], codes.rpartition(".")[0]
    others = {end.lstrip("._"): stem + end for end in _WITH_WEIGHT}
    others = {leaf: f"{module}.{leaf}" for leaf in _WITH_MODULE} | {k: n for k, n in others.items() if n in tensors}
    return {"codes": codes, "scale": scale, **{k: n for k, n in others.items() if n in tensors}}


def _make_encoded(
    found: _Scheme, weight: str, parts: Mapping[str, str], tensors: Mapping[str, TensorEntry], said: _StatedScheme
) -> Encoded:
    """Describe a weight whose codes and scale match a scheme.

    Args:
        found: the scheme.
        weight: name of the parameter.
        parts: {role: name of the tensor}, with roles such as "codes" and "scale" (`Encoded.parts`).
        tensors: {name: tensor} of all tensors of the model.
        said: what the config states for all weights; None in a field for which it has no one answer.
    """
    wide = (stored := tensors[parts["scale"]].dtype) in FLOATING
    rounded, dtype = "float32", stored if stored in ("bfloat16", "float16") else "bfloat16"
    rounds_scale = False
    if found.kind in ("gptq", "gptq v2", "awq"):
        rounded = stored
    if parts["scale"].endswith("_scale") and "scale_2" not in parts:
        if rounds_scale := said.method == "modelopt":
            rounded = ""
        else:  # compressed-tensors computes in the scale's dtype, and FBGEMM's is float32
            rounded = dtype = stored if wide else "bfloat16"
    return Encoded(
        found.text, found.kind, weight, found.shape, parts, found.block, found.bits, rounded, dtype, rounds_scale
    )


# --------------------------------------------------------------------------------------------------------- schemes


class _Scheme(NamedTuple):
    """A scheme that codes and a scale match: its name for people, and what `Encoded` says of it."""

    text: str
    shape: _Shape | None
    kind: str = ""
    block: _Block | None = None
    bits: int | None = None


class _StatedScheme(NamedTuple):
    """What a config says of all its weights: the sizes of blocks with a scale each, bits of a number, numbers of a row
    that share a scale, the program (`quant_method`), and the format that GPTQ or AWQ have written (in small letters);
    None where it has no one answer."""

    block: _Block | None
    bits: int | None
    group: int | None
    method: str | None
    format: str | None


def _parse_quantization_config(config: Config) -> _StatedScheme:
    """Return what a quantization_config states for all weights; its form is that of transformers, or that of
    compressed-tensors with groups."""
    groups = config.get("config_groups")
    listed = [g.get("weights") for g in groups.values() if isinstance(g, dict)] if isinstance(groups, dict) else []
    rows = [w for w in listed if isinstance(w, dict)]
    sizes = [config.get("weight_block_size"), *(w.get("block_structure") for w in rows)]
    blocks = {
        tuple(size)
        for size in sizes
        if isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)
    }
    bits = {n for n in (config.get("bits"), *(w.get("num_bits") for w in rows)) if type(n) is int}
    groups_of = {n for w in (config, *rows) if type(n := w.get("group_size")) is int and n > 0}
    return _StatedScheme(
        blocks.pop() if len(blocks) == 1 else None,
        bits.pop() if len(bits) == 1 else None,
        groups_of.pop() if len(groups_of) == 1 else None,
        config.get("quant_method"),
        str(form).lower() if (form := config.get("checkpoint_format") or config.get("version")) else None,
    )


def _match_scheme(
    pair: _Pair, codes: str, scale: str, tensors: Mapping[str, TensorEntry], said: _StatedScheme
) -> _Scheme | None:
    """Return the scheme of codes and a scale; None where the scale's shape or dtype does not fit.

    Args:
        pair: how their names go together.
        codes: name of the codes.
        scale: name of the scale.
        tensors: {name: tensor} of all.
        said: what the config says of all weights.
    """
    c, s = tensors[codes], tensors[scale]
    if pair.scale == ".absmax":
        kind = next((k for k in ("nf4", "fp4") if f"{codes}.quant_state.bitsandbytes__{k}" in tensors), "4 bits")
        fits = f"{codes}.quant_map" in tensors and len(s.shape) == 1
        return _Scheme(f"bitsandbytes {kind}", None, "bitsandbytes 4", bits=4) if fits else None
    if pair.scale == ".SCB":
        fits = s.shape == c.shape[:1]
        return _Scheme("bitsandbytes int8 (one scale a row)", c.shape, "bitsandbytes 8", bits=8) if fits else None
    if pair.codes == "_blocks":
        if len(c.shape) < 3 or s.shape != c.shape[:-1] or c.shape[-1] != 16 or s.dtype != "uint8":
            return None
        shape = (*c.shape[:-3], c.shape[-2] * 32, c.shape[-3])  # transformers' parameter is transposed
        return _Scheme("mxfp4 (groups of 32)", shape, "transposed fp4", (32, 1), 4)
    if c.dtype == "uint32":
        return _match_mlx(c.shape, s.shape, said)
    if c.dtype == "int32":
        zeros = tensors.get(f"{scale.removesuffix('.scales')}.qzeros")
        if pair.codes == ".qweight":
            return _match_transposed(c.shape, s, zeros, said)
        return _match_packed_integers(c.shape, s, said)
    if c.dtype in _TWO_IN_A_BYTE and (fp4 := _match_fp4(c, s)) is not None:
        return fp4
    found = _find_granularity(c.shape, s.shape, said.block)
    if found is None or s.dtype not in FLOATING | _EXPONENTS or (pair.codes == "_packed"):
        return None
    how, block = found
    if c.dtype in _FLOAT8:
        name = "mxfp8" if s.dtype in _EXPONENTS and block == (1, 32) else "fp8"
        return _Scheme(f"{name} ({c.dtype}, {how})", c.shape, "blocks", block, 8)
    if c.dtype == "int8":
        return _Scheme(f"int8 ({how})", c.shape, "blocks", block, 8)
    packed = _Scheme(f"packed codes ({c.dtype}, {how})", None)
    return packed if how == "one scale each" or c.dtype != "uint8" else None


def _match_packed_integers(codes: _Shape, s: TensorEntry, said: _StatedScheme) -> _Scheme | None:
    """Return the scheme of integers that compressed-tensors packs in int32; None where the scale does not fit.

    Args:
        codes: shape of the codes.
        s: the scale.
        said: what the config says of all weights.
    """
    text = f"int{said.bits} packed in int32" if said.bits is not None else "integers packed in int32"
    if s.dtype not in FLOATING or not codes or not codes[-1]:
        return None
    fits = prod(s.shape) == 1 or (s.shape[:-1] == codes[:-1] and 0 < s.shape[-1] <= 16 * codes[-1])
    grouped = said.group is not None and len(s.shape) == len(codes) and s.shape[-1] > 1
    shape = (*codes[:-1], s.shape[-1] * said.group) if grouped and said.group is not None else None
    return _Scheme(text, shape, "packed integers", bits=said.bits) if fits else None


def _match_transposed(codes: _Shape, s: TensorEntry, zeros: TensorEntry | None, said: _StatedScheme) -> _Scheme | None:
    """Return the scheme of integers that GPTQ or AWQ packs in int32; None where the scale does not fit.

    GPTQ packs the rows, AWQ the columns of the transposed weight, whose scales are [groups, columns]; zero points are
    packed in the columns by both, and tell the bits.

    Args:
        codes: shape of the codes.
        s: the scale.
        zeros: the zero points; None where there are none.
        said: what the config says of all weights.
    """
    if s.dtype not in FLOATING or len(codes) != 2 or len(s.shape) != 2 or not codes[1]:
        return None
    groups, out = s.shape
    kind = {codes[1]: "gptq", 8 * codes[1]: "awq", 4 * codes[1]: "awq"}.get(out)
    if kind is None:
        return None
    packed = 0 if zeros is None or len(zeros.shape) != 2 else zeros.shape[1]
    bits = next((b for b in (2, 3, 4, 8) if packed and out * b == 32 * packed), said.bits)
    text = f"{kind} (int{bits} packed in int32)" if bits is not None else f"{kind} (integers packed in int32)"
    if bits not in (2, 3, 4, 8) or not groups:
        return _Scheme(text, None, bits=bits)
    width = codes[0] * 32 // bits if kind == "gptq" else codes[0]
    fits = said.group is not None and -(-width // said.group) == groups
    block = (1, said.group if fits and said.group is not None else -(-width // groups))
    # without zero points, or in another format, there is no formula
    formats = {("gptq", "gptq"): "gptq", ("gptq", "gptq_v2"): "gptq v2", ("awq", "gemm"): "awq"}
    form = said.format or ("gptq" if kind == "gptq" else "gemm")
    known = formats.get((kind, form), "") if packed and (kind == "gptq" or out == 8 * codes[1]) else ""
    if said.method is None and kind == "gptq":
        text, known = f"{text}, of a checkpoint_format that only its config.json says", ""
    return _Scheme(text, (out, width), known, block, bits)


def _match_mlx(codes: _Shape, scales: _Shape, said: _StatedScheme) -> _Scheme | None:
    """Return the scheme of MLX's weights; None where the scales do not fit.

    MLX has a scale for each group of 32, 64 or 128 numbers in a row. The parameter's shape needs the bits of the
    config; it is None where that does not tell them.

    Args:
        codes: shape of the codes.
        scales: shape of the scales.
        said: what the config says of all weights.
    """
    if len(codes) < 2 or scales[:-1] != codes[:-1]:
        return None
    if said.bits is None:
        return _Scheme("mlx", None)
    shape = (*codes[:-1], codes[-1] * 32 // said.bits) if said.bits > 0 else None
    return _Scheme(f"mlx ({said.bits} bits)", shape, bits=said.bits)


def _match_fp4(c: TensorEntry, s: TensorEntry) -> _Scheme | None:
    """Return the scheme of fp4 with two codes in a byte (`c`), whose scales (`s`) are for groups of 16 or 32 codes;
    None where the shapes are others."""
    if not c.shape or not s.shape or s.shape[:-1] != c.shape[:-1]:
        return None
    for kind, dtypes, group in (("nvfp4", _FLOAT8, 16), ("mxfp4", _EXPONENTS, 32)):
        if s.dtype in dtypes and s.shape[-1] == -(-2 * c.shape[-1] // group):
            return _Scheme(f"{kind} (groups of {group})", (*c.shape[:-1], 2 * c.shape[-1]), "fp4", (1, group), 4)
    return None


def _find_granularity(shape: _Shape, scale: _Shape, block: _Block | None) -> tuple[str, _Block] | None:
    """Return which codes share a scale, as a text ("blocks of 128x128") and as (rows, columns); None where the shapes
    do not fit.

    Args:
        shape: of the codes.
        scale: shape of the scales.
        block: rows and columns that share a scale, by the config; None where it does not say.
    """
    alike = len(scale) == len(shape) >= 2
    if (
        block is not None
        and alike
        and scale == (*shape[:-2], *(-(-n // b) for n, b in zip(shape[-2:], block, strict=True)))
    ):
        return f"blocks of {block[0]}x{block[1]}", block
    rows, columns = (1, 1, *shape)[-2:]
    if prod(scale) == 1 or scale in (shape[:-2], (*shape[:-2], 1, 1)):
        return "one scale each", (rows, columns)
    if scale in (shape[:-1], (*shape[:-1], 1)):
        return "one scale a row", (1, columns)
    if block is not None or not alike or scale[:-2] != shape[:-2]:
        return None
    down, along = (_count_codes_per_scale(n, k) for n, k in zip(shape[-2:], scale[-2:], strict=True))
    if not down or not along:
        return None
    return f"groups of {along}" if down == 1 else f"blocks of {down}x{along}", (down, along)


def _count_codes_per_scale(n: int, scales: int) -> int:
    """Return how many of `n` codes in a row share one of so many scales; 0 where no usual number does."""
    if n == scales:
        return 1
    usual = next((b for b in (128, 32, 16, 64, 256, 512, 1024) if scales == -(-n // b)), 0)
    return usual or (n // scales if scales and n % scales == 0 else 0)


# ---------------------------------------------------------------------------------------------------------- faults


def _list_unknown_codes(tensors: Mapping[str, TensorEntry]) -> list[str]:
    """List the tensors, but no bias, of modules with a matrix of codes and numbers for it that are neither weight nor
    bias, as AQLM and HQQ have them. `tensors` are those of a model that its config calls quantised, without the
    encodings that are known."""
    modules: dict[str, list[str]] = {}
    for name in tensors:
        modules.setdefault(name.rpartition(".")[0], []).append(name)
    return [
        name
        for names in modules.values()
        if any(tensors[n].dtype in _OTHER_CODES and len(tensors[n].shape) > 1 for n in names)
        and any(tensors[n].dtype in FLOATING and n.rpartition(".")[2] not in ("weight", "bias") for n in names)
        for name in names
        if not name.endswith(".bias")
    ]


def _describe_incomplete(
    name: str, t: TensorEntry, tensors: Mapping[str, TensorEntry], quantised: bool
) -> tuple[str, bool] | None:
    """Describe a tensor that should belong to a complete encoding and does not; return None for any other tensor.

    Args:
        name: name of the tensor.
        t: the tensor.
        tensors: {name: tensor} of all tensors.
        quantised: whether the config says that the weights are codes.

    Returns:
        (a text such as "scales without codes", whether the name alone is sufficient evidence).
    """
    leaf = name.rpartition(".")[2]
    if not leaf.startswith(("weight", "qweight")) and not leaf.endswith("_scale_inv"):
        return None
    stem = name.removesuffix("_scale_inv")
    if leaf in ("weight_packed", "qweight") and t.dtype in ("int32", "uint8") and len(t.shape) == 2:
        return f"packed codes ({t.dtype}) without a scale", True
    if quantised and leaf == "weight" and len(t.shape) > 1 and t.dtype in _CODES:
        return f"codes ({t.dtype}) without a scale", False
    if stem != name and stem in tensors:
        return (
            f"scales of weights that are {tensors[stem].dtype}: a cast has rounded the codes and not applied the "
            "scales",
            True,
        )
    of_weight = leaf.startswith("weight_") and leaf.removeprefix("weight") in (*_WITH_WEIGHT, "_scale")
    if stem != name or (quantised and of_weight and t.dtype in FLOATING):
        return "scales without codes", stem != name
    return None
