"""What the bodies of all requests have in common: what is not named in a model is refused by name, never ignored."""

from __future__ import annotations

import functools
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from engine.plugin.hints import did_you_mean


@functools.cache
def _names(model: type[BaseModel]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in model.model_fields.items())


class Body(BaseModel):
    """Strict types, no unknown keys. A key whose value is null counts as absent, as OpenAI's server has it."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _known_and_set(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        known = _names(cls)
        for name in data:
            if name not in known:
                shown = str(name)[:64]
                hint = did_you_mean(shown, known) or "leave it out"
                message = "the parameter '{name}' is not supported by this server; {hint}"
                raise PydanticCustomError("unsupported_parameter", message, {"name": shown, "hint": hint})
        return {key: value for key, value in data.items() if value is not None}
