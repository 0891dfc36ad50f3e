"""A request that pools, on its way back: its vector, or the vectors of its tokens piece by piece."""

from __future__ import annotations

import numpy as np

from engine.frontend.sequence_state import SequenceState
from engine.interfaces.tokenizer import Tokenizer
from engine.types.outputs import CoreOutput
from engine.types.params import SamplingParams


class PooledSequence(SequenceState):
    """What the frontend keeps of one engine request that draws no token.

    Args:
        request_id: the core's id.
        params: the request's carrier; nothing in it counts.
        tokenizer: at work.
    """

    def __init__(self, request_id: str, params: SamplingParams, tokenizer: Tokenizer) -> None:
        super().__init__(request_id, 0, params, [], tokenizer, None)
        self._pieces: list[np.ndarray] = []

    @property
    def pooled(self) -> np.ndarray | None:
        """All that came; None where nothing did."""
        if len(self._pieces) > 1:
            self._pieces = [np.concatenate(self._pieces)]
        return self._pieces[0] if self._pieces else None

    def take(self, news: CoreOutput) -> tuple[str, int]:
        """Take in what the core sent; no text and no token comes of it."""
        if news.pooled is not None:
            self._pieces.append(news.pooled)
        if news.finish_reason is not None:
            self.output.finish_reason = str(news.finish_reason)
        return "", 0
