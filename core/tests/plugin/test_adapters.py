"""Drivers of an older version in a core that speaks the next one."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest

from engine import LLM, SamplingParams
from engine.plugin import POINTS, Registry
from engine.plugin.loading import load_body
from engine.types.errors import IncompatibleDriverError

from .conftest import Playground

OLD = """
from engine_reference.policy_fcfs import FCFS
from engine.interfaces.scheduling_policy import SchedulingPolicyCard

class Card(SchedulingPolicyCard):
    body = "pg_old:Policy"

class Policy(FCFS):
    \"\"\"What a stranger wrote for major 0.\"\"\"

    asked = []

    def victim(self, running):
        self.asked.append(len(running))
        return running[-1]
"""
NEW = """
from engine_reference.policy_fcfs import FCFS
from engine.interfaces.scheduling_policy import SchedulingPolicyCard

class Card(SchedulingPolicyCard):
    body = "pg_new:Policy"

class Policy(FCFS):
    def victim(self, running, pages):
        return running[0]
"""
ADAPTERS = """
def like(body, adapted):
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(adapted, name, getattr(body, name))
    return adapted

def of_major_0(body):
    class Adapted(body):
        def victim(self, running, pages):
            return super().victim(running)
    return like(body, Adapted)

def of_minor_0(body):
    class Adapted(body):
        def on_commit(self, pages, parents, hashes):
            super().on_commit(pages, parents)
    return like(body, Adapted)
"""
"""What a core brings that serves an older version beside its own; in its own interfaces' places."""
POINT = POINTS["scheduling_policy"]
OF_MINOR_0 = """
from engine_reference.evictor_lru import LRU, LRUEvictor

class Card(LRUEvictor):
    requires_minor = 0
    body = "pg_minor:Evictor"

class Evictor(LRU):
    \"\"\"What a stranger wrote for 0.0.\"\"\"

    committed = []

    def on_commit(self, pages, parents):
        self.committed.append(len(pages))
"""


@pytest.fixture
def adapters(playground: Playground, monkeypatch: pytest.MonkeyPatch) -> None:
    """A point of which two majors are served: a policy's."""
    playground.module("pg_adapters", ADAPTERS)
    monkeypatch.setitem(vars(POINT), "majors", (0, 1))
    monkeypatch.setitem(vars(POINT), "adapters", {0: "pg_adapters:of_major_0"})


@pytest.fixture
def additions(playground: Playground, monkeypatch: pytest.MonkeyPatch) -> None:
    """A point with an addition: an evictor's."""
    playground.module("pg_adapters", ADAPTERS)
    monkeypatch.setitem(vars(POINTS["evictor"]), "minor", 1)
    monkeypatch.setitem(vars(POINTS["evictor"]), "additions", {1: "pg_adapters:of_minor_0"})


def test_points_say_how_they_serve_each_major() -> None:
    for point in POINTS.values():
        assert list(point.majors) == sorted(set(point.majors)) and set(point.adapters) == set(point.majors[:-1])
        assert set(point.additions) <= set(range(1, point.minor + 1))
        for adapter in (*point.adapters.values(), *point.additions.values()):
            module, _, function = adapter.partition(":")
            assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.usefixtures("adapters")
def test_a_body_of_the_older_major_is_adapted(playground: Playground) -> None:
    playground.module("pg_old", OLD)
    playground.distribution("pg-old", "1.0", {POINT.group(0): {"old": "pg_old:Card"}})
    registry = Registry.discover()
    candidate = registry.find("scheduling_policy", "old")
    body: Any = load_body(registry.card(candidate), candidate=candidate)
    assert (body.__name__, body.__module__, body.__doc__) == ("Policy", "pg_old", "What a stranger wrote for major 0.")
    policy = body(SimpleNamespace())
    assert policy.victim(["a", "b"], [1, 0]) == "b" and policy.asked == [2]


@pytest.mark.usefixtures("adapters")
def test_it_serves(playground: Playground) -> None:
    playground.module("pg_old", OLD)
    playground.distribution("pg-old", "1.0", {POINT.group(0): {"old": "pg_old:Card"}})
    prompts, params = [f"Tale {i}" for i in range(6)], SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    texts = []
    for policy in ("fcfs", "old"):
        with LLM(model="tiny", num_kv_pages=14, dtype="float64", scheduling_policy=policy) as llm:
            texts.append([output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)])
            assert llm.llm_engine.stats().num_preemptions > 0
    assert texts[0] == texts[1]
    assert importlib.import_module("pg_old").Policy.asked


@pytest.mark.usefixtures("adapters")
def test_of_two_majors_in_one_wheel_the_newer_counts(playground: Playground) -> None:
    playground.module("pg_old", OLD)
    playground.module("pg_new", NEW)
    groups = {POINT.group(0): {"both": "pg_old:Card"}, POINT.group(1): {"both": "pg_new:Card"}}
    playground.distribution("pg-both", "1.0", {**groups, POINT.group(7): {"both": "pg_none:Card", "late": "pg_none:C"}})
    registry = Registry.discover()
    candidate = registry.find("scheduling_policy", "both")
    body: Any = load_body(registry.card(candidate), candidate=candidate)
    assert body(SimpleNamespace()).victim(["a", "b"], [1, 1]) == "a"
    with pytest.raises(IncompatibleDriverError, match="speaks v7, this core serves v0, v1"):
        registry.find("scheduling_policy", "late")


@pytest.mark.usefixtures("additions")
def test_a_body_of_the_older_minor_is_adapted_and_one_of_this_is_not(playground: Playground) -> None:
    playground.module("pg_minor", OF_MINOR_0)
    playground.module(
        "pg_now", OF_MINOR_0.replace("requires_minor = 0", "requires_minor = 1").replace("pg_minor:", "pg_now:")
    )
    playground.distribution("pg-minor", "1.0", {"engine.evictor.v0": {"then": "pg_minor:Card", "now": "pg_now:Card"}})
    registry = Registry.discover()
    for name, is_itself in (("then", False), ("now", True)):
        card = registry.card(registry.find("evictor", name))
        body: Any = load_body(card, candidate=registry.find("evictor", name))
        assert (body is load_body(card)) == is_itself and body.__doc__ == "What a stranger wrote for 0.0."


@pytest.mark.usefixtures("additions")
def test_drivers_of_the_older_minor_serve(playground: Playground) -> None:
    playground.module("pg_minor", OF_MINOR_0)
    playground.distribution("pg-minor", "1.0", {"engine.evictor.v0": {"minor0": "pg_minor:Card"}})
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with LLM(model="tiny", num_kv_pages=14, dtype="float64", evictor="minor0") as llm:
        llm.generate([f"Tale {i}" for i in range(4)], params, use_tqdm=False)
    assert sum(importlib.import_module("pg_minor").Evictor.committed) > 0
