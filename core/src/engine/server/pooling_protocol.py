"""The bodies of requests that pool and that tokenise. What is not named here is refused by name, never ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import FailFast, Field, model_validator
from typing_extensions import TypeAliasType

from engine.server.body_model import Body
from engine.server.protocol import IntegerLists, Integers, Objects, Strings, Truncation

Inputs = Annotated[str | Integers | Strings | IntegerLists, Field(union_mode="left_to_right")]
"""A text, token ids, or a list of either."""


class RerankDocument(Body):
    """A document, where it is no bare text."""

    text: str


Documents = TypeAliasType("Documents", Annotated[list[str | RerankDocument], FailFast()])


class PoolingBody(Body):
    """What all requests that pool have in common.

    Args:
        model: one of the served names.
        user: the client's name for its own user, which stands in the access log.
        cache_salt: prompts with another find none of each other's cached pages.
        priority: lower values are more urgent; other than 0 only where the scheduling policy heeds it.
        timeout: seconds until the request ends with a 504, waiting included.
    """

    model: str | None = None
    user: str | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    priority: int = 0
    timeout: float | None = None


class InputBody(PoolingBody):
    """Of one or several prompts.

    Args:
        input: a text, token ids, or a list of either.
        add_special_tokens: put those around texts that the tokenizer puts there; not for token ids.
        truncate_prompt_tokens: take only the first so many tokens of each, those around a text counted; -1: as many as
            the model takes. Without it a prompt that is too long is refused.
    """

    input: Inputs
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Truncation | None = None

    @model_validator(mode="after")
    def _special_tokens_are_for_texts(self) -> InputBody:
        if self.add_special_tokens is not None and not all(isinstance(one, str) for one in self.inputs()):
            raise ValueError("add_special_tokens is for texts; token ids are taken as they are")
        return self

    def inputs(self) -> list[str | list[int]]:
        """One entry for each prompt."""
        if isinstance(self.input, str):
            return [self.input]
        several = cast("list[int] | list[str | list[int]]", self.input)
        if several and isinstance(several[0], int):
            return [several]
        return cast("list[str | list[int]]", several)

    def prompts(self) -> list[Any]:
        """The same as the engine takes them."""
        special = True if self.add_special_tokens is None else self.add_special_tokens
        most = self.truncate_prompt_tokens
        cut = {} if most is None else {"truncate_prompt_tokens": most}
        return [
            {"prompt": one, "add_special_tokens": special, **cut}
            if isinstance(one, str)
            else {"prompt_token_ids": one, **cut}
            for one in self.inputs()
        ]


class EmbeddingsBody(InputBody):
    """`POST /v1/embeddings`.

    Args:
        encoding_format: "float" for lists of numbers, "base64" for the bytes of little-endian float32.
        dimensions: keep the first so many elements (Matryoshka embeddings).
        normalize: scale vectors to length 1; without it, as the model's files say.
        use_activation: the same, by the name that vLLM has for it.
    """

    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    normalize: bool | None = None
    use_activation: bool | None = None

    @model_validator(mode="after")
    def _one_name(self) -> EmbeddingsBody:
        if self.use_activation is not None:
            if self.normalize is not None:
                raise ValueError("use_activation is another name of normalize; send one of them")
            self.normalize = self.use_activation
        return self


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


class TokenizeBody(Body):
    """`POST /tokenize`: of a text, or of a conversation.

    Args:
        model: one of the served names.
        prompt: a text.
        messages: a conversation, rendered by the model's chat template.
        add_special_tokens: put those around it that the tokenizer puts there; without it, true for a text and false for
            a conversation, whose template has written them.
        return_token_strs: answer with the text of each token too.
        add_generation_prompt: end the prompt where the assistant begins.
        continue_final_message: the last message, the assistant's, is the beginning of the answer.
        chat_template_kwargs: further variables for the template.
        tools: functions that the template shows to the model, in OpenAI's form.
    """

    model: str | None = None
    prompt: str | None = None
    messages: Objects | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Objects | None = None

    @model_validator(mode="after")
    def _text_or_conversation(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("send prompt or messages, one of them")
        if self.prompt is not None:
            for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} is for messages; leave it out")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt contradict each other; send one of them")
        return self


class DetokenizeBody(Body):
    """`POST /detokenize`.

    Args:
        model: one of the served names.
        tokens: token ids.
    """

    model: str | None = None
    tokens: Integers


def _list(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts
