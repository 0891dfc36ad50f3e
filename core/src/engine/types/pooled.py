"""What pooling calls return. The names are vLLM's; vectors are numpy arrays or lists, not torch tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

T = TypeVar("T")


@dataclass(slots=True)
class PoolingOutput:
    """What `encode` gives.

    Args:
        data: float32 (float64 where the model computes in it): [size] for "embed", [labels] for "classify", [tokens,
            size] for "token_embed".
    """

    data: np.ndarray


@dataclass(slots=True)
class EmbeddingOutput:
    """What `embed` gives: the vector, as a list."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Its length."""
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """What `classify` gives: a number for each label (their sum is 1 where the activation is softmax)."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """How many labels there are."""
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    """What `score` gives: higher is more alike, or more relevant."""

    score: float


@dataclass(slots=True)
class PooledRequestOutput(Generic[T]):
    """A prompt and what was made of it.

    Args:
        request_id: of the request; two joined by "_" where a score compares two embeddings.
        outputs: the result.
        prompt_token_ids: the ids (of both texts, where a score compares two embeddings).
        num_cached_tokens: prompt tokens found in the prefix cache.
        finished: always True.
    """

    request_id: str
    outputs: T
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


class PoolingRequestOutput(PooledRequestOutput[PoolingOutput]):
    """Of `encode`."""

    __slots__ = ()


class EmbeddingRequestOutput(PooledRequestOutput[EmbeddingOutput]):
    """Of `embed`."""

    __slots__ = ()


class ClassificationRequestOutput(PooledRequestOutput[ClassificationOutput]):
    """Of `classify`."""

    __slots__ = ()


class ScoringRequestOutput(PooledRequestOutput[ScoringOutput]):
    """Of `score`."""

    __slots__ = ()
