"""Structured outputs at work: constraints compiled beside the loop, followed token by token, written as masks.

A request with a constraint first waits for its matcher, which a thread compiles (`engine.scheduling.gates`). Then it is
a request as any other, planned ahead with placeholders: only the sampling of its steps waits for the masks. Its matcher
hears of a token when it is accepted, and stays with the request through preemption: what is computed again has
been heard of.

What a position of a row with drafts may draw depends on the drafts before it. So a matcher is led along its row's
drafts, tells its mask at each place, and is led back: it has heard of nothing. Behind a draft that the constraint does
not allow, or that ends the request, no draw counts, and there is no mask. The matchers go along together, place by
place, so that a driver fills the masks of a place for all of them at once.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from engine.interfaces.grammar import MAX_ROLLBACK
from engine.scheduling.slots import Request, SlotTable
from engine.types.errors import ContractError, EngineError, InvalidRequestError
from engine.types.outputs import CoreOutput
from engine.types.plan import Masks, StepPlan
from engine.types.request import FinishReason

if TYPE_CHECKING:
    from engine.interfaces.grammar import Grammar, Matcher

logger = logging.getLogger(__name__)

COMPILE_THREADS = 8
"""One constraint that takes long does not keep all others waiting. Mostly they wait, for a process or a lock."""

Fill = Callable[[list["Matcher"], np.ndarray, np.ndarray], None]
"""Writes the masks of matchers, none twice, into these rows, int32 [m], of int32 [rows, words]."""


class Constraints:
    """The grammar driver in the hands of the scheduler. All calls come from the scheduler's thread. Implements
    `engine.scheduling.gates.Gate`.

    Args:
        grammar: at work. Its matchers raise again, once they have failed, what they have raised.
        vocab_size: of the model.
        warm_up: has the drivers ready for a first constraint; takes a while.
        takes_drafts: matchers can roll back, so that rows with one may have drafts.
    """

    reason = "its constraint to be compiled"

    def __init__(
        self,
        grammar: Grammar,
        vocab_size: int,
        *,
        warm_up: Callable[[], None] | None = None,
        takes_drafts: bool = False,
    ) -> None:
        self.takes_drafts = takes_drafts
        self._grammar = grammar
        self._vocab_size = vocab_size
        self._words = -(-vocab_size // 32)
        self._warm_up = warm_up
        self._threads: ThreadPoolExecutor | None = None
        self._compiling: dict[str, tuple[Request, Future[Matcher]]] = {}

    # -- compile -------------------------------------------------------------------------------------------------------
    def begin(self, request: Request, wake: Callable[[], None]) -> bool:
        constraint, ends = request.params.structured_outputs, tuple(sorted(request.eos_token_ids))
        if constraint is None:
            return False
        future = self._pool().submit(self._grammar.compile, constraint, ends)
        future.add_done_callback(lambda _: wake())
        self._compiling[request.request_id] = request, future
        return True

    def warm_up(self) -> None:
        """Begin to have the drivers ready, beside what else is done."""
        if self._warm_up is not None:
            self._pool().submit(self._warm_up)

    def forget(self, request: Request) -> None:
        _, future = self._compiling.pop(request.request_id)
        future.cancel()

    def ready(self) -> list[tuple[Request, EngineError | None]]:
        done = [(request, future) for request, future in self._compiling.values() if future.done()]
        taken: list[tuple[Request, EngineError | None]] = []
        for request, future in done:
            del self._compiling[request.request_id]
            error = future.exception()
            if error is None:
                request.matcher = future.result()
                constraint = request.params.structured_outputs
                if constraint is not None and constraint.start_after:
                    request.matcher = ReasoningGate(request.matcher, constraint.start_after)
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

    def shutdown(self) -> None:
        self._compiling.clear()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
        self._grammar.close()

    def _pool(self) -> ThreadPoolExecutor:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(COMPILE_THREADS, thread_name_prefix="grammar")
        return self._threads

    # -- step by step --------------------------------------------------------------------------------------------------
    def masks(self, plan: StepPlan, slots: SlotTable, drafts: Callable[[], list[list[int]]]) -> Masks | None:
        """The masks of a plan with `masks_follow`; None while a token before one of them has not come back.

        Args:
            drafts: tells those of each of the plan's rows; asked where constrained rows have some.

        Raises ContractError where the drafts do not fit the plan.
        """
        of_row = plan.slot_of_row  # what a slot draws that accepts nothing is dropped
        rows = np.flatnonzero(plan.samples & slots.matched[of_row] & slots.accepts[of_row]).astype(np.int32)
        row_slots, before = of_row[rows], (plan.num_computed + plan.num_tokens)[rows]
        drafted = plan.num_drafts is not None and bool(plan.num_drafts[rows].any())
        if plan.num_drafts is not None:
            before -= plan.num_drafts[rows]
        if (slots.known[row_slots] < before).any():
            return None
        matchers = [_matcher(slots.request(slot)) for slot in row_slots.tolist()]
        if plan.num_drafts is None or not drafted:
            bits = np.empty((rows.size, self._words), np.int32)
            if rows.size:
                self._fill(matchers, np.arange(rows.size, dtype=np.int32), bits)
            return Masks(row=rows, bits=bits)
        found = forced = _forced(plan)
        if any(wanted and not forced[row] for row, wanted in zip(rows.tolist(), plan.num_drafts[rows], strict=True)):
            found = check_drafts(plan, drafts(), self._vocab_size)
        chains = [
            DraftedRow(matcher, found[row], slots.stop_ids(slot) if found[row] else frozenset())
            for matcher, row, slot in zip(matchers, rows.tolist(), row_slots.tolist(), strict=True)
        ]
        masks = draft_masks(chains, self._words, self._fill)
        return Masks(row=rows.repeat(masks.counts), bits=masks.bits)

    def _fill(self, matchers: list[Matcher], at: np.ndarray, bits: np.ndarray) -> None:
        """The matchers' masks into these rows of `bits`; everything is allowed before a constraint has begun."""
        if any(isinstance(matcher, ReasoningGate) for matcher in matchers):
            bits[at] = -1
            begun = [
                i for i, matcher in enumerate(matchers) if not isinstance(matcher, ReasoningGate) or matcher.started
            ]
            matchers, at = [matchers[i] for i in begun], at[begun]
            matchers = [matcher.matcher if isinstance(matcher, ReasoningGate) else matcher for matcher in matchers]
        if matchers:
            self._grammar.fill_masks(matchers, at, bits)


