"""From what the engine core sends to what the user reads."""

from __future__ import annotations

import enum
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from engine.frontend.best_of import best_of
from engine.frontend.clock import SteadyClock
from engine.frontend.filtered_sequence import FilteredSequence
from engine.frontend.input_processor import ProcessedRequest
from engine.frontend.pooled_sequence import PooledSequence
from engine.frontend.prompt_scores import PromptScores
from engine.frontend.sequence_state import SequenceState
from engine.frontend.stop_scanner import StopStrings
from engine.frontend.summaries import Summaries
from engine.interfaces.tokenizer import Tokenizer
from engine.types.errors import EngineError, InvalidRequestError, RankDeadError, rebuild_error
from engine.types.hooks import OutputFilter, RequestInfo
from engine.types.outputs import CompletionOutput, CoreOutput, CoreOutputs, RequestOutput
from engine.types.request import FinishReason

if TYPE_CHECKING:
    from engine.plugin import HookRelay

MAX_RETRIES = 1
"""How often a request is sent again. One that has seen two engine cores die may be what they died of."""


class OutputKind(enum.Enum):
    """What a request's outputs hold, and when they come."""

    CUMULATIVE = "cumulative"
    """With every news, all that came so far. Where `best_of` chooses, once, as for FINAL."""
    DELTA = "delta"
    """With every news, only what is new: text, token ids, logprobs of those completions that have news. Refused where
    `best_of` chooses."""
    FINAL = "final"
    """Once, when all completions have ended. So it is for every request that pools."""


class Processed(NamedTuple):
    """What came of one batch of news.

    Args:
        outputs: one for each request with news, in the order of the news.
        abort_ids: core requests that run on although a stop string has ended them here: abort them.
        ended: (core request's id, finish reason) of every sequence that ended, in either way.
        retries: requests whose engine core has died before anything of them was given out: send them again. They begin
            anew, with the same seeds.
    """

    outputs: list[RequestOutput]
    abort_ids: list[str]
    ended: list[tuple[str, str]]
    retries: Sequence[ProcessedRequest] = ()


@dataclass(slots=True)
class _Request:
    """A user's request and its n sequences."""

    processed: ProcessedRequest
    kind: OutputKind
    sequences: list[SequenceState]
    running: int
    num_cached_tokens: int = 0
    error: EngineError | None = None
    prompt_scores: PromptScores | None = None
    news: dict[int, tuple[str, int]] = field(default_factory=dict)
    """By index: (text, number of tokens) that came in this batch."""
    given_out: bool = False
    """An output was."""
    num_retries: int = 0
    begun: float = field(default_factory=lambda: time.monotonic())


