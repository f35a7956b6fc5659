"""What both models compute: a batch of token ids, the same for the same seed, and pixels where the model looks at some.

Without a file of prompts the ids are drawn from the whole vocabulary, in rows of several lengths, with the special ids
of the config at their ends. Pixels are drawn from a normal distribution.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from ...bounded_json import parse
from ...errors import Corrupt, Unsafe, Unsupported, UsageError, argument

if TYPE_CHECKING:
    from collections.abc import Container

    import torch
    from numpy.random import Generator

    from .sides import ModelSide
    from .streaming import StreamedModel

__all__ = ["ModelInputs", "make_inputs", "read_prompts"]

#: Tokens of each prompt that is made up.
_LENGTHS = (48, 17, 5, 1)
_MOST_BYTES = 16 << 20
#: Keys of a config that name an id of the vocabulary.
_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
_IMAGE = ("image_token_id", "image_token_index")
#: Some models cut an image into tiles; up to so many are tried.
_MOST_TILES = 8


class ModelInputs(NamedTuple):
    """The arguments of a model, {name: tensor}, and how many prompts they are of."""

    tensors: dict[str, torch.Tensor]
    prompts: int

    def rows_of(self, found: torch.Tensor) -> torch.Tensor:
        """Return the rows of a layer's output that belong to tokens and not to padding, as a matrix [tokens, features].
        An output without one vector per token is returned completely, as a matrix."""
        for name in ("decoder_attention_mask", "attention_mask"):
            mask = self.tensors.get(name)
            if mask is not None and found.ndim > 2 and found.shape[:2] == mask.shape:
                return found[mask.bool()].reshape(int(mask.sum()), -1)
        return found.reshape(-1, found.shape[-1]) if found.ndim > 1 else found.reshape(1, -1)

    @property
    def tokens(self) -> int:
        """The number of positions whose logits are compared."""
        masks = (self.tensors.get(n) for n in ("decoder_attention_mask", "attention_mask"))
        return next((int(m.sum()) for m in masks if m is not None), 0)


def make_inputs(
    streamed: StreamedModel, side: ModelSide, prompts: Sequence[Sequence[int]] | None, seed: int
) -> ModelInputs:
    """Make the input tensors of a model from prompts, and an image if the model takes images.

    Args:
        streamed: the model.
        side: its weights, which are needed to find out how many tokens stand for an image.
        prompts: token ids; None to draw random ones.
        seed: seed of the random ids and pixels.

    Raises:
        Unsupported: the model takes neither token ids nor images of a known form.
        UsageError: an id is outside the vocabulary.
    """
    import numpy as np

    model, config = streamed.model, side.config
    takes = inspect.signature(model.forward).parameters
    if "input_ids" not in takes:
        raise Unsupported(
            f"{type(model).__name__} takes no input_ids, but {', '.join(list(takes)[:3])}: ckpttool makes up token ids "
            "and images only.",
            code="CKPT0333",
        )
    random = np.random.default_rng(seed)
    text = {**config, **(config.get("text_config") or {})}
    size = _count_vocabulary(model)
    images, image = _make_image(streamed, side, takes, random) if "pixel_values" in takes else ({}, [])
    special = [text[k] for k in _SPECIAL if isinstance(text.get(k), int) and 0 <= text[k] < size]
    reserved = {v for k, v in text.items() if k.endswith(("_token_id", "_token_index")) and isinstance(v, int)}
    if prompts is None:
        prompts = [_draw_prompt(random, min(n, streamed.positions), size, special, reserved) for n in _LENGTHS]
    if (bad := next((i for row in prompts for i in row if not 0 <= i < size), None)) is not None:
        raise UsageError(
            f"{argument('prompts')}: token {bad} is outside the vocabulary of {size:,} rows.", code="CKPT0217"
        )
    if image:
        prompts = [[*_draw_prompt(random, 2, size, [], reserved), *image, *prompts[0][:8]], *prompts]
    ids, mask = _pad_prompts(prompts)
    inputs = {"input_ids": ids, "attention_mask": mask, **images}
    if "mm_token_type_ids" in takes and image:
        inputs["mm_token_type_ids"] = (ids == next(config[k] for k in _IMAGE if k in config)).int()
    if getattr(model.config, "is_encoder_decoder", False) and "decoder_input_ids" in takes:
        start = text.get("decoder_start_token_id")
        answers = [[start if isinstance(start, int) else 0, *row[: len(row) // 2]] for row in prompts]
        inputs["decoder_input_ids"], inputs["decoder_attention_mask"] = _pad_prompts(answers)
    return ModelInputs({k: v for k, v in inputs.items() if k in takes or k == "input_ids"}, len(prompts))


def _count_vocabulary(model: Any) -> int:
    """Return the number of rows of the input embedding.

    Raises:
        Unsupported: the model has none.
    """
    embedding = model.get_input_embeddings()
    if not hasattr(embedding, "weight"):
        raise Unsupported(f"{type(model).__name__} has no input embedding of tokens.", code="CKPT0333")
    return int(embedding.weight.shape[0])


def _draw_prompt(random: Generator, length: int, size: int, special: list[int], reserved: set[int]) -> list[int]:
    """Return `length` random token ids of a vocabulary of `size` rows, none of them `reserved`. A prompt of more than 8
    ids begins with the `special` ids and the ids of the first and the last row."""
    ends = list(dict.fromkeys([*special, 0, size - 1]))
    free = [i for i in random.integers(0, size, 4 * length).tolist() if i not in reserved] or [0]
    rest = [free[k % len(free)] for k in range(length)]
    return [*(i for i in ends if i not in reserved or i in special), *rest][:length] if length > 8 else rest


def _pad_prompts(rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (token ids, attention mask) of prompts as integer tensors [prompts, length of the longest], padded with 0
    on the right; the mask is 1 for tokens and 0 for padding."""
    import torch

    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    return ids, mask


