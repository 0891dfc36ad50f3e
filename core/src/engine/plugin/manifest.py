"""The manifest: what the launcher chose, as `Choice` has it, checked by every process against what it finds itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from engine.plugin.discovery import Registry
from engine.plugin.options import validate_options
from engine.plugin.points import HOOKS
from engine.plugin.selection import Selection
from engine.types.errors import ContractError, ManifestError, PluginError
from engine.types.start import Choice

ErrorT = TypeVar("ErrorT", bound=BaseException)


def check_choices(registry: Registry, choices: Iterable[Choice]) -> None:
    """Compare with what is installed here; import nothing.

    Raises ManifestError, which names each driver that is missing here, comes from another distribution or another
    place, or has another version.
    """
    _refuse("start with the drivers that the launcher chose", (_difference(c, registry) for c in choices))


def restore(registry: Registry, choices: Iterable[Choice]) -> list[Selection[Any]]:
    """The selections that choices were made from, as this process sees them; cards are imported, bodies are not.

    Raises PluginError: a card cannot be imported, or refuses its options.
    """
    found: list[Selection[Any]] = []
    for choice in choices:
        candidate = registry.find(choice.point, choice.driver, choice.distribution)
        card = registry.card(candidate)
        options = validate_options(choice.point, [(candidate, card)], choice.options)[candidate]
        found.append(Selection(choice.point, choice.kind, candidate, card, options, asked=choice.asked))
    return found


class Blame:
    """Names the driver at work (of `choices`) that a ContractError is about: who finds a fault knows its point alone.

    `with blame:` does so for what is raised inside. It has no state, and may be entered as often as one likes.
    """

    def __init__(self, choices: Sequence[Choice]) -> None:
        self._choices = choices

    def __enter__(self) -> None: ...

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if error is not None and (named := self.named(error)) is not error:
            raise named from error

    def named(self, error: ErrorT) -> ErrorT | ContractError:
        """The error with driver and distribution; any that is no ContractError, or names them already, as it is."""
        if not isinstance(error, ContractError) or error.driver:
            return error
        at_work = dict.fromkeys(
            (c.driver, f"{c.distribution} {c.version}") for c in self._choices if c.point == error.point
        )
        if not at_work:
            return error
        who = " or ".join(f"driver '{driver}' for {error.point}, of {there}" for driver, there in at_work)
        return ContractError(
            error.asked,
            f"{error.found} ({who})",
            error.remedy,
            point=error.point,
            driver=", ".join(driver for driver, _ in at_work),
            distribution=", ".join(there for _, there in at_work),
        )


def hook_choices(registry: Registry, processes: Iterable[str]) -> tuple[Choice, ...]:
    """The hook plugins of these processes, as the manifest writes drivers; nothing is imported.

    Raises DuplicateDriverError where two distributions register one name.
    """
    found = [c for process in processes for c in registry.candidates(f"{HOOKS}.{process}")]
    return tuple(registry.find(candidate.point, candidate.name).choice() for candidate in found)


def check_hooks(registry: Registry, process: str, choices: Iterable[Choice] | None) -> None:
    """Compare the hook plugins of this process with those that the launcher found; None says nothing of them.

    Raises ManifestError for one that is missing here, is another, or was not there.
    """
    if choices is None:
        return
    point = f"{HOOKS}.{process}"
    mine = {choice.driver: choice for choice in choices if choice.point == point}
    surplus = [
        f"{point} '{c.name}' of {c.provenance} is not installed where the launcher runs"
        for c in registry.candidates(point)
        if c.name not in mine
    ]
    differences = [*(_difference(choice, registry) for choice in mine.values()), *surplus]
    _refuse("start with the hook plugins that the launcher found", differences)


def _refuse(asked: str, differences: Iterable[str]) -> None:
    """Raise ManifestError where there is a difference."""
    if found := list(dict.fromkeys(filter(None, differences))):
        remedy = "install the same distributions, in the same versions, wherever a part of the engine runs"
        raise ManifestError(asked, "this process finds others: " + "; ".join(found), remedy)


def _difference(choice: Choice, registry: Registry) -> str:
    name = f"{choice.point} '{choice.driver}'"
    there = f"{choice.distribution} {choice.version}"
    try:
        candidate = registry.find(choice.point, choice.driver, choice.distribution)
    except PluginError as error:
        return f"{name} of {there} cannot be used here ({error.found})"
    if (candidate.distribution, candidate.version) != (choice.distribution, choice.version):
        return f"{name} is of {there} in the launcher, of {candidate.provenance} here"
    if candidate.value != choice.value:
        return f"{name} of {there} is {choice.value} in the launcher, {candidate.value} here"
    return ""
