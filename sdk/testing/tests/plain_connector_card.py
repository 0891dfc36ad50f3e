"""The card of the plain connector, and faulty ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from engine.interfaces.kv_connector import KVConnectorCard, KVConnectorNeed


class PlainConnector(KVConnectorCard):
    """Keeps pages in a dictionary."""

    framework = "torch"
    swaps = True
    bodies: ClassVar[Mapping[str, str]] = {
        "core": "engine_reference.connector_host.scheduler_half:HostScheduler",
        "worker": "plain_connector:Plain",
    }


class OneHalf(PlainConnector):
    """the card names no worker half"""

    bodies: ClassVar[Mapping[str, str]] = {"core": "engine_reference.connector_host.scheduler_half:HostScheduler"}


class HeavyHalf(PlainConnector):
    """the scheduler half imports torch"""

    bodies: ClassVar[Mapping[str, str]] = {
        "core": "mutants_kv_connector:Heavy",
        "worker": "plain_connector:Plain",
    }


class Moody(PlainConnector):
    """the card answers differently when it is asked again"""

    asked = 0

    @classmethod
    def unsupported(cls, need: KVConnectorNeed) -> list[str]:
        cls.asked += 1
        return super().unsupported(need) if cls.asked % 2 else ["not now"]
