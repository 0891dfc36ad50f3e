"""Documents that a chat template shows to the model beside the conversation: vLLM's `documents`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from engine_server.errors import APIError
from engine_server.thinking import alike, with_variables
from engine_server.turn import Conversation

if TYPE_CHECKING:
    from engine_server.state import ServerState

_NAME = "documents"
"""The variable that chat templates have, as Cohere's do."""


async def with_documents(
    state: ServerState, said: Conversation, documents: Sequence[Mapping[str, Any]] | None
) -> Conversation:
    """The conversation with them. Raises a 400 APIError where the template does not show them."""
    if not documents:
        return said
    shown = with_variables(said, **{_NAME: list(documents)})
    if await alike(state, said, shown):
        message = f"{_NAME}: this model's chat template does not show them; put them into a message"
        raise APIError(400, message, param=_NAME, code="unsupported_parameter")
    return shown
