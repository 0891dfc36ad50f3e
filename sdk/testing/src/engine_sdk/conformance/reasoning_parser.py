"""The suite of point `reasoning_parser`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from engine.interfaces.reasoning_parser import (
    ReasoningDelta,
    ReasoningParser,
    ReasoningParserCard,
    ReasoningParserNeed,
)
from engine_sdk.conformance.base import Conformance
from engine_sdk.conformance.core_contexts import front_context
from engine_sdk.conformance.parsing import PER_CHARACTER, cuts, pieces, read_at_cost
from engine_sdk.conformance.timing import median_seconds

THOUGHTS = ("Hm. < 3?\n\nSo it is.", "Hm.", "a </b> c")
ANSWERS = ("Yes, it is. \n", "<b>No</b>", "x")


class ReasoningParserConformance(Conformance):
    """Thoughts and answer are told apart however the text is cut, and nothing is lost but the marks."""

    point = "reasoning_parser"
    protocol = "ReasoningParser"

    @classmethod
    def needs(cls) -> Sequence[ReasoningParserNeed]:
        return [ReasoningParserNeed(), ReasoningParserNeed(chat_template="{{ messages }}", architecture="X")]

    @classmethod
    def make(cls) -> ReasoningParser:
        """A parser; skipped where the card does not serve the plainest need."""
        cls.require(ReasoningParserNeed())
        return cast(ReasoningParser, cls.body()(front_context(cls.subject())))

    @classmethod
    def marks(cls) -> tuple[str, str]:
        """(begin, end) of thoughts, as the card says."""
        card = cast("type[ReasoningParserCard]", cls.subject().card)
        return card.begin, card.end

    def test_the_card_says_how_thoughts_are_marked(self) -> None:
        """It has an end; it recognises by the template, and nothing where there is none."""
        card = cast("type[ReasoningParserCard]", self.subject().card)
        assert card.end.strip() and isinstance(card.begin, str)
        for need in self.needs():
            assert card.recognises(need) in (True, False)
        assert not card.recognises(ReasoningParserNeed()), "it recognises a model that has no chat template"

    def test_thoughts_that_the_prompt_opened(self) -> None:
        """Cut anywhere; the white space beside the marks belongs to neither side."""
        begin, end = self.marks()
        for thoughts, answer in zip(THOUGHTS, ANSWERS, strict=True):
            for parts in cuts(f"{thoughts}\n{end}\n\n{answer}"):
                assert read(self.make(), f"...{begin}\n", parts) == (thoughts, answer), parts

    def test_thoughts_that_the_model_opens(self) -> None:
        """Cut anywhere."""
        begin, end = self.marks()
        for thoughts, answer in zip(THOUGHTS, ANSWERS, strict=True):
            for parts in cuts(f"{begin}\n{thoughts}\n{end}\n\n{answer}"):
                assert read(self.make(), "...", parts) == (thoughts, answer), parts

    def test_thoughts_that_the_prompt_closed(self) -> None:
        """All is answer."""
        begin, end = self.marks()
        for answer in ANSWERS:
            for parts in cuts(answer):
                assert read(self.make(), f"...{begin}\n\n{end}\n\n", parts) == ("", answer)

    def test_the_answer_is_not_read_for_marks(self) -> None:
        """What looks like marks after the end is answer."""
        begin, end = self.marks()
        answer = f"A {begin}tag{end}, and {end}."
        for parts in cuts(f"{begin}Hm.{end}{answer}"):
            assert read(self.make(), "", parts) == ("Hm.", answer)

    def test_thoughts_that_do_not_end(self) -> None:
        """They are thoughts, half a mark at the end too."""
        begin, end = self.marks()
        for rest in ("", end[:-1], end[:1]):
            for parts in cuts(f"Hm.{rest}"):
                assert read(self.make(), begin, parts) == (f"Hm.{rest}", "")

    def test_where_thoughts_end(self) -> None:
        """`thinking` is true inside of them and false in the answer."""
        begin, end = self.marks()
        stream = self.make().stream(begin)
        assert stream.thinking
        stream.push("Hm.")
        assert stream.thinking
        stream.push(f"{end}Yes.")
        assert not stream.thinking

    def test_any_text_in_any_pieces(self) -> None:
        """The same whatever the pieces; nothing is lost but one pair of marks and white space; no thoughts after the
        answer."""
        begin, end = self.marks()
        shreds = [begin, end, begin[:3], end[:3], end[-3:], "\n", " ", "a", "<"]

        @self.hypothesis_settings(60)
        @given(parts=st.lists(st.sampled_from(shreds), max_size=12), prompt=st.sampled_from(["", begin, begin + end]))
        def run(parts: list[str], prompt: str) -> None:
            text = "".join(parts)
            expected = read(self.make(), prompt, [text])
            assert read(self.make(), prompt, list(text)) == read(self.make(), prompt, parts) == expected
            kept, all_ = (Counter("".join(t.split())) for t in ("".join(expected), text))
            assert kept <= all_ and all_ - kept <= Counter(begin + end), "something is lost, or made up"

        run()

    def test_streams_know_nothing_of_each_other(self) -> None:
        """Two of one parser, one of which has come to its answer."""
        begin, end = self.marks()
        parser = self.make()
        first, second = parser.stream(begin), parser.stream(begin)
        assert first.push(f"Hm.{end}Yes.") == ("Hm.", "Yes.")
        assert second.push("More.").reasoning == "More." and second.thinking

    def test_no_text_costs_more_than_its_length(self) -> None:
        """Counted: marks that begin and do not end, white space without end."""
        begin, end = self.marks()
        for shape in ("a ", " ", "<", begin, end[:-1], end + " ", "\n"):
            text = shape * (6000 // len(shape))
            cost = read_at_cost(self.make().stream(begin), pieces(text, 16))
            assert cost < PER_CHARACTER * len(text) + 5000, f"{shape!r}: {cost} operations"

    @classmethod
    def figure(cls) -> str | None:
        """What a token costs."""
        begin, parser = cls.marks()[0], cls.make()
        parts = pieces("some words " * 400, 4)

        def run() -> None:
            stream = parser.stream(begin)
            for part in parts:
                stream.push(part)
            stream.finish()

        return f"{median_seconds(run) / len(parts) * 1e6:.1f} us for each piece of four characters"


def read(parser: ReasoningParser, prompt: str, parts: Iterable[str]) -> ReasoningDelta:
    """(thoughts, answer) of a text in these pieces."""
    stream = parser.stream(prompt)
    deltas = [stream.push(part) for part in parts]
    deltas.append(stream.finish())
    answered = False
    for delta in deltas:
        assert not (answered and delta.reasoning), "thoughts after the answer"
        answered = answered or bool(delta.content)
    return ReasoningDelta("".join(d.reasoning for d in deltas), "".join(d.content for d in deltas))
