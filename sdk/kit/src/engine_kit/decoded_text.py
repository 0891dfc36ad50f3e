"""What tokenizers do alike: ids to text by a decoder, and conversations to text by templates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from engine.interfaces.tokenizer import TextStream
from engine.types.errors import InvalidRequestError, TokenizerError
from engine_kit.chat_messages import template_variables, text_messages


class Decoder(Protocol):
    """Ids to text; `skip` are ids that have none."""

    def decode(self, ids: Sequence[int], skip: frozenset[int]) -> str:
        """Of all ids."""

    def token(self, token_id: int) -> str:
        """Of one by itself."""

    def stream(self, skip: frozenset[int], prompt: Sequence[int]) -> TextStream:
        """Of ids as they come, behind a prompt."""


class Templates(Protocol):
    """The chat templates of a tokenizer, in Jinja."""

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None,
        add_generation_prompt: bool,
        template: str | None,
        variables: Mapping[str, Any],
    ) -> str:
        """See `engine.interfaces.tokenizer.Tokenizer.render_chat`."""


class DecodedText:
    """The half of `engine.interfaces.tokenizer.Tokenizer` that makes text.

    Args:
        decoder: ids to text.
        templates: conversations to text.
        hidden: ids that a text leaves out, unless it is asked to show them.
    """

    def __init__(self, decoder: Decoder, templates: Templates, hidden: frozenset[int]) -> None:
        self._decoder = decoder
        self._templates = templates
        self._hidden = hidden

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._decoder.decode(ids, self._skip(skip_special_tokens))

    def token(self, token_id: int) -> str:
        return self._decoder.token(token_id)

    def stream(self, skip_special_tokens: bool = True, prompt_token_ids: Sequence[int] = ()) -> TextStream:
        return self._decoder.stream(self._skip(skip_special_tokens), prompt_token_ids)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        try:
            return self._templates.render(
                text_messages(messages),
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                template=template,
                variables=template_variables(variables),
            )
        except RecursionError as error:
            raise InvalidRequestError(
                f"chat with {len(messages)} messages", "the data in them is nested too deeply", "send flatter data"
            ) from error

    def _skip(self, skip_special_tokens: bool) -> frozenset[int]:
        return self._hidden if skip_special_tokens else frozenset()


def check_unicode(text: str) -> None:
    """Raise TokenizerError for half a surrogate pair, which no library of ours reads."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        found = f"character {error.start} ({text[error.start]!a}) is half a surrogate pair, no Unicode"
        raise TokenizerError("tokenise a text", found, "send whole characters") from None
