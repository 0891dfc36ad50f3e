"""The simulated device, and the measurement over it; no figure is asserted."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from engine.config.settings import EngineConfig
from engine.types.plan import Masks, StepPlan
from tests.benchmarks.device_executor import DeviceExecutor
from tests.benchmarks.overlap import OverlapOptions, measure_overlap


def plan(step_id: int, **fields: Any) -> StepPlan:
    row = np.arange(2, dtype=np.int32)
    return StepPlan(
        step_id=step_id, slot_of_row=row, num_computed=row, num_tokens=row + 1, samples=np.array([True, True]),
        num_decodes=2, new_slots=[], new_blocks=[], **fields,
    )  # fmt: skip


def test_steps_run_one_after_the_other() -> None:
    device = DeviceExecutor(0.05, 9)
    began = time.monotonic()
    first, second = device.execute(plan(1)), device.execute(plan(2))
    assert not first.done()
    assert first.result(30).tokens.tolist() == [7, 7] and time.monotonic() - began >= 0.05
    assert second.result(30).step_id == 2 and time.monotonic() - began >= 0.1
    device.shutdown()


def test_a_step_waits_for_its_masks() -> None:
    device = DeviceExecutor(0.001, 9)
    future = device.execute(plan(1, masks_follow=True))
    time.sleep(0.05)
    assert not future.done()
    device.sample(1, Masks(row=np.array([1], np.int32), bits=np.array([[0, 1 << 3]], np.int32)))
    assert future.result(30).tokens.tolist() == [7, 35]
    device.shutdown()


@pytest.mark.parametrize(("constrained", "grammar"), [(0, ""), (3, "choice")])
def test_measurement(constrained: int, grammar: str) -> None:
    options = OverlapOptions(running=5, constrained=constrained, step_ms=0.5, steps=20, rounds=3, input_len=4)
    report = measure_overlap(EngineConfig(grammar="choice"), options)
    figures = report.figures
    assert figures["grammar"] == grammar and ("constrained by choice" in report.title) == bool(constrained)
    assert 0 < figures["share_median"] <= figures["share"] < 1.6  # type: ignore[operator]
    assert figures["constrained"] == constrained
