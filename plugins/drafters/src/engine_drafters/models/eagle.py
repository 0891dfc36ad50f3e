"""EAGLE's heads: one decoder layer that goes on with the target's features.

At each position the layer reads the target's feature there and the token that follows, and what it makes is a feature
of the next position: the first draft is drawn from it, and the head goes on with the draft and with that feature.

- EAGLE, EAGLE-2 (Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty", ICML 2024;
  "EAGLE-2", EMNLP 2024). The feature is the target's final, normed hidden state, fc([embedding; feature]) enters a
  Llama layer without its first norm, and the target's head gives logits of what leaves it.
- EAGLE-3 (Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test",
  2025). The first feature is fc([streams of some layers]), attention reads [norm(embedding); norm(feature)], and logits
  come from a norm and a head of its own, of the tokens that it may draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from engine.interfaces.model import LayerIterator, ModelContext, State
from engine.modeling import (
    Attention,
    Embedding,
    GatedMLP,
    Linear,
    LMHead,
    ModelBody,
    Module,
    Param,
    RMSNorm,
)
from engine.types.errors import CheckpointError, UnsupportedModelError
from engine_drafters.layouts import TENSORS, num_streams
from engine_kit.model_config import flag, integer, number, read_rope
from engine_kit.rotary import make_rotary


class EagleModel(ModelBody):
    """LlamaForCausalLMEagle: the target's embedding and head, fc, and one layer."""

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        model, config = context.description, context.description.config
        self._ops = context.ops
        self.embed = DraftEmbedding(context, "embed_tokens")
        self.fc = Linear(
            context, 2 * model.hidden_size, [model.hidden_size], ["fc"], "fc.bias" in config.get(TENSORS, ())
        )
        self.layers = [EagleLayer(context, "layers.0", model.hidden_size)]

    def forward(self, state: State, walk: LayerIterator) -> torch.Tensor:
        """What follows the features: [T, hidden_size].

        state: beside `token_ids`, the tokens that follow, and `positions`, those of the features, it has `features`
        [T, hidden_size], which are not changed.
        """
        embedded = self.embed(state["token_ids"])
        state["hidden"] = self.fc(torch.cat((embedded, state["features"]), dim=-1))
        for layer in walk(self.layers, state):
            layer(state)
        return self._ops.add(state["hidden"], state["residual"])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's: hidden [R, hidden_size] -> [R, vocab_size]."""
        return target_of(self.context).logits(hidden)


class EagleLayer(Module):
    """attention, norm, feed-forward; the residual is what enters."""

    def __init__(self, context: ModelContext, name: str, in_size: int) -> None:
        model, config = context.description, context.description.config
        eps, spec, stored = number(config, "rms_norm_eps", 1e-6), model.kv_specs[0], config.get(TENSORS, ())
        norms = None
        if f"{name}.self_attn.q_norm.weight" in stored:
            norms = tuple(RMSNorm(context, spec.head_size, eps, f"{name}.self_attn.{part}_norm") for part in "qk")
        self.attention = Attention(
            context,
            0,
            hidden_size=model.hidden_size,
            num_q_heads=model.num_q_heads,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            rotary=make_rotary(context, read_rope(config, spec.head_size)),
            name=f"{name}.self_attn",
            in_size=in_size,
            qkv_bias=f"{name}.self_attn.q_proj.bias" in stored,
            o_bias=f"{name}.self_attn.o_proj.bias" in stored,
            norms=norms,
        )
        self.mlp_norm = RMSNorm(context, model.hidden_size, eps, f"{name}.post_attention_layernorm")
        inner = integer(config, "intermediate_size")
        self.mlp = GatedMLP(context, model.hidden_size, inner, f"{name}.mlp", f"{name}.mlp.gate_proj.bias" in stored)

    def __call__(self, state: State) -> None:
        """Change `hidden`, and leave `residual`, [T, hidden_size]."""
        self.follow(state, state["hidden"], state["hidden"])

    def follow(self, state: State, attended: torch.Tensor, residual: torch.Tensor) -> None:
        """The layer, of what attention reads [T, in_size] and of the residual [T, hidden_size]."""
        hidden = self.attention(attended, state["positions"])
        hidden, state["residual"] = self.mlp_norm.add(hidden, residual)
        state["hidden"] = self.mlp(hidden)


