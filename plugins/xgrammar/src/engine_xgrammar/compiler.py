"""The half of `xgrammar` that compiles, in a process that may be killed."""

from __future__ import annotations

import json
import re
import time
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import xgrammar as xgr

from engine.types.errors import InvalidRequestError
from engine_xgrammar.mending import mended, without_surrogates
from engine_xgrammar.tags import with_whitespace
from engine_xgrammar.vocabulary import Vocabulary
from engine_xgrammar.warnings import listening

if TYPE_CHECKING:
    from engine.interfaces.context import GrammarContext

MAX_COMPILED = 16_000_000
"""Bytes of a compiled constraint as it travels; the core's process reads it in some 15 ms a megabyte."""
SLOWEST_MASK = 0.05
"""Seconds of processor time. A constraint with a slower mask than this would hold up all requests, so it is refused."""
WALKS, STEPS, WALK_SECONDS = 6, 48, 1.5
"""How its masks are tried: so many texts of so many tokens, for so long at most."""
_PLACE = re.compile(r"^(?:\[[\d:]+\] )?\S*?\.(?:cc|h):\d+: ")


class GrammarSource(msgspec.Struct, frozen=True):
    """What is to be compiled.

    Args:
        kind: field of `StructuredOutputsParams`.
        text: its value; a schema's and a choice's as JSON.
        max_whitespace: see `XGrammarOptions`.
        rules: what stands for the patterns in it, see `mending`.
    """

    kind: str
    text: str
    max_whitespace: int = 16
    rules: list[str] = []


class Compiler:
    """See `engine_kit.compiling.GrammarCompiler`."""

    def __init__(self, context: GrammarContext) -> None:
        self._vocabulary = Vocabulary(context.vocabulary(), context.vocab_size)
        self._vocab_size = context.vocab_size
        self._compilers = {
            kind: xgr.GrammarCompiler(self._vocabulary.of(kind), max_threads=1, cache_enabled=False)
            for kind in ("json", "grammar")
        }

    def compile(self, source: bytes) -> bytes:
        asked = msgspec.msgpack.decode(source, type=GrammarSource)
        try:
            with listening() as warnings:
                compiled = self._compile(asked)
            if warnings:
                raise ValueError(warnings[0])
        except MemoryError:
            raise
        except Exception as error:
            if "bad_alloc" in str(error):
                raise MemoryError from error
            found = _PLACE.sub("", str(error).strip().splitlines()[-1]) if str(error) else type(error).__name__
            raise InvalidRequestError("compile structured_outputs", f"XGrammar cannot compile it: {found}") from error
        self._try(compiled)
        data = compiled.serialize_json().encode()
        if len(data) > MAX_COMPILED:
            raise InvalidRequestError(
                "compile structured_outputs",
                f"compiled it has {len(data) >> 20} MiB; at most {MAX_COMPILED >> 20} are taken",
                "ask for something simpler",
            )
        return data

    def _compile(self, asked: GrammarSource) -> xgr.CompiledGrammar:
        json_compiler, compiler = self._compilers["json"], self._compilers["grammar"]
        most = asked.max_whitespace
        layout = {"any_whitespace": most > 0, "max_whitespace_cnt": most or None}
        match asked.kind:
            case "json" | "json_object":
                schema = asked.text if asked.kind == "json" else '{"type":"object"}'
                return json_compiler.compile_grammar(
                    mended(str(xgr.Grammar.from_json_schema(schema, **layout)), asked.rules)
                )
            case "regex":
                return compiler.compile_grammar(f"root ::= {asked.text}")
            case "choice":
                texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in json.loads(asked.text))
                return compiler.compile_grammar(f"root ::= {texts}")
            case "grammar":
                return compiler.compile_grammar(without_surrogates(str(xgr.Grammar.from_ebnf(asked.text))))
            case _:
                tag = json.dumps(with_whitespace(json.loads(asked.text), most))
                return compiler.compile_grammar(mended(str(xgr.Grammar.from_structural_tag(tag)), asked.rules))

    def _try(self, compiled: xgr.CompiledGrammar) -> None:
        """Write some texts under it and look how long the masks take: that is where XGrammar does what it put off."""
        row = np.empty((1, -(-self._vocab_size // 32)), np.int32)
        random, until = np.random.default_rng(0), time.thread_time() + WALK_SECONDS
        for _ in range(WALKS):
            matcher = xgr.GrammarMatcher(compiled)
            for _ in range(STEPS):
                began = time.thread_time()
                matcher.fill_next_token_bitmask(row)
                if time.thread_time() - began > SLOWEST_MASK:
                    raise InvalidRequestError(
                        "compile structured_outputs",
                        f"a mask under it takes more than the {SLOWEST_MASK * 1000:g} ms that one may take",
                        "ask for something simpler: fewer or smaller repetitions within repetitions",
                    )
                bits = np.unpackbits(row.view(np.uint8)[0], bitorder="little")[: self._vocab_size]
                allowed = np.flatnonzero(bits)
                if not allowed.size and not matcher.is_completed():
                    raise InvalidRequestError(
                        "compile structured_outputs",
                        "texts under it come to where nothing may follow, and are not complete",
                    )
                if not allowed.size or time.thread_time() > until:
                    break
                matcher.accept_token(int(random.choice(allowed)))
