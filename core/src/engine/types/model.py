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
- `cross`: keys and values of every token of the encoder, which the decoder's tokens all see (Bart, Whisper).
- `encoder`: nothing. Each token of a prompt sees all others, so the prompt is computed whole in one step.
"""


class KVSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The cache that one layer needs.

    Args:
        kind: see `KVKind`.
        num_kv_heads: of the whole model, before it is divided over ranks; 1 for "mla", whose vector every rank holds,
            and 0 for "state".
        head_size: elements of one head; of the vector for "mla", 0 for "state".
        rope_size: of the vector of "mla", its last elements, which are the part of all heads' keys that has rotary
            positions; the others are the latent. 0 but for "mla".
        sliding_window: tokens that a query sees, itself included; None but for "sliding".
        state_bytes: of one layer's state of the whole model, before it is divided over ranks; 0 but for "state".
        draft: a layer of a draft model: it is in a group of its own, beside the target's of the same form.
    """

    kind: KVKind
    num_kv_heads: int
    head_size: int
    sliding_window: int | None = None
    state_bytes: int = 0
    draft: bool = False
    rope_size: int = 0


class ModelDescription(msgspec.Struct, frozen=True, kw_only=True):
    """What `config.json` says about a model, in one form for every architecture.

    Args:
        architecture: config.json's string, e.g. "LlamaForCausalLM".
        dtype: of the weights as stored, e.g. "bfloat16"; "float32" where the config is silent.
        vocab_size: rows of the embedding.
        hidden_size: elements of one token's hidden state.
        num_layers: decoder layers; equals `len(kv_specs)`.
        num_q_heads: query heads of the whole model.
        max_model_len: positions that the model was made for (rope scaling counted in).
        kv_specs: one a layer, in order.
        soft_cap: attention logits are squashed to +-soft_cap by tanh; None for none.
        attention_features: what else its layers ask of attention: "sinks", "alibi".
        eos_token_ids: from generation_config.json, else config.json.
        bos_token_id: None where there is none.
        config: config.json itself, for the model's body.
        generates: it has logits over the vocabulary, and is to write text; False: its hidden states are pooled.
        pooler: how, where requests do not say.
        num_token_types: of token type embeddings; 0: it has none.
        max_encoder_len: tokens of the longest encoder input; 0 for a model without "cross" layers.
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
    max_encoder_len: int = 0
    sampling: SamplingDefaults = msgspec.field(default_factory=SamplingDefaults)

    @property
    def whole_prompts(self) -> bool:
        """A prompt must be computed in one step: some layers let each token see those after it."""
        return any(spec.kind == "encoder" for spec in self.kv_specs)


class CheckpointFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Where a checkpoint's parts lie, as a checkpoint card's `resolve` found them.

    Args:
        name: what the user asked for.
        folder: holds config.json and the tokenizer's files.
        weights: files with tensors, in the order to read.
        config: config.json, decoded.
        generation_config: generation_config.json, decoded; empty where there is none.
    """

    name: str
    folder: str
    weights: tuple[str, ...]
    config: dict[str, Any]
    generation_config: dict[str, Any] = msgspec.field(default_factory=dict)
