"""`prefix` through the suite of engine-sdk."""

import pytest

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")

from engine_sdk.conformance import EvictorConformance


class TestPrefix(EvictorConformance):
    driver = "prefix"


class TestAgeAlone(EvictorConformance):
    quick = r"^(?!test_(any_|many_turns))"  # long, and the same code as above
    driver, options = "prefix", {"share_weight": 0.0}