class OutputProcessor:
    """Keeps every unfinished request, and makes its text. One thread at a time.

    Args:
        tokenizer: at work.
        hooks: the frontend's; None: nobody listens.
        model_name: the model's name in the API, and
        clock: that of arrival times, for who listens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        hooks: HookRelay | None = None,
        model_name: str = "",
        clock: SteadyClock | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._filters = None if hooks is None else hooks.output_filter
        self._summaries: Summaries | None = None
        if hooks is not None and hooks.request_finished:
            self._summaries = Summaries(hooks, model_name, clock or SteadyClock())
        self._requests: dict[str, _Request] = {}
        self._of_sequence: dict[str, tuple[_Request, SequenceState]] = {}

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def num_sequences(self) -> int:
        """Sequences that have not ended: n of each request."""
        return len(self._of_sequence)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._requests

    def request_ids(self) -> list[str]:
        """The unfinished requests, oldest first."""
        return list(self._requests)

    def add(self, processed: ProcessedRequest, kind: OutputKind = OutputKind.CUMULATIVE) -> None:
        """Expect news of this request. Raises InvalidRequestError where its id is in use, or it cannot be streamed;
        HookFailedError and RequestRefusedError, of hooks that filter its text."""
        ids = [request.request_id for request in processed.requests]
        for request_id in (processed.request_id, *ids):
            if request_id in self._requests or request_id in self._of_sequence:
                raise InvalidRequestError(
                    f"request_id={request_id!r}", "an unfinished request has that id", "choose another"
                )
        params = processed.params
        if params.num_sequences > params.n:
            if kind is OutputKind.DELTA:
                raise InvalidRequestError(
                    f"best_of={params.best_of}",
                    f"the best {params.n} of them are known when all have ended, so they cannot be streamed",
                    "leave best_of out, or do not stream",
                )
            kind = OutputKind.FINAL
        self._begin(processed, kind)

    def _begin(self, processed: ProcessedRequest, kind: OutputKind, num_retries: int = 0) -> None:
        params = processed.params
        stops = StopStrings(params.stop) if params.stop else None
        sequences: list[SequenceState]
        if processed.requests[0].pooling is not None:
            kind, sequences = OutputKind.FINAL, [PooledSequence(processed.request_id, params, self._tokenizer)]
        else:
            sequences = [self._sequence(processed, index, stops) for index in range(len(processed.requests))]
        request = _Request(processed, kind, sequences, len(sequences), num_retries=num_retries)
        if params.prompt_logprobs is not None:
            request.prompt_scores = PromptScores(processed.prompt_token_ids, self._tokenizer)
        self._requests[processed.request_id] = request
        for sequence in sequences:
            self._of_sequence[sequence.request_id] = request, sequence
        if self._summaries is not None:
            self._summaries.begin(processed, again=num_retries > 0)

    def filtered(self, processed: ProcessedRequest, index: int, text: str) -> str:
        """A whole text, as the filters of hook plugins show it. Raises HookFailedError."""
        filter_ = self._filter(processed, index)
        return text if filter_ is None else filter_(text, True)

    def _filter(self, processed: ProcessedRequest, index: int) -> OutputFilter | None:
        if self._filters is None:
            return None
        info = processed.info or RequestInfo(request_id=processed.request_id, params=processed.params)
        return self._filters(request=info, index=index)

    def _sequence(self, processed: ProcessedRequest, index: int, stops: StopStrings | None) -> SequenceState:
        parts = (
            *(processed.requests[index].request_id, index, processed.params, processed.prompt_token_ids),
            *(self._tokenizer, stops),
        )
        if processed.params.detokenize and (filter_ := self._filter(processed, index)) is not None:
            return FilteredSequence(*parts, filter_)
        return SequenceState(*parts)

    def _retry(self, request: _Request) -> ProcessedRequest | None:
        """Begin a request anew whose engine core has died; None where that cannot be."""
        if request.given_out or request.num_retries >= MAX_RETRIES:
            return None
        again = _in_what_time_is_left(request.processed, time.monotonic() - request.begun)
        for sequence in request.sequences:
            self._of_sequence.pop(sequence.request_id, None)
        try:
            self._begin(again, request.kind, request.num_retries + 1)
        except EngineError:  # a hook failed, and has logged it: the request ends as if it could not begin anew
            for sequence in request.sequences:
                if not sequence.finished:
                    self._of_sequence[sequence.request_id] = request, sequence
            return None
        return again

    def abort(self, request_ids: Iterable[str], error: EngineError | None = None) -> list[str]:
        """Forget these requests; unknown ids are passed over.

        Args:
            request_ids: the users'.
            error: why, where that is no abort; for hooks.

        Returns:
            The core requests to abort.
        """
        core_ids: list[str] = []
        for request_id in request_ids:
            request = self._requests.pop(request_id, None)
            if request is None:
                continue
            for sequence in request.sequences:
                if self._of_sequence.pop(sequence.request_id, None):
                    core_ids.append(sequence.request_id)
                    if self._summaries is not None:
                        self._summaries.end(request.processed, sequence, error)
        return core_ids

    def process(self, news: Iterable[CoreOutput]) -> Processed:
        """Take in the news of one step. News of requests that are not (or no longer) expected is dropped."""
        if self._summaries is not None:
            news = list(news)
            self._summaries.step(news)
        touched: dict[str, _Request] = {}
        abort_ids: list[str] = []
        ended: list[tuple[str, str]] = []
        retries: dict[str, ProcessedRequest] = {}
        for core_output in news:
            entry = self._of_sequence.get(core_output.request_id)
            if entry is None:
                continue
            request, sequence = entry
            if core_output.error is not None and core_output.error[0] == RankDeadError.code:
                if request.processed.request_id in retries:
                    continue  # a sibling of one that begins anew
                if (again := self._retry(request)) is not None:
                    touched.pop(again.request_id, None)
                    retries[again.request_id] = again
                    continue
            if core_output.new_prompt_logprobs and request.prompt_scores is not None:
                request.prompt_scores.take(core_output.new_prompt_logprobs)
                if not core_output.new_token_ids and core_output.finish_reason is None:
                    continue  # a piece of them is no news
            text, num_tokens = sequence.take(core_output)
            index, news_of = sequence.output.index, request.news
            if index in news_of:
                text, num_tokens = news_of[index][0] + text, news_of[index][1] + num_tokens
            news_of[index] = text, num_tokens
            # The others of n wait for the first and find its pages: what counts is what it found itself.
            if index == 0 and core_output.num_cached_tokens:
                request.num_cached_tokens = core_output.num_cached_tokens
            if core_output.finish_reason is FinishReason.ERROR:
                request.error = request.error or _error(core_output)
            if sequence.output.finish_reason is not None:
                del self._of_sequence[sequence.request_id]
                request.running -= 1
                ended.append((sequence.request_id, sequence.output.finish_reason or ""))
                if core_output.finish_reason is None:
                    abort_ids.append(sequence.request_id)
                if sequence.failure is not None:
                    request.error = request.error or sequence.failure
                if self._summaries is not None:
                    self._summaries.end(request.processed, sequence, sequence.failure or request.error)
            touched[request.processed.request_id] = request
        outputs: list[RequestOutput] = []
        for request in touched.values():
            if (output := self._output(request)) is not None:
                request.given_out = True
                outputs.append(output)
        return Processed(outputs, abort_ids, ended, tuple(retries.values()))

    def _output(self, request: _Request) -> RequestOutput | None:
        finished = request.running == 0
        if finished:
            del self._requests[request.processed.request_id]
        news, request.news = request.news, {}
        if request.kind is OutputKind.DELTA:
            completions = [_delta(request.sequences[index], *news[index]) for index in sorted(news)]
        elif finished or request.kind is OutputKind.CUMULATIVE:
            completions = [_snapshot(sequence) for sequence in request.sequences]
        else:
            return None
        params, num_discarded = request.processed.params, 0
        if len(completions) > params.n:
            completions, num_discarded = best_of(completions, params)
        prompt_logprobs = None
        if request.prompt_scores is not None:
            prompt_logprobs = request.prompt_scores.complete
            if prompt_logprobs is not None and request.kind is OutputKind.DELTA:
                request.prompt_scores = None  # told once
        return RequestOutput(
            request_id=request.processed.request_id,
            prompt=request.processed.prompt,
            prompt_token_ids=request.processed.prompt_token_ids,
            outputs=completions,
            finished=finished,
            num_cached_tokens=request.num_cached_tokens,
            error=request.error,
            prompt_logprobs=prompt_logprobs,
            num_discarded_tokens=num_discarded,
            pooled=request.sequences[0].pooled,
        )


def _snapshot(sequence: SequenceState) -> CompletionOutput:
    """A copy, so that an output that was given out does not change."""
    return _completion(sequence, sequence.text, 0)


def _delta(sequence: SequenceState, text: str, num_tokens: int) -> CompletionOutput:
    return _completion(sequence, text, len(sequence.output.token_ids) - num_tokens)


def _completion(sequence: SequenceState, text: str, first: int) -> CompletionOutput:
    """The sequence's output with this text, and with the tokens from position `first` on."""
    state = sequence.output
    # Spelt out: this runs once a sequence and step, and dataclasses.replace costs ten times as much.
    return CompletionOutput(
        index=state.index,
        text=text,
        token_ids=state.token_ids[first:],
        logprobs=None if state.logprobs is None else state.logprobs[first:],
        cumulative_logprob=state.cumulative_logprob,
        finish_reason=state.finish_reason,
        stop_reason=state.stop_reason,
    )


def refusal(processed: ProcessedRequest, error: EngineError) -> CoreOutputs:
    """News of a request that could not be sent: every sequence ends with this error."""
    return CoreOutputs(
        outputs=[
            CoreOutput(request_id=request.request_id, finish_reason=FinishReason.ERROR, error=error.parts)
            for request in processed.requests
        ]
    )


def _in_what_time_is_left(processed: ProcessedRequest, seconds: float) -> ProcessedRequest:
    """A request whose deadline, where it has one, is so much nearer."""
    requests = [
        request if request.timeout is None else replace(request, timeout=max(1e-6, request.timeout - seconds))
        for request in processed.requests
    ]
    return processed._replace(requests=requests)


def _error(output: CoreOutput) -> EngineError:
    """The typed error that the core sent as plain strings."""
    if output.error is None:
        return EngineError(f"request {output.request_id!r}", "the engine core ended it with an error")
    return rebuild_error(output.error)
