"""The card of the plain connector, and faulty ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import BaseModel

from engine.interfaces.kv_connector import KVConnectorCard, KVConnectorNeed


class PlainConnector(KVConnectorCard):
    """Keeps pages in a dictionary."""

    framework = "torch"
    stores = False
    swaps = True
    bodies: ClassVar[Mapping[str, str]] = {
        "core": "plain_connector_scheduler:PlainScheduler",
        "worker": "plain_connector:Plain",
    }


class PlainStoreCard(KVConnectorCard):
    """Keeps blocks in a dictionary of the process."""

    framework = "torch"
    bodies: ClassVar[Mapping[str, str]] = {
        "core": "plain_store_scheduler:PlainStoreScheduler",
        "worker": "plain_store:PlainStore",
    }


class TravellingCard(PlainStoreCard):
    """Loads take their time."""

    bodies: ClassVar[Mapping[str, str]] = {
        "core": "plain_store_scheduler:Travelling",
        "worker": "plain_store:PlainStore",
    }


class ByLayersCard(PlainStoreCard):
    """Loads go layer by layer."""

    layerwise = True
    bodies: ClassVar[Mapping[str, str]] = {
        "core": "plain_store_scheduler:PlainStoreScheduler",
        "worker": "plain_store:ByLayers",
    }


class PagedCard(PlainConnector):
    """Keeps pages of a pool that is no tensor."""

    framework = "jax"
    requires_minor = 4
    bodies: ClassVar[Mapping[str, str]] = {
        "core": "plain_connector_scheduler:PlainScheduler",
        "worker": "plain_connector:Paged",
    }


class PagedStoreCard(PlainStoreCard):
    """Keeps blocks of a pool that is no tensor."""

    framework = "jax"
    requires_minor = 4
    bodies: ClassVar[Mapping[str, str]] = {
        "core": "plain_store_scheduler:Travelling",
        "worker": "plain_store:PagedStore",
    }


class PeerOptions(BaseModel):
    """The engine's name."""

    name: str = ""


class PlainPeerCard(KVConnectorCard):
    """Engines of one process take pages from each other."""

    framework = "torch"
    Options = PeerOptions
    bodies: ClassVar[Mapping[str, str]] = {
        "core": "plain_peer_scheduler:PeerScheduler",
        "worker": "plain_peer:PlainPeer",
    }


class OneHalf(PlainConnector):
    """the card names no worker half"""

    bodies: ClassVar[Mapping[str, str]] = {"core": "plain_connector_scheduler:PlainScheduler"}


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
