"""Settings: what can be set, where values come from, and the validated result.

`declaration`, `names` and `sources` are light (no pydantic); `settings`, which holds `EngineConfig`, is imported when
an engine starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.config.settings import EngineArgs, EngineConfig

__all__ = ["EngineArgs", "EngineConfig"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from engine.config import settings

    return getattr(settings, name)
