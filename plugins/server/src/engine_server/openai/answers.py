"""What chat and completions answer alike: chunks of what streams, how many tokens it took, log probabilities in the
shapes that OpenAI's clients know."""

from __future__ import annotations

from typing import Any

from engine.types.outputs import CompletionOutput, Logprob, RequestOutput
from engine_server.bodies import CachedTokens, Usage
from engine_server.openai.bodies import SamplingBody, StreamOptions
from engine_server.stream import PreparedEvent, event


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
        prompt = sum(length for length, _ in self._prompts.values())
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=self._completion,
            total_tokens=prompt + self._completion,
            prompt_tokens_details=CachedTokens(cached_tokens=sum(found for _, found in self._prompts.values())),
        )


class Chunks:
    """Makes the events of an answer: see `engine_server.stream.Events`. Whoever inherits makes choices. `head` is what
    all chunks have in common; with `include_usage` the last event counts tokens, whatever the body says."""

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


# -- log probabilities -------------------------------------------------------------------------------------------------
def chat_logprobs(output: CompletionOutput, top: int, as_ids: bool = False) -> dict[str, Any] | None:
    """The output's positions as `choices[].logprobs` of chat completions, with the `top` alternatives; None where none
    were asked for. With `as_ids` tokens are called "token_id:17", as several may have one text."""
    if output.logprobs is None:
        return None
    content = []
    for token_id, candidates in zip(output.token_ids, output.logprobs, strict=True):
        entry = _chat_entry(token_id, candidates[token_id], as_ids)
        entry["top_logprobs"] = [_chat_entry(one, candidate, as_ids) for one, candidate in _best(candidates, top)]
        content.append(entry)
    return {"content": content}


def completion_logprobs(output: CompletionOutput, top: int, offset: int, as_ids: bool = False) -> dict[str, Any] | None:
    """The output's positions as `choices[].logprobs` of completions; `offset`: characters that came before."""
    if output.logprobs is None:
        return None
    tokens, values, tops, offsets = [], [], [], []
    for token_id, candidates in zip(output.token_ids, output.logprobs, strict=True):
        chosen = candidates[token_id]
        tokens.append(_name(token_id, chosen, as_ids))
        values.append(chosen.logprob)
        told = (*_best(candidates, top), (token_id, chosen))
        tops.append({_name(one, candidate, as_ids): candidate.logprob for one, candidate in told} if top else None)
        offsets.append(offset)
        offset += len(chosen.decoded_token)
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def prompt_logprobs(output: RequestOutput) -> list[dict[str, Any] | None] | None:
    """The prompt's positions as vLLM's `prompt_logprobs`: from token id to its log probability, rank and text."""
    if output.prompt_logprobs is None:
        return None
    return [
        None if position is None else {str(token): candidate._asdict() for token, candidate in position.items()}
        for position in output.prompt_logprobs
    ]


def _best(candidates: dict[int, Logprob], top: int) -> list[tuple[int, Logprob]]:
    return sorted(candidates.items(), key=lambda item: -item[1].logprob)[:top]


def _name(token_id: int, candidate: Logprob, as_ids: bool) -> str:
    return f"token_id:{token_id}" if as_ids else candidate.decoded_token


def _chat_entry(token_id: int, candidate: Logprob, as_ids: bool) -> dict[str, Any]:
    name = _name(token_id, candidate, as_ids)
    return {"token": name, "logprob": candidate.logprob, "bytes": list(candidate.decoded_token.encode())}
