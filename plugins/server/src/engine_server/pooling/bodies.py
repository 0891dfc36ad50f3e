"""The bodies of requests that pool, and what is answered where that is JSON."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import FailFast, Field, SkipValidation, model_validator
from typing_extensions import TypeAliasType

from engine.types.pooling import PoolingParams
from engine_server.bodies import (
    Answer,
    Body,
    ConversationBody,
    Inputs,
    QueuedBody,
    Strings,
    Truncation,
    Usage,
    check_special_tokens,
    several,
)
from engine_server.pooling.vector_bytes import EmbedDType, Endianness


class RerankDocument(Body):
    """A document, where it is no bare text."""

    text: str


Documents = TypeAliasType("Documents", Annotated[list[str | RerankDocument], FailFast()])


class PoolingBody(QueuedBody):
    """What all requests that pool have in common.

    Args:
        user: the client's name for its own user, which stands in the access log.
    """

    user: str | None = None


class InputBody(PoolingBody, ConversationBody):
    """Of one or several prompts, or of a conversation.

    Args:
        input: a text, token ids, or a list of either.
        truncate_prompt_tokens: take only the first so many tokens of each, those around a text counted; -1: as many as
            the model takes. Without it a prompt that is too long is refused.
    """

    input: Inputs | None = None
    truncate_prompt_tokens: Truncation | None = None

    @model_validator(mode="after")
    def _inputs_or_a_conversation(self) -> InputBody:
        self.check_place("input")
        if self.input is not None:
            check_special_tokens(self.add_special_tokens, several(self.input))
        return self


class VectorsBody(InputBody):
    """Of which vectors are made.

    Args:
        encoding_format: "float" for lists of numbers, "base64" for their bytes; "bytes" for the bytes of all in place
            of JSON, with a header that tells where each begins, "bytes_only" without it.
        embed_dtype: of numbers that are bytes; without it float32.
        endianness: of the same; without it little.
        dimensions: keep the first so many elements (Matryoshka embeddings).
        normalize: scale vectors to length 1; without it, as the model's files say.
        use_activation: the same, by the name that vLLM has for it.
    """

    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] = "float"
    embed_dtype: EmbedDType | None = None
    endianness: Endianness | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    use_activation: bool | None = None

    @model_validator(mode="after")
    def _one_name(self) -> VectorsBody:
        if None not in (self.use_activation, self.normalize):
            raise ValueError("use_activation is another name of normalize; send one of them")
        if self.encoding_format == "float" and (self.embed_dtype or self.endianness):
            raise ValueError("embed_dtype and endianness are for bytes; leave them out, or send encoding_format base64")
        return self

    def params(self, task: str) -> PoolingParams:
        """What is asked of the task; not verified."""
        normalize, activation = self.normalize, self.use_activation
        if task not in ("classify", "token_classify") and activation is not None:
            normalize, activation = activation, None
        return PoolingParams(task=task, dimensions=self.dimensions, normalize=normalize, use_activation=activation)


class EmbeddingsBody(VectorsBody):
    """`POST /v1/embeddings`."""


class PoolBody(VectorsBody):
    """`POST /pooling`.

    Args:
        task: "embed", "token_embed" (a vector for each token), "classify" or "token_classify" (numbers for each token);
            without it "embed", or what the model has a head for. There, use_activation false gives bare logits.
        step_tag_id: of "token_classify": the id of the tokens that are told of; without it all are.
        returned_token_ids: of the same: the numbers of the labels that are told; without it all are.
    """

    task: str | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None

    def params(self, task: str) -> PoolingParams:
        """What is asked of the task; not verified."""
        params = super().params(task)
        params.step_tag_id = self.step_tag_id
        params.returned_token_ids = self.returned_token_ids
        return params


class ClassifyBody(InputBody):
    """`POST /classify`.

    Args:
        use_activation: false gives the head's bare logits.
    """

    use_activation: bool | None = None


class ScoreBody(PoolingBody):
    """`POST /score`, `POST /v1/score`. One pair of fields, of those that mean the same.

    Args:
        text_1, queries, data_1: a text, or as many as there are of the other.
        text_2, documents (or items), data_2: one or several texts.
        use_activation: false gives a cross-encoder's bare logits.
        truncate_prompt_tokens: cut each text to its first so many tokens, those around it counted; for a cross-encoder
            both texts of a pair together, from the end of the longer; -1: to as many as the model takes.
    """

    text_1: str | Strings | None = None
    text_2: str | Strings | None = None
    queries: str | Strings | None = None
    documents: str | Strings | None = None
    items: str | Strings | None = None
    data_1: str | Strings | None = None
    data_2: str | Strings | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: Truncation | None = None

    @model_validator(mode="after")
    def _one_pair(self) -> ScoreBody:
        if self.items is not None:
            if self.documents is not None:
                raise ValueError("items is another name of documents; send one of them")
            self.documents = self.items
        given = [names for names in _PAIRS if any(getattr(self, name) is not None for name in names)]
        if len(given) != 1:
            found = " and ".join("/".join(names) for names in given)
            raise ValueError(f"{found} mean the same; send one pair" if given else "send text_1 and text_2")
        for name in given[0]:
            if getattr(self, name) is None:
                raise ValueError(f"{name} is missing; send {given[0][0]} and {given[0][1]}")
        return self

    def texts(self) -> tuple[list[str], list[str]]:
        """Both sides."""
        first, second = next(names for names in _PAIRS if getattr(self, names[0]) is not None)
        return _list(getattr(self, first)), _list(getattr(self, second))


_PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2"))


class RerankBody(PoolingBody):
    """`POST /rerank`, `POST /v1/rerank`, `POST /v2/rerank`.

    Args:
        query: a text.
        documents: texts, or objects {"text": ...}.
        top_n: answer with the best so many; without it, or with 0, with all.
        return_documents: answer with their texts too; without it, yes but for `/v2/rerank`, as Cohere has it.
        use_activation: false gives a cross-encoder's bare logits.
        truncate_prompt_tokens: as for scores.
    """

    query: str
    documents: Documents
    top_n: Annotated[int, Field(ge=0)] | None = None
    return_documents: bool | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: Truncation | None = None

    def texts(self) -> list[str]:
        """Of the documents."""
        documents: list[str | RerankDocument] = self.documents
        return [document if isinstance(document, str) else document.text for document in documents]


def _list(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


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
