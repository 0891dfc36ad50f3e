"""What a server that computes prompts is asked, and what the one that goes on is told: `kv_transfer_params`, as vLLM's
proxies have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ROUTES: Mapping[str, Mapping[str, Any]] = {
    "/v1/completions": {"max_tokens": 1},
    "/v1/chat/completions": {"max_tokens": 1},
    "/v1/responses": {"max_output_tokens": 1, "store": False},
    "/v1/messages": {"max_tokens": 1},
}
"""The routes whose prompts another server can compute, and what ends a request behind its prompt."""

_FOR_PREFILL: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_NOT_FOR_PREFILL = (
    *("stream", "stream_options", "n", "best_of", "logprobs", "top_logprobs", "echo", "min_tokens", "background"),
    *("response_format", "structured_outputs"),
    *("max_completion_tokens", "thinking_token_budget", "return_token_ids", "return_tokens_as_token_ids"),
)
"""What says something of the answer, which nobody reads."""


def divisible(path: str, data: Mapping[str, Any]) -> bool:
    """Whether a prompt may be computed elsewhere: one prompt, that stands in the body, and is not scored."""
    if path not in ROUTES or data.get("prompt_logprobs") is not None or data.get("previous_response_id") is not None:
        return False
    prompt = data.get("prompt")
    return not (isinstance(prompt, list) and prompt and not isinstance(prompt[0], int))


def for_prefill(path: str, data: Mapping[str, Any], params: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The body for the server that computes the prompt; with more `params` of the transfer."""
    kept = {**{name: value for name, value in data.items() if name not in _NOT_FOR_PREFILL}, **ROUTES[path]}
    thinking = kept.get("thinking")
    if isinstance(thinking, dict) and thinking.get("budget_tokens") is not None:  # which has to be below max_tokens
        kept |= {"thinking": {**thinking, "budget_tokens": 1}, "max_tokens": 2}
    return {**kept, "kv_transfer_params": {**_FOR_PREFILL, **(params or {})}}


def for_decode(data: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """The body for the server that goes on."""
    return {**data, "kv_transfer_params": dict(params)}


def found_params(answer: Any) -> dict[str, Any] | None:
    """What the server that computed the prompt tells the other; None where it tells nothing that could be used."""
    params = answer.get("kv_transfer_params") if isinstance(answer, dict) else None
    return params if isinstance(params, dict) and params.get("do_remote_prefill") else None
