"""The draw of tokens, and what becomes of drafts.

On a processor, what no row asks for is found out and left out. On another device finding out would make the host wait
for it, so there all of it is done for all rows: the definition of the operation, and no more than that. A driver for
the device does it in one kernel.
"""

from __future__ import annotations

import torch

from engine.interfaces.ops import PURPOSE_ACCEPT, PURPOSE_RESIDUAL, PURPOSE_SAMPLE, SamplingRows
from engine_reference.ops_torch import common
from engine_reference.ops_torch.common import widened
from engine_reference.ops_torch.philox import uniform

_FIRST_CANDIDATES = 256
"""How many of the most likely tokens are sorted at first; more only where these do not reach a row's top_p."""


class Drawing:
    """Temperature, min-p, top-k, top-p and the draw; rejection sampling, and how many tokens a row gives."""

    def draw(self, logits: torch.Tensor, rows: SamplingRows) -> tuple[torch.Tensor, torch.Tensor]:
        """A token of each row, int32 [R], and which rows hold a NaN, bool [R]. See `engine.interfaces.ops.Ops.draw`."""
        wide = widened(logits)
        return self.sample(wide, rows), wide.isnan().any(dim=-1)

    def sample(self, logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        """Draw one token for each row: int32 [R]. See `engine.interfaces.ops.Ops.sample`."""
        drawn = rows.temperature > 0
        if not common.may_ask(logits):
            warm = rows._replace(temperature=torch.where(drawn, rows.temperature, 1.0))
            return torch.where(drawn, _draw(logits, warm), torch.argmax(logits, dim=-1).int())
        if not bool(drawn.any()):
            return torch.argmax(logits, dim=-1).int()
        if bool(drawn.all()):
            return _draw(logits, rows)
        tokens = torch.argmax(logits, dim=-1).int()
        index = drawn.nonzero().squeeze(1)
        tokens[index] = _draw(logits[index], SamplingRows(*(field[index] for field in rows)))
        return tokens

    def reject(
        self, logits: torch.Tensor, rows: SamplingRows, drafts: torch.Tensor, draft_probs: torch.Tensor | None
    ) -> torch.Tensor:
        """A draft, or a token that replaces it, for each row: int32 [R]. See `engine.interfaces.ops.Ops.reject`."""
        tokens = self.sample(logits, rows)
        # At temperature 0 the target has one token: keeping the draft where it is that one gives that one always.
        asked = (drafts >= 0) & (rows.temperature > 0)
        if not common.may_ask(logits):
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

    def verify_tree(
        self, tokens: torch.Tensor, drafts: torch.Tensor, parents: torch.Tensor, start: torch.Tensor, depth: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """How many positions each row's path has, int32 [R], and which, int64 [R, depth + 1]. See
        `engine.interfaces.ops.Ops.verify_tree`."""
        n, at = len(tokens), start[:-1]
        place = torch.arange(n, device=tokens.device)
        row = torch.searchsorted(start, place, right=True) - 1
        agrees = drafts == tokens[parents.clamp(min=0)]
        counts, path = torch.ones_like(at), [at]
        for _ in range(depth):
            goes_on = agrees & (parents == at[row])
            found = torch.full_like(at, n).scatter_reduce(0, row, torch.where(goes_on, place, n), "amin")
            counts += found < n
            at = torch.where(found < n, found, at)
            path.append(at)
        return counts.int(), torch.stack(path, dim=1)


def _draw(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    return draw_from(kept_weights(logits, rows), uniform(rows.seed, rows.position, PURPOSE_SAMPLE))


def kept_weights(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """[R, V]; what rows with a temperature above 0 draw from: probabilities, those that the filters drop set to 0 and
    the others not renormalised."""
    x = widened(logits)
    # Taking the maximum away first changes no probability, and keeps a tiny temperature from overflowing.
    x = (x - x.amax(dim=-1, keepdim=True)) / rows.temperature.to(x.dtype).unsqueeze(1)
    return _filtered(torch.softmax(x, dim=-1), rows)


def draw_from(weights: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """int32 [R]; the first token in order of id at which the running sum of weights [R, V] exceeds u [R] * its sum."""
    running = torch.cumsum(weights, dim=-1, dtype=torch.float64)
    target = u * running[:, -1]
    token = torch.searchsorted(running, target.unsqueeze(1), right=True).squeeze(1)
    return token.clamp_(max=weights.shape[1] - 1).int()  # only a row of NaN finds no place


def _filtered(p: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """p [R, V] with what min_p, top_k and top_p drop set to 0."""
    if not common.may_ask(p):
        return _filtered_for_all(p, rows)
    vocab = p.shape[1]
    floor: torch.Tensor | None = None
    if bool((rows.min_p > 0).any()):
        floor = rows.min_p.to(p.dtype) * p.amax(dim=-1)
    limited = (rows.top_k > 0) & (rows.top_k < vocab)
    top: torch.Tensor | None = None
    if bool(limited.any()):
        k = torch.where(limited, rows.top_k, 1).long()
        top = torch.topk(p, int(k.max()), dim=-1).values
        kth = torch.where(limited, top.gather(1, (k - 1).unsqueeze(1)).squeeze(1), 0)
        floor = kth if floor is None else torch.maximum(floor, kth)
    if floor is not None:
        p = torch.where(p < floor.unsqueeze(1), 0, p)
    nucleus = (rows.top_p < 1).nonzero().squeeze(1)
    if not len(nucleus):
        return p
    if len(nucleus) == len(p):
        return _top_p(p, rows.top_p)
    p[nucleus] = _top_p(p[nucleus], rows.top_p[nucleus])
    return p


def _filtered_for_all(p: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """As `_filtered`, without asking which rows it is for."""
    vocab = p.shape[1]
    limited = (rows.top_k > 0) & (rows.top_k < vocab)
    place = torch.where(limited, rows.top_k, 1).long().unsqueeze(1) - 1
    values = torch.sort(p, dim=-1, descending=True).values
    kth = torch.where(limited, values.gather(1, place).squeeze(1), 0)
    floor = torch.maximum(rows.min_p.to(p.dtype) * values[:, 0], kth)
    p = torch.where(p < floor.unsqueeze(1), 0, p)
    return torch.where((rows.top_p < 1).unsqueeze(1), _top_p(p, rows.top_p), p)


def _top_p(p: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Keep each row's shortest prefix, in order of falling p, that holds top_p of its sum; lower ids go first.

    Only values are sorted, and only as many as are needed: the value at which the prefix ends, and how many tokens of
    exactly that value still belong to it, say the rest.
    """
    vocab = p.shape[1]
    goal = top_p.double() * p.sum(dim=-1, dtype=torch.float64)
    on_host = common.may_ask(p)
    m = min(_FIRST_CANDIDATES, vocab) if on_host else vocab
    while True:
        values = torch.topk(p, m, dim=-1).values if m < vocab else torch.sort(p, dim=-1, descending=True).values
        running = torch.cumsum(values, dim=-1, dtype=torch.float64)
        if m == vocab or bool((running[:, -1] >= goal).all()):
            break
        m = min(m * 16, vocab)
    length = (running < goal.unsqueeze(1)).sum(dim=-1, keepdim=True).clamp_(max=m - 1) + 1
    last = values.gather(1, length - 1)
    above = p > last
    equal = p == last
    room = length - above.sum(dim=-1, keepdim=True)
    if not on_host or bool((equal.sum(dim=-1, keepdim=True) > room).any()):
        equal &= torch.cumsum(equal, dim=-1) <= room
    return torch.where(above | equal, p, 0)


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
