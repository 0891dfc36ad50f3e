"""`xgrammar` through the suite of engine-sdk."""

import pytest

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")

from engine_sdk.conformance import GrammarConformance


class TestXGrammar(GrammarConformance):
    driver, options = "xgrammar", {"compile_processes": 0}


class TestThreads(GrammarConformance):
    """Every constraint is compiled again and again here: in the quick tests, that threads fill the same masks."""

    quick = r"card|body|masks_and_matchers_agree\[json-p"
    driver, options = "xgrammar", {"compile_processes": 0, "threads": 2, "cache_size": 0, "max_whitespace": 0}
