"""Tokenizers whose ids stand for bytes, given as a table: what the drivers of this package have in common."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from engine.interfaces.context import FrontContext
from engine_kit.decoded_text import DecodedText, check_unicode
from engine_reference.tokenizer_hf.decoding import PieceDecoder
from engine_reference.tokenizer_hf.pieces import PieceRules
from engine_reference.tokenizer_hf.template import ChatTemplates


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer as a table.

    Attributes:
        pieces: by id, the bytes that it adds to a text that has begun; None: there is no such token.
        special: tokens that are looked for in a text before all else, as they are written, and their ids.
        hidden: ids that a text leaves out, unless it is asked to show them.
        before, behind: ids around every text.
        eos: ids that end a sequence.
        rules: what else makes text of bytes: a blank at the start that is dropped, and broken characters.
        longest: the most characters that an id stands for; None where there is no such number.
        plain: ids of a text without special tokens; whether it is the beginning of the sequence.
    """

    pieces: Sequence[bytes | None]
    special: Mapping[str, int]
    hidden: frozenset[int]
    before: tuple[int, ...]
    behind: tuple[int, ...]
    eos: tuple[int, ...]
    rules: PieceRules
    longest: int | None
    plain: Callable[[str, bool], list[int]]


class TableDecoder(PieceDecoder):
    """Ids to text, by the table."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.rules = vocabulary.rules
        self._table = vocabulary.pieces
        self._whole = {}

    def piece(self, token_id: int) -> bytes:
        """The bytes of an id; none for an id that is not in the table."""
        return (self._table[token_id] or b"") if 0 <= token_id < len(self._table) else b""


class TableTokenizer(DecodedText):
    """See `engine.interfaces.tokenizer.Tokenizer`. Drivers say what is `read` of a folder.

    Raises TokenizerError where the files are missing or broken.
    """

    def __init__(self, context: FrontContext) -> None:
        self.table, templates = self.read(context.folder)
        super().__init__(TableDecoder(self.table), templates, self.table.hidden)
        longest_first = sorted(self.table.special, key=len, reverse=True)
        self._special = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None

    def read(self, folder: str) -> tuple[Vocabulary, ChatTemplates]:
        """The table, and the chat templates in Jinja."""
        raise NotImplementedError

    @property
    def vocab_size(self) -> int:
        return len(self.table.pieces)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.table.eos

    @property
    def longest_token(self) -> int | None:
        return self.table.longest

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = self.own(text)
        return [*self.table.before, *ids, *self.table.behind] if add_special_tokens else ids

    def own(self, text: str) -> list[int]:
        """A text's ids, special tokens that are written in it among them."""
        check_unicode(text)
        parts = [text] if self._special is None else self._special.split(text)
        ids: list[int] = []
        for place, part in enumerate(parts):
            if place % 2:
                ids.append(self.table.special[part])
            elif part:
                ids += self.table.plain(part, not ids)
        return ids

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int | None]:
        return [*self.table.before, *self.own(first), *self.own(second), *self.table.behind], None

    def vocabulary(self) -> Sequence[bytes | None]:
        hidden = self.table.hidden
        return [None if i in hidden else piece or None for i, piece in enumerate(self.table.pieces)]


def longest_of(pieces: Sequence[bytes | None]) -> int:
    """The most characters that begin within a piece."""
    return max(1, *(sum(byte & 0xC0 != 0x80 for byte in piece) for piece in pieces if piece))
