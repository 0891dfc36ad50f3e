"""How a mutant is put through a suite: by its class, in the place of the body that a sound card names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from engine.plugin import Card
from engine_sdk.conformance import Conformance


def suites_of(
    suite: type[Conformance], sound: type[Card] | str, mutants: Sequence[type], options: Any = None
) -> dict[str, type]:
    """A test class for each mutant: a body, or a card. Properties are not shrunk; nor is a sound card tested again.

    sound: the card that goes with the bodies, or the installed driver whose card it is.
    """

    class Broken(suite):  # type: ignore[misc, valid-type]
        shrink = False
        faulty: ClassVar[type]
        test_card_is_light = test_card_is_sound = test_card_answers_in_sentences = test_figure = None

        @classmethod
        def body(cls) -> type:
            return cls.faulty

    named = {"driver": sound} if isinstance(sound, str) else {"card": sound}
    found: dict[str, type] = {}
    for mutant in mutants:
        name, words = f"Test{mutant.__name__}", {"__doc__": mutant.__doc__, "options": options or {}}
        if issubclass(mutant, Card):
            found[name] = type(name, (suite,), {**words, "card": mutant, "shrink": False, "test_figure": None})
        else:
            found[name] = type(name, (Broken,), {**words, **named, "faulty": mutant})
    return found
