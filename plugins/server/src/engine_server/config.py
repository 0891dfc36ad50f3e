"""The validated settings of the server. Imports pydantic, so only a starting server imports this."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.embedding import Config, model_of
from engine_server.settings import ServerSettings

if TYPE_CHECKING:

    class _Model(Config, ServerSettings): ...

else:
    _Model = model_of(ServerSettings)


class ServerConfig(_Model):
    """How a server listens and what it lets in."""

    def __init__(self, /, **keywords: Any) -> None:
        super().__init__(**keywords)
