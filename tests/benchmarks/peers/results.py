"""What a comparison finds, as plain data: kept as JSON, and read back to write the page."""

from __future__ import annotations

from pathlib import Path

import msgspec

from engine_bench.probe import Machine
from engine_bench.statistics import median
from tests.benchmarks.peers.protocol import GGUF
from tests.benchmarks.peers.workloads import WORKLOADS, Workload

FORMS = ("int8", "int4", *GGUF, "draft", "lora", "kv8")
"""Of weights, behind a work's name."""
START = "start"
"""The name of the time to the first token where a work's name may stand."""


class Task(msgspec.Struct, frozen=True):
    """A workload with one form of weights, see `protocol.Settings`."""

    workload: str
    weights: str

    @classmethod
    def parse(cls, text: str) -> Task:
        """Read "W2" or "W1-int8". Raises ValueError."""
        name, _, weights = text.partition("-")
        if name not in WORKLOADS or weights not in ("", *FORMS):
            known, forms = ", ".join(WORKLOADS), ", ".join(f"-{form}" for form in ("int8", "int4", *GGUF))
            raise ValueError(
                f"{text!r} is no work: write one of {known}, alone for bf16 or with {forms}, -draft, -lora or -kv8"
            )
        return cls(name, weights or "bf16")

    @property
    def name(self) -> str:
        """As `parse` reads it."""
        return self.workload if self.weights == "bf16" else f"{self.workload}-{self.weights}"

    @property
    def work(self) -> Workload:
        """What is done."""
        return WORKLOADS[self.workload]


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One task, ours and one peer in turns.

    Args:
        ours, theirs: the figures, one a pair.
        machine: probes, one more than pairs: before the first, and after each.
        same_first_tokens: share of all requests of all pairs whose first token is the same: both compute one model, in
            bf16, where near ties fall either way.
    """

    model: str
    task: Task
    peer: str
    ours: list[float]
    theirs: list[float]
    machine: list[Machine]
    same_first_tokens: float

    @property
    def ratios(self) -> list[float]:
        """Of each pair; above 1, ours is ahead."""
        return [self.task.work.ratio(a, b) for a, b in zip(self.ours, self.theirs, strict=True)]

    @property
    def ratio(self) -> float:
        """The median of the pairs'."""
        return median(self.ratios)


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """Starts of one engine beside one peer's.

    Args:
        peer: beside whom (ours is measured beside each).
        seconds: from the start of the process to the first token of 128 in; the first with nothing left over of what an
            engine compiles, the others after it.
        peak_memory: bytes, of all its processes, over all the work that was done; 0 where it did not end well.
    """

    model: str
    weights: str
    engine: str
    peer: str
    seconds: list[float]
    peak_memory: int = 0


class LeftOut(msgspec.Struct, frozen=True):
    """What was asked for and is not in the result, with the reason."""

    what: str
    reason: str


class Results(msgspec.Struct, kw_only=True):
    """All of a run.

    Args:
        commands: that made it.
        date: of the run, ISO.
        threads: that each engine was given.
        features: of the processor, those that matter here; the level's name alone where all were kept to it.
        versions: by engine, by distribution.
    """

    commands: list[str]
    date: str
    threads: int
    features: list[str]
    pairs: int
    versions: dict[str, dict[str, str]] = msgspec.field(default_factory=dict)
    comparisons: list[Comparison] = msgspec.field(default_factory=list)
    starts: list[Start] = msgspec.field(default_factory=list)
    left_out: list[LeftOut] = msgspec.field(default_factory=list)

    def save(self, path: Path) -> None:
        """Write as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self)) + b"\n")

    @classmethod
    def load(cls, path: Path) -> Results:
        """Read. Raises msgspec.ValidationError, OSError."""
        return msgspec.json.decode(path.read_bytes(), type=cls)

    def differs(self, other: Results) -> str:
        """Why figures of the two do not stand beside each other; "" where they do."""
        for what, own, its in (
            ("processor features", ", ".join(self.features), ", ".join(other.features)),
            ("cores", str(self.threads), str(other.threads)),
        ):
            if own != its:
                return f"it was measured with other {what}: {its or 'none known'}, not {own or 'none known'}"
        return ""

    def add(self, other: Results) -> None:
        """Take in a later run: what it measured again replaces what stands here."""
        fresh = {(c.model, c.task, c.peer) for c in other.comparisons}
        self.comparisons = [c for c in self.comparisons if (c.model, c.task, c.peer) not in fresh] + other.comparisons
        begun = {(s.model, s.weights, s.engine, s.peer) for s in other.starts}
        kept = [s for s in self.starts if (s.model, s.weights, s.engine, s.peer) not in begun]
        self.starts = kept + other.starts
        self.left_out += [entry for entry in other.left_out if entry not in self.left_out]
        self.commands += [command for command in other.commands if command not in self.commands]
        self.versions |= other.versions
        self.date = max(self.date, other.date)
        self.pairs = min(self.pairs, other.pairs)
