"""One driver for each kind of layer, and an ordered few for many operations."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from pydantic import BaseModel

from engine.interfaces.attention import AttentionCard
from engine.interfaces.communicator import CommunicatorCard
from engine.interfaces.ops import OpsCard
from engine.plugin import Registry, choose
from engine.plugin.points import ATTENTION, COMMUNICATOR, OPS
from engine.types.errors import ConfigError, DriverNotFoundError, OptionsError, PluginError, UnfitDriverError


@dataclass(frozen=True)
class Need:
    head_size: int = 64
    operation: str = ""


class Everything(AttentionCard):
    kinds = frozenset({"full", "sliding"})

    class Options(BaseModel):
        window: int = 0


class FullOnly(AttentionCard):
    kinds = frozenset({"full"})
    priority = 10

    class Options(BaseModel):
        num_splits: int = 1

    @classmethod
    def unsupported(cls, need):
        return [] if need.head_size <= 128 else [f"head size {need.head_size} is over 128"]


class Latent(AttentionCard):
    kinds = frozenset({"mla"})


BOTH = {"full": Need(), "sliding": Need()}


@pytest.fixture
def attention(candidate):
    cards = {"torch": "Everything", "flash": "FullOnly", "latent": "Latent"}
    return Registry([candidate("attention", n, f"{__name__}:{c}", f"dist-{n}") for n, c in cards.items()])


def picked(selections):
    return {s.kind: (s.candidate.name, s.asked) for s in selections}


# -- kinds -----------------------------------------------------------------------------------------------------------
def test_auto_picks_for_each_kind_by_itself(attention):
    selections = choose(attention, ATTENTION, BOTH)
    assert picked(selections) == {"full": ("flash", False), "sliding": ("torch", False)}
    assert [s.kind for s in selections] == ["full", "sliding"]
    reasons = {v.candidate.name: v.reasons for v in selections[1].verdicts}
    assert reasons["flash"] == ("it serves layers of kind full, not sliding",)


def test_a_single_name_binds_the_kinds_it_serves_and_leaves_the_rest_to_auto(attention):
    assert picked(choose(attention, ATTENTION, BOTH, "flash")) == {
        "full": ("flash", True),
        "sliding": ("torch", False),
    }
    assert picked(choose(attention, ATTENTION, BOTH, "torch")) == {
        "full": ("torch", True),
        "sliding": ("torch", True),
    }


def test_a_single_name_that_serves_none_of_the_kinds_is_an_error(attention):
    with pytest.raises(UnfitDriverError) as caught:
        choose(attention, ATTENTION, BOTH, "latent")
    assert "kind mla" in caught.value.found and "full, sliding" in caught.value.found


def test_a_name_that_serves_the_kind_but_not_the_need_never_falls_back(attention):
    needs = {"full": Need(256), "sliding": Need(256)}
    assert picked(choose(attention, ATTENTION, needs))["full"] == ("torch", False)
    for asked in ("flash", "full=flash"):
        with pytest.raises(UnfitDriverError, match="head size 256 is over 128"):
            choose(attention, ATTENTION, needs, asked)


def test_an_exact_list(attention):
    chosen = choose(attention, ATTENTION, BOTH, "sliding=torch, full=torch")
    assert picked(chosen) == {"full": ("torch", True), "sliding": ("torch", True)}
    chosen = choose(attention, ATTENTION, BOTH, "sliding=torch,full=auto")
    assert picked(chosen) == {"full": ("flash", False), "sliding": ("torch", True)}


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("full=flash,slidng=torch", "did you mean 'sliding'"),
        ("full=flash,torch", "is not kind=driver"),
        ("full=", "is not kind=driver"),
        ("full=flash,full=torch", "named twice"),
    ],
)
def test_an_exact_list_that_cannot_be_read(attention, asked, found):
    with pytest.raises(ConfigError, match=found):
        choose(attention, ATTENTION, BOTH, asked)


def test_a_kind_that_the_model_has_not_is_an_error(attention):
    with pytest.raises(ConfigError, match="no layers of kind 'sliding'"):
        choose(attention, ATTENTION, {"full": Need()}, "full=flash,sliding=torch")


def test_an_exact_list_with_a_driver_that_does_not_serve_the_kind(attention):
    with pytest.raises(UnfitDriverError, match="serves layers of kind full, not sliding"):
        choose(attention, ATTENTION, BOTH, "sliding=flash")
    with pytest.raises(DriverNotFoundError, match="did you mean 'flash'"):
        choose(attention, ATTENTION, BOTH, "full=flsh")


def test_each_chosen_driver_gets_the_options_that_it_knows(attention):
    by_kind = {s.kind: s for s in choose(attention, ATTENTION, BOTH, None, {"num_splits": "4", "window": 8})}
    assert by_kind["full"].options.num_splits == 4
    assert by_kind["sliding"].options.window == 8
    with pytest.raises(OptionsError, match="num_splits"):
        choose(attention, ATTENTION, BOTH, "torch", {"num_splits": 4})


def test_nobody_serves_a_kind(attention):
    with pytest.raises(PluginError, match=r"choose a driver for attention \(cross\).*latent"):
        choose(attention, ATTENTION, {"cross": Need()})


# -- ordered ---------------------------------------------------------------------------------------------------------
class All(OpsCard):
    operations = frozenset({"add", "linear", "pack_linear", "rope"})


class Fast(OpsCard):
    operations = frozenset({"linear", "pack_linear", "rope"})
    priority = 10

    @classmethod
    def unsupported(cls, need):
        return ["no pack here"] if need.operation == "pack_linear" else []


class Extra(OpsCard):
    operations = frozenset({"rope"})
    priority = 5


class Useless(OpsCard):
    operations = frozenset({"conv"})


OPERATIONS = {operation: Need(operation=operation) for operation in ("add", "linear", "pack_linear", "rope")}


@pytest.fixture
def ops(candidate):
    cards = {"torch": "All", "fast": "Fast", "extra": "Extra", "useless": "Useless"}
    return Registry([candidate("ops", n, f"{__name__}:{c}", f"dist-{n}") for n, c in cards.items()])


def test_each_operation_goes_to_the_first_that_offers_it_and_fits(ops):
    assert picked(choose(ops, OPS, OPERATIONS)) == {
        "add": ("torch", False),
        "linear": ("fast", False),
        "pack_linear": ("torch", False),
        "rope": ("fast", False),
    }


def test_operations_that_belong_together_come_from_one_driver(ops):
    chosen = picked(choose(ops, OPS, OPERATIONS, together=[("pack_linear", "linear")]))
    assert chosen["linear"] == chosen["pack_linear"] == ("torch", False)
    assert chosen["rope"] == ("fast", False)


def test_asked_ones_come_first_in_their_order_and_the_rest_help_out(ops):
    chosen = picked(choose(ops, OPS, OPERATIONS, "extra,fast"))
    assert chosen == {
        "add": ("torch", False),
        "linear": ("fast", True),
        "pack_linear": ("torch", False),
        "rope": ("extra", True),
    }


@pytest.mark.parametrize("asked", ["useless", "torch,useless", "fast,extra"])
def test_an_asked_one_that_serves_no_operation_is_an_error(ops, asked):
    with pytest.raises(UnfitDriverError, match="serves no operation") as caught:
        choose(ops, OPS, OPERATIONS, asked)
    assert caught.value.driver == asked.split(",")[-1]


def test_asked_ones_must_exist_once(ops):
    with pytest.raises(DriverNotFoundError):
        choose(ops, OPS, OPERATIONS, "torch,fats")
    with pytest.raises(ConfigError, match="twice"):
        choose(ops, OPS, OPERATIONS, "torch,torch")


def test_an_operation_that_nobody_offers(ops):
    with pytest.raises(PluginError, match=r"ops \(fft\).*it does not offer fft"):
        choose(ops, OPS, {"fft": Need()})


# -- all that fit, in order ------------------------------------------------------------------------------------------
class Plain(CommunicatorCard):
    class Options(BaseModel):
        window: int = 0


class Quick(CommunicatorCard):
    priority = 10

    class Options(BaseModel):
        num_splits: int = 1

    @classmethod
    def unsupported(cls, need):
        return [] if need.head_size <= 128 else [f"head size {need.head_size} is over 128"]


class Other(CommunicatorCard):
    pass


@pytest.fixture
def communicators(candidate):
    cards = {"torch": "Plain", "flash": "Quick", "latent": "Other"}
    return Registry([candidate("communicator", n, f"{__name__}:{c}", f"dist-{n}") for n, c in cards.items()])


def order(selections):
    return [(s.candidate.name, s.asked) for s in selections]


def test_fitting_drivers_come_by_priority(communicators):
    selections = choose(communicators, COMMUNICATOR, {"": Need()})
    assert order(selections) == [("flash", False), ("latent", False), ("torch", False)]
    assert all(len(s.verdicts) == 3 and s.kind == "" for s in selections)
    assert order(choose(communicators, COMMUNICATOR, {"": Need(head_size=256)}, "auto")) == [
        ("latent", False),
        ("torch", False),
    ]


def test_asked_drivers_come_first_and_the_rest_follow(communicators):
    asked = "torch, latent"
    assert order(choose(communicators, COMMUNICATOR, {"": Need()}, asked)) == [
        ("torch", True),
        ("latent", True),
        ("flash", False),
    ]


def test_options_go_to_those_who_know_them(communicators):
    options = {"num_splits": "3"}
    values = {s.candidate.name: s.options for s in choose(communicators, COMMUNICATOR, {"": Need()}, options=options)}
    assert values["flash"].num_splits == 3 and values["torch"].window == 0 and values["latent"] is None
    with pytest.raises(OptionsError):
        choose(communicators, COMMUNICATOR, {"": Need()}, options={"num_split": 3})


def test_an_asked_driver_must_fit(communicators):
    with pytest.raises(UnfitDriverError, match="256"):
        choose(communicators, COMMUNICATOR, {"": Need(head_size=256)}, "torch,flash")
    with pytest.raises(DriverNotFoundError):
        choose(communicators, COMMUNICATOR, {"": Need()}, "torhc")
    with pytest.raises(ConfigError, match="twice"):
        choose(communicators, COMMUNICATOR, {"": Need()}, "torch,torch")


def test_nobody_fits(candidate):
    registry = Registry([candidate("communicator", "flash", f"{__name__}:Quick")])
    with pytest.raises(PluginError, match="head size 256 is over 128"):
        choose(registry, COMMUNICATOR, {"": Need(head_size=256)})
