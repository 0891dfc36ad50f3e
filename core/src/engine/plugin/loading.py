"""Load what has been chosen already: the only file that knows stevedore.

stevedore never gets to choose: it is handed the one entry point that discovery found, so its own scan, its cache on
disk (which loses the distribution) and its handling of duplicates stay out of the way.
"""

from __future__ import annotations

import gc
import importlib
import importlib.metadata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from engine.plugin.candidate import entry_points
from engine.plugin.points import POINTS
from engine.types.errors import ContractError, DriverImportError, EngineError

if TYPE_CHECKING:
    from engine.plugin.candidate import Candidate
    from engine.plugin.card import Card


def load_entry_point(candidate: Candidate) -> object:
    """Import what the candidate's entry point names.

    Raises:
        DriverImportError: with the name, the distribution, the value and the cause, whatever the import raised
            (SystemExit included; KeyboardInterrupt passes).
    """
    where = f" of {candidate.provenance}"
    if candidate.point == "commands":  # somebody waits for its `--help`, and stevedore takes longer to import than that
        with _importing(candidate.label, candidate.value, where, candidate):
            return import_object(candidate.value)
    from stevedore.named import NamedExtensionManager

    chosen = importlib.metadata.EntryPoint(candidate.name, candidate.value, candidate.group)

    class OneEntryPoint(NamedExtensionManager[object]):
        def list_entry_points(self) -> list[importlib.metadata.EntryPoint]:
            return [chosen]

    def fail(_manager: object, _entry_point: object, error: BaseException) -> NoReturn:
        raise error

    with _importing(candidate.label, candidate.value, where, candidate):
        manager = OneEntryPoint(
            candidate.group, [candidate.name], on_load_failure_callback=fail, on_missing_entrypoints_callback=None
        )
        return manager.extensions[0].plugin


def brought(part: str, asked: str = "") -> Any:
    """What an installed package (of ours `engine_kit`) brings for a part of the engine that stands outside the core, by
    the entry-point group `engine_parts`. Where none does: None, or an EngineError if something was `asked`."""
    found = next((entry for entry in entry_points("engine_parts") if entry.name == part), None)
    if found is None and asked:
        raise EngineError(asked, f"no installed package brings {part!r}", "pip install --upgrade engine-kit")
    return None if found is None else found.load()


def load_body(card: type[Card], half: str | None = None, *, candidate: Candidate | None = None) -> type:
    """Import a chosen driver's body.

    Args:
        card: the driver's card.
        half: which of `card.bodies`; None for `card.body`.
        candidate: where the card came from, for the message of an error.

    Raises:
        ContractError: the card names no such body, or what it names is not a class.
        DriverImportError: the import raised, whatever it raised.
    """
    card_name = f"{card.__module__}:{card.__qualname__}"
    what, where, blame = f"the driver of {card_name}", "", {"point": ""}
    if candidate is not None:
        what, where, blame = candidate.label, f" of {candidate.provenance}", candidate.blame
    value = card.body if half is None else card.bodies.get(half, "")
    module_name, _, attribute = value.partition(":")
    if not module_name or not attribute:
        raise ContractError(
            f"load {what}",
            f"its card {card_name}{where} names no body" + (f" for the half '{half}'" if half else "") + f": {value!r}",
            'its author has to set body = "package.module:Class" (or bodies) on the card',
            **blame,
        )
    with _importing(what, value, where, candidate, "its body "):
        body: object = import_object(value)
    if not isinstance(body, type):
        found = f"its body {value}{where} is {body!r}, not a class"
        raise ContractError(f"load {what}", found, "its author has to name a class", **blame)
    return body if candidate is None else _adapted(body, card, candidate)


def import_object(value: str) -> Any:
    """What "package.module:Name" (or ":Outer.Name") names.

    The garbage collector rests meanwhile: an import makes hundreds of thousands of objects, all of which stay, and to
    look through them again and again takes a tenth of the time in which torch is imported.

    Raises whatever the import raises; AttributeError where the module has no such name.
    """
    module, _, path = value.partition(":")
    enabled = gc.isenabled()
    gc.disable()
    try:
        found: Any = importlib.import_module(module)
    finally:
        if enabled:
            gc.enable()
    for name in path.split("."):
        found = getattr(found, name)
    return found


def _adapted(body: type, card: type[Card], candidate: Candidate) -> type:
    """The body as one of the version that the core speaks, through an adapter for each version between."""
    if (point := POINTS.get(candidate.point)) is None:
        return body
    adapters = [point.adapters.get(major) for major in point.majors if candidate.major <= major]
    minor = card.requires_minor if candidate.major == point.majors[-1] else 0
    adapters += [point.additions.get(later) for later in range(minor + 1, point.minor + 1)]
    for adapter in filter(None, adapters):
        module, _, function = adapter.partition(":")
        body = getattr(importlib.import_module(module), function)(body)
    return body


@contextmanager
def _importing(what: str, value: str, where: str, candidate: Candidate | None, role: str = "") -> Iterator[None]:
    """Makes of whatever an import raises a DriverImportError."""
    try:
        yield
    except (KeyboardInterrupt, GeneratorExit):  # a signal may come between the generator's start and the `with` block
        raise
    except BaseException as error:
        cause = f"{type(error).__name__}: {error}".removesuffix(": ")
        raise DriverImportError(
            f"load {what}",
            f"importing {role}{value}{where} raised {cause}",
            _import_remedy(error, value, candidate.distribution if candidate else ""),
            **(candidate.blame if candidate else {}),
        ) from error


def _import_remedy(error: BaseException, value: str, distribution: str) -> str:
    missing = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if missing and missing != value.partition(".")[0].partition(":")[0]:
        return f"install what it needs, probably: pip install {missing}"
    return f"reinstall or upgrade it: pip install --force-reinstall {distribution}" if distribution else ""
