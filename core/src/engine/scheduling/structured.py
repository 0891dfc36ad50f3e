"""Structured outputs at work: constraints compiled beside the loop, followed token by token, written as masks.

A request with a constraint first waits for its matcher, which a thread compiles (`engine.scheduling.gates`). Then it is
a request as any other, planned ahead with placeholders: only the sampling of its steps waits for the masks. Its matcher
hears of a token when it is accepted, and stays with the request through preemption: what is computed again has
been heard of.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from engine.scheduling.matchers import DraftedRow, GrammarDriver, RequestMatcher, draft_masks, fill_masks
from engine.scheduling.slots import Request, SlotTable
from engine.types.errors import ContractError, EngineError, InvalidRequestError
from engine.types.outputs import CoreOutput
from engine.types.plan import Masks, StepPlan
from engine.types.request import FinishReason
from engine.types.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from engine.interfaces.grammar import Matcher

logger = logging.getLogger(__name__)

COMPILE_THREADS = 8
"""One constraint that takes long does not keep all others waiting. Mostly they wait, for a process or a lock."""
REMEMBERED = 1024
"""How many constraints that a driver refused, and a later one took, are remembered."""
TRIALS = (
    StructuredOutputsParams(regex="a"),
    StructuredOutputsParams(json_object=True),
    StructuredOutputsParams(json={"type": "boolean"}),
    StructuredOutputsParams(choice=["a"]),
)
"""What has a driver import its library and start its process; the first that it enforces is taken."""


class Constraints:
    """The grammar drivers in the hands of the scheduler. Implements `engine.scheduling.gates.Gate`: all calls come from
    the scheduler's thread, but for `compile`.

    A driver that refuses a constraint, by its card or when it compiles it, hands it on to the next. What it takes too
    long or too much memory over it hands on as well: others may have a better way.

    Args:
        turns: the drivers by kind of constraint, in the order in which they are asked.
        vocab_size: of the model.

    Attributes:
        takes_drafts: matchers can roll back, so that rows with one may have drafts.
    """

    def __init__(self, turns: Mapping[str, Sequence[GrammarDriver]], vocab_size: int) -> None:
        self._turns = turns
        self._drivers = list({id(driver.grammar): driver for turn in turns.values() for driver in turn}.values())
        self.takes_drafts = all(driver.card.rollback for driver in self._drivers)
        self._vocab_size = vocab_size
        self._words = -(-vocab_size // 32)
        self._threads: ThreadPoolExecutor | None = None
        self._compiling: dict[str, tuple[Request, Future[RequestMatcher]]] = {}
        self._lock = threading.Lock()
        self._later: OrderedDict[bytes, int] = OrderedDict()  # by hash of the constraint: whose turn it was in the end

    # -- the gate ------------------------------------------------------------------------------------------------------
    def begin(self, request: Request, wake: Callable[[], None]) -> bool:
        constraint, ends = request.params.structured_outputs, tuple(sorted(request.eos_token_ids))
        if constraint is None:
            return False
        future = self._pool().submit(self.compile, constraint, ends)
        future.add_done_callback(lambda _: wake())
        self._compiling[request.request_id] = request, future
        return True

    def forget(self, request: Request) -> None:
        _, future = self._compiling.pop(request.request_id)
        future.cancel()

    def ready(self) -> list[tuple[Request, EngineError | None]]:
        done = [(request, future) for request, future in self._compiling.values() if future.done()]
        for request, _ in done:
            del self._compiling[request.request_id]
        return [(request, _take(request, future)) for request, future in done]

    def shutdown(self) -> None:
        self._compiling.clear()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
        close(self._drivers)

    def _pool(self) -> ThreadPoolExecutor:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(COMPILE_THREADS, thread_name_prefix="grammar")
        return self._threads

    # -- compile -------------------------------------------------------------------------------------------------------
    def compile(self, constraint: StructuredOutputsParams, end_token_ids: Sequence[int]) -> RequestMatcher:
        """A matcher of the first driver that takes the constraint. Thread-safe.

        Raises:
            InvalidRequestError: nobody takes it; names each driver and its reason.
            EngineError: a driver failed.
        """
        (kind,) = constraint.kinds
        key = hashlib.blake2b(msgspec.json.encode(constraint), digest_size=16).digest()
        with self._lock:
            first = self._later.get(key, 0)
        refusals: list[tuple[str, InvalidRequestError]] = []
        for turn, driver in enumerate(self._turns.get(kind, ())):
            if turn < first:
                continue
            try:
                driver.card.verify(constraint)
                matcher = driver.grammar.compile(constraint, end_token_ids)
                self._check_beginning(matcher, driver, constraint)
            except InvalidRequestError as error:
                refusals.append((driver.candidate.name, error))
                continue
            except Exception as error:
                raise driver.candidate.fault(constraint.asked, error) from error
            if turn > first:
                self._remember(key, turn)
            return RequestMatcher(matcher, driver, constraint.start_after)
        if not refusals:
            raise InvalidRequestError(constraint.asked, "no grammar driver at work enforces it")
        raise constraint.refused(refusals)

    def _check_beginning(self, matcher: Matcher, driver: GrammarDriver, constraint: StructuredOutputsParams) -> None:
        """That there is a way to begin. Raises InvalidRequestError."""
        mask = np.zeros((1, self._words), np.int32)
        if not matcher.finished:
            driver.grammar.fill_masks([matcher], np.zeros(1, np.int32), mask)
            if not mask.any():
                raise InvalidRequestError(constraint.asked, "nothing can be written under it: no token may come first")

    def _remember(self, key: bytes, turn: int) -> None:
        with self._lock:
            self._later[key] = turn
            while len(self._later) > REMEMBERED:
                self._later.popitem(last=False)

    def warm_up(self, end_token_ids: Sequence[int]) -> None:
        """Beside what else is done, have the first driver of each kind compile the least that it can be asked, so that
        its library, its vocabulary and its process are ready for the first request."""
        first = {id(turn[0].grammar): turn[0] for turn in self._turns.values() if turn}
        self._pool().submit(warm_up, list(first.values()), end_token_ids)

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
            fill_masks(matchers, np.arange(rows.size, dtype=np.int32), bits)
            return Masks(row=rows, bits=bits)
        found = forced = _forced(plan)
        if any(wanted and not forced[row] for row, wanted in zip(rows.tolist(), plan.num_drafts[rows], strict=True)):
            found = check_drafts(plan, drafts(), self._vocab_size)
        chains = [
            DraftedRow(matcher, found[row], slots.stop_ids(slot) if found[row] else frozenset())
            for matcher, row, slot in zip(matchers, rows.tolist(), row_slots.tolist(), strict=True)
        ]
        counts, bits = draft_masks(chains, self._words)
        return Masks(row=rows.repeat(counts), bits=bits)


def _take(request: Request, compiled: Future[RequestMatcher]) -> EngineError | None:
    """Give the request its matcher; the error where there is none."""
    error = compiled.exception()
    if error is None:
        request.matcher = compiled.result()
        return None
    if isinstance(error, InvalidRequestError) and (asked := request.params.structured_outputs) is not None:
        return asked.renamed(error)
    assert isinstance(error, EngineError), "`compile` raises nothing else"
    return error


def warm_up(drivers: Sequence[GrammarDriver], end_token_ids: Sequence[int]) -> None:
    """See `Constraints.warm_up`. Nothing comes of a failure: the first request will hear of it."""
    for driver in drivers:
        trial = next((trial for trial in TRIALS if trial.kinds[0] in driver.card.constraints), None)
        try:
            if trial is not None:
                driver.grammar.compile(trial, end_token_ids)
        except EngineError as error:
            logger.info("grammar '%s' does not warm up: %s", driver.candidate.name, error)
        except Exception:
            logger.warning("grammar '%s' does not warm up", driver.candidate.name, exc_info=True)


def close(drivers: Iterable[GrammarDriver]) -> None:
    """End what the drivers have started; one that cannot be ended is logged."""
    for driver in drivers:
        try:
            driver.grammar.close()
        except Exception:
            logger.warning("grammar '%s' cannot be closed", driver.candidate.name, exc_info=True)


def _forced(plan: StepPlan) -> list[list[int]]:
    """The drafts of each row that come with the plan."""
    tokens: list[list[int]] = [[] for _ in range(plan.num_rows)]
    if plan.given_drafts is not None and plan.num_drafts is not None:
        for row, forced in zip(plan.given_drafts.row.tolist(), plan.given_drafts.tokens.tolist(), strict=True):
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
            output.completed = True
            output.finish_reason = FinishReason.STOP
        else:
            output.error = self.error.parts
            output.finish_reason = FinishReason.ERROR


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


def _matcher(request: Request) -> RequestMatcher:
    assert request.matcher is not None
    return request.matcher


def check_drafts(plan: StepPlan, drafts: object, vocab_size: int) -> list[list[int]]:
    """Refuse drafts that do not fit the plan: another number of rows, more than were wanted, no ids.

    Raises ContractError: what is wrong with them.
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
