"""The card of connector `nixl`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import ClassVar

from pydantic import Field

from engine.interfaces.kv_connector import KVConnectorCard, KVConnectorNeed
from engine_connectors.tcp.card import TCPOptions

PACKAGES = ("nixl", "nixl_cu13", "nixl_cu12")
"""The library's builds, each importable by its own name; `nixl` chooses among those beside it."""


class NixlOptions(TCPOptions):
    """Options of `nixl`: those of `tcp`, which are of what engines tell each other, and two more.

    Attributes:
        backend: which of the library's backends moves the pages.
        backend_threads: of the backend's own; 0: it does without.
    """

    backend: str = Field(default="UCX", min_length=1)
    backend_threads: int = Field(default=0, ge=0, le=64)


class NixlConnector(KVConnectorCard):
    """Lets an engine read keys and values of a prompt straight out of the pool of the engine that computed it."""

    priority = -20  # by name: it needs another engine
    framework = "torch"
    Options = NixlOptions
    bodies: ClassVar[Mapping[str, str]] = {
        "core": "engine_connectors.tcp.scheduler_half:TCPScheduler",
        "worker": "engine_nixl.worker_half:NixlWorker",
    }

    @classmethod
    def unsupported(cls, need: KVConnectorNeed) -> list[str]:
        reasons = []
        if not any(map(find_spec, PACKAGES)):
            reasons.append("the library is not installed: pip install 'engine-nixl[cu12]' (or [cu13])")
        if need.device.partition(":")[0] not in ("cpu", "cuda"):
            reasons.append(f"it registers host memory and that of GPUs, and these pages are on {need.device}")
        return reasons