def _forced(plan: StepPlan) -> list[list[int]]:
    """The drafts of each row that come with the plan."""
    tokens: list[list[int]] = [[] for _ in range(plan.num_rows)]
    if plan.forced_drafts is not None and plan.num_drafts is not None:
        for row, forced in zip(plan.forced_drafts.row.tolist(), plan.forced_drafts.tokens.tolist(), strict=True):
            tokens[row] = forced[: plan.num_drafts[row]]
    return tokens


class Ending(NamedTuple):
    """A request that ends by its constraint.

    Args:
        place: among the rows that got tokens.
        kept: how many of its new tokens are output.
        error: why it ends; None: its constraint is complete.
    """

    place: int
    kept: int
    error: EngineError | None

    def write(self, output: CoreOutput) -> None:
        """Say so in the request's output."""
        if self.error is None:
            output.completed, output.finish_reason = True, FinishReason.STOP
        else:
            output.error, output.finish_reason = self.error.parts, FinishReason.ERROR


def follow(
    row_slots: np.ndarray, drawn: np.ndarray, kept: np.ndarray, stopped: Collection[int], slots: SlotTable
) -> list[Ending]:
    """Let the matchers hear of a step's tokens.

    Args:
        row_slots: int [n]; of the rows that got tokens.
        drawn: int [n, W]; kept: int [n]; the first `kept` tokens of each row count.
        stopped: places whose request ends with its last token, so that its matcher does not hear of that one. It is
            called all the same: a matcher that has failed meanwhile allowed everything.

    Returns:
        The requests that end because their constraint is complete, because a token breaks it, or because their matcher
        has failed.
    """
    endings: list[Ending] = []
    for i in np.flatnonzero(slots.matched[row_slots]).tolist():
        request = slots.request(row_slots[i])
        matcher = _matcher(request)
        tokens = drawn[i, : kept[i]].tolist()
        for place, token in enumerate(tokens):
            last = i in stopped and place + 1 == len(tokens)
            try:
                accepted = matcher.accept([] if last else [token])
            except EngineError as error:
                endings.append(Ending(i, 0, error))
                break
            if last:
                break
            if not accepted:
                endings.append(Ending(i, place, _refused(request, token)))
                break
            if matcher.finished:
                endings.append(Ending(i, place + 1, None))
                break
    return endings


def _refused(request: Request, token: int) -> InvalidRequestError:
    """A row whose constraint and other parameters leave no token draws one all the same: it is not shown."""
    return InvalidRequestError(
        f"go on with request {request.request_id!r} under its structured_outputs",
        f"no token is left that the constraint and the other sampling parameters allow (token {token} was drawn)",
        "drop what forbids further tokens: min_tokens, bad_words, allowed_token_ids, logit_bias",
    )


def _matcher(request: Request) -> Matcher:
    assert request.matcher is not None
    return request.matcher


