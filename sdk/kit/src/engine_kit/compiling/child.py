"""A process that compiles constraints: `python -m engine_kit.compiling.child`.

It imports its compiler, for which some libraries take seconds; then it is told the vocabulary and one source after the
other, and answers each. Who started it ends it where a source takes too long, and starts another. Should that one die
in the middle of a compilation that holds every lock there is, the alarm ends it that is set before each.
"""

from __future__ import annotations

import contextlib
import os
import signal

import msgspec

from engine.interfaces.context import GrammarContext
from engine.plugin.loading import import_object
from engine.process.run import run
from engine.process.wire import Parent
from engine.types.errors import EngineError, InvalidRequestError
from engine.types.messages import Shutdown
from engine_kit.compiling import GrammarCompiler

ALARM_SECONDS = 5.0
"""How long after its time limit a compilation ends by itself, where nobody has ended it."""
NICENESS = 5
"""Steps come before compilations."""


class CompilerStart(msgspec.Struct, frozen=True):
    """The start message: "package.module:Class" of a `GrammarCompiler`."""

    compiler: str


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """Build the compiler.

    Args:
        vocab_size, vocabulary: of its context.
        seconds: of one compilation.
        memory_bytes: that compilations may take, beyond what the process has when it is ready.
    """

    vocab_size: int
    vocabulary: list[bytes | None]
    seconds: float
    memory_bytes: int


class CompileSource(msgspec.Struct, frozen=True, tag="source"):
    """Compile this."""

    source: bytes


class Compiled(msgspec.Struct, frozen=True, kw_only=True, tag="compiled", omit_defaults=True):
    """To `Begin`, when it is ready, and to each `CompileSource`.

    Args:
        compiled: what the compiler gave.
        error: `EngineError.parts` of what it raised.
        memory: the memory limit was hit; the process ends.
    """

    compiled: bytes = b""
    error: tuple[str, str, str, str] | None = None
    memory: bool = False


def main(start: CompilerStart, parent: Parent[Begin | CompileSource | Shutdown]) -> int:
    """Compile until told to stop. Returns the exit code."""
    os.dup2(2, 1)  # a library that prints does not print into what the engine's program writes
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    with contextlib.suppress(Exception):  # what is wrong is told when it is built
        import_object(start.compiler)
    begin = parent.receive()
    if not isinstance(begin, Begin):
        return 0
    compiler = _build(start.compiler, begin)
    _limit_memory(begin.memory_bytes)
    parent.send(Compiled())
    while isinstance(message := parent.receive(), CompileSource):
        _alarm(begin.seconds + ALARM_SECONDS)
        answer = _compile(compiler, message.source)
        _alarm(0.0)
        parent.send(answer)
        if answer.memory:
            return 1
    return 0


def _build(name: str, begin: Begin) -> GrammarCompiler:
    context = GrammarContext(vocab_size=begin.vocab_size, vocabulary=lambda: begin.vocabulary)
    try:
        compiler: GrammarCompiler = import_object(name)(context)
    except EngineError:
        raise
    except Exception as error:
        raise EngineError(f"start the compiler {name}", f"{type(error).__name__}: {error}") from error
    return compiler


def _compile(compiler: GrammarCompiler, source: bytes) -> Compiled:
    try:
        return Compiled(compiled=compiler.compile(source))
    except MemoryError:
        return Compiled(memory=True)
    except EngineError as error:
        return Compiled(error=error.parts)
    except RecursionError:
        return Compiled(error=InvalidRequestError("compile structured_outputs", "it is nested too deeply").parts)
    except Exception as error:
        if "bad_alloc" in str(error):
            return Compiled(memory=True)
        found = f"{type(error).__name__}: {error}"
        return Compiled(error=EngineError("compile structured_outputs", found).parts)


def _alarm(seconds: float) -> None:
    """The default action of SIGALRM ends the process, whatever holds the interpreter."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds)


def _limit_memory(more: int) -> None:
    """Of address space, which is what the system can limit; where it cannot, time alone is the limit."""
    try:
        import resource

        with open("/proc/self/statm") as statm:
            now = int(statm.read().split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (now + more, hard))
    except (ImportError, OSError, ValueError):
        return


if __name__ == "__main__":
    run("the compiler", CompilerStart, Begin | CompileSource | Shutdown, main)
