"""How layers divide over ranks. The one place that says how much of it stands."""

from __future__ import annotations

from engine.interfaces.model import ModelContext
from engine.types.errors import ConfigError


def unsupported_ranks(size: int) -> list[str]:
    """Why `size` ranks cannot share a model made of these layers: for a card's `unsupported`. Empty where they can."""
    return [f"its layers cannot be divided over {size} ranks yet"] if size > 1 else []


def partition(total: int, context: ModelContext, what: str) -> int:
    """This rank's share of `total` heads, rows or columns.

    Raises:
        ConfigError: for more than one rank; layers hold whole weights until they are given communicators.
    """
    if not 0 <= context.rank < context.size:
        raise ConfigError(f"{what} on rank {context.rank} of {context.size}", "there is no such rank")
    reasons = unsupported_ranks(context.size)
    if reasons:
        raise ConfigError(f"{what} divided over {context.size} ranks", reasons[0], "run on one rank")
    return total