# -- drafts under constraints ------------------------------------------------------------------------------------------
def check_drafts(plan: StepPlan, drafts: object, vocab_size: int) -> list[list[int]]:
    """Refuse drafts that do not fit the plan: another number of rows, more than were wanted, no ids.

    Raises:
        ContractError: what is wrong with them.
    """
    wanted = [0] * plan.num_rows if plan.num_drafts is None else plan.num_drafts.tolist()
    if isinstance(drafts, list) and len(drafts) == len(wanted) and all(map(_are_drafts, drafts, wanted)):
        highest, lowest = max(map(max, filter(None, drafts)), default=0), min(map(min, filter(None, drafts)), default=0)
        if lowest >= 0 and highest < vocab_size:
            return drafts
    raise ContractError(
        f"the drafts of step {plan.step_id}, for its rows at most {wanted!r:.100}, of {vocab_size} ids",
        f"the worker told {drafts!r:.200}",
        "choose another executor, platform or drafter driver and tell its author",
        point="drafter",
    )


def _are_drafts(of_row: object, most: int) -> bool:
    return isinstance(of_row, list) and len(of_row) <= most and all(isinstance(token, int) for token in of_row)


class DraftedRow(NamedTuple):
    """A constrained row.

    Args:
        matcher: behind the tokens before the drafts.
        drafts: of the row, perhaps none.
        stops: ids that end the request: nothing is drawn behind them.
    """

    matcher: Matcher
    drafts: Sequence[int]
    stops: frozenset[int]


class DraftMasks(NamedTuple):
    """The masks of some rows.

    Args:
        counts: int64 [m]; of each row, at least 1.
        bits: int32 [sum of counts, words]; row by row, position by position.
    """

    counts: np.ndarray
    bits: np.ndarray


def draft_masks(rows: Sequence[DraftedRow], words: int, fill: Fill) -> DraftMasks:
    """The masks of each row's positions, as far as draws there may count. A matcher that fails on the way is not led
    back: it raises again when it is asked next.

    Args:
        words: of a mask.
        fill: the driver's.
    """
    most = np.array([1 + len(row.drafts) for row in rows], np.int64)
    start = np.cumsum(most) - most
    bits = np.empty((int(most.sum()), words), np.int32)
    counts = np.zeros(len(rows), np.int64)
    failed: set[int] = set()
    going = list(range(len(rows)))
    while going:
        places = (start + counts)[going].astype(np.int32)
        fill([rows[i].matcher for i in going], places, bits)
        counts[going] += 1
        going = [
            i for i, at in zip(going, places.tolist(), strict=True) if _goes_on(rows[i], i, counts, bits[at], failed)
        ]
    for i, row in enumerate(rows):
        if counts[i] > 1 and i not in failed:
            row.matcher.rollback(int(counts[i]) - 1)
    if counts.sum() < most.sum():
        place = np.arange(most.sum()) - start.repeat(most)
        bits = bits[place < counts.repeat(most)]
    return DraftMasks(counts, bits)


def _goes_on(row: DraftedRow, i: int, counts: np.ndarray, mask: np.ndarray, failed: set[int]) -> bool:
    """Lead the matcher over its next draft; False where there is no place behind it at which a draw may count."""
    place = int(counts[i]) - 1
    if place == len(row.drafts):
        return False
    token = row.drafts[place]
    if token in row.stops or not mask[token >> 5] >> (token & 31) & 1:
        return False
    try:
        if not row.matcher.accept([token]):
            return False
    except EngineError:
        failed.add(i)
        return False
    if row.matcher.finished:
        row.matcher.rollback(1)
        return False
    return True


# -- matchers around matchers ------------------------------------------------------------------------------------------
class ReasoningGate:
    """A constraint that begins after a model's reasoning. Implements `engine.interfaces.grammar.Matcher` around
    another, which hears of nothing before some ids have come one after the other. Until then every token is allowed.

    Args:
        matcher: of the constraint.
        start_after: ids, at least one.

    Attributes:
        started: the ids have come.
    """

    __slots__ = ("_before", "_inside", "_start_after", "matcher", "started")

    def __init__(self, matcher: Matcher, start_after: Sequence[int]) -> None:
        self.matcher = matcher
        self.started = False
        self._start_after = list(start_after)
        self._before: deque[int] = deque(maxlen=len(start_after) + MAX_ROLLBACK)  # tokens up to the start
        self._inside = 0  # tokens behind it

    def accept(self, tokens: Sequence[int]) -> int:
        if self.started:
            inside = self.matcher.accept(tokens)
            self._inside += inside
            return inside
        for count, token in enumerate(tokens, 1):
            self._before.append(token)
            self.started = self._begins()
            if self.started:
                return count + self.accept(tokens[count:])
        return len(tokens)

    def rollback(self, num_tokens: int) -> None:
        """May lead back to where everything is allowed."""
        inside = min(num_tokens, self._inside)
        if inside:
            self.matcher.rollback(inside)
            self._inside -= inside
        for _ in range(num_tokens - inside):
            self._before.pop()
            self.started = False

    def forced_bytes(self) -> bytes:
        return self.matcher.forced_bytes() if self.started else b""

    @property
    def finished(self) -> bool:
        return self.started and self.matcher.finished

    def _begins(self) -> bool:
        if len(self._before) < len(self._start_after):
            return False
        return all(a == b for a, b in zip(reversed(self._before), reversed(self._start_after), strict=False))
