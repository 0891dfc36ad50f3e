"""Slots whose request ends because a driver raised an error over it. Others go on."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from engine.types.errors import EngineError
from engine.types.plan import ErrorParts, StepPlan


class SlotFaults:
    """What drivers raised, by slot, until another request enters it. Its row draws `BROKEN`; the result says why."""

    def __init__(self) -> None:
        self._parts: dict[int, ErrorParts] = {}

    def add(self, slots: Iterable[int], error: EngineError) -> None:
        """The requests in these slots end with this error, if not with an earlier one."""
        for slot in slots:
            self._parts.setdefault(slot, error.parts)

    def enter(self, slot: int) -> None:
        """Another request enters a slot."""
        self._parts.pop(slot, None)

    def among(self, slots: np.ndarray) -> np.ndarray | None:
        """bool [n]; which of these slots, int [n], have one; None where none has."""
        return np.isin(slots, list(self._parts)) if self._parts else None

    def spoil(self, broken: torch.Tensor, slots: np.ndarray) -> torch.Tensor:
        """Which rows are broken, bool [n], these slots' among them."""
        mine = self.among(slots)
        return broken if mine is None else broken | torch.from_numpy(mine).to(broken.device)

    def of_rows(self, plan: StepPlan) -> dict[int, ErrorParts] | None:
        """By row of a plan: those of its slots; None where there are none."""
        mine = self.among(plan.slot_of_row)
        if mine is None:
            return None
        return {row: self._parts[int(plan.slot_of_row[row])] for row in np.flatnonzero(mine).tolist()} or None
