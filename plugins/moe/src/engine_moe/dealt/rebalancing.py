"""Experts dealt anew by load, while steps go on (EPLB).

All ranks count steps alike, and each hears the others' loads, so all find the same placement before the same step: of
one layer before each step, for with hundreds of experts and ranks that takes milliseconds. Then some weights move
before each step, never more than `step_bytes` on a rank but for one expert, and with them, at once, the table by which
the next step finds experts: before, in between and after every token is computed by the experts that it chose. Weights
are overwritten where they lie, so that what is captured goes on with the new ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.interfaces.step import StepPart
from engine.types.errors import ConfigError
from engine_moe.dealt.placement import Move, aligned, balanced, heaviest, next_move

if TYPE_CHECKING:
    from engine.types.plan import StepPlan
    from engine_moe.dealt.layer import DealtLayer

WORTH = 0.95
"""Experts move where the heaviest rank of a layer would then have so much of its load, or less."""


class Counting(StepPart):
    """Forgets what was computed before the first plan."""

    def __init__(self, layers: Sequence[DealtLayer]) -> None:
        self.layers = layers

    def capture(self) -> None:
        for layer in self.layers:
            layer.forget()


class Rebalancing(Counting):
    """Deals experts anew every so many steps; 0: never.

    While it is there no rank leaves out rows that nobody reads: engine cores that share experts count on all of them.

    Attributes:
        due: layers whose experts are to be dealt, with the load of each expert.
        wanted: the placement of each layer that is on its way.
        moved: experts that came to a place, all ranks together, since start.
    """

    def __init__(self, layers: Sequence[DealtLayer], every: int, step_bytes: int) -> None:
        super().__init__(layers)
        self._every = every
        self._step_bytes = step_bytes
        self._steps = 0
        self._before = [np.zeros(layer.experts, np.int64) for layer in layers]
        self.due: dict[int, np.ndarray] = {}
        self.wanted: dict[int, np.ndarray] = {}
        self.moved = 0
        if every:
            for layer in layers:
                _tensors(layer, 0)

    def capture(self) -> None:
        super().capture()
        self._steps = 0
        self._before = [np.zeros(layer.experts, np.int64) for layer in self.layers]

    def inputs(self, plan: StepPlan, num_tokens: int, tokens_per_row: int) -> Mapping[str, torch.Tensor]:
        """Asked before each step that computes something, on all ranks: also where an engine core has nothing to do but
        padding."""
        if self._every and self._steps and self._steps % self._every == 0 and not self.due:
            self.due = dict(enumerate(self._loads()))
        self._steps += 1
        if self.due:
            self._deal()
        if self.wanted:
            self._move()
        return {}

    def _deal(self) -> None:
        """Find where the experts of the next layer are to go, by what each got since the last time."""
        index = next(iter(self.due))
        layer, load = self.layers[index], self.due.pop(index)
        wanted = balanced(load, layer.starts)
        if heaviest(load, wanted, layer.starts) <= WORTH * heaviest(load, layer.placement, layer.starts):
            self.wanted[index] = aligned(layer.placement, wanted, layer.starts)

    def _loads(self) -> list[np.ndarray]:
        """Of each layer's experts, all ranks together: the same numbers on all of them."""
        mine = [layer.count() - before for layer, before in zip(self.layers, self._before, strict=True)]
        self._before = [layer.count().copy() for layer in self.layers]
        ep = self.layers[0].ep
        assert ep is not None
        told = torch.from_numpy(np.concatenate(mine)).to(self.layers[0].loads.device)
        total = ep.all_gather(told.unsqueeze(0)).cpu().numpy().sum(0)
        return np.split(total, np.cumsum([len(one) for one in mine])[:-1])

    def _move(self) -> None:
        moves = self._chosen()
        self._transfer(
            [
                (index, source, place)
                for index, move in moves
                for source, place in ((move.source, move.place), (move.place, move.source))[: 1 + move.swap]
            ]
        )
        for index in {index for index, _ in moves}:
            self.layers[index].place()
            if (self.layers[index].placement == self.wanted[index]).all():
                del self.wanted[index]

    def _chosen(self) -> list[tuple[int, Move]]:
        """The moves before this step, of layers by number: of all that are left the first, as far as the bytes go. The
        placements are what they will be."""
        found: list[tuple[int, Move]] = []
        traffic = np.zeros(len(self.layers[0].starts) - 1, np.int64)
        for index, wanted in self.wanted.items():
            layer, touched = self.layers[index], set[int]()
            size = sum(tensor.nbytes for tensor in _tensors(layer, 0))
            counted = False
            while (move := next_move(layer.placement, wanted, layer.starts)) is not None:
                ranks = [int(np.searchsorted(layer.starts, place, "right")) - 1 for place in (move.place, move.source)]
                traffic[ranks] += (1 + move.swap) * size
                if touched & {move.place, move.source} or (found and traffic.max() > self._step_bytes):
                    break
                if not counted:
                    layer.count()
                    counted = True
                touched |= {move.place, move.source}
                found.append((index, move))
                expert = int(layer.placement[move.source])
                if move.swap:
                    layer.placement[move.source] = layer.placement[move.place]
                layer.placement[move.place] = expert
            else:
                continue
            break
        return found

    def _transfer(self, transfers: Sequence[tuple[int, int, int]]) -> None:
        """Bring the weights at one place to another: (layer, source, destination) of each. No place stands twice as a
        destination, and all are read before one is written."""
        ep = self.layers[0].ep
        assert ep is not None
        send: list[list[torch.Tensor]] = [[] for _ in range(ep.size)]
        receive: list[list[torch.Tensor]] = [[] for _ in range(ep.size)]
        for index, source, place in transfers:
            layer = self.layers[index]
            sender, receiver = (int(np.searchsorted(layer.starts, one, "right")) - 1 for one in (source, place))
            if sender == ep.rank:
                send[receiver] += _tensors(layer, source - layer.first)
            if receiver == ep.rank:
                receive[sender] += _tensors(layer, place - layer.first)
        self.moved += len(transfers)
        sizes = [[sum(tensor.numel() for tensor in each) for each in way] for way in (send, receive)]
        flat = [tensor for each in send for tensor in each] or [self.layers[0].loads.new_empty(0, dtype=torch.uint8)]
        got = ep.all_to_all(torch.cat(flat), *sizes)
        targets = [tensor for each in receive for tensor in each]
        for target, part in zip(targets, got.split([target.numel() for target in targets]), strict=True):
            target.copy_(part)


def _tensors(layer: DealtLayer, place: int) -> list[torch.Tensor]:
    """The weights at one of this rank's places, as bytes. Raises ConfigError where nobody tells them."""
    found = layer.weights.tensors_at(place)
    if found is None or not all(tensor.is_contiguous() for tensor in found):
        raise ConfigError(
            "move experts between ranks (experts.rebalance_every)",
            "the driver that packs their weights does not tell which memory is whose",
            "leave experts.rebalance_every out, or choose another driver with --ops or --quantization",
        )
    return [tensor.view(-1).view(torch.uint8) for tensor in found]
