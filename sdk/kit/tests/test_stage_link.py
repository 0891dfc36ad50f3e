"""What passes between pipeline stages arrives as it was sent, whatever becomes of the buffers meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.types.parallel import Stage
from engine_kit.stage_link import StageLink

SIZES = {"hidden": 3, "residual": 3}


class LateGroup:
    """Stages of which the next is late: what is sent is read when `wait` is called. Receives 1, 2, 3 and so on."""

    def __init__(self) -> None:
        self.number = 0
        self.arrived: list[torch.Tensor] = []

    def recv(self, x: torch.Tensor, source: int) -> None:
        self.number += 1
        x.fill_(self.number)

    def isend(self, x: torch.Tensor, to: int) -> Any:
        return LateSending(self, x)


class LateSending:
    def __init__(self, group: LateGroup, x: torch.Tensor) -> None:
        self._group = group
        self._x = x

    def wait(self) -> None:
        self._group.arrived.append(self._x.clone())


def link(index: int, group: LateGroup) -> StageLink:
    return StageLink(Stage(index=index, count=3), group, SIZES, 8, torch.float64, torch.device("cpu"))  # type: ignore[arg-type]


def test_layers_may_compute_in_place_on_what_a_middle_stage_received() -> None:
    """As `engine-cpu` does: the residual of the last layer lies where the first one's was received."""
    group = LateGroup()
    middle = link(1, group)
    for step in range(3):
        middle.receive(2)
        state = middle.state(2)
        state["residual"].add_(100)
        state["hidden"] = torch.full((2, 3), float(step), dtype=torch.float64)
        middle.send(middle.left(state), 2, keep=False)
    middle.flush()
    assert [x[0, 0].item() for x in group.arrived] == [0, 102, 1, 104, 2, 106]


@pytest.mark.parametrize("keep", [True, False])
def test_the_first_stage_copies_only_what_is_written_again(keep: bool) -> None:
    group = LateGroup()
    first = link(0, group)
    first.receive(2)
    assert first.state(2) == {} and not group.number
    left = torch.zeros(4, 3)
    first.send((left,), 2, keep)
    left.fill_(1)
    assert not group.arrived
    first.flush()
    assert [(tuple(x.shape), x[0, 0].item()) for x in group.arrived] == [((2, 3), 0.0 if keep else 1.0)]


def test_few_steps_are_on_their_way() -> None:
    group = LateGroup()
    first = link(0, group)
    for step in range(7):
        first.send((torch.full((1, 3), float(step)),), 1, keep=False)
    assert [x[0, 0].item() for x in group.arrived] == [0, 1, 2]
