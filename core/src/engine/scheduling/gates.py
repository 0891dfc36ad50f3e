"""Gates: what a new request waits for before it may be queued, made beside the loop.

The matcher of a constraint is made behind a gate, and an adapter gets its place behind one. A request that waits at a
gate, or at several, is PENDING; others go on. Whatever becomes ready wakes the loop, so a core whose requests are all
pending sleeps. Keys and values that lie elsewhere are behind no gate: their connector is polled, with a plan every 2 to
16 ms (`scheduling/loading.py`), and so is one that answers a lookup by LATER.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from engine.scheduling.slots import Request
from engine.types.errors import EngineError


class Gate(Protocol):
    """One thing that requests wait for. All calls come from the scheduler's thread."""

    def begin(self, request: Request, wake: Callable[[], None]) -> bool:
        """Begin with what a new request needs; False where it needs nothing of this gate. Does not wait.

        wake: to be called, from any thread, when `ready` has something to tell.
        """

    def ready(self) -> list[tuple[Request, EngineError | None]]:
        """The requests whose wait is over since the last call, in the order in which they came; with an error, those
        that cannot be served."""

    def forget(self, request: Request) -> None:
        """The request ended while it waited here: drop what is made for it."""

    def shutdown(self) -> None:
        """Make nothing more. Idempotent."""


class AdapterGate(Gate, Protocol):
    """The gate of requests with adapters, whose places it keeps: `engine.interfaces.adapter.AdapterCore`."""

    def ended(self, request: Request) -> None:
        """Any request has ended, wherever it was."""


class Gates:
    """All gates of a core, and who waits at them.

    Args:
        gates: a request waits at each that it needs, at all of them at once.
        adapters: one more; None where no request may have an adapter.

    Attributes:
        adapt: requests may have adapters.
    """

    def __init__(self, gates: Sequence[Gate], adapters: AdapterGate | None = None) -> None:
        self._gates = gates if adapters is None else [*gates, adapters]
        self._adapters = adapters
        self.adapt = adapters is not None
        self._pending: dict[Request, set[Gate]] = {}
        self._news = threading.Event()

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._pending)

    def begin(self, request: Request) -> bool:
        """Whether a new request has to wait."""
        waits = {gate for gate in self._gates if gate.begin(request, self._news.set)}
        if waits:
            self._pending[request] = waits
        return bool(waits)

    def ready(self) -> list[tuple[Request, EngineError | None]]:
        """The requests that wait no longer, since the last call: with an error, those that cannot be served."""
        if not self._pending:
            return []
        through: list[tuple[Request, EngineError | None]] = []
        for gate in self._gates:
            for request, error in gate.ready():
                self._pending[request].remove(gate)
                if error is not None:
                    self.forget(request)
                elif self._pending[request]:
                    continue
                else:
                    del self._pending[request]
                through.append((request, error))
        return through

    def forget(self, request: Request) -> None:
        """The request ends, wherever it waits."""
        for gate in self._pending.pop(request, ()):
            gate.forget(request)

    def ended(self, request: Request) -> None:
        """The request has ended, wherever it was."""
        if self._adapters is not None:
            self._adapters.ended(request)

    def wait(self, seconds: float) -> None:
        """Wait at most so long for something to become ready; `ready` is asked next. From the scheduler's thread."""
        self._news.wait(seconds)
        self._news.clear()

    def shutdown(self) -> None:
        """Make nothing more for anybody. Idempotent."""
        self._pending.clear()
        for gate in self._gates:
            gate.shutdown()
