"""Which layers are quantised, and by whom: the launcher's part."""

from __future__ import annotations

from typing import Any

import pytest

from engine.config.settings import EngineConfig
from engine.frontend.launch import launch
from engine.interfaces.quantization import QuantizationCard, QuantizationNeed
from engine.plugin import Candidate, Registry
from engine.types.errors import ConfigError, DriverNotFoundError, OptionsError, UnfitDriverError
from engine_reference.models.llama_card import Llama

MODEL = "dummy:tiny"


class Projections(QuantizationCard):
    """A stranger's: linear layers in bfloat16 alone."""

    priority = 50
    kinds = frozenset({"linear"})
    body = "nowhere:Body"

    @classmethod
    def unsupported(cls, need: QuantizationNeed) -> list[str]:
        return [] if need.dtype == "bfloat16" else [f"dtype {need.dtype} is not bfloat16"]


STRANGER = Candidate("quantization", "projections", 0, "stranger", "1", f"{__name__}:Projections")


def bound(asked: str | None, **settings: Any) -> dict[str, str]:
    """Kind to driver, as the manifest has them."""
    import sys

    sys.modules.setdefault(__name__, sys.modules[Projections.__module__])
    registry = Registry.discover(extra=(STRANGER,))
    points = {} if asked is None else {"quantization": asked}
    plan = launch(EngineConfig(**{"model": MODEL, "dtype": "bfloat16"} | points | settings), registry)
    return {choice.kind: choice.driver for choice in plan.manifest.choices if choice.point == "quantization"}


def test_none_unless_one_is_named() -> None:
    """A driver that is installed, and has a high priority, is not taken by itself."""
    assert bound(None) == bound("auto") == bound("linear=auto") == {}


def test_a_driver_is_bound_to_the_kinds_that_it_serves() -> None:
    assert bound("absmax") == {"linear": "absmax", "head": "absmax"}
    assert bound("projections") == {"linear": "projections"}  # and the head stays as it is
    assert bound("linear=absmax") == {"linear": "absmax"}
    assert bound("head=absmax,linear=projections") == {"linear": "projections", "head": "absmax"}
    assert bound("absmax", runner="pooling") == {"linear": "absmax"}  # there is no head


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnfitDriverError, match=r"'projections'.*quantization.*float32 is not bfloat16"):
        bound("projections", dtype="float32")
    with pytest.raises(UnfitDriverError, match=r"layers of kind linear, not head"):
        bound("head=projections")
    with pytest.raises(DriverNotFoundError, match="absmax"):
        bound("absmx")
    with pytest.raises(ConfigError, match=r"no layer kind 'heads'.*head"):
        bound("heads=absmax")
    with pytest.raises(ConfigError, match=r"set quantization.bits to 4.*no quantization is chosen.*--quantization"):
        bound(None, **{"quantization.bits": 4})
    with pytest.raises(ConfigError, match=r"set quantization.bits to 4.*no quantization is chosen"):
        bound("linear=auto", **{"quantization.bits": 4})
    with pytest.raises(OptionsError, match="bits"):
        bound("absmax", **{"quantization.bits": 5})
    monkeypatch.setattr(Llama.__mro__[1], "quantized", frozenset())
    with pytest.raises(ConfigError, match=r"quantization=absmax with Qwen3ForCausalLM.*no layer whose weights"):
        bound("absmax")
