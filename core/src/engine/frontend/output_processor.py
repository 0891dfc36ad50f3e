"""From what the engine core sends to what the user reads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec

from engine.frontend.request_state import (
    FilteredSequence,
    OutputKind,
    PooledSequence,
    PromptLogprobs,
    RequestState,
    SequenceState,
    WarmingSequence,
)
from engine.frontend.statistics import RequestObserver, follow, summary_of
from engine.interfaces.tokenizer import Tokenizer
from engine.plugin.loading import brought
from engine.types.checks import invalid
from engine.types.errors import EngineError, InvalidRequestError, RankDeadError, rebuild_error
from engine.types.hooks import OutputFilter, RequestInfo
from engine.types.outputs import CompletionOutput, CoreOutput, RequestOutput
from engine.types.params import SamplingParams
from engine.types.request import FinishReason

if TYPE_CHECKING:
    from engine.interfaces.client import CoreClient
    from engine.plugin import Candidate, HookRelay

MAX_RETRIES = 1
"""How often a request is sent again. One that has seen two engine cores die may be what they died of."""


class OutputProcessor:
    """Keeps every unfinished request, and makes its text. One thread at a time.

    Args:
        tokenizer: at work.
        hooks: the frontend's; None: nobody listens.
        model_name: the model's name in the API, for who listens.

    Attributes:
        observer: counts what becomes of the requests; None: nobody asks.
        tokenizer_from: its driver, for the error that ends a sequence over whose text it raises; None: that is raised.
    """

    def __init__(self, tokenizer: Tokenizer, hooks: HookRelay | None = None, model_name: str = "") -> None:
        self._tokenizer = tokenizer
        self._filters = None if hooks is None else hooks.output_filter
        self.observer: RequestObserver | None = None
        self.tokenizer_from: Candidate | None = None
        self._hooks = hooks if hooks is not None and hooks.request_finished else None
        self._received = hooks if hooks is not None and hooks.request_received else None
        self._model_name = model_name
        self._requests: dict[str, RequestState] = {}
        self._sequences: dict[str, tuple[RequestState, SequenceState]] = {}

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def num_sequences(self) -> int:
        """Sequences that have not ended: n of each request."""
        return len(self._sequences)

    def request_ids(self) -> list[str]:
        """The unfinished requests, oldest first."""
        return list(self._requests)

    def send(self, request: RequestState, kind: OutputKind, client: CoreClient) -> None:
        """Queue a request that the input processor has made; where that fails, nothing is left of it. Raises as `add`
        and `CoreClient.add`."""
        self.add(request, kind)
        try:
            if self._received is not None and (heard := self._received.request_received):
                for one in request.requests:
                    heard(request=one)
            client.add(request.requests)
        except BaseException as error:
            self.abort([request.request_id], error if isinstance(error, EngineError) else None)
            raise

    def add(self, request: RequestState, kind: OutputKind = OutputKind.CUMULATIVE) -> None:
        """Expect news of this request. Raises InvalidRequestError where its id is in use, or it cannot be streamed;
        HookFailedError and RequestRefusedError, of hooks that filter its text."""
        for request_id in (request.request_id, *(one.request_id for one in request.requests)):
            if request_id in self._requests or request_id in self._sequences:
                raise invalid("request_id", request_id, "an unfinished request has that id", "choose another")
        params = request.params
        if params.num_sequences > params.n:
            if kind is OutputKind.DELTA:
                raise InvalidRequestError(
                    f"best_of={params.best_of}",
                    f"the best {params.n} of them are known when all have ended, so they cannot be streamed",
                    "leave best_of out, or do not stream",
                )
            kind = OutputKind.FINAL
        elif request.requests[0].pooling is not None:
            kind = OutputKind.FINAL
        sequences = self._new_sequences(request)
        request.kind = kind
        request.sent = time.monotonic()
        self._requests[request.request_id] = request
        self._expect(request, sequences)
        if self.observer is not None:
            self.observer.arrived(request)

    def _expect(self, request: RequestState, sequences: list[SequenceState]) -> None:
        request.sequences = sequences
        request.running = len(sequences)
        for sequence in sequences:
            self._sequences[sequence.request_id] = request, sequence
        if request.params.prompt_logprobs is not None:
            request.prompt_logprobs = PromptLogprobs(request.prompt_token_ids, request.tokenizer or self._tokenizer)

    def _new_sequences(self, request: RequestState) -> list[SequenceState]:
        params = request.params
        if request.requests[0].pooling is not None:
            return [PooledSequence(request.request_id, params, request.tokenizer or self._tokenizer)]
        stops = self._stop_strings(params.stop) if params.stop else None
        sequences: list[SequenceState] = []
        tokenizer = request.tokenizer or self._tokenizer
        for index, one in enumerate(request.requests):
            filter_ = self._filter(request, index) if params.detokenize and params.max_tokens != 0 else None
            scanner = None if stops is None else stops.scanner()
            parts = one.request_id, index, params, request.prompt_token_ids, tokenizer, scanner
            if params.max_tokens == 0:
                sequences.append(WarmingSequence(*parts))
            else:
                sequences.append(SequenceState(*parts) if filter_ is None else FilteredSequence(filter_, *parts))
        return sequences

    @cached_property
    def _stop_strings(self) -> Callable[[list[str]], Any]:
        made: Callable[[list[str]], Any] = brought("stop_strings", "stop at strings")
        return made

    def filtered(self, request: RequestState, index: int, text: str) -> str:
        """A whole text, as the filters of hook plugins show it. Raises HookFailedError."""
        filter_ = self._filter(request, index)
        return text if filter_ is None else filter_(text, True)

    def _filter(self, request: RequestState, index: int) -> OutputFilter | None:
        if self._filters is None:
            return None
        info = request.info or RequestInfo(request_id=request.request_id, params=request.params)
        return self._filters(request=info, index=index)

    def _retry(self, request: RequestState) -> bool:
        """Begin a request anew whose engine core has died; False where that cannot be."""
        if request.given_out or request.num_retries >= MAX_RETRIES:
            return False
        try:
            sequences = self._new_sequences(request)
        except EngineError:  # a hook failed, and has logged it: the request ends as if it could not begin anew
            return False
        for old, new in zip(request.sequences, sequences, strict=True):
            new.told = old.finished
            new.retried = old.retried or old.num_tokens > 0
        request.num_retries += 1
        request.error = None
        request.news = {}
        passed = time.monotonic() - request.sent  # their deadlines, where they have some, are so much nearer
        request.requests = [
            one if one.timeout is None else msgspec.structs.replace(one, timeout=max(1e-6, one.timeout - passed))
            for one in request.requests
        ]
        self._expect(request, sequences)
        if self.observer is not None:
            self.observer.retried()
        return True

    def abort(self, request_ids: Iterable[str], error: EngineError | None = None) -> list[str]:
        """Forget users' requests of these ids; unknown ones are passed over. Their streams are not woken. `error` tells
        metrics and hooks why, where that is no abort. Returns the core requests to abort."""
        core_ids: list[str] = []
        for request_id in request_ids:
            request = self._requests.pop(request_id, None)
            if request is None:
                continue
            request.stream = None
            for sequence in request.sequences:
                if self._sequences.pop(sequence.request_id, None):
                    core_ids.append(sequence.request_id)
                    self._ended(request, sequence, error)
        return core_ids

    def end_all(self, error: EngineError) -> list[str]:
        """End every request, and its stream, with this error. Returns the core requests to abort."""
        for request in self._requests.values():
            if request.stream is not None:
                request.stream.fail(error)
        return self.abort(self.request_ids(), error)

    def _ended(self, request: RequestState, sequence: SequenceState, error: EngineError | None) -> None:
        """Tell who listens of a sequence that ended: by itself, by `error`, or else by an abort."""
        if sequence.told:
            return
        reason = sequence.output.finish_reason or ("abort" if error is None else "error")
        if self.observer is not None:
            self.observer.ended(request, sequence, reason, time.monotonic())
        if self._hooks is not None and (heard := self._hooks.request_finished):
            heard(summary=summary_of(request, sequence, self._model_name, reason, error))

    def process(self, news: Sequence[CoreOutput], client: CoreClient) -> list[RequestOutput]:
        """Take in the news of one step, and put what came of it on the streams. News of requests that are not (or no
        longer) expected is dropped. What a stop string has ended here is aborted in the core. A request whose core has
        died before anything of it was given out is sent again: it begins anew, with the same seeds.

        Returns one output for each request with news that has no stream, in the order of the news.
        """
        if self.observer is not None or self._hooks is not None:
            follow(news, self._sequences, time.monotonic(), self.observer)
        touched: dict[str, RequestState] = {}
        abort_ids: list[str] = []
        retries: dict[str, RequestState] = {}
        for core_output in news:
            entry = self._sequences.get(core_output.request_id)
            if entry is None:
                continue
            request, sequence = entry
            if core_output.error is not None and core_output.error[0] == RankDeadError.code:
                if request.request_id in retries:
                    continue  # another of the same n has begun anew
                if self._retry(request):
                    touched.pop(request.request_id, None)
                    retries[request.request_id] = request
                    continue
            if core_output.new_prompt_logprobs and request.prompt_logprobs is not None:
                request.prompt_logprobs.take(core_output.new_prompt_logprobs)
                if not core_output.new_token_ids and core_output.finish_reason is None:
                    continue  # a piece of them is no news
            try:
                text, num_tokens = sequence.take(core_output)
            except Exception as error:
                if self.tokenizer_from is None:
                    raise
                asked = f"decode the tokens of request {sequence.request_id!r}"
                sequence.failure = self.tokenizer_from.fault(asked, error)
                sequence.output.finish_reason = str(FinishReason.ERROR)
                text, num_tokens = "", 0
            index, news_of = sequence.output.index, request.news
            if index in news_of:
                text, num_tokens = news_of[index][0] + text, news_of[index][1] + num_tokens
            news_of[index] = text, num_tokens
            if core_output.num_cached_tokens:
                sequence.num_cached_tokens = core_output.num_cached_tokens
            if core_output.kv_transfer is not None:
                sequence.kv_transfer = core_output.kv_transfer
            if core_output.finish_reason is FinishReason.ERROR:
                request.error = request.error or _error(core_output)
            if sequence.output.finish_reason is not None:
                del self._sequences[sequence.request_id]
                request.running -= 1
                if core_output.finish_reason is None:
                    abort_ids.append(sequence.request_id)
                if sequence.failure is not None:
                    request.error = request.error or sequence.failure
                self._ended(request, sequence, sequence.failure or request.error)
            touched[request.request_id] = request
        outputs: list[RequestOutput] = []
        for request in touched.values():
            stream = request.stream
            output = self._output(request)
            if output is None:
                continue
            request.given_out = True
            if stream is None:
                outputs.append(output)
            else:
                stream.put(output)
        if abort_ids:
            client.abort(abort_ids)
        for request in retries.values():
            try:
                client.add(request.requests)
            except EngineError as error:
                ends = [
                    CoreOutput(request_id=one.request_id, finish_reason=FinishReason.ERROR, error=error.parts)
                    for one in request.requests
                ]
                outputs += self.process(ends, client)
        return outputs

    def _output(self, request: RequestState) -> RequestOutput | None:
        finished = request.running == 0
        if finished:
            del self._requests[request.request_id]
            request.stream = None
        news, request.news = request.news, {}
        if request.kind is OutputKind.DELTA:
            completions = []
            for index in sorted(news):
                sequence, (text, num_tokens) = request.sequences[index], news[index]
                completions.append(_completion(sequence, text, len(sequence.output.token_ids) - num_tokens))
        elif finished or request.kind is OutputKind.CUMULATIVE:
            completions = [_completion(sequence, sequence.text, 0) for sequence in request.sequences]
        else:
            return None
        params, num_discarded = request.params, 0
        if len(completions) > params.n:
            completions, num_discarded = best_of(completions, params)
        prompt_logprobs = None
        if request.prompt_logprobs is not None:
            prompt_logprobs = request.prompt_logprobs.complete
            if prompt_logprobs is not None and request.kind is OutputKind.DELTA:
                request.prompt_logprobs = None  # told once
        first = request.sequences[0]
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=completions,
            finished=finished,
            num_cached_tokens=first.num_cached_tokens,  # the others of n wait for it, and find its pages
            error=request.error,
            prompt_logprobs=prompt_logprobs,
            num_discarded_tokens=num_discarded,
            pooled=first.pooled,
            kv_transfer=first.kv_transfer,
        )


def _completion(sequence: SequenceState, text: str, first: int) -> CompletionOutput:
    """A copy, which does not change any more: with this text, and with the tokens from position `first` on."""
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


def _error(output: CoreOutput) -> EngineError:
    """The typed error that the core sent as plain strings."""
    if output.error is None:
        return EngineError(f"request {output.request_id!r}", "the engine core ended it with an error")
    return rebuild_error(output.error)


def best_of(completions: Sequence[CompletionOutput], params: SamplingParams) -> tuple[list[CompletionOutput], int]:
    """The `n` completions with the largest `cumulative_logprob`, best first, numbered anew; those that ended with an
    error come last, and among equals the one with the lower index comes first.

    Returns the chosen completions; the number of tokens of those left out.
    """

    def rank(completion: CompletionOutput) -> tuple[bool, float]:
        return completion.finish_reason == FinishReason.ERROR, -(completion.cumulative_logprob or 0.0)

    order = sorted(completions, key=rank)
    chosen = [
        replace(completion, index=index, logprobs=None if params.logprobs is None else completion.logprobs)
        for index, completion in enumerate(order[: params.n])
    ]
    return chosen, sum(len(completion.token_ids) for completion in order[params.n :])
