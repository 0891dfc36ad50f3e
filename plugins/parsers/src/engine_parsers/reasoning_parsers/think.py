"""Thoughts between `<think>` and `</think>`."""

from __future__ import annotations

from engine.interfaces.context import FrontContext
from engine.interfaces.reasoning_parser import ReasoningDelta, ReasoningStream
from engine_kit.tool_text import begun

BEGIN, END = "<think>", "</think>"


class Qwen3Parser:
    """See `engine.interfaces.reasoning_parser.ReasoningParser`."""

    def __init__(self, context: FrontContext) -> None:
        pass

    def stream(self, prompt: str) -> ReasoningStream:
        return ThinkText("inside" if opened(prompt) else "before")


class DeepSeekR1Parser:
    """See `engine.interfaces.reasoning_parser.ReasoningParser`."""

    def __init__(self, context: FrontContext) -> None:
        pass

    def stream(self, prompt: str) -> ReasoningStream:
        return ThinkText("after" if prompt.rstrip().endswith(END) else "inside")


def opened(prompt: str) -> bool:
    """Whether the prompt ends inside thoughts: in the tag that opens them."""
    return prompt.rstrip().endswith(BEGIN)


class ThinkText:
    """One answer. White space beside the tags belongs to neither side.

    Args:
        place: "before" thoughts that may come, "inside" them, or "after" them.
    """

    def __init__(self, place: str) -> None:
        self._place = place
        self._tail = ""
        self._blank: list[str] = []
        self._fresh = True  # nothing but white space since the tag, or since the beginning
        self._reopened = False

    @property
    def thinking(self) -> bool:
        """See `ReasoningStream`."""
        return self._place == "inside"

    def push(self, text: str) -> ReasoningDelta:
        """See `ReasoningStream`."""
        text = self._tail + text
        self._tail = ""
        reasoning = ""
        if self._place == "before":
            text = self._before(text)
        if self._place == "inside":
            reasoning, text = self._inside(text)
        return ReasoningDelta(reasoning, self._after(text) if self._place in ("after", "answer") else "")

    def finish(self) -> ReasoningDelta:
        """See `ReasoningStream`."""
        rest = "".join(self._blank) + self._tail
        self._blank = []
        self._tail = ""
        if self._place == "inside":
            return ReasoningDelta(reasoning=rest if rest.strip() else "")
        return ReasoningDelta(content=rest if self._place != "after" or rest.strip() else "")

    def _before(self, text: str) -> str:
        """What comes after an opening tag, or all where none can come any more."""
        stripped = text.lstrip()
        if len(stripped) < len(text):
            self._blank.append(text[: len(text) - len(stripped)])
        if stripped.startswith(BEGIN):
            self._blank.clear()
            self._place = "inside"
            self._reopened = True
            return stripped[len(BEGIN) :]
        if BEGIN.startswith(stripped):
            self._tail = stripped
            return ""
        self._place = "answer"
        text = "".join(self._blank) + stripped
        self._blank.clear()
        return text

    def _inside(self, text: str) -> tuple[str, str]:
        """(thoughts, what comes after them)."""
        if self._fresh:
            text = text.lstrip()
            if not self._reopened and text.startswith(BEGIN):  # a model may write it although the prompt did
                text = text[len(BEGIN) :].lstrip()
                self._reopened = True
            elif not self._reopened and text and BEGIN.startswith(text):
                self._tail = text
                return "", ""
        end = text.find(END)
        thoughts = text[:end] if end >= 0 else text[: len(text) - begun(text, 0, (END,))]
        solid = thoughts.rstrip()
        told = ""
        if solid:
            told = "".join(self._blank) + solid
            self._blank.clear()
            self._fresh = False
        if end >= 0:
            self._blank.clear()
            self._place = "after"
            return told, text[end + len(END) :]
        if not self._fresh and len(solid) < len(thoughts):
            self._blank.append(thoughts[len(solid) :])
        self._tail = text[len(thoughts) :]
        return told, ""

    def _after(self, text: str) -> str:
        """The answer; the white space after the closing tag is none of it."""
        if self._place == "after":
            text = text.lstrip()
            if text:
                self._place = "answer"
        return text
