"""The validated settings. Imports pydantic, so only a starting router imports this."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.embedding import Config, Merged, model_of
from engine.types.errors import ConfigError
from engine_router.settings import RouterSettings

if TYPE_CHECKING:

    class _Model(Config, RouterSettings): ...

else:
    _Model = model_of(RouterSettings)


class RouterConfig(_Model):
    """How the router listens, and which servers stand behind it."""

    def __init__(self, /, **keywords: Any) -> None:
        super().__init__(**keywords)


def read_config(merged: Merged) -> RouterConfig:
    """The settings, checked against each other. Raises ConfigError."""
    config = RouterConfig.from_merged(merged)
    if config.backend and (config.prefill or config.decode):
        found = "--backend names servers that answer whole requests, --prefill and --decode such that share them"
        raise ConfigError("stand in front of both", found, "name --backend alone, or --prefill and --decode")
    if bool(config.prefill) != bool(config.decode):
        lacking = "--decode" if config.prefill else "--prefill"
        raise ConfigError("let some servers compute prompts for others", f"{lacking} names none", f"pass {lacking} too")
    if config.overlap and config.order == "decode-first":
        found = "with --order decode-first what is computed is pushed as it comes"
        raise ConfigError("pull KV caches while they are computed", found, "leave --overlap out")
    if not (config.backend or config.prefill):
        raise ConfigError("route requests", "no server is named", "pass --backend URL,..., or --prefill and --decode")
    return config


def addresses(named: tuple[str, ...] | None) -> list[str]:
    """What flags, which may be repeated, and lists with commas name."""
    return [one.strip() for text in named or () for one in text.split(",") if one.strip()]
