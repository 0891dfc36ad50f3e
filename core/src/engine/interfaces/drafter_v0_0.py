"""Drafters of minor version 0 in a core that speaks 0.1.

What has been added since: a drafter hears who enters and who leaves a slot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.interfaces.drafter import DraftSession
    from engine.types.plan import NewSlot


def adapt(body: type) -> type:
    """A body of 0.1: what it lacks of `enter` and `leave` does nothing."""
    missing = {name: does for name, does in (("enter", _enter), ("leave", _leave)) if not hasattr(body, name)}
    if not missing:
        return body
    same = {"__module__": body.__module__, "__qualname__": body.__qualname__, "__doc__": body.__doc__}
    return type(body.__name__, (body,), {**same, **missing})


def _enter(self: object, new: NewSlot) -> None:
    pass


def _leave(self: object, slot: int, num_tokens: int, session: DraftSession) -> None:
    pass
