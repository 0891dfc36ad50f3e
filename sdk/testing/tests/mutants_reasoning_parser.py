"""Reasoning parsers with one planted fault each, in the place of the body of `qwen3`."""

from __future__ import annotations

from typing import Any

from mutant_suites import suites_of

from engine.interfaces.reasoning_parser import ReasoningDelta
from engine_parsers.reasoning_parsers.think import END, Qwen3Parser, ThinkText, opened
from engine_sdk.conformance import ReasoningParserConformance


def parser(text: type) -> Any:
    """The body's method that makes a stream of this class."""
    return lambda self, prompt: text("inside" if opened(prompt) else "before")


class LeaksHalfMarks(Qwen3Parser):
    """half a mark at the end of a piece is told"""

    class Text(ThinkText):
        def push(self, text: str) -> ReasoningDelta:
            told = super().push(text)
            tail, self._tail = self._tail, ""
            return told._replace(reasoning=told.reasoning + tail) if tail else told

    stream = parser(Text)


class IgnoresThePrompt(Qwen3Parser):
    """what the prompt has opened is not looked at"""

    def stream(self, prompt: str) -> Any:
        return ThinkText("before")


class AlwaysThinks(Qwen3Parser):
    """thoughts come first, whatever the prompt has closed"""

    def stream(self, prompt: str) -> Any:
        return ThinkText("inside")


class DropsTheEnd(Qwen3Parser):
    """what is held back at the end of the text is forgotten"""

    class Text(ThinkText):
        def finish(self) -> ReasoningDelta:
            return ReasoningDelta()

    stream = parser(Text)


class KeepsWhiteSpace(Qwen3Parser):
    """the white space after the mark is told as answer"""

    class Text(ThinkText):
        def _after(self, text: str) -> str:
            self._place = "answer" if text else self._place
            return text

    stream = parser(Text)


class ThinksAgain(Qwen3Parser):
    """a mark in the answer opens thoughts again"""

    class Text(ThinkText):
        def push(self, text: str) -> ReasoningDelta:
            told = super().push(text)
            if "<think>" in told.content:
                before, _, after = told.content.partition("<think>")
                self._place = "inside"
                self._fresh = False
                return ReasoningDelta(told.reasoning + after, before)
            return told

    stream = parser(Text)


class EndsAtTheLastMark(Qwen3Parser):
    """every end mark ends thoughts: the last in a piece counts"""

    class Text(ThinkText):
        def push(self, text: str) -> ReasoningDelta:
            head, mark, tail = text.rpartition(END)
            return super().push(head.replace(END, "") + mark + tail)

    stream = parser(Text)


class OneForAll(Qwen3Parser):
    """all answers share one stream"""

    _stream: Any = None

    def stream(self, prompt: str) -> Any:
        self._stream = self._stream or super().stream(prompt)
        return self._stream


class ReadsAllAgain(Qwen3Parser):
    """with each piece the whole text is searched again"""

    class Text(ThinkText):
        _all = ""

        def push(self, text: str) -> ReasoningDelta:
            self._all += text
            return super().push(text if self._all.count(END) >= 0 else "")

    stream = parser(Text)


class SaysItThinksForEver(Qwen3Parser):
    """thinking stays true in the answer"""

    class Text(ThinkText):
        @property
        def thinking(self) -> bool:
            return self._place != "before"

    stream = parser(Text)


MUTANTS = [
    LeaksHalfMarks, IgnoresThePrompt, AlwaysThinks, DropsTheEnd, KeepsWhiteSpace, ThinksAgain, EndsAtTheLastMark,
    OneForAll, ReadsAllAgain, SaysItThinksForEver,
]  # fmt: skip

globals().update(suites_of(ReasoningParserConformance, "qwen3", MUTANTS))
