"""Compiling constraints in processes that have limits and can be killed: a driver's options and its compiler.

A constraint comes from a stranger, and compiling it is code of a library that may run for hours, take all memory, or
crash. In a thread of the core's that could not be ended. A driver whose library is like that divides itself: the half
that compiles is a `GrammarCompiler`, and its body makes `engine_kit.compiling.processes.CompilerProcesses` of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    from engine.interfaces.context import GrammarContext


class CompileOptions(BaseModel):
    """The limits that a user may set, as `--grammar.compile_timeout 5`. A driver's `Options` add to them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    compile_timeout: float = Field(10.0, gt=0, description="seconds after which a compilation is ended")
    compile_memory: int = Field(1024, ge=64, description="MiB that a compilation may take")
    compile_processes: int = Field(
        2,
        ge=0,
        le=64,
        description="most compilations at once; 0: in the engine core's process, unlimited",
    )


class GrammarCompiler(Protocol):
    """The half of a driver that compiles, in a process of its own: what goes in and comes out travels as bytes.

    Built with a `GrammarContext` without options, whose `vocabulary` is at hand. It is killed without warning.
    """

    def __init__(self, context: GrammarContext) -> None: ...

    def compile(self, source: bytes) -> bytes:
        """What the body sent, compiled. One call at a time. Raises InvalidRequestError, which reaches the body."""
        ...
