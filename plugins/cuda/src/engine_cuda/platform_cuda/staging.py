"""Pinned memory through which the host's small tensors go to the device, without either waiting for the other.

A copy from pinned memory is queued and read later, so the memory must not be written again before. The ring is cut into
segments; when one is full, an event is recorded behind the copies that read it, and the segment is written again only
when that has happened. With a few segments nobody waits in practice: steps write some KiB each, and two are under way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import torch

S = TypeVar("S")
"""A stream."""

RING_BYTES = 8 << 20
SEGMENTS = 8
_ALIGNMENT = 64


class Event(Protocol):
    """A mark in a stream's work."""

    def synchronize(self) -> None:
        """Wait until it is."""
        ...


class StagingRing(Generic[S]):
    """Hands out pieces of one buffer.

    Args:
        buffer: uint8, pinned.
        record: makes an event behind all work that was queued on a stream so far.
        segments: how many parts the buffer is cut into, two or more.
    """

    def __init__(self, buffer: torch.Tensor, record: Callable[[S], Event], segments: int = SEGMENTS) -> None:
        self._buffer = buffer
        self._record = record
        self._size = len(buffer) // segments // _ALIGNMENT * _ALIGNMENT
        self._events: list[Event | None] = [None] * segments
        self._segment = self._used = 0
        self._stream: S | None = None

    @property
    def largest(self) -> int:
        """Bytes of the largest piece."""
        return self._size

    def take(self, num_bytes: int, stream: S) -> torch.Tensor:
        """uint8 [num_bytes] that no copy reads any more. The copy out of it must be queued before the next call.

        Args:
            num_bytes: at most `largest`.
            stream: whose work the copy joins. Another one than the last time begins a new segment, since an event
                stands behind the work of one stream.
        """
        if self._stream is not None and (self._used + num_bytes > self._size or stream != self._stream):
            self._turn(self._stream)
        self._stream = stream
        start = self._segment * self._size + self._used
        self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return self._buffer[start : start + num_bytes]

    def _turn(self, stream: S) -> None:
        self._events[self._segment] = self._record(stream)
        self._segment = (self._segment + 1) % len(self._events)
        self._used = 0
        event, self._events[self._segment] = self._events[self._segment], None
        if event is not None:
            event.synchronize()
