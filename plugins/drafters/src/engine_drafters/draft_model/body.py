"""The body of drafter `draft_model` (Leviathan, Kalman, Matias 2023; Chen et al. 2023).

The draft model computes what the target computes, so that it has keys and values of every token that the target has:
while drafts are made, one by one, each from the one before, where a step computes these alone; else when the step is
observed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.interfaces.drafter import DraftBatch, DraftRows, Drafts, DraftSession

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext
    from engine.interfaces.step import TargetStep
    from engine.types.plan import NewSlot, StepPlan


MISSES = 2
"""Steps in a row that computed something beside what was drafted for, after which the next is taken to do so too."""


class DraftModelBody:
    """Keeps nothing itself: tokens stand in the session's table, keys and values in the target's pages."""

    def __init__(self, context: WorkerContext) -> None:
        assert context.platform is not None
        self._platform = context.platform
        self._proposed: DraftRows | None = None  # for the step that begins
        self._misses = 0
        self._early = context.start.parallel.pp > 1  # then drafts come back with a plan, whose step is computed anyway

    def enter(self, new: NewSlot) -> None:
        """Nothing is kept of a request."""

    def leave(self, slot: int, num_tokens: int, session: DraftSession) -> None:
        """Nothing is kept."""

    def observe(self, step: TargetStep, session: DraftSession) -> None:
        """The draft model computes the step's tokens too, drafts included, where it has not while it proposed them:
        what it has of wrong ones is written again when their places are computed again."""
        rows, self._proposed = self._proposed, None
        alone, foreseen = rows is not None and _computes(step.plan, rows), self._misses < MISSES
        if not (alone and foreseen):
            session.run_step(0, step)
        if rows is not None:
            self._misses = 0 if alone else self._misses + 1

    def propose(self, rows: DraftRows, session: DraftSession) -> Drafts:
        """The first pass computes each row's last token, which the target computes in the step that begins; one more
        than there are drafts leaves keys and values of the last of them, which may be kept; not where the step itself
        will be computed, since rows that draft nothing are in it."""
        kept = not self._early and self._misses < MISSES
        if (chains := session.draft(0, rows, kept)) is not None:
            self._proposed = None if self._early else rows
            return Drafts(chains)
        model, start, most = session.model(), rows.num_tokens - 1, int(rows.num_drafts.max())
        host = np.array((rows.slot, start), np.int64)
        last = torch.empty(host.shape, dtype=torch.int64, device=session.tokens.device)
        self._platform.to_device(torch.from_numpy(host), last)
        token = session.tokens[last[0], last[1]]
        tokens, probs = [], []
        for ahead in range(most):
            hidden = session.run(0, DraftBatch(rows.slot, start + ahead, 1, token))
            token, q = session.draw(model.logits(hidden), rows, ahead)
            tokens.append(token)
            if q is not None:
                probs.append(q)
        if kept:
            session.run(0, DraftBatch(rows.slot, start + most, 1, token))
        self._proposed = None if self._early else rows
        return Drafts(torch.stack(tokens, 1), None, torch.stack(probs, 1) if probs else None)


def _computes(plan: StepPlan, rows: DraftRows) -> bool:
    """Whether a step computes what was computed when drafts were proposed for these rows, and nothing else: neither
    prompts, nor drafts from elsewhere, nor on pages that it has first copied over what lay there."""
    if plan.num_drafts is None or plan.given_drafts is not None or plan.copies is not None:
        return False
    if len(plan.slot_of_row) != len(rows.slot):
        return False
    asked = (plan.slot_of_row, rows.slot), (plan.num_computed + 1, rows.num_tokens), (plan.num_drafts, rows.num_drafts)
    return not any((theirs != own).any() for theirs, own in asked)
