"""Capture: a step's native calls, recorded once on stable buffers, tried on two inputs, and replayed in one call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from engine.interfaces.platform import Trial
from engine.types.errors import ContractError
from engine_cpu._native import Tape
from engine_cpu.platform_cpu.guard import RecordingGuard

FEW = 5
"""Rows of a trial: an odd number, of no tile of a kernel."""


class Replay:
    """A captured step.

    Args:
        tape: its native calls.
        kept: what the addresses on the tape belong to.
    """

    __slots__ = ("_kept", "_replay", "tape")

    def __init__(self, tape: Tape, kept: object) -> None:
        self.tape = tape
        self._kept = kept
        self._replay = tape.replay

    def __call__(self, rows: int = 0) -> None:
        """Run the calls again, for the first `rows` rows; 0: for all."""
        self._replay(rows)


def capture(fn: Callable[[], None], rows: int, trial: Trial | None) -> Replay:
    """Record `fn`. With a trial, what it leaves is compared bit by bit: run and replayed, on both inputs; on the
    first one for a few of its rows alone, which see nothing of those after them.

    Raises ContractError where `fn` computes something that is not recorded, and where a replay leaves something else.
    """
    expected = [] if trial is None else [_run(fn, trial, number) for number in (0, 1)]
    if trial is not None:
        trial.prepare(0)
    guard, tape = RecordingGuard(), Tape(rows)
    with guard, tape:
        fn()
    replay = Replay(tape, (fn, guard.memory))
    if trial is not None:
        _compare(_copies(trial), expected[0], tape, "recorded")
        _compare(_run(replay, trial, 1), expected[1], tape, "replayed on input 1")
        few = min(rows, FEW) or None
        some = [tensor[:few] for tensor in _run(partial(replay, few or 0), trial, 0)]
        _compare(some, [tensor[:few] for tensor in expected[0]], tape, "replayed on a few rows of input 0")
    return replay


def _run(step: Callable[[], None], trial: Trial, number: int) -> list[torch.Tensor]:
    trial.prepare(number)
    step()
    return _copies(trial)


def _copies(trial: Trial) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in trial.outputs()]


def _compare(found: list[torch.Tensor], expected: list[torch.Tensor], tape: Tape, how: str) -> None:
    for index, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        same = ours.shape == theirs.shape and torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
        if not same:
            raise ContractError(
                "capture a decode step",
                f"{how}, its output {index} is another than when it runs: a call on the tape has kept a value that "
                f"changes from step to step ({len(tape)} calls: {', '.join(dict.fromkeys(tape.names))})",
                "start with --platform.capture never, and tell the driver's author",
                point="platform",
            )
