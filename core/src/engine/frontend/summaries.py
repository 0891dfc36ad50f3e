"""What is told of a sequence when it has ended (the hook `request_finished`). Exists only where somebody listens."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from engine.frontend.clock import SteadyClock
from engine.types.hooks import RequestSummary

if TYPE_CHECKING:
    from engine.frontend.input_processor import ProcessedRequest
    from engine.frontend.sequence_state import SequenceState
    from engine.plugin import HookRelay
    from engine.types.errors import EngineError
    from engine.types.outputs import CoreOutput


class _Times:
    """Of one unfinished sequence; seconds of the monotonic clock."""

    __slots__ = ("begun", "cached", "first", "last", "prefill", "queued")

    def __init__(self, begun: float) -> None:
        self.begun, self.first, self.last = begun, 0.0, 0.0
        self.queued: float | None = None
        self.prefill: float | None = None
        self.cached = 0


class Summaries:
    """Follows sequences from their arrival to their end. Called by the one thread that takes the core's news.

    Args:
        relay: the frontend's, whose `request_finished` somebody hears.
        model: the model's name in the API.
        clock: that of arrival times.
    """

    def __init__(self, relay: HookRelay, model: str, clock: SteadyClock) -> None:
        self._relay, self._model, self._clock = relay, model, clock
        self._times: dict[str, _Times] = {}

    def begin(self, processed: ProcessedRequest, *, again: bool = False) -> None:
        """A request is about to be sent. Sent again, its sequences begin anew, but for those that were told of."""
        waited = max(0.0, self._clock.now() - processed.requests[0].arrival_time)
        begun = time.monotonic() - waited
        for request in processed.requests:
            if not again or request.request_id in self._times:
                self._times[request.request_id] = _Times(begun)

    def step(self, news: Iterable[CoreOutput]) -> None:
        """The news of one step came in."""
        now = time.monotonic()
        for output in news:
            times = self._times.get(output.request_id)
            if times is None:
                continue
            if output.num_cached_tokens:
                times.cached = output.num_cached_tokens
            if output.new_token_ids:
                if times.queued is None:
                    times.first, times.queued, times.prefill = now, output.queue_time, output.prefill_time
                times.last = now

    def end(self, processed: ProcessedRequest, sequence: SequenceState, error: EngineError | None = None) -> None:
        """A sequence ended: by itself, by `error`, or else by an abort."""
        times = self._times.pop(sequence.request_id, None)
        if times is None or (heard := self._relay.request_finished) is None:
            return
        info = processed.info
        reason = sequence.output.finish_reason or ("abort" if error is None else "error")
        heard(
            summary=RequestSummary(
                request_id=processed.request_id,
                index=sequence.output.index,
                model=self._model,
                arrival_time=processed.requests[0].arrival_time,
                queue_seconds=times.queued,
                prefill_seconds=times.prefill,
                first_token_seconds=None if times.queued is None else times.first - times.begun,
                decode_seconds=times.last - times.first,
                total_seconds=time.monotonic() - times.begun,
                prompt_tokens=len(processed.prompt_token_ids),
                cached_tokens=times.cached,
                output_tokens=len(sequence.output.token_ids),
                finish_reason=reason,
                error_code=error.code if error is not None and reason == "error" else "",
                http=None if info is None else info.http,
            )
        )
