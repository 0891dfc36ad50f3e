"""Settings: what can be set, where values come from, and the validated result.

`declaration`, `names` and `sources` are light (no pydantic); `settings` and `server`, which hold `EngineConfig` and
`ServerConfig`, are imported when an engine starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.config.server import ServerConfig
    from engine.config.settings import EngineArgs, EngineConfig

__all__ = ["EngineArgs", "EngineConfig", "ServerConfig"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module("engine.config." + ("server" if name == "ServerConfig" else "settings")), name)
