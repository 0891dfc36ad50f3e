"""The card of grammar `xgrammar`."""

from __future__ import annotations

from pydantic import Field

from engine.interfaces.grammar import GrammarCard
from engine.types.structured_outputs import StructuredOutputsParams
from engine_kit.compiling import CompileOptions


class XGrammarOptions(CompileOptions):
    """Set as `--grammar.max_whitespace 0`."""

    max_whitespace: int = Field(
        16, ge=0, description="most spaces and line breaks in a row within JSON; 0: in one line, as `json.dumps` writes"
    )
    cache_size: int = Field(256, ge=0, description="MiB of compiled constraints that are kept")
    threads: int = Field(
        1, ge=1, le=64, description="threads that fill the masks of a step; several pay for wide batches"
    )


class XGrammarCard(GrammarCard):
    """JSON schemas, any JSON, regular expressions, grammars (EBNF), choices and structural tags, by XGrammar."""

    priority = 20
    rollback = True
    constraints = frozenset({"choice", "regex", "json", "json_object", "grammar", "structural_tag"})
    Options = XGrammarOptions
    body = "engine_xgrammar.body:XGrammar"

    @classmethod
    def verify(cls, constraint: StructuredOutputsParams) -> None:
        from engine_kit.schemas.normal import in_normal_form
        from engine_xgrammar.checks import check  # what knows schemas and patterns: not at every start

        with in_normal_form(constraint) as normal:
            check(normal)
