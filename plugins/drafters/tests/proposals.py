"""What drafters of this package propose, recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

from engine.interfaces.drafter import DraftRows, Drafts
from engine_drafters.eagle.body import EagleDrafterBody
from engine_drafters.medusa.body import MedusaDrafterBody


class Drafted(NamedTuple):
    """What was proposed for a request, and its tokens so far."""

    tokens: list[int]
    drafts: list[int]


def record(
    monkeypatch: pytest.MonkeyPatch, bodies: Sequence[Any] = (EagleDrafterBody, MedusaDrafterBody)
) -> list[Drafted]:
    """All that drafters of these bodies propose in this process."""
    found: list[Drafted] = []
    for body in bodies:
        plain_propose = body.propose

        def propose(self: Any, rows: DraftRows, session: Any, propose: Any = plain_propose) -> Drafts:
            drafts: Drafts = propose(self, rows, session)
            counts = rows.num_drafts if drafts.counts is None else drafts.counts
            for i, (slot, length) in enumerate(zip(rows.slot.tolist(), rows.num_tokens.tolist(), strict=True)):
                drafted = drafts.tokens[i, : int(counts[i])].tolist()
                found.append(Drafted(session.tokens[slot, :length].tolist(), drafted))
            return drafts

        monkeypatch.setattr(body, "propose", propose)
    return found
