"""Log probabilities in the two shapes that OpenAI's clients know."""

from __future__ import annotations

from typing import Any

from engine.types.outputs import CompletionOutput, Logprob, RequestOutput


def chat(output: CompletionOutput, top: int) -> dict[str, Any] | None:
    """The output's positions as `choices[].logprobs` of chat completions; None where none were asked for."""
    if output.logprobs is None:
        return None
    content = []
    for token_id, candidates in zip(output.token_ids, output.logprobs, strict=True):
        entry = _chat_entry(candidates[token_id])
        entry["top_logprobs"] = [_chat_entry(candidate) for candidate in _best(candidates, top)]
        content.append(entry)
    return {"content": content}


def completion(output: CompletionOutput, top: int, offset: int) -> dict[str, Any] | None:
    """The output's positions as `choices[].logprobs` of completions; `offset`: characters that came before."""
    if output.logprobs is None:
        return None
    tokens, values, tops, offsets = [], [], [], []
    for token_id, candidates in zip(output.token_ids, output.logprobs, strict=True):
        chosen = candidates[token_id]
        tokens.append(chosen.decoded_token)
        values.append(chosen.logprob)
        tops.append({c.decoded_token: c.logprob for c in (*_best(candidates, top), chosen)} if top else None)
        offsets.append(offset)
        offset += len(chosen.decoded_token)
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def prompt(output: RequestOutput) -> list[dict[str, Any] | None] | None:
    """The prompt's positions as vLLM's `prompt_logprobs`: from token id to its log probability, rank and text."""
    if output.prompt_logprobs is None:
        return None
    return [
        None if position is None else {str(token): candidate._asdict() for token, candidate in position.items()}
        for position in output.prompt_logprobs
    ]


def _best(candidates: dict[int, Logprob], top: int) -> list[Logprob]:
    return sorted(candidates.values(), key=lambda c: -c.logprob)[:top]


def _chat_entry(candidate: Logprob) -> dict[str, Any]:
    text = candidate.decoded_token
    return {"token": text, "logprob": candidate.logprob, "bytes": list(text.encode())}
