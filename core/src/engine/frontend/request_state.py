"""What the frontend knows of one request, and the stream on which its outputs come."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from engine.frontend.sequence_state import PromptLogprobs, SequenceState
from engine.types.errors import EngineError
from engine.types.hooks import RequestInfo
from engine.types.outputs import CompletionOutput, RequestOutput
from engine.types.params import SamplingParams
from engine.types.request import EngineRequest


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
        seen.finish_reason, seen.stop_reason = delta.finish_reason, delta.stop_reason
    return [by_index[index] for index in sorted(by_index)]
