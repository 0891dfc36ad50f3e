"""Log probabilities in the two shapes that OpenAI's clients know."""

from __future__ import annotations

from typing import Any

from engine.types.outputs import CompletionOutput, Logprob, RequestOutput


def chat(output: CompletionOutput, top: int, as_ids: bool = False) -> dict[str, Any] | None:
    """The output's positions as `choices[].logprobs` of chat completions; None where none were asked for.

    Args:
        output: as far as it is told.
        top: how many alternatives.
        as_ids: call tokens "token_id:17", vLLM's `return_tokens_as_token_ids`: several ids may have one text.
    """
    if output.logprobs is None:
        return None
    content = []
    for token_id, candidates in zip(output.token_ids, output.logprobs, strict=True):
        entry = _chat_entry(token_id, candidates[token_id], as_ids)
        entry["top_logprobs"] = [_chat_entry(one, candidate, as_ids) for one, candidate in _best(candidates, top)]
        content.append(entry)
    return {"content": content}


def completion(output: CompletionOutput, top: int, offset: int, as_ids: bool = False) -> dict[str, Any] | None:
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


def prompt(output: RequestOutput) -> list[dict[str, Any] | None] | None:
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
