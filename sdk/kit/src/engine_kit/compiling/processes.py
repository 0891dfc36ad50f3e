"""The processes in which a driver's constraints are compiled. One that oversteps its limits is killed, its request ends
with an error, and the next request gets a new process."""

from __future__ import annotations

import contextlib
import hashlib
import queue
import shutil
import signal
import threading
import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING, cast

from engine.plugin.loading import import_object
from engine.process.child import Child
from engine.types.errors import EngineDeadError, EngineError, InvalidRequestError, rebuild_error
from engine_kit.compiling.child import Begin, Compiled, CompilerStart, CompileSource

if TYPE_CHECKING:
    from engine.interfaces.context import GrammarContext
    from engine_kit.compiling import CompileOptions, GrammarCompiler

MODULE = "engine_kit.compiling.child"
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
NO_MEMORY = (-signal.SIGABRT, 127)
"""Exit codes of a child to which memory was refused: C++ aborts; the C library, for a new thread's data, leaves so."""
OWN_SIGNALS = frozenset(
    {
        signal.SIGABRT,
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
    """The process was ended from outside, with this exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(signal.strsignal(-code) or f"signal {-code}")


class CompilerProcesses:
    """Children that compile. The first is started when it is needed, further ones where sources have to wait.
    Thread-safe.

    Args:
        compiler: "package.module:Class" of the driver's `GrammarCompiler`.
        context: the driver's, whose options are `CompileOptions`. Where it says `prepare`, the first child begins to
            import the library at once.
    """

    def __init__(self, compiler: str, context: GrammarContext) -> None:
        self._compiler = compiler
        self._context = context
        self._options = cast("CompileOptions", context.options)
        self._places = threading.BoundedSemaphore(max(1, self._options.compile_processes))
        self._lock = threading.Lock()
        self._children: set[Child[Compiled]] = set()
        self._idle: queue.LifoQueue[Child[Compiled]] = queue.LifoQueue()
        self._runaways: OrderedDict[bytes, tuple[str, str, str, str]] = OrderedDict()  # by hash: what their error said
        self._here: GrammarCompiler | None = None
        self._closed = False
        self._kill_all = weakref.finalize(self, _kill_all, self._children)  # also at the interpreter's exit
        if context.prepare:
            self.prepare()

    def prepare(self) -> None:
        """Have a first child import its library, for which it takes seconds, before anybody needs it. Does not wait;
        nothing comes of a failure, which whoever needs it meets again."""
        with contextlib.suppress(EngineError):
            if self._options.compile_processes and (child := self._another(waited=False)) is not None:
                self._idle.put(child)

    def compile(self, source: bytes) -> bytes:
        """What the driver's compiler makes of a source; waits for it.

        Raises:
            InvalidRequestError: the compiler refuses it, or needs more time or memory than it may have.
            EngineError: the compiler cannot be started, fails, or is ended by somebody else.
        """
        with self._places:
            if not self._options.compile_processes:
                if self._here is None:
                    self._here = import_object(self._compiler)(self._context)
                return self._here.compile(source)
            key = hashlib.blake2b(source, digest_size=16).digest()
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
        """Compile in a child. Raises _Ended, and as `compile`."""
        child = self._take()
        seconds = self._options.compile_timeout
        child.send(CompileSource(source))
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
        """A child that has nothing to do; another where there is none, or all have been at work for a while: one that
        still starts is not. Whoever asks has one of the places, so there is room for it."""
        while True:
            at_work = all(child.ready for child in list(self._children))
            try:
                child = self._idle.get(timeout=GRACE_SECONDS if self._children else 0.0)
            except queue.Empty:
                another = self._another(waited=at_work)
                if another is None:
                    continue
                child = another
            if child.ready and child.alive:
                return child
            if child.alive:
                return self._begun(child)
            self._drop(child)  # somebody ended it while it had nothing to do

    def _another(self, *, waited: bool) -> Child[Compiled] | None:
        """A new child, which imports its library. None while one starts, or is at work and was not `waited` for."""
        with self._lock:
            if self._closed:
                raise _shutting_down()
            if any(not child.ready for child in self._children) or (self._children and not waited):
                return None
            child: Child[Compiled] = Child(
                MODULE, CompilerStart(self._compiler), Compiled, what=f"the compiler {self._compiler}"
            )
            self._children.add(child)
        return child

    def _begun(self, child: Child[Compiled]) -> Child[Compiled]:
        """The child when it is ready to compile. Raises _Ended for one that somebody else ended."""
        seconds, memory = self._options.compile_timeout, self._options.compile_memory * MIB
        try:
            child.send(Begin(self._context.vocab_size, list(self._context.vocabulary()), seconds, memory))
            if child.receive(START_SECONDS) is not None:
                return child
            error = EngineError(f"start a process of {self._compiler}", f"not ready after {START_SECONDS:g} s")
        except EngineError as failed:
            error = failed
        except BaseException:  # of the vocabulary: others would wait for the child to be ready for ever
            self._drop(child)
            raise
        code = self._drop(child)
        if self._closed:
            raise _shutting_down()
        raise _Ended(code) if isinstance(error, EngineDeadError) and _by_others(code) else error

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
        if code in NO_MEMORY:
            return self._too_much_memory()
        if _by_others(code):
            if self._closed:
                return _shutting_down()
            raise _Ended(code)
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


def _by_others(code: int) -> bool:
    """Whether somebody else has ended the process that left with this exit code."""
    return code < 0 and -code not in OWN_SIGNALS


def _shutting_down() -> EngineError:
    return EngineError("compile structured_outputs", "the engine is shutting down")


def _kill_all(children: set[Child[Compiled]]) -> None:
    """Who waits for one of them sees that, and frees what it used."""
    for child in list(children):
        child.kill()
        shutil.rmtree(child.directory, ignore_errors=True)
