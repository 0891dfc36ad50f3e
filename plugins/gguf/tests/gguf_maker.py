"""Writes tiny models of transformers as GGUF files, with ggml's own package: names, the order of rows and the metadata
as llama.cpp's converter writes them.

What a type rounds is put back into the model, so that it stands for exactly what the file says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Kind

BLOCK_TYPES = (
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS",
)  # fmt: skip
_HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip
"""Where a block has its float16s."""
_ARCHITECTURES = {
    "LlamaForCausalLM": "llama", "MistralForCausalLM": "llama", "MixtralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3", "Qwen3MoeForCausalLM": "qwen3moe",
    "GemmaForCausalLM": "gemma", "Gemma2ForCausalLM": "gemma2", "Gemma3ForCausalLM": "gemma3",
    "Phi3ForCausalLM": "phi3",
}  # fmt: skip
Write = Callable[[gguf.GGUFWriter], None]


def random_blocks(kind: str, rows: int, inputs: int, seed: int = 0, size: float = 0.1) -> np.ndarray:
    """Blocks of random bits, with scales that make weights of about that size: uint8 [rows, bytes]."""
    rng = np.random.default_rng([seed, rows, inputs])
    each, width = gguf.GGML_QUANT_SIZES[Kind[kind]]
    blocks = rng.integers(0, 256, (rows, inputs // each, width), dtype=np.uint8)
    for at in _HALVES[kind]:
        blocks[..., at : at + 2] = np.float16(0.001).reshape(1).view(np.uint8)
    plain = gguf.dequantize(blocks.reshape(rows, -1), Kind[kind])
    scale = 0.001 * size / plain.std() * rng.uniform(0.7, 1.4, (rows, inputs // each))
    for at in _HALVES[kind]:
        blocks[..., at : at + 2] = scale.astype(np.float16)[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def encoded(plain: np.ndarray, kind: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(bytes of a type, what they stand for): the numbers rounded, or random ones where ggml's package cannot round."""
    quant = Kind[kind]
    try:
        data = gguf.quantize(plain, quant)
    except NotImplementedError:
        flat = plain.reshape(-1, plain.shape[-1])
        data = random_blocks(kind, *flat.shape, seed=seed, size=float(plain.std())).reshape(*plain.shape[:-1], -1)
    return data, gguf.dequantize(data.view(np.uint8) if kind == "BF16" else data, quant).reshape(plain.shape)


def neighbours(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of a Llama's rows: its converter's `permute`."""
    shape = weight.shape
    return weight.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def tiny_model(architecture: str, *, hidden: int = 256, layers: int = 2, seed: int = 0, **more: Any) -> Any:
    """A random model whose logits are far enough apart."""
    config = {
        "vocab_size": 272, "hidden_size": hidden, "intermediate_size": 512, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 256,
        "initializer_range": 0.1, "bos_token_id": None, "eos_token_id": 256, "pad_token_id": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "tie_word_embeddings": False,
    }  # fmt: skip
    if architecture == "MixtralForCausalLM":
        config |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    if architecture == "Qwen3MoeForCausalLM":
        config |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True}
    if architecture.startswith(("Gemma2", "Gemma3")):
        config |= {"sliding_window": 8, "query_pre_attn_scalar": 64, "tie_word_embeddings": True}
    if architecture == "GemmaForCausalLM":
        config |= {"tie_word_embeddings": True}
    if architecture == "Gemma3ForCausalLM":
        del config["rope_parameters"]
        config = {**config, "num_hidden_layers": max(layers, 7)}
    named = architecture.removesuffix("ForCausalLM")
    config_class = transformers.Gemma3TextConfig if named == "Gemma3" else getattr(transformers, f"{named}Config")
    torch.manual_seed(seed)
    model = getattr(transformers, architecture)(config_class(**config | more))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.normal_(std=0.2)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
                if named.startswith("Gemma"):
                    parameter.sub_(1.0)
    return model.eval()


def _names(config: Any) -> gguf.TensorNameMap:
    """ggml's own table of names."""
    architecture = _ARCHITECTURES[config.architectures[0]].upper()
    return gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture], config.num_hidden_layers)


def tensors_of(model: Any) -> dict[str, np.ndarray]:
    """The model's matrices and vectors, by llama.cpp's names."""
    config = model.config
    names = _names(config)
    found: dict[str, np.ndarray] = {}
    for name, tensor in model.state_dict().items():
        data = tensor.float().numpy()
        layer = name.split(".")[2] if name.startswith("model.layers.") else ""
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if name.endswith("experts.gate_up_proj"):  # transformers 5: gates, then ups, of all experts
            gate, up = np.split(data, 2, axis=1)
            found[f"blk.{layer}.ffn_gate_exps.weight"] = gate
            found[f"blk.{layer}.ffn_up_exps.weight"] = up
        elif name.endswith("experts.down_proj"):
            found[f"blk.{layer}.ffn_down_exps.weight"] = data
        else:
            stem, _, kind = name.rpartition(".")
            ours = names.get_name(stem)
            assert ours is not None, name
            found[f"{ours}.{kind}"] = data
    return found


