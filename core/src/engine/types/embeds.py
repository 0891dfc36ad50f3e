"""Vectors that a prompt brings in place of tokens."""

from __future__ import annotations

import msgspec
import numpy as np

BFLOAT16 = np.dtype(np.uint16, metadata={"holds": "bfloat16"})
"""The bits of bfloat16 numbers: what `tensor.view(torch.uint16).numpy().view(BFLOAT16)` has."""


class PromptEmbeds(msgspec.Struct, frozen=True, kw_only=True):
    """In place of the embeddings of a prompt's first tokens, whose ids are placeholders.

    Args:
        key: the same for equal vectors alone: requests with others share no pages.
        data: [n, hidden_size], float16, float32, float64 or `BFLOAT16`.
    """

    key: str
    data: np.ndarray
