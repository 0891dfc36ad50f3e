"""Drivers that work together: the named ones, and one for each job."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from engine.interfaces.logits_processor import LogitsProcessorCard
from engine.plugin import Registry, choose
from engine.plugin.points import LOGITS_PROCESSOR
from engine.types.errors import ConfigError, DriverNotFoundError, OptionsError, PluginError, UnfitDriverError


class Bias(LogitsProcessorCard):
    parameters = frozenset({"bias"})


class FastBias(LogitsProcessorCard):
    parameters = frozenset({"bias"})
    priority = 5

    @classmethod
    def unsupported(cls, need):
        return [] if need != "small" else ["too small"]


class Both(LogitsProcessorCard):
    parameters = frozenset({"bias", "words"})


class Words(LogitsProcessorCard):
    parameters = frozenset({"words"})


class Extra(LogitsProcessorCard):
    class Options(BaseModel):
        strength: int = 1


class Failing(LogitsProcessorCard):
    parameters = frozenset({"words"})
    priority = 9

    @classmethod
    def unsupported(cls, need):
        raise RuntimeError("no")


JOBS = ("words", "bias")
ALL = {"bias": "Bias", "fast": "FastBias", "words": "Words", "extra": "Extra", "other": "Extra"}


@pytest.fixture
def registry(candidate):
    def make(**cards):
        return Registry([candidate("logits_processor", n, f"{__name__}:{c}") for n, c in (cards or ALL).items()])

    return make


def picked(registry, asked=None, need=None, options=None):
    return [
        (s.candidate.name, s.asked)
        for s in choose(registry, LOGITS_PROCESSOR, dict.fromkeys(JOBS, need), asked, options)
    ]


def test_each_job_has_one_driver_in_the_jobs_order(registry):
    assert picked(registry()) == [("words", False), ("fast", False)]
    assert picked(registry(), need="small") == [("words", False), ("bias", False)]


def test_named_ones_come_first_to_the_jobs_and_strangers_are_added(registry):
    assert picked(registry(), "other,bias,extra") == [
        ("words", False), ("bias", True), ("other", True), ("extra", True),
    ]  # fmt: skip
    assert picked(registry(), " auto ") == [("words", False), ("fast", False)]


def test_a_driver_whose_jobs_are_partly_taken_is_not_added(registry):
    assert picked(registry(both="Both", fast="FastBias"), "fast") == [("fast", True)]
    assert picked(registry(both="Both", fast="FastBias")) == [("both", False)]


def test_errors(registry):
    with pytest.raises(ConfigError, match="both 'bias' and 'fast' serve bias"):
        picked(registry(), "bias,fast")
    with pytest.raises(ConfigError, match="twice"):
        picked(registry(), "extra,extra")
    with pytest.raises(DriverNotFoundError, match="extra"):
        picked(registry(), "extrra")
    with pytest.raises(UnfitDriverError, match="too small"):
        picked(registry(), "fast", need="small")
    with pytest.raises(PluginError):
        picked(registry(words="Failing"), "words")
    with pytest.raises(OptionsError, match="strength"):
        picked(registry(), "extra", options={"strenght": 2})
    with pytest.raises(ConfigError, match="no logits_processor is at work"):
        picked(registry(extra="Extra"), options={"strength": 2})


def test_a_broken_one_that_nobody_named_is_put_aside(registry):
    found = registry(words="Words", bad="Failing", bias="Bias")
    assert picked(found) == [("words", False), ("bias", False)]
    assert [candidate.name for candidate in found.quarantine] == ["bad"]


def test_nobody_need_be_there(registry):
    assert picked(registry(extra="Extra")) == []
    (selection,) = choose(registry(extra="Extra"), LOGITS_PROCESSOR, dict.fromkeys(JOBS), "extra", {"strength": "4"})
    assert selection.options.strength == 4
