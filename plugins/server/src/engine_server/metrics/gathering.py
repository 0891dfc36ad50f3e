"""What several API processes have counted, as one: counters and histograms are summed, what only holds for one process
carries its number.

What a process had counted when it died stays in the sums: a counter never goes back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
from prometheus_client import ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from engine_kit.ranks import sum_failures
from engine_server.metrics.measures import Measured, Measures

OWN_PREFIXES = ("engine:", "process_")
LABEL = "api_worker"
"""The label with a process's number; what the first process holds has the number "main"."""
SUMMED = frozenset({"counter", "histogram", "summary"})
_GAUGES = "_created"


class Family(msgspec.Struct, frozen=True):
    """A metric with all its samples.

    Args:
        name, kind, text, unit: as Prometheus has them; `kind`: "counter", "gauge", ...
        samples: (name, labels, value).
    """

    name: str
    kind: str
    text: str
    unit: str
    samples: list[tuple[str, dict[str, str], float]]


class Snapshot(msgspec.Struct):
    """What one process has counted so far: of its requests; answers by status code; (plugin, hook, how often it
    raised); the metrics of its plugins."""

    measured: Measured = msgspec.field(default_factory=Measured)
    responses: dict[int, int] = {}
    hook_failures: tuple[tuple[str, str, int], ...] = ()
    families: list[Family] = []


class Told(msgspec.Struct, frozen=True):
    """An API process: its number, its process id, its HTTP requests in progress, and what it has counted. Of dead ones
    together, the number is None."""

    number: int | None
    pid: int
    active: int
    snapshot: Snapshot


class Gathered:
    """What all processes told, the dead ones too, as `Told` or as plain data; `parent` is the first process's id."""

    def __init__(self, told: Any, parent: int) -> None:
        self._told = msgspec.convert(told, list[Told], strict=False)
        self._parent = parent

    @property
    def active(self) -> int:
        return sum(one.active for one in self._told)

    def measured(self, max_model_len: int) -> Measured:
        """Of all requests."""
        return _sum(Measures(max_model_len).plain(), (one.snapshot for one in self._told))

    @property
    def responses(self) -> Counter[int]:
        return sum((Counter(one.snapshot.responses) for one in self._told), Counter())

    @property
    def hook_failures(self) -> tuple[tuple[str, str, int], ...]:
        return sum_failures(one.snapshot.hook_failures for one in self._told)

    def of_plugins(self) -> Collector:
        return Families(merge_families((_name(one.number), one.snapshot.families) for one in self._told))

    def processes(self) -> Collector:
        """Each process's own memory, processor time and open files."""
        which = [("main", self._parent), *((_name(one.number), one.pid) for one in self._told if one.pid)]
        return Families(merge_families((name, _process_families(pid)) for name, pid in which))


def past(several: Iterable[Snapshot]) -> Snapshot:
    """What processes that have ended leave: what is summed, and nothing of how they were."""
    kept = list(several)
    families = [
        msgspec.structs.replace(family, samples=[s for s in family.samples if not s[0].endswith(_GAUGES)])
        for family in merge_families(("", snapshot.families) for snapshot in kept)
        if family.kind in SUMMED
    ]
    return Snapshot(
        measured=_sum(Measured(), kept),
        responses=dict(sum((Counter(snapshot.responses) for snapshot in kept), Counter())),
        hook_failures=sum_failures(snapshot.hook_failures for snapshot in kept),
        families=families,
    )


def _sum(total: Measured, snapshots: Iterable[Snapshot]) -> Measured:
    for snapshot in snapshots:
        total.add(snapshot.measured)
    return total


def merge_families(told: Iterable[tuple[str, Sequence[Family]]]) -> list[Family]:
    """The metrics of several processes, each of which has a name: counters, histograms and summaries summed by their
    labels; of other kinds each sample, labelled with the process."""
    merged: dict[str, Family] = {}
    sums: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for process, families in told:
        for family in families:
            whole = merged.setdefault(family.name, msgspec.structs.replace(family, samples=[]))
            if whole.kind not in SUMMED:
                whole.samples.extend(
                    (name, {**labels, LABEL: process}, value) for name, labels, value in family.samples
                )
                continue
            of_family = sums.setdefault(family.name, {})
            for name, labels, value in family.samples:
                key = name, tuple(labels.items())
                if name.endswith(_GAUGES):  # when it was made: the first counts
                    of_family[key] = min(value, of_family.get(key, value))
                else:
                    of_family[key] = of_family.get(key, 0.0) + value
    for name, samples in sums.items():
        merged[name].samples.extend((sample, dict(labels), value) for (sample, labels), value in samples.items())
    return list(merged.values())


def family_of(metric: Metric) -> Family:
    """A metric of the library's as plain data."""
    samples = [(sample.name, dict(sample.labels), float(sample.value)) for sample in metric.samples]
    return Family(metric.name, metric.type, metric.documentation, metric.unit, samples)


def _process_families(pid: int) -> list[Family]:
    collector = ProcessCollector(pid=lambda: pid, registry=None)
    found = [family_of(metric) for metric in collector.collect()]
    # Of a process: not summed, whatever its kind.
    return [msgspec.structs.replace(family, kind="process " + family.kind) for family in found]


def _name(number: int | None) -> str:
    return "gone" if number is None else str(number)


class Families(Collector):
    """Plain data as the library's metrics."""

    def __init__(self, families: Sequence[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            metric = Metric(family.name, family.text, family.kind.removeprefix("process "), family.unit)
            for name, labels, value in family.samples:
                metric.add_sample(name, labels, value)
            yield metric
