"""The parsers of what models write, through the suites of engine-sdk."""

import pytest

pytest.importorskip("engine_sdk", reason="engine-sdk is not installed")

from engine_sdk.conformance import ReasoningParserConformance, ToolParserConformance


class TestHermes(ToolParserConformance):
    driver = "hermes"


class TestLlama3Json(ToolParserConformance):
    driver = "llama3_json"


class TestMistral(ToolParserConformance):
    driver = "mistral"


class TestQwen(ToolParserConformance):
    driver = "qwen"


class TestPythonic(ToolParserConformance):
    driver = "pythonic"


class TestDeepSeek(ToolParserConformance):
    driver = "deepseek"


class TestDeepSeekR1(ReasoningParserConformance):
    driver = "deepseek_r1"


class TestQwen3(ReasoningParserConformance):
    driver = "qwen3"
