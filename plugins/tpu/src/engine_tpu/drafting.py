"""Drafts of a drafter that reads tokens alone: proposed on the host, and put into the plan, as if they came with it.

The host learns tokens with results. A row whose last token is still under way is waited for, which steps without drafts
never do.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Any, NamedTuple

import msgspec
import numpy as np

from engine.interfaces.drafter import Drafter, DraftRows, Drafts
from engine.plugin import Candidate
from engine.types.errors import ContractError, EngineError
from engine.types.plan import ErrorParts, GivenDrafts, StepPlan, StepResult
from engine_tpu.results import RunningStep

logger = logging.getLogger(__name__)


class Session(NamedTuple):
    """What a drafter sees: implements `engine.interfaces.drafter.DraftSession`, as far as it goes without torch.

    Args:
        tokens: int32 [slots, max_model_len + 1].
    """

    tokens: np.ndarray


class Drafting:
    """A drafter at work.

    Args:
        drafter: it; candidate: where it comes from.
        slots, max_model_len: of the table of tokens.
    """

    def __init__(self, drafter: Drafter, candidate: Candidate, slots: int, max_model_len: int) -> None:
        self._drafter = drafter
        self._candidate = candidate
        self._session: Any = Session(np.zeros((slots, max_model_len + 1), np.int32))
        self._known = np.zeros(slots, np.int64)
        self._turns = np.zeros(slots, np.int64)  # requests that have entered each slot
        self._running: deque[RunningStep] = deque()
        self._faults: dict[int, ErrorParts] = {}

    def begin(self, plan: StepPlan) -> StepPlan:
        """Requests leave and enter; the plan, with the drafts that were found for it.

        Raises ContractError where the drafter's answer has the wrong form.
        """
        self._change_slots(plan)
        if plan.num_drafts is None:
            return plan
        row, given = np.flatnonzero(plan.num_drafts), plan.given_drafts
        asked = row if given is None else np.setdiff1d(row, given.row)
        asked = asked[[slot not in self._faults for slot in plan.slot_of_row[asked].tolist()]]
        found: dict[int, np.ndarray] = {}
        if given is not None:
            found = {r: t[: plan.num_drafts[r]] for r, t in zip(given.row.tolist(), given.tokens, strict=True)}
        if len(asked):
            found |= self._proposed(plan, asked)
        return _with_drafts(plan, found)

    def drawn(self, step: RunningStep, slot: np.ndarray, place: np.ndarray, row: np.ndarray) -> RunningStep:
        """A launched step, whose result brings the tokens of these slots, from these places on; rows of the plan."""
        turns = self._turns[slot].copy()

        def learn(result: StepResult) -> None:
            tokens = result.tokens if result.tokens.ndim == 2 else result.tokens[:, None]
            for of_row, of_slot, start, turn in zip(
                row.tolist(), slot.tolist(), place.tolist(), turns.tolist(), strict=True
            ):
                new = tokens[of_row][tokens[of_row] >= 0]
                if turn == self._turns[of_slot]:
                    self._session.tokens[of_slot, start : start + len(new)] = new
                    self._known[of_slot] = start + len(new)

        step.learn = learn
        self._running.append(step)
        return step

    def faults_of(self, plan: StepPlan) -> dict[int, ErrorParts]:
        """By row, what the drafter raised over its request."""
        slots = plan.slot_of_row.tolist() if self._faults else ()
        return {row: self._faults[slot] for row, slot in enumerate(slots) if slot in self._faults}

    def _change_slots(self, plan: StepPlan) -> None:
        while self._running and self._running[0].taken:
            self._running.popleft()
        if (left := plan.left_slots) is not None:
            for slot, num_tokens in zip(left.slot.tolist(), left.num_tokens.tolist(), strict=True):
                try:
                    self._drafter.leave(slot, min(num_tokens, int(self._known[slot])), self._session)
                except Exception:  # the request has left: there is nobody to tell but the log
                    logger.exception("drafter '%s' could not let slot %d go", self._candidate.name, slot)
        for new in plan.new_slots:
            self._faults.pop(new.slot, None)
            self._turns[new.slot] += 1
            self._known[new.slot] = len(new.token_ids)
            self._session.tokens[new.slot, : len(new.token_ids)] = new.token_ids
            try:
                self._drafter.enter(new)
            except Exception as error:
                self._fail([new.slot], self._candidate.fault(f"take request {new.request_id!r} in", error))

    def _fail(self, slots: list[int], fault: EngineError) -> None:
        for slot in slots:
            self._faults.setdefault(slot, fault.parts)

    def _proposed(self, plan: StepPlan, row: np.ndarray) -> dict[int, np.ndarray]:
        """The drafts of these rows; none where it fails over the one request that it is asked for. Raises what it
        raised where it was asked for several: nobody knows over which."""
        assert plan.num_drafts is not None
        rows = DraftRows(plan.slot_of_row[row], plan.num_computed[row] + 1, plan.num_drafts[row])
        while self._running and (self._known[rows.slot] < rows.num_tokens).any():
            self._running.popleft().result()
        try:
            tokens, counts = self._checked(self._drafter.propose(rows, self._session), rows)
        except Exception as error:
            fault = self._candidate.fault(f"propose drafts for {len(row)} rows", error)
            if len(row) > 1:
                raise fault from error
            self._fail(rows.slot.tolist(), fault)
            return {}
        return {r: tokens[i, : counts[i]] for i, r in enumerate(row.tolist())}

    def _checked(self, drafts: Drafts, rows: DraftRows) -> tuple[np.ndarray, np.ndarray]:
        m, k = len(rows.slot), int(rows.num_drafts.max())
        tokens = np.asarray(drafts.tokens)
        counts = rows.num_drafts if drafts.counts is None else np.asarray(drafts.counts)
        fits = tokens.shape == (m, k) and counts.shape == (m,) and drafts.parents is None and drafts.probs is None
        if not fits or (counts < 0).any() or (counts > rows.num_drafts).any():
            raise ContractError(
                f"drafts for {m} rows, at most {k} each: chains that are certain",
                f"the drafter gave tokens of shape {tokens.shape}, counts {counts!r:.80}, parents "
                f"{drafts.parents!r:.80}{'' if drafts.probs is None else ' and probabilities'}",
                "choose another drafter driver and tell its author",
                point="drafter",
            )
        return tokens, counts


def _with_drafts(plan: StepPlan, found: dict[int, np.ndarray]) -> StepPlan:
    """The plan, cut to these drafts of its rows, which come with it."""
    assert plan.num_drafts is not None
    row = np.array(sorted(row for row, tokens in found.items() if len(tokens)), np.int32)
    num_drafts = np.zeros(plan.num_rows, np.int32)
    num_drafts[row] = [len(found[r]) for r in row.tolist()]
    tokens = np.full((len(row), max(1, int(num_drafts.max(initial=0)))), -1, np.int32)
    for i, r in enumerate(row.tolist()):
        tokens[i, : len(found[r])] = found[r]
    num_tokens = plan.num_tokens - plan.num_drafts + num_drafts
    alone = (num_tokens == 1) & plan.samples
    return msgspec.structs.replace(
        plan,
        num_drafts=num_drafts,
        num_tokens=num_tokens,
        num_decodes=plan.num_rows if alone.all() else int(alone.argmin()),
        given_drafts=GivenDrafts(row=row, tokens=tokens) if len(row) else None,
    )
