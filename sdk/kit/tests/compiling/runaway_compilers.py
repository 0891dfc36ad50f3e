"""A compiler for tests of the processes that run it: it does what its source says."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

from engine.interfaces.context import GrammarContext
from engine.types.errors import InvalidRequestError

if IMPORTED := os.environ.get("RUNAWAY_IMPORTED"):  # it tells who has imported it
    Path(IMPORTED).write_text(str(os.getpid()))
time.sleep(float(os.environ.get("RUNAWAY_IMPORTS_FOR", "0")))


class Runaway:
    """See `engine_kit.compiling.GrammarCompiler`."""

    def __init__(self, context: GrammarContext) -> None:
        self._pieces = context.vocabulary()

    def compile(self, source: bytes) -> bytes:
        what, _, rest = source.partition(b" ")
        match what:
            case b"echo":
                print("libraries print")
                return rest + b"|" + b"".join(piece or b"?" for piece in self._pieces)
            case b"pid":
                return str(os.getpid()).encode()
            case b"sleep":
                time.sleep(float(rest))
            case b"hold":  # a library that loops with the interpreter's lock in its hands
                ctypes.PyDLL(None).sleep(int(rest))
            case b"memory":
                return b"x" * (len(bytearray(int(rest))) // int(rest))
            case b"crash":
                os.abort() if rest == b"abort" else ctypes.string_at(0)
            case b"killed":  # as if by somebody else
                os.kill(os.getpid(), signal.SIGKILL)
            case b"leave":
                sys.exit(7)
            case b"deep":
                self._deep()
            case b"refuse":
                raise InvalidRequestError("structured_outputs.regex='('", "so it is")
            case b"fail":
                raise ZeroDivisionError("in the library")
        return b"done"

    def _deep(self) -> None:
        self._deep()


class Unbuildable:
    """A library that is not there."""

    def __init__(self, context: GrammarContext) -> None:
        raise ImportError("no such library")


class Dying:
    """A library that takes its process with it when it is built."""

    def __init__(self, context: GrammarContext) -> None:
        os._exit(5)


class Aborting:
    """A library that aborts when it is built, as C++ does over what nobody catches."""

    def __init__(self, context: GrammarContext) -> None:
        os.abort()
