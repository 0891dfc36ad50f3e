"""Beam search over one-token requests, whose prompts find what the step before computed in the prefix cache: what
`LLM.beam_search` calls. The names are vLLM's (`vllm/beam_search.py`).

The search is vLLM's (`LLM.beam_search`): in each step every beam is asked for its `2 * beam_width` most likely tokens;
an end-of-sequence id among them completes a sequence, and of the rest the `beam_width` best go on, up to `max_tokens`.
The `beam_width` best of all completed and remaining sequences are returned. transformers differs where sequences end:
it completes only those among the first `beam_width` candidates, keeps only the best `beam_width` complete ones while it
searches, and stops when no running beam can overtake them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine.embedding import Frontend, RequestState, as_prompts
from engine.types.checks import MAX_INT, check_flags, check_number, check_ranges
from engine.types.errors import InvalidRequestError, shown
from engine.types.outputs import Logprob, RequestOutput
from engine.types.params import MAX_LOGPROBS, SamplingParams
from engine.types.request import EngineRequest

MAX_BEAM_WIDTH = MAX_LOGPROBS // 2
"""Each beam is asked for twice as many candidates as there are beams."""
Expand = Callable[[list[tuple[int, list[int]]]], list[dict[int, Logprob]]]
"""From sequences (the prompt's place, token ids) to the most likely next tokens of each."""


class BeamSearchParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How `LLM.beam_search` searches.

    Args:
        beam_width: beams that are kept, and sequences that are returned; at most 32.
        max_tokens: the most tokens to generate.
        ignore_eos: an end-of-sequence id is a token as any other.
        temperature: 0 or 1, which mean the same: beams are ranked by the model's own probabilities. (vLLM takes other
            values and ranks alike.)
        length_penalty: sequences are ranked by the sum of their log probabilities divided by their length to this
            power: above 0 longer ones gain. As in transformers the length is that of the generated tokens, the end of
            sequence included; vLLM counts the prompt's too, and the end not.
        include_stop_str_in_output: keep the end-of-sequence id among the tokens and in the text.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False


@dataclass(slots=True)
class BeamSearchSequence:
    """One beam.

    Args:
        tokens: the prompt's ids, then the generated ones.
        logprobs: for each generated position the candidates that were looked at, from id to `Logprob`.
        cum_logprob: sum over the generated tokens, the end-of-sequence id included.
        text: of all its tokens, prompt and output, as in vLLM.
        finish_reason: "stop" at the end of sequence, else "length".
        stop_reason: the end-of-sequence id.
    """

    tokens: list[int]
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The best sequences of one prompt, best first."""

    sequences: list[BeamSearchSequence]


def verify(params: BeamSearchParams) -> None:
    """Check types and ranges. Raises InvalidRequestError."""
    check_ranges(params, {"beam_width": (1, MAX_BEAM_WIDTH), "max_tokens": (1, MAX_INT)})
    check_flags(params, "ignore_eos", "include_stop_str_in_output")
    if params.temperature not in (0, 1):
        raise InvalidRequestError(
            f"temperature={shown(params.temperature)}",
            "beams are ranked by the model's own probabilities, a temperature would change nothing",
            "leave it at 0 or 1",
        )
    check_number("length_penalty", params.length_penalty, -100.0, 100.0)


def beam_search(
    frontend: Frontend, run: Callable[[list[RequestState]], list[RequestOutput]], prompts: Any, params: BeamSearchParams
) -> list[BeamSearchOutput]:
    """See `engine.LLM.beam_search`. run: serves requests that the frontend has made."""
    if not isinstance(params, BeamSearchParams):
        kind = type(params).__name__
        raise InvalidRequestError("beam_search", f"the params are a {kind}", "pass BeamSearchParams(...)")
    verify(params)
    inputs = frontend.inputs
    one = SamplingParams(
        temperature=0.0, max_tokens=1, logprobs=2 * params.beam_width, ignore_eos=True, detokenize=False, seed=0
    )
    names = (f"beam-{number}" for number in itertools.count())
    processed = [inputs.process(next(names), prompt, one) for prompt in as_prompts(prompts)]

    def expand(beams: list[tuple[int, list[int]]]) -> list[dict[int, Logprob]]:
        asked = []
        for place, tokens in beams:
            request = processed[place].requests[0]
            beside = {"cache_salt": request.cache_salt, "adapter": request.adapter, "prompt_embeds": request.embeds}
            prompt: dict[str, Any] = {name: value for name, value in beside.items() if value is not None}
            if request.encoder is None:
                prompt["prompt_token_ids"] = tokens[_given(request) :]
            else:
                prompt |= {"encoder_prompt": request.encoder, "decoder_prompt": tokens}
            asked.append(inputs.complete(next(names), prompt, one))  # hooks have let in what it is a part of
        outputs = run(asked)
        return [output.outputs[0].logprobs[0] for output in outputs if output.outputs[0].logprobs]

    found = search_beams(
        [request.prompt_token_ids for request in processed],
        params,
        eos_token_ids=[request.requests[0].eos_token_ids for request in processed],
        max_model_len=inputs.max_model_len,
        expand=expand,
    )
    for request, sequences in zip(processed, found, strict=True):
        for index, sequence in enumerate(sequences):
            tokenizer = inputs.tokenizer_of(request.requests[0].adapter)
            text = tokenizer.decode(sequence.tokens[_given(request.requests[0]) :])
            sequence.text = frontend.outputs.filtered(request, index, text)
    return [BeamSearchOutput(sequences) for sequences in found]


def _given(request: EngineRequest) -> int:
    """Of its first tokens those that are placeholders of embeddings."""
    return 0 if request.embeds is None else len(request.embeds.data)


@dataclass(slots=True)
class _Search:
    """One prompt's search."""

    place: int
    max_tokens: int
    beams: list[BeamSearchSequence]
    ends: frozenset[int]
    completed: list[BeamSearchSequence] = field(default_factory=list)


def search_beams(
    prompts: Sequence[list[int]],
    params: BeamSearchParams,
    *,
    eos_token_ids: Sequence[Collection[int]],
    max_model_len: int,
    expand: Expand,
) -> list[list[BeamSearchSequence]]:
    """The best sequences of each prompt, best first, without text.

    Args:
        prompts: ids; each leaves room for a token.
        params: verified.
        eos_token_ids: of each prompt those that end a sequence, unless `ignore_eos`.
        max_model_len: a sequence ends with reason "length" where it is reached.
        expand: asks the engine, for all beams of all prompts at once.
    """
    searches = [
        _Search(
            place,
            min(params.max_tokens, max_model_len - len(ids)),
            [BeamSearchSequence(list(ids))],
            frozenset() if params.ignore_eos else frozenset(ends),
        )
        for place, (ids, ends) in enumerate(zip(prompts, eos_token_ids, strict=True))
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
                    if token not in search.ends:
                        grown.append(extended)
                        continue
                    extended.finish_reason = "stop"
                    extended.stop_reason = token
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
