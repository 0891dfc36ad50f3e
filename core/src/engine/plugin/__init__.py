"""The plugin host: points, cards, discovery, selection, the manifest and hooks.

Importing this package is light: only points and cards come with it, the rest is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from engine.plugin.card import Card as Card
from engine.plugin.card import Command as Command
from engine.plugin.points import POINTS as POINTS
from engine.plugin.points import Point as Point

if TYPE_CHECKING:
    from engine.plugin.candidate import Candidate as Candidate
    from engine.plugin.choosing import choose as choose
    from engine.plugin.choosing import choose_one as choose_one
    from engine.plugin.discovery import Registry as Registry
    from engine.plugin.hooks import HookRelay as HookRelay
    from engine.plugin.hookspecs import hookimpl as hookimpl
    from engine.plugin.loading import load_body as load_body
    from engine.plugin.plugin_list import PluginList as PluginList
    from engine.plugin.selection import Selection as Selection
    from engine.plugin.selection import Verdict as Verdict

_HOMES = {
    "Candidate": "candidate",
    "choose": "choosing",
    "choose_one": "choosing",
    "Registry": "discovery",
    "HookRelay": "hooks",
    "hookimpl": "hookspecs",
    "load_body": "loading",
    "PluginList": "plugin_list",
    "Selection": "selection",
    "Verdict": "selection",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value
