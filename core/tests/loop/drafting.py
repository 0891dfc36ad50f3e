"""Drafters for tests, which know what a request gets alone: always right, always wrong, or anything between."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

Propose = Callable[[Sequence[int], Sequence[int], int], list[int]]
"""(what the request's outputs will be, its outputs so far, the most drafts) -> drafts."""

KINDS = ("right", "wrong", "random", "mixed")


def make(kind: str, vocab: int, seed: int = 0) -> Propose:
    """A drafter of this kind.

    right: what comes next, and whatever behind its end. wrong: never what comes next. random: any ids. mixed: right,
    then possibly wrong, in any number, perhaps none.
    """
    rng = random.Random(seed)

    def anything(k: int) -> list[int]:
        return [rng.randrange(vocab) for _ in range(k)]

    def right(truth: Sequence[int], done: Sequence[int], k: int) -> list[int]:
        return [*truth[len(done) : len(done) + k], *anything(k)][:k]

    def wrong(truth: Sequence[int], done: Sequence[int], k: int) -> list[int]:
        return [(token + 1 + rng.randrange(vocab - 1)) % vocab for token in right(truth, done, k)]

    def mixed(truth: Sequence[int], done: Sequence[int], k: int) -> list[int]:
        good = right(truth, done, k)[: rng.randint(0, k)]
        return [*good, *anything(k)][: rng.choice([k, k, rng.randint(0, k)])]

    def nothing_known(truth: Sequence[int], done: Sequence[int], k: int) -> list[int]:
        return anything(k)

    return {"right": right, "wrong": wrong, "random": nothing_known, "mixed": mixed}[kind]
