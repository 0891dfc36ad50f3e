"""The settings of `engine chat` beside the engine's own."""

from __future__ import annotations

from engine.embedding import Settings, setting


class ChatSettings(Settings):
    """A server has both, too, and a config file may be shared."""

    api_key: tuple[str, ...] | None = setting(
        None, "the key to send to the server of --url (default: none)", secret=True, repeatable=True, least=1
    )
    verbose: bool = setting(False, "tell at the start all that was decided: the drivers at work, and why")
