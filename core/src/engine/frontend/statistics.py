"""Who watches single requests from within this process. What watches an engine as a whole is a part outside the core
(of ours `engine_kit.lifecycle`)."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

from engine.types.hooks import RequestSummary
from engine.types.outputs import CoreOutput, StepStats

if TYPE_CHECKING:
    from engine.frontend.request_state import RequestState, SequenceState
    from engine.types.errors import EngineError


class RequestObserver(Protocol):
    """Counts what becomes of requests; called by one thread. A sequence is one of a request's n."""

    def arrived(self, request: RequestState) -> None:
        """A request is about to be sent."""

    def stepped(self, stats: StepStats | None) -> None:
        """News of one step came; None where the core told nothing of itself."""

    def first_token(self, seconds: float) -> None:
        """A sequence's first token came, so long after its request arrived, tokenising included."""

    def next_tokens(self, seconds: float, count: int) -> None:
        """`count` tokens came, each so long after the one before it in its sequence."""

    def ended(self, request: RequestState, sequence: SequenceState, reason: str, now: float) -> None:
        """A sequence ended. `now`: by the monotonic clock."""

    def retried(self) -> None:
        """A request is sent again, because its engine core has died."""


def follow(
    news: Iterable[CoreOutput],
    sequences: Mapping[str, tuple[RequestState, SequenceState]],
    now: float,
    observer: RequestObserver | None,
) -> None:
    """Enter into the sequences when their tokens came.

    Args:
        news: of one step, or of several that are taken in at once.
        sequences: the unfinished ones, by the core's id.
        now: by the monotonic clock.
        observer: is told what passed between tokens.
    """
    single: dict[float, int] = {}  # sequences that were in the same step before waited equally long
    for output in news:
        entry = sequences.get(output.request_id)
        if entry is None or not (count := len(output.new_token_ids)):
            continue
        request, sequence = entry
        if request.params.max_tokens == 0:
            continue
        if not sequence.num_tokens:
            sequence.first_token = now
            sequence.queue_time = output.queue_time
            sequence.prefill_time = output.prefill_time
            if observer is not None and not sequence.retried:
                observer.first_token(now - request.arrived)
        elif count == 1:
            last = sequence.last_token
            single[last] = single.get(last, 0) + 1
        elif observer is not None:
            observer.next_tokens((now - sequence.last_token) / count, count)
        sequence.last_token = now
        sequence.num_tokens += count
    if observer is not None:
        for last, count in single.items():
            observer.next_tokens(now - last, count)


def summary_of(
    request: RequestState, sequence: SequenceState, model: str, reason: str, error: EngineError | None
) -> RequestSummary:
    """What the hook `request_finished` is told of a sequence that ended.

    Args:
        model: the model's name in the API.
        reason: why it ended.
        error: its own or that of its request, where there is one.
    """
    started = sequence.num_tokens > 0
    info = request.info
    return RequestSummary(
        request_id=request.request_id,
        index=sequence.output.index,
        model=model,
        arrival_time=request.requests[0].arrival_time,
        queue_seconds=sequence.queue_time if started else None,
        prefill_seconds=sequence.prefill_time if started else None,
        first_token_seconds=sequence.first_token - request.arrived if started else None,
        decode_seconds=sequence.last_token - sequence.first_token,
        total_seconds=time.monotonic() - request.arrived,
        prompt_tokens=len(request.prompt_token_ids),
        cached_tokens=sequence.num_cached_tokens,
        output_tokens=len(sequence.output.token_ids),
        finish_reason=reason,
        error_code=error.code if error is not None and reason == "error" else "",
        http=None if info is None else info.http,
    )
