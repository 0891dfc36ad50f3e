"""The executor: plans out to every rank, answers back, and the end of all where one fails.

Everything happens on the caller's thread: a future that is asked takes in what has come. A step is done when every
rank has answered it, see `engine_kit.ranks.StepMerge`.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec

from engine.interfaces.executor import rank_starts
from engine.types.errors import ContractError, EngineDeadError, EngineError, rebuild_error
from engine.types.start import WorkerReady, WorkerStart
from engine_kit.ranks import StepMerge, merge_ready
from engine_reference.executor_process.messages import (
    Answer,
    Done,
    Meet,
    RankCall,
    RankFailed,
    RankMeets,
    RankReady,
    Sample,
    Step,
)
from engine_reference.executor_process.processes import Ranks

if TYPE_CHECKING:
    from engine.interfaces.context import Answers, CoreContext
    from engine.types.plan import Masks, StepPlan, StepResult
    from engine_reference.executor_process.card import ProcessOptions

WAIT_SECONDS = 0.05
"""How long one wait lasts before it is looked who lives."""
BLAME_SECONDS = 1.0
"""How long is looked for the rank that began, when one only says that another has left it."""


class StepUnderWay:
    """A step that was sent. Implements `engine.interfaces.executor.StepFuture`."""

    def __init__(self, executor: Process, step_id: int, size: int) -> None:
        self._executor = executor
        self._merge = StepMerge(step_id, range(size))
        self._result: StepResult | None = None

    @property
    def complete(self) -> bool:
        """Every rank has answered."""
        return self._merge.complete

    @property
    def waiting(self) -> list[int]:
        """The ranks that have not answered."""
        return self._merge.waiting

    def take(self, done: Done) -> None:
        """A rank's answer. Raises ContractError, see `StepMerge`."""
        self._merge.take(done.rank, done.answer)

    def done(self) -> bool:
        """True once `result` would not block: the result is there, or the engine is dead."""
        return self.complete or self._executor.pump(self)

    def result(self, timeout: float | None = None) -> StepResult:
        """Wait for every rank. Raises EngineDeadError, and TimeoutError after `timeout` seconds."""
        if self._result is None:
            self._executor.wait(self, timeout)
            self._result = self._merge.result()
        return self._result


class CallUnderWay:
    """A call that was sent.

    Attributes:
        silent: seconds in which nothing came while somebody asked again and again for the answers.
        looked: when that was last. heard: how many messages had come then.
    """

    def __init__(self, call_id: int, ranks: Sequence[int]) -> None:
        self.call_id = call_id
        self.answers: dict[int, Answer | None] = dict.fromkeys(ranks)
        self.silent = 0.0
        self.looked = time.monotonic()
        self.heard = 0

    @property
    def complete(self) -> bool:
        """All that were asked have answered."""
        return None not in self.answers.values()

    @property
    def waiting(self) -> list[int]:
        """The ranks that have not answered."""
        return [rank for rank, answer in self.answers.items() if answer is None]

    def values(self) -> list[Any]:
        """The answers of all. Raises the first error."""
        answers = [answer for answer in self.answers.values() if answer is not None]
        for answer in answers:
            if answer.error is not None:
                raise rebuild_error(answer.error)
        return [answer.value for answer in answers]


