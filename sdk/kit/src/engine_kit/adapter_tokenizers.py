"""Tokenizers that adapters bring along: those of their folders, where these hold other files than the model's.

PEFT's folders often hold the tokenizer that an adapter was trained with: with tokens of its own and another chat
template, or just a copy of the model's, which is not read again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from engine.embedding import Launch
from engine.interfaces.tokenizer import Tokenizer, TokenizerCard, TokenizerNeed
from engine.types.errors import InvalidRequestError, shown
from engine.types.request import Adapter

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
"""What says how a text becomes tokens and a conversation a text."""
TEMPLATES = ("additional_chat_templates", "chat_templates")
MOST = 64
"""Different ones at work; of more, those that were used longest ago are read again."""


class AdapterTokenizers:
    """By adapter its tokenizer. Safe to call from several threads.

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
        self._lock = threading.Lock()
        self._of_adapter: OrderedDict[str, str] = OrderedDict()
        self._made: OrderedDict[str, Tokenizer] = OrderedDict()

    def __call__(self, adapter: Adapter) -> Tokenizer:
        """The one in the adapter's folder; the model's where there is none, or a copy of it.

        Raises InvalidRequestError where it gives ids that the model has no place for, TokenizerError for broken files.
        """
        with self._lock:
            content = self._of_adapter.get(adapter.identity)
            if content is None:
                content = self._content(adapter.path)
                self._of_adapter[adapter.identity] = content
                if len(self._of_adapter) > 64 * MOST:
                    self._of_adapter.popitem(last=False)
            if not content:
                return self._own
            if (made := self._made.get(content)) is None:
                made = self._made[content] = self._checked(adapter)
                if len(self._made) > MOST:
                    self._made.popitem(last=False)
            self._made.move_to_end(content)
            return made

    def _content(self, folder: str) -> str:
        """A hash of its files; "" where it has none, or the model's."""
        if self._card.unsupported(TokenizerNeed(folder=folder)):
            return ""
        found = _hash(folder)
        return "" if found == _hash(self._folder) else found

    def _checked(self, adapter: Adapter) -> Tokenizer:
        made = self._build(adapter.path)
        if made.vocab_size > max(self._vocab_size, self._own.vocab_size):
            raise InvalidRequestError(
                f"use the tokenizer of adapter {adapter.name!r}, {shown(adapter.path, 300)}",
                f"its ids go to {made.vocab_size - 1}, and the model's vocabulary ends at {self._vocab_size - 1}",
                "train it without tokens beyond the vocabulary, or take the tokenizer's files out of its folder",
            )
        return made


def _hash(folder: str) -> str:
    """Of the files of a tokenizer, and of their names."""
    found = sha256()
    more = [path for name in TEMPLATES for path in sorted(Path(folder, name).glob("*.jinja"))]
    for path in (*(Path(folder, name) for name in FILES), *more):
        if path.is_file():
            found.update(path.name.encode() + b"\0" + sha256(path.read_bytes()).digest())
    return found.hexdigest()
