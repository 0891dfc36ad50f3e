"""One request's outputs on their way to the coroutine that reads them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from engine.frontend.input_processor import ProcessedRequest
from engine.frontend.output_processor import OutputKind
from engine.types.outputs import CompletionOutput, RequestOutput


class RequestStream(AsyncIterator[RequestOutput]):
    """One request's outputs as they come. Iterate it, or await `final`; `close` gives it up. One reader.

    A reader that is slower than the engine finds the news put together in one output, so that what waits for it is
    never more than the whole answer.

    Raises (from iteration and from `final`) the typed error that ended the request, or EngineDeadError.

    Args:
        abort: ends the request of this id.
        processed: the request.
        kind: what its outputs hold.

    Attributes:
        sink: takes an output in the reader's place while the reader waits for it, and answers whether it did: in the
            moment it is told, without waking anybody. The last output, and one with an error, are always the reader's.
    """

    def __init__(self, abort: Callable[[str], None], processed: ProcessedRequest, kind: OutputKind) -> None:
        self.processed = processed
        self._abort, self._kind = abort, kind
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
                self._abort(self.processed.request_id)
                return self.fail(error)
        waiting = self._news
        if waiting is not None and self._kind is OutputKind.DELTA:
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
                self._abort(self.processed.request_id)
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
            self._abort(self.processed.request_id)
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
