"""The card of connector `host`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from engine.interfaces.kv_connector import KVConnectorCard, KVConnectorNeed


class HostConnector(KVConnectorCard):
    """Keeps the pages of preempted requests, and of computed blocks, in host memory taken at start (`--swap-space`)."""

    requires_minor = 4
    swaps = True
    bodies: ClassVar[Mapping[str, str]] = {
        "core": "engine_reference.connector_host.cached_blocks:CachingHostScheduler",
        "worker": "engine_reference.connector_host.worker_half:HostWorker",
    }

    @classmethod
    def unsupported(cls, need: KVConnectorNeed) -> list[str]:
        reasons = []
        if not need.swap_space:
            reasons.append("there is no swap space (--swap-space)")
        elif need.swap_space < need.page_bytes:
            reasons.append(f"a swap space of {need.swap_space:,} bytes holds no page of {need.page_bytes:,} bytes")
        return reasons
