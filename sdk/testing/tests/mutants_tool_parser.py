"""Tool parsers with one planted fault each, in the place of the body of `hermes`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mutant_suites import suites_of

from engine.interfaces.tool_parser import BrokenCall, CallForm, ToolCallDelta
from engine_parsers.tool_parsers.hermes import HermesParser, HermesText
from engine_sdk.conformance import ToolParserConformance


def parser(text: type) -> Any:
    """The body's method that makes a stream of this class."""
    return lambda self, tools: text()


class LeaksHalfMarkers(HermesParser):
    """half a marker at the end of a piece is told as content"""

    class Text(HermesText):
        def push(self, text: str) -> Sequence[Any]:
            events = list(super().push(text))
            if self._taken is None and self._tail:
                events.append(self._tail)
                self._tail = ""
            return events

    stream = parser(Text)


class ReadsAllAgain(HermesParser):
    """with each piece the whole text is read again"""

    class Text(HermesText):
        _all, _told = "", 0

        def push(self, text: str) -> Sequence[Any]:
            self._all += text
            events = HermesText().push(self._all)
            return super().push(text) if events is not None else ()

    stream = parser(Text)


class DropsTheEnd(HermesParser):
    """what is held back at the end of the text is forgotten"""

    class Text(HermesText):
        def finish(self) -> Sequence[Any]:
            return ()

    stream = parser(Text)


class SwallowsSlips(HermesParser):
    """what begins like a call and is none is swallowed"""

    class Text(HermesText):
        def give_up(self, text: str, position: int, after: int, untold: str = "") -> int:
            self._taken = None
            self.state = self.in_content
            self._announced = False
            return after

    stream = parser(Text)


class TellsArgumentsAtTheEnd(HermesParser):
    """arguments are told when they have ended"""

    class Text(HermesText):
        _kept = ""

        def arguments(self, text: str) -> None:
            self._kept += text

        def complete(self) -> None:
            super().arguments(self._kept)
            self._kept = ""
            super().complete()

    stream = parser(Text)


class NamesEveryPiece(HermesParser):
    """every delta of a call has its name"""

    class Text(HermesText):
        _of = ""

        def push(self, text: str) -> Sequence[Any]:
            events = []
            for event in super().push(text):
                if isinstance(event, ToolCallDelta):
                    self._of = event.name or self._of
                    event = event._replace(name=self._of)
                events.append(event)
            return events

    stream = parser(Text)


class NumbersFromOne(HermesParser):
    """calls are numbered from 1"""

    class Text(HermesText):
        def push(self, text: str) -> Sequence[Any]:
            return [e if isinstance(e, str) else e._replace(call=e.call + 1) for e in super().push(text)]

    stream = parser(Text)


class NeverComplete(HermesParser):
    """the end of a call is not told"""

    class Text(HermesText):
        def push(self, text: str) -> Sequence[Any]:
            return [e for e in super().push(text) if not (isinstance(e, ToolCallDelta) and e.complete)]

    stream = parser(Text)


class WritesPython(HermesParser):
    """arguments are told as Python writes them"""

    class Text(HermesText):
        def arguments(self, text: str) -> None:
            super().arguments(text.replace("true", "True").replace("null", "None"))

    stream = parser(Text)


class OneForAll(HermesParser):
    """all answers share one stream"""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self._stream = HermesText()

    def stream(self, tools: Sequence[Any]) -> Any:
        return self._stream


class StripsContent(HermesParser):
    """content is stripped of the white space around it"""

    class Text(HermesText):
        def content(self, text: str) -> None:
            super().content(text.strip())

    stream = parser(Text)


class FirstCallOnly(HermesParser):
    """after the first call all is content"""

    class Text(HermesText):
        def leave(self) -> None:
            super().leave()
            self._search = None

    stream = parser(Text)


class TellsOnlyHalfOfABreak(HermesParser):
    """of a call that breaks only the end is given as its text"""

    class Text(HermesText):
        def finish(self) -> Sequence[Any]:
            return [e._replace(text=e.text[-5:]) if isinstance(e, BrokenCall) else e for e in super().finish()]

    stream = parser(Text)


class FormWithoutBracket(HermesParser):
    """the form leaves out the bracket that opens a call"""

    def form(self, tools: Sequence[Any]) -> CallForm | None:
        form = super().form(tools)
        assert form is not None
        return form._replace(tags=tuple(tag._replace(begin=tag.begin.replace("{", "", 1)) for tag in form.tags))


MUTANTS = [
    LeaksHalfMarkers, ReadsAllAgain, DropsTheEnd, SwallowsSlips, TellsArgumentsAtTheEnd, NamesEveryPiece,
    NumbersFromOne, NeverComplete, WritesPython, OneForAll, StripsContent, FirstCallOnly, TellsOnlyHalfOfABreak,
    FormWithoutBracket,
]  # fmt: skip

globals().update(suites_of(ToolParserConformance, "hermes", MUTANTS))
