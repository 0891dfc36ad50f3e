"""Which drivers are installed: one pass over the distributions' metadata, before anything of theirs is imported."""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from engine.plugin.candidate import Candidate, Problem, installed
from engine.plugin.card import Card
from engine.plugin.hints import did_you_mean, known_drivers, near_matches
from engine.plugin.loading import load_entry_point
from engine.plugin.plugin_list import PluginList, only
from engine.plugin.points import CLIENT, COMMAND_MAJORS, HOOK_MAJORS, HOOK_PROCESSES, PICKS, POINTS, Point
from engine.types.errors import (
    ContractError,
    DriverDeniedError,
    DriverNotFoundError,
    DuplicateDriverError,
    IncompatibleDriverError,
    PluginError,
)

if TYPE_CHECKING:
    from engine.types.start import BrokenPlugin

logger = logging.getLogger(__name__)

SLOW_SECONDS = 5.0
"""A card that takes longer to import is named in the log: the start waits for it."""


@dataclass
class Registry:
    """What is installed, and the cards that have been imported from it.

    Tests build one from a list of candidates; a process builds one with `Registry.discover()` and passes it down.

    Attributes:
        found: every candidate that was found, those of majors outside the served range included.
        problems: metadata that could not be read, and groups of points that this core does not know.
        quarantine: candidates that turned out to be broken while looking for a driver nobody named, with their error.
        points: the points that are served.
        plugins: the list that says which of them may be used.
        denied: those that it denies, with the reason: they are no candidates, and are never imported.
    """

    found: Sequence[Candidate] = ()
    problems: tuple[Problem, ...] = ()
    points: Mapping[str, Point[Any, Any]] = field(default_factory=lambda: POINTS)
    quarantine: dict[Candidate, PluginError] = field(default_factory=dict)
    plugins: PluginList = field(default_factory=PluginList)
    denied: Mapping[Candidate, str] = field(init=False)
    _cards: dict[Candidate, type[Card]] = field(default_factory=dict, repr=False)
    _candidates: dict[str, tuple[Candidate, ...]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.found = tuple(dict.fromkeys(self.found))
        self._candidates = {}
        self.denied = self.plugins.denials(self.found, [_name_of(problem) for problem in self.problems])
        self.problems = tuple(p for p in self.problems if not self.plugins.denies_distribution(_name_of(p)))

    @classmethod
    def discover(cls, extra: Iterable[Candidate] = (), plugins: PluginList | None = None) -> Registry:
        """Read what is installed; import nothing.

        Args:
            extra: further candidates, beside those that are installed (for tests).
            plugins: which of them may be used; None: all.

        Raises ConfigError: the list names what is not installed, or contradicts itself.
        """
        there = installed()
        unknown = {c: problem for c in there.candidates if (problem := _unknown_point(c))}
        found = (*(c for c in there.candidates if c not in unknown), *extra)
        return cls(found, (*there.problems, *unknown.values()), plugins=plugins or PluginList())

    def following(self, plugins: PluginList) -> Registry:
        """The same under this list; itself where it has that already, or where the list is empty.

        Raises ConfigError as `discover`.
        """
        return self if plugins.text in ("", self.plugins.text) else replace(self, plugins=plugins)

    # -- what there is -----------------------------------------------------------------------------------------------
    def candidates(self, point: str) -> tuple[Candidate, ...]:
        """The candidates of a point within the served majors, sorted by name and distribution.

        Where one distribution registers a name under several served majors, the highest counts.
        """
        if point not in self._candidates:
            mine = [c for c in self.found if c.point == point and c not in self.denied]
            mine = sorted((c for c in mine if c.major in self._majors(point)), key=lambda c: c.major)
            highest = {(c.name, c.distribution): c.major for c in mine}
            mine = [c for c in mine if c.major == highest[c.name, c.distribution]]
            self._candidates[point] = tuple(sorted(mine, key=lambda c: (c.name, c.distribution, c.value)))
        return self._candidates[point]

    def outdated(self, point: str) -> tuple[Candidate, ...]:
        """The candidates of a point that speak only majors outside the served range."""
        served = {(c.name, c.distribution) for c in self.candidates(point)}
        outside = (c for c in self.found if c.point == point and c.major not in self._majors(point))
        outside = (c for c in outside if c not in self.denied)
        return tuple(sorted((c for c in outside if (c.name, c.distribution) not in served), key=lambda c: c.name))

    def namesakes(self, candidate: Candidate) -> list[Candidate]:
        """Those of its name, itself among them, where there are several and nothing says which one is meant."""
        point = self.points.get(candidate.point)
        same = [c for c in self.candidates(candidate.point) if c.name == candidate.name]
        return same if len(same) > 1 and not (point and PICKS[point.pick].namesakes) else []

    def find(self, point: str, name: str, distribution: str = "") -> Candidate:
        """The one candidate of this name; where several may offer the name (`Pick.namesakes`) of this distribution, or
        the one whose card has the highest priority.

        Raises:
            DriverNotFoundError: nothing of this name is installed.
            DriverDeniedError: the list of plugins denies it.
            DuplicateDriverError: two distributions offer it.
            IncompatibleDriverError: it is installed, but for majors outside the served range.
        """
        matches = [c for c in self.candidates(point) if c.name == name]
        if distribution and point in self.points and PICKS[self.points[point].pick].namesakes:
            matches = [c for c in matches if c.distribution == distribution] or matches
        if len(matches) > 1 and point in self.points and PICKS[self.points[point].pick].namesakes:
            cards = {c: self.card(c) for c in matches}
            matches = [c for c in matches if cards[c].priority == max(card.priority for card in cards.values())]
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise duplicate(point, matches)
        if outdated := [c for c in self.outdated(point) if c.name == name]:
            raise self.incompatible(outdated[0])
        if denied := [c for c in only(self.denied, point) if c.name == name]:
            raise self.denial(denied[0])
        raise self._not_found(point, name)

    # -- cards -------------------------------------------------------------------------------------------------------
    def card(self, candidate: Candidate) -> type[Card]:
        """Import the candidate's card, and nothing else of its distribution; later calls answer from memory.

        Raises:
            DriverImportError: the import raised, whatever it raised.
            ContractError: what the entry point names is not a subclass of the point's card interface.
            IncompatibleDriverError: the card needs a newer minor version of the interface.
        """
        if candidate in self._cards:
            return self._cards[candidate]
        point, started = self.points[candidate.point], time.monotonic()
        card = load_entry_point(candidate)
        if (seconds := time.monotonic() - started) > SLOW_SECONDS:
            logger.warning(
                "the card of %s (%s) took %.1f s to import; see `engine plugins doctor`",
                *(candidate.label, candidate.provenance, seconds),
            )
        module, _, attribute = point.interface.partition(":")
        interface: type[Card] = getattr(importlib.import_module(module), attribute)
        if not isinstance(card, type) or not issubclass(card, interface):
            found = f"{candidate.value} of {candidate.provenance} is {card!r}, not a subclass of {point.interface}"
            raise candidate.error(ContractError, found, "its author has to name the card class in the entry point")
        if card.requires_minor > point.minor:
            needs = f"{candidate.provenance} needs interface {candidate.major}.{card.requires_minor}"
            found = f"{needs}, this core has {candidate.major}.{point.minor}"
            raise candidate.error(IncompatibleDriverError, found, "pip install --upgrade engine")
        self._cards[candidate] = card
        return card

    # -- helpers -----------------------------------------------------------------------------------------------------
    def _majors(self, point: str) -> tuple[int, ...]:
        if point in ("commands", CLIENT):
            return COMMAND_MAJORS
        return HOOK_MAJORS if point.startswith("hooks.") else self.points[point].majors

    def _not_found(self, point: str, name: str) -> DriverNotFoundError:
        installed = self.candidates(point)
        listing = ", ".join(f"{c.name} ({c.provenance})" for c in installed) or "none"
        elsewhere = sorted({c.point for c in self.found if c.name == name and c.point in self.points})
        hint = did_you_mean(name, (c.name for c in installed))
        if elsewhere:
            hint = f"'{name}' is a driver of {', '.join(elsewhere)}"
        known = known_drivers().get(point, {})
        if name in known:
            hint = f"pip install {known[name]}"
        elif not hint and (near := near_matches(name, known)):
            lines = (f"'{other}' (pip install {known[other]})" for other in near)
            hint = f"did you mean {' or '.join(lines)}?"
        hint = hint or "install the distribution that offers it; `engine plugins` lists what is installed"
        found = f"no installed distribution offers it; installed: {listing}"
        return DriverNotFoundError(f"use driver '{name}' for {point}", found, hint, point=point, driver=name)

    def broken(self) -> tuple[BrokenPlugin, ...]:
        """What is in quarantine, as it travels."""
        from engine.types.start import BrokenPlugin  # with msgspec, which a listing does without

        told = ((c.facts, error.found or str(error), error.remedy) for c, error in self.quarantine.items())
        return tuple(BrokenPlugin(**facts, found=found, remedy=remedy) for facts, found, remedy in told)

    def denial(self, candidate: Candidate) -> DriverDeniedError:
        """The error for a candidate that somebody asks for and the list of plugins denies."""
        named = self.denied[candidate].startswith("'")
        remedy = "take that entry out of the list" if named else f"add {candidate.distribution} to the list"
        found = f"{candidate.provenance} offers it, but {self.why_denied(candidate)}"
        return candidate.error(DriverDeniedError, found, f"{remedy}, or name another")

    def why_denied(self, candidate: Candidate) -> str:
        """The reason, with the list and where it was set."""
        return f"{self.denied[candidate]}: {self.plugins.shown}"

    def why_outdated(self, candidate: Candidate) -> str:
        """The versions, e.g. "speaks v4, this core serves v0, v1"."""
        served = ", ".join(f"v{major}" for major in self._majors(candidate.point))
        return f"speaks v{candidate.major}, this core serves {served}"

    def denies(self, point: str, name: str) -> bool:
        """Whether the list of plugins denies a driver of this name, and no other of that name is left."""
        return name in {c.name for c in only(self.denied, point)} - {c.name for c in self.candidates(point)}

    def incompatible(self, candidate: Candidate) -> IncompatibleDriverError:
        """The error for a candidate of a major outside the served range."""
        stale = candidate.major < min(self._majors(candidate.point))
        remedy = f"pip install --upgrade {candidate.distribution if stale else 'engine'}"
        found = f"{candidate.provenance} {self.why_outdated(candidate)}"
        return candidate.error(IncompatibleDriverError, found, remedy)


def duplicate(point: str, matches: Iterable[Candidate], asked: str = "") -> DuplicateDriverError:
    """The error for several candidates of one name, or of what was `asked`; it names every distribution."""
    matches = list(matches)
    distributions = list(dict.fromkeys(c.distribution for c in matches))
    remedy = "uninstall one of them: " + " or ".join(f"pip uninstall {name}" for name in distributions)
    remedy += f"; or deny one: --plugins -{distributions[-1]}"
    if point in POINTS and PICKS[POINTS[point].pick].namesakes:
        remedy = f"one card has to have the higher priority; until then deny one: --plugins -{distributions[-1]}"
    if len(distributions) == 1:
        remedy = f"its author has to register the name once; until then: pip uninstall {distributions[0]}"
    return DuplicateDriverError(
        asked or f"use driver '{matches[0].name}' for {point}",
        "it is offered more than once: " + " and ".join(f"{c.value} by {c.provenance}" for c in matches),
        remedy,
        point=point,
        driver=matches[0].name,
        distribution=", ".join(c.provenance for c in matches),
    )


def _name_of(problem: Problem) -> str:
    return problem.distribution.partition(" ")[0]


def _unknown_point(candidate: Candidate) -> Problem | None:
    known = {*POINTS, "commands", CLIENT, *(f"hooks.{process}" for process in HOOK_PROCESSES)}
    if candidate.point in known:
        return None
    near = near_matches(candidate.point, known)
    return Problem(
        candidate.provenance,
        f"'{candidate.name}' is registered in {candidate.group}, which is no point of this core",
        f"did its author mean {' or '.join(near)}?" if near else "a newer core may have it: pip install -U engine",
    )
