"""Evictors of minor version 0 in a core that speaks 0.1.

Of 0.0 was `on_commit(pages, parents)`. What has changed since: an evictor learns the hashes of what pages hold.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


def adapt(body: type) -> type:
    """A body of 0.1 that is one of 0.0 in `on_commit`; one that takes hashes, or is no evictor, as it is."""
    method = getattr(body, "on_commit", None)
    if method is None or "hashes" in inspect.signature(method).parameters:
        return body

    class Adapted(body):  # type: ignore[misc]
        def on_commit(self, pages: np.ndarray, parents: np.ndarray, hashes: Sequence[bytes]) -> None:
            """See the interface; the hashes count for nothing."""
            super().on_commit(pages, parents)

    Adapted.__name__, Adapted.__qualname__, Adapted.__module__ = body.__name__, body.__qualname__, body.__module__
    Adapted.__doc__ = body.__doc__
    return Adapted
