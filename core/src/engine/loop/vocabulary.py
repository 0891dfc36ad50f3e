"""The bytes of each token, in the engine core's process, for grammars. The core needs no tokenizer otherwise, so it is
built when the first constraint is compiled, by the thread that compiles it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.interfaces.context import FrontContext
from engine.plugin import Registry
from engine.plugin.manifest import restore_choice

if TYPE_CHECKING:
    from engine.interfaces.tokenizer import Tokenizer
    from engine.types.start import CoreStart


class Vocabulary:
    """What `GrammarContext.vocabulary` is. Thread-safe.

    Args:
        start: what names the tokenizer, and says where its files lie.
        registry: what is installed.
    """

    def __init__(self, start: CoreStart, registry: Registry) -> None:
        self._start = start
        self._registry = registry
        self._lock = threading.Lock()
        self._pieces: Sequence[bytes | None] | None = None
        self._built: Tokenizer | None = None

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without special tokens. Raises TokenizerError."""
        with self._lock:
            if self._built is None:
                self._built = self._tokenizer()
        return self._built.encode(text, False)

    def __call__(self) -> Sequence[bytes | None]:
        """The vocabulary; see `Tokenizer.vocabulary`. Raises TokenizerError."""
        with self._lock:
            if self._pieces is None:
                if self._built is None:
                    self._built = self._tokenizer()
                self._pieces = self._built.vocabulary()
            return self._pieces

    def _tokenizer(self) -> Tokenizer:
        worker = self._start.worker
        (choice,) = (choice for choice in worker.choices if choice.point == "tokenizer")
        chosen = restore_choice(self._registry, choice)
        context = FrontContext(
            folder=self._start.tokenizer_folder, files=worker.files, model=worker.model, options=chosen.options
        )
        tokenizer: Tokenizer = chosen.build(context)
        return tokenizer
