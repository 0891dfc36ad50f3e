"""Decodes: the rows of a step that compute the token drawn last, perhaps with drafts behind it."""

from __future__ import annotations

import numpy as np

from engine.scheduling.batch import Batch
from engine.scheduling.preemption import oldest_that_fit
from engine.scheduling.slots import DECODE, EMPTY
from engine.scheduling.states import States


def choose_decodes(batch: Batch, states: States, stages: int = 1) -> None:
    """Put the slots that decode into the batch, as far as budget and pages last. Where pages are short, drafts are left
    out, then what was loaded for those in the queue is let go, and then somebody is preempted.

    stages: of a pipeline. Of so many plans each has its part of those that decode, so that all stages are at work.
    """
    s, kv, pages, drafting = states.slots, states.kv, batch.pages, states.drafts
    can = (s.phase == DECODE) & (s.placed < s.limit) & (s.drafts == 0)
    ready = can.nonzero()[0].astype(np.int32)
    if not ready.size:
        return
    if s.num_waits:
        now = ~s.waits[ready] | (s.known[ready] == s.placed[ready])
        # Theirs when they come back.
        batch.budget = max(0, batch.budget - ready.size + int(np.count_nonzero(now)))
        ready = ready[now]
    most = batch.budget if stages == 1 else min(batch.budget, -(-int(np.count_nonzero(can)) // stages))
    if ready.size > most:
        # A request begins to decode with a token of some step's budget, so without drafts there are never more of
        # them. While some wait for what became of their drafts, others begin: then those that wait longest go first.
        ready = np.sort(ready[np.argsort(s.last_step[ready], kind="stable")[:most]])
    if not ready.size:
        return
    positions = s.computed[ready]
    kv.leave_window(ready, positions, s.last_step[ready])
    shared = bool(states.prefilling or len(states.policy))
    drafts, batch.given = drafting.choose(ready, s, batch.budget - ready.size, shared)
    if drafts is not None:
        need = kv.extend_need(ready, positions + 1 + drafts)
        if np.add.reduce(need, axis=None) > pages.num_available:
            drafts = None
    if drafts is None:
        need = kv.decode_need(ready, positions)
    while drafts is None and np.count_nonzero(need) > pages.num_available:
        if states.connectors.let_go():
            continue
        batch.left_out = True
        # Pages come back without preemption where a step under way still names some, or computes drafts.
        if kv.pool.num_deferred_free or len(states.running) == 1 or s.drafts.any():
            keep = oldest_that_fit(s.order[ready], need, pages.num_available)
        else:
            states.preempt_one()
            keep = s.phase[ready] != EMPTY
        ready, positions, need = ready[keep], positions[keep], need[:, keep]
    s.computed[ready] = positions + 1
    s.placed[ready] += 1
    pages.decode(ready, need)
    batch.decodes = ready
    batch.positions = positions
    batch.budget -= ready.size
    if drafts is not None:
        s.drafts[ready] = batch.drafts = drafts
        batch.budget -= int(np.add.reduce(drafts))
