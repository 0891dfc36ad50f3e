"""Random weights and a byte tokenizer, for the days before the trained ones stand in the package.

Everything has the final form (file names, dtype, special tokens, template), so whoever builds on the
bundled model can start now. Needs numpy and tokenizers only: `make install` runs it.
"""

import json
import shutil
import struct
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from engine_tiny import model_folder
from engine_tiny.layout import (
    BOS,
    CONTROL_TOKENS,
    SPECIAL_TOKENS,
    TOKEN_IDS,
    generation_config,
    llama_config,
    tokenizer_config,
)

SEED = 20261121


def byte_tokenizer() -> Tokenizer:
    """Byte-level BPE without merges: the special tokens, then one symbol a byte."""
    vocab = dict(TOKEN_IDS)
    for symbol in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[symbol] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in CONTROL_TOKENS])
    tokenizer.add_tokens(
        [AddedToken(t, special=False, normalized=False) for t in SPECIAL_TOKENS if t not in CONTROL_TOKENS]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, TOKEN_IDS[BOS])]
    )
    return tokenizer


def _bfloat16(array: np.ndarray) -> bytes:
    """numpy has no bfloat16: it is the upper half of a float32 (cut off, not rounded: these are noise)."""
    return (array.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()


def _safetensors(tensors: dict[str, np.ndarray]) -> bytes:
    """The file format by hand: safetensors' own writer for numpy refuses bfloat16."""
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    body = bytearray()
    for name, array in tensors.items():
        start = len(body)
        body += _bfloat16(array)
        offsets = [start, len(body)]
        header[name] = {"dtype": "BF16", "shape": list(array.shape), "data_offsets": offsets}
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    return struct.pack("<Q", len(head)) + head + bytes(body)


def random_tensors(config: dict) -> dict[str, np.ndarray]:
    """Seeded weights under the names Hugging Face gives a Llama with tied embeddings."""
    rng = np.random.default_rng(SEED)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q_size = config["num_attention_heads"] * config["head_dim"]
    kv_size = config["num_key_value_heads"] * config["head_dim"]
    shapes = {
        "self_attn.q_proj": (q_size, hidden),
        "self_attn.k_proj": (kv_size, hidden),
        "self_attn.v_proj": (kv_size, hidden),
        "self_attn.o_proj": (hidden, q_size),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    tensors = {"model.embed_tokens.weight": 0.1 * rng.standard_normal((config["vocab_size"], hidden))}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, shape in shapes.items():
            tensors[f"{prefix}{name}.weight"] = rng.standard_normal(shape) / np.sqrt(shape[1])
        tensors[f"{prefix}input_layernorm.weight"] = np.ones(hidden)
        tensors[f"{prefix}post_attention_layernorm.weight"] = np.ones(hidden)
    tensors["model.norm.weight"] = np.ones(hidden)
    return tensors


def ensure_model(folder: Path) -> None:
    """Fill `folder` with the placeholder model, unless weights are there already."""
    if (folder / "model.safetensors").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_tokenizer()
    config = llama_config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=128,
        layers=2,
        heads=4,
        kv_heads=2,
        intermediate_size=256,
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    files = {
        "config.json": config,
        "generation_config.json": generation_config(),
        "tokenizer_config.json": tokenizer_config(),
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    template = model_folder() / "chat_template.jinja"
    if template.parent != folder.resolve():
        shutil.copyfile(template, folder / template.name)
    # Written last, and moved into place: its presence says that the folder is complete.
    unfinished = folder / "model.safetensors.tmp"
    unfinished.write_bytes(_safetensors(random_tensors(config)))
    unfinished.replace(folder / "model.safetensors")


if __name__ == "__main__":
    ensure_model(model_folder())
    print(model_folder())
