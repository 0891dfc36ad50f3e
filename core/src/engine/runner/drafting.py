"""Drafts in the runner: proposed when a step begins, or brought by its plan, computed with it, and verified once the
target has drawn.

A row with d drafts puts them behind its last token in the table of tokens, so that the model, the penalties and the
masks of each position see the drafts before it. The target draws at all 1 + d positions; each draw goes into the table
at its place, where a wrong draft stood. What lies behind the last token that counts is never read.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from engine.interfaces.drafter import Acceptance, Drafter, DraftRows, Drafts
from engine.interfaces.ops import Ops
from engine.interfaces.platform import Fetch, Platform
from engine.plugin.candidate import Candidate
from engine.sampling.faults import SlotFaults
from engine.sampling.packed import send
from engine.sampling.sampler import SampledDrafts
from engine.types.errors import ContractError
from engine.types.plan import ForcedDrafts, LeftSlots, NewSlot, StepPlan

logger = logging.getLogger(__name__)


class ChosenDrafter(NamedTuple):
    """A drafter at work, and how its drafts become output."""

    drafter: Drafter
    acceptance: Acceptance
    num_tokens: int
    """The most drafts of a row."""
    candidate: Candidate


@dataclass(frozen=True)
class Session:
    """Implements `engine.interfaces.drafter.DraftSession`."""

    tokens: torch.Tensor


class Positions(NamedTuple):
    """The n positions of a step that draw: each sampling row's last token, and those before it that drafts follow.

    Args:
        rows: int64 [m]; the sampling rows. start: int64 [m + 1]; row i's positions are start[i] .. start[i + 1] - 1.
        row: int64 [n]; of the plan. offset: int64 [n]; place among the row's positions.
        num_drafts: int32 [R]; drafts that are computed.
    """

    rows: np.ndarray
    start: np.ndarray
    row: np.ndarray
    offset: np.ndarray
    num_drafts: np.ndarray

    @classmethod
    def of(cls, rows: np.ndarray, num_drafts: np.ndarray) -> Positions:
        """From the sampling rows and the drafts of all rows."""
        counts = 1 + num_drafts[rows].astype(np.int64)
        start = np.append(0, np.cumsum(counts))
        row = np.repeat(rows, counts)
        return cls(rows, start, row, np.arange(len(row)) - np.repeat(start[:-1], counts), num_drafts)

    @property
    def ahead(self) -> np.ndarray:
        """int64 [n]; how many positions of its row come after each: 0 for the row's last token."""
        return self.num_drafts[self.row] - self.offset


@dataclass(slots=True)
class StepDrafts:
    """The drafts of one step.

    Args:
        rows: all that have drafts; `drafts`: those, with counts.
        place: int64 [m]; the plan's row of each.
        asked: as the drafter was asked; None where it was not.
        positions: where the step draws.
        sampled: the drafts in the order of `positions`.
        start: int64 [R' + 1], on the device; `positions.start`.
        asked_among: int64, on the device; where the rows that the drafter was asked for stand among those that draw.
        fetch: their copy to the host under way, where masks follow that depend on them.
    """

    rows: DraftRows
    drafts: Drafts
    place: np.ndarray
    asked: DraftRows | None
    positions: Positions
    sampled: SampledDrafts
    start: torch.Tensor
    asked_among: torch.Tensor
    fetch: Fetch | None = None

    def told(self) -> list[list[int]]:
        """The drafts of each row of the plan, on the host. Waits for their copy."""
        assert self.fetch is not None
        tokens: list[list[int]] = [[] for _ in self.positions.num_drafts]
        (found,) = self.fetch.wait()
        for row, of_row in zip(self.place.tolist(), found.tolist(), strict=True):
            tokens[row] = of_row[: self.positions.num_drafts[row]]
        return tokens


