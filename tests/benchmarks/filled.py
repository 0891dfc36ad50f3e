"""A connector that has the whole blocks of every prompt: their pages are filled with bytes, and nothing is computed.

What decoding costs does not depend on what the pages hold, and each request has pages of its own as ever: so 64 prompts
of 1,024 tokens are there at once, which take minutes to compute.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from engine.interfaces.kv_connector import (
    Found,
    KVConnectorCard,
    KVConnectorScheduler,
    KVConnectorWorker,
    Pages,
    Transferable,
)
from engine.plugin.points import KV_CONNECTOR

if TYPE_CHECKING:
    import torch

    from engine.interfaces.context import CoreContext, WorkerContext

NAME = "filled"


class Filled(KVConnectorCard):
    """See above."""

    framework = "torch"
    bodies: ClassVar[Mapping[str, str]] = {
        "core": "tests.benchmarks.filled:Scheduler",
        "worker": "tests.benchmarks.filled:Worker",
    }


class Scheduler(KVConnectorScheduler):
    """See `engine.interfaces.kv_connector`."""

    def __init__(self, context: CoreContext) -> None:
        self._pages: list[np.ndarray] = []

    def lookup(self, request: Transferable, num_local: int) -> Found | None:
        """All of it."""
        more = request.num_loadable - num_local
        return Found(more) if more > 0 else None

    def allocated(self, request: Transferable, pages: Sequence[Pages], first: int, end: int) -> None:
        """Noted, for the worker."""
        self._pages += [each.pages for each in pages]

    def plan_section(self) -> bytes | None:
        """Their numbers."""
        pages, self._pages = self._pages, []
        return np.concatenate(pages).astype(np.int32).tobytes() if pages else None


class Worker(KVConnectorWorker):
    """See `engine.interfaces.kv_connector`."""

    def __init__(self, context: WorkerContext) -> None:
        self._pages: list[int] = []

    def register(self, pool: torch.Tensor) -> None:
        """The pool."""
        self._pool = pool

    def begin(self, step_id: int, section: bytes | None) -> None:
        """Which ones."""
        self._pages = [] if section is None else np.frombuffer(section, np.int32).tolist()

    def load(self, step_id: int) -> None:
        """With bytes that are extreme in no dtype: 0.01 as bfloat16 and float32, 1 as float16, 60 as int8."""
        self._pool[self._pages] = 0x3C


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """As a package's driver."""
    with tempfile.TemporaryDirectory(prefix="engine-filled-") as folder:
        group = KV_CONNECTOR.group(KV_CONNECTOR.majors[-1])
        info = Path(folder) / "engine_filled-0.1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: engine-filled\nVersion: 0.1.0\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n{NAME} = tests.benchmarks.filled:Filled\n")
        sys.path.append(folder)
        try:
            yield
        finally:
            sys.path.remove(folder)
