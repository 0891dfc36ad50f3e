"""The half of `outlines` that compiles: building an automaton takes time and memory that grow with all its states."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
from outlines_core import Index, Vocabulary, json_schema

from engine.types.errors import InvalidRequestError

if TYPE_CHECKING:
    from engine.interfaces.context import GrammarContext

MAX_COMPILED = 32_000_000
"""Bytes of an automaton as it travels; the core's process reads it in some 4 ms a megabyte."""


MARK = "\U0010ffff"
"""What stands behind every text, written by an id that was made up, `vocab_size`. The library drops what follows a
state where the text might also end, and the longer of two branches; with a mark no text ends before it. So that nobody
can write the mark itself, tokens with its first byte are left out: private characters beyond U+100000."""


NUMBER = r"((-)?(0|[1-9][0-9]*))(\.[0-9]+)?([eE][+-][0-9]+)?"
"""How the library writes numbers: with exponents of any size."""
PLAIN_NUMBER = NUMBER.replace("[+-][0-9]+", "[+-][0-9]{1,2}")


class OutlinesSource(msgspec.Struct, frozen=True):
    """What is to be compiled.

    Args:
        kind: field of `StructuredOutputsParams`.
        text: its value; a schema's and a choice's as JSON.
        max_whitespace: see `OutlinesOptions`.
    """

    kind: str
    text: str
    max_whitespace: int


class Compiler:
    """See `engine_kit.compiling.GrammarCompiler`."""

    def __init__(self, context: GrammarContext) -> None:
        self._vocabulary = vocabulary(context.vocabulary(), context.vocab_size)

    def compile(self, source: bytes) -> bytes:
        asked = msgspec.msgpack.decode(source, type=OutlinesSource)
        try:
            index = Index(f"(?:{_regex(asked)}){MARK}", self._vocabulary)
        except MemoryError:
            raise
        except Exception as error:
            found = " ".join(str(error).split())[:300]
            raise InvalidRequestError("compile structured_outputs", f"Outlines cannot compile it: {found}") from error
        _, (data,) = index.__reduce__()
        if len(data) > MAX_COMPILED:
            raise InvalidRequestError(
                "compile structured_outputs",
                f"its automaton has {len(data) >> 20} MiB; at most {MAX_COMPILED >> 20} are taken",
                "ask for something simpler",
            )
        return bytes(data)


def vocabulary(pieces: Sequence[bytes | None], vocab_size: int) -> Vocabulary:
    """The ids of each piece, with that of the mark, and the end that the library wants: requests differ in theirs."""
    mark = MARK.encode()
    ids = {mark: [vocab_size]}
    for token, piece in enumerate(pieces[:vocab_size]):
        if piece and mark[0] not in piece:
            ids.setdefault(piece, []).append(token)
    return Vocabulary(vocab_size + 1, ids)


def _regex(asked: OutlinesSource) -> str:
    if asked.kind == "json":
        space = f"[\\n ]{{0,{asked.max_whitespace}}}" if asked.max_whitespace else ""
        return str(json_schema.build_regex_from_schema(asked.text, space)).replace(NUMBER, PLAIN_NUMBER)
    if asked.kind == "choice":
        return "|".join(f"({re.escape(text)})" for text in json.loads(asked.text))
    text = asked.text.removeprefix("^")
    odd = (len(text[:-1]) - len(text[:-1].rstrip("\\"))) % 2
    return text[:-1] if text.endswith("$") and not odd else text
