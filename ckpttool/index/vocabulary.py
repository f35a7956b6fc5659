"""The rows of the vocabulary: which tensors have one row for each token, in the model and in its optimizer."""

from __future__ import annotations

import re
from collections.abc import Mapping

from .checkpoint import Checkpoint, TensorEntry

__all__ = ["find_embedding_and_head", "find_vocabulary_weights", "is_vocabulary_parameter"]

_EMBEDDING = re.compile(r"(?:.*\.)?(?:embed_tokens|wte|word_embeddings|tok_embeddings|embed_in)\.weight")
_HEAD = re.compile(r"(?:(?:.*\.)?(?:lm_head|embed_out|output_layer)|output)\.(?:weight|bias)")


def is_vocabulary_parameter(fqn: str) -> bool:
    """Whether a parameter of this name belongs to the embedding or the output layer, and so has one row for each
    token."""
    return _EMBEDDING.fullmatch(fqn) is not None or _HEAD.fullmatch(fqn) is not None


def find_vocabulary_weights(ckpt: Checkpoint) -> dict[str, TensorEntry]:
    """Return {FQN: weight} of the embedding and the output layer, which have one row for each token; {} if there is
    no embedding."""
    model = {t.parameter: t for t in ckpt.tensors.values() if t.component == "model" and len(t.path) == 2}
    if not any(_EMBEDDING.fullmatch(n) for n in model):
        return {}
    return {n: t for n, t in model.items() if is_vocabulary_parameter(n) and t.shape}


def find_embedding_and_head(tensors: Mapping[str, object]) -> tuple[str | None, str | None]:
    """Find the input embedding and the output layer by their names, and return (name of the embedding, name of the
    output layer's weight); None for one that is missing or ambiguous. The keys of `tensors` are names of weights;
    its values are not used."""
    embeddings = [n for n in tensors if _EMBEDDING.fullmatch(n)]
    heads = [n for n in tensors if _HEAD.fullmatch(n) and n.endswith(".weight")]
    return (embeddings[0] if len(embeddings) == 1 else None), (heads[0] if len(heads) == 1 else None)
