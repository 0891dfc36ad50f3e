"""A process that compiles constraints: `python -m engine.loop.compiler_process package.module:Class`.

It imports that compiler, for which some libraries take seconds; then it reads its start message and one source after
the other from standard input, and answers each on what was its standard output. The engine core ends it where a source
takes too long, and starts another. It ends itself when its parent is gone: at the end of standard input, or, in the
middle of a compilation that may hold every lock there is, by the alarm that is set before each.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import BinaryIO

import msgspec

from engine.interfaces.context import GrammarContext
from engine.interfaces.grammar import GrammarCompiler
from engine.process import wire
from engine.process.importing import import_object
from engine.types.errors import EngineError, InvalidRequestError

ALARM_SECONDS = 5.0
"""How long after its time limit a compilation ends by itself, where nobody has ended it."""
NICENESS = 5
"""Steps come before compilations."""


class CompilerStart(msgspec.Struct, frozen=True, kw_only=True):
    """The first message.

    Args:
        compiler: "package.module:Class" of a `GrammarCompiler`.
        vocab_size, vocabulary: of its context.
        seconds: of one compilation.
        memory_bytes: that compilations may take, beyond what the process has when it is ready.
    """

    compiler: str
    vocab_size: int
    vocabulary: list[bytes | None]
    seconds: float
    memory_bytes: int


class CompilerAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """To the start (neither is set), and to each source.

    Args:
        compiled: what the compiler gave.
        error: `EngineError.parts` of what it raised.
        memory: the memory limit was hit; the process ends.
    """

    compiled: bytes | None = None
    error: tuple[str, str, str, str] | None = None
    memory: bool = False


def main() -> int:
    """Compile until standard input ends. Returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a library that prints does not print into the answers
    sources = sys.stdin.buffer
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    with contextlib.suppress(Exception):  # what is wrong is told when it is built
        import_object(sys.argv[1])
    try:
        start = msgspec.msgpack.decode(wire.read_frame(sources), type=CompilerStart)
        try:
            compiler = _build(start)
        except EngineError as error:
            _send(answers, CompilerAnswer(error=error.parts))
            return 1
        _limit_memory(start.memory_bytes)
        _send(answers, CompilerAnswer())
        while True:
            source = wire.read_frame(sources)
            _alarm(start.seconds + ALARM_SECONDS)
            answer = _compile(compiler, source)
            _alarm(0.0)
            _send(answers, answer)
            if answer.memory:
                return 1
    except (EOFError, BrokenPipeError):
        return 0


def _build(start: CompilerStart) -> GrammarCompiler:
    context = GrammarContext(vocab_size=start.vocab_size, vocabulary=lambda: start.vocabulary)
    try:
        compiler: GrammarCompiler = import_object(start.compiler)(context)
    except EngineError:
        raise
    except Exception as error:
        raise EngineError(f"start the compiler {start.compiler}", f"{type(error).__name__}: {error}") from error
    return compiler


def _compile(compiler: GrammarCompiler, source: bytes) -> CompilerAnswer:
    try:
        return CompilerAnswer(compiled=compiler.compile(source))
    except MemoryError:
        return CompilerAnswer(memory=True)
    except EngineError as error:
        return CompilerAnswer(error=error.parts)
    except RecursionError:
        return CompilerAnswer(error=InvalidRequestError("compile structured_outputs", "it is nested too deeply").parts)
    except Exception as error:
        if "bad_alloc" in str(error):
            return CompilerAnswer(memory=True)
        found = f"{type(error).__name__}: {error}"
        return CompilerAnswer(error=EngineError("compile structured_outputs", found).parts)


def _send(answers: BinaryIO, answer: CompilerAnswer) -> None:
    wire.write_frame(answers, msgspec.msgpack.encode(answer))


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
    sys.exit(main())
