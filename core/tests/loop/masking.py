"""A grammar for tests: which tokens may come next depends on every token before, so a mask that is late, stale or given
to another row changes the output. Its constraint is the text of `structured_outputs.regex`."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
from schedules import Schedule

from engine.interfaces.grammar import GrammarCard
from engine.plugin.candidate import Candidate
from engine.scheduling.matchers import GrammarDriver
from engine.scheduling.structured import Constraints
from engine.types.errors import InvalidRequestError
from engine.types.params import SamplingParams
from engine.types.structured_outputs import StructuredOutputsParams
from engine_kit.jump_forward import JumpForward

BROKEN = "broken"
"""A constraint that cannot be compiled."""


class ScriptedMatcher:
    """Follows a script that is made from its seed and the tokens so far."""

    def __init__(self, seed: str, vocab: int, always: int) -> None:
        self._seed = seed
        self._vocab = vocab
        self._always = always
        self.tokens: list[int] = []
        self._read()

    def _read(self) -> None:
        rng = random.Random(f"{self._seed} {self.tokens}")
        self.allowed = {self._always, *rng.sample(range(self._vocab), rng.randint(1, self._vocab // 2))}
        self._ends = len(self.tokens) > 1 and rng.random() < 0.08
        if rng.random() < 0.5:
            self.allowed = {self._always}

    def accept(self, tokens: Sequence[int]) -> int:
        for count, token in enumerate(tokens):
            if token not in self.allowed:
                return count
            self.tokens.append(token)
            self._read()
        return len(tokens)

    def rollback(self, num_tokens: int) -> None:
        assert 0 < num_tokens <= len(self.tokens)
        del self.tokens[-num_tokens:]
        self._read()

    def forced_bytes(self) -> bytes:
        """Id t stands for byte t. Now and then it promises too much, as where tokens are spelled otherwise."""
        rng, there = random.Random(f"{self._seed} {self.tokens} forced"), ScriptedMatcher(self._seed, self._vocab, 0)
        there._always = self._always
        there.tokens = [*self.tokens]
        there._read()
        while there.allowed == {self._always} and not there._ends and len(there.tokens) < 200:
            there.tokens.append(self._always)
            there._read()
        more = rng.choices(range(self._vocab), k=rng.choice([0, 0, 0, 3]))
        return bytes([*there.tokens[len(self.tokens) :], *more])

    @property
    def finished(self) -> bool:
        return self._ends

    def row(self) -> np.ndarray:
        """int32 [ceil(vocab / 32)]; beyond the vocabulary every bit is set."""
        bits = np.ones(-(-self._vocab // 32) * 32, np.uint8)
        bits[: self._vocab] = 0
        bits[list(self.allowed)] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)


class ScriptedGrammar:
    """Args: vocab: of the model. always: an id that is always allowed. delay: called in each compilation."""

    def __init__(self, vocab: int, always: int, delay: Callable[[str], Any] = lambda seed: None) -> None:
        self._vocab = vocab
        self._always = always
        self._delay = delay
        self.num_masks = 0

    def compile(self, constraint: StructuredOutputsParams, end_token_ids: Sequence[int]) -> ScriptedMatcher:
        assert constraint.regex is not None
        self._delay(constraint.regex)
        if constraint.regex == BROKEN:
            raise InvalidRequestError("structured_outputs.regex='broken'", "so it is")
        return ScriptedMatcher(constraint.regex, self._vocab, self._always)

    def fill_masks(self, matchers: Sequence[Any], rows: np.ndarray, out: np.ndarray) -> None:
        assert len({id(matcher) for matcher in matchers}) == len(matchers) == len(rows)
        self.num_masks += len(rows)
        for matcher, row in zip(matchers, rows, strict=True):
            out[row] = matcher.row()

    def close(self) -> None:
        pass


def driver_of(grammar: Any, rollback: bool = True) -> GrammarDriver:
    """At work, with a card that says so."""
    card = type("Card", (GrammarCard,), {"constraints": frozenset({"regex"}), "rollback": rollback})
    return GrammarDriver(Candidate("grammar", "scripted", 0, "tests", "1.0", "tests:Driver"), card, grammar)


def constraints_of(grammar: Any, vocab: int, rollback: bool = True) -> Constraints:
    """With this driver alone."""
    return Constraints({"regex": [driver_of(grammar, rollback)]}, vocab)


def jump_forward(num_slots: int, vocab: int) -> JumpForward:
    """Over what scripts force."""
    return JumpForward(num_slots, lambda: [bytes([token]) for token in range(vocab)], lambda text: list(text.encode()))


def constrained(params: SamplingParams, seed: str, start_after: list[int] | None = None) -> SamplingParams:
    """The same parameters under a constraint."""
    constraint = StructuredOutputsParams(regex=seed, start_after=start_after)
    return msgspec.structs.replace(params, structured_outputs=constraint)


def with_masks(schedule: Schedule, seed: int, share: float = 0.5) -> Schedule:
    """The same schedule, with constraints on some of its requests."""
    rng = random.Random(seed)
    requests = [
        replace(r, params=constrained(r.params, str(rng.random()), rng.choice([None, None, None, [rng.randrange(8)]])))
        if rng.random() < share
        else r
        for r in schedule.requests
    ]
    return replace(schedule, requests=tuple(requests))
