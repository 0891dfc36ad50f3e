"""What is done to logits and tokens beside the draw: checks, penalties, masks, places, log probabilities."""

from __future__ import annotations

import torch

from engine.types.plan import BROKEN
from engine_reference.ops_torch.common import widened


class Logits:
    """Edits and reports of logits."""

    def check_logits(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """logits [R, V] -> (the same in float32 at least, bool [R]: which rows hold a NaN)."""
        logits = widened(logits)
        return logits, logits.isnan().any(dim=-1)

    def place_tokens(
        self, tokens: torch.Tensor, broken: torch.Tensor, table: torch.Tensor, slot: torch.Tensor, place: torch.Tensor
    ) -> torch.Tensor:
        """Write tokens int32 [R] to table[slot[i], place[i]]; int32 [R], `BROKEN` where broken[i], else the token."""
        table.index_put_((slot, place), tokens)
        return torch.where(broken, BROKEN, tokens)

    def penalties(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        tokens: torch.Tensor,
        num_prompt: torch.Tensor,
        num_tokens: torch.Tensor,
        presence: torch.Tensor,
        frequency: torch.Tensor,
        repetition: torch.Tensor,
    ) -> None:
        """Apply penalties to `logits[rows]` in place: repetition (Keskar et al. 2019), then frequency and presence.

        logits [R, V]; rows int64 [m]; tokens int32 [m, L]; num_prompt, num_tokens int [m]; the others float32 [m].
        """
        place = torch.arange(tokens.shape[1], device=tokens.device)
        known = place < num_tokens.unsqueeze(1)
        output = known & (place >= num_prompt.unsqueeze(1))
        ids = tokens.long().masked_fill_(~known, 0)  # what lies past the known tokens may be anything
        x = widened(logits[rows])
        occurs = torch.zeros_like(x).scatter_add_(1, ids, known.to(x.dtype)) > 0
        count = torch.zeros_like(x).scatter_add_(1, ids, output.to(x.dtype))
        factor = repetition.to(x.dtype).unsqueeze(1)
        x = torch.where(occurs, torch.where(x > 0, x / factor, x * factor), x)
        x = x - frequency.to(x.dtype).unsqueeze(1) * count - presence.to(x.dtype).unsqueeze(1) * (count > 0)
        logits[rows] = x.to(logits.dtype)

    def mask_tokens(self, logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Set logits[rows[i], tokens[i]] to -inf, in place. rows, tokens int64 [m]."""
        logits[rows, tokens] = -torch.inf

    def apply_bitmask(self, logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
        """Set logits[rows[i], t] to -inf, in place, where bit t % 32 of bits[i, t // 32] is 0; to 0 in a row that is
        left without a finite logit.

        logits [R, V]; rows int64 [m]; bits int32 [m, ceil(V / 32)].
        """
        place = torch.arange(32, dtype=torch.int32, device=bits.device)
        allowed = (bits.unsqueeze(2) >> place) & 1
        forbidden = allowed.flatten(1)[:, : logits.shape[1]] == 0
        x = logits[rows].masked_fill_(forbidden, -torch.inf)
        stuck = torch.isneginf(x).all(dim=1, keepdim=True)
        logits[rows] = x.masked_fill_(forbidden & stuck, 0.0)

    def logprobs(
        self, logits: torch.Tensor, tokens: torch.Tensor, k: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log probabilities under softmax(logits).

        logits [m, V], tokens int [m] -> (chosen float32 [m], rank int32 [m], top_ids int32 [m, k], top_values
        float32 [m, k]).
        """
        x = widened(logits)
        index = tokens.long().unsqueeze(1)
        total = torch.logsumexp(x, dim=-1, keepdim=True)
        logit = x.gather(1, index)
        rank = (x > logit).sum(dim=-1) + 1
        values, ids = torch.topk(x, k, dim=-1)
        return (logit - total).squeeze(1).float(), rank.int(), ids.int(), (values - total).float()
