"""What the executor and its ranks say to each other, through `engine.process.wire`."""

from __future__ import annotations

from typing import Any

import msgspec

from engine.types.messages import Shutdown
from engine.types.plan import Masks, StepPlan
from engine.types.start import WorkerReady, WorkerStart
from engine_kit.ranks import RankAnswer


class RankStart(msgspec.Struct, frozen=True):
    """The start message.

    Args:
        worker: "pkg.mod:Class" to start.
        message: what with, for this rank; without a rendezvous that is the rank's own directory.
    """

    worker: str
    message: WorkerStart


class Step(msgspec.Struct, frozen=True, tag="step"):
    """Compute a step."""

    plan: StepPlan


class Sample(msgspec.Struct, frozen=True, tag="sample"):
    """Let the last step draw, under these masks."""

    step_id: int
    masks: Masks


class RankCall(msgspec.Struct, frozen=True, tag="call"):
    """Call a method of the worker, after the steps before it have been launched."""

    call_id: int
    method: str
    args: list[Any]


class Meet(msgspec.Struct, frozen=True, tag="meet"):
    """Where ranks on several machines meet: comes first, and once, see `WorkerStart.store`."""

    store: str


Order = Meet | Step | Sample | RankCall | Shutdown


class RankMeets(msgspec.Struct, frozen=True, tag="rank_meets"):
    """The first rank has the others meet at this store."""

    rank: int
    store: str


class RankReady(msgspec.Struct, frozen=True, tag="ready"):
    """The worker stands."""

    rank: int
    worker: WorkerReady


class Done(msgspec.Struct, frozen=True, tag="done"):
    """A step is computed."""

    rank: int
    answer: RankAnswer


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """What a call gave; `error` is a typed error's parts where it raised."""

    rank: int
    call_id: int
    value: Any = None
    error: tuple[str, str, str, str] | None = None


class RankFailed(msgspec.Struct, frozen=True, tag="rank_failed"):
    """The worker could not start, or a step raised.

    Args:
        error: as (code, asked, found, remedy).
        typed: it was one of Engine's own errors, so it says what the matter is; others may only follow from what
            happened to another rank.
    """

    rank: int
    error: tuple[str, str, str, str]
    typed: bool


News = RankMeets | RankReady | Done | Answer | RankFailed
