"""What the routes that pool answer, where they answer with JSON."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import SkipValidation

from engine_server.bodies import Answer
from engine_server.usage import Usage


class _List(Answer):
    id: str
    object: Literal["list"]
    created: int
    model: str


class Embedding(Answer):
    """The vector of an input: its numbers, or their bytes in base64."""

    object: Literal["embedding"]
    index: int
    embedding: SkipValidation[list[float] | str]


class Embeddings(_List):
    """`POST /v1/embeddings`."""

    data: list[Embedding]
    usage: Usage


class PooledInput(Answer):
    """What the model makes of an input: numbers in lists of any depth, or their bytes in base64."""

    object: Literal["pooling"]
    index: int
    data: SkipValidation[list[Any] | str]


class Pooled(_List):
    """`POST /pooling`."""

    data: list[PooledInput]
    usage: Usage


class Labelled(Answer):
    """A number for each label, and the label of the largest."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class Classified(_List):
    """`POST /classify`."""

    data: list[Labelled]
    usage: Usage


class Score(Answer):
    """How well a pair fits."""

    index: int
    object: Literal["score"]
    score: float


class Scores(_List):
    """`POST /score`."""

    data: list[Score]
    usage: Usage


class RankedText(Answer):
    """A document."""

    text: str


class Ranked(Answer):
    """A document's place in what was sent, and how well it fits; its text where that is asked for."""

    index: int
    document: RankedText = RankedText(text="")
    relevance_score: float


class Ranking(Answer):
    """`POST /rerank`."""

    id: str
    model: str
    usage: Usage
    results: list[Ranked]
