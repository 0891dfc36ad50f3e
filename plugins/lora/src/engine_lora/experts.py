"""What adapters add to the experts of a mixture.

The rows that experts compute, each its own, are those of as many adapters as there are pairs of an adapter and an
expert: the operation that adapts linear layers computes them so, sorted by both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch


class Tokens(NamedTuple):
    """Whose rows of a layer's inputs are whose: see operation `lora_add`."""

    tokens: torch.Tensor
    starts: torch.Tensor


class AdaptedExperts:
    """Implements `engine_kit.routing.ExpertAdapters`.

    Args:
        memories: of the first projections and of the second ones, with a place for each expert of each adapter.
        count: of experts. groups: int64 [places in a memory + 1], 0, 1, 2, ...
        places: of the step's tokens int64 [n], their adapters' places; None where nobody has an adapter.
        add: operation `lora_add`.
    """

    def __init__(
        self,
        memories: tuple[Any, Any],
        count: int,
        groups: torch.Tensor,
        places: Callable[[torch.Tensor], torch.Tensor | None],
        add: Callable[..., Any],
    ) -> None:
        self._memories = memories
        self._count = count
        self._groups = groups
        self._places = places
        self._add = add

    def rows(self, tokens: torch.Tensor, experts: torch.Tensor) -> Tokens | None:
        """See there."""
        place = self._places(tokens)
        if place is None:
            return None
        group = torch.where(place > 0, (place - 1) * self._count + experts, len(self._groups))
        order = group.argsort(stable=True)
        return Tokens(order.int(), torch.searchsorted(group[order], self._groups).int())

    def add(self, last: bool, x: torch.Tensor, y: torch.Tensor, rows: Tokens | None) -> torch.Tensor:
        """See there."""
        if rows is None:
            return y
        return cast(torch.Tensor, self._add(x, y, self._memories[last], *rows))
