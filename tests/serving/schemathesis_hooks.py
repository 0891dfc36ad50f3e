"""What schemathesis makes up is kept small: each of its cases is to end soon."""

from __future__ import annotations

from typing import Any

import schemathesis

MOST = {"max_tokens": 4, "max_completion_tokens": 4, "max_output_tokens": 4, "n": 3, "best_of": 3, "min_tokens": 4}


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Large numbers become small ones; what is none, or is negative, stays as it is."""
    if isinstance(case.body, dict):
        for name, most in MOST.items():
            if type(given := case.body.get(name)) is int and given > most:
                case.body[name] = most
