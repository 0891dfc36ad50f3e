"""`outlines` through the suite of engine-sdk."""

import pytest

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")

from engine_sdk.conformance import GrammarConformance


class TestOutlines(GrammarConformance):
    driver, options = "outlines", {"compile_processes": 0}
