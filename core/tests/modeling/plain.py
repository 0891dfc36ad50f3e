"""The plainest ops and attention for one sequence: enough to run a model without the runner."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from engine.interfaces.model import ModelContext, PagedAttention, PagedLatentAttention, State
from engine.types.model import ModelDescription
from engine_kit.dispatch_guard import DispatchGuard
from engine_kit.safetensors_files import read_safetensors
from engine_models import deepseek_card
from engine_reference.checkpoint_safetensors import SafetensorsCheckpoint
from engine_reference.models import llama_card as cards

LLAMA_FAMILY = {
    "LlamaForCausalLM": cards.Llama,
    "MistralForCausalLM": cards.Mistral,
    "Qwen2ForCausalLM": cards.Qwen2,
    "Qwen3ForCausalLM": cards.Qwen3,
}
CARDS = {
    **LLAMA_FAMILY,
    "DeepseekV2ForCausalLM": deepseek_card.DeepseekV2,
    "DeepseekV3ForCausalLM": deepseek_card.DeepseekV3,
}


class PlainOps:
    """What a model needs of `Ops`, as its docstrings define it."""

    def embedding(self, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return weight[ids.long()]

    def embedding_part(self, ids: torch.Tensor, weight: torch.Tensor, first: int) -> torch.Tensor:
        index = ids.long() - first
        here = (index >= 0) & (index < len(weight))
        return weight[index.clamp(0, len(weight) - 1)] * here[:, None]

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = residual.add_(x)
        return x.copy_(self.rms_norm(total, weight, eps)), total  # in its inputs' memory, as drivers may

    def rope(
        self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = cos_sin[positions].to(q.dtype)[:, None].chunk(2, dim=-1)
        width = 2 * cos.shape[-1]

        def rotate(x: torch.Tensor) -> torch.Tensor:
            a, b = x[..., :width].chunk(2, dim=-1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin, x[..., width:]), dim=-1)

        return rotate(q), rotate(k)

    def qk_norm_rope(
        self, q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float, *rotary: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.rope(self.rms_norm(q, q_weight, eps), self.rms_norm(k, k_weight, eps), *rotary)

    def add(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + b

    def scale(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        return x * factor

    def soft_cap(self, x: torch.Tensor, cap: float) -> torch.Tensor:
        return cap * torch.tanh(x / cap)

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps) * weight + bias

    def gelu(self, x: torch.Tensor, tanh: bool) -> torch.Tensor:
        return torch.nn.functional.gelu(x, approximate="tanh" if tanh else "none")

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        return weight, bias

    def linear(self, x: torch.Tensor, packed: Any) -> torch.Tensor:
        return torch.nn.functional.linear(x, *packed)

    def linear_heads(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.einsum("thi,hoi->tho", x, weight).contiguous()


class DenseAttention:
    """One layer's attention over everything it has seen: one sequence, whose tokens come in order."""

    def __init__(self, scale: float, window: int | None, soft_cap: float | None) -> None:
        self._scale = scale
        self._window = window
        self._soft_cap = soft_cap
        self._k: torch.Tensor | None = None
        self._v: torch.Tensor | None = None

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self._k = k if self._k is None else torch.cat((self._k, k))
        self._v = v if self._v is None else torch.cat((self._v, v))
        group, new, total = q.shape[1] // k.shape[1], q.shape[0], self._k.shape[0]
        keys, values = (x.repeat_interleave(group, dim=1) for x in (self._k, self._v))
        scores = torch.einsum("qhd,khd->hqk", q, keys) * self._scale
        if self._soft_cap is not None:
            scores = self._soft_cap * torch.tanh(scores / self._soft_cap)
        query, key = torch.arange(total - new, total)[:, None], torch.arange(total)[None]
        seen = key <= query
        if self._window is not None:
            seen &= key > query - self._window
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values).flatten(1)


class DenseLatentAttention:
    """One layer's latent attention over everything it has seen."""

    def __init__(self, scale: float) -> None:
        self._attend = DenseAttention(scale, None, None)

    def __call__(
        self, q_latent: torch.Tensor, q_rope: torch.Tensor, latent: torch.Tensor, rope_key: torch.Tensor
    ) -> torch.Tensor:
        key = torch.cat((latent, rope_key), dim=-1).unsqueeze(1)
        return self._attend(torch.cat((q_latent, q_rope), dim=-1), key, latent.unsqueeze(1)).view(q_latent.shape)


def plain_walk(layers: Iterable[Any], state: State) -> Iterator[Any]:
    """Every layer, one after the other."""
    return iter(layers)


def describe(folder: Path) -> tuple[ModelDescription, tuple[str, ...], Any]:
    """(description, weight files, card) of a checkpoint."""
    files = SafetensorsCheckpoint.resolve(str(folder))
    card = CARDS[str(files.config["architectures"][0])]  # type: ignore[index]
    return card.describe(files.config), files.weights, card


def make_context(
    model: ModelDescription, dtype: torch.dtype = torch.float32, max_model_len: int | None = None, **more: Any
) -> ModelContext:
    """A context over the plain ops and attention."""

    def attention(layer: int, scale: float, **of_heads: Any) -> PagedAttention:
        return DenseAttention(scale, model.kv_specs[layer].sliding_window, model.soft_cap)

    def latent_attention(layer: int, scale: float) -> PagedLatentAttention:
        return DenseLatentAttention(scale)

    fields: dict[str, Any] = {
        "ops": PlainOps(), "attention": attention, "latent_attention": latent_attention, **more,
    }  # fmt: skip
    return ModelContext(
        description=model,
        dtype=dtype,
        device=torch.device("cpu"),
        max_model_len=max_model_len or model.max_model_len,
        **fields,
    )


def body_of(card: Any) -> Any:
    """The card's body class."""
    import importlib

    module, _, name = card.body.partition(":")
    return getattr(importlib.import_module(module), name)


def open_model(folder: Path, dtype: torch.dtype, guard: DispatchGuard | None = None, **more: Any) -> Any:
    """The engine's model of a checkpoint, loaded; for one sequence."""
    description, weights, card = describe(folder)
    context = make_context(description, dtype, **more)
    model = body_of(card)(context if guard is None else guard.context(context))
    model.load_weights(read_safetensors(weights))
    return model


def run(model: Any, ids: list[int], start: int = 0) -> torch.Tensor:
    """The logits [T, V] of the sequence's next tokens, which stand at positions start, start + 1, ..."""
    state = State(
        token_ids=torch.tensor(ids, dtype=torch.int32),
        positions=torch.arange(start, start + len(ids), dtype=torch.int64),
    )
    return model.logits(model.forward(state, plain_walk))
