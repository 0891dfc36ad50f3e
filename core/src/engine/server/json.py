"""JSON answers by orjson."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.responses import Response


class JSON(Response):
    """A body of plain data."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The body's bytes."""
        return orjson.dumps(content)
