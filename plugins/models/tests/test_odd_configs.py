"""Whatever JSON a config.json holds under a key that a card knows, the answer is a reason or an error of ours."""

from __future__ import annotations

import math
from typing import Any

import pytest
from model_table import ENCODER_DECODERS, ENCODERS, ORACLES, POOLED, READS_SOUND, TABLE, WITH_STATES

from engine.interfaces.model import ModelNeed
from engine.plugin import Registry
from engine.types.errors import EngineError
from engine_sdk.conformance.model.small import small_config

ODD: tuple[Any, ...] = ("x", "3", [], [1], {}, {"a": 1}, 3, 0, -1, 1.5, True, math.nan, None)
ALL = {**TABLE, **WITH_STATES, **POOLED, **ENCODERS, **ENCODER_DECODERS, **READS_SOUND}
CARDS = Registry.discover()


@pytest.mark.parametrize("architecture", [name for name in ALL if ORACLES.get(name, name)])
def test_odd_values(architecture: str) -> None:
    card: Any = CARDS.card(CARDS.find("model", architecture))
    config = small_config(ORACLES.get(architecture, architecture), ALL[architecture])
    known = {**dict.fromkeys((*getattr(card, "defaults", ()), *getattr(card, "foreign", ()))), **config}
    for key in known:
        for odd in ODD:
            given = {**config, "architectures": [architecture], key: odd}
            try:
                reasons = card.unsupported(ModelNeed(architecture=architecture, config=given))
                assert all(isinstance(reason, str) for reason in reasons)
                if not reasons:
                    card.describe(given)
            except EngineError:
                pass
            except Exception as error:
                pytest.fail(f"{key} = {odd!r}: {type(error).__name__}: {error}")
