"""One completion, read whole or as it comes: thoughts, content and calls told apart; and as a row of blocks in their
order, as the answers of `/v1/messages` and `/v1/responses` have them."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from engine.interfaces.reasoning_parser import ReasoningDelta, ReasoningStream
from engine.interfaces.tool_parser import BrokenCall, ToolCallDelta, ToolEvent, ToolStream


class Reading(NamedTuple):
    """What more of a text adds: to the thoughts, then to the answer, as the tool parser tells it."""

    thoughts: str
    events: list[ToolEvent]


class CompletionReader:
    """Reads one completion.

    Args:
        reasoning: divides thoughts from the answer; None: there are no thoughts.
        tools: finds calls in the answer; None: there are no calls.
        parallel: False: of several calls only the first is told, the others are left out.
    """

    def __init__(self, reasoning: ReasoningStream | None, tools: ToolStream | None, parallel: bool = True) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._parallel = parallel

    @property
    def has_thoughts(self) -> bool:
        """Whether thoughts are told apart."""
        return self._reasoning is not None

    def push(self, text: str, finished: bool) -> Reading:
        """Read more of the text. Call it once with `finished`."""
        parts = [ReasoningDelta(content=text)] if self._reasoning is None else [self._reasoning.push(text)]
        if finished and self._reasoning is not None:
            parts.append(self._reasoning.finish())
        answer = "".join(part.content for part in parts)
        events: list[ToolEvent] = [answer] if answer else []
        if self._tools is not None:
            events = list(self._allowed(self._tools.push(answer)))
            if finished:
                events += self._allowed(self._tools.finish())
        return Reading("".join(part.reasoning for part in parts), events)

    def _allowed(self, events: Iterable[ToolEvent]) -> Iterable[ToolEvent]:
        if self._parallel:
            return events
        return [event for event in events if not isinstance(event, ToolCallDelta) or event.call == 0]


def new_id(prefix: str = "call_") -> str:
    """An id for a part of an answer, e.g. a call's, in OpenAI's form."""
    return f"{prefix}{uuid.uuid4().hex[:24]}"


@dataclass
class Block:
    """One of them, as far as it has come.

    Args:
        kind: what it is.
        index: its place in the row.
        name: of the function that a call calls.
        call_id: in a call, where the model's form has ids; else "".
        pieces: all text so far; of a call, the JSON of its arguments.
        complete: it has come to its end: False of a call that was cut off.
    """

    kind: Literal["thoughts", "text", "call"]
    index: int
    name: str = ""
    call_id: str = ""
    pieces: list[str] = field(default_factory=list)
    complete: bool = False

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self.pieces)


class BlockNews(NamedTuple):
    """News of a block. Each starts, grows and stops before the next one starts."""

    step: Literal["start", "more", "stop"]
    block: Block
    text: str = ""


class Blocks:
    """Makes blocks of what `reader` tells. White space alone makes no block beside a call: models write line breaks
    around calls.

    Attributes:
        row: all blocks that have started.
    """

    def __init__(self, reader: CompletionReader) -> None:
        self._reader = reader
        self.row: list[Block] = []
        self._open: Block | None = None
        self._held: list[str] = []
        self._broken = False

    @property
    def called(self) -> bool:
        """Whether calls are what it ended with: there are some, and all of them are whole."""
        return not self._broken and any(block.kind == "call" and block.complete for block in self.row)

    def whole(self, text: str) -> list[Block]:
        """The row of a whole text. Calls that broke are text, as the model wrote them."""
        reading = self._reader.push(text, finished=True)
        broken = {event.call for event in reading.events if isinstance(event, BrokenCall)}
        events: list[ToolEvent] = []
        for event in reading.events:
            if isinstance(event, BrokenCall):
                events.append(event.text)
            elif isinstance(event, str) or event.call not in broken:
                events.append(event)
        self._read(reading.thoughts, events, finished=True)
        return self.row

    def push(self, text: str, finished: bool) -> list[BlockNews]:
        """What more of the text adds to the row. Call it once with `finished`."""
        reading = self._reader.push(text, finished)
        return self._read(reading.thoughts, reading.events, finished)

    def _read(self, thoughts: str, events: Iterable[ToolEvent], finished: bool) -> list[BlockNews]:
        news: list[BlockNews] = []
        if thoughts:
            self._add(news, self._of_kind(news, "thoughts"), thoughts)
        for event in events:
            if isinstance(event, str):
                self._add_text(news, event)
            elif isinstance(event, BrokenCall):
                self._broken = True
                if self._open is not None and self._open.kind == "call":
                    self._close(news, complete=False)
                self._add_text(news, event.untold)
            else:
                self._add_call(news, event)
        if finished:
            if self._held and not any(block.kind == "call" for block in self.row):
                self._add(news, self._of_kind(news, "text"), self._release())
            self._close(news)
        return news

    def _add_text(self, news: list[BlockNews], text: str) -> None:
        if self._open is not None and self._open.kind == "text":
            self._add(news, self._open, text)
        elif text.strip():
            self._add(news, self._of_kind(news, "text"), self._release() + text)
        elif text:
            self._held.append(text)

    def _add_call(self, news: list[BlockNews], event: ToolCallDelta) -> None:
        if event.name:
            self._close(news)
            self._held.clear()
            self._start(news, Block("call", len(self.row), event.name, event.call_id))
        assert self._open is not None, "news of a call that has ended"
        if event.arguments:
            self._add(news, self._open, event.arguments)
        if event.complete:
            self._close(news)

    def _of_kind(self, news: list[BlockNews], kind: Literal["thoughts", "text"]) -> Block:
        """The open block, if it is such a one; else a new one."""
        if self._open is None or self._open.kind != kind:
            self._close(news)
            self._start(news, Block(kind, len(self.row)))
        assert self._open is not None
        return self._open

    def _start(self, news: list[BlockNews], block: Block) -> None:
        self._open = block
        self.row.append(block)
        news.append(BlockNews("start", block))

    def _add(self, news: list[BlockNews], block: Block, text: str) -> None:
        if text:
            block.pieces.append(text)
            news.append(BlockNews("more", block, text))

    def _close(self, news: list[BlockNews], complete: bool = True) -> None:
        if self._open is not None:
            self._open.complete = complete
            news.append(BlockNews("stop", self._open))
            self._open = None

    def _release(self) -> str:
        text = "".join(self._held)
        self._held.clear()
        return text
