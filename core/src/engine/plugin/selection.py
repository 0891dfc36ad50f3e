"""What a card says about a need, what was chosen in the end, and why."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic

from engine.plugin.candidate import Candidate
from engine.plugin.loading import load_body
from engine.plugin.points import ANY_ARCHITECTURE, PICKS, POINTS, CardT, Pick
from engine.types.errors import ContractError, EngineError

if TYPE_CHECKING:
    from engine.plugin.card import Card
    from engine.types.start import Choice

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Verdict:
    """One candidate's answer to one need.

    Attributes:
        candidate: who was asked.
        fit: whether it can serve the need.
        reasons: why not; empty where it fits.
    """

    candidate: Candidate
    fit: bool
    reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.candidate.name} ({self.candidate.provenance}): {'; '.join(self.reasons) or 'fits'}"


@dataclass(frozen=True)
class Selection(Generic[CardT]):
    """A chosen driver, and how it came to be chosen.

    Attributes:
        point: the point's name.
        kind: the layer kind or operation it is chosen for; "" where the point has none.
        candidate: where it comes from.
        card: its imported card.
        options: its validated options (an instance of `card.Options`), None where it has none.
        asked: True where the user named it, False where `auto` found it.
        verdicts: everyone who was considered, in order, with their reasons.
        need: what was asked of them.
    """

    point: str
    kind: str
    candidate: Candidate
    card: type[CardT]
    options: Any
    asked: bool
    verdicts: tuple[Verdict, ...] = ()
    need: Any = None

    @property
    def reason(self) -> str:
        """Why it was chosen, e.g. "asked for", or "auto, priority 10"."""
        if self.asked:
            return "asked for"
        if self.candidate.name == ANY_ARCHITECTURE:
            return f"it serves the architecture, which no driver at hand is for; priority {self.card.priority}"
        found_by = PICKS[POINTS[self.point].pick].found_by
        if found_by and sum(v.candidate.name == self.candidate.name for v in self.verdicts) > 1:
            found_by += f", priority {self.card.priority}"
        return found_by or f"auto, priority {self.card.priority}"

    def load_body(self, half: str | None = None) -> type:
        """Import the driver's body; see `engine.plugin.loading.load_body`."""
        return load_body(self.card, half, candidate=self.candidate)

    def build(self, context: Any, half: str | None = None) -> Any:
        """The driver's body, built with this context.

        Raises:
            DriverImportError, ContractError: as `load_body`.
            ContractError: its constructor raised something else than an error of Engine's own.
        """
        body = self.load_body(half)
        try:
            return body(context)
        except EngineError:
            raise
        except Exception as error:
            logger.exception("%s cannot be built", self.candidate.label)
            its_body = f"its body {body.__module__}:{body.__qualname__} of {self.candidate.provenance}"
            found = f"{its_body} raised {type(error).__name__}: {error}"
            remedy = "the log has the traceback; mend what it names, name another driver, or report it to its author"
            raise self.candidate.error(ContractError, found, remedy, "build") from error

    def choice(self) -> Choice:
        """The selection as plain data, which travels."""
        options = {} if self.options is None else self.options.model_dump(mode="json")
        return self.candidate.choice(kind=self.kind, options=options, asked=self.asked)


# -- asking a card -----------------------------------------------------------------------------------------------------
def judge(card: type[Card], candidate: Candidate, need: Any) -> Verdict:
    """Ask a card whether it can serve `need`, or all needs of a tuple: first what it declares, then its `unsupported`.

    Raises ContractError: it raised, or answered something else than a list of strings.
    """
    if isinstance(need, tuple):
        found = [reason for each in need for reason in judge(card, candidate, each).reasons]
        return Verdict(candidate, fit=not found, reasons=tuple(dict.fromkeys(found)))
    remedy, method = "its author has to return a list of reasons, empty where it fits", "mismatches"
    try:
        reasons, method = card.mismatches(need), "unsupported"
        answer: object = card.unsupported(need)
        valid = isinstance(answer, (list, tuple)) and all(isinstance(reason, str) for reason in answer)
    except Exception as error:
        raise _broken(candidate, f"its {method}() raised {_raised(error)}", remedy) from error
    if not valid:
        raise _broken(candidate, f"its unsupported() answered {answer!r}, not a list of strings", remedy)
    assert isinstance(answer, (list, tuple))
    reasons.extend(answer)
    return Verdict(candidate, fit=not reasons, reasons=tuple(reasons))


def answer(how: Pick, card: type[Card], candidate: Candidate, asks: Mapping[str, Any], named: bool = False) -> Verdict:
    """What a card says to several needs at once, as `choose` asks it.

    Args:
        how: the pick of its point.
        asks: kind to need. The card has to serve them all; one of them where `how` takes all drivers that fit.
        named: whether the user named the driver, who then need not claim or recognise anything.

    Raises ContractError for a card that cannot say.
    """
    served = how.served(card, asks)
    if how.takes == "all":
        asks = {kind: asks[kind] for kind in served[:1]} or {", ".join(asks): None}
    reasons = ["it has to be asked for by name"] if card.by_name and not named else []
    for kind, need in asks.items():
        if kind in served:
            reasons += judge(card, candidate, need).reasons
        else:
            reasons.append(how.lacks.format(served=how.offer(card), asked=kind))
    if how.question and not reasons and not named:
        (need,) = asks.values()
        try:
            told = bool(getattr(card, how.question)(need))
        except Exception as error:
            found = f"its {how.question}() raised {_raised(error)}"
            raise _broken(candidate, found, "its author has to answer True or False") from error
        if not told:
            reasons.append(how.denies.format(need=need))
    return Verdict(candidate, not reasons, tuple(dict.fromkeys(reasons)))


def _raised(error: Exception) -> str:
    """What a method of a card raised, and where, e.g. "KeyError: 'mps' at /lib/moon/card.py:12". To be called where it
    was caught."""
    text = f"{type(error).__name__}: {error}"
    _, *within = traceback.walk_tb(error.__traceback__)  # the first frame is the caller's
    return f"{text} at {within[-1][0].f_code.co_filename}:{within[-1][1]}" if within else text


def _broken(candidate: Candidate, found: str, remedy: str) -> ContractError:
    return candidate.error(ContractError, f"{found} ({candidate.value} of {candidate.provenance})", remedy)
