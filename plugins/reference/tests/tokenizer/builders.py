"""Small tokenizers of every family, made on the spot: a vocabulary of bytes, some words, and special tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "Hello, world! The quick brown fox jumps over the lazy dog.",
    "  two  spaces and\ttabs\nand lines ",
    "Grüße aus Köln, naïve café — 你好，世界 😀 👨‍👩‍👧 नमस्ते",
    "def f(x):\n    return x + 1\n",
] * 4
BYTES = [f"<0x{value:02X}>" for value in range(256)]


def byte_level() -> Tokenizer:
    """GPT-2, Llama 3, Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<|bos|>", "<|eos|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool call>", normalized=False)])  # not special, with a blank in it
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", tokenizer.token_to_id("<|bos|>"))]
    )
    return tokenizer


def llama2(strip: bool = True) -> Tokenizer:
    """Sentencepiece-style BPE with byte fallback: Llama 2, Mistral; without the strip: Gemma."""
    words = ["▁Hello", "▁world", "▁", "▁▁", "▁the", "quick", "lo", "He", "ö", "你", "�", "!", ",", "a", "b", "c", "▁a"]
    vocab = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *BYTES, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    steps = [normalizers.Prepend("▁")] if strip else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    last = [decoders.Strip(" ", 1, 0)] if strip else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *last])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def metaspace(scheme: str) -> Tokenizer:
    """Unigram with Metaspace: T5's family."""
    words = ["▁Hello", "▁world", "▁", "▁▁", "▁▁x", "lo", "He", "ö", "你", "a", "b", "!", "▁a"]
    tokenizer = Tokenizer(models.Unigram([("<unk>", -10.0), *[(word, -1.0) for word in words]], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    return tokenizer


def wordpiece() -> Tokenizer:
    """BERT's family: decoded by the library through a window."""
    words = ["[UNK]", "[SEP]", "hello", "world", "##ly", "##ö", "a", "b", "don", "'", "t", ".", ",", "你", "##!"]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[UNK]", "[SEP]"])
    return tokenizer


def regex_bytes() -> Tokenizer:
    """A decoder that is not recognised, with byte fallback in it."""
    tokenizer = llama2(strip=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(Regex("▁"), " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def no_decoder() -> Tokenizer:
    """Words joined by blanks."""
    words = ["<unk>", "hello", "world", "ö", "你", "."]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, **config: Any) -> Path:
    """Write tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
