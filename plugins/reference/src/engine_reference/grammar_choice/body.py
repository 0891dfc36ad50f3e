"""The body of grammar `choice`."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, cast

from engine.types.errors import InvalidRequestError
from engine_reference.grammar_choice.pieces import Pieces
from engine_reference.grammar_choice.tree import Node, build

if TYPE_CHECKING:
    import numpy as np

    from engine.interfaces.context import GrammarContext
    from engine.interfaces.grammar import Matcher
    from engine.types.structured_outputs import StructuredOutputsParams

TREES = 64
"""How many trees are kept for further requests with the same texts."""


class ChoiceMatcher:
    """A place in a tree. See `engine.interfaces.grammar.Matcher`."""

    __slots__ = ("_ended", "_ends", "_path", "node")

    def __init__(self, root: Node, ends: frozenset[int]) -> None:
        self.node = root
        self._ends = ends
        self._ended = False
        self._path: list[Node] = []  # the nodes before it

    def accept(self, tokens: Sequence[int]) -> int:
        """See the interface."""
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
        """See the interface."""
        if num_tokens:
            self.node = self._path[-num_tokens]
            del self._path[-num_tokens:]
            self._ended = False

    def forced_bytes(self) -> bytes:
        """See the interface."""
        forced, node = bytearray(), self.node
        while not (self._ended or node.complete) and len(node.children) == 1:
            ((byte, node),) = node.children.items()
            forced.append(byte)
        return bytes(forced)

    @property
    def finished(self) -> bool:
        """See the interface."""
        return self._ended or not self.node.moves


class Choice:
    """See `engine.interfaces.grammar.Grammar`."""

    def __init__(self, context: GrammarContext) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._pieces: Pieces | None = None
        self._tree = lru_cache(maxsize=TREES)(self._build_tree)

    def compile(self, constraint: StructuredOutputsParams, end_token_ids: Sequence[int]) -> Matcher:
        """See the interface."""
        assert constraint.choice is not None, "the card serves nothing else"
        ends = tuple(token for token in end_token_ids if token < self._context.vocab_size)
        return ChoiceMatcher(self._tree(tuple(dict.fromkeys(constraint.choice)), ends), frozenset(ends))

    def fill_masks(self, matchers: Sequence[Matcher], rows: np.ndarray, out: np.ndarray) -> None:
        """See the interface."""
        for matcher, row in zip(cast("Sequence[ChoiceMatcher]", matchers), rows.tolist(), strict=True):
            matcher.node.write_mask(out[row])

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
