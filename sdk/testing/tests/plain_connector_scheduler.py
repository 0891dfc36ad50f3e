"""The scheduler half of the plain connector."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.interfaces.kv_connector import Transferred
from engine_reference.connector_host.scheduler_half import HostScheduler


class PlainScheduler(HostScheduler):
    """That of `host`, whose worker half cannot fail."""

    def take(self, news: Sequence[bytes]) -> Transferred:
        """Pages that could not be filled, of several ranks."""
        return Transferred(failed=np.unique(np.concatenate([np.frombuffer(told, np.int32) for told in news])))
