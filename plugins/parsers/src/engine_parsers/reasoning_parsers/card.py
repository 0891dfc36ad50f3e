"""The cards of the reasoning parsers."""

from __future__ import annotations

from engine.interfaces.reasoning_parser import ReasoningParserCard, ReasoningParserNeed


class DeepSeekR1(ReasoningParserCard):
    """Thoughts come first and end in `</think>`: DeepSeek R1 and V3.1. What has no such end is all thoughts, unless the
    prompt itself closed them."""

    body = "engine_parsers.reasoning_parsers.think:DeepSeekR1Parser"
    begin, end = "<think>", "</think>"
    priority = 10

    @classmethod
    def recognises(cls, need: ReasoningParserNeed) -> bool:
        """The template has the end tag, and DeepSeek's token for the assistant."""
        return "</think>" in need.chat_template and "<｜Assistant｜>" in need.chat_template


class Qwen3(ReasoningParserCard):
    """Thoughts stand between `<think>` and `</think>`, where there are any: Qwen 3, QwQ and others. The prompt may open
    them, or close them."""

    body = "engine_parsers.reasoning_parsers.think:Qwen3Parser"
    begin, end = "<think>", "</think>"

    @classmethod
    def recognises(cls, need: ReasoningParserNeed) -> bool:
        """The template has the end tag."""
        return "</think>" in need.chat_template
