"""The card of grammar `outlines`."""

from __future__ import annotations

from pydantic import Field

from engine.interfaces.grammar import GrammarCard
from engine.types.structured_outputs import StructuredOutputsParams
from engine_kit.compiling import CompileOptions


class OutlinesOptions(CompileOptions):
    """Set as `--grammar.cache_size 64`."""

    max_whitespace: int = Field(1, ge=0, description="most spaces and line breaks in a row within JSON; 0: none")
    cache_size: int = Field(256, ge=0, description="MiB of automata that are kept")


class OutlinesCard(GrammarCard):
    """Regular expressions, choices, and JSON schemas without recursion, by Outlines."""

    rollback = True
    constraints = frozenset({"choice", "regex", "json"})
    Options = OutlinesOptions
    body = "engine_outlines.body:Outlines"

    @classmethod
    def verify(cls, constraint: StructuredOutputsParams) -> None:
        if constraint.json is not None:
            from engine_kit.schemas.normal import in_normal_form
            from engine_outlines.schemas import check_schema  # what knows schemas and patterns: not at every start

            with in_normal_form(constraint) as normal:
                check_schema(normal.schema)
