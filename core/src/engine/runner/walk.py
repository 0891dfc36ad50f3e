"""The walk over a model's layers: here the plain one, which runs them all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from engine.interfaces.model import State


class PlainWalk:
    """Every layer, in order, with nobody looking on: the step stays one captured unit."""

    def __call__(self, layers: Iterable[Any], state: State) -> Iterator[Any]:
        """Iterate over the layers; see `engine.interfaces.model.Walk`."""
        return iter(layers)
