"""Grammar `choice`: the output is one of some texts, which are a tree of bytes whose nodes know which tokens lead on.

A text has many tokenisations, and a model may write any of them: "yes" as one token, as "y" and "es", or byte by byte.
So a node, which is the part of a text that has been written, allows every token whose bytes lead to another node, and
the ends of sequence where a text is complete. Nodes from which no text can be completed are left out, so that a mask is
never empty.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, cast

import numpy as np

from engine.interfaces.grammar import GrammarCard
from engine.types.errors import InvalidRequestError

if TYPE_CHECKING:
    from engine.interfaces.context import GrammarContext
    from engine.interfaces.grammar import Matcher
    from engine.types.structured_outputs import StructuredOutputsParams

TREES = 64
"""How many trees are kept for further requests with the same texts."""


class ChoiceGrammar(GrammarCard):
    """The output is one of some texts: `structured_outputs.choice`, and nothing else."""

    priority = -100  # a driver that enforces more is taken where one is installed
    rollback = True
    constraints = frozenset({"choice"})
    body = "engine_reference.grammar_choice:ChoiceBody"


class Pieces:
    """Which ids stand for some bytes, and whether any token begins with them.

    Args:
        vocabulary: the bytes of each id, None for an id that stands for none.
        vocab_size: ids from here on cannot be drawn.
    """

    def __init__(self, vocabulary: Sequence[bytes | None], vocab_size: int) -> None:
        self._ids: dict[bytes, list[int]] = {}
        for token, piece in enumerate(vocabulary[:vocab_size]):
            if piece:
                self._ids.setdefault(piece, []).append(token)
        self._sorted = sorted(self._ids)

    def ids(self, piece: bytes) -> Sequence[int]:
        """The ids of exactly these bytes; several where a vocabulary spells one text in several ways."""
        return self._ids.get(piece, ())

    def some_begins(self, piece: bytes) -> bool:
        """Whether some token begins with these bytes, or is these."""
        place = bisect_left(self._sorted, piece)
        return place < len(self._sorted) and self._sorted[place].startswith(piece)


class Node:
    """A part of a text that has been written.

    Attributes:
        children: by the next byte.
        complete: a text ends here.
        moves: the node that each allowed id leads to; ends of sequence are not among them.
        words, bits: the mask, where it is not 0: int64 and int32 [k].
    """

    __slots__ = ("bits", "children", "complete", "moves", "words")

    def __init__(self) -> None:
        self.children: dict[int, Node] = {}
        self.complete = False
        self.moves: dict[int, Node] = {}
        self.words = np.empty(0, np.int64)
        self.bits = np.empty(0, np.int32)

    def write_mask(self, row: np.ndarray) -> None:
        """The mask into int32 [words]."""
        row.fill(0)
        row[self.words] = self.bits


def build(texts: Sequence[str], end_token_ids: Sequence[int], pieces: Pieces) -> tuple[Node, list[str]]:
    """The tree's root, and the texts that this vocabulary cannot spell."""
    root, nodes = Node(), []
    ends: dict[str, Node] = {}
    for text in texts:
        node = root
        for byte in text.encode():
            if byte not in node.children:
                node.children[byte] = Node()
                nodes.append(node.children[byte])
            node = node.children[byte]
        node.complete = True
        ends[text] = node
    # A node was made after the one above it: backwards, what lies below is known.
    for node in [*reversed(nodes), root]:
        node.moves = {
            token: target
            for piece, target in _below(node, pieces)
            if target.complete or target.moves
            for token in pieces.ids(piece)
        }
        ids = [*node.moves, *(end_token_ids if node.complete else ())]
        node.words, node.bits = _mask(ids)
    reached = _reached(root)
    return root, [text for text, node in ends.items() if id(node) not in reached]


def _below(node: Node, pieces: Pieces) -> Iterator[tuple[bytes, Node]]:
    """The nodes that are one token away at most, with the bytes between."""
    pending = [(bytes([byte]), child) for byte, child in node.children.items()]
    while pending:
        piece, child = pending.pop()
        if pieces.some_begins(piece):
            yield piece, child
            pending += [(piece + bytes([byte]), below) for byte, below in child.children.items()]


def _mask(ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    words: dict[int, int] = {}
    for token in ids:
        words[token >> 5] = words.get(token >> 5, 0) | 1 << (token & 31)
    return np.array([*words], np.int64), np.array([*words.values()], np.uint32).view(np.int32)


def _reached(root: Node) -> set[int]:
    """The nodes, by identity, that tokens lead to."""
    seen, pending = {id(root)}, [root]
    while pending:
        for node in pending.pop().moves.values():
            if id(node) not in seen:
                seen.add(id(node))
                pending.append(node)
    return seen


class ChoiceMatcher:
    """A place in a tree. See `engine.interfaces.grammar.Matcher`."""

    __slots__ = ("_ended", "_ends", "_path", "node")

    def __init__(self, root: Node, ends: frozenset[int]) -> None:
        self.node = root
        self._ends = ends
        self._ended = False
        self._path: list[Node] = []  # the nodes before it

    def accept(self, tokens: Sequence[int]) -> int:
        for count, token in enumerate(tokens):
            target = self.node.moves.get(token)
            if self._ended or (target is None and not (self.node.complete and token in self._ends)):
                return count
            if target is None:
                self._ended = True
            self._path.append(self.node)
            self.node = self.node if target is None else target
        return len(tokens)

    def rollback(self, num_tokens: int) -> None:
        if num_tokens:
            self.node = self._path[-num_tokens]
            del self._path[-num_tokens:]
            self._ended = False

    def forced_bytes(self) -> bytes:
        forced, node = bytearray(), self.node
        while not (self._ended or node.complete) and len(node.children) == 1:
            ((byte, node),) = node.children.items()
            forced.append(byte)
        return bytes(forced)

    @property
    def finished(self) -> bool:
        return self._ended or not self.node.moves


class ChoiceBody:
    """See `engine.interfaces.grammar.Grammar`."""

    def __init__(self, context: GrammarContext) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._pieces: Pieces | None = None
        self._tree = lru_cache(maxsize=TREES)(self._build_tree)

    def compile(self, constraint: StructuredOutputsParams, end_token_ids: Sequence[int]) -> Matcher:
        assert constraint.choice is not None, "the card serves nothing else"
        ends = tuple(token for token in end_token_ids if token < self._context.vocab_size)
        return ChoiceMatcher(self._tree(tuple(dict.fromkeys(constraint.choice)), ends), frozenset(ends))

    def fill_masks(self, matchers: Sequence[Matcher], rows: np.ndarray, out: np.ndarray) -> None:
        for matcher, row in zip(cast("Sequence[ChoiceMatcher]", matchers), rows.tolist(), strict=True):
            matcher.node.write_mask(out[row])

    def close(self) -> None:
        """What compiles ends by itself."""

    def _build_tree(self, texts: tuple[str, ...], ends: tuple[int, ...]) -> Node:
        root, missing = build(texts, ends, self._vocabulary())
        if missing:
            raise InvalidRequestError(
                f"structured_outputs.choice=[{missing[0]!r:.80}]",
                "the model's vocabulary cannot spell it",
                "leave it out, or write it differently",
            )
        return root

    def _vocabulary(self) -> Pieces:
        with self._lock:
            if self._pieces is None:
                self._pieces = Pieces(self._context.vocabulary(), self._context.vocab_size)
            return self._pieces
