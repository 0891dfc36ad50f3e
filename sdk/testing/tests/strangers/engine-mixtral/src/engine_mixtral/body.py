"""Mixtral's layers: the engine's, but for the experts, for which it has no layer and which are plain torch."""

from __future__ import annotations

import torch

from engine.interfaces.model import ModelContext, State
from engine.modeling import Attention, Decoder, Embedding, LMHead, Module, Param, RMSNorm, Rotary, Stack
from engine.modeling.parallel import even, group_of
from engine_kit.model_config import flag, integer, number, read_rope
from engine_kit.rotary import make_rotary
from engine_mixtral.card import experts


class Experts(Module):
    """Each token goes to some of the experts, whose answers are weighed by the router's probabilities."""

    def __init__(self, context: ModelContext, name: str) -> None:
        model = context.description
        self.total, self.chosen = experts(model.config)
        self._size = model.hidden_size
        self._name = name
        self._group = group_of(context)
        self._inner = even(integer(model.config, "intermediate_size"), context, name)
        self._dtype = context.dtype
        self._device = context.device
        self._tensors: dict[str, torch.Tensor] = {}

    def params(self) -> list[Param]:
        found = [Param(f"{self._name}.gate.weight", (self.total, self._size), self, "gate")]
        wide, part = self._inner.total, self._inner.part
        for expert in range(self.total):
            name = f"{self._name}.experts.{expert}"
            found += [
                Param(f"{name}.w1.weight", (wide, self._size), self, f"{expert}.w1", ((part,),)),
                Param(f"{name}.w2.weight", (self._size, wide), self, f"{expert}.w2", ((slice(None), part),)),
                Param(f"{name}.w3.weight", (wide, self._size), self, f"{expert}.w3", ((part,),)),
            ]
        return found

    def load(self, param: Param, tensor: torch.Tensor) -> None:
        self._tensors[param.key] = torch.empty(param.local_shape, dtype=self._dtype, device=self._device).copy_(tensor)

    def route(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """scores [T, experts] -> weights [T, chosen], which add up to 1, and experts int64 [T, chosen]."""
        wide = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
        weights, which = wide.topk(self.chosen, dim=-1)
        return (weights / weights.sum(dim=-1, keepdim=True)).to(scores.dtype), which

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden_size] -> [T, hidden_size]."""
        weights, which = self.route(torch.nn.functional.linear(x, self._tensors["gate"]))
        out = torch.zeros_like(x)
        for expert in range(self.total):
            tokens, place = torch.where(which == expert)
            w1, w2, w3 = (self._tensors[f"{expert}.{name}"] for name in ("w1", "w2", "w3"))
            mine = x[tokens]
            answer = (torch.nn.functional.silu(mine @ w1.T) * (mine @ w3.T)) @ w2.T
            out.index_add_(0, tokens, answer * weights[tokens, place, None])
        return out if self._group is None else self._group.all_reduce(out)


class MixtralLayer(Module):
    """norm, attention, norm, experts."""

    def __init__(self, context: ModelContext, index: int, rotary: Rotary, eps: float) -> None:
        model, name = context.description, f"model.layers.{index}"
        spec = model.kv_specs[index]
        self.attention_norm = RMSNorm(context, model.hidden_size, eps, f"{name}.input_layernorm")
        self.attention = Attention(
            context,
            index,
            hidden_size=model.hidden_size,
            num_q_heads=model.num_q_heads,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            rotary=rotary,
            name=f"{name}.self_attn",
        )
        self.experts_norm = RMSNorm(context, model.hidden_size, eps, f"{name}.post_attention_layernorm")
        self.experts = Experts(context, f"{name}.block_sparse_moe")

    def __call__(self, state: State) -> None:
        """Change `hidden` and `residual` [T, hidden_size] in the state."""
        hidden, residual = self.attention_norm.add(state["hidden"], state.get("residual"))
        hidden = self.attention(hidden, state["positions"])
        hidden, residual = self.experts_norm.add(hidden, residual)
        state["hidden"], state["residual"] = self.experts(hidden), residual


class Mixtral(Decoder):
    """See `engine.interfaces.model.Model`; `Decoder` walks through the layers and loads the weights."""

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        model = context.description
        eps = number(model.config, "rms_norm_eps", 1e-5)
        rotary = make_rotary(context, read_rope(model.config, model.kv_specs[0].head_size))
        self.embed = Embedding(context, model.vocab_size, model.hidden_size, "model.embed_tokens")
        self.layers = Stack(context, model.num_layers, lambda context, index: MixtralLayer(context, index, rotary, eps))
        self.norm = RMSNorm(context, model.hidden_size, eps, "model.norm")
        tied = self.embed if flag(model.config, "tie_word_embeddings", False) else None
        self.head = LMHead(context, model.vocab_size, model.hidden_size, "lm_head", tied)
