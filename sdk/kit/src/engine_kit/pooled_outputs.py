"""What `encode`, `LLM.embed`, `LLM.classify` and `LLM.score` give. The names are
vLLM's; vectors are numpy arrays or lists, not torch tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from engine.types.outputs import RequestOutput

T = TypeVar("T")


@dataclass(slots=True)
class PoolingOutput:
    """What `encode` gives.

    Args:
        data: float32 (float64 where the model computes in it): [size] for "embed", [labels] for "classify", [tokens,
            size] for "token_embed", [tokens, labels] for "token_classify".
    """

    data: np.ndarray


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


class EmbeddingRequestOutput(PooledRequestOutput[EmbeddingOutput]):
    """Of `embed`."""


class ClassificationRequestOutput(PooledRequestOutput[ClassificationOutput]):
    """Of `classify`."""


class ScoringRequestOutput(PooledRequestOutput[ScoringOutput]):
    """Of `score`."""


def poolings(outputs: Iterable[RequestOutput]) -> list[PoolingRequestOutput]:
    """Of requests for anything."""
    return [
        PoolingRequestOutput(one.request_id, PoolingOutput(one.data), one.prompt_token_ids, one.num_cached_tokens)
        for one in outputs
    ]


def embeddings(outputs: Iterable[RequestOutput]) -> list[EmbeddingRequestOutput]:
    """Of requests that embed."""
    return [
        EmbeddingRequestOutput(
            one.request_id, EmbeddingOutput(one.data.tolist()), one.prompt_token_ids, one.num_cached_tokens
        )
        for one in outputs
    ]


def classifications(outputs: Iterable[RequestOutput]) -> list[ClassificationRequestOutput]:
    """Of requests that classify."""
    return [
        ClassificationRequestOutput(
            one.request_id, ClassificationOutput(one.data.tolist()), one.prompt_token_ids, one.num_cached_tokens
        )
        for one in outputs
    ]
