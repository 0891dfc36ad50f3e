"""Compiling in processes that can be killed: what `GrammarContext.compile_apart` is.

A constraint comes from a stranger, and compiling it is code of a library that may run for hours, take all memory, or
crash. In a thread of the core's that could not be ended, so it happens in children; one that oversteps is killed, its
request ends with an error, and the next request gets a new child.
"""

from __future__ import annotations

import contextlib
import hashlib
import queue
import shutil
import signal
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from engine.loop.compiler_process import Begin, Compiled, CompilerStart, Source
from engine.process.child import Child
from engine.types.errors import EngineDeadError, EngineError, InvalidRequestError, rebuild_error

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
        self._compiler = compiler
        self._options = options
        self._vocab_size = vocab_size
        self._vocabulary = vocabulary
        self._places = threading.BoundedSemaphore(options.compile_processes)
        self._lock = threading.Lock()
        self._children: set[Child[Compiled]] = set()
        self._idle: queue.LifoQueue[Child[Compiled]] = queue.LifoQueue()
        self._runaways: OrderedDict[bytes, tuple[str, str, str, str]] = OrderedDict()  # by hash: what their error said
        self._closed = False
        self._kill_all = weakref.finalize(self, _kill_all, self._children)  # also at the interpreter's exit

    def prepare(self) -> None:
        """Have a first child import its library, for which it takes seconds, before anybody needs it. Does not wait;
        nothing comes of a failure, which whoever needs it meets again."""
        with contextlib.suppress(EngineError):
            if not self._children:
                self._idle.put(self._started())

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
                except EngineDeadError as error:  # a child has, not the engine: the request alone ends
                    raise EngineError(error.asked, error.found, error.remedy) from error
            raise EngineError(
                "compile structured_outputs",
                f"{ATTEMPTS} compiling processes were ended from outside ({how})",
                "send it again; who runs the server may see who ends them, or whether the machine is out of memory",
            )

    def close(self) -> None:
        """End all children, and with them what they compile. Idempotent."""
        with self._lock:
            self._closed = True
        self._kill_all()
        while not self._idle.empty():
            self._drop(self._idle.get())

    def _compile(self, key: bytes, source: bytes) -> bytes:
        """Compile in a child. Raises _Ended, and as `__call__`."""
        child = self._take()
        seconds = self._options.compile_timeout
        child.send(Source(source))
        try:
            answer = child.receive(seconds)
        except EngineError as error:
            raise self._remembered(key, self._died(child)) from error
        if answer is None:
            self._drop(child)
            late = InvalidRequestError(
                "compile structured_outputs",
                f"it takes longer than the {seconds:g} s that a compilation may take",
                "ask for something simpler; who runs the server may raise --grammar.compile_timeout",
            )
            raise self._remembered(key, late)
        if answer.memory:
            self._drop(child)
            raise self._remembered(key, self._too_much_memory())
        self._idle.put(child)
        if answer.error is not None:
            raise rebuild_error(answer.error)
        return answer.compiled

    def _remembered(self, key: bytes, error: EngineError) -> EngineError:
        """The same source would end a process again: who sends it again is told at once."""
        if isinstance(error, InvalidRequestError):
            with self._lock:
                self._runaways[key] = error.parts
                while len(self._runaways) > RUNAWAYS:
                    self._runaways.popitem(last=False)
        return error

    # -- children ------------------------------------------------------------------------------------------------------
    def _take(self) -> Child[Compiled]:
        """A child that has nothing to do; another where there is none, or all are busy for long. Whoever asks has one
        of the places, so there is room for it."""
        patience = 0.0
        while True:
            try:
                child = self._idle.get(timeout=patience)
            except queue.Empty:
                if self._children and not patience:
                    patience = GRACE_SECONDS
                    continue
                child = self._started()
            if child.ready and child.alive:
                return child
            if child.alive:
                return self._begun(child)
            self._drop(child)  # somebody ended it while it had nothing to do

    def _started(self) -> Child[Compiled]:
        """A child that imports its library."""
        with self._lock:
            if self._closed:
                raise _shutting_down()
            child: Child[Compiled] = Child(
                MODULE, CompilerStart(self._compiler), Compiled, what=f"the compiler {self._compiler}"
            )
            self._children.add(child)
        return child

    def _begun(self, child: Child[Compiled]) -> Child[Compiled]:
        """The child when it is ready to compile."""
        seconds, memory = self._options.compile_timeout, self._options.compile_memory * MIB
        try:
            child.send(Begin(self._vocab_size, list(self._vocabulary()), seconds, memory))
            if child.receive(START_SECONDS) is not None:
                return child
            error = EngineError(f"start a process of {self._compiler}", f"not ready after {START_SECONDS:g} s")
        except EngineError as failed:
            error = failed
        self._drop(child)
        raise _shutting_down() if self._closed else error

    def _drop(self, child: Child[Compiled]) -> int:
        """End a child. Returns its exit code."""
        with self._lock:
            self._children.discard(child)
        child.kill()
        code = child.end(0)
        child.close()
        return code

    def _died(self, child: Child[Compiled]) -> EngineError:
        """A child that leaves by itself in the middle of a compilation has run out of memory or stack, as far as one
        can know. Raises _Ended for one that somebody else ended."""
        code = self._drop(child)
        if self._closed:
            return _shutting_down()
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


def _shutting_down() -> EngineError:
    return EngineError("compile structured_outputs", "the engine is shutting down")


def _kill_all(children: set[Child[Compiled]]) -> None:
    """Who waits for one of them sees that, and frees what it used."""
    for child in list(children):
        child.kill()
        shutil.rmtree(child.directory, ignore_errors=True)
