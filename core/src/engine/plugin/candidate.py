"""What the metadata of the installed distributions states: entry points, and what is wrong with them."""

from __future__ import annotations

from dataclasses import dataclass


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
    def provenance(self) -> str:
        """The distribution with its version, e.g. "engine 0.1.0"."""
        return f"{self.distribution} {self.version}"

    @property
    def blame(self) -> dict[str, str]:
        """The keywords of an error that is about it."""
        return {"point": self.point, "driver": self.name, "distribution": self.provenance}


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
