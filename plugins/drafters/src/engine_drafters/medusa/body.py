"""The body of drafter `medusa`: all drafts from the final state of the last token that was computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from engine.interfaces.drafter import DraftRows, Drafts, DraftSession
from engine_drafters.branching import choices_of, drafts_of
from engine_drafters.kept import KeptBySlot

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext
    from engine.interfaces.step import TargetStep
    from engine.types.plan import NewSlot
    from engine_drafters.tree import HeadOptions


class MedusaDrafterBody:
    """Keeps a state for each slot, which the target's own head has drawn the request's last token from."""

    def __init__(self, context: WorkerContext) -> None:
        self._kept = KeptBySlot(context, context.start.model.hidden_size)
        self._tree = cast("HeadOptions", context.options).tree or ()

    def enter(self, new: NewSlot) -> None:
        """Nothing is known of it yet."""
        self._kept.enter(new.slot)

    def leave(self, slot: int, num_tokens: int, session: DraftSession) -> None:
        """What is kept is put aside by the next one to enter."""

    def observe(self, step: TargetStep, session: DraftSession) -> None:
        """See `engine.interfaces.drafter.Drafter.observe`."""
        assert step.hidden is not None
        self._kept.put(step.plan.slot_of_row, step.hidden[step.last])

    def propose(self, rows: DraftRows, session: DraftSession) -> Drafts:
        """See `engine.interfaces.drafter.Drafter.propose`. There are no more drafts than heads, or nodes."""
        heads = cast(Any, session.model()).heads
        state, wanted = self._kept.get(rows.slot), int(rows.num_drafts.max())
        if self._tree:
            return self._branching(heads, state, rows, session)
        drawn = [session.draw(head(state), rows, ahead) for ahead, head in enumerate(heads[:wanted])]
        tokens = torch.stack([token for token, _ in drawn], 1)
        probs = [q for _, q in drawn if q is not None]
        lacking = wanted - len(drawn)
        return Drafts(
            torch.nn.functional.pad(tokens, (0, lacking)),
            np.minimum(rows.num_drafts, len(drawn)).astype(np.int32),
            torch.nn.functional.pad(torch.stack(probs, 1), (0, 0, 0, lacking)) if probs else None,
        )

    def _branching(self, heads: Any, state: torch.Tensor, rows: DraftRows, session: DraftSession) -> Drafts:
        """Of each head the token that is drawn, then those that are likeliest beside it."""
        wanted = int(rows.num_drafts.max())
        tree = self._tree[:wanted]
        choices = [
            choices_of(session, head(state), rows, ahead, max(path[ahead] for path in tree if len(path) > ahead))
            for ahead, head in enumerate(heads[: max(map(len, tree))])
        ]
        return drafts_of(tree, [choices[len(path) - 1][:, path[-1]] for path in tree], rows)
