"""Drafts that branch: which tokens follow a node, and the answer that a tree of them makes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.interfaces.drafter import DraftRows, Drafts, DraftSession
from engine_drafters.tree import parents_of


def choices_of(session: DraftSession, logits: torch.Tensor, rows: DraftRows, ahead: int, others: int) -> torch.Tensor:
    """int32 [m, 1 + others]: the token that is drawn, then so many that are likeliest beside it.

    logits [m, V] are modified; rows, ahead: as `DraftSession.draw` has them.
    """
    if not others:
        return session.draw(logits, rows, ahead)[0].unsqueeze(1)
    first = session.draw(logits.clone(), rows, ahead)[0].unsqueeze(1)
    return torch.cat((first, logits.scatter_(1, first.long(), -torch.inf).topk(others).indices.int()), 1)


def drafts_of(tree: Sequence[tuple[int, ...]], tokens: Sequence[torch.Tensor], rows: DraftRows) -> Drafts:
    """tree: as far as it is drafted. tokens: of each of its nodes, int32 [m]."""
    lacking = int(rows.num_drafts.max()) - len(tree)
    return Drafts(
        torch.stack([*tokens, *[tokens[0]] * lacking], 1),
        np.minimum(rows.num_drafts, len(tree)).astype(np.int32),
        parents=np.pad(parents_of(tree), (0, lacking), constant_values=-1),
    )
