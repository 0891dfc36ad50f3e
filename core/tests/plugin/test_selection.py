"""Choosing: explicit never falls back, auto walks by priority, keeps reasons and quarantines what is broken."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from engine.interfaces.checkpoint import CheckpointCard
from engine.interfaces.evictor import EvictorCard
from engine.interfaces.model import ModelCard, ModelNeed
from engine.plugin import Registry, choose, choose_one
from engine.plugin.choosing import default_model
from engine.plugin.points import CHECKPOINT, EVICTOR, MODEL
from engine.types.errors import (
    ConfigError,
    ContractError,
    DriverImportError,
    DriverNotFoundError,
    ModelNotFoundError,
    PluginError,
    UnfitDriverError,
    UnsupportedModelError,
)


@dataclass(frozen=True)
class Need:
    size: int = 1
    framework: str = "torch"


class Low(EvictorCard):
    priority = -1


class Middle(EvictorCard):
    pass


class ByName(EvictorCard):
    priority = 50
    by_name = True


class Small(EvictorCard):
    priority = 10

    @classmethod
    def unsupported(cls, need):
        return [] if need.size < 10 else [f"size {need.size} is over 9"]


class OtherFramework(EvictorCard):
    priority = 20
    framework = "jax"


class Raises(EvictorCard):
    priority = 30

    @classmethod
    def unsupported(cls, need):
        raise ZeroDivisionError("oops")


class Answers(EvictorCard):
    priority = 30

    @classmethod
    def unsupported(cls, need):
        return True


@pytest.fixture
def registry_of(candidate):
    def build(point="evictor", **cards):
        return Registry([candidate(point, name, f"{__name__}:{card}", f"dist-{name}") for name, card in cards.items()])

    return build


# -- one -------------------------------------------------------------------------------------------------------------
def test_auto_takes_the_highest_priority_that_fits_and_keeps_reasons(registry_of):
    registry = registry_of(low="Low", small="Small", middle="Middle", jax="OtherFramework")
    assert choose_one(registry, EVICTOR, Need(1)).candidate.name == "small"
    chosen = choose_one(registry, EVICTOR, Need(10))
    assert chosen.candidate.name == "middle" and chosen.card is Middle and not chosen.asked
    reasons = {v.candidate.name: v.reasons for v in chosen.verdicts}
    assert reasons["small"] == ("size 10 is over 9",)
    assert "jax" in reasons["jax"][0] and "torch" in reasons["jax"][0]
    assert reasons["middle"] == ()


def test_auto_passes_over_what_has_to_be_named(registry_of):
    registry = registry_of(approximate="ByName", low="Low")
    chosen = choose_one(registry, EVICTOR, Need())
    assert chosen.candidate.name == "low"
    assert [v.reasons for v in chosen.verdicts] == [("it has to be asked for by name",), ()]
    assert choose_one(registry, EVICTOR, Need(), "approximate").card is ByName
    with pytest.raises(PluginError, match="approximate .*: it has to be asked for by name"):
        choose_one(registry_of(approximate="ByName"), EVICTOR, Need())


def test_auto_breaks_ties_by_name_whatever_the_order_of_discovery(candidate):
    drivers = [candidate("evictor", name, f"{__name__}:Middle", f"dist-{name}") for name in ("c", "a", "b")]
    for order in (drivers, drivers[::-1]):
        assert choose_one(Registry(order), EVICTOR, None).candidate.name == "a"


def test_explicit_takes_the_named_one_and_asks_nobody_else(registry_of, candidate):
    registry = Registry([*registry_of(small="Small", low="Low").found, candidate("evictor", "bad", "no_module:X", "b")])
    chosen = choose_one(registry, EVICTOR, Need(), "low")
    assert chosen.card is Low and chosen.asked
    assert [v.candidate.name for v in chosen.verdicts] == ["low"]
    assert registry.quarantine == {}


def test_explicit_never_falls_back_when_unfit(registry_of):
    registry = registry_of(small="Small", middle="Middle")
    with pytest.raises(UnfitDriverError) as caught:
        choose_one(registry, EVICTOR, Need(10), "small")
    assert "size 10 is over 9" in caught.value.found
    assert (caught.value.driver, caught.value.distribution) == ("small", "dist-small 1.0")
    assert "--evictor" in caught.value.remedy


def test_explicit_never_falls_back_when_missing(registry_of):
    with pytest.raises(DriverNotFoundError, match="did you mean 'small'"):
        choose_one(registry_of(small="Small", middle="Middle"), EVICTOR, Need(), "smal")


def test_a_broken_driver_is_quarantined_in_auto_and_fatal_when_asked(registry_of, candidate, playground):
    playground.module("pg_broken", "raise RuntimeError('boom')")
    broken = candidate("evictor", "broken", "pg_broken:X", "dist-broken")
    registry = Registry([*registry_of(middle="Middle").found, broken])
    chosen = choose_one(registry, EVICTOR, Need())
    assert chosen.candidate.name == "middle"
    assert isinstance(registry.quarantine[broken], DriverImportError)
    [reason] = [v.reasons for v in chosen.verdicts if v.candidate == broken]
    assert "boom" in reason[0]
    with pytest.raises(DriverImportError, match="boom"):
        choose_one(registry, EVICTOR, Need(), "broken")


@pytest.mark.parametrize("card", ["Raises", "Answers"])
def test_a_card_whose_unsupported_misbehaves_is_broken(registry_of, card):
    registry = registry_of(bad=card, middle="Middle")
    assert choose_one(registry, EVICTOR, Need()).candidate.name == "middle"
    assert [c.name for c in registry.quarantine] == ["bad"]
    with pytest.raises(ContractError, match=r"unsupported\(\)"):
        choose_one(registry, EVICTOR, Need(), "bad")


def test_when_none_fits_the_error_lists_every_reason(registry_of, candidate):
    registry = Registry([*registry_of(small="Small", jax="OtherFramework").found, candidate("evictor", "b", "nope:X")])
    with pytest.raises(PluginError) as caught:
        choose_one(registry, EVICTOR, Need(10))
    for part in ("small (dist-small 1.0): size 10 is over 9", "jax (dist-jax 1.0)", "b (dist 1.0): broken", "nope"):
        assert part in caught.value.found


def test_none_installed():
    with pytest.raises(PluginError, match="no driver of this point is installed"):
        choose_one(Registry([]), EVICTOR, Need())


# -- model -----------------------------------------------------------------------------------------------------------
class AnyModel(ModelCard):
    pass


class PickyModel(ModelCard):
    @classmethod
    def unsupported(cls, need):
        return ["rope scaling 'dynamic' is not served"]


def of_architecture(registry, architectures, asked=None):
    needs = {name: ModelNeed(architecture=name, config={}) for name in architectures or [""]}
    (selection,) = choose(registry, MODEL, needs, asked)
    return selection


def test_architecture_is_the_drivers_name(registry_of):
    registry = registry_of("model", LlamaForCausalLM="AnyModel", Qwen3ForCausalLM="PickyModel")
    chosen = of_architecture(registry, ["OtherForCausalLM", "LlamaForCausalLM"])
    assert (chosen.candidate.name, chosen.kind, chosen.asked) == ("LlamaForCausalLM", "", False)


def test_unknown_architecture_lists_what_is_served(registry_of):
    registry = registry_of("model", LlamaForCausalLM="AnyModel")
    with pytest.raises(UnsupportedModelError) as caught:
        of_architecture(registry, ["Llama4ForCausalLM"])
    assert "LlamaForCausalLM" in caught.value.found and "did you mean 'LlamaForCausalLM'" in caught.value.remedy
    with pytest.raises(UnsupportedModelError, match="names no architecture"):
        of_architecture(registry, [])


def test_unfit_model_says_why(registry_of):
    with pytest.raises(UnsupportedModelError, match="rope scaling 'dynamic'"):
        of_architecture(registry_of("model", Q="PickyModel"), ["Q"])


def test_model_impl_names_a_driver_whatever_the_architecture(registry_of):
    registry = registry_of("model", LlamaForCausalLM="AnyModel", Q="PickyModel")
    assert of_architecture(registry, ["Unknown"], "LlamaForCausalLM").asked
    with pytest.raises(UnfitDriverError, match="rope scaling"):
        of_architecture(registry, ["LlamaForCausalLM"], "Q")


# -- checkpoint ------------------------------------------------------------------------------------------------------
class Folders(CheckpointCard):
    @classmethod
    def claims(cls, name):
        return name.startswith("/")


class Files(CheckpointCard):
    default_model = "bundled"

    @classmethod
    def claims(cls, name):
        return name.endswith(".bin") or name == "bundled"


class Another(Files):
    default_model = "other"


class ClaimsRaise(CheckpointCard):
    @classmethod
    def claims(cls, name):
        raise OSError("disk on fire")


def test_the_one_that_claims_the_name(registry_of):
    registry = registry_of("checkpoint", folders="Folders", files="Files", bad="ClaimsRaise")
    assert choose_one(registry, CHECKPOINT, "/models/x").candidate.name == "folders"
    assert choose_one(registry, CHECKPOINT, "x.bin").candidate.name == "files"
    assert [c.name for c in registry.quarantine] == ["bad"]


def test_nobody_claims_it(registry_of):
    with pytest.raises(ModelNotFoundError) as caught:
        choose_one(registry_of("checkpoint", folders="Folders"), CHECKPOINT, "x.gguf")
    assert "folders (dist-folders 1.0): does not claim 'x.gguf'" in caught.value.found
    assert "--load-format" in caught.value.remedy


def test_two_claims_are_an_error_that_names_both(registry_of):
    registry = registry_of("checkpoint", folders="Folders", files="Files")
    with pytest.raises(PluginError, match=r"files \(dist-files 1.0\) and folders \(dist-folders 1.0\)") as caught:
        choose_one(registry, CHECKPOINT, "/models/x.bin")
    assert "--load-format files or folders" in caught.value.remedy
    forced = choose_one(registry, CHECKPOINT, "/models/x.bin", "folders")
    assert forced.candidate.name == "folders" and forced.asked


def test_the_default_model_is_the_one_that_a_card_declares(registry_of):
    registry = registry_of("checkpoint", folders="Folders", files="Files")
    assert default_model(registry, CHECKPOINT).name == "bundled"
    assert choose_one(registry, CHECKPOINT, "bundled").candidate.name == "files"


@pytest.mark.parametrize(
    ("cards", "found"),
    [({"folders": "Folders"}, "no installed"), ({"files": "Files", "another": "Another"}, "'bundled' of dist-files")],
)
def test_no_or_two_default_models(registry_of, cards, found):
    with pytest.raises(ConfigError, match=found) as caught:
        default_model(registry_of("checkpoint", **cards), CHECKPOINT)
    assert "--model" in caught.value.remedy