class Drafting:
    """A drafter in the hands of the runner, and drafts that come with a plan.

    Args:
        chosen: at work; None where the engine has no drafter: then all drafts come with their plan.
        ops, platform: the worker's.
        tokens: int32 [max_num_seqs + 1, max_model_len + 1]; the device's table of tokens.
        faults: of slots; what the drafter raises over one request ends that one.
    """

    def __init__(
        self, chosen: ChosenDrafter | None, ops: Ops, platform: Platform, tokens: torch.Tensor, faults: SlotFaults
    ) -> None:
        self._chosen = chosen
        self._acceptance: Acceptance = "exact" if chosen is None else chosen.acceptance
        self._faults = faults
        self._ops = ops
        self._platform = platform
        self._tokens = tokens
        self._session = Session(tokens)

    @property
    def rejects(self) -> bool:
        """Rejection sampling, instead of drawing as without drafts."""
        return self._acceptance == "rejection"

    def leave(self, left: LeftSlots) -> None:
        """Requests have left their slots; their tokens are still in the table."""
        if self._chosen is None:
            return
        for slot, num_tokens in zip(left.slot.tolist(), left.num_tokens.tolist(), strict=True):
            try:
                self._chosen.drafter.leave(slot, num_tokens, self._session)
            except Exception:  # the request has left: there is nobody to tell but the log
                logger.exception("drafter '%s' could not let slot %d go", self._chosen.candidate.name, slot)

    def enter(self, new: NewSlot) -> None:
        """A request enters a slot."""
        if self._chosen is not None:
            try:
                self._chosen.drafter.enter(new)
            except Exception as error:
                fault = self._chosen.candidate.fault(f"take request {new.request_id!r} in", error)
                self._faults.add([new.slot], fault)

    def propose(self, plan: StepPlan) -> tuple[StepPlan, StepDrafts]:
        """Ask for the drafts of a plan with `num_drafts`, as far as they do not come with it, and put all into the
        table.

        Returns:
            The plan, cut to the drafts that were found, and the drafts.

        Raises:
            ContractError: the drafter's answer has the wrong form.
        """
        assert plan.num_drafts is not None
        place = np.flatnonzero(plan.num_drafts)
        rows = _rows(plan, place)
        given = plan.forced_drafts
        asked_place = place if given is None else np.setdiff1d(place, given.row)
        if (faulty := self._faults.among(plan.slot_of_row[asked_place])) is not None:
            asked_place = asked_place[~faulty]
        asked, drafts = None, None
        if len(asked_place):
            asked = rows if len(asked_place) == len(place) else _rows(plan, asked_place)
            drafts = self._proposed(asked)
            asked, asked_place = (asked, asked_place) if drafts is not None else (None, asked_place[:0])
        if drafts is None or len(asked_place) < len(place):
            drafts = self._merged(drafts, np.searchsorted(place, asked_place), given, rows, place)
        assert drafts.counts is not None
        num_drafts = np.zeros(plan.num_rows, np.int32)
        num_drafts[place] = drafts.counts
        num_tokens = plan.num_tokens.copy()
        num_tokens[place] = 1 + drafts.counts
        alone = (num_tokens == 1) & plan.samples
        num_decodes = plan.num_rows if alone.all() else int(alone.argmin())
        plan = msgspec.structs.replace(plan, num_tokens=num_tokens, num_drafts=num_drafts, num_decodes=num_decodes)
        positions = Positions.of(np.flatnonzero(plan.samples), num_drafts)
        among = np.searchsorted(positions.rows, asked_place)
        sampled, start, among_device = self._put(rows, drafts, place, positions, among)
        step = StepDrafts(rows, drafts, place, asked, positions, sampled, start, among_device)
        if plan.masks_follow:
            step.fetch = self._platform.to_host((drafts.tokens,))
        return plan, step

    def _proposed(self, rows: DraftRows) -> Drafts | None:
        """What the drafter proposes; None where it failed over the one request that it was asked for.

        Raises what it raised where it was asked for several: nobody knows over which.
        """
        assert self._chosen is not None, "a plan wants drafts, and there is no drafter"
        try:
            return self._checked(self._chosen.drafter.propose(rows, self._session), rows)
        except Exception as error:
            fault = self._chosen.candidate.fault(f"propose drafts for {len(rows.slot)} rows", error)
            if len(rows.slot) > 1:
                raise fault from error
            self._faults.add(rows.slot.tolist(), fault)
            return None

    def _checked(self, drafts: Drafts, rows: DraftRows) -> Drafts:
        """The drafts, with counts."""
        m, k = len(rows.slot), int(rows.num_drafts.max())
        counts = rows.num_drafts if drafts.counts is None else drafts.counts
        fits = tuple(drafts.tokens.shape) == (m, k) and counts.shape == (m,)
        if not fits or (counts < 0).any() or (counts > rows.num_drafts).any():
            raise ContractError(
                f"drafts for {m} rows, at most {k} each",
                f"the drafter gave tokens of shape {tuple(drafts.tokens.shape)} and counts {counts!r:.80}",
                "choose another drafter driver and tell its author",
                point="drafter",
            )
        return drafts._replace(counts=counts)

    def _merged(
        self, proposed: Drafts | None, at: np.ndarray, given: ForcedDrafts | None, rows: DraftRows, place: np.ndarray
    ) -> Drafts:
        """What the drafter proposed, which goes to the rows `at`, and what came with the plan: that is certain. Others
        get none."""
        m, k, device = len(place), int(rows.num_drafts.max()), self._tokens.device
        host, counts, probs = np.full((m, k), -1, np.int32), np.zeros(m, np.int32), None
        if given is not None:
            mine = np.searchsorted(place, given.row)
            host[mine, : given.tokens.shape[1]] = given.tokens[:, :k]
            counts[mine] = rows.num_drafts[mine]
        tokens, where = send(self._platform, host, at)
        if proposed is not None:
            assert proposed.counts is not None
            width = proposed.tokens.shape[1]
            tokens[where, :width] = proposed.tokens.int()
            counts[at] = proposed.counts
            if self.rejects and proposed.probs is not None:
                probs = torch.zeros(m, k, proposed.probs.shape[2], dtype=proposed.probs.dtype, device=device)
                probs.scatter_(2, tokens.clamp(min=0).long().unsqueeze(2), 1.0)
                probs[where, :width] = proposed.probs
        return Drafts(tokens, counts, probs)

    def _put(
        self, rows: DraftRows, drafts: Drafts, place: np.ndarray, positions: Positions, among: np.ndarray
    ) -> tuple[SampledDrafts, torch.Tensor, torch.Tensor]:
        """Write the drafts behind their rows' tokens; and the same in the order of the positions that draw. With it go
        the positions' `start`, and `among`, which come back as they are on the device."""
        assert drafts.counts is not None
        which = np.repeat(np.arange(len(place)), drafts.counts)
        has = positions.ahead > 0
        offset = positions.offset[has]  # rows stand in the same order here and there
        slot, at = rows.slot[which].astype(np.int64), rows.num_tokens[which] + offset
        host = np.stack([which, offset, slot, at, np.flatnonzero(has)])
        indices, start, among_device = send(self._platform, host, positions.start, among)
        tokens = drafts.tokens[indices[0], indices[1]].int()
        self._tokens.index_put_((indices[2], indices[3]), tokens)
        n, device = len(positions.row), self._tokens.device
        flat = torch.full((n,), -1, dtype=torch.int32, device=device).index_put_((indices[4],), tokens)
        probs = None
        if self.rejects and drafts.probs is not None:
            probs = torch.zeros(n, drafts.probs.shape[2], dtype=drafts.probs.dtype, device=device)
            probs[indices[4]] = drafts.probs[indices[0], indices[1]]
        return SampledDrafts(flat, probs), start, among_device

    def verify(self, step: StepDrafts, tokens: torch.Tensor) -> torch.Tensor:
        """How many of the drawn tokens, int32 [n], count for each sampling row: int32 [m], device. The drafter hears
        of it."""
        counts = self._ops.verify(tokens, step.sampled.tokens, step.start)
        if step.asked is not None:
            assert self._chosen is not None
            self._chosen.drafter.accepted(step.asked, counts[step.asked_among] - 1)
        return counts


def _rows(plan: StepPlan, place: np.ndarray) -> DraftRows:
    """These rows, as a drafter is asked for them."""
    assert plan.num_drafts is not None
    return DraftRows(plan.slot_of_row[place], plan.num_computed[place] + 1, plan.num_drafts[place])
