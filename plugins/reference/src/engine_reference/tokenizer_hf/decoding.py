"""Ids to text: all at once, and as they come in.

Two ways. `PieceDecoder` serves tokenizers whose tokens stand for bytes (see `pieces`): it joins the bytes and decodes
UTF-8 incrementally, so each token costs the same however long the sequence is. `WindowDecoder` serves the others by
decoding a short window again (the prefix-offset method of Hugging Face's text-generation-inference).

The library's own `DecodeStream` is not used: it raises on ids whose bytes are no UTF-8, as models do sample them.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence

from tokenizers import Tokenizer

from engine_reference.tokenizer_hf.pieces import PieceRules, gpt2_alphabet

_ESCAPED = re.compile("[\udc80-\udcff]")
_MAX_HELD = 8
"""Tokens that a window holds back for the sake of one character: more than the bytes of any."""


class PieceDecoder:
    """For tokenizers whose tokens stand for bytes.

    Its text is the library's, but for one case: where a run of "<0x..>" tokens is broken UTF-8, the library spoils
    every byte of the run; here whole characters of it survive, since they may have been shown already.
    """

    def __init__(self, tokenizer: Tokenizer, rules: PieceRules) -> None:
        self.rules = rules
        self._tokenizer = tokenizer
        self._alphabet = gpt2_alphabet()
        self._pieces: dict[int, bytes] = {}
        self._whole: dict[int, str] = {}

    def whole(self, token_id: int) -> str:
        """The text of an id whose bytes are whole characters; "" for others."""
        text = self._whole.get(token_id)
        if text is None:
            text = self._whole[token_id] = self.piece(token_id).decode("utf-8", "ignore")
            if text.encode() != self.piece(token_id):
                text = self._whole[token_id] = ""
        return text

    def piece(self, token_id: int) -> bytes:
        """The bytes of an id; none for an id that the tokenizer does not know."""
        piece = self._pieces.get(token_id)
        if piece is None:
            token = self._tokenizer.id_to_token(token_id)
            piece = b"" if token is None else self.rules.piece(token, self._alphabet)
            self._pieces[token_id] = piece
        return piece

    def first_piece(self, token_id: int) -> bytes | None:
        """The bytes of the first id of a sequence; None where the tokenizer does not know it."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return None
        return self.rules.piece(token.replace(self.rules.drop_first, ""), self._alphabet)

    def decode(self, ids: Sequence[int], skip: frozenset[int]) -> str:
        stream = PieceStream(self, skip)
        return stream.push(ids) + stream.flush()

    def token(self, token_id: int) -> str:
        return self.piece(token_id).decode("utf-8", "replace")

    def stream(self, skip: frozenset[int], prompt: Sequence[int]) -> PieceStream:
        stream = PieceStream(self, skip)
        # The start of the prompt decides about a leading space, its end may hold the first bytes of a character.
        read = 0
        while read < len(prompt) and stream.at_start:
            stream.push(prompt[read : read + 1])
            read += 1
        stream.push(prompt[max(read, len(prompt) - _MAX_HELD) :])
        return stream


class PieceStream:
    """One sequence's text; see `PieceDecoder`."""

    def __init__(self, decoder: PieceDecoder, skip: frozenset[int]) -> None:
        rules = decoder.rules
        self._decoder = decoder
        self._skip = skip
        self._drop_first = bool(rules.drop_first)
        self._strip = rules.strip
        self._strip_left = rules.strip_left
        # The byte fallback's broken bytes give one U+FFFD each, a byte-level tokenizer's one for each maximal part.
        self._escape = rules.byte_fallback
        self._utf8 = codecs.getincrementaldecoder("utf-8")("surrogateescape" if self._escape else "replace")
        self._plain = not (self._drop_first or self._strip_left or self._escape)

    @property
    def at_start(self) -> bool:
        """True while the next token may still lose a leading blank."""
        return self._drop_first or self._strip_left > 0

    def push(self, ids: Sequence[int]) -> str:
        piece, skip = self._decoder.piece, self._skip
        if len(ids) == 1 and self._plain and not self._utf8.buffer and ids[0] not in skip:
            text = self._decoder.whole(ids[0])
            if text:  # as nearly always
                return text
        if self._drop_first:
            data = self._push_first(ids)
        elif len(ids) == 1:
            data = b"" if ids[0] in skip else piece(ids[0])
        else:
            data = b"".join([piece(i) for i in ids if i not in skip])
        return self._text(data, False)

    def flush(self) -> str:
        return self._text(b"", True)

    def _push_first(self, ids: Sequence[int]) -> bytes:
        pieces: list[bytes] = []
        for token_id in ids:
            if token_id in self._skip:
                continue
            if self._drop_first:
                first = self._decoder.first_piece(token_id)
                self._drop_first = first is None
                pieces.append(first or b"")
            else:
                pieces.append(self._decoder.piece(token_id))
        return b"".join(pieces)

    def _text(self, data: bytes, final: bool) -> str:
        text = self._utf8.decode(data, final)
        if self._escape:
            text = _ESCAPED.sub("\ufffd", text)
        while self._strip_left and text:
            if text[0] != self._strip:
                self._strip_left = 0
                break
            text = text[1:]
            self._strip_left -= 1
        return text


class WindowDecoder:
    """For every other tokenizer: the library decodes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def text(self, ids: list[int]) -> str:
        """The library's text of these ids, special ones included."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def knows(self, token_id: int) -> bool:
        """Whether the id has a token."""
        return self._tokenizer.id_to_token(token_id) is not None

    def decode(self, ids: Sequence[int], skip: frozenset[int]) -> str:
        return self.text([i for i in ids if i not in skip])

    def token(self, token_id: int) -> str:
        return self.text([token_id])

    def stream(self, skip: frozenset[int], prompt: Sequence[int]) -> WindowStream:
        tail = [i for i in prompt[-2 * _MAX_HELD :] if i not in skip]
        return WindowStream(self, skip, tail[-_MAX_HELD:])


class WindowStream:
    """One sequence's text; see `WindowDecoder`.

    The window is the ids of the last piece of text that was given out, and those since. The text of the first is
    known, so what the window's text has beyond it is new.
    """

    def __init__(self, decoder: WindowDecoder, skip: frozenset[int], prompt: list[int]) -> None:
        self._decoder = decoder
        self._skip = skip
        self._window = prompt
        self._shown_ids = len(prompt)
        self._shown_text = decoder.text(prompt) if prompt else ""

    def push(self, ids: Sequence[int]) -> str:
        out: list[str] = []
        for token_id in ids:
            if token_id in self._skip or not self._decoder.knows(token_id):
                continue
            self._window.append(token_id)
            text = self._decoder.text(self._window)
            held = len(self._window) - self._shown_ids
            if len(text) > len(self._shown_text) and (not text.endswith("\ufffd") or held >= _MAX_HELD):
                out.append(text[len(self._shown_text) :])
                self._window = self._window[self._shown_ids :]
                self._shown_ids = len(self._window)
                self._shown_text = self._decoder.text(self._window)
        return "".join(out)

    def flush(self) -> str:
        if len(self._window) == self._shown_ids:
            return ""
        rest = self._decoder.text(self._window)[len(self._shown_text) :]
        self._shown_ids = len(self._window)
        self._shown_text = self._shown_text + rest
        return rest
