"""What `LLM.embed`, `LLM.classify` and `LLM.score` give (entry-point group `engine_parts`). The names are vLLM's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine.types.outputs import RequestOutput
from engine.types.pooling import PooledRequestOutput


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
