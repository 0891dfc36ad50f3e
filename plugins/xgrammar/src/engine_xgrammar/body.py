"""The body of grammar `xgrammar`, until it is needed.

The library imports torch and transformers, which takes a second or two. Most engines are never asked for structured
outputs, so the first request that wants them has it imported, in the thread that compiles.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine_kit.compiling.processes import CompilerProcesses
from engine_kit.schemas.normal import in_normal_form

if TYPE_CHECKING:
    import numpy as np

    from engine.interfaces.context import GrammarContext
    from engine.interfaces.grammar import Matcher
    from engine.types.structured_outputs import StructuredOutputsParams
    from engine_xgrammar.work import Work


class XGrammar:
    """See `engine.interfaces.grammar.Grammar`."""

    def __init__(self, context: GrammarContext) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._compilers = CompilerProcesses("engine_xgrammar.compiler:Compiler", context)
        self._work: Work | None = None

    def compile(self, constraint: StructuredOutputsParams, end_token_ids: Sequence[int]) -> Matcher:
        with self._lock:
            if self._work is None:
                self._compilers.prepare()  # its process imports the library at the same time
                from engine_xgrammar.work import Work

                self._work = Work(self._context, self._compilers)
        with in_normal_form(constraint) as normal:
            return self._work.compile(normal, end_token_ids)

    def fill_masks(self, matchers: Sequence[Matcher], rows: np.ndarray, out: np.ndarray) -> None:
        assert self._work is not None, "whoever has a matcher has compiled"
        self._work.fill_masks(matchers, rows, out)

    def close(self) -> None:
        self._compilers.close()
