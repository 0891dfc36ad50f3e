"""What a request to the server leaves open is the model's."""

from __future__ import annotations

from engine.types.params import SamplingDefaults
from engine_server.state import over_defaults


def test_a_request_goes_before_them() -> None:
    defaults = SamplingDefaults(params={"temperature": 0.6, "max_tokens": 8})
    assert over_defaults(defaults, {"temperature": 1.0, "seed": 1}, 100) == {
        "temperature": 1.0,
        "seed": 1,
        "max_tokens": 100,
    }
    assert over_defaults(defaults, {}, None) == {"temperature": 0.6, "max_tokens": 8}
    limited = SamplingDefaults(params={"max_tokens": 8}, max_tokens_limit=8)
    assert [over_defaults(limited, {}, asked)["max_tokens"] for asked in (None, 100, 3, 0)] == [8, 8, 3, 0]
