"""Several grammar drivers as one: each constraint goes to the first, by its kind, that takes it."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import msgspec
import numpy as np

from engine.types.errors import EngineError, InvalidRequestError
from engine.types.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from engine.interfaces.grammar import Grammar, GrammarCard, Matcher
    from engine.plugin.candidate import Candidate

logger = logging.getLogger(__name__)

REMEMBERED = 1024
"""How many constraints that a driver refused, and a later one took, are remembered."""
TRIALS = (
    StructuredOutputsParams(regex="a"),
    StructuredOutputsParams(json_object=True),
    StructuredOutputsParams(json={"type": "boolean"}),
    StructuredOutputsParams(choice=["a"]),
)
"""What has a driver import its library and start its process; the first that it enforces is taken."""


class GrammarDriver(NamedTuple):
    """One driver at work.

    Args:
        candidate: where it comes from.
        card: its card.
        grammar: its body.
    """

    candidate: Candidate
    card: type[GrammarCard]
    grammar: Grammar


class InTurn:
    """A matcher of one of several drivers. Implements `engine.interfaces.grammar.Matcher`.

    What the driver raises ends the request, and nothing else: `accept` raises it, when the next token comes at the
    latest, and until then everything is allowed. Given no tokens, `accept` does that and nothing else.

    Args:
        matcher: the driver's own.
        driver: it.

    Attributes:
        failed: what the driver raised; None as long as it has not.
    """

    __slots__ = ("driver", "failed", "matcher")

    def __init__(self, matcher: Matcher, driver: GrammarDriver) -> None:
        self.matcher = matcher
        self.driver = driver
        self.failed: EngineError | None = None

    def accept(self, tokens: Sequence[int]) -> int:
        if self.failed is None:
            try:
                return self.matcher.accept(tokens) if tokens else 0
            except Exception as error:
                self.fail(error)
        raise cast("EngineError", self.failed)

    def rollback(self, num_tokens: int) -> None:
        if self.failed is None:
            try:
                self.matcher.rollback(num_tokens)
            except Exception as error:
                self.fail(error)

    def forced_bytes(self) -> bytes:
        if self.failed is None:
            try:
                return self.matcher.forced_bytes()
            except Exception as error:
                self.fail(error)
        return b""

    @property
    def finished(self) -> bool:
        if self.failed is None:
            try:
                return self.matcher.finished
            except Exception as error:
                self.fail(error)
        return False

    def fail(self, error: Exception) -> None:
        """The driver raised this over it."""
        self.failed = self.driver.candidate.fault("follow a request's structured_outputs", error)


class Grammars:
    """Implements `engine.interfaces.grammar.Grammar` over several.

    A driver that refuses a constraint, by its card or when it compiles it, hands it on to the next. What it takes too
    long or too much memory over it hands on as well: others may have a better way. Thread-safe.

    Args:
        turns: the drivers by kind of constraint, in the order in which they are asked.
        vocab_size: of the model.
    """

    def __init__(self, turns: Mapping[str, Sequence[GrammarDriver]], vocab_size: int) -> None:
        self._turns = turns
        self._words = -(-vocab_size // 32)
        self._lock = threading.Lock()
        self._later: OrderedDict[bytes, int] = OrderedDict()  # by hash of the constraint: whose turn it was in the end

    def compile(self, constraint: StructuredOutputsParams, end_token_ids: Sequence[int]) -> Matcher:
        """The error where nobody takes it names each driver and its reason."""
        (kind,) = constraint.kinds
        key = _key(constraint)
        with self._lock:
            first = self._later.get(key, 0)
        refusals: list[tuple[str, InvalidRequestError]] = []
        for turn, driver in enumerate(self._turns.get(kind, ())):
            if turn < first:
                continue
            try:
                driver.card.verify(constraint)
                matcher = driver.grammar.compile(constraint, end_token_ids)
                self._check_beginning(matcher, driver.grammar, constraint)
            except InvalidRequestError as error:
                refusals.append((driver.candidate.name, error))
                continue
            except Exception as error:
                raise driver.candidate.fault(constraint.asked, error) from error
            if turn > first:
                self._remember(key, turn)
            return InTurn(matcher, driver)
        if not refusals:
            raise InvalidRequestError(constraint.asked, "no grammar driver at work enforces it")
        raise constraint.refused(refusals)

    def fill_masks(self, matchers: Sequence[Matcher], rows: np.ndarray, out: np.ndarray) -> None:
        """Each driver is asked once; where it raises, once for each matcher, and whoever it raises over fails. Nothing
        is asked about those that have failed before."""
        places: dict[int, list[int]] = {}
        held = cast("Sequence[InTurn]", matchers)
        for place, matcher in enumerate(held):
            if matcher.failed is None:
                places.setdefault(id(matcher.driver), []).append(place)
            else:
                out[rows[place]] = -1
        for of_driver in places.values():
            mine, at = [held[place] for place in of_driver], rows if len(of_driver) == len(held) else rows[of_driver]
            grammar = mine[0].driver.grammar
            try:
                grammar.fill_masks([matcher.matcher for matcher in mine], at, out)
            except Exception:
                for place, matcher in enumerate(mine):
                    self._fill_one(matcher, at[place : place + 1], out)

    def _fill_one(self, matcher: InTurn, row: np.ndarray, out: np.ndarray) -> None:
        try:
            matcher.driver.grammar.fill_masks([matcher.matcher], row, out)
        except Exception as error:
            matcher.fail(error)
            out[row] = -1

    def close(self) -> None:
        for driver in {id(driver.grammar): driver for turns in self._turns.values() for driver in turns}.values():
            try:
                driver.grammar.close()
            except Exception:
                logger.warning("grammar '%s' cannot be closed", driver.candidate.name, exc_info=True)

    def _check_beginning(self, matcher: Matcher, grammar: Grammar, constraint: StructuredOutputsParams) -> None:
        """That there is a way to begin. Raises InvalidRequestError."""
        mask = np.zeros((1, self._words), np.int32)
        if not matcher.finished:
            grammar.fill_masks([matcher], np.zeros(1, np.int32), mask)
            if not mask.any():
                raise InvalidRequestError(constraint.asked, "nothing can be written under it: no token may come first")

    def _remember(self, key: bytes, turn: int) -> None:
        with self._lock:
            self._later[key] = turn
            while len(self._later) > REMEMBERED:
                self._later.popitem(last=False)


def warm_up(drivers: Sequence[GrammarDriver], end_token_ids: Sequence[int]) -> None:
    """Have each driver compile the least that it can be asked, so that its library, its vocabulary and its process are
    ready for the first request. Nothing comes of a failure: that request will hear of it."""
    for driver in drivers:
        for trial in TRIALS:
            if trial.kinds[0] in driver.card.constraints:
                try:
                    driver.grammar.compile(trial, end_token_ids)
                except EngineError as error:
                    logger.info("grammar '%s' does not warm up: %s", driver.candidate.name, error)
                except Exception:
                    logger.warning("grammar '%s' does not warm up", driver.candidate.name, exc_info=True)
                break


def _key(constraint: StructuredOutputsParams) -> bytes:
    return hashlib.blake2b(msgspec.json.encode(constraint), digest_size=16).digest()
