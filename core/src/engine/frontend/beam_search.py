"""Beam search over one-token requests, whose prompts find what the step before computed in the prefix cache.

The search is vLLM's (`LLM.beam_search`): in each step every beam is asked for its `2 * beam_width` most likely tokens;
an end-of-sequence id among them completes a sequence, and of the rest the `beam_width` best go on, up to `max_tokens`.
The `beam_width` best of all completed and remaining sequences are returned. transformers differs where sequences end:
it completes only those among the first `beam_width` candidates, keeps only the best `beam_width` complete ones while it
searches, and stops when no running beam can overtake them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from engine.types.beam import BeamSearchParams, BeamSearchSequence
from engine.types.outputs import Logprob

Expand = Callable[[list[tuple[int, list[int]]]], list[dict[int, Logprob]]]
"""From sequences (the prompt's place, token ids) to the most likely next tokens of each."""


@dataclass(slots=True)
class _Search:
    """One prompt's search."""

    place: int
    max_tokens: int
    beams: list[BeamSearchSequence]
    completed: list[BeamSearchSequence] = field(default_factory=list)


def search_beams(
    prompts: Sequence[list[int]],
    params: BeamSearchParams,
    *,
    eos_token_ids: Collection[int],
    max_model_len: int,
    expand: Expand,
) -> list[list[BeamSearchSequence]]:
    """The best sequences of each prompt, best first, without text.

    Args:
        prompts: ids; each leaves room for a token.
        params: verified.
        eos_token_ids: that end a sequence, unless `ignore_eos`.
        max_model_len: a sequence ends with reason "length" where it is reached.
        expand: asks the engine, for all beams of all prompts at once.
    """
    ends = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
    searches = [
        _Search(place, min(params.max_tokens, max_model_len - len(ids)), [BeamSearchSequence(list(ids))])
        for place, ids in enumerate(prompts)
    ]
    for step in range(max((search.max_tokens for search in searches), default=0)):
        active = [search for search in searches if search.beams and step < search.max_tokens]
        if not active:
            break
        candidates = iter(expand([(search.place, beam.tokens) for search in active for beam in search.beams]))
        for search in active:
            grown: list[BeamSearchSequence] = []
            for beam in search.beams:
                found = next(candidates)
                for token, logprob in found.items():
                    extended = BeamSearchSequence(
                        tokens=[*beam.tokens, token],
                        logprobs=[*beam.logprobs, found],
                        cum_logprob=beam.cum_logprob + logprob.logprob,
                    )
                    if token not in ends:
                        grown.append(extended)
                        continue
                    extended.finish_reason, extended.stop_reason = "stop", token
                    if not params.include_stop_str_in_output:
                        extended.tokens.pop()
                    search.completed.append(extended)
            # All have the same length: the penalty changes no order.
            grown.sort(key=lambda beam: -beam.cum_logprob)
            search.beams = grown[: params.beam_width]
    return [_best(search, params) for search in searches]


def _best(search: _Search, params: BeamSearchParams) -> list[BeamSearchSequence]:
    for beam in search.beams:
        beam.finish_reason = "length"

    def score(sequence: BeamSearchSequence) -> float:
        return float(sequence.cum_logprob / len(sequence.logprobs) ** params.length_penalty)

    return sorted(search.completed + search.beams, key=score, reverse=True)[: params.beam_width]
