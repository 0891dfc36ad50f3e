"""What several API processes have counted, as one."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from engine.process import wire
from engine_server.metrics.gathering import Gathered, Snapshot, Told, family_of, merge_families, past
from engine_server.metrics.measures import Measures
from engine_server.processes.parent import Parent


def measured(tokens: int) -> Measures:
    measures = Measures(64)
    for _ in range(tokens):
        measures.generation_tokens.observe(2)
    measures.finished["stop"] += tokens
    measures.retries += 1
    return measures


def of_plugin(value: int) -> list:
    registry = CollectorRegistry()
    Counter("asked", "How often.", ["what"], registry=registry).labels("a").inc(value)
    Gauge("depth", "How deep.", registry=registry).set(value)
    Histogram("size", "How large.", buckets=(1, 10), registry=registry).observe(value)
    return [family_of(metric) for metric in registry.collect()]


def snapshot(value: int) -> Snapshot:
    return Snapshot(measured(value).plain(), {200: value, 404: 1}, (("plugin", "hook", value),), of_plugin(value))


def samples(gathered: Gathered) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(gathered.of_plugins())
    found = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


def test_what_is_counted_is_summed_and_the_dead_count_on() -> None:
    dead = past([snapshot(4), snapshot(8)])
    told = [Told(0, os.getpid(), 2, snapshot(1)), Told(1, os.getpid(), 3, snapshot(2)), Told(None, 0, 0, dead)]
    travelled = msgspec.convert(msgspec.msgpack.decode(wire.encode(told)), list[Told], strict=False)
    assert travelled == told
    gathered = Gathered(travelled, os.getpid())
    assert gathered.active == 5 and gathered.responses == {200: 15, 404: 4}
    assert gathered.hook_failures == (("plugin", "hook", 15),)
    whole, expected = gathered.measured(64), measured(15).plain()
    assert whole.histograms == expected.histograms
    assert whole.finished == expected.finished and whole.retries == 4

    found = samples(gathered)
    assert found["asked_total{what=a}"] == 15 and found["size_sum{}"] == 15 and found["size_count{}"] == 4
    assert found["size_bucket{le=1.0}"] == 1 and found["size_bucket{le=10.0}"] == 4
    assert found["depth{api_worker=0}"] == 1 and found["depth{api_worker=1}"] == 2, "of a gauge each has its own"
    assert not any("gone" in name for name in found)
    assert past([dead]) == dead


def test_a_process_has_its_own_memory() -> None:
    gathered = Gathered([Told(0, os.getpid(), 0, Snapshot())], os.getppid())
    (resident,) = (f for f in gathered.processes().collect() if f.name == "process_resident_memory_bytes")
    assert {sample.labels["api_worker"] for sample in resident.samples} == {"main", "0"}
    assert merge_families([]) == []


async def test_who_dies_while_others_are_asked_counts_once() -> None:
    parent: Any = SimpleNamespace(_processes={}, _past=None)

    class Process:
        def __init__(self, number: int, dies: bool) -> None:
            self.number = number
            self.dies = dies
            self.last = Told(number, 1, 0, snapshot(4))

        async def renew(self) -> None:
            if self.dies:  # and is buried while another is waited for
                parent._past = Told(None, 0, 0, past([self.last.snapshot]))
                self.last = Told(self.number, 0, 0, Snapshot())

    for dies in (0, 1):
        parent._processes = {number: Process(number, number == dies) for number in (0, 1)}
        parent._past = None
        told, pid = await Parent._gather(parent, parent._processes[0])
        assert Gathered(told, pid).responses == {200: 8, 404: 2}
