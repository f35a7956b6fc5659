"""The rows of the vocabulary: which tensors have one row for each token, in the model and in its optimizer."""

from __future__ import annotations

import re
from collections.abc import Mapping

from .checkpoint import Checkpoint, TensorEntry

__all__ = ["embedding_and_head", "is_vocabulary", "vocabulary_of"]

_EMBEDDING = re.compile(r"(?:.*\.)?(?:embed_tokens|wte|word_embeddings|tok_embeddings|embed_in)\.weight")
_HEAD = re.compile(r"(?:(?:.*\.)?(?:lm_head|embed_out|output_layer)|output)\.(?:weight|bias)")


def is_vocabulary(fqn: str) -> bool:
    """Whether a parameter of that name is the embedding or the output layer, which have a row for each token."""
    return _EMBEDDING.fullmatch(fqn) is not None or _HEAD.fullmatch(fqn) is not None


def vocabulary_of(ckpt: Checkpoint) -> dict[str, TensorEntry]:
    """Return the weights of the embedding and the output layer, each with a row for each token: {FQN: weight}; {} where
    no embedding is found."""
    model = {t.parameter: t for t in ckpt.tensors.values() if t.component == "model" and len(t.path) == 2}
    if not any(_EMBEDDING.fullmatch(n) for n in model):
        return {}
    return {n: t for n, t in model.items() if is_vocabulary(n) and t.shape}


def embedding_and_head(tensors: Mapping[str, object]) -> tuple[str | None, str | None]:
    """Return (name of the input embedding, name of the weight of the output layer), found by name among {name of a
    weight: anything}; None for one that is missing, or that several names fit."""
    embeddings = [n for n in tensors if _EMBEDDING.fullmatch(n)]
    heads = [n for n in tensors if _HEAD.fullmatch(n) and n.endswith(".weight")]
    return (embeddings[0] if len(embeddings) == 1 else None), (heads[0] if len(heads) == 1 else None)
