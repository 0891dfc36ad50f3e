"""An answer of OpenAI's that streams, as chunks; and how many tokens it took."""

from __future__ import annotations

from typing import Any

from engine.types.outputs import CompletionOutput, RequestOutput
from engine_server.openai.bodies import SamplingBody, StreamOptions
from engine_server.stream import PreparedEvent, event
from engine_server.submission import CachedTokens, Usage


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


class Chunks:
    """Makes the events of an answer: see `engine_server.stream.Events`. Whoever inherits makes choices.

    Args:
        body: of the request.
        head: what all chunks have in common.
        include_usage: end with an event that counts tokens, whatever the body says.
    """

    def __init__(self, body: SamplingBody, head: dict[str, Any], include_usage: bool) -> None:
        options = body.stream_options or StreamOptions()
        self._head = head
        self._include_usage = include_usage or options.include_usage
        self._blank = {**head, "usage": None} if self._include_usage else head
        self._usage = UsageCount()
        self._counts_each = options.continuous_usage_stats
        self._with_ids = body.return_token_ids
        self._completion_tokens: dict[int, int] = {}
        self._plain: dict[int, PreparedEvent] = {}

    def opening(self) -> bytes:
        return b""

    def closing(self) -> bytes:
        if not self._include_usage:
            return b""
        return event({**self._head, "choices": [], "usage": self._usage.usage()})

    def _is_plain(self, completion: CompletionOutput) -> bool:
        """Whether it brings text, and nothing else."""
        with_more = completion.logprobs is not None or self._with_ids or self._counts_each
        return completion.finish_reason is None and not with_more

    def _text_choice(self, index: int, text: str) -> dict[str, Any]:
        """A choice that brings text, and nothing else."""
        raise NotImplementedError

    def _prepared(self, index: int) -> PreparedEvent:
        """The event of such a choice."""
        made = PreparedEvent(lambda text: {**self._blank, "choices": [self._text_choice(index, text)]})
        self._plain[index] = made
        return made

    def _event(self, index: int, choice: dict[str, Any] | None, prompt_tokens: int, tokens: int, **more: Any) -> bytes:
        """The event of a choice that has so many tokens more; none where there is nothing to tell. With
        `continuous_usage_stats` its tokens are counted as far as it goes."""
        chunk = {**self._blank, "choices": [choice], **more}
        if self._counts_each:
            told = self._completion_tokens[index] = self._completion_tokens.get(index, 0) + tokens
            usage = {"prompt_tokens": prompt_tokens, "completion_tokens": told, "total_tokens": prompt_tokens + told}
            chunk["usage"] = usage
        return b"" if choice is None else event(chunk)
