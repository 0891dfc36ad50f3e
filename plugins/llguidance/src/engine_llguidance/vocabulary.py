"""The vocabulary as LLGuidance wants it."""

from __future__ import annotations

from collections.abc import Sequence

from llguidance import LLTokenizer, TokenizerWrapper


class Pieces:
    """The bytes of the ids, in the form of a tokenizer. The library never has to tokenise: nothing is forced."""

    bos_token_id = None
    special_token_ids: Sequence[int] = ()

    def __init__(self, tokens: Sequence[bytes], end: int) -> None:
        self.tokens = tokens
        self.eos_token_id = end
        self._ids = {piece: token for token, piece in enumerate(tokens) if len(piece) == 1}

    def __call__(self, text: bytes | str) -> list[int]:
        """Byte by byte."""
        data = text.encode() if isinstance(text, str) else text
        return [self._ids[bytes([byte])] for byte in data if bytes([byte]) in self._ids]


def tokenizer(pieces: Sequence[bytes | None], vocab_size: int, ends: Sequence[int]) -> LLTokenizer:
    """What the library knows of the tokens. It wants an end: where there is none, one is made up behind the vocabulary,
    and masks have one id more."""
    size = vocab_size + (not ends)
    tokens = [piece or b"" for piece in pieces[:vocab_size]]
    tokens += [b""] * (size - len(tokens))
    known = list(ends) or [vocab_size]
    for end in known:
        tokens[end] = b""
    return LLTokenizer(TokenizerWrapper(Pieces(tokens, known[0])), eos_token=known)
