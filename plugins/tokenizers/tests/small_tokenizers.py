"""Small tokenizers: sentencepiece models, trained from a few sentences, and tekken.json, written by hand."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

SENTENCES = (
    "Once upon a time there was a little dog.",
    "Hello, world! How are you today?",
    "The capital of France is Paris, a city on the river Seine.",
    "def f(x):\n    return x + 1",
    "Grüße aus Köln",
)
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PAIRS = ("He", "ll", "Hell", "Hello", " w", "or", " wor", "ld", " world", "th", " th", "in", "er", "ü")
"""Of a vocabulary of byte pairs, in the order in which they are made."""
MARKS = (
    *("INST", "/INST", "AVAILABLE_TOOLS", "/AVAILABLE_TOOLS", "TOOL_RESULTS", "/TOOL_RESULTS", "TOOL_CALLS", "IMG"),
    *("PREFIX", "MIDDLE", "SUFFIX", "SYSTEM_PROMPT", "/SYSTEM_PROMPT", "TOOL_CONTENT", "ARGS", "CALL_ID"),
    *("THINK", "/THINK", "MODEL_SETTINGS", "/MODEL_SETTINGS"),
)
"""Of conversations, in brackets."""
TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}"


def train(kind: str = "bpe", **options: Any) -> bytes:
    """A sentencepiece model as Llama's are: nothing is normalised, and what it does not know is bytes."""
    import sentencepiece

    plain = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "byte_fallback": True}
    plain |= {"vocab_size": 340, "hard_vocab_limit": False, "minloglevel": 2}
    writer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 30), model_writer=writer, model_type=kind, **plain | options
    )
    return writer.getvalue()


def write_model(folder: Path, name: str = "tokenizer.model", kind: str = "bpe", **options: Any) -> str:
    """A folder with a model."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(train(kind, **options))
    return str(folder)


def write_config(folder: Path, **config: Any) -> None:
    """A tokenizer_config.json."""
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_tekken(folder: Path, version: str = "v3") -> str:
    """A folder with tekken.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = [*(bytes([byte]) for byte in range(256)), *(pair.encode() for pair in PAIRS)]
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate(tokens)
    ]
    config = {
        "pattern": PATTERN, "num_vocab_tokens": len(tokens), "default_vocab_size": len(tokens) + 40,
        "default_num_special_tokens": 40, "version": version,
    }  # fmt: skip
    file: dict[str, Any] = {"vocab": vocab, "config": config, "version": 1, "type": "Tekken"}
    if version != "v3":
        names = ["<unk>", "<s>", "</s>", *(f"[{name}]" for name in MARKS)]
        file["special_tokens"] = [
            {"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(names)
        ]
    if version == "v15":
        efforts = {"type": "enum", "values": ["none", "high"], "accepts_none": True, "default": "none"}
        file["model_settings_builder"] = {"reasoning_effort": efforts}
    (folder / "tekken.json").write_text(json.dumps(file))
    return str(folder)
