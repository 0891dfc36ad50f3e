"""Options and cards that are refused before anything is connected to."""

from __future__ import annotations

import pytest

from engine.interfaces.kv_connector import KVConnectorCard, KVConnectorNeed
from engine.types.parallel import Parallel
from engine_connectors.file.card import FileConnector
from engine_connectors.redis.card import RedisConnector, RedisOptions
from engine_connectors.tcp.card import TCPConnector


@pytest.mark.parametrize("url", ["redis://host/x", "rediss://host:1/1/2", "redis://host/-1"])
def test_a_database_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="number of no database"):
        RedisOptions(url=url)


@pytest.mark.parametrize("url", ["redis://host", "redis://host/", "rediss://host/12", "unix:///run/redis.sock"])
def test_addresses_that_are_some(url: str) -> None:
    assert RedisOptions(url=url).url == url


class OlderCard(KVConnectorCard):
    """Says no framework, and knows tensors alone."""


class ByLayersCard(KVConnectorCard):
    """Says no framework, and wants to be called for each layer."""

    requires_minor = 4
    layerwise = True


def test_who_serves_a_platform_without_tensors() -> None:
    """Those that move whole pages, and say that they take a `PagedPool`."""
    need = KVConnectorNeed(page_bytes=64, swap_space=0, parallel=Parallel(), device="xla", framework="jax")
    assert not FileConnector.mismatches(need) and not RedisConnector.mismatches(need)
    assert TCPConnector.mismatches(need) == ["it computes with torch, the platform with jax"]
    for card in (OlderCard, ByLayersCard):
        assert "whole pages alone" in card.mismatches(need)[0]
