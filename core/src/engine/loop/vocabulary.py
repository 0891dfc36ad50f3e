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
    from engine.types.start import Choice, CoreStart


class Vocabulary:
    """What `GrammarContext.vocabulary` is. Thread-safe.

    Args:
        choice: the manifest's tokenizer.
        start: where its files lie.
        registry: what is installed.
    """

    def __init__(self, choice: Choice, start: CoreStart, registry: Registry) -> None:
        self._choice, self._start, self._registry = choice, start, registry
        self._lock = threading.Lock()
        self._pieces: Sequence[bytes | None] | None = None

    def __call__(self) -> Sequence[bytes | None]:
        """The vocabulary; see `Tokenizer.vocabulary`. Raises TokenizerError."""
        with self._lock:
            if self._pieces is None:
                self._pieces = self._tokenizer().vocabulary()
            return self._pieces

    def _tokenizer(self) -> Tokenizer:
        chosen = restore_choice(self._registry, self._choice)
        worker = self._start.worker
        context = FrontContext(
            folder=self._start.tokenizer_folder, files=worker.files, model=worker.model, options=chosen.options
        )
        tokenizer: Tokenizer = chosen.build(context)
        return tokenizer
