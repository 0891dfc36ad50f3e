"""The body of tokenizer `mistral`: Mistral's own files and conversations, by mistral-common."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mistral_common.exceptions import MistralCommonException
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

from engine.types.errors import InvalidRequestError, TokenizerError
from engine_kit.chat_messages import template_variables, text_messages
from engine_kit.decoded_text import check_unicode
from engine_reference.tokenizer_hf.pieces import PieceRules
from engine_reference.tokenizer_hf.template import ChatTemplates
from engine_reference.tokenizer_hf.template_files import find_templates, read_json
from engine_tokenizers.files import mistral_file
from engine_tokenizers.table import TableTokenizer, Vocabulary, longest_of

_CALL_ID = re.compile(r"[a-zA-Z0-9]{9}")
"""Ids of calls as Mistral's models know them."""
_SETTINGS_FROM = 15
"""The first version whose conversations say how much the model is to think."""


class Conversation(str):
    """A conversation as text that knows its ids: what a user has written stays text, even where it reads as a token
    that has a meaning of its own; what is written behind it is the beginning of the answer.

    Args:
        text: as people read it.
        ids: as mistral-common writes it.
        rest: of the text, what was written behind.
    """

    ids: list[int]
    rest: str

    def __new__(cls, text: str, ids: list[int], rest: str = "") -> Conversation:
        made = super().__new__(cls, text)
        made.ids = ids
        made.rest = rest
        return made

    def __add__(self, more: str) -> Conversation:
        return Conversation(str(self) + more, self.ids, self.rest + more)


class MistralTokenizerBody(TableTokenizer):
    """tekken.json, or a sentencepiece model with a version in its name. See `engine.interfaces.tokenizer.Tokenizer`.

    Conversations, tools and calls among them, are encoded by mistral-common's own request, unless a template is named.
    """

    def read(self, folder: str) -> tuple[Vocabulary, ChatTemplates]:
        file = mistral_file(Path(folder))
        if file is None:
            found = "it has neither tekken.json nor a tokenizer.model.v3 (or another version)"
            raise TokenizerError(f"load the tokenizer of '{folder}'", found, "name another folder with --tokenizer")
        try:
            self._mistral: Any = MistralTokenizer.from_file(str(file.path))
        except Exception as error:  # mistral-common asserts what it finds
            found = f"mistral-common cannot read it: {type(error).__name__}: {error!s:.300}"
            raise TokenizerError(f"load the tokenizer '{file.path}'", found, "download it again") from error
        self._version = file.version
        self._inner: Any = self._mistral.instruct_tokenizer.tokenizer
        table = _of_tekken(self._inner) if file.tekken else _of_model(file.path, self._inner)
        templates = find_templates(Path(folder), read_json(Path(folder) / "tokenizer_config.json"))
        variables = {"bos_token": "<s>", "eos_token": "</s>"}
        return table, ChatTemplates(templates, variables, folder)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if not isinstance(text, Conversation):
            return super().encode(text, add_special_tokens)
        check_unicode(text.rest)
        own = [*text.ids, *(self._inner.encode(text.rest, bos=False, eos=False) if text.rest else ())]
        return [*self.table.before, *own, *self.table.behind] if add_special_tokens else own

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """A `Conversation`, which ends where the assistant begins in any case: its form has no mark for that. Of the
        variables it knows `reasoning_effort`, from version 15 on."""
        if template is not None:
            return super().render_chat(
                messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                template=template,
                variables=variables,
            )
        given = text_messages(messages)
        asked = f"write {len(given)} chat messages as Mistral's models read them"
        effort = template_variables(variables).get("reasoning_effort")
        more = {} if effort is None or self._version < _SETTINGS_FROM else {"reasoning_effort": effort}
        try:
            plain = [_as_known(message) for message in given]
            request = ChatCompletionRequest.from_openai(plain, list(tools) if tools else None, **more)
            ids: list[int] = self._mistral.encode_chat_completion(request).tokens
        except (MistralCommonException, ValueError, TypeError, LookupError, AttributeError, AssertionError) as error:
            found = f"mistral-common refuses them: {error!s:.500}"
            raise TokenizerError(asked, found, "change the messages") from error
        except RecursionError as error:
            found = "the data in them is nested too deeply"
            raise InvalidRequestError(f"chat with {len(given)} messages", found, "send flatter data") from error
        return Conversation(self.decode(ids, skip_special_tokens=False), ids)


def _of_tekken(inner: Any) -> Vocabulary:
    """Ids below `num_special_tokens` are special, in the order of the file; the others byte pairs."""
    keep, special = SpecialTokenPolicy.KEEP, range(inner.num_special_tokens)
    pieces = [inner.id_to_byte_piece(token, keep) for token in range(inner.n_words)]
    written = {pieces[token].decode(): token for token in special}
    return Vocabulary(
        pieces=pieces,
        special=written,
        hidden=frozenset(special),
        before=(inner.bos_id,),
        behind=(),
        eos=(inner.eos_id,),
        rules=PieceRules(byte_level=True),
        longest=longest_of(pieces),
        plain=lambda text, at_start: inner.encode(text, bos=False, eos=False),
    )


def _of_model(path: Path, inner: Any) -> Vocabulary:
    from engine_tokenizers.sentencepiece_model import Model  # of sentencepiece, which tekken needs not

    model = Model(path)
    longest = None if model.longest is None else max(model.longest, *map(len, model.control))
    return Vocabulary(
        pieces=model.pieces,
        special=model.control,
        hidden=frozenset(model.control.values()),
        before=(inner.bos_id,),
        behind=(),
        eos=(inner.eos_id,),
        rules=model.rules,
        longest=longest,
        plain=model.plain,
    )


def _as_known(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose ids of calls have the form that Mistral's models know: others are made nine letters, the same of
    the same."""
    if isinstance(calls := message.get("tool_calls"), list):
        message = {**message, "tool_calls": [{**call, "id": _call_id(call.get("id"))} for call in calls]}
    if "tool_call_id" in message:
        message = {**message, "tool_call_id": _call_id(message["tool_call_id"])}
    return message


def _call_id(name: Any) -> Any:
    if not isinstance(name, str) or _CALL_ID.fullmatch(name):
        return name
    return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=5).hexdigest()[:9]
