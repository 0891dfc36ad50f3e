"""Drawing tokens, and what is done to logits before and beside it. On float32, which the runner makes of others; `draw`
takes them as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from engine_cpu._native import Sampling as Kernels
from engine_cpu.dtypes import DTYPES

if TYPE_CHECKING:
    from engine.interfaces.ops import SamplingRows


class Sampling:
    """See `engine.interfaces.ops.Ops`."""

    _sampling: Kernels

    def sample(self, logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        """Draw one token for each row: int32 [R]."""
        return self.draw(logits.float(), rows)[0]

    def draw(self, logits: torch.Tensor, rows: SamplingRows) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens, int32 [R], and which rows hold a NaN, bool [R]. No copy of the logits is made."""
        logits = logits if logits.stride(-1) == 1 else logits.contiguous()
        tokens, broken = torch.empty(len(logits), dtype=torch.int32), torch.empty(len(logits), dtype=torch.bool)
        temperature, top_k, top_p, min_p, seed, position = (field.contiguous() for field in rows)
        self._sampling.sample(
            DTYPES[logits.dtype], *_shape(logits), temperature.data_ptr(), top_k.data_ptr(), top_p.data_ptr(),
            min_p.data_ptr(), seed.data_ptr(), position.data_ptr(), tokens.data_ptr(), broken.data_ptr(),
        )  # fmt: skip
        return tokens, broken

    def verify(self, tokens: torch.Tensor, drafts: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        """How many tokens each row gives: int32 [R]. With numpy: of so few numbers torch's own calls are the cost."""
        first = start.numpy()[:-1]
        wrong = (tokens.numpy() != drafts.numpy()).nonzero()[0]  # each row's last position at least: it has no draft
        return torch.from_numpy((wrong[wrong.searchsorted(first)] - first + 1).astype(np.int32))

    def logprobs(
        self, logits: torch.Tensor, tokens: torch.Tensor, k: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log probabilities, ranks and the k most likely, lower ids first among equals."""
        logits, tokens = _float(logits), tokens.long().contiguous()
        count = len(logits)
        chosen, rank = torch.empty(count), torch.empty(count, dtype=torch.int32)
        ids, values = torch.empty(count, k, dtype=torch.int32), torch.empty(count, k)
        self._sampling.logprobs(
            *_shape(logits), tokens.data_ptr(), k, chosen.data_ptr(), rank.data_ptr(), ids.data_ptr(),
            values.data_ptr(),
        )  # fmt: skip
        return chosen, rank, ids, values

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
        """Apply penalties to `logits[rows]` in place."""
        wide = _float(logits)
        rows, tokens = rows.contiguous(), tokens if tokens.stride(-1) == 1 else tokens.contiguous()
        counts = [x.int().contiguous() for x in (num_prompt, num_tokens)]
        factors = [x.float().contiguous() for x in (presence, frequency, repetition)]
        self._sampling.penalties(
            *_shape(wide), rows.data_ptr(), len(rows), tokens.data_ptr(), tokens.stride(0),
            *(x.data_ptr() for x in counts), *(x.data_ptr() for x in factors),
        )  # fmt: skip
        if wide is not logits:
            logits.copy_(wide)

    def apply_bitmask(self, logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
        """Set logits to -inf in place where a bit is 0."""
        wide, rows = _float(logits), rows.contiguous()
        bits = bits if bits.stride(-1) == 1 else bits.contiguous()
        self._sampling.apply_bitmask(*_shape(wide), rows.data_ptr(), len(rows), bits.data_ptr(), bits.stride(0))
        if wide is not logits:
            logits.copy_(wide)


def _float(logits: torch.Tensor) -> torch.Tensor:
    """float32, dense in a row: the tensor itself where it is that already."""
    logits = logits.float()
    return logits if logits.stride(-1) == 1 else logits.contiguous()


def _shape(logits: torch.Tensor) -> tuple[int, int, int, int]:
    return logits.data_ptr(), logits.stride(0), logits.shape[0], logits.shape[1]
