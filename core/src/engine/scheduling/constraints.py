"""Constraints on outputs at work: compiled beside the loop, followed token by token, written as masks for each step.

A request with a constraint first waits for its matcher (state COMPILING), which a thread compiles; others go on. Then
it is a request as any other, planned ahead with placeholders: only the sampling of its steps waits for the masks. Its
matcher hears of a token when it is accepted, and stays with the request through preemption: what is computed again has
been heard of.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

import numpy as np

from engine.scheduling.deferred import Deferred
from engine.types.errors import EngineError, InvalidRequestError
from engine.types.outputs import CoreOutput
from engine.types.plan import Masks, StepPlan
from engine.types.request import EngineRequest, FinishReason

if TYPE_CHECKING:
    from engine.interfaces.grammar import Grammar, Matcher
    from engine.scheduling.request import Request
    from engine.scheduling.slots import SlotTable

logger = logging.getLogger(__name__)

COMPILE_THREADS = 8
"""One constraint that takes long does not keep all others waiting. Mostly they wait, for a process or a lock."""


class Constraints:
    """The grammar driver in the hands of the scheduler. All calls come from the scheduler's thread.

    Args:
        grammar: at work.
        vocab_size: of the model.
        close: ends what compiles outside of this process.
        warm_up: has the drivers ready for a first constraint; takes a while.
    """

    def __init__(
        self,
        grammar: Grammar,
        vocab_size: int,
        close: Callable[[], None] | None = None,
        *,
        warm_up: Callable[[], None] | None = None,
    ) -> None:
        self._grammar, self._close, self._warm_up = grammar, close, warm_up
        self._words = -(-vocab_size // 32)
        self._threads: ThreadPoolExecutor | None = None
        self._compiling: dict[str, tuple[Request, Future[Matcher]]] = {}

    @property
    def num_compiling(self) -> int:
        """Requests that wait for their matcher."""
        return len(self._compiling)

    # -- compile ------------------------------------------------------------------------------------------------------
    def compile(self, request: Request) -> None:
        """Begin to compile a request's constraint."""
        constraint, ends = request.params.structured_outputs, tuple(sorted(request.eos_token_ids))
        assert constraint is not None
        future = self._pool().submit(self._grammar.compile, constraint, ends)
        self._compiling[request.request_id] = request, future

    def warm_up(self) -> None:
        """Begin to have the drivers ready, beside what else is done."""
        if self._warm_up is not None:
            self._pool().submit(self._warm_up)

    def forget(self, request: Request) -> None:
        """The request ended before its matcher was there; what is compiled for it is dropped."""
        if request.request_id in self._compiling:
            _, future = self._compiling.pop(request.request_id)
            future.cancel()

    def take_compiled(self) -> list[tuple[Request, EngineError | None]]:
        """The requests that now have their matcher, or never will, in the order in which they came."""
        done = [(request, future) for request, future in self._compiling.values() if future.done()]
        taken: list[tuple[Request, EngineError | None]] = []
        for request, future in done:
            del self._compiling[request.request_id]
            error = future.exception()
            if error is None:
                request.matcher = future.result()
                constraint = request.params.structured_outputs
                if constraint is not None and constraint.start_after:
                    request.matcher = Deferred(request.matcher, constraint.start_after)
                taken.append((request, None))
            elif isinstance(error, InvalidRequestError) and (asked := request.params.structured_outputs) is not None:
                taken.append((request, asked.renamed(error)))
            elif isinstance(error, EngineError):
                taken.append((request, error))
            else:
                logger.error("the grammar driver failed on a constraint", exc_info=error)
                compiling = f"compile the structured_outputs of request {request.request_id!r}"
                taken.append((request, EngineError(compiling, f"{type(error).__name__}: {error}")))
        return taken

    def wait(self, seconds: float) -> None:
        """Wait at most so long for a matcher, where nothing else can be done; not at all where none is compiled."""
        wait([future for _, future in self._compiling.values()], seconds, FIRST_COMPLETED)

    def shutdown(self) -> None:
        """Compile nothing more. Idempotent."""
        self._compiling.clear()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
        if self._close is not None:
            self._close()

    def _pool(self) -> ThreadPoolExecutor:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(COMPILE_THREADS, thread_name_prefix="grammar")
        return self._threads

    # -- step by step -------------------------------------------------------------------------------------------------
    def masks(self, plan: StepPlan, slots: SlotTable) -> Masks | None:
        """The masks of a plan with `masks_follow`; None while a token before one of them has not come back."""
        of_row = plan.slot_of_row  # what a slot draws that accepts nothing is dropped
        rows = np.flatnonzero(plan.samples & slots.matched[of_row] & slots.accepts[of_row]).astype(np.int32)
        row_slots = plan.slot_of_row[rows]
        if (slots.known[row_slots] < plan.num_computed[rows] + plan.num_tokens[rows]).any():
            return None
        bits = np.empty((rows.size, self._words), np.int32)
        if rows.size:
            matchers = [_matcher(slots, slot) for slot in row_slots.tolist()]
            at = np.arange(rows.size, dtype=np.int32)
            if any(isinstance(matcher, Deferred) for matcher in matchers):
                matchers, at = _started(matchers, bits)
            if matchers:
                self._grammar.fill_masks(matchers, at, bits)
        return Masks(row=rows, bits=bits)


