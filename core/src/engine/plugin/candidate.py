"""What the metadata of the installed distributions states: entry points, and what is wrong with them."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from engine.types.errors import ContractError, EngineError, PluginError

if TYPE_CHECKING:
    from engine.types.start import Choice

PluginErrorT = TypeVar("PluginErrorT", bound=PluginError)

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_GROUP = re.compile(r"engine\.((?:hooks\.)?[a-z_]+)\.v(\d+)\Z")


@dataclass(frozen=True)
class Candidate:
    """One entry point as the metadata states it: nothing of it has been imported.

    Attributes:
        point: the point's name, "hooks.<process>" or "commands".
        name: the driver's name.
        major: the interface major of the group in which it is registered.
        distribution: the name of the distribution that offers it.
        version: that distribution's version.
        value: where the card is, "package.module:Class".
    """

    point: str
    name: str
    major: int
    distribution: str
    version: str
    value: str

    @property
    def group(self) -> str:
        return f"engine.{self.point}.v{self.major}"

    @property
    def label(self) -> str:
        """What it is, for messages: "driver 'flash' for attention"; what has hooks or is a command is a plugin."""
        role = "plugin" if self.point == "commands" or self.point.startswith("hooks.") else "driver"
        return f"{role} '{self.name}' for {self.point}"

    @property
    def provenance(self) -> str:
        """The distribution with its version, e.g. "engine 0.1.0"."""
        return f"{self.distribution} {self.version}"

    @property
    def facts(self) -> dict[str, Any]:
        """What a `Choice` and a `BrokenPlugin` say of it."""
        where = {"distribution": self.distribution, "version": self.version, "value": self.value}
        return {"point": self.point, "driver": self.name, **where}

    @property
    def blame(self) -> dict[str, str]:
        """The keywords of an error that is about it."""
        return {"point": self.point, "driver": self.name, "distribution": self.provenance}

    def error(self, kind: type[PluginErrorT], found: str, remedy: str, doing: str = "use") -> PluginErrorT:
        """The error that it is not to be used, or not to be what `doing` says."""
        return kind(f"{doing} {self.label}", found, remedy, **self.blame)

    def fault(self, asked: str, error: Exception) -> EngineError:
        """What its driver raised at work, in the terms of the request over which it did: an error of Engine's own as it
        is, any other as a ContractError."""
        if isinstance(error, EngineError):
            return error
        logger.error("%s could not %s", self.label, asked, exc_info=error)
        found = f"{self.label}, of {self.provenance}, raised {type(error).__name__}: {error}"
        remedy = "name another driver, or report it to this one's author; the log has the traceback"
        return ContractError(asked, found, remedy, **self.blame)

    def choice(self, **facts: Any) -> Choice:
        """It as plain data, which travels; `facts` are the further fields of a `Choice`."""
        from engine.types.start import Choice  # with msgspec, which a listing does without

        return Choice(**self.facts, **facts)


@dataclass(frozen=True)
class Problem:
    """Something in the metadata that no driver can be chosen from.

    Attributes:
        distribution: "name version", or the name alone where the version cannot be read.
        found: what is wrong.
        remedy: what mends it.
        kind: "broken", or "incomplete" where the plugins are listed and what they need is not installed.
    """

    distribution: str
    found: str
    remedy: str
    kind: str = "broken"


class Installed(NamedTuple):
    """What the installed distributions state.

    Attributes:
        candidates: their entry points in groups `engine.<point>.v<major>`, whether there is such a point or not.
        others: those in groups `engine_...`, by group.
        problems: metadata that cannot be read, and distributions that lack what they need.
    """

    candidates: Sequence[Candidate]
    others: Mapping[str, Sequence[importlib.metadata.EntryPoint]]
    problems: Sequence[Problem]


def installed() -> Installed:
    """One pass over all metadata, which imports nothing; the next one when the path, or a folder on it, has changed."""
    return _scan(
        tuple((place, os.stat(place).st_mtime_ns) for place in map(os.path.abspath, sys.path) if os.path.exists(place))
    )


def entry_points(group: str) -> Sequence[importlib.metadata.EntryPoint]:
    """Those of a group `engine_...`."""
    return installed().others.get(group, ())


@lru_cache(maxsize=1)
def _scan(_path: tuple[tuple[str, int], ...]) -> Installed:
    candidates: list[Candidate] = []
    others: dict[str, list[importlib.metadata.EntryPoint]] = {}
    problems: list[Problem] = []
    needed: list[tuple[str, str]] = []
    seen: set[str] = set()
    for distribution in importlib.metadata.distributions():
        label = "unknown"
        try:
            # The normalised name comes from the folder's name; reading METADATA of everything installed would take
            # most of the time that `engine plugins` has.
            label = getattr(distribution, "_normalized_name", None) or distribution.metadata["Name"]
            if label in seen:
                continue
            seen.add(label)
            text = distribution.read_text("entry_points.txt")
            if not text or "[engine" not in text:
                continue
            ours = [(_GROUP.match(entry.group), entry) for entry in distribution.entry_points]
            for match, entry in ours:
                if match is None and entry.group.startswith("engine_"):
                    others.setdefault(entry.group, []).append(entry)
            if any(match for match, _ in ours):
                name, version, needs = _head(distribution)
                needed += [(f"{name} {version}", need) for need in needs]
                candidates += [Candidate(m[1], e.name, int(m[2]), name, version, e.value) for m, e in ours if m]
        except Exception as error:  # whatever a broken installation raises must not take the others down
            found = f"its metadata cannot be read: {type(error).__name__}: {error}"
            problems.append(Problem(str(label), found, f"pip install --force-reinstall {label}"))
    there = {normal(label) for label in seen}
    problems += [
        Problem(provenance, f"it needs '{need}', which is not installed", f"pip install {need}", "incomplete")
        for provenance, need in needed
        if normal(need) not in there
    ]
    return Installed(candidates, others, problems)


def _head(distribution: importlib.metadata.Distribution) -> tuple[str, str, list[str]]:
    """(name, version, the distributions that it always needs). Raises ValueError where there is no name or version.

    Read here and not with `distribution.metadata`, which takes a millisecond each time.
    """
    text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
    fields = [line.partition(":")[::2] for line in text.partition("\n\n")[0].splitlines()]
    values = {name: value.strip() for name, value in reversed(fields)}
    if not values.get("Name") or not values.get("Version"):
        raise ValueError("it states no name or no version")
    # What is needed under a condition (an extra, a platform) may rightly be absent.
    needs = [value.strip() for name, value in fields if name == "Requires-Dist" and ";" not in value]
    return values["Name"], values["Version"], [match[0] for need in needs if (match := _NAME.match(need))]


def normal(distribution: str) -> str:
    """A distribution's name as all its spellings have it."""
    return re.sub(r"[-_.]+", "-", distribution.strip()).lower()
