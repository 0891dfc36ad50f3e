"""What a driver's card remarks where it is at work: printed beside the reason, and never in the way of it."""

from __future__ import annotations

import pytest

from engine.plugin import Registry, choose_one
from engine.plugin.candidate import Candidate
from engine.plugin.card import Card
from engine.plugin.points import EVICTOR
from engine_inspect.why import explain

CARD = """
    from engine.interfaces.evictor import EvictorCard

    class Moon(EvictorCard):
        priority = 20
        body = "pg_moon:Body"

        @classmethod
        def remarks(cls, need):
            {answer}
"""


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("return ['never run on the moon']", "never run on the moon"),
        ("raise OSError('no moon')", "its card's `remarks` raised OSError: no moon"),
        ("return None", "its card's `remarks` raised TypeError: 'NoneType' object is not iterable"),
    ],
)
def test_remarks_of_the_chosen_one(playground, answer: str, said: str) -> None:
    playground.module("pg_moon", CARD.format(answer=answer))
    lru = Candidate("evictor", "lru", 0, "engine", "1.0", "engine_reference.evictor_lru:LRUEvictor")
    moon = Candidate("evictor", "moon", 0, "pg-moon", "1.0", "pg_moon:Moon")
    registry = Registry([lru, moon])
    told = {
        outcome.candidate: outcome.reasons
        for outcome in explain(registry, "evictor", [choose_one(registry, EVICTOR, None)])
    }
    assert told == {moon: ("auto, priority 20", said), lru: ("'moon' has priority 20",)}


def test_most_have_nothing_to_remark() -> None:
    assert Card.remarks(None) == []
