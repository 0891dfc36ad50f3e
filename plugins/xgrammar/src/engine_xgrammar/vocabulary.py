"""The vocabulary as XGrammar wants it."""

from __future__ import annotations

from collections.abc import Sequence

import xgrammar as xgr

LAID_OUT = b"\n\r"
"""The control characters that stand in JSON as they are."""


class Vocabulary:
    """What XGrammar knows of the tokens, made once for a model.

    Tokens that end a sequence are not known here: requests differ in them, so each matcher is told its own.

    Attributes:
        any_text: for constraints on text.
        json: for JSON, without the tokens that hold a control character: XGrammar lets them into strings whose length
            is bounded, where JSON wants an escape.
    """

    def __init__(self, pieces: Sequence[bytes | None], vocab_size: int) -> None:
        words = [piece or b"" for piece in pieces[:vocab_size]]
        words += [b""] * (vocab_size - len(words))
        self.any_text = _info(words)
        self.json = _info([b"" if any(b < 32 and b not in LAID_OUT for b in word) else word for word in words])

    def of(self, kind: str) -> xgr.TokenizerInfo:
        """That for one kind of constraint."""
        return self.json if kind in ("json", "json_object") else self.any_text


def _info(words: list[bytes]) -> xgr.TokenizerInfo:
    return xgr.TokenizerInfo(words, vocab_type=xgr.VocabType.RAW, vocab_size=len(words), stop_token_ids=[])
