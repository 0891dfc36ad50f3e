"""Engine cores that share experts step together. An installed package brings what makes them agree on each step, for
part `lockstep` of the entry-point group `engine_parts`: a function of a `CoreStart`, called on all cores at once."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from engine.types.errors import EngineDeadError


class Agreed(NamedTuple):
    """What all cores compute in a step.

    Args:
        tokens: int32 [dp]; of each core, by data-parallel rank, at least 1: who has none computes padding.
        decodes: every row of every core has one token.
    """

    tokens: np.ndarray
    decodes: bool


class Lockstep(Protocol):
    """One core's tie to the others. They make the same calls of `agree`, each before it launches the step.

    Attributes:
        rank: this core's. meeting: a directory where its workers meet those of the others.
    """

    rank: int
    meeting: str

    @property
    def awake(self) -> bool:
        """A step may be due: this core has not agreed to sleep, another has called, or it is closed. Never waits."""

    @property
    def files(self) -> list[int]:
        """What becomes readable when another core calls this one that sleeps."""

    def agree(self, tokens: int, decodes: bool) -> Agreed | None:
        """Say what this core would compute, and wait for all others. Wakes those that sleep.

        None: nothing is to be computed. Nobody has anything, and all sleep; or one has left, and this core is about to
        be told to stop, too. Raises EngineDeadError where it is not, or one is silent for too long.
        """

    def gone(self) -> EngineDeadError | None:
        """Why it has ended, where that is known: another left, and this core had not. Never waits."""

    def close(self) -> None:
        """Leave. The others' steps end with it. Idempotent."""
