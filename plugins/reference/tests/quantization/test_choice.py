"""Which layers are quantised, and by whom: the launcher's part."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Checkpoints

from engine.config.settings import EngineConfig
from engine.frontend.launch import launch
from engine.interfaces.quantization import QuantizationCard, QuantizationNeed
from engine.plugin import Candidate, Registry
from engine.types.errors import (
    CheckpointError,
    ConfigError,
    DriverNotFoundError,
    OptionsError,
    UnfitDriverError,
    UnsupportedModelError,
)
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
    return {choice.kind: choice.driver for choice in plan.start.worker.choices if choice.point == "quantization"}


def test_none_unless_one_is_named() -> None:
    """A driver that is installed, and has a high priority, is not taken by itself."""
    assert bound(None) == bound("auto") == bound("linear=auto") == {}


def test_a_driver_is_bound_to_the_kinds_that_it_serves() -> None:
    assert bound("absmax") == {"linear": "absmax", "head": "absmax"}
    assert bound("projections") == {"linear": "projections"}  # and the head stays as it is
    assert bound("linear=absmax") == {"linear": "absmax"}
    assert bound("head=absmax,linear=projections") == {"linear": "projections", "head": "absmax"}
    assert bound("absmax", runner="pooling") == {"linear": "absmax"}  # there is no head


class Kept(QuantizationCard):
    """A stranger's, that reads what is stored in its form."""

    kinds = frozenset({"linear"})
    rounds = False
    body = "nowhere:Body"

    @classmethod
    def claims(cls, stored: Mapping[str, Any]) -> bool:
        return stored.get("quant_method") == "moon"


class Fast(Kept):
    """Faster, where it runs."""

    priority = 10

    @classmethod
    def unsupported(cls, need: QuantizationNeed) -> list[str]:
        return [] if need.dtype == "bfloat16" else [f"dtype {need.dtype} is not bfloat16"]


class Careless(Kept):
    """Takes every form for one with groups."""

    @classmethod
    def claims(cls, stored: Mapping[str, Any]) -> bool:
        return bool(stored["groups"])


class Experts(Kept):
    """Reads the form, but of other layers than the model's."""

    kinds = frozenset({"experts"})


def of_stored(folder: Path, method: str, drivers: Sequence[str] = ("Kept", "Fast"), **settings: Any) -> dict[str, str]:
    """As `bound`, of a checkpoint whose weights are stored in this form."""
    import sys

    sys.modules.setdefault(__name__, sys.modules[Projections.__module__])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": method}}))
    extra = tuple(Candidate("quantization", name.lower(), 0, "stranger", "1", f"{__name__}:{name}") for name in drivers)
    plan = launch(
        EngineConfig(**{"model": str(folder), "dtype": "bfloat16"} | settings), Registry.discover(extra=extra)
    )
    return {choice.kind: choice.driver for choice in plan.start.worker.choices if choice.point == "quantization"}


@pytest.fixture
def folder(checkpoints: Checkpoints, tmp_path: Path) -> Path:
    copy = tmp_path / "model"
    shutil.copytree(checkpoints("LlamaForCausalLM"), copy)
    return copy


def test_the_form_in_which_weights_are_stored_names_the_driver(folder: Path) -> None:
    """By priority, the first that claims it and fits."""
    assert of_stored(folder, "moon") == {"linear": "fast"}
    assert of_stored(folder, "moon", dtype="float32") == {"linear": "kept"}
    assert of_stored(folder, "moon", quantization="kept") == {"linear": "kept"}


def test_stored_weights_that_nobody_reads_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, for every model; a driver that rounds plain weights is no help, and is not fallen back on."""
    with pytest.raises(UnsupportedModelError, match=r"stored as 'sun'.*absmax.*does not read weights stored as 'sun'"):
        of_stored(folder, "sun")
    with pytest.raises(UnfitDriverError, match=r"'absmax'.*does not read weights stored as 'moon'"):
        of_stored(folder, "moon", quantization="absmax")
    with pytest.raises(UnsupportedModelError, match=r"fast .*float32 is not bfloat16"):
        of_stored(folder, "moon", ["Fast"], dtype="float32")
    with pytest.raises(UnsupportedModelError, match=r"experts .*serves layers of kind experts, not linear"):
        of_stored(folder, "moon", ["Experts"])
    with pytest.raises(CheckpointError, match=r"'quantization_config'.*'moon', not an object"):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": "moon"}))
        launch(EngineConfig(model=str(folder)))
    monkeypatch.setattr(Llama.__mro__[1], "quantized", frozenset())
    with pytest.raises(UnsupportedModelError, match=r"stored as 'moon'.*LlamaForCausalLM.*plain layers alone"):
        of_stored(folder, "moon")


def test_a_card_that_breaks_over_anothers_form_is_passed_over(folder: Path) -> None:
    assert of_stored(folder, "moon", ["Careless", "Kept"]) == {"linear": "kept"}
    with pytest.raises(UnsupportedModelError, match=r"careless .*broken: its mismatches\(\) raised KeyError: 'groups'"):
        of_stored(folder, "moon", ["Careless"])


def test_a_driver_of_a_stored_form_rounds_nothing(folder: Path) -> None:
    extra = (Candidate("quantization", "kept", 0, "stranger", "1", f"{__name__}:Kept"),)
    with pytest.raises(UnfitDriverError, match="the weights are plain, and it rounds none"):
        launch(EngineConfig(model=str(folder), quantization="kept"), Registry.discover(extra=extra))


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
