"""The forms in which a prompt may be given, how it is cut to a length, and where long ones are worked on."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, NotRequired, TypedDict, TypeVar

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

ALL_THAT_FITS = -1
_CUT = "truncate_prompt_tokens"
LONG = 16384
"""Characters (or messages, times 256) from which a prompt is tokenised in a thread: below, that takes a few
milliseconds at most, which other streams do not notice."""
HUGE = 2**20
"""Characters from which a tokenizer takes hundreds of bytes for each, until it is done."""
T = TypeVar("T")

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
    check_truncation(most)
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


def check_truncation(most: Any) -> None:
    """Raise InvalidRequestError for what is neither a number of tokens, nor `ALL_THAT_FITS`, nor None."""
    if most is not None and (type(most) is not int or most < -1 or most == 0):
        raise InvalidRequestError(
            f"{_CUT}={shown(most)}", "it is no number of tokens", "pass one from 1, or -1 for what fits"
        )


def cut_to_last(ids: list[int], most: int | None, fits: int) -> list[int]:
    """The last tokens of a prompt that is to be gone on from.

    Args:
        most: so many; `ALL_THAT_FITS`; None cuts nothing.
        fits: how many leave room for an answer, at least 1.
    """
    if most is None:
        return ids
    return ids[-(fits if most == ALL_THAT_FITS else most) :]


def cut_to_first(ids: list[int], most: int | None, fits: int, bare: Callable[[], list[int]] | None) -> list[int]:
    """The first tokens of a prompt that is to be pooled; those that the tokenizer puts around a text stay around it.

    Args:
        most: so many in all; `ALL_THAT_FITS`; None cuts nothing.
        fits: how many the model takes.
        bare: gives the ids without those around them; None where there are none.

    Raises InvalidRequestError where no token of the text would be left.
    """
    if most is None:
        return ids
    most = fits if most == ALL_THAT_FITS else most
    if len(ids) <= most:
        return ids
    inner = ids if bare is None else bare()
    before = _place(ids, inner, 0)
    if before is None:
        raise InvalidRequestError(
            f"{_CUT}={most}", "the tokenizer does not put its own tokens around a text", "leave it out"
        )
    after = len(ids) - before - len(inner)
    _check_something_is_left(most, before + after, "a text")
    return [*ids[:before], *inner[: most - before - after], *ids[len(ids) - after :]]


def cut_pair(
    ids: list[int], first: list[int], second: list[int], second_start: int | None, most: int
) -> tuple[list[int], int | None]:
    """Two texts that are read as one prompt, cut to `most` tokens in all: from the end of the longer one, then of both,
    as Hugging Face's tokenizers do ("longest_first"). What the tokenizer puts around and between them stays.

    Args:
        ids: the whole prompt.
        first, second: the texts alone.
        second_start: where the tokens of the second type begin.

    Raises InvalidRequestError where no token of the texts would be left.
    """
    if len(ids) <= most:
        return ids, second_start
    before = _place(ids, first, 0)
    between = None if before is None else _place(ids, second, before + len(first))
    if before is None or between is None:
        raise InvalidRequestError(
            f"{_CUT}={most}", "the tokenizer does not put its own tokens around the texts of a pair", "leave it out"
        )
    around = len(ids) - len(first) - len(second)
    _check_something_is_left(most, around, "a pair")
    short, long = sorted((len(first), len(second)))
    if 2 * short <= most - around:
        long = most - around - short
    else:
        short = (most - around) // 2
        long = most - around - short
    kept, kept_second = (long, short) if len(first) > len(second) else (short, long)
    cut = [*ids[:before], *first[:kept], *ids[before + len(first) : between]]
    cut += [*second[:kept_second], *ids[between + len(second) :]]
    return cut, None if second_start is None else second_start - (len(first) - kept)


def _check_something_is_left(most: int, around: int, what: str) -> None:
    if most <= around:
        found = f"the tokenizer puts {around} tokens around {what}, and none of it would be left"
        raise InvalidRequestError(f"{_CUT}={most}", found, "raise it")


def _place(ids: list[int], text: list[int], start: int) -> int | None:
    return next((i for i in range(start, len(ids) - len(text) + 1) if ids[i : i + len(text)] == text), None)


class LongPrompts:
    """Runs what tokenises or renders texts. To be used in one event loop."""

    def __init__(self) -> None:
        self._alone = asyncio.Lock()

    async def run(self, work: Callable[[], T], length: int) -> T:
        """The answer of `work`, on so many characters."""
        if length < LONG:
            return work()
        if length < HUGE:
            return await asyncio.to_thread(work)
        async with self._alone:
            return await asyncio.to_thread(partial(_then_give_back, work))


def _then_give_back(work: Callable[[], T]) -> T:
    """The C library keeps what a thread frees for what it may ask for next: after 8 MB of text more than half a GB."""
    try:
        return work()
    finally:
        with contextlib.suppress(OSError, AttributeError):  # another C library than GNU's
            ctypes.CDLL(None).malloc_trim(0)
