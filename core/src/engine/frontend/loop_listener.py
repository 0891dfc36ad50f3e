"""Hears an engine core in an event loop: no thread takes the interpreter from the loop to hand it a message."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import msgspec
import zmq

from engine.types.errors import EngineError, rebuild_error
from engine.types.messages import Beat, Failed, FromCore

LOOK_SECONDS = 0.1
"""How often it is looked whether a core that said nothing lives."""
BEHIND_SECONDS = 0.2
"""How long messages may wait before the loop counts as behind, and takes the news of several steps as those of one."""
HASTY_MESSAGES = 16
"""How many, then."""
DETACH_SECONDS = 5.0


class Heard(Protocol):
    """What is heard: the frontend's end of a core."""

    outputs: zmq.Socket[bytes]
    decode: Callable[[bytes], FromCore]
    stopping: threading.Event

    def ended(self) -> bool:
        """Whether the process has."""
        ...

    def why_ended(self) -> EngineError:
        """Of one that has; may wait for its last words."""
        ...

    def end_hung(self) -> EngineError:
        """End a process that is silent."""
        ...

    def end_unreadable(self, error: Exception) -> EngineError:
        """End a process that sends what cannot be read."""
        ...


class LoopListener:
    """Hands over what comes, in the loop, until the core has ended or `stop` is called.

    A message is handed over in a turn of the loop of its own, so that whoever reads a stream has read the news of one
    step before those of the next come. That holds until the loop is behind: then the news of several steps are handed
    over as those of one, which costs less, and the loop catches up.

    Args:
        core: whose messages; nobody else reads its socket now.
        loop: this thread's.
        on_message: takes one, or several that came.
        on_death: takes the error, once, if the process ends unasked, sends what cannot be read, or is silent for
            `timeout` seconds.
        timeout: see there.

    Raises:
        NotImplementedError: loops of this kind cannot wait for a socket of ZeroMQ.
    """

    def __init__(
        self,
        core: Heard,
        loop: asyncio.AbstractEventLoop,
        on_message: Callable[[Sequence[FromCore]], None],
        on_death: Callable[[EngineError], None],
        timeout: float,
    ) -> None:
        self._core, self._loop, self._timeout = core, loop, timeout
        self._on_message, self._on_death = on_message, on_death
        self._file = core.outputs.fileno()
        loop.add_reader(self._file, self._readable)
        self._listening, self._scheduled, self._heard = True, False, True
        self._empty, self._silence = loop.time(), 0.0
        self._look_handle = loop.call_later(LOOK_SECONDS, self._look)
        self._readable()  # what came before is not told again

    @property
    def silence(self) -> float:
        """Seconds without a message, counted in looks."""
        return self._silence

    @property
    def farewell(self) -> threading.Thread | None:
        """The thread that finds out what became of the core; None while it lives."""
        return self._farewell

    _farewell: threading.Thread | None = None

    def stop(self) -> None:
        """Hear nothing any more. From any thread; returns when the socket is not used any more. Idempotent."""
        if not self._listening or self._loop.is_closed():
            self._listening = False
        elif not self._loop.is_running() or _running_loop() is self._loop:
            self._detach()
        else:
            detached = threading.Event()

            def detach() -> None:
                self._detach()
                detached.set()

            with contextlib.suppress(RuntimeError):  # it has closed meanwhile
                self._loop.call_soon_threadsafe(detach)
                detached.wait(DETACH_SECONDS)
        if self._farewell is not None and self._farewell is not threading.current_thread():
            self._farewell.join()

    def _detach(self) -> None:
        if self._listening:
            self._listening = False
            self._loop.remove_reader(self._file)
            self._look_handle.cancel()

    # ZeroMQ's descriptor tells of a change once: it is to be read until there is nothing, or looked at again.
    def _readable(self) -> None:
        if not self._scheduled:
            self._empty = self._loop.time()
            self._take()

    def _take(self) -> None:
        self._scheduled = False
        behind = self._loop.time() - self._empty > BEHIND_SECONDS
        messages: list[FromCore] = []
        for _ in range(HASTY_MESSAGES if behind else 1):
            if not self._listening or self._core.stopping.is_set():
                return self._detach()
            try:
                message = self._core.decode(self._core.outputs.recv(zmq.NOBLOCK))
            except zmq.Again:
                self._empty = 0.0
                break
            except msgspec.DecodeError as error:
                self._hand_over(messages)
                return self._end(partial(self._core.end_unreadable, error))
            self._heard = True
            if isinstance(message, Failed):
                self._hand_over(messages)
                self._detach()
                return self._on_death(rebuild_error(message.error))
            if not isinstance(message, Beat):
                messages.append(message)
        try:
            self._hand_over(messages)
        finally:  # whatever became of these, others may have come, of which the descriptor would not tell
            if self._empty:
                self._scheduled = True
                self._loop.call_soon(self._take)

    def _hand_over(self, messages: list[FromCore]) -> None:
        if messages:
            self._on_message(messages)

    def _look(self) -> None:
        # Counted in looks, not by a clock: a machine that slept, or a frontend that was stopped, has not waited.
        if self._core.stopping.is_set():
            return self._detach()
        self._silence = 0.0 if self._heard else self._silence + LOOK_SECONDS
        if not self._heard and self._core.ended():
            return self._end(self._core.why_ended)
        if self._silence >= self._timeout:
            return self._end(self._core.end_hung)
        self._heard = False
        self._look_handle = self._loop.call_later(LOOK_SECONDS, self._look)

    def _end(self, why: Callable[[], EngineError]) -> None:
        """Tell what became of the core: that takes time, in which the loop goes on."""
        self._detach()

        def find_out() -> None:
            error = why()
            with contextlib.suppress(RuntimeError):  # the program has ended; there is nobody to tell
                self._loop.call_soon_threadsafe(self._on_death, error)

        self._farewell = threading.Thread(target=find_out, name="core-end", daemon=True)
        self._farewell.start()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
