"""Executors with one planted fault each, in the places of the reference drivers' bodies."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import numpy as np
from mutant_suites import suites_of
from plain_executor import Plain
from plain_executor_card import PlainExecutor

from engine.types.errors import EngineDeadError, EngineError
from engine.types.plan import StepResult
from engine_reference.executor_inline import Inline
from engine_reference.executor_process.body import Process
from engine_sdk.conformance import ExecutorConformance


class Wrapped:
    """A future around another one."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def done(self) -> bool:
        return self.inner.done()

    def result(self, timeout: float | None = None) -> Any:
        return self.inner.result(timeout)


class ResultOfTheLast(Inline):
    """a future answers with the last step's result"""

    def execute(self, plan: Any) -> Any:
        executor, future = self, super().execute(plan)
        self._last = future

        class Last(Wrapped):
            def result(self, timeout: float | None = None) -> Any:
                return executor._last.result(timeout)

        return Last(future)


class DoneAtOnce(Inline):
    """a future says that it is done, and its result blocks"""

    def execute(self, plan: Any) -> Any:
        class Hasty(Wrapped):
            def done(self) -> bool:
                return True

        return Hasty(super().execute(plan))


class WideTokens(Inline):
    """tokens come back as int64"""

    def execute(self, plan: Any) -> Any:
        class Wide(Wrapped):
            def result(self, timeout: float | None = None) -> Any:
                result = super().result(timeout)
                return msgspec.structs.replace(result, tokens=result.tokens.astype(np.int64))

        return Wide(super().execute(plan))


class LosesLogprobs(Inline):
    """log probabilities get lost on the way back"""

    def execute(self, plan: Any) -> Any:
        class Lossy(Wrapped):
            def result(self, timeout: float | None = None) -> Any:
                return msgspec.structs.replace(super().result(timeout), logprobs=None)

        return Lossy(super().execute(plan))


class ChangesPlans(Inline):
    """the plan's arrays are changed after the step"""

    def execute(self, plan: Any) -> Any:
        future = super().execute(plan)
        plan.num_computed += plan.num_tokens
        return future


class SignedSeeds(Inline):
    """seeds lose their upper bits"""

    def execute(self, plan: Any) -> Any:
        for new in plan.new_slots:
            new.params.seed &= 2**63 - 1
        return super().execute(plan)


class IgnoresMasks(Inline):
    """a step does not wait for its masks"""

    def execute(self, plan: Any) -> Any:
        return super().execute(msgspec.structs.replace(plan, masks_follow=False))

    def sample(self, step_id: int, masks: Any) -> None:
        pass


class UnsignedMasks(Inline):
    """masks lose their sign"""

    def sample(self, step_id: int, masks: Any) -> None:
        super().sample(step_id, msgspec.structs.replace(masks, bits=masks.bits & 0x7FFFFFFF))


class CallsAfterMasks(Inline):
    """nothing can be called while a step waits for its masks"""

    waits = False

    def execute(self, plan: Any) -> Any:
        self.waits = plan.masks_follow
        return super().execute(plan)

    def sample(self, step_id: int, masks: Any) -> None:
        self.waits = False
        super().sample(step_id, masks)

    def call(self, method: str, *args: Any, rank: int | None = None) -> list[Any]:
        if self.waits:
            raise RuntimeError("a step is open")
        return super().call(method, *args, rank=rank)


class SwallowsStart(Inline):
    """what a worker's start raises becomes another error"""

    def start(self, message: Any) -> Any:
        try:
            return super().start(message)
        except EngineError as error:
            raise EngineDeadError("start", "it did not work") from error


class HealthyForEver(Inline):
    """a health check after the end finds nothing wrong"""

    def check_health(self) -> None:
        pass


class OneShutdown(Inline):
    """a second shutdown raises"""

    def shutdown(self) -> None:
        if self._worker is None:
            raise EngineDeadError("shut down", "it was shut down")
        super().shutdown()


class DropsArguments(Inline):
    """calls lose their arguments"""

    def call(self, method: str, *args: Any, rank: int | None = None) -> list[Any]:
        return super().call(method, rank=rank)


class LeaksProcesses(Process):
    """leaked process: shutdown lets the workers live on"""

    kept: list[Any] = []  # noqa: RUF012  nobody may collect them: that would end the processes

    def shutdown(self) -> None:
        self.kept.append(self._ranks)
        self._ranks = None


