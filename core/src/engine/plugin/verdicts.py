"""What a card says about a need, and what was chosen in the end."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.plugin.discovery import Candidate, Registry
from engine.plugin.loading import load_body
from engine.plugin.plugin_list import only
from engine.types.errors import ContractError, EngineError, PluginError, UnfitDriverError

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
        name = f"{self.candidate.name} ({self.candidate.provenance})"
        return f"{name}: {'; '.join(self.reasons)}" if self.reasons else f"{name}: fits"


@dataclass(frozen=True)
class Selection:
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
    card: type[Card]
    options: Any
    asked: bool
    verdicts: tuple[Verdict, ...] = ()
    need: Any = None

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
            candidate = self.candidate
            logger.exception("driver '%s' for %s cannot be built", candidate.name, candidate.point)
            raise ContractError(
                f"build driver '{candidate.name}' for {candidate.point}",
                f"its body {body.__module__}:{body.__qualname__} of {candidate.provenance} raised "
                f"{type(error).__name__}: {error}",
                "the log has the traceback; mend what it names, name another driver, or report it to its author",
                point=candidate.point,
                driver=candidate.name,
                distribution=candidate.provenance,
            ) from error

    def choice(self) -> Choice:
        """The selection as plain data, which travels."""
        from engine.types.start import Choice

        return Choice(
            point=self.point,
            kind=self.kind,
            driver=self.candidate.name,
            distribution=self.candidate.distribution,
            version=self.candidate.version,
            value=self.candidate.value,
            options={} if self.options is None else self.options.model_dump(mode="json"),
            asked=self.asked,
        )


def judge(card: type[Card], candidate: Candidate, need: Any) -> Verdict:
    """Ask a card whether it can serve `need`.

    The framework is compared here, so that no card has to.

    Raises:
        ContractError: `unsupported` raised, or answered something else than a list of strings.
    """
    reasons: list[str] = []
    wanted = getattr(need, "framework", None)
    if wanted is not None and card.framework is not None and card.framework != wanted:
        reasons.append(f"it computes with {card.framework}, the platform with {wanted}")
    answer: object
    try:
        answer = card.unsupported(need)
        valid = isinstance(answer, (list, tuple)) and all(isinstance(reason, str) for reason in answer)
    except Exception as error:
        raise _broken(candidate, f"its unsupported() raised {raised(error)}") from error
    if not valid:
        raise _broken(candidate, f"its unsupported() answered {answer!r}, not a list of strings")
    assert isinstance(answer, (list, tuple))
    reasons.extend(answer)
    return Verdict(candidate, fit=not reasons, reasons=tuple(reasons))


def ranked(registry: Registry, point: str) -> tuple[list[tuple[Candidate, type[Card]]], list[Verdict]]:
    """The cards of a point as `auto` walks them: by priority, ties by name; and the verdicts on those that it passes
    over, which are broken or denied.

    Broken candidates are put into quarantine, not raised. Two of one name are both there: `consider` refuses the name
    where it would be taken.
    """
    cards: list[tuple[Candidate, type[Card]]] = []
    broken: list[Verdict] = []
    for candidate in registry.candidates(point):
        if candidate not in registry.quarantine:
            try:
                cards.append((candidate, registry.card(candidate)))
                continue
            except PluginError as error:
                registry.quarantine[candidate] = error
        broken.append(broken_verdict(candidate, registry.quarantine[candidate]))
    cards.sort(key=lambda pair: (-pair[1].priority, pair[0].name))
    return cards, [*broken, *(denied_verdict(registry, candidate) for candidate in only(registry.denied, point))]


def or_quarantine(registry: Registry, candidate: Candidate, judge: Callable[..., Verdict], *arguments: Any) -> Verdict:
    """`judge(*arguments)` of a driver that nobody asked for by name: where its card is broken, that is the verdict."""
    try:
        return judge(*arguments)
    except PluginError as error:
        registry.quarantine[candidate] = error
        return broken_verdict(candidate, error)


def consider(registry: Registry, candidate: Candidate, judge: Callable[..., Verdict], *arguments: Any) -> Verdict:
    """The verdict by which `auto` takes a driver or passes it over; see `or_quarantine`.

    Raises DuplicateDriverError where it fits and another distribution offers its name: no name says which one runs.
    """
    verdict = or_quarantine(registry, candidate, judge, *arguments)
    if verdict.fit:
        registry.find(candidate.point, candidate.name)
    return verdict


def raised(error: Exception) -> str:
    """What a method of a card raised, and where, e.g. "KeyError: 'mps' at /lib/moon/card.py:12". To be called where it
    was caught."""
    text = f"{type(error).__name__}: {error}"
    _, *within = traceback.walk_tb(error.__traceback__)  # the first frame is the caller's
    return f"{text} at {within[-1][0].f_code.co_filename}:{within[-1][1]}" if within else text


def broken_verdict(candidate: Candidate, error: PluginError) -> Verdict:
    """The verdict on a candidate in quarantine."""
    return Verdict(candidate, fit=False, reasons=(f"broken: {error.found or error}",))


def denied_verdict(registry: Registry, candidate: Candidate) -> Verdict:
    """The verdict on a candidate that the list of plugins denies."""
    return Verdict(candidate, fit=False, reasons=(f"denied: {registry.why_denied(candidate)}",))


def describe(point: str, kind: str = "") -> str:
    """The point as people read it, e.g. "attention (full)"."""
    return f"{point} ({kind})" if kind else point


def unfit(registry: Registry, verdict: Verdict, kind: str = "") -> UnfitDriverError:
    """The error for a driver that was asked for by name and does not fit: nothing else is tried."""
    candidate = verdict.candidate
    return UnfitDriverError(
        f"use driver '{candidate.name}' for {describe(candidate.point, kind)}",
        f"{candidate.provenance} says: {'; '.join(verdict.reasons)}",
        another(registry, candidate.point),
        point=candidate.point,
        driver=candidate.name,
        distribution=candidate.provenance,
    )


def another(registry: Registry, point: str) -> str:
    """The remedy where a driver that was named is of no use."""
    return f"name another driver, or leave {registry.points[point].option_flag} out {registry.points[point].unnamed}"


def none_fits(
    registry: Registry, point: str, kind: str, verdicts: Sequence[Verdict], error: type[PluginError] = PluginError
) -> PluginError:
    """The error for a search in which no candidate fits; it carries every candidate's reasons."""
    if not verdicts:
        return error(
            f"choose a driver for {describe(point, kind)}",
            "no driver of this point is installed",
            "install a distribution that offers one; `engine plugins` lists what is there",
            point=point,
        )
    return error(
        f"choose a driver for {describe(point, kind)}",
        "none of the installed drivers fits: " + " | ".join(str(verdict) for verdict in verdicts),
        "install a driver that fits, or change what the reasons name",
        point=point,
    )


def _broken(candidate: Candidate, found: str) -> ContractError:
    return ContractError(
        f"use driver '{candidate.name}' for {candidate.point}",
        f"{found} ({candidate.value} of {candidate.provenance})",
        "its author has to return a list of reasons, empty where it fits",
        point=candidate.point,
        driver=candidate.name,
        distribution=candidate.provenance,
    )