class Eagle3Model(ModelBody):
    """LlamaForCausalLMEagle3: fc over the target's streams, one wide layer, a norm and a head."""

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        model, config = context.description, context.description.config
        stored, eps = config.get(TENSORS, ()), number(config, "rms_norm_eps", 1e-6)
        self._ops = context.ops
        wide = num_streams(config) * integer(config, "target_hidden_size", model.hidden_size)
        self.embed = DraftEmbedding(context, "embed_tokens")
        self.streams_norm = RMSNorm(context, wide, eps, "input_norm") if flag(config, "norm_before_fc", False) else None
        self.stream_norms: list[RMSNorm] = []
        if flag(config, "fc_norm", False):
            count = num_streams(config)
            self.stream_norms = [RMSNorm(context, wide // count, eps, f"fc_norm.{index}") for index in range(count)]
        self.fc = Linear(context, wide, [model.hidden_size], ["fc"], "fc.bias" in stored)
        self.layers = [Eagle3Layer(context, "layers.0")]
        self.norm = RMSNorm(context, model.hidden_size, eps, "norm")
        self._goes_on_normed = flag(config, "norm_output", False)
        self.vocabulary = DraftVocabulary(context, integer(config, "draft_vocab_size", model.vocab_size))
        self.head = None
        if "lm_head.weight" in stored:
            self.head = LMHead(context, self.vocabulary.size, model.hidden_size, "lm_head")

    def fuse(self, streams: Sequence[torch.Tensor]) -> torch.Tensor:
        """The features [T, hidden_size] of the target's streams, [T, its hidden_size] each."""
        if self.stream_norms:
            streams = [norm(stream) for norm, stream in zip(self.stream_norms, streams, strict=True)]
        joined = torch.cat(list(streams), dim=-1)
        return self.fc(joined if self.streams_norm is None else self.streams_norm(joined))

    def forward(self, state: State, walk: LayerIterator) -> torch.Tensor:
        """As `EagleModel.forward`, of features that `fuse` or this has made. What it gives is what the head goes on
        with: it is not normed, but where the config says so (`norm_output`, EAGLE-3.1)."""
        state["hidden"] = self.embed(state["token_ids"])
        for layer in walk(self.layers, state):
            layer(state)
        hidden = self._ops.add(state["hidden"], state["residual"])
        return self.norm(hidden) if self._goes_on_normed else hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, hidden_size] -> [R, vocab_size]; -inf for tokens that it cannot draft."""
        normed = hidden if self._goes_on_normed else self.norm(hidden)
        return self.vocabulary(self.head(normed)) if self.head is not None else target_of(self.context).logits(normed)


class Eagle3Layer(EagleLayer):
    """Attention over embedding and feature, both normed; the residual is the feature."""

    def __init__(self, context: ModelContext, name: str) -> None:
        model, config = context.description, context.description.config
        super().__init__(context, name, 2 * model.hidden_size)
        self._ops = context.ops
        eps = number(config, "rms_norm_eps", 1e-6)
        self.embed_norm = RMSNorm(context, model.hidden_size, eps, f"{name}.input_layernorm")
        self.feature_norm = RMSNorm(context, model.hidden_size, eps, f"{name}.hidden_norm")
        self._norm_before_residual = flag(config, "norm_before_residual", False)

    def __call__(self, state: State) -> None:
        """Change `hidden`, the embedding, and leave `residual`."""
        normed = self.feature_norm(state["features"])
        attended = torch.cat((self.embed_norm(state["hidden"]), normed), dim=-1)
        residual = normed if self._norm_before_residual else self._ops.scale(state["features"], 1.0)  # a new tensor
        self.follow(state, attended, residual)


class DraftEmbedding(Embedding):
    """The target's embedding, or the head's own: where its file has one that differs."""

    def __init__(self, context: ModelContext, name: str) -> None:
        model = context.description
        super().__init__(context, model.vocab_size, model.hidden_size, name)
        self._context = context
        self._is_own = f"{name}.weight" in model.config.get(TENSORS, ())
        if self._shared is None and not self._is_own:
            raise UnsupportedModelError(
                f"draft with {model.architecture}",
                "it takes the target's embedding, and the target's body has no attribute `embed`",
                "name another drafter",
            )

    @property
    def _shared(self) -> Embedding | None:
        """The target's. (As an attribute of this module it would be a part of the head.)"""
        return getattr(target_of(self._context), "embed", None) if "embed" in self._context.shares else None

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """ids int [T] -> [T, hidden_size]."""
        if self._is_own:
            return super().__call__(ids)
        shared = self._shared
        assert shared is not None
        return shared(ids)

    def params(self) -> list[Param]:
        """None, where it has none of its own."""
        return super().params() if self._is_own else []

    def num_elements(self) -> int:
        """As `params`."""
        return super().num_elements() if self._is_own else 0

    def finish(self) -> None:
        """Let go of a copy of the target's."""
        if not self._is_own:
            return
        super().finish()
        own, theirs = self.weight, None if self._shared is None else self._shared.weight
        if own is not None and theirs is not None and torch.equal(own, theirs):
            self._is_own = False
            self._packed = None


class DraftVocabulary(Module):
    """The tokens that a head drafts, among the target's.

    Args:
        size: how many they are. Fewer than the target's are named by the tensor `d2t`, int64 [size]: draft token i is
            the target's i + d2t[i]. (`t2d`, which of the target's they are, says nothing more.)
    """

    def __init__(self, context: ModelContext, size: int) -> None:
        self.size = size
        self._total = context.description.vocab_size
        self._is_mapped = "d2t" in context.description.config.get(TENSORS, ())
        self._device = context.device
        self._targets: torch.Tensor | None = None

    def params(self) -> list[Param]:
        """`d2t`, where the file has it."""
        return [Param("d2t", (self.size,), self, dtypes=frozenset({"int64", "int32"}))] if self._is_mapped else []

    def tolerated(self) -> frozenset[str]:
        """`t2d`."""
        return frozenset({"t2d"})

    def load(self, param: Param, tensor: torch.Tensor) -> None:
        """Raises CheckpointError where two are one, or one is none of the target's."""
        targets = tensor.long() + torch.arange(self.size)
        if bool((targets < 0).any() or (targets >= self._total).any()) or len(targets.unique()) < self.size:
            raise CheckpointError(
                "map the draft's vocabulary to the target's",
                f"by d2t two of its {self.size} tokens are one, or lie outside of the target's {self._total}",
                "the head's file is broken, or it was made for another target",
            )
        self._targets = targets.to(self._device)

    def num_elements(self) -> int:
        """It is no weight."""
        return 0

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """logits [R, size] -> [R, the target's vocabulary]."""
        if self._targets is None:
            return logits
        spread = logits.new_full((len(logits), self._total), -torch.inf)
        return spread.index_copy_(1, self._targets, logits)


def target_of(context: ModelContext) -> Any:
    """The body of the model that is drafted for, on this rank."""
    if context.target is None:
        raise UnsupportedModelError(
            f"serve {context.description.architecture}", "it drafts for another model", "name it by --drafter.model"
        )
    return context.target
