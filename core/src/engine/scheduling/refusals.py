"""What the scheduler refuses at once, whatever room there is."""

from __future__ import annotations

from engine.types.errors import InvalidRequestError, PromptTooLongError
from engine.types.request import EngineRequest


def check_prompt(request: EngineRequest, max_model_len: int) -> None:
    """Raise InvalidRequestError for a prompt without tokens, PromptTooLongError for one that leaves no room for a
    token to be generated (one that pools needs none)."""
    n, pools = len(request.prompt_token_ids), request.pooling is not None
    if n < 1:
        raise InvalidRequestError(f"add request {request.request_id!r}", "its prompt has no tokens")
    if n + (not pools) > max_model_len:
        more = "" if pools else "with at least one token to generate "
        raise PromptTooLongError(
            f"a prompt of {n} tokens", f"{more}it exceeds max_model_len={max_model_len}", "shorten the prompt"
        )
