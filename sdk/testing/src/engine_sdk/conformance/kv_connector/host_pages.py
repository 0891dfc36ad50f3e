"""A pool as a platform with another framework than torch has it, in host memory."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np


class HostPages:
    """Implements `engine.interfaces.kv_connector.PagedPool`, and holds its users to it.

    Args:
        rows: uint8 [num_pages, page_bytes].
    """

    def __init__(self, rows: np.ndarray) -> None:
        self._rows = rows
        self._thread = threading.get_ident()
        self.page_bytes = rows.shape[1]

    def read(self, pages: np.ndarray) -> Callable[[], np.ndarray]:
        """See there."""
        self._check(pages)
        found = self._rows[pages]
        found.flags.writeable = False
        return lambda: found

    def write(self, pages: np.ndarray, content: np.ndarray) -> None:
        """See there."""
        self._check(pages)
        assert content.dtype == np.uint8, f"pages are filled with {content.dtype}"
        assert content.shape == (len(pages), self.page_bytes), f"{len(pages)} pages are filled with {content.shape}"
        self._rows[pages] = content

    def _check(self, pages: np.ndarray) -> None:
        assert threading.get_ident() == self._thread, "another thread than that of `begin` and `load` uses the pool"
        assert pages.dtype == np.int32 and pages.ndim == 1, f"pages are {pages.dtype}{list(pages.shape)}"
