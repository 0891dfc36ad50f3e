"""Choosing drivers: one walk over the cards of a point, whatever its pick.

Two rules hold for all of them. A driver asked for by name never falls back: missing, broken or unfit, it ends the
start with one error. `auto` walks the cards by priority, keeps every reason, and puts what is broken into quarantine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.plugin.candidate import Candidate
from engine.plugin.discovery import Registry, duplicate
from engine.plugin.hints import did_you_mean
from engine.plugin.options import validate_options
from engine.plugin.plugin_list import only
from engine.plugin.points import ANY_ARCHITECTURE, NONE, PICKS, CardT, NeedT, Point
from engine.plugin.selection import Selection, Verdict, answer
from engine.types.errors import (
    ConfigError,
    EngineError,
    ModelNotFoundError,
    PluginError,
    UnfitDriverError,
    UnsupportedModelError,
)

if TYPE_CHECKING:
    from engine.interfaces.checkpoint import CheckpointCard
    from engine.plugin.card import Card

AUTO = "auto"


def choose(
    registry: Registry,
    point: Point[CardT, NeedT],
    asks: Mapping[str, NeedT],
    asked: str | None = None,
    options: Mapping[str, Any] | None = None,
    together: Iterable[tuple[str, ...]] = (),
) -> list[Selection[CardT]]:
    """Choose the drivers of a point. How they are picked stands in its declaration, see `engine.plugin.points.PICKS`.

    Args:
        registry: what is installed.
        point: the point.
        asks: what the engine asks of a driver, by kind: the kinds of layer that the model has, operations, kinds of
            request, jobs, architectures; {"": need} where there is one thing to ask.
        asked: what the user named: a driver, several with commas, or kind=driver,...; None or "auto" leaves all to the
            cards.
        options: the options given for this point; each chosen driver gets those that it knows.
        together: groups of kinds that are taken from one driver.

    Returns:
        By kind, in the order of `asks` and of turns; drivers that do several jobs at once stand there once. Empty where
        an optional point's driver is not named, or none recognises the model, or does a job.

    Raises:
        ConfigError: what was named cannot be read, or there are options and no driver to take them.
        ModelNotFoundError, UnsupportedModelError: nobody claims the model's name, or has its architecture.
        PluginError: a named driver is missing, duplicate, broken, incompatible or unfit (each its own subclass); no
            driver fits, with everybody's reasons; an option is unknown or bad.
    """
    if point.pick == "recognises" and asked is not None and asked.strip() == NONE:
        chosen: list[Selection[Any]] = []
    else:
        walk = _Walk(registry, point, asks, asked)
        chosen = walk.jobs() if point.pick == "many" else walk.by_kind(together)
    if not chosen:
        if options:
            raise _options_for_nobody(point, options, asked)
        return []
    validated = validate_options(point.name, [(taken.candidate, taken.card) for taken in chosen], options)
    return [replace(taken, options=validated[taken.candidate]) for taken in chosen]


def choose_one(
    registry: Registry,
    point: Point[CardT, NeedT],
    need: NeedT,
    asked: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Selection[CardT]:
    """Choose the driver of a point that has one: see `choose`."""
    (selection,) = choose(registry, point, {"": need}, asked, options)
    return selection


class DefaultModel(NamedTuple):
    """A model that is used where the user names none, and the driver that brings it."""

    candidate: Candidate
    name: str


def default_model(registry: Registry, point: Point[CheckpointCard, str], asked: str | None = None) -> DefaultModel:
    """The model where the user names none: of the one card that declares a `default_model`; `asked`: of this driver's.

    Raises ConfigError where no card declares one, or several do; PluginError as `choose`.
    """
    passed_over: list[Verdict] = []
    if asked is None:
        cards, passed_over = ranked(registry, point.name)
    else:
        candidate = registry.find(point.name, asked.strip())
        cards = [(candidate, registry.card(candidate))]
    offers = [DefaultModel(c, card.default_model) for c, card in cards if card.default_model is not None]  # type: ignore[attr-defined]
    for candidate, _ in offers:
        registry.find(point.name, candidate.name)  # two of one name: no name says which one is meant
    if len(offers) == 1:
        return offers[0]
    found = "no installed checkpoint driver brings a model of its own" + "".join(f"; {v}" for v in passed_over)
    if offers:
        found = "several drivers bring one: " + " and ".join(f"{name!r} of {c.provenance}" for c, name in offers)
    remedy = "name one: " + (" or ".join(f"--model {name}" for _, name in offers) or "--model PATH")
    raise ConfigError("start without naming a model", found, remedy)


def ranked(
    registry: Registry, point: str, name: str | None = None
) -> tuple[list[tuple[Candidate, type[Card]]], list[Verdict]]:
    """The cards of a point as `auto` walks them: by priority, ties by name; and the verdicts on those that it passes
    over, which are broken or denied. With a `name`, those of that name alone: no other is imported.

    Broken candidates are put into quarantine, not raised. Two of one name are both there: the name is refused where it
    would be taken.
    """
    cards: list[tuple[Candidate, type[Card]]] = []
    passed_over: list[Verdict] = []
    for candidate in registry.candidates(point):
        if name is not None and candidate.name != name:
            continue
        if candidate not in registry.quarantine:
            try:
                cards.append((candidate, registry.card(candidate)))
                continue
            except PluginError as error:
                registry.quarantine[candidate] = error
        passed_over.append(_broken(registry, candidate))
    cards.sort(key=lambda pair: (-pair[1].priority, pair[0].name))
    for candidate in only(registry.denied, point):
        if name is None or candidate.name == name:
            passed_over.append(Verdict(candidate, False, (f"denied: {registry.why_denied(candidate)}",)))
    return cards, passed_over


def or_quarantine(registry: Registry, candidate: Candidate, ask: Callable[[], Verdict]) -> Verdict:
    """The verdict of a driver that nobody asked for by name: where its card is broken, that is the verdict."""
    if candidate not in registry.quarantine:
        try:
            return ask()
        except PluginError as error:
            registry.quarantine[candidate] = error
    return _broken(registry, candidate)


def _broken(registry: Registry, candidate: Candidate) -> Verdict:
    error = registry.quarantine[candidate]
    return Verdict(candidate, False, (f"broken: {error.found or error}",))


class _Named(NamedTuple):
    """A driver that the user named; `kind` is what it is named for, None: whatever is asked."""

    candidate: Candidate
    card: type[Any]
    kind: str | None


class _Walk:
    """One choice under way; the arguments are those of `choose`."""

    def __init__(self, registry: Registry, point: Point[Any, Any], asks: Mapping[str, Any], asked: str | None) -> None:
        self._registry = registry
        self._point = point
        self._pick = PICKS[point.pick]
        self._asks = asks
        self._asked = asked
        names, others = _names(point, asks, asked)
        self._others = others and not point.optional
        self._names = [name for _, name in names]
        found = [] if self._pick.namesakes else names
        self._named = [named for kind, name in found for named in self._find(kind, name)]
        self._refusals: dict[Candidate, list[str]] = {named.candidate: [] for named in self._named}

    @cached_property
    def _ranked(self) -> tuple[list[tuple[Candidate, type[Any]]], list[Verdict]]:
        return ranked(self._registry, self._point.name)

    def _find(self, kind: str | None, name: str) -> list[_Named]:
        """What a name stands for: with one driver for each kind, a name alone stands for the kinds that it serves."""
        candidate = self._registry.find(self._point.name, name)
        card = self._registry.card(candidate)
        if kind is not None or self._point.pick != "per_kind":
            return [_Named(candidate, card, kind)]
        if not (served := self._pick.served(card, self._asks)):
            reason = f"it serves layers of kind {self._pick.offer(card)}, the model has {', '.join(self._asks)}"
            raise self._unfit(Verdict(candidate, False, (reason,)))
        return [_Named(candidate, card, kind) for kind in served]

    # -- every pick but `many` ---------------------------------------------------------------------------------------
    def by_kind(self, together: Iterable[tuple[str, ...]]) -> list[Selection[Any]]:
        """Who serves each kind."""
        if self._point.pick == "by_architecture":
            return self._of_architecture()
        if self._pick.takes == "first":
            group_of = {kind: group for group in together for kind in group}
            kinds = dict.fromkeys(
                tuple(k for k in group_of.get(kind, (kind,)) if k in self._asks) for kind in self._asks
            )
            groups = [{kind: self._asks[kind] for kind in group} for group in kinds]
        else:
            groups = [dict(self._asks)]
        chosen = [taken for group in groups for taken in self._take(group)]
        at_work = {taken.candidate for taken in chosen}
        for candidate, reasons in self._refusals.items():
            if candidate not in at_work:
                why = reasons or ["drivers named before it take every operation that it offers"]
                raise self._unfit(Verdict(candidate, False, ("it serves no operation", *why)))
        place = {kind: index for index, kind in enumerate(self._asks)}
        return sorted(chosen, key=lambda taken: place.get(taken.kind, 0))

    def _take(self, group: Mapping[str, Any]) -> list[Selection[Any]]:
        """Who serves a group of kinds: the first that fits, or all that do."""
        verdicts: list[Verdict] = []
        fitting: list[tuple[Candidate, type[Any], bool]] = []
        for candidate, card, named in self._in_order(group):
            if named:
                verdicts.append(self._ask_named(candidate, card, group))
            else:
                verdicts.append(self._ask(candidate, partial(answer, self._pick, card, candidate, group)))
            if verdicts[-1].fit:
                fitting.append((candidate, card, named))
                if self._pick.takes == "first":
                    break
        only_named = self._pick.takes == "first" and fitting and fitting[0][2]
        if self._others and not only_named:
            verdicts += self._ranked[1]
        if self._pick.takes == "only" and len(fitting) > 1:
            raise self._several(group[""], [candidate for candidate, _, _ in fitting])
        if not fitting and self._others and self._pick.required:
            raise self._nobody(group, verdicts)
        return [
            self._selection(kind, need, candidate, card, named, verdicts)
            for kind, need in group.items()
            for candidate, card, named in fitting
            if self._pick.served(card, [kind])
        ]

    def _in_order(self, group: Mapping[str, Any]) -> Iterator[tuple[Candidate, type[Any], bool]]:
        """(candidate, card, whether it was named): those that were named for this, then the others."""
        named = {n.candidate: n.card for n in self._named if n.kind is None or n.kind in group}
        yield from ((candidate, card, True) for candidate, card in named.items())
        if self._others:
            yield from ((candidate, card, False) for candidate, card in self._ranked[0] if candidate not in named)

    def _ask_named(self, candidate: Candidate, card: type[Any], group: Mapping[str, Any]) -> Verdict:
        verdict = answer(self._pick, card, candidate, group, named=True)
        if not verdict.fit and not self._pick.tolerant:
            raise self._unfit(verdict, group=group)
        refused = self._refusals[candidate]
        refused += [reason for reason in verdict.reasons if reason not in refused]
        return verdict

    def _ask(self, candidate: Candidate, ask: Callable[[], Verdict]) -> Verdict:
        """The verdict of one that nobody named. Raises DuplicateDriverError for one that fits where another
        distribution offers its name: no name says which one runs."""
        verdict = or_quarantine(self._registry, candidate, ask)
        if verdict.fit:
            self._registry.find(self._point.name, candidate.name)
        return verdict

    def _selection(
        self, kind: str, need: Any, candidate: Candidate, card: type[Any], named: bool, verdicts: Iterable[Verdict]
    ) -> Selection[Any]:
        return Selection(self._point.name, kind, candidate, card, None, named, tuple(verdicts), need)

    def _of_architecture(self) -> list[Selection[Any]]:
        """The driver that the user named; else one that is called like an architecture, else one for any of them."""
        registry, point = self._registry, self._point.name
        asked, verdicts = bool(self._names), list[Verdict]()
        if asked:
            called = [(self._names[0], next(iter(self._asks.values())))]
        else:
            called = [*self._asks.items(), *((ANY_ARCHITECTURE, need) for need in self._asks.values())]
        for name, need in called:
            if taken := self._best_called(name, need, verdicts):
                return [self._selection("", need, *taken, asked, verdicts)]
        broken = [registry.quarantine[v.candidate] for v in verdicts if v.candidate in registry.quarantine]
        if broken and len(broken) == len(verdicts):
            raise broken[0]
        considered = [verdict for verdict in verdicts if verdict.candidate not in registry.denied]
        if asked and considered:
            raise self._unfit(*considered)
        unserved = {c.name for c in (*registry.outdated(point), *only(registry.denied, point))}
        for name, _ in called:
            if not considered and (asked or name in unserved):
                registry.find(point, name)  # raises: it is missing, outdated or denied
        stated = [architecture for architecture in self._asks if architecture]
        attempt = f"load {', '.join(stated) or 'a model whose config.json names no architecture'}"
        if considered:
            found = "its driver does not serve this model: " + " | ".join(map(str, considered))
            raise UnsupportedModelError(attempt, found, "install a driver that does, and name it with --model-impl")
        names = list(dict.fromkeys(candidate.name for candidate in registry.candidates(point)))
        raise UnsupportedModelError(
            attempt,
            f"no installed driver serves it; served are: {', '.join(names) or 'none'}",
            (did_you_mean(stated[0], names) if stated else "")
            or "install a distribution that offers the architecture, or name a driver with --model-impl",
        )

    def _best_called(self, name: str, need: Any, verdicts: list[Verdict]) -> tuple[Candidate, type[Any]] | None:
        """Of the drivers of one name, that which fits and has the highest priority; everybody's verdict is appended.

        Raises DuplicateDriverError where two fit that have the same priority: nothing says which one is meant.
        """
        cards, passed_over = ranked(self._registry, self._point.name, name)
        fitting: list[tuple[Candidate, type[Any]]] = []
        for candidate, card in cards:
            if fitting and card.priority < fitting[0][1].priority:
                break
            ask = partial(answer, self._pick, card, candidate, {"": need}, bool(self._names))
            verdicts.append(or_quarantine(self._registry, candidate, ask))
            if verdicts[-1].fit:
                fitting.append((candidate, card))
        verdicts += passed_over
        if len(fitting) > 1:
            raise duplicate(self._point.name, [candidate for candidate, _ in fitting])
        return fitting[0] if fitting else None

    # -- many --------------------------------------------------------------------------------------------------------
    def jobs(self) -> list[Selection[Any]]:
        """All that are named, and for each job that none of them does the first that fits and whose jobs are all free;
        a job that nobody does stays undone. Those with jobs come in the order of these."""
        need = next(iter(self._asks.values()))
        doing: dict[str, Candidate] = {}
        chosen: list[Selection[Any]] = []

        def take(candidate: Candidate, card: type[Any], named: bool, verdicts: Sequence[Verdict]) -> None:
            chosen.append(self._selection("", need, candidate, card, named, verdicts))
            doing.update(dict.fromkeys(getattr(card, self._pick.serves), candidate))

        def free(candidate: Candidate, card: type[Any]) -> Verdict:
            taken = [job for job in sorted(getattr(card, self._pick.serves)) if job in doing]
            reasons = (f"'{doing[job].name}' serves {job} already" for job in taken)
            verdict = answer(self._pick, card, candidate, {"": need})
            return Verdict(candidate, verdict.fit and not taken, (*verdict.reasons, *reasons))

        for candidate, card, _ in self._named:
            verdict = self._ask_named(candidate, card, {"": need})
            for job in getattr(card, self._pick.serves):
                if job in doing:
                    found = f"both '{doing[job].name}' and '{candidate.name}' serve {job}"
                    raise ConfigError(f"{self._point.option_flag}={self._asked}", found, "name one of them")
            take(candidate, card, True, [verdict])
        cards, passed_over = self._ranked
        for job in self._asks:
            verdicts: list[Verdict] = []
            for candidate, card in cards:
                if job not in doing and self._pick.served(card, [job]):
                    verdicts.append(self._ask(candidate, partial(free, candidate, card)))
                    if verdicts[-1].fit:
                        take(candidate, card, False, [*verdicts, *passed_over])
        jobs = list(self._asks)
        chosen.sort(key=lambda taken: min(map(jobs.index, self._pick.served(taken.card, jobs)), default=len(jobs)))
        return chosen

    # -- errors ------------------------------------------------------------------------------------------------------
    def _label(self, group: Iterable[str]) -> str:
        """The point as people read it, e.g. "attention (full)"."""
        kinds = ", ".join(group) if self._pick.takes == "first" else ""
        return f"{self._point.name} ({kinds})" if kinds else self._point.name

    def _unfit(self, *verdicts: Verdict, group: Iterable[str] = ()) -> UnfitDriverError:
        """The error for a driver that was asked for by name and does not fit: nothing else is tried."""
        candidate, point = verdicts[0].candidate, self._point
        return UnfitDriverError(
            f"use driver '{candidate.name}' for {self._label(group)}",
            " | ".join(f"{v.candidate.provenance} says: {'; '.join(v.reasons)}" for v in verdicts),
            f"name another driver, or leave {point.option_flag} out {point.unnamed}",
            **candidate.blame,
        )

    def _nobody(self, group: Mapping[str, Any], verdicts: Sequence[Verdict]) -> EngineError:
        """The error for a search in which no candidate fits; it carries every candidate's reasons."""
        everyone = " | ".join(map(str, verdicts))
        if self._point.pick == "claims":
            return ModelNotFoundError(
                f"open model {group['']!r}",
                f"no checkpoint driver claims it: {everyone or 'none is installed'}",
                f"check the path or the name, or force a driver with {self._point.option_flag}",
            )
        found = f"none of the installed drivers fits: {everyone}"
        remedy = "install a driver that fits, or change what the reasons name"
        if not verdicts:
            found = "no driver of this point is installed"
            remedy = "install a distribution that offers one; `engine plugins` lists what is there"
        return PluginError(f"choose a driver for {self._label(group)}", found, remedy, point=self._point.name)

    def _several(self, name: str, claiming: Sequence[Candidate]) -> PluginError:
        return PluginError(
            f"open model {name!r}",
            "several drivers claim it: " + " and ".join(f"{c.name} ({c.provenance})" for c in claiming),
            f"say which one is meant: {self._point.option_flag} " + " or ".join(c.name for c in claiming),
            point=self._point.name,
        )


