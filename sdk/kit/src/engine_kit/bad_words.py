"""Words that a request forbids, as tokens."""

from __future__ import annotations

from collections.abc import Sequence

from engine.interfaces.tokenizer import Tokenizer
from engine.types.errors import InvalidRequestError, shown


def bad_word_ids(words: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """The token ids of words, as vLLM makes them: of the word alone, and of the word after a space where that begins
    with another token and has as many.
    """
    found: list[list[int]] = []
    for word in words:
        bare = word.lstrip()
        alone = tokenizer.encode(bare, add_special_tokens=False)
        spaced = tokenizer.encode(f" {bare}", add_special_tokens=False)
        if not alone:
            raise InvalidRequestError(f"bad_words=[{shown(word)}]", "the tokenizer gives it no tokens", "leave it out")
        found.append(alone)
        if spaced and spaced[0] != alone[0] and len(spaced) == len(alone):
            found.append(spaced)
    return found
