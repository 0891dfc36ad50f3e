"""The settings of `engine bench` beside the engine's own, which go on to the server that is measured."""

from __future__ import annotations

from engine.embedding import Settings, setting


class BenchSettings(Settings):
    """A server has it, too, and a config file may be shared."""

    api_key: tuple[str, ...] | None = setting(
        None,
        "the key to send to the server, of several the first (default: none)",
        secret=True,
        repeatable=True,
        least=1,
    )
