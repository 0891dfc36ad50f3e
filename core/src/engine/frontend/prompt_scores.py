"""A prompt's log probabilities, put together from the pieces in which the core sends them."""

from __future__ import annotations

from collections.abc import Sequence

from engine.interfaces.tokenizer import Tokenizer
from engine.types.outputs import Logprob, TokenLogprobs


def readable(token: int, row: TokenLogprobs, tokenizer: Tokenizer) -> dict[int, Logprob]:
    """One position: the token at it first, then the most likely ones."""
    position = {token: Logprob(row.chosen, row.rank, tokenizer.token(token))}
    for place, (other, value) in enumerate(zip(row.top_ids, row.top_values, strict=True)):
        if other != token:
            position[other] = Logprob(value, place + 1, tokenizer.token(other))
    return position


class PromptScores:
    """The scores of one prompt.

    Args:
        prompt_token_ids: the prompt.
        tokenizer: at work.
    """

    def __init__(self, prompt_token_ids: Sequence[int], tokenizer: Tokenizer) -> None:
        self._ids, self._tokenizer = prompt_token_ids, tokenizer
        self._positions: list[dict[int, Logprob] | None] = [None]

    def take(self, rows: Sequence[TokenLogprobs]) -> None:
        """The scores of the next tokens."""
        first = len(self._positions)
        for token, row in zip(self._ids[first : first + len(rows)], rows, strict=True):
            self._positions.append(readable(token, row, self._tokenizer))

    @property
    def complete(self) -> list[dict[int, Logprob] | None] | None:
        """All positions, the first None; None until they are all there."""
        return self._positions if len(self._positions) == len(self._ids) else None
