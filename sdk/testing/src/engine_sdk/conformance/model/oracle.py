"""transformers' class of an architecture, where there is one, as an oracle beside the self-consistency of a model."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from engine_sdk.conformance.model.example import Shapes

TOLERANCE = 2e-5
"""transformers computes norms and rotary tables in float32, whatever the model's dtype."""


class Oracle:
    """transformers' model with the same config.

    Args:
        architecture: the name of transformers' class.
        config: config.json.

    Attributes:
        shapes: the tensors of a checkpoint, shared ones once.
    """

    def __init__(self, architecture: str, config: dict[str, Any]) -> None:
        kind = getattr(importlib.import_module("transformers"), architecture)
        made = kind.config_class(**{key: value for key, value in config.items() if key != "architectures"})
        made._attn_implementation = "eager"
        self._model = kind(made).double().eval()
        self.shapes: Shapes = {name: tuple(tensor.shape) for name, tensor in self._model.named_parameters()}

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take a checkpoint's tensors."""
        parameters = dict(self._model.named_parameters())
        with torch.no_grad():
            for name, tensor in weights:
                parameters[name].copy_(tensor)

    @torch.no_grad()
    def __call__(self, ids: Sequence[int], token_types: Sequence[int] | None = None) -> torch.Tensor:
        """Of one prompt: logits [T, vocab_size]; [1, num_labels] of a classifier; else hidden states [T, H]."""
        inputs = {"input_ids": torch.tensor([list(ids)]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
        if token_types is not None:
            inputs["token_type_ids"] = torch.tensor([list(token_types)])
        found = self._model(**inputs)
        answer: torch.Tensor = found.logits if hasattr(found, "logits") else found.last_hidden_state[0]
        return answer[0] if answer.dim() == 3 else answer


def why_none(architecture: str) -> str:
    """Why there is no oracle for this architecture; "" where there is one."""
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed, whose class of this architecture is the oracle"
    if not hasattr(importlib.import_module("transformers"), architecture):
        return f"transformers has no class {architecture!r}: name one that computes the same, transformers_class = ..."
    return ""
