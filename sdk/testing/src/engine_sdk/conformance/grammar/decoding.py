"""What a text that was written stands for."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn


def decoded(text: str) -> Any:
    """What a JSON text stands for. Raises ValueError for what is no JSON, and for what readers do not agree on: half of
    a surrogate pair, a number beyond those of 64 bits."""
    value = json.loads(text, parse_constant=_no_json, parse_float=_finite)
    json.dumps(value, ensure_ascii=False).encode()  # raises UnicodeEncodeError, a ValueError
    return value


def _no_json(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is beyond the numbers of 64 bits")
    return value
