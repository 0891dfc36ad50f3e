"""Parts of steps: who is called, and what a launched step tells them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from harness import Driver, Request, params, prompt, started, with_part

from engine.interfaces.step import StepOutput, StepPart, TargetStep
from engine.types.plan import StepResult


class Watching(StepPart):
    """Keeps what it is told, and has something for the result."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.quiet = False

    def launched(self, step: TargetStep) -> StepOutput | None:
        assert step.hidden is not None
        told = {"next": step.next_tokens, "kept": step.kept, "starts": step.query_start_loc}
        self.steps.append({name: tensor.tolist() for name, tensor in told.items()} | {"hidden": len(step.hidden)})

        def put(result: StepResult, arrays: list[np.ndarray]) -> None:
            result.news = {"part": [arrays[0].tobytes()]}

        return StepOutput((torch.tensor([7], dtype=torch.int32),), put)

    def steady(self) -> bool:
        return self.quiet


@pytest.mark.parametrize("changes", [{}, {"platform": "buckets", "attention": "capturable"}], ids=["plain", "captured"])
def test_what_a_step_tells(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk of a prompt, its end, and decodes beside another prompt; padding of captured steps behind them."""
    part = Watching()
    with_part(part, monkeypatch)
    worker = started(**changes)
    first, second, driver = (
        Request(prompt(7), params(), slot=2),
        Request(prompt(5, 1), params(), slot=0),
        Driver(worker),
    )
    assert driver.step((first, 4)).news == {"part": [b"\x07\0\0\0"]}
    driver.step((first, 3), (second, 2))
    driver.step((first, 1))
    assert [step["kept"] for step in part.steps] == [[4], [3, 2], [1]]
    a, b = first.tokens, second.prompt
    assert part.steps[0]["next"][:4] == a[1:5] and part.steps[0]["hidden"] == (12 if changes else 4)
    assert part.steps[1]["next"][:5] == [*a[5:8], *b[1:3]] and part.steps[1]["starts"][:3] == [0, 3, 5]
    assert part.steps[2]["next"][0] == a[8] and part.steps[2]["hidden"] == (4 if changes else 1)
    worker.shutdown()


def test_a_steady_part_is_left_out_until_somebody_enters(monkeypatch: pytest.MonkeyPatch) -> None:
    part = Watching()
    with_part(part, monkeypatch)
    worker = started()
    first, second, driver = (
        Request(prompt(3), params(), slot=0),
        Request(prompt(3, 1), params(), slot=1),
        Driver(worker),
    )
    part.quiet = True
    assert driver.step((first, 3)).news is None
    part.quiet = False
    driver.step((first, 1))
    assert not part.steps
    driver.step((first, 1), (second, 3))
    driver.step((first, 1), (second, 1))
    assert len(part.steps) == 2
    worker.shutdown()
