"""The parts from which tool parsers are made: text with calls in it, read by states, each character once.

A parser for another form subclasses `ToolText`, names the markers that begin a call, and says in `begin` which state
reads on. A state is a method `(text, position) -> position`: it reads from there, returns how far it came, and may set
`self.state`. One that returns `position` as it was, and leaves the state as it is, waits for more text; what is not
read is held back, so that must be short: half a marker. `engine_parsers.tool_parsers` has examples.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from engine.interfaces.tool_parser import BrokenCall, ToolCallDelta, ToolEvent
from engine_kit.call_object import CallObject
from engine_kit.json_stream import JsonStream

State = Callable[[str, int], int]
MAX_NAME = 256
"""Characters of a function's name between markers; what is longer is no name."""
_BLANK = re.compile(r"\s*")


class ToolText:
    """A `ToolStream` (engine.interfaces.tool_parser) over markers and states.

    White space around calls belongs to their form; anywhere else it is content.

    Args:
        markers: each begins a call, or several.
    """

    def __init__(self, markers: Sequence[str] = ()) -> None:
        self._markers = tuple(markers)
        self._search = re.compile("|".join(map(re.escape, markers))).search if markers else None
        self.state: State = self.in_content
        self._tail = ""
        self._events: list[ToolEvent] = []
        self._blank: list[str] = []
        self._after_call = False
        self._taken: list[str] | None = None  # since a marker, or since a call was complete; None in content
        self._index = -1
        self._announced = False
        self._told = False
        self._object = CallObject()
        self._json = JsonStream()
        self._then: State = self.in_content
        self.name = ""
        self._pieces: list[str] = []
        self._room = 0
        self._stop = ""

    # -- what is called ----------------------------------------------------------------------------------------------
    def push(self, text: str) -> Sequence[ToolEvent]:
        """See `ToolStream`."""
        text = self._tail + text
        position = 0
        while position < len(text):
            state, taken = self.state, self._taken
            after = state(text, position)
            if taken is not None and taken is self._taken:
                taken.append(text[position:after])
            if after == position and self.state == state and taken is self._taken:
                break
            position = after
        self._tail = text[position:]
        events = self._events
        self._events = []
        return events

    def finish(self) -> Sequence[ToolEvent]:
        """See `ToolStream`."""
        tail = self._tail
        self._tail = ""
        if self._taken is not None and (self._announced or not self._after_call):
            self.give_up(tail, 0, len(tail), self.untold() + tail)
        elif self._taken is None:
            self.content(tail)
        if not self._after_call:
            self._tell_blank()
        events = self._events
        self._events = []
        return events

    def untold(self) -> str:
        """What was read of a call of which no delta has told."""
        return "".join(self._pieces) if self.state == self._in_name else ""

    # -- content -----------------------------------------------------------------------------------------------------
    def in_content(self, text: str, position: int) -> int:
        """The state outside of calls."""
        if self._search is None:
            self.content(text[position:])
            return len(text)
        if (found := self._search(text, position)) is not None:
            self.content(text[position : found.start()])
            self._taken = [found.group()]
            self._after_call = False
            self.begin(found.group())
            return found.end()
        end = len(text) - begun(text, position, self._markers)
        self.content(text[position:end])
        return end

    def content(self, text: str) -> None:
        """Tell of content; white space at its end waits for what follows."""
        solid = text.rstrip()
        if solid:
            self._tell_blank()
            self._events.append(solid)
            self._after_call = False
        if len(solid) < len(text):
            self._blank.append(text[len(solid) :])

    def _tell_blank(self) -> None:
        if self._blank:
            self._events.append("".join(self._blank))
            self._blank.clear()

    def begin(self, marker: str) -> None:
        """For subclasses: this marker was read; set the state that reads on."""
        raise NotImplementedError

    # -- calls -------------------------------------------------------------------------------------------------------
    def attempt(self) -> None:
        """What is read from here on is a call, or else content: for forms without markers."""
        self._taken = []
        self._after_call = False

    def announce(self, name: str, call_id: str = "") -> None:
        """A call has begun."""
        self._index = self._index + 1
        self._announced = True
        self._told = True
        self._after_call = False
        if self._taken is not None:
            self._taken.insert(0, "".join(self._blank))
        self._blank.clear()
        self._events.append(ToolCallDelta(self._index, name, call_id))

    def arguments(self, text: str) -> None:
        """Tell of more of the arguments' JSON."""
        if text:
            self._events.append(ToolCallDelta(self._index, arguments=text))

    def complete(self) -> None:
        """The call's arguments have ended. What follows is the rest of its form, until `leave`, or content."""
        self._events.append(ToolCallDelta(self._index, complete=True))
        self._announced = False
        self._after_call = True
        self._taken = []

    def leave(self) -> None:
        """The form has ended; content follows, or another call."""
        self._taken = None
        self.state = self.in_content

    def give_up(self, text: str, position: int, after: int, untold: str = "") -> int:
        """What was read since the marker, up to `after`, is no call. Returns `after`; content follows.

        untold: the end of what was read of which no delta has told, where the call has been announced.
        """
        assert self._taken is not None
        self._taken.append(text[position:after])
        read = "".join(self._taken)
        self._taken = None
        self.state = self.in_content
        if self._announced:
            self._announced = False
            self._events.append(BrokenCall(self._index, read, untold))
            self._after_call = False
        else:
            self.content(read)
        return after

    # -- states ------------------------------------------------------------------------------------------------------
    def read_object(self, call: CallObject, then: State) -> None:
        """Next comes a call as a JSON object; `then` reads on after it."""
        self._object = call
        self._then = then
        self.state = self._in_object
        self._told = self._after_call = False

    def _in_object(self, text: str, position: int) -> int:
        call = self._object
        after = call.feed(text, position)
        if call.name is not None and call.arguments is not None:
            if not self._told:
                self.announce(call.name)
            if self._announced:
                self.arguments(call.arguments.take())
                if call.arguments.done:
                    self.complete()
        if call.failed:
            return self.give_up(text, position, after)
        if call.done:
            self._taken = []
            self.state = self._then
        return after

    def read_name(self, stop: str, then: State) -> None:
        """Next comes a name, up to the text `stop`; `then` finds it in `name`, and reads on behind that text."""
        self._pieces = []
        self._room = MAX_NAME
        self._stop = stop
        self._then = then
        self.state = self._in_name

    def _in_name(self, text: str, position: int) -> int:
        stop, last = self._stop, position + self._room
        end = text.find(stop, position, last + len(stop))
        if end >= 0:
            self.name = "".join([*self._pieces, text[position:end]])
            self.state = self._then
            return end + len(stop)
        after = len(text) - begun(text, position, (stop,))
        if after > last:
            return self.give_up(text, position, last + 1, self.untold() + text[position : last + 1])
        self._pieces.append(text[position:after])
        self._room -= after - position
        return after

    def read_arguments(self, then: State) -> None:
        """Next come the arguments of the announced call as a JSON object; `then` reads on after them."""
        self._json = JsonStream()
        self._then = then
        self.state = self._in_arguments

    def _in_arguments(self, text: str, position: int) -> int:
        after = self._json.feed(text, position)
        self.arguments(self._json.take())
        if self._json.failed:
            return self.give_up(text, position, after)
        if self._json.done:
            self.complete()
            self.state = self._then
        return after


