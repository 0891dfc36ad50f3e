"""Encoders of embeddings: GTE (Zhang et al. 2024), Nomic (Nussbaum et al. 2024), JinaBERT (Guenther et al. 2023), and
ModernBERT (Warner et al. 2024).

They are BERT with gated feed-forward blocks, and with rotary positions or ALiBi in place of learned ones: a norm stands
behind the sum of each block's input and output, but before each block in ModernBERT. The tensors have the names of the
published files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import ClassVar

import torch

from engine.interfaces.model import LayerIterator, ModelContext, State
from engine.modeling import Attention, Embedding, GatedMLP, Linear, ModelBody, Module, RowParallelLinear
from engine_kit.encoder_layers import LayerNorm, Table
from engine_kit.model_config import flag, integer, number, read_rope
from engine_kit.rotary import make_rotary
from engine_models.alibi import bloom_slopes, on_this_rank
from engine_models.encoder_card import EncoderCard, Gte, JinaBert, ModernBert, Nomic
from engine_models.layers import PreNormLayer, self_attention


class EncoderEmbeddings(Module):
    """Words (of this name in `embeddings`) and, where there are some, token types, summed and normed."""

    def __init__(self, context: ModelContext, norm: LayerNorm, words: str = "word_embeddings") -> None:
        model = context.description
        self._ops = context.ops
        self.words = Embedding(context, model.vocab_size, model.hidden_size, f"embeddings.{words}")
        count = model.num_token_types
        name = "embeddings.token_type_embeddings"
        self.types = Table(context, count, model.hidden_size, name) if count else None
        self.norm = norm

    def __call__(self, state: State) -> torch.Tensor:
        """[T, hidden_size]."""
        hidden = self.words(state["token_ids"])
        if self.types is not None:
            hidden = self._ops.add(hidden, self.types(state["token_type_ids"]))
        return self.norm(hidden)


class EncoderLayer(Module):
    """Attention, norm, feed-forward, norm; each norm is over the sum of its block's input and output."""

    def __init__(
        self, context: ModelContext, attention: Attention, attention_norm: LayerNorm, mlp: GatedMLP, norm: LayerNorm
    ) -> None:
        self._ops = context.ops
        self.attention = attention
        self.attention_norm = attention_norm
        self.mlp = mlp
        self.norm = norm

    def __call__(self, state: State) -> None:
        """Change `hidden` [T, hidden_size] in the state."""
        add, hidden = self._ops.add, state["hidden"]
        hidden = self.attention_norm(add(self.attention(hidden, state["positions"]), hidden))
        state["hidden"] = self.norm(add(self.mlp(hidden), hidden))


