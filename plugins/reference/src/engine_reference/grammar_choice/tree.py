"""The texts to choose from, as a tree of bytes whose nodes know which tokens lead on.

A text has many tokenisations, and a model may write any of them: "yes" as one token, as "y" and "es", or byte by byte.
So a node, which is the part of a text that has been written, allows every token whose bytes lead to another node, and
the ends of sequence where a text is complete. Nodes from which no text can be completed are left out, so that a mask is
never empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from engine_reference.grammar_choice.pieces import Pieces


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