def skip(text: str, position: int) -> int:
    """Behind the white space from here on."""
    found = _BLANK.match(text, position)
    assert found is not None
    return found.end()


def literal(text: str, position: int, words: Sequence[str]) -> str | None:
    """Which of the words stands here: "" where that is not known yet, for want of text; None where none does. None of
    them may begin another."""
    for word in words:
        if text.startswith(word, position):
            return word
    rest = text[position : position + max(map(len, words))]
    return "" if any(word.startswith(rest) for word in words) else None


def begun(text: str, position: int, words: Sequence[str]) -> int:
    """How many characters at the end of the text, from `position` on, begin one of the words; 0 where none do."""
    most = min(len(text) - position, max(map(len, words)) - 1)
    for size in range(most, 0, -1):
        end = text[-size:]
        if any(word.startswith(end) for word in words):
            return size
    return 0


class WholeCall(NamedTuple):
    """A call with all its arguments, a JSON object as text."""

    name: str
    arguments: str
    call_id: str = ""


def whole(events: Iterable[ToolEvent]) -> tuple[str, list[WholeCall]]:
    """All events of an answer as (content, calls). Calls that broke are content, as the model wrote them."""
    content: list[str] = []
    calls: dict[int, tuple[ToolCallDelta, list[str]]] = {}
    for event in events:
        if isinstance(event, str):
            content.append(event)
        elif isinstance(event, BrokenCall):
            calls.pop(event.call, None)
            content.append(event.text)
        else:
            calls.setdefault(event.call, (event, []))[1].append(event.arguments)
    made = [WholeCall(first.name, "".join(pieces), first.call_id) for first, pieces in calls.values()]
    return "".join(content), made
