"""Who is tested: a driver that is installed, or a card that is not."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from pydantic import BaseModel

from engine.plugin import POINTS, Candidate, Card, Registry, load_body
from engine.plugin.options import validate_options


@dataclass(frozen=True)
class Subject:
    """A driver under test.

    Args:
        candidate: where it comes from; for a card that is not installed, its distribution is "".
        card: its card.
        options: its validated options, None where it has none.
    """

    candidate: Candidate
    card: type[Card]
    options: Any

    @classmethod
    def installed(cls, point: str, driver: str, options: Mapping[str, Any]) -> Subject:
        """The installed driver of this name; "DISTRIBUTION:NAME" where several may offer one (`model`).

        Raises PluginError where there is none, two, or it is broken; OptionsError for options that it does not take.
        """
        registry = Registry.discover()
        distribution, _, name = driver.rpartition(":")
        candidate = registry.find(point, name, distribution)
        return cls._with(candidate, registry.card(candidate), options)

    @classmethod
    def of_card(cls, point: str, card: type[Card], options: Mapping[str, Any]) -> Subject:
        """A card that no distribution offers (yet)."""
        value = f"{card.__module__}:{card.__qualname__}"
        return cls._with(Candidate(point, card.__name__, POINTS[point].majors[-1], "", "", value), card, options)

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> Subject:
        """What `plain` was made of, in another process."""
        candidate = Candidate(plain["point"], plain["name"], plain["major"], "", "", plain["value"])
        module, _, name = plain["value"].partition(":")
        card = cast("type[Card]", getattr(importlib.import_module(module), name))
        return cls(candidate, card, None if card.Options is None else card.Options.model_validate(plain["options"]))

    def with_options(self, options: Mapping[str, Any]) -> Subject:
        """The same driver with other options. Raises OptionsError for options that it does not take."""
        return self._with(self.candidate, self.card, options)

    @classmethod
    def _with(cls, candidate: Candidate, card: type[Card], options: Mapping[str, Any]) -> Subject:
        return cls(candidate, card, validate_options(candidate.point, [(candidate, card)], dict(options))[candidate])

    @property
    def plain(self) -> dict[str, Any]:
        """What travels to another process."""
        options = self.options.model_dump(mode="json") if isinstance(self.options, BaseModel) else {}
        candidate = self.candidate
        return {
            "point": candidate.point, "name": candidate.name, "major": candidate.major, "value": candidate.value,
            "options": options,
        }  # fmt: skip

    def body(self, half: str | None = None) -> type:
        """Import the class that does the work. Raises PluginError."""
        return load_body(self.card, half, candidate=self.candidate)

    def reasons(self, need: Any) -> list[str]:
        """Why the card cannot serve a need, as a selection counts it."""
        return [*self.card.mismatches(need), *self.card.unsupported(need)]
