"""Documents to tokens, through the very template that the served model uses.

Training on anything but the served rendering would teach a prompt that nobody ever sends.
"""

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jinja2
import numpy as np
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from engine_tiny import model_folder
from engine_tiny.corpus.base import Document, Message
from engine_tiny.layout import BOS, EOS, IM_END, IM_START, TOKEN_IDS

ASSISTANT_HEADER = f"{IM_START}assistant\n"


@lru_cache(maxsize=1)
def _template() -> jinja2.Template:
    """The environment that Hugging Face renders chat templates in."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string((model_folder() / "chat_template.jinja").read_text())


def render(
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]] | None = None,
    *,
    add_generation_prompt: bool = False,
) -> str:
    return _template().render(
        messages=messages,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        bos_token=BOS,
        eos_token=IM_END,
    )


def document_text(document: Document) -> str:
    return f"{BOS}{document.text}{EOS}" if document.text else render(document.messages, document.tools)


class Encoder:
    """Token ids of a document, and which of them the model is asked to predict."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._header = tuple(tokenizer.encode(ASSISTANT_HEADER, add_special_tokens=False).ids)

    def prompt(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None = None) -> list[int]:
        text = render(messages, tools, add_generation_prompt=True)
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def assistant_spans(self, ids: Sequence[int]) -> list[tuple[int, int]]:
        """Each assistant turn, from its first token to behind the <|im_end|> that closes it."""
        spans, at, size = [], 0, len(self._header)
        while at < len(ids):
            if ids[at] == self._header[0] and tuple(ids[at : at + size]) == self._header:
                end = at + size
                while end < len(ids) and ids[end] != TOKEN_IDS[IM_END]:
                    end += 1
                spans.append((at + size, min(end + 1, len(ids))))
                at = end
            at += 1
        return spans

    def document(self, document: Document) -> tuple[list[int], np.ndarray]:
        """Ids and targets: of a story every token is one, of a conversation what the assistant says."""
        ids = self.tokenizer.encode(document_text(document), add_special_tokens=False).ids
        targets = np.zeros(len(ids), dtype=bool)
        if document.text:
            targets[1:] = True
        for start, end in self.assistant_spans(ids):
            targets[start:end] = True
        return ids, targets
