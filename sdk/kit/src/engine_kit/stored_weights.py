"""Who reads weights that a checkpoint stores in a form of their own."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from engine.interfaces.quantization import QuantizationNeed, stored_form
from engine.plugin import Registry, points
from engine.plugin.choosing import or_quarantine, ranked
from engine.plugin.points import PICKS
from engine.plugin.selection import answer
from engine.types.errors import UnsupportedModelError


def who_reads(facts: Any, asks: Mapping[str, QuantizationNeed], registry: Registry) -> str | None:
    """The driver of the form in which the weights are stored: by priority, the first that claims it and fits.

    Raises UnsupportedModelError where they are not plain, and nobody reads them.
    """
    stored, model = stored_form(facts.model.config), facts.implementation.candidate
    if stored is None:
        return None
    reasons = [] if asks else [f"driver '{model.name}' ({model.provenance}) reads plain layers alone"]
    cards, passed_over = ranked(registry, points.QUANTIZATION.name) if asks else ([], [])
    for candidate, card in cards:
        pick = PICKS[points.QUANTIZATION.pick]
        served = {kind: asks[kind] for kind in pick.served(card, asks)} or asks
        verdict = or_quarantine(registry, candidate, partial(answer, pick, card, candidate, served))
        if verdict.fit:
            return candidate.name
        reasons.append(str(verdict))
    raise UnsupportedModelError(
        f"load {facts.model.architecture}",
        f"its weights are stored as '{stored.get('quant_method', 'unnamed')}' (quantization_config of config.json), "
        "which none of the installed drivers reads: " + " | ".join([*reasons, *map(str, passed_over)]),
        "install a driver that does, or use a checkpoint with plain weights",
    )
