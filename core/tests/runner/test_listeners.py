"""Listeners between layers: what they are called with, and what they may do to keys and values."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from harness import Driver, Request, params, prompt, start_message, started, with_part

from engine.interfaces.step import LayerListener, StepPart, StepView
from engine.runner.walk import StepWalk
from engine.types.errors import EngineError
from engine.types.model import ModelDescription
from engine.types.plan import StepPlan


class Part(StepPart):
    """Has one listener."""

    def __init__(self, listener: LayerListener) -> None:
        self.listener = listener

    def listeners(self) -> tuple[LayerListener, ...]:
        return (self.listener,)


class Watching(LayerListener):
    """Notes where it is called; hears steps of prompts alone."""

    layers = frozenset({0, 2})

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def hears(self, plan: StepPlan) -> bool:
        return plan.num_decodes < plan.num_rows

    def before(self, layer: int, view: StepView) -> None:
        self.calls.append(("before", layer))

    def after(self, layer: int, view: StepView) -> None:
        self.calls.append(("after", layer))


def test_who_is_called_when(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that nobody hears is captured as ever; a walk without listeners hands the layers on as they are."""
    listener, expected = Watching(), Driver(started()).alone(Request(prompt(6), params(), slot=0), 5)
    with_part(Part(listener), monkeypatch)
    worker = started(platform="buckets", attention="capturable")
    assert Driver(worker).alone(Request(prompt(6), params(), slot=0), 5) == expected
    assert listener.calls == [("before", 0), ("after", 0), ("before", 2), ("after", 2)]
    runner = worker._runner
    assert runner is not None and sum(runner._platform.captures.values()) == 5  # type: ignore[attr-defined]
    layers = [object()]
    assert list(StepWalk()(layers, None)) == layers  # type: ignore[arg-type]


class Meddling(LayerListener):
    """Reads what a layer has stored, writes nothing in its place, and puts it back."""

    layers = frozenset({1})

    def __init__(self) -> None:
        self.sizes: list[tuple[int, ...]] = []

    def after(self, layer: int, view: StepView) -> None:
        slots = self.slots(view.plan)
        k, v = view.read(1, slots)
        view.write(1, slots, torch.zeros_like(k), torch.zeros_like(v))
        again = view.read(1, slots)
        assert k.abs().sum() > 0 and not again[0].any() and not again[1].any()
        order = torch.arange(len(slots) - 1, -1, -1)
        view.write(1, slots[order], k[order], v[order])
        assert torch.equal(view.read(1, slots)[0], k)
        self.sizes.append(tuple(k.shape))

    def slots(self, plan: StepPlan) -> torch.Tensor:
        """Of the step's new pages of table 1, all places."""
        pages = plan.new_blocks[1].page.astype(np.int64)
        return torch.from_numpy((pages[:, None] * 8 + np.arange(8)).reshape(-1)[: int(plan.num_tokens[0])])

    def hears(self, plan: StepPlan) -> bool:
        return plan.num_computed[0] == 0


def test_keys_and_values_are_read_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    listener, expected = Meddling(), Driver(started()).alone(Request(prompt(13), params(), slot=0), 5)
    with_part(Part(listener), monkeypatch)
    driver = Driver(started())
    assert driver.alone(Request(prompt(13), params(), slot=0), 5) == expected
    assert listener.sizes == [(13, 2, 6)]


class Wrong(LayerListener):
    """Asks for what is not there."""

    def __init__(self, captured: bool, places: list[int]) -> None:
        self.captured = captured  # type: ignore[misc]
        self.places = places

    def before(self, layer: int, view: StepView) -> None:
        if self.places:
            view.select(torch.tensor(self.places))
        else:
            view.read(7, torch.tensor([8]))


@pytest.mark.parametrize(
    ("places", "kv_index", "found"),
    [
        ([0, 2], False, "'kv_index'"),
        ([2, 1], True, "ascending"),
        ([0, 6], True, "of 6 tokens"),
        ([], True, "no such layer"),
    ],
)
def test_what_cannot_be_done_is_refused(
    places: list[int], kv_index: bool, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_part(Part(Wrong(False, places)), monkeypatch)
    driver = Driver(started(model=seeing_places() if kv_index else start_message().model))
    with pytest.raises(EngineError, match=found):
        driver.step((Request(prompt(6), params(), slot=0), 6))


def test_captured_listeners_see_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    with_part(Part(Wrong(True, [0])), monkeypatch)
    worker = started(platform="buckets", attention="capturable", model=seeing_places())
    with pytest.raises(EngineError, match="the listener is captured"):
        Driver(worker).alone(Request(prompt(6), params(), slot=0), 2)


def seeing_places() -> ModelDescription:
    """The model, whose attention is asked for queries at any places."""
    return msgspec.structs.replace(start_message().model, attention_features=("kv_index",))
