"""A hook plugin that serves a page at `/`: chat, and a live view of the engine. It fetches nothing from elsewhere."""

from engine_playground.plugin import Playground, PlaygroundOptions

__all__ = ["Playground", "PlaygroundOptions"]
