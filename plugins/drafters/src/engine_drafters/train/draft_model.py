"""A one-layer Llama as the draft model, trained to say what the target says."""

from typing import Any

import torch
import torch.nn.functional as F

from engine_drafters.train.target import Batch, Target

STEPS = 4


class Draft:
    """Trains a `transformers.LlamaForCausalLM`."""

    def __init__(self, target: Target, module: Any) -> None:
        self.module = module
        self._target = target

    def loss(self, batch: Batch) -> torch.Tensor:
        """Cross entropy against the target's distribution. (A text's tokens are all there is to read, so the later
        drafts of one root are the first ones of others.)"""
        wanted = self._target.says(batch, self._target.states(batch.tokens)[1])
        return F.cross_entropy(self._logits(batch), wanted)

    def tokens(self, batch: Batch) -> list[torch.Tensor]:
        """The likeliest draft of each step where there is one: [n] each."""
        best = self._logits(batch).argmax(-1)
        return [best[torch.arange(len(best))[batch.drafted > step] + step] for step in range(STEPS)]

    def _logits(self, batch: Batch) -> torch.Tensor:
        """Of the first draft behind each root: [N, V]."""
        hidden = self.module.model(input_ids=batch.tokens, use_cache=False).last_hidden_state
        logits: torch.Tensor = self.module.lm_head(batch.behind(hidden, 1))
        return logits
