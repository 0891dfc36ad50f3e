"""The card of grammar `llguidance`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from engine.interfaces.grammar import GrammarCard
from engine.types.structured_outputs import StructuredOutputsParams


class LLGuidanceOptions(BaseModel):
    """Set as `--grammar.threads 4`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_whitespace: int = Field(16, ge=0, description="most spaces and line breaks in a row within JSON; 0: none")
    cache_size: int = Field(64, ge=0, description="MiB of compiled constraints that are kept, as estimated")
    threads: int = Field(2, ge=1, le=64, description="threads that fill the masks of a step")


class LLGuidanceCard(GrammarCard):
    """JSON schemas, any JSON, regular expressions, grammars (Lark or EBNF) and choices, by LLGuidance."""

    priority = 10
    rollback = True
    constraints = frozenset({"choice", "regex", "json", "json_object", "grammar"})
    Options = LLGuidanceOptions
    body = "engine_llguidance.body:LLGuidance"

    @classmethod
    def verify(cls, constraint: StructuredOutputsParams) -> None:
        """What else the library cannot enforce it says when it compiles."""
        if constraint.json is not None:
            from engine_kit.schemas.normal import in_normal_form
            from engine_llguidance.schemas import check_schema  # what knows schemas and patterns: not at every start

            with in_normal_form(constraint) as normal:
                check_schema(normal.schema)
