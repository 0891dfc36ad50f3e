"""The forms in which a prompt may be given."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NotRequired, TypedDict

from engine.frontend import truncation
from engine.types.errors import InvalidRequestError, shown


class TextPrompt(TypedDict):
    """Text to tokenise. Prompts with different `cache_salt` share no cached pages. Unless `add_special_tokens` is
    False, the tokenizer adds those that it adds to every text, such as one that begins it. Of a prompt with
    `truncate_prompt_tokens` the last so many tokens are taken, the first where it is pooled; -1: as many as fit."""

    prompt: str
    cache_salt: NotRequired[str]
    truncate_prompt_tokens: NotRequired[int]
    add_special_tokens: NotRequired[bool]


class TokensPrompt(TypedDict):
    """Token ids, taken as they are. `prompt` is their text, to be shown with the output; it is not tokenised."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]
    truncate_prompt_tokens: NotRequired[int]


Prompt = str | TextPrompt | TokensPrompt | Sequence[int]
"""One prompt: text, a dict with text, a dict with token ids, or bare token ids."""

_KEYS = frozenset({"prompt", "prompt_token_ids", "cache_salt", "add_special_tokens", "truncate_prompt_tokens"})
_FORMS = 'pass a string, a list of token ids, {"prompt": "..."} or {"prompt_token_ids": [...]}'


class ParsedPrompt(NamedTuple):
    """A prompt taken apart. At least one of `text` and `token_ids` is there; the ids win.

    Args:
        text: to tokenise, or to show with the output.
        token_ids: plain Python integers, not yet compared with the vocabulary.
        cache_salt, add_special_tokens, truncate: see `TextPrompt`.
    """

    text: str | None
    token_ids: list[int] | None
    cache_salt: str | None
    add_special_tokens: bool = True
    truncate: int | None = None


def parse_prompt(prompt: Any) -> ParsedPrompt:
    """Take one prompt apart. Raises InvalidRequestError for anything that is no `Prompt`."""
    if isinstance(prompt, str):
        return ParsedPrompt(prompt, None, None)
    if not isinstance(prompt, Mapping):
        return ParsedPrompt(None, _token_ids(prompt), None)
    unknown = sorted(str(key) for key in prompt if key not in _KEYS)
    if unknown:
        raise InvalidRequestError(f"a prompt with the key {unknown[0]!r}", "no prompt has that key", _FORMS)
    text, ids, salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt")
    if text is None and ids is None:
        raise InvalidRequestError("a prompt without text", "it has neither 'prompt' nor 'prompt_token_ids'", _FORMS)
    for name, value in (("prompt", text), ("cache_salt", salt)):
        if value is not None and not isinstance(value, str):
            raise InvalidRequestError(f"{name}={shown(value)}", "it is not a string", _FORMS)
    special = prompt.get("add_special_tokens", True)
    if not isinstance(special, bool):
        raise InvalidRequestError(f"add_special_tokens={shown(special)}", "it is not a boolean", _FORMS)
    most = prompt.get("truncate_prompt_tokens")
    truncation.check(most)
    return ParsedPrompt(text, None if ids is None else _token_ids(ids), salt, special, most)


def as_prompts(prompts: Any) -> list[Any]:
    """One prompt or several as a list of prompts, each still in its own form.

    A list of integers is one prompt; a list of anything else is several.
    """
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if hasattr(prompts, "tolist"):  # a numpy array or a tensor: one row is one prompt
        prompts = prompts.tolist()
    if not isinstance(prompts, Sequence) or isinstance(prompts, (bytes, bytearray)):
        raise InvalidRequestError(f"generate from {type(prompts).__name__}", "that is no prompt", _FORMS)
    if prompts and isinstance(prompts[0], int) and not isinstance(prompts[0], bool):
        return [prompts]
    return list(prompts)


def _token_ids(value: Any) -> list[int]:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes, bytearray)):
        raise InvalidRequestError(f"a prompt of type {type(value).__name__}", "that is no prompt", _FORMS)
    if all(type(token) is int for token in value):
        return list(value)
    ids: list[int] = []
    for token in value:
        if isinstance(token, bool) or not hasattr(token, "__index__"):
            raise InvalidRequestError(
                "prompt_token_ids", f"{shown(token)} is not an integer", "pass a list of integers"
            )
        ids.append(operator.index(token))
    return ids


def timeouts_of(timeout: float | Sequence[float | None] | None, count: int) -> list[float | None]:
    """One for each of so many prompts; None: no limit. Raises InvalidRequestError."""
    if not isinstance(timeout, Sequence):
        return [timeout] * count
    if len(timeout) != count:
        raise InvalidRequestError(
            f"{count} prompts with {len(timeout)} timeouts", "each needs one", "pass one for all, or as many of both"
        )
    return list(timeout)
