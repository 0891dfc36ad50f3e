"""Pinned memory through which plans travel, so that a plan never overwrites one that is still on its way.

FlashInfer writes a plan into pinned memory and copies it to the device behind the work that is queued there. It knows
one such memory for each wrapper; with steps in flight the next plan would be written before the last one was copied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Event(Protocol):
    """What tells that the device has come to a point: `torch.cuda.Event`."""

    def record(self) -> None: ...

    def query(self) -> bool: ...


class Staging:
    """Buffers that are given out in turn; one is made where all are on their way, and nobody waits.

    Args:
        make_buffer: uint8, pinned.
        make_event: of the device.
    """

    def __init__(
        self, make_buffer: Callable[[], torch.Tensor], make_event: Callable[[], Event] = torch.cuda.Event
    ) -> None:
        self._make_buffer = make_buffer
        self._make_event = make_event
        self._sent: list[tuple[torch.Tensor, Event]] = []

    def take(self) -> torch.Tensor:
        """A buffer that the device has read."""
        for place, (buffer, event) in enumerate(self._sent):
            if event.query():
                del self._sent[place]
                return buffer
        return self._make_buffer()

    def sent(self, buffer: torch.Tensor) -> None:
        """The buffer's copy has been queued."""
        event = self._make_event()
        event.record()
        self._sent.append((buffer, event))
