"""The models that are compared: dimensions of a Llama or a Mixtral with random weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

BF16_BYTES = 2


@dataclass(frozen=True)
class Dimensions:
    """Sizes of one model, in elements.

    Args:
        name: as it is asked for.
        num_experts: of each layer, which are of the intermediate size; 0: one block, which all tokens use.
        experts_per_token: how many of them a token uses.
        w1_repeats: how often W1's stream is repeated within one measurement: a small model's takes milliseconds.
    """

    name: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    vocab_size: int
    tie_word_embeddings: bool
    rope_theta: float = 10_000.0
    w1_repeats: int = 1
    num_experts: int = 0
    experts_per_token: int = 0

    def config(self) -> dict[str, Any]:
        """What config.json says."""
        own: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
        if self.num_experts:
            own = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "sliding_window": None}
            own |= {"num_local_experts": self.num_experts, "num_experts_per_tok": self.experts_per_token}
        return {
            **own,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_size,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "rope_theta": self.rope_theta,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": self.tie_word_embeddings,
            "initializer_range": 0.02,
            "use_cache": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "torch_dtype": "bfloat16",
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the checkpoint, in the order in which it is drawn."""
        queries, keys = self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, self.hidden_size)}
        for i in range(self.num_layers):
            layer = f"model.layers.{i}."
            found |= {
                layer + "input_layernorm.weight": (self.hidden_size,),
                layer + "self_attn.q_proj.weight": (queries, self.hidden_size),
                layer + "self_attn.k_proj.weight": (keys, self.hidden_size),
                layer + "self_attn.v_proj.weight": (keys, self.hidden_size),
                layer + "self_attn.o_proj.weight": (self.hidden_size, queries),
                layer + "post_attention_layernorm.weight": (self.hidden_size,),
            }
            up, down = (self.intermediate_size, self.hidden_size), (self.hidden_size, self.intermediate_size)
            if not self.num_experts:
                parts = {"gate": up, "up": up, "down": down}
                found |= {f"{layer}mlp.{part}_proj.weight": shape for part, shape in parts.items()}
                continue
            found[layer + "block_sparse_moe.gate.weight"] = (self.num_experts, self.hidden_size)
            for expert in range(self.num_experts):
                of = f"{layer}block_sparse_moe.experts.{expert}."
                found |= {f"{of}{part}.weight": shape for part, shape in (("w1", up), ("w3", up), ("w2", down))}
        found["model.norm.weight"] = (self.hidden_size,)
        if not self.tie_word_embeddings:
            found["lm_head.weight"] = (self.vocab_size, self.hidden_size)
        return found

    def num_parameters(self) -> int:
        """Elements of all tensors."""
        total = 0
        for shape in self.shapes().values():
            count = 1
            for size in shape:
                count *= size
            total += count
        return total

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of the keys and values of so many tokens, in bf16."""
        return tokens * self.num_layers * 2 * self.num_kv_heads * self.head_size * BF16_BYTES


MODELS = {
    # 10.1 million parameters; a token reads 16 MB, which lie in the last-level cache.
    "10M": Dimensions("10M", 256, 6, 8, 4, 32, 1024, 8192, tie_word_embeddings=False, w1_repeats=5),
    # The sizes of Qwen3-0.6B with a smaller vocabulary: 473 million parameters, 946 MB.
    "0.6B": Dimensions("0.6B", 1024, 28, 16, 8, 128, 3072, 32_000, tie_word_embeddings=True),
    # The sizes of Llama-3.2-1B with a smaller vocabulary: 1,038 million parameters, 2,077 MB.
    # A mixture of 1,066 million parameters, of which a token uses 273 million: two of 16 experts in each layer.
    "1B-A0.3B": Dimensions(
        "1B-A0.3B", 1536, 16, 24, 12, 64, 768, 32_000, tie_word_embeddings=True, num_experts=16, experts_per_token=2
    ),
    "1B": Dimensions("1B", 2048, 16, 32, 8, 64, 8192, 32_000, tie_word_embeddings=True, rope_theta=500_000.0),
}
