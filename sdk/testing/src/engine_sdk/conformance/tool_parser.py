"""The suite of point `tool_parser`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.interfaces.tool_parser import (
    BrokenCall,
    ToolCallDelta,
    ToolEvent,
    ToolParser,
    ToolParserCard,
    ToolParserNeed,
)
from engine_kit.tool_text import whole
from engine_sdk.conformance.base import Conformance
from engine_sdk.conformance.core_contexts import front_context
from engine_sdk.conformance.parsing import PER_CHARACTER, TOOLS, cuts, pieces, read_at_cost
from engine_sdk.conformance.timing import median_seconds

Call = tuple[str, dict[str, Any]]
CALLS: tuple[tuple[Call, ...], ...] = (
    (("get_weather", {"city": "Rome"}),),
    (("now", {}),),
    (("get_weather", {"city": 'a "b" \\ {c} é\n<d>', "days": 3}), ("now", {})),
    (("save", {"rows": [1, -2.5, None, True, {"a": []}], "options": {"k": {"l": "m"}}, "note": "n, (o) [p]"}),),
)
PLAIN = (
    "",
    "Hello.",
    "  Two lines\n\nwith < and > and {braces} and [lists]. \n",
    "{",
    '{"a": 1}',
    "[1, 2]",
    "<b>x</b>",
)
"""Texts that hold no call in any form."""


class ToolParserConformance(Conformance):
    """Calls are found however the text is cut, told as they come, as JSON; nothing is lost; no text costs more than
    its length. What a model writes is taken from the card's `write`.

    Attributes:
        samples: further texts as (text, content, calls): what real models write, for instance.
    """

    point = "tool_parser"
    protocol = "ToolParser"
    samples: ClassVar[Sequence[tuple[str, str, Sequence[Call]]]] = ()

    @classmethod
    def needs(cls) -> Sequence[ToolParserNeed]:
        return [ToolParserNeed(), ToolParserNeed(chat_template="{{ messages }}", architecture="LlamaForCausalLM")]

    @classmethod
    def make(cls) -> ToolParser:
        """A parser; skipped where the card does not serve the plainest need."""
        cls.require(ToolParserNeed())
        return cast(ToolParser, cls.body()(front_context(cls.subject())))

    @classmethod
    def write(cls, calls: Sequence[Call]) -> str:
        """What the card says that a model writes. A test is skipped for calls that the form cannot hold."""
        try:
            return cast("type[ToolParserCard]", cls.subject().card).write(calls)
        except ValueError as error:
            pytest.skip(f"the form cannot hold these calls: {error}")

    @classmethod
    def texts(cls) -> list[str]:
        """Texts with calls."""
        return [*(cls.write(calls) for calls in CALLS), *(text for text, _, _ in cls.samples)]

    # -- the card ----------------------------------------------------------------------------------------------------
    def test_the_card_recognises_by_the_template(self) -> None:
        """A bool, twice the same; nothing is recognised where there is no template."""
        card = cast("type[ToolParserCard]", self.subject().card)
        for need in self.needs():
            assert card.recognises(need) is card.recognises(need)
            assert card.recognises(need) in (True, False)
        assert not card.recognises(ToolParserNeed()), "it recognises a model that has no chat template"

    # -- what is told ------------------------------------------------------------------------------------------------
    def test_what_a_model_writes_is_read(self) -> None:
        """The card's own examples, and the samples."""
        for calls in CALLS:
            content, found = whole(told(self.make(), [self.write(calls)]))
            assert (content, _values(found)) == ("", list(calls)), self.write(calls)
        for text, content, expected in self.samples:
            found_content, found = whole(told(self.make(), [text]))
            assert (found_content, _values(found)) == (content, list(expected)), text

    def test_any_calls_in_any_pieces(self) -> None:
        """Calls with any arguments, cut anywhere."""
        parser = self.make()
        card = cast("type[ToolParserCard]", self.subject().card)

        @self.hypothesis_settings(30)
        @given(data=st.data())
        def run(data: st.DataObject) -> None:
            calls = data.draw(st.lists(_any_call(), min_size=1, max_size=3))
            try:
                text = card.write(calls)
            except ValueError:
                return
            places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
            parts = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
            content, found = whole(told(parser, parts))
            assert (content, _values(found)) == ("", calls)

        run()

    def test_every_cut_tells_the_same(self) -> None:
        """Whatever the pieces are, all in all the same is told: of whole calls, and of calls that end too early."""
        parser = self.make()
        for text in self.texts():
            for given_text in (text, text[: 2 * len(text) // 3], f"{text}\nSo much."):
                expected = told(parser, [given_text])
                for parts in cuts(given_text):
                    assert told(parser, parts) == expected, parts

    def test_events_are_in_order(self) -> None:
        """Of a call first its name, last its completion; one after another, numbered from 0; all of it JSON."""
        for text in self.texts():
            for size in (1, 5, len(text)):
                stream = self.make().stream(TOOLS)
                events = [event for part in pieces(text, size) for event in stream.push(part)]
                _check_order([*events, *stream.finish()])

    def test_arguments_are_told_as_they_come(self) -> None:
        """A long text among them is told in pieces, not at its end."""
        text = self.write([("save", {"note": "x" * 2000})])
        stream, told_at = self.make().stream(TOOLS), []
        for i, part in enumerate(pieces(text, 20)):
            told_at += [i for event in stream.push(part) if isinstance(event, ToolCallDelta) and event.arguments]
        assert len(set(told_at)) > 80, "the arguments come at once"

    # -- nothing is lost ---------------------------------------------------------------------------------------------
    def test_plain_text_is_content(self) -> None:
        """To the last character, white space too."""
        for text in PLAIN:
            for parts in cuts(text):
                assert whole(told(self.make(), parts)) == (text, []), parts

    def test_a_call_cut_off_is_content(self) -> None:
        """At every place: either all of it is content, or it was whole but for its closing marks."""
        for calls in CALLS[:1] + CALLS[1:2]:
            text = self.write(calls)
            for k in range(len(text)):
                content, found = whole(told(self.make(), pieces(text[:k], 3)))
                if found:
                    assert _values(found) == list(calls) and not content.strip(), text[:k]
                else:
                    assert content == text[:k]

    def test_nothing_is_lost_of_slips(self) -> None:
        """A stray character anywhere: calls are JSON, and where there is none all is content."""
        text = self.write(CALLS[0])
        for k in range(len(text)):
            for character in '@}"<':
                slip = text[:k] + character + text[k:]
                content, found = whole(told(self.make(), [slip]))
                assert all(isinstance(arguments, dict) for _, arguments in _values(found))
                assert found or content == slip, slip

    def test_a_client_that_was_told_of_a_call_sees_the_rest(self) -> None:
        """A call that breaks has told its beginning: what it has not told is shown when it breaks."""
        text = self.write([("save", {"note": "some words"})])
        for k in range(len(text)):
            stream = self.make().stream(TOOLS)
            events = [*stream.push(text[:k]), *stream.finish()]
            for event in events:
                if isinstance(event, BrokenCall):
                    assert event.text.endswith(event.untold) and event.text.strip()

    # -- the form ----------------------------------------------------------------------------------------------------
    def test_the_form_is_what_it_reads(self) -> None:
        """Calls that a grammar writes by `form` are found."""
        parser = self.make()
        form = parser.form(TOOLS)
        if form is None:
            pytest.skip("calls in this form are no text around JSON")
        assert [tag.name for tag in form.tags] == [tool.name for tool in TOOLS]
        calls: list[Call] = [("get_weather", {"city": "Rome"}), ("now", {}), ("save", {"note": "\u20ac"})]
        tags = {tag.name: tag for tag in form.tags}
        for many in ([calls[0]], calls):
            written = [tags[name].begin + json.dumps(arguments) + tags[name].end for name, arguments in many]
            text = form.before + form.separator.join(written) + form.after
            content, found = whole(told(parser, pieces(text, 4)))
            assert (content, _values(found)) == ("", many), text
        assert all(tag.begin.startswith(form.trigger) for tag in form.tags)

    # -- streams and cost --------------------------------------------------------------------------------------------
    def test_streams_know_nothing_of_each_other(self) -> None:
        """Two of one parser, fed in turn."""
        parser, text = self.make(), self.write(CALLS[2])
        first, second, events = parser.stream(TOOLS), parser.stream(TOOLS), ([], [])  # type: ignore[var-annotated]
        for part in pieces(text, 3):
            events[0].extend(first.push(part))
            events[1].extend(second.push(part))
        events[0].extend(first.finish())
        events[1].extend(second.finish())
        assert joined(events[0]) == joined(events[1]) == told(parser, [text])

    def test_no_text_costs_more_than_its_length(self) -> None:
        """Counted: long arguments, calls that begin and begin again, white space and brackets without end."""
        opening = self.write(CALLS[0])
        shapes = [self.write([("save", {"note": "x" * 8000})]), self.write([("save", {"rows": [[]] * 1000})])]
        shapes += [opening[:k] * (4000 // k) for k in (len(opening) // 4, len(opening) // 2, len(opening) - 1)]
        shapes += [opening[: len(opening) // 2] + " " * 4000, *(c * 4000 for c in ' <{["\\\n')]
        for text in shapes:
            cost = read_at_cost(self.make().stream(TOOLS), pieces(text, 16))
            assert cost < PER_CHARACTER * len(text) + 5000, f"{text[:40]!r}...: {cost} operations"

    @classmethod
    def figure(cls) -> str | None:
        """What a token costs."""
        text = cls.write([("save", {"note": "some words " * 400})])
        parser = cls.make()

        def read() -> None:
            stream = parser.stream(TOOLS)
            for part in pieces(text, 4):
                stream.push(part)
            stream.finish()

        return f"{median_seconds(read) / (len(text) / 4) * 1e6:.1f} us for each piece of four characters"


def told(parser: ToolParser, parts: Iterable[str]) -> list[ToolEvent]:
    """All events of a text in these pieces, neighbours of one kind as one."""
    stream = parser.stream(TOOLS)
    events = [event for part in parts for event in stream.push(part)]
    return joined([*events, *stream.finish()])


def joined(events: Iterable[ToolEvent]) -> list[ToolEvent]:
    """Neighbours of one kind as one, without the ids of calls."""
    found: list[ToolEvent] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, str) and isinstance(last, str):
            found[-1] = last + event
        elif isinstance(event, ToolCallDelta) and isinstance(last, ToolCallDelta) and last.call == event.call:
            found[-1] = last._replace(
                name=last.name + event.name, arguments=last.arguments + event.arguments, complete=event.complete
            )
        elif event:
            found.append(event._replace(call_id="") if isinstance(event, ToolCallDelta) else event)
    return found


def _values(calls: Iterable[Any]) -> list[Call]:
    return [(call.name, json.loads(call.arguments)) for call in calls]


def _check_order(events: Iterable[ToolEvent]) -> None:
    begun, running = -1, False
    arguments = ""
    for event in events:
        assert not isinstance(event, BrokenCall), "a whole call breaks"
        if isinstance(event, str):
            assert not running, "content in the middle of a call"
            continue
        if event.name:
            assert not running and event.call == begun + 1, "a call begins before the last has ended, or has its number"
            begun, running, arguments = event.call, True, ""
        assert running and event.call == begun, "news of a call that has not begun, or has ended"
        arguments += event.arguments
        if event.complete:
            assert isinstance(json.loads(arguments), dict)
            running = False
    assert not running, "a whole call is not complete"


def _any_call() -> st.SearchStrategy[Call]:
    text = st.text("ab1 \n\t\"'\\{}[]()<>/=,;:|`\x07\u00e9\u20ac\U0001f600", max_size=8)
    plain = st.one_of(st.none(), st.booleans(), st.integers(-(10**9), 10**9), st.floats(-1e6, 1e6), text)
    value = st.recursive(plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3))
    arguments: Mapping[str, st.SearchStrategy[dict[str, Any]]] = {
        "get_weather": st.fixed_dictionaries({}, optional={"city": text, "days": st.integers(0, 99)}),
        "now": st.just({}),
        "save": st.fixed_dictionaries({"rows": st.lists(value, max_size=3)}, optional={"note": text}),
    }
    return st.sampled_from(sorted(arguments)).flatmap(lambda name: st.tuples(st.just(name), arguments[name]))
