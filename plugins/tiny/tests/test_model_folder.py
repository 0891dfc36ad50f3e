"""What ships: complete, small, bf16, and under Hugging Face's names."""

import json
import math
import struct

from engine_tiny import model_folder
from engine_tiny.layout import MAX_POSITIONS, TOKEN_IDS

MEGABYTE = 1 << 20


def header() -> dict:
    with open(model_folder() / "model.safetensors", "rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        return {name: entry for name, entry in json.loads(file.read(size)).items() if name != "__metadata__"}


def test_complete():
    names = {path.name for path in model_folder().iterdir()}
    assert names >= {
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
        "model.safetensors",
    }  # fmt: skip


def test_small():
    assert sum(path.stat().st_size for path in model_folder().iterdir()) <= 16 * MEGABYTE
    assert sum(math.prod(entry["shape"]) for entry in header().values()) <= 8_000_000
    assert {entry["dtype"] for entry in header().values()} == {"BF16"}


def test_config_agrees_with_the_weights():
    config = json.loads((model_folder() / "config.json").read_text())
    tensors = header()
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["max_position_embeddings"] == MAX_POSITIONS
    assert tensors["model.embed_tokens.weight"]["shape"] == [config["vocab_size"], config["hidden_size"]]
    assert config["tie_word_embeddings"] and "lm_head.weight" not in tensors
    layers = {name.split(".")[2] for name in tensors if name.startswith("model.layers.")}
    assert len(layers) == config["num_hidden_layers"]
    stops = json.loads((model_folder() / "generation_config.json").read_text())["eos_token_id"]
    assert stops == [TOKEN_IDS["<|im_end|>"], TOKEN_IDS["<|eos|>"]]
