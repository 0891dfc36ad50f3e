"""transformers' attention function that asks the engine: what its modules compute between projections."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from engine.interfaces.model import ModelContext, PagedAttention
from engine.types.errors import UnsupportedModelError

NAME = "engine"
"""Of the function, among transformers' own."""
ATTRIBUTE = "engine_attention"
"""Of every module of a model: its `Attentions`."""
_IGNORED = frozenset(
    {
        *("position_ids", "cache_position", "past_key_values", "past_key_value", "use_cache", "return_dict"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "position_embeddings", "dropout"),
        *("num_items_in_batch", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
    }
)
"""What modules hand on beside what attention is computed by."""


class Attentions:
    """The attention of all layers of one model, by the module that asks.

    While the model is tried, each module's first call says what it is: its layer, heads, scale, window. That has to be
    what the description says, and the engine's attention of the layer is asked for.

    Args:
        context: the model's.

    Attributes:
        trying: whether calls are such first ones.
        alone: whether each token still sees itself alone, by no attention of the engine: while the model is tried.
    """

    def __init__(self, context: ModelContext) -> None:
        self._context = context
        self._made: dict[nn.Module, PagedAttention] = {}
        self._layers: set[int] = set()
        self.trying = True
        self.alone = True

    def finish(self) -> None:
        """Every layer has asked, and none may again; raises UnsupportedModelError naming those that did not."""
        self.trying = False
        silent = sorted(set(range(self._context.description.num_layers)) - self._layers)
        if silent:
            raise self._refusal(f"layers {', '.join(map(str, silent))} do not ask for attention")

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        **given: Any,
    ) -> torch.Tensor:
        """query [1, Hq, T, D], key and value [1, Hkv, T, D], rotated -> [1, T, Hq, D]."""
        if self.trying:
            self._ask(module, query, key, value, attention_mask, scaling, given)
        if self.alone:
            own = (key + value).repeat_interleave(query.shape[1] // key.shape[1], dim=1)
            return (query + own).transpose(1, 2)
        q, k, v = (part[0].transpose(0, 1).contiguous() for part in (query, key, value))
        return self._made[module](q, k, v).view(1, *q.shape)

    def _ask(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scaling: float | None,
        given: dict[str, Any],
    ) -> None:
        """Get the engine's attention of the layer whose module asks. Raises UnsupportedModelError where it is not what
        the description says, or asks what engine's attention has not."""
        model, size = self._context.description, self._context.tp_size
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int) or layer not in range(model.num_layers) or layer in self._layers:
            raise self._refusal(f"a module {type(module).__name__} asks for the attention of layer {layer!r}")
        site = model.sites[layer]
        causal = given.pop("is_causal", None)
        facts: dict[str, tuple[Any, Any]] = {
            "sequences": (query.shape[0], 1),
            "num_attention_heads on this rank": (query.shape[1], site.num_q_heads // size),
            "num_key_value_heads on this rank": (key.shape[1], site.num_kv_heads // size),
            "head_dim": (query.shape[-1], site.head_size),
            "elements of a value": (value.shape[-1], site.head_size),
            "sliding_window": (given.pop("sliding_window", None), site.sliding_window),
            "soft cap": (given.pop("softcap", None), site.soft_cap),
            "causal": (getattr(module, "is_causal", True) if causal is None else causal, True),
        }
        for name, (found, expected) in facts.items():
            if found != expected:
                raise self._refusal(f"layer {layer} of transformers' model has {name} = {found}, not {expected}")
        further = sorted(name for name, value in given.items() if value is not None and name not in _IGNORED)
        if mask is not None:
            further.append("a mask of its own")
        if further:
            raise self._refusal(f"layer {layer} asks of attention what the engine's has not: {', '.join(further)}")
        self._layers.add(layer)
        scale = site.head_size**-0.5 if scaling is None else float(scaling)
        self._made[module] = self._context.attention(layer, scale)

    def _refusal(self, found: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"compute {self._context.description.architecture} by transformers' modules",
            found,
            "where config.json leaves a key out, write it into it; else install a driver that is made for the model",
        )


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **given: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers: hands the call to the module's `Attentions`."""
    attentions: Attentions = getattr(module, ATTRIBUTE)
    return attentions(module, query, key, value, attention_mask, **given), None


AttentionInterface.register(NAME, attend)
