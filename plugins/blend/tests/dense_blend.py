"""CacheBlend without pages, plans, views or rotation by a difference: the oracle, in plain torch.

It drives a loaded model's layers with an attention of its own, which sees whole arrays and an exact mask. Keys are kept
as they were before rotation, and rotated afresh wherever they stand.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from engine.interfaces.model import State
from engine.interfaces.step import StepPart, TargetStep
from engine.runner import model_runner
from engine.types.plan import NewSlot, StepPlan


class Span(NamedTuple):
    """Tokens start .. end - 1 are those from `position` on of a sequence."""

    start: int
    end: int
    sequence: list[int]
    position: int


class Kept(NamedTuple):
    """Of one layer: keys before their rotation, and values."""

    keys: torch.Tensor
    values: torch.Tensor


class Dense:
    """A model without an engine. Args: model: a loaded body of the Llama family; it is used as it is."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def full(self, tokens: list[int]) -> tuple[torch.Tensor, list[Kept]]:
        """Final hidden states [n, H], and what each layer keeps."""
        kept: list[Kept] = []
        return self._forward(tokens, kept, None), kept

    def blend(self, tokens: list[int], spans: list[Span], ratio: float, check: int = 1) -> torch.Tensor:
        """[H], of the last token."""
        old: list[Kept] = []
        cached = torch.zeros(len(tokens), dtype=torch.bool)
        for span in spans:
            _, of_span = self.full(span.sequence)
            place = slice(span.position, span.position + span.end - span.start)
            cached[span.start : span.end] = True
            for layer, (keys, values) in enumerate(of_span):
                if layer == len(old):
                    shape = (len(tokens), *keys.shape[1:])
                    old.append(Kept(keys.new_zeros(shape), values.new_zeros(shape)))
                old[layer].keys[span.start : span.end] = keys[place]
                old[layer].values[span.start : span.end] = values[place]
        return self._forward(tokens, [], (old, cached, ratio, check))[-1]

    @torch.inference_mode()
    def _forward(self, tokens: list[int], kept: list[Kept], blend: Any) -> torch.Tensor:
        chosen = [torch.arange(len(tokens))]  # where those stand that are computed; the last counts
        state = State(token_ids=torch.tensor(tokens, dtype=torch.int32), positions=torch.arange(len(tokens)))
        rotary = self.model.layers.layers[0].attention.rotary

        def rotate(keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return rotary(keys.clone(), keys.clone(), positions)[1]  # type: ignore[no-any-return]

        def walk(layers: Any, state: State) -> Iterator[Any]:
            for index, layer in enumerate(layers):
                attention = layer.attention
                before: list[torch.Tensor] = []

                def rotated(q: Any, k: Any, positions: Any, before: list[torch.Tensor] = before) -> Any:
                    before.append(k.clone())
                    return rotary(q, k, positions)

                def attend(q: Any, k: Any, v: Any, index: int = index, before: list[torch.Tensor] = before) -> Any:
                    kept.append(Kept(before[0], v.clone()))
                    if blend is not None and index > blend[3]:
                        keys = rotate(blend[0][index].keys, torch.arange(len(tokens)))
                        values = blend[0][index].values.clone()
                        keys[chosen[-1]], values[chosen[-1]] = k, v
                        k, v = keys, values
                    return dense(q, k, v, chosen[-1])

                there = attention.rotary, attention.attend
                attention.rotary = rotated
                attention.attend = attend
                try:
                    yield layer
                finally:
                    attention.rotary, attention.attend = there
                if blend is not None and index == blend[3]:
                    old, cached, ratio, _ = blend
                    everywhere = torch.arange(len(tokens))
                    new = rotate(kept[index].keys, everywhere)
                    deviation = (new - rotate(old[index].keys, everywhere)).square().sum((1, 2))
                    order = deviation.where(cached, -torch.inf).argsort(descending=True, stable=True)
                    go_on = ~cached
                    go_on[order[: round(ratio * int(cached.sum()))]] = True
                    chosen.append(go_on.nonzero()[:, 0])
                    for name, tensor in state.items():
                        state[name] = tensor[chosen[-1]]

        hidden = self.model.forward(state, walk)
        assert isinstance(hidden, torch.Tensor)
        return hidden


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Each query, [m, Hq, D], at its place among the n keys sees those up to it: [m, Hq * D]."""
    each = q.shape[1] // k.shape[1]
    scores = torch.einsum("mhd,nhd->hmn", q, k.repeat_interleave(each, 1)) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(torch.arange(len(k)) > places[:, None], -torch.inf)
    return torch.einsum("hmn,nhd->mhd", scores.softmax(-1), v.repeat_interleave(each, 1)).flatten(1)


class Probe(StepPart):
    """Keeps the final hidden state of each prompt's last token, by request, and the plans that reused something."""

    def __init__(self) -> None:
        self.model: Any = None
        self.hidden: dict[str, torch.Tensor] = {}
        self.plans: list[StepPlan] = []
        self._requests: dict[int, NewSlot] = {}

    def enter(self, new: NewSlot) -> None:
        self._requests[new.slot] = new

    def launched(self, step: TargetStep) -> None:
        plan = step.plan
        if plan.reuse is not None:
            self.plans.append(plan)
        ends = plan.num_tokens.cumsum()
        for row, slot in enumerate(plan.slot_of_row.tolist()):
            new = self._requests[slot]
            if plan.num_computed[row] + plan.num_tokens[row] == len(new.token_ids):
                assert step.hidden is not None
                self.hidden.setdefault(new.request_id, step.hidden[int(ends[row]) - 1].clone())

    def add(self, patch: pytest.MonkeyPatch) -> None:
        """Workers that are made from now on have this part."""
        made = model_runner.step_parts

        def more(start: Any, built: Any, *args: Any) -> Any:
            draws, parts = made(start, built, *args)
            self.model = built.model
            return draws, [*parts, self]

        patch.setattr(model_runner, "step_parts", more)
