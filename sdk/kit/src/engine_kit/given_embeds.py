"""Embeddings that prompts bring in place of tokens, in the worker (entry-point group `engine_parts`): before the first
layer they are put in the place of those of the placeholders. A step that computes some of them is not captured."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from engine.interfaces.model import Model
from engine.interfaces.platform import Platform
from engine.interfaces.step import LayerListener, StepPart, StepView
from engine.types.embeds import BFLOAT16
from engine.types.plan import LeftSlots, NewSlot, StepPlan


class GivenEmbeds(StepPart, LayerListener):
    """Those of every slot, on the host until a step computes their tokens.

    Args:
        platform, model: the worker's, of the first stage.
    """

    layers = frozenset({0})

    def __init__(self, platform: Platform, model: Model) -> None:
        self._platform = platform
        self._model = model
        self._vectors: dict[int, torch.Tensor] = {}

    def enter(self, new: NewSlot) -> None:
        self._vectors.pop(new.slot, None)
        if new.embeds is not None:
            self._vectors[new.slot] = _tensor(new.embeds.data)

    def leave(self, left: LeftSlots) -> None:
        for slot in left.slot.tolist():
            self._vectors.pop(slot, None)

    def listeners(self) -> tuple[LayerListener, ...]:
        return (self,)

    def hears(self, plan: StepPlan) -> bool:
        """Whether the step computes tokens that are given."""
        return bool(self._vectors) and next(self._given(plan), None) is not None

    def before(self, layer: int, view: StepView) -> None:
        """Put them into `hidden` [T, hidden_size]."""
        hidden, positions = view.state["hidden"], view.state["positions"]
        places, vectors = zip(*self._given(view.plan), strict=True)
        at = self._there(torch.from_numpy(np.concatenate(places)))
        given = self._there(torch.cat(vectors).to(hidden.dtype))
        hidden.index_copy_(0, at, self._model.embed_vectors(given, positions.index_select(0, at)))

    def _given(self, plan: StepPlan) -> Iterator[tuple[np.ndarray, torch.Tensor]]:
        """Of each row that has some: int64 places among the step's tokens, and their vectors."""
        starts = np.cumsum(plan.num_tokens) - plan.num_tokens
        for row, slot in enumerate(plan.slot_of_row.tolist()):
            if (vectors := self._vectors.get(slot)) is None:
                continue
            first = int(plan.num_computed[row])
            vectors = vectors[first : first + int(plan.num_tokens[row])]
            if len(vectors):
                yield np.arange(starts[row], starts[row] + len(vectors)), vectors

    def _there(self, host: torch.Tensor) -> torch.Tensor:
        """On the device."""
        out = torch.empty(host.shape, dtype=host.dtype, device=self._platform.device)
        self._platform.to_device(host, out)
        return out


def _tensor(data: np.ndarray) -> torch.Tensor:
    """Of what has come off the wire, which is read-only."""
    if data.dtype.metadata == BFLOAT16.metadata:
        return torch.from_numpy(data.view(np.uint16).copy()).view(torch.bfloat16)
    return torch.from_numpy(data.copy())
