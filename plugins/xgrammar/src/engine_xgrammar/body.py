"""The body of grammar `xgrammar`, until it is needed.

The library imports torch and transformers, which takes a second or two. Most engines are never asked for structured
outputs, so the first request that wants them has it imported, in the thread that compiles.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from engine.types.errors import EngineError
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
        self._work: Work | None = None

    def compile(self, constraint: StructuredOutputsParams, end_token_ids: Sequence[int]) -> Matcher:
        with self._lock:
            if self._work is None:
                if self._context.compile_apart is not None:  # its process imports the library at the same time
                    threading.Thread(target=_begin, args=(self._context.compile_apart,), daemon=True).start()
                from engine_xgrammar.work import Work

                self._work = Work(self._context)
        with in_normal_form(constraint) as normal:
            return self._work.compile(normal, end_token_ids)

    def fill_masks(self, matchers: Sequence[Matcher], rows: np.ndarray, out: np.ndarray) -> None:
        assert self._work is not None, "whoever has a matcher has compiled"
        self._work.fill_masks(matchers, rows, out)


def _begin(compile_apart: Callable[[bytes], bytes]) -> None:
    """Have a process started, with the least that it can be asked."""
    with contextlib.suppress(EngineError):
        compile_apart(msgspec.msgpack.encode({"kind": "regex", "text": "[a]"}))