def _names(
    point: Point[Any, Any], asks: Mapping[str, Any], asked: str | None
) -> tuple[list[tuple[str | None, str]], bool]:
    """(kind, name) of each driver that the user named, a kind of None standing for whatever is asked; and whether the
    others are asked too."""
    text, pick = (asked or "").strip() or AUTO, PICKS[point.pick]
    if point.pick == "per_kind" and "=" in text:
        return list(_exact(point, asks, text).items()), pick.helped
    names = [name.strip() for name in text.split(",") if name.strip()] if pick.several else [text]
    if len(set(names)) < len(names):
        raise ConfigError(f"{point.option_flag}={asked}", "a name stands there twice", "name each once")
    named = [name for name in names if name != AUTO]
    return [(None, name) for name in named], pick.helped or AUTO in names or not named


def _exact(point: Point[Any, Any], asks: Mapping[str, Any], text: str) -> dict[str | None, str]:
    """Read "full=x,sliding=y"; the entries of "auto" are left out."""
    flag = point.option_flag
    named: dict[str | None, str] = {}
    for part in text.split(","):
        kind, _, name = (piece.strip() for piece in part.partition("="))
        found = hint = ""
        if not kind or not name:
            found, hint = f"'{part.strip()}' is not kind=driver", f"write {flag} kind=driver,... or {flag}=driver"
        elif kind not in point.kinds:
            found = f"there is no layer kind '{kind}'"
            hint = did_you_mean(kind, point.kinds) or f"the kinds are: {', '.join(point.kinds)}"
        elif kind not in asks:
            found = f"the model has no layers of kind '{kind}', it has: {', '.join(asks)}"
            hint = f"leave {kind}= out"
        elif kind in named:
            found, hint = f"'{kind}' is named twice", "name each kind once"
        if found:
            raise ConfigError(f"{flag}={text}", found, hint)
        named[kind] = name
    return {kind: name for kind, name in named.items() if name != AUTO}


def _options_for_nobody(point: Point[Any, Any], options: Mapping[str, Any], asked: str | None) -> ConfigError:
    name, value = next(iter(options.items()))
    found = f"no {point.name} is at work" + (", as was asked" if asked is not None and asked.strip() == NONE else "")
    if point.optional:
        found = f"no {point.name} is chosen, and without one there is none"
    remedy = f"name one with {point.option_flag} DRIVER, or leave the option out"
    return ConfigError(f"set {point.name}.{name} to {value!r}", found, remedy)