def _make_image(
    streamed: StreamedModel, side: ModelSide, takes: Container[str], random: Generator
) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Make a random image and return (the model's arguments for it, the tokens that stand for it in a prompt).

    Args:
        takes: the parameters of the model's forward.
        random: a numpy random generator.

    Raises:
        Unsupported: it is not known how the model takes images.
    """
    import torch

    config, own = side.config, getattr(streamed.model.config, "vision_config", None)
    token = next((config[k] for k in _IMAGE if isinstance(config.get(k), int)), None)
    name = type(streamed.model).__name__
    unknown = Unsupported(
        f"{name} looks at images in a way that ckpttool does not know, so it cannot be compared.", code="CKPT0333"
    )
    if token is None or own is None:
        raise unknown

    def draw(*shape: int) -> torch.Tensor:
        return torch.from_numpy(random.standard_normal(shape).astype("f4"))

    channels: Any = next((c for k in ("num_channels", "in_channels", "in_chans") if (c := getattr(own, k, None))), 3)
    if "image_grid_thw" in takes:  # patches of several images in one row, with the grid of each
        merge, patch = own.spatial_merge_size, own.patch_size
        numbers = channels * getattr(own, "temporal_patch_size", 1) * patch * patch
        grid = torch.tensor([[1, 2 * merge, 2 * merge]])
        return {"pixel_values": draw(4 * merge * merge, numbers), "image_grid_thw": grid}, [token] * 4
    size: Any = getattr(own, "image_size", None)
    size = size[0] if isinstance(size, (list, tuple)) and size else size
    for lead in ((1,), *((1, n) for n in range(1, _MOST_TILES))) if isinstance(size, int) else ():
        sizes = {"image_sizes": torch.tensor([[size, size]])} if "image_sizes" in takes else {}
        for more in (sizes, {}) if len(lead) > 1 else ({}, sizes):  # many take sizes, and not all of them look
            given = {"pixel_values": draw(*lead, channels, size, size), **more}
            if rows := _count_image_tokens(streamed, side, given, token):
                return given, [token] * rows
    raise unknown


class _Counted(Exception):
    """Ends a forward when the number of an image's tokens is known, `rows`."""

    def __init__(self, rows: int) -> None:
        """Make the exception; `rows` is the number of tokens that stand for the image."""
        self.rows = rows


def _count_image_tokens(streamed: StreamedModel, side: ModelSide, given: dict[str, torch.Tensor], token: int) -> int:
    """Return how many tokens stand for an image in a prompt; 0 where the model does not take images of this form.

    The model is run until it looks for the positions of these tokens, or only the part of it that computes them.

    Args:
        given: the model's arguments for the image.
        token: the id of the token that stands for a part of an image.
    """
    import torch

    model = streamed.model
    merging = next((m for m in model.modules() if hasattr(m, "get_placeholder_mask")), None)

    def count(*arguments: object, **named: object) -> NoReturn:
        raise _Counted(_count_feature_vectors(named.get("image_features", arguments[2:3])))

    try:
        with streamed.reading_from(side, lambda layer, outputs: None):
            placed = streamed.place(given)
            if merging is not None:
                merging.get_placeholder_mask = count
                model(input_ids=torch.tensor([[token]], device=streamed.device), **placed)
            return _count_feature_vectors(model.get_image_features(**placed))
    except _Counted as e:
        return e.rows
    except Exception:  # whatever this model's code raises on a form that it does not take
        return 0
    finally:
        if merging is not None:
            merging.__dict__.pop("get_placeholder_mask", None)


def _count_feature_vectors(found: Any) -> int:
    """Return the number of vectors in the features of an image; 0 if there are none.

    Args:
        found: a tensor, a tuple or list of tensors, or an output object of transformers with one of these as its
            `pooler_output`.
    """
    pooled = getattr(found, "pooler_output", found)
    if isinstance(pooled, (tuple, list)):
        return sum(map(_count_feature_vectors, pooled))
    shape = getattr(pooled, "shape", None)
    return int(pooled.numel() // shape[-1]) if shape else 0


def read_prompts(path: str | os.PathLike[str], config: str | None) -> list[list[int]]:
    """Read prompts from a file and return their token ids. Each line is a list of token ids, an object with "input_ids"
    or "text", or plain text.

    Args:
        config: the folder with the tokenizer that text needs; None where there is none.

    Raises:
        UsageError: the file cannot be read or has no prompt, or text has no tokenizer.
    """
    try:
        with open(path, encoding="utf-8") as f:
            lines = [line.strip() for line in f.read(_MOST_BYTES).splitlines()]
    except (OSError, UnicodeDecodeError) as e:
        raise UsageError(f"{argument('prompts', os.fspath(path))}: {e}.", code="CKPT0217") from None
    found: list[Any] = [_parse_prompt(line) for line in lines if line]
    if texts := [x for x in found if isinstance(x, str)]:
        tokenizer = _load_tokenizer(config, path)
        ids = dict(zip(texts, tokenizer(texts)["input_ids"], strict=True))
        found = [ids[x] if isinstance(x, str) else x for x in found]
    rows = [list(x) for x in found if x]
    if not rows:
        raise UsageError(f"{argument('prompts', os.fspath(path))}: the file holds no prompt.", code="CKPT0217")
    return rows


def _parse_prompt(line: str) -> str | list[int]:
    """Parse a line of a file of prompts: ids, or text.

    Raises:
        UsageError: it is JSON, but neither of the two.
    """
    if not line.startswith(("[", "{", '"')):
        return line
    try:
        found = parse(line.encode(), "prompt")
    except (Corrupt, Unsafe):
        return line
    if isinstance(found, dict):
        found = found.get("input_ids", found.get("text"))
    if isinstance(found, str):
        return found
    if isinstance(found, list) and found and all(type(i) is int for i in found):
        return found
    raise UsageError(
        f"{argument('prompts')}: {line[:80]!r} is neither text nor a list of one or more token ids.", code="CKPT0217"
    )


def _load_tokenizer(config: str | None, path: str | os.PathLike[str]) -> Any:
    """Load and return the transformers tokenizer in the folder `config`, without running code of the folder.

    Args:
        path: the file of prompts, for errors.

    Raises:
        UsageError: there is no tokenizer, or it cannot be loaded.
    """
    import transformers

    if config is not None and os.path.isdir(config):
        try:
            return transformers.AutoTokenizer.from_pretrained(config, trust_remote_code=False, local_files_only=True)
        except Exception as e:  # a tokenizer of another kind, or none
            raise UsageError(
                f"{argument('prompts', os.fspath(path))} has text, and the tokenizer in {config}: {e}", code="CKPT0217"
            ) from None
    raise UsageError(
        f"{argument('prompts', os.fspath(path))} has text, which needs a tokenizer: give {argument('config')} a folder "
        "that has one beside config.json, or write token ids, one list a line.",
        code="CKPT0217",
    )
