"""What becomes of drafts: rejection sampling, and how many tokens a row gives."""

from __future__ import annotations

import torch

from engine.interfaces.ops import PURPOSE_ACCEPT, PURPOSE_RESIDUAL, SamplingRows
from engine_reference.ops_torch import asking
from engine_reference.ops_torch.philox import uniform
from engine_reference.ops_torch.sample import Sample, draw_from, kept_weights


class Reject:
    """The operations of speculative decoding."""

    def reject(
        self, logits: torch.Tensor, rows: SamplingRows, drafts: torch.Tensor, draft_probs: torch.Tensor | None
    ) -> torch.Tensor:
        """A draft, or a token that replaces it, for each row: int32 [R]. See `engine.interfaces.ops.Ops.reject`."""
        tokens = Sample().sample(logits, rows)
        # At temperature 0 the target has one token: keeping the draft where it is that one gives that one always.
        asked = (drafts >= 0) & (rows.temperature > 0)
        if not asking.may_ask(logits):
            warm = rows._replace(temperature=torch.where(asked, rows.temperature, 1.0))
            return torch.where(asked, _kept_or_replaced(logits, warm, drafts.clamp(min=0), draft_probs), tokens)
        index = asked.nonzero().squeeze(1)
        if not len(index):
            return tokens
        rows = SamplingRows(*(field[index] for field in rows))
        probs = None if draft_probs is None else draft_probs[index]
        tokens[index] = _kept_or_replaced(logits[index], rows, drafts[index], probs)
        return tokens

    def verify(self, tokens: torch.Tensor, drafts: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        """How many tokens each row gives: int32 [R]. See `engine.interfaces.ops.Ops.verify`."""
        place = torch.arange(len(tokens), device=tokens.device)
        wrong = torch.where(tokens == drafts, len(tokens), place)
        # A row's last position has no draft, so each row finds one of its own: the first wrong one at or after it.
        first = wrong.flip(0).cummin(0).values.flip(0)[start[:-1]]
        return (first - start[:-1] + 1).int()


def _kept_or_replaced(
    logits: torch.Tensor, rows: SamplingRows, drafts: torch.Tensor, draft_probs: torch.Tensor | None
) -> torch.Tensor:
    """int32 [R]; of rows that all have a draft and a temperature."""
    draft = drafts.long().unsqueeze(1)
    weights = kept_weights(logits, rows).double()
    p = weights / weights.sum(dim=-1, keepdim=True)
    if draft_probs is None:
        q = torch.zeros_like(p).scatter_(1, draft, 1.0)
    else:
        q = draft_probs.to(p.dtype)
    u = uniform(rows.seed, rows.position, PURPOSE_ACCEPT)
    kept = u * q.gather(1, draft).squeeze(1) < p.gather(1, draft).squeeze(1)
    residual = (p - q).clamp_(min=0)
    residual = torch.where(residual.any(dim=-1, keepdim=True), residual, p)  # rounding left nothing of p = q
    replaced = draw_from(residual, uniform(rows.seed, rows.position, PURPOSE_RESIDUAL))
    return torch.where(kept, draft.squeeze(1).int(), replaced)
