"""A connector whose loads can fail: pages lie in a dictionary, and may get lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engine.interfaces.kv_connector import NO_PAGES, KVConnectorWorker
from engine.process import wire
from engine_reference.connector_host.scheduler_half import Copies

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext


class Plain(KVConnectorWorker):
    """See there."""

    def __init__(self, context: WorkerContext) -> None:
        self._decode = wire.decoder(Copies).decode
        self._kept: dict[int, torch.Tensor] = {}
        self._copies: Copies | None = None
        self._failed = NO_PAGES

    def lose(self) -> None:
        """All that is kept."""
        self._kept.clear()

    def register(self, pool: Any) -> None:
        """The pool."""
        self._pool = pool

    def begin(self, step_id: int, section: bytes | None) -> None:
        """Pages out."""
        assert section is not None
        copies = self._copies = self._decode(section)
        for page, place in zip(copies.out_page.tolist(), copies.out_place.tolist(), strict=True):
            self._kept[place] = self.keep(page)

    def keep(self, page: int) -> torch.Tensor:
        """What a page holds."""
        return self._pool[page].clone()

    def fill(self, page: int, kept: torch.Tensor) -> None:
        """One page."""
        self._pool[page] = kept

    def load(self, step_id: int) -> None:
        """Pages in, as far as they are there."""
        copies, failed = self._copies, []
        assert copies is not None
        for page, place in zip(copies.in_page.tolist(), copies.in_place.tolist(), strict=True):
            if place in self._kept:
                self.fill(page, self._kept[place])
            else:
                failed.append(page)
        self._failed = np.append(self._failed, np.array(failed, np.int32))

    def news(self) -> bytes | None:
        """Those that were not."""
        failed, self._failed = self._failed, NO_PAGES
        return failed.tobytes() or None


class Paged(Plain):
    """The same of a pool that is no tensor."""

    def keep(self, page: int) -> Any:
        """What a page holds, when it is asked."""
        return self._pool.read(np.array([page], np.int32))

    def fill(self, page: int, kept: Any) -> None:
        """One page."""
        self._pool.write(np.array([page], np.int32), kept())
