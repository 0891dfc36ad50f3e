"""A drafter that makes all drafts in one pass, as P-EAGLE and DFlash do: places that are not drafted yet stand there as
masks, each a token and a feature that say so, and the pass computes them side by side.

It has an EAGLE head's layer, whose weights nobody trained for this: it shows what the interface bears.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.interfaces.context import WorkerContext
from engine.interfaces.drafter import DraftBatch, DraftRows, Drafts, DraftSession
from engine_drafters.eagle.body import EagleDrafterBody

MASK = 1
"""The token of a place that is not drafted yet."""


def mask_feature(size: int) -> torch.Tensor:
    """The feature of such a place, [size]; a real head would have learnt it."""
    return torch.sin(torch.arange(size, dtype=torch.float64))


class OnePassBody(EagleDrafterBody):
    """What it observes is what `eagle` does."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        size = context.start.drafts[0].model.hidden_size
        self._mask = mask_feature(size).to(dtype=context.dtype, device=context.device)

    def propose(self, rows: DraftRows, session: DraftSession) -> Drafts:
        """The first draft follows from the step that was observed, and all others from one pass over masks: one for
        rows that want equally many, since a row that reaches behind what its request gets is computed in vain."""
        model, most = session.model(), int(rows.num_drafts.max())
        kept = self._kept.get(rows.slot)
        made = kept.new_zeros(len(kept), most, kept.shape[1])
        made[:, 0] = kept
        for masks in np.unique(rows.num_drafts[rows.num_drafts > 1] - 1).tolist():
            own = np.flatnonzero(rows.num_drafts == masks + 1)
            ids = torch.full((len(own) * masks,), MASK, dtype=torch.int32, device=kept.device)
            features = self._mask.expand(len(ids), -1)
            hidden = session.run(0, DraftBatch(rows.slot[own], rows.num_tokens[own] - 1, masks, ids, features))
            made[torch.from_numpy(own).to(kept.device), 1 : 1 + masks] = hidden.view(len(own), masks, -1).to(made.dtype)
        drawn = [session.draw(model.logits(made[:, ahead]), rows, ahead) for ahead in range(most)]
        probs = [q for _, q in drawn if q is not None]
        return Drafts(torch.stack([token for token, _ in drawn], 1), None, torch.stack(probs, 1) if probs else None)
