"""`response_format`: OpenAI's words for a constraint on the answer."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

from pydantic import Field, model_validator

from engine.types.structured_outputs import StructuredOutputsParams
from engine_server.body_model import Body

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


class JSONSchema(Body):
    """What `json_schema` holds.

    Args:
        name, description: for the model's maker; the schema is enforced whatever they are.
        schema: the schema; without one, any JSON object.
        strict: taken, and the schema is enforced with and without it: what cannot be enforced is refused.
    """

    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _name_fits(self) -> JSONSchema:
        if not _NAME.fullmatch(self.name):
            raise ValueError("the name must be 1 to 64 of the characters a-z, A-Z, 0-9, _ and -")
        return self


class ResponseFormat(Body):
    """What the answer must be.

    Args:
        type: free text, some JSON object, JSON of a schema, or (XGrammar's and vLLM's) a structural tag.
        json_schema: with the type of that name.
        format: of a structural tag; structures, triggers: of one in its older form.
    """

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JSONSchema | None = None
    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None

    @model_validator(mode="after")
    def _parts_fit(self) -> ResponseFormat:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise ValueError("json_schema and the type of that name go together")
        parts = {"format": self.format, "structures": self.structures, "triggers": self.triggers}
        given = [name for name, part in parts.items() if part is not None]
        if self.type != "structural_tag" and given:
            raise ValueError(f"{given[0]} goes with the type structural_tag")
        if self.type == "structural_tag" and given not in (["format"], ["structures", "triggers"]):
            raise ValueError("a structural_tag has a format, or structures and triggers")
        return self

    def constraint(self) -> StructuredOutputsParams | None:
        """The same for the engine; None for free text."""
        match self.type:
            case "text":
                return None
            case "json_schema" if self.json_schema is not None and self.json_schema.schema_ is not None:
                return StructuredOutputsParams(json=self.json_schema.schema_, asked_as="response_format")
            case "structural_tag":
                tag = json.dumps(self.model_dump(exclude_none=True))
                return StructuredOutputsParams(structural_tag=tag, asked_as="response_format")
        return StructuredOutputsParams(json_object=True, asked_as="response_format")