class EncoderModel(ModelBody):
    """An encoder from its parts.

    Attributes:
        prefixes: what stands before the names in checkpoints of some of the model's classes.
        unused: what names of tensors begin with that are no part of an embedding.
    """

    prefixes: ClassVar[tuple[str, ...]] = ()
    unused: ClassVar[tuple[str, ...]] = ("pooler.", "lm_head.", "cls.", "classifier.")

    def __init__(
        self,
        context: ModelContext,
        embeddings: Callable[[State], torch.Tensor],
        layer: Callable[[int], Module],
    ) -> None:
        super().__init__(context)
        self.embeddings = embeddings
        self.layers = [layer(index) for index in range(context.description.num_layers)]

    def forward(self, state: State, walk: LayerIterator) -> torch.Tensor:
        """The last layer's hidden states [T, hidden_size]."""
        if "hidden" not in state:
            state["hidden"] = self.embeddings(state)
        for layer in walk(self.layers, state):
            layer(state)
        return state["hidden"]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """As `ModelBody.load_weights`; the names may have the prefix of the model's class or not."""
        super().load_weights(self._named(weights))

    def _named(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            for prefix in self.prefixes:
                name = name.removeprefix(prefix)
            if not name.startswith(self.unused):
                yield name, tensor


def _sizes(context: ModelContext, card: type[EncoderCard]) -> tuple[int, int, float]:
    """hidden_size, intermediate_size, the norms' eps."""
    config = card.filled(context.description.config)
    return context.description.hidden_size, integer(config, "intermediate_size"), number(config, "layer_norm_eps")


class GteModel(EncoderModel):
    """GteModel and NewModel: rotary positions, GEGLU, a bias in all projections but those that are gated."""

    prefixes = ("new.", "gte.")

    def __init__(self, context: ModelContext) -> None:
        config = Gte.filled(context.description.config)
        size, inner, eps = _sizes(context, Gte)
        rotary = make_rotary(context, read_rope(config, context.description.kv_specs[0].head_size))

        def layer(index: int) -> Module:
            name = f"encoder.layer.{index}"
            attention = self_attention(
                context, index, rotary, f"{name}.attention", parts=("qkv_proj",), qkv_bias=True, o_bias=True
            )
            mlp = GatedMLP(context, size, inner, f"{name}.mlp", act=Gte.act(config), parts=("up_gate_proj",))
            mlp.down = RowParallelLinear(context, inner, size, f"{name}.mlp.down_proj", bias=True)
            norms = [LayerNorm(context, size, eps, f"{name}.{part}") for part in ("attn_ln", "mlp_ln")]
            return EncoderLayer(context, attention, norms[0], mlp, norms[1])

        super().__init__(
            context, EncoderEmbeddings(context, LayerNorm(context, size, eps, "embeddings.LayerNorm")), layer
        )

    def _named(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The rows that are gated stand first in the checkpoint, behind those that gate here."""
        for name, tensor in super()._named(weights):
            if name.endswith(".up_gate_proj.weight") and tensor.ndim:
                tensor = torch.cat(tensor.chunk(2)[::-1])
            yield name, tensor


class GteForClassification(GteModel):
    """GteForSequenceClassification and NewForSequenceClassification: tanh(dense(hidden)), then a linear layer."""

    unused = ("lm_head.",)

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        size, labels = context.description.hidden_size, context.description.pooler.num_labels
        self.pooler = Linear(context, size, [size], ["pooler.dense"], bias=True)
        self.classifier = Linear(context, size, [labels], ["classifier"], bias=True)

    def classify(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, hidden_size], of the first tokens -> [R, num_labels]."""
        return self.classifier(self.context.ops.soft_cap(self.pooler(hidden), 1.0))  # capped at 1: tanh itself


class NomicBertModel(EncoderModel):
    """NomicBertModel: rotary positions, SwiGLU, no biases but the norms'."""

    prefixes = ("nomic_bert.", "bert.")

    def __init__(self, context: ModelContext) -> None:
        config = Nomic.filled(context.description.config)
        size, inner, eps = _sizes(context, Nomic)
        rotary = make_rotary(context, read_rope(config, context.description.kv_specs[0].head_size))

        def layer(index: int) -> Module:
            name = f"encoder.layers.{index}"
            return EncoderLayer(
                context,
                self_attention(context, index, rotary, f"{name}.attn", parts=("Wqkv",), out="out_proj"),
                LayerNorm(context, size, eps, f"{name}.norm1"),
                GatedMLP(context, size, inner, f"{name}.mlp", parts=("fc12", "fc11"), down="fc2"),
                LayerNorm(context, size, eps, f"{name}.norm2"),
            )

        super().__init__(context, EncoderEmbeddings(context, LayerNorm(context, size, eps, "emb_ln")), layer)


class JinaBertModel(EncoderModel):
    """JinaBertForMaskedLM and JinaBertModel: ALiBi, GEGLU, BERT's names but for the feed-forward block."""

    prefixes = ("bert.",)

    def __init__(self, context: ModelContext) -> None:
        config = JinaBert.filled(context.description.config)
        size, inner, eps = _sizes(context, JinaBert)
        slopes = on_this_rank(context, bloom_slopes(context.description.num_q_heads))

        def layer(index: int) -> Module:
            name = f"encoder.layer.{index}"
            attention = self_attention(
                context,
                index,
                None,
                f"{name}.attention",
                parts=("self.query", "self.key", "self.value"),
                out="output.dense",
                qkv_bias=True,
                o_bias=True,
                alibi_slopes=slopes,
            )
            attention_norm = LayerNorm(context, size, eps, f"{name}.attention.output.LayerNorm")
            act = JinaBert.act(config)
            mlp = GatedMLP(context, size, inner, f"{name}.mlp", act=act, parts=("gated_layers",), down="wo")
            mlp.down = RowParallelLinear(context, inner, size, f"{name}.mlp.wo", bias=True)
            return EncoderLayer(
                context, attention, attention_norm, mlp, LayerNorm(context, size, eps, f"{name}.mlp.layernorm")
            )

        super().__init__(
            context, EncoderEmbeddings(context, LayerNorm(context, size, eps, "embeddings.LayerNorm")), layer
        )


class NoNorm(Module):
    """What stands before the first block of ModernBERT, behind the embedding's norm: nothing."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x, as it is."""
        return x

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(x, x), in the first layer, which has no residual yet."""
        assert residual is None
        return x, x


class ModernBertModel(EncoderModel):
    """ModernBertModel: norms before the blocks, GEGLU, windows to both sides with rotary positions of their own."""

    prefixes = ("model.",)
    unused: ClassVar[tuple[str, ...]] = ("head.", "decoder.", "classifier.")

    def __init__(self, context: ModelContext) -> None:
        model = context.description
        config = ModernBert.filled(model.config)
        size, inner, eps = _sizes(context, ModernBert)
        of_all, of_windows = (
            make_rotary(context, read_rope(rope, model.kv_specs[0].head_size)) for rope in ModernBert.ropes(config)
        )
        bias = flag(config, "attention_bias", False)

        def norm(name: str) -> LayerNorm:
            return LayerNorm(context, size, eps, name, bias=flag(config, "norm_bias", False))

        def layer(index: int) -> Module:
            name = f"layers.{index}"
            rotary = of_all if model.kv_specs[index].sliding_window is None else of_windows
            attention = self_attention(
                context, index, rotary, f"{name}.attn", parts=("Wqkv",), out="Wo", qkv_bias=bias, o_bias=bias
            )
            mlp = GatedMLP(
                context,
                size,
                inner,
                f"{name}.mlp",
                bias=flag(config, "mlp_bias", False),
                act=ModernBert.act(config),
                parts=("Wi",),
                down="Wo",
            )
            before = norm(f"{name}.attn_norm") if index else NoNorm()
            return PreNormLayer(context, before, attention, norm(f"{name}.mlp_norm"), mlp)

        super().__init__(context, EncoderEmbeddings(context, norm("embeddings.norm"), "tok_embeddings"), layer)
        self.norm = norm("final_norm")

    def forward(self, state: State, walk: LayerIterator) -> torch.Tensor:
        """The last layer's hidden states, normed, [T, hidden_size]."""
        hidden = super().forward(state, walk)
        return self.norm.add(hidden, state["residual"])[0]


class ModernBertForClassification(ModernBertModel):
    """ModernBertForSequenceClassification and ModernBertForTokenClassification: norm(act(dense(hidden))), then a linear
    layer."""

    unused = ("decoder.",)

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        config = ModernBert.filled(context.description.config)
        size, _, eps = _sizes(context, ModernBert)
        self._tanh = ModernBert.activations[config["classifier_activation"]] == "gelu_tanh"
        self.dense = Linear(context, size, [size], ["head.dense"], bias=flag(config, "classifier_bias", False))
        self.head_norm = LayerNorm(context, size, eps, "head.norm", bias=flag(config, "norm_bias", False))
        self.classifier = Linear(context, size, [context.description.pooler.num_labels], ["classifier"], bias=True)

    def classify(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, hidden_size], pooled, or of single tokens -> [R, num_labels]."""
        return self.classifier(self.head_norm(self.context.ops.gelu(self.dense(hidden), self._tanh)))
