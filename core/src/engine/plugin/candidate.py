"""What the metadata of the installed distributions states: entry points, and what is wrong with them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.types.start import Choice

from engine.types.errors import ContractError, EngineError

logger = logging.getLogger(__name__)


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
    def role(self) -> str:
        """What it is, for messages: the driver of a point, or a plugin, which has hooks or is a command."""
        return "plugin" if self.point == "commands" or self.point.startswith("hooks.") else "driver"

    @property
    def provenance(self) -> str:
        """The distribution with its version, e.g. "engine 0.1.0"."""
        return f"{self.distribution} {self.version}"

    @property
    def blame(self) -> dict[str, str]:
        """The keywords of an error that is about it."""
        return {"point": self.point, "driver": self.name, "distribution": self.provenance}

    def fault(self, asked: str, error: Exception) -> EngineError:
        """What its driver raised at work, in the terms of the request over which it did: an error of Engine's own as it
        is, any other as a ContractError."""
        if isinstance(error, EngineError):
            return error
        logger.error("driver '%s' for %s could not %s", self.name, self.point, asked, exc_info=error)
        return ContractError(
            asked,
            f"driver '{self.name}' for {self.point}, of {self.provenance}, raised {type(error).__name__}: {error}",
            "name another driver, or report it to this one's author; the log has the traceback",
            **self.blame,
        )

    def choice(self, **facts: Any) -> Choice:
        """It as plain data, which travels; `facts` are the further fields of a `Choice`."""
        from engine.types.start import Choice  # with msgspec, which a listing does without

        return Choice(
            point=self.point,
            driver=self.name,
            distribution=self.distribution,
            version=self.version,
            value=self.value,
            **facts,
        )


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
