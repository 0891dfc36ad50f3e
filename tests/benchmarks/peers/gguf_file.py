"""Writes a checkpoint as GGUF in bf16, for llama.cpp. Runs in that peer's interpreter: numpy and `gguf`, no torch.

`python -m tests.benchmarks.peers.gguf_file CHECKPOINT PATH` writes it with its vocabulary, for a server.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
_EXPERTS = {"w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps"}
_OTHERS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    """A tensor's name in GGUF's Llama architecture."""
    stem = name.removesuffix(".weight")
    if stem in _OTHERS:
        return _OTHERS[stem] + ".weight"
    layer, part = stem.removeprefix("model.layers.").split(".", 1)
    if ".experts." in part:
        return f"blk.{layer}.{_EXPERTS[part.rpartition('.')[2]]}.weight"
    return f"blk.{layer}.{_LAYER[part]}.weight"


def rotary_order(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection as llama.cpp's Llama rotates them: the two halves of a head interleaved.

    Args:
        weight: [heads * head_size, hidden].
    """
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, 2, half, -1).swapaxes(1, 2).reshape(weight.shape)


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a bf16 file as their bits (uint16)."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header: dict[str, Any] = json.loads(raw[8 : 8 + size])
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] != "BF16":
            raise ValueError(f"{path}: {name} is {entry['dtype']}, not BF16")
        begin, end = entry["data_offsets"]
        bits = np.frombuffer(raw, np.uint16, (end - begin) // 2, 8 + size + begin)
        tensors[name] = bits.reshape(entry["shape"])
    return tensors


def together(tensors: dict[str, np.ndarray], experts: int) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors, those of a layer's experts [E, out, in] under the name of the first one."""
    for name, bits in tensors.items():
        before, dot, after = name.partition(".experts.")
        if not dot:
            yield name, bits
        elif after.startswith("0."):
            part = after.removeprefix("0.")
            yield name, np.stack([tensors[f"{before}.experts.{expert}.{part}"] for expert in range(experts)])


def add_vocabulary(writer: Any, checkpoint: Path) -> None:
    """The tokens and merges of `tokenizer.py`'s byte-level BPE, which splits text as GPT-2's does."""
    import gguf  # type: ignore[import-not-found, unused-ignore]

    said = json.loads((checkpoint / "tokenizer.json").read_text())
    ids: dict[str, int] = said["model"]["vocab"]
    special = {entry["content"] for entry in said["added_tokens"]}
    tokens = sorted(ids, key=lambda token: ids[token])
    types = gguf.TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([types.CONTROL if token in special else types.NORMAL for token in tokens])
    writer.add_token_merges(said["model"]["merges"])
    writer.add_bos_token_id(ids["<s>"])
    writer.add_eos_token_id(ids["</s>"])
    writer.add_unk_token_id(ids["<unk>"])
    writer.add_add_bos_token(False)


def write_gguf(checkpoint: Path, path: Path, vocabulary: bool = False) -> None:
    """Write all of the model: norms and routers in float32, all else in bf16. vocabulary: with it; where token ids are
    passed, none is needed."""
    import gguf  # type: ignore[import-not-found, unused-ignore]

    config = json.loads((checkpoint / "config.json").read_text())
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name(checkpoint.name)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if experts := config.get("num_local_experts", 0):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    if vocabulary:
        add_vocabulary(writer, checkpoint)
    else:
        writer.add_tokenizer_model("no_vocab")
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, bits in together(read_safetensors(checkpoint / "model.safetensors"), experts):
        for part, count in heads.items():
            if f".{part}." in name:
                bits = rotary_order(bits, count)
        if bits.ndim == 1 or "ffn_gate_inp" in gguf_name(name):
            writer.add_tensor(gguf_name(name), (bits.astype(np.uint32) << 16).view(np.float32))
        else:
            octets = np.ascontiguousarray(bits).view(np.uint8)
            writer.add_tensor(gguf_name(name), octets, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    write_gguf(Path(sys.argv[1]), Path(sys.argv[2]), vocabulary=True)