def unserved(request: EngineRequest) -> InvalidRequestError:
    """The error for a constrained request in an engine without a grammar driver."""
    asked = f"add request {request.request_id!r} with structured_outputs"
    return InvalidRequestError(asked, "this engine has no grammar driver", "start it with --grammar DRIVER")


def follow(row_slots: np.ndarray, outputs: list[CoreOutput], stopped: set[int], slots: SlotTable) -> list[int]:
    """Let the matchers hear of a step's tokens; say in its output where a request ends by that.

    Args:
        row_slots: int [n]; of the rows that got tokens.
        outputs: [n].
        stopped: places whose request ends with its last token, so that nothing is asked of its matcher any more.

    Returns:
        Places whose request ends because its constraint is complete, or because its token breaks it.
    """
    ended: list[int] = []
    for i in np.flatnonzero(slots.matched[row_slots]).tolist():
        if i in stopped:
            continue
        matcher, output = _matcher(slots, row_slots[i]), outputs[i]
        try:
            accepted = matcher.accept(output.new_token_ids)
        except EngineError as error:
            ended.append(i)
            _end(output, 0, error)
            continue
        if accepted < len(output.new_token_ids):
            ended.append(i)
            _refuse(output, accepted)
        elif matcher.finished:
            ended.append(i)
            output.completed = True
            output.finish_reason = FinishReason.STOP
    return ended


def _refuse(output: CoreOutput, accepted: int) -> None:
    """A row whose constraint and other parameters leave no token draws one all the same: it is not shown."""
    token = output.new_token_ids[accepted]
    error = EngineError(
        f"go on with request {output.request_id!r} under its structured_outputs",
        f"no token is left that the constraint and the other sampling parameters allow (token {token} was drawn)",
        "drop what forbids further tokens: min_tokens, bad_words, allowed_token_ids, logit_bias",
    )
    _end(output, accepted, error)


def _end(output: CoreOutput, shown: int, error: EngineError) -> None:
    """The request ends with an error, and so many of its new tokens are shown."""
    del output.new_token_ids[shown:]
    if output.new_logprobs:
        del output.new_logprobs[shown:]
    output.finish_reason = FinishReason.ERROR
    output.error = error.parts


def _started(matchers: list[Matcher], bits: np.ndarray) -> tuple[list[Matcher], np.ndarray]:
    """The matchers whose constraint has begun, and their rows; the others' rows of `bits` allow everything."""
    begun: list[Matcher] = []
    at: list[int] = []
    for row, matcher in enumerate(matchers):
        if isinstance(matcher, Deferred) and not matcher.started:
            bits[row] = -1
        else:
            begun.append(matcher.matcher if isinstance(matcher, Deferred) else matcher)
            at.append(row)
    return begun, np.array(at, np.int32)


def _matcher(slots: SlotTable, slot: int) -> Matcher:
    request = slots.requests[slot]
    assert request is not None and request.matcher is not None
    return request.matcher
