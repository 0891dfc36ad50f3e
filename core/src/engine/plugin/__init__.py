"""The plugin host: points, cards, discovery, selection, the manifest and hooks.

Importing this package is light: only points and cards come with it, the rest is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from engine.plugin.card import Card
from engine.plugin.points import POINTS, Point

if TYPE_CHECKING:
    from engine.plugin.command import Command
    from engine.plugin.discovery import Candidate, Registry
    from engine.plugin.hooks import HookRelay
    from engine.plugin.hookspecs import hookimpl
    from engine.plugin.loading import load_body
    from engine.plugin.manifest import Manifest, ManifestEntry
    from engine.plugin.plugin_list import PluginList
    from engine.plugin.selection import (
        Selection,
        Verdict,
        select,
        select_architecture,
        select_claims,
        select_default_model,
        select_fitting,
        select_kinds,
        select_ordered,
    )
    from engine.plugin.selection_in_turn import select_in_turn
    from engine.plugin.selection_recognised import select_recognised
    from engine.plugin.selection_set import select_set

__all__ = [
    "POINTS",
    "Candidate",
    "Card",
    "Command",
    "HookRelay",
    "Manifest",
    "ManifestEntry",
    "PluginList",
    "Point",
    "Registry",
    "Selection",
    "Verdict",
    "hookimpl",
    "load_body",
    "select",
    "select_architecture",
    "select_claims",
    "select_default_model",
    "select_fitting",
    "select_in_turn",
    "select_kinds",
    "select_ordered",
    "select_recognised",
    "select_set",
]

_HOMES = {
    "Candidate": "discovery",
    "Registry": "discovery",
    "Command": "command",
    "HookRelay": "hooks",
    "hookimpl": "hookspecs",
    "load_body": "loading",
    "Manifest": "manifest",
    "ManifestEntry": "manifest",
    "PluginList": "plugin_list",
    "Selection": "selection",
    "Verdict": "selection",
    "select": "selection",
    "select_architecture": "selection",
    "select_claims": "selection",
    "select_default_model": "selection",
    "select_fitting": "selection",
    "select_in_turn": "selection_in_turn",
    "select_kinds": "selection",
    "select_ordered": "selection",
    "select_recognised": "selection_recognised",
    "select_set": "selection_set",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value
