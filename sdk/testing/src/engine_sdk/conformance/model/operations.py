"""The operations that a model's card names, and no others."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from engine.interfaces.ops import LATENT_OPERATIONS, OPERATIONS


class NamedOperations:
    """Reference operations for a body under test: what its card does not name is not there, as in a worker.

    Args:
        ops: all of them.
        named: by the model's card.
    """

    def __init__(self, ops: Any, named: Collection[str]) -> None:
        self._ops = ops
        self._named = {*(name for name in OPERATIONS if name not in LATENT_OPERATIONS), *named}

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_"):
            assert name in self._named, f"the body calls '{name}', which the card does not name among its operations"
        return getattr(self._ops, name)
