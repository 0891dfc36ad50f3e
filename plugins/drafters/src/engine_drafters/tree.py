"""What `eagle` and `medusa` can be told: a head, and a static tree of drafts, a list of paths of choices, as Medusa's
and EAGLE's are published.

A path names a draft by which choice it is at each place, from 0 for the likeliest: [0, 2] is the third choice for the
second place, behind the first choice for the first (`medusa_choices` of FasterDecoding, `tree_choices` of SafeAILab).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import Field, field_validator, model_validator

from engine.interfaces.drafter import DrafterOptions, seen_from

MOST_NODES = 64
"""Drafts of a row, as attention takes them."""

# fmt: off
TREES: Mapping[str, tuple[tuple[int, ...], ...]] = MappingProxyType({
    "tiny": (
        (0,), (0, 0), (0, 0, 0), (0, 0, 0, 0),
        (1,), (2,), (3,), (4,), (0, 1), (0, 2), (1, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (0, 0, 1, 0), (0, 1, 0, 0),
    ),
})
# fmt: on
"""By name. `tiny`: for the heads of the bundled model, found by `python -m engine_drafters.train tree --count 16`."""


class HeadOptions(DrafterOptions):
    """Options of `eagle` and `medusa`. With a tree, `num_tokens` is by default the number of its nodes.

    Args:
        model: the folder of a head in one of the published layouts; None: the one that comes with this package, where
            it has one for the model.
        tensor_parallel_size: 1: every rank holds and computes it whole; None: it is divided as the model is.
        tree: what is drafted, as paths of choices, or by name; here they stand in the order of `ordered`. None: a
            chain of first choices.
    """

    model: str | None = Field(default=None, min_length=1)
    tensor_parallel_size: Literal[1] | None = None
    tree: tuple[tuple[int, ...], ...] | None = None

    @model_validator(mode="before")
    @classmethod
    def _count(cls, given: dict[str, Any]) -> dict[str, Any]:
        if isinstance(tree := read_tree(given.get("tree")), list | tuple):
            given = {"num_tokens": min(max(1, len(tree)), MOST_NODES), **given, "tree": tree}
        return given

    @field_validator("tree")
    @classmethod
    def _order(cls, tree: tuple[tuple[int, ...], ...] | None) -> tuple[tuple[int, ...], ...] | None:
        return None if tree is None else ordered(tree)

    @model_validator(mode="after")
    def _fits(self) -> HeadOptions:
        if self.tree is not None and len(self.tree) > self.num_tokens:
            raise ValueError(f"num_tokens is {self.num_tokens}, fewer than the {len(self.tree)} nodes of the tree")
        return self


def read_tree(given: Any) -> Any:
    """A tree by its name, or JSON of it, as a list. Raises ValueError where it is neither."""
    if not isinstance(given, str):
        return given
    if given in TREES:
        return TREES[given]
    try:
        return json.loads(given)
    except json.JSONDecodeError:
        named = ", ".join(map(repr, TREES))
        raise ValueError(f"a tree is a list of paths, like [[0], [0, 0], [1]], or one of {named}") from None


def ordered(paths: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """The nodes as they are computed: the chain of first choices, then the others, those near the root first.

    Raises ValueError where that is no tree, or one too large.
    """
    if not paths or not all(paths):
        raise ValueError("a tree has at least one path, and a path at least one choice")
    if len(paths) > MOST_NODES:
        raise ValueError(f"a tree of {len(paths)} nodes; at most {MOST_NODES} are served")
    known = set(paths)
    if len(known) < len(paths):
        raise ValueError(f"the path {list(next(path for path in paths if paths.count(path) > 1))} stands there twice")
    for path in paths:
        if not all(0 <= choice < MOST_NODES for choice in path):
            raise ValueError(f"the path {list(path)} has a choice that is not from 0 to {MOST_NODES - 1}")
        if len(path) > 1 and path[:-1] not in known:
            raise ValueError(f"the path {list(path)} has no parent: {list(path[:-1])} is missing")
    return tuple(sorted(paths, key=lambda path: (any(path), len(path), path)))


def parents_of(tree: Sequence[tuple[int, ...]]) -> np.ndarray:
    """int32 [n]: see `engine.interfaces.drafter.Drafts`."""
    node = {path: number for number, path in enumerate(tree)}
    return np.array([node.get(path[:-1], -1) for path in tree], np.int32)


class Level(NamedTuple):
    """Nodes of one depth that others follow.

    Args:
        drafts: which they are; none for the root.
        above: of each the place in the level before of the node that it follows.
        place: int64 [n], host; how far each stands behind the root.
        hidden: int64 [n], host: see `engine.interfaces.drafter.DraftBatch`; None where each sees all before it.
        children: which drafts follow, by (the place here of the node that they follow, which choice they are).
    """

    drafts: tuple[int, ...]
    above: tuple[int, ...]
    place: np.ndarray
    hidden: np.ndarray | None
    children: Mapping[int, tuple[int, int]]

    @property
    def most(self) -> int:
        """The highest choice of any child."""
        return max(choice for _, choice in self.children.values())


def levels_of(tree: Sequence[tuple[int, ...]]) -> list[Level]:
    """The levels of a tree in `ordered` order, the root's first."""
    number = {path: draft for draft, path in enumerate(tree)}
    _, hidden = seen_from(parents_of(tree))
    levels: list[Level] = []
    above: dict[tuple[int, ...], int] = {}
    for depth in range(max(map(len, tree))):
        paths = sorted({path[:-1] for path in tree if len(path) == depth + 1}, key=lambda path: number.get(path, -1))
        here = {path: place for place, path in enumerate(paths)}
        place = np.array([number.get(path, -1) + 1 for path in paths], np.int64)
        levels.append(
            Level(
                tuple(number[path] for path in paths if path),
                tuple(above[path[:-1]] for path in paths if path),
                place,
                hidden[place] if hidden[place].any() else None,
                {number[path]: (here[path[:-1]], path[-1]) for path in tree if len(path) == depth + 1},
            )
        )
        above = here
    return levels
