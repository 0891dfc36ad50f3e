"""Where pages go elsewhere: whether a start has a use for connectors, and who swaps where nobody is named."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, cast

from engine.interfaces.kv_connector import KVConnectorCard, KVConnectorNeed
from engine.plugin import Registry, points
from engine.plugin.choosing import or_quarantine, ranked
from engine.plugin.points import PICKS
from engine.plugin.selection import answer
from engine.types.errors import ConfigError


def connects(config: Any, need: KVConnectorNeed, swaps: bool) -> bool:
    """Whether there is a use for them: pages of preempted requests are swapped, or one is named. Raises ConfigError
    where there is no room for a page, and for options of nobody."""
    if not swaps:
        if config.asked("kv_connector") is None and bool(config.options_for("kv_connector")):
            raise ConfigError(
                f"set an option of kv_connector to {config.options_for('kv_connector')}",
                "no connector is named, and nothing is swapped",
                "name one with --kv-connector, or give memory to the swap tier with --swap-space",
            )
        return config.asked("kv_connector") is not None
    if need.swap_space < need.page_bytes:
        raise ConfigError(
            f"swap_space={need.swap_space}",
            f"it is in bytes, and one page of the KV cache has {need.page_bytes:,} of them",
            "give more, e.g. --swap-space 4GiB",
        )
    return True


def swap_tier(asks: Mapping[str, KVConnectorNeed], registry: Registry) -> str | None:
    """The first that swaps and fits; None leaves the error to the choice."""
    cards, _ = ranked(registry, points.KV_CONNECTOR.name)
    pick = PICKS[points.KV_CONNECTOR.pick]
    for candidate, card in cards:
        ask = partial(answer, pick, card, candidate, asks)
        if cast("type[KVConnectorCard]", card).swaps and or_quarantine(registry, candidate, ask).fit:
            return candidate.name
    return None
