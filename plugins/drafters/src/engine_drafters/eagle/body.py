"""The body of drafters `eagle` and `mtp`: a layer that goes on with the target's features, a token at a time.

When a step is launched, the draft model runs over all of its tokens. At position p it reads the target's feature there
and the token at p + 1, so what it makes is a feature of p + 1, from which the token at p + 2 is guessed. That of each
request's last token that counts is kept: the next step's first draft is drawn from it, and each further one from a pass
over the draft before. In a tree a pass takes all drafts of one depth that others follow, each a row of its own. What it
keeps of them lies where the step that comes puts the drafts, and is made anew when that is observed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from engine.interfaces.drafter import DraftBatch, DraftRows, Drafts, DraftSession
from engine_drafters.branching import choices_of, drafts_of
from engine_drafters.kept import KeptBySlot
from engine_drafters.layouts import EAGLE3, stream_layers
from engine_drafters.tree import HeadOptions, Level, levels_of

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext
    from engine.interfaces.step import TargetStep
    from engine.types.plan import NewSlot


class EagleDrafterBody:
    """Keeps a feature for each slot; keys and values lie in the target's pages."""

    def __init__(self, context: WorkerContext) -> None:
        start, (draft,) = context.start, context.start.drafts
        self._streams: tuple[int, ...] = ()
        if draft.model.architecture == EAGLE3:
            self._streams = stream_layers(draft.model.config, start.model.num_layers)
        self._kept = KeptBySlot(context, draft.model.hidden_size)
        options = context.options
        self._tree = options.tree or () if isinstance(options, HeadOptions) else ()
        self._levels: dict[int, list[Level]] = {}

    def enter(self, new: NewSlot) -> None:
        """Nothing is known of it yet."""
        self._kept.enter(new.slot)

    def leave(self, slot: int, num_tokens: int, session: DraftSession) -> None:
        """What is kept is put aside by the next one to enter."""

    def observe(self, step: TargetStep, session: DraftSession) -> None:
        """See `engine.interfaces.drafter.Drafter.observe`."""
        assert step.hidden is not None
        features = step.hidden
        if self._streams:
            features = cast(Any, session.model()).fuse([step.streams[layer] for layer in self._streams])
        made = session.run_step(0, step, features)
        self._kept.put(step.plan.slot_of_row, made[step.last])

    def propose(self, rows: DraftRows, session: DraftSession) -> Drafts:
        """See `engine.interfaces.drafter.Drafter.propose`."""
        if self._tree:
            return self._branching(rows, session)
        model = session.model()
        feature = self._kept.get(rows.slot)
        tokens: list[torch.Tensor] = []
        probs: list[torch.Tensor] = []
        for ahead in range(int(rows.num_drafts.max())):
            if ahead:  # the first one's pass was the step's
                feature = session.run(0, DraftBatch(rows.slot, rows.num_tokens - 2 + ahead, 1, tokens[-1], feature))
            token, q = session.draw(model.logits(feature), rows, ahead)
            tokens.append(token)
            if q is not None:
                probs.append(q)
        return Drafts(torch.stack(tokens, 1), None, torch.stack(probs, 1) if probs else None)

    def _branching(self, rows: DraftRows, session: DraftSession) -> Drafts:
        """Behind each node the token that is drawn, then those that are likeliest beside it."""
        model, m = session.model(), len(rows.slot)
        tree = self._tree[: int(rows.num_drafts.max())]
        if len(tree) not in self._levels:
            self._levels[len(tree)] = levels_of(tree)
        tokens: dict[int, torch.Tensor] = {}
        made = self._kept.get(rows.slot)
        for depth, level in enumerate(self._levels[len(tree)]):
            nodes = len(level.place)
            each = DraftRows(*(column.repeat(nodes) for column in rows))
            if depth:
                ids = torch.stack([tokens[draft] for draft in level.drafts], 1).flatten()
                features = torch.stack([made[:, node] for node in level.above], 1).flatten(0, 1)
                start = each.num_tokens - 2 + np.tile(level.place, m)
                hidden = None if level.hidden is None else np.tile(level.hidden, m)
                made = session.run(0, DraftBatch(each.slot, start, 1, ids, features, hidden))
            choices = choices_of(session, model.logits(made), each, depth, level.most).view(m, nodes, -1)
            made = made.view(m, nodes, -1)
            tokens |= {draft: choices[:, node, choice] for draft, (node, choice) in level.children.items()}
        return drafts_of(tree, [tokens[draft] for draft in range(len(tree))], rows)
