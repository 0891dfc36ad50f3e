"""Kernels that Triton compiles while requests are computed: each stalls the steps of all of them for a second or more.

What is launched at start, for the largest step and for captured ones, is compiled before anybody waits. A form of a
kernel that comes later is told in the log, so that whoever sees a stall knows of what, and which form a driver should
have launched earlier.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Any

logger = logging.getLogger(__name__)


class LateKernels:
    """A listener to Triton's compiler, beside whoever listens already.

    Attributes:
        serving: results of steps were fetched, and no engine of this process has started since.
        seen: kernels that were compiled while serving; those that lay in Triton's cache on disk are none.
    """

    def __init__(self) -> None:
        self.serving = False
        self.seen = 0
        self._other: Any = None
        self._listens = False

    def listen(self) -> None:
        """What is compiled from now on is a start's. Installed once: who came later may call this one in turn."""
        self.serving = False
        if self._listens or find_spec("triton") is None:
            return
        from triton import knobs

        self._listens = True
        self._other = knobs.compilation.listener
        knobs.compilation.listener = self

    def __call__(self, *, src: Any, times: Any, cache_hit: bool, **more: Any) -> None:
        """Triton's call behind each compilation; times: of its stages, in microseconds."""
        if self.serving and not cache_hit:
            self.seen += 1
            logger.warning(
                "kernel %s was compiled while requests were computed, which waited %.1f s for it (late: %d)",
                getattr(src, "name", "of an unknown name"), times.total / 1e6, self.seen,
            )  # fmt: skip
        if self._other is not None:
            self._other(src=src, times=times, cache_hit=cache_hit, **more)


late_kernels = LateKernels()
