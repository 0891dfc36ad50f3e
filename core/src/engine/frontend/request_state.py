"""What the frontend knows of one request: its sequences on their way back (ids to text, stop strings, logprobs, or what
was pooled), and the stream on which its outputs come."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from engine.interfaces.tokenizer import Tokenizer
from engine.types.errors import EngineError, HookFailedError
from engine.types.hooks import OutputFilter, RequestInfo
from engine.types.outputs import CompletionOutput, CoreOutput, Logprob, RequestOutput, TokenLogprobs
from engine.types.params import SamplingParams
from engine.types.request import EngineRequest, FinishReason


class StopScanner(Protocol):
    """Finds stop strings in one text as it comes: a part outside the core (of ours `engine_kit.stop_strings`)."""

    def push(self, text: str, armed: bool = True) -> str | tuple[str, str]: ...
    def flush(self) -> str: ...


class SequenceState:
    """What the frontend knows of one engine request.

    Args:
        request_id: the core's id.
        index: which of the n it is.
        params: the user's.
        prompt_token_ids: the text that follows may depend on how the prompt ends.
        tokenizer: at work.
        scanner: looks for its stop strings; None where there are none.

    Attributes:
        output: all that came so far. Its text is put together when it is asked for, see `text`.
        failure: the error that ended it here in the frontend; None where none did.
        num_cached_tokens: prompt tokens that it found in the prefix cache itself.
        kv_transfer: see `CoreOutput.kv_transfer`.
        first_token, last_token: when they came, by the monotonic clock. These and all below are only kept where
            `engine.frontend.statistics` follows the sequence.
        queue_time, prefill_time: as the core measured them, see `CoreOutput`.
        num_tokens: that came, those behind a stop string too; 0: the times above say nothing yet.
        retried: a try before this one got its first token, which was measured.
        told: a try before this one has ended: its end is not told again.
    """

    failure: EngineError | None = None
    num_cached_tokens = 0
    kv_transfer: dict[str, Any] | None = None
    first_token = 0.0
    last_token = 0.0
    queue_time = 0.0
    prefill_time = 0.0
    num_tokens = 0
    retried = False
    told = False

    def __init__(
        self,
        request_id: str,
        index: int,
        params: SamplingParams,
        prompt_token_ids: list[int],
        tokenizer: Tokenizer,
        scanner: StopScanner | None,
    ) -> None:
        self.request_id = request_id
        self.params = params
        self.output = CompletionOutput(index)
        if params.logprobs is not None or params.num_sequences > params.n:
            self.output.logprobs = []
            self.output.cumulative_logprob = 0.0
        self._tokenizer = tokenizer
        self._stream = tokenizer.stream(params.skip_special_tokens, prompt_token_ids) if params.detokenize else None
        self._scanner = scanner
        self._texts: list[str] = []
        self._text = ""

    @property
    def finished(self) -> bool:
        """True once there is a finish reason."""
        return self.output.finish_reason is not None

    @property
    def pooled(self) -> np.ndarray | None:
        """What was pooled: nothing, where text is generated."""
        return None

    @property
    def text(self) -> str:
        """All text so far."""
        if self._texts:
            self._text += "".join(self._texts)
            self._texts.clear()
        return self._text

    def take(self, news: CoreOutput) -> tuple[str, int]:
        """Take in what the core sent.

        Returns:
            The text and the number of tokens that are new. Afterwards `finished` may be true, either because the core
            said so or because a stop string was found (then tokens after it are dropped).
        """
        ids, output = news.new_token_ids, self.output
        if news.finish_reason is None and self._scanner is None and output.logprobs is None:
            output.token_ids += ids  # as nearly always: nothing to look for, nothing to count
            if self._stream is None or not (text := self._stream.push(ids)):
                return "", len(ids)
            self._texts.append(text)
            return text, len(ids)
        # The token that ended the sequence is kept among the ids, but its text is shown only on demand.
        stopped = news.finish_reason is FinishReason.STOP and not news.completed
        silent_last = stopped and not self.params.include_stop_str_in_output
        taken, match = len(ids), None
        shown: list[str] = []
        if self._stream is not None:
            if self._scanner is None:
                text = self._stream.push(ids[:-1] if silent_last else ids)
                if text:
                    shown.append(text)
            else:
                taken, match = self._scan(ids, silent_last, shown)
        if taken < len(ids):
            ids = ids[:taken]
        output.token_ids += ids
        if output.logprobs is not None:
            self._take_logprobs(ids, (news.new_logprobs or [])[:taken])
        if match is not None:
            output.finish_reason = str(FinishReason.STOP)
            output.stop_reason = match
        elif news.finish_reason is not None:
            match = self._finish(shown)
            if match is not None and news.finish_reason is not FinishReason.ERROR:
                output.finish_reason = str(FinishReason.STOP)
                output.stop_reason = match
            else:
                output.finish_reason = str(news.finish_reason)
                output.stop_reason = news.stop_reason
        new = "".join(shown)
        if new:
            self._texts.append(new)
        return new, taken

    def _scan(self, ids: list[int], silent_last: bool, shown: list[str]) -> tuple[int, str | None]:
        """Token by token, so that the one which completes a stop string is the last."""
        assert self._stream is not None
        before = len(self.output.token_ids)
        for place, token in enumerate(ids):
            if silent_last and place == len(ids) - 1:
                break
            text = self._stream.push((token,))
            if text and (match := self._search(text, before + place + 1, shown)) is not None:
                return place + 1, match
        return len(ids), None

    def _search(self, text: str, num_tokens: int, shown: list[str]) -> str | None:
        assert self._scanner is not None
        found = self._scanner.push(text, armed=num_tokens >= self.params.min_tokens)
        if isinstance(found, str):
            shown.append(found)
            return None
        stop, before = found
        shown.append(before)
        if self.params.include_stop_str_in_output:
            shown.append(stop)
        return stop

    def _finish(self, shown: list[str]) -> str | None:
        """Give out what was held back: half a character (as U+FFFD), and what began like a stop string."""
        if self._stream is None:
            return None
        rest = self._stream.flush()
        if self._scanner is None:
            shown.append(rest)
            return None
        if rest and (match := self._search(rest, len(self.output.token_ids), shown)) is not None:
            return match
        shown.append(self._scanner.flush())
        return None

    def _take_logprobs(self, ids: list[int], rows: list[TokenLogprobs]) -> None:
        output = self.output
        assert output.logprobs is not None and output.cumulative_logprob is not None
        for token, row in zip(ids, rows, strict=True):
            output.cumulative_logprob += row.chosen
            output.logprobs.append(readable(token, row, self._tokenizer))


class FilteredSequence(SequenceState):
    """Its text goes through the filters of hook plugins before anybody sees it. Where a filter fails, the sequence ends
    with the finish reason "error" and `failure`.

    Args:
        filter_: gets (new text, is it the last), gives what is shown; raises HookFailedError.
        parts: see `SequenceState`.
    """

    def __init__(self, filter_: OutputFilter, *parts: Any) -> None:
        super().__init__(*parts)
        self._filter = filter_

    def take(self, news: CoreOutput) -> tuple[str, int]:
        text, num_tokens = super().take(news)
        if text:
            self._texts.pop()  # what the model wrote
        if text or self.finished:
            try:
                text = self._filter(text, self.finished)
            except HookFailedError as error:
                text, self.failure = "", error
                self.output.finish_reason = str(FinishReason.ERROR)
                self.output.stop_reason = None
        if text:
            self._texts.append(text)
        return text, num_tokens


class WarmingSequence(SequenceState):
    """Its `max_tokens` is 0: the token that is drawn behind the prompt is nobody's."""

    def take(self, news: CoreOutput) -> tuple[str, int]:
        if (reason := news.finish_reason) is not None:
            self.output.finish_reason = str(FinishReason.LENGTH if reason is FinishReason.STOP else reason)
        return "", 0


