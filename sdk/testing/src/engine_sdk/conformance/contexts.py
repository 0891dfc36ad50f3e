"""The contexts that bodies under test are built with: as the engine's own, with a model of no weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from engine.interfaces.context import WorkerContext
from engine.interfaces.platform import PlatformCard, PlatformNeed
from engine.plugin import Registry, load_body
from engine.plugin.choosing import ranked
from engine.types.start import WorkerStart
from engine_sdk.conformance.base import not_served
from engine_sdk.conformance.core_contexts import start_message
from engine_sdk.conformance.subject import Subject

if TYPE_CHECKING:
    from engine.interfaces.platform import Platform


def worker_context(
    subject: Subject,
    device: str = "cpu",
    dtype: str = "float32",
    *,
    registry: Registry | None = None,
    with_ops: bool = True,
    platform_options: Mapping[str, Any] | None = None,
    **fields: Any,
) -> WorkerContext:
    """The context of a body in a worker: with the platform of the device, and the reference operations.

    registry: what is installed; None: look. platform_options: of the device's platform, as a user sets them. fields: of
    the start message.
    """
    registry = registry or Registry.discover()
    start = start_message(device, dtype, **fields)
    platform = platform_of(device, start, registry, platform_options)
    context = WorkerContext(start=start, platform=platform, device=platform.device, dtype=getattr(torch, dtype))
    ops = load_body(registry.card(registry.find("ops", "torch")))(context) if with_ops else None
    return replace(context, ops=ops, options=subject.options)


def platform_of(
    device: str, start: WorkerStart, registry: Registry, options: Mapping[str, Any] | None = None
) -> Platform:
    """The body of `platform_card_of`, with these options, or its own defaults."""
    card = platform_card_of(device, registry)
    validated = None if card.Options is None else card.Options.model_validate(dict(options or {}))
    platform: Platform = load_body(card)(WorkerContext(start=start, options=validated))
    return platform


def platform_card_of(device: str, registry: Registry) -> type[PlatformCard]:
    """The installed platform of highest priority for a device; one that is broken is passed over, as by `auto`.

    Raises LookupError where there is none.
    """
    cards, broken = ranked(registry, "platform")
    for card in (cast("type[PlatformCard]", card) for _, card in cards):
        if card.unsupported(PlatformNeed()) == [] and card.describe().device.split(":")[0] == device.split(":")[0]:
            return card
    raise LookupError("; ".join([f"no installed platform is for device {device}", *map(str, broken)]))


def require_capture(captured_by: frozenset[str], device: str) -> None:
    """Skip the test where the platform of this device captures no step of a driver whose card names these recorders."""
    card = platform_card_of(device, Registry.discover())
    if card.recorder is None:
        pytest.skip(f"the platform of {device} captures no steps")
    if card.recorder not in captured_by:
        not_served(f"the platform of {device} records by '{card.recorder}', which the card's captured_by does not name")
