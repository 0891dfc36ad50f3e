"""Tokenizers that adapters bring along: those of their folders, where these hold other files than the model's.

PEFT's folders often hold the tokenizer that an adapter was trained with: with tokens of its own and another chat
template, or just a copy of the model's, which is not read again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from engine.embedding import Launch
from engine.interfaces.tokenizer import Tokenizer, TokenizerCard, TokenizerNeed
from engine.types.errors import InvalidRequestError, TokenizerError, shown
from engine.types.request import Adapter
from engine_kit.tokenizer_files import tokenizer_hash

MOST = 64
"""Different ones at work; of more, those that were used longest ago are read again."""


class AdapterTokenizers:
    """By adapter its tokenizer. Safe to call from several threads: one reads files at a time, and those whose tokenizer
    is there do not wait for it.

    Args:
        card: of the model's tokenizer. build: makes a body of it for a folder.
        own: the model's, at work.
        plan: says where its files lie, and the size of the model's vocabulary.
    """

    def __init__(
        self, card: type[TokenizerCard], build: Callable[[str], Tokenizer], own: Tokenizer, plan: Launch
    ) -> None:
        self._card = card
        self._build = build
        self._own = own
        self._folder = plan.start.tokenizer_folder
        self._vocab_size = plan.model.vocab_size
        self._reading = threading.Lock()
        self._lock = threading.Lock()
        self._of_adapter: OrderedDict[str, str] = OrderedDict()
        self._made: OrderedDict[str, Tokenizer] = OrderedDict()

    def __call__(self, adapter: Adapter) -> Tokenizer:
        """The one in the adapter's folder; the model's where there is none, or a copy of it.

        Raises InvalidRequestError where it gives ids that the model has no place for, TokenizerError for broken files.
        """
        if (made := self._there(adapter)) is not None:
            return made
        with self._reading:
            if (made := self._there(adapter)) is not None:
                return made
            content = self._content(adapter.path)
            made = self._own
            if content and (made := self._made.get(content)) is None:
                made = self._checked(adapter)
                if self._content(adapter.path) != content:
                    found = "its files were changed while they were read"
                    raise TokenizerError(f"read the tokenizer of adapter {adapter.name!r}", found, "name it again")
            with self._lock:
                self._of_adapter[adapter.identity] = content
                if len(self._of_adapter) > 64 * MOST:
                    self._of_adapter.popitem(last=False)
                if content:
                    self._made[content] = made
                    self._made.move_to_end(content)
                    if len(self._made) > MOST:
                        self._made.popitem(last=False)
            return made

    def _there(self, adapter: Adapter) -> Tokenizer | None:
        """The one that has been read, as the last that was used."""
        with self._lock:
            content = self._of_adapter.get(adapter.identity)
            if content is None:
                return None
            self._of_adapter.move_to_end(adapter.identity)
            if content in self._made:
                self._made.move_to_end(content)
            return self._made.get(content) if content else self._own

    def _content(self, folder: str) -> str:
        """A hash of its files; "" where it has none, or the model's."""
        if self._card.unsupported(TokenizerNeed(folder=folder)):
            return ""
        try:
            found = tokenizer_hash(folder)
            return "" if found == tokenizer_hash(self._folder) else found
        except OSError as error:
            found = f"{error.filename}: {error.strerror}"
            raise TokenizerError(f"read the tokenizer in {shown(folder, 300)}", found, "make it readable") from error

    def _checked(self, adapter: Adapter) -> Tokenizer:
        made, most = self._build(adapter.path), max(self._vocab_size, self._own.vocab_size)
        if made.vocab_size > most:
            raise InvalidRequestError(
                f"use the tokenizer of adapter {adapter.name!r}, {shown(adapter.path, 300)}",
                f"its ids go to {made.vocab_size - 1}, and those of the model and its tokenizer to {most - 1}",
                "train it without tokens beyond the vocabulary, or take the tokenizer's files out of its folder",
            )
        return made
