"""What a model is, in facts that need no torch: enough to choose drivers, size the cache and serve requests."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from engine.types.params import SamplingDefaults
from engine.types.pooling import PoolerConfig

KVKind = Literal["full", "sliding", "mla", "state", "cross", "encoder"]
"""The kinds of KV cache.

- `full`: keys and values of every token.
- `sliding`: of the last `sliding_window` tokens.
- `mla`: one latent vector of every token, from which keys and values are made (latent attention, DeepSeek-V2).
- `state`: one state of fixed size after the last token (Mamba, linear attention).
- `cross`: keys and values of every token of the encoder, which the decoder's tokens all see (Bart, Whisper). They lie
  beside the pool: who wants them again has the same input to the encoder, not the same prefix.
- `encoder`: nothing. Each token of a prompt sees all others, so the prompt is computed whole in one step.
"""


class StateTensor(msgspec.Struct, frozen=True, kw_only=True):
    """One of the tensors that a layer of kind "state" keeps for each sequence.

    Args:
        name: among the layer's states, e.g. "conv" or "ssm".
        shape: of the whole model, before it is divided over ranks.
        dtype: e.g. "float32"; "model": that in which the model computes; "wide": the same, but float32 at least.
        divided_dim: which dimension is divided over ranks; None: every rank has all of it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    divided_dim: int | None = None


class KVSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One cache of one layer, and the attention that reads it.

    Args:
        kind: see `KVKind`.
        num_kv_heads: of the whole model, before it is divided over ranks; 1 for "mla", whose vector every rank holds,
            and 0 for "state".
        head_size: elements of one head; of the vector for "mla", 0 for "state".
        sliding_window: tokens that a query sees, itself included; of kind "encoder" as many to each side. None but
            for "sliding", and for layers of "encoder" that have one.
        rope_size: of the vector of "mla", its last elements, which are the part of all heads' keys that has rotary
            positions; the others are the latent. 0 but for "mla".
        layer: of its model; None: its place among the description's `kv_specs`. A layer may have two.
        model: 0 for the model itself, 1 and more for draft models.
        num_q_heads: of the whole model; 0: the description's.
        soft_cap: of attention logits; None: the description's.
        states: what a layer of kind "state" keeps; empty but for it.
        divided: its heads over the ranks; False where every rank has all of them.
    """

    kind: KVKind
    num_kv_heads: int
    head_size: int
    sliding_window: int | None = None
    rope_size: int = 0
    layer: int | None = None
    model: int = 0
    num_q_heads: int = 0
    soft_cap: float | None = None
    states: tuple[StateTensor, ...] = ()
    divided: bool = True


class EncoderForm(msgspec.Struct, frozen=True, kw_only=True):
    """What the encoder of an encoder-decoder model reads; `engine.types.request.EncoderInput` is one such input.

    Args:
        max_tokens: that it makes of the longest input.
        features: of each step of an input; 0: its steps are token ids.
        stride: steps of an input for each of its tokens.
        decoder_prompt: the ids that the decoder begins with where a request says nothing else.
    """

    max_tokens: int
    features: int = 0
    stride: int = 1
    decoder_prompt: tuple[int, ...] = ()


class ModelDescription(msgspec.Struct, frozen=True, kw_only=True):
    """What `config.json` says about a model, in one form for every architecture.

    Args:
        architecture: config.json's string, e.g. "LlamaForCausalLM".
        dtype: of the weights as stored, e.g. "bfloat16"; "float32" where the config is silent.
        vocab_size: rows of the embedding.
        hidden_size: elements of one token's hidden state.
        num_layers: decoder layers.
        num_q_heads: query heads of the whole model, where a layer's spec does not say.
        max_model_len: positions that the model was made for (rope scaling counted in).
        kv_specs: one for each cache of a layer, in the layers' order; most have one.
        soft_cap: attention logits are squashed to +-soft_cap by tanh; None for none. Where a layer's spec says another,
            that holds.
        attention_features: what else its layers ask of attention: "sinks", "alibi", "relative_bias".
        eos_token_ids: from generation_config.json, else config.json.
        bos_token_id: None where there is none.
        config: config.json itself, for the model's body.
        generates: it has logits over the vocabulary, and is to write text; False: its hidden states are pooled.
        pooler: how, where requests do not say.
        num_token_types: of token type embeddings; 0: it has none.
        encoder: of an encoder-decoder model, whose encoder's layers are counted behind the decoder's; else None.
        prompt_embeds: whether prompts may bring embeddings in place of tokens, as the settings say.
        sampling: of requests that do not say how; filled in by the launcher, from generation_config.json and settings.
    """

    architecture: str
    dtype: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_q_heads: int
    max_model_len: int
    kv_specs: tuple[KVSpec, ...]
    soft_cap: float | None = None
    attention_features: tuple[str, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    config: dict[str, Any] = msgspec.field(default_factory=dict)
    generates: bool = True
    pooler: PoolerConfig = msgspec.field(default_factory=PoolerConfig)
    num_token_types: int = 0
    encoder: EncoderForm | None = None
    prompt_embeds: bool = False
    sampling: SamplingDefaults = msgspec.field(default_factory=SamplingDefaults)

    @property
    def sites(self) -> tuple[KVSpec, ...]:
        """`kv_specs` with what they leave to the description: the layer, query heads and soft cap of each."""
        return tuple(
            msgspec.structs.replace(
                spec,
                layer=place if spec.layer is None else spec.layer,
                num_q_heads=0 if spec.kind == "state" else spec.num_q_heads or self.num_q_heads,
                soft_cap=self.soft_cap if spec.soft_cap is None else spec.soft_cap,
            )
            for place, spec in enumerate(self.kv_specs)
        )

    def computed_in(self, dtype: str) -> ModelDescription:
        """With the dtypes of states, where those depend on the one in which the model computes."""
        named, replace = {"model": dtype, "wide": dtype if dtype == "float64" else "float32"}, msgspec.structs.replace
        own = [[replace(one, dtype=named.get(one.dtype, one.dtype)) for one in spec.states] for spec in self.kv_specs]
        specs = zip(self.kv_specs, own, strict=True)
        return replace(self, kv_specs=tuple(replace(spec, states=tuple(states)) for spec, states in specs))

    @property
    def whole_prompts(self) -> bool:
        """A prompt must be computed in one step: some layers let each token see those after it."""
        return self.encoder is None and any(spec.kind == "encoder" for spec in self.kv_specs)


class CheckpointFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Where a checkpoint's parts lie, as a checkpoint card's `resolve` found them.

    Args:
        name: what the user asked for.
        folder: holds config.json and the tokenizer's files; or a file that is all of them.
        weights: files with tensors, in the order to read.
        config: config.json, decoded.
        generation_config: generation_config.json, decoded; empty where there is none.
    """

    name: str
    folder: str
    weights: tuple[str, ...]
    config: dict[str, Any]
    generation_config: dict[str, Any] = msgspec.field(default_factory=dict)
