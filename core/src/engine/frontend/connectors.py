"""Whether requests that are preempted are swapped, and by which connector."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.interfaces.kv_connector import KVConnectorNeed
from engine.plugin import Registry, Selection, select_fitting
from engine.types.errors import ConfigError

if TYPE_CHECKING:
    from engine.config.settings import EngineConfig

POINT = "kv_connector"


def preemption_mode(config: EngineConfig) -> str:
    """ "swap" or "recompute": what is asked for, else "swap" where there is space for it.

    Raises ConfigError where mode, space and connector contradict each other.
    """
    mode, space = config.preemption_mode, config.swap_space
    if mode == "swap" and not space:
        raise ConfigError(
            "preemption_mode=swap",
            "swap_space is 0",
            "say how much host memory swapped pages may take: --swap-space 4GiB",
        )
    if mode == "recompute" and space:
        raise ConfigError(
            f"swap_space={space} with preemption_mode=recompute",
            "requests that are computed again need no swap space",
            "leave one of them out",
        )
    if space:
        return "swap"
    asked, options = config.asked(POINT), config.options_for(POINT)
    if asked is not None or options:
        raise ConfigError(
            f"kv_connector={asked}" if asked is not None else f"set an option of kv_connector to {options}",
            "nothing is swapped, and this engine uses connectors for nothing else",
            "give it memory with --swap-space, or leave it out",
        )
    return "recompute"


def choose_connectors(config: EngineConfig, registry: Registry, need: KVConnectorNeed) -> tuple[Selection, ...]:
    """The swap tier: the connector that was asked for, else the first that fits; nothing where nothing is swapped.

    Raises ConfigError as `preemption_mode`, and where several are named; PluginError as `select_fitting`.
    """
    if preemption_mode(config) != "swap":
        return ()
    asked = config.asked(POINT)
    if asked is not None and "," in asked:
        raise ConfigError(
            f"kv_connector={asked}", "this engine uses connectors for swapping, which one tier does", "name one of them"
        )
    if need.swap_space < need.page_bytes:
        raise ConfigError(
            f"swap_space={need.swap_space}",
            f"it is in bytes, and one page of the KV cache has {need.page_bytes:,} of them",
            "give more, e.g. --swap-space 4GiB",
        )
    return tuple(select_fitting(registry, POINT, need, asked, config.options_for(POINT))[:1])
