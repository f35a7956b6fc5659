"""`--quantize fp8-block`: weights as fp8 in blocks of 128 x 128, the form of DeepSeek-V3.

    model.w, bfloat16     ->     model.w, float8_e4m3fn; model.w_scale_inv, float32 [rows / 128, columns / 128]

The scale of a block is amax / 448, rounded once, and a code is x * (1 / amax * 448), as DeepGEMM and transformers
compute it; blocks at the edges may be smaller, and a block of zeros has the scale 1. Where the config asks for
`scale_fmt` "ue8m0", the scale is the next power of two, and codes are x / scale.

So what was dequantised gets its codes back, and, where the scales were made like that, those too: in float32 the
largest number of a block, 448 * scale rounded, divided by 448 is the scale again; in bfloat16 if the weights were
bfloat16 when they were quantised first. Scales that were made otherwise, as transformers' own, which rounds twice, may
differ in the last bits.

Codes and scales are files that are computed when they are read, some rows of blocks at a time (computed_files.py), so
each weight is read twice. The error of each page of codes is measured while it is computed.

Which weights: if the config of the model has a quantization_config, what that says. Otherwise those that transformers
would quantise in the layers of the language model: its linear layers and experts, without routers. A weight that is not
a multiple of whole blocks is left as it is then, with the other weights of its module, since transformers infers the
size of a block from the number of scales and would multiply by others.

Sources: DeepSeek-V3, inference/kernel.py (act_quant); DeepGEMM, utils/math.py (per_block_cast_to_fp8); transformers
5.23, integrations/finegrained_fp8.py (Fp8Quantize, Fp8Dequantize), quantizers/quantizers_utils.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from ...errors import Corrupt, Unsupported, argument
from ...huggingface import Config, encodings, hub_names, model_files
from ...huggingface.file_patterns import NOT_A_PATTERN, may_take_forever
from ...index.checkpoint import FLOATING, Checkpoint, Chunks, TensorEntry, joined
from ...storage.overlay import ComputedSource, PagedFile
from ...storage.source import Source
from ..computed_files import ComputedFiles
from .decoding_weights import IndexedReader

if TYPE_CHECKING:
    from ..copy.dtypes import Array
    from ..opening import OpenCheckpoint

__all__ = ["FP8_BLOCK", "QuantizedSource", "check_scheme", "describe_quantisation_errors", "quantize"]

FP8_BLOCK = "fp8-block"
_LARGEST = 448  # of float8_e4m3fn
_NUMBERS = 1 << 21  # of a page
#: Memory that computing a page takes: its numbers in float32 and float64 a few times, and buffers of the reader.
_WORKING_BYTES = 72 << 20

#: What makes weights of other schemes, by words in the names of those.
_PROGRAMS = (
    (("nvfp4", "modelopt"), "ModelOpt (nvidia-modelopt), or llm-compressor"),
    (("mxfp4",), "transformers (Mxfp4Config), or llm-compressor"),
    (("gptq",), "gptqmodel"),
    (("awq",), "autoawq, or llm-compressor"),
    (("nf4", "bnb", "bitsandbytes"), "bitsandbytes, as transformers loads the model"),
    (("torchao",), "torchao"),
    (("gguf", "q4_", "q8_"), "llama.cpp"),
    (("compressed", "w4", "w8", "int4", "int8", "fp8"), "llm-compressor, which writes compressed-tensors"),
)

_IN_LAYER = re.compile(r"\.(layers?|h|blocks?)\.\d+\.")
_OTHER_TOWER = re.compile(r"(^|\.)(visual|vision|audio|image|speech)")
_ROUTER = re.compile(r"(gate|router)$")
#: Of matrices in layers, where transformers does not know the model.
_NOT_LINEAR = re.compile(r"norm|embed|bias|ln_|conv")


def check_scheme(scheme: str) -> None:
    """Check that ckpttool writes a quantisation scheme.

    Raises:
        Unsupported: it does not; the message names the program that makes weights of that scheme, if known.
    """
    if scheme != FP8_BLOCK:
        raise Unsupported(
            f"{argument('quantize', scheme)}: ckpttool writes {FP8_BLOCK} alone, which needs no data for calibration."
            f"{_describe_maker(scheme)}",
            code="CKPT0334",
        )


def _describe_maker(scheme: object) -> str:
    """Return a sentence on the program that makes weights of a scheme; "" where none is known."""
    words = str(scheme).lower()
    program = next((program for parts, program in _PROGRAMS if any(part in words for part in parts)), None)
    return "" if program is None else f" Weights in {scheme!r} are made by {program}."


class _Scheme(NamedTuple):
    """What weights become: rows and columns of a block, whether scales are powers of two, patterns of modules that stay
    as they are (None: the usual rule), and the quantization_config that said so (None: there was none)."""

    block: tuple[int, int] = (128, 128)
    exponents: bool = False
    kept: tuple[str, ...] | None = None
    stated: Config | None = None


def _read_scheme(config: Config) -> _Scheme:
    """Return the scheme that the quantization_config of a model's config asks for; the default where it has none.

    Raises:
        Unsupported: it asks for another scheme than fp8 in blocks, or does not list the modules to leave as they are.
    """
    places = (config, config.get("text_config"))
    stated = next(
        (c["quantization_config"] for c in places if isinstance(c, dict) and c.get("quantization_config")), None
    )
    if not isinstance(stated, dict):
        return _Scheme()
    method, block = stated.get("quant_method"), stated.get("weight_block_size")
    other = {
        "quant_method": (method, "fp8"),
        "activation_scheme": (stated.get("activation_scheme", "dynamic"), "dynamic"),
        "expert_dtype": (stated.get("expert_dtype", "fp8"), "fp8"),
    }
    for key, (found, wanted) in other.items():
        if found != wanted:
            raise Unsupported(
                f"{argument('quantize', FP8_BLOCK)}: quantization_config of config.json has {key} {found!r}, and not "
                f"{wanted!r}.{_describe_maker(found)} Give "
                f"{argument('config')} a config of this model without it, or with the one that is wanted.",
                code="CKPT0334",
            )
    if not (isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)):
        raise Unsupported(
            f"{argument('quantize', FP8_BLOCK)}: quantization_config of config.json has weight_block_size {block!r}: "
            "it is of fp8 with one scale a tensor or a row. Give "
            f"{argument('config')} a config with the size of a block, or without a quantization_config.",
            code="CKPT0334",
        )
    kept = stated.get("modules_to_not_convert") or stated.get("ignored_layers")
    if kept is not None and not (isinstance(kept, list) and all(isinstance(p, str) for p in kept)):
        raise Unsupported(
            f"{argument('quantize', FP8_BLOCK)}: quantization_config of config.json has modules_to_not_convert "
            f"{str(kept)[:60]!r}, which is not a list of names.",
            code="CKPT0334",
        )
    exponents = stated.get("scale_fmt") == "ue8m0"
    return _Scheme((block[0], block[1]), exponents, None if kept is None else tuple(kept), stated)


# -------------------------------------------------------------------------------------------------- which weights


class _Chosen(NamedTuple):
    """Names of the weights to quantise; modules that stay as they are although they are linear layers; weights that
    stay because blocks at their edges would not be whole."""

    weights: list[str]
    kept: list[str]
    ragged: list[str]


def _choose_weights(model: Mapping[str, TensorEntry], config: Config, scheme: _Scheme) -> _Chosen:
    """Choose the weights to quantise.

    Args:
        model: {name on the Hub: weight}.

    Raises:
        MissingPackage: transformers, which knows the linear layers, is not installed.
    """
    linear = _list_linear_weights(model, config)
    if scheme.kept is not None:
        return _Chosen([n for n in linear if not _matches_module(_module_of_weight(n), scheme.kept)], [], [])
    usual = [
        n
        for n in linear
        if _IN_LAYER.search(n) and not _OTHER_TOWER.search(n) and not _ROUTER.search(_module_of_weight(n))
    ]
    ragged = (
        [] if scheme.stated is not None else [n for n in usual if _has_partial_blocks(model[n].shape, scheme.block)]
    )
    parents = {_fused_group_of_weight(n) for n in ragged}
    chosen = [n for n in usual if _fused_group_of_weight(n) not in parents]
    quantised = set(chosen)
    rest = [
        _fused_group_of_weight(n) if ".experts" in _fused_group_of_weight(n) else _module_of_weight(n)
        for n in linear
        if n not in quantised
    ]
    return _Chosen(chosen, list(dict.fromkeys(rest)), ragged)


def _list_linear_weights(model: Mapping[str, TensorEntry], config: Config) -> list[str]:
    """List the names of the floating-point weights of linear layers and experts, by transformers' model; by their names
    where transformers does not know the model."""
    try:
        relation = hub_names.relate_to_hub(dict(config), None, linear=True)
        linear, views = set(relation.linear), relation.views
    except Unsupported:
        linear, views = set(), {}
    out = []
    for n, t in model.items():
        if n in views:
            known = views[n].of in linear
        else:
            known = n.endswith(".weight") and _IN_LAYER.search(n) is not None and not _NOT_LINEAR.search(n)
        if known and t.dtype in FLOATING and len(t.shape) > 1 and t.numel:
            out.append(n)
    return out


def _module_of_weight(name: str) -> str:
    """Return the module of a weight: what is before the last dot of its name."""
    return name.rpartition(".")[0]


def _fused_group_of_weight(name: str) -> str:
    """Return the module whose weights serving programs fuse with this one: the parent of the weight's module, without
    numbers at its end ("model.layers.0.mlp.experts" for any expert)."""
    return re.sub(
        r"(\.\d+)+$",
        "",
        _module_of_weight(_module_of_weight(name)) if name.endswith(".weight") else _module_of_weight(name),
    )


def _matches_module(module: str, patterns: Iterable[str]) -> bool:
    """Tell whether one of transformers' patterns matches a module: from its beginning up to a dot or its end, or
    literally at its end.

    Raises:
        Unsupported: a pattern could take forever.
    """
    for pattern in patterns:
        if may_take_forever(pattern, module):
            raise Unsupported(
                f"{argument('quantize', FP8_BLOCK)}: the pattern {pattern[:60]!r} in modules_to_not_convert of "
                "config.json could take forever to compare with a name, and it comes from a file. Write a simpler one, "
                "or the names themselves.",
                code="CKPT0334",
            )
        try:
            found = re.match(rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))", module)
        except NOT_A_PATTERN:
            found = None
        if found or module.endswith(pattern):
            return True
    return False


def _has_partial_blocks(shape: tuple[int, ...], block: tuple[int, int]) -> bool:
    """Tell whether a matrix has several blocks along a side, the last of which is incomplete."""
    return any(n > b and n % b for n, b in zip(shape[-2:], block, strict=True))


# --------------------------------------------------------------------------------------------------- the numbers


class _Blocks(NamedTuple):
    """Codes and scales of some rows of a weight: float8_e4m3fn [rows, columns], float32 [blocks, blocks]."""

    codes: Array
    scales: Array


def _quantize_blocks(x: Array, scheme: _Scheme) -> _Blocks:
    """Quantise float32 numbers, [rows, columns], whose first row and column begin a block.

    Raises:
        ValueError: a number is infinite or NaN.
    """
    import ml_dtypes
    import numpy as np

    (down, along), (rows, columns) = scheme.block, x.shape
    amax = np.maximum.reduceat(np.abs(x), range(0, rows, down), axis=0)
    amax = np.maximum.reduceat(amax, range(0, columns, along), axis=1)
    if not np.isfinite(amax).all():
        raise ValueError
    with np.errstate(divide="ignore", over="ignore"):
        factor = np.float32(1) / amax * np.float32(_LARGEST)  # in torch's order
    small = ~np.isfinite(factor)  # all zeros, or too small for float32 to tell from zeros
    scales = np.where(small, np.float32(1), amax / np.float32(_LARGEST))
    if scheme.exponents:
        fraction, exponent = np.frexp(scales)
        scales = np.ldexp(np.float32(1), exponent - (fraction == 0.5))
        factor = np.float32(1) / scales
    factor[small] = 0
    # a row of blocks at a time: numbers, not their copies, fill the memory
    codes = np.empty(x.shape, ml_dtypes.float8_e4m3fn)
    for k, row in enumerate(factor):
        part = slice(k * down, (k + 1) * down)
        scaled = x[part] * np.repeat(row, along)[:columns]
        codes[part] = np.clip(scaled, -_LARGEST, _LARGEST, out=scaled)
    return _Blocks(codes, scales)


def _measure_errors(x: Array, found: _Blocks, scheme: _Scheme) -> list[float]:
    """Return [sum of the squared errors, sum of the squared numbers, largest absolute error] of quantised numbers.

    Args:
        x: the float32 numbers, [rows, columns].
        found: their codes and scales.
    """
    import numpy as np

    squares = of = largest = 0.0
    down, along = scheme.block
    for k, row in enumerate(found.scales):
        part = slice(k * down, (k + 1) * down)
        error = found.codes[part].astype("f4") * np.repeat(row, along)[: x.shape[1]] - x[part]
        squares += float(np.square(error, dtype="f8").sum())
        of += float(np.square(x[part], dtype="f8").sum())
        largest = max(largest, float(np.abs(error).max(initial=0)))
    return [squares, of, largest]


class QuantizedSource(ComputedSource):
    """The files of another source, and codes and scales that are computed from its weights.

    `measured` {"PAGE MATRIX": the numbers of `_measure_errors`} of the pages of codes that were computed so far, here
    or by workers.
    """

    def __init__(self, base: Source, pages: Mapping[str, PagedFile]) -> None:
        super().__init__(base, pages, (), base.working_bytes + _WORKING_BYTES)

    def compute_errors(self, quantized: Mapping[str, Any]) -> dict[str, Any]:
        """Return a summary of the quantisation errors, for `Draft.summary`: {"scheme", "block", "weights",
        "rms_relative_error", "max_abs_error", "worst"}, where "worst" describes the weight with the largest RMS error.

        Pages of codes that were not computed here or by workers, such as those that an interrupted run has written, are
        computed for it.

        Args:
            quantized: `Checkpoint.quantized`.
        """
        rows: dict[str, list[float]] = {}
        for file, weight in quantized["files"].items():
            made = self.made[file]
            for page in range(-(-made.size // made.page)):
                if f"{page} {file}" not in self.measured:
                    made.compute(page)
                found, sums = self.measured[f"{page} {file}"], rows.setdefault(weight, [0.0, 0.0, 0.0])
                rows[weight] = [sums[0] + found[0], sums[1] + found[1], max(sums[2], found[2])]
        relative = {n: math.sqrt(e / x) if x else 0.0 for n, (e, x, _) in rows.items()}
        worst = max(relative, key=lambda n: relative[n])
        every = [math.fsum(row[k] for row in rows.values()) for k in (0, 1)]
        return {
            "scheme": quantized["scheme"],
            "block": quantized["config"]["weight_block_size"],
            "weights": len(rows),
            "rms_relative_error": math.sqrt(every[0] / every[1]) if every[1] else 0.0,
            "max_abs_error": max(row[2] for row in rows.values()),
            "worst": {"tensor": worst, "rms_relative_error": relative[worst], "max_abs_error": rows[worst][2]},
        }


def describe_quantisation_errors(about: Mapping[str, Any]) -> str:
    """Return a sentence about the errors of quantised weights.

    Args:
        about: what `QuantizedSource.compute_errors` returned.
    """
    worst = about["worst"]
    return (
        f"{about['weights']:,} weights are {about['scheme']} now; against the source, the error is "
        f"{about['rms_relative_error']:.2%} of the numbers (RMS), at most {about['max_abs_error']:.3g}; the worst is "
        f'"{worst["tensor"]}" with {worst["rms_relative_error"]:.2%}'
    )


# -------------------------------------------------------------------------------------------------------- the index


def quantize(opened: OpenCheckpoint, given: str | None) -> tuple[Checkpoint, QuantizedSource]:
    """Return the same state, (index, files), with weights replaced by codes and scales that are computed when they are
    read; `Checkpoint.quantized` of the index says what was done.

    Args:
        opened: the state, with the names of the Hub.
        given: folder or id of the model whose config is used; None for the config beside the source.

    Raises:
        Unsupported: there is no config, it asks for another scheme, or no weight can be quantised.
        MissingPackage: transformers, which knows the linear layers, is not installed.
    """
    ckpt, source = opened.checkpoint, opened.source
    config = model_files.find_model_files(source, given, [])[0]
    if config is None:
        raise Unsupported(
            f"{argument('quantize', FP8_BLOCK)}: from_pretrained knows the codes by the quantization_config of "
            f"config.json, and there is none beside the source. Give {argument('config')} a folder or a model id.",
            code="CKPT0334",
        )
    scheme = _read_scheme(config)
    codes = encodings.find_in_checkpoint(ckpt, None)
    if codes.weights:
        raise Unsupported(
            f"{argument('quantize', FP8_BLOCK)}: {codes.summary()}. Give {argument('dequantize', ['*'])}, too, so that "
            "they are numbers first; without either, codes are copied bit for bit.",
            code="CKPT0334",
        )
    model = {joined(t.path[1:]): t for t in ckpt.tensors.values() if t.path[0] == "model"}
    chosen = _choose_weights(model, config, scheme)
    if not chosen.weights:
        raise Unsupported(
            f"{argument('quantize', FP8_BLOCK)}: none of the {len(model):,} weights is of a linear layer that would be "
            "quantised.",
            code="CKPT0334",
        )
    wanted, read, files = set(chosen.weights), IndexedReader(opened), ComputedFiles(ckpt)
    tensors: dict[str, TensorEntry] = {}
    of_codes: dict[str, list[float]] = {}
    weights: dict[str, str] = {}  # {file of codes: its weight}
    for name, t in ckpt.tensors.items():
        if t.path[0] == "model" and joined(t.path[1:]) in wanted:
            leads = product(*map(range, t.shape[:-2]))
            matrices = [_Matrix(name, lead, t.shape[-2:], scheme, read, of_codes) for lead in leads]
            tensors |= _add_codes_and_scales(files, name, t, matrices)
            weights |= {m.file("codes"): name for m in matrices}
        else:
            tensors[name] = t
    computed = QuantizedSource(source, files.made)
    computed.measured = of_codes
    left = (
        f'; {len(chosen.ragged):,} that are no whole blocks stay, first "{chosen.ragged[0]}"' if chosen.ragged else ""
    )
    note = f"{len(wanted):,} weights become fp8 in blocks of {scheme.block[0]}x{scheme.block[1]}{left}"
    quantized = {
        "scheme": FP8_BLOCK,
        "config": _make_quantization_config(scheme, chosen),
        "files": weights,
        "more_to_read": 2 * sum(model[n].nbytes for n in wanted) - sum(p.size for p in files.made.values()),
    }
    notes = [*ckpt.notes, note]
    out = replace(ckpt, tensors=tensors, files=files.names, sizes=files.sizes, notes=notes, quantized=quantized)
    return out, computed


def _make_quantization_config(scheme: _Scheme, chosen: _Chosen) -> dict[str, object]:
    """Return the quantization_config for the model that is written: the one in the config, or a new one."""
    if scheme.stated is not None:
        return dict(scheme.stated)
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(scheme.block),
        "modules_to_not_convert": list(dict.fromkeys(["lm_head", *chosen.kept])),
    }


@dataclass
class _Matrix:
    """One matrix of a weight, and how pages of its codes and scales are computed.

    Args:
        name: of the weight.
        lead: indices of the matrix in the dimensions before the last two.
        shape: rows and columns.
        read: reads its numbers.
        measured: gets the errors of pages of codes, as `QuantizedSource.measured` has them.
    """

    name: str
    lead: tuple[int, ...]
    shape: tuple[int, ...]
    scheme: _Scheme
    read: IndexedReader
    measured: dict[str, list[float]]

    @property
    def grid(self) -> tuple[int, ...]:
        """Return the shape of the matrix of scales, (rows, columns): one scale for each block."""
        return tuple(-(-n // b) for n, b in zip(self.shape, self.scheme.block, strict=True))

    @property
    def page_blocks(self) -> int:
        """Return how many rows of blocks a page, the unit of computation, has; at least 1."""
        return max(1, _NUMBERS // (self.scheme.block[0] * max(1, self.shape[1])))

    def file(self, kind: str) -> str:
        """Return the name of the computed file of this matrix, such as "WEIGHT[0] (codes)"; `kind` is "codes" or
        "scales"."""
        return f"{self.name}{list(self.lead) or ''} ({kind})"

    def compute_codes(self, first: int, end: int) -> Array:
        """Return the float8 codes of complete rows of blocks, [rows, columns], and record their errors in `measured`.

        Args:
            first, end: flat indices of the first code and of the end, in the matrix.
        """
        import ml_dtypes
        import numpy as np

        rows, sums = range(first // self.shape[1], end // self.shape[1]), [0.0, 0.0, 0.0]
        out = np.empty((len(rows), self.shape[1]), ml_dtypes.float8_e4m3fn)
        for columns, x, found in self._quantize_rows(rows):
            out[:, columns] = found.codes
            error = _measure_errors(x, found, self.scheme)
            sums = [sums[0] + error[0], sums[1] + error[1], max(sums[2], error[2])]
        page = rows.start // (self.page_blocks * self.scheme.block[0])
        self.measured[f"{page} {self.file('codes')}"] = sums
        return out

    def compute_scales(self, first: int, end: int) -> Array:
        """Return the scales of complete rows of blocks.

        Args:
            first, end: flat indices of the first scale and of the end, in the matrix of scales.
        """
        import numpy as np

        down, along = self.scheme.block[0], self.grid[1]
        rows = range(first // along * down, min(end // along * down, self.shape[0]))
        return np.concatenate([found.scales for _, _, found in self._quantize_rows(rows)], axis=1)

    def _quantize_rows(self, rows: range) -> Iterator[tuple[slice, Array, _Blocks]]:
        """Quantise some rows, and yield (columns, their numbers, codes and scales) for as many columns as fit into a
        page.

        Raises:
            Corrupt: a number is infinite or NaN.
        """
        down, along = self.scheme.block
        each = max(1, _NUMBERS // down // along) * along
        for first in range(0, self.shape[1], each):
            columns = slice(first, min(first + each, self.shape[1]))
            x = self.read.read("weight", self.name, (*self.lead, slice(rows.start, rows.stop), columns)).astype("f4")
            try:
                yield columns, x, _quantize_blocks(x, self.scheme)
            except ValueError:
                raise Corrupt(
                    f'"{self.name}" holds infinite numbers or NaN in rows {rows.start} to {rows.stop - 1}, and no '
                    f"scale holds those. Leave {argument('quantize')} out to copy it as it is.",
                    code="CKPT0428",
                ) from None


def _add_codes_and_scales(
    files: ComputedFiles, name: str, t: TensorEntry, matrices: Iterable[_Matrix]
) -> dict[str, TensorEntry]:
    """Add a computed file of codes and one of scales for every matrix of a weight, and return {name: tensor} of the
    weight's codes and scales.

    Args:
        name: the weight's canonical name.
        t: the weight.
        matrices: its matrices.
    """
    codes, scales = Chunks(len(t.shape)), Chunks(len(t.shape))
    grid: tuple[int, ...] = ()
    for m in matrices:
        grid, blocks, one = m.grid, m.page_blocks, (1,) * len(m.lead)
        for chunks, kind, dtype, shape, page, compute in (
            (codes, "codes", "float8_e4m3fn", m.shape, blocks * m.scheme.block[0] * m.shape[1], m.compute_codes),
            (scales, "scales", "float32", grid, blocks * grid[1], m.compute_scales),
        ):
            file = files.add(m.file(kind), dtype, shape, compute, page, 0)
            chunks.add((*m.lead, 0, 0), (*one, *shape), *file)
    path = (*t.path[:-1], f"{t.path[-1]}_scale_inv")
    return {
        name: TensorEntry("float8_e4m3fn", t.shape, t.path, codes),
        f"{name}_scale_inv": TensorEntry("float32", (*t.shape[:-2], *grid), path, scales),
    }