class AsksAll(Process):
    """a call of one rank is answered by all"""

    def call(self, method: str, *args: Any, rank: int | None = None) -> list[Any]:
        return super().call(method, *args)


class FirstAnswer(Process):
    """a call is answered by the first worker alone"""

    def call(self, method: str, *args: Any, rank: int | None = None) -> list[Any]:
        return super().call(method, *args, rank=rank)[:1]


class WaitsForAnswers(Process):
    """whoever asks waits for the step under way"""

    def ask(self, method: str, *args: Any) -> Any:
        answers = self.call(method, *args)
        return lambda: answers


class AsksForEver(Process):
    """whoever looks for answers does not find out that a worker is stopped"""

    def _count_silence(self, call: Any) -> None:
        pass


class WaitsForEver(Process):
    """whoever waits for a step does not find out that a worker is stopped"""

    def wait(self, what: Any, timeout: float | None) -> None:
        deadline = time.monotonic() + (timeout or 30.0)
        while not self.pump(what):
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(0.001)
        super().wait(what, timeout)


class MostPages(Process):
    """the start answers with the first worker's pages"""

    def start(self, message: Any) -> Any:
        return msgspec.structs.replace(super().start(message), num_pages=100)


class AveragesMemory(Process):
    """memory is divided by the workers, not summed up"""

    def start(self, message: Any) -> Any:
        ready = super().start(message)
        return msgspec.structs.replace(ready, weight_bytes=ready.weight_bytes // message.parallel.world)


class IgnoresDeath(Process):
    """the death of an idle worker is not looked for"""

    def check_health(self) -> None:
        if self._ranks is None:
            super().check_health()


class UntypedDeath(Process):
    """a death is another error than the one that was promised"""

    def execute(self, plan: Any) -> Any:
        class Untyped(Wrapped):
            def result(self, timeout: float | None = None) -> Any:
                try:
                    return super().result(timeout)
                except EngineDeadError as error:
                    raise OSError(str(error)) from None

        return Untyped(super().execute(plan))


class CallErrorsKill(Process):
    """a user's error of a call ends the engine"""

    def call(self, method: str, *args: Any, rank: int | None = None) -> list[Any]:
        try:
            return super().call(method, *args, rank=rank)
        except EngineError:
            self.shutdown()
            raise


class RankZeroAlone(Plain):
    """a step is rank 0's: the error of a rank above it is dropped"""

    def execute(self, plan: Any) -> Any:
        return super().execute(plan).futures[0]


class SwallowsSampling(Plain):
    """an error of `sample` is swallowed: the step goes on as if no masks had come"""

    def execute(self, plan: Any) -> Any:
        class Unmasked(Wrapped):
            def result(self, timeout: float | None = None) -> Any:
                try:
                    return self.inner.result(timeout)
                except TimeoutError:
                    raise
                except Exception:
                    return StepResult(step_id=plan.step_id, tokens=np.zeros(plan.num_rows, np.int32))

        future = super().execute(plan)
        return Unmasked(future) if plan.masks_follow else future


class RaisesFromSample(Plain):
    """`sample` waits for the step, and raises its error"""

    def execute(self, plan: Any) -> Any:
        self._open = super().execute(plan)
        return self._open

    def sample(self, step_id: int, masks: Any) -> None:
        super().sample(step_id, masks)
        self._open.result()


INLINE = [
    ResultOfTheLast, DoneAtOnce, WideTokens, LosesLogprobs, ChangesPlans, SignedSeeds, IgnoresMasks, UnsignedMasks,
    CallsAfterMasks, SwallowsStart, HealthyForEver, OneShutdown, DropsArguments,
]  # fmt: skip
PROCESS = [
    *(LeaksProcesses, AsksAll, FirstAnswer, WaitsForAnswers, AsksForEver, WaitsForEver, MostPages, AveragesMemory),
    *(IgnoresDeath, UntypedDeath, CallErrorsKill),
]
PLAIN = [RankZeroAlone, SwallowsSampling, RaisesFromSample]
MUTANTS = [*INLINE, *PROCESS, *PLAIN]

globals().update(suites_of(ExecutorConformance, "inline", INLINE))
globals().update(suites_of(ExecutorConformance, "process", PROCESS))
globals().update(suites_of(ExecutorConformance, PlainExecutor, PLAIN))


class TestUnbroken(ExecutorConformance):
    """What the last mutants are made of passes."""

    card = PlainExecutor
