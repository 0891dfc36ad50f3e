"""The list of plugins that may be used: `--plugins`, the same in every process of an engine."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import requires
from operator import methodcaller
from typing import NamedTuple

from engine.plugin.candidate import Candidate, normal
from engine.plugin.loading import brought
from engine.plugin.points import HOOKS, POINTS
from engine.types.errors import ConfigError

CORE = "engine-base"
"""The core's own distribution."""

REFERENCE = "reference"
"""The extra of the core's distribution that names those whose drivers a list allows without naming them."""


class Entry(NamedTuple):
    """One entry of the list.

    Attributes:
        text: as it was written, the sign included.
        denies: whether what it names is denied; else it is allowed, and what no entry allows is not.
        point: "" where the entry names a distribution; "hooks" means those of every process.
        name: of the distribution, normalised, or of the driver.
    """

    text: str
    denies: bool
    point: str
    name: str

    def names(self, candidate: Candidate) -> bool:
        """Whether the entry is about this candidate."""
        if not self.point:
            return self.name == normal(candidate.distribution)
        same_point = candidate.point == self.point or (self.point == HOOKS and candidate.point.startswith(f"{HOOKS}."))
        return same_point and candidate.name == self.name


@dataclass(frozen=True)
class PluginList:
    """Which of the installed plugins may be used.

    The text holds entries with commas between them. An entry names a distribution (`engine-xgrammar`) or one plugin of
    it (`attention:flash`, `hooks:otel`, `commands:hello`). With a minus before it, it denies what it names. Where an
    entry has none, only what such entries name is allowed, beside the reference drivers (`pip install
    engine-base[reference]`). Denials go before allowances. No entry: everything that is installed is allowed.

    Attributes:
        text: e.g. "engine-tiny,engine-xgrammar,-hooks:otel".
        origin: where it was set, e.g. "environment ENGINE_PLUGINS"; "" where that is not known.
    """

    text: str = ""
    origin: str = ""

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """The entries, in order. Raises ConfigError for one that names nothing."""
        texts = dict.fromkeys(part for raw in self.text.split(",") if (part := raw.strip()))
        return tuple(self._entry(text) for text in texts)

    @property
    def shown(self) -> str:
        """The list for messages, e.g. "--plugins -engine-otel (environment ENGINE_PLUGINS)"."""
        return f"--plugins {self.text}" + (f" ({self.origin})" if self.origin else "")

    def denials(self, found: Collection[Candidate], broken: Collection[str] = ()) -> dict[Candidate, str]:
        """What of the installed plugins may not be used, each with the reason.

        Args:
            found: every plugin that is installed.
            broken: distributions whose plugins cannot be read; they may be named too.

        Raises ConfigError: an entry names nothing that is installed (with near matches), or allows what others deny.
        """
        for entry in self.entries:
            known = any(entry.names(candidate) for candidate in found)
            if not known and (entry.point or entry.name not in {*map(normal, broken), *own()}):
                raise self._unknown(entry, found, broken)
        denied = {c: reason for c in found if (reason := self._denial(c.distribution, methodcaller("names", c)))}
        for entry in self.entries:
            named = [candidate for candidate in found if entry.names(candidate)]
            if not entry.denies and named and all(candidate in denied for candidate in named):
                denying = [repr(e.text) for e in self.entries if e.denies and any(map(e.names, named))]
                found_ = f"other entries of the list deny it: {', '.join(denying)}"
                raise ConfigError(f"allow '{entry.text}' with {self.shown}", found_, "take one of them out")
        return denied

    def denies_distribution(self, name: str) -> bool:
        """Whether nothing of this distribution may be used."""
        return bool(self._denial(name, lambda entry: not entry.point and entry.name == normal(name)))

    def _denial(self, distribution: str, is_named: Callable[[Entry], bool]) -> str:
        """Why something of a distribution is denied; "" where it is not."""
        if denying := next((entry for entry in self.entries if entry.denies and is_named(entry)), None):
            return f"'{denying.text}' denies it"
        allowing = [entry for entry in self.entries if not entry.denies]
        if not allowing or normal(distribution) in own() or any(map(is_named, allowing)):
            return ""
        return "no entry allows it"

    def _entry(self, text: str) -> Entry:
        denies, named = text.startswith("-"), text.removeprefix("-").strip()
        point, colon, name = named.partition(":")
        if not colon:
            point, name = "", normal(named)
        point, name = _point(point.strip()), name.strip()
        if not name or (colon and not point):
            remedy = "write distributions or POINT:DRIVER with commas between them, a minus before what is denied"
            raise ConfigError(f"use {self.shown}", f"'{text}' names no plugin", remedy)
        return Entry(text, denies, point, name)

    def _unknown(self, entry: Entry, found: Collection[Candidate], broken: Collection[str]) -> ConfigError:
        asked = f"{'deny' if entry.denies else 'allow'} '{entry.text.removeprefix('-')}' with {self.shown}"
        says = brought("unknown_plugin")
        found_, hint = says(entry, found, broken) if says else ("nothing that is installed is called so", "")
        return ConfigError(asked, found_, hint or "take it out of the list")


@cache
def own() -> frozenset[str]:
    """The distributions that a list allows without naming them: `engine`, the core's, and those of its extra."""
    needs = requires(CORE) or []
    extra = [need for need in needs if re.search(rf"""extra\s*==\s*['"]{REFERENCE}['"]""", need)]
    return frozenset({"engine", CORE, *(normal(re.split(r"[^\w.-]", need, maxsplit=1)[0]) for need in extra)})


def _point(text: str) -> str:
    """A point's own name, for its flag's name too."""
    plain = text.replace("-", "_")
    return next((point.name for point in POINTS.values() if point.keyword == plain), plain)


def only(denied: Mapping[Candidate, str], point: str) -> list[Candidate]:
    """The denied candidates of a point, by name."""
    return sorted((c for c in denied if c.point == point), key=lambda c: (c.name, c.distribution))