class PooledSequence(SequenceState):
    """It draws no token: its vector comes at once, the vectors of its tokens come in pieces."""

    def __init__(self, request_id: str, params: SamplingParams, tokenizer: Tokenizer) -> None:
        super().__init__(request_id, 0, params, [], tokenizer, None)
        self._pieces: list[np.ndarray] = []

    @property
    def pooled(self) -> np.ndarray | None:
        """All that came; None where nothing did."""
        if len(self._pieces) > 1:
            self._pieces = [np.concatenate(self._pieces)]
        return self._pieces[0] if self._pieces else None

    def take(self, news: CoreOutput) -> tuple[str, int]:
        if news.pooled is not None:
            self._pieces.append(news.pooled)
        if news.finish_reason is not None:
            self.output.finish_reason = str(news.finish_reason)
        return "", 0


def readable(token: int, row: TokenLogprobs, tokenizer: Tokenizer) -> dict[int, Logprob]:
    """One position: the token at it first, then the most likely ones."""
    position = {token: Logprob(row.chosen, row.rank, tokenizer.token(token))}
    for place, (other, value) in enumerate(zip(row.top_ids, row.top_values, strict=True)):
        if other != token:
            position[other] = Logprob(value, place + 1, tokenizer.token(other))
    return position


class PromptLogprobs:
    """A prompt's log probabilities, put together from the pieces in which the core sends them."""

    def __init__(self, prompt_token_ids: Sequence[int], tokenizer: Tokenizer) -> None:
        self._ids = prompt_token_ids
        self._tokenizer = tokenizer
        self._positions: list[dict[int, Logprob] | None] = [None]

    def take(self, rows: Sequence[TokenLogprobs]) -> None:
        """Those of the next tokens."""
        first = len(self._positions)
        for token, row in zip(self._ids[first : first + len(rows)], rows, strict=True):
            self._positions.append(readable(token, row, self._tokenizer))

    @property
    def complete(self) -> list[dict[int, Logprob] | None] | None:
        """All positions, the first None; None until they are all there."""
        return self._positions if len(self._positions) == len(self._ids) else None


