"""Options that are refused before anything is connected to."""

from __future__ import annotations

import pytest

from engine_connectors.redis.card import RedisOptions


@pytest.mark.parametrize("url", ["redis://host/x", "rediss://host:1/1/2", "redis://host/-1"])
def test_a_database_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="number of no database"):
        RedisOptions(url=url)


@pytest.mark.parametrize("url", ["redis://host", "redis://host/", "rediss://host/12", "unix:///run/redis.sock"])
def test_addresses_that_are_some(url: str) -> None:
    assert RedisOptions(url=url).url == url
