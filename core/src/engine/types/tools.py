"""Functions that a model may call, as a request offers them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class FunctionTool:
    """One function.

    Args:
        name: as the model calls it.
        description: what it does; may be empty.
        parameters: the JSON schema of its arguments, which are an object.
        strict: the arguments must follow the schema, by a constraint on what the model may write.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False
