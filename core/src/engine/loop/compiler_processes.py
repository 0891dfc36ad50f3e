"""Compiling in processes that can be killed: what `GrammarContext.compile_apart` is.

A constraint comes from a stranger, and compiling it is code of a library that may run for hours, take all memory, or
crash. In a thread of the core's that could not be ended, so it happens in children; one that oversteps is killed, its
request ends with an error, and the next request gets a new child.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, BinaryIO, cast

import msgspec

from engine.loop.compiler_process import CompilerAnswer, CompilerStart
from engine.process import wire
from engine.types.errors import EngineError, InvalidRequestError, rebuild_error

if TYPE_CHECKING:
    from engine.interfaces.grammar import CompileOptions

MODULE = "engine.loop.compiler_process"
START_SECONDS = 120.0
"""How long a child may take to import its library and to read the vocabulary."""
GRACE_SECONDS = 0.25
"""How long a source waits for a child that is at work on another before one more is started: each has its library in
memory, and most sources take far less."""
MIB = 1 << 20
RUNAWAYS = 256
"""How many sources that ended a process are remembered."""
ATTEMPTS = 2
"""How many processes a source gets, where somebody else ends them."""
OWN_SIGNALS = frozenset(
    {
        signal.SIGALRM,
        signal.SIGBUS,
        signal.SIGFPE,
        signal.SIGILL,
        signal.SIGSEGV,
        signal.SIGSYS,
        signal.SIGTRAP,
        signal.SIGXCPU,
    }
)
"""What a process that compiles brings upon itself. Other signals come from outside: from an operator, a supervisor, or
a system that is short of memory, for which no source is to blame: what one may take is limited."""


class _Ended(Exception):
    """The process was ended from outside, by this signal."""


class _TooLate(Exception):
    """No answer in time."""


class _Child:
    """One process. It imports the compiler at once, and waits for its start message.

    Args:
        compiler: "package.module:Class".
    """

    def __init__(self, compiler: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", MODULE, compiler],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def begin(self, start: bytes) -> None:
        """Send the start message and wait until it is ready. Raises as `ask`; then the process has been ended."""
        try:
            self.ask(start, START_SECONDS)
        except BaseException:
            self.kill()
            raise

    def ask(self, message: bytes, seconds: float) -> CompilerAnswer:
        """Send a message and wait for the answer. Raises _TooLate, OSError, EOFError, or the EngineError answered."""
        wire.write_frame(cast(BinaryIO, self.process.stdin), message)
        deadline = time.monotonic() + seconds
        size = int.from_bytes(self._read(8, deadline), "little")
        answer = msgspec.msgpack.decode(self._read(size, deadline), type=CompilerAnswer)
        if answer.error is not None:
            raise rebuild_error(answer.error)
        return answer

    def _read(self, size: int, deadline: float) -> bytes:
        assert self.process.stdout is not None
        pipe, parts = self.process.stdout.fileno(), []
        while size:
            poll = select.poll()  # `select` takes no descriptor above 1024
            poll.register(pipe, select.POLLIN)
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise _TooLate
            part = os.read(pipe, min(size, MIB))
            if not part:
                raise EOFError
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    @property
    def lives(self) -> bool:
        """Whether the process has not ended."""
        return self.process.poll() is None

    def kill(self) -> int:
        """End it. Returns its exit code, negative for a signal."""
        self.process.kill()
        code = self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                cast(BinaryIO, pipe).close()
        return code


class CompilerProcesses:
    """Children that compile. The first is started when it is needed, further ones where sources have to wait.
    Thread-safe.

    Args:
        compiler: "package.module:Class" of the driver's `GrammarCompiler`.
        options: the limits.
        vocab_size, vocabulary: of the driver's context.
    """

    def __init__(
        self,
        compiler: str,
        options: CompileOptions,
        vocab_size: int,
        vocabulary: Callable[[], Sequence[bytes | None]],
    ) -> None:
        self._compiler, self._options = compiler, options
        self._vocab_size, self._vocabulary = vocab_size, vocabulary
        self._places = threading.BoundedSemaphore(options.compile_processes)
        self._idle: queue.LifoQueue[_Child | EngineError] = queue.LifoQueue()  # an error is why a child did not start
        self._lock = threading.Lock()
        self._living: set[_Child] = set()
        self._prepared: set[_Child] = set()  # one at most, that has been told nothing yet
        self._starting, self._waiting = False, 0
        self._runaways: OrderedDict[bytes, tuple[str, str, str, str]] = OrderedDict()  # by hash: what their error said
        self._closed = False
        # Also at the interpreter's exit.
        self._close = weakref.finalize(self, _kill_all, (self._living, self._prepared))

    def prepare(self) -> None:
        """Have a first child import its library, for which it takes seconds, before anybody needs it. Does not wait;
        nothing comes of a failure, which whoever needs it meets again."""
        with self._lock:
            if not (self._closed or self._living or self._prepared):
                with contextlib.suppress(OSError):
                    self._prepared.add(_Child(self._compiler))

    def __call__(self, source: bytes) -> bytes:
        """Compile; see `GrammarContext.compile_apart`."""
        key = hashlib.blake2b(source, digest_size=16).digest()
        with self._places:
            with self._lock:
                if key in self._runaways:
                    raise rebuild_error(self._runaways[key])
            for _ in range(ATTEMPTS):
                try:
                    return self._compile(key, source)
                except _Ended as error:
                    how = str(error)
            raise EngineError(
                "compile structured_outputs",
                f"{ATTEMPTS} compiling processes were ended from outside ({how})",
                "send it again; who runs the server may see who ends them, or whether the machine is out of memory",
            )

    def _compile(self, key: bytes, source: bytes) -> bytes:
        """Compile in a child. Raises _Ended, and as `__call__`."""
        child = self._take()
        seconds = self._options.compile_timeout
        try:
            answer = child.ask(source, seconds)
        except _TooLate:
            self._drop(child)
            late = InvalidRequestError(
                "compile structured_outputs",
                f"it takes longer than the {seconds:g} s that a compilation may take",
                "ask for something simpler; who runs the server may raise --grammar.compile_timeout",
            )
            raise self._remembered(key, late) from None
        except EngineError:
            self._idle.put(child)
            raise
        except (OSError, EOFError) as error:
            raise self._remembered(key, self._died(child)) from error
        if answer.memory or answer.compiled is None:
            self._drop(child)
            raise self._remembered(key, self._too_much_memory())
        self._idle.put(child)
        return answer.compiled

    def close(self) -> None:
        """End all children, and with them what they compile. Idempotent."""
        with self._lock:
            self._closed = True
        self._close()

    def _remembered(self, key: bytes, error: EngineError) -> EngineError:
        """The same source would end a process again: who sends it again is told at once."""
        if isinstance(error, InvalidRequestError):
            with self._lock:
                self._runaways[key] = error.parts
                while len(self._runaways) > RUNAWAYS:
                    self._runaways.popitem(last=False)
        return error

    def _take(self) -> _Child:
        """The first child that has nothing to do; started where there is none, and where all are busy for long."""
        with self._lock:
            self._waiting += 1
        try:
            patience = 0.0
            while True:
                with contextlib.suppress(queue.Empty):
                    found = self._idle.get(timeout=patience) if patience else self._idle.get_nowait()
                    if isinstance(found, EngineError):
                        raise found
                    if found.lives:
                        return found
                    self._drop(found)  # somebody ended it while it had nothing to do
                    continue
                self._start_where_needed(waited=patience > 0)
                patience = GRACE_SECONDS
        finally:
            with self._lock:
                self._waiting -= 1

    def _start_where_needed(self, waited: bool) -> None:
        """Begin to start a child where none is being started, and there is none, or room for one and `waited`."""
        with self._lock:
            if self._closed:
                raise EngineError("compile structured_outputs", "the engine is shutting down")
            room = not self._starting and len(self._living) < self._options.compile_processes
            if room and (waited or not self._living):
                self._starting = True
                threading.Thread(target=self._start, name="compiler", daemon=True).start()

    def _start(self) -> None:
        """Start a child; whoever waits gets it, or the error."""
        child: _Child | EngineError
        try:
            child = self._started()
        except EngineError as error:
            child = error
        except Exception as error:
            child = EngineError(f"start a process of {self._compiler}", f"{type(error).__name__}: {error}")
        with self._lock:
            self._starting = False
            if isinstance(child, _Child) and not self._closed:
                self._living.add(child)
                self._idle.put(child)
            elif isinstance(child, EngineError) and self._waiting:
                self._idle.put(child)
        if isinstance(child, _Child) and child not in self._living:
            child.kill()

    def _started(self) -> _Child:
        options = self._options
        start = CompilerStart(
            compiler=self._compiler,
            vocab_size=self._vocab_size,
            vocabulary=list(self._vocabulary()),
            seconds=options.compile_timeout,
            memory_bytes=options.compile_memory * MIB,
        )
        with self._lock:
            child = self._prepared.pop() if self._prepared else None
        try:
            if child is not None and child.process.poll() is not None:
                child.kill()  # it died of itself, nobody knows why: what follows will tell, if it goes on
                child = None
            child = child or _Child(self._compiler)
            child.begin(msgspec.msgpack.encode(start))
            return child
        except (OSError, EOFError, _TooLate) as error:
            raise EngineError(
                f"start a process of {self._compiler}", f"{type(error).__name__} {error}", "the log may say why"
            ) from error

    def _drop(self, child: _Child) -> int:
        with self._lock:
            self._living.discard(child)
        return child.kill()

    def _died(self, child: _Child) -> EngineError:
        """A child that leaves by itself in the middle of a compilation has run out of memory or stack, as far as one
        can know. Raises _Ended for one that somebody else ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(1.0)
        code = self._drop(child)
        with self._lock:
            if self._closed:
                return EngineError("compile structured_outputs", "the engine is shutting down")
        if code == -signal.SIGABRT:  # how C++ ends where memory is refused
            return self._too_much_memory()
        if code < 0 and -code not in OWN_SIGNALS:
            raise _Ended(signal.strsignal(-code) or f"signal {-code}")
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return InvalidRequestError(
            "compile structured_outputs", f"the compiler broke down over it ({how})", "ask for something simpler"
        )

    def _too_much_memory(self) -> InvalidRequestError:
        return InvalidRequestError(
            "compile structured_outputs",
            f"it takes more than the {self._options.compile_memory} MiB that a compilation may take",
            "ask for something simpler; who runs the server may raise --grammar.compile_memory",
        )


def _kill_all(sets: Iterable[set[_Child]]) -> None:
    for children in sets:
        for child in list(children):
            child.kill()
        children.clear()
