"""What goes from one pipeline stage to the next: the tensors of a state, one message each, of as many tokens as the
plan has, whatever either stage pads them to."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from engine.interfaces.communicator import Group, Sending
from engine.types.parallel import Stage

_ON_THE_WAY = 4
"""Steps whose tensors may wait for the next stage; there are hardly more of them than stages under way at once."""


class Stages(Group, Protocol):
    """The ranks of one place in all stages."""

    def isend(self, x: torch.Tensor, to: int) -> Sending | None:
        """Send without waiting for the other rank, where that can be; None where it has been sent."""


class StageLink:
    """A worker's hold on the stages before and behind its own.

    Args:
        stage: the worker's, one of several.
        group: its ranks in all stages, in their order.
        sizes: what travels; see `engine.interfaces.model.Model.state_sizes`.
        max_tokens: of a step, padding included.
        dtype, device: of the tensors.
        added: what a state has beside that when it leaves this stage.
    """

    def __init__(
        self,
        stage: Stage,
        group: Stages,
        sizes: Mapping[str, int],
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        added: Sequence[str] = (),
    ) -> None:
        self._stage = stage
        self._group = group
        self._names = (*sizes, *added)
        rows = 0 if stage.first else max_tokens
        self._received = {name: torch.zeros((rows, size), dtype=dtype, device=device) for name, size in sizes.items()}
        self._sendings: deque[list[Sending | None]] = deque()

    def state(self, num_tokens: int) -> dict[str, torch.Tensor]:
        """What `receive` fills, as the model reads it: [num_tokens, size] each, views of fixed buffers, whose padding
        is anything. Empty on the first stage."""
        return {} if self._stage.first else {name: x[:num_tokens] for name, x in self._received.items()}

    def receive(self, num_tokens: int) -> None:
        """Wait for the stage before; nothing on the first one. Raises RuntimeError where that has gone."""
        if not self._stage.first:
            for received in self._received.values():
                self._group.recv(received[:num_tokens], self._stage.index - 1)

    def left(self, state: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """What the next stage needs of a state."""
        return tuple(state[name] for name in self._names)

    def send(self, left: Sequence[torch.Tensor], num_tokens: int, keep: bool) -> None:
        """Send the first tokens of what was left to the next stage, mostly without waiting for it.

        keep: the tensors are written again by the next step, so what travels is a copy. On a stage that receives they
            always may be: layers that compute in place leave what they were given in the buffers of `receive`.
        """
        keep = keep or not self._stage.first
        tensors = [tensor[:num_tokens].clone() if keep else tensor[:num_tokens] for tensor in left]
        self._sendings.append([self._group.isend(tensor, self._stage.index + 1) for tensor in tensors])
        if len(self._sendings) > _ON_THE_WAY:
            self._wait_for_oldest()

    def flush(self) -> None:
        """Wait until the next stage has all that was sent. What is on its way when this object goes never arrives."""
        while self._sendings:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        for sending in self._sendings.popleft():
            if sending is not None:
                sending.wait()
