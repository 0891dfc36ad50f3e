"""How many tokens an answer took, as OpenAI's `usage` tells it."""

from __future__ import annotations

from collections.abc import Iterable

from engine.types.outputs import RequestOutput
from engine_server.bodies import Answer


class CachedTokens(Answer):
    """Of the prompt's tokens."""

    cached_tokens: int


class Usage(Answer):
    """Tokens over all prompts and completions of an answer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class UsageCount:
    """Counts over all prompts and completions of an answer, whole outputs or deltas alike."""

    def __init__(self) -> None:
        self._prompts: dict[str, tuple[int, int]] = {}
        self._completion = 0

    def add(self, output: RequestOutput) -> None:
        """Count one output of a stream."""
        self._prompts[output.request_id] = len(output.prompt_token_ids), output.num_cached_tokens
        for completion in output.outputs:
            self._completion += len(completion.token_ids)
        self._completion += output.num_discarded_tokens

    def usage(self) -> Usage:
        """What was counted so far."""
        prompt = sum(length for length, _ in self._prompts.values())
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=self._completion,
            total_tokens=prompt + self._completion,
            prompt_tokens_details=CachedTokens(cached_tokens=sum(found for _, found in self._prompts.values())),
        )


class UsageSoFar:
    """Counts tokens of each choice while they come: vLLM's `continuous_usage_stats`."""

    def __init__(self) -> None:
        self._completions: dict[int, int] = {}

    def json(self, index: int, num_prompt_tokens: int, new_tokens: int = 0) -> dict[str, int]:
        """As OpenAI's `usage`, of a choice that has so many tokens more."""
        told = self._completions[index] = self._completions.get(index, 0) + new_tokens
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": told,
            "total_tokens": num_prompt_tokens + told,
        }


def usage_of_prompts(outputs: Iterable[RequestOutput]) -> Usage:
    """Of prompts that were pooled."""
    told = list(outputs)
    tokens = sum(len(output.prompt_token_ids) for output in told)
    cached = CachedTokens(cached_tokens=sum(output.num_cached_tokens for output in told))
    return Usage(prompt_tokens=tokens, completion_tokens=0, total_tokens=tokens, prompt_tokens_details=cached)
