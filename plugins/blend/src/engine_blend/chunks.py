"""Which chunks of prompts are cached: the core's half of `cacheblend`.

A chunk is what stands between two separators, or between a prompt's beginning and the first one; special tokens (the
first of all sequences, a chat template's) and what stands before them are no part of it. It is known by its own tokens,
whatever stood before it; where it lies, by the hashes of the blocks that it was computed in. So a chunk of which blocks
were given up is found as far as they are there, and one that was computed anew is found on its new pages.

Separators are looked for in the text, not among the tokens: a tokenizer may put a separator's ends together with what
stands beside them. A token that a separator shares with a chunk belongs to neither, and is always computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from engine.interfaces.evictor import Reuse

if TYPE_CHECKING:
    from engine.interfaces.context import CoreContext
    from engine_blend.card import CacheBlendOptions

_NO_TEXT = b"\xff"
"""In the place of tokens that stand for no text: it is in no text, so in no separator."""


class Chunk(NamedTuple):
    """A chunk of a cached sequence: where it begins there, and the hashes of the blocks that hold it."""

    position: int
    hashes: list[bytes]


class Chunks:
    """Least recently used pages go first; see `engine.interfaces.evictor.ReusingEvictor`."""

    def __init__(self, context: CoreContext) -> None:
        options: CacheBlendOptions = context.options
        self._shortest = options.shortest
        self._block_size = context.layout.block_size
        self._separator = options.separator.encode()
        self._texts = [piece or _NO_TEXT for piece in context.vocabulary()]
        ids = [] if context.encode is None else context.encode(options.separator)
        if len(ids) == 1 and ids[0] < len(self._texts):
            self._texts[ids[0]] = self._separator
        self._most = context.num_pages
        self._chunks: dict[bytes, Chunk] = {}  # the one that was remembered longest ago first
        self._candidates: dict[int, None] = {}  # pages, the one that was released longest ago first

    # -- what is no prefix --------------------------------------------------------------------------------------------
    def remember(self, root: bytes, tokens: np.ndarray, hashes: Sequence[bytes]) -> None:
        size = self._block_size
        for start, end in self._spans(tokens):
            key = _key(root, tokens[start:end])
            self._chunks.pop(key, None)
            self._chunks[key] = Chunk(start, list(hashes[start // size : -(-end // size)]))
        while len(self._chunks) > self._most:
            del self._chunks[next(iter(self._chunks))]

    def reuse(self, root: bytes, tokens: np.ndarray, start: int) -> list[Reuse]:
        size, found = self._block_size, []
        for begin, end in self._spans(tokens):
            chunk = self._chunks.get(_key(root, tokens[begin:end])) if end > start else None
            if chunk is not None:
                first = max(begin, start)
                position = chunk.position + first - begin
                hashes = chunk.hashes[position // size - chunk.position // size :]
                found.append(Reuse(first, end, position, hashes))
        return found

    def _spans(self, tokens: np.ndarray) -> list[tuple[int, int]]:
        """The chunks' first tokens, and those behind their last ones; the end of a prompt ends no chunk."""
        texts = self._texts
        pieces = [texts[token] if token < len(texts) else _NO_TEXT for token in tokens.tolist()]
        text, separator = b"".join(pieces), self._separator
        if (at := text.find(separator)) < 0:
            return []
        ends = np.cumsum([len(piece) for piece in pieces])
        begin, behind, spans = 0, 0, list[tuple[int, int]]()
        while at >= 0:
            end = int(np.searchsorted(ends, at, side="right"))  # of the chunk: the separator's first token
            if (special := text.rfind(_NO_TEXT, behind, at)) >= 0:
                begin = int(np.searchsorted(ends, special, side="right")) + 1
            if end - begin >= self._shortest:
                spans.append((begin, end))
            behind = at + len(separator)
            begin = int(np.searchsorted(ends, behind, side="left")) + 1
            at = text.find(separator, behind)
        return spans

    # -- the order of candidates --------------------------------------------------------------------------------------
    def on_commit(self, pages: np.ndarray, parents: np.ndarray, hashes: Sequence[bytes]) -> None:
        """Nothing to remember: the order is by release alone."""

    def on_touch(self, pages: np.ndarray) -> None:
        for page in pages.tolist():
            self._candidates.pop(page, None)

    def on_release(self, pages: np.ndarray) -> None:
        for page in pages[::-1].tolist():
            self._candidates.pop(page, None)
            self._candidates[page] = None

    def victims(self, n: int, table: int) -> np.ndarray:
        given = [page for page, _ in zip(self._candidates, range(n), strict=False)]
        for page in given:
            del self._candidates[page]
        return np.array(given, np.int32)

    def __len__(self) -> int:
        return len(self._candidates)

    def reset(self) -> None:
        self._candidates.clear()
        self._chunks.clear()

    def check_integrity(self) -> None:
        assert len(self._chunks) <= self._most


def _key(root: bytes, tokens: np.ndarray) -> bytes:
    return blake2b(root + tokens.astype("<i4", copy=False).tobytes(), digest_size=16).digest()