class OutputKind(enum.Enum):
    """What a request's outputs hold, and when they come."""

    CUMULATIVE = "cumulative"
    """With every news, all that came so far. Where `best_of` chooses, once, as for FINAL."""
    DELTA = "delta"
    """With every news, only what is new: text, token ids, logprobs of those completions that have news. Refused where
    `best_of` chooses."""
    FINAL = "final"
    """Once, when all completions have ended. So it is for every request that pools."""


@dataclass(slots=True, eq=False)
class RequestState:
    """A user's request, from the input processor that makes it to its last output. All that this process knows of it
    stands here and in its sequences; nobody keeps books beside it.

    Args:
        request_id: the user's.
        prompt: its text, None where ids were given without.
        prompt_token_ids: its ids.
        params: the user's, verified.
        requests: what the core gets: one for each of n (or of `best_of`), in order. One for a request that pools, whose
            `params` say nothing.
        info: what hooks are told of it; None where none looks at single requests.
        arrived: when it came to the frontend, by the monotonic clock.

    Attributes (from when the output processor expects its news):
        kind: what its outputs hold.
        sequences: one for each of `requests`, with what came of it.
        running: how many of them have not ended.
        sent: when it was first to be sent, by the monotonic clock.
        stream: takes its outputs; None where `OutputProcessor.process` returns them, and once it has ended.
        error: the first that ended one of its sequences.
        prompt_logprobs: of `SamplingParams.prompt_logprobs`; None where nobody wants them (any more).
        news: by index of the sequence: (text, number of tokens) that came in the batch at hand.
        given_out: an output was.
        num_retries: how often it was sent again.
        tokenizer: its adapter's, if not the output processor's.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    requests: list[EngineRequest]
    info: RequestInfo | None = None
    arrived: float = 0.0
    kind: OutputKind = OutputKind.CUMULATIVE
    sequences: list[SequenceState] = field(default_factory=list)
    running: int = 0
    sent: float = 0.0
    stream: RequestStream | None = None
    error: EngineError | None = None
    prompt_logprobs: PromptLogprobs | None = None
    news: dict[int, tuple[str, int]] = field(default_factory=dict)
    given_out: bool = False
    num_retries: int = 0
    tokenizer: Tokenizer | None = None


class RequestStream(AsyncIterator[RequestOutput]):
    """One request's outputs as they come. Iterate it, or await `final`; `close` gives it up. One reader.

    A reader that is slower than the engine finds the news put together in one output, so that what waits for it is
    never more than the whole answer.

    Raises (from iteration and from `final`) the typed error that ended the request, or EngineDeadError.

    Args:
        abort: ends the request of this id.
        request: whose outputs; its `kind` says what they hold.

    Attributes:
        sink: takes an output in the reader's place while the reader waits for it, and answers whether it did: in the
            moment it is told, without waking anybody. The last output, and one with an error, are always the reader's.
    """

    def __init__(self, abort: Callable[[str], None], request: RequestState) -> None:
        self.request = request
        self._abort = abort
        self._news: RequestOutput | None = None
        self._error: Exception | None = None
        self._ended = False
        self._reader: asyncio.Future[None] | None = None
        self.sink: Callable[[RequestOutput], bool] | None = None

    def put(self, output: RequestOutput) -> None:
        """For the engine: the next output."""
        if self._error is not None:
            return  # it ended already
        if self.sink is not None and self._is_waited_for() and not output.finished and output.error is None:
            try:
                if self.sink(output):
                    return
            except Exception as error:  # the reader's matter, not the engine's
                self._abort(self.request.request_id)
                return self.fail(error)
        waiting = self._news
        if waiting is not None and self.request.kind is OutputKind.DELTA:
            output.outputs = _joined(waiting.outputs, output.outputs)
        self._news = output
        self._wake()

    def fail(self, error: Exception) -> None:
        """For the engine: the error that ends the stream, after what waits to be read."""
        self._error = error
        self._wake()

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        while not self._ended and self._news is None and self._error is None:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        if self._ended:
            raise StopAsyncIteration
        output, self._news = self._news, None
        if output is None:
            self._ended = True
            assert self._error is not None
            raise self._error
        self._ended = output.finished
        if output.error is not None:
            self._ended = True
            if not output.finished:  # others of n still run, for nobody
                self._abort(self.request.request_id)
            raise output.error
        return output

    async def final(self) -> RequestOutput:
        """The last output. For a stream of kind FINAL, the only one."""
        last: RequestOutput | None = None
        async for output in self:
            last = output
        assert last is not None, "final() was called on a stream that had ended"
        return last

    def close(self) -> None:
        """Abort the request if it has not ended. Idempotent; nothing more comes out of the stream."""
        if not self._ended:
            self._ended = True
            self._news = None
            self._abort(self.request.request_id)
            self._wake()

    def _is_waited_for(self) -> bool:
        """The reader has done with everything that it got, and waits."""
        return self._reader is not None and not self._reader.done()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def _joined(old: list[CompletionOutput], new: list[CompletionOutput]) -> list[CompletionOutput]:
    """Two deltas as one. Those of `old` were not given out, so they are changed in place."""
    by_index = {completion.index: completion for completion in old}
    for delta in new:
        seen = by_index.setdefault(delta.index, delta)
        if seen is delta:
            continue
        seen.text += delta.text
        seen.token_ids += delta.token_ids
        if seen.logprobs is not None and delta.logprobs is not None:
            seen.logprobs += delta.logprobs
        seen.cumulative_logprob = delta.cumulative_logprob
        seen.finish_reason = delta.finish_reason
        seen.stop_reason = delta.stop_reason
    return [by_index[index] for index in sorted(by_index)]
