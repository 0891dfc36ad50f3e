"""`llguidance` through the suite of engine-sdk."""

import pytest

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")

from engine_sdk.conformance import GrammarConformance


class TestLLGuidance(GrammarConformance):
    driver = "llguidance"


class TestOneThread(GrammarConformance):
    """In the quick tests, that one thread fills the same masks."""

    quick = r"card|body|masks_and_matchers_agree\[json-p"
    driver, options = "llguidance", {"threads": 1, "cache_size": 0, "max_whitespace": 0}