def write(
    path: Path,
    model: Any,
    kind: str | Callable[[str], str] = "F32",
    *,
    more: Write | None = None,
    vocabulary: Write | None = None,
    parts: int = 1,
) -> Path:
    """Write a model in a type, or in what `kind` says of each matrix, and put what was rounded back into the model.

    Args:
        more: writes further keys.
        vocabulary: writes the tokenizer's.
        parts: files.
    """
    config = model.config
    config.architectures = [type(model).__name__]
    prefix = _ARCHITECTURES[type(model).__name__]
    writer = gguf.GGUFWriter(
        str(path), prefix, split_max_tensors=0 if parts == 1 else -(-len(tensors_of(model)) // parts)
    )
    _metadata(writer, config)
    if more is not None:
        more(writer)
    if vocabulary is not None:
        vocabulary(writer)
    permuted = prefix == "llama"
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    rounded: dict[str, np.ndarray] = {}
    for seed, (name, plain) in enumerate(tensors_of(model).items()):
        part = name.split(".")[-2]
        offset = 1.0 if prefix.startswith("gemma") and name.endswith("norm.weight") else 0.0
        count = heads.get(part) if permuted else None
        data = neighbours(plain, count) if count else plain + np.float32(offset)
        if plain.ndim == 1 or part == "ffn_gate_inp":
            writer.add_tensor(name, np.ascontiguousarray(data, dtype=np.float32))
            continue
        chosen = kind if isinstance(kind, str) else kind(name)
        stored, meant = encoded(np.ascontiguousarray(data), chosen, seed)
        writer.add_tensor(name, stored, raw_dtype=Kind[chosen])
        rounded[name] = _halves(meant, count) if count else meant
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    _put_back(model, rounded)
    return path if parts == 1 else path.with_name(f"{path.stem}-00001-of-{parts:05}.gguf")


def _halves(weight: np.ndarray, heads: int) -> np.ndarray:
    shape = weight.shape
    return weight.reshape(heads, shape[0] // heads // 2, 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def _put_back(model: Any, rounded: Mapping[str, np.ndarray]) -> None:
    config = model.config
    names = _names(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            layer = name.split(".")[2] if name.startswith("model.layers.") else ""
            if name.endswith("experts.gate_up_proj"):
                both = [rounded[f"blk.{layer}.ffn_{part}_exps.weight"] for part in ("gate", "up")]
                parameter.copy_(torch.from_numpy(np.concatenate(both, axis=1)))
            elif name.endswith("experts.down_proj"):
                parameter.copy_(torch.from_numpy(rounded[f"blk.{layer}.ffn_down_exps.weight"]))
            else:
                stem, _, kind = name.rpartition(".")
                found = rounded.get(f"{names.get_name(stem)}.{kind}")
                if found is not None:
                    parameter.copy_(torch.from_numpy(found))


def _metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    full = rope.get("full_attention", rope)
    writer.add_rope_freq_base(full["rope_theta"])
    writer.add_rope_dimension_count(int(size * full.get("partial_rotary_factor", 1.0)))
    if full["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(full["factor"])
    if full["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(full["factor"])
        writer.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if getattr(config, "attn_logit_softcapping", None):
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if getattr(config, "final_logit_softcapping", None):
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if inner := getattr(config, "moe_intermediate_size", None):
        writer.add_expert_feed_forward_length(inner)
    writer.add_eos_token_id(config.eos_token_id)


def byte_vocabulary(template: str | None = None) -> Write:
    """GPT-2's 256 bytes without merges, an end of sequence, and tokens that no text has."""

    def put(writer: gguf.GGUFWriter) -> None:
        from tokenizers import pre_tokenizers

        tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<eos>", *(f"[PAD{i}]" for i in range(257, 272))]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(tokens)
        writer.add_token_types([1] * 256 + [3] + [5] * 15)
        writer.add_token_merges([])
        if template is not None:
            writer.add_chat_template(template)

    return put


def greedy(
    model: Any, prompts: Sequence[Sequence[int]], count: int, dtype: torch.dtype = torch.float32
) -> list[list[int]]:
    """transformers' greedy tokens."""
    model = model.to(dtype)
    model.generation_config.eos_token_id = None
    found = []
    with torch.no_grad():
        for prompt in prompts:
            ids = torch.tensor([list(prompt)])
            out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count)
            found.append(out[0, len(prompt) :].tolist())
    return found
