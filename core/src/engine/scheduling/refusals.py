"""What the scheduler refuses at once, whatever room there is."""

from __future__ import annotations

from engine.kv.manager import KVManager
from engine.scheduling.request import Request
from engine.types.errors import InvalidRequestError, KVCacheTooSmallError, PromptTooLongError
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


def too_small(kv: KVManager, request: Request) -> KVCacheTooSmallError:
    """The error of a request that the KV cache could not hold if it were alone."""
    n, usable = request.num_tokens, kv.pool.num_usable
    return KVCacheTooSmallError(
        f"compute request {request.request_id!r} of {n} tokens",
        f"it needs at least {max(kv.pages_at_least(n, request.encoder), usable + 1)} KV pages, the cache has {usable}",
        "raise --kv-cache-memory or --num-kv-pages, or send a shorter prompt or a smaller max_tokens",
    )
