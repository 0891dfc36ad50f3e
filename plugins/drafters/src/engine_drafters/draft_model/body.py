"""The body of drafter `draft_model` (Leviathan, Kalman, Matias 2023; Chen et al. 2023).

The draft model computes what the target computes, so that it has keys and values of every token that the target has:
while drafts are made, one by one, each from the one before, where a step computes these alone; else when the step is
observed. The last of the drafts is computed once it was kept, but where a block of the cache ends with it: such a block
is found, and saved, as it is when the step ends.
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


NOWHERE = np.iinfo(np.int32).max
"""Behind every place."""


class DraftModelBody:
    """Tokens stand in the session's table, keys and values in the target's pages. By slot it keeps the place of a last
    draft, which the draft model has not computed, though it has all before it. Where a request is preempted then, or
    ends, it never will: of a block that is not whole one token may be missing, which costs drafts and changes no
    output."""

    def __init__(self, context: WorkerContext) -> None:
        assert context.platform is not None
        self._platform = context.platform
        self._block_size = context.start.layout.block_size
        self._behind = np.full(context.start.max_num_seqs + 1, NOWHERE, np.int32)
        self._proposed: DraftRows | None = None  # for the step that begins
        self._early = context.start.parallel.pp > 1  # then drafts come back with a plan, whose step is computed anyway

    def enter(self, new: NewSlot) -> None:
        self._behind[new.slot] = NOWHERE

    def leave(self, slot: int, num_tokens: int, session: DraftSession) -> None:
        """What is kept of the slot is of nobody."""

    def observe(self, step: TargetStep, session: DraftSession) -> None:
        """The draft model computes the step's tokens too, drafts included, where it has not while it proposed them:
        what it has of wrong ones is written again when their places are computed again."""
        rows, self._proposed = self._proposed, None
        if rows is None or not _computes(step.plan, rows):
            self._catch_up(step.plan.slot_of_row, step.plan.num_computed, session)
            session.run_step(0, step)

    def propose(self, rows: DraftRows, session: DraftSession) -> Drafts:
        """The first pass computes each row's last token, which the target computes in the step that begins, and each
        after it the draft before."""
        start, most = rows.num_tokens - 1, int(rows.num_drafts.max())
        self._catch_up(rows.slot, start, session)
        tokens, probs = session.draft(0, rows), None
        if tokens is None:
            tokens, probs = self._chains(rows, most, session)
        if not self._early:
            self._proposed = rows
            if ((rows.num_tokens + most) % self._block_size == 0).any():
                session.run(0, DraftBatch(rows.slot, start + most, 1, tokens[:, -1]))
            else:
                self._behind[rows.slot] = start + most
        return Drafts(tokens, None, probs)

    def _chains(self, rows: DraftRows, most: int, session: DraftSession) -> tuple[torch.Tensor, torch.Tensor | None]:
        model, start, tokens, probs = session.model(), rows.num_tokens - 1, [], []
        token = self._tokens(rows.slot, start, session)
        for ahead in range(most):
            hidden = session.run(0, DraftBatch(rows.slot, start + ahead, 1, token))
            token, q = session.draw(model.logits(hidden), rows, ahead)
            tokens.append(token)
            if q is not None:
                probs.append(q)
        return torch.stack(tokens, 1), torch.stack(probs, 1) if probs else None

    def _catch_up(self, slot: np.ndarray, num_computed: np.ndarray, session: DraftSession) -> None:
        """Compute the last drafts of an earlier step that were kept, of slots with so many tokens computed."""
        late = self._behind[slot] < num_computed
        slots, start = slot[late], self._behind[slot[late]]
        self._behind[slot] = NOWHERE
        if len(slots):
            session.run(0, DraftBatch(slots, start, 1, self._tokens(slots, start, session)))

    def _tokens(self, slot: np.ndarray, place: np.ndarray, session: DraftSession) -> torch.Tensor:
        host = np.array((slot, place), np.int64)
        at = torch.empty(host.shape, dtype=torch.int64, device=session.tokens.device)
        self._platform.to_device(torch.from_numpy(host), at)
        return session.tokens[at[0], at[1]]


def _computes(plan: StepPlan, rows: DraftRows) -> bool:
    """Whether a step computes what was computed when drafts were proposed for these rows, and nothing else: neither
    prompts, nor drafts from elsewhere, nor on pages that it has first copied over what lay there."""
    if plan.num_drafts is None or plan.given_drafts is not None or plan.copies is not None:
        return False
    if len(plan.slot_of_row) != len(rows.slot):
        return False
    asked = (plan.slot_of_row, rows.slot), (plan.num_computed + 1, rows.num_tokens), (plan.num_drafts, rows.num_drafts)
    return not any((theirs != own).any() for theirs, own in asked)
