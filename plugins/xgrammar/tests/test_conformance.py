"""`xgrammar` through the suite of engine-sdk."""

import pytest

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")

from engine_sdk.conformance import GrammarConformance


class TestXGrammar(GrammarConformance):
    driver, options = "xgrammar", {"compile_processes": 0}


class TestThreads(GrammarConformance):
    driver, options = "xgrammar", {"compile_processes": 0, "threads": 2, "cache_size": 0, "max_whitespace": 0}
