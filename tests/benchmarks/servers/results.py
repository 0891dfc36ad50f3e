"""What a run finds, as plain data: kept as JSON, and read back to write the page."""

from __future__ import annotations

from pathlib import Path

import msgspec

from engine_bench.statistics import median
from tests.benchmarks.peers.results import LeftOut

GRID = 8
"""Steps of the rates' grid that double a rate: two neighbours differ by 9 %."""


def rate_of(place: int) -> float:
    """Conversations a second, of a place of the grid."""
    return float(f"{2 ** (place / GRID):.4g}")


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What the users do, and how much of it at once a server is told to do. Ranges are "LOW:HIGH".

    Args:
        turns: of a conversation.
        system_prompts: how many there are; each conversation has one of them.
        system_words: of each.
        words: of what a user says.
        output_len: tokens of an answer.
        think_time: mean seconds before each further turn.
        seconds: in which conversations begin.
        slo_ttft, slo_tpot: the objective: seconds to the first token, and between tokens on average.
        max_num_seqs: requests that a server may run at once.
    """

    turns: str
    system_prompts: int
    system_words: int
    words: str
    output_len: str
    think_time: float
    seconds: float
    slo_ttft: float
    slo_tpot: float
    max_num_seqs: int


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One rate, measured.

    Args:
        place: of the grid.
        figures: as `engine bench serve` names them; "client_cores": what the client itself took.
        faults: what was not as asked; [] where all answers came whole.
        keeps: whether the objective's time to the first token was kept by the 99th percentile, without a fault.
    """

    place: int
    figures: dict[str, float]
    faults: list[str]
    keeps: bool


class Search(msgspec.Struct, frozen=True, kw_only=True):
    """One server in one round.

    Args:
        first_prompt: tokens of the first prompts of a few conversations that are the same for all, on average.
        limit: the highest rate that kept the objective, as a place of the grid; None: none did.
        points: in the order in which they were measured.
    """

    model: str
    server: str
    round: int
    first_prompt: float
    limit: int | None
    points: list[Point]


class Results(msgspec.Struct, kw_only=True):
    """All of a run.

    Args:
        loads: by model.
        versions: by server, by distribution.
    """

    commands: list[str]
    date: str
    threads: int
    features: list[str]
    loads: dict[str, Load]
    versions: dict[str, dict[str, str]] = msgspec.field(default_factory=dict)
    searches: list[Search] = msgspec.field(default_factory=list)
    left_out: list[LeftOut] = msgspec.field(default_factory=list)

    def save(self, path: Path) -> None:
        """Write as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self)) + b"\n")

    @classmethod
    def load(cls, path: Path) -> Results:
        """Read. Raises msgspec.ValidationError, OSError."""
        return msgspec.json.decode(path.read_bytes(), type=cls)

    def of(self, model: str, server: str) -> list[Search]:
        """The searches of one server, by rounds."""
        found = [one for one in self.searches if (one.model, one.server) == (model, server)]
        return sorted(found, key=lambda one: one.round)

    def ratios(self, model: str, ours: str, theirs: str) -> list[float]:
        """Of the rates that both kept, in each round that has both; above 1, ours is ahead."""
        limits = {one.round: one.limit for one in self.of(model, theirs)}
        pairs = [(one.limit, limits.get(one.round)) for one in self.of(model, ours)]
        return [2 ** ((a - b) / GRID) for a, b in pairs if a is not None and b is not None]

    def ratio(self, model: str, ours: str, theirs: str) -> float | None:
        """The median of the rounds'; None where no round has both."""
        ratios = self.ratios(model, ours, theirs)
        return median(ratios) if ratios else None