class Process:
    """See `engine.interfaces.executor.Executor`."""

    def __init__(self, context: CoreContext) -> None:
        self._worker = context.worker
        self._nodes = context.nodes
        self._options = cast("ProcessOptions", context.options)
        self._step_timeout = self._options.step_timeout or context.step_timeout / 2
        self._ranks: Ranks | None = None
        self._steps: dict[int, StepUnderWay] = {}
        self._calls: dict[int, CallUnderWay] = {}
        self._num_calls = 0
        self._dead: EngineDeadError | None = None
        self._looked = 0.0
        self._heard = 0  # messages

    def start(self, message: WorkerStart) -> WorkerReady:
        threads = self._options.threads or max(1, (message.num_threads or _cores()) // message.parallel.world)
        starts = rank_starts(msgspec.structs.replace(message, num_threads=threads))
        ranks = self._ranks = Ranks(self._worker, starts, self._nodes)
        weakref.finalize(self, ranks.close)  # also at the interpreter's exit
        try:
            ready = self._wait_ready(ranks)
        except BaseException:
            ranks.close(0)
            raise
        return merge_ready(ready)

    def execute(self, plan: StepPlan) -> StepUnderWay:
        ranks = self._living()
        step = self._steps[plan.step_id] = StepUnderWay(self, plan.step_id, ranks.size)
        ranks.send(Step(plan))
        return step

    def sample(self, step_id: int, masks: Masks) -> None:
        self._living().send(Sample(step_id, masks))

    def call(self, method: str, *args: Any, rank: int | None = None) -> list[Any]:
        """Answers are plain data. Raises the first rank's error, after which the ranks go on."""
        call = self._send_call(method, args, range(self._living().size) if rank is None else [rank])
        try:
            self.wait(call, None)
        finally:
            self._calls.pop(call.call_id, None)
        return call.values()

    def ask(self, method: str, *args: Any) -> Answers:
        """As `call` of all ranks, and waits for nothing. Whoever asks for the answers takes in what has come, and finds
        out who is hung, as `wait` does."""
        call = self._send_call(method, args, range(self._living().size))

        def answers() -> list[Any] | None:
            if not call.complete:
                if not self.pump(call):
                    self._count_silence(call)
                    return None
                self.wait(call, None)  # raises, where they will never come
            return call.values()

        return answers

    def _send_call(self, method: str, args: tuple[Any, ...], ranks: Sequence[int]) -> CallUnderWay:
        self._num_calls += 1
        call = self._calls[self._num_calls] = CallUnderWay(self._num_calls, ranks)
        self._living().send(RankCall(call.call_id, method, list(args)), ranks)
        return call

    def check_health(self) -> None:
        self._look_for_the_dead(self._living())

    def shutdown(self) -> None:
        ranks = self._ranks
        self._ranks = None
        if ranks is not None:
            ranks.close()

    # -- what futures ask for -----------------------------------------------------------------------------------------
    def pump(self, what: StepUnderWay | CallUnderWay) -> bool:
        """Take in what has come; True where the step or call is complete or never will be."""
        if self._dead is None and self._ranks is not None:
            try:
                while not what.complete and self._receive(self._ranks, 0):
                    pass
                if not what.complete and time.monotonic() - self._looked > WAIT_SECONDS:
                    self._look_for_the_dead(self._ranks)
            except EngineError:
                return True  # `result` raises it
        return what.complete or self._dead is not None or self._ranks is None

    def wait(self, what: StepUnderWay | CallUnderWay, timeout: float | None) -> None:
        """Wait until every rank has answered.

        Time is counted in which nothing came while somebody waited here, so a process that was stopped for a while
        does not take its ranks for hung.

        Raises:
            EngineDeadError: a rank has died, failed, or gave no answer for `step_timeout` seconds.
            TimeoutError: after `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        waited = 0.0
        while not what.complete:
            ranks = self._living()
            if self._receive(ranks, WAIT_SECONDS):
                waited = 0.0
                continue
            self._look_for_the_dead(ranks)
            waited += WAIT_SECONDS
            if waited >= self._step_timeout:
                raise self._hung(ranks, what)
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"no answer of ranks {what.waiting} after {timeout} s")

    def _count_silence(self, call: CallUnderWay) -> None:
        """A look at a call for which nobody waits. Between two looks counts no more time than `wait` would wait."""
        now = time.monotonic()
        silent = 0.0 if self._heard != call.heard else call.silent + min(now - call.looked, WAIT_SECONDS)
        call.silent = silent
        call.looked = now
        call.heard = self._heard
        if silent >= self._step_timeout:
            raise self._hung(self._living(), call)

    # -- news ---------------------------------------------------------------------------------------------------------
    def _receive(self, ranks: Ranks, seconds: float) -> bool:
        """Take one message in; False where none comes."""
        match news := ranks.receive(seconds):
            case None:
                return False
            case RankReady() | RankMeets() | Done() | Answer() | RankFailed() if not 0 <= news.rank < ranks.size:
                raise self._die("read what a rank sent", f"a message of rank {news.rank}, where {ranks.size} are")
            case Done():
                self._step_done(ranks, news)
            case Answer():
                if (call := self._calls.get(news.call_id)) is not None:
                    call.answers[news.rank] = news
                    if call.complete:
                        del self._calls[news.call_id]
            case RankFailed():
                raise self._blame(ranks, [news])
            case RankReady() | RankMeets():
                raise self._die("run the ranks", f"{ranks.describe(news.rank)} started twice")
        self._heard += 1
        return True

    def _step_done(self, ranks: Ranks, done: Done) -> None:
        step_id = done.answer.step_id
        step = self._steps.get(step_id)
        if step is None:
            who = ranks.describe(done.rank)
            raise self._die("run the ranks", f"{who} answered step {step_id}, which nobody waits for")
        try:
            step.take(done)
        except ContractError as error:
            found = error.found.replace(f"rank {done.rank}", ranks.describe(done.rank))
            raise self._die(error.asked, found, error.remedy) from error
        if step.complete:
            del self._steps[step_id]

    def _wait_ready(self, ranks: Ranks) -> list[WorkerReady]:
        ready: dict[int, WorkerReady] = {}
        waited, stood = 0.0, 0.0
        while len(ready) < ranks.size:
            news = ranks.receive(WAIT_SECONDS)
            if isinstance(news, RankMeets):
                ranks.send(Meet(news.store))
            elif isinstance(news, RankReady):
                ready[news.rank] = news.worker
            elif isinstance(news, RankFailed):
                raise self._blame(ranks, [news])
            elif news is None:
                self._look_for_the_dead(ranks)
                waited += WAIT_SECONDS
                stood = stood + WAIT_SECONDS if (stopped := ranks.stopped()) else 0.0
                if stood >= self._step_timeout:
                    who = ", ".join(map(ranks.describe, stopped))
                    raise self._die(f"start {ranks.size} ranks", f"no answer for {stood:g} s from {who}")
                if waited >= self._options.start_timeout:
                    late = ", ".join(ranks.describe(rank) for rank in range(ranks.size) if rank not in ready)
                    raise self._die(
                        f"start {ranks.size} ranks",
                        f"not ready after {self._options.start_timeout:g} s: {late}",
                        "look at their log, or give them longer: --executor.start_timeout",
                    )
        return [ready[rank] for rank in range(ranks.size)]

    # -- the end ------------------------------------------------------------------------------------------------------
    def _living(self) -> Ranks:
        if self._dead is not None:
            raise self._dead
        if self._ranks is None:
            raise EngineDeadError("reach the workers", "they were not started, or were shut down", "start a new engine")
        return self._ranks

    def _look_for_the_dead(self, ranks: Ranks) -> None:
        self._looked = time.monotonic()
        if ranks.dead():
            raise self._blame(ranks, [])

    def _blame(self, ranks: Ranks, failures: list[RankFailed]) -> EngineError:
        """The error to raise once a rank has failed or died: that of the rank that began.

        A rank that says a typed error is believed. One that ended without a word comes next, since those that it left
        fail too, in the middle of a collective. Where there is neither, the first to fail is named.
        """
        deadline = time.monotonic() + BLAME_SECONDS
        while True:
            news = ranks.receive(WAIT_SECONDS)
            if news is not None:
                failures += [news] if isinstance(news, RankFailed) else []
                continue
            typed = [failed for failed in failures if failed.typed]
            if typed:
                return self._die_of(rebuild_error(typed[0].error))
            silent = sorted({*ranks.dead()} - {failed.rank for failed in failures})
            if silent:
                who = ", ".join(ranks.describe(rank) for rank in silent)
                return self._die("reach the workers", who, "the log may say why")
            if time.monotonic() >= deadline:
                return self._die_of(rebuild_error(failures[0].error))

    def _hung(self, ranks: Ranks, what: StepUnderWay | CallUnderWay) -> EngineDeadError:
        silent = ", ".join(ranks.describe(rank) for rank in what.waiting)
        return self._die(
            "wait for the workers",
            f"no answer for {self._step_timeout:g} s from {silent}",
            "if steps do take that long: --executor.step_timeout",
        )

    def _die(self, asked: str, found: str, remedy: str = "") -> EngineDeadError:
        self._dead = EngineDeadError(asked, found, remedy)
        self._end()
        return self._dead

    def _die_of(self, error: EngineError) -> EngineError:
        """A worker's own error, which is raised as it is; later calls are told that the engine has died."""
        self._dead = error if isinstance(error, EngineDeadError) else EngineDeadError("reach the workers", str(error))
        self._end()
        return error

    def _end(self) -> None:
        """Nothing of a dead engine stays: no process, no socket, no directory."""
        if self._ranks is not None:
            self._ranks.close(0)
        self._steps.clear()
        self._calls.clear()


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1
