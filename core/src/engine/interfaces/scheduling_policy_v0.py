"""Scheduling policies of major 0 in a core that speaks major 1.

Of major 0 was `victim(running)`. What has changed since: a policy learns how many pages each victim would bring.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.interfaces.scheduling_policy import Schedulable


def adapt(body: type) -> type:
    """A body of major 1 that is one of major 0 in all but `victim`."""

    class Adapted(body):  # type: ignore[misc]
        def victim(self, running: Sequence[Schedulable], pages: Sequence[int]) -> Any:
            """See the interface; the pages count for nothing."""
            return super().victim(running)

    Adapted.__name__, Adapted.__qualname__, Adapted.__module__ = body.__name__, body.__qualname__, body.__module__
    Adapted.__doc__ = body.__doc__
    return Adapted
