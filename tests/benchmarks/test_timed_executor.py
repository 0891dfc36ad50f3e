"""What counts as time in the executor."""

from __future__ import annotations

import cProfile
import time
from concurrent.futures import Future

import pytest

from tests.benchmarks.timed_executor import TimedExecutor, python_share


class Slow:
    """Takes 20 ms to start a step and 30 ms to bring its result."""

    def execute(self, plan):
        time.sleep(0.02)
        future = Future()
        future.set_result(plan)
        future.result = self._result
        return future

    def _result(self, timeout=None):
        time.sleep(0.03)
        return "result"

    def call(self, method, *args, rank=None):
        raise ValueError(method)

    def check_health(self):
        pass


def test_execution_and_results_are_counted_and_nothing_else():
    executor = TimedExecutor(Slow())
    future = executor.execute("plan")
    assert executor.seconds >= 0.02
    before = executor.seconds
    time.sleep(0.05)
    assert future.done() and executor.seconds - before < 0.02
    before = executor.seconds
    assert future.result() == "result"
    assert executor.seconds - before >= 0.03
    assert executor.cpu_seconds < executor.seconds, "who sleeps takes nothing of the processor"


def test_errors_come_through_and_are_counted():
    executor = TimedExecutor(Slow())
    with pytest.raises(ValueError, match="reset"):
        executor.call("reset")
    assert executor.seconds > 0
    executor.check_health()


def test_python_share():
    profile = cProfile.Profile()
    assert python_share(profile) == 0.0
    profile.enable()
    time.sleep(0.05)  # built in
    profile.disable()
    assert python_share(profile) < 0.1
    profile = cProfile.Profile()
    profile.enable()
    _busy(0.05)
    profile.disable()
    assert python_share(profile) > 0.2


def _busy(seconds):
    end = time.perf_counter() + seconds
    total = 0
    while time.perf_counter() < end:
        for i in range(1000):
            total += i
    return total
